"""RMSNorm against its formula in float64."""

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
from ops.kernels.norm.rms_norm import drms_norm, rms_norm, rms_norm_ref
from tests.check_operation import DEVICES, DTYPES, check_gradients, check_operation
from tests.reference import ROUNDED_ONCE, assert_same_bits

# normalized_shape, shape of x
SHAPES = [
    pytest.param(64, (6, 64), id="ordinary"),
    pytest.param(19, (6, 16, 19), id="odd size"),
    pytest.param((7, 2), (5, 7, 2), id="two dimensions"),
    pytest.param((7, 2), (7, 2), id="two dimensions, one row"),
    pytest.param(19, (19,), id="one row"),
    pytest.param(1, (6, 1), id="one feature"),
    pytest.param(19, (0, 19), id="no rows"),
    pytest.param((3, 4), (2, 0, 3, 4), id="two dimensions, no rows"),
]
# A gradient of the weight is a sum over all rows, whose terms nearly cancel here and there.
TOLERANCES = {**ROUNDED_ONCE, torch.float32: 1e-5}


def formula(x: Tensor, weight: Tensor, *, eps: float, zero_centered: bool) -> Tensor:
    dims = tuple(range(-weight.dim(), 0))
    return x / (x.pow(2).mean(dims, keepdim=True) + eps).sqrt() * (weight + 1 if zero_centered else weight)


def make(shape: Any, zero_centered: bool = False, eps: float = 0.3, **where: Any) -> ops.RMSNorm:
    operation = ops.RMSNorm(shape, eps=eps, zero_centered_gamma=zero_centered, **where)
    nn.init.normal_(operation.weight)
    return operation


@pytest.mark.parametrize("zero_centered", [False, True], ids=["", "zero-centred"])
@pytest.mark.parametrize(("normalized_shape", "shape"), SHAPES)
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


@pytest.mark.parametrize("frozen", [("x",), ("weight",), ("x", "weight")], ids=str)
def test_what_requires_no_grad_gets_none(frozen: tuple[str, ...]) -> None:
    check_operation(make(19), partial(formula, eps=0.3, zero_centered=False), torch.randn(6, 19), frozen=frozen)


@pytest.mark.parametrize("scale", [1e-15, 1e15], ids=str)
def test_small_and_large_rows_keep_their_gradients(scale: float) -> None:
    operation = make(64, eps=1e-40 if scale < 1 else 1e-5)
    x = torch.randn(6, 64) * scale
    expected = partial(formula, eps=operation.eps, zero_centered=False)
    check_operation(operation, expected, x, tolerances={torch.float32: 1e-5})


def test_fp16_rows_whose_squares_overflow_fp16_are_normalised() -> None:
    x = torch.full((2, 8), 6e4, dtype=torch.float16)
    y = ops.RMSNorm(8, dtype=torch.float16)(x)
    assert torch.equal(y, torch.ones_like(y))


def test_a_zero_row_gives_zeros_and_finite_gradients() -> None:
    x = torch.zeros(3, 8, requires_grad=True)
    y = ops.RMSNorm(8)(x)
    y.sum().backward()
    assert torch.equal(y, torch.zeros_like(y)) and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_results_are_those_of_float32_rounded_once(dtype: torch.dtype) -> None:
    x, weight, dy = (torch.randn(shape).to(dtype) for shape in ((33, 40), (40,), (33, 40)))
    y, rstd = rms_norm(x, weight, 1e-5)
    wide, _ = rms_norm(x.float(), weight.float(), 1e-5)
    dx, dweight = drms_norm(dy, x, rstd, weight)
    wide_dx, wide_dweight = drms_norm(dy.float(), x.float(), rstd, weight.float())
    assert wide_dx is not None
    assert_same_bits(
        {"y": y, "dx": dx, "dw": dweight}, {"y": wide.to(dtype), "dx": wide_dx.to(dtype), "dw": wide_dweight}
    )


@given(
    shape=st.lists(st.integers(0, 5), max_size=3),
    features=st.integers(1, 9),
    zero_centered=st.booleans(),
    eps=st.floats(1e-6, 1),
)
def test_rms_norm_agrees_with_its_reference(shape: list[int], features: int, zero_centered: bool, eps: float) -> None:
    x = torch.randn(*shape, features, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(features, dtype=torch.float64, requires_grad=True)
    expected = rms_norm_ref(x, weight, eps, zero_centered=zero_centered)
    dy = torch.randn_like(expected)
    gradients = torch.autograd.grad(expected, (x, weight), dy)
    with torch.no_grad():
        y, rstd = rms_norm(x, weight, eps, zero_centered=zero_centered)
        dx, dweight = drms_norm(dy, x, rstd, weight, zero_centered=zero_centered)
    # dx of one feature is all but zero: what is left of a difference.
    torch.testing.assert_close((y, dx, dweight), (expected, *gradients), rtol=1e-10, atol=1e-12)


def test_scaling_a_row_changes_nothing_without_eps() -> None:
    x = torch.randn(6, 64, dtype=torch.float64)
    operation = make(64, eps=1e-300).double()
    torch.testing.assert_close(operation(x * torch.rand(6, 1, dtype=torch.float64)), operation(x))


def test_inputs_stay_as_they_are_and_strides_do_not_matter() -> None:
    x = torch.randn(19, 5).t()
    before = x.clone()
    check_operation(make(19), partial(formula, eps=0.3, zero_centered=False), x)
    assert torch.equal(x, before)


def test_it_agrees_with_torch() -> None:
    x = torch.randn(6, 19)
    torch.testing.assert_close(ops.RMSNorm(19, eps=1e-5)(x), nn.RMSNorm(19, eps=1e-5)(x))


def test_the_weight_starts_as_a_factor_of_one() -> None:
    for zero_centered, value in ((False, 1.0), (True, 0.0)):
        operation = ops.RMSNorm((3, 4), zero_centered_gamma=zero_centered, device="meta")
        assert operation.weight.is_meta and operation.weight.shape == (3, 4)
        operation = operation.to_empty(device="cpu")
        operation.reset_parameters()
        assert torch.equal(operation.weight, torch.full((3, 4), value))


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
    assert repr(ops.RMSNorm(8)) == "RMSNorm(8, eps=1e-05, zero_centered_gamma=False)"
    assert repr(ops.RMSNorm((2, 4), eps=1.0)) == "RMSNorm((2, 4), eps=1.0, zero_centered_gamma=False)"


@pytest.mark.parametrize("normalized_shape", [0, -4, (4, 0), ()])
def test_a_shape_that_is_not_positive_is_refused(normalized_shape: Any) -> None:
    with pytest.raises(ValueError, match="normalized_shape is .*, but needs one dimension or more, all positive"):
        ops.RMSNorm(normalized_shape)


@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan")])
def test_an_eps_that_is_not_positive_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match="eps is .*, but must be positive"):
        ops.RMSNorm(8, eps=eps)


@pytest.mark.parametrize(("normalized_shape", "shape"), [(8, (4, 7)), ((2, 4), (8,)), ((2, 4), (4, 8)), (8, ())])
def test_an_x_of_another_shape_is_refused(normalized_shape: Any, shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"In operation 0 \(RMSNorm\): x has shape \[.*\], but must end in \["):
        ops.RMSNorm(normalized_shape)(torch.ones(shape))
