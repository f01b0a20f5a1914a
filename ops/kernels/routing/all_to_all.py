"""Transfer rows to the rank that owns their expert, and back, by `torch.distributed.all_to_all_single`.

E experts are divided among the n ranks of a process group: rank r owns the L = E / n experts [r L, (r + 1) L).

    pairs    the (token, slot) pairs of this rank, ordered by expert, token, slot (`permute`), so what goes to one rank
             is a slice; pairs of no expert come last and are not sent
    arrived  what the ranks sent here: by source rank, then in the order that the source had
    rows     for the experts here: by expert, then source rank, then in the order that the source had

That is how one rank would order the tokens of all ranks, concatenated in rank order, on its experts.

    2 ranks, 4 experts. Experts of the pairs:   rank 0: [0, 0, 1, 3]      rank 1: [0, 2, 2]
    on rank 0:  arrived [0, 0, 1, 0]   row_of_arrived [0, 1, 3, 2]   rows [0, 0, 0, 1]   sizes [3, 1]

Before any rows, each rank tells each other one what it computes and how many rows it sends (`_exchange_headers`), and
then how many for each expert. The first is read on the host, because all_to_all_single takes its split sizes from
there: once a forward; backward uses the same sizes. The second stays on the device.

Every value is copied, so the transfers change no bits. Not graph-safe: the sizes are on the host.

Every rank of the group has to make the same calls in the same order, also one without tokens.
"""
# n ranks, E experts, L experts of a rank, P pairs of this rank, R rows that come to it

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from ops.kernels.routing.permute import RoutingMap, dispatch


class ExpertGroup:
    """The process group among whose ranks experts are divided. A copy of an operation has the very same one.

    group: a ProcessGroup, or a DeviceMesh of one dimension. Raises TypeError for anything else, ValueError for a mesh
    of more dimensions and for a group without this rank.
    """

    why_in_full = "all_to_all_single takes the row counts from the host, where each forward reads them."

    def __init__(self, group: Any) -> None:
        if dist.is_available():
            outside = group is dist.GroupMember.NON_GROUP_MEMBER
            if isinstance(group, dist.DeviceMesh):
                if group.ndim != 1:
                    raise ValueError(
                        f"group is a mesh with the dimensions {group.mesh_dim_names or group.ndim}, but experts are "
                        'divided along one. Name it: mesh["ep"].'
                    )
                outside = group.get_coordinate() is None
                group = None if outside else group.get_group()
            if outside or (isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0):
                raise ValueError(
                    "group does not contain this process. Make the operation with the group that this rank is in."
                )
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group is {group!r}, but must be a torch.distributed ProcessGroup, a DeviceMesh of one dimension, or "
                "None."
            )
        self.process_group = group
        self.ranks = tuple(dist.get_process_group_ranks(group))  # of the whole job
        self.backend = dist.get_backend(group)

    @property
    def transport(self) -> str:
        """How rows are transferred, for `Sequential.explain()`."""
        return f"all_to_all_single over {self._size} ({self.backend})"

    @property
    def _size(self) -> str:
        return f"{len(self.ranks)} rank{'s' if len(self.ranks) > 1 else ''}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ExpertGroup) and other.process_group == self.process_group

    def __hash__(self) -> int:
        return hash(self.process_group)

    def __deepcopy__(self, memo: Any) -> ExpertGroup:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A process group cannot be written down. Save the model's state_dict(), and make the model with its group "
            "again where that is loaded."
        )

    def __repr__(self) -> str:
        return f"<{self._size}, {self.backend}>"


class Wanted(NamedTuple):
    """Which gradients Dispatch computes: of x, of the probabilities."""

    x: bool
    probs: bool


@dataclass(frozen=True, eq=False)
class ShardedRoutingMap(RoutingMap):
    """The map of this rank's P pairs, with where they go and what comes.

    row_of_arrived, arrived_of_row: [R] int64, inverse to each other
    group:    the ranks
    sent, received: how many pairs go to, and how many rows come from each rank, [n]
    wanted:   which gradients any of the ranks computes: all of them take part in their transfer
    """

    row_of_arrived: Tensor
    arrived_of_row: Tensor
    group: ExpertGroup
    sent: list[int]
    received: list[int]
    wanted: Wanted

    def tensors(self) -> tuple[Tensor, ...]:
        return self.row_of_slot, self.token_of_row, self.row_of_arrived, self.arrived_of_row

    def rebuild(self, tensors: Sequence[Tensor | None]) -> ShardedRoutingMap:
        names = ("row_of_slot", "token_of_row", "row_of_arrived", "arrived_of_row")
        return replace(self, **dict(zip(names, tensors, strict=True)))  # type: ignore[arg-type]  # None in a template

    def send(self, pairs: Tensor) -> Tensor:
        """The rows [R, ...] for the experts here, of what all ranks give for their pairs, [P, ...]."""
        arrived = pairs.new_empty(sum(self.received), *pairs.shape[1:])
        self._transfer(arrived, self.received, pairs[: sum(self.sent)], self.sent)
        return _permuted(arrived, self.row_of_arrived, self.arrived_of_row)

    def send_back(self, rows: Tensor) -> Tensor:
        """What this rank's pairs get, [P, ...], of what all ranks give for their rows, [R, ...]; zero if not sent."""
        arrived = _permuted(rows, self.arrived_of_row, self.row_of_arrived)
        pairs = rows.new_empty(self.token_of_row.shape[0], *rows.shape[1:])
        end = sum(self.sent)
        pairs[end:].zero_()
        self._transfer(pairs[:end], self.sent, arrived, self.received)
        return pairs

    def _transfer(self, into: Tensor, into_sizes: list[int], given: Tensor, given_sizes: list[int]) -> None:
        dist.all_to_all_single(into, given, into_sizes, given_sizes, group=self.group.process_group)


