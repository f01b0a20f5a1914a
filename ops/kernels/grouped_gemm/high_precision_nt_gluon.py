"""NT of `grouped_gemm.high_precision` in Gluon, for Hopper and 16-bit operands: the warps of a program have roles.

A program takes tile after tile of 128 x 256. One warp loads (TMA) into a ring of stages; two consumers of four warps
multiply (wgmma), each 64 rows of the tile by all of its columns, and store their rows:

    loads        |A B|A B|A B|A B|A B|A B| ...       full[stage]: one arrival and the bytes of a stage
    consumer 0     * * * * * * * store * * * ...     empty[stage], and STAGES behind it that of consumer 1: an arrival
    consumer 1       * * * * * * * store * * ...

Consumer 1 starts SKEW steps behind, if the first tile has as many, so that one consumer stores while the other
multiplies; the ring lets them be in different tiles. So where groups have few rows, and a tile few steps, a tile takes
the longer of storing and multiplying, not both.

What is accumulated in float32 is stored in the same way, and L2 adds it to what is there (`add_to_global`). L2 adds
about 1 TB/s on an H100, so where groups have few rows a tile would wait for that. There a warp for each consumer
fetches what is added to (FETCH), box by box, as far ahead as there are boxes; the consumer adds, and the boxes go back
with the sums.

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
from ops.kernels.grouped_gemm.persistent_schedule import band, multiprocessors, serpentine_tile, tile_in_bands
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, ragged_indices
from recipes.triton.gates import TensorDescriptor
from recipes.triton.launch import Launch, cdiv, next_power_of_2
from recipes.triton.repeated import DESCRIPTORS

DESCRIPTORS.add(GluonDescriptor)

SKEW = 2


# ------------------------------------------------------------------------------------------------- tiles of groups


@gluon.jit
def rank_groups(offsets_ptr, num_groups, ranks):
    """Writes to `ranks` [GROUPS] how many groups are larger than each, or as large and before it; GROUPS for no group.

    Of the warps of the program, before it is divided into roles.
    """
    GROUPS: gl.constexpr = ranks.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([GROUPS // 128, 32], [32, 1], [4, 1], [1, 0])
    offs_g = gl.arange(0, GROUPS, gl.SliceLayout(1, layout))
    mask_g = offs_g < num_groups
    size_g = sizes_of(offsets_ptr, offs_g, mask_g)
    count = gl.zeros([GROUPS], gl.int32, gl.SliceLayout(1, layout))
    for start in range(0, num_groups, 32):
        offs_h = start + gl.arange(0, 32, gl.SliceLayout(0, layout))
        size_h = sizes_of(offsets_ptr, offs_h, offs_h < num_groups)
        larger = gl.expand_dims(size_h, 0) > gl.expand_dims(size_g, 1)
        before = gl.expand_dims(offs_h, 0) < gl.expand_dims(offs_g, 1)
        tie = (gl.expand_dims(size_h, 0) == gl.expand_dims(size_g, 1)) & before
        count += gl.sum((larger | tie).to(gl.int32), axis=1)
    ranks.store(gl.where(mask_g, count, GROUPS))


@gluon.jit
def sizes_of(offsets_ptr, offs_g, mask_g):
    """Of these groups; -1 where there is none."""
    begin = gl.load(offsets_ptr + offs_g, mask=mask_g, other=1)
    return (gl.load(offsets_ptr + offs_g + 1, mask=mask_g, other=0) - begin).to(gl.int32)


@gluon.jit
def find_group(offsets_ptr, ranks, rank):
    """(group, first row, size) of the group with this rank. No warp needs another one."""
    GROUPS: gl.constexpr = ranks.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([GROUPS // 32], [32], [gl.num_warps()], [0])
    group = gl.sum(gl.where(ranks.load(layout) == rank, gl.arange(0, GROUPS, layout), 0), axis=0)
    first = gl.load(offsets_ptr + group)
    return group, first, (gl.load(offsets_ptr + group + 1) - first).to(gl.int32)


# --------------------------------------------------------------------------------------------------------- storing


@gluon.jit
def split_columns(acc):
    """The left and the right half of a tile: registers of the same threads."""
    split = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2])
    return split.permute([0, 2, 1]).split()


@builtin
def add_to_global(tensor_desc, coord, src, _semantic=None):
    """As `tma.async_copy_shared_to_global`, but adds: an operation that Triton has, and Gluon no name for."""
    coord = _semantic._convert_to_ir_values(coord, require_i64=False)
    _semantic.builder.create_async_tma_reduce(DESCRIPTOR_REDUCE_KIND.ADD, tensor_desc.handle, coord, src.handle)


@gluon.jit
def store_boxes(
    acc, dw, staging, place, row, column, ADD: gl.constexpr, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Rounds acc and stores it at (row, column) of matrix `place` of dw [G, N, K], or lets L2 add it, box by box.

    staging: BOXES boxes of each consumer, used in turn. PART: of parts as wide as this one, which it is.
    """
    if acc.shape[1] > dw.block_shape[2]:
        left, right = split_columns(acc)
        middle = column + acc.shape[1] // 2
        store_boxes(left, dw, staging, place, row, column, ADD, CONSUMER, CONSUMERS, 2 * PART)
        store_boxes(right, dw, staging, place, row, middle, ADD, CONSUMER, CONSUMERS, 2 * PART + 1)
    else:
        BOXES: gl.constexpr = staging.shape[0] // CONSUMERS
        box = staging.index(CONSUMER * BOXES + PART % BOXES)
        tma.store_wait(BOXES - 1)
        box.store(acc.to(dw.dtype))
        fence_async_shared()
        if ADD:
            add_to_global(dw, [place, row, column], box.reshape(dw.block_shape))
        else:
            tma.async_copy_shared_to_global(dw, [place, row, column], box.reshape(dw.block_shape))


