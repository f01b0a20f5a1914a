"""The base of all element-wise operations, which run as one kernel alone or together with their neighbours."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.kernels.elementwise.chain import Step, delementwise, elementwise, runs_triton
from ops.runner.context import at_tensor
from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from recipes.tensors.quantized_tensor import QuantizedTensor


class ElementwiseOperation(BasicOperation):
    """y = f(x, operand), element by element. A subclass defines f by its `step`, for Triton and for torch.

    Consecutive operations of this kind run as one kernel on a GPU (`fused.elementwise_chain`). x and y have one dtype;
    f is computed in float32 (float64 for float64), and y is rounded once. The CPU, and float64, run plain torch.

    operand_name: the parameter (a column operand) or extra input (row, element) that is the operand; "" if none is
    grad_is_identity: whether dx is dy itself, so that the unfused backward launches nothing for it
    cache_quantized_input: whether x is saved for backward in eight bits (see `kept_x`), and so is never recomputed
    """

    operand_name: str = ""
    grad_is_identity: bool = False
    cache_quantized_input: bool = False

    class Saved(NamedTuple):
        x: Tensor | QuantizedTensor | None  # None if the step is linear
        operand: Tensor | None  # None if it is a parameter, and if backward needs none

    @abstractmethod
    def step(self) -> Step:
        """f as a `Step` of the element-wise kernels."""

    def check(self, shape: torch.Size, operand: Tensor | None) -> None:
        """Raise ValueError if an x of this shape does not divide into gate and linear part, or the operand has not one
        number for each column, row or element of it: kernels would read beside them."""
        step = self.step()
        run = 2 * (step.interleave or 1)
        if step.gated and (not shape or shape[-1] % run):
            raise ValueError(
                f"x has {shape[-1] if shape else 1} features, but {run} must divide them. Gate and linear part stand "
                "side by side: make twice the features that come out."
            )
        needed = {"column": shape[-1:], "row": shape[:-1], "element": shape}.get(step.operand)
        if operand is not None and needed is not None and operand.shape != needed:
            raise ValueError(
                f"{self.operand_name} has shape {list(operand.shape)}, but x has shape {list(shape)}. Give one number "
                f"for each {step.operand}: {list(needed)}."
            )

    def compute(self, x: Tensor, operand: Tensor | None) -> Tensor:
        """y in plain torch: the step's reference, unless a subclass has a faster implementation."""
        return elementwise(x, (self.step(),), (operand,))

    def gradients(
        self, dy: Tensor, x: Tensor | None, operand: Tensor | None, *, need_dx: bool, need_operand: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        """dx and the operand's gradient in plain torch: by autograd, unless a subclass has a faster implementation."""
        found = delementwise(dy, x, (self.step(),), (operand,))
        return found.dx, found.operands[0]

    @property
    def has_parameter(self) -> bool:
        """Whether the operand is a parameter."""
        return self.operand_name != "" and self.operand_name not in self.extra_inputs

    def operand(self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]) -> Tensor | None:
        """The operand in forward: a parameter, an extra input, or a seed that a subclass draws (None: y = x)."""
        if not self.operand_name:
            return None
        return ctx.param(self.operand_name) if self.has_parameter else extras[self.operand_name]

    def kept_x(self, x: Tensor) -> Tensor | QuantizedTensor:
        """What to save of x for backward: x, or a quantized container of it."""
        return x

    def kept_operand(self, step: Step, operand: Tensor | None) -> Tensor | None:
        """What to save of the operand for backward; None for a parameter."""
        return None if self.has_parameter or (step.linear and step.operand == "element") else operand

    def operand_again(self, ctx: OperationContext, step: Step, kept: Tensor | None) -> Tensor | None:
        """The operand in backward: the parameter, or what was saved."""
        return ctx.param(self.operand_name) if self.has_parameter and not step.linear else kept

    def needs_operand(self, ctx: OperationContext) -> bool:
        """Whether the operand's gradient is needed."""
        return self.operand_name in ctx.needs.params or self.operand_name in ctx.needs.extras

    def reduce_operand_gradient(self, gradient: Tensor | None) -> Tensor | None:
        """The operand's gradient, of that which this rank's features give."""
        return gradient

    def features(self, incoming: int | None) -> int | None:
        return incoming if incoming is None or not self.step().gated else incoming // 2

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        step = self.step()
        operand = self.operand(ctx, x, extras)
        self.check(x.shape, operand)
        if ctx.needs_grad:
            ctx.saved = self.Saved(None if step.linear else self.kept_x(x), self.kept_operand(step, operand))
        if is_noop(step, operand):
            return x, {}
        if runs_triton(x) and self.in_place_input is None:
            return elementwise(x, (step,), (operand,)), {}
        return self.compute(x, operand), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        step = self.step()
        x, kept = ctx.saved
        x = None if x is None else at_tensor(x)
        operand = self.operand_again(ctx, step, kept)
        need_dx, need_operand = ctx.needs.input, self.needs_operand(ctx)
        if is_noop(step, operand):
            return dy, {}, {}
        if runs_triton(dy) and not self.grad_is_identity:
            found = delementwise(dy, x, (step,), (operand,), need_dx=need_dx, need_operands=(need_operand,))
            dx, gradient = found.dx, found.operands[0]
        else:
            dx, gradient = self.gradients(dy, x, operand, need_dx=need_dx, need_operand=need_operand)
        if not need_operand:
            return dx, {}, {}
        named = {self.operand_name: self.reduce_operand_gradient(gradient)}
        return (dx, named, {}) if self.has_parameter else (dx, {}, named)


def is_noop(step: Step, operand: Tensor | None) -> bool:
    """Whether a step does nothing in this call: a random step without a seed."""
    return step.operand == "random" and operand is None
