"""MXFP8BlockScaling: one power-of-two scale for each 32 values along the axis that is contracted.

Formula, layout of the scales and source: `recipes/kernels/cast_mxfp8.py`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recipes.formats import Float8Format, Format
from recipes.grouped_tensor import GroupedTensor
from recipes.kernels.cast_mxfp8 import BLOCK, cast_mxfp8_grouped_ref, cast_mxfp8_ref, scale_value, spread
from recipes.quantized_tensor import Operand, QuantizedTensor, ScaledCodes
from recipes.quantizer import Quantizer
from recipes.recipe import Recipe, Role
from recipes.splits import Splits


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8, emulated: dequantized operands are exact, so only the order of summation differs from real MXFP8 products.

    fp8_format: E4M3 for all tensors, or HYBRID with E5M2 for gradients
    """

    names: ClassVar[tuple[str, ...]] = ("mxfp8",)

    fp8_format: Format = Format.E4M3

    def quantizer(self, role: Role) -> MXFP8Quantizer:
        return MXFP8Quantizer(self.fp8_format.backward if role is Role.GRAD_OUTPUT else self.fp8_format.forward)


@dataclass(frozen=True)
class MXFP8Quantizer(Quantizer):
    """One E8M0 scale for each 32 values along K (rowwise) or along the rows (columnwise)."""

    form: Float8Format

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        x32 = x.detach().to(torch.float32)
        along_K = RowwiseCodes(*cast_mxfp8_ref(x32, self.form, -1)) if rowwise else None
        if not columnwise:
            return QuantizedTensor(along_K, None, x.dtype)
        codes, scale = cast_mxfp8_ref(x32.reshape(math.prod(x.shape[:-1]), x.shape[-1]), self.form, -2)
        return QuantizedTensor(along_K, ColumnwiseCodes(codes.reshape(x.shape), scale), x.dtype)

    def room(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> QuantizedTensor:
        rows, columns = math.prod(shape[:-1]), shape[-1]
        codes = [torch.empty(shape, dtype=self.form.dtype, device=device) for _ in range(2)]
        scales = [
            torch.empty(size, dtype=torch.uint8, device=device)
            for size in ((*shape[:-1], _ceil_div(columns, BLOCK)), (_ceil_div(rows, BLOCK), columns))
        ]
        return QuantizedTensor(RowwiseCodes(codes[0], scales[0]), ColumnwiseCodes(codes[1], scales[1]), dtype)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        w32 = w_GNK.detach().to(torch.float32)
        along_K = RowwiseCodes(*cast_mxfp8_ref(w32, self.form, -1)) if rowwise else None
        along_N = ColumnwiseCodes(*cast_mxfp8_ref(w32, self.form, -2)) if columnwise else None
        return QuantizedTensor(along_K, along_N, w_GNK.dtype)

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        inactive = splits.group_of_row == splits.num_groups
        x32 = x_TK.detach().to(torch.float32).masked_fill(inactive[:, None], 0.0)
        along_K = RowwiseCodes(*cast_mxfp8_ref(x32, self.form, -1)) if rowwise else None
        along_T = ColumnwiseCodes(*cast_mxfp8_grouped_ref(x32, splits, self.form)) if columnwise else None
        return GroupedTensor(None, splits, along_K, along_T, x_TK.dtype)


@dataclass(frozen=True, eq=False)
class RowwiseCodes(ScaledCodes):
    """Codes [..., K] in float8; scale_inv [..., ceil(K / 32)] uint8."""

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        return _operand(self.codes, spread(scale_value(self.scale_inv), -1, self.codes.shape[-1]), dtype)

    def group(self, splits: Splits, group: int) -> RowwiseCodes:
        start, size = _start(splits, group, 1), splits.tolist()[group]
        return RowwiseCodes(self.codes[start : start + size], self.scale_inv[start : start + size])


@dataclass(frozen=True, eq=False)
class ColumnwiseCodes(ScaledCodes):
    """Codes [..., K] in float8, in natural order; scale_inv uint8, with T the rows of the flattened tensor:

    [ceil(T / 32), K] for one tensor, [G, ceil(N / 32), K] for stacked weights, [C, K] for grouped rows.
    """

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        factor = scale_value(self.scale_inv)
        if splits is not None:
            return _operand(self.codes, factor.index_select(0, splits.block_of_row(BLOCK)), dtype)
        stacked = self.scale_inv.ndim == 3
        num_rows = self.codes.shape[-2] if stacked else math.prod(self.codes.shape[:-1])
        return _operand(self.codes, spread(factor, -2, num_rows).reshape(self.codes.shape), dtype)

    def group(self, splits: Splits, group: int) -> ColumnwiseCodes:
        start, size = _start(splits, group, 1), splits.tolist()[group]
        first = _start(splits, group, BLOCK)
        return ColumnwiseCodes(self.codes[start : start + size], self.scale_inv[first : first + _ceil_div(size, BLOCK)])


def _operand(codes: Tensor, factor: Tensor, dtype: torch.dtype) -> Operand:
    # float16 has not the range for 2^E; bfloat16 has, and holds every product exactly.
    dtype = torch.bfloat16 if dtype == torch.float16 else dtype
    return Operand((codes.to(torch.float32) * factor).to(dtype), None)


def _start(splits: Splits, group: int, block: int) -> int:
    """The first row (block = 1) or block of a group."""
    return sum(_ceil_div(size, block) for size in splits.tolist()[:group])


def _ceil_div(size: int, block: int) -> int:
    return -(-size // block)
