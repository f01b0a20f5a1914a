"""The order of groups whose tiles take as long as they are large: `ops.kernels.grouped_gemm.persistent_schedule`."""

from importlib import import_module

import pytest
import torch

from recipes.triton.gates import why_no_gluon


def order_of(sizes: list[int]) -> list[int]:
    """The groups in order, as the text of the module says it."""
    falling = sorted(range(len(sizes)), key=lambda g: -sizes[g])
    large = [g for g in falling if sizes[g] * len(sizes) > sum(sizes)]
    small = [g for g in reversed(falling) if g not in large]
    order: list[int] = []
    rows = 0
    for group in large:
        while small and len(order) * sum(sizes) < rows * len(sizes):
            order.append(small.pop(0))
        order.append(group)
        rows += sizes[group]
    return order + small


def test_worked_example():
    sizes = [50, 5, 30, 5, 5, 5]
    assert [sizes[g] for g in order_of(sizes)] == [50, 5, 5, 30, 5, 5]
    assert order_of([3, 3, 3]) == [2, 1, 0] and order_of([0, 0]) == [1, 0]


@pytest.mark.gpu
@pytest.mark.parametrize("mixed", [True, False])
@pytest.mark.parametrize("num_groups", [1, 2, 31, 33, 128, 129, 512, 1000])
def test_groups_are_ranked_in_this_order(num_groups, mixed):
    reason = why_no_gluon(torch.cuda.get_device_capability())
    if reason is not None:
        pytest.skip(reason)
    ranks_of = import_module("tests.ranked_groups").ranks_of
    for shares in (torch.rand(num_groups) ** 8, torch.arange(1, num_groups + 1) ** -1.2, torch.ones(num_groups)):
        sizes = (shares * 2000).long()[torch.randperm(num_groups)]
        sizes[torch.rand(num_groups) < 0.1] = 0
        ranks = ranks_of(sizes.cuda(), mixed).tolist()
        order = order_of(sizes.tolist()) if mixed else sizes.argsort(descending=True, stable=True).tolist()
        assert ranks[:num_groups] == [order.index(g) for g in range(num_groups)]
        assert all(rank == len(ranks) for rank in ranks[num_groups:])
