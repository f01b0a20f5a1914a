"""Schedules are read, checked as a whole, and made: S1 to S5 of the conformance list, and properties of all of it."""

import random
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuser.schedule.make import order_1f1b, order_interleaved, overlap_layers
from fuser.schedule.schedule import Entry, Event, Pass, Schedule, ScheduleError, read_order
from tests.schedule_cases import PRINTED, PRINTED_DELAYED, PRINTED_OVERLAPPED, schedules

F, B, W = Pass


def rules(order, **given) -> list[str]:
    """The rules that an order breaks, in the order reported."""
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(order, **given)
    return [problem.rule[:2] for problem in error.value.problems]


# Reading


@pytest.mark.parametrize(
    "order",
    [[1, 1, -1, -1, -1.5, -1.5], "F1 F1 B1 B1 W1 W1", "F1@0, F1@1, B1@0, B1@1, W1@0, W1@1",
     ["F1", 1, Entry(B, 1), Entry(B, 1, 1), -1.5, "W1"]],
    ids=["numbers", "text", "text with microbatches", "mixed"],
)  # fmt: skip
def test_numbers_texts_and_objects_mean_the_same(order):
    schedule = Schedule.parse(order)
    assert schedule == Schedule.parse("F1 F1 B1 B1 W1 W1")
    assert schedule.events[-2:] == (Event(W, 1, 0, 0), Event(W, 1, 1, 0))
    assert schedule.microbatches == 2 and schedule.delayed == (True,)


@given(schedules())
def test_a_schedule_is_read_back_from_all_that_it_prints(schedule):
    for form in (schedule.order, str(schedule), schedule.entries, [str(entry) for entry in schedule.entries]):
        assert Schedule.parse(form, layers=schedule.layers) == schedule


@pytest.mark.parametrize(("kind", "chunk", "microbatch"), [("X", 1, None), ("F", 0, None), ("F", 1, -1)])
def test_an_entry_that_cannot_be_is_refused(kind, chunk, microbatch):
    with pytest.raises(ValueError):
        Entry(kind, chunk, microbatch)


# Events


def test_layers_ascend_forward_and_descend_backward():
    schedule = Schedule.parse("F1 F2 F3 B3 B1 W1 B2", layers=[2, 0, 1])
    assert [tuple(event)[1:] for event in schedule.events] == [
        (1, 0, 0), (1, 0, 1), (3, 0, 0), (3, 0, 0), (1, 0, 1), (1, 0, 0), (1, 0, 1), (1, 0, 0),
    ]  # fmt: skip
    assert schedule.delayed == (True, False, False)


@given(schedules())
def test_each_instance_has_one_event_of_each_kind_in_causal_order(schedule):
    for chunk, layers in enumerate(schedule.layers, 1):
        for microbatch in range(schedule.microbatches):
            for layer in range(layers):
                own = [event.kind for event in schedule.events if event.instance == (chunk, microbatch, layer)]
                assert own == ([F, B, W] if schedule.delayed[chunk - 1] else [F, B])


def test_instances_are_numbered_as_transformer_engine_does():
    schedule = Schedule.parse("F1 F2 F1 F2 B2 B1 B2 B1", layers=[2, 3])
    numbers = {schedule.index(event.instance): event.instance for event in schedule.events}
    assert [numbers[k] for k in range(10)] == [
        (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1),
        (2, 0, 0), (2, 0, 1), (2, 0, 2), (2, 1, 0), (2, 1, 1), (2, 1, 2),
    ]  # fmt: skip


# Checks


