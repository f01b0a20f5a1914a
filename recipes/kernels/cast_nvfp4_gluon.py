"""The kernel of `cast_nvfp4` in Gluon, for Hopper and columnwise copies of bfloat16, with or without the rowwise one,
rounded to nearest: whole lines of x go to shared memory.

A program has four blocks of 16 rows as padded, each of one group, and 64 columns a warp:

    x -> boxes [4, 16, C] -> the rows of one block after the other      -> rowwise codes, a line of 128 bytes at a time
                          -> a pair of columns a thread, block by block -> columnwise codes, 32 bytes of a column

(Of 16x16 blocks the rowwise codes are written by 32 bytes: a warp then has all rows of a block.)

So x is read once, by the copy engine, and a column is read by whole lines where global memory would give single units
of 32 bytes. On an H200, [65536, 7168], both copies with their amaxes: 638 us in a run where the kernel in Triton took
689; columnwise ones alone 543 and 645. More than one tile a program, the next one fetched while one is cast, was slower
(in an older kernel 706 us with two and 770 with four, 656 with one): perhaps since the rows of programs that are at
work together then lie further apart. Stochastic rounding is not here, where it took as long as in Triton.

What is computed is in `nvfp4_blocks_triton`, whose functions are compiled as Gluon here. Import this only where
`recipes.kernels.gluon_gate.why_no_gluon` says None.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from recipes.kernels.cast_nvfp4_triton import first_block_of, in_four, place_of, store
from recipes.kernels.nvfp4_blocks_triton import (
    cast_blocks,
    encoding,
    hadamard,
    halves,
    is_ordinary,
    larger_of_pair,
    larger_pair,
    largest_bits,
    random_words,
    signs_of_pairs,
)

BOX_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
WORDS_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))
# The four codes of a column, $3 to $6. A thread gives its neighbour, $2 says which of the two it is, half of its own
# for half of that one's: so they write a whole unit at $1, of the first one's column, and one at $7, of the other's.
# $8: whether they are there.
STORE_COLUMNS = gl.constexpr("""{
            .reg .pred odd, there;
            .reg .b32 low, high;
            .reg .b64 x, y, a, b;
            setp.ne.b32 odd, $2, 0;
            setp.ne.b32 there, $8, 0;
            selp.b64 x, $3, $5, odd;
            selp.b64 y, $4, $6, odd;
            mov.b64 {low, high}, x;
            shfl.sync.bfly.b32 low, low, 1, 31, -1;
            shfl.sync.bfly.b32 high, high, 1, 31, -1;
            mov.b64 x, {low, high};
            mov.b64 {low, high}, y;
            shfl.sync.bfly.b32 low, low, 1, 31, -1;
            shfl.sync.bfly.b32 high, high, 1, 31, -1;
            mov.b64 y, {low, high};
            selp.b64 a, x, $3, odd;
            selp.b64 b, y, $4, odd;
            @there st.global.v2.b64 [$1], {a, b};
            selp.b64 a, $5, x, odd;
            selp.b64 b, $6, y, odd;
            @there st.global.v2.b64 [$7], {a, b};
            mov.b32 $0, 0;
            }""")
STORE_SCALES = gl.constexpr("""{
            .reg .pred there;
            .reg .b32 low, high;
            setp.ne.b32 there, $6, 0;
            prmt.b32 low, $2, $3, 0x0040;
            prmt.b32 high, $4, $5, 0x0040;
            prmt.b32 low, low, high, 0x5410;
            @there st.global.b32 [$1], low;
            mov.b32 $0, 0;
            }""")

# --------------------------------------------------------------------------------------------------------- layouts
# Of R = 16 rows a warp: row r is row r % 16 of the block, its columns are those of warp r // 16, 32 words of two.


@triton.constexpr_function
def rows_layout(SQUARE, W):
    """[16 W, 32] words: a thread has two blocks, of 8 words in rows 8 apart; a warp four blocks beside each other, of
    neighbouring rows and of the columns of four warps: 128 bytes of codes. If SQUARE, it has all of 16 rows."""
    columns, rows = [[16 << i, 0] for i in range(W.bit_length() - 1)], [[2, 0], [4, 0]]
    lanes = [[0, 8], [0, 16], [1, 0]]
    lanes, warps = (lanes + rows, columns) if SQUARE else (lanes + columns[:2], rows + columns[2:])
    return gl.DistributedLinearLayout([[0, 1], [0, 2], [0, 4], [8, 0]], lanes, warps, [], [16 * W, 32])


@triton.constexpr_function
def blocks_layout(SQUARE, W):
    """[16 W, 4] blocks of 8 words, as `rows_layout` has them."""
    words = rows_layout(SQUARE, W)
    lanes = [[row, word // 8] for row, word in words.lane_bases]
    return gl.DistributedLinearLayout([[8, 0]], lanes, words.warp_bases, [], [16 * W, 4])


@gluon.jit
def in_eight(x):
    """x [R, C, 8] as eight tensors [R, C]."""
    even, odd = x.reshape([x.shape[0], x.shape[1], 4, 2]).split()
    x0, x2, x4, x6 = in_four(even)
    x1, x3, x5, x7 = in_four(odd)
    return x0, x1, x2, x3, x4, x5, x6, x7


@gluon.jit
def in_sixteen(x):
    """x [R, C, 16] as sixteen tensors [R, C]."""
    even, odd = x.reshape([x.shape[0], x.shape[1], 8, 2]).split()
    x0, x2, x4, x6, x8, x10, x12, x14 = in_eight(even)
    x1, x3, x5, x7, x9, x11, x13, x15 = in_eight(odd)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15


# ---------------------------------------------------------------------------------------------------------- copies


@gluon.jit
def cast_rows(words, encode, decode, seed, block, row, SQUARE: gl.constexpr, ORDINARY: gl.constexpr):
    """Codes and scales [R, 4] of words [R, 32]. encode, decode: `encoding` of the amax. With a seed rounded at random,
    as blocks `block` of rows `row` of the group."""
    pairs = in_eight(words.reshape([words.shape[0], 4, 8]))
    xs = ()
    for i in gl.static_range(8):
        xs = xs + halves(pairs[i])
    amax = larger_of_pair(largest_pair(pairs))
    if SQUARE:
        amax = over(amax.reshape([amax.shape[0] // 16, 16, 4]), 1, amax)
    if seed is None:
        signs = (signs_of_pairs(*pairs[:4]), signs_of_pairs(*pairs[4:]))
        return cast_blocks(xs, amax, encode, decode, None, signs, 1.0, False, True, ORDINARY)
    else:
        random = random_words(
            seed, gl.convert_layout(block, amax.type.layout), gl.convert_layout(row, amax.type.layout), 0
        )  # fmt: skip
        return cast_blocks(xs, amax, encode, decode, random, None, 1.0, True, True, ORDINARY)


@gluon.jit
def cast_columns(
    words, second, encode, decode, seed, block, column, RHT: gl.constexpr, SQUARE: gl.constexpr, ORDINARY: gl.constexpr
):  # fmt: skip
    """Codes and scales [W, 32] of the first columns of words [R, 32], or of the second ones if `second` is 1, not 0.
    With a seed rounded at random, as block `block` of columns `column`."""
    W: gl.constexpr = words.shape[0] // 16
    pairs = in_sixteen(words.reshape([W, 16, 32]).permute([0, 2, 1]))
    xs = ()
    for i in gl.static_range(16):
        number = gl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [pairs[i], 0x1044 + second * 0x2200], dtype=gl.uint32, is_pure=True,
            pack=1,
        )  # fmt: skip
        xs = xs + (number.to(gl.float32, bitcast=True),)  # type: ignore[assignment]  # noqa: RUF005
    if RHT:
        xs, amax = hadamard(xs, ORDINARY)
    elif SQUARE:
        amax = larger_of_pair(largest_pair(pairs))
        amax = over(amax.reshape([W, 4, 8]), 2, amax)
    else:
        amax = largest_bits(xs)
    PART: gl.constexpr = 0.25 if RHT else 1.0
    random = None
    if seed is not None:
        random = random_words(seed, block, gl.convert_layout(column, amax.type.layout), 1)
    return cast_blocks(
        xs, amax, encode, decode, random, (None, None), PART, seed is not None, True, ORDINARY
    )  # fmt: skip


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
# few, take the instructions of the others. With a path of their own 40 groups at random took 489 us on an H200, and
# with entries take 467, though groups without such tiles took 444 and take 453 (perhaps instructions that few programs
# run are not in the cache).


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
def write_rows(
    words, entries, column, seed, codes_ptr, scale_ptr, K: gl.constexpr, SQUARE: gl.constexpr, ORDINARY: gl.constexpr
):  # fmt: skip
    """The rowwise copy of a tile, from this column on. ORDINARY: its amaxes are."""
    W: gl.constexpr = gl.num_warps()
    BLOCKS: gl.constexpr = K // 16
    of_words: gl.constexpr = rows_layout(SQUARE, W)
    of_blocks: gl.constexpr = blocks_layout(SQUARE, W)
    lane = gl.expand_dims(gl.arange(0, 16 * W, gl.SliceLayout(1, of_blocks)), 1)
    block = column // 16 + lane // 16 * 4 + gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, of_blocks)), 0)
    lane = lane % 16 + 0 * block
    lane_if_there = gl.where(block < BLOCKS, lane, 1 << 30)
    for i in range(4):
        entry = entry_of(entries, i)
        encode = in_entry(3, entry).to(gl.float32, bitcast=True)
        decode = in_entry(4, entry).to(gl.float32, bitcast=True)
        row = in_entry(7, entry) + lane
        code, scale = cast_rows(
            words.index(i).load(of_words), encode, decode, seed, block + 0 * lane, row, SQUARE, ORDINARY
        )  # fmt: skip
        mask = gl.convert_layout(lane_if_there < in_entry(1, entry), code.type.layout)
        at = gl.convert_layout(lane * BLOCKS + block, code.type.layout)
        at = in_entry(0, entry).to(gl.int64) * BLOCKS + at
        store(codes_ptr.to(gl.pointer_type(gl.int64)) + at, code, mask, False)
        store(scale_ptr + at, scale, mask, False)


@gluon.jit
def write_columns(
    words, entries, column, seed, codes_ptr, scale_ptr, first_place, BLOCKS, K: gl.constexpr, RHT: gl.constexpr,
    SQUARE: gl.constexpr, ORDINARY: gl.constexpr,
):  # fmt: skip
    """The columnwise copy, as `write_rows`; BLOCKS of a column, the tile's first one at `first_place`. Of a pair of
    columns one after the other, in a loop: twice as many instructions stay in the cache less well."""
    W: gl.constexpr = gl.num_warps()
    of_words: gl.constexpr = gl.BlockedLayout([16, 1], [1, 32], [W, 1], [1, 0])
    of_pairs: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [W, 1], [1, 0])
    pair = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, of_pairs)), 0)
    pair += 32 * gl.expand_dims(gl.arange(0, W, gl.SliceLayout(1, of_pairs)), 1)
    for second in range(2):
        codes, scales = (), ()
        for i in gl.static_range(4):
            entry = entry_of(entries, i)
            encode = in_entry(5, entry).to(gl.float32, bitcast=True)
            decode = in_entry(6, entry).to(gl.float32, bitcast=True)
            block = in_entry(7, entry) // 16
            code, scale = cast_columns(
                words.index(i).load(of_words), second, encode, decode, seed, block, column + 2 * pair + second, RHT,
                SQUARE, ORDINARY,
            )  # fmt: skip
            codes = codes + (code,)  # type: ignore[assignment]  # noqa: RUF005
            scales = scales + (scale,)  # type: ignore[assignment]  # noqa: RUF005
        here = gl.convert_layout(pair, code.type.layout)
        is_there = (column + 2 * here < K).to(gl.int32)
        place = first_place + (2 * here + second).to(gl.int64) * BLOCKS
        odd = here % 2
        own = codes_ptr + (place + odd * (2 - 2 * BLOCKS))
        gl.inline_asm_elementwise(
            STORE_COLUMNS, "=r,l,r,l,l,l,l,l,r",
            [own.to(gl.int64), odd, codes[0], codes[1], codes[2], codes[3],  # type: ignore[misc]
             (own + 2 * BLOCKS).to(gl.int64), is_there],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip
        gl.inline_asm_elementwise(
            STORE_SCALES, "=r,l,r,r,r,r,r",
            [(scale_ptr + place).to(gl.int64), scales[0], scales[1], scales[2], scales[3], is_there],  # type: ignore[misc]
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


# ---------------------------------------------------------------------------------------------------------- kernel


@gluon.jit
def cast_nvfp4_gluon_kernel(
    x, offsets_ptr, aligned_ptr, row_amax_ptr, column_amax_ptr, seed_ptr, row_codes_ptr, row_scale_ptr,
    column_codes_ptr, column_scale_ptr, ROWS, num_groups, BLOCKS, K: gl.constexpr, STACKED: gl.constexpr,
    RHT: gl.constexpr, SQUARE: gl.constexpr, CHUNK: gl.constexpr,
):  # fmt: skip
    """As `cast_nvfp4_kernel`, to nearest, with one amax for a tensor or a group. x: a descriptor of boxes of 16 rows.

    BLOCKS is a multiple of 4, K one of 16. CHUNK: groups that a warp looks at at a time, 32 or more.
    """
    W: gl.constexpr = gl.num_warps()
    C: gl.constexpr = 64 * W
    column = gl.program_id(1) * C
    # The last rows first, of which the amax was taken last.
    band = gl.num_programs(2) - 1 - gl.program_id(2)
    matrix, first_block = first_block_of(band, BLOCKS, STACKED, 4)
    if (first_block < BLOCKS) & (matrix < num_groups):
        boxes = gl.allocate_shared_memory(gl.bfloat16, [4, 16, C], BOX_LAYOUT)
        words = boxes._reinterpret(gl.uint32, [4, 16 * W, 32], WORDS_LAYOUT)
        table = gl.allocate_shared_memory(gl.int32, [4, 8], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
        entries = table._reinterpret(gl.int32, [4, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=1)
        fence_async_shared()
        mbarrier.expect(ready, 4 * 16 * C * 2)
        offs_g = gl.arange(0, CHUNK, gl.BlockedLayout([CHUNK // 32], [32], [W], [0]))
        place = place_of(offs_g, offsets_ptr, aligned_ptr, matrix, first_block, ROWS, num_groups)
        group, row, first, counted, written = place
        is_whole = counted >= 64
        block = gl.arange(0, 4, gl.BlockedLayout([1], [32], [W], [0]))
        groups, rows, firsts = group + 0 * block, row + 16 * block, first + 16 * block
        counts, heights = counted - 16 * block, written - 16 * block
        for i in range(4):
            of_x = first + 16 * i
            if not is_whole:
                place = place_of(offs_g, offsets_ptr, aligned_ptr, matrix, first_block + i, ROWS, num_groups)
                of_x = place[2]
                groups, firsts = gl.where(block == i, place[0], groups), gl.where(block == i, of_x, firsts)
                counts, heights = gl.where(block == i, place[3], counts), gl.where(block == i, place[4], heights)
                rows = gl.where(block == i, place[1], rows)
            tma.async_copy_global_to_shared(x, [of_x, column], ready, boxes.index(i))
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
        gl.thread_barrier()
        mbarrier.wait(ready, 0)
        if not is_whole:  # no rows but those that count
            of_words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W, 1], [1, 0])
            lane = gl.expand_dims(gl.arange(0, 16 * W, gl.SliceLayout(1, of_words)), 1) % 16
            for i in range(4):
                count = in_entry(2, entry_of(entries, i))
                words.index(i).store(gl.where(lane < count, words.index(i).load(of_words), 0))
            gl.thread_barrier()
        seed = None
        if seed_ptr is not None:
            seed = gl.load(seed_ptr)
        column_place = (matrix.to(gl.int64) * K + column) * BLOCKS + first_block
        if ordinary:
            if row_amax_ptr is not None:
                write_rows(words, entries, column, seed, row_codes_ptr, row_scale_ptr, K, SQUARE, True)
            write_columns(
                words, entries, column, seed, column_codes_ptr, column_scale_ptr, column_place, BLOCKS, K, RHT, SQUARE,
                True,
            )  # fmt: skip
        else:
            if row_amax_ptr is not None:
                write_rows(words, entries, column, seed, row_codes_ptr, row_scale_ptr, K, SQUARE, False)
            write_columns(
                words, entries, column, seed, column_codes_ptr, column_scale_ptr, column_place, BLOCKS, K, RHT, SQUARE,
                False,
            )  # fmt: skip
