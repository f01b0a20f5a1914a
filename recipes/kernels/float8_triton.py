"""Casts to the eight-bit element formats for kernels: the hardware's where it has one, else in integers."""

import triton
import triton.language as tl

from recipes.kernels.rounding import INTERPRET


@triton.jit
def float8_codes(x, FORM: tl.constexpr, NATIVE: tl.constexpr):
    """Float32 x as codes (uint8): to nearest, ties to even; saturating, also from Inf; NaN stays NaN.

    FORM: "E4M3" or "E5M2". NATIVE: whether the GPU converts to float8 itself (sm_89 on).
    """
    LARGEST: tl.constexpr = 448.0 if FORM == "E4M3" else 57344.0
    x = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))  # keeps NaN
    if NATIVE and not INTERPRET:
        if FORM == "E4M3":
            return x.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
        else:
            return x.to(tl.float8e5).to(tl.uint8, bitcast=True)
    else:
        MANTISSA: tl.constexpr = 3 if FORM == "E4M3" else 2
        BIAS: tl.constexpr = 7 if FORM == "E4M3" else 15
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
