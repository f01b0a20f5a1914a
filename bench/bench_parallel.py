"""Expert parallelism: the complete layer on several ranks, against one rank that holds all experts.

    one rank      our layer with all experts, without ranks: what the others lose against is transfer
    ours          Router -> Dispatch(group) -> GroupedLinear -> ScaledSwiGLU -> GroupedLinear -> Combine(group)
    overlapped    the same in `fuser.distributed.Overlapped`: transfers of one microbatch behind the other's products
    hand-written  `all_to_all_single`, a row a (token, slot) pair, around our grouped MLP (`bench.exchange`)
    torch         the same around `F.grouped_mm` and eager SwiGLU
    partial sums  "ours" with each of --partial-sums: the experts' ranks sum a token's rows before they send them
    transfers     the all_to_all_single calls of each of these but "torch", alone, one after the other

Every rank has its own tokens, in bf16, and the routing is random. All candidates of a model use the same weights, run
interleaved in one process a rank, and are checked against "one rank" first: y and the gradients of x and of the router,
and those of the experts' weights against the sum over the ranks. Times are a rank's medians, of the slowest rank. On
GPUs by CUDA events, the L2 cache overwritten and the ranks brought together before each turn; "host" is the time until
all work is issued, in which the layers with ranks wait for their row counts. "in transfer" is the time of the transfers
alone over that of the whole: what "overlapped" gains is its time against that of "ours". FLOP: 6 T K H F forward, 18 T
K H F forward + backward, for T tokens a rank, K experts a token, H hidden, F expert width.
"""

import argparse
import gc
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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
from bench.sqnr import HIGH_PRECISION_FLOOR, Sqnr, require_sqnr
from bench.table import print_table
from bench.timing import Timing, time_interleaved
from bench.usage import UsageError, require_device
from bench.whole_layer import LayerCase, whole_layer
from fuser import Sequential, ops
from fuser.distributed import Overlapped
from ops.kernels.routing import transports

ONE, OURS, OVERLAPPED, HAND, TORCH = "one rank", "ours", "overlapped", "hand-written", "torch"
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
    sends to others. sqnr: dB against "one rank".
    """

    model: str
    ranks: int
    tokens: int
    passes: str
    way: str
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
    model: str, device: str, tokens: int | None, rounds: int, partial_sums: Sequence[str] = ()
) -> list[Measured]:
    """Both passes of one model, on all ranks. Raises AssertionError for a candidate that is wrong.

    partial_sums: with which of `Dispatch` it is measured besides
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
    summed = {way: _sharded(shape, router, mine, name) for way, name in PARTIAL_SUMS.items() if name in partial_sums}
    calls |= {way: lambda layer=layer: layer(x) for way, layer in summed.items()}
    sqnr = _checked(case, calls, (x, router, *mine), own)

    meeting = torch.zeros(1, device=device)
    timed = {"rounds": rounds, "warmup": WARMUP, "device": device, "meet": lambda: dist.all_reduce(meeting)}
    found = []
    for passes in PASSES:
        steps: dict[str, Callable[[], object]] = {ONE: case.step(case.ours(), passes)}
        steps |= {way: make_step(call, (x, router, *mine), case.dy, passes) for way, call in calls.items()}
        transfers = {way: Transfers.of(steps[way]) for way in (OURS, OVERLAPPED, HAND, *summed)}
        alone = {f"transfers of {way}": exchanges for way, exchanges in transfers.items()}
        times = _of_slowest(time_interleaved(steps | alone, clock="device", **timed))
        host = _of_slowest(time_interleaved(steps, clock="host", **timed)) if device == "cuda" else {}
        for way in steps:
            exchanged = None if way == ONE else HAND if way == TORCH else way
            found.append(
                Measured(
                    model, dist.get_world_size(), x.shape[0], passes, way, case.flop_of(passes), times[way],
                    host.get(way), times[f"transfers of {exchanged}"] if exchanged else None,
                    transfers[exchanged].bytes_sent if exchanged else None, sqnr.get(way, {}),
                    times[ONE].median / times[way].median,
                )
            )  # fmt: skip
    return found


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
    shape: ExpertShape, router: Tensor, weights: list[nn.Parameter], partial_sums: str | None = None
) -> Sequential:
    """The layer over all ranks, on these parameters."""
    own = weights[0].shape[0]
    over_ranks: dict[str, Any] = {"group": dist.group.WORLD, "partial_sums": partial_sums}
    options: dict[str, Any] = {"device": "meta", "dtype": router.dtype}
    layer = Sequential(
        ops.Router(shape.hidden, shape.num_experts, shape.topk, use_pre_softmax=False, **options),
        ops.Dispatch(shape.num_experts, **over_ranks),
        ops.GroupedLinear(own, shape.hidden, 2 * shape.intermediate, bias=False, **options),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(own, shape.intermediate, shape.hidden, bias=False, **options),
        ops.Combine(**over_ranks),
    )
    layer[0].weight, layer[2].weight, layer[4].weight = router, *weights
    return layer


def _checked(
    case: LayerCase, calls: dict[str, Call], wanted: tuple[Tensor, ...], own: slice
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
        require_sqnr(way, found[way], HIGH_PRECISION_FLOOR, against=ONE)
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
    _check(ranks, rounds, models, arguments.tokens, partial_sums)
    require_gpus(ranks, device)
    if not is_rank():
        return launch(main, arguments, ranks, "Mend what it says above, and run it again.")
    if device == "cpu":
        torch.set_num_threads(1)
    with joined(device, dp=1, ep=ranks):
        found = []
        for model in models:
            found += measure(model, device, arguments.tokens, rounds, partial_sums)
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


def _check(ranks: int, rounds: int, models: list[str], tokens: int | None, partial_sums: list[str]) -> None:
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
    for model in models:
        if model not in MODELS:
            raise UsageError(f"--models {model} is unknown. Take {', '.join(MODELS)}, or several by commas.")
        if MODELS[model].num_experts % ranks:
            raise UsageError(f"--ranks is {ranks}, but must divide the {MODELS[model].num_experts} experts of {model}.")
