"""RMSNorm: root mean square normalization with a learnt gain."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.kernels.rms_norm import drms_norm, rms_norm
from ops.operation import BackwardOfBasic, BasicOperation, OperationContext


class RMSNorm(BasicOperation):
    """y = x * (mean(x^2) + eps)^(-1/2) * gamma over the last axes, which have the shape `normalized_shape`.

    zero_centered_gamma: multiply by 1 + gamma, which then starts as zeros in place of ones.
    Parameter: weight (gamma), of shape normalized_shape. Saves x and one number a row.
    Raises ValueError for an x whose last axes have another shape, or a size that is not positive.
    """

    class Saved(NamedTuple):
        x: Tensor
        rstd: Tensor

    def __init__(
        self,
        normalized_shape: int | Iterable[int],
        *,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        zero_centered_gamma: bool = False,
    ) -> None:
        super().__init__()
        shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        if not shape or any(size <= 0 for size in shape):
            raise ValueError(f"RMSNorm got normalized_shape={normalized_shape!r}. All sizes must be positive.")
        self.normalized_shape = shape
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Ones, or zeros if gamma is zero-centred."""
        nn.init.constant_(self.weight, 0.0 if self.zero_centered_gamma else 1.0)

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        if x.shape[-len(self.normalized_shape) :] != self.normalized_shape:
            raise ValueError(
                f"x has shape {list(x.shape)}, but its last axes must be {list(self.normalized_shape)}. "
                "Check the operation before this one."
            )
        y, rstd = rms_norm(self._rows(x), ctx.param("weight").flatten(), self.eps, self.zero_centered_gamma)
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, rstd)
        return y.view(x.shape), {}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        x, rstd = ctx.saved
        gamma = ctx.param("weight")
        dx, dgamma = drms_norm(
            self._rows(dy), self._rows(x), gamma.flatten(), rstd, self.zero_centered_gamma,
            need_dgamma="weight" in ctx.needs.params,
        )  # fmt: skip
        return dx.view(x.shape), {"weight": None if dgamma is None else dgamma.view(gamma.shape)}, {}

    def _rows(self, x: Tensor) -> Tensor:
        return x.reshape(-1, math.prod(self.normalized_shape))

    def extra_repr(self) -> str:
        return f"{list(self.normalized_shape)}, eps={self.eps}, zero_centered_gamma={self.zero_centered_gamma}"
