"""Mixture-of-experts blocks of transformers as one Sequential each, from the router to the sum over the experts."""
# T tokens, H hidden size, E experts

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fuser.held_layers import as_constants, held_layer, run_traced
from fuser.hf.bypassed import bypassed
from fuser.hf.experts import check_experts, experts_operations, settings_of, tensors_of
from fuser.hf.routers import FORMS, BlockForm, count_beside, form_of, make_router, router_settings, router_tensors
from fuser.sequential import Sequential
from fuser.sequentials import add_finder
from ops.router import Router
from ops.runner.not_traced import not_traced
from ops.runner.operation import BasicOperation
from ops.runner.tracing import NOT_TRACED, is_constant, why_changed_within
from recipes.recipe import HighPrecision, Recipe
from recipes.registry import as_recipe


class MoEBlock(nn.Module):
    """Replaces a block of transformers, and holds the same modules under the same names.

        y = Combine(experts(Dispatch(x, Router(x)))) + shared_experts(x)        x, y: [batch, sequence, H]

    Without shared experts the second summand is left out; gpt-oss returns (y, probs [T, topk]). The parameters, and so
    the state dict, are those of the modules held; their `forward` is not called, that of shared experts is. Forward
    hooks of the router, by which transformers records `router_logits`, are called with what it would have returned:
    (logits [T, E], probs [T, topk], indices [T, topk]), logits and probs in float32.

    Settings of the router and the activation are read at each call.

    Raises RuntimeError for other hooks of the router, the experts and their activation, for hooks that return something
    in place of the router's output, for a `forward` of one of these that was replaced on the module (accelerate's hooks
    that only move tensors to a device are allowed), and what the operations raise.
    """

    def __init__(self, block: nn.Module, form: BlockForm, recipe: Recipe | None) -> None:
        super().__init__()
        for name, module in block.named_children():
            self.add_module(name, module)
        self.kind = type(block).__name__
        self.jitter_noise = float(getattr(block, "jitter_noise", 0.0))
        self.recipe = recipe
        self.training = block.training
        add_finder(_layer_of_block)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        add_finder(_layer_of_block)

    def layer(self) -> Sequential:
        """Router, Dispatch, GroupedLinear, an activation, GroupedLinear, Combine; for `layer().explain()`."""
        form: BlockForm = FORMS[self.kind]
        gate: Any = self.get_submodule(form.router)
        self._check_parts(gate)
        tensors = tensors_of(self.experts)
        one_dtype = gate.weight.dtype == tensors[0].dtype

        def make() -> list[BasicOperation]:
            router = make_router(form, gate).set_recipe(self.recipe)
            operations = [operation.set_recipe(self.recipe) for operation in experts_operations(self.experts, tensors)]
            if not one_dtype:
                # Another recipe is another pipeline, with a dtype of its own. A Router computes alike under every one.
                router.set_recipe(None if isinstance(self.recipe, HighPrecision) else HighPrecision())
            return [router, *operations]

        of_router = router_tensors(gate).values()
        layer = held_layer(self, (self.recipe, one_dtype), self._settings(form, gate), (*of_router, *tensors), make)
        router = layer[0]
        assert isinstance(router, Router), "the layer begins with it"
        count_beside(router, gate)
        return layer

    def forward(self, hidden_states: Tensor) -> Any:
        form = FORMS[self.kind]
        gate = self.get_submodule(form.router)
        self._check_hooks(form, gate)
        if self.training and self.jitter_noise > 0:
            low, high = 1.0 - self.jitter_noise, 1.0 + self.jitter_noise
            hidden_states = hidden_states * torch.empty_like(hidden_states).uniform_(low, high)
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        names: tuple[str, ...] = ("probs",) if form.returns_scores else ()
        if gate._forward_hooks:
            names = ("logits", "probs", "indices")
        result = None
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            settings = as_constants((self.recipe, *self._settings(form, gate)))
            stages_of = partial(self._traced_stages, settings)
            tensors = (*router_tensors(gate).values(), *tensors_of(self.experts))
            result = run_traced(self, stages_of, tensors, x, {}, names)
        if result is None:
            result = self._run(x, names)
        y, made = result if names else (result, {})
        if gate._forward_hooks:
            _call_forward_hooks(gate, x, tuple(made[name] for name in names))
        y = y.to(hidden_states.dtype).view(hidden_states.shape)
        if form.shared is not None:
            y = y + self.get_submodule(form.shared)(hidden_states)
        return (y, made["probs"]) if form.returns_scores else y

    @is_constant
    def _traced_stages(self, settings: tuple[Any, ...], *seen: Any) -> tuple[Any, ...] | str:
        form = FORMS[self.kind]
        now = self.recipe, *self._settings(form, self.get_submodule(form.router))
        return why_changed_within(self, settings, as_constants(now)) or self.layer().traced_stages(*seen)

    @not_traced(NOT_TRACED)
    def _run(self, x: Tensor, outputs: tuple[str, ...]) -> Any:
        return self.layer()(x, outputs=outputs)

    def _settings(self, form: BlockForm, gate: nn.Module) -> tuple[Any, ...]:
        """What the operations are made of beside the tensors."""
        return (*router_settings(form, gate).values(), *settings_of(self.experts))

    def _check_parts(self, gate: nn.Module) -> None:
        for module in (gate, self.experts):
            if not type(module).__module__.startswith("transformers.models."):
                raise NotImplementedError(
                    f"{self.kind} holds a {type(module).__name__}, whose own computation would be left out: its router "
                    "and its experts must be those of transformers. Leave such a block as it was, and use "
                    'model.set_experts_implementation("fuser"), which runs adapters too.'
                )
        check_experts(self.experts)

    def _check_hooks(self, form: BlockForm, gate: nn.Module) -> None:
        found = {
            form.router: bypassed(gate, called="_forward_hooks"),
            "experts": bypassed(self.get_submodule("experts")),
        }
        for name, what in found.items():
            if what is not None:
                raise RuntimeError(
                    f"{self.kind}.{name} has {what}, but a replaced block does not call this module. Put "
                    f"{'the hooks' if 'hooks' in what else 'it'} on the block, or leave the block as it was and use "
                    'model.set_experts_implementation("fuser").'
                )

    def extra_repr(self) -> str:
        return f"of={self.kind}, recipe={self.recipe}"


