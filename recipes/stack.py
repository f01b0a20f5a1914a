"""The stack of recipes that `autocast` contexts have opened on this thread, with their settings.

It is a context variable, so each thread (and each asyncio task) has its own. Autograd runs CUDA backwards on its own
thread; there a pipeline re-enters the stack of its forward (`recipes.first_forwards`).

An entry is open only as long as its `with` statement keeps the context manager alive, so an exception between two
instructions (Ctrl-C) cannot leave one behind.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from recipes.pending import PendingUpdates
from recipes.recipe import HIGH_PRECISION, Recipe, Role, recipe_within


def key_of(recipe: Recipe) -> str:
    """A text that differs where recipes do; another hash of the same value would be a recipe of its own."""
    global _last_key
    last, key = _last_key
    if last() is recipe:
        return key
    key = f"{recipe.name} {hash(recipe):x}"
    while (other := _of_key.get(key)) is not recipe and other != recipe:
        if other is None:
            _of_key[key] = recipe
            break
        key += "'"  # Python gives numbers like -1 and -2 one hash
    is_held = _of_key.get(key) is recipe  # and so no other one gets this key while it lives
    key = key + _BATCH_INVARIANT if recipe.batch_invariant else key
    if is_held:
        _last_key = weakref.ref(recipe), key
    return key


_BATCH_INVARIANT = " batch_invariant"
_of_key: WeakValueDictionary[str, Recipe] = WeakValueDictionary()  # as long as a plan, or the caller, holds the recipe
_last_key: tuple[Callable[[], Recipe | None], str] = (lambda: None), ""  # the recipe, held weakly, and its key


def is_batch_invariant(key: str) -> bool:
    """Whether the recipe with this key is."""
    return key.endswith(_BATCH_INVARIANT)


_HIGH_PRECISION_KEY = key_of(HIGH_PRECISION)


class CastScales:
    """The scales that a computation used, by the storage of the states from which they were read.

    The first run stores them; a recomputation (`replays`) uses them again, even if the states have changed since.
    records: whether the first run records amaxes: whether gradients were enabled where it was called, or for the
    outermost of several
    """

    def __init__(self) -> None:
        outer = [entry.scales for entry in open_entries() if entry.scales is not None]
        self.records: bool = all(run.records for run in outer) if outer else torch.is_grad_enabled()
        self.replays = False
        self._begins_with_grad = False
        self._seen: dict[int, tuple[Tensor, Tensor]] = {}  # each with its state, whose address it keeps

    def begin(self, replays: bool) -> None:
        """A run begins here."""
        self.replays = replays
        self._begins_with_grad = torch.is_grad_enabled()

    @property
    def evaluates(self) -> bool:
        """Whether gradients are off though this run began with them; the reentrant checkpoint's begins without."""
        return self._begins_with_grad and not torch.is_grad_enabled()

    def exchange(self, state: int, scale: Tensor) -> Tensor:
        """The scale to quantize with; `scale` is the current one of the state in the storage `state`."""
        if self.replays:
            return self._seen[state][1] if state in self._seen else scale
        if state not in self._seen:
            self._seen[state] = scale, scale.clone()
        return scale


