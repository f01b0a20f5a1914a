"""The speed of the bf16 path: the comparisons of issue 5 in one call, the most important ones first.

    mlp    the fused grouped MLP against `F.grouped_mm` with eager and with compiled SwiGLU, and against the limit: the
           same six matrix products as cuBLAS batched GEMMs with equal groups (`bench.limit`)
    host   host launch overhead of forward + backward
    layer  the complete layer, router to combine, against torch's own operations and against installed peers
    skew   the fused grouped MLP under skewed and random routing against uniform routing of the same rows
    wgrad  adding weight gradients to an fp32 main_grad against writing new bf16 ones: the products, and whole steps
    start  the first step with an empty and with a filled Triton cache

Everything is checked against fp32 (fp32 against float64) before it is timed, and not timed if it is wrong. The
candidates of a comparison share tensors and run interleaved; medians and quartiles; on a GPU by CUDA events, with the
L2 cache overwritten before each turn. Useful FLOP: 6 R H F forward, 18 R H F forward + backward, for R rows, H hidden,
F expert width.
"""

import argparse
import gc
import itertools
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.case import PASSES, Call
from bench.environment import gpu_state
from bench.grouped_case import GroupedCase, expert_mlp
from bench.limit import limit_products, of_pass, products_sqnr, run_products
from bench.models import SHAPES, ExpertShape, Shapes
from bench.peers import PEER_FLOOR, PEERS, Peer, why_no_peer
from bench.plots import why_no_plots
from bench.results import add_json_argument, write_results
from bench.routing import ROUTINGS, split_sizes
from bench.schedule import BASELINE
from bench.speed_report import (
    COMPILED,
    LIMIT,
    OURS,
    SPEED_MODELS,
    TORCH,
    Measured,
    draw_share_of_limit,
    figures,
    reached_targets,
    show,
    show_targets,
)
from bench.sqnr import HIGH_PRECISION_FLOOR, require_sqnr
from bench.start import measure_starts
from bench.timing import Timing, time_interleaved
from bench.usage import UsageError, require_device, require_positive
from bench.wgrad import ways as wgrad_ways
from bench.wgrad import wgrads, wgrads_sqnr, whole_steps, whole_steps_sqnr
from bench.whole_layer import LayerCase, whole_layer

Run = Callable[[], object]

MODELS = Shapes({"cpu": ExpertShape(512, 512, 8, 2, tokens=1024), **SHAPES})
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# The SQNR in dB that "y" must reach; fp32 measures 130 and more.
FLOORS = {"bf16": HIGH_PRECISION_FLOOR, "fp32": 100.0}
DEFAULTS: dict[str, dict[str, Any]] = {
    "cuda": {"models": ",".join(SPEED_MODELS), "tokens": "model,8192,32768", "dtype": "bf16", "rounds": 30},
    "cpu": {"models": "cpu", "tokens": "model", "dtype": "bf16,fp32", "rounds": 5},
}
# Parts that are not measured on a CPU.
GPU_PARTS = {"host": "a CPU does the work itself", "start": "a CPU compiles nothing"}
WARMUP = 3
# Consecutive calls in the part "host": few, so that none waits because the device's queue is full.
HOST_CALLS = 4
# The candidates of part "layer" beside ours.
AGAINST = (TORCH, COMPILED, *PEERS)
# Parts other than "mlp" use the models' default tokens; "start" uses this model.
START_MODEL = "qwen3-30b-a3b"


