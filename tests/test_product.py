"""Quantized products: how far from the exact products of the same quantized operands, as docs/recipes.md bounds it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ops.products.product import float8_operands, gemm, operands, wgrad
from recipes import (
    Float8BlockScaling,
    Float8CurrentScaling,
    Format,
    GroupedTensor,
    MixedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Splits,
    as_recipe,
)
from recipes.native_products import COLUMNWISE, LAYOUTS, GemmLayout, compute_capability
from recipes.recipe import Recipe, Role

RECIPES: dict[str, Recipe] = {
    "fp8_current": Float8CurrentScaling(),
    "fp8_block": Float8BlockScaling(),
    "mxfp8": MXFP8BlockScaling(),
    "nvfp4": NVFP4BlockScaling(),
}
ROLES = {
    "TN": (Role.INPUT, Role.WEIGHT),
    "NN": (Role.GRAD_OUTPUT, Role.WEIGHT),
    "NT": (Role.GRAD_OUTPUT, Role.INPUT),
}
# Half of the last place of a result, relative to it.
ROUNDED = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SCALED = 2.0**-21  # scales and their product, each rounded to float32


def emulated(terms: int) -> float:
    """Of the sum of absolute products: float32 sums, which tensor cores cut rather than round."""
    return terms * 2.0**-23 + SCALED


def native(terms: int, split: bool) -> float:
    """An instruction adds 32 products to the sum and cuts all 33 at 2^-13 of the largest; split: sums of 128 terms."""
    instructions = -(-min(terms, 128) // 32) if split else -(-terms // 32)
    return instructions * 33 * 2.0**-13 + (emulated(terms) if split else SCALED)


def cancelling(rows: int, columns: int, terms: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """a [rows, terms] and b [columns, terms] whose products are small beside the sum of their terms' magnitudes."""
    a, b = torch.randn(rows, terms), torch.randn(columns, terms)
    half = terms // 2
    a[:, half : 2 * half] = -a[:, :half]
    b[:, half : 2 * half] = b[:, :half] * (1 + 2.0**-6 * torch.randn(columns, half))
    order = torch.randperm(terms)
    return a[:, order].to(dtype), b[:, order].to(dtype)


def check(
    name: str, layout: GemmLayout, terms: int, dtype: torch.dtype, device: str, bound: float, split: bool = True
) -> None:
    a, b = (tensor.to(device) for tensor in cancelling(32, 48, terms, dtype))
    recipe = RECIPES[name]
    given = (a.T.contiguous() if COLUMNWISE[layout][0] else a, b.T.contiguous() if COLUMNWISE[layout][1] else b)
    left, right = (
        recipe.quantizer(role).quantize(tensor, rowwise=True, columnwise=True)
        for role, tensor in zip(ROLES[layout], given, strict=True)
    )
    capability = compute_capability(torch.device(device))
    found = gemm(layout, left, right, dtype, capability=capability, split_accumulator=split)
    values = [
        operand.values.double() * (1.0 if operand.alpha is None else operand.alpha.double())
        for operand in operands(layout, left, right, torch.float64)
    ]
    x = values[0].T if COLUMNWISE[layout][0] else values[0]
    w = values[1] if COLUMNWISE[layout][1] else values[1].T
    exact, magnitude = x @ w, x.abs() @ w.abs()
    if name != "nvfp4":  # whose own errors undo the cancellation
        assert (exact.abs() < 0.1 * magnitude).double().mean() > 0.9, "the operands do not cancel"
    error = (found.double() - exact).abs() - ROUNDED[dtype] * exact.abs() * (1 + bound)
    worst = (error / magnitude).max().item()
    assert worst <= bound, f"{worst:.3g} of the sum of absolute products, which is more than {bound:.3g}"


