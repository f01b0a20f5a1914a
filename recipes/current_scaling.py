"""Float8CurrentScaling: one scale for each tensor, from the tensor itself.

Formula, layout and source: `recipes/casts/cast_float8.py`. One scale serves both copies. Grouped rows and stacked
weights have one scale a group; an empty group's is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from recipes.casts.cast_float8 import BLOCK, Float8Copies, cast_float8, dequantize_codes, transpose_back
from recipes.recipe import Recipe, Role
from recipes.tensors.formats import Float8Format, Format
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import Float8Operand, Operand, QuantizedTensor, ScaledCodes, ScaleLayout
from recipes.tensors.quantizer import (
    Quantizer,
    check_amax_epsilon,
    check_form,
    check_grouped,
    check_stacked,
    check_tensor,
)
from recipes.tensors.splits import Splits


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with per-tensor scales computed from the current tensor.

    fp8_format: HYBRID is E4M3 forward and E5M2 for gradients
    power_2_scale: round scales down to powers of two
    amax_epsilon: the least amax a scale is computed from
    split_accumulator_*: whether native products promote partial sums to float32, product by product

    Raises ValueError for an amax_epsilon that is negative or not finite.
    """

    names: ClassVar[tuple[str, ...]] = ("fp8_current",)

    fp8_format: Format = Format.HYBRID
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    split_accumulator_fprop: bool = False
    split_accumulator_dgrad: bool = True
    split_accumulator_wgrad: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amax_epsilon(self.amax_epsilon)

    def quantizer(self, role: Role) -> CurrentScalingQuantizer:
        form = self.fp8_format.backward if role is Role.GRAD_OUTPUT else self.fp8_format.forward
        return CurrentScalingQuantizer(form, self.power_2_scale, self.amax_epsilon)


@dataclass(frozen=True)
class CurrentScalingQuantizer(Quantizer):
    """One scale for a tensor or a group."""

    form: Float8Format
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_form(self.form)
        check_amax_epsilon(self.amax_epsilon)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_tensor(x, rowwise, columnwise)
        copies = cast_float8(x, self.form, rowwise=rowwise, columnwise=columnwise, **self._options)
        return QuantizedTensor(*tensor_scaled(copies, x.shape), x.dtype)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_stacked(w_GNK, rowwise, columnwise)
        copies = cast_float8(w_GNK, self.form, rowwise=rowwise, columnwise=columnwise, stacked=True, **self._options)
        return QuantizedTensor(*tensor_scaled(copies, w_GNK.shape), w_GNK.dtype)

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        check_grouped(x_TK, splits, rowwise, columnwise)
        copies = cast_float8(x_TK, self.form, rowwise=rowwise, columnwise=columnwise, splits=splits, **self._options)
        return GroupedTensor(None, splits, *tensor_scaled(copies, x_TK.shape), x_TK.dtype)

    def float8_scaling(self, columnwise: bool) -> ScaleLayout:
        return "tensor"

    @property
    def _options(self) -> dict[str, Any]:
        return {"power_2_scale": self.power_2_scale, "amax_epsilon": self.amax_epsilon}


def tensor_scaled(
    copies: Float8Copies, shape: torch.Size
) -> tuple[TensorScaledCodes | None, TransposedTensorScaledCodes | None]:
    """The containers of both copies of a tensor of this shape."""
    rowwise = columnwise = None
    if copies.row_codes is not None:
        rowwise = TensorScaledCodes(copies.row_codes, copies.scale_inv)
    if copies.column_codes is not None:
        columnwise = TransposedTensorScaledCodes(copies.column_codes, copies.scale_inv, shape)
    return rowwise, columnwise


@dataclass(frozen=True, eq=False)
class TensorScaledCodes(ScaledCodes):
    """Codes [..., K] in float8; scale_inv () float32 for one tensor, [G] for stacked weights or grouped rows."""

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        return Operand(dequantize_codes(self.codes, dtype), self.scale_inv)

    def float8_operand(self) -> Float8Operand:
        return Float8Operand(self.codes, self.scale_inv, "tensor")


@dataclass(frozen=True, eq=False)
class TransposedTensorScaledCodes(ScaledCodes):
    """Codes [K, P], [G, K, N] of stacked weights, [K, C] of grouped rows; scale_inv as of `TensorScaledCodes`.

    natural_shape: of the values
    """

    natural_shape: torch.Size

    @property
    def shape(self) -> torch.Size:
        return self.natural_shape

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        return Operand(transpose_back(self.codes, dtype, self.shape, splits), self.scale_inv)

    def float8_operand(self) -> Float8Operand:
        return Float8Operand(self.codes, self.scale_inv, "tensor", BLOCK)
