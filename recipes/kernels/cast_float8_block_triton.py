"""The kernels of `cast_float8_block`: both copies of a 128x128 tile from one read of x, and the way back.

The 128 rows of a tile are taken in four parts, rows 4 q + j in part j: so the four codes that lie side by side in the
transposed copy are in one place of four tensors, become one 32-bit word without any exchange between threads, and the
transposition moves words, not bytes.
"""

import triton
import triton.language as tl

from recipes.kernels.float8_triton import float8_codes, float8_values, float8_words, magnitude
from recipes.kernels.rounding import round_to, widen
from recipes.kernels.row_tiles import find_block

BLOCK = tl.constexpr(128)
PART = tl.constexpr(32)


@triton.jit(do_not_specialize=["rows", "row_blocks", "num_groups"])
def cast_float8_block_kernel(
    x_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, offsets_ptr, aligned_ptr,
    rows, columns, width, row_blocks, num_groups, amax_epsilon,
    SQUARE: tl.constexpr, POWER_2: tl.constexpr, LARGEST: tl.constexpr, PACKED: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr, GROUP_ROWS: tl.constexpr, RELOAD: tl.constexpr = False,
):  # fmt: skip
    """Cast one tile. A copy whose codes are None is not made.

    rows: of each matrix; row_blocks: of each matrix, in the padded buffer if there are offsets. SQUARE: 128x128 blocks.
    PACKED: column_codes are words; width: of their rows, in words or in bytes. FORM, NATIVE: as in `float8_codes`.
    """
    matrix, tile, column_block, first, end, active = _find(
        offsets_ptr, aligned_ptr, rows, columns, row_blocks, num_groups, GROUP_ROWS
    )
    offs_k = column_block * BLOCK + tl.arange(0, BLOCK)
    offs_q = 4 * tl.arange(0, PART)
    start = matrix.to(tl.int64) * rows
    last = tl.where(active, end, first)
    x0 = _load(x_ptr, start, first + offs_q, offs_k, last, columns)
    x1 = _load(x_ptr, start, first + offs_q + 1, offs_k, last, columns)
    x2 = _load(x_ptr, start, first + offs_q + 2, offs_k, last, columns)
    x3 = _load(x_ptr, start, first + offs_q + 3, offs_k, last, columns)
    column_blocks = tl.cdiv(columns, BLOCK)
    if SQUARE or column_codes_ptr is not None:
        peak = tl.maximum(tl.maximum(magnitude(x0), magnitude(x1)), tl.maximum(magnitude(x2), magnitude(x3)))
        amax = tl.max(peak, axis=0)
        if SQUARE:
            amax = tl.max(amax, axis=0)
        scale, scale_inv = _scale(amax, amax_epsilon, FORM, POWER_2, LARGEST)
    if row_codes_ptr is not None and not SQUARE:
        scales = row_scale_ptr + (matrix * column_blocks + column_block).to(tl.int64) * rows
        q0 = _row_cast(x0, scales, first + offs_q, end, amax_epsilon, FORM, POWER_2, LARGEST, NATIVE)
        q1 = _row_cast(x1, scales, first + offs_q + 1, end, amax_epsilon, FORM, POWER_2, LARGEST, NATIVE)
        q2 = _row_cast(x2, scales, first + offs_q + 2, end, amax_epsilon, FORM, POWER_2, LARGEST, NATIVE)
        q3 = _row_cast(x3, scales, first + offs_q + 3, end, amax_epsilon, FORM, POWER_2, LARGEST, NATIVE)
        _store(row_codes_ptr, q0, start, first + offs_q, offs_k, end, columns)
        _store(row_codes_ptr, q1, start, first + offs_q + 1, offs_k, end, columns)
        _store(row_codes_ptr, q2, start, first + offs_q + 2, offs_k, end, columns)
        _store(row_codes_ptr, q3, start, first + offs_q + 3, offs_k, end, columns)
    if RELOAD:
        tl.debug_barrier()
        x0 = _load(x_ptr, start, first + offs_q, offs_k, last, columns)
        x1 = _load(x_ptr, start, first + offs_q + 1, offs_k, last, columns)
        x2 = _load(x_ptr, start, first + offs_q + 2, offs_k, last, columns)
        x3 = _load(x_ptr, start, first + offs_q + 3, offs_k, last, columns)
    if row_codes_ptr is not None and SQUARE:
        q0 = float8_codes(x0 * scale, FORM, NATIVE)
        q1 = float8_codes(x1 * scale, FORM, NATIVE)
        q2 = float8_codes(x2 * scale, FORM, NATIVE)
        q3 = float8_codes(x3 * scale, FORM, NATIVE)
        at = (matrix * row_blocks + tile).to(tl.int64) * column_blocks + column_block
        tl.store(row_scale_ptr + at, scale_inv, mask=tile < row_blocks)
        _store(row_codes_ptr, q0, start, first + offs_q, offs_k, end, columns)
        _store(row_codes_ptr, q1, start, first + offs_q + 1, offs_k, end, columns)
        _store(row_codes_ptr, q2, start, first + offs_q + 2, offs_k, end, columns)
        _store(row_codes_ptr, q3, start, first + offs_q + 3, offs_k, end, columns)
    if column_codes_ptr is not None:
        words = float8_words(x0 * scale, x1 * scale, x2 * scale, x3 * scale, FORM, NATIVE)
        _store_transposed(column_codes_ptr, words, matrix.to(tl.int64) * columns, tile, offs_k, columns, width, PACKED)
        inside = tile < row_blocks
        if SQUARE:
            at = (matrix * column_blocks + column_block).to(tl.int64) * row_blocks + tile
            tl.store(column_scale_ptr + at, scale_inv, mask=inside)
        else:
            at = (matrix * row_blocks + tile).to(tl.int64) * columns + offs_k
            tl.store(column_scale_ptr + at, scale_inv, mask=inside & (offs_k < columns))