@pytest.mark.parametrize(
    ("order", "given", "broken"),
    [
        ([0], {}, {"R0", "R1"}),
        ([1, -0.5], {}, {"R0", "R1"}),
        ([1.5, -1], {}, {"R0", "R1", "R2"}),
        ([1, -1.25], {}, {"R0", "R1"}),
        ([1, -1.0], {}, {"R0"}),
        ([1, float("nan"), -1], {}, {"R0"}),
        ([1, float("inf"), -1], {}, {"R0"}),
        ([1, True, -1], {}, {"R0"}),
        ([1, None, -1], {}, {"R0"}),
        ("F1 F0 B1", {}, {"R0"}),
        ("F1 b1", {}, {"R0", "R1"}),
        ([], {}, {"R1"}),
        ([1, 1, -2, -2], {}, {"R1", "R2"}),
        ([1, -1, 3, -3], {}, {"R1"}),
        ([1, 10**12, -(10**12), -1], {}, {"R1"}),
        ([1, 1, -1], {}, {"R1"}),
        ([1, -1], {"microbatches": 2}, {"R1"}),
        ([], {"microbatches": 0, "layers": []}, {"R1"}),
        ([-1, 1], {}, {"R2"}),
        ([1, -1.5, -1], {}, {"R2"}),
        ([1, -1, -1.5, -1.5], {}, {"R1", "R2"}),
        ([1, 2, -2.5, -2, -2.5, -1, -1.5], {}, {"R1", "R2"}),
        ([1, -1, -1.5], {"delayed": False}, {"R1"}),
        ([1, -1, 2, -2, -2.5], {"delayed": [True, False]}, {"R1"}),
        ([1, -1], {"delayed": True}, {"R1"}),
        ([1, 1, -1, -1.5, -1], {}, {"R1"}),
        ([1, -1], {"delayed": [None, None]}, {"R1"}),
        ([1, -1, -1.5], {"layers": 1}, {"R0"}),
        ([1, -1], {"layers": [-1]}, {"R0"}),
        ([1, -1], {"layers": [1.0]}, {"R0"}),
        ([1, -1, 2, -2], {"layers": [1]}, {"R0"}),
        ([1, -1], {"layers": [1, 1]}, {"R1"}),
        ("F1@1 F1@0 B1 B1", {}, {"R3"}),
        ([2, 1, -2, -1], {"follows": [2]}, {"R8"}),
        ([1, 2, -1, -2], {"follows": [2]}, {"R8"}),
        ([1, -1], {"follows": [1]}, {"R8"}),
    ],
)  # fmt: skip
def test_a_wrong_order_is_refused_by_the_rule_that_it_breaks(order, given, broken):
    assert set(rules(order, **given)) == broken


@pytest.mark.parametrize(
    ("order", "given"),
    [
        ([1, 1, -1, -1, -1.5, -1.5], {}),
        ([1, 1, -1, -1, -1.5, -1.5], {"layers": [3]}),
        ([1, -1, -1.5], {"layers": [0]}),
        ([1, -1], {"layers": [0], "delayed": True}),
        ([1, 2, -2, -1, -2.5, -1.5], {"layers": [2, 0], "delayed": [True, None]}),
        ([1, 2, 1, 2, -2, -1, -2, -1, -1.5, -1.5, -2.5, -2.5], {"layers": [1, 3], "delayed": True}),
        ([1, 2, -2, -1, -1.5], {"delayed": [True, False]}),
        ([1, -1, 2, -2], {"layers": 2}),
        ([1, 2, -1, -2], {}),
        ([1, 2, -2, -1], {"follows": [2]}),
    ],
)  # fmt: skip
def test_a_right_order_is_accepted(order, given):
    assert Schedule.parse(order, **given).order == order


def test_all_errors_are_reported_at_once_with_carets_counts_and_a_way_out():
    with pytest.raises(ScheduleError) as error:
        Schedule.parse([1, 1.5, -2.5, -1.0, 2, -2])
    assert (
        str(error.value)
        == """\
3 errors in this schedule of 6 entries.

  1 1.5 -2.5 -1.0 2 -2
    ^^^
R0 (reading): 1.5 is between chunks. Only a wgrad has a fraction, which is -c-0.5: chunk 1's is -1.5.

  1 1.5 -2.5 -1.0 2 -2
             ^^^^
R0 (reading): -1.0 is a float, and only wgrads are. Write -1 for the dgrad.

  1 1.5 -2.5 -1.0 2 -2
        ^^^^
R2 (causality): at entry 2 chunk 2 begins wgrad 1, but only 0 dgrads stand before it. Put each W2 behind its B2."""
    )
    assert [problem.positions for problem in error.value.problems] == [(1,), (3,), (2,)]


