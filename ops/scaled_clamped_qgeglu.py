"""ScaledClampedQGeGLU: ClampedSwiGLU times a factor a row. The name is TransformerEngine's."""

from __future__ import annotations

from torch import Tensor

from ops.activation import ActivationOperation
from ops.kernels.activation import Activation


class ScaledClampedQGeGLU(ActivationOperation):
    """y = a' sigmoid(alpha a') (b' + glu_linear_offset) scales[..., None], for x [..., 2I]; y [..., I].

        a' = min(a, limit)      b' = clamp(b, -limit, limit)

    Outside the limits the gradient is zero; at them it is handed on, as by torch.clamp.

    Extra input scales: x.shape[:-1], any floating dtype; the product is rounded once.
    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first

    Raises ValueError as `ClampedSwiGLU` does, and for scales of another shape.
    """

    extra_inputs = {"scales": Tensor}

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
    ) -> None:
        super().__init__(
            Activation("clamped_swiglu", limit, alpha, glu_linear_offset, glu_interleave_size=glu_interleave_size)
        )
