"""Which tile a program of a kernel in Gluon takes next, and how its warps come to know.

Tiles take different times, so programs take the next one when they are free. The loading warp takes its number from a
counter in memory, finds what tile that is, and hands it on to all other roles in shared memory, by slots in turn:
`handed` of a slot passes once it is written, `taken` once all have read it. Without a counter a program takes the tiles
that the number of programs are apart.

The order of tiles: `persistent_schedule`.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# G groups

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ops.kernels.grouped_gemm.persistent_schedule import tile_in_even_bands
from recipes.triton.names_gluon import reinterpret

SLOTS = gl.constexpr(8)


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
def tile_of_groups(
    offsets_ptr, ends, tile, num_n, BLOCK_M: gl.constexpr, BAND: gl.constexpr, ACROSS: gl.constexpr = False
):  # fmt: skip
    """(group, first row, rows of the group from there on, n) of a tile, as in `persistent_schedule`. No warp needs
    another one. ACROSS: with m and n exchanged."""
    counted = read_ends(ends)
    before = counted * num_n <= tile
    group = gl.sum(before.to(gl.int32), axis=0)
    first = gl.max(gl.where(before, counted, 0), axis=0) * num_n
    begin = gl.load(offsets_ptr + group)
    size = (gl.load(offsets_ptr + group + 1) - begin).to(gl.int32)
    num_m = gl.cdiv(size, BLOCK_M)
    if ACROSS:
        n, m = tile_in_even_bands(tile - first, num_n, num_m, BAND)
    else:
        m, n = tile_in_even_bands(tile - first, num_m, num_n, BAND)
    return group, begin + m * BLOCK_M, size - m * BLOCK_M, n


@gluon.jit
def rank_groups(offsets_ptr, num_groups, ranks, MIXED: gl.constexpr):
    """Writes to `ranks` [GROUPS] the place of each group in the order of `persistent_schedule`; GROUPS for no group.
    MIXED: small groups come between the large ones.

    Of the warps of the program, before it is divided into roles.
    """
    GROUPS: gl.constexpr = ranks.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([GROUPS // 128, 32], [32, 1], [4, 1], [1, 0])
    offs_g = gl.arange(0, GROUPS, gl.SliceLayout(1, layout))
    mask_g = offs_g < num_groups
    size_g = sizes_of(offsets_ptr, offs_g, mask_g)
    larger = gl.zeros([GROUPS], gl.int32, gl.SliceLayout(1, layout))  # groups, or as large and before it
    rows = gl.zeros([GROUPS], gl.int64, gl.SliceLayout(1, layout))  # of these
    all_rows = gl.load(offsets_ptr + num_groups)
    for start in range(0, num_groups, 32):
        offs_h = start + gl.arange(0, 32, gl.SliceLayout(0, layout))
        size_h = gl.expand_dims(sizes_of(offsets_ptr, offs_h, offs_h < num_groups), 0)
        tie = (size_h == gl.expand_dims(size_g, 1)) & (gl.expand_dims(offs_h, 0) < gl.expand_dims(offs_g, 1))
        is_larger = (size_h > gl.expand_dims(size_g, 1)) | tie
        larger += gl.sum(is_larger.to(gl.int32), axis=1)
        if MIXED:
            rows += gl.sum(gl.where(is_larger, size_h, 0).to(gl.int64), axis=1)
    if MIXED:
        larger = _mixed(size_g, mask_g, larger, rows, all_rows, num_groups, ranks)
    ranks.store(gl.where(mask_g, larger, GROUPS))


@gluon.jit
def _mixed(size_g, mask_g, larger, rows, all_rows, num_groups, ranks):
    """The places of groups of these sizes, of which so many others, with so many rows, are larger."""
    GROUPS: gl.constexpr = ranks.shape[0]
    layout: gl.constexpr = larger.type.layout.parent
    is_large = size_g.to(gl.int64) * num_groups > all_rows
    # How many small groups come before: of a large group by the share of the rows that those before it have.
    share = gl.cdiv(rows * num_groups, gl.maximum(all_rows, 1)).to(gl.int32)
    smaller = gl.where(is_large, share, num_groups - 1) - larger
    key = (2 * smaller + 1 - is_large.to(gl.int32)) * GROUPS + larger  # of each group another one
    ranks.store(gl.where(mask_g, key, 0x7FFFFFFF))
    keys = reinterpret(ranks, gl.int32, [GROUPS // 32, 32], ranks.layout)
    key_g = gl.expand_dims(ranks.load(gl.SliceLayout(1, layout)), 1)
    count = gl.zeros([GROUPS], gl.int32, gl.SliceLayout(1, layout))
    for start in range(0, num_groups, 32):
        key_h = gl.expand_dims(keys.index(start // 32).load(gl.SliceLayout(0, layout)), 0)
        count += gl.sum((key_h < key_g).to(gl.int32), axis=1)
    return count


@gluon.jit
def sizes_of(offsets_ptr, offs_g, mask_g):
    """Of these groups; -1 where there is none."""
    begin = gl.load(offsets_ptr + offs_g, mask=mask_g, other=1)
    return (gl.load(offsets_ptr + offs_g + 1, mask=mask_g, other=0) - begin).to(gl.int32)


@gluon.jit
def find_group(offsets_ptr, ranks, rank):
    """(group, first row, size) of the group with this rank. No warp needs another one."""
    GROUPS: gl.constexpr = ranks.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([GROUPS // 32], [32], [gl.num_warps()], [0])
    group = gl.sum(gl.where(ranks.load(layout) == rank, gl.arange(0, GROUPS, layout), 0), axis=0)
    first = gl.load(offsets_ptr + group)
    return group, first, (gl.load(offsets_ptr + group + 1) - first).to(gl.int32)


@gluon.jit
def make_queue(NUMBERS: gl.constexpr, TAKERS: gl.constexpr):
    """Slots for so many numbers about a tile, for so many roles."""
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    slots = gl.allocate_shared_memory(gl.int32, [NUMBERS * SLOTS, 1], plain)
    handed = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(handed.index(i), count=1)
        mbarrier.init(taken.index(i), count=TAKERS)
    return slots, handed, taken


@gluon.jit
def ask_next(counter_ptr):
    """Asks for the number of the next tile, for `next_tile`: nothing waits for it before."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, lanes)
    one = gl.full([32], 1, gl.int32, lanes)
    return gl.atomic_add(counter_ptr + lane, one, mask=lane == 0, sem="relaxed")


