"""NVFP4: codes and scales against numpy and ml_dtypes, Hadamard transform, stochastic rounding, groups."""

import math
from dataclasses import replace
from itertools import pairwise, product

import ml_dtypes
import numpy as np
import pytest
import torch

from recipes import NVFP4BlockScaling, Role, Splits
from recipes.casts.cast_nvfp4 import Amaxes, cast_nvfp4_ref
from recipes.casts.hadamard import SIGNS, hadamard_ref
from recipes.casts.nvfp4_alpha import (
    RANGE,
    alpha_from_amax,
    alpha_from_amax_ref,
    alpha_from_amax_triton,
    combined_alpha,
    combined_alpha_ref,
    combined_alpha_triton,
)
from recipes.casts.nvfp4_blocks import e2m1_codes_ref
from recipes.nvfp4 import NVFP4Quantizer
from recipes.tensors.formats import E2M1_VALUES, E4M3
from recipes.triton.philox import block_bits_ref, philox_ref

INF, NAN = float("inf"), float("nan")
FLT_MAX = np.finfo(np.float32).max
TINY = 2.0**-149
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
KINDS = {
    "nearest": NVFP4Quantizer(),
    "rht": NVFP4Quantizer(rht=True),
    "rht-float32": NVFP4Quantizer(rht=True, round_rht=False),
    "stochastic": NVFP4Quantizer(rht=True, stochastic=True),
    "16x16": NVFP4Quantizer(two_d=True),
    "row-scaled": NVFP4Quantizer(rht=True, row_scaled=True),
}
EACH_KIND = pytest.mark.parametrize("quantizer", KINDS.values(), ids=KINDS)


def from_hex(text: str) -> list[int]:
    return [int(digit, 16) for digit in text if digit not in " |"]


