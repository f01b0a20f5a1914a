"""The lifetimes of a schedule's static buffers, which of them share memory, and how much memory they take.

A forward instance (chunk, microbatch, layer) has an F, a B and perhaps a W event. Lifetimes of its buffers, inclusive:

    input        [F, B]  the layer's input
    saved        [F, B]  tensors that forward saves for backward
    output       [F, B]  including the copy into the consumer's input
    output_grad  [B, B]
    delayed      [B, W]  tensors that dgrad makes for a delayed wgrad, if there is one
    input_grad   [B, B of its consumer], or, if sent to another rank, until the end of the next dgrad entry

Buffers that the delayed wgrad also reads (`LayerMemory.wgrad_reads`) live until W instead of B. Two buffers of the same
class and size share memory if their lifetimes do not overlap, so as many are allocated as are live at once.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from fuser.schedule.schedule import Entry, Event, Pass, Place, Schedule, check_schedule


class Buffer(StrEnum):
    """The class of a buffer; also the field of LayerMemory that holds its size."""

    INPUT = "input"
    SAVED = "saved"
    OUTPUT = "output"
    OUTPUT_GRAD = "output_grad"
    DELAYED = "delayed"
    INPUT_GRAD = "input_grad"


@dataclass(frozen=True)
class LayerMemory:
    """Bytes of a layer's buffers for one microbatch.

    wgrad_reads: buffers besides `delayed` that a delayed wgrad reads; empty for a layer that does not delay its wgrad.

    Raises ValueError for a negative size, or for a class of buffers that a wgrad cannot read.
    """

    input: int = 0
    saved: int = 0
    output: int = 0
    output_grad: int = 0
    delayed: int = 0
    input_grad: int = 0
    wgrad_reads: frozenset[Buffer] = frozenset({Buffer.INPUT, Buffer.OUTPUT_GRAD})

    def __post_init__(self) -> None:
        reads = frozenset(Buffer(name) for name in self.wgrad_reads)
        object.__setattr__(self, "wgrad_reads", reads)
        if negative := [buffer for buffer in Buffer if self.size(buffer) < 0]:
            raise ValueError(f"{negative[0]}={self.size(negative[0])} bytes is negative. Give sizes from 0 on.")
        if reads & {Buffer.DELAYED, Buffer.INPUT_GRAD}:
            raise ValueError(
                f"wgrad_reads={sorted(reads)}: give those of input, saved, output and output_grad that the delayed "
                "wgrad reads. It reads what is in `delayed` anyway, and never an input_grad."
            )

    def size(self, buffer: Buffer) -> int:
        size: int = getattr(self, buffer.value)
        return size


class Life(NamedTuple):
    """A buffer of one instance, in use from event `start` to `end`; `number` is its index in its class and size."""

    buffer: Buffer
    instance: Place
    size: int
    start: int
    end: int
    number: int


class Taken(NamedTuple):
    """Bytes of device memory that graphs take.

    static: inputs, outputs and their gradients, which are allocated outside of the pool
    pool:   everything that passes allocate: tensors saved for backward and for delayed wgrads, and temporaries within a
            pass. Counted in complete allocator segments, as the pool reserves them. None if unknown
    """

    static: int
    pool: int | None


class WgradCost(NamedTuple):
    """The cost of a layer's delayed wgrads: bytes of each, most outstanding at once, longest wait in events."""

    chunk: int
    layer: int
    size: int
    outstanding: int
    wait: int


