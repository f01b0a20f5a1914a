"""Quantize a tensor to codes and scales, and dequantize them, as a `ScaleSpec` says.

    amax           = max |x| over a block             NaN counts as 0
    factor, scale  = scale_rule.scales(amax)          what x is multiplied by, and what is stored of it
    code           = encode(fl(x * factor))           saturating, also from Inf; NaN stays in its element
    value          = fl(decode(code) * values(scale))

All steps in float32. A partial block counts as if padded by zeros; grouped rows begin new blocks with each group. How
codes and scales lie in memory: `layout.py`. How scales follow from amaxes: `scale_rules.py`.

`cast_ref` and `dequantize_ref` take every spec, also a user's own, on every device. For the built-in ones there are
Triton kernels, which make both copies in one pass over x, bit for bit the same; nothing is read from the device on the
host. The casts of NVFP4, which need two amaxes, have a file of their own.
"""
# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast_blocks import cast_blocks_on_triton, dequantize_blocks_on_triton
from recipes.casts.cast_float8 import cast_float8_on_triton, dequantize_float8_on_triton
from recipes.casts.cast_float8_rowwise import (
    cast_float8_rowwise_on_triton,
    dequantize_float8_rowwise_on_triton,
)
from recipes.casts.layout import Copies, is_square, num_rows
from recipes.casts.scale_rules import E8M0Scale, Float32Scale, GivenScale, reciprocal
from recipes.tensors.formats import ALL, ColumnwiseLayout, ElementFormat, Float8Format, ScaleRule, ScaleSpec
from recipes.tensors.splits import Splits
from recipes.triton.launch import replayed


class Kernels(NamedTuple):
    """`cast_ref` and `dequantize_ref` in Triton, for one family of specs."""

    cast: Callable[..., Copies]
    dequantize: Callable[..., Tensor]
    cast_again: Callable[..., Copies]  # both, of tensors without groups of rows, repeated
    dequantize_again: Callable[..., Tensor]

    @classmethod
    def of(cls, cast: Callable[..., Copies], dequantize: Callable[..., Tensor]) -> Kernels:
        return cls(cast, dequantize, replayed(cast), replayed(dequantize))


_PER_TENSOR = Kernels.of(cast_float8_on_triton, dequantize_float8_on_triton)
_ROWWISE = Kernels.of(cast_float8_rowwise_on_triton, dequantize_float8_rowwise_on_triton)
_BLOCKS = Kernels.of(cast_blocks_on_triton, dequantize_blocks_on_triton)

# Of float8 codes, by scale rule, block, columnwise layout and alignment.
KERNELS: dict[tuple[type[ScaleRule], tuple[int, int], ColumnwiseLayout, int], Kernels] = {
    (Float32Scale, (ALL, ALL), "transposed", 32): _PER_TENSOR,
    (GivenScale, (ALL, ALL), "transposed", 32): _PER_TENSOR,
    (Float32Scale, (1, ALL), "transposed", 32): _ROWWISE,
    (Float32Scale, (1, 128), "transposed", 128): _BLOCKS,
    (Float32Scale, (128, 128), "transposed", 128): _BLOCKS,
    (E8M0Scale, (1, 32), "natural", 32): _BLOCKS,
    (E8M0Scale, (32, 32), "natural", 32): _BLOCKS,
}


def kernels_of(spec: ScaleSpec) -> Kernels | None:
    """The kernels that cast to this format; None if torch computes it."""
    if type(spec.element) is not Float8Format:
        return None
    return KERNELS.get((type(spec.scale_rule), spec.block, spec.columnwise, spec.alignment))


def cast(
    x: Tensor,
    spec: ScaleSpec,
    *,
    rowwise: bool,
    columnwise: bool,
    stacked: bool = False,
    splits: Splits | None = None,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
    row_of: Tensor | None = None,
) -> Copies:
    """Both copies of x [..., K].

    stacked: x is weights [G, N, K], each group by itself
    splits: x [T, K] is rows in groups, each by itself
    scale: [n] float32, n = 1 or G, in place of scales from amaxes; of formats with one scale for all
    amax_out: [n] float32, becomes the maximum of itself and the amaxes, found in the same read; only with a scale
    row_of: [T] int64, with splits: what is cast is x[row_of] [T, K], whose rows the kernel reads where they lie
    """
    assert row_of is None or (splits is not None and not stacked), "rows are of groups"
    kernels = kernels_of(spec) if x.is_cuda else None
    run = cast_ref if kernels is None else kernels.cast if splits is not None else kernels.cast_again
    return run(
        x.detach(), spec, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits, scale=scale,
        amax_out=amax_out, row_of=row_of,
    )  # fmt: skip


def casts_to_values(spec: ScaleSpec) -> bool:
    """Whether the kernel that casts to this format can write a copy's values in place of its codes and scales."""
    return type(spec.scale_rule) is E8M0Scale and not is_square(spec) and kernels_of(spec) is _BLOCKS


