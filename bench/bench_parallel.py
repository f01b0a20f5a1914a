"""Expert parallelism: the complete layer on several ranks, against one rank that holds all experts.

    one rank      our layer with all experts, without ranks: what the others lose against is transfer
    ours          Router -> Dispatch(group) -> GroupedLinear -> ScaledSwiGLU -> GroupedLinear -> Combine(group)
    overlapped    the same in `fuser.distributed.Overlapped`: transfers of one microbatch behind the other's products
    hand-written  `all_to_all_single`, a row a (token, slot) pair, around our grouped MLP (`bench.exchange`)
    torch         the same around `F.grouped_mm` and eager SwiGLU
    partial sums  "ours" with each of --partial-sums: the experts' ranks sum a token's rows before they send them
    symmetric     on GPUs with peer access: "ours" by kernels that write into the memory of the other GPUs, with the
                  rows of --capacity, also with `overlap`; both also replayed from a CUDA graph ("captured"); and with
                  each of --partial-sums
    , <recipe>    "one rank", "ours", "overlapped" and "symmetric" under each of --recipes, which quantizes the weights
                  in each step
    transfers     the all_to_all_single calls of each of these but "torch", alone, one after the other

Every rank has its own tokens, in bf16, and the routing is random. All candidates of a model use the same weights, run
interleaved in one process a rank, and are checked against "one rank" in bf16 first: y and the gradients of x and of the
router, and those of the experts' weights against the sum over the ranks. Steps of "symmetric" are checked to make no
host synchronization, and the captured ones to have the bits of the eager ones for `captured.ROUTINGS` other routings.
"of one rank" compares with "one rank" under the same recipe. Times are a rank's medians, of the slowest rank. On GPUs
by CUDA events, the L2 cache overwritten and the ranks brought together before each turn; "host" is the time until all
work is issued, in which the layers over all_to_all_single wait for their row counts.

"in transfer" is the time of the transfers alone over that of the whole: what "overlapped" gains is its time against
that of "ours". For "symmetric" it is that of its transfer kernels within the step, by torch's profiler, and their rate
is compared with plain copies over the same link (`bench.link`, `bench.symmetric_transfers`). A line behind each model
has the targets of "symmetric", met or missed. FLOP: 6 T K H F forward, 18 T K H F forward + backward, for T tokens a
rank, K experts a token, H hidden, F expert width.
"""

import argparse
import gc
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.captured import ROUTINGS, capture, require_no_synchronization, require_same_bits
from bench.case import PASSES, TimedPass, make_step
from bench.environment import gpu_state
from bench.exchange import Transfers
from bench.link import LinkRates, link_figures, link_line, measure_link, why_no_link
from bench.models import SHAPES, ExpertShape
from bench.parallel_report import Measured, figures, show, target_figures
from bench.parallel_ways import ALLTOALL, CAPTURED, HAND, ONE, PARTIAL_SUMS, SYMMETRIC, TORCH, Way, make_ways
from bench.ranks import is_rank, joined, launch, of_slowest, require_gpus, say
from bench.results import add_json_argument, write_results
from bench.schedule import BASELINE, known_recipes
from bench.sqnr import Sqnr, require_sqnr, sqnr_floor
from bench.symmetric_transfers import bytes_over_link, measure_transfers, pushed_row_bytes
from bench.timing import time_interleaved
from bench.usage import UsageError, require_device, require_positive
from bench.whole_layer import LayerCase, route, whole_layer

DEFAULTS = {
    "cuda": "qwen3-30b-a3b,mixtral-8x7b,deepseek-v3",
    "cpu": "tiny-qwen3-30b-a3b,tiny-mixtral-8x7b",
}
ROUNDS = {"cuda": 20, "cpu": 5}
WARMUP = 3
CAPACITY = "1.0625x"
ROWS_MULTIPLE = 128  # of a capacity given as a factor
_PIECE = 2**26  # elements


