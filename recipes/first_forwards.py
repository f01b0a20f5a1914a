"""Which recipes the forwards of a pipeline ran under whose backward has not run yet.

A forward within a backward is a recomputation, by an activation checkpoint, of one of these. It runs where autograd
runs, on a thread with a stack of recipes of its own, and usually after the caller's `autocast` was left.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from recipes.recipe import Recipe, Role
from recipes.stack import Stack, open_entries, reentered

_MOST = 16  # recipes that are remembered at once; a forward without a backward is never taken off

_HOW = "Use fuser.checkpoint, or open autocast(recipe) inside of the function that is checkpointed."


class _Forwards(NamedTuple):
    """Of one recipe: how many there are, the stack of the last one, and whether any ran with gradients on."""

    outstanding: int
    entries: Stack
    with_grad: bool


_NONE = _Forwards(0, (), False)


class FirstForwards:
    """Of one pipeline. `training` tells the forwards of an evaluation from others."""

    def __init__(self) -> None:
        self._pending: dict[tuple[bool, Recipe], _Forwards] = {}

    def began(self, training: bool, recipe: Recipe) -> None:
        """A forward runs under this recipe, outside of any backward."""
        key = training, recipe
        outstanding, _, with_grad = self._pending.pop(key, _NONE)
        self._pending[key] = _Forwards(outstanding + 1, open_entries(), with_grad or torch.is_grad_enabled())
        if len(self._pending) > _MOST:
            del self._pending[next(iter(self._pending))]

    def ended(self, training: bool, recipe: Recipe) -> None:
        """The backward of such a forward runs."""
        known = self._pending.get((training, recipe))
        if known is not None and known.outstanding > 1:
            self._pending[training, recipe] = known._replace(outstanding=known.outstanding - 1)
        elif known is not None:
            del self._pending[training, recipe]

    @contextmanager
    def entered_again(self, training: bool) -> Iterator[None]:
        """Within a backward: under the recipe of the forward that is computed again.

        It records amaxes if the first time did not: reentrant checkpointing runs that without gradients.
        Raises RuntimeError if that recipe is not known, or if its scales have moved since.
        """
        entries = open_entries()
        if entries and entries[-1].in_backward:  # the function that is computed again has chosen
            yield
            return
        found = self._found(training)
        if found is None:  # nothing ran before: not a recomputation
            yield
            return
        recipe, (_, first, with_grad) = found
        if _keeps_state(recipe) and not (first and first[0].is_open):
            raise RuntimeError(
                f"A forward under {recipe.name!r} is computed again in a backward, after the step of its autocast has "
                f"ended and its scales have moved. {_HOW}"
            )
        with reentered(first, records=not with_grad):
            yield

    def _found(self, training: bool) -> tuple[Recipe, _Forwards] | None:
        pending = {recipe: known for (kind, recipe), known in self._pending.items() if kind == training}
        if not pending:
            return None
        if len(pending) > 1:
            still_open = {r: known for r, known in pending.items() if known.entries and known.entries[0].is_open}
            if len(still_open) != 1:
                raise RuntimeError(
                    "A forward is computed again in a backward, and which recipe it first ran under is not known: "
                    f"forwards under {' and '.join(repr(recipe.name) for recipe in pending)} wait for their backward. "
                    + _HOW
                )
            pending = still_open
        return next(iter(pending.items()))


def _keeps_state(recipe: Recipe) -> bool:
    quantizers = [recipe.quantizer(role) for role in Role]
    return any(quantizer is not None and quantizer.keeps_state for quantizer in quantizers)
