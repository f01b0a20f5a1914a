"""NVFP4BlockScaling: four-bit codes, one E4M3 scale for each 16 values, one float32 amax for each tensor.

Formula, layout, rounding and source: `recipes/casts/cast_nvfp4.py`, of the Hadamard transform `hadamard.py`.
"""
# T rows, P rows with the padding, K columns, G groups

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor

from recipes.casts.cast_nvfp4 import (
    BLOCK,
    alpha_from_amax,
    amax_nvfp4,
    cast_nvfp4,
    dequantize_nvfp4,
)
from recipes.casts.hadamard import hadamard_ref
from recipes.recipe import Recipe, Role
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import Operand, QuantizedTensor, ScaledCodes
from recipes.tensors.quantizer import Quantizer, check_grouped, check_stacked, check_tensor
from recipes.tensors.splits import Splits
from recipes.triton.philox import new_seed


@dataclass(frozen=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4, emulated: dequantized operands are exact, so only the order of summation differs from real FP4 products.

    Inputs: 1x16 blocks, to nearest, a random Hadamard transform of the columnwise copy. Gradients: the same, with
    stochastic rounding of both copies. Weights: 16x16 blocks, to nearest, no transform.

    disable_rht: no Hadamard transforms
    disable_rht_rounding: the transform of a bfloat16 tensor stays in float32 until it is cast, as under
        TransformerEngine's fast-math switch; else it is rounded to bfloat16. Of other tensors it is in float32 always
    disable_stochastic_rounding: gradients are rounded to nearest
    disable_2d_quantization: weights in 1x16 blocks along the axis that is contracted
    row_scaled_activation: one amax for each row in the rowwise copy of inputs, instead of one for all
    """

    names: ClassVar[tuple[str, ...]] = ("nvfp4",)

    disable_rht: bool = False
    disable_rht_rounding: bool = field(default=False, kw_only=True)
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False

    def quantizer(self, role: Role) -> NVFP4Quantizer:
        transformed = NVFP4Quantizer(rht=not self.disable_rht, round_rht=not self.disable_rht_rounding)
        of_role = {
            Role.INPUT: replace(transformed, row_scaled=self.row_scaled_activation),
            Role.WEIGHT: NVFP4Quantizer(two_d=not self.disable_2d_quantization),
            Role.GRAD_OUTPUT: replace(transformed, stochastic=not self.disable_stochastic_rounding),
        }
        return of_role[role]


@dataclass(frozen=True)
class NVFP4Quantizer(Quantizer):
    """E2M1 codes in blocks of 16 along K (rowwise) and along the rows (columnwise).

    rht: transform the columnwise copy; round_rht: and round it to bfloat16, if the tensor is bfloat16
    stochastic: round stochastically, with `seed` or one drawn from torch's generator of the device at each cast
    two_d: blocks of 16x16, so that both copies have the same codes
    row_scaled: one amax for each row of the rowwise copy
    """

    rht: bool = False
    stochastic: bool = False
    two_d: bool = False
    row_scaled: bool = False
    round_rht: bool = True
    seed: Tensor | None = field(default=None, compare=False)

    @property
    def columnwise_transform(self) -> str | None:
        return "a Hadamard transform" if self.rht else None

    @property
    def copies_agree(self) -> bool:
        return self.two_d

    def __post_init__(self) -> None:
        if self.two_d and (self.rht or self.row_scaled or self.stochastic):
            raise ValueError(
                f"{self} asks for 16x16 blocks of numbers that differ in the two copies. "
                "Set two_d alone, or rht, stochastic and row_scaled without it."
            )

    def seeded(self, device: torch.device) -> NVFP4Quantizer:
        return replace(self, seed=new_seed(device)) if self.stochastic and self.seed is None else self

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_tensor(x, rowwise, columnwise)
        rows = x.detach().reshape(math.prod(x.shape[:-1]), x.shape[-1])
        return QuantizedTensor(*self._copies(rows, None, x.shape, rowwise, columnwise), x.dtype)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        check_stacked(w_GNK, rowwise, columnwise)
        copies = self._copies(w_GNK.detach(), None, w_GNK.shape, rowwise, columnwise)
        return QuantizedTensor(*copies, w_GNK.dtype)

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        check_grouped(x_TK, splits, rowwise, columnwise)
        copies = self._copies(x_TK.detach(), splits, x_TK.shape, rowwise, columnwise)
        return GroupedTensor(None, splits, *copies, x_TK.dtype)

    def _copies(
        self, x: Tensor, splits: Splits | None, shape: torch.Size, rowwise: bool, columnwise: bool
    ) -> tuple[RowwiseNVFP4 | None, ColumnwiseNVFP4 | None]:
        seed = self.seeded(x.device).seed
        kind = {"rht": self.rht, "row_scaled": self.row_scaled, "round_rht": self.round_rht}
        amaxes = amax_nvfp4(x, splits, rowwise=rowwise, columnwise=columnwise, **kind)
        made = cast_nvfp4(x, splits, amaxes, two_d=self.two_d, seed=seed, **kind)
        along_K = along_rows = None
        if made.rowwise is not None and made.rowwise_scale is not None and amaxes.rowwise is not None:
            codes, scale = (t.reshape(*shape[:-1], t.shape[-1]) for t in (made.rowwise, made.rowwise_scale))
            along_K = RowwiseNVFP4(codes, scale, amaxes.rowwise, shape, self.row_scaled)
        if made.columnwise is not None and made.columnwise_scale is not None and amaxes.columnwise is not None:
            along_rows = ColumnwiseNVFP4(made.columnwise, made.columnwise_scale, amaxes.columnwise, shape, self.rht)
        return along_K, along_rows


@dataclass(frozen=True, eq=False)
class RowwiseNVFP4(ScaledCodes):
    """Codes [..., ceil(K / 2)] uint8, scale_inv [..., ceil(K / 16)] E4M3.

    amax: float32 () for one tensor, [G] for stacked weights or grouped rows; row_scaled: of each row [T], [G, N]
    size: the shape of the tensor
    """

    tensor_fields: ClassVar[tuple[str, ...]] = ("codes", "scale_inv", "amax")

    amax: Tensor
    size: torch.Size
    row_scaled: bool

    @property
    def shape(self) -> torch.Size:
        return self.size

    def largest_codes(self) -> Tensor:
        return _largest_codes(self.codes)

    @property
    def half_step(self) -> float:
        return _HALF_STEP

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        """Exact values [..., K]; alpha () or [G], or [T, 1] ([G, N, 1]) if row-scaled."""
        values = dequantize_nvfp4(self.codes, self.scale_inv, self.size[-1], dtype, transpose=False)
        alpha = alpha_from_amax(self.amax)
        return Operand(values, alpha[..., None] if self.row_scaled else alpha)

    def dequantize(self, splits: Splits | None = None) -> Tensor:
        if not self.row_scaled:
            return super().dequantize(splits)
        values = dequantize_nvfp4(self.codes, self.scale_inv, self.size[-1], torch.float32, transpose=False)
        return values * alpha_from_amax(self.amax).reshape(*self.size[:-1], 1)


@dataclass(frozen=True, eq=False)
class ColumnwiseNVFP4(ScaledCodes):
    """Codes transposed, [K, P / 2] uint8 ([G, K, P / 2] stacked); scale_inv [K, P / 16] E4M3; P: rows with the padding.

    amax: float32 () for one tensor, [G] for stacked weights or grouped rows
    size: the shape of the tensor
    rht: whether the codes are those of the transformed tensor
    """

    tensor_fields: ClassVar[tuple[str, ...]] = ("codes", "scale_inv", "amax")

    amax: Tensor
    size: torch.Size
    rht: bool

    @property
    def shape(self) -> torch.Size:
        return self.size

    @property
    def transform(self) -> str | None:
        return "a Hadamard transform" if self.rht else None

    def largest_codes(self) -> Tensor:
        return _largest_codes(self.codes)

    @property
    def half_step(self) -> float:
        return _HALF_STEP

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        """Exact values in the natural order; padded, with block 16, if transformed (and still so) or grouped."""
        values = self._values(dtype)
        if self.rht or splits is not None:
            return Operand(values, alpha_from_amax(self.amax), BLOCK)
        return Operand(self._cropped(values), alpha_from_amax(self.amax))

    def dequantize(self, splits: Splits | None = None) -> Tensor:
        """The values, transformed back, without the padding."""
        alpha = alpha_from_amax(self.amax)
        if splits is not None:
            alpha = alpha.index_select(0, splits.padded(BLOCK).group_of_row.clamp(max=splits.num_groups - 1))[:, None]
        else:
            alpha = alpha[..., None, None]
        values = self._values(torch.float32) * alpha
        if self.rht:
            values = hadamard_ref(values, inverse=True)
        if splits is None:
            return self._cropped(values)
        if not values.numel():
            return values.new_zeros(self.size)
        inactive = splits.group_of_row == splits.num_groups
        return values.index_select(0, splits.row_in_padded(BLOCK)).masked_fill(inactive[:, None], 0.0)

    def _values(self, dtype: torch.dtype) -> Tensor:
        num_rows = self.scale_inv.shape[-1] * BLOCK
        return dequantize_nvfp4(self.codes, self.scale_inv, num_rows, dtype, transpose=True)

    def _cropped(self, values: Tensor) -> Tensor:
        num_rows = self.size[-2] if values.ndim == 3 else math.prod(self.size[:-1])
        return values[..., :num_rows, :].reshape(self.size)


_HALF_STEP = 1 / 6  # E2M1: 6, and 8 would be next


def _largest_codes(packed: Tensor) -> Tensor:
    """Packed codes with 0 for all but 6 and -6."""
    low, high = packed & 0x0F, packed & 0xF0
    return torch.where((low & 0x07) == 0x07, low, 0) | torch.where((high & 0x70) == 0x70, high, 0)
