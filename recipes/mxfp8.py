"""MXFP8BlockScaling: one power-of-two scale for each 32 values along the axis that is contracted.

Formula, layout of the scales and source: `recipes/casts/cast_mxfp8.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, get_args

import torch
from torch import Tensor

from recipes.casts.cast_mxfp8 import (
    MXFP8Copies,
    MXFP8Scale,
    Scaling,
    cast_mxfp8,
    dequantize_mxfp8,
    empty_mxfp8,
)
from recipes.recipe import Recipe, Role
from recipes.tensors.formats import Float8Format, Format
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import Operand, QuantizedTensor, ScaledCodes
from recipes.tensors.quantizer import (
    QuantizedBuffers,
    Quantizer,
    check_form,
    check_grouped,
    check_stacked,
    check_tensor,
)
from recipes.tensors.splits import Splits

_SCALINGS = get_args(Scaling)


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8, emulated: dequantized operands are exact, so only the order of summation differs from real MXFP8 products.

    fp8_format: E4M3 for all tensors, or HYBRID with E5M2 for gradients
    scaling: "round_up" gives scales with which no value saturates; "floor" is the rule of OCP MX v1.0, with which the
        largest values of a block may
    enable_2d_quantization: weights in blocks of 32x32, so that both copies have the same codes
    """

    names: ClassVar[tuple[str, ...]] = ("mxfp8",)

    fp8_format: Format = Format.E4M3
    scaling: Scaling = "round_up"
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_scaling(self.scaling)

    def quantizer(self, role: Role) -> MXFP8Quantizer:
        form = self.fp8_format.backward if role is Role.GRAD_OUTPUT else self.fp8_format.forward
        return MXFP8Quantizer(form, self.scaling, self.enable_2d_quantization and role is Role.WEIGHT)


@dataclass(frozen=True)
class MXFP8Quantizer(Quantizer):
    """One E8M0 scale for each 32 values along K (rowwise) or along the rows (columnwise); square: for 32x32 values."""

    form: Float8Format
    scaling: Scaling = "round_up"
    square: bool = False

    def __post_init__(self) -> None:
        check_form(self.form)
        _check_scaling(self.scaling)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_tensor(x, rowwise, columnwise)
        copies = cast_mxfp8(x, self._how, rowwise=rowwise, columnwise=columnwise)
        return QuantizedTensor(*_containers(copies), x.dtype)

    @property
    def casts_in_kernels(self) -> bool:
        return self.scaling == "round_up" and not self.square

    @property
    def kernel_format(self) -> str:
        return "mxfp8"

    @property
    def copies_agree(self) -> bool:
        return self.square

    def empty_like_quantized(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> QuantizedBuffers:
        copies = _containers(empty_mxfp8(shape, self.form, device))
        return QuantizedBuffers(QuantizedTensor(*copies, dtype), form=self.form)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_stacked(w_GNK, rowwise, columnwise)
        copies = cast_mxfp8(w_GNK, self._how, rowwise=rowwise, columnwise=columnwise, stacked=True)
        return QuantizedTensor(*_containers(copies), w_GNK.dtype)

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        check_grouped(x_TK, splits, rowwise, columnwise)
        copies = cast_mxfp8(x_TK, self._how, rowwise=rowwise, columnwise=columnwise, splits=splits)
        return GroupedTensor(None, splits, *_containers(copies), x_TK.dtype)

    @property
    def _how(self) -> MXFP8Scale:
        return MXFP8Scale(self.form, self.scaling, self.square)


def _check_scaling(scaling: str) -> None:
    if scaling not in _SCALINGS:
        raise ValueError(f'scaling is {scaling!r}, but must be "round_up" or "floor".')


def _containers(copies: MXFP8Copies) -> tuple[RowwiseCodes | None, ColumnwiseCodes | None]:
    rowwise = columnwise = None
    if copies.row_codes is not None and copies.row_scale is not None:
        rowwise = RowwiseCodes(copies.row_codes, copies.row_scale)
    if copies.column_codes is not None and copies.column_scale is not None:
        columnwise = ColumnwiseCodes(copies.column_codes, copies.column_scale)
    return rowwise, columnwise


@dataclass(frozen=True, eq=False)
class RowwiseCodes(ScaledCodes):
    """Codes [..., K] in float8; scale_inv [..., ceil(K / 32)] uint8."""

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        return Operand(dequantize_mxfp8(self.codes, self.scale_inv, _holding(dtype), columnwise=False), None)


@dataclass(frozen=True, eq=False)
class ColumnwiseCodes(ScaledCodes):
    """Codes [..., K] in float8, in natural order; scale_inv uint8, with T the rows of the flattened tensor:

    [ceil(T / 32), K] for one tensor, [G, ceil(N / 32), K] for stacked weights, [C, K] for grouped rows.
    """

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        values = dequantize_mxfp8(self.codes, self.scale_inv, _holding(dtype), columnwise=True, splits=splits)
        return Operand(values, None)


def _holding(dtype: torch.dtype) -> torch.dtype:
    """float16 has not the range for 2^E; bfloat16 has, and holds every value exactly."""
    return torch.bfloat16 if dtype == torch.float16 else dtype
