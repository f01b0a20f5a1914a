"""Cast to E4M3 or E5M2 with one float32 scale for each tensor or group (per-tensor current scaling).

    amax      = max(max |x|, epsilon)         NaN counts as 0
    scale     = fl(max / amax)                1 if amax is 0 or Inf; the largest float32 where the quotient is Inf
    scale_inv = fl(1 / scale)
    code      = cast(clamp(fl(x * scale)))    to nearest, ties to even; Inf saturates, NaN stays in its element

All steps in float32. Plain torch: exact on every device, no read of the device from the host; Triton casts are a later
issue. Source: TransformerEngine's Float8CurrentScaling (read at d0067d0).
"""

import torch
from torch import Tensor

from recipes.formats import Float8Format
from recipes.splits import Splits

FLOAT32_MAX = torch.finfo(torch.float32).max
_CLEAR_MANTISSA = -(1 << 23)  # sign and exponent bits of a float32, as an int32


def abs_without_nan(x: Tensor) -> Tensor:
    """|x|, with 0 for NaN, so that a maximum ignores it."""
    return x.abs().nan_to_num_(nan=0.0, posinf=torch.inf)


def amax_ref(x: Tensor) -> Tensor:
    """() float32: max |x|; 0 for an empty tensor."""
    return abs_without_nan(x).amax() if x.numel() else x.new_zeros(())


def amax_stacked_ref(w_GNK: Tensor) -> Tensor:
    """[G] float32: max |w| of each group."""
    return abs_without_nan(w_GNK).flatten(1).amax(1) if w_GNK.numel() else w_GNK.new_zeros(len(w_GNK))


def amax_grouped_ref(x_TK: Tensor, splits: Splits) -> Tensor:
    """[G] float32: max |x| over each group's rows; 0 for an empty group. A maximum does not depend on the order."""
    amax = x_TK.new_zeros(splits.num_groups + 1)  # the last one takes the rows past the sum
    if x_TK.numel():
        amax.scatter_reduce_(0, splits.group_of_row, abs_without_nan(x_TK).amax(1), "amax")
    return amax[:-1]


def scale_from_amax_ref(
    amax: Tensor, form: Float8Format, power_2_scale: bool, amax_epsilon: float, largest: float = FLOAT32_MAX
) -> Tensor:
    """float32 scales from float32 amaxes of any shape. power_2_scale: rounded down to a power of two.

    largest: stands in for a quotient of Inf
    """
    amax = amax.clamp(min=amax_epsilon)
    # Not `form.max / amax`: torch turns a scalar numerator into a reciprocal and a product, which rounds twice.
    scale = torch.full_like(amax, form.max) / amax
    scale = scale.masked_fill(scale.isinf(), largest).masked_fill((amax == 0) | amax.isinf(), 1.0)
    return (scale.view(torch.int32) & _CLEAR_MANTISSA).view(torch.float32) if power_2_scale else scale


def scale_inv_ref(scale: Tensor) -> Tensor:
    """fl(1 / scale)."""
    return torch.ones_like(scale) / scale


def cast_float8_ref(scaled: Tensor, form: Float8Format) -> Tensor:
    """Codes of float32 values that are scaled already. Saturating, also from Inf; NaN stays NaN.

    torch's own E4M3 cast saturates from 2.12 on and gives NaN before, its E5M2 cast overflows to Inf: hence the clamp.
    """
    return scaled.clamp(-form.max, form.max).to(form.dtype)


def format_of(codes: Tensor) -> dict[str, bool | str]:
    """FORM and NATIVE of `float8_codes` for these codes on their device."""
    native = codes.is_cuda and torch.cuda.get_device_capability(codes.device) >= (8, 9)
    return {"FORM": "E4M3" if codes.dtype == torch.float8_e4m3fn else "E5M2", "NATIVE": native}
