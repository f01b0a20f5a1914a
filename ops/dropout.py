"""Dropout: zeroes random elements while training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.elementwise import ElementwiseOperation
from ops.kernels.elementwise.chain import Step
from ops.kernels.elementwise.chain_steps import dropout_step
from ops.runner.operation import OperationContext
from recipes.arguments import as_number
from recipes.triton.philox import new_seed


class Dropout(ElementwiseOperation):
    """y = x / (1 - p) with probability 1 - p, else 0, each element by itself; y = x in eval mode. dx likewise from dy.

    The seed is drawn from torch's generator of x's device: `torch.manual_seed` repeats a run, activation checkpointing
    repeats the elements, and nothing waits for the device. Which elements are kept depends on the seed and their place
    alone, alike on every device; 16 random bits an element, so p is met to within 2^-17. Backward keeps the seed, not
    the elements.

    Raises ValueError for a p outside of [0, 1].
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = as_number("p", p)
        if not 0 <= self.p <= 1:
            raise ValueError(f"Dropout got p={p}. It is the probability of a zero, from 0 to 1.")

    def step(self) -> Step:
        return dropout_step(self.p)

    def operand(self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]) -> Tensor | None:
        return new_seed(x.device) if self.training and self.p else None

    def gradients(
        self, dy: Tensor, x: Tensor | None, operand: Tensor | None, *, need_dx: bool, need_operand: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return self.compute(dy, operand), None

    def extra_repr(self) -> str:
        return f"p={self.p}"
