"""Dispatch: copies each token to the rows of its experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.kernels.permute import RoutingMap, gather_rows, gather_sum, make_routing_map
from ops.operation import BackwardOfBasic, BasicOperation, IndexTensor, OperationContext
from recipes.splits import Splits


class Dispatch(BasicOperation):
    """y[r] = x[token of row r]: x [T, H] -> [T * topk, H], ordered by expert, within an expert by token.

    Extra inputs: probs [T, topk], indices [T, topk] int64 in [0, num_experts) (as `Router` makes them). Extra outputs:

    split_sizes  [num_experts]: the rows of each expert, on x's device
    scales       [T * topk]: probs in the order of the rows, in their dtype
    routing_map  where the rows went, for `Combine`

    dx[t] is the sum over the token's rows, in the order of its slots and in float32.
    Raises ValueError for shapes that do not fit, and on the CPU for indices out of range (on a GPU looking at them
    would synchronise: rows of such a slot belong to no expert that exists, and are zero from the next GroupedLinear on).
    """

    extra_inputs = {"probs": Tensor, "indices": IndexTensor}
    extra_outputs = {"split_sizes": Splits, "scales": Tensor, "routing_map": RoutingMap}

    class Saved(NamedTuple):
        routing_map: RoutingMap

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        if num_experts <= 0:
            raise ValueError(f"Dispatch got num_experts={num_experts}. It must be positive.")
        self.num_experts = num_experts

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        probs, indices = extras["probs"], extras["indices"]
        self._check(x, probs, indices)
        routing_map, sizes = make_routing_map(indices, self.num_experts)
        y = gather_rows(x, routing_map)
        scales = torch.empty_like(probs.flatten()).scatter_(0, routing_map.row_of_slot.flatten(), probs.flatten())
        if ctx.needs_grad:
            ctx.saved = self.Saved(routing_map)
        splits = Splits.make(sizes, rows=y.shape[0], device=y.device)
        return y, {"split_sizes": splits, "scales": scales, "routing_map": routing_map}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        routing_map: RoutingMap = ctx.saved.routing_map
        dscales = d_extra_outputs.get("scales")
        dx = gather_sum(dy, routing_map) if dy is not None and ctx.needs.input else None
        return dx, {}, {"probs": None if dscales is None else dscales[routing_map.row_of_slot]}

    def _check(self, x: Tensor, probs: Tensor, indices: Tensor) -> None:
        if x.dim() != 2 or indices.dim() != 2 or indices.shape[0] != x.shape[0] or probs.shape != indices.shape:
            raise ValueError(
                f"x has shape {list(x.shape)}, probs {list(probs.shape)}, indices {list(indices.shape)}. "
                "Needed: [tokens, features], and twice [tokens, topk]."
            )
        if not indices.is_cuda and indices.numel():
            low, high = indices.aminmax()
            if low < 0 or high >= self.num_experts:
                raise ValueError(
                    f"indices lie between {int(low)} and {int(high)}, but must be in [0, {self.num_experts}). "
                    "Check num_experts of the router."
                )

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}"
