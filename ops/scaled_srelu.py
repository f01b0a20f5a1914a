"""ScaledSReLU: the squared ReLU times a scale for each row."""

from __future__ import annotations

from ops.gated import ScaledActivationOperation
from ops.kernels.activation import Activation


class ScaledSReLU(ScaledActivationOperation):
    """y[t] = max(x[t], 0)^2 * scales[t], [..., I] -> [..., I]. Extra input scales: x.shape[:-1]."""

    def __init__(self) -> None:
        super().__init__(Activation("srelu"))
