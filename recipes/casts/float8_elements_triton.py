"""Casts to and from the eight-bit element formats for kernels: the hardware's where it has one, else in integers."""

import math

from recipes.triton.gates import tl, triton
from recipes.triton.rounding import INTERPRET

# FORM of the functions here, and of the kernels that call them: "E4M3" or "E5M2", or with a largest number of its own
# "E4M3 240.0" (`format_of` gives it).
_LARGEST = {"E4M3": 448.0, "E5M2": 57344.0}


@triton.constexpr_function
def is_e4m3(form: str) -> bool:
    return form.startswith("E4M3")


@triton.constexpr_function
def largest_of(form: str) -> float:
    """The largest number of a format."""
    name, _, largest = form.partition(" ")
    return float(largest) if largest else _LARGEST[name]


@triton.constexpr_function
def has_own_largest(form: str) -> bool:
    return " " in form


@triton.constexpr_function
def exponent_of_largest(form: str) -> int:
    return math.frexp(largest_of(form))[1] - 1


@triton.constexpr_function
def mantissa_of_largest(form: str) -> int:
    """The 23 bits of it as a float32."""
    return int((math.frexp(largest_of(form))[0] * 2 - 1) * 2**23)


@triton.constexpr_function
def word_of_four(form: str) -> str:
    """Assembly: four float32 registers become one of four codes, the first lowest."""
    convert = f"cvt.rn.satfinite.{form[:4].lower()}x2.f32"
    return f"{{ .reg .b16 lo, hi; {convert} lo, $2, $1; {convert} hi, $4, $3; mov.b32 $0, {{lo, hi}}; }}"


@triton.constexpr_function
def pair_of_codes(form: str) -> str:
    """Assembly: two float32 registers become a word of two codes, the first lower."""
    return f"cvt.rn.satfinite.{form[:4].lower()}x2.f32 $0, $2, $1;"


@triton.jit
def _clamped(x, FORM: tl.constexpr):
    """x between the largest numbers of a format; NaN stays NaN."""
    LARGEST: tl.constexpr = largest_of(FORM)
    return tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))


@triton.jit
def float8_codes(x, FORM: tl.constexpr, NATIVE: tl.constexpr):
    """Float32 x as codes (uint8): to nearest, ties to even; saturating, also from Inf; NaN stays NaN.

    NATIVE: whether the GPU converts to float8 itself (sm_89 on).
    """
    if NATIVE and not INTERPRET:
        if has_own_largest(FORM):  # the instruction saturates at its own
            x = _clamped(x, FORM)
        # Words of four codes: from words of two, ptxas 12.9 takes wrong bytes where both word and bytes are stored
        # (triton issue 11111, seen on an H200).
        return tl.inline_asm_elementwise(
            word_of_four(FORM), "=r,f,f,f,f", [x], dtype=tl.uint8, is_pure=True, pack=4
        )  # fmt: skip
    else:
        x = _clamped(x, FORM)
        MANTISSA: tl.constexpr = 3 if is_e4m3(FORM) else 2
        BIAS: tl.constexpr = 7 if is_e4m3(FORM) else 15
        bits = tl.where(x == x, x, 0.0).to(tl.int32, bitcast=True)
        magnitude = bits & 0x7FFFFFFF
        # Below the smallest normal number all have its last place: adding a power of two there rounds to it.
        exponent = tl.maximum(magnitude >> 23, 128 - BIAS)
        unit = ((exponent + 23 - MANTISSA) << 23).to(tl.float32, bitcast=True)
        rounded = ((magnitude.to(tl.float32, bitcast=True) + unit) - unit).to(tl.int32, bitcast=True)
        is_normal = (rounded >> 23) >= 128 - BIAS
        STEPS: tl.constexpr = 2.0 ** (BIAS - 1 + MANTISSA)
        subnormal = (tl.where(is_normal, 0.0, rounded.to(tl.float32, bitcast=True)) * STEPS).to(tl.int32)
        code = tl.where(is_normal, (rounded >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA), subnormal)
        code = tl.where(x == x, code, 0x7F)
        return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def float8_words(x0, x1, x2, x3, FORM: tl.constexpr, NATIVE: tl.constexpr):
    """The codes of four float32 tensors as uint32 words, those of x0 lowest. FORM, NATIVE: as in `float8_codes`."""
    if NATIVE and not INTERPRET:
        if has_own_largest(FORM):
            x0, x1, x2, x3 = _clamped(x0, FORM), _clamped(x1, FORM), _clamped(x2, FORM), _clamped(x3, FORM)
        # Two instructions a word; from four tensors of codes the compiler makes six.
        return tl.inline_asm_elementwise(
            word_of_four(FORM), "=r,f,f,f,f", [x0, x1, x2, x3], dtype=tl.uint32, is_pure=True, pack=1
        )  # fmt: skip
    else:
        low = float8_codes(x0, FORM, NATIVE).to(tl.uint32) | (float8_codes(x1, FORM, NATIVE).to(tl.uint32) << 8)
        high = float8_codes(x2, FORM, NATIVE).to(tl.uint32) | (float8_codes(x3, FORM, NATIVE).to(tl.uint32) << 8)
        return low | (high << 16)


