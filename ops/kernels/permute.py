"""Rows of tokens to rows of experts and back.

Each token has `topk` slots, each slot an expert. The rows of all slots, ordered by expert and within an expert by
token, are the dispatched rows.

    dispatch   y[r] = x[token_of_row[r]]                    gather
    combine    y[t] = sum_k x[row_of_slot[t, k]]            gather and sum, k = 0, 1, ... in this order, in float32

Each is the other's backward. No atomics: repeating a call gives the same bits. Nothing is read by the host, so a CUDA
graph can be replayed with another routing.

    indices = [[1, 0], [1, 2]]   ->   rows: token 0 (expert 0), token 0 (1), token 1 (1), token 1 (2)
    row_of_slot = [[1, 0], [2, 3]]     token_of_row = [0, 0, 1, 1]     split_sizes = [1, 2, 1]
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class RoutingMap(NamedTuple):
    """Where the rows of each token went. row_of_slot: [T, topk] int64; token_of_row: [T * topk] int64."""

    row_of_slot: Tensor
    token_of_row: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(self)

    def rebuild(self, tensors: Sequence[Tensor]) -> RoutingMap:
        return RoutingMap(*tensors)


def make_routing_map(indices: Tensor, num_experts: int) -> tuple[RoutingMap, Tensor]:
    """The map of indices [T, topk] int64 in [0, num_experts), and the rows of each expert, [num_experts] int64."""
    num_tokens, topk = indices.shape
    experts, slot_of_row = indices.flatten().sort(stable=True)
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot[slot_of_row] = torch.arange(num_tokens * topk, device=indices.device)
    bounds = torch.searchsorted(experts, torch.arange(num_experts + 1, device=indices.device))
    token_of_row = slot_of_row.div(max(topk, 1), rounding_mode="floor")
    return RoutingMap(row_of_slot.view(num_tokens, topk), token_of_row), bounds.diff()


def gather_rows(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """y[r] = x[token_of_row[r]]: x [T, H] -> [T * topk, H]."""
    return x.index_select(0, routing_map.token_of_row)


def gather_sum(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """y[t] = sum_k x[row_of_slot[t, k]]: x [T * topk, H] -> [T, H], in x's dtype, rounded once."""
    num_tokens, topk = routing_map.row_of_slot.shape
    total = torch.zeros(num_tokens, x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32), device=x.device)
    for k in range(topk):
        total += x.index_select(0, routing_map.row_of_slot[:, k])
    return total.to(x.dtype)


def combine_ref(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """`gather_sum` in one line."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide[routing_map.row_of_slot].sum(1).to(x.dtype)
