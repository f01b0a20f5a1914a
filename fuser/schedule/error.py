"""Errors of a schedule, as data and as text: rows of entries with a caret under each wrong one."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from fractions import Fraction
from numbers import Number
from typing import NamedTuple

WIDTH = 96  # characters in a row of entries
ENTRY_WIDTH = 32  # characters of one entry
MOST_ROWS = 8  # rows shown for one problem
MOST_PROBLEMS = 20  # problems shown in total


class Problem(NamedTuple):
    """A violated rule, the positions of the wrong entries, and a sentence on what was found and how to mend it."""

    rule: str
    positions: tuple[int, ...]
    says: str


class ScheduleError(ValueError):
    """All problems of an order, each with carets under the wrong entries. `problems` holds them as data.

    shown: the entries as text. The message has the first `MOST_PROBLEMS` problems, with up to `MOST_ROWS` rows each.
    """

    def __init__(self, shown: Sequence[str], problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        entries = "1 entry" if len(shown) == 1 else f"{len(shown)} entries"
        lines = [f"{number_of(len(problems), 'error')} in this schedule of {entries}."]
        rows = _rows(shown)
        for rule, positions, says in self.problems[:MOST_PROBLEMS]:
            lines += ["", *_underlined(rows, shown, positions), f"{rule}: {says}"]
        if more := self.problems[MOST_PROBLEMS:]:
            lines += ["", f"And {number_of(len(more), 'error')} more."]
        super().__init__("\n".join(lines))


def show(item: object) -> str:
    """Any object on one line of at most `ENTRY_WIDTH` characters; objects other than text and numbers by their type."""
    if isinstance(item, str):
        text = item[: ENTRY_WIDTH + 1]
        text = text if text.isascii() and text.isprintable() and text else ascii(text)[1:-1] or "''"
    elif isinstance(item, int | Fraction) and (bits := _bits(item)) > 64:
        text = f"<{type(item).__name__} of {bits} bits>"
    elif isinstance(item, Number) or item is None:
        text = repr(item)
    else:
        text = f"<{type(item).__name__}>"
    return text if len(text) <= ENTRY_WIDTH else f"{text[: ENTRY_WIDTH - 3]}..."


def number_of(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _bits(number: int | Fraction) -> int:
    return number.numerator.bit_length() + number.denominator.bit_length() - 1


def _rows(shown: Sequence[str]) -> list[range]:
    """Split the positions into rows of entries that are at most `WIDTH` characters wide."""
    rows, start, width = [], 0, 0
    for position, text in enumerate(shown):
        if width + len(text) > WIDTH and position > start:
            rows.append(range(start, position))
            start, width = position, 0
        width += len(text) + 1
    return [*rows, range(start, len(shown))]


def _underlined(rows: Sequence[range], shown: Sequence[str], positions: Collection[int]) -> Iterator[str]:
    """The rows that contain a wrong entry, each followed by its carets."""
    wrong = set(positions)
    at_fault = [row for row in rows if not wrong.isdisjoint(row)] if wrong else []
    for row in at_fault[:MOST_ROWS]:
        start = f"  entry {row[0]}: " if len(rows) > 1 else "  "
        carets = " ".join(("^" if position in wrong else " ") * len(shown[position]) for position in row)
        yield start + " ".join(shown[position] for position in row)
        yield " " * len(start) + carets.rstrip()
    if more := len(at_fault[MOST_ROWS:]):
        yield f"  ... and in {number_of(more, 'row')} more"
