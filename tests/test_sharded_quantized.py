"""FSDP2 (`fully_shard`) of weights that are held quantized, over two gloo ranks: the bits of the unsharded model.

Both ranks have the same batch, so the mean of their gradients is that of each, exactly.
"""

from __future__ import annotations

import copy
import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather
from torch.distributed.tensor import Shard

import fuser
from fuser import Sequential, autocast, ops
from fuser.distributed import TrainingState
from recipes import Float8BlockScaling, Float8RowwiseScaling, MXFP8BlockScaling, NVFP4BlockScaling, Recipe
from recipes.mixed import MixedScaling
from recipes.tensors.quantized_parameter import QuantizedParameter
from recipes.tensors.quantized_shard import local_shard
from tests.pairwise import rest
from tests.ranks import on_ranks
from tests.reference import assert_same_bits

RANKS = 2
SIZES = [10, 0, 33]
GROUPS = len(SIZES)


def model(factor: int = 1, *, stacked: bool = True, **settings: Any) -> Sequential:
    """factor: by which rows of weights are multiples of 64."""
    torch.manual_seed(0)
    return Sequential(
        ops.Linear(24, 64 * factor, **settings),
        ops.GroupedLinear(GROUPS, 64 * factor, 128 * factor, stacked=stacked, **settings),
        ops.SwiGLU(),
        ops.GroupedLinear(GROUPS, 64 * factor, 64 * factor, stacked=stacked, **settings),
    )


def batch(step: int) -> Tensor:
    return torch.randn(sum(SIZES), 24, generator=torch.Generator().manual_seed(step)) * (step + 1)


def whole(tensor: Tensor) -> Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def run(layers: nn.Module, recipe: Recipe | str, step: int) -> dict[str, Tensor]:
    """y, and the gradients of x and of all parameters."""
    like = next(layers.parameters())
    x = batch(step).to(like.device, like.dtype).requires_grad_()
    torch.manual_seed(step)
    grouped = any(isinstance(layer, ops.GroupedLinear) for layer in layers.modules())
    with autocast(recipe):
        y = layers(x, split_sizes=SIZES) if grouped else layers(x)
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
    on_gpu = next(layers.parameters()).is_cuda
    mesh = init_device_mesh("cuda" if on_gpu else "cpu", (RANKS,))
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


def compare(rank: int, recipes: list[Recipe | str], factor: int, stacked: bool, each: bool, **settings: Any) -> None:
    for recipe in recipes:
        layers = model(factor, stacked=stacked, **settings)
        plain = fuser.to_quantized(layers, recipe, preserve_high_precision_init_val=each)
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
                MixedScaling(input="mxfp8", weight="fp8_block", weight_for_dgrad="mxfp8", grad_output="mxfp8"),
            ],
            4, True, True, id="other blocks",
        ),
    ],
)  # fmt: skip
@pytest.mark.slow
def test_a_sharded_model_has_the_bits_of_the_whole_one(
    recipes: list[Recipe | str], factor: int, stacked: bool, each: bool, tmp_path: Path
) -> None:
    """Outputs, gradients, and codes behind each step of an optimizer on masters; 3 groups on 2 ranks are uneven."""
    on_ranks(compare, recipes, factor, stacked, each, folder=tmp_path, ranks=RANKS)


def compare_odd_sizes(rank: int) -> None:
    """25 rows on two ranks are 13 and 12; 1 row is that of rank 0, and rank 1 has none."""
    for recipe in ("fp8_current", "fp8_delayed", "mxfp8", "nvfp4", "fp8_rowwise"):
        sizes = (24, 25, 1) if recipe in ("fp8_current", "fp8_delayed") else (24, 1)
        torch.manual_seed(0)
        plain = Sequential(*(ops.Linear(i, o) for i, o in pairwise(sizes)))
        fuser.to_quantized(plain, recipe)
        train_beside(plain, sharded(copy.deepcopy(plain)), recipe)


@pytest.mark.rest
def test_parts_may_be_uneven_and_empty(tmp_path: Path) -> None:
    on_ranks(compare_odd_sizes, folder=tmp_path, ranks=RANKS)


def compare_on_gpus(rank: int, dtype: torch.dtype, stacked: bool) -> None:
    recipes: list[Recipe | str] = ["fp8_current", "fp8_delayed", "fp8_block", "mxfp8", "nvfp4"]
    compare(rank, recipes, 4, stacked, stacked, device="cuda", dtype=dtype)


