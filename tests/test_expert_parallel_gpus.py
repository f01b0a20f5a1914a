"""Dispatch and Combine over two GPUs by NCCL: the unsharded layer, every recipe, and ranks that differ."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from fuser import Sequential, autocast, ops
from tests.ranks import on_ranks
from tests.reference import assert_close
from tests.test_expert_parallel import (
    Batch,
    Case,
    batch,
    same_everywhere,
    sentence,
    share_of,
    step,
    weight_gradients,
    whole,
)

# fp8 and narrower formats have the same codes on both sides, so what differs is the order of sums in bf16.
CLOSE = {torch.bfloat16: 2**-5, torch.float32: 2**-5}


def compare_on_gpus(rank: int, device: str) -> None:
    for recipe in ("bf16", "fp8_current", "fp8_block", "mxfp8"):
        for tokens in ((48, 25), (0, 40)):
            case = Case(tokens, 4, 2, torch.bfloat16, features=(128, 64))
            layer = whole(case)
            mine = share_of(layer, case, dist.group.WORLD).to(device)
            layer = copy.deepcopy(layer).to(device)
            given = Batch(*(tensor.to(device) for tensor in batch(case)))
            with autocast(recipe):
                of_all = step(layer, given)
                of_rank = step(mine, given.of_rank(case, rank))
            own = slice(2 * rank, 2 * rank + 2)
            expected = {name: t.split(case.tokens)[rank] for name, t in of_all.items()}
            expected |= {name: t[own] for name, t in weight_gradients(layer).items()}
            assert_close(of_rank | weight_gradients(mine), expected, CLOSE)


def differ_on_gpus(rank: int, device: str) -> None:
    group = dist.group.WORLD
    x, probs = torch.randn(3, 8, device=device), torch.rand(3, 2, device=device)
    indices = torch.tensor([[0, 3], [1, 2], [3, 0]], device=device)
    alike = ops.Dispatch(4, group=group)
    for what, operation, tokens in (
        ("num_experts=8,", ops.Dispatch(8, group=group), x),
        (" 4 features in torch.float32,", alike, x[:, :4]),
        ("torch.bfloat16,", alike, x.bfloat16()),
    ):
        mine, given = (operation, tokens) if rank else (alike, x)
        said = same_everywhere(sentence(lambda mine=mine, given=given: mine(given, probs=probs, indices=indices)))
        assert "The ranks of one process group differ" in said and what in said.split("rank 1: ")[1]
    y = Sequential(alike, ops.Combine(group=group))(x, probs=probs, indices=indices)
    assert torch.equal(y, 2 * x), "after a refusal the ranks go on"


def all_on_gpus(rank: int, device: str) -> None:
    compare_on_gpus(rank, device)
    differ_on_gpus(rank, device)


@pytest.mark.gpu
@pytest.mark.gpu2
def test_two_gpus_compute_the_unsharded_layer_and_refuse_what_differs(tmp_path: Path) -> None:
    on_ranks(all_on_gpus, "cuda", folder=tmp_path, backend="nccl")
