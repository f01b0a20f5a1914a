"""The Triton kernels of `ops.kernels.grouped_gemm_float8`, which says what they compute and launches them."""

import triton
import triton.language as tl

from ops.kernels.grouped_gemm_triton import finish_k_grouped, store_rows, with_bias
from ops.kernels.persistent_tiles import halves, tile_in_bands
from ops.kernels.ragged_tma import ragged_indices
from recipes.kernels.rounding import round_to, widen
from recipes.kernels.row_tiles import find_tile


@triton.jit
def promote(acc, a, b, row_scale, column_scale):
    """acc + a b^T, times a factor a row and a factor a column; without those that are None."""
    product = tl.dot(widen(a), widen(b).T)
    if row_scale is not None:
        product *= row_scale[:, None]
    if column_scale is not None:
        product *= column_scale[None, :]
    return acc + product


@triton.jit
def store_m_grouped(
    acc,
    out,
    out_ptr,
    a_scale_ptr,  # None where the sums are scaled already
    b_scale_ptr,
    bias_ptr,
    scales_ptr,
    group,
    num_groups,
    first,
    end,
    first_c,
    C,
    out_stride,
    TMA: tl.constexpr,
):
    """Scales acc, adds the bias, rounds, and stores rows first to end and columns first_c to C of the output."""
    offs_t = tl.arange(0, acc.shape[0])
    offs_c = tl.arange(0, acc.shape[1])
    mask_t = offs_t < end - first
    mask_c = offs_c < C - first_c
    active = group < num_groups
    if a_scale_ptr is not None:
        # One after the other: the product of two scales may be too small for float32.
        acc *= tl.load(a_scale_ptr, mask=active, other=0.0)
        acc *= tl.load(b_scale_ptr, mask=active, other=0.0)
    if bias_ptr is not None:
        acc = with_bias(acc, bias_ptr, scales_ptr, group, num_groups, first, end, first_c, C)
    if TMA:
        store_rows(out, acc, first, end, first_c)
    else:
        rounded = round_to(acc, out_ptr.dtype.element_ty)
        out_ptrs = out_ptr + first * out_stride + first_c + (offs_t[:, None] * out_stride + offs_c[None, :])
        tl.store(out_ptrs, rounded, mask=mask_t[:, None] & mask_c[None, :])


