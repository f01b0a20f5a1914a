"""Training with weights that are held quantized, stepped by torch's own optimizers through float32 masters."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import fuser
from fuser import Sequential, autocast, ops
from tests.pairwise import rest


def model(dtype: torch.dtype = torch.float32) -> Sequential:
    torch.manual_seed(0)
    return Sequential(
        ops.Linear(16, 32, dtype=dtype),
        ops.GroupedLinear(2, 32, 64, dtype=dtype),
        ops.SwiGLU(),
        ops.GroupedLinear(2, 32, 16, dtype=dtype, stacked=False),
    )


def batch(step: int) -> tuple[Tensor, Tensor]:
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(step))
    return x, torch.tanh(x.flip(1) * 2)


def train(
    layers: nn.Module, optimizer: torch.optim.Optimizer, recipe: str, steps: int, dtype: torch.dtype
) -> list[float]:
    """The losses."""
    losses = []
    torch.manual_seed(0)
    for step in range(steps):
        x, target = batch(step)
        with autocast(recipe):
            loss = (layers(x.to(dtype), split_sizes=[40, 24]).float() - target).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("recipe", ["fp8_delayed", rest("fp8_current"), rest("fp8_block"), rest("mxfp8"), "nvfp4"])
def test_steps_are_those_of_float32_weights_that_are_quantized_in_each(recipe: str) -> None:
    """Bit for bit: these weights are the masters, and both are quantized once from them."""
    plain, layers = model(), fuser.to_quantized(model(), recipe, preserve_high_precision_init_val=True)
    masters = fuser.MasterWeights(layers.parameters())
    expected = train(plain, torch.optim.AdamW(plain.parameters(), lr=3e-3), recipe, 4, torch.float32)
    optimizer = masters.attach(torch.optim.AdamW(masters.parameters(), lr=3e-3))
    assert train(layers, optimizer, recipe, 4, torch.float32) == expected
    assert expected[-1] != expected[0]


class Outside:
    """Float32 masters of weights in bfloat16, which are quantized in each step: what held weights are compared with."""

    def __init__(self, layers: nn.Module) -> None:
        self.pairs = [(p, nn.Parameter(p.detach().float())) for p in layers.parameters()]

    def attach(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        optimizer.register_step_pre_hook(lambda *_: self.before())
        optimizer.register_step_post_hook(lambda *_: self.after())
        return optimizer

    def before(self) -> None:
        for parameter, master in self.pairs:
            master.grad, parameter.grad = parameter.grad.float(), None

    def after(self) -> None:
        with torch.no_grad():
            for parameter, master in self.pairs:
                parameter.copy_(master)


@pytest.mark.rest
@pytest.mark.parametrize("kind", ["AdamW", "SGD"])
@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_the_loss_of_bfloat16_is_within_2_percent_of_masters_outside(recipe: str, kind: str) -> None:
    """Theirs are rounded to bfloat16 before they are quantized, so the bits differ. Means of the last ten steps."""
    settings = {"lr": 3e-3} if kind == "AdamW" else {"lr": 0.3, "momentum": 0.9}
    plain = model(torch.bfloat16)
    layers = fuser.to_quantized(model(torch.bfloat16), recipe, preserve_high_precision_init_val=True)
    outside, inside = Outside(plain), fuser.MasterWeights(layers.parameters())
    make = getattr(torch.optim, kind)
    theirs = outside.attach(make([master for _, master in outside.pairs], **settings))
    expected = train(plain, theirs, recipe, 40, torch.bfloat16)
    found = train(layers, inside.attach(make(inside.parameters(), **settings)), recipe, 40, torch.bfloat16)
    assert sum(found[-10:]) < 0.9 * sum(found[:10])
    assert abs(sum(found[-10:]) - sum(expected[-10:])) < 0.02 * sum(expected[-10:])


def test_masters_begin_with_the_values_before_quantization() -> None:
    for keep in (True, False):
        layers = fuser.to_quantized(model(), "mxfp8", preserve_high_precision_init_val=keep)
        master = fuser.MasterWeights(layers.parameters()).parameters()[0]
        weight = layers[0].weight
        assert master.dtype == torch.float32 and master.is_leaf and master.requires_grad
        assert torch.equal(master, model()[0].weight if keep else weight.dequantize())
        assert weight.get_high_precision_init_val() is None


def test_masters_read_what_was_loaded_into_the_model() -> None:
    layers, other = fuser.to_quantized(model(), "mxfp8"), model()
    masters = fuser.MasterWeights(layers.parameters())
    with torch.no_grad():
        other[0].weight.mul_(1.7)
    layers.load_state_dict(other.state_dict())
    assert not torch.equal(masters.parameters()[0], layers[0].weight.dequantize())
    masters.read()
    assert torch.equal(masters.parameters()[0], layers[0].weight.dequantize())
    masters.quantize()
    expected = fuser.to_quantized(other, "mxfp8")[0].weight
    assert torch.equal(layers[0].weight.dequantize(), expected.dequantize())


def test_a_step_takes_main_grad_and_quantizes_from_the_master() -> None:
    layer = fuser.to_quantized(ops.Linear(32, 32, accumulate_into_main_grad=True), "mxfp8")
    layer.weight.main_grad = torch.zeros(32, 32)
    masters = fuser.MasterWeights([layer.weight])
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=0.5))
    before = layer.weight.dequantize()
    with autocast("mxfp8"):
        layer(torch.randn(8, 32)).sum().backward()
    optimizer.step()
    expected = fuser.quantize(before.detach() - 0.5 * layer.weight.main_grad, "mxfp8", "weight")
    for mine, other in zip(layer.weight.quantized.tensors(), expected.quantized.tensors(), strict=True):
        assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))


def test_what_is_not_quantized_is_stepped_itself() -> None:
    layers = fuser.to_quantized(model(), "mxfp8")
    layers[0].weight.requires_grad_(False)
    stepped = fuser.MasterWeights(layers.parameters()).parameters()
    kept = [p is s for p, s in zip(layers.parameters(), stepped, strict=True)]
    assert kept == [name == "0.weight" or "bias" in name for name, _ in layers.named_parameters()]
    with pytest.raises(ValueError, match="got no quantized parameter that requires grad"):
        fuser.MasterWeights(model().parameters())
