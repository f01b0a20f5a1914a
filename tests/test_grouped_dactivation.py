"""FC2's dgrad and the activation's backward in one kernel: the bits of the two kernels that it replaces."""

import pytest
import torch

from fuser import Sequential, ops
from ops.kernels.elementwise.activation import Activation, activation, dactivation
from ops.kernels.grouped_gemm import grouped_dactivation as kernels
from ops.kernels.grouped_gemm.grouped_dactivation import grouped_gemm_dactivation, why_two_kernels
from ops.kernels.grouped_gemm.high_precision import grouped_gemm_nn
from ops.kernels.grouped_gemm.tile_rules import QUEUED_ROWS
from recipes.tensors.splits import Splits
from recipes.triton.replay import forget

SWIGLU = Activation("swiglu")
HOPPER = (9, 0)
FITTING = (8, 2048, 512)  # [G, N, I] that the kernel takes


def operands(sizes: list[int], tail: int, N: int, width: int, device: str, dtype: torch.dtype = torch.bfloat16):
    """dy, w, splits, h and scales. Rows of no group: dy is NaN there, h is 0 as FC1 leaves it."""
    splits = Splits.make(torch.tensor(sizes, device=device), rows=sum(sizes) + tail, device=device)
    rows, begin = splits.rows, sum(sizes)
    dy = torch.randn(rows, N, dtype=dtype, device=device)
    w = torch.randn(len(sizes), N, width, dtype=dtype, device=device) * N**-0.5
    h = torch.randn(rows, 2 * width, dtype=dtype, device=device)
    scales = torch.rand(rows, device=device)
    dy[begin:], h[begin:] = torch.nan, 0
    return dy, w, splits, h, scales


@pytest.fixture
def launched(monkeypatch):
    """The launches of the kernel; what was repeated before is forgotten."""
    launches: list[tuple] = []
    launch = kernels.m_grouped_dactivation_gluon
    monkeypatch.setattr(kernels, "m_grouped_dactivation_gluon", lambda *args: (launches.append(args), launch(*args)))
    forget()
    yield launches
    forget()


@pytest.mark.gpu
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(
    ("sizes", "tail", "N", "width"),
    [
        ([300, 300], 0, 2048, 512),
        ([700, 0, 1, 64, 65, 128, 129, 0, 1500], 77, 2048, 320),  # half a tile of columns, and tiles of all heights
        ([0, 0, 2000], 300, 2056, 64),  # columns of a quarter of a tile, a step that is not full
        ([2048] * 20, 0, 2048, 768),  # several tiles a program
        ([1] * 255 + [70_000], 1000, 2048, 256),  # one tile of columns, and many groups
    ],
    ids=["two groups", "all heights", "narrow", "many tiles", "many groups"],
)
def test_the_bits_of_two_kernels(sizes, tail, N, width, scaled, launched):
    dy, w, splits, h, scales = operands(sizes, tail, N, width, "cuda")
    given = scales if scaled else None
    needed = {"need_dscales": scaled, "need_act": True}
    dact = grouped_gemm_nn(dy, w, splits)
    expected = dactivation(dact, h, SWIGLU, given, need_dh=True, **needed)
    for _ in range(3):  # also repeated, of which the last is
        dh, dscales, act = grouped_gemm_dactivation(dy, w, splits, h, SWIGLU, scales_T=given, **needed)
        assert torch.equal(dh, expected[0]) and torch.equal(act, expected[2])
        if scaled:
            torch.testing.assert_close(dscales, expected[1], rtol=1e-5, atol=1e-4)
            assert not dscales[sum(sizes) :].any()
    assert launched
    dh, dscales, act = grouped_gemm_dactivation(
        dy, w, splits, h, SWIGLU, scales_T=given, need_act=False, need_dscales=False
    )  # fmt: skip
    assert torch.equal(dh, expected[0]) and dscales is None and act is None


@pytest.mark.gpu
@pytest.mark.parametrize("rows_a_group", [QUEUED_ROWS - 1, QUEUED_ROWS])
def test_few_rows_and_other_strides_take_two_kernels(rows_a_group, launched):
    dy, w, splits, h, scales = operands([rows_a_group] * 4, 0, 2048, 256, "cuda")
    about = {"scales_T": scales, "need_act": True, "need_dscales": True}
    grouped_gemm_dactivation(dy, w, splits, h, SWIGLU, **about)
    assert len(launched) == (rows_a_group >= QUEUED_ROWS)
    odd = torch.empty(len(h), h.shape[1] + 1, dtype=h.dtype, device="cuda")[:, :-1].copy_(h)
    found = grouped_gemm_dactivation(dy, w, splits, odd, SWIGLU, **about)
    assert len(launched) == (rows_a_group >= QUEUED_ROWS)
    dact = grouped_gemm_nn(dy, w, splits)
    expected = dactivation(dact, h, SWIGLU, scales, need_dh=True, need_act=True, need_dscales=True)
    for one, two in zip(found, expected, strict=True):
        torch.testing.assert_close(one, two)


