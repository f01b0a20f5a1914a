"""The launches that quantize to MXFP8, one E8M0 scale for each 32 values along an axis or for 32x32, and dequantize.

What is computed: `cast.py`, with these blocks, an `E8M0Scale` and everything in natural order. Both copies of 32x32
blocks have one tensor of codes. Blocks without rows have scales of 0. One Triton kernel makes both copies in one pass;
it reads nothing from the device on the host. Source: OCP Microscaling Formats v1.0.
"""

# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast_float8 import format_of
from recipes.casts.cast_mxfp8_triton import cast_mxfp8_kernel, dequantize_mxfp8_kernel
from recipes.casts.layout import Copies, empty_copies, is_square, matrices, num_rows
from recipes.casts.scale_rules import E8M0Scale
from recipes.tensors.formats import Float8Format, ScaleSpec
from recipes.tensors.splits import Splits
from recipes.triton.launch import Launch, cdiv

BLOCK = 32

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


def cast_mxfp8_on_triton(
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
    assert scale is None and amax_out is None, "each block has a scale of its own"
    copies = empty_copies(
        x.shape, spec, x.device, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits
    )
    if is_square(spec) and rowwise:  # both copies have the same codes
        copies = copies._replace(column_codes=copies.row_codes if columnwise else None)
    cast_mxfp8_triton(
        matrices(x, stacked),
        *copies,
        None if splits is None else splits.offsets,
        None if splits is None else splits.aligned(BLOCK),
        spec,
    )
    return copies


def dequantize_mxfp8_on_triton(
    codes: Tensor,
    scale: Tensor,
    spec: ScaleSpec,
    dtype: torch.dtype,
    *,
    columnwise: bool,
    shape: torch.Size,
    splits: Splits | None = None,
) -> Tensor:
    """`dequantize` of such a spec on any device, as above."""
    narrow = torch.float32 if dtype == torch.float64 else dtype
    out = torch.empty(codes.shape, dtype=narrow, device=codes.device)
    stacked, grouped = columnwise and scale.ndim == 3, columnwise and splits is not None
    dequantize_mxfp8_triton(
        codes.contiguous(),
        scale.contiguous(),
        out if stacked else out.view(1, num_rows(out), out.shape[-1]),
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
    spec: ScaleSpec,
) -> None:
    """Launch the cast of contiguous x: [1, T, K], or [G, N, K] whose groups are of one size. All tensors contiguous."""
    codes = row_codes if row_codes is not None else column_codes
    if codes is None or not x_GTK.shape[0] * x_GTK.shape[2]:
        return
    rule, element = spec.scale_rule, spec.element
    assert isinstance(rule, E8M0Scale) and isinstance(element, Float8Format), "`KERNELS` names what is cast here"
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
        SQUARE=is_square(spec), FLOOR=rule.rounding == "floor", **format_of(element, codes.device),
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


def _bytes(codes: Tensor | None) -> Tensor | None:
    return None if codes is None else codes.view(torch.uint8)


def _row_blocks(rows: int, offsets: Tensor | None) -> int:
    """How many blocks of 32 rows there can be, those of unknown groups included."""
    return cdiv(rows, BLOCK) if offsets is None else (rows + (len(offsets) - 1) * (BLOCK - 1)) // BLOCK
