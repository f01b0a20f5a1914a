"""A grouped product and its activation in one kernel: the bits of the two kernels it replaces, wherever it runs."""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from ops.kernels.elementwise.activation import KINDS, Activation, activation, activation_step
from ops.kernels.grouped_gemm import grouped_activation as kernels
from ops.kernels.grouped_gemm.grouped_activation import (
    grouped_activation,
    grouped_activation_ref,
    grouped_activation_triton,
    grouped_gemm_activation,
    why_not_at_once,
    why_not_both_stored,
)
from ops.kernels.grouped_gemm.high_precision import grouped_gemm_tn
from ops.kernels.grouped_gemm.tile_rules import (
    DECODE_ROWS,
    FEW_ROWS,
    QUEUED_IN_GLUON,
    QUEUED_ROWS,
    activation_config,
    has_fast_memory,
)
from recipes.triton.replay import forget
from tests import reference
from tests.grouped_cases import DEVICES, Case, Operands, operands

# Triton 3.6's interpreter turns arrays of one element into loop bounds, which numpy >= 2.4 will refuse.
pytestmark = pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")

HOPPER = (9, 0)
FULL = 2 * FEW_ROWS  # rows a group for which tiles are full
SHAPES = {
    "several tiles": Case([70, 3, 130], K=80, N=544),
    "empty groups and a tail": Case([0, 4, 0, 0, 9, 0], tail=130, K=64, N=160),
    "all empty": Case([0, 0, 0], tail=70, K=64, N=64),
    "one row": Case([0, 1, 0], K=64, N=64),
    "narrow": Case([5, 7, 3], K=24, N=32),
}
# Kinds and interleave sizes: halves, runs within a tile, as long as one, and longer ones.
FORMS = [("swiglu", None), ("swiglu", 1), ("swiglu", 16), ("swiglu", 128), ("srelu", None)]


def spec_of(kind: str, interleave: int | None = None) -> Activation:
    return Activation(kind, glu_interleave_size=interleave)


