"""The Triton kernel of `ops.kernels.grouped_gemm.bias_grad`."""
# T rows, G groups, N out features

from recipes.triton.gates import tl, triton
from recipes.triton.rounding import round_to


@triton.jit
def bias_grad_kernel(
    dy_ptr,  # [T, N], or [S, N] of which row_of names the rows; dy_stride apart
    row_of_ptr,  # [T] int64 or None
    offsets_ptr,  # [G + 1] int64
    scales_ptr,  # [T] or None
    db_ptr,  # [G, N] contiguous
    N,
    dy_stride,
    BLOCK_T: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """db[g, n] = sum_t scales[t] dy[t, n] over the rows of group g, a block of columns of one group a program."""
    num_tiles_n = tl.cdiv(N, BLOCK_N)
    group = (tl.program_id(0) // num_tiles_n).to(tl.int64)
    begin = tl.load(offsets_ptr + group)
    end = tl.load(offsets_ptr + group + 1)
    offs_n = (tl.program_id(0) % num_tiles_n) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask_n = offs_n < N
    acc = tl.zeros((BLOCK_T, BLOCK_N), tl.float32)
    for t in range(0, (end - begin).to(tl.int32), BLOCK_T):
        offs_t = begin + t + tl.arange(0, BLOCK_T)
        mask_t = offs_t < end
        row = offs_t
        if row_of_ptr is not None:
            row = tl.load(row_of_ptr + offs_t, mask=mask_t, other=0)
        dy_ptrs = dy_ptr + row[:, None] * dy_stride + offs_n[None, :]
        dy = tl.load(dy_ptrs, mask=mask_t[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
        if scales_ptr is not None:
            dy *= tl.load(scales_ptr + offs_t, mask=mask_t, other=0.0).to(tl.float32)[:, None]
        acc += dy
    db = tl.sum(acc, axis=0)
    tl.store(db_ptr + group * N + offs_n, round_to(db, db_ptr.dtype.element_ty), mask=mask_n)
