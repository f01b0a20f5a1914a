"""The state of a model and its optimizer, in which what ranks divide, experts and widths, is that of all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from fuser.distributed.experts import Share, shares
from fuser.quantized_model import dequantized_state_dict
from ops.kernels.collectives import RankGroup, all_gather
from ops.products.tensor_parallel import TensorParallel

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
# Names of modules that wrap others, which torch leaves out of the keys of a state.
_WRAPPERS = ("_checkpoint_wrapped_module", "_orig_mod")
_STEP = re.compile(r"state\..*\.step")
_OF_ONE_GROUP = re.compile(r"(weight|bias)(\d+)")

Entries = dict[str, Any]


class TrainingState:
    """The state of a model, and of its optimizer, for `torch.distributed.checkpoint` and for other numbers of ranks.

        dcp.save({"training": TrainingState(model, optimizer)}, checkpoint_id=path)     # on all ranks
        dcp.load({"training": TrainingState(model, optimizer)}, checkpoint_id=path)     # on other ranks, or on one

    The state is that of the model that is not divided (`Dispatch` without a group, layers without tensor_parallel): the
    same keys, and each tensor that of all ranks, a DTensor: Shard(0) over the group of experts, Shard of the dimension
    that tensor_parallel divides over its group, or over both, and then over the mesh of `fully_shard`. Of `gated`
    layers, whose shares are no slices, the ranks exchange what makes slices of them: copies. With one parameter a group
    (`stacked=False`) a key has the number of the expert among all. So it is saved and loaded across different numbers
    of ranks, also one, and between divided and other models. The optimizer's state is by parameter name
    ("state.NAME.exp_avg", "param_groups.NAME.lr"). Weights that are held quantized are in it dequantized, and quantized
    again in a load.

    model: on which `fully_shard`, if any, was called. Its recipe's state (delayed scaling) takes part where it exists:
        `fuser.prepare` creates it before a load.
    optimizer: of torch, or None; one that steps the model's parameters, and so not `MasterWeights`. Of one that has not
        run yet the state is that after a step with gradients and learning rates of zero, which calls its step hooks, as
        `torch.distributed.checkpoint.state_dict` makes it, with a `step` of zero; the optimizer and all gradients stay
        as they are, and a load of it gives a new one. Optimizers whose state has no `step` load zeros then: SGD with
        dampening does not begin as a new one.

    Raises ValueError for an optimizer that steps what is no parameter of the model, what
    `fuser.distributed.experts.shares` does; ValueError for state of experts whose first dimension is not that of the
    experts, or of a divided layer that has not its shape, for parameters that are sharded over a mesh which has other
    ranks of the group that divides them, and for a state of scales that differs between ranks that divide a layer
    (`DelayedScaling` with reduce_amax=False): the undivided layer has one.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
        self.model, self.optimizer = model, optimizer
        own = {id(parameter) for parameter in model.parameters()}
        if optimizer is not None and not own.issuperset(map(id, _stepped(optimizer))):
            raise ValueError(
                f"{type(optimizer).__name__} steps what is no parameter of {type(model).__name__}, such as masters of "
                "quantized weights, and has no names in its state. Give the optimizer of model.parameters(), or none, "
                "and save the optimizer's own state beside it."
            )
        self._shares = {_without_wrappers(name): share for name, share in shares(model).items()}
        self._meshes: dict[tuple[RankGroup, DeviceMesh | str], DeviceMesh] = {}

    def state_dict(self) -> dict[str, Entries]:
        """{"model": ..., "optimizer": ...}. Shares memory with the model, but for gated layers. Called on all ranks."""
        return {part: dict(self._of_all(part, entries)) for part, entries in self._of_rank().items()}

    def load_state_dict(self, state_dict: Mapping[str, Mapping[str, Any]]) -> None:
        """Load what `state_dict` gave, or the same with whole tensors, of which each rank takes its share.

        Raises KeyError if a part is missing, RuntimeError for state of a parameter for which the optimizer has none,
        and what `load_state_dict` of the model and the optimizer do.
        """
        own = self._of_rank()
        mine = {part: dict(self._share_of(part, state_dict[part], entries)) for part, entries in own.items()}
        if self.optimizer is not None:
            _require_state_of_all(own["optimizer"], mine["optimizer"])
        set_model_state_dict(self.model, mine["model"], options=_FLAT)
        if self.optimizer is not None:
            is_new = not self.optimizer.state
            with _without_gradients(self.optimizer):
                set_optimizer_state_dict(self.model, self.optimizer, mine["optimizer"], options=_FLAT)
            steps = [step for key, step in mine["optimizer"].items() if _STEP.fullmatch(key)]
            if is_new and steps and not any(steps):  # saved before the first step: it stays new
                self.optimizer.state.clear()

    def whole_state_dict(self) -> dict[str, Entries]:
        """`state_dict()` with whole tensors on the CPU, for `torch.save` on one rank. A collective: called on all."""
        parts = self.state_dict()
        for part, entries in parts.items():
            entries |= {key: _whole(value) for key, value in entries.items() if isinstance(value, Tensor)}
            for group in {share.experts: None for share in self._shares.values() if share.numbers_experts}:
                assert group is not None, "numbered experts are divided"
                own = {key: value for key, value in entries.items() if self._is_of_one_rank(part, key, group)}
                of_ranks: list[Any] = [None] * group.size
                dist.all_gather_object(of_ranks, own, group=group.process_group)
                for of_rank in of_ranks:
                    entries |= of_rank
        return parts

    def _of_rank(self) -> dict[str, Entries]:
        """As torch gives it, with this rank's share alone."""
        parts: dict[str, Entries] = {"model": dequantized_state_dict(get_model_state_dict(self.model))}
        for owner, share in self._shares.items():
            names = [f"{owner}.{name}" for name, _ in share.operation.named_parameters()]
            if not parts["model"].keys() >= set(names):
                raise RuntimeError(
                    f"{names[0]} is no key of the model's state, which has {', '.join(list(parts['model'])[:3])}, ... "
                    "Give the model without what wraps it and changes its names."
                )
        if self.optimizer is not None:
            parts["optimizer"] = self._state_of(self.optimizer)
        return parts

    def _state_of(self, optimizer: torch.optim.Optimizer) -> Entries:
        has_run, groups = bool(optimizer.state), _copied_groups(optimizer)
        with _without_gradients(optimizer):
            entries: Entries = {**get_optimizer_state_dict(self.model, optimizer, options=_FLAT)}
        if not has_run:
            _forget_run(optimizer, groups)
            for key in filter(_STEP.fullmatch, entries):
                entries[key] = entries[key].zero_() if isinstance(entries[key], Tensor) else 0
        return entries

    def _of_all(self, part: str, entries: Entries) -> Iterator[tuple[str, Any]]:
        for key, value in entries.items():
            place = self._place(part, key)
            if place is not None:
                if (dim := place.width_dim(value, of_all=False)) is not None:
                    value = self._with_whole_width(place, value, dim)
                elif place.is_state_of_scales:
                    place.check_alike(value)
                if place.expert is not None:
                    key = place.key_of(place.expert + place.share.first)
                elif (dim := place.expert_dim(value, place.share.own_experts)) is not None:
                    assert place.share.experts is not None, "experts are divided"
                    value = self._joined(value, dim, place.share.experts)
            yield key, value

    def _share_of(self, part: str, given: Mapping[str, Any], own: Entries) -> Iterator[tuple[str, Any]]:
        """The entries of this rank in `given`. own: those it has now, which show how they are divided."""
        for key, value in given.items():
            place = self._place(part, key)
            if place is not None and place.expert is not None:
                expert = place.expert - place.share.first
                if not 0 <= expert < place.share.own_experts:
                    continue
                key = place.key_of(expert)
            like = own.get(key)
            if place is not None:
                value = _own_part(place, value, like)
            if isinstance(like, DTensor) and not isinstance(value, DTensor):
                value = distribute_tensor(value.to(like.device), like.device_mesh, like.placements, src_data_rank=None)
            yield key, value

    def _is_of_one_rank(self, part: str, key: str, group: RankGroup) -> bool:
        """Whether the entry is that of one expert."""
        place = self._place(part, key)
        return place is not None and place.share.experts == group and place.expert is not None

    def _place(self, part: str, key: str) -> _Place | None:
        """Where in the experts an entry belongs; None if it is of no expert."""
        head, name, tail = "", key, ""
        if part == "optimizer":
            head, _, rest = key.partition(".")
            name, _, tail = rest.rpartition(".")
        owner = name
        while owner and owner not in self._shares:
            owner = owner.rpartition(".")[0]
        return _Place(self._shares[owner], head, owner, name[len(owner) + 1 :], tail) if owner else None

    def _with_whole_width(self, place: _Place, value: Tensor, dim: int) -> DTensor:
        """The tensor of which tensor_parallel has given this rank a share."""
        parallel = place.parallel
        if parallel.gated:
            n, rank = parallel.group.size, parallel.group.rank
            value = _exchanged(value, place, lambda parts: place.whole(parts).chunk(n, dim)[rank])
        return self._joined(value, dim, parallel.group)

    def _joined(self, value: Tensor, dim: int, group: RankGroup) -> DTensor:
        """The tensor of all ranks of the group, of which `value` is this rank's part."""
        shape = list(value.shape)
        shape[dim] *= group.size
        if isinstance(value, DTensor):  # of fully_shard, or of another group
            local, mesh = value.to_local(), self._mesh(group, value.device_mesh)
            placements = (Shard(dim), *value.placements)
        else:
            local, mesh, placements = value, self._mesh(group, value.device.type), (Shard(dim),)
        return DTensor.from_local(
            local,
            mesh,
            placements,
            shape=torch.Size(shape),
            stride=torch.empty(shape, device="meta").stride(),
        )

    def _mesh(self, group: RankGroup, inner: DeviceMesh | str) -> DeviceMesh:
        """The group as the first dimension of a mesh; inner: what follows, or the kind of device."""
        if (group, inner) not in self._meshes:
            self._meshes[group, inner] = _mesh_before(group, inner)
        return self._meshes[group, inner]


