"""Backward of Linear followed by a constant factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor

from fused.linear_in_place import why_not_gathered
from ops.constant_scale import ConstantScale
from ops.linear import Linear, column_sums
from ops.products.product import commutes, quantizes
from ops.runner.context import held_parameter
from ops.runner.operation import BackwardOfFused, BasicOperation, FusedOperation, OperationContext
from recipes.request import PlanRequest


class BackwardLinearScale(FusedOperation):
    """dx = scale dy W, dW = scale dy^T x, db = scale sum(dy) over the rows, without computing scale dy first.

    Reads what the unfused Linear saves: x. Refused unless the scale is a power of two within the range of the dtype
    (see `ops.products.product.commutes`), and for recipes that quantize: otherwise the bits would differ.
    Refused for a Linear that gathers dy.
    """

    pattern = (Linear, ConstantScale)
    passes = "backward"
    handles_transfers = True
    handles_wgrad_accumulation = True

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        scale = cast(ConstantScale, operations[1]).scale
        if quantizes(request.recipe):
            return f"{request.recipe.name} quantizes dy times the scale, so that this has to be computed before."
        if torch.float16 in (request.dtype, held_parameter(operations[0], "weight").dtype):
            return "float16's range is small: dy times the scale may lose its last places, where the products do not."
        if not commutes(scale, request.dtype):
            return (
                f"The scale is {scale}, and behind a product only powers of two from 2^-32 to 2^32 round as before it."
            )
        return why_not_gathered(operations[0])

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfFused:
        linear, scale = cast(Linear, self.operations[0]), cast(ConstantScale, self.operations[1]).scale
        dx, gradients = linear.dgrad_and_wgrad(ctxs[0], dy, scale)
        if "bias" in ctxs[0].needs.params:
            gradients["bias"] = column_sums(dy).mul_(scale)
        return dx, (gradients, {}), {}
