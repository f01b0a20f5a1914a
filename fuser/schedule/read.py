"""Read the entries of an order from numbers, texts and objects, and report everything else (rule R0).

For any argument, reading ends within a second, with entries or with problems.
"""

from __future__ import annotations

import math
import operator
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence, Set, Sized
from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction
from itertools import islice
from numbers import Integral, Rational, Real
from typing import Any

from fuser.schedule.error import Problem, ScheduleError, show

READING = "R0 (reading)"
MOST_ENTRIES = 2**15
MOST_EVENTS = 2**17
# 15 digits, so that -c - 0.5, the number of a wgrad, is exact as a float.
HIGHEST_NUMBER = 10**15 - 1


class Pass(StrEnum):
    """What an entry computes."""

    FORWARD = "F"
    DGRAD = "B"
    WGRAD = "W"

    @property
    def noun(self) -> str:
        return self.name.lower()


@dataclass(frozen=True)
class Entry:
    """One entry of an order: a pass over all layers of a chunk. microbatch None means the next one.

    Raises ValueError for a kind other than F, B, W, for a chunk that is not an integer from 1 to HIGHEST_NUMBER, and
    for a microbatch that is not an integer from 0 on.
    """

    kind: Pass
    chunk: int
    microbatch: int | None = None

    def __post_init__(self) -> None:
        if type(self.kind) is not Pass:
            object.__setattr__(self, "kind", Pass(self.kind))
        microbatch = 0 if self.microbatch is None else self.microbatch
        whole = is_whole(self.chunk) and is_whole(microbatch)
        if not (whole and 1 <= self.chunk <= HIGHEST_NUMBER and 0 <= microbatch <= HIGHEST_NUMBER):
            raise ValueError(
                f"Entry({self.kind.value!r}, {show(self.chunk)}, {show(self.microbatch)}) does not exist. "
                f"Chunks are counted from 1, microbatches from 0, in whole numbers up to {HIGHEST_NUMBER}."
            )

    @property
    def number(self) -> float:
        """The entry in TransformerEngine's notation: F2 -> 2, B2 -> -2, W2 -> -2.5."""
        return number_of_entry(self.kind, self.chunk)

    @property
    def name(self) -> str:
        return f"{self.kind.value}{self.chunk}"

    def __str__(self) -> str:
        return self.name if self.microbatch is None else f"{self.name}@{self.microbatch}"


Item = float | str | Entry


def number_of_entry(kind: Pass, chunk: int) -> float:
    """F2 -> 2, B2 -> -2, W2 -> -2.5."""
    if kind is Pass.WGRAD:
        return -chunk - 0.5
    return chunk if kind is Pass.FORWARD else -chunk


def read_order(order: str | Iterable[Item]) -> list[Entry]:
    """The entries of an order, checked by rule R0 only, for transforming orders. Raises ScheduleError."""
    items = read_items(order)
    entries, problems = read_entries(items)
    if problems:
        raise error_of(items, problems)
    return list(entries.values())


def read_entries(items: Sequence[Item]) -> tuple[dict[int, Entry], list[Problem]]:
    """Rule R0: the entries that can be read, by position, and the problems of the others."""
    entries: dict[int, Entry] = {}
    wrong: dict[str, list[int]] = defaultdict(list)
    for position, item in enumerate(items):
        entry, says = _read_item(item)
        if entry is not None:
            entries[position] = entry
        if says is not None:
            wrong[says].append(position)
    return entries, [Problem(READING, tuple(positions), says) for says, positions in wrong.items()]


def _read_item(item: Item) -> tuple[Entry | None, str | None]:
    """The entry, and the problem of the item, or None. Both if the item is wrong but its meaning is clear."""
    if isinstance(item, Entry):
        return item, None
    if isinstance(item, str):
        return _read_text(item)
    number: Any = None if isinstance(item, bool) else _exact(item)
    if number is None:
        return None, (
            f"{show(item)} is a {type(item).__name__}. Give numbers (of an array: array.tolist()), texts such as 'F1', "
            "or Entry objects."
        )
    if isinstance(number, float) and not math.isfinite(number):
        return None, f"{show(item)} is no chunk. Write c for a forward, -c for a dgrad, -c-0.5 for a wgrad."
    if abs(number) > HIGHEST_NUMBER:
        return None, _too_high(item)
    chunk = math.ceil(abs(number) - 0.5)  # 2, -2 and -2.5 -> 2
    if chunk == 0:
        return None, f"{show(item)} means chunk 0, but chunks are counted from 1. Chunk 1 is written 1, -1 and -1.5."
    if number == -chunk - 0.5:
        return Entry(Pass.WGRAD, chunk), None
    if number not in (chunk, -chunk):
        return None, f"{show(item)} is between chunks. Only a wgrad has a fraction, which is -c-0.5: chunk 1's is -1.5."
    entry = Entry(Pass.FORWARD if number > 0 else Pass.DGRAD, chunk)
    if isinstance(number, int):
        return entry, None
    return entry, f"{show(item)} is a float, and only wgrads are. Write {entry.number} for the {entry.kind.noun}."


