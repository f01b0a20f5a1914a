"""Memory of zeros by a launch: between other work torch.zeros takes the host 60 to 75 us, this 12
(`bench/results/tuning.md`)."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from recipes.triton.gates import tl, triton

BLOCK = 4096


@triton.jit(do_not_specialize=["words"])
def zeros_kernel(x_ptr, words, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 0, mask=at < words)


def is_launched(nbytes: int) -> bool:
    """Whether the kernel makes so many bytes 0."""
    return 0 < nbytes < 2**31 and nbytes % 16 == 0


@cache
def compiled_zeros(device: int) -> Any:
    """The kernel for whole words at a multiple of 16 bytes, compiled for this GPU, which is the current one."""
    return zeros_kernel.warmup(torch.int32, BLOCK, BLOCK=BLOCK, num_warps=4, grid=(1,))
