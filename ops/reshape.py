"""Reshape: the same elements in another shape."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from torch import Tensor

from ops.runner.checked import Checked
from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from recipes.arguments import as_integer


def as_shape(name: str, shape: object) -> tuple[int, ...]:
    """A shape as a tuple, in which -1 stands for one size at most. Raises as `Reshape` does."""
    if not isinstance(shape, Sequence) or isinstance(shape, str):
        raise TypeError(f"{name} is {shape!r}, but must be a sequence of integers. Pass a tuple of sizes.")
    sizes = tuple(as_integer(f"a size of {name}", size) for size in shape)
    if sizes.count(-1) > 1 or any(size < -1 for size in sizes):
        raise ValueError(
            f"{name} is {sizes}, but holds sizes of zero or more, and -1 once at most. Give the other sizes as numbers."
        )
    return sizes


class Reshape(BasicOperation):
    """y = x.reshape(shape), dx = dy.reshape(x.shape).

    shape: all dimensions of y, rows included; one of them may be -1, and is inferred from x

    Raises TypeError for a shape that is not a sequence of integers, ValueError for an invalid shape, and for an x with
    another number of elements.
    """

    accepts_integers = True

    shape = Checked(as_shape)

    def __init__(self, shape: Sequence[int]) -> None:
        super().__init__()
        self.shape = shape

    def features(self, incoming: int | None) -> int | None:
        return self.shape[-1] if self.shape and self.shape[-1] >= 0 else None

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        given = prod(size for size in self.shape if size != -1)
        fits = given and x.numel() % given == 0 if -1 in self.shape else x.numel() == given
        if not fits:
            raise ValueError(
                f"x has shape {list(x.shape)}, {x.numel()} elements, which cannot take the shape {list(self.shape)}. "
                "Give a shape of as many elements; -1 stands for one size that follows from the others."
            )
        ctx.x_shape = tuple(x.shape)
        return x.reshape(self.shape), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        return dy.reshape(ctx.x_shape), {}, {}

    def extra_repr(self) -> str:
        return str(self.shape)
