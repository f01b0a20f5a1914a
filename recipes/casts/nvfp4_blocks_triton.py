"""Blocks of 16 numbers as E2M1 codes with their scales, for the kernels of `cast_nvfp4`, which says what they compute.

A block's numbers are 16 tensors, whose shape is that of the blocks: butterflies, amaxes and packing stay in one thread.
"""

from recipes.casts.float8_elements_triton import float8_codes, float8_words
from recipes.casts.hadamard import SIGNS as _SIGNS
from recipes.tensors.formats import E2M1_VALUES, E4M3
from recipes.triton.gates import cuda_capability_geq, tl, triton
from recipes.triton.philox_triton import philox
from recipes.triton.rounding import INTERPRET, bfloat16_pairs, unpack_pairs

RANGE = tl.constexpr(E2M1_VALUES[-1] * E4M3.max)
ONE_SIXTH = tl.constexpr(1.0 / 6.0)
SIGNS = tl.constexpr(_SIGNS)
FLOAT32_MAX = tl.constexpr(3.4028234663852886e38)
LINE = tl.constexpr(16777216.0)  # 2^24, from which on the last place of a float32 is 2
LINE_BITS = tl.constexpr(0x4B800000)
# The surplus of words of eight codes.
SURPLUS = tl.constexpr((0x4B800000 - 4) * 0x11111111 & 0xFFFFFFFF)
# This many times E2M1's numbers are float16 numbers of the same fields: 1 becomes the smallest normal one, 0.5 one of
# the subnormal ones. Their codes are in bits 9 to 11, and from one to the next there are 512 steps.
TO_FLOAT16 = tl.constexpr(2.0**-14)
SIX = tl.constexpr(6.0 * 2.0**-14)
# Of two pairs of bfloat16 the larger magnitudes, NaN above all, with some sign.
LARGER_PAIR = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")
# Of one pair the larger magnitude, in float32.
LARGER_OF_PAIR = tl.constexpr("""{
            .reg .f32 low, high;
            shl.b32 low, $1, 16;
            and.b32 high, $1, 0xffff0000;
            abs.f32 low, low;
            abs.f32 high, high;
            max.NaN.f32 $0, low, high;
            }""")
# 16, hidden from ptxas: no grid has 2^31 programs.
SIXTEEN = tl.constexpr("{ .reg .b32 x; mov.u32 x, %nctaid.x; shr.u32 x, x, 31; add.u32 $0, x, 16; }")
# $1 and $2 times $3 as float16, of magnitudes of 7 codes at most, and $4 added to their steps: both in one word.
ROUND_PAIR = tl.constexpr("""{
            .reg .f32 low, high;
            .reg .b32 pair, six;
            mul.rn.f32 low, $1, $3;
            mul.rn.f32 high, $2, $3;
            cvt.rn.f16x2.f32 pair, high, low;
            mov.b32 six, 0x0E000E00;
            min.xorsign.abs.f16x2 pair, pair, six;
            add.u32 $0, pair, $4;
            }""")
# The codes and signs of four such words: in each half of $1 and $2 those of even numbers, of $3 and $4 of odd ones.
CODES_OF_PAIRS = tl.constexpr("""{
            .reg .b32 even, odd, a, b;
            prmt.b32 even, $1, $2, 0x7531;
            prmt.b32 odd, $3, $4, 0x7531;
            shr.u32 a, even, 1;
            lop3.b32 a, a, odd, 0x07070707, 0xE4;
            shr.u32 even, even, 4;
            shl.b32 odd, odd, 3;
            lop3.b32 b, even, odd, 0x0F0F0F0F, 0xE4;
            lop3.b32 $0, a, b, 0x87878787, 0xE4;
            }""")
PAIRS_SIGNS = tl.constexpr("""{
            .reg .b32 low, high, even, odd;
            prmt.b32 low, $1, $2, 0x7531;
            prmt.b32 high, $3, $4, 0x7531;
            prmt.b32 even, low, high, 0x6420;
            prmt.b32 odd, low, high, 0x7531;
            shr.b32 even, even, 4;
            lop3.b32 $0, even, odd, 0x0F0F0F0F, 0xE4;
            }""")
