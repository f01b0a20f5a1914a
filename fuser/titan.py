"""The override of torchtitan that runs its routed experts: `--override.imports fuser.titan.experts`.

Written for torchtitan's main branch from its pull request 4539 (September 2026) on, in which `RoutedExperts` holds two
`GroupedLinear`, `w13` and `w2`. Importing it registers the override, and torchtitan applies it where it is named.
"""
# T tokens, R routed rows, D model dimension, F expert width, E experts

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fuser.held_layers import as_constants, held_layer, hold, run_traced
from fuser.sequential import Sequential
from fuser.sequentials import add_finder
from ops.activations import SwiGLU
from ops.grouped_linear import GroupedLinear
from ops.runner.context import OperationContext
from ops.runner.not_traced import not_traced
from ops.runner.operation import BasicOperation
from ops.runner.tracing import NOT_TRACED, is_constant, why_changed_within
from recipes.registry import as_recipe

try:
    from torchtitan.config import derive, override
    from torchtitan.models.common.activation import SwiGLU as TitanSwiGLU
    from torchtitan.models.common.linear import GroupedLinear as TitanGroupedLinear
    from torchtitan.models.common.moe import RoutedExperts
    from torchtitan.protocols.module import Module
except ImportError as error:
    raise ImportError(
        "fuser.titan needs torchtitan's main branch from its pull request 4539 (September 2026) on, in which "
        f"RoutedExperts holds two GroupedLinear; install that. Importing it: {error}."
    ) from error

_CONFIGURED = {"w13", "w2", "token_dispatcher", "activation_fn"}


class Experts(RoutedExperts):
    """torchtitan's RoutedExperts, whose two products and SwiGLU are one Sequential under a recipe.

        y = combine(W2_e (silu(W1_e x) * W3_e x))      x, y: [T, D];  w13.weight: [E, 2, F, D];  w2.weight: [E, D, F]

    Parameters, their names, initializers and shardings, and the token dispatcher are torchtitan's. Operands are bf16,
    as torchtitan casts them. Parameters that are DTensors are read as the local tensors that they hold.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(RoutedExperts.Config):
        """recipe: the name of a recipe; None: that of the surrounding `fuser.autocast`, without one bf16."""

        recipe: str | None = None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.recipe = None if config.recipe is None else as_recipe(config.recipe)

    def layer(self) -> Sequential:
        """GroupedLinear, SwiGLU, GroupedLinear over the parameters; for `layer().explain()`."""
        tensors = _tensors_of(self)

        def make() -> list[BasicOperation]:
            w13, w2 = (_linear(tensor) for tensor in tensors)
            return [operation.set_recipe(self.recipe) for operation in (w13, SwiGLU(), w2)]

        return held_layer(self, self.recipe, (), tensors, make)

    def forward(
        self,
        x_TD: Tensor,
        topk_scores_TK: Tensor,
        topk_expert_ids_TK: Tensor,
        num_local_tokens_per_expert_E: Tensor,
    ) -> Tensor:
        """As RoutedExperts: [T, D] in the dtype of x_TD."""
        rows_RD, sizes, metadata = self.token_dispatcher.dispatch(
            x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E
        )
        extras, y_RD = {"split_sizes": sizes.to(torch.int32)}, None
        # Only parameters in float32 differ by it: those that FSDP2 gathers in bf16 are used as they are.
        with torch.autocast(rows_RD.device.type, torch.bfloat16):
            if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
                stages_of = partial(self._traced_stages, as_constants((self.recipe,)))
                y_RD = run_traced(self, stages_of, _tensors_of(self), rows_RD.bfloat16(), extras)
            if y_RD is None:
                y_RD = _run(self, rows_RD.bfloat16(), extras)
        return self.token_dispatcher.combine(y_RD.type_as(rows_RD), metadata, x_TD)

    @is_constant
    def _traced_stages(self, settings: tuple[Any, ...], *seen: Any) -> tuple[Any, ...] | str:
        why = why_changed_within(self, settings, as_constants((self.recipe,)))
        return why or self.layer().traced_stages(*seen)


@override(
    target=RoutedExperts.Config,
    exact=True,
    description="The grouped MLP of the routed experts by fuser-ops, under a recipe.",
)
def experts(cfg: Any, *, recipe: str | None = None) -> Any:
    """The override: `--override.imports 'fuser.titan.experts={"recipe": "mxfp8"}'`.

    Raises ValueError for what is no recipe's name, NotImplementedError for experts with another activation, with
    projections that a converter has replaced, and with settings that this version does not know.
    """
    if recipe is not None:
        as_recipe(recipe)
    reason = _why_not(cfg)
    if reason is not None:
        raise NotImplementedError(
            f"fuser.titan.experts cannot replace these routed experts: {reason} Leave the override out for this model."
        )
    return derive(cfg, Experts.Config, recipe=recipe)


class _Projections(GroupedLinear):
    """A GroupedLinear whose weight is stored as [E, 2, F, D] and read as the view [E, 2 F, D]."""

    accepts_gathered = True

    def read(self, ctx: OperationContext, names: tuple[str, ...]) -> Tensor:
        return ctx.param(names[0]).flatten(1, -2)

    def weight_gradients(self, dw: Tensor) -> dict[str, Tensor]:
        return {"weight": dw.unflatten(1, (2, -1))}


def _linear(weight: Tensor) -> GroupedLinear:
    """Over `weight`: [E, 2, F, D] or [E, N, K]."""
    num_experts, *outputs, inputs = weight.shape
    features = torch.Size(outputs).numel()
    kind = GroupedLinear if len(outputs) == 1 else _Projections
    linear = kind(num_experts, inputs, features, bias=False, device="meta")
    hold(linear, {"weight": weight})
    return linear


def _tensors_of(module: Any) -> tuple[Tensor, Tensor]:
    weights = (module.w13.weight, module.w2.weight)
    first, second = (weight.to_local() if hasattr(weight, "to_local") else weight for weight in weights)
    return first, second


def _why_not(cfg: Any) -> str | None:
    """Why these experts do not compute what `Experts` computes; None if they do."""
    if type(cfg.activation_fn) is not TitanSwiGLU.Config:
        return f"their activation is {type(cfg.activation_fn).__qualname__}, and this is SwiGLU."
    for name in ("w13", "w2"):
        kind = type(getattr(cfg, name))
        if kind is not TitanGroupedLinear.Config:
            return (
                f"{name} is {kind.__module__}.{kind.__qualname__}, whose own computation would be left out. If a "
                "converter for a number format made it, leave that out and give the override a recipe."
            )
    base = {field.name for field in fields(Module.Config)}
    for field in fields(RoutedExperts.Config):
        if field.name not in base | _CONFIGURED and getattr(cfg, field.name) is not None:
            return f"they have {field.name}={getattr(cfg, field.name)!r}, which would be left out."
    return None


@not_traced(NOT_TRACED)
def _run(module: Experts, x: Tensor, extras: dict[str, Tensor]) -> Tensor:
    return module.layer()(x, **extras)


def _layer_of_experts(module: nn.Module) -> Sequential | None:
    return module.layer() if isinstance(module, Experts) else None


add_finder(_layer_of_experts)
