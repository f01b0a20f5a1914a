"""Transfer rows to the rank that owns their expert, and back, by kernels that write and read other ranks' memory.

E experts are divided among the n ranks of a group: rank r owns the L = E / n experts [r L, (r + 1) L). Each rank holds
`capacity` rows, those for its experts first, ordered by expert, then source rank, then token, then slot: the order of
`ops.kernels.routing.all_to_all`. The rest are zeros, past the sum of the sizes.

    place    rank * capacity + row of each (token, slot) pair; NOWHERE for a pair of no expert
    lead     the place of the first slot of the same token on the same rank
    origins  of each row here, the row to which the token was written; NOWHERE past the sum

A token is written once to each rank that owns any of its experts, to the lead of these slots. The other rows of that
token on that rank name it as their origin, and are made from it where the rows are copied out of the buffer:

    2 ranks of 2 experts, experts of rank 1's tokens [[2, 3], [0, 2]], rank 0 without tokens, capacity 4
    place    on rank 1   [[4, 6], [0, 5]]             lead       [[4, 4], [0, 5]]
    origins  on rank 0   [0, -1, -1, -1]              on rank 1  [0, 1, 0, -1]

What returns is read where it is: y[t] = sum_k rows of place[t, k], in the order of the slots, in float32 (float64 for
float64), rounded once. Moving copies values, so the results have the bits of one rank that has all tokens and experts.

A transfer is  barrier, write, barrier, read.  So a buffer is free for the next one, and all layers of a group with the
same rows share one.

Overflow: every rank receives all counts, so all of them find, before any row is written, that one of them would receive
more than its capacity. Then nothing is written: rows, sums and scales are NaN on every rank, and the sizes divide the
capacity among all experts, so that every weight gets NaN for its gradient. The number of rows that would have sufficed
is copied to the host behind the kernels, and raised as an error by `check_overflow` once it is there.

Graph-safe: no host synchronization, except for a layer's first forward, in which the ranks compare what they exchange.
Every rank makes the same calls in the same order on one stream, also without tokens.
"""
# n ranks, T tokens, H features, E experts, L experts of a rank, C rows of a rank

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ops.kernels.collectives import RankGroup, difference
from ops.kernels.routing import symmetric_memory
from ops.kernels.routing.all_to_all import NeededGradients
from ops.kernels.routing.permute import RoutingMap, make_routing_map, move_config
from ops.kernels.routing.symmetric_triton import (
    NOWHERE,
    OVERFLOWN,
    expand_kernel,
    locate_kernel,
    pull_kernel,
    push_kernel,
    put_counts_kernel,
)
from recipes.triton.launch import Launch, cdiv, has_work, next_power_of_2

BYTES_BESIDE_ROW = 12  # origin and scale
_ALIGNMENT = 128
_TENSORS = ("row_of_slot", "token_of_row", "place", "lead", "origins")


class SymmetricBuffers:
    """What the ranks of a group write and read of one another: counts, and for each row an origin, a scale and values.

    capacity: C; num_experts: E; row_bytes: of a row's values
    """

    def __init__(self, group: RankGroup, capacity: int, num_experts: int, row_bytes: int, device: torch.device) -> None:
        # Not the group itself, whose end is that of the buffers.
        self.rank, self.num_ranks, self._shown = group.rank, group.size, repr(group)
        self.capacity, self.num_experts = capacity, num_experts
        self.origins_at = _aligned(group.size * num_experts * 8)
        self.scales_at = self.origins_at + _aligned(capacity * 4)
        self.rows_at = self.scales_at + _aligned(capacity * 8)
        self.num_bytes = self.rows_at + capacity * row_bytes
        self.memory = symmetric_memory.allocate(self.num_bytes, group, device)
        self.needed = torch.zeros(1, dtype=torch.int64, device=device)
        self.needed_on_host = torch.zeros(1, dtype=torch.int64, pin_memory=device.type == "cuda")

    @property
    def counts(self) -> Tensor:
        """[n, E] int64: the pairs of each rank for each expert."""
        return self._region(0, torch.int64, self.num_ranks, self.num_experts)

    @property
    def origins(self) -> Tensor:
        """[C] int32"""
        return self._region(self.origins_at, torch.int32, self.capacity)

    def scales(self, dtype: torch.dtype) -> Tensor:
        """[C]"""
        return self._region(self.scales_at, dtype, self.capacity)

    def rows(self, dtype: torch.dtype, H: int) -> Tensor:
        """[C, H]"""
        return self._region(self.rows_at, dtype, self.capacity, H)

    def note(self, needed: Tensor) -> None:
        """Let the host know, without waiting, if so many rows are more than the capacity. needed: [1] int64"""
        torch.maximum(self.needed, torch.where(needed > self.capacity, needed, 0), out=self.needed)
        self.needed_on_host.copy_(self.needed, non_blocking=True)

    def check_overflow(self) -> None:
        """Raise RuntimeError if it is known on the host that a step needed more rows. It is then forgotten."""
        needed = int(self.needed_on_host)
        if needed:
            self.needed_on_host.zero_()
            self.needed.zero_()
            raise RuntimeError(
                f"A rank of {self._shown} would have received {needed} rows, but capacity is {self.capacity}, so the "
                f"outputs and gradients of that step are NaN on every rank. Give Dispatch a capacity of {needed} or "
                "more."
            )

    def _region(self, begin: int, dtype: torch.dtype, *shape: int) -> Tensor:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        return self.memory.local[begin : begin + num_bytes].view(dtype).view(shape)