class ActiveRecipe:
    """The entry of one `autocast`, open or closed.

    holder:       the context manager; the entry is open while it is alive and has not exited
    if_abandoned: called if the context manager is freed without having exited, with the reference to that
    records:      whether amaxes are recorded even though a backward runs
    in_backward:  whether it was opened within a backward
    is_reopened:  whether it is that of an earlier `autocast`, entered again
    """

    __slots__ = (
        "__weakref__",
        "_holder",
        "around",
        "in_backward",
        "is_reopened",
        "keep_weights",
        "key",
        "recipe",
        "records",
        "scales",
        "updates",
    )

    def __init__(
        self,
        holder: object,
        recipe: Recipe,
        updates: PendingUpdates,
        scales: CastScales | None = None,
        keep_weights: Tensor | None = None,
        *,
        records: bool = False,
        if_abandoned: Callable[[object], None] | None = None,
    ) -> None:
        self._holder: Callable[[], object] = weakref.ref(holder, if_abandoned)
        self.recipe = recipe
        self.key = key_of(recipe)
        self.updates = updates
        self.scales = scales
        self.keep_weights = keep_weights
        self.records = records
        self.in_backward = torch._C._current_graph_task_id() >= 0
        self.is_reopened = False
        self.around: tuple[str, bool] | None = None  # what torch.compile saw where it was opened within what is traced

    @property
    def is_open(self) -> bool:
        return self._holder() is not None

    def reopened(self, holder: object, records: bool) -> ActiveRecipe:
        """A copy of this entry that is open while `holder` is alive."""
        entry = ActiveRecipe(holder, self.recipe, self.updates, self.scales, self.keep_weights, records=records)
        entry.is_reopened = True
        return entry

    def close(self) -> None:
        """Mark the entry as closed."""
        self._holder = _nobody


def _nobody() -> None:
    return None


Stack = tuple[ActiveRecipe, ...]

_stack: ContextVar[Stack] = ContextVar("fuser_recipes", default=())


class SeenByCompile:
    """What torch.compile sees of the stack, which it cannot read: it compares these before it runs what it compiled.

    recipe: the key of the current recipe. inside: whether that is of an `autocast` within what is traced; where the
        graph breaks there, what runs as it is finds it here (`open_entries`)
    Of all threads the one that changed its stack last is seen; what runs compares with its own. So while a graph is
    broken within an `autocast` that was traced, what runs as it is on another thread has its recipe, too.
    """

    def __init__(self) -> None:
        self.recipe = _HIGH_PRECISION_KEY
        self.inside = False


seen = SeenByCompile()
_traced: dict[str, Recipe] = {}  # those of `autocast`s within what is traced, by their keys


def key_of_traced(recipe: Recipe) -> str:
    """The key by which `traced_recipe` finds it."""
    key = key_of(recipe)
    _traced[key] = recipe
    return key


def traced_recipe(key: str) -> Recipe:
    """The recipe of an `autocast` that is being traced."""
    return _traced[key]


def _set(entries: Stack) -> None:
    _stack.set(entries)
    seen.recipe = entries[-1].key if entries else _HIGH_PRECISION_KEY
    seen.inside = False


def own_entries() -> Stack:
    """The open entries of this thread, innermost last, without an `autocast` that torch.compile traced."""
    entries = _stack.get()
    for entry in entries:
        if entry._holder() is None:  # as `is_open`, which costs a call
            entries = tuple([other for other in entries if other.is_open])
            if seen.inside:
                _stack.set(entries)
            else:
                _set(entries)
            break
    return entries


def open_entries() -> Stack:
    """The open entries of this thread, innermost last. Where the graph of torch.compile broke within an `autocast` that
    it traced, that one comes last."""
    entries = own_entries()
    return (*entries, _entry_of_traced(seen.recipe)) if seen.inside else entries


class _Holder:
    """Keeps entries open as long as it is alive."""


_OF_TRACED = _Holder()
_entries_of_traced: dict[tuple[str, bool], ActiveRecipe] = {}


def _entry_of_traced(key: str) -> ActiveRecipe:
    in_backward = torch._C._current_graph_task_id() >= 0
    entry = _entries_of_traced.get((key, in_backward))
    if entry is None:
        entry = _entries_of_traced[key, in_backward] = ActiveRecipe(_OF_TRACED, _traced[key], PendingUpdates())
    return entry


def push(entry: ActiveRecipe, outside: Stack) -> None:
    """Add the entry as the innermost one of this thread, whose `own_entries` are those outside."""
    entry.around = (seen.recipe, True) if seen.inside else None
    _set((*outside, entry))


def remove(entry: ActiveRecipe) -> None:
    """Close the entry and remove it, even if it is not the innermost one."""
    entry.close()
    entries = _stack.get()
    if entries and entries[-1] is entry and not seen.inside:
        _set(entries[:-1])
    own_entries()
    if entry.around is not None:
        seen.recipe, seen.inside = entry.around


