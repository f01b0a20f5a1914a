"""Sums of the shares that programs have found of each row's gradient: out[t] = sum over b of shares[b, t], in float32.

Between other work the sum of torch takes the host 60 to 70 us, this launch 12 (`bench/results/tuning.md`).
"""

from torch import Tensor

from recipes.triton.gates import tl, triton
from recipes.triton.launch import Launch, cdiv, has_work, launcher

BLOCK_B, BLOCK_T = 8, 256


def sum_shares(shares_BT: Tensor) -> Tensor:
    """[B, T] float32 -> [T]; on a GPU shares b, b + 8, b + 16, ... are added in their order, and then these eight."""
    if not shares_BT.is_cuda:
        return shares_BT.sum(0)
    out = shares_BT.new_empty(shares_BT.shape[1])
    sum_shares_triton(shares_BT, out)
    return out


@triton.jit(do_not_specialize=["B"])
def sum_shares_kernel(shares_ptr, out_ptr, B, T, BLOCK_B: tl.constexpr, BLOCK_T: tl.constexpr):
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
    total = tl.zeros([BLOCK_B, BLOCK_T], tl.float32)
    for first in range(0, B, BLOCK_B):
        b = first + tl.arange(0, BLOCK_B)[:, None]
        total += tl.load(shares_ptr + b.to(tl.int64) * T + t, mask=(b < B) & (t < T), other=0.0)
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    tl.store(out_ptr + t, tl.sum(total, axis=0), mask=t < T)


_sum_shares = Launch(sum_shares_kernel)


@launcher("fuser::sum_shares", mutates=["out"])
def sum_shares_triton(shares_BT: Tensor, out: Tensor) -> None:
    """Contiguous float32 [B, T] -> [T], on any device: tests bring CPU tensors, under the interpreter."""
    B, T = shares_BT.shape
    if has_work(out):
        _sum_shares(out, cdiv(T, BLOCK_T), shares_BT, out, B, T, BLOCK_B=BLOCK_B, BLOCK_T=BLOCK_T, num_warps=4)
