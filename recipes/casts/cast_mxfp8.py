"""Cast to MXFP8: one E8M0 scale for each 32 values along an axis, or for 32x32 values.

    E     = smallest byte with 2^(E - 127) >= fl(amax * fl(1 / max)),  at most 254;  NaN counts as 0 in amax
    code  = cast(clamp(fl(x * 2^(127 - E))))   to nearest, ties to even; Inf saturates, NaN stays in its element
    value = code * 2^(E - 127)                 exact in float32 and, above its subnormals, in bfloat16

As an option E = max(0, floor(log2 amax) - emax + 127), emax 8 or 15: the largest values of a block may saturate then.

A partial block counts as if padded by zeros. All in natural order; scales are bytes (uint8). Grouped rows begin new
blocks of rows with each group: C = splits.aligned_capacity(32) / 32, where block `splits.block_of_row(32)[t]` is row
t's. Stacked weights [G, N, K] have a leading G everywhere.

    row_codes, column_codes     x's shape; one and the same tensor if blocks are 32x32
    row_scale                   [..., ceil(K / 32)]
    column_scale                [ceil(T / 32), K], grouped [C, K]

32x32 blocks have their scale in each of their 32 rows (row_scale) or columns (column_scale). Rows past the sum of the
splits and blocks without rows have codes and scales of 0, whatever stands there.

All steps in float32. On CUDA one Triton kernel makes both copies in one pass; it reads nothing from the device on the
host. Source: OCP Microscaling Formats v1.0, whose rule is the option; scale rounded up as TransformerEngine's
MXFP8BlockScaling (at d0067d0).
"""

# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast_float8 import abs_without_nan, format_of, round_to_float8_ref
from recipes.casts.cast_mxfp8_triton import cast_mxfp8_kernel, dequantize_mxfp8_kernel
from recipes.tensors.formats import E8M0_DTYPE, E8M0_LARGEST, Float8Format
from recipes.tensors.splits import Splits
from recipes.triton.launch import Launch, cdiv

BLOCK = 32

Scaling = Literal["round_up", "floor"]


class MXFP8Scale(NamedTuple):
    """How the scale of a block comes from its values. square: blocks of 32x32."""

    form: Float8Format
    scaling: Scaling = "round_up"
    square: bool = False


class MXFP8Copies(NamedTuple):
    """Codes in a float8 dtype and scales in uint8; both of a copy that is not made are None."""

    row_codes: Tensor | None
    row_scale: Tensor | None
    column_codes: Tensor | None
    column_scale: Tensor | None


# ---------------------------------------------------------------------------------------------------------- references


