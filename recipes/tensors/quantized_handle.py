"""QuantizedHandle: a torch.Tensor that stands for a quantized container where only a Tensor can stand.

That is in autograd's graph (a quantized input that needs a gradient, an output with a history, a gradient given to
`backward`) and, as `QuantizedParameter`, among a module's parameters. Operations take the container out and compute
with its codes; no kernel sees a handle. Any other function of torch computes with the dequantized values, and returns
ordinary tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any, ClassVar, Self

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.values_view import views, written_by

Quantized = QuantizedTensor | GroupedTensor

_aten = torch.ops.aten
_COLLECTIVES = ("c10d", "_c10d_functional")
_SAME = frozenset((_aten.detach.default, _aten.alias.default))
# They read shape, dtype and device alone.
_LIKE_NAMES = ("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like")
_NEW_NAMES = ("new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided")
_LIKE, _NEW = (frozenset(getattr(_aten, name).default for name in names) for names in (_LIKE_NAMES, _NEW_NAMES))


class QuantizedHandle(Tensor):
    """A Tensor over `quantized`, of its shape, nominal dtype and device; it has no memory of its own.

        x = QuantizedHandle(container).requires_grad_()
        y = layer(x)                       # the container's codes, where the recipe needs just these
        y.backward(QuantizedHandle(dy))    # also the gradient may be quantized
        x.grad                             # an ordinary tensor

    The gradient is that of the values: rounding counts as the identity. `detach()` and moves to another device keep the
    codes; everything else dequantizes, `clone()` too, so that `dequantize()` is differentiable. Changes in place are
    refused with RuntimeError: containers are frozen; so are those of its views, and ordinary tensors as its `.data`.

    Raises TypeError if `quantized` is no QuantizedTensor or GroupedTensor.
    """

    quantized: Quantized
    _copied: ClassVar[tuple[str, ...]] = ("_is_param",)  # by which torch knows a parameter

    @staticmethod
    def __new__(cls, quantized: Quantized, **_: Any) -> Any:
        if not isinstance(quantized, QuantizedTensor | GroupedTensor):
            raise TypeError(
                f"a QuantizedHandle is over a {type(quantized).__name__}, but must be over a QuantizedTensor or a "
                "GroupedTensor. Make one with recipes.quantize(x, recipe)."
            )
        return Tensor._make_wrapper_subclass(cls, quantized.shape, dtype=quantized.dtype, device=quantized.device)

    def __init__(self, quantized: Quantized) -> None:
        self.quantized = quantized

    def over(self, quantized: Quantized) -> Self:
        """A handle of the same class over another container, without a history."""
        return type(self)(quantized)

    def dequantize(self) -> Tensor:
        """The values, in the nominal dtype: an ordinary tensor, in this one's history."""
        return self.clone()

    def write(self, values: Tensor) -> None:
        """Put the values of `values` [the same shape] in place of these. Refused here."""
        raise RuntimeError(
            f"A {type(self).__name__} cannot be changed in place: its codes are quantized once. "
            "Change its dequantize(), and quantize that."
        )

    @property
    def data(self) -> Tensor:
        return super().data

    @data.setter
    def data(self, other: Tensor) -> None:
        if type(other) is not type(self):
            raise RuntimeError(
                f"A {type(other).__name__} cannot be the .data of a {type(self).__name__}, which holds codes alone. "
                "Quantize its values into these codes, by `with torch.no_grad(): weight.copy_(values)`."
            )
        Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        vars(self).update(vars(other.detach()))  # the codes, and how they are quantized

    def share_memory_(self) -> Self:
        """Move codes and scales into shared memory; returns self."""
        for tensor in held_tensors(self):
            tensor.share_memory_()
        return self

    def is_shared(self) -> bool:
        return all(tensor.is_shared() for tensor in held_tensors(self))

    @torch.no_grad()
    def apply_(self, function: Callable[[float], float]) -> Tensor:
        """torch's own, which reads memory that is not there, on the values."""
        return self.copy_(self.dequantize().apply_(function))

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        """Raises BufferError, as DLPack wants it: what shares memory by it would read address 0."""
        raise BufferError(
            f"A {type(self).__name__} holds codes alone, so there are no values in memory to share by DLPack. Share "
            "those of dequantize(), a copy."
        )

    # Every function of torch comes to __torch_dispatch__, below autograd.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, QuantizedHandle):
            if func in _SAME or (func is _aten.view.default and tuple(args[1]) == tuple(first.shape)):
                return first.over(first.quantized)
            if func is _aten._to_copy.default and kwargs.get("dtype") in (None, first.dtype):
                return first.over(_moved(first.quantized, kwargs.get("device") or first.device))
            if func in _LIKE:
                kwargs["device"] = kwargs.get("device") or first.device
                return func(torch.empty(first.shape, dtype=first.dtype, device="meta"), *args[1:], **kwargs)
            if func in _NEW:
                return func(torch.empty((), dtype=first.dtype, device=first.device), *args[1:], **kwargs)
        return _on_values(func, args, kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({list(self.shape)}, {self.dtype}, {self.device}, {self.quantized})"

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        if not self.is_leaf:
            raise RuntimeError("Only handles that are leaves of autograd's graph can be copied. Copy its detach().")
        if id(self) not in memo:
            other = self.over(copy.deepcopy(self.quantized, memo)).requires_grad_(self.requires_grad)
            other.__dict__.update(copy.deepcopy(self._attributes(), memo))
            memo[id(self)] = other
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _rebuilt, (type(self), self.quantized, self.requires_grad, self._attributes())

    def _attributes(self) -> dict[str, Any]:
        """What a copy has too, beside the container; as of `nn.Parameter`, nothing that others have set."""
        return {name: self.__dict__[name] for name in self._copied if name in self.__dict__}


def at_values(tensor: Any) -> Any:
    """The dequantized tensor of a handle; anything else as it is."""
    return tensor.quantized.dequantize() if isinstance(tensor, QuantizedHandle) else tensor


def at_container(tensor: Any) -> Any:
    """The container of a handle; anything else as it is."""
    return tensor.quantized if isinstance(tensor, QuantizedHandle) else tensor


def copied(tensor: Tensor) -> Tensor:
    """The same in memory of its own: of a handle its codes, bit for bit."""
    if not isinstance(tensor, QuantizedHandle):
        return tensor.clone()
    quantized = tensor.quantized
    return tensor.over(quantized.rebuild([t if t is None else t.clone() for t in quantized.tensors()]))


def held_tensors(tensor: Tensor) -> list[Tensor]:
    """The tensors that have memory: codes and scales of a handle, each once; an ordinary tensor itself."""
    if not isinstance(tensor, QuantizedHandle):
        return [tensor]
    by_memory = {t.data_ptr(): t for t in tensor.quantized.tensors() if t is not None}
    return list(by_memory.values())


def _on_values(function: Any, args: Any, kwargs: Any) -> Any:
    """The function on dequantized tensors; what it writes into a handle is written there."""
    values: dict[int, tuple[QuantizedHandle, Tensor]] = {}

    def value(handle: QuantizedHandle) -> Tensor:
        if id(handle) not in values:
            values[id(handle)] = handle, handle.quantized.dequantize()
        return values[id(handle)][1]

    written = written_by(function, args, kwargs, QuantizedHandle)
    if written and function.namespace in _COLLECTIVES:
        raise RuntimeError(
            f"{function} would write into a tensor that is held quantized, whose codes are written from values that "
            "are there, and a transfer ends later. Receive into values = weight.dequantize(), and write them by `with "
            "torch.no_grad(): weight.copy_(values)`."
        )
    if function is _aten.copy_.default and written and isinstance(args[1], Tensor):
        written[0].write(args[1])  # its values before do not count
        return written[0]
    result = function(*tree_map_only(QuantizedHandle, value, args), **tree_map_only(QuantizedHandle, value, kwargs))
    if not written:
        return views(result) if function.is_view else result
    by_value = {id(value(handle)): handle for handle in written}
    for handle in written:
        handle.write(value(handle))
    return tree_map_only(Tensor, lambda tensor: by_value.get(id(tensor), tensor), result)


def _moved(quantized: Quantized, device: torch.device) -> Quantized:
    return quantized.rebuild([tensor if tensor is None else tensor.to(device) for tensor in quantized.tensors()])


def _rebuilt(
    kind: type[QuantizedHandle], quantized: Quantized, requires_grad: bool, attributes: dict[str, Any]
) -> Tensor:
    handle = kind(quantized).requires_grad_(requires_grad)
    handle.__dict__.update(attributes)
    return handle


def with_dtype(quantized: Quantized, dtype: torch.dtype) -> Quantized:
    """The same codes under another nominal dtype."""
    return quantized if quantized.dtype == dtype else replace(quantized, dtype=dtype)
