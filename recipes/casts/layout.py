"""How both copies of a tensor lie in memory, by their `ScaleSpec`, and their allocation.

x is [..., K] with T rows (all axes but the last), weights [G, N, K], or rows [T, K] of G groups. A block is B rows x C
columns. P: rows padded to `alignment`, of each group by itself (`splits.aligned_capacity`); of weights not padded.

                    natural                                     transposed
    row_codes       x's shape                                   x's shape
    column_codes    x's shape                                   [K, P]
    row_scale       [..., ceil(K / C)]                          [ceil(K / C), T]; of square blocks [P / B, ceil(K / C)]
    column_scale    [ceil(T / B), K]                            [P / B, K]; of square blocks [ceil(K / C), P / B]

Natural scales of square blocks stand in each of their rows (row_scale) or columns (column_scale). Grouped rows begin
new blocks with each group: block `splits.block_of_row(B)[t]` is row t's. Weights have a leading G everywhere. One scale
for all is [n] of n groups, () of a single tensor, the same of both copies.

Padding and rows past the sum of the splits have codes of 0, whatever x holds there.
"""
# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from recipes.tensors.formats import ALL, ScaleSpec
from recipes.tensors.splits import Splits
from recipes.triton.launch import cdiv


class Copies(NamedTuple):
    """Codes and scales; both of a copy that is not made are None."""

    row_codes: Tensor | None
    row_scale: Tensor | None
    column_codes: Tensor | None
    column_scale: Tensor | None


def num_rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def shape_of(x: Tensor, row_of: Tensor | None) -> torch.Size:
    """That of x, or of the rows of x [S, K] that row_of names."""
    return x.shape if row_of is None else torch.Size((row_of.shape[0], x.shape[1]))


def matrices(x: Tensor, stacked: bool) -> Tensor:
    """Contiguous [G, N, K], or [1, T, K] of a tensor that is no stack."""
    return (x if stacked else x.reshape(1, num_rows(x), x.shape[-1])).contiguous()


def as_bytes(codes: Tensor | None) -> Tensor | None:
    """Codes, or scales of one byte, as kernels take them."""
    return None if codes is None else codes.view(torch.uint8)


def as_words(codes: Tensor) -> Tensor:
    """Transposed codes as kernels take them: four in an int32 where the rows allow it, else as bytes."""
    return codes.view(torch.uint8 if codes.shape[-1] % 4 or not codes.numel() else torch.int32)


def has_words(codes: Tensor | None) -> bool:
    """Whether `as_words` gave four codes in an int32."""
    return codes is not None and codes.dtype == torch.int32


def is_square(spec: ScaleSpec) -> bool:
    """Whether a block has several rows and several columns."""
    return 1 not in spec.block and not spec.is_per_tensor


def empty_values(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Uninitialised values for a kernel to write: of this dtype, or of float32 for float64."""
    return torch.empty(shape, dtype=torch.float32 if dtype == torch.float64 else dtype, device=device)


def empty_copies(
    shape: torch.Size,
    spec: ScaleSpec,
    device: torch.device,
    *,
    rowwise: bool = True,
    columnwise: bool = True,
    stacked: bool = False,
    splits: Splits | None = None,
) -> Copies:
    """Uninitialised copies of a tensor of this shape, in the layout above."""
    lead, columns = tuple(shape[:1] if stacked else ()), shape[-1]
    rows = shape[-2] if stacked else math.prod(shape[:-1])
    transposed, square = spec.columnwise == "transposed", is_square(spec)

    def empty(made: bool, size: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        return torch.empty(size, dtype=dtype, device=device) if made else None

    def row_blocks(block: int) -> int:
        if splits is None:
            return rows if block == 1 else 1 if block == ALL else cdiv(rows, block)
        return rows if block == 1 else splits.num_groups if block == ALL else splits.aligned_capacity(block) // block

    def column_blocks(block: int) -> int:
        return 1 if block == ALL else cdiv(columns, block)

    padded = splits.aligned_capacity(spec.alignment) if splits is not None else rows
    if splits is None and not stacked:
        padded = cdiv(rows, spec.alignment) * spec.alignment
    row_codes = empty(rowwise, shape, spec.element.dtype)
    column_codes = empty(columnwise, (*lead, columns, padded) if transposed else shape, spec.element.dtype)
    scale_dtype = spec.scale_rule.dtype
    if spec.is_per_tensor:
        count = (shape[0],) if stacked else () if splits is None else (splits.num_groups,)
        scale = torch.empty(count, dtype=scale_dtype, device=device)
        return Copies(row_codes, scale if rowwise else None, column_codes, scale if columnwise else None)
    of_rows, of_columns = ((row_blocks(block[0]), column_blocks(block[1])) for block in (spec.block, spec.block[::-1]))
    if not transposed:
        row_size, column_size = (*shape[:-1], of_rows[1]), (*lead, of_columns[0], columns)
    elif square:
        row_size, column_size = (*lead, *of_rows), (*lead, *of_columns[::-1])
    else:
        row_size, column_size = (*lead, *of_rows[::-1]), (*lead, *of_columns)
    return Copies(
        row_codes, empty(rowwise, row_size, scale_dtype), column_codes, empty(columnwise, column_size, scale_dtype)
    )
