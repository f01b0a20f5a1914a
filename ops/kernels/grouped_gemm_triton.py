"""The Triton kernels of `ops.kernels.grouped_gemm`, which says what they compute and launches them."""

import triton
import triton.language as tl

from recipes.kernels.rounding import round_to, widen
from recipes.kernels.row_tiles import find_tile


@triton.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_kernel(
    a_ptr,  # [T, R], rows a_stride apart
    w_ptr,  # [G, R, C] at distances w_stride_g, w_stride_r, w_stride_c
    offsets_ptr,  # [G + 1] int64
    bias_ptr,  # [G, C] or None
    scales_ptr,  # [T] or None
    alpha_ptr,  # [G] float32 or None
    out_ptr,  # [T, C], rows out_stride apart
    rows,
    num_groups,
    R,
    C,
    a_stride,
    w_stride_g,
    w_stride_r,
    w_stride_c,
    out_stride,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[t, c] = alpha_g * sum_r a[t, r] w[g, r, c] + scales[t] * bias[g, c], a tile of one group a program."""
    num_tiles_n = tl.cdiv(C, BLOCK_N)
    group, first, end = find_tile(offsets_ptr, tl.program_id(0) // num_tiles_n, rows, num_groups, BLOCK_M)
    if first >= end:
        return
    first_c = (tl.program_id(0) % num_tiles_n) * BLOCK_N
    offs_t = tl.arange(0, BLOCK_M)  # from here on offsets within the tile, which fit 32 bits
    offs_c = tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_K)
    mask_t = offs_t < end - first
    mask_c = offs_c < C - first_c

    a_ptr += first * a_stride
    w_ptr += group.to(tl.int64) * w_stride_g + first_c.to(tl.int64) * w_stride_c
    offs_a = offs_t[:, None] * a_stride + offs_r[None, :]  # [BLOCK_M, BLOCK_K]
    offs_w = offs_r[:, None] * w_stride_r + offs_c[None, :] * w_stride_c  # [BLOCK_K, BLOCK_N]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for r in range(0, tl.where(group < num_groups, R, 0), BLOCK_K):
        mask_r = offs_r < R - r
        a = widen(tl.load(a_ptr + offs_a, mask=mask_t[:, None] & mask_r[None, :], other=0.0))
        w = widen(tl.load(w_ptr + offs_w, mask=mask_r[:, None] & mask_c[None, :], other=0.0))
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
        a_ptr += BLOCK_K
        w_ptr += tl.cast(w_stride_r, tl.int64) * BLOCK_K

    if alpha_ptr is not None:
        acc *= tl.load(alpha_ptr + group, mask=group < num_groups, other=0.0)
    if bias_ptr is not None:
        bias_ptr += group.to(tl.int64) * C + first_c
        bias = tl.load(bias_ptr + offs_c, mask=mask_c & (group < num_groups), other=0.0).to(tl.float32)[None, :]
        if scales_ptr is not None:
            # scales of rows that belong to no group may be anything
            mask_s = mask_t & (group < num_groups)
            bias *= tl.load(scales_ptr + first + offs_t, mask=mask_s, other=0.0).to(tl.float32)[:, None]
        acc += bias
    out_ptr += first * out_stride + first_c
    offs_out = offs_t[:, None] * out_stride + offs_c[None, :]
    tl.store(out_ptr + offs_out, round_to(acc, out_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_c[None, :])


@triton.jit
def k_grouped_kernel(
    dy_ptr,  # [T, N], rows dy_stride apart
    x_ptr,  # [T, K], rows x_stride apart
    offsets_ptr,  # [G + 1] int64
    alpha_ptr,  # [G] float32 or None
    dw_ptr,  # [G, N, K] contiguous
    N,
    K,
    dy_stride,
    x_stride,
    ACCUMULATE: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dw[g, n, k] = alpha_g * sum_t dy[t, n] x[t, k] over the rows of group g, a tile of one group a program.

    ACCUMULATE: dw += it, but for groups without rows.
    """
    num_tiles_n = tl.cdiv(K, BLOCK_N)
    num_tiles = tl.cdiv(N, BLOCK_M) * num_tiles_n
    group = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    begin = tl.load(offsets_ptr + group)
    size = (tl.load(offsets_ptr + group + 1) - begin).to(tl.int32)
    if ACCUMULATE and size == 0:
        return

    first_n = (tile // num_tiles_n) * BLOCK_M
    first_k = (tile % num_tiles_n) * BLOCK_N
    offs_n = tl.arange(0, BLOCK_M)  # from here on offsets within the tile, which fit 32 bits
    offs_k = tl.arange(0, BLOCK_N)
    offs_t = tl.arange(0, BLOCK_K)
    mask_n = offs_n < N - first_n
    mask_k = offs_k < K - first_k
    dy_ptr += begin * dy_stride + first_n
    x_ptr += begin * x_stride + first_k
    offs_dy = offs_t[None, :] * dy_stride + offs_n[:, None]  # [BLOCK_M, BLOCK_K]
    offs_x = offs_t[:, None] * x_stride + offs_k[None, :]  # [BLOCK_K, BLOCK_N]
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for t in range(0, size, BLOCK_K):
        mask_t = offs_t < size - t
        dy = widen(tl.load(dy_ptr + offs_dy, mask=mask_n[:, None] & mask_t[None, :], other=0.0))
        x = widen(tl.load(x_ptr + offs_x, mask=mask_t[:, None] & mask_k[None, :], other=0.0))
        acc = tl.dot(dy, x, acc, input_precision=PRECISION)
        dy_ptr += tl.cast(dy_stride, tl.int64) * BLOCK_K
        x_ptr += tl.cast(x_stride, tl.int64) * BLOCK_K

    if alpha_ptr is not None:
        # alpha of a group without rows may be anything
        acc *= tl.load(alpha_ptr + group, mask=size > 0, other=0.0)
    dw_ptr += group * N * K + first_n.to(tl.int64) * K + first_k
    offs_dw = offs_n[:, None] * K + offs_k[None, :]
    mask_dw = mask_n[:, None] & mask_k[None, :]
    if ACCUMULATE:
        acc += widen(tl.load(dw_ptr + offs_dw, mask=mask_dw, other=0.0)).to(tl.float32)
    tl.store(dw_ptr + offs_dw, round_to(acc, dw_ptr.dtype.element_ty), mask=mask_dw)


@triton.jit
def bias_grad_kernel(
    dy_ptr,  # [T, N], rows dy_stride apart
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
        dy_ptrs = dy_ptr + offs_t[:, None] * dy_stride + offs_n[None, :]
        dy = tl.load(dy_ptrs, mask=mask_t[:, None] & mask_n[None, :], other=0.0).to(tl.float32)
        if scales_ptr is not None:
            dy *= tl.load(scales_ptr + offs_t, mask=mask_t, other=0.0).to(tl.float32)[:, None]
        acc += dy
    db = tl.sum(acc, axis=0)
    tl.store(db_ptr + group * N + offs_n, round_to(db, db_ptr.dtype.element_ty), mask=mask_n)
