"""Consecutive element-wise operations as one kernel in forward and one in backward.

    x -> f_0 -> f_1 -> ... -> f_{n-1} -> y

A `Quantize` of y after them, or of dx before them, runs in the same kernel if its quantizer needs no separate pass over
the tensor to find the scales (MXFP8, delayed scaling).

A joint fusion: it saves x and the operands for backward, and recomputes the intermediate values there. Each of these is
rounded to the dtype in which the unfused operations would store it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from ops.elementwise import ElementwiseOperation, is_noop
from ops.kernels.elementwise.chain import (
    Step,
    delementwise,
    elementwise,
    elementwise_cast,
    runs_triton,
    why_no_chain,
)
from ops.kernels.elementwise.chain_cast import cast_into, why_no_cast
from ops.quantize import Quantize
from ops.runner.operation import BackwardOfFused, BasicOperation, FusedOperation, OperationContext, optional, several
from recipes.recipe import Recipe, Role
from recipes.request import PlanRequest
from recipes.tensors.quantizer import Quantizer


class Operands(NamedTuple):
    """The saved operand of each step; None for parameters and for operands that backward does not need."""

    members: tuple[Tensor | None, ...]

    def tensors(self) -> Sequence[Tensor | None]:
        return self.members

    def rebuild(self, tensors: Sequence[Tensor | None]) -> Operands:
        return Operands(tuple(tensors))


class ElementwiseChain(FusedOperation):
    """Two or more `ElementwiseOperation`s, at most one of them gated, run as one kernel composed of their steps.

    A Quantize at either end counts towards the two.
    """

    pattern = (optional(Quantize), several(ElementwiseOperation), optional(Quantize))
    passes = "joint"
    fewest = 2

    repeatable = True

    class Saved(NamedTuple):
        x: Tensor | None  # None if all steps are linear
        operands: Operands

    def __init__(self, operations: Sequence[BasicOperation]) -> None:
        super().__init__(operations)
        self.chain = _chain(operations)
        self.first = 1 if isinstance(operations[0], Quantize) else 0  # position of the chain's first operation

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        if request.device.type != "cuda":
            return f"The element-wise kernel is Triton's; on {request.device.type} torch runs each operation by itself."
        if request.dtype == torch.float64:
            return "There is no element-wise kernel for float64, which torch computes operation by operation."
        for operation in _chain(operations):
            if operation.cache_quantized_input:
                return f"{type(operation).__name__} keeps its input quantized, and a chain computes it again."
        steps = [operation.step() for operation in _chain(operations)]
        return _why_not_cast(operations, request.recipe, steps) or why_no_chain(steps)

    def kernel(self, request: PlanRequest) -> str:
        return f"{len(self.operations)} element-wise steps in one kernel (Triton)"

    def fuser_forward(
        self, ctxs: Sequence[OperationContext], x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Any, dict[str, Any]]:
        own = ctxs[self.first : self.first + len(self.chain)]
        steps, operands = [], []
        shape = x.shape
        for operation, ctx in zip(self.chain, own, strict=True):
            step, operand = operation.step(), operation.operand(ctx, x, extras)
            operation.check(shape, operand)
            if step.gated:
                shape = torch.Size((*shape[:-1], shape[-1] // 2))
            steps.append(step)
            operands.append(operand)
        if any(ctx.needs_grad for ctx in own):
            ctxs[0].saved = self._kept(steps, operands, x)
        active = [i for i, step in enumerate(steps) if not is_noop(step, operands[i])]
        steps, operands, dtypes = _pick(steps, active), _pick(operands, active), [own[i].dtype for i in active]
        quantizer = None
        if self._ends_in_quantize and self.operations[-1].input_quantizer(ctxs[-1].recipe) is not None:
            quantizer = ctxs[-1].quantizer(Role.INPUT)
        if active and _casts(quantizer, x) and runs_triton(x, *operands, dtypes=dtypes):
            buffers = quantizer.empty_like_quantized(shape, own[-1].dtype, x.device)
            elementwise_cast(x, cast_into(buffers), steps, operands, dtypes)
            return buffers.copies, {}
        y = elementwise(x, steps, operands, dtypes) if active else x
        return y if quantizer is None else quantizer.quantize(y, rowwise=True, columnwise=True), {}

    @property
    def _ends_in_quantize(self) -> bool:
        return self.first + len(self.chain) < len(self.operations)

    def _kept(self, steps: Sequence[Step], operands: Sequence[Tensor | None], x: Tensor) -> Saved:
        last = _last_that_reads_x(steps)
        kept = []
        for i, operation in enumerate(self.chain):
            again = i < last and not operation.has_parameter  # needed to recompute the input of a later step
            kept.append(operands[i] if again else operation.kept_operand(steps[i], operands[i]))
        return self.Saved(x if last >= 0 else None, Operands(tuple(kept)))

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfFused:
        saved: ElementwiseChain.Saved = ctxs[0].saved
        own = ctxs[self.first : self.first + len(self.chain)]
        steps = [operation.step() for operation in self.chain]
        last = _last_that_reads_x(steps)
        operands = [
            own[i].param(operation.operand_name) if operation.has_parameter and i <= last else saved.operands.members[i]
            for i, operation in enumerate(self.chain)
        ]
        active = [i for i, step in enumerate(steps) if not is_noop(step, operands[i])]
        steps, operands, dtypes = _pick(steps, active), _pick(operands, active), [own[i].dtype for i in active]
        wanted = [self.chain[i].needs_operand(own[i]) for i in active]
        quantizer = buffers = None
        needs_dx, on_triton = own[0].needs.input, runs_triton(dy, saved.x, *operands, dtypes=dtypes)
        if self.first and needs_dx and self.operations[0].grad_output_quantizer(ctxs[0].recipe) is not None:
            quantizer = ctxs[0].quantizer(Role.GRAD_OUTPUT)
        if active and _casts(quantizer, dy) and on_triton:
            buffers = quantizer.empty_like_quantized(dy.shape, dtypes[0], dy.device)
        dx: Any = dy
        gradients: Sequence[Tensor | None] = ()
        if active:
            found = delementwise(
                dy, saved.x, steps, operands, dtypes, need_dx=needs_dx and buffers is None, need_operands=wanted,
                cast=None if buffers is None else cast_into(buffers),
            )  # fmt: skip
            dx, gradients = found.dx, found.operands
        if buffers is not None:
            dx = buffers.copies
        elif quantizer is not None and dx is not None:
            dx = quantizer.quantize(dx, rowwise=True, columnwise=True)
        d_parameters: list[dict[str, Tensor | None]] = [{} for _ in self.operations]
        d_extras: dict[str, Tensor | None] = {}
        for i, gradient in zip(active, gradients, strict=True):
            operation = self.chain[i]
            if gradient is None or not operation.needs_operand(own[i]):
                continue
            if operation.has_parameter:
                d_parameters[self.first + i][operation.operand_name] = gradient
            else:
                before = d_extras.get(operation.operand_name)
                d_extras[operation.operand_name] = gradient if before is None else gradient + before
        return dx, d_parameters, d_extras


def _casts(quantizer: Quantizer | None, x: Tensor) -> TypeGuard[Quantizer]:
    """Whether the chain's kernel also quantizes its result with this quantizer."""
    return quantizer is not None and quantizer.kernel_spec is not None and x.numel() > 0


