"""TN of `grouped_gemm.float8` in Gluon, for Hopper: the warps of a program have roles, as in `high_precision_gluon`.

A program takes tile after tile. One warp loads (TMA) into a ring of stages, consumers of four warps multiply (wgmma),
each 64 rows of the tile by all of its columns, and store their rows: while one stores, the others multiply.

    fast accumulation    128 x 256, two consumers
    split accumulation   192 x 128, three: a sum and a step's product fit their registers, and while one scales and adds
                         its product, the others multiply

Scales of blocks have a role of their own: one warp copies (cp.async) those of the rows of a step to its stage and,
behind them, that of its columns, 64 times.

Barriers: a stage is used for the u-th time in phase u % 2 of its barriers. `full`: an arrival, the bytes of a stage,
and an arrival of each lane that copies scales. `empty`: an arrival of each consumer. Before use u those who load wait
for phase (u - 1) % 2 of `empty`, which has passed at the start.

One of three consumers only counts the steps of a tile in which its rows are past the end of their group. One of two
would end the tile early, and programs would no longer read the same operands at the same time: up to 6 % slower.

Loops over steps start at 0: with loops from `step` to `step + num_steps`, Triton 3.6 compiled split accumulation as if
`step` were 0 in every tile.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# T rows, G groups, R summed features, C features that come out

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

from ops.kernels.grouped_gemm.high_precision_gluon import sizes_of, split_columns, wait_for_loads, with_layout
from ops.kernels.grouped_gemm.measured_tiles import BOX_BYTES
from ops.kernels.grouped_gemm.persistent_schedule import band, most_tiles, multiprocessors, tile_in_bands
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, ragged_indices
from ops.kernels.grouped_gemm.tile_rules_float8 import GroupedFloat8Config
from recipes.triton.launch import Launch, cdiv, next_power_of_2

HEIGHT = 64  # rows of a consumer
BOXES = 2  # of a consumer, on their way to the output


# ------------------------------------------------------------------------------------------------- tiles of groups


@gluon.jit
def count_tiles(offsets_ptr, num_groups, ends, BLOCK_M: gl.constexpr):
    """Writes to `ends` [GROUPS] how many tiles of BLOCK_M rows the groups up to and with each one have.

    Of the warps of the program, before it is divided into roles.
    """
    GROUPS: gl.constexpr = ends.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([GROUPS // 128, 32], [32, 1], [4, 1], [1, 0])
    offs_g = gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(1, layout)), 1)
    count = gl.zeros([GROUPS], gl.int32, gl.SliceLayout(1, layout))
    for start in range(0, num_groups, 32):
        offs_h = start + gl.arange(0, 32, gl.SliceLayout(0, layout))
        tiles = gl.cdiv(gl.maximum(sizes_of(offsets_ptr, offs_h, offs_h < num_groups), 0), BLOCK_M)
        count += gl.sum(gl.where(gl.expand_dims(offs_h, 0) <= offs_g, gl.expand_dims(tiles, 0), 0), axis=1)
    ends.store(count)


@gluon.jit
def read_ends(ends):
    """[GROUPS], the same in every warp."""
    layout: gl.constexpr = gl.BlockedLayout([ends.shape[0] // 32], [32], [gl.num_warps()], [0])
    return ends.load(layout)


@gluon.jit
def find_rows(offsets_ptr, ends, m, BLOCK_M: gl.constexpr):
    """(group, first row, rows of the group from there on) of the m-th tile along m. No warp needs another one."""
    counted = read_ends(ends)
    before = counted <= m
    group = gl.sum(before.to(gl.int32), axis=0)
    first_m = gl.max(gl.where(before, counted, 0), axis=0)
    first = gl.load(offsets_ptr + group) + (m - first_m) * BLOCK_M
    return group, first, (gl.load(offsets_ptr + group + 1) - first).to(gl.int32)


# --------------------------------------------------------------------------------------------------------- storing


@gluon.jit
def store_rows(
    acc, out, staging, bias_ptr, scales_ptr, group, first, size, row, column, C,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, PART: gl.constexpr,
):  # fmt: skip
    """Stores acc, with its bias, at row `row` of the `size` rows from `first` on and at this column, box by box."""
    if acc.shape[1] > out.block_shape[3]:
        left, right = split_columns(acc)
        middle = column + acc.shape[1] // 2
        store_rows(
            left, out, staging, bias_ptr, scales_ptr, group, first, size, row, column, C, CONSUMER, CONSUMERS, 2 * PART
        )
        store_rows(
            right, out, staging, bias_ptr, scales_ptr, group, first, size, row, middle, C, CONSUMER, CONSUMERS,
            2 * PART + 1,
        )  # fmt: skip
    else:
        if bias_ptr is not None:
            offs_c = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
            bias = gl.load(bias_ptr + group.to(gl.int64) * C + offs_c, mask=offs_c < C, other=0.0).to(gl.float32)
            bias = gl.expand_dims(bias, 0)
            if scales_ptr is not None:
                offs_t = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
                scales = gl.load(scales_ptr + first + offs_t, mask=offs_t < size, other=0.0).to(gl.float32)
                bias = bias * gl.expand_dims(scales, 1)
            acc = acc + bias
        BOXES: gl.constexpr = staging.shape[0] // CONSUMERS
        box = staging.index(CONSUMER * BOXES + PART % BOXES)
        tma.store_wait(BOXES - 1)
        box.store(acc.to(out.dtype))
        fence_async_shared()
        z, y, at = ragged_indices(first, size, row, 1)
        tma.async_copy_shared_to_global(out, [z, y, at, column], box.reshape(out.block_shape))


@gluon.jit
def zero_tail(out, staging, offsets_ptr, rows, num_groups, C, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Zeros in the rows of no group, shared among the consumers of all programs."""
    HEIGHT: gl.constexpr = out.block_shape[2]
    WIDTH: gl.constexpr = out.block_shape[3]
    first = gl.load(offsets_ptr + num_groups)
    size = (rows - first).to(gl.int32)
    if size > 0:
        num_tiles_n = gl.cdiv(C, WIDTH)
        num_tiles = gl.cdiv(size, HEIGHT) * num_tiles_n
        tma.store_wait(0)
        box = staging.index(CONSUMER * (staging.shape[0] // CONSUMERS))
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
        box.store(gl.zeros([HEIGHT, WIDTH], out.dtype, layout))
        fence_async_shared()
        for tile in range(CONSUMERS * gl.program_id(0) + CONSUMER, num_tiles, CONSUMERS * gl.num_programs(0)):
            z, y, at = ragged_indices(first, size, tile // num_tiles_n * HEIGHT, 1)
            tma.async_copy_shared_to_global(out, [z, y, at, tile % num_tiles_n * WIDTH], box.reshape(out.block_shape))


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
    a, b, given, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr
):  # fmt: skip
    stages, _staging, full, empty, ends, offsets_ptr, sizes = given
    a_stages, b_stages, _scale_stages = stages
    _rows, _num_groups, R, C = sizes
    HEIGHT: gl.constexpr = a.block_shape[2]
    BOXES: gl.constexpr = BLOCK_M // HEIGHT
    num_tiles_m = gl.max(read_ends(ends), axis=0)
    num_tiles_n = gl.cdiv(C, BLOCK_N)
    step = 0
    for tile in range(gl.program_id(0), num_tiles_m * num_tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_in_bands(tile, num_tiles_m, num_tiles_n, BAND)
        group, first, size = find_rows(offsets_ptr, ends, tile_m, BLOCK_M)
        z, y, row = ragged_indices(first, size, 0, 1)
        for r in range(0, R, BLOCK_K):
            stage = wait_for_room(empty, step)
            barrier = full.index(stage)
            mbarrier.expect(barrier, BOXES * a.block_type.nbytes + b.block_type.nbytes)
            b_stage = b_stages.index(stage).reshape(b.block_shape)
            tma.async_copy_global_to_shared(b, [group, tile_n * BLOCK_N, r], barrier, b_stage)
            for i in gl.static_range(BOXES):
                a_stage = a_stages.index(stage * BOXES + i).reshape(a.block_shape)
                tma.async_copy_global_to_shared(a, [z, y, row + i * HEIGHT, r], barrier, a_stage)
            step += 1


@gluon.jit
def load_scales(
    given, scales, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr
):  # fmt: skip
    """Those of BLOCK_M rows, then that of the columns. Rows past their group get some scale, and are not stored."""
    stages, _staging, full, empty, ends, offsets_ptr, sizes = given
    _a_stages, _b_stages, scale_stages = stages
    rows, _num_groups, R, C = sizes
    a_scale_ptr, b_scale_ptr, _a_scale_stride, _b_scale_stride = scales
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    offs = gl.arange(0, scale_stages.shape[1], layout)
    num_tiles_m = gl.max(read_ends(ends), axis=0)
    num_tiles_n = gl.cdiv(C, BLOCK_N)
    num_steps = gl.cdiv(R, BLOCK_K)
    step = 0
    for tile in range(gl.program_id(0), num_tiles_m * num_tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_in_bands(tile, num_tiles_m, num_tiles_n, BAND)
        group, first, _size = find_rows(offsets_ptr, ends, tile_m, BLOCK_M)
        of_rows = a_scale_ptr + gl.minimum(first + offs, rows - 1)
        of_columns = b_scale_ptr + (group * gl.cdiv(C, BLOCK_N) + tile_n) * num_steps
        for s in range(num_steps):
            stage = wait_for_room(empty, step)
            at = gl.where(offs < BLOCK_M, of_rows + gl.cast(s, gl.int64) * rows, of_columns + s)
            async_copy.async_copy_global_to_shared(scale_stages.index(stage), at)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            step += 1


@gluon.jit
def add_scaled(acc, product, scale):
    """acc + product * scale[:, None], rounded once; in assembly, so that it stays before the next product."""
    return gl.inline_asm_elementwise(
        "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [product, gl.expand_dims(scale, 1), acc],
        dtype=gl.float32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def multiply(
    out, given, scales, added, CONSUMER: gl.constexpr, BLOCKWISE: gl.constexpr, PROMOTE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, BAND: gl.constexpr,
):  # fmt: skip
    stages, staging, full, empty, ends, offsets_ptr, sizes = given
    a_stages, b_stages, scale_stages = stages
    rows, num_groups, R, C = sizes
    a_scale_ptr, b_scale_ptr, a_scale_stride, b_scale_stride = scales
    bias_ptr, scales_ptr = added
    HEIGHT: gl.constexpr = a_stages.shape[1]
    CONSUMERS: gl.constexpr = BLOCK_M // HEIGHT
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    num_tiles_m = gl.max(read_ends(ends), axis=0)
    num_tiles_n = gl.cdiv(C, BLOCK_N)
    num_steps = gl.cdiv(R, BLOCK_K)
    row: gl.constexpr = CONSUMER * HEIGHT
    step = 0
    for tile in range(gl.program_id(0), num_tiles_m * num_tiles_n, gl.num_programs(0)):
        tile_m, tile_n = tile_in_bands(tile, num_tiles_m, num_tiles_n, BAND)
        group, first, size = find_rows(offsets_ptr, ends, tile_m, BLOCK_M)
        if CONSUMER == 0 or not PROMOTE or row < size:
            acc = gl.zeros([HEIGHT, BLOCK_N], gl.float32, layout)
            for s in range(num_steps):
                stage = wait_for_loads(full, step + s)
                a_stage = a_stages.index(stage * CONSUMERS + CONSUMER)
                b_stage = b_stages.index(stage).permute([1, 0])
                if PROMOTE:
                    zero = gl.zeros([HEIGHT, BLOCK_N], gl.float32, layout)
                    product = warpgroup_mma(a_stage, b_stage, zero, use_acc=False, is_async=True)
                    if BLOCKWISE:
                        of_step = scale_stages.index(stage)
                        scale = of_step.slice(row, HEIGHT).load(gl.SliceLayout(1, layout))
                        scale *= of_step.slice(BLOCK_M, HEIGHT).load(gl.SliceLayout(1, layout))
                    product = warpgroup_mma_wait(0, deps=[product])
                    free_stage(empty, step + s)
                    if BLOCKWISE:
                        acc = add_scaled(acc, product, scale)
                    else:
                        acc = acc + product
                else:
                    acc = warpgroup_mma(a_stage, b_stage, acc, is_async=True)
                    acc = warpgroup_mma_wait(1, deps=[acc])
                    free_stage(empty, step + s - 1, pred=s > 0)
            if not PROMOTE:
                acc = warpgroup_mma_wait(0, deps=[acc])
                free_stage(empty, step + num_steps - 1, pred=num_steps > 0)
            if not BLOCKWISE:  # one after the other, as `scale_sums`
                acc = acc * gl.load(a_scale_ptr + group * a_scale_stride)
                acc = acc * gl.load(b_scale_ptr + group * b_scale_stride)
            store_rows(
                acc, out, staging, bias_ptr, scales_ptr, group, first, size, row, tile_n * BLOCK_N, C, CONSUMER,
                CONSUMERS, 0,
            )  # fmt: skip
        else:
            for s in range(num_steps):
                wait_for_loads(full, step + s)
                free_stage(empty, step + s)
        step += num_steps
    zero_tail(out, staging, offsets_ptr, rows, num_groups, C, CONSUMER, CONSUMERS)
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_float8_gluon_kernel(
    a,  # [T, R] codes: descriptor of boxes HEIGHT x BLOCK_K, ragged along T
    b,  # [G, C, R] codes: descriptor of boxes BLOCK_N x BLOCK_K
    out,  # [T, C]: descriptor of boxes HEIGHT rows high, ragged along T
    a_scale_ptr,  # [G], a_scale_stride apart; or [ceil(R/128), T] if BLOCKWISE
    b_scale_ptr,  # [G], b_scale_stride apart; or [G, ceil(C/128), ceil(R/128)]
    offsets_ptr,  # [G + 1] int64
    bias_ptr,  # [G, C] or None
    scales_ptr,  # [T] or None
    rows,
    num_groups,
    R,
    C,
    a_scale_stride,
    b_scale_stride,
    BLOCKWISE: gl.constexpr,
    PROMOTE: gl.constexpr,  # three consumers, else two
    BOXES: gl.constexpr,  # of each consumer, on their way to out
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """out[t, c] = sum_r a[t, r] b[g, c, r] + scales[t] bias[g, c], tile after tile of one group; rows of none: 0."""
    HEIGHT: gl.constexpr = a.block_shape[2]
    CONSUMERS: gl.constexpr = BLOCK_M // HEIGHT
    SCALES: gl.constexpr = BLOCK_M + HEIGHT if BLOCKWISE else 1
    a_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(a.block_shape[2:], a.dtype)
    b_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(b.block_shape[1:], b.dtype)
    box_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(out.block_shape[2:], out.dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_stages = gl.allocate_shared_memory(a.dtype, [CONSUMERS * STAGES, HEIGHT, BLOCK_K], a_layout)
    b_stages = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK_K], b_layout)
    scale_stages = gl.allocate_shared_memory(gl.float32, [STAGES, SCALES], plain)
    staging = gl.allocate_shared_memory(out.dtype, [CONSUMERS * BOXES, HEIGHT, out.block_shape[3]], box_layout)
    ends = gl.allocate_shared_memory(gl.int32, [GROUPS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=33 if BLOCKWISE else 1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    fence_async_shared()
    count_tiles(offsets_ptr, num_groups, ends, BLOCK_M)
    stages = a_stages, b_stages, scale_stages
    sizes = rows, num_groups, R, C
    given = stages, staging, full, empty, ends, offsets_ptr, sizes
    scales = a_scale_ptr, b_scale_ptr, a_scale_stride, b_scale_stride
    added = bias_ptr, scales_ptr
    # Registers of a thread of each role but the first one's: no spills.
    if BLOCKWISE:
        gl.warp_specialize(
            [
                (multiply, (out, given, scales, added, 0, BLOCKWISE, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
                (multiply, (out, given, scales, added, 1, BLOCKWISE, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
                (multiply, (out, given, scales, added, 2, BLOCKWISE, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
                (load, (a, b, given, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
                (load_scales, (given, scales, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
            ],
            [4, 4, 1, 1],
            [152, 152, 40, 40],
        )
    elif PROMOTE:
        gl.warp_specialize(
            [
                (multiply, (out, given, scales, added, 0, BLOCKWISE, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
                (multiply, (out, given, scales, added, 1, BLOCKWISE, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
                (multiply, (out, given, scales, added, 2, BLOCKWISE, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
                (load, (a, b, given, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    else:
        gl.warp_specialize(
            [
                (multiply, (out, given, scales, added, 0, BLOCKWISE, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
                (multiply, (out, given, scales, added, 1, BLOCKWISE, PROMOTE, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
                (load, (a, b, given, BLOCK_M, BLOCK_N, BLOCK_K, BAND)),
            ],
            [4, 1],
            [232, 40],
        )


# -------------------------------------------------------------------------------------------------------- launcher

_m_grouped = Launch(m_grouped_float8_gluon_kernel)


def m_grouped_float8_gluon(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    config: GroupedFloat8Config,
    promote: bool,
) -> None:
    """Launches TN, of tensors that `takes_descriptors` takes. Scales per tensor, or of 1x128 and 128x128 blocks.

    config: a tile of two consumers or, to promote, of three.
    """
    (rows, R), (G, C, _) = a.shape, b.shape
    num_tiles = most_tiles(rows, G, config.block_m) * cdiv(C, config.block_n)
    _m_grouped(
        out,
        min(num_tiles, multiprocessors(out)),
        with_layout(ragged_descriptor(a, (HEIGHT, config.block_k), axis=0)),
        with_layout(descriptor(b, (1, config.block_n, config.block_k))),
        with_layout(ragged_descriptor(out, (HEIGHT, BOX_BYTES // out.itemsize), axis=0)),
        a_scale,
        b_scale,
        offsets,
        bias,
        scales,
        rows,
        G,
        R,
        C,
        a_scale.stride(0),
        b_scale.stride(0),
        BLOCKWISE=b_scale.dim() == 3,
        PROMOTE=promote,
        BOXES=BOXES,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        BAND=band(config.block_m),
        GROUPS=max(128, next_power_of_2(G)),
        num_warps=4,  # the others are those of roles
    )
