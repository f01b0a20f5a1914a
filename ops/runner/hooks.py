"""Whether a module has hooks: torch calls them around the whole module, so it runs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def is_hooked(attributes: Mapping[str, Any]) -> bool:
    """Whether the module with these attributes has hooks now: `_forward_hooks = OrderedDict()` takes them away."""
    return bool(
        attributes["_forward_hooks"]
        or attributes["_forward_pre_hooks"]
        or attributes["_backward_hooks"]
        or attributes["_backward_pre_hooks"]
    )