@pytest.mark.gpu
def test_a_captured_step_takes_other_splits():
    dy, w, splits, h, scales = operands([1000, 24, 1024], 0, 2048, 512, "cuda")
    offsets = splits.offsets.clone()
    given = Splits.over(offsets, splits.rows)
    about = {"scales_T": scales, "need_act": True, "need_dscales": True}
    grouped_gemm_dactivation(dy, w, given, h, SWIGLU, **about)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = grouped_gemm_dactivation(dy, w, given, h, SWIGLU, **about)
    for sizes in ([1000, 24, 1024], [0, 2048, 0], [1, 1, 2046]):
        offsets[1:] = torch.tensor(sizes, device="cuda").cumsum(0)
        graph.replay()
        dact = grouped_gemm_nn(dy, w, given)
        expected = dactivation(dact, h, SWIGLU, scales, need_dh=True, need_act=True, need_dscales=True)
        assert torch.equal(found[0], expected[0]) and torch.equal(found[2], expected[2])
        torch.testing.assert_close(found[1], expected[1], rtol=1e-5, atol=1e-4)


@pytest.mark.gpu
def test_the_grouped_mlp_has_the_gradients_of_its_operations(launched, monkeypatch):
    """A whole step, several times: with one kernel, and with two."""
    results = []
    for at_once in (True, False):
        if not at_once:
            monkeypatch.setattr("fused.grouped_mlp.why_two_kernels", lambda *about: "not here")
        torch.manual_seed(1)
        about = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
        mlp = Sequential(
            ops.GroupedLinear(4, 256, 1024, **about), ops.ScaledSwiGLU(), ops.GroupedLinear(4, 512, 2048, **about)
        )
        assert ("by the kernel of FC2's dgrad" in mlp.explain(dtype=torch.bfloat16)) == at_once
        sizes = torch.tensor([500, 0, 1000, 548], device="cuda")
        torch.manual_seed(2)
        x = torch.randn(2100, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        scales = torch.rand(2100, device="cuda", requires_grad=True)
        dy = torch.randn(2100, 2048, device="cuda", dtype=torch.bfloat16)
        for _ in range(4):
            mlp.zero_grad()
            x.grad = scales.grad = None
            mlp(x, split_sizes=sizes, scales=scales).backward(dy)
        results.append([x.grad, scales.grad, *(p.grad for p in mlp.parameters())])
        assert bool(launched) == at_once
        launched.clear()
    (dx, dscales, *dw), (other_dx, other_dscales, *other_dw) = results
    assert torch.equal(dx, other_dx) and all(map(torch.equal, dw, other_dw))
    torch.testing.assert_close(dscales, other_dscales, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("kind", ["swiglu", "srelu"])
def test_a_cpu_runs_one_after_the_other(kind, dtype):
    spec = Activation(kind)
    dy, w, splits, h, scales = operands([5, 0, 3], 2, 24, 16, "cpu", dtype)
    h = h if spec.gated else h[:, :16].contiguous()
    needed = {"need_act": True, "need_dscales": True}
    found = grouped_gemm_dactivation(dy, w, splits, h, spec, scales_T=scales, **needed)
    expected = dactivation(grouped_gemm_nn(dy, w, splits), h, spec, scales, need_dh=True, **needed)
    assert all(map(torch.equal, found, expected))
    torch.testing.assert_close(found[2], activation(h, spec, scales))


@pytest.mark.parametrize(
    ("dtype", "weights", "spec", "gpu", "sentence"),
    [
        (torch.bfloat16, FITTING, SWIGLU, None, "A CPU runs the product and the activation"),
        (torch.bfloat16, FITTING, SWIGLU, (10, 0), "9.0 (Hopper), and this is 10.0"),
        (torch.float16, FITTING, SWIGLU, HOPPER, "multiplies bfloat16, and these are float16"),
        (torch.bfloat16, (600, 2048, 512), SWIGLU, HOPPER, "512 groups at most, and there are 600"),
        (torch.bfloat16, FITTING, Activation("situglu"), HOPPER, "for SwiGLU, and this is situglu"),
        (torch.bfloat16, FITTING, Activation("swiglu", glu_interleave_size=32), HOPPER, "glu_interleave_size is 32"),
        (torch.bfloat16, (8, 2048, 480), SWIGLU, HOPPER, "multiple of 64, and these are 2048 and 480"),
        (torch.bfloat16, (8, 1024, 512), SWIGLU, HOPPER, "2048 at least"),
        (torch.bfloat16, (8, 2052, 512), SWIGLU, HOPPER, "multiple of 8, 2048 at least"),
        (torch.bfloat16, FITTING, SWIGLU, HOPPER, None),
        (torch.bfloat16, FITTING, Activation("swiglu", glu_interleave_size=512), HOPPER, None),
    ],
)
def test_a_refusal_is_a_sentence(dtype, weights, spec, gpu, sentence, monkeypatch):
    if gpu == HOPPER:
        monkeypatch.setattr(kernels, "why_no_gluon", lambda gpu: None)
    monkeypatch.setattr(kernels, "has_fast_memory", lambda: True)
    found = why_two_kernels(dtype, weights, spec, gpu)
    assert found is None if sentence is None else sentence in found
    if gpu == HOPPER:
        monkeypatch.setattr(kernels, "has_fast_memory", lambda: False)
        assert "100 GiB" in why_two_kernels(dtype, weights, spec, gpu)
