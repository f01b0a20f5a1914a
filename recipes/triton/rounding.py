"""Rounding that is right on the GPU and under Triton's interpreter, and the one place that tells the two apart.

The interpreter holds bf16 numbers as raw 16-bit integers, so its bf16 arithmetic is silently wrong, and it truncates
where the hardware rounds to nearest even. A kernel stays clear of both by two rules:

    x = widen(tl.load(...))                  after each load: float32 under the interpreter, unchanged on the GPU
    tl.store(..., round_to(acc, DTYPE))      before each store: rounded to nearest, ties to even, by either

On the GPU both compile to what one would have written without them.
"""

from __future__ import annotations

from recipes.triton.gates import INTERPRET as INTERPRET
from recipes.triton.gates import tl, triton


@triton.jit
def widen(x):
    """x as a number that may be computed with: float32 under the interpreter, as it is on the GPU."""
    if INTERPRET:
        if x.dtype == tl.bfloat16:  # the interpreter's own conversion loses subnormal numbers
            x = (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
        else:
            x = x.to(tl.float32)
    return x


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """Float32 x rounded to DTYPE (float32, float16 or bfloat16): to nearest, ties to even; NaN stays NaN."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        bits = x.to(tl.uint32, bitcast=True)
        # Half of the last place that is kept, less one if that place is even: the carry does the rounding.
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        rounded = tl.where(x == x, rounded, 0x7FC0)
        return rounded.to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(DTYPE)


@triton.jit
def rounded_to_bfloat16(x):
    """Float32 x rounded to bfloat16, as float32."""
    return widen(round_to(x, tl.bfloat16)).to(tl.float32)


# The compiler converts to bfloat16 one number at a time, on a unit eight times slower than that for pairs, and moves
# the upper half of a pair before it shifts it. So where a tile is rounded but not stored, these are faster than
# `round_to` and `widen`. But the compiler sees nothing through them: it no longer adds two bfloat16 by one instruction.


@triton.jit
def widen_pairs(x):
    """`widen`, and to float32."""
    if INTERPRET or x.dtype != tl.bfloat16:
        return widen(x).to(tl.float32)
    else:
        return tl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], tl.float32, is_pure=True, pack=2
        )


@triton.jit
def round_pairs_to(x, DTYPE: tl.constexpr):
    """`round_to`."""
    if INTERPRET or tl.bfloat16 != DTYPE:
        return round_to(x, DTYPE)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [x], tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def bfloat16_pairs(low, high):
    """Two float32 tensors rounded to bfloat16, in the halves of uint32 words."""
    if INTERPRET:
        low = round_to(low, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        high = round_to(high, tl.bfloat16).to(tl.uint16, bitcast=True).to(tl.uint32)
        return low | (high << 16)
    else:
        return tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], tl.uint32, is_pure=True, pack=1
        )


@triton.jit
def unpack_pairs(words):
    """The two bfloat16 numbers in each word, the lower half first, in float32: the inverse of `bfloat16_pairs`."""
    return (words << 16).to(tl.float32, bitcast=True), (words & 0xFFFF0000).to(tl.float32, bitcast=True)