def fitted(case: Case, spec: Activation) -> Case:
    """With features that the runs divide."""
    run = spec.glu_interleave_size or 1
    return case if (case.N // 2) % run == 0 else case._replace(N=4 * run)


def named(o: Operands, extras: bool) -> dict[str, Tensor | None]:
    """Bias and scales, if they are given."""
    return {"bias_GN": o.bias, "scales_T": o.scales} if extras else {"bias_GN": None, "scales_T": None}


def launched(o: Operands, spec: Activation, *, extras: bool, rows_a_group: int) -> Tensor:
    """What the kernel makes of an output full of NaN, with the tile of groups of so many rows."""
    groups, N, _ = o.w.shape
    act = torch.full((len(o.x), N // 2 if spec.gated else N), torch.nan, dtype=o.x.dtype, device=o.x.device)
    tile = activation_config(rows_a_group * groups, groups, spec.gated)
    grouped_activation_triton(o.x, o.w, o.splits.offsets, spec, *named(o, extras).values(), act, tile)
    return act


def one_after_the_other(o: Operands, spec: Activation, *, extras: bool) -> Tensor:
    """By the two kernels; scales of the tail, which may be anything, are 0 here."""
    bias, scales = named(o._replace(scales=o.scales.nan_to_num()), extras).values()
    return activation(grouped_gemm_tn(o.x, o.w, o.splits, bias_GN=bias), spec, scales)


@pytest.mark.launches("m_grouped_activation_kernel")
@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows_a_group", [1, FULL])
@pytest.mark.parametrize(("kind", "interleave"), FORMS)
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in SHAPES.items()])
def test_kernel_agrees_with_the_reference(case, kind, interleave, rows_a_group, device):
    """Sums of small integers are exact, so that what is rounded next is the same in any order of sums."""
    spec = spec_of(kind, interleave)
    o = operands(fitted(case, spec), torch.bfloat16, device=device, integers=True)
    for extras in (False, True):
        act = launched(o, spec, extras=extras, rows_a_group=rows_a_group)
        without_nan = o._replace(x=o.x.nan_to_num(), scales=o.scales.nan_to_num())
        expected = grouped_activation_ref(without_nan.x, o.w, o.splits, spec, **named(without_nan, extras))
        torch.testing.assert_close(act, expected, rtol=2**-7, atol=1e-30)  # a sigmoid is never 0
        assert not act[int(o.splits.offsets[-1]) :].any(), "rows of no group are not zero"


@pytest.mark.rest
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_every_activation_has_the_bits_of_its_own_kernel(kind, dtype, device):
    """Under the interpreter sums are exact, as of small integers; on the GPU they have one order."""
    for interleave in (None, 8) if spec_of(kind).gated else (None,):
        spec, on_gpu = spec_of(kind, interleave), device == "cuda"
        o = operands(SHAPES["empty groups and a tail"], dtype, device=device, integers=not on_gpu)
        o = o._replace(w=o.w / 64)  # as exact, and cubes of the sums are within the range of float16
        for rows_a_group in (1, DECODE_ROWS, FULL):
            act = launched(o, spec, extras=True, rows_a_group=rows_a_group)
            if on_gpu:
                assert torch.equal(act, one_after_the_other(o, spec, extras=True))
            else:
                scales = o.scales.nan_to_num()
                expected = grouped_activation_ref(
                    o.x.nan_to_num(), o.w, o.splits, spec, bias_GN=o.bias, scales_T=scales
                )
                torch.testing.assert_close(act, expected, rtol=2**-7, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("kind", "interleave"), FORMS)
def test_a_cpu_runs_one_after_the_other(kind, interleave, dtype):
    spec = spec_of(kind, interleave)
    o = operands(fitted(Case([5, 0, 3], K=24, N=32), spec), dtype)
    act = grouped_activation(o.x, o.w, o.splits, spec, **named(o, True))
    assert torch.equal(act, one_after_the_other(o, spec, extras=True))


@pytest.mark.parametrize(
    ("dtype", "weights", "spec", "gpu", "sentence"),
    [
        (torch.bfloat16, (8, 64, 64), spec_of("swiglu"), None, "A CPU runs the product and the activation"),
        (
            torch.bfloat16,
            (8, 64, 64),
            spec_of("swiglu"),
            (8, 0),
            "9.0 (Hopper), and this is 8.0",
        ),
        (
            torch.float32,
            (8, 64, 64),
            spec_of("swiglu"),
            HOPPER,
            "bfloat16 and float16, and these are float32",
        ),
        (torch.bfloat16, (2000, 64, 64), spec_of("swiglu"), HOPPER, "1024 groups at most, and there are 2000"),
        (torch.bfloat16, (8, 64, 60), spec_of("swiglu"), HOPPER, "60 in features and 32 of the activation"),
        (torch.bfloat16, (8, 72, 64), spec_of("swiglu"), HOPPER, "64 in features and 36 of the activation"),
        (torch.bfloat16, (8, 96, 64), spec_of("swiglu", 24), HOPPER, "power of two, and glu_interleave_size is 24"),
    ],
)
def test_a_refusal_is_a_sentence(dtype, weights, spec, gpu, sentence):
    assert sentence in why_not_at_once(dtype, weights, spec, gpu)


WIDE = (8, 512, 384)  # [G, N, K] that the kernel which stores both takes


@pytest.mark.parametrize(
    ("dtype", "weights", "spec", "gpu", "sentence"),
    [
        (torch.bfloat16, WIDE, spec_of("swiglu"), None, "A CPU runs the product and the activation"),
        (torch.float16, WIDE, spec_of("swiglu"), HOPPER, "multiplies bfloat16, and these are float16"),
        (torch.bfloat16, (600, 512, 384), spec_of("swiglu"), HOPPER, "512 groups at most, and there are 600"),
        (torch.bfloat16, WIDE, spec_of("situglu"), HOPPER, "registers for SwiGLU alone, and this is situglu"),
        (torch.bfloat16, WIDE, spec_of("swiglu", 32), HOPPER, "halves of the columns, and glu_interleave_size is 32"),
        (torch.bfloat16, (8, 448, 384), spec_of("swiglu"), HOPPER, "multiple of 64, and these are 384 and 224"),
        (torch.bfloat16, (8, 512, 376), spec_of("swiglu"), HOPPER, "384 at least, and"),
        (torch.bfloat16, (8, 512, 388), spec_of("swiglu"), HOPPER, "multiple of 8, 384 at least, and"),
        (torch.bfloat16, (8, 384, 384), spec_of("swiglu"), HOPPER, "128 features of the activation at a time"),
        (torch.bfloat16, (8, 640, 384), spec_of("swiglu"), HOPPER, None),
        (torch.bfloat16, WIDE, spec_of("swiglu"), HOPPER, None),
        (torch.bfloat16, WIDE, spec_of("swiglu", 256), HOPPER, None),
    ],
)
def test_where_both_are_stored_a_refusal_is_a_sentence(dtype, weights, spec, gpu, sentence, monkeypatch):
    monkeypatch.setattr(kernels, "why_no_gluon", lambda gpu: None)
    monkeypatch.setattr(kernels, "has_fast_memory", lambda: True)
    found = why_not_both_stored(dtype, weights, spec, gpu)
    assert found is None if sentence is None else sentence in found
    monkeypatch.setattr(kernels, "has_fast_memory", lambda: False)
    assert gpu is None or "100 GiB" in why_not_both_stored(dtype, weights, spec, gpu)


@pytest.mark.parametrize(("kind", "interleave"), FORMS)
def test_both_are_returned_on_a_cpu(kind, interleave):
    spec = spec_of(kind, interleave)
    o = operands(fitted(Case([5, 0, 3], K=24, N=32), spec), torch.bfloat16)
    h, act = grouped_gemm_activation(o.x, o.w, o.splits, spec, scales_T=o.scales)
    assert torch.equal(h, grouped_gemm_tn(o.x, o.w, o.splits))
    assert torch.equal(act, activation(h, spec, o.scales))


def test_what_is_not_refused():
    for spec in (spec_of("swiglu"), spec_of("situglu", 32), spec_of("swiglu", 48), spec_of("srelu", 3)):
        assert why_not_at_once(torch.bfloat16, (8, 96, 64), spec, HOPPER) is None


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_wrong_arguments_are_named(device):
    o = operands(Case([5, 0, 3], K=64, N=48), torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="one scale a row|one scale for each row|Give one scale"):
        grouped_activation(o.x, o.w, o.splits, spec_of("swiglu"), scales_T=o.scales[:3])
    with pytest.raises(ValueError, match="2 \\* glu_interleave_size = 32"):
        grouped_activation(o.x, o.w, o.splits, spec_of("swiglu", 16))
    with pytest.raises(ValueError, match="bias has shape"):
        grouped_activation(o.x, o.w, o.splits, spec_of("swiglu"), bias_GN=o.bias[:2])


# ------------------------------------------------------------------------------------------------- only on the GPU

MODEL_SHAPES = {
    "qwen3-30b-a3b": Case([3, 0, 1, 0, 9, 0, 0, 40], tail=5, K=2048, N=1536),
    "gpt-oss": Case([1, 0, 300, 2], K=2880, N=5760),
    "deepseek-v3": Case([0, 2, 0, 700], tail=100, K=7168, N=4096),
}


@pytest.mark.gpu
@pytest.mark.parametrize("interleave", [None, 1, 32])
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in MODEL_SHAPES.items()])
def test_bits_of_models_are_those_of_two_kernels(case, interleave):
    """With the tiles of any number of rows."""
    o = operands(case, torch.bfloat16, device="cuda")
    o = o._replace(w=o.w * case.K**-0.5)
    kind = "clamped_swiglu" if interleave == 1 else "swiglu"
    for extras in (False, True):
        spec = spec_of(kind, interleave)
        expected = one_after_the_other(o, spec, extras=extras)
        assert torch.equal(grouped_activation(o.x, o.w, o.splits, spec, **named(o, extras)), expected)
        for rows_a_group in (1, DECODE_ROWS, FULL):
            assert torch.equal(launched(o, spec, extras=extras, rows_a_group=rows_a_group), expected)


