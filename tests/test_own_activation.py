"""An activation is a rule with its formula, and a class: no other code names it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fuser import Sequential, ops
from ops.activations import ActivationOperation
from ops.kernels.elementwise import chain
from ops.kernels.elementwise.activation import Activation
from ops.kernels.elementwise.activation_functions import RULES, ActivationRule, Constants
from ops.kernels.elementwise.chain_steps import ADD_COLUMN
from recipes.triton.gates import tl, triton
from tests import grouped_cases
from tests.check_operation import DEVICES, DTYPES, check_gradients, check_operation
from tests.reference import assert_close


@triton.jit
def cubed(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return x * x * x


@triton.jit
def dcubed(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * 3.0 * x * x


def dcubed_in_torch(dvalue: Tensor, x: Tensor, dx: Tensor, constants: Constants) -> Tensor:
    dx.copy_(3 * x * x * dvalue)
    return x * x * x


RULE = ActivationRule(False, lambda x, *_: x**3, lambda x, constants: x * x * x, dcubed_in_torch, cubed, dcubed)


class Cubed(ActivationOperation):
    """y = x^3."""

    def __init__(self) -> None:
        super().__init__(Activation("cubed"))


@pytest.fixture(autouse=True)
def rule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(RULES, "cubed", RULE)


def test_gradcheck() -> None:
    check_gradients(Cubed(), torch.randn(4, 6))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_and_gradients_agree_with_float64(dtype: torch.dtype, device: str) -> None:
    check_operation(Cubed(), lambda x: x**3, torch.randn(13, 18, dtype=dtype, device=device))


@pytest.mark.parametrize("device", grouped_cases.DEVICES)
def test_the_kernels_compute_it_in_a_chain(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain, "runs_triton", lambda *tensors, dtypes=(): True)
    steps = [ADD_COLUMN, Cubed().step()]
    x, dy, bias = (torch.randn(shape, device=device, requires_grad=True) for shape in ((5, 8), (5, 8), (8,)))
    expected = (x + bias) ** 3
    y = chain.elementwise(x.detach(), steps, [bias.detach(), None])
    found = chain.delementwise(dy.detach(), x.detach(), steps, [bias.detach(), None], need_operands=[True, False])
    dx, dbias = torch.autograd.grad(expected, (x, bias), dy)
    assert_close({"y": y, "dx": found.dx, "dbias": found.operands[0]}, {"y": expected, "dx": dx, "dbias": dbias})


@pytest.mark.gpu
def test_a_fused_chain_takes_it() -> None:
    sequential = Sequential(ops.Bias(64), Cubed()).to("cuda")
    assert "ElementwiseChain = Bias -> Cubed" in sequential.explain()
    x = torch.randn(5, 64, device="cuda")
    assert_close({"y": sequential(x)}, {"y": x**3})


def test_another_name_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(ValueError, match="kind is 'tripled', but must be one of gelu, .*, cubed"):
        Activation("tripled")
