"""prepare: create the quantizer state that operations would otherwise create when they first run under a recipe."""

from __future__ import annotations

import torch
from torch import nn

from fuser.sequentials import sequentials
from ops.runner.operation import BasicOperation
from ops.runner.quantizer_state import QuantizerState
from recipes.recipe import Recipe
from recipes.registry import as_recipe


def prepare(model: nn.Module, recipe: Recipe | str) -> nn.Module:
    """Create the state that the operations of `model` need under `recipe`, and return `model`.

    Under a stateful recipe (delayed scaling) an operation has float32 buffers, `quantizer_<role>_<name>`, which are
    created when it first runs. Call this before code that needs them earlier:

        model = prepare(build(), "fp8_delayed")
        dcp.load({"model": model.state_dict()}, checkpoint_id=path)   # loads only keys that exist
        ema = AveragedModel(model, use_buffers=True)                  # copies only buffers that exist

    recipe: a Recipe or its name. An operation with its own recipe (`set_recipe`) is prepared for that one. Existing
    state is not changed. Under stateless recipes nothing is created. (`load_state_dict` does not need this: it creates
    the state for the keys that it receives.) It may be called again, before or after `fully_shard` and
    `fuser.lora.add`. The experts and blocks of `fuser.hf` are prepared too; their state is in no state dict.

    Raises ValueError if `model` contains no operation; TypeError or ValueError if `recipe` is not a recipe.
    """
    chosen = as_recipe(recipe)
    modules = (module for _, part in sequentials(model) for module in part.modules())
    operations = [module for module in modules if isinstance(module, BasicOperation)]
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
