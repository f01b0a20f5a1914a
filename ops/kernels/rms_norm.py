"""RMSNorm over the last axes, forward and backward.

    rstd = (mean(x^2) + eps)^(-1/2)                y = x * rstd * w            w = gamma, or 1 + gamma if zero-centred
    g = dy * w     xhat = x * rstd                 dx = rstd * (g - xhat * mean(g * xhat))     dgamma = sum dy * xhat

Shapes: x [T, K], gamma [K], rstd [T, 1]. Computed in float32 (float64 for float64), rounded once; rstd stays in the
dtype it is computed in. Plain torch on every device; nothing is read by the host.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm_ref(x: Tensor, gamma: Tensor, eps: float, zero_centered: bool) -> Tensor:
    """y alone, as short as it gets."""
    wide = _wide(x)
    y = wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * _weight(gamma, wide, zero_centered)
    return y.to(x.dtype)


def rms_norm(x: Tensor, gamma: Tensor, eps: float, zero_centered: bool) -> tuple[Tensor, Tensor]:
    """y [T, K] in x's dtype, and rstd [T, 1] for the backward."""
    wide = _wide(x)
    rstd = wide.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
    return (wide * rstd).mul_(_weight(gamma, wide, zero_centered)).to(x.dtype), rstd


def drms_norm(
    dy: Tensor, x: Tensor, gamma: Tensor, rstd: Tensor, zero_centered: bool, *, need_dgamma: bool
) -> tuple[Tensor, Tensor | None]:
    """dx [T, K] in x's dtype, and dgamma [K] in the dtype it is computed in, or None."""
    wide = _wide(dy)
    xhat = _wide(x) * rstd
    g = wide * _weight(gamma, wide, zero_centered)
    dx = (g - xhat * (g * xhat).mean(-1, keepdim=True)).mul_(rstd)
    return dx.to(x.dtype), (wide * xhat).sum(0) if need_dgamma else None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _weight(gamma: Tensor, like: Tensor, zero_centered: bool) -> Tensor:
    return gamma.to(like.dtype) + 1 if zero_centered else gamma.to(like.dtype)
