"""The Triton kernels of `cast_nvfp4`, which says what they compute and launches them.

A tile has 16 BLOCK_R rows of one group and BLOCK_C columns. Few of its blocks are at work at a time, in a loop: so many
programs run side by side, and their instructions stay in the cache.

offsets_ptr is None where groups have equally many rows. ROWS: rows of a group, or with offsets of x; BLOCKS: blocks of
16 of these with the padding. Columnwise codes are written as int64, the 16 codes of a block, to [.., K, P / 16].
"""

import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from recipes.kernels.nvfp4_blocks_triton import (
    butterflies,
    cast_blocks,
    encoding,
    hadamard,
    largest_bits,
    random_words,
    signs_of_pairs,
    sums_of_pairs,
)
from recipes.kernels.rounding import INTERPRET, widen, widen_pairs
from recipes.kernels.row_tiles import find_tile

# Of two pairs of bfloat16 the larger magnitudes, NaN above all, with some sign.
LARGER_PAIR = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
STORE_BYTE = tl.constexpr("st.global.u8 [$1], $2; mov.b32 $0, 0;")
STORE_CODES = tl.constexpr("st.global.b64 [$1], $2; mov.b32 $0, 0;")
STORE_BYTE_IF = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.u8 [$1], $2; mov.b32 $0, 0; }")
STORE_CODES_IF = tl.constexpr("{ .reg .pred p; setp.ne.b32 p, $3, 0; @p st.global.b64 [$1], $2; mov.b32 $0, 0; }")


@triton.jit
def _tile(offsets_ptr, aligned_ptr, slot, ROWS, num_groups, BLOCKS, BLOCK_R: tl.constexpr):
    """(group, row in the group, first row of x, end of the rows that count, end of x's rows, first block of the
    transposed copy, end of its blocks, group of that copy)."""
    BLOCK_M: tl.constexpr = 16 * BLOCK_R
    if offsets_ptr is None:
        group = 0
        if num_groups != 1:
            slots = tl.cdiv(ROWS, BLOCK_M)
            group = slot // slots
            slot = slot % slots
        row = slot * BLOCK_M
        begin = group * ROWS
        first_block = row // 16
        end_block = tl.where(group < num_groups, BLOCKS, 0)
        row_end = begin + ROWS
        end = row_end
        of_columns = group
    else:
        # The tail takes the padding at the end of the copy too, which may be longer than the rows past the sum.
        group, first, row_end = find_tile(offsets_ptr, slot, ROWS + 16 * num_groups, num_groups, BLOCK_M)
        begin = tl.load(offsets_ptr + group)
        aligned = tl.load(aligned_ptr + group)
        row = first - begin
        first_block = (aligned + row) // 16
        end_block = tl.load(aligned_ptr + group + 1, mask=group < num_groups, other=16 * BLOCKS) // 16
        row_end = tl.minimum(row_end, ROWS)
        end = tl.where(group < num_groups, row_end, first)  # the tail counts as zeros
        of_columns = 0
    return group, row, begin + row, end, row_end, first_block, end_block, of_columns


@triton.jit
def _load(x_ptr, mask, FULL: tl.constexpr):
    """0 where mask is false, which is nowhere if FULL."""
    if FULL:
        x = tl.load(x_ptr)
    else:
        x = tl.load(x_ptr, mask=mask, other=0)
    if x.dtype == tl.uint32:
        return x
    else:
        return widen(x)


