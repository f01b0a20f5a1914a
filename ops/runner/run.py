"""How a run of operations is executed: as one node of autograd (`ops.runner.node`), each operation in turn.

A call is one dictionary look-up, for the `Program` of this request, and then a loop over its steps.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from ops.runner.backward import raise_located
from ops.runner.built_in import is_built_in
from ops.runner.callers_buffers import (
    CallersBuffer,
    buffers_of,
    check_before_forward,
    place_of,
)
from ops.runner.check_parameters import check_parameters
from ops.runner.context import IndexTensor, OperationContext, at_tensor
from ops.runner.data_parallel import leave_states, reduced_parameters
from ops.runner.in_place import check_writable
from ops.runner.input import (
    as_input,
    as_stored,
    check_extra_tensor,
    check_local,
    check_numbers,
)
from ops.runner.lent_memory import memory_for_output
from ops.runner.names import in_profile
from ops.runner.nested_backward import note_forward
from ops.runner.node import PipelineFunction
from ops.runner.output import check_extra_outputs, check_output
from ops.runner.parameters import computed_names, held_parameters, planned_dtype, property_names, requires_grad
from ops.runner.program import Planner, Program, Wiring, plan_unfused
from ops.runner.quantizer_state import state_names
from ops.runner.recent import Recent
from ops.runner.repeat import OperationState, RepeatedStep, StepResult, kept_by_each, left_by, may_repeat
from ops.runner.torch_autocast import dtype_of_autocast, without_autocast
from ops.runner.transforms import refuse_functionalize, refuse_tangents, within_dual_level
from recipes.checkpoint_frames import Frame
from recipes.first_forwards import FirstForwards, ForwardWithGrad
from recipes.pending import PendingUpdates
from recipes.recipe import Recipe
from recipes.request import PlanRequest
from recipes.stack import current_updates, open_entries, recipe_in_use, records_amaxes
from recipes.tensors.quantized_handle import Quantized, QuantizedHandle, at_container, with_dtype
from recipes.tensors.splits import Splits, offsets_alone

Buffers = Mapping[int, Mapping[str, Tensor]]

MOST_PROGRAMS = 64  # that a pipeline keeps: requests that never come again (a new lambda in each step) push others out

_NONE = type(None)
_requires_grad = attrgetter("requires_grad")
_dtype = attrgetter("dtype")


class Parameters(NamedTuple):
    """A pipeline's parameters as they are at a call. layout: which are registered as None, and what changes else."""

    present: list[Tensor]
    layout: tuple[Any, ...]


