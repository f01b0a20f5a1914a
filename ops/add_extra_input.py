"""AddExtraInput: adds a named tensor to x, as at the end of a residual branch."""

from __future__ import annotations

import torch
from torch import Tensor

from ops.elementwise import ElementwiseOperation
from ops.kernels.elementwise.chain import Step
from ops.kernels.elementwise.chain_steps import ADD_ELEMENT
from ops.runner.set_once import SetOnce
from recipes.arguments import as_flag


class AddExtraInput(ElementwiseOperation):
    """y = x + extra, where the extra input `name` has x's shape; dx = d_extra = dy.

    If the dtypes differ, the sum is computed in the wider one and rounded once.

    in_place: add x into the memory of the extra tensor, and return that tensor as y. Everything that reads the extra
    tensor later, inside or outside of the pipeline, reads y.

    Raises ValueError for an empty name, and for different shapes: nothing is broadcast. In place also ValueError for
    an extra tensor of another dtype or with overlapping elements, and RuntimeError where its old values are still
    needed: a leaf that requires grad, a view of the caller's memory, an inference tensor outside of inference mode, or
    memory that an operation of the pipeline has saved or another extra tensor shares. Nothing is written before these
    checks. Tensors saved outside of the pipeline are checked by autograd in backward.
    """

    grad_is_identity = True
    repeatable = True
    repeats_alone = False

    name = SetOnce[str]("Call rename_extras, which gives the extra input another name.")

    def __init__(self, name: str = "extra", *, in_place: bool = False) -> None:
        super().__init__()
        if not isinstance(name, str):
            raise TypeError(f"name is {name!r}, but must be a text. Pass a str.")
        if not name:
            raise ValueError("The name of the extra input is empty. Give that of an earlier operation's extra output.")
        self.name = self.operand_name = name
        self.in_place = in_place
        self.extra_inputs = {name: Tensor}

    @property
    def in_place(self) -> bool:
        return self.in_place_input is not None

    @in_place.setter
    def in_place(self, in_place: bool) -> None:
        self.in_place_input = self.name if as_flag("in_place", in_place) else None

    def step(self) -> Step:
        return ADD_ELEMENT

    def check(self, shape: torch.Size, operand: Tensor | None) -> None:
        assert operand is not None, "the extra input"
        if operand.shape != shape:
            raise ValueError(
                f"{self.name} has shape {list(operand.shape)}, but x has shape {list(shape)}. "
                "They must be equal; expand one of them before."
            )

    def compute(self, x: Tensor, operand: Tensor | None) -> Tensor:
        assert operand is not None, "the extra input"
        if self.in_place_input is None:
            return (x + operand).to(x.dtype)
        self.check_dtype(x.dtype, operand)
        return operand.add_(x)

    def check_dtype(self, dtype: torch.dtype, operand: Tensor) -> None:
        """Raise ValueError if x of this dtype cannot be added in the operand's memory, where that is to be."""
        if self.in_place_input is not None and operand.dtype != dtype:
            raise ValueError(
                f"{self.name} is {operand.dtype}, but x is {dtype}, and in place both must be the same. "
                f"Give {self.name} in x's dtype, or in_place=False."
            )

    def gradients(
        self, dy: Tensor, x: Tensor | None, operand: Tensor | None, *, need_dx: bool, need_operand: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return dy, dy

    def extra_repr(self) -> str:
        return repr(self.name) if self.in_place_input is None else f"{self.name!r}, in_place=True"
