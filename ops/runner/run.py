"""How a run of operations is executed: one autograd node, each operation in turn.

A call is one dictionary look-up, for the `Program` of this request, and then a loop over its steps.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.runner.backward import DOUBLE_BACKWARD, Record, raise_located, run_backward, with_computed, without
from ops.runner.callers_buffers import (
    CallersBuffer,
    buffers_of,
    check_before_backward,
    check_before_forward,
    note_handed_on,
    place_of,
)
from ops.runner.context import OperationContext, at_tensor, state_of
from ops.runner.in_place import check_writable, memory_of
from ops.runner.input import as_input, check_numbers
from ops.runner.lent_memory import memory_for_output
from ops.runner.names import in_profile
from ops.runner.nested_backward import note_forward, unwanted_parameters
from ops.runner.parameters import computed_names, held_parameters, requires_grad
from ops.runner.program import Planner, Program, Wiring, plan_unfused
from ops.runner.recent import Recent
from ops.runner.repeat import OperationState, RepeatedStep, StepResult, kept_by_each, left_by, may_repeat
from recipes.first_forwards import FirstForwards, ForwardWithGrad
from recipes.pending import PendingUpdates
from recipes.recipe import Recipe
from recipes.request import PlanRequest
from recipes.stack import current_updates, open_entries, recipe_in_use, records_amaxes
from recipes.tensors.quantized_handle import QuantizedHandle, at_container, with_dtype
from recipes.tensors.splits import Splits, offsets_alone

Buffers = Mapping[int, Mapping[str, Tensor]]

MOST_PROGRAMS = 64  # that a pipeline keeps: requests that never come again (a new lambda in each step) push others out

_NONE = type(None)
_requires_grad = attrgetter("requires_grad")
_dtype = attrgetter("dtype")
_wgrad_is_external = attrgetter("wgrad_is_external")


class Parameters(NamedTuple):
    """A pipeline's parameters as they are at a call. layout: which are registered as None, and what changes else."""

    present: list[Tensor]
    layout: tuple[Any, ...]


