"""Registers the experts implementations "fuser" and "fuser:<recipe>" with transformers."""

from __future__ import annotations

from functools import partial

from torch import nn

from fuser.hf.experts import experts_forward, experts_layer
from fuser.hf.library import ALL_EXPERTS_FUNCTIONS
from fuser.sequential import Sequential
from fuser.sequentials import add_finder
from recipes.recipe import Recipe
from recipes.registry import RECIPES, as_recipe


def register(**recipes: Recipe | str) -> tuple[str, ...]:
    """Register experts implementations with transformers, for `model.set_experts_implementation(name)`.

        "fuser"          under the recipe of the surrounding `fuser.autocast`
        "fuser:<name>"   under that recipe, for each built-in name: "fuser:mxfp8", "fuser:bf16", ...

    recipes: more of them, by names of your own: `register(mine=MXFP8BlockScaling(...))` adds "fuser:mine"

    Returns the names. Registering again replaces what is there. `from_pretrained(..., experts_implementation="fuser")`
    takes the names too. Parameters, state dict and saved files of a model are not changed by its implementation.

    Raises TypeError or ValueError for what is no recipe, before anything is registered.
    """
    built_in: dict[str, Recipe | str] = {name: name for kind in RECIPES for name in kind.names}
    chosen = {f"fuser:{name}": as_recipe(recipe, name) for name, recipe in {**built_in, **recipes}.items()}
    for name, recipe in {"fuser": None, **chosen}.items():
        ALL_EXPERTS_FUNCTIONS.register(name, partial(experts_forward, recipe))
    add_finder(_layer_of_experts)
    return "fuser", *chosen


def _layer_of_experts(module: nn.Module) -> Sequential | None:
    """The layer of an experts module whose implementation is one of these."""
    if not hasattr(module, "is_transposed"):
        return None
    name = getattr(getattr(module, "config", None), "_experts_implementation", None)
    function = ALL_EXPERTS_FUNCTIONS.get(name)
    if not isinstance(function, partial) or function.func is not experts_forward:
        return None
    return experts_layer(module, *function.args)
