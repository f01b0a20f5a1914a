"""MakeExtraOutput: returns x also as a named extra output, as at the beginning of a residual branch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from ops.runner.set_once import SetOnce
from recipes.arguments import as_flag


class MakeExtraOutput(BasicOperation):
    """y = x, and x again as the extra output `name`; dx = dy + d_name.

    A later operation of the pipeline (`AddExtraInput(name)`) or the caller consumes the extra output. Both outputs are
    x itself, not a copy.

    in_place: backward may add dy into the memory of d_name instead of allocating a tensor. It does so only if this
    pipeline's backward has allocated that memory and nothing else uses it (not for a gradient that comes from autograd,
    is returned, or is still needed). The numbers are the same.

    Raises ValueError for an empty name.
    """

    accepts_integers = True
    repeatable = True
    repeats_alone = False

    name = SetOnce[str]("Call rename_extras, which gives the extra output another name.")

    def __init__(self, name: str = "extra", *, in_place: bool = False) -> None:
        super().__init__()
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r}, but must be a text. Pass a str.")
        if not name:
            raise ValueError("The name of the extra output is empty. Give one that a later operation asks for.")
        self.name = name
        self.in_place = in_place
        self.extra_outputs = {name: Tensor}

    @property
    def in_place(self) -> bool:
        return self.reuses_gradients

    @in_place.setter
    def in_place(self, in_place: bool) -> None:
        self.reuses_gradients = as_flag("in_place", in_place)

    def features(self, incoming: int | None) -> int | None:
        return incoming

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
        if self.name in ctx.own_gradients and d_extra.dtype == dy.dtype and dy.is_contiguous():
            return d_extra.add_(dy), {}, {}
        return dy + d_extra, {}, {}

    def extra_repr(self) -> str:
        return f"{self.name!r}, in_place=True" if self.reuses_gradients else repr(self.name)
