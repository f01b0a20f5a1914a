"""The backward pass of a pipeline: each step of its program in reverse, and where the gradients go."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, NamedTuple, NoReturn

from torch import Tensor, UntypedStorage, strided

from ops.runner.built_in import is_built_in
from ops.runner.callers_buffers import CallersBuffer, overlap
from ops.runner.context import OperationContext, at_tensor, state_of
from ops.runner.in_place import memory_of
from ops.runner.lent_memory import LentMemory, memory_for_grad_input
from ops.runner.nested_backward import retains_graph
from ops.runner.parameters import held_parameter
from ops.runner.program import Program, Wiring
from ops.runner.repeat import OperationState, RepeatedStep, may_repeat
from ops.runner.saved import Spec, unflatten
from recipes.amax_reduction import may_reduce
from recipes.first_forwards import ForwardWithGrad
from recipes.pending import PendingUpdates
from recipes.stack import Stack, reentered
from recipes.tensors.gathered_rows import GatheredRows
from recipes.tensors.quantized_handle import Quantized, QuantizedHandle, at_container, with_dtype

DOUBLE_BACKWARD = (
    "Double backward (create_graph=True) through a pipeline is not supported: its backward is written by hand. Call "
    "backward without create_graph, or express that part with plain torch functions."
)

X = -1  # the position of x, before the parameters


class Record(NamedTuple):
    """What forward leaves for backward, but for the saved tensors.

    states:      what each operation's forward left; its tensors are saved in this order
    parameters, parameter_states: of all operations, as forward saw them; None for those that are computed, which are
        the last of the saved tensors (`with_computed`)
    input_names: the extra inputs that autograd tracks; returned: the extra outputs that it tracks
    entries: what `autocast` had open in forward
    first_forward: what stands for this node among the forwards that a checkpoint may compute again
    buffers: the caller's own
    """

    program: Program
    operations: Sequence[Any]
    labels: Sequence[str]
    states: Sequence[OperationState]
    parameters: Sequence[Tensor]
    parameter_states: Sequence[Any]
    input_names: tuple[str, ...]
    returned: tuple[str, ...]
    entries: Stack
    first_forward: ForwardWithGrad | None
    buffers: Sequence[CallersBuffer]


def without(values: Sequence[Any], slots: Sequence[int]) -> list[Any]:
    """The values, with None at these positions."""
    return [None if at in slots else value for at, value in enumerate(values)]


def with_computed(record: Record, saved: list[Tensor | None]) -> Record:
    """The record with its computed parameters, which are taken from the end of `saved`."""
    slots = sorted(record.program.computed)
    parameters: list[Any] = list(record.parameters)
    for slot in reversed(slots):
        parameters[slot] = saved.pop()
    return record._replace(parameters=parameters)


def run_backward(
    record: Record,
    saved: list[Tensor | None],
    dy: Tensor | None,
    d_returned: Sequence[Tensor | None],
    unwanted: frozenset[int] = frozenset(),
    recorded: set[UntypedStorage] | None = None,
) -> list[Tensor | None]:
    """The gradients of x, of every parameter, and of the extra inputs, in this order.

    unwanted: of x, and the parameters by their positions, what this backward does not compute; x is at position X
    recorded: the states of quantizers that recorded amaxes in an earlier backward over this graph, and now do not
    The entries of `saved` are freed step by step. For quantizers with a state the backward is a step of its own.
    """
    repeats = not record.buffers and may_repeat(record.program.request.device, record.entries)
    # A step that is repeated reads no recipe.
    with _NOTHING if repeats else reentered(record.entries):
        if not record.program.keeps_state:
            return _run(record, saved, dy, d_returned, None, unwanted, repeats)
        # Another backward over this graph would have to know what it recorded.
        is_last = not recorded and not retains_graph()
        at_once = repeats and is_last and len(record.program.backward) == 1 and not may_reduce()
        updates = PendingUpdates(record.entries[0].updates.group if record.entries else None, at_once=at_once)
        try:
            gradients = _run(record, saved, dy, d_returned, updates, unwanted, repeats)
        except BaseException:
            updates.discard()
            raise
        updates.apply(recorded)
        return gradients


def _run(
    record: Record,
    saved: list[Tensor | None],
    dy: Tensor | None,
    d_returned: Sequence[Tensor | None],
    updates: PendingUpdates | None,
    unwanted: frozenset[int],
    repeats: bool,
) -> list[Tensor | None]:
    program = record.program
    if dy is not None:
        _check_destinations(record, unwanted)
    ends = [0, *accumulate([state.count for state in record.states])]
    # Gradients of extra tensors by name, the contributions in the order of the operations that made them.
    d_extras = {name: [d] for name, d in zip(record.returned, d_returned, strict=True) if d is not None}
    d_parameters: list[Tensor | None] = [None] * len(record.parameters)
    dx: Any = at_container(dy)
    foreign = _foreign_memory(record, saved, dy, d_returned) if program.reuses_gradients else frozenset()
    for wiring in program.backward:
        if not wiring.needs_grad:
            dx = None
            break
        d_outputs = {}
        for local, name, _ in wiring.outputs:
            if name in d_extras:
                d_outputs[local] = _total(d_extras.pop(name))
        if wiring.writes in d_extras:  # operations that read it later read y
            d_written = _total(d_extras.pop(wiring.writes))
            dx = d_written if dx is None else at_tensor(dx) + d_written
        if dx is None and not d_outputs:
            continue
        if dx is not None and not isinstance(dx, Tensor) and not wiring.takes(dx):
            dx = at_tensor(dx)
        covered = [record.operations[index] for index in wiring.step.indices] if program.reuses_gradients else ()
        if isinstance(dx, Tensor) and any(operation.retains_grad_output for operation in covered):
            foreign |= {memory_of(dx)}
        own: frozenset[str] = frozenset()
        if wiring.reuses_gradients:
            own = _own(d_outputs, foreign, (dx, *d_parameters, *(d for ds in d_extras.values() for d in ds)))
        try:
            begin, end = ends[wiring.step.indices[0]], ends[wiring.step.indices[-1] + 1]
            kept, saved[begin:end] = saved[begin:end], [None] * (end - begin)
            lent, at = None, wiring.lends_grad_input
            if at is not None and dx is not None and not record.buffers:
                forwards = unflatten(record.states[at].saved, saved[ends[at] : ends[at + 1]])
                writes_in = program.contexts[wiring.step.indices[0]]["dtype"]
                lent = memory_for_grad_input(record.operations[at], forwards, dx, writes_in)
            step = OperationBackward(record, wiring, kept, dx, d_outputs, own, unwanted, lent)
            dx, slots, of_parameters, names, of_extras = _run_step(step, updates, repeats)
        except Exception as error:
            operation = wiring.step.of(record.operations)
            raise_located(record.labels, wiring.step.indices[0], operation, error, _left_by_others(record, wiring))
        for slot, gradient in zip(slots, of_parameters, strict=True):
            d_parameters[slot] = gradient
        for name, gradient in zip(names, of_extras, strict=True):
            d_extras.setdefault(name, []).insert(0, gradient)
        if isinstance(dx, Tensor | GatheredRows) and dx.dtype != wiring.upstream_dtype:
            dx = dx.to(wiring.upstream_dtype)
    return apart(for_autograd(record, dx, d_parameters, d_extras), record)


def _left_by_others(record: Record, wiring: Wiring) -> str:
    """What forward fusions from outside of this repository left for the step, as sentences: they may have caused its
    error. Nothing if there are none."""
    says = ""
    for step in (forward.step for forward in record.program.forward):
        kind = type(step.operation)
        covered = [index for index in step.indices if index in wiring.step.indices]
        is_theirs = step.fused and kind.__module__.partition(".")[0] != "fused" and not is_built_in(kind)
        if is_theirs and covered and step.operation is not wiring.step.operation:
            left = [_words_of(record.states[at].saved, record.operations[at]) for at in covered]
            says += f" {kind.__name__} ran forward and left {', '.join(left)}. Fill ctx.saved as the operations do."
    return says


def _words_of(saved: Spec, operation: Any) -> str:
    return f"{'nothing' if saved is None else f'a {saved[0].__qualname__}'} for {type(operation).__name__}"


def _check_destinations(record: Record, unwanted: frozenset[int]) -> None:
    for wiring in record.program.backward if any(o.wgrad_is_external for o in record.operations) else ():
        for index in wiring.step.indices if wiring.needs_grad else ():
            context = record.program.contexts[index]
            slots = {name: context["parameter_slots"][name] for name in context["needs"].params}
            wanted = {name: record.parameters[slot] for name, slot in slots.items() if slot not in unwanted}
            try:
                record.operations[index].check_destinations(wanted)
            except Exception as error:
                raise_located(record.labels, wiring.step.indices[0], wiring.step.of(record.operations), error)


def for_autograd(
    record: Record, dx: Any, d_parameters: Sequence[Tensor | None], d_extras: Mapping[str, list[Tensor]]
) -> list[Tensor | None]:
    """The gradients of x, of every parameter, and of the extra inputs, in this order, in the dtypes of these."""
    x_needs_grad, parameters_need_grad, _ = record.program.request.needs
    return [
        _at_border(dx, record) if x_needs_grad and dx is not None else None,
        *[
            None if d is None or not wanted else d if d.dtype == p.dtype else d.to(p.dtype)
            for d, p, wanted in zip(d_parameters, record.parameters, parameters_need_grad, strict=True)
        ],
        *[_total(d_extras[name]) if name in d_extras else None for name in record.input_names],
    ]


def apart(gradients: list[Tensor | None], record: Record) -> list[Tensor | None]:
    """The same, with copies of those that lie in the memory of another owner's: autograd may keep each, and add to it.

    That one tensor is given twice autograd sees by itself. Gradients of one operation's parameters lie side by side.
    """
    owners = (None, *record.program.operation_of_slot, *record.input_names)
    memories = [0 if gradient is None else memory_of(gradient) for gradient in gradients]
    if len({*memories} - {0}) == len(gradients) - memories.count(0):
        return gradients
    by_memory: dict[int, list[int]] = {}
    for at, (gradient, memory) in enumerate(zip(gradients, memories, strict=True)):
        if gradient is not None:
            by_memory.setdefault(memory, []).append(at)
    for places in by_memory.values():
        if len(places) == 1 or len({owners[at] for at in places}) == 1:
            continue
        kept: list[Tensor] = []
        for at in places:
            gradient = gradients[at]
            assert gradient is not None
            if any(gradient is not other and overlap(gradient, other) for other in kept):
                gradients[at] = gradient.clone()
            else:
                kept.append(gradient)
    return gradients


def _at_border(dx: Any, record: Record) -> Tensor:
    """What autograd gets for x: a tensor, or a handle of the container that the first operation lets out."""
    if isinstance(dx, Tensor) or not record.operations[0].quantized_output:
        return at_tensor(dx)
    return QuantizedHandle(with_dtype(dx, record.program.input_dtype))


class OperationBackward(NamedTuple):
    """One step of the program, and what it needs.

    kept: the tensors that its operations saved; they are given up
    own: the extra outputs into whose gradients it may write
    lent: memory for dx
    """

    record: Record
    wiring: Wiring
    kept: list[Tensor | None]
    dy: Any
    d_outputs: dict[str, Tensor]
    own: frozenset[str]
    unwanted: frozenset[int]
    lent: LentMemory | None


class _Gradients(NamedTuple):
    """What a step gives backward: dx, the gradients of parameters by their slots, and of extra inputs by their names in
    the pipeline."""

    dx: Any
    slots: tuple[int, ...]
    of_parameters: tuple[Tensor, ...]
    names: tuple[str, ...]
    of_extras: tuple[Tensor, ...]


def _run_step(step: OperationBackward, updates: PendingUpdates | None, repeats: bool) -> _Gradients:
    record, wiring = step.record, step.wiring
    if repeats and wiring.repeated is not None and wiring.repeated.alone:
        external = [index for index in wiring.step.indices if record.operations[index].wgrad_is_external]
        if may_repeat_step(record, wiring, external):
            return _repeat(step, wiring.repeated, updates, external)
    with reentered(record.entries) if repeats else _NOTHING:
        return _execute(step, [context_of(step, index, updates) for index in wiring.step.indices])


def context_of(step: OperationBackward, index: int, updates: Any) -> OperationContext:
    record = step.record
    context = OperationContext.__new__(OperationContext)
    context.__dict__ = {**record.program.contexts[index], **record.states[index].values}
    context.operation = record.operations[index]
    context.seen_in_forward = (record.parameters, record.parameter_states)
    if record.program.computed:
        context.hold_computed(record.program.computed, record.parameters)
    if updates is not None:
        context.updates = updates
    if step.unwanted:
        wanted = {name for name in context.needs.params if context.parameter_slots[name] not in step.unwanted}
        needs_input = context.needs.input and not (index == 0 and X in step.unwanted)
        context.needs = context.needs._replace(input=needs_input, params=frozenset(wanted))
    return context


def _execute(step: OperationBackward, contexts: list[OperationContext]) -> _Gradients:
    record, planned, kept = step.record, step.wiring.step, step.kept
    for context in contexts:
        state = record.states[context.index]
        flat, kept[: state.count] = kept[: state.count], []  # so that nothing else keeps them alive
        context.saved, context.quantized_weights = unflatten(state.saved, flat), unflatten(state.weights, flat)
    if step.own:
        contexts[0].own_gradients = step.own
    if step.lent is not None:
        contexts[0].lent, contexts[0].buffers = step.lent, {"grad_input": step.lent.tensor}
    operation = planned.of(record.operations)
    result = operation.fuser_backward(contexts if planned.fused else contexts[0], step.dy, step.d_outputs)
    if type(result) is not tuple or len(result) != 3:
        raise TypeError(
            f"fuser_backward returned a {type(result).__name__}. Return (dx, gradients of the parameters by name, "
            "gradients of the extra inputs by name)."
        )
    dx, d_params, d_inputs = result
    needs_dx = step.dy is not None and contexts[0].needs.input
    _check_grad_input(dx, record.states[planned.indices[0]].shape, needs_dx)
    of_parameters = _by_slot(step, d_params if planned.fused else (d_params,))
    names, of_extras = _by_name(step, d_inputs)
    return _Gradients(dx, tuple(of_parameters), tuple(of_parameters.values()), names, of_extras)


def _check_grad_input(dx: Any, shape: tuple[int, ...] | None, is_needed: bool) -> None:
    """That it has the shape of x: another one would be broadcast by the operation before. Without one all that is
    before would get no gradient."""
    if dx is None and is_needed:
        raise RuntimeError(
            "fuser_backward returned None as dx, but x needs a gradient (ctx.needs.input). Return a tensor of x's "
            "shape: zeros if y does not depend on x."
        )
    if dx is None:
        return
    if not isinstance(dx, Tensor | Quantized | GatheredRows):
        raise TypeError(f"fuser_backward returned a {type(dx).__name__} as dx. Return a tensor of x's shape, or None.")
    if shape is not None and tuple(dx.shape) != shape:
        raise RuntimeError(
            f"fuser_backward returned dx of shape {tuple(dx.shape)}, but x has {shape}. Return a gradient for each "
            "element of x."
        )
    if not dx.dtype.is_floating_point:
        raise TypeError(f"fuser_backward returned dx in {dx.dtype}. Return floating-point numbers, as x has.")
    if isinstance(dx, Tensor) and dx.layout is not strided:
        raise TypeError(f"fuser_backward returned dx in the layout {dx.layout}. Return a dense tensor: dx.to_dense().")


def _repeat(
    step: OperationBackward, repeated: RepeatedStep, updates: PendingUpdates | None, external: Sequence[int]
) -> _Gradients:
    """As `_execute`, but repeated if it can be. external: the operations with main_grad, by their positions"""
    record, indices = step.record, step.wiring.step.indices
    operations = record.operations
    contexts_of = {index: context_of(step, index, updates) for index in external}
    destinations = {index: operations[index].destinations(context) for index, context in contexts_of.items()}

    def execute(noting: Any) -> _Gradients:
        contexts = [context_of(step, index, noting) for index in indices]
        for index in destinations:
            contexts[index - indices[0]].destinations = destinations[index]
        with reentered(record.entries):
            return _execute(step, contexts)

    ready, lent = (None, None) if step.lent is None else (step.lent.ready, step.lent.tensor)
    names = (*record.states[indices[0] : indices[-1] + 1], step.own, step.unwanted, ready, *step.d_outputs)
    values = (step.dy, *step.d_outputs.values(), tuple(step.kept), *destinations.values(), lent)
    found: _Gradients = repeated.run(operations, names, values, updates, execute)
    for index, context in contexts_of.items():
        operations[index].mark_written(context)
    return found


_NOTHING = nullcontext()


def may_repeat_step(record: Record, wiring: Wiring, external: Sequence[int]) -> bool:
    """Whether the step may be repeated: so was its forward, the parameters are what that saw, and no gradient of one is
    left for later, or written twice."""
    operations = record.operations
    for index in wiring.step.indices:
        if not record.states[index].repeats:
            return False
    for index in external:
        if operations[index].delay_wgrad_compute:
            return False
    for index, name, slot in wiring.parameters:
        operation = operations[index]
        parameter = operation._parameters.get(name)
        if parameter is None and "." in name:  # of a submodule
            parameter = held_parameter(operation, name)
        if parameter is not record.parameters[slot] or state_of(parameter) != record.parameter_states[slot]:
            return False
    return len({id(record.parameters[slot]) for _, _, slot in wiring.parameters}) == len(wiring.parameters)


def _foreign_memory(
    record: Record, saved: Sequence[Tensor | None], dy: Tensor | None, d_returned: Sequence[Tensor | None]
) -> frozenset[int]:
    """The memory that this backward did not make: what autograd handed in, what forward kept, what modules hold."""
    held = [tensor for operation in record.operations for tensor in operation.buffers()]
    given = [buffer.tensor for buffer in record.buffers]
    tensors = (dy, *d_returned, *saved, *record.parameters, *held, *given)
    return frozenset(memory_of(tensor) for tensor in tensors if tensor is not None)


def _own(d_outputs: Mapping[str, Tensor], foreign: frozenset[int], others: Sequence[Any]) -> frozenset[str]:
    """Those of the gradients that may be written into: this backward made them, and nothing else lies there."""
    seen = [memory_of(t) for t in (*d_outputs.values(), *others) if isinstance(t, Tensor)]
    memory = {name: memory_of(d) for name, d in d_outputs.items() if d.is_contiguous()}
    return frozenset(name for name, at in memory.items() if at not in foreign and seen.count(at) == 1)


def _by_slot(step: OperationBackward, d_params: Any) -> dict[int, Tensor]:
    found: dict[int, Tensor] = {}
    indices = step.wiring.step.indices
    if not isinstance(d_params, Sequence) or len(d_params) != len(indices):
        length = f" of {len(d_params)}" if isinstance(d_params, Sequence) else ""
        raise TypeError(
            f"fuser_backward returned a {type(d_params).__name__}{length} as gradients of the parameters. Return a "
            f"sequence of {len(indices)} mappings by name, one for each operation."
        )
    for index, own in zip(indices, d_params, strict=True):
        slots = step.record.program.contexts[index]["parameter_slots"]
        _check_mapping("parameters", own)
        for name, gradient in own.items():
            if gradient is not None:
                if name not in slots:
                    raise RuntimeError(_unknown("parameter", name, slots))
                slot = slots[name]
                _check_gradient("parameter", name, gradient, step.record.parameters[slot].shape)
                found[slot] = gradient
    return found


def _by_name(step: OperationBackward, d_inputs: Any) -> tuple[tuple[str, ...], tuple[Tensor, ...]]:
    names: list[str] = []
    gradients: list[Tensor] = []
    wiring, states = step.wiring, step.record.states
    _check_mapping("extra inputs", d_inputs)
    for local, gradient in d_inputs.items():
        if gradient is not None:
            if local not in wiring.input_names:
                raise RuntimeError(_unknown("extra input", local, wiring.input_names))
            found = [name for own, name, _ in wiring.inputs if own == local]
            for name in found:
                shapes = [states[index].extra_shapes for index in wiring.step.indices]
                shape = next((known[name] for known in shapes if name in known), None)
                _check_gradient("extra input", local, gradient, shape)
            names += found
            gradients += [gradient] * len(found)
    return tuple(names), tuple(gradients)


def _check_mapping(of: str, gradients: Any) -> None:
    if not isinstance(gradients, Mapping):
        raise TypeError(
            f"fuser_backward returned a {type(gradients).__name__} as gradients of the {of}. Return a mapping by name, "
            "empty if there are none."
        )


def _check_gradient(of: str, name: str, gradient: Any, shape: tuple[int, ...] | None) -> None:
    """That it has this shape, if that is known: another one would be broadcast where it is added, or summed by
    autograd."""
    if not isinstance(gradient, Tensor):
        raise TypeError(
            f"fuser_backward returned a {type(gradient).__name__} as the gradient of the {of} {name!r}. Return a "
            "tensor of its shape, or None."
        )
    if not gradient.dtype.is_floating_point:
        raise TypeError(
            f"fuser_backward returned a gradient in {gradient.dtype} for the {of} {name!r}. Return floating-point "
            "numbers."
        )
    if gradient.layout is not strided:
        raise TypeError(
            f"fuser_backward returned a gradient in the layout {gradient.layout} for the {of} {name!r}. Return a dense "
            "tensor, by to_dense()."
        )
    if shape is not None and gradient.shape != shape:
        raise RuntimeError(
            f"fuser_backward returned a gradient of shape {tuple(gradient.shape)} for the {of} {name!r}, which has "
            f"{tuple(shape)}."
        )


def _unknown(what: str, name: str, known: Any) -> str:
    """The sentence for a gradient that would be lost."""
    names = ", ".join(map(repr, known)) or "none"
    return f"fuser_backward returned a gradient for the {what} {name!r}. There are: {names}."


def _total(contributions: list[Tensor]) -> Tensor:
    total = contributions[0]
    for contribution in contributions[1:]:
        total = total + contribution
    return total


def raise_located(labels: Sequence[str], index: int, operation: Any, error: Exception, says: str = "") -> NoReturn:
    """Raise the same error with the operation and its place in front; one of another class gets it as a note.

    says: sentences to stand behind it
    """
    where = f"In operation {labels[index]} ({type(operation).__name__})"
    if type(error) in (ValueError, TypeError, RuntimeError, NotImplementedError):
        happened = f"{str(error).rstrip('.')}.{says}" if says else error
        raise type(error)(f"{where}: {happened}") from error
    error.add_note(f"{where}.{says}")
    try:
        raise error
    finally:
        del error  # its traceback has this frame: a cycle, which would keep the tensors of all frames
