"""NT of `grouped_gemm.high_precision` in Gluon, for Hopper and 16-bit operands: the warps of a program have roles.

A program takes tile after tile of 128 x 256. One warp loads (TMA) into a ring of stages; two consumers of four warps
multiply (wgmma), each 64 rows of the tile by all of its columns, and store their rows, rounded to 16 bits, while the
next tile is multiplied (`stores_gluon`; LATE):

    loads        |A B|A B|A B|A B|A B|A B| ...       full[stage]: one arrival and the bytes of a stage
    consumer 0     * * * * * round * * store * ...   empty[stage], and STAGES behind it that of consumer 1: an arrival
    consumer 1     * * * * * round * * store * ...

So where groups have few rows, and a tile few steps, a tile takes little more than the longer of storing and
multiplying. Which tile is next: `tile_queue_gluon`.

float32 is stored at once, and what is accumulated in it L2 adds to what is there (`add_to_global`). L2 adds about
1 TB/s on an H100, so where groups have few rows a tile would wait for that. There a warp for each consumer fetches
what is added to (FETCH), box by box, as far ahead as there are boxes; the consumer adds, and the boxes go back with the
sums.

Barriers: a stage is used for the u-th time in phase u % 2 of its barriers. Consumers count steps, and step s has stage
s % STAGES and is use s // STAGES of it. Before use u the loading warp waits for phase (u - 1) % 2 of `empty`, which has
passed at the start.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# T rows, G groups, K in features, N out features

from functools import lru_cache

import torch
from torch import Tensor
from triton._C.libtriton.ir import DESCRIPTOR_REDUCE_KIND
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

from ops.kernels.grouped_gemm.measured_tiles import BOX_BYTES, GroupedGemmConfig
from ops.kernels.grouped_gemm.persistent_schedule import band, multiprocessors, tile_in_bands
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, ragged_indices
from ops.kernels.grouped_gemm.stores_gluon import (
    allocate_staging,
    boxes_of_none,
    rounded_boxes,
    split_columns,
    store_box,
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
from recipes.triton.gates import TensorDescriptor
from recipes.triton.launch import Launch, cdiv, next_power_of_2
from recipes.triton.names_gluon import tma_load, tma_store
from recipes.triton.repeated import DESCRIPTORS

DESCRIPTORS.add(GluonDescriptor)


# --------------------------------------------------------------------------------------------------------- storing


@builtin
def add_to_global(tensor_desc, coord, src, _semantic=None):
    """As `tma.async_copy_shared_to_global`, but adds: an operation that Triton has, and Gluon no name for."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def place_of(dw, matrix, row):
    """Coordinates of a row but for its column. dw: [G, N, K], or as `descriptor_by_parity` describes it."""
    if len(dw.block_shape) == 3:
        return matrix, row
    else:
        return matrix, row // 16, 0, 0


