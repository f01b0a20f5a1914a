"""MXFP8: scales against exact arithmetic, codes against ml_dtypes, worked blocks, partial blocks, both directions."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from recipes import E4M3, E5M2, Format, MXFP8BlockScaling, Role
from recipes.casts.scale_rules import E8M0Scale
from recipes.mxfp8 import MXFP8Quantizer

INF, NAN = float("inf"), float("nan")
FLT_MAX = torch.finfo(torch.float32).max
NUMPY_DTYPE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
FORMS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def from_hex(text: str) -> list[int]:
    return [int(byte, 16) for byte in text.split()]


def byte_oracle(amax: float, form) -> int:
    """The smallest E with 2^(E - 127) >= fl(amax * fl(1 / max)), by exact arithmetic in float64."""
    target = float(np.float32(amax) * np.float32(1 / form.max))
    if target == 0:
        return 0
    if math.isinf(target):
        return 254
    fraction, exponent = math.frexp(target)  # target = fraction * 2^exponent, 0.5 <= fraction < 1
    return min(max(exponent - (fraction == 0.5) + 127, 0), 254)


def oracle(x: torch.Tensor, form) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of x [R, K] along K, block by block in numpy."""
    x32 = x.to(torch.float32).numpy()
    num_blocks = -(-x.shape[1] // 32)
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((x.shape[0], num_blocks), np.uint8)
    for row in range(x.shape[0]):
        for block in range(num_blocks):
            columns = slice(32 * block, 32 * block + 32)
            values = x32[row, columns]
            scales[row, block] = byte = byte_oracle(np.nanmax(np.abs(values), initial=0), form)
            scaled = np.ldexp(values.astype(np.float64), 127 - int(byte)).astype(np.float32)
            codes[row, columns] = np.clip(scaled, -form.max, form.max).astype(NUMPY_DTYPE[form]).view(np.uint8)
    return torch.from_numpy(codes), torch.from_numpy(scales)


def quantize(values, form=E4M3, dtype=torch.float32):
    return MXFP8Quantizer(form).quantize(torch.as_tensor(values, dtype=dtype), rowwise=True, columnwise=True)


def codes_of(copy) -> torch.Tensor:
    return copy.codes.view(torch.uint8)


# Scales


@pytest.mark.parametrize(
    ("amax", "byte"),
    [
        pytest.param(0.0, 0, id="0"),
        pytest.param(2.0**-149, 0, id="smallest"),
        pytest.param(1e-38, 0, id="1e-38"),
        pytest.param(2.0**-6, 113, id="2^-6"),
        pytest.param(1.0, 119, id="1"),
        pytest.param(1.0 + 2.0**-23, 119, id="above-1"),
        pytest.param(256.0, 127, id="256"),
        pytest.param(258.0, 127, id="258"),
        pytest.param(448.0, 127, id="448"),
        pytest.param(448.0 + 2.0**-15, 128, id="above-448"),
        pytest.param(512.0, 128, id="512"),
        pytest.param(torch.finfo(torch.bfloat16).max, 247, id="bf16-max"),
        pytest.param(INF, 254, id="inf"),
    ],
)
def test_scale_from_amax(amax, byte):
    assert E8M0Scale().scales(torch.tensor(amax), E4M3, torch.float32)[1].item() == byte == byte_oracle(amax, E4M3)


@FORMS
def test_scales_against_exact_arithmetic(form):
    """All powers of two times the format's maximum with their neighbours, and random float32 patterns."""
    powers = torch.ldexp(torch.full((288,), form.max), torch.arange(-160, 128)).clamp(max=FLT_MAX)
    around = [torch.nextafter(powers, torch.tensor(towards)) for towards in (0.0, INF)]
    random = torch.randint(0, 0x7F800000, (5000,), dtype=torch.int32).view(torch.float32)
    amax = torch.cat([powers, *around, random])
    assert E8M0Scale().scales(amax, form, torch.float32)[1].tolist() == [byte_oracle(a, form) for a in amax.tolist()]


def test_bytes_are_powers_of_two():
    every = torch.arange(256, dtype=torch.uint8)
    assert E8M0Scale().values(every)[:255].tolist() == [2.0 ** (e - 127) for e in range(255)]
    assert E8M0Scale().values(every)[255].isnan()
    assert E8M0Scale().values(254 - every[:255]).tolist() == [2.0 ** (127 - e) for e in range(255)]


# Worked blocks

RAMP = from_hex("F8 F7 F6 F5 F4 F3 F2 F1 F0 EE EC EA E8 E4 E0 D8 00 58 60 64 68 6A 6C 6E 70 71 72 73 74 75 76 77")
ABOVE_448 = from_hex("76 00 30 38 3C 40 42 44 46 48 49 4A 4B 4C 4D 4E 4F 50 50 51 52 52 52 53 54 54 54 55 56 56 56 57")


@pytest.mark.parametrize(
    ("values", "byte", "codes"),
    [
        pytest.param(list(range(-16, 16)), 123, RAMP, id="ramp"),
        pytest.param([450.0, *range(31)], 128, ABOVE_448, id="above-448"),
        pytest.param([INF, *range(31)], 254, [0x7E] + [0] * 31, id="inf"),
        pytest.param([NAN, *range(31)], 124, from_hex("7F 00 50 58 5C"), id="nan"),
        pytest.param([0.0] * 32, 0, [0] * 32, id="zeros"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_worked_blocks(values, byte, codes, dtype):
    q = quantize([values], dtype=dtype)
    assert q.rowwise.scale_inv.tolist() == [[byte]]
    found = codes_of(q.rowwise)[0, : len(codes)].tolist()
    assert [0x7F if code & 0x7F == 0x7F else code for code in found] == codes
    column = quantize([[value] for value in values], dtype=dtype).columnwise
    assert column.scale_inv.tolist() == [[byte]]
    assert torch.equal(codes_of(column)[:, 0], codes_of(q.rowwise)[0])


def test_nan_stays_in_its_element_and_inf_saturates():
    values = quantize([[NAN, 1.0, 2.0]]).dequantize()[0].tolist()
    assert math.isnan(values[0]) and values[1:] == [1.0, 2.0]
    assert quantize([[-INF, 1.0]]).rowwise.codes.float().tolist() == [[-448.0, 0.0]]


# Tensors


def wide(*shape):
    """Values over the whole range of float32 exponents, each block of 32 around one of its own."""
    exponents = torch.randint(-140, 120, shape).float()
    return torch.randn(shape) * torch.exp2(exponents)


@FORMS
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 32), (5, 64), (33, 31), (70, 100), (64, 1)], ids=str)
def test_a_matrix_against_numpy(form, dtype, shape):
    for x in (torch.randn(shape), wide(*shape)):
        x = x.to(dtype)
        q = quantize(x, form, dtype)
        for copy, flip in ((q.rowwise, lambda t: t), (q.columnwise, lambda t: t.T)):
            codes, scales = oracle(flip(x).contiguous(), form)
            assert torch.equal(flip(copy.scale_inv), scales)
            assert torch.equal(flip(codes_of(copy)), codes)
        assert q.shape == x.shape and q.dtype == q.dequantize().dtype == dtype


def test_a_partial_block_counts_as_padded_by_zeros():
    x = torch.randn(40, 50)
    padded = torch.nn.functional.pad(x, (0, 14, 0, 24))
    q, whole = quantize(x), quantize(padded)
    for copy, other in ((q.rowwise, whole.rowwise), (q.columnwise, whole.columnwise)):
        assert torch.equal(codes_of(copy), codes_of(other)[:40, :50])
        assert torch.equal(copy.scale_inv, other.scale_inv[: copy.scale_inv.shape[0], : copy.scale_inv.shape[1]])


def test_columnwise_blocks_run_over_all_rows():
    x = torch.randn(3, 20, 40)
    q, flat = quantize(x), quantize(x.reshape(60, 40))
    assert q.shape == x.shape and q.columnwise.scale_inv.shape == (2, 40)
    assert torch.equal(codes_of(q.columnwise).reshape(60, 40), codes_of(flat.columnwise))
    for columnwise in (False, True):
        values = q.operand(columnwise, torch.float32).values
        assert torch.equal(values.reshape(60, 40), flat.operand(columnwise, torch.float32).values)
    assert quantize(torch.randn(40)).columnwise.scale_inv.shape == (1, 40)


def test_operands_are_exact():
    q = quantize(torch.randn(40, 50))
    for columnwise in (False, True):
        exact = q.operand(columnwise, torch.float64)
        assert exact.alpha is None
        for dtype in (torch.bfloat16, torch.float32):
            values = q.operand(columnwise, dtype).values
            assert values.dtype == dtype and torch.equal(values.double(), exact.values)
    assert torch.equal(q.dequantize(), q.operand(False, torch.float32).values)


def test_float16_operands_come_in_bfloat16():
    q = quantize(torch.full((1, 32), 65504.0), dtype=torch.float16)
    values = q.operand(False, torch.float16).values
    assert values.dtype == torch.bfloat16 and values[0, 0] == 65536.0


def test_every_code_and_scale_dequantizes_exactly():
    """All 256 codes under all scales, as bfloat16 operands above bfloat16's subnormals."""
    q = quantize(torch.zeros(255, 256))
    codes = torch.arange(256, dtype=torch.uint8).expand(255, 256).view(E4M3.dtype)
    scales = torch.arange(255, dtype=torch.uint8)[:, None].expand(255, 8)
    rebuilt = q.rebuild([codes, scales, *q.tensors()[2:]])
    exact = rebuilt.operand(False, torch.float64).values
    expected = torch.ldexp(codes.double(), scales.double()[:, :1] - 127)
    fits = expected.abs() <= FLT_MAX
    assert torch.equal(exact[fits], expected[fits])
    normal = (fits & (expected.abs() >= torch.finfo(torch.bfloat16).tiny)) | (expected == 0)
    assert torch.equal(rebuilt.operand(False, torch.bfloat16).values.double()[normal], expected[normal])


def test_stacked_weights_are_scaled_one_by_one():
    w = torch.randn(3, 40, 50, dtype=torch.bfloat16)
    quantizer = MXFP8BlockScaling().quantizer(Role.WEIGHT)
    q = quantizer.quantize_stacked(w, rowwise=True, columnwise=True)
    assert q.rowwise.scale_inv.shape == (3, 40, 2) and q.columnwise.scale_inv.shape == (3, 2, 50)
    for group in range(3):
        alone = quantizer.quantize(w[group], rowwise=True, columnwise=True)
        for copy, other in ((q.rowwise, alone.rowwise), (q.columnwise, alone.columnwise)):
            assert torch.equal(codes_of(copy)[group], codes_of(other))
            assert torch.equal(copy.scale_inv[group], other.scale_inv)
        for columnwise in (False, True):
            values = q.operand(columnwise, torch.bfloat16).values[group]
            assert torch.equal(values, alone.operand(columnwise, torch.bfloat16).values)


@pytest.mark.parametrize("shape", [(0, 40), (40, 0)], ids=str)
def test_empty_tensors(shape):
    q = quantize(torch.zeros(shape))
    assert q.dequantize().shape == shape
    assert q.operand(True, torch.bfloat16).values.shape == shape


@pytest.mark.parametrize(("fp8_format", "least"), [(Format.E4M3, 31.0), (Format.E5M2, 25.0)], ids=["E4M3", "E5M2"])
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_signal_to_noise(fp8_format, least, columnwise):
    x = torch.randn(128, 1024).bfloat16()
    q = MXFP8BlockScaling(fp8_format).quantizer(Role.INPUT).quantize(x, rowwise=True, columnwise=True)
    error = q.operand(columnwise, torch.float64).values - x.double()
    assert 20 * torch.log10(x.double().norm() / error.norm()) >= least


def test_signal_to_noise_of_a_product():
    a, b = torch.randn(128, 1024).bfloat16(), torch.randn(128, 1024).bfloat16()
    quantizer = MXFP8BlockScaling().quantizer(Role.INPUT)
    left, right = (quantizer.quantize(x).operand(False, torch.float64).values for x in (a, b))
    exact = a.double() @ b.double().T
    assert 20 * torch.log10(exact.norm() / (left @ right.T - exact).norm()) >= 27.5
