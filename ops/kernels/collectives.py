"""The process group of an operation, and collectives over its ranks.

    all_reduce(x)        y = sum_r x_r                                   on every rank
    all_gather(x)        y = [x_0; x_1; ...; x_(n-1)]                    on every rank, along the first dimension
    reduce_scatter(x)    y = (sum_s x_s)[r T/n : (r + 1) T/n]            on rank r, of T rows
    own_rows(x)          y = x[r T/n : (r + 1) T/n]                      on rank r, of T rows; nothing is sent
    broadcast(x, src)    y = x_src                                       on every rank
    reduce(x, src)       y = sum_r x_r                                   on src; zeros on the others

Values are summed in the dtype that they have, in the order of the backend. Every rank of the group makes the same calls
in the same order, also without rows. NCCL's collectives can be captured in CUDA graphs, gloo's cannot.
"""
# n ranks, T rows

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn, Self, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

# torch 2.13 has renamed them, and warns where the old names are used.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)
_reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or getattr(dist, "reduce_scatter_tensor", None)

# The ranks of an operation, as a caller names them: a group, or a mesh of one dimension.
Ranks: TypeAlias = "dist.ProcessGroup | dist.DeviceMesh"

NOT_REPEATED = "A collective is issued by its process group, in each step anew."
NOT_TRACED = "its collectives are issued by a process group, and torch's tracing has no values to exchange."
BACKENDS_ORDER = "a sum over ranks is made in the order of the backend, which may depend on the number of rows."


class RankGroup:
    """The process group of an operation. A copy of the operation has the very same one.

    group: a ProcessGroup, or a DeviceMesh of one dimension. Raises TypeError for anything else, ValueError for a mesh
    of more dimensions and for a group without this rank.

    process_group: of torch.distributed; ranks: of the whole job, in the group's order; rank: this one's place in them
    """

    # In errors: what goes along one dimension of a mesh, and how to name one.
    along_one: ClassVar[str] = "ranks meet"
    example: ClassVar[str] = 'mesh["tp"]'
    or_none: ClassVar[str] = ""

    def __init__(self, group: object) -> None:
        if dist.is_available():
            outside = group is dist.GroupMember.NON_GROUP_MEMBER
            if isinstance(group, dist.DeviceMesh):
                if group.ndim != 1:
                    raise ValueError(
                        f"group is a mesh with the dimensions {group.mesh_dim_names or group.ndim}, but "
                        f"{self.along_one} along one. Name it: {self.example}."
                    )
                outside = group.get_coordinate() is None
                group = None if outside else group.get_group()
            if outside or (isinstance(group, dist.ProcessGroup) and dist.get_rank(group) < 0):
                raise ValueError(
                    "group does not contain this process. Make the operation with the group that this rank is in."
                )
        if not dist.is_available() or not isinstance(group, dist.ProcessGroup):
            raise TypeError(
                f"group is {group!r}, but must be a torch.distributed ProcessGroup, {'' if self.or_none else 'or '}a "
                f"DeviceMesh of one dimension{self.or_none}."
            )
        self.process_group = group
        self.rank = dist.get_rank(group)
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.backends = dict(each.split(":") for each in dist.get_backend_config(group).split(","))  # by device

    @property
    def size(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    def describe(self, device: torch.device) -> str:
        """The ranks and the backend, for `Sequential.explain()`."""
        ranks = f"{self.size} rank{'s' if self.size > 1 else ''}"
        return f"over {ranks} ({self.backends.get(device.type, f'no backend for {device.type}')})"

    def why_not_captured(self, device: torch.device) -> str | None:
        """Why its collectives cannot be captured in a CUDA graph, as a sentence, or None."""
        backend = self.backends.get(device.type, "no backend")
        if backend == "nccl":
            return None
        return (
            f"Its group has {backend} for {device.type}, whose collectives run on the host, where a graph stops; "
            "NCCL's can be captured."
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RankGroup) and other.process_group == self.process_group

    def __hash__(self) -> int:
        return hash(self.process_group)

    def __deepcopy__(self, memo: dict[int, object]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            "A process group cannot be written down. Save the model's state_dict(), and make the model with its group "
            "again where that is loaded."
        )

    def __repr__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:8])) + (", ..." if self.size > 8 else "")
        return f"<rank{'s' if self.size > 1 else ''} {shown}>"


