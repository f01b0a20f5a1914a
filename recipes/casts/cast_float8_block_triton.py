"""The kernels of `cast_blocks` with float32 scales: both copies of a 128x128 tile from one
read of x, and dequantization.
"""

from recipes.casts.amaxes_triton import with_amaxes
from recipes.casts.float8_elements_triton import (
    exponent_of_largest,
    float8_codes,
    float8_values,
    largest_of,
    mantissa_of_largest,
    transposed_words,
)
from recipes.triton.gates import tl, triton
from recipes.triton.rounding import INTERPRET, round_to
from recipes.triton.row_slots import find_block

BLOCK = tl.constexpr(128)
PART = tl.constexpr(32)


@triton.jit(do_not_specialize=["rows", "row_blocks", "num_groups"])
def cast_float8_block_kernel(
    x_ptr, row_of_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, offsets_ptr, aligned_ptr,
    rows, columns, row_blocks, num_groups, width, amax_epsilon,
    SQUARE: tl.constexpr, POWER_2: tl.constexpr, LARGEST: tl.constexpr, PACKED: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Cast one tile. A copy whose codes are None is not made.

    row_of_ptr: None, or which row of x each row is. rows: of each matrix; row_blocks: of each matrix, in the padded
    buffer if there are offsets. SQUARE: 128x128 blocks. PACKED: column_codes are words; width: of their rows, in words
    or in bytes. FORM, NATIVE: as in `float8_codes`.
    """
    column_blocks = tl.cdiv(columns, BLOCK)
    column_block = tl.program_id(0) % column_blocks
    matrix, tile, first, height, active = find_block(
        offsets_ptr, aligned_ptr, tl.program_id(0) // column_blocks, rows, row_blocks, num_groups, BLOCK
    )
    # Addresses inside a tile fit in 32 bits: its first one takes 64.
    start = (matrix.to(tl.int64) * rows + first) * columns + column_block * BLOCK
    left = columns - column_block * BLOCK
    offs_t = tl.arange(0, BLOCK)
    at_square = (matrix * row_blocks + tile).to(tl.int64) * column_blocks + column_block + tl.arange(0, 1)[:, None]
    if offsets_ptr is not None:
        if height <= 0:  # behind the last group
            _, scale_inv = block_scale(tl.zeros([1, 1], tl.float32), amax_epsilon, FORM, POWER_2, LARGEST)
            if SQUARE and row_codes_ptr is not None:
                tl.store(row_scale_ptr + at_square, scale_inv, mask=tile < row_blocks)
            if column_codes_ptr is not None:
                zeros = tl.zeros([PART, PART], tl.uint32)
                _store_columns(
                    column_codes_ptr, column_scale_ptr, (zeros, zeros, zeros, zeros), scale_inv,
                    matrix, tile, column_block, columns, width, row_blocks, SQUARE, PACKED,
                )  # fmt: skip
            return
    given = tl.where(active, height, 0)
    if row_of_ptr is None:
        x = _load(x_ptr + start, offs_t, given, left, columns)
    else:
        x = _gather(x_ptr + column_block.to(tl.int64) * BLOCK, row_of_ptr + first, given, left, columns)
    wide, of_rows, of_columns = with_amaxes(x, BLOCK)
    if SQUARE:
        of_rows = tl.max(of_columns, axis=1)[:, None]
        of_columns = of_rows
    if row_codes_ptr is not None:
        scale, scale_inv = block_scale(of_rows, amax_epsilon, FORM, POWER_2, LARGEST)
        codes = float8_codes(_scaled(x, wide, scale, POWER_2), FORM, NATIVE)
        _store(row_codes_ptr + start, codes, offs_t, height, left, columns)
        if SQUARE:
            tl.store(row_scale_ptr + at_square, scale_inv, mask=tile < row_blocks)
        else:
            row_scale_ptr += (matrix * column_blocks + column_block).to(tl.int64) * rows + first
            tl.store(row_scale_ptr + offs_t[:, None], scale_inv, mask=offs_t[:, None] < height)
    if column_codes_ptr is not None:
        scale, scale_inv = block_scale(of_columns, amax_epsilon, FORM, POWER_2, LARGEST)
        words = transposed_words(_scaled(x, wide, scale, POWER_2), FORM, NATIVE)
        _store_columns(
            column_codes_ptr, column_scale_ptr, words, scale_inv,
            matrix, tile, column_block, columns, width, row_blocks, SQUARE, PACKED,
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows", "row_blocks", "num_groups"])
def dequantize_float8_block_kernel(
    codes_ptr, scale_ptr, out_ptr, offsets_ptr, aligned_ptr, rows, columns, row_blocks, num_groups, width,
    SQUARE: tl.constexpr, COLUMNWISE: tl.constexpr, PACKED: tl.constexpr,
    FORM: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Values of one tile in the natural order; rows past the sum get 0. Arguments as in `cast_float8_block_kernel`."""
    column_blocks = tl.cdiv(columns, BLOCK)
    matrix, tile, first, height, active = find_block(
        offsets_ptr, aligned_ptr, tl.program_id(0) // column_blocks, rows, row_blocks, num_groups, BLOCK
    )
    column_block = tl.program_id(0) % column_blocks
    offs_k = column_block * BLOCK + tl.arange(0, BLOCK)
    left = columns - column_block * BLOCK
    offs_q = 4 * tl.arange(0, PART)
    given = tl.where(active, height, 0)
    start = (matrix.to(tl.int64) * rows + first) * columns + column_block * BLOCK
    if SQUARE:
        if COLUMNWISE:
            at = (matrix * column_blocks + column_block).to(tl.int64) * row_blocks + tile
        else:
            at = (matrix * row_blocks + tile).to(tl.int64) * column_blocks + column_block
        scale = tl.load(scale_ptr + at, mask=active, other=1.0)
    elif COLUMNWISE:
        at = (matrix * row_blocks + tile).to(tl.int64) * columns + offs_k
        scale = tl.load(scale_ptr + at, mask=active & (offs_k < columns), other=1.0)
    else:
        scale_ptr += (matrix * column_blocks + column_block).to(tl.int64) * rows + first
    if COLUMNWISE:
        codes_ptr += matrix.to(tl.int64) * columns * width
        words = _load_transposed(codes_ptr, tile, column_block, columns, width, active, PACKED)
    for j in tl.static_range(4):
        row = offs_q + j
        if COLUMNWISE:
            codes = ((words >> (8 * j)) & 0xFF).to(tl.uint8)
        else:
            codes = _load(codes_ptr + start, row, given, left, columns)
        value = float8_values(codes, FORM, NATIVE)
        if SQUARE or COLUMNWISE:
            value = value * scale
        else:
            value = value * tl.load(scale_ptr + row, mask=row < given, other=1.0)[:, None]
        _store(out_ptr + start, round_to(value, out_ptr.dtype.element_ty), row, height, left, columns)


# Plus -0.0 changes nothing; sm_80 has no product alone.
SCALE_PAIR = tl.constexpr("""{
    .reg .b32 product, none;
    mov.b32 none, 0x80008000;
    fma.rn.bf16x2 product, $2, $3, none;
    shl.b32 $0, product, 16;
    and.b32 $1, product, 0xffff0000;
}""")


@triton.jit
def _scaled(x, wide, scale, POWER_2: tl.constexpr):
    """fl(x * scale) in float32. wide: x in float32.

    A bfloat16 number times a power of two is one too, unless it is so small that its code is 0. As pairs the numbers
    take half the registers until they are cast, and then more programs run at once.
    """
    if POWER_2 and x.dtype == tl.bfloat16 and not INTERPRET:
        x, scale = tl.broadcast(x, scale.to(tl.bfloat16))
        return tl.inline_asm_elementwise(
            SCALE_PAIR, "=r,=r,r,r", [x, scale], dtype=tl.float32, is_pure=True, pack=2
        )  # fmt: skip
    else:
        return wide * scale


@triton.jit
def _load(x_ptr, row, height, left, columns):
    """Rows of a tile of `height` rows and `left` columns that begins at x_ptr, 0 outside. [row, BLOCK]"""
    offs_k = tl.arange(0, BLOCK)
    inside = (row < height)[:, None] & (offs_k < left)[None, :]
    return tl.load(x_ptr + (row * columns)[:, None] + offs_k[None, :], mask=inside, other=0)


@triton.jit
def _gather(x_ptr, row_of_ptr, height, left, columns):
    """The same of rows 0 to BLOCK of a tile, of which row_of_ptr says which rows they are from x_ptr on."""
    row, offs_k = tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    row_of = tl.load(row_of_ptr + row, mask=row < height, other=0)
    inside = (row < height)[:, None] & (offs_k < left)[None, :]
    return tl.load(x_ptr + (row_of * columns)[:, None] + offs_k[None, :], mask=inside, other=0)


@triton.jit
def _store(out_ptr, values, row, height, left, columns):
    offs_k = tl.arange(0, BLOCK)
    inside = (row < height)[:, None] & (offs_k < left)[None, :]
    tl.store(out_ptr + (row * columns)[:, None] + offs_k[None, :], values, mask=inside)


@triton.jit
def _store_columns(
    column_codes_ptr, column_scale_ptr, words, scale_inv, matrix, tile, column_block, columns, width, row_blocks,
    SQUARE: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """The columnwise copy of a tile: the four tensors of `transposed_words`, and scale_inv [1, BLOCK] or [1, 1]."""
    _store_transposed(
        column_codes_ptr + matrix.to(tl.int64) * columns * width, words, tile, column_block, columns, width, PACKED
    )
    if SQUARE:
        at = (matrix * tl.cdiv(columns, BLOCK) + column_block).to(tl.int64) * row_blocks + tile + tl.arange(0, 1)
        valid = tl.arange(0, 1) + tile < row_blocks
    else:
        at = (matrix * row_blocks + tile).to(tl.int64) * columns + column_block * BLOCK + tl.arange(0, BLOCK)
        valid = (tile < row_blocks) & (column_block * BLOCK + tl.arange(0, BLOCK) < columns)
    tl.store(column_scale_ptr + at[None, :], scale_inv, mask=valid[None, :])


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
def block_scale(amax, amax_epsilon, FORM: tl.constexpr, POWER_2: tl.constexpr, LARGEST: tl.constexpr):
    """(scale, scale_inv) of float32 amaxes; NaN only where all values are, and counts as 0."""
    amax = tl.maximum(amax, amax_epsilon)
    bits = amax.to(tl.int32, bitcast=True)
    usable = (bits - 1).to(tl.uint32, bitcast=True) < 0x7F7FFFFF  # neither 0 nor Inf
    if POWER_2:
        # Of a largest number m * 2^n the exponent is n less amax's, and one less if the mantissa of amax is above m.
        # Above 2^127 the quotient is Inf, for which LARGEST stands, rounded down to 2^127; no float16 is so small.
        SUM: tl.constexpr = 254 + exponent_of_largest(FORM)
        CARRY: tl.constexpr = 0x7FFFFF - mantissa_of_largest(FORM)
        exponent = tl.minimum(SUM - ((bits + CARRY) >> 23), 254)
        exponent = tl.where(usable, exponent, 127)
        scale = (exponent << 23).to(tl.float32, bitcast=True)
        inverse = tl.maximum((254 - exponent) << 23, 0x00400000)  # the least is 2^-127, which is subnormal
        return scale, inverse.to(tl.float32, bitcast=True)
    else:
        CODE_MAX: tl.constexpr = largest_of(FORM)
        scale = tl.div_rn(CODE_MAX, tl.where(usable, amax, 1.0))
        scale = tl.where(usable, tl.where(scale == float("inf"), LARGEST, scale), 1.0)
        return scale, tl.div_rn(1.0, scale)
