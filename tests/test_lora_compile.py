"""Adapters of low rank under torch.compile: one graph, with the bits of eager steps."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.flop_counter import FlopCounterMode

from fuser import Sequential, autocast, lora
from recipes.registry import RECIPES
from tests.lora_cases import adapted, data, gradients, with_values
from tests.pairwise import rest
from tests.reference import assert_same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # its own too
]

NAMES = [kind.names[0] for kind in RECIPES]
SIZES = torch.tensor([5, 0, 11])


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Model(nn.Module):
    def __init__(self, layer: Sequential) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(2 * x, split_sizes=SIZES) + 1


def pair(**settings: float) -> tuple[Model, Model]:
    model = Model(adapted(**settings))
    return model, copy.deepcopy(model)


def step(model: Model, recipe: str, x: Tensor, run: nn.Module | None = None) -> dict[str, Tensor]:
    model.zero_grad()
    x.grad = None
    torch.manual_seed(1)  # of dropout
    with autocast(recipe):
        y = (model if run is None else run)(x)
    y.square().sum().backward()
    return {"y": y.detach(), "dx": x.grad} | gradients(model)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name if name in ("fp8_delayed", "mxfp8") else rest(name) for name in NAMES])
def test_steps_have_the_bits_of_eager_ones(recipe: str) -> None:
    eager, other = pair()
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(other, backend=counter, fullgraph=True)
    optimizers = [torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (eager, other)]
    for seed in range(3):
        found, expected = step(other, recipe, data(seed=seed), run), step(eager, recipe, data(seed=seed))
        assert any("lora_A" in name for name in found) and not any(name.endswith("0.weight") for name in found)
        assert_same_bits(found, expected)
        for optimizer in optimizers:
            optimizer.step()
    assert counter.frame_count == 1


@pytest.mark.slow
def test_merging_and_dropout_are_seen() -> None:
    eager, other = pair()
    run = torch.compile(other, backend="aot_eager", fullgraph=True)
    for change in (
        lambda model: None,
        lambda model: setattr(model.layer[0], "dropout", 0.5),
        lambda model: lora.merge(model),
        lambda model: lora.unmerge(model),
        lambda model: with_values(model, seed=2),
        lambda model: lora.unload(model),
    ):
        for model in (eager, other):
            change(model)
        found, expected = step(other, "mxfp8", data(), run), step(eager, "mxfp8", data())
        unused = found.keys() - expected.keys()  # of merged adapters, which have zeros for None
        assert not any(found.pop(name).any() for name in unused)
        assert_same_bits(found, expected)


@pytest.mark.slow
@pytest.mark.skipif(torch.__version__.startswith("2.11."), reason="of its own modules torch 2.11 misses it too")
def test_frozen_weights_that_are_trained_again_have_gradients() -> None:
    eager, other = pair()
    run = torch.compile(other, backend="aot_eager", fullgraph=True)
    step(other, "fp8_current", data(), run)
    for model in (eager, other):
        model.layer[2].weight.requires_grad_()
    found = step(other, "fp8_current", data(), run)
    assert "layer.2.weight" in found
    assert_same_bits(found, step(eager, "fp8_current", data()))


def test_products_of_adapters_are_counted() -> None:
    model = adapted(rank=4)
    x = data()
    with FlopCounterMode(display=False) as counter:
        model(x, split_sizes=SIZES).sum().backward()
    base = 2 * 16 * (32 * 64 + 32 * 32 + 32 * 16)
    adapters = 2 * 16 * 4 * (32 + 64 + 32 + 32 + 32 + 16)
    # forward; gradients of the rows; those of the factors
    assert counter.get_total_flops() == 2 * base + 3 * adapters


@pytest.mark.slow
def test_base_weights_that_were_trained_compiled_are_quantized_anew():
    """As a fused optimizer leaves them: the version counter does not tell."""
    model, _ = pair()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(16, 32)
    bases = [parameter for name, parameter in model.named_parameters() if "lora_" not in name]

    def evaluated(model: Model) -> Tensor:
        with torch.no_grad(), autocast("mxfp8"):
            return model(x)

    for parameter in bases:
        parameter.requires_grad_(False)
    before = evaluated(model)
    for parameter in bases:
        parameter.requires_grad_(True)
    with autocast("mxfp8"):
        run(x).sum().backward()
    model.zero_grad()
    for parameter in bases:
        parameter.data.copy_(2 * parameter.detach())
        parameter.requires_grad_(False)
    after = evaluated(model)
    assert torch.equal(after, evaluated(copy.deepcopy(model))) and not torch.equal(after, before)
