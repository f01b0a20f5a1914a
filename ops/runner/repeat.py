"""Steps of a program that are repeated as a whole on a GPU for inputs of the same layout: `recipes.triton.replay`.

A step of built-in operations allocates, launches, and leaves tensors for backward. All of that follows from

    the program      recipe, path, dtypes, which gradients are needed
    the operations   their settings, which count assignments; training or not; hooks; parameters and states, as tensors
    the call         whether it is one within a backward
    what goes in     x and the extra inputs; or what forward left, dy, and the gradients of extra outputs: tensors,
                     splits, and containers of a class that `holds_tensors_alone`

So it is kept by these, and done again. Operations and recipes for which this holds are `repeatable`: what they do
depends on nothing else, and they change nothing but tensors. What else a step does on the host stays with the runner:
checks of parameters, the weights of `constant_weights`, where main_grad is, amaxes that are recorded in a state.

Not repeated are steps that write to a caller's memory, that leave a weight gradient for later, or whose group sizes are
on the host, and what runs under `count_casts`, `fuser.checkpoint`, `keep_weights`, or while side effects are recorded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import getclosurevars, isfunction
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.runner.built_in import is_built_in
from ops.runner.context import OperationContext
from ops.runner.nested_backward import within_backward
from ops.runner.parameters import is_computed, parameter_names
from ops.runner.quantizer_state import HeldState, kinds_of
from ops.runner.saved import Spec, flatten
from recipes.cast_counts import is_counting
from recipes.effects import recording as recorded_effects
from recipes.pending import PendingUpdates, RecordsAmaxes
from recipes.recipe import Recipe, Role
from recipes.stack import Stack, are_ordinary
from recipes.tensors.quantized_handle import QuantizedHandle
from recipes.tensors.splits import Splits
from recipes.triton.repeated import Repeated
from recipes.triton.replay import Kept, how, is_eager
from recipes.triton.tape import taping
from recipes.triton.zeros import zeros_launch

MOST_KEYS = 128  # of a step: shapes that come again


class OperationState:
    """What an operation's forward leaves for its backward besides tensors.

    values: of its context, and what it set there
    saved, weights: the specs of its `Saved` and of its quantized weights; count: of how many tensors both are
    repeats: whether forwards that are repeated leave this very object, so that backward may be repeated by it
    shape: of the x that the step began with, in the state of its first operation; None in the others
    extra_shapes: of the step's extra inputs that may have gradients, by their names in the pipeline
    """

    __slots__ = ("count", "extra_shapes", "repeats", "saved", "shape", "values", "weights")

    def __init__(self, values: dict[str, Any], saved: Spec, weights: Spec, count: int) -> None:
        self.values, self.saved, self.weights, self.count = values, saved, weights, count
        self.repeats = False
        self.shape: tuple[int, ...] | None = None
        self.extra_shapes: Mapping[str, tuple[int, ...]] = {}

    def forget_prototype(self, prototype: Mapping[str, Any]) -> None:
        """Keep what the operation set on its context alone, not what that was made from: other forwards leave it too.

        If the forward is being recorded, its backward may be repeated too.
        """
        made_anew = ("operation", "prepared_weights", "buffers")
        own = {k: v for k, v in self.values.items() if k not in made_anew and v is not prototype.get(k, self)}
        self.values, self.repeats = own, taping.tape is not None
        if taping.tape is not None and any(map(_holds_tensors, own.values())):  # it would be that of this forward
            taping.tape.repeatable = self.repeats = False


def _holds_tensors(value: Any, seen: tuple[int, ...] = ()) -> bool:
    """Itself, in containers, or for a function that is kept. seen: what it is held by, by identity"""
    if id(value) in seen:
        return False
    held: Iterable[Any] = ()
    if isinstance(value, dict):
        held = value.values()
    elif isinstance(value, tuple | list | set):
        held = value
    elif isinstance(value, partial):
        held = value.func, value.args, value.keywords
    elif isfunction(value):
        held = getclosurevars(value).nonlocals.values()
    return isinstance(value, Tensor) or any(_holds_tensors(one, (*seen, id(value))) for one in held)


class StepResult(NamedTuple):
    """What a step gives forward.

    names, outputs: the extra outputs
    states, distinct, places: what each operation that it stands for leaves for backward, see `distinct_of`
    divided, rebuilds, splits: the extra inputs of which it made splits, what makes these again, and of which tensors
    """

    y: Any
    names: tuple[str, ...]
    outputs: tuple[Any, ...]
    states: tuple[OperationState, ...]
    distinct: tuple[Tensor, ...]
    places: tuple[int | None, ...]
    divided: tuple[str, ...]
    rebuilds: tuple[Callable[[Sequence[Tensor | None]], Splits], ...]
    splits: tuple[tuple[Tensor | None, ...], ...]

    @classmethod
    def of(
        cls, y: Any, outputs: Mapping[str, Any], states: Sequence[OperationState], kept: Sequence[Tensor | None],
        divided: tuple[str, ...], splits: Sequence[Splits],
    ) -> StepResult:  # fmt: skip
        return cls(
            y, tuple(outputs), tuple(outputs.values()), tuple(states), *distinct_of(kept), divided,
            tuple([each.empty().rebuild for each in splits]), tuple([each.tensors() for each in splits]),
        )  # fmt: skip

    @property
    def kept(self) -> list[Tensor | None]:
        return at_places(self.distinct, self.places)


def left_by(context: OperationContext, kept: list[Tensor | None]) -> OperationState:
    """What the forward of an operation has left on its context; the tensors are appended to `kept`."""
    values = context.__dict__
    flat: list[Tensor | None] = []
    saved = flatten(values.pop("saved", None), flat)
    weights = flatten(values.pop("quantized_weights", None), flat)
    kept += flat
    values.pop("computed", None)
    del values["updates"]
    return OperationState(values, saved, weights, len(flat))


def kept_by_each(states: Sequence[OperationState], kept: Sequence[Tensor | None]) -> list[Sequence[Tensor | None]]:
    """The tensors of each operation."""
    ends = list(accumulate([state.count for state in states], initial=0))
    return [kept[begin:end] for begin, end in pairwise(ends)]


def distinct_of(kept: Sequence[Tensor | None]) -> tuple[tuple[Tensor, ...], tuple[int | None, ...]]:
    """The tensors, each once, and which of them each entry is: autograd saves no other entries."""
    distinct = {id(tensor): tensor for tensor in kept if tensor is not None}
    order = {identity: place for place, identity in enumerate(distinct)}
    return tuple(distinct.values()), tuple([None if tensor is None else order[id(tensor)] for tensor in kept])


def at_places(distinct: Sequence[Tensor | None], places: Sequence[int | None]) -> list[Tensor | None]:
    """What `distinct_of` was given."""
    return [None if place is None else distinct[place] for place in places]


class Noted(NamedTuple):
    """That an amax was recorded: in the state of this name, of the operation at this position, for this role."""

    operation: int
    role: str
    state: str


class NotingUpdates:
    """Passes records to the `updates` of a step, and notes them for its repetition."""

    def __init__(self, updates: PendingUpdates, operations: Mapping[int, Any]) -> None:
        self.updates = updates
        self.operations = operations
        self.noted: list[Noted] = []

    def add(self, quantizer: RecordsAmaxes, state: Tensor, *, before: bool = False) -> None:
        self.updates.add(quantizer, state, before=before)
        found = [
            Noted(index, quantizer.role, name)
            for index, operation in self.operations.items()
            for name, buffer in operation._buffers.items()
            if buffer is state
        ]
        if taping.tape is not None and not found:
            taping.tape.repeatable = False  # a state of something else
        self.noted += found


class RepeatedStep:
    """What is kept of one step of a program. covered: the positions of its operations. alone: whether it is repeated
    where the call is not repeated as a whole."""

    def __init__(self, covered: Sequence[int], recipe: Recipe, reads_tf32: bool, alone: bool = True) -> None:
        self.covered = covered
        self.alone = alone
        self.quantizers = {role: recipe.quantizer(role) for role in Role}
        self.reads_tf32 = reads_tf32
        self.kept = Kept(MOST_KEYS, zeros_launch)
        self.noted: set[Noted] = set()  # under any key
        self._recorders: dict[Noted, Any] = {}  # a quantizer over each state in which an amax was noted

    def run(
        self,
        operations: Sequence[Any],
        names: Sequence[Any],
        values: Sequence[Any],
        updates: PendingUpdates | None,
        function: Callable[[Any], Any],
    ) -> Any:
        """function(updates), or what it did: tensors in NamedTuples and tuples, and containers.

        names: what else it goes by, but for the operations; values: what goes in, in which tensors are
        """
        tensors: list[Any] = []
        addresses: list[int] = []
        try:
            key = self._key(operations, names, values, updates, tensors, addresses)
        except (TypeError, RuntimeError):  # what goes in is no plain tensor, has no address, or is known on the host
            return function(updates)
        divided = [value for value in values if type(value) is Splits]
        ran = False

        def run() -> Any:
            nonlocal ran
            ran = True
            known = [len(splits.tensors()) for splits in divided]
            before = [_tensors_of(operations[index]) for index in self.covered]
            noting = None
            if updates is not None:
                noting = NotingUpdates(updates, {index: operations[index] for index in self.covered})
            result = function(noting)
            noted = () if noting is None else tuple(noting.noted)
            self.noted.update(noted)
            if updates is not None and updates.apply_at_once():
                noted = ()
            after = [_tensors_of(operations[index]) for index in self.covered]
            if taping.tape is not None and any(map(_differ, before, after)):
                taping.tape.repeatable = False  # a repetition would exchange none
            derived = tuple(splits.derived(count) for splits, count in zip(divided, known, strict=True))
            return result, noted, derived

        try:
            result, noted, derived = self.kept.run(key, tensors, addresses, run)
        except BaseException:
            if not ran:  # it may have recorded amaxes, which are forgotten with the step
                self._add(updates, self.noted, operations)
            raise
        if not ran:
            for splits, more in zip(divided, derived, strict=True):
                splits.keep(more)
            self._add(updates, noted, operations)
        return result

    def known(
        self,
        operations: Sequence[Any],
        names: Sequence[Any],
        values: Sequence[Any],
        updates: PendingUpdates | None,
        tensors: Sequence[Tensor],
    ) -> Repeated | None:
        """What repeats it for these, if something does, and is given just these tensors."""
        seen: list[Any] = []
        found = self.kept.kept.get(self._key(operations, names, values, updates, seen, []))
        return found if type(found) is Repeated and list(map(id, seen)) == list(map(id, tensors)) else None

    def again(
        self,
        known: Repeated,
        operations: Sequence[Any],
        tensors: list[Any],
        addresses: list[int],
        stream: int,
        updates: PendingUpdates | None,
    ) -> Any:
        """As `run`, by what `known` gave for values that lie as these."""
        try:
            result, noted, _ = known.again(tensors, addresses, stream)
        except BaseException:
            self._add(updates, self.noted, operations)
            raise
        self._add(updates, noted, operations)
        return result

    def _add(self, updates: PendingUpdates | None, noted: Iterable[Noted], operations: Sequence[Any]) -> None:
        """Let these states go on at the end of the step, as casts do that are run in full."""
        if updates is None:
            return
        for place in noted:
            operation = operations[place.operation]
            quantizer = self._recorders.get(place)
            if quantizer is None:
                quantizer = self._recorders[place] = self._recorder(operation, Role(place.role))
            updates.add(quantizer, operation._buffers[place.state])

    def _recorder(self, operation: Any, role: Role) -> Any:
        quantizer = self.quantizers[role]
        assert quantizer is not None, "it recorded an amax"
        return quantizer.bound(HeldState(operation, role, quantizer, operation.num_scales), None, None)

    def _key(
        self,
        operations: Sequence[Any],
        names: Sequence[Any],
        values: Sequence[Any],
        updates: PendingUpdates | None,
        tensors: list[Any],
        addresses: list[int],
    ) -> Any:
        key: list[Any] = [*names, None if updates is None else updates.at_once, within_backward()]
        given: list[Any] = []
        if self.reads_tf32:
            key.append(torch.backends.cuda.matmul.fp32_precision)
        for index in self.covered:
            operation = operations[index]
            key += operation.settings, operation.training, not operation._forward_pre_hooks
            key.append(kinds_of(operation._buffers))
            _append_tensors(operation, given)
        for value in values:
            kind = type(value)
            key.append(kind)
            if kind is Splits:
                key.append(value.layout)
                given += value.tensors()
            elif value is None or isinstance(value, (Tensor, tuple)):
                given.append(value)
            elif "holds_tensors_alone" in vars(kind):
                given.append(tuple(value.tensors()))
            else:
                raise TypeError
        key.append(how(given, tensors, addresses))
        return tuple(key)


def _append_tensors(module: Any, given: list[Any]) -> None:
    """Its parameters and states, and those of its submodules."""
    given += module._parameters.values()
    given += module._buffers.values()
    for child in filter(None, module._modules.values()):
        _append_tensors(child, given)


def _tensors_of(module: Any) -> list[Any]:
    given: list[Any] = []
    _append_tensors(module, given)
    return given


def _differ(before: Sequence[Any], after: Sequence[Any]) -> bool:
    return len(before) != len(after) or any(a is not b for a, b in zip(before, after, strict=True))


def why_not_repeated(operation: Any, covered: Sequence[Any], recipe: Recipe) -> str | None:
    """Why a step runs in full each time, as a sentence; None if it may be repeated.

    operation: what is executed; covered: the basic operations that it stands for
    """
    for each in covered:
        name = next((name for name in parameter_names(each) if is_computed(each, name)), None)
        if name is not None:
            return f"Its {name!r} is computed from other parameters in each forward."
        if any(_is_foreign(child) for child in each._modules.values()):
            return "It holds modules, whose settings and hooks are not looked at."
        own = (name for name in vars(each) if not hasattr(nn.Module, name))  # what torch calls is around a step
        name = next((name for name in own if isfunction(getattr(type(each), name, None))), None)
        if name is not None:
            return f"Its {name!r} was replaced by another one."
    for kind in dict.fromkeys(map(type, (recipe, operation, *covered))):
        if not is_repeatable(kind):
            return f"{kind.__name__} is not repeatable."
    if any(isinstance(p, QuantizedHandle) for each in covered for p in each._parameters.values()):
        return "Its weights are held quantized."
    return next((each.why_in_full for each in covered if each.why_in_full is not None), None)


def _is_foreign(child: Any) -> bool:
    return child is not None and not is_built_in(type(child))


def is_repeatable(kind: type) -> bool:
    return states(kind, "repeatable")


def states(kind: type, attribute: str) -> bool:
    """Whether a class, or one it is derived from without replacing any method but `__init__`, says so of itself."""
    for at, parent in enumerate(kind.__mro__):
        if attribute in vars(parent):
            return bool(vars(parent)[attribute]) and not any(_replaces(child, parent) for child in kind.__mro__[:at])
    return False


def _replaces(child: type, parent: type) -> bool:
    own = (name for name, value in vars(child).items() if callable(value) or hasattr(value, "__get__"))
    return any(name != "__init__" and hasattr(parent, name) for name in own)


def may_repeat(device: torch.device, entries: Stack) -> bool:
    """Whether anything may be repeated now, in these `autocast`s."""
    return (
        device.type == "cuda"
        and not taping.inside
        and is_eager()
        and not is_counting()
        and recorded_effects() is None
        and are_ordinary(entries)
    )
