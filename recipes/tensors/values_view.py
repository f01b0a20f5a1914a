"""ValuesView: what a view of a quantized tensor is: a view of its dequantized values, which is read and not written."""

from __future__ import annotations

import copy
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _disabled_torch_function_impl
from torch.utils._pytree import tree_map_only

_T = TypeVar("_T", bound=Tensor)


class ValuesView(Tensor):
    """A tensor in the memory of `values`, like any other but for changes in place, which raise RuntimeError.

    The memory is that of values that were dequantized for this view, so what is written there would be lost. Views of
    it are such views again; all else that is computed from it, copies and what is saved of it are ordinary tensors.
    """

    values_read: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> ValuesView:
        view = Tensor._make_subclass(cls, values)
        view.values_read = values
        return view

    # Every function of torch comes to __torch_dispatch__, below autograd.
    __torch_function__ = _disabled_torch_function_impl  # type: ignore[assignment]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        if written_by(func, args, kwargs, cls):
            raise write_refused(func)
        result = func(*tree_map_only(cls, _values, args), **tree_map_only(cls, _values, kwargs))
        return views(result) if func.is_view else result

    # torch has these for no class with a __torch_dispatch__.

    def numpy(self, *, force: bool = False) -> Any:
        return self.clone().numpy(force=force)

    def tolist(self) -> Any:
        return self.values_read.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Tensor:
        return copy.deepcopy(self.values_read, memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.values_read.__reduce_ex__(protocol)


def views(result: Any) -> Any:
    """The tensors that a view function made of values, as such views."""
    return tree_map_only(Tensor, ValuesView, result)


def write_refused(function: Any) -> RuntimeError:
    """The error of a function that would write into a view of a quantized tensor."""
    return RuntimeError(
        f"{function} would write into a view (an index, a slice, a transpose) of a tensor that is held quantized, "
        "whose codes can only be written as a whole. Write all its values, by `with torch.no_grad(): "
        "weight.copy_(values)`, or change a clone() of the view."
    )


def written_by(function: Any, args: Any, kwargs: Any, kind: type[_T]) -> list[_T]:
    """The tensors of this kind that the function writes into."""
    written: list[_T] = []
    given = {**dict(zip((argument.name for argument in function._schema.arguments), args, strict=False)), **kwargs}
    for argument in function._schema.arguments:
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if marked or (function.namespace == "c10d" and _is_received(function, argument.name)):
            tree_map_only(kind, written.append, given.get(argument.name))
    return written


def _is_received(collective: Any, argument: str) -> bool:
    """The schemas of torch's collectives do not say what they write."""
    return argument.startswith("output") or (argument == "tensors" and collective is not torch.ops.c10d.send.default)


def _values(view: ValuesView) -> Tensor:
    return view.values_read
