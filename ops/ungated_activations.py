"""The activations without a gate: y has the shape of x. Which take a factor a row, stands in files of their own."""

from __future__ import annotations

from ops.activation import ActivationOperation
from ops.kernels.activation import Activation, Ungated


class _UngatedActivation(ActivationOperation):
    """cache_quantized_input: keep x for backward in Float8, see `ActivationOperation`."""

    kind: Ungated

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation(self.kind), cache_quantized_input=cache_quantized_input)


class GELU(_UngatedActivation):
    """y = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), the tanh form of gelu, as `F.gelu(x, approximate="tanh")`."""

    kind = "gelu"


class QGELU(_UngatedActivation):
    """y = x sigmoid(1.702 x), the quick form of gelu."""

    kind = "qgelu"


class ReLU(_UngatedActivation):
    """y = max(x, 0). The gradient at 0 is 0."""

    kind = "relu"


class SReLU(_UngatedActivation):
    """y = max(x, 0)^2."""

    kind = "srelu"


class SiLU(_UngatedActivation):
    """y = x sigmoid(x)."""

    kind = "silu"
