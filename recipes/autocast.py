"""autocast: choose the recipe for everything that runs inside.

The stack of recipes is one for the process, not one a thread: autograd runs CUDA backwards on a thread of its own,
and a recomputation there must see the recipe that the caller chose.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from recipes.names import as_recipe
from recipes.recipe import HighPrecision, Recipe

_HIGH_PRECISION = HighPrecision()
_stack: list[list[Recipe]] = []


@contextmanager
def autocast(recipe: Recipe | str | None = None, enabled: bool = True) -> Iterator[Recipe]:
    """Run what is inside under `recipe`, a Recipe or a name such as "mxfp8"; also a decorator.

    Contexts nest, and the innermost one counts. `enabled=False`, like None, means high precision. Yields the recipe.

    The stack is one for the process: enter contexts from one thread at a time. Plain `torch.utils.checkpoint` computes
    again outside of the context, unless backward runs inside; `fuser.checkpoint` enters the recipe again.
    """
    chosen = as_recipe(recipe) if enabled else _HIGH_PRECISION
    entry = [chosen]
    _stack.append(entry)
    try:
        yield chosen
    finally:
        # its own entry, also if another thread has put one on top
        del _stack[next(i for i, other in enumerate(_stack) if other is entry)]


def current_recipe() -> Recipe:
    """The recipe of the innermost `autocast`, `HighPrecision()` outside of any."""
    return _stack[-1][0] if _stack else _HIGH_PRECISION