def cast_to_values(
    x: Tensor,
    spec: ScaleSpec,
    dtype: torch.dtype,
    *,
    rowwise: bool,
    columnwise: bool,
    column_codes: bool,
    splits: Splits | None = None,
    row_of: Tensor | None = None,
) -> Copies:
    """As `cast` and `dequantize` after it, of stacked weights, or with splits of rows in groups, on a GPU; copies that
    hold values have no scales.

    dtype: of the values. column_codes: the columnwise copy is codes, as `cast` makes it. row_of: as there
    """
    return cast_blocks_on_triton(
        x.detach(), spec, rowwise=rowwise, columnwise=columnwise, stacked=splits is None, splits=splits, row_of=row_of,
        row_values=dtype if rowwise else None, column_values=dtype if columnwise and not column_codes else None,
    )  # fmt: skip


def dequantize(
    codes: Tensor,
    scale: Tensor,
    spec: ScaleSpec,
    dtype: torch.dtype,
    *,
    columnwise: bool,
    shape: torch.Size,
    splits: Splits | None = None,
) -> Tensor:
    """The values of one copy, rounded to `dtype`, of this shape in the natural order; 0 past the sum of the splits.

    Of formats with one scale for all: without that scale.
    """
    kernels = kernels_of(spec) if codes.is_cuda else None
    run = dequantize_ref if kernels is None else kernels.dequantize if splits is not None else kernels.dequantize_again
    return run(codes, scale, spec, dtype, columnwise=columnwise, shape=shape, splits=splits)


# ---------------------------------------------------------------------------------------------------------- references


def cast_ref(
    x: Tensor,
    spec: ScaleSpec,
    *,
    rowwise: bool,
    columnwise: bool,
    stacked: bool = False,
    splits: Splits | None = None,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
    row_of: Tensor | None = None,
) -> Copies:
    """`cast` in plain torch, which copies the rows that row_of names."""
    x = x if row_of is None else x.index_select(0, row_of)
    x32 = x.to(torch.float32).contiguous()
    if not stacked:
        x32 = x32.reshape(num_rows(x), x.shape[-1])
    if splits is not None:
        x32 = x32.masked_fill(_inactive(splits), 0.0)
    magnitude = abs_without_nan(x32)

    def copy(of_columns: bool) -> tuple[Tensor, Tensor]:
        block = spec.block_of(of_columns)
        if scale is None:
            factor, stored = spec.scale_rule.scales(block_amax(magnitude, block, splits), spec.element, x.dtype)
        else:
            factor = scale.view(-1, 1, 1) if stacked else scale.view(-1, 1)
            stored = reciprocal(factor)
        scaled = x32 * _spread(factor, block, x32.shape, splits)
        # Again, since a factor may be Inf.
        return _encode(spec.element, scaled if splits is None else scaled.masked_fill(_inactive(splits), 0.0)), stored

    if amax_out is not None:
        amax_out.copy_(torch.maximum(amax_out, block_amax(magnitude, spec.block, splits).flatten()))
    row = copy(False) if rowwise else None
    column = None
    if columnwise:
        column = row if row is not None and spec.block == spec.block[::-1] else copy(True)
    copies = Copies(None, None, None, None)
    if row is not None:
        stored = _stored_scale(row[1], spec, x32, splits, columnwise=False)
        if spec.columnwise == "natural" and not spec.is_per_tensor:
            stored = stored.view(*x.shape[:-1], stored.shape[-1])
        copies = copies._replace(row_codes=row[0].view(x.shape), row_scale=stored)
    if column is not None:
        codes = _transposed(column[0], spec, splits) if spec.columnwise == "transposed" else column[0].view(x.shape)
        shared = copies.row_scale if spec.is_per_tensor else None
        stored = _stored_scale(column[1], spec, x32, splits, columnwise=True) if shared is None else shared
        copies = copies._replace(column_codes=codes, column_scale=stored)
    return copies


def dequantize_ref(
    codes: Tensor,
    scale: Tensor,
    spec: ScaleSpec,
    dtype: torch.dtype,
    *,
    columnwise: bool,
    shape: torch.Size,
    splits: Splits | None = None,
) -> Tensor:
    """`dequantize` in plain torch."""
    if columnwise and spec.columnwise == "transposed":
        codes = transpose_back_ref(codes, shape, splits, spec.alignment)
    if spec.is_per_tensor:
        return spec.element.decode(codes, dtype)
    values = spec.element.decode(codes, torch.float32)
    block, factor = spec.block_of(columnwise), spec.scale_rule.values(scale)
    if spec.columnwise == "transposed":
        factor = factor.mT if columnwise == is_square(spec) else factor
    else:  # square blocks' scales stand in each row, or column
        block = (block[0], 1) if columnwise else (1, block[1])
    stacked = factor.ndim == 3 and len(shape) == 3 and (columnwise or spec.columnwise == "transposed")
    matrix = values if stacked else values.reshape(math.prod(shape[:-1]), shape[-1])
    factor = factor if stacked else factor.reshape(math.prod(factor.shape[:-1]), factor.shape[-1])
    values = matrix * _spread(factor, block, matrix.shape, splits)
    if splits is not None:
        values = values.masked_fill(_inactive(splits), 0.0)
    return values.reshape(shape).to(dtype).contiguous()  # a product's order of summation follows from the layout


