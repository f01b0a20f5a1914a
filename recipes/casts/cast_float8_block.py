"""Cast to E4M3 or E5M2 with one float32 scale for each block of 1x128 or 128x128 values.

    amax      = max(max |x|, epsilon)         over the block; NaN counts as 0
    scale     = fl(max / amax)                1 if amax is 0 or Inf; the input dtype's largest finite number where the
                                              quotient is Inf; as an option rounded down to a power of two
    scale_inv = fl(1 / scale)
    code      = cast(clamp(fl(x * scale)))    to nearest, ties to even; Inf saturates, NaN stays in its element
    value     = fl(code * scale_inv)          exact in float32 for powers of two

All steps in float32. A partial block counts as if padded by zeros; grouped rows begin new blocks with each group. A
block dimension of 1 is 128 values along the axis that is contracted, 2 is 128x128 values.

Layout of x [T, K], with P = T rounded up to 128. The columnwise codes are transposed, and scales are contiguous along
the axis that is not contracted, as a matrix product reads both.

                                      1 dimension              2 dimensions
    row_codes         x's shape
    row_scale_inv                     [ceil(K / 128), T]       [P / 128, ceil(K / 128)]
    column_codes      [K, P]
    column_scale_inv                  [P / 128, K]             [ceil(K / 128), P / 128]

Stacked weights [G, N, K] have a leading G everywhere, and N in place of P in column_codes: no padding. Grouped rows
have C = splits.aligned_capacity(128) in place of P, and group g's rows stand there from splits.aligned(128)[g] on.
Padding, blocks without rows and rows past the sum have codes of 0 and scales of 1, whatever stands there.

On CUDA one Triton kernel casts both copies in one pass; it reads nothing from the device on the host. Source:
TransformerEngine's Float8BlockScaling (read at d0067d0).
"""

# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast_float8 import (
    FLOAT32_MAX,
    abs_without_nan,
    format_of,
    round_to_float8_ref,
    scale_from_amax_ref,
    scale_inv_ref,
)
from recipes.casts.cast_float8_block_triton import cast_float8_block_kernel, dequantize_float8_block_kernel
from recipes.tensors.formats import Float8Format
from recipes.tensors.splits import Splits
from recipes.triton.launch import Launch, cdiv

BLOCK = 128
DEQUANTIZE_WARPS = 8  # measured on H200


class BlockCopies(NamedTuple):
    """Codes in a float8 dtype and scale_inv in float32; both of a copy that is not made are None."""

    row_codes: Tensor | None
    row_scale_inv: Tensor | None
    column_codes: Tensor | None
    column_scale_inv: Tensor | None


class BlockScale(NamedTuple):
    """How the scale of a block comes from its values. block_dim: 1 is 1x128, 2 is 128x128."""

    form: Float8Format
    block_dim: int
    power_2_scale: bool
    amax_epsilon: float


# ---------------------------------------------------------------------------------------------------------- references


def cast_float8_block_ref(
    x: Tensor, how: BlockScale, *, rowwise: bool, columnwise: bool, stacked: bool = False, splits: Splits | None = None
) -> BlockCopies:
    """`cast_float8_block` in plain torch."""
    x32, largest = x.to(torch.float32).contiguous(), largest_scale(x.dtype)
    if splits is None:
        matrix = x32 if stacked else x32.reshape(_rows(x), x.shape[-1])
        width = matrix.shape[-2] if stacked else _up(matrix.shape[-2])
        made = _cast_ref(matrix, how, largest, width, rowwise=rowwise, columnwise=columnwise)
        return made if made.row_codes is None else made._replace(row_codes=made.row_codes.view(x.shape))
    inactive = (splits.group_of_row == splits.num_groups)[:, None]
    x32 = x32.masked_fill(inactive, 0.0)
    capacity = splits.aligned_capacity(BLOCK)
    place = splits.row_in_padded(BLOCK).masked_fill(inactive[:, 0], capacity)  # one more row, for rows past the sum
    padded = x32.new_zeros(capacity + 1, x32.shape[1]).index_copy_(0, place, x32)[:capacity]
    in_place = how.block_dim == 2
    whole = _cast_ref(padded, how, largest, capacity, rowwise=rowwise and in_place, columnwise=columnwise)
    if not rowwise:
        return whole
    if whole.row_codes is None:
        rows = _cast_ref(x32, how, largest, len(x32), rowwise=True, columnwise=False)
        return whole._replace(row_codes=rows.row_codes, row_scale_inv=rows.row_scale_inv)
    codes = torch.nn.functional.pad(whole.row_codes.view(torch.uint8), (0, 0, 0, 1)).index_select(0, place)
    return whole._replace(row_codes=codes.view(how.form.dtype))


