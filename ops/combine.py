"""Combine: sums the expert outputs of each token, in the original token order."""
# T tokens, H features

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ops.kernels.norm.norm_triton import runs_in_triton
from ops.kernels.routing.permute import RoutingMap, combine, dispatch
from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from recipes.request import PlanRequest


class Combine(BasicOperation):
    """y[t] = sum_k x[row of (t, k)], for x [T topk, H]; y [T, H].

    Extra input routing_map: an extra output of `Dispatch`. The sum runs over the slots in order, in float32 (float64
    for float64), and is rounded once. It is unweighted: `ScaledSwiGLU` has already applied the scales.

    Raises ValueError for an x that does not have one row for each (token, slot) pair.
    """

    extra_inputs = {"routing_map": RoutingMap}
    repeatable = True

    class Saved(NamedTuple):
        routing_map: RoutingMap

    def kernel(self, request: PlanRequest) -> str:
        return "rows summed as they are read (Triton)" if runs_in_triton(request.device, request.dtype) else "torch"

    def features(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        routing_map: RoutingMap = extras["routing_map"]
        if x.shape[0] != routing_map.token_of_row.shape[0]:
            raise ValueError(
                f"x has {x.shape[0]} rows, but routing_map was made for {routing_map.token_of_row.shape[0]}. "
                "Give it the map of the Dispatch that made these rows."
            )
        if ctx.needs_grad:
            ctx.saved = self.Saved(routing_map)
        return combine(x, routing_map), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        return dispatch(dy, ctx.saved.routing_map), {}, {}
