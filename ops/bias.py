"""Bias: adds a learned vector to the last dimension."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ops.operation import BackwardOfBasic, BasicOperation, OperationContext


class Bias(BasicOperation):
    """y = x + b, for x [..., size]. The gradient of b is the sum of dy over all rows, accumulated in float32.

    b starts at zero. Raises ValueError for a size that is not positive, and for an x whose last dimension is not size.
    """

    def __init__(
        self, size: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        if size <= 0:
            raise ValueError(f"Bias got size={size}. It must be positive.")
        self.size = size
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zeros."""
        nn.init.zeros_(self.bias)

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        if x.dim() == 0 or x.shape[-1] != self.size:
            features = f"{x.shape[-1]} features" if x.dim() else "no dimension"
            raise ValueError(f"x has {features}, but size is {self.size}. Check the operation before this one.")
        return x + ctx.param("bias"), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        if not ctx.needs.params:
            return dy, {}, {}
        rows = dy if dy.dim() == 2 else dy.reshape(-1, self.size)
        dtype = torch.float64 if dy.dtype == torch.float64 else torch.float32
        return dy, {"bias": rows.sum(0, dtype=dtype)}, {}

    def extra_repr(self) -> str:
        return f"size={self.size}"
