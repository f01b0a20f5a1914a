"""The Triton kernels of NVFP4 against the plain torch ones, bit for bit: interpreted here, compiled on a GPU."""

import pytest
import torch

from recipes.casts import cast_nvfp4 as nvfp4
from recipes.casts import dequantize_nvfp4 as dequantize
from recipes.casts.scale_rules import FourOverSix
from recipes.nvfp4 import NVFP4Quantizer
from recipes.tensors.formats import E4M3
from recipes.tensors.splits import Splits
from recipes.triton.gates import why_no_gluon
from recipes.triton.philox import new_seed
from tests.grouped_cases import DEVICES
from tests.pairwise import exhaustive, rest

# The interpreter is numpy: it tells of a loop over a runtime bound, and of Inf and NaN, which are meant here.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",
    "ignore:(overflow|invalid value) encountered:RuntimeWarning",
)
DEVICE = pytest.mark.parametrize("device", DEVICES)
KINDS = {
    "nearest": {},
    "rht": {"rht": True},
    "rht-float32": {"rht": True, "round_rht": False},
    "stochastic": {"rht": True, "seed": True},
    "stochastic-float32": {"rht": True, "seed": True, "round_rht": False},
    "random": {"seed": True},
    "16x16": {"two_d": True},
    "row-scaled": {"rht": True, "row_scaled": True},
}
# Half of the kinds are cast as one tensor in `make test`, and half as groups.
OF_ONE_TENSOR = ("nearest", "rht-float32", "stochastic", "16x16")


PLACES = [*DEVICES, pytest.param("cuda in Triton", marks=pytest.mark.gpu, id="gpu in Triton")]
ON_GPU = pytest.mark.parametrize("place", PLACES[1:], indirect=True)


@pytest.fixture(params=PLACES)
def place(request, monkeypatch):
    """A device; a GPU with the kernels that are chosen there, and with those in Triton alone."""
    device, _, in_triton = request.param.partition(" in ")
    if in_triton:
        monkeypatch.setattr(nvfp4, "runs_gluon", lambda x: False)
    return device


@pytest.fixture(autouse=True)
def on_any_device(monkeypatch):
    """The launchers launch, also on CPU tensors."""
    for module in (nvfp4, dequantize):
        monkeypatch.setattr(module, "runs_triton", lambda x: True)


def bits(tensor):
    """Bytes of a tensor on the CPU, comparable with NaN in it."""
    return None if tensor is None else tensor.cpu().flatten().view(torch.uint8).tolist()


def spread(*shape, dtype):
    """Values whose blocks differ in size, some of them far below the others; a few zeros of both signs."""
    x = torch.randn(shape) * torch.exp2(torch.randint(-9, 9, (shape[-2], 1)).float())
    x[..., ::7, ::3] *= 0.0
    return x.to(dtype)


