"""Expert parallelism: the complete layer on several ranks, against one rank that holds all experts.

    one rank      our layer with all experts, without ranks: what the others lose against is transfer
    ours          Router -> Dispatch(group) -> GroupedLinear -> ScaledSwiGLU -> GroupedLinear -> Combine(group)
    overlapped    the same in `fuser.distributed.Overlapped`: transfers of one microbatch behind the other's products
    hand-written  `all_to_all_single`, a row a (token, slot) pair, around our grouped MLP (`bench.exchange`)
    torch         the same around `F.grouped_mm` and eager SwiGLU
    partial sums  "ours" with each of --partial-sums: the experts' ranks sum a token's rows before they send them
    symmetric     with --capacity, on GPUs: "ours" by kernels that write into the memory of the other GPUs
    , <recipe>    "one rank", "ours" and "overlapped" under each of --recipes, which quantizes the weights in each step
    transfers     the all_to_all_single calls of each of these but "torch", alone, one after the other

Every rank has its own tokens, in bf16, and the routing is random. All candidates of a model use the same weights, run
interleaved in one process a rank, and are checked against "one rank" in bf16 first: y and the gradients of x and of the
router, and those of the experts' weights against the sum over the ranks. "of one rank" compares with "one rank" under
the same recipe. Times are a rank's medians, of the slowest rank. On
GPUs by CUDA events, the L2 cache overwritten and the ranks brought together before each turn; "host" is the time until
all work is issued, in which the layers with ranks wait for their row counts. "in transfer" is the time of the transfers
alone over that of the whole: what "overlapped" gains is its time against that of "ours". FLOP: 6 T K H F forward, 18 T
K H F forward + backward, for T tokens a rank, K experts a token, H hidden, F expert width.
"""

import argparse
import gc
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.case import PASSES, Call, make_step
from bench.environment import gpu_state
from bench.exchange import Transfers, exchanged_layer, experts_of, torch_experts
from bench.models import EXPERT_SHAPES, TINY_SHAPES, ExpertShape
from bench.ranks import is_rank, joined, launch, require_gpus
from bench.results import add_json_argument, write_results
from bench.schedule import BASELINE, known_recipes, recipe_named
from bench.sqnr import Sqnr, require_sqnr, sqnr_floor
from bench.table import print_table
from bench.timing import Timing, time_interleaved
from bench.usage import UsageError, require_device
from bench.whole_layer import LayerCase, whole_layer
from fuser import Sequential, autocast, ops
from fuser.distributed import Overlapped
from ops.kernels.routing import transports

ONE, OURS, OVERLAPPED, HAND, TORCH = "one rank", "ours", "overlapped", "hand-written", "torch"
SYMMETRIC = "symmetric"
MODELS = {**EXPERT_SHAPES, **TINY_SHAPES}
PARTIAL_SUMS = {f"partial sums, {name}": name for name in transports.PARTIAL_SUMS}
DEFAULTS = {
    "cuda": "qwen3-30b-a3b,mixtral-8x7b,deepseek-v3",
    "cpu": "tiny-qwen3-30b-a3b,tiny-mixtral-8x7b",
}
ROUNDS = {"cuda": 20, "cpu": 5}
WARMUP = 3
_PIECE = 2**26  # elements


@dataclass(frozen=True)
class Measured:
    """One candidate in one pass. times: seconds of the slowest rank; tokens: of a rank.

    host: seconds until all work is issued, on a GPU. transfers: seconds of the exchanges alone, with bytes that a rank
    sends to others. sqnr: dB against "one rank" in bf16.
    """

    model: str
    ranks: int
    tokens: int
    passes: str
    way: str
    recipe: str
    flop: int
    times: Timing
    host: Timing | None
    transfers: Timing | None
    bytes_sent: int | None
    sqnr: dict[str, float]
    of_one_rank: float

    @property
    def tokens_per_s(self) -> float:
        """Of a rank."""
        return self.tokens / self.times.median

    @property
    def tflop_per_s(self) -> float:
        """Of a rank."""
        return self.flop / self.times.median / 1e12

    @property
    def share_in_transfer(self) -> float | None:
        return None if self.transfers is None else self.transfers.median / self.times.median


