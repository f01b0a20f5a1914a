"""AddExtraInput: adds an extra input to x."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.operation import BackwardOfBasic, BasicOperation, OperationContext


class AddExtraInput(BasicOperation):
    """y = x + the extra input `name`, of x's shape; both gradients are dy. Closes a residual connection.

    The extra input is not cast; the sum is rounded once to x's dtype. Raises ValueError if the shapes differ.
    """

    def __init__(self, name: str = "extra") -> None:
        super().__init__()
        self.name = name
        self.extra_inputs = {name: Tensor}

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        extra = extras[self.name]
        if extra.shape != x.shape:
            raise ValueError(
                f"The extra input {self.name!r} has shape {list(extra.shape)}, but x has {list(x.shape)}. "
                "Give tensors of one shape."
            )
        y = x + extra
        return (y if y.dtype == ctx.dtype else y.to(ctx.dtype)), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        return dy, {}, {self.name: dy}

    def extra_repr(self) -> str:
        return repr(self.name)
