"""FC1 of codes, its activation and the cast of that in one kernel: the bits of the two kernels that it replaces."""

from unittest.mock import patch

import pytest
import torch

from ops.kernels.elementwise.activation import Activation, activation_cast
from ops.kernels.grouped_gemm import float8_activation as kernels
from ops.kernels.grouped_gemm.float8 import grouped_gemm_tn_float8
from ops.kernels.grouped_gemm.float8_activation import (
    grouped_gemm_activation_cast,
    why_not_cast_at_once,
)
from ops.kernels.grouped_gemm.tile_rules import QUEUED_ROWS
from recipes.casts.layout import empty_copies
from recipes.casts.scale_rules import GivenScale
from recipes.current_scaling import per_tensor
from recipes.tensors.formats import E4M3
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantizer import QuantizedBuffers
from recipes.tensors.scaled_codes import Float8Operand, scaled_copies
from recipes.tensors.splits import Splits
from recipes.triton.gates import why_no_gluon
from recipes.triton.replay import forget

HOPPER = (9, 0)
WIDE = (8, 512, 768)  # [G, N, K] that the kernel takes
SWIGLU = Activation("swiglu")


@pytest.mark.parametrize(
    ("weights", "spec", "about", "sentence"),
    [
        (WIDE, SWIGLU, {"gpu": None}, "A CPU runs the product and the activation"),
        (WIDE, SWIGLU, {"dtype": torch.float16}, "bfloat16 between the layers, and this is float16"),
        (WIDE, SWIGLU, {"split": True}, "no registers for split accumulation"),
        ((600, 512, 768), SWIGLU, {}, "512 groups at most, and there are 600"),
        (WIDE, Activation("situglu"), {}, "registers for SwiGLU alone, and this is situglu"),
        (WIDE, Activation("swiglu", glu_interleave_size=32), {}, "glu_interleave_size is 32"),
        ((8, 448, 768), SWIGLU, {}, "multiple of 64, and these are 768 and 224"),
        ((8, 512, 752), SWIGLU, {}, "multiple of 16, 768 at least, and"),
        ((8, 512, 776), SWIGLU, {}, "multiple of 16, 768 at least, and"),
        ((8, 384, 768), SWIGLU, {}, "128 features of the activation at a time"),
        (WIDE, SWIGLU, {}, None),
        (WIDE, Activation("swiglu", glu_interleave_size=256), {}, None),
    ],
)
def test_a_refusal_is_a_sentence(weights, spec, about, sentence, monkeypatch):
    monkeypatch.setattr(kernels, "why_no_gluon", lambda gpu: None)
    found = why_not_cast_at_once(
        **{"dtype": torch.bfloat16, "split": False, "gpu": HOPPER} | about, weights=weights, spec=spec
    )
    assert found is None if sentence is None else sentence in found


# ------------------------------------------------------------------------------------------------- only on the GPU

SHAPES = {
    "small": ([0, 300, 1, 64, 0, 65, 700], 5, 768, 512),
    "all empty": ([0, 0, 0], 70, 768, 256),
    "one group": ([1], 0, 784, 256),
    "qwen3-30b-a3b": ([300, 0, 129, 800, 1, 0, 127, 400], 300, 2048, 1536),
    "deepseek-v2-lite": ([700, 0, 64, 500], 0, 2048, 2816),
    "half a tile": ([300, 0, 65], 70, 768, 640),
    "gpt-oss": ([300, 1, 700], 3, 2880, 5760),
    "deepseek-v3": ([0, 900, 1700], 100, 7168, 4096),
}


def operands(sizes: list[int], tail: int, K: int, N: int):
    """Codes of x and w whose product has a deviation of about 1, with a scale for each group, and factors of rows."""
    G, rows = len(sizes), sum(sizes) + tail
    x, w = (
        torch.randn(shape, device="cuda").mul(100).clamp(-448, 448).to(E4M3.dtype) for shape in ((rows, K), (G, N, K))
    )
    x_scale, w_scale = (torch.rand(2, G, device="cuda") + 0.5) * K**-0.25 / 100
    splits = Splits.make(sizes, rows=rows, device="cuda")
    factors = torch.randn(rows, device="cuda")
    factors[sum(sizes) :] = torch.nan
    return Float8Operand(x, x_scale, "tensor"), Float8Operand(w, w_scale, "tensor"), splits, factors


def buffers(splits: Splits, columns: int, scale: torch.Tensor, *, records: bool) -> QuantizedBuffers:
    """Of act, filled with what nobody should find, and an amax that is larger than that of the first group."""
    spec, shape = per_tensor(E4M3, GivenScale()), torch.Size((splits.rows, columns))
    copies = empty_copies(shape, spec, splits.device, rowwise=True, columnwise=False, splits=splits)
    copies.row_codes.view(torch.uint8).fill_(0x55)
    copies.row_scale.fill_(torch.nan)
    amax = torch.zeros_like(scale)
    amax[0] = 1e4
    grouped = GroupedTensor(None, splits, *scaled_copies(copies, spec, shape), torch.bfloat16)
    return QuantizedBuffers(grouped, scale, amax if records else None)


