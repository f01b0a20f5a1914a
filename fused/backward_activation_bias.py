"""Backward of a bias followed by an activation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import cast

from torch import Tensor

from fused.linear_in_place import why_not_gathered, why_not_scaled
from ops.activations import ActivationOperation
from ops.bias import Bias
from ops.kernels.elementwise.chain import delementwise, runs_triton
from ops.linear import Linear, column_sums
from ops.runner.built_in import why_not_method
from ops.runner.context import at_tensor
from ops.runner.operation import BackwardOfFused, BasicOperation, FusedOperation, OperationContext
from recipes.request import PlanRequest


class BackwardActivationBias(FusedOperation):
    """dh = f'(h) dy, db = the sum of dh over the rows; if the bias is a Linear's, also dx = dh W and dW = dh^T x.

    Reads what the unfused operations save: h, and the Linear's x. Refused for an activation with scales, and for a
    Linear without a bias, one that gathers dy, has as_one_group or a bias_gradient of the user's.
    """

    pattern = ((Bias, Linear), ActivationOperation)
    passes = "backward"
    handles_transfers = True

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        first, activation = operations
        if isinstance(first, Linear) and not first.use_bias:
            return (
                f"Linear has no bias, whose gradient could be summed while {type(activation).__name__} makes its own."
            )
        if isinstance(first, Linear) and first.as_one_group:
            return "Linear has as_one_group, and sums its bias gradient in the order of a group."
        if isinstance(first, Linear) and (why := why_not_method(first, "bias_gradient")):
            return why
        return why_not_scaled(activation) or why_not_gathered(first)

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfFused:
        first, activation = self.operations
        ctx = ctxs[0]
        dh, dbias = dactivation_bias(cast(ActivationOperation, activation), ctxs[1], dy, "bias" in ctx.needs.params)
        dx: Tensor | None = dh
        gradients: dict[str, Tensor | None] = {}
        if isinstance(first, Linear):
            dx, gradients = first.dgrad_and_wgrad(ctx, dh)
        return dx, (gradients | {"bias": dbias}, {}), {}


def dactivation_bias(
    activation: ActivationOperation, ctx: OperationContext, dy: Tensor, need_dbias: bool
) -> tuple[Tensor, Tensor | None]:
    """(dh in ctx.dtype, the sum of dh over the rows in float32 or better, or None if not needed).

    On a GPU one kernel computes both.
    """
    x = at_tensor(ctx.saved.x)
    if runs_triton(dy, x):
        found = delementwise(dy, x, (activation.step(),), (None,), (ctx.dtype,), need_column_sums=need_dbias)
        assert found.dx is not None, "it is always asked for"
        return found.dx, found.column_sums
    dh, _, _ = activation.fuser_backward(ctx, dy, {})
    return dh, column_sums(dh) if need_dbias else None
