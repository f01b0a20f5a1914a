"""Pipeline schedules: the order of forwards, dgrads and wgrads, read and checked before anything runs.

An order is a list of entries. Chunks are counted from 1, microbatches and layers from 0.

    number  text  what runs, for the next microbatch of chunk 2
       2    F2    forward, layers in ascending order
      -2    B2    dgrad, layers in reverse; includes the wgrad of layers that do not delay theirs
    -2.5    W2    delayed wgrad, layers in reverse

Forwards, dgrads and wgrads of a chunk are counted separately, so several wgrads may be outstanding. A chunk may have
any number of layers, including none. "F2@3" names the microbatch, which is then checked. The rules:

    R0 reading    an entry has one of the forms above, with a chunk that exists, and an order has at most MOST_ENTRIES
                  entries and MOST_EVENTS events
    R1 totals     each chunk has as many forwards and dgrads as there are microbatches; as many wgrads if it delays
                  them, else none
    R2 causality  a dgrad comes after its forward, a wgrad after its dgrad
    R3 matching   the k-th entry of a kind and chunk belongs to microbatch k
    R8 chaining   if chunk c follows chunk c - 1: its forward comes after the forward of c - 1, its dgrad before theirs
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, pairwise
from typing import NamedTuple

from fuser.schedule.error import Problem, ScheduleError, number_of, show
from fuser.schedule.read import (
    MOST_EVENTS,
    READING,
    Entry,
    Item,
    Pass,
    argument_problems,
    error_of,
    few,
    number_of_entry,
    read_entries,
    read_items,
    read_order,
)

__all__ = ["Entry", "Event", "Place", "Item", "Pass", "Problem", "Schedule", "ScheduleError", "read_order"]


class Event(NamedTuple):
    """One pass over one layer of a chunk, for one microbatch."""

    kind: Pass
    chunk: int
    microbatch: int
    layer: int

    @property
    def instance(self) -> Place:
        """The forward instance to which this pass belongs."""
        return self.chunk, self.microbatch, self.layer

    def __str__(self) -> str:
        return f"{self.kind.value}{self.chunk}@{self.microbatch} layer {self.layer}"


Place = tuple[int, int, int]  # chunk, microbatch, layer


@dataclass(frozen=True)
class Schedule:
    """A checked order. Make one with `Schedule.parse`.

    entries:      in order, each with its microbatch
    layers:       number of layers of each chunk
    microbatches: number of microbatches that each chunk runs
    delayed:      for each chunk, whether it has delayed wgrads
    events:       the entries expanded into one event for each layer
    """

    entries: tuple[Entry, ...]
    layers: tuple[int, ...]
    microbatches: int
    delayed: tuple[bool, ...]
    events: tuple[Event, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "events", tuple(event for entry in self.entries for event in self.spread(entry)))

    @classmethod
    def parse(
        cls,
        order: str | Iterable[Item],
        *,
        layers: Sequence[int] | int | None = None,
        microbatches: int | None = None,
        delayed: Sequence[bool | None] | bool | None = None,
        follows: Collection[int] = (),
    ) -> Schedule:
        """Read an order and check it by all rules.

            Schedule.parse([1, 1, -1, -1, -1.5, -1.5]) == Schedule.parse("F1 F1 B1 B1 W1 W1")

        order:        numbers, texts or Entry objects, also mixed, or one text
        layers:       for each chunk; one number for all if there are no wgrads; None: one layer each
        microbatches: None: the largest number of forwards or dgrads of any chunk
        delayed:      whether a chunk has layers that delay their wgrad; None: it does if the order has wgrads for it
        follows:      chunks whose input is the output of the preceding chunk on this rank (rule R8)

        Raises ScheduleError, a ValueError, with all problems.
        """
        items = read_items(order)
        entries, problems = read_entries(items)
        layers, delayed, follows = few(layers), few(delayed), few(follows)
        # The other rules need valid arguments.
        if wrong := list(argument_problems(layers, microbatches, delayed, follows)):
            raise error_of(items, [*problems, *wrong])
        places = _places(entries)
        has_wgrads = any(kind is Pass.WGRAD for kind, _ in places)
        highest = max((chunk for _, chunk in places), default=0)
        chunks = highest if layers is None or isinstance(layers, int) else len(layers)
        problems += [
            *_layers_problems(layers, entries, has_wgrads),
            *_total_problems(places, chunks, microbatches, _delays(layers, delayed, places)),
            *_causality_problems(places),
            *_matching_problems(entries, places),
            *_chaining_problems(places, follows, chunks),
        ]
        if delayed is not None and not isinstance(delayed, bool) and len(delayed) != chunks:
            problems.append(
                Problem("R1 (totals)", (), f"delayed has {len(delayed)} values for {chunks} chunks. Give one each.")
            )
        if problems:
            raise error_of(items, problems)
        alike = layers if isinstance(layers, int) else 1
        of_chunks: tuple[int, ...] = layers if isinstance(layers, tuple) else (alike,) * chunks
        if too_many := _event_problem(places, of_chunks):
            raise error_of(items, [too_many])
        counted = {position: k for positions in places.values() for k, position in enumerate(positions)}
        return cls(
            tuple(replace(entry, microbatch=counted[position]) for position, entry in entries.items()),
            of_chunks,
            len(places[Pass.FORWARD, 1]),
            tuple((Pass.WGRAD, chunk) in places for chunk in range(1, chunks + 1)),
        )

    @property
    def order(self) -> list[float]:
        """The order in TransformerEngine's notation."""
        return [entry.number for entry in self.entries]

    def spread(self, entry: Entry) -> tuple[Event, ...]:
        """The events of one entry: layers ascending in forward, descending in backward."""
        layers = range(self.layers[entry.chunk - 1])
        assert entry.microbatch is not None, f"{entry} was not checked"
        return tuple(
            Event(entry.kind, entry.chunk, entry.microbatch, layer)
            for layer in (layers if entry.kind is Pass.FORWARD else reversed(layers))
        )

    def index(self, instance: Place) -> int:
        """The index of this forward instance in TransformerEngine's flat tuples (callables, sample arguments)."""
        chunk, microbatch, layer = instance
        before = sum(self.layers[: chunk - 1]) * self.microbatches
        return before + microbatch * self.layers[chunk - 1] + layer

    def notes(self) -> list[str]:
        """Parts of the schedule that are valid here but not in other frameworks, and cost memory (rules R4 and R5)."""
        notes = []
        step = {Pass.FORWARD: 0, Pass.DGRAD: 1, Pass.WGRAD: -1}
        for chunk in (chunk for chunk, delays in enumerate(self.delayed, 1) if delays):
            most = max(accumulate(step[entry.kind] for entry in self.entries if entry.chunk == chunk))
            if most > 1:
                notes.append(f"R4: up to {most} wgrads of chunk {chunk} are outstanding; TransformerEngine allows one.")
        backward = [entry for entry in self.entries if entry.kind is not Pass.FORWARD]
        apart = [
            first for first, then in pairwise(backward)
            if first.kind is Pass.DGRAD and self.delayed[first.chunk - 1] and then != replace(first, kind=Pass.WGRAD)
        ]  # fmt: skip
        if apart:
            notes.append(
                f"R5: another backward entry stands between {apart[0]} and its wgrad"
                + (f", and so for {len(apart) - 1} more" if len(apart) > 1 else "")
                + "; Megatron's shared output gradients do not allow it."
            )
        return notes

    def __str__(self) -> str:
        return " ".join(entry.name for entry in self.entries)


