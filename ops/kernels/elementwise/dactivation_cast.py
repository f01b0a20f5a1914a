"""`dactivation` of gated bfloat16 activations on Hopper, with dh and act quantized by kernels in Gluon.

To FP8 with one scale a group, which is given, known, or follows from dh's amax at a meeting; where most groups are very
large, dh is computed before for its amaxes alone (`all_meet`). With a scale for each row and column: groups that are
small enough find amaxes at meetings, and of larger ones dh is computed twice. Or with a scale for each 128 values. What
is not taken here the element-wise kernel does (`chain.py`), or a cast from memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ops.kernels.elementwise.chain import Step, backward_constants, chain_constants, runs_triton
from ops.kernels.elementwise.chain_cast import (
    Cast,
    at_meetings,
    cast_constants,
    cast_into,
    codes_of,
    in_groups,
    num_groups,
    places_of,
    row_tiles,
)
from ops.kernels.elementwise.share_sums import sum_shares
from recipes.casts.cast_float8 import BLOCK as ALIGNMENT
from recipes.casts.cast_float8 import few_programs, programs_of_groups, rows_that_meet, usual_rows
from recipes.casts.scale_rules import Float32Scale
from recipes.tensors.formats import ALL, Float8Format, ScaleSpec
from recipes.tensors.quantizer import QuantizedBuffers
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import Launch, cdiv, has_work, runs_gluon
from recipes.triton.meeting import WORDS, MeetingTile

if why_no_gluon((9, 0)) is None:
    from ops.kernels.elementwise.dactivation_blocks_gluon import dactivation_blocks_gluon_kernel
    from ops.kernels.elementwise.dactivation_gluon import dactivation_amax_gluon_kernel, dactivation_gluon_kernel
    from ops.kernels.elementwise.dactivation_vectors_gluon import (
        dactivation_vector_amaxes_gluon_kernel,
        dactivation_vectors_gluon_kernel,
    )
    from recipes.casts.boxes_gluon import boxes_of

    _dactivation, _amax = Launch(dactivation_gluon_kernel), Launch(dactivation_amax_gluon_kernel)
    _dactivation_blocks = Launch(dactivation_blocks_gluon_kernel)
    _dactivation_vectors = Launch(dactivation_vectors_gluon_kernel)
    _vector_amaxes = Launch(dactivation_vector_amaxes_gluon_kernel)

# Four programs share a multiprocessor: 48 KB of shared memory and 16384 registers each.
TILE = MeetingTile(block_m=64, block_k=128, num_warps=4, registers=128)
BOX = (64, 64)  # rows and columns that the copy engine brings at once
BLOCK = 128  # values that have one scale, and the rows and columns of a program that quantizes them, of eight warps
SHARE = 64  # columns of act whose part of dscales is one sum


def fits_gluon(dtype: torch.dtype, columns: int, step: Step, device: torch.device) -> bool:
    """Whether the kernels are for such an h, of so many columns of act: halves of bfloat16, whole units of codes."""
    if not step.gated or step.interleave or dtype != torch.bfloat16 or columns % 16:
        return False
    return runs_gluon(device)


def fits(step: Step, h: Tensor, *others: Tensor) -> bool:
    """Whether they are, for these tensors: h, and others of its dtype."""
    tensors = h, *others
    if torch.compiler.is_dynamo_compiling() or not runs_triton(*tensors):
        return False
    if not has_work(h):  # it may have no address
        return False
    for x in tensors:
        if x.ndim != 2 or x.dtype != h.dtype or not x.is_contiguous() or x.data_ptr() % 16:  # the copy engine reads it
            return False
    return fits_gluon(h.dtype, h.shape[1] // 2, step, h.device)


def casts_of(
    dact: Tensor, h: Tensor, step: Step, dh_into: QuantizedBuffers | None, act_into: QuantizedBuffers | None
) -> tuple[Cast, Cast | None] | None:
    """The casts of dh and act with which a kernel here runs; None: none does. act's is of a columnwise copy alone."""
    if dh_into is None or not fits(step, h, dact):
        return None
    cast = at_meetings(dh_into, h, dact.shape[1], TILE) or cast_into(dh_into)
    act_cast = None if act_into is None else cast_into(act_into)
    casts = [cast] if act_cast is None else [cast, act_cast]
    if not in_groups(cast) or (act_cast is not None and act_cast.row_codes is not None):
        return None
    if casts[-1].column_codes is not None and casts_alone(dact.shape[1], [one.spec for one in casts]):
        return cast, act_cast
    known = {"given", "known"}
    if cast.kind not in known | {"meeting"} or (act_cast is not None and act_cast.kind not in known):
        return None
    return cast, act_cast


def casts_alone(columns: int, specs: Sequence[ScaleSpec]) -> bool:
    """Whether only a kernel here computes dh and act, of so many columns, and quantizes them by all of these: with a
    scale for each 128 values, or for each row and column."""
    return all(map(_of_vectors, specs)) or (columns % BLOCK == 0 and all(map(_of_blocks, specs)))


def _of_blocks(spec: ScaleSpec) -> bool:
    """Whether each 128 values have a float32 scale."""
    return _has_float32_scales(spec, BLOCK, BLOCK)


def _of_vectors(spec: ScaleSpec) -> bool:
    """Whether each row, and each column of a group, has one."""
    return _has_float32_scales(spec, ALL, ALIGNMENT)


def _has_float32_scales(spec: ScaleSpec, values: int, alignment: int) -> bool:
    layout = spec.block, spec.columnwise, spec.alignment, spec.transform
    return (
        type(spec.element) is Float8Format
        and type(spec.scale_rule) is Float32Scale
        and layout == ((1, values), "transposed", alignment, None)
    )


