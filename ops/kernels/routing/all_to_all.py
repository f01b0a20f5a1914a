"""Transfer rows to the rank that owns their expert, and back, by `torch.distributed.all_to_all_single`.

E experts are divided among the n ranks of a process group: rank r owns the L = E / n experts [r L, (r + 1) L).

    pairs    the (token, slot) pairs of this rank, ordered by expert, token, slot (`permute`), so those of one rank's
             experts are a slice; pairs of no expert come last and are not sent
    copies   a token for each rank that owns any of its experts, ordered by rank, then token
    arrived  what the ranks sent here: by source rank, then in the order that the source had
    rows     for the experts here: by expert, then source rank, then in the order that the source had

That is how one rank would order the tokens of all ranks, concatenated in rank order, on its experts.

    2 ranks, 4 experts. Experts of the pairs:   rank 0: [0, 0, 1, 3]      rank 1: [0, 2, 2]
    on rank 0:  arrived [0, 0, 1, 0]   row_of_arrived [0, 1, 3, 2]   rows [0, 0, 0, 1]   sizes [3, 1]

Tokens are sent as copies, from which the receiver makes the rows: with 8 experts for a token, chosen randomly from 8
ranks, 5.3 instead of 8. What returns is a row for each pair, because the sum over the slots of a token has an order.
With partial sums it is a row for each copy: the rank of the experts sums the rows of that copy, in the order of the
slots, and the rank of the token sums its copies, in the order of the ranks. Both orders follow from the routing of that
token alone, and nothing is atomic, so the bits are the same from run to run.

Before any rows, each rank sends each other one what it computes and how much it sends (`_exchange_headers`), and then
how many pairs for each expert. The first is read on the host, because all_to_all_single takes its split sizes from
there: once a forward; backward uses the same sizes. The second stays on the device.

Every value is copied, so the transfers change no bits. Not graph-safe: the sizes are on the host.

Every rank of the group has to make the same calls in the same order, also one without tokens.
"""
# n ranks, T tokens, E experts, L experts of a rank, P pairs and C copies of this rank, R rows that come to it

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ops.kernels.collectives import RankGroup, difference
from ops.kernels.routing.permute import RoutingMap, combine, combine_present, dispatch, gather, make_routing_map
from ops.kernels.routing.transports import sent_dtype
from recipes.tensors.gathered_rows import GatheredRows

_REMEDY = (
    "Only the tokens and their number may differ: give every rank the same layer and recipe, and tensors of the same "
    "kind."
)


_NO_CODES = zlib.crc32(b"")  # 0


class ExpertGroup(RankGroup):
    """The process group among whose ranks experts are divided: see `RankGroup`."""

    along_one = "experts are divided"
    example = 'mesh["ep"]'
    or_none = ", or None"

    def transport(self, device: torch.device) -> str:
        """How rows are transferred, for `Sequential.explain()`."""
        return f"all_to_all_single {self.describe(device)}"


class NeededGradients(NamedTuple):
    """Which gradients Dispatch computes: of x, of the probabilities. values: whether those of the experts' weights need
    the values of the rows, not only codes."""

    x: bool
    probs: bool
    values: bool = True


class Counts(NamedTuple):
    """How many rows go to, and come from, each rank, [n]."""

    sent: list[int]
    received: list[int]

    def back(self) -> Counts:
        """Of what returns."""
        return Counts(self.received, self.sent)


class Transfer:
    """What the ranks give for this one, in rank order, while it is on its way. given: by destination, contiguous."""

    def __init__(self, given: Tensor, counts: Counts, group: ExpertGroup) -> None:
        self._given = given  # its memory is read until the transfer ends
        self._arrived = given.new_empty(sum(counts.received), *given.shape[1:])
        self._work = dist.all_to_all_single(
            self._arrived, given, counts.received, counts.sent, group=group.process_group, async_op=True
        )

    def arrived(self) -> Tensor:
        """Wait: on a GPU the current stream, not the host."""
        self._work.wait()
        return self._arrived


