"""FP8 rowwise: scales and codes against numpy and ml_dtypes, layout, empty groups, products in float64."""
# T rows, G groups, K in features, N out features

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fuser import Sequential, autocast, ops
from ops.products.paths import GroupedPath, SplitPath
from recipes import (
    E4M3,
    E5M2,
    CustomRecipe,
    Float8RowwiseScaling,
    Format,
    FormatQuantizer,
    Role,
    ScaleSpec,
    Splits,
)
from recipes.casts.cast import kernels_of
from recipes.casts.scale_rules import Float32Scale
from recipes.float8_rowwise import RowwiseScalingQuantizer
from recipes.tensors.formats import ALL
from tests.reference import assert_close, gradients

INF, NAN = float("inf"), float("nan")
NUMPY_DTYPE = {E4M3: ml_dtypes.float8_e4m3fn, E5M2: ml_dtypes.float8_e5m2}
FORMS = pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda form: form.name)
SCALES = pytest.mark.parametrize("power_2", [False, True], ids=["float32", "power-of-two"])
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


def oracle(x: torch.Tensor, quantizer: RowwiseScalingQuantizer) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes [R, K] and scale_inv [R] of the rows of a matrix, in numpy's float32."""
    values, form = x.float().numpy(), quantizer.form
    amax = np.fmax(np.nanmax(np.abs(values), axis=1, initial=0), np.float32(quantizer.amax_epsilon))
    with np.errstate(all="ignore"):
        scale = np.minimum(np.float32(form.max) / amax, np.finfo(np.float32).max)
        scale = np.where((amax == 0) | np.isinf(amax), np.float32(1), scale)
        if quantizer.power_2_scale:
            scale = np.ldexp(np.float32(1), np.frexp(scale)[1] - 1)
        codes = np.clip(values * scale[:, None], -form.max, form.max).astype(NUMPY_DTYPE[form])
    return torch.from_numpy(codes.view(np.uint8)), torch.from_numpy(np.float32(1) / scale)


def assert_codes(found: torch.Tensor, expected: torch.Tensor, form) -> None:
    """Equal codes; NaN may have any sign and payload."""
    found, expected = (t.contiguous().view(torch.uint8) for t in (found, expected))
    nan = expected.view(form.dtype).float().isnan()
    assert torch.equal(found.view(form.dtype).float().isnan(), nan)
    assert torch.equal(found.masked_fill(nan, 0), expected.masked_fill(nan, 0))


