"""GroupedPath and SplitPath: the same numbers by two independent ways, and who decides between them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuser import Sequential, autocast, count_casts, ops
from ops import GroupedLinear
from ops.products.paths import GroupedPath, SplitPath, choose_path
from recipes import (
    E4M3,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    HighPrecision,
    MXFP8BlockScaling,
    PlanRequest,
    QuantizedTensor,
    Quantizer,
    Recipe,
    Role,
    Splits,
)
from recipes.current_scaling import CurrentScalingQuantizer
from recipes.native_products import compute_capability
from recipes.tensors.scaled_codes import Dequantized
from tests import reference
from tests.reference import assert_close, assert_same_bits

DTYPES = [
    pytest.param(torch.float64, id="fp64"),
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = [
    HighPrecision(),
    Float8CurrentScaling(),
    Float8CurrentScaling(power_2_scale=True),
    MXFP8BlockScaling(),
    Float8BlockScaling(),
    Float8RowwiseScaling(),
]
BF16 = torch.empty(0, dtype=torch.bfloat16)
SIZES = [[6, 6, 6, 6], [12, 0, 18, 6], [3, 17, 1, 9], [0, 0, 25, 0], [9, 4, 7, 0], [0, 0, 0, 0]]


def paths(device: str) -> tuple[GroupedPath, SplitPath]:
    capability = compute_capability(torch.device(device))
    return GroupedPath(capability=capability), SplitPath(capability=capability)


def run(path: Any, recipe: Recipe, x: Tensor, w: Any, dy: Tensor, bias: Tensor, scales: Any, splits: Splits) -> dict:
    """Every verb of a path."""
    inputs, weights, grads = (recipe.quantizer(role) for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT))
    x_q = path.quantize(x, splits, inputs, rowwise=True, columnwise=True)
    dy_q = path.quantize(dy, splits, grads, rowwise=True, columnwise=True)
    w_q = path.weight(w, weights, rowwise=True, columnwise=True)
    return {
        "fprop": path.fprop(x_q, w_q, bias=bias, scales=scales),
        "dgrad": path.dgrad(dy_q, w_q),
        "wgrad": path.wgrad(dy_q, path.for_wgrad(x_q)),
        "bias grad": path.bias_grad(dy, splits, scales),
    }


def both(
    recipe: Recipe,
    dtype: torch.dtype,
    device: str,
    sizes: list[int],
    tail: int,
    scaled: bool,
    separate: bool,
    draw: Any,
    with_bias: bool = True,
) -> tuple[dict, dict]:
    """The verbs' results on the grouped and on the split path; `draw` makes tensors. NaN in the tail."""
    k, n, active = 40, 24, sum(sizes)
    rows = active + tail
    x, dy = draw(rows, k).to(device, dtype), draw(rows, n).to(device, dtype)
    w, bias = draw(len(sizes), n, k).to(device, dtype), draw(len(sizes), n).to(device, dtype)
    bias = bias if with_bias else None
    scales = draw(rows).to(device, torch.promote_types(dtype, torch.float32)) if scaled else None
    for t in (x, dy, scales):
        if t is not None:
            t[active:] = float("nan")
    splits = Splits.make(torch.tensor(sizes, device=device), rows=rows, device=device)
    weights = list(w) if separate else w
    return tuple(run(path, recipe, x, weights, dy, bias, scales, splits) for path in paths(device))


def small_integers(generator: torch.Generator) -> Any:
    """From -1 to 1, so that with these shapes every sum is exact in every dtype, whatever its order."""
    return lambda *shape: torch.randint(-1, 2, shape, generator=generator).float()


def numbers(generator: torch.Generator) -> Any:
    return lambda *shape: torch.randn(*shape, generator=generator)


def skip_without_grouped_kernel(recipe: Recipe, dtype: torch.dtype, device: str) -> None:
    refusal = recipe.why_not_grouped(PlanRequest(recipe, torch.device(device), dtype, (), True, None, 0))
    if refusal is not None:
        pytest.skip(refusal)


