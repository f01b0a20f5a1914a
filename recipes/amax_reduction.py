"""One maximum of amaxes for all ranks of a process group."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist


def check_group(name: str, group: Any) -> None:
    """Raise TypeError for what is neither a process group (also one that this rank is no member of) nor None."""
    if group is None or (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        return
    if not dist.is_available() or group is not dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError(f"{name} is {group!r}, but must be a torch.distributed process group, or None.")