@gluon.jit
def store_sums(acc, dw, staging, place, column, ADD: gl.constexpr, PART: gl.constexpr):
    """Rounds acc and stores it at `place` (`place_of`) from this column on, or lets L2 add it, box by box.

    staging: boxes of this consumer, used in turn. PART: of parts as wide as this one, which it is.
    """
    if acc.shape[1] > dw.block_shape[-1]:
        left, right = split_columns(acc)
        store_sums(left, dw, staging, place, column, ADD, 2 * PART)
        store_sums(right, dw, staging, place, column + acc.shape[1] // 2, ADD, 2 * PART + 1)
    elif ADD:
        STAGING: gl.constexpr = staging.shape[0]
        box = staging.index(PART % STAGING)
        tma.store_wait(STAGING - 1)
        box.store(acc)
        fence_async_shared()
        add_to_global(dw, place + (column,), box.reshape(dw.block_shape))  # noqa: RUF005
    else:
        store_box(acc.to(dw.dtype), dw, staging, PART, place, column)


@gluon.jit
def with_barriers(boxes):
    """(boxes, full, empty): of each box a barrier for an old sum that has come, and for what may be overwritten."""
    BOXES: gl.constexpr = boxes.shape[0]
    full = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BOXES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    return boxes, full, empty


@gluon.jit
def add_boxes(acc, dw, old, uses, place, column, PART: gl.constexpr):
    """Adds acc to what lies at `place` (`place_of`), which `load_old_sums` brings, and stores the sums where they came
    from, box by box.

    old: boxes of this consumer, and two barriers of each. uses: how often it has used each of these before. The last
    box stays in use: `free_last_box`.
    """
    boxes, full, empty = old
    if acc.shape[1] > dw.block_shape[-1]:
        left, right = split_columns(acc)
        middle = column + acc.shape[1] // 2
        add_boxes(left, dw, old, uses, place, column, 2 * PART)
        add_boxes(right, dw, old, uses, place, middle, 2 * PART + 1)
    else:
        BOXES: gl.constexpr = boxes.shape[0]
        slot: gl.constexpr = PART % BOXES
        box = boxes.index(slot)
        mbarrier.wait(full.index(slot), (uses + PART // BOXES) & 1)
        # in assembly: as L2 adds, and no product of a factor is fused with it
        total = gl.inline_asm_elementwise(
            "add.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [box.load(acc.type.layout), acc],
            dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        box.store(total)
        fence_async_shared()
        tma_store(dw, place + (column,), box.reshape(dw.block_shape))  # noqa: RUF005
        if PART > 0:
            tma.store_wait(1)
            mbarrier.arrive(empty.index((PART - 1) % BOXES))


@gluon.jit
def free_last_box(old, PARTS: gl.constexpr):
    """Of a tile of PARTS boxes that was added."""
    boxes, _full, empty = old
    tma.store_wait(0)
    mbarrier.arrive(empty.index((PARTS - 1) % boxes.shape[0]))


# ------------------------------------------------------------------------------------------------------ roles


@gluon.jit
def wait_for_room(empty, STAGES: gl.constexpr, step):
    """The stage of this step, once all consumers have freed it."""
    stage = step % STAGES
    for consumer in gl.static_range(empty.shape[0] // STAGES):
        mbarrier.wait(empty.index(consumer * STAGES + stage), (step // STAGES & 1) ^ 1)
    return stage


@gluon.jit
def wait_for_loads(full, step):
    """The stage of this step, once it is loaded."""
    STAGES: gl.constexpr = full.shape[0]
    mbarrier.wait(full.index(step % STAGES), step // STAGES & 1)
    return step % STAGES


@gluon.jit
def free_stage(empty, step, STAGES: gl.constexpr, CONSUMER: gl.constexpr, pred=True):
    """This consumer has done the step."""
    mbarrier.arrive(empty.index(CONSUMER * STAGES + step % STAGES), pred=pred)


@gluon.jit
def load(dy, x, given, ranks, offsets_ptr, counter_ptr, BAND: gl.constexpr):
    dy_stages, x_stages, full, empty, queue, sizes = given
    num_groups, N, K = sizes
    HEIGHT: gl.constexpr = dy_stages.shape[2]
    BLOCK_N: gl.constexpr = x_stages.shape[2]
    BLOCK_K: gl.constexpr = x_stages.shape[1]
    num_tiles_n = gl.cdiv(N, 2 * HEIGHT)
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
        for t in range(0, size, BLOCK_K):
            z, y, row = ragged_indices(first, size, t, 1)
            stage = wait_for_room(empty, full.shape[0], step)
            barrier = full.index(stage)
            mbarrier.expect(barrier, 2 * dy.block_type.nbytes + x.block_type.nbytes)
            x_stage = x_stages.index(stage).reshape(x.block_shape)
            tma_load(x, [z, y, row, tile_k * BLOCK_N], barrier, x_stage)
            for i in gl.static_range(2):
                dy_stage = dy_stages.index(stage * 2 + i).reshape(dy.block_shape)
                tma_load(dy, [z, y, row, (tile_n * 2 + i) * HEIGHT], barrier, dy_stage)
            step += 1
        turn += 1
        tile = next_tile(asked)
    hand(queue, turn, (-1, 0, 0, 0))


@gluon.jit
def load_old_sums(
    dw, old, queue, sizes, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, REVERSE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Those of one consumer, box by box, as far ahead as it has boxes: `add_boxes` takes them."""
    boxes, full, empty = old
    num_groups, N, _K = sizes
    BOXES: gl.constexpr = boxes.shape[0]
    WIDTH: gl.constexpr = dw.block_shape[-1]
    gl.static_assert(BLOCK_N // WIDTH % BOXES == 0, "all boxes are used equally often")
    use = 0
    turn = 0
    group, size, tile_n, tile_k = take(queue, turn)
    while group >= 0:
        row = tile_n * BLOCK_M + CONSUMER * (BLOCK_M // CONSUMERS)
        if (size > 0) & (row < N):
            place = place_of(dw, num_groups - 1 - group if REVERSE else group, row)
            for part in range(BLOCK_N // WIDTH):
                slot = use % BOXES
                mbarrier.wait(empty.index(slot), (use // BOXES & 1) ^ 1)
                mbarrier.expect(full.index(slot), dw.block_type.nbytes)
                box = boxes.index(slot).reshape(dw.block_shape)
                tma_load(dw, place + (tile_k * BLOCK_N + part * WIDTH,), full.index(slot), box)  # noqa: RUF005
                use += 1
        turn += 1
        group, size, tile_n, tile_k = take(queue, turn)


@gluon.jit
def multiply_step(acc, given, step, CONSUMER: gl.constexpr):
    """acc and the product of a step, on its way."""
    dy_stages, x_stages, full, _empty, _queue, _sizes = given
    stage = wait_for_loads(full, step)
    dy_stage = dy_stages.index(stage * 2 + CONSUMER).permute([1, 0])
    return warpgroup_mma(dy_stage, x_stages.index(stage), acc, is_async=True)


@gluon.jit
def sum_late(given, last, step, num_steps, CONSUMER: gl.constexpr, EARLY: gl.constexpr):
    """The products of 2 * EARLY or more steps. last: what is stored when EARLY, and when twice as many are on their
    way."""
    dy_stages, x_stages, full, empty, _queue, _sizes = given
    STAGES: gl.constexpr = full.shape[0]
    acc = zeros_of_tile(dy_stages, x_stages)
    for half in gl.static_range(2):
        for i in gl.static_range(EARLY):
            acc = multiply_step(acc, given, step + half * EARLY + i, CONSUMER)
        store_boxes(last, half)
    acc = warpgroup_mma_wait(1, deps=[acc])
    for i in gl.static_range(2 * EARLY - 1):
        free_stage(empty, step + i, STAGES, CONSUMER)
    for s in range(num_steps - 2 * EARLY):
        acc = multiply_step(acc, given, step + 2 * EARLY + s, CONSUMER)
        acc = warpgroup_mma_wait(1, deps=[acc])
        free_stage(empty, step + 2 * EARLY + s - 1, STAGES, CONSUMER)
    acc = warpgroup_mma_wait(0, deps=[acc])
    free_stage(empty, step + num_steps - 1, STAGES, CONSUMER)
    return acc


@gluon.jit
def sum_products(given, step, num_steps, CONSUMER: gl.constexpr):
    dy_stages, x_stages, full, empty, _queue, _sizes = given
    STAGES: gl.constexpr = full.shape[0]
    acc = zeros_of_tile(dy_stages, x_stages)
    for s in range(num_steps):
        acc = multiply_step(acc, given, step + s, CONSUMER)
        acc = warpgroup_mma_wait(1, deps=[acc])
        free_stage(empty, step + s - 1, STAGES, CONSUMER, pred=s > 0)
    acc = warpgroup_mma_wait(0, deps=[acc])
    free_stage(empty, step + num_steps - 1, STAGES, CONSUMER, pred=num_steps > 0)
    return acc


@gluon.jit
def sum_one(given, step, num_steps, CONSUMER: gl.constexpr):
    """The product of one step or none."""
    dy_stages, x_stages, full, empty, _queue, _sizes = given
    acc = zeros_of_tile(dy_stages, x_stages)
    for s in range(num_steps):
        acc = multiply_step(acc, given, step + s, CONSUMER)
        acc = warpgroup_mma_wait(0, deps=[acc])
        free_stage(empty, step + s, full.shape[0], CONSUMER)
    return acc


@gluon.jit
def zeros_of_tile(dy_stages, x_stages):
    HEIGHT: gl.constexpr = dy_stages.shape[2]
    BLOCK_N: gl.constexpr = x_stages.shape[2]
    return gl.zeros([HEIGHT, BLOCK_N], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16]))


@gluon.jit
def multiply(
    dw, alpha_ptr, given, staging, old, CONSUMER: gl.constexpr, ACCUMULATE: gl.constexpr, REVERSE: gl.constexpr,
    LATE: gl.constexpr,
):  # fmt: skip
    dy_stages, x_stages, full, empty, queue, sizes = given
    num_groups, N, _K = sizes
    HEIGHT: gl.constexpr = dy_stages.shape[2]
    BLOCK_N: gl.constexpr = x_stages.shape[2]
    BLOCK_K: gl.constexpr = x_stages.shape[1]
    PARTS: gl.constexpr = BLOCK_N // dw.block_shape[2]
    EARLY: gl.constexpr = 2 if full.shape[0] > 4 else 1  # twice as many steps are on their way at once
    if LATE:
        boxes = boxes_of_none(dw, HEIGHT, BLOCK_N)
        place, row, column = num_groups, 0, 0  # behind the last group nothing is stored
    step = 0
    uses = 0
    turn = 0
    group, size, tile_n, tile_k = take(queue, turn)
    while group >= 0:
        num_steps = gl.cdiv(size, BLOCK_K)
        first_n = (tile_n * 2 + CONSUMER) * HEIGHT
        matrix = num_groups - 1 - group if REVERSE else group
        if CONSUMER == 0 or first_n < N:
            if LATE:
                last = boxes, (place, row), column, dw, staging
                if num_steps >= 2 * EARLY:
                    acc = sum_late(given, last, step, num_steps, CONSUMER, EARLY)
                elif num_steps >= 2:
                    acc = sum_late(given, last, step, num_steps, CONSUMER, 1)
                else:
                    store_tile(last)
                    acc = sum_one(given, step, num_steps, CONSUMER)
            else:
                acc = sum_products(given, step, num_steps, CONSUMER)
            if alpha_ptr is not None:
                # alpha of a group without rows may be anything
                acc = acc * gl.load(alpha_ptr + group, mask=size > 0, other=0.0)
            if LATE:
                boxes = rounded_boxes(acc, dw)
                place, row, column = matrix, first_n, tile_k * BLOCK_N
            elif not ACCUMULATE or num_steps > 0:
                if old is None:
                    store_sums(acc, dw, staging, (matrix, first_n), tile_k * BLOCK_N, ACCUMULATE, 0)
                else:
                    add_boxes(acc, dw, old, uses, (matrix, first_n), tile_k * BLOCK_N, 0)
                    free_last_box(old, PARTS)
                    uses += PARTS // staging.shape[0]
        else:
            for s in range(step, step + num_steps):
                wait_for_loads(full, s)
                free_stage(empty, s, full.shape[0], CONSUMER)
        step += num_steps
        turn += 1
        group, size, tile_n, tile_k = take(queue, turn)
    if LATE:
        store_tile((boxes, (place, row), column, dw, staging))
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["num_groups"])
def k_grouped_gluon_kernel(
    dy,  # [T, N]: descriptor of boxes BLOCK_K x BLOCK_M / 2, ragged along T
    x,  # [T, K]: descriptor of boxes BLOCK_K x BLOCK_N, ragged along T
    dw,  # [G, N, K]: descriptor of boxes BLOCK_M / 2 rows high
    offsets_ptr,  # [G + 1] int64
    alpha_ptr,  # [G] float32 or None
    counter_ptr,  # [1] int32, 0
    num_groups,
    N,
    K,
    ACCUMULATE: gl.constexpr,  # takes float32
    FETCH: gl.constexpr,  # what is added to, else L2 adds
    REVERSE: gl.constexpr,  # the last group comes first in dw
    LATE: gl.constexpr,  # a tile is stored while the next one is multiplied
    BOXES: gl.constexpr,  # of each consumer, on their way to dw, or from and to it
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """dw[g, n, k] = alpha_g * sum_t dy[t, n] x[t, k] over the rows of group g; ACCUMULATE: dw += it.

    A group without rows gets zeros; with ACCUMULATE it is left as it was.
    """
    dy_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_M // 2], dy.dtype)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_N], x.dtype)
    dy_stages = gl.allocate_shared_memory(dy.dtype, [2 * STAGES, BLOCK_K, BLOCK_M // 2], dy_layout)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_K, BLOCK_N], x_layout)
    stagings = allocate_staging(dw, BOXES, 2)
    ranks = gl.allocate_shared_memory(gl.int32, [GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(empty.index(i), count=1)
    queue = make_queue(4, 4 if FETCH else 2)
    rank_groups(offsets_ptr, num_groups, ranks, True)
    sizes = num_groups, N, K
    given = dy_stages, x_stages, full, empty, queue, sizes
    # Registers of a thread of each role but the first one's: no spills.
    if FETCH:
        old_0 = with_barriers(stagings[0])
        old_1 = with_barriers(stagings[1])
        fence_async_shared()
        gl.warp_specialize(
            [
                (multiply, (dw, alpha_ptr, given, stagings[0], old_0, 0, ACCUMULATE, REVERSE, LATE)),
                (multiply, (dw, alpha_ptr, given, stagings[1], old_1, 1, ACCUMULATE, REVERSE, LATE)),
                (load, (dy, x, given, ranks, offsets_ptr, counter_ptr, BAND)),
                (load_old_sums, (dw, old_0, queue, sizes, 0, 2, REVERSE, BLOCK_M, BLOCK_N)),
                (load_old_sums, (dw, old_1, queue, sizes, 1, 2, REVERSE, BLOCK_M, BLOCK_N)),
            ],
            [4, 1, 1, 1],
            [224, 56, 56, 56],
        )
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (multiply, (dw, alpha_ptr, given, stagings[0], None, 0, ACCUMULATE, REVERSE, LATE)),
                (multiply, (dw, alpha_ptr, given, stagings[1], None, 1, ACCUMULATE, REVERSE, LATE)),
                (load, (dy, x, given, ranks, offsets_ptr, counter_ptr, BAND)),
            ],
            [4, 1],
            [224, 56],
        )


# -------------------------------------------------------------------------------------------------------- launcher

_k_grouped = Launch(k_grouped_gluon_kernel)


def k_grouped_gluon(
    dy: Tensor,
    x: Tensor,
    offsets: Tensor,
    alpha: Tensor | None,
    out: Tensor,
    config: GroupedGemmConfig,
    accumulate: bool,
    reverse: bool,
    spare: int,
) -> None:
    """Launches NT, of tensors that `takes_descriptors` takes. accumulate, for float32 alone: out += it."""
    G, N, K = out.shape
    num_tiles = G * cdiv(N, config.block_m) * cdiv(K, config.block_n)
    _k_grouped(
        out,
        min(num_tiles, multiprocessors(out, spare)),
        with_layout(ragged_descriptor(dy, (config.block_k, config.block_m // 2), axis=0)),
        with_layout(ragged_descriptor(x, (config.block_k, config.block_n), axis=0)),
        with_layout(descriptor(out, (1, config.block_m // 2, BOX_BYTES // out.itemsize))),
        offsets,
        alpha,
        torch.zeros(1, dtype=torch.int32, device=out.device),
        G,
        N,
        K,
        ACCUMULATE=accumulate,
        FETCH=accumulate and config.fetches,
        REVERSE=reverse,
        LATE=out.itemsize == 2,
        BOXES=config.box * out.itemsize // BOX_BYTES,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        BAND=band(config.block_m),
        GROUPS=max(128, next_power_of_2(G)),
        num_warps=config.num_warps // 2,  # the others are those of roles
    )


def with_layout(of_triton: TensorDescriptor) -> GluonDescriptor:
    """The descriptor as Gluon takes it: with the layout of its boxes in shared memory."""
    made = GluonDescriptor.__new__(GluonDescriptor)
    made.__dict__ |= vars(of_triton)
    made.layout = _layout(of_triton.base.dtype, tuple(of_triton.block_shape))
    return made


_DTYPES = {
    torch.bfloat16: gl.bfloat16,
    torch.float16: gl.float16,
    torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv,
    torch.float8_e5m2: gl.float8e5,
    torch.uint8: gl.uint8,
}


@lru_cache
def _layout(dtype: torch.dtype, box: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])