@triton.jit
def float8_pairs(x0, x1, FORM: tl.constexpr):
    """The codes of two float32 tensors as 16-bit words, that of x0 lower; by the GPU's own instruction alone, and not
    for words whose bytes are read by themselves (see `float8_codes`). FORM: as there."""
    if has_own_largest(FORM):
        x0, x1 = _clamped(x0, FORM), _clamped(x1, FORM)
    return tl.inline_asm_elementwise(
        pair_of_codes(FORM), "=h,f,f", [x0, x1], dtype=tl.int16, is_pure=True, pack=1
    )  # fmt: skip


@triton.jit
def in_four(x):
    """Elements 4 i, 4 i + 1, 4 i + 2 and 4 i + 3 of the rows of x, as four tensors."""
    even, odd = tl.split(tl.reshape(x, [x.shape[0], x.shape[1] // 4, 2, 2]))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def transposed_words(x, FORM: tl.constexpr, NATIVE: tl.constexpr):
    """The codes of float32 x [R, C] transposed: in tensor j, [C / 4, R / 4], words of four rows of columns 4 i + j.

    Four columns of a row are neighbours in a thread: as words they cross over to other threads, and four words of four
    rows then give the transposed ones. FORM, NATIVE: as in `float8_codes`.
    """
    x0, x1, x2, x3 = in_four(x)
    return transposed_bytes(*in_four(tl.trans(float8_words(x0, x1, x2, x3, FORM, NATIVE))))


# From words 4 to 7 first pairs of their bytes 0, 1, 0, 1 and 2, 3, 2, 3, then words of one byte each.
TRANSPOSE = tl.constexpr("""{
    .reg .b32 a, b, c, d;
    prmt.b32 a, $4, $5, 0x5140;
    prmt.b32 b, $6, $7, 0x5140;
    prmt.b32 c, $4, $5, 0x7362;
    prmt.b32 d, $6, $7, 0x7362;
    prmt.b32 $0, a, b, 0x5410;
    prmt.b32 $1, a, b, 0x7632;
    prmt.b32 $2, c, d, 0x5410;
    prmt.b32 $3, c, d, 0x7632;
}""")


@triton.jit
def transposed_bytes(w0, w1, w2, w3):
    """Bytes 0 of four words as one word, bytes 1, bytes 2, bytes 3: eight instructions; the compiler makes 27."""
    if INTERPRET:
        words = (w0, w1, w2, w3)
        return _bytes(words, 0), _bytes(words, 1), _bytes(words, 2), _bytes(words, 3)
    else:
        return tl.inline_asm_elementwise(
            TRANSPOSE, "=r,=r,=r,=r,r,r,r,r", [w0, w1, w2, w3],
            dtype=(tl.uint32, tl.uint32, tl.uint32, tl.uint32), is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _bytes(words, AT: tl.constexpr):
    """Byte AT of each of four words as one word."""
    result = (words[0] >> (8 * AT)) & 0xFF
    for i in tl.static_range(1, 4):
        result |= ((words[i] >> (8 * AT)) & 0xFF) << (8 * i)
    return result


@triton.jit
def float8_values(codes, FORM: tl.constexpr, NATIVE: tl.constexpr):
    """The float32 values of codes (uint8). FORM, NATIVE: as in `float8_codes`."""
    if NATIVE and not INTERPRET:
        if is_e4m3(FORM):
            return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
        else:
            return codes.to(tl.float8e5, bitcast=True).to(tl.float32)
    else:
        MANTISSA: tl.constexpr = 3 if is_e4m3(FORM) else 2
        BIAS: tl.constexpr = 7 if is_e4m3(FORM) else 15
        LARGEST: tl.constexpr = 0x7E if is_e4m3(FORM) else 0x7B
        RAISE: tl.constexpr = 2.0 ** (127 - BIAS)
        bits = codes.to(tl.int32)
        magnitude = bits & 0x7F
        # Read as a float32 of the same exponent field; subnormal numbers come out right as well.
        value = (magnitude << (23 - MANTISSA)).to(tl.float32, bitcast=True) * RAISE
        value = tl.where(magnitude > LARGEST, float("nan"), value)
        if not is_e4m3(FORM):
            value = tl.where(magnitude == LARGEST + 1, float("inf"), value)
        # Not -value, which Triton reads as 0 - value: that loses the sign of a zero.
        return (value.to(tl.int32, bitcast=True) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True)


@triton.jit
def magnitude(x):
    """|x| for a maximum that ignores NaN: the GPU's takes the other number, the interpreter's does not."""
    if INTERPRET:
        return tl.where(x == x, tl.abs(x), 0.0)
    else:
        return tl.abs(x)