def dequantize_float8_block_ref(
    codes: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    *,
    shape: torch.Size,
    transposed: bool,
    splits: Splits | None = None,
) -> Tensor:
    """`dequantize_float8_block` in plain torch."""
    stacked = scale_inv.ndim == 3
    matrix = codes if stacked or transposed else codes.reshape(_rows(codes), shape[-1])
    factor = scale_inv
    if transposed:
        matrix = matrix.mT
    if transposed == (block == (BLOCK, BLOCK)):  # along the axis that is not contracted, else natural already
        factor = factor.mT
    in_padded = splits is not None and (transposed or block == (BLOCK, BLOCK))
    if not in_padded:
        values = matrix.to(torch.float32) * _spread(factor, block, matrix.shape)
        num_rows = shape[-2] if stacked else math.prod(shape[:-1])
        return values[..., :num_rows, :].reshape(shape).to(dtype)
    assert splits is not None
    place = splits.row_in_padded(BLOCK)
    factor = _spread(factor, block, torch.Size((splits.aligned_capacity(BLOCK), shape[-1])))
    inactive = splits.group_of_row == splits.num_groups
    values = matrix.to(torch.float32)
    values = (values.index_select(0, place) if transposed else values) * factor.index_select(0, place)
    return values.masked_fill(inactive[:, None], 0.0).to(dtype)


def largest_scale(dtype: torch.dtype) -> float:
    """What stands for a scale of Inf: the input dtype's largest number, and float32's for float64."""
    return FLOAT32_MAX if dtype == torch.float64 else torch.finfo(dtype).max