class Pipeline:
    """A run of basic operations that is executed as one autograd node.

    operations:   the basic operations, in order; the caller holds them
    planner:      chooses fused operations for a request; `plan_unfused` by default
    path:         "grouped" or "split" to force one of the two storage paths, else None
    retain_graph: keep what backward needs after the first backward
    labels:       where each operation stands, for messages; by default its position
    recipe:       the operations' own recipe; None: that of `autocast`
    first_forwards: those of the Sequential, which has other pipelines after a change
    """

    def __init__(
        self,
        operations: Sequence[Any],
        *,
        planner: Planner = plan_unfused,
        path: str | None = None,
        retain_graph: bool = False,
        labels: Sequence[str] | None = None,
        recipe: Recipe | None = None,
        first_forwards: FirstForwards | None = None,
    ) -> None:
        self.recipe = recipe
        # Weakly: an operation has pipelines of its own, and what refers to itself outlives its last user.
        self._operations = tuple(weakref.ref(operation) for operation in operations)
        self.labels = tuple(map(str, range(len(self.operations)))) if labels is None else tuple(labels)
        self.planner = planner
        self.path = path
        self.retain_graph = retain_graph
        self.programs: dict[Any, Program] = {}
        self.first_forwards = first_forwards or FirstForwards()
        self.traced: dict[Any, Any] = {}  # of `ops.runner.tracing`, by what they hold for
        self.recently_traced = Recent(MOST_PROGRAMS)
        self.traced_recipes: set[Recipe] = set()  # under which what was traced has run
        # The dictionaries that own the parameters are kept, not the parameters: replacing one is seen at once.
        self._members = [(weakref.ref(o), o._parameters, o._modules, o._forward_pre_hooks) for o in self.operations]
        self.produced = [operation.extra_name(n) for operation in self.operations for n in operation.extra_outputs]
        self.consumed = self._consumed_from_outside()

    @property
    def operations(self) -> tuple[Any, ...]:
        """The basic operations, which somebody else holds."""
        return tuple([ref() for ref in self._operations])

    def _consumed_from_outside(self) -> tuple[str, ...]:
        seen: set[str] = set()
        names: dict[str, None] = {}
        for operation in self.operations:
            asked = [operation.extra_name(name) for name in operation.extra_inputs]
            names |= {name: None for name in asked if name not in seen}
            seen |= {operation.extra_name(n) for n in operation.extra_outputs}
        return tuple(names)

    def all_needs(self, x_requires_grad: bool) -> Any:
        """The needs of a request in which x requires grad or not, and the parameters as they do."""
        named = [(operation, name) for operation in self.operations for name in operation.parameter_names()]
        return x_requires_grad, tuple([requires_grad(operation, name) for operation, name in named]), ()

    def program(self, x: Tensor, extras: Mapping[str, Any], training: bool, fusions_version: int) -> Program:
        """The program for this call; made once for each distinct request."""
        return self._program(x, extras, self.parameters(), training, fusions_version)

    def program_for(
        self,
        x: Tensor,
        parameters: Parameters,
        needs: tuple[bool, tuple[bool, ...], tuple[str, ...]],
        autocast_dtype: torch.dtype | None,
        training: bool,
        fusions_version: int,
    ) -> Program:
        """The same, where the needs of the request and the dtype of torch.autocast are known."""
        dtypes = tuple(map(_dtype, parameters.present))
        recipe = recipe_in_use(self.recipe)
        # All that the request is made of, and what the program adds.
        key = (recipe, x.device, needs, training, fusions_version, x.dtype, autocast_dtype, dtypes, parameters.layout)
        program = self.programs.get(key)
        if program is None:
            check_numbers(x.dtype, self.operations)
            self._check_parameters(x)
            dtype = autocast_dtype or (dtypes[0] if dtypes else x.dtype)
            if torch.float64 in dtypes:
                dtype = torch.float64  # the widest decides: it is what a kernel may lack
            path = self.path or recipe.path
            request = PlanRequest(recipe, x.device, dtype, needs, training, path, fusions_version)
            plan = self.planner(self.operations, request)
            # plans made with fusions that are no longer registered are of no use
            known = [(k, p) for k, p in list(self.programs.items()) if p.request.fusions_version == fusions_version]
            self.programs = dict(known[1 - MOST_PROGRAMS :])
            program = self.programs[key] = Program(
                self.operations, plan, request, x.dtype, autocast_dtype, parameters.present
            )  # fmt: skip
        return program

    def parameters(self) -> Parameters:
        parameters: list[Any] = []
        names: tuple[Any, ...] = ()
        for operation, own, children, hooks in self._members:
            if children or hooks:  # some may be computed
                owner: Any = operation()
                found = held_parameters(owner)
                parameters += found.values()
                names += (*found, computed_names(owner))
            else:
                parameters += own.values()
        kinds = tuple(map(type, parameters))
        if _NONE in kinds:
            parameters = [parameter for parameter in parameters if parameter is not None]
        return Parameters(parameters, (kinds, names))

    def _program(
        self, x: Tensor, extras: Mapping[str, Any], parameters: Parameters, training: bool, fusions_version: int
    ) -> Program:
        present = parameters.present
        if torch.is_grad_enabled():
            extras_needs = [n for n, v in extras.items() if isinstance(v, Tensor) and v.requires_grad] if extras else ()
            needs = (x.requires_grad, tuple(map(_requires_grad, present)), tuple(extras_needs))
        else:
            needs = (False, (False,) * len(present), ())
        return self.program_for(x, parameters, needs, dtype_of_autocast(x.device), training, fusions_version)

    def _check_parameters(self, x: Tensor) -> None:
        for operation in self.operations:
            for name, parameter in operation.named_parameters():
                if parameter.is_meta and not x.is_meta:
                    raise RuntimeError(
                        f"{type(operation).__name__}.{name} is on the meta device, but x is on {x.device}. "
                        f"Materialise it first: module.to_empty(device={str(x.device)!r}), then reset_parameters()."
                    )

    def __call__(
        self,
        x: Any,
        extras: dict[str, Any],
        *,
        wanted: Iterable[str] = (),
        buffers: Buffers | None = None,
        training: bool = True,
        fusions_version: int = 0,
    ) -> tuple[Any, dict[str, Any]]:
        """Run x through the operations.

        extras: every name in `self.consumed`. wanted: the names of the extra outputs to return.
        Returns (y, {name: extra output}). Raises TypeError for an x that is no tensor, of complex numbers, or of
        integers where an operation computes in floating point.
        """
        x = as_input(x)
        if note_forward():
            with self.first_forwards.entered_again(training, self.recipe):
                return self._run(x, extras, wanted, buffers, training, fusions_version, None)
        forward = self.first_forwards.began(training)
        return self._run(x, extras, wanted, buffers, training, fusions_version, forward)

    def _run(
        self,
        x: Any,
        extras: dict[str, Any],
        wanted: Iterable[str],
        buffers: Buffers | None,
        training: bool,
        fusions_version: int,
        forward: ForwardWithGrad | None,
    ) -> tuple[Any, dict[str, Any]]:
        parameters = self.parameters()
        program = self._program(x, extras, parameters, training, fusions_version)
        call = Call(program, extras, tuple(wanted), buffers or {}, self, forward)
        if program.computed:
            call.hold_computed(parameters.present)
        # Inside a Function, torch.autocast would still change the products of the references.
        with (
            in_profile(program, self.operations),
            without_autocast(x.device),
            step_of(call, records=records_amaxes()) if program.keeps_state else _NOTHING,
        ):
            if not program.needs_grad:
                return call.at_border(call.forward(x)), call.produced
            call.input_names = [name for name in self.consumed if isinstance(extras[name], Tensor)]
            tensors = parameters.present + [extras[name] for name in call.input_names]
            function = _RetainingFunction if self.retain_graph else _ReleasingFunction
            y, *returned = function.apply(call, x, *tensors)
        return y, dict(zip(call.returned, returned, strict=True)) | call.produced


