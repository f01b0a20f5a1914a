"""FP8 blocks: scales and codes against numpy and ml_dtypes, worked numbers, partial blocks, groups, operands."""

import math

import ml_dtypes
import numpy as np
import pytest
import torch

from recipes import E4M3, E5M2, Float8BlockScaling, Format, Role, Splits
from recipes.casts.scale_rules import Float32Scale
from recipes.float8_block import Float8BlockQuantizer

INF, NAN = float("inf"), float("nan")
FLT_MAX = torch.finfo(torch.float32).max
NUMPY_DTYPE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
FORMS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
EACH_DIM = pytest.mark.parametrize("block_dim", [1, 2])
SCALES = pytest.mark.parametrize("power_2", [True, False], ids=["power-of-two", "float32"])
DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


def scale_oracle(amax: np.float32, quantizer: Float8BlockQuantizer, dtype: torch.dtype) -> np.float32:
    """One scale, by exact quotients in numpy's float32."""
    amax = max(amax, np.float32(quantizer.amax_epsilon))
    if amax == 0 or np.isinf(amax):
        return np.float32(1)
    with np.errstate(over="ignore"):
        scale = np.float32(quantizer.form.max) / amax
    if np.isinf(scale):
        scale = np.float32(FLT_MAX if dtype == torch.float64 else torch.finfo(dtype).max)
    if quantizer.power_2_scale:
        _, exponent = np.frexp(scale)
        scale = np.ldexp(np.float32(1), exponent - 1)
    return np.float32(scale)


