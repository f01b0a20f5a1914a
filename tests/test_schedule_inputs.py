"""Whatever is given as a schedule, it is valid or a ScheduleError, within a second of a processor of its own."""

import itertools
import random
import string
import time
from array import array
from collections import OrderedDict, UserList, deque
from collections.abc import Callable
from datetime import timedelta
from decimal import Decimal
from enum import IntEnum
from fractions import Fraction
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fuser.schedule.explain import explain_schedule
from fuser.schedule.make import order_1f1b, order_interleaved, overlap_layers
from fuser.schedule.memory import LayerMemory, plan_memory
from fuser.schedule.read import HIGHEST_NUMBER, MOST_ENTRIES, MOST_EVENTS
from fuser.schedule.run import run_schedule
from fuser.schedule.schedule import Entry, Pass, Schedule, ScheduleError

SECONDS = 1.0
LOOP_SECONDS = 0.1  # of `loop`, where nothing else runs
NAN, INF = float("nan"), float("inf")


def outcome(call: Callable[[], Any]) -> ScheduleError | Any:
    """What the call gives, or its ScheduleError; anything else that it raises is a failure, and so is a long wait."""
    result, took = timed(call)
    if took >= SECONDS:
        took = least_seconds(call)
    assert took < SECONDS, f"took {took:.1f} s of a processor of its own"
    return result


def timed(call: Callable[[], Any]) -> tuple[ScheduleError | Any, float]:
    """What the call gives, and the seconds that this thread computed."""
    start = time.thread_time()
    try:
        result = call()
    except ScheduleError as error:
        result = error
    return result, time.thread_time() - start


def least_seconds(call: Callable[[], Any]) -> float:
    """The least of three calls, each in the seconds of a processor that other programs do not slow down.

    They make this one up to three times slower: it says by how much in a loop whose time is known.
    """
    return min(timed(call)[1] * min(1.0, LOOP_SECONDS / timed(loop)[1]) for _ in range(3))


def loop() -> None:
    assert sum(len(str(k)) for k in range(10**6)) == 5_888_890


def assert_is_shown(error: ScheduleError, caret: bool) -> None:
    """A message of bounded size, whose carets stand below entries, and which says what to do."""
    text = str(error)
    assert len(text) < 40_000 and all(len(line) < 400 for line in text.splitlines()), text[:2000]
    assert text.isprintable() or text.replace("\n", "").isprintable()
    mends = ("Give", "Write", "Put", "Number", "Add", "Take", "Count", "is written", "Only a wgrad has a fraction")
    assert error.problems and any(mend in text for mend in mends), text
    for problem in error.problems:
        assert problem.rule.startswith("R") and problem.says.endswith(".")
    if caret:
        assert any(line.strip() and not line.strip(" ^") for line in text.splitlines()), text


def kind(value: Any) -> str:
    return type(value).__name__


class Colour(IntEnum):
    RED = 1


class Silent:
    def __repr__(self):
        raise RuntimeError("has no text")


class Pages:
    """Iterable only by its numbers."""

    def __getitem__(self, index):
        return [1, -1][index]


def recursive():
    items: list = [1, -1]
    items.append(items)
    return items


# --- one odd entry in an order that is right without it

