"""Combine: sums the expert outputs of each token, in the original token order."""
# T tokens, H features

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ops.kernels.collectives import Ranks
from ops.kernels.norm.norm_triton import runs_in_triton
from ops.kernels.routing.all_to_all import ExpertGroup, ShardedRoutingMap
from ops.kernels.routing.permute import RoutingMap, combine, dispatch
from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from recipes.request import PlanRequest


class Combine(BasicOperation):
    """y[t] = sum_k x[row of (t, k)], for x [T topk, H]; y [T, H].

    Extra input routing_map: an extra output of `Dispatch`. The sum runs over the slots in order, in float32 (float64
    for float64), and is rounded once. It is unweighted: `ScaledSwiGLU` has already applied the scales.

    group: that of the `Dispatch`. Then x is [R, H], the rows for the experts here; each returns to the rank of its
    token, by itself, and is summed there. A collective, also in backward.

    Raises ValueError for an x that does not have one row for each (token, slot) pair (with a group: the rows that
    Dispatch gave), a group without this rank, and a map of another group or of none; TypeError for a group that is
    neither a ProcessGroup nor a DeviceMesh.
    """

    extra_inputs = {"routing_map": RoutingMap}
    repeatable = True

    class Saved(NamedTuple):
        routing_map: RoutingMap

    def __init__(self, *, group: Ranks | None = None) -> None:
        super().__init__()
        self.group = None if group is None else ExpertGroup(group)
        if self.group is not None:
            self.why_in_full = self.group.why_in_full

    def kernel(self, request: PlanRequest) -> str:
        way = "rows summed as they are read (Triton)" if runs_in_triton(request.device, request.dtype) else "torch"
        if self.group is None:
            return way
        return f"{way}; {self.group.transport(request.device)}, with the row counts of Dispatch"

    def features(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        routing_map: RoutingMap = extras["routing_map"]
        self.check(x, routing_map)
        if ctx.needs_grad:
            ctx.saved = self.Saved(routing_map)
        if isinstance(routing_map, ShardedRoutingMap):
            x = routing_map.send_back(x)
        return combine(x, routing_map), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        routing_map: RoutingMap = ctx.saved.routing_map
        if isinstance(routing_map, ShardedRoutingMap):
            return routing_map.send_tokens(dy), {}, {}
        return dispatch(dy, routing_map), {}, {}

    def check(self, x: Tensor, routing_map: RoutingMap) -> None:
        """Raise ValueError for rows or a map of another Dispatch."""
        made_for = routing_map.group if isinstance(routing_map, ShardedRoutingMap) else None
        if made_for != self.group:
            raise ValueError(
                f"routing_map is of a Dispatch with group={made_for}, but this Combine has group={self.group}. Give "
                "both the same group."
            )
        rows = routing_map.row_of_arrived if isinstance(routing_map, ShardedRoutingMap) else routing_map.token_of_row
        if x.shape[0] != rows.shape[0]:
            raise ValueError(
                f"x has {x.shape[0]} rows, but routing_map was made for {rows.shape[0]}. "
                "Give it the map of the Dispatch that made these rows."
            )

    def extra_repr(self) -> str:
        return "" if self.group is None else f"group={self.group}"