@FORMS
@SCALES
@pytest.mark.parametrize("epsilon", [0.0, 1e-3])
@pytest.mark.parametrize("shape", [(5, 7), (33, 130), (1, 1), (64, 32)], ids=str)
def test_codes_and_scales_against_numpy(form, power_2, epsilon, shape):
    x = torch.randn(shape) * torch.exp2(torch.randint(-140, 100, (shape[0], 1)).float())
    x.view(-1)[::11] = NAN
    if shape[0] > 3:
        x[1], x[2], x[3, 0] = 0.0, NAN, -INF
    quantizer = RowwiseScalingQuantizer(form, power_2, epsilon)
    q = quantizer.quantize(x, columnwise=True)
    codes, scale_inv = oracle(x, quantizer)
    assert_codes(q.rowwise.codes, codes, form)
    assert torch.equal(q.rowwise.scale_inv, scale_inv[None])
    codes, scale_inv = oracle(x.T, quantizer)
    padded = -(-shape[0] // 32) * 32
    assert q.columnwise.codes.shape == (shape[1], padded) and q.columnwise.codes.is_contiguous()
    assert_codes(q.columnwise.codes[:, : shape[0]], codes, form)
    assert not q.columnwise.codes[:, shape[0] :].view(torch.uint8).any()
    assert torch.equal(q.columnwise.scale_inv, scale_inv[None])


@SCALES
def test_weights_have_a_scale_for_each_output_row_and_for_each_column(power_2):
    w = torch.randn(3, 20, 40) * torch.rand(3, 20, 1) * torch.rand(3, 1, 40)
    quantizer = RowwiseScalingQuantizer(E4M3, power_2)
    q = quantizer.quantize_stacked(w, columnwise=True)
    assert q.rowwise.scale_inv.shape == (3, 1, 20) and q.columnwise.scale_inv.shape == (3, 1, 40)
    assert q.rowwise.codes.shape == (3, 20, 40) and q.columnwise.codes.shape == (3, 40, 20)
    for g in range(3):
        for copy, matrix in ((q.rowwise, w[g]), (q.columnwise, w[g].T)):
            codes, scale_inv = oracle(matrix, quantizer)
            assert_codes(copy.codes[g], codes, E4M3)
            assert torch.equal(copy.scale_inv[g, 0], scale_inv)


def test_rows_of_no_group_have_no_codes_and_empty_groups_a_scale_of_one():
    x = torch.randn(20, 24)
    x[12:] = NAN
    q = RowwiseScalingQuantizer(E4M3).quantize_grouped(
        x, Splits.make([5, 0, 7], rows=20, device="cpu"), columnwise=True
    )
    assert q.rowwise.scale_inv.shape == (1, 20) and q.columnwise.scale_inv.shape == (3, 24)
    assert torch.equal(q.columnwise.scale_inv[1], torch.ones(24))
    assert not q.rowwise.codes[12:].view(torch.uint8).any()
    assert torch.equal(q.rowwise.scale_inv[0, 12:], torch.ones(8))
    assert not q.columnwise.codes[:, 64:].view(torch.uint8).any(), "three groups of at most 32 rows: two have some"


@settings(max_examples=25)
@given(sizes=st.lists(st.integers(0, 40), min_size=1, max_size=6), tail=st.integers(0, 9), seed=st.integers(0, 99))
def test_each_group_is_quantized_as_if_alone(sizes, tail, seed):
    total = sum(sizes)
    x = torch.randn(total + tail, 40, generator=torch.Generator().manual_seed(seed))
    x[total:] = NAN
    quantizer, splits = RowwiseScalingQuantizer(E4M3), Splits.make(sizes, rows=len(x), device="cpu")
    grouped = quantizer.quantize_grouped(x, splits, columnwise=True)
    for member, part in zip(grouped.unbind(), x[:total].split(sizes), strict=True):
        for mine, other in zip(member.tensors(), quantizer.quantize(part, columnwise=True).tensors(), strict=True):
            assert mine.shape == other.shape and torch.equal(mine, other)
    assert not grouped.columnwise.dequantize(splits)[total:].any()


RECIPES = {
    "default": Float8RowwiseScaling(),
    "E5M2 gradients, powers of two": Float8RowwiseScaling(Format.HYBRID, power_2_scale=True, amax_epsilon=1e-3),
}


def check_layer(recipe, device: str, sizes: list[int], tail: int, K: int, N: int) -> None:
    """y and all gradients on both paths, of the dequantized operands of each product in float64; empty groups."""
    total, active = sum(sizes) + tail, slice(sum(sizes))
    op = ops.GroupedLinear(len(sizes), K, N, device=device, dtype=torch.float32)
    x0, dy = torch.randn(total, K, device=device), torch.randn(total, N, device=device)
    results = []
    for path in ("grouped", "split"):
        op.zero_grad()
        x = x0.clone().requires_grad_()
        with autocast(recipe=recipe):
            y = Sequential(op, path=path)(x, split_sizes=torch.tensor(sizes, device=device))
        y.backward(dy)
        results.append({"y": y, **gradients({"x": x, **dict(op.named_parameters())})})

    def held(t: torch.Tensor, role: Role, columnwise: bool) -> torch.Tensor:
        made = recipe.quantizer(role).quantize(t, columnwise=True)
        copy = made.columnwise if columnwise else made.rowwise
        return copy.dequantize().double()

    expected = {name: torch.zeros_like(tensor, dtype=torch.float64) for name, tensor in results[0].items()}
    parts = zip(x0[active].split(sizes), dy[active].split(sizes), expected["y"][active].split(sizes),
                expected["gradient of x"][active].split(sizes), strict=True)  # fmt: skip
    for group, (x, d, y, dx) in enumerate(parts):
        if len(x):
            w = op.weight[group].detach()
            y += held(x, Role.INPUT, False) @ held(w, Role.WEIGHT, False).T + op.bias[group].detach().double()
            dx += held(d, Role.GRAD_OUTPUT, False) @ held(w, Role.WEIGHT, True)
            expected["gradient of weight"][group] = held(d, Role.GRAD_OUTPUT, True).T @ held(x, Role.INPUT, True)
            expected["gradient of bias"][group] = d.double().sum(0)
    for result in results:
        if device == "cpu":
            assert_close(result, expected)
            continue
        for name, found in result.items():  # fast accumulation: `docs/recipes.md`
            error = (found.double() - expected[name]).abs().max()
            assert error <= 2e-2 * expected[name].abs().max().clamp(min=1), name


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("device", DEVICES)
def test_both_paths_against_float64(recipe, device):
    check_layer(recipe, device, [5, 0, 40, 2], 13, 48, 32)
    check_layer(recipe, device, [0, 0], 4, 16, 16)
    check_layer(recipe, device, [37], 0, 33, 7)


@settings(max_examples=20)
@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=5), tail=st.integers(0, 5), K=st.integers(1, 40),
    N=st.integers(1, 40),
)  # fmt: skip
def test_any_splits_against_float64(sizes, tail, K, N):
    check_layer(RECIPES["default"], "cpu", sizes, tail, K, N)


