"""The random Hadamard transform of 16 rows: y = H diag(signs) x / 4, H the Sylvester matrix of 16, the signs fixed.

It is orthogonal, so dy^T x is unchanged if both are transformed, and it spreads an outlier over 16 numbers.

All in float32 and in one order: the signs, then butterflies (a + b, a - b) of rows 1, 2, 4 and 8 apart, then rounding
to bfloat16 if `rounded`, then times 1/4. No two steps can be contracted into one, so the bits agree everywhere. But
where a sum overflows float32 (16 numbers of 2^124 and more), a kernel may take for Inf what is NaN here, Inf - Inf: it
looks at one pair of the last butterflies at most, which is enough for an Inf that was there before. And a fourth that
is subnormal may be rounded here where a kernel does not round it: of float32 input, for of 16-bit input it is exact.

TransformerEngine multiplies bfloat16 matrices, of which one has the entries +-1/4, and rounds the float32 sums of 16
exact terms to bfloat16. Rounded before the factor of 1/4 the numbers are the same, but below 2^-124, where here they
have more places, and from 2^126 on, where they become Inf. The order of those sums is the tensor cores'. In any order
they are exact, and so the bits the same, where the numbers of the 16 that are not 0 lie within a factor of 2^12;
elsewhere a sum may differ in the last place of float32 before it is rounded, and then, rarely, in that of bfloat16.

Source: signs and size as TransformerEngine's NVFP4BlockScaling (read at d0067d0).
"""

import torch
from torch import Tensor

SIZE = 16
SIGNS = (1.0, 1.0, 1.0, -1.0, 1.0, -1.0, -1.0, -1.0, -1.0, -1.0, -1.0, 1.0, -1.0, 1.0, -1.0, -1.0)
NEGATIVE = sum(2**row for row, sign in enumerate(SIGNS) if sign < 0)  # their signs as bits


def hadamard_ref(x: Tensor, *, inverse: bool = False, rounded: bool = False) -> Tensor:
    """The random Hadamard transform of each 16 rows of x [..., 16 n, K] float32, or its inverse.

    rounded: to bfloat16, in float32
    """
    y = x.unflatten(-2, (x.shape[-2] // SIZE, SIZE))
    # Made on the device: while a CUDA graph is captured, nothing can be copied from the host.
    negative = (NEGATIVE >> torch.arange(SIZE, device=x.device)) & 1
    signs = (1 - 2 * negative)[:, None].to(x.dtype)
    y = y if inverse else y * signs
    for distance in (1, 2, 4, 8):
        pairs = y.unflatten(-2, (SIZE // (2 * distance), 2, distance))
        a, b = pairs.unbind(-3)
        y = torch.stack((a + b, a - b), -3).flatten(-4, -2)
    if rounded:
        y = y.to(torch.bfloat16).to(torch.float32)
    y = y * 0.25
    return (y * signs if inverse else y).flatten(-3, -2)
