"""Float8CurrentScaling: one scale for each tensor, from the tensor itself.

Formula and source: `recipes/kernels/cast_float8.py`. One scale serves both copies, so their codes are stored once.
Grouped rows and stacked weights have one scale a group; an empty group's is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recipes.formats import Float8Format, Format
from recipes.grouped_tensor import GroupedTensor
from recipes.kernels.cast_float8 import (
    amax_grouped_ref,
    amax_ref,
    amax_stacked_ref,
    cast_float8_ref,
    scale_from_amax_ref,
    scale_inv_ref,
)
from recipes.quantized_tensor import Operand, QuantizedTensor, ScaledCodes
from recipes.quantizer import Quantizer
from recipes.recipe import Recipe, Role
from recipes.splits import Splits


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with per-tensor scales computed from the current tensor; emulated: codes are multiplied in a wider dtype.

    fp8_format: HYBRID is E4M3 forward and E5M2 for gradients
    power_2_scale: round scales down to powers of two
    amax_epsilon: the least amax a scale is computed from
    """

    names: ClassVar[tuple[str, ...]] = ("fp8_current",)

    fp8_format: Format = Format.HYBRID
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def quantizer(self, role: Role) -> CurrentScalingQuantizer:
        form = self.fp8_format.backward if role is Role.GRAD_OUTPUT else self.fp8_format.forward
        return CurrentScalingQuantizer(form, self.power_2_scale, self.amax_epsilon)


@dataclass(frozen=True)
class CurrentScalingQuantizer(Quantizer):
    """One scale for a tensor or a group."""

    form: Float8Format
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        x32 = x.detach().to(torch.float32)
        scale = self._scale(amax_ref(x32))
        copy = TensorScaledCodes(cast_float8_ref(x32 * scale, self.form), scale_inv_ref(scale))
        return QuantizedTensor(copy if rowwise else None, copy if columnwise else None, x.dtype)

    def quantize_stacked(self, w_GNK: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        w32 = w_GNK.detach().to(torch.float32)
        scale = self._scale(amax_stacked_ref(w32))
        copy = TensorScaledCodes(cast_float8_ref(w32 * scale[:, None, None], self.form), scale_inv_ref(scale))
        return QuantizedTensor(copy if rowwise else None, copy if columnwise else None, w_GNK.dtype)

    def quantize_grouped(
        self, x_TK: Tensor, splits: Splits, *, rowwise: bool = True, columnwise: bool = False
    ) -> GroupedTensor:
        x32 = x_TK.detach().to(torch.float32)
        scale = self._scale(amax_grouped_ref(x32, splits))
        group = splits.group_of_row
        scaled = x32 * scale.index_select(0, group.clamp(max=splits.num_groups - 1))[:, None]
        scaled = scaled.masked_fill((group == splits.num_groups)[:, None], 0.0)
        copy = TensorScaledCodes(cast_float8_ref(scaled, self.form), scale_inv_ref(scale))
        return GroupedTensor(None, splits, copy if rowwise else None, copy if columnwise else None, x_TK.dtype)

    def _scale(self, amax: Tensor) -> Tensor:
        return scale_from_amax_ref(amax, self.form, self.power_2_scale, self.amax_epsilon)


@dataclass(frozen=True, eq=False)
class TensorScaledCodes(ScaledCodes):
    """Codes [..., K] in float8; scale_inv () float32 for one tensor, [G] for stacked weights or grouped rows."""

    def operand(self, dtype: torch.dtype, splits: Splits | None = None) -> Operand:
        return Operand(self.codes.to(dtype), self.scale_inv)

    def group(self, splits: Splits, group: int) -> TensorScaledCodes:
        start = sum(splits.tolist()[:group])
        return TensorScaledCodes(self.codes[start : start + splits.tolist()[group]], self.scale_inv[group])