@dataclass(frozen=True, eq=False)
class ShardedRoutingMap(RoutingMap):
    """The map of this rank's P pairs, with where they go and what comes.

    row_of_arrived, arrived_of_row: [R] int64, inverse to each other
    token_of_copy: [C] int64
    copy_of_row: [R] int64, in the copies that arrive
    pairs, copies: how many are transferred
    needed:   which gradients any of the ranks computes: all of them take part in their transfer
    partial_sums: None in this class
    under_way: the transfer that one half of an operation has started and the other one awaits (`ops.transfer_halves`)
    """

    transport: ClassVar[str] = "alltoall"
    names: ClassVar[tuple[str, ...]] = (
        "row_of_slot", "token_of_row", "row_of_arrived", "arrived_of_row", "token_of_copy", "copy_of_row",
    )  # fmt: skip

    row_of_arrived: Tensor
    arrived_of_row: Tensor
    token_of_copy: Tensor
    copy_of_row: Tensor
    group: ExpertGroup
    pairs: Counts
    copies: Counts
    needed: NeededGradients
    under_way: list[Transfer] = field(default_factory=list)
    partial_sums: str | None = None

    @property
    def num_rows(self) -> int:
        return self.row_of_arrived.shape[0]

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(getattr(self, name) for name in self.names)

    def rebuild(self, tensors: Sequence[Tensor | None]) -> ShardedRoutingMap:
        return replace(self, **dict(zip(self.names, tensors, strict=True)))  # type: ignore[arg-type]  # None in a template

    def send_tokens(self, x: Tensor) -> Tensor:
        """The rows [R, H] for the experts here, of the tokens [T, H], or bytes of codes, that each rank gives."""
        return gather(self.gather_tokens(x))

    def gather_tokens(self, x: Tensor) -> GatheredRows:
        """The same rows, not copied from what arrives."""
        arrived = _transferred(x.index_select(0, self.token_of_copy), self.copies, self.group)
        return GatheredRows(arrived, self.copy_of_row)

    def start_tokens(self, x: Tensor) -> None:
        """Begin `send_tokens`, which `finish_tokens` ends."""
        self.under_way.append(Transfer(x.index_select(0, self.token_of_copy), self.copies, self.group))

    def finish_tokens(self) -> Tensor:
        return self._rows_of(self.under_way.pop().arrived())

    def _rows_of(self, copies: Tensor) -> Tensor:
        return gather(GatheredRows(copies, self.copy_of_row))

    def sum_rows(self, rows: Tensor) -> Tensor:
        """The sums [T, H] of the rows of this rank's tokens, of what all ranks give for their rows, [R, H]."""
        return self._sums(_transferred(self._returned(rows), self.returned, self.group), rows.dtype)

    def start_sums(self, rows: Tensor) -> None:
        """Begin `sum_rows`, which `finish_sums` ends."""
        self.under_way.append(Transfer(self._returned(rows), self.returned, self.group))

    def finish_sums(self, dtype: torch.dtype) -> Tensor:
        """dtype: of the rows"""
        return self._sums(self.under_way.pop().arrived(), dtype)

    @property
    def returned(self) -> Counts:
        """How many rows `sum_rows` transfers."""
        return self.pairs.back()

    def _returned(self, rows: Tensor) -> Tensor:
        return self._as_arrived(rows)

    def _sums(self, arrived: Tensor, dtype: torch.dtype) -> Tensor:
        return combine(self._pairs_of(arrived), self)

    def send(self, values: Tensor) -> Tensor:
        """The values [R] of the rows here, of those [P] that each rank gives for its pairs."""
        return _transferred(values[: sum(self.pairs.sent)], self.pairs, self.group).index_select(0, self.arrived_of_row)

    def send_back(self, rows: Tensor) -> Tensor:
        """What this rank's pairs get, [P, ...], of what all ranks give for their rows, [R, ...]; zero if not sent."""
        return self._pairs_of(_transferred(self._as_arrived(rows), self.pairs.back(), self.group))

    def _as_arrived(self, rows: Tensor) -> Tensor:
        if rows.dim() == 2:
            return dispatch(rows, RoutingMap(self.arrived_of_row[:, None], self.row_of_arrived))
        return rows.index_select(0, self.row_of_arrived)

    def _pairs_of(self, returned: Tensor) -> Tensor:
        missing = self.token_of_row.shape[0] - returned.shape[0]
        return torch.cat((returned, returned.new_zeros(missing, *returned.shape[1:]))) if missing else returned


