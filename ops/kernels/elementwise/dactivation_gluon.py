"""Backward of a gated activation in Gluon, for Hopper and bfloat16: dh and act quantized to FP8 of one scale a group.

    dh = d f(h) (dact * scales)            act = f(h) * scales            dscales[t] = sum_j dact[t, j] f(h)[t, j]

A program has 64 rows of one group and 128 columns of act, which are two times 128 of h: gate and linear part. All that
it reads comes to shared memory at once, by the copy engine:

    a, b, dact -> registers, 16 rows after the other -> the two parts of dh and act, rounded, where a, b and dact were
                  act -> columnwise codes
                  the amax of dh, at a meeting -> its scale -> rowwise and columnwise codes of dh

So a program waits for its group without registers: four programs a multiprocessor have 192 KB under way, where those
in Triton (`chain_triton`) have 12 KB each and hold dh in registers meanwhile (`bench/results/tuning.md`).

The codes are those of `chain_triton`, bit for bit; dscales adds its columns in another order.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# T rows, COLUMNS of act, places: how long the rows of columnwise codes are

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from recipes.casts.boxes_gluon import BOX_LAYOUT, PLAIN_LAYOUT, WORDS_LAYOUT
from recipes.casts.cast_float8_triton import scale_of_amax
from recipes.casts.float8_tiles_gluon import (
    larger_pair,
    largest,
    largest_of_fours,
    load_factors,
    scale_of,
    share_of_group,
    store_inverses,
    tile_of_rows,
    write_codes,
    write_columns,
)
from recipes.triton.barriers_gluon import invalidate
from recipes.triton.meeting import amax_of_all, arrive, meeting_of, raise_amax_at
from recipes.triton.names_gluon import barrier, reinterpret, tma_load
from recipes.triton.rounding import bfloat16_pairs, unpack_pairs

_ROWS, _WIDTH = gl.constexpr(64), gl.constexpr(128)


@gluon.jit
def empty_boxes(COUNT: gl.constexpr):
    """Memory of boxes of 64 rows and columns of the two parts of h and of dact, COUNT of each; and as many barriers.

    Three allocations, since the compiler waits for all threads between two writes to one.
    """
    a = gl.allocate_shared_memory(gl.bfloat16, [COUNT, 64, 64], BOX_LAYOUT)
    b = gl.allocate_shared_memory(gl.bfloat16, [COUNT, 64, 64], BOX_LAYOUT)
    d = gl.allocate_shared_memory(gl.bfloat16, [COUNT, 64, 64], BOX_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(ready.index(i), count=1)
    return (a, b, d), ready


@gluon.jit
def fetch(h, dact, boxes, ready, first, first_column, height, COLUMNS, COUNT: gl.constexpr):
    """The boxes that have one of a tile's `height` rows are on their way: of 64 rows the first 64 columns, then the
    others. No thread reads them, and what threads wrote to them is done."""
    a, b, d = boxes
    fence_async_shared()
    barrier()
    for i in gl.static_range(COUNT):
        has_some = height > i // 2 * 64
        row, column = first.to(gl.int32) + i // 2 * 64, first_column + i % 2 * 64
        mbarrier.expect(ready.index(i), 3 * 64 * 64 * 2, pred=has_some)
        tma_load(h, [row, column], ready.index(i), a.index(i), pred=has_some)
        tma_load(h, [row, COLUMNS + column], ready.index(i), b.index(i), pred=has_some)
        tma_load(dact, [row, column], ready.index(i), d.index(i), pred=has_some)


@gluon.jit
def as_words(boxes, COUNT: gl.constexpr, ROWS: gl.constexpr):
    """The three as COUNT parts each of ROWS rows of words of two numbers."""
    return (
        reinterpret(boxes[0], gl.uint32, [COUNT, ROWS, 32], WORDS_LAYOUT),
        reinterpret(boxes[1], gl.uint32, [COUNT, ROWS, 32], WORDS_LAYOUT),
        reinterpret(boxes[2], gl.uint32, [COUNT, ROWS, 32], WORDS_LAYOUT),
    )


@gluon.jit
def compute(
    parts, at, part, sixty_four, height, columns, active, is_new, first, first_column, T, COLUMNS, factors, dscales_ptr,
    dh_ptr, SCALED: gl.constexpr, NEEDS_ACT: gl.constexpr,
    STEPS: gl.constexpr, BACKWARDS: gl.constexpr, CONSTANTS: gl.constexpr,
):  # fmt: skip
    """The two parts of dh and act, in words of two columns, 0 where no group's rows are: in place of the parts of h and
    of dact, which are number `at` in shared memory, and returned. dscales and dh are stored if is_new.

    A part has R of the tile's rows, of which the first `height` are there, and 64 columns; part, sixty_four: which.
    factors: of the tile's rows, in shared memory [n, R], if SCALED
    """
    A: gl.constexpr = CONSTANTS[0]
    B: gl.constexpr = CONSTANTS[1]
    C: gl.constexpr = CONSTANTS[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = part * parts[0].shape[1] + gl.arange(0, parts[0].shape[1], gl.SliceLayout(1, layout))
    column = 64 * sixty_four + 2 * gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, layout)), 0)
    inside = gl.expand_dims(rows < height, 1) & (column < columns)
    a0, a1 = unpack_pairs(parts[0].index(at).load(layout))
    b0, b1 = unpack_pairs(parts[1].index(at).load(layout))
    d0, d1 = unpack_pairs(parts[2].index(at).load(layout))
    counts = inside & active
    y = gl.full(counts.shape, 0, gl.uint32, layout)
    if NEEDS_ACT or dscales_ptr is not None:
        y0, y1 = STEPS[0](a0, b0, A, B, C), STEPS[0](a1, b1, A, B, C)
        if dscales_ptr is not None:
            share = gl.sum(gl.where(inside, d0 * y0 + d1 * y1, 0.0), axis=1)
            block = gl.cast(first_column // 64 + sixty_four, gl.int64) * T
            stored = (rows < height) & (columns > 64 * sixty_four) & is_new
            gl.store(dscales_ptr + (block + first + rows), share, mask=stored)
    if SCALED:
        scale = gl.expand_dims(factors.index(part).load(gl.SliceLayout(1, layout)), 1)
        d0 *= scale
        d1 *= scale
        if NEEDS_ACT:
            y0 *= scale
            y1 *= scale
    if NEEDS_ACT:
        y = gl.where(counts, bfloat16_pairs(y0, y1), 0)
        parts[2].index(at).store(y)
    da0, db0 = BACKWARDS[0](d0, a0, b0, A, B, C)
    da1, db1 = BACKWARDS[0](d1, a1, b1, A, B, C)
    da = bfloat16_pairs(da0, da1)
    db = bfloat16_pairs(db0, db1)
    if dh_ptr is not None:
        there = dh_ptr + (gl.expand_dims(first + rows, 1) * COLUMNS + (first_column + column) // 2)
        gl.store(there, da.to(gl.int32, bitcast=True), mask=inside & is_new)
        gl.store(there + COLUMNS // 2, db.to(gl.int32, bitcast=True), mask=inside & is_new)
    da, db = gl.where(counts, da, 0), gl.where(counts, db, 0)
    parts[0].index(at).store(da)
    parts[1].index(at).store(db)
    return da, db, y


@gluon.jit(do_not_specialize=["num_groups", "programs", "LOG2_ROWS"])
def dactivation_gluon_kernel(
    dact, h, scales_ptr, dscales_ptr, dh_ptr, codes, act_codes, T, COLUMNS, places, num_groups, programs, LOG2_ROWS,
    STEPS: gl.constexpr, BACKWARDS: gl.constexpr, CONSTANTS: gl.constexpr, SOURCE: gl.constexpr,
    CAST: gl.constexpr, FORM: gl.constexpr, RULE: gl.constexpr,
    Y_CAST: gl.constexpr, Y_FORM: gl.constexpr, Y_RULE: gl.constexpr,
):  # fmt: skip
    """dact, h: descriptors of boxes of 64 rows and columns. codes, act_codes, CAST and so on: as in `chain_triton`,
    "given", "known" or "meeting"; act's are columnwise ones. dh_ptr: None, or of words of two numbers. dscales_ptr:
    rows for 64 columns of act each. programs, LOG2_ROWS: as in `share_of_group`; without meetings one tile a program.
    """
    row_codes_ptr, scale_inv_ptr, column_codes_ptr, _, source_ptr, amax_ptr, offsets_ptr, aligned_ptr = codes
    _, act_scale_inv_ptr, act_codes_ptr, _, act_source_ptr, act_amax_ptr, _, act_aligned_ptr = act_codes
    if row_codes_ptr is not None:
        row_codes_ptr = row_codes_ptr.to(gl.pointer_type(gl.int32))
    if column_codes_ptr is not None:
        column_codes_ptr = column_codes_ptr.to(gl.pointer_type(gl.int32))
    if act_codes_ptr is not None:
        act_codes_ptr = act_codes_ptr.to(gl.pointer_type(gl.int32))
    W: gl.constexpr = gl.num_warps()
    column_blocks = gl.cdiv(COLUMNS, _WIDTH)
    if gl.program_id(0) == 0:
        store_inverses(scale_inv_ptr, source_ptr, offsets_ptr, T, num_groups, CAST, FORM, RULE)
        if act_codes_ptr is not None:
            store_inverses(act_scale_inv_ptr, act_source_ptr, offsets_ptr, T, num_groups, Y_CAST, Y_FORM, Y_RULE)
    any_aligned_ptr = act_aligned_ptr if aligned_ptr is None else aligned_ptr
    group, worker, workers, begin, size, place, padded = share_of_group(
        offsets_ptr, any_aligned_ptr, T, places, num_groups, column_blocks, programs, LOG2_ROWS
    )
    active = group < num_groups
    tiles = gl.cdiv(gl.maximum(size, padded), _ROWS) * column_blocks
    if worker < gl.minimum(workers, tiles):
        boxes, ready = empty_boxes(2)
        parts = as_words(boxes, 8, 16)
        factors = gl.allocate_shared_memory(gl.float32, [4, 16], PLAIN_LAYOUT)
        regions = as_words(boxes, 1, 128)
        of_words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W, 1], [1, 0])
        peak = largest_of_fours(gl.full([16, 32], 0, gl.uint32, of_words))
        act_peak = peak
        dh_scale = 1.0
        further = 0  # tiles of this program, which it computes twice
        if CAST == "meeting":
            further = (tiles - 1 - worker) // workers
        for step in range(2 * further + 1):  # the further ones, the first, and them again, the last one first
            tile = worker + workers * gl.maximum(further - step, step - further)
            is_new = step <= further
            row = tile // column_blocks * _ROWS
            first = (begin + row).to(gl.int64)
            first_column = tile % column_blocks * _WIDTH
            columns = COLUMNS - first_column
            height = gl.maximum(gl.minimum(size - row, _ROWS), 0)
            left = gl.maximum(gl.minimum(padded - row, _ROWS), 0)
            at = (place + row).to(gl.int64)
            fetch(h, dact, boxes, ready, first, first_column, _ROWS, COLUMNS, 2)  # whole, so that phases alternate
            load_factors(factors, scales_ptr, first, height)
            for half in range(2):
                mbarrier.wait(ready.index(half), step % 2)
                for i in range(4):  # 16 rows of 64 columns at a time
                    da, db, y = compute(
                        parts, 4 * half + i, i, half, height, columns, active, is_new, first, first_column, T, COLUMNS,
                        factors, dscales_ptr, dh_ptr, scales_ptr is not None, act_codes_ptr is not None,
                        STEPS, BACKWARDS, CONSTANTS,
                    )  # fmt: skip
                    peak = larger_pair(peak, largest_of_fours(larger_pair(da, db)))
                    if act_codes_ptr is not None:
                        act_peak = larger_pair(act_peak, largest_of_fours(y))
            if act_codes_ptr is not None:
                act_scale = scale_of(act_source_ptr, group, active, Y_CAST, Y_FORM, Y_RULE)
            if CAST != "meeting":
                dh_scale = scale_of(source_ptr, group, active, CAST, FORM, RULE)
            barrier()
            has_all = active & (step == further)
            if has_all:
                if CAST == "meeting":
                    arrive(meeting_of(source_ptr, group), largest(peak))
                elif amax_ptr is not None:
                    raise_amax_at(amax_ptr + group, largest(peak), None)
            if act_codes_ptr is not None:
                if has_all:
                    if act_amax_ptr is not None:
                        raise_amax_at(act_amax_ptr + group, largest(act_peak), None)
                if is_new:
                    write_columns(
                        regions[2].index(0), act_scale, act_codes_ptr, first_column, columns, at, left, places, Y_FORM
                    )  # fmt: skip
            if CAST == "meeting":
                if has_all:
                    amax = amax_of_all(meeting_of(source_ptr, group), gl.minimum(workers, tiles))
                    dh_scale = scale_of_amax(amax, RULE[1], FORM, RULE[0])
                    gl.store(scale_inv_ptr + group, gl.div_rn(1.0, dh_scale), mask=worker == 0)
            if step >= further:
                for part in gl.static_range(2):
                    column = part * COLUMNS + first_column
                    write_codes(
                        regions[part].index(0), dh_scale, row_codes_ptr, first, height, 2 * COLUMNS, column_codes_ptr,
                        0, at, left, places, column, columns, FORM,
                    )  # fmt: skip
        invalidate(ready)


@gluon.jit(do_not_specialize=["T", "num_groups"])
def dactivation_amax_gluon_kernel(
    dact_ptr, h_ptr, scales_ptr, meetings_ptr, offsets_ptr, T, COLUMNS, num_groups,
    BACKWARDS: gl.constexpr, CONSTANTS: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """Raises the amaxes of dh of all groups. dact_ptr, h_ptr: of words of two numbers.

    From the last tile to the first, which the kernel that casts then finds in L2.
    """
    A: gl.constexpr = CONSTANTS[0]
    B: gl.constexpr = CONSTANTS[1]
    C: gl.constexpr = CONSTANTS[2]
    column_blocks = gl.cdiv(COLUMNS, _WIDTH)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    lane = gl.arange(0, 16, gl.SliceLayout(1, layout))
    column = 2 * gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    tile = gl.num_programs(0) - 1 - gl.program_id(0)
    first_column = tile % column_blocks * _WIDTH
    group, first, height, _place, _left, _begin, _size = tile_of_rows(
        offsets_ptr, None, tile // column_blocks, T, 0, num_groups
    )
    if (height > 0) & (group < num_groups):
        peak = gl.full([16, 64], 0, gl.uint32, layout)
        dact_ptr += first * (COLUMNS // 2)
        h_ptr += first * COLUMNS
        for i in range(4):
            rows = 16 * i + lane
            inside = gl.expand_dims(rows < height, 1) & (column < COLUMNS - first_column)
            at = gl.expand_dims(rows, 1) * (COLUMNS // 2) + (first_column + column) // 2
            at_h = at + gl.expand_dims(rows, 1) * (COLUMNS // 2)
            d = gl.load(dact_ptr + at, mask=inside, other=0)
            a = gl.load(h_ptr + at_h, mask=inside, other=0)
            b = gl.load(h_ptr + (at_h + COLUMNS // 2), mask=inside, other=0)
            d0, d1 = unpack_pairs(d.to(gl.uint32, bitcast=True))
            a0, a1 = unpack_pairs(a.to(gl.uint32, bitcast=True))
            b0, b1 = unpack_pairs(b.to(gl.uint32, bitcast=True))
            if scales_ptr is not None:
                scale = gl.load(scales_ptr + first + rows, mask=rows < height, other=0).to(gl.float32)
                d0 *= gl.expand_dims(scale, 1)
                d1 *= gl.expand_dims(scale, 1)
            da0, db0 = BACKWARDS[0](d0, a0, b0, A, B, C)
            da1, db1 = BACKWARDS[0](d1, a1, b1, A, B, C)
            found = larger_pair(bfloat16_pairs(da0, da1), bfloat16_pairs(db0, db1))
            peak = larger_pair(peak, gl.where(inside, found, 0))
        raise_amax_at(meeting_of(meetings_ptr, group), largest(peak), None)