def transpose_back_ref(codes: Tensor, shape: torch.Size, splits: Splits | None, alignment: int) -> Tensor:
    """Codes of this shape in the natural order, of a transposed copy."""
    if splits is None:
        rows = shape[-2] if codes.ndim == 3 else math.prod(shape[:-1])
        return codes[..., :rows].mT.reshape(shape)
    if not codes.numel():
        return torch.zeros(shape, dtype=torch.uint8, device=codes.device).to(codes.dtype)
    natural = codes.view(torch.uint8).mT.index_select(0, splits.row_in_padded(alignment))
    return natural.masked_fill(_inactive(splits), 0).view(codes.dtype)


def abs_without_nan(x: Tensor) -> Tensor:
    """|x|, with 0 for NaN, so that a maximum ignores it."""
    return x.abs().nan_to_num_(nan=0.0, posinf=torch.inf)


def block_amax(x: Tensor, block: tuple[int, int], splits: Splits | None) -> Tensor:
    """The maximum of each block of x [..., R, K], which is not negative; with splits each group has blocks of its own.

    [..., row blocks, column blocks]; a block without numbers has 0.
    """
    rows, columns = block
    if columns == ALL:
        x = torch.nn.functional.pad(x, (0, 1)).amax(-1, keepdim=True)  # a row may have no columns
    elif columns != 1:
        x = torch.nn.functional.pad(x, (0, -x.shape[-1] % columns))
        x = x.unflatten(-1, (x.shape[-1] // columns, columns)).amax(-1)
    if rows == 1:
        return x
    if splits is not None:
        at = splits.group_of_row if rows == ALL else splits.block_of_row(rows)
        count = splits.num_groups if rows == ALL else splits.aligned_capacity(rows) // rows
        amax = x.new_zeros(count + 1, x.shape[-1])  # the last one takes the rows past the sum
        return amax.scatter_reduce_(0, at[:, None].expand_as(x), x, "amax")[:-1]
    return block_amax(x.mT, (1, rows), None).mT


def _encode(element: ElementFormat, scaled: Tensor) -> Tensor:
    """The codes of these values. Raises ValueError for others than the format, which may be a user's, declares."""
    codes = element.encode(scaled)
    if (codes.shape, codes.dtype) != (scaled.shape, element.dtype):
        raise ValueError(
            f"{element.name}'s encode returned {codes.dtype} of shape {list(codes.shape)}, but its dtype is "
            f"{element.dtype}, and the values have shape {list(scaled.shape)}. Return a code for each of them, in that "
            "dtype."
        )
    return codes


def _spread(scale: Tensor, block: tuple[int, int], shape: torch.Size, splits: Splits | None) -> Tensor:
    """The scale of each value of a tensor of this shape [..., R, K], or what broadcasts to it."""
    rows, columns = block
    if columns not in (1, ALL):
        scale = scale.repeat_interleave(columns, -1).narrow(-1, 0, shape[-1])
    if rows == 1 or (rows == ALL and splits is None):
        return scale
    if splits is None:
        return scale.repeat_interleave(rows, -2).narrow(-2, 0, shape[-2])
    at = splits.group_of_row.clamp(max=splits.num_groups - 1) if rows == ALL else splits.block_of_row(rows)
    return scale.index_select(0, at)


def _stored_scale(scale: Tensor, spec: ScaleSpec, x: Tensor, splits: Splits | None, *, columnwise: bool) -> Tensor:
    """Scales of blocks, [..., row blocks, column blocks], as they lie in memory; x is [..., R, K]."""
    if spec.is_per_tensor:
        return scale.flatten() if splits is not None or x.ndim == 3 else scale.view(())
    if spec.columnwise == "transposed":
        return (scale.mT if columnwise == is_square(spec) else scale).contiguous()
    if not is_square(spec):
        return scale.contiguous()
    if columnwise:
        return _spread(scale, (1, spec.block[1]), x.shape, None).contiguous()
    spread = _spread(scale, (spec.block[0], 1), x.shape, splits)
    return spread if splits is None else spread.masked_fill(_inactive(splits), 0)


def _transposed(codes: Tensor, spec: ScaleSpec, splits: Splits | None) -> Tensor:
    """column_codes of codes [..., R, K] in the natural order."""
    raw = codes.view(torch.uint8)
    if splits is not None:
        capacity = splits.aligned_capacity(spec.alignment)
        place = splits.row_in_padded(spec.alignment).masked_fill(_inactive(splits)[:, 0], capacity)
        raw = raw.new_zeros(capacity + 1, raw.shape[1]).index_copy_(0, place, raw)[:capacity]
    elif codes.ndim == 2:
        raw = torch.nn.functional.pad(raw, (0, 0, 0, -len(raw) % spec.alignment))
    # Not `contiguous()`, which leaves the strides of a single column as they are.
    return raw.mT.clone(memory_format=torch.contiguous_format).view(codes.dtype)


def _inactive(splits: Splits) -> Tensor:
    """[rows, 1]: whether a row is no group's."""
    return (splits.group_of_row == splits.num_groups)[:, None]
