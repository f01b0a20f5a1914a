"""Memory of zeros by a launch: between other work torch.zeros takes the host 60 to 75 us, this 12
(`bench/results/tuning.md`)."""

from __future__ import annotations

from typing import Any

import torch

from recipes.triton.gates import tl, triton

BLOCK = 4096


@triton.jit(do_not_specialize=["words"])
def zeros_kernel(x_ptr, words, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 0, mask=at < words)


def compiled_zeros(device: int, nbytes: int = 16) -> Any | None:
    """The kernel for so many bytes from a multiple of 16 on, compiled for this GPU, the current one. None if it is not
    for so many, or would have to be loaded while a stream captures."""
    if nbytes % 16 or not 0 < nbytes < 2**31:
        return None
    if device not in _compiled and not torch.cuda.is_current_stream_capturing():
        _compiled[device] = zeros_kernel.warmup(torch.int32, BLOCK, BLOCK=BLOCK, num_warps=4, grid=(1,))
    return _compiled.get(device)


_compiled: dict[int, Any] = {}
