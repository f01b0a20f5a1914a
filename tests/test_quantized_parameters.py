"""Weights that are held quantized: the bits of weights that are quantized in the step, and all that is done to them."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import fuser
from fuser import Sequential, autocast, lora, ops
from recipes import (
    E4M3,
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    Quantizer,
    Recipe,
    Role,
)
from recipes.current_scaling import CurrentScalingQuantizer
from recipes.mixed import MixedScaling
from recipes.tensors.quantized_parameter import QuantizedParameter
from tests.check_operation import DEVICES
from tests.pairwise import rest
from tests.reference import assert_same_bits

RECIPES = [
    DelayedScaling(),
    Float8BlockScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(disable_stochastic_rounding=True),
    rest(Float8CurrentScaling(), id="fp8_current"),
    rest(MXFP8BlockScaling(enable_2d_quantization=True), id="mxfp8 in squares"),
    rest(
        MixedScaling(input="mxfp8", weight="fp8_block", weight_for_dgrad="mxfp8", grad_output="mxfp8"),
        id="two quantizers",
    ),
    rest(MixedScaling(input="mxfp8", weight="fp8_block", weight_for_dgrad="high_precision"), id="one quantizer"),
]
EACH_RECIPE = pytest.mark.parametrize("recipe", RECIPES, ids=lambda recipe: recipe.name)
PATHS = ["grouped", "split"]
SIZES = [10, 0, 33]


class Transposed(ops.GroupedLinear):
    """Stores its weights as [G, K, N], as a subclass may."""

    def read(self, ctx, names):
        return ctx.param(names[0]).mT


class SinglesOnly(Quantizer):
    """As current scaling, for a user who only quantizes single tensors: the split path."""

    def quantize(self, x, *, rowwise=True, columnwise=False):
        return CurrentScalingQuantizer(E4M3).quantize(x, rowwise=rowwise, columnwise=columnwise)

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other)

    __hash__ = None  # type: ignore[assignment]


def singles_only(role: Role) -> Quantizer:
    return SinglesOnly()


def model(path: str | None = None, *, stacked: bool = True, device: str = "cpu", **settings: object) -> Sequential:
    torch.manual_seed(0)
    return Sequential(
        ops.Linear(24, 32, bias=False, device=device),
        ops.GroupedLinear(3, 32, 72, stacked=stacked, device=device, **settings),
        ops.SwiGLU(),
        ops.GroupedLinear(3, 36, 48, stacked=stacked, device=device, **settings),
        path=path,
    )


def rough(*shape: int, device: str = "cpu") -> Tensor:
    """Small beside large numbers: rounded along one axis they differ from those rounded along the other."""
    return (torch.randn(shape) * torch.randn(shape).mul(3).exp()).to(device)


def run(
    layers: Any, recipe: Recipe | str, x: Tensor, sizes: object = SIZES, module: nn.Module | None = None
) -> dict[str, Tensor]:
    """y, and the gradients of x and of all parameters, which are those of `module` if layers are a graph of it."""
    module = module or layers
    x = x.detach().requires_grad_()
    module.zero_grad()
    with autocast(recipe):
        y = layers(x, split_sizes=sizes)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).view_as(y))
    return {"y": y.detach(), "dx": x.grad} | {n: p.grad for n, p in module.named_parameters() if p.grad is not None}


def held(layers: nn.Module) -> list[QuantizedParameter]:
    return [p for p in layers.parameters() if isinstance(p, QuantizedParameter)]


@pytest.mark.pairwise
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "per group"])
@pytest.mark.parametrize("path", PATHS)
@EACH_RECIPE
def test_held_weights_have_the_bits_of_weights_quantized_in_the_step(
    recipe: Recipe, path: str, stacked: bool, device: str
) -> None:
    """In two steps with a change of the weights between, so that delayed scales move."""
    layers = model(path, stacked=stacked, device=device)
    quantized = fuser.to_quantized(copy.deepcopy(layers), recipe)
    assert len(held(quantized)) == (3 if stacked else 7)
    for factor in (0.5, 4.0, None):
        x = rough(45, 24, device=device)
        assert_same_bits(run(quantized, recipe, x), run(layers, recipe, x))
        if factor is not None:
            with torch.no_grad():
                for mine, theirs in zip(quantized.parameters(), layers.parameters(), strict=True):
                    mine.copy_(theirs.mul_(factor))


@pytest.mark.rest
@pytest.mark.parametrize("path", PATHS)
@EACH_RECIPE
@settings(max_examples=10, deadline=None)
@given(sizes=st.lists(st.one_of(st.just(0), st.integers(1, 40)), min_size=3, max_size=3), tail=st.sampled_from([0, 5]))
def test_for_any_splits(recipe: Recipe, path: str, sizes: list[int], tail: int) -> None:
    layers = model(path)
    quantized = fuser.to_quantized(copy.deepcopy(layers), recipe)
    x = rough(sum(sizes) + tail, 24)
    assert_same_bits(run(quantized, recipe, x, sizes), run(layers, recipe, x, sizes))


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "per group"])
def test_quantizers_of_single_tensors_can_hold_weights(stacked: bool) -> None:
    recipe = CustomRecipe(singles_only)
    layers = model(stacked=stacked)
    if stacked:
        with pytest.raises(NotImplementedError, match="SinglesOnly quantizes single tensors only"):
            fuser.to_quantized(layers, recipe)
        return
    quantized = fuser.to_quantized(copy.deepcopy(layers), recipe)
    x = rough(45, 24)
    assert_same_bits(run(quantized, recipe, x), run(layers, recipe, x))


@EACH_RECIPE
def test_layers_made_inside_hold_their_weights_so(recipe: Recipe) -> None:
    with fuser.quantized_model_init(recipe):
        inside = model()
    outside = model()
    assert held(inside) and not held(outside)
    x = rough(45, 24)
    assert_same_bits(run(inside, recipe, x), run(outside, recipe, x))
    with fuser.quantized_model_init(recipe, enabled=False):
        assert not held(model())


def test_layers_on_the_meta_device_hold_their_weights_once_they_have_values() -> None:
    with fuser.quantized_model_init("mxfp8"):
        layers = model(device="meta")
    assert not held(layers)
    layers.to_empty(device="cpu")
    for layer in (layers[0], layers[1], layers[3]):
        layer.reset_parameters()
    assert len(held(layers)) == 3
    layers[0].reset_parameters()
    assert len(held(layers)) == 3


def test_there_is_no_copy_in_high_precision() -> None:
    layers = model()
    weights = [weakref.ref(p) for p in layers.parameters()]
    numbers = sum(layer.weight.numel() for layer in (layers[0], layers[1], layers[3]))
    fuser.to_quantized(layers, Float8CurrentScaling())
    gc.collect()
    assert sum(w() is not None for w in weights) == 2, "the biases"
    assert numbers * 2 <= sum(p.nbytes_held for p in held(layers)) < numbers * 2.4  # transposed codes are padded
    rowwise = fuser.to_quantized(model(), Float8CurrentScaling(), columnwise=False)
    assert numbers <= sum(p.nbytes_held for p in held(rowwise)) < numbers * 1.1


def test_held_codes_of_groups_are_multiplied_where_they_lie() -> None:
    layer = fuser.to_quantized(ops.GroupedLinear(3, 32, 128, stacked=False), "fp8_block")
    first, *others = [layer.get_parameter(name).quantized for name in layer.weight_names]
    whole = first.stacked(others)
    for mine, theirs in zip(whole.tensors(), first.tensors(), strict=True):
        assert mine.data_ptr() == theirs.data_ptr()


def test_nothing_of_held_weights_is_saved_for_backward() -> None:
    layers = fuser.to_quantized(model(), "mxfp8")
    codes = {t.untyped_storage().data_ptr() for p in held(layers) for t in p.quantized.tensors() if t is not None}
    saved: list[Tensor] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t)
    with autocast("mxfp8"), hooks:
        layers(rough(45, 24).requires_grad_(), split_sizes=SIZES)
    assert saved and not codes & {t.untyped_storage().data_ptr() for t in saved}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_block"])
def test_under_another_recipe_they_are_dequantized(recipe: str) -> None:
    layers = fuser.to_quantized(model(), "mxfp8")
    plain = model()
    plain.load_state_dict(fuser.dequantized_state_dict(layers.state_dict()))
    x = rough(45, 24)
    assert_same_bits(run(layers, recipe, x), run(plain, recipe, x))
    assert "weights held quantized but dequantized (" in layers.explain(recipe=recipe)
    assert "weights held quantized" in layers.explain(recipe="mxfp8")
    assert "but dequantized" not in layers.explain(recipe="mxfp8")
    assert "not repeated: Its weights are held quantized." in layers.explain(recipe="mxfp8", device="cuda")


def test_without_the_columnwise_copy_there_is_no_dgrad() -> None:
    layers = fuser.to_quantized(model(), "fp8_current", columnwise=False)
    x = rough(45, 24)
    with torch.no_grad(), autocast("fp8_current"):
        y = layers(x, split_sizes=SIZES)
    with autocast("fp8_current"):
        assert torch.equal(y, model()(x, split_sizes=SIZES))
        with pytest.raises(RuntimeError, match=r"they are held rowwise alone. Hold both copies \(columnwise=True\)"):
            layers(x.requires_grad_(), split_sizes=SIZES)


@EACH_RECIPE
def test_copies_compute_the_same_and_are_apart(recipe: Recipe) -> None:
    layers = fuser.to_quantized(model(), recipe, preserve_high_precision_init_val=True)
    other = copy.deepcopy(layers)
    assert len(held(other)) == 3 and all(p.requires_grad and p.is_leaf for p in held(other))
    assert torch.equal(held(other)[0].get_high_precision_init_val(), model()[0].weight)
    x = rough(45, 24)
    before = run(layers, recipe, x)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(2)
    if not isinstance(recipe, DelayedScaling):  # whose first step has moved its scales
        assert_same_bits(run(layers, recipe, x), before)
    assert not torch.equal(run(other, recipe, x)["y"], before["y"])


@pytest.mark.pairwise
@EACH_RECIPE
@pytest.mark.parametrize("stacked", [(True, True), (True, False), (False, True)], ids=str)
def test_a_quantized_state_dict_is_loaded_bit_for_bit(recipe: Recipe, stacked: tuple[bool, bool], tmp_path) -> None:
    layers = fuser.to_quantized(model(stacked=stacked[0]), recipe)
    run(layers, recipe, rough(45, 24))
    torch.save(layers.state_dict(), tmp_path / "state")
    torch.manual_seed(7)
    other = fuser.to_quantized(model(stacked=stacked[1]).apply(reset), recipe)
    other.load_state_dict(torch.load(tmp_path / "state", weights_only=False))
    x = rough(45, 24)
    mine, theirs = run(other, recipe, x), run(layers, recipe, x)
    assert_same_bits({name: mine[name] for name in ("y", "dx")}, {name: theirs[name] for name in ("y", "dx")})


def reset(module: nn.Module) -> None:
    if hasattr(module, "reset_parameters"):
        module.reset_parameters()


@EACH_RECIPE
def test_a_checkpoint_in_high_precision_is_quantized_as_it_is_loaded(recipe: Recipe) -> None:
    plain = model().apply(reset)
    layers = fuser.to_quantized(model(), recipe)
    layers.load_state_dict(plain.state_dict())
    assert len(held(layers)) == 3
    x = rough(45, 24)
    assert_same_bits(run(layers, recipe, x), run(plain, recipe, x))


def test_the_values_before_are_kept_on_the_host_until_they_are_cleared() -> None:
    layers = fuser.to_quantized(model(), "mxfp8", preserve_high_precision_init_val=True)
    weight = layers[1].weight
    assert torch.equal(weight.get_high_precision_init_val(), model()[1].weight)
    assert not torch.equal(weight.get_high_precision_init_val(), weight.dequantize())
    weight.clear_high_precision_init_val()
    assert weight.get_high_precision_init_val() is None
    assert fuser.to_quantized(model(), "mxfp8")[1].weight.get_high_precision_init_val() is None


@EACH_RECIPE
def test_frozen_weights_get_no_gradient(recipe: Recipe) -> None:
    layers, plain = fuser.to_quantized(model().requires_grad_(False), recipe), model().requires_grad_(False)
    layers[1].bias.requires_grad_(True), plain[1].bias.requires_grad_(True)
    x = rough(45, 24)
    found = run(layers, recipe, x)
    assert set(found) == {"y", "dx", "1.bias"}
    assert_same_bits(found, run(plain, recipe, x))


@pytest.mark.pairwise
@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "per group"])
@EACH_RECIPE
def test_weight_gradients_are_added_to_main_grad(recipe: Recipe, stacked: bool, delayed: bool) -> None:
    settings = {"accumulate_into_main_grad": True, "delay_wgrad_compute": delayed}
    results = []
    for to in (lambda layers: layers, lambda layers: fuser.to_quantized(layers, recipe)):
        layers = to(model(stacked=stacked, **settings))
        names = [(n, p) for n, p in layers.named_parameters() if "weight" in n and not n.startswith("0")]
        for _, parameter in names:
            parameter.main_grad = torch.ones(parameter.shape)
        torch.manual_seed(1)
        found = run(layers, recipe, rough(45, 24))
        if delayed:
            layers.backward_dw()
        results.append(found | {name: parameter.main_grad for name, parameter in names})
    assert_same_bits(*results)


@EACH_RECIPE
def test_in_constant_weights_they_compute_the_same(recipe: Recipe) -> None:
    layers = fuser.to_quantized(model(), recipe)
    x = rough(45, 24)
    other = copy.deepcopy(layers)
    expected = run(other, recipe, x)
    with fuser.constant_weights(layers):
        assert_same_bits(run(layers, recipe, x), expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["fp8_delayed", rest("fp8_block"), rest("nvfp4")])
def test_replays_of_graphs_read_the_codes_that_were_written_between_them(recipe: str, device: str) -> None:
    layers = fuser.to_quantized(model(device=device), recipe)
    eager = copy.deepcopy(layers)
    sample = torch.randn(45, 24, device=device, requires_grad=True)
    sizes = torch.tensor(SIZES, device=device)
    call = fuser.make_graphed_callables(layers, (sample,), sample_kwargs={"split_sizes": sizes}, recipe=recipe)
    for step in range(3):
        x = rough(45, 24, device=device)
        found = []
        for runs, module in ((call, layers), (eager, eager)):
            torch.manual_seed(step)
            y_and_gradients = run(runs, recipe, x, sizes, module)
            found.append({name: tensor.clone() for name, tensor in y_and_gradients.items()})
        assert_same_bits(*found)
        with torch.no_grad():
            for mine, theirs in zip(layers.parameters(), eager.parameters(), strict=True):
                changed = (torch.randn(theirs.shape) / 4).to(device)
                mine.copy_(changed)
                theirs.copy_(changed)


def test_a_flag_that_keeps_weights_keeps_no_codes_of_before() -> None:
    layers, flag = fuser.to_quantized(model(), "mxfp8"), torch.ones(1)
    x = rough(45, 24)
    with torch.no_grad(), autocast("mxfp8", keep_weights=flag):
        before = layers(x, split_sizes=SIZES)
        layers[1].weight.mul_(2)
        assert not torch.equal(layers(x, split_sizes=SIZES), before)


def test_a_change_between_forward_and_backward_is_found() -> None:
    layers = fuser.to_quantized(model(), "mxfp8")
    for change in (lambda w: w.mul_(2), lambda w: w.data.mul_(2), lambda w: w.detach().zero_()):
        with autocast("mxfp8"):
            y = layers(rough(45, 24).requires_grad_(), split_sizes=SIZES)
        with torch.no_grad():
            change(layers[1].weight)
        with pytest.raises(RuntimeError, match="'weight' was changed in place"):
            y.sum().backward()


def test_moves_keep_the_codes_and_the_parameter_and_another_dtype_dequantizes() -> None:
    layers = fuser.to_quantized(model(), "mxfp8")
    weight, values = layers[1].weight, layers[1].weight.dequantize()
    layers.to("cpu")
    assert layers[1].weight is weight and torch.equal(weight.dequantize(), values)
    layers.to("meta")
    moved = layers[1].weight
    assert isinstance(moved, QuantizedParameter) and moved.is_meta and moved.quantized.rowwise.codes.is_meta
    layers = fuser.to_quantized(model(), "mxfp8").bfloat16()
    assert type(layers[1].weight) is nn.Parameter and layers[1].weight.dtype == torch.bfloat16
    assert torch.equal(layers[1].weight, values.bfloat16())


@pytest.mark.parametrize("move", ["meta", torch.bfloat16])
def test_what_others_have_set_on_a_weight_stays_on_it_in_a_move(move: Any) -> None:
    with fuser.quantized_model_init("fp8_delayed", preserve_high_precision_init_val=True):
        layers = model(stacked=False)
    initial, buffer = [weight.get_high_precision_init_val() for weight in held(layers)], torch.zeros(1)
    for weight in held(layers):
        vars(weight).update(sequence_parallel=True, main_grad=buffer)
    names = [name for name, parameter in layers.named_parameters() if isinstance(parameter, QuantizedParameter)]
    layers.to(move)
    for name in names:
        moved = layers.get_parameter(name)
        assert moved.sequence_parallel is True and moved.main_grad is buffer  # type: ignore[attr-defined]
        assert move == "meta" or not vars(moved).keys() & {"quantized", "quantizer", "_source"}
    assert all(weight.get_high_precision_init_val() is it for weight, it in zip(held(layers), initial, strict=False))


def test_a_weight_is_not_made_by_its_class_as_offload_of_accelerate_has_it() -> None:
    with fuser.quantized_model_init("mxfp8"):
        weight = ops.Linear(64, 32).weight
    with pytest.raises(TypeError, match=r"not made of a tensor by its class.*dequantized_state_dict"):
        type(weight)(torch.empty(32, 64), requires_grad=weight.requires_grad)


LOST = {
    "an expert": lambda w, v: w[0].copy_(v[0]),
    "an index": lambda w, v: w.__setitem__(0, v[0]),
    "of .data": lambda w, v: w.data.__setitem__((slice(None), 1), v[:, 1]),
    "a view of a view": lambda w, v: w.transpose(1, 2).detach()[0].zero_(),
    "flat": lambda w, v: w.view(-1).copy_(v.view(-1)),
    "parts": lambda w, v: torch._foreach_mul_(w.unbind(), 2.0),
    "out": lambda w, v: torch.add(v[0], v[0], out=w[0]),
    "diagonal": lambda w, v: w.fill_diagonal_(9.0),
    "chunks": lambda w, v: w.chunk(2)[0].copy_(v[:16]),
    "the front of a part": lambda w, v: w.split(16)[1][:8].fill_(1.0),
    "parts, at once": lambda w, v: torch._foreach_mul_(w.chunk(2), 2.0),
    "data": lambda w, v: setattr(w, "data", v),
    "a vector": lambda w, v: nn.utils.vector_to_parameters(v.view(-1), [w]),
}


@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_current"])
@pytest.mark.parametrize("change", LOST.values(), ids=LOST)
def test_a_change_that_no_codes_would_hold_is_refused(change: Any, recipe: str) -> None:
    weight = fuser.to_quantized(ops.GroupedLinear(32, 32, 32), recipe).weight
    before = weight.dequantize()
    with torch.no_grad(), pytest.raises(RuntimeError, match=r"by `with torch.no_grad\(\): weight.copy_\(values\)`"):
        change(weight, torch.ones(weight.shape))
    assert torch.equal(weight.dequantize(), before)


WRITTEN = {
    "whole": lambda w, v: w.__setitem__(slice(None), v),
    "a mask": lambda w, v: w.__setitem__(w == w, 1.0),
    "a list": lambda w, v: w.__setitem__([0, 1], v),
    "out": lambda w, v: torch.mul(v, v, out=w),
    "foreach": lambda w, v: torch._foreach_copy_([w], [v]),
    "in place, of .data": lambda w, v: setattr(w, "data", w.data.fill_(1)),
}


@pytest.mark.parametrize("change", WRITTEN.values(), ids=WRITTEN)
def test_a_change_of_the_whole_is_quantized(change: Any) -> None:
    weight = fuser.to_quantized(ops.GroupedLinear(2, 32, 32), "mxfp8").weight
    with torch.no_grad():
        change(weight, torch.ones(weight.shape))
    assert torch.equal(weight.dequantize(), torch.ones(weight.shape))


READ = {
    "product": lambda w, x: nn.functional.linear(x, w[0]) @ w.mT[1],
    "parts": lambda w, x: torch.cat([2 * part.flatten() for part in w.chunk(2)]),
    "copied into": lambda w, x: x.new_empty(32, 32).copy_(w[0]),
    "an operation": lambda w, x: functional_call(ops.Linear(32, 32, bias=False), {"weight": w[0]}, (x,)),
    "numbers": lambda w, x: torch.tensor(w.detach()[0].tolist()) + torch.from_numpy(w.detach()[0].numpy()),
    "a copy": lambda w, x: copy.deepcopy(w.detach()[0]).mul_(2),
    "saved": lambda w, x: pickle.loads(pickle.dumps(w.detach()[0])).mul_(2),
}


@pytest.mark.parametrize("function", READ.values(), ids=READ)
def test_a_view_is_read_as_that_of_an_ordinary_tensor(function: Any) -> None:
    weight = fuser.to_quantized(ops.GroupedLinear(2, 32, 32), "mxfp8").weight
    plain = weight.dequantize().detach().requires_grad_()
    x = torch.randn(4, 32)
    mine, theirs = function(weight, x), function(plain, x)
    assert type(mine) is type(theirs) and torch.equal(mine, theirs)
    if theirs.requires_grad:
        assert torch.equal(*(torch.autograd.grad(y.square().sum(), w)[0] for y, w in ((mine, weight), (theirs, plain))))


def test_the_codes_of_another_may_be_its_data() -> None:
    layer, other = (fuser.to_quantized(ops.Linear(32, 32), recipe) for recipe in ("mxfp8", "fp8_block"))
    weight = layer.weight
    weight.data = other.weight.data
    assert layer.weight is weight and weight.quantizer == other.weight.quantizer and weight.requires_grad
    assert torch.equal(weight.dequantize(), other.weight.dequantize())


def tied(*layers: nn.Module, names: tuple[str, str] = ("weight", "weight")) -> nn.ModuleList:
    """The layers, of which the last one's parameter is that of the first one, too."""
    setattr(layers[-1], names[1], getattr(layers[0], names[0]))
    return nn.ModuleList(layers)


