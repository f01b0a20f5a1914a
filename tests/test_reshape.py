"""Reshape: every number at its place, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuser import Sequential, autocast, ops
from ops.runner.operation import BasicOperation
from tests.check_operation import DEVICES, DTYPES, check_gradients, check_operation
from tests.reference import ROUNDED_ONCE

# shape of x, shape that is asked for
CASES = [
    pytest.param((1, 2, 3, 4), (2, 12), id="fewer dimensions"),
    pytest.param((5, 4, 3, 2), (-1, 6), id="rows that follow"),
    pytest.param((30,), (2, 3, -1), id="features that follow"),
    pytest.param((6, 7), (3, -1, 7), id="a middle that follows"),
    pytest.param((6, 7), (6, 7), id="the same shape"),
    pytest.param((6, 7), (-1,), id="one dimension"),
    pytest.param((1, 1), (), id="no dimension"),
    pytest.param((0, 4), (-1, 2), id="no rows"),
    pytest.param((0, 4), (3, 0), id="no columns"),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "target"), CASES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_keep_their_order(
    dtype: torch.dtype, shape: tuple[int, ...], target: tuple[int, ...], device: str
) -> None:
    x = torch.randn(shape, dtype=dtype, device=device)
    check_operation(ops.Reshape(target), lambda x: x.reshape(target), x, tolerances=dict.fromkeys(ROUNDED_ONCE, 0))


@pytest.mark.parametrize(("shape", "target"), CASES)
def test_gradcheck(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    check_gradients(ops.Reshape(target), torch.randn(shape))


def test_strides_do_not_matter() -> None:
    x = torch.randn(6, 5).t()
    check_operation(ops.Reshape((3, -1)), lambda x: x.reshape(3, 10), x, tolerances=dict.fromkeys(ROUNDED_ONCE, 0))


def test_a_frozen_x_gets_no_gradient() -> None:
    check_operation(ops.Reshape((3, -1)), lambda x: x.reshape(3, -1), torch.randn(6, 2), frozen=("x",))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "mxfp8"])
def test_it_stands_between_other_operations(recipe: str) -> None:
    linear = ops.Linear(32, 64)
    layer = Sequential(ops.Quantize(), ops.Reshape((-1, 32)), linear, ops.Reshape((4, -1, 64)))
    x = torch.randn(4, 32, 32, requires_grad=True)
    with autocast(recipe=recipe):
        y = layer(x)
        expected = linear(x.detach().view(128, 32)).view(4, 32, 64)
    torch.testing.assert_close(y, expected, rtol=0, atol=0)
    y.sum().backward()
    assert x.grad is not None and x.grad.shape == x.shape


def test_rows_may_change_from_call_to_call() -> None:
    operation = ops.Reshape((-1, 4))
    assert [operation(torch.ones(rows, 8)).shape[0] for rows in (3, 1, 0)] == [6, 2, 0]


def test_settings_are_shown() -> None:
    assert repr(ops.Reshape([2, -1])) == "Reshape((2, -1))"


@pytest.mark.parametrize("shape", [(-1, -1), (2, -2), (-1, 3, -1)], ids=str)
def test_a_shape_that_no_tensor_has_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="shape is .*, but holds sizes of zero or more, and -1 once at most"):
        ops.Reshape(shape)


@pytest.mark.parametrize(
    ("shape", "target"),
    [((6, 7), (6, 8)), ((6, 7), (4, -1)), ((0, 4), (0, -1)), ((2, 3), ()), ((2, 3), (-1, 0))],
    ids=str,
)
def test_an_x_that_does_not_fit_is_refused(shape: tuple[int, ...], target: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"In operation 0 \(Reshape\): x has shape .* elements, which cannot take"):
        ops.Reshape(target)(torch.ones(shape))


class Table(BasicOperation):
    """y = x + table, whose gradient is dy itself."""

    def __init__(self, *shape: int) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.ones(shape))

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Any) -> Any:
        return x + ctx.param("table"), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Any) -> Any:
        return dy, {"table": dy}, {}


@pytest.mark.parametrize("kind", ["extra inputs", "x and extra input", "parameters"])
def test_gradients_on_both_sides_are_accumulated_apart(kind: str) -> None:
    first, second = torch.ones(6, 8).requires_grad_(), torch.ones(2, 3, 8).requires_grad_()
    between = ops.Reshape((2, 3, 8))
    if kind == "parameters":
        tables = Table(6, 8), Table(2, 3, 8)
        model, given, leaves = Sequential(tables[0], between, tables[1]), {}, [table.table for table in tables]
        x = torch.ones(6, 8)
    elif kind == "extra inputs":
        model = Sequential(ops.AddExtraInput("first"), between, ops.AddExtraInput("second"))
        x, given, leaves = torch.ones(6, 8), {"first": first, "second": second}, [first, second]
    else:
        model, x = Sequential(between, ops.AddExtraInput("second")), first
        given, leaves = {"second": second}, [first, second]
    for _ in range(2):
        (model(x, **given) * torch.ones(2, 3, 8)).sum().backward()  # dense, which autograd keeps as it is
    for leaf in leaves:
        assert torch.equal(leaf.grad, torch.full_like(leaf, 2))
