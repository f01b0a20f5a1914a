"""The kernels of `cast_float8_block`: both copies of a 128x128 tile from one read of x, and the way back."""

import triton
import triton.language as tl

from recipes.kernels.amaxes_triton import with_amaxes
from recipes.kernels.float8_triton import float8_codes, float8_values, transposed_words
from recipes.kernels.rounding import round_to
from recipes.kernels.row_tiles import find_block

BLOCK = tl.constexpr(128)
PART = tl.constexpr(32)


@triton.jit(do_not_specialize=["rows", "row_blocks", "num_groups"])
def cast_float8_block_kernel(
    x_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, offsets_ptr, aligned_ptr,
    rows, columns, width, row_blocks, num_groups, amax_epsilon,
    SQUARE: tl.constexpr, POWER_2: tl.constexpr, LARGEST: tl.constexpr, PACKED: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Cast one tile. A copy whose codes are None is not made.

    rows: of each matrix; row_blocks: of each matrix, in the padded buffer if there are offsets. SQUARE: 128x128 blocks.
    PACKED: column_codes are words; width: of their rows, in words or in bytes. FORM, NATIVE: as in `float8_codes`.
    """
    column_blocks = tl.cdiv(columns, BLOCK)
    matrix, tile, first, end, active = find_block(
        offsets_ptr, aligned_ptr, tl.program_id(0) // column_blocks, rows, row_blocks, num_groups, BLOCK
    )
    column_block = tl.program_id(0) % column_blocks
    # Addresses inside a tile fit in 32 bits: its first one takes 64.
    start = (matrix.to(tl.int64) * rows + first) * columns
    offs_t = tl.arange(0, BLOCK)
    offs_k = column_block * BLOCK + tl.arange(0, BLOCK)
    height = tl.minimum(end - first, BLOCK).to(tl.int32)
    x = _load(x_ptr + start, offs_t, offs_k, tl.where(active, height, 0), columns)
    x, of_rows, of_columns = with_amaxes(x, BLOCK)
    if SQUARE:
        amax = tl.max(of_columns, axis=1)[:, None]
        scale, scale_inv = _scale(amax, amax_epsilon, FORM, POWER_2, LARGEST)
        x *= scale
        whole = tl.arange(0, 1)[:, None]
        if row_codes_ptr is not None:
            _store(row_codes_ptr + start, float8_codes(x, FORM, NATIVE), offs_t, offs_k, height, columns)
            at = (matrix * row_blocks + tile).to(tl.int64) * column_blocks + column_block
            tl.store(row_scale_ptr + at + whole, scale_inv, mask=tile < row_blocks)
        if column_codes_ptr is not None:
            column_codes_ptr += matrix.to(tl.int64) * columns * width
            words = transposed_words(x, FORM, NATIVE)
            _store_transposed(column_codes_ptr, words, tile, column_block, columns, width, PACKED)
            at = (matrix * column_blocks + column_block).to(tl.int64) * row_blocks + tile
            tl.store(column_scale_ptr + at + whole, scale_inv, mask=tile < row_blocks)
    else:
        if row_codes_ptr is not None:
            scale, scale_inv = _scale(of_rows, amax_epsilon, FORM, POWER_2, LARGEST)
            _store(row_codes_ptr + start, float8_codes(x * scale, FORM, NATIVE), offs_t, offs_k, height, columns)
            row_scale_ptr += (matrix * column_blocks + column_block).to(tl.int64) * rows + first
            tl.store(row_scale_ptr + offs_t[:, None], scale_inv, mask=offs_t[:, None] < height)
        if column_codes_ptr is not None:
            scale, scale_inv = _scale(of_columns, amax_epsilon, FORM, POWER_2, LARGEST)
            column_codes_ptr += matrix.to(tl.int64) * columns * width
            words = transposed_words(x * scale, FORM, NATIVE)
            _store_transposed(column_codes_ptr, words, tile, column_block, columns, width, PACKED)
            at = (matrix * row_blocks + tile).to(tl.int64) * columns + offs_k
            valid = (tile < row_blocks) & (offs_k < columns)
            tl.store(column_scale_ptr + at[None, :], scale_inv, mask=valid[None, :])


@triton.jit(do_not_specialize=["rows", "row_blocks", "num_groups"])
def dequantize_float8_block_kernel(
    codes_ptr, scale_ptr, out_ptr, offsets_ptr, aligned_ptr, rows, columns, width, row_blocks, num_groups,
    SQUARE: tl.constexpr, TRANSPOSED: tl.constexpr, PACKED: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Values of one tile in the natural order; rows past the sum get 0. Arguments as in `cast_float8_block_kernel`."""
    column_blocks = tl.cdiv(columns, BLOCK)
    matrix, tile, first, end, active = find_block(
        offsets_ptr, aligned_ptr, tl.program_id(0) // column_blocks, rows, row_blocks, num_groups, BLOCK
    )
    column_block = tl.program_id(0) % column_blocks
    offs_k = column_block * BLOCK + tl.arange(0, BLOCK)
    offs_q = 4 * tl.arange(0, PART)
    height = tl.minimum(end - first, BLOCK).to(tl.int32)
    given = tl.where(active, height, 0)
    out_ptr += (matrix.to(tl.int64) * rows + first) * columns
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
        scale_ptr += (matrix * column_blocks + column_block).to(tl.int64) * rows + first
    if TRANSPOSED:
        codes_ptr += matrix.to(tl.int64) * columns * width
        words = _load_transposed(codes_ptr, tile, column_block, columns, width, active, PACKED)
    else:
        codes_ptr += (matrix.to(tl.int64) * rows + first) * columns
    for j in tl.static_range(4):
        row = offs_q + j
        if TRANSPOSED:
            codes = ((words >> (8 * j)) & 0xFF).to(tl.uint8)
        else:
            inside = (row < given)[:, None] & (offs_k < columns)[None, :]
            codes = tl.load(codes_ptr + (row[:, None] * columns + offs_k[None, :]), mask=inside, other=0)
        value = float8_values(codes, FORM, NATIVE)
        if SQUARE or TRANSPOSED:
            value = value * scale
        else:
            value = value * tl.load(scale_ptr + row, mask=row < given, other=1.0)[:, None]
        _store(out_ptr, round_to(value, out_ptr.dtype.element_ty), row, offs_k, height, columns)


@triton.jit
def _load(x_ptr, row, offs_k, height, columns):
    """Part of a tile, 0 outside. [PART, BLOCK]"""
    inside = (row < height)[:, None] & (offs_k < columns)[None, :]
    return tl.load(x_ptr + (row[:, None] * columns + offs_k[None, :]), mask=inside, other=0.0)


@triton.jit
def _store(out_ptr, values, row, offs_k, height, columns):
    inside = (row < height)[:, None] & (offs_k < columns)[None, :]
    tl.store(out_ptr + (row[:, None] * columns + offs_k[None, :]), values, mask=inside)


@triton.jit
def _store_transposed(codes_ptr, words, tile, column_block, columns, width, PACKED: tl.constexpr):
    """The four tensors of `transposed_words` of a tile to its place in codes [columns, width]."""
    word = tl.arange(0, PART)[None, :]
    codes_ptr += column_block.to(tl.int64) * BLOCK * width
    for j in tl.static_range(4):
        row = 4 * tl.arange(0, PART)[:, None] + j
        valid = column_block * BLOCK + row < columns
        if PACKED:
            at = codes_ptr + tile * PART + (row * width + word)
            tl.store(at, words[j].to(tl.int32, bitcast=True), mask=valid & (tile * PART + word < width))
        else:
            for i in tl.static_range(4):
                codes = ((words[j] >> (8 * i)) & 0xFF).to(tl.uint8)
                inside = valid & (tile * BLOCK + 4 * word + i < width)
                tl.store(codes_ptr + tile * BLOCK + (row * width + 4 * word + i), codes, mask=inside)


@triton.jit
def _load_transposed(codes_ptr, tile, column_block, columns, width, active, PACKED: tl.constexpr):
    """What `_store_transposed` stored, [PART, BLOCK]; 0 outside, and if not active."""
    row = tl.arange(0, BLOCK)[:, None]
    valid = active & (column_block * BLOCK + row < columns)
    word = tl.arange(0, PART)[None, :]
    codes_ptr += column_block.to(tl.int64) * BLOCK * width
    if PACKED:
        at = codes_ptr + tile * PART + (row * width + word)
        words = tl.load(at, mask=valid & (tile * PART + word < width), other=0).to(tl.uint32, bitcast=True)
    else:
        words = tl.zeros([BLOCK, PART], tl.uint32)
        for j in tl.static_range(4):
            inside = valid & (tile * BLOCK + 4 * word + j < width)
            codes = tl.load(codes_ptr + tile * BLOCK + (row * width + 4 * word + j), mask=inside, other=0)
            words = words | (codes.to(tl.uint32) << (8 * j))
    return tl.trans(words)


@triton.jit
def _scale(amax, amax_epsilon, FORM: tl.constexpr, POWER_2: tl.constexpr, LARGEST: tl.constexpr):
    """(scale, scale_inv) of float32 amaxes; NaN only where all values are, and counts as 0."""
    amax = tl.maximum(amax, amax_epsilon)
    bits = amax.to(tl.int32, bitcast=True)
    usable = (bits - 1).to(tl.uint32, bitcast=True) < 0x7F7FFFFF  # neither 0 nor Inf
    if POWER_2:
        # Both maxima are 1.75 * 2^n: the exponent is n less amax's, and one less if the mantissa of amax is larger.
        # Above 2^127 the quotient is Inf, for which LARGEST stands, rounded down to 2^127; no float16 is so small.
        SUM: tl.constexpr = 254 + 8 if FORM == "E4M3" else 254 + 15
        exponent = tl.minimum(SUM - ((bits + 0x1FFFFF) >> 23), 254)
        exponent = tl.where(usable, exponent, 127)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = tl.maximum((254 - exponent) << 23, 0x00400000)  # the least is 2^-127, which is subnormal
        return scale, inverse.to(tl.float32, bitcast=True)
    else:
        CODE_MAX: tl.constexpr = 448.0 if FORM == "E4M3" else 57344.0
        scale = tl.div_rn(CODE_MAX, tl.where(usable, amax, 1.0))
        scale = tl.where(usable, tl.where(scale == float("inf"), LARGEST, scale), 1.0)
        return scale, tl.div_rn(1.0, scale)
