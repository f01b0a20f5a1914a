"""Operations inside of torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fuser import Sequential, autocast, checkpoint, lora, ops, prepare
from fuser.graph import make_graphed_callables
from recipes import DelayedScaling
from tests.ranks import on_ranks
from tests.reference import assert_close, assert_same_bits

SWITCHES = pytest.mark.parametrize(
    "switches",
    [
        {"delay_wgrad_compute": True},
        {"accumulate_into_main_grad": True},
        {"accumulate_into_main_grad": True, "delay_wgrad_compute": True},
    ],
    ids=["delayed", "main_grad", "both"],
)
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def group_of_one() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def build(**switches: bool) -> Sequential:
    torch.manual_seed(0)
    return Sequential(ops.Linear(8, 8), ops.ReLU(), ops.Linear(8, 8, **switches))


def ignoring(model: nn.Module, *names: str) -> DistributedDataParallel:
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(names))
    return DistributedDataParallel(model)


# ------------------------------------------------------------------------- weight gradients that it does not reduce


@SWITCHES
def test_weight_gradients_that_go_past_it_are_refused(switches: dict[str, bool], group_of_one: None) -> None:
    wrapped = DistributedDataParallel(build(**switches))
    words = rf"operation 2 \(Linear\): Distributed.* with {' and '.join(switches)} the operation itself .*'weight'"
    refused = pytest.raises(RuntimeError, match=words)
    for _ in range(2):
        with refused:
            wrapped(X)
    with wrapped.no_sync(), refused:  # the next backward that reduces would not have it
        wrapped(X)
    for use_reentrant in (True, False):
        with refused:
            torch_checkpoint(wrapped, X.clone().requires_grad_(), use_reentrant=use_reentrant)
    with refused:
        checkpoint(wrapped, X.clone().requires_grad_())
    with refused:
        torch.compile(wrapped, backend="eager")(X)
    with refused:
        Sequential(wrapped)(X)


def test_what_needs_no_reduction_is_not_refused(group_of_one: None) -> None:
    model = build(delay_wgrad_compute=True)
    wrapped = DistributedDataParallel(model)
    with torch.no_grad():
        wrapped.eval()(X)
    wrapped.train().module(X).sum().backward()  # the caller's own affair, as with any module of torch's
    model.backward_dw()

    outside = ops.Linear(8, 8, delay_wgrad_compute=True)  # a wrapper knows nothing of what it does not hold
    calls: list[Callable[..., torch.Tensor]] = [outside]

    class Calls(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return calls[0](super().forward(input))

    DistributedDataParallel(Calls(8, 8))(X).sum().backward()
    outside.backward_dw()

    frozen = build(delay_wgrad_compute=True)
    frozen[2].weight.requires_grad_(False)
    wrapped = DistributedDataParallel(frozen)
    wrapped(X).sum().backward()
    frozen[2].weight.requires_grad_(True)
    with pytest.raises(RuntimeError, match="DistributedDataParallel reduces"):
        wrapped(X)

    adapted = build(delay_wgrad_compute=True)
    lora.add(adapted, rank=2, targets="all-linear")  # autograd has the gradients of adapters
    DistributedDataParallel(adapted)(X).sum().backward()


def test_a_switch_that_is_set_later_is_seen(group_of_one: None) -> None:
    model = build()
    wrapped = DistributedDataParallel(model)
    wrapped(X).sum().backward()
    model[2].delay_wgrad_compute = True
    with pytest.raises(RuntimeError, match="DistributedDataParallel reduces"):
        wrapped(X)


def test_each_wrapper_is_looked_at(group_of_one: None) -> None:
    model = build(delay_wgrad_compute=True)
    first = ignoring(model, "2.weight")
    first(X).sum().backward()
    del model._ddp_params_and_buffers_to_ignore
    with pytest.raises(RuntimeError, match="DistributedDataParallel reduces"):
        DistributedDataParallel(model)(X)
    first(X).sum().backward()


def test_a_weight_that_is_tied_is_reduced_where_one_name_of_it_is(group_of_one: None) -> None:
    model = nn.Sequential(nn.Linear(8, 8), build(delay_wgrad_compute=True))
    model[1][2].weight = model[0].weight
    with pytest.raises(RuntimeError, match="DistributedDataParallel reduces"):
        ignoring(model, "1.2.weight")(X)


def test_replays_are_refused_too(group_of_one: None) -> None:
    model = build(delay_wgrad_compute=True)

    class Replays(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model
            self.graphed = make_graphed_callables(model, (X,))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.graphed(x)

    module = Replays()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"Sequential \(chunk 1, .*: DistributedDataParallel reduces"):
            DistributedDataParallel(module)(X)
    wrapped = ignoring(module, "model.2.weight")
    for _ in range(2):
        wrapped(X).sum().backward()
        module.graphed.backward_dw()


def reduce_what_is_ignored(rank: int) -> None:
    model, plain = build(accumulate_into_main_grad=True, delay_wgrad_compute=True), build()
    wrapped = ignoring(model, "2.weight")
    weight = model[2].weight
    weight.main_grad = torch.zeros_like(weight)
    for seed in range(2):
        batches = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(seed))
        wrapped(batches[rank]).square().sum().backward()
        model.backward_dw()
        plain(batches.flatten(0, 1)).square().sum().div(2).backward()
    dist.all_reduce(weight.main_grad)
    found = {name: parameter.grad for name, parameter in model.named_parameters()} | {"2.weight": weight.main_grad / 2}
    assert_close(found, {name: parameter.grad for name, parameter in plain.named_parameters()})


def test_an_ignored_weight_is_left_to_the_caller(tmp_path: Path) -> None:
    on_ranks(reduce_what_is_ignored, folder=tmp_path)


# ---------------------------------------------------------------------------------- the state of delayed scaling


class Net(nn.Module):
    """A normalisation of torch's, whose buffers have to be broadcast, and operations behind it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.norm = nn.BatchNorm1d(8, affine=False)
        self.layers = nn.ModuleList([Sequential(ops.Linear(8, 8)), ops.Linear(8, 8)])
        self.replays: list[Callable[[torch.Tensor], torch.Tensor]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.norm(x)
        for layer in self.replays or self.layers:
            x = layer(x)
        return x


def prepared(net: Net, recipe: DelayedScaling) -> nn.Module:
    return prepare(net, recipe)


def compiled(net: Net, recipe: DelayedScaling) -> nn.Module:
    torch.compiler.reset()
    for layer in net.layers:
        layer.compile(backend="eager")
    return net


def captured(net: Net, recipe: DelayedScaling) -> nn.Module:
    net.replays = list(make_graphed_callables(list(net.layers), ((X,), (X.clone().requires_grad_(),)), recipe=recipe))
    return net


def lazily(net: Net, recipe: DelayedScaling) -> nn.Module:
    return net


def states_after_training(rank: int, made: Callable[..., nn.Module], recipe: DelayedScaling, broadcast: bool) -> Any:
    net = Net()
    wrapped = DistributedDataParallel(made(net, recipe), broadcast_buffers=broadcast)
    for seed in range(3):
        batches = (1 + 99 * rank) * torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(seed))
        with autocast(recipe):  # one step of two forwards, where outputs are not those of the next replay
            sum(wrapped(x).square().sum() for x in batches[int(made is captured) :]).backward()
        net.zero_grad()
    if broadcast:
        net.replays = []
        wrapped.eval()(X)
        means = [torch.empty(8) for _ in range(2)]
        dist.all_gather(means, net.norm.running_mean)
        assert torch.equal(*means)
    return {name: buffer for name, buffer in net.named_buffers() if "quantizer_" in name}


def train_with_and_without_broadcast(rank: int) -> None:
    for reduce_amax in (True, False):
        recipe = DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", reduce_amax=reduce_amax)
        for made in (lazily, prepared, compiled, captured):
            expected = states_after_training(rank, made, recipe, False)
            assert_same_bits(states_after_training(rank, made, recipe, True), expected)
            scales: list[Any] = [None, None]
            dist.all_gather_object(scales, expected["layers.0.0.quantizer_input_scale"].item())
            assert (scales[0] == scales[1]) is reduce_amax


@pytest.mark.slow
def test_it_leaves_the_state_of_delayed_scaling_alone(tmp_path: Path) -> None:
    on_ranks(train_with_and_without_broadcast, folder=tmp_path)
