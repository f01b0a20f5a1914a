"""The kernel of `cast_nvfp4` in Gluon, for Hopper and columnwise copies of bfloat16, with or without the rowwise one:
whole lines of x go to shared memory.

A program has four blocks of 16 rows as padded, each of one group, and 64 columns a warp. Of one block after the other:

    x -> a box [16, C] -> its rows                  -> rowwise codes, a line of 128 bytes at a time
                       -> a pair of columns a thread -> columnwise codes, which wait where the box was; at the end
                                                        32 bytes of a column

Of a copy whose values are wanted (words of two, int32), each code is decoded where it is: a block of the rowwise copy
by two threads, lines of 128 bytes at a time, the columnwise one row after row.

So x is read once, by the copy engine, and a column is read by whole lines where global memory would give single units
of 32 bytes: 6 to 18 % faster than the kernel in Triton on an H200 (`bench/results/tuning.md`).

What is computed is in `nvfp4_blocks_triton`, whose functions are compiled as Gluon here. Import this only where
`recipes.triton.gates.why_no_gluon` says None.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from recipes.casts.boxes_gluon import BOX_LAYOUT, STORE_COLUMNS, STORE_FOUR, WORDS_LAYOUT, in_eight, in_sixteen
from recipes.casts.cast_nvfp4_triton import first_block_of, place_of, store
from recipes.casts.dequantize_nvfp4_triton import decoded_in_order, decoded_of_two, e4m3_values
from recipes.casts.nvfp4_blocks_triton import (
    cast_blocks,
    encoding,
    hadamard,
    is_ordinary,
    larger_of_pair,
    larger_pair,
    largest_bits,
    random_words,
    rounded_hadamard,
    signs_of_pairs,
)
from recipes.triton.barriers_gluon import invalidate
from recipes.triton.gates import triton
from recipes.triton.names_gluon import barrier, reinterpret, tma_load
from recipes.triton.rounding import unpack_pairs

STORE_SCALES = gl.constexpr("""{
            .reg .pred there;
            setp.ne.b32 there, $3, 0;
            @there st.global.b32 [$1], $2;
            mov.b32 $0, 0;
            }""")
# The same number, hidden from ptxas, which would otherwise move what follows from it out of a loop.
AGAIN = gl.constexpr("mov.b32 $0, $1;")

# --------------------------------------------------------------------------------------------------------- layouts
# Of R = 16 W rows, W warps: row r is row r % 16 of the block, its columns are those of warp r // 16, 32 words of two.


@triton.constexpr_function
def rows_layout(PLACES, W):
    """[16 W, 32] words: a thread has two blocks, of 8 words in rows 8 apart; a warp four blocks beside each other, of
    neighbouring rows and of the columns of four warps: 128 bytes of codes. If PLACES, it has all of 16 rows and 64
    columns, a thread the rows k and k + 8 of a place of 16x16, of whose columns it has 2 k and 2 k + 1."""
    columns = [[16 << i, 0] for i in range(W.bit_length() - 1)]
    beside, rows = [[0, 8], [0, 16]], [[1, 0], [2, 0], [4, 0]]
    lanes, warps = (rows + beside, columns) if PLACES else (beside + rows[:1] + columns[:2], rows[1:] + columns[2:])
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [8, 0]], lanes, warps, [], [16 * W, 32])


@triton.constexpr_function
def blocks_layout(PLACES, W):
    """[16 W, 4] blocks of 8 words, as `rows_layout` has them."""
    words = rows_layout(PLACES, W)
    lanes = [[row, word // 8] for row, word in words.lane_bases]
    return gl.DistributedLinearLayout([[8, 0]], lanes, words.warp_bases, [], [16 * W, 4])


@triton.constexpr_function
def halves_layout(PLACES, W):
    """[16 W, 8] halves of these blocks, each moved within its warp: whole lines of their values are beside each other.
    PLACES: as `rows_layout` has them."""
    columns = [[16 << i, 0] for i in range(W.bit_length() - 1)]
    beside, rows = [[0, 1], [0, 2], [0, 4]], [[1, 0], [2, 0], [4, 0], [8, 0]]
    if PLACES:
        return gl.DistributedLinearLayout(rows[2:], beside + rows[:2], columns, [], [16 * W, 8])
    own, shared = [rows[0], rows[3]], rows[1:3]
    return gl.DistributedLinearLayout(own, beside + columns[:2], shared + columns[2:], [], [16 * W, 8])


# ---------------------------------------------------------------------------------------------------------- copies


@gluon.jit
def cast_rows(words, encode, decode, random, SQUARE: gl.constexpr, ORDINARY: gl.constexpr):
    """Codes and scales [R, 4] of words [R, 32]. encode, decode: `encoding` of the amax; random: `random_words` of the
    blocks, None for rounding to nearest."""
    pairs = in_eight(words.reshape([words.shape[0], 4, 8]))
    xs = ()
    for i in gl.static_range(8):
        xs = xs + unpack_pairs(pairs[i])
    amax = larger_of_pair(largest_pair(pairs))
    if SQUARE:
        amax = over(amax.reshape([amax.shape[0] // 16, 16, 4]), 1, amax)
    if random is None:
        signs = (signs_of_pairs(*pairs[:4]), signs_of_pairs(*pairs[4:]))
        return cast_blocks(xs, amax, encode, decode, None, signs, 1.0, False, True, ORDINARY)
    else:
        return cast_blocks(xs, amax, encode, decode, relayout_like(random, amax), None, 1.0, True, True, ORDINARY)


@gluon.jit
def cast_columns(
    pairs, SECOND: gl.constexpr, amax, encode, decode, random, RHT: gl.constexpr, ROUND_RHT: gl.constexpr,
    ORDINARY: gl.constexpr,
):  # fmt: skip
    """Codes and scales [W, 32] of the first columns of sixteen tensors [W, 32] of words, or of the second ones. amax:
    the bits of the blocks' amaxes, None if they are the columns' own."""
    xs = ()
    for i in gl.static_range(16):
        xs = xs + (unpack_pairs(pairs[i])[SECOND],)  # type: ignore[assignment]  # noqa: RUF005
    signs = (None, None)
    if ROUND_RHT:
        xs, amax, signs = rounded_hadamard(xs)
    elif RHT:
        xs, amax = hadamard(xs, ORDINARY)
    elif amax is None:
        amax = largest_bits(xs)
    PART: gl.constexpr = 0.25 if RHT else 1.0
    if random is None:
        return cast_blocks(xs, amax, encode, decode, None, signs, PART, False, True, ORDINARY)
    else:
        return cast_blocks(xs, amax, encode, decode, relayout_like(random, amax), None, PART, True, True, ORDINARY)


@gluon.jit
def relayout_like(xs, like):
    """Four tensors laid out as this one is: they are there already."""
    y0 = gl.convert_layout(xs[0], like.type.layout, assert_trivial=True)
    y1 = gl.convert_layout(xs[1], like.type.layout, assert_trivial=True)
    y2 = gl.convert_layout(xs[2], like.type.layout, assert_trivial=True)
    y3 = gl.convert_layout(xs[3], like.type.layout, assert_trivial=True)
    return y0, y1, y2, y3


@gluon.jit
def largest_pair(pairs):
    """Of tensors of words of two bfloat16 numbers."""
    largest = pairs[0]
    for i in gl.static_range(1, len(pairs)):
        largest = larger_pair(largest, pairs[i])
    return largest


@gluon.jit
def over(x, AXIS: gl.constexpr, like):
    """The maximum over an axis, in each of its places, as a tensor like this one."""
    largest = gl.expand_dims(gl.max(x, axis=AXIS), AXIS).broadcast_to(x.shape)
    return gl.convert_layout(largest.reshape(like.shape), like.type.layout)


# ----------------------------------------------------------------------------------------------------------- tiles
# Of each of the four blocks of rows of a tile there is an entry in shared memory: its first row of x, how many rows are
# x's, how many count, `encoding` of its amaxes, and its first row in its group. So tiles of several groups, which are
# few, take the instructions of the others.


@gluon.jit
def write_entries(entries, v0, v1, v2, v3, v4, v5, v6, v7):
    """The tensors [4] in entries [4, 8]."""
    of_even = gl.join(gl.join(v0, v4), gl.join(v2, v6))
    of_odd = gl.join(gl.join(v1, v5), gl.join(v3, v7))
    entries.store(gl.join(of_even, of_odd).reshape([4, 8]))


@gluon.jit
def entry_of(entries, i):
    """The numbers of block i; of floating-point numbers the bits."""
    return entries.index(i).load(gl.BlockedLayout([8], [32], [gl.num_warps()], [0]))


@gluon.jit
def in_entry(k: gl.constexpr, entry):
    """Number k of an entry: every thread has all."""
    return gl.sum(gl.where(gl.arange(0, 8, entry.type.layout) == k, entry, 0), axis=0)


@gluon.jit
def amaxes_of(amax_ptr, groups, num_groups):
    """0 for no group, and for a copy that is not made."""
    if amax_ptr is None:
        return groups * 0.0
    else:
        return gl.load(amax_ptr + groups, mask=groups < num_groups, other=0.0)


@gluon.jit
def numbered(column, LAYOUT: gl.constexpr):
    """Of the blocks of a box, [R, 4], their numbers along K and their rows in the box, which begins at this column."""
    row = gl.expand_dims(gl.arange(0, 16 * gl.num_warps(), gl.SliceLayout(1, LAYOUT)), 1)
    block = column // 16 + row // 16 * 4 + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, LAYOUT)), 0)
    return block, row % 16 + 0 * block


@gluon.jit
def by_lines(entry, column, K: gl.constexpr):
    """Of the blocks of a box, as threads write them, their places in the rowwise copy and whether they are there."""
    BLOCKS: gl.constexpr = K // 16
    block, row = numbered(column, blocks_layout(False, gl.num_warps()))
    mask = (row < in_entry(1, entry)) & (block < BLOCKS)
    return in_entry(0, entry).to(gl.int64) * BLOCKS + (row * BLOCKS + block), mask


@gluon.jit
def of_columns(random):
    """The random words [R, 4] of rows as those of the first and of the second columns of words, [W, 32] each: of row k
    of a place of 16x16 as of column 2 k, of row k + 8 as of column 2 k + 1."""
    W: gl.constexpr = random[0].shape[0] // 16
    first, second = (), ()
    for i in gl.static_range(4):
        x0, x1 = random[i].reshape([W, 2, 8, 4]).permute([0, 3, 2, 1]).split()
        first = first + (x0.reshape([W, 32]),)  # noqa: RUF005
        second = second + (x1.reshape([W, 32]),)  # noqa: RUF005
    return first, second


@gluon.jit
def pushed(scales, scale):
    """Words of four bytes, the lowest one out, and a scale in as the highest."""
    scale = gl.convert_layout(scale, scales.type.layout, assert_trivial=True)
    return (scales >> 8) | (scale.to(gl.uint32, bitcast=True) << 24)


@gluon.jit
def write_row_values(values_ptr, code, scale, entry, column, K: gl.constexpr, PLACES: gl.constexpr):
    """The values of the blocks of a box, [R, 4] codes and scales as `cast_rows` gives them, as words of two."""
    R: gl.constexpr = code.shape[0]
    layout: gl.constexpr = halves_layout(PLACES, R // 16)
    halves = gl.join((code & 0xFFFFFFFF).to(gl.int32), (code >> 32).to(gl.int32)).reshape([R, 8])
    value = e4m3_values(scale.to(gl.uint8))
    halves, value = gl.convert_layout(halves, layout), gl.convert_layout(gl.join(value, value).reshape([R, 8]), layout)
    row = gl.expand_dims(gl.arange(0, R, gl.SliceLayout(1, layout)), 1)
    half = column // 8 + row // 16 * 8 + gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(0, layout)), 0)
    row = row % 16
    is_there = (row < in_entry(1, entry)) & (half < K // 8)
    at = values_ptr + in_entry(0, entry).to(gl.int64) * (K // 2) + (row * (K // 2) + half * 4)
    words = decoded_in_order(halves, value)
    gl.inline_asm_elementwise(
        STORE_FOUR, "=r,l,r,r,r,r,r", [at.to(gl.int64), words[0], words[1], words[2], words[3], is_there.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def write_column_values(values_ptr, code0, scale0, code1, scale1, column, K: gl.constexpr):
    """The values of 16 rows from this place on, which begin at this column: [W, 32] codes and scales of the first and
    of the second columns of words, as words of two."""
    W: gl.constexpr = code0.shape[0]
    pair = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, code0.type.layout)), 0)
    pair += 32 * gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, code0.type.layout)), 1)
    is_there = column + 2 * pair < K
    value0, value1 = e4m3_values(scale0.to(gl.uint8)), e4m3_values(scale1.to(gl.uint8))
    for half in gl.static_range(2):
        low, high = (code0 >> (32 * half)).to(gl.int32), (code1 >> (32 * half)).to(gl.int32)
        words = decoded_of_two(low, high, value0, value1)
        for row in gl.static_range(8):
            gl.store(values_ptr + ((8 * half + row) * (K // 2) + pair), words[row], mask=is_there)


@gluon.jit
def write_tile(
    boxes, entries, column, seed, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr, first_place, BLOCKS,
    K: gl.constexpr, RHT: gl.constexpr, ROUND_RHT: gl.constexpr, SQUARE: gl.constexpr, ORDINARY: gl.constexpr,
):  # fmt: skip
    """Both copies of a tile, from this column on, or the columnwise one if there is no place for the other, which has
    BLOCKS blocks a column, the tile's first one at `first_place`. ORDINARY: the tile's amaxes are.

    Of a copy whose codes are of int32 the values, of which the columnwise ones begin at `first_place`."""
    ROW_VALUES: gl.constexpr = row_codes_ptr is not None and row_codes_ptr.dtype.element_ty == gl.int32
    COLUMN_VALUES: gl.constexpr = column_codes_ptr.dtype.element_ty == gl.int32
    W: gl.constexpr = gl.num_warps()
    PLACES: gl.constexpr = SQUARE or seed is not None
    of_blocks: gl.constexpr = blocks_layout(PLACES, W)
    of_lines: gl.constexpr = blocks_layout(False, W)
    of_words: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [W, 1], [1, 0])
    of_pairs: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    of_two: gl.constexpr = gl.BlockedLayout([1, 1, 2], [1, 32, 1], [W, 1, 1], [2, 1, 0])
    words = reinterpret(boxes, gl.uint32, [4, 16 * W, 32], WORDS_LAYOUT)
    # The columns' codes of a box, in the first quarter of it. To Triton both are the same memory, so it synchronizes
    # all threads after they read x and before these are written, and again before they read on.
    waiting = reinterpret(boxes, gl.int64, [16, W, 32, 2], gl.SwizzledSharedLayout(1, 1, 1, [2, 1, 0]))
    # Of each block of rows a byte, the last one highest.
    row_scales = gl.full([16 * W, 4], 0, gl.uint32, of_blocks)
    scales0 = gl.full([W, 32], 0, gl.uint32, of_pairs)
    scales1 = gl.full([W, 32], 0, gl.uint32, of_pairs)
    for i in range(4):
        # What follows from the column is computed in each turn: kept meanwhile, it would be too many registers.
        column = gl.inline_asm_elementwise(AGAIN, "=r,r", [column], dtype=gl.int32, is_pure=False, pack=1)
        entry = entry_of(entries, i)
        random, random0, random1 = None, None, None
        if seed is not None:
            block, row = numbered(column, of_blocks)
            random = random_words(seed, block, in_entry(7, entry) + row)
            random0, random1 = of_columns(random)
        if row_codes_ptr is not None:
            encode = in_entry(3, entry).to(gl.float32, bitcast=True)
            decode = in_entry(4, entry).to(gl.float32, bitcast=True)
            code, scale = cast_rows(
                words.index(i).load(rows_layout(PLACES, W)), encode, decode, random, SQUARE, ORDINARY
            )  # fmt: skip
            if ROW_VALUES:
                write_row_values(row_codes_ptr, code, scale, entry, column, K, PLACES)
            else:
                at, mask = by_lines(entry, column, K)
                store(row_codes_ptr.to(gl.pointer_type(gl.int64)) + at, gl.convert_layout(code, of_lines), mask, False)
                row_scales = pushed(row_scales, scale)
        encode = in_entry(5, entry).to(gl.float32, bitcast=True)
        decode = in_entry(6, entry).to(gl.float32, bitcast=True)
        pairs = in_sixteen(words.index(i).load(of_words).reshape([W, 16, 32]).permute([0, 2, 1]))
        amax = None
        if SQUARE:
            amax = larger_of_pair(largest_pair(pairs))
            amax = over(amax.reshape([W, 4, 8]), 2, amax)
        code0, scale0 = cast_columns(pairs, 0, amax, encode, decode, random0, RHT, ROUND_RHT, ORDINARY)
        code1, scale1 = cast_columns(pairs, 1, amax, encode, decode, random1, RHT, ROUND_RHT, ORDINARY)
        if COLUMN_VALUES:
            here = column_codes_ptr + (first_place + (16 * i) * (K // 2))
            write_column_values(here, code0, scale0, code1, scale1, column, K)
        else:
            waiting.index(4 * i).store(gl.convert_layout(gl.join(code0, code1), of_two))
            scales0, scales1 = pushed(scales0, scale0), pushed(scales1, scale1)
    if row_codes_ptr is not None and not ROW_VALUES:
        row_scales = gl.convert_layout(row_scales, of_lines).to(gl.int32, bitcast=True)
        for i in range(4):
            at, mask = by_lines(entry_of(entries, i), column, K)
            store(row_scale_ptr + at, row_scales >> 8 * i, mask, False)
    if not COLUMN_VALUES:
        pair = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, of_pairs)), 0)
        pair += 32 * gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, of_pairs)), 1)
        is_there = (column + 2 * pair < K).to(gl.int32)
        odd = pair % 2
        codes0, codes1 = (), ()
        for k in gl.static_range(4):
            code0, code1 = waiting.index(4 * k).load(of_two).split()
            codes0 = codes0 + (gl.convert_layout(code0, of_pairs),)  # type: ignore[assignment]  # noqa: RUF005
            codes1 = codes1 + (gl.convert_layout(code1, of_pairs),)  # type: ignore[assignment]  # noqa: RUF005
        for second in gl.static_range(2):
            codes = codes1 if second else codes0
            place = first_place + (2 * pair + second).to(gl.int64) * BLOCKS
            own = column_codes_ptr + (place + odd * (2 - 2 * BLOCKS))
            gl.inline_asm_elementwise(
                STORE_COLUMNS, "=r,l,r,l,l,l,l,l,r",
                [own.to(gl.int64), odd, codes[0], codes[1], codes[2], codes[3],  # type: ignore[misc]
                 (own + 2 * BLOCKS).to(gl.int64), is_there],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip
            gl.inline_asm_elementwise(
                STORE_SCALES, "=r,l,r,r",
                [(column_scale_ptr + place).to(gl.int64), scales1 if second else scales0, is_there],
                dtype=gl.int32, is_pure=False, pack=1,
            )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def cast_nvfp4_gluon_kernel(
    x, offsets_ptr, aligned_ptr, row_amax_ptr, column_amax_ptr, seed_ptr, row_codes_ptr, row_scale_ptr,
    column_codes_ptr, column_scale_ptr, ROWS, num_groups, BLOCKS, K: gl.constexpr, STACKED: gl.constexpr,
    RHT: gl.constexpr, ROUND_RHT: gl.constexpr, SQUARE: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """As `cast_nvfp4_kernel`, with one amax for a tensor or a group. x: a descriptor of boxes of 16 rows.

    BLOCKS is a multiple of 4, K one of 16. CHUNK: groups that a warp looks at at a time, 32 or more.
    """
    W: gl.constexpr = gl.num_warps()
    C: gl.constexpr = 64 * W
    column = gl.program_id(1) * C
    # The last rows first, of which the amax was taken last.
    band = gl.num_programs(2) - 1 - gl.program_id(2)
    matrix, first_block = first_block_of(band, BLOCKS, STACKED, 4)
    if (first_block < BLOCKS) & (matrix < num_groups):
        # These wait for memory, and x for them, so they come first.
        seed = None
        if seed_ptr is not None:
            seed = gl.load(seed_ptr)
        offs_g = gl.arange(0, CHUNK, gl.BlockedLayout([CHUNK // 32], [32], [W], [0]))
        group, row, first, counted, written = place_of(
            offs_g, offsets_ptr, aligned_ptr, matrix, first_block, ROWS, num_groups
        )  # fmt: skip
        boxes = gl.allocate_shared_memory(gl.bfloat16, [4, 16, C], BOX_LAYOUT)
        table = gl.allocate_shared_memory(gl.int32, [4, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        entries = reinterpret(table, gl.int32, [4, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ready = gl.allocate_shared_memory(gl.int64, [1, 1], mbarrier.MBarrierLayout())
        mbarrier.init(ready.index(0), count=1)
        fence_async_shared()
        mbarrier.expect(ready.index(0), 4 * 16 * C * 2)
        is_whole = counted >= 64
        block = gl.arange(0, 4, gl.BlockedLayout([1], [32], [W], [0]))
        groups, rows, firsts = group + 0 * block, row + 16 * block, first + 16 * block
        counts, heights = counted - 16 * block, written - 16 * block
        for b in gl.static_range(4):
            of_x = first + 16 * b
            if not is_whole:
                place = place_of(offs_g, offsets_ptr, aligned_ptr, matrix, first_block + b, ROWS, num_groups)
                of_x = place[2]
                groups, firsts = gl.where(block == b, place[0], groups), gl.where(block == b, of_x, firsts)
                counts, heights = gl.where(block == b, place[3], counts), gl.where(block == b, place[4], heights)
                rows = gl.where(block == b, place[1], rows)
            tma_load(x, [of_x, column], ready.index(0), boxes.index(b))
        row_amaxes = amaxes_of(row_amax_ptr, groups, num_groups)
        column_amaxes = amaxes_of(column_amax_ptr, groups, num_groups)
        is_other = (is_ordinary(row_amaxes) & is_ordinary(column_amaxes)) ^ True
        ordinary = gl.sum(is_other.to(gl.int32), axis=0) == 0
        if ordinary:
            row_encodes, row_decodes = encoding(row_amaxes, True)
            column_encodes, column_decodes = encoding(column_amaxes, True)
        else:
            row_encodes, row_decodes = encoding(row_amaxes, False)
            column_encodes, column_decodes = encoding(column_amaxes, False)
        write_entries(
            table, firsts, heights, counts, row_encodes.to(gl.int32, bitcast=True),
            row_decodes.to(gl.int32, bitcast=True), column_encodes.to(gl.int32, bitcast=True),
            column_decodes.to(gl.int32, bitcast=True), rows,
        )  # fmt: skip
        barrier()
        mbarrier.wait(ready.index(0), 0)
        if not is_whole:  # no rows but those that count
            words = reinterpret(boxes, gl.uint32, [4, 16 * W, 32], WORDS_LAYOUT)
            of_words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W, 1], [1, 0])
            lane = gl.expand_dims(gl.arange(0, 16 * W, gl.SliceLayout(1, of_words)), 1) % 16
            for i in range(4):
                count = in_entry(2, entry_of(entries, i))
                words.index(i).store(gl.where(lane < count, words.index(i).load(of_words), 0))
            barrier()
        column_place = (matrix.to(gl.int64) * K + column) * BLOCKS + first_block
        if column_codes_ptr.dtype.element_ty == gl.int32:  # values, in words of two
            column_place = (matrix.to(gl.int64) * BLOCKS + first_block) * (8 * K) + column // 2
        if ordinary:
            write_tile(
                boxes, entries, column, seed, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr,
                column_place, BLOCKS, K, RHT, ROUND_RHT, SQUARE, True,
            )  # fmt: skip
        else:
            write_tile(
                boxes, entries, column, seed, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr,
                column_place, BLOCKS, K, RHT, ROUND_RHT, SQUARE, False,
            )  # fmt: skip
        invalidate(ready)
