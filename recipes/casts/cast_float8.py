"""Cast to E4M3 or E5M2 with one float32 scale for each tensor or group.

    amax      = max(max |x|, epsilon)         NaN counts as 0
    scale     = fl(max / amax)                1 if amax is 0 or Inf; the largest float32 where the quotient is Inf; as
                                              an option rounded down to a power of two
    scale_inv = fl(1 / scale)
    code      = cast(clamp(fl(x * scale)))    to nearest, ties to even; Inf saturates, NaN stays in its element

All steps in float32. The scale may be given instead (delayed scaling); then amax is found in the same read of x.

Layout of x [T, K], with P = T rounded up to 32. The columnwise codes are transposed, as a matrix product reads them.

    row_codes      x's shape
    column_codes   [K, P]
    scale_inv      (), of both copies

Stacked weights [G, N, K]: column_codes [G, K, N] without padding, scale_inv [G]. Grouped rows: column_codes [K, C] with
C = splits.aligned_capacity(32), group g's rows from splits.aligned(32)[g] on; scale_inv [G], 1 for an empty group.
Padding and rows past the sum have codes of 0, whatever stands there.

On CUDA two Triton kernels compute: one finds amax (a maximum does not depend on the order, so atomics do no harm), one
casts both copies in one pass. Nothing is read from the device on the host. Source: TransformerEngine's
Float8CurrentScaling and DelayedScaling (read at d0067d0).
"""

# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast_float8_triton import (
    amax_kernel,
    cast_float8_kernel,
    dequantize_codes_kernel,
    transpose_back_kernel,
)
from recipes.tensors.formats import E4M3, E5M2, Float8Format
from recipes.tensors.splits import Splits
from recipes.triton.launch import Launch, cdiv
from recipes.triton.row_slots import num_slots

# Groups begin at multiples of it in column_codes: whole sectors of memory. Of 16, wgrad takes 1.3 times as long (H200).
BLOCK = 32

FLOAT32_MAX = torch.finfo(torch.float32).max
WIDEN_BLOCK = 4096
_CLEAR_MANTISSA = -(1 << 23)  # sign and exponent bits of a float32, as an int32


class Float8Copies(NamedTuple):
    """Codes in a float8 dtype, None of a copy that is not made; scale_inv float32."""

    row_codes: Tensor | None
    column_codes: Tensor | None
    scale_inv: Tensor


# ---------------------------------------------------------------------------------------------------------- references


def abs_without_nan(x: Tensor) -> Tensor:
    """|x|, with 0 for NaN, so that a maximum ignores it."""
    return x.abs().nan_to_num_(nan=0.0, posinf=torch.inf)


def amax_ref(x: Tensor) -> Tensor:
    """() float32: max |x|; 0 for an empty tensor."""
    return abs_without_nan(x).amax() if x.numel() else x.new_zeros(())


def amax_stacked_ref(w_GNK: Tensor) -> Tensor:
    """[G] float32: max |w| of each group."""
    return abs_without_nan(w_GNK).flatten(1).amax(1) if w_GNK.numel() else w_GNK.new_zeros(len(w_GNK))


def amax_grouped_ref(x_TK: Tensor, splits: Splits) -> Tensor:
    """[G] float32: max |x| over each group's rows; 0 for an empty group. A maximum does not depend on the order."""
    amax = x_TK.new_zeros(splits.num_groups + 1)  # the last one takes the rows past the sum
    if x_TK.numel():
        amax.scatter_reduce_(0, splits.group_of_row, abs_without_nan(x_TK).amax(1), "amax")
    return amax[:-1]


def scale_from_amax_ref(
    amax: Tensor, form: Float8Format, power_2_scale: bool, amax_epsilon: float, largest: float = FLOAT32_MAX
) -> Tensor:
    """float32 scales from float32 amaxes of any shape. power_2_scale: rounded down to a power of two.

    largest: stands in for a quotient of Inf
    """
    amax = amax.clamp(min=amax_epsilon)
    # Not `form.max / amax`: torch turns a scalar numerator into a reciprocal and a product, which rounds twice.
    scale = torch.full_like(amax, form.max) / amax
    scale = scale.masked_fill(scale.isinf(), largest).masked_fill((amax == 0) | amax.isinf(), 1.0)
    return (scale.view(torch.int32) & _CLEAR_MANTISSA).view(torch.float32) if power_2_scale else scale