@triton.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_float8_kernel(
    a,  # [T, R] codes: descriptor, or pointer to rows a_stride apart
    b,  # [G, C, R] codes: descriptor of [G * C, R], or pointer
    out,  # [T, C]: ragged descriptor, or None
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
    TMA: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[t, c] = sum_r a[t, r] b[g, c, r] + scales[t] bias[g, c], tile after tile of one group."""
    # A wide tile is promoted in halves: registers hold its sum and the product of one half.
    TWO: tl.constexpr = PROMOTE and BLOCK_N == 256
    WIDTH: tl.constexpr = BLOCK_N // 2 if TWO else BLOCK_N
    num_slots = rows // BLOCK_M + num_groups + 1
    num_tiles_c = tl.cdiv(C, BLOCK_N)
    num_steps = tl.cdiv(R, BLOCK_K)
    offs_t = tl.arange(0, BLOCK_M)  # offsets within the tile, which fit 32 bits
    offs_c = tl.arange(0, WIDTH)
    offs_r = tl.arange(0, BLOCK_K)
    for tile in range(tl.program_id(0), num_slots * num_tiles_c, tl.num_programs(0)):
        slot, tile_c = tile_in_bands(tile, num_slots, num_tiles_c, BAND)
        group, first, end = find_tile(offsets_ptr, slot, rows, num_groups, BLOCK_M)
        if first < end:
            first_c = tile_c * BLOCK_N
            mask_t = offs_t < end - first
            mask_c = offs_c < C - first_c
            group_64 = group.to(tl.int64)
            if TMA:
                first_a = first.to(tl.int32)
                first_b = group * C + first_c
            else:
                a_ptrs = a + first * a_stride + (offs_t[:, None] * a_stride + offs_r[None, :])
                b_ptrs = b + (group_64 * C + first_c) * R + (offs_c[:, None] * R + offs_r[None, :])
            if LAYOUT != "tensor":
                a_scale_ptrs = a_scale_ptr + first + offs_t
            if LAYOUT == "square":
                b_scale_ptrs = b_scale_ptr + (group_64 * tl.cdiv(C, 128) + first_c // 128) * num_steps
            if LAYOUT == "row":
                b_scale_ptrs = b_scale_ptr + group_64 * num_steps * C + first_c + offs_c

            acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
            right = acc
            # Rows past the sum have a product of no steps.
            for step in range(tl.where(group < num_groups, num_steps, 0)):
                r = step * BLOCK_K
                if TMA:
                    a_tile = a.load([first_a, r])
                    b_tile = b.load([first_b, r])
                    if TWO:
                        b_right = b.load([first_b + WIDTH, r])
                else:
                    mask_r = offs_r < R - r
                    a_tile = tl.load(a_ptrs, mask=mask_t[:, None] & mask_r[None, :], other=0.0)
                    b_tile = tl.load(b_ptrs, mask=mask_c[:, None] & mask_r[None, :], other=0.0)
                    a_ptrs += BLOCK_K
                    b_ptrs += BLOCK_K
                # Scales are loaded before the product, which then hides how long that takes.
                scale_t, scale_right, scale_c, scale_cright = None, None, None, None
                if LAYOUT != "tensor":
                    scale_t = tl.load(a_scale_ptrs, mask=mask_t, other=0.0)
                    scale_right = scale_t
                    a_scale_ptrs += rows
                if LAYOUT == "square":
                    if TWO:
                        scale_right *= tl.load(b_scale_ptrs + num_steps, mask=first_c + WIDTH < C, other=0.0)
                    scale_t *= tl.load(b_scale_ptrs)
                    b_scale_ptrs += 1
                if LAYOUT == "row":
                    scale_c = tl.load(b_scale_ptrs, mask=mask_c, other=0.0)
                    if TWO:
                        scale_cright = tl.load(b_scale_ptrs + WIDTH, mask=offs_c < C - first_c - WIDTH, other=0.0)
                    b_scale_ptrs += C
                if PROMOTE:
                    acc = promote(acc, a_tile, b_tile, scale_t, scale_c)
                    if TWO:
                        right = promote(right, a_tile, b_right, scale_right, scale_cright)
                else:
                    acc = tl.dot(widen(a_tile), widen(b_tile).T, acc)

            if LAYOUT == "tensor":
                a_alpha, b_alpha = a_scale_ptr + group * a_scale_stride, b_scale_ptr + group * b_scale_stride
            else:
                a_alpha, b_alpha = None, None
            if BLOCK_N == 256:
                if TWO:
                    left = acc
                else:
                    left, right = halves(acc)
                store_m_grouped(
                    left, out, out_ptr, a_alpha, b_alpha, bias_ptr, scales_ptr, group, num_groups, first, end,
                    first_c, C, out_stride, TMA,
                )  # fmt: skip
                store_m_grouped(
                    right, out, out_ptr, a_alpha, b_alpha, bias_ptr, scales_ptr, group, num_groups, first, end,
                    first_c + BLOCK_N // 2, C, out_stride, TMA,
                )  # fmt: skip
            else:
                store_m_grouped(
                    acc, out, out_ptr, a_alpha, b_alpha, bias_ptr, scales_ptr, group, num_groups, first, end,
                    first_c, C, out_stride, TMA,
                )  # fmt: skip


@triton.jit
def store_k_grouped(
    acc,
    out,
    out_ptr,
    dy_scale_ptr,  # None where the sums are scaled already
    x_scale_ptr,
    group,
    size,
    first_n,
    first_k,
    N,
    K,
    out_stride,
    ACCUMULATE: tl.constexpr,
    TMA: tl.constexpr,
):
    """Scales acc, adds what is there if ACCUMULATE, rounds, and stores rows first_n to N and columns first_k to K."""
    if dy_scale_ptr is not None:
        # Scales of a group without rows may be anything.
        acc *= tl.load(dy_scale_ptr, mask=size > 0, other=0.0)
        acc *= tl.load(x_scale_ptr, mask=size > 0, other=0.0)
    if TMA:
        finish_k_grouped(acc, out, group, first_n, first_k, ACCUMULATE)
    else:
        offs_n = tl.arange(0, acc.shape[0])
        offs_k = tl.arange(0, acc.shape[1])
        out_ptr += group.to(tl.int64) * out_stride + first_n.to(tl.int64) * K + first_k
        out_ptrs = out_ptr + (offs_n[:, None] * K + offs_k[None, :])
        mask = (offs_n < N - first_n)[:, None] & (offs_k < K - first_k)[None, :]
        if ACCUMULATE:
            acc += widen(tl.load(out_ptrs, mask=mask, other=0.0)).to(tl.float32)
        tl.store(out_ptrs, round_to(acc, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def k_grouped_float8_kernel(
    dy,  # [N, P] codes: ragged descriptor, or pointer to rows dy_stride apart
    x,  # [K, P] codes: ragged descriptor, or pointer to rows x_stride apart
    out,  # [G, N, K]: descriptor, or None
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
    TMA: tl.constexpr,
    BAND: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[g, n, k] = sum_p dy[n, p] x[k, p] over the columns of group g, tile after tile.

    ACCUMULATE: out += it, but for groups without columns.
    """
    TWO: tl.constexpr = PROMOTE and BLOCK_N == 256  # as above
    WIDTH: tl.constexpr = BLOCK_N // 2 if TWO else BLOCK_N
    LEAST: tl.constexpr = 1 if ACCUMULATE else 0
    num_tiles_n = tl.cdiv(N, BLOCK_M)
    num_tiles_k = tl.cdiv(K, BLOCK_N)
    num_tiles = num_tiles_n * num_tiles_k
    offs_n = tl.arange(0, BLOCK_M)  # offsets within the tile, which fit 32 bits
    offs_k = tl.arange(0, WIDTH)
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
            if not TMA:
                dy_ptrs = dy + first_n.to(tl.int64) * dy_stride + begin
                dy_ptrs += offs_n[:, None] * dy_stride + offs_p[None, :]
                x_ptrs = x + first_k.to(tl.int64) * x_stride + begin + (offs_k[:, None] * x_stride + offs_p[None, :])
            if BLOCKWISE:
                dy_scale_ptrs = dy_scale_ptr + begin // 128 * N + first_n + offs_n
                x_scale_ptrs = x_scale_ptr + begin // 128 * K + first_k + offs_k

            acc = tl.zeros((BLOCK_M, WIDTH), tl.float32)
            right = acc
            for p in range(0, size, BLOCK_K):
                if TMA:
                    z, y, column = ragged_indices(begin, size, p, 16)
                    dy_tile = dy.load([z, y, first_n, column]).reshape(BLOCK_M, BLOCK_K)
                    x_tile = x.load([z, y, first_k, column]).reshape(WIDTH, BLOCK_K)
                    if TWO:
                        x_right = x.load([z, y, first_k + WIDTH, column]).reshape(WIDTH, BLOCK_K)
                else:
                    mask_p = offs_p < size - p
                    dy_tile = tl.load(dy_ptrs, mask=mask_n[:, None] & mask_p[None, :], other=0.0)
                    x_tile = tl.load(x_ptrs, mask=mask_k[:, None] & mask_p[None, :], other=0.0)
                    dy_ptrs += BLOCK_K
                    x_ptrs += BLOCK_K
                scale_n, scale_k, scale_right = None, None, None
                if BLOCKWISE:
                    scale_n = tl.load(dy_scale_ptrs, mask=mask_n, other=0.0)
                    scale_k = tl.load(x_scale_ptrs, mask=mask_k, other=0.0)
                    if TWO:
                        scale_right = tl.load(x_scale_ptrs + WIDTH, mask=offs_k < K - first_k - WIDTH, other=0.0)
                    dy_scale_ptrs += N
                    x_scale_ptrs += K
                if PROMOTE:
                    acc = promote(acc, dy_tile, x_tile, scale_n, scale_k)
                    if TWO:
                        right = promote(right, dy_tile, x_right, scale_n, scale_right)
                else:
                    acc = tl.dot(widen(dy_tile), widen(x_tile).T, acc)

            if BLOCKWISE:
                dy_alpha, x_alpha = None, None
            else:
                dy_alpha, x_alpha = dy_scale_ptr + group * dy_scale_stride, x_scale_ptr + group * x_scale_stride
            place = num_groups - 1 - group if REVERSE else group
            if BLOCK_N == 256:
                if TWO:
                    left = acc
                else:
                    left, right = halves(acc)
                store_k_grouped(
                    left, out, out_ptr, dy_alpha, x_alpha, place, size, first_n, first_k, N, K, out_stride,
                    ACCUMULATE, TMA,
                )  # fmt: skip
                store_k_grouped(
                    right, out, out_ptr, dy_alpha, x_alpha, place, size, first_n, first_k + BLOCK_N // 2, N, K,
                    out_stride, ACCUMULATE, TMA,
                )  # fmt: skip
            else:
                store_k_grouped(
                    acc, out, out_ptr, dy_alpha, x_alpha, place, size, first_n, first_k, N, K, out_stride,
                    ACCUMULATE, TMA,
                )  # fmt: skip
