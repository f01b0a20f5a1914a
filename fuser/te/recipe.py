"""Recipes by TransformerEngine's arguments: each function gives the recipe of this framework.

backward_override: None, or in which precision the products of backward are: "high_precision" or "dequantized", see
    `MixedScaling.forward_only`. It holds for GroupedLinear too, which ignores it in TransformerEngine.
margin of MXFP8, fp8_dpa, fp8_mha, fp4_format: they concern nothing that is here, and only the default is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import recipes
from recipes.arguments import positive_integers
from recipes.mixed import MixedScaling
from recipes.recipe import Recipe, Role
from recipes.tensors.formats import Format as Format
from recipes.tensors.quantizer import Quantizer


def DelayedScaling(
    *,
    margin: int = 0,
    fp8_format: Format = Format.HYBRID,
    amax_history_len: int = 1024,
    amax_compute_algo: str | Callable[..., Any] = "max",
    scaling_factor_compute_algo: Callable[..., Any] | None = None,
    reduce_amax: bool = True,
    fp8_dpa: bool = False,
    fp8_mha: bool = False,
    backward_override: None = None,
) -> Recipe:
    """FP8 with scales from the amaxes of earlier steps; it has no backward_override, as in TransformerEngine."""
    _check_defaults(fp8_dpa=(fp8_dpa, False), fp8_mha=(fp8_mha, False), backward_override=(backward_override, None))
    return recipes.DelayedScaling(
        margin, fp8_format, amax_history_len, amax_compute_algo, scaling_factor_compute_algo, reduce_amax
    )


def Float8CurrentScaling(
    *,
    use_power_2_scales: bool = False,
    fp8_format: Format = Format.HYBRID,
    fp8_dpa: bool = False,
    fp8_mha: bool = False,
    backward_override: str | None = None,
) -> Recipe:
    """FP8 with scales from the tensor itself."""
    _check_defaults(fp8_dpa=(fp8_dpa, False), fp8_mha=(fp8_mha, False))
    return _overridden(recipes.Float8CurrentScaling(fp8_format, use_power_2_scales), backward_override)


def Float8BlockScaling(
    *,
    use_f32_scales: bool = False,
    fp8_format: Format = Format.E4M3,
    x_block_scaling_dim: Any = 1,
    w_block_scaling_dim: Any = 2,
    grad_block_scaling_dim: Any = 1,
    fp8_dpa: bool = False,
    fp8_mha: bool = False,
    backward_override: str | None = None,
) -> Recipe:
    """FP8 with a scale for each block of 1x128 or 128x128."""
    _check_defaults(fp8_dpa=(fp8_dpa, False), fp8_mha=(fp8_mha, False))
    dims = x_block_scaling_dim, w_block_scaling_dim, grad_block_scaling_dim
    return _overridden(recipes.Float8BlockScaling(fp8_format, use_f32_scales, 0.0, *dims), backward_override)


def MXFP8BlockScaling(
    *,
    margin: int = 0,
    fp8_format: Format = Format.E4M3,
    enable_2d_quantization: bool = False,
    fp8_dpa: bool = False,
    fp8_mha: bool = False,
    backward_override: str | None = None,
) -> Recipe:
    """MXFP8: a power of two for each 32 values."""
    _check_defaults(margin=(margin, 0), fp8_dpa=(fp8_dpa, False), fp8_mha=(fp8_mha, False))
    recipe = recipes.MXFP8BlockScaling(fp8_format, enable_2d_quantization=enable_2d_quantization)
    return _overridden(recipe, backward_override)


def NVFP4BlockScaling(
    *,
    disable_rht: bool = False,
    disable_stochastic_rounding: bool = False,
    disable_2d_quantization: bool = False,
    row_scaled_activation: bool = False,
    nvfp4_4over6: Any = "none",
    nvfp4_4over6_e4m3_use_256: str = "all",
    nvfp4_4over6_err_mode: Any = "MAE",
    fp8_dpa: bool = False,
    fp8_mha: bool = False,
    backward_override: str | None = None,
) -> Recipe:
    """NVFP4: an E4M3 scale for each 16 values, and an amax for the tensor.

    nvfp4_4over6_e4m3_use_256: "all" or "none": all roles have the same bound
    """
    _check_defaults(fp8_dpa=(fp8_dpa, False), fp8_mha=(fp8_mha, False))
    if nvfp4_4over6_e4m3_use_256 != "none":
        _check_defaults(nvfp4_4over6_e4m3_use_256=(nvfp4_4over6_e4m3_use_256, "all"))
    recipe = recipes.NVFP4BlockScaling(
        disable_rht=disable_rht, disable_stochastic_rounding=disable_stochastic_rounding,
        disable_2d_quantization=disable_2d_quantization, row_scaled_activation=row_scaled_activation,
        four_over_six=nvfp4_4over6, four_over_six_error=nvfp4_4over6_err_mode,
        four_over_six_bound=256 if nvfp4_4over6_e4m3_use_256 == "all" else 448,
    )  # fmt: skip
    return _overridden(recipe, backward_override)


def CustomRecipe(
    qfactory: Callable[[Role], Quantizer | None],
    *,
    quantization_alignment: int = 128,
    fp8_dpa: bool = False,
    fp8_mha: bool = False,
    backward_override: str | None = None,
) -> Recipe:
    """Quantizers of one's own, from a function of the role, which equals "input", "weight" or "grad_output".

    qfactory: returns a quantizer of this framework (`docs/quantizers.md`), or None for high precision
    quantization_alignment: of no effect, since no rows are padded

    Raises TypeError if qfactory is not callable, and in the first forward if it returns anything else, such as a
    quantizer of TransformerEngine; ValueError for an alignment that is not positive.
    """
    _check_defaults(fp8_dpa=(fp8_dpa, False), fp8_mha=(fp8_mha, False))
    positive_integers("CustomRecipe", quantization_alignment=quantization_alignment)
    return _overridden(recipes.CustomRecipe(qfactory), backward_override)


def _overridden(recipe: Recipe, backward: str | None) -> Recipe:
    return recipe if backward is None else MixedScaling.forward_only(recipe, backward=backward)


def _check_defaults(**given: tuple[Any, Any]) -> None:
    for name, (value, default) in given.items():
        if value != default:
            raise NotImplementedError(f"{name}={value!r} is not there; only {default!r} is. Leave it out.")
