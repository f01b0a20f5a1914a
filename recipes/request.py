"""The key of a plan: everything that determines which operations are fused and on which path they run.

Both classes are tuples: immutable, equal by value, cheap to build and to hash. Plans are cached by their requests.
"""

from typing import NamedTuple

import torch

from recipes.recipe import Recipe


class Needs(NamedTuple):
    """Which gradients one operation computes: of its input, and of the named parameters and extra inputs."""

    input: bool = False
    params: frozenset[str] = frozenset()
    extras: frozenset[str] = frozenset()


class PlanRequest(NamedTuple):
    """The key of a plan.

    recipe: never None (`HighPrecision()` stands for no recipe)
    device, dtype: the device and nominal dtype of the pipeline. The dtype is torch.autocast's, else that of the first
                   parameter, else x's; float64 if any parameter is float64
    needs: whether x requires grad; whether each parameter does, in the order of the operations; the names of the
           extra inputs that do. All False without grad mode.
    training: whether the Sequential is in training mode; each operation has a mode of its own
    path: "grouped" or "split" if the caller forces one, else None
    fusions_version: a counter of the changes to the registered fusions
    """

    recipe: Recipe
    device: torch.device
    dtype: torch.dtype
    needs: tuple[bool, tuple[bool, ...], tuple[str, ...]]
    training: bool
    path: str | None
    fusions_version: int
