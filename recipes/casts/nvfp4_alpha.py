"""The factor of NVFP4 that is left outside the codes and block scales.

    alpha = fl(amax / largest)      1 if amax is Inf; largest = 2688 = 6 * 448, or 6 B of four over six

A product of two operands takes fl(alpha_a * alpha_b), made of both amaxes by one kernel. amax and alpha are float32, of
any shape. The quotient is rounded once, to nearest. Graph-safe: nothing is read on the host. Source: the second scale
of TransformerEngine's NVFP4BlockScaling (read at d0067d0), inverted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.tensors.formats import E2M1, E4M3
from recipes.triton.gates import tl, triton
from recipes.triton.launch import Launch, cdiv, has_work

RANGE = E2M1.max * E4M3.max
BLOCK = 256  # numbers of a program


def alpha_from_amax_ref(amax: Tensor, largest: float) -> Tensor:
    # Not `amax / largest`: on CUDA torch would turn a scalar divisor into its reciprocal, which rounds twice.
    return (amax / torch.full_like(amax, largest)).masked_fill(amax.isinf(), 1.0)


@triton.jit
def _alpha_of(amax, LARGEST: tl.constexpr):
    """LARGEST: None for an alpha itself"""
    if LARGEST is not None:
        alpha = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
        amax = tl.where(tl.abs(amax) == float("inf"), 1.0, alpha)
    return amax


@triton.jit(do_not_specialize=["count"])
def alpha_kernel(amax_ptr, alpha_ptr, count, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < count)
    tl.store(alpha_ptr + at, _alpha_of(amax, LARGEST), mask=at < count)


@triton.jit(do_not_specialize=["count"])
def combined_alpha_kernel(
    a_ptr, b_ptr, alpha_ptr, count, a_stride, b_stride, A_LARGEST: tl.constexpr, B_LARGEST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a, b = tl.load(a_ptr + at * a_stride, mask=at < count), tl.load(b_ptr + at * b_stride, mask=at < count)
    tl.store(alpha_ptr + at, _alpha_of(a, A_LARGEST) * _alpha_of(b, B_LARGEST), mask=at < count)


_alpha, _combined_alpha = Launch(alpha_kernel), Launch(combined_alpha_kernel)


def alpha_from_amax(amax: Tensor, largest: float = RANGE) -> Tensor:
    """alpha, in new memory."""
    return alpha_from_amax_triton(amax, largest) if amax.is_cuda else alpha_from_amax_ref(amax, largest)


def alpha_from_amax_triton(amax: Tensor, largest: float = RANGE) -> Tensor:
    amax = amax.contiguous()
    alpha = torch.empty(amax.shape, dtype=amax.dtype, device=amax.device)
    if has_work(amax):
        _alpha(amax, cdiv(amax.numel(), BLOCK), amax, alpha, amax.numel(), LARGEST=largest, BLOCK=BLOCK, num_warps=1)
    return alpha


def combined_alpha_ref(a: Tensor, a_largest: float | None, b: Tensor, b_largest: float | None) -> Tensor:
    alphas = (t if most is None else alpha_from_amax_ref(t, most) for t, most in ((a, a_largest), (b, b_largest)))
    return next(alphas) * next(alphas)


def combined_alpha(a: Tensor, a_largest: float | None, b: Tensor, b_largest: float | None) -> Tensor:
    """alpha_a * alpha_b of two amaxes, each () or [G], or of what is an alpha already, where its `largest` is None."""
    run = combined_alpha_triton if a.is_cuda else combined_alpha_ref
    return run(a, a_largest, b, b_largest)


def combined_alpha_triton(a: Tensor, a_largest: float | None, b: Tensor, b_largest: float | None) -> Tensor:
    like = a if a.dim() else b
    alpha = torch.empty(like.shape, dtype=like.dtype, device=like.device)
    if has_work(alpha):
        strides = [t.stride(0) if t.dim() else 0 for t in (a, b)]
        _combined_alpha(
            alpha, cdiv(alpha.numel(), BLOCK), a, b, alpha, alpha.numel(), *strides, A_LARGEST=a_largest,
            B_LARGEST=b_largest, BLOCK=BLOCK, num_warps=1,
        )  # fmt: skip
    return alpha
