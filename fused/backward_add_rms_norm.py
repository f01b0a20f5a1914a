"""Backward of a residual branch that begins with RMSNorm: the norm's dx and the residual's gradient in one pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from ops.make_extra_output import MakeExtraOutput
from ops.rms_norm import RMSNorm
from ops.runner.operation import BackwardOfFused, BasicOperation, FusedOperation, OperationContext
from recipes.request import PlanRequest


class BackwardAddRMSNorm(FusedOperation):
    """MakeExtraOutput -> RMSNorm, backward: dx = the norm's dx + the gradient of the extra output, rounded once."""

    pattern = (MakeExtraOutput, RMSNorm)
    passes = "backward"
    rounds_less = True
    repeatable = True

    def __init__(self, operations: Sequence[BasicOperation]) -> None:
        super().__init__(operations)
        self.make_extra = cast(MakeExtraOutput, operations[0])
        self.norm = cast(RMSNorm, operations[1])

    def kernel(self, request: PlanRequest) -> str:
        return f"{self.norm.kernel(request)}, added as it is written"

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfFused:
        extra_ctx, norm_ctx = ctxs
        d_extra = d_extra_outputs.get(self.make_extra.name)
        if dy is None:
            return d_extra, ({}, {}), {}
        if d_extra is None or {d_extra.dtype, extra_ctx.dtype} == {norm_ctx.dtype}:
            dx, d_parameters = self.norm.gradients(norm_ctx, dy, d_extra)
            return dx, ({}, d_parameters), {}
        dx, d_parameters = self.norm.gradients(norm_ctx, dy)
        return None if dx is None else (dx + d_extra).to(extra_ctx.dtype), ({}, d_parameters), {}
