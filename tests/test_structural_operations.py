"""Operations that compute little: Identity, MakeExtraOutput, AddExtraInput, Quantize; and Bias on a GPU."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuser import Sequential, autocast, ops
from recipes import as_recipe
from recipes.recipe import Role
from tests.check_operation import DEVICES, DTYPES, check_gradients, check_operation
from tests.reference import ROUNDED_ONCE, assert_close, assert_same_bits, gradients

RECIPES = ["fp8_current", "mxfp8", "fp8_block"]
SHAPES = [(32, 32), (7,), (3, 1, 5), (0, 4), (2, 0, 4)]


# Identity


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_identity_changes_nothing(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    check_operation(
        ops.Identity(), lambda x: x, torch.randn(shape, dtype=dtype), tolerances=dict.fromkeys(ROUNDED_ONCE, 0)
    )


def test_identity_passes_gradcheck() -> None:
    check_gradients(ops.Identity(), torch.randn(3, 4))


@pytest.mark.parametrize("recipe", RECIPES)
def test_identity_hands_quantized_tensors_on(recipe: str) -> None:
    linear, x = ops.Linear(32, 32, bias=False), torch.randn(64, 32)
    with autocast(recipe=recipe):
        direct = Sequential(ops.Quantize(), linear)(x)
        assert torch.equal(Sequential(ops.Quantize(), ops.Identity(), linear)(x), direct)


# MakeExtraOutput and AddExtraInput


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_an_extra_input(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    x, extra = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    check_operation(ops.AddExtraInput(), lambda x, extra: x + extra, x, {"extra": extra})


@pytest.mark.parametrize("frozen", [("x",), ("extra",), ("x", "extra")], ids=str)
def test_an_added_tensor_that_requires_no_grad_gets_none(frozen: tuple[str, ...]) -> None:
    check_operation(
        ops.AddExtraInput(), lambda x, extra: x + extra, torch.randn(4), {"extra": torch.randn(4)}, frozen=frozen
    )


def test_adding_passes_gradcheck() -> None:
    check_gradients(ops.AddExtraInput("other"), torch.randn(3, 4), {"other": torch.randn(3, 4)})


def test_a_wider_extra_input_is_added_before_rounding() -> None:
    x = torch.tensor([1.0], dtype=torch.bfloat16, requires_grad=True)
    extra = torch.tensor([2.0**-8 + 2.0**-16], requires_grad=True)  # rounded before, it would make a tie, and 1
    y = ops.AddExtraInput()(x, extra=extra)
    assert y.dtype == torch.bfloat16 and y.item() == 1 + 2.0**-7
    y.backward()
    assert extra.grad is not None and extra.grad.dtype == torch.float32 and extra.grad.item() == 1


@pytest.mark.parametrize("heads", [("y",), ("extra",), ("y", "extra")], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_making_an_extra_output_adds_up_the_gradients(dtype: torch.dtype, heads: tuple[str, ...]) -> None:
    x = torch.randn(5, 6, dtype=dtype, requires_grad=True)
    y, made = ops.MakeExtraOutput()(x, outputs=("extra",))
    results = {"y": y, **made}
    assert_same_bits(results, {"y": x.detach(), "extra": x.detach()})
    d = {name: torch.randn_like(x) for name in heads}
    torch.autograd.backward([results[name] for name in heads], [d[name] for name in heads])
    assert x.grad is not None and torch.equal(x.grad, sum(d.values(), torch.zeros_like(x)))


def test_a_residual_branch_passes_gradcheck() -> None:
    layer = Sequential(
        ops.MakeExtraOutput("residual"), ops.RMSNorm(4), ops.Linear(4, 4), ops.AddExtraInput("residual"),
    ).double()  # fmt: skip
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_a_residual_branch_agrees_with_one_by_hand() -> None:
    linear = ops.Linear(4, 4)
    layer = Sequential(ops.MakeExtraOutput("residual"), linear, ops.AddExtraInput("residual"))
    x = torch.randn(3, 4)
    results = {}
    for name, run in {
        "ours": layer,
        "by hand": lambda x: x + nn.functional.linear(x, linear.weight, linear.bias),
    }.items():
        leaf = x.clone().requires_grad_()
        linear.zero_grad()
        y = run(leaf)
        y.square().sum().backward()
        found = {"x": leaf, **dict(linear.named_parameters())}
        results[name] = {
            "y": y,
            **{n: None if g is None else g.clone() for n, g in gradients(found).items()},
        }
    assert_close(results["ours"], results["by hand"])


def test_branches_may_be_nested() -> None:
    layer = Sequential(
        ops.MakeExtraOutput("outer"),
        ops.MakeExtraOutput("inner"),
        ops.AddExtraInput("inner"),
        ops.AddExtraInput("outer"),
    )
    x = torch.randn(3, 4, requires_grad=True)
    y = layer(x)
    y.backward(torch.ones_like(y))
    assert torch.equal(y, x + x + x) and torch.equal(x.grad, torch.full((3, 4), 3.0))


@pytest.mark.parametrize("shape", [(4,), (3, 1), (1, 3, 4), ()], ids=str)
def test_nothing_is_broadcast(shape: tuple[int, ...]) -> None:
    message = r"In operation 0 \(AddExtraInput\): other has shape \[.*\], but x has shape \[3, 4\]\. They must be equal"
    with pytest.raises(ValueError, match=message):
        ops.AddExtraInput("other")(torch.ones(3, 4), other=torch.ones(shape))


def test_an_empty_name_is_refused() -> None:
    with pytest.raises(ValueError, match="The name of the extra output is empty"):
        ops.MakeExtraOutput("")
    with pytest.raises(ValueError, match="The name of the extra input is empty"):
        ops.AddExtraInput("")


# Quantize


def dequantized(recipe: str, role: Role, x: Tensor) -> Tensor:
    return as_recipe(recipe).quantizer(role).quantize(x.detach()).dequantize()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantize_rounds_what_it_is_told_to(recipe: str, dtype: torch.dtype, forward: bool, backward: bool) -> None:
    x = torch.randn(32, 32, dtype=dtype, requires_grad=True)
    dy = torch.randn_like(x)
    with autocast(recipe=recipe):
        y = ops.Quantize(forward=forward, backward=backward)(x)
    y.backward(dy)
    assert_same_bits(
        {"y": y, "dx": x.grad},
        {
            "y": dequantized(recipe, Role.INPUT, x) if forward else x,
            "dx": dequantized(recipe, Role.GRAD_OUTPUT, dy) if backward else dy,
        },
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_without_a_recipe_quantize_changes_nothing(dtype: torch.dtype) -> None:
    operation = ops.Quantize(forward=True, backward=True)
    check_operation(operation, lambda x: x, torch.randn(6, 7, dtype=dtype), tolerances=dict.fromkeys(ROUNDED_ONCE, 0))


def test_without_a_recipe_quantize_passes_gradcheck() -> None:
    check_gradients(ops.Quantize(backward=True), torch.randn(3, 4))


@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",)], ids=str)
@pytest.mark.parametrize("shape", [(64, 32), (2, 32, 32)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES)
def test_quantizing_round_a_linear_changes_nothing(
    recipe: str, shape: tuple[int, ...], frozen: tuple[str, ...]
) -> None:
    """It would quantize the same tensors in the same way itself."""
    results = []
    for around in (False, True):
        torch.manual_seed(0)
        linear = ops.Linear(32, 64)
        operations = [ops.Quantize(), linear, ops.Quantize(forward=False, backward=True)] if around else [linear]
        linear.weight.requires_grad_("weight" not in frozen)
        # Small beside large numbers: rounded along one axis they differ from those rounded along the other.
        x = (torch.randn(shape) * torch.randn(shape).mul(4).exp()).requires_grad_("x" not in frozen)
        with autocast(recipe=recipe):
            y = Sequential(*operations)(x)
        y.square().sum().backward()
        # The sum for the bias sees dy as it comes: quantized or not.
        found = {"x": x, "weight": linear.weight}
        results.append({"y": y, **gradients(found)})
    assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("recipe", RECIPES)
def test_operations_that_take_no_container_get_its_values(recipe: str) -> None:
    x = torch.randn(32, 32)
    with autocast(recipe=recipe):
        y = Sequential(ops.Quantize(), ops.SwiGLU())(x)
        z = ops.SwiGLU()(dequantized(recipe, Role.INPUT, x))
    assert torch.equal(y, z)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_quantized_is_not_quantized_again(recipe: str) -> None:
    x = torch.randn(32, 32, requires_grad=True)
    with autocast(recipe=recipe):
        once = ops.Quantize()(x)
        assert torch.equal(Sequential(ops.Quantize(), ops.Quantize(), ops.Quantize())(x), once)


# Bias


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(5,), (4, 5), (2, 3, 5), (0, 5), (2, 0, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_bias_agrees_with_float64(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    operation = ops.Bias(5, dtype=dtype, device=device)
    nn.init.normal_(operation.bias)
    check_operation(operation, lambda x, bias: x + bias, torch.randn(shape, dtype=dtype, device=device))


def test_a_bias_gradient_is_not_summed_in_16_bits() -> None:
    operation = ops.Bias(1, dtype=torch.bfloat16)
    operation(torch.zeros(1000, 1, dtype=torch.bfloat16)).sum().backward()
    assert operation.bias.grad is not None and operation.bias.grad.item() == 1000


def test_a_float32_bias_gets_a_float32_gradient_under_autocast() -> None:
    operation = ops.Bias(1)
    with torch.autocast("cpu", torch.bfloat16):
        y = operation(torch.zeros(1001, 1, dtype=torch.bfloat16))
    y.sum().backward()
    assert operation.bias.grad is not None and operation.bias.grad.item() == 1001  # bfloat16 has 1000 and 1004


def test_bias_can_be_made_on_the_meta_device() -> None:
    operation = ops.Bias(5, device="meta")
    assert operation.bias.is_meta
    operation = operation.to_empty(device="cpu")
    operation.reset_parameters()
    assert torch.equal(operation.bias, torch.zeros(5))


# All


@pytest.mark.parametrize(
    ("operation", "text"),
    [
        (ops.Identity(), "Identity()"),
        (ops.Bias(5), "Bias(size=5)"),
        (ops.MakeExtraOutput(), "MakeExtraOutput('extra')"),
        (ops.MakeExtraOutput(in_place=True), "MakeExtraOutput('extra', in_place=True)"),
        (ops.AddExtraInput("residual"), "AddExtraInput('residual')"),
        (ops.AddExtraInput("residual", in_place=True), "AddExtraInput('residual', in_place=True)"),
        (ops.Quantize(), "Quantize(forward=True, backward=False)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_settings_are_shown_and_kept_by_a_copy(operation: Any, text: str) -> None:
    assert repr(operation) == text
    assert repr(copy.deepcopy(operation)) == text


@pytest.mark.parametrize(
    ("operation", "name"),
    [(ops.Bias(8), "bias"), (ops.RMSNorm(8), "weight"), (ops.LayerNorm(8), "bias"), (ops.RMSNorm((2, 4)), "weight")],
)
def test_a_parameter_of_another_shape_is_refused_and_not_broadcast(operation, name):
    setattr(operation, name, nn.Parameter(torch.ones(1)))
    shape = getattr(operation, "normalized_shape", (8,))
    with torch.no_grad(), pytest.raises(ValueError, match=rf"{name} has shape \[1\], but .* is needed"):
        Sequential(operation)(torch.randn(3, *shape))


def test_rows_without_features_are_left_as_they_are():
    x = torch.randn(4, 0, requires_grad=True)
    for operation in (ops.Dropout(0.5), ops.ConstantScale(2.0), ops.GELU()):
        y = Sequential(operation)(x)
        y.sum().backward()
        assert y.shape == x.grad.shape == (4, 0)
