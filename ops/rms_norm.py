"""RMSNorm: x divided by its root mean square, times a learned weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from ops.kernels.norm.rms_norm import drms_norm, rms_norm
from ops.normalization import Normalization
from ops.runner.operation import BackwardOfBasic, OperationContext


class RMSNorm(Normalization):
    """y = x / sqrt(mean(x^2) + eps) * weight, the mean over the trailing dimensions `normalized_shape`.

    normalized_shape:    an int, or the trailing dimensions of x and the shape of the weight
    zero_centered_gamma: multiply by 1 + weight instead; the weight is then initialised to zero, otherwise to one

    Computed in float32 (float64 for float64) and rounded once. Raises ValueError for dimensions or an eps that are
    not positive, and for an x with other trailing dimensions.
    """

    repeatable = True

    class Saved(NamedTuple):
        x: Tensor
        rstd: Tensor

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        self.check(ctx, x)
        weight = self.flat(ctx.param("weight"))
        y, rstd = rms_norm(self.flat(x), weight, self.eps, zero_centered=self.zero_centered_gamma)
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, rstd)
        return y.view(x.shape), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        return *self.gradients(ctx, dy), {}

    def gradients(
        self, ctx: OperationContext, dy: Tensor, added: Tensor | None = None
    ) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        """(dx, {"weight": dweight}). `added` (x's shape, `ctx.dtype`), if given, is added to dx before its rounding."""
        x, rstd = ctx.saved
        dx, dweight = drms_norm(
            self.flat(dy),
            self.flat(x),
            rstd,
            self.flat(ctx.param("weight")),
            zero_centered=self.zero_centered_gamma,
            need_dx=ctx.needs.input,
            need_dweight=bool(ctx.needs.params),
            added=None if added is None else self.flat(added),
        )
        return (
            None if dx is None else dx.view(x.shape),
            {"weight": None if dweight is None else dweight.view(self.normalized_shape)},
        )