@gluon.jit
def barriers_of_boxes(BOXES: gl.constexpr):
    """(full, empty): of each box, once an old sum has come, and once what was stored from it may be overwritten."""
    full = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [BOXES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(BOXES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    return full, empty


@gluon.jit
def add_boxes(
    acc, dw, old, uses, place, row, column, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, PART: gl.constexpr
):
    """Adds acc to what lies there, which `load_old_sums` brings, and stores the sums, box by box, where they came from.

    old: boxes as `staging`, and two barriers of each. uses: how often this consumer has used each of its boxes before.
    The last box stays in use: `free_last_box`.
    """
    boxes, full, empty = old
    if acc.shape[1] > dw.block_shape[2]:
        left, right = split_columns(acc)
        middle = column + acc.shape[1] // 2
        add_boxes(left, dw, old, uses, place, row, column, CONSUMER, CONSUMERS, 2 * PART)
        add_boxes(right, dw, old, uses, place, row, middle, CONSUMER, CONSUMERS, 2 * PART + 1)
    else:
        BOXES: gl.constexpr = boxes.shape[0] // CONSUMERS
        slot: gl.constexpr = CONSUMER * BOXES + PART % BOXES
        box = boxes.index(slot)
        mbarrier.wait(full.index(slot), (uses + PART // BOXES) & 1)
        # in assembly: as L2 adds, and no product of a factor is fused with it
        total = gl.inline_asm_elementwise(
            "add.rn.ftz.f32 $0, $1, $2;", "=f,f,f", [box.load(acc.type.layout), acc],
            dtype=gl.float32, is_pure=True, pack=1,
        )  # fmt: skip
        box.store(total)
        fence_async_shared()
        tma.async_copy_shared_to_global(dw, [place, row, column], box.reshape(dw.block_shape))
        if PART > 0:
            tma.store_wait(1)
            mbarrier.arrive(empty.index(CONSUMER * BOXES + (PART - 1) % BOXES))


@gluon.jit
def free_last_box(old, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, PARTS: gl.constexpr):
    """Of a tile of PARTS boxes that was added."""
    boxes, _full, empty = old
    BOXES: gl.constexpr = boxes.shape[0] // CONSUMERS
    tma.store_wait(0)
    mbarrier.arrive(empty.index(CONSUMER * BOXES + (PARTS - 1) % BOXES))


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
def load(dy, x, given, BAND: gl.constexpr):
    dy_stages, x_stages, _staging, full, empty, where = given
    ranks, offsets_ptr, num_groups, num_tiles_n, num_tiles_k, _N = where
    HEIGHT: gl.constexpr = dy_stages.shape[2]
    BLOCK_N: gl.constexpr = x_stages.shape[2]
    BLOCK_K: gl.constexpr = x_stages.shape[1]
    num_tiles = num_tiles_n * num_tiles_k
    step = 0
    for turn in range(gl.cdiv(num_groups * num_tiles, gl.num_programs(0))):
        tile = serpentine_tile(turn)
        if tile < num_groups * num_tiles:
            tile_n, tile_k = tile_in_bands(tile % num_tiles, num_tiles_n, num_tiles_k, BAND)
            _group, first, size = find_group(offsets_ptr, ranks, tile // num_tiles)
            for t in range(0, size, BLOCK_K):
                z, y, row = ragged_indices(first, size, t, 1)
                stage = wait_for_room(empty, full.shape[0], step)
                barrier = full.index(stage)
                mbarrier.expect(barrier, 2 * dy.block_type.nbytes + x.block_type.nbytes)
                x_stage = x_stages.index(stage).reshape(x.block_shape)
                tma.async_copy_global_to_shared(x, [z, y, row, tile_k * BLOCK_N], barrier, x_stage)
                for i in gl.static_range(2):
                    dy_stage = dy_stages.index(stage * 2 + i).reshape(dy.block_shape)
                    tma.async_copy_global_to_shared(dy, [z, y, row, (tile_n * 2 + i) * HEIGHT], barrier, dy_stage)
                step += 1


@gluon.jit
def load_old_sums(
    dw, old, where, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, REVERSE: gl.constexpr, BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    """Those of one consumer, box by box, as far ahead as it has boxes: `add_boxes` takes them."""
    boxes, full, empty = old
    ranks, offsets_ptr, num_groups, num_tiles_n, num_tiles_k, N = where
    BOXES: gl.constexpr = boxes.shape[0] // CONSUMERS
    WIDTH: gl.constexpr = dw.block_shape[2]
    gl.static_assert(BLOCK_N // WIDTH % BOXES == 0, "all boxes are used equally often")
    num_tiles = num_tiles_n * num_tiles_k
    use = 0
    for turn in range(gl.cdiv(num_groups * num_tiles, gl.num_programs(0))):
        tile = serpentine_tile(turn)
        if tile < num_groups * num_tiles:
            tile_n, tile_k = tile_in_bands(tile % num_tiles, num_tiles_n, num_tiles_k, BAND)
            group, _first, size = find_group(offsets_ptr, ranks, tile // num_tiles)
            row = tile_n * BLOCK_M + CONSUMER * (BLOCK_M // CONSUMERS)
            if (size > 0) & (row < N):
                place = num_groups - 1 - group if REVERSE else group
                for part in range(BLOCK_N // WIDTH):
                    slot = CONSUMER * BOXES + use % BOXES
                    mbarrier.wait(empty.index(slot), (use // BOXES & 1) ^ 1)
                    mbarrier.expect(full.index(slot), dw.block_type.nbytes)
                    box = boxes.index(slot).reshape(dw.block_shape)
                    tma.async_copy_global_to_shared(
                        dw, [place, row, tile_k * BLOCK_N + part * WIDTH], full.index(slot), box
                    )
                    use += 1


@gluon.jit
def multiply(
    dw, alpha_ptr, given, old, CONSUMER: gl.constexpr, ACCUMULATE: gl.constexpr, REVERSE: gl.constexpr,
    SKEW: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    dy_stages, x_stages, staging, full, empty, where = given
    ranks, offsets_ptr, num_groups, num_tiles_n, num_tiles_k, N = where
    HEIGHT: gl.constexpr = dy_stages.shape[2]
    BLOCK_N: gl.constexpr = x_stages.shape[2]
    BLOCK_K: gl.constexpr = x_stages.shape[1]
    PARTS: gl.constexpr = BLOCK_N // dw.block_shape[2]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    num_tiles = num_tiles_n * num_tiles_k
    step = 0
    uses = 0
    for turn in range(gl.cdiv(num_groups * num_tiles, gl.num_programs(0))):
        tile = serpentine_tile(turn)
        if tile < num_groups * num_tiles:
            tile_n, tile_k = tile_in_bands(tile % num_tiles, num_tiles_n, num_tiles_k, BAND)
            group, _first, size = find_group(offsets_ptr, ranks, tile // num_tiles)
            num_steps = gl.cdiv(size, BLOCK_K)
            first_n = (tile_n * 2 + CONSUMER) * HEIGHT
            if CONSUMER == 1 and SKEW > 0:  # until the other consumer has done SKEW steps
                mbarrier.wait(empty.index(SKEW - 1), 0, pred=(turn == 0) & (num_steps >= SKEW))
            if CONSUMER == 0 or first_n < N:
                acc = gl.zeros([HEIGHT, BLOCK_N], gl.float32, layout)
                for s in range(step, step + num_steps):
                    stage = wait_for_loads(full, s)
                    dy_stage = dy_stages.index(stage * 2 + CONSUMER).permute([1, 0])
                    acc = warpgroup_mma(dy_stage, x_stages.index(stage), acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    free_stage(empty, s - 1, full.shape[0], CONSUMER, pred=s > step)
                acc = warpgroup_mma_wait(0, deps=[acc])
                free_stage(empty, step + num_steps - 1, full.shape[0], CONSUMER, pred=num_steps > 0)
                if alpha_ptr is not None:
                    # alpha of a group without rows may be anything
                    acc = acc * gl.load(alpha_ptr + group, mask=size > 0, other=0.0)
                place = num_groups - 1 - group if REVERSE else group
                if not ACCUMULATE or num_steps > 0:
                    if old is None:
                        store_boxes(acc, dw, staging, place, first_n, tile_k * BLOCK_N, ACCUMULATE, CONSUMER, 2, 0)
                    else:
                        add_boxes(acc, dw, old, uses, place, first_n, tile_k * BLOCK_N, CONSUMER, 2, 0)
                        free_last_box(old, CONSUMER, 2, PARTS)
                        uses += PARTS // (staging.shape[0] // 2)
            else:
                for s in range(step, step + num_steps):
                    wait_for_loads(full, s)
                    free_stage(empty, s, full.shape[0], CONSUMER)
            step += num_steps
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["num_groups"])
def k_grouped_gluon_kernel(
    dy,  # [T, N]: descriptor of boxes BLOCK_K x BLOCK_M / 2, ragged along T
    x,  # [T, K]: descriptor of boxes BLOCK_K x BLOCK_N, ragged along T
    dw,  # [G, N, K]: descriptor of boxes BLOCK_M / 2 rows high
    offsets_ptr,  # [G + 1] int64
    alpha_ptr,  # [G] float32 or None
    num_groups,
    N,
    K,
    ACCUMULATE: gl.constexpr,  # takes float32
    FETCH: gl.constexpr,  # what is added to, else L2 adds
    REVERSE: gl.constexpr,  # the last group comes first in dw
    BOXES: gl.constexpr,  # of each consumer, on their way to dw, or from and to it
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SKEW: gl.constexpr,
    BAND: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """dw[g, n, k] = alpha_g * sum_t dy[t, n] x[t, k] over the rows of group g; ACCUMULATE: dw += it.

    A group without rows gets zeros; with ACCUMULATE it is left as it was.
    """
    dy_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_M // 2], dy.dtype)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_N], x.dtype)
    box_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(dw.block_shape[1:], dw.dtype)
    dy_stages = gl.allocate_shared_memory(dy.dtype, [2 * STAGES, BLOCK_K, BLOCK_M // 2], dy_layout)
    x_stages = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_K, BLOCK_N], x_layout)
    staging = gl.allocate_shared_memory(dw.dtype, [2 * BOXES, dw.block_shape[1], dw.block_shape[2]], box_layout)
    ranks = gl.allocate_shared_memory(gl.int32, [GROUPS], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
    for i in gl.static_range(2 * STAGES):
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    where = ranks, offsets_ptr, num_groups, gl.cdiv(N, BLOCK_M), gl.cdiv(K, BLOCK_N), N
    rank_groups(offsets_ptr, num_groups, ranks)
    given = dy_stages, x_stages, staging, full, empty, where
    # Registers of a thread of each role but the first one's: no spills.
    if FETCH:
        old_full, old_empty = barriers_of_boxes(2 * BOXES)
        old = staging, old_full, old_empty
        gl.warp_specialize(
            [
                (multiply, (dw, alpha_ptr, given, old, 0, ACCUMULATE, REVERSE, SKEW, BAND)),
                (multiply, (dw, alpha_ptr, given, old, 1, ACCUMULATE, REVERSE, SKEW, BAND)),
                (load, (dy, x, given, BAND)),
                (load_old_sums, (dw, old, where, 0, 2, REVERSE, BLOCK_M, BLOCK_N, BAND)),
                (load_old_sums, (dw, old, where, 1, 2, REVERSE, BLOCK_M, BLOCK_N, BAND)),
            ],
            [4, 1, 1, 1],
            [224, 56, 56, 56],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (dw, alpha_ptr, given, None, 0, ACCUMULATE, REVERSE, SKEW, BAND)),
                (multiply, (dw, alpha_ptr, given, None, 1, ACCUMULATE, REVERSE, SKEW, BAND)),
                (load, (dy, x, given, BAND)),
            ],
            [4, 1],
            [232, 40],
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
        G,
        N,
        K,
        ACCUMULATE=accumulate,
        FETCH=accumulate and config.fetches,
        REVERSE=reverse,
        BOXES=config.box * out.itemsize // BOX_BYTES,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        SKEW=SKEW,
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
}


@lru_cache
def _layout(dtype: torch.dtype, box: tuple[int, ...]) -> gl.NVMMASharedLayout:
    return gl.NVMMASharedLayout.get_default_for(list(box), _DTYPES[dtype])
