"""GroupedLinear against a loop over the groups in float64, for every kind of splits, and what it refuses."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fuser import Sequential, autocast, ops, recipes
from ops import GroupedLinear
from recipes import Role, Splits
from tests import reference
from tests.reference import ROUNDED_ONCE, assert_close, assert_same_bits

DTYPES = [
    pytest.param(torch.float64, id="fp64"),
    pytest.param(torch.float32, id="fp32"),
    pytest.param(torch.float16, id="fp16"),
    pytest.param(torch.bfloat16, id="bf16"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
BIASES = ["no bias", "bias", "scaled bias"]

SPLITS = {
    # ordinary
    "uniform": [6, 6, 6, 6],
    "shuffled with zeros": [12, 0, 18, 6],
    # odd sizes
    "unaligned": [3, 17, 1, 9],
    "one row": [0, 1, 0, 0],
    # empty groups
    "first zero": [0, 5, 9, 2],
    "last zero": [9, 4, 7, 0],
    "one takes all": [0, 0, 25, 0],
    "all zero": [0, 0, 0, 0],
}
FORMS = {
    "int64": lambda sizes, rows, device: torch.tensor(sizes, dtype=torch.int64, device=device),
    "int32": lambda sizes, rows, device: torch.tensor(sizes, dtype=torch.int32, device=device),
    "host tensor": lambda sizes, rows, device: torch.tensor(sizes),
    "list": lambda sizes, rows, device: sizes,
    "tuple": lambda sizes, rows, device: tuple(sizes),
    "Splits": lambda sizes, rows, device: Splits.make(sizes, rows=rows, device=device),
}


def make(
    groups: int, k: int, n: int, bias: str = "bias", *, dtype=torch.float32, device="cpu", **forms: bool | None
) -> GroupedLinear:
    """With random biases too, which would start at zero."""
    op = GroupedLinear(
        groups,
        k,
        n,
        bias=bias != "no bias",
        scale_bias=bias == "scaled bias",
        device=device,
        dtype=dtype,
        **forms,
    )
    with torch.no_grad():
        for parameter in op.parameters():
            parameter.uniform_(-1, 1)
    return op


def joined(op: GroupedLinear, name: str, *, grad: bool = False) -> Tensor | None:
    """The weight [G, N, K] or bias [G, N] of either form, or the gradient."""
    names = op.weight_names if name == "weight" else op.bias_names
    tensors = [op.get_parameter(n).grad if grad else op.get_parameter(n).detach() for n in names]
    if not tensors or any(t is None for t in tensors):
        return None
    return tensors[0] if names[0] == name else torch.stack(tensors)


def run(module: Any, op: GroupedLinear, x: Tensor, sizes: Any, scales: Tensor | None, dy: Tensor) -> dict[str, Tensor]:
    """y and every gradient of `module`, which is op or holds it."""
    op.zero_grad()
    x = x.detach().clone().requires_grad_()
    extras = {"split_sizes": sizes}
    if scales is not None:
        scales = extras["scales"] = scales.detach().clone().requires_grad_()
    y = module(x, **extras)
    y.backward(dy)
    return {
        "y": y.detach(),
        "gradient of x": x.grad,
        "gradient of scales": None if scales is None else scales.grad,
        "gradient of weight": joined(op, "weight", grad=True),
        "gradient of bias": joined(op, "bias", grad=True),
    }


def expected(op: GroupedLinear, x: Tensor, sizes: Sequence[int], scales: Tensor | None, dy: Tensor) -> dict[str, Any]:
    """The same in float64, by autograd through a loop over the groups. Rows past the sum do not enter."""
    active = sum(sizes)
    tensors = {"x": x, "scales": scales, "weight": joined(op, "weight"), "bias": joined(op, "bias")}
    wide = {name: None if t is None else t.detach().double().cpu() for name, t in tensors.items()}
    for name in ("x", "scales"):
        if wide[name] is not None:
            wide[name] = torch.cat([wide[name][:active], torch.zeros_like(wide[name][active:])])
    for t in wide.values():
        if t is not None:
            t.requires_grad_()
    y = reference.grouped_linear(wide["x"], wide["weight"], sizes, wide["bias"], wide["scales"])
    dy = torch.cat([dy[:active], torch.zeros_like(dy[active:])]).double().cpu()
    y.backward(dy)
    result = {"y": y.detach()}
    for name, t in wide.items():
        grad = None if t is None else torch.zeros_like(t) if t.grad is None else t.grad
        result[f"gradient of {name}"] = grad
    return result


def data(
    rows: int, active: int, k: int, n: int, bias: str, dtype: torch.dtype, device: str = "cpu", seed: int = 0
) -> tuple[Tensor, Tensor | None, Tensor]:
    """x, scales, dy; NaN in the rows past the active ones."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(rows, width, generator=generator).to(device, dtype) for width in (k, n))
    scales = torch.rand(rows, generator=generator).to(device, torch.promote_types(dtype, torch.float32))
    for t in (x, dy, scales):
        t[active:] = float("nan")
    return x, scales if bias == "scaled bias" else None, dy


