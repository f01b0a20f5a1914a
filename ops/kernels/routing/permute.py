"""Move tokens to their experts and back, by a map between (token, slot) pairs and rows.

Each of T tokens chose topk experts, one in each slot. The T topk pairs are the rows of the experts' buffer, ordered by
expert, then token, then slot.

    dispatch   y[row]  = x[token_of_row[row]]
    combine    y[t]    = sum_k x[row_of_slot[t, k]],     k = 0, 1, ...

Each is the backward of the other. With a pair goes its probability, the scale of its row; in backward its gradient
returns, by the kernels that make the map and that combine.

    indices = [[1, 0], [2, 1]], 3 experts  ->  row_of_slot  [[1, 0], [3, 2]]
                                               token_of_row [0, 0, 1, 1]
                                               slot_of_row  [1, 0, 3, 2]      (of the pairs, counted row by row)
                                               sizes        [1, 2, 1]

Precision: dispatch copies; combine adds in float32 (float64 for float64), in the order of the slots, and rounds once.
Neither uses atomics, so both are deterministic, and the kernels match torch bit for bit.

On CUDA, dispatch, gather and combine are one Triton kernel each, in every dtype but float64. The map is made by a
counting sort: two Triton kernels with a torch cumulative sum between them.

Graph safety: no host synchronization.
"""
# T tokens, H features

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ops.kernels.norm.norm_triton import runs_in_triton
from ops.kernels.routing.permute_triton import (
    combine_kernel,
    count_kernel,
    dispatch_kernel,
    gather_kernel,
    place_kernel,
)
from recipes.tensors.gathered_rows import GatheredRows
from recipes.triton.launch import Launch, cdiv, has_work, next_power_of_2


@dataclass(frozen=True, eq=False)
class RoutingMap:
    """row_of_slot [T, topk] and token_of_row [T topk], both int64."""

    holds_tensors_alone: ClassVar[bool] = True  # steps that take one may be repeated; not so of subclasses

    row_of_slot: Tensor
    token_of_row: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """The tensors, for `save_for_backward`."""
        return self.row_of_slot, self.token_of_row

    def rebuild(self, tensors: Sequence[Tensor | None]) -> RoutingMap:
        """A map like this one over `tensors`, in the order of `tensors()`. With Nones: an empty template."""
        return RoutingMap(*tensors)  # type: ignore[arg-type]  # None in an empty template


# ---------------------------------------------------------------------------------------------------------- references


def make_routing_map_ref(indices: Tensor, num_experts: int) -> tuple[RoutingMap, Tensor, Tensor]:
    """`make_routing_map` in plain torch."""
    by_row, slot_of_row = indices.flatten().to(torch.int64).clamp(0, num_experts).sort(stable=True)
    row_of_slot = torch.empty_like(slot_of_row)
    row_of_slot.scatter_(0, slot_of_row, torch.arange(slot_of_row.numel(), device=indices.device))
    ends = torch.searchsorted(by_row, torch.arange(num_experts, device=indices.device), right=True)
    sizes = torch.diff(ends, prepend=ends.new_zeros(1))
    token_of_row = slot_of_row.div(indices.shape[1], rounding_mode="floor")
    return RoutingMap(row_of_slot.view(indices.shape), token_of_row), slot_of_row, sizes


def dispatch_ref(x: Tensor, indices: Tensor) -> Tensor:
    """`dispatch` pair by pair, directly from the indices. Synchronizes."""
    y = x.new_empty(indices.numel(), *x.shape[1:])
    for row, (_, token, _) in enumerate(_pairs_ref(indices)):
        y[row] = x[token]
    return y


