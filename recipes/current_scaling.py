"""Float8CurrentScaling: one scale for each tensor, computed from the tensor itself.

Formula and layout: `recipes/casts/cast.py`. Both copies use the same scale. Grouped rows and stacked weights have one
scale for each group; an empty group's scale is 1.
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
class Float8CurrentScaling(Recipe):
    """FP8 with per-tensor scales computed from the current tensor.

    fp8_format: HYBRID is E4M3 in forward and E5M2 for gradients
    power_2_scale: round scales down to powers of two
    amax_epsilon: a lower bound of the amax from which a scale is computed
    split_accumulator_*: whether native products promote partial sums to float32, for each of the three products

    Raises ValueError for an amax_epsilon that is negative or not finite.
    """

    names: ClassVar[tuple[str, ...]] = ("fp8_current",)
    repeatable: ClassVar[bool] = True

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
class CurrentScalingQuantizer(SpecQuantizer):
    """One scale for each tensor or group."""

    form: Float8Format
    power_2_scale: bool = False
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_form(self.form)
        check_amax_epsilon(self.amax_epsilon)

    @property
    def spec(self) -> ScaleSpec:
        return per_tensor(self.form, Float32Scale(self.power_2_scale, self.amax_epsilon))


def per_tensor(form: Float8Format, rule: Float32Scale) -> ScaleSpec:
    """One scale for each tensor or group, shared by both copies."""
    return ScaleSpec(form, (ALL, ALL), rule, "transposed", BLOCK)
