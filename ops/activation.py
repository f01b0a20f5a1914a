"""What all activations share as operations: they differ in their `Activation` and in whether they take scales."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from ops.elementwise import ElementwiseOperation
from ops.kernels.activation import Activation, activation, activation_step, check_activation, dactivation
from ops.kernels.elementwise import Step
from recipes.arguments import check_flags
from recipes.current_scaling import CurrentScalingQuantizer
from recipes.formats import E4M3

_INPUT_QUANTIZER = CurrentScalingQuantizer(E4M3)


class ActivationOperation(ElementwiseOperation):
    """y = f(x), or f(x) * scales in subclasses that ask for the extra input `scales`, x.shape[:-1].

    Computed in float32 (float64 for float64) and rounded once. The formulas are in `ops.kernels.activation`.

    cache_quantized_input: keep x for backward in eight bits, by Float8 current scaling in E4M3 whatever the recipe,
                           and compute the gradients from its dequantized values. y does not change.
    """

    def __init__(self, activation: Activation, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        check_flags(cache_quantized_input=cache_quantized_input)
        self.activation = activation
        self.cache_quantized_input = cache_quantized_input
        self.operand_name = "scales" if "scales" in self.extra_inputs else ""

    def step(self) -> Step:
        return activation_step(self.activation, self.operand_name != "")

    def check(self, shape: torch.Size, operand: Tensor | None) -> None:
        check_activation(shape, self.activation, operand)

    def features(self, incoming: int | None) -> int | None:
        if incoming is None:
            return None
        check_activation((incoming,), self.activation, None)
        return incoming // 2 if self.activation.gated else incoming

    def kept_x(self, x: Tensor) -> Any:
        return _INPUT_QUANTIZER.quantize(x) if self.cache_quantized_input else x

    def compute(self, x: Tensor, operand: Tensor | None) -> Tensor:
        return activation(x, self.activation, operand)

    def gradients(
        self, dy: Tensor, x: Tensor | None, operand: Tensor | None, *, need_dx: bool, need_operand: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        assert x is not None, "an activation is not linear"
        dx, dscales, _ = dactivation(dy, x, self.activation, operand, need_dh=need_dx, need_dscales=need_operand)
        return dx, dscales

    def extra_repr(self) -> str:
        spec = self.activation
        given = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "kind"}
        shown = [f"{n}={v}" for n, v in given.items() if v != getattr(Activation, n)]
        return ", ".join([*shown, "cache_quantized_input=True"] if self.cache_quantized_input else shown)
