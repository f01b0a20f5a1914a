"""TN and NN of `grouped_gemm` in Gluon, for Hopper: the warps of a program have roles, as in `high_precision_nt_gluon`.

A program takes tile after tile. One warp loads (TMA) into a ring of stages, consumers of four warps multiply (wgmma),
each 64 rows of the tile by all of its columns, and store their rows: while one stores, the others multiply. Where there
are registers for it, 16-bit rows are stored while the next tile is multiplied (`stores_gluon`; LATE): with split
accumulation or scales of rows and columns not beside a bias, nor with both. A consumer whose
rows are past the end of their group only counts the steps of the tile, and its rows are not loaded: that boxes
outside of a tensor are filled with zeros takes as long as loading them. Nor is the second half of the last columns, if
there is nothing in it and consumers are two.

    16-bit operands, codes per tensor or with a scale for each row and column
                                         128 x 256, two consumers; split accumulation: `split_accumulation_gluon`
    codes with scales of blocks          192 x 128, three: while one scales and adds its product, the others multiply

Scales of blocks have a role of their own: one warp copies (cp.async) those of the rows of a step to its stage and,
behind them, that of its columns, 64 times.

Which tile is next: `tile_queue_gluon`. What becomes of its sums: `finished_rows_gluon`.

Barriers: a stage is used for the u-th time in phase u % 2 of its barriers. `full`: an arrival, the bytes of a stage,
and an arrival of each lane that copies scales. `empty`: an arrival of each consumer. Before use u those who load wait
for phase (u - 1) % 2 of `empty`, which has passed at the start.

Loops over steps start at 0: with loops from `step` to `step + num_steps`, Triton 3.6 compiled split accumulation as if
`step` were 0 in every tile.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# T rows, G groups, R summed features, C features that come out

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
    finished,
    load_spread_vectors,
    load_vectors,
    times_vectors,
    zero_tail,
)
from ops.kernels.grouped_gemm.high_precision_nt_gluon import wait_for_loads, with_layout
from ops.kernels.grouped_gemm.measured_tiles import BOX_BYTES, GroupedGemmConfig
from ops.kernels.grouped_gemm.persistent_schedule import band, most_tiles, multiprocessors
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, ragged_indices
from ops.kernels.grouped_gemm.split_accumulation_gluon import add_product, add_to_halves, product_apart, zero_halves
from ops.kernels.grouped_gemm.stores_gluon import allocate_staging, boxes_of_none, store_boxes, store_tile
from ops.kernels.grouped_gemm.tile_queue_gluon import (
    ask_next,
    count_tiles,
    hand,
    make_queue,
    next_tile,
    read_ends,
    take,
    tile_of_groups,
)
from ops.kernels.grouped_gemm.tile_rules import has_fast_memory
from ops.kernels.grouped_gemm.tile_rules_float8 import IN_ORDER_ROWS, GroupedFloat8Config
from recipes.tensors.formats import ScaleLayout
from recipes.triton.launch import Launch, cdiv, next_power_of_2
from recipes.triton.names_gluon import async_load, reinterpret, tma_load

HEIGHT = 64  # rows of a consumer
BOXES = 2  # of a consumer, on their way to the output


# ------------------------------------------------------------------------------------------------------ roles


@gluon.jit
def wait_for_room(empty, step):
    """The stage of this step, once all consumers have freed it."""
    STAGES: gl.constexpr = empty.shape[0]
    mbarrier.wait(empty.index(step % STAGES), (step // STAGES & 1) ^ 1)
    return step % STAGES


@gluon.jit
def free_stage(empty, step, pred=True):
    """This consumer has done the step."""
    mbarrier.arrive(empty.index(step % empty.shape[0]), pred=pred)


@gluon.jit
def load(
    a, b, given, ends, counter_ptr, TRANSPOSED: gl.constexpr, BAND: gl.constexpr, GATED: gl.constexpr = False
):  # fmt: skip
    """GATED: of the two boxes of a tile of b, one is of the first half of C and the other of the second."""
    stages, _stagings, full, empty, queue, offsets_ptr, sizes = given
    a_stages, b_boxes, b_stages, _scale_stages = stages
    _rows, _num_groups, R, C = sizes
    HEIGHT: gl.constexpr = a_stages.shape[1]
    BLOCK_K: gl.constexpr = a_stages.shape[2]
    BLOCK_N: gl.constexpr = b_stages.shape[1 if TRANSPOSED else 2]
    BOXES: gl.constexpr = a_stages.shape[0] // full.shape[0]
    PARTS: gl.constexpr = b_boxes.shape[0] // full.shape[0]
    HALF: gl.constexpr = BLOCK_N // 2
    of_a: gl.constexpr = a.block_type.nbytes
    of_b: gl.constexpr = b.block_type.nbytes
    # Tiles that run side by side share the larger of the operands.
    ACROSS: gl.constexpr = BOXES * HEIGHT > BLOCK_N
    num_tiles_m = gl.max(read_ends(ends), axis=0)
    num_tiles_n = gl.cdiv(C, BLOCK_N)
    step = 0
    turn = 0
    tile = gl.program_id(0)
    while tile < num_tiles_m * num_tiles_n:
        if counter_ptr is not None:
            asked = ask_next(counter_ptr)
        group, first, size, tile_n = tile_of_groups(offsets_ptr, ends, tile, num_tiles_n, BOXES * HEIGHT, BAND, ACROSS)
        hand(queue, turn, (group, first.to(gl.int32), size, tile_n))
        z, y, row = ragged_indices(first, size, 0, 1)
        column = tile_n * (HALF if GATED else BLOCK_N)
        apart = C // 2 if GATED else HALF
        width = C - column
        for r in range(0, R, BLOCK_K):
            stage = wait_for_room(empty, step)
            barrier = full.index(stage)
            for i in gl.static_range(BOXES):
                # of the boxes with rows
                last = (size > i * HEIGHT) & ((size <= (i + 1) * HEIGHT) | (i + 1 == BOXES))
                if PARTS == 2 and not GATED:
                    mbarrier.expect(barrier, (i + 1) * of_a + of_b, pred=last & (width <= HALF))
                    last = last & (width > HALF)
                mbarrier.expect(barrier, (i + 1) * of_a + PARTS * of_b, pred=last)
            for i in gl.static_range(PARTS):
                b_box = b_boxes.index(stage * PARTS + i).reshape(b.block_shape)
                at = column + i * apart
                has_columns = GATED or i == 0 or width > HALF
                if TRANSPOSED:
                    tma_load(b, [group, at, r], barrier, b_box, pred=has_columns)
                else:
                    tma_load(b, [group, r, at], barrier, b_box, pred=has_columns)
            for i in gl.static_range(BOXES):
                a_box = a_stages.index(stage * BOXES + i).reshape(a.block_shape)
                tma_load(a, [z, y, row + i * HEIGHT, r], barrier, a_box, pred=size > i * HEIGHT)
            step += 1
        turn += 1
        if counter_ptr is None:
            tile += gl.num_programs(0)
        else:
            tile = next_tile(asked)
    hand(queue, turn, (-1, 0, 0, 0))


@gluon.jit
def load_scales(given, scales):
    """Those of BLOCK_M rows, then that of the columns. Rows past their group get some scale, and are not stored."""
    stages, _stagings, full, empty, queue, _offsets_ptr, sizes = given
    a_stages, _b_boxes, b_stages, scale_stages = stages
    rows, _num_groups, R, C = sizes
    a_scale_ptr, b_scale_ptr, _a_scale_stride, _b_scale_stride = scales
    BLOCK_M: gl.constexpr = a_stages.shape[0] // full.shape[0] * a_stages.shape[1]
    BLOCK_N: gl.constexpr = b_stages.shape[1]
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    offs = gl.arange(0, scale_stages.shape[1], layout)
    num_steps = gl.cdiv(R, a_stages.shape[2])
    step = 0
    turn = 0
    group, first, _size, tile_n = take(queue, turn)
    while group >= 0:
        of_rows = a_scale_ptr + gl.minimum(first + offs, rows - 1)
        of_columns = b_scale_ptr + (group.to(gl.int64) * gl.cdiv(C, BLOCK_N) + tile_n) * num_steps
        for s in range(num_steps):
            stage = wait_for_room(empty, step)
            at = gl.where(offs < BLOCK_M, of_rows + gl.cast(s, gl.int64) * rows, of_columns + s)
            async_load(scale_stages.index(stage), at)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            step += 1
        turn += 1
        group, first, _size, tile_n = take(queue, turn)


@gluon.jit
def multiply_step(acc, given, step, CONSUMER: gl.constexpr, TRANSPOSED: gl.constexpr, WIDTH: gl.constexpr):
    """acc and the product of this consumer's rows and the first WIDTH columns of a tile, on its way."""
    stages, _stagings, full, _empty, _queue, _offsets_ptr, _sizes = given
    a_stages, _b_boxes, b_stages, _scale_stages = stages
    CONSUMERS: gl.constexpr = a_stages.shape[0] // full.shape[0]
    stage = wait_for_loads(full, step)
    a_stage = a_stages.index(stage * CONSUMERS + CONSUMER)
    if TRANSPOSED:
        b_stage = b_stages.index(stage).slice(0, WIDTH, 0).permute([1, 0])
    else:
        b_stage = b_stages.index(stage).slice(0, WIDTH, 1)
    return warpgroup_mma(a_stage, b_stage, acc, is_async=True)


