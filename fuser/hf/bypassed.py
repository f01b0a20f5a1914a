"""What others have put on a module of transformers that does not run where the module is not called."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

_HOOKS = {
    "_forward_pre_hooks": "forward hooks",
    "_forward_hooks": "forward hooks",
    "_backward_pre_hooks": "backward hooks",
    "_backward_hooks": "backward hooks",
}


def bypassed(module: nn.Module, called: str | None = None) -> str | None:
    """Hooks, or a forward of its own, in words; None without these. called: hooks that run all the same.

    Hooks of accelerate that only move tensors to a device (`AlignDevicesHook` without offload) count for none.
    """
    for name, what in _HOOKS.items():
        if name != called and getattr(module, name):
            return what
    return _forward_on(module) if "forward" in module.__dict__ else None


def _forward_on(module: Any) -> str | None:
    """What was put on the module in the place of its class's forward; None if that does the same."""
    forward = module.forward
    if isinstance(forward, partial) and forward.func.__module__ == "accelerate.hooks":
        hooks = getattr(module._hf_hook, "hooks", (module._hf_hook,))
        if any(getattr(hook, "offload", True) for hook in hooks):
            return "hooks of accelerate that do more than move tensors to a device"
        forward = module._old_forward
    return None if getattr(forward, "__func__", None) is type(module).forward else "a forward of its own"
