"""Whether a class or a function is of this repository, and not of the user's own code."""

from __future__ import annotations

from typing import Any


def why_not_method(operation: Any, *names: str) -> str | None:
    """Why a fusion may not compute in place of these methods: the user's code replaces one of them. None: it does not.

    By an instance's attribute, or in a class.
    """
    for name in names:
        if name in vars(operation) or not is_built_in(getattr(type(operation), name)):
            return f"{type(operation).__name__} has its own {name}, which would be left out or get other arguments."
    return None


def is_built_in(defined: Any) -> bool:
    """Whether the class or function `defined` is of this repository."""
    return str(getattr(defined, "__module__", "")).partition(".")[0] in ("ops", "fuser")
