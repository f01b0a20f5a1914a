"""LayerNorm: x minus its mean, divided by its standard deviation, times a learned weight, plus a learned bias."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from ops.kernels.norm.layer_norm import dlayer_norm, layer_norm
from ops.normalization import Normalization
from ops.runner.operation import BackwardOfBasic, OperationContext


class LayerNorm(Normalization):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias, over the trailing dimensions `normalized_shape`.

    var is the biased variance.

    normalized_shape:    an int, or the trailing dimensions of x and the shape of weight and bias
    zero_centered_gamma: multiply by 1 + weight instead; the weight is then initialised to zero, otherwise to one

    The bias starts at zero. Computed in float32 (float64 for float64) and rounded once. Raises ValueError for
    dimensions or an eps that are not positive, and for an x with other trailing dimensions.
    """

    learned = ("weight", "bias")
    bias: nn.Parameter

    repeatable = True

    class Saved(NamedTuple):
        x: Tensor
        mean: Tensor
        rstd: Tensor

    def reset_parameters(self) -> None:
        """Set the weight so that gamma is one, and the bias to zero."""
        super().reset_parameters()
        nn.init.zeros_(self.bias)

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        self.check(ctx, x)
        weight, bias = self.flat(ctx.param("weight")), self.flat(ctx.param("bias"))
        y, mean, rstd = layer_norm(self.flat(x), weight, bias, self.eps, zero_centered=self.zero_centered_gamma)
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, mean, rstd)
        return y.view(x.shape), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        x, mean, rstd = ctx.saved
        dx, dweight, dbias = dlayer_norm(
            self.flat(dy),
            self.flat(x),
            mean,
            rstd,
            self.flat(ctx.param("weight")),
            zero_centered=self.zero_centered_gamma,
            need_dx=ctx.needs.input,
            need_dweight="weight" in ctx.needs.params,
            need_dbias="bias" in ctx.needs.params,
        )
        d_parameters = {
            name: None if d is None else d.view(self.normalized_shape)
            for name, d in (("weight", dweight), ("bias", dbias))
        }
        return None if dx is None else dx.view(x.shape), d_parameters, {}
