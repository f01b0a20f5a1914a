"""autocast: the context manager that sets the recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import ContextDecorator
from dataclasses import fields
from functools import partial
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.amax_reduction import check_group
from recipes.arguments import as_flag
from recipes.effects import Effect, perform, recording
from recipes.pending import PendingUpdates, RecordsAmaxes, end_steps, forget
from recipes.recipe import HIGH_PRECISION, Recipe, as_batch_invariant, recipe_within
from recipes.registry import as_recipe
from recipes.stack import (
    ActiveRecipe,
    CastScales,
    current_updates,
    is_batch_invariant,
    key_of_traced,
    open_entries,
    own_entries,
    push,
    recipe_of,
    remove,
    seen,
)

Decorated = TypeVar("Decorated", bound=Callable[..., Any])


class autocast(ContextDecorator):
    """Run the body under `recipe`, a Recipe or a name such as "mxfp8"; also a decorator.

    Contexts nest; the innermost one applies. `enabled=False`, like None, means high precision. Yields the recipe.

    batch_invariant: the output bits of a row do not depend on the other rows, their number, their order or the batch's
        split, and a forward in training has the bits of one without gradients, so that what is trained is what
        generates. Contexts inside have it too, and operations with a recipe of their own. It holds for forward, in high
        precision and under recipes whose scales of x are each of one row (`docs/batch_invariant.md`).

    The outermost context is one step of delayed scaling. When it ends, the amaxes recorded by forwards with gradients
    enabled go into the histories, from which the next step's scales follow; after an exception they are dropped.
    amax_reduction_group: the process group over which the amaxes are reduced, unless the recipe that records them names
        one; by default all processes. Its ranks must run the same operations, or each raises a RuntimeError (see
        `recipes.amax_reduction`). With pipeline parallelism, pass the ranks of one stage.
    keep_weights: for CUDA graphs, a tensor of one number on the device. A graph captured inside quantizes its weights
        in each replay while the number is 0, and reuses the codes of the last replay otherwise. Set it to 0 for the
        first microbatch of a step (of any graph captured with the same weights), to 1 for the others. It has no effect
        outside of a capture, but run the same passes once under it before they are captured.
    scales: where `fuser.checkpoint` keeps the scales of the first run for its recomputation

    Each thread has its own contexts. A backward runs under the recipe of its forward, regardless of open contexts. A
    recomputation by `torch.utils.checkpoint` runs under the recipe of its forward, or raises RuntimeError: under a
    stateful recipe whose scales have changed since and, with use_reentrant=True, where forwards under several recipes
    await recomputation. There use `fuser.checkpoint`.

    Raises TypeError for an argument of another type, ValueError for an unknown name, keep_weights of another size, and
    batch_invariant under a recipe that cannot be. As a decorator it takes no generator function, no `async def` and no
    class (TypeError).

    Within a function that torch.compile or torch.export traces it decides what is traced, and takes no other argument
    than `recipe`, `enabled` and `batch_invariant` (NotImplementedError).
    """

    _entry: ActiveRecipe | None = None
    _around: tuple[str, bool] | None = None  # what was seen before it was entered where torch.compile traces
    _given: tuple[Any, ...] | None = None  # its arguments, if it was made there

    def __init__(
        self,
        recipe: Recipe | str | None = None,
        enabled: bool = True,
        *,
        batch_invariant: bool = False,
        amax_reduction_group: dist.ProcessGroup | None = None,
        keep_weights: Tensor | None = None,
        scales: CastScales | None = None,
    ) -> None:
        # is_compiling() is True on every thread while one compiles, since torch 2.13. A function of our own for both
        # flags would be compiled by itself where a graph is broken, and be True there for what runs eagerly.
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            self._trace(recipe, enabled, batch_invariant, amax_reduction_group, keep_weights, scales)
            return
        self._recipe = _asked(recipe, enabled, batch_invariant)
        _check_kinds(amax_reduction_group, keep_weights, scales)
        self._group = amax_reduction_group
        self._settings = scales, keep_weights
        self._is_outermost = False

    def __call__(self, function: Decorated) -> Decorated:
        if isgeneratorfunction(function) or iscoroutinefunction(function) or isasyncgenfunction(function):
            raise TypeError(
                f"autocast decorates {function!r}, whose body runs after the call has returned and the context has "
                "closed. Write `with autocast(...)` in the body, around what is to run under the recipe and no yield."
            )
        if isinstance(function, type):
            raise TypeError(
                f"autocast decorates the class {function.__name__}, which would be open while an instance is made and "
                "not when one is called. Decorate its methods, such as forward."
            )
        return super().__call__(function)

    def _recreate_cm(self) -> autocast:
        """A new context for each call of a decorated function."""
        if self._given is not None:
            recipe, enabled, batch_invariant = self._given
            return autocast(recipe, enabled, batch_invariant=batch_invariant)
        scales, keep_weights = self._settings
        return autocast(self._recipe, amax_reduction_group=self._group, keep_weights=keep_weights, scales=scales)

    def __enter__(self) -> Any:
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            self._around = seen.recipe, seen.inside
            seen.recipe, seen.inside = self._key, True
            return self._recipe
        if self._entry is not None:
            raise RuntimeError("This autocast is open already. Make one for each `with` statement.")
        outside = own_entries()
        recipe = recipe_within(self._recipe, recipe_of(open_entries() if seen.inside else outside))
        self._is_outermost = not outside
        if outside:
            self._entry = ActiveRecipe(self, recipe, outside[0].updates, *self._settings)
        else:
            updates = PendingUpdates(self._group)
            self._entry = ActiveRecipe(self, recipe, updates, *self._settings, if_abandoned=updates.discard)
        push(self._entry, outside)
        return recipe

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting():
            seen.recipe, seen.inside = self._around  # type: ignore[misc]  # of `__enter__`
            return
        if self._around is not None:  # it was entered where torch.compile traced, before its graph broke
            seen.recipe, seen.inside = self._around
            self._around = None
            return
        entry, self._entry = self._entry, None
        if entry is None:
            raise RuntimeError("This autocast is not open. Use it in a `with` statement.")
        is_outermost = self._is_outermost or own_entries()[:1] == (entry,)  # they may close in any order
        remove(entry)
        if not is_outermost:
            return
        if torch._C._are_functorch_transforms_active():
            # torch.func.grad and vjp let nothing change that they do not differentiate, such as a quantizer's state.
            with torch._C._DisableFuncTorch():
                self._end_step(entry, broke_off=kind is not None)
        else:
            self._end_step(entry, broke_off=kind is not None)

    def _end_step(self, entry: ActiveRecipe, broke_off: bool) -> None:
        if broke_off:
            entry.updates.discard()
            return
        quantizers = entry.updates.take()
        awaited = self._awaited_by(entry)
        if quantizers or awaited:
            perform(Effect(_end_of_step, (quantizers, entry.updates, awaited), partial(forget, quantizers)))

    def _trace(self, recipe: Recipe | str | None, enabled: bool, batch_invariant: bool, *others: object) -> None:
        if any(other is not None for other in others):
            raise NotImplementedError(
                "Within a function that torch.compile traces autocast takes recipe, enabled and batch_invariant alone. "
                "Open it around the call."
            )
        self._recipe = recipe  # type: ignore[assignment]  # its name is not looked up while it is traced
        self._given = recipe, enabled, batch_invariant
        if _is_made_while_tracing(recipe):
            values = tuple([getattr(recipe, name) for name in _fields_while_tracing(type(recipe))])
            self._key = _key_of_made(type(recipe), values, enabled, batch_invariant, seen.recipe)
        else:
            self._key = _key_while_tracing(recipe, enabled, batch_invariant, seen.recipe)

    def _awaited_by(self, entry: ActiveRecipe) -> tuple[dist.ProcessGroup | None, ...]:
        """The groups whose ranks wait for this one, even if it recorded no amaxes.

        Empty in evaluation, which one rank may run alone, in a recomputation, and while a graph is recorded, whose
        backward has its own context.
        """
        is_recomputation = entry.scales is not None
        if is_recomputation or entry.updates.has_evaluated or not torch.is_grad_enabled() or recording() is not None:
            return ()
        return self._recipe.amax_reduction_groups(entry.updates.group)


def _asked(recipe: Recipe | str | None, enabled: bool, batch_invariant: bool) -> Recipe:
    asked = as_recipe(recipe)
    chosen = asked if as_flag("enabled", enabled) else HIGH_PRECISION
    needed = as_flag("batch_invariant", batch_invariant) or asked.batch_invariant
    return as_batch_invariant(chosen) if needed else chosen


def _called_at_once(function: Decorated) -> Decorated:
    """torch.compile calls it while it traces, and takes what it returns for a constant."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@_called_at_once
