"""A step under torch.compile, compared with the same step run eagerly.

A Sequential is one operation of torch in a compiled graph and runs the kernels of an eager run; compiled is what is
around it. Forward + backward, without an optimizer, of

    a layer    the complete mixture-of-experts layer of a model (`bench.whole_layer`): one Sequential, nothing around it
    a model    the language model that `bench train` trains, with its loss: attention, norms and head are around

Before timing, the results of both ways are compared: a layer's must have the same bits; of a language model, whose
inductor code rounds less often, the losses must agree within `MAX_DIFFERENCE`.

Target: a compiled step takes at most 1.02 times an eager one. On a CPU times are printed and not judged.
"""

import argparse
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import PASSES, TimedPass
from bench.language_model import LANGUAGE_MODELS, NUM_BYTES, LanguageModel, LanguageModelConfig
from bench.models import SHAPES, ExpertShape
from bench.results import add_json_argument, write_results
from bench.schedule import BASELINE, known_recipes, numerics, recipe_named
from bench.table import print_table
from bench.timing import Timing, time_interleaved
from bench.train import BALANCE_COEFFICIENT
from bench.usage import UsageError, require_device, require_positive
from bench.whole_layer import whole_layer
from fuser import autocast

MODELS = {"cuda": "large,qwen3-30b-a3b", "cpu": "micro,tiny-qwen3-30b-a3b"}
BACKENDS = ("inductor", "aot_eager")
MAX_OF_EAGER = 1.02
MAX_DIFFERENCE = 1e-2  # of two losses, relative: a few roundings of bfloat16

Compile = Callable[[Any], Any]


@dataclass(frozen=True)
class CompileFigures:
    """Seconds of a step of one model under one recipe."""

    model: str
    recipe: str
    eager: Timing
    compiled: Timing

    @property
    def of_eager(self) -> float:
        return self.compiled.median / self.eager.median


def layer_steps(shape: ExpertShape, recipe: str, device: str, compiled: Compile) -> dict[str, TimedPass]:
    """The eager and the compiled step of a layer.

    Raises AssertionError if they differ in any bit.
    """
    case = whole_layer(shape, device=device)
    value, x = recipe_named(recipe), case.inputs["x"]

    def step(layer: Any) -> TimedPass:
        def call() -> Tensor:
            with autocast(recipe=value):
                return layer(x)

        return case.step(call, PASSES[1])

    steps = {"eager": step(case.layer), "compiled": step(compiled(case.layer))}
    found = []
    for run in steps.values():
        torch.manual_seed(0)
        found.append(run())
    for name, eager, ours in zip(case.names, *found, strict=True):
        assert torch.equal(eager, ours), f"{recipe}: {name} of the compiled layer is not that of the eager one"
    return steps


def model_steps(config: LanguageModelConfig, recipe: str, device: str, compiled: Compile) -> dict[str, TimedPass]:
    """The eager and the compiled step of a language model, on random bytes.

    Raises AssertionError if their losses differ by more than `MAX_DIFFERENCE`.
    """
    torch.manual_seed(0)
    model = LanguageModel(config).to(device)
    inputs, targets = torch.randint(NUM_BYTES, (2, config.batch_size, config.context), device=device)
    parameters = list(model.parameters())

    def loss_of(inputs: Tensor, targets: Tensor) -> Tensor:
        logits, balance = model(inputs)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()) + BALANCE_COEFFICIENT * balance

    def step(loss_of: Callable[..., Tensor]) -> TimedPass:
        def run() -> list[Tensor]:
            with numerics(recipe, torch.device(device)):
                loss = loss_of(inputs, targets)
            return [loss.detach(), *torch.autograd.grad(loss, parameters)]

        return run

    steps = {"eager": step(loss_of), "compiled": step(compiled(loss_of))}
    losses = []
    for run in steps.values():
        torch.manual_seed(0)
        losses.append(run()[0].item())
    eager, ours = losses
    assert abs(ours - eager) <= MAX_DIFFERENCE * eager, f"{recipe}: a loss of {ours} compiled, and of {eager} eager"
    return steps


def measure(model: str, recipe: str, *, device: str, backend: str, rounds: int) -> CompileFigures:
    """Check and time one model under one recipe."""
    torch.compiler.reset()  # earlier compilations count against the recompile limit

    def compiled(function: Any) -> Any:
        return torch.compile(function, fullgraph=True, backend=backend)

    if model in LANGUAGE_MODELS:
        steps = model_steps(LANGUAGE_MODELS[model], recipe, device, compiled)
    else:
        steps = layer_steps(SHAPES[model], recipe, device, compiled)
    return CompileFigures(model, recipe, **time_interleaved(steps, rounds=rounds, device=device))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--models",
        help=f"layers of known models, and sizes of `bench train --model`, by commas (default: {MODELS['cuda']}; on a "
        f"CPU {MODELS['cpu']})",
    )
    parser.add_argument("--recipes", default=f"{BASELINE},fp8_current", help="by commas (default: %(default)s)")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one)")
    parser.add_argument("--backend", choices=BACKENDS, default=BACKENDS[0], help="(default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=30, help="timed rounds (default: %(default)s)")
    add_json_argument(parser, "compile")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench compile`."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    models, recipes = (arguments.models or MODELS[device]).split(","), arguments.recipes.split(",")
    for name in models:
        if name not in LANGUAGE_MODELS and name not in SHAPES:
            raise UsageError(f"--models {name} is not known. Take {', '.join(LANGUAGE_MODELS)}, {SHAPES.choices}.")
    for name in recipes:
        if name not in known_recipes():
            raise UsageError(f"--recipes {name} is not known. Take {', '.join(known_recipes())}.")
    require_positive(arguments, "rounds")
    found = []
    for model in models:
        for recipe in recipes:
            found.append(measure(model, recipe, device=device, backend=arguments.backend, rounds=arguments.rounds))
        print_table(
            f"{model}, forward + backward, {arguments.backend}",
            ["recipe", "eager ms", "quartiles", "compiled ms", "quartiles", "compiled / eager"],
            [
                [each.recipe, *_ms(each.eager), *_ms(each.compiled), f"{each.of_eager:.3f}"]
                for each in found
                if each.model == model
            ],
        )
    if arguments.json:
        figures = [asdict(each) | {"of_eager": each.of_eager} for each in found]
        record = {"backend": arguments.backend, "steps": figures}
        print(f"written: {write_results(arguments.json, 'compile', device, record)}")
    slow = [each for each in found if each.of_eager > MAX_OF_EAGER] if device == "cuda" else []
    for each in slow:
        print(f"{each.model}, {each.recipe}: {each.of_eager:.3f} times eager, and at most {MAX_OF_EAGER} are promised")
    return 1 if slow else 0


def _ms(time: Timing) -> tuple[str, str]:
    return f"{time.median * 1e3:.3f}", f"{time.low * 1e3:.3f} - {time.high * 1e3:.3f}"
