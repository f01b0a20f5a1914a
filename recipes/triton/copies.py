"""A copy of few numbers by a launch: between other work torch's `clone` takes the host 51 us, a launch 8 to 19
(`bench/results/tuning.md`)."""

import torch
from torch import Tensor

from recipes.triton.gates import tl, triton
from recipes.triton.launch import Launch, cdiv, launcher

BLOCK = 1024


def copy_ref(x: Tensor) -> Tensor:
    """`copied` in plain torch."""
    return x.clone()


@triton.jit(do_not_specialize=["n"])
def copy_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


_copy = Launch(copy_kernel)


def copied(x: Tensor) -> Tensor:
    """The same contiguous numbers in memory of their own."""
    if not x.is_cuda or not x.is_contiguous():
        return copy_ref(x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    copy_triton(x, out)
    return out


@launcher("fuser::copy", mutates=["out"])
def copy_triton(x: Tensor, out: Tensor) -> None:
    """Launches the kernel. Both are contiguous, and not empty."""
    _copy(x, cdiv(x.numel(), BLOCK), x, out, x.numel(), BLOCK=BLOCK)
