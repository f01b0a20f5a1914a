"""What persistent grouped kernels share: as many programs as the GPU holds at once, each takes tile after tile.

The loop over tiles and that over the sum are one, so that the next tile is loaded while the last one is stored. So a
tile without work would cost as much as any other: m_grouped kernels have none. Each program counts the tiles of all
groups once, and finds a tile's group among these counts, which it keeps in registers.

The order of tiles keeps operands in L2: they run in bands of BAND tiles along m, and inside a band m runs fastest, so
that programs at work together share few rows of either operand.

    3 tiles along m, 2 along n, BAND = 2:   (m, n) = (0, 0) (1, 0) (0, 1) (1, 1) | (2, 0) (2, 1)

So the next tile takes the same columns, the larger operand of a tile that is wider than high. Of those of m_grouped in
Gluon that are higher than wide (of codes with scales of blocks) m and n are exchanged, and it takes the same rows.

In m_grouped no band has tiles of two groups, whose second operands differ, and the heights of a group's bands differ by
one tile at most: of 17 tiles in bands of 16, the last one would load all columns for one tile.

Where a tile's work grows with its group (k_grouped), the largest groups come first, so that no large group ends alone.
In Triton programs take tiles in serpentine order, so that the one with the most work in a round has the least in the
next; in Gluon they take the next tile when they are free (`tile_queue_gluon`).

    3 programs, 8 tiles:   0 1 2 | 5 4 3 | 6 7 -

There a tile of a small group waits for what it stores, one of a large group for its products. Of 16-bit operands, so
that these go on side by side, small groups come between the large ones: of the groups with more rows than the average
the largest is first, of the others the smallest, and before a large group the share of all groups that those larger
than it have of the rows. Of codes it is slower.

    rows of groups  50 5 30 5 5 5   in order  50 5 5 30 5 5: 50 is half of the rows, so half of the groups precede 30
"""

from torch import Tensor

from recipes.triton.gates import tl, triton
from recipes.triton.launch import next_power_of_2, properties

MOST_GROUPS = 1024  # of which a program can keep a number each

_INTERPRETED = 2  # programs under the interpreter: more than one, so that each takes some tiles and skips others


def multiprocessors(x: Tensor, spare: int = 0) -> int:
    """Of x's GPU, without those that are left to what runs beside."""
    return properties(x.get_device()).multi_processor_count - spare if x.is_cuda else _INTERPRETED


def padded_groups(num_groups: int) -> int:
    """GROUPS, for `ends_of_groups` and `ranks_of_groups`: a power of two that holds the groups."""
    return max(_CHUNK.value, next_power_of_2(num_groups))


