"""The layers that compute for modules of transformers: kept beside these modules, and made anew for other tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from typing import NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fuser.sequential import Sequential
from ops.runner.operation import BasicOperation


class _Layer(NamedTuple):
    """tensors: the parameters of the module that the layer computes with."""

    tensors: tuple[Tensor, ...]
    layer: Sequential


# Beside the modules, not in them, so that their state dict, their copies and what is saved of them stay as they are.
_layers: WeakKeyDictionary[nn.Module, dict[Hashable, _Layer]] = WeakKeyDictionary()


def held_layer(
    module: nn.Module, settings: Hashable, tensors: tuple[Tensor, ...], make: Callable[[], Sequential]
) -> Sequential:
    """The layer of `module` with these settings that computes with just these tensors, in the module's training mode.

    Backward needs the very tensors that its forward read, so other tensors (of an adapter, of `functional_call`, loaded
    with assign=True) have another layer. It takes over the buffers of the one before: the amaxes of delayed scaling.
    """
    layers = _layers.setdefault(module, {})
    held = layers.get(settings)
    if held is None or any(mine is not theirs for mine, theirs in zip(held.tensors, tensors, strict=True)):
        layer = make()
        if held is not None:
            for new, old in zip(layer, held.layer, strict=True):
                new._buffers.update(old._buffers)
        held = layers[settings] = _Layer(tensors, layer)
    if held.layer.training != module.training:
        held.layer.train(module.training)
    return held.layer


def hold(operation: BasicOperation, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors of others in the place of the operation's parameters.

    Not by assignment, which takes Parameters only: adapters and `functional_call` give computed tensors.
    """
    operation._parameters.update(tensors)  # type: ignore[arg-type]
