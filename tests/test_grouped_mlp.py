"""The fused grouped MLP against the operations it stands for, and both against float64."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fused import GroupedMLP
from fuser import Sequential, autocast, constant_weights, ops
from fuser.testing import check_fusion
from ops import BasicOperation, GroupedLinear
from ops.kernels.elementwise.activation import activation as formula
from ops.kernels.grouped_gemm import high_precision, tile_rules
from ops.products.paths import GroupedPath
from recipes import E4M3, QuantizedTensor, Quantizer, Recipe, Role
from recipes.current_scaling import CurrentScalingQuantizer
from recipes.pending import PendingUpdates
from recipes.triton.replay import forget
from tests import reference
from tests.reference import ROUNDED_OFTEN, assert_close, assert_same_bits

# T rows, G groups, H features of the layer, I features of the activation

DTYPES = [
    pytest.param(torch.float64, id="fp64"),
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = [None, "fp8_current", "mxfp8"]
# activation -> (its class, the formula, whether it takes scales)
ACTIVATIONS = {
    "SwiGLU": (ops.SwiGLU, "swiglu", False),
    "ScaledSwiGLU": (ops.ScaledSwiGLU, "swiglu", True),
    "SiTUGLU": (ops.SiTUGLU, "situglu", False),
    "ScaledSiTUGLU": (ops.ScaledSiTUGLU, "situglu", True),
    "ClampedSwiGLU": (ops.ClampedSwiGLU, "clamped_swiglu", False),
    "ScaledClampedQGeGLU": (ops.ScaledClampedQGeGLU, "clamped_swiglu", True),
    "ScaledSReLU": (ops.ScaledSReLU, "srelu", True),
}
SCALED = [name for name, (_, _, scaled) in ACTIVATIONS.items() if scaled]


def make(
    activation: str = "ScaledSwiGLU",
    *,
    groups: int = 4,
    hidden: int = 40,
    inner: int = 64,
    bias: bool = True,
    scale_bias: bool = False,
    interleave: int | None = None,
    stacked: bool = True,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> list[BasicOperation]:
    """FC1, the activation, FC2; with random biases."""
    kind, formula, _ = ACTIVATIONS[activation]
    glu = formula != "srelu"
    settings = dict(bias=bias, stacked=stacked, dtype=dtype, device=device)
    fc1 = GroupedLinear(groups, hidden, inner * (1 + glu), **settings)
    fc2 = GroupedLinear(groups, inner, hidden, scale_bias=scale_bias, **settings)
    with torch.no_grad():
        for name, parameter in (*fc1.named_parameters(), *fc2.named_parameters()):
            if "bias" in name:
                parameter.uniform_(-0.5, 0.5)
    return [fc1, kind(glu_interleave_size=interleave) if glu else kind(), fc2]


def pair(operations: Sequence[BasicOperation], **settings: Any) -> tuple[Sequential, Sequential]:
    """A fused and an unfused pipeline of copies of the operations."""
    fused = Sequential(*copy.deepcopy(operations), **settings)
    assert "GroupedMLP = " in fused.explain()
    return fused, Sequential(*copy.deepcopy(operations), fusions=(), **settings)


def data(
    operations: Sequence[Any], rows: int, active: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x, scales, dy; NaN in the rows past the active ones."""
    generator = torch.Generator().manual_seed(seed)
    widths = operations[0].in_features, operations[2].out_features
    x, dy = (torch.randn(rows, width, generator=generator).to(device, dtype) for width in widths)
    scales = torch.rand(rows, generator=generator).to(device, torch.promote_types(dtype, torch.float32))
    for t in (x, dy, scales):
        t[active:] = float("nan")
    return x, scales if "scales" in operations[1].extra_inputs else None, dy


def run(sequential: Sequential, x: Tensor, scales: Tensor | None, dy: Tensor, sizes: Any) -> dict[str, Tensor | None]:
    """y and every gradient; x, scales and parameters require grad where they did."""
    sequential.zero_grad()
    inputs = reference.leaves({"x": x, "scales": scales})
    extras = {} if scales is None else {"scales": inputs["scales"]}
    y = sequential(inputs["x"], split_sizes=sizes, **extras)
    if y.requires_grad:
        y.backward(dy)
    return {"y": y.detach(), **reference.gradients({**inputs, **dict(sequential.named_parameters())})}


def require_grad(*tensors: Tensor | None) -> None:
    for t in tensors:
        if t is not None:
            t.requires_grad_()


