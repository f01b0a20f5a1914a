"""What the parameters of operations may be where they are called."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ops.runner.built_in import is_built_in
from ops.runner.input import check_local
from ops.runner.parameters import computed_names, without_parametrizations
from recipes.arguments import NUMBERS


def check_parameters(operations: Iterable[Any], x: Tensor) -> None:
    """Raise RuntimeError for a parameter on the meta device, ValueError for one of a built-in operation that is not on
    x's device, and TypeError for nested tensors, DTensors, and dtypes in which operations do not compute."""
    for operation in operations:
        built_in = is_built_in(without_parametrizations(operation)[0])
        computed = computed_names(operation)  # of which nothing is known before they are computed
        registered = [(name, parameter) for name, parameter in operation.named_parameters() if name not in computed]
        check_local((f"{type(operation).__name__}.{name}", parameter) for name, parameter in registered)
        operation.check_assigned()
        for name, parameter in registered:
            label = f"{type(operation).__name__}.{name}"
            if parameter.is_meta and not x.is_meta:
                raise RuntimeError(
                    f"{label} is on the meta device, but x is on {x.device}. "
                    f"Materialise it first: module.to_empty(device={str(x.device)!r}), then reset_parameters()."
                )
            if built_in:  # one of the user's own may move it there
                _check_place(label, parameter, x.device)
        for name, parameter in operation.named_parameters(recurse=operation.has_adapter):
            _check_dtype(f"{type(operation).__name__}.{name}", parameter.dtype, built_in)


def _check_place(label: str, parameter: Tensor, device: torch.device) -> None:
    if parameter.device != device and (parameter.dim() or parameter.device.type != "cpu"):
        raise ValueError(f"x is on {device}, but {label} is on {parameter.device}. Move one of them.")


def _check_dtype(label: str, dtype: torch.dtype, built_in: bool) -> None:
    """Complex numbers, float8 and integers are refused, but integers in the user's own operations, as indices."""
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    if dtype not in NUMBERS and (built_in or not is_integer):
        raise TypeError(
            f"{label} is {dtype}, but parameters must be bfloat16, float16, float32 or float64. Assign its values in "
            "one of these, times their scale if they have one; to hold weights quantized there is fuser.to_quantized."
        )
