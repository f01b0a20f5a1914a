"""What the forward of an operation may return: y, and extra tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ops.runner.context import IndexTensor
from recipes.tensors.gathered_rows import GatheredRows
from recipes.tensors.quantized_handle import Quantized
from recipes.tensors.splits import Splits


def check_output(y: Any, dtype: torch.dtype) -> None:
    """Raise TypeError for a y that is no tensor or container, in another dtype, or sparse."""
    if not isinstance(y, Tensor | Quantized | GatheredRows):
        raise TypeError(f"fuser_forward returned a {type(y).__name__} as y. Return a tensor.")
    if isinstance(y, Tensor) and y.dtype != dtype:  # quantized, it has the dtype of the operation that takes it
        raise TypeError(f"fuser_forward returned y in {y.dtype}, but ctx.dtype is {dtype}. Return y in this dtype.")
    if isinstance(y, Tensor) and y.layout is not torch.strided:
        raise TypeError(f"fuser_forward returned y in the layout {y.layout}. Return a dense tensor: y.to_dense().")


def check_extra_outputs(outputs: Any, declared: Sequence[tuple[str, str, type]]) -> None:
    """Raise TypeError for extra outputs that are no mapping or of another kind than declared, RuntimeError for one that
    is not declared. declared: as of a `Wiring`"""
    if not isinstance(outputs, Mapping):
        raise TypeError(
            f"fuser_forward returned a {type(outputs).__name__} as extra outputs. Return a mapping by name, "
            "empty if there are none."
        )
    for local in outputs:
        if all(local != name for name, _, _ in declared):
            names = ", ".join(repr(name) for name, _, _ in declared)
            raise RuntimeError(
                f"fuser_forward returned the extra output {local!r}, which is not declared. There are: "
                f"{names or 'none'}. Name it in extra_outputs, or leave it out."
            )
    for local, _, kind in declared:
        if local not in outputs:
            continue
        if kind is not Splits and (kind in (Tensor, IndexTensor)) != isinstance(outputs[local], Tensor):
            mend = (
                "Return a tensor." if kind in (Tensor, IndexTensor) else "Declare it a torch.Tensor or an IndexTensor."
            )
            raise TypeError(
                f"fuser_forward returned a {type(outputs[local]).__name__} as the extra output {local!r}, which is "
                f"declared {kind!r}. {mend}"
            )
        if kind is IndexTensor and outputs[local].is_floating_point():
            raise TypeError(
                f"fuser_forward returned the extra output {local!r} in {outputs[local].dtype}, but it is declared an "
                "IndexTensor, of integers, which have no gradient. Declare it a Tensor, or return integers."
            )
