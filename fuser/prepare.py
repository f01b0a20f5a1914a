"""prepare: make now what operations would make when they first run under a recipe."""

from __future__ import annotations

import torch
from torch import nn

from ops.runner.operation import BasicOperation
from ops.runner.quantizer_state import QuantizerState
from recipes.recipe import Recipe
from recipes.registry import as_recipe


def prepare(model: nn.Module, recipe: Recipe | str) -> nn.Module:
    """Make the state that the operations of `model` need under `recipe`, and return `model`.

    Under a recipe with a state (delayed scaling) an operation has float32 buffers, `quantizer_<role>_<name>`, which
    appear when it first runs. Call this before what must find them earlier:

        model = prepare(build(), "fp8_delayed")
        dcp.load({"model": model.state_dict()}, checkpoint_id=path)   # it loads the keys that are there
        ema = AveragedModel(model, use_buffers=True)                  # a copy of what is there

    recipe: also by its name; operations with a recipe of their own (`set_recipe`) are prepared for that one. State that
    is there stays as it is. Under other recipes nothing is made. (`load_state_dict` needs none of this: it makes the
    state whose keys it is given.)

    Raises ValueError if `model` contains no operation, TypeError or ValueError for what is no recipe.
    """
    chosen = as_recipe(recipe)
    operations = [module for module in model.modules() if isinstance(module, BasicOperation)]
    if not operations:
        raise ValueError(f"prepare got {type(model).__name__}, which contains no operation. Give the model.")
    first = next(model.parameters(), torch.empty(0))
    for operation in operations:
        device = next(operation.parameters(), first).device
        for role in operation.quantized_roles:
            quantizer = (operation.recipe or chosen).quantizer(role)
            if quantizer is not None and quantizer.keeps_state:
                QuantizerState(operation, role, operation.num_scales).tensors(quantizer, device)
    return model
