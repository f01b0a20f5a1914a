"""NVFP4BlockScaling: four-bit codes, one E4M3 scale for each 16 values, one float32 amax for each tensor.

Formula, layout, rounding and source: `recipes/casts/cast_nvfp4.py`, of the Hadamard transform `hadamard.py`.
"""
# T rows, P rows with the padding, K columns, G groups

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from recipes.casts.cast_nvfp4 import (
    Amaxes,
    Codes,
    amax_nvfp4,
    cast_nvfp4,
    cast_rows_to_values_nvfp4,
    writes_values,
)
from recipes.casts.layout import Copies
from recipes.casts.nvfp4_blocks import BLOCK
from recipes.casts.scale_rules import FourOverSix, NVFP4Scale
from recipes.recipe import Recipe, Role
from recipes.tensors.formats import E2M1, ScaleSpec
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer, check_grouped, check_stacked, check_tensor
from recipes.tensors.scaled_codes import ScaledCodes, scaled_copies
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
    four_over_six: "weights", "activations" (inputs) or "all" (both): each block's largest number becomes 6 or 4,
        whichever errs less; "none". Gradients never. Cast in plain torch
    four_over_six_error, four_over_six_bound: see `recipes.casts.scale_rules.FourOverSix`
    keep_weight_values: as of `MXFP8BlockScaling`; four times the bytes of the codes
    """

    names: ClassVar[tuple[str, ...]] = ("nvfp4",)
    repeatable: ClassVar[bool] = True

    disable_rht: bool = False
    disable_rht_rounding: bool = field(default=False, kw_only=True)
    disable_stochastic_rounding: bool = False
    disable_2d_quantization: bool = False
    row_scaled_activation: bool = False
    keep_weight_values: bool = field(default=True, kw_only=True)
    four_over_six: Literal["none", "weights", "activations", "all"] = field(default="none", kw_only=True)
    four_over_six_error: Literal["MAE", "MSE"] = field(default="MAE", kw_only=True)
    four_over_six_bound: Literal[256, 448] = field(default=256, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.four_over_six not in ("none", "weights", "activations", "all"):
            raise ValueError(
                f'four_over_six is {self.four_over_six!r}, but must be "none", "weights", "activations" or "all".'
            )
        FourOverSix(self.four_over_six_error, self.four_over_six_bound)  # raises for what they cannot be

    def quantizer(self, role: Role) -> NVFP4Quantizer:
        transformed = NVFP4Quantizer(rht=not self.disable_rht, round_rht=not self.disable_rht_rounding)
        tries = FourOverSix(self.four_over_six_error, self.four_over_six_bound)
        of_inputs = tries if self.four_over_six in ("activations", "all") else None
        of_weights = tries if self.four_over_six in ("weights", "all") else None
        of_role = {
            Role.INPUT: replace(transformed, row_scaled=self.row_scaled_activation, four_over_six=of_inputs),
            Role.WEIGHT: NVFP4Quantizer(two_d=not self.disable_2d_quantization, four_over_six=of_weights),
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
    four_over_six: try two scales of each block
    """

    rht: bool = False
    stochastic: bool = False
    two_d: bool = False
    row_scaled: bool = False
    round_rht: bool = True
    four_over_six: FourOverSix | None = None
    seed: Tensor | None = field(default=None, compare=False)

    @property
    def columnwise_transform(self) -> str | None:
        return self.spec.transform

    @property
    def spec(self) -> ScaleSpec:
        """The format, of both copies."""
        return ScaleSpec(
            E2M1, (BLOCK if self.two_d else 1, BLOCK), NVFP4Scale(self.row_scaled, self.four_over_six), "transposed",
            BLOCK, "a Hadamard transform" if self.rht else None,
        )  # fmt: skip

    def copy_spec(self, columnwise: bool) -> ScaleSpec | None:
        return self.spec

    @property
    def copies_agree(self) -> bool:
        return self.two_d

    def __post_init__(self) -> None:
        if self.two_d and (self.rht or self.row_scaled or self.stochastic):
            raise ValueError(
                f"{self} asks for 16x16 blocks of numbers that differ in the two copies. "
                "Set two_d alone, or rht, stochastic and row_scaled without it."
            )
        if self.stochastic and self.four_over_six is not None:
            raise ValueError(
                "four_over_six compares the errors of two roundings, and stochastic ones are drawn. Set one of the two."
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

    def dequantized_rows(
        self,
        x_TK: Tensor,
        splits: Splits,
        dtype: torch.dtype,
        *,
        rowwise: bool,
        columnwise: bool,
        column_codes: bool,
    ) -> GroupedTensor | None:
        own = type(self).quantize_grouped, type(self)._copies
        replaced = own != (NVFP4Quantizer.quantize_grouped, NVFP4Quantizer._copies)  # by a subclass
        if replaced or self.two_d or self.row_scaled or self.four_over_six is not None or not (rowwise and columnwise):
            return None
        x = x_TK.detach()
        if dtype != torch.bfloat16 or not writes_values(x, splits):
            return None
        check_grouped(x_TK, splits, rowwise, columnwise)
        seed = self.seeded(x.device).seed
        about = {"rht": self.rht, "round_rht": self.round_rht}
        amaxes = amax_nvfp4(x, splits, rowwise=True, columnwise=True, row_scaled=False, **about)
        made = cast_rows_to_values_nvfp4(x, splits, amaxes, column_codes=column_codes, seed=seed, **about)
        return GroupedTensor(None, splits, *self._scaled(made, amaxes, x.shape), x_TK.dtype)

    def _copies(
        self, x: Tensor, splits: Splits | None, shape: torch.Size, rowwise: bool, columnwise: bool
    ) -> tuple[ScaledCodes | None, ScaledCodes | None]:
        seed = self.seeded(x.device).seed
        kind = {"rht": self.rht, "row_scaled": self.row_scaled, "round_rht": self.round_rht}
        amaxes = amax_nvfp4(x, splits, rowwise=rowwise, columnwise=columnwise, **kind)
        made = cast_nvfp4(x, splits, amaxes, two_d=self.two_d, seed=seed, four_over_six=self.four_over_six, **kind)
        return self._scaled(made, amaxes, shape)

    def _scaled(self, made: Codes, amaxes: Amaxes, shape: torch.Size) -> tuple[ScaledCodes | None, ScaledCodes | None]:
        row_codes, row_scale = (None if t is None else t.reshape(*shape[:-1], t.shape[-1]) for t in made[:2])
        copies = Copies(row_codes, row_scale, made.columnwise, made.columnwise_scale)
        return scaled_copies(copies, self.spec, shape, amaxes)