@gluon.jit
def sum_products(
    given, last, vectors, step, num_steps, CONSUMER: gl.constexpr, TRANSPOSED: gl.constexpr, WIDTH: gl.constexpr
):  # fmt: skip
    """Those of this consumer's rows and the first WIDTH columns of a tile. last: what is stored meanwhile.

    vectors: arguments of `load_spread_vectors`; then the boxes of the products times these are returned. Or None.
    """
    stages, _stagings, _full, empty, _queue, _offsets_ptr, _sizes = given
    HEIGHT: gl.constexpr = stages[0].shape[1]
    BITS: gl.constexpr = stages[0].dtype.primitive_bitwidth
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 256 // BITS])
    acc = gl.zeros([HEIGHT, WIDTH], gl.float32, layout)
    if last is not None:
        acc = multiply_step(acc, given, step, CONSUMER, TRANSPOSED, WIDTH)
        store_boxes(last, 0)
        acc = multiply_step(acc, given, step + 1, CONSUMER, TRANSPOSED, WIDTH)
        store_boxes(last, 1)
        if vectors is not None:
            row_scale, column_scale = load_spread_vectors(*vectors, HEIGHT, WIDTH, layout)
        acc = warpgroup_mma_wait(1, deps=[acc])
        free_stage(empty, step)
        for s in range(num_steps - 2):
            acc = multiply_step(acc, given, step + s + 2, CONSUMER, TRANSPOSED, WIDTH)
            acc = warpgroup_mma_wait(1, deps=[acc])
            free_stage(empty, step + s + 1)
    else:
        for s in range(num_steps):
            acc = multiply_step(acc, given, step + s, CONSUMER, TRANSPOSED, WIDTH)
            acc = warpgroup_mma_wait(1, deps=[acc])
            free_stage(empty, step + s - 1, pred=s > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    free_stage(empty, step + num_steps - 1)
    if vectors is not None:
        return boxes_times_vectors(acc, row_scale, column_scale, last[3])
    else:
        return acc


@gluon.jit
def add_scaled(acc, product, scale):
    """acc + product * scale[:, None], rounded once; in assembly, so that it stays before the next product."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, gl.expand_dims(scale, 1), acc],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def add_block(acc, given, last, step, CONSUMER: gl.constexpr):
    """acc and the product of a step times its scales. last: what is stored meanwhile, or None."""
    stages, _stagings, full, empty, _queue, _offsets_ptr, _sizes = given
    a_stages, _b_boxes, b_stages, scale_stages = stages
    HEIGHT: gl.constexpr = a_stages.shape[1]
    CONSUMERS: gl.constexpr = a_stages.shape[0] // full.shape[0]
    layout: gl.constexpr = acc.type.layout
    stage = wait_for_loads(full, step)
    a_stage = a_stages.index(stage * CONSUMERS + CONSUMER)
    product = product_apart(acc, a_stage, b_stages.index(stage).permute([1, 0]))
    if last is not None:
        store_tile(last)
    of_step = scale_stages.index(stage)
    scale = of_step.slice(CONSUMER * HEIGHT, HEIGHT).load(gl.SliceLayout(1, layout))
    scale *= of_step.slice(CONSUMERS * HEIGHT, HEIGHT).load(gl.SliceLayout(1, layout))
    product = warpgroup_mma_wait(0, deps=[product])
    free_stage(empty, step)
    return add_scaled(acc, product, scale)


@gluon.jit
def sum_blocks(given, last, step, num_steps, CONSUMER: gl.constexpr):
    """As `sum_products`, of codes with scales of blocks. The first product has no sums beside it: last fits there."""
    stages, _stagings, _full, _empty, _queue, _offsets_ptr, _sizes = given
    HEIGHT: gl.constexpr = stages[0].shape[1]
    BLOCK_N: gl.constexpr = stages[2].shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc = gl.zeros([HEIGHT, BLOCK_N], gl.float32, layout)
    STORED: gl.constexpr = 0 if last is None else 1  # steps meanwhile
    if last is not None:
        acc = add_block(acc, given, last, step, CONSUMER)
    for s in range(num_steps - STORED):
        acc = add_block(acc, given, None, step + s + STORED, CONSUMER)
    return acc


@gluon.jit
def sum_halves(given, last, step, num_steps, CONSUMER: gl.constexpr):
    """As `sum_products` of all columns, in split accumulation: their left half and their right half."""
    stages, _stagings, full, empty, _queue, _offsets_ptr, _sizes = given
    a_stages, _b_boxes, b_stages, _scale_stages = stages
    CONSUMERS: gl.constexpr = a_stages.shape[0] // full.shape[0]
    left, right = zero_halves(a_stages.shape[1], b_stages.shape[1])
    STORED: gl.constexpr = 0 if last is None else 1  # steps meanwhile
    if last is not None:
        stage = wait_for_loads(full, step)
        a_stage = a_stages.index(stage * CONSUMERS + CONSUMER)
        left, right = add_to_halves(left, right, a_stage, b_stages.index(stage), last)
        free_stage(empty, step)
    for s in range(num_steps - STORED):
        stage = wait_for_loads(full, step + s + STORED)
        a_stage = a_stages.index(stage * CONSUMERS + CONSUMER)
        left, right = add_to_halves(left, right, a_stage, b_stages.index(stage), None)
        free_stage(empty, step + s + STORED)
    return left, right


@gluon.jit
def sum_half(given, step, num_steps, CONSUMER: gl.constexpr):
    """The left half of `sum_halves` alone."""
    stages, _stagings, full, empty, _queue, _offsets_ptr, _sizes = given
    a_stages, _b_boxes, b_stages, _scale_stages = stages
    CONSUMERS: gl.constexpr = a_stages.shape[0] // full.shape[0]
    HALF: gl.constexpr = b_stages.shape[1] // 2
    acc, _ = zero_halves(a_stages.shape[1], b_stages.shape[1])
    for s in range(num_steps):
        stage = wait_for_loads(full, step + s)
        a_stage = a_stages.index(stage * CONSUMERS + CONSUMER)
        acc = add_product(acc, a_stage, b_stages.index(stage).slice(0, HALF, 0).permute([1, 0]))
        free_stage(empty, step + s)
    return acc


@gluon.jit
def sum_and_scale(
    given, last, out, staging, scales, added, group, first, size, column, step, num_steps, CONSUMER: gl.constexpr,
    TRANSPOSED: gl.constexpr, LAYOUT: gl.constexpr, PROMOTE: gl.constexpr, WIDTH: gl.constexpr,
):  # fmt: skip
    """`finished` sums of this consumer's rows and the first WIDTH columns of a tile. last: what is stored meanwhile."""
    stages, _stagings, _full, _empty, _queue, _offsets_ptr, sizes = given
    C = sizes[3]
    HEIGHT: gl.constexpr = stages[0].shape[1]
    BLOCK_N: gl.constexpr = stages[2].shape[1 if TRANSPOSED else 2]
    row = CONSUMER * HEIGHT
    if LAYOUT == "square":
        acc = sum_blocks(given, last, step, num_steps, CONSUMER)
        return finished(acc, out, staging, scales, added, group, first, size, row, column, C, LAYOUT, False)
    elif PROMOTE and WIDTH == BLOCK_N:
        left, right = sum_halves(given, last, step, num_steps, CONSUMER)
        middle = column + WIDTH // 2
        boxes = finished(left, out, staging, scales, added, group, first, size, row, column, C, LAYOUT, False, 0)
        return boxes + finished(
            right, out, staging, scales, added, group, first, size, row, middle, C, LAYOUT, False, 1
        )
    elif PROMOTE:
        acc = sum_half(given, step, num_steps, CONSUMER)
        return finished(acc, out, staging, scales, added, group, first, size, row, column, C, LAYOUT, False)
    elif LAYOUT == "vector" and added[0] is None:
        # The vectors are loaded while products are on their way; a bias needs their registers.
        a_scale_ptr, b_scale_ptr, _a_scale_stride, _b_scale_stride = scales
        of_columns_ptr = b_scale_ptr + group.to(gl.int64) * C + column
        if last is not None:
            vectors = a_scale_ptr + first + row, of_columns_ptr, size - row, C - column
            return sum_products(given, last, vectors, step, num_steps, CONSUMER, TRANSPOSED, WIDTH)
        of_rows, of_columns = load_vectors(
            a_scale_ptr + first + row, of_columns_ptr, size - row, C - column, HEIGHT, WIDTH,
            gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32]),
        )  # fmt: skip
        acc = sum_products(given, None, None, step, num_steps, CONSUMER, TRANSPOSED, WIDTH)
        acc = times_vectors(acc, of_rows, of_columns)
        return finished(acc, out, staging, scales, added, group, first, size, row, column, C, LAYOUT, True)
    else:
        acc = sum_products(given, last, None, step, num_steps, CONSUMER, TRANSPOSED, WIDTH)
        return finished(acc, out, staging, scales, added, group, first, size, row, column, C, LAYOUT, False)


