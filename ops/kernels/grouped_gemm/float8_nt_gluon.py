"""NT of `grouped_gemm.float8` in Gluon, for Hopper: the warps of a program have roles, as in `high_precision_nt_gluon`.

A program takes tile after tile, the largest groups first. One warp loads (TMA) into a ring of stages, consumers of four
warps multiply (wgmma), each 64 rows of the tile by all of its columns, and store their rows: while one stores, the
others multiply. Groups have few steps of 128 codes, so a tile may take as long to store as to multiply: 16-bit rows are
stored while the next tile is multiplied (`stores_gluon`; LATE), but for split accumulation with scales of rows and
columns, for which there are no registers. Which tile is next: `tile_queue_gluon`.

    scales per tensor, or of rows and columns
                         128 x 256, two consumers; split accumulation: `split_accumulation_gluon`
    scales of blocks     192 x 128, three: while one scales and adds its product, the others multiply. Where sums are
                         fetched: 128 x 128, two

Scales of blocks have a role of their own: one warp copies (cp.async) those of the rows and of the columns of a step to
its stage.

Barriers, and why loops over steps start at 0: as `m_grouped_gluon`; but each consumer has `empty` barriers of its own.
What is added to: as `high_precision_nt_gluon`.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# P columns of the padded groups, G groups, N out features, K in features

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from ops.kernels.grouped_gemm.finished_rows_gluon import (
    boxes_times_vectors,
    load_spread_vectors,
    load_vectors,
    times_vectors,
)
from ops.kernels.grouped_gemm.high_precision_nt_gluon import (
    add_boxes,
    free_last_box,
    free_stage,
    load_old_sums,
    store_sums,
    wait_for_loads,
    wait_for_room,
    with_barriers,
    with_layout,
)
from ops.kernels.grouped_gemm.m_grouped_gluon import HEIGHT
from ops.kernels.grouped_gemm.measured_tiles import BOX_BYTES
from ops.kernels.grouped_gemm.persistent_schedule import band, multiprocessors, tile_in_bands
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, ragged_indices
from ops.kernels.grouped_gemm.split_accumulation_gluon import add_to_halves, zero_halves
from ops.kernels.grouped_gemm.stores_gluon import (
    allocate_staging,
    boxes_of_none,
    rounded_boxes,
    split_columns,
    store_boxes,
    store_tile,
)
from ops.kernels.grouped_gemm.tile_queue_gluon import (
    ask_next,
    find_group,
    hand,
    make_queue,
    next_tile,
    rank_groups,
    take,
)
from ops.kernels.grouped_gemm.tile_rules_float8 import GroupedFloat8Config
from recipes.tensors.formats import ScaleLayout
from recipes.triton.launch import Launch, cdiv, next_power_of_2
from recipes.triton.names_gluon import async_load, tma_load

BOXES = 2  # of a consumer, on their way to the output
FETCHED = 4  # with what is added to
UNIT = gl.constexpr(16)  # codes of which both ends of a group are multiples


# ------------------------------------------------------------------------------------------------------ roles


@gluon.jit
def load(dy, x, given, ranks, offsets_ptr, counter_ptr, BAND: gl.constexpr):
    stages, full, empty, queue, sizes = given
    dy_stages, x_stages, _dy_scale_stages, _x_scale_stages = stages
    num_groups, N, K = sizes
    PARTS: gl.constexpr = dy_stages.shape[0] // x_stages.shape[0]
    HEIGHT: gl.constexpr = dy_stages.shape[1]
    BLOCK_M: gl.constexpr = PARTS * HEIGHT
    BLOCK_N: gl.constexpr = x_stages.shape[1]
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    num_tiles_n = gl.cdiv(N, BLOCK_M)
    num_tiles_k = gl.cdiv(K, BLOCK_N)
    num_tiles = num_tiles_n * num_tiles_k
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < num_groups * num_tiles:
        asked = ask_next(counter_ptr)
        tile_n, tile_k = tile_in_bands(tile % num_tiles, num_tiles_n, num_tiles_k, BAND)
        group, first, size = find_group(offsets_ptr, ranks, tile // num_tiles)
        hand(queue, turn, (group, size, tile_n, tile_k))
        first_n = tile_n * BLOCK_M
        first_k = tile_k * BLOCK_N
        for s in range(gl.cdiv(size, BLOCK_K)):
            z, y, column = ragged_indices(first, size, s * BLOCK_K, UNIT)
            stage = wait_for_room(empty, full.shape[0], step)
            barrier = full.index(stage)
            mbarrier.expect(barrier, PARTS * dy.block_type.nbytes + x.block_type.nbytes)
            x_stage = x_stages.index(stage).reshape(x.block_shape)
            tma_load(x, [z, y, first_k, column], barrier, x_stage)
            for i in gl.static_range(PARTS):
                dy_stage = dy_stages.index(stage * PARTS + i).reshape(dy.block_shape)
                tma_load(dy, [z, y, first_n + i * HEIGHT, column], barrier, dy_stage)
            step += 1
        turn += 1
        tile = next_tile(asked)
    hand(queue, turn, (-1, 0, 0, 0))


@gluon.jit
def load_scales(given, scales, offsets_ptr):
    """Of blocks. Rows and columns past the edge get some scale, and are not stored."""
    stages, full, empty, queue, sizes = given
    dy_stages, x_stages, dy_scale_stages, x_scale_stages = stages
    _num_groups, N, K = sizes
    BLOCK_M: gl.constexpr = dy_stages.shape[0] // x_stages.shape[0] * dy_stages.shape[1]
    BLOCK_N: gl.constexpr = x_stages.shape[1]
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    dy_scale_ptr, x_scale_ptr, _dy_scale_stride, _x_scale_stride = scales
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    offs_n = gl.arange(0, dy_scale_stages.shape[1], layout)
    offs_k = gl.arange(0, x_scale_stages.shape[1], layout)
    step = 0
    turn = 0
    group, size, tile_n, tile_k = take(queue, turn)
    while group >= 0:
        block = gl.load(offsets_ptr + group) // BLOCK_K
        of_rows = dy_scale_ptr + block * N + gl.minimum(tile_n * BLOCK_M + offs_n, N - 1)
        of_columns = x_scale_ptr + block * K + gl.minimum(tile_k * BLOCK_N + offs_k, K - 1)
        for _ in range(gl.cdiv(size, BLOCK_K)):
            stage = wait_for_room(empty, full.shape[0], step)
            async_load(dy_scale_stages.index(stage), of_rows)
            async_load(x_scale_stages.index(stage), of_columns)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            of_rows += N
            of_columns += K
            step += 1
        turn += 1
        group, size, tile_n, tile_k = take(queue, turn)


@gluon.jit
def add_scaled(acc, product, row_scale, of_columns):
    """acc + product * row_scale[:, None] * of_columns[None, :]; the last product and the sum are rounded once."""
    row_scale = gl.convert_layout(row_scale, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
    column_scale = of_columns.load(gl.SliceLayout(0, acc.type.layout))
    return gl.inline_asm_elementwise(
        "{ .reg .f32 p; mul.rn.f32 p, $1, $2; fma.rn.f32 $0, p, $3, $4; }", "=f,f,f,f,f",
        [product, gl.expand_dims(row_scale, 1), gl.expand_dims(column_scale, 0), acc],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply_step(acc, given, step, CONSUMER: gl.constexpr):
    """acc and the product of a step, on its way."""
    stages, full, _empty, _queue, _sizes = given
    CONSUMERS: gl.constexpr = stages[0].shape[0] // full.shape[0]
    stage = wait_for_loads(full, step)
    dy_stage = stages[0].index(stage * CONSUMERS + CONSUMER)
    return warpgroup_mma(dy_stage, stages[1].index(stage).permute([1, 0]), acc, is_async=True)


@gluon.jit
def in_halves(acc):
    """The left and the right half of sums, as they are in `zero_halves`."""
    left, right = split_columns(acc)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, left.shape[1], 32])
    left = gl.convert_layout(left, layout, assert_trivial=True)
    return left, gl.convert_layout(right, layout, assert_trivial=True)


@gluon.jit
def sum_fast(given, last, vectors, step, num_steps, CONSUMER: gl.constexpr):
    """The products of this consumer's rows and the columns of a tile: their left half and their right half.

    last: what is stored meanwhile, in two steps or more, or None. vectors: None, or scales of rows and columns; beside
    last the arguments of `load_spread_vectors`, and the boxes of the products times these are returned.
    """
    stages, full, empty, _queue, _sizes = given
    STAGES: gl.constexpr = full.shape[0]
    HEIGHT: gl.constexpr = stages[0].shape[1]
    BLOCK_N: gl.constexpr = stages[1].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc = gl.zeros([HEIGHT, BLOCK_N], gl.float32, layout)
    if last is not None:
        acc = multiply_step(acc, given, step, CONSUMER)
        store_boxes(last, 0)
        acc = multiply_step(acc, given, step + 1, CONSUMER)
        store_boxes(last, 1)
        if vectors is not None:
            row_scale, column_scale = load_spread_vectors(*vectors, HEIGHT, BLOCK_N, layout)
        acc = warpgroup_mma_wait(1, deps=[acc])
        free_stage(empty, step, STAGES, CONSUMER)
        for s in range(num_steps - 2):
            acc = multiply_step(acc, given, step + s + 2, CONSUMER)
            acc = warpgroup_mma_wait(1, deps=[acc])
            free_stage(empty, step + s + 1, STAGES, CONSUMER)
    else:
        for s in range(num_steps):
            acc = multiply_step(acc, given, step + s, CONSUMER)
            acc = warpgroup_mma_wait(1, deps=[acc])
            free_stage(empty, step + s - 1, STAGES, CONSUMER, pred=s > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    free_stage(empty, step + num_steps - 1, STAGES, CONSUMER, pred=num_steps > 0)
    if vectors is None:
        return in_halves(acc)
    elif last is None:
        return in_halves(times_vectors(acc, *vectors))
    else:
        return boxes_times_vectors(acc, row_scale, column_scale, last[3])


@gluon.jit
def sum_split(given, last, step, num_steps, CONSUMER: gl.constexpr):
    """The same in split accumulation. last: what is stored meanwhile, in one step or more, or None."""
    stages, full, empty, _queue, _sizes = given
    dy_stages, x_stages, _dy_scale_stages, _x_scale_stages = stages
    STAGES: gl.constexpr = full.shape[0]
    CONSUMERS: gl.constexpr = dy_stages.shape[0] // STAGES
    left, right = zero_halves(dy_stages.shape[1], x_stages.shape[1])
    STORED: gl.constexpr = 0 if last is None else 1  # steps meanwhile
    if last is not None:
        stage = wait_for_loads(full, step)
        dy_stage = dy_stages.index(stage * CONSUMERS + CONSUMER)
        left, right = add_to_halves(left, right, dy_stage, x_stages.index(stage), last)
        free_stage(empty, step, STAGES, CONSUMER)
    for s in range(num_steps - STORED):
        stage = wait_for_loads(full, step + s + STORED)
        dy_stage = dy_stages.index(stage * CONSUMERS + CONSUMER)
        left, right = add_to_halves(left, right, dy_stage, x_stages.index(stage), None)
        free_stage(empty, step + s + STORED, STAGES, CONSUMER)
    return left, right


@gluon.jit
def add_block(left, right, given, last, step, CONSUMER: gl.constexpr):
    """Adds a step's product times its scales of blocks. last: what is stored meanwhile, or None."""
    stages, full, empty, _queue, _sizes = given
    dy_stages, x_stages, dy_scale_stages, x_scale_stages = stages
    STAGES: gl.constexpr = full.shape[0]
    CONSUMERS: gl.constexpr = dy_stages.shape[0] // STAGES
    HEIGHT: gl.constexpr = dy_stages.shape[1]
    BLOCK_N: gl.constexpr = x_stages.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    stage = wait_for_loads(full, step)
    dy_stage = dy_stages.index(stage * CONSUMERS + CONSUMER)
    zero = gl.zeros([HEIGHT, BLOCK_N], gl.float32, layout)
    product = warpgroup_mma(dy_stage, x_stages.index(stage).permute([1, 0]), zero, use_acc=False, is_async=True)
    if last is not None:
        store_tile(last)
    row_scale = dy_scale_stages.index(stage).slice(CONSUMER * HEIGHT, HEIGHT).load(gl.SliceLayout(1, layout))
    one, two = split_columns(warpgroup_mma_wait(0, deps=[product]))
    of_columns = x_scale_stages.index(stage)
    left = add_scaled(left, one, row_scale, of_columns.slice(0, BLOCK_N // 2))
    right = add_scaled(right, two, row_scale, of_columns.slice(BLOCK_N // 2, BLOCK_N // 2))
    free_stage(empty, step, STAGES, CONSUMER)
    return left, right


@gluon.jit
def sum_blocks(given, last, step, num_steps, CONSUMER: gl.constexpr):
    """The same of codes with scales of blocks. last: as above; the first product has no sums beside it."""
    HEIGHT: gl.constexpr = given[0][0].shape[1]
    BLOCK_N: gl.constexpr = given[0][1].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    left, right = split_columns(gl.zeros([HEIGHT, BLOCK_N], gl.float32, layout))
    STORED: gl.constexpr = 0 if last is None else 1  # steps meanwhile
    if last is not None:
        if num_steps > 0:
            left, right = add_block(left, right, given, last, step, CONSUMER)
        else:
            store_tile(last)
    for s in range(num_steps - STORED):
        left, right = add_block(left, right, given, None, step + s + STORED, CONSUMER)
    return left, right


@gluon.jit
def halves_times_vectors(left, right, row_scale_ptr, column_scale_ptr, height, width):
    """Halves times the scales of their rows and columns, which are loaded one half after the other."""
    HALF: gl.constexpr = left.shape[1]
    layout: gl.constexpr = left.type.layout
    vectors = load_vectors(row_scale_ptr, column_scale_ptr, height, width, left.shape[0], HALF, layout)
    left = times_vectors(left, *vectors)
    column_scale_ptr += HALF
    vectors = load_vectors(row_scale_ptr, column_scale_ptr, height, width - HALF, left.shape[0], HALF, layout)
    return left, times_vectors(right, *vectors)


@gluon.jit
def finished(left, right, last):
    """Halves as they are, or beside last their boxes."""
    if last is None:
        return left, right
    else:
        return rounded_boxes(left, last[3]) + rounded_boxes(right, last[3])


@gluon.jit
def sum_and_scale(
    given, last, scales, group, size, row, column, step, num_steps, CONSUMER: gl.constexpr, LAYOUT: gl.constexpr,
    PROMOTE: gl.constexpr,
):  # fmt: skip
    """`finished` halves of this consumer's rows. Scales of a group without columns may be anything."""
    stages, _full, _empty, _queue, sizes = given
    dy_scale_ptr, x_scale_ptr, dy_scale_stride, x_scale_stride = scales
    _num_groups, N, K = sizes
    HEIGHT: gl.constexpr = stages[0].shape[1]
    BLOCK_N: gl.constexpr = stages[1].shape[1]
    if LAYOUT == "row":
        left, right = sum_blocks(given, last, step, num_steps, CONSUMER)
        return finished(left, right, last)
    elif LAYOUT == "vector":
        row_scale_ptr = dy_scale_ptr + group.to(gl.int64) * N + row
        column_scale_ptr = x_scale_ptr + group.to(gl.int64) * K + column
        vectors = row_scale_ptr, column_scale_ptr, gl.where(size > 0, N - row, 0), gl.where(size > 0, K - column, 0)
        if PROMOTE:
            left, right = sum_split(given, None, step, num_steps, CONSUMER)
            return halves_times_vectors(left, right, *vectors)
        elif last is None:  # before the products, whose time that takes
            layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
            loaded = load_vectors(*vectors, HEIGHT, BLOCK_N, layout)
            return sum_fast(given, None, loaded, step, num_steps, CONSUMER)
        elif num_steps > 1:
            return sum_fast(given, last, vectors, step, num_steps, CONSUMER)
        else:
            store_tile(last)
            left, right = sum_split(given, None, step, num_steps, CONSUMER)  # a step is the same in both
            left, right = halves_times_vectors(left, right, *vectors)
            return finished(left, right, last)
    else:
        if last is None:
            if PROMOTE:
                left, right = sum_split(given, None, step, num_steps, CONSUMER)
            else:
                left, right = sum_fast(given, None, None, step, num_steps, CONSUMER)
        elif num_steps > 1:
            if PROMOTE:
                left, right = sum_split(given, last, step, num_steps, CONSUMER)
            else:
                left, right = sum_fast(given, last, None, step, num_steps, CONSUMER)
        else:
            store_tile(last)
            left, right = sum_split(given, None, step, num_steps, CONSUMER)
        of_dy = gl.load(dy_scale_ptr + group * dy_scale_stride, mask=size > 0, other=0.0)
        of_x = gl.load(x_scale_ptr + group * x_scale_stride, mask=size > 0, other=0.0)
        # one after the other, as `scale_sums`
        return finished(left * of_dy * of_x, right * of_dy * of_x, last)


@gluon.jit
def multiply(
    dw, given, scales, staging, old, CONSUMER: gl.constexpr, ACCUMULATE: gl.constexpr, REVERSE: gl.constexpr,
    LAYOUT: gl.constexpr, PROMOTE: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    stages, full, empty, queue, sizes = given
    dy_stages, x_stages, _dy_scale_stages, _x_scale_stages = stages
    num_groups, N, _K = sizes
    STAGES: gl.constexpr = full.shape[0]
    HEIGHT: gl.constexpr = dy_stages.shape[1]
    BLOCK_M: gl.constexpr = dy_stages.shape[0] // STAGES * HEIGHT
    BLOCK_N: gl.constexpr = x_stages.shape[1]
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    PARTS: gl.constexpr = BLOCK_N // dw.block_shape[2]
    if LATE:
        boxes = boxes_of_none(dw, HEIGHT, BLOCK_N)
        place, row, column = num_groups, 0, 0  # behind the last group nothing is stored
    step = 0
    uses = 0
    turn = 0
    group, size, tile_n, tile_k = take(queue, turn)
    while group >= 0:
        num_steps = gl.cdiv(size, BLOCK_K)
        first_n = tile_n * BLOCK_M + CONSUMER * HEIGHT
        first_k = tile_k * BLOCK_N
        matrix = num_groups - 1 - group if REVERSE else group
        if CONSUMER == 0 or first_n < N:
            last = None
            if LATE:
                last = boxes, (place, row), column, dw, staging
            sums = sum_and_scale(
                given, last, scales, group, size, first_n, first_k, step, num_steps, CONSUMER, LAYOUT, PROMOTE
            )
            middle = first_k + BLOCK_N // 2
            if LATE:
                boxes = sums
                place, row, column = matrix, first_n, first_k
            elif not ACCUMULATE or num_steps > 0:
                left, right = sums
                if old is None:
                    store_sums(left, dw, staging, matrix, first_n, first_k, ACCUMULATE, 0)
                    store_sums(right, dw, staging, matrix, first_n, middle, ACCUMULATE, 1)
                else:
                    add_boxes(left, dw, old, uses, matrix, first_n, first_k, 0)
                    add_boxes(right, dw, old, uses, matrix, first_n, middle, 1)
                    free_last_box(old, PARTS)
                    uses += PARTS // staging.shape[0]
        else:
            for s in range(num_steps):
                wait_for_loads(full, step + s)
                free_stage(empty, step + s, STAGES, CONSUMER)
        step += num_steps
        turn += 1
        group, size, tile_n, tile_k = take(queue, turn)
    if LATE:
        store_tile((boxes, (place, row), column, dw, staging))
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["num_groups"])
def k_grouped_float8_gluon_kernel(
    dy,  # [N, P] codes: descriptor of boxes HEIGHT x BLOCK_K, ragged along P
    x,  # [K, P] codes: descriptor of boxes BLOCK_N x BLOCK_K, ragged along P
    dw,  # [G, N, K]: descriptor of boxes HEIGHT rows high
    dy_scale_ptr,  # [G], dy_scale_stride apart; or [P/128, N] of blocks, [G, 1, N] of vectors
    x_scale_ptr,  # [G], x_scale_stride apart; or [P/128, K], [G, 1, K]
    offsets_ptr,  # [G + 1] int64, multiples of 16; of 128 for block scales
    counter_ptr,  # [1] int32, 0
    num_groups,
    N,
    K,
    dy_scale_stride,
    x_scale_stride,
    ACCUMULATE: gl.constexpr,  # takes float32
    FETCH: gl.constexpr,  # what is added to, else L2 adds
    REVERSE: gl.constexpr,  # the last group comes first in dw
    LAYOUT: gl.constexpr,  # of scales: "tensor", "vector" or "row"
    PROMOTE: gl.constexpr,
    LATE: gl.constexpr,  # a tile is stored while the next one is multiplied
    BOXES: gl.constexpr,  # of each consumer, on their way to dw, or from and to it
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """dw[g, n, k] = sum_p dy[n, p] x[k, p] over the columns of group g; ACCUMULATE: dw += it.

    A group without columns gets zeros; with ACCUMULATE it is left as it was.
    """
    HEIGHT: gl.constexpr = dy.block_shape[2]
    CONSUMERS: gl.constexpr = BLOCK_M // HEIGHT
    gl.static_assert(CONSUMERS == (3 if LAYOUT == "row" and not FETCH else 2), "there are no such roles")
    ROW_SCALES: gl.constexpr = (256 if BLOCK_M == 192 else BLOCK_M) if LAYOUT == "row" else 1
    COLUMN_SCALES: gl.constexpr = BLOCK_N if LAYOUT == "row" else 1
    dy_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(dy.block_shape[2:], dy.dtype)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(x.block_shape[2:], x.dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dy_stages = gl.allocate_shared_memory(dy.dtype, [CONSUMERS * STAGES, HEIGHT, BLOCK_K], dy_layout)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_N, BLOCK_K], x_layout)
    dy_scale_stages = gl.allocate_shared_memory(gl.float32, [STAGES, ROW_SCALES], plain)
    x_scale_stages = gl.allocate_shared_memory(gl.float32, [STAGES, COLUMN_SCALES], plain)
    stagings = allocate_staging(dw, BOXES, CONSUMERS)
    ranks = gl.allocate_shared_memory(gl.int32, [GROUPS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [CONSUMERS * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=33 if LAYOUT == "row" else 1)
    for i in gl.static_range(CONSUMERS * STAGES):
        mbarrier.init(empty.index(i), count=1)
    queue = make_queue(4, CONSUMERS + (2 if FETCH else 0) + (1 if LAYOUT == "row" else 0))
    rank_groups(offsets_ptr, num_groups, ranks, False)
    stages = dy_stages, x_stages, dy_scale_stages, x_scale_stages
    sizes = num_groups, N, K
    given = stages, full, empty, queue, sizes
    scales = dy_scale_ptr, x_scale_ptr, dy_scale_stride, x_scale_stride
    # Registers of a thread of each role but the first one's: no spills.
    if FETCH:
        old_0 = with_barriers(stagings[0])
        old_1 = with_barriers(stagings[1])
        fence_async_shared()
        if LAYOUT == "row":
            gl.warp_specialize(
                [
                    (multiply, (dw, given, scales, stagings[0], old_0, 0, ACCUMULATE, REVERSE, LAYOUT, PROMOTE, LATE)),
                    (multiply, (dw, given, scales, stagings[1], old_1, 1, ACCUMULATE, REVERSE, LAYOUT, PROMOTE, LATE)),
                    (load, (dy, x, given, ranks, offsets_ptr, counter_ptr, BAND)),
                    (load_scales, (given, scales, offsets_ptr)),
                    (load_old_sums, (dw, old_0, queue, sizes, 0, 2, REVERSE, BLOCK_M, BLOCK_N)),
                    (load_old_sums, (dw, old_1, queue, sizes, 1, 2, REVERSE, BLOCK_M, BLOCK_N)),
                ],
                [4, 1, 1, 1, 1],
                [208, 40, 40, 40, 40],
            )
        else:
            gl.warp_specialize(
                [
                    (multiply, (dw, given, scales, stagings[0], old_0, 0, ACCUMULATE, REVERSE, LAYOUT, PROMOTE, LATE)),
                    (multiply, (dw, given, scales, stagings[1], old_1, 1, ACCUMULATE, REVERSE, LAYOUT, PROMOTE, LATE)),
                    (load, (dy, x, given, ranks, offsets_ptr, counter_ptr, BAND)),
                    (load_old_sums, (dw, old_0, queue, sizes, 0, 2, REVERSE, BLOCK_M, BLOCK_N)),
                    (load_old_sums, (dw, old_1, queue, sizes, 1, 2, REVERSE, BLOCK_M, BLOCK_N)),
                ],
                [4, 1, 1, 1],
                [232, 40, 40, 40],
            )
    elif LAYOUT == "row":
        fence_async_shared()
        gl.warp_specialize(
            [
                (multiply, (dw, given, scales, stagings[0], None, 0, ACCUMULATE, REVERSE, LAYOUT, PROMOTE, LATE)),
                (multiply, (dw, given, scales, stagings[1], None, 1, ACCUMULATE, REVERSE, LAYOUT, PROMOTE, LATE)),
                (multiply, (dw, given, scales, stagings[2], None, 2, ACCUMULATE, REVERSE, LAYOUT, PROMOTE, LATE)),
                (load, (dy, x, given, ranks, offsets_ptr, counter_ptr, BAND)),
                (load_scales, (given, scales, offsets_ptr)),
            ],
            [4, 4, 1, 1],
            [152, 152, 40, 40],
        )
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (multiply, (dw, given, scales, stagings[0], None, 0, ACCUMULATE, REVERSE, LAYOUT, PROMOTE, LATE)),
                (multiply, (dw, given, scales, stagings[1], None, 1, ACCUMULATE, REVERSE, LAYOUT, PROMOTE, LATE)),
                (load, (dy, x, given, ranks, offsets_ptr, counter_ptr, BAND)),
            ],
            [4, 1],
            [232, 40],
        )


# -------------------------------------------------------------------------------------------------------- launcher

_k_grouped = Launch(k_grouped_float8_gluon_kernel)


def k_grouped_float8_gluon(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offsets: Tensor,
    out: Tensor,
    config: GroupedFloat8Config,
    layout: ScaleLayout,
    promote: bool,
    accumulate: bool,
    reverse: bool,
    spare: int,
) -> None:
    """Launches NT, of tensors that `takes_descriptors` takes. Scales per tensor, vectors, or of 1x128 blocks.

    accumulate, for float32 alone: out += it. config: a tile of two consumers or, with scales of blocks and nothing
    that is fetched, of three.
    """
    G, N, K = out.shape
    num_tiles = G * cdiv(N, config.block_m) * cdiv(K, config.block_n)
    _k_grouped(
        out,
        min(num_tiles, multiprocessors(out, spare)),
        with_layout(ragged_descriptor(dy, (HEIGHT, config.block_k), axis=1, unit=16)),
        with_layout(ragged_descriptor(x, (config.block_n, config.block_k), axis=1, unit=16)),
        with_layout(descriptor(out, (1, HEIGHT, BOX_BYTES // out.itemsize))),
        dy_scale,
        x_scale,
        offsets,
        torch.zeros(1, dtype=torch.int32, device=out.device),
        G,
        N,
        K,
        dy_scale.stride(0),
        x_scale.stride(0),
        ACCUMULATE=accumulate,
        FETCH=accumulate and config.fetches,
        REVERSE=reverse,
        LAYOUT=layout,
        PROMOTE=promote,
        LATE=out.itemsize == 2 and not (layout == "vector" and promote),
        BOXES=FETCHED if accumulate and config.fetches else BOXES,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        BAND=band(config.block_m),
        GROUPS=max(128, next_power_of_2(G)),
        num_warps=4,  # the others are those of roles
    )