def test_tied_weights_stay_one() -> None:
    layers = tied(ops.Linear(32, 32), nn.Embedding(8, 32), ops.Linear(32, 32))
    before = layers[0].weight.detach()
    fuser.to_quantized(layers, "mxfp8")
    assert layers[0].weight is layers[2].weight and len(held(layers)) == 1
    masters = fuser.MasterWeights(layers.parameters())
    optimizer = masters.attach(torch.optim.SGD(masters.parameters(), lr=0.1))
    layers[2](layers[0](torch.randn(4, 32))).square().sum().backward()
    optimizer.step()
    assert not torch.equal(layers[2].weight.dequantize(), before)
    fuser.to_quantized(layers, "fp8_block")
    assert layers[0].weight is layers[2].weight and len(held(layers)) == 1
    layers.to("meta")
    assert layers[0].weight is layers[2].weight and len(held(layers)) == 1
    layers.bfloat16()
    assert layers[0].weight is layers[2].weight and not held(layers)


def with_recipe(layer: ops.Linear, recipe: str) -> ops.Linear:
    layer.set_recipe(recipe)
    return layer


CANNOT_BE_HELD = [
    (
        lambda: tied(ops.Linear(8, 16), nn.Embedding(16, 8)),
        "mxfp8",
        r"1.weight \(Embedding\) is held in high precision",
    ),
    (lambda: tied(ops.Linear(8, 8), ops.Linear(8, 8)), "fp8_delayed", "0.weight and 1.weight .* its own scales"),
    (lambda: tied(ops.Linear(8, 8), with_recipe(ops.Linear(8, 8), "nvfp4")), "mxfp8", "quantize it differently"),
    (
        lambda: tied(ops.GroupedLinear(2, 8, 8, stacked=False), names=("weight0", "weight1")),
        "mxfp8",
        "0.weight0 holds the weights of its groups in one memory",
    ),
    (
        lambda: nn.ModuleList((ops.Linear(8, 8), nn.utils.parametrizations.weight_norm(ops.Linear(8, 8)))),
        "mxfp8",
        "'weight' of ParametrizedLinear is computed from other parameters",
    ),
]


