"""Which tile a program of `m_grouped_gluon` takes next, and which rows and columns that is.

Half-empty tiles take less time than others, so programs take the next tile when they are free. The loading warp takes
its number from a counter in memory, and hands it on in shared memory, in one of SLOTS after the other. It is at most
STAGES steps ahead of all others, and a tile has a step, so no slot is written before all have read it. Without a
counter all know their tiles: those that the number of programs are apart.

The order of tiles: `persistent_schedule`.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# G groups

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ops.kernels.grouped_gemm.high_precision_nt_gluon import sizes_of
from ops.kernels.grouped_gemm.measured_tiles import MOST_QUEUED_STAGES
from ops.kernels.grouped_gemm.persistent_schedule import tile_in_even_bands

SLOTS = gl.constexpr(MOST_QUEUED_STAGES + 2)


@gluon.jit
def count_tiles(offsets_ptr, num_groups, ends, BLOCK_M: gl.constexpr):
    """Writes to `ends` [GROUPS] how many tiles of BLOCK_M rows the groups up to and with each one have.

    Of the warps of the program, before it is divided into roles.
    """
    GROUPS: gl.constexpr = ends.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([GROUPS // 128, 32], [32, 1], [4, 1], [1, 0])
    offs_g = gl.expand_dims(gl.arange(0, GROUPS, gl.SliceLayout(1, layout)), 1)
    count = gl.zeros([GROUPS], gl.int32, gl.SliceLayout(1, layout))
    for start in range(0, num_groups, 32):
        offs_h = start + gl.arange(0, 32, gl.SliceLayout(0, layout))
        tiles = gl.cdiv(gl.maximum(sizes_of(offsets_ptr, offs_h, offs_h < num_groups), 0), BLOCK_M)
        count += gl.sum(gl.where(gl.expand_dims(offs_h, 0) <= offs_g, gl.expand_dims(tiles, 0), 0), axis=1)
    ends.store(count)


@gluon.jit
def read_ends(ends):
    """[GROUPS], the same in every warp."""
    layout: gl.constexpr = gl.BlockedLayout([ends.shape[0] // 32], [32], [gl.num_warps()], [0])
    return ends.load(layout)


@gluon.jit
def tile_of_groups(offsets_ptr, ends, tile, num_n, BLOCK_M: gl.constexpr, BAND: gl.constexpr):
    """(group, first row, rows of the group from there on, n) of a tile, as in `persistent_schedule`. No warp needs
    another one."""
    counted = read_ends(ends)
    before = counted * num_n <= tile
    group = gl.sum(before.to(gl.int32), axis=0)
    first = gl.max(gl.where(before, counted, 0), axis=0) * num_n
    begin = gl.load(offsets_ptr + group)
    size = (gl.load(offsets_ptr + group + 1) - begin).to(gl.int32)
    m, n = tile_in_even_bands(tile - first, gl.cdiv(size, BLOCK_M), num_n, BAND)
    return group, begin + m * BLOCK_M, size - m * BLOCK_M, n


@gluon.jit
def put(queue, turn, tile):
    """The tile that this program takes in this turn, to all who `take` it."""
    _counter_ptr, numbers, handed = queue
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    numbers.index(turn % SLOTS).store(gl.full([1], tile, gl.int32, layout))
    mbarrier.arrive(handed.index(turn % SLOTS))


@gluon.jit
def take(queue, turn):
    counter_ptr, numbers, handed = queue
    if counter_ptr is None:
        tile = gl.program_id(0) + turn * gl.num_programs(0)
    else:
        mbarrier.wait(handed.index(turn % SLOTS), turn // SLOTS & 1)
        layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
        tile = gl.sum(numbers.index(turn % SLOTS).load(layout), axis=0)
    return tile
