"""`cast_float8_rowwise` in Gluon, where groups meet, for Hopper and bfloat16: as `cast_float8_gluon`, with a scale for
each row, and for each column of a group.

All programs of a group raise the amaxes of its rows and columns, and meet before they cast. The codes and scales are
those of the kernels in Triton, bit for bit. Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from recipes.casts.boxes_gluon import WORDS_LAYOUT
from recipes.casts.cast_float8_gluon import empty_boxes, fetch, tile_at
from recipes.casts.float8_tiles_gluon import larger_pair, write_columns, write_rows
from recipes.casts.float8_vectors_gluon import (
    meet,
    raise_amaxes_of_columns,
    raise_amaxes_of_rows,
    scales_of_columns,
    scales_of_rows,
    store_scales_of_empty,
)
from recipes.triton.barriers_gluon import invalidate
from recipes.triton.names_gluon import barrier, reinterpret

_WIDTH, _PARTS = gl.constexpr(128), gl.constexpr(2)


@gluon.jit(do_not_specialize=["num_groups", "most"])
def cast_float8_vectors_gluon_kernel(
    x, row_codes_ptr, column_codes_ptr, row_scale_ptr, column_scale_ptr, meetings_ptr, row_amax_ptr, column_amax_ptr,
    offsets_ptr, aligned_ptr, ROWS, COLUMNS, places, num_groups, most, FORM: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """x, offsets_ptr, places, RULE: as in `cast_float8_gluon_kernel`. row_codes_ptr, column_codes_ptr: of words, or
    None. Amaxes of all rows, and [num_groups, COLUMNS], are 0, but of groups with more than `most` rows,
    which do not meet, known."""
    column_blocks = gl.cdiv(COLUMNS, _PARTS * _WIDTH)
    slot = gl.program_id(0) // column_blocks
    first_column = gl.program_id(0) % column_blocks * (_PARTS * _WIDTH)
    if offsets_ptr is not None and column_codes_ptr is not None:
        store_scales_of_empty(column_scale_ptr, offsets_ptr, ROWS, COLUMNS, num_groups, FORM, RULE)
    group, first, height, place, left, matrix, is_first, size = tile_at(
        offsets_ptr, aligned_ptr, slot, ROWS, COLUMNS, places, num_groups
    )
    active = group < num_groups
    if (height > 0) | (left > 0):
        loaded = gl.where(active, height, 0)
        boxes, ready = empty_boxes()
        if loaded > 0:
            for part in gl.static_range(_PARTS):
                fetch(x, boxes, ready, part, first, first_column)
            for part in gl.static_range(_PARTS):
                mbarrier.wait(ready.index(part), 0)
        meets = (loaded > 0) & (size <= most)
        words = reinterpret(boxes, gl.uint32, [_PARTS * 4, 32, 32], WORDS_LAYOUT)
        of_words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
        lane = gl.arange(0, 32, gl.SliceLayout(1, of_words))
        for i in range(2):
            is_there = lane < loaded - 32 * i
            peak = gl.full([32, 32], 0, gl.uint32, of_words)
            for n in gl.static_range(2 * _PARTS):
                box = words.index(2 * n + i)
                if loaded >= 32 * i + 32:
                    peak = larger_pair(peak, box.load(of_words))
                else:  # no rows but those of the group
                    found = gl.where(gl.expand_dims(is_there, 1), box.load(of_words), 0)
                    peak = larger_pair(peak, found)
                    box.store(found)
            if row_codes_ptr is not None:
                raise_amaxes_of_rows(row_amax_ptr + first + 32 * i, peak, lane, meets & is_there)
        barrier()
        tiles = reinterpret(boxes, gl.uint32, [_PARTS, 128, 32], WORDS_LAYOUT)
        of_group = group.to(gl.int64) * COLUMNS
        if meets:
            if column_codes_ptr is not None:
                for part in gl.static_range(_PARTS):
                    at = first_column + part * _WIDTH
                    if COLUMNS > at:
                        raise_amaxes_of_columns(column_amax_ptr + of_group + at, tiles.index(part), COLUMNS - at)
                barrier()
            meet(meetings_ptr, group, size, column_blocks)
        if row_codes_ptr is not None:
            row_scales = scales_of_rows(row_amax_ptr, row_scale_ptr, first, height, first_column == 0, FORM, RULE)
        for part in gl.static_range(_PARTS):
            at = first_column + part * _WIDTH
            if COLUMNS > at:
                if row_codes_ptr is not None:
                    write_rows(
                        tiles.index(part), row_scales, row_codes_ptr, first, at, COLUMNS - at, height, COLUMNS, FORM,
                        True,
                    )  # fmt: skip
                if column_codes_ptr is not None:
                    column_scales = scales_of_columns(
                        column_amax_ptr + of_group + at, column_scale_ptr + of_group + at,
                        gl.where(active, COLUMNS - at, 0), (loaded > 0) & is_first, FORM, RULE,
                    )  # fmt: skip
                    write_columns(
                        tiles.index(part), column_scales, column_codes_ptr, matrix + at, COLUMNS - at, place, left,
                        places, FORM, True,
                    )  # fmt: skip
        invalidate(ready)
