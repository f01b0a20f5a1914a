"""Maximum of amaxes over the ranks of a process group, all of which must have amaxes of the same tensors.

If the ranks had different numbers of amaxes, the collective would hang or combine amaxes of different tensors. So they
first exchange a message of fixed size: the number of amaxes, and a checksum of their roles and sizes in order. If these
differ, every rank raises the same error, and no state is changed.

CPU amaxes are compared in each step. On GPUs the comparison would synchronize the host with the device, so each new
list is compared only once for each group. A rank that later switches to another list, while the others keep one that
was already compared, is not detected before the collective.

If a rank does not take part at all, because it left no `autocast` in this step, the others wait for it: it cannot be
distinguished from a slow rank.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor


class Amaxes(NamedTuple):
    """The amaxes of one quantizer: values [n] float32, and the process group that its recipe names, or None."""

    role: str
    values: Tensor
    group: dist.ProcessGroup | None


def check_group(name: str, group: object) -> None:
    """Raise TypeError unless `group` is None or a process group (possibly one without this rank)."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    if not dist.is_available() or group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(f"{name} is {group!r}, but must be a torch.distributed process group, or None.")


def may_reduce() -> bool:
    """Whether there are other processes, over which `reduce_amaxes` reduces."""
    return dist.is_available() and dist.is_initialized()


def reduce_amaxes(
    brought: Iterable[Amaxes], group: dist.ProcessGroup | None, awaited: Iterable[dist.ProcessGroup | None] = ()
) -> None:
    """Replace the values, in place, by their maximum over the ranks of their group.

    group: for amaxes that name none; None is the default group
    awaited: groups whose ranks all take part, even without any amaxes

    Raises RuntimeError on every rank of a group whose ranks have different amaxes. Without torch.distributed it does
    nothing.
    """
    if not may_reduce():
        return
    of_group: dict[dist.ProcessGroup, list[Amaxes]] = {_or_default(named): [] for named in awaited}
    for amaxes in brought:
        of_group.setdefault(_or_default(amaxes.group if amaxes.group is not None else group), []).append(amaxes)
    # Sorted by name, so that ranks that share several groups cannot deadlock.
    members = [other for other in of_group if dist.get_rank(other) >= 0]
    for member in sorted(members, key=lambda other: other.group_name):
        _reduce_over(member, of_group[member])


def _or_default(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    group = dist.group.WORLD if group is None else group
    assert group is not None, "torch.distributed is initialized"
    return group


def _reduce_over(group: dist.ProcessGroup, brought: Sequence[Amaxes]) -> None:
    if dist.get_world_size(group) == 1:
        return
    _check_agreement(group, brought)
    if not brought:
        return
    values = [amaxes.values for amaxes in brought]
    together = torch.cat(values)
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
    for own, part in zip(values, together.split([len(v) for v in values]), strict=True):
        own.copy_(part)


# group -> lists that its ranks were found to agree on: role and number of amaxes of each quantizer, in order
_agreed: WeakKeyDictionary[dist.ProcessGroup, set[tuple[tuple[str, int], ...]]] = WeakKeyDictionary()
_MOST_AGREED = 1024  # lists for each group; then all are compared again, on all ranks in the same step


def _check_agreement(group: dist.ProcessGroup, brought: Sequence[Amaxes]) -> None:
    """Raise the same RuntimeError on every rank unless all ranks have the same list."""
    contents = tuple((amaxes.role, len(amaxes.values)) for amaxes in brought)
    known = _agreed.setdefault(group, set())
    on_device = torch.cuda.is_available() and all(amaxes.values.is_cuda for amaxes in brought)
    if on_device and contents in known:
        return
    if on_device and torch.cuda.is_current_stream_capturing():
        if not brought:
            return
        raise RuntimeError(
            "The ranks of a process group have not compared these amaxes yet, and cannot while a graph is captured. "
            "Run forward and backward once under the recipe before the capture."
        )
    device = brought[0].values.device if brought else None
    of_ranks = _exchanged(group, (sum(number for _, number in contents), zlib.crc32(repr(contents).encode())), device)
    if len(set(of_ranks)) > 1:
        raise RuntimeError(_difference(group, of_ranks))
    if len(known) >= _MOST_AGREED:
        known.clear()
    known.add(contents)


def _exchanged(group: dist.ProcessGroup, mine: tuple[int, int], device: torch.device | None) -> list[tuple[int, ...]]:
    """`mine` of every rank of the group, in rank order. Blocks, and without a CPU backend synchronizes the device.

    device: of the amaxes; None if there are none
    """
    if "cpu:" in dist.get_backend_config(group):
        device = torch.device("cpu")
    sent = torch.tensor(mine, dtype=torch.int64, device=device or torch.device("cuda", torch.cuda.current_device()))
    received = [torch.empty_like(sent) for _ in range(dist.get_world_size(group))]
    dist.all_gather(received, sent, group=group)
    return [tuple(row) for row in torch.stack(received).tolist()]


def _difference(group: dist.ProcessGroup, of_ranks: Sequence[tuple[int, ...]]) -> str:
    ranks: dict[tuple[int, ...], list[int]] = {}
    for rank, given in zip(dist.get_process_group_ranks(group), of_ranks, strict=True):
        ranks.setdefault(given, []).append(rank)
    who = [
        f"{'rank' if len(some) == 1 else 'ranks'} {', '.join(map(str, some[:8]))}{', ...' if len(some) > 8 else ''}: "
        f"{number or 'none'}"
        for (number, _), some in ranks.items()
    ]
    numbers = {number for number, _ in ranks}
    others = "" if len(numbers) == len(ranks) else " Where they are as many, they are of other tensors."
    return (
        f"The ranks of one process group bring different amaxes to their maximum: {'; '.join(who)}.{others} Name a "
        "group of ranks that run the same operations, by DelayedScaling(amax_reduction_group=...) or autocast(..., "
        "amax_reduction_group=...), or keep each rank's to itself by reduce_amax=False."
    )
