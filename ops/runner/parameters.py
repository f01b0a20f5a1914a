"""The parameters of an operation by name: registered ones, and tensors that are computed from others in their place.

A tensor takes the place of a parameter

    among the parameters   by `torch.func.functional_call`, or put there by its owner
    by a property          of `torch.nn.utils.parametrize`, or of a class that was put over the module's, as by
                           torchtitan's SimpleFSDP, which computes it at each access
    by a forward pre-hook  of `torch.nn.utils.prune`, and of the older weight_norm and spectral_norm, which set an
                           attribute; what it is computed from is registered beside it, as weight_orig, or weight_g
    as an attribute        of a module that FSDP1 manages, whose parameter is a part of a flat one

Such a tensor is read once in a forward, and saved by autograd for its backward; its gradient is autograd's. A
registered parameter is read from the operation in backward too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from ops.runner.built_in import is_built_in

_PARAMETRIZED = "parametrizations"
_COMPUTED_FROM = ("orig", "g")  # suffixes of what hooks compute an attribute from


def parameter_names(module: nn.Module, prefix: str = "") -> Iterator[str]:
    """The names of its parameters, computed ones first, and of those of its submodules, dotted."""
    for name in (*computed_names(module), *_registered_names(module)):
        yield prefix + name
    for name, child in module._modules.items():
        if child is not None and name != _PARAMETRIZED:
            yield from parameter_names(child, f"{prefix}{name}.")


def computed_names(module: nn.Module) -> tuple[str, ...]:
    """The names of its own parameters that are computed: by a property, a hook or FSDP1."""
    found = [name for name, originals in _parametrized(module).items() if originals._parameters]
    found += _behind_properties(module)
    if module._forward_pre_hooks:
        found += [
            name for name, value in vars(module).items() if isinstance(value, Tensor) and is_set_by_hook(module, name)
        ]
    if is_managed(module):
        attributes = [(name, value) for name, value in vars(module).items() if name not in module._parameters]
        found += [name for name, value in attributes if _is_part(module, name, value)]
    return tuple(found)


def is_set_by_hook(module: nn.Module, name: str) -> bool:
    """Whether a hook computes the attribute of this name from parameters of the module."""
    return any(module._parameters.get(f"{name}_{suffix}") is not None for suffix in _COMPUTED_FROM)


def property_names(module: nn.Module) -> frozenset[str]:
    """The names of the properties of its class that are not built in."""
    kind: Any = type(module)
    return _properties_of(kind)


@cache
def _properties_of(kind: type) -> frozenset[str]:
    kinds = [each for each in kind.__mro__ if not is_built_in(each)]
    return frozenset(name for each in kinds for name, value in vars(each).items() if isinstance(value, property))


def is_managed(module: nn.Module) -> bool:
    """Whether FSDP1, or FSDP2, exchanges its parameters around each forward and backward."""
    return "_is_fsdp_managed_module" in vars(module)


def is_set_anew(module: nn.Module, name: str, *values: object) -> bool:
    """Whether a hook or FSDP1 assigns such attributes of this name in each forward."""
    tensors = [value for value in values if isinstance(value, Tensor)]
    managed = is_managed(module)
    return any(is_set_by_hook(module, name) or (managed and _is_part(module, name, tensor)) for tensor in tensors)


def held_parameters(module: Any) -> dict[str, Tensor]:
    """All of its parameters as they are now, by name. Those of a property are computed."""
    found = {name: held_parameter(module, name) for name in parameter_names(module)}
    computed = {n: found[n].dtype for n in (*_parametrized(module), *_behind_properties(module)) if n in found}
    if computed:
        module._computed_dtypes = computed
    return found


def held_parameter(operation: Any, name: str) -> Tensor:
    """What the operation holds under this name, dotted for a submodule's: a parameter, or what is in its place.

    Raises RuntimeError if None was assigned to it, AttributeError if there is nothing.
    """
    parameter: Any = None if name in property_names(operation) else operation._parameters.get(name)
    if parameter is None:
        owner, own_name = _owner(operation, name)
        computed = own_name in computed_names(owner)
        parameter = getattr(owner, own_name) if computed else owner._parameters.get(own_name)
        if parameter is None and own_name in owner._parameters:
            raise RuntimeError(
                f"Its {name} is None, but it computes with one. Assign a torch.nn.Parameter, frozen and without effect "
                "if nothing is to be learned."
            )
    if parameter is None:
        raise AttributeError(
            f"{type(operation).__name__} has no parameter {name!r}. A tensor that is computed from other parameters "
            "takes its place by torch.nn.utils.parametrize or torch.func.functional_call. What "
            "torch.nn.utils.parametrize.remove_parametrizations leaves of a frozen one is no parameter: assign "
            f"torch.nn.Parameter(operation.{name}, requires_grad=False)."
        )
    return parameter


def parameter_dtype(operation: Any, name: str) -> torch.dtype:
    """That of the parameter of this name. One of a property is not computed for it: that of its last forward, and
    before any that of what it is computed from, which torch compares."""
    known: torch.dtype | None = getattr(operation, "_computed_dtypes", {}).get(name)
    if name in _parametrized(operation):
        return known or next(_parametrized(operation)[name].parameters()).dtype
    behind = _behind_properties(operation)
    if name in behind:
        return known or behind[name].dtype
    return held_parameter(operation, name).dtype


def planned_dtype(
    dtypes: Iterable[torch.dtype], of_autocast: torch.dtype | None, otherwise: torch.dtype
) -> torch.dtype:
    """For which operations with parameters of these dtypes are planned: float64 if there is one, which is what a kernel
    may lack; then torch.autocast's; then the first of floating point, since others are of indices."""
    found = [dtype for dtype in dtypes if dtype.is_floating_point]
    return torch.float64 if torch.float64 in found else of_autocast or next(iter(found), otherwise)


