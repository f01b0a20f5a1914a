"""The kernels on pointers of `ops.kernels.grouped_gemm`, for what descriptors cannot describe.

They need neither alignment nor Hopper, and a program has one tile. Operands are values, or float8 codes. Scales are
factors of groups (of values: alpha, as the first operand's) or, of codes, of rows and columns or of blocks. PROMOTE:
split accumulation, see `float8`.
"""

from ops.kernels.grouped_gemm.float8_persistent import add_product, times_vectors
from ops.kernels.grouped_gemm.high_precision_triton import with_bias
from ops.kernels.grouped_gemm.persistent_schedule import tile_in_bands
from recipes.triton.gates import tl, triton
from recipes.triton.rounding import round_to, widen
from recipes.triton.row_slots import find_tile


@triton.jit
def times_scale(acc, scale_ptr, stride, group, exists):
    """acc times the scale of its group, if groups have scales; that of one which does not exist may be anything."""
    if scale_ptr is not None:
        acc *= tl.load(scale_ptr + group * stride, mask=exists, other=0.0)
    return acc


@triton.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_kernel(
    a_ptr,  # [T, R], rows a_stride apart
    w_ptr,  # [G, R, C] at distances w_stride_g, w_stride_r, w_stride_c
    offsets_ptr,  # [G + 1] int64
    bias_ptr,  # [G, C] or None
    scales_ptr,  # [T] or None
    a_scale_ptr,  # None; [G], a_scale_stride apart; or [T]; or [ceil(R/128), T]
    w_scale_ptr,  # None; [G], w_scale_stride apart; [G, C]; [G, ceil(C/128), ceil(R/128)]; [G, ceil(R/128), C]
    out_ptr,  # [T, C], rows out_stride apart
    rows,
    num_groups,
    R,
    C,
    a_stride,
    w_stride_g,
    w_stride_r,
    w_stride_c,
    a_scale_stride,
    w_scale_stride,
    out_stride,
    LAYOUT: tl.constexpr,  # of the scales: "tensor", "vector", "square" or "row"
    PROMOTE: tl.constexpr,
    PRECISION: tl.constexpr,  # of what is not promoted
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[t, c] = sum_r a[t, r] w[g, r, c] + scales[t] * bias[g, c], a tile of one group a program."""
    BLOCKWISE: tl.constexpr = LAYOUT == "square" or LAYOUT == "row"
    num_slots = rows // BLOCK_M + num_groups + 1
    slot, tile_c = tile_in_bands(tl.program_id(0), num_slots, tl.cdiv(C, BLOCK_N), BAND)
    group, first, end = find_tile(offsets_ptr, slot, rows, num_groups, BLOCK_M)
    if first >= end:
        return
    first_c = tile_c * BLOCK_N
    offs_t = tl.arange(0, BLOCK_M)  # from here on offsets within the tile, which fit 32 bits
    offs_c = tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_K)
    mask_t = offs_t < end - first
    mask_c = offs_c < C - first_c

    group_64 = group.to(tl.int64)
    a_ptr += first * a_stride
    w_ptr += group_64 * w_stride_g + first_c.to(tl.int64) * w_stride_c
    offs_a = offs_t[:, None] * a_stride + offs_r[None, :]  # [BLOCK_M, BLOCK_K]
    offs_w = offs_r[:, None] * w_stride_r + offs_c[None, :] * w_stride_c  # [BLOCK_K, BLOCK_N]
    if LAYOUT != "tensor":
        a_scale_ptr += first
    if LAYOUT == "square":
        w_scale_ptr += (group_64 * tl.cdiv(C, 128) + first_c // 128) * tl.cdiv(R, BLOCK_K)
    if LAYOUT == "row":
        w_scale_ptr += group_64 * tl.cdiv(R, BLOCK_K) * C + first_c
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    active = group < num_groups  # rows past the sum have a product of no steps
    for r in range(0, tl.where(active, R, 0), BLOCK_K):
        mask_r = offs_r < R - r
        a = widen(tl.load(a_ptr + offs_a, mask=mask_t[:, None] & mask_r[None, :], other=0.0))
        w = widen(tl.load(w_ptr + offs_w, mask=mask_r[:, None] & mask_c[None, :], other=0.0))
        a_ptr += BLOCK_K
        w_ptr += tl.cast(w_stride_r, tl.int64) * BLOCK_K
        # Scales are loaded before the product, which then hides how long that takes.
        scale_t, scale_c = None, None
        if BLOCKWISE:
            scale_t = tl.load(a_scale_ptr + offs_t, mask=mask_t, other=0.0)
            a_scale_ptr += rows
        if LAYOUT == "square":
            scale_t *= tl.load(w_scale_ptr)
            w_scale_ptr += 1
        if LAYOUT == "row":
            scale_c = tl.load(w_scale_ptr + offs_c, mask=mask_c, other=0.0)
            w_scale_ptr += C
        if PROMOTE:
            acc = add_product(acc, a, w.T, scale_t, scale_c, PROMOTE)
        else:
            acc = tl.dot(a, w, acc, input_precision=PRECISION)

    if LAYOUT == "tensor":
        # One after the other: the product of two scales may be too small for float32.
        acc = times_scale(acc, a_scale_ptr, a_scale_stride, group, active)
        acc = times_scale(acc, w_scale_ptr, w_scale_stride, group, active)
    if LAYOUT == "vector":
        w_scale_ptr += group_64 * C + first_c
        height, width = tl.where(active, end - first, 0), tl.where(active, C - first_c, 0)
        acc = times_vectors(acc, a_scale_ptr, w_scale_ptr, height, width)
    if bias_ptr is not None:
        acc = with_bias(acc, bias_ptr, scales_ptr, group, num_groups, first, end, first_c, C)
    out_ptr += first * out_stride + first_c
    offs_out = offs_t[:, None] * out_stride + offs_c[None, :]
    tl.store(out_ptr + offs_out, round_to(acc, out_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_c[None, :])


@triton.jit
def k_grouped_kernel(
    dy_ptr,  # [N, T] at distances dy_stride_n, dy_stride_t
    x_ptr,  # [T, K] at distances x_stride_t, x_stride_k
    offsets_ptr,  # [G + 1] int64
    dy_scale_ptr,  # None; [G], dy_scale_stride apart; or [G, N]; or [T/128, N]
    x_scale_ptr,  # None; [G], x_scale_stride apart; or [G, K]; or [T/128, K]
    dw_ptr,  # [G, N, K], contiguous matrices dw_stride apart
    N,
    K,
    dy_stride_n,
    dy_stride_t,
    x_stride_t,
    x_stride_k,
    dy_scale_stride,
    x_scale_stride,
    dw_stride,
    ACCUMULATE: tl.constexpr,
    ALIGNED: tl.constexpr,  # offsets are multiples of it
    LAYOUT: tl.constexpr,  # of the scales: "tensor", "vector" or "row"; then offsets are multiples of 128
    PROMOTE: tl.constexpr,
    PRECISION: tl.constexpr,  # of what is not promoted
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """dw[g, n, k] = sum_t dy[n, t] x[t, k] over the rows of group g, a tile of one group a program.

    ACCUMULATE: dw += it, but for groups without rows.
    """
    BLOCKWISE: tl.constexpr = LAYOUT == "row"
    num_tiles_n = tl.cdiv(N, BLOCK_M)
    num_tiles_k = tl.cdiv(K, BLOCK_N)
    num_tiles = num_tiles_n * num_tiles_k
    group = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile_n, tile_k = tile_in_bands(tl.program_id(0) % num_tiles, num_tiles_n, num_tiles_k, BAND)
    begin = tl.multiple_of(tl.load(offsets_ptr + group), ALIGNED)
    size = tl.multiple_of((tl.load(offsets_ptr + group + 1) - begin).to(tl.int32), ALIGNED)
    if ACCUMULATE and size == 0:
        return

    first_n = tile_n * BLOCK_M
    first_k = tile_k * BLOCK_N
    offs_n = tl.arange(0, BLOCK_M)  # from here on offsets within the tile, which fit 32 bits
    offs_k = tl.arange(0, BLOCK_N)
    offs_t = tl.arange(0, BLOCK_K)
    mask_n = offs_n < N - first_n
    mask_k = offs_k < K - first_k
    dy_ptr += begin * dy_stride_t + first_n.to(tl.int64) * dy_stride_n
    x_ptr += begin * x_stride_t + first_k.to(tl.int64) * x_stride_k
    offs_dy = offs_n[:, None] * dy_stride_n + offs_t[None, :] * dy_stride_t  # [BLOCK_M, BLOCK_K]
    offs_x = offs_t[:, None] * x_stride_t + offs_k[None, :] * x_stride_k  # [BLOCK_K, BLOCK_N]
    if BLOCKWISE:
        dy_scale_ptr += begin // 128 * N + first_n
        x_scale_ptr += begin // 128 * K + first_k
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for t in range(0, size, BLOCK_K):
        mask_t = offs_t < size - t
        dy = widen(tl.load(dy_ptr + offs_dy, mask=mask_n[:, None] & mask_t[None, :], other=0.0))
        x = widen(tl.load(x_ptr + offs_x, mask=mask_t[:, None] & mask_k[None, :], other=0.0))
        dy_ptr += tl.cast(dy_stride_t, tl.int64) * BLOCK_K
        x_ptr += tl.cast(x_stride_t, tl.int64) * BLOCK_K
        scale_n, scale_k = None, None
        if BLOCKWISE:
            scale_n = tl.load(dy_scale_ptr + offs_n, mask=mask_n, other=0.0)
            scale_k = tl.load(x_scale_ptr + offs_k, mask=mask_k, other=0.0)
            dy_scale_ptr += N
            x_scale_ptr += K
        if PROMOTE:
            acc = add_product(acc, dy, x.T, scale_n, scale_k, PROMOTE)
        else:
            acc = tl.dot(dy, x, acc, input_precision=PRECISION)

    if LAYOUT == "tensor":
        acc = times_scale(acc, dy_scale_ptr, dy_scale_stride, group, size > 0)
        acc = times_scale(acc, x_scale_ptr, x_scale_stride, group, size > 0)
    if LAYOUT == "vector":
        dy_scale_ptr += group * N + first_n
        x_scale_ptr += group * K + first_k
        acc = times_vectors(acc, dy_scale_ptr, x_scale_ptr, tl.where(size > 0, N - first_n, 0), K - first_k)
    dw_ptr += group * dw_stride + first_n.to(tl.int64) * K + first_k
    offs_dw = offs_n[:, None] * K + offs_k[None, :]
    mask_dw = mask_n[:, None] & mask_k[None, :]
    if ACCUMULATE:
        acc += widen(tl.load(dw_ptr + offs_dw, mask=mask_dw, other=0.0)).to(tl.float32)
    tl.store(dw_ptr + offs_dw, round_to(acc, dw_ptr.dtype.element_ty), mask=mask_dw)