# (kind, chunk) -> positions of its entries, in order
Places = Mapping[tuple[Pass, int], Sequence[int]]


def check_schedule(given: object) -> None:
    """Raise TypeError for anything but a Schedule, such as an order that has not been read."""
    if not isinstance(given, Schedule):
        raise TypeError(
            f"schedule is a {type(given).__name__}, but must be a Schedule. Read an order by Schedule.parse(order)."
        )


def _places(entries: Mapping[int, Entry]) -> Places:
    places = defaultdict(list)
    for position, entry in entries.items():
        places[entry.kind, entry.chunk].append(position)
    return dict(places)


def _of_chunk(places: Places, chunk: int) -> list[int]:
    own = [places.get((kind, chunk), ()) for kind in (Pass.FORWARD, Pass.DGRAD, Pass.WGRAD)]
    return sorted(chain(*own))


def _layers_problems(
    layers: Sequence[int] | int | None, entries: Mapping[int, Entry], has_wgrads: bool
) -> Iterator[Problem]:
    if isinstance(layers, int):
        if has_wgrads:
            wgrads = tuple(position for position, entry in entries.items() if entry.kind is Pass.WGRAD)
            yield Problem(
                READING, wgrads,
                f"layers={layers} is one number for all chunks, and there are wgrads. Give a number for each chunk.",
            )  # fmt: skip
    elif layers is not None:
        beyond = tuple(position for position, entry in entries.items() if entry.chunk > len(layers))
        if beyond:
            yield Problem(
                READING, beyond,
                f"{entries[beyond[0]].name} names chunk {entries[beyond[0]].chunk}, but layers has {len(layers)} "
                "chunks. Give layers for each chunk.",
            )  # fmt: skip


def _delays(
    layers: Sequence[int] | int | None, delayed: Sequence[bool | None] | bool | None, places: Places
) -> Mapping[int, bool]:
    """chunk -> whether it must have wgrads, as far as given. A chunk without layers may have them or not."""
    if delayed is None:
        return {}
    said = {c: delayed for _, c in places} if isinstance(delayed, bool) else dict(enumerate(delayed, 1))
    empty = {c for c, count in enumerate(layers, 1) if count == 0} if isinstance(layers, Sequence) else set()
    return {c: delays for c, delays in said.items() if delays is not None and c not in empty}


