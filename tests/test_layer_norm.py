"""LayerNorm against its formula in float64."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fuser import Sequential, autocast, ops
from ops.kernels.norm.layer_norm import dlayer_norm, layer_norm, layer_norm_ref
from tests.check_operation import DEVICES, DTYPES, check_gradients, check_operation
from tests.reference import ROUNDED_ONCE, assert_same_bits

# normalized_shape, shape of x
SHAPES = [
    pytest.param(64, (6, 64), id="ordinary"),
    pytest.param(19, (6, 16, 19), id="odd size"),
    pytest.param((7, 2), (5, 7, 2), id="two dimensions"),
    pytest.param((7, 2), (7, 2), id="two dimensions, one row"),
    pytest.param(19, (19,), id="one row"),
    pytest.param(19, (0, 19), id="no rows"),
    pytest.param((3, 4), (2, 0, 3, 4), id="two dimensions, no rows"),
]
# A gradient of the weight is a sum over all rows, whose terms nearly cancel here and there.
TOLERANCES = {**ROUNDED_ONCE, torch.float32: 1e-5}
LEARNED = ("weight", "bias")


def formula(x: Tensor, weight: Tensor, bias: Tensor, *, eps: float, zero_centered: bool) -> Tensor:
    dims = tuple(range(-weight.dim(), 0))
    apart = x - x.mean(dims, keepdim=True)
    normed = apart / (apart.pow(2).mean(dims, keepdim=True) + eps).sqrt()
    return normed * (weight + 1 if zero_centered else weight) + bias


def make(shape: Any, zero_centered: bool = False, eps: float = 0.3, **where: Any) -> ops.LayerNorm:
    operation = ops.LayerNorm(shape, eps=eps, zero_centered_gamma=zero_centered, **where)
    for parameter in operation.parameters():
        nn.init.normal_(parameter)
    return operation


@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centred"])
@pytest.mark.parametrize(("normalized_shape", "shape"), SHAPES)
@pytest.mark.slow
def test_gradcheck(normalized_shape: Any, shape: tuple[int, ...], zero_centered: bool) -> None:
    check_gradients(make(normalized_shape, zero_centered), torch.randn(shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centred"])
@pytest.mark.parametrize(("normalized_shape", "shape"), SHAPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_agree_with_float64(
    dtype: torch.dtype, normalized_shape: Any, shape: tuple[int, ...], zero_centered: bool, device: str
) -> None:
    operation = make(normalized_shape, zero_centered, dtype=dtype, device=device)
    x = torch.randn(shape, dtype=dtype, device=device)
    check_operation(operation, partial(formula, eps=0.3, zero_centered=zero_centered), x, tolerances=TOLERANCES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "frozen",
    [("x",), ("weight",), ("bias",), ("weight", "bias"), ("x", "weight"), ("x", "bias"), ("x", "weight", "bias")],
    ids=str,
)
def test_what_requires_no_grad_gets_none(frozen: tuple[str, ...], device: str) -> None:
    x = torch.randn(6, 19, device=device)
    expected = partial(formula, eps=0.3, zero_centered=False)
    check_operation(make(19, device=device), expected, x, frozen=frozen, tolerances=TOLERANCES)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_feature_gives_the_bias(dtype: torch.dtype, device: str) -> None:
    operation = make(1, dtype=dtype, device=device)
    x = torch.randn(6, 1, dtype=dtype, device=device, requires_grad=True)
    y = operation(x)
    y.sum().backward()
    assert torch.equal(y, operation.bias.expand(6, 1))
    assert x.grad is not None and not x.grad.any()
    assert operation.weight.grad is not None and operation.weight.grad.item() == 0
    assert operation.bias.grad is not None and operation.bias.grad.item() == 6


@pytest.mark.parametrize("device", DEVICES)
def test_a_large_mean_costs_no_digits_of_the_variance(device: str) -> None:
    x = 4096 + torch.randint(-8, 9, (6, 64), device=device).float()  # x^2 would need 26 bits
    check_operation(make(64, device=device), partial(formula, eps=0.3, zero_centered=False), x, tolerances=TOLERANCES)


def test_fp16_rows_whose_sum_overflows_fp16_are_normalised() -> None:
    x = torch.tensor([[6e4, 4e4] * 4], dtype=torch.float16)
    y = ops.LayerNorm(8, dtype=torch.float16)(x)
    assert torch.equal(y, torch.tensor([[1.0, -1.0] * 4], dtype=torch.float16))


def test_a_constant_row_gives_the_bias_and_finite_gradients() -> None:
    x = torch.full((3, 8), 2.0, requires_grad=True)
    operation = make(8, eps=1e-5)
    y = operation(x)
    y.sum().backward()
    assert torch.equal(y, operation.bias.expand(3, 8)) and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_results_are_those_of_float32_rounded_once(dtype: torch.dtype) -> None:
    x, weight, bias, dy = (torch.randn(shape).to(dtype) for shape in ((33, 40), (40,), (40,), (33, 40)))
    y, mean, rstd = layer_norm(x, weight, bias, 1e-5)
    wide, _, _ = layer_norm(x.float(), weight.float(), bias.float(), 1e-5)
    dx, dweight, dbias = dlayer_norm(dy, x, mean, rstd, weight)
    wide_dx, wide_dweight, wide_dbias = dlayer_norm(dy.float(), x.float(), mean, rstd, weight.float())
    assert wide_dx is not None
    assert_same_bits(
        {"y": y, "dx": dx, "dweight": dweight, "dbias": dbias},
        {"y": wide.to(dtype), "dx": wide_dx.to(dtype), "dweight": wide_dweight, "dbias": wide_dbias},
    )


@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    features=st.integers(1, 9),
    zero_centered=st.booleans(),
    eps=st.floats(1e-6, 1),
)
def test_layer_norm_agrees_with_its_reference(shape: list[int], features: int, zero_centered: bool, eps: float) -> None:
    x = torch.randn(*shape, features, dtype=torch.float64, requires_grad=True)
    weight, bias = (torch.randn(features, dtype=torch.float64, requires_grad=True) for _ in LEARNED)
    expected = layer_norm_ref(x, weight, bias, eps, zero_centered=zero_centered)
    dy = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (x, weight, bias), dy)
    with torch.no_grad():
        y, mean, rstd = layer_norm(x, weight, bias, eps, zero_centered=zero_centered)
        found = dlayer_norm(dy, x, mean, rstd, weight, zero_centered=zero_centered)
    # dx of two features is all but zero: what is left of a difference.
    torch.testing.assert_close((y, *found), (expected, *gradients), rtol=1e-10, atol=1e-10)


def test_moving_and_scaling_a_row_changes_nothing_without_eps() -> None:
    x = torch.randn(6, 64, dtype=torch.float64)
    operation = make(64, eps=1e-300).double()
    moved = x * torch.rand(6, 1, dtype=torch.float64) + torch.randn(6, 1, dtype=torch.float64)
    torch.testing.assert_close(operation(moved), operation(x), rtol=1e-9, atol=1e-9)


def test_inputs_stay_as_they_are_and_strides_do_not_matter() -> None:
    x = torch.randn(19, 5).t()
    before = x.clone()
    check_operation(make(19), partial(formula, eps=0.3, zero_centered=False), x)
    assert torch.equal(x, before)


def test_it_agrees_with_torch() -> None:
    operation, theirs, x = make(19, eps=1e-5), nn.LayerNorm(19, eps=1e-5), torch.randn(6, 19)
    theirs.load_state_dict(operation.state_dict())
    torch.testing.assert_close(operation(x), theirs(x))


def test_it_starts_with_a_factor_of_one_and_no_bias() -> None:
    for zero_centered, value in ((False, 1.0), (True, 0.0)):
        operation = ops.LayerNorm((3, 4), zero_centered_gamma=zero_centered, device="meta")
        assert operation.weight.is_meta and operation.bias.is_meta and list(operation.state_dict()) == list(LEARNED)
        operation = operation.to_empty(device="cpu")
        operation.reset_parameters()
        assert torch.equal(operation.weight, torch.full((3, 4), value))
        assert torch.equal(operation.bias, torch.zeros(3, 4))


def test_a_copy_computes_the_same() -> None:
    operation = make(19)
    x = torch.randn(6, 19)
    expected = operation(x)
    assert torch.equal(copy.deepcopy(operation)(x), expected)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_a_recipe_changes_nothing(recipe: str) -> None:
    sequential, x = Sequential(make(64)), torch.randn(6, 64)
    plain = sequential(x)
    with autocast(recipe=recipe):
        assert torch.equal(sequential(x), plain)


def test_settings_are_shown() -> None:
    assert repr(ops.LayerNorm(8)) == "LayerNorm(8, eps=1e-05, zero_centered_gamma=False)"
    assert repr(ops.LayerNorm((2, 4), eps=1.0)) == "LayerNorm((2, 4), eps=1.0, zero_centered_gamma=False)"


@pytest.mark.parametrize("normalized_shape", [0, -4, (4, 0), ()])
def test_a_shape_that_is_not_positive_is_refused(normalized_shape: Any) -> None:
    with pytest.raises(ValueError, match="normalized_shape is .*, but needs one dimension or more, all positive"):
        ops.LayerNorm(normalized_shape)


@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan")])
def test_an_eps_that_is_not_positive_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match="eps is .*, but must be positive"):
        ops.LayerNorm(8, eps=eps)


@pytest.mark.parametrize(("normalized_shape", "shape"), [(8, (4, 7)), ((2, 4), (8,)), ((2, 4), (4, 8)), (8, ())])
def test_an_x_of_another_shape_is_refused(normalized_shape: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"In operation 0 \(LayerNorm\): x has shape \[.*\], but must end in \["):
        ops.LayerNorm(normalized_shape)(torch.ones(shape))


@pytest.mark.parametrize("name", ["weight", "bias"])
def test_a_parameter_that_is_none_is_refused(name: str) -> None:
    operation = ops.LayerNorm(4)
    setattr(operation, name, None)
    with pytest.raises(RuntimeError, match=rf"In operation 0 \(LayerNorm\): Its {name} is None, but it computes with"):
        operation(torch.zeros(2, 4))
