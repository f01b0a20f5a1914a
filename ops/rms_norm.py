"""RMSNorm: x divided by its root mean square, times a learned weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.kernels.rms_norm import drms_norm, rms_norm
from ops.operation import BackwardOfBasic, BasicOperation, OperationContext


class RMSNorm(BasicOperation):
    """y = x / sqrt(mean(x^2) + eps) * weight, the mean over the trailing dimensions `normalized_shape`.

    normalized_shape:    an int, or the trailing dimensions of x and the shape of the weight
    zero_centered_gamma: multiplies by 1 + weight instead; the weight then starts at zero, otherwise at one

    Computed in float32 (float64 for float64) and rounded once. Raises ValueError for dimensions or an eps that are
    not positive, and for an x with other trailing dimensions.
    """

    class Saved(NamedTuple):
        x: Tensor
        rstd: Tensor

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or min(shape) <= 0:
            raise ValueError(f"normalized_shape is {normalized_shape}, but needs one dimension or more, all positive.")
        if not eps > 0:
            raise ValueError(f"eps is {eps}, but must be positive: a row of zeros would be divided by zero.")
        self.normalized_shape = shape
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """So that the factor is one."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        dims = len(self.normalized_shape)
        if x.shape[-dims:] != self.normalized_shape:
            raise ValueError(
                f"x has shape {list(x.shape)}, but must end in {list(self.normalized_shape)}. "
                "Check the operation before this one."
            )
        y, rstd = rms_norm(
            _flat(x, dims), _flat(ctx.param("weight"), dims), self.eps, zero_centered=self.zero_centered_gamma
        )
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, rstd)
        return y if dims == 1 else y.view(x.shape), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        x, rstd = ctx.saved
        dims = len(self.normalized_shape)
        dx, dweight = drms_norm(
            _flat(dy, dims),
            _flat(x, dims),
            rstd,
            _flat(ctx.param("weight"), dims),
            zero_centered=self.zero_centered_gamma,
            need_dx=ctx.needs.input,
            need_dweight=bool(ctx.needs.params),
        )
        if dims > 1:
            dx = None if dx is None else dx.view(x.shape)
            dweight = None if dweight is None else dweight.view(self.normalized_shape)
        return dx, {"weight": dweight}, {}

    def extra_repr(self) -> str:
        shape = self.normalized_shape[0] if len(self.normalized_shape) == 1 else self.normalized_shape
        return f"{shape}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"


def _flat(x: Tensor, dims: int) -> Tensor:
    return x if dims == 1 else x.flatten(-dims)
