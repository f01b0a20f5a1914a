"""QuantizedTensor: one tensor, or a stack of weights, as low-precision codes with scales.

A tensor may be stored twice, because its two matrix products contract different axes:

    rowwise      scaled along the last axis                            fprop, dgrad (x, dy); fprop (w)
    columnwise   scaled along the rows (for w: along the outputs)      wgrad (x, dy); dgrad (w)

Both copies are cast from the high-precision input.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recipes.casts.natural import NaturalCopy
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

    def dequantize(self, *, columnwise: bool | None = None) -> Tensor:
        """The values in the nominal dtype. Computed in float32, rounded once.

        columnwise: from this copy, which must be there (RuntimeError); None: from the rowwise one if there is one
        """
        return choose(self.rowwise, self.columnwise, columnwise).dequantize().to(self.dtype)

    def natural(self, *, columnwise: bool = False) -> NaturalCopy:
        """Codes and scales of one copy in the natural order of the values. RuntimeError if it was not made."""
        return pick(self.rowwise, self.columnwise, columnwise).natural()

    def unbind(self) -> list[QuantizedTensor]:
        """Of stacked weights [G, N, K] each weight [N, K], bit for bit as if quantized alone."""
        return [self._each(lambda copy, g=group: copy.member(g)) for group in range(self.shape[0])]  # type: ignore[misc]

    def stacked(self, others: Sequence[QuantizedTensor]) -> QuantizedTensor:
        """This weight [N, K] and `others` of the same shape and format as stacked weights [G, N, K]: `unbind`'s
        inverse."""

        def stack(copy: ScaledCodes) -> ScaledCodes:
            return copy.stacked([pick(other.rowwise, other.columnwise, copy.columnwise) for other in others])

        return self._each(stack)

    def _each(self, of_copy: Callable[[ScaledCodes], ScaledCodes]) -> QuantizedTensor:
        return QuantizedTensor(*each_copy(self.rowwise, self.columnwise, of_copy), self.dtype)

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


def choose(rowwise: ScaledCodes | None, columnwise: ScaledCodes | None, of_columns: bool | None) -> ScaledCodes:
    """The requested copy, or either."""
    return either(rowwise, columnwise) if of_columns is None else pick(rowwise, columnwise, of_columns)


def each_copy(
    rowwise: ScaledCodes | None, columnwise: ScaledCodes | None, of_copy: Callable[[ScaledCodes], ScaledCodes]
) -> tuple[ScaledCodes | None, ScaledCodes | None]:
    """What `of_copy` makes of both copies; of a shared one once."""
    made = rowwise and of_copy(rowwise)
    return made, made if columnwise is rowwise else columnwise and of_copy(columnwise)


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
