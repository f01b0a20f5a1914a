"""What becomes of the sums of a tile of `m_grouped_gluon`: times their scales, with their bias, rounded, stored. And
zeros in the rows of no group.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# T rows, G groups, C features that come out

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from ops.kernels.grouped_gemm.ragged_tma import ragged_indices
from ops.kernels.grouped_gemm.stores_gluon import rounded_boxes, split_columns, store_box
from recipes.triton.names_gluon import tma_store


@gluon.jit
def load_vectors(
    row_scale_ptr, column_scale_ptr, height, width, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr,
    columns: gl.constexpr = None,
):  # fmt: skip
    """The scales of HEIGHT rows and WIDTH columns of sums that lie so, or those of columns as of sums that lie as
    `columns`; from `height` and `width` on they are 0."""
    of_columns: gl.constexpr = layout if columns is None else columns
    offs_m = gl.arange(0, HEIGHT, gl.SliceLayout(1, layout))
    offs_n = gl.arange(0, WIDTH, gl.SliceLayout(0, of_columns))
    row_scale = gl.load(row_scale_ptr + offs_m, mask=offs_m < height, other=0.0)
    column_scale = gl.load(column_scale_ptr + offs_n, mask=offs_n < width, other=0.0)
    return row_scale, column_scale


@gluon.jit
def times_vectors(acc, row_scale, column_scale):
    """acc * row_scale[:, None] * column_scale[None, :], in this order."""
    return acc * gl.expand_dims(row_scale, 1) * gl.expand_dims(column_scale, 0)


@gluon.jit
def load_spread_vectors(
    row_scale_ptr, column_scale_ptr, height, width, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, layout: gl.constexpr
):
    """`load_vectors` for `boxes_times_vectors`: a thread has each 32nd column, in an eighth of the registers."""
    spread: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
    return load_vectors(row_scale_ptr, column_scale_ptr, height, width, HEIGHT, WIDTH, layout, spread)


@gluon.jit
def boxes_times_vectors(acc, row_scale, column_scale, out):
    """`rounded_boxes` of acc times `load_spread_vectors`, as `times_vectors`: the columns of a box at a time."""
    if acc.shape[1] > out.block_shape[-1]:
        left, right = split_columns(acc)
        of_left, of_right = column_scale.reshape([2, acc.shape[1] // 2]).permute([1, 0]).split()
        return boxes_times_vectors(left, row_scale, of_left, out) + boxes_times_vectors(right, row_scale, of_right, out)
    else:
        row_scale = gl.convert_layout(row_scale, gl.SliceLayout(1, acc.type.layout), assert_trivial=True)
        column_scale = gl.convert_layout(column_scale, gl.SliceLayout(0, acc.type.layout))
        return rounded_boxes(times_vectors(acc, row_scale, column_scale), out)


@gluon.jit
def finished_boxes(
    acc, out, staging, vectors, added, group, first, size, row, column, C, PART: gl.constexpr
):  # fmt: skip
    """Rounds acc, with its bias: it is row `row` of the `size` rows from `first` on, at this column. vectors: scales of
    all rows and columns that acc is multiplied by first, or None and None.

    staging: boxes in shared memory by way of which acc is stored box by box, in turn; PART: of so many parts as wide as
    acc, which it is. None: its boxes are returned, from left to right.
    """
    if acc.shape[1] > out.block_shape[3]:
        left, right = split_columns(acc)
        middle = column + acc.shape[1] // 2
        boxes = finished_boxes(left, out, staging, vectors, added, group, first, size, row, column, C, 2 * PART)
        return boxes + finished_boxes(
            right, out, staging, vectors, added, group, first, size, row, middle, C, 2 * PART + 1
        )
    else:
        bias_ptr, scales_ptr = added
        if vectors[0] is not None:
            layout: gl.constexpr = acc.type.layout
            of_rows, of_columns = load_vectors(
                vectors[0] + first + row, vectors[1] + group.to(gl.int64) * C + column, size - row, C - column,
                acc.shape[0], acc.shape[1], layout,
            )  # fmt: skip
            acc = times_vectors(acc, of_rows, of_columns)
        if bias_ptr is not None:
            offs_c = column + gl.arange(0, acc.shape[1], gl.SliceLayout(0, acc.type.layout))
            bias = gl.load(bias_ptr + group.to(gl.int64) * C + offs_c, mask=offs_c < C, other=0.0).to(gl.float32)
            bias = gl.expand_dims(bias, 0)
            if scales_ptr is not None:
                offs_t = row + gl.arange(0, acc.shape[0], gl.SliceLayout(1, acc.type.layout))
                scales = gl.load(scales_ptr + first + offs_t, mask=offs_t < size, other=0.0).to(gl.float32)
                bias = bias * gl.expand_dims(scales, 1)
            acc = acc + bias
        if staging is None:
            return rounded_boxes(acc, out)
        else:
            z, y, at = ragged_indices(first, size, row, 1)
            store_box(acc.to(out.dtype), out, staging, PART, (z, y, at), column)
            return ()


@gluon.jit
def finished(
    acc, out, staging, scales, added, group, first, size, row, column, C, LAYOUT: gl.constexpr, EARLY: gl.constexpr,
    PART: gl.constexpr = 0,
):  # fmt: skip
    """`finished_boxes` of acc times its scales."""
    a_scale_ptr, b_scale_ptr, a_scale_stride, b_scale_stride = scales
    vectors = None, None
    if LAYOUT == "tensor":  # one after the other, as `scale_sums`
        if a_scale_ptr is not None:
            acc = acc * gl.load(a_scale_ptr + group * a_scale_stride)
        if b_scale_ptr is not None:
            acc = acc * gl.load(b_scale_ptr + group * b_scale_stride)
    elif LAYOUT == "vector" and not EARLY:
        vectors = a_scale_ptr, b_scale_ptr
    return finished_boxes(acc, out, staging, vectors, added, group, first, size, row, column, C, PART)


@gluon.jit
def zero_tail(out, staging, offsets_ptr, rows, num_groups, C, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr):
    """Zeros in the rows of no group, shared among the consumers of all programs."""
    HEIGHT: gl.constexpr = out.block_shape[2]
    WIDTH: gl.constexpr = out.block_shape[3]
    # Through assembly: else Triton 3.7 computes the address before the products, and spills it.
    last = gl.inline_asm_elementwise(
        "mov.b32 $0, $1;", "=r,r", [num_groups], dtype=gl.int32, is_pure=False, pack=1
    )  # fmt: skip
    first = gl.load(offsets_ptr + last)
    size = (rows - first).to(gl.int32)
    if size > 0:
        num_tiles_n = gl.cdiv(C, WIDTH)
        num_tiles = gl.cdiv(size, HEIGHT) * num_tiles_n
        tma.store_wait(0)
        box = staging.index(0)
        layout: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
        box.store(gl.zeros([HEIGHT, WIDTH], out.dtype, layout))
        fence_async_shared()
        for tile in range(CONSUMERS * gl.program_id(0) + CONSUMER, num_tiles, CONSUMERS * gl.num_programs(0)):
            z, y, at = ragged_indices(first, size, tile // num_tiles_n * HEIGHT, 1)
            tma_store(out, [z, y, at, tile % num_tiles_n * WIDTH], box.reshape(out.block_shape))
