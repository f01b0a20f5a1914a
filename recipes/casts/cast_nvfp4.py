"""Cast to NVFP4: E2M1 codes, one E4M3 scale for each 16 values along an axis, one float32 amax above them.

    S_enc = min(fl(2688 / amax), FLT_MAX)         1 if amax is 0 or Inf; 2688 = 6 * 448
    S_dec = fl(1 / S_enc)
    s     = E4M3(min(fl(amax_block * fl(S_enc * fl(1/6))), FLT_MAX))        saturating
    e     = min(fl(1 / fl(s * S_dec)), FLT_MAX)
    code  = E2M1(fl(x * e))                       to nearest, ties to even, or stochastic; saturating, also from Inf
    value = code * s * alpha,  alpha = fl(amax / 2688), 1 if amax is Inf    code * s is exact in bfloat16 and float16

amax is one number for a tensor or a group, taken of the very copy that is cast, or one for each row (rowwise copies
only). A block is 1x16 along the axis that is contracted, or 16x16 (weights: both copies then have the same codes). A
partial block counts as if padded by zeros. -0 keeps its sign.

NaN counts as 0 in every amax. E2M1 has no NaN, so a block that holds one gets the scale NaN (0x7F) and codes of 0: all
16 (256) of its values are NaN, and the NaN shows in the result. This is a choice of ours; TransformerEngine loses it.

Columnwise copies of inputs and gradients may be transformed before they are cast: `hadamard.py`. The transform spreads
an Inf or NaN over its 16 rows. Of bfloat16 x its result is rounded to bfloat16 before anything else is taken of it, the
amaxes too, as TransformerEngine does without its fast-math switch; `round_rht=False` keeps float32, as that with it. Of
other x, which TransformerEngine does not transform, it stays in float32.

An amax of Inf makes S_enc and alpha 1. A block with the Inf has the scale 448, and the Inf becomes 6 * 448 = 2688; in
other blocks of the tensor or group, magnitudes of more than 2688 become 2688, and blocks whose amax is 6 * 2^-10 or
less become 0. Under the transform all 16 numbers of the Inf's block are +-2688, or NaN where two Infs cancel.

Stochastic rounding (gradients): up with probability RNE(512 f) / 512, where f is the distance from the lower neighbour
in units of the step; numbers that are representable never move. The 9 random bits depend on the seed, the copy, the
element's column and its row within its group alone: the bits of a group do not depend on the groups before it, and
groups quantized alone with the same seed give the same codes. A rowwise block has those of its place on K and its row
(`block_bits_ref`). In each place of 16x16 the columns 2k and 2k + 1 have the bits of the rows k and k + 8: so one draw
can serve both copies (in Gluon it does), in each of which every block has bits of its own. No product has both copies
in it.

Layout: two codes a byte along the contracted axis, the even one in the low nibble; scales float8_e4m3fn.

    rowwise     codes [..., T, ceil(K / 2)], scales [..., T, ceil(K / 16)]
    columnwise  transposed: codes [..., K, P / 2], scales [..., K, P / 16], with P = T rounded up to 16; of grouped rows
                P = splits.aligned_capacity(16) and group g begins at splits.aligned(16)[g]. What lies between: 0

Two scales of each block may be tried, and the better one taken: `FourOverSix`, in `nvfp4_blocks.py`.

16x16 scales are written once for each of their 16 rows. x is [T, K], [T, K] with splits, or [G, N, K] of which every
group counts by itself. Rows past the sum of the splits count as 0, whatever x holds there.

`*_ref` is plain torch and the definition. Nothing here waits for the device. Sources: OCP Microscaling Formats v1.0
(E2M1); numerics and layout as TransformerEngine's NVFP4BlockScaling (read at d0067d0).
"""
# T rows, P rows with the padding, K columns, L values along the contracted axis, R the others

from __future__ import annotations