@dataclass(frozen=True, eq=False, kw_only=True)
class PartialSumsRoutingMap(ShardedRoutingMap):
    """One whose `sum_rows` returns a row for each copy: the sum of the rows made from it.

    rows_of_copy: [copies that arrive, topk] int64, the rows made from each, in the order of the slots; -1 for slots of
        other ranks' experts
    copies_of_token: [T, min(topk, n)] int64, the copies of each token, in the order of the ranks; -1 where there are
        fewer
    partial_sums: a name of `PARTIAL_SUMS`
    """

    names: ClassVar[tuple[str, ...]] = (*ShardedRoutingMap.names, "rows_of_copy", "copies_of_token")

    rows_of_copy: Tensor
    copies_of_token: Tensor

    @property
    def returned(self) -> Counts:
        return self.copies.back()

    def _returned(self, rows: Tensor) -> Tensor:
        assert self.partial_sums is not None, "a name of PARTIAL_SUMS"
        return combine_present(rows, self.rows_of_copy, sent_dtype(self.partial_sums, rows.dtype))

    def _sums(self, arrived: Tensor, dtype: torch.dtype) -> Tensor:
        return combine_present(arrived, self.copies_of_token, dtype)


def make_sharded_routing_map(
    indices: Tensor,
    num_experts: int,
    group: ExpertGroup,
    about: str,
    needed: NeededGradients,
    partial_sums: str | None = None,
    codes: str = "",
) -> tuple[ShardedRoutingMap, Tensor, Tensor]:
    """As `make_routing_map`, over ranks: (map, slot_of_row [P] of the pairs, sizes [L] of the experts here).

    about: what has to be the same on all ranks, in words
    partial_sums: of `Dispatch`
    codes: what has to be the same on those ranks that give it, in words

    Raises RuntimeError, with the same sentence on every rank, where it is not; and while a CUDA graph is captured.
    """
    if indices.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A CUDA graph is being captured, but all_to_all_single takes the row counts from the host, so a replay "
            "would transfer those of the capture. Capture the parts before Dispatch and behind Combine."
        )
    n, (T, topk) = len(group.ranks), indices.shape
    routing_map, slot_of_row, sizes = make_routing_map(indices, num_experts)
    sent_nL = sizes.view(n, -1)
    copies_n, copy_ends, copy_of_slot = _copies(indices, num_experts // n, n)
    pairs, copies, needed, received_copies_n = _exchange_headers(group, about, needed, sent_nL.sum(1), copies_n, codes)
    received_nL = torch.empty_like(sent_nL)
    dist.all_to_all_single(received_nL, sent_nL, group=group.process_group)
    row_of_arrived, arrived_of_row = _order(received_nL, sum(pairs.received))
    # The first (rank, token) up to which there are so many copies.
    token_of_copy = torch.searchsorted(copy_ends, torch.arange(1, sum(copies.sent) + 1, device=indices.device))
    # With each pair goes which of the copies from its rank is its token, and its slot.
    slots = torch.arange(topk, device=indices.device)
    place_of_pair = (copy_of_slot * topk + slots).flatten().index_select(0, slot_of_row)[: sum(pairs.sent)]
    first_n = (received_copies_n.cumsum(0) - received_copies_n) * topk
    first = first_n.repeat_interleave(received_nL.sum(1), output_size=sum(pairs.received))
    place = first + _transferred(place_of_pair, pairs, group)
    copy_of_row = place.div(topk, rounding_mode="floor").index_select(0, arrived_of_row)
    fields = (
        routing_map.row_of_slot, routing_map.token_of_row, row_of_arrived, arrived_of_row,
        token_of_copy % max(T, 1), copy_of_row, group, pairs, copies, needed,
    )  # fmt: skip
    if partial_sums is None:
        return ShardedRoutingMap(*fields), slot_of_row, received_nL.sum(0)
    rows_of_copy = place.new_full((sum(copies.received), topk), -1)
    rows_of_copy.view(-1).scatter_(0, place, row_of_arrived)
    with_sums = PartialSumsRoutingMap(
        *fields,
        rows_of_copy=rows_of_copy,
        copies_of_token=_copies_of_tokens(copy_ends, T, topk, n),
        partial_sums=partial_sums,
    )
    return with_sums, slot_of_row, received_nL.sum(0)


def announce_refusal(group: ExpertGroup, device: torch.device, error: Exception) -> None:
    """Let the other ranks raise too, instead of waiting, where this one refuses what it was given."""
    about = f"its arguments are refused: {error}".removesuffix(".")
    nothing = torch.zeros(len(group.ranks), dtype=torch.int64, device=device)
    try:
        _exchange_headers(group, about, NeededGradients(False, False), nothing, nothing)
    except RuntimeError as raised:
        if about not in str(raised):  # not what all ranks raise now
            raise


def _exchange_headers(
    group: ExpertGroup, about: str, needed: NeededGradients, pairs_n: Tensor, copies_n: Tensor, codes: str = ""
) -> tuple[Counts, Counts, NeededGradients, Tensor]:
    """(pairs, copies, gradients that any rank needs, copies received [n] on the device). Reads the device, once.

    Of a size that depends on nothing but the ranks, so it works between ranks that agree on nothing else.
    """
    sent = torch.empty(len(group.ranks), 7, dtype=torch.int64, device=pairs_n.device)
    sent[:, 0], sent[:, 1], sent[:, 2], sent[:, 3] = zlib.crc32(about.encode()), *needed
    sent[:, 4], sent[:, 5], sent[:, 6] = pairs_n, copies_n, zlib.crc32(codes.encode())
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.process_group)
    mine, others = torch.stack((sent.t(), received.t())).tolist()
    formats = {*others[6], mine[6][0]} - {_NO_CODES}
    if set(others[0]) != {mine[0][0]} or len(formats) > 1:
        raise RuntimeError(difference(group, ", ".join(filter(None, (about, codes))), _REMEDY))
    of_any = NeededGradients(any(others[1]), any(others[2]), any(others[3]))
    return Counts(mine[4], others[4]), Counts(mine[5], others[5]), of_any, received[:, 5]