def oracle(x: torch.Tensor, quantizer: Float8BlockQuantizer, block: tuple[int, int]) -> tuple[torch.Tensor, ...]:
    """Codes and scale_inv of a matrix x in the natural order, block by block in numpy."""
    x32 = x.to(torch.float32).numpy()
    R, K = x.shape
    codes = np.zeros((R, K), np.uint8)
    scale_inv = np.zeros((-(-R // block[0]), -(-K // block[1])), np.float32)
    for i, j in np.ndindex(scale_inv.shape):
        place = (slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1]))
        values = x32[place]
        scale = scale_oracle(np.nanmax(np.abs(values), initial=0), quantizer, x.dtype)
        scale_inv[i, j] = np.float32(1) / scale
        scaled = np.clip(values * scale, -quantizer.form.max, quantizer.form.max)
        codes[place] = scaled.astype(NUMPY_DTYPE[quantizer.form]).view(np.uint8)
    return torch.from_numpy(codes), torch.from_numpy(scale_inv)


def assert_is(found: torch.Tensor, expected: torch.Tensor, form) -> None:
    """Equal codes; NaN may have any sign and payload."""
    found, expected = (t.view(torch.uint8).contiguous() for t in (found, expected))
    nan = expected.view(form.dtype).float().isnan()
    assert torch.equal(found.view(form.dtype).float().isnan(), nan)
    assert torch.equal(found.masked_fill(nan, 0), expected.masked_fill(nan, 0))


def check(x: torch.Tensor, quantizer: Float8BlockQuantizer) -> None:
    """Both copies of a matrix against the oracle, with their layout."""
    q = quantizer.quantize(x, rowwise=True, columnwise=True)
    R, K = x.shape
    square = quantizer.block_dim == 2
    codes, scale_inv = oracle(x, quantizer, q.rowwise.block)
    assert q.rowwise.block == ((128, 128) if square else (1, 128))
    assert_is(q.rowwise.codes, codes, quantizer.form)
    assert torch.equal(q.rowwise.scale_inv, scale_inv if square else scale_inv.T)
    assert q.rowwise.scale_inv.is_contiguous()
    codes, scale_inv = oracle(x, quantizer, q.columnwise.block)
    assert q.columnwise.block == ((128, 128) if square else (128, 1))
    padded = -(-R // 128) * 128
    assert q.columnwise.codes.shape == (K, padded) and q.columnwise.codes.is_contiguous()
    assert_is(q.columnwise.codes[:, :R], codes.T, quantizer.form)
    assert not q.columnwise.codes[:, R:].view(torch.uint8).any()
    assert torch.equal(q.columnwise.scale_inv, scale_inv.T if square else scale_inv)
    assert q.columnwise.scale_inv.is_contiguous()


def rows(*shape):
    """Values over most of float32's exponents, each row around one of its own."""
    return torch.randn(shape) * torch.exp2(torch.randint(-130, 110, (*shape[:-1], 1)).float())


# Scales


@pytest.mark.parametrize(
    ("amax", "bits", "power_2"),
    [
        pytest.param(0.0, 0x3F800000, 1.0, id="0"),
        pytest.param(2.0**-149, 0x7F7FFFFF, 2.0**127, id="smallest"),
        pytest.param(1e-38, 0x7F7FFFFF, 2.0**127, id="1e-38"),
        pytest.param(2.0**-6, 0x46E00000, 16384.0, id="2^-6"),
        pytest.param(1.0, 0x43E00000, 256.0, id="1"),
        pytest.param(1.0 + 2.0**-23, 0x43DFFFFE, 256.0, id="above-1"),
        pytest.param(256.0, 0x3FE00000, 1.0, id="256"),
        pytest.param(448.0, 0x3F800000, 1.0, id="448"),
        pytest.param(448.0 + 2.0**-15, 0x3F7FFFFF, 0.5, id="above-448"),
        pytest.param(512.0, 0x3F600000, 0.5, id="512"),
        pytest.param(torch.finfo(torch.bfloat16).max, 0x03E0E0E1, 2.0**-120, id="bf16-max"),
        pytest.param(INF, 0x3F800000, 1.0, id="inf"),
    ],
)
def test_worked_scales(amax, bits, power_2):
    found = Float32Scale(False).scales(torch.tensor([amax]), E4M3, torch.float32)[0]
    assert found.view(torch.int32).item() == bits
    assert Float32Scale(True).scales(torch.tensor([amax]), E4M3, torch.float32)[0].item() == power_2
    q = Float8BlockQuantizer(E4M3, power_2_scale=False).quantize(torch.tensor([[amax, 0.0]]))
    assert q.rowwise.scale_inv.item() == np.float32(1) / np.uint32(bits).view(np.float32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_dtypes_largest_number_stands_for_a_scale_of_inf(dtype):
    tiny = torch.full((1, 4), 1e-40, dtype=torch.float64).to(dtype)
    largest = {torch.bfloat16: 0x7F7F0000, torch.float32: 0x7F7FFFFF, torch.float64: 0x7F7FFFFF}
    for power_2 in (True, False):
        q = Float8BlockQuantizer(E4M3, power_2_scale=power_2).quantize(tiny)
        if dtype == torch.float16:  # 1e-40 is 0 there, and no quotient is Inf
            assert q.rowwise.scale_inv.item() == 1.0
            continue
        scale = np.float32(2.0**127) if power_2 else np.uint32(largest[dtype]).view(np.float32)
        assert q.rowwise.scale_inv.item() == np.float32(1) / scale
    assert Float32Scale(input_range=True).largest(torch.float16) == 65504.0


@FORMS
@SCALES
def test_scales_against_numpy(form, power_2):
    """The format's maximum times powers of two, powers of two themselves, their neighbours, and random numbers."""
    powers = torch.exp2(torch.arange(-149, 128).double()).float()
    powers = torch.cat([powers, (powers.double() * 1.75).float()]).clamp(max=FLT_MAX)
    around = [torch.nextafter(powers, torch.tensor(towards)) for towards in (0.0, INF)]
    random = torch.randint(0, 0x7F800000, (5000,), dtype=torch.int32).view(torch.float32)
    amax = torch.cat([powers, *around, random])
    quantizer = Float8BlockQuantizer(form, power_2_scale=power_2)
    expected = [scale_oracle(a, quantizer, torch.float32) for a in amax.numpy()]
    assert Float32Scale(power_2).scales(amax, form, torch.float32)[0].tolist() == expected


def test_epsilon_is_the_least_amax():
    quantizer = Float8BlockQuantizer(E4M3, power_2_scale=False, amax_epsilon=0.875)
    assert quantizer.quantize(torch.tensor([[0.25]])).rowwise.scale_inv.item() == 1 / 512
    assert quantizer.quantize(torch.tensor([[0.0]])).rowwise.scale_inv.item() == 1 / 512
    assert quantizer.quantize(torch.tensor([[1.75]])).rowwise.scale_inv.item() == 1 / 256


# Codes


@pytest.mark.parametrize(
    ("values", "codes"),
    [
        pytest.param(
            list(range(-16, 16)),
            "FE FD FC FB FA FA F9 F8 F6 F4 F2 F1 EE EA E6 DE 00 5E 66 6A 6E 71 72 74 76 78 79 7A 7A 7B 7C 7D",
            id="ramp",
        ),
        pytest.param([INF, *range(31)], "7E 00 38 40", id="inf"),
        pytest.param([NAN, *range(31)], "7F 00 57 5F 63", id="nan"),
        pytest.param([0.0] * 32, "00 00", id="zeros"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_worked_blocks(values, codes, dtype):
    quantizer = Float8BlockQuantizer(E4M3, power_2_scale=False)
    q = quantizer.quantize(torch.tensor([values], dtype=dtype), columnwise=True)
    expected = [int(code, 16) for code in codes.split()]
    found = q.rowwise.codes.view(torch.uint8)[0, : len(expected)].tolist()
    assert [0x7F if code & 0x7F == 0x7F else code for code in found] == expected
    column = quantizer.quantize(torch.tensor([values], dtype=dtype).T, rowwise=False, columnwise=True).columnwise
    assert_is(column.codes[0, : len(values)], q.rowwise.codes[0], E4M3)
    assert torch.equal(column.scale_inv, q.rowwise.scale_inv)


@FORMS
@SCALES
def test_all_bf16_numbers(form, power_2):
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16)
    quantizer = Float8BlockQuantizer(form, power_2_scale=power_2)
    check(every.view(-1, 128)[::4], quantizer)
    # each alone in its block: numpy on all of them at once
    q = quantizer.quantize(every[:, None])
    x = every.float().numpy()
    scale = np.array([scale_oracle(a, quantizer, torch.bfloat16) for a in np.where(np.isnan(x), 0, np.abs(x))])
    assert torch.equal(q.rowwise.scale_inv[0], torch.from_numpy(np.float32(1) / scale))
    with np.errstate(invalid="ignore"):
        scaled = np.clip(x * scale, -form.max, form.max).astype(NUMPY_DTYPE[form])
    assert_is(q.rowwise.codes[:, 0], torch.from_numpy(scaled.view(np.uint8)), form)


@FORMS
def test_ties_and_subnormal_codes(form):
    """With 448 in the block the scale is 1: every number halfway between two codes, and its neighbours."""
    finite = torch.arange(256, dtype=torch.uint8).view(form.dtype).float()
    finite = finite[finite.isfinite()].sort().values
    ties = (finite[1:] + finite[:-1]) / 2
    numbers = torch.cat([finite, ties, *(torch.nextafter(ties, torch.tensor(to)) for to in (-INF, INF))])
    x = torch.nn.functional.pad(numbers, (0, -len(numbers) % 127)).view(-1, 127)
    x = torch.cat([x, torch.full((len(x), 1), form.max)], 1)
    quantizer = Float8BlockQuantizer(form, power_2_scale=False)
    assert torch.equal(quantizer.quantize(x).rowwise.scale_inv, torch.ones(1, len(x)))
    check(x, quantizer)


@FORMS
@EACH_DIM
@SCALES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_matrices_against_numpy(form, block_dim, power_2, dtype):
    for shape in ((1, 128), (130, 5), (3, 257), (128, 1)):
        for x in (torch.randn(shape), rows(*shape)):
            check(x.to(dtype), Float8BlockQuantizer(form, block_dim, power_2))


@EACH_DIM
def test_nan_stays_in_its_element_and_inf_saturates(block_dim):
    quantizer = Float8BlockQuantizer(E4M3, block_dim)
    x = torch.ones(4, 4)
    x[1, 2] = NAN
    q = quantizer.quantize(x, columnwise=True)
    for columnwise in (False, True):
        values = q.operand(columnwise, torch.float32).values
        assert torch.equal(values.isnan(), x.isnan()) and torch.equal(values.nan_to_num(7.0), x.nan_to_num(7.0))
    x[1, 2] = -INF
    values = quantizer.quantize(x).dequantize()
    assert values[1].tolist() == [1.0, 1.0, -448.0, 1.0]


@EACH_DIM
def test_a_partial_block_counts_as_padded_by_zeros(block_dim):
    quantizer = Float8BlockQuantizer(E4M3, block_dim)
    x = torch.randn(140, 150)
    q = quantizer.quantize(x, columnwise=True)
    whole = quantizer.quantize(torch.nn.functional.pad(x, (0, 106, 0, 116)), columnwise=True)
    assert torch.equal(q.rowwise.codes.view(torch.uint8), whole.rowwise.codes.view(torch.uint8)[:140, :150])
    assert torch.equal(q.columnwise.codes.view(torch.uint8), whole.columnwise.codes.view(torch.uint8)[:150])
    for mine, other in ((q.rowwise, whole.rowwise), (q.columnwise, whole.columnwise)):
        assert torch.equal(mine.scale_inv, other.scale_inv[: mine.scale_inv.shape[0], : mine.scale_inv.shape[1]])


@EACH_DIM
def test_leading_axes_are_rows(block_dim):
    quantizer = Float8BlockQuantizer(E4M3, block_dim)
    x = torch.randn(3, 50, 40)
    q, flat = quantizer.quantize(x, columnwise=True), quantizer.quantize(x.view(150, 40), columnwise=True)
    assert q.shape == q.columnwise.shape == q.rowwise.codes.shape == x.shape
    for columnwise in (False, True):
        values = q.operand(columnwise, torch.float32).values
        assert torch.equal(values.view(150, 40), flat.operand(columnwise, torch.float32).values)
    assert quantizer.quantize(x, rowwise=False, columnwise=True).dequantize().shape == x.shape
    assert quantizer.quantize(x[0, 0], columnwise=True).columnwise.codes.shape == (40, 128)


@EACH_DIM
def test_strides_do_not_matter(block_dim):
    quantizer = Float8BlockQuantizer(E4M3, block_dim)
    x = torch.randn(140, 70)
    for view in (x.T, x[::2, 1:]):
        found, expected = (quantizer.quantize(t, columnwise=True) for t in (view, view.contiguous()))
        for mine, other in zip(found.tensors(), expected.tensors(), strict=True):
            assert mine.is_contiguous() and torch.equal(mine.float(), other.float())


@EACH_DIM
@pytest.mark.parametrize("shape", [(0, 40), (40, 0)], ids=str)
def test_empty_tensors(block_dim, shape):
    q = Float8BlockQuantizer(E4M3, block_dim).quantize(torch.zeros(shape), columnwise=True)
    assert q.dequantize().shape == q.operand(True, torch.bfloat16).values.shape == shape


# Stacked and grouped


@EACH_DIM
def test_stacked_weights_are_scaled_one_by_one(block_dim):
    quantizer = Float8BlockQuantizer(E4M3, block_dim)
    w = rows(3, 140, 150)
    q = quantizer.quantize_stacked(w, columnwise=True)
    assert q.columnwise.codes.shape == (3, 150, 140)
    for group in range(3):
        alone = quantizer.quantize(w[group], columnwise=True)
        assert torch.equal(q.rowwise.codes[group].view(torch.uint8), alone.rowwise.codes.view(torch.uint8))
        assert torch.equal(q.columnwise.codes[group].float(), alone.columnwise.codes[:, :140].float())
        assert torch.equal(q.rowwise.scale_inv[group], alone.rowwise.scale_inv)
        assert torch.equal(q.columnwise.scale_inv[group], alone.columnwise.scale_inv)
        for columnwise in (False, True):
            values = q.operand(columnwise, torch.bfloat16).values[group]
            assert torch.equal(values, alone.operand(columnwise, torch.bfloat16).values)


@pytest.mark.parametrize("sizes", [[3, 0, 150, 40], [0, 0], [128, 128], [1] * 5, [256]], ids=str)
@EACH_DIM
@SCALES
def test_groups_are_scaled_one_by_one(sizes, block_dim, power_2):
    """And what stands past the sum does not matter."""
    quantizer = Float8BlockQuantizer(E4M3, block_dim, power_2)
    total = sum(sizes)
    x = rows(total + 70, 130)
    x[total:] = NAN
    splits = Splits.make(sizes, rows=len(x), device="cpu")
    grouped = quantizer.quantize_grouped(x, splits, columnwise=True)
    capacity = splits.aligned_capacity(128)
    assert grouped.columnwise.codes.shape == (130, capacity)
    assert grouped.rowwise.scale_inv.shape == ((capacity // 128, 2) if block_dim == 2 else (2, len(x)))
    assert grouped.columnwise.scale_inv.shape == ((2, capacity // 128) if block_dim == 2 else (capacity // 128, 130))
    start = 0
    aligned = splits.aligned(128).tolist()
    for group, (size, part) in enumerate(zip(sizes, grouped.unbind(), strict=True)):
        alone = quantizer.quantize(x[start : start + size], columnwise=True)
        for mine, other in zip(part.tensors(), alone.tensors(), strict=True):
            assert mine.shape == other.shape and torch.equal(mine.float(), other.float())
        codes = grouped.columnwise.codes[:, aligned[group] : aligned[group + 1]]
        assert torch.equal(codes.float(), alone.columnwise.codes.float())
        for columnwise in (False, True):
            expected = alone.operand(columnwise, torch.float32).values
            assert torch.equal(grouped.operand(columnwise, torch.float32).values[start : start + size], expected)
            assert torch.equal(part.operand(columnwise, torch.float32).values, expected)
        start += size
    assert not grouped.columnwise.codes[:, aligned[-1] :].view(torch.uint8).any()
    assert not grouped.rowwise.codes[total:].view(torch.uint8).any()
    for copy in (grouped.rowwise, grouped.columnwise):
        assert not copy.dequantize(splits)[total:].any() and copy.scale_inv.isfinite().all()


# Operands


@EACH_DIM
def test_operands_of_powers_of_two_are_exact(block_dim):
    q = Float8BlockQuantizer(E4M3, block_dim).quantize(torch.randn(140, 150), columnwise=True)
    for columnwise in (False, True):
        exact = q.operand(columnwise, torch.float64)
        assert exact.alpha is None and exact.block == 1
        for dtype in (torch.bfloat16, torch.float32):
            values = q.operand(columnwise, dtype).values
            assert values.dtype == dtype and torch.equal(values.double(), exact.values)


def test_float16_operands_come_in_bfloat16():
    q = Float8BlockQuantizer(E4M3).quantize(torch.full((1, 32), 65504.0, dtype=torch.float16))
    values = q.operand(False, torch.float16).values
    assert values.dtype == torch.bfloat16 and values[0, 0] == 65536.0


def test_operands_of_float32_scales_come_in_float32():
    x = torch.randn(4, 150)
    q = Float8BlockQuantizer(E4M3, power_2_scale=False).quantize(x, columnwise=True)
    for columnwise in (False, True):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            assert q.operand(columnwise, dtype).values.dtype == torch.float32
    values = q.rowwise.codes.float() * q.rowwise.scale_inv.T.repeat_interleave(128, 1)[:, :150]
    assert torch.equal(q.operand(False, torch.bfloat16).values, values) and torch.equal(q.dequantize(), values)


@pytest.mark.parametrize(("power_2", "least"), [(True, 31.0), (False, 31.5)], ids=["power-of-two", "float32"])
@pytest.mark.parametrize("columnwise", [False, True], ids=["rowwise", "columnwise"])
def test_signal_to_noise(power_2, least, columnwise):
    x = torch.randn(128, 1024).bfloat16()
    q = Float8BlockQuantizer(E4M3, power_2_scale=power_2).quantize(x, columnwise=True)
    error = q.operand(columnwise, torch.float64).values - x.double()
    assert 20 * torch.log10(x.double().norm() / error.norm()) >= least


# The recipe


def test_each_role_has_its_blocks():
    recipe = Float8BlockScaling(Format.HYBRID, use_f32_scales=True, amax_epsilon=1e-4)
    assert [recipe.quantizer(role) for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT)] == [
        Float8BlockQuantizer(E4M3, 1, False, 1e-4),
        Float8BlockQuantizer(E4M3, 2, False, 1e-4),
        Float8BlockQuantizer(E5M2, 1, False, 1e-4),
    ]
    assert Float8BlockScaling().quantizer(Role.GRAD_OUTPUT) == Float8BlockQuantizer(E4M3, 1, True, 0.0)


@pytest.mark.parametrize("field", ["x_block_scaling_dim", "w_block_scaling_dim", "grad_block_scaling_dim"])
@pytest.mark.parametrize("dim", [0, 3, None])
def test_unknown_dimensions_are_refused(field, dim):
    with pytest.raises(
        ValueError, match=rf"{field} is {dim}, but must be 1 \(1x128 blocks\) or 2 \(128x128 blocks\)\."
    ):
        Float8BlockScaling(**{field: dim})


def with_dims(x, w, grad):
    return Float8BlockScaling(x_block_scaling_dim=x, w_block_scaling_dim=w, grad_block_scaling_dim=grad)


@pytest.mark.parametrize("dims", [(2, 2, 1), (1, 2, 2), (2, 1, 2), (2, 2, 2)], ids=str)
def test_products_of_two_square_operands_are_refused(dims):
    with pytest.raises(ValueError, match="a product of two operands with 128x128 blocks is not supported"):
        with_dims(*dims)


@pytest.mark.parametrize("dims", [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)], ids=str)
def test_any_one_operand_may_be_square(dims):
    assert (
        tuple(with_dims(*dims).quantizer(role).block_dim for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT))
        == dims
    )


@pytest.mark.parametrize("epsilon", [-1.0, math.nan])
def test_a_negative_epsilon_is_refused(epsilon):
    with pytest.raises(ValueError, match=f"amax_epsilon is {epsilon}, but cannot be negative"):
        Float8BlockScaling(amax_epsilon=epsilon)


@pytest.mark.parametrize(
    ("dims", "expected"),
    [
        ((1, 2, 1), "native"),
        ((1, 1, 1), "some products native, some emulated"),  # wgrad alone
        ((2, 1, 1), "emulated"),
        ((1, 1, 2), "emulated"),
    ],
    ids=str,
)
def test_support_is_that_of_each_product(dims, expected, monkeypatch):
    monkeypatch.setattr("recipes.recipe.compute_capability", lambda device: (9, 0))
    assert with_dims(*dims).support(torch.device("cuda")) == expected
