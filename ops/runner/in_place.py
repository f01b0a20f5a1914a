"""Which memory an operation may write into: memory whose values nothing else still needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from ops.runner.callers_buffers import CallersBuffer, place_of

_PLAIN = (Tensor, torch.nn.Parameter)


def check_writable(
    name: str,
    target: Tensor,
    x: Any,
    *,
    needs_grad: bool,
    given: Iterable[Tensor],
    operations: Sequence[torch.nn.Module],
    kept: Sequence[Sequence[Tensor | None]],
    buffers: Sequence[CallersBuffer],
    labels: Sequence[str],
    read_later: Mapping[str, Any],
) -> None:
    """Raise, before anything is changed, if writing into the extra input `target` would make gradients or values wrong.

    x: what the operation adds to it
    needs_grad: whether the operation has a backward
    given: the tensors that autograd tracks as the pipeline's inputs
    operations: all of them; kept: what the earlier ones keep for backward; buffers: the caller's own
    read_later: the extra tensors, by name, that are read or returned after the write

    ValueError for elements that share memory. RuntimeError for an inference tensor outside of inference mode, for a
    leaf that requires grad, for a view of the caller's memory, for memory that something else needs, and for a
    subclass of Tensor.
    """
    if type(target) not in _PLAIN:
        raise RuntimeError(
            f"{name} is a {type(target).__name__}, of which the pipeline cannot tell who else uses its memory, so it "
            "cannot be written in place. Give in_place=False."
        )
    if not _is_dense(target):
        raise ValueError(
            f"{name} has strides {list(target.stride())} for its shape {list(target.shape)}: elements of it may share "
            f"memory, so it cannot be written in place. Give {name}.contiguous()."
        )
    if target.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            f"{name} is an inference tensor, which can be written only in torch.inference_mode(). Give a clone of it."
        )
    if needs_grad and target.is_leaf and target.requires_grad:
        raise RuntimeError(
            f"Give in_place=False: {name} is a leaf that requires grad, which cannot be written in place; or give a "
            "clone of it."
        )
    memory = memory_of(target)
    if isinstance(x, Tensor) and _shares(memory, [x]) and not x.is_set_to(target):
        raise RuntimeError(
            f"{name} and x lie in the same memory, but not element by element, so it cannot be written in place. "
            "Give in_place=False, or a clone of it."
        )
    if needs_grad and _shares(memory, given) and (target._is_view() or all(target is not other for other in given)):
        raise RuntimeError(
            f"{name} is a view of a tensor of the caller's, and autograd could not see that it is written in place. "
            "Give in_place=False, or a clone of it."
        )
    for at, operation in enumerate(operations):
        where = place_of(labels[at], operation)
        given_to_it = [buffer.tensor for buffer in buffers if buffer.place == where]
        for held, what in ((kept[at] if at < len(kept) else (), "keeps for its backward"),
                           (operation.parameters(), "has as a parameter"),
                           (given_to_it, "was given as a buffer")):  # fmt: skip
            if _shares(memory, held):
                raise RuntimeError(
                    f"{name} lies in memory that {where} {what}, so it cannot be written in place. Give in_place=False."
                )
    for other, value in read_later.items():
        if other != name and isinstance(value, Tensor) and _shares(memory, [value]):
            raise RuntimeError(
                f"{name} lies in the same memory as {other!r}, which is used later, so it cannot be written in place. "
                "Give in_place=False."
            )


def writable(product: Tensor) -> Tensor:
    """A tensor that torch has just made, or a copy where a mode watches: selective checkpointing keeps products."""
    return product if _get_current_dispatch_mode() is None else product.clone()


def memory_of(tensor: Tensor) -> int:
    """The address of a tensor's memory, the same for all its views; 0 if it has none (empty, meta, or a subclass)."""
    return tensor.untyped_storage().data_ptr() if type(tensor) in _PLAIN else 0


def _shares(memory: int, others: Iterable[Tensor | None]) -> bool:
    return memory != 0 and any(other is not None and memory_of(other) == memory for other in others)


def _is_dense(tensor: Tensor) -> bool:
    """Whether no two elements can share memory: each stride steps over all that the smaller ones reach."""
    if tensor.is_contiguous():
        return True
    reached = 0
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size > 1:
            if stride <= reached:
                return False
            reached += stride * (size - 1)
    return True
