"""What a plan makes of a run of operations for one request, worked out before anything runs.

A planner answers a request with a `Plan`: which steps run forward and backward, some of them fused. A `Program` adds
what does not change from call to call: which gradients each operation computes, in which dtype it runs, and by which
names its extra tensors go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.products.paths import choose_path
from ops.runner.context import OperationContext, Receiver
from ops.runner.data_parallel import LastWrapper
from ops.runner.parameters import computed_slots
from ops.runner.repeat import RepeatedStep, states, why_not_repeated
from recipes.recipe import Role, check_batch_invariant, check_parts_by_value
from recipes.request import Needs, PlanRequest
from recipes.tensors.gathered_rows import GatheredRows


class PlannedOperation(NamedTuple):
    """One thing to execute: a basic operation, or a fused one that stands for several.

    `indices` are the positions, in the pipeline, of the basic operations that it stands for.
    """

    operation: Any
    indices: tuple[int, ...]
    fused: bool

    def of(self, operations: Sequence[Any]) -> Any:
        """What is executed, where a program holds no basic operation: that of the pipeline."""
        return self.operation if self.fused else operations[self.indices[0]]


class Refusal(NamedTuple):
    """Why a fusion does not stand for the operations at these positions, though its pattern fits."""

    fusion: type
    indices: tuple[int, ...]
    reason: str


class Plan(NamedTuple):
    """What a planner answers: the steps of both passes, and every fusion that was refused."""

    forward: tuple[PlannedOperation, ...]
    backward: tuple[PlannedOperation, ...]
    refusals: tuple[Refusal, ...] = ()


Planner = Callable[[Sequence[Any], PlanRequest], Plan]


def plan_unfused(operations: Sequence[Any], request: PlanRequest) -> Plan:
    """Every operation by itself."""
    steps = tuple(PlannedOperation(operation, (index,), False) for index, operation in enumerate(operations))
    return Plan(steps, steps)


def why_not_batch_invariant(operations: Sequence[Any], request: PlanRequest) -> str | None:
    """Why these operations cannot be, although the recipe is to be batch invariant, as a sentence, or None."""
    if not request.recipe.batch_invariant:
        return None
    if request.device.type == "cuda" and request.dtype == torch.float64:
        return "float64 has no grouped kernel on CUDA, and the library's sums depend on the number of rows."
    reason = request.recipe.why_not_batch_invariant()
    if reason is not None:
        return reason
    for operation in operations:
        reason = operation.why_not_batch_invariant(request)
        if reason is not None:
            return f"{type(operation).__name__}: {reason}"
    return None


class HandedOn(NamedTuple):
    """What an operation hands on to its neighbours.

    agreed: what its `hand_on` gave; receiver: the operation behind for which this is
    rows: where y is handed on as `GatheredRows`, what the operation behind does with them, in words
    rows_back: the same of dx and the operation before
    """

    agreed: Any
    receiver: Any
    rows: str | None
    rows_back: str | None


def handed_on_by(operations: Sequence[Any], plan: Plan, index: int, request: PlanRequest) -> HandedOn:
    """By the operation at `index`. A receiver takes containers: the step of forward that begins with it does."""
    behind = next((step for step in plan.forward if step.indices[0] == index + 1), None)
    before = next((step for step in plan.backward if step.indices[-1] == index - 1), None)
    receiver = None if behind is None or not behind.operation.accepts_quantized else operations[index + 1]
    return HandedOn(
        operations[index].hand_on(receiver, request), receiver,
        _rows_for(operations, plan.forward, index, behind, "hands_on_rows", Role.INPUT, request),
        _rows_for(operations, plan.backward, index, before, "hands_back_rows", Role.GRAD_OUTPUT, request),
    )  # fmt: skip


def _rows_for(
    operations: Sequence[Any],
    steps: Sequence[PlannedOperation],
    index: int,
    neighbour: PlannedOperation | None,
    attribute: str,
    role: Role,
    request: PlanRequest,
) -> str | None:
    """`HandedOn.rows`. All have to expect it: a fusion around the operation does not, nor do subclasses that compute
    with what they get."""
    if neighbour is None or any(step.fused and index in step.indices for step in steps):
        return None
    operation, other = operations[index], operations[index + (1 if role is Role.INPUT else -1)]
    takes = states(type(neighbour.operation), "accepts_gathered") and states(type(other), "accepts_gathered")
    if not takes or not states(type(operation), attribute) or not getattr(operation, attribute):
        return None
    words: str | None = other.gathers(role, request)
    return words


class Wiring(NamedTuple):
    """A step and the names of its extra tensors: (the operation's own name, the pipeline's name, the kind)."""

    step: PlannedOperation
    inputs: tuple[tuple[str, str, type], ...]
    outputs: tuple[tuple[str, str, type], ...]
    input_names: tuple[str, ...]  # by which gradients of extra inputs may be returned
    dtype: torch.dtype  # x arrives in it, in forward
    upstream_dtype: torch.dtype  # dx leaves in it, in backward
    needs_grad: bool  # whether backward has anything to do here
    parameters: tuple[tuple[int, str, int], ...]  # of its operations: position of that, name, slot
    quantizes: tuple[int, ...]  # the positions of those whose weights the recipe quantizes
    accepts_quantized: bool
    accepts_gathered: bool
    writes: str | None  # the pipeline's name of the extra input that forward writes into
    reuses_gradients: bool  # backward reads which gradients of extra outputs it may write into
    repeated: RepeatedStep | None  # where the step may be repeated as a whole
    lends_output: int | None  # the position of the operation behind it that may have memory for y
    lends_grad_input: int | None  # that of the operation before it that may have memory for dx

    def takes(self, x: Any) -> bool:
        """Whether it takes this x, or dy, which is no tensor, as it is."""
        return self.accepts_gathered if isinstance(x, GatheredRows) else self.accepts_quantized


class Program:
    """A plan made ready to run for one request.

    It holds fused operations, but no basic ones: a pipeline that an operation keeps of itself would keep it alive. Nor
    does it hold the parameters, of which it reads the dtypes.
    """

    def __init__(
        self,
        operations: Sequence[Any],
        plan: Plan,
        request: PlanRequest,
        input_dtype: torch.dtype,
        autocast_dtype: torch.dtype | None,
        parameters: Sequence[Tensor],
    ) -> None:
        check_batch_invariant(request.recipe, why_not_batch_invariant(operations, request))
        self.request = request
        self.input_dtype = input_dtype
        self.path = choose_path(request)
        quantizers = [request.recipe.quantizer(role) for role in Role]
        for value in (request.recipe, *quantizers):  # plans and quantized weights are found by them
            check_parts_by_value(value)
        self.keeps_state = any(quantizer is not None and quantizer.keeps_state for quantizer in quantizers)
        flags = iter(request.needs[1])
        wanted_extras = request.needs[2]

        upstream = request.needs[0]
        differentiable: set[str] = set(wanted_extras)
        self.contexts: list[dict[str, Any]] = []
        slot = 0
        dtype = input_dtype
        self.computed = computed_slots(operations, parameters)  # saved by autograd
        for index, operation in enumerate(operations):
            names = operation.parameter_names()
            own = [parameter.dtype for parameter in parameters[slot : slot + len(names)]]
            dtype = next((each for each in own if each.is_floating_point), dtype)  # others are of indices
            if autocast_dtype is not None and dtype != torch.float64:  # which torch.autocast leaves alone too
                dtype = autocast_dtype
            needs = Needs(
                upstream,
                frozenset(name for name in names if next(flags)),
                frozenset(
                    local
                    for local, kind in operation.extra_inputs.items()
                    if kind is Tensor and operation.extra_name(local) in differentiable
                ),
            )
            needs_grad = bool(needs.input or needs.params or needs.extras)
            if needs_grad:
                upstream = True
                differentiable |= {
                    operation.extra_name(local) for local, kind in operation.extra_outputs.items() if kind is Tensor
                }
                if operation.in_place_input is not None:
                    differentiable.add(operation.extra_name(operation.in_place_input))
            self.contexts.append(
                {
                    "index": index,
                    "recipe": request.recipe,
                    "dtype": dtype,
                    "needs": needs,
                    "needs_grad": needs_grad,
                    "path": self.path,
                    "buffers": {},
                    "parameter_slots": dict(zip(names, range(slot, slot + len(names)), strict=True)),
                }
            )
            slot += len(names)
        for index in range(len(operations)):
            handed_on = handed_on_by(operations, plan, index, request)
            if handed_on.agreed is not None:
                self.contexts[index]["handed_on"] = handed_on.agreed
            if handed_on.agreed is not None and handed_on.receiver is not None:
                behind = self.contexts[index + 1]
                self.contexts[index]["receiver"] = Receiver(behind["dtype"], behind["needs"])
            if handed_on.rows is not None:
                self.contexts[index]["gathers"] = True
            if handed_on.rows_back is not None:
                self.contexts[index]["gathers_back"] = True
        self.num_parameters = slot
        self.operation_of_slot = [context["index"] for context in self.contexts for _ in context["parameter_slots"]]
        self.needs_grad = upstream
        # To which casts of x in training align the rows of each group.
        of_x = request.recipe.quantizer(Role.INPUT) if upstream else None
        columnwise = None if of_x is None else of_x.copy_spec(columnwise=True)
        self.alignment = None if columnwise is None else columnwise.alignment
        self.differentiable = frozenset(differentiable)  # the extra tensors that carry a gradient
        self.forward = tuple(self._wire(operations, step) for step in plan.forward)
        self.backward = tuple(self._wire(operations, step) for step in plan.backward)[::-1]
        # For each step that writes in place, by its position among the operations: the extra inputs of later steps.
        self.read_after = {
            wiring.step.indices[0]: frozenset(name for later in self.forward[at + 1 :] for _, name, _ in later.inputs)
            for at, wiring in enumerate(self.forward)
            if wiring.writes is not None
        }
        self.reuses_gradients = any(wiring.reuses_gradients for wiring in self.backward)
        self.wrapper = LastWrapper()  # for which it was checked

    def context(self, index: int, operation: Any) -> OperationContext:
        """A new context of the operation at this index."""
        context = OperationContext.__new__(OperationContext)
        context.__dict__ = self.contexts[index].copy()
        context.operation = operation
        return context

    def _wire(self, operations: Sequence[Any], step: PlannedOperation) -> Wiring:
        covered = [operations[index] for index in step.indices]
        contexts = [self.contexts[index] for index in step.indices]
        first = step.indices[0]
        inputs: dict[tuple[str, str, Any], None] = {}
        outputs: dict[tuple[str, str, Any], None] = {}
        inside: set[str] = set()  # what one covered operation makes for another behind it is the step's affair
        for o in covered:
            taken = {(n, o.extra_name(n), kind): None for n, kind in o.extra_inputs.items()}
            inputs |= {entry: None for entry in taken if entry[1] not in inside}
            outputs |= {(n, o.extra_name(n), kind): None for n, kind in o.extra_outputs.items()}
            inside = {name for _, name, _ in outputs}
        quantizes = self.request.recipe.quantizer(Role.WEIGHT) is not None
        written = covered[-1].in_place_input  # fused or not: a fusion takes no other operation that writes
        return Wiring(
            step if step.fused else step._replace(operation=None),
            tuple(inputs),
            tuple(outputs),
            tuple(local for o in covered for local in o.extra_inputs),
            contexts[0]["dtype"],
            self.contexts[first - 1]["dtype"] if first else self.input_dtype,
            any(context["needs_grad"] for context in contexts),
            tuple((c["index"], name, slot) for c in contexts for name, slot in c["parameter_slots"].items()),
            tuple(i for i in step.indices if quantizes and Role.WEIGHT in operations[i].quantized_roles),
            step.operation.accepts_quantized,
            states(type(step.operation), "accepts_gathered"),
            None if written is None else covered[-1].extra_name(written),
            not step.fused and step.operation.reuses_gradients,
            self._repeated(step, covered, written),
            _lender(operations, step.indices[-1], 1, "output"),
            _lender(operations, first, -1, "grad_input"),
        )

    @property
    def is_repeated(self) -> bool:
        """Whether every step may be repeated, and nothing is to be recorded beside them."""
        return not self.keeps_state and all(w.repeated is not None for w in (*self.forward, *self.backward))

    def _repeated(self, step: PlannedOperation, covered: Sequence[Any], written: str | None) -> RepeatedStep | None:
        if self.request.device.type != "cuda" or self.path.name != "grouped" or written is not None:
            return None
        if why_not_repeated(step.operation, covered, self.request.recipe) is not None:
            return None
        dtypes = [self.contexts[index]["dtype"] for index in step.indices]
        alone = step.fused or all(operation.repeats_alone for operation in covered)
        return RepeatedStep(step.indices, self.request.recipe, torch.float32 in dtypes, alone)


def _lender(operations: Sequence[Any], index: int, towards: int, buffer: str) -> int | None:
    """The position of the neighbour that may have memory for what the operation at `index` writes into that buffer."""
    neighbour = index + towards
    if not 0 <= neighbour < len(operations) or buffer not in operations[index].buffer_names:
        return None
    return neighbour if operations[neighbour].lends_memory else None
