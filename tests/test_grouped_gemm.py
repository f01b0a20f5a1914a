"""Grouped GEMM: references and CPU path against a naive float64 loop; kernels under the interpreter and on the GPU."""

from itertools import product

import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ops.kernels.grouped_gemm import high_precision as gg
from ops.kernels.grouped_gemm.bias_grad import grouped_bias_grad, grouped_bias_grad_ref, grouped_bias_grad_triton
from ops.kernels.grouped_gemm.high_precision import grouped_gemm_nn, grouped_gemm_nt, grouped_gemm_tn
from ops.kernels.grouped_gemm.measured_tiles import Gemm, why_not_tile
from ops.kernels.grouped_gemm.ragged_tma import takes_descriptors
from ops.kernels.grouped_gemm.tile_rules import MANY_ROWS, k_grouped_config, m_grouped_config
from recipes.tensors.splits import Splits
from recipes.triton.rounding import round_to
from recipes.triton.row_slots import find_tile
from tests.grouped_cases import (
    CASES,
    DEVICES,
    MANY_GROUPS,
    TILE,
    Case,
    Exact,
    Operands,
    assert_close,
    cases,
    group_rows,
    naive_gemm,
    operands,
    poisoned,
    tiles_of_groups,
)

# Triton 3.6's interpreter turns arrays of one element into loop bounds, which numpy >= 2.4 will refuse.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

CPU_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KERNEL_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_CASES = [pytest.param(case, id=name) for name, case in CASES.items()]
SEEDS = st.integers(0, 2**32 - 1)
FEATURES = st.integers(1, 40)


def naive_bias_grad(dy: Tensor, splits: Splits, scales: Tensor | None = None) -> Exact:
    ones = torch.ones(splits.rows, 1, device=dy.device) if scales is None else scales[:, None]
    exact = naive_gemm("NT", dy, ones, splits)
    return Exact(exact.value[..., 0], exact.magnitude[..., 0], exact.terms)


def references(o: Operands, *, extras: bool) -> dict[str, Exact]:
    alpha, bias, scales = (o.alpha, o.bias, o.scales) if extras else (None, None, None)
    return {
        "tn": naive_gemm("TN", o.x, o.w, o.splits, alpha=alpha, bias=bias, scales=scales),
        "nn": naive_gemm("NN", o.dy, o.w, o.splits, alpha=alpha),
        "nt": naive_gemm("NT", o.dy, o.x, o.splits, alpha=alpha),
        "db": naive_bias_grad(o.dy, o.splits, scales),
    }