@triton.jit(do_not_specialize=["rows", "row_blocks", "num_groups"])
def dequantize_float8_block_kernel(
    codes_ptr, scale_ptr, out_ptr, offsets_ptr, aligned_ptr, rows, columns, width, row_blocks, num_groups,
    SQUARE: tl.constexpr, TRANSPOSED: tl.constexpr, PACKED: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr, GROUP_ROWS: tl.constexpr,
):  # fmt: skip
    """Values of one tile in the natural order; rows past the sum get 0. Arguments as in `cast_float8_block_kernel`."""
    matrix, tile, column_block, first, end, active = _find(
        offsets_ptr, aligned_ptr, rows, columns, row_blocks, num_groups, GROUP_ROWS
    )
    offs_k = column_block * BLOCK + tl.arange(0, BLOCK)
    offs_q = 4 * tl.arange(0, PART)
    start = matrix.to(tl.int64) * rows
    last = tl.where(active, end, first)
    column_blocks = tl.cdiv(columns, BLOCK)
    if SQUARE:
        if TRANSPOSED:
            at = (matrix * column_blocks + column_block).to(tl.int64) * row_blocks + tile
        else:
            at = (matrix * row_blocks + tile).to(tl.int64) * column_blocks + column_block
        scale = tl.load(scale_ptr + at, mask=active, other=1.0)
    elif TRANSPOSED:
        at = (matrix * row_blocks + tile).to(tl.int64) * columns + offs_k
        scale = tl.load(scale_ptr + at, mask=active & (offs_k < columns), other=1.0)
    else:
        scale_ptr += (matrix * column_blocks + column_block).to(tl.int64) * rows
    if TRANSPOSED:
        words = _load_transposed(codes_ptr, matrix.to(tl.int64) * columns, tile, offs_k, columns, width, active, PACKED)
    for j in tl.static_range(4):
        row = first + offs_q + j
        if TRANSPOSED:
            codes = ((words >> (8 * j)) & 0xFF).to(tl.uint8)
        else:
            at = (start + row)[:, None] * columns + offs_k[None, :]
            inside = (row < last)[:, None] & (offs_k < columns)[None, :]
            codes = tl.load(codes_ptr + at, mask=inside, other=0)
        value = float8_values(codes, FORM, NATIVE)
        if SQUARE or TRANSPOSED:
            value = value * scale
        else:
            value = value * tl.load(scale_ptr + row, mask=row < last, other=1.0)[:, None]
        _store(out_ptr, round_to(value, out_ptr.dtype.element_ty), start, row, offs_k, end, columns)


@triton.jit
def _find(offsets_ptr, aligned_ptr, rows, columns, row_blocks, num_groups, GROUP_ROWS: tl.constexpr):
    """(matrix, tile in its padded rows, column block, first row, end row, whether the rows are any group's)."""
    column_blocks = tl.cdiv(columns, BLOCK)
    pid = tl.program_id(0)
    if GROUP_ROWS == 1:
        tile = pid // column_blocks
        column_block = pid % column_blocks
    else:
        tiles = tl.num_programs(0) // column_blocks
        strip = pid // (GROUP_ROWS * column_blocks)
        height = tl.minimum(tiles - strip * GROUP_ROWS, GROUP_ROWS)
        within = pid % (GROUP_ROWS * column_blocks)
        tile = strip * GROUP_ROWS + within % height
        column_block = within // height
    matrix, tile, first, end, active = find_block(
        offsets_ptr, aligned_ptr, tile, rows, row_blocks, num_groups, BLOCK
    )  # fmt: skip
    return matrix, tile, column_block, first, end, active


