"""AddExtraInput: adds a named tensor to x. The end of a residual branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.operation import BackwardOfBasic, BasicOperation, OperationContext


class AddExtraInput(BasicOperation):
    """y = x + extra, for the extra input `name` of x's shape; dx = d_extra = dy.

    The sum of different dtypes is computed in the wider one and rounded once.

    Raises ValueError for an empty name, and for shapes that differ: nothing is broadcast.
    """

    def __init__(self, name: str = "extra") -> None:
        super().__init__()
        if not name:
            raise ValueError("The name of the extra input is empty. Give that of an earlier operation's extra output.")
        self.name = name
        self.extra_inputs = {name: Tensor}

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        extra = extras[self.name]
        if extra.shape != x.shape:
            raise ValueError(
                f"{self.name} has shape {list(extra.shape)}, but x has shape {list(x.shape)}. "
                "They must be equal; expand one of them before."
            )
        return (x + extra).to(ctx.dtype), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        return dy, {}, {self.name: dy}

    def extra_repr(self) -> str:
        return repr(self.name)
