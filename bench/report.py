"""Compare the runs of a training directory: summary.md, loss.png, and whether each recipe matches bf16.

Everything is read from DIR/metrics.jsonl, so the report can be written again at any time.
"""

import math
import statistics
from dataclasses import dataclass
from pathlib import Path

import torch

from bench.corpus import Corpus
from bench.environment import environment
from bench.plots import COLOURS, bare, make_figure, save, why_no_plots
from bench.run_files import Record, read_metrics
from bench.schedule import BASELINE, RecipeSchedule, recipe_named

TOLERANCE = 0.02  # relative to the baseline's validation loss
# From this step on the tiny model must be better than the bigram entropy.
STEPS_TO_BEAT_BIGRAM = 300
SEED_NOISE = 0.03  # spread in nats/byte of three bf16 seeds of the tiny model after 300 steps
SMOOTHING = 10  # window of the running mean in the plot, in steps


@dataclass(frozen=True)
class Outcome:
    """The results of one recipe: seed -> training losses by step, and seed -> last validation loss.

    Recipes are compared by their first seed, which all of them have: same weights, same batches.
    """

    recipe: str
    curves: dict[int, list[float]]
    validation_losses: dict[int, float]
    tokens_per_s: float

    @property
    def curve(self) -> list[float]:
        return self.curves[min(self.curves)]

    @property
    def validation_loss(self) -> float:
        return self.validation_losses[min(self.validation_losses)]


def outcomes(directory: Path) -> dict[str, Outcome]:
    """Recipe label -> outcome, the baseline first, then in the order of the metrics.

    A recipe without a validation loss (its run was killed and not resumed) is left out.
    """
    by_recipe: dict[str, list[Record]] = {}
    for record in read_metrics(directory / "metrics.jsonl"):
        by_recipe.setdefault(record["recipe"], []).append(record)
    found = {
        recipe: _outcome(recipe, records)
        for recipe, records in by_recipe.items()
        if any("validation_loss" in record for record in records)
    }
    return dict(sorted(found.items(), key=lambda item: item[0] != BASELINE))


def complaints(directory: Path, bigram_entropy: float = math.inf) -> list[str]:
    """A sentence for every recipe whose validation loss is not finite, differs from the baseline's by more than 2 %, or
    is not below the corpus' bigram entropy after 300 steps. Negative controls are exempt."""
    found = outcomes(directory)
    reference = found[BASELINE].validation_loss
    sentences = []
    for recipe, outcome in found.items():
        if RecipeSchedule.parse(recipe).is_control:
            continue
        loss = outcome.validation_loss
        if not math.isfinite(loss):
            sentences.append(f"the validation loss of {recipe} is {loss}.")
        elif abs(loss / reference - 1) > TOLERANCE:
            where = "above" if loss > reference else "below"
            sentences.append(
                f"the validation loss of {recipe} is {loss:.4f}, "
                f"{abs(loss / reference - 1):.1%} {where} that of {BASELINE}; {TOLERANCE:.0%} are allowed."
            )
        elif len(outcome.curve) >= STEPS_TO_BEAT_BIGRAM and loss >= bigram_entropy:
            sentences.append(
                f"the validation loss of {recipe} is {loss:.4f} after {len(outcome.curve)} steps, "
                f"not below the corpus' bigram entropy of {bigram_entropy:.4f}."
            )
    return sentences


def write_report(directory: Path, corpus: Corpus, *, model: str, device: str) -> str:
    """Write DIR/summary.md and, if matplotlib is installed, DIR/loss.png. Returns the summary."""
    found = outcomes(directory)
    if missing := why_no_plots():
        picture = f"No loss.png: {missing}"
    else:
        _draw(found, corpus, directory / "loss.png")
        picture = "![training loss by step](loss.png)"
    summary = _summary(found, corpus, model, torch.device(device), picture)
    (directory / "summary.md").write_text(summary)
    return summary


def _outcome(recipe: str, records: list[Record]) -> Outcome:
    curves: dict[int, list[float]] = {}
    validation: dict[int, float] = {}
    for record in records:
        if "loss" in record:
            curves.setdefault(record["seed"], []).append(record["loss"])
        else:
            validation[record["seed"]] = record["validation_loss"]
    rates = [record["tokens_per_s"] for record in records if "tokens_per_s" in record]
    return Outcome(recipe, curves, validation, statistics.median(rates))


