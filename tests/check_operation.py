"""One operation against a formula: y and every gradient, with float64 autograd as the judge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import pytest
import torch
from torch import Tensor

from fuser import Sequential
from ops import BasicOperation
from tests.reference import ROUNDED_ONCE, assert_close, gradients, leaves

Formula = Callable[..., Tensor]

DTYPES = [
    pytest.param(torch.float64, id="fp64"),
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def check_operation(
    operation: BasicOperation,
    formula: Formula,
    x: Tensor,
    extras: Mapping[str, Tensor] | None = None,
    *,
    frozen: Collection[str] = (),
    tolerances: Mapping[torch.dtype, float] = ROUNDED_ONCE,
) -> None:
    """y, dx and the gradients of all extras and parameters are near those of `formula(x=..., **extras, **parameters)`.

    What is named in `frozen` requires no grad, and gets none.
    """
    parameters = {name: p.requires_grad_(name not in frozen) for name, p in operation.named_parameters()}
    given = {name: t.detach().requires_grad_(name not in frozen) for name, t in {"x": x, **(extras or {})}.items()}
    ours, exact = leaves(given), leaves({**given, **parameters}, torch.float64)
    operation.zero_grad()
    y = operation(**ours)
    expected = formula(**exact)
    assert y.dtype == x.dtype and y.shape == expected.shape
    assert y.requires_grad == expected.requires_grad
    if y.requires_grad:
        dy = torch.randn(y.shape, dtype=y.dtype, device=y.device)
        y.backward(dy)
        expected.backward(dy.double())
    found = {**ours, **parameters}
    for name, tensor in found.items():
        assert tensor.grad is None or tensor.grad.dtype == tensor.dtype, name
    assert_close({"y": y, **gradients(found)}, {"y": expected, **gradients(exact)}, tolerances)


def check_gradients(operation: BasicOperation, x: Tensor, extras: Mapping[str, Tensor] | None = None) -> None:
    """torch.autograd.gradcheck in float64 of x, all extras and all parameters."""
    sequential = Sequential(operation.double())
    names = ("x", *(extras or {}))
    values = [t.detach().double().requires_grad_() for t in (x, *(extras or {}).values())]

    def call(*tensors: Tensor) -> Tensor:
        return sequential(**dict(zip(names, tensors[: len(names)], strict=True)))

    assert torch.autograd.gradcheck(call, (*values, *operation.parameters()))
