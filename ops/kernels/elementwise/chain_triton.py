"""The Triton kernels of `ops.kernels.elementwise.chain`, which documents and launches them.

For each step: STEPS, BACKWARDS, D_OPERANDS: its functions; KINDS: its operand; CONSTANTS: three numbers; DTYPES: the
dtype of its result; ENTERS, LEAVES: whether its x or dy arrives in another dtype; READS: whether its backward reads x.
GATE: the position of the gated step, or -1. Operand pointers that a step does not need are None.
WHOLE: no tile reaches beyond the rows and columns of y.
CAST: how the result is quantized to FORM: "" not, "blocks" (MXFP8), "block values" (the values of MXFP8), "given" (one
given scale), "rows" (by RULE, with a scale for the columns of a row in a tile). With scales that follow by RULE from
the amaxes of groups: "known" (from amaxes that are known), "meeting" (from those that groups of at most `most` rows
find at meetings; the values of others are stored, as those of "amax", of which only amaxes are found). KEEP: whether
values are stored anyway.
codes: the tensors of a `Cast`, else Nones. Where these have offsets, each tile lies in one of num_groups groups.
places: how long the rows of transposed codes are.

Before the gate, every column of y corresponds to two columns of x: a tile is a pair (a, b), and each step runs on both.
Between two steps a tile has the dtype in which the earlier step's result would be stored.
"""
# T rows, COLUMNS of y, WIDTH columns of x

from recipes.casts.cast_float8_block_triton import block_scale
from recipes.casts.cast_float8_triton import (
    PADDING,
    find_float8_tile,
    raise_amax,
    rows_of_group,
    scale_of_amax,
    store_float8,
    store_scale_of_group,
    store_scales,
    store_scales_of_empty,
)
from recipes.casts.cast_mxfp8_triton import store_mxfp8, store_mxfp8_values
from recipes.casts.float8_elements_triton import float8_codes, magnitude
from recipes.triton.gates import tl, triton
from recipes.triton.meeting import amax_of_all, arrive, known_amax, meeting_of, raise_amax_at
from recipes.triton.philox_triton import philox
from recipes.triton.rounding import round_pairs_to, round_to, widen, widen_pairs


@triton.jit
def _enter(x, KIND: tl.constexpr, DTYPE: tl.constexpr, ROUNDS: tl.constexpr):
    """A tile in float32, for a step of this kind; rounded to DTYPE before, if it comes in another."""
    x = _wide(x, KIND)
    if ROUNDS:
        x = _wide(_leave(x, KIND, DTYPE), KIND)
    return x


@triton.jit
def _wide(x, KIND: tl.constexpr):
    if KIND == "column" or KIND == "element":  # most of them are sums, which the compiler then takes as one instruction
        return widen(x).to(tl.float32)
    else:
        return widen_pairs(x)


