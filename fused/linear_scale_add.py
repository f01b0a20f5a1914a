"""A residual branch that ends with Linear and a constant factor, forward and backward, in the products themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from fused.backward_linear_scale import scaled_gradients, why_not_scaled_products
from ops.add_extra_input import AddExtraInput
from ops.constant_scale import ConstantScale
from ops.linear import Linear
from ops.runner.operation import BackwardOfFused, BasicOperation, FusedOperation, OperationContext
from recipes.request import PlanRequest


class LinearScaleAdd(FusedOperation):
    """y = scale x W^T + extra; dx = scale dy W, dW = scale dy^T x, d_extra = dy.

    The scale is the products' alpha, the extra tensor the first one's addend, so y, dx and dW are rounded once. Memory
    is passed over by the products alone, but that y of 16 bits on a GPU is added to a product in float32: the library
    would round it before. Saves what the Linear saves: x. Under a recipe dy is quantized before
    it is scaled. Refused for a Linear with a bias, which is a second addend, for one that ranks divide, and as
    `why_not_scaled_products` says.
    """

    pattern = (Linear, ConstantScale, AddExtraInput)
    passes = "joint"
    handles_wgrad_accumulation = True
    handles_in_place = True
    accepts_quantized = True
    rounds_less = True

    def __init__(self, operations: Sequence[BasicOperation]) -> None:
        super().__init__(operations)
        self.linear = cast(Linear, operations[0])
        self.scale = cast(ConstantScale, operations[1]).scale
        self.add = cast(AddExtraInput, operations[2])

    def kernel(self, request: PlanRequest) -> str:
        return self.linear.kernel(request)

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        linear, constant, _ = operations
        if cast(Linear, linear).use_bias:
            return "Linear has a bias, and a product takes one addend before it is rounded: the extra tensor."
        return why_not_scaled_products(linear, cast(ConstantScale, constant), request)

    def fuser_forward(
        self, ctxs: Sequence[OperationContext], x: Any, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        extra = self.add.operand(ctxs[2], x, extras)
        assert extra is not None, "an AddExtraInput has one"
        self.add.check(torch.Size((*x.shape[:-1], self.linear.own_out_features)), extra)
        self.add.check_dtype(ctxs[2].dtype, extra)
        y = self.linear.fprop(ctxs[0], x, self.scale, extra)
        return y if self.add.in_place_input is None else extra.copy_(y), {}

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfFused:
        dx, gradients = scaled_gradients(self.linear, ctxs[0], dy, self.scale)
        d_extra = {self.add.operand_name: dy} if self.add.needs_operand(ctxs[2]) else {}
        return dx, (gradients, {}, {}), d_extra
