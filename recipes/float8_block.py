"""Float8BlockScaling: one float32 scale for each 1x128 values of activations and gradients, 128x128 of weights.

Formula and layout of codes and scales: `recipes/casts/cast.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from recipes.casts.scale_rules import Float32Scale, check_amax_epsilon
from recipes.recipe import Recipe, Role
from recipes.tensors.formats import Float8Format, Format, ScaleSpec
from recipes.tensors.quantizer import check_form
from recipes.tensors.spec_quantizer import SpecQuantizer

BLOCK = 128

# 1: a scale for 1x128 values, 2: for 128x128
BlockDim = Literal[1, 2]


@dataclass(frozen=True)
class Float8BlockScaling(Recipe):
    """FP8 with one scale for each block. Native products accumulate partial sums of 128 terms in float32; emulated ones
    multiply dequantized operands.

    fp8_format: E4M3 for all tensors, or HYBRID with E5M2 for gradients
    use_f32_scales: scales are arbitrary float32 numbers; otherwise powers of two, rounded down
    amax_epsilon: a lower bound of the amax from which a scale is computed
    x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim: 1: a scale for each 128 values along the
        contracted axis; 2: one for each 128x128 values; at most one of the three may be 2
    """

    names: ClassVar[tuple[str, ...]] = ("fp8_block",)
    repeatable: ClassVar[bool] = True

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
class Float8BlockQuantizer(SpecQuantizer):
    """One float32 scale for each 128 values along K (rowwise) or the rows (columnwise); block_dim 2: for 128x128."""

    form: Float8Format
    block_dim: BlockDim = 1
    power_2_scale: bool = True
    amax_epsilon: float = 0.0

    def __post_init__(self) -> None:
        check_form(self.form)
        _check_dim("block_dim", self.block_dim)
        check_amax_epsilon(self.amax_epsilon)

    @property
    def spec(self) -> ScaleSpec:
        rule = Float32Scale(self.power_2_scale, self.amax_epsilon, input_range=True)
        return ScaleSpec(self.form, (1 if self.block_dim == 1 else BLOCK, BLOCK), rule, "transposed", BLOCK)


def _check_dim(name: str, dim: object) -> None:
    if type(dim) is not int or dim not in (1, 2):
        raise ValueError(f"{name} is {dim!r}, but must be 1 (1x128 blocks) or 2 (128x128 blocks).")
