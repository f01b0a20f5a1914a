"""ScaledSwiGLU: SwiGLU times a factor a row, by which experts weigh their tokens."""

from __future__ import annotations

from torch import Tensor

from ops.activation import ActivationOperation
from ops.kernels.activation import Activation


class ScaledSwiGLU(ActivationOperation):
    """y = silu(a) b scales[..., None], for x [..., 2I] of gate a and linear part b; y [..., I].

    Extra input scales: x.shape[:-1], any floating dtype; the product is rounded once.
    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first

    Raises ValueError for an interleave size that is not positive, an x whose features are no multiple of 2 S, and
    scales of another shape.
    """

    extra_inputs = {"scales": Tensor}

    def __init__(self, glu_interleave_size: int | None = None) -> None:
        super().__init__(Activation("swiglu", glu_interleave_size=glu_interleave_size))
