"""FSDP2 (`fully_shard`) and FSDP1 over two gloo ranks: outputs and gradients are those of the unsharded model.

Under quantizing recipes the first output is the same to the bit; later ones differ as the optimizer steps do.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, StateDictType, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor

from fuser import Sequential, autocast, lora, ops, prepare, to_quantized
from fuser.distributed import TrainingState
from ops.runner import program, run
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


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["the whole", "operations"])
def test_a_sharded_model_computes_what_the_whole_one_does(shard: str, tmp_path: Path) -> None:
    on_ranks(compare, shard, folder=tmp_path, ranks=RANKS)


class Residual(nn.Module):
    """Two Sequentials, each of which FSDP1 wraps, behind one another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = model(), Sequential(ops.Linear(8, 16), ops.GELU(), ops.Linear(16, 8))

    def forward(self, x: Tensor, **extras: Tensor) -> Tensor:
        y = self.first(x, **extras)
        return y + self.second(y)


def fsdp1(module: nn.Module, **settings: object) -> FullyShardedDataParallel:
    wrapped = ModuleWrapPolicy({Sequential})
    return FullyShardedDataParallel(module, auto_wrap_policy=wrapped, device_id=torch.device("cpu"), **settings)


def compare_fsdp1(rank: int, use_orig_params: bool) -> None:
    """Both ranks have the same rows, so that means over ranks round nothing, and all bits are those of one."""
    make = partial(fsdp1, use_orig_params=use_orig_params)
    for recipe in ("bf16", "fp8_current", "fp8_delayed", "mxfp8"):
        plain = Residual()
        sharded, computing_again = make(copy.deepcopy(plain)), make(copy.deepcopy(plain))
        apply_activation_checkpointing(computing_again, check_fn=lambda module: isinstance(module, Sequential))
        expected = dict(enumerate(train(plain, recipe)))
        for each in (sharded, computing_again)[: 1 if recipe == "fp8_delayed" else 2]:
            assert_same_bits(dict(enumerate(train(each, recipe))), expected)
        sharded.eval()
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(9))
        extras = {"split_sizes": torch.tensor([8, 0, 0, 0]), "scales": torch.ones(8)}
        for mode in (torch.no_grad(), torch.inference_mode()):
            with mode, autocast(recipe):
                assert_same_bits({"y": sharded(x, **extras)}, {"y": plain(x, **extras)})
        resumed = make(Residual())
        with (
            FullyShardedDataParallel.state_dict_type(sharded, StateDictType.FULL_STATE_DICT),
            FullyShardedDataParallel.state_dict_type(resumed, StateDictType.FULL_STATE_DICT),
        ):
            assert_same_bits(sharded.state_dict(), plain.state_dict())
            resumed.load_state_dict(sharded.state_dict())
        for module in (sharded, plain, resumed):
            module.train()
        for module in (sharded, resumed):
            assert_same_bits(
                dict(enumerate(train(module, recipe))), dict(enumerate(train(copy.deepcopy(plain), recipe)))
            )
    with pytest.raises(RuntimeError, match=r"The 'weight' of GroupedLinear is held quantized.*Shard it by fully_shard"):
        make(to_quantized(Residual(), "mxfp8"))
    sharded = make(Residual(), mixed_precision=MixedPrecision(param_dtype=torch.bfloat16))
    outputs = train(sharded, "fp8_delayed")
    assert all(y.dtype == torch.bfloat16 for y in outputs) and outputs[0].isfinite().all()


def resume_fsdp1(rank: int, use_orig_params: bool, folder: Path) -> None:
    """A checkpoint has weights, optimizer and the state of delayed scaling: the next step has the same bits."""

    def make() -> tuple[nn.Module, TrainingState]:
        module = fsdp1(prepare(Residual(), "fp8_delayed"), use_orig_params=use_orig_params)
        return module, TrainingState(module, torch.optim.AdamW(module.parameters(), lr=0.05))

    def trained(module: nn.Module, state: TrainingState, seed: int) -> Tensor:
        with autocast("fp8_delayed"):
            y = step(module, torch.randn(8, 16, generator=torch.Generator().manual_seed(seed)))
        state.optimizer.step()
        state.optimizer.zero_grad()
        return y

    module, state = make()
    for seed in range(3):
        trained(module, state, seed)
    dcp.save({"training": state}, checkpoint_id=folder)
    expected = trained(module, state, 3)
    module, state = make()
    dcp.load({"training": state}, checkpoint_id=folder)
    assert torch.equal(trained(module, state, 3), expected)


def plans_of_fsdp1(rank: int, use_orig_params: bool) -> None:
    """What is exchanged around each pass is no change: the second step of training and evaluation plans nothing."""
    sharded = fsdp1(Residual(), use_orig_params=use_orig_params)
    made = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "Program", lambda *args: made.append(args) or program.Program(*args))
        for planned in (4, 4, 4):  # of two Sequentials, with gradients and without
            train(sharded.train(), "bf16")
            with torch.no_grad():
                sharded.eval()(torch.ones(8, 16), split_sizes=torch.tensor([8, 0, 0, 0]), scales=torch.ones(8))
            assert len(made) == planned


def gathered(name: str) -> property:
    def gather(module: nn.Module) -> Tensor:
        shard = module._parameters[name]
        return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial("avg")])

    return property(gather)


def compare_simple_fsdp(rank: int) -> None:
    """As torchtitan's SimpleFSDP, which was not run: shards are registered, and a class that is put over the module's
    gathers them where they are read."""
    mesh = init_device_mesh("cpu", (RANKS,))
    for recipe in ("bf16", "fp8_current", "fp8_delayed"):
        plain = Residual()
        sharded = copy.deepcopy(plain)
        for module in [*sharded.modules()]:
            named = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
            for name, parameter in named.items():
                module.register_parameter(name, nn.Parameter(distribute_tensor(parameter, mesh, [Shard(0)])))
            module.__class__ = type(f"Over{type(module).__name__}", (type(module),), {n: gathered(n) for n in named})
        ours, other = (dict(enumerate(train(each, recipe))) for each in (sharded, plain))
        assert_same_bits(ours, other)
        assert_same_bits({n: whole(p) for n, p in sharded.named_parameters()}, dict(plain.named_parameters()))


@pytest.mark.rest
def test_weights_that_a_class_over_the_module_gathers(tmp_path: Path) -> None:
    on_ranks(compare_simple_fsdp, folder=tmp_path, ranks=RANKS)


@pytest.mark.rest
@pytest.mark.parametrize("use_orig_params", (True, False))
def test_fsdp1_computes_what_the_whole_one_does(use_orig_params: bool, tmp_path: Path) -> None:
    on_ranks(compare_fsdp1, use_orig_params, folder=tmp_path, ranks=RANKS)


@pytest.mark.rest
@pytest.mark.parametrize("use_orig_params", (True, False))
def test_fsdp1_is_planned_for_once(use_orig_params: bool, tmp_path: Path) -> None:
    on_ranks(plans_of_fsdp1, use_orig_params, folder=tmp_path, ranks=RANKS)


@pytest.mark.rest
@pytest.mark.parametrize("use_orig_params", (True, False))
def test_fsdp1_goes_on_from_a_checkpoint(use_orig_params: bool, tmp_path: Path) -> None:
    (tmp_path / "ranks").mkdir()
    on_ranks(resume_fsdp1, use_orig_params, tmp_path / "checkpoint", folder=tmp_path / "ranks", ranks=RANKS)
