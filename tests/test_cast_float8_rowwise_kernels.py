"""The kernels of `cast_float8_rowwise`: bit for bit what the references give, for every layout and every odd size."""

from functools import partial
from unittest.mock import patch

import pytest
import torch

from recipes.casts import cast_float8
from recipes.casts import cast_float8_rowwise as kernels
from recipes.casts.cast import cast_ref, dequantize_ref
from recipes.float8_rowwise import RowwiseScalingQuantizer
from recipes.tensors.formats import E4M3, E5M2, Float8Format
from recipes.tensors.splits import Splits
from tests.pairwise import rest

DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter, id="interpreter"),
    pytest.param("cuda", marks=pytest.mark.gpu, id="gpu"),
]
EACH_DEVICE = pytest.mark.parametrize("device", DEVICES)
FORMS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
OWN = [Float8Format("E4M3-240", torch.float8_e4m3fn, 240.0), Float8Format("E5M2-5000", torch.float8_e5m2, 5000.0)]
COPIES = {"both": (True, True), "rowwise": (True, False), "columnwise": (False, True)}
EACH_COPY = pytest.mark.parametrize("copies", ["both", rest("rowwise"), rest("columnwise")])
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",  # the interpreter of triton 3.6 with numpy 2
    "ignore:overflow encountered:RuntimeWarning",  # the quotient of the smallest amaxes is Inf, as it should be
    "ignore:invalid value encountered:RuntimeWarning",  # signalling NaNs
)

INF, NAN = float("inf"), float("nan")


def poisoned(*shape, dtype=torch.bfloat16):
    """Rows and columns around powers of two over a wide range, a zero row and column, NaN, Inf, large and tiny ones."""
    spread = [torch.exp2(torch.randint(-9, 9, (size, 1)).float()) for size in (shape[-2], shape[-1])]
    x = (torch.randn(shape) * spread[0] * spread[1].T).to(dtype)
    flat, limits = x.view(-1), torch.finfo(dtype)
    for place, value in ((3, NAN), (7, -INF), (11, limits.max), (13, limits.tiny), (17, -0.0)):
        if flat.numel():
            flat[(place * 131) % flat.numel()] = value
    if x.ndim == 2 and x.shape[0] > 2 and x.shape[1] > 2:
        x[1], x[:, 2] = 0, 0
        x[2] = NAN
    return x


def assert_same_tensor(mine, other):
    assert (mine is None) == (other is None)
    if mine is None:
        return
    mine = mine.cpu()
    assert mine.shape == other.shape and mine.dtype == other.dtype
    if other.dtype in (E4M3.dtype, E5M2.dtype):
        nan = other.float().isnan()  # whose sign and payload are the machine's
        assert torch.equal(mine.float().isnan(), nan)
        mine, other = (codes.view(torch.uint8).masked_fill(nan, 0) for codes in (mine, other))
    assert torch.equal(mine.nan_to_num(1e9), other.nan_to_num(1e9))


def check(device, x, form=E4M3, *, copies="both", sizes=None, power_2=False, epsilon=0.0, stacked=False):
    """Codes, scales, and values in three dtypes."""
    splits = [None if sizes is None else Splits.make(sizes, rows=len(x), device=place) for place in ("cpu", device)]
    spec = RowwiseScalingQuantizer(form, power_2, epsilon).spec
    wanted = {"rowwise": COPIES[copies][0], "columnwise": COPIES[copies][1], "stacked": stacked}
    expected = cast_ref(x, spec, splits=splits[0], **wanted)
    found = kernels.cast_float8_rowwise_on_triton(x.to(device), spec, splits=splits[1], **wanted)
    for mine, other in zip(found, expected, strict=True):
        assert_same_tensor(mine, other)
    for columnwise, (codes, scale) in enumerate((expected[:2], expected[2:])):
        for dtype in (torch.bfloat16, torch.float32, torch.float64) if codes is not None else ():
            about = {"columnwise": bool(columnwise), "shape": x.shape}
            values = dequantize_ref(codes, scale, spec, dtype, splits=splits[0], **about)
            assert_same_tensor(
                kernels.dequantize_float8_rowwise_on_triton(
                    codes.to(device), scale.to(device), spec, dtype, splits=splits[1], **about
                ),
                values,
            )


@pytest.mark.launches(
    "row_and_column_amaxes_kernel", "cast_float8_rowwise_kernel", "dequantize_float8_rowwise_kernel"
)  # fmt: skip
@EACH_DEVICE
@pytest.mark.parametrize(("form", "power_2"), [(E4M3, False), rest(E4M3, True), rest(E5M2, False), rest(E5M2, True)])
def test_both_copies_of_a_matrix(device, form, power_2):
    check(device, poisoned(70, 136), form, power_2=power_2)


@pytest.mark.launches("cast_float8_rows_kernel")
@EACH_DEVICE
@pytest.mark.parametrize("shape", [(150, 136), rest((3, 1000)), (5, 1)], ids=str)
def test_rows_alone(device, shape):
    check(device, poisoned(*shape), copies="rowwise", epsilon=1e-2)