# ------------------------------------------------------------------------------------------------ the same results


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
@pytest.mark.parametrize("tail", [0, 5])
def test_both_paths_give_the_same_bits_where_every_sum_is_exact(tail, recipe, dtype, device):
    """Then only layout, quantization, scales and rounding are left, and those are promised bit for bit."""
    skip_without_grouped_kernel(recipe, dtype, device)
    # A GPU adds the bias and multiplies by such a scale in one rounding (fma), torch in two.
    with_bias = device == "cpu" or recipe not in (Float8CurrentScaling(), Float8RowwiseScaling())
    for number, sizes in enumerate(SIZES):
        draw = small_integers(torch.Generator().manual_seed(number))
        grouped, split = both(recipe, dtype, device, sizes, tail, number % 2 == 1, number % 3 == 0, draw, with_bias)
        assert_same_bits(grouped, split)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_both_paths_are_close_on_random_numbers(recipe, dtype, device):
    skip_without_grouped_kernel(recipe, dtype, device)
    for number, sizes in enumerate(SIZES):
        draw = numbers(torch.Generator().manual_seed(number))
        grouped, split = both(recipe, dtype, device, sizes, 5, number % 2 == 1, number % 3 == 0, draw)
        assert_close(grouped, split)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_on_the_cpu_both_paths_sum_in_the_same_order(recipe, dtype):
    """There both hand the same rows of the same group to the same product, so random numbers give the same bits too.

    Not for 16-bit results, which other routines may round, and not with scaled biases, which the paths add in other
    ways.
    """
    for number, sizes in enumerate(SIZES):
        draw = numbers(torch.Generator().manual_seed(number))
        grouped, split = both(recipe, dtype, "cpu", sizes, 5, False, False, draw)
        assert_same_bits(grouped, split)


@pytest.mark.slow
@settings(max_examples=100)
@given(
    sizes=st.lists(st.integers(0, 70), min_size=1, max_size=5),
    tail=st.integers(0, 40),
    recipe=st.sampled_from(RECIPES),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
    scaled=st.booleans(),
    separate=st.booleans(),
)
def test_both_paths_agree_on_random_splits(sizes, tail, recipe, dtype, scaled, separate):
    generator = torch.Generator().manual_seed(0)
    assert_close(*both(recipe, dtype, "cpu", sizes, tail, scaled, separate, numbers(generator)), floor=0.25)
    exact = both(recipe, torch.float32, "cpu", sizes, tail, scaled, separate, small_integers(generator))
    assert_same_bits(*exact)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES[1:], ids=repr)
def test_the_codes_are_the_same(recipe, device):
    """What the grouped path multiplies is, group by group, what the split path multiplies."""
    sizes, rows = [12, 0, 35, 6], 60
    x = torch.randn(rows, 40, device=device)
    x[53:] = float("nan")
    splits = Splits.make(torch.tensor(sizes, device=device), rows=rows, device=device)
    quantizer = recipe.quantizer(Role.INPUT)
    grouped, split = (path.quantize(x, splits, quantizer, rowwise=True, columnwise=True) for path in paths(device))
    grouped, split = grouped.unbind(), split.members
    for mine, theirs in zip(grouped, split, strict=True):
        if Dequantized in (type(mine.rowwise), type(mine.columnwise)):  # a GPU's cast writes values in place of codes
            for columnwise in (False, True):
                assert torch.equal(mine.dequantize(columnwise=columnwise), theirs.dequantize(columnwise=columnwise))
            continue
        for got, want in zip(mine.tensors(), theirs.tensors(), strict=True):
            assert (got is None) == (want is None)
            if got is not None:
                assert torch.equal(got.float(), want.float())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
