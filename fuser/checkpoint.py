"""Activation checkpointing that recomputes under the recipe of the forward pass."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from ops.runner.tracing import refuse
from recipes.autocast import autocast
from recipes.first_forwards import FirstForwards
from recipes.stack import CastScales, current_recipe, current_updates


def checkpoint(function: Callable[..., Any], *args: Any, use_reentrant: bool = False, **kwargs: Any) -> Any:
    """`torch.utils.checkpoint.checkpoint`, whose recomputation runs under the recipe of the first call.

    Backward usually runs outside of `autocast(recipe=...)`, where torch's function would recompute without a recipe.
    Under delayed scaling the recomputation uses the scales of the first call and records no amax.
    All other arguments are those of torch's function.

    Raises RuntimeError in backward if a tensor passed by keyword was changed in place after the call began, also by the
    function itself: the recomputation would give other values. (Torch checks only positional tensors.)
    """
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        refuse(  # a literal: torch shows no other text
            "fuser.checkpoint keeps the recipe and the scales of the first run, of which torch's tracing sees nothing. "
            "Within a compiled function call torch.utils.checkpoint.checkpoint, which computes again under the recipe "
            "that was traced; under delayed scaling leave out fullgraph=True."
        )
        return _checkpoint(function, args, use_reentrant, kwargs)
    if torch._C._current_graph_task_id() == -1:
        _calls.began(True)
        return _checkpoint(function, args, use_reentrant, kwargs)
    with _calls.entered_again(True, None):  # of a function that torch's checkpoint computes again
        return _checkpoint(function, args, use_reentrant, kwargs)


_calls = FirstForwards()


def _checkpoint(
    function: Callable[..., Any], args: tuple[Any, ...], use_reentrant: bool, kwargs: Mapping[str, Any]
) -> Any:
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
        scales.begin(replays=next(runs, True))
        with autocast(recipe=recipe, amax_reduction_group=group, scales=scales):
            return function(*inputs, **named)

    return torch_checkpoint(under_recipe, *args, use_reentrant=use_reentrant, **kwargs)


def _versions(named: Mapping[str, object]) -> dict[str, int]:
    """The version counter of each tensor. Inference tensors have none and are left out."""
    return {
        name: value._version for name, value in named.items() if isinstance(value, Tensor) and not value.is_inference()
    }