def check(x, w, splits, factors, *, records: bool = True) -> None:
    columns = w.codes.shape[1] // 2
    scale = torch.rand(splits.num_groups, device="cuda") * 100 + 50  # some codes saturate
    h = grouped_gemm_tn_float8(x.codes, x.scale, w.codes, w.scale, splits)
    expected, found = (buffers(splits, columns, scale, records=records) for _ in range(2))
    activation_cast(h, SWIGLU, factors, expected)
    for stores_h in (True, False):
        got = grouped_gemm_activation_cast(x, w, splits, SWIGLU, found, scales_T=factors, stores_h=stores_h)
        assert torch.equal(got, h) if stores_h else (got is None or torch.equal(got, h))
        for name in ("codes", "scale_inv"):
            want, have = (getattr(b.copies.rowwise, name).view(torch.uint8) for b in (expected, found))
            assert torch.equal(want, have), name
        if records:
            assert torch.equal(expected.amax, found.amax)
            assert found.amax[0] == 1e4 and (h.numel() == 0 or found.amax[1:].isfinite().all())
        found = buffers(splits, columns, scale, records=records)


def skip_without_gluon() -> None:
    reason = why_no_gluon(torch.cuda.get_device_capability())
    if reason is not None:
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("scales_dtype", [None, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [pytest.param(shape, id=name) for name, shape in SHAPES.items()])
def test_one_kernel_has_the_bits_of_two(shape, scales_dtype):
    skip_without_gluon()
    x, w, splits, factors = operands(*shape)
    with patch.object(kernels, "QUEUED_ROWS", 0), patch.object(kernels, "m_grouped_float8_config") as config:
        config.return_value = kernels.WIDE_IN_GLUON
        forget()
        with patch.object(kernels, "m_grouped_activation_gluon", wraps=kernels.m_grouped_activation_gluon) as launched:
            factors = None if scales_dtype is None else factors.to(scales_dtype)
            check(x, w, splits, factors)
            check(x, w, splits, factors, records=False)
        assert launched.call_count == 4
    forget()


@pytest.mark.gpu
def test_it_runs_where_groups_have_many_rows():
    skip_without_gluon()
    for sizes in ([QUEUED_ROWS - 1, QUEUED_ROWS + 2, 300], [QUEUED_ROWS - 1] * 3):
        x, w, splits, factors = operands(sizes, 0, 768, 512)
        forget()
        with patch.object(kernels, "m_grouped_activation_gluon", wraps=kernels.m_grouped_activation_gluon) as launched:
            for _ in range(3):  # runs, is recorded, is repeated
                check(x, w, splits, factors)
        assert bool(launched.call_count) == (sum(sizes) >= 3 * QUEUED_ROWS)


@pytest.mark.gpu
def test_a_number_that_is_none_is_as_in_two_kernels():
    skip_without_gluon()
    x, w, splits, factors = operands([500, 400, 100], 10, 768, 512)
    codes = x.codes.clone()
    codes.view(torch.uint8)[350] = 0x7F  # NaN
    factors[20] = torch.inf
    columns, scale = w.codes.shape[1] // 2, torch.ones(3, device="cuda")
    h = grouped_gemm_tn_float8(codes, x.scale, w.codes, w.scale, splits)
    expected, found = (buffers(splits, columns, scale, records=True) for _ in range(2))
    activation_cast(h, SWIGLU, factors, expected)
    got = grouped_gemm_activation_cast(x._replace(codes=codes), w, splits, SWIGLU, found, scales_T=factors)
    assert torch.equal(got.isnan(), h.isnan()) and torch.equal(got.nan_to_num(), h.nan_to_num())
    want, have = (b.copies.rowwise.codes.view(torch.uint8) for b in (expected, found))
    assert torch.equal(want, have) and torch.equal(expected.amax, found.amax)


@pytest.mark.gpu
def test_a_graph_is_replayed_with_other_splits():
    skip_without_gluon()
    x, w, splits, factors = operands([300, 300, 300, 300], 0, 768, 512)
    factors = factors.nan_to_num()
    scale = torch.rand(4, device="cuda") * 100
    found = buffers(splits, 256, scale, records=True)

    def run():
        return grouped_gemm_activation_cast(x, w, splits, SWIGLU, found, scales_T=factors)

    for _ in range(3):
        run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for ends in ((0, 0, 0, 1200), (1, 2, 3, 4), (0, 399, 399, 1200), (130, 130, 131, 300), (0, 0, 0, 0)):
        splits.offsets[1:] = torch.tensor(ends, device="cuda")
        graph.replay()
        expected = buffers(splits, 256, scale, records=False)
        h = grouped_gemm_tn_float8(x.codes, x.scale, w.codes, w.scale, splits)
        activation_cast(h, SWIGLU, factors, expected)
        want, have = (b.copies.rowwise.codes.view(torch.uint8) for b in (expected, found))
        assert torch.equal(want, have) and torch.equal(got, h)