@pytest.mark.parametrize("terms", [32, 256, 2048])
@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values())
@pytest.mark.parametrize("name", RECIPES)
def test_emulated_products_err_by_float32_sums_at_most(name, layout, dtype, terms):
    check(name, layout, terms, dtype, "cpu", emulated(terms))


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [32, 256, 2048, 7168])
@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values())
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4"])
def test_emulated_products_of_a_gpu_err_by_float32_sums_at_most(name, layout, dtype, terms):
    about = torch.backends.cuda.matmul
    before = about.allow_bf16_reduced_precision_reduction
    about.allow_bf16_reduced_precision_reduction = False
    try:
        check(name, layout, terms, dtype, "cuda", emulated(terms))
    finally:
        about.allow_bf16_reduced_precision_reduction = before


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [32, 256, 2048, 7168])
@pytest.mark.parametrize("dtype", list(ROUNDED), ids=str)
@pytest.mark.parametrize("layout", LAYOUTS.values())
@pytest.mark.parametrize(
    "name, split", [("fp8_current", False), ("fp8_current", True), ("fp8_block", True)], ids=["fast", "split", "blocks"]
)
def test_native_products_err_by_what_tensor_cores_cut_at_most(name, split, layout, dtype, terms):
    bound = emulated(terms)
    if torch.cuda.get_device_capability() >= (8, 9):
        bound = native(terms, split)
    check(name, layout, terms, dtype, "cuda", bound, split)


PLANNED = [
    *(as_recipe(name) for name in ("fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4")),
    Float8CurrentScaling(Format.E4M3),
    Float8BlockScaling(w_block_scaling_dim=1),
    Float8BlockScaling(x_block_scaling_dim=2, w_block_scaling_dim=1),
    MixedScaling("fp8_current", "fp8_current", input_for_wgrad="fp8_block"),
    MixedScaling("fp8_current", "bf16", grad_output="mxfp8"),
]


@pytest.mark.parametrize("kind", ["matrix", "groups"])
@pytest.mark.parametrize("capability", [None, (8, 0), (8, 9), (9, 0), (10, 0)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("recipe", PLANNED, ids=lambda recipe: type(recipe).__name__)
def test_a_run_multiplies_codes_where_the_plan_says_native(recipe, dtype, capability, kind):
    """What a run decides for its operands is what `explain` and `Recipe.support` say of the recipe."""
    splits = Splits.make([40, 0, 88], rows=128, device="cpu")
    x, dy = torch.randn(128, 64, dtype=dtype), torch.randn(128, 96, dtype=dtype)
    both = {"rowwise": True, "columnwise": True}

    def quantized(role: Role, tensor: Tensor) -> Tensor | QuantizedTensor | GroupedTensor:
        quantizer = recipe.quantizer(role)
        if quantizer is None:
            return tensor
        if kind == "matrix":
            return quantizer.quantize(tensor, **both)
        if role is Role.WEIGHT:
            return quantizer.quantize_stacked(tensor, **both)
        return quantizer.quantize_grouped(tensor, splits, **both)

    weight = torch.randn((96, 64) if kind == "matrix" else (3, 96, 64), dtype=dtype)
    made = {Role.INPUT: x, Role.WEIGHT: weight, Role.GRAD_OUTPUT: dy}
    made = {role: quantized(role, tensor) for role, tensor in made.items()}
    for product, layout in LAYOUTS.items():
        left, right = (made[role] for role in ROLES[layout])
        codes = float8_operands(layout, left, right, capability)
        assert (codes is not None) == (recipe.why_not_native(product, dtype, capability) is None), product


@pytest.mark.parametrize("accumulate", [False, True])
def test_a_scaled_weight_gradient_in_float64_is_scaled_in_float64(accumulate: bool) -> None:
    dy, x = torch.randn(50, 9, dtype=torch.float64), torch.randn(50, 7, dtype=torch.float64)
    out = torch.ones(9, 7, dtype=torch.float64)
    wgrad(dy, x, torch.float64, capability=None, alpha=-0.3, out=out, accumulate=accumulate)
    torch.testing.assert_close(out, -0.3 * dy.T @ x + accumulate, rtol=1e-13, atol=1e-13)
