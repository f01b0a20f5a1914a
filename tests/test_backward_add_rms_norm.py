"""BackwardAddRMSNorm against MakeExtraOutput and RMSNorm by themselves: their bits, but that dx is rounded once."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fused import BackwardAddRMSNorm
from fuser import Sequential, autocast, ops
from fuser.testing import check_fusion
from tests.check_operation import DEVICES, DTYPES
from tests.reference import assert_same_bits, gradients

HEADS = [("y",), ("extra",), ("y", "extra")]


def branch(shape: Any, zero_centered: bool = False, **where: Any) -> list[ops.BasicOperation]:
    norm = ops.RMSNorm(shape, zero_centered_gamma=zero_centered, **where)
    nn.init.normal_(norm.weight)
    return [ops.MakeExtraOutput("extra"), norm]


def both(operations: list[ops.BasicOperation], **settings: Any) -> tuple[Sequential, Sequential]:
    return (
        Sequential(*operations, fusions=(BackwardAddRMSNorm,), **settings),
        Sequential(*copy.deepcopy(operations), fusions=(), **settings),
    )


def results(pipeline: Sequential, x: Tensor, heads: tuple[str, ...]) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    leaf = x.detach().clone().requires_grad_(x.requires_grad)
    pipeline.zero_grad()
    y, made = pipeline(leaf, outputs=("extra",))
    outputs = {"y": y, **made}
    chosen = [outputs[name] for name in heads if outputs[name].requires_grad]
    d = [torch.randn(t.shape, generator=generator).to(t) for t in chosen]
    if chosen:
        torch.autograd.backward(chosen, d)
    return {**outputs, **gradients({"x": leaf, **dict(pipeline.named_parameters())})}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("normalized_shape", "shape"), [(40, (33, 40)), ((3, 5), (4, 3, 5)), (1, (6, 1)), (19, (0, 19))], ids=str
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_agrees_with_the_operations(
    dtype: torch.dtype, normalized_shape: Any, shape: tuple[int, ...], device: str
) -> None:
    check_fusion(BackwardAddRMSNorm, lambda: branch(normalized_shape), shape, dtype=dtype, device=device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("frozen", [(), ("x",), ("weight",), ("x", "weight")], ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_any_heads_and_anything_frozen(heads: tuple[str, ...], frozen: tuple[str, ...], device: str) -> None:
    fused, unfused = both(branch(19, zero_centered=True, device=device))
    for pipeline in (fused, unfused):
        pipeline[1].weight.requires_grad_("weight" not in frozen)
    x = torch.randn(5, 19, device=device).requires_grad_("x" not in frozen)
    assert_same_bits(results(fused, x, heads), results(unfused, x, heads))


def test_the_sum_is_rounded_once() -> None:
    fused, _ = both(branch(40, dtype=torch.bfloat16))
    x = torch.randn(64, 40, dtype=torch.bfloat16, requires_grad=True)
    y, made = fused(x, outputs=("extra",))
    dy, d_extra = torch.randn_like(x), torch.randn_like(x)
    torch.autograd.backward([y, made["extra"]], [dy, d_extra])
    leaf = x.detach().float().requires_grad_()
    norm = ops.RMSNorm(40)
    norm.weight.data.copy_(fused[1].weight.data)
    norm(leaf).backward(dy.float())
    assert x.grad is not None and leaf.grad is not None
    once = (leaf.grad + d_extra.float()).bfloat16()
    assert torch.equal(x.grad, once) and not torch.equal(x.grad, leaf.grad.bfloat16() + d_extra)


def test_fewer_numbers_are_off_than_unfused() -> None:
    """Of 6,144 in bfloat16 none is outside a relative tolerance of 1.6e-2, of which unfused are some."""
    outside = []
    for pipeline in both(branch(64, dtype=torch.bfloat16)):
        wide = Sequential(*copy.deepcopy(list(pipeline)), fusions=()).double()
        generator = torch.Generator().manual_seed(0)
        x, dy, d_extra = (torch.randn(96, 64, generator=generator).bfloat16() for _ in range(3))
        grads = []
        for each, dtype in ((pipeline, torch.bfloat16), (wide, torch.float64)):
            leaf = x.detach().to(dtype, copy=True).requires_grad_()
            y, made = each(leaf, outputs=("extra",))
            torch.autograd.backward([y, made["extra"]], [dy.to(dtype), d_extra.to(dtype)])
            grads.append(leaf.grad.double())
        outside.append(((grads[0] - grads[1]).abs() > 1e-5 + 1.6e-2 * grads[1].abs()).sum().item())
    assert outside[0] == 0 < outside[1]


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_a_norm_of_another_dtype_than_its_input(heads: tuple[str, ...]) -> None:
    fused, unfused = both(branch(40))
    x = torch.randn(33, 40, dtype=torch.bfloat16, requires_grad=True)
    found, expected = results(fused, x, heads), results(unfused, x, heads)
    if len(heads) > 1:
        torch.testing.assert_close(found.pop("gradient of x"), expected.pop("gradient of x"), rtol=2**-7, atol=2**-7)
    assert_same_bits(found, expected)


def test_the_gradient_of_the_branch_is_left_as_it_was() -> None:
    fused, _ = both(branch(8))
    y, made = fused(torch.randn(3, 8, requires_grad=True), outputs=("extra",))
    d_extra = torch.randn(3, 8)
    before = d_extra.clone()
    torch.autograd.backward([y, made["extra"]], [torch.randn(3, 8), d_extra])
    assert torch.equal(d_extra, before)


def test_gradients_of_other_strides() -> None:
    fused, unfused = both(branch(6))
    found = []
    dy, d_extra = torch.randn(6, 5).t(), torch.randn(1, 6).expand(5, 6)
    x = torch.randn(6, 5).t()
    for pipeline in (fused, unfused):
        leaf = x.clone().requires_grad_()
        y, made = pipeline(leaf, outputs=("extra",))
        torch.autograd.backward([y, made["extra"]], [dy, d_extra])
        found.append({"x": leaf.grad, "weight": pipeline[1].weight.grad})
    assert_same_bits(*found)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_residual_branch_uses_it_by_default(recipe: str) -> None:
    operations = [*branch(32), ops.Linear(32, 32), ops.AddExtraInput("extra")]
    default, unfused = Sequential(*operations), Sequential(*copy.deepcopy(operations), fusions=())
    assert "BackwardAddRMSNorm" in default.explain(recipe=recipe)
    x = torch.randn(32, 32, requires_grad=True)
    with autocast(recipe=recipe):
        assert_same_bits(results(default, x, ("y",)), results(unfused, x, ("y",)))


def test_gradcheck_of_a_residual_branch() -> None:
    layer = Sequential(*branch(4), ops.Linear(4, 4), ops.AddExtraInput("extra")).double()
    assert "BackwardAddRMSNorm" in layer.explain()
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))
