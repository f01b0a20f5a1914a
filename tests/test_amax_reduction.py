"""Delayed scaling over two gloo ranks: one maximum for all, also with a rank that has no rows."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist

from fuser import autocast, ops
from recipes import DelayedScaling
from tests.ranks import on_ranks

RANKS = 2
AMAX = [7.0, 3.5]


def scales(op: torch.nn.Module, role: str) -> list[float]:
    return op.get_buffer(f"quantizer_{role}_scale").tolist()


def reduce_amaxes(rank: int) -> None:
    alone = [dist.new_group([r]) for r in range(RANKS)][rank]
    cases = [
        (DelayedScaling(), None, [64.0, 64.0]),
        (DelayedScaling(reduce_amax=False), None, [64.0, 128.0]),
        (DelayedScaling(), alone, [64.0, 128.0]),
    ]
    for recipe, group, expected in cases:
        op = ops.Linear(4, 4, bias=False)
        x = torch.full((2, 4), AMAX[rank]).requires_grad_()
        with autocast(recipe, amax_reduction_group=group):
            y = op(x)
        y.backward(torch.full((2, 4), AMAX[rank]))
        assert scales(op, "input") == [expected[rank]]
        assert scales(op, "grad_output") == [57344 / 448 * expected[rank]]
    # rank 1 has no rows at all: it takes part, and learns of rank 0's amaxes
    experts = ops.GroupedLinear(2, 4, 4)
    x = torch.full((3 if rank == 0 else 0, 4), 7.0).requires_grad_()
    with autocast(DelayedScaling()):
        y = experts(x, split_sizes=[3, 0] if rank == 0 else [0, 0])
    y.sum().backward()
    assert scales(experts, "input") == [64.0, 1.0]


def test_amaxes_are_reduced_over_the_group(tmp_path: Path) -> None:
    on_ranks(reduce_amaxes, folder=tmp_path, ranks=RANKS)
