"""The rate of the link between the ranks' GPUs: plain copies over torch's symmetric memory, and all_to_all_single.

    write               each rank copies from its memory to the next rank's, by a Triton kernel
    read                each rank copies from the next rank's memory to its own, by the same kernel
    all_to_all_single   each rank sends equal parts to all others, and none to itself

All ranks copy at once, `COPIED_BYTES` each, as in a layer. A program of the kernel copies 2048 bf16 values, 16
contiguous bytes a thread; on two H100 it wrote at 366 and read at 335 GB/s.
"""

# n ranks

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

from bench.ranks import of_slowest
from bench.timing import time_interleaved
from recipes.triton.gates import tl, triton

COPIED_BYTES = 128 * 2**20  # about what a rank sends in a layer
BLOCK, NUM_WARPS = 2048, 8
# Copies in a turn: so many hide the first one's launch.
CALLS = 8
WRITE, READ, EXCHANGE = "write", "read", "all_to_all_single"


class LinkRates(NamedTuple):
    """Bytes per second and direction, of the slowest rank; the median over the rounds."""

    write: float
    read: float
    all_to_all_single: float


@triton.jit
def copy_kernel(from_ptr, to_ptr, BLOCK: tl.constexpr):
    """A program copies BLOCK values."""
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_ptr + offs, tl.load(from_ptr + offs))


def copy(given: Tensor, to: Tensor) -> None:
    """Copy contiguous values, a multiple of BLOCK of them. One of the two may be the memory of another GPU."""
    copy_kernel[(given.numel() // BLOCK,)](given, to, BLOCK=BLOCK, num_warps=NUM_WARPS)


def why_no_link(ranks: int) -> str | None:
    """Why the first GPUs of this machine, one for each rank, cannot use each other's memory, as a sentence, or None."""
    for one in range(ranks):
        for other in range(ranks):
            if one != other and not torch.cuda.can_device_access_peer(one, other):
                return f"GPU {one} has no peer access to GPU {other}."
    return None


def measure_link(rounds: int = 10) -> LinkRates:
    """A collective of all ranks, a GPU each. Raises AssertionError if a copy is wrong."""
    n, rank = dist.get_world_size(), dist.get_rank()
    device = torch.device("cuda", torch.cuda.current_device())
    numel = COPIED_BYTES // torch.bfloat16.itemsize
    shared = symmetric_memory.empty(numel, dtype=torch.bfloat16, device=device)
    handle = symmetric_memory.rendezvous(shared, dist.group.WORLD)
    there = handle.get_buffer((rank + 1) % n, (numel,), torch.bfloat16)
    here = torch.full_like(shared, rank)

    meeting = torch.zeros(1, device=device)

    def meet() -> None:
        dist.all_reduce(meeting)

    def settle() -> None:
        meet()
        torch.cuda.synchronize()

    settle()
    copy(here, there)
    settle()
    assert bool((shared == (rank - 1) % n).all()), "what a rank wrote is not what the next one has"
    settle()
    shared.fill_(n + rank)
    settle()
    copy(there, here)
    assert bool((here == n + (rank + 1) % n).all()), "what a rank read is not what the next one has"

    part = numel // (n - 1)
    counts = [0 if other == rank else part for other in range(n)]
    given, arrived = here[: sum(counts)], torch.empty_like(here)[: sum(counts)]
    copies = {
        WRITE: lambda: copy(here, there),
        READ: lambda: copy(there, here),
        EXCHANGE: lambda: dist.all_to_all_single(arrived, given, counts, counts),
    }
    times = of_slowest(time_interleaved(copies, rounds=rounds, calls=CALLS, device=device, clock="device", meet=meet))
    settle()
    num_bytes = dict.fromkeys(copies, COPIED_BYTES) | {EXCHANGE: given.nbytes}
    return LinkRates(**{way: num_bytes[way] / timing.median for way, timing in times.items()})


def link_line(rates: LinkRates, ranks: int) -> str:
    """The sentence with the rates of the link."""
    shown = ", ".join(f"{way} {rate / 1e9:.1f} GB/s" for way, rate in rates._asdict().items())
    return f"link between {ranks} GPUs, {COPIED_BYTES // 2**20} MiB a rank, all ranks at once: {shown}"


def link_figures(rates: LinkRates | None) -> dict[str, Any]:
    """The rates of the link in bytes per second, for the JSON file; empty where there is none."""
    return {} if rates is None else {"bytes": COPIED_BYTES, **rates._asdict()}
