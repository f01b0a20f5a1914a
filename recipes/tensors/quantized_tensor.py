"""QuantizedTensor: one tensor, or a stack of weights, as low-precision codes with scales.

A tensor may be stored twice, because its two matrix products contract different axes:

    rowwise      scaled along the last axis                            fprop, dgrad (x, dy); fprop (w)
    columnwise   scaled along the rows (for w: along the outputs)      wgrad (x, dy); dgrad (w)

Both copies are cast from the high-precision input.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recipes.tensors.scaled_codes import Operand, ScaledCodes


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor [..., K], or stacked weights [G, N, K] with separate scales for each group.

    rowwise, columnwise: the copies, at least one; the same object where a format shares its codes
    dtype: the nominal dtype, which `dequantize` returns
    """

    rowwise: ScaledCodes | None
    columnwise: ScaledCodes | None
    dtype: torch.dtype

    @property
    def shape(self) -> torch.Size:
        return either(self.rowwise, self.columnwise).shape

    @property
    def device(self) -> torch.device:
        return either(self.rowwise, self.columnwise).codes.device

    def dequantize(self) -> Tensor:
        """The values in the nominal dtype, from the rowwise copy if there is one. Computed in float32, rounded once."""
        return either(self.rowwise, self.columnwise).dequantize().to(self.dtype)

    def operand(self, columnwise: bool, dtype: torch.dtype) -> Operand:
        """An operand of a GEMM, from the copy that is scaled along the contracted axis."""
        return pick(self.rowwise, self.columnwise, columnwise).operand(dtype)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Codes and scales, for `save_for_backward`."""
        return copies_to_tensors(self.rowwise, self.columnwise)

    def rebuild(self, tensors: Sequence[Tensor | None]) -> QuantizedTensor:
        """A container like this one over `tensors`, in the order of `tensors()`. With Nones: an empty template."""
        rowwise, columnwise = copies_from_tensors(self.rowwise, self.columnwise, tensors)
        return replace(self, rowwise=rowwise, columnwise=columnwise)


def either(rowwise: ScaledCodes | None, columnwise: ScaledCodes | None) -> ScaledCodes:
    """The rowwise copy, or the columnwise one if there is no other."""
    copy = rowwise if rowwise is not None else columnwise
    if copy is None:
        raise ValueError("there is neither a rowwise nor a columnwise copy. Ask the quantizer for at least one.")
    return copy


def pick(rowwise: ScaledCodes | None, columnwise: ScaledCodes | None, want_columnwise: bool) -> ScaledCodes:
    """The requested copy. Raises RuntimeError if it was not made."""
    copy = columnwise if want_columnwise else rowwise
    if copy is None:
        kind = "columnwise" if want_columnwise else "rowwise"
        raise RuntimeError(f"there is no {kind} copy. Quantize with {kind}=True.")
    return copy


def copies_to_tensors(rowwise: ScaledCodes | None, columnwise: ScaledCodes | None) -> tuple[Tensor | None, ...]:
    """The tensors of both copies, two Nones for a missing one; a shared copy appears once, so that it is saved once."""
    copies = (rowwise, columnwise if columnwise is not rowwise else None)
    return tuple(tensor for copy in copies for tensor in (copy.tensors() if copy is not None else (None, None)))


def copies_from_tensors(
    rowwise: ScaledCodes | None, columnwise: ScaledCodes | None, tensors: Sequence[Tensor | None]
) -> tuple[ScaledCodes | None, ScaledCodes | None]:
    """Both copies over other tensors, in the order of `copies_to_tensors`."""
    shared = columnwise is rowwise
    count = len(rowwise.tensor_fields) if rowwise is not None else 2
    rowwise = rowwise and rowwise.over(tensors[:count])
    return rowwise, rowwise if shared else columnwise and columnwise.over(tensors[count:])