_NOTHING = nullcontext()
_NO_WEIGHTS: Mapping[int, Any] = {}


@contextmanager
def step_of(call: Call, *, records: bool) -> Iterator[None]:
    """Lets quantizers with a state record: for the end of the outermost autocast, or without one of this call."""
    if not records:
        around = current_updates()
        if around is not None:
            around.has_evaluated = True
        yield
        return
    own = None if current_updates() is not None else PendingUpdates()
    call.updates = own or current_updates()
    try:
        yield
    except BaseException:
        if own is not None:
            own.discard()
        raise
    if own is not None:
        own.apply()


def without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """In which torch.autocast is off for this device."""
    return torch.autocast(device.type, enabled=False) if _autocasts(device) else _NOTHING


def dtype_of_autocast(device: torch.device) -> torch.dtype | None:
    """The dtype of torch.autocast for this device; None where it is off."""
    return torch.get_autocast_dtype(device.type) if _autocasts(device) else None


def _autocasts(device: torch.device) -> bool:
    """Whether torch.autocast is on for this device; some devices (meta) it does not support."""
    return _can_autocast(device.type) and torch.is_autocast_enabled(device.type)


_can_autocast = cache(torch.amp.is_autocast_available)


class Call:
    """One call of a program: the values of the extra tensors while forward runs, the contexts it leaves behind."""

    def __init__(
        self,
        program: Program,
        extras: dict[str, Any],
        wanted: tuple[str, ...],
        buffers: Buffers,
        pipeline: Pipeline,
        forward: ForwardWithGrad | None,
    ) -> None:
        self.program = program
        self.operations = pipeline.operations
        self.parameters: Sequence[Tensor] = ()  # of all operations, where some are computed
        self.environment = dict(extras)
        self.wanted = wanted
        self.buffers = buffers
        self.given_buffers: list[CallersBuffer] = []
        self.states: list[OperationState] = []  # of each operation, what it leaves for backward
        self.kept: list[Tensor | None] = []  # the tensors of all of them
        self.produced: dict[str, Any] = {}
        self.returned: list[str] = []
        self.input_names: list[str] = []
        self.given: list[Tensor] = []  # x and the extra inputs, where an operation writes in place
        self.written: dict[str, Tensor] = {}  # those of them that were, and have a history
        self.updates: PendingUpdates | None = None
        self.repeats = False
        self.is_traced = False  # what is kept for backward becomes results of an operation of torch
        self.rows: list[int] = []  # that each step saw, where it is
        self.retains = pipeline.retain_graph
        self.labels = pipeline.labels
        self.first_forward = forward
        self.entries = open_entries()

    def context(self, index: int, updates: Any = None) -> OperationContext:
        """That of the operation at this index, over these updates."""
        context = self.program.context(index, self.operations[index])
        context.updates = updates
        if self.program.computed:
            context.hold_computed(self.program.computed, self.parameters)
        if index in self.buffers:
            context.buffers = dict(self.buffers[index])
        return context

    def hold_computed(self, parameters: Sequence[Tensor]) -> None:
        """Take these for the parameters of all operations, some of which are computed."""
        self.parameters = parameters
        if self.program.needs_grad:
            for index, operation in enumerate(self.operations):
                context = self.context(index)
                computed = {name: t for name, t in context.computed.items() if name in context.needs.params}
                try:
                    operation.check_computed(computed)
                except RuntimeError as error:
                    raise_located(self.labels, index, operation, error)

    def at_border(self, y: Any) -> Tensor:
        """What leaves the pipeline: a tensor, or a handle of the container that its last operation lets out."""
        if isinstance(y, Tensor) or not self.operations[-1].quantized_output:
            return at_tensor(y)
        return QuantizedHandle(y)

    def forward(self, x: Any) -> Any:
        x = at_container(x)
        self.repeats = not self.buffers and may_repeat(self.program.request.device, self.entries)
        if self.buffers:
            self.given_buffers = buffers_of(self.buffers, self.operations, self.labels)
            modules = {place_of(*named): named[1] for named in zip(self.labels, self.operations, strict=True)}
            check_before_forward(self.given_buffers, modules, x, self.environment)
        if self.program.read_after:
            self.given = [t for t in (x, *self.environment.values()) if isinstance(t, Tensor)]
        for wiring in self.program.forward:
            if not isinstance(x, Tensor):
                if not wiring.accepts_quantized:
                    x = x.dequantize()
                elif x.dtype != wiring.dtype:
                    x = with_dtype(x, wiring.dtype)
            elif x.dtype != wiring.dtype:
                x = x.to(wiring.dtype)
            if self.is_traced:
                self.rows.append(math.prod(x.shape[:-1]))
            try:
                x = self._run_step(wiring, x)
            except Exception as error:
                raise_located(self.labels, wiring.step.indices[0], wiring.step.of(self.operations), error)
        for name in self.wanted:
            if name not in self.environment:
                raise RuntimeError(
                    f"The extra output {name!r} is used outside of the fused operation that covers its producer, but "
                    "that did not return it. A fusion must return every extra output that is used outside of it."
                )
            self.produced[name] = self.environment[name]
        return x

    def _run_step(self, wiring: Wiring, x: Any) -> Any:
        if wiring.writes is not None:
            self._check_writable(wiring, wiring.writes, x)
        lent, lender = None, None if self.buffers else wiring.lends_output
        if lender is not None:
            lent = memory_for_output(self.operations, lender, x, self.environment, self.program.contexts)
        if not self.repeats or wiring.repeated is None or not wiring.repeated.alone:
            y, outputs = self._execute(wiring, x, self.updates, self.states, self.kept, lent)
        else:
            y, outputs = self._repeat(wiring.repeated, wiring, x, lent)
        for local, name, _ in wiring.outputs:
            if local in outputs:
                self.environment[name] = outputs[local]
            elif not wiring.step.fused:
                raise RuntimeError(f"It declares the extra output {local!r}, but its fuser_forward did not return it.")
        return y

    def _execute(
        self,
        wiring: Wiring,
        x: Any,
        updates: Any,
        states: list[OperationState],
        kept: list[Tensor | None],
        lent: Tensor | None,
        weights: Mapping[int, Any] = _NO_WEIGHTS,
    ) -> tuple[Any, Mapping[str, Any]]:
        """y and the extra outputs by name; what is left for backward goes to `states` and `kept`. lent: memory for y"""
        step = wiring.step
        contexts = [self.context(index, updates) for index in step.indices]
        for context in contexts if weights else ():
            context.prepared_weights = weights.get(context.index)
        if lent is not None:
            contexts[-1].buffers = {"output": lent}
        extras = {local: self._extra(name, kind, x) for local, name, kind in wiring.inputs} if wiring.inputs else {}
        result = step.of(self.operations).fuser_forward(contexts if step.fused else contexts[0], x, extras)
        if type(result) is not tuple or len(result) != 2:
            raise TypeError(f"fuser_forward returned a {type(result).__name__}. Return (y, {{name: extra output}}).")
        with offsets_alone() if self.is_traced else _NOTHING:
            states += [left_by(context, kept) for context in contexts]
        return result

    def _repeat(self, repeated: RepeatedStep, wiring: Wiring, x: Any, lent: Any) -> tuple[Any, Mapping[str, Any]]:
        """The same, done again if it can be."""
        inside = [index for index in wiring.step.indices if self.operations[index].weights_scope is not None]
        weights = {index: self.operations[index].prepare_weights(self.context(index, self.updates)) for index in inside}

        def execute(updates: Any) -> StepResult:
            before = dict(self.environment)
            states: list[OperationState] = []
            kept: list[Tensor | None] = []
            y, outputs = self._execute(wiring, x, updates, states, kept, lent, weights)
            for index, state in zip(wiring.step.indices, states, strict=True):
                state.forget_prototype(self.program.contexts[index])
            divided = tuple([name for name, value in before.items() if value is not self.environment[name]])
            splits = tuple([self.environment[name] for name in divided])
            return StepResult(y, tuple(outputs), tuple(outputs.values()), tuple(states), tuple(kept), divided, splits)

        values = [self._extra(name, kind, x, on_device=True) for _, name, kind in wiring.inputs]
        prepared = tuple([copies and copies.tensors() for copies in weights.values()])
        result = repeated.run(self.operations, tuple(weights), (x, *values, prepared, lent), self.updates, execute)
        self.environment.update(zip(result.divided, result.splits, strict=True))
        self.states += result.states
        self.kept += result.kept
        return result.y, dict(zip(result.names, result.outputs, strict=True))

    def _check_writable(self, wiring: Wiring, name: str, x: Any) -> None:
        target = self.environment[name]
        kept = kept_by_each(self.states, self.kept)
        if wiring.step.fused:  # what is added is made inside, of x, which the first operation may keep
            wants = (self.program.contexts[index]["needs"].params for index in wiring.step.indices)
            kept = [*kept, [x] if isinstance(x, Tensor) and any(wants) else []]
            x = None
        used = (*self.program.read_after[wiring.step.indices[0]], *self.wanted)
        check_writable(
            name, target, x, needs_grad=wiring.needs_grad, given=self.given, operations=self.operations,
            kept=kept, buffers=self.given_buffers, labels=self.labels,
            read_later={n: self.environment[n] for n in used if n in self.environment},
        )  # fmt: skip
        if wiring.needs_grad and any(target is tensor for tensor in self.given):
            # Under its last name: gradients of what it holds at the end belong to the last write.
            self.written = {n: t for n, t in self.written.items() if t is not target} | {name: target}

    def _extra(self, name: str, kind: type, x: Any, *, on_device: bool = False) -> Any:
        """The extra input of that name; split sizes as one `Splits`, shared by all operations that consume them.

        on_device: sizes on x's device as they are, of which a step that is repeated makes them
        """
        if name not in self.environment:
            raise RuntimeError(f"The extra tensor {name!r} was not returned by the fused operation that makes it.")
        value = self.environment[name]
        if kind is Splits and not x.shape:
            raise ValueError("x has no dimensions, but split_sizes divide its rows. Give [rows, features].")
        if kind is Splits and not (isinstance(value, Splits) and value.rows == x.shape[0]):
            if on_device and isinstance(value, Tensor) and value.device == x.device:
                return value
            value = self.environment[name] = Splits.make(value, rows=x.shape[0], device=x.device)
        if value is None:
            raise TypeError(f"The extra input {name!r} is None, which is no tensor. Give one.")
        return value