def dispatched(o: Operands, *, extras: bool, out_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    alpha, bias, scales = (o.alpha, o.bias, o.scales) if extras else (None, None, None)
    tn = grouped_gemm_tn(o.x, o.w, o.splits, bias_GN=bias, scales_T=scales, alpha_G=alpha, out_dtype=out_dtype)
    return {
        "tn": tn,
        "nn": grouped_gemm_nn(o.dy, o.w, o.splits, alpha_G=alpha, out_dtype=out_dtype),
        "nt": grouped_gemm_nt(o.dy, o.x, o.splits, alpha_G=alpha, out_dtype=out_dtype),
        "db": grouped_bias_grad(o.dy, o.splits, scales_T=scales, out_dtype=out_dtype),
    }


def plain_torch(o: Operands, *, extras: bool) -> dict[str, Tensor]:
    alpha, bias, scales = (o.alpha, o.bias, o.scales) if extras else (None, None, None)
    return {
        "tn": gg.grouped_gemm_tn_ref(o.x, o.w, o.splits, bias_GN=bias, scales_T=scales, alpha_G=alpha),
        "nn": gg.grouped_gemm_nn_ref(o.dy, o.w, o.splits, alpha_G=alpha),
        "nt": gg.grouped_gemm_nt_ref(o.dy, o.x, o.splits, alpha_G=alpha),
        "db": grouped_bias_grad_ref(o.dy, o.splits, scales_T=scales),
    }


def launched(o: Operands, *, extras: bool, out_dtype: torch.dtype | None = None) -> dict[str, Tensor]:
    """What the Triton kernels make of NaN-filled outputs."""
    alpha, bias, scales = (o.alpha, o.bias, o.scales) if extras else (None, None, None)
    (rows, N), (groups, _, K), offsets = o.dy.shape, o.w.shape, o.splits.offsets
    out = {
        name: poisoned(*shape, like=o.x, dtype=out_dtype)
        for name, shape in {"tn": (rows, N), "nn": (rows, K), "nt": (groups, N, K), "db": (groups, N)}.items()
    }
    gg.m_grouped_triton(o.x, o.w, offsets, bias, scales, alpha, out["tn"], transposed=True, tf32=False)
    gg.m_grouped_triton(o.dy, o.w, offsets, None, None, alpha, out["nn"], transposed=False, tf32=False)
    gg.grouped_gemm_nt_triton(o.dy, o.x, offsets, alpha, out["nt"], tf32=False)
    grouped_bias_grad_triton(o.dy, None, offsets, scales, out["db"])
    return out


def assert_all_close(actual: dict[str, Tensor], exact: dict[str, Exact], o: Operands) -> None:
    for name, result in actual.items():
        assert_close(name, result, exact[name], operand_dtype=o.x.dtype)
    active = sum(o.splits.tolist())
    assert not actual["tn"][active:].any() and not actual["nn"][active:].any(), "rows of no group are not zero"
    for group, rows in group_rows(o.splits):
        if rows.start == rows.stop:
            assert not actual["nt"][group].any() and not actual["db"][group].any(), f"group {group} is empty, not zero"


# --------------------------------------------------------------------------------------- references and CPU path


@pytest.mark.parametrize("run", [dispatched, plain_torch])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "extras"])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("case", [*ALL_CASES, pytest.param(MANY_GROUPS, id="257 groups")])
def test_cpu_agrees_with_float64(case, dtype, extras, run):
    o = operands(case, dtype)
    assert_all_close(run(o, extras=extras), references(o, extras=extras), o)


@pytest.mark.slow
@settings(max_examples=500)
@given(cases(40, st.tuples(FEATURES, FEATURES)), st.sampled_from(CPU_DTYPES), st.booleans(), SEEDS)
def test_cpu_agrees_with_float64_for_any_splits(case, dtype, extras, seed):
    o = operands(case, dtype, seed=seed)
    exact = references(o, extras=extras)
    for run in (dispatched, plain_torch):
        assert_all_close(run(o, extras=extras), exact, o)


@pytest.mark.parametrize("extras", [False, True], ids=["plain", "extras"])
def test_small_integers_are_exact(extras):
    o = operands(Case([5, 0, 7], tail=2, K=10, N=6), torch.bfloat16, integers=True)
    exact = references(o, extras=extras)
    for run in (dispatched, plain_torch):
        for name, actual in run(o, extras=extras).items():
            assert torch.equal(actual, exact[name].value.to(actual.dtype)), name


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_output_is_rounded_once_to_its_own_dtype(dtype, out_dtype):
    o = operands(CASES["tail"], dtype)
    actual = dispatched(o, extras=True, out_dtype=out_dtype)
    assert {result.dtype for result in actual.values()} == {out_dtype}
    assert_all_close(actual, references(o, extras=True), o)


def test_alpha_may_be_one_number():
    o = operands(CASES["three groups"], torch.float32)
    alpha = torch.tensor(0.5)
    assert_close("tn", grouped_gemm_tn(o.x, o.w, o.splits, alpha_G=alpha), halved(naive_gemm("TN", o.x, o.w, o.splits)))
    assert_close(
        "nn", grouped_gemm_nn(o.dy, o.w, o.splits, alpha_G=alpha), halved(naive_gemm("NN", o.dy, o.w, o.splits))
    )
    assert_close(
        "nt", grouped_gemm_nt(o.dy, o.x, o.splits, alpha_G=alpha), halved(naive_gemm("NT", o.dy, o.x, o.splits))
    )


