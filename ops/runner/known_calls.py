"""Calls that a pipeline has made before, made again by one look-up.

A call in full (`ops.runner.run`) checks what goes in, finds its program, and finds what its step did for inputs that
lie like these (`ops.runner.repeat`). All of that follows from

    the call         recipe, training or not, registered fusions, whether gradients are computed, torch.autocast
    the operations   their settings, which count assignments; training or not; which parameters and states they have;
                     whether they are in a scope of `constant_weights`, and how the copies lie that it keeps
    what goes in     parameters, states, x and the extra inputs: how each lies, and whether it requires grad

so a call for which these are equal to an earlier one's takes its program and its step from there. The last call is
compared first: how its tensors lie is compared at once (`recipes.triton.layouts`), without a key. This is for
one step on a GPU, of plain tensors, whose y alone is asked for. Everything else runs in full, where the sentences are
for what is refused: so does what traces, transforms, records, counts, profiles or computes again.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter

from ops.runner.backward import raise_located
from ops.runner.context import at_tensor
from ops.runner.input import is_stored
from ops.runner.known_backward import KnownBackward, is_ordinary
from ops.runner.node import apply_in_eager_mode, as_output
from ops.runner.program import Program
from ops.runner.repeat import RepeatedStep
from ops.runner.run import Pipeline, step_of
from ops.runner.settings import Settings, settings_of
from ops.runner.torch_autocast import without_autocast
from recipes.first_forwards import ForwardWithGrad
from recipes.pending import PendingUpdates
from recipes.stack import Stack, are_ordinary, current_updates, open_entries, recipe_in_use
from recipes.triton.layouts import Layouts
from recipes.triton.repeated import Repeated
from recipes.triton.replay import how, stream_for, times_forgotten

MOST_CALLS = 128  # that a pipeline knows; one more, and it forgets them

_requires_grad: Any = attrgetter("requires_grad")
_is_inference: Any = Tensor.is_inference
_NOTHING = nullcontext()
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class KnownCall(NamedTuple):
    """What an earlier call has found.

    key, layouts: what it goes by, see `_Given`, and how its tensors lie
    step: its only one; settings: of each operation
    quantized: the positions of operations whose weights are those that `constant_weights` keeps quantized; of_copies:
        the calls that have found what these are, by how they lie
    repeated: what the step does; backward: what backwards have found; None where `of_copies` has them
    """

    key: Sequence[Any]
    layouts: Layouts
    program: Program
    step: RepeatedStep
    settings: Sequence[Settings]
    quantized: tuple[int, ...]
    of_copies: dict[Any, KnownCall]
    repeated: Repeated | None = None
    backward: KnownBackward | None = None


class _Given(NamedTuple):
    """What goes into a call, and what it is found by.

    key: all but how the tensors lie
    parameters, extras: those of autograd's inputs behind x; scopes: the `constant_weights` of operations in one, by
        their positions
    tensors: what the step gets; one that is given twice is there twice
    """

    key: list[Any]
    operations: list[Any]
    parameters: list[Tensor]
    extras: list[Tensor]
    scopes: dict[int, Any]
    tensors: list[Any]


def call_again(
    pipeline: Pipeline, x: Any, extras: Mapping[str, Any], training: bool, fusions_version: int = 0
) -> Tensor | None:
    """y of a call that was made before; None: make it in full, `pipeline(x, extras, ...)`."""
    kind = type(x)
    if (kind is not Tensor and kind is not Parameter) or not is_on_gpu(x):
        return None
    entries = open_entries()
    recipe, with_grad = recipe_in_use(pipeline.recipe, entries), torch.is_grad_enabled()
    autocasts = torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else None
    terms = recipe, with_grad, training, fusions_version, autocasts, x.dtype
    if (pipeline.in_full and terms in pipeline.in_full) or not is_ordinary():
        return None
    if torch._C._current_graph_task_id() >= 0 or _top_hooks(True) is not None:  # computed again, or packed
        return None
    if not are_ordinary(entries):
        return None
    given = _given(pipeline, x, extras, terms)
    if given is None:
        return None
    known: KnownCall | None = pipeline.last_known.get(x.numel())
    tensors, addresses = given.tensors, None
    if known is not None and known.key == given.key:
        addresses = known.layouts.addresses(tensors)
    if known is None or addresses is None:
        tensors, addresses = [], []
        known = _looked_up(pipeline, x, extras, terms, given, tensors, addresses)
        if known is None:
            return None
    if known.quantized:
        known = _of_copies(known, x, given, tensors, addresses)
        if known is None:
            return None
    assert known.repeated is not None
    program, stream = known.program, stream_for(known.repeated)
    if stream is None or program.wrapper.changed() is not None:
        return None
    first = pipeline.first_forwards.began(training, entries)
    call = RepeatedCall(known, given.operations, pipeline, entries, first)
    call.given = tensors, addresses, stream
    if program.keeps_state and with_grad:
        call.updates = current_updates()
    if autocasts is None and (not program.keeps_state or call.updates is not None):
        return call.within_autograd(x, given)
    with without_autocast(x.device), step_of(call, records=with_grad) if program.keeps_state else _NOTHING:
        return call.within_autograd(x, given)


def _given(pipeline: Pipeline, x: Tensor, extras: Mapping[str, Any], terms: tuple[Any, ...]) -> _Given | None:
    """None: something is missing, unknown, or no plain tensor."""
    if len(extras) != len(pipeline.consumed):
        return None
    key: list[Any] = [terms, times_forgotten()]
    operations: list[Any] = []
    present: list[Tensor] = []
    scopes: dict[int, Any] = {}
    tensors: list[Any] = []
    for reference, parameters, children, hooks in pipeline.members:
        operation: Any = reference()
        if children or hooks:
            return None
        if operation._weights_scope is not None and (scope := operation.weights_scope) is not None:
            scopes[len(operations)] = scope
        operations.append(operation)
        key += operation.settings, operation.training, len(parameters), *map(type, parameters.values())
        own = [parameter for parameter in parameters.values() if parameter is not None]
        present += own
        tensors += own
        if operation._buffers:
            key += operation._buffers
            tensors += operation._buffers.values()
    key += scopes
    tensors.append(x)
    extra: list[Any] = []
    for name in pipeline.consumed:
        value: Any = extras.get(name)
        kind = type(value)
        if kind is not Tensor and kind is not Parameter:
            return None
        extra.append(value)
    tensors += extra
    return _Given(key, operations, present, extra, scopes, tensors)


def _looked_up(
    pipeline: Pipeline, x: Tensor, extras: Mapping[str, Any], terms: tuple[Any, ...], given: _Given,
    tensors: list[Any], addresses: list[int],
) -> KnownCall | None:  # fmt: skip
    """What an earlier call has found for tensors that lie like these. They are appended, each once, and their
    addresses."""
    key = _full_key(x, given, tensors, addresses)
    if key is None:
        return None
    known: KnownCall | None = pipeline.known.get(key)
    if known is None:
        if not pipeline.programs:  # a call in full comes first, whose checks have an order
            return None
        _, _, training, fusions_version, *_ = terms
        program = pipeline.program(x, extras, training, fusions_version)
        if not _is_one_step(program, pipeline, given.operations):
            if len(pipeline.in_full) >= MOST_CALLS:
                pipeline.in_full.clear()
            pipeline.in_full.add(terms)
            return None
        known = _found(program, x, given, tensors, addresses)
        if known is None:
            return None
        if len(pipeline.known) >= MOST_CALLS:
            pipeline.known.clear()
        pipeline.known[key] = known
    if len(pipeline.last_known) >= MOST_CALLS:
        pipeline.last_known.clear()
    pipeline.last_known[x.numel()] = known
    return known


def _full_key(x: Tensor, given: _Given, tensors: list[Any], addresses: list[int]) -> tuple[Any, ...] | None:
    """That of `given`, with how its tensors lie; they are appended, each once, and their addresses. None: one is not
    plain, sparse, nested, or computed from other parameters, or its numbers are others than those in its memory."""
    if any(type(parameter) is not Parameter for parameter in given.parameters):  # a tensor in its place is computed
        return None
    if not all(map(is_stored, (x, *given.extras))):
        return None
    try:
        lie = how(given.tensors, tensors, addresses)
    except (TypeError, RuntimeError):
        return None
    return *given.key, lie, *map(_requires_grad, tensors), *map(_is_inference, tensors)


def is_on_gpu(x: Tensor) -> bool:
    """Whether steps that take it may be repeated."""
    return x.is_cuda


def _found(program: Program, x: Tensor, given: _Given, tensors: list[Any], addresses: list[int]) -> KnownCall | None:
    """What a call with this program has found that ran in full, if its step is repeated."""
    step, operations = program.forward[0].repeated, given.operations
    assert step is not None
    quantized = tuple([index for index in program.forward[0].quantizes if index in given.scopes])
    settings = [settings_of(operation) for operation in operations]
    known = KnownCall(given.key, Layouts(tensors, addresses), program, step, settings, quantized, {})
    if quantized:
        return known
    repeated = step.known(operations, (), (x, *given.extras, (), None), _updates(program), tensors)
    return None if repeated is None else known._replace(repeated=repeated, backward=KnownBackward(program, operations))


def _of_copies(
    known: KnownCall, x: Tensor, given: _Given, tensors: list[Any], addresses: list[int]
) -> KnownCall | None:
    """The same for the copies of weights that `constant_weights` keeps, which the step gets too. None: they are to be
    made first."""
    program, operations = known.program, given.operations
    use = program, program.keeps_state and torch.is_grad_enabled()
    of_weights: list[Any] = []
    for index in known.quantized:
        kept = given.scopes[index].given(operations[index], use)
        if kept is None:
            return None
        of_weights.append(kept)
        tensors += kept.tensors
        addresses += kept.addresses
    key = tuple([kept.lie for kept in of_weights])
    found = known.of_copies.get(key)
    if found is None:
        copies = tuple([kept.copies and kept.copies.tensors() for kept in of_weights])
        values = (x, *given.extras, copies, None)
        repeated = known.step.known(operations, known.quantized, values, _updates(program), tensors)
        if repeated is None:
            return None
        if len(known.of_copies) >= MOST_CALLS:
            known.of_copies.clear()
        # Without `of_copies`: it would hold itself.
        found = known._replace(of_copies={}, repeated=repeated, backward=KnownBackward(program, operations))
        known.of_copies[key] = found
    return found


def _updates(program: Program) -> PendingUpdates | None:
    """Some, if a call records amaxes."""
    return PendingUpdates() if program.keeps_state and torch.is_grad_enabled() else None


def _is_one_step(program: Program, pipeline: Pipeline, operations: Sequence[Any]) -> bool:
    """Whether a call is nothing but its first step, in tensors that are taken as they are."""
    wiring = program.forward[0]
    return (
        len(program.forward) == 1
        and wiring.repeated is not None
        and wiring.repeated.alone
        and not wiring.repeated.reads_tf32
        and tuple([name for _, name, _ in wiring.inputs]) == pipeline.consumed
        and wiring.dtype == program.input_dtype
        and wiring.lends_output is None
        and not program.computed
        and not operations[-1].quantized_output
        and all(operation.weights_scope is operation.opened_scope for operation in operations)
    )


class RepeatedCall:
    """A call that is made again. It has what `ops.runner.node` asks of a `Call`.

    given: the tensors that its step gets, their addresses, and the stream
    kept: what is left for backward, each tensor once; places: which of them each entry is
    """

    __slots__ = (
        "entries", "first_forward", "given", "input_names", "kept", "known", "labels", "operations", "places",
        "program", "states", "updates",
    )  # fmt: skip

    given_buffers = ()

    def __init__(
        self,
        known: KnownCall,
        operations: Sequence[Any],
        pipeline: Pipeline,
        entries: Stack,
        first_forward: ForwardWithGrad | None,
    ) -> None:
        self.known, self.program, self.operations = known, known.program, operations
        self.labels, self.input_names = pipeline.labels, pipeline.consumed
        self.entries, self.first_forward = entries, first_forward
        self.given: tuple[list[Any], list[int], int]
        self.updates: PendingUpdates | None = None

    def within_autograd(self, x: Tensor, given: _Given) -> Tensor:
        """y, of a node of autograd if anything needs a gradient."""
        if not self.program.needs_grad:
            return self.run(x)
        y: Tensor = apply_in_eager_mode(self, x, *given.parameters, *given.extras)[0]
        return y

    def run(self, x: Tensor) -> Tensor:
        """y; what is left for backward goes to `states` and `kept`."""
        known = self.known
        try:
            assert known.repeated is not None
            result = known.step.again(known.repeated, self.operations, *self.given, self.updates)
        except Exception as error:
            raise_located(self.labels, 0, self.program.forward[0].step.of(self.operations), error)
        self.states, self.kept, self.places = result.states, result.distinct, result.places
        y = at_tensor(result.y)
        tensors, addresses, _ = self.given
        if y._is_view() or y.data_ptr() in addresses:
            return as_output(y, x, tensors) if self.program.needs_grad else y
        return y