@contextmanager
def entered(entries: Stack) -> Iterator[None]:
    """Use only these entries as this thread's stack inside; () means no open context."""
    before = _stack.get()
    around = (seen.recipe, True) if seen.inside else None
    _set(entries)
    try:
        yield
    finally:
        _set(before)
        if around is not None:
            seen.recipe, seen.inside = around


_NOTHING = nullcontext()


def reentered(entries: Stack, *, records: bool = False) -> AbstractContextManager[None]:
    """Use only these entries as this thread's stack inside, reopened if they were closed in the meantime.

    records: record amaxes even though a backward runs
    """
    return _NOTHING if entries == open_entries() and not records else _reentered(entries, records)


@contextmanager
def _reentered(entries: Stack, records: bool) -> Iterator[None]:
    holder = _Holder()
    with entered(tuple([entry.reopened(holder, records) for entry in entries])):
        yield


def current_recipe() -> Recipe:
    """The recipe of the innermost open `autocast` of this thread; `HighPrecision()` if there is none.

    Raises RuntimeError where the graph of torch.compile broke within a traced `autocast` of a stateful recipe.
    """
    return recipe_in_use(None)


def keeps_state(recipe: Recipe) -> bool:
    """Whether a cast of it does."""
    return any(quantizer is not None and quantizer.keeps_state for quantizer in map(recipe.quantizer, Role))


def why_not_inside(recipe: Recipe) -> str:
    """Why an `autocast` of a stateful recipe is not for functions that torch.compile traces."""
    return (
        f"autocast({recipe.name!r}) is opened within the compiled function, and its scales move on where it ends, "
        "which is not traced. Open it around the call."
    )


def are_ordinary(entries: Stack) -> bool:
    """Whether none of these is of a `fuser.checkpoint`, or has `keep_weights`."""
    return all(entry.scales is None and entry.keep_weights is None for entry in entries)


def recipe_of(entries: Stack) -> Recipe:
    """The recipe of the innermost of these entries; `HighPrecision()` if there is none."""
    return entries[-1].recipe if entries else HIGH_PRECISION


def recipe_in_use(own: Recipe | None, entries: Stack | None = None) -> Recipe:
    """`own`, or the current recipe if that is None; batch invariant where the current one is. Raises as
    `current_recipe`. entries: those that are open, if they were read already"""
    recipe = recipe_of(open_entries() if entries is None else entries)
    if seen.inside and keeps_state(recipe):
        raise RuntimeError(why_not_inside(recipe))
    return recipe_within(own, recipe)


def current_updates() -> PendingUpdates | None:
    """The updates that the end of the outermost `autocast` performs; None outside of any."""
    entries = own_entries()
    return entries[0].updates if entries else None


def scale_in_use(state: int, scale: Tensor) -> Tensor:
    """`scale`, or in a recomputation the first run's scale; `state` is the storage from which `scale` was read."""
    for entry in open_entries():
        if entry.scales is not None:
            scale = entry.scales.exchange(state, scale)
    return scale


def records_amaxes() -> bool:
    """Whether stateful quantizers record amaxes now: neither in evaluation nor in a recomputation."""
    entries = open_entries()
    runs = [entry.scales for entry in entries if entry.scales is not None]
    if runs:
        return all(run.records and not run.replays for run in runs) and not runs[-1].evaluates
    # A forward inside of a backward is a recomputation by torch's own checkpoint.
    is_first = torch._C._current_graph_task_id() == -1 or any(entry.records for entry in entries)
    return is_first and torch.is_grad_enabled()


def are_replayed(entries: Stack) -> bool:
    """Whether `fuser.checkpoint` computes again inside of these, with the recipe and the scales of the first run."""
    return any(entry.scales is not None and entry.scales.replays for entry in entries)


def keep_weights_flag() -> Tensor | None:
    """`keep_weights` of the innermost `autocast` that has one, or None."""
    return next((entry.keep_weights for entry in reversed(open_entries()) if entry.keep_weights is not None), None)
