"""The order in which persistent kernels take tiles: the docstring's examples, and groups by size."""

import pytest
import torch
import triton
import triton.language as tl

from ops.kernels import persistent_tiles
from ops.kernels.grouped_gemm import grouped_gemm_nt_triton
from ops.kernels.persistent_tiles import (
    find_tile_in_group,
    group_of_rank,
    ranked_groups,
    ranks_of_groups,
    tile_in_bands,
    tile_to_and_fro,
)
from tests.grouped_cases import CASES, DEVICES, assert_close, naive_gemm, operands, poisoned

# Triton 3.6's interpreter turns arrays of one element into loop bounds, which numpy >= 2.4 will refuse.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@triton.jit
def bands_kernel(out_ptr, num_m, num_n, BAND: tl.constexpr):
    tile = tl.program_id(0)
    m, n = tile_in_bands(tile, num_m, num_n, BAND)
    tl.store(out_ptr + 2 * tile, m)
    tl.store(out_ptr + 2 * tile + 1, n)


@triton.jit
def turns_kernel(out_ptr, turns):
    for turn in range(turns):
        tl.store(out_ptr + turn * tl.num_programs(0) + tl.program_id(0), tile_to_and_fro(turn))


@triton.jit
def by_size_kernel(offsets_ptr, out_ptr, num_groups, RANKED: tl.constexpr):
    ranks = ranks_of_groups(offsets_ptr, num_groups, RANKED)
    for rank in range(num_groups):
        tl.store(out_ptr + rank, group_of_rank(ranks, rank))


@triton.jit
def tiles_kernel(offsets_ptr, out_ptr, rows, num_groups, num_n, BAND: tl.constexpr, BLOCK_M: tl.constexpr):
    tile = tl.program_id(0)
    group, first, end, n = find_tile_in_group(offsets_ptr, tile, rows, num_groups, num_n, BAND, BLOCK_M)
    tl.store(out_ptr + 4 * tile, group)
    tl.store(out_ptr + 4 * tile + 1, first)
    tl.store(out_ptr + 4 * tile + 2, tl.minimum(first + BLOCK_M, end))
    tl.store(out_ptr + 4 * tile + 3, n)


@pytest.mark.parametrize("device", DEVICES)
def test_orders_are_those_of_the_docstring(device):
    tiles = torch.zeros(6, 2, dtype=torch.int64, device=device)
    bands_kernel[(6,)](tiles, 3, 2, BAND=2)
    assert tiles.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [2, 1]]
    taken = torch.zeros(3, 3, dtype=torch.int64, device=device)
    turns_kernel[(3,)](taken, 3)
    assert taken.tolist() == [[0, 1, 2], [5, 4, 3], [6, 7, 8]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 5, 70])
def test_larger_groups_come_first_and_equal_ones_in_their_order(groups, device):
    sizes = torch.randint(0, 4, (groups,), device=device)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    found = torch.full_like(sizes, -1)
    by_size_kernel[(1,)](offsets, found, groups, RANKED=ranked_groups(groups))
    assert torch.equal(found, sizes.argsort(descending=True, stable=True))


@pytest.mark.parametrize("device", DEVICES)
def test_tiles_of_a_group_follow_each_other_and_cover_every_row_once(device):
    sizes, rows, num_n, block = [3, 0, 6, 17, 1], 32, 3, 4
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0)
    tiles = torch.zeros((rows // block + len(sizes) + 1) * num_n, 4, dtype=torch.int64, device=device)
    tiles_kernel[(len(tiles),)](offsets, tiles, rows, len(sizes), num_n, BAND=2, BLOCK_M=block)
    found = tiles.tolist()
    assert [group for group, *_ in found] == sorted(group for group, *_ in found)
    ends = [*offsets.tolist()[1:], rows]
    covered = [(row, n) for group, first, end, n in found for row in range(first, end) if row < ends[group]]
    assert sorted(covered) == [(row, n) for row in range(rows) for n in range(num_n)]


@pytest.mark.parametrize("device", DEVICES)
def test_more_groups_than_are_ranked_are_taken_as_they_come(device, monkeypatch):
    monkeypatch.setattr(persistent_tiles, "_MOST_RANKED", 2)
    assert ranked_groups(2) and not ranked_groups(3)
    o = operands(CASES["empty groups"], torch.bfloat16, device=device)
    dw = poisoned(*o.w.shape, like=o.w)
    grouped_gemm_nt_triton(o.dy, o.x, o.splits.offsets, o.alpha, dw, tf32=False)
    assert_close("dw", dw, naive_gemm("NT", o.dy, o.x, o.splits, alpha=o.alpha))
