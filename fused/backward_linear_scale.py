"""Backward of Linear followed by a constant factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from fused.linear_in_place import why_not_gathered
from ops.constant_scale import ConstantScale
from ops.linear import Linear
from ops.runner.built_in import why_not_method
from ops.runner.operation import BackwardOfFused, BasicOperation, FusedOperation, OperationContext
from recipes.recipe import Role
from recipes.request import PlanRequest


class BackwardLinearScale(FusedOperation):
    """dx = scale dy W, dW = scale dy^T x, db = scale sum(dy) over the rows, without computing scale dy first.

    Reads what the unfused Linear saves: x. The scale is the products' alpha, so that each gradient is rounded once.
    Under a recipe dy is quantized before it is scaled. Refused for a Linear that gathers dy, and as
    `why_not_scaled_products` says.
    """

    pattern = (Linear, ConstantScale)
    passes = "backward"
    handles_transfers = True
    handles_wgrad_accumulation = True
    rounds_less = True

    def kernel(self, request: PlanRequest) -> str:
        return self.operations[0].kernel(request)

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        linear, constant = operations
        return why_not_scaled_products(linear, cast(ConstantScale, constant), request) or why_not_gathered(linear)

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfFused:
        linear, constant = self.operations
        dx, gradients = scaled_gradients(cast(Linear, linear), ctxs[0], dy, cast(ConstantScale, constant).scale)
        return dx, (gradients, {}), {}


def why_not_scaled_products(linear: BasicOperation, constant: ConstantScale, request: PlanRequest) -> str | None:
    """Why the products of a Linear cannot be scaled instead of y and dy, or None."""
    if why := why_not_method(linear, "fprop", "dgrad_and_wgrad", "bias_gradient"):
        return why
    if constant.scale == 0:
        return "The scale is 0, for which a product does not read its operands: what is NaN or Inf there would be lost."
    quantizer = request.recipe.quantizer(Role.GRAD_OUTPUT)
    if quantizer is not None and quantizer.keeps_state:
        return f"{request.recipe.name} keeps the amaxes of dy times the scale, and those of dy are others."
    return None


def scaled_gradients(
    linear: Linear, ctx: OperationContext, dy: Tensor, scale: float
) -> tuple[Tensor | None, dict[str, Tensor | None]]:
    """scale dy W, and the gradients of the Linear's parameters of scale dy."""
    dx, gradients = linear.dgrad_and_wgrad(ctx, dy, scale)
    if "bias" in ctx.needs.params:
        gradients["bias"] = linear.bias_gradient(dy) * scale
    return dx, gradients
