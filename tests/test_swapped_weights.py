"""Weights that hooks, checkpointing or FSDP2 may swap, and weights that change between the passes."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fuser import Sequential, autocast, checkpoint, ops
from tests.check_operation import DEVICES
from tests.main_grad_cases import (
    FEW_MODELS,
    IN,
    MODELS,
    OUT,
    ROWS,
    SIZES,
    backward,
    give_main_grads,
    gradients,
    make,
    weights_of,
)
from tests.ranks import on_ranks

DEVICE = pytest.mark.parametrize("device", DEVICES)
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
FEW = pytest.mark.parametrize("model", FEW_MODELS)
DELAY = pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])


def forward(sequential: Sequential, checkpoint: Callable[..., Tensor] | None = None) -> Tensor:
    device = next(sequential.parameters()).device
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, IN, generator=generator).to(device).requires_grad_()
    extras = {"split_sizes": torch.tensor(SIZES, device=device)} if sequential.layout().consumed else {}
    return sequential(x, **extras) if checkpoint is None else checkpoint(lambda x: sequential(x, **extras), x)


def gradients_of(
    sequential: Sequential,
    delay: bool,
    hooks: AbstractContextManager[Any],
    checkpoint: Callable[..., Tensor] | None = None,
) -> list[Tensor]:
    give_main_grads(sequential, 0.5)
    with hooks:
        y = forward(sequential, checkpoint)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y))
    if delay:
        sequential.backward_dw()
    weights = list(weights_of(sequential).values())
    assert all(weight.grad_added_to_main_grad for weight in weights)
    return [weight.main_grad for weight in weights]


def assert_same_bits(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, other in zip(actual, expected, strict=True):
        assert torch.equal(ours, other)


# Saved-tensor hooks and checkpointing

HOOKS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "save_on_cpu": save_on_cpu,
    "identity": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "clone": lambda: saved_tensors_hooks(lambda t: t.clone(), lambda t: t.clone()),
}
CHECKPOINTS = {"fuser.checkpoint": checkpoint, "torch.utils.checkpoint": torch_checkpoint}


@pytest.mark.pairwise
@DEVICE
@DELAY
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("hooks", HOOKS)
@EVERY_MODEL
def test_hooks_that_swap_what_is_saved_change_no_bit(
    model: str, hooks: str, recipe: str | None, delay: bool, device: str
) -> None:
    def run(hooks: AbstractContextManager[Any]) -> list[Tensor]:
        with autocast(recipe):
            sequential = make(model, device=device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
            return gradients_of(sequential, delay, hooks)

    assert_same_bits(run(HOOKS[hooks]()), run(nullcontext()))


@pytest.mark.pairwise
@DEVICE
@DELAY
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("kind", CHECKPOINTS)
@EVERY_MODEL
def test_checkpointing_changes_no_bit(
    model: str, kind: str, use_reentrant: bool, recipe: str | None, delay: bool, device: str
) -> None:
    def run(checkpoint: Callable[..., Tensor] | None) -> list[Tensor]:
        with autocast(recipe):
            sequential = make(model, device=device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
            return gradients_of(sequential, delay, nullcontext(), checkpoint)

    def checkpointed(*args: Any) -> Tensor:
        return CHECKPOINTS[kind](*args, use_reentrant=use_reentrant)

    assert_same_bits(run(checkpointed), run(None))


@pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])
@EVERY_MODEL
def test_no_weight_is_saved(model: str, main_grad: bool) -> None:
    """So hooks that offload copy no weight. What is saved is x, what an activation needs, and the split sizes."""
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    sequential = make(model, accumulate_into_main_grad=main_grad)
    with saved_tensors_hooks(pack, lambda t: t):
        forward(sequential)
    addresses = {weight.untyped_storage().data_ptr() for weight in sequential.parameters()}
    assert not any(tensor.untyped_storage().data_ptr() in addresses for tensor in saved)
    hidden = {"linear and relu": OUT, "experts": 2 * OUT, "experts, per group": 2 * OUT}.get(model, 0)
    floats = sum(tensor.nbytes for tensor in saved if tensor.is_floating_point())
    assert floats == ROWS * (IN + hidden) * 4
    assert sum(tensor.nbytes for tensor in saved) - floats <= 2 * (len(SIZES) + 1) * 8


# Changes between the passes


@DEVICE
@DELAY
@FEW
def test_a_step_after_the_parameters_were_replaced_uses_the_new_ones(model: str, delay: bool, device: str) -> None:
    sequential = make(model, device=device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    old = list(weights_of(sequential).values())
    gradients_of(sequential, delay, nullcontext())
    before = [weight.main_grad.clone() for weight in old]
    for name, weight in weights_of(sequential).items():
        module, _, own_name = name.rpartition(".")
        setattr(sequential.get_submodule(module), own_name, nn.Parameter(2 * weight.detach()))
    doubled = make(model, device=device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    with torch.no_grad():
        for weight in weights_of(doubled).values():
            weight *= 2
    assert_same_bits(gradients_of(sequential, delay, nullcontext()), gradients_of(doubled, delay, nullcontext()))
    assert_same_bits([weight.main_grad for weight in old], before)


def test_a_parameter_that_came_back_can_be_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    linear = ops.Linear(4, 4)
    first, second = linear.weight, nn.Parameter(torch.ones(4, 4))
    for weight in (second, first):
        linear.weight = weight
    assert linear.has_held(second) and not linear.has_held(first)
    with monkeypatch.context() as patch:
        patch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
        linear.bfloat16()
    assert linear.weight is first and first.dtype == torch.bfloat16


@DEVICE
@EVERY_MODEL
def test_a_module_may_be_deleted_before_backward(model: str, device: str) -> None:
    expected = gradients_of(make(model, device=device, accumulate_into_main_grad=True), False, nullcontext())
    sequential = make(model, device=device, accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.5)
    weights = list(weights_of(sequential).values())
    y = forward(sequential)
    del sequential
    gc.collect()
    y.backward(torch.linspace(-1, 1, y.numel(), device=device).view_as(y))
    assert_same_bits([weight.main_grad for weight in weights], expected)


@DEVICE
@DELAY
@pytest.mark.parametrize("change", ["in place", "data", "replaced"])
@FEW
def test_a_change_between_forward_and_backward_is_detected_before_anything_lands(
    model: str, change: str, delay: bool, device: str
) -> None:
    sequential = make(model, device=device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    give_main_grads(sequential, 0.5)
    y = forward(sequential)
    name, weight = list(weights_of(sequential).items())[-1]
    module, _, own_name = name.rpartition(".")
    if change == "in place":
        with torch.no_grad():
            weight.mul_(2)
    elif change == "data":
        weight.data = 2 * weight.data
    else:
        setattr(sequential.get_submodule(module), own_name, nn.Parameter(weight.detach().clone()))
    sentence = {"in place": "was changed in place", "data": "got other data", "replaced": "was replaced"}[change]
    with pytest.raises(RuntimeError, match=rf"In operation .*: Parameter '{own_name}' {sentence}"):
        y.sum().backward()
    assert (weight.main_grad == 0.5).all() and not weight.grad_added_to_main_grad
    assert not sequential.need_backward_dw()


@DEVICE
@pytest.mark.parametrize("switch", ["accumulate_into_main_grad", "delay_wgrad_compute"])
@pytest.mark.parametrize("model", ["linear", "grouped"])
def test_a_weight_computed_from_others_is_refused(model: str, switch: str, device: str) -> None:
    sequential = make(model, device=device, **{switch: True})
    leaf = sequential[0].weight
    sequential[0]._parameters["weight"] = leaf * 1
    with pytest.raises(RuntimeError, match=r"Weight 'weight' was computed from other tensors \(MulBackward0\)"):
        backward(sequential)
    plain = make(model, device=device)
    leaf = plain[0].weight
    plain[0]._parameters["weight"] = leaf * 1
    backward(plain)
    assert torch.equal(leaf.grad, gradients(make(model, device=device), 1)["0.weight"])


@DEVICE
@DELAY
@FEW
def test_a_second_backward_is_an_error_that_adds_nothing_or_adds_once_more_if_it_is_allowed(
    model: str, delay: bool, device: str
) -> None:
    sequential = make(model, device=device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    give_main_grads(sequential, 0.0)
    y = forward(sequential)
    y.sum().backward()
    if delay:
        sequential.backward_dw()
    weights = list(weights_of(sequential).values())
    once = [weight.main_grad.clone() for weight in weights]
    with pytest.raises(RuntimeError, match="Give the first one retain_graph=True"):
        y.sum().backward()
    assert not sequential.need_backward_dw()
    assert_same_bits([weight.main_grad for weight in weights], once)

    give_main_grads(sequential, 0.0)
    y = forward(sequential)
    for _ in range(2):
        y.sum().backward(retain_graph=True)
        if delay:
            sequential.backward_dw()
    assert_same_bits([weight.main_grad for weight in weights], [2 * gradient for gradient in once])


# FSDP2


class Block(nn.Module):
    """Pipelines inside a module that is sharded: the operations do not see it."""

    def __init__(self) -> None:
        super().__init__()
        self.pipeline = Sequential(ops.Linear(IN, IN), ops.SiLU(), ops.Linear(IN, IN))
        self.last = nn.Linear(IN, IN)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.pipeline(x))


def train(model: nn.Module) -> list[Tensor]:
    """Outputs of steps under a recipe that keeps quantized weights."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    outputs = []
    for _ in range(3):
        optimizer.zero_grad()
        with autocast("mxfp8"):
            y = model(torch.linspace(-1, 1, 8 * IN, device=next(model.parameters()).device).view(8, IN))
        y.square().mean().backward()
        optimizer.step()
        outputs.append(y.detach())
    return outputs


