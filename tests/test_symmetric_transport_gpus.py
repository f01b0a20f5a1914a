"""transport="symmetric" over two processes: the unsharded layer, captured steps with other routing, overflow.

On one GPU the two take turns, and meet by gloo; on two GPUs by NCCL.
"""

from __future__ import annotations

import copy
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fuser
from fuser import Sequential, autocast, ops
from tests.ranks import on_ranks
from tests.reference import assert_close, assert_same_bits
from tests.test_expert_parallel import Batch, Case, batch, same_everywhere, sentence, step, weight_gradients, whole
from tests.test_symmetric_transport import CLOSE, all_nan, differ_later, overflow, share_of

pytestmark = [pytest.mark.gpu, pytest.mark.slow]


def on_gpu(given: Batch) -> Batch:
    return Batch(*(tensor.cuda() for tensor in given))


def compare(rank: int) -> None:
    for recipe, overlap in product(("bf16", "fp8_block", "mxfp8"), (False, True)):
        for tokens in ((48, 25), (0, 40)):
            case = Case(tokens, 4, 2, torch.bfloat16, features=(128, 64))
            layer = whole(case)
            mine = share_of(layer, case, 100, overlap=overlap).cuda()
            layer = copy.deepcopy(layer).cuda()
            given = on_gpu(batch(case))
            with autocast(recipe):
                of_all = step(layer, given)
                of_rank = step(mine, given.of_rank(case, rank))
            expected = {name: t.split(tokens)[rank] for name, t in of_all.items()}
            expected |= {name: t[2 * rank : 2 * rank + 2] for name, t in weight_gradients(layer).items()}
            assert_close(of_rank | weight_gradients(mine), expected, CLOSE)
    # without products, whose tiles depend on the number of rows: the same bits
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        case = Case((300, 177), 8, 4, dtype, features=(200, 0))
        given = on_gpu(batch(case))
        symmetric = {"group": dist.group.WORLD, "transport": "symmetric"}
        unsharded = Sequential(ops.Dispatch(8), ops.ScaledSwiGLU(), Widen(), ops.Combine())
        mine = Sequential(
            ops.Dispatch(8, capacity=1500, **symmetric), ops.ScaledSwiGLU(), Widen(), ops.Combine(**symmetric)
        )
        expected = {name: t.split(case.tokens)[rank] for name, t in step(unsharded, given).items()}
        assert_same_bits(step(mine, given.of_rank(case, rank)), expected)


class Widen(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((x, 2 * x), 1)


def compare_bits(rank: int) -> None:
    case = Case((48, 25), 4, 2, torch.bfloat16, features=(128, 64))
    layer, given = whole(case), on_gpu(batch(case))
    mine = share_of(layer, case, 100).cuda()
    layer = copy.deepcopy(layer).cuda()
    own = given.of_rank(case, rank)
    with torch.no_grad(), autocast("bf16", batch_invariant=True):
        y = layer(given.x, probs=given.probs, indices=given.indices).split(case.tokens)[rank]
        assert_same_bits({"y": mine(own.x, probs=own.probs, indices=own.indices)}, {"y": y})


def overlap_bits(rank: int) -> None:
    """Read beside a weight gradient that takes longer, again and again: the bits of rows that are read behind it."""
    case = Case((4096, 4000), 16, 8, torch.bfloat16, features=(1024, 1536))
    whole_layer, given = whole(case), on_gpu(batch(case).of_rank(case, rank))
    layers = [share_of(whole_layer, case, 40000, overlap=overlap).cuda() for overlap in (False, True)]
    expected = step(layers[0], given) | weight_gradients(layers[0])
    for _ in range(20):
        layers[1].zero_grad()
        found = step(layers[1], given) | weight_gradients(layers[1])
        torch.empty(2**26, device="cuda").fill_(float("nan"))  # what is freed too early is overwritten
        assert_same_bits(found, expected)


def replay(rank: int, overlap: bool) -> None:
    case = Case((40, 24), 4, 2, torch.bfloat16, features=(128, 64))
    mine = share_of(whole(case), case, 100, overlap=overlap).cuda()
    given = on_gpu(batch(case).of_rank(case, rank))
    x, probs = given.x.clone().requires_grad_(), given.probs.clone().requires_grad_()

    def run() -> tuple[Tensor, ...]:
        y = mine(x, probs=probs, indices=given.indices)
        return (y, *torch.autograd.grad(y, (x, probs, *mine.parameters()), given.dy))

    def eager() -> tuple[Tensor, ...]:
        torch.cuda.synchronize()
        return tuple(t.clone() for t in run())

    graph = torch.cuda.CUDAGraph()
    alone = share_of(whole(case), case, 101 + overlap).cuda()
    with torch.cuda.graph(graph):
        probs.detach() * 2  # a graph without kernels is warned of
        said = sentence(lambda: alone(x, probs=probs, indices=given.indices))
    assert "this layer has not exchanged anything before" in said
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            run()
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        run()
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        captured = run()
    names = ("y", "dx", "dprobs", "dw1", "dw2")
    for seed in range(1, 6):
        for here, there in zip(given, batch(case._replace(seed=seed)).of_rank(case, rank), strict=True):
            here.copy_(there)
        with torch.no_grad():
            x.copy_(given.x)
            probs.copy_(given.probs)
        graph.replay()
        torch.cuda.synchronize()
        replayed = dict(zip(names, [t.clone() for t in captured], strict=True))
        assert_same_bits(replayed, dict(zip(names, eager(), strict=True)))
    fuser.check_overflow()
    given.indices.fill_(3)
    graph.replay()
    torch.cuda.synchronize()
    all_nan(dict(zip(names, captured, strict=True)))
    assert "would have received 128 rows, but capacity is 100" in same_everywhere(sentence(fuser.check_overflow))
    given.indices.copy_(batch(case).of_rank(case, rank).indices)
    graph.replay()
    torch.cuda.synchronize()
    fuser.check_overflow()
    assert captured[0].isfinite().all()


def refuse(rank: int) -> None:
    symmetric = {"group": dist.group.WORLD, "transport": "symmetric"}
    x, probs = torch.randn(3, 8, device="cuda"), torch.rand(3, 2, device="cuda")
    indices = torch.tensor([[0, 3], [1, 2], [3, 0]], device="cuda")
    differing = ops.Dispatch(4, capacity=20 + rank, **symmetric)
    said = same_everywhere(sentence(lambda: differing(x, probs=probs, indices=indices)))
    assert "rank 0: capacity=20, num_experts=4" in said and "rank 1: capacity=21, num_experts=4" in said
    layer = Sequential(ops.Dispatch(4, capacity=20, **symmetric), ops.Combine(**symmetric))
    assert torch.equal(layer(x, probs=probs, indices=indices), 2 * x)
    lines = layer.explain(device="cuda")
    assert "symmetric memory over 2 ranks" in lines and "capacity 20 rows a rank" in lines


def all_on_gpus(rank: int) -> None:
    compare(rank)
    overflow(rank, "cuda")
    overlap_bits(rank)
    for overlap in (False, True):
        replay(rank, overlap)
    refuse(rank)
    differ_later(rank, "cuda")
    compare_bits(rank)
    torch.cuda.synchronize()
    dist.barrier()


@pytest.mark.parametrize("backend", ["gloo", pytest.param("nccl", marks=pytest.mark.gpu2)])
def test_two_processes_compute_the_unsharded_layer(
    backend: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend == "gloo":
        monkeypatch.setenv("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    on_ranks(all_on_gpus, folder=tmp_path, backend=backend)