class _OfGroup:
    """The buffers of a group, and what its ranks have found to be the same on all of them."""

    def __init__(self) -> None:
        self.buffers: dict[tuple[int, int, int, torch.device], SymmetricBuffers] = {}
        self.agreed: set[str] = set()


_of_groups: WeakKeyDictionary[ProcessGroup, _OfGroup] = WeakKeyDictionary()


@dataclass(frozen=True, eq=False)
class SymmetricRoutingMap(RoutingMap):
    """The map of this rank's pairs, with their places and the rows that came.

    place, lead: [T, topk] int32
    origins: [C] int32
    """

    transport: ClassVar[str] = "symmetric"
    partial_sums: ClassVar[str | None] = None

    place: Tensor
    lead: Tensor
    origins: Tensor
    group: RankGroup
    buffers: SymmetricBuffers

    @property
    def num_rows(self) -> int:
        return self.buffers.capacity

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in _TENSORS)

    def rebuild(self, tensors: Sequence[Tensor | None]) -> SymmetricRoutingMap:
        return replace(self, **dict(zip(_TENSORS, tensors, strict=True)))  # type: ignore[arg-type]  # None in a template

    def send_tokens(self, x: Tensor) -> Tensor:
        """The rows [C, H] for the experts here, of the tokens [T, H] that each rank gives."""
        self.buffers.memory.barrier()
        push(x.contiguous(), None, self.place, self.lead, self.buffers)
        self.buffers.memory.barrier()
        return expand(self.buffers.rows(x.dtype, x.shape[1]), self.origins)

    def sum_rows(self, rows: Tensor) -> Tensor:
        """The sums [T, H] of the rows of this rank's tokens, of what all ranks give for their rows, [C, H]."""
        y = rows.new_empty(self.place.shape[0], rows.shape[1])
        self._read_back(rows, y)
        return y

    def send_back(self, rows: Tensor, scales: Tensor, needed: NeededGradients) -> tuple[Tensor | None, Tensor | None]:
        """(`sum_rows` of rows, those of scales [C] that this rank's pairs have, [T, topk]), each if it is needed here.

        Every rank gives both, because others may need what it does not.
        """
        y = rows.new_empty(self.place.shape[0], rows.shape[1]) if needed.x else None
        of_pairs = scales.new_empty(self.place.shape) if needed.probs else None
        self._read_back(rows, y, scales, of_pairs)
        return y, of_pairs

    def _read_back(
        self, rows: Tensor, y: Tensor | None, scales: Tensor | None = None, of_pairs: Tensor | None = None
    ) -> None:
        self.buffers.memory.barrier()
        self.buffers.rows(rows.dtype, rows.shape[1]).copy_(rows)
        if scales is not None:
            self.buffers.scales(scales.dtype).copy_(scales)
        self.buffers.memory.barrier()
        pull(y, of_pairs, self.place, self.buffers)


