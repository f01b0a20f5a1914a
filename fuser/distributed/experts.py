"""Which parameters ranks divide: experts by `Dispatch(group=...)`, the width of layers by tensor_parallel."""

from __future__ import annotations

from typing import NamedTuple

from torch import nn

from ops.combine import Combine
from ops.dispatch import Dispatch
from ops.grouped_linear import GroupedLinear
from ops.kernels.collectives import RankGroup
from ops.linear import Linear


class Share(NamedTuple):
    """A layer of which this rank has a share: `num_groups` of the experts, of the width of each weight, or of both.

    experts: the group among whose ranks experts are divided; the width is divided as operation.parallel says
    """

    operation: Linear | GroupedLinear
    experts: RankGroup | None

    @property
    def own_experts(self) -> int:
        return self.operation.num_groups if isinstance(self.operation, GroupedLinear) else 1

    @property
    def first(self) -> int:
        """This rank's first expert."""
        return 0 if self.experts is None else self.experts.rank * self.own_experts

    @property
    def num_experts(self) -> int:
        """On all ranks together."""
        return self.own_experts * (1 if self.experts is None else self.experts.size)

    @property
    def numbers_experts(self) -> bool:
        """Whether each expert has parameters of its own, whose names count those of this rank."""
        return self.experts is not None and isinstance(self.operation, GroupedLinear) and not self.operation.stacked

    def groups_of(self, name: str) -> tuple[RankGroup, ...]:
        """The groups of whose ranks each has another part of this parameter of the layer."""
        parallel = self.operation.parallel
        divided = parallel is not None and parallel.divided_dim(is_bias=name.startswith("bias")) is not None
        width = (parallel.group,) if parallel is not None and divided else ()
        return width if self.experts is None else (*width, self.experts)


def shares(model: nn.Module) -> dict[str, Share]:
    """Name -> share of each layer that ranks divide, in the order of modules.

    These are the GroupedLinears between a `Dispatch(group=...)` and its Combine, and layers with tensor_parallel.

    Raises ValueError for such a GroupedLinear that has another number of experts, for one whose experts and width are
    divided among the same ranks, and for a Dispatch with a group that none follows.
    """
    found: dict[str, Share] = {}
    opened: _Opened | None = None
    for name, module in model.named_modules():
        if isinstance(module, Dispatch | Combine) and module.group is not None:
            _check_followed(opened, found)
            opened = _Opened(name, module, module.group, _with_experts(found)) if isinstance(module, Dispatch) else None
        elif isinstance(module, GroupedLinear) and opened is not None:
            found[name] = share = Share(module, opened.group)
            if share.num_experts != opened.dispatch.num_experts:
                raise ValueError(
                    f"{name} has {module.num_groups} experts on each of {opened.group.size} ranks, but its Dispatch, "
                    f"{opened.name}, has num_experts={opened.dispatch.num_experts}. Give it num_experts / ranks."
                )
            if module.parallel is not None and len({*module.parallel.group.ranks} & {*opened.group.ranks}) > 1:
                raise ValueError(
                    f"{name} has its experts divided over the ranks {list(opened.group.ranks)}, and their width over "
                    f"{list(module.parallel.group.ranks)}. Give it two dimensions of a mesh, with one rank in common."
                )
        elif isinstance(module, Linear | GroupedLinear) and module.parallel is not None:
            found[name] = Share(module, None)
    _check_followed(opened, found)
    return found


def divided_parameters(model: nn.Module) -> dict[str, tuple[RankGroup, ...]]:
    """Name -> groups of each parameter of which the ranks of these groups have different parts. Raises as `shares`."""
    found = {
        f"{owner}.{name}": share.groups_of(name)
        for owner, share in shares(model).items()
        for name, _ in share.operation.named_parameters()
    }
    return {name: groups for name, groups in found.items() if groups}


def expert_parameters(model: nn.Module) -> dict[str, RankGroup]:
    """Name -> group of each parameter of which every rank of the group has other experts.

    All others are to be the same on all ranks of the group. Raises what `shares` does.
    """
    return {
        f"{owner}.{name}": share.experts
        for owner, share in shares(model).items()
        for name, _ in share.operation.named_parameters()
        if share.experts is not None
    }


class _Opened(NamedTuple):
    """A Dispatch whose Combine is still to come. before: how many GroupedLinears were found before it."""

    name: str
    dispatch: Dispatch
    group: RankGroup
    before: int


def _with_experts(found: dict[str, Share]) -> int:
    return sum(share.experts is not None for share in found.values())


def _check_followed(opened: _Opened | None, found: dict[str, Share]) -> None:
    """Experts that are found elsewhere would pass for parameters that are the same on all ranks."""
    if opened is not None and _with_experts(found) == opened.before:
        raise ValueError(
            f"{opened.name} is a Dispatch over ranks, but no GroupedLinear follows it in the order of modules. Put the "
            "operations of the layer into one Sequential, in the order in which they run."
        )
