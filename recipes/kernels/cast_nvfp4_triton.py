"""The Triton kernels of `cast_nvfp4`, which says what they compute and launches them.

A tile has 16 BLOCK_R rows of one group and BLOCK_C columns, held as 16 tensors [BLOCK_R, BLOCK_C]: the i-th has row i
of each block of 16 rows. So butterflies, amaxes and packing along the rows stay in one thread.

offsets_ptr is None where groups have equally many rows. ROWS: rows of x; P: rows of a group with the padding, or of the
whole buffer with offsets. Columnwise codes are written as int64, the 16 codes of a block, to [.., K, P / 16].
"""

import triton
import triton.language as tl

from recipes.formats import E2M1_VALUES, E4M3
from recipes.kernels.float8_triton import float8_codes
from recipes.kernels.hadamard import SIGNS as _SIGNS
from recipes.kernels.random_triton import philox
from recipes.kernels.rounding import INTERPRET, widen
from recipes.kernels.row_tiles import find_tile

RANGE = tl.constexpr(E2M1_VALUES[-1] * E4M3.max)
ONE_SIXTH = tl.constexpr(1.0 / 6.0)
SIGNS = tl.constexpr(_SIGNS)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: see `e2m1_codes_ref`
# Eight words with its bits in place of eight codes, summed up in int32: what is too much in a word of codes.
SURPLUS = tl.constexpr(0x4B400000 * 0x11111111 & 0xFFFFFFFF)
STOCHASTIC_SURPLUS = tl.constexpr(0x4B4000 * 0x11111111 & 0xFFFFFFFF)


@triton.jit
def _tile(offsets_ptr, aligned_ptr, slot, ROWS, num_groups, P, BLOCK_R: tl.constexpr):
    """(group, row in the group, first row of x, end of x's rows, first block of P, end of its blocks, group of P)."""
    BLOCK_M: tl.constexpr = 16 * BLOCK_R
    if offsets_ptr is None:
        rows = ROWS // num_groups
        slots = tl.cdiv(rows, BLOCK_M)
        group = slot // slots
        row = slot % slots * BLOCK_M
        begin = group * rows
        first_block = row // 16
        end_block = P // 16
        end = begin + rows
        of_columns = group
    else:
        # The tail takes the padding at the end of P too, which may be longer than the rows past the sum.
        group, first, end = find_tile(offsets_ptr, slot, ROWS + 16 * num_groups, num_groups, BLOCK_M)
        begin = tl.load(offsets_ptr + group)
        aligned = tl.load(aligned_ptr + group)
        row = first - begin
        first_block = (aligned + row) // 16
        end_block = tl.load(aligned_ptr + group + 1, mask=group < num_groups, other=P) // 16
        of_columns = 0
    return group, row, begin + row, end, first_block, end_block, of_columns


@triton.jit
def _load_tile(x_ptr, first, end, ROWS, columns, K, BLOCK_R: tl.constexpr):
    """The 16 tensors of a tile in float32, 0 outside of the group."""
    xs = ()
    for i in tl.static_range(16):
        x = _load_row(x_ptr, first + i, end, ROWS, columns, K, BLOCK_R)
        xs = xs + (x,)  # type: ignore[assignment]  # noqa: RUF005
    return xs


@triton.jit
def _load_row(x_ptr, first, end, ROWS, columns, K, BLOCK_R: tl.constexpr):
    """Rows first, first + 16, ... in float32, 0 outside of the group."""
    row = first + 16 * tl.arange(0, BLOCK_R)
    inside = ((row < end) & (row < ROWS))[:, None] & (columns < K)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64)[:, None] * K + columns[None, :], mask=inside, other=0)
    return widen(x).to(tl.float32)


@triton.jit
def _hadamard(xs):
    """`hadamard_ref` of the 16 tensors, without its factor of 1/4."""
    ys = ()
    for i in tl.static_range(16):
        # Not -x, which Triton reads as 0 - x: that loses the sign of a zero.
        ys = ys + (xs[i] * SIGNS[i],)  # noqa: RUF005
    for stage in tl.static_range(4):
        zs = ()
        for i in tl.static_range(16):
            if (i >> stage) % 2 == 0:
                z = ys[i] + ys[i + (1 << stage)]
            else:
                z = ys[i - (1 << stage)] - ys[i]
            zs = zs + (z,)  # noqa: RUF005
        ys = zs
    return ys