def _read_text(text: str) -> tuple[Entry | None, str | None]:
    match = re.fullmatch(r"([FBW])([1-9][0-9]*)(?:@([0-9]+))?", text)
    if match is None:
        return None, f"'{show(text)}' is no entry. Write F, B or W and a chunk from 1 on, such as F1, B1, W1 or F1@0."
    kind, chunk, microbatch = match.groups()
    if max(len(chunk), len(microbatch or "")) > len(str(HIGHEST_NUMBER)):
        return None, _too_high(text)
    return Entry(Pass(kind), int(chunk), None if microbatch is None else int(microbatch)), None


def _too_high(item: Item) -> str:
    return f"{show(item)} is too high a number. Count chunks from 1 and microbatches from 0, without gaps."


def _exact(item: object) -> int | Fraction | float | None:
    """A real number of any library as a Python number; None for anything else."""
    if isinstance(item, Integral):
        try:
            return operator.index(item)
        except TypeError:  # numpy.timedelta64, which numpy registers as Integral
            return None
    if isinstance(item, Rational):
        return Fraction(int(item.numerator), int(item.denominator))
    return float(item) if isinstance(item, Real) else None


def argument_problems(layers: Any, microbatches: Any, delayed: Any, follows: Any) -> Iterator[Problem]:
    """Problems of arguments whose type or size is wrong for `Schedule.parse`. Collections are tuples from `few`."""
    for name, value, one, many, is_right, needed in (
        ("layers", layers, True, True, is_layer_count, f"whole numbers from 0 to {MOST_EVENTS}, or one for all"),
        ("delayed", delayed, True, True, _is_answer, "True, False or None for each chunk, or one for all"),
        ("follows", follows, False, True, is_whole, "a list or a set of chunks"),
        ("microbatches", microbatches, True, False, _is_microbatch_count, f"a whole number up to {MOST_ENTRIES}"),
    ):
        if value is None and one:
            continue
        is_tuple = isinstance(value, tuple)
        wrong = [v for v in value if not is_right(v)] if is_tuple and many else [value] * (not is_right(value))
        if is_tuple and len(value) > MOST_ENTRIES:
            yield Problem(READING, (), f"{name} has more than {MOST_ENTRIES} values. Give {needed}.")
        elif wrong or not (many if is_tuple else one):
            given = f"has {show(wrong[0])}" if is_tuple and many else f"is {show(value)}"
            yield Problem(READING, (), f"{name} {given}. Give {needed}.")


def _is_microbatch_count(value: Any) -> bool:
    """Whether this is an integer that is not too large. Rule R1 reports those below 1."""
    return is_whole(value) and abs(value) <= MOST_ENTRIES


def _is_answer(value: object) -> bool:
    return value is None or isinstance(value, bool)


def is_whole(value: object) -> bool:
    """Whether this is a Python int, and not a bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_layer_count(value: Any) -> bool:
    return is_whole(value) and 0 <= value <= MOST_EVENTS


def error_of(items: Sequence[object], problems: Sequence[Problem]) -> ScheduleError:
    return ScheduleError([show(str(item) if isinstance(item, Entry) else item) for item in items], problems)


def read_items(order: str | Iterable[Item]) -> list[Item]:
    """The items of an order, read once. Raises ScheduleError for unordered collections (sets, dicts) and arrays."""
    found: Iterable[Item]
    if isinstance(order, str):
        found = (match[0] for match in re.finditer(r"[^\s,]+", order))
    elif (
        not isinstance(order, Iterable)
        or (isinstance(order, Sized) and not isinstance(order, Sequence))
        or isinstance(order, bytes | bytearray | memoryview)
    ):
        says = f"the order is a {type(order).__name__}. Give one text or a list, such as 'F1 B1' or [1, -1]."
        raise error_of([order], [Problem(READING, (0,), f"{says} Of an array: array.tolist().")])
    else:
        found = order
    items = list(islice(found, MOST_ENTRIES + 1))
    if len(items) > MOST_ENTRIES:
        says = f"the order has more than {MOST_ENTRIES} entries. Give those of one rank in one step."
        raise error_of(items, [Problem(READING, (MOST_ENTRIES,), says)])
    return items


def few(values: object) -> Any:
    """A collection as a tuple, truncated just above MOST_ENTRIES; anything else unchanged."""
    if isinstance(values, Sequence | Set) and not isinstance(values, str | bytes | bytearray | memoryview):
        return tuple(islice(values, MOST_ENTRIES + 1))
    return values
