"""One live grouped MLP, or whole layer, whose recipe is switched in place: what each recipe costs, keeps, gets wrong.

    a recipe          GroupedLinear -> ScaledSwiGLU -> GroupedLinear under `autocast(recipe=...)`, never rebuilt
    torch             the same with `F.grouped_mm` and eager SwiGLU, in bf16
    torch compiled    the same formula under torch.compile (CUDA only)
    torchao compiled  the same in torchao's FP8 rowwise, groups padded ahead, where it is installed (CUDA only)

With `--layer` all of it is of Router -> Dispatch -> ... -> Combine, but for torchao's and the products alone.

Same weights, inputs, split sizes. First every way is held against fp32, expert by expert (SQNR in dB of the output and
of each gradient), and each recipe is run, another one, and the first again, which must give the same bits. Only then
all ways are timed interleaved in one process by the "device" clock of `bench.timing`, which overwrites the L2 cache
before each turn. Each step quantizes the weights anew, but not in `weights once in N`: the time of one of N
microbatches inside of one `constant_weights`. `host`: host launch overhead of a step, queued behind other work. Then
the grouped products alone, of operands that are quantized before (`products`). Useful FLOP: 6 R H F forward, 18 R H F
in all other passes.
"""

import argparse
import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

import fuser
from bench.case import DTYPE, PASSES, Call, Case, TimedPass
from bench.grouped_case import GroupedCase, expert_mlp
from bench.memory import peak_bytes, saved_bytes, saved_tensors
from bench.models import EXPERT_SHAPES, SHAPES
from bench.plots import why_no_plots
from bench.products import PRODUCTS, grouped_products
from bench.recipe_report import Counts, Outcome, draw_recipes, figures, show_recipes, write_csv
from bench.results import add_json_argument, write_results
from bench.routing import ROUTINGS
from bench.schedule import BASELINE, BATCH_INVARIANT, known_recipes, recipe_named
from bench.sqnr import require_sqnr, sqnr_floor
from bench.timing import Timing, time_interleaved
from bench.torchao_rowwise import TORCHAO, torchao_rowwise, why_no_torchao
from bench.usage import UsageError, require_device, require_positive
from bench.whole_layer import LayerCase, whole_layer
from fuser import constant_weights, to_quantized
from recipes import Role
from recipes.tensors.quantized_handle import held_tensors

DEFAULT_MODELS = {"cuda": "qwen3-30b-a3b", "cpu": "tiny-qwen3-30b-a3b"}
WEIGHTS_EVERY = 8
HOST = "host"
HOST_CALLS = 4  # few, so that none waits because the device's queue is full
# Steps on the same data after which a recipe with a history gives the same bits each time.
SETTLING_STEPS = 4
# The label whose SQNR a way of another library must reach, where it is not that of bf16.
FLOORS = {TORCHAO: "fp8_current"}


