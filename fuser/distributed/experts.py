"""Which parameters of a model are experts that `Dispatch(group=...)` divides among ranks."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from ops.combine import Combine
from ops.dispatch import Dispatch
from ops.grouped_linear import GroupedLinear
from ops.kernels.collectives import RankGroup
from ops.linear import Linear


class ExpertShare(NamedTuple):
    """The experts of one GroupedLinear, divided among the ranks of a group: this rank has `num_groups` of them."""

    operation: GroupedLinear
    group: RankGroup

    @property
    def first(self) -> int:
        """This rank's first expert."""
        return self.group.rank * self.operation.num_groups

    @property
    def num_experts(self) -> int:
        """On all ranks together."""
        return self.group.size * self.operation.num_groups


def expert_shares(model: nn.Module) -> dict[str, ExpertShare]:
    """Name -> share of each GroupedLinear between a `Dispatch(group=...)` and its Combine, in the order of modules.

    Raises ValueError for such a GroupedLinear that has another number of experts, and for a Dispatch with a group that
    none follows; NotImplementedError for layers that are divided by tensor_parallel, whose shares are not known here.
    """
    found: dict[str, ExpertShare] = {}
    opened: _Opened | None = None
    for name, module in model.named_modules():
        if isinstance(module, Linear | GroupedLinear) and module.parallel is not None:
            raise NotImplementedError(
                f"{name} is divided by tensor_parallel={module.parallel.mode!r}, and shares of weights are known of "
                "experts alone. Handle the state and the norm of this model by its own means."
            )
        if isinstance(module, Dispatch | Combine) and module.group is not None:
            _check_followed(opened, found)
            opened = _Opened(name, module, module.group, len(found)) if isinstance(module, Dispatch) else None
        elif isinstance(module, GroupedLinear) and opened is not None:
            found[name] = ExpertShare(module, opened.group)
            if found[name].num_experts != opened.dispatch.num_experts:
                raise ValueError(
                    f"{name} has {module.num_groups} experts on each of {opened.group.size} ranks, but its Dispatch, "
                    f"{opened.name}, has num_experts={opened.dispatch.num_experts}. Give it num_experts / ranks."
                )
    _check_followed(opened, found)
    return found


def expert_parameters(model: nn.Module) -> dict[str, RankGroup]:
    """Name -> group of each parameter of which every rank of the group has other experts.

    All others are to be the same on all ranks. Raises what `expert_shares` does.
    """
    return {
        f"{owner}.{name}": share.group
        for owner, share in expert_shares(model).items()
        for name, _ in share.operation.named_parameters()
    }


class _Opened(NamedTuple):
    """A Dispatch whose Combine is still to come. before: how many GroupedLinears were found before it."""

    name: str
    dispatch: Dispatch
    group: RankGroup
    before: int


def _check_followed(opened: _Opened | None, found: dict[str, ExpertShare]) -> None:
    """Experts that are found elsewhere would pass for parameters that are the same on all ranks."""
    if opened is not None and len(found) == opened.before:
        raise ValueError(
            f"{opened.name} is a Dispatch over ranks, but no GroupedLinear follows it in the order of modules. Put the "
            "operations of the layer into one Sequential, in the order in which they run."
        )
