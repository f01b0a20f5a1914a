"""What kernels in Gluon that cast to FP8 with one scale a group share: which rows a program has, amaxes and scales, and
the codes of a tile of bfloat16 numbers in shared memory.

A tile is [64, 128]; read as words of two numbers, [128, 32], it has 64 rows of the first 64 columns, and the same rows
of the others. Four warps write its codes. Of columnwise ones a thread has four columns of 16 rows: it casts four
columns of a row to a word, transposes the words of four rows, and with its neighbour writes whole units of 32 bytes.
Where both copies are made, these words are the rowwise one.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from recipes.casts.boxes_gluon import PLAIN_LAYOUT, STORE_FOUR, in_eight, in_sixteen
from recipes.casts.cast_float8_triton import scale_of_amax
from recipes.casts.cast_nvfp4_triton import split_in_four
from recipes.casts.float8_elements_triton import float8_words, transposed_bytes
from recipes.triton.meeting import known_amax, meeting_of
from recipes.triton.names_gluon import reinterpret
from recipes.triton.rounding import unpack_pairs

_ROWS = gl.constexpr(64)
_PADDING = gl.constexpr(32)  # `PADDING` of cast_float8_triton
# Of pairs the larger magnitudes, with any sign; a number wins over NaN.
LARGER_PAIR = gl.constexpr("max.xorsign.abs.bf16x2 $0, $1, $2;")
LARGER_OF_PAIR = gl.constexpr("""{
            .reg .f32 low, high;
            shl.b32 low, $1, 16;
            and.b32 high, $1, 0xffff0000;
            abs.f32 low, low;
            abs.f32 high, high;
            max.f32 $0, low, high;
            }""")


# ---------------------------------------------------------------------------------------------------------- groups


@gluon.jit
def group_of_slot(offsets_ptr, aligned_ptr, slot, LOG2_ROWS, T, places, num_groups):
    """Of a slot of 2^LOG2_ROWS rows (`recipes.triton.row_slots`): its group, the group's first row and the row behind
    its last, its first place in columnwise codes and the place behind its last. aligned_ptr: None without such codes.

    Of the groups that begin at or before the slot the last one owns it. Each warp reads them all, and their maxima and
    the others' minima take the place of a second read.
    """
    offs = gl.arange(0, 128, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    end = T + _PADDING * num_groups
    tail = gl.load(offsets_ptr + num_groups).to(gl.int32)
    is_tail = (tail >> LOG2_ROWS) + num_groups <= slot
    group = gl.where(is_tail, 0, -1)
    begin = gl.where(is_tail, tail, 0)
    end = gl.where(is_tail, end, gl.minimum(end, tail))
    place, behind = 0, places
    if aligned_ptr is not None:
        place_of_tail = gl.load(aligned_ptr + num_groups).to(gl.int32)
        place = gl.where(is_tail, place_of_tail, 0)
        behind = gl.where(is_tail, places, gl.minimum(places, place_of_tail))
    for start in range(0, num_groups, 128):  # 128 are read at once
        offs_g = start + offs
        there = offs_g < num_groups
        begins = gl.load(offsets_ptr + offs_g, mask=there, other=0).to(gl.int32)
        owns = there & ((begins >> LOG2_ROWS) + offs_g <= slot)
        later = there & ((begins >> LOG2_ROWS) + offs_g > slot)
        if aligned_ptr is not None:
            places_g = gl.load(aligned_ptr + offs_g, mask=there, other=0).to(gl.int32)
            place = gl.maximum(place, gl.max(gl.where(owns, places_g, 0), axis=0))
            behind = gl.minimum(behind, gl.min(gl.where(later, places_g, behind), axis=0))
        group += gl.sum(owns.to(gl.int32), axis=0)
        begin = gl.maximum(begin, gl.max(gl.where(owns, begins, 0), axis=0))
        end = gl.minimum(end, gl.min(gl.where(later, begins, end), axis=0))
    return group, begin, end, place, behind


@gluon.jit
def share_of_group(offsets_ptr, aligned_ptr, T, places, num_groups, column_blocks, programs, LOG2_ROWS):
    """Of a program, whose tiles are each so-manieth of one group's: the group, which of the group's programs it is, and
    how many these are: one for each 2^LOG2_ROWS rows and block of columns, but at most `programs`. The group's first
    row and how many it has, its first place in columnwise codes and how many it has there."""
    group, begin, end, place, behind = group_of_slot(
        offsets_ptr, aligned_ptr, gl.program_id(0) // column_blocks, LOG2_ROWS, T, places, num_groups
    )
    slot = gl.program_id(0) // column_blocks - (begin >> LOG2_ROWS) - group
    worker = slot * column_blocks + gl.program_id(0) % column_blocks
    workers = ((end - begin + (1 << LOG2_ROWS) - 1) >> LOG2_ROWS) * column_blocks
    workers = gl.where(group < num_groups, gl.minimum(workers, programs), workers)
    if aligned_ptr is None:
        place, behind = begin, begin
    return group, worker, workers, begin, gl.minimum(end, T) - begin, place, behind - place


@gluon.jit
def tile_of_rows(offsets_ptr, aligned_ptr, slot, T, places, num_groups):
    """Of a slot of 64 rows: its group, first row and how many are there, first place in columnwise codes and how many
    are left; the group's first row, and how many rows it has."""
    group, begin, end, start, behind = group_of_slot(offsets_ptr, aligned_ptr, slot, 6, T, places, num_groups)
    row = (slot - (begin >> 6) - group) * _ROWS  # in the group
    end = gl.minimum(end, T)
    place, left = begin + row, 0
    if aligned_ptr is not None:
        place = start + row
        left = gl.maximum(gl.minimum(behind - place, _ROWS), 0)
    height = gl.maximum(gl.minimum(end - begin - row, _ROWS), 0)
    return group, (begin + row).to(gl.int64), height, place.to(gl.int64), left, begin, end - begin


