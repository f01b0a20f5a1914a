"""Linear and Bias: values and every gradient, in each dtype and under each recipe."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuser import Sequential, autocast, ops
from fuser.testing import compare
from recipes import NVFP4BlockScaling, as_recipe
from recipes.recipe import Role

# Largest difference from the float64 reference, relative to its largest magnitude: the result is rounded once, the
# inner products are sums of fewer than 100 terms in float32.
TOLERANCES = {torch.float64: 1e-14, torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
DTYPES = list(TOLERANCES)
SHAPES = [(5,), (4, 5), (2, 3, 5), (1, 5), (0, 5), (2, 0, 5)]
FROZEN = [(), ("x",), ("weight",), ("bias",), ("x", "weight"), ("x", "bias"), ("weight", "bias")]


def check(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None], dtype: torch.dtype) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        reference = expected[name]
        if reference is not None and tensor is not None:
            assert tensor.dtype == dtype
            tensor = tensor.double()
        difference = compare(name, tensor, reference)
        assert difference.largest <= TOLERANCES[dtype] * difference.scale, difference


def run(module: nn.Module, x: Tensor, dy: Tensor, frozen: tuple[str, ...] = ()) -> dict[str, Tensor | None]:
    """y and all gradients by name; None for a frozen one."""
    x = x.detach().clone().requires_grad_("x" not in frozen)
    module.zero_grad()
    for name, parameter in module.named_parameters():
        parameter.requires_grad_(name not in frozen)
    y = module(x)
    y.backward(dy)
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def linear(dtype: torch.dtype, bias: bool = True, in_features: int = 5, out_features: int = 3) -> ops.Linear:
    """A Linear whose values are exact in every dtype (and a bias that is not zero)."""
    operation = ops.Linear(in_features, out_features, bias=bias)
    return operation.bfloat16().to(dtype)


def exact(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).bfloat16().to(dtype)


def reference(operation: ops.Linear, bias: bool = True) -> nn.Linear:
    theirs = nn.Linear(operation.in_features, operation.out_features, bias=bias, dtype=torch.float64)
    theirs.load_state_dict({name: value.double() for name, value in operation.state_dict().items()})
    return theirs


# Linear


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_linear_passes_gradcheck(shape: tuple[int, ...], bias: bool) -> None:
    sequential = Sequential(linear(torch.float64, bias))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: sequential(x), (x, *sequential.parameters()))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_linear_agrees_with_float64(dtype: torch.dtype, shape: tuple[int, ...], bias: bool) -> None:
    operation = linear(dtype, bias)
    x, dy = exact(*shape, dtype=dtype), exact(*shape[:-1], 3, dtype=dtype)
    check(run(operation, x, dy), run(reference(operation, bias), x.double(), dy.double()), dtype)


@pytest.mark.parametrize("frozen", FROZEN, ids=str)
@pytest.mark.parametrize("recipe", [None, "fp8_current", "mxfp8", "fp8_block"])
def test_a_frozen_tensor_gets_no_gradient_and_the_others_the_same_as_before(
    frozen: tuple[str, ...], recipe: str | None
) -> None:
    operation = linear(torch.float32, in_features=32, out_features=64)
    x, dy = torch.randn(6, 32), torch.randn(6, 64)
    with autocast(recipe):
        everything = run(operation, x, dy)
        some = run(operation, x, dy, frozen)
    for name, gradient in some.items():
        if name in frozen:
            assert gradient is None
        else:
            assert torch.equal(gradient, everything[name])


@pytest.mark.parametrize("shape", [(0, 5), (2, 0, 5)], ids=str)
def test_no_rows_give_exactly_zero_parameter_gradients(shape: tuple[int, ...]) -> None:
    operation = linear(torch.float32)
    results = run(operation, torch.ones(shape), torch.ones(*shape[:-1], 3))
    assert torch.equal(results["weight"], torch.zeros(3, 5)) and torch.equal(results["bias"], torch.zeros(3))
    assert results["x"].shape == shape


def test_linear_takes_x_and_dy_of_any_strides() -> None:
    operation = linear(torch.float32)
    x, dy = torch.randn(5, 4).T, torch.randn(1, 3).expand(4, 3)
    check(run(operation, x, dy), run(reference(operation), x.double(), dy.double()), torch.float32)
    x3 = torch.randn(5, 2, 4).permute(2, 1, 0)
    dy3 = torch.randn(3, 2, 4).permute(2, 1, 0)
    check(run(operation, x3, dy3), run(reference(operation), x3.double(), dy3.double()), torch.float32)


def test_the_bias_gradient_is_accumulated_in_float32() -> None:
    operation = linear(torch.bfloat16)
    rows = 4096  # in bfloat16 a sum of ones stands still at 256
    results = run(operation, torch.zeros(rows, 5, dtype=torch.bfloat16), torch.ones(rows, 3, dtype=torch.bfloat16))
    assert torch.equal(results["bias"], torch.full((3,), float(rows), dtype=torch.bfloat16))


def test_linear_starts_as_torchs() -> None:
    operation = ops.Linear(400, 300)
    bound = 400**-0.5
    for parameter in (operation.weight, operation.bias):
        assert parameter.abs().max() <= bound
        assert parameter.abs().max() > 0.9 * bound and abs(parameter.mean()) < 0.1 * bound
    assert list(operation.state_dict()) == list(nn.Linear(400, 300).state_dict())


def test_linear_shows_its_settings() -> None:
    assert repr(ops.Linear(5, 3, bias=False)) == "Linear(in_features=5, out_features=3, bias=False)"


@pytest.mark.parametrize(("in_features", "out_features"), [(0, 3), (5, 0), (-1, 3)])
def test_features_that_are_not_positive_are_refused(in_features: int, out_features: int) -> None:
    message = f"Linear got in_features={in_features}, out_features={out_features}. Both must be positive"
    with pytest.raises(ValueError, match=message):
        ops.Linear(in_features, out_features)


@pytest.mark.parametrize("shape", [(4, 6), (6,), (4, 1), ()], ids=str)
def test_an_x_of_another_width_is_refused(shape: tuple[int, ...]) -> None:
    message = f"In operation 0 (Linear): x has shape {list(shape)}, but [..., 5] is needed. Check the operation before"
    with pytest.raises(ValueError, match=re.escape(message)):
        ops.Linear(5, 3)(torch.ones(shape))


# Linear under recipes: each product against float64 of the operands that the quantizers give


def quantized_reference(operation: ops.Linear, recipe: Any, x: Tensor, dy: Tensor) -> dict[str, Tensor | None]:
    """Every product in float64, of dequantized operands: each copy scaled along the axis that is contracted."""
    recipe = as_recipe(recipe)
    rows, d_rows = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])

    def values(role: Role, tensor: Tensor, columnwise: bool) -> Tensor:
        quantizer = recipe.quantizer(role)
        copy = quantizer.quantize(tensor.detach().float(), rowwise=not columnwise, columnwise=columnwise)
        operand = copy.operand(columnwise, torch.float64)
        return operand.values.double() if operand.alpha is None else operand.values.double() * operand.alpha.double()

    y = values(Role.INPUT, rows, False) @ values(Role.WEIGHT, operation.weight, False).T
    if operation.bias is not None:
        y = y + operation.bias.detach().double()
    dx = values(Role.GRAD_OUTPUT, d_rows, False) @ values(Role.WEIGHT, operation.weight, True)
    dw = values(Role.GRAD_OUTPUT, d_rows, True).T @ values(Role.INPUT, rows, True)
    results = {"y": y.reshape(*x.shape[:-1], operation.out_features), "x": dx.reshape(x.shape), "weight": dw}
    return results | ({} if operation.bias is None else {"bias": d_rows.double().sum(0)})


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(32,), (64, 32), (2, 32, 32), (7, 40), (0, 32)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "mxfp8", "fp8_block"])
def test_under_a_recipe_linear_agrees_with_float64_on_the_quantized_operands(
    recipe: str, dtype: torch.dtype, shape: tuple[int, ...], bias: bool
) -> None:
    operation = linear(dtype, bias, in_features=shape[-1], out_features=64)
    x, dy = exact(*shape, dtype=dtype), exact(*shape[:-1], 64, dtype=dtype)
    with autocast(recipe):
        actual = run(operation, x, dy)
    # The scale of fp8_current is applied in float32.
    limit = torch.float32 if dtype == torch.float64 else dtype
    expected = quantized_reference(operation, recipe, x, dy)
    for name, tensor in actual.items():
        assert tensor.dtype == dtype
        difference = compare(name, tensor.double(), expected[name])
        assert difference.largest <= TOLERANCES[limit] * difference.scale, difference


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "mxfp8", "fp8_block"])
def test_a_recipe_changes_the_numbers_and_not_by_much(recipe: str) -> None:
    operation = linear(torch.float32, in_features=64, out_features=64)
    x, dy = torch.randn(64, 64), torch.randn(64, 64)
    plain = run(operation, x, dy)
    with autocast(recipe):
        quantized = run(operation, x, dy)
    for name in ("y", "x", "weight"):
        difference = compare(name, quantized[name], plain[name])
        assert 1e-3 * difference.scale < difference.largest < 0.1 * difference.scale, difference
    assert torch.equal(quantized["bias"], plain["bias"]), "the bias gradient is summed unquantized"


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "mxfp8", "fp8_block"])
def test_a_zero_x_gives_the_bias(recipe: str) -> None:
    operation = linear(torch.float32, in_features=32, out_features=32)
    with autocast(recipe):
        y = operation(torch.zeros(4, 32))
    assert torch.equal(y, operation.bias.expand(4, 32))


def test_a_gradient_that_no_product_reads_is_not_quantized() -> None:
    """With the bias alone trained: stochastic rounding would draw a random seed."""
    operation = ops.Linear(16, 16)
    operation.weight.requires_grad_(False)
    with autocast("nvfp4"):
        y = operation(torch.randn(4, 16))
    before = torch.get_rng_state()
    y.sum().backward()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "mxfp8", "fp8_block"])
def test_one_row_without_a_dimension_of_rows_may_be_quantized_before(recipe: str) -> None:
    linear, x = ops.Linear(32, 64), torch.randn(32, requires_grad=True)
    found = []
    for layer in (linear, Sequential(ops.Quantize(), linear, ops.Quantize(forward=False, backward=True))):
        with autocast(recipe):
            y = layer(x)
        found.append([y, *torch.autograd.grad(y.sin().sum(), [x, linear.weight])])
    for given, expected in zip(*found, strict=True):
        assert torch.equal(given, expected)


@pytest.mark.parametrize("recipe", ["fp8_current", "fp8_rowwise", "mxfp8", "fp8_block"])
def test_two_linears_in_a_pipeline_are_two_linears_alone(recipe: str) -> None:
    first, second = linear(torch.bfloat16, in_features=32, out_features=64), linear(torch.bfloat16, True, 64, 32)
    x, dy = exact(8, 32, dtype=torch.bfloat16), exact(8, 32, dtype=torch.bfloat16)
    with autocast(recipe):
        together = run(Sequential(first, second), x, dy)
        alone = run(nn.Sequential(first, second), x, dy)
    for name, tensor in together.items():
        assert torch.equal(tensor, alone[name]), name


# Bias


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_passes_gradcheck(shape: tuple[int, ...]) -> None:
    sequential = Sequential(ops.Bias(5, dtype=torch.float64))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: sequential(x), (x, *sequential.parameters()))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_agrees_with_float64(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    operation = ops.Bias(5, dtype=dtype)
    nn.init.normal_(operation.bias)
    x, dy = exact(*shape, dtype=dtype), exact(*shape, dtype=dtype)
    expected = {
        "y": x.double() + operation.bias.detach().double(),
        "x": dy.double(),
        "bias": dy.double().reshape(-1, 5).sum(0),
    }
    check(run(operation, x, dy), expected, dtype)


@pytest.mark.parametrize("frozen", [("x",), ("bias",)], ids=str)
def test_a_frozen_bias_gets_no_gradient(frozen: tuple[str, ...]) -> None:
    results = run(ops.Bias(5), torch.randn(4, 5), torch.randn(4, 5), frozen)
    assert {name for name, gradient in results.items() if gradient is None} == set(frozen)


def test_bias_starts_at_zero_and_resets_to_it() -> None:
    operation = ops.Bias(5)
    assert torch.equal(operation.bias, torch.zeros(5))
    nn.init.ones_(operation.bias)
    operation.reset_parameters()
    assert torch.equal(operation.bias, torch.zeros(5))


def test_linear_without_bias_then_bias_is_linear_with_bias() -> None:
    whole = linear(torch.float64)
    parts = Sequential(ops.Linear(5, 3, bias=False), ops.Bias(3)).double()
    parts[0].load_state_dict({"weight": whole.weight})
    parts[1].load_state_dict({"bias": whole.bias})
    x, dy = torch.randn(4, 5, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
    for ours, theirs in zip(run(parts, x, dy).values(), run(whole, x, dy).values(), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_bias_of_no_size_and_an_x_of_another_are_refused() -> None:
    with pytest.raises(ValueError, match=r"Bias got size=0\. It must be positive"):
        ops.Bias(0)
    with pytest.raises(ValueError, match=r"In operation 0 \(Bias\): x has 4 features, but size is 5"):
        ops.Bias(5)(torch.ones(2, 4))


# ------------------------------------------------------------------------------------------------------ one group

SIZES = [5, 0, 17, 40]
GROUPED = [
    "bf16",
    "fp8_delayed",
    "fp8_current",
    "fp8_block",
    "mxfp8",
    NVFP4BlockScaling(disable_stochastic_rounding=True),
]
GROUPED += [NVFP4BlockScaling(row_scaled_activation=True, disable_stochastic_rounding=True)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("recipe", GROUPED, ids=lambda recipe: getattr(recipe, "name", recipe))
def test_separate_layers_as_one_group_have_the_bits_of_a_grouped_one(recipe, dtype, device):
    grouped = ops.GroupedLinear(len(SIZES), 64, 48, device=device, dtype=dtype)
    nn.init.normal_(grouped.bias)
    layers = [ops.Linear(64, 48, device=device, dtype=dtype, as_one_group=True) for _ in SIZES]
    for group, layer in enumerate(layers):
        layer.load_state_dict({"weight": grouped.weight[group], "bias": grouped.bias[group]})
    x, dy = (torch.randn(sum(SIZES), width, device=device).to(dtype) for width in (64, 48))
    leaf = x.clone().requires_grad_()
    with autocast(recipe):
        y = grouped(leaf, split_sizes=torch.tensor(SIZES, device=device))
    y.backward(dy)
    parts = zip(layers, x.split(SIZES), y.split(SIZES), leaf.grad.split(SIZES), dy.split(SIZES), strict=True)
    for group, (layer, own_x, own_y, own_dx, own_dy) in enumerate(parts):
        if not len(own_x):
            continue
        own_leaf = own_x.clone().requires_grad_()
        with autocast(recipe):
            alone = layer(own_leaf)
        alone.backward(own_dy)
        pairs = {
            "y": (alone, own_y), "dx": (own_leaf.grad, own_dx),
            "dw": (layer.weight.grad, grouped.weight.grad[group]), "db": (layer.bias.grad, grouped.bias.grad[group]),
        }  # fmt: skip
        for name, (ours, theirs) in pairs.items():
            assert torch.equal(ours, theirs), f"{name} of group {group}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
def test_one_group_is_a_linear_layer(bias, shape, dtype):
    operation = linear(dtype, bias)
    operation.as_one_group = True
    x, dy = exact(*shape, dtype=dtype), exact(*shape[:-1], 3, dtype=dtype)
    check(run(operation, x, dy), run(reference(operation, bias), x.double(), dy.double()), dtype)


def test_one_group_is_scaled_and_added_to_as_others():
    operations = [ops.Linear(16, 8, bias=False, as_one_group=True), ops.ConstantScale(1.5), ops.AddExtraInput()]
    x, extra = torch.randn(4, 16), torch.randn(4, 8)
    fused = Sequential(*operations)
    assert "LinearScaleAdd = " in fused.explain()
    torch.testing.assert_close(fused(x, extra=extra), 1.5 * x @ operations[0].weight.T + extra)
    activated = Sequential(ops.Linear(16, 8, as_one_group=True), ops.SwiGLU())
    assert "Linear has as_one_group, and sums its bias gradient in the order of a group." in activated.explain()
    assert "grouped GEMM of one group (Triton)" in activated.explain(device="cuda")
    assert repr(activated[0]).endswith("as_one_group=True)")


@pytest.mark.parametrize("names", [("weight",), ("weight", "bias"), ("bias",)], ids="-".join)
def test_parameters_of_other_features_are_refused(names):
    operation = ops.Linear(4, 6)
    for name in names:
        setattr(operation, name, nn.Parameter(torch.zeros(9, 4) if name == "weight" else torch.zeros(9)))
    with pytest.raises(AttributeError, match="out_features of this Linear is 6, and cannot be set to 9"):
        operation.out_features = 9
    given, needed = ("[9, 4]", "[6, 4]") if names[0] == "weight" else ("[9]", "[6]")
    message = f"In operation 0 (Linear): {names[0]} has shape {given}, but {needed} is needed, of the features that"
    with pytest.raises(ValueError, match=re.escape(message)):
        operation(torch.zeros(2, 4))


def test_a_bias_that_is_assigned_after_compiling_is_added():
    operation, x = ops.Linear(4, 3, bias=False), torch.randn(2, 4)
    compiled = torch.compile(operation, backend="eager")
    plain = compiled(x)
    operation.bias = nn.Parameter(torch.ones(3))
    torch.testing.assert_close(compiled(x), plain + 1)


def test_a_tensor_in_place_of_a_deleted_bias_is_refused():
    operation = ops.Linear(4, 3)
    del operation.bias
    operation.bias = torch.ones(3)
    with pytest.raises(AttributeError, match="no parameter 'bias'.*takes its place by torch.nn.utils.parametrize"):
        operation(torch.zeros(2, 4))
