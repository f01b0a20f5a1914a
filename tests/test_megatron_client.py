"""A data-parallel wrapper like Megatron-LM's over two gloo ranks: its gradients are plain autograd's.

Eager and captured; on a CPU a replay runs the modules again, under the rules and with the side effects of a graph's.
Bit by bit there; on a GPU, which both ranks share, main_grad's products are sums of another order than autograd's.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from fuser import Sequential, ops
from fuser.graph import make_graphed_callables
from tests.check_operation import DEVICES
from tests.ranks import on_ranks

RANKS = 2
MICROBATCHES = 3
ROWS, FEATURES, GROUPS = 12, 32, 4
SIZES = [[[5, 0, 4, 3], [0, 0, 12, 0], [3, 3, 3, 1]], [[12, 0, 0, 0], [0, 0, 0, 0], [1, 2, 3, 4]]]  # rank, microbatch


def model(device: str, **switches: Any) -> Sequential:
    torch.manual_seed(0)
    sequential = Sequential(
        ops.Linear(FEATURES, FEATURES, **switches),
        ops.RMSNorm(FEATURES),
        ops.GroupedLinear(GROUPS, FEATURES, 2 * FEATURES, **switches),
        ops.SwiGLU(),
        ops.GroupedLinear(GROUPS, FEATURES, FEATURES, stacked=False, bias=False, **switches),
        nn.Dropout(0.0),
        ops.Linear(FEATURES, 8, **switches),
    )
    return sequential.to(device)


def batch(rank: int, microbatch: int, device: Any) -> tuple[Tensor, Tensor, torch.Generator]:
    generator = torch.Generator().manual_seed(10 * rank + microbatch)
    x = torch.randn(ROWS, FEATURES, generator=generator).to(device).requires_grad_()
    return x, torch.tensor(SIZES[rank][microbatch], device=device), generator


def backward(call: Any, rank: int, microbatch: int, device: Any) -> None:
    x, split_sizes, generator = batch(rank, microbatch, device)
    y = call(x, split_sizes=split_sizes)
    y.backward(torch.randn(y.shape, generator=generator).to(device))


def captured(sequential: Sequential, *, delay: bool) -> tuple[Any, ...]:
    """A callable for each microbatch, in the order of `train_step`."""
    x, split_sizes, _ = batch(0, 0, next(sequential.parameters()).device)
    return make_graphed_callables(
        [sequential], [(x,)], sample_kwargs=[{"split_sizes": split_sizes}],
        schedule="F1 B1 F1 B1 W1 W1 F1 B1 W1" if delay else "F1 B1 F1 B1 F1 B1",
    )  # fmt: skip


class Bucket:
    """Neighbouring parameters whose gradients share a flat float32 buffer, and are reduced together."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.buffer = torch.zeros(sum(p.numel() for p in parameters), device=parameters[0].device)
        self.waiting = set(parameters)
        self.reduction: Any = None
        for parameter, part in zip(parameters, self.buffer.split([p.numel() for p in parameters]), strict=True):
            parameter.main_grad = part.view(parameter.shape)

    def is_ready(self, parameter: Any) -> bool:
        """Start the reduction when this was the last of its parameters. Returns whether it was."""
        self.waiting.remove(parameter)
        if not self.waiting:
            self.reduction = dist.all_reduce(self.buffer, async_op=True)
        return not self.waiting

    def finish(self) -> None:
        self.reduction.wait()
        self.buffer /= RANKS
        self.waiting = set(self.parameters)


