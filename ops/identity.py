"""Identity: returns its input."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext


class Identity(BasicOperation):
    """y = x, quantized or not."""

    accepts_quantized = True
    accepts_integers = True

    def features(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(self, ctx: OperationContext, x: Any, extras: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        return x, {}

    def fuser_backward(self, ctx: OperationContext, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> BackwardOfBasic:
        return dy, {}, {}