@dataclass(frozen=True)
class MemoryPlan:
    """The assignment of buffers to instances over the events of a schedule, from `plan_memory`.

    taken: the device memory of the schedule's graphs; None before they are captured
    """

    schedule: Schedule
    layers: Sequence[Sequence[LayerMemory]]
    follows: Collection[int]
    lives: tuple[Life, ...]
    taken: Taken | None = None

    @cached_property
    def buffers(self) -> Mapping[tuple[Buffer, int], int]:
        """The number of buffers of each class and size."""
        counts: dict[tuple[Buffer, int], int] = defaultdict(int)
        for life in self.lives:
            counts[life.buffer, life.size] = max(counts[life.buffer, life.size], life.number + 1)
        return dict(counts)

    def allocated(self, buffer: Buffer | None = None) -> int:
        """Bytes of all buffers, or of those of one class."""
        return sum(size * count for (kind, size), count in self.buffers.items() if buffer in (None, kind))

    def unshared(self, buffer: Buffer | None = None) -> int:
        """Bytes of all buffers, or of those of one class, if instances did not share any."""
        return sum(life.size for life in self.lives if buffer in (None, life.buffer))

    def in_use(self, buffer: Buffer) -> list[int]:
        """The number of buffers of a class in use at each event."""
        return self._at_each_event(lambda life: int(life.buffer is buffer))

    @cached_property
    def live(self) -> list[int]:
        """Bytes in use at each event."""
        return self._at_each_event(lambda life: life.size)

    @property
    def peak(self) -> int:
        """The first event with the most bytes in use."""
        return self.live.index(max(self.live)) if self.live else 0

    @cached_property
    def wgrad_costs(self) -> list[WgradCost]:
        """The cost of each layer with delayed wgrads, in order."""
        at = _positions(self.schedule)
        waits: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
        for (kind, chunk, microbatch, layer), position in at.items():
            if kind is Pass.WGRAD:
                waits[chunk, layer].append((at[Event(Pass.DGRAD, chunk, microbatch, layer)], position))
        costs = []
        for (chunk, layer), spans in sorted(waits.items()):
            memory = self.layers[chunk - 1][layer]
            size = memory.delayed + sum(memory.size(buffer) for buffer in memory.wgrad_reads)
            outstanding = max(sum(start < end <= stop for start, stop in spans) for _, end in spans)
            costs.append(WgradCost(chunk, layer, size, outstanding, max(stop - start for start, stop in spans)))
        return costs

    def prompt(self) -> MemoryPlan:
        """The plan of the same schedule with each wgrad directly after its dgrad."""
        return plan_memory(_prompt(self.schedule), self.layers, follows=self.follows)

    def report(self) -> str:
        """Bytes by class, the peak, and the cost of each outstanding wgrad, as text."""
        rows = [("class", "buffers", "bytes", "without sharing")]
        for buffer in Buffer:
            count = sum(count for (kind, _), count in self.buffers.items() if kind is buffer)
            rows.append((buffer.value, str(count), _amount(self.allocated(buffer)), _amount(self.unshared(buffer))))
        rows.append(("total", str(sum(self.buffers.values())), _amount(self.allocated()), _amount(self.unshared())))
        lines = [f"{name:<12}{count:>9}{shared:>12}{own:>18}" for name, count, shared, own in rows if count != "0"]
        if self.live:
            lines.append(f"peak: {_amount(self.live[self.peak])} in use at event {self.peak}, "
                         f"{self.schedule.events[self.peak]}")  # fmt: skip
        lines += [
            f"wgrads of chunk {cost.chunk} layer {cost.layer}: {_amount(cost.size)} each, at most {cost.outstanding} "
            f"outstanding, for at most {cost.wait} event{'s' * (cost.wait != 1)}"
            for cost in self.wgrad_costs if cost.size
        ]  # fmt: skip
        if self.wgrad_costs:
            lines.append(f"with each wgrad directly behind its dgrad: {_amount(self.prompt().allocated())}")
        if self.taken is not None:
            static, pool = self.taken
            if pool is None:
                lines.append(f"the graphs take {_amount(static)} for inputs, outputs and their gradients, and a pool "
                             "of a size not known: a GPU shows it, with 2 warm-ups or more")  # fmt: skip
            else:
                lines.append(f"the graphs take {_amount(static + pool)}: {_amount(static)} for inputs, outputs and "
                             f"their gradients, and a pool of {_amount(pool)}")  # fmt: skip
        return "\n".join(lines)

    def _at_each_event(self, amount: Callable[[Life], int]) -> list[int]:
        changes = [0] * (len(self.schedule.events) + 1)
        for life in self.lives:
            changes[life.start] += amount(life)
            changes[life.end + 1] -= amount(life)
        return list(accumulate(changes[:-1]))


