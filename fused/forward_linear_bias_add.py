"""Forward of a residual branch that ends with Linear and Bias."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from fused.linear_in_place import add_in_place, why_not_bias
from ops.add_extra_input import AddExtraInput
from ops.bias import Bias
from ops.elementwise import ElementwiseOperation
from ops.linear import Linear
from ops.runner.in_place import writable
from ops.runner.operation import BasicOperation, FusedOperation, OperationContext, optional
from recipes.request import PlanRequest


class ForwardLinearBiasAdd(FusedOperation):
    """y = x W^T + b + extra, where b is the Linear's own bias, a following Bias, both or neither.

    Bias and extra tensor are added in the memory of the product, each sum rounded as in the unfused operations. Saves
    what these save: x. Refused for a Bias whose dtype differs from the Linear's.
    """

    pattern = (Linear, optional(Bias), AddExtraInput)
    passes = "forward"
    handles_transfers = True
    handles_adapters = True
    handles_in_place = True
    accepts_quantized = True

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        return why_not_bias(operations)

    def fuser_forward(
        self, ctxs: Sequence[OperationContext], x: Any, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        y = writable(cast(Linear, self.operations[0]).fprop(ctxs[0], x))
        for operation, ctx in zip(self.operations[1:], ctxs[1:], strict=True):
            y = add_in_place(cast(ElementwiseOperation, operation), ctx, y, extras)
        return y, {}
