"""NT of `grouped_gemm.high_precision` in Gluon, for Hopper and 16-bit operands: the warps of a program have roles.

A program takes tile after tile of 128 x 256. One warp loads (TMA) into a ring of stages; two consumers of four warps
multiply (wgmma), each 64 rows of the tile by all of its columns, and store their rows:

    loads        |A B|A B|A B|A B|A B|A B| ...       full[stage]: one arrival and the bytes of a stage
    consumer 0     * * * * * * * store * * * ...     empty[stage], and STAGES behind it that of consumer 1: an arrival
    consumer 1       * * * * * * * store * * ...

Consumer 1 starts SKEW steps behind, if the first tile has as many, so that one consumer stores while the other
multiplies; the ring lets them be in different tiles. So where groups have few rows, and a tile few steps, a tile takes
the longer of storing and multiplying, not both.

What is accumulated in float32 is stored in the same way: L2 adds it to what is there (`add_to_global`). For that the
loading warp prefetches the old sums over the last AHEAD steps of a tile.

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
AHEAD = 8  # on an H200, 1024 rows a group, as fast as 4 and 16; 32 and none are 8 to 12 % slower
REGISTERS = gl.constexpr((232, 40))  # of a thread of the second consumer, and of one that loads; no spills


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
    acc, dw, staging, place, row, column, ACCUMULATE: gl.constexpr, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr,
    PART: gl.constexpr,
):  # fmt: skip
    """Rounds acc and stores it at (row, column) of matrix `place` of dw [G, N, K], or adds it there, box by box.

    staging: BOXES boxes of each consumer, used in turn. PART: of parts as wide as this one, which it is.
    """
    if acc.shape[1] > dw.block_shape[2]:
        left, right = split_columns(acc)
        middle = column + acc.shape[1] // 2
        store_boxes(left, dw, staging, place, row, column, ACCUMULATE, CONSUMER, CONSUMERS, 2 * PART)
        store_boxes(right, dw, staging, place, row, middle, ACCUMULATE, CONSUMER, CONSUMERS, 2 * PART + 1)
    else:
        BOXES: gl.constexpr = staging.shape[0] // CONSUMERS
        box = staging.index(CONSUMER * BOXES + PART % BOXES)
        tma.store_wait(BOXES - 1)
        box.store(acc.to(dw.dtype))
        fence_async_shared()
        if ACCUMULATE:
            add_to_global(dw, [place, row, column], box.reshape(dw.block_shape))
        else:
            tma.async_copy_shared_to_global(dw, [place, row, column], box.reshape(dw.block_shape))


@gluon.jit
def prefetch_rows(ptr, stride, begin, end, height, width, ROWS: gl.constexpr, WIDTH: gl.constexpr):
    """Prefetches into L2 WIDTH columns of float32 of rows ROWS * begin to ROWS * end, of height rows, width columns in
    all. A lane fetches 128 bytes, so WIDTH columns of ROWS rows are a warp's."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [ROWS, WIDTH // 32], [1, 1], [1, 0])
    offs_n = gl.expand_dims(gl.arange(0, ROWS, gl.SliceLayout(1, layout)), 1)
    offs_k = gl.expand_dims(gl.arange(0, WIDTH // 32, gl.SliceLayout(0, layout)), 0) * 32
    for i in range(begin, end):
        row = i * ROWS + offs_n
        gl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $2, 0; @p prefetch.global.L2 [$1]; mov.b32 $0, 0; }", "=r,l,r",
            [(ptr + (row * stride + offs_k)).to(gl.int64), ((row < height) & (offs_k < width)).to(gl.int32)],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def fetch_old_sums(
    ptr, step, num_steps, stride, height, width, AHEAD: gl.constexpr, HEIGHT: gl.constexpr, WIDTH: gl.constexpr
):
    """Prefetches what belongs to this step of a tile HEIGHT x WIDTH of float32 at ptr, of height rows and width columns
    that there are: an equal part in each of the last AHEAD steps."""
    ROWS: gl.constexpr = 1024 // WIDTH
    ahead = gl.maximum(gl.minimum(num_steps, AHEAD), 1)
    part = gl.cdiv(HEIGHT // ROWS, ahead)
    due = (step - (num_steps - ahead)) * part
    if due >= 0:
        prefetch_rows(ptr, stride, due, gl.minimum(due + part, HEIGHT // ROWS), height, width, ROWS, WIDTH)


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
def load(
    dy, x, dw_ptr, dw_stride, dy_stages, x_stages, full, empty, ranks, offsets_ptr, num_groups,
    num_tiles_n, num_tiles_k, N, K, REVERSE: gl.constexpr, AHEAD: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    num_tiles = num_tiles_n * num_tiles_k
    step = 0
    for turn in range(gl.cdiv(num_groups * num_tiles, gl.num_programs(0))):
        tile = serpentine_tile(turn)
        if tile < num_groups * num_tiles:
            tile_n, tile_k = tile_in_bands(tile % num_tiles, num_tiles_n, num_tiles_k, BAND)
            group, first, size = find_group(offsets_ptr, ranks, tile // num_tiles)
            first_n = tile_n * BLOCK_M
            first_k = tile_k * BLOCK_N
            num_steps = gl.cdiv(size, BLOCK_K)
            if dw_ptr is not None:
                place = num_groups - 1 - group if REVERSE else group
                at = dw_ptr + (place.to(gl.int64) * dw_stride + first_n.to(gl.int64) * K + first_k)
            for t in range(0, size, BLOCK_K):
                z, y, row = ragged_indices(first, size, t, 1)
                stage = wait_for_room(empty, full.shape[0], step)
                barrier = full.index(stage)
                mbarrier.expect(barrier, dy.block_type.nbytes + x.block_type.nbytes)
                dy_stage = dy_stages.index(stage).reshape(dy.block_shape)
                x_stage = x_stages.index(stage).reshape(x.block_shape)
                tma.async_copy_global_to_shared(dy, [z, y, row, first_n], barrier, dy_stage)
                tma.async_copy_global_to_shared(x, [z, y, row, first_k], barrier, x_stage)
                if dw_ptr is not None:
                    fetch_old_sums(at, t // BLOCK_K, num_steps, K, N - first_n, K - first_k, AHEAD, BLOCK_M, BLOCK_N)
                step += 1


@gluon.jit
def multiply(
    dw, dy_stages, x_stages, staging, full, empty, ranks, offsets_ptr, alpha_ptr, num_groups,
    num_tiles_n, num_tiles_k, N, CONSUMER: gl.constexpr, ACCUMULATE: gl.constexpr, REVERSE: gl.constexpr,
    SKEW: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    HEIGHT: gl.constexpr = BLOCK_M // 2
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    num_tiles = num_tiles_n * num_tiles_k
    step = 0
    for turn in range(gl.cdiv(num_groups * num_tiles, gl.num_programs(0))):
        tile = serpentine_tile(turn)
        if tile < num_groups * num_tiles:
            tile_n, tile_k = tile_in_bands(tile % num_tiles, num_tiles_n, num_tiles_k, BAND)
            group, _first, size = find_group(offsets_ptr, ranks, tile // num_tiles)
            num_steps = gl.cdiv(size, BLOCK_K)
            first_n = tile_n * BLOCK_M + CONSUMER * HEIGHT
            if CONSUMER == 1 and SKEW > 0:  # until the other consumer has done SKEW steps
                mbarrier.wait(empty.index(SKEW - 1), 0, pred=(turn == 0) & (num_steps >= SKEW))
            if CONSUMER == 0 or first_n < N:
                acc = gl.zeros([HEIGHT, BLOCK_N], gl.float32, layout)
                for s in range(step, step + num_steps):
                    stage = wait_for_loads(full, s)
                    dy_stage = dy_stages.index(stage).slice(CONSUMER * HEIGHT, HEIGHT, 1).permute([1, 0])
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
                    store_boxes(acc, dw, staging, place, first_n, tile_k * BLOCK_N, ACCUMULATE, CONSUMER, 2, 0)
            else:
                for s in range(step, step + num_steps):
                    wait_for_loads(full, s)
                    free_stage(empty, s, full.shape[0], CONSUMER)
            step += num_steps
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["num_groups"])
def k_grouped_gluon_kernel(
    dy,  # [T, N]: descriptor of boxes BLOCK_K x BLOCK_M, ragged along T
    x,  # [T, K]: descriptor of boxes BLOCK_K x BLOCK_N, ragged along T
    dw,  # [G, N, K]: descriptor of boxes BLOCK_M / 2 rows high
    dw_ptr,  # dw itself if it is added to, which takes float32, else None
    dw_stride,  # of its matrices
    offsets_ptr,  # [G + 1] int64
    alpha_ptr,  # [G] float32 or None
    num_groups,
    N,
    K,
    REVERSE: gl.constexpr,  # the last group comes first in dw
    BOXES: gl.constexpr,  # of each consumer, on their way to dw
    AHEAD: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    SKEW: gl.constexpr,
    BAND: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """dw[g, n, k] = alpha_g * sum_t dy[t, n] x[t, k] over the rows of group g; with dw_ptr, dw +=.

    A group without rows gets zeros; with dw_ptr it is left as it was.
    """
    ACCUMULATE: gl.constexpr = dw_ptr is not None
    dy_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_M], dy.dtype)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_N], x.dtype)
    box_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(dw.block_shape[1:], dw.dtype)
    dy_stages = gl.allocate_shared_memory(dy.dtype, [STAGES, BLOCK_K, BLOCK_M], dy_layout)
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
    num_tiles_n = gl.cdiv(N, BLOCK_M)
    num_tiles_k = gl.cdiv(K, BLOCK_N)
    rank_groups(offsets_ptr, num_groups, ranks)
    gl.warp_specialize(
        [
            (
                multiply,
                (
                    dw, dy_stages, x_stages, staging, full, empty, ranks, offsets_ptr, alpha_ptr, num_groups,
                    num_tiles_n, num_tiles_k, N, 0, ACCUMULATE, REVERSE, SKEW, BLOCK_M, BLOCK_N, BLOCK_K, BAND,
                ),
            ),
            (
                multiply,
                (
                    dw, dy_stages, x_stages, staging, full, empty, ranks, offsets_ptr, alpha_ptr, num_groups,
                    num_tiles_n, num_tiles_k, N, 1, ACCUMULATE, REVERSE, SKEW, BLOCK_M, BLOCK_N, BLOCK_K, BAND,
                ),
            ),
            (
                load,
                (
                    dy, x, dw_ptr, dw_stride, dy_stages, x_stages, full, empty, ranks, offsets_ptr, num_groups,
                    num_tiles_n, num_tiles_k, N, K, REVERSE, AHEAD, BLOCK_M, BLOCK_N, BLOCK_K, BAND,
                ),
            ),
        ],
        [4, 1],
        REGISTERS,
    )  # fmt: skip


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
        with_layout(ragged_descriptor(dy, (config.block_k, config.block_m), axis=0)),
        with_layout(ragged_descriptor(x, (config.block_k, config.block_n), axis=0)),
        with_layout(descriptor(out, (1, config.block_m // 2, BOX_BYTES // out.itemsize))),
        out if accumulate else None,
        out.stride(0),
        offsets,
        alpha,
        G,
        N,
        K,
        REVERSE=reverse,
        BOXES=config.box * out.itemsize // BOX_BYTES,
        AHEAD=AHEAD,
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
