"""Shared by all plots: colours, axes, writing files, and the message if matplotlib is missing."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Distinguishable by colour-blind readers (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def why_no_plots() -> str | None:
    """The missing requirement for plots, as a sentence; None if there is none."""
    return None if find_spec("matplotlib") else "matplotlib is not installed (`pip install matplotlib`)."


def make_figure(width: float, height: float) -> Any:
    """An empty figure; width and height in inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def bare(axes: Any) -> None:
    """Remove the frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Write the figure, replacing the file atomically."""
    part = path.with_name(f"{path.name}.part")
    figure.savefig(part, dpi=150, format="png")
    part.replace(path)
