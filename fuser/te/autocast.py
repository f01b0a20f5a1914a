"""The contexts that take a recipe, with TransformerEngine's arguments."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from fuser.quantized_model import quantized_model_init as holding_quantized
from recipes.arguments import check_flags
from recipes.autocast import autocast as autocast_of_recipe
from recipes.recipe import HighPrecision, Recipe


def autocast(
    enabled: bool = True,
    calibrating: bool = False,
    recipe: Recipe | str | None = None,
    amax_reduction_group: Any = None,
) -> autocast_of_recipe:
    """A context that runs its body under `recipe`, of `fuser.recipes` or of `fuser.te.recipe`; `enabled=False`: in high
    precision.

    Raises ValueError without a recipe, which TransformerEngine chooses by the GPU, NotImplementedError for calibrating.
    """
    check_flags(enabled=enabled, calibrating=calibrating)
    if calibrating:
        raise NotImplementedError(
            "calibrating=True: amaxes are recorded by steps under DelayedScaling alone. Run those, or leave it out."
        )
    return autocast_of_recipe(_named(recipe, enabled), enabled, amax_reduction_group=amax_reduction_group)


def quantized_model_init(
    enabled: bool = True,
    recipe: Recipe | str | None = None,
    preserve_high_precision_init_val: bool = False,
) -> AbstractContextManager[None]:
    """A context in which operations that are made hold their weights quantized: `fuser.quantized_model_init`.

    Raises ValueError without a recipe, as `autocast`.
    """
    check_flags(enabled=enabled)
    named = _named(recipe, enabled)
    return holding_quantized(
        HighPrecision() if named is None else named,
        enabled=enabled,
        preserve_high_precision_init_val=preserve_high_precision_init_val,
    )


def _named(recipe: Recipe | str | None, enabled: bool) -> Recipe | str | None:
    if enabled and recipe is None:
        raise ValueError(
            "recipe is None, and TransformerEngine's default depends on the GPU. Name one: recipe=te.recipe."
            "DelayedScaling() is that of Hopper, te.recipe.MXFP8BlockScaling() that of Blackwell."
        )
    return recipe
