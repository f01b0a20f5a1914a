"""autocast with TransformerEngine's arguments."""

from __future__ import annotations

from typing import Any

from recipes.arguments import check_flags
from recipes.autocast import autocast as autocast_of_recipe
from recipes.recipe import Recipe


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
    if enabled and recipe is None:
        raise ValueError(
            "recipe is None, and TransformerEngine's default depends on the GPU. Name one: recipe=te.recipe."
            "DelayedScaling() is that of Hopper, te.recipe.MXFP8BlockScaling() that of Blackwell."
        )
    return autocast_of_recipe(recipe, enabled, amax_reduction_group=amax_reduction_group)