def _cast_ref(
    x: Tensor, how: BlockScale, largest: float, width: int, *, rowwise: bool, columnwise: bool
) -> BlockCopies:  # fmt: skip
    """Both copies of x [..., R, K] float32; column_codes [..., K, width]."""

    def cast(block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        amax = _block_amax(x, block)
        scale = scale_from_amax_ref(amax, how.form, how.power_2_scale, how.amax_epsilon, largest)
        return round_to_float8_ref(x * _spread(scale, block, x.shape), how.form), scale_inv_ref(scale)

    copies = BlockCopies(None, None, None, None)
    if rowwise:
        codes, scale_inv = cast(blocks_of(how.block_dim, columnwise=False))
        scale_inv = scale_inv if how.block_dim == 2 else scale_inv.mT.contiguous()
        copies = copies._replace(row_codes=codes, row_scale_inv=scale_inv)
    if columnwise:
        codes, scale_inv = cast(blocks_of(how.block_dim, columnwise=True))
        codes = torch.nn.functional.pad(codes.view(torch.uint8).mT, (0, width - x.shape[-2])).contiguous()
        scale_inv = scale_inv.mT.contiguous() if how.block_dim == 2 else scale_inv
        copies = copies._replace(column_codes=codes.view(how.form.dtype), column_scale_inv=scale_inv)
    return copies


def blocks_of(block_dim: int, *, columnwise: bool) -> tuple[int, int]:
    """Rows and columns, in the natural order, that share a scale."""
    if block_dim == 2:
        return BLOCK, BLOCK
    return (BLOCK, 1) if columnwise else (1, BLOCK)


def _block_amax(x: Tensor, block: tuple[int, int]) -> Tensor:
    """[..., ceil(R / rows), ceil(K / columns)] of x [..., R, K]."""
    R, K = x.shape[-2:]
    padded = torch.nn.functional.pad(abs_without_nan(x), (0, -K % block[1], 0, -R % block[0]))
    tiles = padded.unflatten(-1, (-1 if K else 0, block[1])).unflatten(-3, (-1 if R else 0, block[0]))
    return tiles.amax((-3, -1))


def _spread(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """The scale of each value of [..., R, K]."""
    for dim, length in ((-2, block[0]), (-1, block[1])):
        scale = scale.repeat_interleave(length, dim).narrow(dim, 0, shape[dim]) if length > 1 else scale
    return scale


# -------------------------------------------------------------------------------------------------------------- config


class CastConfig(NamedTuple):
    """registers: the most that a thread may have; None leaves it to the compiler."""

    num_warps: int
    registers: int | None


def cast_config(itemsize: int, native: bool) -> CastConfig:
    """For a tile of 128x128 values, which hold whole blocks in both directions. Warps are measured on H200.

    Eight warps have all they need with 168 registers; left alone, ptxas 12.8 spills to run two programs at once.
    native: the GPU converts to float8 itself; in integers that takes more.
    """
    if itemsize <= 2:
        return CastConfig(num_warps=4, registers=None)
    return CastConfig(num_warps=8, registers=168 if native else None)


# ----------------------------------------------------------------------------------------------------------- launchers

_cast_float8_block = Launch(cast_float8_block_kernel)
_dequantize_float8_block = Launch(dequantize_float8_block_kernel)


def cast_float8_block(
    x: Tensor, how: BlockScale, *, rowwise: bool, columnwise: bool, stacked: bool = False, splits: Splits | None = None
) -> BlockCopies:
    """Both copies of x [..., K], in the layout above.

    stacked: x is weights [G, N, K], each group by itself
    splits: x [T, K] is rows in groups, each by itself
    """
    run = cast_float8_block_on_triton if x.is_cuda else cast_float8_block_ref
    return run(x.detach(), how, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits)


def cast_float8_block_on_triton(
    x: Tensor, how: BlockScale, *, rowwise: bool, columnwise: bool, stacked: bool = False, splits: Splits | None = None
) -> BlockCopies:
    """`cast_float8_block` on any device: tests bring CPU tensors, under the interpreter.

    Rows of no multiple of 16 values are cast with zeros behind them: the compiler knows of no other multiple, and a
    tile that is read value by value does not fit into the registers.
    """
    beyond = -x.shape[-1] % 16
    if beyond:
        wide = torch.nn.functional.pad(x, (0, beyond))
        copies = cast_float8_block_on_triton(
            wide, how, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits
        )
        return _first_columns(copies, x.shape[-1], how)
    copies = _empty_copies(x, how, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits)
    matrices = x if stacked else x.reshape(1, _rows(x), x.shape[-1])
    cast_float8_block_triton(
        matrices.contiguous(),
        *copies,
        None if splits is None else splits.offsets,
        None if splits is None else splits.aligned(BLOCK),
        how,
        largest_scale(x.dtype),
    )
    return copies


def dequantize_float8_block(
    codes: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    *,
    shape: torch.Size,
    transposed: bool,
    splits: Splits | None = None,
) -> Tensor:
    """fl(code * scale_inv) of one copy, rounded to `dtype`, of this natural shape; 0 past the sum of the splits.

    block: rows and columns that share a scale; transposed: the copy is a columnwise one
    """
    run = dequantize_float8_block_on_triton if codes.is_cuda else dequantize_float8_block_ref
    return run(codes, scale_inv, dtype, block, shape=shape, transposed=transposed, splits=splits)


def dequantize_float8_block_on_triton(
    codes: Tensor,
    scale_inv: Tensor,
    dtype: torch.dtype,
    block: tuple[int, int],
    *,
    shape: torch.Size,
    transposed: bool,
    splits: Splits | None = None,
) -> Tensor:
    """`dequantize_float8_block` on any device, as above."""
    narrow = torch.float32 if dtype == torch.float64 else dtype
    out = torch.empty(shape, dtype=narrow, device=codes.device)
    matrices = out.view(shape if scale_inv.ndim == 3 else (1, _rows(out), shape[-1]))
    dequantize_float8_block_triton(
        codes.contiguous(),
        scale_inv.contiguous(),
        matrices,
        None if splits is None else splits.offsets,
        None if splits is None else splits.aligned(BLOCK),
        block == (BLOCK, BLOCK),
        transposed,
    )
    return out.to(dtype)


def cast_float8_block_triton(
    x_GTK: Tensor,
    row_codes: Tensor | None,
    row_scale_inv: Tensor | None,
    column_codes: Tensor | None,
    column_scale_inv: Tensor | None,
    offsets: Tensor | None,
    aligned: Tensor | None,
    how: BlockScale,
    largest: float,
) -> None:
    """Launch the cast of contiguous x: [1, T, K], or [G, N, K] whose groups are of one size. All tensors contiguous."""
    codes = row_codes if row_codes is not None else column_codes
    if codes is None or not x_GTK.shape[0] * x_GTK.shape[2]:
        return
    groups, rows, columns = x_GTK.shape
    transposed = None if column_codes is None else _words(column_codes)
    form = format_of(how.form, codes.device)
    config = cast_config(x_GTK.element_size(), bool(form["NATIVE"]))
    row_blocks = _row_blocks(rows, offsets)
    programs = groups * (row_blocks + (offsets is not None)) * cdiv(columns, BLOCK)
    if not programs:
        return
    _cast_float8_block(
        x_GTK, programs,
        x_GTK, _bytes(row_codes), row_scale_inv, transposed, column_scale_inv, offsets, aligned,
        rows, columns, 0 if transposed is None else transposed.shape[-1], row_blocks,
        0 if offsets is None else len(offsets) - 1, how.amax_epsilon,
        SQUARE=how.block_dim == 2, POWER_2=how.power_2_scale, LARGEST=largest, PACKED=_packed(transposed),
        **form, num_warps=config.num_warps, maxnreg=config.registers,
    )  # fmt: skip


def dequantize_float8_block_triton(
    codes: Tensor,
    scale_inv: Tensor,
    out_GTK: Tensor,
    offsets: Tensor | None,
    aligned: Tensor | None,
    square: bool,
    transposed: bool,
) -> None:
    """Launch the dequantization into out: [1, T, K] or [G, N, K]. All tensors contiguous."""
    groups, rows, columns = out_GTK.shape
    given = _words(codes) if transposed else codes.view(torch.uint8)
    row_blocks = _row_blocks(rows, offsets)
    programs = groups * (row_blocks + (offsets is not None)) * cdiv(columns, BLOCK)
    if not out_GTK.numel():
        return
    _dequantize_float8_block(
        codes, programs,
        given, scale_inv, out_GTK, offsets, aligned,
        rows, columns, given.shape[-1], row_blocks, 0 if offsets is None else len(offsets) - 1,
        SQUARE=square, TRANSPOSED=transposed, PACKED=_packed(given),
        **format_of(codes.dtype, codes.device), num_warps=DEQUANTIZE_WARPS,
    )  # fmt: skip


def _empty_copies(
    x: Tensor, how: BlockScale, *, rowwise: bool, columnwise: bool, stacked: bool, splits: Splits | None
) -> BlockCopies:
    lead = x.shape[:1] if stacked else ()
    rows, columns = x.shape[-2] if stacked else _rows(x), x.shape[-1]
    padded = _up(rows) if splits is None else splits.aligned_capacity(BLOCK)
    row_blocks, column_blocks = padded // BLOCK, cdiv(columns, BLOCK)
    square = how.block_dim == 2

    def empty(wanted: bool, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> Tensor | None:
        return torch.empty(shape, dtype=dtype, device=x.device) if wanted else None

    return BlockCopies(
        empty(rowwise, x.shape, how.form.dtype),
        empty(rowwise, (*lead, row_blocks, column_blocks) if square else (*lead, column_blocks, rows)),
        empty(columnwise, (*lead, columns, rows if stacked else padded), how.form.dtype),
        empty(columnwise, (*lead, column_blocks, row_blocks) if square else (*lead, row_blocks, columns)),
    )


def _first_columns(copies: BlockCopies, columns: int, how: BlockScale) -> BlockCopies:
    """Copies of the first columns of what was cast, which end in the same block."""
    row_codes, row_scale_inv, column_codes, column_scale_inv = copies
    if row_codes is not None:
        row_codes = row_codes[..., :columns].contiguous()
    if column_codes is not None and column_scale_inv is not None:
        column_codes = column_codes[..., :columns, :].contiguous()
        column_scale_inv = column_scale_inv if how.block_dim == 2 else column_scale_inv[..., :columns].contiguous()
    return BlockCopies(row_codes, row_scale_inv, column_codes, column_scale_inv)


def _bytes(codes: Tensor | None) -> Tensor | None:
    return None if codes is None else codes.view(torch.uint8)


def _words(codes: Tensor) -> Tensor:
    """Four codes at a time, where the rows allow it; else bytes."""
    return codes.view(torch.uint8 if codes.shape[-1] % 4 or not codes.numel() else torch.int32)


def _packed(codes: Tensor | None) -> bool:
    return codes is not None and codes.dtype == torch.int32


def _row_blocks(rows: int, offsets: Tensor | None) -> int:
    """How many blocks of 128 rows there can be, those of unknown groups included."""
    return cdiv(rows, BLOCK) if offsets is None else (rows + (len(offsets) - 1) * (BLOCK - 1)) // BLOCK


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _up(rows: int) -> int:
    return cdiv(rows, BLOCK) * BLOCK