def halved(exact: Exact) -> Exact:
    return Exact(exact.value / 2, exact.magnitude / 2, exact.terms)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_strides_do_not_matter(dtype, device):
    o = operands(CASES["tail"], dtype, device=device)
    scattered = o._replace(
        x=o.x.T.contiguous().T,
        dy=torch.cat([o.dy, o.dy], dim=1)[:, : o.dy.shape[1]],
        w=o.w.transpose(1, 2).contiguous().transpose(1, 2),
        scales=torch.stack([o.scales, o.scales], dim=1)[:, 0],
    )
    assert_all_close(dispatched(scattered, extras=True), references(o, extras=True), o)
    expanded = o._replace(dy=o.dy.new_ones(()).expand(o.dy.shape))
    assert_all_close(dispatched(expanded, extras=False), references(expanded, extras=False), o)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("transposed", [False, True])
def test_caller_owns_the_output_buffer(transposed, device):
    o = operands(CASES["tail"], torch.float32, device=device)
    exact = references(o, extras=False)

    def buffer(*shape: int) -> Tensor:
        if transposed:
            return poisoned(*shape[:-2], shape[-1], shape[-2], like=o.x).transpose(-1, -2)
        return poisoned(*shape[:-1], shape[-1] + 3, like=o.x)[..., : shape[-1]]

    (rows, K), (groups, N, _) = o.x.shape, o.w.shape
    tn, nn, nt = buffer(rows, N), buffer(rows, K), buffer(groups, N, K)
    assert grouped_gemm_tn(o.x, o.w, o.splits, out=tn) is tn
    assert grouped_gemm_nn(o.dy, o.w, o.splits, out=nn) is nn
    assert grouped_gemm_nt(o.dy, o.x, o.splits, out=nt) is nt
    for name, actual in {"tn": tn, "nn": nn, "nt": nt}.items():
        assert_close(name, actual, exact[name])


ACCUMULATE_CASES = [
    pytest.param(CASES[name], id=name) for name in ("several tiles", "empty groups", "all empty", "tail", "one group")
]
OUT_DTYPES = [torch.float32, torch.bfloat16]


def assert_accumulates(run, case: Case, dtype: torch.dtype, out_dtype: torch.dtype, device: str = "cpu") -> None:
    """`run(o, out)` adds alpha dy^T x to `out`, and leaves the parts of groups without rows as they are, bit by bit."""
    o = operands(case, dtype, device=device)
    out = torch.randn(o.w.shape, dtype=torch.float64).to(device, out_dtype)
    empty = [group for group, rows in group_rows(o.splits) if rows.start == rows.stop]
    out[empty] = torch.nan
    before, kept = out.double(), out[empty]
    run(o, out)
    exact = naive_gemm("NT", o.dy, o.x, o.splits, alpha=o.alpha)
    full = [group for group, rows in group_rows(o.splits) if rows.start < rows.stop]
    added = Exact(
        *((part + start)[full] for part, start in zip(exact[:2], (before, before.abs()), strict=True)), exact.terms
    )
    assert torch.equal(out[empty].view(torch.uint8), kept.view(torch.uint8))
    assert_close("dw", out[full], added, operand_dtype=dtype)


def accumulate_on_any_device(o: Operands, out: Tensor) -> None:
    assert grouped_gemm_nt(o.dy, o.x, o.splits, alpha_G=o.alpha, out=out, accumulate=True) is out


def accumulate_in_plain_torch(o: Operands, out: Tensor) -> None:
    gg.grouped_gemm_nt_ref(o.dy, o.x, o.splits, alpha_G=o.alpha, out=out, accumulate=True)


def accumulate_in_triton(o: Operands, out: Tensor) -> None:
    gg.grouped_gemm_nt_triton(o.dy, o.x, o.splits.offsets, o.alpha, out, tf32=False, accumulate=True)


