"""How a run of operations is executed: one autograd node, each operation in turn.

A call is one dictionary look-up, for the `Program` of this request, and then a loop over its steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from ops.context import OperationContext
from ops.program import Planner, Program, Wiring, plan_unfused
from ops.saved import flatten, unflatten
from recipes.autocast import current_recipe
from recipes.request import PlanRequest
from recipes.splits import Splits

Buffers = Mapping[int, Mapping[str, Tensor]]


class Pipeline:
    """A run of basic operations that is executed as one autograd node.

    operations:   the basic operations, in order
    planner:      chooses fused operations for a request; `plan_unfused` by default
    path:         "grouped" or "split" to force one of the two storage paths, else None
    retain_graph: keep what backward needs after the first backward
    labels:       where each operation stands, for messages; by default its position
    """

    def __init__(
        self,
        operations: Sequence[Any],
        *,
        planner: Planner = plan_unfused,
        path: str | None = None,
        retain_graph: bool = False,
        labels: Sequence[str] | None = None,
    ) -> None:
        self.operations = tuple(operations)
        self.labels = tuple(map(str, range(len(self.operations)))) if labels is None else tuple(labels)
        self.planner = planner
        self.path = path
        self.retain_graph = retain_graph
        self.programs: dict[Any, Program] = {}
        self.produced = [operation.extra_name(n) for operation in self.operations for n in operation.extra_outputs]
        self.consumed = self._consumed_from_outside()

    def _consumed_from_outside(self) -> tuple[str, ...]:
        seen: set[str] = set()
        names: dict[str, None] = {}
        for operation in self.operations:
            asked = [operation.extra_name(name) for name in operation.extra_inputs]
            names |= {name: None for name in asked if name not in seen}
            seen |= {operation.extra_name(n) for n in operation.extra_outputs}
        return tuple(names)

    def all_needs(self, requires_grad: bool) -> Any:
        """The needs of a request in which x requires grad or not, and the parameters as they do."""
        return requires_grad, tuple(p.requires_grad for p in self._parameters() if p is not None), ()

    def program(self, x: Tensor, extras: Mapping[str, Any], training: bool, fusions_version: int) -> Program:
        """The program for this call; made once for each distinct request."""
        return self._program(x, extras, self._parameters(), training, fusions_version)

    def _parameters(self) -> list[Any]:
        """The parameters as they are now, with None where one is registered as None."""
        parameters: list[Any] = []
        for operation in self.operations:
            if operation._modules:
                for _, module in operation.named_modules(remove_duplicate=False):
                    parameters += module._parameters.values()
            else:
                parameters += operation._parameters.values()
        return parameters

    def _program(
        self, x: Tensor, extras: Mapping[str, Any], parameters: list[Any], training: bool, fusions_version: int
    ) -> Program:
        device = x.device
        autocast_dtype = torch.get_autocast_dtype(device.type) if _autocasts(device) else None
        grad = torch.is_grad_enabled()
        needs = (
            grad and x.requires_grad,
            tuple([grad and p.requires_grad for p in parameters if p is not None]),
            tuple([n for n, v in extras.items() if grad and isinstance(v, Tensor) and v.requires_grad]),
        )
        dtypes = tuple([None if p is None else p.dtype for p in parameters])
        recipe = current_recipe()
        dtype = autocast_dtype or next((d for d in dtypes if d is not None), x.dtype)
        request = PlanRequest(recipe, device, dtype, needs, training, self.path or recipe.path, fusions_version)
        composite = tuple([op.parameter_names() for op in self.operations if op._modules])
        key = (request, x.dtype, autocast_dtype, dtypes, composite)
        program = self.programs.get(key)
        if program is None:
            self._check_parameters(x)
            plan = self.planner(self.operations, request)
            # plans made with fusions that are no longer registered are of no use
            self.programs = {k: p for k, p in self.programs.items() if p.request.fusions_version == fusions_version}
            program = self.programs[key] = Program(self.operations, plan, request, x.dtype, autocast_dtype)
        return program

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
        Returns (y, {name: extra output}).
        """
        parameters = self._parameters()
        program = self._program(x, extras, parameters, training, fusions_version)
        call = _Call(program, extras, tuple(wanted), buffers or {}, self.retain_graph, self.labels)
        # Inside a Function, torch.autocast would still change the products of the references.
        with torch.autocast(x.device.type, enabled=False) if _autocasts(x.device) else _NOTHING:
            if not program.needs_grad:
                return _border(call.forward(x)), call.produced
            call.input_names = [name for name in self.consumed if isinstance(extras[name], Tensor)]
            tensors = [p for p in parameters if p is not None] + [extras[name] for name in call.input_names]
            function = _RetainingFunction if self.retain_graph else _ReleasingFunction
            y, *returned = function.apply(call, x, *tensors)
        return y, dict(zip(call.returned_names, returned, strict=True)) | call.produced


_NOTHING = nullcontext()


def _autocasts(device: torch.device) -> bool:
    """Whether torch.autocast is on for this device; there are devices (meta) that it does not know."""
    return torch.amp.is_autocast_available(device.type) and torch.is_autocast_enabled(device.type)


