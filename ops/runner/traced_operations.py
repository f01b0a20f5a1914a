"""Pipelines as operations of torch, `fuser::<name>` and `fuser::<name>_backward`, for whoever traces what torch does.

    fuser::<name>(Tensor x, Tensor[] others, str plan, str needs="") -> Tensor[]
    fuser::<name>_backward(Tensor[] saved, Tensor?[] gradients, str plan, str needs, SymInt[] sizes) -> Tensor[]

name is that of what a plan runs, such as `grouped_mlp`; the plan itself is found by its key. Both are functional but
for the random numbers they draw and the states of operations, which no other operation reads.

`needs` is empty where autograd still has to see the operation: then y and the extra outputs come out, and have a
gradient. Below autograd it says which tensors need one, and what is kept for backward comes out too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
from torch.utils.flop_counter import _FlopCounterMode, register_flop_formula

from ops.runner.backward import DOUBLE_BACKWARD
from ops.runner.not_traced import not_traced
from ops.runner.traced_plan import TracedPlan
from ops.runner.transforms import (
    is_transformed,
    refuse_batches,
    refuse_gradients,
    refuse_gradients_within,
    refuse_tangents,
    within_dual_level,
)
from recipes.triton.replay import is_eager

_library = torch.library.Library("fuser", "FRAGMENT")
_plans: WeakValueDictionary[str, TracedPlan] = WeakValueDictionary()
_exported: set[TracedPlan] = set()
_operators: dict[str, Operators] = {}


class Operators(NamedTuple):
    """The two operations of one name."""

    forward: Any
    backward: Any


def register(name: str, plan: TracedPlan, *, outlives_model: bool) -> None:
    """Let the operations `fuser::<name>` find the plan: as long as somebody holds it, or for good."""
    if name not in _operators:
        _operators[name] = _define(name)
    _plans[plan.key] = plan
    if outlives_model:
        plan.keep()
        _exported.add(plan)


def call(name: str, x: Tensor, others: Sequence[Tensor], key: str) -> Sequence[Tensor]:
    """y and the extra outputs, of the operation `fuser::<name>`."""
    if not (torch.compiler.is_dynamo_compiling() or torch.compiler.is_exporting()) and is_transformed():
        # torch.func differentiates a Function by itself, but not within an operation of torch.
        return _differentiable(_operators[name], (x, *others), key)
    return getattr(torch.ops.fuser, name).default(x, others, key)


def _define(name: str) -> Operators:
    # Drawn numbers and states: two calls are never one, and none is left out.
    tags = (torch.Tag.nondeterministic_seeded, torch.Tag.pt2_compliant_tag)
    backward = f"{name}_backward"
    _library.define(f'{name}(Tensor x, Tensor[] others, str plan, str needs="") -> Tensor[]', tags=tags)
    _library.define(
        f"{backward}(Tensor[] saved, Tensor?[] gradients, str plan, str needs, SymInt[] sizes) -> Tensor[]", tags=tags
    )
    for of, run in ((name, _forward), (backward, _backward)):
        _library.impl(of, run, "CompositeExplicitAutograd")
        torch.library.register_fake(f"fuser::{of}", run, lib=_library)
        _library.impl(of, refuse_batches, "FuncTorchBatched")
    operators = Operators(*[getattr(torch.ops.fuser, of).default for of in (name, backward)])

    def differentiable(x: Tensor, others: Sequence[Tensor], plan: str, needs: str = "") -> Sequence[Tensor]:
        if within_dual_level():
            refuse_tangents((x, *others))
        if needs:
            with torch._C._AutoDispatchBelowAutograd():
                if type(x) is Tensor and is_eager():  # what the call below does, without torch's dispatch
                    return _forward(x, others, plan, needs)
                return operators.forward(x, others, plan, needs)
        refuse_gradients_within()
        return _differentiable(operators, (x, *others), plan)

    _library.impl(name, differentiable, "Autograd")
    _count_flops(operators)
    return operators


def _count_flops(operators: Operators) -> None:
    def of_forward(x: Tensor, others: Sequence[Tensor], plan: str, needs: str = "", *, out_val: Any) -> int:
        found, tensors = plan_of(plan), (x, *others)
        return found.run(needs or _needs(tensors)).flops[tuple(found.sizes(tensors))][0]

    def of_backward(saved: Any, gradients: Any, plan: str, needs: str, sizes: Sequence[int], *, out_val: Any) -> int:
        return plan_of(plan).run(needs).flops[tuple(sizes)][1]

    formulas: tuple[Any, ...] = (of_forward, of_backward)
    for operator, formula in zip(operators, formulas, strict=True):
        register_flop_formula(operator.overloadpacket, get_raw=True)(formula)
        for mode in _get_current_dispatch_mode_stack():  # a counter copies what is registered when it is made
            if isinstance(mode, _FlopCounterMode):
                mode.counter.flop_registry[operator.overloadpacket] = formula


def plan_of(key: str) -> TracedPlan:
    """The plan of this key. Raises RuntimeError if there is none."""
    plan = _plans.get(key)
    if plan is None:
        raise RuntimeError(
            f"There is no {key}: its model is gone, has been changed since, or was compiled or exported in another "
            "process. Keep the model as long as what was compiled of it is in use, and compile or export it again."
        )
    return plan


def _forward(x: Tensor, others: Sequence[Tensor], plan: str, needs: str = "") -> list[Tensor]:
    found, tensors = plan_of(plan), (x, *others)
    if needs:
        return found.forward(tensors, needs)
    needs = _needs(tensors)
    return found.forward(tensors, needs)[: found.num_results]


def _backward(
    saved: Sequence[Tensor], gradients: Sequence[Tensor | None], plan: str, needs: str, sizes: Sequence[int]
) -> list[Tensor]:
    return plan_of(plan).backward(saved, gradients, needs, sizes)


def _needs(tensors: Sequence[Tensor]) -> str:
    enabled = torch.is_grad_enabled()
    return ("g" if enabled else "-") + "".join("1" if enabled and t.requires_grad else "0" for t in tensors)


@not_traced("It runs eagerly.")
def _differentiable(operators: Operators, tensors: Sequence[Tensor], key: str) -> Sequence[Tensor]:
    plan = plan_of(key)
    needs = _needs(tensors)
    if "1" in needs:
        return _Function.apply(operators, plan, needs, *plan.laid_out(tensors))[: plan.num_results]
    with torch._C._AutoDispatchBelowAutograd():
        return operators.forward(tensors[0], tensors[1:], key, needs)[: plan.num_results]


class _Function(torch.autograd.Function):
    """The two operations as a node of autograd. What is kept for backward comes out too, so that it is seen."""

    @staticmethod
    def forward(operators: Operators, plan: TracedPlan, needs: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        with torch._C._AutoDispatchBelowAutograd():
            return tuple(operators.forward(tensors[0], tensors[1:], plan.key, needs))

    @staticmethod
    def setup_context(fctx: Any, inputs: Any, results: Any) -> None:
        operators, plan, needs, *tensors = inputs
        fctx.set_materialize_grads(False)
        run = plan.run(needs)
        everything = (*tensors, *results)
        fctx.save_for_backward(*[everything[at] for at in run.saved])
        fctx.call = operators, plan, run, plan.sizes(tensors)
        # What is kept for backward is not marked: by it autograd sees that backward depends on what went in (`_Once`).
        carries = zip(results, run.differentiable, strict=False)
        fctx.mark_non_differentiable(*[t for t, differs in carries if not differs])

    @staticmethod
    @not_traced("It runs eagerly, as its forward did.")
    def backward(fctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        is_transformed()  # or raise: jacrev has no other transform in forward
        refuse_gradients(gradients)
        operators, plan, run, sizes = fctx.call
        saved = fctx.saved_tensors
        given = [d if c else None for d, c in zip(gradients, run.differentiable, strict=False)]
        found = operators.backward(list(saved), given, plan.key, run.needs, sizes)
        if torch.is_grad_enabled():
            depends_on = [tensor for tensor in (*saved, *given) if tensor is not None]
            found = _Once.apply(len(found), *found, *depends_on)
        gradient = iter(found)
        return None, None, None, *[next(gradient) if want else None for want in run.wanted]


class _Once(torch.autograd.Function):
    """The first `count` of the tensors, which depend on all of them, but are not differentiated."""

    @staticmethod
    def forward(count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple(tensor.view_as(tensor) for tensor in tensors[:count])

    @staticmethod
    def setup_context(fctx: Any, inputs: Any, results: Any) -> None:
        pass

    @staticmethod
    def backward(fctx: Any, *gradients: Tensor | None) -> Any:
        raise RuntimeError(DOUBLE_BACKWARD)
