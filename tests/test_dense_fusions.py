"""Fusions with a dense Linear, in every dtype and recipe: as unfused bit for bit on the CPU, or where they round less
within one rounding of float64; and what each refuses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from fused import (
    FUSIONS,
    BackwardActivationBias,
    BackwardLinearAdd,
    BackwardLinearScale,
    ForwardLinearBiasActivation,
    ForwardLinearBiasAdd,
    LinearScaleAdd,
)
from fuser import Sequential, autocast, ops
from fuser.testing import TOLERANCES, check_fusion
from ops import BasicOperation
from ops.activations import ActivationOperation
from ops.kernels.elementwise.activation import Activation
from ops.products.product import gemm
from recipes import Role
from recipes.registry import as_recipe
from tests.check_operation import DEVICES, DTYPES
from tests.reference import assert_same_bits, gradients, leaves

K, N = 32, 64  # in and out features of the Linear
RECIPES = [None, "fp8_current", "mxfp8", "fp8_block"]


def linear(bias: bool = False) -> ops.Linear:
    return ops.Linear(K, N, bias=bias)


def bias(size: int = N) -> ops.Bias:
    operation = ops.Bias(size)
    torch.nn.init.normal_(operation.bias)
    return operation


def srelu() -> ActivationOperation:
    """Not gated, and without scales."""
    return ActivationOperation(Activation("srelu"))


class Case(NamedTuple):
    fusion: Any
    make: Callable[[], Sequence[BasicOperation]]
    extra: bool = False  # whether there is an extra input, of y's shape


FORWARD = {
    "linear-swiglu": Case(ForwardLinearBiasActivation, lambda: [linear(), ops.SwiGLU()]),
    "linear_bias-clamped": Case(ForwardLinearBiasActivation, lambda: [linear(True), ops.ClampedSwiGLU()]),
    "linear-bias-srelu": Case(ForwardLinearBiasActivation, lambda: [linear(), bias(), srelu()]),
    "linear_bias-bias-swiglu": Case(
        ForwardLinearBiasActivation, lambda: [linear(True), bias(), ops.SwiGLU(glu_interleave_size=8)]
    ),
    "linear-add": Case(ForwardLinearBiasAdd, lambda: [linear(), ops.AddExtraInput()], True),
    "linear_bias-add": Case(ForwardLinearBiasAdd, lambda: [linear(True), ops.AddExtraInput()], True),
    "linear-bias-add": Case(ForwardLinearBiasAdd, lambda: [linear(), bias(), ops.AddExtraInput()], True),
}
BACKWARD = {
    "bias-swiglu": Case(BackwardActivationBias, lambda: [bias(K), ops.SwiGLU()]),
    "linear_bias-swiglu": Case(BackwardActivationBias, lambda: [linear(True), ops.SwiGLU()]),
    "linear-bias-srelu": Case(BackwardActivationBias, lambda: [linear(), bias(), srelu()]),
    "make-linear": Case(BackwardLinearAdd, lambda: [ops.MakeExtraOutput("copy"), linear(True)]),
    "make_in_place-linear": Case(BackwardLinearAdd, lambda: [ops.MakeExtraOutput("copy", in_place=True), linear()]),
    "make-linear-back": Case(
        BackwardLinearAdd, lambda: [ops.MakeExtraOutput("copy"), linear(), ops.Linear(N, K), ops.AddExtraInput("copy")]
    ),
}
SCALED = {
    f"linear{'_bias' if with_bias else ''}-scale{scale}": Case(
        BackwardLinearScale,
        lambda with_bias=with_bias, scale=scale: [linear(with_bias), ops.ConstantScale(scale)],
    )
    for scale in (1.0, 0.25, -4.0, 2.0**-12, 3.5, -0.3)
    for with_bias in (False, True)
} | {
    f"linear-scale{scale}-add": Case(
        LinearScaleAdd, lambda scale=scale: [linear(), ops.ConstantScale(scale), ops.AddExtraInput()], True
    )
    for scale in (1.0, -2.5, 3.5, 0.25, -4.0)
}
SHAPES = [(K,), (7, K), (2, 3, K), (0, K), (2, 0, K), (130, K)]


def check(case: Case, shape: tuple[int, ...], **settings: Any) -> None:
    device = settings.get("device", "cpu")
    tolerance: float | None = 0.0 if device == "cpu" else TOLERANCES[settings["dtype"]]
    if case.fusion.rounds_less:  # under a recipe dy is quantized, not dy times the scale: other codes
        tolerance = None if settings.get("recipe") is None else 0.1
    extras = {"extra": (*shape[:-1], N)} if case.extra else None
    check_fusion(case.fusion, case.make, shape, extras=extras, tolerance=tolerance, **settings)


def on(operations: Sequence[BasicOperation], *fusions: Any) -> Sequential:
    return Sequential(*operations, fusions=fusions)


# Fused as unfused


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", [*FORWARD, *BACKWARD])
def test_fused_is_unfused(name: str, recipe: str | None, dtype: torch.dtype, device: str) -> None:
    check((FORWARD | BACKWARD)[name], (9, K), recipe=recipe, dtype=dtype, device=device)


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("name", SCALED)
def test_a_scale_of_the_products_is_rounded_once(
    name: str, recipe: str | None, dtype: torch.dtype, device: str
) -> None:
    check(SCALED[name], (9, K), recipe=recipe, dtype=dtype, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES if recipe])
@pytest.mark.parametrize("adds", [False, True])
def test_under_a_recipe_the_codes_of_dy_are_scaled(adds: bool, recipe: str, dtype: torch.dtype, device: str) -> None:
    """Gradients and y in float64 of the codes, within half a last place, and on a GPU what its instructions lose."""
    scale, layer = 3.5, linear().to(device, dtype)
    fusion = LinearScaleAdd if adds else BackwardLinearScale
    sequential = on([layer, ops.ConstantScale(scale), *[ops.AddExtraInput()] * adds], fusion)
    x, dy, extra = (torch.randn(64, size).to(device, dtype) for size in (K, N, N))
    with autocast(recipe=recipe):
        found = run(sequential, x.requires_grad_(), dy, **({"extra": extra} if adds else {}))
    w, wide = layer.weight.detach(), {}
    for name, tensor, role in (("x", x, Role.INPUT), ("w", w, Role.WEIGHT), ("dy", dy, Role.GRAD_OUTPUT)):
        made = as_recipe(recipe).quantizer(role).quantize(tensor.detach(), rowwise=True, columnwise=True)
        wide[name] = [copy.dequantize().double() for copy in (made.rowwise, made.columnwise)]
    factors = {
        "gradient of x": (wide["dy"][0], wide["w"][1]),
        "gradient of 0.weight": (wide["dy"][1].T, wide["x"][1]),
        "y": (wide["x"][0], wide["w"][0].T),
    }
    for name, (a, b) in factors.items() if adds else list(factors.items())[:2]:
        exact = scale * a @ b + (extra.double() if name == "y" else 0)
        allowed = exact.abs() * torch.finfo(dtype).eps / 2 + 1e-5 * exact.abs().max()
        if device == "cuda":  # two of Hopper's instructions, of which each keeps 14 bits of its largest term
            allowed += 2 * 2.0**-13 * scale * a.abs() @ b.abs()
        assert ((found[name].double() - exact).abs() <= allowed).all(), name


@pytest.mark.pairwise
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "name", ["linear-bias-srelu", "linear-bias-add", "linear-scale0.25-add", "linear-scale3.5-add"]
)
def test_a_forward_of_any_shape(name: str, shape: tuple[int, ...], recipe: str | None) -> None:
    check((FORWARD | SCALED)[name], shape, recipe=recipe, dtype=torch.float32, draws=4)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("name", ["bias-swiglu", "linear_bias-swiglu", "make-linear", "linear_bias-scale0.25"])
def test_a_backward_of_any_shape(name: str, shape: tuple[int, ...]) -> None:
    check((BACKWARD | SCALED)[name], shape, dtype=torch.float32, draws=4)


def run(sequential: Sequential, x: Tensor, dy: Tensor, outputs: Sequence[str] = (), **extras: Tensor) -> dict[str, Any]:
    """y and every gradient."""
    given = leaves({"x": x, **extras})
    sequential.zero_grad()
    y = sequential(**given, outputs=outputs)
    (y[0] if outputs else y).backward(dy)
    return {"y": y[0] if outputs else y, **gradients({**given, **dict(sequential.named_parameters())})}


def both(operations: Sequence[BasicOperation], *fusions: Any) -> tuple[Sequential, Sequential]:
    """The same operations, fused and not."""
    return on(operations, *fusions), on(operations)


@pytest.mark.pairwise
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("frozen", ["x", "0.weight", "0.bias", "1.bias"])
@pytest.mark.parametrize("name", ["linear_bias-bias-swiglu", "linear_bias-swiglu", "linear_bias-scale0.25"])
def test_what_is_frozen_gets_no_gradient_and_the_rest_the_same(name: str, frozen: str, recipe: str | None) -> None:
    case = (FORWARD | BACKWARD | SCALED)[name]
    if case.fusion is BackwardLinearScale:
        recipe = None
    fused, unfused = both(case.make(), case.fusion)
    for parameter, value in fused.named_parameters():
        value.requires_grad_(parameter != frozen)
    x = torch.randn(5, K).requires_grad_(frozen != "x")
    with autocast(recipe=recipe):
        dy = torch.randn_like(fused(x))
        found, expected = run(fused, x, dy), run(unfused, x, dy)
    assert_same_bits(found, expected)
    assert found.get(f"gradient of {frozen}") is None


@pytest.mark.parametrize("name", ["bias-swiglu", "linear_bias-swiglu"])
def test_a_frozen_bias_costs_no_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    operations = BACKWARD[name].make()
    operations[0].bias.requires_grad_(False)
    monkeypatch.setattr("fused.backward_activation_bias.column_sums", None)
    sequential = on(operations, BackwardActivationBias)
    sequential(torch.randn(5, K, requires_grad=True)).sum().backward()


def test_strides_of_x_dy_and_the_extra_input_do_not_matter() -> None:
    operations = [ops.MakeExtraOutput("copy"), linear(True), ops.ConstantScale(0.5), ops.AddExtraInput()]
    fused, unfused = both(operations, *FUSIONS)
    x, extra, dy = torch.randn(K, 5).T, torch.randn(1, N).expand(5, N), torch.randn(N, 5).T
    assert_same_bits(run(fused, x, dy, extra=extra), run(unfused, x, dy, extra=extra))


@pytest.mark.parametrize("wide", [torch.float32, torch.float64], ids=str)
def test_an_extra_input_of_a_wider_dtype_is_added_in_it(wide: torch.dtype) -> None:
    operations = [linear().bfloat16(), ops.ConstantScale(0.5), ops.AddExtraInput()]
    x, dy = torch.randn(5, K).bfloat16(), torch.randn(5, N).bfloat16()
    extra = torch.randn(5, N, dtype=wide, requires_grad=True)
    found = run(on(operations, LinearScaleAdd), x, dy, extra=extra)
    y = 0.5 * x.double() @ operations[0].weight.double().T + extra.double()
    torch.testing.assert_close(found["y"].double(), y, rtol=2**-8, atol=1e-6)
    assert found["gradient of extra"].dtype == wide and torch.equal(found["gradient of extra"], dy.to(wide))


@pytest.mark.pairwise
@pytest.mark.parametrize("autocast_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtypes", list(product([torch.bfloat16, torch.float32, torch.float64], repeat=3)), ids=str)
def test_an_extra_gradient_is_rounded_as_unfused(
    dtypes: tuple[torch.dtype, ...], autocast_dtype: torch.dtype | None
) -> None:
    x_dtype, first, second = dtypes
    operations = [ops.MakeExtraOutput("copy"), ops.Linear(K, K).to(first), ops.Linear(K, K).to(second)]
    fused, unfused = both([*operations, ops.AddExtraInput("copy")], BackwardLinearAdd)
    x = torch.randn(5, K, dtype=x_dtype, requires_grad=True)
    with torch.autocast("cpu", autocast_dtype, enabled=autocast_dtype is not None):
        dy = torch.randn_like(unfused(x))
        assert_same_bits(run(fused, x, dy), run(unfused, x, dy))


def test_torch_autocast_gives_the_same_fused() -> None:
    operations = [ops.MakeExtraOutput("copy"), linear(), bias(), ops.SwiGLU(), ops.AddExtraInput("copy")]
    fused, unfused = both(operations, *FUSIONS)
    x, dy = torch.randn(5, K, requires_grad=True), torch.randn(5, K).bfloat16()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(run(fused, x, dy), run(unfused, x, dy))


# BackwardLinearAdd: gradients that are absent


def extra_output(fusions: Sequence[Any], used: str) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    sequential = on([ops.Linear(K, K), ops.MakeExtraOutput("copy"), linear(True)], *fusions)
    x = torch.randn(5, K, requires_grad=True)
    y, made = sequential(x, outputs=("copy",))
    heads = {"y": [y], "copy": [made["copy"]], "both": [y, made["copy"]]}[used]
    torch.autograd.backward(heads, [torch.randn_like(head) for head in heads])
    return gradients({"x": x, **dict(sequential.named_parameters())})


@pytest.mark.parametrize("used", ["y", "copy", "both"])
def test_either_gradient_may_be_absent(used: str) -> None:
    found = extra_output([BackwardLinearAdd], used)
    assert_same_bits(found, extra_output([], used))
    assert (found["gradient of 2.weight"] is None) == (used == "copy")


def test_the_gradient_that_was_handed_in_is_left_as_it_is() -> None:
    sequential = on([ops.MakeExtraOutput("copy"), linear()], BackwardLinearAdd)
    y, made = sequential(torch.randn(5, K, requires_grad=True), outputs=("copy",))
    dy, d_copy = torch.randn_like(y), torch.randn_like(made["copy"])
    given = d_copy.clone()
    torch.autograd.backward([y, made["copy"]], [dy, d_copy])
    assert torch.equal(d_copy, given)


@pytest.mark.parametrize("quantized", ["x", "dy"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_operands_that_are_quantized_already_are_taken_as_they_are(recipe: str | None, quantized: str) -> None:
    operations = [ops.Quantize(), linear(), bias(), ops.AddExtraInput("add")]
    if quantized == "dy":
        operations = [ops.MakeExtraOutput("copy"), linear(True), ops.Quantize(forward=False, backward=True)]
    fused, unfused = both(operations, ForwardLinearBiasAdd, BackwardLinearAdd)
    # Of so many magnitudes that codes of codes are others.
    x, dy = (torch.randn(64, size) * torch.randn(64, size).mul(4).exp2() for size in (K, N))
    x.requires_grad_()
    extras = {"add": torch.randn(64, N)} if quantized == "x" else {}
    outputs = [] if quantized == "x" else ["copy"]
    with autocast(recipe=recipe):
        assert_same_bits(run(fused, x, dy, outputs, **extras), run(unfused, x, dy, outputs, **extras))


# Written in place

IN_PLACE = {
    "add": (ForwardLinearBiasAdd, lambda: [linear(True)]),
    "bias-add": (ForwardLinearBiasAdd, lambda: [linear(), bias()]),
    "scale-add": (LinearScaleAdd, lambda: [linear(), ops.ConstantScale(3.5)]),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("name", IN_PLACE)
def test_an_extra_input_is_written_in_place(name: str, recipe: str | None, dtype: torch.dtype, device: str) -> None:
    """With the bits of the fusion out of place; what is read of it later is y."""
    fusion, make = IN_PLACE[name]
    before = [operation.to(device, dtype) for operation in make()]
    x, extra, dy = (torch.randn(9, size, device=device).to(dtype) for size in (K, N, N))
    found = []
    for in_place in (False, True):
        sequential = on([*before, ops.AddExtraInput(in_place=in_place)], fusion)
        assert f"{fusion.__name__} = " in sequential.explain(recipe=recipe, device=device)
        sequential.zero_grad()
        given = leaves({"x": x.requires_grad_(), "extra": extra.requires_grad_()})
        written = given["extra"] * 1
        with autocast(recipe=recipe):
            y = sequential(given["x"], extra=written)
        assert (y is written) == in_place
        (y * dy + written * dy if in_place else 2 * (y * dy)).sum().backward()
        found.append({"y": y.detach(), **gradients({**given, **dict(sequential.named_parameters())})})
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_the_linear_layer_keeps_is_not_written(name: str) -> None:
    fusion, make = IN_PLACE[name]
    operations = list(make())
    operations[0] = ops.Linear(N, N, bias=operations[0].bias is not None)
    sequential = on([*operations, ops.AddExtraInput(in_place=True)], fusion)
    for fusions in ((fusion,), ()):
        x = torch.randn(5, N)
        kept = x.clone()
        with pytest.raises(
            RuntimeError, match=r"extra lies in memory that operation 0 \(Linear\) keeps for its backward"
        ):
            on(list(sequential), *fusions)(x, extra=x)
        assert torch.equal(x, kept)
        with torch.no_grad():
            y = on(list(sequential), *fusions)(x, extra=x)
            expected = on([*operations, ops.AddExtraInput()])(kept, extra=kept)
        assert y is x
        torch.testing.assert_close(y, expected)


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_both_dtypes_are_the_same(name: str) -> None:
    fusion, make = IN_PLACE[name]
    sequential, extra = on([*make(), ops.AddExtraInput(in_place=True)], fusion), torch.ones(5, N).double()
    with pytest.raises(ValueError, match="in place both must be the same"):
        sequential(torch.randn(5, K), extra=extra)
    assert torch.equal(extra, torch.ones(5, N).double())


# Pairs


def steps(sequential: Sequential, **settings: Any) -> list[list[str]]:
    """The fused operations of the forward and of the backward pass."""
    text = sequential.explain(**settings).split("\n  backward")
    return [[fusion.__name__ for fusion in FUSIONS if f"{fusion.__name__} =" in part] for part in text]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fusions_of_both_passes_go_together(dtype: torch.dtype, recipe: str | None) -> None:
    operations = [
        ops.MakeExtraOutput("residual"), ops.Linear(K, 2 * N, bias=False), bias(2 * N), ops.SwiGLU(),
        ops.Linear(N, K, bias=False), ops.ConstantScale(0.3), ops.AddExtraInput("residual"), ops.Linear(K, N), srelu(),
        ops.Linear(N, K), ops.AddExtraInput("more"),
    ]  # fmt: skip
    fused, unfused = both([operation.to(dtype) for operation in operations], *FUSIONS)
    forward, backward = steps(fused, recipe=recipe, dtype=dtype)
    assert forward == ["LinearScaleAdd", "ForwardLinearBiasActivation", "ForwardLinearBiasAdd"]
    assert backward == ["LinearScaleAdd", "BackwardActivationBias", "BackwardLinearAdd"]
    assert fused.explain(recipe=recipe, dtype=dtype).count("rounds less often than unfused") == 2
    x, more, dy = (torch.randn(9, K).to(dtype).requires_grad_() for _ in range(3))
    same = [fusion for fusion in FUSIONS if not fusion.rounds_less]
    with autocast(recipe=recipe):
        found, expected = (run(each, x, dy.detach(), more=more) for each in (fused, unfused))
        assert_same_bits(run(on(operations, *same), x, dy.detach(), more=more), expected)
    for name, tensor in expected.items():
        # One rounding more or less of one of five layers, or the flip of a code by it.
        tolerance = 0.1 if recipe else 4 * TOLERANCES[dtype]
        assert (found[name] - tensor).abs().max() <= tolerance * tensor.abs().max().clamp(min=1), name


def test_a_fused_pair_passes_gradcheck() -> None:
    operations = [ops.MakeExtraOutput("residual"), ops.Linear(4, 6), ops.SwiGLU(), ops.Linear(3, 4, bias=False)]
    operations += [ops.ConstantScale(-1.7), ops.AddExtraInput("residual"), bias(4), ops.Linear(4, 4)]
    operations += [ops.ConstantScale(0.3)]
    sequential = Sequential(*(operation.double() for operation in operations))
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: sequential(x), (x, *sequential.parameters()))


# Refusals


class OwnProducts(ops.Linear):
    def fprop(self, *args: Any, **settings: Any) -> Tensor:
        return super().fprop(*args, **settings).clamp(max=0.1)


class OwnGradients(ops.Linear):
    def dgrad_and_wgrad(self, *args: Any, **settings: Any) -> Any:
        dx, gradients = super().dgrad_and_wgrad(*args, **settings)
        return None if dx is None else dx.clamp(max=0.1), gradients


class OwnSum(ops.Linear):
    def bias_gradient(self, dy: Tensor) -> Tensor:
        return super().bias_gradient(dy).clamp(max=0.1)


@pytest.mark.parametrize(
    ("kind", "behind", "refused"),
    [
        (OwnProducts, [ops.ConstantScale(2.0), ops.AddExtraInput()], "LinearScaleAdd"),
        (OwnGradients, [ops.ConstantScale(2.0), ops.AddExtraInput()], "LinearScaleAdd"),
        (OwnGradients, [ops.ConstantScale(2.0)], "BackwardLinearScale"),
        (OwnSum, [ops.ConstantScale(2.0)], "BackwardLinearScale"),
        (OwnSum, [ops.SiLU()], "BackwardActivationBias"),
    ],
)
def test_a_subclass_that_replaces_what_a_fusion_computes_another_way_is_not_fused(kind, behind, refused) -> None:
    operations = [kind(K, N, bias=kind is OwnSum), *behind]
    extras = {"extra": torch.randn(7, N)} if len(behind) > 1 else {}
    fused, unfused = Sequential(*operations), Sequential(*operations, fusions=())
    assert f"not fused: {refused} on operations 0-{len(behind)}: {kind.__name__} has its own" in fused.explain()
    x, results = torch.randn(7, K), []
    for sequential in (fused, unfused):
        sequential.zero_grad()
        given = x.clone().requires_grad_()
        y = sequential(given, **extras)
        y.square().sum().backward()
        results.append({"y": y, **gradients({"x": given, **dict(sequential.named_parameters())})})
    assert_same_bits(*results)


REFUSALS = {
    "scaled": (
        [ForwardLinearBiasActivation, BackwardActivationBias],
        lambda: [linear(True), ops.ScaledSwiGLU()],
        "ScaledSwiGLU takes scales, and only activations without them are fused with their bias.",
    ),
    "no_bias": (
        [BackwardActivationBias],
        lambda: [linear(), ops.SwiGLU()],
        "Linear has no bias, whose gradient could be summed while SwiGLU makes its own.",
    ),
    "dtype": (
        [ForwardLinearBiasAdd],
        lambda: [linear(), bias().bfloat16(), ops.AddExtraInput()],
        "Linear's weight is torch.float32, but Bias's vector is torch.bfloat16.",
    ),
    "zero": (
        [BackwardLinearScale, LinearScaleAdd],
        lambda: [linear(), ops.ConstantScale(0.0), ops.AddExtraInput()],
        "The scale is 0, for which a product does not read its operands: what is NaN or Inf there would be lost.",
    ),
    "bias": (
        [LinearScaleAdd],
        lambda: [linear(True), ops.ConstantScale(2.0), ops.AddExtraInput()],
        "Linear has a bias, and a product takes one addend before it is rounded: the extra tensor.",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_refusal_is_a_sentence(name: str) -> None:
    fusions, make, sentence = REFUSALS[name]
    sequential = on(make(), *fusions)
    assert steps(sequential) in ([[]], [[], []])
    plan = sequential.explain()
    for fusion in fusions:
        assert any(fusion.__name__ in line and line.endswith(sentence) for line in plan.splitlines()), plan


def test_a_recipe_with_a_history_of_amaxes_keeps_the_scale_in_front() -> None:
    operations = [linear(), ops.ConstantScale(0.5), ops.AddExtraInput()]
    sentence = "fp8_delayed keeps the amaxes of dy times the scale, and those of dy are others."
    assert on(operations, BackwardLinearScale, LinearScaleAdd).explain(recipe="fp8_delayed").count(sentence) == 2


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_products_take_scale_and_sum_on_every_device(device: str) -> None:
    """Before the chain of element-wise kernels, which takes what the Linear's bias leaves it."""
    scaled = [ops.ConstantScale(0.5), ops.AddExtraInput()]
    assert "LinearScaleAdd = " in Sequential(linear(), *scaled).explain(device=device)
    plan = Sequential(linear(True), *scaled).explain(device=device)
    assert "LinearScaleAdd = " not in plan and ("ElementwiseChain = " in plan) == (device == "cuda")


