"""MXFP4: a format by value. Its codes and scales against a definition by enumeration, and a layer under it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fuser import Sequential, autocast, ops
from recipes import MXFP4BlockScaling, Recipe, Role
from recipes.mxfp4 import MXFP4Quantizer

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def nearest(x: float) -> float:
    """The nearest E2M1 number, of two at the same distance that with the even code; 6 for all above."""
    distances = [abs(abs(x) - magnitude) for magnitude in MAGNITUDES]
    codes = [code for code, distance in enumerate(distances) if distance == min(distances)]
    code = next((code for code in codes if code % 2 == 0), codes[0])
    return -MAGNITUDES[code] if x < 0 else MAGNITUDES[code]


def quantized(block: Tensor, scaling: str) -> Tensor:
    """One block by the definition, in float64."""
    amax = block.abs().max().item()
    if amax == 0:
        return torch.zeros_like(block, dtype=torch.float64)
    exponent = -127
    while exponent < 127 and (2.0 ** (exponent + 1) * 4 <= amax if scaling == "floor" else 2.0**exponent * 6 < amax):
        exponent += 1
    values = [nearest(value * 2.0**-exponent) * 2.0**exponent for value in block.double().tolist()]
    return torch.tensor(values, dtype=torch.float64)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scaling", ["floor", "round_up"])
def test_each_block_is_what_the_definition_says(scaling, dtype, device):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 70, generator=generator) * torch.randn(40, 1, generator=generator).mul(3).exp2()
    x[3], x[5, :32] = 0.0, torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 4)  # ties
    x = x.to(dtype)
    made = MXFP4Quantizer(scaling).quantize(x.to(device), rowwise=True, columnwise=True)
    rowwise = torch.cat([torch.stack([quantized(row, scaling) for row in part]) for part in x.split(32, 1)], 1)
    assert torch.equal(made.rowwise.dequantize().double().cpu(), rowwise)
    columnwise = torch.cat([torch.stack([quantized(column, scaling) for column in part.T], 1) for part in x.split(32)])
    assert torch.equal(made.columnwise.dequantize().double().cpu(), columnwise)


def test_what_is_not_finite_shows_and_large_numbers_saturate():
    x = torch.ones(2, 64)
    x[0, 3], x[1, 40] = float("nan"), float("inf")
    y = MXFP4Quantizer().quantize(x).dequantize()
    assert y[0, 3].isnan() and y.isnan().sum() == 1
    assert y[1, 40] >= 2.0**127 and torch.equal(y[1, :32], torch.ones(32))


def test_every_code_has_its_value():
    element = MXFP4Quantizer().spec.element
    values = torch.tensor([*MAGNITUDES, *(-value for value in MAGNITUDES)])
    assert torch.equal(element.decode(torch.arange(16, dtype=torch.uint8), torch.float32), values)
    assert element.decode(torch.tensor([16], dtype=torch.uint8), torch.bfloat16).isnan()
    assert torch.equal(element.encode(values), torch.arange(16, dtype=torch.uint8))


def test_square_blocks_have_the_same_codes_both_ways():
    quantizer = MXFP4BlockScaling(enable_2d_quantization=True).quantizer(Role.WEIGHT)
    made = quantizer.quantize(torch.randn(64, 96), rowwise=True, columnwise=True)
    assert quantizer.copies_agree and torch.equal(made.rowwise.dequantize(), made.columnwise.dequantize())


@pytest.mark.parametrize("device", DEVICES)
def test_a_layer_multiplies_the_values_of_the_codes(device):
    recipe = MXFP4BlockScaling()
    layer = ops.Linear(64, 48, bias=False, device=device)
    x, dy = torch.randn(96, 64, device=device, requires_grad=True), torch.randn(96, 48, device=device)
    with autocast(recipe):
        y = layer(x)
    y.backward(dy)
    of = {
        role: recipe.quantizer(role).quantize(tensor.detach(), rowwise=True, columnwise=True)
        for role, tensor in ((Role.INPUT, x), (Role.WEIGHT, layer.weight), (Role.GRAD_OUTPUT, dy))
    }
    rows = {role: made.rowwise.dequantize() for role, made in of.items()}
    columns = {role: made.columnwise.dequantize() for role, made in of.items()}
    torch.testing.assert_close(y, rows[Role.INPUT] @ rows[Role.WEIGHT].T)
    torch.testing.assert_close(x.grad, rows[Role.GRAD_OUTPUT] @ columns[Role.WEIGHT])
    torch.testing.assert_close(layer.weight.grad, columns[Role.GRAD_OUTPUT].T @ columns[Role.INPUT])


def test_it_is_emulated_and_written_down():
    recipe = MXFP4BlockScaling("round_up", enable_2d_quantization=True)
    assert Recipe.from_dict(recipe.to_dict()) == recipe and recipe.support(torch.device("cpu")) == "emulated"
    assert "path: grouped" in Sequential(ops.GroupedLinear(2, 32, 32)).explain(recipe=recipe)
    with pytest.raises(ValueError, match="scaling is 'up'"):
        MXFP4BlockScaling("up")