@pytest.mark.gpu
@pytest.mark.gpu2
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "per group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_gpus_have_the_bits_of_one(dtype: torch.dtype, stacked: bool, tmp_path: Path) -> None:
    on_ranks(compare_on_gpus, dtype, stacked, folder=tmp_path, ranks=RANKS, backend="nccl")


class BytesGathered(AllGather):
    """Gathers as FSDP2 does, and counts the bytes that a rank gives."""

    def __init__(self) -> None:
        self.nbytes = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool = False) -> Any:
        self.nbytes += input_tensor.nbytes
        return dist.all_gather_into_tensor(output_tensor, input_tensor, group=group, async_op=async_op)


def count_bytes(rank: int) -> None:
    """Of a forward; the biases are none."""

    def gathered(recipe: str | None, dtype: torch.dtype) -> int:
        torch.manual_seed(0)
        layers: Any = Sequential(
            ops.Linear(64, 256, bias=False, dtype=dtype), ops.Linear(256, 64, bias=False, dtype=dtype)
        )
        layers = layers if recipe is None else fuser.to_quantized(layers, recipe)
        shards, count = sharded(layers), BytesGathered()
        shards.set_custom_all_gather(count)
        with torch.no_grad(), autocast("bf16" if recipe is None else recipe):
            shards(torch.randn(4, 64, dtype=dtype))
        return count.nbytes

    bfloat16, float32 = gathered(None, torch.bfloat16), gathered(None, torch.float32)
    assert (bfloat16, float32) == (2 * 64 * 256, 4 * 64 * 256)
    for recipe in ("fp8_current", "fp8_delayed"):
        for dtype in (torch.bfloat16, torch.float32):
            assert gathered(recipe, dtype) == 64 * 256 + 2 * 4, "a byte each, and two scales"
    assert gathered("nvfp4", torch.bfloat16) == 64 * 256 * (1 / 2 + 1 / 16) + 2 * 4
    assert gathered("mxfp8", torch.float32) == 64 * 256 * 2 * (1 + 1 / 32), "both copies"


@pytest.mark.rest
def test_codes_and_scales_are_gathered(tmp_path: Path) -> None:
    on_ranks(count_bytes, folder=tmp_path, ranks=RANKS)


def shard_first(rank: int, recipes: list[str]) -> None:
    for recipe in recipes:
        plain, shards = model(), sharded(model(), each=True)
        fuser.to_quantized(plain, recipe, preserve_high_precision_init_val=True)
        fuser.to_quantized(shards, recipe, preserve_high_precision_init_val=True)
        assert all(local_shard(p) is not None for name, p in shards.named_parameters() if "weight" in name)
        train_beside(plain, shards, recipe)
        with pytest.raises(RuntimeError, match="fully_shard has gathered these weights before"):
            fuser.to_quantized(shards, "fp8_rowwise")
        with pytest.raises(ValueError, match="are sharded by a module around it"):
            fuser.to_quantized(sharded(model())[0], recipe)
        with fuser.quantized_model_init(recipe):
            later: Any = sharded(model(device="meta"))
        later.to_empty(device="cpu")
        torch.manual_seed(0)
        for layer in later:
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        expected = {name: local_shard(p) for name, p in later.named_parameters() if "weight" in name}
        assert all(part is not None and part.dequantize().abs().max() > 0 for part in expected.values())
        run(later, recipe, 0)


@pytest.mark.rest
def test_a_model_may_be_sharded_before_its_weights_are_quantized(tmp_path: Path) -> None:
    on_ranks(shard_first, ["fp8_current", "fp8_delayed", "mxfp8", "nvfp4"], folder=tmp_path, ranks=RANKS)


