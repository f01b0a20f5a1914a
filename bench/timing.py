"""Interleaved timing: every candidate runs once in each round, so that drifts of the machine affect all alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

# Bytes written before each turn of the "device" clock, more than any L2 cache holds.
FLUSHED_BYTES = 256 * 2**20

Run = Callable[[], None]
Reading = Callable[[], float]


class Timing(NamedTuple):
    """Seconds per call: the median over the rounds, and the quartiles as its spread."""

    median: float
    low: float
    high: float


def time_interleaved(
    candidates: Mapping[str, Callable[[], object]],
    *,
    rounds: int = 30,
    warmup: int = 5,
    calls: int = 1,
    device: torch.device | str = "cpu",
    clock: str = "step",
    meet: Callable[[], object] | None = None,
) -> dict[str, Timing]:
    """Time all candidates interleaved for `rounds` rounds, each with `calls` consecutive calls per turn.

    The first `warmup` rounds are not counted. Clocks on a GPU (on a CPU all three are the same):

        "step"    from idle device to idle device: the complete step, including launches
        "device"  from the start to the end of its device work, by CUDA events. The host does not wait between turns,
                  so launches are hidden where it is ahead. The L2 cache is overwritten before each turn
        "host"    host time until all work is issued, directly after as much work was issued to an idle device: as in
                  training, the host is ahead and does not wait

    meet: called before each turn and not timed: where candidates are collectives, it lets the ranks start together
    """
    stopwatch = _stopwatch(clock, torch.device(device))
    readings: dict[str, list[Reading]] = {name: [] for name in candidates}
    for turn in range(warmup + rounds):
        # A later candidate finds weights and inputs in the cache, so the order is reversed in every other round.
        order = list(candidates.items())
        for name, candidate in order if turn % 2 else reversed(order):
            if meet is not None:
                meet()
            reading = stopwatch(_repeated(candidate, calls))
            if turn >= warmup:
                readings[name].append(reading)
    _wait(torch.device(device))
    return {name: summarize([reading() / calls for reading in found]) for name, found in readings.items()}


def summarize(values: list[float]) -> Timing:
    """The median and the quartiles of at least one value."""
    # Inclusive, so that quartiles of few values stay within their range.
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Timing(median, low, high)


def _repeated(candidate: Callable[[], object], calls: int) -> Run:
    def run() -> None:
        for _ in range(calls):
            candidate()

    return run


def _stopwatch(clock: str, device: torch.device) -> Callable[[Run], Reading]:
    """A function that runs its argument and returns a function for the elapsed seconds, to call on an idle device."""

    def stopped_by_host(run: Run) -> Reading:
        _wait(device)
        if clock == "host" and device.type == "cuda":
            run()
        start = time.perf_counter()
        run()
        if clock != "host":
            _wait(device)
        seconds = time.perf_counter() - start
        return lambda: seconds

    if clock != "device" or device.type != "cuda":
        return stopped_by_host
    flushed = torch.zeros(FLUSHED_BYTES, dtype=torch.int8, device=device)

    def stopped_by_device(run: Run) -> Reading:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flushed.zero_()
        start.record()
        run()
        end.record()
        return lambda: start.elapsed_time(end) * 1e-3

    return stopped_by_device


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
