"""Tensors of more than 2**31 values: their last rows give what these rows give in small tensors."""

import copy

import pytest
import torch
from torch import Tensor

from bench.sqnr import Sqnr
from fuser import Sequential, autocast, ops
from recipes import NVFP4BlockScaling, Recipe

pytestmark = pytest.mark.gpu

HIDDEN, WIDTH = 4096, 4096
ROWS, LAST = 2**19 + 2**12, 1000
LEAST = 38  # dB: another tile may add in another order; what is read or written elsewhere is far off
RECIPES: dict[str, str | Recipe] = {
    name: name for name in ("bf16", "fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise", "mxfp8")
} | {"nvfp4": NVFP4BlockScaling(disable_stochastic_rounding=True)}
OF_ROWS = ("bf16", "fp8_block", "fp8_rowwise", "mxfp8")  # whose numbers of a row do not follow from other rows
ABOUT = {"device": "cuda", "dtype": torch.bfloat16, "bias": False}


def step(model: Sequential, recipe: str | Recipe, x: Tensor, dy: Tensor, **extras: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    x = x.requires_grad_()
    with autocast(recipe=recipe):
        y = model(x, **extras)
    y.backward(dy)
    return {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in model.named_parameters()}


def assert_close(large: dict[str, Tensor], small: dict[str, Tensor]) -> None:
    for name, tensor in small.items():
        assert large[name].isfinite().all(), name
        found = Sqnr()
        found.add(large[name], tensor)
        assert found.db >= LEAST, (name, found.db)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_the_last_group_of_many_rows(recipe, fused):
    torch.manual_seed(0)
    mlp = Sequential(
        ops.GroupedLinear(2, HIDDEN, 2 * WIDTH, **ABOUT),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(2, WIDTH, HIDDEN, **ABOUT),
        fusions=None if fused else [],
    )
    x, dy = (torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    scales = torch.rand(ROWS, device="cuda")
    last = slice(ROWS - LAST, None)
    few = x[last].clone(), dy[last].clone(), scales[last].clone()
    other = copy.deepcopy(mlp)  # delayed scaling has other scales in a second step
    found = step(mlp, recipe, x, dy, split_sizes=torch.tensor([ROWS - LAST, LAST], device="cuda"), scales=scales)
    large = {name: t[last].clone() if name in ("y", "dx") else t[1].clone() for name, t in found.items()}
    del x, dy, scales, found
    found = step(other, recipe, *few[:2], split_sizes=torch.tensor([0, LAST], device="cuda"), scales=few[2])
    assert_close(large, {name: t if name in ("y", "dx") else t[1] for name, t in found.items()})


@pytest.mark.parametrize("recipe", OF_ROWS)
def test_the_last_rows_of_a_dense_mlp(recipe):
    torch.manual_seed(0)
    mlp = Sequential(
        ops.RMSNorm(HIDDEN, device="cuda", dtype=torch.bfloat16),
        ops.Linear(HIDDEN, 2 * WIDTH, **ABOUT),
        ops.SwiGLU(),
        ops.Linear(WIDTH, HIDDEN, **ABOUT),
    )
    x, dy = (torch.randn(ROWS, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    dy[:-LAST] = 0  # so weights have gradients of the last rows alone
    last = slice(ROWS - LAST, None)
    few = x[last].clone(), dy[last].clone()
    found = step(mlp, recipe, x, dy)
    large = {name: t[last].clone() if name in ("y", "dx") else t.clone() for name, t in found.items()}
    del x, dy, found
    small = step(mlp, recipe, *few)
    # Blocks of a column hold other rows, so codes for the weights' gradients are others.
    compared = small if recipe == "bf16" else ("y", "dx")
    assert_close(large, {name: small[name] for name in compared})


@pytest.mark.parametrize("recipe", OF_ROWS)
def test_the_last_tokens_of_a_layer(recipe):
    torch.manual_seed(0)
    topk, tokens = 8, ROWS // 8
    layer = Sequential(
        ops.Dispatch(topk),
        ops.GroupedLinear(topk, HIDDEN, 2 * WIDTH, **ABOUT),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(topk, WIDTH, HIDDEN, **ABOUT),
        ops.Combine(),
    )
    x, dy = (torch.randn(tokens, HIDDEN, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    indices = torch.arange(topk, device="cuda").repeat(tokens, 1)
    probs = torch.rand(tokens, topk, device="cuda")
    few = tuple(t[-LAST:].clone() for t in (x, dy, indices, probs))
    found = step(layer, recipe, x, dy, indices=indices, probs=probs)
    large = {name: found[name][-LAST:].clone() for name in ("y", "dx")}
    del x, dy, indices, probs, found
    small = step(layer, recipe, *few[:2], indices=few[2], probs=few[3])
    assert_close(large, {name: small[name] for name in ("y", "dx")})
