"""What all activations share as operations: they differ in their `Activation` and in whether they take scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from torch import Tensor

from ops.kernels.activation import Activation, activation, dactivation
from ops.operation import BackwardOfBasic, BasicOperation, OperationContext


class ActivationOperation(BasicOperation):
    """y = f(x), or f(x) * scales in subclasses that ask for the extra input `scales`, x.shape[:-1].

    Computed in float32 (float64 for float64) and rounded once. The formulas are in `ops.kernels.activation`.
    """

    class Saved(NamedTuple):
        x: Tensor
        scales: Tensor | None

    def __init__(self, activation: Activation) -> None:
        super().__init__()
        self.activation = activation

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        scales = extras.get("scales")
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, scales)
        return activation(x, self.activation, scales), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        x, scales = ctx.saved
        needs = ctx.needs
        dx, dscales, _ = dactivation(
            dy, x, self.activation, scales, need_dh=needs.input, need_dscales="scales" in needs.extras
        )
        return dx, {}, {} if scales is None else {"scales": dscales}

    def extra_repr(self) -> str:
        spec = self.activation
        given = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "kind"}
        return ", ".join(f"{n}={v}" for n, v in given.items() if v != getattr(Activation, n))
