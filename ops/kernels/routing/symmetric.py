"""Transfer rows to the rank that owns their expert, and back, by kernels that write and read other ranks' memory.

E experts are divided among the n ranks of a group: rank r owns the L = E / n experts [r L, (r + 1) L). Each rank holds
`capacity` rows, those for its experts first, ordered by expert, then source rank, then token, then slot: the order of
`ops.kernels.routing.all_to_all`. The rest are zeros, past the sum of the sizes.

    place    rank * capacity + row of each (token, slot) pair; NOWHERE for a pair of no expert
    lead     the place of the first slot of the same token on the same rank
    origins  of each row here, the row to which the token was written; NOWHERE past the sum

    members  at the row here to which a token was written: the rows of its slots, NOWHERE for slots of other ranks

A token is written once to each rank that owns any of its experts, to the lead of these slots. The other rows of that
token on that rank name it as their origin, and are made from it, as its members, where the rows are copied out of the
buffer:

    2 ranks of 2 experts, experts of rank 1's tokens [[2, 3], [0, 2]], rank 0 without tokens, capacity 4
    place    on rank 1   [[4, 6], [0, 5]]             lead       [[4, 4], [0, 5]]
    origins  on rank 0   [0, -1, -1, -1]              on rank 1  [0, 1, 0, -1]

What returns is read where it is: y[t] = sum_k rows of place[t, k], in the order of the slots, in float32 (float64 for
float64), rounded once. Moving copies values, so the results have the bits of one rank that has all tokens and experts.

With partial sums the owner of several of a token's experts sums their rows, in the order of the slots, and writes the
sum to the row of the token; the token's rank adds what it reads there, in rank order, and rounds once.

A transfer is  barrier, write, barrier, read.  So a buffer is free for the next one, and all layers of a group with the
same rows share one. Rows that return may be written before the first of these barriers, by the operation that makes
them, if the transfer before was that of their tokens: behind its second barrier no rank writes or reads here
(`memory_for_rows`). With `overlap` they are then read, in backward, on a stream beside that on which weight gradients
of the experts are computed, from the moment at which they are there; the current stream waits for it.

Overflow: every rank receives all counts, so all of them find, before any row is written, that one of them would receive
more than its capacity. Then nothing is written: rows, sums and scales are NaN on every rank, and the sizes divide the
capacity among all experts, so that every weight gets NaN for its gradient. The number of rows that would have sufficed
is copied to the host behind the kernels, and raised as an error by `check_overflow` once it is there
(`ops.kernels.routing.symmetric_buffers`).

Graph-safe: no host synchronization, except for a layer's first forward, in which the ranks compare what they exchange,
and number it. Each step sends the number of what it exchanges with the counts; ranks whose numbers differ overflow.
Every rank makes the same calls in the same order on one stream, also without tokens.
"""
# n ranks, T tokens, H features, E experts, L experts of a rank, C rows of a rank

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from ops.kernels.collectives import RankGroup
from ops.kernels.routing.all_to_all import NeededGradients
from ops.kernels.routing.permute import RoutingMap, make_routing_map, move_config
from ops.kernels.routing.symmetric_buffers import Extent, SymmetricBuffers, buffers_of
from ops.kernels.routing.symmetric_triton import (
    DIFFERENT,
    NUMBERS,
    expand_kernel,
    layout_kernel,
    locate_kernel,
    pull_kernel,
    pull_sums_kernel,
    push_kernel,
    put_counts_kernel,
    sum_members_kernel,
)
from ops.kernels.routing.transports import sent_dtype
from recipes.triton.launch import Launch, cdiv, has_work, next_power_of_2, replayed


