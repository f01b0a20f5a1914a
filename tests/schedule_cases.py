"""What the tests of schedules share: random legal schedules, and the lists that other projects printed."""

from hypothesis import strategies as st

from fuser.schedule.schedule import Pass, Schedule

# TransformerEngine pull request 2376: an interleaved order, and what overlap makes of chunks with 1 and 2 layers.
PRINTED = [
    1, 1, 1, 1, 2, -2, 2, -2, 2, -2, 2, -2, 1, -1, 1, -1, 1, -1, 1, -1, 2, -2, 2, -2, 2, -2, 2, -2, -1, -1, -1, -1,
]  # fmt: skip
PRINTED_OVERLAPPED = [
    1, 1, 1, 1, 2, 3, 2, -3, 3, -2, 2, -3, 3, -2, 2, -3, 3, -2, 1, -3, -2, 1, -1, 1, -1, 1, -1, 2, -1, 3, 2, -3, 3, -2,
    2, -3, 3, -2, 2, -3, 3, -2, -3, -2, -1, -1, -1, -1,
]  # fmt: skip
PRINTED_DELAYED = [
    1, 1, 1, 1, 2, 3, 2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5, 1, -3, -3.5, -2,
    -2.5, 1, -1, -1.5, 1, -1, -1.5, 1, -1, -1.5, 2, -1, 3, -1.5, 2, -3, -3.5, 3, -2, -2.5, 2, -3, -3.5, 3, -2, -2.5,
    2, -3, -3.5, 3, -2, -2.5, -3, -3.5, -2, -2.5, -1, -1.5, -1, -1.5, -1, -1.5, -1, -1.5,
]  # fmt: skip


@st.composite
def schedules(draw: st.DrawFn, chunks: int = 3, microbatches: int = 4, layers: int = 3, chained: bool = False):
    """Any legal schedule: at each step one of the entries that may come next. chained: also by rule R8."""
    number = draw(st.integers(1, microbatches))
    counts = draw(st.lists(st.integers(0, layers), min_size=1, max_size=chunks))
    delayed = [draw(st.booleans()) for _ in counts]
    done = {(kind, chunk): 0 for kind in Pass for chunk in range(1, len(counts) + 1)}

    def limit(kind: Pass, chunk: int) -> int:
        if kind is Pass.WGRAD:
            return done[Pass.DGRAD, chunk] if delayed[chunk - 1] else 0
        limits = [number if kind is Pass.FORWARD else done[Pass.FORWARD, chunk]]
        if chained:
            limits.append(done.get((kind, chunk - 1 if kind is Pass.FORWARD else chunk + 1), number))
        return min(limits)

    order = []
    while ready := [key for key, count in done.items() if count < limit(*key)]:
        kind, chunk = draw(st.sampled_from(ready))
        done[kind, chunk] += 1
        order.append(f"{kind.value}{chunk}")
    return Schedule.parse(order, layers=counts, follows=range(2, len(counts) + 1) if chained else ())
