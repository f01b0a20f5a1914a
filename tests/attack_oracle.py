"""The oracle of `tests.attack`: layers and number formats in float64, by plain torch and its autograd.

Written from the formulas in the docstrings of the operations, recipes and casts. It calls no operation, kernel or
quantizer: of a recipe it reads the fields alone. Formats are computed by their exponents in float64; where a definition
rounds to float32, so does `float32`. A product of two float32 numbers is exact in float64, and a quotient that is
rounded twice is rounded as once, so the codes and scales are those of the definitions, bit for bit.

Values, not codes: an operand is a matrix of float64 numbers and a factor `alpha` that is applied to the product.
"""
# T rows, G groups, K in features, N out features

from __future__ import annotations

import math
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    HighPrecision,
    MixedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Recipe,
    Role,
)
from tests.reference import clamp

FLOAT32_MAX = torch.finfo(torch.float32).max
HADAMARD_SIGNS = "+++-+------+-+--"


class Layer(NamedTuple):
    """One module of a case: the name of its class in `ops`, its arguments, and its own recipe, if it has one."""

    kind: str
    arguments: Mapping[str, Any]
    recipe: Recipe | None = None


class Operand(NamedTuple):
    """values [R, C]; alpha: (), [R, 1] with a factor for each row, or None."""

    values: Tensor
    alpha: Tensor | None


# ------------------------------------------------------------------------------------------------------------- formats


class Element(NamedTuple):
    """A number format of a code: bits of the mantissa, exponent of the smallest normal number, largest number."""

    mantissa: int
    smallest: int
    largest: float


ELEMENTS = {"E4M3": Element(3, -6, 448.0), "E5M2": Element(2, -14, 57344.0), "E2M1": Element(1, 0, 6.0)}


def float32(x: Tensor) -> Tensor:
    """x rounded to float32, held in float64."""
    return x.to(torch.float32).to(torch.float64)


def power_of_2(exponent: Tensor) -> Tensor:
    """2^exponent, exactly, by the bits of a float64."""
    return ((exponent.to(torch.int64) + 1023) << 52).view(torch.float64)


def floor_log2(x: Tensor) -> Tensor:
    """floor(log2(x)) of positive numbers; of 0 it is -1000."""
    exponent = torch.frexp(x).exponent.to(torch.int64) - 1
    return torch.where(x > 0, exponent, -1000)


def to_element(x: Tensor, element: Element) -> Tensor:
    """The nearest number of the format, ties to even, saturating. x is finite."""
    step = power_of_2(floor_log2(x.abs()).clamp(min=element.smallest) - element.mantissa)
    return (torch.round(x / step) * step).clamp(-element.largest, element.largest)


def scale_of(amax: Tensor, largest: float, limit: float, power_2: bool) -> Tensor:
    """float32(largest / amax), `limit` where that is Inf; 1 where amax is 0 or Inf."""
    scale = float32(largest / amax.clamp(min=1e-320)).nan_to_num(posinf=limit)
    if power_2:
        scale = power_of_2(floor_log2(scale))
    return torch.where((amax > 0) & amax.isfinite(), scale, 1.0)


