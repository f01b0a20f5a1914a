"""The kernels on pointers of `ops.kernels.grouped_gemm.float8`, for what descriptors cannot describe.

They need neither alignment nor Hopper. Programs take tile after tile, each in a loop of its own.
"""

from ops.kernels.grouped_gemm.float8_persistent import add_product, scale_sums
from ops.kernels.grouped_gemm.high_precision_triton import with_bias
from ops.kernels.grouped_gemm.persistent_schedule import tile_in_bands
from recipes.triton.gates import tl, triton
from recipes.triton.rounding import round_to, widen
from recipes.triton.row_slots import find_tile


@triton.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_float8_kernel(
    a_ptr,  # [T, R] codes, rows a_stride apart
    b_ptr,  # [G, C, R] codes
    out_ptr,  # [T, C], rows out_stride apart
    a_scale_ptr,  # [G], a_scale_stride apart; or [ceil(R/128), T]
    b_scale_ptr,  # [G], b_scale_stride apart; or [G, ceil(C/128), ceil(R/128)]; or [G, ceil(R/128), C]
    offsets_ptr,  # [G + 1] int64
    bias_ptr,  # [G, C] or None
    scales_ptr,  # [T] or None
    rows,
    num_groups,
    R,
    C,
    a_stride,
    out_stride,
    a_scale_stride,
    b_scale_stride,
    LAYOUT: tl.constexpr,  # "tensor", "square" or "row"
    PROMOTE: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[t, c] = sum_r a[t, r] b[g, c, r] + scales[t] bias[g, c], tile after tile of one group."""
    num_slots = rows // BLOCK_M + num_groups + 1
    num_tiles_c = tl.cdiv(C, BLOCK_N)
    num_steps = tl.cdiv(R, BLOCK_K)
    offs_t = tl.arange(0, BLOCK_M)  # offsets within the tile, which fit 32 bits
    offs_c = tl.arange(0, BLOCK_N)
    offs_r = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), num_slots * num_tiles_c, tl.num_programs(0)):
        slot, tile_c = tile_in_bands(tile, num_slots, num_tiles_c, BAND)
        group, first, end = find_tile(offsets_ptr, slot, rows, num_groups, BLOCK_M)
        if first < end:
            first_c = tile_c * BLOCK_N
            mask_t = offs_t < end - first
            mask_c = offs_c < C - first_c
            group_64 = group.to(tl.int64)
            a_ptrs = a_ptr + first * a_stride + (offs_t[:, None] * a_stride + offs_r[None, :])
            b_ptrs = b_ptr + (group_64 * C + first_c) * R + (offs_c[:, None] * R + offs_r[None, :])
            if LAYOUT != "tensor":
                a_scale_ptrs = a_scale_ptr + first + offs_t
            if LAYOUT == "square":
                b_scale_ptrs = b_scale_ptr + (group_64 * tl.cdiv(C, 128) + first_c // 128) * num_steps
            if LAYOUT == "row":
                b_scale_ptrs = b_scale_ptr + group_64 * num_steps * C + first_c + offs_c

            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            # Rows past the sum have a product of no steps.
            active = group < num_groups
            for step in range(tl.where(active, num_steps, 0)):
                mask_r = offs_r < R - step * BLOCK_K
                a_tile = tl.load(a_ptrs, mask=mask_t[:, None] & mask_r[None, :], other=0.0)
                b_tile = tl.load(b_ptrs, mask=mask_c[:, None] & mask_r[None, :], other=0.0)
                a_ptrs += BLOCK_K
                b_ptrs += BLOCK_K
                # Scales are loaded before the product, which then hides how long that takes.
                scale_t, scale_c = None, None
                if LAYOUT != "tensor":
                    scale_t = tl.load(a_scale_ptrs, mask=mask_t, other=0.0)
                    a_scale_ptrs += rows
                if LAYOUT == "square":
                    scale_t *= tl.load(b_scale_ptrs)
                    b_scale_ptrs += 1
                if LAYOUT == "row":
                    scale_c = tl.load(b_scale_ptrs, mask=mask_c, other=0.0)
                    b_scale_ptrs += C
                acc = add_product(acc, widen(a_tile), widen(b_tile), scale_t, scale_c, PROMOTE)

            if LAYOUT == "tensor":
                a_alpha = tl.load(a_scale_ptr + group * a_scale_stride, mask=active, other=0.0)
                b_alpha = tl.load(b_scale_ptr + group * b_scale_stride, mask=active, other=0.0)
                acc = scale_sums(acc, a_alpha, b_alpha)
            if bias_ptr is not None:
                acc = with_bias(acc, bias_ptr, scales_ptr, group, num_groups, first, end, first_c, C)
            out_ptrs = out_ptr + first * out_stride + first_c + (offs_t[:, None] * out_stride + offs_c[None, :])
            tl.store(out_ptrs, round_to(acc, out_ptr.dtype.element_ty), mask=mask_t[:, None] & mask_c[None, :])


@triton.jit
def k_grouped_float8_kernel(
    dy_ptr,  # [N, P] codes, rows dy_stride apart
    x_ptr,  # [K, P] codes, rows x_stride apart
    out_ptr,  # [G, N, K], contiguous matrices out_stride apart
    dy_scale_ptr,  # [G], dy_scale_stride apart; or [P/128, N]
    x_scale_ptr,  # [G], x_scale_stride apart; or [P/128, K]
    offsets_ptr,  # [G + 1] int64, multiples of 16; of 128 for block scales
    num_groups,
    N,
    K,
    dy_stride,
    x_stride,
    dy_scale_stride,
    x_scale_stride,
    out_stride,
    ACCUMULATE: tl.constexpr,
    REVERSE: tl.constexpr,  # the last group comes first in out
    BLOCKWISE: tl.constexpr,  # scales of 1x128
    PROMOTE: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[g, n, k] = sum_p dy[n, p] x[k, p] over the columns of group g, tile after tile.

    ACCUMULATE: out += it, but for groups without columns.
    """
    LEAST: tl.constexpr = 1 if ACCUMULATE else 0
    num_tiles_n = tl.cdiv(N, BLOCK_M)
    num_tiles_k = tl.cdiv(K, BLOCK_N)
    num_tiles = num_tiles_n * num_tiles_k
    offs_n = tl.arange(0, BLOCK_M)  # offsets within the tile, which fit 32 bits
    offs_k = tl.arange(0, BLOCK_N)
    offs_p = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), num_groups * num_tiles, tl.num_programs(0)):
        group = tile // num_tiles
        tile_n, tile_k = tile_in_bands(tile % num_tiles, num_tiles_n, num_tiles_k, BAND)
        begin = tl.multiple_of(tl.load(offsets_ptr + group), 16)
        size = tl.multiple_of((tl.load(offsets_ptr + group + 1) - begin).to(tl.int32), 16)
        if size >= LEAST:
            first_n = tile_n * BLOCK_M
            first_k = tile_k * BLOCK_N
            mask_n = offs_n < N - first_n
            mask_k = offs_k < K - first_k
            dy_ptrs = dy_ptr + first_n.to(tl.int64) * dy_stride + begin
            dy_ptrs += offs_n[:, None] * dy_stride + offs_p[None, :]
            x_ptrs = x_ptr + first_k.to(tl.int64) * x_stride + begin + (offs_k[:, None] * x_stride + offs_p[None, :])
            if BLOCKWISE:
                dy_scale_ptrs = dy_scale_ptr + begin // 128 * N + first_n + offs_n
                x_scale_ptrs = x_scale_ptr + begin // 128 * K + first_k + offs_k

            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for p in range(0, size, BLOCK_K):
                mask_p = offs_p < size - p
                dy_tile = tl.load(dy_ptrs, mask=mask_n[:, None] & mask_p[None, :], other=0.0)
                x_tile = tl.load(x_ptrs, mask=mask_k[:, None] & mask_p[None, :], other=0.0)
                dy_ptrs += BLOCK_K
                x_ptrs += BLOCK_K
                scale_n, scale_k = None, None
                if BLOCKWISE:
                    scale_n = tl.load(dy_scale_ptrs, mask=mask_n, other=0.0)
                    scale_k = tl.load(x_scale_ptrs, mask=mask_k, other=0.0)
                    dy_scale_ptrs += N
                    x_scale_ptrs += K
                acc = add_product(acc, widen(dy_tile), widen(x_tile), scale_n, scale_k, PROMOTE)

            if not BLOCKWISE:
                # Scales of a group without columns may be anything.
                dy_alpha = tl.load(dy_scale_ptr + group * dy_scale_stride, mask=size > 0, other=0.0)
                x_alpha = tl.load(x_scale_ptr + group * x_scale_stride, mask=size > 0, other=0.0)
                acc = scale_sums(acc, dy_alpha, x_alpha)
            place = num_groups - 1 - group if REVERSE else group
            out_ptrs = out_ptr + place.to(tl.int64) * out_stride + first_n.to(tl.int64) * K + first_k
            out_ptrs += offs_n[:, None] * K + offs_k[None, :]
            mask = mask_n[:, None] & mask_k[None, :]
            if ACCUMULATE:
                acc += widen(tl.load(out_ptrs, mask=mask, other=0.0)).to(tl.float32)
            tl.store(out_ptrs, round_to(acc, out_ptr.dtype.element_ty), mask=mask)