def test_scale_and_sum_are_rounded_once_in_float16() -> None:
    """Unfused three times, which is seen."""
    operations = [ops.Linear(256, 64, bias=False).half(), ops.ConstantScale(3.5), ops.AddExtraInput()]
    x, extra = torch.randn(320, 256).half(), torch.randn(320, 64).half()
    exact = 3.5 * x.double() @ operations[0].weight.double().T + extra.double()
    outside = [
        ((on(operations, *fusions)(x, extra=extra).double() - exact).abs() > 1e-3 * exact.abs() + 1e-5).sum().item()
        for fusions in ([LinearScaleAdd], [])
    ]
    assert outside[0] == 0 and outside[1] > 20


def test_an_extra_input_of_another_shape_is_an_error_as_unfused() -> None:
    fused, unfused = both([linear(), ops.AddExtraInput()], ForwardLinearBiasAdd)
    for sequential in (fused, unfused):
        with pytest.raises(ValueError, match=r"extra has shape \[1, 64\], but x has shape \[5, 64\]"):
            sequential(torch.randn(5, K), extra=torch.randn(1, N))


# The factor of a product


MIXED = [(torch.bfloat16, torch.float32, torch.bfloat16), (torch.float32, torch.float64, torch.float64)]


@pytest.mark.parametrize("dtypes", [(torch.float32,) * 3, *MIXED], ids=str)
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("alpha", [1.0, 0.3, -2.0])
def test_gemm_takes_a_factor(alpha: float, added: bool, dtypes: tuple[torch.dtype, ...]) -> None:
    a, b, out = torch.randn(5, K).to(dtypes[0]), torch.randn(N, K).to(dtypes[1]), dtypes[2]
    vector = torch.randn(N) if added else None
    y = gemm("TN", a, b, out, capability=None, added=vector, alpha=alpha)
    expected = alpha * (a.double() @ b.double().T) + (0 if vector is None else vector.to(out).double())
    assert y.dtype == out
    torch.testing.assert_close(y.double(), expected, rtol=2 * torch.finfo(out).eps, atol=40 * torch.finfo(out).eps)
