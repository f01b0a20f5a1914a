"""The kernels on descriptors (TMA) of `ops.kernels.grouped_gemm.float8`: programs that take tile after tile.

As those of `high_precision_triton` (loops, order of tiles, exact bounds of groups), with what float8 adds:

    fast accumulation     the tensor core's sum runs over all steps of a tile
    split accumulation    a step's product is one sum of 128 terms; it is scaled and added in float32

While a product is scaled and added the tensor cores wait, unless another group of four warps has a product for them.
So a tile is multiplied in two parts where its sum and its product do not fit the registers at once: boxes of an operand
are then half as high as the tile's side, and both parts of a step multiply one box of the other operand.
"""

from ops.kernels.grouped_gemm.high_precision_triton import (
    finish_k_grouped,
    finish_m_grouped,
    prefetch_old_sums,
    zero_tail,
)
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
from recipes.triton.rounding import INTERPRET, widen


@triton.jit
def add_scaled(acc, product, row_scale, column_scale):
    """acc + product * row_scale * column_scale (or None); the last product and the sum are rounded once.

    In assembly, so that it stays before the next product: left free, the compiler delays it and runs out of registers.
    """
    if INTERPRET:
        product *= row_scale[:, None]
        if column_scale is not None:
            product *= column_scale[None, :]
        acc += product
    elif column_scale is None:
        acc = tl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, row_scale[:, None], acc],
            dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    else:
        acc = tl.inline_asm_elementwise(
            "{ .reg .f32 p; mul.rn.f32 p, $1, $2; fma.rn.f32 $0, p, $3, $4; }", "=f,f,f,f,f",
            [product, row_scale[:, None], column_scale[None, :], acc], dtype=tl.float32, is_pure=False, pack=1,
        )  # fmt: skip
    return acc


@triton.jit
def add_product(acc, a, b, row_scale, column_scale, PROMOTE: tl.constexpr):
    """acc + a b^T, in the tensor core's own sum; PROMOTE: in float32, times factors of rows and columns (or None)."""
    if not PROMOTE:
        acc = tl.dot(a, b.T, acc)
    elif row_scale is None:
        acc += tl.dot(a, b.T)
    else:
        acc = add_scaled(acc, tl.dot(a, b.T), row_scale, column_scale)
    return acc


