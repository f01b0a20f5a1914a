"""Grouped GEMM with SwiGLU: reference and CPU path against float64; the kernel under the interpreter and on the GPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fused.kernels.grouped_gemm_swiglu import (
    grouped_gemm_swiglu,
    grouped_gemm_swiglu_config,
    grouped_gemm_swiglu_ref,
    grouped_gemm_swiglu_triton,
)
from ops.kernels.grouped_gemm import shared_memory_limit
from recipes.splits import Splits
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
    naive_gemm,
    operands,
    poisoned,
)

# Triton 3.6's interpreter turns arrays of one element into loop bounds, which numpy >= 2.4 will refuse.
pytestmark = pytest.mark.filterwarnings(
    "ignore:Conversion of an array with ndim > 0:DeprecationWarning",
    "ignore:overflow encountered in (exp|cast):RuntimeWarning",  # numpy's; silu is right with an infinite exp
)

CPU_DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
KERNEL_DTYPES = [torch.float32, torch.bfloat16, torch.float16]
ALL_CASES = [pytest.param(case, id=name) for name, case in CASES.items()]
SEEDS = st.integers(0, 2**32 - 1)

Result = tuple[Tensor | None, Tensor]


def interleaves(case: Case) -> list[int | None]:
    """Halves, single columns, and the longest runs shorter than all."""
    width = case.N // 2
    return [None, 1, max(size for size in range(1, width + 1) if width % size == 0 and (size < width or width == 1))]


def extras_of(o: Operands, extras: bool) -> dict[str, Tensor]:
    return {"bias_GN": o.bias, "scales_T": o.scales, "alpha_G": o.alpha} if extras else {}


def launched(o: Operands, *, extras: bool, interleave: int | None, need_preact: bool = True) -> Result:
    """What the Triton kernel makes of NaN-filled outputs."""
    (rows, N), chosen = o.dy.shape, extras_of(o, extras)
    h = poisoned(rows, N, like=o.x) if need_preact else None
    act = poisoned(rows, N // 2, like=o.x)
    grouped_gemm_swiglu_triton(
        o.x,
        o.w,
        o.splits.offsets,
        chosen.get("bias_GN"),
        chosen.get("scales_T"),
        chosen.get("alpha_G"),
        h,
        act,
        glu_interleave_size=interleave or 0,
        tf32=False,
    )
    return h, act


def dispatched(o: Operands, *, extras: bool, interleave: int | None, need_preact: bool = True) -> Result:
    return grouped_gemm_swiglu(
        o.x, o.w, o.splits, glu_interleave_size=interleave, need_preact=need_preact, **extras_of(o, extras)
    )


def plain_torch(o: Operands, *, extras: bool, interleave: int | None) -> Result:
    return grouped_gemm_swiglu_ref(o.x, o.w, o.splits, glu_interleave_size=interleave, **extras_of(o, extras))


def exact_activation(h: Tensor, o: Operands, *, extras: bool, interleave: int | None) -> Exact:
    """SwiGLU in float64 of the h that was stored, column by column."""
    width = h.shape[1] // 2
    columns = torch.arange(width, device=h.device)
    run = interleave or width
    gate = columns // run * 2 * run + columns % run
    a, b = h[:, gate].double(), h[:, gate + run].double()
    active = (torch.arange(len(h), device=h.device) < sum(o.splits.tolist()))[:, None]
    scales = torch.where(active, o.scales[:, None].double() if extras else torch.ones((), device=h.device), 0)
    value = a / (1 + torch.exp(-a)) * b * scales
    # exp(-a) is computed as 2^(-a log2 e), whose exponent is rounded: relatively, |a| last places. For a < -88 the
    # float32 exp is infinite and silu zero.
    return Exact(value, (1 + a.abs()) * value.abs() + 2.0**-96 * (b * scales).abs(), 1)


def assert_right(actual: Result, o: Operands, *, extras: bool, interleave: int | None) -> None:
    h, act = actual
    alpha, bias = (o.alpha, o.bias) if extras else (None, None)
    assert_close("h", h, naive_gemm("TN", o.x, o.w, o.splits, alpha=alpha, bias=bias), operand_dtype=o.x.dtype)
    assert_close("act", act, exact_activation(h, o, extras=extras, interleave=interleave), operand_dtype=o.x.dtype)
    active = sum(o.splits.tolist())
    assert not h[active:].any() and not act[active:].any(), "rows of no group are not zero"


# ---------------------------------------------------------------------------------------- reference and CPU path


@pytest.mark.parametrize("run", [dispatched, plain_torch])
@pytest.mark.parametrize("extras", [False, True], ids=["plain", "extras"])
@pytest.mark.parametrize("dtype", CPU_DTYPES)
@pytest.mark.parametrize("case", [*ALL_CASES, pytest.param(MANY_GROUPS, id="257 groups")])
def test_cpu_agrees_with_float64(case, dtype, extras, run):
    o = operands(case, dtype)
    for interleave in interleaves(case):
        assert_right(run(o, extras=extras, interleave=interleave), o, extras=extras, interleave=interleave)


@settings(max_examples=500)
@given(
    cases(40, st.tuples(st.integers(1, 40), st.integers(1, 20).map(lambda width: 2 * width))),
    st.sampled_from(CPU_DTYPES),
    st.booleans(),
    st.integers(0, 2),
    SEEDS,
)
def test_cpu_agrees_with_float64_for_any_splits(case, dtype, extras, which, seed):
    o = operands(case, dtype, seed=seed)
    interleave = interleaves(case)[which]
    for run in (dispatched, plain_torch):
        assert_right(run(o, extras=extras, interleave=interleave), o, extras=extras, interleave=interleave)


def test_interleaved_columns_are_those_of_the_docstring():
    """I = 4, S = 2: gate 0, gate 1, up 0, up 1, gate 2, gate 3, up 2, up 3."""
    gate, up = torch.tensor([1.0, 2.0, 3.0, 4.0]), torch.tensor([10.0, 20.0, 30.0, 40.0])
    interleaved = torch.tensor([1.0, 2.0, 10.0, 20.0, 3.0, 4.0, 30.0, 40.0])
    splits = Splits.make([1], rows=1, device="cpu")
    for weights, size in ((interleaved, 2), (torch.cat([gate, up]), None)):
        h, act = grouped_gemm_swiglu(torch.ones(1, 1), weights[None, :, None], splits, glu_interleave_size=size)
        assert torch.equal(h[0], weights)
        assert torch.equal(act[0], torch.nn.functional.silu(gate) * up)


def test_preactivation_is_left_out_on_request():
    o = operands(CASES["tail"], torch.bfloat16)
    h, act = dispatched(o, extras=True, interleave=None, need_preact=False)
    assert h is None
    assert torch.equal(act, dispatched(o, extras=True, interleave=None)[1])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_outputs_have_the_dtype_asked_for(device):
    o = operands(CASES["tail"], torch.float32, device=device)
    h, act = grouped_gemm_swiglu(o.x, o.w, o.splits, out_dtype=torch.bfloat16)
    assert h.dtype == act.dtype == torch.bfloat16
    assert_right((h, act), o, extras=False, interleave=None)


def test_wrong_arguments_are_named():
    o = operands(CASES["three groups"], torch.float32)
    with pytest.raises(ValueError, match="31 out features, but gate and up need an even number"):
        grouped_gemm_swiglu(o.x, o.w[:, 1:], o.splits)
    for size in (0, 3, 32):
        with pytest.raises(ValueError, match=f"glu_interleave_size is {size}, but must divide the 16 features"):
            grouped_gemm_swiglu(o.x, o.w, o.splits, glu_interleave_size=size)
    with pytest.raises(ValueError, match=r"scales has shape \[14\], but must be \[15\]"):
        grouped_gemm_swiglu(o.x, o.w, o.splits, scales_T=o.scales[1:])


@pytest.mark.parametrize("capability", [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)])
@pytest.mark.parametrize("interleave", [0, 5, 32])
@pytest.mark.parametrize("rows", [64, 8192])
@pytest.mark.parametrize(("aligned", "descriptors"), [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize(("dtype", "tf32"), [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)])
def test_tiles_fit_shared_memory(dtype, tf32, aligned, descriptors, rows, interleave, capability):
    about = {"tf32": tf32, "aligned": aligned, "descriptors": descriptors, "capability": capability}
    config = grouped_gemm_swiglu_config(rows, 8, dtype, dtype, glu_interleave_size=interleave, **about)
    used = (config.block_m + 2 * config.block_n) * config.block_k * dtype.itemsize * config.num_stages
    if config.programs:  # and two outputs on their way
        used = (used + 2 * config.block_m * config.block_n * dtype.itemsize) * config.programs
    assert config.num_stages >= 1 and used <= shared_memory_limit(capability)
    whole_runs = interleave != 5
    hopper = capability == (9, 0)
    assert bool(config.programs) == (hopper and descriptors and dtype == torch.bfloat16 and whole_runs)


# -------------------------------------------------------------------------------------------------------- kernel


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
@pytest.mark.parametrize("case", ALL_CASES)
def test_kernel_agrees_with_float64(case, dtype, device):
    o = operands(case, dtype, device=device)
    for interleave, extras in zip(interleaves(case), (False, True, True), strict=True):
        assert_right(launched(o, extras=extras, interleave=interleave), o, extras=extras, interleave=interleave)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("interleave", [None, 8, 32, 64])
@pytest.mark.parametrize("sizes", [[70, 0, 100, 65], [300]], ids=["few rows", "many rows"])
def test_both_heights_of_tiles_take_runs_of_columns(sizes, interleave, device):
    o = operands(Case(sizes, tail=67, K=72, N=384), torch.bfloat16, device=device)
    assert_right(launched(o, extras=True, interleave=interleave), o, extras=True, interleave=interleave)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_kernel_takes_any_gate(dtype, device):
    """Gates so large and so small that exp overflows."""
    splits = Splits.make([7], rows=7, device=device)
    gates = torch.tensor([-200.0, -100.0, -89.0, -88.0, 0.0, 88.0, 200.0])
    w = torch.tensor([1.0, 0.5]).reshape(1, 2, 1)
    o = operands(Case([7], K=1, N=2), dtype, device=device)
    o = o._replace(splits=splits, x=gates[:, None].to(device, dtype), w=w.to(device, dtype))
    assert_right(launched(o, extras=False, interleave=None), o, extras=False, interleave=None)


@pytest.mark.parametrize("device", DEVICES)
def test_kernel_without_preactivation_gives_the_same_activation(device):
    o = operands(CASES["several tiles"], torch.bfloat16, device=device)
    h, act = launched(o, extras=True, interleave=16, need_preact=False)
    assert h is None
    assert torch.equal(act, launched(o, extras=True, interleave=16)[1])


@pytest.mark.interpreter
@settings(max_examples=50)
@given(
    cases(80, st.tuples(st.integers(1, 70), st.integers(1, 70).map(lambda width: 2 * width))),
    st.sampled_from(KERNEL_DTYPES),
    st.booleans(),
    st.integers(0, 2),
    SEEDS,
)
def test_kernel_agrees_for_any_splits_interpreted(case, dtype, extras, which, seed):
    o = operands(case, dtype, seed=seed)
    interleave = interleaves(case)[which]
    assert_right(launched(o, extras=extras, interleave=interleave), o, extras=extras, interleave=interleave)


@pytest.mark.interpreter
def test_launcher_is_a_sound_custom_op():
    o = operands(CASES["tail"], torch.float32)
    h, act = torch.empty_like(o.dy), torch.empty_like(o.dy[:, ::2])
    arguments = (o.x, o.w, o.splits.offsets, o.bias, None, o.alpha, h, act.contiguous(), 0, False)
    torch.library.opcheck(grouped_gemm_swiglu_triton, arguments, test_utils=("test_schema", "test_faketensor"))


# ------------------------------------------------------------------------------------------------------------ GPU

# (in features, out features, interleave): few enough sets of compiled kernels
GPU_FEATURES = st.sampled_from(
    [(16, 32, None), (144, 320, None), (272, 64, 32), (80, 192, 32), (65, 130, None), (127, 90, None), (33, 250, 5)]
)


@pytest.mark.gpu
@settings(max_examples=500)
@given(
    GPU_FEATURES.flatmap(lambda f: st.tuples(cases(400, st.just(f[:2]), 12), st.just(f[2]))),
    st.sampled_from(KERNEL_DTYPES),
    st.booleans(),
    SEEDS,
)
def test_kernel_agrees_for_any_splits_on_the_gpu(case_and_interleave, dtype, extras, seed):
    case, interleave = case_and_interleave
    o = operands(case, dtype, seed=seed, device="cuda")
    assert_right(launched(o, extras=extras, interleave=interleave), o, extras=extras, interleave=interleave)


@pytest.mark.gpu
@pytest.mark.parametrize("interleave", [None, 32])
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_large_shapes(dtype, interleave):
    sizes = torch.multinomial(torch.rand(64), 16_000, replacement=True).bincount(minlength=64).tolist()
    o = operands(Case(sizes, tail=384, K=2048, N=1536), dtype, device="cuda")
    o = o._replace(x=o.x / 8)  # or products of gate and up leave float16's range
    assert_right(dispatched(o, extras=True, interleave=interleave), o, extras=True, interleave=interleave)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_repeats_give_the_same_bits(dtype):
    o = operands(Case([300, 0, 1000, 77], tail=50, K=200, N=320), dtype, device="cuda")
    h, act = dispatched(o, extras=True, interleave=32)
    for _ in range(10):
        again_h, again_act = dispatched(o, extras=True, interleave=32)
        assert torch.equal(h, again_h) and torch.equal(act, again_act)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype:UserWarning")
def test_dispatch_never_waits_for_the_device():
    o = operands(Case([300, 0, 100, 77], tail=50, K=64, N=32), torch.bfloat16, device="cuda")
    sizes = torch.tensor([300, 0, 100, 77], device="cuda")
    dispatched(o, extras=True, interleave=None)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        splits = Splits.make(sizes, rows=o.x.shape[0], device="cuda")
        dispatched(o._replace(splits=splits), extras=True, interleave=None)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", KERNEL_DTYPES)
def test_graph_replay_with_other_splits_equals_eager(dtype):
    o = operands(Case([0, 0, 0, 512], K=96, N=64), dtype, device="cuda")
    sizes = torch.tensor([512, 0, 0, 0], device="cuda")

    def step() -> Result:
        splits = Splits.make(sizes, rows=o.x.shape[0], device="cuda")
        return dispatched(o._replace(splits=splits), extras=True, interleave=None)

    step()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for other in ([128, 128, 128, 128], [0, TILE + 1, 0, 300], [0, 0, 0, 0], [1, 2, 3, 4], [0, 512, 0, 0]):
        sizes.copy_(torch.tensor(other))
        graph.replay()
        replayed = [result.clone() for result in captured]
        for again, eager in zip(replayed, step(), strict=True):
            assert torch.equal(again, eager), other
