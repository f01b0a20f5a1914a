"""Cast to MXFP8: one E8M0 scale for each 32 values along an axis.

    E     = smallest byte with 2^(E - 127) >= fl(amax * fl(1 / max)),  at most 254;  NaN counts as 0 in amax
    code  = cast(clamp(fl(x * 2^(127 - E))))   to nearest, ties to even; Inf saturates, NaN stays in its element
    value = code * 2^(E - 127)                 exact in float32 and, above its subnormals, in bfloat16

A partial block counts as if padded by zeros. Scales are bytes (uint8) in natural order: [..., ceil(K / 32)] rowwise,
[..., ceil(T / 32), K] columnwise. Grouped columnwise blocks start anew with each group: scales [C, K], where block
`splits.block_of_row(32)[t]` is row t's and C = splits.aligned_capacity(32) / 32, the unused tail 0.

All steps in float32. Plain torch: exact on every device, no read of the device from the host; Triton casts are a later
issue. Source: OCP Microscaling Formats v1.0; scale rounded up as TransformerEngine's MXFP8BlockScaling (at d0067d0).
"""

import torch
from torch import Tensor

from recipes.formats import E8M0_DTYPE, E8M0_LARGEST, Float8Format
from recipes.kernels.cast_float8 import abs_without_nan, cast_float8_ref
from recipes.splits import Splits

BLOCK = 32


def scale_from_amax_ref(amax: Tensor, form: Float8Format) -> Tensor:
    """E8M0 bytes (uint8) from float32 amaxes of any shape, rounded up."""
    bits = (amax * (1.0 / form.max)).view(torch.int32)
    exponent, mantissa = bits >> 23, bits & 0x7FFFFF
    # Byte 0 is 2^-127, in float32 a subnormal with this mantissa: smaller numbers round up to it, not to byte 1.
    above = torch.where(exponent == 0, mantissa > 0x400000, mantissa > 0)
    return (exponent + above).clamp(max=E8M0_LARGEST).to(torch.uint8)


def scale_value(scale: Tensor) -> Tensor:
    """float32 2^(E - 127) of E8M0 bytes; 255 is NaN."""
    return scale.view(E8M0_DTYPE).to(torch.float32)


def scale_reciprocal(scale: Tensor) -> Tensor:
    """float32 2^(127 - E) of E8M0 bytes up to 254."""
    return scale_value(E8M0_LARGEST - scale)


def cast_mxfp8_ref(x: Tensor, form: Float8Format, dim: int) -> tuple[Tensor, Tensor]:
    """Codes, shaped as x, and scales of float32 x [..., R, C] in blocks along `dim`: -1 is rowwise, -2 columnwise."""
    scale = scale_from_amax_ref(_block_amax(x, dim), form)
    return cast_float8_ref(x * spread(scale_reciprocal(scale), dim, x.shape[dim]), form), scale


def cast_mxfp8_grouped_ref(x_TK: Tensor, splits: Splits, form: Float8Format) -> tuple[Tensor, Tensor]:
    """Codes [T, K] and scales [C, K] of x [T, K] float32, columnwise in each group. Rows past the sum must be 0."""
    block_of_row = splits.block_of_row(BLOCK)
    amax = x_TK.new_zeros(splits.aligned_capacity(BLOCK) // BLOCK, x_TK.shape[1])
    amax.scatter_reduce_(0, block_of_row[:, None].expand_as(x_TK), abs_without_nan(x_TK), "amax")
    scale = scale_from_amax_ref(amax, form)
    return cast_float8_ref(x_TK * scale_reciprocal(scale).index_select(0, block_of_row), form), scale


def spread(scale: Tensor, dim: int, length: int) -> Tensor:
    """Each scale repeated for the values of its block along `dim`, which becomes `length` long."""
    return scale.repeat_interleave(BLOCK, dim).narrow(dim, 0, length)


def _block_amax(x: Tensor, dim: int) -> Tensor:
    missing = -x.shape[dim] % BLOCK
    padded = torch.nn.functional.pad(abs_without_nan(x), (0, missing) if dim == -1 else (0, 0, 0, missing))
    return padded.unflatten(dim, (padded.shape[dim] // BLOCK, BLOCK)).amax(dim)
