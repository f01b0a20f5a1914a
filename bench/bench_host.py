"""Host overhead of the framework: small operations in a Sequential against one hand-written autograd.Function.

N consecutive biases on [64, 256] fp32, forward + backward on the CPU:

    ours      Sequential(Bias, ..., Bias): the runner, one autograd node, contexts, parameter checks
    by hand   one torch.autograd.Function with the same N additions and the same N sums over rows

Both do the same arithmetic, so the difference is the framework's overhead. It is measured for 1 and for 10 operations:
the slope is the overhead of one operation in both passes, the intercept that of one pipeline. Timed interleaved, in one
process, medians, with warm caches. Targets: at most 3 us for each operation and pass, 40 us for a pipeline, 5 us for
the plan lookup.
"""

import argparse
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.results import add_json_argument, write_results
from bench.timing import Timing, time_interleaved
from bench.usage import require_positive
from fuser import Sequential, ops
from ops.runner.run import Pipeline

ROWS, WIDTH = 64, 256
NUM_OPERATIONS = 10

MAX_PER_OPERATION_AND_PASS = 3e-6  # seconds
MAX_PER_PIPELINE = 40e-6
MAX_PER_LOOKUP = 5e-6


class HostCost(NamedTuple):
    """Seconds. `ours` and `by_hand` are complete steps of ten operations, forward + backward."""

    ours: Timing
    by_hand: Timing
    per_operation_and_pass: float
    per_pipeline: float
    per_lookup: float

    @property
    def on_top(self) -> float:
        return self.ours.median - self.by_hand.median

    @property
    def allowed_on_top(self) -> float:
        return 2 * NUM_OPERATIONS * MAX_PER_OPERATION_AND_PASS + MAX_PER_PIPELINE


def measure_host_cost(*, rounds: int = 60, calls: int = 50) -> HostCost:
    """Check that both implementations agree bit for bit, then time them interleaved."""
    candidates: dict[str, Callable[[], object]] = {}
    for count in (1, NUM_OPERATIONS):
        ours, by_hand = _steps(count)
        _check_equal(ours(), by_hand())
        candidates[f"ours {count}"], candidates[f"by hand {count}"] = ours, by_hand
    candidates["lookup"] = _lookup(NUM_OPERATIONS)

    times = time_interleaved(candidates, rounds=rounds, calls=calls)
    one = times["ours 1"].median - times["by hand 1"].median
    ten = times[f"ours {NUM_OPERATIONS}"].median - times[f"by hand {NUM_OPERATIONS}"].median
    per_operation = (ten - one) / (NUM_OPERATIONS - 1)
    return HostCost(
        times[f"ours {NUM_OPERATIONS}"],
        times[f"by hand {NUM_OPERATIONS}"],
        per_operation_and_pass=per_operation / 2,
        per_pipeline=one - per_operation,
        per_lookup=times["lookup"].median,
    )


class _BiasesByHand(torch.autograd.Function):
    """y = x + b_1 + ... + b_N; dx = dy, db_i = the sum of dy over rows, computed separately for each bias."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *biases: Tensor) -> Tensor:
        ctx.num_biases = len(biases)
        for bias in biases:
            x = x + bias
        return x

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, ...]:
        return dy, *[dy.sum(0) for _ in range(ctx.num_biases)]


def _steps(count: int) -> tuple[Callable[[], list[Tensor]], Callable[[], list[Tensor]]]:
    """Steps of `count` biases, ours and by hand, on the same tensors; each returns [y, dx, db_1, ...]."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, WIDTH, generator=generator).requires_grad_()
    dy = torch.randn(ROWS, WIDTH, generator=generator)
    sequential = Sequential(*(ops.Bias(WIDTH) for _ in range(count)))
    biases = list(sequential.parameters())
    with torch.no_grad():
        for bias in biases:
            bias.normal_(generator=generator)

    def step(forward: Callable[[], Tensor]) -> list[Tensor]:
        y = forward()
        return [y, *torch.autograd.grad(y, (x, *biases), dy)]

    return (lambda: step(lambda: sequential(x))), (lambda: step(lambda: _BiasesByHand.apply(x, *biases)))


def _lookup(count: int) -> Callable[[], object]:
    """The lookup of the cached plan for a repeated call."""
    operations = [ops.Bias(WIDTH) for _ in range(count)]
    pipeline = Pipeline(operations)
    x = torch.randn(ROWS, WIDTH).requires_grad_()
    return lambda operations=operations: pipeline.program(x, {}, training=True, fusions_version=0)  # kept alive


def _check_equal(ours: list[Tensor], by_hand: list[Tensor]) -> None:
    for ours_tensor, by_hand_tensor in zip(ours, by_hand, strict=True):
        torch.testing.assert_close(ours_tensor, by_hand_tensor, rtol=0, atol=0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=60, help="timed rounds (default: %(default)s)")
    add_json_argument(parser, "host")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench host`."""
    require_positive(arguments, "rounds")
    cost = measure_host_cost(rounds=arguments.rounds)
    print(f"{NUM_OPERATIONS} biases on [{ROWS}, {WIDTH}] fp32, forward + backward, CPU; median (quartiles)")
    for name, timing in (("Sequential", cost.ours), ("by hand", cost.by_hand)):
        print(f"  {name:12} {_us(timing.median)} ({_us(timing.low)} - {_us(timing.high)})")
    rows = (
        ("on top, all", cost.on_top, cost.allowed_on_top),
        ("an operation and pass", cost.per_operation_and_pass, MAX_PER_OPERATION_AND_PASS),
        ("a pipeline", cost.per_pipeline, MAX_PER_PIPELINE),
        ("choosing the plan", cost.per_lookup, MAX_PER_LOOKUP),
    )
    for name, seconds, limit in rows:
        print(f"  {name:22} {_us(seconds)}  (goal: at most {_us(limit)})")
    if arguments.json:
        figures = {"seconds": {name: seconds for name, seconds, _ in rows}, "ours": cost.ours, "by_hand": cost.by_hand}
        print(f"written: {write_results(arguments.json, 'host', 'cpu', figures)}")
    return 0


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f} us"