def measure(
    model: str,
    device: str,
    tokens: int | None,
    rounds: int,
    partial_sums: Sequence[str] = (),
    recipes: Sequence[str] = (),
    capacity: int | None = None,
) -> list[Measured]:
    """Both passes of one model, on all ranks. Raises AssertionError for a candidate that is wrong.

    partial_sums: with which of `Dispatch` it is measured besides; recipes: under which, besides bf16
    capacity: rows that a rank can receive over "symmetric", which is measured if it is given
    """
    shape = MODELS[model]
    case = _case_of_rank(shape, device, tokens)
    x, (router, fc1, fc2) = case.inputs["x"], case.weights
    own = _own_experts(shape.num_experts)
    mine = [nn.Parameter(weight.detach()[own]) for weight in (fc1, fc2)]
    layer = _sharded(shape, router, mine)
    grouped_mlp, overlapped = layer[2:5], Overlapped(*layer)

    def by_hand(experts: Any) -> Call:
        return lambda: exchanged_layer(x, router, experts, topk=shape.topk, num_experts=shape.num_experts)

    calls: dict[str, Call] = {
        OURS: lambda: layer(x),
        OVERLAPPED: lambda: overlapped(x),
        HAND: by_hand(experts_of(grouped_mlp)),
        TORCH: by_hand(torch_experts(*mine)),
    }
    summed = {
        way: _sharded(shape, router, mine, {"partial_sums": name})
        for way, name in PARTIAL_SUMS.items()
        if name in partial_sums
    }
    if capacity is not None:
        symmetric = _sharded(shape, router, mine, {"transport": SYMMETRIC}, capacity)
        calls[SYMMETRIC] = lambda: symmetric(x)
    calls |= {way: lambda layer=layer: layer(x) for way, layer in summed.items()}
    recipe_of = dict.fromkeys((ONE, *calls), BASELINE)
    alone: dict[str, Call] = {ONE: case.ours()}
    for recipe in recipes:
        alone[f"{ONE}, {recipe}"] = _under(recipe, case.ours())
        calls |= {f"{way}, {recipe}": _under(recipe, calls[way]) for way in (OURS, OVERLAPPED)}
        recipe_of |= {f"{way}, {recipe}": recipe for way in (ONE, OURS, OVERLAPPED)}
    sqnr = _checked(case, calls, recipe_of, (x, router, *mine), own)

    meeting = torch.zeros(1, device=device)
    timed = {"rounds": rounds, "warmup": WARMUP, "device": device, "meet": lambda: dist.all_reduce(meeting)}
    found = []
    for passes in PASSES:
        steps: dict[str, Callable[[], object]] = {way: case.step(call, passes) for way, call in alone.items()}
        steps |= {way: make_step(call, (x, router, *mine), case.dy, passes) for way, call in calls.items()}
        steps = {way: steps[way] for way in recipe_of}
        apart = [way for way in calls if way not in (TORCH, SYMMETRIC)]  # transfers that are operations of their own
        transfers = {way: Transfers.of(steps[way]) for way in apart}
        exchanges = {f"transfers of {way}": exchanges for way, exchanges in transfers.items()}
        times = _of_slowest(time_interleaved(steps | exchanges, clock="device", **timed))
        host = _of_slowest(time_interleaved(steps, clock="host", **timed)) if device == "cuda" else {}
        for way in steps:
            exchanged = None if way in alone or way == SYMMETRIC else HAND if way == TORCH else way
            recipe = recipe_of[way]
            found.append(
                Measured(
                    model, dist.get_world_size(), x.shape[0], passes, way, recipe, case.flop_of(passes), times[way],
                    host.get(way), times[f"transfers of {exchanged}"] if exchanged else None,
                    transfers[exchanged].bytes_sent if exchanged else None, sqnr.get(way, {}),
                    times[ONE if recipe == BASELINE else f"{ONE}, {recipe}"].median / times[way].median,
                )
            )  # fmt: skip
    return found


def _under(recipe: str, call: Call) -> Call:
    value = recipe_named(recipe)

    def run() -> Tensor:
        with autocast(recipe=value):
            return call()

    return run


