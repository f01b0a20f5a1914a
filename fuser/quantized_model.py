"""Models whose linear layers hold their weights as codes alone: made so, or converted."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from fuser.tied_parameters import Place, tied_parameters
from ops.products.held_weights import HeldAs, holding_new_weights
from ops.products.main_grad import OperationWithWeights
from recipes.arguments import check_flags
from recipes.recipe import Recipe, Role
from recipes.registry import as_recipe
from recipes.tensors.quantized_handle import at_values
from recipes.tensors.quantized_shard import is_dtensor, local_shard, with_local
from recipes.tensors.quantizer import Quantizer


@contextmanager
def quantized_model_init(
    recipe: Recipe | str,
    *,
    enabled: bool = True,
    columnwise: bool = True,
    preserve_high_precision_init_val: bool = False,
) -> Iterator[None]:
    """Within `with quantized_model_init(recipe):` each `Linear` and `GroupedLinear` holds its weights quantized as soon
    as it has initialised them, so that no more than one layer is ever there in high precision.

        with fuser.quantized_model_init("mxfp8"):
            model = Sequential(ops.Linear(1024, 4096), ops.GELU(), ops.Linear(4096, 1024))

    Arguments and errors are those of `to_quantized`. enabled: False does nothing. Layers on the meta device hold them
    so when `reset_parameters` gives them values.
    """
    check_flags(enabled=enabled)
    with holding_new_weights(_held_as(recipe, columnwise, preserve_high_precision_init_val) if enabled else None):
        yield


def to_quantized(
    model: nn.Module,
    recipe: Recipe | str,
    *,
    columnwise: bool = True,
    preserve_high_precision_init_val: bool = False,
) -> nn.Module:
    """Let each `Linear` and `GroupedLinear` in `model` hold its weights quantized, as codes and scales alone; returns
    `model`. Biases stay as they are.

    recipe: a Recipe or its name: how weights are quantized. An operation with a recipe of its own (`set_recipe`) is
        quantized for that one. To compute with just these codes, run under a recipe that quantizes weights alike;
        under others they are dequantized, as `explain()` says
    columnwise: also hold the copy that dgrad reads; without, for inference, half the bytes where formats need both
    preserve_high_precision_init_val: keep the values before quantization on the host, at
        `weight.get_high_precision_init_val()`, until `weight.clear_high_precision_init_val()`

    The parameters are new objects, `QuantizedParameter`: make the optimizer afterwards. Weights that are tied stay so,
    where each layer holds one weight (not one a group), of the same quantizer without a state. FSDP2 (`fully_shard`)
    may shard the model afterwards, or have sharded it, if it has not run yet; then each rank quantizes its part, in a
    collective.

    Raises ValueError if `model` contains no such layer, the recipe leaves weights in high precision, a layer stores
    its weights in another layout or computes them (`torch.nn.utils.parametrize`), or weights are tied in another way,
    such as that of a head to an embedding; TypeError or ValueError if `recipe` is not a recipe; RuntimeError for a
    sharded model that has run.
    """
    held_as = _held_as(recipe, columnwise, preserve_high_precision_init_val)
    layers = [module for module in model.modules() if isinstance(module, OperationWithWeights)]
    if not layers:
        raise ValueError(
            f"to_quantized got {type(model).__name__}, which has no Linear or GroupedLinear. Give the model."
        )
    _check_can_be_exchanged(model, layers)
    for layer in layers:
        layer.check_can_be_held(held_as)
    tied = _tied_places(model, held_as)
    for layer in layers:
        layer.hold_quantized(held_as)
        for other in tied.get(layer, ()):
            other.module._parameters[other.name] = layer.get_parameter(layer.weight_names[0])  # held as it is to be
    return model


def dequantized_state_dict(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state dict with ordinary tensors, in their nominal dtype, in place of quantized parameters.

    `model.load_state_dict` takes both forms, in a quantized model and in any other. Of parameters that FSDP2 shards the
    tensors are sharded alike, which `torch.distributed.checkpoint` saves and loads.
    """
    return {name: _values(value) for name, value in state_dict.items()}


