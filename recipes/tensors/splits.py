"""Splits: how the rows of one buffer are divided among groups (tokens among experts).

Row capacity and active rows are two things: `rows` is how many rows the buffer has, `offsets[-1]` how many of them
belong to a group. The rows past the sum belong to none. Everything here but `tolist` stays on the device and has a
shape that does not depend on the sizes, so a CUDA graph can be replayed with other splits.

    sizes = [3, 0, 4], rows = 8  ->  offsets           [0, 3, 3, 7]
                                     ends                 [3, 3, 7]
                                     group_of_row      [0, 0, 0, 2, 2, 2, 2, 3]      (3 = none)
                                     aligned(4)        [0, 4, 4, 8]
                                     row_in_padded(4)  [0, 1, 2, 4, 5, 6, 7, ...]
                                     block_of_row(2)   [0, 0, 1, 2, 2, 3, 3, ...]
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import accumulate, pairwise
from operator import index
from typing import Any

import torch
from torch import Tensor

from recipes.tensors.abstract import is_abstract
from recipes.triton.offsets import aligned_offsets, clamped_offsets

Key = tuple[str, int]


class Splits:
    """Group sizes of a buffer of `rows` rows, and what kernels derive from them. Build one with `Splits.make`.

    Derived tensors are computed at their first use and kept. All of them come from `offsets`, which is this
    object's own memory: refilling the caller's `split_sizes` between forward and backward does no harm. (So a graph to
    be replayed with other sizes captures `make` too: pass it the tensor, not Splits made before.)
    """

    def __init__(self, tensors: dict[Key, Tensor | None], rows: int, num_groups: int, host: list[int] | None):
        self.rows = rows
        self.num_groups = num_groups
        self._tensors = tensors
        self._host = host

    @staticmethod
    def make(
        split_sizes: Tensor | Sequence[int] | Splits,
        *,
        rows: int,
        device: torch.device | str,
        num_groups: int | None = None,
        alignment: int | None = None,
    ) -> Splits:
        """Splits of a buffer of `rows` rows on `device`.

        split_sizes: [G] int32 or int64 (any integer dtype), also of numpy, a sequence of ints, or Splits made for this
        many rows.

        Sizes on the host are checked: a negative one or a sum above `rows` is a ValueError. Sizes on the device are
        clamped instead (negative to 0, the sum to `rows`), because looking at them would synchronise, and so are
        sizes without numbers (meta and fake tensors). A sum below `rows` is legal.

        alignment: for which `aligned` will be read, so that sizes on the device are divided and aligned at once
        """
        device = torch.device(device)
        if isinstance(split_sizes, Splits):
            _check_made_for(split_sizes, rows, device)
            splits = split_sizes
        elif isinstance(split_sizes, Tensor):
            _check_sizes_tensor(split_sizes)
            on_host = split_sizes.device.type == "cpu" and not is_abstract(split_sizes)
            splits = (
                checked_splits(split_sizes.tolist(), rows, device)
                if on_host
                else clamped_splits(split_sizes, rows, alignment)
            )
        else:
            splits = checked_splits(_as_ints(split_sizes), rows, device)
        if num_groups is not None and splits.num_groups != num_groups:
            raise ValueError(
                f"split_sizes has {splits.num_groups} entries, but there are {num_groups} groups. "
                "Pass one size for each group, 0 for an empty one."
            )
        return splits

    @staticmethod
    def whole(rows: int, device: torch.device) -> Splits:
        """One group that has all rows. Made on the device, also while a CUDA graph is captured."""
        return Splits({("offsets", 0): torch.arange(2, device=device) * rows}, rows, 1, [rows])

    @staticmethod
    def over(offsets: Tensor, rows: int) -> Splits:
        """Splits with these offsets, [G + 1] int64, which are those of other splits of `rows` rows."""
        return Splits({("offsets", 0): offsets}, rows, offsets.shape[0] - 1, None)

    @property
    def device(self) -> torch.device:
        return self.offsets.device

    @property
    def offsets(self) -> Tensor:
        """[G + 1] int64: group g has the rows offsets[g] to offsets[g + 1]; offsets[-1] rows are active."""
        offsets = self._tensors["offsets", 0]
        assert offsets is not None, "an empty template has no tensors: rebuild it first"
        return offsets

    @property
    def sizes(self) -> Tensor:
        """[G] int64, clamped so that they agree with the offsets."""
        return self._once("sizes", 0, lambda: self.offsets.diff())

    @property
    def ends(self) -> Tensor:
        """[G] int32: offsets[1:], as torch's grouped GEMM takes them."""
        return self._once("ends", 0, lambda: self.offsets[1:].to(torch.int32))

    @property
    def group_of_row(self) -> Tensor:
        """[rows] int64: the group of each row; `num_groups` for the rows past the sum."""
        return self._once("group_of_row", 0, lambda: _find(self.offsets, self.rows))

    def aligned(self, block: int) -> Tensor:
        """[G + 1] int64: the offsets when each group is rounded up to a multiple of `block`."""
        return self._once("aligned", block, lambda: aligned_offsets(self.offsets, block))

    def aligned_capacity(self, block: int) -> int:
        """The most rows that `aligned(block)` can need for any splits of this buffer; a multiple of `block`.

        Of blocks of 16 rows, which are those of 4-bit codes, a multiple of 64, with space for the rows of no group too:
        so rows of a transposed copy begin at units of memory, 32 bytes, and its last unit is whole.
        """
        rows = self.rows + self.num_groups * (block - 1)
        return -(-rows // 64) * 64 if block == 16 else rows // block * block

    def padded(self, block: int) -> Splits:
        """The splits of a buffer in which each group is padded to a multiple of `block` rows; itself for 1."""
        if block == 1:
            return self
        return Splits({("offsets", 0): self.aligned(block)}, self.aligned_capacity(block), self.num_groups, None)

    def row_in_padded(self, block: int) -> Tensor:
        """[rows] int64: where each row stands in that buffer. Rows past the sum: somewhere in it; mask them."""

        def compute() -> Tensor:
            group = self.group_of_row
            shift = (self.aligned(block) - self.offsets).index_select(0, group)
            row = torch.arange(self.rows, device=group.device) + shift
            return row.clamp(max=max(self.aligned_capacity(block) - 1, 0))

        return self._once("row_in_padded", block, compute)

    def block_of_row(self, block: int) -> Tensor:
        """[rows] int64: which block of `block` rows each row falls in when each group starts a new block.

        There are at most aligned_capacity(block) / block of them. The rows past the sum fall in one of these too: mask
        them, or give them zeros.
        """

        def compute() -> Tensor:
            group = self.group_of_row
            row = torch.arange(self.rows, device=group.device)
            in_group = row - self.offsets.index_select(0, group)
            first = (self.aligned(block) // block).index_select(0, group)
            last = max(self.aligned_capacity(block) // block - 1, 0)
            return (first + in_group // block).clamp(max=last)

        return self._once("block_of_row", block, compute)

    def divides_as(self, other: Splits) -> bool:
        """Whether both surely divide rows alike: by the same offsets in memory, or by equal sizes on the host.

        Never waits for the device."""
        if (self.rows, self.num_groups) != (other.rows, other.num_groups):
            return False
        if self.offsets.data_ptr() == other.offsets.data_ptr() and self.device == other.device:
            return True
        return self._host is not None and self._host == other._host

    def tolist(self) -> list[int]:
        """The sizes on the host. Reads the device, once: for the split path and for references only."""
        if self._host is None:
            offsets = self.offsets.tolist()
            self._host = [end - start for start, end in pairwise(offsets)]
        return self._host

    def tensors(self) -> tuple[Tensor | None, ...]:
        """The tensors made so far, to travel through `save_for_backward`; the offsets alone within `offsets_alone`."""
        return (self.offsets,) if _offsets_alone.get() else tuple(self._tensors.values())

    def rebuild(self, tensors: Sequence[Tensor | None]) -> Splits:
        """The same splits over `tensors`, which come from `tensors()`. With Nones in their place: an empty template."""
        # Keys are only ever added at the end, so tensors taken earlier still match theirs.
        host = None if _offsets_alone.get() else self._host
        return Splits(dict(zip(self._tensors, tensors, strict=False)), self.rows, self.num_groups, host)

    def empty(self) -> Splits:
        """A template to `rebuild` these from, which keeps no tensor alive."""
        return self.rebuild([None] * len(self.tensors()))

    @property
    def layout(self) -> tuple[Any, ...]:
        """All but the tensors' values. Raises TypeError where the sizes are known on the host, which are values."""
        if self._host is not None:
            raise TypeError("these splits' sizes are on the host")
        return self.rows, self.num_groups, *self._tensors

    def derived(self, count: int) -> tuple[tuple[Key, Tensor | None], ...]:
        """The tensors made since there were `count`, with their keys."""
        return tuple(self._tensors.items())[count:]

    def keep(self, derived: Sequence[tuple[Key, Tensor | None]]) -> None:
        """Take these, which others with the same offsets have `derived`."""
        for key, tensor in derived:
            self._tensors.setdefault(key, tensor)

    def __repr__(self) -> str:
        sizes = f"sizes={self._host}, " if self._host is not None else ""
        return f"Splits({sizes}num_groups={self.num_groups}, rows={self.rows})"

    def _once(self, name: str, block: int, compute: Callable[[], Tensor]) -> Tensor:
        tensor = self._tensors.get((name, block))
        if tensor is None:
            tensor = self._tensors[name, block] = compute()
        return tensor


@contextmanager
def offsets_alone() -> Iterator[None]:
    """Inside, Splits travel as their offsets: what is derived from these, or read on the host, stays behind. What
    comes out then does not depend on which of it a computation needed."""
    token = _offsets_alone.set(True)
    try:
        yield
    finally:
        _offsets_alone.reset(token)


_offsets_alone: ContextVar[bool] = ContextVar("fuser_offsets_alone", default=False)


def checked_splits(sizes: list[int], rows: int, device: torch.device) -> Splits:
    """Splits of sizes on the host. Raises ValueError for a negative size or a sum above `rows`."""
    if not sizes:
        raise ValueError("split_sizes is empty. Pass one size for each group.")
    if min(sizes) < 0:
        group = next(group for group, size in enumerate(sizes) if size < 0)
        raise ValueError(f"split_sizes[{group}] is {sizes[group]}, but cannot be negative. Pass 0 for an empty group.")
    total = sum(sizes)
    if total > rows:
        raise ValueError(
            f"split_sizes sum to {total}, but x has only {rows} rows. "
            "Pass the sizes that belong to this x, or more rows."
        )
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "split_sizes is on the host, but a CUDA graph is being captured and would replay a copy from freed memory. "
            f"Pass split_sizes as a tensor on {device}."
        )
    offsets = torch.tensor([0, *accumulate(sizes)], dtype=torch.int64, device="cpu")
    if device.type != "cpu":
        offsets = offsets.to(device, non_blocking=True)  # a blocking copy to the device would synchronise
    return Splits({("offsets", 0): offsets}, rows, len(sizes), sizes)


def clamped_splits(sizes: Tensor, rows: int, alignment: int | None = None) -> Splits:
    """Splits of sizes [G] on the device, which is not read: a negative size becomes 0, the offsets end at `rows`."""
    offsets, aligned = clamped_offsets(sizes, rows, alignment)
    tensors: dict[Key, Tensor | None] = {("offsets", 0): offsets}
    if alignment is not None:
        tensors["aligned", alignment] = aligned
    return Splits(tensors, rows, sizes.numel(), None)


def _find(offsets: Tensor, length: int) -> Tensor:
    """[length] int64: for i = 0, 1, ... the segment g with offsets[g] <= i < offsets[g + 1], else the last index."""
    return torch.searchsorted(offsets[1:], torch.arange(length, device=offsets.device), right=True)


def _as_ints(sizes: Any) -> list[int]:
    """The sizes of a sequence, or of an array of numpy's. What has no order of its own, or one pass only, has none."""
    if isinstance(sizes, str | bytes | bytearray) or not (isinstance(sizes, Sequence) or hasattr(sizes, "__array__")):
        raise TypeError(
            f"split_sizes is of type {type(sizes).__name__}, but must be a list or a tensor of integers. Pass one."
        )
    shape = getattr(sizes, "shape", None)
    if shape is not None and len(shape) != 1:
        raise ValueError(
            f"split_sizes has shape {list(shape)}, but must be [num_groups]. Pass one size for each group."
        )
    try:
        if bool in set(map(type, sizes)):
            raise TypeError
        return [index(size) for size in sizes]
    except TypeError:
        raise TypeError(f"split_sizes must be integers, but is {sizes!r}. Pass ints.") from None


def _check_sizes_tensor(sizes: Tensor) -> None:
    if sizes.requires_grad:
        raise ValueError("split_sizes requires a gradient, but sizes have none. Pass a tensor of integers.")
    if sizes.dtype.is_floating_point or sizes.dtype.is_complex or sizes.dtype == torch.bool:
        raise TypeError(f"split_sizes is {sizes.dtype}, but must be integers. Convert it to int32 or int64.")
    if sizes.ndim != 1 or sizes.numel() == 0:
        raise ValueError(
            f"split_sizes has shape {list(sizes.shape)}, but must be [num_groups]. Pass one size for each group."
        )


def _check_made_for(splits: Splits, rows: int, device: torch.device) -> None:
    if splits.rows != rows:
        raise ValueError(
            f"these Splits were made for {splits.rows} rows, but x has {rows}. "
            "Pass the sizes, or Splits.make(sizes, rows=...) for this x."
        )
    if splits.device.type != device.type or (device.index is not None and splits.device != device):
        raise ValueError(f"these Splits are on {splits.device}, but x is on {device}. Make them on x's device.")
