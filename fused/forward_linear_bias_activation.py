"""Forward of Linear, Bias and an activation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from fused.linear_in_place import add_in_place, why_not_bias, why_not_scaled
from ops.activations import ActivationOperation
from ops.bias import Bias
from ops.linear import Linear
from ops.runner.in_place import writable
from ops.runner.operation import BasicOperation, FusedOperation, OperationContext, optional
from recipes.request import PlanRequest


class ForwardLinearBiasActivation(FusedOperation):
    """h = x W^T + b, y = f(h), where b is the Linear's own bias, a following Bias, both or neither.

    The Bias is added in the memory of the product. Saves what the unfused operations save: x and h.
    Refused for an activation with scales, and for a Bias whose dtype differs from the Linear's.
    """

    pattern = (Linear, optional(Bias), ActivationOperation)
    passes = "forward"
    handles_transfers = True
    handles_adapters = True
    accepts_quantized = True

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        return why_not_scaled(operations[-1]) or why_not_bias(operations)

    def fuser_forward(
        self, ctxs: Sequence[OperationContext], x: Any, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        linear, *biases, activation = self.operations
        h = cast(Linear, linear).fprop(ctxs[0], x)
        h = writable(h) if biases else h
        for bias in biases:
            add_in_place(cast(Bias, bias), ctxs[1], h, extras)
        return activation.fuser_forward(ctxs[-1], h, extras)
