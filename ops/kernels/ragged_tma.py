"""TMA descriptors one axis of which ends where a group ends: the hardware clips a box there, no mask is needed.

The axis is made 2^30 long and shifted so that its last element is the group's last: a box at `size - 2^30` before that
end starts at the group's first element, and what lies past the end reads as zero and is not written. Two more axes in
front do the shift; they rely on addresses that wrap around at 2^64:

    address = (2^30 / unit) * (2^34 - s) * unit  +  (first + size) / unit * (s * unit)  +  (2^30 - size + i) * s
            = 2^64  +  (first + i) * s                                      s: distance of the axis' elements

`unit`: both ends of every group are multiples of it. Strides of a descriptor are multiples of 16 bytes, so the last
axis (s = 1) of one-byte elements needs a unit of 16. The scheme is that of `triton.tools.ragged_tma`, which knows no
unit and so leaves the last axis out.
"""

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

_LENGTH = 2**30  # of the axis: the most elements it may have
_UNBOUNDED = 0x7FFF0000


def takes_descriptors(*tensors: Tensor) -> bool:
    """May descriptors describe these? Nothing empty or overlapping, elements of a row side by side, rows (and matrices)
    multiples of 16 bytes apart."""
    return all(
        x.numel() > 0
        and x.data_ptr() % 16 == 0
        and x.stride(-1) == 1
        and all(
            x.stride(d) * x.itemsize % 16 == 0 and x.stride(d) >= x.stride(d + 1) * x.shape[d + 1]
            for d in range(x.dim() - 1)
        )
        for x in tensors
    )


def ragged_descriptor(x: Tensor, box: tuple[int, int], *, axis: int, unit: int = 1) -> TensorDescriptor:
    """A descriptor of the matrix x for boxes of this shape, ragged along `axis`. Boxes have shape [1, 1, *box]."""
    shape, strides = list(x.shape), [x.stride(0), x.stride(1)]
    assert shape[axis] <= _LENGTH, f"an axis of {shape[axis]} elements, but 2^30 are the most"
    shape[axis] = _LENGTH
    step = strides[axis]
    return TensorDescriptor(
        x, [_UNBOUNDED, _UNBOUNDED, *shape], [unit * (2**34 - step), unit * step, *strides], [1, 1, *box]
    )


@triton.jit
def ragged_indices(first, size, i, UNIT: tl.constexpr):
    """The two leading indices and the one along the ragged axis, of element i of a group at `first`."""
    LENGTH: tl.constexpr = 2**30
    return LENGTH // UNIT, ((first + size) // UNIT).to(tl.int32), (LENGTH - size + i).to(tl.int32)