def measure(
    model: str,
    device: str,
    tokens: int | None,
    rounds: int,
    partial_sums: Sequence[str] = (),
    recipes: Sequence[str] = (),
    capacity: str | None = None,
    rates: LinkRates | None = None,
) -> list[Measured]:
    """Both passes of one model, on all ranks. Raises AssertionError for a candidate that is wrong.

    partial_sums: with which of `Dispatch` it is measured besides; recipes: under which, besides bf16
    capacity: as for `rows_of_capacity`; "symmetric" is measured if it is given
    rates: of the link, to compare the transfer kernels of "symmetric" with. Without, these are not profiled
    """
    shape = SHAPES[model]
    case = _case_of_rank(shape, device, tokens)
    own = _own_experts(shape.num_experts)
    mine = [nn.Parameter(weight.detach()[own]) for weight in case.weights[1:]]
    rows = None if capacity is None else rows_of_capacity(capacity, case.dy.shape[0] * shape.topk)
    ways = make_ways(shape, case, mine, partial_sums, recipes, rows)
    wanted = (case.inputs["x"], case.weights[0], *mine)
    sqnr = _checked(case, ways, wanted, own)
    say(f"{model}: close to {ONE}: {'; '.join(sqnr)}")
    found = []
    for passes in PASSES:
        found += _time_pass(model, case, ways, wanted, passes, rounds, sqnr)
        _free_memory(device)
    if rates is not None and rows is not None:
        # Behind all times, because a profile may leave the host slower.
        for passes in PASSES:
            found = _with_transfers(found, case, ways, wanted, passes, rates)
            _free_memory(device)
    return found


def rows_of_capacity(text: str, balanced: int) -> int:
    """The rows that a rank can receive: a number, or a factor of those that it receives if experts are chosen evenly.

    The rows of a factor are rounded up to a multiple of `ROWS_MULTIPLE`. Raises UsageError for anything else.

        "5000", balanced 4096  ->  5000        "1.0625x", balanced 4096  ->  4352        "1.1x", 4096  ->  4608
    """
    try:
        if text.endswith("x"):
            rows = math.ceil(Fraction(text[:-1]) * balanced / ROWS_MULTIPLE) * ROWS_MULTIPLE
        else:
            rows = int(text)
    except (ValueError, ZeroDivisionError):
        rows = 0
    if rows < 1:
        raise UsageError(
            f"--capacity {text} is neither a number of rows nor a factor. Take one such as 69632, or one such as "
            f"{CAPACITY}, which means that many times tokens * experts a token."
        )
    return rows


def _steps(case: LayerCase, ways: Mapping[str, Way], wanted: tuple[Tensor, ...], passes: str) -> dict[str, TimedPass]:
    """By way. What is captured has run already."""
    steps = {}
    for name, way in ways.items():
        alone = way.transport is None
        step = case.step(way.call, passes) if alone else make_step(way.call, wanted, case.dy, passes)
        steps[name] = capture(step) if way.captured else step
    return steps


def _time_pass(
    model: str,
    case: LayerCase,
    ways: Mapping[str, Way],
    wanted: tuple[Tensor, ...],
    passes: str,
    rounds: int,
    sqnr: Mapping[str, dict[str, float]],
) -> list[Measured]:
    device, x = case.device, case.inputs["x"]
    on_gpu = device.type == "cuda"
    steps = _steps(case, ways, wanted, passes)
    over_symmetric = [name for name, way in ways.items() if way.transport == SYMMETRIC and not way.captured]
    if on_gpu and over_symmetric:
        for name in over_symmetric:
            require_no_synchronization(steps[name])
        say(f"{model}, {passes}: no host synchronization in a step of: {'; '.join(over_symmetric)}")
        names = case.names[:1] if passes == PASSES[0] else case.names
        for eager, replayed in CAPTURED.items():
            require_same_bits(steps[replayed], steps[eager], x, names)
        say(f"{model}, {passes}: replays with {ROUTINGS} other routings have the bits of the eager steps")

    meeting = torch.zeros(1, device=device)
    timed = {"rounds": rounds, "warmup": WARMUP, "device": device, "meet": lambda: dist.all_reduce(meeting)}
    # transfers that are operations of their own
    transfers = {
        name: Transfers.of(steps[name]) for name, way in ways.items() if way.transport == ALLTOALL and name != TORCH
    }
    exchanges = {f"transfers of {name}": exchanges for name, exchanges in transfers.items()}
    times = of_slowest(time_interleaved(steps | exchanges, clock="device", **timed))
    host = of_slowest(time_interleaved(steps, clock="host", **timed)) if on_gpu else {}
    say(f"{model}, {passes}, ms: {'; '.join(f'{name} {times[name].median * 1e3:.3f}' for name in ways)}")
    found = []
    for name, way in ways.items():
        exchanged = HAND if name == TORCH else name
        one = ONE if way.recipe == BASELINE else f"{ONE}, {way.recipe}"
        found.append(
            Measured(
                model, dist.get_world_size(), x.shape[0], passes, name, way.recipe, case.flop_of(passes), times[name],
                host.get(name), times.get(f"transfers of {exchanged}"),
                transfers[exchanged].bytes_sent if exchanged in transfers else None, None, sqnr.get(name, {}),
                times[one].median / times[name].median,
            )
        )  # fmt: skip
    return found


