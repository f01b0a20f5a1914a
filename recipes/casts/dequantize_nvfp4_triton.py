"""The Triton kernels of `dequantize_nvfp4`, which launches them. `cast_nvfp4` describes the layouts."""

from recipes.triton.gates import tl, triton
from recipes.triton.rounding import INTERPRET, round_to


@triton.jit
def _spread(of_blocks):
    """[R, C / 16] as [R, C]."""
    R: tl.constexpr = of_blocks.shape[0]
    B: tl.constexpr = of_blocks.shape[1]
    return tl.reshape(tl.broadcast_to(of_blocks[:, :, None, None], [R, B, 2, 8]), [R, 16 * B])


@triton.jit
def _e2m1_values(code):
    """Float32 values of E2M1 codes (int32). The fields, in a float32's place, are those of the value times 2^-126."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def e4m3_values(scale):
    """Float32 values of E4M3 scales (uint8) without a sign."""
    value = (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(scale == 0x7F, float("nan"), value)


# Of one of the pairs of codes in `lo` and `hi`: the shifts of the magnitudes to the bits 6 to 8 of both halves, of the
# signs to bit 15. A code's fields, in a bfloat16's place, are those of its value times 2^-126; the products with 2^126
# and the scale are exact.
_PAIR = """
            {shift_m} t, {word}, {by_m};
            {shift_s} u, {word}, {by_s};
            and.b32 t, t, 0x01C001C0;
            and.b32 u, u, 0x80008000;
            or.b32 t, t, u;
            fma.rn.bf16x2 t, t, raise, zero;
            fma.rn.bf16x2 ${out}, t, ${scale}, zero;"""


def _decode(nibbles: tuple[int, ...]) -> tl.constexpr:
    """Of two words the pairs of these codes of each half of both, times a pair of scales."""
    outs = 2 * len(nibbles)
    pairs = (
        _PAIR.format(
            word=word, out=len(nibbles) * half + place, scale=outs + 2, shift_m="shl.b32" if i < 2 else "shr.b32",
            by_m=abs(6 - 4 * i), shift_s="shl.b32", by_s=12 - 4 * i,
        )
        for half, word in enumerate(("lo", "hi")) for place, i in enumerate(nibbles)
    )  # fmt: skip
    return tl.constexpr(
        f"""{{
            .reg .b32 lo, hi, t, u, raise, zero;
            mov.b32 raise, 0x7E807E80;
            mov.b32 zero, 0x80008000;
            prmt.b32 lo, ${outs}, ${outs + 1}, 0x5410;
            prmt.b32 hi, ${outs}, ${outs + 1}, 0x7632;"""
        + "".join(pairs)
        + "}"
    )


DECODE_PAIRS = _decode((0, 1, 2, 3))
DECODE_ALTERNATE_PAIRS = _decode((0, 2))
EIGHT_WORDS = tl.constexpr((tl.int32,) * 8)
FOUR_WORDS = tl.constexpr((tl.int32,) * 4)


@triton.jit
def _bits_of_pair(low, high):
    """Two float32 numbers as bfloat16, the first one lower (int32)."""
    if INTERPRET:
        low = round_to(low, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = round_to(high, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        return ((high << 16) | low).to(tl.int32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )


@triton.jit
def decoded_of_two(low, high, low_scale, high_scale):
    """The eight codes in words low and high, times their scales, in eight words: of low the lower half."""
    if INTERPRET:
        words = ()
        for i in tl.static_range(8):
            a, b = _e2m1_values(low >> (4 * i)) * low_scale, _e2m1_values(high >> (4 * i)) * high_scale
            words = words + (_bits_of_pair(a, b),)  # noqa: RUF005
        return words
    else:
        return tl.inline_asm_elementwise(
            DECODE_PAIRS, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [low, high, _bits_of_pair(low_scale, high_scale)],
            dtype=EIGHT_WORDS, is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def decoded_in_order(word, scale):
    """The eight codes in word, times scale, in four words."""
    if INTERPRET:
        words = ()
        for i in tl.static_range(4):
            a, b = _e2m1_values(word >> (8 * i)) * scale, _e2m1_values(word >> (8 * i + 4)) * scale
            words = words + (_bits_of_pair(a, b),)  # noqa: RUF005
        return words
    else:
        return tl.inline_asm_elementwise(
            DECODE_ALTERNATE_PAIRS, "=r,=r,=r,=r,r,r,r", [word, word >> 4, _bits_of_pair(scale, scale)],
            dtype=FOUR_WORDS, is_pure=True, pack=1,
        )  # fmt: skip


# Triton would choose the layout of each load and store by its addresses, and exchange values between threads. These
# leave each value in its thread.


@triton.jit
def _load(ptr):
    if INTERPRET:
        return tl.load(ptr)
    else:
        if ptr.dtype.element_ty == tl.uint8:
            byte = tl.inline_asm_elementwise(
                "ld.global.nc.u8 $0, [$1];", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
            )
            return byte.to(tl.uint8)
        elif ptr.dtype.element_ty == tl.int64:
            return tl.inline_asm_elementwise(
                "ld.global.nc.b64 $0, [$1];", "=l,l", [ptr.to(tl.int64)], dtype=tl.int64, is_pure=True, pack=1
            )
        else:
            return tl.inline_asm_elementwise(
                "ld.global.nc.b32 $0, [$1];", "=r,l", [ptr.to(tl.int64)], dtype=tl.int32, is_pure=True, pack=1
            )


@triton.jit
def _store(ptr, word):
    if INTERPRET:
        tl.store(ptr, word)
    else:
        tl.inline_asm_elementwise(
            "st.global.b32 [$1], $2; mov.b32 $0, 0;", "=r,l,r", [ptr.to(tl.int64), word], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def _store_four(ptr, w):
    """Four words behind each other."""
    if INTERPRET:
        for i in tl.static_range(4):
            tl.store(ptr + i, w[i])
    else:
        tl.inline_asm_elementwise(
            "st.global.v4.b32 [$1], {$2, $3, $4, $5}; mov.b32 $0, 0;", "=r,l,r,r,r,r",
            [ptr.to(tl.int64), w[0], w[1], w[2], w[3]], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def dequantize_words_kernel(codes_ptr, scale_ptr, y_ptr, WORDS, BLOCK: tl.constexpr):
    """y = code * scale in bfloat16, of words of eight codes (int32), of which two have a scale."""
    first = tl.program_id(0).to(tl.int64) * BLOCK
    at = tl.arange(0, BLOCK)
    codes_ptr += first
    scale_ptr += first // 2
    y_ptr = y_ptr.to(tl.pointer_type(tl.int32)) + 4 * first
    if first + BLOCK <= WORDS:
        values = decoded_in_order(_load(codes_ptr + at), e4m3_values(_load(scale_ptr + at // 2)))
        _store_four(y_ptr + 4 * at, values)
    else:
        mask = at < WORDS - first
        word = tl.load(codes_ptr + at, mask=mask, other=0)
        values = decoded_in_order(word, e4m3_values(tl.load(scale_ptr + at // 2, mask=mask, other=0)))
        for i in tl.static_range(4):
            tl.store(y_ptr + 4 * at + i, values[i], mask=mask)


@triton.jit
def dequantize_rows_kernel(
    codes_ptr, scale_ptr, y_ptr, ROWS, K, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """y [ROWS, K] = code * scale."""
    column_tiles = tl.cdiv(K, BLOCK_C)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    first_column = tl.program_id(0) % column_tiles * BLOCK_C
    valid = (rows < ROWS)[:, None]
    num_blocks = tl.cdiv(K, 16)
    pairs = first_column // 2 + tl.arange(0, BLOCK_C // 2)
    num_pairs = tl.cdiv(K, 2)
    code = tl.load(codes_ptr + rows[:, None] * num_pairs + pairs, mask=valid & (pairs < num_pairs), other=0)
    code = code.to(tl.int32)
    values = tl.reshape(tl.join(_e2m1_values(code), _e2m1_values(code >> 4)), [BLOCK_R, BLOCK_C])
    blocks = first_column // 16 + tl.arange(0, BLOCK_C // 16)
    scale = tl.load(scale_ptr + rows[:, None] * num_blocks + blocks, mask=valid & (blocks < num_blocks), other=0)
    values = round_to(values * _spread(e4m3_values(scale)), y_ptr.dtype.element_ty)
    columns = first_column + tl.arange(0, BLOCK_C)
    tl.store(y_ptr + rows[:, None] * K + columns[None, :], values, mask=valid & (columns < K))


@triton.jit
def _pieces_of_columns(
    codes_ptr, scale_ptr, y_ptr, num_blocks, blocks, columns, K: tl.constexpr, BLOCK_R: tl.constexpr,
    BLOCK_C: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """A tile of y in bfloat16: of BLOCK_C columns of BLOCK_R blocks those that there are, `columns` of `blocks`.

    A thread decodes COLUMNS columns of a block, [BLOCK_C / 64, BLOCK_R, 64 / COLUMNS]. With eight of them a warp has 64
    columns of four blocks: it reads whole units of 32 bytes, and writes whole lines of 128. With two it has one block,
    and several warps read of a unit. Past the edge threads repeat the last block or columns.
    """
    block = tl.minimum(tl.arange(0, BLOCK_R), blocks - 1)[None, :, None]
    column = 64 * tl.arange(0, BLOCK_C // 64)[:, None, None] + COLUMNS * tl.arange(0, 64 // COLUMNS)[None, None, :]
    column = tl.minimum(column, columns - COLUMNS)
    at = column.to(tl.int64) * num_blocks + block
    codes, scales = (), ()
    for j in tl.static_range(COLUMNS):
        codes += (_load(codes_ptr + j * num_blocks + at),)  # type: ignore[assignment]
        scales += (e4m3_values(_load(scale_ptr + j * num_blocks + at)),)  # type: ignore[assignment]
    y_ptr = y_ptr.to(tl.pointer_type(tl.int32)) + (block * (8 * K) + column // 2)
    for half in tl.static_range(2):
        pairs = ()
        for j in tl.static_range(0, COLUMNS, 2):
            low, high = (codes[j] >> (32 * half)).to(tl.int32), (codes[j + 1] >> (32 * half)).to(tl.int32)
            pairs += (decoded_of_two(low, high, scales[j], scales[j + 1]),)  # type: ignore[assignment]
        for i in tl.static_range(8):
            to = y_ptr + (8 * half + i) * (K // 2)
            if COLUMNS == 8:
                _store_four(to, (pairs[0][i], pairs[1][i], pairs[2][i], pairs[3][i]))  # type: ignore[misc]
            else:
                _store(to, pairs[0][i])  # type: ignore[misc]


@triton.jit
def dequantize_columns_kernel(
    codes_ptr, scale_ptr, y_ptr, num_groups, P, K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    """y [G, P, K] = code * scale, of codes (int64, those of 16 rows) and scales [G, K, P / 16].

    COLUMNS: those that a thread decodes at once, 8 or 2, if y is bfloat16 and K a multiple of them; else 0.
    Neighbours on the grid's first axis are so in the codes.
    """
    num_blocks = P // 16
    row_tiles = tl.cdiv(num_blocks, BLOCK_R)
    tile = tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)
    group = tile * 0
    if num_groups != 1:
        group = tile // row_tiles
        tile = tile % row_tiles
    column, block = tl.program_id(1) * BLOCK_C, tile * BLOCK_R
    if (group < num_groups) & (tile < row_tiles):
        place = (group.to(tl.int64) * K + column) * num_blocks + block
        codes_ptr += place
        scale_ptr += place
        y_ptr += (group.to(tl.int64) * P + 16 * block) * K + column
        if COLUMNS:
            _pieces_of_columns(
                codes_ptr, scale_ptr, y_ptr, num_blocks, num_blocks - block, K - column, K, BLOCK_R, BLOCK_C, COLUMNS
            )  # fmt: skip
        else:
            blocks, columns = tl.arange(0, BLOCK_R)[:, None], tl.arange(0, BLOCK_C)[None, :]
            mask = (blocks < num_blocks - block) & (columns < K - column)
            at = columns.to(tl.int64) * num_blocks + blocks
            code = tl.load(codes_ptr + at, mask=mask, other=0)
            scale = e4m3_values(tl.load(scale_ptr + at, mask=mask, other=0))
            for i in tl.static_range(16):
                value = round_to(_e2m1_values((code >> (4 * i)).to(tl.int32)) * scale, y_ptr.dtype.element_ty)
                tl.store(y_ptr + (16 * blocks + i) * K + columns, value, mask=mask)
