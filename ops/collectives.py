"""AllGather, ReduceScatter, Gather, Scatter, AllReduce and Broadcast: torch.distributed's collectives as operations."""
# n ranks, T rows

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from torch import Tensor

from ops.kernels.collectives import (
    BACKENDS_ORDER,
    NOT_REPEATED,
    NOT_TRACED,
    RankGroup,
    Ranks,
    all_gather,
    all_reduce,
    broadcast,
    check_alike,
    own_rows,
    reduce,
    reduce_scatter,
)
from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from ops.runner.set_once import SetOnce
from recipes.arguments import as_integer
from recipes.request import PlanRequest


class CollectiveOperation(BasicOperation):
    """An operation whose forward or backward is a collective. A subclass computes y and dx by `exchange`, `give_back`.

    group: a torch.distributed ProcessGroup, or a DeviceMesh of one dimension (mesh["tp"]). Its backend must have x's
    device: NCCL for GPUs, gloo for CPUs. With NCCL the operation can be captured in a CUDA graph, with gloo not; a step
    with it is not repeated as a whole.

    x may be float32, bfloat16, float16 or float64, quantized containers are dequantized before. Sums are computed in
    the dtype of x, in the order of the backend.

    Every rank of the group calls forward and backward equally often and in the same order, also without rows, and x is
    of the same shape and dtype and needs a gradient on all or none of them. For CPU tensors that is compared, and ranks
    that differ raise the same RuntimeError. On GPUs it is not, since that would synchronize: there ranks that differ
    wait for each other until the group's timeout, or receive wrong values.

    Raises TypeError for a group of another type, ValueError for one without this rank or a mesh of more dimensions;
    before anything is sent, ValueError for an x that the ranks do not divide, or on a device that the group has no
    backend for.
    """

    forward_name: ClassVar[str]
    backward_name: ClassVar[str]
    why_in_full = NOT_REPEATED
    group = SetOnce[RankGroup]()

    def __init__(self, group: Ranks) -> None:
        super().__init__()
        self.group = RankGroup(group)

    def exchange(self, x: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no exchange.")

    def give_back(self, dy: Tensor) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} has no give_back.")

    def why_not(self, x: Tensor) -> str | None:
        """Why this x cannot be exchanged, or None."""
        return None

    def why_not_captured(self, request: PlanRequest) -> str | None:
        return self.group.why_not_captured(request.device)

    def why_not_traced(self, path: str) -> str | None:
        return NOT_TRACED

    def kernel(self, request: PlanRequest) -> str:
        return f"{self.forward_name}, backward {self.backward_name}, {self.group.describe(request.device)}"

    def features(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        why = self.why_not(x)

        def describe() -> str:
            gradient = "with" if ctx.needs.input else "without"
            return f"{type(self).__name__} of {list(x.shape)} in {x.dtype} {gradient} a gradient"

        check_alike(self.group, x.device, describe, None if why is None else ValueError(why))
        return self.exchange(x), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        return self.give_back(dy) if ctx.needs.input else None, {}, {}

    def extra_repr(self) -> str:
        return f"group={self.group}"


class SummingOperation(CollectiveOperation):
    """A collective that adds up what the ranks have."""

    def why_not_batch_invariant(self, request: PlanRequest) -> str | None:
        return BACKENDS_ORDER


class AllGather(CollectiveOperation):
    """y = [x_0; x_1; ...; x_(n-1)], the x of all ranks in rank order; x [T, ...], y [n T, ...].

    Backward: dx = rows [r T, (r + 1) T) of the sum of all ranks' dy, on rank r. That is the gradient of the sum of the
    ranks' losses.

    For all else, see `CollectiveOperation`.
    """

    forward_name, backward_name = "all_gather", "reduce_scatter"
    repeatable = True

    def exchange(self, x: Tensor) -> Tensor:
        return all_gather(x, self.group)

    def give_back(self, dy: Tensor) -> Tensor:
        return reduce_scatter(dy, self.group)

    def why_not(self, x: Tensor) -> str | None:
        return why_not_rows(x, 1)


class ReduceScatter(SummingOperation):
    """y = rows [r T/n, (r + 1) T/n) of the sum of all ranks' x, on rank r; x [T, ...], y [T/n, ...].

    Backward: dx = [dy_0; dy_1; ...; dy_(n-1)], the dy of all ranks in rank order. That is the gradient of the sum of
    the ranks' losses.

    Raises ValueError for an x whose T the ranks do not divide. For all else, see `CollectiveOperation`.
    """

    forward_name, backward_name = "reduce_scatter", "all_gather"
    repeatable = True

    def exchange(self, x: Tensor) -> Tensor:
        return reduce_scatter(x, self.group)

    def give_back(self, dy: Tensor) -> Tensor:
        return all_gather(dy, self.group)

    def why_not(self, x: Tensor) -> str | None:
        return why_not_rows(x, self.group.size)


class Gather(CollectiveOperation):
    """y = [x_0; x_1; ...; x_(n-1)], the x of all ranks in rank order; x [T, ...], y [n T, ...].

    Backward: dx = rows [r T, (r + 1) T) of dy on rank r, for a dy that all ranks have alike, because all compute the
    same loss from y: `AllGather`, which sums them, would give n times as much. So all rows go through layers that every
    rank has, such as a Router, and behind these each rank goes on with its own by `Scatter`. It is Megatron's gather
    from the sequence parallel region with tensor_parallel_output_grad=False. Nothing is sent in backward; that the
    values of dy are the same is not checked.

    For all else, see `CollectiveOperation`.
    """

    forward_name, backward_name = "all_gather", "this rank's rows"
    repeatable = True

    def exchange(self, x: Tensor) -> Tensor:
        return all_gather(x, self.group)

    def give_back(self, dy: Tensor) -> Tensor:
        return own_rows(dy, self.group)

    def why_not(self, x: Tensor) -> str | None:
        return why_not_rows(x, 1)


class Scatter(CollectiveOperation):
    """y = rows [r T/n, (r + 1) T/n) of x on rank r, for an x that all ranks have alike; x [T, ...], y [T/n, ...].

    Backward: dx = [dy_0; dy_1; ...; dy_(n-1)], the dy of all ranks in rank order. That is the gradient of the sum of
    the ranks' losses, each of which is of its own rows, and it is alike on all ranks. So behind a row-parallel layer
    without sequence_parallel, or `AllReduce`, a rank goes on with its rows alone: Megatron's scatter to the sequence
    parallel region. Nothing is sent in forward; that the values of x are the same is not checked.

    Raises ValueError for an x whose T the ranks do not divide. For all else, see `CollectiveOperation`.
    """

    forward_name, backward_name = "this rank's rows", "all_gather"
    repeatable = True

    def exchange(self, x: Tensor) -> Tensor:
        return own_rows(x, self.group)

    def give_back(self, dy: Tensor) -> Tensor:
        return all_gather(dy, self.group)

    def why_not(self, x: Tensor) -> str | None:
        return why_not_rows(x, self.group.size)


class AllReduce(SummingOperation):
    """y = sum_r x_r, the sum of all ranks' x, for x of any shape.

    Backward: dx = dy, without a collective. That is the gradient of one loss that every rank computes alike from y, as
    behind a row-parallel layer, where all ranks have the same dy.

    For all else, see `CollectiveOperation`.
    """

    forward_name, backward_name = "all_reduce", "identity"
    repeatable = True

    def exchange(self, x: Tensor) -> Tensor:
        return all_reduce(x, self.group)

    def give_back(self, dy: Tensor) -> Tensor:
        return dy


class Broadcast(CollectiveOperation):
    """y = x_src, the x of rank `src` of the group, for x of any shape. The other ranks' x has the shape, no more.

    Backward: dx = sum_r dy_r on rank src, zeros on the others. That is the gradient of the sum of the ranks' losses.

    src: a rank of the group, from 0 to n - 1

    Raises ValueError for a src that is none, TypeError for one that is no integer. For all else, see
    `CollectiveOperation`.
    """

    forward_name, backward_name = "broadcast", "reduce"
    repeatable = True

    def __init__(self, src: int, group: Ranks) -> None:
        super().__init__(group)
        src = as_integer("src", src)
        if not 0 <= src < self.group.size:
            raise ValueError(
                f"src is {src}, but the group has the ranks 0 to {self.group.size - 1}. Count within the group."
            )
        self.src = src

    def exchange(self, x: Tensor) -> Tensor:
        return broadcast(x, self.src, self.group)

    def give_back(self, dy: Tensor) -> Tensor:
        return reduce(dy, self.src, self.group)

    def kernel(self, request: PlanRequest) -> str:
        return f"{super().kernel(request)}, rank {self.src}"

    def extra_repr(self) -> str:
        return f"src={self.src}, {super().extra_repr()}"


def why_not_rows(x: Tensor, ranks: int) -> str | None:
    """Why the rows of x, its first dimension, cannot be divided among so many ranks, or None."""
    if x.dim() == 0:
        return "x has no dimension, but rows are needed: its first dimension is what the ranks divide. Give x[None]."
    if x.shape[0] % ranks:
        return (
            f"x has {x.shape[0]} rows, but the {ranks} ranks of the group must divide them. Pad x to a multiple of "
            f"{ranks} rows."
        )
    return None
