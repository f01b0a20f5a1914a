"""Which calls of torch's non-reentrant checkpoint the code runs in, for the first time or again.

Such a call has a frame, which the hooks for saved tensors hold under which its function runs, in both runs.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

Frame = Any  # torch's _CheckpointFrame
Hook = Callable[..., object]

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_may_push = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]  # not in torch's stub


class Checkpoint(NamedTuple):
    """A call of torch's non-reentrant checkpoint. hook: of this run, which packs; runs_again: within its backward"""

    frame: Frame
    hook: Hook
    runs_again: bool


def checkpoints() -> list[Checkpoint]:
    """Those around, the innermost first, also behind hooks of others."""
    if _top_hooks(True) is None or not _may_push():
        return []
    found: list[Checkpoint] = []
    hooks: list[Any] = []
    try:
        while (top := _top_hooks(True)) is not None:
            hooks.append(top)
            _pop_hooks()
            found += _checkpoint_of(top[0])
    finally:
        for pack, unpack in reversed(hooks):
            _push_hooks(pack, unpack)
    return found


def _checkpoint_of(pack: Hook) -> list[Checkpoint]:
    for cell in getattr(inspect.unwrap(pack), "__closure__", None) or ():  # torch disables Dynamo for some hooks
        try:
            held = cell.cell_contents
        except ValueError:  # of a hook of somebody else's, empty
            continue
        runs_again = isinstance(held, weakref.ref)
        if runs_again:
            held = held()
        if type(held).__name__ == "_CheckpointFrame":
            return [Checkpoint(held, pack, runs_again)]
    return []