def _with_transfers(
    found: Sequence[Measured],
    case: LayerCase,
    ways: Mapping[str, Way],
    wanted: tuple[Tensor, ...],
    passes: str,
    rates: LinkRates,
) -> list[Measured]:
    """The same, with the transfer kernels of "symmetric" in this pass."""
    x, router = case.inputs["x"].detach(), case.weights[0].detach()
    _, indices = route(x, router, case.topk)
    over_symmetric = {name: way for name, way in ways.items() if way.transport == SYMMETRIC}
    steps = _steps(case, over_symmetric, wanted, passes)
    profiled = {}
    for name, way in over_symmetric.items():
        pushed = pushed_row_bytes(make_step(way.call, wanted, case.dy, passes))
        num_bytes = bytes_over_link(
            indices,
            dist.get_rank(),
            dist.get_world_size(),
            len(case.weights[1]),
            x[0],
            passes,
            pushed,
            way.partial_sums,
        )
        profiled[name] = measure_transfers(steps[name], num_bytes, rates), sum(num_bytes.values())
    say(f"{found[0].model}, {passes}: transfer kernels profiled")
    completed = []
    for one in found:
        if one.passes == passes and one.way in profiled:
            symmetric, sent = profiled[one.way]
            one = replace(one, transfers=symmetric.times, bytes_sent=sent, symmetric=symmetric)
        completed.append(one)
    return completed


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


def _checked(
    case: LayerCase, ways: Mapping[str, Way], wanted: tuple[Tensor, ...], own: slice
) -> dict[str, dict[str, float]]:
    """SQNR in dB of y and of the gradients, by candidate, against the layer with all experts."""
    exact = case.step(case.ours(), PASSES[-1])()
    for index in range(3, len(exact)):
        dist.all_reduce(exact[index])  # experts have the tokens of all ranks
        exact[index] = exact[index][own].clone()  # a view would hold those of all experts
    found = {}
    for name, way in ways.items():
        if way.transport is not None:
            results = make_step(way.call, wanted, case.dy, PASSES[-1])()
            found[name] = {what: _sqnr_db(*pair) for what, *pair in zip(case.names, results, exact, strict=True)}
            del results
            require_sqnr(name, found[name], sqnr_floor(way.recipe), against=ONE)
    return found


def _sqnr_db(got: Tensor, want: Tensor) -> float:
    """By pieces, since float64 takes four times the memory of all experts."""
    sqnr = Sqnr()
    for pieces in zip(got.flatten().split(_PIECE), want.flatten().split(_PIECE), strict=True):
        sqnr.add(*pieces)
    return sqnr.db