# ------------------------------------------------------------------------------------------------ against float64


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capacity", ["exact", "padded"])
@pytest.mark.parametrize("sizes", [pytest.param(sizes, id=name) for name, sizes in SPLITS.items()])
def test_forward_and_every_gradient_are_those_of_a_loop_over_the_groups(sizes, capacity, dtype, device):
    active = sum(sizes)
    rows = active + (7 if capacity == "padded" else 0)
    forms = [{"stacked": True}, {"stacked": False}]
    forms += [{"stacked": True, "stacked_bias": False}, {"stacked": False, "stacked_bias": True}]
    for (bias, form), (k, n) in zip(itertools.product(BIASES, forms), [(5, 3), (16, 32)] * 6, strict=True):
        if bias == "no bias" and "stacked_bias" in form:
            continue
        op = make(4, k, n, bias, dtype=dtype, device=device, **form)
        x, scales, dy = data(rows, active, k, n, bias, dtype, device)
        got = run(op, op, x, torch.tensor(sizes, device=device), scales, dy)
        assert_close(got, expected(op, x, sizes, scales, dy))
        for name in ("y", "gradient of x", "gradient of scales"):
            if got[name] is not None:
                assert not got[name][active:].any(), f"{name} past the sum must be exactly zero"
        for name in ("gradient of weight", "gradient of bias"):
            for group, size in enumerate(sizes):
                if got[name] is not None and size == 0:
                    assert not got[name][group].any(), f"{name} of the empty group {group} must be exactly zero"


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", FORMS)
def test_sizes_may_come_in_any_form(form, device):
    sizes, rows = [4, 0, 7, 2], 15
    op = make(4, 8, 6, device=device)
    x, _, dy = data(rows, 13, 8, 6, "bias", torch.float32, device)
    got = run(op, op, x, FORMS[form](sizes, rows, device), None, dy)
    assert_close(got, expected(op, x, sizes, None, dy))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [0, 1, 96])
@pytest.mark.parametrize("groups", [1, 4, 64, 257])
def test_any_number_of_groups_and_rows(groups, rows, device):
    sizes = reference.random_sizes(torch.Generator().manual_seed(groups), groups, rows)
    op = make(groups, 8, 4, "scaled bias", device=device)
    x, scales, dy = data(rows, rows, 8, 4, "scaled bias", torch.float32, device)
    got = run(op, op, x, torch.tensor(sizes, device=device), scales, dy)
    assert_close(got, expected(op, x, sizes, scales, dy))


def check_example(
    draw_sizes: list[int], tail: int, bias: str, forms: dict[str, bool], dtype, device: str, seed: int
) -> None:
    active = sum(draw_sizes)
    op = make(len(draw_sizes), 16, 8, bias, dtype=dtype, device=device, **forms)
    x, scales, dy = data(active + tail, active, 16, 8, bias, dtype, device, seed)
    got = run(op, op, x, torch.tensor(draw_sizes, device=device), scales, dy)
    assert_close(got, expected(op, x, draw_sizes, scales, dy), floor=0.25)


