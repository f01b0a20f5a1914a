"""FC2's dgrad and the backward of its gated activation in one kernel in Gluon, for Hopper: dact is not stored.

    dact = dy w_g                              w_g [R, I]: FC2's weight
    act  = f(h) * scales                       h [T, 2I]: the gate's I columns, then those of the linear part
    dh   = df(h) * (dact * scales)             dscales[t] = sum over i of dact[t, i] f(h)[t, i]

The roles are those of `m_grouped_gluon`, and two more: four warps that differentiate, and one that brings h to them. A
consumer leaves its rows of a tile of dact, rounded, in shared memory, and multiplies the next tile. Meanwhile the four
warps take box after box of it: dh takes the place of h, act that of dact, and both are stored. A kernel of its own
would write dact, and read it again.

That consumers differentiate was up to 60 % slower than two kernels (`bench/results/tuning.md`).

dh and act have the bits of `m_grouped_gluon` and then `chain_triton`. What is summed for dscales is added in another
order: the columns of a tile first, as shares, and then these.

Barriers, each used for the u-th time in phase u % 2. Of each consumer: `computed`, its arrival once dact is there;
`done`, that of those who differentiate once all is stored from there. Of each place for boxes of h: `ready`, their
bytes; `free`, an arrival once dh is stored.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# T rows, G groups, R summed features, I features of the activation

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ops.kernels.elementwise.chain import Step, backward_constants, chain_constants
from ops.kernels.grouped_gemm.finished_rows_gluon import zero_tail
from ops.kernels.grouped_gemm.high_precision_nt_gluon import wait_for_loads, with_layout
from ops.kernels.grouped_gemm.m_grouped_gluon import HEIGHT, free_stage, load, sum_products
from ops.kernels.grouped_gemm.measured_tiles import GroupedGemmConfig
from ops.kernels.grouped_gemm.persistent_schedule import band, most_tiles, multiprocessors
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, ragged_indices
from ops.kernels.grouped_gemm.stores_gluon import rounded_boxes
from ops.kernels.grouped_gemm.tile_queue_gluon import count_tiles, make_queue, take
from recipes.triton.launch import Launch, cdiv, next_power_of_2
from recipes.triton.names_gluon import tma_load, tma_store

WIDTH = 32  # columns of a box
PLACES = 2  # for boxes of h


@gluon.jit
def multiply(dh, act, given, of_dact, shares_ptr, CONSUMER: gl.constexpr):
    stages, _stagings, full, empty, queue, offsets_ptr, sizes = given
    rows, num_groups, R, width = sizes
    a_stages, _b_boxes, b_stages, _scale_stages = stages
    boxes, computed, done = of_dact
    HEIGHT: gl.constexpr = a_stages.shape[1]
    BLOCK_N: gl.constexpr = b_stages.shape[2]
    PARTS: gl.constexpr = BLOCK_N // dh.block_shape[3]
    num_steps = gl.cdiv(R, a_stages.shape[2])
    step = 0
    turn = 0
    use = 0
    group, _first, size, _tile_n = take(queue, turn)
    while group >= 0:
        if CONSUMER > 0 and CONSUMER * HEIGHT >= size:
            for s in range(num_steps):
                wait_for_loads(full, step + s)
                free_stage(empty, step + s)
        else:
            acc = sum_products(given, None, None, step, num_steps, CONSUMER, False, BLOCK_N)
            rounded = rounded_boxes(acc, dh)
            mbarrier.wait(done.index(CONSUMER), (use & 1) ^ 1)
            for part in gl.static_range(PARTS):
                boxes.index(CONSUMER * PARTS + part).store(rounded[part])
            mbarrier.arrive(computed.index(CONSUMER))
            use += 1
        step += num_steps
        turn += 1
        group, _first, size, _tile_n = take(queue, turn)
    if CONSUMER == 0:
        mbarrier.wait(done.index(0), (use & 1) ^ 1)
        zero_tail(dh, boxes, offsets_ptr, rows, num_groups, 2 * width, 0, 1)
        if act is not None:
            zero_tail(act, boxes, offsets_ptr, rows, num_groups, width, 0, 1)
        if shares_ptr is not None:
            zero_shares(shares_ptr, offsets_ptr, rows, num_groups, gl.cdiv(width, BLOCK_N))
        tma.store_wait(0)


@gluon.jit
def load_h(h, of_h, queue, width, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr):
    """The boxes of the gate and the linear part, in the order in which `differentiate` takes them. What is behind a
    part's last column is none, and comes as zeros."""
    boxes, ready, free = of_h
    HEIGHT: gl.constexpr = h.block_shape[2]
    PLACES: gl.constexpr = ready.shape[0]
    use = 0
    turn = 0
    group, first, size, tile_n = take(queue, turn)
    while group >= 0:
        z, y, row = ragged_indices(first, size, 0, 1)
        for consumer in range(gl.minimum(gl.cdiv(size, HEIGHT), CONSUMERS)):
            for part in range(BLOCK_N // h.block_shape[3]):
                i = use % PLACES
                mbarrier.wait(free.index(i), (use // PLACES & 1) ^ 1)
                mbarrier.expect(ready.index(i), 2 * h.block_type.nbytes)
                at = tile_n * BLOCK_N + part * h.block_shape[3]
                for half in gl.static_range(2):
                    there = gl.where(at < width, half * width + at, 2 * width)
                    box = boxes.index(2 * i + half).reshape(h.block_shape)
                    tma_load(h, [z, y, row + consumer * HEIGHT, there], ready.index(i), box)
                use += 1
        turn += 1
        group, first, size, tile_n = take(queue, turn)


@gluon.jit
def differentiate_box(
    dh, act, of_h, box, i, place, at, width, factors, share, STEPS: gl.constexpr, BACKWARDS: gl.constexpr,
    CONSTANTS: gl.constexpr,
):  # fmt: skip
    """Stores dh, and act if there is memory for it, of the columns from `at` on. box: their dact; i: the place of h's
    boxes. Returns the share of dscales with their columns added."""
    boxes, _ready, _free = of_h
    A: gl.constexpr = CONSTANTS[0]
    B: gl.constexpr = CONSTANTS[1]
    C: gl.constexpr = CONSTANTS[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0])
    gate = boxes.index(2 * i).load(layout).to(gl.float32)
    linear = boxes.index(2 * i + 1).load(layout).to(gl.float32)
    d = box.load(layout).to(gl.float32)
    value = STEPS[0](gate, linear, A, B, C)
    share += gl.sum(d * value, axis=1)
    if len(factors) > 0:
        d = d * gl.expand_dims(factors[0], 1)
        value = value * gl.expand_dims(factors[0], 1)
    d_gate, d_linear = BACKWARDS[0](d, gate, linear, A, B, C)
    boxes.index(2 * i).store(d_gate.to(dh.dtype))
    boxes.index(2 * i + 1).store(d_linear.to(dh.dtype))
    if act is not None:
        box.store(value.to(dh.dtype))
    fence_async_shared()
    for half in gl.static_range(2):
        there = gl.where(at < width, half * width + at, 2 * width)
        tma_store(dh, place + (there,), boxes.index(2 * i + half).reshape(dh.block_shape))  # noqa: RUF005
    if act is not None:
        tma_store(act, place + (at,), box.reshape(act.block_shape))  # noqa: RUF005
    return share


@gluon.jit
def differentiate(
    dh, act, given, of_h, of_dact, scales_ptr, shares_ptr, STEPS: gl.constexpr, BACKWARDS: gl.constexpr,
    CONSTANTS: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    _stages, _stagings, _full, _empty, queue, _offsets_ptr, sizes = given
    rows, _num_groups, _R, width = sizes
    _h_boxes, ready, free = of_h
    boxes, computed, done = of_dact
    HEIGHT: gl.constexpr = dh.block_shape[2]
    WIDTH: gl.constexpr = dh.block_shape[3]
    PARTS: gl.constexpr = BLOCK_N // WIDTH
    PLACES: gl.constexpr = ready.shape[0]
    of_rows: gl.constexpr = gl.SliceLayout(1, gl.BlockedLayout([1, 8], [8, 4], [gl.num_warps(), 1], [1, 0]))
    offs_t = gl.arange(0, HEIGHT, of_rows)
    use = 0  # of places for boxes of h
    further = 0  # tiles of the second consumer
    turn = 0
    group, first, size, tile_n = take(queue, turn)
    while group >= 0:
        for consumer in range(gl.minimum(gl.cdiv(size, HEIGHT), CONSUMERS)):
            here = consumer * HEIGHT
            is_row = offs_t < size - here
            place = ragged_indices(first, size, here, 1)
            share = gl.zeros([HEIGHT], gl.float32, of_rows)
            factors = ()
            if scales_ptr is not None:
                scale = gl.load(scales_ptr + first + here + offs_t, mask=is_row, other=0.0).to(gl.float32)
                factors = factors + (scale,)  # type: ignore[assignment]  # noqa: RUF005
            mbarrier.wait(computed.index(consumer), (turn if consumer == 0 else further) & 1)
            for part in range(PARTS):
                i = use % PLACES
                mbarrier.wait(ready.index(i), use // PLACES & 1)
                box = boxes.index(consumer * PARTS + part)
                at = tile_n * BLOCK_N + part * WIDTH
                share = differentiate_box(
                    dh, act, of_h, box, i, place, at, width, factors, share, STEPS, BACKWARDS, CONSTANTS
                )
                # The part before is stored.
                tma.store_wait(2 if act is None else 3)
                mbarrier.arrive(free.index((use + PLACES - 1) % PLACES), pred=use > 0)
                use += 1
            tma.store_wait(0)
            mbarrier.arrive(done.index(consumer))
            if shares_ptr is not None:
                shares_here = shares_ptr + tile_n.to(gl.int64) * rows + first + here
                gl.store(shares_here + offs_t, share, mask=is_row)
        further += (size > HEIGHT).to(gl.int32)
        turn += 1
        group, first, size, tile_n = take(queue, turn)
    tma.store_wait(0)


@gluon.jit
def zero_shares(shares_ptr, offsets_ptr, rows, num_groups, COUNT):
    """Zeros in the rows of no group, as `zero_tail`."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    first = gl.load(offsets_ptr + num_groups)
    for start in range(first + gl.program_id(0) * 128, rows, gl.num_programs(0) * 128):
        offs_t = start + gl.arange(0, 128, layout)
        for i in range(COUNT):
            at = shares_ptr + gl.cast(i, gl.int64) * rows + offs_t
            gl.store(at, gl.zeros([128], gl.float32, layout), mask=offs_t < rows)


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_dactivation_gluon_kernel(
    dy,  # [T, R]: descriptor of boxes HEIGHT x BLOCK_K, ragged along T
    w,  # [G, R, I]: descriptor of boxes as wide as the tile
    h,  # [T, 2I]: descriptor of boxes HEIGHT rows high, ragged along T
    dh,  # [T, 2I]: the same
    act,  # [T, I]: the same; or None
    offsets_ptr,  # [G + 1] int64
    scales_ptr,  # [T] or None
    shares_ptr,  # [ceil(I / BLOCK_N), T] float32, or None
    counter_ptr,  # [1] int32, 0
    rows,
    num_groups,
    R,
    width,  # I
    STEPS: gl.constexpr,  # the activation, in a tuple
    BACKWARDS: gl.constexpr,  # and its backward
    CONSTANTS: gl.constexpr,  # its numbers
    SOURCE: gl.constexpr,  # a hash of it
    PLACES: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """dh, and act and shares of dscales if there is memory for them, tile after tile of one group; rows of none: 0."""
    HEIGHT: gl.constexpr = dy.block_shape[2]
    WIDTH: gl.constexpr = h.block_shape[3]
    CONSUMERS: gl.constexpr = BLOCK_M // HEIGHT
    gl.static_assert(CONSUMERS == 2, "there are no such roles")
    dy_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(dy.block_shape[2:], dy.dtype)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(w.block_shape[1:], w.dtype)
    box_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], h.dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dy_stages = gl.allocate_shared_memory(dy.dtype, [CONSUMERS * STAGES, HEIGHT, BLOCK_K], dy_layout)
    w_stages = gl.allocate_shared_memory(w.dtype, [STAGES, BLOCK_K, BLOCK_N], w_layout)
    dact_boxes = gl.allocate_shared_memory(h.dtype, [CONSUMERS * (BLOCK_N // WIDTH), HEIGHT, WIDTH], box_layout)
    h_boxes = gl.allocate_shared_memory(h.dtype, [2 * PLACES, HEIGHT, WIDTH], box_layout)
    ends = gl.allocate_shared_memory(gl.int32, [GROUPS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    computed = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    done = gl.allocate_shared_memory(gl.int64, [CONSUMERS, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [PLACES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    for i in gl.static_range(CONSUMERS):
        mbarrier.init(computed.index(i), count=1)
        mbarrier.init(done.index(i), count=1)
    for i in gl.static_range(PLACES):
        mbarrier.init(ready.index(i), count=1)
        mbarrier.init(free.index(i), count=1)
    queue = make_queue(4, CONSUMERS + 2)
    fence_async_shared()
    count_tiles(offsets_ptr, num_groups, ends, BLOCK_M)
    sizes = rows, num_groups, R, width
    given = (dy_stages, w_stages, w_stages, None), None, full, empty, queue, offsets_ptr, sizes
    of_h = h_boxes, ready, free
    of_dact = dact_boxes, computed, done
    # Registers of a thread of each role but the first one's: no spills.
    gl.warp_specialize(
        [
            (multiply, (dh, act, given, of_dact, shares_ptr, 0)),
            (multiply, (dh, act, given, of_dact, shares_ptr, 1)),
            (
                differentiate,
                (
                    dh, act, given, of_h, of_dact, scales_ptr, shares_ptr, STEPS, BACKWARDS, CONSTANTS, CONSUMERS,
                    BLOCK_N,
                ),
            ),
            (load, (dy, w, given, ends, counter_ptr, False, BAND)),
            (load_h, (h, of_h, queue, width, CONSUMERS, BLOCK_N)),
        ],
        [4, 2, 1, 1],
        [184, 144, 144, 144],
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------------- launcher

_m_grouped_dactivation = Launch(m_grouped_dactivation_gluon_kernel)


def m_grouped_dactivation_gluon(
    dy: Tensor, w: Tensor, offsets: Tensor, h: Tensor, scales: Tensor | None, dh: Tensor, act: Tensor | None,
    shares: Tensor | None, config: GroupedGemmConfig, step: Step,
) -> None:  # fmt: skip
    """Launches it, of bfloat16 tensors that `takes_descriptors` takes; I is a multiple of a box's columns. step: a
    gated activation whose parts are the halves of h. shares: [ceil(I / block_n), T] float32."""
    rows, R = dy.shape
    G, _, columns = w.shape
    about = chain_constants((step,), (torch.bfloat16,)) | backward_constants((step,), (torch.bfloat16,))
    box = HEIGHT, WIDTH
    _m_grouped_dactivation(
        dh,
        min(most_tiles(rows, G, config.block_m) * cdiv(columns, config.block_n), multiprocessors(dh)),
        with_layout(ragged_descriptor(dy, (HEIGHT, config.block_k), axis=0)),
        with_layout(descriptor(w, (1, config.block_k, config.block_n))),
        with_layout(ragged_descriptor(h, box, axis=0)),
        with_layout(ragged_descriptor(dh, box, axis=0)),
        None if act is None else with_layout(ragged_descriptor(act, box, axis=0)),
        offsets,
        scales,
        shares,
        torch.zeros(1, dtype=torch.int32, device=dh.device),
        rows,
        G,
        R,
        columns,
        **{name: about[name] for name in ("STEPS", "BACKWARDS", "CONSTANTS", "SOURCE")},
        PLACES=PLACES,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        BAND=band(config.block_m),
        GROUPS=max(128, next_power_of_2(G)),
        enable_fp_fusion=False,
        num_warps=4,  # the others are those of roles
    )
