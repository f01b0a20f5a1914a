"""ClampedSwiGLU: the gated activation of gpt-oss."""

from __future__ import annotations

from ops.gated import ActivationOperation
from ops.kernels.activation import Activation


class ClampedSwiGLU(ActivationOperation):
    """y = a' * sigmoid(alpha * a') * (b' + glu_linear_offset) for x = [a | b], [..., 2I] -> [..., I].

    a' = min(a, limit), b' = min(max(b, -limit), limit). The gate a comes first; glu_interleave_size as for `SwiGLU`
    (gpt-oss itself interleaves single columns: 1).
    Raises ValueError for a limit that is not positive and finite, or an alpha or offset that is not finite.
    """

    def __init__(
        self,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        *,
        glu_interleave_size: int | None = None,
    ) -> None:
        super().__init__(Activation("clamped_swiglu", limit, alpha, glu_linear_offset, glu_interleave_size))

    def extra_repr(self) -> str:
        spec = self.activation
        return (
            f"limit={spec.limit}, alpha={spec.alpha}, glu_linear_offset={spec.glu_linear_offset}, "
            f"glu_interleave_size={spec.glu_interleave_size}"
        )
