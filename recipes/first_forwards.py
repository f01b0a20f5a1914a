"""Find the recipe for a recomputation: remember the recipes of the forwards of a Sequential or of a single operation.

A forward that runs within a backward is a recomputation by an activation checkpoint. It runs on autograd's thread,
which has its own stack of recipes, and usually after the caller's `autocast` has closed. The kind of checkpoint tells
which forwards it can belong to: torch's reentrant checkpoint ran the first forward without gradients; the non-reentrant
one ran it with gradients, and recomputes it under hooks for saved tensors. Those hooks hold the frame of the call that
was checkpointed, in both runs: it tells the very forward, also where others wait for a backward that never comes.
"""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

import torch

from recipes.recipe import Recipe, Role
from recipes.stack import Stack, open_entries, recipe_of, reentered

_MOST = 16  # recipes of forwards without gradients that are remembered at once

_HOW = "Use fuser.checkpoint, or open autocast(recipe) inside of the function that is checkpointed."


class ForwardWithGrad:
    """A forward with gradients. Autograd keeps it alive as long as its backward can run."""

    __slots__ = ("__weakref__", "checkpointed", "entries", "has_run", "recipe", "training")

    def __init__(self, training: bool, entries: Stack) -> None:
        self.training = training
        self.entries = entries
        self.recipe = recipe_of(entries)
        self.has_run = False
        frame = _frame(_hooks())
        self.checkpointed = None if frame is None else weakref.ref(frame)

    @property
    def may_go_on(self) -> bool:
        """Whether its autocast is open, and so the scales are those that it had."""
        return bool(self.entries) and self.entries[0].is_open


class _WithoutGrad(NamedTuple):
    """Forwards without gradients under one recipe: how many were not recomputed yet, and the last one's stack."""

    outstanding: int
    entries: Stack


class FirstForwards:
    """The forwards of one module. `training` separates those of evaluation from the others."""

    def __init__(self) -> None:
        self._with_grad: weakref.WeakSet[ForwardWithGrad] = weakref.WeakSet()
        self._without_grad: dict[tuple[bool, Recipe], _WithoutGrad] = {}
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[FirstForwards], tuple[()]]:
        """A copy starts without any forwards."""
        return FirstForwards, ()

    def began(self, training: bool) -> ForwardWithGrad | None:
        """Record the start of a forward outside of any backward. Keep the result as long as its backward can run."""
        entries = open_entries()
        if torch.is_grad_enabled():
            forward = ForwardWithGrad(training, entries)
            with self._lock:
                self._with_grad.add(forward)
            return forward
        recipe = recipe_of(entries)
        with self._lock:
            known = self._without_grad.pop((training, recipe), None)
            outstanding = 1 if known is None else known.outstanding + 1
            self._without_grad[training, recipe] = _WithoutGrad(outstanding, entries)
            if len(self._without_grad) > _MOST:
                del self._without_grad[next(iter(self._without_grad))]
        return None

    @contextmanager
    def entered_again(self, training: bool, own: Recipe | None, *, counts: bool = True) -> Iterator[None]:
        """Within a backward: run the body under the recipe of the forward that is recomputed.

        own: the operations' own recipe, which overrides `autocast`
        counts: whether the first forward was recorded here by `began`
        Amaxes are recorded if the first forward did not (reentrant checkpointing runs it without gradients).
        Raises RuntimeError if the recipe is ambiguous, or if its scales have changed since.
        """
        entries = open_entries()
        if entries and entries[-1].in_backward:  # the recomputed function has opened its own autocast
            yield
            return
        with self._lock:
            found, reentrant = self._found(training)
            if not found:  # no forward was recorded: not a recomputation
                recipe, first = None, entries
            else:
                recipe, first = _only(found)
                if reentrant and counts:
                    known = self._without_grad[training, recipe]
                    self._without_grad[training, recipe] = known._replace(outstanding=max(0, known.outstanding - 1))
        runs = own or recipe
        if found and runs is not None and _keeps_state(runs) and not (first and first[0].is_open):
            raise RuntimeError(
                f"A forward under {runs.name!r} is computed again in a backward, after the step of its autocast has "
                f"ended and its scales have moved. {_HOW}"
            )
        with reentered(first, records=reentrant):
            yield

    def _found(self, training: bool) -> tuple[Mapping[Recipe, Stack], bool]:
        """The candidate recipes, and whether they are of forwards without gradients.

        If it is not known which one is computed again, those that wait for their backward come first, then those whose
        backward may run again (retain_graph); and of a recipe one whose scales have moved, which is an error.
        """
        hooks = _hooks()
        with_grad = [forward for forward in self._with_grad if forward.training == training]
        with_grad.sort(key=lambda forward: forward.may_go_on, reverse=True)
        frame = _frame(hooks)
        if frame is not None:
            same = [f for f in with_grad if f.checkpointed is not None and f.checkpointed() is frame]
            if same:
                return {forward.recipe: forward.entries for forward in same}, False
        without_grad = {r: known for (kind, r), known in self._without_grad.items() if kind == training}
        waiting = (
            {forward.recipe: forward.entries for forward in with_grad if not forward.has_run},
            {recipe: known.entries for recipe, known in without_grad.items() if known.outstanding},
        )
        known = (
            {forward.recipe: forward.entries for forward in with_grad},
            {recipe: known.entries for recipe, known in without_grad.items()},
        )
        kinds = (1, 0) if hooks is None else (0, 1)
        for found, kind in ((found, kind) for found in (waiting, known) for kind in kinds):
            if found[kind]:
                return found[kind], kind == 1
        return {}, False


Hooks = tuple[Callable[..., object], Callable[..., object]]


def _hooks() -> Hooks | None:
    """The innermost for saved tensors, to pack and to unpack."""
    hooks: Hooks | None = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks


def _frame(hooks: Hooks | None) -> object | None:
    """That of the call of torch's checkpoint, non-reentrant, whose hooks these are; None if they are others."""
    pack = None if hooks is None else inspect.unwrap(hooks[0])  # torch disables Dynamo for some
    for cell in getattr(pack, "__closure__", None) or ():
        held = cell.cell_contents
        if isinstance(held, weakref.ref):  # while it is computed again
            held = held()
        if type(held).__name__ == "_CheckpointFrame":
            return held
    return None


def _only(found: Mapping[Recipe, Stack]) -> tuple[Recipe, Stack]:
    """The only candidate, or the only one whose autocast is still open. Raises RuntimeError if neither is unique."""
    if len(found) > 1:
        still_open = {recipe: entries for recipe, entries in found.items() if entries and entries[0].is_open}
        if len(still_open) != 1:
            raise RuntimeError(
                "A forward is computed again in a backward, and which recipe it first ran under is not known: "
                f"forwards under {' and '.join(sorted(repr(r.name) for r in found))} wait for their backward. {_HOW}"
            )
        found = still_open
    return next(iter(found.items()))


def _keeps_state(recipe: Recipe) -> bool:
    quantizers = [recipe.quantizer(role) for role in Role]
    return any(quantizer is not None and quantizer.keeps_state for quantizer in quantizers)
