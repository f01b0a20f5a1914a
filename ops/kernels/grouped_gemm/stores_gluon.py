"""Storing the sums of a tile in Gluon: box by box, by way of shared memory (TMA).

Rounded to 16 bits a tile takes half the registers of its sums. So a consumer may keep its last tile (`rounded_boxes`)
and store it when the first products of its next one are on their way: then it waits for nothing in between.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma

from recipes.triton.names_gluon import reinterpret, tma_store


@gluon.jit
def split_columns(acc):
    """The left and the right half of a tile: registers of the same threads."""
    split = acc.reshape([acc.shape[0], 2, acc.shape[1] // 2])
    return split.permute([0, 2, 1]).split()


@gluon.jit
def joined_columns(left, right):
    """The inverse of `split_columns`."""
    both = gl.join(left, right).permute([0, 2, 1])
    return both.reshape([left.shape[0], 2 * left.shape[1]])


@gluon.jit
def rounded_boxes(acc, out, DTYPE: gl.constexpr = None):
    """A tuple of acc's boxes, from left to right, as they are stored in out. DTYPE: None for out's."""
    if acc.shape[1] > out.block_shape[-1]:
        left, right = split_columns(acc)
        return rounded_boxes(left, out, DTYPE) + rounded_boxes(right, out, DTYPE)
    else:
        layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, acc.shape[1], 16])
        rounded = acc.to(out.dtype if DTYPE is None else DTYPE)
        return (gl.convert_layout(rounded, layout, assert_trivial=True),)


@gluon.jit
def boxes_of_none(out, HEIGHT: gl.constexpr, WIDTH: gl.constexpr, DTYPE: gl.constexpr = None):
    """`rounded_boxes` of a tile that there is not."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 16])
    return rounded_boxes(gl.zeros([HEIGHT, WIDTH], gl.float32, layout), out, DTYPE)


@gluon.jit
def allocate_staging(out, BOXES: gl.constexpr, CONSUMERS: gl.constexpr, DTYPE: gl.constexpr = None):
    """So many boxes of out in shared memory for each consumer, as a tuple of each one's. DTYPE: None for out's."""
    HEIGHT: gl.constexpr = out.block_type.numel // out.block_shape[-1]
    WIDTH: gl.constexpr = out.block_shape[-1]
    dtype: gl.constexpr = out.dtype if DTYPE is None else DTYPE
    layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([HEIGHT, WIDTH], dtype)
    stagings = ()
    for _ in gl.static_range(CONSUMERS):
        boxes = gl.allocate_shared_memory(dtype, [BOXES, HEIGHT, WIDTH], layout)
        stagings = stagings + (boxes,)  # type: ignore[assignment]  # noqa: RUF005
    return stagings


@gluon.jit
def store_box(box, out, staging, PART: gl.constexpr, place, column, EVERY: gl.constexpr = 1):
    """Stores a box at these coordinates of out. Its elements may be words of several of out's. staging: boxes in shared
    memory, which the parts of a tile take in turn, each EVERY-th of them."""
    STAGING: gl.constexpr = staging.shape[0] // EVERY
    stage = staging.index(PART % STAGING * EVERY)
    tma.store_wait(STAGING - 1)
    if box.dtype == out.dtype:
        stage.store(box)
    else:
        layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for(box.shape, box.dtype)
        reinterpret(stage, box.dtype, box.shape, layout).store(box)
    fence_async_shared()
    tma_store(out, place + (column,), stage.reshape(out.block_shape))  # noqa: RUF005


@gluon.jit
def store_boxes(last, HALF: gl.constexpr):
    """Stores half of the boxes of a tile. last: these, the coordinates of the first one, out, and as above."""
    boxes, place, column, out, staging = last
    COUNT: gl.constexpr = len(boxes) // 2
    for i in gl.static_range(HALF * COUNT, HALF * COUNT + COUNT):
        store_box(boxes[i], out, staging, i, place, column + i * out.block_shape[-1])


@gluon.jit
def store_tile(last):
    """Stores all boxes of a tile."""
    store_boxes(last, 0)
    store_boxes(last, 1)
