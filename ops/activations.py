"""The activations, gated or not, with or without a factor for each row. They differ only in their `Activation`.

For gated ones x [..., 2I] holds gate a and linear part b, and y is [..., I]. The gate comes first; in
torch.nn.functional.glu it comes second.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from ops.elementwise import ElementwiseOperation
from ops.kernels.collectives import NOT_REPEATED, NOT_TRACED, RankGroup, Ranks, all_reduce
from ops.kernels.elementwise.activation import (
    Activation,
    activation,
    activation_step,
    check_activation,
    dactivation,
)
from ops.kernels.elementwise.chain import Step
from ops.runner.checked import Checked
from ops.runner.operation import BasicOperation
from ops.runner.set_once import SetOnce
from recipes.arguments import as_flag
from recipes.current_scaling import CurrentScalingQuantizer
from recipes.request import PlanRequest
from recipes.tensors.formats import E4M3
from recipes.tensors.quantized_tensor import QuantizedTensor

_INPUT_QUANTIZER = CurrentScalingQuantizer(E4M3)

Value = TypeVar("Value")


class Constant(Generic[Value]):
    """An attribute that is a constant of the operation's `Activation`: setting it gives the operation another one."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, operation: Any, owner: type) -> Value:
        if operation is None:
            return self  # type: ignore[return-value]
        value: Value = getattr(operation.activation, self._name)
        return value

    def __set__(self, operation: Any, value: Value) -> None:
        operation.activation = replace(operation.activation, **{self._name: value})


