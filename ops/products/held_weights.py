"""Weights that are held quantized: how operations come to hold them, and what a product takes of them.

`hold_quantized` replaces an operation's weights by `QuantizedParameter`s, of one or of all groups. Where the quantizer
of the recipe in use is the one they were quantized with, their codes are multiplied as they are, and nothing is saved
for backward. Under another recipe they are dequantized, and quantized anew where that quantizes weights.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.runner.context import OperationContext
from ops.runner.parameters import held_parameter
from ops.runner.quantizer_state import QuantizerState
from recipes.recipe import Recipe, Role
from recipes.tensors.quantize_weight import quantize_weight
from recipes.tensors.quantized_handle import QuantizedHandle, at_values
from recipes.tensors.quantized_parameter import QuantizedParameter, sharding_of
from recipes.tensors.quantized_shard import QuantizedShard, empty_shard, is_dtensor, local_shard, shard_dim, with_local
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer
from recipes.triton.launch import cdiv

# Copies of an operation's weights: of all in one tensor, or of each group's.
Copies = QuantizedTensor | Sequence[QuantizedTensor]
# Makes the requested copies: rowwise, columnwise.
Quantize = Callable[[bool, bool], Copies]


class HeldAs(NamedTuple):
    """How weights are to be held: as this recipe quantizes them, unless the operation has a recipe of its own."""

    recipe: Recipe
    columnwise: bool = True
    preserve_high_precision_init_val: bool = False


_of_new_operations: ContextVar[HeldAs | None] = ContextVar("held_as", default=None)


def held_as_of_new_operations() -> HeldAs | None:
    """What `holding_new_weights` says now."""
    return _of_new_operations.get()


@contextmanager
def holding_new_weights(held_as: HeldAs | None) -> Iterator[None]:
    """Operations that are made inside hold their weights so."""
    token = _of_new_operations.set(held_as)
    try:
        yield
    finally:
        _of_new_operations.reset(token)


@torch.no_grad()
def hold_quantized(operation: Any, names: Sequence[str], held_as: HeldAs) -> None:
    """Replace the weights of these names by quantized ones; attributes and `requires_grad` stay.

    Those of several groups come to lie in one memory, so that one product reads them all. Of weights that FSDP2 has
    sharded each rank quantizes its part, in a collective. Weights that are on the meta device, held so already, or not
    quantized by the recipe are left alone.
    """
    quantizer = _quantizer_for(operation, held_as)
    weights: list[Any] = [held_parameter(operation, name) for name in names]
    held = [_as_held(weight) for weight in weights]
    done = all(isinstance(w, QuantizedParameter | QuantizedShard) and w.quantizer == quantizer for w in held)
    if quantizer is None or done or weights[0].is_meta:
        return
    if any(map(is_dtensor, weights)):
        parts = [_empty_part(operation, names, name, quantizer, held_as) for name in names]
        for name, weight, part in zip(names, weights, parts, strict=True):
            _exchange(operation, name, part)
            shard, values = local_shard(part), at_values(weight.to_local())
            assert shard is not None, "it was made so"
            shard.write(values)
            if held_as.preserve_high_precision_init_val:
                shard.sharding.initial = values.to("cpu", copy=True)
        return
    values = [w.quantized.dequantize() if isinstance(w, QuantizedHandle) else w.detach() for w in weights]
    source = QuantizerState(operation, Role.WEIGHT, operation.num_scales) if quantizer.keeps_state else None
    copies: dict[str, Any] = {"rowwise": True, "columnwise": held_as.columnwise}
    if len(names) == 1:
        made = [quantize_weight(values[0], quantizer, source, **copies)]
    elif quantizer.knows_groups():
        made = quantize_weight(torch.stack(values), quantizer, source, **copies).unbind()
    else:
        made = [quantize_weight(w, quantizer, source, range(g, g + 1), **copies) for g, w in enumerate(values)]
    for name, value, quantized in zip(names, values, made, strict=True):
        parameter = _exchange(operation, name, QuantizedParameter(quantized, quantizer))
        if held_as.preserve_high_precision_init_val:
            parameter._high_precision_init_val = value.to("cpu", copy=True)


def check_parts(operation: Any, names: Sequence[str], held_as: HeldAs) -> None:
    """Raise ValueError if FSDP2 has sharded the weights of these names into parts that cannot be held quantized."""
    quantizer = _quantizer_for(operation, held_as)
    for name in names:
        if quantizer is not None and is_dtensor(held_parameter(operation, name)):
            _empty_part(operation, names, name, quantizer, held_as)


def bind_to_states(operation: Any, names: Sequence[str]) -> None:
    """Let the operation's quantized weights find its scales, where their quantizer keeps some."""
    for name in names:
        weight = operation._parameters.get(name)
        if isinstance(weight, QuantizedParameter) and weight.quantizer.keeps_state:
            weight.bind(_own_state(operation), _groups_of(names, name))