class _Place(NamedTuple):
    """An entry of the layer of `share`: its key is head.owner.leaf.tail; leaf is dotted for a submodule's."""

    share: Share
    head: str
    owner: str
    leaf: str
    tail: str

    @property
    def expert(self) -> int | None:
        """Its number in the leaf's name, if each expert has a parameter of its own."""
        numbered = _OF_ONE_GROUP.fullmatch(self.leaf) if self.share.numbers_experts else None
        return None if numbered is None else int(numbered[2])

    @property
    def parallel(self) -> TensorParallel:
        assert self.share.operation.parallel is not None, "its width is divided"
        return self.share.operation.parallel

    @property
    def is_bias(self) -> bool:
        return self.leaf.startswith("bias")

    @property
    def is_state_of_scales(self) -> bool:
        """Of a layer whose width is divided."""
        return self.leaf.startswith("quantizer_") and self.share.operation.parallel is not None

    def whole(self, parts: list[Tensor]) -> Tensor:
        return self.parallel.whole(parts, is_bias=self.is_bias)

    def own(self, whole: Tensor) -> Tensor:
        return self.parallel.share(whole, is_bias=self.is_bias)

    def key_of(self, expert: int) -> str:
        leaf = f"{self.leaf.rstrip('0123456789')}{expert}"
        return ".".join(filter(None, (self.head, self.owner, leaf, self.tail)))

    def expert_dim(self, value: Any, experts: int) -> int | None:
        """The dimension of `value` that has an entry for each of `experts`; None for what is no tensor, or a scalar."""
        divided = self.share.experts is not None and self.expert is None
        if not divided or not isinstance(value, Tensor) or value.dim() == 0:
            return None
        dim = value.dim() - 1 if self.leaf.startswith("quantizer_") else 0
        if value.shape[dim] != experts:
            raise ValueError(
                f"{self._name} has shape {list(value.shape)}, but needs {experts} experts along dimension {dim}. Take "
                "the state of a layer of as many experts, and an optimizer whose state has the shape of its parameters."
            )
        return dim

    def width_dim(self, value: Any, *, of_all: bool) -> int | None:
        """The dimension of `value` that tensor_parallel divides; None for what is not divided.

        of_all: whether `value` is of all ranks, or this rank's share
        """
        parallel = self.share.operation.parallel
        if parallel is None or not isinstance(value, Tensor) or value.dim() == 0 or self.is_state_of_scales:
            return None
        from_last = parallel.divided_dim(is_bias=self.is_bias)
        if from_last is None:
            return None
        own = parallel.in_features if parallel.is_row else parallel.out_features
        size, dim = own * (parallel.group.size if of_all else 1), value.dim() + from_last
        if dim < 0 or value.shape[dim] != size:
            raise ValueError(
                f"{self._name} has shape {list(value.shape)}, but needs {size} along dimension {from_last}. Take the "
                "state of a layer of that width, and an optimizer whose state has the shape of its parameters."
            )
        return dim

    def check_alike(self, value: Tensor) -> None:
        """Raise ValueError, on all ranks, for a state of scales that is not the same on all that divide the layer."""
        if any(not torch.equal(other, value) for other in all_gather(value[None], self.parallel.group)):
            raise ValueError(
                f"{self._name} differs between the ranks that divide the layer by tensor_parallel, but the undivided "
                "layer has one. Take DelayedScaling(reduce_amax=True)."
            )

    @property
    def _name(self) -> str:
        return ".".join(filter(None, (self.owner, self.leaf, self.tail)))


