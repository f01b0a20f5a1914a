"""SiTUGLU: SwiGLU with both factors bounded by a tanh, smoothly."""

from __future__ import annotations

from ops.activation import ActivationOperation
from ops.kernels.activation import Activation


class SiTUGLU(ActivationOperation):
    """y = beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2), for x [..., 2I] of gate a, linear part b; y [..., I].

    No |y| exceeds beta1 beta2; near zero, and for large betas, it is SwiGLU.

    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first
    cache_quantized_input: keep x for backward in Float8, see `ActivationOperation`

    Raises ValueError for a beta that is not finite and above 0, an interleave size that is not positive, and for an x
    whose features are no multiple of 2 S.
    """

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        spec = Activation("situglu", beta1=beta1, beta2=beta2, glu_interleave_size=glu_interleave_size)
        super().__init__(spec, cache_quantized_input=cache_quantized_input)