class _Call:
    """One call of a program: the values of the extra tensors while forward runs, the contexts it leaves behind."""

    def __init__(
        self,
        program: Program,
        extras: dict[str, Any],
        wanted: tuple[str, ...],
        buffers: Buffers,
        retains: bool,
        labels: tuple[str, ...],
    ) -> None:
        self.program = program
        self.environment = dict(extras)
        self.wanted = wanted
        self.buffers = buffers
        self.contexts: list[OperationContext] = []
        self.produced: dict[str, Any] = {}
        self.returned_names: list[str] = []
        self.input_names: list[str] = []
        self.retains = retains
        self.labels = labels

    def forward(self, x: Any) -> Any:
        for prototype in self.program.contexts:
            context = OperationContext.__new__(OperationContext)
            context.__dict__ = prototype.copy()
            self.contexts.append(context)
        for index, named in self.buffers.items():
            self.contexts[index].buffers = dict(named)
        for wiring in self.program.forward:
            if not isinstance(x, Tensor):
                if not wiring.accepts_quantized:
                    x = x.dequantize()
            elif x.dtype != wiring.dtype:
                x = x.to(wiring.dtype)
            try:
                x = self._run_step(wiring, x)
            except Exception as error:
                _raise_located(self.labels, wiring.step.indices[0], wiring.step.operation, error)
        for name in self.wanted:
            if name not in self.environment:
                raise RuntimeError(
                    f"The extra output {name!r} is used outside of the fused operation that covers its producer, but "
                    "that did not return it. A fusion must return every extra output that is used outside of it."
                )
            self.produced[name] = self.environment[name]
        return x

    def _run_step(self, wiring: Wiring, x: Any) -> Any:
        step = wiring.step
        extras = {local: self._extra(name, kind, x) for local, name, kind in wiring.inputs}
        contexts = [self.contexts[i] for i in step.indices]
        result = step.operation.fuser_forward(contexts if step.fused else contexts[0], x, extras)
        if type(result) is not tuple or len(result) != 2:
            raise TypeError(f"fuser_forward returned a {type(result).__name__}. Return (y, {{name: extra output}}).")
        y, outputs = result
        for local, name, _ in wiring.outputs:
            if local in outputs:
                self.environment[name] = outputs[local]
            elif not step.fused:
                raise RuntimeError(f"It declares the extra output {local!r}, but its fuser_forward did not return it.")
        return y

    def _extra(self, name: str, kind: type, x: Any) -> Any:
        """The extra input of that name; split sizes as one `Splits` for all who ask for them."""
        if name not in self.environment:
            raise RuntimeError(f"The extra tensor {name!r} was not returned by the fused operation that makes it.")
        value = self.environment[name]
        if kind is Splits and not (isinstance(value, Splits) and value.rows == x.shape[0]):
            value = self.environment[name] = Splits.make(value, rows=x.shape[0], device=x.device)
        return value


def _raise_located(labels: Sequence[str], index: int, operation: Any, error: Exception) -> NoReturn:
    """Raise the same error with the operation and its place in front; one of another class gets it as a note."""
    where = f"In operation {labels[index]} ({type(operation).__name__})"
    if type(error) in (ValueError, TypeError, RuntimeError, NotImplementedError):
        raise type(error)(f"{where}: {error}") from error
    error.add_note(f"{where}.")
    raise error


def _border(x: Any) -> Tensor:
    """At a pipeline's border a quantized container is handed on as its dequantized tensor."""
    return x if isinstance(x, Tensor) else x.dequantize()


class _RetainingFunction(torch.autograd.Function):
    """The pipeline as one autograd node."""

    @staticmethod
    def forward(fctx: Any, call: _Call, x: Tensor, *tensors: Tensor) -> tuple[Any, ...]:
        fctx.set_materialize_grads(False)
        differentiable = call.program.differentiable
        y = _border(call.forward(x))
        # A buffer of the caller's must not get a history, nor one tensor object two: they get objects of their own.
        outputs = [y.detach() if call.buffers else _as_output(y, x, call.environment.values())]
        for name in call.wanted:
            value = call.produced[name]
            if isinstance(value, Tensor):
                outputs.append(value.detach() if any(value is other for other in outputs) else value)
                call.returned_names.append(name)
                del call.produced[name]
        constant = [t for n, t in zip(call.returned_names, outputs[1:], strict=True) if n not in differentiable]
        fctx.mark_non_differentiable(*constant)

        flat: list[Tensor | None] = []
        fctx.records = []
        for context, names in zip(call.contexts, call.program.parameter_names, strict=True):
            if names and context.needs_grad:
                context.record(names)
            values = context.__dict__
            try:
                spec = flatten(values.pop("saved", None), flat)
            except TypeError as error:
                _raise_located(call.labels, context.index, context.operation, error)
            fctx.records.append((values, spec))
        fctx.save_for_backward(*flat)
        fctx.program = call.program
        fctx.input_names = call.input_names
        fctx.returned_names = call.returned_names
        fctx.has_run = False
        fctx.retains = call.retains
        fctx.labels = call.labels
        return tuple(outputs)

    @staticmethod
    def backward(fctx: Any, dy: Tensor | None, *d_returned: Tensor | None) -> tuple[Any, ...]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Double backward (create_graph=True) through a pipeline is not supported: its backward is written by "
                "hand. Call backward without create_graph, or express that part with plain torch functions."
            )
        device = fctx.program.request.device
        with torch.autocast(device.type, enabled=False) if _autocasts(device) else _NOTHING:
            return _backward(fctx, dy, d_returned)


