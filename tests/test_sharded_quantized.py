"""FSDP2 (`fully_shard`) of weights that are held quantized, over two gloo ranks: the bits of the unsharded model.

Both ranks have the same batch, so the mean of their gradients is that of each, exactly.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import fuser
from fuser import Sequential, autocast, ops
from recipes import Float8BlockScaling, Float8RowwiseScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from recipes.tensors.quantized_parameter import QuantizedParameter
from recipes.tensors.quantized_shard import local_shard
from tests.pairwise import rest
from tests.ranks import on_ranks
from tests.reference import assert_same_bits

RANKS = 2
SIZES = [10, 0, 33]
GROUPS = len(SIZES)


def model(factor: int = 1, *, stacked: bool = True, dtype: torch.dtype = torch.float32) -> Sequential:
    """factor: by which rows of weights are multiples of 64."""
    torch.manual_seed(0)
    return Sequential(
        ops.Linear(24, 64 * factor, dtype=dtype),
        ops.GroupedLinear(GROUPS, 64 * factor, 128 * factor, stacked=stacked, dtype=dtype),
        ops.SwiGLU(),
        ops.GroupedLinear(GROUPS, 64 * factor, 64 * factor, stacked=stacked, dtype=dtype),
    )


def batch(step: int) -> Tensor:
    return torch.randn(sum(SIZES), 24, generator=torch.Generator().manual_seed(step)) * (step + 1)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(layers: nn.Module, recipe: Recipe | str, step: int) -> dict[str, Tensor]:
    """y, and the gradients of x and of all parameters."""
    x = batch(step).to(next(layers.parameters()).dtype).requires_grad_()
    torch.manual_seed(step)
    with autocast(recipe):
        y = layers(x, split_sizes=SIZES)
    y.square().mean().backward()
    return {"y": y.detach(), "dx": x.grad} | {name: whole(p.grad) for name, p in layers.named_parameters()}


def codes(layers: nn.Module) -> dict[str, Tensor]:
    """Codes and scales of all weights, of a sharded model those that it gathers."""
    modules = [module for module in layers.modules() if isinstance(module, FSDPModule)]
    for module in modules:
        module.unshard()
    found = {}
    for name, parameter in layers.named_parameters():
        if isinstance(parameter, QuantizedParameter):
            tensors = enumerate(parameter.quantized.tensors())
            found |= {f"{name} {i}": tensor.clone() for i, tensor in tensors if tensor is not None}
    for module in modules:
        module.reshard()
    assert found
    return {name: tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor for name, tensor in found.items()}


def sharded(layers: Sequential, each: bool = False) -> Any:
    """each: the operations, and the model."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for operation in layers:
        if each and any(True for _ in operation.parameters()):
            fully_shard(operation, mesh=mesh)
    return fully_shard(layers, mesh=mesh)


def train_beside(plain: Sequential, shards: Any, recipe: Recipe | str, steps: int = 3) -> None:
    """Both models, by AdamW on masters: the same bits in each step."""
    optimizers = []
    for layers in (plain, shards):
        masters = fuser.MasterWeights(layers.parameters())
        optimizers.append(masters.attach(torch.optim.AdamW(masters.parameters(), lr=1e-2, weight_decay=0.1)))
    for step in range(steps):
        assert_same_bits(run(shards, recipe, step), run(plain, recipe, step))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_bits(codes(shards), codes(plain))


def compare(rank: int, recipes: list[Recipe | str], factor: int, stacked: bool, each: bool) -> None:
    for recipe in recipes:
        plain = fuser.to_quantized(model(factor, stacked=stacked), recipe, preserve_high_precision_init_val=each)
        shards = sharded(copy.deepcopy(plain), each)
        assert all(local_shard(p) is not None for name, p in shards.named_parameters() if "weight" in name)
        train_beside(plain, shards, recipe)


@pytest.mark.parametrize(
    ("recipes", "factor", "stacked", "each"),
    [
        pytest.param(["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"], 1, True, False, id="stacked"),
        rest(["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"], 1, False, True, id="per group, each operation"),
        rest(["fp8_current", "fp8_delayed", "fp8_block", "mxfp8"], 4, False, False, id="per group, in large"),
        rest(
            [
                "fp8_block", Float8BlockScaling(x_block_scaling_dim=1, w_block_scaling_dim=1),
                MXFP8BlockScaling(enable_2d_quantization=True), Float8RowwiseScaling(),
                NVFP4BlockScaling(disable_2d_quantization=True),
            ],
            4, True, True, id="other blocks",
        ),
    ],
)  # fmt: skip
def test_a_sharded_model_has_the_bits_of_the_whole_one(
    recipes: list[Recipe | str], factor: int, stacked: bool, each: bool, tmp_path: Path
) -> None:
    """Outputs, gradients, and codes behind each step of an optimizer on masters; 3 groups on 2 ranks are uneven."""
    on_ranks(compare, recipes, factor, stacked, each, folder=tmp_path, ranks=RANKS)