class DataParallel:
    """Owns the gradient buffers. Hooks sit on AccumulateGrad, or on wgrad for weights that are marked as delayed.

    sharded: as Megatron-FSDP, which takes the buffers away: the first gradient of a weight overwrites what is there.
    """

    def __init__(self, module: nn.Module, *, sharded: bool) -> None:
        self.names = {parameter: name for name, parameter in module.named_parameters()}
        self.is_last_microbatch = False
        self.events: list[str] = []
        self.threads: set[int] = set()  # in which autograd called a hook
        self.accumulators = []
        parameters = list(self.names)[::-1]
        self.buckets = [Bucket(parameters[i : i + 3]) for i in range(0, len(parameters), 3)]
        self.bucket_of = {parameter: bucket for bucket in self.buckets for parameter in bucket.parameters}
        weights = [
            p for p, name in self.names.items() if ".weight" in name and isinstance(owner(module, name), WEIGHTED)
        ]
        self.sharded = weights if sharded else []
        for parameter in self.sharded:
            parameter.overwrite_main_grad = True
        for parameter, name in self.names.items():
            parameter.grad_added_to_main_grad = False
            hook = partial(self.take, parameter)
            if getattr(parameter, "skip_backward_post_hook", False):
                owner(module, name).register_wgrad_accumulation_and_reduce_hooks(hook)
            else:
                accumulate = parameter.expand_as(parameter).grad_fn.next_functions[0][0]
                accumulate.register_hook(partial(self.take_in_backward, parameter))
                self.accumulators.append(accumulate)  # a node that nobody holds forgets its hooks

    def zero_grad_buffer(self) -> None:
        for bucket in self.buckets:
            bucket.buffer.zero_()
        for parameter in self.sharded:
            parameter.main_grad.fill_(torch.nan)
        for parameter in self.names:
            parameter.grad_added_to_main_grad = False

    def take_in_backward(self, parameter: Any, *_: Any) -> None:
        self.threads.add(threading.get_ident())
        self.take(parameter)

    def take(self, parameter: Any) -> None:
        """What Megatron's hook does when the gradient of a parameter is there."""
        if self.is_last_microbatch:
            assert parameter.grad is not None, "a gradient has to pass, so that hooks run in order"
        if parameter.grad is not None and not parameter.grad_added_to_main_grad:
            parameter.main_grad.add_(parameter.grad)
        parameter.grad = None
        self.events.append(self.names[parameter])
        if self.is_last_microbatch and self.bucket_of[parameter].is_ready(parameter):
            self.events.append("reduce")

    def finish_grad_sync(self) -> None:
        for bucket in self.buckets:
            bucket.finish()


WEIGHTED = ops.Linear | ops.GroupedLinear


def owner(module: nn.Module, name: str) -> Any:
    return module.get_submodule(name.rpartition(".")[0])


def plain_gradients(rank: int, device: str) -> dict[str, Tensor]:
    sequential = model(device)
    for microbatch in range(MICROBATCHES):
        backward(sequential, rank, microbatch, device)
    gradients = {}
    for name, parameter in sequential.named_parameters():
        assert parameter.grad is not None
        dist.all_reduce(parameter.grad)
        gradients[name] = parameter.grad / RANKS
    return gradients


def train_step(calls: tuple[Any, ...], wrapper: DataParallel, rank: int, device: str, *, delay: bool) -> None:
    """All microbatches; delayed, those before the last leave several weight gradients at a time."""
    wrapper.zero_grad_buffer()
    wrapper.events.clear()
    wrapper.threads.clear()
    wrapper.is_last_microbatch = False
    for microbatch in range(MICROBATCHES - 1):
        backward(calls[microbatch], rank, microbatch, device)
    for call in calls[:-1] if delay else ():
        call.backward_dw()
    wrapper.is_last_microbatch = True
    backward(calls[-1], rank, MICROBATCHES - 1, device)
    if delay:
        calls[-1].backward_dw()
    wrapper.finish_grad_sync()


@contextmanager
def on_a_side_stream(device: str) -> Iterator[None]:
    """As Megatron makes its wrapper: nodes of autograd that it holds are not on the default stream, and so captured."""
    if device == "cpu":
        yield
        return
    with torch.cuda.stream(torch.cuda.Stream()):
        yield
    torch.cuda.synchronize()


def assert_same(name: str, actual: Tensor, expected: Tensor) -> None:
    if expected.is_cuda:
        torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * (1 + expected.abs().max().item()), msg=name)
    else:
        assert torch.equal(actual, expected), name


def compare(rank: int, delay: bool, graphs: bool, device: str) -> None:
    expected = plain_gradients(rank, device)
    for sharded in (False, True):
        sequential = model(device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
        with on_a_side_stream(device):
            wrapper = DataParallel(sequential, sharded=sharded)
        calls = captured(sequential, delay=delay) if graphs else (sequential,) * MICROBATCHES
        assert wrapper.events == []
        for _ in range(2):  # the second step finds the buffers and flags of the first
            train_step(calls, wrapper, rank, device, delay=delay)
            for name, parameter in sequential.named_parameters():
                assert_same(f"{name}, sharded={sharded}", parameter.main_grad, expected[name])
                assert parameter.grad is None
            assert len(wrapper.threads) == 1
            orders: list[Any] = [None] * RANKS
            dist.all_gather_object(orders, wrapper.events)
            assert orders[0] == orders[1]
            events = [event for event in wrapper.events if event != "reduce"]
            assert len(events) == MICROBATCHES * len(expected)
            assert wrapper.events.index("reduce") < len(events) - 1  # it overlaps with what is still computed


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("graphs", [False, True], ids=["eager", "captured"])
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
def test_gradients_are_those_of_plain_autograd_and_hooks_run_in_one_order_on_one_thread(
    delay: bool, graphs: bool, device: str, tmp_path: Path
) -> None:
    on_ranks(compare, delay, graphs, device, folder=tmp_path, ranks=RANKS)
