"""Grouped float8 GEMM: reference against a naive float64 loop; kernels under the interpreter and on the GPU."""
# T rows, G groups, R summed features, C features that come out; P columns of padded groups

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ops.kernels.grouped_gemm import float8 as gg
from ops.kernels.grouped_gemm.float8 import grouped_gemm_nt_float8, grouped_gemm_tn_float8
from ops.kernels.grouped_gemm.float8_scales import scale_layout
from ops.kernels.grouped_gemm.measured_tiles import shared_memory_limit
from ops.kernels.grouped_gemm.ragged_tma import takes_descriptors
from ops.kernels.grouped_gemm.tile_rules_float8 import BLOCK, k_grouped_float8_config, m_grouped_float8_config, promotes
from recipes.native_products import why_not_float8
from recipes.tensors.formats import E4M3, E5M2
from recipes.tensors.splits import Splits
from tests.grouped_cases import DEVICES, Exact, group_rows, poisoned
from tests.pairwise import rest

# Triton 3.6's interpreter turns arrays of one element into loop bounds, which numpy >= 2.4 will refuse.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),
    # Its NaN codes come out as numbers, in rows that are not stored.
    pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning"),
]

# per tensor, per tensor promoted, a scale a row and column, the same promoted, 1x128 x 128x128, 1x128 x 1x128
MODES = ["fast", "split", "vector", rest("vector-split"), "square", "row"]
PAIRS = [(E4M3, E4M3), (E4M3, E5M2), (E5M2, E4M3)]
PAIR_IDS = ["E4M3-E4M3", "E4M3-E5M2", "E5M2-E4M3"]
IMPRECISE = 2.0**-13  # what an instruction of Hopper's tensor cores may lose of the largest term: 14 bits are kept
TERMS_OF_AN_INSTRUCTION = 32


class Case(NamedTuple):
    """sizes of the groups, rows past their sum, summed features, features that come out."""

    sizes: list[int]
    tail: int = 0
    R: int = 256
    C: int = 144


CASES = {
    # ordinary: through descriptors
    "three groups": Case([5, 7, 3]),
    "several tiles": Case([150, 90, 70], R=144, C=272),
    "tile - 1, tile, tile + 1": Case([63, 64, 65], R=16, C=8),
    # odd sizes: through pointers
    "odd features": Case([5, 7, 3], R=33, C=70),
    "one feature": Case([5, 7, 3], R=1, C=1),
    "block + 1": Case([129, 4], R=129, C=129),
    "odd outputs alone": Case([9, 4], R=144, C=131),
    # empty groups
    "empty groups": Case([0, 4, 0, 0, 9, 0]),
    "all empty": Case([0, 0, 0], tail=70),
    "no rows": Case([0, 0]),
    # rows of no group
    "tail": Case([5, 7, 3], tail=130, R=80, C=48),
    "odd tail": Case([64, 64], tail=1, R=31, C=33),
    # one group
    "one group": Case([100]),
    "one takes all": Case([0, 0, 200, 0]),
}
ALL_CASES = [pytest.param(case, id=name) for name, case in CASES.items()]
MANY_GROUPS = Case([g % 3 for g in range(257)], tail=9, R=16, C=16)


class Operands(NamedTuple):
    splits: Splits
    a: Tensor  # [T, R] codes
    a_scale: Tensor
    b: Tensor  # [G, C, R] codes
    b_scale: Tensor
    dy: Tensor  # [C, P] codes
    dy_scale: Tensor
    x: Tensor  # [R, P] codes
    x_scale: Tensor
    aligned: Tensor  # [G + 1]
    bias: Tensor  # [G, C]
    scales: Tensor  # [T]


