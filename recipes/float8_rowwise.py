"""Float8RowwiseScaling: one float32 scale for each row, of the columnwise copy for each column.

Formula and layout of codes and scales: `recipes/casts/cast.py`. A scale never changes along the axis that a product
sums over, so native products apply both operands' scales to the sum: y[t, n] = acc[t, n] * s_x[t] * s_w[n].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from recipes.casts.cast_float8 import BLOCK
from recipes.casts.scale_rules import Float32Scale, check_amax_epsilon
from recipes.recipe import Recipe, Role
from recipes.tensors.formats import ALL, Float8Format, Format, ScaleSpec
from recipes.tensors.quantizer import check_form
from recipes.tensors.spec_quantizer import SpecQuantizer


@dataclass(frozen=True)
class Float8RowwiseScaling(Recipe):
    """FP8 with one scale for each row, computed from the row itself: the recipe of torchao, and what torch's
    `F.scaled_grouped_mm` multiplies.

        fprop   x: a scale for each row t           w: for each output feature n, over K
        dgrad   dy: for each row t                  w: for each input feature k, over N
        wgrad   dy, x: for each column of each group, over the rows of the group

    An empty group's scales are 1.

    fp8_format: E4M3 for all tensors, or HYBRID with E5M2 for gradients
    power_2_scale: round scales down to powers of two (torchao 0.18's grouped products always do)
    amax_epsilon: a lower bound of the amax from which a scale is computed
    split_accumulator_*: whether native products promote partial sums to float32, for each of the three products

    Raises ValueError for an amax_epsilon that is negative or not finite.
    """

    names: ClassVar[tuple[str, ...]] = ("fp8_rowwise",)
    repeatable: ClassVar[bool] = True

    fp8_format: Format = Format.E4M3
    power_2_scale: bool = False
    amax_epsilon: float = 0.0
    split_accumulator_fprop: bool = False
    split_accumulator_dgrad: bool = False
    split_accumulator_wgrad: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_amax_epsilon(self.amax_epsilon)

    def quantizer(self, role: Role) -> RowwiseScalingQuantizer:
        form = self.fp8_format.backward if role is Role.GRAD_OUTPUT else self.fp8_format.forward
        return RowwiseScalingQuantizer(form, self.power_2_scale, self.amax_epsilon)


@dataclass(frozen=True)
class RowwiseScalingQuantizer(SpecQuantizer):
    """One float32 scale for each row (rowwise), or for each column of a tensor or group (columnwise)."""

    form: Float8Format
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_form(self.form)
        check_amax_epsilon(self.amax_epsilon)

    @property
    def spec(self) -> ScaleSpec:
        rule = Float32Scale(self.power_2_scale, self.amax_epsilon)
        return ScaleSpec(self.form, (1, ALL), rule, "transposed", BLOCK)