def in_blocks(x: Tensor, rows: int, columns: int) -> Tensor:
    """x [R, C], padded with zeros, as [R / rows, rows, C / columns, columns]."""
    x = F.pad(x, (0, -x.shape[1] % columns, 0, -x.shape[0] % rows))
    return x.reshape(x.shape[0] // rows, rows, x.shape[1] // columns, columns)


def out_of_blocks(blocks: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of `in_blocks`."""
    return blocks.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]


@dataclass(frozen=True)
class Numbers:
    """How a matrix is quantized along its last axis. Subclasses are the formats."""

    def operand(self, x: Tensor) -> Operand:
        """x [R, C] float64, which is rounded to float32 first, as an operand whose last axis is contracted."""
        raise NotImplementedError


@dataclass(frozen=True)
class PerTensor(Numbers):
    """One scale; `scale` is that of delayed scaling, None: from this tensor."""

    element: Element
    power_2: bool = False
    epsilon: float = 0.0
    scale: Tensor | None = None

    def operand(self, x: Tensor) -> Operand:
        x = float32(x)
        scale = self.scale
        if scale is None:
            amax = largest_magnitude(x).clamp(min=self.epsilon)
            scale = scale_of(amax, self.element.largest, FLOAT32_MAX, self.power_2)
        return Operand(to_element(float32(x * scale), self.element), float32(1 / scale))


@dataclass(frozen=True)
class PerRow(Numbers):
    element: Element
    power_2: bool
    epsilon: float

    def operand(self, x: Tensor) -> Operand:
        x = float32(x)
        amax = F.pad(x.abs(), (0, 1)).amax(1, keepdim=True).clamp(min=self.epsilon)
        scale = scale_of(amax, self.element.largest, FLOAT32_MAX, self.power_2)
        return Operand(float32(to_element(float32(x * scale), self.element) * float32(1 / scale)), None)


@dataclass(frozen=True)
class Blocks128(Numbers):
    element: Element
    square: bool
    power_2: bool
    epsilon: float
    limit: float

    def operand(self, x: Tensor) -> Operand:
        blocks = in_blocks(float32(x), 128 if self.square else 1, 128)
        amax = block_magnitude(blocks).clamp(min=self.epsilon)
        scale = scale_of(amax, self.element.largest, self.limit, self.power_2)
        values = float32(to_element(float32(blocks * scale), self.element) * float32(1 / scale))
        return Operand(out_of_blocks(values, x.shape), None)


@dataclass(frozen=True)
class MX(Numbers):
    element: Element
    floor: bool
    square: bool

    def operand(self, x: Tensor) -> Operand:
        blocks = in_blocks(float32(x), 32 if self.square else 1, 32)
        amax = block_magnitude(blocks)
        if self.floor:
            exponent = floor_log2(amax) - floor_log2(torch.tensor(self.element.largest, dtype=torch.float64)).to(
                amax.device
            )
        else:
            inverse = torch.tensor(1 / self.element.largest, dtype=torch.float32, device=x.device).double()
            bound = float32(amax * inverse)
            exponent = floor_log2(bound)
            exponent = exponent + (power_of_2(exponent.clamp(min=-1000)) < bound)
        exponent = exponent.clamp(-127, 127)
        codes = to_element(float32(blocks * power_of_2(-exponent)), self.element)
        return Operand(out_of_blocks(codes * power_of_2(exponent), x.shape), None)


@dataclass(frozen=True)
class NVFP4(Numbers):
    """hadamard: transform the contracted axis in runs of 16, and round to this dtype; the axis stays padded then."""

    square: bool = False
    row_scaled: bool = False
    hadamard: torch.dtype | None = None

    def operand(self, x: Tensor) -> Operand:
        x = float32(x)
        if self.hadamard is not None:
            x = hadamard(x).to(self.hadamard).double()
        blocks = in_blocks(x, 16 if self.square else 1, 16)
        if self.row_scaled:
            amax = F.pad(x.abs(), (0, 1)).amax(1)[:, None, None, None]
        else:
            amax = largest_magnitude(x)
        encode = torch.where(amax > 0, float32(2688 / amax.clamp(min=1e-320)).clamp(max=FLOAT32_MAX), 1.0)
        decode = float32(1 / encode)
        sixth = torch.tensor(1 / 6, dtype=torch.float32, device=x.device).double()
        block = float32(block_magnitude(blocks) * float32(encode * sixth)).clamp(max=FLOAT32_MAX)
        scale = to_element(block, ELEMENTS["E4M3"])
        inverse = float32(1 / float32(scale * decode).clamp(min=1e-320)).clamp(max=FLOAT32_MAX)
        values = to_element(float32(blocks * inverse), ELEMENTS["E2M1"]) * scale
        alpha = float32(amax / 2688)
        return Operand(out_of_blocks(values, x.shape), alpha[:, :, 0, 0] if self.row_scaled else alpha)


def largest_magnitude(x: Tensor) -> Tensor:
    """max |x|, of nothing 0; NaN counts as 0."""
    return x.abs().nan_to_num(nan=0.0, posinf=math.inf).max() if x.numel() else x.new_zeros(())


def block_magnitude(blocks: Tensor) -> Tensor:
    return blocks.abs().amax((1, 3), keepdim=True) if blocks.numel() else blocks[:, :1, :, :1]


def hadamard(x: Tensor) -> Tensor:
    """Each 16 columns of x, padded with zeros, times diag(signs) H / 4, by butterflies in float32."""
    y = F.pad(x, (0, -x.shape[1] % 16))
    if not y.numel():
        return y
    y = y.unflatten(1, (y.shape[1] // 16, 16)) * torch.tensor([1.0 if c == "+" else -1.0 for c in HADAMARD_SIGNS]).to(y)
    for distance in (1, 2, 4, 8):
        a, b = y.unflatten(2, (-1, 2, distance)).unbind(3)
        y = float32(torch.stack((a + b, a - b), 3)).flatten(2)
    return float32(y / 4).flatten(1)


def numbers_of(recipe: Recipe, role: Role, columnwise: bool, dtype: torch.dtype) -> Numbers | None:
    """The format of an operand of a product; None: high precision. columnwise: dgrad's weight, wgrad's operands.

    Of delayed scaling without its scale. dtype: of the input.
    """
    if isinstance(recipe, MixedScaling):
        field_of = {Role.INPUT: "wgrad", Role.WEIGHT: "dgrad", Role.GRAD_OUTPUT: "wgrad"}
        own = getattr(recipe, f"{role.value}_for_{field_of[role]}") if columnwise else None
        return numbers_of(own if own is not None else getattr(recipe, role.value), role, columnwise, dtype)
    if isinstance(recipe, HighPrecision):
        return None
    if isinstance(recipe, NVFP4BlockScaling):
        if role is Role.WEIGHT:
            return NVFP4(square=not recipe.disable_2d_quantization)
        row_scaled = recipe.row_scaled_activation and role is Role.INPUT and not columnwise
        if not columnwise or recipe.disable_rht:
            return NVFP4(row_scaled=row_scaled)
        rounds = dtype == torch.bfloat16 and not getattr(recipe, "disable_rht_rounding", False)
        return NVFP4(hadamard=torch.bfloat16 if rounds else torch.float32)
    form = recipe.fp8_format.name  # type: ignore[attr-defined]
    element = ELEMENTS["E5M2" if form == "E5M2" or (form == "HYBRID" and role is Role.GRAD_OUTPUT) else "E4M3"]
    if isinstance(recipe, DelayedScaling):
        return PerTensor(element)
    if isinstance(recipe, Float8CurrentScaling):
        return PerTensor(element, recipe.power_2_scale, recipe.amax_epsilon)
    if isinstance(recipe, Float8RowwiseScaling):
        return PerRow(element, recipe.power_2_scale, recipe.amax_epsilon)
    if isinstance(recipe, MXFP8BlockScaling):
        return MX(element, recipe.scaling == "floor", recipe.enable_2d_quantization and role is Role.WEIGHT)
    assert isinstance(recipe, Float8BlockScaling), f"the oracle does not know {recipe}"
    dim = {Role.INPUT: "x", Role.WEIGHT: "w", Role.GRAD_OUTPUT: "grad"}[role]
    square = getattr(recipe, f"{dim}_block_scaling_dim") == 2
    return Blocks128(element, square, not recipe.use_f32_scales, recipe.amax_epsilon, torch.finfo(dtype).max)


# ----------------------------------------------------------------------------------------------------- delayed scaling


@dataclass
class History:
    """Delayed scaling of one operation in one role: amaxes [L, n], the open slot first, and scales [n]."""

    amaxes: Tensor
    scales: Tensor
    pending: dict[int, Tensor] = field(default_factory=dict)  # group -> amax of this step


class DelayedState:
    """The histories of a model by (layer, role). Recorded amaxes take effect at the end of the step."""

    def __init__(self, recipe: DelayedScaling) -> None:
        self.recipe = recipe
        self.histories: dict[tuple[int, Role], History] = {}

    def history(self, layer: int, role: Role, num_scales: int, device: torch.device) -> History:
        kept = self.histories.get((layer, role))
        if kept is None:
            shape = (self.recipe.amax_history_len, num_scales)
            ones = torch.ones(num_scales, dtype=torch.float64, device=device)
            kept = self.histories[layer, role] = History(ones.new_zeros(shape), ones)
        return kept

    def end_step(self, roles: Sequence[Role]) -> None:
        """The step of these roles is over: a group's amax that is not 0 enters its history and gives the next scale."""
        for (_, role), history in self.histories.items():
            if role not in roles or not history.pending:
                continue
            element = ELEMENTS["E4M3"] if role is not Role.GRAD_OUTPUT else ELEMENTS["E5M2"]
            if self.recipe.fp8_format.name != "HYBRID":
                element = ELEMENTS[self.recipe.fp8_format.name]
            for group, amax in history.pending.items():
                if amax == 0:
                    continue
                past = [*history.amaxes[1:, group].tolist(), amax.item()]
                used = max(past) if self.recipe.amax_compute_algo == "max" else past[-1]
                largest = torch.tensor(element.largest * 2.0**-self.recipe.margin, dtype=torch.float64)
                if math.isfinite(used):
                    history.scales[group] = float32(largest / used).clamp(max=FLOAT32_MAX)
                # The open slot holds 0 again; with one row there is nothing else.
                rolled = torch.tensor([0.0, *past[1:]] if len(past) > 1 else [0.0])
                history.amaxes[:, group] = rolled.to(history.amaxes)
            history.pending = {}


@dataclass(frozen=True)
class Casting:
    """How the tensors of one operation (of one group of it) are cast in one call.

    state: of delayed scaling; records: whether this call records amaxes; factor: of both gradients, behind their casts
    """

    recipe: Recipe
    dtype: torch.dtype
    layer: int
    group: int = 0
    num_scales: int = 1
    state: DelayedState | None = None
    records: bool = False
    scales: Mapping[Role, Tensor] = field(default_factory=dict)
    factor: float = 1.0

    def begin(self, device: torch.device) -> Casting:
        """With the scales of this moment for what forward casts: backward casts the same tensors by the same scales."""
        if self.state is None:
            return self
        scales = {
            role: self.state.history(self.layer, role, self.num_scales, device).scales[self.group].clone()
            for role in (Role.INPUT, Role.WEIGHT)
        }
        return replace(self, scales=scales)

    def operand(self, x: Tensor, role: Role, columnwise: bool) -> Operand:
        """x as an operand whose last axis is contracted."""
        numbers = numbers_of(self.recipe, role, columnwise, self.dtype)
        if numbers is None:
            return Operand(x, None)
        if self.state is not None:
            assert isinstance(numbers, PerTensor)
            scale = self.scales.get(role)
            if scale is None:
                scale = self.state.history(self.layer, role, self.num_scales, x.device).scales[self.group].clone()
            numbers = replace(numbers, scale=scale)
        return numbers.operand(x)

    def record(self, x: Tensor, role: Role) -> None:
        if self.state is None or not self.records:
            return
        pending = self.state.history(self.layer, role, self.num_scales, x.device).pending
        amax = largest_magnitude(float32(x))
        pending[self.group] = torch.maximum(pending.get(self.group, amax), amax)


class _Product(torch.autograd.Function):
    """y = x w^T for x [T, K], w [N, K], each operand of each of the three products as the recipe casts it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, casting: Casting) -> Tensor:
        casting.record(x, Role.INPUT)
        casting.record(w, Role.WEIGHT)
        ctx.casting = casting
        ctx.save_for_backward(x, w)
        return times(casting.operand(x, Role.INPUT, False), casting.operand(w, Role.WEIGHT, False))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, w = ctx.saved_tensors
        casting: Casting = ctx.casting
        casting.record(dy, Role.GRAD_OUTPUT)
        dx = dw = None
        if ctx.needs_input_grad[0]:
            operands = casting.operand(dy, Role.GRAD_OUTPUT, False), casting.operand(w.T, Role.WEIGHT, True)
            dx = times(*operands, casting.factor)
        if ctx.needs_input_grad[1]:
            operands = casting.operand(dy.T, Role.GRAD_OUTPUT, True), casting.operand(x.T, Role.INPUT, True)
            dw = times(*operands, casting.factor)
        return dx, dw, None


def times(a: Operand, b: Operand, factor: float = 1.0) -> Tensor:
    """factor a b^T, times the operands' factors: one product of all in float32, unless a has a factor for each row."""
    product = a.values @ b.values.T
    alpha = b.alpha if a.alpha is None else a.alpha
    if a.alpha is not None and b.alpha is not None:
        if a.alpha.dim():
            product = product * b.alpha
        else:
            alpha = float32(a.alpha * b.alpha)
    if alpha is None:
        return product * factor
    return product * (alpha if factor == 1.0 else float32(alpha * float32(torch.tensor(factor))))


class _Scaled(torch.autograd.Function):
    """forward * x, whose gradient is backward * dy."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float, backward: float) -> Tensor:
        ctx.factor = backward
        return x * forward

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy * ctx.factor, None, None


# ---------------------------------------------------------------------------------------------------------- operations


class _Rounded(torch.autograd.Function):
    """Rounds a value, and its gradient, to the dtype in which they are stored."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(torch.float64)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy.to(ctx.dtype).to(torch.float64), None


class _Cached(torch.autograd.Function):
    """f(x), with the gradient of f at x as E4M3 with current scaling holds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> Tensor:
        ctx.function, ctx.dtype = function, dtype
        ctx.save_for_backward(x)
        return function(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        values, alpha = PerTensor(ELEMENTS["E4M3"]).operand(x.reshape(-1, x.shape[-1]))
        assert alpha is not None
        kept = float32(values * alpha).to(ctx.dtype).double().view(x.shape).requires_grad_()
        with torch.enable_grad():
            (dx,) = torch.autograd.grad(ctx.function(kept), kept, dy)
        return dx, None, None


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


UNGATED: dict[str, Callable[[Tensor], Tensor]] = {
    "GELU": gelu, "QGELU": quick_gelu, "ReLU": F.relu, "SReLU": squared_relu, "SiLU": F.silu,
    "ScaledSReLU": squared_relu,
}  # fmt: skip
GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "GLU": torch.sigmoid, "GEGLU": gelu, "QGEGLU": quick_gelu, "ReGLU": F.relu, "SReGLU": squared_relu,
    "SwiGLU": F.silu, "ScaledSwiGLU": F.silu,
}  # fmt: skip
CLAMPED = ("ClampedSwiGLU", "ScaledClampedQGeGLU")
SITU = ("SiTUGLU", "ScaledSiTUGLU")
ACTIVATIONS = (*UNGATED, *GATES, *CLAMPED, *SITU)


def activated(layer: Layer, x: Tensor) -> Tensor:
    """The activation without scales."""
    kind, given = layer.kind, layer.arguments
    if kind in UNGATED:
        return UNGATED[kind](x)
    run = given.get("glu_interleave_size")
    if run is None:
        a, b = x.chunk(2, -1)
    else:
        runs = x.unflatten(-1, (-1, 2, run))
        a, b = runs[..., 0, :].flatten(-2), runs[..., 1, :].flatten(-2)
    if kind in GATES:
        return GATES[kind](a) * b
    if kind in SITU:
        beta1, beta2 = given.get("beta1", 4.0), given.get("beta2", 25.0)
        return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * beta2 * torch.tanh(b / beta2)
    limit, alpha = given.get("limit", 7.0), given.get("alpha", 1.702)
    a, b = clamp(a, -math.inf, limit), clamp(b, -limit, limit)
    return a * torch.sigmoid(alpha * a) * (b + given.get("glu_linear_offset", 1.0))


@dataclass
class Call:
    """One forward of a case in the oracle. dtypes: what each layer computes in.

    parameters: leaves in float64 by the names of the model's parameters; extras: leaves, and split sizes as ints;
    indices: the experts that the model chose, [T, topk], of which `problems` says whether the logits allow them
    apart: the layers that run by themselves, which nothing is fused with
    """

    layers: Sequence[Layer]
    parameters: Mapping[str, Tensor]
    extras: dict[str, Any]
    dtypes: Sequence[torch.dtype]
    recipe: Recipe
    state: DelayedState | None = None
    records: bool = True
    indices: Tensor | None = None
    apart: Container[int] = ()
    dtype: torch.dtype = torch.float64  # of the layer that runs
    outputs: dict[str, Tensor] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def run(self, x: Tensor) -> Tensor:
        """y in float64, rounded to the dtype after each layer."""
        for index, (layer, dtype) in enumerate(zip(self.layers, self.dtypes, strict=True)):
            self.dtype = dtype
            if dtype == torch.float64:
                x = self._layer(index, layer, x)
            else:
                x = _Rounded.apply(self._layer(index, layer, _Rounded.apply(x, dtype)), dtype)
        return x

    def _casting(self, index: int, layer: Layer, num_scales: int) -> Casting:
        recipe = layer.recipe or self.recipe
        state = self.state if isinstance(recipe, DelayedScaling) else None
        return Casting(recipe, self.dtype, index, 0, num_scales, state, self.records)

    def _scale_behind(self, index: int) -> float | None:
        """The scale of a ConstantScale behind a Linear whose products take it in backward: behind their casts."""
        pair = self.layers[index : index + 2]
        if [layer.kind for layer in pair] != ["Linear", "ConstantScale"] or pair[0].recipe != pair[1].recipe:
            return None
        if index in self.apart or index + 1 in self.apart:
            return None
        quantizer = (pair[0].recipe or self.recipe).quantizer(Role.GRAD_OUTPUT)
        if quantizer is None or quantizer.keeps_state:
            return None
        return float(pair[1].arguments["scale"]) or None

    def _parameter(self, index: int, name: str, groups: int | None = None) -> Tensor | None:
        """A parameter; of a grouped layer with one a group, all of them stacked."""
        found = self.parameters.get(f"{index}.{name}")
        if found is None and groups is not None and f"{index}.{name}0" in self.parameters:
            found = torch.stack([self.parameters[f"{index}.{name}{group}"] for group in range(groups)])
        return found

    def _layer(self, index: int, layer: Layer, x: Tensor) -> Tensor:
        kind, given = layer.kind, layer.arguments
        if kind == "Again":
            again = replace(self, apart=(given["layer"],))  # what stands behind its first use does not behind this one
            again.dtype = self.dtype
            return again._layer(given["layer"], self.layers[given["layer"]], x)
        if kind == "Tanh":
            return torch.tanh(x)
        weight, bias = self._parameter(index, "weight"), self._parameter(index, "bias")
        if kind == "Linear":
            assert weight is not None
            factor = self._scale_behind(index) or 1.0
            casting = replace(self._casting(index, layer, 1).begin(x.device), factor=factor)
            y = _Product.apply(x.reshape(-1, x.shape[-1]), weight, casting)
            y = y if bias is None else y + _Scaled.apply(bias, 1.0, factor)
            return y.view(*x.shape[:-1], y.shape[-1])
        if kind == "GroupedLinear":
            return self._grouped(index, layer, x)
        if kind == "Bias":
            return x + bias
        if kind in ACTIVATIONS:

            def function(h: Tensor) -> Tensor:
                return activated(layer, h)

            y = _Cached.apply(x, function, self.dtype) if given.get("cache_quantized_input") else function(x)
            return y * self.extras["scales"][..., None] if kind.startswith("Scaled") else y
        if kind in ("RMSNorm", "LayerNorm", "L2Normalization"):
            return self._norm(layer, x, weight, bias)
        if kind == "ConstantScale":
            if index and self._scale_behind(index - 1) is not None:
                return _Scaled.apply(x, given["scale"], 1.0)
            return x * given["scale"]
        if kind == "Reshape":
            return x.reshape(given["shape"])
        if kind == "MakeExtraOutput":
            self.extras[given["name"]] = self.outputs[given["name"]] = x
            return x
        if kind == "AddExtraInput":
            return x + self.extras[given["name"]]
        if kind == "Router":
            assert weight is not None
            self._route(layer, x, weight, bias)
            return x
        if kind == "Dispatch":
            return self._dispatch(layer, x)
        if kind == "Combine":
            return (
                x.index_select(0, self.extras["row_of_slot"].flatten())
                .unflatten(0, self.extras["row_of_slot"].shape)
                .sum(1)
            )
        assert kind in ("Identity", "Dropout"), kind
        return x

    def _norm(self, layer: Layer, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        if layer.kind == "L2Normalization":
            return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + layer.arguments.get("eps", 1e-6))
        assert weight is not None
        weight = weight + 1 if layer.arguments.get("zero_centered_gamma") else weight
        eps = layer.arguments.get("eps", 1e-5)
        if layer.kind == "RMSNorm":
            return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight
        assert bias is not None
        centred = x - x.mean(-1, keepdim=True)
        return centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * weight + bias

    def _grouped(self, index: int, layer: Layer, x: Tensor) -> Tensor:
        groups = layer.arguments["num_groups"]
        weight, bias = self._parameter(index, "weight", groups), self._parameter(index, "bias", groups)
        assert weight is not None
        casting = self._casting(index, layer, groups)
        parts, begin = [], 0
        for group, size in enumerate(self.extras["split_sizes"]):
            of_group = replace(casting, group=group).begin(x.device)
            y = _Product.apply(x[begin : begin + size], weight[group], of_group)
            if bias is not None:
                scaled = layer.arguments.get("scale_bias")
                y = y + (self.extras["scales"][begin : begin + size, None] * bias[group] if scaled else bias[group])
            parts.append(y)
            begin += size
        parts.append(x.new_zeros(x.shape[0] - begin, layer.arguments["out_features"]))
        return torch.cat(parts)

    def _route(self, layer: Layer, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        given, indices = layer.arguments, self.indices
        assert indices is not None
        topk, experts = given["topk"], given["num_experts"]
        logits = x @ weight.T if bias is None else x @ weight.T + bias
        sigmoid = given.get("score_function") == "sigmoid"
        scores, eps = (logits.sigmoid(), 1e-20) if sigmoid else (logits.softmax(-1), 0.0)
        if len(x):
            keys = (scores if sigmoid else logits).detach()
            best = keys.topk(topk, -1).values
            chosen = keys.gather(1, indices)
            coarse = max(torch.finfo(dtype).eps for dtype in self.dtypes)
            slack = (1e-10 if coarse < 1e-9 else 1e-4 if coarse < 1e-6 else 0.03) * (1 + best.abs().max().item())
            if (best - chosen).abs().max() > slack or (indices.sort(-1).values.diff(dim=-1) == 0).any():
                self.problems.append(
                    f"indices: not the {topk} largest {'scores' if sigmoid else 'logits'}, largest first"
                )
        probs = scores.gather(1, indices)
        if given.get("normalize_probs") or not given.get("use_pre_softmax", True):
            probs = probs / (probs.sum(-1, keepdim=True) + eps)
        probs = probs * given.get("scaling_factor", 1.0)
        shares = scores / (scores.sum(-1, keepdim=True) + eps)
        chosen_by = F.one_hot(indices, experts).to(x).mean((0, 1)) if len(x) else x.new_zeros(experts)
        loss = experts * (chosen_by * (shares.mean(0) if len(x) else shares.sum(0))).sum()
        self.outputs |= {"probs": probs, "load_balancing_loss": loss}
        self.extras |= {"probs": probs}

    def _dispatch(self, layer: Layer, x: Tensor) -> Tensor:
        indices = self.indices
        assert indices is not None
        slots = indices.flatten().argsort(stable=True)
        row_of_slot = torch.empty_like(slots)
        row_of_slot[slots] = torch.arange(len(slots), device=slots.device)
        self.extras["row_of_slot"] = row_of_slot.view(indices.shape)
        self.extras["scales"] = self.extras["probs"].flatten()[slots]
        experts = layer.arguments["num_experts"]
        self.extras["split_sizes"] = torch.bincount(indices.flatten(), minlength=experts).tolist()
        return x[slots // indices.shape[1]]
