"""The results of `bench recipes` as tables, JSON, CSV and plots."""

import csv
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from bench.case import PASSES
from bench.controls import CONTROLS
from bench.environment import environment
from bench.plots import COLOURS, bare, make_figure, save
from bench.schedule import BASELINE
from bench.table import print_table
from bench.timing import Timing

Counts = dict[str, dict[str, int]]
# The baselines, where they are in the same run.
COMPARED_WITH = (BASELINE, "torch")


@dataclass(frozen=True)
class Outcome:
    """The results of one way to run the model: under a recipe, or with torch's own operations.

    numbers:             "native", "emulated", or "torch"
    sqnr:                dB of the output ("y") and of each gradient, by name
    saved_bytes_per_row: bytes saved for backward, without parameters
    peak_bytes:          peak allocation of forward + backward; None if not measured
    kept_weight_bytes:   bytes of the weight copies that `constant_weights` keeps; None for torch
    parameter_bytes:     bytes of the parameters, with weights held quantized; None for torch
    same_bits_after:     the other recipe after which this one reproduced its first results; None if not tried
    counts:              counts of casts by "operation.role"; None if they cannot be counted
    times:               seconds by name of the pass
    """

    way: str
    numbers: str
    sqnr: dict[str, float]
    saved_bytes_per_row: float
    peak_bytes: int | None = None
    kept_weight_bytes: int | None = None
    parameter_bytes: int | None = None
    same_bits_after: str | None = None
    counts: Counts | None = None
    times: dict[str, Timing] = field(default_factory=dict)


def figures(outcomes: Sequence[Outcome], flop: Mapping[str, int]) -> list[dict[str, Any]]:
    """The JSON content: the fields of each outcome, with rates and ratios of its times."""
    by_way = {found.way: found for found in outcomes}
    return [
        asdict(found) | {"times": {passes: _rates(found, passes, by_way, flop) for passes in found.times}}
        for found in outcomes
    ]


def show_recipes(outcomes: Sequence[Outcome], flop: Mapping[str, int]) -> None:
    """Print the tables."""
    by_way = {found.way: found for found in outcomes}
    baselines = [other for other in COMPARED_WITH if other in by_way]
    for passes in outcomes[0].times:
        rows = []
        for found in (found for found in outcomes if passes in found.times):
            rates = _rates(found, passes, by_way, flop)
            ms = [f"{rates[f'{name}_s'] * 1e3:.3f}" for name in Timing._fields]
            ratios = [f"{rates[f'over_{other}']:.3f}" for other in baselines]
            rows.append([found.way, found.numbers, ms[0], f"{ms[1]} - {ms[2]}", *ratios, f"{rates['tflop_per_s']:.3f}"])
        print_table(
            f"{passes}: time of a step; below 1 is faster",
            ["", "numbers", "median ms", "quartiles", *(f"/ {other}" for other in baselines), "TFLOP/s"],
            rows,
        )
    print_table(
        "memory: kept for backward, allocated at most in forward + backward, of weights kept by constant_weights, and "
        "of parameters with weights held quantized",
        ["", "bytes a row", "peak MB", "weights MB", "held MB"],
        [
            [
                found.way,
                f"{found.saved_bytes_per_row:.0f}",
                _or("not measured", found.peak_bytes, 1e-6),
                _or("-", found.kept_weight_bytes, 1e-6),
                _or("-", found.parameter_bytes, 1e-6),
            ]
            for found in outcomes
        ],
    )
    print_table(
        "error: SQNR in dB against fp32",
        ["", *outcomes[0].sqnr, "same bits again after"],
        [[found.way, *(f"{db:.1f}" for db in found.sqnr.values()), found.same_bits_after or "-"] for found in outcomes],
    )
    counted = [(found.way, place, counts) for found in outcomes for place, counts in (found.counts or {}).items()]
    if counted:
        print_table(
            "casts of a forward + backward",
            ["", "cast", *counted[0][2]],
            [[way, place, *(str(number) for number in counts.values())] for way, place, counts in counted],
        )


