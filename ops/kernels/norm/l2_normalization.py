"""L2 normalisation of the last dimension.

    rstd[t] = 1 / sqrt(sum_j x[t, j]^2 + eps)
    y       = x rstd

    dx      = rstd (dy - y sum_j(dy y))                 with y before rounding

Layouts: x [..., N], rstd [..., 1]. Precision: computed in float32 (float64 for float64), with one rounding at the end;
rstd stays in float32.

Graph safety: no host synchronization, no atomics. On CUDA the kernels of `norm_triton` run, otherwise plain torch.
"""
# N features

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.norm.norm_triton import dnorm_triton, norm_triton, runs_in_triton
from ops.kernels.norm.rms_norm import row_sums


def l2_normalization_ref(x: Tensor, eps: float) -> Tensor:
    """y of `l2_normalization` in plain torch, differentiable by autograd."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return (wide / (wide.square().sum(-1, keepdim=True) + eps).sqrt()).to(x.dtype)


def l2_normalization(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y = x rstd, for x [..., N] of any floating dtype.

    Returns (y [..., N] in x's dtype, rstd [..., 1] in float32, or float64 for float64).
    """
    if runs_in_triton(x.device, x.dtype):
        y, _, rstd = norm_triton(x, None, None, eps, 1.0)
        return y, rstd
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = row_sums(wide.square()).add_(eps).rsqrt_()
    return (wide * rstd).to(x.dtype), rstd


def dl2_normalization(dy: Tensor, x: Tensor, rstd: Tensor) -> Tensor:
    """dx [..., N] of `l2_normalization`, in x's dtype. rstd: as returned by `l2_normalization`."""
    if runs_in_triton(x.device, x.dtype):
        dx, _, _ = dnorm_triton(dy, x, None, rstd, None, 1.0)
        assert dx is not None, "it is needed"
        return dx
    normed = x * rstd
    total = (dy * normed).sum(-1, keepdim=True)
    return normed.mul_(total).sub_(dy).mul_(-rstd).to(x.dtype)
