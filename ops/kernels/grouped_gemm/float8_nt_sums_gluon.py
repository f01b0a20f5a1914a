"""The sums of a tile of `float8_nt_gluon`: how a consumer adds the products of its steps, and their scales.

    sum_fast      the tensor core adds the steps
    sum_split     each step of 128 codes is added in float32, half of the columns after the other
    sum_blocks    each step is multiplied by its scales of blocks and added
    sum_and_scale one of these by the layout of scales, times the scales that hold for all steps

What is stored meanwhile, the tile before, is given to each (`stores_gluon`).

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# N out features, K in features

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ops.kernels.grouped_gemm.finished_rows_gluon import (
    boxes_times_vectors,
    load_spread_vectors,
    load_vectors,
    times_vectors,
)
from ops.kernels.grouped_gemm.high_precision_nt_gluon import free_stage, wait_for_loads
from ops.kernels.grouped_gemm.split_accumulation_gluon import add_to_halves, zero_halves
from ops.kernels.grouped_gemm.stores_gluon import rounded_boxes, split_columns, store_boxes, store_tile
from recipes.triton.names_gluon import reinterpret


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
def transposed(codes, CONSUMER: gl.constexpr, N: gl.constexpr):
    """64 columns of codes, rows [128, 128] in shared memory, as an operand [64, 128] in registers, for products with N
    columns.

    Row 16 i + 8 j + k of it is column 16 i + 2 k + j of these: in matrices of pairs of codes, which are transposed as
    they are loaded, the codes of both then are where wgmma wants them, but for their order in a thread. What such a
    matrix loads at once, tokens 0, 1, 4, 5, 10, 11, 14, 15, lies in different banks: so token t is looked for at t ^ 2
    where 8 is in t, in the layout, and the registers of these threads change places.
    """
    pairs_layout: gl.constexpr = gl.SharedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16], [0, 32], [1, 8], [2, 16], [4, 32], [10, 0], [16, 0], [32, 0],
         [64, 0]],
        [], 1024,
    )  # fmt: skip
    layout: gl.constexpr = gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [16, 0], [32, 0], [64, 0]],
        lane_bases=[[4, 0], [8, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 8], [0, 16]],
        block_bases=[],
        shape=[128, 32],
    )
    pairs = reinterpret(codes, gl.int16, [128, 64], pairs_layout).slice(CONSUMER * 32, 32, 1).load(layout)
    even, odd = gl.inline_asm_elementwise(
        """{
        .reg .u32 lane, selector;
        .reg .pred changed;
        mov.u32 lane, %laneid;
        and.b32 lane, lane, 2;
        setp.ne.u32 changed, lane, 0;
        selp.b32 selector, 0x2064, 0x6420, changed;
        prmt.b32 $0, $2, $3, selector;
        xor.b32 selector, selector, 0x1111;
        prmt.b32 $1, $2, $3, selector;
        }""", "=r,=r,r,r",
        [pairs], dtype=(gl.int8, gl.int8), is_pure=True, pack=4,
    )  # fmt: skip
    rows = gl.join(even, odd).reshape([128, 4, 8, 2]).permute([1, 3, 2, 0]).reshape([64, 128])
    mma: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 32])
    rows = gl.convert_layout(rows, gl.DotOperandLayout(0, mma, 4), assert_trivial=True)
    return rows.to(codes.dtype, bitcast=True)


@gluon.jit
def dy_operand(dy_stages, stage, STAGES: gl.constexpr, CONSUMER: gl.constexpr, N: gl.constexpr):
    """This consumer's rows of dy^T in a step, for products with N columns."""
    if dy_stages.shape[1] == 64:
        return dy_stages.index(stage * (dy_stages.shape[0] // STAGES) + CONSUMER)
    else:
        return transposed(dy_stages.index(stage), CONSUMER, N)


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
    BLOCK_N: gl.constexpr = x_stages.shape[1]
    left, right = zero_halves(64, BLOCK_N)
    STORED: gl.constexpr = 0 if last is None else 1  # steps meanwhile
    if last is not None:
        stage = wait_for_loads(full, step)
        a = dy_operand(dy_stages, stage, STAGES, CONSUMER, BLOCK_N // 2)
        left, right = add_to_halves(left, right, a, x_stages.index(stage), last)
        free_stage(empty, step, STAGES, CONSUMER)
    for s in range(num_steps - STORED):
        stage = wait_for_loads(full, step + s + STORED)
        a = dy_operand(dy_stages, stage, STAGES, CONSUMER, BLOCK_N // 2)
        left, right = add_to_halves(left, right, a, x_stages.index(stage), None)
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
            loaded = load_vectors(*vectors, stages[0].shape[1], BLOCK_N, layout)
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