def all_reduce(x: Tensor, group: RankGroup, *, in_place: bool = False) -> Tensor:
    """The sum over the ranks. in_place: in the memory of x, if that is contiguous."""
    y = x.contiguous() if in_place else x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(y, group=group.process_group)
    return y


def all_gather(x: Tensor, group: RankGroup) -> Tensor:
    """The rows of all ranks, in rank order. x: of the same shape on all of them."""
    y = x.new_empty(x.shape[0] * group.size, *x.shape[1:])
    _all_gather(y, x.contiguous(), group=group.process_group)
    return y


def reduce_scatter(x: Tensor, group: RankGroup) -> Tensor:
    """This rank's rows of the sum over the ranks. x: of as many rows as n divides."""
    y = x.new_empty(x.shape[0] // group.size, *x.shape[1:])
    _reduce_scatter(y, x.contiguous(), group=group.process_group)
    return y


def own_rows(x: Tensor, group: RankGroup) -> Tensor:
    """A copy of this rank's rows. x: of as many rows as n divides."""
    rows = x.shape[0] // group.size
    return x.narrow(0, group.rank * rows, rows).clone(memory_format=torch.contiguous_format)


def broadcast(x: Tensor, src: int, group: RankGroup) -> Tensor:
    """What rank `src` of the group has. x: of the same shape on all of them."""
    y = x.clone(memory_format=torch.contiguous_format)
    dist.broadcast(y, group.ranks[src], group=group.process_group)
    return y


def reduce(x: Tensor, src: int, group: RankGroup) -> Tensor:
    """The sum over the ranks on rank `src` of the group, zeros on the others."""
    y = x.clone(memory_format=torch.contiguous_format)
    dist.reduce(y, group.ranks[src], group=group.process_group)
    return y if group.rank == src else y.zero_()


def check_alike(
    group: RankGroup, device: torch.device, describe: Callable[[], str], refusal: Exception | None = None
) -> None:
    """Compare between the ranks what they are about to exchange, where that is on the host anyway: for CPU tensors.

    describe: gives what has to be the same on all ranks, in words; called only where it is compared
    refusal: why this rank cannot take part; it is raised here, and sent to the others

    Raises ValueError for a device that the group has no backend for; RuntimeError, with the same sentence on every
    rank, where ranks differ. On GPUs nothing is compared, since that would synchronize: there ranks that differ wait
    for each other until the group's timeout, or receive values of other tensors.
    """
    if device.type not in group.backends:
        backends = ", ".join(f"{backend} for {kind}" for kind, backend in group.backends.items())
        raise ValueError(
            f"x is on {device.type}, but the group has {backends}. Move x, or make the group with a backend for it."
        )
    if device.type != "cpu" or group.size == 1:
        if refusal is not None:
            raise refusal
        return
    about = describe()
    if refusal is not None:
        about = f"its arguments are refused: {refusal}".removesuffix(".")
    mine = torch.tensor([zlib.crc32(about.encode())])
    checksums = torch.empty(group.size, dtype=mine.dtype)
    _all_gather(checksums, mine, group=group.process_group)
    differ = bool((checksums != mine).any())
    sentence = difference(group, about, "Give every rank tensors of the same kind.") if differ else ""
    if refusal is not None:
        raise refusal
    if differ:
        raise RuntimeError(sentence)


def difference(group: RankGroup, about: str, remedy: str) -> str:
    """The sentence that every rank raises, empty if they do not differ. A collective."""
    of_ranks: list[str] = [""] * group.size
    dist.all_gather_object(of_ranks, about, group=group.process_group)
    ranks: dict[str, list[str]] = {}
    for rank, given in zip(group.ranks, of_ranks, strict=True):
        ranks.setdefault(given, []).append(str(rank))
    if len(ranks) == 1:
        return ""
    who = [f"{'rank' if len(some) == 1 else 'ranks'} {', '.join(some)}: {given}" for given, some in ranks.items()]
    return f"The ranks of one process group differ in what they exchange: {'; '.join(who)}. {remedy}"
