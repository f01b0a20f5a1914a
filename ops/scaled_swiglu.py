"""ScaledSwiGLU: SwiGLU times a scale for each row."""

from __future__ import annotations

from ops.gated import ScaledActivationOperation
from ops.kernels.activation import Activation


class ScaledSwiGLU(ScaledActivationOperation):
    """y[t] = silu(a[t]) * b[t] * scales[t] for x = [a | b], [..., 2I] -> [..., I]; the gate a comes first.

    Extra input scales: x.shape[:-1], usually the routing probabilities. They are not cast: the product is computed in
    float32 and rounded once. glu_interleave_size: as for `SwiGLU`.
    """

    def __init__(self, glu_interleave_size: int | None = None) -> None:
        super().__init__(Activation("swiglu", glu_interleave_size=glu_interleave_size))

    def extra_repr(self) -> str:
        return f"glu_interleave_size={self.activation.glu_interleave_size}"
