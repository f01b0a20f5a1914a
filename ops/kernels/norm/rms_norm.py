"""RMSNorm over the last dimension.

    rstd[t] = 1 / sqrt(mean_j x[t, j]^2 + eps)
    y       = x rstd gamma                         gamma = weight, or 1 + weight if zero-centred

    dx      = rstd (g - n mean_j(g n))             n = x rstd, g = dy gamma
    dweight = sum_t dy n

Layouts: x [..., N], weight [N], rstd [..., 1]. Precision: computed in float32 (float64 for float64), with one rounding
at the end; dweight and rstd stay in float32.

Graph safety: no host synchronization, no atomics. On CUDA the kernels of `norm_triton` run, otherwise plain torch.

Source: Zhang and Sennrich, "Root Mean Square Layer Normalization", 2019.
"""
# N features

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.norm.norm_triton import dnorm_triton, norm_triton, runs_in_triton


def rms_norm_ref(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> Tensor:
    """y of `rms_norm` in plain torch, differentiable by autograd."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide, gamma = x.to(dtype), weight.to(dtype) + (1 if zero_centered else 0)
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * gamma).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float, *, zero_centered: bool = False) -> tuple[Tensor, Tensor]:
    """y = x rstd gamma.

    x: [..., N], any floating dtype. weight: [N].

    Returns (y [..., N] in x's dtype, rstd [..., 1] in float32, or float64 for float64).
    """
    if runs_in_triton(x.device, x.dtype):
        y, _, rstd = norm_triton(x, weight, None, eps, 1 / x.shape[-1], zero_centered=zero_centered)
        return y, rstd
    dtype = torch.promote_types(x.dtype, torch.float32)
    wide = x.to(dtype)
    rstd = row_sums(wide.square()).div_(x.shape[-1]).add_(eps).rsqrt_()
    return torch.mul(wide, rstd).mul_(gamma_of(weight, zero_centered, dtype)).to(x.dtype), rstd


def drms_norm(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor,
    *,
    zero_centered: bool = False,
    need_dx: bool = True,
    need_dweight: bool = True,
    added: Tensor | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of `rms_norm`. rstd: as returned by `rms_norm`.

    added: [..., N] in x's dtype, added to dx before its rounding.

    Returns (dx [..., N] in x's dtype, dweight [N] in rstd's), with None for what is not needed.
    """
    if runs_in_triton(x.device, x.dtype):
        dx, dweight, _ = dnorm_triton(
            dy, x, None, rstd, weight, 1 / x.shape[-1],
            zero_centered=zero_centered, need_dx=need_dx, need_dweight=need_dweight, added=added,
        )  # fmt: skip
        return dx, dweight
    dtype = rstd.dtype
    normed = x * rstd
    dx = dweight = None
    if need_dweight:
        dweight = (dy * normed).reshape(-1, x.shape[-1]).sum(0)
    if need_dx:
        g = dy * gamma_of(weight, zero_centered, dtype)
        mean = (g * normed).mean(-1, keepdim=True)
        dx = normed.mul_(mean).sub_(g).mul_(-rstd)
        dx = (dx if added is None else dx.add_(added)).to(x.dtype)
    return dx, dweight


def row_sums(x: Tensor) -> Tensor:
    """The sum of each row of x [..., N] in plain torch, [..., 1], in one order for any number of rows and any strides.

    A single row of more than 32767 numbers torch sums in parts, one for each thread (`at::internal::GRAIN_SIZE`).
    """
    x = x.contiguous()
    if x.shape[-1] > 32767 and x.numel() == x.shape[-1]:
        return torch.stack([x, x]).sum(-1, keepdim=True)[0]
    return x.sum(-1, keepdim=True)


def gamma_of(weight: Tensor, zero_centered: bool, dtype: torch.dtype) -> Tensor:
    """gamma in dtype: weight, or 1 + weight if zero-centred."""
    return weight.to(dtype) + 1 if zero_centered else weight.to(dtype)
