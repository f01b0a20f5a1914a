"""TMA descriptors one axis of which ends where a group ends: the hardware clips a box there, no mask is needed.

The axis is made 2^30 long and shifted so that its last element is the group's last: a box at `size - 2^30` before that
end starts at the group's first element, and what lies past the end reads as zero and is not written. Two more axes in
front do the shift; they rely on addresses that wrap around at 2^64:

    address = (2^30 / unit) * (2^34 - s) * unit  +  (first + size) / unit * (s * unit)  +  (2^30 - size + i) * s
            = 2^64  +  (first + i) * s                                      s: distance of the axis' elements

`unit`: both ends of every group are multiples of it. Strides of a descriptor are multiples of 16 bytes, so the last
axis (s = 1) of one-byte elements needs a unit of 16. The scheme is that of `triton.tools.ragged_tma`, which has no
unit and so leaves the last axis out.
"""

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from recipes.triton.gates import TensorDescriptor, tl, triton

_LENGTH = 2**30  # of the axis: the most elements it may have
_UNBOUNDED = 0x7FFF0000


def takes_descriptors(*tensors: Tensor) -> bool:
    """Whether descriptors can describe these: not empty or overlapping, contiguous rows, and rows (and matrices)
    multiples of 16 bytes apart."""
    for x in tensors:
        *outer, step = x.stride()
        if step != 1 or x.data_ptr() % 16 or not x.numel():
            return False
        least = x.shape[-1]
        for size, stride in zip(reversed(x.shape[:-1]), reversed(outer), strict=True):
            if stride < least or stride * x.itemsize % 16:
                return False
            least = stride * size
    return True


def descriptor(x: Tensor, box: tuple[int, ...]) -> TensorDescriptor:
    """A descriptor for boxes of x, which is one that `takes_descriptors` takes."""
    return _over(x, _fields(x.dtype, x.shape, x.stride(), box))


def descriptor_by_parity(x: Tensor, height: int, width: int) -> TensorDescriptor:
    """A descriptor of x [G, N, K] for boxes of so many rows, in which the even rows of each sixteen come before the odd
    ones. Boxes have shape [1, height / 16, 2, 8, width]; N and height are multiples of 16."""
    (G, N, K), (matrix, row, _) = x.shape, x.stride()
    shape, strides = (G, N // 16, 2, 8, K), (matrix, 16 * row, row, 2 * row, 1)
    return _over(x, _fields(x.dtype, shape, strides, (1, height // 16, 2, 8, width)))


def ragged_descriptor(x: Tensor, box: tuple[int, int], *, axis: int, unit: int = 1) -> TensorDescriptor:
    """A descriptor of the matrix x for boxes of this shape, ragged along `axis`. Boxes have shape [1, 1, *box]."""
    assert x.shape[axis] <= _LENGTH, f"an axis of {x.shape[axis]} elements, but 2^30 are the most"
    return _over(x, _ragged_fields(x.dtype, x.shape[1 - axis], x.stride(0), box, axis, unit))


def _over(x: Tensor, fields: dict[str, Any]) -> TensorDescriptor:
    """The descriptor without the checks of its constructor, which take longer than all else of a launch."""
    made = TensorDescriptor.__new__(TensorDescriptor)
    made.__dict__ |= fields
    made.base = x
    return made


@lru_cache(maxsize=4096)
def _fields(
    dtype: torch.dtype, shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...]
) -> dict[str, Any]:
    """The fields of a descriptor of such tensors, checked by its constructor. Its base is not one of them."""
    return vars(TensorDescriptor(torch.empty(0, dtype=dtype), list(shape), list(strides), list(box)))


@lru_cache(maxsize=4096)
def _ragged_fields(
    dtype: torch.dtype, other: int, row: int, box: tuple[int, int], axis: int, unit: int
) -> dict[str, Any]:
    """The same for the ragged. other: elements along the other axis. row: distance of rows."""
    step = (row, 1)[axis]
    shape = (_LENGTH, other) if axis == 0 else (other, _LENGTH)
    strides = (unit * (2**34 - step), unit * step, row, 1)
    return _fields(dtype, (_UNBOUNDED, _UNBOUNDED, *shape), strides, (1, 1, *box))


@triton.jit
def ragged_indices(first, size, i, UNIT: tl.constexpr):
    """The two leading indices and the one along the ragged axis, of element i of a group at `first`."""
    LENGTH: tl.constexpr = 2**30
    return LENGTH // UNIT, ((first + size) // UNIT).to(tl.int32), (LENGTH - size + i).to(tl.int32)
