"""`cast_float8` in Gluon, where groups meet (`recipes.triton.meeting`), for Hopper and bfloat16: what waits lies in
shared memory.

A program has 64 rows of a group and 256 columns, in two tiles of 128, by the copy engine. Their amax is taken there,
and there they wait for the group's, without registers: six programs a multiprocessor have 192 KB under way. Groups that
are too large to meet have amaxes that are known.

The codes are those of the kernel in Triton, bit for bit, which is as fast or faster where scales are known. Import this
only where `recipes.triton.gates.why_no_gluon` says None.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from recipes.casts.boxes_gluon import BOX_LAYOUT, WORDS_LAYOUT
from recipes.casts.cast_float8_triton import scale_of_amax
from recipes.casts.float8_tiles_gluon import (
    larger_pair,
    largest,
    rows_of,
    store_inverses,
    tile_of_rows,
    write_columns,
    write_rows,
)
from recipes.triton.barriers_gluon import barrier, invalidate
from recipes.triton.meeting import amax_of_all, arrive, known_amax, meeting_of

_ROWS, _WIDTH, _PARTS = gl.constexpr(64), gl.constexpr(128), gl.constexpr(2)


@gluon.jit
def tile_at(offsets_ptr, aligned_ptr, slot, ROWS, COLUMNS, places, num_groups):
    """Of a slot: its group, first row and how many of the tile's rows are there, first place in columnwise codes and
    how many are left; the first row of its matrix in these, the group's first place there, and the group's rows."""
    if offsets_ptr is None:
        slots = gl.cdiv(ROWS, _ROWS)
        group = slot // slots
        place = (slot % slots * _ROWS).to(gl.int64)
        first = group.to(gl.int64) * ROWS + place
        end = (group + 1).to(gl.int64) * ROWS
        left = gl.minimum(ROWS - place, _ROWS).to(gl.int32)
        matrix = group.to(gl.int64) * COLUMNS
        start = gl.cast(0, gl.int64)
        size = gl.cast(ROWS, gl.int64)
    else:
        group, first, end, place, left = tile_of_rows(offsets_ptr, aligned_ptr, slot, ROWS, places, num_groups)
        matrix = gl.cast(0, gl.int64)
        start = place - first + gl.load(offsets_ptr + group)
        size = rows_of(offsets_ptr, group, ROWS, num_groups)
    return group, first, gl.maximum(gl.minimum(end - first, _ROWS), 0).to(gl.int32), place, left, matrix, start, size


@gluon.jit
def fetch(x, first, first_column, loaded):
    """Boxes of 16 rows of each of the tiles, those that have one of the first `loaded` rows on their way; and for each
    16 rows a barrier."""
    boxes = gl.allocate_shared_memory(gl.bfloat16, [_PARTS * 4, 16, _WIDTH], BOX_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(4):
        mbarrier.init(ready.index(i), count=1)
    fence_async_shared()
    barrier()
    for i in gl.static_range(4):
        mbarrier.expect(ready.index(i), _PARTS * 16 * _WIDTH * 2, pred=loaded > 16 * i)
        for part in gl.static_range(_PARTS):
            tma.async_copy_global_to_shared(
                x, [first.to(gl.int32) + 16 * i, first_column + part * _WIDTH], ready.index(i),
                boxes.index(4 * part + i), pred=loaded > 16 * i,
            )  # fmt: skip
    return boxes, ready


@gluon.jit(do_not_specialize=["num_groups", "most"])
def cast_float8_gluon_kernel(
    x, row_codes_ptr, column_codes_ptr, scale_inv_ptr, meetings_ptr, offsets_ptr, aligned_ptr,
    ROWS, COLUMNS, places, num_groups, most, FORM: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """x: a descriptor of boxes of 16 rows and 128 columns. offsets_ptr: None for num_groups matrices of ROWS rows each.

    Groups of at most `most` rows find their amaxes at the meetings, those of others are known. places: how long the
    rows of columnwise codes are. RULE: whether scales are powers of two, and the least amax.
    """
    column_blocks = gl.cdiv(COLUMNS, _PARTS * _WIDTH)
    slot = gl.program_id(0) // column_blocks
    first_column = gl.program_id(0) % column_blocks * (_PARTS * _WIDTH)
    columns = COLUMNS - first_column
    if gl.program_id(0) == 0:
        store_inverses(scale_inv_ptr, meetings_ptr, offsets_ptr, ROWS, num_groups, "meeting", FORM, RULE)
    group, first, height, place, left, matrix, start, size = tile_at(
        offsets_ptr, aligned_ptr, slot, ROWS, COLUMNS, places, num_groups
    )
    active = group < num_groups
    if (height > 0) | (left > 0):
        loaded = gl.where(active, height, 0)
        boxes, ready = fetch(x, first, first_column, loaded)
        words = boxes._reinterpret(gl.uint32, [_PARTS * 4, 32, 32], WORDS_LAYOUT)
        of_words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
        lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, of_words)), 1) % 16
        peak = gl.full([32, 32], 0, gl.uint32, of_words)
        for i in range(4):
            if loaded > 16 * i:
                mbarrier.wait(ready.index(i), 0)
            for part in gl.static_range(_PARTS):
                box = words.index(4 * part + i)
                if loaded >= 16 * i + 16:
                    peak = larger_pair(peak, box.load(of_words))
                else:  # no rows but those of the group
                    found = gl.where(lane < loaded - 16 * i, box.load(of_words), 0)
                    peak = larger_pair(peak, found)
                    box.store(found)
        barrier()
        scale = 1.0
        if loaded > 0:
            meeting_ptr = meeting_of(meetings_ptr, group)
            if size <= most:
                arrive(meeting_ptr, largest(peak))
                amax = amax_of_all(meeting_ptr, gl.cdiv(size, _ROWS).to(gl.int32) * column_blocks)
            else:
                amax = known_amax(meeting_ptr, True)
            scale = scale_of_amax(amax, RULE[1], FORM, RULE[0])
            gl.store(scale_inv_ptr + group, gl.div_rn(1.0, scale), mask=(place == start) & (first_column == 0))
        tiles = boxes._reinterpret(gl.uint32, [_PARTS, 128, 32], WORDS_LAYOUT)
        for part in gl.static_range(_PARTS):
            at = first_column + part * _WIDTH
            if columns > part * _WIDTH:
                if row_codes_ptr is not None:
                    for i in range(4):
                        if height > 16 * i:
                            write_rows(
                                words.index(4 * part + i), scale, row_codes_ptr.to(gl.pointer_type(gl.int32)),
                                first + 16 * i, at, COLUMNS - at, height - 16 * i, COLUMNS, FORM,
                            )  # fmt: skip
                if column_codes_ptr is not None:
                    write_columns(
                        tiles.index(part), scale, column_codes_ptr.to(gl.pointer_type(gl.int64)), matrix + at,
                        COLUMNS - at, place, left, places, FORM,
                    )  # fmt: skip
        invalidate(ready)
