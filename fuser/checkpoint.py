"""Activation checkpointing that recomputes under the recipe of the forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as torch_checkpoint

from recipes.autocast import autocast, current_recipe


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, with the recipe of the call re-entered when it is computed again.

    Backward usually runs outside of `autocast(recipe=...)`, and the plain function would recompute without a recipe.
    All other arguments are those of torch's function.
    """
    recipe = current_recipe()

    def under_recipe(*inputs: Any, **named: Any) -> Any:
        with autocast(recipe=recipe):
            return function(*inputs, **named)

    return torch_checkpoint(under_recipe, *args, use_reentrant=use_reentrant, **kwargs)