SIGNS_OF_CODES = tl.constexpr("{ .reg .b32 low; shr.b32 low, $1, 4; lop3.b32 $0, low, $2, 0x0F0F0F0F, 0xE4; }")
RECIPROCAL = tl.constexpr("""{
            .reg .f32 r, e;
            rcp.approx.ftz.f32 r, $1;
            neg.f32 e, $1;
            fma.rn.f32 e, e, r, 0f3F800000;
            fma.rn.f32 $0, r, e, r;
            }""")
# fl(2688 / $1), as ptxas divides where no step of it can overflow or underflow.
RANGE_OVER = tl.constexpr("""{
            .reg .f32 r, e, q;
            rcp.approx.ftz.f32 r, $1;
            neg.f32 e, $1;
            fma.rn.f32 q, e, r, 0f3F800000;
            fma.rn.f32 r, r, q, r;
            mul.rn.f32 q, r, 0f45280000;
            fma.rn.f32 e, e, q, 0f45280000;
            fma.rn.f32 $0, e, r, q;
            }""")
# The code is the lowest byte, the next one is 0; the upper half is undefined.
E4M3_CODE = tl.constexpr("""{
            .reg .f32 zero;
            .reg .b16 code, undefined;
            mov.f32 zero, 0f00000000;
            cvt.rn.satfinite.e4m3x2.f32 code, zero, $1;
            mov.b32 $0, {code, undefined};
            }""")


@triton.jit
def butterflies(ys, FIRST: tl.constexpr, END: tl.constexpr):
    """Stages FIRST to END - 1 of `hadamard_ref`, which has 4, of 16 tensors; stage 0 begins with the signs."""
    if FIRST == 0:
        signed = ()
        for i in tl.static_range(16):
            # Not -x, which Triton reads as 0 - x: that loses the sign of a zero.
            signed = signed + (ys[i] * SIGNS[i],)  # type: ignore[assignment]  # noqa: RUF005
        ys = signed
    for stage in tl.static_range(FIRST, END):
        zs = ()
        for i in tl.static_range(16):
            if (i >> stage) % 2 == 0:
                z = ys[i] + ys[i + (1 << stage)]
            else:
                z = ys[i - (1 << stage)] - ys[i]
            zs = zs + (z,)  # type: ignore[assignment]  # noqa: RUF005
        ys = zs
    return ys


@triton.jit
def sums_of_pairs(ys):
    """The bits of |a| + |b| for the pairs of the last stage: of the larger of |a + b| and |a - b|; NaN has the most."""
    sums = ()
    for i in tl.static_range(8):
        sum = (tl.abs(ys[i]) + tl.abs(ys[i + 8])).to(tl.int32, bitcast=True)
        if INTERPRET:  # a GPU's NaN has no sign
            sum &= 0x7FFFFFFF
        sums = sums + (sum,)  # noqa: RUF005
    return sums


@triton.jit
def hadamard(xs, FINITE: tl.constexpr):
    """`hadamard_ref` of the 16 tensors, without its factor of 1/4, and the bits of max |y| over them; NaN if one is.

    FINITE: no |a| + |b| is Inf, as where an amax of the results is finite that ignores NaN
    """
    ys = butterflies(xs, 0, 3)
    sums = sums_of_pairs(ys)
    ys = butterflies(ys, 3, 4)
    if not FINITE:  # where both of a pair are Inf, a result is NaN; if so, that of every pair is
        sums = sums + (_bits(ys[0]), _bits(ys[8]))  # noqa: RUF005
    return ys, _largest(sums)


@triton.jit
def rounded_hadamard(xs):
    """`hadamard`, its results rounded to bfloat16; and the signs of the first and the last eight, for `cast_blocks`."""
    ys = butterflies(xs, 0, 4)
    words = ()
    rounded = ()
    for i in tl.static_range(8):
        word = bfloat16_pairs(ys[2 * i], ys[2 * i + 1])
        words = words + (word,)  # noqa: RUF005
        rounded = rounded + unpack_pairs(word)
    if INTERPRET or not cuda_capability_geq(8, 6):
        amax = largest_bits(rounded)
    else:
        largest = words[0]
        for i in tl.static_range(1, 8):
            largest = larger_pair(largest, words[i])
        amax = larger_of_pair(largest)
    signs = (
        signs_of_pairs(words[0], words[1], words[2], words[3]), signs_of_pairs(words[4], words[5], words[6], words[7])
    )  # fmt: skip
    return rounded, amax, signs