def _key_while_tracing(recipe: Recipe | str | None, enabled: bool, batch_invariant: bool, around: str) -> str:
    return key_of_traced(_asked(recipe, enabled, batch_invariant or is_batch_invariant(around)))


@_called_at_once
def _is_made_while_tracing(recipe: Recipe | str | None) -> TypeGuard[Recipe]:
    """Whether what is traced makes this recipe: torch gives untraced code an object whose fields are not set, and which
    would be read as one with the defaults."""
    return isinstance(recipe, Recipe) and not vars(recipe).keys() >= {field.name for field in fields(recipe)}


@_called_at_once
def _fields_while_tracing(kind: type[Recipe]) -> tuple[str, ...]:
    if "__dataclass_params__" not in vars(kind):
        raise NotImplementedError(
            f"A {kind.__name__} is made within a function that torch.compile traces, and what it holds besides fields "
            "is not seen there. Make the recipe outside of the function, or put @dataclass(frozen=True) above its "
            "class."
        )
    return tuple(field.name for field in fields(kind))


@_called_at_once
def _key_of_made(kind: type[Recipe], values: tuple[Any, ...], enabled: bool, batch_invariant: bool, around: str) -> str:
    recipe = object.__new__(kind)  # the fields are as __init__ left them
    vars(recipe).update(zip(_fields_while_tracing(kind), values, strict=True))
    return _key_while_tracing(recipe, enabled, batch_invariant, around)


def _check_kinds(amax_reduction_group: object, keep_weights: object, scales: object) -> None:
    check_group("amax_reduction_group", amax_reduction_group)
    if keep_weights is not None:
        if not isinstance(keep_weights, Tensor):
            raise TypeError(f"keep_weights is {keep_weights!r}, but must be a tensor of one number, or None.")
        if keep_weights.numel() != 1:
            raise ValueError(f"keep_weights has shape {list(keep_weights.shape)}, but must hold one number.")
    if scales is not None and not isinstance(scales, CastScales):
        raise TypeError(f"scales is {scales!r}, but must be what fuser.checkpoint gives, or None.")


def _end_of_step(
    quantizers: Mapping[torch.UntypedStorage, RecordsAmaxes],
    own: PendingUpdates,
    awaited: Iterable[dist.ProcessGroup | None],
) -> None:
    """End a step when the outermost context closes. A graph replayed within an autocast is part of that one's step.

    own: the updates of the context, which may have opened first and be closed before others
    """
    updates = current_updates()
    if updates is None or updates is own:
        end_steps(quantizers, own.group, awaited)
    else:
        updates.join(quantizers)
