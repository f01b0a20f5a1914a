"""`cast_blocks` with float32 scales: bit for bit what its references give, for every layout and every odd size."""

import pytest
import torch

from recipes.casts.cast import cast_ref, dequantize_ref
from recipes.casts.cast_blocks import dequantize_blocks_on_triton
from recipes.float8_block import Float8BlockQuantizer
from recipes.tensors.formats import E4M3, E5M2, Float8Format
from recipes.tensors.splits import Splits
from tests.cast_cases import EACH_DEVICE, NAN, check_blocks, poisoned

OWN = [Float8Format("E4M3-240", torch.float8_e4m3fn, 240.0), Float8Format("E5M2-5000", torch.float8_e5m2, 5000.0)]
EACH_DIM = pytest.mark.parametrize("block_dim", [1, 2])
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",  # the interpreter of triton 3.6 with numpy 2
    "ignore:overflow encountered:RuntimeWarning",  # the quotient of the smallest amaxes is Inf, as it should be
    "ignore:invalid value encountered:RuntimeWarning",  # signalling NaNs
)


@pytest.mark.launches("cast_float8_block_kernel")
@EACH_DEVICE
@EACH_DIM
@pytest.mark.parametrize("form", [E4M3, E5M2, *OWN], ids=lambda form: form.name)
@pytest.mark.parametrize("power_2", [True, False], ids=["power-of-two", "float32"])
def test_both_copies_of_a_matrix(device, block_dim, form, power_2):
    check_blocks(device, poisoned(150, 136), Float8BlockQuantizer(form, block_dim, power_2, 0.0))


@EACH_DEVICE
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (3, 129), (257, 5), (2, 70, 40), (40,), (0, 8), (8, 0)], ids=str)
def test_shapes(device, shape):
    for block_dim in (1, 2):
        check_blocks(device, poisoned(*shape), Float8BlockQuantizer(E4M3, block_dim, False, 0.0))


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes(device, dtype):
    check_blocks(device, poisoned(20, 140, dtype=dtype), Float8BlockQuantizer(E4M3, 1, False, 0.0))


@EACH_DEVICE
@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "columnwise"])
@EACH_DIM
def test_one_copy_alone(device, rowwise, block_dim):
    quantizer = Float8BlockQuantizer(E4M3, block_dim, True, 1e-3)
    check_blocks(device, poisoned(30, 130), quantizer, rowwise=rowwise, columnwise=not rowwise)


@EACH_DEVICE
@EACH_DIM
@pytest.mark.parametrize("shape", [(2, 132, 20), (3, 5, 130), (0, 4, 4), (2, 0, 4)], ids=str)
def test_stacked_weights(device, block_dim, shape):
    check_blocks(device, poisoned(*shape), Float8BlockQuantizer(E4M3, block_dim, True, 0.0), stacked=True)


@EACH_DEVICE
@EACH_DIM
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        pytest.param(200, [3, 0, 150, 40], id="tail"),
        pytest.param(128, [1], id="one-row"),
        pytest.param(256, [128, 0, 0, 128], id="whole-blocks"),
        pytest.param(130, [0, 0], id="nobody"),
        pytest.param(0, [0, 0, 0], id="no-rows"),
    ],
)
def test_grouped_rows(device, block_dim, rows, sizes):
    x = poisoned(rows, 24)
    x[sum(sizes) :] = NAN
    for amax_epsilon in (0.0, 0.5):  # which blocks without rows have too
        check_blocks(device, x, Float8BlockQuantizer(E4M3, block_dim, True, amax_epsilon), sizes=sizes)


@EACH_DEVICE
@pytest.mark.slow
def test_more_groups_than_are_looked_up_at_a_time(device):
    check_blocks(device, poisoned(140, 8), Float8BlockQuantizer(E4M3, 2, True, 0.0), sizes=[1] * 139, columnwise=False)


@EACH_DEVICE
def test_input_that_is_not_contiguous(device):
    x = poisoned(140, 60)
    check_blocks(device, x.T, Float8BlockQuantizer(E4M3, 1, True, 0.0))
    check_blocks(device, x[::2, 3:], Float8BlockQuantizer(E4M3, 1, True, 0.0))


@pytest.mark.slow
@EACH_DEVICE
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_all_bf16_numbers(device, form):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    for power_2 in (True, False):
        # alone in its block, and among all others of its exponent
        alone = torch.nn.functional.pad(every[::16, None], (0, 1))
        check_blocks(device, alone, Float8BlockQuantizer(form, 1, power_2, 0.0), columnwise=False)
        check_blocks(device, every.view(-1, 128), Float8BlockQuantizer(form, 1, power_2, 0.0))


@pytest.mark.launches("dequantize_float8_block_kernel")
@EACH_DEVICE
@EACH_DIM
@pytest.mark.parametrize("transposed", [False, True], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("kind", ["single", "stacked", "odd-stacked", "grouped"])
def test_dequantize(device, block_dim, transposed, kind):
    sizes = [3, 0, 130, 20] if kind == "grouped" else None
    x = poisoned(*{"stacked": (2, 132, 40), "odd-stacked": (2, 7, 130)}.get(kind, (170, 72)))
    stacked = "stacked" in kind
    splits = None if sizes is None else Splits.make(sizes, rows=len(x), device="cpu")
    for form, power_2 in ((E4M3, True), (E5M2, False)):
        spec = Float8BlockQuantizer(form, block_dim, power_2).spec
        copies = cast_ref(x, spec, rowwise=not transposed, columnwise=transposed, stacked=stacked, splits=splits)
        codes, scale_inv = copies[2 * transposed], copies[2 * transposed + 1]
        about = {"shape": x.shape, "columnwise": transposed}
        for dtype in (torch.bfloat16, torch.float32):
            expected = dequantize_ref(codes, scale_inv, spec, dtype, splits=splits, **about)
            there = None if splits is None else Splits.make(sizes, rows=len(x), device=device)
            found = dequantize_blocks_on_triton(
                codes.to(device), scale_inv.to(device), spec, dtype, splits=there, **about
            )
            assert found.dtype == dtype
            assert torch.equal(found.cpu().float().nan_to_num(1e9), expected.float().nan_to_num(1e9))


@EACH_DEVICE
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_all_codes_dequantize(device, form):
    codes = torch.arange(256, dtype=torch.uint8).view(2, 128).view(form.dtype)
    scale_inv = torch.tensor([[1.0, 2.0**-127]])
    found = dequantize_blocks_on_triton(
        codes.to(device), scale_inv.to(device), Float8BlockQuantizer(form).spec, torch.float32, columnwise=False,
        shape=codes.shape,
    )  # fmt: skip
    expected = codes.float() * scale_inv.T
    assert torch.equal(found.cpu().nan_to_num(1e9), expected.nan_to_num(1e9))
