"""Negative controls: recipes without one feature that should matter, to be compared with the complete ones.

nvfp4-nearest       NVFP4 whose gradients are rounded to nearest, not stochastically
e5m2                E5M2 for inputs and weights too, one scale a tensor
delayed-history-1   scales from the amax of the last step alone
"""

from collections.abc import Callable
from functools import cache
from typing import Any

from bench.usage import UsageError
from fuser import recipes
from recipes import Recipe


def _nvfp4_nearest() -> Recipe:
    return _recipe_class("NVFP4BlockScaling")(disable_stochastic_rounding=True)


def _e5m2() -> Recipe:
    everywhere = recipes.Float8CurrentScaling(fp8_format=recipes.Format.E5M2)
    return _recipe_class("CustomRecipe")(everywhere.quantizer)


def _delayed_history_1() -> Recipe:
    return _recipe_class("DelayedScaling")(amax_history_len=1)


CONTROLS: dict[str, Callable[[], Recipe]] = {
    "nvfp4-nearest": _nvfp4_nearest,
    "e5m2": _e5m2,
    "delayed-history-1": _delayed_history_1,
}


@cache
def make_control(label: str) -> Recipe:
    """The recipe of a label in `CONTROLS`, the same object each time. UsageError if this build lacks its class."""
    try:
        return CONTROLS[label]()
    except _NotInThisBuildError as error:
        others = ", ".join(other for other in CONTROLS if other != label)
        raise UsageError(f"{label}: {error} Leave it out; the other controls are {others}.") from None


class _NotInThisBuildError(Exception):
    """`recipes` lacks the class of a control."""


def _recipe_class(name: str) -> Any:
    if name not in recipes.__all__:
        raise _NotInThisBuildError(f"this build has no {name}.")
    return getattr(recipes, name)