def combine_ref(x: Tensor, indices: Tensor) -> Tensor:
    """`combine` pair by pair, directly from the indices. Synchronizes."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    y = wide.new_zeros(indices.shape[0], *x.shape[1:])
    rows = {(slot, token): row for row, (_, token, slot) in enumerate(_pairs_ref(indices))}
    for (_, token), row in sorted(rows.items()):
        y[token] += wide[row]
    return y.to(x.dtype)


def _pairs_ref(indices: Tensor) -> list[tuple[int, int, int]]:
    """(expert, token, slot) of each row."""
    return sorted((e, token, slot) for token, chosen in enumerate(indices.tolist()) for slot, e in enumerate(chosen))


# -------------------------------------------------------------------------------------------------------------- config


class MoveConfig(NamedTuple):
    """Columns and warps of a program; each program handles one token."""

    block_h: int
    num_warps: int


class MapConfig(NamedTuple):
    """Pairs, experts (plus one for invalid indices) and warps of a program."""

    block: int
    block_e: int
    num_warps: int


MOST_EXPERTS = 2047  # each program of the counting sort holds the counts of all experts


@lru_cache(maxsize=1024)
def move_config(H: int, itemsize: int) -> MoveConfig:
    """16 bytes for each thread, up to 128 threads: one access if H is a multiple of 16, else one for each element."""
    block_h = max(16, min(2048 // itemsize, next_power_of_2(H)))
    return MoveConfig(block_h, max(1, block_h * itemsize // 512))


@lru_cache(maxsize=1024)
def map_config(num_experts: int) -> MapConfig:
    """1024 pairs sort in 55 steps; 2048 take only 66, but keep half as many multiprocessors busy."""
    return MapConfig(1024, max(32, next_power_of_2(num_experts + 1)), num_warps=4)


# ----------------------------------------------------------------------------------------------------------- launchers


def make_routing_map(indices: Tensor, num_experts: int) -> tuple[RoutingMap, Tensor, Tensor]:
    """The map for the chosen experts. indices: [T, topk] of an integer dtype, topk > 0.

    Returns (map, slot_of_row [T topk] int64, sizes [num_experts] int64).

    Indices outside [0, num_experts) do not affect other pairs: a negative one counts for expert 0; one above comes
    after all others, in rows past the sum of the sizes.
    """
    if not runs_in_triton(indices.device, indices.dtype) or num_experts > MOST_EXPERTS:
        return make_routing_map_ref(indices, num_experts)
    row_of_slot = torch.empty(indices.shape, dtype=torch.int64, device=indices.device)
    token_of_row, slot_of_row = row_of_slot.new_empty(2, indices.numel()).unbind()
    sizes = row_of_slot.new_empty(num_experts)
    make_routing_map_triton(indices.contiguous(), row_of_slot, token_of_row, slot_of_row, sizes)
    return RoutingMap(row_of_slot, token_of_row), slot_of_row, sizes


def route_scales(probs: Tensor, indices: Tensor, num_experts: int) -> tuple[RoutingMap, Tensor, Tensor]:
    """The map and the sizes that `make_routing_map` gives, and scales[row] [T topk] in probs' dtype: the probability of
    the row's pair, of probs [T, topk].
    """
    if not runs_in_triton(indices.device, indices.dtype) or num_experts > MOST_EXPERTS:
        routing_map, slot_of_row, sizes = make_routing_map_ref(indices, num_experts)
        return routing_map, sizes, probs.flatten().index_select(0, slot_of_row)
    row_of_slot = torch.empty(indices.shape, dtype=torch.int64, device=indices.device)
    token_of_row, sizes = row_of_slot.new_empty(indices.numel()), row_of_slot.new_empty(num_experts)
    probs = probs.contiguous()
    scales = probs.new_empty(indices.numel())
    make_routing_map_triton(indices.contiguous(), row_of_slot, token_of_row, None, sizes, probs, scales)
    return RoutingMap(row_of_slot, token_of_row), sizes, scales


def dispatch(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """y[row] = x[token_of_row[row]], for x [T, H]; y [T topk, H]."""
    if not runs_in_triton(x.device, x.dtype):
        return x.index_select(0, routing_map.token_of_row)
    y = x.new_empty(routing_map.token_of_row.shape[0], x.shape[1])
    dispatch_triton(x.contiguous(), routing_map.row_of_slot, y)
    return y


def gather(rows: GatheredRows) -> Tensor:
    """The rows, copied: for those of which no `RoutingMap` says where a token goes."""
    x, row_of = rows.source, rows.row_of
    if not runs_in_triton(x.device, x.dtype):
        return rows.dequantize()
    y = x.new_empty(rows.shape)
    gather_triton(x.contiguous(), row_of, y)
    return y


def combine(x: Tensor, routing_map: RoutingMap) -> Tensor:
    """y[t] = sum_k x[row_of_slot[t, k]], for x [T topk, H]; y [T, H] in x's dtype."""
    if not runs_in_triton(x.device, x.dtype):
        return _combine_on_torch(x, routing_map.row_of_slot, x.dtype)
    y = x.new_empty(routing_map.row_of_slot.shape[0], x.shape[1])
    combine_triton(x.contiguous(), routing_map.row_of_slot, y)
    return y