class Pipeline:
    """A run of basic operations that is executed as one autograd node.

    operations:  the basic operations, in order; the caller holds them
    planner:     chooses fused operations for a request; `plan_unfused` by default
    path:        "grouped" or "split" to force one of the two storage paths, else None
    labels:      where each operation stands, for messages; by default its position
    recipe:      the operations' own recipe; None: that of `autocast`
    first_forwards: those of the Sequential, which has other pipelines after a change
    """

    def __init__(
        self,
        operations: Sequence[Any],
        *,
        planner: Planner = plan_unfused,
        path: str | None = None,
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
        self.programs: dict[Any, Program] = {}
        self.first_forwards = first_forwards or FirstForwards()
        self.known: dict[Any, Any] = {}  # of `ops.runner.known_calls`
        self.last_known: dict[int, Any] = {}  # the last of them that was made, by how many numbers x had
        self.in_full: set[Any] = set()  # what calls go by that always run in full, see there
        self.traced: dict[Any, Any] = {}  # of `ops.runner.tracing`, by what they hold for
        self.recently_traced = Recent(MOST_PROGRAMS)
        self.traced_recipes: set[Recipe] = set()  # under which what was traced has run
        self.traced_recipes_of_frames: WeakKeyDictionary[Frame, set[Recipe]] = WeakKeyDictionary()  # of checkpoints
        # The dictionaries that own the parameters are kept, not the parameters: replacing one is seen at once.
        self.members = [(weakref.ref(o), o._parameters, o._modules, o._forward_pre_hooks) for o in self.operations]
        self.produced = [operation.extra_name(n) for operation in self.operations for n in operation.extra_outputs]
        consumers = self._consumers()
        self.consumed = tuple(consumers)
        self._kinds = tuple(
            (name, at, kind)
            for name, (at, kind) in consumers.items()
            if kind in (Tensor, IndexTensor) or (kind is not Splits and not is_built_in(type(self.operations[at])))
        )  # built-in operations say more of their own kinds

    @property
    def operations(self) -> tuple[Any, ...]:
        """The basic operations, which somebody else holds."""
        return tuple([ref() for ref in self._operations])

    def is_of(self, operation: Any) -> bool:
        """Whether this is the only operation, and its dictionaries are those that are held here. Those of a copy by
        `copy.__dict__ = operation.__dict__.copy()` are others, and so are those that were assigned."""
        reference, parameters, children, hooks = self.members[0]
        return (
            operation._parameters is parameters
            and operation._modules is children
            and operation._forward_pre_hooks is hooks
            and reference() is operation
        )

    def _consumers(self) -> dict[str, tuple[int, type]]:
        """The extra inputs that the caller gives: the first operation that consumes each, and as which kind."""
        seen: set[str] = set()
        found: dict[str, tuple[int, type]] = {}
        for index, operation in enumerate(self.operations):
            asked = {operation.extra_name(name): (index, kind) for name, kind in operation.extra_inputs.items()}
            found |= {name: taken for name, taken in asked.items() if name not in seen and name not in found}
            seen |= {operation.extra_name(n) for n in operation.extra_outputs}
        return found

    def all_needs(self, x_requires_grad: bool) -> Any:
        """The needs of a request in which x requires grad or not, and the parameters as they do."""
        named = [(operation, name) for operation in self.operations for name in operation.parameter_names()]
        return x_requires_grad, tuple([requires_grad(operation, name) for operation, name in named]), ()

    def needs_now(self, x_requires_grad: bool) -> Any:
        """Those of a call in the grad mode of now."""
        needs = self.all_needs(x_requires_grad)
        return needs if torch.is_grad_enabled() else (False, (False,) * len(needs[1]), ())

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
        # Of which fusions refuse some. The mode is the operation's own, which may differ from that of the Sequential.
        settings = tuple([(operation.settings, operation.training) for operation in self.operations])
        # All that the request is made of, and what the program adds.
        key = (
            recipe, x.device, needs, training, fusions_version, x.dtype, autocast_dtype, dtypes, parameters.layout,
            settings,
        )  # fmt: skip
        program = self.programs.get(key)
        if program is None:
            check_numbers(x.dtype, self.operations)
            check_parameters(self.operations, x)
            dtype = planned_dtype(dtypes, autocast_dtype, x.dtype)
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
        for operation, own, children, hooks in self.members:
            owner: Any = operation()
            missing = len(own) < len(owner._parameter_order)
            if children or hooks or missing or not property_names(owner).isdisjoint(own):  # some may be computed
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

    def _enter(self, wrapper: Any, program: Program, parameters: Sequence[Tensor]) -> None:
        """Run a program in the forward of this DistributedDataParallel, which is not that of last time."""
        leave_states(wrapper, state_names(program.request.recipe))
        reduced = reduced_parameters(wrapper)
        # In training gradients may be needed without being enabled: a reentrant checkpoint runs forward again later.
        for index, operation in enumerate(self.operations if program.needs_grad or program.request.training else ()):
            slots = program.contexts[index]["parameter_slots"].items()
            trained = {name: parameters[slot] for name, slot in slots if parameters[slot].requires_grad}
            try:
                operation.check_reduced(trained, reduced)
            except RuntimeError as error:
                raise_located(self.labels, index, operation, error)
        program.wrapper.entered(wrapper)

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
        Returns (y, {name: extra output}). Raises TypeError for an x that is no tensor, sparse, of complex numbers, or
        of integers where an operation computes in floating point, and for an extra tensor that is none, or sparse;
        ValueError for one on another device than x.
        """
        x = as_stored(as_input(x))
        check_local((("x", x), *extras.items()))
        for name, index, kind in self._kinds:
            try:
                check_extra_tensor(name, extras[name], x.device, kind)
            except (TypeError, ValueError) as error:
                raise_located(self.labels, index, self.operations[index], error)
            stored = as_stored(extras[name])
            if stored is not extras[name]:
                extras = {**extras, name: stored}
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
        if within_dual_level():
            refuse_tangents((x, *extras.values(), *parameters.present))
        program = self._program(x, extras, parameters, training, fusions_version)
        wrapper = program.wrapper.changed()
        if wrapper is not None:
            self._enter(wrapper, program, parameters.present)
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
            refuse_functionalize()
            y, *returned = PipelineFunction.apply(call, x, *tensors)
        return y, dict(zip(call.returned, returned, strict=True)) | call.produced


_NOTHING = nullcontext()
_NO_WEIGHTS: Mapping[int, Any] = {}


@contextmanager
def step_of(call: Any, *, records: bool) -> Iterator[None]:
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


class Call:
    """One call of a program: the values of the extra tensors while forward runs, the contexts it leaves behind.

    known, places: where `ops.runner.known_calls` makes it, what an earlier call has found, and see `RepeatedCall`
    """

    known = None
    places = None

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
                if not wiring.takes(x):
                    x = x.dequantize()
                elif isinstance(x, Quantized):
                    x = with_dtype(x, wiring.dtype)
            if x.dtype != wiring.dtype:
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
        check_output(result[0], self.program.contexts[step.indices[-1]]["dtype"])
        check_extra_outputs(result[1], wiring.outputs)
        first = len(states)
        with offsets_alone() if self.is_traced else _NOTHING:
            states += [left_by(context, kept) for context in contexts]
        states[first].shape = tuple(x.shape)
        if extras and wiring.needs_grad:
            shapes = {name: tuple(extras[local].shape) for local, name, kind in wiring.inputs if kind is Tensor}
            for state in states[first:]:
                state.extra_shapes = shapes
        return result

    def _repeat(self, repeated: RepeatedStep, wiring: Wiring, x: Any, lent: Any) -> tuple[Any, Mapping[str, Any]]:
        """The same, done again if it can be."""
        inside = [index for index in wiring.quantizes if self.operations[index].weights_scope is not None]
        weights = {index: self._prepared_weights(index) for index in inside}

        def execute(updates: Any) -> StepResult:
            before = dict(self.environment)
            states: list[OperationState] = []
            kept: list[Tensor | None] = []
            y, outputs = self._execute(wiring, x, updates, states, kept, lent, weights)
            for index, state in zip(wiring.step.indices, states, strict=True):
                state.forget_prototype(self.program.contexts[index])
            divided = tuple([name for name, value in before.items() if value is not self.environment[name]])
            return StepResult.of(y, outputs, states, kept, divided, [self.environment[name] for name in divided])

        values = [self._extra(name, kind, x, on_device=True) for _, name, kind in wiring.inputs]
        prepared = tuple([copies and copies.tensors() for copies in weights.values()])
        result = repeated.run(self.operations, tuple(weights), (x, *values, prepared, lent), self.updates, execute)
        for name, rebuild, tensors in zip(result.divided, result.rebuilds, result.splits, strict=True):
            self.environment[name] = rebuild(tensors)
        self.states += result.states
        self.kept += result.kept
        return result.y, dict(zip(result.names, result.outputs, strict=True))

    def _prepared_weights(self, index: int) -> Any:
        """Those of the operation at this index that its scope keeps quantized."""
        operation = self.operations[index]

        def make() -> Any:
            return operation.prepare_weights(self.context(index, self.updates))

        return operation.weights_scope.prepared(operation, (self.program, self.updates is not None), make)

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
            value = self.environment[name] = _splits_of(value, x, self.program.alignment)
        if value is None:
            raise TypeError(f"The extra input {name!r} is None, which is no tensor. Give one.")
        return value


def _splits_of(sizes: Any, x: Any, alignment: int | None) -> Splits:
    try:
        return Splits.make(sizes, rows=x.shape[0], device=x.device, alignment=alignment)
    except ValueError as error:
        if len(x.shape) == 2:
            raise
        raise ValueError(
            f"{error} x has shape {list(x.shape)}, and its rows are its first dimension. Give [rows, features]: "
            "flatten leading dimensions."
        ) from error
