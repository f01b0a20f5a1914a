"""Kernels on descriptors (TMA) of `ops.kernels.grouped_gemm.high_precision`, whose programs take tile after tile."""

from ops.kernels.grouped_gemm.persistent_schedule import (
    ends_of_groups,
    group_of_rank,
    ranks_of_groups,
    serpentine_tile,
    split_columns,
    tile_in_bands,
    tile_of_groups,
)
from ops.kernels.grouped_gemm.ragged_tma import ragged_indices
from recipes.triton.gates import tl, triton
from recipes.triton.rounding import INTERPRET, round_to, widen


@triton.jit
def with_bias(acc, bias_ptr, scales_ptr, group, num_groups, first, end, first_c, C):
    """acc + scales[t] * bias[group, c], for rows from first to end and columns from first_c to C; 0 in the tail."""
    offs_t = tl.arange(0, acc.shape[0])
    offs_c = tl.arange(0, acc.shape[1])
    active = group < num_groups
    bias_ptr += group.to(tl.int64) * C
    bias = tl.load(bias_ptr + (first_c + offs_c), mask=(offs_c < C - first_c) & active, other=0.0).to(tl.float32)[
        None, :
    ]
    if scales_ptr is not None:
        # scales of rows that belong to no group may be anything
        mask_s = (offs_t < end - first) & active
        bias *= tl.load(scales_ptr + first + offs_t, mask=mask_s, other=0.0).to(tl.float32)[:, None]
    return acc + bias


@triton.jit
def store_rows(out, acc, first, end, first_c):
    """Rounds acc and stores it through a ragged descriptor from (first, first_c) on; rows from `end` on are not."""
    z, y, x = ragged_indices(first, end - first, 0, 1)
    out.store([z, y, x, first_c], round_to(acc, out.dtype).reshape(1, 1, acc.shape[0], acc.shape[1]))


# --------------------------------------------------------------------------------------------------- descriptors


@triton.jit
def finish_m_grouped(acc, out, bias_ptr, scales_ptr, group, num_groups, first, end, first_c, C):
    if bias_ptr is not None:
        acc = with_bias(acc, bias_ptr, scales_ptr, group, num_groups, first, end, first_c, C)
    store_rows(out, acc, first, end, first_c)


@triton.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_persistent_kernel(
    a,  # [T, R]: descriptor, ragged along T
    w,  # [G, C, R], or [G, R, C]: descriptor
    out,  # [T, C]: descriptor, ragged along T, of boxes half as wide as the tile if that is 256
    offsets_ptr,  # [G + 1] int64
    bias_ptr,  # [G, C] or None
    scales_ptr,  # [T] or None
    alpha_ptr,  # [G] float32 or None
    rows,
    num_groups,
    R,
    C,
    TRANSPOSED: tl.constexpr,  # w is [G, C, R]
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """out[t, c] = alpha_g * sum_r a[t, r] w[g, r, c] + scales[t] * bias[g, c], tile after tile of one group."""
    num_tiles_n = tl.cdiv(C, BLOCK_N)
    ends = ends_of_groups(offsets_ptr, num_groups, BLOCK_M, GROUPS, AT_ONCE=BLOCK_M == 64)
    num_tiles_m = tl.max(ends, axis=0)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0), flatten=True):
        group, first, end, tile_n = tile_of_groups(offsets_ptr, ends, tile, num_tiles_n, BLOCK_M, BAND)
        first_c = tile_n * BLOCK_N
        z, y, x = ragged_indices(first, end - first, 0, 1)
        acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for r in range(0, R, BLOCK_K):
            a_tile = widen(a.load([z, y, x, r]).reshape(BLOCK_M, BLOCK_K))
            if TRANSPOSED:
                w_tile = widen(w.load([group, first_c, r]).reshape(BLOCK_N, BLOCK_K)).T
            else:
                w_tile = widen(w.load([group, r, first_c]).reshape(BLOCK_K, BLOCK_N))
            acc = tl.dot(a_tile, w_tile, acc)
        if alpha_ptr is not None:
            acc *= tl.load(alpha_ptr + group)
        if BLOCK_N == 256:
            left, right = split_columns(acc)
            finish_m_grouped(left, out, bias_ptr, scales_ptr, group, num_groups, first, end, first_c, C)
            finish_m_grouped(right, out, bias_ptr, scales_ptr, group, num_groups, first, end, first_c + 128, C)
        else:
            finish_m_grouped(acc, out, bias_ptr, scales_ptr, group, num_groups, first, end, first_c, C)
    zero_tail(out, offsets_ptr, rows, num_groups, C, BLOCK_M)