class Setup:
    """Settings shared by all comparisons, with messages on what was left out and what failed."""

    def __init__(
        self, device: str, rounds: int, routings: list[str], limit: float | None, against: Sequence[str] = AGAINST
    ) -> None:
        self.device = device
        self.rounds = rounds
        self.routings = routings
        self.against = against  # the other candidates of part "layer"
        self.compiles = device == "cuda"  # torch.compile has no grouped products worth timing on a CPU
        self.left_out: list[str] = []
        self.failed: list[str] = []
        self.peers: dict[str, Callable[[LayerCase], Peer]] = {}
        self._end = None if limit is None else time.monotonic() + limit

    @property
    def seconds_left(self) -> float | None:
        """The remaining time; None without a time limit."""
        return None if self._end is None else self._end - time.monotonic()

    def leave_out(self, sentence: str) -> None:
        if sentence not in self.left_out:
            self.left_out.append(sentence)

    def find_peers(self) -> None:
        """Find the installed peers that were asked for; those that are not installed are listed as left out."""
        for name in (name for name in PEERS if name in self.against):
            _, make = PEERS[name]
            if missing := why_no_peer(name):
                self.leave_out(f"{name}: {missing}")
            else:
                self.peers[name] = make
        self.leave_out("torchao: no adapter, because its grouped products for training are prototypes.")

    def measured(
        self, part: str, model: str, tokens: int, steps: Mapping[str, Run] | None = None,
        sqnr: dict[str, dict[str, float]] | None = None, *, times: dict[str, Timing] | None = None,
        dtype: str = "bf16", routing: str = "random", passes: str = PASSES[-1], flop: int = 0, clock: str = "device",
        calls: int = 1,
    ) -> Measured:  # fmt: skip
        """Time the steps interleaved, and return the comparison. times: given times instead of steps to time."""
        if times is None:
            times = time_interleaved(
                steps or {}, rounds=self.rounds, warmup=WARMUP, calls=calls, device=self.device, clock=clock
            )
        shape = MODELS[model]
        return Measured(
            part, model, dtype, tokens, tokens * shape.topk, shape.num_experts, routing, passes, flop, times,
            sqnr or {}, gpu_state() if self.device == "cuda" else {},
        )  # fmt: skip


def measure_mlp(model: str, tokens: int, dtype: str, setup: Setup) -> Iterator[Measured]:
    """One comparison for each routing and each pass."""
    every = expert_mlp(MODELS[model], device=setup.device, tokens=tokens, dtype=DTYPES[dtype])
    products = limit_products(every)
    limit_sqnr = products_sqnr(products)
    require_sqnr(LIMIT, limit_sqnr, FLOORS[dtype])
    for routing in setup.routings:
        case = replace(every, sizes=split_sizes(len(every.sizes), every.rows, routing))
        ways = {OURS: case.ours(BASELINE), TORCH: case.torchs()}
        if setup.compiles:
            ways[COMPILED] = case.torchs(compiled=True)
        sqnr = checked_ways(case, ways, dtype)
        for passes in PASSES:
            steps: dict[str, Run] = {way: case.step(call, passes) for way, call in ways.items()}
            steps[LIMIT] = partial(run_products, of_pass(products, passes))
            yield setup.measured(
                "mlp", model, tokens, steps, sqnr | {LIMIT: limit_sqnr},
                dtype=dtype, routing=routing, passes=passes, flop=case.flop_of(passes),
            )  # fmt: skip


def measure_host(model: str, tokens: int, dtype: str, setup: Setup) -> Iterator[Measured]:
    case = expert_mlp(MODELS[model], device=setup.device, tokens=tokens)
    ways = {OURS: case.ours(BASELINE), TORCH: case.torchs(), COMPILED: case.torchs(compiled=True)}
    steps = {way: case.step(call, PASSES[-1]) for way, call in ways.items()}
    sqnr = checked_ways(case, ways, dtype)
    yield setup.measured("host", model, tokens, steps, sqnr, clock="host", calls=HOST_CALLS)


def measure_layer(model: str, tokens: int, dtype: str, setup: Setup) -> Iterator[Measured]:
    """One comparison for each routing and each pass, with the peers that are installed, correct and run."""
    for routing in setup.routings:
        yield from _measure_layer(model, tokens, dtype, routing, setup)


