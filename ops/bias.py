"""Bias: adds a learned vector to the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ops.elementwise import ElementwiseOperation
from ops.kernels.elementwise.chain import Step
from ops.kernels.elementwise.chain_steps import ADD_COLUMN
from ops.runner.set_once import SetOnce
from ops.runner.shapes import check_features, check_parameter_dtype, check_shape
from recipes.arguments import positive_integers


class Bias(ElementwiseOperation):
    """y = x + b, for x [..., size]. The gradient of b is the sum of dy over all rows, accumulated in float32.

    b starts at zero. Raises ValueError for a size that is not positive, and for an x whose last dimension is not size.
    """

    operand_name = "bias"
    grad_is_identity = True
    size = SetOnce[int]()

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        (size,) = positive_integers("Bias", size=size)
        check_parameter_dtype(dtype)
        self.size = size
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the bias to zero."""
        nn.init.zeros_(self.bias)

    def step(self) -> Step:
        return ADD_COLUMN

    def check(self, shape: torch.Size, operand: Tensor | None) -> None:
        if shape[-1:] != (self.size,):
            features = f"{shape[-1]} features" if shape else "no dimension"
            raise ValueError(f"x has {features}, but size is {self.size}. Check the operation before this one.")
        check_shape("bias", operand, (self.size,))

    def compute(self, x: Tensor, operand: Tensor | None) -> Tensor:
        return x + operand  # type: ignore[operator]  # it is the bias

    def gradients(
        self, dy: Tensor, x: Tensor | None, operand: Tensor | None, *, need_dx: bool, need_operand: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        if not need_operand:
            return dy, None
        rows = dy if dy.dim() == 2 else dy.reshape(-1, self.size)
        return dy, rows.sum(0, dtype=torch.float64 if dy.dtype == torch.float64 else torch.float32)

    def features(self, incoming: int | None) -> int | None:
        check_features(incoming, self.size)
        return self.size

    def extra_repr(self) -> str:
        return f"size={self.size}"
