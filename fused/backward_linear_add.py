"""Backward of a residual branch that begins with a Linear."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from torch import Tensor

from ops.linear import Linear
from ops.make_extra_output import MakeExtraOutput
from ops.runner.operation import BackwardOfFused, FusedOperation, OperationContext


class BackwardLinearAdd(FusedOperation):
    """MakeExtraOutput -> Linear, backward: dx = dy W + d_extra, and the Linear's weight and bias gradients.

    d_extra is the gradient of the extra output; it is added in the memory of the product. Either of dy and d_extra may
    be absent. Reads what the unfused Linear saves: x. Never refused.
    """

    pattern = (MakeExtraOutput, Linear)
    passes = "backward"
    handles_transfers = True
    handles_adapters = True
    handles_wgrad_accumulation = True
    accepts_quantized = True

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], dy: Any, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfFused:
        make, linear = cast(MakeExtraOutput, self.operations[0]), cast(Linear, self.operations[1])
        dx: Tensor | None = None
        gradients: Mapping[str, Tensor | None] = {}
        if dy is not None:
            dx, gradients, _ = linear.fuser_backward(ctxs[1], dy, {})
        d_extra = d_extra_outputs.get(make.name)
        if dx is not None:
            dx = dx.to(ctxs[0].dtype)  # as between the unfused operations
        if dx is not None and d_extra is not None and d_extra.dtype == dx.dtype:
            dx += d_extra
        else:
            dx, _, _ = make.fuser_backward(ctxs[0], dx, d_extra_outputs)
        return dx, ({}, gradients), {}