def _free_memory(device: str) -> None:
    """What is no longer referenced: graphs, and recorded transfers."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--ranks", type=int, help="processes, on a GPU each (default: as many as GPUs, on a CPU 2)")
    parser.add_argument("--models", help=f"by commas (default: {DEFAULTS['cuda']}; on a CPU {DEFAULTS['cpu']})")
    parser.add_argument("--tokens", type=int, help="of a rank (default: the model's)")
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 20, on a CPU 5)")
    parser.add_argument("--partial-sums", help=f"by commas: {', '.join(PARTIAL_SUMS.values())} (default: none)")
    parser.add_argument("--recipes", help=f"by commas, besides {BASELINE} (default: none)")
    parser.add_argument(
        "--capacity",
        metavar="ROWS",
        help='rows that a rank can receive over "symmetric", on GPUs, or a factor of the balanced rows '
        f"(default: {CAPACITY})",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one)")
    add_json_argument(parser, "parallel")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench parallel`."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    require_positive(arguments, "ranks", "rounds", "tokens")
    ranks = arguments.ranks or (torch.cuda.device_count() if device == "cuda" else 2)
    rounds = arguments.rounds or ROUNDS[device]
    models = (arguments.models or DEFAULTS[device]).split(",")
    partial_sums = arguments.partial_sums.split(",") if arguments.partial_sums else []
    recipes = arguments.recipes.split(",") if arguments.recipes else []
    _check(ranks, models, partial_sums, recipes)
    if arguments.capacity is not None:
        if device == "cpu":
            raise UsageError(f"--capacity {arguments.capacity} is for GPUs. Leave it out on a CPU.")
        rows_of_capacity(arguments.capacity, 1)
    require_gpus(ranks, device)
    if not is_rank():
        return launch(main, arguments, ranks, "Mend what it says above, and run it again.")
    if device == "cpu":
        torch.set_num_threads(1)
    with joined(device, dp=1, ep=ranks):
        if device == "cpu":
            say("no GPU is used: small layers on the CPU, whose figures say nothing about a GPU's")
        capacity, rates = _link(arguments.capacity, device, ranks)
        found: list[Measured] = []
        for model in models:
            of_model = measure(model, device, arguments.tokens, rounds, partial_sums, recipes, capacity, rates)
            found += of_model
            _free_memory(device)
            if dist.get_rank() == 0:
                show(of_model)
                if arguments.json:
                    record = {"gpu": gpu_state() if device == "cuda" else {}, "backend": dist.get_backend()}
                    record |= {"ranks": ranks, "rounds": rounds, "warmup": WARMUP, "link": link_figures(rates)}
                    record |= {"measured": figures(found), "targets": target_figures(found)}
                    say(f"written: {write_results(arguments.json, 'parallel', device, record)}")
    return 0


def _link(capacity: str | None, device: str, ranks: int) -> tuple[str | None, LinkRates | None]:
    """The capacity of "symmetric" and the rates of the link, where the ranks can have it."""
    if device == "cpu":
        return None, None
    reason = why_no_link(ranks)
    if reason:
        if capacity is not None:
            raise UsageError(f"--capacity {capacity} is for {SYMMETRIC}, but: {reason} Leave it out.")
        say(f"{SYMMETRIC} is left out: {reason}")
        return None, None
    rates = measure_link()
    say(link_line(rates, ranks))
    return capacity or CAPACITY, rates


def _check(ranks: int, models: list[str], partial_sums: list[str], recipes: list[str]) -> None:
    if ranks < 2:
        raise UsageError(f"--ranks is {ranks}, but must be at least 2.")
    for name in partial_sums:
        if name not in PARTIAL_SUMS.values():
            raise UsageError(f"--partial-sums {name} is unknown. Take {', '.join(PARTIAL_SUMS.values())}, or both.")
    known = [name for name in known_recipes() if name != BASELINE]
    for name in recipes:
        if name not in known:
            raise UsageError(f"--recipes {name} is unknown. Take {', '.join(known)}, or several by commas.")
    for model in models:
        if model not in SHAPES:
            raise UsageError(f"--models {model} is unknown. Take {SHAPES.choices}, or several by commas.")
        if SHAPES[model].num_experts % ranks:
            raise UsageError(f"--ranks is {ranks}, but must divide the {SHAPES[model].num_experts} experts of {model}.")
