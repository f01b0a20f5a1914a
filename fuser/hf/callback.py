"""RecipeCallback: the recipe of a training run by transformers' Trainer."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from typing import Any

import torch
from torch import nn

from fuser.hf.blocks import MoEBlock
from fuser.hf.library import TrainerCallback
from ops.runner.operation import BasicOperation
from recipes.autocast import autocast
from recipes.recipe import Recipe
from recipes.registry import as_recipe
from recipes.stack import keeps_state


class RecipeCallback(TrainerCallback):
    """Run each forward of training under a recipe: `Trainer(model, ..., callbacks=[RecipeCallback("mxfp8")])`.

    recipe: a Recipe or a name

    From the beginning of training to its end the model's `forward` runs within `fuser.autocast(recipe)` where it is in
    training mode with gradients enabled; backward follows its forward. Evaluation is without the recipe. For delayed
    scaling each microbatch is a step, whose amaxes ranks reduce over all processes.

    When training begins, ValueError for a model without operations that follow `fuser.autocast`, on which the callback
    would have no effect, and for delayed scaling with `torch_compile=True`; when it is made, ValueError or TypeError
    for what is no recipe.
    """

    def __init__(self, recipe: Recipe | str) -> None:
        self.recipe = as_recipe(recipe)
        self._restore: Callable[[], None] | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Wrap the model's forward."""
        self._end()
        if not any(map(_follows_autocast, model.modules())):
            raise ValueError(
                f"RecipeCallback({self.recipe!r}) would have no effect: no part of {type(model).__name__} takes its "
                "recipe from fuser.autocast. Call fuser.hf.register() and "
                'model.set_experts_implementation("fuser") before training, or fuser.hf.replace_moe_blocks(model). An '
                'implementation "fuser:<recipe>" needs no callback.'
            )
        if keeps_state(self.recipe) and getattr(args, "torch_compile", False):
            raise ValueError(
                f"RecipeCallback({self.recipe.name!r}) opens autocast within what torch_compile=True compiles, where "
                "delayed scaling cannot end its steps. Leave torch_compile out, or take a recipe without a state."
            )
        self._restore = _run_under(self.recipe, model)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Put the model's forward back."""
        self._end()

    def _end(self) -> None:
        # It is there still if an exception ended the last training.
        restore, self._restore = self._restore, None
        if restore is not None:
            restore()


def _follows_autocast(module: Any) -> bool:
    if isinstance(module, BasicOperation | MoEBlock):
        return module.recipe is None
    config = getattr(module, "config", None)
    return hasattr(module, "is_transposed") and getattr(config, "_experts_implementation", None) == "fuser"


def _run_under(recipe: Recipe, model: Any) -> Callable[[], None]:
    """Wrap `model.forward`; what is returned unwraps it."""
    own = model.__dict__.get("forward")  # others wrap it in the same way: accelerate, for mixed precision
    forward = model.forward
    is_training = True

    @wraps(forward)
    def under_recipe(*args: Any, **kwargs: Any) -> Any:
        trains = is_training and model.training and torch.is_grad_enabled()
        with autocast(recipe) if trains else nullcontext():
            return forward(*args, **kwargs)

    def restore() -> None:
        nonlocal is_training
        is_training = False
        if model.__dict__.get("forward") is not under_recipe:
            return  # somebody has unwrapped it already, or has wrapped it once more
        if own is None:
            del model.forward
        else:
            model.forward = own

    model.forward = under_recipe
    return restore
