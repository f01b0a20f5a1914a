"""Memory on each rank of a group that kernels of all its ranks write and read: torch's symmetric memory.

The ranks are on GPUs of one NVLink domain, which here is one host. Allocating is a collective; barriers are kernels, so
they can be captured in CUDA graphs. Those of one group run in one order, the same on every rank.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from ops.kernels.collectives import RankGroup, difference


class SymmetricMemory(NamedTuple):
    """As many bytes on each rank.

    local: [bytes] uint8: this rank's
    addresses: [n] int64, on the device: where each rank's begin for kernels of this rank; multiples of 128
    barrier: what the ranks issued before it is done, and visible to all, before what any of them issues after it
    """

    local: Tensor
    addresses: Tensor
    barrier: Callable[[], None]


def why_not_symmetric(device: torch.device) -> str | None:
    """Why tensors of this device have no symmetric memory, as a sentence, or None."""
    if device.type == "cuda":
        return None
    return f"x is on {device.type}, but transport='symmetric' writes to GPUs. Move x to one, or use 'alltoall'."


def allocate(num_bytes: int, group: RankGroup, device: torch.device) -> SymmetricMemory:
    """So many bytes on each rank. A collective.

    A barrier that waits for longer than the group's timeout ends the process's work on the GPU with an error.

    Raises RuntimeError, with the same sentence on every rank, where the ranks are on several hosts; and where torch
    cannot map the memory of one rank on another.
    """
    hosts = difference(
        group,
        f"host {socket.gethostname()}",
        "Symmetric memory is within one NVLink domain, which here is one host. Use transport='alltoall'.",
    )
    if hosts:
        raise RuntimeError(hosts)
    try:
        local = symmetric_memory.empty(num_bytes, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(local, group.process_group)
    except RuntimeError as error:
        raise RuntimeError(
            f"torch has no symmetric memory over {group}: {error}. Each rank needs a GPU of its own, all with peer "
            "access to each other. Use transport='alltoall' where they have none."
        ) from error
    # A tensor may begin inside of what was allocated, at the same place on every rank.
    inside = local.data_ptr() - handle.buffer_ptrs[group.rank]
    addresses = torch.tensor([address + inside for address in handle.buffer_ptrs], device=device)
    timeout = group.process_group._get_backend(device).options._timeout
    milliseconds = int(timeout.total_seconds() * 1000)

    def barrier() -> None:
        handle.barrier(channel=0, timeout_ms=milliseconds)

    local.zero_()
    barrier()
    return SymmetricMemory(local, addresses, barrier)
