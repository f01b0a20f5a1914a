"""The launches that quantize to E4M3 or E5M2 with one float32 scale for each tensor or group, and dequantize.

What is computed: `cast.py`, with the block (ALL, ALL), a `Float32Scale` or `GivenScale` and a transposed columnwise
copy. Of a scale that is given the amaxes are found in the same read of x.

Two Triton kernels: one finds amax (a maximum does not depend on the order, so atomics do no harm), one casts both
copies in one pass. Nothing is read from the device on the host. Source: TransformerEngine's Float8CurrentScaling and
DelayedScaling (read at d0067d0).
"""

# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast_float8_triton import (
    amax_kernel,
    cast_float8_kernel,
    dequantize_codes_kernel,
    transpose_back_kernel,
)
from recipes.casts.layout import Copies, as_bytes, as_words, empty_copies, empty_values, has_words, matrices, num_rows
from recipes.casts.scale_rules import Float32Scale
from recipes.tensors.abstract import is_abstract
from recipes.tensors.formats import ALL, E4M3, E5M2, Float8Format, ScaleSpec
from recipes.tensors.splits import Splits
from recipes.triton.launch import Launch, cdiv, has_work
from recipes.triton.row_slots import num_slots

# Groups begin at multiples of it in column_codes: whole sectors of memory. Of 16, wgrad takes 1.3 times as long (H200).
BLOCK = 32

DEQUANTIZE_BLOCK = 4096


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
    """Measured on H200. block_m is a multiple of BLOCK, so that tiles begin at multiples of it.

    Low tiles, since the last one of each group is rarely full.
    """
    if columns % 16:  # each element has an address of its own, which takes registers
        return CastFloat8Config(block_m=128, block_k=32, num_warps=8)
    return CastFloat8Config(block_m=64, block_k=128, num_warps=4)


def transpose_back_config(columns: int) -> CastFloat8Config:
    """Measured on H200."""
    config = cast_float8_config(columns)
    return config if columns % 16 else CastFloat8Config(block_m=256, block_k=64, num_warps=8)


# ----------------------------------------------------------------------------------------------------------- launchers

_amax, _cast_float8 = Launch(amax_kernel), Launch(cast_float8_kernel)
_dequantize_codes, _transpose_back = Launch(dequantize_codes_kernel), Launch(transpose_back_kernel)


def cast_float8_on_triton(
    x: Tensor,
    spec: ScaleSpec,
    *,
    rowwise: bool,
    columnwise: bool,
    stacked: bool = False,
    splits: Splits | None = None,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
) -> Copies:
    """`cast` of such a spec on any device: tests bring CPU tensors, under the interpreter."""
    rule, form = spec.scale_rule, spec.element
    assert isinstance(rule, Float32Scale) and isinstance(form, Float8Format), "`KERNELS` names what is cast here"
    x_GTK = matrices(x, stacked)
    offsets = None if splits is None else splits.offsets
    copies = empty_copies(
        x.shape, spec, x.device, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits
    )
    scale_inv = copies.row_scale if copies.row_scale is not None else copies.column_scale
    assert scale_inv is not None, "one copy at least is made"
    if scale is None:
        amax = torch.zeros(scale_inv.numel(), dtype=torch.float32, device=x.device)
        amax_triton(x_GTK, amax, offsets)
    cast_float8_triton(
        x_GTK, copies.row_codes, copies.column_codes, scale_inv, amax if scale is None else scale,
        None if scale is None else amax_out, offsets, None if splits is None else splits.aligned(BLOCK),
        form, scale is not None, rule.power_2, rule.amax_epsilon,
    )  # fmt: skip
    return copies


def finds_amaxes(spec: ScaleSpec) -> bool:
    """Whether scales of this format follow from amaxes that another kernel may find."""
    rule = spec.scale_rule
    layout = spec.block, spec.columnwise, spec.alignment, spec.transform
    return type(rule) is Float32Scale and not rule.input_range and layout == ((ALL, ALL), "transposed", BLOCK, None)


def cast_with_amaxes(x_TK: Tensor, copies: Copies, spec: ScaleSpec, amax: Tensor, splits: Splits) -> None:
    """Fill `copies` of rows in groups, as `cast` of such a spec, with amaxes [G] that are known."""
    rule, form = spec.scale_rule, spec.element
    assert isinstance(rule, Float32Scale) and isinstance(form, Float8Format), "`finds_amaxes`"
    scale_inv = copies.row_scale if copies.row_scale is not None else copies.column_scale
    assert scale_inv is not None, "one copy at least is made"
    cast_float8_triton(
        matrices(x_TK, False), copies.row_codes, copies.column_codes, scale_inv, amax, None, splits.offsets,
        splits.aligned(BLOCK), form, False, rule.power_2, rule.amax_epsilon,
    )  # fmt: skip


