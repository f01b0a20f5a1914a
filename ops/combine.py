"""Combine: sums the expert outputs of each token, in the original token order."""
# T tokens, H features

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.kernels.collectives import Ranks
from ops.kernels.norm.norm_triton import runs_in_triton
from ops.kernels.routing.all_to_all import ExpertGroup, ShardedRoutingMap
from ops.kernels.routing.permute import RoutingMap, combine, dispatch
from ops.kernels.routing.symmetric import SymmetricRoutingMap
from ops.kernels.routing.transports import PARTIAL_SUMS, WHY_IN_FULL, check_partial_sums, check_transport
from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from ops.runner.set_once import SetOnce
from recipes.request import PlanRequest
from recipes.tensors.gathered_rows import GatheredRows

_OverRanks = ShardedRoutingMap | SymmetricRoutingMap


class Combine(BasicOperation):
    """y[t] = sum_k x[row of (t, k)], for x [T topk, H]; y [T, H].

    Extra input routing_map: an extra output of `Dispatch`. The sum runs over the slots in order, in float32 (float64
    for float64), and is rounded once. It is unweighted: `ScaledSwiGLU` has already applied the scales.

    group, transport, partial_sums: those of the `Dispatch`. Then x is [R, H], the rows for the experts here; each
    returns to the rank of its token, by itself, and is summed there. A collective, also in backward.

    partial_sums: instead, the rank that owns several of a token's experts sums their rows and sends one. In float32 as
    above (float64 for float64) it adds them in the order of the slots, and the rank of the token adds what the ranks
    sent, in rank order, and rounds y once. "float32" sends the sums as they are, "rounded" rounds them once to x's
    dtype. With the eps of float32, e, and of x's dtype, d, barring underflow and to first order,

        |y[t] - sum_k x_k| <= (topk - 1) e/2 sum_k |x_k|  +  d/2 |y[t]|             "float32", and without partial sums
        |y[t] - sum_k x_k| <= (topk - 1) e/2 sum_k |x_k|  +  d/2 (|y[t]| + sum_k |x_k|)                       "rounded"

    where the terms of d are left out for float32 and float64, whose sums are not rounded again, and e is that of
    float64 for float64. In float16 a partial sum past 65504 is inf when rounded. The order depends on nothing but the
    experts of the token and the rank of each, so the bits are the same from run to run, and whatever the other tokens
    are.

    Raises ValueError for an x that does not have one row for each (token, slot) pair (with a group: the rows that
    Dispatch gave), a group without this rank, a map of another group, transport or partial_sums, or of none, and for
    partial_sums without a group or of another name; TypeError for a map that is none, and a group that is neither a
    ProcessGroup nor a DeviceMesh.
    """

    hands_back_rows = True
    extra_inputs = {"routing_map": RoutingMap}
    repeatable = True

    group = SetOnce[ExpertGroup | None]()
    transport = SetOnce[str]()
    partial_sums = SetOnce[str | None]()

    class Saved(NamedTuple):
        routing_map: RoutingMap

    def __init__(
        self, *, group: Ranks | None = None, transport: str = "alltoall", partial_sums: str | None = None
    ) -> None:
        super().__init__()
        self.group = None if group is None else ExpertGroup(group)
        self.transport = check_transport(transport, self.group)
        self.partial_sums = check_partial_sums(partial_sums, self.group)
        if self.group is not None:
            self.why_in_full = WHY_IN_FULL[transport]
        self.lends_memory = transport == "symmetric"
        self.hands_back_rows = not self.lends_memory

    def kernel(self, request: PlanRequest) -> str:
        way = "rows summed as they are read (Triton)" if runs_in_triton(request.device, request.dtype) else "torch"
        if self.group is None:
            return way
        if self.transport == "symmetric":
            way += ", from the memory of their ranks"
        if self.partial_sums is not None:
            way += f", {PARTIAL_SUMS[self.partial_sums]}"
        if self.transport == "symmetric":
            return f"{way}; symmetric memory {self.group.describe(request.device)}"
        return f"{way}; {self.group.transport(request.device)}, with the row counts of Dispatch"

    def why_not_captured(self, request: PlanRequest) -> str | None:
        return None if self.transport == "symmetric" else super().why_not_captured(request)

    def features(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        routing_map: RoutingMap = extras["routing_map"]
        self.check(x, routing_map)
        if ctx.needs_grad:
            ctx.saved = self.Saved(routing_map)
        return (routing_map.sum_rows(x) if isinstance(routing_map, _OverRanks) else combine(x, routing_map)), {}

    def memory_for_input(self, extras: Mapping[str, Any], shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        routing_map = extras["routing_map"]
        if not isinstance(routing_map, SymmetricRoutingMap) or routing_map.group != self.group:
            return None
        return routing_map.memory_for_rows(shape, dtype)

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        routing_map: RoutingMap = ctx.saved.routing_map
        dx: Any
        if isinstance(routing_map, SymmetricRoutingMap):
            dx = routing_map.send_tokens(dy)
        elif isinstance(routing_map, ShardedRoutingMap):
            dx = routing_map.gather_tokens(dy) if ctx.gathers_back else routing_map.send_tokens(dy)
        else:
            dx = GatheredRows(dy, routing_map.token_of_row) if ctx.gathers_back else dispatch(dy, routing_map)
        return dx, {}, {}

    def check(self, x: Tensor, routing_map: RoutingMap) -> None:
        """Raise ValueError for rows or a map of another Dispatch."""
        if not isinstance(routing_map, RoutingMap | _OverRanks):
            raise TypeError(
                f"routing_map is a {type(routing_map).__name__}, but must be the extra output of that name of a "
                "Dispatch. Give that."
            )
        over_ranks = routing_map if isinstance(routing_map, _OverRanks) else None
        made_for = over_ranks and over_ranks.group
        if made_for != self.group:
            raise ValueError(
                f"routing_map is of a Dispatch with group={made_for}, but this Combine has group={self.group}. Give "
                "both the same group."
            )
        if over_ranks and over_ranks.transport != self.transport:
            raise ValueError(
                f"routing_map is of a Dispatch with transport={over_ranks.transport!r}, but this Combine has "
                f"transport={self.transport!r}. Give both the same transport."
            )
        if over_ranks and over_ranks.partial_sums != self.partial_sums:
            raise ValueError(
                f"routing_map is of a Dispatch with partial_sums={over_ranks.partial_sums!r}, but this Combine has "
                f"partial_sums={self.partial_sums!r}. Give both the same."
            )
        rows = over_ranks.num_rows if over_ranks else routing_map.token_of_row.shape[0]
        if x.shape[0] != rows:
            raise ValueError(
                f"x has {x.shape[0]} rows, but routing_map was made for {rows}. "
                "Give it the map of the Dispatch that made these rows."
            )

    def extra_repr(self) -> str:
        if self.group is None:
            return ""
        transport = ", transport='symmetric'" if self.transport == "symmetric" else ""
        sums = "" if self.partial_sums is None else f", partial_sums={self.partial_sums!r}"
        return f"group={self.group}{transport}{sums}"
