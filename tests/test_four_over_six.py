"""NVFP4 with two scales tried for each block: against a definition block by block, and as a field of the recipe."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fuser import Sequential, autocast, ops, te
from recipes import NVFP4BlockScaling, Recipe, Role, Splits
from recipes.casts.scale_rules import FourOverSix
from recipes.nvfp4 import NVFP4Quantizer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
KINDS = [FourOverSix(error, bound) for error in ("MAE", "MSE") for bound in (256, 448)]
MAGNITUDES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
f32 = np.float32


def e4m3(x: np.float32) -> np.float32:
    return f32(torch.tensor(x).clamp(max=448.0).to(torch.float8_e4m3fn).float().item())


def nearest(x: np.ndarray) -> np.ndarray:
    """E2M1 numbers to nearest, of two at one distance that with the even code."""
    distance = np.abs(np.abs(x).astype(np.float64)[:, None] - MAGNITUDES)
    odd = np.arange(8) % 2 * 1e-12
    return (np.sign(x) * MAGNITUDES[(distance + odd).argmin(1)]).astype(np.float32)


def tried(block: np.ndarray, scale: np.float32, encode: np.float32) -> np.ndarray:
    product = f32(scale * f32(f32(1) / encode))
    factor = f32(min(f32(1) / product, np.finfo(f32).max)) if product else np.finfo(f32).max
    return nearest((block * factor).astype(f32))


def error(block: np.ndarray, codes: np.ndarray, scale: np.float32, amax: np.float32, kind: FourOverSix) -> np.float32:
    values = ((codes * scale).astype(f32) * amax).astype(f32) / f32(6 * kind.bound)
    difference = (values.astype(f32) - block).astype(f32)
    total = f32(0)
    for each in difference:
        total = f32(total + (f32(each * each) if kind.error == "MSE" else abs(each)))
    return total


def by_definition(block: np.ndarray, amax: np.float32, kind: FourOverSix) -> tuple[np.ndarray, bool]:
    """The values without the factor of the tensor, and whether the largest number became 4."""
    encode = f32(f32(6 * kind.bound) / amax)
    base = f32(f32(np.abs(block).max() / f32(6)) * encode)
    six, four = e4m3(base), e4m3(f32(base * f32(1.5)))
    codes_six, codes_four = tried(block, six, encode), tried(block, four, encode)
    takes_four = error(block, codes_four, four, amax, kind) < error(block, codes_six, six, amax, kind)
    return (codes_four * four, True) if takes_four else (codes_six * six, False)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_block_takes_the_scale_that_errs_less(dtype, kind, device):
    x = torch.randn(32, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    made = NVFP4Quantizer(four_over_six=kind).quantize(x.to(device), rowwise=True, columnwise=True)
    amax, takes = f32(x.float().abs().max()), []
    for copy, numbers in ((made.rowwise, x.float()), (made.columnwise, x.float().T)):
        values = copy.operand(torch.float32).values.cpu()
        values = values if copy is made.rowwise else values.T
        for row, found in zip(numbers.numpy(), values.numpy(), strict=True):
            for start in range(0, len(row), 16):
                expected, is_four = by_definition(row[start : start + 16], amax, kind)
                assert np.array_equal(expected, found[start : start + 16])
                takes.append(is_four)
    assert 0.1 < np.mean(takes) < 0.9


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_the_error_is_never_larger_than_with_one_scale(kind):
    """Of each block, with the tensor's factor the same: only the bound of 448 has the plain format's."""
    x = torch.randn(64, 64)
    quantizers = NVFP4Quantizer(four_over_six=kind), NVFP4Quantizer()
    errors = [
        (quantizer.quantize(x).dequantize() - x).view(64, 4, 16).abs().pow(2 if kind.error == "MSE" else 1).sum(-1)
        for quantizer in quantizers
    ]
    if kind.bound == 448:
        assert (errors[0] <= errors[1] * (1 + 1e-5)).all()
    assert errors[0].mean() < errors[1].mean()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_square_blocks_choose_once_for_both_copies(kind, device):
    made = NVFP4Quantizer(two_d=True, four_over_six=kind).quantize(
        torch.randn(64, 96).to(device), rowwise=True, columnwise=True
    )
    assert torch.equal(made.rowwise.dequantize(), made.columnwise.dequantize())
    scales = made.rowwise.scale_inv.view(torch.uint8).view(4, 16, 6)
    assert (scales == scales[:, :1]).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "settings", [{}, {"rht": True}, {"row_scaled": True}, {"rht": True, "row_scaled": True}], ids=str
)
def test_groups_are_as_each_alone(settings, device):
    sizes, x = [5, 0, 17, 3], torch.randn(30, 40, device=device)
    quantizer = NVFP4Quantizer(four_over_six=FourOverSix(), **settings)
    splits = Splits.make(sizes, rows=30, device=device)
    grouped = quantizer.quantize_grouped(x, splits, rowwise=True, columnwise=True)
    for copy in ("rowwise", "columnwise"):
        found = getattr(grouped, copy).dequantize(splits).split([*sizes, 5])
        for part, values in zip(x.split([*sizes, 5])[:4], found, strict=False):
            if len(part):
                alone = getattr(quantizer.quantize(part, rowwise=True, columnwise=True), copy)
                assert torch.equal(values, alone.dequantize())
        assert not found[-1].any()


def test_what_is_not_finite_shows_as_without_it():
    x = torch.randn(2, 32)
    x[0, 3], x[1, 20] = float("nan"), float("inf")
    found, plain = (NVFP4Quantizer(four_over_six=kind).quantize(x).dequantize() for kind in (FourOverSix(), None))
    assert torch.equal(found.isnan(), plain.isnan()) and found[0, :16].isnan().all()
    assert found[1, 20] == plain[1, 20] == 2688
    assert not NVFP4Quantizer(four_over_six=FourOverSix()).quantize(torch.zeros(2, 32)).dequantize().any()


@pytest.mark.parametrize("which", ["none", "weights", "activations", "all"])
def test_the_recipe_names_the_roles(which):
    recipe = NVFP4BlockScaling(four_over_six=which, four_over_six_error="MSE", four_over_six_bound=448)
    tries = {role: recipe.quantizer(role).four_over_six for role in Role}
    kind = FourOverSix("MSE", 448)
    assert tries[Role.GRAD_OUTPUT] is None
    assert tries[Role.WEIGHT] == (kind if which in ("weights", "all") else None)
    assert tries[Role.INPUT] == (kind if which in ("activations", "all") else None)
    assert Recipe.from_dict(recipe.to_dict()) == recipe


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", ["grouped", "split"])
def test_a_layer_multiplies_what_was_chosen(path, device):
    recipe = NVFP4BlockScaling(four_over_six="all", disable_stochastic_rounding=True)
    layer = ops.GroupedLinear(2, 64, 32, bias=False, device=device)
    x, sizes = torch.randn(40, 64, device=device), [25, 15]
    with autocast(recipe), torch.no_grad():
        y = Sequential(layer, path=path)(x, split_sizes=sizes)
    parts = zip(x.split(sizes), layer.weight.detach(), y.split(sizes), strict=True)
    for part, weight, found in parts:
        x_q, w_q = (
            recipe.quantizer(r).quantize(t).dequantize() for r, t in ((Role.INPUT, part), (Role.WEIGHT, weight))
        )
        torch.testing.assert_close(found, x_q @ w_q.T, rtol=1e-4, atol=1e-4)


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="four_over_six is 'inputs', but must be"):
        NVFP4BlockScaling(four_over_six="inputs")
    with pytest.raises(ValueError, match="the error of four over six is 'L1'"):
        NVFP4BlockScaling(four_over_six_error="L1")
    with pytest.raises(ValueError, match="the bound of four over six is 300"):
        NVFP4BlockScaling(four_over_six_bound=300)
    with pytest.raises(ValueError, match="stochastic ones are drawn"):
        NVFP4Quantizer(stochastic=True, four_over_six=FourOverSix())


def test_transformer_engines_arguments():
    assert te.recipe.NVFP4BlockScaling(nvfp4_4over6="all") == NVFP4BlockScaling(four_over_six="all")
    given = {"nvfp4_4over6": "weights", "nvfp4_4over6_e4m3_use_256": "none", "nvfp4_4over6_err_mode": "MSE"}
    assert te.recipe.NVFP4BlockScaling(**given) == NVFP4BlockScaling(
        four_over_six="weights", four_over_six_error="MSE", four_over_six_bound=448
    )
    with pytest.raises(NotImplementedError, match="nvfp4_4over6_e4m3_use_256='weights'"):
        te.recipe.NVFP4BlockScaling(nvfp4_4over6="all", nvfp4_4over6_e4m3_use_256="weights")
