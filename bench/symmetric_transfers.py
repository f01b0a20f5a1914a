"""What the kernels of transport="symmetric" transfer between GPUs in a step of the layer, and how fast.

    push_kernel       writes: a row for each token and other rank that owns any of its experts. In forward x, with a
                      scale and an origin for each (token, slot) pair of another rank, and the rows of the token's slots
                      there; in backward dy
    pull_kernel       reads: a row for each pair whose expert is on another rank. In forward y; in backward dx, with the
                      gradient of each such pair's scale. With partial sums these gradients alone
    pull_sums_kernel  reads: with partial sums, a row for each token and other rank. In forward y, in backward dx
    barrier_kernel    its time contains the waiting for the other ranks, so it is reported apart

Rows that are written are counted as they are sent, as codes too (`pushed_row_bytes`). The kernels also move rows that
stay on their rank; their rate is that of the bytes which cross the link alone.
"""

# T tokens, n ranks, E experts, H features

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch.distributed as dist
from torch import Tensor

from bench.case import PASSES, TimedPass
from bench.device_events import device_events, seconds_of_steps
from bench.link import READ, WRITE, LinkRates
from bench.timing import Timing, summarize
from ops.kernels.routing import symmetric
from ops.kernels.routing.symmetric import push as symmetric_push
from ops.kernels.routing.symmetric_triton import pull_kernel, pull_sums_kernel, push_kernel
from ops.kernels.routing.transports import sent_dtype

# Each with the rate of the link that it is compared with.
TRANSFER_KERNELS = ((push_kernel.__name__, WRITE), (pull_kernel.__name__, READ), (pull_sums_kernel.__name__, READ))
BARRIER_KERNEL = "barrier_kernel"  # torch's
PROFILED_STEPS = 10
_SCALE_BYTES = _ORIGIN_BYTES = _MEMBER_BYTES = 4


@dataclass(frozen=True)
class KernelUse:
    """A kernel in a step: its seconds, the bytes that cross the link for it, and bytes per second of plain copies."""

    name: str
    direction: str
    seconds: float
    num_bytes: int
    peer_rate: float

    @property
    def rate(self) -> float:
        return self.num_bytes / self.seconds

    @property
    def of_peer_rate(self) -> float:
        return self.rate / self.peer_rate


@dataclass(frozen=True)
class SymmetricTransfers:
    """kernels: each of the rank on which its rate is lowest; times, barriers: seconds a step of the slowest rank"""

    kernels: tuple[KernelUse, ...]
    times: Timing
    barriers: Timing

    def figures(self) -> dict[str, Any]:
        """For the JSON file."""
        uses = [vars(use) | {"rate": use.rate, "of_peer_rate": use.of_peer_rate} for use in self.kernels]
        return {"kernels": uses, "times": self.times._asdict(), "barriers": self.barriers._asdict()}


def pushed_row_bytes(step: TimedPass) -> list[int]:
    """The bytes of a row in each call of push of a step, which is run once, not captured."""
    found: list[int] = []

    def noted(x: Tensor, *rest: Any) -> None:
        found.append(x.shape[1] * x.element_size())
        symmetric_push(x, *rest)

    with patch.object(symmetric, "push", noted):
        step()
    return found


def bytes_over_link(
    indices: Tensor,
    rank: int,
    ranks: int,
    num_experts: int,
    row: Tensor,
    passes: str,
    pushed_rows: Sequence[int],
    partial_sums: str | None = None,
) -> dict[str, int]:
    """The bytes of this rank's tokens that cross the link in a pass, for each of `TRANSFER_KERNELS` that runs in it.

    indices: [T, topk], the experts of each token, E num_experts of them on n ranks; row: [H], of the dtype of x
    pushed_rows: the bytes of a row that is written, each time

        [[2, 3], [0, 2]], rank 1 of 2, 4 experts, forward  ->  1 token is written to rank 0, 1 row is read from it
    """
    owner = indices // (num_experts // ranks)
    pairs = int((owner != rank).sum())
    tokens = sum(int((owner == other).any(1).sum()) for other in range(ranks) if other != rank)
    backward = passes != PASSES[0]
    transfers = 2 if backward else 1
    d_scales = pairs * _SCALE_BYTES if backward else 0
    pushed = tokens * sum(pushed_rows) + pairs * (_SCALE_BYTES + _ORIGIN_BYTES)
    pushed += tokens * indices.shape[1] * _MEMBER_BYTES
    (push, _), (pull, _), (pull_sums, _) = TRANSFER_KERNELS
    if partial_sums is None:
        return {push: pushed, pull: transfers * pairs * row.nbytes + d_scales}
    summed = transfers * tokens * row.numel() * sent_dtype(partial_sums, row.dtype).itemsize
    return {push: pushed, pull_sums: summed} | ({pull: d_scales} if backward else {})


def measure_transfers(step: TimedPass, num_bytes: Mapping[str, int], rates: LinkRates) -> SymmetricTransfers:
    """Profile some warmed-up steps on all ranks, a collective. num_bytes: `bytes_over_link` of this rank.

    Raises RuntimeError, on every rank, if the profiler has not seen the kernels on one of them.
    """
    events = device_events(step, PROFILED_STEPS)
    try:
        mine: Any = {name: seconds_of_steps(events, name, PROFILED_STEPS) for name in (*num_bytes, BARRIER_KERNEL)}
    except RuntimeError as error:
        mine = str(error)
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, (mine, dict(num_bytes)))
    for seconds, _ in of_ranks:
        if isinstance(seconds, str):
            raise RuntimeError(seconds)
    return slowest(of_ranks, rates)


def slowest(
    of_ranks: Sequence[tuple[Mapping[str, Sequence[float]], Mapping[str, int]]], rates: LinkRates
) -> SymmetricTransfers:
    """What all ranks measured, each (the seconds of each step by kernel, bytes by kernel), as that of the slowest."""
    uses = []
    directions = dict(TRANSFER_KERNELS)
    for name in of_ranks[0][1]:
        peer_rate = rates._asdict()[directions[name]]
        of_kernel = [
            KernelUse(name, directions[name], summarize(list(seconds[name])).median, num_bytes[name], peer_rate)
            for seconds, num_bytes in of_ranks
        ]
        uses.append(min(of_kernel, key=lambda use: use.rate))
    totals, barriers = [], []
    for seconds, _ in of_ranks:
        totals.append(summarize([sum(step) for step in zip(*(seconds[use.name] for use in uses), strict=True)]))
        barriers.append(summarize(list(seconds[BARRIER_KERNEL])))
    return SymmetricTransfers(tuple(uses), max(totals), max(barriers))