def _values(tensor: Any) -> Any:
    shard = local_shard(tensor)
    return at_values(tensor) if shard is None else with_local(tensor, shard.quantized.dequantize())


def _held_as(recipe: Recipe | str, columnwise: bool, preserve_high_precision_init_val: bool) -> HeldAs:
    check_flags(columnwise=columnwise, preserve_high_precision_init_val=preserve_high_precision_init_val)
    chosen = as_recipe(recipe)
    if chosen.quantizer(Role.WEIGHT) is None:
        raise ValueError(f"{chosen!r} leaves weights in high precision. Give a recipe that quantizes them.")
    return HeldAs(chosen, columnwise, preserve_high_precision_init_val)


def _tied_places(model: nn.Module, held_as: HeldAs) -> dict[nn.Module, list[Place]]:
    """By the first layer that holds a weight the other places of it. Raises ValueError where they cannot hold the same
    codes."""
    tied: dict[nn.Module, list[Place]] = {}
    for places in tied_parameters(model).values():
        quantizers = [_quantizer(place, held_as) for place in places]
        if all(quantizer is None for quantizer in quantizers):
            continue
        reason = _why_not_tied(places, quantizers)
        if reason is not None:
            raise ValueError(
                f"{' and '.join(map(str, places))} are one parameter, which cannot be held quantized: {reason} Untie "
                "them, by module.weight = nn.Parameter(module.weight.detach().clone()), or give to_quantized a part of "
                "the model without them."
            )
        tied[places[0].module] = places[1:]
    return tied


def _quantizer(place: Place, held_as: HeldAs) -> Quantizer | None:
    """What quantizes the parameter there."""
    _, module, name = place
    if not isinstance(module, OperationWithWeights) or name not in module.weight_names:
        return None
    return (module.recipe or held_as.recipe).quantizer(Role.WEIGHT)


def _why_not_tied(places: Sequence[Place], quantizers: Sequence[Quantizer | None]) -> str | None:
    for place, quantizer in zip(places, quantizers, strict=True):
        if quantizer is None:
            return f"{place} ({type(place.module).__name__}) is held in high precision."
        if quantizer.keeps_state:
            return "each layer has its own scales (delayed scaling)."
        if place.name != "weight":
            return f"the layer of {place} holds the weights of its groups in one memory."
    if any(quantizer != quantizers[0] for quantizer in quantizers):
        return "by their own recipes the layers quantize it differently."
    return None


def _groups_of(state: Any) -> Iterable[Any]:
    """What FSDP2 gathers at a time: with torch 2.11 one group of parameters a module, or none."""
    groups = getattr(state, "_fsdp_param_groups", None)
    return filter(None, (state._fsdp_param_group,)) if groups is None else groups


def _check_can_be_exchanged(model: nn.Module, layers: Sequence[nn.Module]) -> None:
    """FSDP2 takes other parameters in place of those that it has sharded until it gathers them for the first time."""
    if not any(is_dtensor(parameter) for layer in layers for parameter in layer.parameters()):
        return
    fsdp: Any = sys.modules["torch.distributed.fsdp"].FSDPModule
    states = [module._get_fsdp_state() for module in model.modules() if isinstance(module, fsdp)]
    if not states:
        raise ValueError(
            f"The weights of {type(model).__name__} are sharded by a module around it. Give to_quantized the model on "
            "which fully_shard was called, or call it before fully_shard."
        )
    groups = [group for state in states for group in _groups_of(state)]
    if any(group._reset_sharded_params for group in groups):
        raise RuntimeError(
            "fully_shard has gathered these weights before, and would keep to them. Call to_quantized before the first "
            "forward of the sharded model, or before fully_shard."
        )