def _transferred(given: Tensor, counts: Counts, group: ExpertGroup) -> Tensor:
    """What the ranks give for this one, in rank order. given: by destination, contiguous."""
    arrived = given.new_empty(sum(counts.received), *given.shape[1:])
    dist.all_to_all_single(arrived, given, counts.received, counts.sent, group=group.process_group)
    return arrived


def _order(received_nL: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """(row_of_arrived, arrived_of_row), each [R] int64, for this many rows from each rank for each expert.

    What arrives consists of a piece for each (rank, expert), in this order; the rows have the same pieces by (expert,
    rank). So each piece is shifted as a whole.

    received_nL [[2, 1], [1, 0]]  ->  row_of_arrived [0, 1, 3, 2], arrived_of_row [0, 1, 3, 2]
    """
    ends = received_nL.flatten().cumsum(0).view_as(received_nL)
    ends_in_rows = received_nL.t().flatten().cumsum(0).view(received_nL.t().shape).t()
    shift = (ends_in_rows - ends).flatten().repeat_interleave(received_nL.flatten(), output_size=num_rows)
    arrived = torch.arange(num_rows, device=received_nL.device)
    row_of_arrived = arrived + shift
    return row_of_arrived, torch.empty_like(arrived).scatter_(0, row_of_arrived, arrived)


def _copies(indices: Tensor, experts_of_rank: int, ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """(how many tokens go to each rank [n], ends [n T], copy_of_slot [T, topk] among those that go to the same rank).

    ends: how many copies there are up to each (rank, token); a pair of no expert has any copy

    indices [[0, 1], [3, 0]], 2 ranks of 2 experts  ->  [2, 1], [1, 2, 2, 3], [[0, 0], [0, 1]]
    """
    T = indices.shape[0]
    owner = indices.to(torch.int64).clamp(min=0).div(experts_of_rank, rounding_mode="floor").clamp(max=ranks)
    goes_Tn = torch.zeros(T, ranks + 1, dtype=torch.int64, device=indices.device).scatter_(1, owner, 1)[:, :ranks]
    ends = goes_Tn.t().flatten().cumsum(0)
    copies_n = goes_Tn.sum(0)
    first_n = copies_n.cumsum(0) - copies_n
    ends_Tn = ends.view(ranks, T).t()
    return copies_n, ends, (ends_Tn - 1 - first_n).gather(1, owner.clamp(max=ranks - 1))


def _copies_of_tokens(copy_ends: Tensor, T: int, topk: int, ranks: int) -> Tensor:
    """The copies of each token in the order of the ranks, [T, min(topk, n)]; where there are fewer, -1 before them.

    copy_ends: as `_copies` gives them

    ends [1, 2, 2, 3], 2 ranks, top-2 of 2 tokens  ->  [[-1, 0], [1, 2]]
    """
    is_copy = copy_ends.diff(prepend=copy_ends.new_zeros(1)) > 0
    of_ranks_Tn = torch.where(is_copy, copy_ends - 1, -1).view(ranks, T).t()
    return of_ranks_Tn.sort(1).values[:, -topk:].contiguous()
