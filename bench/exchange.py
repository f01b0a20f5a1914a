"""Expert parallelism written by hand on `torch.distributed.all_to_all_single`: what `bench parallel` compares with.

    route -> sort by expert -> exchange counts -> send a row a (token, slot) pair -> sort by local expert -> experts
          -> send back -> sum over the slots

The row counts are read on the host once a forward. `Transfers` records the exchanges of a step, to time them alone.
"""

# T tokens, L experts of each of n ranks, R rows that come to this one

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.whole_layer import route, scaled_swiglu
from fuser import Sequential

# y from the rows, the split sizes and the scales
Experts = Callable[[Tensor, Tensor, Tensor], Tensor]


def exchanged_layer(x: Tensor, router: Tensor, experts: Experts, *, topk: int, num_experts: int) -> Tensor:
    """The layer's output [T, H] for this rank's tokens; `experts` computes those of this rank, on all ranks' rows."""
    n = dist.get_world_size()
    probs, indices = route(x, router, topk)
    by_expert, slot_of_row = indices.flatten().sort(stable=True)
    sent = torch.bincount(by_expert, minlength=num_experts)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    to_ranks, from_ranks = torch.stack((sent.view(n, -1).sum(1), received.view(n, -1).sum(1))).tolist()

    rows = _AllToAll.apply(x.index_select(0, slot_of_row // topk), to_ranks, from_ranks)
    scales = _AllToAll.apply(probs.flatten().index_select(0, slot_of_row), to_ranks, from_ranks)
    own = torch.arange(num_experts // n, device=x.device).repeat(n)
    order = own.repeat_interleave(received, output_size=sum(from_ranks)).argsort(stable=True)
    y = experts(rows.index_select(0, order), received.view(n, -1).sum(0), scales.index_select(0, order))
    back = _AllToAll.apply(y.index_select(0, order.argsort()), from_ranks, to_ranks)
    return back.index_select(0, slot_of_row.argsort()).view(*indices.shape, -1).sum(1)


def experts_of(layer: Sequential) -> Experts:
    """Our grouped MLP."""
    return lambda rows, sizes, scales: layer(rows, split_sizes=sizes, scales=scales)


def torch_experts(fc1: Tensor, fc2: Tensor) -> Experts:
    """The grouped MLP in torch's operations."""

    def experts(rows: Tensor, sizes: Tensor, scales: Tensor) -> Tensor:
        ends = sizes.cumsum(0).int()
        return F.grouped_mm(scaled_swiglu(F.grouped_mm(rows, fc1.mT, offs=ends), scales), fc2.mT, offs=ends)

    return experts


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, given: Tensor, sent: list[int], received: list[int]) -> Tensor:
        ctx.counts = sent, received
        arrived = given.new_empty(sum(received), *given.shape[1:])
        dist.all_to_all_single(arrived, given, received, sent)
        return arrived

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        sent, received = ctx.counts
        dx = dy.new_empty(sum(sent), *dy.shape[1:])
        dist.all_to_all_single(dx, dy.contiguous(), sent, received)
        return dx, None, None


class _Exchange(NamedTuple):
    """One call of all_to_all_single: its arguments."""

    output: Tensor
    given: Tensor
    received: Sequence[int] | None
    sent: Sequence[int] | None
    group: Any


class Transfers:
    """The all_to_all_single calls of a step, to be repeated without what is computed between them."""

    def __init__(self, exchanges: list[_Exchange]) -> None:
        self.exchanges = exchanges

    @classmethod
    def of(cls, step: Callable[[], object]) -> Self:
        """Those of `step`, which is run once."""
        found: list[_Exchange] = []
        with _recorded(found):
            step()
        return cls(found)

    def __call__(self) -> None:
        for output, given, received, sent, group in self.exchanges:
            dist.all_to_all_single(output, given, received, sent, group=group)

    @property
    def bytes_sent(self) -> int:
        """By this rank to others."""
        total = 0
        for _, given, _, sent, group in self.exchanges:
            n, rank = dist.get_world_size(group), dist.get_rank(group)
            rows = given.shape[0]
            own = rows // n if sent is None else sent[rank]
            total += given.nbytes * (rows - own) // rows if rows else 0
        return total


@contextmanager
def _recorded(found: list[_Exchange]) -> Iterator[None]:
    original = dist.all_to_all_single

    def record(
        output: Tensor, given: Tensor, received: Any = None, sent: Any = None, group: Any = None, **named: Any
    ) -> Any:
        found.append(_Exchange(torch.empty_like(output), given.detach().clone(), received, sent, group))
        return original(output, given, received, sent, group=group, **named)

    dist.all_to_all_single = record
    try:
        yield
    finally:
        dist.all_to_all_single = original