def test_of_a_long_order_only_the_rows_at_fault_are_shown():
    with pytest.raises(ScheduleError) as error:
        Schedule.parse(["F1"] * 100 + ["B1"] * 100 + ["W1"] * 100 + ["W1"], microbatches=100)
    entries, carets = str(error.value).splitlines()[-3:-1]
    assert re.fullmatch(r"  entry \d+: W1( W1)*", entries)
    assert carets.rindex("^") + 1 == len(entries) < 120
    assert str(error.value).count("W1 W1 W1") < 200


@given(schedules(), st.randoms(use_true_random=False))
def test_an_order_out_of_causality_is_never_accepted(schedule, rng: random.Random):
    """Swapped neighbours are refused exactly if they are two passes over the same microbatch of a chunk."""
    position = rng.randrange(len(schedule.entries) - 1)
    order = [entry.number for entry in schedule.entries]
    first, then = schedule.entries[position : position + 2]
    order[position : position + 2] = [then.number, first.number]
    if (first.chunk, first.microbatch) == (then.chunk, then.microbatch):
        assert rules(order, layers=schedule.layers) == ["R2"]
    else:
        Schedule.parse(order, layers=schedule.layers)


@given(schedules(), st.randoms(use_true_random=False))
def test_an_entry_that_is_left_out_is_missed(schedule, rng: random.Random):
    order = schedule.order
    del order[rng.randrange(len(order))]
    assert "R1" in rules(order, microbatches=schedule.microbatches, delayed=schedule.delayed)


def test_what_other_frameworks_could_not_run_is_noted():
    assert Schedule.parse([1, 2, -1, -2, 1, 2, -1, -2]).notes() == []
    one = Schedule.parse([1, 2, -2, -1, -1.5, -2.5]).notes()
    assert len(one) == 1 and one[0].startswith("R5: another backward entry stands between B2@0 and its wgrad;")
    two = Schedule.parse([1, 1, -1, -1, -1.5, -1.5]).notes()
    assert two[0].startswith("R4: up to 2 wgrads of chunk 1") and "and so for 1 more" in two[1]


# Generators


def test_printed_expansions_of_transformer_engine_are_reproduced():
    assert overlap_layers(PRINTED, [1, 2]) == PRINTED_OVERLAPPED
    assert overlap_layers(PRINTED, [1, 2], delayed=True) == PRINTED_DELAYED
    assert (len(PRINTED), len(PRINTED_OVERLAPPED), len(PRINTED_DELAYED)) == (32, 48, 72)
    for order in (PRINTED_OVERLAPPED, PRINTED_DELAYED):
        assert Schedule.parse(order).microbatches == 8


def test_the_printed_order_is_interleaved_1f1b():
    assert order_interleaved(stages=4, stage=3, chunks=2, microbatches=8) == PRINTED


def test_the_small_example_of_megatron_is_reproduced():
    assert overlap_layers([1, 2, -2, 1, -1, -1], [1, 2], delayed=True) == [
        1, 2, 3, 1, -3, -3.5, -2, -2.5, -1, -1.5, -1, -1.5,
    ]  # fmt: skip


pipelines = st.tuples(st.integers(1, 5), st.integers(0, 4), st.integers(1, 3), st.integers(1, 3), st.integers(0, 2))


