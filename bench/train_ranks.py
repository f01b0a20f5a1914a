"""How the ranks of a training run divide a step: each takes its part of the batch, and gradients are summed."""

from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fuser.distributed import expert_parameters

Made = TypeVar("Made")


class TrainRanks:
    """This rank of a run. Without a mesh it is the only one, and everything here leaves things as they are.

    count: how many ranks there are; is_first: whether this one writes the files
    """

    def __init__(self, mesh: DeviceMesh | None) -> None:
        self.mesh = mesh
        self.count = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else dist.get_rank()
        self.is_first = self.rank == 0

    def share(self, batch: Tensor) -> Tensor:
        """This rank's part [B / count, ...] of a batch [B, ...]: ranks in order have the whole batch in order."""
        return batch.chunk(self.count)[self.rank]

    def sum_gradients(self, model: nn.Module) -> None:
        """The gradients of the sum of all ranks' losses, from those of each.

        Those of experts have the tokens of the ranks that divide them already, so they are summed over dp alone.
        """
        if self.mesh is None:
            return
        experts, among_replicas = expert_parameters(model), self.mesh["dp"].get_group()
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=among_replicas if name in experts else None)

    def mean(self, figure: Tensor) -> float:
        """The mean of what the ranks give, ()."""
        if self.mesh is None:
            return figure.item()
        total = figure.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.count

    def from_first(self, make: Callable[[], Made]) -> Made:
        """What `make()` gives on the first rank, on all of them."""
        if self.mesh is None:
            return make()
        held = [make() if self.is_first else None]
        dist.broadcast_object_list(held, src=0)
        return held[0]  # type: ignore[return-value]  # filled by the broadcast
