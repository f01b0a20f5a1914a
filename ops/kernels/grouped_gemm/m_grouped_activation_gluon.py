"""FC1 and its gated activation in Gluon, for Hopper: act is stored, and h, the pre-activation, where backward needs it.

    h = x w_g^T            act = f(h) * scales            w_g [2I, R]: the gate's I rows, then those of the linear part

The roles are those of `m_grouped_gluon`. A tile has 128 columns of the gate and the same 128 of the linear part. It is
rounded, and stored while the next one is multiplied; meanwhile act is computed of it, box by box. A kernel of its own
would read h again. `h` is None where it is not stored.

Of values act is stored as such, of codes with one scale a group as codes with a scale that is given. These have the
bits that the element-wise kernel casts to (`chain_triton`), and its amaxes are raised as there.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# T rows, G groups, R summed features, I features of the activation

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma_wait

from ops.kernels.elementwise.chain import Step, chain_constants
from ops.kernels.elementwise.chain_cast import Cast, cast_constants
from ops.kernels.grouped_gemm.finished_rows_gluon import zero_tail
from ops.kernels.grouped_gemm.high_precision_nt_gluon import wait_for_loads, with_layout
from ops.kernels.grouped_gemm.m_grouped_gluon import BOXES, HEIGHT, free_stage, load, multiply_step
from ops.kernels.grouped_gemm.measured_tiles import BOX_BYTES, GroupedGemmConfig
from ops.kernels.grouped_gemm.persistent_schedule import band, most_tiles, multiprocessors
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, ragged_indices
from ops.kernels.grouped_gemm.stores_gluon import (
    allocate_staging,
    boxes_of_none,
    joined_columns,
    rounded_boxes,
    split_columns,
    store_box,
)
from ops.kernels.grouped_gemm.tile_queue_gluon import count_tiles, make_queue, take
from ops.kernels.grouped_gemm.tile_rules_float8 import GroupedFloat8Config
from recipes.casts.float8_elements_triton import float8_pairs
from recipes.casts.float8_tiles_gluon import larger_magnitude, larger_pair, store_inverses
from recipes.casts.float8_vectors_gluon import raise_amaxes
from recipes.triton.launch import Launch, cdiv, next_power_of_2
from recipes.triton.names_gluon import reinterpret
from recipes.triton.rounding import bfloat16_pairs, unpack_pairs


@gluon.jit
def widen_apart(x):
    """bfloat16 x in float32. In assembly: else the compiler keeps what it widens from one tile to the next."""
    return gl.inline_asm_elementwise(
        "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=False, pack=2
    )  # fmt: skip


@gluon.jit
def activated(gate, linear, scale, STEPS: gl.constexpr, CONSTANTS: gl.constexpr):
    """act of these columns of both parts, in float32. scale: of rows, or None."""
    A: gl.constexpr = CONSTANTS[0]
    B: gl.constexpr = CONSTANTS[1]
    C: gl.constexpr = CONSTANTS[2]
    y = STEPS[0](widen_apart(gate), widen_apart(linear), A, B, C)
    if scale is not None:
        of_rows: gl.constexpr = gl.SliceLayout(1, y.type.layout)
        y = y * gl.expand_dims(gl.convert_layout(scale, of_rows, assert_trivial=True), 1)
    return y


@gluon.jit
def raise_amax(amax_ptr, words, counted):
    """To the largest magnitude in words of two numbers [64, C], if it is counted: each of four warps to that of its
    rows."""
    peak = larger_magnitude(gl.reduce(words.reshape([4, words.shape[0] // 4 * words.shape[1]]), 1, larger_pair))
    offs = gl.arange(0, 4, peak.type.layout)
    raise_amaxes(amax_ptr + offs * 0, peak, offs < gl.where(counted, 4, 0))


@gluon.jit
def store_part(last, PART: gl.constexpr):
    """Stores the two boxes of the gate, or of the linear part, of a tile. What is behind a part's last column is
    not stored."""
    boxes, place, column, h, _act, staging, width, _scales_ptr, _given = last
    if h is not None:
        for i in gl.static_range(2):
            at = column + i * h.block_shape[3]
            store_box(boxes[2 * PART + i], h, staging, i, place, gl.where(at < width, PART * width + at, 2 * width))


@gluon.jit
def staging_of(act, staging):
    """The staging of act: that of its values. Of codes each second box begins where one of values does."""
    EVERY: gl.constexpr = staging.dtype.primitive_bitwidth // act.dtype.primitive_bitwidth
    shape: gl.constexpr = [EVERY * staging.shape[0], act.block_shape[2], act.block_shape[3]]
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(act.block_shape[2:], act.dtype)
    return reinterpret(staging, act.dtype, shape, layout)


@gluon.jit
def factors_of(last):
    """A tuple of what act of a tile is multiplied by row by row, if it is, and of the scale of its codes, if it has."""
    boxes, place, _column, _h, _act, _staging, _width, scales_ptr, given = last
    code_scale_ptr, _amax_ptr, group = given
    factors = ()
    if scales_ptr is not None:
        offs_t = gl.arange(0, boxes[0].shape[0], gl.SliceLayout(1, boxes[0].type.layout))
        _z, y, row = place
        height = 2**30 - row  # `ragged_indices`
        scale = gl.load(scales_ptr + (y - height) + offs_t, mask=offs_t < height, other=0.0).to(gl.float32)
        factors = factors + (scale,)  # noqa: RUF005
    if code_scale_ptr is not None:
        factors = factors + (gl.load(code_scale_ptr + group),)  # noqa: RUF005
    return factors


@gluon.jit
def half_of_act(
    last, factors, BOX: gl.constexpr, HALF: gl.constexpr, STEPS: gl.constexpr, CONSTANTS: gl.constexpr,
    FORM: gl.constexpr,
):  # fmt: skip
    """Half of a box of act of a tile, as it is stored: codes in pairs."""
    boxes, _place, column, _h, act, _staging, width, scales_ptr, given = last
    code_scale_ptr, amax_ptr, group = given
    gates = split_columns(boxes[BOX])
    linears = split_columns(boxes[2 + BOX])
    y = activated(gates[HALF], linears[HALF], None if scales_ptr is None else factors[0], STEPS, CONSTANTS)
    if code_scale_ptr is None:
        return y.to(boxes[0].dtype)
    else:
        even, odd = y.reshape([y.shape[0], y.shape[1] // 2, 2]).split()
        words = bfloat16_pairs(even, odd)
        if amax_ptr is not None:
            raise_amax(amax_ptr + group, words, column + BOX * act.block_shape[3] < width)
        even, odd = unpack_pairs(words)
        code_scale = factors[len(factors) - 1]
        return float8_pairs(even * code_scale, odd * code_scale, FORM)


@gluon.jit
def store_act(last, left, right, BOX: gl.constexpr):
    """Stores a box of act of a tile."""
    _boxes, place, column, _h, act, staging, _width, _scales_ptr, _given = last
    EVERY: gl.constexpr = staging.dtype.primitive_bitwidth // act.dtype.primitive_bitwidth
    at = column + BOX * act.block_shape[3]
    store_box(joined_columns(left, right), act, staging_of(act, staging), BOX, place, at, EVERY)


@gluon.jit
def sum_and_store(
    given, last, step, num_steps,
    CONSUMER: gl.constexpr, STEPS: gl.constexpr, CONSTANTS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    """The products of this consumer's rows and all columns of a tile, in six steps or more. Meanwhile last is stored:
    h in two of them, then act half a box in each."""
    stages, _stagings, _full, empty, _queue, _offsets_ptr, _sizes = given
    HEIGHT: gl.constexpr = stages[0].shape[1]
    WIDTH: gl.constexpr = stages[2].shape[1]
    BITS: gl.constexpr = stages[0].dtype.primitive_bitwidth
    acc = gl.zeros([HEIGHT, WIDTH], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 256 // BITS]))
    acc = multiply_step(acc, given, step, CONSUMER, True, WIDTH)
    store_part(last, 0)
    acc = multiply_step(acc, given, step + 1, CONSUMER, True, WIDTH)
    factors = factors_of(last)
    store_part(last, 1)
    for i in gl.static_range(2):
        acc = warpgroup_mma_wait(1, deps=[acc])
        free_stage(empty, step + 2 * i)
        acc = multiply_step(acc, given, step + 2 * i + 2, CONSUMER, True, WIDTH)
        left = half_of_act(last, factors, i, 0, STEPS, CONSTANTS, FORM)
        acc = warpgroup_mma_wait(1, deps=[acc])
        free_stage(empty, step + 2 * i + 1)
        acc = multiply_step(acc, given, step + 2 * i + 3, CONSUMER, True, WIDTH)
        right = half_of_act(last, factors, i, 1, STEPS, CONSTANTS, FORM)
        store_act(last, left, right, i)
    acc = warpgroup_mma_wait(1, deps=[acc])
    free_stage(empty, step + 4)
    for s in range(num_steps - 6):
        acc = multiply_step(acc, given, step + s + 6, CONSUMER, True, WIDTH)
        acc = warpgroup_mma_wait(1, deps=[acc])
        free_stage(empty, step + s + 5)
    acc = warpgroup_mma_wait(0, deps=[acc])
    free_stage(empty, step + num_steps - 1)
    return acc


@gluon.jit
def multiply(
    h, act, given, scales_ptr, of_codes,
    CONSUMER: gl.constexpr, STEPS: gl.constexpr, CONSTANTS: gl.constexpr, FORM: gl.constexpr,
):  # fmt: skip
    stages, stagings, full, empty, queue, offsets_ptr, sizes = given
    rows, num_groups, R, C = sizes
    a_stages, _b_boxes, b_stages, _scale_stages = stages
    x_scale_ptr, w_scale_ptr, x_scale_stride, w_scale_stride, act_scale_ptr, amax_ptr = of_codes
    staging = stagings[CONSUMER]
    HEIGHT: gl.constexpr = a_stages.shape[1]
    CONSUMERS: gl.constexpr = a_stages.shape[0] // full.shape[0]
    BLOCK_N: gl.constexpr = b_stages.shape[1]
    num_steps = gl.cdiv(R, a_stages.shape[2])
    width = C // 2
    step = 0
    turn = 0
    group, first, size, tile_n = take(queue, turn)
    boxes = boxes_of_none(act, HEIGHT, BLOCK_N, gl.bfloat16)
    z, y, row, column = 1 << 30, 0, 1 << 30, C  # of no rows, and behind the last column: nothing is stored
    last_group = 0
    while group >= 0:
        if CONSUMER > 0 and CONSUMER * HEIGHT >= size:
            for s in range(num_steps):
                wait_for_loads(full, step + s)
                free_stage(empty, step + s)
        else:
            to_act = act_scale_ptr, amax_ptr, last_group
            last = boxes, (z, y, row), column, h, act, staging, width, scales_ptr, to_act
            acc = sum_and_store(given, last, step, num_steps, CONSUMER, STEPS, CONSTANTS, FORM)
            if x_scale_ptr is not None:  # one after the other, as `finished`
                acc = acc * gl.load(x_scale_ptr + group * x_scale_stride)
                acc = acc * gl.load(w_scale_ptr + group * w_scale_stride)
            boxes = rounded_boxes(acc, act, gl.bfloat16)
            z, y, row = ragged_indices(first, size, CONSUMER * HEIGHT, 1)
            column = tile_n * (BLOCK_N // 2)
            last_group = group
        step += num_steps
        turn += 1
        group, first, size, tile_n = take(queue, turn)
    to_act = act_scale_ptr, amax_ptr, last_group
    last = boxes, (z, y, row), column, h, act, staging, width, scales_ptr, to_act
    for i in gl.static_range(2):
        store_part(last, i)
    factors = factors_of(last)
    for i in gl.static_range(2):
        left = half_of_act(last, factors, i, 0, STEPS, CONSTANTS, FORM)
        right = half_of_act(last, factors, i, 1, STEPS, CONSTANTS, FORM)
        store_act(last, left, right, i)
    if h is not None:
        zero_tail(h, staging, offsets_ptr, rows, num_groups, C, CONSUMER, CONSUMERS)
    zero_tail(act, staging_of(act, staging), offsets_ptr, rows, num_groups, width, CONSUMER, CONSUMERS)
    tma.store_wait(0)


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit(do_not_specialize=["rows", "num_groups"])
def m_grouped_activation_gluon_kernel(
    x,  # [T, R]: descriptor of boxes HEIGHT x BLOCK_K, ragged along T
    w,  # [G, 2I, R]: descriptor of boxes of half a tile's columns
    h,  # [T, 2I]: descriptor of boxes HEIGHT rows high, ragged along T; or None
    act,  # [T, I]: the same; of codes, as bytes
    offsets_ptr,  # [G + 1] int64
    scales_ptr,  # [T] or None
    x_scale_ptr,  # of codes [G], x_scale_stride apart, else None
    w_scale_ptr,  # the same
    act_scale_ptr,  # [G], and
    act_inverse_ptr,  # [G], which becomes 1 / act_scale; or None and None
    amax_ptr,  # [G] int32, the bits of float32, or None
    counter_ptr,  # [1] int32, 0
    rows,
    num_groups,
    R,
    C,  # 2I
    x_scale_stride,
    w_scale_stride,
    STEPS: gl.constexpr,  # the activation, in a tuple
    CONSTANTS: gl.constexpr,  # its numbers
    SOURCE: gl.constexpr,  # a hash of it
    FORM: gl.constexpr,  # of act's codes
    BOXES: gl.constexpr,  # of each consumer, on their way to h or act
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    STAGES: gl.constexpr,
    BAND: gl.constexpr,
    GROUPS: gl.constexpr,
):
    """act, and h if there is memory for it, tile after tile of one group; rows of none: 0."""
    HEIGHT: gl.constexpr = x.block_shape[2]
    CONSUMERS: gl.constexpr = BLOCK_M // HEIGHT
    gl.static_assert(CONSUMERS == 2, "there are no such roles")
    x_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(x.block_shape[2:], x.dtype)
    w_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(w.block_shape[1:], w.dtype)
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    x_stages = gl.allocate_shared_memory(x.dtype, [CONSUMERS * STAGES, HEIGHT, BLOCK_K], x_layout)
    w_boxes = gl.allocate_shared_memory(w.dtype, [2 * STAGES, BLOCK_N // 2, BLOCK_K], w_layout)
    w_stages = reinterpret(w_boxes, w.dtype, [STAGES, BLOCK_N, BLOCK_K], w_layout)
    stagings = allocate_staging(act, BOXES, CONSUMERS, gl.bfloat16)
    ends = gl.allocate_shared_memory(gl.int32, [GROUPS], plain)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=CONSUMERS)
    queue = make_queue(4, CONSUMERS)
    fence_async_shared()
    count_tiles(offsets_ptr, num_groups, ends, BLOCK_M)
    if act_inverse_ptr is not None:
        if gl.program_id(0) == 0:
            store_inverses(act_inverse_ptr, act_scale_ptr, offsets_ptr, rows, num_groups, "given", FORM, None)
    sizes = rows, num_groups, R, C
    given = (x_stages, w_boxes, w_stages, None), stagings, full, empty, queue, offsets_ptr, sizes
    of_codes = x_scale_ptr, w_scale_ptr, x_scale_stride, w_scale_stride, act_scale_ptr, amax_ptr
    gl.warp_specialize(
        [
            (multiply, (h, act, given, scales_ptr, of_codes, 0, STEPS, CONSTANTS, FORM)),
            (multiply, (h, act, given, scales_ptr, of_codes, 1, STEPS, CONSTANTS, FORM)),
            (load, (x, w, given, ends, counter_ptr, True, BAND, True)),
        ],
        [4, 1],
        [224, 56],
    )


# -------------------------------------------------------------------------------------------------------- launcher

_m_grouped_activation = Launch(m_grouped_activation_gluon_kernel)


def m_grouped_activation_gluon(
    x: Tensor, w: Tensor, offsets: Tensor, scales: Tensor | None, h: Tensor | None, act: Tensor,
    config: GroupedGemmConfig | GroupedFloat8Config, step: Step, *,
    x_scale: Tensor | None = None, w_scale: Tensor | None = None, cast: Cast | None = None,
) -> None:  # fmt: skip
    """Launches it, of tensors that `takes_descriptors` takes; I is a multiple of a box's columns, and R is six steps
    or more. step: a gated activation whose parts are the halves of h.

    x, w and act are bfloat16, or codes: x and w with one scale a group [G], act with that of its cast."""
    (rows, R), (G, C, _) = x.shape, w.shape
    about = chain_constants((step,), (torch.bfloat16,))
    box = HEIGHT, BOX_BYTES // torch.bfloat16.itemsize
    act_scale, inverse, amax = (None, None, None) if cast is None else (cast.scale, cast.row_scales, cast.amax)
    _m_grouped_activation(
        act,
        min(most_tiles(rows, G, config.block_m) * cdiv(C, config.block_n), multiprocessors(act)),
        with_layout(ragged_descriptor(x, (HEIGHT, config.block_k), axis=0)),
        with_layout(descriptor(w, (1, config.block_n // 2, config.block_k))),
        None if h is None else with_layout(ragged_descriptor(h, box, axis=0)),
        with_layout(ragged_descriptor(act if cast is None else act.view(torch.uint8), box, axis=0)),
        offsets,
        scales,
        x_scale,
        w_scale,
        act_scale,
        inverse,
        None if amax is None else amax.view(torch.int32),
        torch.zeros(1, dtype=torch.int32, device=act.device),
        rows,
        G,
        R,
        C,
        1 if x_scale is None else x_scale.stride(0),
        1 if w_scale is None else w_scale.stride(0),
        **{name: about[name] for name in ("STEPS", "CONSTANTS", "SOURCE")},
        FORM="" if cast is None else cast_constants(cast, act)["FORM"],
        BOXES=BOXES,
        BLOCK_M=config.block_m,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        STAGES=config.num_stages,
        BAND=band(config.block_m),
        GROUPS=max(128, next_power_of_2(G)),
        enable_fp_fusion=False,
        num_warps=4,  # the others are those of roles
    )
