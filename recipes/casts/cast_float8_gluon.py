"""`cast_float8` in Gluon, where groups meet (`recipes.triton.meeting`), for Hopper and bfloat16: what waits lies in
shared memory.

A tile is 64 rows of a group and 256 columns, in two parts of 128. A program has one or more tiles of a group. The first
comes by the copy engine and stays in shared memory; of the others only the amax is taken. Then the program waits for
the group's, without registers: six programs a multiprocessor have 192 KB under way. It casts the first tile, and the
others, which it reads again, the last one first, since L2 may have that one still.

The codes are those of the kernel in Triton, bit for bit, which is as fast or faster where scales are known. Import this
only where `recipes.triton.gates.why_no_gluon` says None.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from recipes.casts.boxes_gluon import BOX_LAYOUT, WORDS_LAYOUT
from recipes.casts.cast_float8_triton import scale_of_amax
from recipes.casts.float8_tiles_gluon import (
    larger_pair,
    largest,
    share_of_group,
    store_inverses,
    tile_of_rows,
    write_codes,
)
from recipes.triton.barriers_gluon import invalidate
from recipes.triton.meeting import amax_of_all, arrive, meeting_of
from recipes.triton.names_gluon import barrier, reinterpret, tma_load

_ROWS, _WIDTH, _PARTS = gl.constexpr(64), gl.constexpr(128), gl.constexpr(2)
_PADDING = gl.constexpr(32)  # `PADDING` of cast_float8_triton


@gluon.jit
def tile_at(offsets_ptr, aligned_ptr, slot, ROWS, COLUMNS, places, num_groups):
    """Of a slot: its group, first row and how many of the tile's rows are there, first place in columnwise codes and
    how many are left; the first row of its matrix in these, whether the tile is the group's first, and the group's
    rows."""
    if offsets_ptr is None:
        slots = gl.cdiv(ROWS, _ROWS)
        group = slot // slots
        place = (slot % slots * _ROWS).to(gl.int64)
        first = group.to(gl.int64) * ROWS + place
        height = gl.minimum(ROWS - place, _ROWS).to(gl.int32)
        left = height
        matrix = group.to(gl.int64) * COLUMNS
        is_first = place == 0
        size = ROWS
    else:
        group, first, height, place, left, begin, size = tile_of_rows(
            offsets_ptr, aligned_ptr, slot, ROWS, places, num_groups
        )
        matrix = gl.cast(0, gl.int64)
        is_first = first == begin
    return group, first, height, place, left, matrix, is_first, size


@gluon.jit
def empty_boxes():
    """Memory of a tile, a box of each part, and a barrier of each."""
    boxes = gl.allocate_shared_memory(gl.bfloat16, [_PARTS, _ROWS, _WIDTH], BOX_LAYOUT)
    ready = gl.allocate_shared_memory(gl.int64, [_PARTS, 1], mbarrier.MBarrierLayout())
    for part in gl.static_range(_PARTS):
        mbarrier.init(ready.index(part), count=1)
    return boxes, ready


@gluon.jit
def fetch(x, boxes, ready, part, first, first_column):
    """A part of a tile is on its way. No thread reads its box, and what threads wrote to it is done."""
    fence_async_shared()
    barrier()
    mbarrier.expect(ready.index(part), _ROWS * _WIDTH * 2)
    tma_load(
        x, [first.to(gl.int32), first_column + part * _WIDTH], ready.index(part), boxes.index(part)
    )  # fmt: skip


@gluon.jit
def fetched(words, ready, part, phase, loaded):
    """Wait for a part of a tile; what is not of its first `loaded` rows becomes 0. Returns its larger magnitudes."""
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
    lane = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, layout)), 1)
    peak = gl.full([32, 32], 0, gl.uint32, layout)
    mbarrier.wait(ready.index(part), phase)
    if loaded == _ROWS:
        for i in gl.static_range(4):
            peak = larger_pair(peak, words.index(4 * part + i).load(layout))
    else:  # no rows but those of the group
        for i in range(4):
            box = words.index(4 * part + i)
            found = gl.where(lane < loaded - i % 2 * 32, box.load(layout), 0)
            peak = larger_pair(peak, found)
            box.store(found)
    return peak


@gluon.jit
def magnitudes_of(x_ptr, first, first_column, height, COLUMNS, peak):
    """The larger ones of these and of a tile's. x_ptr: of words of two numbers."""
    layout: gl.constexpr = peak.type.layout
    row = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(1, layout)), 1)
    word = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, layout)), 0)
    words = gl.multiple_of(COLUMNS // 2, 8)
    left = gl.multiple_of((COLUMNS - first_column) // 2, 8)
    x_ptr += first.to(gl.int64) * words + first_column // 2
    for i in range(2):
        for j in gl.static_range(4):
            inside = (row + 32 * i < height) & (word + 32 * j < left)
            at = (row + 32 * i) * words + word + 32 * j
            found = gl.load(x_ptr + at, mask=inside, other=0, eviction_policy="evict_last")
            peak = larger_pair(peak, found.to(gl.uint32, bitcast=True))
    return peak


@gluon.jit
def group_of(offsets_ptr, aligned_ptr, ROWS, COLUMNS, places, num_groups, programs, LOG2_ROWS):
    """Of a program: its group, which of the group's programs it is, and how many these are; the group's first row, how
    many rows it has, its first place in columnwise codes, how many it has there, and the first row of its matrix
    there."""
    column_blocks = gl.cdiv(COLUMNS, _PARTS * _WIDTH)
    if offsets_ptr is None:
        workers = gl.minimum(gl.cdiv(ROWS, _ROWS) * column_blocks, programs)
        group = gl.program_id(0) // workers
        worker = gl.program_id(0) % workers
        first = group * ROWS
        size, place, places = ROWS, group * 0, ROWS
        matrix = group * COLUMNS
    else:
        group, worker, workers, first, size, place, places = share_of_group(
            offsets_ptr, aligned_ptr, ROWS, places, num_groups, column_blocks, programs, LOG2_ROWS
        )
        matrix = group * 0
    return group, worker, workers, first, size, place, places, matrix


@gluon.jit(do_not_specialize=["num_groups", "programs", "LOG2_ROWS"])
def cast_float8_gluon_kernel(
    x, x_ptr, row_codes_ptr, column_codes_ptr, scale_inv_ptr, meetings_ptr, offsets_ptr, aligned_ptr,
    ROWS, COLUMNS, places, num_groups, programs, LOG2_ROWS, FORM: gl.constexpr, RULE: gl.constexpr,
):  # fmt: skip
    """x: a descriptor of boxes of 64 rows and 128 columns; x_ptr: the same in words of two numbers. offsets_ptr: None
    for num_groups matrices of ROWS rows each. row_codes_ptr, column_codes_ptr: of words, or None. places: how long the
    rows of columnwise codes are. RULE: whether scales are powers of two, and the least amax.

    programs, LOG2_ROWS: as in `share_of_group`; programs of a group fit on the GPU at once.
    """
    column_blocks = gl.cdiv(COLUMNS, _PARTS * _WIDTH)
    if gl.program_id(0) == 0:
        store_inverses(scale_inv_ptr, meetings_ptr, offsets_ptr, ROWS, num_groups, "meeting", FORM, RULE)
    group, worker, workers, begin, size, place, padded, matrix = group_of(
        offsets_ptr, aligned_ptr, ROWS, COLUMNS, places, num_groups, programs, LOG2_ROWS
    )
    active = group < num_groups
    tiles = gl.cdiv(gl.maximum(size, padded), _ROWS) * column_blocks
    if (worker < workers) & (worker < tiles):
        boxes, ready = empty_boxes()
        words = reinterpret(boxes, gl.uint32, [_PARTS * 4, 32, 32], WORDS_LAYOUT)
        parts = reinterpret(boxes, gl.uint32, [_PARTS, 128, 32], WORDS_LAYOUT)
        rows = gl.where(active, size, 0)  # that are read
        row = worker // column_blocks * _ROWS
        loaded = gl.maximum(gl.minimum(rows - row, _ROWS), 0)
        if active:
            for part in gl.static_range(_PARTS):
                fetch(x, boxes, ready, part, begin + row, worker % column_blocks * (_PARTS * _WIDTH))
        further = (tiles - 1 - worker) // workers  # tiles of this program
        scale = 1.0
        if active:
            layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
            peak = gl.full([32, 32], 0, gl.uint32, layout)
            for n in range(1, further + 1):
                tile = worker + n * workers
                row = tile // column_blocks * _ROWS
                peak = magnitudes_of(
                    x_ptr, begin + row, tile % column_blocks * (_PARTS * _WIDTH), size - row, COLUMNS, peak
                )  # fmt: skip
            for part in gl.static_range(_PARTS):
                peak = larger_pair(peak, fetched(words, ready, part, 0, loaded))
            meeting_ptr = meeting_of(meetings_ptr, group)
            arrive(meeting_ptr, largest(peak))
            amax = amax_of_all(meeting_ptr, gl.minimum(workers, tiles))
            scale = scale_of_amax(amax, RULE[1], FORM, RULE[0])
            gl.store(scale_inv_ptr + group, gl.div_rn(1.0, scale), mask=worker == 0)
        else:
            for i in gl.static_range(_PARTS * 4):
                words.index(i).store(
                    gl.full([32, 32], 0, gl.uint32, gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0]))
                )
        barrier()
        tile = worker
        for n in range(further + 1):
            row = tile // column_blocks * _ROWS
            first_column = tile % column_blocks * (_PARTS * _WIDTH)
            next_tile = worker + workers * (further - n)
            first = (begin + row).to(gl.int64)
            there = gl.maximum(gl.minimum(size - row, _ROWS), 0)
            left = gl.maximum(gl.minimum(padded - row, _ROWS), 0)
            for part in gl.static_range(_PARTS):
                if (n > 0) & active:
                    fetched(words, ready, part, n % 2, there)
                    barrier()
                at = first_column + part * _WIDTH
                if COLUMNS > at:
                    write_codes(
                        parts.index(part), scale, row_codes_ptr, first, there, COLUMNS, column_codes_ptr, matrix,
                        place + row, left, places, at, COLUMNS - at, FORM,
                    )  # fmt: skip
                if (n < further) & active:
                    barrier()
                    fetch(
                        x, boxes, ready, part, begin + next_tile // column_blocks * _ROWS,
                        next_tile % column_blocks * (_PARTS * _WIDTH),
                    )  # fmt: skip
            tile = next_tile
        invalidate(ready)
