"""The gated activations of one shape, y = f(a) b. SwiGLU and those with constants stand in files of their own.

x [..., 2I] holds gate a and linear part b; y is [..., I]. The gate comes first: torch.nn.functional.glu has it second.
"""

from __future__ import annotations

from ops.activation import ActivationOperation
from ops.kernels.activation import Activation, Gated


class _GatedActivation(ActivationOperation):
    """For x = [a | b], [..., 2I]; y [..., I].

    cache_quantized_input: keep x for backward in Float8, see `ActivationOperation`

    Raises ValueError for an x with an odd number of features.
    """

    kind: Gated

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation(self.kind), cache_quantized_input=cache_quantized_input)


class GLU(_GatedActivation):
    """y = sigmoid(a) b."""

    kind = "glu"


class GEGLU(_GatedActivation):
    """y = gelu(a) b, with the tanh form of gelu."""

    kind = "geglu"


class QGEGLU(_GatedActivation):
    """y = a sigmoid(1.702 a) b."""

    kind = "qgeglu"


class ReGLU(_GatedActivation):
    """y = max(a, 0) b. The gradient at a = 0 is 0."""

    kind = "reglu"


class SReGLU(_GatedActivation):
    """y = max(a, 0)^2 b."""

    kind = "sreglu"
