"""Forward of a residual branch that ends with Linear and a constant factor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from fused.linear_in_place import add_in_place, operand_of, why_not_bias
from ops.add_extra_input import AddExtraInput
from ops.bias import Bias
from ops.constant_scale import ConstantScale
from ops.linear import Linear
from ops.products.product import commutes
from ops.runner.in_place import writable
from ops.runner.operation import BasicOperation, FusedOperation, OperationContext, optional
from recipes.request import PlanRequest


class ForwardLinearScaleAdd(FusedOperation):
    """y = scale (x W^T + b) + extra, where b is the Linear's own bias, a following Bias, both or neither.

    A power of two is applied by the GEMM as alpha, which is exact (see `ops.products.product.commutes`). Any other
    scale is multiplied, and the extra tensor added, in the memory of the product, each rounded as in the unfused
    operations. Saves what these save: x. Refused for a Bias whose dtype differs from the Linear's.
    """

    pattern = (Linear, optional(Bias), ConstantScale, AddExtraInput)
    passes = "forward"
    handles_transfers = True
    accepts_quantized = True

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        return why_not_bias(operations)

    def fuser_forward(
        self, ctxs: Sequence[OperationContext], x: Any, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        linear, *biases, constant, add = self.operations
        scale = cast(ConstantScale, constant).scale
        alpha = scale if commutes(scale, ctxs[0].dtype) else 1.0
        y = writable(cast(Linear, linear).fprop(ctxs[0], x, alpha))
        for bias in biases:
            add_in_place(cast(Bias, bias), ctxs[1], y, extras, alpha)
        operand_of(cast(ConstantScale, constant), ctxs[-2], y, extras)
        if alpha != scale:
            y.mul_(scale)
        add_in_place(cast(AddExtraInput, add), ctxs[-1], y, extras)
        return y, {}
