"""GroupedTensor: the rows of all groups in one buffer, in high precision or quantized.

A plain frozen container, not a Tensor subclass. Rows past the sum of the splits belong to no group; their codes are 0
and dequantize to exactly 0, regardless of the values in these rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from recipes.casts.natural import NaturalCopy
from recipes.tensors.quantized_tensor import (
    QuantizedTensor,
    choose,
    copies_from_tensors,
    copies_to_tensors,
    each_copy,
    either,
    pick,
)
from recipes.tensors.scaled_codes import Operand, ScaledCodes
from recipes.tensors.splits import Splits


@dataclass(frozen=True, eq=False)
class GroupedTensor:
    """Rows [T, K] divided among groups by `splits`.

    data: [T, K] in high precision, or None if there are only quantized copies
    rowwise: scaled along K; columnwise: scaled along the rows inside each group
    dtype: the nominal dtype, which `dequantize` returns
    """

    data: Tensor | None
    splits: Splits
    rowwise: ScaledCodes | None
    columnwise: ScaledCodes | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return self.data.shape if self.data is not None else either(self.rowwise, self.columnwise).shape

    @property
    def device(self) -> torch.device:
        return self.splits.device

    def dequantize(self, *, columnwise: bool | None = None) -> Tensor:
        """[T, K] in the nominal dtype; rows past the sum are 0.

        columnwise: from this copy, which must be there (RuntimeError); None: from the rowwise one if there is one
        """
        if self.data is not None:
            inactive = self.splits.group_of_row == self.splits.num_groups
            return self.data.masked_fill(inactive[:, None], 0)
        return choose(self.rowwise, self.columnwise, columnwise).dequantize(self.splits).to(self.dtype)

    def natural(self, *, columnwise: bool = False) -> NaturalCopy:
        """Codes and scales of one copy in the natural order of the values. RuntimeError if it was not made."""
        return pick(self.rowwise, self.columnwise, columnwise).natural(self.splits)

    def unbind(self) -> list[QuantizedTensor]:
        """The rows of each group, bit for bit as if quantized alone. Reads the split sizes on the host.

        Raises RuntimeError if there are no quantized copies.
        """
        if self.data is not None:
            raise RuntimeError("these rows are in high precision. Use x.data.split(sizes).")
        sizes = self.splits.tolist()

        def member(group: int) -> QuantizedTensor:
            copies = each_copy(self.rowwise, self.columnwise, lambda copy: copy.member(group, sizes))
            return QuantizedTensor(*copies, self.dtype)

        return [member(group) for group in range(len(sizes))]

    def operand(self, columnwise: bool, dtype: torch.dtype) -> Operand:
        """An operand of a grouped GEMM, [T, K] in its original layout, or padded to `Operand.block`."""
        if self.data is not None:
            return Operand(self.data, None)
        return pick(self.rowwise, self.columnwise, columnwise).operand(dtype, self.splits)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """All tensors, those of the splits last, for `save_for_backward`."""
        return (self.data, *copies_to_tensors(self.rowwise, self.columnwise), *self.splits.tensors())

    def rebuild(self, tensors: Sequence[Tensor | None]) -> GroupedTensor:
        """A container like this one over `tensors`, in the order of `tensors()`. With Nones: an empty template."""
        end = 1 + len(copies_to_tensors(self.rowwise, self.columnwise))
        rowwise, columnwise = copies_from_tensors(self.rowwise, self.columnwise, tensors[1:end])
        splits = self.splits.rebuild(tensors[end:])
        return GroupedTensor(tensors[0], splits, rowwise, columnwise, self.dtype)
