"""Find the recipe for a recomputation: remember the recipes of the forwards of a Sequential or of a single operation.

A forward that runs within a backward is a recomputation by an activation checkpoint. It runs on autograd's thread,
which has its own stack of recipes, and usually after the caller's `autocast` has closed. The kind of checkpoint tells
which forwards it can belong to: torch's reentrant checkpoint ran the first forward without gradients; the non-reentrant
one ran it with gradients, and recomputes it under hooks for saved tensors. Those hooks hold the frame of the call that
was checkpointed, in both runs. So the very forward is known, by its number among those of the module within that call.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from recipes.checkpoint_frames import Frame, Hook, checkpoints
from recipes.recipe import Recipe
from recipes.stack import Stack, are_replayed, keeps_state, open_entries, recipe_of, reentered

_MOST = 16  # recipes of forwards without gradients that are remembered at once

_HOW = "Use fuser.checkpoint, or open autocast(recipe) inside of the function that is checkpointed."


class ForwardWithGrad:
    """A forward with gradients. Autograd keeps it alive as long as its backward can run."""

    __slots__ = ("__weakref__", "entries", "has_run", "training")

    def __init__(self, training: bool, entries: Stack) -> None:
        self.training = training
        self.entries = entries
        self.has_run = False

    @property
    def recipe(self) -> Recipe:
        return recipe_of(self.entries)


class _WithoutGrad(NamedTuple):
    """Forwards without gradients under one recipe: how many were not recomputed yet, and the last one's stack."""

    outstanding: int
    entries: Stack


class FirstForwards:
    """The forwards of one module. `training` separates those of evaluation from the others."""

    def __init__(self) -> None:
        self._with_grad: set[weakref.ref[ForwardWithGrad]] = set()  # a WeakSet takes the host longer
        self._without_grad: dict[tuple[bool, Recipe], _WithoutGrad] = {}
        self._of_frames: weakref.WeakKeyDictionary[Frame, list[Stack]] = weakref.WeakKeyDictionary()
        self._again: weakref.WeakKeyDictionary[Hook, int] = weakref.WeakKeyDictionary()  # forwards under these hooks
        self._lock = threading.Lock()

    def __reduce__(self) -> tuple[type[FirstForwards], tuple[()]]:
        """A copy starts without any forwards."""
        return FirstForwards, ()

    def began(self, training: bool, entries: Stack | None = None) -> ForwardWithGrad | None:
        """Record the start of a forward outside of any backward. Keep the result as long as its backward can run.

        entries: those that are open, if they were read already
        """
        if entries is None:
            entries = open_entries()
        calls = checkpoints()
        if calls:
            with self._lock:
                self._note([call.frame for call in calls], entries)
        if torch.is_grad_enabled():
            forward = ForwardWithGrad(training, entries)
            self._with_grad.add(weakref.ref(forward, self._with_grad.discard))
            return forward
        recipe = recipe_of(entries)
        with self._lock:
            known = self._without_grad.pop((training, recipe), None)
            outstanding = 1 if known is None else known.outstanding + 1
            self._without_grad[training, recipe] = _WithoutGrad(outstanding, entries)
            if len(self._without_grad) > _MOST:
                del self._without_grad[next(iter(self._without_grad))]
        return None

    def _note(self, frames: Sequence[Frame], entries: Stack) -> None:
        for frame in frames:
            self._of_frames.setdefault(frame, []).append(entries)

    def _known(self, counts: bool) -> Stack | None:
        """The stack of the forward that is computed again, if a frame tells which one it is.

        Within it torch's checkpoint may be called anew: to their frames it is a first forward.
        """
        new: list[Frame] = []
        for call in checkpoints():
            stacks = self._of_frames.get(call.frame)
            if stacks is None:
                new.append(call.frame)
                continue
            number = self._again.get(call.hook, 0)
            entries = stacks[min(number, len(stacks) - 1)]
            if counts:
                self._again[call.hook] = number + 1
                self._note(new, entries)
            return entries
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
        with self._lock:
            known = None if are_replayed(entries) else self._known(counts)
        if known is None and entries and entries[-1].in_backward:  # the recomputed function has opened its own autocast
            now, is_known = own or recipe_of(entries), entries[-1].is_reopened or are_replayed(entries)
            if not is_known and keeps_state(now) and now in self._found(training)[0]:
                raise _moved(now)
            yield
            return
        with self._lock:
            found, reentrant = self._found(training) if known is None else ({recipe_of(known): known}, False)
            if not found:  # no forward was recorded: not a recomputation
                recipe, first = None, entries
            else:
                recipe, first = _only(found)
                if known is None and counts:
                    self._note([call.frame for call in checkpoints() if not call.runs_again], first)
                if reentrant and counts:
                    outstanding = self._without_grad[training, recipe]
                    left = max(0, outstanding.outstanding - 1)
                    self._without_grad[training, recipe] = outstanding._replace(outstanding=left)
        runs = own or recipe
        if found and runs is not None and keeps_state(runs) and not _is_open(first):
            raise _moved(runs)
        with reentered(first, records=reentrant):
            yield

    def _found(self, training: bool) -> tuple[Mapping[Recipe, Stack], bool]:
        """The candidate recipes, and whether they are of forwards without gradients, where no frame tells which it is.

        Forwards that wait for their backward come first, then those whose backward may run again (retain_graph); of a
        recipe one whose scales have moved, which is an error.
        """
        living = [forward for reference in self._with_grad.copy() if (forward := reference()) is not None]
        with_grad = [forward for forward in living if forward.training == training]
        with_grad.sort(key=lambda forward: _is_open(forward.entries), reverse=True)
        without_grad = {r: known for (kind, r), known in self._without_grad.items() if kind == training}
        waiting = (
            {forward.recipe: forward.entries for forward in with_grad if not forward.has_run},
            {recipe: known.entries for recipe, known in without_grad.items() if known.outstanding},
        )
        known = (
            {forward.recipe: forward.entries for forward in with_grad},
            {recipe: known.entries for recipe, known in without_grad.items()},
        )
        kinds = (0, 1) if any(call.runs_again for call in checkpoints()) else (1, 0)
        for found, kind in ((found, kind) for found in (waiting, known) for kind in kinds):
            if found[kind]:
                return found[kind], kind == 1
        return {}, False


def _only(found: Mapping[Recipe, Stack]) -> tuple[Recipe, Stack]:
    """The only candidate, or the only one whose autocast is still open. Raises RuntimeError if neither is unique."""
    if len(found) > 1:
        still_open = {recipe: entries for recipe, entries in found.items() if _is_open(entries)}
        if len(still_open) != 1:
            raise RuntimeError(
                "A forward is computed again in a backward, and which recipe it first ran under is not known: "
                f"forwards under {' and '.join(sorted(repr(r.name) for r in found))} wait for their backward. {_HOW}"
            )
        found = still_open
    return next(iter(found.items()))


def _moved(recipe: Recipe) -> RuntimeError:
    return RuntimeError(
        f"A forward under {recipe.name!r} is computed again in a backward, after the step of its autocast has ended "
        "and its scales have moved. Use fuser.checkpoint."
    )


def _is_open(entries: Stack) -> bool:
    """Whether the scales are still those of the step of these entries."""
    return bool(entries) and entries[0].is_open
