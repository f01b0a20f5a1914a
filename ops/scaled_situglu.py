"""ScaledSiTUGLU: SiTUGLU times a factor a row, by which experts weigh their tokens."""

from __future__ import annotations

from torch import Tensor

from ops.activation import ActivationOperation
from ops.kernels.activation import Activation


class ScaledSiTUGLU(ActivationOperation):
    """y = beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2) scales[..., None], for x [..., 2I]; y [..., I].

    Extra input scales: x.shape[:-1], any floating dtype; the product is rounded once.
    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first

    Raises ValueError as `SiTUGLU` does, and for scales of another shape.
    """

    extra_inputs = {"scales": Tensor}

    def __init__(self, glu_interleave_size: int | None = None, *, beta1: float = 4.0, beta2: float = 25.0) -> None:
        super().__init__(Activation("situglu", beta1=beta1, beta2=beta2, glu_interleave_size=glu_interleave_size))
