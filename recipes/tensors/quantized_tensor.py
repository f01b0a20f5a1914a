"""QuantizedTensor: one tensor, or a stack of weights, as low-precision codes with scales.

A tensor may be held twice, because the two matrix products it takes part in contract different axes:

    rowwise      scaled along the last axis                            fprop, dgrad (x, dy); fprop (w)
    columnwise   scaled along the rows (for w: along the outputs)      wgrad (x, dy); dgrad (w)

Both copies are cast from the high-precision input. A format brings its own `ScaledCodes`, which says how its codes lie
in memory; nothing else here knows one.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from recipes.tensors.splits import Splits

# Of each element format: the code of the largest number, and half of the step above it as a share of it.
_LARGEST = {torch.float8_e4m3fn: 0x7E, torch.float8_e5m2: 0x7B}
_HALF_STEP = {torch.float8_e4m3fn: 1 / 28, torch.float8_e5m2: 1 / 14}


# How float8 codes are scaled: one scale a tensor; one for each 128 codes along the axis to be contracted; for 128x128.
ScaleLayout = Literal["tensor", "row", "square"]


class Operand(NamedTuple):
    """One side of a matrix product: y = alpha_a * alpha_b * (a @ b).

    values: exact in a dtype that matrix products take
    alpha: float32 factor that stays outside the product; () for one tensor, [G] for groups; None for 1
    block: the rows of each group (of the one tensor) are padded with zeros to a multiple of this, so that `values` has
           as many rows as `splits.padded(block)`; only of operands whose rows are summed over (NT)
    """

    values: Tensor
    alpha: Tensor | None
    block: int = 1


class Float8Operand(NamedTuple):
    """The same of codes that tensor cores take: float8, contiguous along the axis to be contracted.

    scale: float32, value = code * scale. How it lies follows from `scaling` and is said in the kernel's file.
    block: of a transposed copy, the columns of each group begin at multiples of this and are padded with zeros
    """

    codes: Tensor
    scale: Tensor
    scaling: ScaleLayout
    block: int = 1


@dataclass(frozen=True, eq=False)
class ScaledCodes(ABC):
    """One copy: `codes` and `scale_inv`, with value = code * scale_inv.

    Where the rows are divided among groups, methods are given the `splits` too.
    """

    # The fields that hold tensors; all of them travel through `save_for_backward`.
    tensor_fields: ClassVar[tuple[str, ...]] = ("codes", "scale_inv")

    codes: Tensor
    scale_inv: Tensor

    @property
    def shape(self) -> torch.Size:
        """Of the values in the natural order; a copy whose codes lie otherwise says its own."""
        return self.codes.shape

    def tensors(self) -> tuple[Tensor | None, ...]:
        return tuple(getattr(self, name) for name in self.tensor_fields)

    def over(self, tensors: Sequence[Tensor | None]) -> ScaledCodes:
        """The same copy over `tensors`, which come from `tensors()`. With Nones: an empty template."""
        return replace(self, **dict(zip(self.tensor_fields, tensors, strict=True)))  # type: ignore[arg-type]

    @abstractmethod
    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        """Values in `dtype`, in the natural order; another dtype in place of one that could not hold them."""

    @property
    def transform(self) -> str | None:
        """The orthogonal transform that the values are in; None if they are those of the tensor."""
        return None

    def largest_codes(self) -> Tensor:
        """The codes, with 0 for all but those of the largest magnitude."""
        code = _LARGEST[self.codes.dtype]
        bytes_ = self.codes.view(torch.uint8)
        return torch.where((bytes_ & 0x7F) == code, bytes_, 0).view(self.codes.dtype)

    @property
    def half_step(self) -> float:
        """By how much of itself the largest number may lie below what is rounded to it."""
        return _HALF_STEP[self.codes.dtype]

    def float8_operand(self) -> Float8Operand | None:
        """The codes themselves, if a GPU with float8 products can multiply them."""
        return None

    def dequantize(self, splits: Splits | None = None) -> Tensor:
        """fl(code * scale_inv) in float32; exactly 0 past the sum of the splits."""
        values, alpha, _ = self.operand(torch.float32, splits)
        if alpha is None:
            return values
        if splits is not None:
            # Rows past the sum have codes of 0: any finite factor does.
            alpha = alpha.index_select(0, splits.group_of_row.clamp(max=splits.num_groups - 1))
        return values * alpha.reshape(alpha.shape + (1,) * (values.ndim - alpha.ndim))


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor [..., K], or weights [G, N, K] of which each group is scaled by itself.

    rowwise, columnwise: the copies, at least one; one and the same object where a format shares its codes
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
        """The values in the nominal dtype, of the rowwise copy if there is one. Computed in float32, rounded once."""
        return either(self.rowwise, self.columnwise).dequantize().to(self.dtype)

    def operand(self, columnwise: bool, dtype: torch.dtype) -> Operand:
        """One side of a matrix product, from the copy that is scaled along the axis to be contracted."""
        return pick(self.rowwise, self.columnwise, columnwise).operand(dtype)

    def tensors(self) -> tuple[Tensor | None, ...]:
        """Codes and scales, to travel through `save_for_backward`."""
        return copies_to_tensors(self.rowwise, self.columnwise)

    def rebuild(self, tensors: Sequence[Tensor | None]) -> QuantizedTensor:
        """The same container over `tensors`, which come from `tensors()`. With Nones: an empty template."""
        rowwise, columnwise = copies_from_tensors(self.rowwise, self.columnwise, tensors)
        return replace(self, rowwise=rowwise, columnwise=columnwise)


def either(rowwise: ScaledCodes | None, columnwise: ScaledCodes | None) -> ScaledCodes:
    """The rowwise copy, or the columnwise one if there is no other."""
    copy = rowwise if rowwise is not None else columnwise
    if copy is None:
        raise ValueError("there is neither a rowwise nor a columnwise copy. Ask the quantizer for at least one.")
    return copy


def pick(rowwise: ScaledCodes | None, columnwise: ScaledCodes | None, want_columnwise: bool) -> ScaledCodes:
    """The copy that was asked for. Raises RuntimeError if it was never made."""
    copy = columnwise if want_columnwise else rowwise
    if copy is None:
        kind = "columnwise" if want_columnwise else "rowwise"
        raise RuntimeError(f"there is no {kind} copy. Quantize with {kind}=True.")
    return copy


def copies_to_tensors(rowwise: ScaledCodes | None, columnwise: ScaledCodes | None) -> tuple[Tensor | None, ...]:
    """The tensors of both copies, two Nones for one that is missing; a shared copy is named once, to be saved once."""
    copies = (rowwise, columnwise if columnwise is not rowwise else None)
    return tuple(tensor for copy in copies for tensor in (copy.tensors() if copy is not None else (None, None)))


def copies_from_tensors(
    rowwise: ScaledCodes | None, columnwise: ScaledCodes | None, tensors: Sequence[Tensor | None]
) -> tuple[ScaledCodes | None, ScaledCodes | None]:
    """The two copies over other tensors, in the order of `copies_to_tensors`."""
    shared = columnwise is rowwise
    count = len(rowwise.tensor_fields) if rowwise is not None else 2
    rowwise = rowwise and rowwise.over(tensors[:count])
    return rowwise, rowwise if shared else columnwise and columnwise.over(tensors[count:])