def _measure_layer(model: str, tokens: int, dtype: str, routing: str, setup: Setup) -> Iterator[Measured]:
    """First without peers, and again with each of them: one that hangs or crashes costs no figure of ours."""
    case = whole_layer(MODELS[model], device=setup.device, tokens=tokens, routing=routing)
    calls = {OURS: case.ours()}
    if TORCH in setup.against:
        calls[TORCH] = case.torchs()
    if COMPILED in setup.against and setup.compiles:
        calls[COMPILED] = case.torchs(compiled=True)
    sqnr = checked_ways(case, calls, dtype)
    peers: dict[str, Peer] = {}

    def measured(passes: str) -> Measured:
        steps = {way: case.step(call, passes) for way, call in calls.items()}
        steps |= {name: peer.step(case, passes) for name, peer in peers.items()}
        return setup.measured(
            "layer", model, tokens, steps, dict(sqnr), routing=routing, passes=passes, flop=case.flop_of(passes)
        )

    yield from map(measured, PASSES)
    for name, make in setup.peers.items():
        try:
            peer = make(case)
            for passes in PASSES:
                sqnr[name] = peer.sqnr(case, peer.step(case, passes)())
                require_sqnr(name, sqnr[name], PEER_FLOOR)
            peers[name] = peer
            again = [measured(passes) for passes in PASSES]
        except Exception as error:  # a failing peer must not stop the other measurements
            sqnr.pop(name, None)
            peers.pop(name, None)
            setup.leave_out(f"{name} on {model}: {type(error).__name__}: {error}")
        else:
            yield from again


def measure_skew(model: str, tokens: int, dtype: str, setup: Setup) -> Iterator[Measured]:
    """Our MLP only, with one candidate for each routing."""
    every = expert_mlp(MODELS[model], device=setup.device, tokens=tokens)
    steps, sqnr = {}, {}
    for routing in ROUTINGS:
        case = replace(every, sizes=split_sizes(len(every.sizes), every.rows, routing))
        steps[routing] = case.step(case.ours(BASELINE), PASSES[-1])
        sqnr[routing] = checked(routing, case.sqnr(steps[routing]()), dtype)
    yield setup.measured("skew", model, tokens, steps, sqnr, routing="by way", flop=every.flop_of(PASSES[-1]))


def measure_wgrad(model: str, tokens: int, dtype: str, setup: Setup) -> Iterator[Measured]:
    case = expert_mlp(MODELS[model], device=setup.device, tokens=tokens)
    products = wgrads(case)
    sqnr = {way: checked(way, found, dtype) for way, found in wgrads_sqnr(products).items()}
    # As many FLOP as forward.
    yield setup.measured("wgrad", model, tokens, wgrad_ways(products), sqnr, passes="wgrad", flop=case.flop)
    del products
    steps = whole_steps(case)
    sqnr = {way: checked(way, found, dtype) for way, found in whole_steps_sqnr(case, steps).items()}
    yield setup.measured("wgrad", model, tokens, steps, sqnr, flop=case.flop_of(PASSES[-1]))


def measure_start(model: str, tokens: int, dtype: str, setup: Setup) -> Iterator[Measured]:
    times = {way: Timing(*[seconds] * 3) for way, seconds in measure_starts(model, timeout=setup.seconds_left).items()}
    yield setup.measured("start", model, tokens, times=times)


# In order of importance. A part measures one model at one number of tokens.
PARTS: dict[str, Callable[[str, int, str, Setup], Iterator[Measured]]] = {
    "mlp": measure_mlp,
    "host": measure_host,
    "layer": measure_layer,
    "skew": measure_skew,
    "wgrad": measure_wgrad,
    "start": measure_start,
}
TITLES = {
    "mlp": "grouped MLP",
    "host": "host time of the grouped MLP",
    "layer": "whole layer",
    "skew": "grouped MLP by routing",
    "wgrad": "weight gradients",
    "start": "first step: kernels compiled, or read from disk",
}


