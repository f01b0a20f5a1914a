"""`cast_blocks` with float32 scales: bit for bit what its references give, for every layout and every odd size."""

import pytest
import torch

from recipes.casts.cast import cast_ref, dequantize_ref
from recipes.casts.cast_blocks import cast_blocks_on_triton, dequantize_blocks_on_triton
from recipes.float8_block import Float8BlockQuantizer
from recipes.tensors.formats import E4M3, E5M2, Float8Format
from recipes.tensors.splits import Splits

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]
EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
OWN = [Float8Format("E4M3-240", torch.float8_e4m3fn, 240.0), Float8Format("E5M2-5000", torch.float8_e5m2, 5000.0)]
EACH_DIM = pytest.mark.parametrize("block_dim", [1, 2])
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",  # the interpreter of triton 3.6 with numpy 2
    "ignore:overflow encountered:RuntimeWarning",  # the quotient of the smallest amaxes is Inf, as it should be
    "ignore:invalid value encountered:RuntimeWarning",  # signalling NaNs
)

INF, NAN = float("inf"), float("nan")


def cast_on(device, x, quantizer, *, rowwise=True, columnwise=True, stacked=False, sizes=None):
    """What the kernel writes, on the host. Without a GPU the launcher is called as CUDA tensors would call it."""
    x = x.to(device)
    splits = None if sizes is None else Splits.make(sizes, rows=x.shape[0], device=device)
    wanted = {"rowwise": rowwise, "columnwise": columnwise, "stacked": stacked, "splits": splits}
    copies = cast_blocks_on_triton(x, quantizer.spec, **wanted)
    form = quantizer.form.dtype
    return [None if t is None else (t.cpu().view(torch.uint8) if t.dtype == form else t.cpu()) for t in copies]


def assert_same_copies(found, expected):
    for mine, other in zip(found, expected, strict=True):
        assert (mine is None) == (other is None)
        if mine is None:
            continue
        assert mine.shape == other.shape
        if other.dtype in (E4M3.dtype, E5M2.dtype):
            # a NaN's sign and payload are the machine's
            nan = other.float().isnan()
            assert torch.equal(mine.view(other.dtype).float().isnan(), nan)
            assert torch.equal(mine.masked_fill(nan, 0), other.view(torch.uint8).masked_fill(nan, 0))
        else:
            assert torch.equal(mine, other)


def check(device, x, quantizer, **options):
    sizes = options.pop("sizes", None)
    splits = None if sizes is None else Splits.make(sizes, rows=x.shape[0], device="cpu")
    wanted = {"rowwise": True, "columnwise": True} | options
    expected = cast_ref(x, quantizer.spec, splits=splits, **wanted)
    assert_same_copies(cast_on(device, x, quantizer, sizes=sizes, **wanted), expected)


def poisoned(*shape, dtype=torch.bfloat16):
    """Values around powers of two over a wide range, a zero row, a NaN, an Inf, the largest number, tiny ones."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-12, 12, (*shape[:-1], 1)).float())
    x = x.to(dtype)
    flat = x.view(-1)
    for place, value in ((3, NAN), (5, INF), (7, -INF), (11, torch.finfo(dtype).max), (13, torch.finfo(dtype).tiny)):
        if flat.numel():
            flat[(place * 131) % flat.numel()] = value
    if x.ndim == 2 and x.shape[0] > 1:
        x[1] = 0
    return x


@pytest.mark.launches("cast_float8_block_kernel")
@EACH_DEVICE
@EACH_DIM
@pytest.mark.parametrize("form", [E4M3, E5M2, *OWN], ids=lambda form: form.name)
@pytest.mark.parametrize("power_2", [True, False], ids=["power-of-two", "float32"])
def test_both_copies_of_a_matrix(device, block_dim, form, power_2):
    check(device, poisoned(150, 136), Float8BlockQuantizer(form, block_dim, power_2, 0.0))


@EACH_DEVICE
@pytest.mark.parametrize("shape", [(1, 1), (128, 128), (3, 129), (257, 5), (2, 70, 40), (40,), (0, 8), (8, 0)], ids=str)
def test_shapes(device, shape):
    for block_dim in (1, 2):
        check(device, poisoned(*shape), Float8BlockQuantizer(E4M3, block_dim, False, 0.0))


@EACH_DEVICE
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64], ids=str)
def test_dtypes(device, dtype):
    check(device, poisoned(20, 140, dtype=dtype), Float8BlockQuantizer(E4M3, 1, False, 0.0))


@EACH_DEVICE
@pytest.mark.parametrize("rowwise", [True, False], ids=["rowwise", "columnwise"])
@EACH_DIM
def test_one_copy_alone(device, rowwise, block_dim):
    quantizer = Float8BlockQuantizer(E4M3, block_dim, True, 1e-3)
    check(device, poisoned(30, 130), quantizer, rowwise=rowwise, columnwise=not rowwise)


@EACH_DEVICE
@EACH_DIM
@pytest.mark.parametrize("shape", [(2, 132, 20), (3, 5, 130), (0, 4, 4), (2, 0, 4)], ids=str)
def test_stacked_weights(device, block_dim, shape):
    check(device, poisoned(*shape), Float8BlockQuantizer(E4M3, block_dim, True, 0.0), stacked=True)


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
        check(device, x, Float8BlockQuantizer(E4M3, block_dim, True, amax_epsilon), sizes=sizes)


@EACH_DEVICE
def test_more_groups_than_are_looked_up_at_a_time(device):
    check(device, poisoned(140, 8), Float8BlockQuantizer(E4M3, 2, True, 0.0), sizes=[1] * 139, columnwise=False)


@EACH_DEVICE
def test_input_that_is_not_contiguous(device):
    x = poisoned(140, 60)
    check(device, x.T, Float8BlockQuantizer(E4M3, 1, True, 0.0))
    check(device, x[::2, 3:], Float8BlockQuantizer(E4M3, 1, True, 0.0))


@EACH_DEVICE
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
def test_all_bf16_numbers(device, form):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    for power_2 in (True, False):
        # alone in its block, and among all others of its exponent
        alone = torch.nn.functional.pad(every[::16, None], (0, 1))
        check(device, alone, Float8BlockQuantizer(form, 1, power_2, 0.0), columnwise=False)
        check(device, every.view(-1, 128), Float8BlockQuantizer(form, 1, power_2, 0.0))


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