@triton.jit
def _store(ptr, x, mask, FULL: tl.constexpr):
    """Stores x, bytes or int64, where mask is true, or everywhere if FULL. A thread writes what it has itself; Triton
    would first have threads exchange it. Neighbours fill the 32 bytes that are a unit of memory."""
    if INTERPRET:
        tl.store(ptr, x, mask=None if FULL else mask)
    else:
        BYTE: tl.constexpr = x.dtype == tl.uint8
        if BYTE:
            x = x.to(tl.int32)
        if FULL:
            tl.inline_asm_elementwise(
                STORE_BYTE if BYTE else STORE_CODES, "=r,l,r" if BYTE else "=r,l,l", [ptr.to(tl.int64), x],
                dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip
        else:
            tl.inline_asm_elementwise(
                STORE_BYTE_IF if BYTE else STORE_CODES_IF, "=r,l,r,r" if BYTE else "=r,l,l,r",
                [ptr.to(tl.int64), x, mask.to(tl.int32)], dtype=tl.int32, is_pure=False, pack=1,
            )  # fmt: skip


@triton.jit
def _beside(index, x):
    """index, broadcast to the shape of x, where x is: what is computed from it will be there too."""
    index = index.to(tl.int32)
    if INTERPRET:
        return index + tl.zeros(x.shape, tl.int32)
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [index, x], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _load_row_blocks(
    x_ptr, rows, columns, K, R: tl.constexpr, B: tl.constexpr, PAIRS: tl.constexpr, FULL: tl.constexpr
):
    """Of R rows of B blocks from x_ptr on, the first and the last 8 columns of each block, [R, B, 8], or if PAIRS words
    of two bfloat16 numbers, [R, B, 4]; 0 from row `rows` and column `columns` on."""
    N: tl.constexpr = 4 if PAIRS else 8
    if PAIRS:
        x_ptr = x_ptr.to(tl.pointer_type(tl.uint32))
        columns = columns // 2
        K = K // 2
    row = tl.arange(0, R)[:, None]
    column = tl.arange(0, N * B)[None, :]
    column += column // N * N
    at = row * K + column
    low = _load(x_ptr + at, (row < rows) & (column < columns), FULL)
    high = _load(x_ptr + N + at, (row < rows) & (column + N < columns), FULL)
    return tl.reshape(low, [R, B, N]), tl.reshape(high, [R, B, N])


@triton.jit
def _halves(words):
    """The two bfloat16 numbers in each word, in float32."""
    return (words << 16).to(tl.float32, bitcast=True), (words & 0xFFFF0000).to(tl.float32, bitcast=True)


@triton.jit
def _in_eight(x):
    """x [R, B, 8], or words [R, B, 4], as eight tensors [R, B] in float32."""
    if x.dtype == tl.uint32:
        w0, w1, w2, w3 = _in_four(x)
        return _halves(w0) + _halves(w1) + _halves(w2) + _halves(w3)
    else:
        even, odd = tl.split(tl.reshape(widen_pairs(x), [x.shape[0], x.shape[1], 4, 2]))
        x0, x2, x4, x6 = _in_four(even)
        x1, x3, x5, x7 = _in_four(odd)
        return x0, x1, x2, x3, x4, x5, x6, x7


@triton.jit
def _signs_of_eight(words):
    """What `cast_blocks` takes, of words [R, B, 4] of two bfloat16 numbers."""
    w0, w1, w2, w3 = _in_four(words)
    return signs_of_pairs(w0, w1, w2, w3)


@triton.jit
def _in_four(x):
    """x [R, B, 4] as four tensors [R, B]."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def _load_column_blocks(x_ptr, row, column, rows, columns, K, FULL: tl.constexpr):
    """The 16 numbers below each of the first rows and columns [..] of blocks, from x_ptr on, in float32; 0 from row
    `rows` and column `columns` on."""
    at = row * K + column
    xs = ()
    for i in tl.static_range(16):
        x = widen_pairs(_load(x_ptr + (i * K + at), (row + i < rows) & (column < columns), FULL))
        xs = xs + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return xs


@triton.jit
def _largest_of_eight(low, high):
    """[R, B]: the bits of max |x| over low and high [R, B, 8]; NaN if one is."""
    if low.dtype == tl.uint32 and not INTERPRET and cuda_capability_geq(9):  # two by two
        word = tl.reduce(_larger_pair(low, high), 2, _larger_pair)
        return tl.maximum((word & 0x7FFF) << 16, word & 0x7FFF0000).to(tl.int32, bitcast=True)
    else:
        return largest_bits(_in_eight(low) + _in_eight(high))


@triton.jit
def _larger_pair(a, b):
    return tl.inline_asm_elementwise(LARGER_PAIR, "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _cast_rows(
    x_ptr, seed, codes_ptr, scale_ptr, row_amax_ptr, encode, decode, row, rows, rows_to_write, first_column,
    K: tl.constexpr, SQUARE: tl.constexpr, NATIVE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, R: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The rowwise copy of a tile, R rows at a time. Of it count the first `rows` rows; row_amax: each its own amax."""
    B: tl.constexpr = BLOCK_C // 16
    BLOCKS: tl.constexpr = (K + 15) // 16
    BYTES: tl.constexpr = (K + 1) // 2
    PAIRS: tl.constexpr = x_ptr.dtype.element_ty == tl.bfloat16 and K % 16 == 0
    STOCHASTIC: tl.constexpr = seed is not None
    lane = tl.arange(0, R)[:, None]
    block = tl.arange(0, B)[None, :]
    for start in range(0, 16 * BLOCK_R if FULL else tl.minimum(16 * BLOCK_R, rows_to_write), R):
        if row_amax_ptr is not None:
            own_encode, own_decode = encoding(tl.load(row_amax_ptr + start + lane, mask=start + lane < rows, other=0.0))
        else:
            own_encode, own_decode = encode, decode
        low, high = _load_row_blocks(x_ptr, rows - start, K - first_column, K, R, B, PAIRS, FULL)
        amax = _largest_of_eight(low, high)
        if SQUARE:
            amax = tl.max(tl.reshape(amax, [R // 16, 16, B]), axis=1, keep_dims=True)
            amax = tl.reshape(tl.broadcast_to(amax, [R // 16, 16, B]), [R, B])
        random = (0, 0, 0, 0)
        if STOCHASTIC:
            of_block = _beside(first_column // 16 + block, amax)
            random = random_words(seed, of_block, _beside(row + start + lane, amax), 0)
        xs = _in_eight(low) + _in_eight(high)
        signs = (None, None)
        if PAIRS:
            signs = (_signs_of_eight(low), _signs_of_eight(high))
        code, scale = cast_blocks(xs, amax, own_encode, own_decode, random, signs, 1.0, STOCHASTIC, NATIVE)
        at = lane * BLOCKS + block
        mask = (start + lane < rows_to_write) & (first_column // 16 + block < BLOCKS)
        _store(scale_ptr + at, scale, mask, FULL)
        if K % 16 == 0:
            _store(codes_ptr.to(tl.pointer_type(tl.int64)) + at, code, mask, FULL)
        else:
            byte = 8 * block[:, :, None] + tl.arange(0, 8)[None, None, :]
            mask = (start + lane < rows_to_write)[:, :, None] & (first_column // 2 + byte < BYTES)
            code = ((code[:, :, None] >> (8 * (byte % 8))) & 0xFF).to(tl.uint8)
            tl.store(codes_ptr + (lane * BYTES)[:, :, None] + byte, code, mask=mask)
        x_ptr += R * K
        codes_ptr += R * BYTES
        scale_ptr += R * BLOCKS


@triton.jit
def _cast_columns(
    x_ptr, seed, codes_ptr, scale_ptr, encode, decode, row, rows, blocks, first_column, BLOCKS,
    K: tl.constexpr, RHT: tl.constexpr, SQUARE: tl.constexpr, NATIVE: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, C: tl.constexpr, FULL: tl.constexpr,
):  # fmt: skip
    """The columnwise copy of a tile, C columns at a time. Of it count the first `rows` rows, in `blocks` blocks.

    A warp has 16 columns of each block of rows, [R, C / 16, 16]: so it reads and writes whole units of 32 bytes.
    """
    R: tl.constexpr = BLOCK_R
    STOCHASTIC: tl.constexpr = seed is not None
    block = tl.arange(0, R)[:, None, None]
    lane = 16 * tl.arange(0, C // 16)[None, :, None] + tl.arange(0, 16)[None, None, :]
    for start in range(0, BLOCK_C if FULL else tl.minimum(BLOCK_C, K - first_column), C):
        column = first_column + start
        xs = _load_column_blocks(x_ptr, 16 * block, lane, rows, K - column, K, FULL)
        if RHT:
            xs, amax = hadamard(xs)
        else:
            amax = largest_bits(xs)
        if SQUARE:
            amax = tl.broadcast_to(tl.max(amax, axis=2, keep_dims=True), [R, C // 16, 16])
        random = (0, 0, 0, 0)
        if STOCHASTIC:
            random = random_words(seed, _beside(row // 16 + block, amax), _beside(column + lane, amax), 1)
        code, scale = cast_blocks(
            xs, amax, encode, decode, random, (None, None), 0.25 if RHT else 1.0, STOCHASTIC, NATIVE
        )  # fmt: skip
        at = lane.to(tl.int64) * BLOCKS + block
        mask = (block < blocks) & (column + lane < K)
        _store(codes_ptr + at, code, mask, FULL)
        _store(scale_ptr + at, scale, mask, FULL)
        x_ptr += C
        codes_ptr += C * BLOCKS
        scale_ptr += C * BLOCKS


@triton.jit
def cast_nvfp4_kernel(
    x_ptr, offsets_ptr, aligned_ptr, row_amax_ptr, column_amax_ptr, seed_ptr,
    row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, ROWS, num_groups, BLOCKS, K: tl.constexpr,
    ROW_SCALED: tl.constexpr, RHT: tl.constexpr, SQUARE: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, ROWS_AT_ONCE: tl.constexpr, COLUMNS_AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Amaxes are None for a copy that is not made, the seed for rounding to nearest. SQUARE: blocks of 16x16.
    Neighbours on the grid's first axis are so in the transposed copy. K is a constant: so are the distances of rows.
    """
    slot = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    column = tl.program_id(1) * BLOCK_C
    group, row, first, end, row_end, first_block, end_block, of_columns = _tile(
        offsets_ptr, aligned_ptr, slot, ROWS, num_groups, BLOCKS, BLOCK_R
    )  # fmt: skip
    if first_block < end_block:
        from_row = first.to(tl.int64)
        rows, rows_to_write = (end - first).to(tl.int32), (row_end - first).to(tl.int32)
        # The second copy finds x in the cache. Most tiles are whole, and need no masks.
        is_whole = (rows >= 16 * BLOCK_R) & (column + BLOCK_C <= K)
        x_ptr += from_row * K + column
        seed = None
        if seed_ptr is not None:
            seed = tl.load(seed_ptr)
        if row_amax_ptr is not None:
            encode, decode = 1.0, 1.0
            own_amax_ptr = None
            if ROW_SCALED:
                own_amax_ptr = row_amax_ptr + from_row
            else:
                encode, decode = encoding(tl.load(row_amax_ptr + group, mask=group < num_groups, other=0.0))
            row_codes_ptr += from_row * ((K + 1) // 2) + column // 2
            row_scale_ptr += from_row * ((K + 15) // 16) + column // 16
            if is_whole:
                _cast_rows(
                    x_ptr, seed, row_codes_ptr, row_scale_ptr, own_amax_ptr, encode, decode, row, rows,
                    rows_to_write, column, K, SQUARE, NATIVE, BLOCK_R, BLOCK_C, ROWS_AT_ONCE, True,
                )  # fmt: skip
            else:
                _cast_rows(
                    x_ptr, seed, row_codes_ptr, row_scale_ptr, own_amax_ptr, encode, decode, row, rows,
                    rows_to_write, column, K, SQUARE, NATIVE, BLOCK_R, BLOCK_C, ROWS_AT_ONCE, False,
                )  # fmt: skip
        if column_amax_ptr is not None:
            encode, decode = encoding(tl.load(column_amax_ptr + group, mask=group < num_groups, other=0.0))
            place = (of_columns.to(tl.int64) * K + column) * BLOCKS + first_block
            column_codes_ptr += place
            column_scale_ptr += place
            blocks = (end_block - first_block).to(tl.int32)
            if is_whole:
                _cast_columns(
                    x_ptr, seed, column_codes_ptr, column_scale_ptr, encode, decode, row, rows, blocks, column,
                    BLOCKS, K, RHT, SQUARE, NATIVE, BLOCK_R, BLOCK_C, COLUMNS_AT_ONCE, True,
                )  # fmt: skip
            else:
                _cast_columns(
                    x_ptr, seed, column_codes_ptr, column_scale_ptr, encode, decode, row, rows, blocks, column,
                    BLOCKS, K, RHT, SQUARE, NATIVE, BLOCK_R, BLOCK_C, COLUMNS_AT_ONCE, False,
                )  # fmt: skip


@triton.jit
def _magnitude_or_zero(x):
    """|x| for maxima that ignore NaN: the GPU's do by themselves."""
    if INTERPRET:
        x = tl.where(x == x, x, 0.0)
    return tl.abs(x)


@triton.jit
def _add_to_amax(amax_ptr, amax, mask):
    """Numbers that are not negative are ordered as their bits."""
    tl.atomic_max(amax_ptr.to(tl.pointer_type(tl.int32)), amax.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def amax_nvfp4_kernel(
    x_ptr, offsets_ptr, aligned_ptr, row_amax_ptr, column_amax_ptr, ROWS, num_groups, BLOCKS, K,
    ROW_SCALED: tl.constexpr, RHT: tl.constexpr, TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Raises the amaxes, which are zeros before, to those of TILES tiles beside each other."""
    slot = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    first_column = tl.program_id(1) * (BLOCK_C * TILES)
    group, _, first, end, _, _, _, _ = _tile(offsets_ptr, aligned_ptr, slot, ROWS, num_groups, BLOCKS, BLOCK_R)
    if (first < end) & (group < num_groups):
        of_rows = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        of_columns = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for tile in range(TILES):
            column = first_column + tile * BLOCK_C
            at = x_ptr + first.to(tl.int64) * K + column
            rows, columns = 16 * tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_C)[None, :]
            xs = _load_column_blocks(at, rows, columns, end - first, K - column, K, False)
            if row_amax_ptr is not None:
                for i in tl.static_range(16):
                    if ROW_SCALED:
                        rows = first + 16 * tl.arange(0, BLOCK_R) + i
                        _add_to_amax(row_amax_ptr + rows, tl.max(_magnitude_or_zero(xs[i]), axis=1), rows < end)
                    else:
                        of_rows = tl.maximum(of_rows, _magnitude_or_zero(xs[i]))
            if column_amax_ptr is not None:
                if RHT:
                    xs = sums_of_pairs(butterflies(xs, 0, 3))
                for i in tl.static_range(len(xs)):
                    x = xs[i].to(tl.float32, bitcast=True) if RHT else xs[i]
                    of_columns = tl.maximum(of_columns, _magnitude_or_zero(x))
        if row_amax_ptr is not None and not ROW_SCALED:
            _add_to_amax(row_amax_ptr + group, tl.max(of_rows), None)
        if column_amax_ptr is not None:
            amax = tl.max(of_columns)
            if RHT:
                amax *= 0.25
            _add_to_amax(column_amax_ptr + group, amax, None)
