"""What may go into a pipeline as x, and as an extra tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ops.runner.context import IndexTensor
from recipes.arguments import NUMBERS
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_handle import QuantizedHandle
from recipes.tensors.quantized_shard import is_dtensor
from recipes.tensors.quantized_tensor import QuantizedTensor

_PLAIN = (Tensor, nn.Parameter)
_LAYOUTS = frozenset((torch.strided, torch.jagged))


def as_input(x: Any) -> Tensor:
    """x itself, or a handle of a quantized container. Raises TypeError for an x that is neither."""
    if isinstance(x, Tensor):
        return x
    if isinstance(x, QuantizedTensor | GroupedTensor):
        return QuantizedHandle(x)
    raise TypeError(f"x is a {type(x).__name__}. Give a tensor.")


def as_stored(tensor: Tensor) -> Tensor:
    """The tensor, with its numbers in memory, which kernels read: of z.conj().imag the other signs are there, and of a
    zero tensor of autograd nothing."""
    if type(tensor) not in _PLAIN or is_stored(tensor):
        return tensor
    return tensor.clone() if tensor._is_zerotensor() else tensor.resolve_neg()


def is_stored(tensor: Tensor) -> bool:
    """Whether the numbers of a plain tensor are those in its memory."""
    return not (tensor.is_neg() or tensor._is_zerotensor())


def check_local(tensors: Iterable[tuple[str, Any]]) -> None:
    """Raise TypeError for a tensor that is not plain, and for a DTensor. The codes of that would be wrong: torch 2.13
    does not shift one of int32 right."""
    for name, tensor in tensors:
        why = why_not_plain(name, tensor)
        if why is not None:
            raise TypeError(why)
        if type(tensor) is not Tensor and is_dtensor(tensor):
            raise TypeError(
                f"{name} is a DTensor, but operations compute on plain tensors. Take to_local() or full_tensor() of "
                "it. To divide a layer, give it tensor_parallel= in place of distribute_module or parallelize_module; "
                "what fully_shard divides is gathered by a call of the module that it was given."
            )


def why_not_plain(name: str, value: Any) -> str | None:
    """Why a tensor is refused that is sparse, in a layout of MKL-DNN's or nested, as a sentence; None for anything
    else."""
    if not isinstance(value, Tensor):
        return None
    if value.layout not in _LAYOUTS:
        return (
            f"{name} is in the layout {value.layout}, but operations compute on dense tensors. Give {name}.to_dense()."
        )
    if not value.is_nested:
        return None
    if value.layout is torch.jagged:
        rows, sizes = f"{name}.values()", f"{name}.offsets().diff()"
    else:
        rows, sizes = f"torch.cat({name}.unbind())", f"[len(part) for part in {name}.unbind()]"
    return (
        f"{name} is a nested tensor ({value.layout}) of {value.size(0)} parts, but operations need plain tensors, with "
        f"the rows of all parts one behind the other. Give {rows}; where the parts are groups, with "
        f"split_sizes={sizes}."
    )


def check_real(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError for complex numbers, of which the imaginary part would be lost."""
    if dtype.is_complex:
        raise TypeError(
            f"{name} is {dtype}, but operations compute in real numbers. Give its real and imaginary parts."
        )


def check_extra_tensor(name: str, value: Any, device: torch.device, kind: type) -> None:
    """Raise TypeError for an extra input that is no tensor, or one where it is declared of another kind, and would have
    no gradient; ValueError for one that is not on x's device.

    A CPU tensor without dimensions goes with any x, as everywhere in torch.
    """
    if kind not in (Tensor, IndexTensor):
        if isinstance(value, Tensor):
            raise TypeError(
                f"The extra input {name!r} is a tensor, but it is declared {kind!r}. Declare it a torch.Tensor or an "
                "IndexTensor."
            )
        return
    if not isinstance(value, Tensor):
        given = "None" if value is None else f"a {type(value).__name__}"
        raise TypeError(f"The extra input {name!r} is {given}, which is no tensor. Give one.")
    if value.device != device and (value.dim() or value.device.type != "cpu"):
        raise ValueError(f"x is on {device}, but the extra input {name!r} is on {value.device}. Move one of them.")


def check_numbers(dtype: torch.dtype, operations: Iterable[Any]) -> None:
    """Raise TypeError for numbers in which one of the operations cannot compute."""
    check_real("x", dtype)
    if dtype in NUMBERS:
        return
    computes_in, scale = "floating point", ""
    if dtype.is_floating_point:
        computes_in, scale = "bfloat16, float16, float32 or float64", ", times its scale if it has one"
    for operation in operations:
        if not operation.accepts_integers:
            raise TypeError(
                f"x is {dtype}, but {type(operation).__name__} computes in {computes_in}. "
                f"Convert it: x.to(torch.float32){scale}."
            )