def combine_and_return_scales(x: Tensor, scales: Tensor, routing_map: RoutingMap) -> tuple[Tensor, Tensor]:
    """`combine`, and scales[row_of_slot] [T, topk]."""
    rows = routing_map.row_of_slot
    if not runs_in_triton(x.device, x.dtype) or not x.shape[1]:
        return combine(x, routing_map), scales.index_select(0, rows.flatten()).view(rows.shape)
    y, probs = x.new_empty(rows.shape[0], x.shape[1]), scales.new_empty(rows.shape)
    combine_triton(x.contiguous(), rows, y, scales.contiguous(), probs)
    return y, probs


def combine_present(x: Tensor, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """y[i] = sum_k x[rows[i, k]], without the rows that are -1, for x [R, H] and rows [I, K]; y [I, H] in dtype.

    x = [[1.], [2.], [4.]], rows = [[0, 2], [-1, 1], [-1, -1]]  ->  y [[5.], [2.], [0.]]
    """
    if not runs_in_triton(x.device, x.dtype):
        with_zeros = torch.cat((x, x.new_zeros(1, x.shape[1])))
        return _combine_on_torch(with_zeros, rows.where(rows >= 0, x.shape[0]), dtype)
    y = x.new_empty(rows.shape[0], x.shape[1], dtype=dtype)
    combine_triton(x.contiguous(), rows, y)
    return y


_count, _place = Launch(count_kernel), Launch(place_kernel)
_dispatch, _gather, _combine = Launch(dispatch_kernel), Launch(gather_kernel), Launch(combine_kernel)


def make_routing_map_triton(
    indices: Tensor,
    row_of_slot: Tensor,
    token_of_row: Tensor,
    slot_of_row: Tensor | None,
    sizes: Tensor,
    probs: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Launch the counting sort. All tensors contiguous; indices of any integer dtype, probs and scales of one, the
    others int64."""
    num_pairs, num_experts = indices.numel(), sizes.numel()
    if not has_work(indices):
        sizes.zero_()
        return
    block, block_e, num_warps = map_config(num_experts)
    num_blocks = cdiv(num_pairs, block)
    counts, local_ends = indices.new_empty(2, num_experts + 1, num_blocks, dtype=torch.int32).unbind()
    about = {"BLOCK": block, "BLOCK_E": block_e, "num_warps": num_warps}
    _count(indices, num_blocks, indices, counts, local_ends, num_pairs, num_experts, **about)
    ends = counts.flatten().cumsum(0, dtype=torch.int32)
    _place(
        indices, num_blocks, indices, ends, local_ends, probs, row_of_slot, token_of_row, slot_of_row, sizes, scales,
        num_pairs, num_experts, indices.shape[1], **about,
    )  # fmt: skip


def dispatch_triton(x: Tensor, row_of_slot: Tensor, y: Tensor) -> None:
    """Launch dispatch of x [T, H] into y [T topk, H]. All tensors contiguous."""
    _move(_dispatch, x, row_of_slot, y)


def gather_triton(x: Tensor, row_of: Tensor, y: Tensor) -> None:
    """Launch gather of x [S, H] into y [T, H]. All tensors contiguous."""
    if has_work(y):
        block_h, num_warps = move_config(x.shape[1], x.element_size())
        programs = row_of.shape[0] * cdiv(x.shape[1], block_h)
        _gather(x, programs, x, row_of, y, x.shape[1], BLOCK_H=block_h, num_warps=num_warps)


def combine_triton(
    x: Tensor, row_of_slot: Tensor, y: Tensor, scales: Tensor | None = None, probs: Tensor | None = None
) -> None:
    """Launch combine of x [R, H] into y [T, H], of any dtype, and of scales [R] into probs [T, topk]. Rows of -1 add
    nothing, and have no scales. All tensors contiguous."""
    _move(_combine, x, row_of_slot, y, scales, probs)


def _move(launch: Launch, x: Tensor, row_of_slot: Tensor, y: Tensor, *scales: Tensor | None) -> None:
    (num_tokens, topk), H = row_of_slot.shape, x.shape[1]
    if not has_work(y):
        return
    block_h, num_warps = move_config(H, x.element_size())
    launch(
        x, num_tokens * cdiv(H, block_h), x, row_of_slot, y, *scales, H, TOPK=topk, BLOCK_H=block_h, num_warps=num_warps
    )


def _combine_on_torch(x: Tensor, row_of_slot: Tensor, dtype: torch.dtype) -> Tensor:
    first, *others = row_of_slot.unbind(1)
    y = x.index_select(0, first)
    if others and x.dtype != torch.float64:
        y = y.float()
    for rows in others:
        y += x.index_select(0, rows)
    return y.to(dtype)
