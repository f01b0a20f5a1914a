"""ScaledSReLU: the squared ReLU times a factor a row."""

from __future__ import annotations

from torch import Tensor

from ops.activation import ActivationOperation
from ops.kernels.activation import Activation


class ScaledSReLU(ActivationOperation):
    """y = relu(x)^2 scales[..., None]; no gate, so y has the shape of x.

    Extra input scales: x.shape[:-1], any floating dtype; the product is rounded once.

    Raises ValueError for scales of another shape.
    """

    extra_inputs = {"scales": Tensor}

    def __init__(self) -> None:
        super().__init__(Activation("srelu"))