@pytest.mark.parametrize(("make", "recipe", "match"), CANNOT_BE_HELD)
def test_what_cannot_hold_the_same_codes_is_refused(make: Any, recipe: str, match: str) -> None:
    layers = make()
    with pytest.raises(ValueError, match=match):
        fuser.to_quantized(layers, recipe)
    assert not held(layers)


def test_codes_and_scales_are_moved_into_shared_memory() -> None:
    layers = fuser.to_quantized(model(stacked=False), "mxfp8")
    weight, before = layers[1].weight0, layers[1].weight0.dequantize()
    assert not weight.is_shared()
    assert layers.share_memory()[1].weight0 is weight
    assert weight.is_shared() and all(tensor.is_shared() for tensor in weight.quantized.tensors())
    assert torch.equal(weight.dequantize(), before)


def test_apply_computes_on_values_and_rounds() -> None:
    layers = fuser.to_quantized(model(), "mxfp8")
    weight = layers[1].weight
    assert weight.data.apply_(lambda value: 0.5) is not None
    assert torch.equal(weight.dequantize(), torch.full(weight.shape, 0.5))
    weight.apply_(lambda value: 2 * value)
    assert weight.requires_grad and torch.equal(weight.dequantize(), torch.ones(weight.shape))
    with pytest.raises(RuntimeError, match="cannot be changed in place"):
        fuser.quantize(torch.randn(32, 32), "mxfp8").apply_(lambda value: 1.0)


