"""The element-wise kernel quantizes activations and their gradients in groups of rows, bit for bit as separate casts.

Under the interpreter and on a GPU.
"""

from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

import ops.kernels.elementwise.activation as activations
import ops.kernels.elementwise.chain as chain
import ops.kernels.elementwise.dactivation_cast as dactivation_cast
import ops.products.paths as paths
import recipes.casts.cast_float8 as cast_float8
from fuser import Sequential, autocast, ops
from ops.kernels.elementwise.activation import Activation, activation, activation_cast, activation_shape, dactivation
from ops.kernels.elementwise.chain_cast import why_no_cast
from ops.products.product import gemm_dtype
from recipes import Splits
from recipes.casts.scale_rules import Float32Scale, GivenScale
from recipes.current_scaling import CurrentScalingQuantizer, per_tensor
from recipes.float8_block import Float8BlockQuantizer
from recipes.float8_rowwise import RowwiseScalingQuantizer
from recipes.mxfp8 import MXFP8Quantizer
from recipes.tensors.formats import ALL, E4M3, E5M2, Float8Format, ScaleSpec
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantizer import QuantizedBuffers
from recipes.tensors.spec_quantizer import SpecQuantizer
from tests.grouped_cases import DEVICES

pytestmark = [
    pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning"),  # the interpreter's
    pytest.mark.filterwarnings("ignore:.* encountered in"),  # NumPy's, of NaN and Inf
]
# of groups, and columns of act; the interpreter, which is slow, takes the first ones
CASES = [
    ([5, 0, 33, 1], 72),
    ([0, 0], 16),
    ([64], 64),
    ([3, 129, 0, 70, 5, 64, 200], 200),
    ([3, 129, 0, 70, 5, 64, 200], 208),
]
TAIL = 7  # rows of no group
ACTIVATIONS = {
    "swiglu": Activation("swiglu"),
    "interleaved": Activation("clamped_swiglu", glu_interleave_size=1),
    "runs": Activation("swiglu", glu_interleave_size=4),
    "srelu": Activation("srelu"),
}


RULES_OF_ROWS = [
    Float32Scale(), Float32Scale(power_2=True, input_range=True), Float32Scale(amax_epsilon=0.5)
]  # fmt: skip


class Known(SpecQuantizer):
    """With given scales, of which the amaxes are kept, or with scales that follow from the amaxes."""

    def __init__(self, spec: ScaleSpec, groups: int, device: str) -> None:
        self.own = spec
        self.scale = torch.rand(groups, device=device).add(0.5) * spec.element.max / 4
        self.amax = torch.full((groups,), 0.25, device=device)

    @property
    def spec(self) -> ScaleSpec:
        return self.own

    def scale_and_amax(self, device, num_scales):
        return (self.scale, self.amax) if self.given else (None, None)

    @property
    def given(self) -> bool:
        return type(self.own.scale_rule) is GivenScale


@pytest.fixture(autouse=True)
def kernels_everywhere(monkeypatch):
    """CPU tensors too, which the interpreter takes."""
    for module in (chain, activations):
        monkeypatch.setattr(module, "runs_triton", lambda *tensors, dtypes=(): True)


def same(got: GroupedTensor, want: GroupedTensor, name: str) -> None:
    for copy in ("rowwise", "columnwise"):
        mine, other = getattr(got, copy), getattr(want, copy)
        assert (mine is None) == (other is None), name
        if mine is None:
            continue
        assert torch.equal(mine.codes.view(torch.uint8), other.codes.view(torch.uint8)), f"{name}, {copy}"
        assert torch.equal(mine.scale_inv, other.scale_inv), f"{name}, {copy}"


def filled(quantizer: Known, like: Tensor, splits: Splits, **copies: bool) -> QuantizedBuffers:
    return quantizer.empty_grouped(like.shape, like.dtype, splits, **copies)


def check(x: QuantizedBuffers, quantizer: Known, values: Tensor, splits: Splits, name: str, **copies: bool) -> None:
    found = quantizer.amax.clone()
    quantizer.amax.fill_(0.25)
    same(x.copies, quantizer.quantize_grouped(values, splits, **copies), name)
    assert not quantizer.given or torch.equal(found, quantizer.amax), f"{name}: amaxes"


