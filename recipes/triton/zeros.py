"""Memory of zeros by a launch: between other work torch.zeros takes the host 60 to 75 us, this 12
(`bench/results/tuning.md`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from recipes.triton.gates import tl, triton
from recipes.triton.launch import Launch, cdiv
from recipes.triton.repeated import ZerosLaunch

BLOCK = 4096


@triton.jit(do_not_specialize=["words"])
def zeros_kernel(x_ptr, words, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(x_ptr + at, 0, mask=at < words)


_zeros = Launch(zeros_kernel)
_compiled: dict[torch.device, Any] = {}


def zero_triton(x: Tensor, words: int) -> Any:
    """Makes the first `words` of contiguous int32 0, on any device: tests bring CPU tensors, under the interpreter.
    Returns the compiled kernel."""
    return _zeros(x, cdiv(words, BLOCK), x, words, BLOCK=BLOCK, num_warps=4)


def zeros_launch(device: torch.device, nbytes: int) -> ZerosLaunch | None:
    """The launch that makes so many bytes from a multiple of 16 on 0. None if none does, or if the kernel would have to
    be loaded while a stream captures."""
    if nbytes % 16 or not 0 < nbytes < 2**31:
        return None
    if device not in _compiled:
        if torch.cuda.is_current_stream_capturing():
            return None
        _compiled[device] = zero_triton(torch.empty(4, dtype=torch.int32, device=device), 4)
    words = nbytes // 4
    return ZerosLaunch(_compiled[device], (cdiv(words, BLOCK), 1, 1), (words, BLOCK))