import math
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast import abs_without_nan, block_amax
from recipes.casts.cast_nvfp4_triton import amax_nvfp4_kernel, cast_nvfp4_kernel
from recipes.casts.hadamard import hadamard_ref
from recipes.casts.layout import as_bytes
from recipes.casts.nvfp4_blocks import BLOCK, cast_blocks_ref
from recipes.casts.scale_rules import FourOverSix
from recipes.tensors.formats import ALL, E4M3
from recipes.tensors.splits import Splits
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import Launch, cdiv, has_work, next_power_of_2
from recipes.triton.philox import block_bits_ref

if why_no_gluon((9, 0)) is None:
    from recipes.casts.boxes_gluon import boxes_of
    from recipes.casts.cast_nvfp4_gluon import cast_nvfp4_gluon_kernel

    _cast_nvfp4_gluon = Launch(cast_nvfp4_gluon_kernel)


class Amaxes(NamedTuple):
    """max |x| of each copy, None for a copy that is not made: () float32, [G], or of rows [..., T] with zeros in the
    rows of no group."""

    rowwise: Tensor | None
    columnwise: Tensor | None


class Codes(NamedTuple):
    """Codes and scales of both copies; None for one that was not requested. Of `cast_rows_to_values_nvfp4` a copy may
    hold code * s in bfloat16 instead, and no scales: rowwise [T, K], columnwise [P, K]."""

    rowwise: Tensor | None
    rowwise_scale: Tensor | None
    columnwise: Tensor | None
    columnwise_scale: Tensor | None


def amax_nvfp4_ref(
    x: Tensor,
    splits: Splits | None,
    *,
    rowwise: bool,
    columnwise: bool,
    rht: bool,
    row_scaled: bool,
    round_rht: bool = True,
) -> Amaxes:
    """The amaxes that `cast_nvfp4_ref` takes."""
    of_rows = of_columns = None
    if rowwise and row_scaled:
        magnitudes = torch.nn.functional.pad(abs_without_nan(x.to(torch.float32)), (0, 1))  # a row may have no columns
        of_rows = _active(magnitudes.amax(-1, keepdim=True), splits)[..., 0]
    elif rowwise:
        of_rows = _amax(x.to(torch.float32), splits)
    if columnwise and rht:
        padded_splits = None if splits is None else splits.padded(BLOCK)
        of_columns = _amax(_transformed(_padded(x, splits), x.dtype, round_rht), padded_splits)
    elif columnwise:
        of_columns = of_rows if rowwise and not row_scaled else _amax(x.to(torch.float32), splits)
    return Amaxes(of_rows, of_columns)


