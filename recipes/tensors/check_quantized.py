"""What a quantizer returned, compared with what was asked of it. Nothing is read from the device.

What `recipes` defines is trusted; the quantizers of others are checked in each cast (`Quantizer.__init_subclass__`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from recipes.casts.layout import empty_copies
from recipes.casts.scale_rules import NVFP4Scale
from recipes.tensors.gathered_rows import GatheredRows
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.scaled_codes import ScaledCodes
from recipes.tensors.splits import Splits

METHODS = ("quantize", "quantize_stacked", "quantize_grouped")


def checked(method: Callable[..., Any]) -> Callable[..., Any]:
    """This method, one of METHODS, followed by `check_quantized`."""

    @wraps(method)
    def quantize(
        self: Any, x: Any, splits: Splits | None = None, *, rowwise: bool = True, columnwise: bool = False
    ) -> Any:
        copies = {"rowwise": rowwise, "columnwise": columnwise}
        made = method(self, x, **copies) if splits is None else method(self, x, splits, **copies)
        check_quantized(f"{type(self).__name__}.{method.__name__}", made, x, copies, splits)
        return made

    return quantize


def check_quantized(
    where: str, made: Any, x: Tensor | GatheredRows, needed: dict[str, bool], splits: Splits | None = None
) -> None:
    """Raise unless `made` is x quantized, with these copies. where: what made it, for the message.

    TypeError for another class, of the container, a copy or what it holds; ValueError for a copy that is missing, and
    for another shape, dtype or device.
    """
    kind: type[Any] = QuantizedTensor if splits is None else GroupedTensor
    if not isinstance(made, kind):
        arguments = "rowwise, columnwise, x.dtype" if splits is None else "None, splits, rowwise, columnwise, x.dtype"
        raise TypeError(
            f"{where} returned a {type(made).__name__}, but must return a {kind.__name__}. Return "
            f"{kind.__name__}({arguments})."
        )
    if made.dtype != x.dtype:
        raise ValueError(
            f"{where} returned a {kind.__name__} of dtype {made.dtype}, but x is {x.dtype}, the dtype in which it is "
            "dequantized. Give it x.dtype."
        )
    if splits is not None:
        _check_groups(where, made, splits)
    for name, copy in (("rowwise", made.rowwise), ("columnwise", made.columnwise)):
        if copy is not None:
            _check_copy(f"{where} returned a {name} copy", name, copy, x, where.endswith("stacked"), splits)
        elif needed[name]:
            raise ValueError(
                f"{where} was called with {name}=True, but returned no {name} copy. Return the copies that are asked "
                "for, each made of x."
            )


def _check_groups(where: str, made: GroupedTensor, splits: Splits) -> None:
    if made.data is not None:
        raise ValueError(
            f"{where} returned a GroupedTensor with data, which would be multiplied in place of the codes. Return "
            "GroupedTensor(None, splits, rowwise, columnwise, x.dtype)."
        )
    given, needed = ((each.num_groups, each.rows) for each in (made.splits, splits))
    if made.splits is not splits and given != needed:
        raise ValueError(
            f"{where} returned splits of {given[0]} groups and {given[1]} rows, but was given {needed[0]} groups and "
            f"{needed[1]} rows. Return the splits that it was given."
        )


def _check_copy(
    what: str, name: str, copy: Any, x: Tensor | GatheredRows, stacked: bool, splits: Splits | None
) -> None:
    if not isinstance(copy, ScaledCodes):
        raise TypeError(f"{what} that is a {type(copy).__name__}, but it must be a ScaledCodes. Return one, or None.")
    flat = math.prod(x.shape[:-1]), x.shape[-1]
    if copy.shape != x.shape and (name == "rowwise" or stacked or tuple(copy.shape) != flat):
        raise ValueError(f"{what} of shape {list(copy.shape)}, but x has shape {list(x.shape)}. Give the copy x's.")
    for field in copy.tensor_fields:
        held = getattr(copy, field)
        if not isinstance(held, Tensor):
            if held is None and field != "codes" and type(copy) is not ScaledCodes:
                continue  # as its `operand` says
            raise TypeError(f"{what} whose {field} is a {type(held).__name__}, but it must be a tensor. Give one.")
        if held.device != x.device:
            raise ValueError(f"{what} whose {field} is on {held.device}, but x is on {x.device}. Leave it there.")
    if type(copy) is ScaledCodes and not isinstance(copy.spec.scale_rule, NVFP4Scale):
        _check_layout(what, copy, stacked, splits)


def _check_layout(what: str, copy: ScaledCodes, stacked: bool, splits: Splits | None) -> None:
    """That codes and scales lie as the spec says; those of a subclass are read by its own `operand`."""
    sides = {"rowwise": not copy.columnwise, "columnwise": copy.columnwise}
    needed = empty_copies(copy.shape, copy.spec, torch.device("meta"), **sides, stacked=stacked, splits=splits)
    lies = needed[2:] if copy.columnwise else needed[:2]
    for field, held, like in zip(("codes", "scale_inv"), (copy.codes, copy.scale_inv), lies, strict=True):
        assert like is not None, "this copy is made"
        if (held.shape, held.dtype) != (like.shape, like.dtype):
            raise ValueError(
                f"{what} whose {field} is {held.dtype} of shape {list(held.shape)}, but its {copy.spec} with "
                f"columnwise={copy.columnwise} needs {like.dtype} of shape {list(like.shape)}. Give such a tensor, or "
                "return a subclass of ScaledCodes, whose operand reads what it holds."
            )
