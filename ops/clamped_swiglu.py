"""ClampedSwiGLU: SwiGLU with clamped inputs, as GPT-OSS uses it."""

from __future__ import annotations

from ops.activation import ActivationOperation
from ops.kernels.activation import Activation


class ClampedSwiGLU(ActivationOperation):
    """y = a' sigmoid(alpha a') (b' + glu_linear_offset), for x [..., 2I] of gate a and linear part b; y [..., I].

        a' = min(a, limit)      b' = clamp(b, -limit, limit)

    Outside the limits the gradient is zero; at them it is handed on, as by torch.clamp.

    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first
    cache_quantized_input: keep x for backward in Float8, see `ActivationOperation`

    Raises ValueError for a limit that is not finite and above 0, an alpha or offset that is not finite, an interleave
    size that is not positive, and for an x whose features are no multiple of 2 S.
    """

    def __init__(
        self,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        *,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        spec = Activation("clamped_swiglu", limit, alpha, glu_linear_offset, glu_interleave_size=glu_interleave_size)
        super().__init__(spec, cache_quantized_input=cache_quantized_input)