def replace_moe_blocks(model: nn.Module, recipe: Recipe | str | None = None) -> nn.Module:
    """Replace the mixture-of-experts blocks of a model of transformers by `MoEBlock`s, in place; return the model.

    recipe: of their operations, a Recipe or a name; None: that of the surrounding `fuser.autocast`. Of blocks that are
            replaced already it is changed.

    Routers are computed in float32, others keep the model's dtype. Parameters, state dict, `output_router_logits`,
    `save_pretrained` and gradient checkpointing are as before; what was saved loads into a model of transformers,
    replaced or not. `set_experts_implementation` no longer has an effect on these blocks.

    Raises ValueError for a model without such a block, NotImplementedError for blocks with experts of another kind and
    for experts as `fuser.hf.experts_layer`, RuntimeError for blocks with hooks or a `forward` of their own, ValueError
    or TypeError for what is no recipe; all before anything changes.
    """
    chosen = None if recipe is None else as_recipe(recipe)
    found = {name: module for name, module in model.named_modules() if isinstance(module, MoEBlock)}
    made = {
        module: MoEBlock(module, form, chosen)
        for module in model.modules()
        if not isinstance(module, MoEBlock) and (form := form_of(module)) is not None
    }
    inside = {id(child) for block in (*found.values(), *made) for child in block.modules()}
    for name, module in model.named_modules():
        if hasattr(module, "is_transposed") and hasattr(module, "has_gate") and id(module) not in inside:
            raise NotImplementedError(
                f"{name} ({type(module).__name__}) belongs to no block that can be replaced: {', '.join(FORMS)}. Use "
                'model.set_experts_implementation("fuser"), which keeps the router of the model.'
            )
        if module in made and (what := bypassed(module)) is not None:
            raise RuntimeError(
                f"{name} ({type(module).__name__}) has {what}, which the block that replaces it would not have. Take "
                "that off, replace the blocks, and put it on these."
            )
    if not found and not made:
        raise ValueError(
            f"{type(model).__name__} has no mixture-of-experts block that can be replaced: {', '.join(FORMS)}. "
            "Give a model that holds one."
        )
    for block in made.values():
        block.layer()
    for block in found.values():
        block.recipe = chosen
    for parent in list(model.modules()):
        for name, module in parent.named_children():
            if module in made:
                setattr(parent, name, made[module])
    return model


def _layer_of_block(module: nn.Module) -> Sequential | None:
    return module.layer() if isinstance(module, MoEBlock) else None


def _call_forward_hooks(gate: nn.Module, x: Tensor, output: tuple[Tensor, ...]) -> None:
    for key, hook in tuple(gate._forward_hooks.items()):
        with_kwargs = key in gate._forward_hooks_with_kwargs
        changed = hook(gate, (x,), {}, output) if with_kwargs else hook(gate, (x,), output)
        if changed is not None:
            raise RuntimeError(
                f"A forward hook of {type(gate).__name__} returned a {type(changed).__name__} to take the place of the "
                "router's output, but a replaced block has used that already. Leave the block as it was, and use "
                'model.set_experts_implementation("fuser").'
            )
