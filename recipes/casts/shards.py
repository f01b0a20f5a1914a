"""The codes and scales of some rows of a weight [N, K], or of some of stacked weights [G, N, K].

Each tensor of a copy has an axis along which its entries follow dim 0 of the values, and an entry for each so many of
them (`recipes.casts.layout`, of NVFP4 `recipes.casts.cast_nvfp4`); or it belongs to all rows at once. So parts that
begin where blocks do are slices, and lie together as the whole does, bit for bit.
"""
# G groups, N rows, K columns, B rows and C columns of a block, P rows with the padding

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.casts.layout import is_square
from recipes.casts.members import Stored
from recipes.casts.scale_rules import NVFP4Scale
from recipes.tensors.formats import ALL, ScaleSpec
from recipes.triton.launch import cdiv


class Entries(NamedTuple):
    """axis: of a tensor, along which its entries follow dim 0 of the values; each: how many of dim 0 one entry has;
    multiple: of how many of dim 0 the entries are, zeros behind the last one."""

    axis: int
    each: int
    multiple: int = 1

    def count(self, length: int) -> int:
        """Of so many of dim 0."""
        return cdiv(cdiv(length, self.multiple) * self.multiple, self.each)


Layout = tuple[Entries | None, ...]  # of codes, scale_inv and amax; None belongs to all rows


def layout_of(spec: ScaleSpec, columnwise: bool, stacked: bool) -> Layout:
    """Of one copy of a weight [N, K], or of stacked ones."""
    if stacked:
        return (Entries(0, 1),) * 3
    rows = spec.block_of(columnwise)[0]
    transposed = columnwise and spec.columnwise == "transposed"
    if isinstance(spec.scale_rule, NVFP4Scale):
        padded = Entries(1, 2, spec.alignment), Entries(1, spec.alignment, spec.alignment), None
        return padded if columnwise else (Entries(0, 1), Entries(0, 1), None)
    codes = Entries(1, 1, spec.alignment) if transposed else Entries(0, 1)
    if rows == ALL:
        return codes, None, None
    if spec.columnwise != "transposed":
        return codes, Entries(0, rows if columnwise else 1), None
    across = columnwise if is_square(spec) else not columnwise  # [K / C, ...]
    return codes, Entries(1 if across else 0, rows), None


def rows_of_block(spec: ScaleSpec, columnwise: bool, stacked: bool) -> int:
    """Parts begin at multiples of this number along dim 0."""
    entries = [each for each in layout_of(spec, columnwise, stacked) if each is not None]
    block = 1 if stacked else spec.block_of(columnwise)[0]  # also where its scale stands in each of its rows
    return max(block, *(max(each.each, each.multiple) for each in entries))


def spans_rows(spec: ScaleSpec, columnwise: bool, stacked: bool) -> bool:
    """Whether a scale, or an amax, is of all rows, so that it depends on rows of other parts."""
    return not stacked and (ALL in spec.block_of(columnwise)[:1] or isinstance(spec.scale_rule, NVFP4Scale))


def part_of(stored: Stored, layout: Layout, begin: int, end: int) -> Stored:
    """Of [begin, end) of dim 0, as a view. begin: a multiple of `rows_of_block`, or dim 0's length."""

    def cut(tensor: Tensor, entries: Entries | None) -> Tensor:
        if entries is None:
            return tensor
        first = entries.count(begin)
        return tensor.narrow(entries.axis, first, entries.count(end) - first)

    return _each(stored, layout, cut)


def zeros_of(stored: Stored, layout: Layout, length: int) -> Stored:
    """Codes and scales of 0 with so many of dim 0."""

    def zeros(tensor: Tensor, entries: Entries | None) -> Tensor:
        shape = list(tensor.shape)
        if entries is not None:
            shape[entries.axis] = entries.count(length)
        return tensor.new_zeros(shape)

    return _each(stored, layout, zeros)


def flat_bytes(tensor: Tensor, entries: Entries | None, length: int) -> Tensor:
    """One tensor of a part as bytes, entry by entry, with zeros up to the entries of so many of dim 0: [bytes] uint8.

    A view where the entries lie so.
    """
    if entries is None:
        return tensor.reshape(-1).view(torch.uint8)
    rows = tensor.movedim(entries.axis, 0)
    flat = rows.reshape(-1).view(torch.uint8)
    nbytes = entries.count(length) * math.prod(rows.shape[1:]) * tensor.element_size()
    return F.pad(flat, (0, nbytes - len(flat))) if len(flat) < nbytes else flat


def from_bytes(flat: Tensor, like: Tensor, entries: Entries | None, length: int) -> Tensor:
    """The inverse of the bytes of all parts, one behind another: a view, with the entries of so many of dim 0.

    like: this tensor of any part; of what belongs to all rows, the first part's is taken
    """
    if entries is None:
        return flat[: like.nbytes].view(like.dtype).view(like.shape)
    shape = list(like.shape)
    del shape[entries.axis]
    rows = flat.view(like.dtype).view(-1, *shape)
    return rows[: entries.count(length)].movedim(0, entries.axis)


def _each(stored: Stored, layout: Layout, function: Callable[[Tensor, Entries | None], Tensor]) -> Stored:
    pairs = zip(stored, layout, strict=True)
    return Stored(*(None if tensor is None else function(tensor, entries) for tensor, entries in pairs))  # type: ignore[arg-type]