def check(
    x, sizes, device, *, rht=False, row_scaled=False, two_d=False, seed=False, round_rht=True, rowwise=True,
    columnwise=True,
):  # fmt: skip
    seed = new_seed(torch.device("cpu")) if seed else None
    on_cpu, on_device = (
        None if sizes is None else Splits.make(sizes, rows=x.shape[-2], device=place) for place in ("cpu", device)
    )
    kind = {"rht": rht, "row_scaled": row_scaled, "round_rht": round_rht}
    copies = {"rowwise": rowwise, "columnwise": columnwise}
    expected_amaxes = nvfp4.amax_nvfp4_ref(x, on_cpu, **copies, **kind)
    amaxes = nvfp4.amax_nvfp4(x.to(device), on_device, **copies, **kind)
    for name, found, expected in zip(amaxes._fields, amaxes, expected_amaxes, strict=True):
        assert bits(found) == bits(expected), f"amax {name}"
    expected = nvfp4.cast_nvfp4_ref(x, on_cpu, expected_amaxes, two_d=two_d, seed=seed, **kind)
    on_seed = None if seed is None else seed.to(device)
    made = nvfp4.cast_nvfp4(x.to(device), on_device, amaxes, two_d=two_d, seed=on_seed, **kind)
    for name, found, wanted in zip(made._fields, made, expected, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            assert found.shape == wanted.shape and found.dtype == wanted.dtype
            assert bits(found) == bits(wanted), name
    for codes, scale, length, transpose in (
        (expected.rowwise, expected.rowwise_scale, x.shape[-1], False),
        (expected.columnwise, expected.columnwise_scale, None, True),
    ):
        if codes is not None:
            length = length or scale.shape[-1] * 16
            for dtype in (torch.bfloat16, torch.float16, torch.float32):
                wanted = dequantize.dequantize_nvfp4_ref(codes, scale, length, dtype, transpose=transpose)
                found = dequantize.dequantize_nvfp4(
                    codes.to(device), scale.to(device), length, dtype, transpose=transpose
                )
                assert found.shape == wanted.shape and found.dtype == dtype
                nans = wanted.isnan()
                assert torch.equal(found.isnan().cpu(), nans)
                assert bits(found.cpu().masked_fill(nans, 0)) == bits(wanted.masked_fill(nans, 0))


# Tiles are 64 rows of 256 columns, or in Triton of 512 where little of the last is empty, without stochastic rounding.


@DEVICE
@pytest.mark.parametrize("kind", [kind if kind in OF_ONE_TENSOR else rest(kind) for kind in KINDS])
@pytest.mark.slow
def test_one_tensor(device, kind):
    check(spread(70, 272, dtype=torch.bfloat16), None, device, **KINDS[kind])


@pytest.mark.parametrize("kind", ["rht", "stochastic", "16x16"])
@pytest.mark.parametrize("sizes", [rest([5, 65]), exhaustive([16, 134])], ids=str)
def test_wide_tiles_of_several_groups(place, sizes, kind):
    check(spread(sum(sizes), 1008, dtype=torch.bfloat16), sizes, place, **KINDS[kind])


@DEVICE
@pytest.mark.parametrize("rows", [rest(64), 70])
@pytest.mark.slow
def test_rows_at_any_address(device, rows):
    x = spread(rows, 272, dtype=torch.bfloat16).to(device)
    shifted = x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x)
    kind = {"rht": True, "row_scaled": False}
    amaxes = nvfp4.amax_nvfp4(x, None, rowwise=True, columnwise=True, **kind)
    found, expected = (nvfp4.cast_nvfp4(rows, None, amaxes, two_d=False, seed=None, **kind) for rows in (shifted, x))
    assert [bits(tensor) for tensor in found] == [bits(tensor) for tensor in expected]


@pytest.mark.slow
@DEVICE
@pytest.mark.parametrize("shape", [(1, 1), (17, 5), (16, 16), (3, 130)], ids=str)
def test_odd_sizes(device, shape):
    check(spread(*shape, dtype=torch.float32), None, device, rht=True, seed=True)


@DEVICE
@pytest.mark.parametrize("kind", [rest(kind) if kind in OF_ONE_TENSOR else kind for kind in KINDS])
@pytest.mark.slow
def test_groups_and_what_lies_behind_them(device, kind):
    x = spread(80, 24, dtype=torch.bfloat16)
    x[50:] = float("nan")
    check(x, [7, 0, 33, 10], device, **KINDS[kind])


@DEVICE
@pytest.mark.parametrize("sizes", [[0, 0], [1] * 6, [65, 5]], ids=str)
@pytest.mark.slow
def test_empty_many_and_large_groups(device, sizes):
    check(spread(70, 8, dtype=torch.float32), sizes, device, rht=True)


# Tiles of 128 rows and 128 columns, of which a thread has eight columns at once, or two.
WAYS_BACK = [
    pytest.param(1, 128, 128, id="one-tile"),
    pytest.param(3, 256, 256, id="whole-tiles"),
    pytest.param(2, 112, 120, id="a-block-and-a-piece-less"),
    pytest.param(2, 144, 136, id="a-block-and-a-piece-more"),
    pytest.param(3, 16, 8, id="one-piece"),
    pytest.param(2, 128, 124, id="pairs"),
    pytest.param(2, 144, 130, id="a-block-and-a-pair-more"),
    pytest.param(3, 16, 2, id="one-pair"),
    pytest.param(2, 144, 129, id="odd"),
]


