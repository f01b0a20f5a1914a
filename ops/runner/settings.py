"""Whether backward has the settings that forward had: an operation reads its own in both."""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any, NamedTuple

_PLAIN = (bool, int, float, str, tuple, type(None))


class Settings(NamedTuple):
    """assigned: how often they were; values: those that the operation's constructor takes, by name."""

    assigned: int
    values: dict[str, Any]


def settings_of(operation: Any) -> Settings:
    """Those of now. The same object until one is assigned."""
    seen: Settings | None = operation._settings_seen
    if seen is None or seen.assigned != operation.settings:
        kind: Any = type(operation)
        found, names = vars(operation), _names(kind) - operation.settings_of_backward
        seen = Settings(operation.settings, {name: found[name] for name in names & found.keys()})
        operation._settings_seen = seen
    return seen


def check_settings(operation: Any, forward: Settings) -> None:
    """In backward: raise RuntimeError unless they are what they were in forward. One that was set back is."""
    now = settings_of(operation).values
    for name, before in forward.values.items():
        value = now.get(name)
        if value is not before and not (isinstance(before, _PLAIN) and type(value) is type(before) and value == before):
            raise RuntimeError(
                f"{name} was changed between forward and backward ({before!r} in forward, {value!r} now), so the "
                "gradients may be wrong. Run backward first, or set it back."
            )


@cache
def _names(kind: type) -> frozenset[str]:
    """Of the arguments of its constructors. Other attributes, such as counters, may change at any time."""
    constructors = [vars(base)["__init__"] for base in kind.__mro__ if "__init__" in vars(base)]
    return frozenset(name for constructor in constructors for name in inspect.signature(constructor).parameters)
