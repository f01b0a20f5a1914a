"""A schedule as text: lanes of forwards, dgrads and wgrads, and below them the number of buffers in use."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from fuser.schedule.memory import Buffer, LayerMemory, MemoryPlan, plan_memory
from fuser.schedule.schedule import Pass, Schedule, check_schedule

# One byte of each class: buffers can be counted, although their sizes are unknown.
COUNTED = LayerMemory(input=1, output=1, output_grad=1, delayed=1, input_grad=1)


def explain_schedule(schedule: Schedule, memory: MemoryPlan | None = None, *, width: int = 100) -> str:
    """Draw the lanes of a schedule, and the largest number of buffers of each class in use during each entry.

    A column is an entry, as chunk@microbatch. memory: count its buffers, and append its report. width: in characters.

    Raises TypeError for an order that is no Schedule.
    """
    check_schedule(schedule)
    plan = plan_memory(schedule, COUNTED) if memory is None else memory
    lanes = {"entry": [str(position) for position in range(len(schedule.entries))]}
    for kind in Pass:
        lanes[kind.noun] = [f"{e.chunk}@{e.microbatch}" if e.kind is kind else "" for e in schedule.entries]
    lanes["buffers in use"] = [""] * len(schedule.entries)
    for buffer in Buffer:
        if any(counts := _by_entry(schedule, plan.in_use(buffer))):
            lanes[f"  {buffer.value}"] = [str(count or ".") for count in counts]
    layers = ", ".join(map(str, schedule.layers))
    paragraphs = [f"microbatches: {schedule.microbatches}, layers by chunk: {layers}", *_draw(lanes, width)]
    if notes := schedule.notes():
        paragraphs.append("\n".join(notes))
    if memory is not None:
        paragraphs.append(memory.report())
    return "\n\n".join(paragraphs)


def _by_entry(schedule: Schedule, counts: Sequence[int]) -> list[int]:
    """The maximum count over the events of each entry; 0 for an entry of a chunk without layers."""
    events = iter(counts)
    return [max((next(events) for _ in schedule.spread(entry)), default=0) for entry in schedule.entries]


def _draw(lanes: Mapping[str, Sequence[str]], width: int) -> Iterator[str]:
    """The lanes below each other, split into blocks of at most `width` characters."""
    label = max(map(len, lanes)) + 1
    cell = max(len(text) for cells in lanes.values() for text in cells) + 1
    columns = max((width - label) // cell, 1)
    for start in range(0, len(lanes["entry"]), columns):
        rows = [
            f"{name:<{label}}" + "".join(f"{text:>{cell}}" for text in cells[start : start + columns])
            for name, cells in lanes.items()
        ]
        yield "\n".join(row.rstrip() for row in rows)
