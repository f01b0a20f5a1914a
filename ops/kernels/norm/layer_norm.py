"""LayerNorm over the last dimension.

    mean[t] = mean_j x[t, j]
    rstd[t] = 1 / sqrt(mean_j (x[t, j] - mean)^2 + eps)
    y       = (x - mean) rstd gamma + bias              gamma = weight, or 1 + weight if zero-centred

    dx      = rstd (g - n mean_j(g n) - mean_j(g))      n = (x - mean) rstd, g = dy gamma
    dweight = sum_t dy n
    dbias   = sum_t dy

Layouts: x [..., N], weight and bias [N], mean and rstd [..., 1]. Precision: computed in float32 (float64 for float64),
with one rounding at the end; dweight, dbias, mean and rstd stay in float32.

Graph safety: no host synchronization, no atomics. On CUDA the kernels of `norm_triton` run, otherwise plain torch.

Source: Ba, Kiros and Hinton, "Layer Normalization", 2016.
"""
# N features

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.norm.norm_triton import dnorm_triton, norm_triton, runs_in_triton
from ops.kernels.norm.rms_norm import gamma_of, row_sums


def layer_norm_ref(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """y of `layer_norm` in plain torch, differentiable by autograd."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, gamma = x.to(dtype), weight.to(dtype) + (1 if zero_centered else 0)
    apart = wide - wide.mean(-1, keepdim=True)
    return (apart / (apart.square().mean(-1, keepdim=True) + eps).sqrt() * gamma + bias.to(dtype)).to(x.dtype)


def layer_norm(
    x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, zero_centered: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """y = (x - mean) rstd gamma + bias.

    x: [..., N], any floating dtype. weight, bias: [N].

    Returns (y [..., N] in x's dtype, mean and rstd, both [..., 1] in float32, or float64 for float64).
    """
    if runs_in_triton(x.device, x.dtype):
        y, mean, rstd = norm_triton(
            x, weight, bias, eps, 1 / x.shape[-1], centered=True, zero_centered=zero_centered
        )  # fmt: skip
        assert mean is not None, "it is centered"
        return y, mean, rstd
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    mean = row_sums(wide).div_(x.shape[-1])
    apart = wide - mean
    rstd = row_sums(apart.square()).div_(x.shape[-1]).add_(eps).rsqrt_()
    y = apart.mul_(rstd).mul_(gamma_of(weight, zero_centered, dtype)).add_(bias)
    return y.to(x.dtype), mean, rstd


def dlayer_norm(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor,
    *,
    zero_centered: bool = False,
    need_dx: bool = True,
    need_dweight: bool = True,
    need_dbias: bool = True,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `layer_norm`. mean, rstd: as returned by `layer_norm`.

    Returns (dx [..., N] in x's dtype, dweight [N] and dbias [N] in rstd's), with None for what is not needed.
    """
    if runs_in_triton(x.device, x.dtype):
        return dnorm_triton(
            dy, x, mean, rstd, weight, 1 / x.shape[-1],
            zero_centered=zero_centered, need_dx=need_dx, need_dweight=need_dweight, need_dbias=need_dbias,
        )  # fmt: skip
    dtype = rstd.dtype
    dx = dweight = dbias = None
    if need_dbias:
        dbias = dy.reshape(-1, x.shape[-1]).sum(0, dtype=dtype)
    if need_dweight or need_dx:
        normed = (x - mean).mul_(rstd)
        if need_dweight:
            dweight = (dy * normed).reshape(-1, x.shape[-1]).sum(0)
        if need_dx:
            g = dy * gamma_of(weight, zero_centered, dtype)
            mean_gn, mean_g = (g * normed).mean(-1, keepdim=True), g.mean(-1, keepdim=True)
            dx = g.sub_(normed.mul_(mean_gn)).sub_(mean_g).mul_(rstd).to(x.dtype)
    return dx, dweight, dbias