def send(
    x: Tensor, probs: Tensor, indices: Tensor, num_experts: int, capacity: int, group: RankGroup, about: str
) -> tuple[SymmetricRoutingMap, Tensor, Tensor, Tensor]:
    """(map, rows [C, H] for the experts here, their probs [C], sizes [L]).

    x [T, H], probs [T, topk], indices [T, topk] integers; about: what has to be the same on all ranks, in words

    Raises RuntimeError, with the same sentence on every rank, where that is not the same, which is compared once; where
    an earlier step is known to have overflown; and for what was not exchanged before while a CUDA graph is captured.
    """
    H = x.shape[1]
    buffers = _buffers(group, capacity, num_experts, H * x.element_size(), x.device, about)
    routing_map, _, counts_E = make_routing_map(indices, num_experts)
    memory = buffers.memory
    put_counts(counts_E, buffers)  # the former ones were read before the barrier behind their rows
    memory.barrier()
    shift_E, sizes_L, total, needed = layout(buffers.counts, group.rank, capacity)
    buffers.note(needed)
    place, lead = locate(indices, routing_map.row_of_slot, shift_E, needed, capacity)
    push(x.contiguous(), probs.contiguous(), place, lead, buffers)
    memory.barrier()
    overflows = needed > capacity
    here = torch.arange(capacity, device=x.device) < total
    origins = torch.where(here, buffers.origins, NOWHERE.value).masked_fill_(overflows, OVERFLOWN.value)
    scales = torch.where(here, buffers.scales(probs.dtype), 0).masked_fill_(overflows, float("nan"))
    made = SymmetricRoutingMap(routing_map.row_of_slot, routing_map.token_of_row, place, lead, origins, group, buffers)
    return made, expand(buffers.rows(x.dtype, H), made.origins), scales, sizes_L


