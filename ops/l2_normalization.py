"""L2Normalization: each row divided by its L2 norm."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ops.kernels.norm.l2_normalization import dl2_normalization, l2_normalization
from ops.kernels.norm.norm_triton import runs_in_triton
from ops.normalization import as_epsilon
from ops.runner.checked import Checked
from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from recipes.request import PlanRequest


class L2Normalization(BasicOperation):
    """y = x / sqrt(sum(x^2) + eps), the sum over the last dimension.

    Computed in float32 (float64 for float64) and rounded once. Raises ValueError for an eps that is not positive, and
    for an x without dimensions.
    """

    class Saved(NamedTuple):
        x: Tensor
        rstd: Tensor

    eps = Checked(as_epsilon)

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.eps = eps

    def kernel(self, request: PlanRequest) -> str:
        return "rows in registers (Triton)" if runs_in_triton(request.device, request.dtype) else "torch"

    def features(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        if x.dim() == 0:
            raise ValueError("x has no dimensions, but is normalised over its last one. Give it one: x.view(1).")
        y, rstd = l2_normalization(x, self.eps)
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, rstd)
        return y, {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        x, rstd = ctx.saved
        return dl2_normalization(dy, x, rstd) if ctx.needs.input else None, {}, {}

    def extra_repr(self) -> str:
        return f"eps={self.eps}"