def _summary(found: dict[str, Outcome], corpus: Corpus, model: str, device: torch.device, picture: str) -> str:
    baseline = found.get(BASELINE)
    rows = [
        "| recipe | validation loss | ratio to bf16 | below bigram entropy | tokens/s | steps | seeds | numbers |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for outcome in found.values():
        loss = outcome.validation_loss
        ratio = f"{loss / baseline.validation_loss:.4f}" if baseline else "-"
        below = "yes" if loss < corpus.bigram_entropy else "not yet"
        rows.append(
            f"| {outcome.recipe} | {loss:.4f} | {ratio} | {below} | {outcome.tokens_per_s:,.0f} "
            f"| {len(outcome.curve)} | {len(outcome.curves)} | {_support(outcome.recipe, device)} |"
        )
    facts = ", ".join(f"{name} {value}" for name, value in environment(device).items())
    return (
        "\n\n".join(
            [
                f"# Recipes compared: model `{model}`",
                "\n".join(rows),
                _verdict(found),
                corpus.facts().replace("\n", "\n\n"),
                facts,
                picture,
            ]
        )
        + "\n"
    )


def _verdict(found: dict[str, Outcome]) -> str:
    """The conclusion from the table, and its limits."""
    sentences = []
    baseline = found.get(BASELINE)
    controls = [recipe for recipe in found if RecipeSchedule.parse(recipe).is_control]
    others = [outcome for recipe, outcome in found.items() if recipe != BASELINE and recipe not in controls]
    if baseline and others:
        apart = max(abs(other.validation_loss - baseline.validation_loss) for other in others)
        seeds = list(baseline.validation_losses.values())
        if len(seeds) > 1:
            noise, source = max(seeds) - min(seeds), f"{len(seeds)} seeds of {BASELINE} here"
        else:
            noise, source = SEED_NOISE, "seeds of the tiny model after 300 steps; --seeds 3 measures it here"
        compared = "less than" if apart < noise else "not less than"
        sentences.append(
            f"At this length the recipes lie up to {apart:.3f} nats/byte from {BASELINE}, {compared} the noise between "
            f"seeds ({noise:.3f}, {source}): the table shows whether anything breaks, not which recipe is better."
        )
    if controls:
        sentences.append(f"Negative controls, drawn dashed and not compared: {', '.join(controls)}.")
    sentences.append(
        '"Emulated" numbers are exactly those of the format, computed without hardware for it; their speed says '
        "nothing about the format."
    )
    return " ".join(sentences)


def _support(label: str, device: torch.device) -> str:
    """ "native" or "emulated", for each recipe of a schedule."""
    names = dict.fromkeys(name for _, name in RecipeSchedule.parse(label).parts)
    if len(names) == 1:
        return recipe_named(next(iter(names))).support(device)
    return ", ".join(f"{name} {recipe_named(name).support(device)}" for name in names)


def _draw(found: dict[str, Outcome], corpus: Corpus, path: Path) -> None:
    """Plot the curves, and below them, if there is a baseline, their differences from it."""
    baseline = found.get(BASELINE)
    figure = make_figure(9, 7 if baseline else 5)
    upper, *lower = figure.subplots(2 if baseline else 1, squeeze=False, sharex=True)[:, 0]
    for name, entropy in (("unigram", corpus.unigram_entropy), ("bigram", corpus.bigram_entropy)):
        upper.axhline(entropy, color="grey", linewidth=0.8, linestyle=":")
        where = {"xycoords": ("axes fraction", "data"), "ha": "right", "va": "bottom"}
        upper.annotate(f"{name} entropy {entropy:.2f}", (0.995, entropy), color="grey", fontsize=8, **where)

    curves = {recipe: _running_mean(outcome.curve) for recipe, outcome in found.items()}
    base = curves.get(BASELINE, [])
    if baseline and len(baseline.curves) > 1:
        seeds = list(zip(*map(_running_mean, baseline.curves.values()), strict=False))
        steps, label = range(1, len(seeds) + 1), f"{BASELINE}, {len(baseline.curves)} seeds"
        upper.fill_between(steps, list(map(min, seeds)), list(map(max, seeds)), color="lightgrey", label=label)
        apart = [(min(at) - zero, max(at) - zero) for at, zero in zip(seeds, base, strict=False)]
        lower[0].fill_between(steps[: len(apart)], *zip(*apart, strict=True), color="lightgrey")
    for index, (recipe, losses) in enumerate(curves.items()):
        dashed = RecipeSchedule.parse(recipe).is_control
        style = {"color": COLOURS[index % len(COLOURS)], "linewidth": 1.4, "linestyle": "--" if dashed else "-"}
        label = f"{recipe} (validation {found[recipe].validation_loss:.3f})"
        upper.plot(range(1, len(losses) + 1), losses, label=label, **style)
        apart_from_base = [loss - zero for loss, zero in zip(losses, base, strict=False)]
        for axes in lower:
            axes.plot(range(1, len(apart_from_base) + 1), apart_from_base, **style)

    upper.set(title=f"Training loss, nats/byte (mean of {SMOOTHING} steps): one model, the same batches")
    upper.legend(frameon=False)
    for axes in lower:
        axes.set(title=f"Distance from {BASELINE}, nats/byte")
    for axes in (upper, *lower):
        bare(axes)
    (upper, *lower)[-1].set(xlabel="step")
    save(figure, path)


def _running_mean(losses: list[float]) -> list[float]:
    return [statistics.fmean(losses[max(0, end - SMOOTHING) : end]) for end in range(1, len(losses) + 1)]