@triton.jit
def zero_tail(out, offsets_ptr, rows, num_groups, C, BLOCK_M: tl.constexpr):
    """Zeros in the rows of no group, through a descriptor ragged along the rows, shared among the programs."""
    WIDTH: tl.constexpr = out.block_shape[3]
    first = tl.load(offsets_ptr + num_groups)
    num_tiles_n = tl.cdiv(C, WIDTH)
    num_tiles = tl.cdiv(rows - first, BLOCK_M).to(tl.int32) * num_tiles_n
    zeros = tl.zeros((BLOCK_M, WIDTH), tl.float32)
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        first_t = first + (tile // num_tiles_n) * BLOCK_M
        store_rows(out, zeros, first_t, first * 0 + rows, tile % num_tiles_n * WIDTH)


@triton.jit
def finish_k_grouped(acc, dw, group, first_n, first_k, ACCUMULATE: tl.constexpr):
    """dw = acc, or dw += acc, rounded once."""
    acc = acc.reshape(1, acc.shape[0], acc.shape[1])
    if ACCUMULATE and dw.dtype == tl.float32 and not INTERPRET:
        dw.atomic_add([group, first_n, first_k], acc)  # one addition an element, so the order is fixed
    else:
        if ACCUMULATE:
            acc += widen(dw.load([group, first_n, first_k])).to(tl.float32)
        dw.store([group, first_n, first_k], round_to(acc, dw.dtype))


@triton.jit
def finish_parts(acc, dw, group, first_n, first_k, ACCUMULATE: tl.constexpr):
    """The same box by box of the descriptor."""
    HALF: tl.constexpr = acc.shape[1] // 2
    if HALF < dw.block_shape[2]:
        finish_k_grouped(acc, dw, group, first_n, first_k, ACCUMULATE)
    else:
        left, right = split_columns(acc)
        finish_parts(left, dw, group, first_n, first_k, ACCUMULATE)
        finish_parts(right, dw, group, first_n, first_k + HALF, ACCUMULATE)


AHEAD = tl.constexpr(6)  # steps over which a tile's old sums are fetched


@triton.jit
def prefetch_rows(ptr, stride, height, width, HEIGHT: tl.constexpr, WIDTH: tl.constexpr):
    """Prefetches into L2 the first of HEIGHT rows and WIDTH columns of float32 that there are, 128 bytes a thread."""
    if not INTERPRET:
        offs_n = tl.arange(0, HEIGHT)[:, None]
        offs_k = tl.arange(0, WIDTH // 32)[None, :] * 32
        tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
            [(ptr + (offs_n * stride + offs_k)).to(tl.int64), ((offs_n < height) & (offs_k < width)).to(tl.int32)],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def prefetch_old_sums(ptr, step, steps, first_n, first_k, N, K, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Prefetches into L2 a quarter of the tile at (first_n, first_k) of [N, K] in four of its last AHEAD steps."""
    step -= tl.maximum(steps - AHEAD, 0)
    gap = tl.maximum(tl.minimum(steps, AHEAD) // 4, 1)
    if (step >= 0) & (step % gap == 0) & (step < 4 * gap):
        row_n = first_n + step // gap * (BLOCK_M // 4)
        at = ptr + row_n.to(tl.int64) * K + first_k
        prefetch_rows(at, K, N - row_n, K - first_k, BLOCK_M // 4, BLOCK_N)


@triton.jit(do_not_specialize=["num_groups"])
def k_grouped_persistent_kernel(
    dy,  # [T, N]: descriptor, ragged along T
    x,  # [T, K]: descriptor, ragged along T
    dw,  # [G, N, K]: descriptor of boxes at most half as wide as the tile
    dw_ptr,  # dw itself if it is float32 and added to, else None
    dw_stride,  # of its matrices
    offsets_ptr,  # [G + 1] int64
    alpha_ptr,  # [G] float32 or None
    num_groups,
    N,
    K,
    ACCUMULATE: tl.constexpr,
    REVERSE: tl.constexpr,  # the last group comes first in dw
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """dw[g, n, k] = alpha_g * sum_t dy[t, n] x[t, k] over the rows of group g, tile after tile; ACCUMULATE: dw +=.

    A group without rows has one step, of zeros; with ACCUMULATE it has none, and as the last in order is not reached.
    Programs end their tiles at about the same time: sums that are added to are fetched over the steps before, a quarter
    at once, so that they do not wait for memory together.
    """
    LEAST: tl.constexpr = 0 if ACCUMULATE else 1
    num_tiles_n = tl.cdiv(N, BLOCK_M)
    num_tiles_k = tl.cdiv(K, BLOCK_N)
    num_tiles = num_tiles_n * num_tiles_k
    ranks = ranks_of_groups(offsets_ptr, num_groups, GROUPS)
    num_steps = 0
    for turn in range(tl.cdiv(num_groups * num_tiles, tl.num_programs(0))):
        rank = serpentine_tile(turn) // num_tiles
        exists = rank < num_groups
        group = group_of_rank(ranks, rank)
        begin = tl.load(offsets_ptr + group, mask=exists, other=0)
        size = (tl.load(offsets_ptr + group + 1, mask=exists, other=0) - begin).to(tl.int32)
        num_steps += tl.where(exists, tl.maximum(tl.cdiv(size, BLOCK_K), LEAST), 0)
    turn = 0
    t = 0
    group = 0
    begin = tl.load(offsets_ptr)
    size = 0
    first_n = 0
    first_k = 0
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for _ in range(num_steps):
        if t == 0:
            tile = serpentine_tile(turn)
            turn += 1
            group = group_of_rank(ranks, tile // num_tiles)
            tile_n, tile_k = tile_in_bands(tile % num_tiles, num_tiles_n, num_tiles_k, BAND)
            begin = tl.load(offsets_ptr + group)
            size = (tl.load(offsets_ptr + group + 1) - begin).to(tl.int32)
            first_n = tile_n * BLOCK_M
            first_k = tile_k * BLOCK_N
        z, y, row = ragged_indices(begin, size, t, 1)
        dy_tile = widen(dy.load([z, y, row, first_n]).reshape(BLOCK_K, BLOCK_M))
        x_tile = widen(x.load([z, y, row, first_k]).reshape(BLOCK_K, BLOCK_N))
        acc = tl.dot(dy_tile.T, x_tile, acc)
        if ACCUMULATE and dw_ptr is not None:
            place = num_groups - 1 - group if REVERSE else group
            prefetch_old_sums(
                dw_ptr + place.to(tl.int64) * dw_stride, t // BLOCK_K, tl.cdiv(size, BLOCK_K), first_n, first_k,
                N, K, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        t += BLOCK_K
        if t >= size:
            if alpha_ptr is not None:
                # alpha of a group without rows may be anything
                acc *= tl.load(alpha_ptr + group, mask=size > 0, other=0.0)
            place = num_groups - 1 - group if REVERSE else group
            finish_parts(acc, dw, place, first_n, first_k, ACCUMULATE)
            acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            t = 0


# ------------------------------------------------------------------------------------------------ bias gradient