@given(pipelines, st.booleans(), st.data())
def test_pipelines_are_legal_on_each_rank_also_spread_over_layers(pipeline, delayed, data):
    stages, stage, chunks, groups, more = pipeline
    stage, group = stage % stages, stages + more
    follows = range(2, chunks + 1)
    interleaved = dict(stages=stages, stage=stage, chunks=chunks, microbatches=groups * group, group=group)
    order = order_interleaved(**interleaved)
    schedule = Schedule.parse(order_interleaved(**interleaved, delayed=delayed), delayed=delayed, follows=follows)
    assert schedule.microbatches == groups * group and schedule.notes() == []
    assert [entry.number for entry in schedule.entries if entry.kind is not W] == order

    layers = data.draw(st.lists(st.integers(1, 3), min_size=chunks, max_size=chunks))
    spread = Schedule.parse(overlap_layers(order, layers, delayed=delayed), delayed=delayed)
    assert len(spread.layers) == sum(layers) and spread.notes() == []


@given(st.integers(1, 5), st.integers(0, 4), st.integers(1, 8), st.booleans())
def test_1f1b_is_legal_and_keeps_few_microbatches(stages, stage, microbatches, delayed):
    stage %= stages
    schedule = Schedule.parse(order_1f1b(stages, stage, microbatches, delayed=delayed), delayed=delayed)
    kinds = [entry.kind for entry in schedule.entries]
    in_flight = max(kinds[:end].count(F) - kinds[:end].count(B) for end in range(len(kinds) + 1))
    assert in_flight == min(microbatches, stages - stage) and schedule.notes() == []


def test_layers_that_do_not_exist_are_left_out():
    order = order_interleaved(stages=2, stage=0, chunks=3, microbatches=4)
    assert set(overlap_layers(order, [1, 0, 2])) == {1, 2, 3, -1, -2, -3}
    assert overlap_layers(order, [0, 0, 0]) == []
    assert Schedule.parse(overlap_layers(order, [1, 0, 2], delayed=True), delayed=True).layers == (1, 1, 1)


def test_a_wgrad_held_back_comes_behind_the_forward_it_is_paired_with():
    assert overlap_layers([1, 2, -1, 2, -2, 1, -2, -1], [1, 3], delayed=True)[4:9] == [2, -1, 3, 4, -1.5]


@pytest.mark.parametrize(
    ("order", "layers"),
    [([1, -1, -1.5], [1]), ([1, 2, -2, -1], [1]), ([1, 1, 1, -1, -1, 1, 1, -1], [1]), ([1, -1, -1, 1, 1, -1], [1])],
)
def test_an_order_that_cannot_be_overlapped_is_refused(order, layers):
    with pytest.raises(ValueError, match="Give"):
        overlap_layers(order, layers)


def test_layers_of_a_chunk_that_is_not_in_the_order_are_refused():
    with pytest.raises(ValueError, match="layers has 2 chunks, but the order has no entry of chunk 2. Give"):
        overlap_layers([1, -1], [1, 2])


@pytest.mark.parametrize(
    "make",
    [
        lambda delayed: order_1f1b(1, 0, 1, delayed=delayed),
        lambda delayed: order_interleaved(1, 0, 1, 1, delayed=delayed),
        lambda delayed: overlap_layers([1, -1], [1], delayed=delayed),
    ],
)
def test_delayed_is_a_bool(make):
    with pytest.raises(TypeError, match="delayed is 'no' .*, but must be True or False"):
        make("no")


@pytest.mark.parametrize("given", [dict(stage=2), dict(microbatches=3), dict(group=1), dict(chunks=0)])
def test_a_pipeline_that_is_none_is_refused(given):
    with pytest.raises(ValueError):
        order_interleaved(**{"stages": 2, "stage": 0, "chunks": 2, "microbatches": 4, **given})


def test_orders_are_read_without_being_checked():
    assert read_order("F1 W3") == [Entry(F, 1), Entry(W, 3)]
    with pytest.raises(ScheduleError):
        read_order([0.5])