@triton.jit
def two_parts(acc, other, first_m, first_n, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The two sums of a tile at (first_m, first_n), or its one sum in two parts, and where the second is."""
    if acc.shape[0] < BLOCK_M:
        return acc, other, first_m + acc.shape[0], first_n
    elif acc.shape[1] < BLOCK_N:
        return acc, other, first_m, first_n + acc.shape[1]
    else:
        left, right = split_columns(acc)
        return left, right, first_m, first_n + BLOCK_N // 2


@triton.jit
def scale_sums(acc, a_scale, b_scale):
    """One after the other: the product of two scales may be too small for float32. None: scaled already."""
    if a_scale is not None:
        acc = acc * a_scale * b_scale
    return acc


@triton.jit
def times_vectors(acc, row_scale_ptr, column_scale_ptr, height, width):
    """acc * row_scale[:, None] * column_scale[None, :], in this order; scales from `height` and `width` on are 0."""
    offs_m = tl.arange(0, acc.shape[0])
    offs_n = tl.arange(0, acc.shape[1])
    acc *= tl.load(row_scale_ptr + offs_m, mask=offs_m < height, other=0.0)[:, None]
    return acc * tl.load(column_scale_ptr + offs_n, mask=offs_n < width, other=0.0)[None, :]


@triton.jit
def scales_of_step(
    a_scale_ptr,
    b_scale_ptr,
    group,
    first,
    size,
    first_c,
    step,
    rows,
    C,
    num_steps,
    LAYOUT: tl.constexpr,
    HEIGHT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Of a's rows, for each of two parts, and of b's columns; zeros where there is no such step."""
    exists = step < num_steps
    size = tl.where(exists, size, 0)
    offs_t = tl.arange(0, HEIGHT)
    at = a_scale_ptr + step.to(tl.int64) * rows + first
    scale_t = tl.load(at + offs_t, mask=offs_t < size, other=0.0)
    other_t = scale_t
    if HEIGHT < BLOCK_M:
        other_t = tl.load(at + HEIGHT + offs_t, mask=offs_t < size - HEIGHT, other=0.0)
    if LAYOUT == "square":
        block = group * tl.cdiv(C, 128) + first_c // 128
        scale_c = tl.load(b_scale_ptr + block * num_steps + step, mask=exists, other=0.0)
    else:
        offs_c = tl.arange(0, BLOCK_N)
        at = b_scale_ptr + (group.to(tl.int64) * num_steps + step) * C + first_c
        scale_c = tl.load(at + offs_c, mask=exists & (offs_c < C - first_c), other=0.0)
    return scale_t, other_t, scale_c


@triton.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_float8_persistent_kernel(
    a,  # [T, R] codes: descriptor, ragged along T, of boxes as high as the tile or half as high
    b,  # [G, C, R] codes: descriptor of boxes as wide as the tile
    out,  # [T, C]: descriptor, ragged along T, of boxes of half a tile
    a_scale_ptr,  # [G], a_scale_stride apart; or [T]; or [ceil(R/128), T]
    b_scale_ptr,  # [G], b_scale_stride apart; or [G, C]; [G, ceil(C/128), ceil(R/128)]; [G, ceil(R/128), C]
    offsets_ptr,  # [G + 1] int64
    bias_ptr,  # [G, C] or None
    scales_ptr,  # [T] or None
    rows,
    num_groups,
    R,
    C,
    a_scale_stride,
    b_scale_stride,
    LAYOUT: tl.constexpr,  # "tensor", "vector", "square" or "row"
    PROMOTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """out[t, c] = sum_r a[t, r] b[g, c, r] + scales[t] bias[g, c], tile after tile of one group."""
    HEIGHT: tl.constexpr = a.block_shape[2]
    BLOCKWISE: tl.constexpr = LAYOUT == "square" or LAYOUT == "row"
    num_tiles_n = tl.cdiv(C, BLOCK_N)
    num_steps = tl.cdiv(R, BLOCK_K)
    ends = ends_of_groups(offsets_ptr, num_groups, BLOCK_M, GROUPS)
    num_tiles_m = tl.max(ends, axis=0)
    num_tiles = num_tiles_m * num_tiles_n
    mine = tl.maximum(tl.cdiv(num_tiles - tl.program_id(0), tl.num_programs(0)), 0)
    tile = tl.program_id(0)
    step = 0
    group = 0
    first = 0
    size = 0
    first_c = 0
    acc = tl.zeros((HEIGHT, BLOCK_N), tl.float32)
    other = acc
    if BLOCKWISE:
        next_t = tl.zeros((HEIGHT,), tl.float32)
        next_other_t = next_t
        if LAYOUT == "square":
            next_c = 0.0
        else:
            next_c = tl.zeros((BLOCK_N,), tl.float32)
    for _ in range(mine * num_steps):
        if step == 0:
            group, first_row, end, tile_n = tile_of_groups(offsets_ptr, ends, tile, num_tiles_n, BLOCK_M, BAND)
            first, size = first_row.to(tl.int32), (end - first_row).to(tl.int32)
            first_c = tile_n * BLOCK_N
            tile += tl.num_programs(0)
            if BLOCKWISE:
                next_t, next_other_t, next_c = scales_of_step(
                    a_scale_ptr, b_scale_ptr, group, first, size, first_c, step, rows, C, num_steps, LAYOUT, HEIGHT,
                    BLOCK_M, BLOCK_N,
                )  # fmt: skip
        z, y, x = ragged_indices(first, size, 0, 1)
        scale_t, other_t, scale_c = None, None, None
        if BLOCKWISE:
            # Scales are loaded a step ahead, so that no product waits for them.
            scale_t, other_t, scale_c = next_t, next_other_t, next_c
            next_t, next_other_t, next_c = scales_of_step(
                a_scale_ptr, b_scale_ptr, group, first, size, first_c, step + 1, rows, C, num_steps, LAYOUT, HEIGHT,
                BLOCK_M, BLOCK_N,
            )  # fmt: skip
            if LAYOUT == "square":
                scale_t *= scale_c
                other_t *= scale_c
                scale_c = None
        r = step * BLOCK_K
        a_tile = widen(a.load([z, y, x, r]).reshape(HEIGHT, BLOCK_K))
        b_tile = widen(b.load([group, first_c, r]).reshape(BLOCK_N, BLOCK_K))
        acc = add_product(acc, a_tile, b_tile, scale_t, scale_c, PROMOTE)
        if HEIGHT < BLOCK_M:
            a_tile = widen(a.load([z, y, x + HEIGHT, r]).reshape(HEIGHT, BLOCK_K))
            other = add_product(other, a_tile, b_tile, other_t, scale_c, PROMOTE)
        step += 1
        if step == num_steps:
            a_alpha, b_alpha = None, None
            if LAYOUT == "tensor":
                a_alpha = tl.load(a_scale_ptr + group * a_scale_stride)
                b_alpha = tl.load(b_scale_ptr + group * b_scale_stride)
            one, two, second, second_c = two_parts(acc, other, first, first_c, BLOCK_M, BLOCK_N)
            one, two = scale_sums(one, a_alpha, b_alpha), scale_sums(two, a_alpha, b_alpha)
            end = first + size
            if LAYOUT == "vector":
                columns = b_scale_ptr + tl.cast(group, tl.int64) * C
                one = times_vectors(one, a_scale_ptr + first, columns + first_c, size, C - first_c)
                two = times_vectors(two, a_scale_ptr + second, columns + second_c, end - second, C - second_c)
            finish_m_grouped(one, out, bias_ptr, scales_ptr, group, num_groups, first, end, first_c, C)
            finish_m_grouped(two, out, bias_ptr, scales_ptr, group, num_groups, second, end, second_c, C)
            acc = tl.zeros((HEIGHT, BLOCK_N), tl.float32)
            other = acc
            step = 0
    zero_tail(out, offsets_ptr, rows, num_groups, C, HEIGHT)


@triton.jit
def scales_of_block(scale_ptr, block, exists, first, size, LENGTH: tl.constexpr):
    """Of a block of columns: of LENGTH rows from the first one on; zeros where there is no such block or row."""
    offs = first + tl.arange(0, LENGTH)
    return tl.load(scale_ptr + block.to(tl.int64) * size + offs, mask=exists & (offs < size), other=0.0)


@triton.jit(do_not_specialize=["num_groups"])
def k_grouped_float8_persistent_kernel(
    dy,  # [N, P] codes: descriptor, ragged along P, of boxes as high as the tile or half as high
    x,  # [K, P] codes: descriptor, ragged along P, of boxes as high as the tile is wide, or half that
    dw,  # [G, N, K]: descriptor of boxes of half a tile
    sums_ptr,  # dw itself if it is float32 that is added to, else None
    sums_stride,  # of its matrices
    dy_scale_ptr,  # [G], dy_scale_stride apart; or [G, N]; or [P/128, N]
    x_scale_ptr,  # [G], x_scale_stride apart; or [G, K]; or [P/128, K]
    offsets_ptr,  # [G + 1] int64, multiples of 16; of 128 for block scales
    num_groups,
    N,
    K,
    dy_scale_stride,
    x_scale_stride,
    ACCUMULATE: tl.constexpr,
    REVERSE: tl.constexpr,  # the last group comes first in dw
    LAYOUT: tl.constexpr,  # "tensor", "vector" or "row"
    PROMOTE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """dw[g, n, k] = sum_p dy[n, p] x[k, p] over the columns of group g, tile after tile; ACCUMULATE: dw +=.

    Groups without columns, and the fetching of sums that are added to: as `k_grouped_persistent_kernel`. Block scales
    of a tile in parts are loaded in their step, and its groups, where there are many, come as they are: scales of the
    next step, or ranks, would spill.
    """
    HEIGHT: tl.constexpr = dy.block_shape[2]
    WIDTH: tl.constexpr = x.block_shape[2]
    BLOCKWISE: tl.constexpr = LAYOUT == "row"
    AHEAD: tl.constexpr = BLOCKWISE and HEIGHT == BLOCK_M
    RANKED: tl.constexpr = AHEAD or not BLOCKWISE or GROUPS <= 32
    tl.static_assert(WIDTH == BLOCK_N or not BLOCKWISE, "scales of x are loaded for whole tiles")
    LEAST: tl.constexpr = 0 if ACCUMULATE else 1
    num_tiles_n = tl.cdiv(N, BLOCK_M)
    num_tiles_k = tl.cdiv(K, BLOCK_N)
    num_tiles = num_tiles_n * num_tiles_k
    if RANKED:
        ranks = ranks_of_groups(offsets_ptr, num_groups, GROUPS)
    num_steps = 0
    for turn in range(tl.cdiv(num_groups * num_tiles, tl.num_programs(0))):
        group = serpentine_tile(turn) // num_tiles
        exists = group < num_groups
        if RANKED:
            group = group_of_rank(ranks, group)
        begin = tl.load(offsets_ptr + group, mask=exists, other=0)
        size = (tl.load(offsets_ptr + group + 1, mask=exists, other=0) - begin).to(tl.int32)
        num_steps += tl.where(exists, tl.maximum(tl.cdiv(size, BLOCK_K), LEAST), 0)
    turn = 0
    p = 0
    group = 0
    begin = 0
    size = 0
    first_n = 0
    first_k = 0
    acc = tl.zeros((HEIGHT, WIDTH), tl.float32)
    other = acc
    if AHEAD:
        next_n = tl.zeros((HEIGHT,), tl.float32)
        next_k = tl.zeros((WIDTH,), tl.float32)
    for _ in range(num_steps):
        if p == 0:
            tile = serpentine_tile(turn)
            turn += 1
            group = tile // num_tiles
            if RANKED:
                group = group_of_rank(ranks, group)
            tile_n, tile_k = tile_in_bands(tile % num_tiles, num_tiles_n, num_tiles_k, BAND)
            begin = tl.multiple_of(tl.load(offsets_ptr + group).to(tl.int32), 16)
            size = tl.multiple_of(tl.load(offsets_ptr + group + 1).to(tl.int32) - begin, 16)
            first_n = tile_n * BLOCK_M
            first_k = tile_k * BLOCK_N
            if AHEAD:
                next_n = scales_of_block(dy_scale_ptr, begin // 128, size > 0, first_n, N, HEIGHT)
                next_k = scales_of_block(x_scale_ptr, begin // 128, size > 0, first_k, K, WIDTH)
        scale_n, other_n, scale_k = None, None, None
        if AHEAD:
            scale_n, scale_k = next_n, next_k  # a step ahead, as above
            next_n = scales_of_block(dy_scale_ptr, (begin + p) // 128 + 1, p + BLOCK_K < size, first_n, N, HEIGHT)
            next_k = scales_of_block(x_scale_ptr, (begin + p) // 128 + 1, p + BLOCK_K < size, first_k, K, WIDTH)
        elif BLOCKWISE:
            scale_n = scales_of_block(dy_scale_ptr, (begin + p) // 128, p < size, first_n, N, HEIGHT)
            other_n = scales_of_block(dy_scale_ptr, (begin + p) // 128, p < size, first_n + HEIGHT, N, HEIGHT)
            scale_k = scales_of_block(x_scale_ptr, (begin + p) // 128, p < size, first_k, K, WIDTH)
        z, y, column = ragged_indices(begin, size, p, 16)
        dy_tile = widen(dy.load([z, y, first_n, column]).reshape(HEIGHT, BLOCK_K))
        x_tile = widen(x.load([z, y, first_k, column]).reshape(WIDTH, BLOCK_K))
        acc = add_product(acc, dy_tile, x_tile, scale_n, scale_k, PROMOTE)
        if HEIGHT < BLOCK_M:
            dy_tile = widen(dy.load([z, y, first_n + HEIGHT, column]).reshape(HEIGHT, BLOCK_K))
            other = add_product(other, dy_tile, x_tile, other_n, scale_k, PROMOTE)
        elif WIDTH < BLOCK_N:
            x_tile = widen(x.load([z, y, first_k + WIDTH, column]).reshape(WIDTH, BLOCK_K))
            other = add_product(other, dy_tile, x_tile, None, None, PROMOTE)
        place = num_groups - 1 - group if REVERSE else group
        if sums_ptr is not None:
            prefetch_old_sums(
                sums_ptr + place.to(tl.int64) * sums_stride, p // BLOCK_K, tl.cdiv(size, BLOCK_K), first_n, first_k,
                N, K, BLOCK_M, BLOCK_N,
            )  # fmt: skip
        p += BLOCK_K
        if p >= size:
            dy_alpha, x_alpha = None, None
            if LAYOUT == "tensor":
                # Scales of a group without columns may be anything.
                dy_alpha = tl.load(dy_scale_ptr + group * dy_scale_stride, mask=size > 0, other=0.0)
                x_alpha = tl.load(x_scale_ptr + group * x_scale_stride, mask=size > 0, other=0.0)
            one, two, second_n, second_k = two_parts(acc, other, first_n, first_k, BLOCK_M, BLOCK_N)
            one, two = scale_sums(one, dy_alpha, x_alpha), scale_sums(two, dy_alpha, x_alpha)
            if LAYOUT == "vector":
                height, width = tl.where(size > 0, N, 0), tl.where(size > 0, K, 0)
                rows, columns = dy_scale_ptr + tl.cast(group, tl.int64) * N, x_scale_ptr + tl.cast(group, tl.int64) * K
                one = times_vectors(one, rows + first_n, columns + first_k, height - first_n, width - first_k)
                two = times_vectors(two, rows + second_n, columns + second_k, height - second_n, width - second_k)
            finish_k_grouped(one, dw, place, first_n, first_k, ACCUMULATE)
            finish_k_grouped(two, dw, place, second_n, second_k, ACCUMULATE)
            acc = tl.zeros((HEIGHT, WIDTH), tl.float32)
            other = acc
            p = 0