@gluon.jit
def rows_of(offsets_ptr, group, T, num_groups):
    """How many rows a group has; of the tail any number."""
    end = gl.load(offsets_ptr + group + 1, mask=group < num_groups, other=0)
    return gl.minimum(end, T) - gl.load(offsets_ptr + group)


@gluon.jit
def store_inverses(
    scale_inv_ptr, source_ptr, offsets_ptr, T, num_groups, CAST: gl.constexpr, FORM: gl.constexpr, RULE: gl.constexpr
):  # fmt: skip
    """1 / scale of all groups; where they meet, of those without rows."""
    offs = gl.arange(0, 128, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    for start in range(0, num_groups, 128):
        offs_g = start + offs
        stored = offs_g < num_groups
        if CAST == "given":
            scale = gl.load(source_ptr + offs_g, mask=stored, other=1.0)
        elif CAST == "known":
            scale = scale_of_amax(known_amax(meeting_of(source_ptr, offs_g), stored), RULE[1], FORM, RULE[0])
        else:
            if offsets_ptr is None:
                stored &= T == 0
            else:
                begins = gl.minimum(gl.load(offsets_ptr + offs_g, mask=stored, other=0), T)
                ends = gl.minimum(gl.load(offsets_ptr + offs_g + 1, mask=stored, other=0), T)
                stored &= begins == ends
            scale = scale_of_amax(offs_g * 0.0, RULE[1], FORM, RULE[0])
        gl.store(scale_inv_ptr + offs_g, gl.div_rn(1.0, scale), mask=stored)


@gluon.jit
def in_thirty_two(x):
    """x [R, C, 32] as 32 tensors [R, C]."""
    even, odd = x.reshape([x.shape[0], x.shape[1], 16, 2]).split()
    evens, odds = in_sixteen(even), in_sixteen(odd)
    result = ()
    for i in gl.static_range(16):
        result = result + (evens[i], odds[i])  # noqa: RUF005
    return result


@gluon.jit
def codes_of_columns(xs, scales, FORM: gl.constexpr):
    """Codes of words of two columns: half as many words of four, which have these four scales."""
    codes = ()
    for k in gl.static_range(len(xs) // 2):
        x0, x1 = unpack_pairs(xs[2 * k])
        x2, x3 = unpack_pairs(xs[2 * k + 1])
        word = float8_words(x0 * scales[0], x1 * scales[1], x2 * scales[2], x3 * scales[3], FORM, True)
        codes = codes + (word,)  # type: ignore[assignment]  # noqa: RUF005
    return codes


@gluon.jit
def store_sixteen(at, codes, is_there):
    """Four words at each of these places, at once."""
    is_there = is_there & (codes[0] == codes[0])  # of that shape
    gl.inline_asm_elementwise(
        STORE_FOUR, "=r,l,r,r,r,r,r", [at.to(gl.int64), codes[0], codes[1], codes[2], codes[3], is_there.to(gl.int32)],
        dtype=gl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@gluon.jit
def load_factors(factors, scales_ptr, first, height):
    """To shared memory [n, R] the factors of n R rows from `first` on, of which `height` are there; scales_ptr: theirs,
    or None. At once, since each part of a tile that loaded its own would wait for memory."""
    if scales_ptr is not None:
        ROWS: gl.constexpr = factors.shape[0] * factors.shape[1]
        row = gl.arange(0, ROWS, gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
        found = gl.load(scales_ptr + first + row, mask=row < height, other=0).to(gl.float32)
        reinterpret(factors, gl.float32, [ROWS], PLAIN_LAYOUT).store(found)


@gluon.jit
def columns_of(words):
    """Words [128, 32] in shared memory as 32 tensors [4, 32], rows 0 to 31 of: the first 64 columns' first half of the
    rows, and second; the others' first half, and second."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]], [[32, 0], [64, 0]], [],
        [128, 32],
    )  # fmt: skip
    return in_thirty_two(words.load(layout).reshape([4, 32, 32]).permute([0, 2, 1]))


@gluon.jit
def places_of_fours(x):
    """Of a tensor [8, 16] that `fours_of` returns: the first row, and the first column, of each place."""
    of_words: gl.constexpr = x.type.layout
    eighth = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, of_words)), 1)
    four = gl.expand_dims(gl.arange(0, 16, gl.SliceLayout(0, of_words)), 0)
    return eighth // 2 * 16 + 0 * four, eighth % 2 * 64 + 4 * four


@gluon.jit
def fours_of(words):
    """Words [128, 32] in shared memory as 32 tensors [8, 16]: of 16 rows two words each, which are four columns."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [1, 0], [2, 0], [4, 0], [8, 0]], [[16, 0], [0, 2], [0, 4], [0, 8], [0, 16]], [[32, 0], [64, 0]], [],
        [128, 32],
    )  # fmt: skip
    x = words.load(layout).reshape([2, 4, 16, 16, 2]).permute([1, 0, 3, 2, 4])
    return in_thirty_two(x.reshape([8, 16, 32]))


@gluon.jit
def store_columns(codes, codes_ptr, first_column, columns, place, left, places):
    """Columnwise codes of 16 words [8, 16] of four columns each, of 16 rows. codes_ptr: of words, rows of `places`
    codes; the tile's begins at first_column and `place`, and so many columns are there, and so many places, up to a
    multiple of PADDING."""
    row, column = places_of_fours(codes[0])
    is_there = (column < columns) & (row // _PADDING * _PADDING < left)
    w0 = transposed_bytes(codes[0], codes[1], codes[2], codes[3])
    w1 = transposed_bytes(codes[4], codes[5], codes[6], codes[7])
    w2 = transposed_bytes(codes[8], codes[9], codes[10], codes[11])
    w3 = transposed_bytes(codes[12], codes[13], codes[14], codes[15])
    at = codes_ptr + ((first_column + column.to(gl.int64)) * (places // 4) + (place + row) // 4)
    for j in gl.static_range(4):
        store_sixteen(at + j * (places // 4), (w0[j], w1[j], w2[j], w3[j]), is_there)


@gluon.jit
def write_columns(
    words, scale, codes_ptr, first_column, columns, place, left, places, FORM: gl.constexpr,
    VECTOR: gl.constexpr = False,
):  # fmt: skip
    """Columnwise codes of words [128, 32] in shared memory, as `store_columns` has them. VECTOR: scale is what
    `scales_of_columns` gave"""
    xs = fours_of(words)
    of_words: gl.constexpr = xs[0].type.layout
    if VECTOR:
        layout: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 1], [0, 2]], [[1, 0], [0, 4], [0, 8], [0, 16], [0, 32]], [[2, 0], [0, 64]], [], [4, 128]
        )
        s0, s1, s2, s3 = split_in_four(scale.load(layout).reshape([8, 16, 4]))
        s0, s1 = gl.convert_layout(s0, of_words), gl.convert_layout(s1, of_words)
        s2, s3 = gl.convert_layout(s2, of_words), gl.convert_layout(s3, of_words)
    else:
        s0, s1, s2, s3 = scale, scale, scale, scale
    codes = codes_of_columns(xs, (s0, s1, s2, s3), FORM)
    store_columns(codes, codes_ptr, first_column, columns, place, left, places)


@gluon.jit
def write_rows(
    words, scale, codes_ptr, first, first_column, columns, height, WIDTH, FORM: gl.constexpr,
    VECTOR: gl.constexpr = False,
):  # fmt: skip
    """Rowwise codes of words [128, 32] in shared memory. codes_ptr: of words; this tile's begin at row `first` and
    first_column of WIDTH, and so many columns and rows are there. VECTOR: scale is what `scales_of_rows` gave"""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [16, 0], [32, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [64, 0]], [[4, 0], [8, 0]], [],
        [128, 32],
    )  # fmt: skip
    xs = in_eight(words.load(layout).reshape([128, 4, 8]))
    of_codes: gl.constexpr = xs[0].type.layout
    if VECTOR:
        scale = gl.expand_dims(scale.load(gl.SliceLayout(1, of_codes)), 1)
    codes = codes_of_columns(xs, (scale, scale, scale, scale), FORM)
    lane = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, of_codes)), 1)
    sixteen = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, of_codes)), 0)
    row, column = lane % 64, lane // 64 * 64 + sixteen * 16
    at = codes_ptr + ((first + row) * (WIDTH // 4) + (first_column + column) // 4)
    store_sixteen(at, codes, (row < height) & (column < columns))


@gluon.jit
def write_codes(
    words, scale, row_codes_ptr, first, height, WIDTH, column_codes_ptr, matrix, place, left, places, first_column,
    columns, FORM: gl.constexpr,
):  # fmt: skip
    """The copies that there are of words [128, 32] in shared memory, `columns` of them from first_column on: rowwise
    codes as `write_rows` has them, and columnwise ones as `store_columns`, with the first row of their matrix there."""
    if row_codes_ptr is not None and column_codes_ptr is not None:
        _write_both(
            words, scale, row_codes_ptr, first, height, WIDTH, column_codes_ptr, matrix, place, left, places,
            first_column, columns, FORM,
        )  # fmt: skip
    elif row_codes_ptr is not None:
        write_rows(words, scale, row_codes_ptr, first, first_column, columns, height, WIDTH, FORM)
    elif column_codes_ptr is not None:
        write_columns(
            words, scale, column_codes_ptr, matrix + first_column, columns, place, left, places, FORM
        )  # fmt: skip


@gluon.jit
def _write_both(
    words, scale, row_codes_ptr, first, height, WIDTH, column_codes_ptr, matrix, place, left, places, first_column,
    columns, FORM: gl.constexpr,
):  # fmt: skip
    """Codes of words [128, 32] in shared memory, from first_column on, where so many are, in both copies."""
    xs = fours_of(words)
    row, column = places_of_fours(xs[0])
    is_column = column < columns
    at = row_codes_ptr + ((first + row) * (WIDTH // 4) + (first_column + column) // 4)
    codes = codes_of_columns(xs, (scale, scale, scale, scale), FORM)
    for i in gl.static_range(16):
        gl.store(at + i * (WIDTH // 4), codes[i].to(gl.int32, bitcast=True), mask=is_column & (row + i < height))
    store_columns(codes, column_codes_ptr, matrix + first_column, columns, place, left, places)


@gluon.jit
def largest_group(offsets_ptr, T, num_groups):
    """How many rows the largest group has."""
    offs = gl.arange(0, 128, gl.BlockedLayout([4], [32], [gl.num_warps()], [0]))
    largest_size = 0
    for start in range(0, num_groups, 128):
        offs_g = start + offs
        begins = gl.load(offsets_ptr + offs_g, mask=offs_g < num_groups, other=0)
        ends = gl.minimum(gl.load(offsets_ptr + offs_g + 1, mask=offs_g < num_groups, other=0), T)
        largest_size = gl.maximum(largest_size, gl.max((ends - begins).to(gl.int32), axis=0))
    return largest_size


@gluon.jit
def larger_pair(x, y):
    """Of words of two bfloat16 numbers the larger magnitudes, with any sign."""
    return gl.inline_asm_elementwise(LARGER_PAIR, "=r,r,r", [x, y], dtype=gl.uint32, is_pure=True, pack=1)


@gluon.jit
def largest_of(pairs):
    """Of tensors of words of two bfloat16 numbers, pair by pair."""
    found = pairs[0]
    for i in gl.static_range(1, len(pairs)):
        found = larger_pair(found, pairs[i])
    return found


@gluon.jit
def largest_of_fours(pairs):
    """Of each four words side by side, which a thread has: a quarter of the registers."""
    x0, x1, x2, x3 = split_in_four(pairs.reshape([pairs.shape[0], pairs.shape[1] // 4, 4]))
    return larger_pair(larger_pair(x0, x1), larger_pair(x2, x3))


@gluon.jit
def largest(pairs):
    """The largest magnitude in words of two bfloat16 numbers."""
    return gl.max(larger_magnitude(pairs))


@gluon.jit
def larger_magnitude(pairs):
    """Of each word."""
    return gl.inline_asm_elementwise(LARGER_OF_PAIR, "=f,r", [pairs], dtype=gl.float32, is_pure=True, pack=1)


@gluon.jit
def scale_of(source_ptr, group, active, CAST: gl.constexpr, FORM: gl.constexpr, RULE: gl.constexpr):
    """A group's, given or of an amax that is known."""
    if CAST == "given":
        return gl.load(source_ptr + group, mask=active, other=1.0)
    else:
        return scale_of_amax(known_amax(meeting_of(source_ptr, group), active), RULE[1], FORM, RULE[0])