def checked_ways(case: GroupedCase | LayerCase, ways: Mapping[str, Call], dtype: str) -> dict[str, dict[str, float]]:
    """SQNR in dB by candidate and tensor, for forward + backward. Forward without grad mode is checked too."""
    sqnr = {}
    for way, call in ways.items():
        for passes in PASSES:
            sqnr[way] = checked(way, case.sqnr(case.step(call, passes)()), dtype)
    return sqnr


def checked(way: str, sqnr: dict[str, float], dtype: str) -> dict[str, float]:
    """Return `sqnr` if it is high enough. Raises AssertionError with the name of a tensor that is wrong."""
    require_sqnr(way, sqnr, FLOORS[dtype])
    return sqnr


class Job(NamedTuple):
    """One part on one model. Jobs of lower urgency run later."""

    part: str
    model: str
    tokens: int
    dtype: str
    urgency: int


def jobs(parts: list[str], models: list[str], tokens: list[str], dtypes: list[str]) -> list[Job]:
    """First all parts with the models' default tokens, then "mlp" with other numbers of tokens.

    Raises UsageError for tokens of "mlp" whose rows the experts cannot take equally, as its limit does.
    """
    found = []
    for part in parts:
        if part == "start":
            found.append(Job(part, START_MODEL, MODELS[START_MODEL].tokens, "bf16", 0))
            continue
        for model, dtype in itertools.product(models, dtypes if part == "mlp" else ["bf16"]):
            own = MODELS[model].tokens
            numbers = [own if number == "model" else int(number) for number in tokens] if part == "mlp" else [own]
            for number in dict.fromkeys(numbers):
                rows, experts = number * MODELS[model].topk, MODELS[model].num_experts
                if part == "mlp" and rows % experts:
                    raise UsageError(
                        f"--tokens {number}: {rows} rows of {model} cannot be divided equally among {experts} experts, "
                        "as those of the limit are. Take another number of tokens."
                    )
                found.append(Job(part, model, number, dtype, number != own))
    return sorted(found, key=lambda job: job.urgency)


def run_jobs(todo: list[Job], setup: Setup, keep: Callable[[list[Measured]], None]) -> list[Measured]:
    """Measure one job after the other while time remains; `keep` is called with all results after each comparison.

    A comparison that is measured again, with more candidates, replaces the earlier one. A job that fails or is wrong is
    reported in `setup.failed`, and the next job runs.
    """
    found: list[Measured] = []
    for index, job in enumerate(todo):
        if setup.seconds_left is not None and setup.seconds_left <= 0:
            setup.leave_out(
                f"no time was left for {len(todo) - index} of {len(todo)} comparisons: {_names(todo[index:])}"
            )
            break
        if setup.device == "cuda":
            _clear_gpu()
        start = len(found)
        try:
            for one in PARTS[job.part](job.model, job.tokens, job.dtype, setup):
                found[start:] = [other for other in found[start:] if other.case != one.case] + [one]
                print(f"measured: {one.summary}", flush=True)
                keep(found)
        except subprocess.TimeoutExpired:
            setup.leave_out(f"no time was left to end {_names([job])}")
        except (AssertionError, RuntimeError) as error:
            setup.failed.append(f"{_names([job])}: {error}")
            print(f"FAILED {setup.failed[-1]}", flush=True)
        if found[start:]:
            show(TITLES[job.part], found[start:])
        keep(found)
    return found


def _clear_gpu() -> None:
    """Reset torch.compile, whose earlier compilations count against its limit, and free memory for other processes."""
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()


