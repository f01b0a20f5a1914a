"""What `autocast` has chosen: the stack of recipes, and what hangs on its entries.

It is one for the process, not one a thread: autograd runs CUDA backwards on a thread of its own, and a recomputation
there must see the recipe that the caller chose.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.pending import PendingUpdates
from recipes.recipe import HighPrecision, Recipe

_HIGH_PRECISION = HighPrecision()


class CastScales:
    """The scales that a computation was cast with, by the memory of the states they were read from.

    A first run fills it in. Replayed, it answers with the scales of the first run, whatever the states hold by then.
    records: whether the first run records amaxes: whether gradients were on where it was asked for
    """

    def __init__(self) -> None:
        self.records = torch.is_grad_enabled()
        self.replays = False
        self._seen: dict[int, Tensor] = {}

    def exchange(self, state: int, scale: Tensor) -> Tensor:
        """The scale to cast with, where the state in memory at `state` holds `scale` now."""
        if self.replays:
            return self._seen.get(state, scale)
        if state not in self._seen:
            self._seen[state] = scale.clone()
        return scale


@dataclass(frozen=True, eq=False)
class Entry:
    recipe: Recipe
    updates: PendingUpdates
    scales: CastScales | None
    keep_weights: Tensor | None = None


stack: list[Entry] = []


@contextmanager
def outside_of_autocast() -> Iterator[None]:
    """As if no context were open: what runs inside is no part of the step around it."""
    entries, stack[:] = stack[:], []
    try:
        yield
    finally:
        stack[:] = entries


def current_recipe() -> Recipe:
    """The recipe of the innermost `autocast`, `HighPrecision()` outside of any."""
    return stack[-1].recipe if stack else _HIGH_PRECISION


def current_updates() -> PendingUpdates | None:
    """What waits for the end of the outermost `autocast`; None outside of any."""
    return stack[0].updates if stack else None


def scale_in_use(state: int, scale: Tensor) -> Tensor:
    """`scale`, or in a recomputation the first run's; `state` is the address of the memory it was read from."""
    for entry in stack:
        if entry.scales is not None:
            scale = entry.scales.exchange(state, scale)
    return scale


def records_amaxes() -> bool:
    """Whether quantizers with a state record now: not in an evaluation, and not in a recomputation."""
    runs = [entry.scales for entry in stack if entry.scales is not None]
    if runs:
        return all(run.records and not run.replays for run in runs)
    # A forward inside of a backward is a recomputation, by torch's own checkpoint.
    return torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1


def keep_weights_flag() -> Tensor | None:
    """The innermost `keep_weights` of `autocast`; None if there is none."""
    return next((entry.keep_weights for entry in reversed(stack) if entry.keep_weights is not None), None)