def _chain(operations: Sequence[BasicOperation]) -> tuple[ElementwiseOperation, ...]:
    return tuple(operation for operation in operations if isinstance(operation, ElementwiseOperation))


def _why_not_cast(operations: Sequence[BasicOperation], recipe: Recipe, steps: Sequence[Step]) -> str | None:
    first, last = operations[0], operations[-1]
    quantizers = []
    if isinstance(first, Quantize):
        quantizers.append(first.grad_output_quantizer(recipe))
        if first.input_quantizer(recipe) is not None:
            return "The Quantize in front quantizes x, which is not what the chain computes."
        if quantizers[0] is not None and any(step.gated for step in steps):
            return "The gradient of a gated activation's input is made in two halves, and the cast takes whole tiles."
    if isinstance(last, Quantize):
        quantizers.append(last.input_quantizer(recipe))
        if last.grad_output_quantizer(recipe) is not None:
            return "The Quantize behind quantizes dy, which is not what the chain computes."
    for quantizer in quantizers:
        if quantizer is None:
            continue
        if quantizer.kernel_spec is None:
            return f"{type(quantizer).__name__} must see the whole tensor before it can cast, which takes another pass."
        why_not = why_no_cast(quantizer.kernel_spec)
        if why_not is not None:
            return why_not
    return None


def _last_that_reads_x(steps: Sequence[Step]) -> int:
    return max((i for i, step in enumerate(steps) if not step.linear), default=-1)


def _pick(items: Sequence[Any], positions: Sequence[int]) -> list[Any]:
    return [items[position] for position in positions]
