"""What all pictures have in common: colours, bare axes, how a file is written, and what is said without matplotlib."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

# Distinguishable to the colour-blind (Okabe and Ito, 2008).
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")


def why_no_plots() -> str | None:
    """What is missing for pictures, as a sentence; None if nothing is."""
    return None if find_spec("matplotlib") else "matplotlib is not installed (`pip install matplotlib`)."


def make_figure(width: float, height: float) -> Any:
    """An empty figure of so many inches."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def bare(axes: Any) -> None:
    """No frame at the top and on the right."""
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    """Replace the file in one move."""
    part = path.with_name(f"{path.name}.part")
    figure.savefig(part, dpi=150, format="png")
    part.replace(path)