@triton.jit
def _leave(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """A float32 tile as it is stored in DTYPE."""
    if KIND == "column" or KIND == "element":
        return round_to(x, DTYPE)
    else:
        return round_pairs_to(x, DTYPE)


@triton.jit
def _random_bits(seed, rows, first_column, BLOCK_C: tl.constexpr):
    """16 bits an element, [rows, BLOCK_C]: `random_bits_ref`. One counter gives those of eight neighbours."""
    octets = first_column // 8 + tl.arange(0, BLOCK_C // 8)
    c0 = (octets[None, :] + tl.zeros_like(rows)[:, None]).to(tl.uint32)
    c1 = (rows[:, None] + tl.zeros_like(octets)[None, :]).to(tl.uint32)
    c0, c1, c2, c3 = philox(seed, c0, c1)
    words = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [rows.shape[0], BLOCK_C // 2])
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [rows.shape[0], BLOCK_C])


@triton.jit
def _shared(
    operands, KINDS: tl.constexpr, COUNT: tl.constexpr, GATE: tl.constexpr, columns_in_x, columns, COLUMNS
):  # fmt: skip
    """Of the operands, what all rows share: the tile's part of a column's, the seed; else 0."""
    result = ()
    for i in tl.static_range(COUNT):
        part = 0
        if operands[i] is not None:
            if KINDS[i] == "column":
                if i < GATE:
                    part = tl.load(operands[i] + columns_in_x, mask=columns < COLUMNS, other=0)
                else:
                    part = tl.load(operands[i] + columns, mask=columns < COLUMNS, other=0)
            elif KINDS[i] == "random":
                part = tl.load(operands[i])
        result = result + (part,)  # type: ignore[assignment]  # noqa: RUF005
    return result


@triton.jit
def _operand(operand, shared, KIND: tl.constexpr, rows, columns, first_column, T, WIDTH, inside):
    """A tile in float32, or random bits."""
    if KIND == "column":
        return widen(shared).to(tl.float32)[None, :]
    elif KIND == "row":
        return widen(tl.load(operand + rows, mask=rows < T, other=0)).to(tl.float32)[:, None]
    elif KIND == "element":
        at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        return widen(tl.load(operand + at, mask=inside, other=0)).to(tl.float32)
    else:
        return _random_bits(shared, rows, first_column, columns.shape[0])


@triton.jit
def _apply(
    x, AT: tl.constexpr, operands, shared, rows, columns, first_column, T, WIDTH, inside,
    STEPS: tl.constexpr, KINDS: tl.constexpr, CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr,
):  # fmt: skip
    """Step AT of a tile, ungated."""
    A = tl.constexpr(CONSTANTS[3 * AT])
    B = tl.constexpr(CONSTANTS[3 * AT + 1])
    C = tl.constexpr(CONSTANTS[3 * AT + 2])
    x = _enter(x, tl.constexpr(KINDS[AT]), tl.constexpr(DTYPES[AT]), tl.constexpr(ENTERS[AT]))
    if KINDS[AT] == "":
        y = STEPS[AT](x, A, B, C)
    else:
        operand = _operand(
            operands[AT], shared[AT], tl.constexpr(KINDS[AT]), rows, columns, first_column, T, WIDTH, inside
        )  # fmt: skip
        if KINDS[AT] == "row":
            y = STEPS[AT](x, A, B, C) * operand
        else:
            y = STEPS[AT](x, operand, A, B, C)
    return _leave(y, tl.constexpr(KINDS[AT]), tl.constexpr(DTYPES[AT]))


@triton.jit
def _gate(
    a, b, AT: tl.constexpr, operands, rows, columns, T, WIDTH, inside,
    STEPS: tl.constexpr, KINDS: tl.constexpr, CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr,
):  # fmt: skip
    """Step AT of two tiles, which makes one of them."""
    A = tl.constexpr(CONSTANTS[3 * AT])
    B = tl.constexpr(CONSTANTS[3 * AT + 1])
    C = tl.constexpr(CONSTANTS[3 * AT + 2])
    a = _enter(a, "", tl.constexpr(DTYPES[AT]), tl.constexpr(ENTERS[AT]))
    b = _enter(b, "", tl.constexpr(DTYPES[AT]), tl.constexpr(ENTERS[AT]))
    y = STEPS[AT](a, b, A, B, C)
    if KINDS[AT] == "row":
        y *= _operand(operands[AT], 0, "row", rows, columns, 0, T, WIDTH, inside)
    return _leave(y, "", tl.constexpr(DTYPES[AT]))


@triton.jit
def up_to(
    a, b, UP_TO: tl.constexpr, operands, shared_a, shared_b, rows, columns, columns_a, columns_b, first_column,
    T, COLUMNS, WIDTH, inside,
    STEPS: tl.constexpr, KINDS: tl.constexpr, CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """The input of step UP_TO: (a, b) before the gate; after it, or without one, (x, undefined)."""
    for i in tl.static_range(UP_TO):
        if i < GATE:
            a = _apply(
                a, i, operands, shared_a, rows, columns_a, 0, T, WIDTH, inside, STEPS, KINDS, CONSTANTS, DTYPES, ENTERS
            )
            b = _apply(
                b, i, operands, shared_b, rows, columns_b, 0, T, WIDTH, inside, STEPS, KINDS, CONSTANTS, DTYPES, ENTERS
            )
        elif i == GATE:
            a = _gate(a, b, i, operands, rows, columns, T, COLUMNS, inside, STEPS, KINDS, CONSTANTS, DTYPES, ENTERS)
        else:
            a = _apply(
                a, i, operands, shared_a, rows, columns, first_column, T, COLUMNS, inside,
                STEPS, KINDS, CONSTANTS, DTYPES, ENTERS,
            )  # fmt: skip
    return a, b


@triton.jit
def columns_of_parts(columns, COLUMNS, INTERLEAVE: tl.constexpr):
    """The columns of x that hold the gate and the linear part of y's columns."""
    if INTERLEAVE == 0:
        a = columns
        b = columns + COLUMNS
    else:
        a = columns // INTERLEAVE * (2 * INTERLEAVE) + columns % INTERLEAVE
        b = a + INTERLEAVE
    return a, b


@triton.jit
def _inside(rows, columns, T, COLUMNS, WHOLE: tl.constexpr):
    """Which elements of a tile there are; a constant, all of them, if tiles are WHOLE."""
    if WHOLE:
        return tl.full([rows.shape[0], columns.shape[0]], True, tl.int1)
    else:
        return (rows < T)[:, None] & (columns < COLUMNS)[None, :]


@triton.jit(do_not_specialize=["num_groups", "most"])
def elementwise_kernel(
    x_ptr, y_ptr, codes, operands, T, COLUMNS, WIDTH, places, num_groups, most,
    STEPS: tl.constexpr, KINDS: tl.constexpr, CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr,
    COUNT: tl.constexpr,
    GATE: tl.constexpr, INTERLEAVE: tl.constexpr, SOURCE: tl.constexpr, CAST: tl.constexpr, FORM: tl.constexpr,
    RULE: tl.constexpr, NATIVE: tl.constexpr, KEEP: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    column_blocks = tl.cdiv(COLUMNS, BLOCK_C)
    tile = _tile_of_rows(codes, tl.program_id(0) // column_blocks, T, places, num_groups, BLOCK_T)
    rows = tile[0]
    first_column = tl.program_id(0) % column_blocks * BLOCK_C
    columns = first_column + tl.arange(0, BLOCK_C)
    columns_a, columns_b = columns_of_parts(columns, COLUMNS, INTERLEAVE)
    inside = _inside(rows, columns, tile[1], COLUMNS, WHOLE)
    start = rows.to(tl.int64)[:, None]
    shared_a = _shared(operands, KINDS, COUNT, GATE, columns_a, columns, COLUMNS)
    shared_b = shared_a
    if GATE > 0:
        shared_b = _shared(operands, KINDS, COUNT, GATE, columns_b, columns, COLUMNS)
    a = tl.load(x_ptr + start * WIDTH + columns_a[None, :], mask=inside, other=0)
    b = a
    if GATE >= 0:
        b = tl.load(x_ptr + start * WIDTH + columns_b[None, :], mask=inside, other=0)
    if codes[2] is not None:  # else the compiler moves the transposition up to here and computes the chain twice
        a = widen_pairs(a)
        b = widen_pairs(b)
    y, _ = up_to(
        a, b, COUNT, operands, shared_a, shared_b, rows, columns, columns_a, columns_b, first_column,
        T, COLUMNS, WIDTH, inside,
        STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, GATE,
    )  # fmt: skip
    large = _is_large(codes, tile, T, num_groups, most, CAST)
    if y_ptr is not None:
        stored = inside if KEEP else inside & large
        at = start * COLUMNS + columns[None, :]
        tl.store(y_ptr + at, round_to(widen(y).to(tl.float32), y_ptr.dtype.element_ty), mask=stored)
    _find_amax(y, y, codes, tile, large, num_groups, inside, CAST, False)
    scale = _scale_of(
        codes, tile, large, column_blocks, first_column, T, num_groups, CAST, FORM, RULE, BLOCK_T
    )  # fmt: skip
    _store_codes(
        y, scale, codes, tile, large, columns, first_column, COLUMNS, COLUMNS - first_column, T, num_groups, places,
        inside, 0, CAST, FORM, RULE, NATIVE,
    )  # fmt: skip


@triton.jit
def _tile_of_rows(codes, block, T, places, num_groups, BLOCK_T: tl.constexpr):
    """Of a tile: its rows, the row behind its last one, its group, its first place in transposed codes, how many, and
    its first row."""
    if codes[6] is not None:
        _, group, first, end, _, first_place, left = find_float8_tile(
            codes[6], codes[7], block, T, places, num_groups, PADDING, BLOCK_T
        )
        return first + tl.arange(0, BLOCK_T), end, group, first_place, left, first
    else:
        rows = block * BLOCK_T + tl.arange(0, BLOCK_T)
        return rows, T, block * 0, block * BLOCK_T, tl.minimum(places - block * BLOCK_T, BLOCK_T), block * BLOCK_T


@triton.jit
def _is_large(codes, tile, T, num_groups, most, CAST: tl.constexpr):
    """Whether a tile is of a group that is too large to meet."""
    if CAST == "meeting":
        return (tile[2] < num_groups) & (rows_of_group(codes[6], tile[2], T, num_groups) > most)
    else:
        return False


@triton.jit
def _find_amax(a, b, codes, tile, large, num_groups, inside, CAST: tl.constexpr, PAIR: tl.constexpr):
    """Of both tiles, if they are a PAIR; else of the first. At a meeting this program arrives with it."""
    FINDS: tl.constexpr = CAST == "meeting" or CAST == "amax"
    if FINDS or (CAST != "" and codes[5] is not None):
        peak = magnitude(widen_pairs(a))
        if PAIR:
            peak = tl.maximum(peak, magnitude(widen_pairs(b)))
        if FINDS:
            if _has_rows(tile, num_groups):
                amax = tl.max(tl.where(inside, peak, 0.0))
                meeting_ptr = meeting_of(codes[4], tile[2])
                if CAST == "meeting":
                    if large:
                        raise_amax_at(meeting_ptr, amax, None)
                    else:
                        arrive(meeting_ptr, amax)
                else:
                    raise_amax_at(meeting_ptr, amax, None)
        else:
            raise_amax(codes[5], peak, tile[2], num_groups, inside)


@triton.jit
def _has_rows(tile, num_groups):
    return (tile[2] < num_groups) & (tile[5] < tile[1])


@triton.jit
def _scale_of(
    codes, tile, large, column_blocks, first_column, T, num_groups,
    CAST: tl.constexpr, FORM: tl.constexpr, RULE: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """The scale of a tile, after `_find_amax`. Of a group, or of all, one program stores scale_inv too."""
    scale = 1.0
    if CAST == "given":
        if tl.program_id(0) == 0:
            store_scales(codes[1], codes[4], num_groups, 0.0, "scale", False, FORM)
        scale = tl.load(codes[4] + tile[2], mask=tile[2] < num_groups, other=1.0)
    elif CAST == "known":
        if tl.program_id(0) == 0:
            store_scales(codes[1], codes[4], num_groups, RULE[1], "amax", RULE[0], FORM)
        amax = known_amax(meeting_of(codes[4], tile[2]), tile[2] < num_groups)
        scale = scale_of_amax(amax, RULE[1], FORM, RULE[0])
    elif CAST == "meeting":
        if tl.program_id(0) == 0:
            store_scales_of_empty(codes[1], codes[6], T, num_groups, RULE[1], RULE[0], FORM)
        if _has_rows(tile, num_groups) & (large == 0):
            programs = tl.cdiv(rows_of_group(codes[6], tile[2], T, num_groups), BLOCK_T).to(tl.int32) * column_blocks
            scale = scale_of_amax(amax_of_all(meeting_of(codes[4], tile[2]), programs), RULE[1], FORM, RULE[0])
            store_scale_of_group(codes[1], scale, codes[6], tile[2], tile[5], first_column)
    return scale


@triton.jit
def _store_codes(
    x, scale, codes, tile, large, columns, first_column, WIDTH, left, T, num_groups, places, inside,
    INTERLEAVE: tl.constexpr, CAST: tl.constexpr, FORM: tl.constexpr, RULE: tl.constexpr, NATIVE: tl.constexpr,
):  # fmt: skip
    """x stands in these columns of WIDTH; `left` of the tile's columns are there."""
    if CAST == "blocks":
        store_mxfp8(x, codes[0], codes[1], codes[2], codes[3], tile[0], columns, T, WIDTH, inside, FORM, NATIVE)
    elif CAST == "block values":
        x = tl.where(inside & (tile[2] < num_groups), x, 0.0)
        store_mxfp8_values(x, codes[0], codes[2], tile[0], columns, WIDTH, inside, FORM, NATIVE)
    elif CAST == "rows":
        x = tl.where(inside & (tile[2] < num_groups), widen_pairs(x), 0.0)
        of_rows, scale_inv = block_scale(tl.max(magnitude(x), axis=1), RULE[1], FORM, RULE[0], RULE[2])
        at = tile[0].to(tl.int64)
        here = at[:, None] * WIDTH + columns[None, :]
        tl.store(codes[0] + here, float8_codes(x * of_rows[:, None], FORM, NATIVE), mask=inside)
        tl.store(codes[1] + (first_column // columns.shape[0]).to(tl.int64) * T + at, scale_inv, mask=tile[0] < tile[1])
    elif CAST == "given" or CAST == "known" or CAST == "meeting":
        active = tile[2] < num_groups
        stored, places_here = inside, tile[4]
        if CAST == "meeting":
            stored = inside & (large == 0)
            places_here = tl.where(large, 0, tile[4])
        store_float8(
            tl.where(active, widen_pairs(x), 0.0), scale, codes[0], codes[2], tile[5], columns, first_column, WIDTH,
            left, stored, tile[3], places_here, places, INTERLEAVE == 0, FORM, NATIVE,
        )  # fmt: skip


@triton.jit
def _back(
    dy, x, sums, AT: tl.constexpr, operands, shared, d_operands, column_block, rows, columns, first_column,
    T, end, WIDTH, inside,
    STEPS: tl.constexpr, BACKWARDS: tl.constexpr, D_OPERANDS: tl.constexpr, KINDS: tl.constexpr,
    CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """dx of step AT, ungated; stores its operand's gradient, or adds it to sums[AT] if it is a column's."""
    A = tl.constexpr(CONSTANTS[3 * AT])
    B = tl.constexpr(CONSTANTS[3 * AT + 1])
    C = tl.constexpr(CONSTANTS[3 * AT + 2])
    stored_dy = dy
    dy = _enter(dy, tl.constexpr(KINDS[AT]), tl.constexpr(DTYPES[AT]), tl.constexpr(LEAVES[AT]))
    x = _enter(x, tl.constexpr(KINDS[AT]), tl.constexpr(DTYPES[AT]), tl.constexpr(ENTERS[AT]))
    if KINDS[AT] == "":
        dx = BACKWARDS[AT](dy, x, A, B, C)
    elif KINDS[AT] == "row":
        if d_operands[AT] is not None:
            _store_row_share(dy * STEPS[AT](x, A, B, C), d_operands[AT], column_block, rows, T, end, inside)
        operand = _operand(operands[AT], 0, "row", rows, columns, first_column, T, WIDTH, inside)
        dx = BACKWARDS[AT](dy * operand, x, A, B, C)
    else:
        if operands[AT] is None:
            operand = dy  # a linear step: it does not read it
        else:
            operand = _operand(
                operands[AT], shared[AT], tl.constexpr(KINDS[AT]), rows, columns, first_column, T, WIDTH, inside
            )  # fmt: skip
        if d_operands[AT] is not None:
            if D_OPERANDS[AT] is not None:
                d_operand = D_OPERANDS[AT](dy, x, operand, A, B, C)
            elif KINDS[AT] == "column":
                d_operand = _enter(stored_dy, "", tl.constexpr(DTYPES[AT]), tl.constexpr(LEAVES[AT]))
            else:
                d_operand = dy
            if KINDS[AT] == "column":
                sums = _added(sums, AT, tl.where(inside, d_operand, 0.0))
            else:
                at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
                tl.store(d_operands[AT] + at, round_to(d_operand, d_operands[AT].dtype.element_ty), mask=inside)
        dx = BACKWARDS[AT](dy, x, operand, A, B, C)
    return _leave(dx, tl.constexpr(KINDS[AT]), tl.constexpr(DTYPES[AT])), sums


@triton.jit
def _added(sums, AT: tl.constexpr, x):
    """sums with x added to entry AT."""
    result = ()
    for i in tl.static_range(len(sums)):
        if i == AT:
            result = result + (sums[i] + x,)  # type: ignore[assignment]  # noqa: RUF005
        else:
            result = result + (sums[i],)  # type: ignore[assignment]  # noqa: RUF005
    return result


@triton.jit
def _zeros(COUNT: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    result = ()
    for _ in tl.static_range(COUNT):
        result = result + (tl.zeros([BLOCK_T, BLOCK_C], tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    return result


@triton.jit
def _store_row_share(d, pointer, column_block, rows, T, end, inside):
    share = tl.sum(tl.where(inside, d, 0.0), axis=1)
    tl.store(pointer + column_block.to(tl.int64) * T + rows, share, mask=rows < end)


@triton.jit
def _store_y(
    y_ptr, y_codes, a, b, operands, shared_a, shared_b, tile, columns, columns_a, columns_b, first_column,
    T, COLUMNS, WIDTH, places, num_groups, inside,
    STEPS: tl.constexpr, KINDS: tl.constexpr, CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr,
    GATE: tl.constexpr, COUNT: tl.constexpr, CAST: tl.constexpr, FORM: tl.constexpr, RULE: tl.constexpr,
    NATIVE: tl.constexpr,
):  # fmt: skip
    """Recompute y, store it if y_ptr is not None, and cast it, not at a meeting."""
    tl.static_assert(CAST != "meeting" and CAST != "rows")
    rows = tile[0]
    y, _ = up_to(
        a, b, COUNT, operands, shared_a, shared_b, rows, columns, columns_a, columns_b, first_column,
        T, COLUMNS, WIDTH, inside,
        STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, GATE,
    )  # fmt: skip
    if y_ptr is not None:
        stored = round_to(widen(y).to(tl.float32), y_ptr.dtype.element_ty)
        tl.store(y_ptr + rows.to(tl.int64)[:, None] * COLUMNS + columns[None, :], stored, mask=inside)
    _find_amax(y, y, y_codes, tile, False, num_groups, inside, CAST, False)
    scale = _scale_of(y_codes, tile, False, 0, first_column, T, num_groups, CAST, FORM, RULE, rows.shape[0])
    _store_codes(
        y, scale, y_codes, tile, False, columns, first_column, COLUMNS, COLUMNS - first_column, T, num_groups, places,
        inside, 0, CAST, FORM, RULE, NATIVE,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_groups", "most"])
def delementwise_kernel(
    dy_ptr, x_ptr, operands, dx_ptr, codes, d_operands, y_ptr, y_codes, column_sums_ptr, T, COLUMNS, WIDTH,
    places, num_groups, most,
    STEPS: tl.constexpr, BACKWARDS: tl.constexpr, D_OPERANDS: tl.constexpr, READS: tl.constexpr, KINDS: tl.constexpr,
    CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr, LEAVES: tl.constexpr, COUNT: tl.constexpr,
    GATE: tl.constexpr, INTERLEAVE: tl.constexpr, SOURCE: tl.constexpr, CAST: tl.constexpr, FORM: tl.constexpr,
    RULE: tl.constexpr, NATIVE: tl.constexpr, KEEP: tl.constexpr, Y_CAST: tl.constexpr, Y_FORM: tl.constexpr,
    Y_RULE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, WHOLE: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TILES tiles below each other a program. sums_a and sums_b: what is summed over the rows, and last of all dx."""
    tl.static_assert(CAST != "rows")  # those of dx are as long as two tiles
    column_blocks = tl.cdiv(COLUMNS, BLOCK_C)
    row_block = tl.program_id(0) // column_blocks
    column_block = tl.program_id(0) % column_blocks
    first_column = column_block * BLOCK_C
    columns = first_column + tl.arange(0, BLOCK_C)
    columns_a, columns_b = columns_of_parts(columns, COLUMNS, INTERLEAVE)
    shared_a = _shared(operands, KINDS, COUNT, GATE, columns_a, columns, COLUMNS)
    shared_b = shared_a
    if GATE > 0:
        shared_b = _shared(operands, KINDS, COUNT, GATE, columns_b, columns, COLUMNS)
    sums_a = _zeros(COUNT + 1, BLOCK_T, BLOCK_C)
    sums_b = _zeros(COUNT + 1, BLOCK_T, BLOCK_C)
    for i_tile in tl.range(TILES, num_stages=STAGES):
        if codes[6] is None or y_codes[7] is not None:
            tile = _tile_of_rows(y_codes, row_block * TILES + i_tile, T, places, num_groups, BLOCK_T)
        else:
            tile = _tile_of_rows(codes, row_block * TILES + i_tile, T, places, num_groups, BLOCK_T)
        rows = tile[0]
        inside = _inside(rows, columns, tile[1], COLUMNS, WHOLE)
        start = rows.to(tl.int64)[:, None]
        da = tl.load(dy_ptr + start * COLUMNS + columns[None, :], mask=inside, other=0)
        db = da
        a = da
        b = da
        if x_ptr is not None:
            a = tl.load(x_ptr + start * WIDTH + columns_a[None, :], mask=inside, other=0)
            b = a
            if GATE >= 0:
                b = tl.load(x_ptr + start * WIDTH + columns_b[None, :], mask=inside, other=0)
        if y_ptr is not None and Y_CAST == "":
            _store_y(
                y_ptr, y_codes, a, b, operands, shared_a, shared_b, tile, columns, columns_a, columns_b, first_column,
                T, COLUMNS, WIDTH, places, num_groups, inside,
                STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, GATE, COUNT, Y_CAST, Y_FORM, Y_RULE, NATIVE,
            )  # fmt: skip
        for i in tl.static_range(COUNT - 1, -1, -1):
            xa, xb = a, b
            if READS[i]:
                xa, xb = up_to(
                    a, b, i, operands, shared_a, shared_b, rows, columns, columns_a, columns_b, first_column,
                    T, COLUMNS, WIDTH, inside,
                    STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, GATE,
                )  # fmt: skip
            if i < GATE:
                da, sums_a = _back(
                    da, xa, sums_a, i, operands, shared_a, d_operands, column_block, rows, columns_a, 0,
                    T, tile[1], WIDTH, inside, STEPS, BACKWARDS, D_OPERANDS, KINDS, CONSTANTS, DTYPES, ENTERS, LEAVES,
                )  # fmt: skip
                db, sums_b = _back(
                    db, xb, sums_b, i, operands, shared_b, d_operands, column_block, rows, columns_b, 0,
                    T, tile[1], WIDTH, inside, STEPS, BACKWARDS, D_OPERANDS, KINDS, CONSTANTS, DTYPES, ENTERS, LEAVES,
                )  # fmt: skip
            elif i == GATE:
                da = _enter(da, "", tl.constexpr(DTYPES[i]), tl.constexpr(LEAVES[i]))
                xa = _enter(xa, "", tl.constexpr(DTYPES[i]), tl.constexpr(ENTERS[i]))
                xb = _enter(xb, "", tl.constexpr(DTYPES[i]), tl.constexpr(ENTERS[i]))
                A = tl.constexpr(CONSTANTS[3 * i])
                B = tl.constexpr(CONSTANTS[3 * i + 1])
                C = tl.constexpr(CONSTANTS[3 * i + 2])
                if KINDS[i] == "row":
                    if d_operands[i] is not None:
                        _store_row_share(
                            da * STEPS[i](xa, xb, A, B, C), d_operands[i], column_block, rows, T, tile[1], inside
                        )
                    da *= _operand(operands[i], 0, "row", rows, columns, 0, T, COLUMNS, inside)
                da, db = BACKWARDS[i](da, xa, xb, A, B, C)
                da = _leave(da, "", tl.constexpr(DTYPES[i]))
                db = _leave(db, "", tl.constexpr(DTYPES[i]))
            else:
                da, sums_a = _back(
                    da, xa, sums_a, i, operands, shared_a, d_operands, column_block, rows, columns, first_column,
                    T, tile[1], COLUMNS, inside, STEPS, BACKWARDS, D_OPERANDS, KINDS, CONSTANTS, DTYPES, ENTERS, LEAVES,
                )  # fmt: skip
        large = _is_large(codes, tile, T, num_groups, most, CAST)
        if dx_ptr is not None:
            stored = inside if KEEP else inside & large
            tl.store(dx_ptr + start * WIDTH + columns_a[None, :], da, mask=stored)
            if GATE >= 0:
                tl.store(dx_ptr + start * WIDTH + columns_b[None, :], db, mask=stored)
        _find_amax(da, db, codes, tile, large, num_groups, inside, CAST, GATE >= 0)
        scale = _scale_of(
            codes, tile, large, column_blocks, first_column, T, num_groups, CAST, FORM, RULE, BLOCK_T
        )  # fmt: skip
        _store_codes(
            da, scale, codes, tile, large, columns_a, first_column, WIDTH, COLUMNS - first_column, T, num_groups,
            places, inside, INTERLEAVE, CAST, FORM, RULE, NATIVE,
        )  # fmt: skip
        if GATE >= 0:
            _store_codes(
                db, scale, codes, tile, large, columns_b, COLUMNS + first_column, WIDTH, COLUMNS - first_column, T,
                num_groups, places, inside, INTERLEAVE, CAST, FORM, RULE, NATIVE,
            )  # fmt: skip
        if Y_CAST != "":  # last of all, which takes a quarter fewer registers
            _store_y(
                y_ptr, y_codes, a, b, operands, shared_a, shared_b, tile, columns, columns_a, columns_b, first_column,
                T, COLUMNS, WIDTH, places, num_groups, inside,
                STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, GATE, COUNT, Y_CAST, Y_FORM, Y_RULE, NATIVE,
            )  # fmt: skip
        if column_sums_ptr is not None:
            sums_a = _added(sums_a, COUNT, tl.where(inside, widen_pairs(da), 0.0))
            if GATE >= 0:
                sums_b = _added(sums_b, COUNT, tl.where(inside, widen_pairs(db), 0.0))
    row = row_block.to(tl.int64)
    valid = columns < COLUMNS
    for i in tl.static_range(COUNT):
        if KINDS[i] == "column":
            if d_operands[i] is not None:
                if i < GATE:
                    tl.store(d_operands[i] + row * WIDTH + columns_a, tl.sum(sums_a[i], axis=0), mask=valid)
                    tl.store(d_operands[i] + row * WIDTH + columns_b, tl.sum(sums_b[i], axis=0), mask=valid)
                else:
                    tl.store(d_operands[i] + row * COLUMNS + columns, tl.sum(sums_a[i], axis=0), mask=valid)
    if column_sums_ptr is not None:
        tl.store(column_sums_ptr + row * WIDTH + columns_a, tl.sum(sums_a[COUNT], axis=0), mask=valid)
        if GATE >= 0:
            tl.store(column_sums_ptr + row * WIDTH + columns_b, tl.sum(sums_b[COUNT], axis=0), mask=valid)
