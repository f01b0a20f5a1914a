"""Dispatch: copies each token to a row for each of its experts, and orders the rows by expert."""
# T tokens, H features

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.kernels.norm.norm_triton import runs_in_triton
from ops.kernels.routing.permute import RoutingMap, combine, dispatch, make_routing_map
from ops.runner.operation import BackwardOfBasic, BasicOperation, IndexTensor, OperationContext
from recipes.arguments import positive_integers
from recipes.request import PlanRequest
from recipes.tensors.splits import Splits


class Dispatch(BasicOperation):
    """y [T topk, H]: a row of x [T, H] for each (token, slot) pair, ordered by expert, then token, then slot.

    Extra inputs, which are extra outputs of `Router`:
        probs   [T, topk]: the factor of each pair
        indices [T, topk] integers in [0, num_experts): the expert of each pair
    Extra outputs:
        split_sizes: the number of rows of each expert, [num_experts]
        scales [T topk]: probs in the order of the rows, in the same dtype; `ScaledSwiGLU` multiplies by them
        routing_map: for `Combine`

    dx[t] is the sum of the gradients of t's rows, added in the order of the slots in float32 and rounded once.

    Raises ValueError for num_experts that is not positive, shapes that do not match, and, on the CPU, indices outside
    [0, num_experts); TypeError for indices that are not integers. On a GPU the indices are not checked, because that
    would synchronize: a negative one counts for expert 0, one above for no expert, in rows past the sum of the sizes.
    """

    accepts_integers = True
    extra_inputs = {"probs": Tensor, "indices": IndexTensor}
    extra_outputs = {"split_sizes": Splits, "scales": Tensor, "routing_map": RoutingMap}

    repeatable = True

    class Saved(NamedTuple):
        routing_map: RoutingMap

    def __init__(self, num_experts: int) -> None:
        super().__init__()
        (self.num_experts,) = positive_integers("Dispatch", num_experts=num_experts)

    def kernel(self, request: PlanRequest) -> str:
        return "a token read once, counting sort (Triton)" if runs_in_triton(request.device, request.dtype) else "torch"

    def features(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        probs, indices = extras["probs"], extras["indices"]
        self._check(x, probs, indices)
        routing_map, slot_of_row, sizes = make_routing_map(indices, self.num_experts)
        if ctx.needs_grad:
            ctx.saved = self.Saved(routing_map)
        return dispatch(x, routing_map), {
            "split_sizes": Splits.make(sizes, rows=slot_of_row.shape[0], device=x.device),
            "scales": probs.flatten().index_select(0, slot_of_row),
            "routing_map": routing_map,
        }

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        routing_map: RoutingMap = ctx.saved.routing_map
        dx = dprobs = None
        if dy is not None and ctx.needs.input:
            dx = combine(dy, routing_map)
        dscales = d_extra_outputs.get("scales")
        if dscales is not None:
            rows = routing_map.row_of_slot
            dprobs = dscales.index_select(0, rows.flatten()).view(rows.shape)
        return dx, {}, {"probs": dprobs}

    def _check(self, x: Tensor, probs: Tensor, indices: Tensor) -> None:
        if x.dim() != 2 or indices.dim() != 2 or indices.shape[0] != x.shape[0] or probs.shape != indices.shape:
            raise ValueError(
                f"x has shape {list(x.shape)}, probs {list(probs.shape)}, indices {list(indices.shape)}, but "
                "[tokens, features], [tokens, topk] and [tokens, topk] are needed. Take all three from one Router."
            )
        if indices.shape[1] == 0:
            raise ValueError("indices has no slots. Choose at least one expert for each token.")
        if indices.is_floating_point() or indices.dtype == torch.bool:
            raise TypeError(f"indices is {indices.dtype}, but must be integers. Convert it.")
        if indices.device.type == "cpu" and ((indices < 0) | (indices >= self.num_experts)).any():
            raise ValueError(
                f"indices reach from {indices.min()} to {indices.max()}, but num_experts is {self.num_experts}. "
                "Give both the Router and Dispatch the same number of experts."
            )

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}"
