"""Orders of common pipelines: 1F1B, interleaved 1F1B, and the layer-by-layer overlap for expert parallelism.

All are lists in TransformerEngine's notation, for one rank of the pipeline. `Schedule.parse` reads them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, zip_longest

from fuser.schedule.error import show
from fuser.schedule.read import MOST_ENTRIES, few, is_layer_count, is_whole
from fuser.schedule.schedule import Entry, Item, Pass, read_order
from recipes.arguments import check_flags


def order_1f1b(stages: int, stage: int, microbatches: int, *, delayed: bool = False) -> list[float]:
    """1F1B (one forward, one backward) for stage `stage` (from 0) of a pipeline with one chunk on each rank.

    order_1f1b(stages=3, stage=1, microbatches=3)  ->  [1, 1, -1, 1, -1, -1]

    stages - stage - 1 forwards fill the pipeline. delayed: each dgrad is followed by its wgrad. Raises TypeError for a
    delayed that is no bool.
    """
    check_flags(delayed=delayed)
    _check(stages=stages, stage=stage, microbatches=microbatches)
    chunks = [1] * microbatches
    return _alternate(chunks, chunks, stages - stage - 1, delayed)


def order_interleaved(
    stages: int, stage: int, chunks: int, microbatches: int, *, group: int | None = None, delayed: bool = False
) -> list[float]:
    """Interleaved 1F1B: each rank has `chunks` chunks of the model, and runs each for `group` microbatches at a time.

    order_interleaved(stages=2, stage=1, chunks=2, microbatches=2)  ->  [1, 1, 2, -2, 2, -2, -1, -1]

    Forwards take the chunks in ascending order, backwards in descending order; 2 * (stages - stage - 1) +
    (chunks - 1) * group forwards fill the pipeline. group: by default `stages`. delayed: each dgrad is followed by its
    wgrad. Raises ValueError for a group below the number of stages, or microbatches that are not a multiple of it,
    TypeError for a delayed that is no bool.
    """
    check_flags(delayed=delayed)
    group = stages if group is None else group
    _check(stages=stages, stage=stage, microbatches=microbatches, chunks=chunks, group=group)
    if chunks < 1 or group < stages or microbatches % group:
        raise ValueError(
            f"chunks={show(chunks)}, group={show(group)}, microbatches={microbatches}: there must be a chunk, at least "
            f"{show(stages)} microbatches in a group (as many as stages), and whole groups."
        )
    forward = [chunk for _ in range(0, microbatches, group) for chunk in range(1, chunks + 1) for _ in range(group)]
    backward = [chunks + 1 - chunk for chunk in forward]
    return _alternate(forward, backward, 2 * (stages - stage - 1) + (chunks - 1) * group, delayed)


def overlap_layers(order: str | Iterable[Item], layers: Sequence[int], *, delayed: bool = False) -> list[float]:
    """Turn each layer into a chunk, so that one microbatch's communication overlaps with another's computation.

    overlap_layers([1, 2, -2, 1, -1, -1], [1, 2])  ->  [1, 2, 3, 1, -3, -2, -1, -1]

    order:   without wgrads; backwards and forwards must alternate from its first backward to its last forward
    layers:  number of layers of each chunk of `order`; the layers of all chunks become chunks 1, 2, ...
    delayed: emit wgrads, each after its dgrad; but in a backward that is paired with a forward, the last wgrad comes
             after all layers of that forward

    From the first backward to the last forward the order is read in pairs: the forward's layers in ascending order
    alternate with the backward's in descending order. Entries before and after are expanded one by one.

    Raises ScheduleError for an order that cannot be read, ValueError for one that does not alternate and for layers of
    other chunks than its own, TypeError for a delayed that is no bool.
    """
    check_flags(delayed=delayed)
    entries = read_order(order)
    counts = few(layers)
    wrong = [count for count in counts if not is_layer_count(count)] if isinstance(counts, tuple) else [layers]
    if wrong:
        raise ValueError(f"layers has {show(wrong[0])}. Give a list with the layers of each chunk, in whole numbers.")
    if unfit := [str(entry) for entry in entries if entry.kind is Pass.WGRAD or entry.chunk > len(layers)]:
        raise ValueError(
            f"{unfit[0]} cannot be spread over {len(layers)} chunks. Give the order without wgrads, which "
            "delayed=True adds, and the layers of each of its chunks."
        )
    named = {entry.chunk for entry in entries}
    if surplus := [chunk for chunk in range(1, len(layers) + 1) if chunk not in named]:
        raise ValueError(
            f"layers has {len(layers)} chunks, but the order has no entry of chunk {surplus[0]}. "
            "Give an order of all chunks, or layers of those in it."
        )
    spread_over = sum(layers[entry.chunk - 1] for entry in entries)
    if spread_over > MOST_ENTRIES:
        raise ValueError(f"{len(entries)} entries over these layers make {spread_over}. Give at most {MOST_ENTRIES}.")
    ends = [sum(layers[:chunk]) for chunk in range(len(layers) + 1)]

    def spread(entry: Entry) -> list[list[float]]:
        own = range(ends[entry.chunk - 1] + 1, ends[entry.chunk] + 1)
        if entry.kind is Pass.FORWARD:
            return [[chunk] for chunk in own]
        return [[-chunk, -chunk - 0.5] if delayed else [-chunk] for chunk in reversed(own)]

    first = next((k for k, entry in enumerate(entries) if entry.kind is Pass.DGRAD), len(entries))
    last = next((k for k in reversed(range(len(entries))) if entries[k].kind is Pass.FORWARD), -1)
    steady = entries[first : last + 1]
    pairs = list(zip(steady[::2], steady[1::2], strict=False))
    if any((b.kind, f.kind) != (Pass.DGRAD, Pass.FORWARD) for b, f in pairs) or len(steady) % 2:
        raise ValueError(
            f"{' '.join(map(str, steady))} does not alternate between backward and forward. Give an order that does, "
            "from its first backward to its last forward; 1F1B orders do."
        )
    result = [number for entry in entries[:first] for number in chain.from_iterable(spread(entry))]
    for backward, forward in pairs:
        steps = spread(backward)
        held = steps[-1][1:] if steps else []
        steps[-1:] = [step[:1] for step in steps[-1:]]
        result += [*_in_turn(spread(forward), steps), *held]
    rest = entries[max(first, last + 1) :]
    return result + [number for entry in rest for number in chain.from_iterable(spread(entry))]


def _alternate(forward: Sequence[int], backward: Sequence[int], warmup: int, delayed: bool) -> list[float]:
    """`warmup` forwards, then forwards and backwards alternating, then the remaining backwards."""
    steps = [[-chunk, -chunk - 0.5] if delayed else [-chunk] for chunk in backward]
    return [*forward[:warmup], *_in_turn([[chunk] for chunk in forward[warmup:]], steps)]


def _in_turn(forward: Sequence[Sequence[float]], backward: Sequence[Sequence[float]]) -> Iterator[float]:
    for steps in zip_longest(forward, backward, fillvalue=()):
        yield from chain.from_iterable(steps)


def _check(stages: int, stage: int, microbatches: int, **more: int) -> None:
    """Raise ValueError unless the numbers describe a pipeline whose order is not too long. more: chunks and group."""
    given = {"stages": stages, "stage": stage, "microbatches": microbatches, **more}
    if odd := [f"{name}={show(value)}" for name, value in given.items() if not is_whole(value)]:
        raise ValueError(f"{', '.join(odd)}: give whole numbers.")
    if not 0 <= stage < stages or microbatches < 1:
        raise ValueError(
            f"stages={show(stages)}, stage={show(stage)}, microbatches={show(microbatches)} is no pipeline. Stages are "
            "counted from 0, and there must be a microbatch."
        )
    if (entries := 2 * microbatches * more.get("chunks", 1)) > MOST_ENTRIES:
        raise ValueError(f"The order would have {show(entries)} entries. Give microbatches for at most {MOST_ENTRIES}.")
