"""Collectives as operations, and layers that ranks divide, over gloo ranks: against the undivided layer."""
# T rows, H features, F inner features, n ranks

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from fuser import Sequential, ops
from fuser.graph import make_graphed_callables
from tests.ranks import on_ranks
from tests.reference import assert_same_bits

# Relative to the largest magnitude. Beside the order of summation, bf16 and fp16 round each rank's part of a sum, then
# the sum of every two: with 4 ranks three times what the whole layer rounds.
SUMMED = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5}
DTYPES = tuple(SUMMED)
RANKS = [2, pytest.param(4, marks=[pytest.mark.rest, pytest.mark.slow])]


@contextmanager
def quietly() -> Iterator[None]:
    """As the fixtures of the tests' own process: one thread, and uninitialised memory is NaN."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield


def sentence(run: Callable[[], object], kind: type[Exception]) -> str:
    with pytest.raises(kind) as raised:
        run()
    return str(raised.value)


def drawn(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The same on every rank."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


# ------------------------------------------------------------------------------------------------------- collectives


def run_collectives(rank: int, ranks: int) -> None:
    """Small integers, whose sums are exact in every dtype: the bits of the formulas."""
    with quietly():
        group = init_device_mesh("cpu", (ranks,), mesh_dim_names=("tp",))["tp"]
        generator = torch.Generator().manual_seed(0)
        for dtype in DTYPES:
            for shape in ((2 * ranks, 3), (0, 4), (ranks,), (ranks, 2, 5)):
                rows = shape[0]
                xs = [torch.randint(-4, 5, shape, generator=generator).to(dtype) for _ in range(ranks)]
                wide = (rows * ranks, *shape[1:])
                more = [torch.randint(-4, 5, wide, generator=generator).to(dtype) for _ in range(ranks)]
                zeros = torch.zeros_like(xs[0])

                def of_rank(whole: Tensor) -> Tensor:
                    return whole.chunk(ranks)[rank] if len(whole) else whole

                cases: list[tuple[Any, list[Tensor], list[Tensor], Tensor, Tensor]] = [
                    (ops.AllGather(group), xs, more, torch.cat(xs), of_rank(sum(more))),
                    (ops.ReduceScatter(group), more, xs, of_rank(sum(more)), torch.cat(xs)),
                    (ops.AllReduce(group), xs, xs[::-1], sum(xs), xs[::-1][rank]),
                ]
                for src in (0, ranks - 1):
                    dx = sum(xs) if rank == src else zeros
                    cases.append((ops.Broadcast(src, group), xs[::-1], xs, xs[::-1][src], dx))
                for operation, given, dys, y_wanted, dx_wanted in cases:
                    x = given[rank].clone().requires_grad_()
                    y = operation(x)
                    y.backward(dys[rank])
                    assert_same_bits({"y": y, "dx": x.grad}, {"y": y_wanted, "dx": dx_wanted})
                    assert torch.equal(x, given[rank]), "x stays as it is"
                    # in a pipeline, of columns of something wider, without gradients
                    layer = Sequential(ops.Identity(), operation, ops.ConstantScale(2.0))
                    strided = given[rank].repeat_interleave(2, -1)[..., ::2]
                    assert torch.equal(layer(strided), 2 * y_wanted)


@pytest.mark.parametrize("ranks", RANKS)
def test_collectives_and_their_gradients(ranks: int, tmp_path: Path) -> None:
    on_ranks(run_collectives, ranks, folder=tmp_path, ranks=ranks)


def refuse_collectives(rank: int) -> None:
    with quietly():
        group = dist.group.WORLD
        scatter = ops.ReduceScatter(group)
        x = drawn(0, 4, 3)
        assert sentence(lambda: scatter(x[:3]), ValueError).endswith(
            "x has 3 rows, but the 2 ranks of the group must divide them. Pad x to a multiple of 2 rows."
        )
        for kind in (ops.AllGather, ops.ReduceScatter):
            assert "x has no dimension, but rows are needed" in sentence(lambda k=kind: k(group)(x[0, 0]), ValueError)
        assert "src is 2, but the group has the ranks 0 to 1" in sentence(lambda: ops.Broadcast(2, group), ValueError)
        assert "src is 1.5, but must be an integer" in sentence(lambda: ops.Broadcast(1.5, group), TypeError)

        # ranks that differ get one sentence, and can go on
        for mine in (x[: 2 + rank], x.to((torch.float32, torch.float64)[rank]), x.clone().requires_grad_(rank == 0)):
            said = sentence(lambda mine=mine: ops.AllGather(group)(mine), RuntimeError)
            assert "The ranks of one process group differ in what they exchange: rank 0: AllGather of [" in said
            told: list[str] = ["", ""]
            dist.all_gather_object(told, said)
            assert told[0] == told[1]
        said = sentence(lambda: scatter(x[: 3 + rank]), RuntimeError if rank else ValueError)
        assert "x has 3 rows, but the 2 ranks of the group must divide them" in said
        assert torch.equal(ops.AllReduce(group)(x), 2 * x)

        # groups
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
        assert 'but ranks meet along one. Name it: mesh["tp"].' in sentence(lambda: ops.AllReduce(mesh), ValueError)
        first = dist.new_group([0])
        if rank == 1:
            assert "group does not contain this process" in sentence(lambda: ops.AllReduce(first), ValueError)
        assert "group is 'tp', but must be a torch.distributed ProcessGroup, or a DeviceMesh" in sentence(
            lambda: ops.AllReduce("tp"), TypeError
        )
        operation = ops.Broadcast(1, mesh["tp"])
        assert copy.deepcopy(operation).group == operation.group
        assert repr(operation) == "Broadcast(src=1, group=<ranks 0, 1>)"
        assert "A process group cannot be written down" in sentence(lambda: pickle.dumps(operation), TypeError)

        # explained, not repeated; captured with NCCL alone
        layer = Sequential(ops.Bias(3), operation)
        lines = layer.explain(device="cuda").splitlines()
        assert any(
            line.endswith("Broadcast  [broadcast, backward reduce, over 2 ranks (gloo), rank 1]") for line in lines
        )
        assert sum("not repeated: A collective is issued by its process group" in line for line in lines) > 0
        said = sentence(lambda: make_graphed_callables(layer, (x,)), NotImplementedError)
        assert "Operation 1 (Broadcast) cannot be captured: Its group has gloo for " in said
        assert "whose collectives run on the host, where a graph stops; NCCL's can be captured." in said


def test_collectives_refuse_what_they_cannot_exchange(tmp_path: Path) -> None:
    on_ranks(refuse_collectives, folder=tmp_path)
