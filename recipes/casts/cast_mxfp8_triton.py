"""The kernels of `cast_blocks` with E8M0 scales: both copies of a tile from one read of x, and dequantization.

A tile of 32 rows and 32 B columns is held as [B, 32, 32]: block of columns, row, column in the block. With the blocks
in front Triton gives each thread 16 neighbouring columns of several rows and lays the threads of a warp along a row: so
loads are coalesced, and both maxima stay within a thread but for a few shuffles.
"""

from recipes.casts.amaxes_triton import with_amaxes
from recipes.casts.float8_elements_triton import exponent_of_largest, float8_codes, float8_values, largest_of, magnitude
from recipes.triton.gates import tl, triton
from recipes.triton.rounding import round_to, widen
from recipes.triton.row_slots import find_block

BLOCK = tl.constexpr(32)


@triton.jit(do_not_specialize=["rows", "row_blocks", "num_groups"])
def cast_mxfp8_kernel(
    x_ptr, row_of_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, offsets_ptr, aligned_ptr,
    rows, columns, row_blocks, num_groups,
    SQUARE: tl.constexpr, FLOOR: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Cast one tile. Codes and scales that are None are not stored; codes that are not of uint8 are their values.

    row_of_ptr: None, or which row of x each row is. rows: of each matrix; row_blocks: of each matrix, in the padded
    buffer if there are offsets. SQUARE: 32x32 blocks. FLOOR: the scale's exponent is rounded down. FORM, NATIVE: as in
    `float8_codes`.
    """
    matrix, tile, start, height, active, first_column = _find(
        offsets_ptr, aligned_ptr, rows, columns, row_blocks, num_groups, BLOCK_K
    )
    at, inside = _places(start, height, first_column, columns, BLOCK_K)
    at_x = at
    if row_of_ptr is not None:
        at_x = _places_of_rows(row_of_ptr + start, tl.where(active, height, 0), first_column, columns, BLOCK_K)
    x = widen(tl.load(x_ptr + at_x, mask=inside & active, other=0.0)).to(tl.float32)  # [BLOCK_K / 32, 32, 32]
    at_row, valid_row = _places_of_row_scales(start, height, first_column, columns, BLOCK_K)
    at_column, valid_column = _places_of_column_scales(
        matrix * row_blocks + tile, tile < row_blocks, first_column, columns, BLOCK_K
    )
    if SQUARE:
        scale = _scale(tl.max(tl.max(magnitude(x), axis=2), axis=1), FORM, FLOOR)[:, None]
        codes = float8_codes(x * _reciprocal(scale)[:, :, None], FORM, NATIVE)
        spread = tl.broadcast_to(scale.to(tl.uint8), [BLOCK_K // BLOCK, BLOCK])
        if row_codes_ptr is not None:
            tl.store(row_codes_ptr + at, codes, mask=inside)
        if column_codes_ptr is not None:
            tl.store(column_codes_ptr + at, codes, mask=inside)
        if row_scale_ptr is not None:
            tl.store(row_scale_ptr + at_row, spread, mask=valid_row)
        if column_scale_ptr is not None:
            tl.store(column_scale_ptr + at_column, spread, mask=valid_column)
    else:
        if row_codes_ptr is not None:
            scale = _scale(tl.max(magnitude(x), axis=2), FORM, FLOOR)
            codes = float8_codes(x * _reciprocal(scale)[:, :, None], FORM, NATIVE)
            _store_codes_or_values(row_codes_ptr + at, codes, scale[:, :, None], inside, FORM, NATIVE)
            if row_scale_ptr is not None:
                tl.store(row_scale_ptr + at_row, scale.to(tl.uint8), mask=valid_row)
        if column_codes_ptr is not None:
            scale = _scale(tl.max(magnitude(x), axis=1), FORM, FLOOR)
            codes = float8_codes(x * _reciprocal(scale)[:, None, :], FORM, NATIVE)
            _store_codes_or_values(column_codes_ptr + at, codes, scale[:, None, :], inside, FORM, NATIVE)
            if column_scale_ptr is not None:
                tl.store(column_scale_ptr + at_column, scale.to(tl.uint8), mask=valid_column)


@triton.jit
def _store_codes_or_values(at, codes, scale, inside, FORM: tl.constexpr, NATIVE: tl.constexpr):
    if at.dtype.element_ty == tl.uint8:
        tl.store(at, codes, mask=inside)
    else:
        values = float8_values(codes, FORM, NATIVE) * _value(scale)
        tl.store(at, round_to(values, at.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["rows", "row_blocks", "num_groups"])
def dequantize_mxfp8_kernel(
    codes_ptr, scale_ptr, out_ptr, offsets_ptr, aligned_ptr, rows, columns, row_blocks, num_groups,
    COLUMNWISE: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Values of one tile; rows past the sum get 0. Arguments as in `cast_mxfp8_kernel`."""
    matrix, tile, start, height, active, first_column = _find(
        offsets_ptr, aligned_ptr, rows, columns, row_blocks, num_groups, BLOCK_K
    )
    at, inside = _places(start, height, first_column, columns, BLOCK_K)
    value = float8_values(tl.load(codes_ptr + at, mask=inside & active, other=0), FORM, NATIVE)
    if COLUMNWISE:
        at_scale, valid = _places_of_column_scales(matrix * row_blocks + tile, active, first_column, columns, BLOCK_K)
        value = value * _value(tl.load(scale_ptr + at_scale, mask=valid, other=0))[:, None, :]
    else:
        at_scale, valid = _places_of_row_scales(start, height, first_column, columns, BLOCK_K)
        value = value * _value(tl.load(scale_ptr + at_scale, mask=valid, other=0))[:, :, None]
    tl.store(out_ptr + at, round_to(value, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _find(offsets_ptr, aligned_ptr, rows, columns, row_blocks, num_groups, BLOCK_K: tl.constexpr):
    """(matrix, block of its padded rows, first row, how many rows from there, whether they are any group's, column)."""
    column_blocks = tl.cdiv(columns, BLOCK_K)
    matrix, tile, first, height, active = find_block(
        offsets_ptr, aligned_ptr, tl.program_id(0) // column_blocks, rows, row_blocks, num_groups, BLOCK
    )
    return matrix, tile, matrix.to(tl.int64) * rows + first, height, active, tl.program_id(0) % column_blocks * BLOCK_K


@triton.jit
def _places(start, height, first_column, columns, BLOCK_K: tl.constexpr):
    """Where the elements of a tile lie, and which of its first `height` rows are inside. [BLOCK_K / 32, 32, 32]"""
    column = BLOCK * tl.arange(0, BLOCK_K // BLOCK)[:, None, None] + tl.arange(0, BLOCK)[None, None, :]
    row = tl.arange(0, BLOCK)[None, :, None]
    at = start * columns + first_column + row.to(tl.int64) * columns + column
    return at, (row < height) & (column < columns - first_column)


@triton.jit
def _places_of_rows(row_of_ptr, height, first_column, columns, BLOCK_K: tl.constexpr):
    """Where they lie in a matrix of other rows, of which row_of_ptr says which row each of the tile is."""
    column = BLOCK * tl.arange(0, BLOCK_K // BLOCK)[:, None, None] + tl.arange(0, BLOCK)[None, None, :]
    row = tl.arange(0, BLOCK)[None, :, None]
    return tl.load(row_of_ptr + row, mask=row < height, other=0) * columns + first_column + column


@triton.jit
def _places_of_row_scales(start, height, first_column, columns, BLOCK_K: tl.constexpr):
    """[BLOCK_K / 32, 32] of block and row."""
    scales = tl.cdiv(columns, BLOCK)
    block = first_column // BLOCK + tl.arange(0, BLOCK_K // BLOCK)[:, None]
    row = tl.arange(0, BLOCK)[None, :]
    return (start + row) * scales + block, (row < height) & (block < scales)


@triton.jit
def _places_of_column_scales(block, inside, first_column, columns, BLOCK_K: tl.constexpr):
    """[BLOCK_K / 32, 32] of block of columns and column in it; block: of rows."""
    column = first_column + BLOCK * tl.arange(0, BLOCK_K // BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    return block.to(tl.int64) * columns + column, (column < columns) & inside


@triton.jit
def store_mxfp8(
    x, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, rows, columns, T, COLUMNS, inside,
    FORM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Cast the tile x of a matrix [T, COLUMNS] and store codes (uint8, row-major) and scales of both copies.

    Scales are [T, ceil(COLUMNS / 32)] rowwise, [ceil(T / 32), COLUMNS] columnwise. The tile begins at multiples of 32
    and both its sides are. FORM, NATIVE: as in `float8_codes`.
    """
    BLOCK_T: tl.constexpr = x.shape[0]
    BLOCK_C: tl.constexpr = x.shape[1]
    x = tl.where(inside, x, 0.0)
    SHORT: tl.constexpr = x.dtype == tl.bfloat16
    x, of_rows, of_columns = with_amaxes(x, BLOCK)
    at = rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]

    scale = _scale(of_rows, FORM, False, SHORT)
    blocks = tl.reshape(x, [BLOCK_T, BLOCK_C // BLOCK, BLOCK])
    scaled = tl.reshape(blocks * _reciprocal(scale)[:, :, None], [BLOCK_T, BLOCK_C])
    tl.store(row_codes_ptr + at, float8_codes(scaled, FORM, NATIVE), mask=inside)
    scale_columns = tl.cdiv(COLUMNS, BLOCK)
    column = tl.min(columns, axis=0) // BLOCK + tl.arange(0, BLOCK_C // BLOCK)
    valid = (rows < T)[:, None] & (column < scale_columns)[None, :]
    tl.store(
        row_scale_ptr + rows.to(tl.int64)[:, None] * scale_columns + column[None, :], scale.to(tl.uint8), mask=valid
    )  # fmt: skip

    scale = _scale(of_columns, FORM, False, SHORT)
    blocks = tl.reshape(x, [BLOCK_T // BLOCK, BLOCK, BLOCK_C])
    scaled = tl.reshape(blocks * _reciprocal(scale)[:, None, :], [BLOCK_T, BLOCK_C])
    tl.store(column_codes_ptr + at, float8_codes(scaled, FORM, NATIVE), mask=inside)
    row = tl.min(rows, axis=0) // BLOCK + tl.arange(0, BLOCK_T // BLOCK)
    valid = (row < tl.cdiv(T, BLOCK))[:, None] & (columns < COLUMNS)[None, :]
    tl.store(
        column_scale_ptr + row.to(tl.int64)[:, None] * COLUMNS + columns[None, :], scale.to(tl.uint8), mask=valid
    )  # fmt: skip


@triton.jit
def store_mxfp8_values(
    x, row_values_ptr, column_values_ptr, rows, columns, COLUMNS, inside, FORM: tl.constexpr, NATIVE: tl.constexpr
):
    """Cast the tile x, 0 where nothing counts, as `store_mxfp8` does, and store the values of both copies
    [T, COLUMNS], or of one.

    The tile begins at a multiple of 32 columns, and with a block of rows of its group. FORM, NATIVE: as in
    `float8_codes`.
    """
    BLOCK_T: tl.constexpr = x.shape[0]
    BLOCK_C: tl.constexpr = x.shape[1]
    SHORT: tl.constexpr = x.dtype == tl.bfloat16
    x, of_rows, of_columns = with_amaxes(x, BLOCK)
    at = rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    if row_values_ptr is not None:
        scale = _scale(of_rows, FORM, False, SHORT)[:, :, None]
        values = _quantized(tl.reshape(x, [BLOCK_T, BLOCK_C // BLOCK, BLOCK]), scale, FORM, NATIVE)
        values = tl.reshape(values, [BLOCK_T, BLOCK_C])
        tl.store(row_values_ptr + at, round_to(values, row_values_ptr.dtype.element_ty), mask=inside)
    if column_values_ptr is not None:
        scale = _scale(of_columns, FORM, False, SHORT)[:, None, :]
        values = _quantized(tl.reshape(x, [BLOCK_T // BLOCK, BLOCK, BLOCK_C]), scale, FORM, NATIVE)
        values = tl.reshape(values, [BLOCK_T, BLOCK_C])
        tl.store(column_values_ptr + at, round_to(values, column_values_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _quantized(x, scale, FORM: tl.constexpr, NATIVE: tl.constexpr):
    """The values of float32 numbers whose scales have these bytes (int32)."""
    return float8_values(float8_codes(x * _reciprocal(scale), FORM, NATIVE), FORM, NATIVE) * _value(scale)


@triton.jit
def _scale(amax, FORM: tl.constexpr, FLOOR: tl.constexpr, SHORT: tl.constexpr = False):
    """The E8M0 bytes, as int32, of float32 amaxes; NaN only where all values are, and counts as 0.

    SHORT: the amaxes are bfloat16 numbers.
    """
    LARGEST: tl.constexpr = largest_of(FORM)
    if FLOOR:
        LARGEST_EXPONENT: tl.constexpr = exponent_of_largest(FORM)
        return tl.maximum((tl.maximum(amax, 0.0).to(tl.int32, bitcast=True) >> 23) - LARGEST_EXPONENT, 0)
    elif SHORT:
        # As below, of twice the number, which is subnormal only where the byte is 0; the bits of NaN become negative.
        return tl.maximum((((amax * (2.0 / LARGEST)).to(tl.int32, bitcast=True) + 0x7FFFFF) >> 23) - 1, 0)
    else:
        bits = (tl.maximum(amax, 0.0) * (1.0 / LARGEST)).to(tl.int32, bitcast=True)
        # One more than the exponent if the mantissa is not 0. Up to 2^-127, a subnormal number, byte 0.
        return tl.minimum(tl.where(bits > 0x400000, (bits + 0x7FFFFF) >> 23, 0), 254)


@triton.jit
def _reciprocal(scale):
    """2^(127 - E) in float32, E up to 254; that of 254 is subnormal."""
    return tl.maximum((254 - scale) << 23, 0x00400000).to(tl.float32, bitcast=True)


@triton.jit
def _value(scale):
    """2^(E - 127) in float32; that of 0 is subnormal, that of 255 NaN."""
    scale = scale.to(tl.int32)
    bits = tl.where(scale == 255, 0x7FC00000, tl.maximum(scale << 23, 0x00400000))
    return bits.to(tl.float32, bitcast=True)