@pytest.mark.slow
@settings(max_examples=500)
@given(
    sizes=st.lists(st.integers(0, 9), min_size=1, max_size=6),
    tail=st.integers(0, 4),
    bias=st.sampled_from(BIASES),
    forms=st.fixed_dictionaries({"stacked": st.booleans(), "stacked_bias": st.booleans()}),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_random_splits(sizes, tail, bias, forms, dtype, seed):
    check_example(sizes, tail, bias, forms, dtype, "cpu", seed)


@pytest.mark.gpu
@settings(max_examples=500)
@given(
    # about the heights of a tile, 64 and 128, and everything below
    sizes=st.lists(st.one_of(st.integers(0, 9), st.integers(60, 70), st.integers(120, 140)), min_size=1, max_size=6),
    tail=st.integers(0, 140),
    bias=st.sampled_from(BIASES),
    forms=st.fixed_dictionaries({"stacked": st.booleans(), "stacked_bias": st.booleans()}),
    dtype=st.sampled_from([torch.float32, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 9),
)
def test_random_splits_on_the_gpu(sizes, tail, bias, forms, dtype, seed):
    check_example(sizes, tail, bias, forms, dtype, "cuda", seed)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("bias", BIASES)
def test_gradcheck(bias, stacked):
    op = make(3, 4, 3, bias, dtype=torch.float64, stacked=stacked)
    seq = Sequential(op)
    x, scales, _ = data(7, 7, 4, 3, bias, torch.float64)
    extras = {} if scales is None else {"scales": scales.requires_grad_()}
    names = [name for name, _ in op.named_parameters()]

    def frozen_but(kept: set[str]) -> None:
        for name in names:
            op.get_parameter(name).requires_grad_(name in kept)

    for kept in (set(names), set(names[:1]), set(names[-1:]), set()):
        frozen_but(kept)
        parameters = [op.get_parameter(name) for name in names]
        assert torch.autograd.gradcheck(
            lambda x, *_: seq(x, split_sizes=[2, 0, 4], **extras), (x.requires_grad_(), *parameters, *extras.values())
        )


# ---------------------------------------------------------------------------------------------------- properties


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Small enough that every product and sum here is exact in any dtype but the 16-bit ones."""
    return torch.randint(-4, 5, shape, generator=torch.Generator().manual_seed(seed)).float()


def test_permuting_the_groups_permutes_the_rows_and_the_gradients():
    sizes, order = [4, 0, 3, 6], [2, 3, 0, 1]
    x, dy, w, b = integers(13, 8), integers(13, 6, seed=1), integers(4, 6, 8, seed=2), integers(4, 6, seed=3)
    rows = torch.cat([torch.arange(13).split(sizes)[group] for group in order])
    results = []
    for group_order, row_order in ((range(4), torch.arange(13)), (order, rows)):
        op = make(4, 8, 6)
        reference.set_parameters(op, {"weight": w[list(group_order)], "bias": b[list(group_order)]})
        results.append(run(op, op, x[row_order], [sizes[g] for g in group_order], None, dy[row_order]))
    plain, permuted = results
    for name in ("y", "gradient of x"):
        plain[name] = plain[name][rows]
    for name in ("gradient of weight", "gradient of bias"):
        plain[name] = plain[name][order]
    assert_same_bits(permuted, plain)


def test_rows_do_not_depend_on_the_other_groups():
    op = make(4, 8, 6)
    x = integers(20, 8)
    alone = op(x[:5], split_sizes=[0, 0, 5, 0])
    among_others = op(torch.cat([x[5:11], x[:5], x[11:]]), split_sizes=[2, 4, 5, 9])
    torch.testing.assert_close(among_others[6:11], alone, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("recipe", [None, "fp8_current", "mxfp8", "fp8_block"])
def test_a_nan_stays_in_its_row_and_its_group(recipe):
    op = make(3, 64, 32)
    x, _, dy = data(12, 12, 64, 32, "bias", torch.float32)
    with autocast(recipe=recipe):
        clean = run(op, op, x, [4, 5, 3], None, dy)
        x[6, 3] = float("nan")
        got = run(op, op, x, [4, 5, 3], None, dy)
    assert got["y"][6].isnan().all()
    assert got["gradient of weight"][1, :, 3].isnan().all()
    others = [row for row in range(12) if row != 6]
    assert_same_bits(
        {"y": got["y"][others], "dw": got["gradient of weight"][[0, 2]], "dx": got["gradient of x"]},
        {"y": clean["y"][others], "dw": clean["gradient of weight"][[0, 2]], "dx": clean["gradient of x"]},
    )


@pytest.mark.parametrize("layout", ["transposed", "every second row", "a column slice", "expanded"])
def test_x_and_dy_need_not_be_contiguous(layout):
    views = {
        "transposed": lambda width: torch.randn(width, 9).T,
        "every second row": lambda width: torch.randn(18, width)[::2],
        "a column slice": lambda width: torch.randn(9, width + 3)[:, 1 : width + 1],
        "expanded": lambda width: torch.randn(1, width).expand(9, width),
    }
    op = make(3, 8, 6)
    x, dy = views[layout](8), views[layout](6)
    leaf = x.detach().requires_grad_()
    op(leaf, split_sizes=[4, 0, 3]).backward(dy)
    contiguous = run(op, op, x.contiguous(), [4, 0, 3], None, dy.contiguous())
    torch.testing.assert_close(leaf.grad, contiguous["gradient of x"])
    assert_close(contiguous, expected(op, x, [4, 0, 3], None, dy))


def test_the_caller_may_refill_the_sizes_between_forward_and_backward():
    op = make(3, 8, 6)
    x, _, dy = data(9, 9, 8, 6, "bias", torch.float32)
    want = run(op, op, x, [4, 2, 3], None, dy)
    sizes = torch.tensor([4, 2, 3])
    op.zero_grad()
    y = op(x, split_sizes=sizes)
    sizes.copy_(torch.tensor([9, 0, 0]))
    y.backward(dy)
    assert_same_bits({"dw": op.weight.grad}, {"dw": want["gradient of weight"]})


def test_runs_repeat_bit_for_bit():
    op = make(4, 33, 17, "scaled bias", dtype=torch.bfloat16)
    x, scales, dy = data(40, 37, 33, 17, "scaled bias", torch.bfloat16)
    first, second = (run(op, op, x, [9, 0, 27, 1], scales, dy) for _ in range(2))
    assert_same_bits(first, second)


def test_scales_may_have_another_dtype_than_x():
    op = make(2, 8, 6, "scaled bias", dtype=torch.bfloat16)
    x, scales, dy = data(9, 9, 8, 6, "scaled bias", torch.bfloat16)
    for dtype in (torch.float32, torch.bfloat16):
        got = run(op, op, x, [4, 5], scales.to(dtype), dy)
        assert got["y"].dtype == torch.bfloat16
        assert got["gradient of scales"].dtype == dtype
        assert_close(got, expected(op, x, [4, 5], scales.to(dtype), dy))


def test_x_is_cast_to_the_dtype_of_the_weights_and_its_gradient_back():
    op = make(2, 8, 6, dtype=torch.bfloat16)
    x = torch.randn(9, 8)
    dy = torch.randn(9, 6).bfloat16()
    got = run(op, op, x, [4, 5], None, dy)
    assert got["y"].dtype == torch.bfloat16
    assert got["gradient of x"].dtype == torch.float32
    same = run(op, op, x.bfloat16(), [4, 5], None, dy)
    assert_same_bits({"y": got["y"]}, {"y": same["y"]})


# ------------------------------------------------------------------------------------------ which gradients exist


@pytest.mark.parametrize("wanted", list(itertools.product([False, True], repeat=4)), ids=str)
def test_only_the_gradients_that_are_wanted_exist(wanted):
    names = ("x", "weight", "bias", "scales")
    op = make(3, 8, 6, "scaled bias", dtype=torch.float64)
    x, scales, dy = data(9, 9, 8, 6, "scaled bias", torch.float64)
    everything = run(op, op, x, [4, 0, 5], scales, dy)
    op.zero_grad(set_to_none=True)
    leaf = dict(zip(names, (x, op.weight, op.bias, scales), strict=True))
    for name, want in zip(names, wanted, strict=True):
        leaf[name].requires_grad_(want)
    y = op(x, split_sizes=[4, 0, 5], scales=scales)
    assert y.requires_grad == any(wanted)
    if any(wanted):
        y.backward(dy)
    for name, want in zip(names, wanted, strict=True):
        got = leaf[name].grad
        assert_same_bits({name: got}, {name: everything[f"gradient of {name}"] if want else None})


@pytest.mark.parametrize("recipe", [None, "fp8_current", "mxfp8", "fp8_block"])
def test_one_frozen_group_of_separate_weights_costs_the_others_nothing(recipe):
    op = make(3, 32, 32, stacked=False)
    x, _, dy = data(9, 9, 32, 32, "bias", torch.float32)
    with autocast(recipe=recipe):
        run(op, op, x, [4, 0, 5], None, dy)
        whole = {name: p.grad for name, p in op.named_parameters()}
        op.zero_grad(set_to_none=True)
        op.weight2.requires_grad_(False)
        op.bias0.requires_grad_(False)
        op(x, split_sizes=[4, 0, 5]).backward(dy)
    got = {name: p.grad for name, p in op.named_parameters()}
    assert_same_bits(got, whole | {"weight2": None, "bias0": None})


def test_without_grad_mode_nothing_is_kept():
    op = make(3, 8, 6)
    kept = []
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode, torch.autograd.graph.saved_tensors_hooks(kept.append, lambda t: t):
            y = op(torch.randn(9, 8), split_sizes=[4, 0, 5])
        assert not y.requires_grad
    assert not kept


# ------------------------------------------------------------------------------------------------------- recipes


def quantized_reference(op: GroupedLinear, recipe: Any, x: Tensor, sizes: Sequence[int], dy: Tensor) -> dict[str, Any]:
    """Each product in float64, of operands that are quantized group by group as the recipe says, and exact."""

    def product(a: Tensor, role_a: Role, b: Tensor, role_b: Role, layout: str) -> Tensor:
        (a, alpha_a, *_), (b, alpha_b, *_) = (
            recipe.quantizer(role)
            .quantize(t, rowwise=not columnwise, columnwise=columnwise)
            .operand(columnwise, torch.float64)
            for t, role, columnwise in ((a, role_a, layout == "NT"), (b, role_b, layout != "TN"))
        )
        product = (a.T if layout == "NT" else a) @ (b.T if layout == "TN" else b)
        return product if alpha_a is None else product * (alpha_a * alpha_b).double()  # one factor, in float32

    inputs, weights, grads = Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT
    w, b = joined(op, "weight"), joined(op, "bias")
    y = torch.zeros(len(x), op.out_features, dtype=torch.float64)
    dx = torch.zeros(len(x), op.in_features, dtype=torch.float64)
    dw, db = torch.zeros_like(w, dtype=torch.float64), torch.zeros_like(b, dtype=torch.float64)
    begin = 0
    for group, size in enumerate(sizes):
        rows = slice(begin, begin + size)
        begin += size
        if size:
            y[rows] = product(x[rows], inputs, w[group], weights, "TN") + b[group].double()
            dx[rows] = product(dy[rows], grads, w[group], weights, "NN")
            dw[group] = product(dy[rows], grads, x[rows], inputs, "NT")
            db[group] = dy[rows].double().sum(0)
    return {"y": y, "gradient of x": dx, "gradient of weight": dw, "gradient of bias": db, "gradient of scales": None}


RECIPES = [
    recipes.Float8CurrentScaling(),
    recipes.Float8CurrentScaling(power_2_scale=True),
    recipes.MXFP8BlockScaling(),
    recipes.MXFP8BlockScaling(fp8_format=recipes.Format.HYBRID),
    recipes.Float8BlockScaling(),
    recipes.Float8BlockScaling(fp8_format=recipes.Format.HYBRID, use_f32_scales=True),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(64, 32), (40, 24), (7, 5)], ids=str)
@pytest.mark.parametrize("recipe", RECIPES, ids=repr)
def test_a_recipe_changes_the_operands_and_nothing_else(recipe, shape, dtype, device):
    k, n = shape
    # Hopper adds float8 products with fewer bits: `ops.kernels.grouped_gemm.float8` has the figures.
    more = 5e-4 if recipe.support(torch.device(device)) == "native" else 0.0
    tolerances = {key: tolerance + more for key, tolerance in ROUNDED_ONCE.items()}
    for (name, sizes), stacked in zip(SPLITS.items(), itertools.cycle([True, False]), strict=False):
        active = sum(sizes)
        op = make(4, k, n, dtype=dtype, device=device, stacked=stacked)
        x, _, dy = data(active + 5, active, k, n, "bias", dtype, device)
        with autocast(recipe=recipe):
            got = run(op, op, x, torch.tensor(sizes, device=device), None, dy)
        cpu = copy.deepcopy(op).cpu()
        try:
            assert_close(got, quantized_reference(cpu, recipe, x.cpu(), sizes, dy.cpu()), tolerances)
        except AssertionError as error:
            raise AssertionError(f"splits {name!r}: {error}") from None


def test_a_sequence_of_recipes_equals_each_alone():
    op = make(3, 32, 32)
    x, _, dy = data(9, 9, 32, 32, "bias", torch.float32)
    results: dict[str, Any] = {}
    for recipe in ("mxfp8", "fp8_current", "bf16", "mxfp8", "bf16", "fp8_current"):
        with autocast(recipe=recipe):
            got = run(op, op, x, [4, 0, 5], None, dy)
        assert_same_bits(got, results.setdefault(recipe, got))
    assert not torch.equal(results["bf16"]["y"], results["mxfp8"]["y"])


# ----------------------------------------------------------------------------------------------- caller's buffers


@pytest.mark.parametrize("path", ["grouped", "split"])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_output_and_grad_input_are_written_into_the_callers_buffers(recipe, path):
    op = make(3, 32, 64)
    x, _, dy = data(12, 9, 32, 64, "bias", torch.float32)
    seq = Sequential(op, path=path)
    output, grad_input = torch.full((12, 64), 7.0), torch.full((12, 32), 7.0)
    with autocast(recipe=recipe):
        want = run(seq, op, x, [4, 0, 5], None, dy)
        x.requires_grad_()
        y = seq(x, split_sizes=[4, 0, 5], buffers={0: {"output": output, "grad_input": grad_input}})
        (dx,) = torch.autograd.grad(y, x, dy)
    assert y.data_ptr() == output.data_ptr()
    assert dx.data_ptr() == grad_input.data_ptr()
    assert output.grad_fn is None
    assert_same_bits({"y": output, "dx": grad_input}, {"y": want["y"], "dx": want["gradient of x"]})


def test_an_operation_called_alone_takes_buffers_too():
    op, output = make(3, 8, 6), torch.full((9, 6), 7.0)
    x = torch.randn(9, 8)
    with torch.no_grad():
        y = op(x, split_sizes=[4, 0, 5], buffers={"output": output})
    assert y.data_ptr() == output.data_ptr()
    assert_same_bits({"y": y}, {"y": op(x, split_sizes=[4, 0, 5])})


BAD_BUFFERS = {
    "shape": (lambda: torch.empty(9, 7), r"shape \[9, 7\].*Needed: shape \[9, 6\]"),
    "dtype": (lambda: torch.empty(9, 6, dtype=torch.bfloat16), r"torch\.bfloat16, on cpu.*torch\.float32, on cpu"),
    "device": (lambda: torch.empty(9, 6, device="meta"), r"on meta.*on cpu, contiguous"),
    "layout": (lambda: torch.empty(6, 9).T, r"contiguous=False"),
    "leaf": (lambda: torch.empty(9, 6, requires_grad=True), r"requires_grad=True"),
}


@pytest.mark.parametrize(("buffer", "message"), BAD_BUFFERS.values(), ids=BAD_BUFFERS)
def test_a_buffer_that_does_not_fit_is_refused(buffer, message):
    op = make(3, 8, 6)
    with pytest.raises(ValueError, match=r"operation 0 .*GroupedLinear.*The buffer 'output' has .*" + message):
        op(torch.randn(9, 8), split_sizes=[4, 0, 5], buffers={"output": buffer()})


def test_a_grad_input_buffer_that_does_not_fit_is_refused():
    op = make(3, 8, 6)
    x = torch.randn(9, 8, requires_grad=True)
    with pytest.raises(ValueError, match=r"The buffer 'grad_input' has shape \[9, 6\].*Needed: shape \[9, 8\]"):
        op(x, split_sizes=[4, 0, 5], buffers={"grad_input": torch.empty(9, 6)}).sum().backward()


def test_an_unknown_buffer_is_refused():
    seq = Sequential(make(3, 8, 6))
    with pytest.raises(ValueError, match="names 'out', but GroupedLinear writes into 'output', 'grad_input'"):
        seq(torch.randn(9, 8), split_sizes=[4, 0, 5], buffers={0: {"out": torch.empty(9, 6)}})
    with pytest.raises(ValueError, match="'out'"):
        seq[0](torch.randn(9, 8), split_sizes=[4, 0, 5], buffers={"out": torch.empty(9, 6)})


# ---------------------------------------------------------------------------------------------------- state dicts


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("saved_as", [True, False], ids=["from stacked", "from one a group"])
@pytest.mark.parametrize("loaded_as", [True, False], ids=["to stacked", "to one a group"])
def test_a_state_dict_of_either_form_loads_into_either(loaded_as, saved_as, bias, nested):
    source = make(3, 8, 6, "bias" if bias else "no bias", stacked=saved_as)
    target = make(3, 8, 6, "bias" if bias else "no bias", stacked=loaded_as)
    wrap = (lambda op: Sequential(ops.Identity(), op)) if nested else (lambda op: op)
    state = wrap(source).state_dict()
    keys = list(state)
    wrap(target).load_state_dict(state, strict=True)
    assert list(state) == keys, "the caller's state dict must stay as it was"
    for name in ("weight", "bias")[: 1 + bias]:
        assert torch.equal(joined(target, name), joined(source, name))
    x = torch.randn(9, 8)
    assert torch.equal(target(x, split_sizes=[4, 0, 5]), source(x, split_sizes=[4, 0, 5]))


@pytest.mark.parametrize("stacked", [True, False])
def test_a_state_dict_with_another_number_of_groups_is_refused(stacked):
    for saved_as in (True, False):
        state = make(4, 8, 6, stacked=saved_as).state_dict()
        with pytest.raises(RuntimeError, match="weight"):
            make(3, 8, 6, stacked=stacked).load_state_dict(state)


def test_a_missing_group_is_refused():
    state = make(3, 8, 6, stacked=False).state_dict()
    del state["weight1"]
    with pytest.raises(RuntimeError, match="weight"):
        make(3, 8, 6).load_state_dict(state)


@pytest.mark.parametrize("strict", [True, False])
def test_groups_of_another_shape_are_named(strict):
    """With all else that does not fit, and nothing is changed."""
    state = make(4, 8, 6, stacked=False).state_dict()
    state["weight1"], state["bias3"] = torch.zeros(7, 8), torch.zeros(5)
    target = make(4, 8, 6)
    before = target.weight.clone()
    mismatches = (
        r"size mismatch for 0\.weight1: .* torch\.Size\(\[7, 8\]\) .* torch\.Size\(\[6, 8\]\)\.\s+"
        r"size mismatch for 0\.bias3: .* torch\.Size\(\[5\]\) .* torch\.Size\(\[6\]\)\.$"
    )
    with pytest.raises(RuntimeError, match=mismatches):
        Sequential(target).load_state_dict({f"0.{name}": tensor for name, tensor in state.items()}, strict=strict)
    assert torch.equal(target.weight, before)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("path", ["grouped", "split"])
def test_the_form_of_weights_and_biases_changes_no_bits(path, recipe):
    source = make(3, 32, 16, "scaled bias")
    x, scales, dy = data(9, 9, 32, 16, "scaled bias", torch.float32)
    results = []
    for stacked, stacked_bias in itertools.product([True, False], repeat=2):
        op = make(3, 32, 16, "scaled bias", stacked=stacked, stacked_bias=stacked_bias)
        op.load_state_dict(source.state_dict())
        assert joined(op, "bias").equal(source.bias)
        assert (len(op.weight_names), len(op.bias_names)) == (1 if stacked else 3, 1 if stacked_bias else 3)
        torch.manual_seed(0)  # NVFP4's stochastic rounding
        with autocast(recipe=recipe):
            results.append(run(Sequential(op, path=path), op, x, [4, 0, 5], scales, dy))
    for result in results[1:]:
        assert_same_bits(result, results[0])


@pytest.mark.parametrize("given", list(itertools.product([True, False], repeat=2)))
@pytest.mark.parametrize("needed", list(itertools.product([True, False], repeat=2)))
def test_a_state_dict_of_any_two_forms_loads_into_any(needed, given):
    form = ("stacked", "stacked_bias")
    source, target = (make(3, 8, 6, **dict(zip(form, flags, strict=True))) for flags in (given, needed))
    target.load_state_dict(source.state_dict(), strict=True)
    for name in ("weight", "bias"):
        assert torch.equal(joined(target, name), joined(source, name))


def test_one_frozen_bias_of_several_beside_stacked_weights():
    op = make(3, 8, 6, stacked_bias=False)
    op.bias1.requires_grad_(False)
    x, _, dy = data(9, 9, 8, 6, "bias", torch.float32)
    op(x, split_sizes=[4, 3, 2]).backward(dy)
    assert op.bias1.grad is None and op.weight.grad is not None
    torch.testing.assert_close(op.bias2.grad, dy[7:].sum(0))


def test_keys_are_those_of_the_form():
    assert list(make(2, 8, 6, stacked_bias=False).state_dict()) == ["weight", "bias0", "bias1"]
    assert list(make(2, 8, 6).state_dict()) == ["weight", "bias"]
    assert list(make(2, 8, 6, stacked=False).state_dict()) == ["weight0", "weight1", "bias0", "bias1"]
    assert make(2, 8, 6).weight.shape == (2, 6, 8)
    assert make(2, 8, 6, stacked=False).bias1.shape == (6,)


# ------------------------------------------------------------------------------------------------------ as modules


@pytest.mark.parametrize("stacked", [True, False])
def test_a_deep_copy_is_its_own_module(stacked):
    op = make(3, 8, 6, stacked=stacked)
    x, _, dy = data(9, 9, 8, 6, "bias", torch.float32)
    want = run(op, op, x, [4, 0, 5], None, dy)
    op.zero_grad(set_to_none=True)
    copied = copy.deepcopy(op)
    assert_same_bits(run(copied, copied, x, [4, 0, 5], None, dy), want)
    assert all(p.grad is None for p in op.parameters())


def test_on_the_meta_device_then_materialised():
    op = GroupedLinear(3, 8, 6, device="meta")
    with pytest.raises(RuntimeError, match="meta device"):
        op(torch.randn(9, 8), split_sizes=[4, 0, 5])
    op.to_empty(device="cpu").reset_parameters()
    assert op(torch.randn(9, 8), split_sizes=[4, 0, 5]).isfinite().all()


def test_initial_values():
    op = GroupedLinear(3, 100, 50, dtype=torch.float64)
    assert op.weight.abs().max() <= 0.1
    assert op.weight.std().item() == pytest.approx(0.1 / 3**0.5, rel=0.05)
    assert not op.bias.any()


def test_repr():
    assert repr(GroupedLinear(2, 8, 6, bias=False)) == (
        "GroupedLinear(num_groups=2, in_features=8, out_features=6, bias=False, scale_bias=False, stacked=True)"
    )
    assert repr(GroupedLinear(2, 8, 6, stacked_bias=False)).endswith("stacked=True, stacked_bias=False)")


# ---------------------------------------------------------------------------------------------------------- errors

BAD_SIZES = {
    "negative": ([5, -1, 5], ValueError, r"split_sizes\[1\] is -1, but cannot be negative"),
    "sum above the rows": ([5, 0, 5], ValueError, r"split_sizes sum to 10, but x has only 9 rows"),
    "wrong length": ([4, 5], ValueError, r"split_sizes has 2 entries, but num_groups is 3"),
    "empty": ([], ValueError, r"split_sizes is empty"),
    "floats": (torch.tensor([4.0, 0.0, 5.0]), TypeError, r"split_sizes is torch\.float32, but must be integers"),
    "float list": ([4.0, 0.0, 5.0], TypeError, r"split_sizes must be integers"),
    "bool": (torch.tensor([True, False, True]), TypeError, r"split_sizes is torch\.bool"),
    "requires grad": (torch.tensor([4.0, 0.0, 5.0], requires_grad=True), ValueError, r"requires a gradient"),
    "matrix": (torch.tensor([[4, 0, 5]]), ValueError, r"split_sizes has shape \[1, 3\], but must be \[num_groups\]"),
    "none": (None, TypeError, r"split_sizes"),
    "a number": (9, TypeError, r"split_sizes"),
    "dict": ({4: 1, 0: 2, 5: 3}, TypeError, r"split_sizes is of type dict"),
    "other rows": (Splits.make([4, 0, 5], rows=10, device="cpu"), ValueError, r"made for 10 rows, but x has 9"),
}


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize(("sizes", "kind", "message"), BAD_SIZES.values(), ids=BAD_SIZES)
def test_bad_sizes_are_refused_by_the_name_of_the_operation(sizes, kind, message, recipe):
    seq = Sequential(ops.Identity(), make(3, 8, 6))
    with autocast(recipe=recipe), pytest.raises(kind, match=r"operation 1 .*GroupedLinear.*" + message):
        seq(torch.randn(9, 8), split_sizes=sizes)


BAD_CALLS = {
    "features": (
        lambda op: op(torch.randn(9, 7), split_sizes=[4, 5]),
        ValueError,
        r"x has shape \[9, 7\].*\[rows, 8\]",
    ),
    "dimensions": (lambda op: op(torch.randn(3, 3, 8), split_sizes=[1, 2]), ValueError, r"x has shape \[3, 3, 8\]"),
    "number": (
        lambda op: op(torch.tensor(1.0), split_sizes=[1, 0]),
        ValueError,
        r"x has no dimensions, but split_sizes divide its rows",
    ),
    "vector": (lambda op: op(torch.randn(8), split_sizes=[4, 4]), ValueError, r"x has shape \[8\]"),
    "no sizes": (lambda op: op(torch.randn(9, 8)), ValueError, r"missing: 'split_sizes'.*ask for: 'split_sizes'"),
    "unknown extra": (
        lambda op: op(torch.randn(9, 8), split_sizes=[4, 5], scales=torch.ones(9)),
        ValueError,
        r"unknown: 'scales'.*ask for: 'split_sizes'",
    ),
}


@pytest.mark.parametrize(("call", "kind", "message"), BAD_CALLS.values(), ids=BAD_CALLS)
def test_bad_calls_are_refused(call, kind, message):
    with pytest.raises(kind, match=message):
        call(make(2, 8, 6))


@pytest.mark.parametrize("shape", [(8,), (9, 1), (10,), ()], ids=str)
def test_scales_of_another_shape_are_refused(shape):
    with pytest.raises(ValueError, match=r"scales has shape .* but x has 9 rows"):
        make(2, 8, 6, "scaled bias")(torch.randn(9, 8), split_sizes=[4, 5], scales=torch.ones(shape))


@pytest.mark.parametrize("dtype", (torch.int64, torch.float8_e4m3fn))
def test_scales_in_which_nothing_is_computed_are_refused(dtype):
    with pytest.raises(TypeError, match=rf"scales is {dtype}, but must be bfloat16, float16, .*Give scales.float\(\)"):
        make(2, 8, 6, "scaled bias")(torch.randn(9, 8), split_sizes=[4, 5], scales=torch.ones(9).to(dtype))


def test_scale_bias_asks_for_scales():
    with pytest.raises(ValueError, match=r"missing: 'scales'"):
        make(2, 8, 6, "scaled bias")(torch.randn(9, 8), split_sizes=[4, 5])


@pytest.mark.parametrize("arguments", [(0, 8, 6), (2, 0, 6), (2, 8, -1)], ids=str)
def test_sizes_of_the_layer_must_be_positive(arguments):
    with pytest.raises(ValueError, match="All must be positive"):
        GroupedLinear(*arguments)


def test_scale_bias_needs_a_bias():
    with pytest.raises(ValueError, match="scale_bias=True needs a bias"):
        GroupedLinear(2, 8, 6, bias=False, scale_bias=True)


# ------------------------------------------------------------------------------------------- only on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, "fp8_current", "mxfp8", "fp8_block"])
def test_nothing_waits_for_the_device(recipe):
    op = make(4, 64, 32, "scaled bias", dtype=torch.bfloat16, device="cuda")
    x, scales, dy = data(40, 40, 64, 32, "scaled bias", torch.bfloat16, "cuda")
    sizes = torch.tensor([9, 0, 20, 4], device="cuda")
    with autocast(recipe=recipe):
        run(op, op, x, sizes, scales, dy)  # compiles
        with reference.no_host_sync():
            run(op, op, x, sizes, scales, dy)


@pytest.mark.gpu
def test_bad_sizes_on_the_device_are_clamped():
    op = make(3, 16, 16, device="cuda")
    x, _, dy = data(9, 9, 16, 16, "bias", torch.float32, "cuda")
    got = run(op, op, x, torch.tensor([4, -3, 50], device="cuda"), None, dy)
    assert_close(got, expected(op, x, [4, 0, 5], None, dy))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, "fp8_current", "mxfp8", "fp8_block"])
def test_a_captured_graph_is_replayed_with_other_splits(recipe):
    op = make(4, 64, 32, "scaled bias", dtype=torch.bfloat16, device="cuda")
    x, scales, dy = data(200, 200, 64, 32, "scaled bias", torch.bfloat16, "cuda")
    sizes = torch.tensor([50, 50, 50, 50], device="cuda")
    leaf, s = x.clone().requires_grad_(), scales.clone().requires_grad_()
    inputs = [leaf, s, op.weight, op.bias]

    def step() -> list[Tensor]:
        with autocast(recipe=recipe):
            y = op(leaf, split_sizes=sizes, scales=s)
            return [y.detach(), *torch.autograd.grad(y, inputs, dy)]

    graph, captured = reference.capture(step)
    generator = torch.Generator().manual_seed(0)
    for replay in range(20):
        rows = 200 if replay % 2 else int(torch.randint(0, 200, (), generator=generator))
        sizes.copy_(torch.tensor(reference.random_sizes(generator, 4, rows)))
        with torch.no_grad():
            leaf.copy_(torch.randn(200, 64, generator=generator))
        graph.replay()
        names = ["y", "x", "scales", "weight", "bias"]
        replayed = dict(zip(names, [t.clone() for t in captured], strict=True))
        assert_same_bits(replayed, dict(zip(names, step(), strict=True)))


@pytest.mark.parametrize("value", [0, 1, "True"], ids=repr)
def test_the_form_of_biases_is_true_false_or_none(value):
    with pytest.raises(TypeError, match="stacked_bias is .*, but must be True or False. Pass a bool"):
        GroupedLinear(2, 4, 4, stacked_bias=value)


@pytest.mark.parametrize("stacked_bias", [True, False])
def test_biases_may_be_assigned_and_removed(stacked_bias):
    op, whole = make(2, 8, 6, "no bias", stacked_bias=stacked_bias), make(2, 8, 6)
    whole.weight = op.weight
    x, names = torch.randn(5, 8), ("bias",) if stacked_bias else ("bias0", "bias1")
    plain = op(x, split_sizes=[3, 2])
    for name, bias in zip(names, [whole.bias] if stacked_bias else whole.bias, strict=True):
        setattr(op, name, nn.Parameter(bias.detach().clone()))
    y, expected = (operation(x, split_sizes=[3, 2]) for operation in (op, whole))
    (y + expected).sum().backward()
    assert torch.equal(y, expected) and torch.equal(joined(op, "bias", grad=True), whole.bias.grad)
    assert "bias=True" in repr(op)
    for name in names:
        setattr(op, name, None)
    assert torch.equal(op(x, split_sizes=[3, 2]), plain)


def test_biases_of_another_form_are_refused():
    with pytest.raises(ValueError, match=r"'bias' is given, but this GroupedLinear has its bias as bias0, ..., bias1"):
        make(2, 8, 6, "no bias", stacked_bias=False).bias = nn.Parameter(torch.zeros(2, 6))
    with pytest.raises(ValueError, match="'bias' is set to None, but scale_bias=True needs a bias to scale"):
        make(2, 8, 6, "scaled bias").bias = None
    op = make(2, 8, 6, stacked_bias=False)
    op.bias1 = None
    with pytest.raises(
        RuntimeError, match=r"In operation 0 \(GroupedLinear\): Its bias1 is None, but it computes with"
    ):
        op(torch.zeros(2, 8), split_sizes=[1, 1])