ODD_ENTRIES = [
    # numbers that are too high, too low or none
    1e300, -1e300, 1.7976931348623157e308, 1e16, -1e15, 2.0**53, 5e-324, -5e-324, 0.0, -0.0, 0, 0.5, -0.5, 0.25, 1.25,
    10**400, -(10**400), 10**5000, -(10**5000), 2**63, -(2**63), 2**64, 10**15, -(10**15), HIGHEST_NUMBER,
    NAN, -NAN, INF, -INF, 1.5, 2.5, -1.25, -1.75, -1.4999999999999998, -1.5000000000000002, 1.0, -1.0,
    # complex, rational, decimal
    1j, 1 + 0j, -1.5 + 0j, complex(NAN, INF), complex("1e300"),
    Fraction(1, 3), Fraction(10**400), Fraction(1, 10**400), Fraction(-3, 2) + Fraction(1, 10**30),
    Fraction(10**5000, 3), Decimal("1"), Decimal("-1.5"), Decimal("1e400"), Decimal("NaN"), Decimal("sNaN"),
    # other kinds
    None, True, False, (), [], {}, set(), [1], (1, -1), [[[1]]], {1: -1}, {1}, frozenset({1}), range(3), object(), int,
    Silent(), Silent, len, lambda: 1, b"F1", bytearray(b"F1"), memoryview(b"F1"), Ellipsis, NotImplemented, slice(1),
    timedelta(1), Path("F1"), iter([1]), Pass.FORWARD, Pass.WGRAD, Pass, Schedule, Decimal, Exception("F1"),
    # numpy and torch
    np.float64(1e300), np.float64(NAN), np.float32(INF), np.float16(1.0), np.float32(-1.25), np.longdouble("1e400"),
    np.complex64(1), np.bool_(True), np.array(1), np.array([1]), np.array([]), np.zeros((1000, 1000)), np.str_("F"),
    np.bytes_(b"F1"), np.datetime64("2026-01-01"), np.timedelta64(1, "D"), np.timedelta64("NaT", "D"), np.void(b"1"),
    np.int8(-128), np.uint64(2**64 - 1), np.int64(-(2**63)), np.array([1], dtype=object),
    torch.tensor(1), torch.tensor(-1.5), torch.tensor([1, -1]), torch.tensor(True), torch.zeros(1000, 1000),
    torch.tensor(1j), torch.empty(0), torch.tensor(1, device="meta"), torch.float32, torch.Size([1]),
    # texts
    "", " ", "F", "1", "-1", "F0", "F-1", "F+1", "F1.0", "F1.5", "F01", "f1", "FF1", "F1F1", "F1 B1", "F1,B1", "F1\n",
    "\nF1", "F1\x00", "F1\x1b[2J", "F1@", "F1@-1", "F1@1.0", "F1@@0", "@0", "F@1", "X1", "G1", "F1e3", "F1_0", "F 1",
    "F300000000", "B300000000", "W300000000", "F" + "9" * 15, "F" + "9" * 16, "F" + "1" * 5000, "F1@" + "0" * 5000,
    "F1@" + "9" * 5000, "F1@300000000", "B1@" + "9" * 15, "F" * 100_000,
    "9" * 1_000_000, "\xe9", "F\uff11", "F1@\uff11", "\uff261", "F\xb2",
    "F\u2460", "\U0001f4a5", "\ud800", "\u202eF1", "F1\u200b", "%s%n", "{}", "None", "nan", "inf", "0x1", "F0x1",
    "F1;", "'F1'",
]  # fmt: skip


@pytest.mark.parametrize("odd", ODD_ENTRIES, ids=kind)
def test_an_odd_entry_is_an_error_with_a_caret(odd):
    error = outcome(lambda: Schedule.parse([1, odd, -1]))
    assert isinstance(error, ScheduleError), error
    assert_is_shown(error, caret=True)


@pytest.mark.parametrize("odd", ODD_ENTRIES, ids=kind)
def test_many_odd_entries_are_one_bounded_error(odd):
    error = outcome(lambda: Schedule.parse([odd] * 1000))
    assert isinstance(error, ScheduleError), error
    assert_is_shown(error, caret=True)


@pytest.mark.parametrize(
    ("one", "means"),
    [(np.int64(1), 1), (np.int8(1), 1), (np.uint8(1), 1), (Colour.RED, 1), (np.float32(-1.5), -1.5),
     (np.float16(-1.5), -1.5), (Fraction(-3, 2), -1.5), (np.longdouble("-1.5"), -1.5), (np.str_("W1"), -1.5)],
    ids=kind,
)  # fmt: skip
def test_a_number_of_another_library_means_what_it_is(one, means):
    order = [1, -1, -1.5]
    given = [one if item == means else item for item in order]
    assert outcome(lambda: Schedule.parse(given)).order == order


