"""Modules that stand in for a user's operations where torch traces: the same settings, and the tensors of one call."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor, nn

from ops.runner.built_in import is_built_in
from ops.runner.parameters import computed_names, without_parametrizations

_NONE = object()  # where there is no attribute


def stand_in_for(module: Any, *, shares_state: bool) -> Any:
    """A module with the same settings and without parameters. Its state is the module's, or other tensors like it."""
    kind, submodules = without_parametrizations(module)
    computed = computed_names(module)
    own: Any = object.__new__(kind)
    own.__dict__.update({name: value for name, value in module.__dict__.items() if name not in computed})
    buffers = module._buffers
    if not shares_state:
        buffers = {name: state if state is None else _empty_like(state) for name, state in buffers.items()}
    children = {
        name: child if child is None else stand_in_for(child, shares_state=shares_state)
        for name, child in submodules.items()
    }
    made_anew: dict[str, Any] = {
        "_pipelines": {},
        "_weights_scope": None,
        "_captured_weights": None,
        "_former_parameters": None,
        "_settings_seen": None,
        "is_stand_in": True,
    }
    parameters = dict.fromkeys((*computed, *module._parameters))
    own.__dict__.update(_parameters=parameters, _buffers=buffers, _modules=children, **made_anew)
    return own


class Followed:
    """A module and its stand-in, which has just been made."""

    def __init__(self, module: nn.Module, stand_in: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._given, self._seen = stand_in.__dict__, dict(vars(module))
        names = self._given.keys() | self._seen.keys()
        self._own = {name for name in names if self._given.get(name, _NONE) is not self._seen.get(name, _NONE)}

    def follow(self) -> None:
        """Hand on the attributes that were assigned since, but for those that the stand-in has for itself."""
        module = self._module()
        for name, value in vars(module).items() if module is not None else ():
            if name not in self._own and value is not self._seen.get(name, _NONE):
                self._seen[name] = self._given[name] = value


def followed(operation: nn.Module, stand_in: nn.Module) -> list[Followed]:
    """The modules of an operation whose attributes torch's guards do not compare: itself if it is a user's own, and
    those within it."""
    return [
        Followed(operation.get_submodule(name), module)
        for name, module in stand_in.named_modules()
        if name or not is_built_in(type(module))
    ]


def _empty_like(state: Tensor) -> Tensor:
    """A tensor like it, also where torch traces and it is none of the tensors that are traced."""
    return torch.empty_strided(state.size(), state.stride(), dtype=state.dtype, device=state.device)
