"""Float8BlockScaling: one float32 scale for each 1x128 values of activations and gradients, 128x128 of weights.

Formula, layout of codes and scales, and source: `recipes/casts/cast_float8_block.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from recipes.casts.cast_float8_block import (
    BLOCK,
    BlockCopies,
    BlockScale,
    blocks_of,
    cast_float8_block,
    dequantize_float8_block,
)
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

# 1: a scale for 1x128 values, 2: for 128x128
BlockDim = Literal[1, 2]


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with one scale a block. Native products add sums of 128 terms in float32; else dequantized operands are
    multiplied ("emulated").

    fp8_format: E4M3 for all tensors, or HYBRID with E5M2 for gradients
    use_f32_scales: scales are any float32 number; else powers of two, rounded down
    amax_epsilon: the least amax a scale is computed from
    x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1 is a scale for each 128 values along the axis
        that is contracted, 2 is one for 128x128 values; 2 for at most one of the three
    """

    names: ClassVar[tuple[str, ...]] = ("fp8_block",)

    fp8_format: Format = Format.E4M3
    use_f32_scales: bool = False
    amax_epsilon: float = 0.0
    x_block_scaling_dim: BlockDim = 1
    w_block_scaling_dim: BlockDim = 2
    grad_block_scaling_dim: BlockDim = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        dims = {
            "x_block_scaling_dim": self.x_block_scaling_dim,
            "w_block_scaling_dim": self.w_block_scaling_dim,
            "grad_block_scaling_dim": self.grad_block_scaling_dim,
        }
        for name, dim in dims.items():
            _check_dim(name, dim)
        square = [name for name, dim in dims.items() if dim == 2]
        if len(square) > 1:
            raise ValueError(
                f"{' and '.join(square)} are 2, but a product of two operands with 128x128 blocks is not supported. "
                "Leave at most one of them at 2."
            )
        check_amax_epsilon(self.amax_epsilon)

    def quantizer(self, role: Role) -> Float8BlockQuantizer:
        form = self.fp8_format.backward if role is Role.GRAD_OUTPUT else self.fp8_format.forward
        block_dims: dict[Role, BlockDim] = {
            Role.INPUT: self.x_block_scaling_dim,
            Role.WEIGHT: self.w_block_scaling_dim,
            Role.GRAD_OUTPUT: self.grad_block_scaling_dim,
        }
        return Float8BlockQuantizer(form, block_dims[role], not self.use_f32_scales, self.amax_epsilon)


@dataclass(frozen=True)
class Float8BlockQuantizer(Quantizer):
    """One float32 scale for each 128 values along K (rowwise) or the rows (columnwise); block_dim 2: for 128x128."""

    form: Float8Format
    block_dim: BlockDim = 1
    power_2_scale: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_form(self.form)
        _check_dim("block_dim", self.block_dim)
        check_amax_epsilon(self.amax_epsilon)

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_tensor(x, rowwise, columnwise)
        copies = cast_float8_block(x, self._how, rowwise=rowwise, columnwise=columnwise)
        return QuantizedTensor(self._rowwise(copies), self._columnwise(copies, x.shape), x.dtype)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_stacked(w_GNK, rowwise, columnwise)
        copies = cast_float8_block(w_GNK, self._how, rowwise=rowwise, columnwise=columnwise, stacked=True)
        return QuantizedTensor(self._rowwise(copies), self._columnwise(copies, w_GNK.shape), w_GNK.dtype)

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        check_grouped(x_TK, splits, rowwise, columnwise)
        copies = cast_float8_block(x_TK, self._how, rowwise=rowwise, columnwise=columnwise, splits=splits)
        return GroupedTensor(
            None, splits, self._rowwise(copies), self._columnwise(copies, x_TK.shape), x_TK.dtype
        )  # fmt: skip

    def float8_scaling(self, columnwise: bool) -> ScaleLayout:
        return "row" if self.block_dim == 1 else "square"

    @property
    def _how(self) -> BlockScale:
        return BlockScale(self.form, self.block_dim, self.power_2_scale, self.amax_epsilon)

    def _rowwise(self, copies: BlockCopies) -> BlockRowwiseCodes | None:
        if copies.row_codes is None or copies.row_scale_inv is None:
            return None
        block = blocks_of(self.block_dim, columnwise=False)
        return BlockRowwiseCodes(copies.row_codes, copies.row_scale_inv, block, self.power_2_scale)

    def _columnwise(self, copies: BlockCopies, shape: torch.Size) -> BlockColumnwiseCodes | None:
        if copies.column_codes is None or copies.column_scale_inv is None:
            return None
        block = blocks_of(self.block_dim, columnwise=True)
        return BlockColumnwiseCodes(copies.column_codes, copies.column_scale_inv, block, self.power_2_scale, shape)


def _check_dim(name: str, dim: Any) -> None:
    if type(dim) is not int or dim not in (1, 2):
        raise ValueError(f"{name} is {dim!r}, but must be 1 (1x128 blocks) or 2 (128x128 blocks).")


@dataclass(frozen=True, eq=False)
class BlockRowwiseCodes(ScaledCodes):
    """Codes [..., K] in the natural order; scale_inv [ceil(K / 128), T], or [ceil(T / 128), ceil(K / 128)] if square.

    block: how many rows and columns of the natural tensor share a scale: (1, 128) or (128, 128)
    power_2_scale: whether all scales are powers of two, so that bfloat16 holds the values
    """

    block: tuple[int, int]
    power_2_scale: bool

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        dtype = _holding(dtype, self.power_2_scale)
        values = dequantize_float8_block(
            self.codes, self.scale_inv, dtype, self.block, shape=self.shape, transposed=False, splits=splits
        )
        return Operand(values, None)

    def float8_operand(self) -> Float8Operand:
        return Float8Operand(self.codes, self.scale_inv, "row" if self.block[0] == 1 else "square")


@dataclass(frozen=True, eq=False)
class BlockColumnwiseCodes(ScaledCodes):
    """Codes transposed: [K, P] for one tensor and for grouped rows, [G, K, N] for stacked weights.

    scale_inv: [P / 128, K], or [ceil(K / 128), P / 128] if square; stacked with a leading G
    block: (128, 1) or (128, 128), rows and columns of the natural tensor; power_2_scale: as of the rowwise copy
    natural_shape: of the values
    """

    block: tuple[int, int]
    power_2_scale: bool
    natural_shape: torch.Size

    @property
    def shape(self) -> torch.Size:
        return self.natural_shape

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        dtype = _holding(dtype, self.power_2_scale)
        values = dequantize_float8_block(
            self.codes, self.scale_inv, dtype, self.block, shape=self.shape, transposed=True, splits=splits
        )
        return Operand(values, None)

    def float8_operand(self) -> Float8Operand:
        scaling: ScaleLayout = "row" if self.block[1] == 1 else "square"
        # Of stacked weights and of dgrad's operand the columns are not padded, and belong to one group.
        return Float8Operand(self.codes, self.scale_inv, scaling, BLOCK if scaling == "row" else 1)


def _holding(dtype: torch.dtype, power_2_scale: bool) -> torch.dtype:
    """`dtype`, or the smallest that holds every value: bfloat16 has the range that float16 lacks."""
    if dtype not in (torch.float16, torch.bfloat16):
        return dtype
    return torch.bfloat16 if power_2_scale else torch.float32
