"""Split accumulation of codes in Gluon: each step's product is added to the sums in float32.

The columns are taken in halves, one after the other: so sums of 64 x 256 and the product of a step fit the registers of
a consumer. While one consumer adds, the other multiplies.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""
# R summed features, C features that come out

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from ops.kernels.grouped_gemm.stores_gluon import store_boxes


@gluon.jit
def product_apart(acc, a_stage, b_stage):
    """The product of a step, on its way: it is to be added to acc in float32."""
    return warpgroup_mma(a_stage, b_stage, gl.zeros_like(acc), use_acc=False, is_async=True)


@gluon.jit
def add_product(acc, a_stage, b_stage):
    """acc + the product of a step, added in float32."""
    product = product_apart(acc, a_stage, b_stage)
    return acc + warpgroup_mma_wait(0, deps=[product])


@gluon.jit
def zero_halves(HEIGHT: gl.constexpr, WIDTH: gl.constexpr):
    """The left and the right half of the columns of sums, for `add_to_halves`."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH // 2, 32])
    half = gl.zeros([HEIGHT, WIDTH // 2], gl.float32, layout)
    return half, half


@gluon.jit
def add_to_halves(left, right, a_stage, b_stage, last):
    """Adds a step's product in float32, one half after the other, so that it fits the registers. b_stage [C, R]. last:
    what is stored meanwhile (`store_boxes`), or None."""
    HALF: gl.constexpr = left.shape[1]
    product = product_apart(left, a_stage, b_stage.slice(0, HALF, 0).permute([1, 0]))
    if last is not None:
        store_boxes(last, 0)
    left = left + warpgroup_mma_wait(0, deps=[product])
    product = product_apart(right, a_stage, b_stage.slice(HALF, HALF, 0).permute([1, 0]))
    if last is not None:
        store_boxes(last, 1)
    right = right + warpgroup_mma_wait(0, deps=[product])
    return left, right
