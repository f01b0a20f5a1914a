"""MXFP4BlockScaling: four-bit codes, one power-of-two scale for each 32 values along the axis that is contracted.

    value = code * 2^(E - 127)      code: E2M1 (0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives), E: E8M0

Formula and layout of the scales: `recipes/casts/cast.py`, with E2M1's largest number, 6. Codes are rounded to nearest,
ties to even. Source: OCP Microscaling Formats v1.0, section 5.

The format is a value: it has no kernel of its own, is cast in plain torch, and keeps a code in a byte.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from recipes.casts.nvfp4_blocks import e2m1_codes_ref, e2m1_values_ref
from recipes.casts.scale_rules import E8M0Scale, Rounding, check_rounding
from recipes.mxfp8 import BLOCK
from recipes.recipe import Recipe, Role
from recipes.tensors.formats import E2M1, ElementFormat, ScaleSpec
from recipes.tensors.spec_quantizer import SpecQuantizer

_NAN = 16  # a code that four bits have not: a NaN must not become a number


@dataclass(frozen=True)
class E2M1InBytes(ElementFormat):
    """E2M1, a code in each byte; a NaN stays in its element, as code 16."""

    def encode(self, scaled: Tensor) -> Tensor:
        codes = e2m1_codes_ref(scaled.masked_fill(scaled.isnan(), 0.0))
        return codes.masked_fill(scaled.isnan(), _NAN).to(torch.uint8)

    def decode(self, codes: Tensor, dtype: torch.dtype) -> Tensor:
        return e2m1_values_ref(codes.to(torch.int32), dtype).masked_fill(codes == _NAN, torch.nan)

    @property
    def half_step(self) -> float:
        return E2M1.half_step

    def largest_codes(self, codes: Tensor) -> Tensor:
        return torch.where((codes & 0x07) == 0x07, codes, 0)


@dataclass(frozen=True)
class MXFP4BlockScaling(Recipe):
    """MXFP4, emulated: dequantized operands are exact, so only the order of summation differs from real MXFP4 products.

    scaling: "floor" is the rule of OCP MX v1.0, with which the largest values of a block may saturate; "round_up" gives
        scales with which none does
    enable_2d_quantization: weights in blocks of 32x32, so that both copies have the same codes
    """

    repeatable: ClassVar[bool] = True

    scaling: Rounding = "floor"
    enable_2d_quantization: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rounding("scaling", self.scaling)

    def quantizer(self, role: Role) -> MXFP4Quantizer:
        return MXFP4Quantizer(self.scaling, self.enable_2d_quantization and role is Role.WEIGHT)


@dataclass(frozen=True)
class MXFP4Quantizer(SpecQuantizer):
    """One E8M0 scale for each 32 values along K (rowwise) or along the rows (columnwise); square: for 32x32 values."""

    scaling: Rounding = "floor"
    square: bool = False

    def __post_init__(self) -> None:
        check_rounding("scaling", self.scaling)

    @property
    def spec(self) -> ScaleSpec:
        element = E2M1InBytes("E2M1", torch.uint8, E2M1.max)
        return ScaleSpec(element, (BLOCK if self.square else 1, BLOCK), E8M0Scale(self.scaling), "natural", BLOCK)

    @property
    def copies_agree(self) -> bool:
        return self.square
