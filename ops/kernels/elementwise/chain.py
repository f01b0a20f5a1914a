"""Chains of element-wise functions: one kernel in forward and one in backward, composed of the functions.

    x_0 = x        x_{i+1} = f_i(x_i, operand_i)        y = x_n

    dx_n = dy      dx_i = dx_{i+1} * df_i / dx_i        d operand_i = sum of dx_{i+1} * df_i / d operand_i

A `Step` is one f_i: two Triton functions of tiles, passed to the kernels as compile-time arguments and inlined. The
same kernels run chains of any length, including user-defined steps. Backward recomputes the x_i from x.

Operands, by the step's `operand`:

    column    [C]       one number for each column (a bias)        its gradient is summed over the rows
    row       [T]       one factor for each row: f(x) * operand    its gradient is summed over the columns
    element   [T, C]    one number for each element (a residual)
    random    [1]       a seed; the step receives 16 random bits for each element (dropout); no gradient

Layouts: x [T, W], y [T, C], row-major. A chain has at most one gated step, which reads two columns for each output
column. Then W = 2 C, as halves [a | b] or as alternating runs of `interleave` columns, a first; otherwise W = C.

Precision: float32 within a step. After each step the value, and in backward its gradient, is rounded to that step's
dtype, as if it had been stored, and FMA contraction is disabled: a chain gives bit for bit what its steps give one by
one. Column and row gradients are summed in float32, within each program and then over the programs, in a fixed order;
no atomics.

Graph safety: the host never reads the device; seeds are read on the device.

The kernels are in `chain_triton.py`, the random bits in `recipes/triton/philox.py`.
"""
# T rows, C columns of y, W columns of x

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ops.kernels.elementwise.chain_cast import (
    Cast,
    cast_constants,
    codes_of,
    in_groups,
    num_groups,
    places_of,
    row_tiles,
)
from ops.kernels.elementwise.chain_triton import delementwise_kernel, elementwise_kernel
from ops.kernels.elementwise.share_sums import sum_shares
from recipes.casts.cast_float8 import casts_natively
from recipes.tensors.formats import ALL
from recipes.triton.gates import JITFunction, tl
from recipes.triton.launch import Launch, cdiv, has_work, next_power_of_2, replayed
from recipes.triton.philox import random_bits_ref

Kind = Literal["", "column", "row", "element", "random"]
_KINDS = get_args(Kind)


@dataclass(frozen=True)
class Step:
    """One function of a chain. Equal by value.

    forward, backward: Triton functions (`triton.jit`) of float32 tiles, with three compile-time constants A, B, C

        forward(x, A, B, C) -> y                  backward(dy, x, A, B, C) -> dx
        forward(x, operand, A, B, C) -> y         backward(dy, x, operand, A, B, C) -> dx        column, element, random
        forward(a, b, A, B, C) -> y               backward(dy, a, b, A, B, C) -> (da, db)        gated

    reference:  the same in torch, differentiable: (x, operand, A, B, C) -> y for float32 or float64 tensors. If gated,
                x holds both parts. operand broadcasts against x (random: int64 bits), or is None. A row operand is
                applied outside of it.
    operand:    the kind of operand (above), "" for none
    d_operand:  Triton function (dy, x, operand, A, B, C) -> the operand's gradient for each element; None: it is dy
    linear:     backward reads neither x nor, except for `random` and `row`, the operand
    gated, interleave: see above; interleave 0 means halves

    Raises ValueError for an operand of no such kind, and for constants that are not three numbers.
    """

    forward: JITFunction
    backward: JITFunction
    reference: Callable[..., Tensor]
    operand: Kind = ""
    d_operand: JITFunction | None = None
    constants: tuple[float, float, float] = (0.0, 0.0, 0.0)
    linear: bool = False
    gated: bool = False
    interleave: int = 0

    def __post_init__(self) -> None:
        if self.operand not in _KINDS:
            raise ValueError(f"Step got operand={self.operand!r}. Give one of {', '.join(map(repr, _KINDS))}.")
        three = isinstance(self.constants, tuple) and len(self.constants) == 3
        if not three or not all(isinstance(constant, (int, float)) for constant in self.constants):
            raise ValueError(f"Step got constants={self.constants!r}. Give a tuple of three numbers, 0.0 for none.")

    def __hash__(self) -> int:  # Steps are keys of every launch; hashing all fields would cost more than the launch.
        return hash((id(self.forward), self.operand, self.constants, self.interleave))


