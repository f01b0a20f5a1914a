"""The kernels of `cast_float8_rowwise`: amaxes of rows and columns, both copies of a tile from one read of x, rows
alone, and dequantization.

Tiles lie as those of `cast_float8_triton`, whose rows 4 q + j are part j.
"""

from recipes.casts.amaxes_triton import with_amaxes
from recipes.casts.cast_float8_triton import (
    PADDING,
    find_float8_tile,
    height_of,
    load_part,
    load_transposed,
    part_of_tile,
    rows_of_group,
    scale_of_amax,
    source_of,
    store_part,
    store_transposed,
)
from recipes.casts.float8_elements_triton import float8_codes, float8_values, float8_words, magnitude
from recipes.triton.gates import tl, triton
from recipes.triton.meeting import largest_group
from recipes.triton.rounding import round_to, widen


@triton.jit(do_not_specialize=["rows", "num_groups", "tiles", "most"])
def row_and_column_amaxes_kernel(
    x_ptr, row_of_ptr, row_amax_ptr, column_amax_ptr, offsets_ptr, rows, columns, num_groups, tiles, most,
    LARGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Raises the amaxes of the rows, and of each group's columns. None: not computed. LARGE: of groups with more than
    `most` rows.

    row_of_ptr: None, or which row of x each row is. row_amax_ptr: [all rows], column_amax_ptr: [groups, columns]; the
    bits of float32 numbers, whose order is theirs. From the last tile to the first, which the cast that follows then
    finds in L2.
    """
    if LARGE:
        tiles = tl.where(largest_group(offsets_ptr, num_groups) > most, tiles, 0)
    for step in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = tiles - 1 - step
        _, group, first, end, start, _, _ = find_float8_tile(
            offsets_ptr, None, tile // tl.cdiv(columns, BLOCK_K), rows, rows, num_groups, 0, BLOCK_M
        )  # fmt: skip
        found = (first < end) & (group < num_groups)
        if LARGE:
            found &= rows_of_group(offsets_ptr, group, rows, num_groups) > most
        if found:
            first_column = tile % tl.cdiv(columns, BLOCK_K) * BLOCK_K
            row = tl.arange(0, BLOCK_M)
            column = tl.arange(0, BLOCK_K)
            mask_row = row < height_of(first, end, BLOCK_M)
            mask_column = column < columns - first_column
            at = source_of(row_of_ptr, start + row, mask_row)[:, None] * columns + first_column + column[None, :]
            x = tl.load(x_ptr + at, mask=mask_row[:, None] & mask_column[None, :], other=0.0)
            _x, of_rows, of_columns = with_amaxes(x, BLOCK_M)
            if row_amax_ptr is not None:
                _raise(row_amax_ptr + start + row, tl.max(of_rows, axis=1), mask_row)
            if column_amax_ptr is not None:
                of_group = column_amax_ptr + tl.cast(group, tl.int64) * columns + first_column
                _raise(of_group + column, tl.reshape(of_columns, [BLOCK_K]), mask_column)


@triton.jit(do_not_specialize=["rows", "num_groups", "slots", "num_rows", "num_columns"])
def cast_float8_rowwise_kernel(
    x_ptr, row_of_ptr, row_codes_ptr, column_codes_ptr, row_scale_ptr, column_scale_ptr, row_amax_ptr, column_amax_ptr,
    offsets_ptr, aligned_ptr, rows, columns, width, num_groups, slots, num_rows, num_columns, amax_epsilon,
    POWER_2: tl.constexpr, PACKED: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Cast one tile, and store this program's share of the scales. A copy whose pointers are None is not made.

    row_of_ptr: None, or which row of x each row is. rows: of each matrix; slots: row tiles of all. num_rows,
    num_columns: how many amaxes there are of either kind. PACKED: column_codes are words; width: of their rows in
    codes. FORM, NATIVE: as in `float8_codes`.
    """
    if row_codes_ptr is not None:
        _store_scales(row_scale_ptr, row_amax_ptr, num_rows, amax_epsilon, POWER_2, FORM)
    if column_codes_ptr is not None:
        _store_scales(column_scale_ptr, column_amax_ptr, num_columns, amax_epsilon, POWER_2, FORM)
    if slots > 0:
        slot = tl.program_id(0) // tl.cdiv(columns, BLOCK_K)
        matrix, group, first, end, start, first_place, places = find_float8_tile(
            offsets_ptr, aligned_ptr, slot, rows, width, num_groups, PADDING, BLOCK_M
        )
        active = group < num_groups
        first_column = tl.program_id(0) % tl.cdiv(columns, BLOCK_K) * BLOCK_K
        height = height_of(first, end, BLOCK_M)
        if row_of_ptr is None:
            x_ptr += start * columns + first_column
        else:
            x_ptr += first_column
            row_of_ptr += start
        loaded = tl.where(active, height, 0)
        x0 = load_part(x_ptr, 0, loaded, columns, first_column, BLOCK_M, BLOCK_K, row_of_ptr)
        x1 = load_part(x_ptr, 1, loaded, columns, first_column, BLOCK_M, BLOCK_K, row_of_ptr)
        x2 = load_part(x_ptr, 2, loaded, columns, first_column, BLOCK_M, BLOCK_K, row_of_ptr)
        x3 = load_part(x_ptr, 3, loaded, columns, first_column, BLOCK_M, BLOCK_K, row_of_ptr)
        if row_codes_ptr is not None:
            row_codes_ptr += start * columns + first_column
            row_amax_ptr += start
            parts = (x0, x1, x2, x3)
            for j in tl.static_range(4):
                row = 4 * tl.arange(0, BLOCK_M // 4) + j
                amax = tl.load(row_amax_ptr + row, mask=row < height, other=0.0)
                scaled = parts[j] * scale_of_amax(amax, amax_epsilon, FORM, POWER_2)[:, None]
                codes = float8_codes(scaled, FORM, NATIVE)
                store_part(row_codes_ptr, codes, j, height, columns, first_column, BLOCK_M, BLOCK_K)
        if column_codes_ptr is not None:
            column = tl.arange(0, BLOCK_K)
            column_amax_ptr += tl.cast(group, tl.int64) * columns + first_column
            amax = tl.load(column_amax_ptr + column, mask=(column < columns - first_column) & active, other=0.0)
            scale = scale_of_amax(amax, amax_epsilon, FORM, POWER_2)[None, :]
            words = float8_words(x0 * scale, x1 * scale, x2 * scale, x3 * scale, FORM, NATIVE)
            store_transposed(
                column_codes_ptr, words, (matrix.to(tl.int64) * columns + first_column) * width + first_place,
                places, width, columns - first_column, PACKED, BLOCK_M, BLOCK_K,
            )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "num_groups"])
