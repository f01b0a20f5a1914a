"""Shared by the fusions that begin with a dense Linear: later operations write into the memory of its product."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from ops.activations import ActivationOperation
from ops.bias import Bias
from ops.elementwise import ElementwiseOperation
from ops.linear import Linear
from ops.runner.operation import BasicOperation, OperationContext
from ops.runner.parameters import parameter_dtype


def why_not_bias(operations: Sequence[BasicOperation]) -> str | None:
    """Why a Bias after the first operation, a Linear, cannot be added in place; None if it can or if there is none."""
    linear, bias = operations[:2]
    if not isinstance(bias, Bias):
        return None
    assert isinstance(linear, Linear), "the pattern says so"
    dtypes = parameter_dtype(linear, "weight"), parameter_dtype(bias, "bias")
    if dtypes[0] != dtypes[1]:
        return f"Linear's weight is {dtypes[0]}, but Bias's vector is {dtypes[1]}."
    return None


def why_not_scaled(activation: BasicOperation) -> str | None:
    """Why this activation is not fused with a dense Linear (it takes scales), or None."""
    assert isinstance(activation, ActivationOperation), "the pattern says so"
    if "scales" in activation.extra_inputs:
        return f"{type(activation).__name__} takes scales, and only activations without them are fused with their bias."
    return None


def why_not_gathered(operation: BasicOperation) -> str | None:
    """Why the backward of a Linear is not fused with that of the next operation (it gathers dy), or None."""
    if isinstance(operation, Linear) and operation.gathers_grad_output:
        return "Linear divides the rows of y among its ranks, and gathers those of dy before it sums its bias gradient."
    return None


def add_in_place(
    operation: ElementwiseOperation, ctx: OperationContext, y: Tensor, extras: Mapping[str, Any]
) -> Tensor:
    """y += operand, for a Bias or an AddExtraInput, rounded once to y's dtype; or the operand += y, if the operation
    writes into it. Returns what was written. Sets `ctx.saved` as the operation does."""
    operand = operation.operand(ctx, y, extras)
    assert operand is not None, "a Bias has a parameter, an AddExtraInput its extra input"
    operation.check(y.shape, operand)
    if ctx.needs_grad:
        ctx.saved = operation.Saved(None, operation.kept_operand(operation.step(), operand))
    return y.add_(operand) if operation.in_place_input is None else operation.compute(y, operand)