def exchange_states(rank: int, folder: str) -> None:
    for recipe in ("fp8_current", "fp8_delayed", "mxfp8"):
        plain, other = fuser.to_quantized(model(), recipe), fuser.to_quantized(changed(model()), recipe)
        assert not torch.equal(codes(plain)["0.weight 0"], codes(other)["0.weight 0"])
        source, target = sharded(copy.deepcopy(plain)), sharded(copy.deepcopy(other))
        target.load_state_dict(source.state_dict())
        assert_same_bits(codes(target), codes(plain))
        path = f"{folder}/{recipe} of {rank}"
        torch.save(target.state_dict(), path)
        target = sharded(copy.deepcopy(other))
        target.load_state_dict(torch.load(path, weights_only=False))
        assert_same_bits(codes(target), codes(plain))
        # In high precision: before the first forward, so that the ranks are not known from a gather.
        target, values = sharded(copy.deepcopy(other)), fuser.dequantized_state_dict(source.state_dict())
        assert all(type(v.to_local()) is Tensor for name, v in values.items() if name.endswith("weight"))
        assert_same_bits({n: whole(v) for n, v in values.items()}, fuser.dequantized_state_dict(plain.state_dict()))
        target.load_state_dict(values)
        whole_again = fuser.to_quantized(model(), recipe)
        whole_again.load_state_dict(fuser.dequantized_state_dict(plain.state_dict()))
        assert_same_bits(codes(target), codes(whole_again))
        # By torch.distributed.checkpoint.
        dcp.save({"model": values}, checkpoint_id=f"{folder}/{recipe}")
        target = sharded(copy.deepcopy(other))
        values = fuser.dequantized_state_dict(target.state_dict())
        dcp.load({"model": values}, checkpoint_id=f"{folder}/{recipe}")
        target.load_state_dict(values)
        assert_same_bits(codes(target), codes(whole_again))
        full = get_model_state_dict(source, options=StateDictOptions(full_state_dict=True))
        assert_same_bits(full, fuser.dequantized_state_dict(plain.state_dict()))
        target = sharded(copy.deepcopy(other))
        set_model_state_dict(target, full, options=StateDictOptions(full_state_dict=True))
        assert_same_bits(codes(target), codes(whole_again))
        target = sharded(copy.deepcopy(other))
        dcp.save({"training": TrainingState(source)}, checkpoint_id=f"{folder}/{recipe} training")
        dcp.load({"training": TrainingState(target)}, checkpoint_id=f"{folder}/{recipe} training")
        assert_same_bits(codes(target), codes(whole_again))
        # With the masters: bit for bit.
        masters = fuser.MasterWeights(source.parameters())
        changed(nn.ParameterList(masters.parameters()))
        masters.quantize()
        names = [name for name, _ in source.named_parameters()]
        dcp.save(dict(zip(names, masters.parameters(), strict=True)), checkpoint_id=f"{folder}/{recipe} masters")
        masters = fuser.MasterWeights(target.parameters())
        dcp.load(dict(zip(names, masters.parameters(), strict=True)), checkpoint_id=f"{folder}/{recipe} masters")
        masters.quantize()
        assert_same_bits(codes(target), codes(source))
        target.load_state_dict(values)
        masters.read()
        for name, master in zip(names, masters.parameters(), strict=True):
            assert torch.equal(whole(master), whole(target.get_parameter(name)))
        with pytest.raises(BaseException, match="Give it fuser.dequantized_state_dict"):
            dcp.save({"model": source.state_dict()}, checkpoint_id=f"{folder}/codes")


def changed(layers: nn.Module) -> Any:
    with torch.no_grad():
        for parameter in layers.parameters():
            parameter.copy_(parameter.sin() * 1.7)
    return layers


@pytest.mark.rest
def test_states_are_exchanged_with_the_whole_model(tmp_path: Path) -> None:
    on_ranks(exchange_states, str(tmp_path), folder=tmp_path, ranks=RANKS)


def compare_settings(rank: int) -> None:
    recipe = "fp8_current"
    plain = fuser.to_quantized(model(), recipe)
    expected = run(plain, recipe, 0)
    for mesh, settings in [
        (init_device_mesh("cpu", (RANKS,)), {"reshard_after_forward": False}),
        (init_device_mesh("cpu", (RANKS,)), {"offload_policy": CPUOffloadPolicy(pin_memory=False)}),
        (init_device_mesh("cpu", (RANKS, 1), mesh_dim_names=("replicas", "shards")), {}),
        (init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("replicas", "shards")), {}),
    ]:
        shards: Any = fully_shard(copy.deepcopy(plain), mesh=mesh, **settings)
        assert_same_bits(run(shards, recipe, 0), expected)
        shards.zero_grad()
        assert_same_bits(run(shards, recipe, 0), expected)
    assert "weights held quantized" in shards.explain(recipe=recipe)
    for recipe in ("fp8_current", "fp8_rowwise", "mxfp8"):
        rowwise = fuser.to_quantized(model(), recipe, columnwise=False)
        shards = sharded(copy.deepcopy(rowwise))
        with torch.no_grad(), autocast(recipe):
            assert torch.equal(shards(batch(0), split_sizes=SIZES), rowwise(batch(0), split_sizes=SIZES))
    recipe = "fp8_current"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    shards = fully_shard(copy.deepcopy(plain), mesh=init_device_mesh("cpu", (RANKS,)), mp_policy=policy)
    low = copy.deepcopy(plain)
    for layer in low:
        layer._parameters.update({name: in_bfloat16(p) for name, p in layer._parameters.items()})
    low.zero_grad()
    assert_same_bits({"y": run(shards, recipe, 0)["y"]}, {"y": run(low, recipe, 0)["y"]})


