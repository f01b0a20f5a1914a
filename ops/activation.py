"""What all activations share as operations: they differ in their `Activation` and in whether they take scales."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, NamedTuple

from torch import Tensor

from ops.context import at_tensor
from ops.kernels.activation import Activation, activation, dactivation
from ops.operation import BackwardOfBasic, BasicOperation, OperationContext
from recipes.current_scaling import CurrentScalingQuantizer
from recipes.formats import E4M3

_INPUT_QUANTIZER = CurrentScalingQuantizer(E4M3)


class ActivationOperation(BasicOperation):
    """y = f(x), or f(x) * scales in subclasses that ask for the extra input `scales`, x.shape[:-1].

    Computed in float32 (float64 for float64) and rounded once. The formulas are in `ops.kernels.activation`.

    cache_quantized_input: keep x for backward in eight bits, by Float8 current scaling in E4M3 whatever the recipe,
                           and compute the gradients from its dequantized values. y does not change.
    """

    class Saved(NamedTuple):
        x: Any  # a Tensor, or a QuantizedTensor if cache_quantized_input
        scales: Tensor | None

    def __init__(self, activation: Activation, *, cache_quantized_input: bool = False) -> None:
        super().__init__()
        self.activation = activation
        self.cache_quantized_input = cache_quantized_input

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        scales = extras.get("scales")
        if ctx.needs_grad:
            ctx.saved = self.Saved(_INPUT_QUANTIZER.quantize(x) if self.cache_quantized_input else x, scales)
        return activation(x, self.activation, scales), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        x, scales = ctx.saved
        needs = ctx.needs
        dx, dscales, _ = dactivation(
            dy, at_tensor(x), self.activation, scales, need_dh=needs.input, need_dscales="scales" in needs.extras
        )
        return dx, {}, {} if scales is None else {"scales": dscales}

    def extra_repr(self) -> str:
        spec = self.activation
        given = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "kind"}
        shown = [f"{n}={v}" for n, v in given.items() if v != getattr(Activation, n)]
        return ", ".join([*shown, "cache_quantized_input=True"] if self.cache_quantized_input else shown)
