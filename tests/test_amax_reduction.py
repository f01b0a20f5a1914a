"""Delayed scaling over gloo ranks: one maximum for all that bring the same, one sentence on each rank for others."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fuser import Sequential, autocast, checkpoint, ops
from recipes import DelayedScaling, Recipe
from recipes.amax_reduction import Amaxes, reduce_amaxes
from tests.ranks import on_ranks

RANKS = 2
AMAX = [7.0, 3.5]


def scales(op: torch.nn.Module, role: str) -> list[float]:
    return op.get_buffer(f"quantizer_{role}_scale").tolist()


def reduce_over_groups(rank: int) -> None:
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


@pytest.mark.slow
def test_amaxes_are_reduced_over_the_group(tmp_path: Path) -> None:
    on_ranks(reduce_over_groups, folder=tmp_path, ranks=RANKS)


# ------------------------------------------------------------------------------------- ranks that bring others


def stage(layers: int) -> Sequential:
    return Sequential(*(ops.Linear(4, 4, bias=False) for _ in range(layers)))


def x_of(rank: int) -> torch.Tensor:
    return torch.full((2, 4), AMAX[rank]).requires_grad_()


def forward(model: nn.Module, rank: int) -> None:
    with autocast(DelayedScaling()):
        model(x_of(rank))


def sentence(run: Callable[[], object]) -> str:
    """The RuntimeError that it raises, which is the same on every rank."""
    with pytest.raises(RuntimeError) as raised:
        run()
    everywhere: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everywhere, str(raised.value))
    assert set(everywhere) == {str(raised.value)}
    return everywhere[0]


def assert_said(said: str, what: str) -> None:
    begin = "The ranks of one process group bring different amaxes to their maximum: "
    assert said.startswith(f"{begin}{what} Name a group of ranks that run the same operations, by Delayed"), said


def meet_ranks_with_others(rank: int) -> None:
    # stages of different size: an input and a weight a layer; twice, since what was refused has not been compared
    for _ in range(2):
        model = stage(1 + 2 * rank)
        assert_said(sentence(partial(forward, model, rank)), "rank 0: 2; rank 1: 6.")
        histories = [buffer for name, buffer in model.named_buffers() if name.endswith("history")]
        assert len(histories) == 2 + 4 * rank and not any(history.any() for history in histories)

    # a stage that quantizes nothing, and a rank that calls nothing
    for idle in (Sequential(ops.RMSNorm(4)), nn.Identity()):
        assert_said(sentence(partial(forward, stage(1) if rank == 0 else idle, rank)), "rank 0: 2; rank 1: none.")

    # as many, but of another role, or divided otherwise among tensors
    for role, sizes in (("weight", [2]), ("input", [1, 1])):
        mine = [("input", 2)] if rank == 0 else [(role, size) for size in sizes]
        brought = [Amaxes(name, torch.ones(size), None) for name, size in mine]
        said = sentence(partial(reduce_amaxes, brought, None))
        assert_said(said, "rank 0: 2; rank 1: 2. Where they are as many, they are of other tensors.")

    # gradients alone differ: rank 1 needs none of the first layer
    model = stage(2)
    model[0].weight.requires_grad_(rank == 0)
    with autocast(DelayedScaling()):
        y = model(x_of(rank).detach())
    assert_said(sentence(y.sum().backward), "rank 0: 2; rank 1: 1.")

    # after a refusal the ranks can go on
    same = stage(1)
    with autocast(DelayedScaling()):
        same(x_of(rank))
    assert scales(same[0], "input") == [64.0]


def test_a_mismatch_is_one_sentence_on_every_rank(tmp_path: Path) -> None:
    on_ranks(meet_ranks_with_others, folder=tmp_path, ranks=RANKS)


# ------------------------------------------------------------------------------------------ named by the recipe


def name_groups(rank: int) -> None:
    alone = [dist.new_group([r]) for r in range(RANKS)]
    mine, both = alone[rank], dist.new_group([0, 1])

    # pipeline stages of different size, each with its group: neither waits for the other
    model = stage(1 + rank)
    for _ in range(2 + rank):
        with autocast(DelayedScaling(amax_reduction_group=mine)):
            y = model(x_of(rank))
        y.sum().backward()
    assert scales(model[0], "input") == [[64.0, 128.0][rank]]

    # the recipe's group comes before autocast's, that before all processes
    for own, called, expected in [
        (mine, both, [64.0, 128.0]),
        (None, mine, [64.0, 128.0]),
        (both, mine, [64.0, 64.0]),
        (None, None, [64.0, 64.0]),
    ]:
        op = ops.Linear(4, 4, bias=False)
        with autocast(DelayedScaling(amax_reduction_group=own), amax_reduction_group=called):
            y = op(x_of(rank))
        y.backward(torch.full((2, 4), AMAX[rank]))
        assert scales(op, "input") == [expected[rank]]
        assert scales(op, "grad_output") == [57344 / 448 * expected[rank]]

    # operations under recipes with groups of their own, met by each rank in another order
    dense = ops.Linear(4, 4, bias=False).set_recipe(DelayedScaling(amax_reduction_group=both))
    sparse = ops.Linear(4, 4, bias=False).set_recipe(DelayedScaling())
    with autocast("bf16"):
        for op in (dense, sparse) if rank else (sparse, dense):
            op(x_of(rank))
    assert scales(dense, "input") == scales(sparse, "input") == [64.0]

    # one that rank 1 is no member of: each keeps its own amaxes
    outside = dist.new_group([0])
    op = ops.Linear(4, 4, bias=False)
    with autocast(DelayedScaling(amax_reduction_group=outside)):
        op(x_of(rank))
    assert scales(op, "input") == [[64.0, 128.0][rank]]

    written_down_and_copied(both)


def written_down_and_copied(group: dist.ProcessGroup) -> None:
    recipe = DelayedScaling(amax_reduction_group=group)
    assert recipe == DelayedScaling(amax_reduction_group=group) != DelayedScaling()
    assert hash(recipe) == hash(DelayedScaling(amax_reduction_group=group))
    assert copy.deepcopy(ops.Linear(4, 4).set_recipe(recipe)).recipe == recipe
    with pytest.raises(ValueError, match="amax_reduction_group is a process group, which cannot be written down"):
        recipe.to_dict()
    written = replace(recipe, amax_reduction_group=None).to_dict()
    assert Recipe.from_dict(written) == DelayedScaling()


def test_a_recipe_names_its_group(tmp_path: Path) -> None:
    on_ranks(name_groups, folder=tmp_path, ranks=RANKS)


@pytest.mark.parametrize("group", ["tp", 3, [0, 1]])
def test_a_group_is_a_process_group(group) -> None:
    with pytest.raises(TypeError, match="amax_reduction_group is .*, but must be a torch.distributed process group"):
        DelayedScaling(amax_reduction_group=group)


# --------------------------------------------------------------------------------------------- what waits for nobody


def evaluate_on_one_rank(rank: int) -> None:
    op = ops.Linear(4, 4, bias=False)
    if rank == 0:
        with torch.no_grad(), autocast(DelayedScaling()):
            op(x_of(rank))
        with autocast(DelayedScaling()), torch.no_grad():
            op(x_of(rank))
        with autocast(DelayedScaling()), torch.inference_mode():
            op(x_of(rank))
        with autocast(DelayedScaling(reduce_amax=False)):
            pass
        with autocast("mxfp8"):
            op(x_of(rank))
        with pytest.raises(KeyError), autocast(DelayedScaling()):
            raise KeyError
    # a recomputation of what quantizes nothing
    norm = ops.RMSNorm(4)
    with autocast(DelayedScaling()):
        y = checkpoint(norm, x_of(rank))
    if rank == 1:
        y.sum().backward()
    dist.barrier()


def test_one_rank_alone_may_evaluate(tmp_path: Path) -> None:
    on_ranks(evaluate_on_one_rank, folder=tmp_path, ranks=RANKS)