def encode_oracle(amax) -> np.float32:
    """S_enc."""
    amax = np.float32(amax)
    if amax == 0 or np.isinf(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        return min(np.float32(2688) / amax, FLT_MAX)


def oracle(x: np.ndarray, amax, rows_of_a_block: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Codes [R, 16 B] and scale bytes [R, B] of float32 x [R, K], block by block. amax: one number, or one a row."""
    x = np.pad(x.astype(np.float32), ((0, 0), (0, -x.shape[1] % 16)))
    amaxes = np.broadcast_to(np.asarray(amax, np.float32), len(x))
    codes, scales = np.zeros(x.shape, np.uint8), np.zeros((len(x), x.shape[1] // 16), np.uint8)
    with np.errstate(all="ignore"):
        for top in range(0, len(x), rows_of_a_block):
            rows = slice(top, top + rows_of_a_block)
            encode = encode_oracle(amaxes[top])
            decode = np.float32(1) / encode
            for block in range(scales.shape[1]):
                columns = slice(16 * block, 16 * block + 16)
                values = x[rows, columns]
                if np.isnan(values).any():
                    scales[rows, block] = 0x7F
                    continue
                target = np.abs(values).max() * (encode * (np.float32(1) / np.float32(6)))
                scale = np.minimum(target, np.float32(448)).astype(ml_dtypes.float8_e4m3fn)
                factor = min(np.float32(1) / (scale.astype(np.float32) * decode), FLT_MAX)
                half = values * (factor * np.float32(0.5))
                scales[rows, block] = scale.view(np.uint8)
                codes[rows, columns] = (half * np.float32(2)).astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
    return codes, scales


def codes_of(copy) -> torch.Tensor:
    """Codes, one an element, [..., 16 B or a little less]."""
    return torch.stack((copy.codes & 0xF, copy.codes >> 4), -1).flatten(-2)


def scales_of(copy) -> torch.Tensor:
    return copy.scale_inv.view(torch.uint8)


def quantize(values, quantizer=KINDS["nearest"], dtype=torch.float32, seed=None):
    quantizer = replace(quantizer, seed=seed)
    return quantizer.quantize(torch.as_tensor(values, dtype=dtype), rowwise=True, columnwise=True)


def seeded(quantizer):
    return replace(quantizer, seed=torch.tensor([11])) if quantizer.stochastic else quantizer


def assert_same_copy(copy, other):
    assert torch.equal(copy.codes, other.codes)
    assert torch.equal(scales_of(copy), scales_of(other))
    assert torch.equal(copy.amax, other.amax)


def wide(*shape):
    """Each row around a power of two of its own, over 60 of them, and each value around another."""
    exponents = torch.randint(-30, 30, (*shape[:-1], 1)) + torch.randint(-6, 6, shape)
    return torch.randn(shape) * torch.exp2(exponents.float())


# The global scale


@pytest.mark.parametrize(
    ("amax", "encode"),
    [
        pytest.param(0.0, 1.0, id="0"),
        pytest.param(TINY, FLT_MAX, id="smallest"),
        pytest.param(1e-38, FLT_MAX, id="1e-38"),
        pytest.param(2.0**-6, 172032.0, id="2^-6"),
        pytest.param(1.0, 2688.0, id="1"),
        pytest.param(1.0 + 2.0**-23, 2687.99976, id="above-1"),
        pytest.param(256.0, 10.5, id="256"),
        pytest.param(258.0, 10.4186049, id="258"),
        pytest.param(448.0, 6.0, id="448"),
        pytest.param(448.0 + 2.0**-15, 5.99999952, id="above-448"),
        pytest.param(512.0, 5.25, id="512"),
        pytest.param(torch.finfo(torch.bfloat16).max, 7.9303e-36, id="bf16-max"),
        pytest.param(INF, 1.0, id="inf"),
    ],
)
def test_the_global_scale_and_what_it_gives(amax, encode):
    """S_enc of the oracle against the table; amax, scales and codes of a tensor with that amax against the oracle."""
    assert encode_oracle(amax) == pytest.approx(encode, rel=1e-6)
    x = torch.tensor([[amax, *(amax * f if amax < INF else f for f in (0.5, -0.3, 0.01, 1e-4, 0.0))] * 8])
    q = quantize(x).rowwise
    assert q.amax.item() == np.float32(amax)
    codes, scales = oracle(x.numpy(), amax)
    assert codes_of(q).tolist() == codes.tolist() and scales_of(q).tolist() == scales.tolist()


def test_alpha_is_one_division():
    amax = torch.cat([torch.rand(2000) * 100, torch.tensor([0.0, TINY, FLT_MAX])])
    assert torch.equal(alpha_from_amax(amax), torch.from_numpy(amax.numpy() / np.float32(2688)))
    assert alpha_from_amax(torch.tensor(INF)) == 1.0


def check_alpha_kernel(device: str, largest: float) -> None:
    amax = torch.rand(300) * 2.0 ** torch.randint(-149, 128, (300,))
    amax[:6] = torch.tensor([0.0, TINY, 2688 * TINY, FLT_MAX, INF, 2.0**-126])
    for shape in ((), (1,), (300,), (3, 100), (300, 1)):
        each = amax[: math.prod(shape)].view(shape).to(device)
        found = alpha_from_amax_triton(each, largest)
        assert found.shape == shape and torch.equal(found, alpha_from_amax_ref(each, largest))
        assert torch.equal(found[1:] if shape else found, alpha_from_amax_triton(each[1:] if shape else each, largest))
    assert alpha_from_amax_triton(amax[:0].to(device), largest).shape == (0,)
    amax = amax.clamp(max=1e18).to(device)
    pairs = list(product((amax, amax[9], amax.flip(0), torch.stack((amax, amax), 1)[:, 1]), (largest, None)))
    pairs.append((torch.where(amax == 1e18, INF, amax), largest))
    for (a, a_largest), (b, b_largest) in product(pairs, repeat=2):
        found = combined_alpha_triton(a, a_largest, b, b_largest)
        expected = combined_alpha_ref(a, a_largest, b, b_largest)
        assert found.shape == expected.shape and torch.equal(found, expected)
    assert torch.equal(combined_alpha(amax, largest, amax[9], None), alpha_from_amax_ref(amax, largest) * amax[9])
    assert combined_alpha_triton(amax[:0], largest, amax[9], None).shape == (0,)


@pytest.mark.slow
@pytest.mark.launches("alpha_kernel", "combined_alpha_kernel")
@pytest.mark.interpreter
@pytest.mark.parametrize("largest", [RANGE, 6 * 256.0])
def test_alpha_kernel_equals_the_reference_interpreted(largest):
    check_alpha_kernel("cpu", largest)


@pytest.mark.gpu
@pytest.mark.parametrize("largest", [RANGE, 6 * 256.0])
def test_alpha_kernel_equals_the_reference(largest):
    check_alpha_kernel("cuda", largest)


# Codes


def test_ties_go_to_even_codes_and_their_neighbours_to_the_nearer():
    for code, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        middle = torch.tensor((low + high) / 2)
        below, above = torch.nextafter(middle, torch.tensor(0.0)), torch.nextafter(middle, torch.tensor(9.0))
        found = e2m1_codes_ref(torch.stack([below, middle, above]))
        assert found.tolist() == [code, code + code % 2, code + 1]
        negative = e2m1_codes_ref(-torch.stack([below, middle, above]))
        assert torch.equal(negative, found + 8)


def test_codes_against_ml_dtypes_for_every_bf16_number_and_its_neighbours():
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()
    every = every[~every.isnan()]
    for x in (every, torch.nextafter(every, torch.tensor(INF)), torch.nextafter(every, torch.tensor(-INF))):
        expected = x.numpy().astype(ml_dtypes.float4_e2m1fn).view(np.uint8) & 0xF
        assert e2m1_codes_ref(x).tolist() == expected.tolist()


def test_every_bf16_number_in_a_tensor():
    """Sixteen neighbours a block; NaN patterns fill blocks of their own at the ends of both signs."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).reshape(-1, 256)
    for x in (every, every.masked_fill(every.isinf(), 0.0)):
        q = quantize(x, dtype=torch.bfloat16).rowwise
        assert q.amax == x.float().abs().nan_to_num(0.0, INF).max()
        codes, scales = oracle(x.float().numpy(), q.amax.item())
        assert torch.equal(codes_of(q), torch.from_numpy(codes)) and torch.equal(scales_of(q), torch.from_numpy(scales))


# Worked blocks

RAMP = from_hex("F F F E E E E D D D C C B A A 9 | 0 1 2 2 3 4 4 5 5 6 6 6 6 7 7 7")
COUNT = from_hex("7 0 0 0 0 0 0 0 0 0 0 0 0 0 0 0 | 5 5 5 6 6 6 6 6 6 6 6 7 7 7 7 7")


@pytest.mark.parametrize(
    ("values", "scales", "codes", "amax"),
    [
        pytest.param(list(range(-16, 16)), [0x7E, 0x7D], RAMP, 16.0, id="ramp"),
        pytest.param([450.0, *range(31)], [0x7E, 0x5F], COUNT, 450.0, id="above-448"),
        pytest.param([INF, *range(31)], [0x7E, 0x4A], COUNT, INF, id="inf"),
        pytest.param([NAN, *range(31)], [0x7F, 0x7E], [0] * 16 + COUNT[16:], 30.0, id="nan"),
        pytest.param([0.0] * 32, [0, 0], [0] * 32, 0.0, id="zeros"),
        pytest.param([-0.0] * 32, [0, 0], [8] * 32, 0.0, id="negative-zeros"),
        pytest.param([1.0, *[2.0**-20] * 31], [0x7E, 0], [7] + [0] * 15 + [7] * 16, 1.0, id="scale-of-0"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_worked_blocks(values, scales, codes, amax, dtype):
    q = quantize([values], dtype=dtype)
    column = quantize([[value] for value in values], dtype=dtype).columnwise
    for copy in (q.rowwise, column):
        assert scales_of(copy).tolist() == [scales] and codes_of(copy).tolist() == [codes] and copy.amax == amax
    assert codes_of(q.columnwise).shape == (32, 16) and scales_of(q.columnwise).shape == (32, 1)


def test_the_even_column_is_in_the_low_nibble():
    assert quantize([[6.0, -0.5, 1.0] + [0.0] * 13]).rowwise.codes[0, :2].tolist() == [0x97, 0x02]


def test_a_nan_shows_in_the_whole_block_and_nowhere_else():
    x = torch.ones(32, 48)
    x[3, 20] = NAN
    q = quantize(x)
    expected = torch.zeros(32, 48, dtype=torch.bool)
    expected[3, 16:32] = True
    assert torch.equal(q.dequantize().isnan(), expected)
    expected = torch.zeros(32, 48, dtype=torch.bool)
    expected[:16, 20] = True
    assert torch.equal(q.columnwise.dequantize().isnan(), expected)
    assert torch.equal(quantize(x, KINDS["rht"]).columnwise.dequantize().isnan(), expected)
    expected[:16, 16:32] = True
    both = quantize(x, KINDS["16x16"])
    assert torch.equal(both.rowwise.dequantize().isnan(), expected)
    assert torch.equal(both.columnwise.dequantize().isnan(), expected)
    assert quantize(torch.full((1, 16), NAN)).dequantize().isnan().all()


def test_inf_saturates():
    q = quantize([[-INF, 1.0] + [0.0] * 30])
    assert q.dequantize()[0].tolist() == [-2688.0] + [0.0] * 31


# Tensors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(1, 16), (5, 64), (33, 31), (20, 50), (64, 1)], ids=str)
def test_a_matrix_against_numpy(dtype, shape):
    for x in (torch.randn(shape), wide(*shape), torch.randn(shape) * 2.0**-140, torch.randn(shape) * 2.0**120):
        x = x.to(dtype)
        q = quantize(x, dtype=dtype)
        for copy, given in ((q.rowwise, x), (q.columnwise, x.T)):
            given = given.float().numpy()
            codes, scales = oracle(given, np.abs(given).max())
            assert np.array_equal(scales_of(copy).numpy(), scales)
            found = codes_of(copy).numpy()
            assert np.array_equal(found, codes[:, : found.shape[1]]) and not codes[:, found.shape[1] :].any()
        assert q.shape == x.shape and q.dtype == q.dequantize().dtype == dtype
        assert q.columnwise.dequantize().shape == x.shape


def test_powers_of_two_and_their_neighbours():
    powers = torch.exp2(torch.arange(-126, 127).float())
    around = [torch.nextafter(powers, torch.tensor(towards)) for towards in (0.0, INF)]
    for values in (powers, *around):
        x = values[:, None] * torch.linspace(0, 1, 16)
        for row in x[::9]:
            codes, scales = oracle(row[None].numpy(), row.max().item())
            q = quantize(row[None]).rowwise
            assert codes_of(q).tolist() == codes.tolist() and scales_of(q).tolist() == scales.tolist()
        codes, scales = oracle(x.numpy(), x.max(1).values.numpy())
        q = quantize(x, NVFP4Quantizer(row_scaled=True)).rowwise
        assert codes_of(q).tolist() == codes.tolist() and scales_of(q).tolist() == scales.tolist()


def test_row_scaled_is_each_row_alone():
    x = wide(3, 7, 40)
    q = quantize(x, KINDS["row-scaled"])
    assert q.rowwise.amax.shape == (21,) and q.operand(False, torch.bfloat16).alpha.shape == (21, 1)
    assert q.columnwise.amax.shape == () and q.dequantize().shape == x.shape
    for row, values in enumerate(x.reshape(21, 40)):
        alone = quantize(values[None])
        assert torch.equal(q.dequantize().reshape(21, 40)[row], alone.dequantize()[0])
        assert torch.equal(q.rowwise.codes.reshape(21, -1)[row], alone.rowwise.codes[0])


def test_weights_share_their_codes():
    w = torch.randn(40, 56, dtype=torch.bfloat16) * torch.exp2(torch.randn(40, 1) * 3)
    quantizer = NVFP4BlockScaling().quantizer(Role.WEIGHT)
    q = quantize(w, quantizer)
    assert torch.equal(codes_of(q.rowwise), codes_of(q.columnwise).T[:40, :56])
    codes, scales = oracle(w.float().numpy(), w.float().abs().max().item(), 16)
    assert torch.equal(codes_of(q.rowwise), torch.from_numpy(codes[:, :56]))
    assert torch.equal(scales_of(q.rowwise), torch.from_numpy(scales))
    left, right = (q.operand(columnwise, torch.bfloat16) for columnwise in (False, True))
    assert torch.equal(left.values, right.values) and torch.equal(left.alpha, right.alpha) and right.block == 1
    plain = quantize(w, NVFP4BlockScaling(disable_2d_quantization=True).quantizer(Role.WEIGHT))
    assert not torch.equal(codes_of(plain.rowwise), codes_of(plain.columnwise).T[:40, :56])


@EACH_KIND
def test_operands_are_exact_and_alpha_makes_them_values(quantizer):
    q = quantize(wide(40, 50), quantizer)
    for columnwise in (False, True):
        exact = q.operand(columnwise, torch.float64)
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            operand = q.operand(columnwise, dtype)
            assert operand.values.dtype == dtype and torch.equal(operand.values.double(), exact.values)
    operand = q.operand(False, torch.float32)
    assert torch.equal(q.dequantize(), operand.values * operand.alpha)


def test_every_code_and_scale_dequantizes_exactly():
    codes = torch.arange(256, dtype=torch.uint8).repeat_interleave(2).reshape(-1, 8)  # 64 rows of 16 columns
    base = quantize(torch.zeros(64 * 127, 16)).rowwise
    scales = torch.arange(127, dtype=torch.uint8).repeat_interleave(64)[:, None].view(E4M3.dtype)
    copy = base.over([codes.repeat(127, 1), scales, torch.tensor(2688.0)])
    signed = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)], dtype=torch.float64)
    expected = signed[codes_of(copy).long()] * scales.double()
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        assert torch.equal(copy.operand(dtype).values.double(), expected)
    assert torch.equal(copy.dequantize().double(), expected)


# Random Hadamard transform


def sylvester() -> np.ndarray:
    H = np.ones((1, 1))
    for _ in range(4):
        H = np.block([[H, H], [H, -H]])
    return H


def test_the_transform_is_the_matrix_and_its_inverse_the_transpose():
    matrix = np.diag(SIGNS) @ sylvester() / 4  # y = x @ matrix
    assert np.array_equal(matrix @ matrix.T, np.eye(16))
    x = torch.randint(-99, 99, (48, 5)).float()
    expected = np.concatenate([matrix.T @ part for part in x.double().numpy().reshape(3, 16, 5)])
    y = hadamard_ref(x)
    assert np.array_equal(y.double().numpy(), expected)
    assert torch.equal(hadamard_ref(y, inverse=True), x)


def test_the_signs():
    assert "".join("+" if sign > 0 else "-" for sign in SIGNS) == "+++-+------+-+--"


def exact_transform(x: torch.Tensor) -> np.ndarray:
    """Of the rows of x, padded to whole blocks, in float64, where all of it is exact."""
    padded = np.pad(x.double().numpy(), ((0, -len(x) % 16), (0, 0)))
    blocks = padded.reshape(-1, 16, x.shape[1])
    return np.einsum("ji,bjk->bik", np.diag(SIGNS) @ sylvester() / 4, blocks).reshape(padded.shape)


@pytest.mark.parametrize(
    "dtype, kind, rounded",
    [
        pytest.param(torch.bfloat16, "rht", True, id="bf16"),
        pytest.param(torch.bfloat16, "rht-float32", False, id="bf16-in-float32"),
        pytest.param(torch.float16, "rht", False, id="fp16"),
        pytest.param(torch.float32, "rht", False, id="fp32"),
        pytest.param(torch.float64, "rht", False, id="fp64"),
    ],
)
def test_the_transformed_copy_against_numpy(dtype, kind, rounded):
    """The transform of bfloat16 numbers is rounded to bfloat16 before its amax, scales and codes are taken, as
    TransformerEngine does. Within a factor of 2^12 all sums of 16 are exact, in any order."""
    x = torch.randn(40, 24, dtype=torch.bfloat16)
    x[x.abs() < 2.0**-9] = 0.0
    transformed = exact_transform(x)
    if rounded:
        transformed = transformed.astype(ml_dtypes.bfloat16).astype(np.float64)
    y = torch.from_numpy(transformed).T.contiguous().T.float()
    assert rounded != np.array_equal(exact_transform(x), transformed)
    x = x.to(dtype)
    q = quantize(x, KINDS[kind], dtype)
    codes, scales = oracle(y.T.numpy(), y.abs().max().item())
    assert torch.equal(codes_of(q.columnwise), torch.from_numpy(codes))
    assert torch.equal(scales_of(q.columnwise), torch.from_numpy(scales))
    assert q.columnwise.amax == y.abs().max() and q.rowwise.amax == x.abs().max()
    assert_same_copy(q.rowwise, quantize(x, dtype=dtype).rowwise)
    operand = q.operand(True, torch.float32)
    assert operand.values.shape == (48, 24) and operand.block == 16
    restored = hadamard_ref(operand.values * operand.alpha, inverse=True)[:40]
    assert torch.equal(q.columnwise.dequantize(), restored)
    assert 20 * torch.log10(x.float().norm() / (restored - x.float()).norm()) >= 19.0


@pytest.mark.parametrize("stochastic", [False, True], ids=["nearest", "stochastic"])
@pytest.mark.parametrize("sizes", [None, [5, 0, 40, 3]], ids=["tensor", "groups"])
def test_a_rounded_transform_is_one_that_was_stored_in_bfloat16(sizes, stochastic):
    """Transformed by the caller, stored, and then cast without a transform: the same codes, scales and amaxes."""
    x = torch.randn(48, 24, dtype=torch.bfloat16)
    x[x.abs() < 2.0**-9] = 0.0
    of_x, of_stored = (NVFP4Quantizer(rht, stochastic, seed=torch.tensor([7])) for rht in (True, False))
    if sizes is None:
        stored = torch.from_numpy(exact_transform(x)).bfloat16()
        found, expected = of_x.quantize(x, columnwise=True), of_stored.quantize(stored, columnwise=True)
        assert_same_copy(found.columnwise, expected.columnwise)
        return
    padded = [-(-size // 16) * 16 for size in sizes]
    splits = [Splits.make(rows, rows=sum(rows), device="cpu") for rows in (sizes, padded)]
    stored = torch.cat([torch.from_numpy(exact_transform(part)) for part in x.split(sizes)]).bfloat16()
    found, expected = (
        quantizer.quantize_grouped(tensor, s, columnwise=True).columnwise
        for quantizer, tensor, s in ((of_x, x, splits[0]), (of_stored, stored, splits[1]))
    )
    assert torch.equal(found.amax, expected.amax)
    filled = sum(padded) // 16
    assert torch.equal(found.codes[:, : 8 * filled], expected.codes[:, : 8 * filled])
    assert torch.equal(scales_of(found)[:, :filled], scales_of(expected)[:, :filled])


@pytest.mark.parametrize("quantizer", [KINDS["nearest"], KINDS["rht"]], ids=["plain", "rht"])
def test_an_amax_of_inf_casts_the_others_as_they_are(quantizer):
    """S_enc and alpha are 1: values up to 2688 keep their place, blocks of up to 6 * 2^-10 become 0."""
    x = torch.zeros(32, 64)
    x[0, 0], x[1, 16:32], x[2, 32:48], x[3, 48:64] = INF, 5000.0, 6 * 2.0**-10, 3.0
    values = quantize(x, quantizer).rowwise.dequantize()
    assert values[0, 0] == 2688.0 and values[0, 1:].eq(0).all()
    assert values[1, 16:32].eq(2688.0).all() and values[2].eq(0).all() and values[3, 48:].eq(3.0).all()
    if quantizer.rht:
        columns = quantize(x, quantizer).columnwise
        codes = codes_of(columns)[0, :16]
        assert columns.amax == INF and (codes & 7).eq(7).all() and scales_of(columns)[0, 0] == 0x7E


def test_wgrad_of_transformed_integers_is_exact():
    """One number in each 16 rows: its transform is +-1/4 of it throughout, which NVFP4 holds exactly."""
    x, dy = torch.zeros(64, 8), torch.zeros(64, 12)
    for block in range(4):
        row = 16 * block + 5 * block % 16
        x[row], dy[row] = 4.0 * (-1) ** block, torch.tensor([4.0, -4.0, 0.0] * 4)
    left, right = (quantize(t, KINDS["rht"]).operand(True, torch.float32) for t in (dy, x))
    dw = (left.values.T @ right.values) * (left.alpha * right.alpha)
    torch.testing.assert_close(dw, dy.T @ x, rtol=1e-6, atol=0)


def test_the_transform_leaves_wgrad_of_integers_as_it_was():
    x, dy = torch.randint(-9, 10, (64, 8)).float(), torch.randint(-9, 10, (64, 12)).float()
    assert torch.equal(hadamard_ref(dy).T @ hadamard_ref(x), dy.T @ x)


# Stochastic rounding


def test_representable_values_never_move():
    signed = torch.tensor([*E2M1_VALUES, *(-v for v in E2M1_VALUES)])
    for bits in (0, 1, 255, 511):
        assert e2m1_codes_ref(signed, torch.full((16,), bits)).tolist() == [0, 1, 2, 3, 4, 5, 6, 7, *range(8, 16)]
    huge = torch.tensor([7.0, 1e30, INF, -INF])
    assert e2m1_codes_ref(huge, torch.full((4,), 511)).tolist() == [7, 7, 7, 15]


def test_the_chance_of_rounding_up_is_the_distance_in_512ths():
    bits = torch.arange(512)
    for code, (low, high) in enumerate(pairwise(E2M1_VALUES)):
        for part in range(0, 512, 5):
            x = torch.full((512,), low + (high - low) * part / 512)
            found = e2m1_codes_ref(x, bits)
            assert set(found.tolist()) <= {code, code + 1} and (found == code + 1).sum() == part
            assert torch.equal(e2m1_codes_ref(-x, bits), found + 8)


def test_the_random_words_are_those_of_philox():
    zero = torch.zeros((), dtype=torch.int64)
    # Of Random123's known answers, the one of philox4x32 with 7 rounds, counter and key 0.
    assert philox_ref(zero, zero, zero).tolist() == [0x5F6FB709, 0x0D893F64, 0x4F121F81, 0x4F730A48]


def test_the_random_bits_of_a_block_are_windows_of_its_words():
    seed, block, row = torch.tensor(77), torch.arange(3000), torch.arange(3000) // 7
    bits = block_bits_ref(seed, block, row)
    assert bits.shape == (3000, 16) and bits.min() == 0 and bits.max() == 511
    words = philox_ref(seed, block, row).tolist()
    for found, of_block in zip(bits[:5].tolist(), words, strict=False):
        digits = [f"{word:032b}"[::-1] * 2 for word in of_block]  # the lowest first, and once more
        assert found == [int(digits[i // 4][8 * (i % 4) :][:9][::-1], 2) for i in range(16)]
    expected = bits.numel() / 512
    chi_squared = ((torch.bincount(bits.flatten(), minlength=512) - expected) ** 2 / expected).sum()
    assert chi_squared < 620  # of as many independent numbers it would be larger with probability 0.0007


def test_one_draw_serves_both_copies():
    """In each place of 16x16 the columns 2k and 2k + 1 are rounded as the rows k and k + 8."""
    amax = torch.tensor(1.117)  # with which ones stand between two codes
    made = cast_nvfp4_ref(
        torch.ones(48, 32), None, Amaxes(amax, amax), rht=False, row_scaled=False, two_d=False, seed=torch.tensor([9])
    )
    rows, columns = (torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2) for codes in (made[0], made[2]))
    assert rows.unique().tolist() == [6, 7]
    rows, columns = rows.view(3, 16, 2, 16), columns.view(2, 16, 3, 16)
    order = [k + 8 * second for k in range(8) for second in range(2)]
    assert torch.equal(columns.permute(2, 1, 0, 3), rows[:, order])


@pytest.mark.slow
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_stochastic_rounding_is_unbiased(columnwise):
    """The mean over many seeds, against a two-sided bound that a fair one passes with probability 0.999."""
    quantizer = NVFP4Quantizer(stochastic=True)
    x = torch.randn(32, 32).abs() + 0.1
    num_seeds = 400
    total, squares = torch.zeros(32, 32, dtype=torch.float64), torch.zeros(32, 32, dtype=torch.float64)
    for seed in range(num_seeds):
        q = quantize(x, quantizer, seed=torch.tensor([seed * 7919]))
        error = (q.columnwise if columnwise else q.rowwise).dequantize().double() - x
        total += error
        squares += error**2
    # Numbers above the largest value of their block are cut off; they are no matter of chance.
    nearest = quantize(x, KINDS["nearest"])
    nearest = nearest.columnwise if columnwise else nearest.rowwise
    codes = codes_of(nearest) & 7
    inner = (codes.T if columnwise else codes) < 7
    sum_of_all, variance = total[inner].sum(), squares[inner].sum()
    assert inner.sum() > 500
    assert abs(sum_of_all) <= 3.29 * variance.sqrt()


def test_stochastic_codes_are_neighbours_and_repeat_with_their_seed():
    quantizer = KINDS["stochastic"]
    x = torch.randn(40, 48)
    torch.manual_seed(5)
    first, second = quantize(x, quantizer), quantize(x, quantizer)
    torch.manual_seed(5)
    again = quantize(x, quantizer)
    seeded = [quantize(x, quantizer, seed=torch.tensor([3])) for _ in range(2)]
    for name in ("rowwise", "columnwise"):
        one, other, third = (getattr(q, name) for q in (first, second, again))
        assert_same_copy(one, third)
        assert not torch.equal(one.codes, other.codes)
        assert_same_copy(getattr(seeded[0], name), getattr(seeded[1], name))
    nearest = quantize(x, KINDS["rht"])
    for name in ("rowwise", "columnwise"):
        difference = codes_of(getattr(first, name)).int() - codes_of(getattr(nearest, name)).int()
        assert difference.abs().max() == 1


def test_only_stochastic_quantizers_draw_a_seed():
    state = torch.get_rng_state()
    quantize(torch.randn(4, 16, generator=torch.Generator()), KINDS["rht"])
    assert torch.equal(torch.get_rng_state(), state)
    quantize(torch.randn(4, 16, generator=torch.Generator()), KINDS["stochastic"])
    assert not torch.equal(torch.get_rng_state(), state)


# Groups

SPLITS = {
    "ordinary": ([20, 33, 7], 60),
    "empty": ([0, 16, 0, 0, 9, 0], 25),
    "tail": ([5, 17, 1], 50),
    "all empty": ([0, 0], 7),
    "one group": ([40], 40),
    "no rows": ([0, 0], 0),
}


@EACH_KIND
@pytest.mark.parametrize("case", SPLITS)
def test_grouped_is_each_group_alone(quantizer, case):
    sizes, rows = SPLITS[case]
    total = sum(sizes)
    x = wide(rows, 40)
    x[total:] = NAN
    quantizer = seeded(quantizer)
    splits = Splits.make(sizes, rows=rows, device="cpu")
    grouped = quantizer.quantize_grouped(x, splits, rowwise=True, columnwise=True)
    assert grouped.shape == x.shape
    assert not grouped.rowwise.codes[total:].any() and not scales_of(grouped.rowwise)[total:].any()
    used = int(splits.aligned(16)[-1])
    assert grouped.columnwise.codes.shape == (40, splits.aligned_capacity(16) // 2)
    assert (
        not grouped.columnwise.codes[:, used // 2 :].any() and not scales_of(grouped.columnwise)[:, used // 16 :].any()
    )
    members = grouped.unbind()
    start = 0
    for size, member in zip(sizes, members, strict=True):
        alone = quantizer.quantize(x[start : start + size], rowwise=True, columnwise=True)
        assert_same_copy(member.rowwise, alone.rowwise)
        assert_same_copy(member.columnwise, alone.columnwise)
        for copy in ("rowwise", "columnwise"):
            whole = getattr(grouped, copy).dequantize(splits)
            part = getattr(alone, copy).dequantize()
            torch.testing.assert_close(whole[start : start + size], part, rtol=0, atol=0, equal_nan=True)
            assert whole.shape == x.shape and not whole[total:].any()
        start += size


@EACH_KIND
def test_grouped_wgrad_from_padded_operands(quantizer):
    """What a grouped product over padded rows gives, against each group's dequantized values."""
    sizes, rows = [20, 0, 33, 7], 70
    x, dy = torch.randn(rows, 24), torch.randn(rows, 40)
    splits = Splits.make(sizes, rows=rows, device="cpu")
    copies = [quantizer.quantize_grouped(t, splits, rowwise=False, columnwise=True) for t in (dy, x)]
    left, right = (copy.operand(True, torch.float32) for copy in copies)
    assert left.block == right.block == 16
    padded = splits.padded(16)
    assert left.values.shape == (padded.rows, 40) and right.alpha.shape == (4,)
    values = [copy.dequantize() for copy in copies]
    for group, (first, end) in enumerate(pairwise(padded.offsets.tolist())):
        dw = left.values[first:end].T @ right.values[first:end] * (left.alpha * right.alpha)[group]
        start = sum(sizes[:group])
        a, b = (value[start : start + sizes[group]] for value in values)
        if quantizer.rht:  # values of the padding are lost with it, and were small
            a, b = (hadamard_ref(o.values[first:end] * o.alpha[group], inverse=True) for o in (left, right))
        torch.testing.assert_close(dw, a.T @ b, rtol=1e-4, atol=1e-4)


@EACH_KIND
def test_stacked_weights_are_each_alone(quantizer):
    w = wide(3, 40, 50)
    quantizer = seeded(quantizer)
    q = quantizer.quantize_stacked(w, rowwise=True, columnwise=True)
    assert q.shape == w.shape and q.columnwise.codes.shape == (3, 50, 24)
    for group in range(3):
        alone = quantizer.quantize(w[group], rowwise=True, columnwise=True)
        for name in ("rowwise", "columnwise"):
            copy, other = getattr(q, name), getattr(alone, name)
            assert torch.equal(copy.codes[group], other.codes) and torch.equal(copy.amax[group], other.amax)
            assert torch.equal(scales_of(copy)[group], scales_of(other))
            assert torch.equal(copy.dequantize()[group], other.dequantize())
    for columnwise in (False, True):
        operand = q.operand(columnwise, torch.bfloat16)
        assert operand.values.shape[::2] == (3, 50)


# Containers


def test_one_vector_and_leading_axes():
    x = torch.randn(3, 6, 40)
    q, flat = quantize(x), quantize(x.reshape(18, 40))
    assert q.shape == x.shape and q.rowwise.codes.shape == (3, 6, 20)
    assert torch.equal(q.dequantize().reshape(18, 40), flat.dequantize())
    assert torch.equal(q.columnwise.codes, flat.columnwise.codes)
    assert q.operand(True, torch.bfloat16).values.shape == x.shape
    vector = quantize(torch.randn(40))
    assert vector.shape == vector.dequantize().shape == vector.columnwise.dequantize().shape == (40,)


@EACH_KIND
def test_all_tensors_travel(quantizer):
    q = quantize(torch.randn(20, 40), quantizer)
    rebuilt = q.rebuild([tensor.clone() for tensor in q.tensors()])
    assert len(q.tensors()) == 6 and torch.equal(rebuilt.dequantize(), q.dequantize())
    assert torch.equal(rebuilt.columnwise.dequantize(), q.columnwise.dequantize())
    empty = q.rebuild([None] * 6)
    assert empty.rebuild(q.tensors()).shape == q.shape
    splits = Splits.make([4, 16], rows=20, device="cpu")
    grouped = quantizer.quantize_grouped(torch.randn(20, 40), splits, rowwise=False, columnwise=True)
    assert torch.equal(grouped.rebuild(grouped.tensors()).dequantize(), grouped.dequantize())


@pytest.mark.parametrize("shape", [(0, 40), (40, 0), (0, 0)], ids=str)
@EACH_KIND
def test_empty_tensors(shape, quantizer):
    q = quantize(torch.zeros(shape), quantizer)
    assert q.dequantize().shape == q.columnwise.dequantize().shape == shape


def test_roles():
    recipe = NVFP4BlockScaling()
    assert recipe.quantizer(Role.INPUT) == NVFP4Quantizer(rht=True)
    assert recipe.quantizer(Role.WEIGHT) == NVFP4Quantizer(two_d=True)
    assert recipe.quantizer(Role.GRAD_OUTPUT) == NVFP4Quantizer(rht=True, stochastic=True)
    in_float32 = NVFP4BlockScaling(disable_rht_rounding=True)
    assert in_float32.quantizer(Role.INPUT) == NVFP4Quantizer(rht=True, round_rht=False)
    assert in_float32.quantizer(Role.GRAD_OUTPUT) == NVFP4Quantizer(rht=True, stochastic=True, round_rht=False)
    plain = NVFP4BlockScaling(disable_rht=True, disable_stochastic_rounding=True, disable_2d_quantization=True)
    assert {plain.quantizer(role) for role in Role} == {NVFP4Quantizer()}
    by_rows = NVFP4BlockScaling(row_scaled_activation=True)
    assert [by_rows.quantizer(role).row_scaled for role in Role] == [True, False, False]
    with pytest.raises(ValueError, match="16x16 blocks"):
        NVFP4Quantizer(two_d=True, stochastic=True)


def test_signal_to_noise():
    x = torch.randn(128, 1024).bfloat16()
    for quantizer, least in ((KINDS["nearest"], 20.0), (KINDS["rht"], 20.0), (KINDS["16x16"], 18.0)):
        q = quantize(x, quantizer, torch.bfloat16)
        for copy in (q.rowwise, q.columnwise):
            error = copy.dequantize().double() - x.double()
            assert 20 * torch.log10(x.double().norm() / error.norm()) >= least


def test_signal_to_noise_of_a_product():
    a, b = torch.randn(128, 1024).bfloat16(), torch.randn(128, 1024).bfloat16()
    recipe = NVFP4BlockScaling()
    left, right = (quantize(x, recipe.quantizer(role)) for x, role in ((a, Role.INPUT), (b, Role.WEIGHT)))
    exact = a.double() @ b.double().T
    found = left.dequantize().double() @ right.dequantize().double().T
    assert 20 * math.log10(exact.norm() / (found - exact).norm()) >= 16.0