def _names(todo: list[Job]) -> str:
    return "; ".join(f"{job.part} of {job.model}, {job.tokens} tokens, {job.dtype}" for job in todo)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--parts", default=",".join(PARTS), help="by commas (default: %(default)s)")
    parser.add_argument("--models", help=f"by commas (default: {DEFAULTS['cuda']['models']}; on a CPU a small one)")
    parser.add_argument(
        "--tokens", help=f"of part mlp, by commas; `model` is the model's own (default: {DEFAULTS['cuda']['tokens']})"
    )
    parser.add_argument("--routings", default="random,skewed", help="of parts mlp and layer (default: %(default)s)")
    parser.add_argument(
        "--against", default=",".join(AGAINST), help="of part layer, by commas: the others (default: %(default)s)"
    )
    parser.add_argument("--dtype", help="of part mlp: bf16, fp32, or both by a comma (default: bf16, on a CPU both)")
    parser.add_argument("--rounds", type=int, help="timed rounds (default: 30, on a CPU 5)")
    parser.add_argument("--limit", type=float, metavar="SECONDS", help="start no further comparison after this time")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="(default: cuda where there is one)")
    add_json_argument(parser, "speed")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the shares of the limit over rows an expert")


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench speed`."""
    device = arguments.device or ("cuda" if torch.cuda.is_available() else "cpu")
    require_device(device)
    chosen = {name: _listed(arguments, name, device) for name in OPTIONS}
    require_positive(arguments, "rounds")
    rounds = arguments.rounds or DEFAULTS[device]["rounds"]
    if arguments.plot and (missing := why_no_plots()):
        raise UsageError(f"--plot: {missing}")
    if device == "cpu":
        print("no GPU is used: a small comparison on the CPU, whose figures say nothing about a GPU's")

    setup = Setup(device, rounds, chosen["routings"], arguments.limit, chosen["against"])
    if device == "cuda" and "layer" in chosen["parts"]:
        setup.find_peers()
    parts = [part for part in PARTS if part in chosen["parts"]]
    if device == "cpu":
        for part in (part for part in parts if part in GPU_PARTS):
            setup.leave_out(f"{part}: {GPU_PARTS[part]}")
        parts = [part for part in parts if part not in GPU_PARTS]
    written: list[Path] = []

    def keep(found: list[Measured]) -> None:
        if arguments.json:
            record = {
                "gpu": gpu_state() if device == "cuda" else {},
                "rounds": rounds,
                "warmup": WARMUP,
                "targets": reached_targets(found) if device == "cuda" else [],
                "measured": figures(found),
                "failed": setup.failed,
                "left_out": setup.left_out,
            }
            written[:] = [write_results(arguments.json, "speed", device, record)]

    found = run_jobs(jobs(parts, chosen["models"], chosen["tokens"], chosen["dtype"]), setup, keep)
    keep(found)
    if device == "cuda":
        show_targets(found)
    for title, sentences in (("left out", setup.left_out), ("FAILED", setup.failed)):
        for sentence in sentences:
            print(f"{title}: {sentence}")
    if arguments.plot:
        written.append(draw_share_of_limit(arguments.plot, found))
    if written:
        print(f"written: {', '.join(map(str, written))}")
    return 1 if setup.failed else 0


OPTIONS = ("parts", "models", "tokens", "dtype", "routings", "against")
KNOWN = {"against": AGAINST, "parts": PARTS, "models": MODELS, "dtype": DTYPES, "routings": ROUTINGS}


def _listed(arguments: argparse.Namespace, name: str, device: str) -> list[str]:
    """The values of an option. Raises UsageError for an unknown one."""
    text = getattr(arguments, name) or DEFAULTS[device][name]
    values = list(dict.fromkeys(text.split(",")))
    for value in values:
        if name == "tokens" and value != "model" and not (value.isdecimal() and int(value)):
            raise UsageError(f"--tokens {value} is no number of tokens. Take `model`, or numbers above 0, by commas.")
        if name in KNOWN and value not in KNOWN[name]:
            choices = MODELS.choices if name == "models" else ", ".join(KNOWN[name])
            raise UsageError(f"--{name} {value} is unknown. Take {choices}, or several by commas.")
    return values
