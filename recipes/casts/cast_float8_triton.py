"""The kernels of `cast_float8`: amaxes, both copies of a tile from one read of x, and dequantization.

The rows of a tile are taken in four parts, rows 4 q + j in part j: so the four codes that lie side by side in the
transposed copy are in one place of four tensors, become one 32-bit word without any exchange between threads, and the
transposition moves words, not bytes.
"""

from recipes.casts.float8_elements_triton import (
    float8_codes,
    float8_values,
    float8_words,
    in_four,
    largest_of,
    magnitude,
    transposed_words,
)
from recipes.triton.gates import tl, triton
from recipes.triton.meeting import amax_of_all, arrive, known_amax, largest_group, meeting_of, raise_amax_at
from recipes.triton.rounding import INTERPRET, round_to, widen
from recipes.triton.row_slots import find_tile

FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
PADDING = tl.constexpr(32)


@triton.jit(do_not_specialize=["rows", "num_groups", "tiles", "most"])
def amax_kernel(
    x_ptr, row_of_ptr, meetings_ptr, offsets_ptr, rows, columns, num_groups, tiles, most,
    LARGE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Raise the amaxes of the groups to max |x|. LARGE: of those with more than `most` rows. row_of_ptr: as in
    `cast_float8_kernel`.

    From the last tile to the first, which the cast that follows then finds in L2.
    """
    if LARGE:
        tiles = tl.where(largest_group(offsets_ptr, num_groups) > most, tiles, 0)
    for step in range(tl.program_id(0), tiles, tl.num_programs(0)):
        tile = tiles - 1 - step
        _, group, first, end, start, _, _ = find_float8_tile(
            offsets_ptr, None, tile // tl.cdiv(columns, BLOCK_K), rows, rows, num_groups, 0, BLOCK_M
        )
        found = (first < end) & (group < num_groups)
        if LARGE:
            found &= rows_of_group(offsets_ptr, group, rows, num_groups) > most
        if found:
            first_column = tile % tl.cdiv(columns, BLOCK_K) * BLOCK_K
            row = tl.arange(0, BLOCK_M)
            column = tl.arange(0, BLOCK_K)[None, :]
            there = row < height_of(first, end, BLOCK_M)
            inside = there[:, None] & (column < columns - first_column)
            at = source_of(row_of_ptr, start + row, there)[:, None] * columns + first_column + column
            x = widen(tl.load(x_ptr + at, mask=inside, other=0.0)).to(tl.float32)
            raise_amax_at(meeting_of(meetings_ptr, group), tl.max(tl.max(magnitude(x), axis=1), axis=0), None)


@triton.jit(do_not_specialize=["rows"])
def row_amax_kernel(x_ptr, amax_ptr, rows, columns, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """amax[row] = max |x[row]|."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    peak = tl.zeros([BLOCK_M, BLOCK_K], tl.float32)
    for first_column in range(0, columns, BLOCK_K):
        column = first_column + tl.arange(0, BLOCK_K)
        inside = (row < rows)[:, None] & (column < columns)[None, :]
        x = tl.load(x_ptr + row[:, None] * columns + column[None, :], mask=inside, other=0.0)
        peak = tl.maximum(peak, magnitude(widen(x).to(tl.float32)))
    tl.store(amax_ptr + row, tl.max(peak, axis=1), mask=row < rows)


@triton.jit(do_not_specialize=["rows", "num_groups", "slots", "most"])
def cast_float8_kernel(
    x_ptr, row_of_ptr, row_codes_ptr, column_codes_ptr, scale_inv_ptr, given_ptr, amax_ptr, offsets_ptr, aligned_ptr,
    rows, columns, width, num_groups, slots, most, amax_epsilon,
    GIVEN: tl.constexpr, POWER_2: tl.constexpr, PACKED: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Cast one tile. A copy whose pointer is None is not made.

    GIVEN, and what given_ptr points to: "scale", scales; "amax", meetings with known amaxes; "meeting", meetings at
    which groups of at most `most` rows find theirs. amax_ptr: None, or the bits of the amaxes that are to grow.
    row_of_ptr: None, or which row of x each row is. rows: of each matrix; slots: row tiles of all. PACKED: column_codes
    are words; width: of their rows in codes. FORM, NATIVE: as in `float8_codes`.
    """
    if tl.program_id(0) == 0:
        if GIVEN == "meeting":
            store_scales_of_empty(scale_inv_ptr, offsets_ptr, rows, num_groups, amax_epsilon, POWER_2, FORM)
        else:
            store_scales(scale_inv_ptr, given_ptr, num_groups, amax_epsilon, GIVEN, POWER_2, FORM)
    if slots > 0:
        _cast_tile(
            tl.program_id(0), x_ptr, row_of_ptr, row_codes_ptr, column_codes_ptr, scale_inv_ptr, given_ptr, amax_ptr,
            offsets_ptr, aligned_ptr, rows, columns, width, num_groups, most, amax_epsilon,
            GIVEN, POWER_2, PACKED, FORM, NATIVE, BLOCK_M, BLOCK_K,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "num_groups", "tiles", "most"])
def cast_large_groups_kernel(
    x_ptr, row_codes_ptr, column_codes_ptr, scale_inv_ptr, meetings_ptr, offsets_ptr, aligned_ptr,
    rows, columns, width, num_groups, tiles, most, amax_epsilon,
    POWER_2: tl.constexpr, PACKED: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """As `cast_float8_kernel`, with known amaxes, of groups with more than `most` rows; nothing else is written."""
    tiles = tl.where(largest_group(offsets_ptr, num_groups) > most, tiles, 0)
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        _cast_tile(
            tile, x_ptr, None, row_codes_ptr, column_codes_ptr, scale_inv_ptr, meetings_ptr, None, offsets_ptr,
            aligned_ptr, rows, columns, width, num_groups, most, amax_epsilon,
            "large", POWER_2, PACKED, FORM, NATIVE, BLOCK_M, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _cast_tile(
    tile, x_ptr, row_of_ptr, row_codes_ptr, column_codes_ptr, scale_inv_ptr, given_ptr, amax_ptr, offsets_ptr,
    aligned_ptr, rows, columns, width, num_groups, most, amax_epsilon,
    GIVEN: tl.constexpr, POWER_2: tl.constexpr, PACKED: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(columns, BLOCK_K)
    matrix, group, first, end, start, first_place, places = find_float8_tile(
        offsets_ptr, aligned_ptr, tile // across, rows, width, num_groups, PADDING, BLOCK_M
    )
    active = group < num_groups
    first_column = tile % across * BLOCK_K
    height = height_of(first, end, BLOCK_M)
    if row_of_ptr is None:
        x_ptr += start * columns + first_column
    else:
        x_ptr += first_column
        row_of_ptr += start
    if GIVEN == "large":
        large = active & (rows_of_group(offsets_ptr, group, rows, num_groups) > most)
        height = tl.where(large, height, 0)
        places = tl.where(large, places, 0)
    loaded = tl.where(active, height, 0)
    h0 = load_raw_part(x_ptr, 0, loaded, columns, first_column, BLOCK_M, BLOCK_K, row_of_ptr)
    h1 = load_raw_part(x_ptr, 1, loaded, columns, first_column, BLOCK_M, BLOCK_K, row_of_ptr)
    h2 = load_raw_part(x_ptr, 2, loaded, columns, first_column, BLOCK_M, BLOCK_K, row_of_ptr)
    h3 = load_raw_part(x_ptr, 3, loaded, columns, first_column, BLOCK_M, BLOCK_K, row_of_ptr)
    if GIVEN == "meeting":
        scale = 1.0
        if loaded > 0:
            size = rows_of_group(offsets_ptr, group, rows, num_groups)
            meeting_ptr = meeting_of(given_ptr, group)
            if size <= most:
                # Magnitudes of the bits, so that the tile waits as it was loaded, in half the registers.
                top = tl.maximum(tl.maximum(_magnitude(h0), _magnitude(h1)), tl.maximum(_magnitude(h2), _magnitude(h3)))
                top = tl.max(tl.max(top, axis=1), axis=0).to(tl.int16).to(h0.dtype, bitcast=True).to(tl.float32)
                arrive(meeting_ptr, top)
                amax = amax_of_all(meeting_ptr, tl.cdiv(size, BLOCK_M).to(tl.int32) * across)
            else:
                amax = known_amax(meeting_ptr, True)
            scale = scale_of_amax(amax, amax_epsilon, FORM, POWER_2)
            store_scale_of_group(scale_inv_ptr, scale, offsets_ptr, group, first, first_column)
    elif GIVEN == "scale":
        scale = tl.load(given_ptr + group, mask=active, other=1.0)
    else:
        scale = scale_of_amax(known_amax(meeting_of(given_ptr, group), active), amax_epsilon, FORM, POWER_2)
        if GIVEN == "large":
            if loaded > 0:
                store_scale_of_group(scale_inv_ptr, scale, offsets_ptr, group, first, first_column)
    x0, x1, x2, x3 = _numbers(h0), _numbers(h1), _numbers(h2), _numbers(h3)
    if amax_ptr is not None:
        peak = tl.maximum(tl.maximum(magnitude(x0), magnitude(x1)), tl.maximum(magnitude(x2), magnitude(x3)))
        raise_amax_at(amax_ptr + group, tl.max(tl.max(peak, axis=1), axis=0), loaded > 0)
    x0 *= scale
    x1 *= scale
    x2 *= scale
    x3 *= scale
    if row_codes_ptr is not None:
        row_codes_ptr += start * columns + first_column
        parts = (x0, x1, x2, x3)
        for j in tl.static_range(4):
            codes = float8_codes(parts[j], FORM, NATIVE)
            store_part(row_codes_ptr, codes, j, height, columns, first_column, BLOCK_M, BLOCK_K)
    if column_codes_ptr is not None:
        words = float8_words(x0, x1, x2, x3, FORM, NATIVE)
        store_transposed(
            column_codes_ptr, words, (matrix.to(tl.int64) * columns + first_column) * width + first_place,
            places, width, columns - first_column, PACKED, BLOCK_M, BLOCK_K,
        )  # fmt: skip


@triton.jit
def _numbers(x):
    """x in float32. By a shift of bfloat16's bits, which the compiler leaves where it is: behind a meeting."""
    if x.dtype == tl.bfloat16 and not INTERPRET:
        return (x.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
    else:
        return widen(x).to(tl.float32)


@triton.jit
def _magnitude(x):
    """The bits of |x|, whose order is that of the numbers, for 16-bit x; 0 of NaN."""
    INFINITE: tl.constexpr = 0x7C00 if x.dtype == tl.float16 else 0x7F80
    bits = x.to(tl.int16, bitcast=True) & 0x7FFF
    return tl.where(bits > INFINITE, 0, bits).to(tl.int16)


@triton.jit
def dequantize_codes_kernel(codes_ptr, out_ptr, size, FORM: tl.constexpr, NATIVE: tl.constexpr, BLOCK: tl.constexpr):
    """The numbers of BLOCK codes."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = float8_values(tl.load(codes_ptr + at, mask=at < size, other=0), FORM, NATIVE)
    tl.store(out_ptr + at, round_to(value, out_ptr.dtype.element_ty), mask=at < size)


@triton.jit(do_not_specialize=["rows", "num_groups"])
def transpose_back_kernel(
    codes_ptr, out_ptr, offsets_ptr, aligned_ptr, rows, columns, width, num_groups,
    PACKED: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The numbers of one tile of column_codes in the natural order; rows past the sum get 0."""
    matrix, group, first, end, start, first_place, places = find_float8_tile(
        offsets_ptr, aligned_ptr, tl.program_id(0) // tl.cdiv(columns, BLOCK_K), rows, width, num_groups, 0, BLOCK_M
    )
    first_column = tl.program_id(0) % tl.cdiv(columns, BLOCK_K) * BLOCK_K
    height = height_of(first, end, BLOCK_M)
    words = load_transposed(
        codes_ptr, (matrix.to(tl.int64) * columns + first_column) * width + first_place,
        tl.where(group < num_groups, tl.minimum(places, (height + 3) // 4 * 4), 0), width,
        columns - first_column, PACKED, BLOCK_M, BLOCK_K,
    )  # fmt: skip
    out_ptr += start * columns + first_column
    for j in tl.static_range(4):
        value = float8_values(((words >> (8 * j)) & 0xFF).to(tl.uint8), FORM, NATIVE)
        value = round_to(value, out_ptr.dtype.element_ty)
        store_part(out_ptr, value, j, height, columns, first_column, BLOCK_M, BLOCK_K)


@triton.jit
def store_float8(
    x, scale, row_codes_ptr, column_codes_ptr, first_row, columns, first_column, WIDTH, left, inside,
    first_place, places, width, ADJACENT: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Cast the float32 tile x of a matrix [T, WIDTH], rows from first_row on, with its scale; 0 where not `inside`. A
    copy whose pointer is None is not made.

    left: how many of the tile's columns there are. first_place, places: as in `find_float8_tile`; column_codes: words
    of four rows; width: of theirs in codes. ADJACENT: the columns follow first_column one by one. FORM, NATIVE: as in
    `float8_codes`.
    """
    scaled = tl.where(inside, x, 0.0) * scale
    # Addresses inside of a tile fit in 32 bits: its first one takes 64.
    if row_codes_ptr is not None:
        row_codes_ptr += tl.cast(first_row, tl.int64) * WIDTH
        at = tl.arange(0, x.shape[0])[:, None] * WIDTH + columns[None, :]
        tl.store(row_codes_ptr + at, float8_codes(scaled, FORM, NATIVE), mask=inside)
    if column_codes_ptr is not None:
        words = transposed_words(scaled, FORM, NATIVE)
        word = tl.arange(0, x.shape[0] // 4)[None, :]
        lane = 4 * tl.arange(0, x.shape[1] // 4)[:, None]
        lanes = (columns, columns, columns, columns)
        column_codes_ptr += first_place // 4
        if ADJACENT:
            column_codes_ptr += tl.cast(first_column, tl.int64) * (width // 4)
        else:
            lanes = in_four(columns[None, :])
        for j in tl.static_range(4):
            if ADJACENT:
                at = (lane + j) * (width // 4) + word
            else:
                at = tl.trans(lanes[j]).to(tl.int64) * (width // 4) + word
            stored = (lane + j < left) & (word < places // 4)
            tl.store(column_codes_ptr + at, words[j].to(tl.int32, bitcast=True), mask=stored)


@triton.jit
def raise_amax(amax_ptr, magnitudes, group, num_groups, inside):
    """amax[group] = the maximum of itself and of what is inside of a tile; amax_ptr: as in `cast_float8_kernel`."""
    active = group < num_groups
    raise_amax_at(amax_ptr + group, tl.max(tl.where(inside & active, magnitudes, 0.0)), active)


@triton.jit
def find_float8_tile(
    offsets_ptr, aligned_ptr, slot, rows, width, num_groups, PAD: tl.constexpr, BLOCK_M: tl.constexpr
):  # fmt: skip
    """(matrix, group, first row in it, end row, first row of all, first place in a row of column_codes, places left).

    A group is a matrix, or with offsets some rows of the only one; first and end row count from the matrix's first.

    The tail, group == num_groups, has all places behind the last group's, which may be more than it has rows: with PAD
    its tiles go on for as long.
    """
    if offsets_ptr is None:
        slots = tl.cdiv(rows, BLOCK_M)
        group = slot // slots
        matrix = group
        first = (slot % slots).to(tl.int64) * BLOCK_M
        end = rows.to(tl.int64)
        start = group * end + first
        first_place = first
        last_place = width
    else:
        group, first, end = find_tile(offsets_ptr, slot, rows + PAD * num_groups, num_groups, BLOCK_M)
        matrix = slot * 0
        end = tl.minimum(end, rows)
        start = first
        first_place = first
        last_place = first
        if aligned_ptr is not None:
            begin = tl.load(aligned_ptr + group)
            first_place = begin + first - tl.load(offsets_ptr + group)
            last_place = tl.load(aligned_ptr + group + 1, mask=group < num_groups, other=width)
    places = tl.maximum(tl.minimum(last_place - first_place, BLOCK_M), 0).to(tl.int32)
    return matrix, group, first, end, start, first_place, places


@triton.jit
def height_of(first, end, BLOCK_M: tl.constexpr):
    """How many rows of a tile there are."""
    return tl.maximum(tl.minimum(end - first, BLOCK_M), 0).to(tl.int32)


@triton.jit
def source_of(row_of_ptr, rows, there):
    """Which rows of x these are, int64: themselves, or what stands at row_of_ptr; any where they are not there."""
    if row_of_ptr is None:
        return rows.to(tl.int64)
    else:
        return tl.load(row_of_ptr + rows, mask=there, other=0)


@triton.jit
def part_of_tile(PART: tl.constexpr, height, columns, first_column, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Places of rows 4 q + PART of a tile, and which are inside. [BLOCK_M / 4, BLOCK_K]"""
    row = 4 * tl.arange(0, BLOCK_M // 4)[:, None] + PART
    column = tl.arange(0, BLOCK_K)[None, :]
    return row.to(tl.int64) * columns + column, (row < height) & (column < columns - first_column)


@triton.jit
def load_part(
    ptr, PART: tl.constexpr, height, columns, first_column, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    row_of_ptr=None,
):  # fmt: skip
    return widen(load_raw_part(ptr, PART, height, columns, first_column, BLOCK_M, BLOCK_K, row_of_ptr)).to(tl.float32)


@triton.jit
def load_raw_part(
    ptr, PART: tl.constexpr, height, columns, first_column, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
    row_of_ptr=None,
):  # fmt: skip
    """row_of_ptr: None, or where it stands which row, from ptr on, each row of the tile is."""
    at, inside = part_of_tile(PART, height, columns, first_column, BLOCK_M, BLOCK_K)
    if row_of_ptr is not None:
        row = 4 * tl.arange(0, BLOCK_M // 4)[:, None] + PART
        at = source_of(row_of_ptr, row, row < height) * columns + tl.arange(0, BLOCK_K)[None, :]
    return tl.load(ptr + at, mask=inside, other=0.0)


@triton.jit
def store_part(
    ptr, values, PART: tl.constexpr, height, columns, first_column, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    at, inside = part_of_tile(PART, height, columns, first_column, BLOCK_M, BLOCK_K)
    tl.store(ptr + at, values, mask=inside)


@triton.jit
def store_transposed(
    ptr, words, start, places, width, columns, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """Words [BLOCK_M / 4, BLOCK_K] of four rows each to rows of `width` codes, from `start` on; `columns` rows at most.

    places: how many codes of each row there are
    """
    words = tl.trans(words)  # [BLOCK_K, BLOCK_M / 4]
    column = tl.arange(0, BLOCK_K)[:, None]
    word = tl.arange(0, BLOCK_M // 4)[None, :]
    if PACKED:
        at = start // 4 + column.to(tl.int64) * (width // 4) + word
        tl.store(ptr + at, words.to(tl.int32, bitcast=True), mask=(column < columns) & (word < places // 4))
    else:
        for j in tl.static_range(4):
            at = start + column.to(tl.int64) * width + 4 * word + j
            code = ((words >> (8 * j)) & 0xFF).to(tl.uint8)
            tl.store(ptr + at, code, mask=(column < columns) & (4 * word + j < places))


@triton.jit
def load_transposed(
    ptr, start, places, width, columns, PACKED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr
):  # fmt: skip
    """What `store_transposed` stored, [BLOCK_M / 4, BLOCK_K]; 0 outside."""
    column = tl.arange(0, BLOCK_K)[:, None]
    word = tl.arange(0, BLOCK_M // 4)[None, :]
    if PACKED:
        at = start // 4 + column.to(tl.int64) * (width // 4) + word
        words = tl.load(ptr + at, mask=(column < columns) & (word < places // 4), other=0).to(tl.uint32, bitcast=True)
    else:
        words = tl.zeros([BLOCK_K, BLOCK_M // 4], tl.uint32)
        for j in tl.static_range(4):
            at = start + column.to(tl.int64) * width + 4 * word + j
            code = tl.load(ptr + at, mask=(column < columns) & (4 * word + j < places), other=0)
            words = words | (code.to(tl.uint32) << (8 * j))
    return tl.trans(words)


@triton.jit
def store_scales(
    scale_inv_ptr, given_ptr, num_groups, amax_epsilon, GIVEN: tl.constexpr, POWER_2: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """The scale_inv of all groups. GIVEN, given_ptr: as in `cast_float8_kernel`, without meetings."""
    CHUNK: tl.constexpr = 128
    for start in range(0, num_groups, CHUNK):
        offs_g = start + tl.arange(0, CHUNK)
        if GIVEN == "scale":
            scale = tl.load(given_ptr + offs_g, mask=offs_g < num_groups, other=1.0)
        else:
            amax = known_amax(meeting_of(given_ptr, offs_g), offs_g < num_groups)
            scale = scale_of_amax(amax, amax_epsilon, FORM, POWER_2)
        tl.store(scale_inv_ptr + offs_g, tl.div_rn(1.0, scale), mask=offs_g < num_groups)


@triton.jit
def store_scales_of_empty(
    scale_inv_ptr, offsets_ptr, rows, num_groups, amax_epsilon, POWER_2: tl.constexpr, FORM: tl.constexpr
):  # fmt: skip
    """The scale_inv of groups without rows, which nobody else stores where groups meet."""
    CHUNK: tl.constexpr = 128
    for start in range(0, num_groups, CHUNK):
        offs_g = start + tl.arange(0, CHUNK)
        empty = offs_g < num_groups
        if offsets_ptr is not None:
            begins = tl.minimum(tl.load(offsets_ptr + offs_g, mask=empty, other=0), rows)
            ends = tl.minimum(tl.load(offsets_ptr + offs_g + 1, mask=empty, other=0), rows)
            empty &= ends == begins
        else:
            empty &= rows == 0
        scale = scale_of_amax(tl.zeros([CHUNK], tl.float32), amax_epsilon, FORM, POWER_2)
        tl.store(scale_inv_ptr + offs_g, tl.div_rn(1.0, scale), mask=empty)


@triton.jit
def store_scale_of_group(scale_inv_ptr, scale, offsets_ptr, group, first, first_column):
    """The scale_inv of a group, by its first tile: its rows begin at `first` of the matrix."""
    begin = first * 0
    if offsets_ptr is not None:
        begin = tl.load(offsets_ptr + group)
    tl.store(scale_inv_ptr + group, tl.div_rn(1.0, scale), mask=(first == begin) & (first_column == 0))


@triton.jit
def rows_of_group(offsets_ptr, group, rows, num_groups):
    """How many rows a group has; of the tail any number."""
    if offsets_ptr is None:
        return rows
    else:
        end = tl.load(offsets_ptr + group + 1, mask=group < num_groups, other=0)
        return tl.minimum(end, rows) - tl.load(offsets_ptr + group)


@triton.jit
def scale_of_amax(amax, amax_epsilon, FORM: tl.constexpr, POWER_2: tl.constexpr):
    """The scales of float32 amaxes, which are no NaN."""
    CODE_MAX: tl.constexpr = largest_of(FORM)
    amax = tl.maximum(amax, amax_epsilon)
    usable = (amax > 0) & (amax < float("inf"))
    scale = tl.minimum(tl.div_rn(CODE_MAX, tl.where(usable, amax, 1.0)), FLOAT32_MAX)
    scale = tl.where(usable, scale, 1.0)
    if POWER_2:
        scale = (scale.to(tl.int32, bitcast=True) & -8388608).to(tl.float32, bitcast=True)  # sign and exponent
    return scale
