"""transport="symmetric" over ranks that share memory, its kernels interpreted: the bits of the unsharded layer."""
# T tokens, H features, E experts, L experts of a rank, n ranks, C rows of a rank

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import fuser
from fuser import Sequential, autocast, ops
from tests.ranks import on_ranks, quietly
from tests.reference import assert_close
from tests.shared_memory import symmetric_on_cpu
from tests.test_expert_parallel import (
    Batch,
    Case,
    batch,
    check_shares,
    experts_between,
    random_case,
    same_everywhere,
    sentence,
    step,
    weight_gradients,
    whole,
)

# Rows of other numbers are multiplied in other tiles.
CLOSE = {torch.bfloat16: 2**-5, torch.float32: 2**-5}

pytestmark = pytest.mark.interpreter


def share_of(layer: Sequential, case: Case, capacity: int, group: Any = None, **settings: Any) -> Sequential:
    """The same layer on this rank, with its own experts of that layer."""
    group = dist.group.WORLD if group is None else group
    own, rank = case.experts // len(case.tokens), dist.get_rank(group)
    first = ops.Dispatch(case.experts, group=group, transport="symmetric", capacity=capacity)
    mine = experts_between(first, ops.Combine(group=group, transport="symmetric"), own, case, **settings)
    with torch.no_grad():
        for parameter, of_all in zip(mine.parameters(), layer.parameters(), strict=True):
            parameter.copy_(of_all[rank * own : (rank + 1) * own])
    return mine


def rows_received(case: Case, given: Batch) -> list[int]:
    """By each rank."""
    owner = given.indices.flatten() // (case.experts // len(case.tokens))
    return owner.bincount(minlength=len(case.tokens)).tolist()


def compare(case: Case, recipe: Any = "bf16", spare: int = 3, group: Any = None, **settings: Any) -> None:
    """spare: rows of the capacity that no rank receives"""
    rank = dist.get_rank(group)
    layer, given = whole(case, **settings), batch(case)
    capacity = max(max(rows_received(case, given)) + spare, case.experts // len(case.tokens))
    mine = share_of(layer, case, capacity, group, **settings)
    with autocast(recipe):
        of_all = step(layer, given)
        of_rank = step(mine, given.of_rank(case, rank))
    check_shares(case, rank, of_all, weight_gradients(layer), of_rank | weight_gradients(mine))
    fuser.check_overflow()


def all_nan(tensors: dict[str, Tensor | None]) -> None:
    finite = [name for name, tensor in tensors.items() if tensor is None or not tensor.isnan().all()]
    assert not finite, f"{finite} are not NaN in all elements"


def overflow(rank: int, device: str, recipe: str = "bf16") -> None:
    """Rank 1 would receive 2 rows more than its capacity in one step, and none fewer in the next."""
    case = Case((9, 6), 4, 2, torch.bfloat16, features=(128, 64))
    fits = batch(case)
    fits.indices[:] = torch.tensor([0, 2])  # 15 rows for expert 0 and 15 for expert 2
    too_many = fits._replace(indices=fits.indices.clone())
    too_many.indices[:2] = 2
    layer = whole(case)
    mine = share_of(layer, case, 15).to(device)
    layer = copy.deepcopy(layer).to(device)
    fits, too_many = (Batch(*(tensor.to(device) for tensor in given)) for given in (fits, too_many))
    own = slice(2 * rank, 2 * rank + 2)
    needs = (
        "would have received 17 rows, but capacity is 15, so the outputs and gradients of that step are NaN on every"
    )
    with autocast(recipe):
        for raising in (fuser.check_overflow, lambda: step(mine, fits.of_rank(case, rank))):
            mine.zero_grad()
            all_nan(step(mine, too_many.of_rank(case, rank)) | weight_gradients(mine))
            if device == "cuda":
                torch.cuda.synchronize()
            said = same_everywhere(sentence(raising))
            assert needs in said and said.endswith("Give Dispatch a capacity of 17 or more."), said
            fuser.check_overflow()
        # nothing was written past the capacity, and nothing is left of it
        mine.zero_grad()
        layer.zero_grad()
        expected = {name: t.split(case.tokens)[rank] for name, t in step(layer, fits).items()}
        expected |= {name: t[own] for name, t in weight_gradients(layer).items()}
        assert_close(step(mine, fits.of_rank(case, rank)) | weight_gradients(mine), expected, CLOSE)
        fuser.check_overflow()


def compare_cases(rank: int, ranks: int, seeds: int, folder: Path) -> None:
    with quietly(), symmetric_on_cpu(folder):
        compare(Case((7, 0, 12, 1)[:ranks], 2 * ranks, 2))
        compare(Case((7, 3, 12, 1)[:ranks], 2 * ranks, 2, torch.bfloat16), spare=0)
        compare(Case((0,) * ranks, 2 * ranks, 2))
        for seed in range(seeds):
            compare(random_case(seed, ranks))
        if ranks == 4:
            compare(Case((3, 5, 0, 9), 8, 3, torch.float64))
            compare(Case((3, 5, 0, 9), 8, 3), path="split")
            compare(Case((3, 5, 0, 9), 8, 3), fusions=())
            for recipe in ("fp8_current", "fp8_block", "mxfp8"):
                compare(Case((20, 13, 0, 4), 8, 2), recipe)
            pairs = [dist.new_group([0, 2]), dist.new_group([1, 3])]
            compare(Case((4, 7), 6, 2, seed=rank % 2), group=pairs[rank % 2])


@pytest.mark.launches("put_counts_kernel", "push_kernel", "expand_kernel", "pull_kernel")
@pytest.mark.parametrize(("ranks", "seeds"), [(2, 4), pytest.param(4, 12, marks=[pytest.mark.rest, pytest.mark.slow])])
def test_a_sharded_layer_has_the_bits_of_the_whole_one(ranks: int, seeds: int, tmp_path: Path) -> None:
    on_ranks(compare_cases, ranks, seeds, tmp_path, folder=tmp_path, ranks=ranks)


def overflow_on_cpu(rank: int, recipes: tuple[str, ...], folder: Path) -> None:
    with quietly(), symmetric_on_cpu(folder):
        for recipe in recipes:
            overflow(rank, "cpu", recipe)


@pytest.mark.parametrize(
    "recipes",
    [("bf16",), pytest.param(("fp8_current", "fp8_block", "mxfp8"), marks=pytest.mark.rest)],
    ids=["bf16", "quantized"],
)
def test_an_overflow_is_nan_on_every_rank_and_an_error_once_it_is_known(
    recipes: tuple[str, ...], tmp_path: Path
) -> None:
    on_ranks(overflow_on_cpu, recipes, tmp_path, folder=tmp_path)
