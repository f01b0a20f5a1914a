"""Activation checkpointing that recomputes under the recipe of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from recipes.autocast import autocast
from recipes.stack import CastScales, current_recipe, current_updates


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, with the recipe of the call re-entered when it is computed again.

    Under delayed scaling it casts with the scales of the first time and records no amax a second time.
    Backward usually runs outside of `autocast(recipe=...)`, and the plain function would recompute without a recipe.
    All other arguments are those of torch's function.

    Raises RuntimeError in backward for a tensor given by name that was changed in place after the call began, also by
    the function itself: it could not be computed again. (Torch looks only at those given by position.)
    """
    recipe, updates = current_recipe(), current_updates()
    group = None if updates is None else updates.group
    versions = _versions(kwargs)
    scales = CastScales()
    runs = iter((False, True))

    def under_recipe(*inputs: Any, **named: Any) -> Any:
        changed = [name for name, version in versions.items() if _versions(named).get(name) != version]
        if changed:
            raise RuntimeError(
                f"{changed[0]} was changed in place since the checkpointed function was called, so that cannot be "
                "computed again. Do not write into the inputs of a checkpointed function."
            )
        scales.replays = next(runs, True)
        with autocast(recipe=recipe, amax_reduction_group=group, scales=scales):
            return function(*inputs, **named)

    return torch_checkpoint(under_recipe, *args, use_reentrant=use_reentrant, **kwargs)


def _versions(named: Mapping[str, Any]) -> dict[str, int]:
    """How often each tensor was changed in place; an inference tensor does not count."""
    return {
        name: value._version for name, value in named.items() if isinstance(value, Tensor) and not value.is_inference()
    }