@pytest.mark.parametrize("run", [accumulate_on_any_device, accumulate_in_plain_torch])
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("case", ACCUMULATE_CASES)
def test_accumulation_adds_to_the_output(case, dtype, out_dtype, run):
    assert_accumulates(run, case, dtype, out_dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_accumulation_takes_any_strides(device):
    def run(o: Operands, out: Tensor) -> None:
        scattered = out.transpose(1, 2).contiguous().transpose(1, 2)
        accumulate_on_any_device(o, scattered)
        out.copy_(scattered)

    assert_accumulates(run, CASES["empty groups"], torch.bfloat16, torch.float32, device)


# -------------------------------------------------------------------------------------------------------- errors


def splits_of(*sizes: int) -> Splits:
    return Splits.make(list(sizes), rows=sum(sizes), device="cpu")


X, DY, W, S = torch.ones(4, 3), torch.ones(4, 2), torch.ones(2, 2, 3), splits_of(1, 3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: grouped_gemm_tn(X[:3], W, S), ValueError, r"shape \[3, 3\], but the splits were made for 4 rows"),
        (lambda: grouped_gemm_tn(DY, W, S), ValueError, r"\[2, 2, 3\], but must be \[2, out_features, 2\]"),
        (lambda: grouped_gemm_nn(X, W, S), ValueError, r"\[2, 2, 3\], but must be \[2, 3, in_features\]"),
        (lambda: grouped_gemm_tn(X, W[:1], S), ValueError, "for 2 groups"),
        (lambda: grouped_gemm_tn(X, W.double(), S), TypeError, "float32 and torch.float64, but must have one"),
        (lambda: grouped_gemm_nt(DY, X.half(), S), TypeError, "must have one floating dtype"),
        (
            lambda: grouped_gemm_tn(X, W, S, bias_GN=torch.ones(2)),
            ValueError,
            r"bias has shape \[2\], but must be \[2, 2\]",
        ),
        (
            lambda: grouped_gemm_tn(X, W, S, scales_T=torch.ones(2)),
            ValueError,
            r"scales has shape \[2\], but must be \[4\]",
        ),
        (lambda: grouped_bias_grad(DY, S, scales_T=torch.ones(2)), ValueError, "Pass one for each row"),
        (lambda: grouped_gemm_tn(X, W, S, out=torch.ones(4, 3)), ValueError, r"out is torch.float32 \[4, 3\]"),
        (lambda: grouped_gemm_nt(DY, X, S, accumulate=True), ValueError, "adds to `out`, but out is None"),
        (lambda: grouped_gemm_nn(DY, W, S, out=X, out_dtype=torch.half), ValueError, "must be torch.float16"),
    ],
)
def test_wrong_arguments_are_named(call, error, text):
    with pytest.raises(error, match=text):
        call()


@pytest.mark.gpu
def test_float64_on_cuda_is_refused():
    o = operands(CASES["three groups"], torch.float64, device="cuda")
    with pytest.raises(NotImplementedError, match="path='split'"):
        grouped_gemm_tn(o.x, o.w, o.splits)
    with pytest.raises(NotImplementedError, match="path='split'"):
        grouped_bias_grad(o.dy, o.splits)


# ------------------------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize(("aligned", "descriptors"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("dtype", "tf32"), [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)])
def test_tiles_fit_shared_memory(dtype, tf32, aligned, descriptors, capability):
    about = {"tf32": tf32, "aligned": aligned, "descriptors": descriptors, "capability": capability, "gluon": False}
    for out_dtype in (dtype, torch.float32):
        many, few = (m_grouped_config(rows, 8, dtype, out_dtype=out_dtype, **about) for rows in (8192, 64))
        assert few.block_m <= many.block_m
        persistent = capability == (9, 0) and descriptors and dtype == torch.bfloat16
        wgrads = [
            (k_grouped_config(8 * rows, 8, dtype, out_dtype=out_dtype, **about, accumulate=add), add)
            for rows, add in product((1, MANY_ROWS), (False, True))
        ]
        for config, add in ((many, False), (few, False), *wgrads):
            gemm = Gemm("NT", dtype, out_dtype, add, 8, 256, 256)
            assert why_not_tile(config, gemm, capability) is None
            assert bool(config.programs) == persistent


def test_what_descriptors_describe():
    x = torch.empty(16, 24, dtype=torch.bfloat16)
    padded = torch.empty(2, 400, dtype=torch.bfloat16).as_strided((2, 16, 24), (400, 24, 1))
    assert takes_descriptors(x, x[:, :16], x[::2], x.view(2, 8, 24), padded)
    shared, odd = (x.as_strided((2, 7, 24), (distance, 24, 1)) for distance in (64, 196))
    for other in (x[:, 1:], x.T, x[:0], x[:1].expand(16, 24), torch.empty(16, 9, dtype=torch.bfloat16), shared, odd):
        assert not takes_descriptors(x, other)