@triton.jit
def _max_of_two(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _max_of_tensors(xs):
    """max |x| over the 16 tensors; NaN if one is."""
    largest = tl.abs(xs[0])
    for i in tl.static_range(1, 16):
        largest = _max_of_two(largest, tl.abs(xs[i]))
    return largest


@triton.jit
def _in_words(x):
    """x [R, C] as [R, C / 16, 2, 8]: blocks, words of codes, codes."""
    return tl.reshape(x, [x.shape[0], x.shape[1] // 16, 2, 8])


@triton.jit
def _in_words_each(xs):
    return _in_words(xs[0]), _in_words(xs[1]), _in_words(xs[2]), _in_words(xs[3])


@triton.jit
def _max_of_columns(x):
    """[R, C / 16]: max |x| over the blocks of x [R, C / 16, 2, 8]; NaN if one is."""
    if INTERPRET:  # whose reductions by a function are slow; NaN has the largest bits
        largest = tl.max(tl.max(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=3), axis=2)
        return largest.to(tl.float32, bitcast=True)
    else:
        return tl.reduce(tl.reduce(tl.abs(x), 3, _max_of_two), 2, _max_of_two)


@triton.jit
def _encode(amax):
    """S_enc * fl(1/6) and S_dec of float32 amaxes."""
    special = (amax == 0) | (amax == float("inf"))
    divisor = tl.where(special, 1.0, amax)
    encode = tl.minimum(tl.div_rn(tl.full(amax.shape, RANGE, tl.float32), divisor), FLOAT32_MAX)
    encode = tl.where(special, 1.0, encode)
    return encode * ONE_SIXTH, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), encode)


@triton.jit
def _reciprocal(x):
    """fl(1 / x), Inf for 0."""
    if INTERPRET:
        return tl.where(x == 0, float("inf"), tl.div_rn(1.0, tl.where(x == 0, 1.0, x)))
    else:  # cheaper than a division
        return tl.inline_asm_elementwise("rcp.rn.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _scales(amax, encode, decode, NATIVE: tl.constexpr):
    """E4M3 scales (uint8) of block amaxes, and the factors fl(e / 2). A NaN amax: 0x7F."""
    if NATIVE and not INTERPRET:  # the conversion saturates by itself
        scale = (amax * encode).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        scale = float8_codes(amax * encode, "E4M3", NATIVE)
    # The byte's fields, in a float32's place, are those of the value times 2^-120.
    value = (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return scale, tl.minimum(_reciprocal(value * decode), FLOAT32_MAX) * 0.5


# Saturating additions clamp for nothing. Without .rn ptxas would contract them with the product before.
_POSITION = """{{
            .reg .f32 a, b, c;
            add.rn.sat.f32 a, $1, 0f00000000;
            add.rn.sat.f32 b, $1, 0fBF800000;
            add.rn.sat.f32 c, $1, 0fC0000000;
            fma.rn.f32 a, a, {four}, 0f4B400000;
            fma.rn.f32 a, b, {two}, a;
            {add_c};
            mov.b32 $0, a;
            }}"""
POSITION = tl.constexpr(_POSITION.format(four="0f40800000", two="0f40000000", add_c="add.rn.f32 a, c, a"))
POSITION_OF_256 = tl.constexpr(
    _POSITION.format(four="0f44800000", two="0f44000000", add_c="fma.rn.f32 a, c, 0f43800000, a")
)


@triton.jit
def _positions(h, STOCHASTIC: tl.constexpr):
    """The bits of ROUND + the position of h >= 0 on the axis of codes; of 256 positions if STOCHASTIC (int32)."""
    if INTERPRET:
        STEPS: tl.constexpr = 256.0 if STOCHASTIC else 1.0
        position = tl.minimum(h, 1.0) * (4.0 * STEPS) + ROUND
        position = tl.minimum(tl.maximum(h - 1.0, 0.0), 1.0) * (2.0 * STEPS) + position
        position = tl.minimum(tl.maximum(h - 2.0, 0.0), 1.0) * STEPS + position
        return position.to(tl.int32, bitcast=True)
    else:
        ASM: tl.constexpr = POSITION_OF_256 if STOCHASTIC else POSITION
        return tl.inline_asm_elementwise(ASM, "=r,f", [h], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _magnitudes(h, random, i: tl.constexpr, STOCHASTIC: tl.constexpr):
    """E2M1 magnitudes 0 to 7 of 2 h, plus what `_without_surplus` takes off again (int32)."""
    position = _positions(h, STOCHASTIC)
    if STOCHASTIC:
        byte = (random[i // 4] >> (8 * (i % 4))) & 0xFF
        position = (position + byte.to(tl.int32)) >> 8
    return position


@triton.jit
def _shift_in(word, bits):
    """word (uint32) with the four highest bits of `bits` pushed in from below."""
    if INTERPRET:
        return (word << 4) | (bits >> 28)
    else:  # one instruction, which ptxas does not find by itself
        return tl.inline_asm_elementwise(
            "shf.l.wrap.b32 $0, $1, $2, 4;", "=r,r,r", [bits, word], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def _without_surplus(word, STOCHASTIC: tl.constexpr):
    """Eight magnitudes in a word (int32), each in four bits."""
    if STOCHASTIC:
        return word - STOCHASTIC_SURPLUS
    else:
        return word - SURPLUS


@triton.jit
def _random(seed_ptr, row, columns, STREAM: tl.constexpr, BLOCK_R: tl.constexpr):
    """Four words of random bits for each block of 16 rows and each column."""
    c0 = (row // 16 + tl.arange(0, BLOCK_R)).to(tl.uint32)[:, None] + tl.zeros_like(columns).to(tl.uint32)[None, :]
    c1 = tl.zeros_like(c0) + columns.to(tl.uint32)[None, :]
    return philox(tl.load(seed_ptr), c0, c1, tl.full(c0.shape, STREAM, tl.uint32))


@triton.jit
def _or(a, b):
    return a | b


@triton.jit
def _packed(x, magnitudes, amax, STOCHASTIC: tl.constexpr):
    """Words [R, C / 16, 2] of the magnitudes with the signs of x, both [R, C / 16, 2, 8]; 0 where amax is NaN."""
    place = 4 * tl.arange(0, 8)[None, None, None, :]
    word = _without_surplus(tl.sum(magnitudes << place, axis=3), STOCHASTIC)
    signs = (x.to(tl.uint32, bitcast=True) >> (28 - place).to(tl.uint32)) & (8 << place).to(tl.uint32)
    if INTERPRET:
        signs = tl.sum(signs.to(tl.int32, bitcast=True), axis=3)
    else:
        signs = tl.reduce(signs.to(tl.int32, bitcast=True), 3, _or)
    return tl.where((amax == amax)[:, :, None], word | signs, 0)


@triton.jit
def _store_row_codes(codes_ptr, word, row, valid, first_column, K, WORDS: tl.constexpr):
    """Store the words [R, C / 16, 2] of rows `row`. WORDS: K is a multiple of 8."""
    R: tl.constexpr = word.shape[0]
    C: tl.constexpr = 16 * word.shape[1]
    start = row.to(tl.int64)[:, None]
    if WORDS:
        column = first_column // 8 + tl.arange(0, C // 8)
        at = start * (K // 8) + column[None, :]
        mask = valid[:, None] & (column < K // 8)[None, :]
        tl.store(codes_ptr.to(tl.pointer_type(tl.int32)) + at, tl.reshape(word, [R, C // 8]), mask=mask)
    else:
        byte = (word[:, :, :, None] >> (8 * tl.arange(0, 4))[None, None, None, :]) & 0xFF
        column = first_column // 2 + tl.arange(0, C // 2)
        at = start * tl.cdiv(K, 2) + column[None, :]
        mask = valid[:, None] & (column < tl.cdiv(K, 2))[None, :]
        tl.store(codes_ptr + at, tl.reshape(byte, [R, C // 2]).to(tl.uint8), mask=mask)


@triton.jit
def _store_row_scales(scale_ptr, scales, first, end, first_column, K):
    """Store the scales [R, C / 16] of 16 rows at once: a store by itself would pay for a change of layout each time."""
    R: tl.constexpr = scales[0].shape[0]
    B: tl.constexpr = scales[0].shape[1]
    for stage in tl.static_range(4):
        joined = ()
        for i in tl.static_range(8 >> stage):
            joined = joined + (tl.join(scales[i], scales[i + (8 >> stage)]),)  # noqa: RUF005
        scales = joined
    scale = tl.reshape(scales[0], [R, B, 16])
    block = first_column // 16 + tl.arange(0, B)[None, :, None]
    row = first + 16 * tl.arange(0, R)[:, None, None] + tl.arange(0, 16)[None, None, :]
    mask = (row < end) & (block < tl.cdiv(K, 16))
    tl.store(scale_ptr + row.to(tl.int64) * tl.cdiv(K, 16) + block, scale, mask=mask)


@triton.jit
def _half(x, HALF: tl.constexpr):
    """[R, C / 2]: columns 0 to 3 (4 to 7) of each eight of x [R, C]."""
    R: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    low, high = tl.split(tl.permute(tl.reshape(x, [R, C // 8, 2, 4]), [0, 1, 3, 2]))
    if HALF == 0:
        return tl.reshape(low, [R, C // 2])
    else:
        return tl.reshape(high, [R, C // 2])


@triton.jit
def _column_word(xs, factor, random, FIRST: tl.constexpr, STOCHASTIC: tl.constexpr):
    """The codes of tensors FIRST to FIRST + 7 in words."""
    word = tl.zeros(factor.shape, tl.int32)
    signs = tl.zeros(factor.shape, tl.uint32)
    for i in tl.static_range(FIRST + 7, FIRST - 1, -1):
        word = (word << 4) + _magnitudes(tl.abs(xs[i]) * factor, random, i, STOCHASTIC)
        signs = _shift_in(signs, xs[i].to(tl.uint32, bitcast=True))
    return _without_surplus(word, STOCHASTIC) | (signs & 0x88888888).to(tl.int32, bitcast=True)


@triton.jit
def _store_columns(
    codes_ptr, scale_ptr, words, amax, scale, first_block, end_block, of_columns, columns, K, P,
):  # fmt: skip
    """Store the blocks of 16 rows of each column: two words of eight codes and a scale, [R, C]."""
    block = first_block + tl.arange(0, scale.shape[0])
    code = (words[0].to(tl.int64) & 0xFFFFFFFF) | (words[1].to(tl.int64) << 32)
    code = tl.where(amax == amax, code, 0)
    column = of_columns.to(tl.int64) * K + columns
    at = column[None, :] * (P // 16) + block[:, None]
    mask = (block < end_block)[:, None] & (columns < K)[None, :]
    tl.store(codes_ptr + at, code, mask=mask)
    tl.store(scale_ptr + at, scale, mask=mask)


@triton.jit
def spread(of_blocks):
    """[R, C / 16] as [R, C]."""
    R: tl.constexpr = of_blocks.shape[0]
    B: tl.constexpr = of_blocks.shape[1]
    return tl.reshape(tl.broadcast_to(of_blocks[:, :, None, None], [R, B, 2, 8]), [R, 16 * B])


@triton.jit
def cast_nvfp4_kernel(
    x_ptr, offsets_ptr, aligned_ptr, row_amax_ptr, column_amax_ptr, seed_ptr,
    row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, ROWS, num_groups, K, P,
    ROW_SCALED: tl.constexpr, RHT: tl.constexpr, WORDS: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Amaxes are None for a copy that is not made, the seed for rounding to nearest."""
    STOCHASTIC: tl.constexpr = seed_ptr is not None
    column_tiles = tl.cdiv(K, BLOCK_C)
    slot = tl.program_id(0) // column_tiles
    first_column = tl.program_id(0) % column_tiles * BLOCK_C
    group, row, first, end, first_block, end_block, of_columns = _tile(
        offsets_ptr, aligned_ptr, slot, ROWS, num_groups, P, BLOCK_R
    )  # fmt: skip
    if first_block < end_block:
        columns = first_column + tl.arange(0, BLOCK_C)
        if group < num_groups:
            active_end = end
        else:
            active_end = first  # the tail counts as zeros
        row_end = tl.minimum(end, ROWS)
        xs = _load_tile(x_ptr, first, active_end, ROWS, columns, K, BLOCK_R)
        random = (0, 0, 0, 0)
        if row_amax_ptr is not None:
            if STOCHASTIC:
                random = _in_words_each(_random(seed_ptr, row, columns, 0, BLOCK_R))
            if not ROW_SCALED:
                encode, decode = _encode(tl.load(row_amax_ptr + group, mask=group < num_groups, other=0.0))
            scales = ()
            for i in tl.static_range(16):
                rows = first + 16 * tl.arange(0, BLOCK_R) + i
                if ROW_SCALED:
                    amax = tl.load(row_amax_ptr + rows, mask=rows < active_end, other=0.0)
                    row_encode, row_decode = _encode(amax)
                    encode = row_encode[:, None]
                    decode = row_decode[:, None]
                x = _in_words(xs[i])
                amax = _max_of_columns(x)
                scale, factor = _scales(amax, encode, decode, NATIVE)
                magnitudes = _magnitudes(tl.abs(x) * factor[:, :, None, None], random, i, STOCHASTIC)
                word = _packed(x, magnitudes, amax, STOCHASTIC)
                _store_row_codes(row_codes_ptr, word, rows, rows < row_end, first_column, K, WORDS)
                scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
            _store_row_scales(row_scale_ptr, scales, first, row_end, first_column, K)
        if column_amax_ptr is not None:
            encode, decode = _encode(tl.load(column_amax_ptr + group, mask=group < num_groups, other=0.0))
            # One half of a thread's columns after the other: all of them would need too many registers at once.
            for half in tl.static_range(2):
                lane = tl.arange(0, BLOCK_C // 2)
                columns = first_column + lane // 4 * 8 + 4 * half + lane % 4
                if STOCHASTIC:
                    random = _random(seed_ptr, row, columns, 1, BLOCK_R)
                ys = ()
                for i in tl.static_range(16):
                    ys = ys + (_half(xs[i], half),)  # type: ignore[assignment]  # noqa: RUF005
                if RHT:
                    ys = _hadamard(ys)
                amax = _max_of_tensors(ys)
                if RHT:
                    scale, factor = _scales(amax * 0.25, encode, decode, NATIVE)
                    factor *= 0.25
                else:
                    scale, factor = _scales(amax, encode, decode, NATIVE)
                words = (
                    _column_word(ys, factor, random, 0, STOCHASTIC),
                    _column_word(ys, factor, random, 8, STOCHASTIC),
                )
                _store_columns(
                    column_codes_ptr, column_scale_ptr, words, amax, scale, first_block, end_block, of_columns, columns,
                    K, P,
                )  # fmt: skip


@triton.jit
def cast_nvfp4_square_kernel(
    x_ptr, offsets_ptr, aligned_ptr, amax_ptr,
    row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, ROWS, num_groups, K, P,
    WORDS: tl.constexpr, NATIVE: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Blocks of 16x16, to nearest: a number has one code, which goes into both copies. Codes are None of one not made.

    x is read once more for its codes, from the cache: the registers that would hold it are what lets enough programs
    run side by side.
    """
    column_tiles = tl.cdiv(K, BLOCK_C)
    slot = tl.program_id(0) // column_tiles
    first_column = tl.program_id(0) % column_tiles * BLOCK_C
    group, _, first, end, first_block, end_block, of_columns = _tile(
        offsets_ptr, aligned_ptr, slot, ROWS, num_groups, P, BLOCK_R
    )  # fmt: skip
    if first_block < end_block:
        columns = first_column + tl.arange(0, BLOCK_C)
        row_end = tl.minimum(end, ROWS)
        if group < num_groups:
            active_end = end
        else:
            active_end = first  # the tail counts as zeros
        peak = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for i in tl.static_range(16):
            peak = _max_of_two(peak, tl.abs(_load_row(x_ptr, first + i, active_end, ROWS, columns, K, BLOCK_R)))
        amax = _max_of_columns(_in_words(peak))
        encode, decode = _encode(tl.load(amax_ptr + group, mask=group < num_groups, other=0.0))
        scale, factor = _scales(amax, encode, decode, NATIVE)
        columns_of_words = ()
        scales = ()
        for half in tl.static_range(2):
            word = tl.zeros([BLOCK_R, BLOCK_C // 16, 2, 8], tl.int32)
            signs = tl.zeros([BLOCK_R, BLOCK_C // 16, 2, 8], tl.uint32)
            for i in tl.static_range(8 * half + 7, 8 * half - 1, -1):
                x = _in_words(_load_row(x_ptr, first + i, active_end, ROWS, columns, K, BLOCK_R))
                magnitudes = _magnitudes(tl.abs(x) * factor[:, :, None, None], (0, 0, 0, 0), i, False)
                if row_codes_ptr is not None:
                    rows = first + 16 * tl.arange(0, BLOCK_R) + i
                    packed = _packed(x, magnitudes, amax, False)
                    _store_row_codes(row_codes_ptr, packed, rows, rows < row_end, first_column, K, WORDS)
                word = (word << 4) + magnitudes
                signs = _shift_in(signs, x.to(tl.uint32, bitcast=True))
                scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
            word = _without_surplus(word, False) | (signs & 0x88888888).to(tl.int32, bitcast=True)
            columns_of_words = columns_of_words + (tl.reshape(word, [BLOCK_R, BLOCK_C]),)  # type: ignore[assignment]  # noqa: RUF005
        if row_codes_ptr is not None:
            _store_row_scales(row_scale_ptr, scales, first, row_end, first_column, K)
        if column_codes_ptr is not None:
            _store_columns(
                column_codes_ptr, column_scale_ptr, columns_of_words, spread(amax), spread(scale),
                first_block, end_block, of_columns, columns, K, P,
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
    x_ptr, offsets_ptr, aligned_ptr, row_amax_ptr, column_amax_ptr, ROWS, num_groups, K, P,
    ROW_SCALED: tl.constexpr, RHT: tl.constexpr, TILES: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Raises the amaxes, which are zeros before, to those of TILES tiles beside each other."""
    column_tiles = tl.cdiv(K, BLOCK_C * TILES)
    slot = tl.program_id(0) // column_tiles
    first_column = tl.program_id(0) % column_tiles * (BLOCK_C * TILES)
    group, _, first, end, _, _, _ = _tile(offsets_ptr, aligned_ptr, slot, ROWS, num_groups, P, BLOCK_R)
    if (group < num_groups) & (first < end):
        of_rows = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        of_columns = tl.zeros([BLOCK_R, BLOCK_C], tl.float32)
        for tile in range(TILES):
            columns = first_column + tile * BLOCK_C + tl.arange(0, BLOCK_C)
            xs = _load_tile(x_ptr, first, end, ROWS, columns, K, BLOCK_R)
            if row_amax_ptr is not None:
                for i in tl.static_range(16):
                    if ROW_SCALED:
                        rows = first + 16 * tl.arange(0, BLOCK_R) + i
                        _add_to_amax(row_amax_ptr + rows, tl.max(_magnitude_or_zero(xs[i]), axis=1), rows < end)
                    else:
                        of_rows = tl.maximum(of_rows, _magnitude_or_zero(xs[i]))
            if column_amax_ptr is not None:
                if RHT:
                    xs = _hadamard(xs)
                for i in tl.static_range(16):
                    of_columns = tl.maximum(of_columns, _magnitude_or_zero(xs[i]))
        if row_amax_ptr is not None and not ROW_SCALED:
            _add_to_amax(row_amax_ptr + group, tl.max(of_rows), None)
        if column_amax_ptr is not None:
            amax = tl.max(of_columns)
            if RHT:
                amax *= 0.25
            _add_to_amax(column_amax_ptr + group, amax, None)
