"""Quantize: quantizes x, or its gradient, at this point of the pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from ops.runner.checked import Checked
from ops.runner.operation import BackwardOfBasic, BasicOperation, OperationContext
from recipes.arguments import as_flag, check_flags
from recipes.recipe import Recipe, Role
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer


class Quantize(BasicOperation):
    """y = x, quantized as the recipe quantizes the input of a GEMM; unchanged if the recipe does not quantize it.

    The next operation receives the quantized container if it accepts one; otherwise, and at the end of the pipeline,
    the tensor is dequantized. An input that is already quantized is returned as is. The gradient of rounding is 1.

    forward:  quantize x; later: `quantizes_forward`
    backward: quantize dy, as the gradient of a GEMM's output; later: `quantizes_backward`
    quantized_output: at an end of the pipeline the container leaves in a `QuantizedHandle`, a Tensor that another
        pipeline takes and that carries gradients: y, where this is the last operation, and dx, where it is the first
    """

    accepts_quantized = True

    quantized_output = Checked(as_flag)
    quantizes_forward = Checked(as_flag)
    quantizes_backward = Checked(as_flag)

    def __init__(self, forward: bool = True, backward: bool = False, *, quantized_output: bool = False) -> None:
        super().__init__()
        check_flags(forward=forward, backward=backward)
        self.quantized_output = quantized_output
        self.quantizes_forward = forward
        self.quantizes_backward = backward

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("forward", "backward") and isinstance(value, bool):
            raise AttributeError(f"{name} is read where a Quantize is made. Set quantizes_{name} = {value}.")
        super().__setattr__(name, value)

    @property
    def quantized_roles(self) -> tuple[Role, ...]:  # type: ignore[override]
        return (Role.INPUT,) * self.quantizes_forward + (Role.GRAD_OUTPUT,) * self.quantizes_backward

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
        leaves = ", quantized_output=True" if self.quantized_output else ""
        return f"forward={self.quantizes_forward}, backward={self.quantizes_backward}{leaves}"


def _quantized(x: Tensor | QuantizedTensor, quantizer: Quantizer | None) -> Tensor | QuantizedTensor:
    if quantizer is None or not isinstance(x, Tensor):
        return x
    # Both copies: it is not known here which products the next operation computes, and making a missing copy from the
    # other one would round twice.
    return quantizer.quantize(x, rowwise=True, columnwise=True)
