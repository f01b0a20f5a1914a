"""FSDP2 (`fully_shard`) over two gloo ranks: outputs and gradients are those of the unsharded model.

Under quantizing recipes the first output is the same to the bit; later ones differ as the optimizer steps do.
"""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fuser import Sequential, autocast, lora, ops
from tests.ranks import on_ranks
from tests.reference import assert_same_bits

RANKS = 2


def model() -> Sequential:
    torch.manual_seed(0)
    return Sequential(
        ops.RMSNorm(16),
        ops.GroupedLinear(4, 16, 64),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(4, 32, 16),
        ops.Linear(16, 8),
    )


def step(sequential: nn.Module, x: Tensor) -> Tensor:
    y = sequential(x, split_sizes=torch.tensor([3, 0, 4, 1]), scales=torch.linspace(0.5, 1, 8))
    y.square().sum().backward()
    return y.detach()


def train(sequential: nn.Module, recipe: str) -> list[Tensor]:
    """Outputs of three steps of gradient descent: the weights change under the same addresses."""
    optimizer = torch.optim.SGD(sequential.parameters(), lr=0.05)
    outputs = []
    for seed in range(3):
        optimizer.zero_grad()
        with autocast(recipe):
            outputs.append(step(sequential, torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))))
        optimizer.step()
    return outputs


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def compare(rank: int, shard: str) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    plain = model()
    sharded = copy.deepcopy(plain)
    if shard == "operations":
        for operation in sharded:
            if any(True for _ in operation.parameters()):
                fully_shard(operation, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(step(sharded, x), step(plain, x))
    expected = dict(plain.named_parameters())
    for name, parameter in sharded.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), expected[name].grad, msg=lambda text, n=name: f"{n}: {text}")
    for recipe in ("mxfp8", "fp8_delayed"):
        for ours, other in zip(train(sharded, recipe), train(plain, recipe), strict=True):
            torch.testing.assert_close(ours, other, rtol=0.02, atol=0.02, msg=lambda t, n=recipe: f"{n}: {t}")


def compare_adapters(rank: int) -> None:
    """As above with adapters, added before the model is sharded; the frozen weights have no gradient."""
    plain = model()
    lora.add(plain, 2)
    for name, parameter in plain.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.2)
    sharded = copy.deepcopy(plain)
    for operation in sharded:
        if any(True for _ in operation.parameters()):
            fully_shard(operation, mesh=init_device_mesh("cpu", (RANKS,)))
    fully_shard(sharded, mesh=init_device_mesh("cpu", (RANKS,)))
    x = torch.randn(8, 16, generator=torch.Generator().manual_seed(1))
    expected = dict(plain.named_parameters())
    for recipe in ("bf16", "mxfp8"):
        plain.zero_grad()
        sharded.zero_grad()
        with autocast(recipe):
            torch.testing.assert_close(step(sharded, x), step(plain, x))
        for name, parameter in sharded.named_parameters():
            assert (parameter.grad is not None) == ("lora_" in name), name
            if parameter.grad is not None:
                found, wanted = whole(parameter.grad), expected[name].grad
                torch.testing.assert_close(found, wanted, msg=lambda text, n=name: f"{n}: {text}")
    assert_same_bits(lora.state_dict(sharded), lora.state_dict(plain))
    with pytest.raises(NotImplementedError, match=r"Sharded by fully_shard: 1, 3, 4\. Do this before"):
        lora.merge(sharded)


@pytest.mark.rest
def test_adapters_of_a_sharded_model_get_their_gradients(tmp_path: Path) -> None:
    on_ranks(compare_adapters, folder=tmp_path, ranks=RANKS)


@pytest.mark.parametrize("shard", ["the whole", "operations"])
def test_a_sharded_model_computes_what_the_whole_one_does(shard: str, tmp_path: Path) -> None:
    on_ranks(compare, shard, folder=tmp_path, ranks=RANKS)
