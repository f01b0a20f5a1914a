"""`dactivation_gluon` for FP8 with a scale for each 128 values of a row of dh, and of a column of dh and of act.

A program has 128 rows of one group and 128 columns of act: whole blocks, so no program waits for another. Two programs
share a multiprocessor. The codes and scales are those of `cast_blocks`, bit for bit.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# T rows, COLUMNS of act, blocks: how many of 128 rows columnwise codes have

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ops.kernels.elementwise.dactivation_gluon import as_words, compute, empty_boxes, fetch
from recipes.casts.boxes_gluon import PLAIN_LAYOUT, STORE_COLUMNS, in_eight
from recipes.casts.cast_float8_block_triton import block_scale
from recipes.casts.cast_nvfp4_triton import place_of
from recipes.casts.float8_elements_triton import float8_words
from recipes.casts.float8_tiles_gluon import (
    codes_of_columns,
    in_thirty_two,
    larger_magnitude,
    largest_of,
    load_factors,
    store_sixteen,
)
from recipes.triton.barriers_gluon import invalidate
from recipes.triton.names_gluon import barrier
from recipes.triton.rounding import unpack_pairs

_ROWS, _WIDTH = gl.constexpr(128), gl.constexpr(128)


@gluon.jit
def write_rows(
    words, row, codes_ptr, scale_ptr, first, first_column, height, T, WIDTH, FORM: gl.constexpr, RULE: gl.constexpr
):  # fmt: skip
    """Rowwise codes and scales of words [128, 32], 64 rows from this one of the tile on, of the first 64 columns and of
    the others; whole blocks of columns."""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [32, 0]], [[0, 8], [0, 16], [1, 0], [2, 0], [64, 0]], [[4, 0], [8, 0], [16, 0]], [],
        [128, 32],
    )  # fmt: skip
    xs = in_eight(words.load(layout).reshape([128, 4, 8]))
    of_codes: gl.constexpr = xs[0].type.layout
    peak = larger_magnitude(largest_of(xs)).reshape([2, 64, 4])
    peak = gl.max(gl.max(peak, axis=2), axis=0)
    scale, inverse = block_scale(peak, RULE[1], FORM, RULE[0], RULE[2])
    at = row + gl.arange(0, 64, peak.type.layout)
    gl.store(scale_ptr + ((first_column // _WIDTH).to(gl.int64) * T + first + at), inverse, mask=at < height)
    scale = gl.expand_dims(gl.expand_dims(scale, 0), 2).broadcast_to([2, 64, 4]).reshape([128, 4])
    scale = gl.convert_layout(scale, of_codes)
    codes = codes_of_columns(xs, (scale, scale, scale, scale), FORM)
    lane = gl.expand_dims(gl.arange(0, 128, gl.SliceLayout(1, of_codes)), 1)
    sixteen = gl.expand_dims(gl.arange(0, 4, gl.SliceLayout(0, of_codes)), 0)
    at = row + lane % 64
    column = first_column + lane // 64 * 64 + sixteen * 16
    store_sixteen(codes_ptr + ((first + at) * (WIDTH // 4) + column // 4), codes, at < height)


@gluon.jit
def write_columns(
    words, codes_ptr, scale_ptr, first_column, tile, blocks, WIDTH, FORM: gl.constexpr, RULE: gl.constexpr
):  # fmt: skip
    """Columnwise codes and scales of words [256, 32], 64 rows of the first 64 columns, of the others, and 64 more of
    both. codes_ptr: of int64"""
    layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[0, 1], [0, 2], [0, 4], [0, 8], [0, 16]],
        [[32, 0], [64, 0], [128, 0]], [], [256, 32],
    )  # fmt: skip
    x = words.load(layout).reshape([8, 32, 32]).permute([0, 2, 1])
    xs = in_thirty_two(x)
    of_pairs: gl.constexpr = xs[0].type.layout
    peaks = unpack_pairs(largest_of(xs) & 0x7FFF7FFF)
    eighth = gl.expand_dims(gl.arange(0, 8, gl.SliceLayout(1, of_pairs)), 1)
    pair = gl.expand_dims(gl.arange(0, 32, gl.SliceLayout(0, of_pairs)), 0)
    column = first_column + eighth // 2 % 2 * 64 + 2 * pair
    row = eighth // 4 * 64 + eighth % 2 * 32
    odd = (pair + 0 * eighth) % 2
    is_there = ((tile < blocks) & (column >= 0)).to(gl.int32)
    stride = blocks * (_ROWS // 8)
    for second in gl.static_range(2):
        peak = gl.max(gl.max(peaks[second].reshape([2, 2, 2, 32]), axis=2), axis=0)
        scale, inverse = block_scale(peak, RULE[1], FORM, RULE[0], RULE[2])
        at = gl.expand_dims(64 * gl.arange(0, 2, gl.SliceLayout(1, peak.type.layout)), 1)
        at += gl.expand_dims(2 * gl.arange(0, 32, gl.SliceLayout(0, peak.type.layout)), 0) + (first_column + second)
        gl.store(scale_ptr + (tile.to(gl.int64) * WIDTH + at), inverse, mask=(tile < blocks) & (at >= 0))
        scale = gl.expand_dims(gl.expand_dims(scale, 0), 2).broadcast_to([2, 2, 2, 32]).reshape([8, 32])
        codes = _codes_of_rows(xs, second, gl.convert_layout(scale, of_pairs), FORM)
        own = (column + second).to(gl.int64) * stride + tile * (_ROWS // 8) + row // 8
        own = codes_ptr + (own + odd * (2 - 2 * stride))
        gl.inline_asm_elementwise(
            STORE_COLUMNS, "=r,l,r,l,l,l,l,l,r",
            [own.to(gl.int64), odd, codes[0], codes[1], codes[2], codes[3], (own + 2 * stride).to(gl.int64), is_there],
            dtype=gl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@gluon.jit
def _codes_of_rows(xs, SECOND: gl.constexpr, scale, FORM: gl.constexpr):
    """Codes of 32 words of two columns, of their first numbers or of the second ones: four words of eight rows."""
    result = ()
    for k in gl.static_range(4):
        low = float8_words(
            unpack_pairs(xs[8 * k])[SECOND] * scale, unpack_pairs(xs[8 * k + 1])[SECOND] * scale,
            unpack_pairs(xs[8 * k + 2])[SECOND] * scale, unpack_pairs(xs[8 * k + 3])[SECOND] * scale, FORM, True,
        )  # fmt: skip
        high = float8_words(
            unpack_pairs(xs[8 * k + 4])[SECOND] * scale, unpack_pairs(xs[8 * k + 5])[SECOND] * scale,
            unpack_pairs(xs[8 * k + 6])[SECOND] * scale, unpack_pairs(xs[8 * k + 7])[SECOND] * scale, FORM, True,
        )  # fmt: skip
        both = low.to(gl.int64) | (high.to(gl.int64) << 32)
        result = result + (both,)  # type: ignore[assignment]  # noqa: RUF005
    return result


@gluon.jit(do_not_specialize=["num_groups"])
def dactivation_blocks_gluon_kernel(
    dact, h, scales_ptr, dscales_ptr, dh_ptr, row_codes_ptr, row_scale_ptr, column_codes_ptr, column_scale_ptr,
    act_codes_ptr, act_scale_ptr, offsets_ptr, aligned_ptr, T, COLUMNS, blocks, num_groups,
    STEPS: gl.constexpr, BACKWARDS: gl.constexpr, CONSTANTS: gl.constexpr, SOURCE: gl.constexpr,
    FORM: gl.constexpr, RULE: gl.constexpr, Y_FORM: gl.constexpr, Y_RULE: gl.constexpr,
):  # fmt: skip
    """dact, h, dh_ptr, dscales_ptr: as in `dactivation_gluon_kernel`. Codes are of words, or None where they are not
    made. RULE: whether scales are powers of two, the least amax, largest scale."""
    W: gl.constexpr = gl.num_warps()
    column_blocks = COLUMNS // _WIDTH
    first_column = gl.program_id(0) % column_blocks * _WIDTH
    tile = gl.program_id(0) // column_blocks
    offs_g = gl.arange(0, 128, gl.BlockedLayout([4], [32], [W], [0]))
    group, _, first, _, left = place_of(offs_g, offsets_ptr, aligned_ptr, 0, tile * (_ROWS // 16), T, num_groups)
    first = gl.cast(first, gl.int64)
    height = gl.maximum(gl.minimum(left, _ROWS), 0)
    active = group < num_groups
    boxes, ready = empty_boxes(4)
    fetch(h, dact, boxes, ready, first, first_column, height, COLUMNS, 4)
    parts = as_words(boxes, 8, 32)
    of_words: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [W, 1], [1, 0])
    factors = gl.allocate_shared_memory(gl.float32, [4, 32], PLAIN_LAYOUT)
    load_factors(factors, scales_ptr, first, height)
    for j in range(8):  # 32 rows of 64 columns at a time
        part = j // 4 * 2 + j % 2
        if height > 32 * part:
            mbarrier.wait(ready.index(j // 2), 0)
            compute(
                parts, j, part, j // 2 % 2, height, _WIDTH, active, True, first, first_column, T, COLUMNS, factors,
                dscales_ptr, dh_ptr, scales_ptr is not None, act_codes_ptr is not None, STEPS, BACKWARDS, CONSTANTS,
            )  # fmt: skip
        else:
            for operand in gl.static_range(3):
                parts[operand].index(j).store(gl.full([32, 32], 0, gl.uint32, of_words))
    barrier()
    regions = as_words(boxes, 1, 256)
    if act_codes_ptr is not None:
        write_columns(
            regions[2].index(0), act_codes_ptr.to(gl.pointer_type(gl.int64)), act_scale_ptr, first_column, tile, blocks,
            COLUMNS, Y_FORM, Y_RULE,
        )  # fmt: skip
    halves = as_words(boxes, 2, 128)
    for part in gl.static_range(2):
        at = part * COLUMNS + first_column
        if row_codes_ptr is not None:
            for i in range(2):
                if height > 64 * i:
                    write_rows(
                        halves[part].index(i), 64 * i, row_codes_ptr, row_scale_ptr, first, at, height, T, 2 * COLUMNS,
                        FORM, RULE,
                    )  # fmt: skip
        if column_codes_ptr is not None:
            write_columns(
                regions[part].index(0), column_codes_ptr.to(gl.pointer_type(gl.int64)), column_scale_ptr, at, tile,
                blocks, 2 * COLUMNS, FORM, RULE,
            )  # fmt: skip
    invalidate(ready)
