"""What persistent grouped kernels share: as many programs as the GPU has room for, each takes tile after tile.

The order of tiles keeps operands in L2. Tiles of one group follow each other; within a group they run in bands of BAND
tiles along m, and inside a band m runs fastest, so that programs at work together share few rows of either operand.

    3 tiles along m, 2 along n, BAND = 2:   (m, n) = (0, 0) (1, 0) (0, 1) (1, 1) | (2, 0) (2, 1)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from recipes.kernels.row_tiles import find_group

_INTERPRETED = 2  # programs under the interpreter: more than one, so that each takes some tiles and skips others


def multiprocessors(x: Tensor) -> int:
    """Of x's GPU."""
    return torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else _INTERPRETED


def band(block_m: int) -> int:
    """Tiles along m in a band: 2048 rows, which is a balance of rows of both operands for 132 tiles 128 x 256."""
    return 2048 // block_m


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
