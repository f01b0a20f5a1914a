"""Quantized tensors of the caller's: into operations, out of them, between Sequentials, as gradients, and theirs."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fuser import Sequential, autocast, ops
from recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedHandle,
    QuantizedTensor,
    Recipe,
    Role,
    Splits,
    quantize,
)
from recipes.mixed import MixedScaling
from tests.check_operation import DEVICES
from tests.pairwise import rest
from tests.reference import assert_same_bits, gradients

RECIPES = [
    DelayedScaling(),
    rest(Float8CurrentScaling(), id="fp8_current"),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
    rest(MixedScaling(input="mxfp8", weight="fp8_block", grad_output="fp8_current"), id="mixed"),
]
EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
PATHS = ["grouped", "split"]


def made(x: Tensor, recipe: Recipe, role: Role = Role.INPUT, **kwargs) -> QuantizedHandle:
    """As an operation that has not run yet quantizes it: under delayed scaling with scales of 1."""
    sizes = kwargs.get("split_sizes", [0])
    groups = sizes.num_groups if isinstance(sizes, Splits) else len(sizes)
    scale = torch.ones(groups, device=x.device) if isinstance(recipe, DelayedScaling) else None
    return quantize(x, recipe, role, scale=scale, **kwargs)


def rough(*shape: int, device: str = "cpu") -> Tensor:
    """Small beside large numbers: rounded along one axis they differ from those rounded along the other."""
    return (torch.randn(shape) * torch.randn(shape).mul(3).exp()).to(device)


def results(module: torch.nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    found = {"y": y.detach(), **gradients({"x": x, **dict(module.named_parameters())})}
    module.zero_grad()
    return found


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(48, 32), (2, 24, 32)], ids=str)
@EACH_RECIPE
def test_codes_of_the_callers_are_those_that_linear_makes(recipe: Recipe, shape: tuple[int, ...], device: str) -> None:
    """x and dy, each quantized by the caller: all results have the bits of the run that quantizes both."""
    torch.manual_seed(0)
    model = Sequential(ops.Linear(32, 64, bias=False, device=device))
    x, dy = rough(*shape, device=device).requires_grad_(), rough(*shape[:-1], 64, device=device)
    plain = copy.deepcopy(model)
    with autocast(recipe):
        y = plain(x)
    y.backward(dy)
    expected = results(plain, x, y)
    handle = QuantizedHandle(made(x.detach(), recipe).quantized).requires_grad_()
    with autocast(recipe):
        y = model(handle)
    y.backward(made(dy, recipe, Role.GRAD_OUTPUT))
    assert type(handle.grad) is Tensor
    assert_same_bits(results(model, handle, y), expected)


def mlp(bias: bool = False, device: str = "cpu") -> list[torch.nn.Module]:
    torch.manual_seed(0)
    return [
        ops.GroupedLinear(3, 32, 64, bias=bias, device=device),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(3, 32, 48, bias=bias, device=device),
    ]


def grouped_run(
    layer: Sequential, recipe: Recipe, x: Tensor, dy: Tensor, sizes: object, scales: Tensor
) -> dict[str, Tensor]:
    with autocast(recipe):
        y = layer(x, split_sizes=sizes, scales=scales)
    y.backward(dy)
    return results(layer, x, y)


def check_grouped(recipe: Recipe, path: str, sizes: list[int], tail: int, fused: bool, device: str) -> None:
    rows = sum(sizes) + tail
    x, dy = rough(rows, 32, device=device).requires_grad_(), rough(rows, 48, device=device)
    scales = torch.rand(rows, device=device)
    settings = {"path": path} if fused else {"path": path, "fusions": ()}
    plain, layer = (Sequential(*mlp(device=device), **settings) for _ in range(2))
    expected = grouped_run(plain, recipe, x, dy, sizes, scales)
    x_q = made(x.detach(), recipe, split_sizes=sizes).quantized
    handle = QuantizedHandle(x_q).requires_grad_()
    dy_q = made(dy, recipe, Role.GRAD_OUTPUT, split_sizes=x_q.splits)
    assert_same_bits(grouped_run(layer, recipe, handle, dy_q, x_q.splits, scales), expected)


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fused", [True, False], ids=["fused", "unfused"])
@EACH_RECIPE
def test_codes_of_the_callers_are_those_that_the_grouped_mlp_would_make(
    recipe: Recipe, path: str, fused: bool, device: str
) -> None:
    check_grouped(recipe, path, [10, 0, 33], 2, fused, device)


@pytest.mark.rest
@pytest.mark.parametrize("path", PATHS)
@EACH_RECIPE
@settings(max_examples=15, deadline=None)
@given(sizes=st.lists(st.one_of(st.just(0), st.integers(1, 40)), min_size=3, max_size=3), tail=st.sampled_from([0, 5]))
def test_for_any_splits(recipe: Recipe, path: str, sizes: list[int], tail: int) -> None:
    check_grouped(recipe, path, sizes, tail, True, "cpu")


@EACH_RECIPE
def test_containers_pass_between_sequentials(recipe: Recipe) -> None:
    """Quantize at the end of one, a Linear at the beginning of the next: as one Sequential, gradients too."""
    torch.manual_seed(0)
    first, last = ops.Linear(32, 64), ops.Linear(64, 32)
    x, dy = rough(40, 32).requires_grad_(), rough(40, 32)
    whole = Sequential(copy.deepcopy(first), ops.Quantize(), copy.deepcopy(last), fusions=())
    with autocast(recipe):
        y = whole(x)
    y.backward(dy)
    expected = {"y": y, "dx": x.grad, "dw1": whole[0].weight.grad, "dw2": whole[2].weight.grad}
    x.grad = None
    front = Sequential(first, ops.Quantize(quantized_output=True), fusions=())
    with autocast(recipe):
        between = front(x)
        assert isinstance(between, QuantizedHandle) and isinstance(between.quantized, QuantizedTensor)
        y = Sequential(last, fusions=())(between)
    y.backward(dy)
    assert_same_bits({"y": y, "dx": x.grad, "dw1": first.weight.grad, "dw2": last.weight.grad}, expected)


def test_the_gradient_leaves_quantized_and_comes_in_quantized() -> None:
    recipe = MXFP8BlockScaling()
    torch.manual_seed(0)
    first, last = ops.Linear(32, 64, bias=False), ops.Linear(64, 32)
    seen: list[Tensor] = []
    x = rough(40, 32)
    with autocast(recipe):
        between = Sequential(first)(x)
        between.register_hook(seen.append)
        y = Sequential(ops.Quantize(forward=False, backward=True, quantized_output=True), last)(between)
    y.sum().backward()
    assert isinstance(seen[0], QuantizedHandle)
    whole = Sequential(copy.deepcopy(first), ops.Quantize(False, True), copy.deepcopy(last), fusions=())
    with autocast(recipe):
        whole(x).sum().backward()
    assert torch.equal(first.weight.grad, whole[0].weight.grad)


def test_two_users_of_a_quantized_output_add_their_gradients() -> None:
    torch.manual_seed(0)
    x = rough(32, 32).requires_grad_()
    back = ops.Quantize(forward=False, backward=True, quantized_output=True)
    with autocast("mxfp8"):
        between = Sequential(ops.Quantize(quantized_output=True))(x)
        y = Sequential(back, ops.Identity())(between)
        (y * 2 + between.dequantize()).sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 3))


@pytest.mark.parametrize("recipe", [MXFP8BlockScaling(), Float8CurrentScaling()], ids=lambda recipe: recipe.name)
def test_other_codes_than_the_recipe_needs_are_dequantized(recipe: Recipe) -> None:
    model = Sequential(ops.Linear(32, 64))
    x = rough(40, 32)
    handle = made(x, NVFP4BlockScaling())
    with autocast(recipe):
        assert torch.equal(model(handle), model(handle.dequantize()))
    assert torch.equal(model(handle), model(handle.dequantize())), "in high precision"


def test_a_container_without_a_handle_is_taken_too() -> None:
    model = Sequential(ops.Linear(32, 64))
    handle = made(rough(40, 32), MXFP8BlockScaling())
    with autocast("mxfp8"):
        y = model(handle.quantized)
        assert torch.equal(y, model(handle)) and torch.equal(y, model[0](handle.quantized))
    y.sum().backward()
    assert handle.grad is None and model[0].weight.grad is not None


def test_a_missing_copy_is_made_of_the_values_and_the_other_kept() -> None:
    recipe, x = MXFP8BlockScaling(), rough(40, 32)
    both, rowwise = made(x, recipe), made(x, recipe, columnwise=False)
    models = [Sequential(ops.Linear(32, 64)) for _ in range(2)]
    models[1].load_state_dict(models[0].state_dict())
    with autocast(recipe):
        ys = [model(handle) for model, handle in zip(models, (both, rowwise), strict=True)]
        for y in ys:
            y.sum().backward()
    assert torch.equal(*ys)
    assert not torch.equal(*(model[0].weight.grad for model in models)), "rounded twice"


@EACH_RECIPE
def test_torch_computes_with_the_values(recipe: Recipe) -> None:
    x = rough(40, 32).requires_grad_()
    handle = made(x, recipe)
    values = handle.quantized.dequantize()
    assert torch.equal(handle + 1, values + 1) and type(handle + 1) is Tensor
    assert torch.equal(torch.cat([handle, handle]), torch.cat([values, values]))
    assert torch.equal(handle.dequantize(), values) and torch.equal(handle.view(-1), values.view(-1))
    handle.dequantize().square().sum().backward()
    assert torch.equal(x.grad, 2 * values), "the gradient of rounding is 1"


def test_a_module_between_computes_with_the_values() -> None:
    model = Sequential(ops.Quantize(quantized_output=True), torch.nn.ReLU(), ops.Linear(32, 8))
    x = rough(40, 32)
    with autocast("mxfp8"):
        values = quantize(x).quantized.dequantize()
        assert torch.equal(model(x), model[2](values.relu()))


def test_a_handle_is_never_changed_in_place() -> None:
    handle = made(rough(40, 32), MXFP8BlockScaling())
    for change in (lambda: handle.add_(1), lambda: handle.copy_(torch.ones(40, 32)), handle.zero_):
        with pytest.raises(RuntimeError, match="cannot be changed in place"):
            change()


def test_a_handle_can_be_copied_and_saved(tmp_path) -> None:
    handle = made(rough(40, 32), NVFP4BlockScaling()).detach().requires_grad_()
    torch.save(handle, tmp_path / "handle")
    for other in (copy.deepcopy(handle), torch.load(tmp_path / "handle", weights_only=False)):
        assert isinstance(other, QuantizedHandle) and other.requires_grad and other is not handle
        assert torch.equal(other.dequantize(), handle.dequantize())
        assert other.quantized.rowwise.codes.data_ptr() != handle.quantized.rowwise.codes.data_ptr()


BAD: Mapping[str, tuple[dict[str, object], type[Exception], str]] = {
    "high precision": ({"recipe": "bf16"}, ValueError, "leaves input in high precision"),
    "a number": ({"recipe": "fp8_delayed", "scale": 2.0}, TypeError, "scale is 2.0, but must be a float32 tensor"),
    "no scale": ({"recipe": "fp8_delayed"}, ValueError, "fp8_delayed needs scale="),
    "a scale": ({"recipe": "mxfp8", "scale": torch.ones(1)}, ValueError, "mxfp8 finds its scales itself"),
    "a role": ({"recipe": "mxfp8", "role": "output"}, TypeError, "role is 'output'"),
    "a weight": ({"recipe": "mxfp8", "role": "weight", "split_sizes": [40]}, ValueError, "a weight has no split_sizes"),
    "sizes": ({"recipe": "mxfp8", "split_sizes": [41]}, ValueError, "split_sizes sum to 41"),
    "no copy": ({"recipe": "mxfp8", "rowwise": False, "columnwise": False}, ValueError, "nothing would be made"),
}


@pytest.mark.parametrize("case", BAD)
def test_what_cannot_be_quantized_is_refused(case: str) -> None:
    arguments, error, message = BAD[case]
    with pytest.raises(error, match=message):
        quantize(rough(40, 32), **arguments)


def test_a_handle_is_over_a_container() -> None:
    with pytest.raises(TypeError, match="must be over a QuantizedTensor or a GroupedTensor"):
        QuantizedHandle(torch.ones(2))


def says(model: Sequential, recipe: str, **given) -> str:
    """What `explain` adds for what the caller has quantized."""
    plain = model.explain(recipe=recipe).splitlines()
    return "\n".join(line for line in model.explain(recipe=recipe, **given).splitlines() if line not in plain)


def test_explain_says_who_multiplies_the_codes() -> None:
    x, dy = rough(40, 32), rough(40, 48)
    model = Sequential(ops.Identity(), *mlp())
    mine = quantize(x, "mxfp8", split_sizes=[10, 10, 20])
    assert says(model, "mxfp8", x=mine) == "  x: codes multiplied as they are by operation 1 (GroupedLinear)"
    d_mine = quantize(dy, "mxfp8", "grad_output", split_sizes=[10, 10, 20], columnwise=False)
    assert says(model, "mxfp8", grad_output=d_mine.quantized) == (
        "  grad_output: codes multiplied as they are by operation 3 (GroupedLinear); where a product reads a columnwise"
        " copy, that is made of these values, so rounded twice"
    )
    assert "(GroupedLinear), and quantized anew: its rowwise codes are" in says(model, "fp8_block", x=mine)
    assert says(model, "bf16", x=mine).endswith("which the recipe leaves in high precision")
    whole = quantize(x, "mxfp8")
    assert says(model, "mxfp8", x=whole).endswith(
        "its scales are of the whole tensor, but those of each group are needed."
    )
    linear = Sequential(ops.Bias(32), ops.Linear(32, 8))
    assert says(linear, "mxfp8", x=whole).endswith("dequantized for operation 0 (Bias), which computes with values")
    module = Sequential(torch.nn.ReLU(), ops.Linear(32, 8))
    assert says(module, "mxfp8", x=whole) == "  x: dequantized for ReLU, which computes with values"
    assert says(Sequential(ops.Identity()), "mxfp8", x=whole) == "  x: handed on as it is"
    with pytest.raises(TypeError, match="x is an ordinary tensor"):
        model.explain(x=x)


def test_codes_of_groups_that_may_be_others_are_dequantized() -> None:
    x = rough(40, 32)
    handle = quantize(x, "mxfp8", split_sizes=[10, 10, 20])
    layer = ops.GroupedLinear(3, 32, 48)
    with autocast("mxfp8"):
        other = layer(handle, split_sizes=[20, 10, 10])
        assert torch.equal(other, layer(handle.dequantize(), split_sizes=[20, 10, 10]))