@torch.no_grad()
def applied(function: Callable[[Tensor], Tensor], weight: Any) -> Any:
    """What `nn.Module.to` and the like make of a quantized weight: itself, where nothing changes; a new one with its
    codes on another device; an ordinary parameter, of another dtype or if it becomes empty. What others have set on it
    stays, as on an ordinary one. One weight of several operations becomes one again in the same call of `nn.Module.to`,
    whose function is one object."""
    if weight.moved is not None and weight.moved[0] is function:
        return weight.moved[1]
    result = function(weight)
    if result is weight or (isinstance(result, QuantizedParameter) and result.device == weight.device):
        return weight
    parameter = nn.Parameter(result, requires_grad=weight.requires_grad)
    weight.hand_over_attributes(parameter)
    if weight.grad is not None:
        parameter.grad = function(weight.grad).to(parameter.dtype)  # that of a master is float32
    weight.moved = function, parameter
    return parameter


def note_replaced(before: Iterable[Tensor | None], after: Iterable[Tensor | None]) -> None:
    """Note of the quantized weights that an operation had before, and has no more: who steps them trains it no more."""
    there = set(map(id, after))
    for weight in before:
        if isinstance(weight, QuantizedParameter) and id(weight) not in there:
            weight.is_replaced = True


def held_codes(ctx: OperationContext, names: Sequence[str], quantizer: Quantizer) -> Quantize | None:
    """What gives the copies of the weights of these names as the path multiplies them; None where their codes are not
    those of the recipe. quantizer: that of this pass.

    Raises RuntimeError for a copy that is needed and was not made, and where the weights have changed since forward.
    """
    weights = [ctx.held(name) for name in names]
    if why_not_as_held(weights, ctx.recipe) is not None:
        return None

    def copies(rowwise: bool, columnwise: bool) -> Copies:
        if ctx.seen_in_forward is None:
            quantizer.note_codes_of_state()
        else:
            for name in names:
                ctx.check_unchanged(name)
        held = [weight.quantized for weight in weights]  # type: ignore[attr-defined]
        if columnwise and held[0].columnwise is None:
            raise RuntimeError(
                "dgrad reads the columnwise copy of the weights, but they are held rowwise alone. Hold both copies "
                "(columnwise=True), or run under torch.no_grad()."
            )
        if not ctx.operation.is_grouped:
            return held[0]
        return ctx.path.held(held[0] if ctx.operation.stacked else held)

    return copies


def why_not_as_held(weights: Sequence[Tensor], recipe: Recipe) -> str | None:
    """Why codes that weights are held in are dequantized, as a sentence; None if they are multiplied, and empty if no
    weight is held in codes."""
    held = [weight for weight in weights if isinstance(weight, QuantizedParameter | QuantizedShard)]
    if not held:
        return ""
    if len(held) < len(weights):
        return "some weights of the operation are held in high precision."
    quantizer = recipe.quantizer(Role.WEIGHT)
    if quantizer is None:
        return "the recipe leaves weights in high precision."
    other = next((weight.quantizer for weight in held if weight.quantizer != quantizer), None)
    return None if other is None else f"they were quantized by {other}, but the recipe has {quantizer}."


def explain_held(operation: Any, names: Sequence[str], recipe: Recipe) -> str:
    """For `explain()`, behind a comma, how weights are held; or nothing."""
    weights = [operation._parameters.get(name) for name in names]  # one that is computed is not computed for this
    reason = why_not_as_held([_as_held(weight) for weight in weights], recipe)
    if reason == "":
        return ""
    return ", weights held quantized" + (f" but dequantized ({reason.removesuffix('.')})" if reason else "")


def _as_held(weight: Tensor) -> Tensor:
    """This rank's part of a weight that is sharded and held quantized; else the weight."""
    shard = local_shard(weight)
    return weight if shard is None else shard


def _exchange(operation: Any, name: str, held: Tensor) -> Any:
    """Make `held` the parameter of this name, with the attributes of the one before."""
    before = held_parameter(operation, name)
    parameter = nn.Parameter(held, requires_grad=before.requires_grad)
    parameter.__dict__.update({k: v for k, v in before.__dict__.items() if k not in vars(parameter)})
    operation._parameters[name] = parameter  # in its place: `register_parameter` would take it for a new weight
    return parameter


def _own_state(operation: Any) -> QuantizerState:
    """The state of its weights' quantizer, for a weight that lives no longer than the operation."""
    proxy: Any = weakref.proxy(operation)
    return QuantizerState(proxy, Role.WEIGHT, operation.num_scales)


def _groups_of(names: Sequence[str], name: str) -> range | None:
    """Of the state's scales those of this weight; None for all."""
    group = names.index(name)
    return None if len(names) == 1 else range(group, group + 1)


def _quantizer_for(operation: Any, held_as: HeldAs) -> Quantizer | None:
    return (operation.recipe or held_as.recipe).quantizer(Role.WEIGHT)


def _empty_part(operation: Any, names: Sequence[str], name: str, quantizer: Quantizer, held_as: HeldAs) -> Any:
    """A DTensor for the codes of a weight that FSDP2 has sharded."""
    weight: Any = held_parameter(operation, name)
    dim = shard_dim(weight)
    source, groups = (_own_state(operation), _groups_of(names, name)) if quantizer.keeps_state else (None, None)
    sharding = sharding_of(weight.shape, cdiv(len(weight), weight.device_mesh.size(dim)), quantizer, source, groups)
    one = weight._local_tensor.new_zeros(1, *weight.shape[1:])
    like = quantize_weight(
        one, quantizer, source, range(1) if sharding.stacked else groups, columnwise=held_as.columnwise
    )
    return with_local(weight, empty_shard(like, sharding, len(weight._local_tensor)))
