"""Tensors without numbers: on the meta device, and those with which torch traces (torch.compile, torch.export)."""

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor


def is_abstract(tensor: Tensor) -> bool:
    """Whether the tensor has a shape, strides and a dtype, but no numbers that could be read."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)