def layout(counts_nE: Tensor, rank: int, capacity: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(place - row_of_slot of this rank's pairs of each expert [E], sizes [L], their sum [1], rows needed [1]).

    rows needed: the most that any rank receives. If they are more than the capacity, the sizes divide that evenly.

    counts [[0, 0, 0, 0], [1, 0, 2, 1]], rank 1, capacity 4  ->  [0, 0, 3, 3], [2, 1], [3], [3]
    """
    n, E = counts_nE.shape
    received_nL = counts_nE.sum(0).view(n, -1)
    begin_nL = received_nL.cumsum(1) - received_nL
    own_E = counts_nE[rank]
    first = torch.arange(n, device=counts_nE.device)[:, None] * capacity
    shift_E = (begin_nL + first).flatten() + counts_nE[:rank].sum(0) - (own_E.cumsum(0) - own_E)
    totals_n = received_nL.sum(1)
    needed = totals_n.max().view(1)
    L = E // n
    even_L = (torch.arange(L, device=counts_nE.device) < capacity % L).to(torch.int64) + capacity // L
    return shift_E, torch.where(needed > capacity, even_L, received_nL[rank]), totals_n[rank : rank + 1], needed


def check_overflow() -> None:
    """Raise RuntimeError if the host knows of a step in which a rank would have received more rows than its capacity.

    The error says how many would have sufficed; outputs and gradients of that step are NaN on every rank of the group.
    Nothing is waited for: a step is known here when its kernels are done, as after `loss.item()`. Call it on all ranks
    at such a place, then all of them raise. Also the next forward outside of a capture raises, once the host knows.
    """
    for of_group in _of_groups.values():
        for buffers in of_group.buffers.values():
            buffers.check_overflow()


def bytes_held(group: RankGroup, capacity: int) -> int:
    """The bytes of the buffers with this capacity that have been allocated on this rank for the group."""
    of_group = _of_groups.get(group.process_group)
    return sum(b.num_bytes for b in of_group.buffers.values() if b.capacity == capacity) if of_group else 0


def _buffers(
    group: RankGroup, capacity: int, num_experts: int, row_bytes: int, device: torch.device, about: str
) -> SymmetricBuffers:
    """Those of the group, once its ranks agree on what they are about to exchange."""
    of_group = _of_groups.setdefault(group.process_group, _OfGroup())
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if about not in of_group.agreed:
        if capturing:
            raise RuntimeError(
                "A CUDA graph is being captured, but this layer has not exchanged anything before, and the ranks "
                "compare and allocate in the first forward. Run it once before the capture, on every rank."
            )
        differ = difference(group, about, "Only the tokens may differ: give every rank the same layer and recipe.")
        if differ:
            raise RuntimeError(differ)
        of_group.agreed.add(about)
    key = (capacity, num_experts, row_bytes, device)
    if key not in of_group.buffers:
        of_group.buffers[key] = SymmetricBuffers(group, capacity, num_experts, row_bytes, device)
    if not capturing:
        of_group.buffers[key].check_overflow()
    return of_group.buffers[key]


def _aligned(num_bytes: int) -> int:
    return cdiv(num_bytes, _ALIGNMENT) * _ALIGNMENT


# -------------------------------------------------------------------------------------------------------------- config


def locate_config(topk: int) -> tuple[int, int]:
    """(tokens, slots) of a program: at most 1024 pairs, so that few tokens keep many multiprocessors busy."""
    block_k = next_power_of_2(topk)
    return max(1, 1024 // block_k), block_k


# ----------------------------------------------------------------------------------------------------------- launchers


_put_counts, _locate = Launch(put_counts_kernel), Launch(locate_kernel)
_push = Launch(push_kernel)
_expand, _pull = Launch(expand_kernel), Launch(pull_kernel)


def put_counts(counts_E: Tensor, buffers: SymmetricBuffers) -> None:
    """Write this rank's counts to all ranks."""
    E, addresses = counts_E.numel(), buffers.memory.addresses
    _put_counts(counts_E, buffers.num_ranks, counts_E, addresses, buffers.rank, E, BLOCK_E=next_power_of_2(E))


def locate(
    indices: Tensor, row_of_slot: Tensor, shift_E: Tensor, needed: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """(place, lead), each [T, topk] int32, by what `make_routing_map` and `layout` made of these indices."""
    place, lead = torch.empty(2, *indices.shape, dtype=torch.int32, device=indices.device).unbind()
    if has_work(place):
        block_t, block_k = locate_config(indices.shape[1])
        _locate(
            indices, cdiv(indices.shape[0], block_t), indices.contiguous(), row_of_slot, shift_E, needed, place, lead,
            *indices.shape[:1], shift_E.numel(), CAPACITY=capacity, TOPK=indices.shape[1], BLOCK_T=block_t,
            BLOCK_K=block_k,
        )  # fmt: skip
    return place, lead


def push(x: Tensor, scales: Tensor | None, place: Tensor, lead: Tensor, buffers: SymmetricBuffers) -> None:
    """Write x [T, H] to the ranks of `place`; with scales [T, topk] also those, and the origins. All contiguous."""
    if not has_work(x):
        return
    H = x.shape[1]
    block_h, num_warps = move_config(H, x.element_size())
    _push(
        x, x.shape[0] * cdiv(H, block_h), x, scales, None if scales is None else buffers.origins, place, lead,
        buffers.memory.addresses, buffers.rows_at, buffers.scales_at, buffers.origins_at, H,
        CAPACITY=buffers.capacity, TOPK=place.shape[1], BLOCK_H=block_h, num_warps=num_warps,
    )  # fmt: skip


def expand(rows: Tensor, origins: Tensor) -> Tensor:
    """y[i] = rows[origins[i]], [C, H]; zeros NOWHERE, NaN where OVERFLOWN."""
    y, H = torch.empty_like(rows), rows.shape[1]
    if has_work(y):
        block_h, num_warps = move_config(H, y.element_size())
        _expand(y, y.shape[0] * cdiv(H, block_h), rows, origins, y, H, BLOCK_H=block_h, num_warps=num_warps)
    return y


def pull(y: Tensor | None, scales: Tensor | None, place: Tensor, buffers: SymmetricBuffers) -> None:
    """Sum the rows of `place` into y [T, H], and copy their scales [T, topk]; zeros NOWHERE, NaN where OVERFLOWN."""
    if place.numel() == 0 or (y is None and scales is None):
        return
    H, itemsize = (1, 8) if y is None else (y.shape[1], y.element_size())
    block_h, num_warps = move_config(H, itemsize)
    _pull(
        place, place.shape[0] * cdiv(H, block_h), y, scales, place, buffers.memory.addresses, buffers.rows_at,
        buffers.scales_at, H, CAPACITY=buffers.capacity, TOPK=place.shape[1], BLOCK_H=block_h, num_warps=num_warps,
    )  # fmt: skip
