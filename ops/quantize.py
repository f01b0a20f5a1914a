"""Quantize: hands on a quantized container."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.gemm import quantized
from ops.operation import BackwardOfBasic, BasicOperation, OperationContext
from recipes.quantizer import Quantizer
from recipes.recipe import Recipe, Role


class Quantize(BasicOperation):
    """Quantize x (`forward`) or dy (`backward`) as the recipe does an input or the gradient of an output.

    One tensor, with one scale for all its rows where the format has one a tensor. The neighbour takes the codes as
    they are if it can, else the dequantized tensor; that is also what comes out at a pipeline's border. Without a
    recipe it changes nothing.
    """

    accepts_quantized = True

    def __init__(self, forward: bool = True, backward: bool = False) -> None:
        super().__init__()
        self.quantize_forward = forward
        self.quantize_backward = backward

    def input_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return recipe.quantizer(Role.INPUT) if self.quantize_forward else None

    def grad_output_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return recipe.quantizer(Role.GRAD_OUTPUT) if self.quantize_backward else None

    def fuser_forward(self, ctx: OperationContext, x: Any, extras: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        quantizer = self.input_quantizer(ctx.recipe)
        return (x if quantizer is None else quantized(x, quantizer, rowwise=True, columnwise=True)), {}

    def fuser_backward(self, ctx: OperationContext, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> BackwardOfBasic:
        quantizer = self.grad_output_quantizer(ctx.recipe)
        return (dy if quantizer is None else quantized(dy, quantizer, rowwise=True, columnwise=True)), {}, {}

    def extra_repr(self) -> str:
        return f"forward={self.quantize_forward}, backward={self.quantize_backward}"
