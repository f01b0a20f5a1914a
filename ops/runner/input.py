"""What may go into a pipeline as x, and as an extra tensor."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


def check_tensor(x: Any) -> None:
    """Raise TypeError for an x that is no tensor."""
    if not isinstance(x, Tensor):
        raise TypeError(f"x is a {type(x).__name__}. Give a tensor.")


def check_real(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError for complex numbers, of which the imaginary part would be lost."""
    if dtype.is_complex:
        raise TypeError(
            f"{name} is {dtype}, but operations compute in real numbers. Give its real and imaginary parts."
        )


def check_numbers(dtype: torch.dtype, operations: Iterable[Any]) -> None:
    """Raise TypeError for numbers in which one of the operations cannot compute."""
    check_real("x", dtype)
    if dtype.is_floating_point:
        return
    for operation in operations:
        if not operation.accepts_integers:
            raise TypeError(
                f"x is {dtype}, but {type(operation).__name__} computes in floating point. "
                "Convert it: x.to(torch.float32)."
            )
