"""Neighbouring element-wise operations as one kernel forward and one backward.

    x -> f_0 -> f_1 -> ... -> f_{n-1} -> y

Joint: what is kept for backward is x and the operands that are needed to compute again what stands between; every value
there is rounded as the operations by themselves would store it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from ops.elementwise import ElementwiseOperation, is_idle
from ops.kernels.elementwise import Step, delementwise, elementwise, why_no_chain
from ops.operation import BackwardOfFused, BasicOperation, FusedOperation, OperationContext, several
from recipes.request import PlanRequest


class Operands(NamedTuple):
    """One a step; None for parameters, and where backward needs none."""

    members: tuple[Tensor | None, ...]

    def tensors(self) -> Sequence[Tensor | None]:
        return self.members

    def rebuild(self, tensors: Sequence[Tensor | None]) -> Operands:
        return Operands(tuple(tensors))


class ElementwiseChain(FusedOperation):
    """Two or more `ElementwiseOperation`s, at most one of them gated, composed from their own steps."""

    pattern = (several(ElementwiseOperation, at_least=2),)
    passes = "joint"

    class Saved(NamedTuple):
        x: Tensor | None  # None if all steps are linear
        operands: Operands

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        if request.device.type != "cuda":
            return f"The element-wise kernel is Triton's; on {request.device.type} torch runs each operation by itself."
        if request.dtype == torch.float64:
            return "There is no element-wise kernel for float64, which torch computes operation by operation."
        return why_no_chain([operation.step() for operation in _elementwise(operations)])

    def kernel(self, request: PlanRequest) -> str:
        return f"{len(self.operations)} element-wise steps in one kernel (Triton)"

    def fuser_forward(
        self, ctxs: Sequence[OperationContext], x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, dict[str, Any]]:
        steps, operands = [], []
        shape = x.shape
        for operation, ctx in zip(_elementwise(self.operations), ctxs, strict=True):
            step, operand = operation.step(), operation.operand(ctx, x, extras)
            operation.check(shape, operand)
            if step.gated:
                shape = torch.Size((*shape[:-1], shape[-1] // 2))
            steps.append(step)
            operands.append(operand)
        active = [i for i, step in enumerate(steps) if not is_idle(step, operands[i])]
        if any(ctx.needs_grad for ctx in ctxs):
            ctxs[0].saved = self._kept(steps, operands, x)
        if not active:
            return x, {}
        dtypes = [ctxs[i].dtype for i in active]
        return elementwise(x, [steps[i] for i in active], [operands[i] for i in active], dtypes), {}

    def _kept(self, steps: Sequence[Step], operands: Sequence[Tensor | None], x: Tensor) -> Saved:
        last = max((i for i, step in enumerate(steps) if not step.linear), default=-1)
        kept = []
        for i, operation in enumerate(_elementwise(self.operations)):
            is_parameter = operation.operand_name and operation.operand_name not in operation.extra_inputs
            again = i < last and not is_parameter  # to compute the input of a later step again
            kept.append(operands[i] if again else operation.kept_operand(steps[i], operands[i]))
        return self.Saved(x if last >= 0 else None, Operands(tuple(kept)))

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfFused:
        saved: ElementwiseChain.Saved = ctxs[0].saved
        operations = _elementwise(self.operations)
        steps = [operation.step() for operation in operations]
        last = max((i for i, step in enumerate(steps) if not step.linear), default=-1)
        operands = [
            ctxs[i].param(operation.operand_name)
            if operation.operand_name in ctxs[i].parameter_slots and i <= last
            else saved.operands.members[i]
            for i, operation in enumerate(operations)
        ]
        active = [i for i, step in enumerate(steps) if not is_idle(step, operands[i])]
        d_parameters: list[dict[str, Tensor | None]] = [{} for _ in operations]
        d_extras: dict[str, Tensor | None] = {}
        if not active:
            return dy, d_parameters, d_extras
        found = delementwise(
            dy, saved.x, [steps[i] for i in active], [operands[i] for i in active], [ctxs[i].dtype for i in active],
            need_dx=ctxs[0].needs.input, need_operands=[operations[i].needs_operand(ctxs[i]) for i in active],
        )  # fmt: skip
        for i, gradient in zip(active, found.operands, strict=True):
            operation, name = operations[i], operations[i].operand_name
            if gradient is None or not operation.needs_operand(ctxs[i]):
                continue
            if name in operation.extra_inputs:
                before = d_extras.get(name)
                d_extras[name] = gradient if before is None else gradient + before
            else:
                d_parameters[i][name] = gradient
        return found.dx, d_parameters, d_extras


def _elementwise(operations: Sequence[BasicOperation]) -> tuple[ElementwiseOperation, ...]:
    return cast("tuple[ElementwiseOperation, ...]", tuple(operations))
