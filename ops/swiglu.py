"""SwiGLU: silu(gate) * linear."""

from __future__ import annotations

from ops.gated import ActivationOperation
from ops.kernels.activation import Activation


class SwiGLU(ActivationOperation):
    """y = silu(a) * b for x = [a | b], [..., 2I] -> [..., I]; the gate a comes first.

    glu_interleave_size: None for halves, or S for alternating runs of S gate and S linear columns.
    """

    def __init__(self, *, glu_interleave_size: int | None = None) -> None:
        super().__init__(Activation("swiglu", glu_interleave_size=glu_interleave_size))

    def extra_repr(self) -> str:
        return f"glu_interleave_size={self.activation.glu_interleave_size}"
