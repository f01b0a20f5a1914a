"""A gated activation in Gluon, for Hopper and bfloat16: act = f(h) * scales quantized to FP8 of one scale a group,
which follows from its amax, found at a meeting.

A program has one or more tiles of a group, 64 rows and 128 columns of act, which are two times 128 of h. They come to
shared memory by the copy engine, and act takes the place of the gate. One tile waits there for the group's amax; others
are computed twice (`cast_float8_gluon`).

The codes are those of `chain_triton`, bit for bit. Import this only where `recipes.triton.gates.why_no_gluon` says
None.
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
    load_factors,
    share_of_group,
    store_inverses,
    write_codes,
)
from recipes.triton.barriers_gluon import invalidate
from recipes.triton.meeting import amax_of_all, arrive, meeting_of
from recipes.triton.names_gluon import barrier, reinterpret, tma_load
from recipes.triton.rounding import bfloat16_pairs, unpack_pairs

_ROWS, _WIDTH = gl.constexpr(64), gl.constexpr(128)


@gluon.jit
def _fetch(h, gate, linear, ready, first, first_column, COLUMNS):
    """A tile's boxes of gate and linear part are on their way, the first 64 columns first. No thread reads them, and
    what threads wrote to them is done."""
    fence_async_shared()
    barrier()
    row = first.to(gl.int32)
    for i in gl.static_range(2):
        column = first_column + 64 * i
        mbarrier.expect(ready.index(i), 2 * 64 * 64 * 2)
        tma_load(h, [row, column], ready.index(i), gate.index(i))
        tma_load(h, [row, COLUMNS + column], ready.index(i), linear.index(i))


@gluon.jit
def _compute(
    gates, linears, part, sixty_four, height, columns, factors, SCALED: gl.constexpr, STEPS: gl.constexpr,
    CONSTANTS: gl.constexpr,
):  # fmt: skip
    """act in words of two columns, 0 where it is not, in place of the gate, and returned. part, sixty_four, factors,
    SCALED: as in `dactivation_gluon.compute`."""
    A: gl.constexpr = CONSTANTS[0]
    B: gl.constexpr = CONSTANTS[1]
    C: gl.constexpr = CONSTANTS[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    a0, a1 = unpack_pairs(gates.load(layout))
    b0, b1 = unpack_pairs(linears.load(layout))
    y0, y1 = STEPS[0](a0, b0, A, B, C), STEPS[0](a1, b1, A, B, C)
    if SCALED:
        scale = gl.expand_dims(factors.index(part).load(gl.SliceLayout(1, layout)), 1)
        y0 *= scale
        y1 *= scale
    column = 64 * sixty_four + 2 * gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, layout)), 0)
    rows = part * gates.shape[0] + gl.arange(0, gates.shape[0], gl.SliceLayout(1, layout))
    y = gl.where(gl.expand_dims(rows < height, 1) & (column < columns), bfloat16_pairs(y0, y1), 0)
    gates.store(y)
    return y


@gluon.jit(do_not_specialize=["num_groups", "programs", "LOG2_ROWS"])
def activation_gluon_kernel(
    h, scales_ptr, row_codes_ptr, column_codes_ptr, scale_inv_ptr, meetings_ptr, offsets_ptr, aligned_ptr, T, COLUMNS,
    places, num_groups, programs, LOG2_ROWS,
    STEPS: gl.constexpr, CONSTANTS: gl.constexpr, SOURCE: gl.constexpr, FORM: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """h: a descriptor of boxes of 64 rows and columns. row_codes_ptr, column_codes_ptr: of words, or None. programs,
    LOG2_ROWS: as in `share_of_group`; programs of a group fit on the GPU at once."""
    column_blocks = gl.cdiv(COLUMNS, _WIDTH)
    if gl.program_id(0) == 0:
        store_inverses(scale_inv_ptr, meetings_ptr, offsets_ptr, T, num_groups, "meeting", FORM, RULE)
    group, worker, workers, begin, size, place, padded = share_of_group(
        offsets_ptr, aligned_ptr, T, places, num_groups, column_blocks, programs, LOG2_ROWS
    )
    active = group < num_groups
    tiles = gl.cdiv(gl.maximum(size, padded), _ROWS) * column_blocks
    if worker < gl.minimum(workers, tiles):
        gate = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], BOX_LAYOUT)
        linear = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 64], BOX_LAYOUT)
        ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
        for half in gl.static_range(2):
            mbarrier.init(ready.index(half), count=1)
        factors = gl.allocate_shared_memory(gl.float32, [4, 16], PLAIN_LAYOUT)
        gates = reinterpret(gate, gl.uint32, [8, 16, 32], WORDS_LAYOUT)
        linears = reinterpret(linear, gl.uint32, [8, 16, 32], WORDS_LAYOUT)
        act = reinterpret(gate, gl.uint32, [1, 128, 32], WORDS_LAYOUT).index(0)
        of_words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
        peak = gl.full([16, 32], 0, gl.uint32, of_words)
        scale = 1.0
        further = (tiles - 1 - worker) // workers  # tiles of this program, which it computes twice
        for step in range(2 * further + 1):  # the further ones, the first, and them again, the last one first
            tile = worker + workers * gl.maximum(further - step, step - further)
            row = tile // column_blocks * _ROWS
            first = (begin + row).to(gl.int64)
            first_column = tile % column_blocks * _WIDTH
            columns = COLUMNS - first_column
            height = gl.maximum(gl.minimum(size - row, _ROWS), 0)
            _fetch(h, gate, linear, ready, first, first_column, COLUMNS)
            load_factors(factors, scales_ptr, first, height)
            for j in range(8):  # 16 rows of 64 columns at a time
                mbarrier.wait(ready.index(j // 4), step % 2)
                y = _compute(
                    gates.index(j), linears.index(j), j % 4, j // 4, gl.where(active, height, 0), columns, factors,
                    scales_ptr is not None, STEPS, CONSTANTS,
                )  # fmt: skip
                peak = larger_pair(peak, y)
            barrier()
            if active & (step == further):
                arrive(meeting_of(meetings_ptr, group), largest(peak))
                amax = amax_of_all(meeting_of(meetings_ptr, group), gl.minimum(workers, tiles))
                scale = scale_of_amax(amax, RULE[1], FORM, RULE[0])
                gl.store(scale_inv_ptr + group, gl.div_rn(1.0, scale), mask=worker == 0)
            if step >= further:
                left = gl.maximum(gl.minimum(padded - row, _ROWS), 0)
                at = (place + row).to(gl.int64)
                write_codes(
                    act, scale, row_codes_ptr, first, height, COLUMNS, column_codes_ptr, 0, at, left, places,
                    first_column, columns, FORM,
                )  # fmt: skip
        invalidate(ready)
