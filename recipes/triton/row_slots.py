"""Tiles of rows for kernels over grouped rows: each tile lies in one group, found from the offsets on the device.

`find_tile` needs no prefix sum over tiles. Group g owns BLOCK_M-row slots from floor(offsets[g] / BLOCK_M) + g on: this
is enough for its ceil(size / BLOCK_M) tiles since floor(b) - floor(a) + 1 >= ceil(b - a); at most one slot a group
stays idle. The rows past the sum are treated as one more group, the tail.

    BLOCK_M = 4, rows = 12, sizes = [3, 0, 6]  ->  offsets    [0, 3, 3, 9]
                                                   first slot  0, 1, 2, 5 (tail)
                                                   slots       [0:3] | - | [3:7] [7:9] - | [9:12] -
"""

from recipes.triton.gates import tl, triton


def num_slots(rows: int, num_groups: int, block_m: int) -> int:
    """How many slots cover `rows` rows of `num_groups` groups and the tail, whatever their sizes."""
    return rows // block_m + num_groups + 1


@triton.jit
def find_tile(offsets_ptr, slot, rows, num_groups, BLOCK_M: tl.constexpr):
    """(group, first row, end row) of a slot; group == num_groups for the tail; first >= end if the slot is idle."""
    CHUNK: tl.constexpr = 128
    group = -1
    for start in range(0, num_groups + 1, CHUNK):
        offs_g = start + tl.arange(0, CHUNK)
        begins = tl.load(offsets_ptr + offs_g, mask=offs_g <= num_groups, other=0)
        owned = (begins // BLOCK_M + offs_g <= slot) & (offs_g <= num_groups)
        group += tl.sum(owned.to(tl.int32), axis=0)
    begin = tl.load(offsets_ptr + group)
    end = tl.load(offsets_ptr + group + 1, mask=group < num_groups, other=rows)
    first = begin + (slot - begin // BLOCK_M - group) * BLOCK_M
    return group, first, end


@triton.jit
def find_block(offsets_ptr, aligned_ptr, tile, rows, row_blocks, num_groups, BLOCK: tl.constexpr):
    """(matrix, block of its rows, first row, how many of its rows, whether they are any group's) of a tile of BLOCK
    rows.

    Without offsets there are matrices of `rows` rows each, `row_blocks` tiles a matrix. With offsets there is one, its
    tiles are those of `_find_padded_tile`.
    """
    if offsets_ptr is None:
        matrix = tile // row_blocks
        tile = tile % row_blocks
        first = tile.to(tl.int64) * BLOCK
        height = tl.minimum(rows - first, BLOCK).to(tl.int32)
        active = rows > 0
    else:
        matrix = tile * 0
        first, height, active = _find_padded_tile(offsets_ptr, aligned_ptr, tile, rows, num_groups, BLOCK)
    return matrix, tile, first, height, active


@triton.jit
def _find_padded_tile(offsets_ptr, aligned_ptr, tile, rows, num_groups, BLOCK: tl.constexpr):
    """(first row, how many rows, whether they are a group's) of a tile of the buffer in which each group is padded to
    whole tiles; int64, int32, bool.

    aligned: `splits.aligned(BLOCK)`. Behind the groups' tiles come those of the tail. The buffer's
    `splits.aligned_capacity(BLOCK) // BLOCK` tiles and one more are enough to hold the tail's rows too.

    Of the groups that begin at or before the tile the last one owns it, and none is padded more or ends later, so that
    maxima take the place of a look-up. A warp reads 32 groups and needs no other warp.
    """
    CHUNK: tl.constexpr = 32
    at = tile * BLOCK
    active = at < tl.load(aligned_ptr + num_groups)
    padding = tl.zeros([CHUNK], tl.int32)
    left = tl.zeros([CHUNK], tl.int32)
    for start in range(0, num_groups + 1, CHUNK):
        offs_g = start + tl.arange(0, CHUNK)
        begins = tl.load(aligned_ptr + offs_g, mask=offs_g <= num_groups, other=at + 1).to(tl.int32)
        shift = begins - tl.load(offsets_ptr + offs_g, mask=offs_g <= num_groups, other=0).to(tl.int32)
        ends = tl.load(offsets_ptr + offs_g + 1, mask=offs_g < num_groups, other=rows).to(tl.int32) + shift
        padding = tl.where(begins <= at, shift, padding)
        left = tl.where(begins <= at, ends - at, left)
    first = at - tl.max(padding, axis=0)
    height = tl.minimum(tl.max(left, axis=0), BLOCK)
    return first.to(tl.int64), height, active
