"""Whether backward has the settings that forward had: an operation reads its own in both."""

from __future__ import annotations

import inspect
from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

from torch import Tensor

from ops.runner.built_in import is_built_in

_PLAIN = (bool, int, float, str)  # compared by value, as the fields of frozen dataclasses are


class Settings(NamedTuple):
    """assigned: how often they were; values: those that the operation's constructor takes, by name, but for tensors,
    which are parameters, or computed."""

    assigned: int
    values: dict[str, Any]


def settings_of(operation: Any) -> Settings:
    """Those of now. The same object until one is assigned."""
    seen: Settings | None = operation._settings_seen
    if seen is None or seen.assigned != operation.settings:
        kind: Any = type(operation)
        found, names = vars(operation), _names(kind) - operation.settings_of_backward
        values = {name: found[name] for name in names & found.keys() if not isinstance(found[name], Tensor)}
        seen = Settings(operation.settings, values)
        operation._settings_seen = seen
    return seen


@cache
def has_own_property(kind: type, name: str) -> bool:
    """Whether a user's class has this name as a property, so that what is assigned lies elsewhere."""
    owner = next((parent for parent in kind.__mro__ if name in vars(parent)), None)
    if owner is None or is_built_in(owner):
        return False
    return isinstance(vars(owner)[name], property)


def check_settings(operation: Any, forward: Settings) -> None:
    """In backward: raise RuntimeError unless they are what they were in forward. One that was set back is."""
    now = settings_of(operation).values
    for name, before in forward.values.items():
        value = now.get(name)
        if not _is_same(before, value):
            raise RuntimeError(
                f"{name} was changed between forward and backward ({before!r} in forward, {value!r} now), so the "
                "gradients may be wrong. Run backward first, or set it back."
            )


def _is_same(before: Any, value: Any) -> bool:
    if before is value:
        return True
    if type(before) is not type(value):
        return False
    if type(before) is tuple:
        return len(before) == len(value) and all(map(_is_same, before, value))
    how = getattr(type(before), "__dataclass_params__", None)
    if how is not None and how.frozen:
        return all(_is_same(getattr(before, field.name), getattr(value, field.name)) for field in fields(before))
    return isinstance(before, _PLAIN) and before == value


@cache
def _names(kind: type) -> frozenset[str]:
    """Of the arguments of its constructors. Other attributes, such as counters, may change at any time."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    return frozenset(name for constructor in constructors for name in inspect.signature(constructor).parameters)
