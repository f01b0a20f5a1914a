"""The memory in which the ranks of a group exchange rows by kernels, and what the host learns of an overflow.

A group has one buffer for all its layers with the same capacity, experts, slots and bytes in a row. Behind one another
lie, on each rank, with C = capacity:

    numbers  [n] int64             of what each rank exchanges, among all that the ranks have agreed on
    counts   [n, E] int64          the pairs of each rank for each expert
    origins  [C] int32             the row to which the token of each row was written
    scales   [C], 8 bytes each     the probability of each row
    members  [C, topk] int32       the rows of a token here, at the row to which it was written
    rows     [C, row_bytes]        values, codes or sums
"""
# n ranks, T tokens, H features, E experts, C rows of a rank

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ops.kernels.collectives import RankGroup, difference
from ops.kernels.routing import symmetric_memory
from ops.kernels.routing.symmetric_triton import DIFFERENT, NUMBERS
from recipes.triton.launch import cdiv

BYTES_BESIDE_ROW = 12  # origin and scale; and 4 for each slot
_ONLY_TOKENS = "Only the tokens may differ: give every rank the same layer and recipe."
_ALIGNMENT = 128


class Extent(NamedTuple):
    """What a buffer has place for. capacity: C; num_experts: E; topk: the slots of a token; row_bytes: of its values"""

    capacity: int
    num_experts: int
    topk: int
    row_bytes: int
    device: torch.device


class SymmetricBuffers:
    """What the ranks of a group write and read of one another.

    agreed: what the ranks have agreed to exchange, in words, in the order of its numbers
    """

    def __init__(self, group: RankGroup, extent: Extent, agreed: Mapping[str, int]) -> None:
        capacity, num_experts, topk, row_bytes, device = extent
        # Not the group itself, whose end is that of the buffers.
        self.rank, self.num_ranks, self._shown = group.rank, group.size, repr(group)
        self.capacity, self.num_experts, self.topk, self.row_bytes = capacity, num_experts, topk, row_bytes
        self._agreed = agreed
        self.counts_at = _aligned(group.size * 8)
        self.origins_at = self.counts_at + _aligned(group.size * num_experts * 8)
        self.scales_at = self.origins_at + _aligned(capacity * 4)
        self.members_at = self.scales_at + _aligned(capacity * 8)
        self.rows_at = self.members_at + _aligned(capacity * topk * 4)
        self.num_bytes = self.rows_at + capacity * row_bytes
        self.memory = symmetric_memory.allocate(self.num_bytes, group, device)
        self.needed = torch.zeros(1, dtype=torch.int64, device=device)
        self.needed_on_host = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._regions: dict[tuple[int, torch.dtype, tuple[int, ...]], Tensor] = {}  # views, made once
        self._ready = _RowsWritten(device) if device.type == "cuda" else None
        self._steps = 0
        self._written_for: int | None = None  # the number of the step whose tokens are the last that were written

    @property
    def numbers(self) -> Tensor:
        """[n] int64: of what each rank exchanges."""
        return self._region(0, torch.int64, self.num_ranks)

    @property
    def counts(self) -> Tensor:
        """[n, E] int64: the pairs of each rank for each expert."""
        return self._region(self.counts_at, torch.int64, self.num_ranks, self.num_experts)

    @property
    def origins(self) -> Tensor:
        """[C] int32"""
        return self._region(self.origins_at, torch.int32, self.capacity)

    @property
    def members(self) -> Tensor:
        """[C, topk] int32"""
        return self._region(self.members_at, torch.int32, self.capacity, self.topk)

    def scales(self, dtype: torch.dtype) -> Tensor:
        """[C]"""
        return self._region(self.scales_at, dtype, self.capacity)

    def rows(self, dtype: torch.dtype, H: int) -> Tensor:
        """[C, H]. Raises ValueError if they do not fit."""
        if H * dtype.itemsize > self.row_bytes:
            raise ValueError(
                f"rows of {H} features in {dtype} take {H * dtype.itemsize} bytes each, but those that Dispatch sent "
                f"have {self.row_bytes}, for which symmetric memory was made. Give rows that return no more features."
            )
        return self._region(self.rows_at, dtype, self.capacity, H)

    def next_step(self) -> int:
        """The number of a new step, by which it is known again."""
        self._steps += 1
        return self._steps

    def note_written(self, step: int) -> None:
        """The tokens of this step have been written, and copied out."""
        self._written_for = step

    def note_read(self) -> None:
        """Other ranks read rows here, until the next barrier that all meet at."""
        self._written_for = None

    def are_free_for(self, step: int) -> bool:
        """Whether this rank may write its rows already: since the tokens of this step came, nothing was transferred."""
        return self._written_for == step

    def expect_rows(self) -> Callable[[], object] | None:
        """What to call once rows are written here, for `beside`; None without a GPU."""
        if self._ready is None:
            return None
        self._ready.is_recorded = False
        return self._ready.record

    @contextmanager
    def beside(self, rows: Tensor) -> Iterator[Callable[[Tensor], Tensor]]:
        """Inside, work goes to a stream of its own, behind the moment at which the rows that are expected were written,
        and the current stream waits for it at the end. If there was no such moment, or `rows` are others, all stays on
        the current stream.

        Gives what keeps a tensor that is made inside for the current stream.
        """
        ready = self._ready
        if ready is None or not ready.is_recorded or not self.are_here(rows):
            yield lambda made: made
            return
        ready.is_recorded = False
        current = torch.cuda.current_stream(rows.device)
        ready.event.wait(ready.stream)

        def keep(made: Tensor) -> Tensor:
            made.record_stream(current)
            return made

        with torch.cuda.stream(ready.stream):
            yield keep
        current.wait_stream(ready.stream)

    def are_here(self, rows: Tensor) -> bool:
        """Whether these were written here by what made them."""
        return rows.data_ptr() == self.memory.local.data_ptr() + self.rows_at

    def tell_host(self) -> None:
        """Let the host know of `needed`, without waiting."""
        self.needed_on_host.copy_(self.needed, non_blocking=True)

    def check_overflow(self) -> None:
        """Raise RuntimeError if it is known on the host that a step needed more rows, or that its ranks exchanged
        different things. It is then forgotten."""
        needed = int(self.needed_on_host)
        if needed:
            self.needed_on_host.zero_()
            self.needed.zero_()
            if needed >= DIFFERENT.value:
                agreed = list(self._agreed)
                some, others = divmod(needed - DIFFERENT.value, NUMBERS.value)
                raise RuntimeError(
                    f"The ranks of {self._shown} differed in what they exchanged. Some: {agreed[some]}; others: "
                    f"{agreed[others]}. The outputs and gradients of that step are NaN on every rank. "
                    f"{_ONLY_TOKENS}"
                )
            raise RuntimeError(
                f"A rank of {self._shown} would have received {needed} rows, but capacity is {self.capacity}, so the "
                f"outputs and gradients of that step are NaN on every rank. Give Dispatch a capacity of {needed} or "
                "more."
            )

    def _region(self, begin: int, dtype: torch.dtype, *shape: int) -> Tensor:
        found = self._regions.get((begin, dtype, shape))
        if found is None:
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            found = self.memory.local[begin : begin + num_bytes].view(dtype).view(shape)
            self._regions[begin, dtype, shape] = found
        return found


