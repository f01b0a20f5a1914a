"""Timing by turns: every candidate runs once in each round, so that drifts of the machine hit all of them alike."""

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch


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
) -> dict[str, Timing]:
    """Time each candidate in turn, `rounds` times over, each time `calls` calls on end.

    The first `warmup` rounds do not count. On a GPU the clock is stopped after synchronising, so the time is that of
    the whole step, launches included.
    """
    on_gpu = torch.device(device).type == "cuda"
    seconds: dict[str, list[float]] = {name: [] for name in candidates}
    for turn in range(warmup + rounds):
        # Who comes second finds weights and inputs in the cache: so each comes first every other time.
        order = list(candidates.items())
        for name, candidate in order if turn % 2 else reversed(order):
            if on_gpu:
                torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(calls):
                candidate()
            if on_gpu:
                torch.cuda.synchronize()
            if turn >= warmup:
                seconds[name].append((time.perf_counter() - start) / calls)
    return {name: _timing(values) for name, values in seconds.items()}


def _timing(values: list[float]) -> Timing:
    # Inclusive: quartiles of few values must not lie outside of them.
    low, median, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else values * 3
    return Timing(median, low, high)
