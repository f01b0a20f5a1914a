"""Per-tensor FP8: every rounding against ml_dtypes, scales against tables in float32 bits, worked tensors by code."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from recipes import E4M3, E5M2, Float8CurrentScaling, Format, Role
from recipes.casts.scale_rules import Float32Scale
from recipes.current_scaling import CurrentScalingQuantizer

INF, NAN = float("inf"), float("nan")
FLT_MAX = torch.finfo(torch.float32).max
NUMPY_DTYPE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
FORMS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def oracle_codes(scaled: torch.Tensor, form) -> torch.Tensor:
    """uint8 codes by ml_dtypes, which does not saturate by itself."""
    clamped = np.clip(scaled.numpy(), -form.max, form.max)
    with np.errstate(invalid="ignore"):  # NaN
        return torch.from_numpy(clamped.astype(NUMPY_DTYPE[form]).view(np.uint8))


def assert_same_codes(codes: torch.Tensor, expected: torch.Tensor, form) -> None:
    """Equal byte by byte; NaN by class, since its sign and payload differ between implementations."""
    nan = expected.view(form.dtype).float().isnan()
    assert torch.equal(codes.float().isnan(), nan)
    assert torch.equal(codes.view(torch.uint8)[~nan], expected[~nan])


def from_hex(text: str) -> list[int]:
    return [int(byte, 16) for byte in text.split()]


def quantize(values, form=E4M3, dtype=torch.float32, **options):
    return CurrentScalingQuantizer(form, **options).quantize(torch.as_tensor(values, dtype=dtype))


# Rounding


@FORMS
def test_every_bf16_value_is_rounded_as_ml_dtypes_does(form):
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    assert_same_codes(form.encode(x), oracle_codes(x, form), form)


@FORMS
def test_ties_and_their_neighbours_are_rounded_as_ml_dtypes_does(form):
    codes = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()
    finite = codes[codes.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    x = torch.cat([ties, torch.nextafter(ties, torch.tensor(INF)), torch.nextafter(ties, torch.tensor(-INF))])
    assert_same_codes(form.encode(x), oracle_codes(x, form), form)


@pytest.mark.parametrize(
    ("x", "e4m3", "e5m2"),
    [
        (0.0, 0x00, 0x00),
        (-0.0, 0x80, 0x80),
        (2.0**-10, 0x00, 0x14),
        (1.5 * 2.0**-9, 0x02, 0x1A),
        (2.5 * 2.0**-9, 0x02, 0x1D),
        (0.0146484375, 0x08, 0x24),
        (17.0, 0x58, 0x4C),
        (19.0, 0x5A, 0x4D),
        (23.0, 0x5C, 0x4E),
        (448.0, 0x7E, 0x5F),
        (464.0, 0x7E, 0x5F),
        (464.00003, 0x7E, 0x5F),
        (480.0, 0x7E, 0x60),
        (61440.0, 0x7E, 0x7B),
        (INF, 0x7E, 0x7B),
        (-INF, 0xFE, 0xFB),
    ],
)
def test_rounding_saturates(x, e4m3, e5m2):
    x = torch.tensor(x)
    assert E4M3.encode(x).view(torch.uint8).item() == e4m3
    assert E5M2.encode(x).view(torch.uint8).item() == e5m2


# Scales


@pytest.mark.parametrize(
    ("amax", "scale", "power_of_two"),
    [
        pytest.param(0.0, 1.0, 1.0, id="0"),
        pytest.param(2.0**-149, FLT_MAX, 2.0**127, id="smallest"),
        pytest.param(1e-38, FLT_MAX, 2.0**127, id="1e-38"),
        pytest.param(2.0**-6, 28672.0, 16384.0, id="2^-6"),
        pytest.param(1.0, 448.0, 256.0, id="1"),
        pytest.param(1.0 + 2.0**-23, 0x43DFFFFE, 256.0, id="above-1"),
        pytest.param(256.0, 1.75, 1.0, id="256"),
        pytest.param(258.0, 1.7364341, 1.0, id="258"),
        pytest.param(448.0, 1.0, 1.0, id="448"),
        pytest.param(448.0 + 2.0**-15, 0x3F7FFFFF, 0.5, id="above-448"),
        pytest.param(512.0, 0.875, 0.5, id="512"),
        pytest.param(torch.finfo(torch.bfloat16).max, 0x03E0E0E1, 2.0**-120, id="bf16-max"),
        pytest.param(INF, 1.0, 1.0, id="inf"),
    ],
)
def test_scale_from_amax(amax, scale, power_of_two):
    amax = torch.tensor(amax)
    expected = torch.tensor(scale)
    if isinstance(scale, int):
        expected = torch.tensor(scale, dtype=torch.int32).view(torch.float32)
    assert Float32Scale(False).scales(amax, E4M3, torch.float32)[0].item() == expected.item()
    assert Float32Scale(True).scales(amax, E4M3, torch.float32)[0].item() == power_of_two


def test_the_quotient_is_rounded_once():
    amax = torch.rand(100_000) * 10 + 1e-3
    expected = np.float32(448) / amax.numpy()
    assert np.array_equal(Float32Scale(False).scales(amax, E4M3, torch.float32)[0].numpy(), expected)


def test_amax_epsilon_bounds_the_scale():
    assert quantize([1e-6], amax_epsilon=0.5).dequantize().item() == pytest.approx(1e-6, abs=2.0**-9 / 896)
    assert quantize([0.0], amax_epsilon=0.5).rowwise.scale_inv.item() == np.float32(1) / np.float32(896)


# Worked tensors


RAMP = from_hex("FE FD FC FB FA FA F9 F8 F6 F4 F2 F1 EE EA E6 DE 00 5E 66 6A 6E 71 72 74 76 78 79 7A 7A 7B 7C 7D")


@pytest.mark.parametrize(
    ("values", "scale", "codes"),
    [
        pytest.param(list(range(-16, 16)), 28.0, RAMP, id="ramp"),
        pytest.param([INF, *range(31)], 1.0, from_hex("7E 00 38 40 44"), id="inf"),
        pytest.param([450.0, *range(31)], 0.99555558, [0x7E], id="above-448"),
        pytest.param([NAN, *range(31)], 14.9333334, from_hex("7F 00 57 5F 63"), id="nan"),
        pytest.param([0.0] * 32, 1.0, [0] * 32, id="zeros"),
        pytest.param([NAN] * 2, 1.0, [0x7F] * 2, id="only-nan"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_worked_tensors(values, scale, codes, dtype):
    q = quantize(values, dtype=dtype)
    assert q.rowwise.scale_inv.item() == (np.float32(1) / np.float32(scale))
    found = (q.rowwise.codes.view(torch.uint8)[: len(codes)]).tolist()
    assert [0x7F if code & 0x7F == 0x7F else code for code in found] == codes


def test_nan_stays_in_its_element_and_inf_saturates():
    values = quantize([NAN, INF, -INF, 2.0, 0.0]).dequantize().tolist()
    assert np.isnan(values[0]) and values[1:] == [448.0, -448.0, 2.0, 0.0]


# Tensors


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(7,), (5, 48), (2, 3, 40), (0, 16), (4, 0)], ids=str)
def test_a_tensor_against_numpy(form, dtype, shape):
    x = torch.randn(shape, dtype=torch.float64).to(dtype)
    q = CurrentScalingQuantizer(form).quantize(x, rowwise=True, columnwise=True)
    x32 = x.to(torch.float32)
    amax = x32.abs().max().numpy() if x32.numel() else np.float32(0)
    scale = np.float32(form.max) / amax if amax else np.float32(1)
    assert_same_codes(q.rowwise.codes, oracle_codes(x32 * torch.tensor(scale), form), form)
    assert q.rowwise.scale_inv.item() == np.float32(1) / scale
    rows = math.prod(shape[:-1])
    assert q.columnwise.codes.shape == (shape[-1], -(-rows // 32) * 32)
    transposed = q.columnwise.codes.view(torch.uint8)
    assert torch.equal(transposed[:, :rows], q.rowwise.codes.view(torch.uint8).reshape(rows, shape[-1]).T)
    assert not transposed[:, rows:].any()
    assert torch.equal(q.operand(True, dtype).values, q.operand(False, dtype).values)
    assert q.columnwise.scale_inv is q.rowwise.scale_inv
    assert q.shape == x.shape and q.dtype == q.dequantize().dtype == dtype
    assert torch.equal(q.dequantize(), (q.rowwise.codes.float() * q.rowwise.scale_inv).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operands_are_the_codes_and_alpha_the_scale(dtype):
    q = quantize(torch.randn(5, 48))
    values, alpha, *_ = q.operand(False, dtype)
    assert values.dtype == dtype and torch.equal(values.double(), q.rowwise.codes.double())
    assert alpha is q.rowwise.scale_inv and alpha.shape == ()
    assert torch.equal(values.float() * alpha, q.dequantize())


def test_stacked_weights_are_scaled_one_by_one():
    w = torch.randn(3, 8, 40, dtype=torch.bfloat16) * torch.tensor([1.0, 0.0, 100.0])[:, None, None]
    quantizer = Float8CurrentScaling().quantizer(Role.WEIGHT)
    q = quantizer.quantize_stacked(w, rowwise=True, columnwise=True)
    assert q.columnwise.codes.shape == (3, 40, 8) and q.rowwise.scale_inv.shape == (3,)
    assert torch.equal(q.operand(True, torch.bfloat16).values, q.operand(False, torch.bfloat16).values)
    for group in range(3):
        alone = quantizer.quantize(w[group])
        assert torch.equal(q.rowwise.codes[group].view(torch.uint8), alone.rowwise.codes.view(torch.uint8))
        assert q.rowwise.scale_inv[group] == alone.rowwise.scale_inv
        assert torch.equal(q.dequantize()[group], alone.dequantize())
    assert q.operand(True, torch.bfloat16).alpha.shape == (3,)


@pytest.mark.parametrize(
    ("recipe", "role", "least"),
    [
        (Float8CurrentScaling(), Role.INPUT, 31.0),
        (Float8CurrentScaling(), Role.GRAD_OUTPUT, 25.0),
        (Float8CurrentScaling(Format.E4M3, power_2_scale=True), Role.INPUT, 31.0),
    ],
    ids=["E4M3", "E5M2", "E4M3-pow2"],
)
def test_signal_to_noise(recipe, role, least):
    x = torch.randn(128, 1024).bfloat16()
    error = recipe.quantizer(role).quantize(x).dequantize().double() - x.double()
    assert 20 * torch.log10(x.double().norm() / error.norm()) >= least


@pytest.mark.parametrize(("role", "least"), [(Role.WEIGHT, 27.5), (Role.GRAD_OUTPUT, 23.5)], ids=["E4M3", "E5M2"])
def test_signal_to_noise_of_a_product(role, least):
    a, b = torch.randn(128, 1024).bfloat16(), torch.randn(1024, 128).bfloat16()
    left = Float8CurrentScaling().quantizer(Role.INPUT).quantize(a).operand(False, torch.float64)
    right = Float8CurrentScaling().quantizer(role).quantize(b).operand(False, torch.float64)
    exact = a.double() @ b.double()
    error = left.alpha * right.alpha * (left.values @ right.values) - exact
    assert 20 * torch.log10(exact.norm() / error.norm()) >= least
