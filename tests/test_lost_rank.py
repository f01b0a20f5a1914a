"""A rank that is lost in the middle of a step: the others raise an error, and a checkpoint goes on."""

from __future__ import annotations

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from fuser import Sequential, ops
from fuser.distributed import Overlapped, TrainingState, expert_parameters

H, F, E, T = 16, 32, 4, 12
TIMEOUT = 20.0  # seconds of the process group
LOST_IN = 2  # the step


class Loses(nn.Module):
    """The identity between the transfers, where one rank is lost in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.lose: Any = None

    def forward(self, x: Tensor) -> Tensor:
        if self.lose is not None:
            way, where = self.lose
            if where == "forward":
                _lose(way)
            x = x.clone()
            x.register_hook(lambda _: _lose(way))
        return x


def _lose(way: str) -> None:
    if way == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    raise ValueError("this rank fails")


def layer_of(group: Any, kind: type[Sequential] = Sequential) -> Sequential:
    torch.manual_seed(0)
    own = E if group is None else E // dist.get_world_size(group)
    return kind(
        ops.Router(H, E, topk=2),
        ops.Dispatch(E, group=group),
        ops.GroupedLinear(own, H, 2 * F, bias=False),
        Loses(),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(own, F, H, bias=False),
        ops.Combine(group=group),
    )


def step(layer: Sequential, optimizer: torch.optim.Optimizer, number: int, rank: int = 0, ranks: int = 1) -> float:
    x = torch.randn(T, H, generator=torch.Generator().manual_seed(number)).chunk(ranks)[rank]
    optimizer.zero_grad()
    loss = (layer(x) - x).square().sum() / T
    loss.backward()
    total = loss.detach().clone()
    if ranks > 1:
        experts = expert_parameters(layer)
        for name, parameter in layer.named_parameters():
            if name not in experts:
                dist.all_reduce(parameter.grad)
        dist.all_reduce(total)
    optimizer.step()
    return total.item()


def train_until_a_rank_is_lost(
    rank: int, folder: Path, kind: type[Sequential], way: str, where: str, rendezvous: str
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=2, timeout=timedelta(seconds=TIMEOUT))
    layer = layer_of(dist.group.WORLD, kind)
    TrainingState(layer).load_state_dict(TrainingState(layer_of(None)).whole_state_dict())
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for number in range(LOST_IN):
        step(layer, optimizer, number, rank, 2)
    dcp.save({"training": TrainingState(layer, optimizer)}, checkpoint_id=folder / "checkpoint")
    if rank == 1:
        layer[3].lose = (way, where)
        try:
            step(layer, optimizer, LOST_IN, rank, 2)
        except ValueError:
            os._exit(1)  # without the interpreter's end, as in tests/ranks.py
    began = time.monotonic()
    try:
        step(layer, optimizer, LOST_IN, rank, 2)
        said = "nothing"
    except RuntimeError as error:
        said = str(error)
    (folder / "said").write_text(json.dumps([said, time.monotonic() - began]))
    os._exit(0)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
@pytest.mark.parametrize(
    ("kind", "way", "where"),
    [
        pytest.param(Sequential, "killed", "forward", id="killed in forward"),
        pytest.param(Sequential, "killed", "backward", id="killed in backward", marks=pytest.mark.rest),
        pytest.param(Sequential, "raises", "forward", id="raises in forward", marks=pytest.mark.rest),
        pytest.param(Sequential, "raises", "backward", id="raises in backward", marks=pytest.mark.rest),
        pytest.param(Overlapped, "killed", "forward", id="overlapped, killed in forward", marks=pytest.mark.rest),
        pytest.param(Overlapped, "killed", "backward", id="overlapped, killed in backward", marks=pytest.mark.rest),
    ],
)
@pytest.mark.slow
def test_the_others_raise_at_once_and_the_checkpoint_goes_on(
    kind: type[Sequential], way: str, where: str, tmp_path: Path
) -> None:
    context = torch.multiprocessing.get_context("spawn")
    arguments = (tmp_path, kind, way, where, f"file://{tmp_path / 'rendezvous'}")
    processes = [context.Process(target=train_until_a_rank_is_lost, args=(rank, *arguments)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60 + 2 * TIMEOUT)
        if process.exitcode is None:
            process.kill()
    assert [process.exitcode for process in processes] == [0, -signal.SIGKILL if way == "killed" else 1]
    said, seconds = json.loads((tmp_path / "said").read_text())
    assert "onnection" in said, said
    assert seconds < TIMEOUT, "the end of a process is noticed, not awaited"

    # on one rank, as if nothing had happened
    never_lost, resumed = (layer_of(None) for _ in range(2))
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9) for layer in (never_lost, resumed)]
    for number in range(LOST_IN):
        step(never_lost, optimizers[0], number)
    dcp.load({"training": TrainingState(resumed, optimizers[1])}, checkpoint_id=tmp_path / "checkpoint", no_dist=True)
    for number in range(LOST_IN, LOST_IN + 3):
        expected, found = (step(*each, number) for each in zip((never_lost, resumed), optimizers, strict=True))
        assert found == pytest.approx(expected, rel=1e-5)