def dequantize_float8_on_triton(
    codes: Tensor,
    scale: Tensor,
    spec: ScaleSpec,
    dtype: torch.dtype,
    *,
    columnwise: bool,
    shape: torch.Size,
    splits: Splits | None = None,
) -> Tensor:
    """`dequantize` of such a spec on any device, as above: the numbers that codes stand for, without the scale."""
    return (
        transpose_back_on_triton(codes, dtype, shape, splits)
        if columnwise
        else dequantize_codes_on_triton(codes, dtype)
    )


def dequantize_codes_on_triton(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """`codes.to(dtype)`. On an H200 torch's own conversion reaches a quarter of copy bandwidth."""
    codes, out = codes.contiguous(), empty_values(codes.shape, dtype, codes.device)
    if has_work(codes):
        _dequantize_codes(
            codes,
            cdiv(codes.numel(), DEQUANTIZE_BLOCK),
            codes.view(torch.uint8),
            out,
            codes.numel(),
            **format_of(codes.dtype, codes.device),
            BLOCK=DEQUANTIZE_BLOCK,
        )
    return out.to(dtype)


def transpose_back_on_triton(
    codes: Tensor, dtype: torch.dtype, shape: torch.Size, splits: Splits | None = None
) -> Tensor:
    """The numbers of column_codes, of this shape in the natural order, exact."""
    out = empty_values(shape, dtype, codes.device)
    transpose_back_triton(
        codes.contiguous(),
        out.view(shape if codes.ndim == 3 else (1, num_rows(out), shape[-1])),
        None if splits is None else splits.offsets,
        None if splits is None else splits.aligned(BLOCK),
    )
    return out.to(dtype)


def amax_triton(x_GTK: Tensor, amax: Tensor, offsets: Tensor | None) -> None:
    """Launch: amax [n] float32 becomes the maximum of itself and those of contiguous x, as for `cast_float8_triton`."""
    groups, rows, columns = x_GTK.shape
    if not has_work(x_GTK):
        return
    config = amax_config()
    programs = num_row_tiles(groups, rows, offsets, config.block_m, 0) * cdiv(columns, config.block_k)
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
    if is_abstract(x_GTK):
        return
    groups, rows, columns = x_GTK.shape
    config = cast_float8_config(columns)
    width = 0 if column_codes is None else column_codes.shape[-1]
    slots = num_row_tiles(groups, rows, offsets, config.block_m, BLOCK) if columns else 0
    # One program at least: it writes scale_inv.
    programs = max(1, slots * cdiv(columns, config.block_k))
    words = None if column_codes is None else as_words(column_codes)
    _cast_float8(
        x_GTK, programs,
        x_GTK, as_bytes(row_codes), words, scale_inv, given,
        None if amax_out is None else amax_out.view(torch.int32), offsets, aligned,
        rows, columns, width, groups if offsets is None else len(offsets) - 1, slots, amax_epsilon,
        GIVEN_IS_SCALE=given_is_scale, POWER_2=power_2_scale, PACKED=has_words(words), **format_of(form, x_GTK.device),
        BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip


def transpose_back_triton(codes: Tensor, out_GTK: Tensor, offsets: Tensor | None, aligned: Tensor | None) -> None:
    """Launch: values of column_codes into out: [1, T, K] or [G, N, K]. All tensors contiguous."""
    groups, rows, columns = out_GTK.shape
    if not has_work(out_GTK):
        return
    config = transpose_back_config(columns)
    words = as_words(codes)
    programs = num_row_tiles(groups, rows, offsets, config.block_m, 0) * cdiv(columns, config.block_k)
    _transpose_back(
        codes, programs,
        words, out_GTK, offsets, aligned,
        rows, columns, codes.shape[-1], groups if offsets is None else len(offsets) - 1,
        PACKED=has_words(words), **format_of(codes.dtype, codes.device), BLOCK_M=config.block_m, BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )  # fmt: skip


def format_of(form: Float8Format | torch.dtype, device: torch.device) -> dict[str, bool | str]:
    """FORM and NATIVE of `float8_codes` for codes of this format; to read them their dtype is enough."""
    dtype = form if isinstance(form, torch.dtype) else form.dtype
    known = E4M3 if dtype == E4M3.dtype else E5M2
    own = "" if isinstance(form, torch.dtype) or form.max == known.max else f" {float(form.max)!r}"
    native = device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)
    return {"FORM": known.name + own, "NATIVE": native}


def num_row_tiles(groups: int, rows: int, offsets: Tensor | None, block_m: int, padding: int) -> int:
    """How many row tiles of all matrices there can be; each group's rows are padded by less than `padding`."""
    if offsets is None:
        return groups * cdiv(rows, block_m)
    num_groups = len(offsets) - 1
    return num_slots(rows + padding * num_groups, num_groups, block_m)
