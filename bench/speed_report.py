"""The results of `bench speed` as tables, JSON and a plot, compared with the targets."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from bench.case import PASSES
from bench.plots import COLOURS, bare, make_figure, save
from bench.table import print_table
from bench.timing import Timing
from bench.wgrad import GRADIENT, MAIN_GRAD

# From issue 5, and from the results on the H200.
SPEED_MODELS = ("qwen3-30b-a3b", "deepseek-v3-ep8", "gpt-oss-120b", "olmoe-1b-7b", "mixtral-8x7b")
OURS, TORCH, COMPILED, LIMIT = "ours", "torch", "torch compiled", "limit"


@dataclass(frozen=True)
class Measured:
    """One comparison: interleaved times of several candidates ("ways").

    part:    the part of the benchmark
    rows:    total over all experts
    routing: "by way" if the candidates differ in their routing
    flop:    useful FLOP of each candidate; 0 if no rate is reported
    times:   seconds by candidate
    sqnr:    dB of all results, by candidate and name, checked before the timing
    state:   clocks and power directly after the timing
    """

    part: str
    model: str
    dtype: str
    tokens: int
    rows: int
    num_experts: int
    routing: str
    passes: str
    flop: int
    times: dict[str, Timing]
    sqnr: dict[str, dict[str, float]] = field(default_factory=dict)
    state: dict[str, str] = field(default_factory=dict)

    @property
    def case(self) -> tuple[str, str, str, int, str, str]:
        """What is measured, whatever the candidates."""
        return self.part, self.model, self.dtype, self.tokens, self.routing, self.passes

    @property
    def summary(self) -> str:
        """One line: the case, and the median of each candidate."""
        times = ", ".join(f"{way} {timing.median * 1e3:.3f} ms" for way, timing in self.times.items())
        return f"{self.part}, {describe(self)}: {times}"

    @property
    def rows_per_expert(self) -> float:
        """The mean number of rows of an expert."""
        return self.rows / self.num_experts

    def tflop_per_s(self, way: str) -> float:
        return self.flop / self.times[way].median / 1e12

    def over(self, way: str, other: str) -> float:
        """The speed of a candidate divided by that of another one; above 1 it is faster."""
        return self.times[other].median / self.times[way].median

    @property
    def share_of_limit(self) -> dict[str, float]:
        """The share of the limit that each candidate reaches; empty if there is no limit."""
        return {way: self.over(way, LIMIT) for way in self.times if way != LIMIT} if LIMIT in self.times else {}


def describe(one: Measured) -> str:
    return f"{one.model}, {one.tokens} tokens, {one.dtype}, {one.routing}, {one.passes}"


def figures(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """The content of the JSON file."""
    return [
        asdict(one)
        | {
            "times": {way: timing._asdict() for way, timing in one.times.items()},
            "tflop_per_s": {way: one.tflop_per_s(way) for way in one.times} if one.flop else {},
            "share_of_limit": one.share_of_limit,
        }
        for one in found
    ]


def show(title: str, found: Sequence[Measured]) -> None:
    """Print a table with a row for each candidate; speeds are compared with the first one."""
    rows = []
    for one in found:
        first = next(iter(one.times))
        case = describe(one)
        for way, timing in one.times.items():
            ms = [f"{seconds * 1e3:.3f}" for seconds in timing]
            rate = f"{one.tflop_per_s(way):.3g}" if one.flop else "-"
            share = one.share_of_limit.get(way)
            rows.append(
                [
                    case if way == first else "",
                    f"{one.rows_per_expert:.0f}" if way == first else "",
                    way,
                    ms[0],
                    f"{ms[1]} - {ms[2]}",
                    rate,
                    "-" if share is None else f"{share:.3f}",
                    f"{one.over(first, way):.3f}",
                ]
            )
    headers = ["", "rows an expert", "way", "median ms", "quartiles", "TFLOP/s", "of limit", "time / first"]
    print_table(title, headers, rows)


class Target(NamedTuple):
    """A target for a figure.

    wanted: selects comparisons
    figure: computes the figure of one comparison; None where that has not measured it
    fold:   combines the figures of all; with `max` the target is an upper bound, otherwise a lower bound
    """

    name: str
    wanted: Callable[[Measured], bool]
    figure: Callable[[Measured], float | None]
    fold: Callable[[Iterable[float]], float]
    target: float
    stretch: float


def reached_targets(found: Sequence[Measured]) -> list[dict[str, Any]]:
    """The result for each target that was measured, and whether it was reached."""
    rows = []
    for target in TARGETS:
        figures = (target.figure(one) for one in found if target.wanted(one))
        if values := [figure for figure in figures if figure is not None]:
            value = target.fold(values)
            goals = {"target": target.target, "stretch": target.stretch}
            rows.append({"name": target.name, "found": value, **goals, "verdict": _verdict(target, value)})
    return rows


def show_targets(found: Sequence[Measured]) -> None:
    """Print targets and results."""
    if reached := reached_targets(found):
        rows = [
            [one["name"], f"{one['found']:.3f}", f"{one['target']:g}", f"{one['stretch']:g}", one["verdict"]]
            for one in reached
        ]
        print_table("targets", ["", "found", "target", "stretch", ""], rows)


def draw_share_of_limit(path: Path, found: Sequence[Measured]) -> Path:
    """Plot the share of the limit over rows per expert (bf16, random routing): a panel per pass, a colour per way."""
    path.parent.mkdir(parents=True, exist_ok=True)
    figure = make_figure(11, 4.5)
    for panel, (axes, passes) in enumerate(zip(figure.subplots(1, len(PASSES), sharey=True), PASSES, strict=True)):
        shown = [one for one in found if one.share_of_limit and one.passes == passes and one.routing == "random"]
        shown = [one for one in shown if one.dtype == "bf16"]
        for colour, way in zip(COLOURS, (OURS, COMPILED, TORCH), strict=False):
            with_way = [one for one in shown if way in one.times]
            if not with_way:
                continue
            rows = [one.rows_per_expert for one in with_way]
            shares = [one.share_of_limit[way] for one in with_way]
            axes.scatter(rows, shares, color=colour, label=way, s=24)
            if way == OURS:
                for one, x, y in zip(with_way, rows, shares, strict=True):
                    axes.annotate(one.model, (x, y), xytext=(3, 3), textcoords="offset points", fontsize=6)
        axes.axhline(1, color="grey", linewidth=0.8)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
        axes.set_title(f"{passes}: share of the limit")
        axes.set_xlabel("rows an expert")
        if shown and not panel:
            axes.legend(frameon=False, fontsize=8)
        bare(axes)
    save(figure, path)
    return path


def _verdict(target: Target, value: float) -> str:
    def reached(goal: float) -> bool:
        return value <= goal if target.fold is max else value >= goal

    return "stretch" if reached(target.stretch) else "reached" if reached(target.target) else "missed"


def _is(part: str, *models: str) -> Callable[[Measured], bool]:
    """Selects forward + backward in bf16 with random routing (if any), of these models, or of all if none is named."""

    def wanted(one: Measured) -> bool:
        ordinary = one.passes != PASSES[0] and one.dtype == "bf16" and one.routing in ("random", "by way")
        return ordinary and one.part == part and (not models or one.model in models)

    return wanted


def _has(part: str, least: float, most: float = math.inf) -> Callable[[Measured], bool]:
    """As `_is`, for all models with this many rows per expert."""
    of_part = _is(part)
    return lambda one: of_part(one) and least <= one.rows_per_expert <= most


def _adds(rows: int, most: float = math.inf) -> Callable[[Measured], bool]:
    """A whole step of part wgrad with that many rows per expert."""
    of_rows = _has("wgrad", rows, most)
    return lambda one: of_rows(one) and one.passes == PASSES[-1]


def _over_torch(one: Measured) -> float | None:
    """The speed divided by that of the faster torch candidate."""
    return min((one.over(OURS, way) for way in (TORCH, COMPILED) if way in one.times), default=None)


def _over_compiled(one: Measured) -> float | None:
    return one.over(OURS, COMPILED) if COMPILED in one.times else None


def _share(one: Measured) -> float | None:
    return one.share_of_limit.get(OURS)


def _rate(one: Measured) -> float:
    return one.tflop_per_s(OURS)


def _skewed(one: Measured) -> float:
    return one.over("skewed", "uniform")


def _host_us(one: Measured) -> float:
    return one.times[OURS].median * 1e6


def _cold(one: Measured) -> float:
    return one.times["cold"].median


def _warm(one: Measured) -> float:
    return one.times["warm"].median


def _main_grad(one: Measured) -> float:
    return one.over(GRADIENT, MAIN_GRAD)


QWEN, DEEPSEEK, GPT, OLMOE, MIXTRAL = SPEED_MODELS
_mean = statistics.geometric_mean

# fmt: off
TARGETS = (
    Target("MLP over compiled torch: the others", _is("mlp", QWEN, OLMOE, GPT), _over_compiled, _mean, 1.20, 1.28),
    Target("MLP over compiled torch: dsv3-ep8", _is("mlp", DEEPSEEK), _over_compiled, _mean, 1.05, 1.08),
    Target("MLP over compiled torch: mixtral", _is("mlp", MIXTRAL), _over_compiled, _mean, 1.18, 1.23),
    Target("MLP, share of the limit, from 2048 rows an expert on", _has("mlp", 2048), _share, min, 0.95, 0.97),
    Target("MLP, share of the limit, 1024 rows an expert", _has("mlp", 1024, 1024), _share, min, 0.90, 0.94),
    Target("MLP, share of the limit, 512 rows an expert", _has("mlp", 512, 512), _share, min, 0.84, 0.90),
    Target("layer over torch: qwen3, olmoe", _is("layer", QWEN, OLMOE), _over_torch, _mean, 1.5, 1.65),
    Target("layer over torch: gpt-oss", _is("layer", GPT), _over_torch, _mean, 1.2, 1.3),
    Target("layer over torch: dsv3-ep8", _is("layer", DEEPSEEK), _over_torch, _mean, 1.2, 1.28),
    # SonicMoE's rates on an H200, and stretch targets above them
    Target("layer, TFLOP/s: qwen3", _is("layer", QWEN), _rate, min, 448, 1.15 * 448),
    Target("layer, TFLOP/s: olmoe", _is("layer", OLMOE), _rate, min, 511, 1.10 * 511),
    Target("layer, TFLOP/s: gpt-oss", _is("layer", GPT), _rate, min, 434, 1.15 * 434),
    Target("layer, TFLOP/s: dsv3-ep8", _is("layer", DEEPSEEK), _rate, min, 563, 1.10 * 563),
    Target("rate under skewed over uniform routing", _is("skew"), _skewed, min, 0.95, 0.98),
    Target("step with main_grad over bf16, from 2048 rows on", _adds(2048), _main_grad, max, 1.05, 1.02),
    Target("step with main_grad over bf16, 512 rows", _adds(512, 512), _main_grad, max, 1.2, 1.15),
    Target("step with main_grad over bf16, 256 rows", _adds(256, 256), _main_grad, max, 1.7, 1.4),
    Target("host time of forward + backward, us", _is("host"), _host_us, max, 250, 150),
    Target("cold start, s", _is("start"), _cold, max, 60, 20),
    Target("warm start, s", _is("start"), _warm, max, 2, 0.5),
)
# fmt: on