STORED_SHAPES = {
    "small": Case([0, 300, 1, 64, 0, 65, 700], tail=5, K=384, N=512),
    "all empty": Case([0, 0, 0], tail=70, K=384, N=256),
    "one group": Case([1], K=400, N=256),
    "qwen3-30b-a3b": Case([300, 0, 129, 800, 1, 0, 127, 400], tail=300, K=2048, N=1536),
    "deepseek-v2-lite": Case([700, 0, 64, 500], K=2048, N=2816),
    "half a tile": Case([300, 0, 65], tail=70, K=384, N=384),
    "one box": Case([3, 129], K=384, N=128),
    "gpt-oss": Case([300, 1, 700], tail=3, K=2880, N=5760),
    "deepseek-v3": Case([0, 900, 1700], tail=100, K=7168, N=4096),
}


@pytest.mark.gpu
@pytest.mark.parametrize("scales_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in STORED_SHAPES.items()])
def test_both_that_one_kernel_stores_have_the_bits_of_two(case, scales_dtype):
    o = operands(case, torch.bfloat16, device="cuda", seed=int(torch.randint(1 << 30, ())))
    w, spec = o.w * case.K**-0.5, spec_of("swiglu")
    scales = None if scales_dtype is None else o.scales.to(scales_dtype)
    h, act = (torch.full((len(o.x), n), torch.nan, dtype=o.x.dtype, device="cuda") for n in (case.N, case.N // 2))
    step = activation_step(spec, scales is not None)
    kernels.m_grouped_activation_gluon(o.x, w, o.splits.offsets, scales, h, act, QUEUED_IN_GLUON, step)
    expected = grouped_gemm_tn(o.x, w, o.splits)
    assert torch.equal(h, expected)
    assert torch.equal(act, activation(expected, spec, None if scales is None else scales.nan_to_num()))
    assert not act[int(o.splits.offsets[-1]) :].any() and not h[int(o.splits.offsets[-1]) :].any()
    alone = torch.full_like(act, torch.nan)
    kernels.m_grouped_activation_gluon(o.x, w, o.splits.offsets, scales, None, alone, QUEUED_IN_GLUON, step)
    assert torch.equal(alone, act)


@pytest.mark.gpu
def test_one_kernel_in_gluon_runs_where_groups_have_many_rows():
    for sizes in ([QUEUED_ROWS - 1, QUEUED_ROWS + 2, 300], [QUEUED_ROWS - 1] * 3):
        o = operands(Case(sizes, K=384, N=512), torch.bfloat16, device="cuda")
        together = has_fast_memory(o.x) and sum(sizes) >= 3 * QUEUED_ROWS
        about, scales = (o.x, o.w, o.splits, spec_of("swiglu")), o.scales
        forget()
        wrapped = kernels.m_grouped_activation_gluon
        with patch.object(kernels, "m_grouped_activation_gluon", wraps=wrapped) as launched:
            for _ in range(3):  # runs, is recorded, is repeated
                h, act = grouped_gemm_activation(*about, scales_T=scales)
                assert torch.equal(h, grouped_gemm_tn(o.x, o.w, o.splits))
                assert torch.equal(act, activation(h, spec_of("swiglu"), scales))
                assert torch.equal(act, grouped_activation(*about, scales_T=scales))
        assert launched.call_count == (4 if together else 0)


@pytest.mark.gpu
def test_what_descriptors_cannot_describe_takes_two_kernels():
    o = operands(Case([5, 0, 3], tail=2, K=64, N=64), torch.bfloat16, device="cuda")
    odd = torch.empty(o.x.numel() + 1, dtype=o.x.dtype, device="cuda")[1:].view(o.x.shape).copy_(o.x)
    scales = o.scales.nan_to_num()
    found = grouped_activation(odd, o.w, o.splits, spec_of("swiglu"), scales_T=scales)
    expected = grouped_activation(o.x, o.w, o.splits, spec_of("swiglu"), scales_T=scales)
    torch.testing.assert_close(found, expected)


@pytest.mark.gpu
def test_the_pre_activation_is_not_stored():
    o = operands(Case([500] * 8, K=256, N=4096), torch.bfloat16, device="cuda")
    spec = spec_of("swiglu")
    for _ in range(3):  # compiles, records, repeats
        grouped_activation(o.x, o.w, o.splits, spec)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    act = grouped_activation(o.x, o.w, o.splits, spec)
    assert torch.cuda.max_memory_allocated() - before < 1.5 * act.numel() * act.itemsize


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_splits():
    o = operands(Case([100, 100, 100, 100], K=128, N=256), torch.bfloat16, device="cuda")
    spec, offsets = spec_of("swiglu"), o.splits.offsets
    graph, captured = reference.capture(lambda: [grouped_activation(o.x, o.w, o.splits, spec, scales_T=o.scales)])
    for ends in ((0, 0, 0, 400), (1, 2, 3, 4), (0, 399, 399, 400), (130, 130, 131, 300), (0, 0, 0, 0)):
        offsets[1:] = torch.tensor(ends, device="cuda")
        graph.replay()
        replayed = captured[0].clone()
        expected = grouped_activation(o.x, o.w, o.splits, spec, scales_T=o.scales)
        assert torch.equal(replayed, expected) and not replayed[ends[-1] :].any()
