"""What persistent grouped kernels share: as many programs as the GPU has room for, each takes tile after tile.

The order of tiles keeps operands in L2. Tiles of one group follow each other; within a group they run in bands of BAND
tiles along m, and inside a band m runs fastest, so that programs at work together share few rows of either operand.

    3 tiles along m, 2 along n, BAND = 2:   (m, n) = (0, 0) (1, 0) (0, 1) (1, 1) | (2, 0) (2, 1)

Where a tile's work grows with its group (k_grouped), the largest groups come first, and programs take tiles to and fro,
so that who had the larger share of one round has the smaller of the next: no large group ends alone.

    3 programs, 8 tiles:   0 1 2 | 5 4 3 | 6 7 -
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.kernels.row_tiles import find_group

_MOST_RANKED = 1024  # groups; more are taken as they come

_INTERPRETED = 2  # programs under the interpreter: more than one, so that each takes some tiles and skips others


def multiprocessors(x: Tensor) -> int:
    """Of x's GPU."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else _INTERPRETED


def band(block_m: int) -> int:
    """Tiles along m in a band: 2048 rows, which is a balance of rows of both operands for 132 tiles 128 x 256."""
    return 2048 // block_m


def ranked_groups(num_groups: int) -> int:
    """RANKED, for `ranks_of_groups`: a power of two that holds the groups, or 0."""
    return max(_RANK_CHUNK.value, triton.next_power_of_2(num_groups)) if num_groups <= _MOST_RANKED else 0


_RANK_CHUNK = tl.constexpr(32)


@triton.jit
def ranks_of_groups(offsets_ptr, num_groups, RANKED: tl.constexpr):
    """[RANKED] int32: how many groups are larger than each, or as large and before it; RANKED where there is none."""
    offs_g = tl.arange(0, RANKED)
    mask_g = offs_g < num_groups
    size_g = tl.load(offsets_ptr + offs_g + 1, mask=mask_g, other=0) - tl.load(
        offsets_ptr + offs_g, mask=mask_g, other=0
    )
    ranks = tl.zeros((RANKED,), tl.int32)
    for start in range(0, num_groups, _RANK_CHUNK):
        offs_h = start + tl.arange(0, _RANK_CHUNK)
        mask_h = offs_h < num_groups
        begin_h = tl.load(offsets_ptr + offs_h, mask=mask_h, other=0)
        size_h = tl.load(offsets_ptr + offs_h + 1, mask=mask_h, other=0) - begin_h
        tie = (size_h[None, :] == size_g[:, None]) & (offs_h[None, :] < offs_g[:, None])
        before = ((size_h[None, :] > size_g[:, None]) | tie) & mask_h[None, :]
        ranks += tl.sum(before.to(tl.int32), axis=1)
    return tl.where(mask_g, ranks, RANKED)


@triton.jit
def group_of_rank(ranks, rank):
    """The group that has this rank."""
    return tl.sum(tl.where(ranks == rank, tl.arange(0, ranks.shape[0]), 0), axis=0)


@triton.jit
def tile_to_and_fro(turn):
    """The tile that this program takes in its turn, or one that does not exist."""
    program = tl.program_id(0)
    return turn * tl.num_programs(0) + tl.where(turn % 2 == 0, program, tl.num_programs(0) - 1 - program)


@triton.jit
def tile_in_bands(tile, num_m, num_n, BAND: tl.constexpr):
    """(m, n) of a tile of num_m x num_n: see the top of the file."""
    band = tile // (BAND * num_n)
    height = tl.minimum(num_m - band * BAND, BAND)
    within = tile - band * BAND * num_n
    return band * BAND + within % height, within // height


@triton.jit
def find_tile_in_group(offsets_ptr, tile, rows, num_groups, num_n, BAND: tl.constexpr, BLOCK_M: tl.constexpr):
    """(group, first row, end row, n) of a tile, of num_slots * num_n: as `row_tiles.find_tile`, group after group."""
    group, begin, end = find_group(offsets_ptr, tile // num_n, rows, num_groups, BLOCK_M)
    first_slot = (begin // BLOCK_M).to(tl.int32) + group
    num_m = (end // BLOCK_M).to(tl.int32) + group + 1 - first_slot
    m, n = tile_in_bands(tile - first_slot * num_n, num_m, num_n, BAND)
    return group, begin + m * BLOCK_M, end, n


@triton.jit
def halves(acc):
    """The left and the right half of a tile."""
    split = tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2))
    return tl.split(tl.permute(split, (0, 2, 1)))
