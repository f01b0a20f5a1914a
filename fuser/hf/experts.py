"""The operations that compute what an experts module of transformers computes, on its own parameters."""
# T tokens, H hidden size, F expert width, E experts

from __future__ import annotations

import ctypes
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fuser.held_layers import as_constants, held_layer, hold, run_traced
from fuser.hf.bypassed import bypassed
from fuser.hf.gate import scaled_activation
from fuser.hf.transposed import TransposedGroupedLinear
from fuser.sequential import Sequential
from ops.combine import Combine
from ops.dispatch import Dispatch
from ops.grouped_linear import GroupedLinear
from ops.runner.not_traced import not_traced
from ops.runner.operation import BasicOperation
from ops.runner.tracing import NOT_TRACED, is_constant, why_changed_within
from recipes.recipe import Recipe
from recipes.registry import as_recipe


def experts_layer(experts: nn.Module, recipe: Recipe | str | None = None) -> Sequential:
    """Dispatch, GroupedLinear, an activation, GroupedLinear, Combine, whose parameters are those of `experts`.

    experts: an experts module of transformers 5, by its attributes: weights `gate_up_proj` (`up_proj` without a gate)
             and `down_proj`, [E, out, in], or [E, in, out] if `is_transposed`; `..._bias` if `has_bias`; the gate
    recipe:  of all operations, a Recipe or a name; None: that of the surrounding `fuser.autocast`

    It is made once; its operations are made anew when the module holds other tensors, because backward needs those that
    its forward read, or another activation. What a recipe keeps from step to step (the amaxes of delayed scaling) goes
    from one to the next.
    `experts_layer(experts).explain()` shows how it runs.

    Raises TypeError for a module that is none of the sort, NotImplementedError for experts with a norm behind them or
    with an activation that `fuser.hf.gate` does not find, RuntimeError for hooks or a forward that were put on `act_fn`
    and for an `_apply_gate` put on the module; ValueError and TypeError for a recipe as `fuser.autocast`.
    """
    check_experts(experts)
    chosen = None if recipe is None else as_recipe(recipe)
    tensors = tensors_of(experts)

    def make() -> list[BasicOperation]:
        return [operation.set_recipe(chosen) for operation in experts_operations(experts, tensors)]

    return held_layer(experts, chosen, settings_of(experts), tensors, make)


def experts_forward(
    recipe: Recipe | None,
    experts: nn.Module,
    hidden_states: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """y[t] = sum_k top_k_weights[t, k] expert_{top_k_index[t, k]}(hidden_states[t]), [T, H] in the dtype of the input.

    hidden_states: [T, H]; top_k_index: [T, topk] integers in [0, E], of which E is no expert; top_k_weights: [T, topk]

    Raises as `experts_layer`, and as the operations do.
    """
    extras, y = {"indices": top_k_index, "probs": top_k_weights}, None
    if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
        stages_of = partial(_traced_stages, id(experts), recipe, as_constants(settings_of(experts)))
        y = run_traced(experts, stages_of, tensors_of(experts), hidden_states, extras)
    if y is None:
        y = _run(experts, recipe, hidden_states, extras)
    return y.to(hidden_states.dtype)


def check_experts(experts: Any) -> None:
    """Raise TypeError for a module that is no experts module, NotImplementedError for one with a norm behind it,
    RuntimeError for one with something on its activation that does not run here."""
    if not hasattr(experts, "is_transposed") or not hasattr(experts, "has_gate"):
        raise TypeError(
            f"{type(experts).__name__} is no experts module of transformers 5: it has no `is_transposed` and "
            "`has_gate`, which its decorator `use_experts_implementation` gives. Pass the module that holds "
            "`down_proj`."
        )
    # Releases of transformers without such a norm have no such mark.
    if getattr(experts, "has_post_expert_norm", False):
        raise NotImplementedError(
            f"{type(experts).__name__} normalizes what each expert returns before it is weighted; here it is weighted "
            "before the last product. Choose another implementation for this model: "
            'model.set_experts_implementation("grouped_mm").'
        )
    activation = getattr(experts, "act_fn", None)
    what = bypassed(activation) if isinstance(activation, nn.Module) else None
    found = None if what is None else f"act_fn has {what}"
    if "_apply_gate" in experts.__dict__:
        found = "_apply_gate was replaced on the module"
    if found is not None:
        raise RuntimeError(
            f"{type(experts).__name__}.{found}, but the activation runs fused with the products, without a call of it. "
            "Undo that; or leave the blocks of this model as they were, and choose another implementation: "
            'model.set_experts_implementation("grouped_mm").'
        )


def settings_of(experts: Any) -> tuple[Any, ...]:
    """What `experts_operations` are made of beside the tensors."""
    of_activation = [getattr(experts, name, None) for name in ("act_fn", "limit", "alpha")]
    return (experts.has_gate, experts.has_bias, experts.is_transposed, *of_activation)


def tensors_of(experts: Any) -> tuple[Tensor, ...]:
    """The two weights, each followed by its bias if it has one: the parameters of `experts_operations`, in order.

    Each attribute is read once: a parametrization computes its tensor anew at each access.
    """
    first = "gate_up_proj" if experts.has_gate else "up_proj"
    kinds = ("", "_bias") if experts.has_bias else ("",)
    return tuple([getattr(experts, name + kind) for name in (first, "down_proj") for kind in kinds])


def experts_operations(experts: Any, tensors: tuple[Tensor, ...]) -> tuple[BasicOperation, ...]:
    """Dispatch, GroupedLinear, an activation, GroupedLinear, Combine over these tensors of `experts`."""
    bias = bool(experts.has_bias)
    kind = TransposedGroupedLinear if experts.is_transposed else GroupedLinear
    linears: list[GroupedLinear] = []
    step = 1 + bias
    for weight, *biases in (tensors[:step], tensors[step:]):
        num_experts, *features = weight.shape
        inputs, outputs = features if experts.is_transposed else features[::-1]
        linear = kind(num_experts, inputs, outputs, bias=bias, scale_bias=bias and bool(linears), device="meta")
        hold(linear, {"weight": weight} | ({"bias": biases[0]} if bias else {}))
        linears.append(linear)
    fc1, fc2 = linears
    return Dispatch(fc1.num_groups, empty_slots=True), fc1, scaled_activation(experts), fc2, Combine()


@is_constant
def _traced_stages(
    identity: int, recipe: Recipe | None, settings: tuple[Any, ...], *seen: Any
) -> tuple[Any, ...] | str:
    """identity: the id of the experts, which are alive: torch 2.11 hands no module on but as `self`"""
    experts = ctypes.cast(identity, ctypes.py_object).value
    why = why_changed_within(experts, settings, as_constants(settings_of(experts)))
    return why or experts_layer(experts, recipe).traced_stages(*seen)


@not_traced(NOT_TRACED)
def _run(experts: nn.Module, recipe: Recipe | None, x: Tensor, extras: dict[str, Tensor]) -> Tensor:
    return experts_layer(experts, recipe)(x, **extras)