def operands(
    case: Case, mode: str, *, pair=(E4M3, E4M3), seed: int = 0, device: str = "cpu", integers: bool = False
) -> Operands:
    """Codes, scales and factors of rows of no group are NaN, as are block scales of columns of no group."""
    generator = torch.Generator().manual_seed(seed)

    def codes(*shape: int, form) -> Tensor:
        if integers:
            return torch.randint(-3, 4, shape, generator=generator).float().to(form.dtype)
        return torch.randn(shape, generator=generator).to(form.dtype)

    def scale(*shape: int) -> Tensor:
        if integers:
            return 2.0 ** torch.randint(-1, 2, shape, generator=generator)
        return torch.rand(shape, generator=generator) + 0.5

    (G, R, C), active = (len(case.sizes), case.R, case.C), sum(case.sizes)
    T = active + case.tail
    blocks = mode in ("square", "row")
    vectors = mode.startswith("vector")
    splits = Splits.make(torch.tensor(case.sizes), rows=T, device="cpu")
    unit = BLOCK if blocks else 16
    aligned, P = splits.aligned(unit), splits.aligned_capacity(unit)
    steps = -(-R // BLOCK)
    o = Operands(
        splits,
        codes(T, R, form=pair[0]),
        scale(1 if vectors else steps, T) if blocks or vectors else scale(G),
        codes(G, C, R, form=pair[1]),
        scale(*{"square": (G, -(-C // BLOCK), steps), "row": (G, steps, C)}.get(mode, (G, 1, C) if vectors else (G,))),
        codes(C, P, form=pair[0]),
        scale(G, 1, C) if vectors else scale(P // BLOCK, C) if blocks else scale(G),
        codes(R, P, form=pair[1]),
        scale(G, 1, R) if vectors else scale(P // BLOCK, R) if blocks else scale(1)[0],
        aligned,
        scale(G, C),
        scale(T),
    )
    nan = torch.tensor(torch.nan)
    for code in (o.dy, o.x):
        for g, rows in group_rows(splits):
            code[:, aligned[g] + rows.stop - rows.start : aligned[g + 1]] = 0
        code[:, aligned[-1] :] = nan.to(code.dtype)
    o.a[active:] = nan.to(o.a.dtype)
    o.scales[active:] = nan
    if blocks or vectors:
        o.a_scale[:, active:] = nan
    if vectors:
        for g, size in enumerate(case.sizes):
            for code_scale in (o.dy_scale, o.x_scale) if not size else ():
                code_scale[g] = nan
    if blocks:
        o.dy_scale[aligned[-1] // BLOCK :] = nan
        o.x_scale[aligned[-1] // BLOCK :] = nan
    splits = Splits.make(torch.tensor(case.sizes, device=device), rows=T, device=device)
    return Operands(splits, *(tensor.to(device) for tensor in o[1:]))


def naive(o: Operands, *, extras: bool) -> dict[str, Exact]:
    """Products of dequantized operands in float64, and the same of absolute values."""
    C, R = o.b.shape[1:]
    b = o.b.double() * spread_b(o, C, R).double()
    y, dw = [], []
    for sign in (lambda t: t, torch.abs):
        out = torch.zeros(o.splits.rows, C, dtype=torch.float64, device=o.a.device)
        grads = torch.zeros(o.b.shape, dtype=torch.float64, device=o.a.device)
        for g, rows in group_rows(o.splits):
            scale = o.a_scale[g] if o.a_scale.dim() == 1 else spread(o.a_scale[:, rows], R).T
            out[rows] = sign(o.a[rows].double() * scale.double()) @ sign(b[g]).T
            if extras:
                out[rows] += o.bias[g].double() * o.scales[rows, None].double()
            columns = slice(*o.aligned[g : g + 2].tolist())
            both = []
            for codes, scale in ((o.dy, o.dy_scale), (o.x, o.x_scale)):
                if scale.dim() == 3:
                    scale = scale[g].T
                elif scale.dim() == 2:
                    scale = spread(scale, o.x.shape[1])[columns].T
                elif scale.dim() == 1:
                    scale = scale[g]
                both.append(sign(codes[:, columns].double() * scale.double()))
            if columns.start < columns.stop:
                grads[g] = both[0] @ both[1].T
        y.append(out)
        dw.append(grads)
    return {"tn": Exact(y[0], y[1], R), "nt": Exact(dw[0], dw[1], max(map(int, o.splits.tolist()), default=0))}


def spread(scale: Tensor, length: int) -> Tensor:
    return scale.expand(length, -1) if len(scale) == 1 else scale.repeat_interleave(BLOCK, 0)[:length]


def spread_b(o: Operands, C: int, R: int) -> Tensor:
    """b's scales, [G, C, R], [G, C, 1] or [G, 1, 1]."""
    scale, layout = o.b_scale, scale_layout(o.a_scale, o.b_scale, C, R)
    if layout == "tensor":
        return scale[:, None, None]
    if layout == "vector":
        return scale.transpose(1, 2)
    if layout == "row":
        return scale.repeat_interleave(BLOCK, 1)[:, :R].transpose(1, 2)
    return scale.repeat_interleave(BLOCK, 1)[:, :C].repeat_interleave(BLOCK, 2)[:, :, :R]


def launched(o: Operands, mode: str, *, extras: bool, out_dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    """What the Triton kernels make of NaN-filled outputs."""
    (T, R), (G, C, _) = o.a.shape, o.b.shape
    bias, scales = (o.bias, o.scales) if extras else (None, None)
    tn, nt = (poisoned(*shape, like=o.bias, dtype=out_dtype) for shape in ((T, C), (G, C, R)))
    split, x_scale = mode.endswith("split"), o.x_scale if o.x_scale.dim() else o.x_scale.expand(G)
    gg.grouped_gemm_tn_float8_triton(o.a, o.a_scale, o.b, o.b_scale, o.splits.offsets, bias, scales, tn, split)
    gg.grouped_gemm_nt_float8_triton(o.dy, o.dy_scale, o.x, x_scale, o.aligned, nt, split)
    return {"tn": tn, "nt": nt}


def dispatched(o: Operands, mode: str, *, extras: bool, out_dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    bias, scales = (o.bias, o.scales) if extras else (None, None)
    about = {"out_dtype": out_dtype, "split_accumulation": mode.endswith("split")}
    return {
        "tn": grouped_gemm_tn_float8(o.a, o.a_scale, o.b, o.b_scale, o.splits, bias_GC=bias, scales_T=scales, **about),
        "nt": grouped_gemm_nt_float8(o.dy, o.dy_scale, o.x, o.x_scale, o.aligned, **about),
    }


def allowed_error(exact: Exact, mode: str, dtype: torch.dtype, tensor_cores: bool) -> Tensor:
    """What the mode may lose of the sum of absolute products, and half a last place of the output."""
    terms = exact.terms if mode in ("fast", "vector") else min(exact.terms, BLOCK)
    lost = (-(-terms // TERMS_OF_AN_INSTRUCTION)) * IMPRECISE if tensor_cores else 0.0
    allowed = (lost + (exact.terms + 5) * 2.0**-22) * exact.magnitude
    limits = torch.finfo(dtype)
    return allowed + (exact.value.abs() + allowed) * limits.eps / 2 + limits.smallest_normal * limits.eps / 2


def assert_all_close(actual: dict[str, Tensor], exact: dict[str, Exact], o: Operands, mode: str) -> None:
    for name, result in actual.items():
        assert result.shape == exact[name].value.shape
        allowed = allowed_error(exact[name], mode, result.dtype, result.is_cuda)
        error = (result.double() - exact[name].value).abs()
        wrong = ~(error <= allowed)
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} wrong, first at {wrong.nonzero()[0]}"
    assert not actual["tn"][sum(o.splits.tolist()) :].any(), "rows of no group are not zero"
    for group, rows in group_rows(o.splits):
        assert rows.start < rows.stop or not actual["nt"][group].any(), f"group {group} is empty, not zero"


# ----------------------------------------------------------------------------------------------------- reference


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "extras"])
@pytest.mark.parametrize("case", ALL_CASES)
def test_cpu_agrees_with_float64(case, extras, mode):
    o = operands(case, mode)
    assert_all_close(dispatched(o, mode, extras=extras), naive(o, extras=extras), o, mode)


# ------------------------------------------------------------------------------------------------------- kernels


def rows_of(columns: Tensor, splits: Splits, aligned: Tensor) -> Tensor:
    """The rowwise codes [T, N] of a columnwise copy; those of no group are NaN."""
    rows = torch.full((splits.rows, columns.shape[0]), torch.nan, device=columns.device).to(columns.dtype)
    for g, those in group_rows(splits):
        rows.view(torch.uint8)[those] = columns.view(torch.uint8)[:, aligned[g] :][:, : those.stop - those.start].T
    return rows


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("split", [False, True], ids=["fast", "split"])
@pytest.mark.parametrize("case", ALL_CASES)
def test_a_weight_gradient_of_rows_has_the_bits_of_columns(case, split, out_dtype, device):
    o = operands(case, "split" if split else "fast", pair=(E5M2, E4M3), device=device)
    G, N, K = o.b.shape
    rows, old = rows_of(o.dy, o.splits, o.aligned), torch.randn(G, N, K, device=device).to(out_dtype)
    about = {"split_accumulation": split, "out_dtype": out_dtype}
    for accumulate in (False, True):
        found, expected = (
            grouped_gemm_nt_float8(
                dy, o.dy_scale, o.x, o.x_scale, o.aligned, row_offsets=offsets, out=old.clone(),
                accumulate=accumulate, reverse=accumulate, **about,
            )
            for dy, offsets in ((rows, o.splits.offsets), (o.dy, None))
        )  # fmt: skip
        assert torch.equal(found, expected)


@pytest.mark.launches("m_grouped_float8_persistent_kernel", "k_grouped_float8_persistent_kernel")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("mode", [rest(mode) if mode == "vector" else mode for mode in MODES])
@pytest.mark.parametrize("case", ALL_CASES)
def test_kernels_agree_with_float64(case, mode, device):
    o = operands(case, mode, device=device)
    for extras in (False, True):
        assert_all_close(launched(o, mode, extras=extras), naive(o, extras=extras), o, mode)


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize(
    "case",
    [
        "tail",
        pytest.param("odd tail", marks=pytest.mark.launches("m_grouped_kernel", "k_grouped_kernel")),
    ],
)
def test_small_integers_are_exact(case, pair, mode, out_dtype, device):
    o = operands(CASES[case], mode, pair=pair, integers=True, device=device)
    exact = naive(o, extras=True)
    for name, actual in launched(o, mode, extras=True, out_dtype=out_dtype).items():
        assert torch.equal(actual, exact[name].value.to(out_dtype)), name


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["tail", "odd tail"])
@pytest.mark.parametrize("split", [False, rest(True)])
def test_scales_of_rows_multiply_exact_sums_before_those_of_columns(split, case, device):
    """fl(fl(sum * row) * column), bit for bit: sums of small integers are exact."""
    mode = "vector-split" if split else "vector"
    o, random = operands(CASES[case], mode, integers=True, device=device), operands(CASES[case], mode, device=device)
    ones = {name: torch.ones_like(getattr(o, name)) for name in ("a_scale", "b_scale", "dy_scale", "x_scale")}
    exact = naive(o._replace(**ones), extras=False)
    scales = {name: getattr(random, name) for name in ones}
    found = launched(o._replace(**scales), mode, extras=False, out_dtype=torch.float32)
    y, dw = exact["tn"].value.float(), exact["nt"].value.float()
    for g, rows in group_rows(o.splits):
        y[rows] = y[rows] * random.a_scale[0, rows, None] * random.b_scale[g]
        if rows.start < rows.stop:
            dw[g] = dw[g] * random.dy_scale[g].T * random.x_scale[g]
    assert torch.equal(found["tn"], y) and torch.equal(found["nt"], dw)


def added_in_triton(o: Operands, split: bool, out: Tensor, accumulate: bool, reverse: bool) -> None:
    x_scale = o.x_scale if o.x_scale.dim() else o.x_scale.expand(len(o.b))
    gg.grouped_gemm_nt_float8_triton(o.dy, o.dy_scale, o.x, x_scale, o.aligned, out, split, accumulate, reverse)


def added_on_any_device(o: Operands, split: bool, out: Tensor, accumulate: bool, reverse: bool) -> None:
    about = {"out": out, "split_accumulation": split, "accumulate": accumulate, "reverse": reverse}
    assert grouped_gemm_nt_float8(o.dy, o.dy_scale, o.x, o.x_scale, o.aligned, **about) is out


@pytest.mark.parametrize(
    ("run", "device"),
    [
        pytest.param(added_on_any_device, "cpu", id="cpu"),
        pytest.param(added_in_triton, "cpu", id="interpreter", marks=pytest.mark.interpreter),
        pytest.param(added_on_any_device, "cuda", id="gpu", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("case", "reverse"), [("empty groups", True), ("odd tail", False)])
def test_a_weight_gradient_is_added_to_matrices_that_stand_apart(case, reverse, mode, out_dtype, run, device):
    """The bits of float32 sums rounded once; what belongs to a group without columns, or lies between, stays."""
    o = operands(CASES[case], mode, device=device)
    G, N, K = o.b.shape
    product = torch.empty(G, N, K, device=device)
    run(o, mode.endswith("split"), product, False, False)
    apart = torch.randn(G, N * K + 8, device=device).to(out_dtype)
    before = apart.clone()
    out = apart.as_strided((G, N, K), (N * K + 8, K, 1))
    expected = (out.float() + (product.flip(0) if reverse else product)).to(out_dtype)
    run(o, mode.endswith("split"), out, True, reverse)
    for group, rows in group_rows(o.splits):
        empty, place = rows.start == rows.stop, G - 1 - group if reverse else group
        assert torch.equal(out[place], before[place, : N * K].view(N, K) if empty else expected[place]), group
    assert torch.equal(apart[:, N * K :], before[:, N * K :])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.slow
def test_kernels_take_more_groups_than_one_step_of_the_search(device):
    o = operands(MANY_GROUPS, "fast", device=device)
    assert_all_close(launched(o, "fast", extras=True), naive(o, extras=True), o, "fast")


# Not under the interpreter, which reads NaN codes as numbers: the reference, or the kernel on the GPU.
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("mode", MODES)
def test_nan_codes_stay_in_their_group(mode, device):
    o = operands(CASES["three groups"], mode, pair=(E5M2, E4M3), device=device)
    o.b[1] = torch.nan
    y = dispatched(o, mode, extras=False)["tn"]
    assert y[5:12].isnan().all() and not y[:5].isnan().any() and not y[12:].isnan().any()


# -------------------------------------------------------------------------------------------------------- errors


def wrong(**changed):
    o = operands(Case([3, 1], R=256, C=32), changed.pop("mode", "fast"))
    return o._replace(**{name: change(getattr(o, name)) for name, change in changed.items()})


@pytest.mark.parametrize(
    ("o", "error", "text"),
    [
        (wrong(a=lambda a: a.float()), TypeError, "codes are torch.float32, but must be torch.float8_e4m3fn or"),
        (wrong(a=lambda a: a[:3]), ValueError, r"shape \[3, 256\], but the splits were made for 4 rows"),
        (wrong(b=lambda b: b.transpose(1, 2)), ValueError, r"\[2, 256, 32\], but must be \[2, C, 256\]"),
        (wrong(b_scale=lambda s: s.double()), ValueError, "b_scale is torch.float64"),
        (wrong(mode="square", a_scale=lambda s: s.T), ValueError, r"a_scale is torch.float32 \[4, 2\]"),
        (wrong(mode="square", b_scale=lambda s: s[:, 0, 0]), ValueError, "one operand has scales of blocks"),
        (wrong(mode="square", a_scale=lambda s: s[:1]), ValueError, "one operand has scales of blocks or vectors"),
        (wrong(mode="vector", b_scale=lambda s: s[:, :, :1]), ValueError, r"b_scale is torch.float32 \[2, 1, 1\]"),
        (wrong(bias=lambda b: b[0]), ValueError, r"bias has shape \[32\], but must be \[2, 32\]"),
        (wrong(scales=lambda s: s[1:]), ValueError, r"scales has shape \[3\], but must be \[4\]"),
    ],
)
def test_wrong_arguments_of_tn_are_named(o, error, text):
    with pytest.raises(error, match=text):
        grouped_gemm_tn_float8(o.a, o.a_scale, o.b, o.b_scale, o.splits, bias_GC=o.bias, scales_T=o.scales)


def test_wrong_rows_are_named():
    o = operands(CASES["tail"], "split")
    rows, offsets = rows_of(o.dy, o.splits, o.aligned), o.splits.offsets
    for row_offsets in (offsets.int(), offsets[1:]):
        with pytest.raises(ValueError, match="Pass splits.offsets"):
            grouped_gemm_nt_float8(rows, o.dy_scale, o.x, o.x_scale, o.aligned, row_offsets=row_offsets)
    with pytest.raises(ValueError, match=r"with row_offsets must be \[T, N\] and \[K, P\]"):
        grouped_gemm_nt_float8(rows[0], o.dy_scale, o.x, o.x_scale, o.aligned, row_offsets=offsets)
    vectors = operands(CASES["tail"], "vector")
    with pytest.raises(ValueError, match="dy_scale is torch.float32"):
        grouped_gemm_nt_float8(rows, vectors.dy_scale, o.x, vectors.x_scale, o.aligned, row_offsets=offsets)


@pytest.mark.parametrize(
    ("o", "error", "text"),
    [
        (wrong(x=lambda x: x.float()), TypeError, "Quantize them"),
        (wrong(x=lambda x: x[:, :16]), ValueError, r"must be \[N, P\] and \[K, P\], P a multiple of 16"),
        (wrong(aligned=lambda a: a.int()), ValueError, r"Pass splits.aligned\(16\)"),
        (wrong(mode="row", dy_scale=lambda s: s.T), ValueError, "dy_scale is torch.float32"),
        (wrong(mode="vector", dy_scale=lambda s: s[:, 0]), ValueError, "dy_scale is torch.float32"),
        (
            wrong(mode="vector", dy_scale=lambda s: s[:, 0, 0]),
            ValueError,
            "one operand has scales of blocks or vectors",
        ),
    ],
)
def test_wrong_arguments_of_nt_are_named(o, error, text):
    with pytest.raises(error, match=text):
        grouped_gemm_nt_float8(o.dy, o.dy_scale, o.x, o.x_scale, o.aligned)


def test_a_buffer_of_the_caller_is_filled():
    o = operands(CASES["tail"], "fast")
    (T, _), (G, C, R) = o.a.shape, o.b.shape
    y, dw = poisoned(C, T, like=o.bias).T, poisoned(G, C, R, like=o.bias)
    assert grouped_gemm_tn_float8(o.a, o.a_scale, o.b, o.b_scale, o.splits, out=y) is y
    assert grouped_gemm_nt_float8(o.dy, o.dy_scale, o.x, o.x_scale, o.aligned, out=dw) is dw
    assert_all_close({"tn": y, "nt": dw}, naive(o, extras=False), o, "fast")


@pytest.mark.parametrize(
    ("capability", "dtypes", "reason"),
    [
        (None, (E4M3.dtype,), "need a CUDA device"),
        ((8, 0), (E4M3.dtype,), "this GPU has 8.0"),
        ((9, 0), (E4M3.dtype, torch.uint8), "an operand has torch.uint8"),
    ],
)
def test_a_reason_is_given_where_float8_cannot_run(capability, dtypes, reason):
    assert reason in why_not_float8(capability, *dtypes)


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
def test_no_reason_is_given_where_float8_runs(capability):
    assert why_not_float8(capability, E4M3.dtype, E5M2.dtype) is None


@pytest.mark.parametrize("capability", [(8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("descriptors", [False, True])
@pytest.mark.parametrize("promote", [False, True])
@pytest.mark.parametrize("layout", ["tensor", "vector", "square", "row"])
def test_tiles_fit_shared_memory(layout, promote, descriptors, capability):
    promote = promotes(layout, promote)
    about = {"promote": promote, "descriptors": descriptors, "capability": capability}
    chosen = []
    for out_dtype in (torch.bfloat16, torch.float32):
        for rows in (8192, 64):
            config = m_grouped_float8_config(rows, 8, layout=layout, out_dtype=out_dtype, gluon=False, **about)
            chosen.append((config, out_dtype.itemsize))
        for add in (False, True) if layout != "square" else ():
            config = k_grouped_float8_config(
                8 * 512, 8, layout=layout, out_dtype=out_dtype, accumulate=add, gluon=False, **about
            )  # fmt: skip
            chosen.append((config, 4 if add else out_dtype.itemsize))
    for config, stored in chosen:
        used = (config.block_m + config.block_n) * config.block_k * config.num_stages
        used += config.block_m * config.block_n // 2 * stored if config.programs else 0
        assert used * max(config.programs, 1) <= shared_memory_limit(capability)
        assert bool(config.programs) == (descriptors and capability in ((9, 0), (10, 0)))
        assert config.block_k == BLOCK, "a step has one scale"
        whole = (config.part_m, config.part_n) == (config.block_m, config.block_n)
        assert whole or (promote and 2 * config.part_m * config.part_n == config.block_m * config.block_n)


@pytest.mark.parametrize("shape", [(5, 33), (2, 3, 16), (4, 1), (0, 5)])
def test_rows_of_codes_are_aligned_by_zeros(shape):
    codes = torch.randn(shape).to(E4M3.dtype)
    for given in (codes, codes.transpose(-1, -2), torch.cat([codes, codes], -1)[..., 1 : shape[-1] + 1]):
        ready = gg.with_aligned_rows(given)
        assert ready.numel() == 0 or takes_descriptors(ready)
        assert torch.equal(ready[..., : given.shape[-1]].float(), given.float())
        assert not ready[..., given.shape[-1] :].float().any()


@pytest.mark.interpreter
def test_launchers_are_sound_custom_ops():
    o, checks = operands(CASES["tail"], "row"), ("test_faketensor",)  # test_schema cannot compare float8
    y, dw = torch.empty(o.a.shape[0], o.b.shape[1]), torch.empty(o.b.shape)
    arguments = (o.a, o.a_scale, o.b, o.b_scale, o.splits.offsets, o.bias, None, y, False)
    torch.library.opcheck(torch.ops.fuser.grouped_gemm_tn_float8.default, arguments, test_utils=checks)
    arguments = (o.dy, o.dy_scale, o.x, o.x_scale, o.aligned, dw, False)
    torch.library.opcheck(torch.ops.fuser.grouped_gemm_nt_float8.default, arguments, test_utils=checks)


# ------------------------------------------------------------------------------------------------------------ GPU

LARGE = Case([700, 0, 1500, 77, 128, 1000], tail=384, R=2048, C=1536)


@pytest.mark.gpu
@pytest.mark.parametrize("pair", PAIRS, ids=PAIR_IDS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("case", [LARGE, LARGE._replace(R=2040, C=1530)], ids=["aligned", "odd"])
def test_large_shapes(case, mode, pair):
    o = operands(case, mode, pair=pair, device="cuda")
    assert_all_close(dispatched(o, mode, extras=True, out_dtype=torch.float32), naive(o, extras=True), o, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("rows", [200, 1100], ids=["by a queue", "in order"])
def test_columns_of_several_bands(mode, rows):
    """Tiles are taken in bands of 2048 rows or columns."""
    o = operands(Case([rows, 0, 2 * rows + 3, 7], tail=129, R=256, C=7 * 1024 + 128), mode, device="cuda")
    exact = naive(o, extras=False)
    for out_dtype in (torch.bfloat16, torch.float32):
        assert_all_close(dispatched(o, mode, extras=False, out_dtype=out_dtype), exact, o, mode)


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_repeats_give_the_same_bits(mode):
    o = operands(LARGE, mode, device="cuda")
    first = dispatched(o, mode, extras=True)
    for _ in range(10):
        for name, again in dispatched(o, mode, extras=True).items():
            assert torch.equal(first[name], again), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
@pytest.mark.parametrize("mode", MODES)
def test_dispatch_never_waits_for_the_device(mode):
    o = operands(LARGE, mode, device="cuda")
    dispatched(o, mode, extras=True)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        dispatched(o, mode, extras=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("mode", MODES)
def test_graph_replay_with_other_splits_equals_eager(mode):
    o = operands(Case([128, 128, 128, 128], R=256, C=144), mode, device="cuda")  # no scale of a group is NaN
    sizes, unit = torch.tensor([128, 256, 0, 128], device="cuda"), 16 if mode in ("fast", "split") else BLOCK

    def step() -> dict[str, Tensor]:
        splits = Splits.make(sizes, rows=512, device="cuda")
        return dispatched(o._replace(splits=splits, aligned=splits.aligned(unit)), mode, extras=True)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for other in ([0, 512, 0, 0], [128, 128, 128, 128], [0, 0, 0, 0], [256, 0, 0, 128]):
        sizes.copy_(torch.tensor(other))
        graph.replay()
        replayed = {name: result.clone() for name, result in captured.items()}
        for name, eager in step().items():
            assert torch.equal(replayed[name], eager), (name, other)
