"""Quantize: says where x, or its gradient, becomes codes and scales."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from recipes.arguments import check_flags
from recipes.recipe import Recipe, Role
from recipes.tensors.quantizer import Quantizer


class Quantize(BasicOperation):
    """y = x, quantized as the recipe quantizes the input of a product; nothing if the recipe does not.

    The next operation gets the quantized container if it takes one, otherwise, as at the pipeline's border, its
    dequantized tensor. What is quantized already is handed on as it is. The gradient of rounding is taken as 1.

    forward:  quantize x
    backward: quantize dy, as the gradient of a product's output
    """

    accepts_quantized = True

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        check_flags(forward=forward, backward=backward)
        self.quantizes_forward = forward
        self.quantizes_backward = backward
        self.quantized_roles = (Role.INPUT,) * forward + (Role.GRAD_OUTPUT,) * backward

    def input_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return recipe.quantizer(Role.INPUT) if self.quantizes_forward else None

    def grad_output_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return recipe.quantizer(Role.GRAD_OUTPUT) if self.quantizes_backward else None

    def features(self, incoming: int | None) -> int | None:
        return incoming

    def fuser_forward(self, ctx: OperationContext, x: Any, extras: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        return _quantized(x, ctx.quantizer(Role.INPUT) if self.quantizes_forward else None), {}

    def fuser_backward(self, ctx: OperationContext, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> BackwardOfBasic:
        return _quantized(dy, ctx.quantizer(Role.GRAD_OUTPUT) if self.quantizes_backward else None), {}, {}

    def extra_repr(self) -> str:
        return f"forward={self.quantizes_forward}, backward={self.quantizes_backward}"


def _quantized(x: Any, quantizer: Quantizer | None) -> Any:
    if quantizer is None or not isinstance(x, Tensor):
        return x
    # Both copies: which products the neighbour computes is not known here, and a copy that is missing would have to
    # be cast from the other one, which rounds twice.
    return quantizer.quantize(x, rowwise=True, columnwise=True)