def in_bfloat16(parameter: Tensor) -> Tensor:
    """The same codes with another nominal dtype."""
    if not isinstance(parameter, QuantizedParameter):
        return nn.Parameter(parameter.detach().bfloat16())
    return nn.Parameter(parameter.over(dataclasses.replace(parameter.quantized, dtype=torch.bfloat16)))


@pytest.mark.rest
def test_settings_of_fully_shard_compute_the_same(tmp_path: Path) -> None:
    on_ranks(compare_settings, folder=tmp_path, ranks=RANKS)


def check_refusals(rank: int) -> None:
    mesh = init_device_mesh("cpu", (RANKS,))
    layer = fuser.to_quantized(ops.Linear(32, 64), "fp8_block")
    with pytest.raises(ValueError, match=r"\[64, 32\] .* into 32 rows a rank, but its blocks of scales have 128"):
        fully_shard(layer, mesh=mesh)
    with pytest.raises(ValueError, match="sharded into 32 rows a rank"):
        fuser.to_quantized(fully_shard(ops.Linear(32, 64), mesh=mesh), "fp8_block")
    of_two: Any = fully_shard(Sequential(ops.Linear(32, 64), ops.Linear(64, 48)), mesh=mesh)
    with pytest.raises(ValueError, match="sharded into 24 rows a rank"):
        fuser.to_quantized(of_two, "mxfp8")
    assert all(local_shard(parameter) is None for parameter in of_two.parameters()), "nothing is changed"
    held = fuser.to_quantized(ops.Linear(32, 64), "mxfp8").weight
    before = held.dequantize()
    for collective in (lambda: dist.broadcast(held, 0), lambda: dist.all_reduce(held.data)):
        with torch.no_grad(), pytest.raises(RuntimeError, match="would write into a tensor that is held quantized"):
            collective()
    with torch.no_grad(), pytest.raises(RuntimeError, match="would write into a view"):
        dist.broadcast(held[0], 0)
    gathered = [torch.empty(64, 32) for _ in range(RANKS)]
    with torch.no_grad():
        dist.all_gather(gathered, held)
    assert torch.equal(gathered[rank], held.dequantize()) and torch.equal(held.dequantize(), before)
    for recipe, rows in (("nvfp4", 16), (MXFP8BlockScaling(enable_2d_quantization=True), 32), ("mxfp8", 32)):
        with pytest.raises(ValueError, match=f"into 24 rows a rank, but its blocks of scales have {rows} rows"):
            fully_shard(fuser.to_quantized(ops.Linear(32, 48), recipe), mesh=mesh)
    with pytest.raises(NotImplementedError, match="cannot be sharded along dim 1, but along dim 0 alone"):
        fully_shard(fuser.to_quantized(ops.Linear(32, 64), "mxfp8"), mesh=mesh, shard_placement_fn=lambda _: Shard(1))
    mixed = MixedScaling(input="mxfp8", weight="mxfp8", weight_for_dgrad="high_precision")
    with pytest.raises(NotImplementedError, match="held quantized as Unquantized cannot be sharded"):
        fully_shard(fuser.to_quantized(ops.Linear(32, 64), mixed), mesh=mesh)
    shards: Any = fully_shard(fuser.to_quantized(ops.Linear(32, 64), "fp8_current"), mesh=mesh)
    with pytest.raises(RuntimeError, match="its ranks are not known before the first forward"), torch.no_grad():
        shards.weight.mul_(2)
    with pytest.raises(AssertionError, match="FSDP does not support deepcopy"):
        copy.deepcopy(shards)


@pytest.mark.rest
def test_what_cannot_be_sharded_is_refused(tmp_path: Path) -> None:
    on_ranks(check_refusals, folder=tmp_path, ranks=RANKS)
