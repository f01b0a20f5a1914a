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

dy may lie in rows, for scales per tensor in split accumulation: each consumer transposes its part of a box of 128 rows
on its way to registers (`float8_nt_sums_gluon.transposed`), in an order of dw's rows that its boxes undo.

Scales of blocks have a role of their own: one warp copies (cp.async) those of the rows and of the columns of a step to
its stage.

Barriers, and why loops over steps start at 0: as `m_grouped_gluon`; but each consumer has `empty` barriers of its own.
The sums of a tile: `float8_nt_sums_gluon`. What is added to: as `high_precision_nt_gluon`.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# P columns of the padded groups, G groups, N out features, K in features

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier, tma

from ops.kernels.grouped_gemm.float8_nt_sums_gluon import sum_and_scale
from ops.kernels.grouped_gemm.high_precision_nt_gluon import (
    add_boxes,
    free_last_box,
    free_stage,
    load_old_sums,
    place_of,
    store_sums,
    wait_for_loads,
    wait_for_room,
    with_barriers,
    with_layout,
)
from ops.kernels.grouped_gemm.m_grouped_gluon import HEIGHT
from ops.kernels.grouped_gemm.measured_tiles import BOX_BYTES
from ops.kernels.grouped_gemm.persistent_schedule import band, multiprocessors, tile_in_bands
from ops.kernels.grouped_gemm.ragged_tma import (
    descriptor,
    descriptor_by_parity,
    ragged_descriptor,
    ragged_indices,
)
from ops.kernels.grouped_gemm.stores_gluon import allocate_staging, boxes_of_none, store_tile
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
def load(dy, x, given, ranks, offsets_ptr, row_offsets_ptr, counter_ptr, BAND: gl.constexpr):
    stages, full, empty, queue, sizes = given
    dy_stages, x_stages, _dy_scale_stages, _x_scale_stages = stages
    num_groups, N, K = sizes
    PARTS: gl.constexpr = dy_stages.shape[0] // x_stages.shape[0]
    BLOCK_N: gl.constexpr = x_stages.shape[1]
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    BLOCK_M: gl.constexpr = PARTS * dy.block_type.numel // BLOCK_K
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
        if row_offsets_ptr is not None:
            first_row = gl.load(row_offsets_ptr + group)
            num_rows = (gl.load(row_offsets_ptr + group + 1) - first_row).to(gl.int32)
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
                if row_offsets_ptr is None:
                    tma_load(dy, [z, y, first_n + i * (BLOCK_M // PARTS), column], barrier, dy_stage)
                else:
                    z_of_rows, y_of_rows, row = ragged_indices(first_row, num_rows, s * BLOCK_K, 1)
                    tma_load(dy, [z_of_rows, y_of_rows, row, first_n], barrier, dy_stage)
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
def multiply(
    dw, given, scales, staging, old, CONSUMER: gl.constexpr, ACCUMULATE: gl.constexpr, REVERSE: gl.constexpr,
    LAYOUT: gl.constexpr, PROMOTE: gl.constexpr, LATE: gl.constexpr,
):  # fmt: skip
    stages, full, empty, queue, sizes = given
    dy_stages, x_stages, _dy_scale_stages, _x_scale_stages = stages
    num_groups, N, _K = sizes
    STAGES: gl.constexpr = full.shape[0]
    BLOCK_N: gl.constexpr = x_stages.shape[1]
    BLOCK_K: gl.constexpr = x_stages.shape[2]
    BLOCK_M: gl.constexpr = dy_stages.numel // (STAGES * BLOCK_K)
    HEIGHT: gl.constexpr = dw.block_type.numel // dw.block_shape[-1]
    PARTS: gl.constexpr = BLOCK_N // dw.block_shape[-1]
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
                last = boxes, place_of(dw, place, row), column, dw, staging
            sums = sum_and_scale(
                given, last, scales, group, size, first_n, first_k, step, num_steps, CONSUMER, LAYOUT, PROMOTE
            )
            middle = first_k + BLOCK_N // 2
            if LATE:
                boxes = sums
                place, row, column = matrix, first_n, first_k
            elif not ACCUMULATE or num_steps > 0:
                left, right = sums
                there = place_of(dw, matrix, first_n)
                if old is None:
                    store_sums(left, dw, staging, there, first_k, ACCUMULATE, 0)
                    store_sums(right, dw, staging, there, middle, ACCUMULATE, 1)
                else:
                    add_boxes(left, dw, old, uses, there, first_k, 0)
                    add_boxes(right, dw, old, uses, there, middle, 1)
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
        store_tile((boxes, place_of(dw, place, row), column, dw, staging))
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["num_groups"])
def k_grouped_float8_gluon_kernel(
    dy,  # [N, P] codes: descriptor of boxes HEIGHT x BLOCK_K, ragged along P; or [T, N]: BLOCK_K x BLOCK_M, along T
    x,  # [K, P] codes: descriptor of boxes BLOCK_N x BLOCK_K, ragged along P
    dw,  # [G, N, K]: descriptor of boxes HEIGHT rows high; of dy in rows by `descriptor_by_parity`
    dy_scale_ptr,  # [G], dy_scale_stride apart; or [P/128, N] of blocks, [G, 1, N] of vectors
    x_scale_ptr,  # [G], x_scale_stride apart; or [P/128, K], [G, 1, K]
    offsets_ptr,  # [G + 1] int64, multiples of 16; of 128 for block scales
    row_offsets_ptr,  # [G + 1] int64, of dy in rows, else None
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
    HEIGHT: gl.constexpr = dw.block_type.numel // dw.block_shape[-1]
    CONSUMERS: gl.constexpr = BLOCK_M // HEIGHT
    BOXES_OF_DY: gl.constexpr = BLOCK_M * BLOCK_K // dy.block_type.numel
    takes_rows: gl.constexpr = LAYOUT == "tensor" and PROMOTE and BOXES_OF_DY == 1
    gl.static_assert(row_offsets_ptr is None or takes_rows, "rows are transposed for no others")
    gl.static_assert(CONSUMERS == (3 if LAYOUT == "row" and not FETCH else 2), "there are no such roles")
    ROW_SCALES: gl.constexpr = (256 if BLOCK_M == 192 else BLOCK_M) if LAYOUT == "row" else 1
    COLUMN_SCALES: gl.constexpr = BLOCK_N if LAYOUT == "row" else 1
    dy_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(dy.block_shape[2:], dy.dtype)
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(x.block_shape[2:], x.dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dy_stages = gl.allocate_shared_memory(dy.dtype, [BOXES_OF_DY * STAGES] + dy.block_shape[2:], dy_layout)  # noqa: RUF005
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
                    (load, (dy, x, given, ranks, offsets_ptr, row_offsets_ptr, counter_ptr, BAND)),
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
                    (load, (dy, x, given, ranks, offsets_ptr, row_offsets_ptr, counter_ptr, BAND)),
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
                (load, (dy, x, given, ranks, offsets_ptr, row_offsets_ptr, counter_ptr, BAND)),
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
                (load, (dy, x, given, ranks, offsets_ptr, row_offsets_ptr, counter_ptr, BAND)),
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
    row_offsets: Tensor | None = None,
) -> None:
    """Launches NT, of tensors that `takes_descriptors` takes. Scales per tensor, vectors, or of 1x128 blocks.

    row_offsets: dy is [T, N], divided so, per tensor and promoted. accumulate, for float32 alone: out += it. config: a
    tile of two consumers or, with scales of blocks and nothing that is fetched, of three.
    """
    G, N, K = out.shape
    box = HEIGHT, BOX_BYTES // out.itemsize
    if row_offsets is None:
        of_dy = ragged_descriptor(dy, (HEIGHT, config.block_k), axis=1, unit=16)
        of_out = descriptor(out, (1, *box))
    else:
        of_dy = ragged_descriptor(dy, (config.block_k, config.block_m), axis=0)
        of_out = descriptor_by_parity(out, *box)
    num_tiles = G * cdiv(N, config.block_m) * cdiv(K, config.block_n)
    _k_grouped(
        out,
        min(num_tiles, multiprocessors(out, spare)),
        with_layout(of_dy),
        with_layout(ragged_descriptor(x, (config.block_n, config.block_k), axis=1, unit=16)),
        with_layout(of_out),
        dy_scale,
        x_scale,
        offsets,
        row_offsets,
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