class ChainGradients(NamedTuple):
    """The results of `delementwise`; None for those that were not requested.

    dx [T, W] in the first dtype; operands: one for each step, column [C] and row [T] in float32 (float64), element
    [T, C] in the step's dtype; y: recomputed; column_sums [W]: dx summed over the rows, float32.
    """

    dx: Tensor | None
    operands: tuple[Tensor | None, ...]
    y: Tensor | None
    column_sums: Tensor | None


# ---------------------------------------------------------------------------------------------------- references


def elementwise_ref(
    x: Tensor, steps: Sequence[Step], operands: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]
) -> Tensor:
    """`elementwise` in plain torch, differentiable by autograd."""
    for step, operand, dtype in zip(steps, operands, dtypes, strict=True):
        x = _step_ref(_wide(x.to(dtype)), step, _operand_ref(x, step, operand)).to(dtype)
    return x


def delementwise_ref(
    dy: Tensor, x: Tensor, steps: Sequence[Step], operands: Sequence[Tensor | None], dtypes: Sequence[torch.dtype]
) -> ChainGradients:
    """`delementwise` in plain torch, with all results: autograd through the steps' references."""
    inputs = [x]
    for i, step in enumerate(steps):
        known = operands[i] is not None or step.operand == ""
        inputs.append(elementwise_ref(inputs[-1], [step], [operands[i]], [dtypes[i]]) if known else inputs[-1])
    gradients: list[Tensor | None] = [None] * len(steps)
    for i, step in reversed(list(enumerate(steps))):
        with torch.enable_grad():
            wide = _wide(inputs[i].to(dtypes[i])).detach().requires_grad_()
            operand = _operand_ref(inputs[i], step, operands[i])
            if operand is None and step.operand in ("column", "element"):
                operand = wide.new_zeros(wide.shape[-1] if step.operand == "column" else wide.shape)  # step is linear
            leaves = [wide]
            if operand is not None and operand.is_floating_point():
                operand = operand.detach().requires_grad_()
                leaves.append(operand)
            y = _step_ref(wide, step, operand)
            grads = torch.autograd.grad(y, leaves, _wide(dy.to(dtypes[i])))
        if len(grads) > 1:
            gradients[i] = grads[1].to(dtypes[i]) if step.operand == "element" else grads[1].flatten()
        dy = grads[0].to(dtypes[i])
        if i:
            dy = dy.to(dtypes[i - 1])
    return ChainGradients(dy, tuple(gradients), inputs[-1], _wide(dy).sum(0))


def _step_ref(x: Tensor, step: Step, operand: Tensor | None) -> Tensor:
    if step.operand == "row" and operand is not None:
        return step.reference(x, None, *step.constants) * operand
    return step.reference(x, operand, *step.constants)


def _operand_ref(x: Tensor, step: Step, operand: Tensor | None) -> Tensor | None:
    if operand is None or step.operand == "":
        return None
    if step.operand == "random":
        return random_bits_ref(operand, *x.shape)
    wide = _wide(operand)
    return wide[:, None] if step.operand == "row" else wide


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


# ------------------------------------------------------------------------------------------------ configurations


class ElementwiseConfig(NamedTuple):
    """The tile of y, how many vertically adjacent tiles one program computes, and compile options."""

    block_t: int
    block_c: int
    tiles: int
    num_warps: int
    num_stages: int = 1
    registers: int | None = None

    @property
    def options(self) -> dict[str, int]:
        """For Triton."""
        return {"num_warps": self.num_warps, **({"maxnreg": self.registers} if self.registers else {})}

    def programs(self, rows: int, columns: int) -> tuple[int, int]:
        """The numbers of row blocks and column blocks of the grid."""
        return cdiv(rows, self.block_t * self.tiles), cdiv(columns, self.block_c)

    def whole(self, rows: int, columns: int) -> bool:
        """Whether the tiles cover y exactly, so that no masks are needed."""
        return rows % (self.block_t * self.tiles) == 0 and columns % self.block_c == 0