@DEVICE
@pytest.mark.parametrize("dtype", [rest(torch.bfloat16), torch.float32], ids=str)
@pytest.mark.parametrize(("groups", "rows", "columns"), WAYS_BACK)
@pytest.mark.slow
def test_every_code_of_every_scale_comes_back_from_columns(device, groups, rows, columns, dtype):
    blocks = groups * columns * rows // 16
    codes = torch.arange(16)[torch.rand(blocks, 16).argsort(-1)]  # each once in a block
    codes = (codes[:, ::2] | codes[:, 1::2] << 4).to(torch.uint8).view(groups, columns, rows // 2)
    scale = torch.arange(blocks).mul(37).remainder(128).to(torch.uint8)  # up to NaN
    scale = scale.view(groups, columns, rows // 16).view(E4M3.dtype)
    wanted = dequantize.dequantize_nvfp4_ref(codes, scale, rows, dtype, transpose=True)
    room = torch.full((groups + 2, *wanted.shape[1:]), -1.0, dtype=dtype, device=device)
    dequantize.dequantize_nvfp4_triton(codes.to(device), scale.to(device), room[1:-1], transpose=True)
    before, found, behind = room.cpu().split((1, groups, 1))
    assert (before == -1).all() and (behind == -1).all()
    nans = wanted.isnan()
    assert torch.equal(found.isnan(), nans)
    as_bits = torch.int16 if dtype == torch.bfloat16 else torch.int32
    assert torch.equal(found.masked_fill(nans, 0).view(as_bits), wanted.masked_fill(nans, 0).view(as_bits))


@pytest.mark.rest
@DEVICE
@pytest.mark.parametrize("kind", [exhaustive("nearest"), "16x16", "stochastic"])
def test_stacked(device, kind):
    check(spread(2, 70, 272, dtype=torch.bfloat16), None, device, **KINDS[kind])


@DEVICE
@pytest.mark.parametrize("copies", [(True, False), (False, True)], ids=["rowwise", "columnwise"])
@pytest.mark.parametrize("kind", ["rht", "stochastic"])
@pytest.mark.slow
def test_one_copy_alone(device, kind, copies):
    check(spread(20, 40, dtype=torch.float16), None, device, **KINDS[kind], rowwise=copies[0], columnwise=copies[1])


@pytest.mark.launches("amax_nvfp4_kernel", "cast_nvfp4_kernel")
@pytest.mark.launches("dequantize_words_kernel", "dequantize_rows_kernel", "dequantize_columns_kernel")
@DEVICE
@pytest.mark.parametrize(
    ("kind", "extreme"),
    [("nearest", 2.0**-130), ("nearest", 3e38), ("rht", float("inf")), ("stochastic", 3e38), ("16x16", float("inf")),
     ("row-scaled", 2.0**-130)],
)  # fmt: skip
@pytest.mark.slow
def test_nan_inf_and_extremes(device, kind, extreme):
    x = torch.randn(64, 64)
    x[3, 3], x[20, 20] = float("nan"), -0.0
    x[32:48, 32:] *= 2.0**-40
    if extreme < 1:
        x *= extreme
    x[40, 5] = extreme
    x[34, 7] = x[35, 7] = x[33, 9] = x[42, 9] = extreme  # of two Inf in a block the transform makes NaN
    check(x, None, device, **KINDS[kind])


def whole_tile(columns):
    """[64, columns] with an amax of 1, where some blocks have subnormal scales, 0 or NaN."""
    x = torch.randn(64, columns).clamp(-4, 4) * 0.2
    x[16:32, :64] *= 2.0**-15  # subnormal scales
    x[32:48, :64] *= 2.0**-30  # scales of 0
    x[:16, 64:128] = 0.0
    x[5, 200] = float("nan")
    x[40, 3] = -0.0
    x[50, 100] = 1.0
    return x


@pytest.mark.parametrize("kind", ["rht", rest("stochastic")])
@pytest.mark.parametrize("magnitude", [0.0, 2e-27, rest(2e-26), rest(65280.0), 65536.0], ids=str)
@pytest.mark.slow
def test_whole_tiles_where_ordinary_amaxes_end(place, kind, magnitude):
    check((whole_tile(256) * magnitude).bfloat16(), None, place, **KINDS[kind])


@DEVICE
@pytest.mark.parametrize(
    ("columns", "dtype"), [(256, torch.float32), (256, torch.float16), (264, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("kind", ["rht", rest("stochastic")])
@pytest.mark.slow
def test_whole_tiles_without_pairs(device, kind, columns, dtype):
    check(whole_tile(columns).to(dtype), None, device, **KINDS[kind])


@pytest.mark.slow
def test_inf_that_the_transform_hides_from_the_amax(place):
    x = torch.randn(64, 256)
    x[:4, 7] = float("inf")  # by its signs the transform makes NaN of all 16 numbers below each other
    check(x.bfloat16(), None, place, rht=True, rowwise=False)


@pytest.mark.slow
@DEVICE
def test_a_row_of_nan_has_no_amax(device):
    x = torch.randn(20, 272)
    x[3, :256] = float("nan")
    check(x.bfloat16(), None, device, **KINDS["row-scaled"])


@pytest.mark.slow
@DEVICE
def test_float64_is_rounded_first(device):
    check(spread(20, 40, dtype=torch.float64), None, device, rht=True)


@ON_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_a_large_tensor(place, kind):
    check(spread(1000, 2000, dtype=torch.bfloat16), [300, 0, 511, 100], place, **KINDS[kind])


@pytest.fixture(params=["Gluon", "Triton"])
def kernel(request, monkeypatch):
    """Every cast of the test is by this kernel. At its end it is checked that the one in Gluon ran, or did not."""
    casts = []
    cast = nvfp4.cast_nvfp4_gluon
    monkeypatch.setattr(nvfp4, "cast_nvfp4_gluon", lambda *args, **kwargs: casts.append(cast(*args, **kwargs)))
    if request.param == "Triton":
        monkeypatch.setattr(nvfp4, "runs_gluon", lambda x: False)
    elif why_no_gluon(torch.cuda.get_device_capability()) is not None:
        pytest.skip(why_no_gluon(torch.cuda.get_device_capability()))
    yield
    assert bool(casts) == (request.param == "Gluon")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nearest", "rht", "stochastic", "random", "16x16"])
@pytest.mark.parametrize("shape", [(64, 16), (192, 272), (256, 1024), (3, 250, 272)], ids=str)
def test_whole_blocks_of_tensors(kernel, shape, kind):
    check(spread(*shape, dtype=torch.bfloat16), None, "cuda", **KINDS[kind])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nearest", "rht", "stochastic", "random", "16x16"])
@pytest.mark.parametrize(
    "sizes", [[37, 0, 130, 1, 0], [64, 128], [0, 0, 0], [200], [1, 2, 3] * 50, [0] * 300 + [65]], ids=len
)
def test_whole_blocks_of_groups(kernel, sizes, kind):
    x = spread(sum(sizes) + 70, 528, dtype=torch.bfloat16)
    x[sum(sizes) :] = float("nan")
    check(x, sizes, "cuda", **KINDS[kind])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nearest", "rht", "stochastic", "random", "16x16"])
def test_groups_of_which_one_is_not_ordinary(kernel, kind):
    x = spread(250, 512, dtype=torch.float32)
    x[3, 3], x[20, 20], x[100, 5], x[200, 300] = float("nan"), -0.0, float("inf"), 3e38
    x[130:150] *= 2.0**-120
    check(x.bfloat16(), [70, 60, 20, 100], "cuda", **KINDS[kind])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["nearest", "rht", "stochastic", "random", "16x16"])
def test_the_columnwise_copy_alone_of_whole_blocks(kernel, kind):
    check(spread(150, 528, dtype=torch.bfloat16), [37, 0, 113], "cuda", rowwise=False, **KINDS[kind])


@pytest.mark.gpu
@pytest.mark.parametrize("column_codes", [True, False], ids=["column-codes", "column-values"])
@pytest.mark.parametrize("kind", ["nearest", "rht", "rht-float32", "stochastic", "random"])
@pytest.mark.parametrize("sizes", [[37, 0, 130, 1, 0], [64, 128], [0, 0, 0], [1, 2, 3] * 50], ids=str)
@pytest.mark.parametrize("columns", [16, 528, 1024])
def test_values_in_place_of_codes(columns, sizes, kind, column_codes):
    """Bit for bit what the codes are dequantized to, beside the codes of a copy that is kept, and with its alpha."""
    if why_no_gluon(torch.cuda.get_device_capability()) is not None:
        pytest.skip(why_no_gluon(torch.cuda.get_device_capability()))
    how = KINDS[kind] | {"stochastic": KINDS[kind].get("seed", False)}
    seed = new_seed(torch.device("cuda")) if how.pop("seed", False) else None
    quantizer = NVFP4Quantizer(**how, seed=seed)
    x = spread(sum(sizes) + 70, columns, dtype=torch.bfloat16).cuda()
    x[3, 3], x[20, 5], x[sum(sizes) :] = float("nan"), float("inf"), float("nan")
    splits = Splits.make(sizes, rows=len(x), device="cuda")
    both = {"rowwise": True, "columnwise": True}
    expected = quantizer.quantize_grouped(x, splits, **both)
    found = quantizer.dequantized_rows(x, splits, torch.bfloat16, **both, column_codes=column_codes)
    assert found is not None and found.rowwise.float8_operand() is None
    assert column_codes == (found.columnwise.codes.dtype == torch.uint8)
    for columnwise in (False, True):
        got, wanted = (grouped.operand(columnwise, torch.bfloat16) for grouped in (found, expected))
        nans = wanted.values.isnan()
        assert torch.equal(got.values.isnan(), nans)
        assert bits(got.values.masked_fill(nans, 0)) == bits(wanted.values.masked_fill(nans, 0))
        assert torch.equal(got.scale, wanted.scale) and got[2:] == wanted[2:]
        got, wanted = (grouped.dequantize(columnwise=columnwise) for grouped in (found, expected))
        assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))
        for one, other in zip(found.unbind(), expected.unbind(), strict=True):
            got, wanted = (tensor.dequantize(columnwise=columnwise) for tensor in (one, other))
            assert torch.equal(got.nan_to_num(7), wanted.nan_to_num(7))


@pytest.mark.gpu
def test_values_are_written_of_1x16_blocks_of_whole_rows_in_bfloat16():
    splits = Splits.make([70], rows=70, device="cuda")
    both = {"rowwise": True, "columnwise": True, "column_codes": True}
    for x, quantizer in (
        (torch.randn(70, 24, device="cuda", dtype=torch.bfloat16), NVFP4Quantizer(rht=True)),
        (torch.randn(70, 32, device="cuda", dtype=torch.float32), NVFP4Quantizer(rht=True)),
        (torch.randn(32, 70, device="cuda", dtype=torch.bfloat16).T, NVFP4Quantizer(rht=True)),
        (torch.randn(70, 32, device="cuda", dtype=torch.bfloat16), NVFP4Quantizer(row_scaled=True)),
        (torch.randn(70, 32, device="cuda", dtype=torch.bfloat16), NVFP4Quantizer(two_d=True)),
        (torch.randn(70, 32, device="cuda", dtype=torch.bfloat16), NVFP4Quantizer(four_over_six=FourOverSix())),
    ):
        assert quantizer.dequantized_rows(x, splits, torch.bfloat16, **both) is None


def numbers_by_exponent(first, end):
    """[16 n, 16]: all bf16 numbers of each of these biased exponents, both signs."""
    bits = torch.arange(1 << 16).view(2, 256, 128)[:, first:end].transpose(0, 1)  # exponents, signs, mantissas
    return bits.to(torch.int16).reshape((end - first) * 16, 16).view(torch.bfloat16)


OVERFLOWS = 251  # the exponent of 2^124, from which on 16 numbers may have no sum


@ON_GPU
@pytest.mark.parametrize("kind", KINDS)
def test_every_finite_bf16_number_beside_those_of_its_exponent(place, kind):
    """With the transform, every one of which 16 have a sum."""
    x = numbers_by_exponent(0, OVERFLOWS if KINDS[kind].get("rht") else 255)
    assert x.isfinite().all()
    check(x, [16] * (len(x) // 16), place, **KINDS[kind])


@pytest.mark.slow
@DEVICE
def test_where_the_transform_overflows_a_block_saturates_or_is_nan(device):
    """Which of the two follows from the order of its sums' overflows; the plain torch version may say the other."""
    x = numbers_by_exponent(OVERFLOWS, 255)
    splits = Splits.make([16] * 4, rows=64, device=device)
    of_both = {"rht": True, "row_scaled": False}
    amaxes = nvfp4.amax_nvfp4(x.to(device), splits, rowwise=True, columnwise=True, **of_both)
    made = nvfp4.cast_nvfp4(x.to(device), splits, amaxes, two_d=False, seed=None, **of_both)
    assert amaxes.rowwise.isfinite().all() and made.rowwise_scale.float().isfinite().all()
    scales = made.columnwise_scale.cpu().float()[:16, :4]  # [column, group]
    overflowed = ~amaxes.columnwise.cpu().isfinite()
    assert overflowed[2:].all()
    assert (scales.isnan() | (scales == 448))[:, overflowed].all()