def compare_recipes(
    case: GroupedCase | LayerCase,
    labels: list[str],
    *,
    steps: int = 20,
    weights_every: int = WEIGHTS_EVERY,
    peers: bool = True,
) -> list[Outcome]:
    """Check all recipes (peers: and torch's and torchao's ways), then time them interleaved. AssertionError for a wrong
    one."""
    ways: dict[str, tuple[GroupedCase | LayerCase, Call]] = {label: (case, case.ours(label)) for label in labels}
    if peers:
        ways["torch"] = case, case.torchs()
    if peers and case.device.type == "cuda":
        torch.compiler.reset()  # what was compiled for other shapes counts against a limit
        ways["torch compiled"] = case, case.torchs(compiled=True)
    if peers and isinstance(case, GroupedCase) and why_no_torchao(case.device) is None:
        ways[TORCHAO] = torchao_rowwise(case)

    outcomes = []
    for way, (its_case, call) in ways.items():
        ours = way in labels
        step = its_case.step(call, PASSES[-1])
        sqnr = its_case.sqnr(step())
        require_sqnr(way, sqnr, sqnr_floor(way if ours else FLOORS.get(way, BASELINE)))
        found = Outcome(
            way,
            recipe_named(way).support(case.device) if ours else "torch",
            sqnr,
            saved_bytes_of_rows(its_case, call) / case.rows,
            peak_bytes(step, case.device),
        )
        if ours:
            other = _other(way, labels)
            if other is not None:
                require_same_bits(case, way, other)
            kept = kept_weight_bytes(case, step)
            found = replace(
                found, same_bits_after=other, counts=_counted(step), kept_weight_bytes=kept,
                parameter_bytes=parameter_bytes(case, way),
            )  # fmt: skip
        outcomes.append(found)

    times = {
        passes: time_interleaved(
            {way: its_case.step(call, passes) for way, (its_case, call) in ways.items()},
            rounds=steps,
            device=case.device,
            clock="device",
        )
        for passes in PASSES
    }
    whole = {way: its_case.step(call, PASSES[-1]) for way, (its_case, call) in ways.items()}
    microbatches = {way: _in_one_scope(case, step, weights_every) for way, step in whole.items()}
    rounds = max(1, steps // 2)
    found_once = time_interleaved(microbatches, rounds=rounds, warmup=2, device=case.device, clock="device")
    times[once_in(weights_every)] = {
        way: Timing(*(seconds / weights_every for seconds in timing)) for way, timing in found_once.items()
    }
    if case.device.type == "cuda":
        times[HOST] = time_interleaved(whole, rounds=steps, calls=HOST_CALLS, device=case.device, clock="host")
    if isinstance(case, GroupedCase):
        products = checked_products(case, labels, peers)
        times[PRODUCTS] = time_interleaved(products, rounds=steps, device=case.device, clock="device")
    return [
        replace(found, times={passes: of_ways[found.way] for passes, of_ways in times.items() if found.way in of_ways})
        for found in outcomes
    ]


def saved_bytes_of_rows(case: Case, call: Callable[[], Tensor]) -> int:
    """What a call keeps for backward, without weights and their quantized copies: those two calls in a scope share."""
    with constant_weights(case.layer):
        before = {tensor.untyped_storage().data_ptr(): tensor for tensor in saved_tensors(call)}
        for given in case.inputs.values():
            before.pop(given.untyped_storage().data_ptr(), None)
        return saved_bytes(call, but=[*case.weights, *before.values()])


def kept_weight_bytes(case: Case, step: TimedPass) -> int:
    """What `constant_weights` keeps of the weights."""
    scope = constant_weights(case.layer)
    with scope:
        step()
        return scope.nbytes


def parameter_bytes(case: Case, way: str) -> int:
    """Of the parameters, with weights that are held quantized (`to_quantized`) where the recipe quantizes weights."""
    layer = copy.deepcopy(case.layer)
    if recipe_named(way).quantizer(Role.WEIGHT) is not None:
        to_quantized(layer, recipe_named(way))
    return sum(tensor.nbytes for parameter in layer.parameters() for tensor in held_tensors(parameter))


def once_in(microbatches: int) -> str:
    """The name of the pass in which weights are quantized once in so many."""
    return f"{PASSES[-1]}, weights once in {microbatches}"


def _in_one_scope(case: Case, step: TimedPass, microbatches: int) -> Callable[[], None]:
    def run() -> None:
        with constant_weights(case.layer):
            for _ in range(microbatches):
                step()

    return run


def checked_products(case: GroupedCase, labels: list[str], peers: bool = True) -> dict[str, TimedPass]:
    """The products of each recipe and torch's, once they were held against fp32."""
    products = grouped_products(case)
    steps = {label: products.ours(label) for label in labels}
    if peers:
        steps["torch"] = products.torchs()
    exact = products.exact()
    for way, step in steps.items():
        floor = sqnr_floor(way if way in labels else BASELINE)
        require_sqnr(way, products.sqnr(step(), exact), floor, products.outputs)
    return steps


def require_same_bits(case: GroupedCase | LayerCase, label: str, other: str) -> None:
    """AssertionError unless the recipe gives its bits again after another one ran on the same live model."""
    step = case.step(case.ours(label), PASSES[-1])
    for _ in range(SETTLING_STEPS):
        step()
    before = _seeded(step)
    _seeded(case.step(case.ours(other), PASSES[-1]))
    after = _seeded(step)
    for name, first, again in zip(case.names, before, after, strict=True):
        assert torch.equal(first, again), f"{label}, {other}, {label}: {name} has other bits than before"


def explain_line(case: Case, label: str) -> str:
    """Which path a recipe takes and why, by which kernels, native or emulated."""
    recipe = recipe_named(label)
    plan = case.layer.explain(recipe=recipe, device=case.device, dtype=DTYPE).splitlines()[1:]
    facts = "; ".join(line.strip() for line in plan if not line.startswith("stage"))
    return f"{label}: {recipe.support(case.device)} on {case.device.type}; {facts}"


def _other(label: str, labels: list[str]) -> str | None:
    """The next recipe in turn, if there is another one."""
    following = labels[(labels.index(label) + 1) % len(labels)]
    return following if following != label else None


def _seeded(step: TimedPass) -> list[Tensor]:
    torch.manual_seed(0)  # for recipes with stochastic rounding
    return step()


def _counted(step: TimedPass) -> Counts:
    """Elements, saturated, flushed and non-finite ones of each cast of a step."""
    with fuser.count_casts() as counter:
        step()
    names = ("elements", "saturated", "flushed", "non_finite")
    return {place: {name: int(getattr(counts, name)) for name in names} for place, counts in counter.counts.items()}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        help=f"of {', '.join(EXPERT_SHAPES)}; each also as tiny-NAME for a CPU; or a shape of your own, "
        f"EXPERTSxHIDDENxWIDTHxTOPK (default: {DEFAULT_MODELS['cuda']}, on the CPU {DEFAULT_MODELS['cpu']})",
    )
    parser.add_argument(
        "--recipes",
        default=",".join(known_recipes()),
        help=f"separated by commas, {BATCH_INVARIANT}NAME for one that is batch invariant (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="(default: %(default)s)")
    parser.add_argument("--layer", action="store_true", help="the whole layer, from tokens to tokens")
    parser.add_argument("--tokens", type=int, help="each is sent to top-k experts (default: those of the model)")
    parser.add_argument("--routing", default="random", choices=ROUTINGS, help="(default: %(default)s)")
    parser.add_argument(
        "--weights-every",
        type=int,
        default=WEIGHTS_EVERY,
        metavar="N",
        help="microbatches of a step that quantizes weights once (default: %(default)s)",
    )
    parser.add_argument(
        "--peers",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compare with torch's and torchao's products too (default: yes)",
    )
    parser.add_argument("--steps", type=int, default=20, help="timed steps of each way (default: %(default)s)")
    add_json_argument(parser, "recipes")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write a row for each way and pass")
    parser.add_argument("--plot", type=Path, metavar="DIR", help="write speed.png, saved_bytes.png and sqnr.png there")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench recipes`."""
    require_device(arguments.device)
    labels = _labels(arguments.recipes)
    model = arguments.model or DEFAULT_MODELS[arguments.device]
    if model not in SHAPES:
        raise UsageError(f"--model {model} is unknown. Take {SHAPES.choices}.")
    require_positive(arguments, "tokens", "steps", "weights-every")
    if arguments.plot and (missing := why_no_plots()):
        raise UsageError(f"--plot: {missing}")

    shape = SHAPES[model]
    data = {"device": arguments.device, "tokens": arguments.tokens, "routing": arguments.routing}
    if arguments.layer and arguments.routing == "uniform":
        raise UsageError("--layer routes by its own Router, not --routing uniform. Take random or skewed.")
    case = whole_layer(shape, **data) if arguments.layer else expert_mlp(shape, **data)
    note = f" ({shape.note})" if shape.note else ""
    print(
        f"recipes on {'the layer of ' if arguments.layer else ''}{model}{note}: {shape.num_experts} experts, "
        f"{case.rows} rows, {arguments.routing} routing, "
        f"{shape.hidden} / {shape.intermediate}, bf16, on {arguments.device}"
    )
    for label in labels:
        print(explain_line(case, label))
    if arguments.peers and not arguments.layer and (missing := why_no_torchao(case.device)):
        print(f"left out: {TORCHAO}: {missing}")
    every = arguments.weights_every
    outcomes = compare_recipes(case, labels, steps=arguments.steps, weights_every=every, peers=arguments.peers)
    alone = () if arguments.layer else (PRODUCTS,)
    flop = {passes: case.flop_of(passes) for passes in (*PASSES, once_in(every), HOST, *alone)}
    show_recipes(outcomes, flop)
    written = []
    if arguments.json:
        record = {
            "model": model,
            "layer": arguments.layer,
            "shape": asdict(shape),
            "rows": case.rows,
            "routing": arguments.routing,
            "weights_every": every,
            "steps": arguments.steps,
            "flop": flop,
            "ways": figures(outcomes, flop),
        }
        written.append(write_results(arguments.json, "recipes", arguments.device, record))
    if arguments.csv:
        written.append(write_csv(arguments.csv, model, arguments.device, outcomes, flop))
    if arguments.plot:
        written += draw_recipes(arguments.plot, model, outcomes)
    if written:
        print(f"written: {', '.join(map(str, written))}")
    return 0


def _labels(text: str) -> list[str]:
    """The recipes in the order given, bf16 first: all are compared with it."""
    labels = list(dict.fromkeys([BASELINE, *text.split(",")]))
    for label in labels:
        recipe = recipe_named(label)
        if label != BASELINE and recipe.quantizer(Role.INPUT) is None and not recipe.batch_invariant:
            raise UsageError(
                f"--recipes {label}: the model of this benchmark is bf16. Take {', '.join(known_recipes())}."
            )
    return labels
