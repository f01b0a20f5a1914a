"""The MXFP8 cast of `cast_mxfp8` for tiles in a Triton kernel that has just computed them."""

import triton
import triton.language as tl

from recipes.kernels.float8_triton import float8_codes

BLOCK = tl.constexpr(32)


@triton.jit
def store_mxfp8(
    x, codes_ptr, scale_ptr, rows, columns, T, COLUMNS, inside,
    FORM: tl.constexpr, ROWWISE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """Cast the float32 tile x of a matrix [T, COLUMNS] and store codes (uint8, row-major) and scales.

    Scales are [T, ceil(COLUMNS / 32)] rowwise, [ceil(T / 32), COLUMNS] columnwise. The tile begins at multiples of 32
    and both its sides are. FORM: "E4M3" or "E5M2". NATIVE: whether the GPU converts to float8 itself (sm_89 on).
    """
    BLOCK_T: tl.constexpr = x.shape[0]
    BLOCK_C: tl.constexpr = x.shape[1]
    LARGEST: tl.constexpr = 448.0 if FORM == "E4M3" else 57344.0
    x = tl.where(inside, x, 0.0)
    if ROWWISE:
        blocks = tl.reshape(x, [BLOCK_T, BLOCK_C // BLOCK, BLOCK])
        scale = _scale(blocks, LARGEST, 2)
        scaled = tl.reshape(blocks * _reciprocal(scale)[:, :, None], [BLOCK_T, BLOCK_C])
        scale_columns = tl.cdiv(COLUMNS, BLOCK)
        column = tl.min(columns, axis=0) // BLOCK + tl.arange(0, BLOCK_C // BLOCK)
        at = rows.to(tl.int64)[:, None] * scale_columns + column[None, :]
        valid = (rows < T)[:, None] & (column < scale_columns)[None, :]
    else:
        blocks = tl.reshape(x, [BLOCK_T // BLOCK, BLOCK, BLOCK_C])
        scale = _scale(blocks, LARGEST, 1)
        scaled = tl.reshape(blocks * _reciprocal(scale)[:, None, :], [BLOCK_T, BLOCK_C])
        row = tl.min(rows, axis=0) // BLOCK + tl.arange(0, BLOCK_T // BLOCK)
        at = row.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
        valid = (row < tl.cdiv(T, BLOCK))[:, None] & (columns < COLUMNS)[None, :]
    tl.store(scale_ptr + at, scale.to(tl.uint8), mask=valid)
    at = rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :]
    tl.store(codes_ptr + at, float8_codes(scaled, FORM, NATIVE), mask=inside)


@triton.jit
def _scale(blocks, LARGEST: tl.constexpr, AXIS: tl.constexpr):
    """The E8M0 bytes, as int32, of blocks along AXIS."""
    amax = tl.max(tl.where(blocks == blocks, tl.abs(blocks), 0.0), axis=AXIS)
    bits = (amax * (1.0 / LARGEST)).to(tl.int32, bitcast=True)
    exponent = bits >> 23
    mantissa = bits & 0x7FFFFF
    above = tl.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return tl.minimum(exponent + above.to(tl.int32), 254)


@triton.jit
def _reciprocal(scale):
    """2^(127 - E) in float32; that of 254 is subnormal."""
    bits = tl.where(scale == 254, 0x00400000, (254 - scale) << 23)
    return bits.to(tl.float32, bitcast=True)
