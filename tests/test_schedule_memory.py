"""Buffers live as long as someone reads them, and share memory as far as that goes (S6)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuser.schedule.explain import explain_schedule
from fuser.schedule.memory import Buffer, LayerMemory, MemoryPlan, plan_memory
from fuser.schedule.schedule import Pass, Schedule
from tests.schedule_cases import PRINTED_DELAYED, schedules

F, B, W = Pass
ONE = LayerMemory(input=1, saved=1, output=1, output_grad=1, delayed=1, input_grad=1)
MIB = 1 << 20


def count(plan: MemoryPlan, buffer: Buffer) -> int:
    return sum(number for (kind, _), number in plan.buffers.items() if kind is buffer)


@st.composite
def plans(draw: st.DrawFn) -> MemoryPlan:
    """A random schedule, chained or not, with layers of one of two sizes."""
    chained = draw(st.booleans())
    schedule = draw(schedules(chained=chained))
    reads = st.frozensets(st.sampled_from([Buffer.INPUT, Buffer.SAVED, Buffer.OUTPUT, Buffer.OUTPUT_GRAD]))
    sizes = st.builds(LayerMemory, *[st.integers(0, 2)] * 6, reads)
    layers = [draw(st.lists(sizes, min_size=number, max_size=number)) for number in schedule.layers]
    return plan_memory(schedule, layers, follows=range(2, len(layers) + 1) if chained else ())


# What an event does with buffers, said apart from how the plan says it.
WRITES = {F: ("input", "saved", "output"), B: ("output_grad", "delayed", "input_grad"), W: ()}
READS = {
    F: ("input",),
    B: ("input", "saved", "output", "output_grad"),
    W: ("delayed",),
}


@given(plans())
def test_no_event_reads_a_buffer_that_another_instance_owns(plan):
    schedule = plan.schedule
    mine = {(life.buffer, life.instance): (life.buffer, life.size, life.number) for life in plan.lives}
    owner = {}
    for event in schedule.events:
        chunk, microbatch, layer = event.instance
        memory = plan.layers[chunk - 1][layer]
        # The forward of a layer copies the output of the one before, its dgrad the input gradient of the one behind.
        reads = [(Buffer(name), event.instance) for name in READS[event.kind]]
        if event.kind is W:
            reads += [(buffer, event.instance) for buffer in memory.wgrad_reads]
        if event.kind is F and layer:
            reads.append((Buffer.OUTPUT, (chunk, microbatch, layer - 1)))
        if event.kind is B and layer + 1 < schedule.layers[chunk - 1]:
            reads.append((Buffer.INPUT_GRAD, (chunk, microbatch, layer + 1)))
        elif event.kind is B and plan.follows and chunk < len(schedule.layers) and schedule.layers[chunk]:
            reads.append((Buffer.INPUT_GRAD, (chunk + 1, microbatch, 0)))
        for name in WRITES[event.kind]:
            if (Buffer(name), event.instance) in mine:
                owner[mine[Buffer(name), event.instance]] = event.instance
        for buffer, instance in reads:
            if (buffer, instance) in mine:
                assert owner[mine[buffer, instance]] == instance, (event, buffer)


@pytest.mark.slow
@given(plans())
def test_there_are_as_many_buffers_as_live_at_once(plan):
    for (buffer, size), number in plan.buffers.items():
        lives = [life for life in plan.lives if (life.buffer, life.size) == (buffer, size)]
        at_once = [sum(life.start <= t <= life.end for life in lives) for t in range(len(plan.schedule.events))]
        assert number == max(at_once)


@pytest.mark.slow
@given(plans())
def test_bytes_add_up(plan):
    at = range(len(plan.schedule.events))
    assert plan.live == [sum(life.size for life in plan.lives if life.start <= t <= life.end) for t in at]
    assert max(plan.live, default=0) <= plan.allocated() <= plan.unshared()
    assert plan.allocated() == sum(map(plan.allocated, Buffer))
    assert plan.unshared() == sum(map(plan.unshared, Buffer))
    assert plan.prompt().prompt().lives == plan.prompt().lives


def test_an_input_is_kept_for_its_wgrad():
    schedule = Schedule.parse([1, -1, 2, -1.5, -2, -2.5])
    plan = plan_memory(schedule, ONE)
    assert count(plan, Buffer.INPUT) == 2
    inputs = [(life.start, life.end) for life in plan.lives if life.buffer is Buffer.INPUT]
    assert inputs == [(0, 3), (2, 5)]
    # If nothing reads it after dgrad, both chunks have the same one.
    assert count(plan_memory(schedule, LayerMemory(input=1, wgrad_reads=frozenset())), Buffer.INPUT) == 1


def test_each_class_lives_as_its_rule_says():
    plan = plan_memory(Schedule.parse("F1 F2 B2 B1 W2 W1 F2 F1 B2 B1 W1 W2"), ONE)
    spans = {life.buffer: (life.start, life.end) for life in plan.lives if life.instance == (1, 0, 0)}
    assert spans == {
        Buffer.INPUT: (0, 5), Buffer.SAVED: (0, 3), Buffer.OUTPUT: (0, 3), Buffer.OUTPUT_GRAD: (3, 5),
        Buffer.DELAYED: (3, 5), Buffer.INPUT_GRAD: (3, 8),
    }  # fmt: skip


def input_gradient_ends(schedule, follows):
    lives = plan_memory(schedule, ONE, follows=follows).lives
    return {life.instance: life.end for life in lives if life.buffer is Buffer.INPUT_GRAD}


def test_an_input_gradient_waits_for_its_consumer_or_the_end_of_its_send():
    schedule = Schedule.parse("F1 F1 F2 F2 F3 F3 B3 B3 B2 B2 B1 B1", layers=[1, 0, 1], follows=[2, 3])
    assert input_gradient_ends(schedule, [2, 3]) == {(3, 0, 0): 6, (3, 1, 0): 7, (1, 0, 0): 7, (1, 1, 0): 7}
    assert input_gradient_ends(schedule, []) == {(3, 0, 0): 5, (3, 1, 0): 6, (1, 0, 0): 7, (1, 1, 0): 7}


def test_the_printed_order_needs_seven_inputs_and_one_output_gradient():
    plan = plan_memory(Schedule.parse(PRINTED_DELAYED), ONE)
    assert {buffer: count(plan, buffer) for buffer in Buffer} == {
        Buffer.INPUT: 7, Buffer.SAVED: 7, Buffer.OUTPUT: 7, Buffer.OUTPUT_GRAD: 1, Buffer.DELAYED: 1,
        Buffer.INPUT_GRAD: 2,
    }  # fmt: skip


def test_the_report_says_what_is_held_when_and_what_wgrads_cost():
    memory = LayerMemory(input=MIB, saved=4 * MIB, output=MIB, output_grad=MIB, delayed=512)
    plan = plan_memory(Schedule.parse("F1 F1 F1 B1 B1 W1 B1 W1 W1"), memory)
    assert (
        plan.report()
        == """\