# ------------------------------------------------------------------------------------------------------- kernels


@triton.jit
def find_tiles_kernel(offsets_ptr, out_ptr, rows, num_groups, BLOCK_M: tl.constexpr):
    slot = tl.program_id(0)
    group, first, end = find_tile(offsets_ptr, slot, rows, num_groups, BLOCK_M)
    tl.store(out_ptr + 3 * slot, group)
    tl.store(out_ptr + 3 * slot + 1, first)
    tl.store(out_ptr + 3 * slot + 2, tl.minimum(first + BLOCK_M, end))


@pytest.mark.parametrize("device", DEVICES)
def test_slots_are_those_of_the_docstring(device):
    offsets = torch.tensor([0, 3, 3, 9], device=device)
    tiles = torch.zeros(12 // 4 + 3 + 1, 3, dtype=torch.int64, device=device)
    find_tiles_kernel[(len(tiles),)](offsets, tiles, 12, 3, BLOCK_M=4)
    found = [(group, (first, end) if first < end else None) for group, first, end in tiles.tolist()]
    assert found == [(0, (0, 3)), (1, None), (2, (3, 7)), (2, (7, 9)), (2, None), (3, (9, 12)), (3, None)]


@triton.jit
def round_kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < count)
    tl.store(out_ptr + offs, round_to(x, out_ptr.dtype.element_ty), mask=offs < count)


@pytest.mark.filterwarnings("ignore:overflow encountered in cast:RuntimeWarning")  # numpy's, for float16
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_rounding_is_torchs(dtype, device):
    bits = torch.randint(-(2**31), 2**31, (100_000,), dtype=torch.int64)
    ties = (torch.arange(-512, 512) << 22) | 0x8000
    x = torch.cat([bits, ties, ties - 1, ties + 1, torch.tensor([0, 1, 0x7F800000, 0x7F7FFFFF, 0x7FC00000])])
    x = x.to(torch.int32).view(torch.float32).to(device)
    out = torch.empty_like(x, dtype=dtype)
    round_kernel[(triton.cdiv(len(x), 4096),)](x, out, len(x), BLOCK=4096)
    torch.testing.assert_close(out, x.to(dtype), rtol=0, atol=0, equal_nan=True)


@pytest.mark.launches("m_grouped_kernel", "k_grouped_kernel", "bias_grad_kernel")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("case", ALL_CASES)
def test_kernels_agree_with_float64(case, dtype, device):
    o = operands(case, dtype, device=device)
    for extras in (False, True):
        assert_all_close(launched(o, extras=extras), references(o, extras=extras), o)


@pytest.mark.rest
@pytest.mark.parametrize("device", DEVICES)
def test_kernels_take_more_groups_than_one_step_of_the_search(device):
    o = operands(MANY_GROUPS, torch.bfloat16, device=device)
    assert_all_close(launched(o, extras=True), references(o, extras=True), o)
    assert_accumulates(accumulate_in_triton, MANY_GROUPS, torch.bfloat16, torch.float32, device)


@pytest.mark.launches("m_grouped_persistent_kernel", "k_grouped_persistent_kernel")
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [(torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16), (torch.float32, torch.bfloat16)],
)
def test_kernels_round_to_the_dtype_of_the_output(dtype, out_dtype, device):
    o = operands(CASES["tail"], dtype, device=device)
    assert_all_close(launched(o, extras=True, out_dtype=out_dtype), references(o, extras=True), o)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("out_dtype", OUT_DTYPES)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("case", ACCUMULATE_CASES)
