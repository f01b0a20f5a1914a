"""L2Normalization against its formula in float64."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fuser import Sequential, autocast, ops
from ops.kernels.norm.l2_normalization import dl2_normalization, l2_normalization, l2_normalization_ref
from tests.check_operation import DEVICES, DTYPES, check_gradients, check_operation
from tests.reference import assert_same_bits

SHAPES = [(6, 64), (6, 16, 19), (19,), (6, 1), (0, 19), (2, 0, 4), (6, 0)]


def formula(x: Tensor, *, eps: float) -> Tensor:
    return x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_gradcheck(shape: tuple[int, ...]) -> None:
    check_gradients(ops.L2Normalization(eps=0.3), torch.randn(shape))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_agree_with_float64(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    x = torch.randn(shape, dtype=dtype, device=device)
    check_operation(ops.L2Normalization(eps=0.3), partial(formula, eps=0.3), x)


def test_a_frozen_x_gets_no_gradient() -> None:
    check_operation(ops.L2Normalization(eps=0.3), partial(formula, eps=0.3), torch.randn(6, 19), frozen=("x",))


def test_rows_have_length_one() -> None:
    y = ops.L2Normalization()(torch.randn(6, 64, dtype=torch.float64))
    torch.testing.assert_close(y.norm(dim=-1), torch.ones(6, dtype=torch.float64), rtol=1e-6, atol=0)


def test_fp16_rows_whose_squares_overflow_fp16_are_normalised() -> None:
    y = ops.L2Normalization()(torch.full((2, 16), 6e4, dtype=torch.float16))
    assert torch.equal(y, torch.full_like(y, 0.25))


def test_a_zero_row_gives_zeros_and_finite_gradients() -> None:
    x = torch.zeros(3, 8, requires_grad=True)
    y = ops.L2Normalization()(x)
    y.sum().backward()
    assert not y.any() and x.grad is not None and x.grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=["fp16", "bf16"])
def test_results_are_those_of_float32_rounded_once(dtype: torch.dtype) -> None:
    x, dy = (torch.randn(33, 40).to(dtype) for _ in range(2))
    y, rstd = l2_normalization(x, 1e-6)
    wide, _ = l2_normalization(x.float(), 1e-6)
    wide_dx = dl2_normalization(dy.float(), x.float(), rstd)
    actual = {"y": y, "dx": dl2_normalization(dy, x, rstd)}
    assert_same_bits(actual, {"y": wide.to(dtype), "dx": wide_dx.to(dtype)})


@given(shape=st.lists(st.integers(0, 5), max_size=3), features=st.integers(0, 9), eps=st.floats(1e-6, 1))
def test_l2_normalization_agrees_with_its_reference(shape: list[int], features: int, eps: float) -> None:
    x = torch.randn(*shape, features, dtype=torch.float64, requires_grad=True)
    expected = l2_normalization_ref(x, eps)
    dy = torch.randn_like(expected)
    (gradient,) = torch.autograd.grad(expected, (x,), dy)
    with torch.no_grad():
        y, rstd = l2_normalization(x, eps)
        dx = dl2_normalization(dy, x, rstd)
    # dx of one feature is all but zero: what is left of a difference.
    torch.testing.assert_close((y, dx), (expected, gradient), rtol=1e-10, atol=1e-10)


def test_inputs_stay_as_they_are_and_strides_do_not_matter() -> None:
    x = torch.randn(19, 5).t()
    before = x.clone()
    check_operation(ops.L2Normalization(eps=0.3), partial(formula, eps=0.3), x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_a_recipe_changes_nothing(recipe: str) -> None:
    sequential, x = Sequential(ops.L2Normalization()), torch.randn(6, 64)
    plain = sequential(x)
    with autocast(recipe=recipe):
        assert torch.equal(sequential(x), plain)


def test_settings_are_shown() -> None:
    assert repr(ops.L2Normalization()) == "L2Normalization(eps=1e-06)"


@pytest.mark.parametrize("eps", [0.0, -1e-5, float("nan")])
def test_an_eps_that_is_not_positive_is_refused(eps: float) -> None:
    with pytest.raises(ValueError, match="eps is .*, but must be positive"):
        ops.L2Normalization(eps=eps)


def test_an_x_without_dimensions_is_refused() -> None:
    with pytest.raises(ValueError, match=r"In operation 0 \(L2Normalization\): x has no dimensions"):
        ops.L2Normalization()(torch.ones(()))
