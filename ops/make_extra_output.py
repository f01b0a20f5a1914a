"""MakeExtraOutput: hands x on a second time, by a name. The beginning of a residual branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.operation import BackwardOfBasic, BasicOperation, OperationContext


class MakeExtraOutput(BasicOperation):
    """y = x, and x once more as the extra output `name`; dx = dy + d_name.

    A later operation of the same pipeline asks for the name (`AddExtraInput(name)`), or the caller does. Both outputs
    are x itself, not a copy.

    Raises ValueError for an empty name.
    """

    def __init__(self, name: str = "extra") -> None:
        super().__init__()
        if not name:
            raise ValueError("The name of the extra output is empty. Give one that a later operation asks for.")
        self.name = name
        self.extra_outputs = {name: Tensor}

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        return x, {self.name: x}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        d_extra = d_extra_outputs.get(self.name)
        if dy is None or d_extra is None:
            return dy if d_extra is None else d_extra, {}, {}
        return dy + d_extra, {}, {}

    def extra_repr(self) -> str:
        return repr(self.name)