class _RowsWritten:
    """A moment on a stream, and the stream that waits for it. is_recorded: whether it was since it was expected"""

    def __init__(self, device: torch.device) -> None:
        self.event, self.stream = torch.cuda.Event(), torch.cuda.Stream(device)
        self.is_recorded = False

    def record(self) -> None:
        self.event.record()
        self.is_recorded = True


class _OfGroup:
    """The buffers of a group, and what its ranks have found to be the same on all of them."""

    def __init__(self) -> None:
        self.buffers: dict[Extent, SymmetricBuffers] = {}
        self.agreed: dict[str, int] = {}  # and its number, in their order


_of_groups: WeakKeyDictionary[ProcessGroup, _OfGroup] = WeakKeyDictionary()


def buffers_of(group: RankGroup, extent: Extent, about: str) -> tuple[SymmetricBuffers, int]:
    """Those of the group, once its ranks agree on what they exchange, which `about` says in words; and its number."""
    of_group = _of_groups.setdefault(group.process_group, _OfGroup())
    capturing = extent.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if about not in of_group.agreed:
        if capturing:
            raise RuntimeError(
                "A CUDA graph is being captured, but this layer has not exchanged anything before, and the ranks "
                "compare and allocate in the first forward. Run it once before the capture, on every rank."
            )
        differ = difference(group, about, _ONLY_TOKENS)
        if differ:
            raise RuntimeError(differ)
        of_group.agreed[about] = len(of_group.agreed)
    if extent not in of_group.buffers:
        of_group.buffers[extent] = SymmetricBuffers(group, extent, of_group.agreed)
    if not capturing:
        of_group.buffers[extent].check_overflow()
    return of_group.buffers[extent], of_group.agreed[about]


def check_overflow() -> None:
    """Raise RuntimeError if the host knows of a step in which a rank would have received more rows than its capacity.

    The error says how many would have sufficed; outputs and gradients of that step are NaN on every rank of the group.
    Nothing is waited for: a step is known here when its kernels are done, as after `loss.item()`. Call it on all ranks
    at such a place, then all of them raise. Also the next forward outside of a capture raises, once the host knows.
    """
    for of_group in _of_groups.values():
        for buffers in of_group.buffers.values():
            buffers.check_overflow()


def bytes_held(group: RankGroup, capacity: int) -> int:
    """The bytes of the buffers with this capacity that have been allocated on this rank for the group."""
    of_group = _of_groups.get(group.process_group)
    return sum(b.num_bytes for b in of_group.buffers.values() if b.capacity == capacity) if of_group else 0


def _aligned(num_bytes: int) -> int:
    return cdiv(num_bytes, _ALIGNMENT) * _ALIGNMENT
