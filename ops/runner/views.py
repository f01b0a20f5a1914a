"""How tensors lie in the memory of others: what an operation of torch may return, and keeps for backward."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class View(NamedTuple):
    """How a tensor lies in another one. offset: from that one's first element."""

    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int


def memory_number(tensor: Tensor) -> int:
    """One number for all tensors in the same memory, which is known of those without numbers too."""
    return tensor.untyped_storage()._cdata


def in_own_memory(tensor: Tensor, others: Sequence[Tensor]) -> Tensor:
    """The tensor, contiguous, or a copy where another one lies in its memory: torch lets no two results share it."""
    memory = memory_number(tensor)
    if any(memory_number(other) == memory for other in others):
        return tensor.clone(memory_format=torch.contiguous_format)
    return tensor.contiguous()


def view_in(tensor: Tensor | None, base: Tensor) -> View | None:
    """How the tensor lies in base, which has the same memory. Raises NotImplementedError if it reaches beyond it."""
    if tensor is None:
        return None
    offset = int(tensor.storage_offset() * tensor.itemsize - base.storage_offset() * base.itemsize)
    end = offset + _extent(tensor)
    if offset < 0 or offset % tensor.itemsize or end > _extent(base):
        raise NotImplementedError(
            f"What forward keeps for backward, {list(tensor.shape)}, reaches beyond the tensor {list(base.shape)} in "
            "whose memory it lies, so it cannot be one operation of torch. Leave this module out of torch.compile: "
            "torch.compiler.disable(module)."
        )
    return View(tensor.dtype, tuple(tensor.shape), tensor.stride(), offset // tensor.itemsize)


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to the end of the last one."""
    if not tensor.numel():
        return 0
    return tensor.itemsize * (1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True)))


def restored(base: Tensor, view: View | None) -> Tensor:
    """The tensor that lies so in base."""
    assert view is not None, "of each source there is a view"
    if (base.dtype, base.shape, base.stride(), 0) == view:
        return base
    if base.dtype == view.dtype:
        return base.as_strided(view.size, view.stride, base.storage_offset() + view.offset)
    begin = base.storage_offset() * base.itemsize // view.dtype.itemsize
    memory = torch.empty(0, dtype=view.dtype, device=base.device).set_(base.untyped_storage())
    return memory.as_strided(view.size, view.stride, begin + view.offset)
