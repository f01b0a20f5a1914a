"""Interleaved timing: every candidate runs once in each round, so that drifts of the machine hit all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch

# Bytes written before each turn of the "device" clock: more than any L2 cache holds.
FLUSHED_BYTES = 256 * 2**20

Run = Callable[[], None]
Reading = Callable[[], float]


class Timing(NamedTuple):
    """Seconds a call: the median over the rounds, and the quartiles as its spread."""

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
) -> dict[str, Timing]:
    """Time each candidate in turn, `rounds` times over, each time `calls` calls on end.

    The first `warmup` rounds do not count. What a GPU's clock shows (on a CPU all three are the same):

        "step"    from an idle device to an idle device: the whole step, launches included
        "device"  from the first to the last of its work, by CUDA events; nothing waits between the turns, so launches
                  are hidden where the host is ahead, and the L2 cache is overwritten before each turn
        "host"    until the work is issued, right after as much was issued to an idle device: as in training, the host
                  is ahead and does not wait
    """
    stopwatch = _stopwatch(clock, torch.device(device))
    readings: dict[str, list[Reading]] = {name: [] for name in candidates}
    for turn in range(warmup + rounds):
        # Who comes second finds weights and inputs in the cache: so each comes first every other time.
        order = list(candidates.items())
        for name, candidate in order if turn % 2 else reversed(order):
            reading = stopwatch(_repeated(candidate, calls))
            if turn >= warmup:
                readings[name].append(reading)
    _wait(torch.device(device))
    return {name: _timing([reading() / calls for reading in found]) for name, found in readings.items()}


def _repeated(candidate: Callable[[], object], calls: int) -> Run:
    def run() -> None:
        for _ in range(calls):
            candidate()

    return run


def _stopwatch(clock: str, device: torch.device) -> Callable[[Run], Reading]:
    """What runs something, and gives a function that tells the seconds once the device is idle."""

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


def _timing(values: list[float]) -> Timing:
    # Inclusive: quartiles of few values must not lie outside of them.
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Timing(median, low, high)
