"""What every built-in quantizer lets in: real numbers, at least one dimension, at least one copy."""

import pytest
import torch

from recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    MixedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Role,
    Splits,
)
from recipes.current_scaling import CurrentScalingQuantizer
from recipes.delayed_scaling import DelayedScalingQuantizer
from recipes.float8_block import Float8BlockQuantizer
from recipes.float8_rowwise import RowwiseScalingQuantizer
from recipes.mxfp8 import MXFP8Quantizer
from recipes.tensors.formats import E4M3

RECIPES = [
    DelayedScaling(),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    Float8RowwiseScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
    # one copy in high precision: no other quantizer would look at x
    MixedScaling(input="mxfp8", weight="mxfp8", grad_output="mxfp8", input_for_wgrad="bf16"),
]
SPLITS = Splits.make([4, 0, 3], rows=7, device="cpu")

QUANTIZE = {
    "quantize": (lambda q, x, **copies: q.quantize(x, **copies), (7, 32)),
    "quantize_stacked": (lambda q, x, **copies: q.quantize_stacked(x, **copies), (3, 7, 32)),
    "quantize_grouped": (lambda q, x, **copies: q.quantize_grouped(x, SPLITS, **copies), (7, 32)),
}


@pytest.fixture(params=RECIPES, ids=lambda recipe: recipe.name)
def quantizer(request):
    return request.param.quantizer(Role.INPUT)


@pytest.mark.parametrize("method", QUANTIZE)
@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8, torch.bool, torch.complex64, torch.float8_e4m3fn], ids=str)
def test_numbers_that_are_not_real_are_refused(quantizer, method, dtype):
    quantize, shape = QUANTIZE[method]
    with pytest.raises(TypeError, match=rf"is {dtype}, but must be bfloat16, float16, float32 or float64\. Convert it"):
        quantize(quantizer, torch.ones(shape).to(dtype), columnwise=True)


@pytest.mark.parametrize("method", QUANTIZE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_real_numbers_are_quantized(quantizer, method, dtype):
    quantize, shape = QUANTIZE[method]
    assert quantize(quantizer, torch.ones(shape, dtype=dtype)).dequantize().dtype == dtype


@pytest.mark.parametrize("method", QUANTIZE)
def test_one_copy_at_least_is_asked_for(quantizer, method):
    quantize, shape = QUANTIZE[method]
    with pytest.raises(ValueError, match="rowwise and columnwise are both False, so nothing would be made. Ask"):
        quantize(quantizer, torch.ones(shape), rowwise=False, columnwise=False)


@pytest.mark.parametrize("method", QUANTIZE)
def test_a_number_without_dimensions_is_refused(quantizer, method):
    with pytest.raises(ValueError, match=r"has no dimensions, but must be \[..., K\]. Pass x.view\(1\)"):
        QUANTIZE[method][0](quantizer, torch.tensor(1.0))


@pytest.mark.parametrize("method", QUANTIZE)
def test_what_is_no_tensor_is_refused(quantizer, method):
    with pytest.raises(TypeError, match="what is to be quantized is of type list. Pass a tensor"):
        QUANTIZE[method][0](quantizer, [[1.0, 2.0]])


@pytest.mark.parametrize("shape", [(7,), (7, 32), (1, 3, 7, 32)], ids=str)
def test_stacked_weights_have_three_dimensions(quantizer, shape):
    with pytest.raises(ValueError, match=r"stacked weights have shape \[.*\], but must be \[G, N, K\]. Stack them"):
        quantizer.quantize_stacked(torch.ones(shape))


@pytest.mark.parametrize("shape", [(7,), (1, 7, 32)], ids=str)
def test_grouped_rows_have_two_dimensions(quantizer, shape):
    with pytest.raises(ValueError, match=r"grouped rows have shape \[.*\], but must be \[rows, K\]. Flatten"):
        quantizer.quantize_grouped(torch.ones(shape), SPLITS)


def test_splits_of_other_rows_are_refused(quantizer):
    with pytest.raises(ValueError, match="these Splits were made for 7 rows, but x has 8. Pass Splits.make"):
        quantizer.quantize_grouped(torch.ones(8, 32), SPLITS)
    with pytest.raises(TypeError, match="splits is of type list. Pass Splits.make"):
        quantizer.quantize_grouped(torch.ones(7, 32), [4, 0, 3])


@pytest.mark.parametrize("kind", [CurrentScalingQuantizer, Float8BlockQuantizer, RowwiseScalingQuantizer])
@pytest.mark.parametrize("epsilon", [-1.0, float("nan"), float("inf"), 1e39])
def test_an_epsilon_that_is_no_amax_is_refused(kind, epsilon):
    with pytest.raises(
        ValueError, match=rf"amax_epsilon is {epsilon!r}, but cannot be negative, NaN or more".replace("+", r"\+")
    ):
        kind(E4M3, amax_epsilon=epsilon)
    with pytest.raises(TypeError, match="amax_epsilon is '0' .*, but must be a number"):
        kind(E4M3, amax_epsilon="0")


@pytest.mark.parametrize("form", ["E4M3", Format.HYBRID, torch.float8_e4m3fn, Role.INPUT], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        CurrentScalingQuantizer,
        Float8BlockQuantizer,
        RowwiseScalingQuantizer,
        MXFP8Quantizer,
        lambda form: DelayedScalingQuantizer(form, DelayedScaling()),
        lambda form: CustomRecipe(lambda role: MXFP8Quantizer(form)).quantizer(Role.INPUT),
    ],
)
def test_a_quantizer_has_one_element_format(make, form):
    with pytest.raises(TypeError, match=r"form is .*, but must be a Float8Format. Pass E4M3 or E5M2"):
        make(form)


def test_settings_of_quantizers_are_among_those_that_exist():
    with pytest.raises(ValueError, match='scaling is \'up\', but must be "round_up" or "floor"'):
        MXFP8Quantizer(E4M3, "up")
    with pytest.raises(ValueError, match=r"block_dim is 3, but must be 1 \(1x128 blocks\)"):
        Float8BlockQuantizer(E4M3, 3)