class ActivationOperation(ElementwiseOperation):
    """y = f(x), or f(x) * scales in subclasses that declare the extra input `scales`, of shape x.shape[:-1].

    Computed in float32 (float64 for float64) and rounded once. `ops.kernels.elementwise.activation` has the formulas.

    cache_quantized_input: save x for backward in eight bits (Float8 current scaling in E4M3, under every recipe), and
                           compute the gradients from the dequantized values. y does not change.
    group: of ranks among which the features of x are divided, by a column-parallel layer in front: dscales is the sum
           of theirs, one all_reduce in backward. Needed there by what takes scales, since a row of x has one scale.
    """

    is_activation = True
    repeatable = True
    group = SetOnce[RankGroup | None]()
    cache_quantized_input = Checked(as_flag)

    def __init__(
        self, activation: Activation, *, cache_quantized_input: bool = False, group: Ranks | None = None
    ) -> None:
        super().__init__()
        self.activation = activation
        self.cache_quantized_input = cache_quantized_input
        self.operand_name = "scales" if "scales" in self.extra_inputs else ""
        self.group = None if group is None else RankGroup(group)
        if self.group is not None:
            self.why_in_full = NOT_REPEATED

    def step(self) -> Step:
        return activation_step(self.activation, self.operand_name != "")

    def check(self, shape: torch.Size, operand: Tensor | None) -> None:
        check_activation(shape, self.activation, operand)

    def features(self, incoming: int | None) -> int | None:
        if incoming is None:
            return None
        check_activation((incoming,), self.activation, None)
        return incoming // 2 if self.activation.gated else incoming

    def kept_x(self, x: Tensor) -> Tensor | QuantizedTensor:
        return _INPUT_QUANTIZER.quantize(x) if self.cache_quantized_input else x

    def compute(self, x: Tensor, operand: Tensor | None) -> Tensor:
        if type(self).step is not ActivationOperation.step:
            return super().compute(x, operand)
        return activation(x, self.activation, operand)

    def gradients(
        self, dy: Tensor, x: Tensor | None, operand: Tensor | None, *, need_dx: bool, need_operand: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        assert x is not None, "an activation is not linear"
        if type(self).step is not ActivationOperation.step:
            return super().gradients(dy, x, operand, need_dx=need_dx, need_operand=need_operand)
        dx, dscales, _ = dactivation(dy, x, self.activation, operand, need_dh=need_dx, need_dscales=need_operand)
        return dx, dscales

    def reduce_operand_gradient(self, gradient: Tensor | None) -> Tensor | None:
        return gradient if gradient is None or self.group is None else all_reduce(gradient, self.group)

    def transfers(self, request: PlanRequest) -> str:
        return "" if self.group is None else f"; all_reduce of dscales, {self.group.describe(request.device)}"

    def kernel(self, request: PlanRequest) -> str:
        return super().kernel(request) + self.transfers(request)

    def why_not_captured(self, request: PlanRequest) -> str | None:
        if self.group is None:
            return super().why_not_captured(request)
        return self.group.why_not_captured(request.device)

    def why_not_traced(self, path: str) -> str | None:
        return super().why_not_traced(path) if self.group is None else NOT_TRACED

    def check_follows(self, previous: BasicOperation) -> None:
        divided = previous.divides_output
        if self.operand_name and divided is not None and divided != self.group:
            raise ValueError(
                f"the features of x are divided among {divided}, but group is {self.group}, and dscales is summed over "
                f"it. Give {type(self).__name__} the group of the column-parallel layer before it."
            )

    def extra_repr(self) -> str:
        spec = self.activation
        given = {field.name: getattr(spec, field.name) for field in fields(spec) if field.name != "kind"}
        shown = [f"{n}={v}" for n, v in given.items() if v != getattr(Activation, n)]
        shown += ["cache_quantized_input=True"] if self.cache_quantized_input else []
        return ", ".join(shown if self.group is None else [*shown, f"group={self.group}"])


class _PlainActivation(ActivationOperation):
    """An activation without constants. If gated, x = [a | b] is [..., 2I] and y [..., I]; else y has the shape of x.

    cache_quantized_input: save x for backward in Float8, see `ActivationOperation`

    Raises ValueError for an x with an odd number of features if the activation is gated.
    """

    kind: str

    def __init__(self, *, cache_quantized_input: bool = False) -> None:
        super().__init__(Activation(self.kind), cache_quantized_input=cache_quantized_input)


class GLU(_PlainActivation):
    """y = sigmoid(a) b."""

    kind = "glu"


class GEGLU(_PlainActivation):
    """y = gelu(a) b, with the tanh form of gelu."""

    kind = "geglu"


class QGEGLU(_PlainActivation):
    """y = a sigmoid(1.702 a) b."""

    kind = "qgeglu"


class ReGLU(_PlainActivation):
    """y = max(a, 0) b. The gradient at a = 0 is 0."""

    kind = "reglu"


class SReGLU(_PlainActivation):
    """y = max(a, 0)^2 b."""

    kind = "sreglu"


class SwiGLU(ActivationOperation):
    """y = silu(a) b, for x [..., 2I] of gate a and linear part b; y [..., I].

    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first
    cache_quantized_input: save x for backward in Float8, see `ActivationOperation`

    Raises ValueError for an interleave size that is not positive, or an x whose features are not a multiple of 2 S.
    """

    glu_interleave_size = Constant[int | None]()

    def __init__(self, *, cache_quantized_input: bool = False, glu_interleave_size: int | None = None) -> None:
        spec = Activation("swiglu", glu_interleave_size=glu_interleave_size)
        super().__init__(spec, cache_quantized_input=cache_quantized_input)


class ClampedSwiGLU(ActivationOperation):
    """y = a' sigmoid(alpha a') (b' + glu_linear_offset), for x [..., 2I] of gate a and linear part b; y [..., I].

        a' = min(a, limit)      b' = clamp(b, -limit, limit)

    The gradient passes within and at the limits, and is zero outside (torch.clamp's is zero at them since torch 2.14).

    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first
    cache_quantized_input: save x for backward in Float8, see `ActivationOperation`

    Raises ValueError for a limit that is not finite and above 0, an alpha or offset that is not finite, an interleave
    size that is not positive, and for an x whose features are not a multiple of 2 S.
    """

    limit = Constant[float]()
    alpha = Constant[float]()
    glu_linear_offset = Constant[float]()
    glu_interleave_size = Constant[int | None]()

    def __init__(
        self,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        *,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        spec = Activation("clamped_swiglu", limit, alpha, glu_linear_offset, glu_interleave_size=glu_interleave_size)
        super().__init__(spec, cache_quantized_input=cache_quantized_input)


class SiTUGLU(ActivationOperation):
    """y = beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2), for x [..., 2I] of gate a, linear part b; y [..., I].

    |y| is at most beta1 beta2. Near zero, and for large betas, y approaches SwiGLU.

    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first
    cache_quantized_input: save x for backward in Float8, see `ActivationOperation`

    Raises ValueError for a beta that is not finite and above 0, an interleave size that is not positive, and for an x
    whose features are not a multiple of 2 S.
    """

    beta1 = Constant[float]()
    beta2 = Constant[float]()
    glu_interleave_size = Constant[int | None]()

    def __init__(
        self,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        cache_quantized_input: bool = False,
        glu_interleave_size: int | None = None,
    ) -> None:
        spec = Activation("situglu", beta1=beta1, beta2=beta2, glu_interleave_size=glu_interleave_size)
        super().__init__(spec, cache_quantized_input=cache_quantized_input)


class GELU(_PlainActivation):
    """y = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), the tanh form of gelu, as `F.gelu(x, approximate="tanh")`."""

    kind = "gelu"


class QGELU(_PlainActivation):
    """y = x sigmoid(1.702 x), the quick form of gelu."""

    kind = "qgelu"


class ReLU(_PlainActivation):
    """y = max(x, 0). The gradient at 0 is 0."""

    kind = "relu"


class SReLU(_PlainActivation):
    """y = max(x, 0)^2."""

    kind = "srelu"


class SiLU(_PlainActivation):
    """y = x sigmoid(x)."""

    kind = "silu"


class ScaledSwiGLU(ActivationOperation):
    """y = silu(a) b scales[..., None], for x [..., 2I] of gate a and linear part b; y [..., I].

    Extra input scales: x.shape[:-1], any floating dtype; the product is rounded once.
    group: see `ActivationOperation`
    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first

    Raises ValueError for an interleave size that is not positive, an x whose features are not a multiple of 2 S, and
    scales of another shape.
    """

    extra_inputs = {"scales": Tensor}
    glu_interleave_size = Constant[int | None]()

    def __init__(self, glu_interleave_size: int | None = None, *, group: Ranks | None = None) -> None:
        super().__init__(Activation("swiglu", glu_interleave_size=glu_interleave_size), group=group)


class ScaledClampedQGeGLU(ActivationOperation):
    """y = a' sigmoid(alpha a') (b' + glu_linear_offset) scales[..., None], for x [..., 2I]; y [..., I].

        a' = min(a, limit)      b' = clamp(b, -limit, limit)

    The gradient passes within and at the limits, and is zero outside (torch.clamp's is zero at them since torch 2.14).

    Extra input scales: x.shape[:-1], any floating dtype; the product is rounded once.
    group: see `ActivationOperation`
    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first

    Raises ValueError as `ClampedSwiGLU` does, and for scales of another shape.
    """

    extra_inputs = {"scales": Tensor}
    limit = Constant[float]()
    alpha = Constant[float]()
    glu_linear_offset = Constant[float]()
    glu_interleave_size = Constant[int | None]()

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        glu_linear_offset: float = 1.0,
        group: Ranks | None = None,
    ) -> None:
        spec = Activation("clamped_swiglu", limit, alpha, glu_linear_offset, glu_interleave_size=glu_interleave_size)
        super().__init__(spec, group=group)


class ScaledSiTUGLU(ActivationOperation):
    """y = beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2) scales[..., None], for x [..., 2I]; y [..., I].

    Extra input scales: x.shape[:-1], any floating dtype; the product is rounded once.
    group: see `ActivationOperation`
    glu_interleave_size: None for x = [a | b]; S if runs of S gate and S linear columns alternate, gate first

    Raises ValueError as `SiTUGLU` does, and for scales of another shape.
    """

    extra_inputs = {"scales": Tensor}
    beta1 = Constant[float]()
    beta2 = Constant[float]()
    glu_interleave_size = Constant[int | None]()

    def __init__(
        self,
        glu_interleave_size: int | None = None,
        *,
        beta1: float = 4.0,
        beta2: float = 25.0,
        group: Ranks | None = None,
    ) -> None:
        spec = Activation("situglu", beta1=beta1, beta2=beta2, glu_interleave_size=glu_interleave_size)
        super().__init__(spec, group=group)


class ScaledSReLU(ActivationOperation):
    """y = relu(x)^2 scales[..., None]; not gated, so y has the shape of x.

    Extra input scales: x.shape[:-1], any floating dtype; the product is rounded once.
    group: see `ActivationOperation`

    Raises ValueError for scales of another shape.
    """

    extra_inputs = {"scales": Tensor}

    def __init__(self, *, group: Ranks | None = None) -> None:
        super().__init__(Activation("srelu"), group=group)
