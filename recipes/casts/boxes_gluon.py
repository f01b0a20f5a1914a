"""What kernels in Gluon share that quantize boxes of bfloat16 numbers, which the copy engine brings into shared memory:
their descriptors, how they lie there, how threads take them apart and write their codes.

Import this only where `recipes.triton.gates.why_no_gluon` says None.
"""

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from recipes.casts.cast_nvfp4_triton import split_in_four
from recipes.triton.repeated import DESCRIPTORS

DESCRIPTORS.add(TensorDescriptor)

BOX_LAYOUT = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2))
PLAIN_LAYOUT = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))  # of vectors
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
STORE_FOUR = gl.constexpr("""{
            .reg .pred there;
            setp.ne.b32 there, $6, 0;
            @there st.global.v4.b32 [$1], {$2, $3, $4, $5};
            mov.b32 $0, 0;
            }""")


def boxes_of(x: Tensor, rows: int, columns: int) -> TensorDescriptor:
    """A descriptor of boxes of so many rows and columns of contiguous x, of all its rows."""
    matrix = x if x.ndim == 2 else x.view(-1, x.shape[-1])
    return TensorDescriptor(matrix, list(matrix.shape), list(matrix.stride()), [rows, columns], BOX_LAYOUT.value)


@gluon.jit
def in_eight(x):
    """x [R, C, 8] as eight tensors [R, C]."""
    even, odd = x.reshape([x.shape[0], x.shape[1], 4, 2]).split()
    x0, x2, x4, x6 = split_in_four(even)
    x1, x3, x5, x7 = split_in_four(odd)
    return x0, x1, x2, x3, x4, x5, x6, x7


@gluon.jit
def in_sixteen(x):
    """x [R, C, 16] as sixteen tensors [R, C]."""
    even, odd = x.reshape([x.shape[0], x.shape[1], 8, 2]).split()
    x0, x2, x4, x6, x8, x10, x12, x14 = in_eight(even)
    x1, x3, x5, x7, x9, x11, x13, x15 = in_eight(odd)
    return x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15