def test_no_library_shares_memory_that_is_not_there() -> None:
    weight = fuser.to_quantized(model(), "mxfp8")[1].weight.detach()
    for share in (torch.from_dlpack, np.from_dlpack):
        for quantized in (weight, fuser.quantize(torch.randn(32, 32), "mxfp8")):
            with pytest.raises(BufferError, match=r"no values in memory to share by DLPack. Share those of dequantize"):
                share(quantized)
    assert torch.equal(torch.from_dlpack(weight.dequantize()), weight.dequantize())


def test_a_held_weight_is_no_cycle() -> None:
    """An operation goes with its last user, also where the weight finds its scales on it."""
    layer = fuser.to_quantized(ops.Linear(16, 16), DelayedScaling())
    gc.disable()
    try:
        ref = weakref.ref(layer)
        del layer
        assert ref() is None
    finally:
        gc.enable()


def test_what_cannot_be_held_is_refused_before_anything_is_changed() -> None:
    with pytest.raises(ValueError, match="Sequential, which has no Linear or GroupedLinear"):
        fuser.to_quantized(Sequential(ops.GELU()), "mxfp8")
    with pytest.raises(ValueError, match="leaves weights in high precision"):
        fuser.to_quantized(model(), "bf16")
    with pytest.raises(ValueError, match="leaves weights in high precision"), fuser.quantized_model_init("bf16"):
        raise AssertionError("never inside")
    layers = Sequential(ops.Linear(8, 16), Transposed(2, 16, 16))
    with pytest.raises(ValueError, match="Transposed stores its weights in another layout"):
        fuser.to_quantized(layers, "mxfp8")
    assert not held(layers)


