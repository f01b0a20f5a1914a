"""A fused expert MLP replayed from CUDA graphs, compared with its eager run and with the time of its kernels alone.

Forward + backward; weight gradients are added to fp32 `main_grad`, as in training with gradient accumulation.

    eager    each kernel launched from the host
    replay   two launches, one for each pass, and the copies of inputs into the graphs' memory
    kernels  the sum of the times of all kernels and copies of the eager step, by torch's profiler: the time without
             launch overhead and gaps between kernels

Target: at 16 tokens a replay takes at most 1.3 times its kernels. Before timing, every replay must match the eager step
bit for bit. On a CPU, which has no graphs, replays are only checked, not timed.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench.case import Call, TimedPass
from bench.device_events import device_events
from bench.grouped_case import GroupedCase, expert_mlp
from bench.models import SHAPES
from bench.results import add_json_argument, write_results
from bench.schedule import BASELINE, known_recipes, recipe_named
from bench.table import print_table
from bench.timing import Timing, time_interleaved
from bench.usage import UsageError, require_device, require_positive
from fuser import autocast
from fuser.graph import make_graphed_callables

TOKENS = (16, 256, 4096)
MODELS = {"cuda": "olmoe-1b-7b", "cpu": "tiny-olmoe-1b-7b"}
MAX_OF_KERNELS = 1.3  # for the smallest number of tokens


@dataclass(frozen=True)
class GraphFigures:
    """Times of one recipe and number of tokens, in seconds. kernels: the sum over all kernels of the eager step."""

    recipe: str
    tokens: int
    eager: Timing
    replay: Timing
    kernels: float

    @property
    def of_kernels(self) -> float:
        return self.replay.median / self.kernels


def make_steps(label: str, case: GroupedCase) -> dict[str, TimedPass]:
    """The eager and the replayed step, after comparing them, also with other split sizes.

    Raises AssertionError if they differ in any bit.
    """
    for operation in (case.layer[0], case.layer[2]):
        operation.accumulate_into_main_grad = True
        operation.weight.main_grad = torch.zeros_like(operation.weight, dtype=torch.float32)
    x, scales = case.inputs.values()
    sizes = torch.tensor(case.sizes, device=case.device)
    recipe = recipe_named(label)

    def eager(sizes: Tensor = sizes) -> Tensor:
        with autocast(recipe=recipe):
            return case.layer(x, split_sizes=sizes, scales=scales)

    graphed = make_graphed_callables(
        case.layer, (x,), sample_kwargs={"split_sizes": sizes, "scales": scales}, recipe=recipe
    )

    def replayed(sizes: Tensor = sizes) -> Tensor:
        return graphed(x, split_sizes=sizes, scales=scales)

    states = [(buffer, buffer.clone()) for buffer in case.layer.buffers()]  # only stateful recipes have buffers
    for each in (sizes, sizes.flip(0), torch.zeros_like(sizes)):
        found = []
        for call in (eager, replayed):
            torch.manual_seed(0)
            for buffer, value in states:
                buffer.copy_(value)
            for weight in case.weights:
                weight.main_grad.zero_()  # type: ignore[attr-defined]
            step = _make_step(lambda call=call: call(each), (x, scales), case.dy)  # noqa: B023
            found.append([t.clone() for t in (*step(), *(w.main_grad for w in case.weights))])  # type: ignore[attr-defined]
        names = ["y", "dx", "dscales", *(f"main_grad {n}" for n in range(1, len(case.weights) + 1))]
        for name, ours, theirs in zip(names, found[1], found[0], strict=True):
            assert torch.equal(ours, theirs), f"{label}: {name} of a replay is not that of the eager step"
    return {name: _make_step(call, (x, scales), case.dy) for name, call in (("eager", eager), ("replay", replayed))}


def _make_step(call: Call, inputs: Sequence[Tensor], dy: Tensor) -> TimedPass:
    """A step that returns the output and the inputs' gradients. It calls `backward()`, which also fills main_grad."""

    def step() -> list[Tensor]:
        for tensor in inputs:
            tensor.grad = None
        y = call()
        y.backward(dy)
        return [y.detach(), *[tensor.grad for tensor in inputs if tensor.grad is not None]]

    return step


def measure_graphs(label: str, model: str, *, rounds: int) -> Iterator[GraphFigures]:
    """Measure each number of tokens in `TOKENS`, on the GPU."""
    for tokens in TOKENS:
        case = expert_mlp(SHAPES[model], device="cuda", tokens=tokens)
        steps = make_steps(label, case)
        times = time_interleaved(steps, rounds=rounds, device="cuda")
        yield GraphFigures(label, tokens, times["eager"], times["replay"], kernel_seconds(steps["eager"]))


def kernel_seconds(step: TimedPass, repeats: int = 10) -> float:
    """The sum of the GPU times of all kernels and copies of one step."""
    return sum(event.seconds for event in device_events(step, repeats)) / repeats


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--recipes", default=f"{BASELINE},mxfp8", help="by commas (default: %(default)s)")
    parser.add_argument("--model", help=f"whose expert layer (default: {MODELS['cuda']}; on a CPU {MODELS['cpu']})")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds (default: %(default)s)")
    add_json_argument(parser, "graphs")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench graphs`."""
    require_device(arguments.device)
    require_positive(arguments, "rounds")
    model = arguments.model or MODELS[arguments.device]
    if model not in SHAPES:
        raise UsageError(f"--model {model} is not known. Take one of {SHAPES.choices}.")
    labels = arguments.recipes.split(",")
    for label in labels:
        if label not in known_recipes():
            raise UsageError(f"--recipes {label} is not known. Take {', '.join(known_recipes())}.")
    if arguments.device == "cpu":
        for label in labels:
            make_steps(label, expert_mlp(SHAPES[model], tokens=TOKENS[0]))
        print(f"{model}: replays of {', '.join(labels)} have the bits of eager steps, also with other split sizes.")
        print("A CPU has no CUDA graphs to show: a replay runs the module again. Take --device cuda.")
        return 0
    found: list[GraphFigures] = []
    for label in labels:
        of_recipe = list(measure_graphs(label, model, rounds=arguments.rounds))
        print_table(
            f"{model}, {label}, forward + backward",
            ["tokens", "eager us", "replay us", "quartiles", "kernels us", "replay / kernels", "eager / replay"],
            [
                [
                    str(each.tokens), _us(each.eager.median), _us(each.replay.median),
                    f"{_us(each.replay.low)} - {_us(each.replay.high)}", _us(each.kernels), f"{each.of_kernels:.2f}",
                    f"{each.eager.median / each.replay.median:.2f}",
                ]
                for each in of_recipe
            ],
        )  # fmt: skip
        found += of_recipe
    slow = [each for each in found if each.tokens == TOKENS[0] and each.of_kernels > MAX_OF_KERNELS]
    for each in slow:
        print(f"{each.recipe}: {each.of_kernels:.2f} times its kernels, and at most {MAX_OF_KERNELS} are promised")
    if arguments.json:
        figures = [asdict(each) | {"of_kernels": each.of_kernels} for each in found]
        print(f"written: {write_results(arguments.json, 'graphs', 'cuda', {'model': model, 'graphs': figures})}")
    return 1 if slow else 0


def _us(seconds: float) -> str:
    return f"{seconds * 1e6:.1f}"
