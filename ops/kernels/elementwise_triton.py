"""The Triton kernels of `ops.kernels.elementwise`, which says what they compute and launches them.

STEPS, BACKWARDS, D_OPERANDS are the functions of the steps, KINDS their operands, CONSTANTS three numbers each, DTYPES
what each is rounded to, ENTERS and LEAVES whether x and dy come in another dtype, READS whether backward reads x, GATE
the position of the gated one or -1. Operand pointers that a step does not need are None.
codes are the row codes, row scales, column codes and column scales of a result that is cast to MXFP8 (FORM), else None.

Before the gate every column of y stands for two of x: a tile is a pair (a, b), and each step runs on both.
"""
# T rows, COLUMNS of y, WIDTH columns of x

import triton
import triton.language as tl

from recipes.kernels.cast_mxfp8_triton import store_mxfp8
from recipes.kernels.random_triton import philox
from recipes.kernels.rounding import round_to, widen


@triton.jit
def _rounded(x, DTYPE: tl.constexpr):
    """x as it is after it was stored in DTYPE and loaded again."""
    return widen(round_to(x, DTYPE)).to(tl.float32)


@triton.jit
def _random_bits(seed_ptr, rows, first_column, BLOCK_C: tl.constexpr):
    """16 bits an element, [rows, BLOCK_C]: `random_bits_ref`. One counter gives those of eight neighbours."""
    octets = first_column // 8 + tl.arange(0, BLOCK_C // 8)
    c0 = (octets[None, :] + tl.zeros_like(rows)[:, None]).to(tl.uint32)
    c1 = (rows[:, None] + tl.zeros_like(octets)[None, :]).to(tl.uint32)
    c0, c1, c2, c3 = philox(tl.load(seed_ptr), c0, c1, tl.zeros_like(c0))
    words = tl.reshape(tl.join(tl.join(c0, c2), tl.join(c1, c3)), [rows.shape[0], BLOCK_C // 2])
    return tl.reshape(tl.join(words & 0xFFFF, words >> 16), [rows.shape[0], BLOCK_C])


@triton.jit
def _operand(pointer, KIND: tl.constexpr, rows, columns, first_column, T, WIDTH, inside):
    if KIND == "column":
        return widen(tl.load(pointer + columns, mask=columns < WIDTH, other=0)).to(tl.float32)[None, :]
    elif KIND == "row":
        return widen(tl.load(pointer + rows, mask=rows < T, other=0)).to(tl.float32)[:, None]
    elif KIND == "element":
        at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
        return widen(tl.load(pointer + at, mask=inside, other=0)).to(tl.float32)
    else:
        return _random_bits(pointer, rows, first_column, columns.shape[0])


@triton.jit
def _apply(
    x, AT: tl.constexpr, operands, rows, columns, first_column, T, WIDTH, inside,
    STEPS: tl.constexpr, KINDS: tl.constexpr, CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr,
):  # fmt: skip
    """Step AT of a tile, ungated."""
    A = tl.constexpr(CONSTANTS[3 * AT])
    B = tl.constexpr(CONSTANTS[3 * AT + 1])
    C = tl.constexpr(CONSTANTS[3 * AT + 2])
    if ENTERS[AT]:
        x = _rounded(x, tl.constexpr(DTYPES[AT]))
    if KINDS[AT] == "":
        y = STEPS[AT](x, A, B, C)
    else:
        operand = _operand(
            operands[AT], tl.constexpr(KINDS[AT]), rows, columns, first_column, T, WIDTH, inside
        )  # fmt: skip
        if KINDS[AT] == "row":
            y = STEPS[AT](x, A, B, C) * operand
        else:
            y = STEPS[AT](x, operand, A, B, C)
    return _rounded(y, tl.constexpr(DTYPES[AT]))


@triton.jit
def _gate(
    a, b, AT: tl.constexpr, operands, rows, columns, T, WIDTH, inside,
    STEPS: tl.constexpr, KINDS: tl.constexpr, CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr,
):  # fmt: skip
    """Step AT of two tiles, which makes one of them."""
    A = tl.constexpr(CONSTANTS[3 * AT])
    B = tl.constexpr(CONSTANTS[3 * AT + 1])
    C = tl.constexpr(CONSTANTS[3 * AT + 2])
    if ENTERS[AT]:
        a = _rounded(a, tl.constexpr(DTYPES[AT]))
        b = _rounded(b, tl.constexpr(DTYPES[AT]))
    y = STEPS[AT](a, b, A, B, C)
    if KINDS[AT] == "row":
        y *= _operand(operands[AT], "row", rows, columns, 0, T, WIDTH, inside)
    return _rounded(y, tl.constexpr(DTYPES[AT]))


@triton.jit
def _up_to(
    a, b, UP_TO: tl.constexpr, operands, rows, columns, columns_a, columns_b, first_column, T, COLUMNS, WIDTH, inside,
    STEPS: tl.constexpr, KINDS: tl.constexpr, CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr,
    GATE: tl.constexpr,
):  # fmt: skip
    """The input of step UP_TO: (a, b) in front of the gate, behind it, or without one, (x, whatever)."""
    for i in tl.static_range(UP_TO):
        if i < GATE:
            a = _apply(a, i, operands, rows, columns_a, 0, T, WIDTH, inside, STEPS, KINDS, CONSTANTS, DTYPES, ENTERS)
            b = _apply(b, i, operands, rows, columns_b, 0, T, WIDTH, inside, STEPS, KINDS, CONSTANTS, DTYPES, ENTERS)
        elif i == GATE:
            a = _gate(a, b, i, operands, rows, columns, T, COLUMNS, inside, STEPS, KINDS, CONSTANTS, DTYPES, ENTERS)
        else:
            a = _apply(
                a, i, operands, rows, columns, first_column, T, COLUMNS, inside, STEPS, KINDS, CONSTANTS, DTYPES, ENTERS
            )  # fmt: skip
    return a, b


@triton.jit
def _columns_of_lanes(columns, COLUMNS, INTERLEAVE: tl.constexpr):
    """Where gate and linear part of y's columns stand in x."""
    if INTERLEAVE == 0:
        a = columns
        b = columns + COLUMNS
    else:
        a = columns // INTERLEAVE * (2 * INTERLEAVE) + columns % INTERLEAVE
        b = a + INTERLEAVE
    return a, b


@triton.jit
def elementwise_kernel(
    x_ptr, y_ptr, codes, operands, T, COLUMNS, WIDTH,
    STEPS: tl.constexpr, KINDS: tl.constexpr, CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr,
    COUNT: tl.constexpr,
    GATE: tl.constexpr, INTERLEAVE: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    column_blocks = tl.cdiv(COLUMNS, BLOCK_C)
    rows = tl.program_id(0) // column_blocks * BLOCK_T + tl.arange(0, BLOCK_T)
    first_column = tl.program_id(0) % column_blocks * BLOCK_C
    columns = first_column + tl.arange(0, BLOCK_C)
    columns_a, columns_b = _columns_of_lanes(columns, COLUMNS, INTERLEAVE)
    inside = (rows < T)[:, None] & (columns < COLUMNS)[None, :]
    start = rows.to(tl.int64)[:, None]
    a = widen(tl.load(x_ptr + start * WIDTH + columns_a[None, :], mask=inside, other=0)).to(tl.float32)
    b = a
    if GATE >= 0:
        b = widen(tl.load(x_ptr + start * WIDTH + columns_b[None, :], mask=inside, other=0)).to(tl.float32)
    y, _ = _up_to(
        a, b, COUNT, operands, rows, columns, columns_a, columns_b, first_column, T, COLUMNS, WIDTH, inside,
        STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, GATE,
    )  # fmt: skip
    if y_ptr is not None:
        tl.store(y_ptr + start * COLUMNS + columns[None, :], round_to(y, y_ptr.dtype.element_ty), mask=inside)
    _store_codes(y, codes, rows, columns, T, COLUMNS, inside, FORM, NATIVE)


@triton.jit
def _store_codes(x, codes, rows, columns, T, COLUMNS, inside, FORM: tl.constexpr, NATIVE: tl.constexpr):
    if codes[0] is not None:
        store_mxfp8(x, codes[0], codes[1], rows, columns, T, COLUMNS, inside, FORM, True, NATIVE)
    if codes[2] is not None:
        store_mxfp8(x, codes[2], codes[3], rows, columns, T, COLUMNS, inside, FORM, False, NATIVE)


@triton.jit
def _back(
    dy, x, sums, AT: tl.constexpr, operands, d_operands, column_block, rows, columns, first_column, T, WIDTH, inside,
    STEPS: tl.constexpr, BACKWARDS: tl.constexpr, D_OPERANDS: tl.constexpr, KINDS: tl.constexpr,
    CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr, LEAVES: tl.constexpr,
):  # fmt: skip
    """dx of step AT, ungated; stores its operand's gradient, or adds it to sums[AT] if it is a column's."""
    A = tl.constexpr(CONSTANTS[3 * AT])
    B = tl.constexpr(CONSTANTS[3 * AT + 1])
    C = tl.constexpr(CONSTANTS[3 * AT + 2])
    if LEAVES[AT]:
        dy = _rounded(dy, tl.constexpr(DTYPES[AT]))
    if ENTERS[AT]:
        x = _rounded(x, tl.constexpr(DTYPES[AT]))
    if KINDS[AT] == "":
        dx = BACKWARDS[AT](dy, x, A, B, C)
    elif KINDS[AT] == "row":
        if d_operands[AT] is not None:
            _store_row_share(dy * STEPS[AT](x, A, B, C), d_operands[AT], column_block, rows, T, inside)
        operand = _operand(operands[AT], "row", rows, columns, first_column, T, WIDTH, inside)
        dx = BACKWARDS[AT](dy * operand, x, A, B, C)
    else:
        if operands[AT] is None:
            operand = dy  # a linear step: it does not look at it
        else:
            operand = _operand(
                operands[AT], tl.constexpr(KINDS[AT]), rows, columns, first_column, T, WIDTH, inside
            )  # fmt: skip
        if d_operands[AT] is not None:
            if D_OPERANDS[AT] is None:
                d_operand = dy
            else:
                d_operand = D_OPERANDS[AT](dy, x, operand, A, B, C)
            if KINDS[AT] == "column":
                sums = _added(sums, AT, tl.where(inside, d_operand, 0.0))
            else:
                at = rows.to(tl.int64)[:, None] * WIDTH + columns[None, :]
                tl.store(d_operands[AT] + at, round_to(d_operand, d_operands[AT].dtype.element_ty), mask=inside)
        dx = BACKWARDS[AT](dy, x, operand, A, B, C)
    return _rounded(dx, tl.constexpr(DTYPES[AT])), sums


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
def _store_row_share(d, pointer, column_block, rows, T, inside):
    share = tl.sum(tl.where(inside, d, 0.0), axis=1)
    tl.store(pointer + column_block.to(tl.int64) * T + rows, share, mask=rows < T)


@triton.jit
def delementwise_kernel(
    dy_ptr, x_ptr, operands, dx_ptr, codes, d_operands, y_ptr, column_sums_ptr, T, COLUMNS, WIDTH,
    STEPS: tl.constexpr, BACKWARDS: tl.constexpr, D_OPERANDS: tl.constexpr, READS: tl.constexpr, KINDS: tl.constexpr,
    CONSTANTS: tl.constexpr, DTYPES: tl.constexpr, ENTERS: tl.constexpr, LEAVES: tl.constexpr, COUNT: tl.constexpr,
    GATE: tl.constexpr, INTERLEAVE: tl.constexpr, SOURCE: tl.constexpr, FORM: tl.constexpr, NATIVE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr, TILES: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """TILES tiles below each other a program. sums_a and sums_b: what is summed over the rows, and last of all dx."""
    column_blocks = tl.cdiv(COLUMNS, BLOCK_C)
    row_block = tl.program_id(0) // column_blocks
    column_block = tl.program_id(0) % column_blocks
    first_column = column_block * BLOCK_C
    columns = first_column + tl.arange(0, BLOCK_C)
    columns_a, columns_b = _columns_of_lanes(columns, COLUMNS, INTERLEAVE)
    sums_a = _zeros(COUNT + 1, BLOCK_T, BLOCK_C)
    sums_b = _zeros(COUNT + 1, BLOCK_T, BLOCK_C)
    for tile in tl.range(TILES, num_stages=STAGES):
        rows = (row_block * TILES + tile) * BLOCK_T + tl.arange(0, BLOCK_T)
        inside = (rows < T)[:, None] & (columns < COLUMNS)[None, :]
        start = rows.to(tl.int64)[:, None]
        da = widen(tl.load(dy_ptr + start * COLUMNS + columns[None, :], mask=inside, other=0)).to(tl.float32)
        db = da
        a = da
        b = da
        if x_ptr is not None:
            a = widen(tl.load(x_ptr + start * WIDTH + columns_a[None, :], mask=inside, other=0)).to(tl.float32)
            b = a
            if GATE >= 0:
                b = widen(tl.load(x_ptr + start * WIDTH + columns_b[None, :], mask=inside, other=0)).to(tl.float32)
        if y_ptr is not None:
            y, _ = _up_to(
                a, b, COUNT, operands, rows, columns, columns_a, columns_b, first_column, T, COLUMNS, WIDTH, inside,
                STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, GATE,
            )  # fmt: skip
            tl.store(y_ptr + start * COLUMNS + columns[None, :], round_to(y, y_ptr.dtype.element_ty), mask=inside)
        for i in tl.static_range(COUNT - 1, -1, -1):
            xa, xb = a, b
            if READS[i]:
                xa, xb = _up_to(
                    a, b, i, operands, rows, columns, columns_a, columns_b, first_column, T, COLUMNS, WIDTH, inside,
                    STEPS, KINDS, CONSTANTS, DTYPES, ENTERS, GATE,
                )  # fmt: skip
            if i < GATE:
                da, sums_a = _back(
                    da, xa, sums_a, i, operands, d_operands, column_block, rows, columns_a, 0, T, WIDTH, inside,
                    STEPS, BACKWARDS, D_OPERANDS, KINDS, CONSTANTS, DTYPES, ENTERS, LEAVES,
                )  # fmt: skip
                db, sums_b = _back(
                    db, xb, sums_b, i, operands, d_operands, column_block, rows, columns_b, 0, T, WIDTH, inside,
                    STEPS, BACKWARDS, D_OPERANDS, KINDS, CONSTANTS, DTYPES, ENTERS, LEAVES,
                )  # fmt: skip
            elif i == GATE:
                if LEAVES[i]:
                    da = _rounded(da, tl.constexpr(DTYPES[i]))
                if ENTERS[i]:
                    xa = _rounded(xa, tl.constexpr(DTYPES[i]))
                    xb = _rounded(xb, tl.constexpr(DTYPES[i]))
                A = tl.constexpr(CONSTANTS[3 * i])
                B = tl.constexpr(CONSTANTS[3 * i + 1])
                C = tl.constexpr(CONSTANTS[3 * i + 2])
                if KINDS[i] == "row":
                    if d_operands[i] is not None:
                        _store_row_share(da * STEPS[i](xa, xb, A, B, C), d_operands[i], column_block, rows, T, inside)
                    da *= _operand(operands[i], "row", rows, columns, 0, T, COLUMNS, inside)
                da, db = BACKWARDS[i](da, xa, xb, A, B, C)
                da = _rounded(da, tl.constexpr(DTYPES[i]))
                db = _rounded(db, tl.constexpr(DTYPES[i]))
            else:
                da, sums_a = _back(
                    da, xa, sums_a, i, operands, d_operands, column_block, rows, columns, first_column, T, COLUMNS,
                    inside, STEPS, BACKWARDS, D_OPERANDS, KINDS, CONSTANTS, DTYPES, ENTERS, LEAVES,
                )  # fmt: skip
        if dx_ptr is not None:
            tl.store(dx_ptr + start * WIDTH + columns_a[None, :], round_to(da, dx_ptr.dtype.element_ty), mask=inside)
            if GATE >= 0:
                at = start * WIDTH + columns_b[None, :]
                tl.store(dx_ptr + at, round_to(db, dx_ptr.dtype.element_ty), mask=inside)
        _store_codes(da, codes, rows, columns, T, COLUMNS, inside, FORM, NATIVE)
        if column_sums_ptr is not None:
            sums_a = _added(sums_a, COUNT, tl.where(inside, da, 0.0))
            if GATE >= 0:
                sums_b = _added(sums_b, COUNT, tl.where(inside, db, 0.0))
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
