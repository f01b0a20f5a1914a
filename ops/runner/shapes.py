"""Whether features, shapes and dtypes are those that an operation needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from recipes.arguments import NUMBERS


def check_parameter_dtype(dtype: torch.dtype | None) -> None:
    """Raise TypeError for a dtype in which no parameter can be trained here; None is torch's default."""
    if dtype is not None and dtype not in NUMBERS:
        raise TypeError(
            f"dtype is {dtype!r}, but parameters must be bfloat16, float16, float32 or float64. Pass one of these."
        )


def check_features(incoming: int | None, needed: int) -> None:
    """Raise ValueError if as many features come in, as far as that is known, as are not needed."""
    if incoming not in (None, needed):
        raise ValueError(f"x has {incoming} features, but {needed} are needed. Check the operation before this one.")


def check_matrix(x: Any, rows: str, features: int) -> None:
    """Raise ValueError unless x is a matrix of so many features. rows: what its rows are called"""
    if len(x.shape) == 2 and x.shape[1] == features:
        return
    mend = "Check the operation before this one."
    if len(x.shape) != 2 and x.shape[-1:] == (features,):
        flat = f"(-1, {features})"
        mend = f"Flatten leading dimensions: give x.reshape{flat}, or put ops.Reshape({flat}) in front."
    raise ValueError(f"x has shape {list(x.shape)}, but [{rows}, {features}] is needed. {mend}")


def check_shape(name: str, parameter: Any, needed: Sequence[int]) -> None:
    """Raise ValueError if the parameter of this name has another shape: it would be broadcast."""
    if tuple(parameter.shape) != tuple(needed):
        raise ValueError(f"{name} has shape {list(parameter.shape)}, but {list(needed)} is needed. Assign one of that.")