# Of rows in groups: forward, and backward, which has four results to hold. Tiles were measured on an H200, before
# backward's stores had their present order.
_IN_GROUPS = ElementwiseConfig(32, 128, 1, 4), ElementwiseConfig(32, 64, 1, 4)
_IN_GROUPS_FLOAT16 = _IN_GROUPS[0], ElementwiseConfig(32, 64, 1, 8)  # with four warps ptxas 12.8 spills; not measured
# Of rows in groups whose amaxes are found, measured on an H200.
_FINDING_AMAXES = ElementwiseConfig(32, 128, 1, 4), ElementwiseConfig(8, 128, 1, 4)

PROGRAMS = 4096  # enough to keep all multiprocessors busy: about 31 on each of the H200's 132


@lru_cache(maxsize=1024)  # Triton's integer helpers would cost the host 5 us in each call
def elementwise_config(rows: int, columns: int, *, sums_rows: bool, casts: str = "") -> ElementwiseConfig:
    """Tiles for y [rows, columns].

    sums_rows: whether backward sums over the rows; each program then computes several tiles
    casts: how the result is quantized: in "blocks" of 32, none of which tiles split, with a "given" scale, or "" not
    """
    if casts or sums_rows:
        block_t, block_c, num_warps = 64 if casts else 32, 64, 4
        if casts == "blocks":  # each thread holds many columns and rows, so that block maxima are cheap
            block_t, block_c, num_warps = 32, 128, 2 if columns % 8 == 0 else 4
        tiles = rows * columns // (block_t * block_c * PROGRAMS) if sums_rows else 1
        return ElementwiseConfig(block_t, block_c, next_power_of_2(max(1, min(16, tiles))), num_warps, 3)
    block_c = min(2048 if rows == 1 else 1024, max(16, next_power_of_2(columns)))
    return ElementwiseConfig(2048 // block_c, block_c, 1, 4)


def _holding_rows(columns: int) -> ElementwiseConfig:
    """A tile that holds so many columns, whose scale it finds."""
    block_c = max(16, next_power_of_2(columns))
    return ElementwiseConfig(max(1, 4096 // block_c), block_c, 1, 4)


def _config(
    rows: int, columns: int, dtype: torch.dtype, *casts: Cast | None, sums_rows: bool = False, backward: bool = False
) -> ElementwiseConfig:
    kinds = [cast.kind for cast in casts if cast is not None]
    if any(in_groups(cast) for cast in casts):
        tile = next((cast.tile for cast in casts if cast is not None and cast.tile is not None), None)
        if tile is not None:
            return ElementwiseConfig(tile.block_m, tile.block_k, 1, tile.num_warps, registers=tile.registers)
        if set(kinds) == {"amax"}:
            return _FINDING_AMAXES[backward]
        if kinds == ["rows"]:
            width = next(cast.spec.block[1] for cast in casts if cast is not None)
            return _holding_rows(columns if width == ALL else width)
        return (_IN_GROUPS_FLOAT16 if dtype == torch.float16 else _IN_GROUPS)[backward]
    return elementwise_config(rows, columns, sums_rows=sums_rows, casts=kinds[0] if kinds else "")


# ------------------------------------------------------------------------------------------------------ launchers


def why_no_chain(steps: Sequence[Step]) -> str | None:
    """Why the kernels cannot run these steps as one chain, or None."""
    gates = [i for i, step in enumerate(steps) if step.gated]
    if len(gates) > 1:
        return f"The chain has {len(gates)} gated activations, and the element-wise kernel takes one."
    if gates and any(step.operand in ("random", "row") for step in steps[: gates[0]]):
        return "A dropout or a factor a row stands before a gated activation, whose tiles hold every column twice."
    return None


def elementwise(
    x: Tensor,
    steps: Sequence[Step],
    operands: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """y = f_{n-1}(... f_0(x)), [..., C].

    x: [..., W]. operands: one for each step, or None; column [C or W], row [...], element: the shape of the step's x.
    dtypes: for each step, that of its input and result; by default x's. out: the tensor to write y into; it may be x or
    an element operand. `why_no_chain(steps)` must be None. Runs in plain torch where `runs_triton` is False.
    """
    dtypes = [x.dtype] * len(steps) if dtypes is None else dtypes
    shape = _halved(x.shape) if _gate_of(steps) >= 0 else x.shape
    if not runs_triton(x, *operands, dtypes=dtypes):
        y = elementwise_ref(_flat(x), steps, _matrices(operands, steps), dtypes).view(shape)
        return y if out is None else out.copy_(y)
    y = torch.empty(shape, dtype=dtypes[-1], device=x.device) if out is None else out
    elementwise_triton(x.contiguous(), y, None, steps, [o if o is None else o.contiguous() for o in operands], dtypes)
    return y


def elementwise_cast(
    x: Tensor,
    cast: Cast,
    steps: Sequence[Step],
    operands: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype] | None = None,
    out: Tensor | None = None,
) -> None:
    """`elementwise`, the rounded result quantized into `cast`, and stored only in `out`: at meetings that of groups too
    large for them. For non-empty CUDA tensors."""
    dtypes = [x.dtype] * len(steps) if dtypes is None else dtypes
    x, operands = x.contiguous(), [o if o is None else o.contiguous() for o in operands]
    elementwise_triton(x, out, cast, steps, operands, dtypes)


def delementwise(
    dy: Tensor,
    x: Tensor | None,
    steps: Sequence[Step],
    operands: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype] | None = None,
    *,
    need_dx: bool = True,
    need_operands: Sequence[bool] | None = None,
    need_y: bool = False,
    need_column_sums: bool = False,
    cast: Cast | None = None,
    y_cast: Cast | None = None,
    keep_dx: bool = True,
) -> ChainGradients:
    """The gradients of `elementwise`, and its recomputed result for callers that saved only x.

    dy: [..., C]. x may be None if all steps are linear and y is not needed. The operand of a linear step may be None if
    no later step reads its x. cast, y_cast: the kernel quantizes dx and y into these, of rows in groups y and the dx of
    a gated chain too; with need_dx=False, need_y=False dx and y themselves are not stored. keep_dx=False: where the
    cast is a meeting, dx is stored of groups that are too large for it.
    """
    dtypes = [dy.dtype] * len(steps) if dtypes is None else dtypes
    needed = [False] * len(steps) if need_operands is None else list(need_operands)
    if not runs_triton(dy, x, *operands, dtypes=dtypes):
        return _delementwise_on_torch(dy, x, steps, operands, dtypes)
    gate = _gate_of(steps)
    new = dy.new_empty
    dx = new(_doubled(dy.shape) if gate >= 0 else dy.shape, dtype=dtypes[0]) if need_dx else None
    y = new(dy.shape, dtype=dtypes[-1]) if need_y else None
    sums_rows = need_column_sums or any(w and s.operand == "column" for w, s in zip(needed, steps, strict=True))
    some_cast = cast or y_cast
    rows, columns = _rows_and_columns(steps, dy.shape, sums_rows=sums_rows, casts=some_cast is not None)
    width = columns * 2 if gate >= 0 else columns
    config = _config(rows, columns, dtypes[0], cast, y_cast, sums_rows=sums_rows, backward=True)
    row_blocks, column_blocks = config.programs(rows, columns)
    shares: list[Tensor | None] = []
    for i, (step, need, dtype) in enumerate(zip(steps, needed, dtypes, strict=True)):
        own = width if i < gate else columns
        if not need:
            shares.append(None)
        elif step.operand == "column":
            shares.append(new((own,) if row_blocks == 1 else (row_blocks, own), dtype=torch.float32))
        elif step.operand == "row":
            shares.append(new(dy.shape[:-1] if column_blocks == 1 else (column_blocks, rows), dtype=torch.float32))
        elif i == len(steps) - 1 and step.d_operand is None:
            shares.append(None)  # the gradient is dy itself
        else:
            shares.append(new(_doubled(dy.shape) if i < gate else dy.shape, dtype=dtype))
    column_shares = new((row_blocks, width), dtype=torch.float32) if need_column_sums else None
    dy, x = dy.contiguous(), x if x is None else x.contiguous()
    operands = [o if o is None else o.contiguous() for o in operands]
    delementwise_triton(dy, x, dx, cast, y, y_cast, steps, operands, shares, column_shares, dtypes, config, keep_dx)
    gradients: list[Tensor | None] = []
    for step, need, share in zip(steps, needed, shares, strict=True):
        if share is None:
            gradients.append(dy if need else None)
        elif step.operand == "column":
            gradients.append(share if row_blocks == 1 else share.sum(0))
        elif step.operand == "row":
            total = share if column_blocks == 1 else sum_shares(share)
            gradients.append(total if total.ndim == dy.ndim - 1 else total.view(dy.shape[:-1]))
        else:
            gradients.append(share)
    return ChainGradients(dx, tuple(gradients), y, None if column_shares is None else column_shares.sum(0))


def runs_triton(*tensors: Tensor | None, dtypes: Sequence[torch.dtype] = ()) -> bool:
    """Whether the Triton kernels run for these tensors: on CUDA, except in float64. Otherwise plain torch runs."""
    given = [tensor for tensor in tensors if tensor is not None]
    return given[0].is_cuda and torch.float64 not in (*dtypes, *(tensor.dtype for tensor in given))


def _delementwise_on_torch(
    dy: Tensor,
    x: Tensor | None,
    steps: Sequence[Step],
    operands: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype],
) -> ChainGradients:
    """The references, for tensors of any shape. Without x, dy replaces it: linear steps do not read its values."""
    like_x = dy if x is None else x
    found = delementwise_ref(_flat(dy), _flat(like_x), steps, _matrices(operands, steps), dtypes)
    gate = _gate_of(steps)
    gradients = list(found.operands)
    for i, (d, step) in enumerate(zip(found.operands, steps, strict=True)):
        if d is not None and step.operand == "row":
            gradients[i] = d.view(dy.shape[:-1])
        elif d is not None and step.operand == "element":
            gradients[i] = d.view(_doubled(dy.shape) if i < gate else dy.shape)
    assert found.dx is not None and found.y is not None, "the reference gives everything"
    return found._replace(dx=found.dx.view(like_x.shape), operands=tuple(gradients), y=found.y.view(dy.shape))


def _flat(x: Tensor) -> Tensor:
    return x.reshape(x.shape[:-1].numel(), x.shape[-1] if x.dim() else 1)


def _halved(shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:-1], shape[-1] // 2))


def _doubled(shape: torch.Size) -> torch.Size:
    return torch.Size((*shape[:-1], shape[-1] * 2))


def _matrices(operands: Sequence[Tensor | None], steps: Sequence[Step]) -> list[Tensor | None]:
    """Element operands as matrices, row operands as vectors."""
    flattened: dict[str, Callable[[Tensor], Tensor]] = {"element": _flat, "row": lambda o: o.flatten()}
    return [
        o if o is None or step.operand not in flattened else flattened[step.operand](o)
        for o, step in zip(operands, steps, strict=True)
    ]


_elementwise, _delementwise = Launch(elementwise_kernel), Launch(delementwise_kernel)


@replayed
def elementwise_triton(
    x: Tensor,
    y: Tensor | None,
    cast: Cast | None,
    steps: Sequence[Step],
    operands: Sequence[Tensor | None],
    dtypes: Sequence[torch.dtype],
) -> None:
    """Launch `elementwise` on contiguous tensors."""
    if not has_work(x):
        return
    gated = _gate_of(steps) >= 0
    shape = _halved(x.shape) if gated else x.shape
    rows, columns = _rows_and_columns(steps, shape, sums_rows=False, casts=cast is not None)
    config = _config(rows, columns, dtypes[0], cast)
    _elementwise(
        x, _num_programs(config, rows, columns, cast),
        x, y, codes_of(cast), tuple(operands), rows, columns, columns * (1 + gated), places_of(cast), num_groups(cast),
        cast.most if cast else 0,
        **chain_constants(tuple(steps), tuple(dtypes)), **cast_constants(cast, x), NATIVE=casts_natively(x.device),
        KEEP=cast is None or cast.how != "meeting", BLOCK_T=config.block_t, BLOCK_C=config.block_c,
        WHOLE=config.whole(rows, columns) and not in_groups(cast), **config.options, enable_fp_fusion=False,
    )  # fmt: skip


@replayed
def delementwise_triton(
    dy: Tensor,
    x: Tensor | None,
    dx: Tensor | None,
    cast: Cast | None,
    y: Tensor | None,
    y_cast: Cast | None,
    steps: Sequence[Step],
    operands: Sequence[Tensor | None],
    shares: Sequence[Tensor | None],
    column_shares: Tensor | None,
    dtypes: Sequence[torch.dtype],
    config: ElementwiseConfig,
    keep_dx: bool,
) -> None:
    """Launch `delementwise` on contiguous tensors. Partial sums: [row blocks, columns] or [column blocks, rows]."""
    if not has_work(dy):
        return
    sums = column_shares is not None or any(share is not None for share in shares)
    some_cast = cast or y_cast
    rows, columns = _rows_and_columns(steps, dy.shape, sums_rows=sums, casts=some_cast is not None)
    _delementwise(
        dy, _num_programs(config, rows, columns, some_cast),
        dy, x, tuple(operands), dx, codes_of(cast), tuple(shares), y, codes_of(y_cast), column_shares, rows, columns,
        columns * (1 + (_gate_of(steps) >= 0)), places_of(cast, y_cast), num_groups(some_cast),
        cast.most if cast else 0,
        **chain_constants(tuple(steps), tuple(dtypes)), **backward_constants(tuple(steps), tuple(dtypes)),
        **cast_constants(cast, dy), **cast_constants(y_cast, dy, "Y_"), NATIVE=casts_natively(dy.device),
        KEEP=keep_dx or cast is None or cast.how != "meeting",
        BLOCK_T=config.block_t, BLOCK_C=config.block_c, WHOLE=config.whole(rows, columns) and not in_groups(some_cast),
        TILES=config.tiles, STAGES=config.num_stages, **config.options, enable_fp_fusion=False,
    )  # fmt: skip


def _num_programs(config: ElementwiseConfig, rows: int, columns: int, cast: Cast | None) -> int:
    row_blocks, column_blocks = config.programs(rows, columns)
    return (row_tiles(cast, rows, config.block_t) if in_groups(cast) else row_blocks) * column_blocks


def _rows_and_columns(
    steps: Sequence[Step], shape: Sequence[int], *, sums_rows: bool, casts: bool
) -> tuple[int, int]:  # fmt: skip
    """The rows and columns of y, as one long row if no step depends on the division into rows."""
    if sums_rows or casts or any(step.gated or step.operand in ("column", "row", "random") for step in steps):
        return math.prod(shape[:-1]), shape[-1]
    return 1, math.prod(shape)


def _gate_of(steps: Sequence[Step]) -> int:
    return next((i for i, step in enumerate(steps) if step.gated), -1)


class _Hashed(tuple):
    """A tuple that caches its hash: Triton hashes the constants at every launch, and its functions are slow to hash."""

    def __init__(self, items: Iterable[object]) -> None:
        self._hash = hash(tuple(self))

    def __hash__(self) -> int:
        return self._hash


_TRITON_DTYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@lru_cache(maxsize=1024)
def chain_constants(steps: tuple[Step, ...], dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """Compile-time arguments of both kernels. SOURCE: a hash of the steps' functions, because Triton's disk cache
    identifies functions among constants only by name."""
    functions = [function for step in steps for function in (step.forward, step.backward, step.d_operand)]
    source = "".join(getattr(function, "cache_key", repr(function)) for function in functions)
    gate = _gate_of(steps)
    return {
        "STEPS": _Hashed(step.forward for step in steps),
        "KINDS": tuple(step.operand for step in steps),
        "CONSTANTS": tuple(number for step in steps for number in step.constants),
        "DTYPES": _Hashed(_TRITON_DTYPES[dtype] for dtype in dtypes),
        "ENTERS": tuple(i > 0 and dtype != dtypes[i - 1] for i, dtype in enumerate(dtypes)),
        "COUNT": len(steps),
        "GATE": gate,
        "INTERLEAVE": steps[gate].interleave if gate >= 0 else 0,
        "SOURCE": hashlib.sha256(source.encode()).hexdigest()[:16],
    }


@lru_cache(maxsize=1024)
def backward_constants(steps: tuple[Step, ...], dtypes: tuple[torch.dtype, ...]) -> dict[str, Any]:
    """Further compile-time arguments of the backward kernel."""
    behind = dtypes[1:] + dtypes[-1:]
    return {
        "LEAVES": tuple(dtype != after for dtype, after in zip(dtypes, behind, strict=True)),
        "BACKWARDS": _Hashed(step.backward for step in steps),
        "D_OPERANDS": _Hashed(step.d_operand for step in steps),
        "READS": tuple(not step.linear for step in steps),
    }
