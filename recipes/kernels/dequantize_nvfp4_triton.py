"""The Triton kernels of the way back from NVFP4. `cast_nvfp4` launches them and says what is where."""

import triton
import triton.language as tl

from recipes.kernels.rounding import INTERPRET, round_to


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
def _e4m3_values(scale):
    """Float32 values of E4M3 scales (uint8) without a sign."""
    value = (scale.to(tl.int32) << 20).to(tl.float32, bitcast=True) * 1.329227995784916e36
    return tl.where(scale == 0x7F, float("nan"), value)


# Of one of four pairs of codes: the shifts of the magnitudes to the bits 6 to 8 of both halves, of the signs to bit 15.
_PAIR = """
            {shift_m} t, {word}, {by_m};
            {shift_s} u, {word}, {by_s};
            and.b32 t, t, 0x01C001C0;
            and.b32 u, u, 0x80008000;
            or.b32 t, t, u;
            fma.rn.bf16x2 t, t, raise, zero;
            fma.rn.bf16x2 ${out}, t, $10, zero;"""
_PAIRS = "".join(
    _PAIR.format(
        word=word, out=4 * half + i, shift_m="shl.b32" if i < 2 else "shr.b32", by_m=abs(6 - 4 * i),
        shift_s="shl.b32", by_s=12 - 4 * i,
    )
    for half, word in enumerate(("lo", "hi")) for i in range(4)
)  # fmt: skip
DECODE = tl.constexpr(
    """{
            .reg .b32 lo, hi, t, u, raise, zero;
            mov.b32 raise, 0x7E807E80;
            mov.b32 zero, 0x80008000;
            prmt.b32 lo, $8, $9, 0x5410;
            prmt.b32 hi, $8, $9, 0x7632;"""
    + _PAIRS
    + "}"
)
EIGHT_BF16 = tl.constexpr((tl.bfloat16,) * 8)


@triton.jit
def _decoded(word, scale, DTYPE: tl.constexpr):
    """The eight codes in each of word (int32), the lowest first, times scale (float32): eight tensors in DTYPE."""
    if DTYPE == tl.bfloat16 and not INTERPRET:
        # Two words at once. A code's fields, in a bfloat16's place, are those of its value times 2^-126; the products
        # with 2^126 and the scale are exact.
        return tl.inline_asm_elementwise(
            DECODE, "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r", [word, scale.to(tl.bfloat16)], dtype=EIGHT_BF16, is_pure=True,
            pack=2,
        )  # fmt: skip
    else:
        values = ()
        for i in tl.static_range(8):
            values = values + (round_to(_e2m1_values(word >> (4 * i)) * scale, DTYPE),)  # type: ignore[assignment]  # noqa: RUF005
        return values


@triton.jit
def dequantize_rows_kernel(
    codes_ptr, scale_ptr, y_ptr, ROWS, K, WORDS: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """y [ROWS, K] = code * scale. WORDS: K is a multiple of 8, and codes are int32 words."""
    column_tiles = tl.cdiv(K, BLOCK_C)
    rows = (tl.program_id(0) // column_tiles).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    first_column = tl.program_id(0) % column_tiles * BLOCK_C
    valid = (rows < ROWS)[:, None]
    num_blocks = tl.cdiv(K, 16)
    DTYPE: tl.constexpr = y_ptr.dtype.element_ty
    if WORDS:
        words = first_column // 8 + tl.arange(0, BLOCK_C // 8)
        mask = valid & (words < K // 8)
        word = tl.load(codes_ptr + rows[:, None] * (K // 8) + words, mask=mask, other=0)
        scale = tl.load(scale_ptr + rows[:, None] * num_blocks + words // 2, mask=mask, other=0)
        v = _decoded(word, _e4m3_values(scale), DTYPE)
        even = tl.join(tl.join(v[0], v[4]), tl.join(v[2], v[6]))
        odd = tl.join(tl.join(v[1], v[5]), tl.join(v[3], v[7]))
        values = tl.reshape(tl.join(even, odd), [BLOCK_R, BLOCK_C])
    else:
        pairs = first_column // 2 + tl.arange(0, BLOCK_C // 2)
        num_pairs = tl.cdiv(K, 2)
        code = tl.load(codes_ptr + rows[:, None] * num_pairs + pairs, mask=valid & (pairs < num_pairs), other=0)
        code = code.to(tl.int32)
        values = tl.reshape(tl.join(_e2m1_values(code), _e2m1_values(code >> 4)), [BLOCK_R, BLOCK_C])
        blocks = first_column // 16 + tl.arange(0, BLOCK_C // 16)
        scale = tl.load(scale_ptr + rows[:, None] * num_blocks + blocks, mask=valid & (blocks < num_blocks), other=0)
        values = round_to(values * _spread(_e4m3_values(scale)), DTYPE)
    columns = first_column + tl.arange(0, BLOCK_C)
    tl.store(y_ptr + rows[:, None] * K + columns[None, :], values, mask=valid & (columns < K))


@triton.jit
def dequantize_columns_kernel(
    codes_ptr, scale_ptr, y_ptr, K, P, BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr
):  # fmt: skip
    """y [G, P, K] = code * scale, of codes (int64, those of 16 rows) and scales [G, K, P / 16]."""
    column_tiles = tl.cdiv(K, BLOCK_C)
    num_blocks = P // 16
    row_tiles = tl.cdiv(num_blocks, BLOCK_R)
    columns = tl.program_id(0) % column_tiles * BLOCK_C + tl.arange(0, BLOCK_C)
    tile = tl.program_id(0) // column_tiles
    group = (tile // row_tiles).to(tl.int64)
    blocks = tile % row_tiles * BLOCK_R + tl.arange(0, BLOCK_R)
    mask = (blocks < num_blocks)[:, None] & (columns < K)[None, :]
    at = (group * K + columns)[None, :] * num_blocks + blocks[:, None]
    code = tl.load(codes_ptr + at, mask=mask, other=0)
    scale = _e4m3_values(tl.load(scale_ptr + at, mask=mask, other=0))
    values = _decoded(code.to(tl.int32), scale, y_ptr.dtype.element_ty)
    values += _decoded((code >> 32).to(tl.int32), scale, y_ptr.dtype.element_ty)
    for i in tl.static_range(16):
        row = group * P + blocks * 16 + i
        tl.store(y_ptr + row[:, None] * K + columns[None, :], values[i], mask=mask)
