"""Tensors without numbers: on the meta device, and those with which torch traces (torch.compile, torch.export)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, disable_fake_tensor_cache


def is_abstract(tensor: Tensor) -> bool:
    """Whether the tensor has a shape, strides and a dtype, but no numbers that could be read."""
    return tensor.is_meta or isinstance(tensor, FakeTensor)


def with_known_memory(tensor: Tensor) -> AbstractContextManager[Any]:
    """A scope in which views of such tensors lie in their memory. From torch's cache of what fake tensors give come
    views in memory of their own (torch 2.13: `prims.as_strided` is cached as no view)."""
    return disable_fake_tensor_cache(tensor.fake_mode) if isinstance(tensor, FakeTensor) else nullcontext()
