"""What kernels in Gluon share that cast to FP8 with a scale for each row, and for each column of a group: amaxes that
all programs of a group raise, and the scales of a tile's rows and columns in shared memory.

Amaxes are the bits of float32 numbers, whose order is theirs; tiles and words are those of `float8_tiles_gluon`.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from recipes.casts.boxes_gluon import PLAIN_LAYOUT
from recipes.casts.cast_float8_triton import scale_of_amax
from recipes.casts.float8_tiles_gluon import columns_of, larger_magnitude, largest_of, rows_of
from recipes.triton.meeting import be_counted, meeting_of, wait_for_all
from recipes.triton.rounding import unpack_pairs

_ROWS, _WIDTH = gl.constexpr(64), gl.constexpr(128)
_PLAIN_MATRIX = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))


@gluon.jit
def raise_amaxes(amax_ptrs, amaxes, mask):
    """amaxes: float32, NaN only where all numbers are."""
    bits = gl.maximum(amaxes, 0.0).to(gl.int32, bitcast=True)
    gl.atomic_max(amax_ptrs, bits, mask=mask, sem="relaxed")


@gluon.jit
def raise_amaxes_of_rows(amax_ptr, pairs, rows, mask):
    """To those of words of two numbers [R, C], of which row r is row rows[r] of the amaxes."""
    raise_amaxes(amax_ptr + rows, gl.max(larger_magnitude(pairs), axis=1), mask)


@gluon.jit
def raise_amaxes_of_columns(amax_ptr, words, columns):
    """To those of 64 rows in shared memory, as `columns_of` takes them; so many columns are there from amax_ptr on."""
    found = unpack_pairs(largest_of(columns_of(words)) & 0x7FFF7FFF)
    layout: gl.constexpr = found[0].type.layout
    quarter = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(1, layout)), 1)
    column = quarter // 2 * 64 + 2 * gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, layout)), 0)
    for second in gl.static_range(2):
        raise_amaxes(amax_ptr + (column + second), found[second], column < columns)


@gluon.jit
def meet(meetings_ptr, group, size, column_blocks):
    """Waits until all programs of a group of so many rows have raised its amaxes; these threads raised theirs before
    the last barrier."""
    be_counted(meeting_of(meetings_ptr, group))
    wait_for_all(meeting_of(meetings_ptr, group), gl.cdiv(size, _ROWS) * column_blocks)


@gluon.jit
def store_scales_of_empty(scale_inv_ptr, offsets_ptr, T, WIDTH, num_groups, FORM: gl.constexpr, RULE: gl.constexpr):
    """1 / scale of the columns of groups without rows, all programs together."""
    column = gl.arange(0, 128, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    inverse = gl.div_rn(1.0, scale_of_amax(column * 0.0, RULE[1], FORM, RULE[0]))
    for group in range(gl.program_id(0), num_groups, gl.num_programs(0)):
        if rows_of(offsets_ptr, group, T, num_groups) <= 0:
            for first in range(0, WIDTH, 128):
                at = first + column
                gl.store(scale_inv_ptr + (gl.cast(group, gl.int64) * WIDTH + at), inverse, mask=at < WIDTH)


@gluon.jit
def scales_of_rows(amax_ptr, scale_inv_ptr, first, height, is_stored, FORM: gl.constexpr, RULE: gl.constexpr):
    """Those of 64 rows, of which the first `height` are there, in shared memory [128], twice, as `write_rows` takes
    them. is_stored: whether 1 / scale is."""
    scales = gl.allocate_shared_memory(gl.float32, [128], PLAIN_LAYOUT)
    lane = gl.arange(0, 128, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    row = lane % 64
    scale = _scale_at(amax_ptr + first + row, row < height, FORM, RULE)
    gl.store(scale_inv_ptr + first + row, gl.div_rn(1.0, scale), mask=(row < height) & (lane < 64) & is_stored)
    scales.store(scale)
    return scales


@gluon.jit
def scales_of_columns(amax_ptr, scale_inv_ptr, columns, is_stored, FORM: gl.constexpr, RULE: gl.constexpr):
    """Those of 128 columns, of which so many are there, in shared memory [4, 128], four times, as `write_columns` takes
    them."""
    scales = gl.allocate_shared_memory(gl.float32, [4, 128], _PLAIN_MATRIX)
    column = gl.arange(0, 128, gl.SliceLayout(0, gl.BlockedLayout([4, 1], [1, 32], [1, gl.num_warps()], [1, 0])))
    scale = _scale_at(amax_ptr + column, column < columns, FORM, RULE)
    gl.store(scale_inv_ptr + column, gl.div_rn(1.0, scale), mask=(column < columns) & is_stored)
    scales.store(gl.expand_dims(scale, 0).broadcast_to([4, 128]))
    return scales


@gluon.jit
def _scale_at(amax_ptrs, mask, FORM: gl.constexpr, RULE: gl.constexpr):
    # Volatile: other programs have raised them, and L1 may hold what they were.
    amax = gl.load(amax_ptrs, mask=mask, other=0, volatile=True).to(gl.float32, bitcast=True)
    return scale_of_amax(amax, RULE[1], FORM, RULE[0])