def scale_inv_ref(scale: Tensor) -> Tensor:
    """fl(1 / scale)."""
    return torch.ones_like(scale) / scale


def round_to_float8_ref(scaled: Tensor, form: Float8Format) -> Tensor:
    """Codes of float32 values that are scaled already. Saturating, also from Inf; NaN stays NaN.

    torch's own E4M3 cast saturates from 2.12 on and gives NaN before, its E5M2 cast overflows to Inf: hence the clamp.
    """
    return scaled.clamp(-form.max, form.max).to(form.dtype)


def cast_float8_ref(
    x: Tensor,
    form: Float8Format,
    *,
    rowwise: bool,
    columnwise: bool,
    stacked: bool = False,
    splits: Splits | None = None,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> Float8Copies:
    """`cast_float8` in plain torch."""
    x32 = x.to(torch.float32)
    if scale is None or amax_out is not None:
        if splits is not None:
            amax = amax_grouped_ref(x32, splits)
        else:
            amax = amax_stacked_ref(x32) if stacked else amax_ref(x32)
        if scale is None:
            scale = scale_from_amax_ref(amax, form, power_2_scale, amax_epsilon)
        elif amax_out is not None:
            amax_out.copy_(torch.maximum(amax_out, amax))
    scale = scale.view(()) if splits is None and not stacked else scale
    if splits is not None:
        group = splits.group_of_row
        inactive = (group == splits.num_groups)[:, None]
        factor = scale.index_select(0, group.clamp(max=splits.num_groups - 1))[:, None]
        codes = round_to_float8_ref((x32 * factor).masked_fill(inactive, 0.0), form)
    else:
        codes = round_to_float8_ref(x32 * (scale[:, None, None] if stacked else scale), form)
    return Float8Copies(
        codes if rowwise else None, _transposed(codes, stacked, splits) if columnwise else None, scale_inv_ref(scale)
    )


def transpose_back_ref(codes: Tensor, dtype: torch.dtype, shape: torch.Size, splits: Splits | None = None) -> Tensor:
    """`transpose_back` in plain torch."""
    if splits is None:
        num_rows = shape[-2] if codes.ndim == 3 else math.prod(shape[:-1])
        return codes.to(dtype)[..., :num_rows].mT.reshape(shape)
    if not codes.numel():
        return torch.zeros(shape, dtype=dtype, device=codes.device)
    inactive = splits.group_of_row == splits.num_groups
    values = codes.view(torch.uint8).mT.index_select(0, splits.row_in_padded(BLOCK)).view(codes.dtype)
    return values.to(dtype).masked_fill(inactive[:, None], 0)


def _transposed(codes: Tensor, stacked: bool, splits: Splits | None) -> Tensor:
    """column_codes of row_codes."""
    raw = codes.view(torch.uint8)
    if stacked:
        columns = raw.mT
    elif splits is None:
        raw = raw.reshape(_rows(raw), raw.shape[-1])
        columns = torch.nn.functional.pad(raw.mT, (0, -len(raw) % BLOCK))
    else:
        capacity = splits.aligned_capacity(BLOCK)
        inactive = splits.group_of_row == splits.num_groups
        place = splits.row_in_padded(BLOCK).masked_fill(inactive, capacity)  # one more, for rows past the sum
        columns = raw.new_zeros(capacity + 1, raw.shape[1]).index_copy_(0, place, raw)[:capacity].mT
    return columns.contiguous().view(codes.dtype)


# -------------------------------------------------------------------------------------------------------------- config


class CastFloat8Config(NamedTuple):
    """Tile of a program."""

    block_m: int
    block_k: int
    num_warps: int


def amax_config() -> CastFloat8Config:
    """Measured on H200."""
    return CastFloat8Config(block_m=64, block_k=256, num_warps=8)


def cast_float8_config(columns: int) -> CastFloat8Config:
    """Measured on H200. block_m is a multiple of BLOCK, so that tiles begin at multiples of it."""
    if columns % 16:  # each element has an address of its own, which takes registers
        return CastFloat8Config(block_m=128, block_k=32, num_warps=8)
    return CastFloat8Config(block_m=256, block_k=64, num_warps=8)


# ----------------------------------------------------------------------------------------------------------- launchers

_amax, _cast_float8 = Launch(amax_kernel), Launch(cast_float8_kernel)
_dequantize_codes, _transpose_back = Launch(dequantize_codes_kernel), Launch(transpose_back_kernel)


def cast_float8(
    x: Tensor,
    form: Float8Format,
    *,
    rowwise: bool,
    columnwise: bool,
    stacked: bool = False,
    splits: Splits | None = None,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> Float8Copies:
    """Both copies of x [..., K], in the layout above.

    stacked: x is weights [G, N, K], each group by itself
    splits: x [T, K] is rows in groups, each by itself
    scale: [n] float32, n = 1 or G, in place of scales from amaxes
    amax_out: [n] float32, becomes the maximum of itself and the amaxes, found in the same read; only with a scale
    power_2_scale, amax_epsilon: of scales from amaxes
    """
    run = cast_float8_on_triton if x.is_cuda else cast_float8_ref
    return run(
        x.detach(), form, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits,
        scale=scale, amax_out=amax_out, power_2_scale=power_2_scale, amax_epsilon=amax_epsilon,
    )  # fmt: skip


def empty_float8(shape: torch.Size, form: Float8Format, device: torch.device) -> Float8Copies:
    """Uninitialised copies of a single tensor of this shape."""
    width = cdiv(math.prod(shape[:-1]), BLOCK) * BLOCK
    return Float8Copies(
        torch.empty(shape, dtype=form.dtype, device=device),
        torch.empty(shape[-1], width, dtype=form.dtype, device=device),
        torch.empty((), dtype=torch.float32, device=device),
    )


def cast_float8_on_triton(
    x: Tensor,
    form: Float8Format,
    *,
    rowwise: bool,
    columnwise: bool,
    stacked: bool = False,
    splits: Splits | None = None,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
    power_2_scale: bool = False,
    amax_epsilon: float = 0.0,
) -> Float8Copies:
    """`cast_float8` on any device: tests bring CPU tensors, under the interpreter."""
    single = splits is None and not stacked
    matrices = (x if stacked else x.reshape(1, _rows(x), x.shape[-1])).contiguous()
    groups = matrices.shape[0] if splits is None else splits.num_groups
    offsets = None if splits is None else splits.offsets
    if scale is None:
        amax = torch.zeros(groups, dtype=torch.float32, device=x.device)
        amax_triton(matrices, amax, offsets)
    width = splits.aligned_capacity(BLOCK) if splits is not None else matrices.shape[1]
    lead = x.shape[:1] if stacked else ()
    columns = (*lead, x.shape[-1], width if stacked else cdiv(width, BLOCK) * BLOCK)
    copies = Float8Copies(
        torch.empty(x.shape, dtype=form.dtype, device=x.device) if rowwise else None,
        torch.empty(columns, dtype=form.dtype, device=x.device) if columnwise else None,
        torch.empty(groups, dtype=torch.float32, device=x.device),
    )
    cast_float8_triton(
        matrices, *copies, amax if scale is None else scale, None if scale is None else amax_out, offsets,
        None if splits is None else splits.aligned(BLOCK), form, scale is not None, power_2_scale, amax_epsilon,
    )  # fmt: skip
    return copies._replace(scale_inv=copies.scale_inv.view(())) if single else copies


def dequantize_codes(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The numbers that row_codes stand for, without the scale, exact: `codes.to(dtype)`."""
    return widened_on_triton(codes, dtype) if codes.is_cuda else codes.to(dtype)


def widened_on_triton(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """`dequantize_codes` on any device. On an H200 torch's own conversion reaches a quarter of copy bandwidth."""
    codes = codes.contiguous()
    out = torch.empty(codes.shape, dtype=torch.float32 if dtype == torch.float64 else dtype, device=codes.device)
    if codes.numel():
        _dequantize_codes(
            codes,
            cdiv(codes.numel(), WIDEN_BLOCK),
            codes.view(torch.uint8),
            out,
            codes.numel(),
            **format_of(codes.dtype, codes.device),
            BLOCK=WIDEN_BLOCK,
        )
    return out.to(dtype)


def transpose_back(codes: Tensor, dtype: torch.dtype, shape: torch.Size, splits: Splits | None = None) -> Tensor:
    """The numbers that column_codes stand for, without the scale: of this shape in the natural order, exact."""
    run = untranspose_on_triton if codes.is_cuda else transpose_back_ref
    return run(codes, dtype, shape, splits)


def untranspose_on_triton(codes: Tensor, dtype: torch.dtype, shape: torch.Size, splits: Splits | None = None) -> Tensor:
    """`transpose_back` on any device, as above."""
    narrow = torch.float32 if dtype == torch.float64 else dtype
    out = torch.empty(shape, dtype=narrow, device=codes.device)
    transpose_back_triton(
        codes.contiguous(),
        out.view(shape if codes.ndim == 3 else (1, _rows(out), shape[-1])),
        None if splits is None else splits.offsets,
        None if splits is None else splits.aligned(BLOCK),
    )
    return out.to(dtype)


def amax_triton(x_GTK: Tensor, amax: Tensor, offsets: Tensor | None) -> None:
    """Launch: amax [n] float32 becomes the maximum of itself and those of contiguous x, as for `cast_float8_triton`."""
    groups, rows, columns = x_GTK.shape
    if not x_GTK.numel():
        return
    config = amax_config()
    programs = _slots(groups, rows, offsets, config.block_m, 0) * cdiv(columns, config.block_k)
    _amax(
        x_GTK, programs,
        x_GTK, amax.view(torch.int32), offsets, rows, columns, groups if offsets is None else len(offsets) - 1,
        BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip


def cast_float8_triton(
    x_GTK: Tensor,
    row_codes: Tensor | None,
    column_codes: Tensor | None,
    scale_inv: Tensor,
    given: Tensor,
    amax_out: Tensor | None,
    offsets: Tensor | None,
    aligned: Tensor | None,
    form: Float8Format,
    given_is_scale: bool,
    power_2_scale: bool,
    amax_epsilon: float,
) -> None:
    """Launch the cast of contiguous x: [1, T, K], or [G, N, K] whose groups are of one size. All tensors contiguous.

    given: [n] float32, scales or amaxes
    """
    groups, rows, columns = x_GTK.shape
    config = cast_float8_config(columns)
    width = 0 if column_codes is None else column_codes.shape[-1]
    slots = _slots(groups, rows, offsets, config.block_m, BLOCK) if columns else 0
    # One program at least: it writes scale_inv.
    programs = max(1, slots * cdiv(columns, config.block_k))
    packed = column_codes is not None and width % 4 == 0 and column_codes.numel() > 0
    _cast_float8(
        x_GTK, programs,
        x_GTK,
        None if row_codes is None else row_codes.view(torch.uint8),
        None if column_codes is None else column_codes.view(torch.int32 if packed else torch.uint8),
        scale_inv, given, None if amax_out is None else amax_out.view(torch.int32), offsets, aligned,
        rows, columns, width, groups if offsets is None else len(offsets) - 1, slots, amax_epsilon,
        GIVEN_IS_SCALE=given_is_scale, POWER_2=power_2_scale, PACKED=packed, **format_of(form, x_GTK.device),
        BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip


def transpose_back_triton(codes: Tensor, out_GTK: Tensor, offsets: Tensor | None, aligned: Tensor | None) -> None:
    """Launch: values of column_codes into out: [1, T, K] or [G, N, K]. All tensors contiguous."""
    groups, rows, columns = out_GTK.shape
    if not out_GTK.numel():
        return
    config = cast_float8_config(columns)
    packed = codes.shape[-1] % 4 == 0
    programs = _slots(groups, rows, offsets, config.block_m, 0) * cdiv(columns, config.block_k)
    _transpose_back(
        codes, programs,
        codes.view(torch.int32 if packed else torch.uint8), out_GTK, offsets, aligned,
        rows, columns, codes.shape[-1], groups if offsets is None else len(offsets) - 1,
        PACKED=packed, **format_of(codes.dtype, codes.device), BLOCK_M=config.block_m, BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )  # fmt: skip


def format_of(form: Float8Format | torch.dtype, device: torch.device) -> dict[str, bool | str]:
    """FORM and NATIVE of `float8_codes` for codes of this format; to read them their dtype is enough."""
    dtype = form if isinstance(form, torch.dtype) else form.dtype
    known = E4M3 if dtype == E4M3.dtype else E5M2
    own = "" if isinstance(form, torch.dtype) or form.max == known.max else f" {float(form.max)!r}"
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return {"FORM": known.name + own, "NATIVE": native}


def _slots(groups: int, rows: int, offsets: Tensor | None, block_m: int, padding: int) -> int:
    """How many row tiles of all matrices there can be; each group's rows are padded by less than `padding`."""
    if offsets is None:
        return groups * cdiv(rows, block_m)
    num_groups = len(offsets) - 1
    return num_slots(rows + padding * num_groups, num_groups, block_m)


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])
