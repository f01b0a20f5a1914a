"""Dropout: sets random elements to zero in training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.elementwise import ElementwiseOperation
from ops.kernels.elementwise.chain import Step
from ops.kernels.elementwise.chain_steps import dropout_step
from ops.runner.checked import Checked
from ops.runner.operation import OperationContext
from recipes.arguments import as_number
from recipes.request import PlanRequest
from recipes.triton.philox import new_seed


def _as_probability(name: str, p: object) -> float:
    number = as_number(name, p)
    if not 0 <= number <= 1:
        raise ValueError(f"Dropout got {name}={p}. It is the probability of a zero, from 0 to 1.")
    return number


class Dropout(ElementwiseOperation):
    """y = x / (1 - p) with probability 1 - p, else 0, independently for each element; y = x in eval mode. dx likewise.

    The seed is drawn from torch's generator for x's device, without synchronizing: `torch.manual_seed` repeats a run,
    and activation checkpointing repeats the mask. The mask depends only on the seed and the position, and is the same
    on every device. Each element uses 16 random bits, so p is exact to within 2^-17. Backward saves the seed and
    recomputes the mask.

    Raises ValueError for a p outside of [0, 1].
    """

    p = Checked(_as_probability)

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def step(self) -> Step:
        return dropout_step(self.p)

    def operand(self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]) -> Tensor | None:
        return new_seed(x.device) if self.training and self.p else None

    def gradients(
        self, dy: Tensor, x: Tensor | None, operand: Tensor | None, *, need_dx: bool, need_operand: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return self.compute(dy, operand), None

    def why_not_batch_invariant(self, request: PlanRequest) -> str | None:
        drops = self.training and self.p > 0
        return (
            "in training it drops elements by their position in the batch. Call eval(), or take p=0." if drops else None
        )

    def extra_repr(self) -> str:
        return f"p={self.p}"