@pytest.mark.parametrize("trained", [False, True], ids=["fresh", "trained"])
def test_values_are_quantized_with_the_delayed_scale_that_is_loaded_with_them(trained: bool) -> None:
    def model(std: float, steps: int) -> Sequential:
        layer = ops.Linear(64, 64, bias=False)
        nn.init.normal_(layer.weight, 0, std)
        held = fuser.to_quantized(Sequential(layer), "fp8_delayed")
        for _ in range(steps):
            with autocast("fp8_delayed"):
                held(torch.randn(8, 64)).sum().backward()
        return held

    source, target = model(0.25, 2), model(0.006, 2 if trained else 0)
    values = copy.deepcopy(fuser.dequantized_state_dict(source.state_dict()))
    target.load_state_dict(values)
    loaded: Any = target[0].weight
    torch.testing.assert_close(loaded.dequantize(), values["0.weight"], rtol=2**-4, atol=2**-9 / 400)
    once = loaded.dequantize().clone()
    target.load_state_dict(values)
    assert torch.equal(target[0].weight.dequantize(), once)
    assert torch.equal(target[0].quantizer_weight_scale, source[0].quantizer_weight_scale)


@pytest.mark.parametrize("move", ["cpu", "float", "bfloat16", "share_memory", "meta"])
def test_adapters_over_held_weights_move_with_them(move: str) -> None:
    model = fuser.to_quantized(Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32)), "mxfp8")
    lora.add(model, rank=4)
    names = [name for name, _ in model.named_parameters()]
    moved = model.to("meta") if move == "meta" else getattr(model, move)()
    assert moved is model and [name for name, _ in model.named_parameters()] == names
    assert isinstance(model[0].weight, QuantizedParameter) == (move not in ("bfloat16",))


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "nvfp4"])
def test_an_average_of_an_ordinary_copy_follows_a_quantized_model(recipe: str) -> None:
    torch.manual_seed(0)
    model = Sequential(ops.Linear(32, 32))
    averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))  # which copies it
    fuser.to_quantized(model, recipe)
    averaged.update_parameters(model)
    with torch.no_grad():
        model[0].weight.copy_(model[0].weight.dequantize() + 0.05 * torch.randn(32, 32))
    for _ in range(150):
        averaged.update_parameters(model)
    assert type(averaged.module[0].weight) is nn.Parameter
    torch.testing.assert_close(averaged.module[0].weight.detach(), model[0].weight.dequantize(), atol=1e-6, rtol=0)
