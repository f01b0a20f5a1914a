"""SwiGLU: the gated activation of most language models."""

from __future__ import annotations

from ops.activation import ActivationOperation
from ops.kernels.activation import Activation


class SwiGLU(ActivationOperation):
    """y = silu(a) b, for x [..., 2I] of gate a and linear part b; y [..., I].

    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first
    cache_quantized_input: keep x for backward in Float8, see `ActivationOperation`

    Raises ValueError for an interleave size that is not positive, and for an x whose features are no multiple of 2 S.
    """

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        spec = Activation("swiglu", glu_interleave_size=glu_interleave_size)
        super().__init__(spec, cache_quantized_input=cache_quantized_input)
