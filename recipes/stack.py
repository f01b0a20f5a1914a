"""What `autocast` has chosen: the stack of recipes of this thread, and what belongs to its entries.

It is a context variable, so each thread (and each asyncio task) has its own. Autograd runs CUDA backwards on a thread
of its own: there a pipeline enters what its forward had (`recipes.first_forwards`).

The stack holds an entry only as long as its `with` statement holds the context manager: an exception that arrives
between two instructions (Ctrl-C) cannot leave one behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

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


class ActiveRecipe:
    """One `autocast` that is open, or was.

    holder:       the context manager; the entry is open while that lives and has not been left
    if_abandoned: is called if it dies without having been left
    records:      whether amaxes are recorded though a backward runs
    in_backward:  whether it was opened within a backward
    """

    __slots__ = ("__weakref__", "_holder", "in_backward", "keep_weights", "recipe", "records", "scales", "updates")

    def __init__(
        self,
        holder: Any,
        recipe: Recipe,
        updates: PendingUpdates,
        scales: CastScales | None = None,
        keep_weights: Tensor | None = None,
        *,
        records: bool = False,
        if_abandoned: Callable[[], None] | None = None,
    ) -> None:
        call = None if if_abandoned is None else lambda _: if_abandoned()
        self._holder: Any = weakref.ref(holder, call)
        self.recipe = recipe
        self.updates = updates
        self.scales = scales
        self.keep_weights = keep_weights
        self.records = records
        self.in_backward = torch._C._current_graph_task_id() >= 0

    @property
    def is_open(self) -> bool:
        return self._holder() is not None

    def reopened(self, holder: Any, records: bool) -> ActiveRecipe:
        """The same entry, open while `holder` lives."""
        return ActiveRecipe(holder, self.recipe, self.updates, self.scales, self.keep_weights, records=records)

    def close(self) -> None:
        """It has been left."""
        self._holder = _nobody


def _nobody() -> None:
    return None


Stack = tuple[ActiveRecipe, ...]

_stack: ContextVar[Stack] = ContextVar("fuser_recipes", default=())


def open_entries() -> Stack:
    """The entries that are open on this thread, the innermost last."""
    entries = _stack.get()
    for entry in entries:
        if not entry.is_open:
            entries = tuple([other for other in entries if other.is_open])
            _stack.set(entries)
            break
    return entries


def push(entry: ActiveRecipe) -> None:
    """Make it the innermost entry of this thread."""
    _stack.set((*open_entries(), entry))


def remove(entry: ActiveRecipe) -> None:
    """Close it, also if it is not the innermost one."""
    entry.close()
    open_entries()


@contextmanager
def entered(entries: Stack) -> Iterator[None]:
    """These entries alone are this thread's stack; () is as if no context were open."""
    before = _stack.get()
    _stack.set(entries)
    try:
        yield
    finally:
        _stack.set(before)


class _Holder:
    """What keeps entries open that are entered again."""


_NOTHING = nullcontext()


def reentered(entries: Stack, *, records: bool = False) -> AbstractContextManager[None]:
    """Within it these entries alone are this thread's stack, and open, also where they were left in the meantime.

    records: record amaxes though a backward runs
    """
    return _NOTHING if entries == open_entries() and not records else _reentered(entries, records)


@contextmanager
def _reentered(entries: Stack, records: bool) -> Iterator[None]:
    holder = _Holder()
    with entered(tuple([entry.reopened(holder, records) for entry in entries])):
        yield


def current_recipe() -> Recipe:
    """The recipe of the innermost `autocast` of this thread, `HighPrecision()` outside of any."""
    entries = open_entries()
    return entries[-1].recipe if entries else _HIGH_PRECISION


def current_updates() -> PendingUpdates | None:
    """What waits for the end of the outermost `autocast`; None outside of any."""
    entries = open_entries()
    return entries[0].updates if entries else None


def scale_in_use(state: int, scale: Tensor) -> Tensor:
    """`scale`, or in a recomputation the first run's; `state` is the address of the memory it was read from."""
    for entry in open_entries():
        if entry.scales is not None:
            scale = entry.scales.exchange(state, scale)
    return scale


def records_amaxes() -> bool:
    """Whether quantizers with a state record now: not in an evaluation, and not in a recomputation."""
    entries = open_entries()
    runs = [entry.scales for entry in entries if entry.scales is not None]
    if runs:
        return all(run.records and not run.replays for run in runs)
    # A forward inside of a backward is a recomputation, by torch's own checkpoint.
    is_first = torch._C._current_graph_task_id() == -1 or any(entry.records for entry in entries)
    return is_first and torch.is_grad_enabled()


def keep_weights_flag() -> Tensor | None:
    """The innermost `keep_weights` of `autocast`; None if there is none."""
    return next((entry.keep_weights for entry in reversed(open_entries()) if entry.keep_weights is not None), None)
