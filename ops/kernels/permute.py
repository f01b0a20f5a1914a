"""Tokens to their experts and back: a map between (token, slot) pairs and rows, and the moves along it.

Each of T tokens chose topk experts, one in each slot. The T topk pairs are the rows of the experts' buffer, ordered by
expert, then token, then slot.

    dispatch   y[row]  = x[token_of_row[row]]
    combine    y[t]    = sum_k x[row_of_slot[t, k]],     k = 0, 1, ...

Each is the other's backward.

    indices = [[1, 0], [2, 1]], 3 experts  ->  row_of_slot  [[1, 0], [3, 2]]
                                               token_of_row [0, 0, 1, 1]
                                               slot_of_row  [1, 0, 3, 2]      (of the pairs, counted row by row)
                                               sizes        [1, 2, 1]

Precision: dispatch copies; combine adds in float32 (float64 for float64), in the order of the slots, and rounds once.
Neither has atomics, so both repeat bit for bit.

Graph safety: nothing reads the device. The Triton kernels are still to come: plain torch runs on every device.
"""
# T tokens, H features

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class RoutingMap:
    """row_of_slot [T, topk] and token_of_row [T topk], both int64."""

    row_of_slot: Tensor
    token_of_row: Tensor

    def tensors(self) -> tuple[Tensor, Tensor]:
        """To travel through `save_for_backward`."""
        return self.row_of_slot, self.token_of_row

    def rebuild(self, tensors: Sequence[Tensor | None]) -> RoutingMap:
        """The same map over `tensors`, which come from `tensors()`. With Nones: an empty template."""
        return RoutingMap(*tensors)  # type: ignore[arg-type]  # None in an empty template


def make_routing_map(indices: Tensor, num_experts: int) -> tuple[RoutingMap, Tensor, Tensor]:
    """The map for the chosen experts, indices [T, topk] of an integer dtype.

    Returns (map, slot_of_row [T topk] int64, sizes [num_experts] int64).

    Indices outside [0, num_experts) do no harm beyond themselves: one below 0 counts for expert 0; one above comes
    after all others, in rows past the sum of the sizes.
    """
    by_row, slot_of_row = indices.flatten().sort(stable=True)
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot.scatter_(0, slot_of_row, torch.arange(slot_of_row.numel(), device=indices.device))
    experts = torch.arange(num_experts, dtype=indices.dtype, device=indices.device)
    ends = torch.searchsorted(by_row, experts, right=True)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    token_of_row = slot_of_row.div(indices.shape[1], rounding_mode="floor")
    return RoutingMap(row_of_slot.view(indices.shape), token_of_row), slot_of_row, sizes


def dispatch_ref(x: Tensor, indices: Tensor) -> Tensor:
    """`dispatch` pair by pair, from the indices themselves. Reads the device."""
    y = x.new_empty(indices.numel(), *x.shape[1:])
    for row, (_, token, _) in enumerate(_pairs_ref(indices)):
        y[row] = x[token]
    return y


def combine_ref(x: Tensor, indices: Tensor) -> Tensor:
    """`combine` pair by pair, from the indices themselves. Reads the device."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide.new_zeros(indices.shape[0], *x.shape[1:])
    rows = {(slot, token): row for row, (_, token, slot) in enumerate(_pairs_ref(indices))}
    for (_, token), row in sorted(rows.items()):
        y[token] += wide[row]
    return y.to(x.dtype)


def _pairs_ref(indices: Tensor) -> list[tuple[int, int, int]]:
    """(expert, token, slot) of each row."""
    return sorted((e, token, slot) for token, chosen in enumerate(indices.tolist()) for slot, e in enumerate(chosen))


def dispatch(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """y[row] = x[token_of_row[row]], for x [T, H]; y [T topk, H]."""
    return x.index_select(0, routing_map.token_of_row)


def combine(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """y[t] = sum_k x[row_of_slot[t, k]], for x [T topk, H]; y [T, H] in x's dtype."""
    first, *others = routing_map.row_of_slot.unbind(1)
    y = x.index_select(0, first)
    if others and x.dtype != torch.float64:
        y = y.float()
    for rows in others:
        y += x.index_select(0, rows)
    return y.to(x.dtype)
