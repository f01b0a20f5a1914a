"""`dactivation_gluon` for FP8 with a scale for each row of dh, and for each column of a group of dh and of act.

All programs of a group raise the amaxes of its rows and columns, and meet before they cast; dh and act wait in shared
memory. Of groups that are too large the amaxes are found before. The codes and scales are those of
`cast_float8_rowwise`, bit for bit.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# T rows, COLUMNS of act, places: how long the rows of columnwise codes are

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ops.kernels.elementwise.dactivation_gluon import as_words, compute, empty_boxes, fetch
from recipes.casts.boxes_gluon import PLAIN_LAYOUT
from recipes.casts.float8_tiles_gluon import (
    larger_pair,
    largest_group,
    load_factors,
    tile_of_rows,
    write_columns,
    write_rows,
)
from recipes.casts.float8_vectors_gluon import (
    meet,
    raise_amaxes,
    raise_amaxes_of_columns,
    raise_amaxes_of_rows,
    scales_of_columns,
    scales_of_rows,
    store_scales_of_empty,
)
from recipes.triton.barriers_gluon import invalidate
from recipes.triton.names_gluon import barrier
from recipes.triton.rounding import bfloat16_pairs, unpack_pairs

_ROWS, _WIDTH = gl.constexpr(64), gl.constexpr(128)


@gluon.jit(do_not_specialize=["num_groups", "most"])
def dactivation_vectors_gluon_kernel(
    dact, h, scales_ptr, dscales_ptr, dh_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr,
    act_codes_ptr, act_scale_ptr, meetings_ptr, row_amax_ptr, column_amax_ptr, act_amax_ptr, offsets_ptr, aligned_ptr,
    T, COLUMNS, places, num_groups, most,
    STEPS: gl.constexpr, BACKWARDS: gl.constexpr, CONSTANTS: gl.constexpr, SOURCE: gl.constexpr,
    FORM: gl.constexpr, RULE: gl.constexpr, Y_FORM: gl.constexpr, Y_RULE: gl.constexpr,
):  # fmt: skip
    """dact, h, dh_ptr, dscales_ptr: as in `dactivation_gluon_kernel`. Codes are of words, or None where they are not
    made. Amaxes [T], [G, 2 COLUMNS] and [G, COLUMNS] are 0, but of groups with more
    than `most` rows, which do not meet, known."""
    column_blocks = gl.cdiv(COLUMNS, _WIDTH)
    first_column = gl.program_id(0) % column_blocks * _WIDTH
    columns = COLUMNS - first_column
    if column_codes_ptr is not None:
        store_scales_of_empty(column_scale_ptr, offsets_ptr, T, 2 * COLUMNS, num_groups, FORM, RULE)
    if act_codes_ptr is not None:
        store_scales_of_empty(act_scale_ptr, offsets_ptr, T, COLUMNS, num_groups, Y_FORM, Y_RULE)
    group, first, height, place, left, begin, size = tile_of_rows(
        offsets_ptr, aligned_ptr, gl.program_id(0) // column_blocks, T, places, num_groups
    )
    active = group < num_groups
    if (height > 0) | (left > 0):
        boxes, ready = empty_boxes(2)
        fetch(h, dact, boxes, ready, first, first_column, height, COLUMNS, 2)
        meets = active & (height > 0) & (size <= most)
        parts = as_words(boxes, 8, 16)
        of_words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [gl.num_warps(), 1], [1, 0])
        lane = gl.arange(0, 16, gl.SliceLayout(1, of_words))
        factors = gl.allocate_shared_memory(gl.float32, [4, 16], PLAIN_LAYOUT)
        load_factors(factors, scales_ptr, first, height)
        for j in range(8):  # 16 rows of 64 columns at a time
            rows = j % 4 * 16 + lane
            if height > j % 4 * 16:
                mbarrier.wait(ready.index(j // 4), 0)
                da, db, _ = compute(
                    parts, j, j % 4, j // 4, height, columns, active, True, first, first_column, T, COLUMNS, factors,
                    dscales_ptr, dh_ptr, scales_ptr is not None, act_codes_ptr is not None, STEPS, BACKWARDS, CONSTANTS,
                )  # fmt: skip
                if row_codes_ptr is not None:
                    raise_amaxes_of_rows(row_amax_ptr + first, larger_pair(da, db), rows, meets & (rows < height))
            else:
                for operand in gl.static_range(3):
                    parts[operand].index(j).store(gl.full([16, 32], 0, gl.uint32, of_words))
        barrier()
        regions = as_words(boxes, 1, 128)
        of_group = group.to(gl.int64) * COLUMNS + first_column
        of_dh = 2 * of_group - first_column
        if meets:
            for part in gl.static_range(2):
                if column_codes_ptr is not None:
                    raise_amaxes_of_columns(column_amax_ptr + (of_dh + part * COLUMNS), regions[part].index(0), columns)
            if act_codes_ptr is not None:
                raise_amaxes_of_columns(act_amax_ptr + of_group, regions[2].index(0), columns)
            barrier()
            meet(meetings_ptr, group, size, column_blocks)
        first_of_group = active & (first == begin)
        if act_codes_ptr is not None:
            act_scales = scales_of_columns(
                act_amax_ptr + of_group, act_scale_ptr + of_group, gl.where(active, columns, 0), first_of_group,
                Y_FORM, Y_RULE,
            )  # fmt: skip
            write_columns(
                regions[2].index(0), act_scales, act_codes_ptr, first_column, columns, place, left, places, Y_FORM, True
            )
        if row_codes_ptr is not None:
            row_scales = scales_of_rows(row_amax_ptr, row_scale_ptr, first, height, first_column == 0, FORM, RULE)
        for part in gl.static_range(2):
            at = part * COLUMNS + first_column
            if row_codes_ptr is not None:
                write_rows(
                    regions[part].index(0), row_scales, row_codes_ptr, first, at, columns, height, 2 * COLUMNS, FORM,
                    True,
                )  # fmt: skip
            if column_codes_ptr is not None:
                of_part = of_dh + part * COLUMNS
                column_scales = scales_of_columns(
                    column_amax_ptr + of_part, column_scale_ptr + of_part, gl.where(active, columns, 0),
                    first_of_group, FORM, RULE,
                )  # fmt: skip
                write_columns(
                    regions[part].index(0), column_scales, column_codes_ptr, at, columns, place, left, places, FORM,
                    True,
                )  # fmt: skip
        invalidate(ready)


@gluon.jit(do_not_specialize=["T", "num_groups", "most", "tiles"])
def dactivation_vector_amaxes_gluon_kernel(
    dact_ptr, h_ptr, scales_ptr, row_amax_ptr, column_amax_ptr, act_amax_ptr, offsets_ptr, T, COLUMNS, num_groups,
    most, tiles,
    STEPS: gl.constexpr, BACKWARDS: gl.constexpr, CONSTANTS: gl.constexpr, SOURCE: gl.constexpr,
):  # fmt: skip
    """Raises the amaxes of dh's rows and columns and of act's columns of the groups with more than `most` rows; None:
    not found. dact_ptr, h_ptr: of words of two numbers.

    From the last tile to the first, which the kernel that casts then finds in L2.
    """
    A: gl.constexpr = CONSTANTS[0]
    B: gl.constexpr = CONSTANTS[1]
    C: gl.constexpr = CONSTANTS[2]
    column_blocks = gl.cdiv(COLUMNS, _WIDTH)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [2, 16], [gl.num_warps(), 1], [1, 0])
    lane = gl.arange(0, 8, gl.SliceLayout(1, layout))
    column = 2 * gl.expand_dims(gl.arange(0, 64, gl.SliceLayout(0, layout)), 0)
    if largest_group(offsets_ptr, T, num_groups) <= most:
        tiles = 0
    for step in range(gl.program_id(0), tiles, gl.num_programs(0)):
        tile = tiles - 1 - step
        first_column = tile % column_blocks * _WIDTH
        group, first, height, _place, _left, _begin, size = tile_of_rows(
            offsets_ptr, None, tile // column_blocks, T, 0, num_groups
        )
        if (height > 0) & (group < num_groups):
            if size > most:
                of_a = gl.full([8, 64], 0, gl.uint32, layout)
                of_b = of_a
                of_act = of_a
                for i in range(8):  # more rows at a time take registers
                    rows = 8 * i + lane
                    inside = gl.expand_dims(rows < height, 1) & (column < COLUMNS - first_column)
                    at = gl.expand_dims(rows, 1) * (COLUMNS // 2) + (first_column + column) // 2
                    at_h = at + gl.expand_dims(rows, 1) * (COLUMNS // 2)
                    d = gl.load(dact_ptr + first * (COLUMNS // 2) + at, mask=inside, other=0)
                    a = gl.load(h_ptr + first * COLUMNS + at_h, mask=inside, other=0)
                    b = gl.load(h_ptr + (first * COLUMNS + COLUMNS // 2) + at_h, mask=inside, other=0)
                    d0, d1 = unpack_pairs(d.to(gl.uint32, bitcast=True))
                    a0, a1 = unpack_pairs(a.to(gl.uint32, bitcast=True))
                    b0, b1 = unpack_pairs(b.to(gl.uint32, bitcast=True))
                    if scales_ptr is not None:
                        scale = gl.load(scales_ptr + first + rows, mask=rows < height, other=0).to(gl.float32)
                        scale = gl.expand_dims(scale, 1)
                        d0 *= scale
                        d1 *= scale
                    if act_amax_ptr is not None:
                        y0, y1 = STEPS[0](a0, b0, A, B, C), STEPS[0](a1, b1, A, B, C)
                        if scales_ptr is not None:
                            y0 *= scale
                            y1 *= scale
                        of_act = larger_pair(of_act, gl.where(inside, bfloat16_pairs(y0, y1), 0))
                    da0, db0 = BACKWARDS[0](d0, a0, b0, A, B, C)
                    da1, db1 = BACKWARDS[0](d1, a1, b1, A, B, C)
                    da = gl.where(inside, bfloat16_pairs(da0, da1), 0)
                    db = gl.where(inside, bfloat16_pairs(db0, db1), 0)
                    of_a, of_b = larger_pair(of_a, da), larger_pair(of_b, db)
                    if row_amax_ptr is not None:
                        raise_amaxes_of_rows(row_amax_ptr + first, larger_pair(da, db), rows, rows < height)
                of_group = group.to(gl.int64) * COLUMNS + first_column
                if column_amax_ptr is not None:
                    of_dh = column_amax_ptr + (2 * of_group - first_column)
                    _raise_columns(of_dh, of_a, COLUMNS - first_column)
                    _raise_columns(of_dh + COLUMNS, of_b, COLUMNS - first_column)
                if act_amax_ptr is not None:
                    _raise_columns(act_amax_ptr + of_group, of_act, COLUMNS - first_column)


@gluon.jit
def _raise_columns(amax_ptr, pairs, columns):
    """To those of the rows of pairs [8, 64]."""
    found = unpack_pairs(gl.reduce(pairs, 0, larger_pair) & 0x7FFF7FFF)
    column = 2 * gl.arange(0, 64, found[0].type.layout)
    for second in gl.static_range(2):
        raise_amaxes(amax_ptr + (column + second), found[second], column < columns)
