"""Products of codes in Gluon: the same bits as by the kernels in Triton, on a GPU, and which products take it."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ops.kernels.grouped_gemm import float8
from ops.kernels.grouped_gemm.float8 import grouped_gemm_nt_float8, grouped_gemm_tn_float8
from ops.kernels.grouped_gemm.measured_tiles import GLUON_GROUPS
from ops.kernels.grouped_gemm.tile_rules import FEW_ROWS, MANY_ROWS
from ops.kernels.grouped_gemm.tile_rules_float8 import (
    IN_ORDER_ROWS,
    k_grouped_float8_config,
    m_grouped_float8_config,
)
from recipes.tensors.formats import E4M3, E5M2
from recipes.tensors.splits import Splits
from recipes.triton.replay import forget


def config(rows_a_group, *, groups=8, layout="square", promote=True, capability=(9, 0), gluon=True, **about):
    return m_grouped_float8_config(
        rows_a_group * groups, groups, layout=layout, promote=promote, out_dtype=torch.bfloat16, descriptors=True,
        capability=capability, gluon=gluon, **about,
    )  # fmt: skip


def test_it_is_for_many_rows_with_scales_of_tensors_vectors_or_squares():
    per_tensor = {"layout": "tensor", "promote": False}
    assert config(FEW_ROWS).gluon and config(FEW_ROWS, layout="tensor").gluon
    assert config(FEW_ROWS, **per_tensor).gluon and config(1, batch_invariant=True).gluon
    assert config(FEW_ROWS, layout="vector").gluon and config(FEW_ROWS, layout="vector", promote=False).gluon
    others = (
        config(FEW_ROWS - 1), config(FEW_ROWS - 1, **per_tensor), config(1000, gluon=False), config(1000, layout="row"),
        config(1000, groups=GLUON_GROUPS + 1), config(1000, capability=(8, 9)),
    )  # fmt: skip
    assert not any(other.gluon for other in others)


def test_weight_gradients_are_for_all_scales_and_add_in_float32():
    about = {"promote": True, "descriptors": True, "capability": (9, 0), "gluon": True, "accumulate": False}

    def config(groups=8, layout="row", out_dtype=torch.bfloat16, columns=512, **other):
        settings = about | {"layout": layout, "out_dtype": out_dtype} | other
        return k_grouped_float8_config(columns * groups, groups, **settings)

    def takes(*args, **settings):
        return config(*args, **settings).gluon

    assert takes() and takes(layout="tensor") and takes(layout="tensor", promote=False) and takes(layout="vector")
    adds = {"out_dtype": torch.float32, "accumulate": True}
    assert takes(**adds) and config(**adds).fetches and not config(**adds, columns=MANY_ROWS).fetches
    for layout in ("tensor", "vector"):
        assert config(**adds, layout=layout, columns=MANY_ROWS).fetches and not config(layout=layout).fetches
    assert not takes(accumulate=True) and not takes(GLUON_GROUPS + 1)
    assert not takes(gluon=False) and not takes(capability=(8, 9)) and not takes(descriptors=False)


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["tensor", "split", "split vector", "square"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.one_of(
        st.lists(st.sampled_from([0, 0, 1, 63, 64, 65, 128, 191, 192, 193, 500, 2000]), min_size=1, max_size=140),
        st.lists(st.sampled_from([0, IN_ORDER_ROWS, 2 * IN_ORDER_ROWS + 1]), min_size=1, max_size=40),
    ),
    tail=st.sampled_from([0, 1, 200]),
    R=st.sampled_from([16, 128, 144, 512, 640, 1920]),
    C=st.sampled_from([16, 128, 136, 256, 400, 1024]),
    extras=st.sampled_from([(False, False), (True, False), (True, True)]),
    forms=st.sampled_from([(E4M3, E4M3), (E5M2, E4M3)]),
    in_order=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_the_same_bits_as_in_triton(layout, out_dtype, sizes, tail, R, C, extras, forms, in_order, seed):
    torch.manual_seed(seed)
    rows, G = sum(sizes) + tail, len(sizes)
    splits = Splits.make(sizes, rows=rows, device="cuda")
    a, b = (
        torch.randn(shape, device="cuda").mul_(30).clamp(-400, 400).to(form.dtype)
        for shape, form in (((rows, R), forms[0]), ((G, C, R), forms[1]))
    )
    blocks = -(-R // 128)
    shapes = {"square": ((blocks, rows), (G, -(-C // 128), blocks)), "vector": ((1, rows), (G, 1, C))}
    of_layout = shapes.get(layout.removeprefix("split "), ((G,), (G,)))
    a_scale, b_scale = (torch.rand(shape, device="cuda") + 0.5 for shape in of_layout)
    bias = torch.randn(G, C, device="cuda") if extras[0] else None
    scales = torch.randn(rows, device="cuda") if extras[1] else None
    # Rows of no group may be anything.
    a[sum(sizes) :] = torch.tensor(float("nan"), device="cuda").to(a.dtype)
    if a_scale.dim() == 2:
        a_scale[:, sum(sizes) :] = float("nan")

    def product():
        return grouped_gemm_tn_float8(
            a, a_scale, b, b_scale, splits, bias_GC=bias, scales_T=scales,
            out=torch.full((rows, C), 7.0, dtype=out_dtype, device="cuda"), batch_invariant=True,
            split_accumulation=layout.startswith("split"),
        )  # fmt: skip

    forget()
    fast = patch("ops.kernels.grouped_gemm.m_grouped_gluon.has_fast_memory", lambda x: in_order)
    with fast, patch.object(float8, "m_grouped_gluon", wraps=float8.m_grouped_gluon) as gluon:
        y = product()
    # What is repeated does not ask again which kernel runs.
    with patch.object(float8, "why_no_gluon", lambda capability: "In Triton."):
        forget()
        expected = product()
    forget()
    assert gluon.called == bool(rows and R % 16 == 0 and C * out_dtype.itemsize % 16 == 0)
    assert torch.equal(y.view(torch.uint8), expected.view(torch.uint8))
    assert not y[sum(sizes) :].any()


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["tensor", "split", "vector", "split vector", "row"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@settings(max_examples=12, deadline=None)
@given(
    sizes=st.one_of(
        st.lists(st.sampled_from([0, 0, 1, 63, 64, 65, 128, 191, 256, 500, 2000]), min_size=1, max_size=140),
        st.lists(st.sampled_from([0, MANY_ROWS, 2 * MANY_ROWS + 1]), min_size=1, max_size=8),
        st.lists(st.sampled_from([0, 1, 64, 200]), min_size=257, max_size=276),
    ),
    N=st.sampled_from([16, 64, 128, 144, 192, 256, 400, 1024]),
    K=st.sampled_from([16, 128, 136, 256, 400, 1024]),
    add=st.booleans(),
    reverse=st.booleans(),
    forms=st.sampled_from([(E4M3, E4M3), (E5M2, E4M3)]),
    seed=st.integers(0, 2**31),
)
def test_weight_gradients_have_the_bits_of_triton(layout, out_dtype, sizes, N, K, add, reverse, forms, seed):
    torch.manual_seed(seed)
    G, block = len(sizes), 128 if layout == "row" else 16
    offsets = Splits.make(sizes, rows=sum(sizes), device="cuda").aligned(block)
    P = max(int(offsets[-1]), block)
    dy, x = (
        torch.randn(shape, device="cuda").mul_(30).clamp(-400, 400).to(form.dtype)
        for shape, form in (((N, P), forms[0]), ((K, P), forms[1]))
    )
    shapes = {"row": ((P // 128, N), (P // 128, K)), "vector": ((G, 1, N), (G, 1, K))}
    of_layout = shapes.get(layout.removeprefix("split "), ((G,), (G,)))
    dy_scale, x_scale = (torch.rand(shape, device="cuda") + 0.5 for shape in of_layout)
    if dy_scale.dim() == 3:  # of groups without columns they may be anything
        for scale in (dy_scale, x_scale):
            scale[[not size for size in sizes]] = float("nan")
    add = add and out_dtype == torch.float32
    old = torch.randn(G, N, K, device="cuda").to(out_dtype)

    def product():
        return grouped_gemm_nt_float8(
            dy, dy_scale, x, x_scale, offsets, out=old.clone(), split_accumulation=layout.startswith("split"),
            accumulate=add, reverse=reverse and add,
        )  # fmt: skip

    forget()
    with patch.object(float8, "k_grouped_float8_gluon", wraps=float8.k_grouped_float8_gluon) as gluon:
        dw, again = product(), product()
    with patch.object(float8, "why_no_gluon", lambda capability: "In Triton."):
        forget()
        expected = product()
    forget()
    assert gluon.called == (K * out_dtype.itemsize % 16 == 0)
    assert torch.equal(dw.view(torch.uint8), expected.view(torch.uint8)) and torch.equal(dw, again)


@pytest.mark.gpu
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@settings(max_examples=20, deadline=None)
@given(
    sizes=st.one_of(
        st.lists(st.sampled_from([0, 0, 1, 63, 64, 65, 128, 191, 256, 500, 2000]), min_size=1, max_size=140),
        st.lists(st.sampled_from([0, 1, 64, 200]), min_size=257, max_size=276),
    ),
    tail=st.sampled_from([0, 1, 200]),
    N=st.sampled_from([16, 64, 128, 144, 192, 256, 392, 400, 1024]),
    K=st.sampled_from([16, 128, 136, 256, 400, 1024]),
    add=st.booleans(),
    reverse=st.booleans(),
    forms=st.sampled_from([(E4M3, E4M3), (E5M2, E4M3)]),
    alignment=st.sampled_from([16, 32]),
    seed=st.integers(0, 2**31),
)
def test_weight_gradients_of_rows_have_the_bits_of_columns(
    out_dtype, sizes, tail, N, K, add, reverse, forms, alignment, seed
):
    """Columns of x that pad a group are zeros, as they are promised to be; rows of no group are NaN."""
    torch.manual_seed(seed)
    G, T = len(sizes), sum(sizes) + tail
    splits = Splits.make(sizes, rows=T, device="cuda")
    offsets, place = splits.aligned(alignment), splits.row_in_padded(alignment)[: sum(sizes)]
    dy, x = (
        torch.randn(T, features, device="cuda").mul_(30).clamp(-400, 400).to(form.dtype)
        for features, form in ((N, forms[0]), (K, forms[1]))
    )
    dy[sum(sizes) :] = torch.tensor(float("nan"), device="cuda").to(dy.dtype)
    dy_T, x_T = (
        torch.zeros(max(splits.aligned_capacity(alignment), 16), rows.shape[1], dtype=torch.uint8, device="cuda")
        .index_copy_(0, place, rows[: sum(sizes)].view(torch.uint8)).T.contiguous().view(rows.dtype)
        for rows in (dy, x)
    )  # fmt: skip
    dy_scale, x_scale = torch.rand(G, device="cuda") + 0.5, torch.rand((), device="cuda") + 0.5
    old, add = torch.randn(G, N, K, device="cuda").to(out_dtype), add and out_dtype == torch.float32

    def product(codes, row_offsets):
        return grouped_gemm_nt_float8(
            codes, dy_scale, x_T, x_scale.expand(G), offsets, row_offsets=row_offsets, out=old.clone(),
            split_accumulation=True, accumulate=add, reverse=reverse and add,
        )  # fmt: skip

    expected = product(dy_T, None)
    for _ in range(3):  # the third time it is repeated
        assert torch.equal(product(dy, splits.offsets).view(torch.uint8), expected.view(torch.uint8))
