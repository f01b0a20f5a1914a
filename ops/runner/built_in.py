"""Whether a class or a function is of this repository, and not of the user's own code."""

from __future__ import annotations

from typing import Any


def is_built_in(defined: Any) -> bool:
    """Whether the class or function `defined` is of this repository."""
    return str(getattr(defined, "__module__", "")).partition(".")[0] in ("ops", "fuser")