def _case_of_rank(shape: ExpertShape, device: str, tokens: int | None) -> LayerCase:
    """The layer with all experts, alike on all ranks, on this rank's tokens."""
    case = whole_layer(shape, device=device, tokens=tokens)
    torch.manual_seed(1 + dist.get_rank())
    with torch.no_grad():
        case.inputs["x"][:, 1:].normal_()  # the first feature is 1
        case.dy.normal_()
    return case


def _own_experts(num_experts: int) -> slice:
    own = num_experts // dist.get_world_size()
    return slice(dist.get_rank() * own, (dist.get_rank() + 1) * own)


def _sharded(
    shape: ExpertShape,
    router: Tensor,
    weights: list[nn.Parameter],
    sent: Mapping[str, Any] = MappingProxyType({}),
    capacity: int | None = None,
) -> Sequential:
    """The layer over all ranks, on these parameters. sent: how, for `Dispatch` and `Combine`."""
    own = weights[0].shape[0]
    over_ranks: dict[str, Any] = {"group": dist.group.WORLD, **sent}
    options: dict[str, Any] = {"device": "meta", "dtype": router.dtype}
    layer = Sequential(
        ops.Router(shape.hidden, shape.num_experts, shape.topk, use_pre_softmax=False, **options),
        ops.Dispatch(shape.num_experts, capacity=capacity, **over_ranks),
        ops.GroupedLinear(own, shape.hidden, 2 * shape.intermediate, bias=False, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(own, shape.intermediate, shape.hidden, bias=False, **options),
        ops.Combine(**over_ranks),
    )
    layer[0].weight, layer[2].weight, layer[4].weight = router, *weights
    return layer


def _checked(
    case: LayerCase, calls: dict[str, Call], recipe_of: Mapping[str, str], wanted: tuple[Tensor, ...], own: slice
) -> dict[str, dict[str, float]]:
    """SQNR in dB of y and of the gradients, by candidate, against the layer with all experts."""
    exact = case.step(case.ours(), PASSES[-1])()
    for dw in exact[3:]:
        dist.all_reduce(dw)  # experts have the tokens of all ranks
    exact[3:] = [dw[own] for dw in exact[3:]]
    found = {}
    for way, call in calls.items():
        results = make_step(call, wanted, case.dy, PASSES[-1])()
        found[way] = {name: _sqnr_db(got, want) for name, got, want in zip(case.names, results, exact, strict=True)}
        require_sqnr(way, found[way], sqnr_floor(recipe_of[way]), against=ONE)
    return found


def _sqnr_db(got: Tensor, want: Tensor) -> float:
    """By pieces, since float64 takes four times the memory of all experts."""
    sqnr = Sqnr()
    for pieces in zip(got.flatten().split(_PIECE), want.flatten().split(_PIECE), strict=True):
        sqnr.add(*pieces)
    return sqnr.db


def _of_slowest(times: dict[str, Timing]) -> dict[str, Timing]:
    """For each candidate the figures of the rank with the largest median."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, times)
    return {way: max((of_rank[way] for of_rank in of_ranks), key=lambda timing: timing.median) for way in times}


def show(found: list[Measured]) -> None:
    rows = []
    for (model, passes), ways in itertools.groupby(found, lambda one: (one.model, one.passes)):
        for index, one in enumerate(ways):
            share, sent = one.share_in_transfer, one.bytes_sent
            rate = None if one.transfers is None or sent is None else sent / one.transfers.median / 1e9
            rows.append(
                [
                    "" if index else f"{model}, {one.tokens} tokens a rank, {passes}",
                    one.way,
                    f"{one.times.median * 1e3:.3f}",
                    f"{one.times.low * 1e3:.3f} - {one.times.high * 1e3:.3f}",
                    f"{one.tokens_per_s:,.0f}",
                    f"{one.tflop_per_s:.3g}",
                    f"{one.of_one_rank:.3f}",
                    "-" if share is None else f"{share:.3f}",
                    "-" if sent is None else f"{sent / 1e6:.4g}",
                    "-" if rate is None else f"{rate:.3g}",
                    "-" if one.host is None else f"{one.host.median * 1e3:.3f}",
                ]
            )
    headers = [
        "", "way", "median ms", "quartiles", "tokens/s a rank", "TFLOP/s a rank", "of one rank", "in transfer",
        "MB sent", "GB/s sent", "host ms",
    ]  # fmt: skip
    print_table(f"Complete layer on {found[0].ranks} ranks", headers, rows)


def figures(found: list[Measured]) -> list[dict[str, Any]]:
    """The content of the JSON file."""
    return [
        asdict(one)
        | {name: None if timing is None else timing._asdict() for name, timing in _timings(one).items()}
        | {"tokens_per_s": one.tokens_per_s, "tflop_per_s": one.tflop_per_s}
        | {"share_in_transfer": one.share_in_transfer}
        | {"sqnr": {name: db if math.isfinite(db) else "the same bits" for name, db in one.sqnr.items()}}
        for one in found
    ]


def _timings(one: Measured) -> dict[str, Timing | None]:
    return {"times": one.times, "host": one.host, "transfers": one.transfers}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="processes, on a GPU each (default: as many as GPUs, on a CPU 2)")
    parser.add_argument("--models", help=f"by commas (default: {DEFAULTS['cuda']}; on a CPU {DEFAULTS['cpu']})")
    parser.add_argument("--tokens", type=int, help="of a rank (default: the model's)")
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 20, on a CPU 5)")
    parser.add_argument("--partial-sums", help=f"by commas: {', '.join(PARTIAL_SUMS.values())} (default: none)")
    parser.add_argument("--recipes", help=f"by commas, besides {BASELINE} (default: none)")
    parser.add_argument("--capacity", type=int, help='rows a rank can receive; measures "symmetric" too, on GPUs')
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one)")
    add_json_argument(parser, "parallel")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench parallel`."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    ranks = arguments.ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    rounds = arguments.rounds or ROUNDS[device]
    models = (arguments.models or DEFAULTS[device]).split(",")
    partial_sums = arguments.partial_sums.split(",") if arguments.partial_sums else []
    recipes = arguments.recipes.split(",") if arguments.recipes else []
    _check(ranks, rounds, models, arguments.tokens, partial_sums, recipes)
    if arguments.capacity is not None and (device == "cpu" or arguments.capacity < 1):
        raise UsageError(f"--capacity {arguments.capacity} is for GPUs, and at least 1. Leave it out on a CPU.")
    require_gpus(ranks, device)
    if not is_rank():
        return launch(main, arguments, ranks, "Mend what it says above, and run it again.")
    if device == "cpu":
        torch.set_num_threads(1)
    with joined(device, dp=1, ep=ranks):
        found = []
        for model in models:
            found += measure(model, device, arguments.tokens, rounds, partial_sums, recipes, arguments.capacity)
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
        if dist.get_rank() == 0:
            if device == "cpu":
                print("no GPU is used: small layers on the CPU, whose figures say nothing about a GPU's")
            show(found)
            if arguments.json:
                record = {"gpu": gpu_state() if device == "cuda" else {}, "backend": dist.get_backend()}
                record |= {"ranks": ranks, "rounds": rounds, "warmup": WARMUP, "measured": figures(found)}
                print(f"written: {write_results(arguments.json, 'parallel', device, record)}", flush=True)
    return 0


def _check(
    ranks: int, rounds: int, models: list[str], tokens: int | None, partial_sums: list[str], recipes: list[str]
) -> None:
    for name, value, least in (
        ("ranks", ranks, 2),
        ("rounds", rounds, 1),
        ("tokens", 1 if tokens is None else tokens, 1),
    ):
        if value < least:
            raise UsageError(f"--{name} is {value}, but must be at least {least}.")
    for name in partial_sums:
        if name not in PARTIAL_SUMS.values():
            raise UsageError(f"--partial-sums {name} is unknown. Take {', '.join(PARTIAL_SUMS.values())}, or both.")
    known = [name for name in known_recipes() if name != BASELINE]
    for name in recipes:
        if name not in known:
            raise UsageError(f"--recipes {name} is unknown. Take {', '.join(known)}, or several by commas.")
    for model in models:
        if model not in MODELS:
            raise UsageError(f"--models {model} is unknown. Take {', '.join(MODELS)}, or several by commas.")
        if MODELS[model].num_experts % ranks:
            raise UsageError(f"--ranks is {ranks}, but must divide the {MODELS[model].num_experts} experts of {model}.")