@gluon.jit
def multiply(
    out, given, scales, added, CONSUMER: gl.constexpr, TRANSPOSED: gl.constexpr, LAYOUT: gl.constexpr,
    PROMOTE: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    stages, stagings, full, empty, queue, offsets_ptr, sizes = given
    a_stages, b_boxes, b_stages, _scale_stages = stages
    staging = stagings[CONSUMER]
    rows, num_groups, R, C = sizes
    HEIGHT: gl.constexpr = a_stages.shape[1]
    CONSUMERS: gl.constexpr = a_stages.shape[0] // full.shape[0]
    BLOCK_N: gl.constexpr = b_stages.shape[1 if TRANSPOSED else 2]
    PARTS: gl.constexpr = b_boxes.shape[0] // full.shape[0]
    HALF: gl.constexpr = BLOCK_N // 2
    num_steps = gl.cdiv(R, a_stages.shape[2])
    step = 0
    turn = 0
    group, first, size, tile_n = take(queue, turn)
    if LATE:
        boxes = boxes_of_none(out, HEIGHT, BLOCK_N)
        # Behind the last column nothing is stored. z as of any tile: of another one scales of blocks spill. With y and
        # row of no rows, 16-bit products wait for each other.
        z, y, row, place = 1 << 30, 0, 0, gl.cdiv(C, BLOCK_N) * BLOCK_N
    while group >= 0:
        column = tile_n * BLOCK_N
        if CONSUMER > 0 and CONSUMER * HEIGHT >= size:
            for s in range(num_steps):
                wait_for_loads(full, step + s)
                free_stage(empty, step + s)
        elif LATE:
            last = boxes, (z, y, row), place, out, staging
            boxes = sum_and_scale(
                given, last, out, None, scales, added, group, first, size, column, step, num_steps, CONSUMER,
                TRANSPOSED, LAYOUT, PROMOTE, BLOCK_N,
            )  # fmt: skip
            z, y, row = ragged_indices(first, size, CONSUMER * HEIGHT, 1)
            place = column
        elif PARTS == 1 or C - column > HALF:
            sum_and_scale(
                given, None, out, staging, scales, added, group, first, size, column, step, num_steps, CONSUMER,
                TRANSPOSED, LAYOUT, PROMOTE, BLOCK_N,
            )  # fmt: skip
        else:
            sum_and_scale(
                given, None, out, staging, scales, added, group, first, size, column, step, num_steps, CONSUMER,
                TRANSPOSED, LAYOUT, PROMOTE, HALF,
            )  # fmt: skip
        step += num_steps
        turn += 1
        group, first, size, tile_n = take(queue, turn)
    if LATE:
        store_tile((boxes, (z, y, row), place, out, staging))
    zero_tail(out, staging, offsets_ptr, rows, num_groups, C, CONSUMER, CONSUMERS)
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_gluon_kernel(
    a,  # [T, R]: descriptor of boxes HEIGHT x BLOCK_K, ragged along T
    b,  # [G, C, R], or [G, R, C]: descriptor of boxes as wide as the tile, half if NARROW
    out,  # [T, C]: descriptor of boxes HEIGHT rows high, ragged along T
    a_scale_ptr,  # [G], a_scale_stride apart, or None; or [ceil(R/128), T] of blocks, [1, T] of vectors
    b_scale_ptr,  # [G], b_scale_stride apart, or None; or [G, ceil(C/128), ceil(R/128)], [G, 1, C]
    offsets_ptr,  # [G + 1] int64
    bias_ptr,  # [G, C] or None
    scales_ptr,  # [T] or None
    counter_ptr,  # [1] int32, 0, or None
    rows,
    num_groups,
    R,
    C,
    a_scale_stride,
    b_scale_stride,
    TRANSPOSED: gl.constexpr,  # b is [G, C, R]
    LAYOUT: gl.constexpr,  # of scales: "tensor", "vector", or "square", with three consumers, else two
    PROMOTE: gl.constexpr,
    LATE: gl.constexpr,  # a tile is stored while the next one is multiplied, in more than one step
    NARROW: gl.constexpr,  # the last of the columns fill half a tile at most: b comes in boxes of half a tile
    BOXES: gl.constexpr,  # of each consumer, on their way to out
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """out[t, c] = sum_r a[t, r] b[g, c, r] + scales[t] bias[g, c], tile after tile of one group; rows of none: 0.

    Products of codes are multiplied by their scales before they are added, other sums by what a_scale holds.
    """
    HEIGHT: gl.constexpr = a.block_shape[2]
    CONSUMERS: gl.constexpr = BLOCK_M // HEIGHT
    gl.static_assert(CONSUMERS == (3 if LAYOUT == "square" else 2), "there are no such roles")
    SCALES: gl.constexpr = BLOCK_M + HEIGHT if LAYOUT == "square" else 1
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a.block_shape[2:], a.dtype)
    PARTS: gl.constexpr = 2 if NARROW else 1
    B_STAGE: gl.constexpr = [BLOCK_N, BLOCK_K] if TRANSPOSED else [BLOCK_K, BLOCK_N]
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b.block_shape[1:], b.dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_stages = gl.allocate_shared_memory(a.dtype, [CONSUMERS * STAGES, HEIGHT, BLOCK_K], a_layout)
    b_boxes = gl.allocate_shared_memory(b.dtype, [PARTS * STAGES, b.block_shape[1], b.block_shape[2]], b_layout)
    b_stages = reinterpret(b_boxes, b.dtype, [STAGES, B_STAGE[0], B_STAGE[1]], b_layout)
    scale_stages = gl.allocate_shared_memory(gl.float32, [STAGES, SCALES], plain)
    stagings = allocate_staging(out, BOXES, CONSUMERS)
    ends = gl.allocate_shared_memory(gl.int32, [GROUPS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=33 if LAYOUT == "square" else 1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    queue = make_queue(4, CONSUMERS + 1 if LAYOUT == "square" else CONSUMERS)
    fence_async_shared()
    count_tiles(offsets_ptr, num_groups, ends, BLOCK_M)
    stages = a_stages, b_boxes, b_stages, scale_stages
    sizes = rows, num_groups, R, C
    given = stages, stagings, full, empty, queue, offsets_ptr, sizes
    scales = a_scale_ptr, b_scale_ptr, a_scale_stride, b_scale_stride
    added = bias_ptr, scales_ptr
    # Registers of a thread of each role but the first one's: no spills.
    if LAYOUT == "square":
        gl.warp_specialize(
            [
                (multiply, (out, given, scales, added, 0, TRANSPOSED, LAYOUT, PROMOTE, LATE)),
                (multiply, (out, given, scales, added, 1, TRANSPOSED, LAYOUT, PROMOTE, LATE)),
                (multiply, (out, given, scales, added, 2, TRANSPOSED, LAYOUT, PROMOTE, LATE)),
                (load, (a, b, given, ends, counter_ptr, TRANSPOSED, BAND)),
                (load_scales, (given, scales)),
            ],
            [4, 4, 1, 1],
            [152, 152, 56, 56],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (out, given, scales, added, 0, TRANSPOSED, LAYOUT, PROMOTE, LATE)),
                (multiply, (out, given, scales, added, 1, TRANSPOSED, LAYOUT, PROMOTE, LATE)),
                (load, (a, b, given, ends, counter_ptr, TRANSPOSED, BAND)),
            ],
            [4, 1],
            [224, 56],
        )


# -------------------------------------------------------------------------------------------------------- launcher

_m_grouped = Launch(m_grouped_gluon_kernel)


def m_grouped_gluon(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    config: GroupedGemmConfig | GroupedFloat8Config,
    *,
    a_scale: Tensor | None,
    b_scale: Tensor | None = None,
    layout: ScaleLayout = "tensor",
    transposed: bool = True,
    promote: bool = False,
    boxes: int = BOXES,
) -> None:
    """Launches TN (transposed) or NN, of tensors that `takes_descriptors` takes.

    a_scale, b_scale: of codes, per tensor [G], vectors, or of 1x128 and 128x128 blocks; a_scale else: alpha [G] or
    None. config: a tile of two consumers or, with scales of blocks, of three. boxes: of each, on their way to out.
    """
    (rows, R), G, C = a.shape, b.shape[0], out.shape[1]
    blockwise = layout == "square"
    in_order = blockwise and rows >= IN_ORDER_ROWS * G and has_fast_memory(out)
    num_tiles = most_tiles(rows, G, config.block_m) * cdiv(C, config.block_n)
    narrow = not blockwise and 0 < C % config.block_n <= config.block_n // 2
    # For the others there are no registers.
    late = (bias is None and not promote) or (layout == "tensor" and (bias is None or not promote))
    late = blockwise or (late and not narrow)
    late = late and R > config.block_k and out.itemsize == 2
    width = config.block_n // 2 if narrow else config.block_n
    b_box = (width, config.block_k) if transposed else (config.block_k, width)
    _m_grouped(
        out,
        min(num_tiles, multiprocessors(out)),
        with_layout(ragged_descriptor(a, (HEIGHT, config.block_k), axis=0)),
        with_layout(descriptor(b, (1, *b_box))),
        with_layout(ragged_descriptor(out, (HEIGHT, BOX_BYTES // out.itemsize), axis=0)),
        a_scale,
        b_scale,
        offsets,
        bias,
        scales,
        None if in_order else torch.zeros(1, dtype=torch.int32, device=out.device),
        rows,
        G,
        R,
        C,
        1 if a_scale is None else a_scale.stride(0),
        1 if b_scale is None else b_scale.stride(0),
        TRANSPOSED=transposed,
        LAYOUT=layout,
        PROMOTE=promote,
        LATE=late,
        NARROW=narrow,
        BOXES=boxes,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        BAND=band(min(config.block_m, config.block_n)),
        GROUPS=max(128, next_power_of_2(G)),
        num_warps=4,  # the others are those of roles
    )