@triton.jit
def _load(x_ptr, start, row, offs_k, end, columns):
    """Part of a tile in float32, 0 outside. [PART, BLOCK]"""
    at = (start + row)[:, None] * columns + offs_k[None, :]
    inside = (row < end)[:, None] & (offs_k < columns)[None, :]
    return widen(tl.load(x_ptr + at, mask=inside, other=0.0)).to(tl.float32)


@triton.jit
def _store(out_ptr, values, start, row, offs_k, end, columns):
    at = (start + row)[:, None] * columns + offs_k[None, :]
    tl.store(out_ptr + at, values, mask=(row < end)[:, None] & (offs_k < columns)[None, :])


@triton.jit
def _store_transposed(codes_ptr, words, start, tile, offs_k, columns, width, PACKED: tl.constexpr):
    """Four rows a word: words [PART, BLOCK] to the tile's columns of codes [columns, width]."""
    words = tl.trans(words)  # [BLOCK, PART]
    word = tile * PART + tl.arange(0, PART)
    row = (start + offs_k)[:, None] * width
    valid = (offs_k < columns)[:, None]
    if PACKED:
        at = row + word[None, :]
        tl.store(codes_ptr + at, words.to(tl.int32, bitcast=True), mask=valid & (word < width)[None, :])
    else:
        for j in tl.static_range(4):
            column = (4 * word + j)[None, :]
            tl.store(codes_ptr + row + column, ((words >> (8 * j)) & 0xFF).to(tl.uint8), mask=valid & (column < width))


@triton.jit
def _load_transposed(codes_ptr, start, tile, offs_k, columns, width, active, PACKED: tl.constexpr):
    """What `_store_transposed` stored, [PART, BLOCK]; 0 outside, and if not active."""
    word = tile * PART + tl.arange(0, PART)
    row = (start + offs_k)[:, None] * width
    valid = active & (offs_k < columns)[:, None]
    if PACKED:
        at = row + word[None, :]
        words = tl.load(codes_ptr + at, mask=valid & (word < width)[None, :], other=0).to(tl.uint32, bitcast=True)
    else:
        words = tl.zeros([BLOCK, PART], tl.uint32)
        for j in tl.static_range(4):
            column = (4 * word + j)[None, :]
            codes = tl.load(codes_ptr + row + column, mask=valid & (column < width), other=0)
            words = words | (codes.to(tl.uint32) << (8 * j))
    return tl.trans(words)


@triton.jit
def _row_cast(
    x, scale_ptr, row, end, amax_epsilon,
    FORM: tl.constexpr, POWER_2: tl.constexpr, LARGEST: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """The codes of part of a tile, one scale a row, which is stored."""
    scale, scale_inv = _scale(tl.max(magnitude(x), axis=1), amax_epsilon, FORM, POWER_2, LARGEST)
    tl.store(scale_ptr + row, scale_inv, mask=row < end)
    return float8_codes(x * scale[:, None], FORM, NATIVE)


@triton.jit
def _scale(amax, amax_epsilon, FORM: tl.constexpr, POWER_2: tl.constexpr, LARGEST: tl.constexpr):
    """(scale, scale_inv) of float32 amaxes; NaN only where all values are, and counts as 0."""
    amax = tl.maximum(tl.where(amax == amax, amax, 0.0), amax_epsilon)
    usable = (amax > 0) & (amax < float("inf"))
    if POWER_2:
        # Both maxima are 1.75 * 2^n: the exponent is n less amax's, and one less if the mantissa of amax is larger.
        SUM: tl.constexpr = 254 + 8 if FORM == "E4M3" else 254 + 15
        INSTEAD: tl.constexpr = 254 if LARGEST > 1e30 else 127 + 15
        bits = amax.to(tl.int32, bitcast=True)
        exponent = SUM - (bits >> 23) - ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)
        exponent = tl.where(usable, tl.where(exponent > 254, INSTEAD, exponent), 127)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        # 2^-127 is subnormal
        inverse = tl.where(exponent == 254, 0x00400000, (254 - exponent) << 23)
        return scale, inverse.to(tl.float32, bitcast=True)
    else:
        CODE_MAX: tl.constexpr = 448.0 if FORM == "E4M3" else 57344.0
        scale = tl.div_rn(CODE_MAX, tl.where(usable, amax, 1.0))
        scale = tl.where(usable, tl.where(scale == float("inf"), LARGEST, scale), 1.0)
        return scale, tl.div_rn(1.0, scale)
