"""Recipes by name: every argument that takes a recipe also takes a name such as "mxfp8"."""

from functools import cache

from recipes.current_scaling import Float8CurrentScaling
from recipes.delayed_scaling import DelayedScaling
from recipes.float8_block import Float8BlockScaling
from recipes.float8_rowwise import Float8RowwiseScaling
from recipes.mxfp8 import MXFP8BlockScaling
from recipes.nvfp4 import NVFP4BlockScaling
from recipes.recipe import HIGH_PRECISION, HighPrecision, Recipe, check_by_value

RECIPES: tuple[type[Recipe], ...] = (
    HighPrecision,
    DelayedScaling,
    Float8CurrentScaling,
    Float8BlockScaling,
    Float8RowwiseScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)


def as_recipe(recipe: Recipe | str | None, argument: str = "recipe") -> Recipe:
    """The recipe itself, the one of that name with its default fields, or `HighPrecision()` for None.

    argument: the name of the argument, for error messages

    Raises ValueError for an unknown name, TypeError for anything else, and for a recipe that is not equal by value.
    """
    if recipe is None:
        return HIGH_PRECISION
    if isinstance(recipe, str):
        return _named(recipe)
    if isinstance(recipe, Recipe):
        check_by_value(recipe)
        return recipe
    if isinstance(recipe, type) and issubclass(recipe, Recipe):
        raise TypeError(f"{argument} is the class {recipe.__name__}, not a recipe. Give {recipe.__name__}().")
    raise TypeError(f"{argument} is {recipe!r}, but must be a Recipe or a name. Pass {_known_names()}.")


def _named(name: str) -> Recipe:
    for kind in RECIPES:
        if name in kind.names:
            return _default(kind)
    raise ValueError(f"there is no recipe named {name!r}. Pass {_known_names()}, or a Recipe.")


@cache
def _default(kind: type[Recipe]) -> Recipe:
    return HIGH_PRECISION if kind is HighPrecision else kind()


def _known_names() -> str:
    return ", ".join(f'"{name}"' for kind in RECIPES for name in kind.names)