def scale_from_amax_ref(amax: Tensor, form: Float8Format, scaling: Scaling = "round_up") -> Tensor:
    """E8M0 bytes (uint8) from float32 amaxes of any shape."""
    if scaling == "floor":
        return ((amax.view(torch.int32) >> 23) - _largest_exponent(form)).clamp(min=0).to(torch.uint8)
    bits = (amax * (1.0 / form.max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Byte 0 is 2^-127, in float32 a subnormal with this mantissa: smaller numbers round up to it, not to byte 1.
    above = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return (exponent + above).clamp(max=E8M0_LARGEST).to(torch.uint8)


def scale_value(scale: Tensor) -> Tensor:
    """float32 2^(E - 127) of E8M0 bytes; 255 is NaN."""
    return scale.view(E8M0_DTYPE).to(torch.float32)


def scale_reciprocal(scale: Tensor) -> Tensor:
    """float32 2^(127 - E) of E8M0 bytes up to 254."""
    return scale_value(E8M0_LARGEST - scale)


def cast_mxfp8_ref(
    x: Tensor, how: MXFP8Scale, *, rowwise: bool, columnwise: bool, stacked: bool = False, splits: Splits | None = None
) -> MXFP8Copies:
    """`cast_mxfp8` in plain torch."""
    x32 = x.to(torch.float32)
    if splits is None and not stacked:
        x32 = x32.reshape(_rows(x), x.shape[-1])
    if splits is not None:
        x32 = x32.masked_fill(_inactive(splits), 0.0)
    R, K = x32.shape[-2:]
    magnitude = abs_without_nan(x32)

    def scales(amax: Tensor) -> Tensor:
        return scale_from_amax_ref(amax, how.form, how.scaling)

    def codes(factor: Tensor) -> Tensor:
        return round_to_float8_ref(x32 * factor, how.form).view(x.shape)

    copies = MXFP8Copies(None, None, None, None)
    square = scales(_block_amax(_row_block_amax(magnitude, splits))) if how.square else None
    if rowwise:
        scale = scales(_block_amax(magnitude)) if square is None else _spread_rows(square, R, splits)
        if square is not None and splits is not None:
            scale = scale.masked_fill(_inactive(splits), 0)
        shape = (*x.shape[:-1], scale.shape[-1])
        copies = copies._replace(row_codes=codes(_spread(scale_reciprocal(scale), -1, K)), row_scale=scale.view(shape))
    if columnwise:
        scale = scales(_row_block_amax(magnitude, splits)) if square is None else _spread(square, -1, K).contiguous()
        factor = _spread_rows(scale_reciprocal(scale), R, splits)
        copies = copies._replace(column_codes=codes(factor), column_scale=scale)
    return copies


def dequantize_mxfp8_ref(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, *, columnwise: bool, splits: Splits | None = None
) -> Tensor:
    """`dequantize_mxfp8` in plain torch."""
    factor = scale_value(scale)
    if not columnwise:
        factor = _spread(factor, -1, codes.shape[-1])
    else:
        num_rows = codes.shape[-2] if scale.ndim == 3 else _rows(codes)
        factor = _spread_rows(factor, num_rows, splits).reshape(codes.shape)
    return (codes.to(torch.float32) * factor).to(dtype)


def _block_amax(x: Tensor) -> Tensor:
    """[..., ceil(K / 32)]: the maxima of blocks along the last axis of x [..., K], which is not negative."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[-1] % BLOCK))
    return padded.unflatten(-1, (padded.shape[-1] // BLOCK, BLOCK)).amax(-1)


def _row_block_amax(x: Tensor, splits: Splits | None) -> Tensor:
    """[..., ceil(R / 32), K] of x [..., R, K]; with splits [C, K]."""
    if splits is None:
        return _block_amax(x.mT).mT.contiguous()
    amax = x.new_zeros(splits.aligned_capacity(BLOCK) // BLOCK, x.shape[1])
    return amax.scatter_reduce_(0, splits.block_of_row(BLOCK)[:, None].expand_as(x), x, "amax")


def _spread(scale: Tensor, dim: int, length: int) -> Tensor:
    """Each scale repeated for the values of its block along `dim`, which becomes `length` long."""
    return scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, length)


def _spread_rows(scale: Tensor, length: int, splits: Splits | None) -> Tensor:
    return _spread(scale, -2, length) if splits is None else scale.index_select(0, splits.block_of_row(BLOCK))


def _inactive(splits: Splits) -> Tensor:
    return (splits.group_of_row == splits.num_groups)[:, None]


def _largest_exponent(form: Float8Format) -> int:
    """emax: 8 of E4M3, 15 of E5M2; of a largest number of 1.5 * 2^7 7."""
    return math.frexp(form.max)[1] - 1


# -------------------------------------------------------------------------------------------------------------- config


class CastMXFP8Config(NamedTuple):
    """A program has 32 rows and BLOCK_K columns."""

    block_k: int
    num_warps: int


def cast_mxfp8_config(columns: int, *, both: bool) -> CastMXFP8Config:
    """Measured on H200. both: whether two copies are made, whose columns take registers."""
    if columns % 16:  # each element has an address of its own, which takes more
        return CastMXFP8Config(block_k=64, num_warps=4)
    return CastMXFP8Config(block_k=128, num_warps=2 if both else 1)


def dequantize_mxfp8_config() -> CastMXFP8Config:
    """Measured on H200."""
    return CastMXFP8Config(block_k=256, num_warps=4)


# ----------------------------------------------------------------------------------------------------------- launchers

_cast_mxfp8, _dequantize_mxfp8 = Launch(cast_mxfp8_kernel), Launch(dequantize_mxfp8_kernel)


def cast_mxfp8(
    x: Tensor, how: MXFP8Scale, *, rowwise: bool, columnwise: bool, stacked: bool = False, splits: Splits | None = None
) -> MXFP8Copies:
    """Both copies of x [..., K], in the layout above.

    stacked: x is weights [G, N, K], each group by itself
    splits: x [T, K] is rows in groups, each by itself
    """
    run = cast_mxfp8_on_triton if x.is_cuda else cast_mxfp8_ref
    return run(x.detach(), how, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits)


def cast_mxfp8_on_triton(
    x: Tensor, how: MXFP8Scale, *, rowwise: bool, columnwise: bool, stacked: bool = False, splits: Splits | None = None
) -> MXFP8Copies:
    """`cast_mxfp8` on any device: tests bring CPU tensors, under the interpreter."""
    row_blocks = None if splits is None else splits.aligned_capacity(BLOCK) // BLOCK
    copies = empty_mxfp8(
        x.shape, how.form, x.device, rowwise=rowwise, columnwise=columnwise, stacked=stacked, row_blocks=row_blocks
    )
    if how.square and rowwise:
        copies = copies._replace(column_codes=copies.row_codes if columnwise else None)
    cast_mxfp8_triton(
        (x if stacked else x.reshape(1, _rows(x), x.shape[-1])).contiguous(),
        *copies,
        None if splits is None else splits.offsets,
        None if splits is None else splits.aligned(BLOCK),
        how,
    )
    return copies


def dequantize_mxfp8(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, *, columnwise: bool, splits: Splits | None = None
) -> Tensor:
    """code * 2^(E - 127) of one copy, rounded to `dtype`. splits: of grouped rows."""
    run = dequantize_mxfp8_on_triton if codes.is_cuda else dequantize_mxfp8_ref
    return run(codes, scale, dtype, columnwise=columnwise, splits=splits)


def dequantize_mxfp8_on_triton(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, *, columnwise: bool, splits: Splits | None = None
) -> Tensor:
    """`dequantize_mxfp8` on any device, as above."""
    narrow = torch.float32 if dtype == torch.float64 else dtype
    out = torch.empty(codes.shape, dtype=narrow, device=codes.device)
    stacked, grouped = columnwise and scale.ndim == 3, columnwise and splits is not None
    dequantize_mxfp8_triton(
        codes.contiguous(),
        scale.contiguous(),
        out if stacked else out.view(1, _rows(out), out.shape[-1]),
        splits.offsets if grouped and splits is not None else None,
        splits.aligned(BLOCK) if grouped and splits is not None else None,
        columnwise,
    )
    return out.to(dtype)


def cast_mxfp8_triton(
    x_GTK: Tensor,
    row_codes: Tensor | None,
    row_scale: Tensor | None,
    column_codes: Tensor | None,
    column_scale: Tensor | None,
    offsets: Tensor | None,
    aligned: Tensor | None,
    how: MXFP8Scale,
) -> None:
    """Launch the cast of contiguous x: [1, T, K], or [G, N, K] whose groups are of one size. All tensors contiguous."""
    codes = row_codes if row_codes is not None else column_codes
    if codes is None or not x_GTK.shape[0] * x_GTK.shape[2]:
        return
    groups, rows, columns = x_GTK.shape
    config = cast_mxfp8_config(columns, both=row_codes is not None and column_codes is not None)
    row_blocks = _row_blocks(rows, offsets)
    programs = groups * (row_blocks + (offsets is not None)) * cdiv(columns, config.block_k)
    if not programs:
        return
    _cast_mxfp8(
        x_GTK, programs,
        x_GTK, _bytes(row_codes), row_scale, None if column_codes is row_codes else _bytes(column_codes),
        column_scale, offsets, aligned,
        rows, columns, row_blocks, 0 if offsets is None else len(offsets) - 1,
        SQUARE=how.square, FLOOR=how.scaling == "floor", **format_of(how.form, codes.device),
        BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip


def dequantize_mxfp8_triton(
    codes: Tensor,
    scale: Tensor,
    out_GTK: Tensor,
    offsets: Tensor | None,
    aligned: Tensor | None,
    columnwise: bool,
) -> None:
    """Launch the dequantization into out: [1, T, K] or [G, N, K]. All tensors contiguous."""
    groups, rows, columns = out_GTK.shape
    if not out_GTK.numel():
        return
    config = dequantize_mxfp8_config()
    row_blocks = _row_blocks(rows, offsets)
    programs = groups * (row_blocks + (offsets is not None)) * cdiv(columns, config.block_k)
    _dequantize_mxfp8(
        codes, programs,
        codes.view(torch.uint8), scale, out_GTK, offsets, aligned,
        rows, columns, row_blocks, 0 if offsets is None else len(offsets) - 1,
        COLUMNWISE=columnwise, **format_of(codes.dtype, codes.device),
        BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip


def empty_mxfp8(
    shape: torch.Size,
    form: Float8Format,
    device: torch.device,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    stacked: bool = False,
    row_blocks: int | None = None,
) -> MXFP8Copies:
    """Uninitialised codes and scales of a tensor of this shape. row_blocks: of grouped rows."""
    lead, columns = shape[:1] if stacked else (), shape[-1]
    if row_blocks is None:
        row_blocks = cdiv(shape[-2] if stacked else math.prod(shape[:-1]), BLOCK)

    def empty(wanted: bool, size: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Tensor | None:
        return torch.empty(size, dtype=dtype, device=device) if wanted else None

    return MXFP8Copies(
        empty(rowwise, shape, form.dtype),
        empty(rowwise, (*shape[:-1], cdiv(columns, BLOCK))),
        empty(columnwise, shape, form.dtype),
        empty(columnwise, (*lead, row_blocks, columns)),
    )


def _bytes(codes: Tensor | None) -> Tensor | None:
    return None if codes is None else codes.view(torch.uint8)


def _row_blocks(rows: int, offsets: Tensor | None) -> int:
    """How many blocks of 32 rows there can be, those of unknown groups included."""
    return cdiv(rows, BLOCK) if offsets is None else (rows + (len(offsets) - 1) * (BLOCK - 1)) // BLOCK


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])