@pytest.mark.parametrize("kind", [GroupedPath, SplitPath])
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_scales_are_applied_to_products_of_codes(recipe, kind, monkeypatch):
    """As on Hopper, by the references of the kernels: nothing is dequantized."""
    for module in (ops.products.paths, ops.products.product):
        monkeypatch.setattr(module, "operands", None)
    sizes, path = [5, 0, 40, 2], kind(recipe, capability=(9, 0))
    splits = Splits.make(sizes, rows=60, device="cpu")
    x, dy, w, bias = torch.randn(60, 300), torch.randn(60, 20), torch.randn(4, 20, 300), torch.randn(4, 20)
    x[47:] = dy[47:] = NAN
    both = {"rowwise": True, "columnwise": True}
    of_x, of_w, of_dy = (recipe.quantizer(role) for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT))
    x_q, dy_q = path.quantize(x, splits, of_x, **both), path.quantize(dy, splits, of_dy, **both)
    w_q = path.weight(w, of_w, **both)
    before = torch.randn(4, 20, 300)
    found = {
        "y": path.fprop(x_q, w_q, bias=bias),
        "dx": path.dgrad(dy_q, w_q),
        "dw": path.wgrad(dy_q, path.for_wgrad(x_q)),
        "sum": path.wgrad(dy_q, path.for_wgrad(x_q), out=before.clone(), accumulate=True, reverse=True),
    }
    shapes = {"y": (60, 20), "dx": (60, 300), "dw": (4, 20, 300)}
    expected = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for g, (first, size) in enumerate(zip((0, 5, 5, 45), sizes, strict=True)):
        rows = slice(first, first + size)
        if size:
            q_x, q_dy = of_x.quantize(x[rows], **both), of_dy.quantize(dy[rows], **both)
            q_w = of_w.quantize(w[g], **both)
            row_x, column_x, row_dy, column_dy, row_w, column_w = (
                copy.dequantize().double() for q in (q_x, q_dy, q_w) for copy in (q.rowwise, q.columnwise)
            )
            expected["y"][rows] = row_x @ row_w.T + bias[g].double()
            expected["dx"][rows] = row_dy @ column_w
            expected["dw"][g] = column_dy.T @ column_x
    assert_close(found, expected | {"sum": before.double() + expected["dw"].flip(0)})


@pytest.mark.gpu
def test_products_are_those_of_torch():
    """`torch._scaled_grouped_mm` of the same codes and scales: both within fast accumulation of the exact product."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("torch multiplies FP8 with a scale a row on Hopper alone.")
    recipe, sizes = Float8RowwiseScaling(), [256, 0, 130, 500]
    x, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((886, 512), (4, 256, 512)))
    splits, path = Splits.make(sizes, rows=886, device="cuda"), GroupedPath(recipe, capability=(9, 0))
    x_q = path.quantize(x, splits, recipe.quantizer(Role.INPUT), rowwise=True, columnwise=False)
    w_q = path.weight(w, recipe.quantizer(Role.WEIGHT), rowwise=True, columnwise=False)
    theirs = torch._scaled_grouped_mm(
        x_q.rowwise.codes, w_q.rowwise.codes.transpose(1, 2), x_q.rowwise.scale_inv[0], w_q.rowwise.scale_inv[:, 0],
        offs=splits.ends, out_dtype=torch.bfloat16, use_fast_accum=True,
    )  # fmt: skip
    ours = path.fprop(x_q, w_q)
    assert (ours.float() - theirs.float()).abs().max() <= 0.02 * theirs.float().abs().max()


def test_kernels_and_products_are_chosen_by_the_format():
    """A format of one's own that is the same value is cast by the same kernels and multiplied natively, too."""
    spec = Float8RowwiseScaling().quantizer(Role.INPUT).spec
    twin = ScaleSpec(E4M3, (1, ALL), Float32Scale(), "transposed", 32)
    natural = replace(twin, columnwise="natural")
    assert twin == spec and kernels_of(twin) is kernels_of(spec) is not None and kernels_of(natural) is None
    for product in ("fprop", "dgrad", "wgrad"):
        mine, other = (CustomRecipe(lambda role, own=own: FormatQuantizer(own)) for own in (twin, natural))
        assert mine.why_not_native(product, torch.bfloat16, (9, 0)) is None
        assert "no float8 codes" in other.why_not_native(product, torch.bfloat16, (9, 0))