def test_kernels_accumulate(case, dtype, out_dtype, device):
    assert_accumulates(accumulate_in_triton, case, dtype, out_dtype, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("aligned", [False, True])
def test_kernel_writes_matrices_that_stand_apart(aligned, reverse, accumulate, dtype, device):
    """Nothing between the groups' matrices is touched, and the same bits arrive, if asked for the last group first.

    Those of a dense buffer too, but where descriptors cannot describe the matrices: that kernel sums in another order.
    """
    o = operands(CASES["empty groups"], dtype, device=device)
    G, N, K = o.w.shape
    dense = torch.ones(G, N, K, device=device)
    room = 64 if aligned else 63  # descriptors cannot describe the latter
    arguments = o.dy, o.x, o.splits.offsets, o.alpha
    gg.grouped_gemm_nt_triton(*arguments, dense, tf32=False, accumulate=accumulate)

    def written(reverse: bool) -> Tensor:
        apart = torch.full((G, N * K + room), 7.0, device=device)
        matrices = apart.as_strided((G, N, K), (N * K + room, K, 1)).fill_(1)
        gg.grouped_gemm_nt_triton(*arguments, matrices, tf32=False, accumulate=accumulate, reverse=reverse)
        assert bool((apart[:, N * K :] == 7).all())
        return matrices.flip(0) if reverse else matrices

    found = written(reverse)
    assert torch.equal(found, dense if aligned else written(not reverse))
    torch.testing.assert_close(found, dense, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.slow
def test_float32_weight_gradients_are_the_same_bits_however_they_are_stored(dtype, reverse, device):
    """From registers, by the copy engine alone, and on a GPU in Gluon, where they are fetched or L2 adds.

    What is added is rounded once, and to groups without rows nothing.

    Nothing past a group's matrix is touched, whose last tiles are partly full.
    """
    o = operands(Case([70, 0, 300, 1], tail=9, K=328, N=200), dtype, device=device)
    G, N, K = o.w.shape
    before = torch.randn(N, K, device=device)

    def stored(rows_a_group: int, accumulate: bool, gluon: bool = False) -> Tensor:
        gemm = Gemm("NT", dtype, torch.float32, accumulate, G, N, K)
        apart = torch.full((G, N * K + 64), 7.0, device=device)
        matrices = apart.as_strided((G, N, K), (N * K + 64, K, 1))
        matrices.copy_(before if accumulate else torch.full_like(before, torch.nan))
        with tiles_of_groups(rows_a_group, o.x.shape[0], gemm, gluon=gluon):
            gg.grouped_gemm_nt_triton(o.dy, o.x, o.splits.offsets, o.alpha, matrices, False, accumulate, reverse)
        assert bool((apart[:, N * K :] == 7).all())
        return matrices.flip(0) if reverse else matrices

    dw = stored(1, accumulate=False)
    assert_close("dw", dw, naive_gemm("NT", o.dy, o.x, o.splits, alpha=o.alpha), operand_dtype=dtype)
    for way in ((1, False), (MANY_ROWS, False), (1, device == "cuda"), (MANY_ROWS, device == "cuda")):
        rows_a_group, gluon = way
        assert torch.equal(stored(rows_a_group, accumulate=False, gluon=gluon), dw), way
        assert torch.equal(stored(rows_a_group, accumulate=True, gluon=gluon), before + dw), way


@pytest.mark.interpreter
@settings(max_examples=50)
@given(cases(80, st.tuples(FEATURES, FEATURES)), st.sampled_from(KERNEL_DTYPES), st.booleans(), SEEDS)
@pytest.mark.slow
def test_kernels_agree_for_any_splits_interpreted(case, dtype, extras, seed):
    o = operands(case, dtype, seed=seed)
    assert_all_close(launched(o, extras=extras), references(o, extras=extras), o)


@pytest.mark.interpreter
def test_launchers_are_sound_custom_ops():
    o = operands(CASES["tail"], torch.float32)
    out, checks = torch.empty_like(o.dy), ("test_schema", "test_faketensor")
    for launcher, arguments in (
        ("m_grouped_gemm", (o.x, o.w, o.splits.offsets, o.bias, None, o.alpha, out, True, False)),
        ("m_grouped_gemm", (o.dy, o.w, o.splits.offsets, None, None, None, torch.empty_like(o.x), False, False)),
        ("grouped_gemm_nt", (o.dy, o.x, o.splits.offsets, None, torch.empty_like(o.w), False)),
    ):
        torch.library.opcheck(getattr(torch.ops.fuser, launcher).default, arguments, test_utils=checks)
    bias_grad = torch.ops.fuser.grouped_bias_grad.default
    for row_of in (None, torch.arange(len(o.dy)).flip(0)):
        args = (o.dy, row_of, o.splits.offsets, None, torch.empty_like(o.bias))
        torch.library.opcheck(bias_grad, args, test_utils=checks)


# ------------------------------------------------------------------------------------------------------------ GPU

# Multiples of 16 and odd numbers, never 1: two sets of compiled kernels a dtype.
GPU_FEATURES = st.one_of(
    st.tuples(st.sampled_from([16, 64, 144, 272]), st.sampled_from([32, 128, 160, 288])),
    st.tuples(st.sampled_from([3, 65, 127, 201]), st.sampled_from([6, 66, 130, 254])),
)


@pytest.mark.gpu
@settings(max_examples=500)
@given(cases(400, GPU_FEATURES, most_groups=12), st.sampled_from(KERNEL_DTYPES), st.booleans(), SEEDS)
def test_kernels_agree_for_any_splits_on_the_gpu(case, dtype, extras, seed):
    o = operands(case, dtype, seed=seed, device="cuda")
    assert_all_close(launched(o, extras=extras), references(o, extras=extras), o)


@pytest.mark.gpu
@settings(max_examples=200)
@given(
    cases(400, GPU_FEATURES, most_groups=12),
    st.sampled_from([(1, False), (MANY_ROWS, False), (1, True), (MANY_ROWS, True)]),
    st.booleans(),
    SEEDS,
)
def test_float32_weight_gradients_agree_for_any_splits_on_the_gpu(case, way, extras, seed):
    rows_a_group, gluon = way
    o = operands(case, torch.bfloat16, seed=seed, device="cuda")
    gemms = [Gemm("NT", torch.bfloat16, torch.float32, add, *o.w.shape) for add in (False, True)]
    with tiles_of_groups(rows_a_group, o.x.shape[0], *gemms, gluon=gluon):
        found = launched(o, extras=extras, out_dtype=torch.float32)
        assert_accumulates(accumulate_in_triton, case, torch.bfloat16, torch.float32, "cuda")
    assert_all_close(found, references(o, extras=extras), o)


@pytest.mark.gpu
@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("with_alpha", [False, True])
@pytest.mark.parametrize("groups", [1, 64, 257])
def test_many_tiles_are_added_as_they_are_written(groups, with_alpha, reverse):
    """Several a program. What is added is rounded once, and of groups without rows no bit changes."""
    sizes = torch.multinomial(torch.rand(groups), 8_000, replacement=True).bincount(minlength=groups)
    sizes[1::5] = 0
    o = operands(Case(sizes.tolist(), tail=40, K=520, N=648 if groups > 1 else 17_096), torch.bfloat16, device="cuda")
    arguments = o.dy, o.x, o.splits.offsets, o.alpha if with_alpha else None
    dw = torch.full(o.w.shape, torch.nan, device="cuda")
    gg.grouped_gemm_nt_triton(*arguments, dw, tf32=False)
    before = torch.randn_like(dw)
    before[(sizes == 0).to("cuda")] = torch.nan

    def added() -> Tensor:
        out = before.flip(0) if reverse else before.clone()
        gg.grouped_gemm_nt_triton(*arguments, out, tf32=False, accumulate=True, reverse=reverse)
        return out.flip(0) if reverse else out

    expected = torch.where(before.isnan(), before, before + dw).view(torch.int32)
    gemm = Gemm("NT", torch.bfloat16, torch.float32, True, *o.w.shape)
    for rows_a_group, gluon in ((1, False), (1, True), (MANY_ROWS, True)):
        with tiles_of_groups(rows_a_group, o.x.shape[0], gemm, gluon=gluon):
            assert torch.equal(added().view(torch.int32), expected), f"{rows_a_group} rows, in Gluon: {gluon}"


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_large_shapes(dtype):
    sizes = torch.multinomial(torch.rand(64), 16_000, replacement=True).bincount(minlength=64).tolist()
    o = operands(Case(sizes, tail=384, K=2048, N=1536), dtype, device="cuda")
    assert_all_close(dispatched(o, extras=True), references(o, extras=True), o)


@pytest.mark.gpu
def test_tf32_is_used_where_torch_allows_it():
    o = operands(Case([300, 200], K=256, N=128), torch.float32, device="cuda")
    before = torch.backends.cuda.matmul.fp32_precision
    try:
        torch.backends.cuda.matmul.fp32_precision = "tf32"
        fast = dispatched(o, extras=False)
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
    for name, exact in references(o, extras=False).items():
        error = (fast[name].double() - exact.value).abs()
        assert (error <= 2.0**-8 * exact.magnitude).all(), name  # each operand is cut to 10 bits
        assert name == "db" or error.max() > 2.0**-20 * exact.magnitude.max(), f"{name} is not in TF32"


@pytest.mark.gpu
def test_addresses_pass_two_to_the_31():
    rows, N = 70_000, 32_768
    splits = Splits.make(torch.tensor([40_000, 29_990], device="cuda"), rows=rows, device="cuda")
    x, w = torch.randn(rows, 16, device="cuda").bfloat16(), torch.randn(2, N, 16, device="cuda").bfloat16()
    y = grouped_gemm_tn(x, w, splits)
    last = Splits.make([0, 90], rows=100, device="cuda")
    assert_close("y", y[-100:], naive_gemm("TN", x[-100:], w, last))
    assert_close("dx", grouped_gemm_nn(y, w, splits)[-100:], naive_gemm("NN", y[-100:], w, last))
    dw = grouped_gemm_nt(y, x, splits)
    assert_close("dw", dw[1], Exact(*(t[1] for t in naive_gemm("NT", y, x, splits)[:2]), 29_990))
    del y, dw
    groups, features = 600, 2048
    splits = Splits.make(torch.full((groups,), 2, device="cuda"), rows=2 * groups, device="cuda")
    x, dy = (torch.randn(2 * groups, features, device="cuda").bfloat16() for _ in range(2))
    dw = grouped_gemm_nt(dy, x, splits)
    exact = naive_gemm("NT", dy[-2:], x[-2:], Splits.make([2], rows=2, device="cuda"))
    assert_close("last dw", dw[-1:], exact)
    exact = naive_gemm("TN", x[-2:], dw[-1:], Splits.make([2], rows=2, device="cuda"))
    assert_close("last rows of y", grouped_gemm_tn(x, dw, splits)[-2:], exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_repeats_give_the_same_bits(dtype):
    o = operands(Case([300, 0, 1000, 77], tail=50, K=200, N=320), dtype, device="cuda")
    first = dispatched(o, extras=True)
    for _ in range(10):
        for name, again in dispatched(o, extras=True).items():
            assert torch.equal(first[name], again), name


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_dispatch_never_waits_for_the_device():
    o = operands(Case([300, 0, 100, 77], tail=50, K=64, N=32), torch.bfloat16, device="cuda")
    sizes = torch.tensor([300, 0, 100, 77], device="cuda")
    dispatched(o, extras=True)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        splits = Splits.make(sizes, rows=o.x.shape[0], device="cuda")
        dispatched(o._replace(splits=splits), extras=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_graph_replay_with_other_splits_equals_eager(dtype):
    o = operands(Case([0, 0, 0, 512], K=96, N=64), dtype, device="cuda")
    sizes = torch.tensor([512, 0, 0, 0], device="cuda")

    def step() -> dict[str, Tensor]:
        splits = Splits.make(sizes, rows=o.x.shape[0], device="cuda")
        return dispatched(o._replace(splits=splits), extras=True)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for other in ([128, 128, 128, 128], [0, TILE + 1, 0, 300], [0, 0, 0, 0], [1, 2, 3, 4], [0, 512, 0, 0]):
        sizes.copy_(torch.tensor(other))
        graph.replay()
        replayed = {name: result.clone() for name, result in captured.items()}
        for name, eager in step().items():
            assert torch.equal(replayed[name], eager), (name, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_sum_on_the_cpu_is_that_of_autograd(dtype):
    """The product rounded, then the sum; one product with beta = 1 rounds otherwise where there are many rows."""
    sizes = [300, 0, 700]
    splits = Splits.make(sizes, rows=1000, device="cpu")
    dy, x, buffer = (torch.randn(*shape, dtype=dtype) for shape in ((1000, 64), (1000, 32), (3, 64, 32)))
    expected = buffer + grouped_gemm_nt(dy, x, splits)
    grouped_gemm_nt(dy, x, splits, out=buffer, accumulate=True)
    assert torch.equal(buffer, expected)