def make_sharded_routing_map(
    routing_map: RoutingMap, sizes: Tensor, group: ExpertGroup, about: str, wanted: Wanted
) -> tuple[ShardedRoutingMap, Tensor]:
    """The map over ranks, of one of this rank, and the sizes of the experts here, [L] int64.

    sizes: [E] int64, of this rank's pairs
    about: what has to be the same on all ranks, in words

    Raises RuntimeError, with the same sentence on every rank, where it is not; and while a CUDA graph is captured.
    """
    if sizes.is_cuda and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "A CUDA graph is being captured, but all_to_all_single takes the row counts from the host, so a replay "
            "would transfer those of the capture. Capture the parts before Dispatch and behind Combine."
        )
    n = len(group.ranks)
    sent_nL = sizes.view(n, -1)
    sent, received, wanted = _exchange_headers(group, about, wanted, sent_nL.sum(1))
    received_nL = torch.empty_like(sent_nL)
    dist.all_to_all_single(received_nL, sent_nL, group=group.process_group)
    row_of_arrived, arrived_of_row = _order(received_nL, sum(received))
    sharded = ShardedRoutingMap(
        routing_map.row_of_slot, routing_map.token_of_row, row_of_arrived, arrived_of_row, group, sent, received, wanted
    )
    return sharded, received_nL.sum(0)


def announce_refusal(group: ExpertGroup, device: torch.device, error: Exception) -> None:
    """Let the other ranks raise too, instead of waiting, where this one refuses what it was given."""
    about = f"its arguments are refused: {error}".removesuffix(".")
    try:
        _exchange_headers(group, about, Wanted(False, False), torch.zeros(len(group.ranks), device=device))
    except RuntimeError as told:
        if about not in str(told):  # not what all ranks raise now
            raise


def _exchange_headers(
    group: ExpertGroup, about: str, wanted: Wanted, totals: Tensor
) -> tuple[list[int], list[int], Wanted]:
    """(pairs sent to each rank, rows received from each, gradients that any rank wants). Reads the device, once.

    Of a size that depends on nothing but the ranks, so it works between ranks that agree on nothing else.
    """
    sent = torch.empty(len(group.ranks), 4, dtype=torch.int64, device=totals.device)
    sent[:, 0], sent[:, 1], sent[:, 2] = zlib.crc32(about.encode()), *wanted
    sent[:, 3] = totals
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent, group=group.process_group)
    mine, others = torch.stack((sent, received)).tolist()
    if any(header[0] != mine[0][0] for header in others):
        raise RuntimeError(_difference(group, about))
    of_any = Wanted(any(header[1] for header in others), any(header[2] for header in others))
    return [header[3] for header in mine], [header[3] for header in others], of_any


def _difference(group: ExpertGroup, about: str) -> str:
    """The sentence that every rank raises: each sees that another one differs, so all come here."""
    told: list[str] = [""] * len(group.ranks)
    dist.all_gather_object(told, about, group=group.process_group)
    ranks: dict[str, list[str]] = {}
    for rank, given in zip(group.ranks, told, strict=True):
        ranks.setdefault(given, []).append(str(rank))
    who = [f"{'rank' if len(some) == 1 else 'ranks'} {', '.join(some)}: {given}" for given, some in ranks.items()]
    return (
        f"The ranks of one process group differ in what they exchange: {'; '.join(who)}. Only the tokens and their "
        "number may differ: give every rank the same layer and recipe, and tensors of the same kind."
    )


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


def _permuted(x: Tensor, to: Tensor, source: Tensor) -> Tensor:
    """y[to[i]] = x[i], which is y[i] = x[source[i]]."""
    return dispatch(x, RoutingMap(to[:, None], source)) if x.dim() == 2 else x.index_select(0, source)
