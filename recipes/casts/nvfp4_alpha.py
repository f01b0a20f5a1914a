"""The factor of NVFP4 that is left outside the codes and block scales.

    alpha = fl(amax / largest)      1 if amax is Inf; largest = 2688 = 6 * 448, or 6 B of four over six

amax and alpha are float32, of any shape. The quotient is rounded once, to nearest. Graph-safe: nothing is read on the
host. Source: the second scale of TransformerEngine's NVFP4BlockScaling (read at d0067d0), inverted.
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


@triton.jit(do_not_specialize=["count"])
def alpha_kernel(amax_ptr, alpha_ptr, count, LARGEST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    amax = tl.load(amax_ptr + at, mask=at < count, other=0.0)
    alpha = tl.div_rn(amax, tl.full([BLOCK], LARGEST, tl.float32))
    tl.store(alpha_ptr + at, tl.where(tl.abs(amax) == float("inf"), 1.0, alpha), mask=at < count)


_alpha = Launch(alpha_kernel)


def alpha_from_amax(amax: Tensor, largest: float = RANGE) -> Tensor:
    """alpha, in new memory."""
    return alpha_from_amax_triton(amax, largest) if amax.is_cuda else alpha_from_amax_ref(amax, largest)


def alpha_from_amax_triton(amax: Tensor, largest: float = RANGE) -> Tensor:
    amax = amax.contiguous()
    alpha = torch.empty(amax.shape, dtype=amax.dtype, device=amax.device)
    if has_work(amax):
        _alpha(amax, cdiv(amax.numel(), BLOCK), amax, alpha, amax.numel(), LARGEST=largest, BLOCK=BLOCK, num_warps=1)
    return alpha