def _own_part(place: _Place, value: Any, like: Any) -> Any:
    """This rank's part of an entry of all ranks, in the layout of `like`, the entry that it has now."""
    expert_dim = place.expert_dim(value, place.share.num_experts)
    width_dim = place.width_dim(value, of_all=True)
    if expert_dim is None and width_dim is None:
        return value
    if not isinstance(value, DTensor):
        if expert_dim is not None:
            value = value.narrow(expert_dim, place.share.first, place.share.own_experts)
        return (value if width_dim is None else place.own(value)).clone()
    part: Tensor = value.to_local()
    if isinstance(like, DTensor):
        part = DTensor.from_local(
            part, like.device_mesh, like.placements, shape=like.shape, stride=like.stride()
        )  # fmt: skip
    if width_dim is None or not place.parallel.gated:
        return part
    return _exchanged(part, place, lambda parts: place.own(torch.cat(parts, width_dim)))


def _exchanged(value: Tensor, place: _Place, made_of: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """What is made of the parts of all ranks that divide the layer, sharded as `value` is."""
    own = value.full_tensor() if isinstance(value, DTensor) else value
    made = made_of(list(all_gather(own[None], place.parallel.group))).contiguous()
    if isinstance(value, DTensor):
        return distribute_tensor(made, value.device_mesh, value.placements, src_data_rank=None)
    return made


def _require_state_of_all(own: Entries, given: Entries) -> None:
    """torch would leave out what the optimizer does not have."""
    left_out = [key for key in given if key.startswith("state.") and key not in own]
    if left_out:
        raise RuntimeError(
            f"The optimizer has no {left_out[0]} (and {len(left_out) - 1} others) to load into: it has run without "
            "this parameter, or does not step it. Load into a new optimizer of the same parameters."
        )


def _stepped(optimizer: torch.optim.Optimizer) -> list[Any]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _copied_groups(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [dict(group) for group in optimizer.param_groups]


def _forget_run(optimizer: torch.optim.Optimizer, groups: list[dict[str, Any]]) -> None:
    """Undo the step by which torch makes the state; where it fails, torch leaves learning rates of zero."""
    optimizer.state.clear()
    for group, before in zip(optimizer.param_groups, groups, strict=True):
        group.update(before)


@contextmanager
def _without_gradients(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """torch makes the state of an optimizer that has not run where no parameter has a gradient, and else in silence
    none."""
    gradients = [(parameter, parameter.grad) for parameter in _stepped(optimizer)]
    has_run, groups = bool(optimizer.state), _copied_groups(optimizer)
    for parameter, _ in gradients:
        parameter.grad = None
    try:
        yield
    except BaseException:
        if not has_run:
            _forget_run(optimizer, groups)
        raise
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


def _without_wrappers(name: str) -> str:
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def _whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value.detach()).cpu()


def _mesh_before(group: RankGroup, inner: DeviceMesh | str) -> DeviceMesh:
    if isinstance(inner, str):
        return DeviceMesh.from_group(group.process_group, inner)
    others = set(group.ranks) - {group.ranks[group.rank]}
    if others.intersection(inner.mesh.flatten().tolist()):
        raise ValueError(
            f"Parameters that are divided over the ranks {list(group.ranks)} are sharded over {inner.mesh.tolist()}, "
            "whose ranks have other ones. Call fully_shard with the dimension of the mesh whose ranks have the same."
        )
    meshes: list[Any] = [None] * group.size
    dist.all_gather_object(meshes, inner.mesh.tolist(), group=group.process_group)
    groups = [group.process_group, *inner.get_all_groups()]
    names = ("divided", *(f"sharded_{dim}" for dim in range(inner.ndim)))
    return DeviceMesh.from_group(groups, inner.device_type, mesh=torch.tensor(meshes), mesh_dim_names=names)