def cast_nvfp4_ref(
    x: Tensor,
    splits: Splits | None,
    amaxes: Amaxes,
    *,
    rht: bool,
    row_scaled: bool,
    two_d: bool,
    seed: Tensor | None,
    round_rht: bool = True,
    four_over_six: FourOverSix | None = None,
) -> Codes:
    """Codes and scales of the copies that have an amax. two_d: blocks of 16x16.

    rht: transform the columnwise copy; round_rht: and round it to bfloat16, if x is bfloat16
    seed: [1] int64 for stochastic rounding, None for nearest
    four_over_six: try two scales of each block
    """
    row_codes = row_scale = column_codes = column_scale = None
    if amaxes.rowwise is not None:
        rows, divided = (_padded(x, splits), splits and splits.padded(BLOCK)) if two_d else (_blocks(x), splits)
        amax = amaxes.rowwise
        if row_scaled:
            amax = amax[..., None]
        elif divided is not None:
            amax = amax.index_select(0, _any_group(divided))[:, None]
        else:
            amax = amax[..., None, None]
        bits = None if seed is None else _row_bits(seed, rows, divided)
        codes, scale = cast_blocks_ref(rows, amax, two_d, bits, four_over_six)
        ready = partial(_cropped, x=x, splits=splits) if two_d else partial(_active, splits=splits)
        row_codes = ready(_packed(codes))[..., : (x.shape[-1] + 1) // 2].contiguous()
        row_scale = ready(scale)
    if amaxes.columnwise is not None:
        padded, divided = _padded(x, splits), splits and splits.padded(BLOCK)
        amax = amaxes.columnwise
        amax = amax[..., None, None] if divided is None else amax.index_select(0, _any_group(divided)[::BLOCK])
        bits = None if seed is None else _column_bits(seed, padded, divided)
        transposed = (_transformed(padded, x.dtype, round_rht) if rht else padded).transpose(-1, -2)
        codes, scale = cast_blocks_ref(transposed, amax, two_d, bits, four_over_six)
        column_codes, column_scale = (t[..., : x.shape[-1], :].contiguous() for t in (_packed(codes), scale))
    return Codes(row_codes, row_scale, column_codes, column_scale)


def _transformed(padded: Tensor, dtype: torch.dtype, round_rht: bool) -> Tensor:
    """The transform of float32 numbers that came in this dtype."""
    return hadamard_ref(padded, rounded=round_rht and dtype == torch.bfloat16)


def _row_bits(seed: Tensor, rows: Tensor, splits: Splits | None) -> Tensor:
    """The bits of the rowwise copy of rows [..., T, K], [T, K]."""
    block = torch.arange(rows.shape[-1] // BLOCK, device=rows.device)
    return _bits(seed, block, _row_in_group(rows, splits)[:, None])


def _column_bits(seed: Tensor, padded: Tensor, splits: Splits | None) -> Tensor:
    """The bits of the columnwise copy of rows [..., P, K], [K, P]."""
    column = torch.arange(padded.shape[-1], device=padded.device)[:, None]
    place, k = column // BLOCK, column % BLOCK
    return _bits(seed, place, _row_in_group(padded, splits)[::BLOCK] + k // 2 + 8 * (k % 2))


def _bits(seed: Tensor, block: Tensor, row: Tensor) -> Tensor:
    """The bits of adjacent blocks, [..., 16 B] of [..., B] after broadcasting."""
    return block_bits_ref(seed, *torch.broadcast_tensors(block, row)).flatten(-2)


class NVFP4Config(NamedTuple):
    """block_r: blocks of 16 rows of a tile; block_c: its columns; tiles: how many of them a program visits.

    band: tiles below each other whose programs are neighbours; columns: of a tile that are cast at once, or in
    dequantization those that a thread decodes; registers: the most that a thread may have, None: the compiler's choice
    """

    block_r: int
    block_c: int
    num_warps: int
    tiles: int = 1
    band: int = 1
    columns: int = 0
    registers: int | None = None


def amax_nvfp4_config(columns: int, *, row_scaled: bool) -> NVFP4Config:
    registers = 136 if row_scaled else None  # left alone, ptxas spills at 128 where rows are grouped
    return NVFP4Config(4, 128 if columns % BLOCK == 0 else 64, 4, tiles=8, registers=registers)


def cast_nvfp4_config(columns: int, itemsize: int, *, both: bool, stochastic: bool) -> NVFP4Config:
    """Tiles of the kernel in Triton. A thread casts two blocks of rows at once, and then the two blocks of two columns.

    Few registers, so that many programs run at once and hide each other's loads: the fastest measured on an H200
    (`bench/results/tuning.md`). Where rows do not begin at multiples of 32 bytes every element has its own address, so
    that a thread has registers for one block of rows.
    """
    config = NVFP4Config(block_r=4, block_c=256, num_warps=4, band=16, columns=64)
    if columns % BLOCK:
        return config._replace(block_c=128, registers=248)  # left alone, ptxas spills to run a third program
    if stochastic:
        return config._replace(registers=80 if itemsize == 2 else 96)
    if 8 * (-columns % 512) <= columns:  # little of the last tile is empty
        config = config._replace(block_c=512, num_warps=8, columns=128)
    if itemsize > 2:
        return config._replace(registers=96)  # left alone, ptxas spills a few bytes where rows are grouped
    return config._replace(registers=72 if both else 80)


def gluon_config(*, rht: bool, stochastic: bool, row_values: bool = False) -> NVFP4Config:
    """Tiles of the kernel in Gluon: four warps or more, of 64 columns each. row_values: beside columnwise codes.

    Six programs share a multiprocessor, or five where 80 registers would spill (`bench/results/tuning.md`).
    """
    registers = 96 if row_values else 80
    if stochastic:
        registers = 80 if rht else 88
    return NVFP4Config(4, 256, 4, band=16, registers=registers)


_amax_nvfp4, _cast_nvfp4 = Launch(amax_nvfp4_kernel), Launch(cast_nvfp4_kernel)


def amax_nvfp4(
    x: Tensor,
    splits: Splits | None,
    *,
    rowwise: bool,
    columnwise: bool,
    rht: bool,
    row_scaled: bool,
    round_rht: bool = True,
) -> Amaxes:
    """max |x| of each requested copy, in one read of x; the columnwise one after the transform.

    x: [T, K] float, [T, K] with splits, or [G, N, K]. The copies share one tensor where their amaxes are the same.
    """
    run = amax_nvfp4_triton if runs_triton(x) else amax_nvfp4_ref
    return run(x, splits, rowwise=rowwise, columnwise=columnwise, rht=rht, row_scaled=row_scaled, round_rht=round_rht)


def cast_nvfp4(
    x: Tensor,
    splits: Splits | None,
    amaxes: Amaxes,
    *,
    rht: bool,
    row_scaled: bool,
    two_d: bool,
    seed: Tensor | None,
    round_rht: bool = True,
    four_over_six: FourOverSix | None = None,
) -> Codes:
    """Codes and scales of the copies that have an amax, in one read of x. Takes what `cast_nvfp4_ref` takes."""
    kind = {"rht": rht, "row_scaled": row_scaled, "two_d": two_d, "round_rht": round_rht}
    if not runs_triton(x) or four_over_six is not None:
        return cast_nvfp4_ref(x, splits, amaxes, **kind, seed=seed, four_over_six=four_over_six)
    made = empty_codes(x, splits, rowwise=amaxes.rowwise is not None, columnwise=amaxes.columnwise is not None)
    cast_nvfp4_triton(x, splits, amaxes, made, **kind, seed=seed)
    return made


def cast_rows_to_values_nvfp4(
    x: Tensor,
    splits: Splits,
    amaxes: Amaxes,
    *,
    column_codes: bool,
    rht: bool,
    seed: Tensor | None,
    round_rht: bool = True,
) -> Codes:
    """As `cast_nvfp4` and `dequantize_nvfp4` after it, both copies of rows in groups for which `writes_values`, in
    blocks of 1x16. (Of 16x16 with columnwise values ptxas 12.8 does not compile the kernel.)

    column_codes: the columnwise copy is codes, as `cast_nvfp4` makes it.
    """
    made = empty_codes(x, splits, rowwise=False, columnwise=column_codes)
    made = made._replace(rowwise=torch.empty_like(x))
    if not column_codes:
        made = made._replace(columnwise=x.new_empty(splits.aligned_capacity(BLOCK), x.shape[1]))
    launch = _Grid(x, splits, gluon_config(rht=rht, stochastic=seed is not None, row_values=column_codes))
    cast_nvfp4_gluon(launch, amaxes, made, rht=rht, two_d=False, seed=seed, round_rht=round_rht)
    return made


def writes_values(x: Tensor, splits: Splits) -> bool:
    """Whether a kernel writes the values of both copies of these rows in place of their codes."""
    if not has_work(x) or not runs_gluon(x) or not x.is_contiguous():
        return False
    return fits_gluon(x, splits.aligned_capacity(BLOCK) // BLOCK)


def runs_triton(x: Tensor) -> bool:
    return x.is_cuda


def runs_gluon(x: Tensor) -> bool:
    """Whether the kernel in Gluon can run for x. A quantizer under torch.compile uses that in Triton, with which the
    Inductor of torch 2.11 fails too (operations are not traced, so this concerns bare quantizers only)."""
    if x.dtype != torch.bfloat16 or not x.is_cuda or torch.compiler.is_dynamo_compiling():
        return False
    return why_no_gluon(torch.cuda.get_device_capability(x.device)) is None


def fits_gluon(x: Tensor, blocks: int) -> bool:
    """Whether rows are whole blocks and aligned for the copy engine, and columns of the codes, of so many blocks, whole
    memory sectors."""
    return x.shape[-1] % BLOCK == 0 and x.data_ptr() % 16 == 0 and blocks % 4 == 0


def empty_codes(x: Tensor, splits: Splits | None, *, rowwise: bool, columnwise: bool) -> Codes:
    """Uninitialised codes and scales of the copies of x."""
    T, K = x.shape[-2:]
    P = splits.aligned_capacity(BLOCK) if splits is not None else cdiv(T, BLOCK) * BLOCK
    row, column = (*x.shape[:-1],), (*x.shape[:-2], K)

    def empty(*shape: int) -> tuple[Tensor, Tensor]:
        *rest, length = shape
        codes = x.new_empty(*rest, cdiv(length, 2), dtype=torch.uint8)
        return codes, x.new_empty(*rest, cdiv(length, BLOCK), dtype=E4M3.dtype)

    return Codes(
        *(empty(*row, K) if rowwise else (None, None)),
        *(empty(*column, P) if columnwise else (None, None)),
    )


def amax_nvfp4_triton(
    x: Tensor,
    splits: Splits | None,
    *,
    rowwise: bool,
    columnwise: bool,
    rht: bool,
    row_scaled: bool,
    round_rht: bool = True,
) -> Amaxes:
    shape = () if x.ndim == 2 and splits is None else (_num_groups(x, splits),)
    shared = rowwise and columnwise and not rht and not row_scaled
    of_rows = of_columns = None
    if rowwise and columnwise and rht and not row_scaled:
        of_rows, of_columns = _two_zeros(x, shape)
    else:
        if rowwise:
            of_rows = x.new_zeros(x.shape[:-1] if row_scaled else shape, dtype=torch.float32)
        if columnwise:
            of_columns = of_rows if shared else x.new_zeros(shape, dtype=torch.float32)
    if has_work(x) and (rowwise or columnwise):
        config = amax_nvfp4_config(x.shape[-1], row_scaled=row_scaled)
        launch = _Grid(x, splits, config)
        _amax_nvfp4(
            x, launch.grid,
            launch.x, *launch.offsets, of_rows, None if shared else of_columns, *launch.sizes, x.shape[-1],
            STACKED=x.ndim == 3, ROW_SCALED=row_scaled, RHT=rht, ROUND_RHT=_rounds(x, rht, round_rht),
            TILES=config.tiles, BLOCK_R=config.block_r, BLOCK_C=config.block_c, num_warps=config.num_warps,
            maxnreg=config.registers,
        )  # fmt: skip
    return Amaxes(of_rows, of_columns)


def cast_nvfp4_triton(
    x: Tensor,
    splits: Splits | None,
    amaxes: Amaxes,
    made: Codes,
    *,
    rht: bool,
    row_scaled: bool,
    two_d: bool,
    seed: Tensor | None,
    round_rht: bool = True,
) -> None:
    """Writes `made`, from `empty_codes`, by the kernel in Gluon where it supports this, else by that in Triton."""
    if not has_work(x):
        for tensor in made:
            if tensor is not None:
                tensor.view(torch.uint8).zero_()  # the padding of no rows
        return
    if runs_gluon(x) and not row_scaled and made.columnwise is not None:
        launch = _Grid(x, splits, gluon_config(rht=rht, stochastic=seed is not None))
        if fits_gluon(launch.x, launch.sizes[-1]):
            cast_nvfp4_gluon(launch, amaxes, made, rht=rht, two_d=two_d, seed=seed, round_rht=round_rht)
            return
        x = launch.x
    both = amaxes.rowwise is not None and amaxes.columnwise is not None
    config = cast_nvfp4_config(x.shape[-1], min(x.element_size(), 4), both=both, stochastic=seed is not None)
    launch = _Grid(x, splits, config)
    pairs = x.dtype == torch.bfloat16 and x.shape[-1] % BLOCK == 0 and launch.x.data_ptr() % 4 == 0
    codes = made.columnwise.view(torch.int64) if made.columnwise is not None else None
    _cast_nvfp4(
        x, launch.grid,
        launch.x, *launch.offsets, *amaxes, seed, made.rowwise, as_bytes(made.rowwise_scale), codes,
        as_bytes(made.columnwise_scale), *launch.sizes, K=x.shape[-1], STACKED=x.ndim == 3, PAIRS=pairs,
        ROW_SCALED=row_scaled, RHT=rht, ROUND_RHT=_rounds(x, rht, round_rht), SQUARE=two_d,
        NATIVE=converts_to_float8(x), BLOCK_R=config.block_r, BLOCK_C=config.block_c,
        COLUMNS_AT_ONCE=config.columns, num_warps=config.num_warps, maxnreg=config.registers,
    )  # fmt: skip


def cast_nvfp4_gluon(
    launch: _Grid, amaxes: Amaxes, made: Codes, *, rht: bool, two_d: bool, seed: Tensor | None, round_rht: bool = True
) -> None:
    """Writes `made`, which has a columnwise copy, by the kernel in Gluon; x must be as `fits_gluon` says."""
    columns = made.columnwise
    x, config = launch.x, launch.config
    assert columns is not None and config.block_r == 4 and config.block_c == 64 * config.num_warps
    chunk = min(max(next_power_of_2(launch.sizes[1] + 1), 32), 128) if launch.offsets[0] is not None else 32
    _cast_nvfp4_gluon(
        x, launch.grid,
        boxes_of(x, 16, config.block_c), *launch.offsets, *amaxes, seed,
        _words_of(made.rowwise), as_bytes(made.rowwise_scale),
        columns.view(torch.int64) if columns.dtype == torch.uint8 else _words_of(columns),
        as_bytes(made.columnwise_scale), *launch.sizes, K=x.shape[-1], STACKED=x.ndim == 3, RHT=rht,
        ROUND_RHT=_rounds(x, rht, round_rht), SQUARE=two_d, CHUNK=chunk, num_warps=config.num_warps,
        maxnreg=config.registers,
    )  # fmt: skip


class _Grid:
    """Arguments of the kernels over x: x, offsets of its groups, sizes; and a grid: rows in a band, columns, bands."""

    def __init__(self, x: Tensor, splits: Splits | None, config: NVFP4Config) -> None:
        *groups, T, K = x.shape
        self.config = config
        block_m = BLOCK * config.block_r
        self.x = (x.float() if x.dtype == torch.float64 else x).contiguous()
        self.offsets: tuple[Tensor | None, Tensor | None] = (None, None)
        if splits is None:
            self.sizes = T, math.prod(groups), cdiv(T, BLOCK)
            slots = math.prod(groups) * cdiv(T, block_m)
        else:
            num_groups = splits.num_groups
            self.offsets = splits.offsets, splits.aligned(BLOCK)
            self.sizes = T, num_groups, splits.aligned_capacity(BLOCK) // BLOCK
            slots = cdiv(splits.aligned_capacity(BLOCK), block_m)
        band = min(slots, max(config.band, cdiv(slots, 65535)))  # more programs than that have no place on an axis
        self.grid = (band, cdiv(K, config.block_c * config.tiles), cdiv(slots, band))


def _words_of(copy: Tensor | None) -> Tensor | None:
    """Values as words of two, or codes."""
    return copy if copy is None or copy.dtype == torch.uint8 else copy.view(torch.int32)


def _rounds(x: Tensor, rht: bool, round_rht: bool) -> bool:
    return rht and round_rht and x.dtype == torch.bfloat16


def _num_groups(x: Tensor, splits: Splits | None) -> int:
    return splits.num_groups if splits is not None else math.prod(x.shape[:-2])


def _two_zeros(x: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Two float32 tensors of zeros, made by one kernel, aligned to 16 bytes: for others Triton would compile again."""
    count = math.prod(shape)
    both = x.new_zeros(2, cdiv(count, 4) * 4, dtype=torch.float32)[:, :count].view(2, *shape)
    return both[0], both[1]


def _packed(codes: Tensor) -> Tensor:
    low, high = codes.unflatten(-1, (codes.shape[-1] // 2, 2)).unbind(-1)
    return (low | high << 4).to(torch.uint8)


def _blocks(x: Tensor) -> Tensor:
    """x in float32, its rows padded by zeros to multiples of 16 columns."""
    return torch.nn.functional.pad(x.to(torch.float32), (0, -x.shape[-1] % BLOCK))


def _row_in_group(x: Tensor, splits: Splits | None) -> Tensor:
    """Of each row of x [..., T, K] its number in its group."""
    row = torch.arange(x.shape[-2], device=x.device)
    return row if splits is None else row - splits.offsets.index_select(0, splits.group_of_row)


def _any_group(splits: Splits) -> Tensor:
    """The group of each row, any for a row of none."""
    return splits.group_of_row.clamp(max=splits.num_groups - 1)


def _padded(x: Tensor, splits: Splits | None) -> Tensor:
    """x in float32, both its sides, and each group's rows, padded by zeros to multiples of 16."""
    x = _blocks(x)
    if splits is None:
        return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[-2] % BLOCK))
    # One row more takes the rows of no group.
    active = splits.group_of_row < splits.num_groups
    capacity = splits.aligned_capacity(BLOCK)
    to = torch.where(active, splits.row_in_padded(BLOCK), capacity)
    padded = x.new_zeros(capacity + 1, x.shape[1])
    return padded.index_copy_(0, to, x)[:-1] if x.shape[0] else padded[:-1]


def _cropped(padded: Tensor, x: Tensor, splits: Splits | None) -> Tensor:
    """The rows of x out of its padded form; 0 for those of no group."""
    if splits is None:
        return padded[..., : x.shape[-2], :].contiguous()
    if not padded.shape[0]:
        return padded.new_zeros(x.shape[0], padded.shape[1])
    rows = padded.view(torch.uint8) if padded.dtype == E4M3.dtype else padded
    return _active(rows.index_select(0, splits.row_in_padded(BLOCK)).view(padded.dtype), splits)


def _active(rows: Tensor, splits: Splits | None) -> Tensor:
    """The rows, with 0 for those of no group."""
    if splits is None:
        return rows
    inactive = splits.group_of_row == splits.num_groups
    raw = rows.view(torch.uint8) if rows.dtype == E4M3.dtype else rows
    return raw.masked_fill(inactive[:, None], 0).view(rows.dtype)


def _amax(x: Tensor, splits: Splits | None) -> Tensor:
    """max |x|: () of one tensor, [G] of groups and stacks."""
    amax = block_amax(abs_without_nan(x), (ALL, ALL), splits)
    return amax.view(()) if x.ndim == 2 and splits is None else amax.flatten()


def converts_to_float8(x: Tensor) -> bool:
    """Whether the GPU converts to float8 itself."""
    return x.is_cuda and torch.cuda.get_device_capability(x.device) >= (8, 9)
