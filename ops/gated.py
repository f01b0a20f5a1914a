"""What the activation operations have in common: one formula (`ops.kernels.activation`), with a scale a row or not."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ops.kernels.activation import Activation, activation, dactivation
from ops.operation import BackwardOfBasic, BasicOperation, OperationContext


class ActivationOperation(BasicOperation):
    """act = f(x), f as `activation` says. Saves x alone."""

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
        dx, dscales, _ = dactivation(dy, x, self.activation, scales, need_dscales="scales" in ctx.needs.extras)
        return dx, {}, {"scales": dscales}


class ScaledActivationOperation(ActivationOperation):
    """act = f(x) * scales, with the extra input scales, one for each row of x (shape x.shape[:-1], any float dtype)."""

    extra_inputs = {"scales": Tensor}
