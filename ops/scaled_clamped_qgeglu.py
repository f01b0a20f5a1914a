"""ScaledClampedQGeGLU: ClampedSwiGLU times a scale for each row."""

from __future__ import annotations

from ops.gated import ScaledActivationOperation
from ops.kernels.activation import Activation


class ScaledClampedQGeGLU(ScaledActivationOperation):
    """y[t] = ClampedSwiGLU(x[t]) * scales[t], [..., 2I] -> [..., I].

    Extra input scales: x.shape[:-1]; not cast, rounded once with the product. The numbers are those of
    `ClampedSwiGLU`, and raise what it raises.
    """

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(Activation("clamped_swiglu", limit, alpha, glu_linear_offset, glu_interleave_size))

    def extra_repr(self) -> str:
        spec = self.activation
        return (
            f"glu_interleave_size={spec.glu_interleave_size}, limit={spec.limit}, alpha={spec.alpha}, "
            f"glu_linear_offset={spec.glu_linear_offset}"
        )