class         buffers       bytes   without sharing
input               3     3.0 MiB           3.0 MiB
saved               3    12.0 MiB          12.0 MiB
output              3     3.0 MiB           3.0 MiB
output_grad         2     2.0 MiB           3.0 MiB
delayed             2     1.0 KiB           1.5 KiB
total              13    20.0 MiB          21.0 MiB
peak: 19.0 MiB in use at event 3, B1@0 layer 0
wgrads of chunk 1 layer 0: 2.0 MiB each, at most 2 outstanding, for at most 3 events
with each wgrad directly behind its dgrad: 19.0 MiB"""
    )


@pytest.mark.parametrize(
    "make",
    [
        lambda schedule: plan_memory(schedule, [[ONE]]),
        lambda schedule: plan_memory(schedule, [[ONE], [ONE]]),
        lambda schedule: LayerMemory(output=-1),
        lambda schedule: LayerMemory(wgrad_reads=frozenset({"input_grad"})),
        lambda schedule: LayerMemory(wgrad_reads=frozenset({"weight"})),
    ],
)
def test_sizes_that_fit_no_layer_are_refused(make):
    schedule = Schedule.parse("F1 F2 B2 B1", layers=[1, 2])
    with pytest.raises(ValueError):
        make(schedule)


def test_a_schedule_without_layers_has_no_buffers():
    plan = plan_memory(Schedule.parse("F1 B1", layers=[0]), ONE)
    assert (plan.lives, plan.allocated(), plan.live, plan.peak) == ((), 0, [], 0)
    assert "peak" not in plan.report()


# Text


def test_lanes_are_drawn_with_the_buffers_in_use_below():
    schedule = Schedule.parse([1, -1, 2, -1.5, -2, -2.5])
    assert (
        explain_schedule(schedule)
        == """\
microbatches: 1, layers by chunk: 1, 1

entry             0   1   2   3   4   5
forward         1@0     2@0
dgrad               1@0         2@0
wgrad                       1@0     2@0
buffers in use
  input           1   1   2   2   1   1
  output          1   1   1   1   1   .
  output_grad     .   1   1   1   1   1
  delayed         .   1   1   1   1   1
  input_grad      .   1   1   1   2   1"""
    )


@given(schedules())
def test_a_drawing_shows_each_entry_once_within_its_width(schedule):
    lines = explain_schedule(schedule, width=60).splitlines()
    drawing = lines[: len(lines) - len(schedule.notes())]
    lanes = {kind: " ".join(line for line in drawing if line.startswith(kind.noun)).split() for kind in Pass}
    for kind in Pass:
        entries = [f"{entry.chunk}@{entry.microbatch}" for entry in schedule.entries if entry.kind is kind]
        assert [text for text in lanes[kind] if text != kind.noun] == entries
    assert max(map(len, drawing)) <= 60


def test_a_drawing_with_sizes_ends_in_their_report_and_has_notes():
    schedule = Schedule.parse([1, 1, -1, -1, -1.5, -1.5], layers=[2])
    plan = plan_memory(schedule, ONE)
    text = explain_schedule(schedule, plan)
    assert text.endswith("\n\n" + plan.report()) and "R4: up to 2 wgrads" in text and "  saved  " in text