@pytest.mark.pairwise(first=1, rest=2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("form", [E4M3, E5M2, Float8Format("own", torch.float8_e4m3fn, 240.0)], ids=lambda f: f.name)
@pytest.mark.parametrize("copies", ["row", "column", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", [GivenScale(), Float32Scale(power_2=True)], ids=["given", "amax"])
@pytest.mark.slow
def test_what_is_cast_is_what_would_be_stored_cast(rule, dtype, copies, form, scaled, kind, device):
    check_casts(per_tensor(form, rule), dtype, copies, scaled, kind, device)


@pytest.mark.slow
@pytest.mark.pairwise(first=1, rest=2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["swiglu", "interleaved", "srelu"])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rule", RULES_OF_ROWS, ids=str)
@pytest.mark.parametrize("width", [128, ALL])
def test_rows_are_cast_as_they_are_computed(width, rule, dtype, form, kind, device):
    """With a scale for 128 values, or for all of a row; no columnwise copy."""
    spec, act = ScaleSpec(form, (1, width), rule, "transposed", 128 if width == 128 else 32), ACTIVATIONS[kind]
    for sizes, columns in [*(CASES[:2] if device == "cpu" else CASES), ([9, 0, 3], 136)]:
        rows = sum(sizes) + TAIL
        splits = Splits.make(torch.tensor(sizes, device=device), rows=rows, device=device)
        h = torch.randn(rows, columns * (2 if act.gated else 1), device=device).mul(1e-3).to(dtype)
        h[1::3] *= 1e4
        h[2:3] = 0
        h.view(-1)[[3, 40]] = torch.tensor([float("nan"), float("inf")], device=device).to(dtype)
        h[sum(sizes) :] = float("inf")
        scales = torch.randn(rows, device=device)
        quantizer = Known(spec, len(sizes), device)
        y = activation(h, act, scales)
        into = quantizer.empty_grouped(y.shape, dtype, splits, rowwise=True, columnwise=False)
        activation_cast(h, act, scales, into)
        same(into.copies, quantizer.quantize_grouped(y, splits, rowwise=True), f"{sizes}, {columns}")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ACTIVATIONS)
@pytest.mark.parametrize("copies", ["row", "column", "both"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_groups_meet_beside_larger_ones(dtype, copies, kind, monkeypatch):
    """Up to 192 rows do; where programs share groups, three have one."""
    monkeypatch.setattr(cast_float8, "most_rows", lambda *about: 192)
    monkeypatch.setattr(cast_float8, "most_programs", lambda *about: 3)
    monkeypatch.setattr(cast_float8, "MOST_TILES", 10**6)
    check_casts(per_tensor(E4M3, Float32Scale()), dtype, copies, True, kind, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["swiglu", "situglu", "clamped_swiglu"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("copies", ["row", "column", "both"])
@pytest.mark.parametrize("rule", [True, False], ids=["powers of two", "float32"])
@pytest.mark.parametrize(
    ("quantizer", "most"),
    [(Float8BlockQuantizer, 0), (RowwiseScalingQuantizer, 192), (RowwiseScalingQuantizer, 9999)],
    ids=["blocks", "rows and columns, up to 192 rows meet", "rows and columns"],
)
def test_rows_and_columns_are_cast_as_they_are_computed_in_backward(
    quantizer, most, rule, copies, form, scaled, kind, monkeypatch
):  # fmt: skip
    """dh with scales for 128 values of its rows and columns, or for all, and act of its columns."""
    monkeypatch.setattr(cast_float8, "most_rows", lambda *about: most)
    act, quantizer = Activation(kind), quantizer(form, power_2_scale=rule, amax_epsilon=0.0 if rule else 0.5)
    wanted = {"rowwise": copies != "column", "columnwise": copies != "row"}
    of_act = {"rowwise": False, "columnwise": True}
    at_random = torch.randint(0, 400, (20,)).tolist()
    for sizes, width in [
        ([5, 0, 33, 1], 128), ([0, 0], 128), ([3, 129, 0, 700, 5, 64, 128, 200], 384),
        (at_random, 256 if quantizer.spec.block[1] == 128 else 208),
    ]:  # fmt: skip
        rows = sum(sizes) + TAIL
        splits = Splits.make(torch.tensor(sizes, device="cuda"), rows=rows, device="cuda")
        h = torch.randn(rows, 2 * width, device="cuda").bfloat16()
        h[1::3] *= 1e-3
        h.view(-1)[::11] = 0
        h.view(-1)[[3, 40]] = torch.tensor([float("nan"), float("inf")], device="cuda").bfloat16()
        h[sum(sizes) :] = float("inf")  # no group's rows count
        scales = torch.randn(rows, device="cuda") if scaled else None
        dact = torch.randn(rows, width, device="cuda").bfloat16()
        dh, dscales, again = dactivation(dact, h, act, scales, need_dscales=scaled, need_act=True)
        dh_into = quantizer.empty_grouped(h.shape, h.dtype, splits, **wanted)
        act_into = quantizer.empty_grouped(dact.shape, h.dtype, splits, **of_act)
        stored = copies == "both"
        got = dactivation(
            dact, h, act, scales, need_dh=stored, need_dscales=scaled, dh_into=dh_into, act_into=act_into
        )  # fmt: skip
        same(dh_into.copies, quantizer.quantize_grouped(dh, splits, **wanted), f"dh of {sizes}")
        same(act_into.copies, quantizer.quantize_grouped(again, splits, **of_act), f"act of {sizes}")
        if stored:
            assert torch.equal(got[0][: sum(sizes)].view(torch.uint8), dh[: sum(sizes)].view(torch.uint8))
        if scaled:
            mine, other = got[1][: sum(sizes)], dscales[: sum(sizes)]
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("quantizer", [Float8BlockQuantizer(E4M3), RowwiseScalingQuantizer(E4M3)], ids=str)
def test_more_programs_cast_as_they_compute_than_a_gpu_holds(quantizer):
    """Rows of a model's size, whose groups meet one after the other."""
    sizes = torch.randint(0, 1536, (64,)).tolist()
    splits = Splits.make(torch.tensor(sizes, device="cuda"), rows=sum(sizes), device="cuda")
    act, both, of_act = (
        Activation("swiglu"),
        {"rowwise": True, "columnwise": True},
        {"rowwise": False, "columnwise": True},
    )
    h, dact = (torch.randn(sum(sizes), width, device="cuda").bfloat16() for width in (2816, 1408))
    dh, _, again = dactivation(dact, h, act, None, need_act=True)
    expected = quantizer.quantize_grouped(dh, splits, **both), quantizer.quantize_grouped(again, splits, **of_act)
    for _ in range(3):
        dh_into = quantizer.empty_grouped(h.shape, h.dtype, splits, **both)
        act_into = quantizer.empty_grouped(dact.shape, h.dtype, splits, **of_act)
        dactivation(dact, h, act, None, need_dh=False, dh_into=dh_into, act_into=act_into)
        same(dh_into.copies, expected[0], "dh")
        same(act_into.copies, expected[1], "act")


@pytest.mark.gpu
@pytest.mark.parametrize("programs", [None, 7], ids=["as many as fit", "seven a group"])
def test_groups_of_all_sizes_meet(programs, monkeypatch):
    """Rows of a model's size, and a few groups that have most of them."""
    if programs is not None:
        monkeypatch.setattr(cast_float8, "most_programs", lambda *about: programs)
        monkeypatch.setattr(cast_float8, "MOST_TILES", 10**6)
    quantizer, act = CurrentScalingQuantizer(E4M3), Activation("swiglu")
    both, of_act = {"rowwise": True, "columnwise": True}, {"rowwise": False, "columnwise": True}
    for sizes in (torch.randint(0, 1536, (64,)).tolist(), [9000, 0, 5000, *torch.randint(0, 300, (61,)).tolist()]):
        splits = Splits.make(torch.tensor(sizes, device="cuda"), rows=sum(sizes) + TAIL, device="cuda")
        h, dact = (torch.randn(sum(sizes) + TAIL, width, device="cuda").bfloat16() for width in (2816, 1408))
        scales = torch.rand(len(h), device="cuda")
        dh, dscales, again = dactivation(dact, h, act, scales, need_dscales=True, need_act=True)
        expected = quantizer.quantize_grouped(dh, splits, **both), quantizer.quantize_grouped(again, splits, **of_act)
        forward = quantizer.empty_grouped(dact.shape, h.dtype, splits, rowwise=True, columnwise=False)
        activation_cast(h, act, scales, forward)
        same(forward.copies, quantizer.quantize_grouped(again, splits, rowwise=True, columnwise=False), "act, forward")
        for _ in range(3):
            dh_into = quantizer.empty_grouped(h.shape, h.dtype, splits, **both)
            act_into = quantizer.empty_grouped(dact.shape, h.dtype, splits, **of_act, meetings=forward.meetings)
            with patch.object(dactivation_cast, "_amax", None):  # not launched
                got = dactivation(
                    dact, h, act, scales, need_dh=True, need_dscales=True, dh_into=dh_into, act_into=act_into
                )  # fmt: skip
            same(dh_into.copies, expected[0], "dh")
            same(act_into.copies, expected[1], "act")
            rows = sum(sizes)
            assert torch.equal(got[0][:rows], dh[:rows])
            torch.testing.assert_close(got[1][:rows], dscales[:rows], rtol=1e-4, atol=1e-4)


def check_casts(spec: ScaleSpec, dtype: torch.dtype, copies: str, scaled: bool, kind: str, device: str) -> None:
    act = ACTIVATIONS[kind]
    wanted = {"rowwise": copies != "column", "columnwise": copies != "row"}
    for sizes, width in CASES[:2] if device == "cpu" else CASES:
        rows = sum(sizes) + TAIL
        splits = Splits.make(torch.tensor(sizes, device=device), rows=rows, device=device)
        h = torch.randn(rows, width * (2 if act.gated else 1), device=device).to(dtype)
        h.view(-1)[::11] = 0
        h.view(-1)[3] = float("nan")
        h[sum(sizes) :] = float("inf")  # no group's rows count
        scales = torch.randn(rows, device=device) if scaled else None
        dact = torch.randn(activation_shape(h.shape, act), device=device).to(dtype)
        y = activation(h, act, scales)

        quantizer = Known(spec, len(sizes), device)
        into = filled(quantizer, y, splits, **wanted)
        activation_cast(h, act, scales, into)
        check(into, quantizer, y, splits, "forward", **wanted)

        of_dh, of_act = (Known(spec, len(sizes), device) for _ in range(2))
        dh, dscales, again = dactivation(dact, h, act, scales, need_dscales=scaled, need_act=True)
        dh_into = filled(of_dh, dh, splits, **wanted)
        known = {} if of_act.given or copies == "column" else {"meetings": into.meetings}
        act_into = of_act.empty_grouped(y.shape, y.dtype, splits, rowwise=False, columnwise=True, **known)
        stored = copies == "both"  # beside its codes, as a bias's gradient needs it
        got = dactivation(
            dact, h, act, scales, need_dh=stored, need_dscales=scaled, dh_into=dh_into, act_into=act_into
        )  # fmt: skip
        check(dh_into, of_dh, dh, splits, "dh", **wanted)
        check(act_into, of_act, again, splits, "act", rowwise=False, columnwise=True)
        assert got[2] is None and (got[0] is None) == (not stored)
        if device == "cuda":  # act alone, of whose amaxes nothing is known
            act_into = filled(of_act, y, splits, rowwise=False, columnwise=True)
            dactivation(dact, h, act, scales, need_dh=False, act_into=act_into)
            check(act_into, of_act, again, splits, "act alone", rowwise=False, columnwise=True)
        if stored:
            assert torch.equal(got[0][: sum(sizes)].view(torch.uint8), dh[: sum(sizes)].view(torch.uint8))
        if scaled:
            mine, other = got[1][: sum(sizes)], dscales[: sum(sizes)]
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, equal_nan=True)


@pytest.mark.pairwise(rest=2)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["swiglu", "runs of 32", "srelu"])
@pytest.mark.parametrize("scaled", [True, False], ids=["scaled", "plain"])
@pytest.mark.parametrize("form", [E4M3, E5M2], ids=lambda f: f.name)
@pytest.mark.parametrize("copies", ["row", "column", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.slow
def test_mxfp8_is_computed_as_values(dtype, copies, form, scaled, kind, device):
    """Of both copies, as separate casts are dequantized; in float32 where there are no tensor cores for bfloat16."""
    act = ACTIVATIONS.get(kind) or Activation("swiglu", glu_interleave_size=32)
    quantizer = MXFP8Quantizer(form)
    wanted = {"rowwise": copies != "column", "columnwise": copies != "row"}
    held = gemm_dtype(dtype, torch.device(device))
    for sizes, width in [
        ([5, 0, 33, 1], 96),
        ([0, 0], 32),
        *([([3, 129, 0, 70, 5, 64, 200], 224)] * (device != "cpu")),
    ]:
        rows = sum(sizes) + TAIL
        splits = Splits.make(torch.tensor(sizes, device=device), rows=rows, device=device)
        h = torch.randn(rows, width * (2 if act.gated else 1), device=device).to(dtype)
        h[1::3] *= 1e-3
        h.view(-1)[::11] = 0
        h.view(-1)[[3, 40]] = torch.tensor([float("nan"), float("inf")], device=device).to(dtype)
        h[sum(sizes) :] = float("inf")  # no group's rows count
        scales = torch.randn(rows, device=device) if scaled else None
        dact = torch.randn(activation_shape(h.shape, act), device=device).to(dtype)

        def empty(like, rows_of=splits, **copies):
            return quantizer.empty_grouped(like.shape, dtype, rows_of, **copies, values=held)

        def check_values(into, values, name, rows_of=splits, **copies):
            expected = quantizer.quantize_grouped(values, rows_of, **copies)
            for columnwise, made in enumerate((into.copies.rowwise, into.copies.columnwise)):
                assert (made is not None) == list(copies.values())[columnwise]
                if made is not None:
                    found = into.copies.operand(bool(columnwise), held).values
                    other = expected.operand(bool(columnwise), held).values
                    assert found.dtype == other.dtype == held
                    assert torch.equal(found.nan_to_num(7), other.nan_to_num(7)), f"{name}, {columnwise}"

        y = activation(h, act, scales)
        into = empty(y, **wanted)
        activation_cast(h, act, scales, into)
        check_values(into, y, "forward", **wanted)
        dh, dscales, again = dactivation(dact, h, act, scales, need_dscales=scaled, need_act=True)
        of_act = {"rowwise": False, "columnwise": True}
        dh_into, act_into = empty(dh, **wanted), empty(y, **of_act)
        stored = copies == "both"
        got = dactivation(
            dact, h, act, scales, need_dh=stored, need_dscales=scaled, dh_into=dh_into, act_into=act_into
        )  # fmt: skip
        check_values(dh_into, dh, "dh", **wanted)
        check_values(act_into, again, "act", **of_act)
        if stored:
            assert torch.equal(got[0][: sum(sizes)].view(torch.uint8), dh[: sum(sizes)].view(torch.uint8))
        if scaled:
            mine, other = got[1][: sum(sizes)], dscales[: sum(sizes)]
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_blocks_are_of_columns_that_are_computed_together():
    spec = MXFP8Quantizer(E4M3).spec
    for runs in (None, 32, 1408):
        assert why_no_cast(spec, grouped=True, runs=runs) is None
    assert "Runs of 720 columns" in str(why_no_cast(spec, grouped=True, runs=720))
    assert why_no_cast(MXFP8Quantizer(E4M3, "floor").spec, grouped=True) is not None
    assert why_no_cast(MXFP8Quantizer(E4M3, square=True).spec, grouped=True) is not None


@pytest.mark.parametrize("rule", [Float32Scale(input_range=True), GivenScale(power_2=True)], ids=str)
def test_other_rules_are_cast_from_memory(rule):
    for known in (GivenScale(), Float32Scale(), Float32Scale(power_2=True, amax_epsilon=0.5)):
        assert why_no_cast(per_tensor(E4M3, known), grouped=True) is None
    assert "FP8 with one scale a group" in str(why_no_cast(per_tensor(E4M3, rule), grouped=True))
    assert "FP8 with one given scale" in str(why_no_cast(per_tensor(E4M3, Float32Scale())))


@pytest.mark.pairwise(first=1, rest=2)
@pytest.mark.interpreter
@pytest.mark.parametrize("frozen", [(), ("0.weight",), ("2.weight",), ("0.weight", "0.bias", "x")], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise", "mxfp8"])
@pytest.mark.slow
def test_a_grouped_mlp_has_the_same_bits_whichever_way_it_casts(recipe, bias, frozen, monkeypatch):
    """Results, gradients, amaxes and scales over three steps, in which scales move."""
    sizes = torch.tensor([9, 0, 20, 4])

    def run(casts: bool) -> list[Tensor]:
        computed = 0

        def counted(*args):
            nonlocal computed
            computed += casts
            quantizer, _, _, columns, runs = args
            return casts and why_no_cast(quantizer.spec, grouped=True, columns=columns, runs=runs) is None

        monkeypatch.setattr(paths, "casts_as_computed", counted)
        torch.manual_seed(0)
        model = Sequential(
            ops.GroupedLinear(4, 32, 64, bias=bias), ops.ScaledSwiGLU(), ops.GroupedLinear(4, 32, 32, bias=bias)
        )
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name not in frozen)
        found = []
        for _ in range(3):
            x = torch.randn(36, 32).requires_grad_("x" not in frozen)  # three rows of no group
            scales = torch.rand(36, requires_grad=True)
            with autocast(recipe=recipe):
                y = model(x, split_sizes=sizes, scales=scales)
            wanted = [t for t in (x, *model.parameters()) if t.requires_grad]
            found += [y, *torch.autograd.grad(y, wanted, torch.randn_like(y), retain_graph=False)]
        assert bool(computed) == casts
        return [*found, *model.buffers()]

    for mine, other in zip(run(True), run(False), strict=True):
        assert torch.equal(mine, other)


def test_explain_says_where_activations_are_quantized():
    model = Sequential(ops.GroupedLinear(2, 32, 64), ops.ScaledSwiGLU(), ops.GroupedLinear(2, 32, 32))
    said = "as it is computed"
    for recipe, how in (
        ("fp8_delayed", f"swiglu quantized {said}, recomputed"),
        ("mxfp8", f"swiglu quantized {said}, recomputed"),
        ("fp8_current", f"swiglu quantized {said} (of large groups amaxes are found), recomputed"),
        ("fp8_block", f"swiglu quantized {said} in forward, recomputed"),
        ("fp8_rowwise", f"swiglu quantized {said} in forward, recomputed"),
    ):
        assert how in model.explain(recipe=recipe, device="cuda", dtype=torch.bfloat16)
    for recipe, device in (("nvfp4", "cuda"), (None, "cuda"), ("fp8_delayed", "cpu"), ("fp8_current", "cpu")):
        assert said not in model.explain(recipe=recipe, device=device, dtype=torch.bfloat16)


@pytest.mark.parametrize("runs", [True, False])
def test_explain_says_where_rows_and_columns_are_quantized_in_backward(runs, monkeypatch):
    """Where kernels in Gluon run; blocks if they are whole."""
    monkeypatch.setattr(dactivation_cast, "runs_gluon", lambda device: runs and device.type == "cuda")
    for width, interleave in ((128, None), (64, None), (128, 32)):
        activation = ops.ScaledSwiGLU(glu_interleave_size=interleave)
        model = Sequential(ops.GroupedLinear(2, 32, 2 * width), activation, ops.GroupedLinear(2, width, 32))
        for recipe, widths in (("fp8_block", (128,)), ("fp8_rowwise", (128, 64))):
            said = model.explain(recipe=recipe, device="cuda", dtype=torch.bfloat16)
            in_both = runs and width in widths and interleave is None
            assert f"quantized as it is computed{'' if in_both else ' in forward'}, recomputed" in said


def test_tensors_without_numbers_are_asked_for_no_address(monkeypatch):
    """Those of a GPU that torch.compile traces with: torch warns of it, which is an error here."""
    for module in (dactivation_cast, cast_float8):
        monkeypatch.setattr(module, "runs_gluon", lambda device: True)
    with FakeTensorMode():
        h, dact = (torch.empty(8, n, dtype=torch.bfloat16, device="cuda") for n in (64, 32))
        assert not dactivation_cast.fits(activations.activation_step(Activation("swiglu"), True), h, dact)
        assert not cast_float8.meets_in_gluon(torch.empty(1, 8, 64, dtype=torch.bfloat16, device="cuda"), None)


def test_long_rows_with_one_scale_are_cast_from_memory():
    spec = ScaleSpec(E4M3, (1, ALL), Float32Scale(), "transposed", 32)
    assert why_no_cast(spec, grouped=True, columns=4096) is None
    assert "holds 4096" in str(why_no_cast(spec, grouped=True, columns=4097))
    assert "of a rowwise copy alone" in str(why_no_cast(spec, grouped=True))