def _as_output(y: Tensor, x: Tensor, others: Iterable[Any]) -> Tensor:
    """y as autograd wants it of a Function, so that a module behind may change it in place, or is refused to.

    Not a view, which could not be changed; but a view, if another tensor that the caller may hold shares its memory.
    """
    if y is x:
        return y
    memory = y.untyped_storage().data_ptr()
    if any(isinstance(t, Tensor) and t.untyped_storage().data_ptr() == memory for t in (x, *others)):
        return y.view_as(y)
    return y.detach() if y._is_view() else y


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


def _backward(fctx: Any, dy: Tensor | None, d_returned: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
    program: Program = fctx.program
    flat = _take_saved(fctx)
    # Gradients of extra tensors by name, the contributions in the order of the operations that made them.
    d_extras: dict[str, list[Tensor]] = {
        name: [d] for name, d in zip(fctx.returned_names, d_returned, strict=True) if d is not None
    }
    d_parameters: dict[tuple[int, str], Tensor | None] = {}
    dx: Any = dy
    for wiring in program.backward:
        if not wiring.needs_grad:
            dx = None
            break
        step = wiring.step
        d_outputs = {local: _total(d_extras.pop(name)) for local, name, _ in wiring.outputs if name in d_extras}
        if dx is None and not d_outputs:
            continue
        if dx is not None and not isinstance(dx, Tensor) and not wiring.accepts_quantized:
            dx = dx.dequantize()
        contexts = []
        for index in step.indices:
            values, spec = fctx.records[index]
            context = OperationContext.__new__(OperationContext)
            context.__dict__ = values.copy()
            context.saved = unflatten(spec, flat)
            contexts.append(context)
        try:
            result = step.operation.fuser_backward(contexts if step.fused else contexts[0], dx, d_outputs)
            if type(result) is not tuple or len(result) != 3:
                raise TypeError(
                    f"fuser_backward returned a {type(result).__name__}. Return (dx, gradients of the parameters by "
                    "name, gradients of the extra inputs by name)."
                )
            dx, d_params, d_inputs = result
            if not step.fused:
                d_params = (d_params,)
            _check_names(program, wiring, d_params, d_inputs)
        except Exception as error:
            _raise_located(fctx.labels, step.indices[0], step.operation, error)
        for index, own in zip(step.indices, d_params, strict=True):
            for name, gradient in own.items():
                d_parameters[index, name] = gradient
        if d_inputs:
            for local, name, _ in wiring.inputs:
                d = d_inputs.get(local)
                if d is not None:
                    d_extras.setdefault(name, []).insert(0, d)
        if isinstance(dx, Tensor) and dx.dtype != wiring.upstream_dtype:
            dx = dx.to(wiring.upstream_dtype)
    if dx is not None:
        dx = _border(dx) if program.request.needs[0] else None
    return (
        None,
        dx,
        *_parameter_gradients(fctx, d_parameters),
        *[_total(d_extras[name]) if name in d_extras else None for name in fctx.input_names],
    )


def _check_names(
    program: Program, wiring: Wiring, d_params: Sequence[Mapping[str, Any]], d_inputs: Mapping[str, Any]
) -> None:
    """Raise if a gradient came under a name that does not exist; it would be lost."""
    for index, own in zip(wiring.step.indices, d_params, strict=True):
        _check_known(own, program.parameter_names[index], "parameter")
    _check_known(d_inputs, wiring.input_names, "extra input")


def _check_known(gradients: Mapping[str, Any], known: Sequence[str], what: str) -> None:
    for name, gradient in gradients.items():
        if name not in known and gradient is not None:
            raise RuntimeError(
                f"fuser_backward returned a gradient for the {what} {name!r}. There are: "
                f"{', '.join(map(repr, known)) or 'none'}."
            )


def _parameter_gradients(fctx: Any, gradients: dict[tuple[int, str], Tensor | None]) -> list[Tensor | None]:
    result: list[Tensor | None] = []
    for (values, _), names in zip(fctx.records, fctx.program.parameter_names, strict=True):
        wanted = values["needs"].params
        for name in names:
            gradient = gradients.get((values["index"], name)) if name in wanted else None
            if gradient is not None:
                dtype = values["recorded"][name][0].dtype
                gradient = gradient if gradient.dtype == dtype else gradient.to(dtype)
            result.append(gradient)
    return result


def _total(contributions: list[Tensor]) -> Tensor:
    total = contributions[0]
    for contribution in contributions[1:]:
        total = total + contribution
    return total