def plan_memory(
    schedule: Schedule, layers: LayerMemory | Sequence[Sequence[LayerMemory]], *, follows: Collection[int] = ()
) -> MemoryPlan:
    """Share buffers among the instances of a schedule, with as few buffers as possible.

    layers:  sizes by chunk and layer, or one for all layers
    follows: chunks whose input gradient the preceding chunk consumes on this rank (as in Schedule.parse)

    Raises ValueError if the numbers of layers differ from the schedule's, TypeError for an order that is no Schedule.
    """
    check_schedule(schedule)
    if isinstance(layers, LayerMemory):
        layers = [[layers] * count for count in schedule.layers]
    given = tuple(len(chunk) for chunk in layers)
    if given != schedule.layers:
        raise ValueError(f"layers has sizes for {given} layers by chunk, but the schedule has {schedule.layers}.")
    ends: dict[tuple[Buffer, int], list[tuple[int, int]]] = defaultdict(list)  # (end, number) of buffers in use
    free: dict[tuple[Buffer, int], list[int]] = defaultdict(list)
    made: Counter[tuple[Buffer, int]] = Counter()
    lives = []
    for life in sorted(_lives(schedule, layers, follows), key=lambda life: life.start):
        pool = life.buffer, life.size
        while ends[pool] and ends[pool][0][0] < life.start:
            heapq.heappush(free[pool], heapq.heappop(ends[pool])[1])
        if free[pool]:
            number = heapq.heappop(free[pool])
        else:
            number = made[pool]
            made[pool] += 1
        heapq.heappush(ends[pool], (life.end, number))
        lives.append(life._replace(number=number))
    return MemoryPlan(schedule, layers, follows, tuple(lives))


def _lives(schedule: Schedule, layers: Sequence[Sequence[LayerMemory]], follows: Collection[int]) -> Iterator[Life]:
    """The lifetime of every buffer of nonzero size, with number 0."""
    at = _positions(schedule)
    sent = _ends_of_sends(schedule)
    for event in schedule.events:
        if event.kind is not Pass.FORWARD:
            continue
        forward, dgrad = at[event], at[event._replace(kind=Pass.DGRAD)]
        wgrad = at.get(event._replace(kind=Pass.WGRAD))
        consumer = _consumer(schedule, event.instance, follows)
        consumed = sent[dgrad] if consumer is None else at[Event(Pass.DGRAD, *consumer)]
        spans = {
            Buffer.INPUT: (forward, dgrad),
            Buffer.SAVED: (forward, dgrad),
            Buffer.OUTPUT: (forward, dgrad),
            Buffer.OUTPUT_GRAD: (dgrad, dgrad),
            Buffer.INPUT_GRAD: (dgrad, consumed),
        }
        memory = layers[event.chunk - 1][event.layer]
        if wgrad is not None:
            spans[Buffer.DELAYED] = (dgrad, wgrad)
            spans.update({buffer: (spans[buffer][0], wgrad) for buffer in memory.wgrad_reads})
        for buffer, (start, end) in spans.items():
            if memory.size(buffer):
                yield Life(buffer, event.instance, memory.size(buffer), start, end, 0)


def _positions(schedule: Schedule) -> dict[Event, int]:
    return {event: position for position, event in enumerate(schedule.events)}


def _consumer(schedule: Schedule, instance: Place, follows: Collection[int]) -> Place | None:
    """The instance on this rank that consumes the input gradient, or None; chunks without layers are skipped."""
    chunk, microbatch, layer = instance
    if layer:
        return chunk, microbatch, layer - 1
    while chunk in follows:
        chunk -= 1
        if schedule.layers[chunk - 1]:
            return chunk, microbatch, schedule.layers[chunk - 1] - 1
    return None


def _ends_of_sends(schedule: Schedule) -> dict[int, int]:
    """Maps the last event of each dgrad entry to that of the next dgrad entry, or to the end of the schedule."""
    ends = []
    position = 0
    for entry in schedule.entries:
        position += len(schedule.spread(entry))
        if entry.kind is Pass.DGRAD and schedule.layers[entry.chunk - 1]:
            ends.append(position - 1)
    return dict(zip(ends, [*ends[1:], len(schedule.events) - 1], strict=True)) if ends else {}


def _prompt(schedule: Schedule) -> Schedule:
    entries: list[Entry] = []
    for entry in schedule.entries:
        if entry.kind is not Pass.WGRAD:
            entries.append(entry)
        if entry.kind is Pass.DGRAD and schedule.delayed[entry.chunk - 1]:
            entries.append(replace(entry, kind=Pass.WGRAD))
    return replace(schedule, entries=tuple(entries))


def _amount(size: int) -> str:
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size} B"