class _RetainingFunction(torch.autograd.Function):
    """The pipeline as one autograd node."""

    @staticmethod
    def forward(fctx: Any, call: Call, x: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        fctx.set_materialize_grads(False)
        program = call.program
        y = call.at_border(call.forward(x))
        written = call.written
        # A buffer of the caller's must not get a history, nor one tensor object two: they get objects of their own.
        if not _is_among(y, written.values()):
            y = y.detach() if call.buffers else _as_output(y, x, call.environment.values())
        outputs = [y]
        returned = [name for name in call.wanted if isinstance(call.produced[name], Tensor)]
        for name in returned:
            value = call.produced.pop(name)
            if not _is_among(value, written.values()) or _is_among(value, outputs):
                value = _as_extra_output(value, x, outputs, detached=bool(call.buffers))
            outputs.append(value)
        if written:  # autograd needs them as outputs: whatever uses them from now on belongs to this node
            fctx.mark_dirty(*written.values())
            for name, value in written.items():
                if not _is_among(value, outputs):
                    returned.append(name)
                    outputs.append(value)
        if returned:
            call.returned = returned
            fctx.mark_non_differentiable(
                *[t for n, t in zip(returned, outputs[1:], strict=True) if n not in program.differentiable]
            )

        parameters: Sequence[Tensor] = tensors[: program.num_parameters]
        states = [state_of(parameter) for parameter in parameters]
        computed = sorted(program.computed)
        fctx.save_for_backward(*call.kept, *[parameters[slot] for slot in computed])
        if computed:
            parameters, states = without(parameters, computed), without(states, computed)
        fctx.record = Record(
            program, call.operations, call.labels, call.states, parameters, states,
            tuple(call.input_names), tuple(returned), call.entries, call.first_forward,
            call.given_buffers,
        )  # fmt: skip
        fctx.has_run = False
        fctx.retains = call.retains
        return tuple(outputs)

    @staticmethod
    def backward(fctx: Any, dy: Tensor | None, *d_returned: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(DOUBLE_BACKWARD)
        record, saved = fctx.record, _take_saved(fctx)
        if record.program.computed:
            record = with_computed(record, saved)
        if record.first_forward is not None:
            record.first_forward.has_run = True
        buffers = record.buffers
        if buffers:
            check_before_backward(buffers, record.parameters, saved, (dy, *d_returned))
        program = record.program
        with in_profile(program, record.operations, "_backward"), without_autocast(program.request.device):
            # Gradients that go to autograd are dropped there if they are not needed; others would be accumulated.
            unwanted: frozenset[int] = frozenset()
            if any(map(_wgrad_is_external, record.operations)):
                unwanted = unwanted_parameters(fctx.next_functions[1 : 1 + len(record.parameters)])
            gradients = run_backward(record, saved, dy, d_returned, unwanted)
        if buffers:
            of_extras, edges = 1 + len(record.parameters), fctx.next_functions
            note_handed_on(buffers, [gradients[0], *gradients[of_extras:]], [edges[0], *edges[of_extras:]])
        return None, *gradients


def _as_output(y: Tensor, x: Tensor, others: Iterable[Any]) -> Tensor:
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


class _ReleasingFunction(_RetainingFunction):
    """The same node; what an operation saved is freed as soon as its backward has run."""

    clear_saved_tensors_on_access = True


def _take_saved(fctx: Any) -> list[Tensor | None]:
    released = "In a second backward: what the operations saved was freed by the first one. "
    if fctx.has_run and not fctx.retains:
        raise RuntimeError(released + "Build the pipeline with Sequential(..., retain_graph=True) to run it again.")
    try:
        saved = fctx.saved_tensors
    except RuntimeError as error:
        if not fctx.has_run:
            raise
        raise RuntimeError(released + "Give the first one retain_graph=True.") from error
    fctx.has_run = True
    return list(saved)
