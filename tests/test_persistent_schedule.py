"""The order in which persistent kernels take tiles: the docstring's examples, and groups by size."""

import pytest
import torch
import triton
import triton.language as tl

from ops.kernels.grouped_gemm import high_precision
from ops.kernels.grouped_gemm.high_precision import m_grouped_triton
from ops.kernels.grouped_gemm.persistent_schedule import (
    MOST_GROUPS,
    ends_of_groups,
    group_of_rank,
    padded_groups,
    ranks_of_groups,
    serpentine_tile,
    tile_in_bands,
    tile_in_even_bands,
    tile_of_groups,
)
from tests.grouped_cases import DEVICES, Case, assert_close, naive_gemm, operands, poisoned

# Triton 3.6's interpreter turns arrays of one element into loop bounds, which numpy >= 2.4 will refuse.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")


@triton.jit
def bands_kernel(out_ptr, num_m, num_n, BAND: tl.constexpr, EVEN: tl.constexpr = False):
    tile = tl.program_id(0)
    m, n = tile_in_even_bands(tile, num_m, num_n, BAND) if EVEN else tile_in_bands(tile, num_m, num_n, BAND)
    tl.store(out_ptr + 2 * tile, m)
    tl.store(out_ptr + 2 * tile + 1, n)


@triton.jit
def turns_kernel(out_ptr, turns):
    for turn in range(turns):
        tl.store(out_ptr + turn * tl.num_programs(0) + tl.program_id(0), serpentine_tile(turn))


@triton.jit
def by_size_kernel(offsets_ptr, out_ptr, num_groups, GROUPS: tl.constexpr):
    ranks = ranks_of_groups(offsets_ptr, num_groups, GROUPS)
    for rank in range(num_groups):
        tl.store(out_ptr + rank, group_of_rank(ranks, rank))


@triton.jit
def rows_kernel(
    offsets_ptr, out_ptr, num_groups, num_n, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, AT_ONCE: tl.constexpr
):  # fmt: skip
    ends = ends_of_groups(offsets_ptr, num_groups, BLOCK_M, GROUPS, AT_ONCE=AT_ONCE)
    for tile in range(tl.max(ends, axis=0) * num_n):
        group, first, end, n = tile_of_groups(offsets_ptr, ends, tile, num_n, BLOCK_M, 2)
        tl.store(out_ptr + 4 * tile, group)
        tl.store(out_ptr + 4 * tile + 1, first)
        tl.store(out_ptr + 4 * tile + 2, end)
        tl.store(out_ptr + 4 * tile + 3, n)


@pytest.mark.parametrize("device", DEVICES)
def test_orders_are_those_of_the_docstring(device):
    tiles = torch.zeros(6, 2, dtype=torch.int64, device=device)
    bands_kernel[(6,)](tiles, 3, 2, BAND=2)
    assert tiles.tolist() == [[0, 0], [1, 0], [0, 1], [1, 1], [2, 0], [2, 1]]
    for band, heights in ((2, [1]), (2, [2]), (2, [2, 1]), (2, [2, 2, 1]), (8, [11]), (8, [6, 6]), (8, [9, *[8] * 8])):
        tiles_m = sum(heights)
        even = torch.zeros(tiles_m * 2, 2, dtype=torch.int64, device=device)
        bands_kernel[(tiles_m * 2,)](even, tiles_m, 2, BAND=band, EVEN=True)
        starts = [sum(heights[:i]) for i in range(len(heights))]
        pairs = [
            [start + m, n]
            for start, height in zip(starts, heights, strict=True)
            for n in range(2)
            for m in range(height)
        ]
        assert even.tolist() == pairs
    taken = torch.zeros(3, 3, dtype=torch.int64, device=device)
    turns_kernel[(3,)](taken, 3)
    assert taken.tolist() == [[0, 1, 2], [5, 4, 3], [6, 7, 8]]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 5, 70])
def test_larger_groups_come_first_and_equal_ones_in_their_order(groups, device):
    sizes = torch.randint(0, 4, (groups,), device=device)
    offsets = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    found = torch.full_like(sizes, -1)
    by_size_kernel[(1,)](offsets, found, groups, GROUPS=padded_groups(groups))
    assert torch.equal(found, sizes.argsort(descending=True, stable=True))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("sizes", [[3, 0, 6, 17, 1], [0, 0], [8], [g % 6 for g in range(40)]])
def test_tiles_of_rows_are_those_of_the_groups_and_no_others(sizes, at_once, device):
    block = 4
    offsets = torch.tensor([0, *sizes], device=device).cumsum(0)
    begins = offsets.tolist()
    num_n = 2
    expected = [
        [group, first, begins[group] + size, n]
        for group, size in enumerate(sizes)
        for first in range(begins[group], begins[group] + size, block)
        for n in range(num_n)
    ]
    tiles = torch.full((len(expected) + 1, 4), -1, device=device)
    constants = {"GROUPS": padded_groups(len(sizes)), "BLOCK_M": block, "AT_ONCE": at_once}
    rows_kernel[(1,)](offsets, tiles, len(sizes), num_n, **constants)
    *found, behind = tiles.tolist()
    assert sorted(found) == sorted(expected) and behind == [-1] * 4
    assert [group for group, *_ in found] == sorted(group for group, *_ in found)


@pytest.mark.rest
@pytest.mark.parametrize("device", DEVICES)
def test_more_groups_than_a_program_keeps_go_to_the_kernels_on_pointers(device, monkeypatch):
    """One group a row; the interpreter, which is slow, keeps fewer."""
    most = MOST_GROUPS if device == "cuda" else 20
    monkeypatch.setattr(high_precision, "MOST_GROUPS", most)
    groups = most + 1
    o = operands(Case([1] * groups, K=16, N=16), torch.bfloat16, device=device)
    y = poisoned(groups, 16, like=o.x)
    m_grouped_triton(o.x, o.w, o.splits.offsets, None, None, None, y, transposed=True, tf32=False)
    assert_close("y", y, naive_gemm("TN", o.x, o.w, o.splits))
