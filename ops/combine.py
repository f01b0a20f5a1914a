"""Combine: sums the rows of each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ops.kernels.permute import RoutingMap, gather_rows, gather_sum
from ops.operation import BackwardOfBasic, BasicOperation, OperationContext


class Combine(BasicOperation):
    """y[t] = sum_k x[row of slot (t, k)]: x [T * topk, H] -> [T, H], in the order of the slots and in float32.

    Extra input routing_map: from `Dispatch`. The experts' weights are not applied again: a scaled activation has done
    so. Raises ValueError for an x with another number of rows.
    """

    extra_inputs = {"routing_map": RoutingMap}

    class Saved(NamedTuple):
        routing_map: RoutingMap

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        routing_map: RoutingMap = extras["routing_map"]
        if x.dim() != 2 or x.shape[0] != routing_map.token_of_row.shape[0]:
            raise ValueError(
                f"x has shape {list(x.shape)}, but the routing map has {routing_map.token_of_row.shape[0]} rows. "
                "Give the map of the Dispatch that made these rows."
            )
        if ctx.needs_grad:
            ctx.saved = self.Saved(routing_map)
        return gather_sum(x, routing_map), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        return gather_rows(dy, ctx.saved.routing_map), {}, {}