def write_csv(path: Path, model: str, device: str, outcomes: Sequence[Outcome], flop: Mapping[str, int]) -> Path:
    """Write a row for each outcome and pass: seconds, TFLOP/s, bytes, dB."""
    path.parent.mkdir(parents=True, exist_ok=True)
    by_way = {found.way: found for found in outcomes}
    rows = [
        {
            "model": model,
            **environment(device),
            "way": found.way,
            "numbers": found.numbers,
            "pass": passes,
            **_rates(found, passes, by_way, flop),
            "saved_bytes_per_row": found.saved_bytes_per_row,
            "peak_bytes": found.peak_bytes,
            "kept_weight_bytes": found.kept_weight_bytes,
            "parameter_bytes": found.parameter_bytes,
            **{f"sqnr_{name}": db for name, db in found.sqnr.items()},
        }
        for found in outcomes
        for passes in found.times
    ]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return path


def draw_recipes(directory: Path, model: str, outcomes: Sequence[Outcome]) -> list[Path]:
    """Write speed.png, saved_bytes.png and sqnr.png. Controls are hatched."""
    directory.mkdir(parents=True, exist_ok=True)
    ways = [found.way for found in outcomes]
    speed = {
        passes: [outcomes[0].times[passes].median / found.times[passes].median for found in outcomes]
        for passes in PASSES
    }
    saved = {"bytes": [found.saved_bytes_per_row for found in outcomes]}
    sqnr = {name: [found.sqnr[name] for found in outcomes] for name in outcomes[0].sqnr}
    pictures = {
        "speed.png": (f"{model}: speed over that of {BASELINE}; above 1 is faster", speed),
        "saved_bytes.png": (f"{model}: bytes kept for backward, a row", saved),
        "sqnr.png": (f"{model}: SQNR against fp32, dB", sqnr),
    }
    return [_draw_bars(directory / name, title, ways, series) for name, (title, series) in pictures.items()]


def _draw_bars(path: Path, title: str, ways: list[str], series: Mapping[str, list[float]]) -> Path:
    """Grouped bars: one group for each outcome, one colour for each series."""
    figure = make_figure(max(6.0, 1.3 * len(ways)), 4)
    axes = figure.subplots()
    width = 0.8 / len(series)
    for index, (name, heights) in enumerate(series.items()):
        places = [position + (index - (len(series) - 1) / 2) * width for position in range(len(ways))]
        bars = axes.bar(places, heights, width, color=COLOURS[index % len(COLOURS)], label=name)
        for way, bar in zip(ways, bars, strict=True):
            bar.set_hatch("//" if way in CONTROLS else "")
        if len(series) <= 2:
            axes.bar_label(bars, fmt="%.3g" if max(heights) < 100 else "%.0f", fontsize=8)
    axes.set_xticks(range(len(ways)), ways)
    axes.set_title(title)
    if len(series) > 1:
        axes.legend(frameon=False, ncols=len(series), fontsize=8)
        axes.margins(y=0.15)
    bare(axes)
    save(figure, path)
    return path


def _rates(found: Outcome, passes: str, by_way: Mapping[str, Outcome], flop: Mapping[str, int]) -> dict[str, float]:
    """Seconds, useful TFLOP/s, and the time divided by that of each baseline."""
    timing = found.times[passes]
    baselines = [other for other in COMPARED_WITH if other in by_way]
    ratios = {f"over_{other}": timing.median / by_way[other].times[passes].median for other in baselines}
    seconds = {f"{name}_s": value for name, value in timing._asdict().items()}
    return {**seconds, "tflop_per_s": flop[passes] / timing.median / 1e12, **ratios}


def _or(otherwise: str, value: float | None, factor: float) -> str:
    return otherwise if value is None else f"{value * factor:.0f}"