def cast_float8_rows_kernel(
    x_ptr, row_of_ptr, codes_ptr, scale_ptr, offsets_ptr, rows, columns, num_groups, amax_epsilon,
    POWER_2: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The rowwise copy of BLOCK_M whole rows of at most BLOCK_K columns, from one read. row_of_ptr: None, or which row
    of x each row is."""
    first = tl.program_id(0).to(tl.int64) * BLOCK_M
    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)[None, :]
    given = row < rows - first
    active = given
    if offsets_ptr is not None:
        active = given & (row < tl.load(offsets_ptr + num_groups) - first)
    at = first * columns + row.to(tl.int64)[:, None] * columns + column
    at_x = source_of(row_of_ptr, first + row, active)[:, None] * columns + column
    x = widen(tl.load(x_ptr + at_x, mask=active[:, None] & (column < columns), other=0.0)).to(tl.float32)
    scale = scale_of_amax(tl.max(magnitude(x), axis=1), amax_epsilon, FORM, POWER_2)
    codes = float8_codes(x * scale[:, None], FORM, NATIVE)
    tl.store(codes_ptr + at, codes, mask=given[:, None] & (column < columns))
    tl.store(scale_ptr + first + row, tl.div_rn(1.0, scale), mask=given)


@triton.jit(do_not_specialize=["rows", "num_groups"])
def dequantize_float8_rowwise_kernel(
    codes_ptr, scale_ptr, out_ptr, offsets_ptr, aligned_ptr, rows, columns, width, num_groups,
    COLUMNWISE: tl.constexpr, PACKED: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """code * scale of one tile in the natural order; rows past the sum get 0. PACKED, width: of transposed codes."""
    slot = tl.program_id(0) // tl.cdiv(columns, BLOCK_K)
    matrix, group, first, end, start, first_place, places = find_float8_tile(
        offsets_ptr, aligned_ptr, slot, rows, width, num_groups, 0, BLOCK_M
    )
    first_column = tl.program_id(0) % tl.cdiv(columns, BLOCK_K) * BLOCK_K
    height = height_of(first, end, BLOCK_M)
    given = tl.where(group < num_groups, height, 0)
    if COLUMNWISE:
        words = load_transposed(
            codes_ptr, (matrix.to(tl.int64) * columns + first_column) * width + first_place,
            tl.minimum(places, (given + 3) // 4 * 4), width, columns - first_column, PACKED, BLOCK_M, BLOCK_K,
        )  # fmt: skip
        column = tl.arange(0, BLOCK_K)[None, :]
        scale_ptr += tl.cast(group, tl.int64) * columns + first_column
        scale = tl.load(scale_ptr + column, mask=(column < columns - first_column) & (given > 0), other=1.0)
    else:
        codes_ptr += start * columns + first_column
        scale_ptr += start
    out_ptr += start * columns + first_column
    for j in tl.static_range(4):
        if COLUMNWISE:
            codes = ((words >> (8 * j)) & 0xFF).to(tl.uint8)
        else:
            at, inside = part_of_tile(j, given, columns, first_column, BLOCK_M, BLOCK_K)
            codes = tl.load(codes_ptr + at, mask=inside, other=0)
            row = 4 * tl.arange(0, BLOCK_M // 4)[:, None] + j
            scale = tl.load(scale_ptr + row, mask=row < given, other=1.0)
        value = round_to(float8_values(codes, FORM, NATIVE) * scale, out_ptr.dtype.element_ty)
        store_part(out_ptr, value, j, height, columns, first_column, BLOCK_M, BLOCK_K)


@triton.jit
def _raise(amax_ptrs, amaxes, mask):
    amaxes = tl.maximum(amaxes, 0.0)  # NaN only where all values are
    tl.atomic_max(amax_ptrs, amaxes.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def _store_scales(scale_ptr, amax_ptr, count, amax_epsilon, POWER_2: tl.constexpr, FORM: tl.constexpr):
    """1 / scale of every amax, each program a share of them."""
    CHUNK: tl.constexpr = 128
    for start in range(tl.program_id(0) * CHUNK, count, tl.num_programs(0) * CHUNK):
        at = start + tl.arange(0, CHUNK)
        scale = scale_of_amax(tl.load(amax_ptr + at, mask=at < count, other=0.0), amax_epsilon, FORM, POWER_2)
        tl.store(scale_ptr + at, tl.div_rn(1.0, scale), mask=at < count)