def test_a_wgrad_of_the_highest_number_is_exact():
    entry = Entry(Pass.WGRAD, HIGHEST_NUMBER)
    assert Fraction(entry.number) == -HIGHEST_NUMBER - Fraction(1, 2)


# --- odd orders


def endless():
    yield from itertools.cycle([1, -1])


ODD_ORDERS = {
    "no order": lambda: None,
    "a number": lambda: 1,
    "a float": lambda: 1e300,
    "a huge number": lambda: 10**400,
    "complex": lambda: 1j,
    "nan": lambda: NAN,
    "a bool": lambda: True,
    "an entry": lambda: Entry(Pass.FORWARD, 1),
    "an object": lambda: Silent(),
    "a type": lambda: int,
    "an enum": lambda: Pass,
    "a function": lambda: len,
    "bytes": lambda: b"F1 B1",
    "a bytearray": lambda: bytearray(b"F1 B1"),
    "a memoryview": lambda: memoryview(b"F1"),
    "a set": lambda: {1, -1},
    "a frozenset": lambda: frozenset({1, -1}),
    "a dict": lambda: {1: 0, -1: 0},
    "keys": lambda: {1: 0, -1: 0}.keys(),
    "values": lambda: {0: 1, 1: -1}.values(),
    "an ordered dict": lambda: OrderedDict({1: 0, -1: 0}),
    "only by numbers": lambda: Pages(),
    "an array": lambda: np.array([1, -1]),
    "an array of floats": lambda: np.array([1, -1, -1.5]),
    "a 0-d array": lambda: np.array(1),
    "a large array": lambda: np.zeros(10**7, dtype=np.int8),
    "a matrix": lambda: np.ones((2, 2), dtype=np.int64),
    "a tensor": lambda: torch.tensor([1, -1]),
    "a 0-d tensor": lambda: torch.tensor(1),
    "a large tensor": lambda: torch.ones(10**7),
    "a meta tensor": lambda: torch.empty(3, device="meta"),
    "a schedule": lambda: Schedule.parse("F1 B1"),
    "empty": list,
    "empty text": lambda: "",
    "spaces": lambda: " , ,\n\t ",
    "many spaces": lambda: " " * 10**6,
    "an empty generator": lambda: iter(()),
    "nested": lambda: [[1, -1]],
    "itself": lambda: recursive(),
    "lists of pairs": lambda: [(1, 0), (-1, 0)],
    "a range": lambda: range(1, 3),
    "a long range": lambda: range(1, 10**18),
    "longer than a size": lambda: range(10**30),
    "endless": lambda: endless(),
    "counted without end": lambda: itertools.count(1),
    "one without end": lambda: itertools.repeat(1),
    "repeated": lambda: [1] * (10**7),
    "repeated text": lambda: "F1 " * 10**6,
    "one long word": lambda: "F" * 10**7,
    "one long number": lambda: "F" + "1" * 10**6,
    "all chunks": lambda: list(range(1, MOST_ENTRIES + 1)),
    "texts of all chunks": lambda: " ".join(map("F{}".format, range(1, 32_000))),
    "all gaps": lambda: [2 * c for c in range(1, MOST_ENTRIES)],
    "all wrong in another way": lambda: [c + 0.3 for c in range(1, 32_000)],
    "all objects": lambda: [object() for _ in range(32_000)],
    "all huge": lambda: [10**400 + c for c in range(2000)],
    "all at the end": lambda: [-1] * 16_000 + [1] * 16_000,
    "half": lambda: [1] * 32_000,
    "wgrads alone": lambda: [-1.5] * 32_000,
    "all of another microbatch": lambda: ["F1@7"] * 16_000 + ["B1@7"] * 16_000,
    "long texts": lambda: ["F1" + "x" * 1000] * 5000,
    "backward first": lambda: "B1 F1",
    "no forward": lambda: "B1",
    "no backward": lambda: "F1",
    "a gap": lambda: "F1 B1 F3 B3",
    "two gaps": lambda: "F9 B9",
    "the highest": lambda: ["F300000000", "B300000000"],
    "the very highest": lambda: [HIGHEST_NUMBER, -HIGHEST_NUMBER],
    "wgrads of the highest": lambda: f"F{HIGHEST_NUMBER} B{HIGHEST_NUMBER} W{HIGHEST_NUMBER}",
    "a file": lambda: StringIO("F1\nB1"),
    "characters": lambda: list("F1B1"),
    "a user's string": lambda: np.array(["F1", "B1"]),
    "structured": lambda: np.zeros(2, dtype="i4,i4"),
}


