"""MXFP8BlockScaling: one power-of-two scale for each 32 values along the axis that is contracted.

Formula and layout of the scales: `recipes/casts/cast.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

from recipes.casts.scale_rules import E8M0Scale, Rounding, check_rounding
from recipes.recipe import Recipe, Role
from recipes.tensors.formats import Float8Format, Format, ScaleSpec
from recipes.tensors.quantizer import check_form
from recipes.tensors.spec_quantizer import SpecQuantizer

BLOCK = 32


@dataclass(frozen=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8, emulated: dequantized operands are exact, so only the order of summation differs from real MXFP8 products.

    fp8_format: E4M3 for all tensors, or HYBRID with E5M2 for gradients
    scaling: "round_up" gives scales with which no value saturates; "floor" is the rule of OCP MX v1.0, with which the
        largest values of a block may
    enable_2d_quantization: weights in blocks of 32x32, so that both copies have the same codes
    keep_weight_values: within `constant_weights` weights are kept dequantized, at most one copy an orientation, twice
        the bytes of their codes; False, and activation checkpoints, keep codes and dequantize before each product
    """

    names: ClassVar[tuple[str, ...]] = ("mxfp8",)
    repeatable: ClassVar[bool] = True

    fp8_format: Format = Format.E4M3
    scaling: Rounding = "round_up"
    enable_2d_quantization: bool = False
    keep_weight_values: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_rounding("scaling", self.scaling)

    def quantizer(self, role: Role) -> MXFP8Quantizer:
        form = self.fp8_format.backward if role is Role.GRAD_OUTPUT else self.fp8_format.forward
        return MXFP8Quantizer(form, self.scaling, self.enable_2d_quantization and role is Role.WEIGHT)


@dataclass(frozen=True)
class MXFP8Quantizer(SpecQuantizer):
    """One E8M0 scale for each 32 values along K (rowwise) or along the rows (columnwise); square: for 32x32 values."""

    form: Float8Format
    scaling: Rounding = "round_up"
    square: bool = False

    def __post_init__(self) -> None:
        check_form(self.form)
        check_rounding("scaling", self.scaling)

    @property
    def spec(self) -> ScaleSpec:
        return ScaleSpec(self.form, (BLOCK if self.square else 1, BLOCK), E8M0Scale(self.scaling), "natural", BLOCK)

    @property
    def kernel_spec(self) -> ScaleSpec:
        return self.spec

    @property
    def copies_agree(self) -> bool:
        return self.square