@gluon.jit
def next_tile(asked):
    lane = gl.arange(0, 32, asked.type.layout)
    return gl.num_programs(0) + gl.sum(gl.where(lane == 0, asked, 0), axis=0)


@gluon.jit
def hand(queue, turn, numbers):
    """Hands a tuple of int32 on to all who `take` it in this turn. The first is -1 if there is no tile any more."""
    slots, handed, taken = queue
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = turn % SLOTS
    mbarrier.wait(taken.index(slot), (turn // SLOTS & 1) ^ 1)
    for i in gl.static_range(len(numbers)):
        slots.index(len(numbers) * slot + i).store(gl.full([1], numbers[i], gl.int32, layout))
    mbarrier.arrive(handed.index(slot))


@gluon.jit
def take(queue, turn):
    """What `hand` was given for this turn."""
    slots, handed, taken = queue
    NUMBERS: gl.constexpr = slots.shape[0] // SLOTS
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    slot = turn % SLOTS
    mbarrier.wait(handed.index(slot), turn // SLOTS & 1)
    numbers = ()
    for i in gl.static_range(NUMBERS):
        numbers = numbers + (gl.sum(slots.index(NUMBERS * slot + i).load(layout), axis=0),)  # noqa: RUF005
    mbarrier.arrive(taken.index(slot))
    return numbers
