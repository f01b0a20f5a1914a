"""The layers that compute for modules of transformers: kept outside of these, and made anew for other tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fuser.sequential import Sequential
from ops.runner.operation import BasicOperation


class _Layer(NamedTuple):
    """tensors: the parameters of the module that the layer computes with."""

    tensors: tuple[Tensor, ...]
    layer: Sequential


# Outside of the modules, so that their state dict, their copies and what is saved of them stay as they are.
_layers: WeakKeyDictionary[nn.Module, dict[Hashable, _Layer]] = WeakKeyDictionary()


def held_layer(
    module: nn.Module,
    settings: Hashable,
    tensors: tuple[Tensor, ...],
    make: Callable[[], Sequence[BasicOperation]],
) -> Sequential:
    """The layer of `module` with these settings, computing with just these tensors, in the module's training mode.

    Backward needs the very tensors that its forward read, so other tensors (of an adapter, of `functional_call`, loaded
    with assign=True) have other operations, which `make` makes. They take the places of those before in the same
    Sequential, which records under which recipe a checkpoint recomputes, and take over their buffers: the amaxes
    of delayed scaling.
    """
    layers = _layers.setdefault(module, {})
    held = layers.get(settings)
    if held is None:
        held = layers[settings] = _Layer(tensors, Sequential(*make()))
    elif any(mine is not theirs for mine, theirs in zip(held.tensors, tensors, strict=True)):
        for index, (new, old) in enumerate(zip(make(), held.layer, strict=True)):
            new._buffers.update(old._buffers)
            held.layer[index] = new.train(module.training)
        held = layers[settings] = _Layer(tensors, held.layer)
    if held.layer.training != module.training:
        held.layer.train(module.training)
    return held.layer


def hold(operation: BasicOperation, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors of others in the place of the operation's parameters.

    Not by assignment, which takes Parameters only: adapters and `functional_call` give computed tensors.
    """
    operation._parameters.update(tensors)  # type: ignore[arg-type]