def _total_problems(
    places: Places, chunks: int, microbatches: int | None, delays: Mapping[int, bool]
) -> Iterator[Problem]:
    rule = "R1 (totals)"
    counts = {key: len(positions) for key, positions in places.items()}
    named = sorted({chunk for _, chunk in counts})
    if not named and not chunks:
        yield Problem(rule, (), "There is no entry that can be read. Give at least F1 B1 (1, -1).")
        return
    if missing := chunks - sum(chunk <= chunks for chunk in named):
        given = set(named)
        first = next(chunk for chunk in range(1, chunks + 1) if chunk not in given)
        more = f", nor have {missing - 1} more chunks" if missing > 1 else ""
        behind = tuple(sorted(position for (_, c), own in places.items() if c > first for position in own))
        mend = "Number the chunks without gaps, or add entries."
        yield Problem(rule, behind, f"chunk {first} has no entry{more}. {mend}")
    most = max((count for (kind, _), count in counts.items() if kind is not Pass.WGRAD), default=0)
    needed, why = (most, "the largest count") if microbatches is None else (microbatches, "as given")
    if microbatches is not None and microbatches < 1:
        yield Problem(rule, (), f"microbatches={show(microbatches)} runs nothing. Give at least 1.")
    for chunk in named:
        wgrads = counts.get((Pass.WGRAD, chunk), 0)
        expected = {Pass.FORWARD: needed, Pass.DGRAD: needed}
        expected[Pass.WGRAD] = needed if delays.get(chunk, wgrads > 0) else 0
        for kind, right in expected.items():
            count = counts.get((kind, chunk), 0)
            if count == right:
                continue
            name = f"{kind}{chunk} ({number_of_entry(kind, chunk)})"
            mend = f"Add {right - count} more {name}" if count < right else f"Take {count - right} {name} away"
            if kind is Pass.WGRAD and not right:
                because, mend = "no layer of it delays its wgrad", f"{mend}, or let a layer delay its wgrad"
            else:
                because = f"microbatches = {needed} ({why})"
            positions = places.get((kind, chunk)) or _of_chunk(places, chunk)
            yield Problem(
                rule, tuple(positions),
                f"chunk {chunk} has {number_of(count, kind.noun)}, but {because}. {mend}.",
            )  # fmt: skip


def _event_problem(places: Places, layers: Sequence[int]) -> Problem | None:
    events = {chunk: len(_of_chunk(places, chunk)) * count for chunk, count in enumerate(layers, 1)}
    if (total := sum(events.values())) <= MOST_EVENTS:
        return None
    most = max(events, key=events.__getitem__)
    return Problem(
        READING, tuple(_of_chunk(places, most)),
        f"entries by layers make {total} events, {events[most]} of them of chunk {most}. Give at most {MOST_EVENTS}.",
    )  # fmt: skip


def _causality_problems(places: Places) -> Iterator[Problem]:
    for first, then in pairwise(Pass):
        for chunk in sorted(chunk for kind, chunk in places if kind is then):
            before, after = places.get((first, chunk), ()), places[then, chunk]
            early = [k for k, position in enumerate(after) if k >= len(before) or before[k] > position]
            if early:
                position = after[early[0]]
                there = sum(place < position for place in before)
                yield Problem(
                    "R2 (causality)", tuple(after[k] for k in early),
                    f"at entry {position} chunk {chunk} begins {then.noun} {early[0] + 1}, but only "
                    f"{number_of(there, first.noun)} stand{'s' * (there == 1)} before it. "
                    f"Put each {then.value}{chunk} behind its {first.value}{chunk}.",
                )  # fmt: skip


def _matching_problems(entries: Mapping[int, Entry], places: Places) -> Iterator[Problem]:
    for (kind, chunk), positions in places.items():
        said = [(position, k, entries[position].microbatch) for k, position in enumerate(positions)]
        wrong = [(position, k, microbatch) for position, k, microbatch in said if microbatch not in (None, k)]
        if wrong:
            _, k, microbatch = wrong[0]
            yield Problem(
                "R3 (matching)", tuple(position for position, _, _ in wrong),
                f"{kind.noun} {k + 1} of chunk {chunk} is said to be of microbatch {microbatch}, but each kind runs "
                f"them in order, from 0. Write {kind.value}{chunk}@{k}, or {kind.value}{chunk}.",
            )  # fmt: skip


def _chaining_problems(places: Places, follows: Collection[int], chunks: int) -> Iterator[Problem]:
    rule = "R8 (chaining)"
    for chunk in sorted(follows):
        if not 2 <= chunk <= chunks:
            yield Problem(rule, (), f"follows names chunk {show(chunk)}. Give chunks from 2 to {chunks}.")
        for kind, first, then in ((Pass.FORWARD, chunk - 1, chunk), (Pass.DGRAD, chunk, chunk - 1)):
            pairs = zip(places.get((kind, first), ()), places.get((kind, then), ()), strict=False)
            early = [(k, after) for k, (before, after) in enumerate(pairs) if before > after]
            if early:
                yield Problem(
                    rule, tuple(position for _, position in early),
                    f"{kind.noun} of chunk {then} and microbatch {early[0][0]} needs that of chunk {first}, since "
                    f"chunk {chunk} follows on chunk {chunk - 1}. Put {kind.value}{first} before {kind.value}{then}.",
                )  # fmt: skip
