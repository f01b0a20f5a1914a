"""Products of 16-bit operands in Gluon: the same bits as in Triton, on a GPU, and which ones take it."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.kernels.grouped_gemm import high_precision, tile_rules
from ops.kernels.grouped_gemm.float8 import grouped_gemm_nt_float8_triton
from ops.kernels.grouped_gemm.high_precision import grouped_gemm_nt_triton, m_grouped_triton
from ops.kernels.grouped_gemm.measured_tiles import GLUON_GROUPS, Gemm, why_not_tile
from ops.kernels.grouped_gemm.tile_rules import QUEUED_IN_GLUON, QUEUED_ROWS, has_fast_memory, m_grouped_config
from recipes.tensors.splits import Splits
from recipes.triton import gates
from recipes.triton.replay import forget

HOPPER = (9, 0)


def config(rows_a_group=QUEUED_ROWS, *, groups=8, dtype=torch.bfloat16, out_dtype=torch.bfloat16, **about):
    settings = {"descriptors": True, "capability": HOPPER, "gluon": True} | about
    return m_grouped_config(
        rows_a_group * groups, groups, dtype, out_dtype=out_dtype, tf32=False, aligned=True, **settings
    )  # fmt: skip


def test_it_is_for_many_rows_of_16_bits():
    assert config() == config(dtype=torch.float16) == config(groups=GLUON_GROUPS) == QUEUED_IN_GLUON
    assert config(1, batch_invariant=True) == QUEUED_IN_GLUON and config(out_dtype=torch.float32).box == 64
    others = (
        config(QUEUED_ROWS - 1), config(groups=GLUON_GROUPS + 1), config(gluon=False), config(descriptors=False),
        config(capability=(10, 0)), config(dtype=torch.float32, out_dtype=torch.float32),
    )  # fmt: skip
    assert not any(other.gluon for other in others)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_its_tile_fits(out_dtype, monkeypatch):
    monkeypatch.setattr("ops.kernels.grouped_gemm.measured_tiles.why_no_gluon", lambda capability: None)
    gemm = Gemm("TN", torch.bfloat16, out_dtype, False, GLUON_GROUPS, 1024, 1024)
    assert why_not_tile(config(out_dtype=out_dtype), gemm, HOPPER) is None


@pytest.mark.parametrize(("gigabytes", "fast"), [(80, False), (94, False), (96, False), (141, True)])
def test_memory_is_fast_where_there_is_much_of_it(gigabytes, fast, monkeypatch):
    assert has_fast_memory(torch.empty(0))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(tile_rules, "properties", lambda device: SimpleNamespace(total_memory=gigabytes * 10**9))
    assert has_fast_memory() == fast


@pytest.mark.gpu
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("to_float32", [False, True])
@settings(max_examples=15, deadline=None)
@given(
    sizes=st.one_of(
        st.lists(st.sampled_from([0, 0, 1, 63, 64, 65, 127, 128, 129, 500, 2000]), min_size=1, max_size=140),
        st.lists(st.sampled_from([0, 1, 64, 200]), min_size=500, max_size=GLUON_GROUPS),
    ),
    tail=st.sampled_from([0, 1, 200]),
    R=st.sampled_from([8, 64, 72, 256, 640, 1920]),
    C=st.sampled_from([8, 64, 120, 128, 136, 256, 392, 704, 1024]),
    extras=st.sampled_from([(False, False, False), (True, False, False), (True, True, False), (True, True, True)]),
    seed=st.integers(0, 2**31),
)
def test_the_same_bits_as_in_triton(transposed, dtype, to_float32, sizes, tail, R, C, extras, seed):
    torch.manual_seed(seed)
    rows, G = sum(sizes) + tail, len(sizes)
    splits = Splits.make(sizes, rows=rows, device="cuda")
    a = torch.randn(rows, R, device="cuda", dtype=dtype)
    w = torch.randn(G, *((C, R) if transposed else (R, C)), device="cuda", dtype=dtype)
    made = torch.randn(G, C, device="cuda", dtype=dtype), torch.randn(rows, device="cuda"), torch.rand(G, device="cuda")
    bias, scales, alpha = (one if wanted else None for one, wanted in zip(made, extras, strict=True))
    # Rows of no group may be anything, and so may alpha of a group without rows.
    a[sum(sizes) :] = torch.nan
    if scales is not None:
        scales[sum(sizes) :] = torch.nan
    if alpha is not None:
        alpha[torch.tensor(sizes, device="cuda") == 0] = torch.nan

    def product():
        out = torch.full((rows, C), 7.0, dtype=torch.float32 if to_float32 else dtype, device="cuda")
        m_grouped_triton(a, w, splits.offsets, bias, scales, alpha, out, transposed, False, True)
        return out

    forget()
    fast = patch.object(high_precision, "has_fast_memory", lambda x: True)  # on an H100 too
    with fast, patch.object(high_precision, "m_grouped_gluon", wraps=high_precision.m_grouped_gluon) as gluon:
        y = product()
        again = [product() for _ in range(3)]
    # What is repeated does not ask again which kernel runs.
    with patch.object(high_precision, "why_no_gluon", lambda capability: "In Triton."):
        forget()
        expected = product()
    forget()
    assert gluon.called == bool(rows)
    assert all(torch.equal(y, other) for other in again)
    assert torch.equal(y, expected) and not y[sum(sizes) :].any()


@pytest.mark.gpu
def test_a_captured_product_takes_other_splits(monkeypatch):
    if gates.why_no_gluon(torch.cuda.get_device_capability()) is not None:
        pytest.skip(gates.why_no_gluon(torch.cuda.get_device_capability()))
    G, rows, R, C = 40, 40 * QUEUED_ROWS, 512, 640
    a, w = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in ((rows, R), (G, C, R)))
    out = torch.empty(rows, C, device="cuda", dtype=torch.bfloat16)
    offsets = Splits.make([QUEUED_ROWS] * G, rows=rows, device="cuda").offsets.clone()

    def product():
        m_grouped_triton(a, w, offsets, None, None, None, out, True, False)

    forget()
    monkeypatch.setattr(high_precision, "has_fast_memory", lambda x: True)
    with patch.object(high_precision, "m_grouped_gluon", wraps=high_precision.m_grouped_gluon) as gluon:
        product()
    assert gluon.called
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product()
    for seed in range(50):
        torch.manual_seed(seed)
        sizes = torch.multinomial(torch.rand(G), rows - seed, replacement=True).bincount(minlength=G)
        offsets.copy_(Splits.make(sizes.tolist(), rows=rows, device="cuda").offsets)
        out.fill_(7)
        graph.replay()
        replayed = out.clone()
        product()
        assert torch.equal(out, replayed)
    forget()
    owner = torch.arange(G, device="cuda").repeat_interleave(sizes.cuda())
    for group in range(0, G, 7):
        mine = (owner == group).nonzero()[:, 0]
        expected = a[mine].double() @ w[group].double().T
        torch.testing.assert_close(out[mine].double(), expected, rtol=1e-2, atol=0.2)


@pytest.mark.gpu
@settings(max_examples=20, deadline=None)
@given(
    sizes=st.one_of(
        st.lists(st.sampled_from([0, 0, 1, 31, 32, 33, 64, 65, 127, 128, 129, 500, 2000]), min_size=1, max_size=140),
        st.lists(st.sampled_from([0, 0, 0, 0, 1, 300]), min_size=300, max_size=400),
    ),
    N=st.sampled_from([16, 64, 128, 144, 192, 256, 400, 1024]),
    K=st.sampled_from([16, 128, 136, 256, 400, 1024]),
    has_alpha=st.booleans(),
    reverse=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_weight_gradients_have_the_bits_of_triton(sizes, N, K, has_alpha, reverse, seed):
    reason = gates.why_no_gluon(torch.cuda.get_device_capability())
    if reason is not None:
        pytest.skip(reason)
    torch.manual_seed(seed)
    G, rows = len(sizes), max(sum(sizes), 1)
    offsets = Splits.make(sizes, rows=rows, device="cuda").offsets
    dy, x = (torch.randn(rows, width, device="cuda").bfloat16() for width in (N, K))
    alpha = torch.rand(G, device="cuda") + 0.5 if has_alpha else None
    if alpha is not None:
        alpha[[not size for size in sizes]] = float("nan")  # of groups without rows it may be anything

    def product():
        out = torch.full((G, N, K), 7.0, dtype=torch.bfloat16, device="cuda")
        grouped_gemm_nt_triton(dy, x, offsets, alpha, out, False, reverse=reverse)
        return out

    forget()
    with patch.object(high_precision, "k_grouped_gluon", wraps=high_precision.k_grouped_gluon) as gluon:
        dw, again = product(), product()
    with patch.object(high_precision, "why_no_gluon", lambda capability: "In Triton."):
        forget()
        expected = product()
    forget()
    assert gluon.called
    assert torch.equal(dw, expected) and torch.equal(dw, again)


@pytest.mark.gpu
@pytest.mark.parametrize("codes", [False, True], ids=["bf16", "codes"])
def test_captured_weight_gradients_take_other_splits(codes):
    reason = gates.why_no_gluon(torch.cuda.get_device_capability())
    if reason is not None:
        pytest.skip(reason)
    G, rows, N, K = 200, 20_000, 192, 400
    P = rows + 16 * G
    dy, x = (torch.randn(P, width, device="cuda").bfloat16() for width in (N, K))
    out = torch.empty(G, N, K, device="cuda", dtype=torch.bfloat16)
    one = torch.ones(G, device="cuda")
    dy_T, x_T = (values.T.contiguous().to(torch.float8_e4m3fn) for values in (dy, x))
    unit = 16 if codes else 1

    def offsets_of(seed):
        torch.manual_seed(seed)
        chances = torch.rand(G) * (torch.rand(G) > 0.8)  # most groups are empty
        sizes = torch.multinomial(chances, rows, replacement=True).bincount(minlength=G)
        ends = (-(-sizes // unit) * unit).cumsum(0)
        return torch.cat([torch.zeros(1, dtype=torch.int64), ends]).cuda()

    offsets = offsets_of(0)

    def product():
        if codes:
            grouped_gemm_nt_float8_triton(dy_T, one, x_T, one, offsets, out, True)
        else:
            grouped_gemm_nt_triton(dy, x, offsets, None, out, False)

    product()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        product()
    left, right = (dy_T.T.double(), x_T.T.double()) if codes else (dy.double(), x.double())
    for seed in range(1, 31):
        offsets.copy_(offsets_of(seed))
        out.fill_(7)
        graph.replay()
        replayed = out.clone()
        product()
        assert torch.equal(out, replayed)
        ends = offsets.tolist()
        for group in range(seed % 10, G, 10):
            mine = slice(ends[group], ends[group + 1])
            torch.testing.assert_close(out[group].double(), left[mine].T @ right[mine], rtol=1e-2, atol=0.5)