# ------------------------------------------------------------------------------------------------ fused = unfused


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(("interleave", "stacked"), [(None, True), (32, False), (4, True)])
@pytest.mark.parametrize("bias", ["none", "plain", "scaled"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_equals_unfused(activation, bias, interleave, stacked, recipe, dtype, device):
    """On the CPU bit for bit: the same products, in the same order, of operands that are rounded in the same places."""
    scaled = ACTIVATIONS[activation][2]
    tolerance = 0.0 if device == "cpu" else None
    if device == "cuda" and recipe is not None:
        tolerance = 0.05  # the last place of exp may flip a code
    check_fusion(
        GroupedMLP,
        lambda: make(
            activation,
            interleave=interleave if activation != "ScaledSReLU" else None,
            stacked=stacked,
            bias=bias != "none",
            scale_bias=bias == "scaled" and scaled,
        ),
        (21, 40),
        extras={"scales": (21,)} if scaled else {},
        num_groups=4,
        recipe=recipe,
        dtype=dtype,
        device=device,
        tolerance=tolerance,
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fused_equals_unfused_on_the_split_path(activation, recipe, dtype):
    check_fusion(
        GroupedMLP,
        lambda: make(activation),
        (21, 40),
        extras={"scales": (21,)} if activation in SCALED else {},
        num_groups=4,
        recipe=recipe,
        dtype=dtype,
        path="split",
        tolerance=0.0,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("groups", [1, 64])
@pytest.mark.parametrize("rows", [0, 1, 50])
def test_any_number_of_groups_and_rows(rows, groups, device):
    check_fusion(
        GroupedMLP,
        lambda: make(groups=groups, hidden=8, inner=8),
        (rows, 8),
        extras={"scales": (rows,)},
        num_groups=groups,
        dtype=torch.float32,
        device=device,
    )


def test_rows_past_the_sum_are_zero_and_leak_nothing():
    for activation, recipe in itertools.product(SCALED, RECIPES):
        operations = make(activation, scale_bias=True)
        x, scales, dy = data(operations, 30, 21, torch.float32)
        require_grad(x, scales)
        fused, unfused = pair(operations)
        with autocast(recipe=recipe):
            got, want = (run(sequential, x, scales, dy, [9, 0, 10, 2]) for sequential in (fused, unfused))
            active = [t[:21].detach().requires_grad_() for t in (x, scales)]
            short = run(fused, *active, dy[:21], [9, 0, 10, 2])
        for name, t in got.items():
            assert t.isfinite().all(), name
            if name in ("y", "gradient of x", "gradient of scales"):
                assert not t[21:].any(), name
                assert torch.equal(t[:21], short[name]), name
            elif "weight" in name or "bias" in name:
                assert not t[1].any(), f"{name} of the empty group"
                assert torch.equal(t, short[name]), name
        assert_same_bits(got, want)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("scales_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_scales_may_have_another_dtype(scales_dtype, recipe):
    operations = make(scale_bias=True, dtype=torch.bfloat16)
    x, scales, dy = data(operations, 21, 21, torch.bfloat16)
    scales = scales.to(scales_dtype)
    require_grad(x, scales)
    with autocast(recipe=recipe):
        fused, unfused = (run(sequential, x, scales, dy, [9, 0, 10, 2]) for sequential in pair(operations))
    assert fused["gradient of scales"].dtype == scales_dtype
    assert_same_bits(fused, unfused)


# --------------------------------------------------------------------------------------------- against float64


def expected(operations: Sequence[Any], x: Tensor, scales: Any, dy: Tensor, sizes: Sequence[int]) -> dict[str, Any]:
    """y and every gradient in float64, by autograd through a loop over the groups."""
    fc1, act, fc2 = operations
    active, rows = sum(sizes), len(x)
    named = {"0.weight": fc1.weight, "0.bias": fc1.bias, "2.weight": fc2.weight, "2.bias": fc2.bias}
    wide = {"x": x, "scales": scales, **{name: p for name, p in named.items() if p is not None}}
    wide = {name: None if t is None else t.detach().double().cpu().requires_grad_() for name, t in wide.items()}
    h = reference.grouped_linear(wide["x"][:active], wide["0.weight"], sizes, wide.get("0.bias"))
    a = reference.gated(h, act.activation.kind, act.activation.glu_interleave_size)
    weighing = None if scales is None else wide["scales"][:active]
    a = a if weighing is None else a * weighing[:, None]
    y = reference.grouped_linear(a, wide["2.weight"], sizes, wide.get("2.bias"), weighing if fc2.scale_bias else None)
    y.backward(dy[:active].double().cpu())
    tail = torch.zeros(rows - active, y.shape[1], dtype=torch.float64)
    grads = {f"gradient of {n}": None if t is None else t.grad for n, t in wide.items()}
    return {"y": torch.cat([y.detach(), tail]), **grads}


def check_example(
    sizes: list[int], tail: int, activation: str, bias: str, interleave: int | None, dtype: Any, device: str, seed: int
) -> None:
    torch.manual_seed(seed)
    operations = make(
        activation,
        groups=len(sizes),
        hidden=24,
        inner=32,
        bias=bias != "no bias",
        scale_bias=bias == "scaled bias" and activation in SCALED,
        interleave=interleave,
        dtype=dtype,
        device=device,
    )
    active = sum(sizes)
    x, scales, dy = data(operations, active + tail, active, dtype, device, seed)
    require_grad(x, scales)
    got = run(Sequential(*operations), x, scales, dy, torch.tensor(sizes, device=device))
    want = expected(operations, x, scales, dy, sizes)
    assert_close(got, want, ROUNDED_OFTEN, computed_in=dtype, floor=0.25)


BIASES = ["no bias", "bias", "scaled bias"]


@settings(max_examples=500)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=5),
    tail=st.integers(0, 4),
    activation=st.sampled_from(list(ACTIVATIONS)),
    bias=st.sampled_from(BIASES),
    interleave=st.sampled_from([None, 32, 4]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 9),
)
@pytest.mark.slow
def test_random_splits(sizes, tail, activation, bias, interleave, dtype, seed):
    check_example(sizes, tail, activation, bias, interleave, dtype, "cpu", seed)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize(
    "sizes", [[36, 36, 36, 36], [0, 0, 32, 32, 32, 32, 32, 0], [3, 47, 47, 47, 0, 0, 1], [1, 1, 1]], ids=str
)
def test_groups_of_one_size_side_by_side(sizes, threads):
    """On any number of threads the values are those of one group after the other."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for dtype in (torch.float32, torch.bfloat16):
            for bias in BIASES:
                check_example(sizes, 3, "ScaledSwiGLU", bias, None, dtype, "cpu", seed=threads)
    finally:
        torch.set_num_threads(before)


@pytest.mark.gpu
@settings(max_examples=500)
@given(
    sizes=st.lists(st.one_of(st.integers(0, 9), st.integers(60, 70), st.integers(120, 140)), min_size=1, max_size=5),
    tail=st.integers(0, 140),
    activation=st.sampled_from(list(ACTIVATIONS)),
    bias=st.sampled_from(BIASES),
    interleave=st.sampled_from([None, 32, 4]),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_random_splits_on_the_gpu(sizes, tail, activation, bias, interleave, dtype, seed):
    check_example(sizes, tail, activation, bias, interleave, dtype, "cuda", seed)


@pytest.mark.gpu
@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([0, 0, 1, 63, 64, 65, 130, 500]), min_size=1, max_size=12),
    tail=st.sampled_from([0, 1, 140]),
    bias=st.sampled_from(BIASES),
    dtype=st.sampled_from([torch.float16, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_random_splits_by_a_queue_on_the_gpu(sizes, tail, bias, dtype, seed):
    """Both passes with the kernel that is for many rows, and for fast memory."""
    by_queue = patch.object(high_precision, "m_grouped_gluon", wraps=high_precision.m_grouped_gluon)
    anywhere = (
        patch.object(tile_rules, "QUEUED_ROWS", 0),
        patch.object(high_precision, "has_fast_memory", lambda x: True),
    )
    forget()
    with anywhere[0], anywhere[1], by_queue as launched:
        check_example(sizes, tail, "ScaledSwiGLU", bias, None, dtype, "cuda", seed)
    forget()
    passes = {call.kwargs["transposed"] for call in launched.call_args_list}
    assert passes == ({True, False} if sum(sizes) + tail else set())


@pytest.mark.parametrize("save_original_input", [False, True])
@pytest.mark.parametrize("activation", ["SwiGLU", "ScaledSwiGLU"])
def test_fc1_and_its_activation_together_equal_unfused(activation, save_original_input, monkeypatch):
    """By the way that one kernel takes on a GPU; here its two functions run one after the other. Frozen or not."""
    monkeypatch.setattr(GroupedMLP, "why_apart", lambda self, path, dtype: None)
    for frozen in ((), ("0.weight",), ("2.weight",), ("0.weight", "2.weight")):
        operations = make(activation, bias=False, dtype=torch.bfloat16)
        operations[0].save_original_input = save_original_input
        x, scales, dy = data(operations, 24, 21, torch.bfloat16)
        require_grad(x, scales)
        fused, unfused = pair(operations)
        for sequential in (fused, unfused):
            for name in frozen:
                sequential.get_parameter(name).requires_grad_(False)
        way = GroupedLinear.fprop_and_activation
        with patch.object(GroupedLinear, "fprop_and_activation", autospec=True, side_effect=way) as taken:
            assert_same_bits(*[run(sequential, x, scales, dy, [9, 0, 10, 2]) for sequential in (fused, unfused)])
        assert taken.call_count == 1


def room_on_a_cpu(self, shape, dtype, splits, quantizer, *, rowwise, columnwise, whole_rows=False, **_):
    """`GroupedPath.quantized_buffers`, of what FC1's kernel fills alone."""
    if not (whole_rows and rowwise and shape.numel()):
        return None
    return quantizer.empty_grouped(shape, dtype, splits, rowwise=rowwise, columnwise=columnwise)


def cast_on_a_cpu(self, x, w, spec, scales, into, *, stores_h):
    """`GroupedPath.fprop_and_cast` in plain torch."""
    h = self.fprop(x, w)
    group = x.splits.group_of_row
    inside, one = group < x.splits.num_groups, into.copies.rowwise
    act = formula(h, spec, scales).float()[inside]
    codes = (act * into.scale[group[inside], None]).clamp(-448, 448).to(E4M3.dtype)
    one.codes.view(torch.uint8).zero_()[inside] = codes.view(torch.uint8)
    one.scale_inv.copy_(1 / into.scale)
    if into.amax is not None:
        amax = act.abs().amax(1)
        into.amax.scatter_reduce_(0, group[inside], amax, "amax")
    return h if stores_h else None


@pytest.mark.parametrize("save_original_input", [False, True])
@pytest.mark.parametrize("activation", ["SwiGLU", "ScaledSwiGLU"])
def test_fc1_its_activation_and_the_cast_together_equal_unfused(activation, save_original_input, monkeypatch):
    """By the way that one kernel takes under delayed scaling on a GPU, its place taken by plain torch: steps that move
    the scales, with whatever frozen, and one pass without gradients between them."""
    monkeypatch.setattr(GroupedMLP, "why_apart", lambda self, path, dtype: None)
    monkeypatch.setattr(GroupedPath, "quantized_buffers", room_on_a_cpu)
    with patch.object(GroupedPath, "fprop_and_cast", autospec=True, side_effect=cast_on_a_cpu) as taken:
        for frozen in ((), ("0.weight",), ("2.weight",), ("0.weight", "2.weight")):
            operations = make(activation, bias=False, dtype=torch.bfloat16)
            operations[0].save_original_input = save_original_input
            fused, unfused = pair(operations)
            for sequential in (fused, unfused):
                for name in frozen:
                    sequential.get_parameter(name).requires_grad_(False)
            for step, sizes in enumerate(([9, 0, 10, 2], [1, 20, 0, 0], [0, 0, 0, 24], [5, 5, 5, 5])):
                x, scales, dy = data(operations, 24, sum(sizes), torch.bfloat16, seed=step)
                with autocast(recipe="fp8_delayed"), torch.set_grad_enabled(step != 2):
                    require_grad(x, scales)
                    results = [run(sequential, x, scales, dy, sizes) for sequential in (fused, unfused)]
                assert_same_bits(*results)
                assert_same_bits(*(dict(sequential.named_buffers()) for sequential in (fused, unfused)))
    assert taken.call_count == 16
    assert {call.kwargs["stores_h"] for call in taken.call_args_list} == {True, False}


def test_amaxes_are_recorded_in_one_order_by_all_ways(monkeypatch):
    """Ranks of which one has no rows, or counts casts, take two ways in one step, and reduce their amaxes in order."""
    monkeypatch.setattr(GroupedMLP, "why_apart", lambda self, path, dtype: None)
    operations = make(bias=False, dtype=torch.bfloat16)
    x, scales, dy = data(operations, 24, 21, torch.bfloat16)
    add, orders = PendingUpdates.add, []

    def noted(self, quantizer, *about):
        orders[-1].append((id(quantizer.source.operation), quantizer.role))
        return add(self, quantizer, *about)

    monkeypatch.setattr(PendingUpdates, "add", noted)
    sequential = Sequential(*operations)
    for room in (room_on_a_cpu, lambda *_, **__: None):
        monkeypatch.setattr(GroupedPath, "quantized_buffers", room)
        orders.append([])
        with (
            patch.object(GroupedPath, "fprop_and_cast", autospec=True, side_effect=cast_on_a_cpu) as taken,
            autocast(recipe="fp8_delayed"),
        ):
            run(sequential, x, scales, dy, [9, 0, 10, 2])
        assert taken.called == (room is room_on_a_cpu)
    assert orders[0] == orders[1] and len(orders[0]) >= 6


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["SwiGLU", "ScaledSwiGLU"])
def test_fc1_its_activation_and_the_cast_by_one_kernel_equal_unfused_on_the_gpu(activation):
    operations = make(activation, hidden=768, inner=384, bias=False, dtype=torch.bfloat16, device="cuda")
    fused, unfused = pair(operations)
    words = "in training and in no-grad mode in the kernel of FC1 from 256 rows a group on"
    if words not in fused.explain(recipe="fp8_delayed", dtype=torch.bfloat16):
        pytest.skip("FC1, its activation and the cast are one kernel on Hopper.")
    for step in range(6):  # runs, is recorded, is repeated
        sizes = [[300, 0, 500, 400], [1024, 0, 0, 0], [256, 257, 255, 256]][step // 2]
        x, scales, dy = data(operations, sum(sizes) + 20, sum(sizes), torch.bfloat16, "cuda", step)
        with autocast(recipe="fp8_delayed"), torch.set_grad_enabled(step != 3):
            require_grad(x, scales)
            on_device = torch.tensor(sizes, device="cuda")
            results = [run(sequential, x, scales, dy, on_device) for sequential in (fused, unfused)]
        of_scales = [result.pop("gradient of scales") for result in results]  # which two kernels sum in two orders
        assert_same_bits(*results)
        assert_same_bits(*(dict(sequential.named_buffers()) for sequential in (fused, unfused)))
        if of_scales[0] is not None:
            active = [gradient[: sum(sizes)] for gradient in of_scales]
            torch.testing.assert_close(*active, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ["SwiGLU", "ScaledSwiGLU"])
def test_fc1_and_its_activation_by_one_kernel_equal_unfused_on_the_gpu(activation):
    if not tile_rules.has_fast_memory():
        pytest.skip("FC1 and its activation are one kernel on an H200.")
    for sizes in ([300, 0, 500, 400], [1024, 0, 0, 0], [256, 257, 255, 256]):
        operations = make(activation, hidden=384, inner=384, bias=False, dtype=torch.bfloat16, device="cuda")
        x, scales, dy = data(operations, sum(sizes) + 20, sum(sizes), torch.bfloat16, "cuda", sum(sizes))
        require_grad(x, scales)
        fused, unfused = pair(operations)
        assert "in training in the kernel of FC1 from 256 rows a group on" in fused.explain(dtype=torch.bfloat16)
        on_device = torch.tensor(sizes, device="cuda")
        want = run(unfused, x, scales, dy, on_device)
        for _ in range(3):  # runs, is recorded, is repeated
            assert_same_bits(run(fused, x, scales, dy, on_device), want)


@pytest.mark.slow
@pytest.mark.parametrize("interleave", [None, 2])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck(activation, interleave):
    operations = make(
        activation,
        groups=3,
        hidden=3,
        inner=4,
        interleave=interleave,
        scale_bias=activation in SCALED,
        dtype=torch.float64,
    )
    sequential = Sequential(*operations)
    assert "GroupedMLP = " in sequential.explain()
    x, scales, _ = data(operations, 6, 6, torch.float64)
    require_grad(x, scales)
    names = () if scales is None else ("scales",)
    parameters = list(sequential.parameters())

    def function(x: Tensor, *others: Tensor) -> Tensor:
        return sequential(x, split_sizes=[2, 0, 3], **dict(zip(names, others, strict=False)))

    inputs = (x, *(() if scales is None else (scales,)), *parameters)
    for frozen in ([], [parameters[0]], parameters[2:], parameters):
        for parameter in parameters:
            parameter.requires_grad_(not any(parameter is p for p in frozen))
        assert torch.autograd.gradcheck(function, inputs)


# -------------------------------------------------------------------------------------- which gradients are computed


@pytest.mark.parametrize("activation", ["ScaledSwiGLU", "ClampedSwiGLU", "ScaledSReLU"])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.slow
def test_any_subset_may_be_frozen(recipe, activation):
    operations = make(activation, scale_bias=activation in SCALED)
    x, scales, dy = data(operations, 21, 21, torch.float32)
    fused, unfused = pair(operations)
    names = ["x", *(["scales"] if scales is not None else []), *(name for name, _ in fused.named_parameters())]
    for wanted in itertools.product([False, True], repeat=len(names)):
        for sequential in (fused, unfused):
            tensors = {"x": x, "scales": scales, **dict(sequential.named_parameters())}
            for name, want in zip(names, wanted, strict=True):
                tensors[name].requires_grad_(want)
                tensors[name].grad = None
        with autocast(recipe=recipe):
            got, want = (run(sequential, x, scales, dy, [9, 0, 10, 2]) for sequential in (fused, unfused))
        assert_same_bits(got, want)
        exist = {name for name in names if got[f"gradient of {name}"] is not None}
        assert exist == {name for name, want in zip(names, wanted, strict=True) if want}


@pytest.mark.parametrize("path", ["grouped", "split"])
@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
@pytest.mark.slow
def test_fused_draws_and_records_what_unfused_does_for_any_subset(recipe, path):
    """Where nothing of dh is wanted, as with FC1 frozen but for its bias, dh is not quantized: that draws a seed."""
    operations = make()
    x, scales, dy = data(operations, 21, 21, torch.float32)
    names = ["x", "scales", *(name for name, _ in Sequential(*operations).named_parameters())]
    for wanted in itertools.product([False, True], repeat=len(names)):
        seen = []
        for sequential in pair(operations, path=path):
            for name, tensor in {"x": x, "scales": scales, **dict(sequential.named_parameters())}.items():
                tensor.requires_grad_(wanted[names.index(name)])
            torch.manual_seed(0)
            for _ in range(2):  # what the first step records, the second one casts with
                with autocast(recipe=recipe):
                    got = run(sequential, x, scales, dy, [9, 0, 10, 2])
            seen.append({**got, **sequential.state_dict(), "the generator": torch.get_rng_state()})
        assert_same_bits(*seen)


PRODUCTS = {
    # what requires grad -> products of the backward
    "2.bias": [],
    "2.weight": ["wgrad"],
    "scales": ["dgrad"],
    "0.bias": ["dgrad"],
    "0.weight": ["dgrad", "wgrad"],
    "x": ["dgrad", "dgrad"],
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("only", PRODUCTS)
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_no_product_is_computed_for_what_is_frozen(recipe, only, device, monkeypatch):
    sequential = Sequential(*make(device=device))
    computed: list[str] = []
    for verb in ("dgrad", "wgrad"):
        original = getattr(GroupedPath, verb)
        monkeypatch.setattr(
            GroupedPath, verb, lambda *a, _o=original, _v=verb, **kw: (computed.append(_v), _o(*a, **kw))[1]
        )
    x, scales, dy = data(sequential, 21, 21, torch.float32, device)
    for name, tensor in {"x": x, "scales": scales, **dict(sequential.named_parameters())}.items():
        tensor.requires_grad_(name == only)
    with autocast(recipe=recipe):
        got = run(sequential, x, scales, dy, [9, 0, 10, 2])
    assert computed == PRODUCTS[only]
    assert got[f"gradient of {only}"] is not None


class CountProducts(TorchDispatchMode):
    """Counts the products of all groups without a bias, which are those of the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        assert function.overloadpacket not in (torch.ops.aten.mm, torch.ops.aten.bmm), "they take no whole groups"
        self.count += function.overloadpacket is torch.ops.aten._grouped_mm
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("only", PRODUCTS)
def test_torch_multiplies_nothing_for_what_is_frozen(only):
    sequential = Sequential(*make())
    x, scales, dy = data(sequential, 24, 24, torch.float32)
    for name, tensor in {"x": x, "scales": scales, **dict(sequential.named_parameters())}.items():
        tensor.requires_grad_(name == only)
    with CountProducts() as products:
        got = run(sequential, x, scales, dy, [9, 0, 10, 2])
    assert products.count == len(PRODUCTS[only])
    assert got[f"gradient of {only}"] is not None


# ------------------------------------------------------------------------------------------------------ saved state


def saved_tensors(sequential: Sequential, x: Tensor, scales: Tensor | None) -> list[Tensor]:
    """What a forward keeps, each piece of memory once."""
    saved: dict[tuple[int, torch.Size, torch.dtype], Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        saved[t.data_ptr(), t.shape, t.dtype] = t
        return t

    extras = {} if scales is None else {"scales": scales}
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = sequential(x, split_sizes=[9, 0, 10, 2], **extras)
    assert y.requires_grad == bool(saved)
    return list(saved.values())


def float_bytes(tensors: Sequence[Tensor]) -> int:
    """Splits apart, which are integers of a few bytes a row."""
    return sum(t.nbytes for t in tensors if t.is_floating_point())


@pytest.mark.parametrize("scaled", [True, False])
def test_the_activation_is_not_kept(scaled):
    operations = make("ScaledSwiGLU" if scaled else "SwiGLU")
    x, scales, _ = data(operations, 21, 21, torch.float32)
    fused, unfused = pair(operations)
    x_h_scales = 4 * 21 * (40 + 128 + (1 if scaled else 0))
    kept = saved_tensors(fused, x, scales)
    assert float_bytes(kept) == x_h_scales
    assert all(t.shape != (21, 64) for t in kept)
    assert float_bytes(saved_tensors(unfused, x, scales)) == x_h_scales + 4 * 21 * 64
    integers = [t for t in kept if not t.is_floating_point()]
    assert sum(t.nbytes for t in integers) <= 8 * (21 + 3 * 5)


def test_under_a_recipe_the_codes_of_x_are_kept_and_not_x():
    operations = make()
    x, scales, _ = data(operations, 21, 21, torch.float32)
    fused, _ = pair(operations)
    with autocast(recipe="mxfp8"), constant_weights(fused):
        first, kept = (saved_tensors(fused, x, scales) for _ in range(2))
    # The codes of the weights and the scales of rows are the same tensors each time.
    shared = {tensor.data_ptr() for tensor in first}
    assert float_bytes([t for t in kept if t.data_ptr() not in shared]) == 21 * 40 + 4 * 21 * 128


def test_x_is_not_kept_where_fc1_is_frozen():
    operations = make()
    operations[0].requires_grad_(False)
    x, scales, _ = data(operations, 21, 21, torch.float32)
    fused, _ = pair(operations)
    assert float_bytes(saved_tensors(fused, x, scales)) == 4 * 21 * (128 + 1)


def test_nothing_is_kept_where_nothing_wants_a_gradient():
    sequential = Sequential(*make()).requires_grad_(False)
    x, scales, _ = data(sequential, 21, 21, torch.float32)
    assert saved_tensors(sequential, x, scales) == []
    sequential.requires_grad_(True)
    with torch.no_grad():
        assert saved_tensors(sequential, x, scales) == []


def test_a_second_backward_needs_retain_graph():
    operations = make()
    x, scales, dy = data(operations, 21, 21, torch.float32)
    y = Sequential(*operations)(x, split_sizes=[9, 0, 10, 2], scales=scales)
    grads = []
    for retain in (True, False):
        operations[0].weight.grad = None
        y.backward(dy, retain_graph=retain)
        grads.append(operations[0].weight.grad)
    assert torch.equal(*grads)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        y.backward(dy)


# --------------------------------------------------------------------------------------------------------- matching


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_it_is_matched_for_every_recipe_dtype_and_device(activation):
    sequential = Sequential(ops.RMSNorm(40), *make(activation), ops.Bias(40))
    for recipe, dtype, device in itertools.product(
        RECIPES, [torch.float64, torch.float32, torch.float16, torch.bfloat16], ["cpu", "cuda"]
    ):
        plan = sequential.explain(recipe=recipe, dtype=dtype, device=device)
        assert f"GroupedMLP = GroupedLinear -> {activation} -> GroupedLinear" in plan
        assert "not fused" not in plan


IN_NO_GRAD = [
    (
        {"dtype": torch.bfloat16},
        {},
        "swiglu recomputed in backward; in training apart from FC1: The kernel that stores both adds no bias, and FC1 "
        "has one.; in no-grad mode in the kernel of FC1]",
    ),
    (
        {"dtype": torch.bfloat16},
        {"hidden": 384, "inner": 128, "bias": False},
        "swiglu recomputed in backward; in training in the kernel of FC1 from 256 rows a group on; in no-grad mode in "
        "the kernel of FC1]",
    ),
    ({"dtype": torch.float32}, {}, "in no-grad mode apart from FC1: The kernel multiplies bfloat16 and float16"),
    (
        {"dtype": torch.bfloat16, "recipe": "fp8_delayed"},
        {"hidden": 768, "inner": 128, "bias": False},
        "recomputed in backward; in training and in no-grad mode in the kernel of FC1 from 256 rows a group on]",
    ),
    (
        {"dtype": torch.bfloat16, "recipe": "fp8_delayed"},
        {"hidden": 384, "inner": 128, "bias": False},
        "in no-grad mode apart from FC1: The kernel takes in features that are a multiple of 16, 768 at least, and",
    ),
    *(
        (
            {"dtype": torch.bfloat16, "recipe": recipe},
            {"hidden": 768, "inner": 128, "bias": False},
            "in training and in no-grad mode apart from FC1: Its kernel quantizes with one scale a group that is given",
        )
        for recipe in ("fp8_current", "fp8_rowwise", "mxfp8")
    ),
    ({"dtype": torch.bfloat16}, {"hidden": 36}, "in no-grad mode apart from FC1: The kernel reads 16 bytes at a time"),
    ({"dtype": torch.bfloat16}, {"inner": 48, "interleave": 24}, "glu_interleave_size is 24"),
]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, perhaps another one")
@pytest.mark.parametrize(("about", "shape", "words"), IN_NO_GRAD)
def test_explain_says_whether_no_grad_mode_stores_the_pre_activation(about, shape, words, monkeypatch):
    for module in ("grouped_activation", "float8_activation"):
        monkeypatch.setattr(f"ops.kernels.grouped_gemm.{module}.why_no_gluon", lambda gpu: None)
    assert words in Sequential(*make(**shape)).explain(device="cuda", **about)
    assert "SplitPath" in Sequential(*make(**shape), path="split").explain(device="cuda", **about)
    assert "no-grad" not in Sequential(*make(**shape)).explain(device="cpu", **about)


class Doubled(GroupedLinear):
    def fprop(self, *args: Any, **settings: Any) -> Tensor:
        return super().fprop(*args, **settings).mul_(2)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, perhaps another one")
def test_an_fprop_of_ones_own_is_not_left_out_where_fc1_and_its_activation_are_one_kernel(monkeypatch):
    for module in ("grouped_activation", "float8_activation"):
        monkeypatch.setattr(f"ops.kernels.grouped_gemm.{module}.why_no_gluon", lambda gpu: None)
    fc1, *behind = make(hidden=768, inner=128, bias=False)
    subclass = Doubled(4, 768, 256, bias=False)
    fc1.fprop = partial(Doubled.fprop, subclass)  # type: ignore[method-assign]
    for own in (subclass, fc1):
        for recipe in (None, "fp8_delayed"):
            plan = Sequential(own, *behind).explain(device="cuda", dtype=torch.bfloat16, recipe=recipe)
            words = "in training and in no-grad mode apart from FC1"
            assert f"{words}: {type(own).__name__} has its own fprop, which would be left out" in plan


def test_two_blocks_in_a_row_are_two_fused_operations():
    first, second = make(), make("ScaledSReLU")
    fused, unfused = pair([*first, *second])
    assert fused.explain().count("GroupedMLP = ") == 2
    x, scales, dy = data(first, 21, 21, torch.float32)
    require_grad(x, scales)
    results = [run(sequential, x, scales, dy, [9, 0, 10, 2]) for sequential in (fused, unfused)]
    assert_same_bits(*results)


def test_two_blocks_may_have_splits_of_their_own():
    first, second = make(), [op.rename_extras(**{n: f"{n}_b" for n in op.extra_inputs}) for op in make()]
    fused, unfused = pair([*first, *second])
    assert fused.explain().count("GroupedMLP = ") == 2
    x = torch.randn(21, 40)
    extras = {"split_sizes": [9, 0, 10, 2], "split_sizes_b": [1, 20, 0, 0]}
    extras |= {"scales": torch.rand(21), "scales_b": torch.rand(21)}
    assert torch.equal(fused(x, **extras), unfused(x, **extras))


def altered(**changes: Any) -> list[BasicOperation]:
    """FC1, ScaledSwiGLU, FC2 with other constructor arguments: fc1=(groups, in, out), fc2=..., act=..."""
    fc1 = GroupedLinear(*changes.get("fc1", (4, 40, 128)), scale_bias=changes.get("fc1_scale_bias", False))
    fc2 = GroupedLinear(*changes.get("fc2", (4, 64, 40)), scale_bias=changes.get("fc2_scale_bias", False))
    return [fc1, changes.get("act", ops.ScaledSwiGLU)(), fc2]


REFUSALS = {
    "groups": (lambda: altered(fc2=(3, 64, 40)), "FC1 has 4 groups, but FC2 has 3."),
    "dtypes": (
        lambda: [*altered()[:2], altered()[2].bfloat16()],
        "FC1's weights are torch.float32, but FC2's are torch.bfloat16.",
    ),
    "FC1 scales its bias": (
        lambda: altered(fc1_scale_bias=True),
        "FC1 scales its bias, and the scales belong to the activation and to FC2's bias.",
    ),
    "nothing scales the activation": (
        lambda: altered(act=ops.SwiGLU, fc2_scale_bias=True),
        "FC2 scales its bias, but SwiGLU takes no scales.",
    ),
    "the activation caches its input": (
        lambda: altered(act=partial(ops.SwiGLU, cache_quantized_input=True)),
        "SwiGLU caches its input quantized, but the fused operation keeps it in full.",
    ),
}


@pytest.mark.parametrize(("operations", "sentence"), REFUSALS.values(), ids=REFUSALS)
def test_a_refusal_is_a_sentence_that_explain_prints(operations, sentence):
    plan = Sequential(ops.Identity(), *operations()).explain()
    assert "GroupedMLP = " not in plan
    (refusal,) = [line for line in plan.splitlines() if "not fused" in line]
    assert "GroupedMLP" in refusal
    assert refusal.endswith(sentence)


@pytest.mark.parametrize(("position", "name"), [(2, "split_sizes"), (0, "split_sizes"), (2, "scales")])
def test_operations_that_mean_other_tensors_by_a_name_are_not_fused(position, name):
    operations = make(scale_bias=True)
    operations[position].rename_extras(**{name: "other"})
    sequential = Sequential(*operations)
    plan = sequential.explain()
    assert "GroupedMLP = " not in plan
    assert f"mean different tensors by {name!r}" in plan
    extras = {"split_sizes": [9, 0, 10, 2], "scales": torch.rand(21)}
    extras["other"] = extras[name]
    x = torch.randn(21, 40)
    fused = Sequential(*make_like(operations))
    assert torch.equal(sequential(x, **extras), fused(x, **{n: v for n, v in extras.items() if n != "other"}))


def make_like(operations: Sequence[BasicOperation]) -> list[BasicOperation]:
    """The same three operations with the names as they were."""
    copies = make(scale_bias=True)
    for old, new in zip(operations, copies, strict=True):
        new.load_state_dict(old.state_dict())
    return copies


@pytest.mark.parametrize("position", [0, 1, 2])
def test_an_operation_with_hooks_of_its_own_is_not_fused(position):
    operations = make()
    fused, unfused = pair(operations)
    x, scales, dy = data(operations, 21, 21, torch.float32)
    require_grad(x, scales)
    want = run(unfused, x, scales, dy, [9, 0, 10, 2])
    seen = []
    handle = fused[position].register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    plan = fused.explain()
    assert "GroupedMLP = " not in plan
    assert "hooks" in plan
    assert_same_bits(run(fused, x, scales, dy, [9, 0, 10, 2]), want)
    assert len(seen) == 1
    handle.remove()
    assert "GroupedMLP = " in fused.explain()
    assert_same_bits(run(fused, x, scales, dy, [9, 0, 10, 2]), want)
    assert len(seen) == 1


def test_an_operation_that_computes_something_else_is_not_fused():
    class DoubledLinear(GroupedLinear):
        def fuser_forward(self, ctx: Any, x: Any, extras: Any) -> Any:
            y, made = super().fuser_forward(ctx, x, extras)
            return 2 * y, made

    fc1, act, _ = make()
    sequential = Sequential(fc1, act, DoubledLinear(4, 64, 40))
    assert "GroupedMLP = " not in sequential.explain()


def test_something_in_between_prevents_it():
    fc1, act, fc2 = make()
    for operations in ((fc1, ops.Identity(), act, fc2), (fc1, act, torch.nn.Identity(), fc2), (fc1, act), (act, fc2)):
        assert "GroupedMLP = " not in Sequential(*operations).explain()


# ---------------------------------------------------------------------------------- recipes, copies, caller's buffers


class SingleTensorQuantizer(CurrentScalingQuantizer):
    """Knows how to quantize one tensor, and nothing of groups."""

    quantize_stacked = Quantizer.quantize_stacked
    quantize_grouped = Quantizer.quantize_grouped

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        return super().quantize(x, rowwise=rowwise, columnwise=columnwise)


class UsersRecipe(Recipe):
    def quantizer(self, role: Role) -> Quantizer | None:
        return SingleTensorQuantizer(E4M3)


def test_a_recipe_for_single_tensors_is_fused_too_and_runs_on_the_split_path():
    operations = make(scale_bias=True)
    fused, unfused = pair(operations)
    plan = fused.explain(recipe=UsersRecipe())
    assert "path: split: SingleTensorQuantizer knows single tensors only" in plan
    assert "GroupedMLP = " in plan
    x, scales, dy = data(operations, 25, 21, torch.float32)
    require_grad(x, scales)
    with autocast(recipe=UsersRecipe()):
        results = [run(sequential, x, scales, dy, [9, 0, 10, 2]) for sequential in (fused, unfused)]
    assert_same_bits(*results)


def test_switching_the_recipe_of_a_live_pipeline():
    operations = make()
    fused, _ = pair(operations)
    x, scales, dy = data(operations, 21, 21, torch.float32)
    require_grad(x, scales)
    results: dict[Any, Any] = {}
    for recipe in ("mxfp8", None, "fp8_current", "mxfp8", "fp8_current", None):
        with autocast(recipe=recipe):
            got = run(fused, x, scales, dy, [9, 0, 10, 2])
        assert_same_bits(got, results.setdefault(recipe, got))
    assert len({float(result["y"].sum()) for result in results.values()}) == 3


def test_under_torch_autocast_it_runs_in_bfloat16():
    operations = make(scale_bias=True)
    x, scales, dy = data(operations, 25, 21, torch.float32)
    require_grad(x, scales)
    with torch.autocast("cpu", torch.bfloat16):
        results = [run(sequential, x, scales, dy.bfloat16(), [9, 0, 10, 2]) for sequential in pair(operations)]
    assert_same_bits(*results)
    assert results[0]["y"].dtype == torch.bfloat16
    assert results[0]["gradient of 0.weight"].dtype == torch.float32
    in_bfloat16 = Sequential(*[op.bfloat16() for op in operations])
    assert torch.equal(run(in_bfloat16, x.bfloat16(), scales, dy.bfloat16(), [9, 0, 10, 2])["y"], results[0]["y"])


def test_a_deep_copy_fuses_its_own_operations():
    operations = make()
    sequential = Sequential(*operations)
    x, scales, dy = data(operations, 21, 21, torch.float32)
    require_grad(x, scales)
    want = run(sequential, x, scales, dy, [9, 0, 10, 2])
    copied = copy.deepcopy(sequential)
    sequential.zero_grad(set_to_none=True)
    assert_same_bits(run(copied, x, scales, dy, [9, 0, 10, 2]), want)
    assert all(p.grad is None for p in sequential.parameters())


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_callers_buffers_at_both_ends_are_written(recipe):
    operations = make()
    sequential = Sequential(*operations)
    x, scales, dy = data(operations, 25, 21, torch.float32)
    require_grad(x)
    output, grad_input = torch.full((25, 40), 7.0), torch.full((25, 40), 7.0)
    with autocast(recipe=recipe):
        want = run(sequential, x, scales, dy, [9, 0, 10, 2])
        y = sequential(
            x, split_sizes=[9, 0, 10, 2], scales=scales, buffers={-1: {"output": output}, 0: {"grad_input": grad_input}}
        )
        (dx,) = torch.autograd.grad(y, x, dy)
    assert y.data_ptr() == output.data_ptr()
    assert dx.data_ptr() == grad_input.data_ptr()
    assert_same_bits({"y": y, "dx": dx}, {"y": want["y"], "dx": want["gradient of x"]})


@pytest.mark.parametrize(("index", "name", "width"), [(0, "output", 128), (2, "grad_input", 64)])
def test_the_callers_buffers_in_the_middle_are_written_or_refused(index, name, width):
    operations = make()
    x, scales, dy = data(operations, 21, 21, torch.float32)
    require_grad(x)
    buffer = torch.full((21, width), 7.0)
    refused = ""
    try:
        y = Sequential(*operations)(x, split_sizes=[9, 0, 10, 2], scales=scales, buffers={index: {name: buffer}})
        y.backward(dy)
    except ValueError as error:
        refused = str(error)
    assert name in refused or not (buffer == 7.0).all(), "ignored in silence"


# ------------------------------------------------------------------------------------------------- only on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_grad_mode_has_the_bits_of_training(activation, dtype):
    """By the kernel that stores no pre-activation, or by two; with few rows a group and with many."""
    scaled = activation in SCALED
    gated = ACTIVATIONS[activation][1] != "srelu"
    options = [dict(bias=False), dict(bias=True, scale_bias=scaled)]
    for option, interleave in itertools.product(options, (None, 1, 32, 24) if gated else (None,)):
        inner = 192 if interleave == 24 else 256
        operations = make(
            activation, hidden=128, inner=inner, interleave=interleave, dtype=dtype, device="cuda", **option
        )  # fmt: skip
        sequential = Sequential(*operations)
        for sizes in ([3, 0, 1, 9], [0, 0, 0, 0], [300, 0, 129, 400]):
            active = sum(sizes)
            x, scales, _ = data(operations, active + 20, active, dtype, "cuda")
            extras = {} if scales is None else {"scales": scales}
            on_device = torch.tensor(sizes, device="cuda")
            trained = sequential(x, split_sizes=on_device, **extras)
            assert trained.requires_grad
            for _ in range(3):  # runs, is recorded, is repeated
                with torch.no_grad():
                    found = sequential(x, split_sizes=on_device, **extras)
                assert_same_bits({"y": found}, {"y": trained.detach()})


@pytest.mark.gpu
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_no_grad_mode_is_captured_and_waits_for_nothing(activation):
    operations = make(activation, hidden=128, inner=256, dtype=torch.bfloat16, device="cuda")
    sequential = Sequential(*operations)
    x, scales, _ = data(operations, 100, 100, torch.bfloat16, "cuda")
    extras = {} if scales is None else {"scales": scales}
    sizes = torch.tensor([50, 0, 49, 1], device="cuda")
    with torch.no_grad():
        sequential(x, split_sizes=sizes, **extras)  # compiles
        with reference.no_host_sync():
            sequential(x, split_sizes=sizes, **extras)
        graph, captured = reference.capture(lambda: [sequential(x, split_sizes=sizes, **extras)])
        for other in ([0, 0, 0, 100], [1, 1, 1, 1], [0, 0, 0, 0], [25, 25, 25, 25]):
            sizes.copy_(torch.tensor(other))
            graph.replay()
            replayed = captured[0].clone()
            assert_same_bits({"y": replayed}, {"y": sequential(x, split_sizes=sizes, **extras)})


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_nothing_waits_for_the_device(activation, recipe):
    operations = make(activation, scale_bias=activation in SCALED, dtype=torch.bfloat16, device="cuda")
    sequential = Sequential(*operations)
    x, scales, dy = data(operations, 60, 50, torch.bfloat16, "cuda")
    require_grad(x, scales)
    sizes = torch.tensor([9, 0, 31, 10], device="cuda")
    with autocast(recipe=recipe):
        run(sequential, x, scales, dy, sizes)  # compiles
        with reference.no_host_sync():
            run(sequential, x, scales, dy, sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_captured_graph_is_replayed_with_other_splits(activation, recipe):
    operations = make(activation, scale_bias=activation in SCALED, dtype=torch.bfloat16, device="cuda")
    sequential = Sequential(*operations)
    rows = 200
    x, scales, dy = data(operations, rows, rows, torch.bfloat16, "cuda")
    require_grad(x, scales)
    extras = {} if scales is None else {"scales": scales}
    sizes = torch.tensor([50, 50, 50, 50], device="cuda")
    inputs = [x, *extras.values(), *sequential.parameters()]

    def step() -> list[Tensor]:
        with autocast(recipe=recipe):
            y = sequential(x, split_sizes=sizes, **extras)
            return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    graph, captured = reference.capture(step)
    generator = torch.Generator().manual_seed(0)
    for replay in range(20):
        active = rows if replay % 2 else int(torch.randint(0, rows, (), generator=generator))
        sizes.copy_(torch.tensor(reference.random_sizes(generator, 4, active)))
        with torch.no_grad():
            x.copy_(torch.randn(rows, 40, generator=generator))
        graph.replay()
        replayed = {str(i): t.clone() for i, t in enumerate(captured)}
        assert_same_bits(replayed, {str(i): t for i, t in enumerate(step())})


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_runs_repeat_bit_for_bit_on_the_gpu(recipe):
    operations = make(scale_bias=True, dtype=torch.bfloat16, device="cuda", hidden=128, inner=256)
    sequential = Sequential(*operations)
    x, scales, dy = data(operations, 500, 490, torch.bfloat16, "cuda")
    require_grad(x, scales)
    sizes = torch.tensor([129, 0, 321, 40], device="cuda")
    with autocast(recipe=recipe):
        first = run(sequential, x, scales, dy, sizes)
        for _ in range(5):
            assert_same_bits(run(sequential, x, scales, dy, sizes), first)
