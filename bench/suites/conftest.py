"""The suites' timing: pytest-benchmark's clock around a step, which on a GPU ends with a synchronization."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from bench.environment import environment
from bench.suites.cases import DEVICE, ROUNDS, WARMUP_ROUNDS, Measure


@pytest.fixture
def measure(benchmark: Any) -> Measure:
    """Time a step, and store rates from its median, and the environment, in extra_info.

    The time is that of the complete step with its launches. group: the table in which it is shown and compared.
    """

    def run(step: Callable[[], object], group: str, *, num_bytes: int, flop: int = 0) -> None:
        def timed() -> None:
            step()
            if DEVICE == "cuda":
                torch.cuda.synchronize()

        benchmark.group = group
        benchmark.pedantic(timed, rounds=ROUNDS[DEVICE], warmup_rounds=WARMUP_ROUNDS[DEVICE])
        benchmark.extra_info |= environment(DEVICE)
        if benchmark.stats is not None:  # None under --benchmark-disable
            seconds = benchmark.stats.stats.median
            benchmark.extra_info["gb_per_s"] = num_bytes / seconds / 1e9
            if flop:
                benchmark.extra_info["tflop_per_s"] = flop / seconds / 1e12

    return run
