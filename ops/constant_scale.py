"""ConstantScale: multiplies by a constant number."""

from __future__ import annotations

import math

from torch import Tensor

from ops.elementwise import ElementwiseOperation
from ops.kernels.elementwise.chain import Step
from ops.kernels.elementwise.chain_steps import scale_step
from ops.runner.checked import Checked
from recipes.arguments import as_number


def _as_finite(name: str, scale: object) -> float:
    number = as_number(name, scale)
    if not math.isfinite(number):
        raise ValueError(f"ConstantScale got {name}={scale}. It must be finite.")
    return number


class ConstantScale(ElementwiseOperation):
    """y = scale x; dx = scale dy. Raises ValueError for a scale that is not finite."""

    scale = Checked(_as_finite)

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def step(self) -> Step:
        return scale_step(self.scale)

    def compute(self, x: Tensor, operand: Tensor | None) -> Tensor:
        return x * self.scale

    def gradients(
        self, dy: Tensor, x: Tensor | None, operand: Tensor | None, *, need_dx: bool, need_operand: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        return dy * self.scale, None

    def extra_repr(self) -> str:
        return str(self.scale)