@EACH_DEVICE
@EACH_COPY
@pytest.mark.parametrize(
    "shape", [(1, 1), (3, 129), rest((128, 128)), rest((257, 5)), rest((2, 70, 40)), (0, 8), (8, 0)], ids=str
)
def test_shapes(device, copies, shape):
    check(device, poisoned(*shape), copies=copies)


@pytest.mark.slow
@EACH_DEVICE
@pytest.mark.parametrize("dtype", [rest(torch.float16), torch.float32, rest(torch.float64)], ids=str)
def test_dtypes(device, dtype):
    check(device, poisoned(20, 140, dtype=dtype))


@EACH_DEVICE
@EACH_COPY
@pytest.mark.parametrize("shape", [rest((2, 132, 20)), rest((3, 5, 130)), (2, 6, 7), (0, 4, 4), (2, 0, 4)], ids=str)
def test_stacked_weights(device, copies, shape):
    check(device, poisoned(*shape), copies=copies, stacked=True)


@EACH_DEVICE
@EACH_COPY
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        pytest.param(120, [3, 0, 70, 40], id="tail"),
        rest(128, [1], id="one-row"),
        rest(130, [0, 0], id="nobody"),
        pytest.param(0, [0, 0, 0], id="no-rows"),
        rest(30, [1, 1, 28], id="much-padding"),
    ],
)
def test_grouped_rows(device, copies, rows, sizes):
    x = poisoned(rows, 24)
    x[sum(sizes) :] = NAN
    check(device, x, copies=copies, sizes=sizes, epsilon=1e-2)


@EACH_DEVICE
def test_rows_too_long_for_a_program(device):
    with patch.object(kernels, "MOST_COLUMNS", 100):
        check(device, poisoned(70, 116), copies="rowwise")


@pytest.mark.rest
@EACH_DEVICE
@pytest.mark.parametrize("form", OWN, ids=lambda form: form.name)
def test_a_largest_number_of_ones_own(device, form):
    check(device, poisoned(70, 136), form)
    check(device, poisoned(70, 136), form, sizes=[0, 33, 30])


@pytest.mark.rest
@EACH_DEVICE
def test_input_that_is_not_contiguous(device):
    x = poisoned(140, 60)
    check(device, x.T)
    check(device, x[::2, 3:], copies="rowwise")


@pytest.mark.gpu
@FORMS
def test_large_random_splits(form):
    generator = torch.Generator().manual_seed(0)
    for columns in (1024, 1000, 77):
        sizes = torch.randint(0, 400, (37,), generator=generator).tolist()
        sizes[5] = sizes[36] = 0
        x = poisoned(sum(sizes) + 333, columns)
        x[sum(sizes) :] = NAN
        for copies in COPIES:
            check("cuda", x, form, copies=copies, sizes=sizes)
    check("cuda", poisoned(8, 384, 640), form, stacked=True)
    for columns in (2048, 7168, 16384, 20000):
        check("cuda", poisoned(1025, columns), form, copies="rowwise")


@pytest.mark.gpu
@pytest.mark.parametrize("copies", ["both", "columnwise"])
@pytest.mark.parametrize("power_2", [False, True])
@FORMS
def test_groups_meet_beside_larger_ones(form, power_2, copies, monkeypatch):
    """Up to 192 rows do; weights of 384 rows do not, and all of 9999."""
    for most in (192, 9999):
        monkeypatch.setattr(cast_float8, "most_rows", lambda *about, most=most: most)
        for columns in (16, 272, 1024):
            sizes = [0, *torch.randint(0, 300, (40,)).tolist(), 192, 193, 0, 64, 1]
            x = poisoned(sum(sizes) + 200, columns)
            x[sum(sizes) :] = NAN
            with patch.object(kernels, "_cast_vectors", wraps=kernels._cast_vectors) as met:
                check("cuda", x, form, copies=copies, sizes=sizes, power_2=power_2, epsilon=1e-2)
            assert met.called
        check("cuda", poisoned(5, 384, 272), form, copies=copies, power_2=power_2, stacked=True)


@pytest.mark.gpu
def test_more_programs_meet_than_a_gpu_holds():
    """Bits of the kernels in Triton for weights and rows of a model's size: groups meet one after the other."""
    sizes = torch.randint(0, 1536, (64,)).tolist()
    rows = {"splits": Splits.make(sizes, rows=sum(sizes), device="cuda")}
    spec = RowwiseScalingQuantizer(E4M3).spec
    for shape, about in (((64, 2816, 2048), {"stacked": True}), ((sum(sizes), 2048), rows), ((sum(sizes), 1408), rows)):
        x = torch.randn(shape, device="cuda").bfloat16()
        cast = partial(kernels.cast_float8_rowwise_on_triton, x, spec, rowwise=True, columnwise=True, **about)
        with patch.object(kernels, "meets_in_gluon", lambda *about: False):
            expected = cast()
        for _ in range(3):
            for mine, other in zip(cast(), expected, strict=True):
                assert torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
