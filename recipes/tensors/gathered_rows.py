"""GatheredRows: rows of a matrix in another order, which nobody has copied yet.

`Dispatch` and the backward of `Combine` hand them on to an operation that quantizes them at once: its cast reads each
row where it lies, and the copy, as large as all rows of all experts, is neither written nor read.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class GatheredRows:
    """The matrix [T, K] whose row t is source[row_of[t]]. source: [S, K]; row_of: [T] int64"""

    source: Tensor
    row_of: Tensor

    holds_tensors_alone: ClassVar[bool] = True  # steps that take one may be repeated

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.row_of.shape[0], self.source.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.source.dtype

    @property
    def device(self) -> torch.device:
        return self.source.device

    def dequantize(self) -> Tensor:
        """The rows, copied: what containers of codes have under this name."""
        return self.source.index_select(0, self.row_of)

    def to(self, dtype: torch.dtype) -> GatheredRows:
        return GatheredRows(self.source.to(dtype), self.row_of)

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.source, self.row_of

    def rebuild(self, tensors: Sequence[Tensor | None]) -> GatheredRows:
        """The same over `tensors`, in the order of `tensors()`. With Nones: an empty template."""
        return GatheredRows(*tensors)  # type: ignore[arg-type]  # None in an empty template


def at_source(rows: Tensor | GatheredRows) -> tuple[Tensor, Tensor | None]:
    """(source, row_of); of a tensor itself and None."""
    return (rows, None) if isinstance(rows, Tensor) else (rows.source, rows.row_of)