@pytest.mark.parametrize("stacked", [True, False])
def test_a_layer_gives_the_same_on_both_paths(stacked, recipe, device):
    """Through Sequential, with every gradient, saved operands included."""
    op = GroupedLinear(4, 32, 16, scale_bias=True, stacked=stacked, device=device)
    sizes = torch.tensor([5, 0, 9, 2], device=device)
    results = []
    for path in ("grouped", "split"):
        op.zero_grad()
        x = torch.arange(20 * 32.0, device=device).view(20, 32).sin().requires_grad_()
        scales = torch.linspace(0, 1, 20, device=device).requires_grad_()
        with autocast(recipe=recipe):
            y = Sequential(op, path=path)(x, split_sizes=sizes, scales=scales)
            y.backward(torch.ones_like(y))
        results.append({"y": y, **reference.gradients({"x": x, "scales": scales, **dict(op.named_parameters())})})
    assert_close(*results)


# ----------------------------------------------------------------------------------------------- who decides


def request(recipe: Recipe, device: str, dtype: torch.dtype, path: str | None = None) -> PlanRequest:
    return PlanRequest(recipe, torch.device(device), dtype, (False, (), ()), True, path, 0)


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_every_built_in_recipe_takes_the_grouped_path(recipe, dtype):
    for device in ("cpu", "cuda"):
        assert recipe.why_not_grouped(request(recipe, device, dtype)) is None
        assert choose_path(request(recipe, device, dtype)).name == "grouped"
        assert choose_path(request(recipe, device, dtype, "split")).name == "split"


@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_float64_on_cuda_takes_the_split_path(recipe):
    sentence = "There is no grouped kernel for float64 on CUDA; the split path multiplies group by group."
    asked = request(recipe, "cuda", torch.float64)
    assert recipe.why_not_grouped(asked) == sentence
    assert choose_path(asked).name == "split"
    assert choose_path(request(recipe, "cpu", torch.float64)).name == "grouped"
    with pytest.raises(ValueError, match=r"path='grouped' cannot be taken: There is no grouped kernel for float64"):
        choose_path(request(recipe, "cuda", torch.float64, "grouped"))
    seq = Sequential(GroupedLinear(2, 8, 6, dtype=torch.float64))
    assert f"path: split: {sentence}" in seq.explain(recipe=recipe, device="cuda")
    assert "path: grouped" in seq.explain(recipe=recipe, device="cpu")


def test_a_path_can_be_asked_for_by_the_container_and_by_the_recipe():
    op = GroupedLinear(2, 8, 6)
    assert "path: grouped" in Sequential(op).explain()
    assert "path: split, as asked for" in Sequential(op, path="split").explain()
    assert "path: split, as asked for" in Sequential(op).explain(recipe=Float8CurrentScaling(path="split"))
    assert "path: grouped, as asked for" in Sequential(op, path="grouped").explain(
        recipe=MXFP8BlockScaling(path="split")
    )


@pytest.mark.parametrize("recipe", [HighPrecision(path="split"), MXFP8BlockScaling(path="split")], ids=repr)
def test_the_recipes_path_is_the_one_that_runs(recipe, monkeypatch):
    taken = []

    def recording(fprop: Any) -> Any:
        def recorded(self: Any, *args: Any, **kwargs: Any) -> Tensor:
            taken.append(self.name)
            return fprop(self, *args, **kwargs)

        return recorded

    for kind in (GroupedPath, SplitPath):
        monkeypatch.setattr(kind, "fprop", recording(kind.fprop))
    op = GroupedLinear(2, 8, 6)
    for container in (op, Sequential(op), Sequential(op, path="grouped")):
        with autocast(recipe=recipe):
            container(torch.randn(9, 8), split_sizes=[4, 5])
    assert taken == ["split", "split", "grouped"]


# --------------------------------------------------------------------------------------------------- dy in rows


class ValuesQuantizer(CurrentScalingQuantizer):
    """Of which no product multiplies codes."""

    def dequantized_rows(self, x, splits, dtype, **copies):
        return self.quantize_grouped(x, splits, **copies)


