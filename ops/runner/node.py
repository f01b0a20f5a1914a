"""A pipeline as a node of autograd: what forward returns and saves, and how its backward is called."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from ops.runner.backward import DOUBLE_BACKWARD, Record, X, raise_located, run_backward, with_computed, without
from ops.runner.callers_buffers import check_before_backward, note_handed_on
from ops.runner.context import state_of
from ops.runner.in_place import memory_of
from ops.runner.input import as_stored
from ops.runner.names import in_profile
from ops.runner.nested_backward import retains_graph, unreached
from ops.runner.not_traced import not_traced
from ops.runner.repeat import at_places
from ops.runner.settings import Settings, check_settings, settings_of
from ops.runner.torch_autocast import without_autocast
from ops.runner.transforms import refuse_gradients
from recipes.tensors.quantized_handle import QuantizedHandle

_wgrad_is_external = attrgetter("wgrad_is_external")


class PipelineFunction(torch.autograd.Function):
    """The pipeline as one autograd node. call: that of the pipeline (`ops.runner.run.Call`), or a `RepeatedCall`"""

    @staticmethod
    def forward(fctx: Any, call: Any, x: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        fctx.set_materialize_grads(False)
        program = call.program
        known = call.known
        outputs, returned = _run(fctx, call, x) if known is None else ([call.run(x)], ())
        parameters: Sequence[Tensor] = tensors[: program.num_parameters]
        states = [state_of(parameter) for parameter in parameters]
        computed = sorted(program.computed) if program.computed else ()
        fctx.save_for_backward(*call.kept, *[parameters[slot] for slot in computed])
        if computed:
            parameters, states = without(parameters, computed), without(states, computed)
        operations = call.operations
        fctx.record = Record(
            program, operations, call.labels, call.states, parameters, states,
            tuple(call.input_names), tuple(returned), call.entries, call.first_forward,
            call.given_buffers,
        )  # fmt: skip
        fctx.settings = [settings_of(operation) for operation in operations] if known is None else known.settings
        fctx.known, fctx.places = known, call.places
        fctx.has_run = False
        fctx.recorded = set() if program.keeps_state else None
        return tuple(outputs)

    @staticmethod
    @not_traced("What has run eagerly forward does so backward, too. Compile the model to have both traced.")
    def backward(fctx: Any, dy: Tensor | None, *d_returned: Tensor | None) -> tuple[Any, ...]:
        known = fctx.known
        if known is not None:
            found = known.backward.run(fctx, dy)
            if found is not None:
                return None, *found
        if dy is not None:
            dy = as_stored(dy)
        if d_returned:
            d_returned = tuple([d if d is None else as_stored(d) for d in d_returned])
        if torch.is_grad_enabled():
            raise RuntimeError(DOUBLE_BACKWARD)
        refuse_gradients((dy, *d_returned))
        record = fctx.record
        if any(op.settings != seen.assigned for op, seen in zip(record.operations, fctx.settings, strict=True)):
            _check_settings(record, fctx.settings)
        ran_before = fctx.has_run
        saved = _take_saved(fctx)
        if fctx.places is not None:
            saved = at_places(saved, fctx.places)
        if record.program.computed:
            record = with_computed(record, saved)
        if record.first_forward is not None:
            record.first_forward.has_run = True
        buffers = record.buffers
        if buffers:
            check_before_backward(buffers, record.parameters, saved, (dy, *d_returned))
        program = record.program
        with in_profile(program, record.operations, "_backward"), without_autocast(program.request.device):
            # Gradients that go to autograd are dropped there if they are not needed; others would be accumulated. Two
            # backwards that divide the gradients between them (zero-bubble schedules) compute what is needed alone.
            unwanted: frozenset[int] = frozenset()
            if ran_before or retains_graph() or any(map(_wgrad_is_external, record.operations)):
                unwanted = unreached(fctx.next_functions[: 1 + len(record.parameters)], first=X)
            gradients = run_backward(record, saved, dy, d_returned, unwanted, fctx.recorded)
        if buffers:
            of_extras, edges = 1 + len(record.parameters), fctx.next_functions
            note_handed_on(buffers, [gradients[0], *gradients[of_extras:]], [edges[0], *edges[of_extras:]])
        return None, *gradients


_FREED = "Trying to backward through the graph a second time"  # how torch says it

# What `PipelineFunction.apply` is without what serves torch.func.
apply_in_eager_mode: Any = super(torch.autograd.Function, PipelineFunction).apply


def _run(fctx: Any, call: Any, x: Tensor) -> tuple[list[Tensor], Sequence[str]]:
    """What autograd gets of a call, y first, and the names of the others."""
    program = call.program
    y = call.at_border(call.forward(x))
    written = call.written
    # A buffer of the caller's must not get a history, nor one tensor object two: they get objects of their own.
    if not _is_among(y, written.values()):
        y = y.detach() if call.buffers else as_output(y, x, call.environment.values())
    outputs = [y]
    returned = [name for name in call.wanted if isinstance(call.produced[name], Tensor)]
    for name in returned:
        value = call.produced.pop(name)
        if not _is_among(value, written.values()) or _is_among(value, outputs):
            value = _as_extra_output(value, x, outputs, detached=bool(call.buffers))
        outputs.append(value)
    if written:  # autograd needs them as outputs: whatever uses them from now on belongs to this node
        fctx.mark_dirty(*written.values())
        # A view that was made here, without grad mode, of what has a history now could not be read in backward.
        call.kept = [t.detach() if t is not None and _is_among(t._base, written.values()) else t for t in call.kept]
        for name, value in written.items():
            if not _is_among(value, outputs):
                returned.append(name)
                outputs.append(value)
    if returned:
        call.returned = returned
        fctx.mark_non_differentiable(
            *[t for n, t in zip(returned, outputs[1:], strict=True) if n not in program.differentiable]
        )
    return outputs, returned


def _check_settings(record: Record, of_forward: Sequence[Settings]) -> None:
    for index, (operation, settings) in enumerate(zip(record.operations, of_forward, strict=True)):
        try:
            check_settings(operation, settings)
        except RuntimeError as error:
            raise_located(record.labels, index, operation, error)


def as_output(y: Tensor, x: Tensor, others: Iterable[Any]) -> Tensor:
    """y as autograd needs it from a Function, so that a module behind may change it in place, or is refused to.

    Not a view, which could not be changed; but a view, if another tensor that the caller may hold shares its memory.
    """
    if y is x or isinstance(y, QuantizedHandle):
        return y
    memory = memory_of(y)
    for other in (x, *others):
        if isinstance(other, Tensor) and memory_of(other) == memory:
            return y.view_as(y)
    return y.detach() if y._is_view() else y


def _as_extra_output(value: Tensor, x: Tensor, outputs: Sequence[Tensor], *, detached: bool) -> Tensor:
    """The same for an extra output: a view, which cannot be changed in place, if x or another one shares its memory."""
    memory = memory_of(value)
    shared = any(memory_of(other) == memory for other in (x, *outputs[1:]))
    if shared or value is outputs[0]:
        return value.view_as(value)
    return value.detach() if detached else value


def _is_among(tensor: Tensor, others: Iterable[Tensor]) -> bool:
    return any(tensor is other for other in others)


def _take_saved(fctx: Any) -> list[Tensor | None]:
    """What the operations saved. Unless this backward retains its graph, autograd gives it up: each operation's part is
    freed as soon as its backward has run."""
    try:
        saved = list(fctx.saved_tensors)
    except RuntimeError as error:
        # Others are that a saved tensor was changed in place, and errors of the caller's hooks of saved tensors.
        if not fctx.has_run or _FREED not in str(error):
            raise
        raise RuntimeError(
            "In a second backward: what the operations saved was freed by the first one. Give the first one "
            "retain_graph=True."
        ) from error
    fctx.maybe_clear_saved_tensors()
    fctx.has_run = True
    return saved