@pytest.mark.parametrize("name", ODD_ORDERS)
def test_an_odd_order_is_an_error(name):
    order = ODD_ORDERS[name]()
    error = outcome(lambda: Schedule.parse(order))
    assert isinstance(error, ScheduleError), error
    empty = name in ("empty", "empty text", "spaces", "many spaces", "an empty generator")
    assert_is_shown(error, caret=not empty)


@pytest.mark.parametrize(
    "order",
    [(1, -1), deque([1, -1]), UserList([1, -1]), array("i", [1, -1]), iter([1, -1]), (k for k in (1, -1)),
     map(int, ["1", "-1"]), reversed([-1, 1]), "F1,B1", "\tF1\n B1 ", "F1@0 B1@000"],
    ids=kind,
)  # fmt: skip
def test_any_sequence_or_iterator_is_an_order(order):
    assert outcome(lambda: Schedule.parse(order)).order == [1, -1]


def test_the_longest_order_is_valid_and_the_next_is_not():
    order = [1, -1] * (MOST_ENTRIES // 2)
    assert outcome(lambda: Schedule.parse(order)).microbatches == MOST_ENTRIES // 2
    assert f"more than {MOST_ENTRIES} entries" in str(outcome(lambda: Schedule.parse([*order, 1])))


# --- odd arguments

ODD_VALUES = [
    NAN, INF, 1e300, 1.5, 1.0, -1, 10**400, -(10**400), 10**5000, -(10**5000), 1j, "1", "", b"1", object(), Silent(),
    int, np.array(1), np.array([1, 1]), np.int64(1), torch.tensor(1), torch.tensor([1, 1]), {1: 1}, {"a"}, iter([1]),
    Fraction(1), Decimal(1), [NAN], [1e300], [10**400], [10**5000], [-(10**5000)], [1j], ["1"], [None, [1]], [[1]],
    [object()], [Silent()], [np.int64(1)], [torch.tensor(1)], range(10**18), range(10**30), [1] * 10**6, [10**9], [-1],
]  # fmt: skip


@pytest.mark.parametrize("name", ["layers", "microbatches", "delayed", "follows"])
@pytest.mark.parametrize("odd", ODD_VALUES, ids=kind)
def test_an_odd_argument_is_an_error(name, odd):
    error = outcome(lambda: Schedule.parse([1, -1], **{name: odd}))
    assert isinstance(error, ScheduleError), error
    assert_is_shown(error, caret=False)


@pytest.mark.parametrize(
    "arguments",
    [{"layers": True}, {"layers": [True]}, {"microbatches": True}, {"microbatches": [1]}, {"delayed": 1},
     {"delayed": [1]}, {"follows": None}, {"follows": True}, {"follows": 2}, {"follows": [True]},
     {"delayed": {True}, "layers": 2}, {"layers": 10**9}, {"layers": MOST_EVENTS},
     {"microbatches": 10**9}, {"microbatches": 0}, {"delayed": [None] * 2},
     {"follows": range(2, 10**12)}, {"follows": {10**400}}, {"layers": [1, 1]}],
    ids=lambda arguments: next(iter(arguments)),
)  # fmt: skip
def test_an_argument_of_another_kind_or_size_is_an_error(arguments):
    assert_is_shown(outcome(lambda: Schedule.parse("F1 B1", **arguments)), caret=False)


def test_a_chunk_of_too_many_layers_is_underlined():
    error = outcome(lambda: Schedule.parse("F1 F2 B2 B1", layers=[1, MOST_EVENTS]))
    assert [problem.positions for problem in error.problems] == [(1, 2)]
    assert_is_shown(error, caret=True)
    assert len(outcome(lambda: Schedule.parse("F1 F2 B2 B1", layers=[1, MOST_EVENTS // 2 - 1])).events) == MOST_EVENTS


def test_all_delayed_with_the_highest_chunk_is_an_error():
    error = outcome(lambda: Schedule.parse(["F300000000"], delayed=True))
    assert_is_shown(error, caret=True)


@pytest.mark.parametrize(
    ("chunk", "microbatch"),
    [(1.0, None), ("1", None), (True, None), (NAN, None), (10**400, None), (10**5000, None), (None, None), (1, 1.0),
     (1, "0"), (1, False), (1, 10**5000), (1, NAN), (torch.tensor(1), None), (1, np.array([0]))],
    ids=kind,
)  # fmt: skip
def test_an_entry_of_odd_numbers_is_refused_in_a_sentence(chunk, microbatch):
    with pytest.raises(ValueError, match="does not exist. Chunks are counted from 1"):
        Entry("F", chunk, microbatch)


# --- random orders


def test_a_thousand_random_orders_are_valid_or_errors():
    rng = random.Random(0)
    alphabet = "FBW0123456789@.,- \n" + string.ascii_letters + "\xe9\uff26\uff11"
    pieces = [*ODD_ENTRIES, 1, -1, -1.5, 2, -2, "F1", "B1", "W1", "F1@0", Entry(Pass.FORWARD, 1)]
    for _ in range(1000):
        text = "".join(rng.choices(alphabet, k=rng.randrange(40)))
        items = rng.choices(pieces, k=rng.randrange(8))
        for order in (text, items):
            result = outcome(lambda order=order: Schedule.parse(order))
            assert isinstance(result, Schedule | ScheduleError)
            if isinstance(result, ScheduleError):
                assert_is_shown(result, caret=False)


# --- generators of orders


@pytest.mark.parametrize(
    "call",
    [
        lambda: order_1f1b(1, 0, 10**12),
        lambda: order_1f1b(10**400, 0, 10**400),
        lambda: order_1f1b(4, 10**5000, 4),
        lambda: order_1f1b(1, 0, 1e300),
        lambda: order_1f1b("1", 0, 1),
        lambda: order_1f1b(1, 0, NAN),
        lambda: order_1f1b(True, False, True),
        lambda: order_interleaved(1, 0, 10**9, 1),
        lambda: order_interleaved(1, 0, 2, 10**400),
        lambda: order_interleaved(1, 0, 1.5, 1),
        lambda: order_interleaved(1, 0, 2, 2, group=1.0),
        lambda: order_interleaved(1, 0, 2, 2, group=10**5000),
        lambda: overlap_layers([1, -1], [10**9]),
        lambda: overlap_layers([1, -1], [10**5000]),
        lambda: overlap_layers([1, -1], [-1]),
        lambda: overlap_layers([1, -1], [1.5]),
        lambda: overlap_layers([1, -1], 1),
        lambda: overlap_layers([1, -1], "1"),
        lambda: overlap_layers([1, -1], np.array([1])),
        lambda: overlap_layers(["F300000000"], [1]),
        lambda: overlap_layers([1] * 1000 + [-1] * 1000, [MOST_ENTRIES]),
    ],
)
def test_an_order_that_cannot_be_made_is_refused_at_once(call):
    def refused():
        with pytest.raises(ValueError, match="(?i)give|there must be|chunks"):
            call()

    outcome(refused)


@pytest.mark.parametrize(
    "call",
    [
        lambda order: plan_memory(order, LayerMemory()),
        lambda order: explain_schedule(order),
        lambda order: run_schedule(order, [[torch.nn.Identity()]], {}, {}),
    ],
)
def test_an_order_that_was_not_read_is_no_schedule(call):
    with pytest.raises(TypeError, match=r"schedule is a list, but must be a Schedule. Read .* Schedule.parse\(order\)"):
        call([1, -1])