@triton.jit
def _bits(x):
    """Of |x|: ordered as the magnitudes are, NaN last (int32)."""
    return x.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@triton.jit
def _largest(xs):
    largest = xs[0]
    for i in tl.static_range(1, len(xs)):
        largest = tl.maximum(largest, xs[i])
    return largest


@triton.jit
def largest_bits(xs):
    """The bits of max |x| over 16 tensors; NaN if one is."""
    bits = ()
    for i in tl.static_range(16):
        bits = bits + (_bits(xs[i]),)  # noqa: RUF005
    return _largest(bits)


@triton.jit
def larger_pair(a, b):
    """Of words of two bfloat16 numbers."""
    return tl.inline_asm_elementwise(LARGER_PAIR, "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def larger_of_pair(word):
    """The bits of the larger magnitude."""
    return tl.inline_asm_elementwise(LARGER_OF_PAIR, "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _reciprocal(x):
    """fl(1 / x) for 0 and for x and 1 / x that are normal; Inf or NaN for 0."""
    if INTERPRET:
        return tl.where(x == 0, float("inf"), tl.div_rn(1.0, tl.where(x == 0, 1.0, x)))
    else:  # one step of Newton's, as ptxas divides, without its ways out for what does not occur
        return tl.inline_asm_elementwise(RECIPROCAL, "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def encoding(amax, ORDINARY: tl.constexpr):
    """S_enc * fl(1/6) and S_dec of float32 amaxes. ORDINARY: `is_ordinary` says so of them."""
    divisor = tl.where((amax == 0) | (amax == float("inf")), RANGE, amax)
    if ORDINARY and not INTERPRET:
        encode = tl.inline_asm_elementwise(RANGE_OVER, "=f,f", [divisor], dtype=tl.float32, is_pure=True, pack=1)
        return encode * ONE_SIXTH, _reciprocal(encode)
    else:
        encode = tl.minimum(tl.div_rn(RANGE, divisor), FLOAT32_MAX)
        return encode * ONE_SIXTH, tl.div_rn(1.0, encode)


@triton.jit
def is_ordinary(amax):
    """Whether this amax of a tensor is 0, or in a range where shorter arithmetic has the same results: S_dec * 2^122 is
    finite, as it is below 172032, and scales times S_dec, and their reciprocals, are normal numbers."""
    return (amax == 0) | ((amax > 1e-26) & (amax < 65536.0))


@triton.jit
def _scales(amax, encode, decode, PART: tl.constexpr, NATIVE: tl.constexpr, ORDINARY: tl.constexpr):
    """E4M3 scales (in the lowest 12 bits of int32) of block amaxes, and the factors fl(e * PART), PART a power of two.
    A NaN amax: 0x7F."""
    if NATIVE and not INTERPRET:
        scale = tl.inline_asm_elementwise(E4M3_CODE, "=r,f", [amax * encode], dtype=tl.int32, is_pure=True, pack=1)
    else:
        scale = float8_codes(amax * encode, "E4M3", NATIVE).to(tl.int32)
    # The byte's fields, in a float32's place, are those of the value times 2^-120.
    value = (scale << 20).to(tl.float32, bitcast=True)
    if ORDINARY:
        factor = _reciprocal(value * (decode * (1.329227995784916e36 / PART)))
    else:
        # Where the product may be subnormal it is raised before the division, and the quotient after it.
        raised = tl.where(decode < 9.094947017729282e-13, 1.8446744073709552e19, 1.0)
        factor = _reciprocal(value * 1.329227995784916e36 * decode * raised) * (raised * PART)
    return scale, tl.minimum(factor, FLOAT32_MAX * PART)


@triton.jit
def _magnitude(x, factor):
    """fl(|x| * factor), rounded before anything is added to it."""
    if INTERPRET:
        return tl.abs(x) * factor
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 a; abs.f32 a, $1; mul.rn.f32 $0, a, $2; }", "=f,f,f", [x, factor], dtype=tl.float32,
            is_pure=True, pack=1,
        )  # fmt: skip


@triton.jit
def _position(magnitude):
    """LINE_BITS - 4 + the code of a magnitude, to nearest (int32).

    On the axis of codes (`e2m1_codes_ref`) a magnitude stands at the lowest of two lines and 7. The first one bends at
    code 4, where the last place of the sum becomes twice as large: so below it are two codes to 1, and above it one.
    The other has one code to 2.
    """
    bent = (magnitude * 2.0 + (LINE - 4.0)).to(tl.int32, bitcast=True)
    high = (magnitude + LINE).to(tl.int32, bitcast=True)
    return tl.minimum(tl.minimum(bent, high), LINE_BITS + 3)


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
def _signs(xs, FIRST: tl.constexpr, NATIVE: tl.constexpr):
    """The signs of tensors FIRST to FIRST + 7, each in the highest of four bits, with others below."""
    if NATIVE and not INTERPRET:  # two numbers an instruction
        even = float8_words(xs[FIRST], xs[FIRST + 2], xs[FIRST + 4], xs[FIRST + 6], "E4M3", NATIVE)
        odd = float8_words(xs[FIRST + 1], xs[FIRST + 3], xs[FIRST + 5], xs[FIRST + 7], "E4M3", NATIVE)
        return tl.inline_asm_elementwise(SIGNS_OF_CODES, "=r,r,r", [even, odd], tl.uint32, is_pure=True, pack=1)
    else:
        signs = tl.zeros(xs[0].shape, tl.uint32)
        for i in tl.static_range(FIRST + 7, FIRST - 1, -1):
            signs = _shift_in(signs, xs[i].to(tl.uint32, bitcast=True))
        return signs


@triton.jit
def signs_of_pairs(w0, w1, w2, w3):
    """`_signs` of the eight bfloat16 numbers in four words."""
    if INTERPRET:
        word = tl.zeros(w0.shape, tl.uint32)
        for pair in tl.static_range(4):
            w = (w0, w1, w2, w3)[pair]
            word |= (((w >> 12) & 0x8) | ((w >> 24) & 0x80)) << (8 * pair)
        return word
    else:
        return tl.inline_asm_elementwise(PAIRS_SIGNS, "=r,r,r,r,r", [w0, w1, w2, w3], tl.uint32, is_pure=True, pack=1)


@triton.jit
def _times_16(x):
    """By a multiplication, which the GPU does in another pipe than shifts and comparisons, the busier one here."""
    if INTERPRET:
        return x << 4
    else:
        return x * tl.inline_asm_elementwise(SIXTEEN, "=r", [], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _nearest(xs, factor, signs, FIRST: tl.constexpr, NATIVE: tl.constexpr):
    """The codes of tensors FIRST to FIRST + 7 in words. signs: theirs, or None."""
    word = _position(_magnitude(xs[FIRST + 7], factor))
    for i in tl.static_range(FIRST + 6, FIRST - 1, -1):
        word = _times_16(word) + _position(_magnitude(xs[i], factor))
    if signs is None:
        signs = _signs(xs, FIRST, NATIVE)
    return (word - SURPLUS) | (signs & 0x88888888).to(tl.int32, bitcast=True)


@triton.jit
def _rounded(x, factor):
    """x * factor as the bits of a float16 (uint32), of a magnitude of SIX at most."""
    bits = tl.minimum(tl.abs(x) * factor, SIX).to(tl.float16).to(tl.uint16, bitcast=True).to(tl.uint32)
    return bits | ((x.to(tl.uint32, bitcast=True) >> 16) & 0x8000)


@triton.jit
def _rounded_pair(low, high, factor, bits):
    """The two in the halves of words, with the bits added: signs at bit 15 of the halves, codes at 9 to 11."""
    if INTERPRET or not cuda_capability_geq(8, 6):  # 8.0 has no such minimum
        return ((_rounded(high, factor) << 16) | _rounded(low, factor)) + bits
    else:
        return tl.inline_asm_elementwise(
            ROUND_PAIR, "=r,f,f,f,r", [low, high, factor, bits], dtype=tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def _rounded_four(xs, factor, bits, i: tl.constexpr):
    """`_rounded_pair` of tensors i and i + 2, and of i + 1 and i + 3; of the bits nine each, as `block_bits_ref`."""
    later = (bits >> 8) | (bits << 24)
    even = _rounded_pair(xs[i], xs[i + 2], factor, bits & 0x01FF01FF)
    odd = _rounded_pair(xs[i + 1], xs[i + 3], factor, later & 0x01FF01FF)
    return even, odd


@triton.jit
def _code(pair, HALF: tl.constexpr):
    """With its sign, of half 0 or 1 of `_rounded_pair`."""
    pair = pair >> (16 * HALF)
    return ((pair >> 9) & 7) | ((pair >> 12) & 8)


@triton.jit
def _stochastic(xs, factor, random, FIRST: tl.constexpr):
    """`_nearest`, with stochastic rounding. factor: TO_FLOAT16 times that one."""
    even, odd = _rounded_four(xs, factor, random[FIRST // 4], FIRST)
    later_even, later_odd = _rounded_four(xs, factor, random[FIRST // 4 + 1], FIRST + 4)
    if INTERPRET:
        word = _code(even, 0) | (_code(odd, 0) << 4) | (_code(even, 1) << 8) | (_code(odd, 1) << 12)
        word |= (_code(later_even, 0) << 16) | (_code(later_odd, 0) << 20)
        word |= (_code(later_even, 1) << 24) | (_code(later_odd, 1) << 28)
        return word.to(tl.int32, bitcast=True)
    else:
        return tl.inline_asm_elementwise(
            CODES_OF_PAIRS, "=r,r,r,r,r", [even, later_even, odd, later_odd], tl.int32, is_pure=True, pack=1
        )


@triton.jit
def cast_blocks(
    xs, bits, encode, decode, random, signs, PART: tl.constexpr, STOCHASTIC: tl.constexpr, NATIVE: tl.constexpr,
    ORDINARY: tl.constexpr,
):  # fmt: skip
    """Codes (int64, the first lowest) and scales (the lowest byte of int32) of blocks, whose 16 numbers are xs.

    bits: of their amaxes; random: `random_words`, if STOCHASTIC; signs: of the first and the last eight, or None twice,
    for rounding to nearest; PART: 1, or 1/4 for what `hadamard` returns, which is 4 times too large; ORDINARY: the
    tensor's amax is, for which fewer instructions do
    """
    amax = bits.to(tl.float32, bitcast=True)
    if ORDINARY:
        encode *= PART  # an amax so small that a fourth of it were rounded has the scale 0
    elif PART < 1:
        amax *= PART
    scale, factor = _scales(amax, encode, decode, PART, NATIVE, ORDINARY)
    if STOCHASTIC:
        if not ORDINARY:  # TO_FLOAT16 would make a factor subnormal
            scaled = ()
            for i in tl.static_range(16):
                scaled = scaled + (xs[i] * factor,)  # type: ignore[assignment]  # noqa: RUF005
            xs, factor = scaled, 1.0
        low = _stochastic(xs, factor * TO_FLOAT16, random, 0)
        high = _stochastic(xs, factor * TO_FLOAT16, random, 8)
    else:
        low = _nearest(xs, factor, signs[0], 0, NATIVE)
        high = _nearest(xs, factor, signs[1], 8, NATIVE)
    code = (low.to(tl.int64) & 0xFFFFFFFF) | (high.to(tl.int64) << 32)
    return tl.where(amax == amax, code, 0), scale


@triton.jit
def random_words(seed, block, row):
    """Four words of random bits for the 16 numbers of each block: `block_bits_ref` takes its bits from them."""
    c0 = (block + 0 * row).to(tl.uint32)
    c1 = (row + 0 * block).to(tl.uint32)
    return philox(seed, c0, c1)
