"""torch.autocast on a device: what it casts to, and how it is turned off inside of an operation."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch

_NOTHING = nullcontext()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """In which torch.autocast is off for this device."""
    return torch.autocast(device.type, enabled=False) if _autocasts(device) else _NOTHING


def dtype_of_autocast(device: torch.device) -> torch.dtype | None:
    """The dtype of torch.autocast for this device; None where it is off."""
    return torch.get_autocast_dtype(device.type) if _autocasts(device) else None


def _autocasts(device: torch.device) -> bool:
    """Whether torch.autocast is on for this device; some devices (meta) it does not support."""
    return _can_autocast(device.type) and torch.is_autocast_enabled(device.type)


_can_autocast = cache(torch.amp.is_autocast_available)