class OfValues(Float8CurrentScaling):
    def quantizer(self, role: Role) -> Quantizer:
        return ValuesQuantizer(**vars(super().quantizer(role)))


def reads_rows(recipe: Recipe, *, rows: int = 4096, shape=(1536, 2048), groups: int = 8, dy=BF16, path=GroupedPath):
    splits = Splits.make([rows // groups] * groups, rows=rows, device="cpu")
    return path(recipe, capability=(9, 0)).wgrad_reads_rows(dy, splits, shape)


def test_no_columnwise_copy_of_dy_is_made_where_wgrad_reads_its_rows(monkeypatch):
    monkeypatch.setattr("ops.kernels.grouped_gemm.tile_rules_float8.why_no_gluon", lambda capability: None)
    for recipe in (Float8CurrentScaling(), DelayedScaling()):
        assert reads_rows(recipe) and reads_rows(recipe, rows=100) and reads_rows(recipe, shape=(2048, 768))
        assert not reads_rows(recipe, path=SplitPath)
        assert not reads_rows(recipe, shape=(1544, 2048)), "rows of dy are not a multiple of 16 bytes apart"
        assert not reads_rows(recipe, shape=(1536, 1004)), "rows of dw are not"
        assert not reads_rows(recipe, shape=(4096, 7168)), "x has many features"
        assert not reads_rows(recipe, rows=16384, shape=(7168, 2048)), "groups have many rows"
        assert not reads_rows(recipe, dy=BF16.double())
    assert not reads_rows(Float8CurrentScaling(split_accumulator_wgrad=False))
    for recipe in (HighPrecision(), Float8BlockScaling(), Float8RowwiseScaling(), MXFP8BlockScaling()):
        assert not reads_rows(recipe)
    splits = Splits.make([2, 2], rows=4, device="cpu")
    quantizer = Float8CurrentScaling().quantizer(Role.GRAD_OUTPUT)
    for copies, expected in ((False, True), (True, False)):
        given = quantizer.quantize_grouped(torch.randn(4, 32).bfloat16(), splits, rowwise=True, columnwise=copies)
        assert reads_rows(Float8CurrentScaling(), dy=given) == expected, "both copies are there"
    assert not reads_rows(OfValues())
    monkeypatch.setattr("ops.kernels.grouped_gemm.tile_rules_float8.why_no_gluon", lambda capability: "No.")
    assert not reads_rows(Float8CurrentScaling())


def steps(
    recipe: Recipe, fusions: Sequence[Any] | None, delay: bool, main_grad: torch.dtype | None, dtype: torch.dtype
) -> dict[str, Tensor]:
    """Every gradient of four steps with other sizes, the last of which may be repeated. Rows of no group are NaN."""
    torch.manual_seed(3)
    about: dict[str, Any] = {"device": "cuda", "dtype": dtype, "delay_wgrad_compute": delay}
    about["accumulate_into_main_grad"] = main_grad is not None
    layers = ops.GroupedLinear(5, 192, 288, **about), ops.ScaledSwiGLU(), ops.GroupedLinear(5, 144, 192, **about)
    model = Sequential(*layers, fusions=fusions)
    weights: list[Any] = [layers[0].weight, layers[2].weight] if main_grad else []
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight, dtype=main_grad)
    found = {}
    for step, sizes in enumerate(([100, 0, 300, 1, 65], [0, 0, 400, 33, 0], [128, 64, 16, 32, 200], [5, 6, 7, 8, 9])):
        x, dy = (torch.randn(512, 192, device="cuda").to(dtype) for _ in range(2))
        x[sum(sizes) :], dy[sum(sizes) :] = torch.nan, torch.nan
        x, scales = x.requires_grad_(), torch.rand(512, device="cuda", requires_grad=True)
        with autocast(recipe=recipe):
            y = model(x, split_sizes=torch.tensor(sizes, device="cuda"), scales=scales)
        y.backward(dy)
        if delay:
            model.backward_dw()
        gradients = reference.gradients({"x": x, "scales": scales, **dict(model.named_parameters())})
        gradients |= {f"main_grad{i}": weight.main_grad for i, weight in enumerate(weights)}
        found |= {f"{name} of step {step}": None if t is None else t.clone() for name, t in gradients.items()}
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("main_grad", ["none", "float32", "of the weight"])
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("fusions", [None, ()], ids=["fused", "unfused"])
@pytest.mark.parametrize("recipe", [Float8CurrentScaling(), DelayedScaling()], ids=lambda recipe: type(recipe).__name__)
def test_gradients_have_the_same_bits_with_dy_in_rows(recipe, fusions, delay, main_grad, dtype, monkeypatch):
    main_grad = {"none": None, "float32": torch.float32, "of the weight": dtype}[main_grad]
    asked = []
    monkeypatch.setattr("ops.products.paths.nt_reads_rows", lambda *shape: asked.append(shape) or True)
    found = steps(recipe, fusions, delay, main_grad, dtype)
    assert asked, "it was not the rule's to say"
    monkeypatch.setattr("ops.products.paths.nt_reads_rows", lambda *shape: False)
    assert_same_bits(found, steps(recipe, fusions, delay, main_grad, dtype))


def test_unknown_paths_are_refused():
    with pytest.raises(ValueError, match="path='fast' does not exist"):
        Sequential(ops.Identity(), path="fast")
    with pytest.raises(ValueError, match="path is \"fast\"|path is 'fast'"):
        MXFP8BlockScaling(path="fast")
    with pytest.raises(ValueError, match="path='fast' does not exist"):
        choose_path(request(HighPrecision(), "cpu", torch.float32, "fast"))


# --------------------------------------------------------------------------------- a user's quantizer and recipe


@dataclass(frozen=True)
class SingleTensorQuantizer(Quantizer):
    """Knows how to quantize one tensor, and nothing of groups."""

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        return CurrentScalingQuantizer(E4M3).quantize(x, rowwise=rowwise, columnwise=columnwise)


@dataclass(frozen=True)
class UsersRecipe(Recipe):
    def quantizer(self, role: Role) -> Quantizer | None:
        return None if role is Role.GRAD_OUTPUT else SingleTensorQuantizer()


@dataclass(frozen=True)
class SameOnGroups(Recipe):
    def quantizer(self, role: Role) -> Quantizer | None:
        return None if role is Role.GRAD_OUTPUT else CurrentScalingQuantizer(E4M3)


def test_a_quantizer_of_single_tensors_runs_on_the_split_path_and_explain_says_why():
    seq = Sequential(GroupedLinear(4, 32, 64), ops.SwiGLU(), GroupedLinear(4, 32, 16))
    assert (
        "path: split: SingleTensorQuantizer knows single tensors only; the split path quantizes group by group"
        in seq.explain(recipe=UsersRecipe())
    )
    results = []
    for recipe, path in ((UsersRecipe(), None), (SameOnGroups(), "split"), (SameOnGroups(), "grouped")):
        seq.zero_grad()
        x = torch.linspace(-2, 2, 20 * 32).view(20, 32).requires_grad_()
        with autocast(recipe=recipe):
            y = Sequential(*seq, path=path)(x, split_sizes=[5, 0, 9, 2])
            y.backward(torch.linspace(-1, 1, 20 * 16).view(20, 16))
        results.append({"y": y, **reference.gradients({"x": x, **dict(seq.named_parameters())})})
    users, split, grouped = results
    assert_same_bits(users, split)
    assert_close(users, grouped, reference.ROUNDED_OFTEN)


def test_the_grouped_path_cannot_be_forced_on_a_quantizer_of_single_tensors():
    op = GroupedLinear(2, 8, 6)
    seq = Sequential(op, path="grouped")
    message = r"path='grouped' cannot be taken: SingleTensorQuantizer knows single tensors only.*path='split'"
    with autocast(recipe=UsersRecipe()), pytest.raises(ValueError, match=message):
        seq(torch.randn(9, 8), split_sizes=[4, 5])


def test_a_recipe_may_quantize_some_operands_only():
    op = GroupedLinear(4, 32, 16)
    x = torch.randn(20, 32)
    w = op.weight.detach()
    with autocast(recipe=SameOnGroups()), torch.no_grad():
        y = op(x, split_sizes=[5, 0, 9, 6])

    def exact(t: Tensor) -> Tensor:
        values, alpha, *_ = CurrentScalingQuantizer(E4M3).quantize(t).operand(False, torch.float64)
        return values * alpha.double()

    want = torch.cat([exact(part) @ exact(w[g]).T for g, part in enumerate(x.split([5, 0, 9, 6])) if len(part)])
    assert_close({"y": y}, {"y": want})


@dataclass(frozen=True)
class NeedsRows(Quantizer):
    """As users write them: the largest of no numbers is an error."""

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        x.abs().max()
        return CurrentScalingQuantizer(E4M3).quantize(x, rowwise=rowwise, columnwise=columnwise)


@dataclass(frozen=True)
class NeedingRows(Recipe):
    def quantizer(self, role: Role) -> Quantizer | None:
        return NeedsRows()


@pytest.mark.parametrize("sizes", [[5, 0, 9, 2], [0, 0, 3, 0], [0, 0, 0, 0]], ids=str)
@pytest.mark.parametrize("fusions", [None, ()], ids=["fused", "unfused"])
@pytest.mark.parametrize("counted", [False, True], ids=["", "counted"])
def test_a_quantizer_of_single_tensors_sees_no_group_without_rows(sizes, fusions, counted):
    seq = Sequential(GroupedLinear(4, 32, 64), ops.SwiGLU(), GroupedLinear(4, 32, 16), fusions=fusions)
    x = torch.linspace(-2, 2, 20 * 32).view(20, 32).requires_grad_()
    results = []
    for recipe in (NeedingRows(), Float8CurrentScaling(path="split", fp8_format=Format.E4M3)):
        seq.zero_grad()
        x.grad = None
        with autocast(recipe=recipe), count_casts() if counted else nullcontext():
            y = seq(x, split_sizes=sizes)
            y.sum().backward()
        results.append({"y": y, **reference.gradients({"x": x, **dict(seq.named_parameters())})})
    assert_same_bits(*results)
    for (name, gradient), size in itertools.product(results[0].items(), enumerate(sizes)):
        if "0.weight" in name and not size[1]:
            assert (gradient[size[0]] == 0).all(), name
    assert "groups without rows are left out" in seq.explain(recipe=NeedingRows())


def test_explain_names_the_kernels_of_a_cpu():
    grouped, loop = "grouped GEMM (torch)", "a product a group (torch)"
    no_codes = "an operand has no float8 codes with a scale a tensor, row or 128 values, aligned for tensor cores"
    values = f"dequantized for all products ({no_codes})"
    no_gpu = "dequantized for all products (float8 products need a CUDA device, and these operands are on none)"
    for inner, switches, path, recipe, words in (
        (32, {}, None, None, grouped),
        (32, {}, None, "mxfp8", f"{grouped}, {values}"),
        (32, {}, None, "fp8_current", f"{grouped}, {no_gpu}"),
        (32, {"delay_wgrad_compute": True}, None, None, grouped),
        (32, {}, "split", None, loop),
        (32, {}, "split", "mxfp8", f"{loop}, {values}"),
    ):
        operations = GroupedLinear(4, 32, 2 * inner, **switches), ops.SwiGLU(), GroupedLinear(4, inner, 16)
        assert f"[{words}, swiglu" in Sequential(*operations, path=path).explain(recipe=recipe)
    assert f"GroupedLinear  [{loop}]" in Sequential(GroupedLinear(2, 8, 8), path="split").explain()
    assert f"GroupedLinear  [{grouped}]" in Sequential(GroupedLinear(2, 8, 8)).explain()