def train_sharded(rank: int, device: str) -> None:
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    expected = gradients(make("experts", device=device), 1)
    for hooks in (nullcontext, save_on_cpu):
        sequential = make("experts", device=device)
        for operation in sequential:
            fully_shard(operation, mesh=mesh, reshard_after_forward=True)
        fully_shard(sequential, mesh=mesh, reshard_after_forward=True)
        with hooks():
            backward(sequential, 1)
        for name, parameter in weights_of(sequential).items():
            assert torch.equal(parameter.grad.full_tensor(), expected[name])
    for reshard in (False, True):
        torch.manual_seed(0)
        plain = nn.Sequential(Block(), Block()).to(device)
        sharded = copy.deepcopy(plain)
        for block in sharded:
            fully_shard(block, mesh=mesh, reshard_after_forward=reshard)
        assert_same_bits(train(sharded), train(plain))
    sequential = make("linear", device=device, delay_wgrad_compute=True)
    fully_shard(sequential, mesh=mesh)
    backward(sequential)
    with pytest.raises(RuntimeError, match="Weight 'weight' was replaced, or sharded by FSDP2, since the backward"):
        sequential.backward_dw()


@pytest.mark.slow
@DEVICE
def test_fsdp2_may_reshard_after_forward_but_leaves_nothing_to_add_a_gradient_to(device: str, tmp_path: Path) -> None:
    backend, ranks = ("gloo", 2) if device == "cpu" else ("nccl", min(2, torch.cuda.device_count()))
    on_ranks(train_sharded, device, folder=tmp_path, ranks=ranks, backend=backend)
