"""MakeExtraOutput: hands x on twice, along the main line and as an extra output."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.operation import BackwardOfBasic, BasicOperation, OperationContext


class MakeExtraOutput(BasicOperation):
    """y = x, and the extra output `name` = x; dx is the sum of both gradients. Opens a residual connection.

    A later `AddExtraInput(name)` of the same Sequential closes it.
    """

    def __init__(self, name: str = "extra") -> None:
        super().__init__()
        self.name = name
        self.extra_outputs = {name: Tensor}

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        return x, {self.name: x}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        d = d_extra_outputs.get(self.name)
        if dy is None or d is None:
            return (d if dy is None else dy), {}, {}
        return dy + d, {}, {}

    def extra_repr(self) -> str:
        return repr(self.name)