def most_tiles(rows: int, num_groups: int, block_m: int) -> int:
    """The most tiles along m that so many rows can have: no group without rows has one."""
    return min(rows // block_m + num_groups, rows)


def band(block: int) -> int:
    """Tiles of `block` rows in a band: 2048 rows, which is a balance of rows of both operands for 132 tiles 128 x 256.
    Or of `block` columns, where m and n are exchanged."""
    return 2048 // block


_CHUNK = tl.constexpr(32)


@triton.jit
def ranks_of_groups(offsets_ptr, num_groups, GROUPS: tl.constexpr):
    """[GROUPS] int32: how many groups are larger than each, or as large and before it; GROUPS where there is none."""
    offs_g = tl.arange(0, GROUPS)
    mask_g = offs_g < num_groups
    size_g = tl.load(offsets_ptr + offs_g + 1, mask=mask_g, other=0) - tl.load(
        offsets_ptr + offs_g, mask=mask_g, other=0
    )
    ranks = tl.zeros((GROUPS,), tl.int32)
    for start in range(0, num_groups, _CHUNK):
        offs_h = start + tl.arange(0, _CHUNK)
        mask_h = offs_h < num_groups
        begin_h = tl.load(offsets_ptr + offs_h, mask=mask_h, other=0)
        size_h = tl.load(offsets_ptr + offs_h + 1, mask=mask_h, other=0) - begin_h
        tie = (size_h[None, :] == size_g[:, None]) & (offs_h[None, :] < offs_g[:, None])
        before = ((size_h[None, :] > size_g[:, None]) | tie) & mask_h[None, :]
        ranks += tl.sum(before.to(tl.int32), axis=1)
    return tl.where(mask_g, ranks, GROUPS)


@triton.jit
def group_of_rank(ranks, rank):
    """The group that has this rank."""
    return tl.sum(tl.where(ranks == rank, tl.arange(0, ranks.shape[0]), 0), axis=0)


@triton.jit
def serpentine_tile(turn):
    """The tile that this program takes in its turn, or one that does not exist."""
    program = tl.program_id(0)
    return turn * tl.num_programs(0) + tl.where(turn % 2 == 0, program, tl.num_programs(0) - 1 - program)


@triton.jit
def tile_in_bands(tile, num_m, num_n, most):
    """(m, n) of a tile of num_m x num_n, in bands of `most` tiles: see the top of the file."""
    band = tile // (most * num_n)
    height = tl.minimum(num_m - band * most, most)
    within = tile - band * most * num_n
    return band * most + within % height, within // height


@triton.jit
def tile_in_even_bands(tile, num_m, num_n, BAND: tl.constexpr):
    """The same in bands of about BAND tiles, the higher ones first."""
    bands = tl.maximum((num_m + BAND // 2) // BAND, 1)
    low = num_m // bands
    above = num_m % bands * (low + 1)  # tiles along m of the higher bands
    is_above = tile < above * num_n
    first = tl.where(is_above, 0, above)
    height = tl.where(is_above, low + 1, low)
    m, n = tile_in_bands(tile - first * num_n, tl.where(is_above, above, num_m - above), num_n, height)
    return first + m, n


@triton.jit
def ends_of_groups(
    offsets_ptr, num_groups, BLOCK_M: tl.constexpr, GROUPS: tl.constexpr, AT_ONCE: tl.constexpr = False
):  # fmt: skip
    """[GROUPS] int32: how many tiles of BLOCK_M rows the groups up to and with each one have.

    AT_ONCE: up to 128 groups are read before any are summed, which takes registers. Where there is little else to do a
    program waits for that before its first tile.
    """
    if AT_ONCE and GROUPS <= 128:
        counts = ()
        for start in tl.static_range(0, GROUPS, _CHUNK):
            counts = counts + (_tiles_of_groups(offsets_ptr, start, num_groups, BLOCK_M),)  # type: ignore[assignment]  # noqa: RUF005
        before = tl.zeros((GROUPS, _CHUNK), tl.int32)
        for i in tl.static_range(len(counts)):
            before += _up_to_each_group(counts[i], i * _CHUNK, GROUPS)
        ends = tl.sum(before, axis=1)
    else:
        ends = tl.zeros((GROUPS,), tl.int32)
        for start in range(0, num_groups, _CHUNK):
            counts = _tiles_of_groups(offsets_ptr, start, num_groups, BLOCK_M)
            ends += tl.sum(_up_to_each_group(counts, start, GROUPS), axis=1)
    return ends


@triton.jit
def _tiles_of_groups(offsets_ptr, start, num_groups, BLOCK_M: tl.constexpr):
    """[_CHUNK] int32: of the groups from `start` on."""
    offs_h = start + tl.arange(0, _CHUNK)
    begin = tl.load(offsets_ptr + offs_h, mask=offs_h < num_groups, other=0)
    size = tl.load(offsets_ptr + offs_h + 1, mask=offs_h < num_groups, other=0) - begin
    return tl.cdiv(size.to(tl.int32), BLOCK_M)


@triton.jit
def _up_to_each_group(counts, start, GROUPS: tl.constexpr):
    """[GROUPS, _CHUNK] int32: in the row of each group the counts, from group `start` on, up to and with its own."""
    counted = start + tl.arange(0, _CHUNK)[None, :] <= tl.arange(0, GROUPS)[:, None]
    return tl.where(counted, counts[None, :], 0)


@triton.jit
def tile_of_groups(offsets_ptr, ends, tile, num_n, BLOCK_M: tl.constexpr, BAND: tl.constexpr):
    """(group, first row, end of the group, n) of a tile of all that `ends_of_groups` counts, times num_n."""
    before = ends * num_n <= tile
    group = tl.sum(before.to(tl.int32), axis=0)
    first = tl.max(tl.where(before, ends, 0), axis=0) * num_n
    begin = tl.load(offsets_ptr + group)
    end = tl.load(offsets_ptr + group + 1)
    m, n = tile_in_even_bands(tile - first, tl.cdiv((end - begin).to(tl.int32), BLOCK_M), num_n, BAND)
    return group, begin + m * BLOCK_M, end, n


@triton.jit
def split_columns(acc):
    """The left and the right half of a tile."""
    split = tl.reshape(acc, (acc.shape[0], 2, acc.shape[1] // 2))
    return tl.split(tl.permute(split, (0, 2, 1)))