@dataclass(frozen=True, eq=False)
class SymmetricRoutingMap(RoutingMap):
    """The map of this rank's pairs, with their places and the rows that came.

    place, lead: [T, topk] int32
    origins: [C] int32; members: [C, topk] int32
    step: a number of the buffers, the same in forward and backward
    features: of the tokens that were sent
    overlap: that of `Dispatch`
    """

    transport: ClassVar[str] = "symmetric"
    names: ClassVar[tuple[str, ...]] = ("row_of_slot", "token_of_row", "place", "lead", "origins", "members")

    place: Tensor
    lead: Tensor
    origins: Tensor
    members: Tensor
    group: RankGroup
    buffers: SymmetricBuffers
    step: int
    features: int
    overlap: bool = False
    partial_sums: str | None = None

    @property
    def num_rows(self) -> int:
        return self.buffers.capacity

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def rebuild(self, tensors: Sequence[Tensor | None]) -> SymmetricRoutingMap:
        return replace(self, **dict(zip(self.names, tensors, strict=True)))  # type: ignore[arg-type]  # None in a template

    def send_tokens(self, x: Tensor) -> Tensor:
        """The rows [C, H] for the experts here, of the tokens [T, H] that each rank gives."""
        self.buffers.memory.barrier()
        push(x.contiguous(), None, self.place, self.lead, self.buffers)
        self.buffers.memory.barrier()
        y = x.new_empty(self.num_rows, x.shape[1])
        expand(self.buffers.rows(x.dtype, x.shape[1]), self.members, self.origins, y)
        self.buffers.note_written(self.step)
        return y

    def memory_for_rows(self, shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """Where `sum_rows` and `send_back` would copy rows of this shape and dtype to: what makes them may write them
        there itself. None if that is not allowed now, or not at all."""
        rows, H = shape
        fits = rows == self.num_rows and H * dtype.itemsize <= self.buffers.row_bytes
        if not fits or self.partial_sums is not None or not self.buffers.are_free_for(self.step):
            return None
        return self.buffers.rows(dtype, H)

    def sum_rows(self, rows: Tensor) -> Tensor:
        """The sums [T, H] of the rows of this rank's tokens, of what all ranks give for their rows, [C, H]."""
        y = rows.new_empty(self.place.shape[0], rows.shape[1])
        self._read_back(rows, y)
        return y

    def send_back(self, rows: Tensor, scales: Tensor, needed: NeededGradients) -> tuple[Tensor | None, Tensor | None]:
        """(`sum_rows` of rows, those of scales [C] that this rank's pairs have, [T, topk]), each if it is needed here.

        Every rank gives both, because others may need what it does not.
        """
        shape = self.place.shape[0], rows.shape[1]
        of_pairs = scales.new_empty(self.place.shape) if needed.probs else None
        if not self.overlap:
            y = rows.new_empty(shape) if needed.x else None
            self._read_back(rows, y, scales, of_pairs)
            return y, of_pairs
        with self.buffers.beside(rows) as keep:
            y = keep(rows.new_empty(shape)) if needed.x else None
            self._read_back(rows, y)
        # Behind it, since they may be there later than the rows. Nobody reads the former ones any more.
        self.buffers.scales(scales.dtype).copy_(scales)
        self.buffers.memory.barrier()
        pull(None, of_pairs, self.place, self.buffers)
        return y, of_pairs

    def _read_back(
        self, rows: Tensor, y: Tensor | None, scales: Tensor | None = None, of_pairs: Tensor | None = None
    ) -> None:
        self.buffers.memory.barrier()
        self._give(rows)
        if scales is not None:
            self.buffers.scales(scales.dtype).copy_(scales)
        self.buffers.memory.barrier()
        self.buffers.note_read()
        self._take(rows.dtype, y, of_pairs)

    def _give(self, rows: Tensor) -> None:
        """Write the rows for other ranks to read, unless they were written there."""
        if not self.buffers.are_here(rows):
            self.buffers.rows(rows.dtype, rows.shape[1]).copy_(rows)

    def _take(self, dtype: torch.dtype, y: Tensor | None, of_pairs: Tensor | None) -> None:
        """Read what belongs to this rank's tokens and pairs. dtype: of the rows that were given"""
        pull(y, of_pairs, self.place, self.buffers)


class SymmetricSumsRoutingMap(SymmetricRoutingMap):
    """One whose rows return as partial sums. partial_sums: a name of `PARTIAL_SUMS`"""

    def _give(self, rows: Tensor) -> None:
        assert self.partial_sums is not None, "a name of PARTIAL_SUMS"
        sums = self.buffers.rows(sent_dtype(self.partial_sums, rows.dtype), rows.shape[1])
        sum_members(rows.contiguous(), self.members, self.origins, sums)

    def _take(self, dtype: torch.dtype, y: Tensor | None, of_pairs: Tensor | None) -> None:
        assert self.partial_sums is not None, "a name of PARTIAL_SUMS"
        if y is not None:
            pull_sums(y, sent_dtype(self.partial_sums, dtype), self.lead, self.buffers)
        pull(None, of_pairs, self.place, self.buffers)


class Arrived(NamedTuple):
    """What `send` gives: the map, the rows for the experts here by parts [C, width], their probs [C], sizes [L]."""

    routing_map: SymmetricRoutingMap
    parts: tuple[Tensor, ...]
    scales: Tensor
    sizes: Tensor


def send(
    x: Tensor,
    widths: tuple[int, ...] | None,
    probs: Tensor,
    indices: Tensor,
    num_experts: int,
    capacity: int,
    group: RankGroup,
    about: str,
    returned: tuple[int, torch.dtype],
    overlap: bool = False,
    partial_sums: str | None = None,
) -> Arrived:
    """x [T, H], or bytes of codes and scales; probs [T, topk], indices [T, topk] integers.

    widths: of the parts of a row, each of which becomes a tensor; what is behind them fills a row up. None: one part
    about: what has to be the same on all ranks, in words; returned: the features and dtype of rows that come back

    Raises RuntimeError, with the same sentence on every rank, where that is not the same, which is compared once; where
    an earlier step is known to have overflown; and for what was not exchanged before while a CUDA graph is captured.
    """
    H, topk = x.shape[1], indices.shape[1]
    features, dtype = returned
    if partial_sums is not None:
        dtype = sent_dtype(partial_sums, dtype)
    row_bytes = max(H * x.element_size(), features * dtype.itemsize)
    buffers, number = buffers_of(group, Extent(capacity, num_experts, topk, row_bytes, x.device), about)
    memory, rank = buffers.memory, buffers.rank
    to = buffers.num_ranks, rank, memory.addresses, buffers.counts_at
    row_of_slot, token_of_row = _announce(indices, num_experts, number, *to)
    memory.barrier()
    arrived = buffers.counts, buffers.numbers
    totals, sizes, place, lead = _place(indices, row_of_slot, *arrived, buffers.needed, rank, capacity)
    push(x.contiguous(), probs.contiguous(), place, lead, buffers)
    memory.barrier()
    buffers.tell_host()
    written = buffers.rows(x.dtype, H), buffers.members, buffers.origins, buffers.scales(probs.dtype)
    parts, members, origins, scales = _collect(*written, totals, widths or (H,))
    step = buffers.next_step()
    buffers.note_written(step)
    kind = SymmetricRoutingMap if partial_sums is None else SymmetricSumsRoutingMap
    routing_map = kind(
        row_of_slot, token_of_row, place, lead, origins, members, group, buffers, step, features, overlap, partial_sums
    )
    return Arrived(routing_map, parts, scales, sizes)


@replayed
def _announce(
    indices: Tensor, num_experts: int, number: int, num_ranks: int, rank: int, addresses: Tensor, counts_at: int
) -> tuple[Tensor, Tensor]:
    """(row_of_slot, token_of_row); every rank gets the counts. The former ones were read before a barrier."""
    routing_map, _, counts_E = make_routing_map(indices, num_experts)
    put_counts(counts_E, number, num_ranks, rank, addresses, counts_at)
    return routing_map.row_of_slot, routing_map.token_of_row


@replayed
def _place(
    indices: Tensor, row_of_slot: Tensor, counts_nE: Tensor, numbers_n: Tensor, most: Tensor, rank: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(totals, sizes, place, lead)"""
    shift_E, sizes_L, totals = layout(counts_nE, numbers_n, rank, capacity, most)
    return totals, sizes_L, *locate(indices, row_of_slot, shift_E, totals, capacity)


@replayed
def _collect(
    rows: Tensor, members: Tensor, origins: Tensor, scales: Tensor, totals: Tensor, widths: tuple[int, ...]
) -> tuple[tuple[Tensor, ...], Tensor, Tensor, Tensor]:
    """(parts [C, width], members [C, topk], origins [C], scales [C]) of the rows that came."""
    parts = tuple([rows.new_empty(rows.shape[0], width) for width in widths])
    found_origins, found_scales = torch.empty_like(origins), torch.empty_like(scales)
    expand(rows, members, origins, parts[0], (totals, scales, found_origins, found_scales))
    begin = widths[0]
    for part in parts[1:]:
        expand(rows[:, begin:], members, found_origins, part)
        begin += part.shape[1]
    return parts, members.clone(), found_origins, found_scales


# ----------------------------------------------------------------------------------------------------------- reference


def layout_ref(counts_nE: Tensor, numbers_n: Tensor, rank: int, capacity: int) -> tuple[Tensor, Tensor, Tensor]:
    """(place - row_of_slot of this rank's pairs of each expert [E], sizes [L], [their sum, rows needed]).

    rows needed: the most that any rank receives. If they are more than the capacity, the sizes divide that evenly.
    numbers: what each rank exchanges; if they differ, no number of rows suffices

    counts [[0, 0, 0, 0], [1, 0, 2, 1]], numbers [5, 5], rank 1, capacity 4  ->  [0, 0, 3, 3], [2, 1], [3, 3]
    """
    n, E = counts_nE.shape
    received_nL = counts_nE.sum(0).view(n, -1)
    begin_nL = received_nL.cumsum(1) - received_nL
    own_E = counts_nE[rank]
    first = torch.arange(n, device=counts_nE.device)[:, None] * capacity
    shift_E = (begin_nL + first).flatten() + counts_nE[:rank].sum(0) - (own_E.cumsum(0) - own_E)
    totals_n = received_nL.sum(1)
    lowest, highest = numbers_n.aminmax()
    differ = DIFFERENT.value + lowest * NUMBERS.value + highest
    needed = torch.where(lowest == highest, totals_n.max(), differ)
    L = E // n
    even_L = (torch.arange(L, device=counts_nE.device) < capacity % L).to(torch.int64) + capacity // L
    sizes_L = torch.where(needed > capacity, even_L, received_nL[rank])
    return shift_E, sizes_L, torch.stack((totals_n[rank], needed))


# -------------------------------------------------------------------------------------------------------------- config


MULTIPROCESSORS = 16  # of Hopper's 132, on which as many programs run as the link takes
ROWS = 4  # of a program that expands: few of them have anything to do


def locate_config(topk: int) -> tuple[int, int]:
    """(tokens, slots) of a program: at most 1024 pairs, so that few tokens keep many multiprocessors busy."""
    block_k = next_power_of_2(topk)
    return max(1, 1024 // block_k), block_k


# ----------------------------------------------------------------------------------------------------------- launchers


_put_counts, _layout, _locate = Launch(put_counts_kernel), Launch(layout_kernel), Launch(locate_kernel)
_push, _expand = Launch(push_kernel), Launch(expand_kernel)
_sum_members, _pull, _pull_sums = Launch(sum_members_kernel), Launch(pull_kernel), Launch(pull_sums_kernel)


def put_counts(counts_E: Tensor, number: int, num_ranks: int, rank: int, addresses: Tensor, counts_at: int) -> None:
    """Write this rank's counts, and the number of what it exchanges, to all ranks."""
    E = counts_E.numel()
    _put_counts(counts_E, num_ranks, counts_E, addresses, number, rank, E, counts_at, BLOCK_E=next_power_of_2(E))


def layout(
    counts_nE: Tensor, numbers_n: Tensor, rank: int, capacity: int, most: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """`layout_ref`. most: [1] int64, raised to the rows needed if these are more than the capacity"""
    n, E = counts_nE.shape
    shift_E, sizes_L = counts_nE.new_empty(E), counts_nE.new_empty(E // n)
    totals = counts_nE.new_empty(2)
    _layout(
        counts_nE, 1, counts_nE, numbers_n, shift_E, sizes_L, totals, most, rank, E, E // n, RANKS=n,
        CAPACITY=capacity, BLOCK_E=next_power_of_2(E),
    )  # fmt: skip
    return shift_E, sizes_L, totals


def locate(
    indices: Tensor, row_of_slot: Tensor, shift_E: Tensor, totals: Tensor, capacity: int
) -> tuple[Tensor, Tensor]:
    """(place, lead), each [T, topk] int32, by what `make_routing_map` and `layout` made of these indices."""
    place, lead = torch.empty(2, *indices.shape, dtype=torch.int32, device=indices.device).unbind()
    if has_work(place):
        block_t, block_k = locate_config(indices.shape[1])
        _locate(
            indices, cdiv(indices.shape[0], block_t), indices.contiguous(), row_of_slot, shift_E, totals, place, lead,
            *indices.shape[:1], shift_E.numel(), CAPACITY=capacity, TOPK=indices.shape[1], BLOCK_T=block_t,
            BLOCK_K=block_k,
        )  # fmt: skip
    return place, lead


def push(x: Tensor, scales: Tensor | None, place: Tensor, lead: Tensor, buffers: SymmetricBuffers) -> None:
    """Write x [T, H] to the ranks of `place`; with scales [T, topk] also those, the origins and the members. All
    contiguous."""
    if not has_work(x):
        return
    H = x.shape[1]
    block_h, num_warps = move_config(H, x.element_size())
    first = scales is not None
    _push(
        x, x.shape[0] * cdiv(H, block_h), x, scales, buffers.origins if first else None,
        buffers.members if first else None, place, lead, buffers.memory.addresses,
        buffers.rows_at, buffers.scales_at, buffers.origins_at, buffers.members_at, H,
        CAPACITY=buffers.capacity, TOPK=place.shape[1], BLOCK_H=block_h, BLOCK_K=next_power_of_2(place.shape[1]),
        num_warps=num_warps,
    )  # fmt: skip


def expand(
    rows: Tensor,
    members: Tensor,
    origins: Tensor,
    y: Tensor,
    found: tuple[Tensor, Tensor, Tensor, Tensor] | None = None,
) -> None:
    """y[i] = rows[origins[i]], [C, H]; zeros NOWHERE, NaN where OVERFLOWN (bytes 0x7F in rows of bytes).

    rows: [C, at least H], any distance between rows; y contiguous
    found: (totals, scales, origins and scales to write) where the origins are those of the buffers, which hold for
    the rows below the total alone
    """
    C, H = y.shape
    if has_work(y):
        block_h, num_warps = move_config(H, y.element_size())
        _expand(
            y, cdiv(C, ROWS) * cdiv(H, block_h), rows, members, origins, y, *(found or (None,) * 4), C, H,
            rows.stride(0), ROWS=ROWS, TOPK=members.shape[1], BLOCK_H=block_h, num_warps=num_warps,
        )  # fmt: skip


def sum_members(rows: Tensor, members: Tensor, origins: Tensor, sums: Tensor) -> None:
    """sums[i] = sum_k rows[members[i, k]], for the rows i to which a token was written; in float32 (float64 for
    float64), in the order of the slots, rounded once. The other rows are left as they are. All contiguous."""
    H = rows.shape[1]
    if has_work(rows):
        block_h, num_warps = move_config(H, rows.element_size())
        _sum_members(
            rows, rows.shape[0] * cdiv(H, block_h), rows, members, origins, sums, H, TOPK=members.shape[1],
            BLOCK_H=block_h, num_warps=num_warps,
        )  # fmt: skip


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


def pull_sums(y: Tensor, dtype: torch.dtype, lead: Tensor, buffers: SymmetricBuffers) -> None:
    """Sum what the ranks have for each token, of this dtype, in rank order, into y [T, H]; NaN where OVERFLOWN."""
    if not has_work(y):
        return
    H, topk = y.shape[1], lead.shape[1]
    block_h, num_warps = move_config(H, dtype.itemsize)
    _pull_sums(
        y, y.shape[0] * cdiv(H, block_h), y, buffers.rows(dtype, H), lead, buffers.memory.addresses, buffers.rows_at,
        H, RANKS=buffers.num_ranks, CAPACITY=buffers.capacity, TOPK=topk, BLOCK_H=block_h,
        BLOCK_K=next_power_of_2(topk), num_warps=num_warps,
    )  # fmt: skip
