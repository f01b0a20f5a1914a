"""The amaxes of the blocks of a tile, along its rows and along its columns, for kernels that cast both ways."""

from recipes.casts.float8_elements_triton import magnitude
from recipes.triton.gates import tl, triton
from recipes.triton.rounding import INTERPRET, unpack_pairs, widen


@triton.jit
def with_amaxes(x, BLOCK: tl.constexpr):
    """x [T, C] in float32, and max |x| in float32 of each BLOCK columns of a row, [T, C / BLOCK], and of each BLOCK
    rows of a column, [T / BLOCK, C]. NaN only where all numbers are.

    bfloat16 numbers are compared two by two, by one instruction for a pair.
    """
    T: tl.constexpr = x.shape[0]
    C: tl.constexpr = x.shape[1]
    if x.dtype == tl.bfloat16 and not INTERPRET:
        even, odd = tl.split(tl.reshape(x, [T, C // 2, 2]))
        pairs = tl.inline_asm_elementwise(
            "mov.b32 $0, {$1, $2};", "=r,h,h", [even, odd], tl.uint32, is_pure=True, pack=1
        )  # fmt: skip
        x = tl.reshape(tl.join(*unpack_pairs(pairs)), [T, C])
        pairs &= 0x7FFF7FFF
        of_rows = tl.reduce(tl.reshape(pairs, [T, C // BLOCK, BLOCK // 2]), 2, _larger_of_pairs)
        of_rows = tl.maximum(*unpack_pairs(of_rows))
        of_columns = tl.reduce(tl.reshape(pairs, [T // BLOCK, BLOCK, C // 2]), 1, _larger_of_pairs)
        of_columns = tl.reshape(tl.join(*unpack_pairs(of_columns)), [T // BLOCK, C])
    else:
        x = widen(x).to(tl.float32)
        of_rows = tl.max(tl.reshape(magnitude(x), [T, C // BLOCK, BLOCK]), axis=2)
        of_columns = tl.max(tl.reshape(magnitude(x), [T // BLOCK, BLOCK, C]), axis=1)
    return x, of_rows, of_columns


@triton.jit
def _larger_of_pairs(a, b):
    """The larger of two bfloat16 numbers in each half; of a number and a NaN the number."""
    return tl.inline_asm_elementwise("max.bf16x2 $0, $1, $2;", "=r,r,r", [a, b], tl.uint32, is_pure=True, pack=1)