def dactivation_cast(
    dact: Tensor,
    h: Tensor,
    step: Step,
    scales: Tensor | None,
    cast: Cast,
    act_cast: Cast | None,
    *,
    need_dh: bool,
    need_dscales: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """Quantizes dh and act into these, from `casts_of`. Returns dh and dscales [T], in float32, if they are needed."""
    rows, columns = dact.shape
    dh = torch.empty_like(h) if need_dh else None
    shares = dact.new_empty((cdiv(columns, SHARE), rows), dtype=torch.float32) if need_dscales else None
    scales = None if scales is None else scales.contiguous()
    boxes = (boxes_of(x, *BOX) for x in (dact, h))
    tensors = *boxes, scales, shares, None if dh is None else dh.view(torch.int32)
    constants = cast_constants(cast, dact) | cast_constants(act_cast, dact, "Y_") | _functions(step, h.dtype)
    if _of_vectors(cast.spec):
        _launch_vectors(dact, h, tensors, cast, act_cast, constants)
    elif _of_blocks(cast.spec):
        columnwise = act_cast or cast
        assert columnwise.column_codes is not None, "`casts_of` says so"
        blocks = columnwise.column_codes.shape[-1] // BLOCK
        del constants["CAST"], constants["Y_CAST"]
        _dactivation_blocks(
            dact, (blocks + 1) * (columns // BLOCK),  # one more for the rows past the sum
            *tensors, *_codes_and_scales(cast), *_codes_and_scales(act_cast)[2:], cast.offsets, columnwise.aligned,
            rows, columns, blocks, num_groups(cast), **constants, num_warps=8, maxnreg=128,
        )  # fmt: skip
    else:
        assert cast.offsets is not None, "`casts_of` says so"
        meets = cast.how == "meeting"
        if cast.tile is not None and not meets:
            _find_amaxes(dact, h, step, scales, cast)
        programs = programs_of_groups(h, rows, columns, cast.offsets, TILE, meets)
        _dactivation(
            dact, programs.launched,
            *tensors, codes_of(cast), codes_of(act_cast), rows, columns, places_of(cast, act_cast), num_groups(cast),
            programs.most, programs.log2_rows, **constants, num_warps=TILE.num_warps, maxnreg=TILE.registers,
        )  # fmt: skip
    return dh, None if shares is None else sum_shares(shares)


def _launch_vectors(
    dact: Tensor, h: Tensor, tensors: tuple[Any, ...], cast: Cast, act_cast: Cast | None, constants: dict[str, Any]
) -> None:
    """Launch, of the amaxes of groups that are too large to meet, too."""
    rows, columns = dact.shape
    groups, columnwise = num_groups(cast), act_cast or cast
    assert columnwise.column_codes is not None, "`casts_of` says so"
    of_cast, of_act = _codes_and_scales(cast), _codes_and_scales(act_cast)[2:]
    most = rows_that_meet(h, columns, TILE, usual_rows(rows, groups)) or 0
    # In one memory, so that one launch makes them 0: the meetings, and the amaxes of what is made.
    found = (groups * WORDS, of_cast[1], of_cast[3], of_act[1])
    sizes = [0 if one is None else one if isinstance(one, int) else one.numel() for one in found]
    memory = torch.zeros(sum(sizes), dtype=torch.int32, device=h.device).split(sizes)
    meetings, *amaxes = (None if one is None else part for one, part in zip(found, memory, strict=True))
    tiles = row_tiles(cast, rows, TILE.block_m) * cdiv(columns, TILE.block_k)
    about = {name: value for name, value in constants.items() if name not in ("CAST", "Y_CAST")}
    if rows > most:
        functions = {name: about[name] for name in ("STEPS", "BACKWARDS", "CONSTANTS", "SOURCE", "enable_fp_fusion")}
        _vector_amaxes(
            dact, few_programs(h, tiles) if most else tiles,
            dact.view(torch.int32), h.view(torch.int32), tensors[2], *amaxes, cast.offsets, rows, columns, groups, most,
            tiles, **functions, num_warps=TILE.num_warps, maxnreg=96,
        )  # fmt: skip
    _dactivation_vectors(
        dact, tiles,
        *tensors, *of_cast, *of_act, meetings, *amaxes, cast.offsets, columnwise.aligned, rows, columns,
        columnwise.column_codes.shape[-1], groups, most, **about, num_warps=TILE.num_warps, maxnreg=TILE.registers,
    )  # fmt: skip


def _find_amaxes(dact: Tensor, h: Tensor, step: Step, scales: Tensor | None, cast: Cast) -> None:
    """Those of dh of all groups."""
    rows, columns = dact.shape
    backward = {name: value for name, value in _functions(step, h.dtype).items() if name != "STEPS"}
    _amax(
        dact, row_tiles(cast, rows, TILE.block_m) * cdiv(columns, TILE.block_k),
        dact.view(torch.int32), h.view(torch.int32), scales, cast.meetings, cast.offsets, rows, columns,
        num_groups(cast), **backward, num_warps=TILE.num_warps,
    )  # fmt: skip


def _functions(step: Step, dtype: torch.dtype) -> dict[str, Any]:
    """Compile-time arguments."""
    about = chain_constants((step,), (dtype,)) | backward_constants((step,), (dtype,))
    return {name: about[name] for name in ("STEPS", "BACKWARDS", "CONSTANTS", "SOURCE")} | {"enable_fp_fusion": False}


def _codes_and_scales(cast: Cast | None) -> tuple[Tensor | None, ...]:
    """Codes as words of four."""
    if cast is None:
        return None, None, None, None
    row, column = cast.row_codes, cast.column_codes
    return (
        None if row is None else row.view(torch.int32), cast.row_scales,
        None if column is None else column.view(torch.int32), cast.column_scales,
    )  # fmt: skip
