"""GroupedLinear(save_original_input=True): less is kept for backward, with the same bits."""

import pytest
import torch

import fuser
from bench.memory import saved_bytes
from fuser import Sequential, autocast, lora, ops
from tests.reference import assert_same_bits
from tests.test_gathered_rows import RECIPES, H, layer, run

R = 37 * 2  # rows of the layer of `run`
EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES)
CPU_AND_GPU = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@CPU_AND_GPU
@EACH_RECIPE
@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_layers_have_the_same_bits(device, recipe, bias):
    expected = run(layer(device, bias=bias), recipe, steps=3)
    assert_same_bits(run(layer(device, bias=bias, save_original_input=True), recipe, steps=3), expected)


def of_rows(recipe, path, **settings):
    """y and gradients of two GroupedLinears whose x is given, with an empty group and a row of no group."""
    torch.manual_seed(0)
    model = Sequential(ops.GroupedLinear(3, 32, 64, **settings), ops.SwiGLU(), ops.GroupedLinear(3, 32, 32, **settings))
    model.path = path
    x = torch.randn(16, 32).requires_grad_()
    with autocast(recipe):
        y = model(x, split_sizes=torch.tensor([6, 0, 9]))
    y.square().sum().backward()
    return {"y": y.detach(), "dx": x.grad} | {name: p.grad for name, p in model.named_parameters()}


@EACH_RECIPE
@pytest.mark.parametrize("path", ["grouped", "split"])
def test_rows_that_are_given(recipe, path):
    assert_same_bits(of_rows(recipe, path, save_original_input=True), of_rows(recipe, path))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "mxfp8", "nvfp4"])
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda model: lora.add(model, rank=2), id="adapters"),
        pytest.param(lambda model: fuser.to_quantized(model, "mxfp8"), id="held quantized"),
        pytest.param(lambda model: model[2].requires_grad_(False), id="frozen"),
        pytest.param(lambda model: model.set_recipe("fp8_current") if hasattr(model, "set_recipe") else None, id="own"),
        pytest.param(lambda model: model[1].register_forward_pre_hook(lambda *_: None), id="hooked"),
    ],
)
def test_models_as_users_have_them(recipe, change):
    def steps(**settings):
        model = layer(**settings)
        change(model)
        return run(model, recipe)

    assert_same_bits(steps(save_original_input=True), steps())


@pytest.mark.slow
@pytest.mark.parametrize("settings", [{}, {"save_original_input": True}], ids=["codes", "tokens"])
def test_under_compile(settings):
    expected = run(layer(), "fp8_current")
    compiled = torch.compile(layer(**settings), fullgraph=True, backend="aot_eager")
    found = {name.removeprefix("_orig_mod."): t for name, t in run(compiled, "fp8_current").items()}
    assert_same_bits(found, expected)


class Checkpointed(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x):
        return fuser.checkpoint(self.model, x)


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "mxfp8"])
def test_under_checkpoint(recipe):
    expected = run(layer(), recipe)
    found = run(Checkpointed(layer(save_original_input=True)), recipe)
    assert_same_bits({name.removeprefix("model."): t for name, t in found.items()}, expected)


def kept(recipe, **settings):
    model, x = layer(**settings), torch.randn(37, H)

    def call():
        with autocast(recipe):
            return model(x.requires_grad_())

    call()  # what quantizers keep from step to step is made
    return saved_bytes(call, but=[x, *model.parameters()])


@pytest.mark.parametrize(
    ("recipe", "bytes_a_number"), [("bf16", 4), ("fp8_current", 1), ("fp8_delayed", 1), ("fp8_block", 1)]
)
def test_tokens_are_kept_in_place_of_rows(recipe, bytes_a_number):
    """x is kept by the Router anyway, so that all of the rows is saved; and what codes have besides."""
    saved = kept(recipe) - kept(recipe, save_original_input=True)
    assert saved >= bytes_a_number * R * H
    assert recipe != "bf16" or saved == bytes_a_number * R * H  # codes have padding and scales


def test_rows_changed_before_backward_are_an_error():
    operation = ops.GroupedLinear(2, 32, 32, bias=False, save_original_input=True)
    x = torch.randn(6, 32)
    with autocast("fp8_current"):
        y = operation(x, split_sizes=torch.tensor([4, 2]))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_it_is_a_flag_and_a_setting_of_forward():
    with pytest.raises(TypeError, match="save_original_input"):
        ops.GroupedLinear(2, 32, 32, save_original_input=1)
    operation = ops.GroupedLinear(2, 32, 32, save_original_input=True)
    assert "save_original_input=True" in repr(operation) and "save_original" not in repr(ops.GroupedLinear(2, 32, 32))
    with autocast("fp8_current"):
        y = operation(torch.randn(6, 32), split_sizes=torch.tensor([4, 2]))
    operation.save_original_input = False
    with pytest.raises(RuntimeError, match="save_original_input"):
        y.sum().backward()


def test_explain_says_what_becomes_of_rows():
    for recipe, words in (
        ("fp8_block", "rows copied in forward, and again in backward"),
        ("bf16", "rows copied in forward, and again in backward"),
    ):
        assert layer(save_original_input=True).explain(recipe=recipe).count(words) == 1