def requires_grad(operation: nn.Module, name: str) -> bool:
    """Whether the parameter of this name needs a gradient; one of a property is not computed for it."""
    owner, own_name = _owner(operation, name)
    originals = _parametrized(owner).get(own_name)
    if originals is not None:
        return any(parameter.requires_grad for parameter in originals.parameters())
    behind = _behind_properties(owner)
    if own_name in behind:
        return behind[own_name].requires_grad
    return held_parameter(operation, name).requires_grad


def computed_slots(operations: Sequence[nn.Module], parameters: Sequence[Tensor]) -> frozenset[int]:
    """The positions, among the parameters of all operations, of those that are no registered parameters."""
    named = [(operation, name) for operation in operations for name in parameter_names(operation)]
    return frozenset(
        slot
        for slot, ((operation, name), parameter) in enumerate(zip(named, parameters, strict=True))
        if type(parameter) is Tensor or is_computed(operation, name)
    )


def is_computed(operation: nn.Module, name: str) -> bool:
    """Whether a property or a hook computes the parameter of this name."""
    owner, own_name = _owner(operation, name)
    return own_name in computed_names(owner)


def without_parametrizations(module: nn.Module) -> tuple[type, Mapping[str, Any]]:
    """The class that it had before torch parametrized it, or one was put over it that computes parameters, and its
    submodules without the parametrizations."""
    kind, behind = type(module), _behind_properties(module)
    while behind and not behind.keys().isdisjoint(vars(kind)):
        kind = kind.__bases__[0]
    if not _parametrized(module):
        return kind, module._modules
    return kind.__bases__[0], {n: child for n, child in module._modules.items() if n != _PARAMETRIZED}


def _registered_names(module: nn.Module) -> list[str]:
    """But for those that a property or a hook computes an attribute from."""
    behind = _behind_properties(module)
    names = [name for name, parameter in module._parameters.items() if parameter is not None and name not in behind]
    if not module._forward_pre_hooks:
        return names
    computed = tuple(f"{name}_" for name in computed_names(module))
    return [name for name in names if not name.startswith(computed)] if computed else names


def _is_part(module: nn.Module, name: str, value: object) -> bool:
    """Whether the value of this attribute is a part of FSDP1's flat parameter: a plain tensor in place of an
    operation's parameter, or a view of the flat one."""
    if type(value) is not Tensor:
        return False
    return name in getattr(module, "_parameter_order", ()) or getattr(value._base, "_is_flat_param", False)


def _behind_properties(module: nn.Module) -> dict[str, nn.Parameter]:
    """The registered parameters from which properties of their names in the module's class compute others."""
    properties = property_names(module)
    return {name: each for name, each in module._parameters.items() if each is not None and name in properties}


def _parametrized(module: nn.Module) -> Mapping[str, Any]:
    """By name, what torch computes each parametrized tensor of the module by."""
    found: Any = module._modules.get(_PARAMETRIZED)
    return {} if found is None else found._modules


def _owner(operation: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, own_name = name.rpartition(".")
    return operation.get_submodule(path), own_name
