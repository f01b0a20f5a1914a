"""What a nested Sequential keeps and what it exports; names that are made twice; several MoE layers in one."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import fuser
from fuser import Sequential, autocast, ops

T, H, F, E = 24, 32, 32, 4
LOSS = "load_balancing_loss"


def block(**settings: Any) -> Sequential:
    return Sequential(
        ops.MakeExtraOutput("residual"),
        ops.RMSNorm(H),
        ops.Router(H, E, topk=2),
        ops.Dispatch(E),
        ops.GroupedLinear(E, H, 2 * F, bias=False),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(E, F, H, bias=False),
        ops.Combine(),
        ops.AddExtraInput("residual"),
        **settings,
    )


def two() -> list[Sequential]:
    torch.manual_seed(0)
    return [block(), block()]


FORMS = {
    "flat": lambda a, b: Sequential(*a, *b),
    "nested": lambda a, b: Sequential(a, b),
    "nested twice": lambda a, b: Sequential(Sequential(a), Sequential(nn.Identity(), b)),
    "one nested": lambda a, b: Sequential(a, *b),
    "modules between": lambda a, b: Sequential(*a, nn.Identity(), *b),
    "settings": lambda a, b: Sequential(
        *(Sequential(*each, path="grouped") for each in (a, b))
    ),
    "wrapped": lambda a, b: Sequential(checkpoint_wrapper(a), checkpoint_wrapper(b)),
}  # fmt: skip


ORDINARY = ("flat", "nested", "wrapped")


def results(module: Any, layers: list[Sequential], recipe: str) -> dict[str, Tensor | None]:
    torch.manual_seed(1)
    x = torch.randn(T, H, requires_grad=True)
    for layer in layers:
        layer.zero_grad()
    with autocast(recipe):
        y = module(x)
    y.square().sum().backward()
    gradients = {f"{at}.{n}": p.grad for at, layer in enumerate(layers) for n, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad} | {n: None if g is None else g.clone() for n, g in gradients.items()}


@pytest.mark.parametrize("recipe", ["bf16", pytest.param("mxfp8", marks=pytest.mark.rest)])
@pytest.mark.parametrize("form", [pytest.param(f, marks=[] if f in ORDINARY else [pytest.mark.rest]) for f in FORMS])
def test_two_layers_are_those_two_one_after_the_other(form: str, recipe: str) -> None:
    layers = two()
    expected = results(lambda x: layers[1](layers[0](x)), layers, recipe)
    both = FORMS[form](*layers)
    found = results(both, layers, recipe)
    assert found.keys() == expected.keys() and all(value is not None for value in expected.values())
    for name, value in expected.items():
        assert torch.equal(found[name], value), name  # type: ignore[arg-type]
    assert both.explain().count("GroupedMLP = ") in (2, 4) or form == "wrapped"


def test_every_depth_of_layers_works() -> None:
    torch.manual_seed(0)
    layers = [block() for _ in range(5)]
    x = torch.randn(T, H)
    expected = x
    for layer in layers:
        expected = layer(expected)
    assert torch.equal(Sequential(*(each for layer in layers for each in layer))(x), expected)
    assert torch.equal(Sequential(layers[0], Sequential(*layers[1:4]), *layers[4])(x), expected)


# Exports


def losing(name: str) -> Sequential:
    layer = block()
    layer[2].rename_extras(**{LOSS: name})
    layer.exports = (name,)
    return layer


@pytest.mark.parametrize("wrap", [lambda layer: layer, checkpoint_wrapper], ids=["plain", "checkpoint_wrapper"])
def test_exported_outputs_reach_the_caller_with_their_gradients(wrap: Any) -> None:
    torch.manual_seed(0)
    layers = [losing("loss_a"), losing("loss_b")]
    both = Sequential(*map(wrap, layers))
    x = torch.randn(T, H)
    y, made = both(x, outputs=("loss_b", "loss_a"))
    (y.sum() + made["loss_a"] + 2 * made["loss_b"]).backward()
    found = [p.grad.clone() for p in both.parameters()]
    both.zero_grad()
    first, a = layers[0](x, outputs=("loss_a",))
    second, b = layers[1](first, outputs=("loss_b",))
    (second.sum() + a["loss_a"] + 2 * b["loss_b"]).backward()
    assert torch.equal(y, second) and torch.equal(made["loss_a"], a["loss_a"])
    assert all(map(torch.equal, found, [p.grad for p in both.parameters()]))


def test_what_a_sequential_keeps_is_named_in_the_error() -> None:
    layer = Sequential(block(), ops.Identity())
    keeps = (
        r"Module 0 \(Sequential\) makes 'load_balancing_loss', but keeps it: give that one exports=\('load_balancing"
    )
    with pytest.raises(ValueError, match=rf"No operation makes the extra output '{LOSS}'. There are: none. {keeps}"):
        layer(torch.randn(T, H), outputs=(LOSS,))
    layer[0].exports = (LOSS,)
    _, made = layer(torch.randn(T, H), outputs=(LOSS,))
    assert made[LOSS].shape == ()
    with pytest.raises(
        ValueError, match=rf"No operation makes the extra output 'probs'. There are: '{LOSS}'. Module 0"
    ):
        layer(torch.randn(T, H), outputs=("probs",))


@pytest.mark.parametrize("settings", [{}, {"path": "grouped"}], ids=["flattened", "called"])
def test_what_is_asked_of_a_sequential_that_keeps_it_is_named(settings: dict[str, Any]) -> None:
    inner = Sequential(ops.MakeExtraOutput("r"), ops.Identity(), **settings)
    layer, x = Sequential(inner, ops.AddExtraInput("r")), torch.randn(2, H)
    with pytest.raises(
        ValueError, match=r"missing: 'r'.* Module 0 \(Sequential\) makes 'r', but keeps it: give that one"
    ):
        layer(x)
    own = torch.randn(2, H)
    assert torch.equal(layer(x, r=own), x + own)  # the caller's, not the one inside
    inner.exports = ("r",)
    assert torch.equal(layer(x), 2 * x)


def test_inputs_pass_into_nested_sequentials_by_name() -> None:
    torch.manual_seed(0)
    experts = Sequential(ops.GroupedLinear(E, H, 2 * F), ops.ScaledSwiGLU(), ops.GroupedLinear(E, F, H))
    sizes, scales, x = [6] * E, torch.rand(T), torch.randn(T, H)
    expected = experts(x, split_sizes=sizes, scales=scales)
    layer = Sequential(ops.Identity(), Sequential(experts))
    assert layer.layout().consumed == ("split_sizes", "scales") and len(layer.layout().stages) == 1
    assert torch.equal(layer(x, split_sizes=sizes, scales=scales), expected)


def test_a_sequential_is_flattened_unless_it_keeps_a_name_that_is_used_outside() -> None:
    inner = Sequential(ops.MakeExtraOutput("r"), ops.GELU(), ops.AddExtraInput("r"))
    assert len(Sequential(ops.Identity(), inner, ops.Identity()).layout().stages) == 1
    layer = Sequential(ops.MakeExtraOutput("r"), inner, ops.AddExtraInput("r"))
    assert (
        "1  Sequential, called by itself because it keeps names that are used outside of it too: 'r'" in layer.explain()
    )
    x = torch.randn(2, H)
    torch.testing.assert_close(layer(x), nn.functional.gelu(x, approximate="tanh") + 2 * x)
    inner.exports = ("r",)  # then its own is what the last operation adds, which is x too
    assert len(layer.layout().stages) == 2 and torch.equal(layer(x), inner(x) + x)


def test_a_name_stands_for_what_the_nearest_operation_before_makes() -> None:
    layer = Sequential(
        ops.MakeExtraOutput("r"), ops.ConstantScale(3.0), ops.AddExtraInput("r"), ops.MakeExtraOutput("r"),
        ops.ConstantScale(2.0), ops.AddExtraInput("r"),
    )  # fmt: skip
    x = torch.randn(2, H, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    torch.testing.assert_close(y, 12 * x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 12))


def test_exports_that_nothing_makes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"exports names 'lost', but no operation makes it. There are: 'r'\."):
        Sequential(ops.MakeExtraOutput("r"), exports=("lost",))
    with pytest.raises(TypeError, match="exports is 'loss', but must be names of extra tensors. Pass a tuple"):
        Sequential(ops.Identity(), exports="loss")


def test_slices_and_sums_keep_the_exports_that_they_make() -> None:
    layer = Sequential(ops.MakeExtraOutput("r"), ops.Identity(), ops.MakeExtraOutput("s"), exports=("r", "s"))
    assert layer[:2].exports == ("r",) and layer[1:2].exports == () and (layer + [ops.Identity()]).exports == ("r", "s")
    assert copy.deepcopy(layer).exports == ("r", "s")


@pytest.mark.rest
@pytest.mark.parametrize("form", ["flat", "nested"])
def test_two_layers_are_traced_whole(form: str) -> None:
    both, x = FORMS[form](*two()), torch.randn(T, H)
    assert torch.equal(torch.compile(both, fullgraph=True, backend="aot_eager")(x), both(x))


@pytest.mark.parametrize("form", ["flat", "nested"])
def test_two_layers_are_computed_again(form: str) -> None:
    layers = two()
    both = FORMS[form](*layers)
    found = results(lambda x: fuser.checkpoint(both, x), layers, "mxfp8")
    expected = results(both, layers, "mxfp8")
    assert all(torch.equal(found[name], value) for name, value in expected.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("form", ["hook", "wrapped"])
def test_a_nested_sequential_that_is_called_exports_the_last_of_two_tensors_too(form: str) -> None:
    inner = Sequential(
        ops.MakeExtraOutput("r"), ops.GELU(), ops.MakeExtraOutput("r"), ops.SiLU(), exports=("r",)
    )  # fmt: skip
    x = torch.randn(3, 4)
    flattened = Sequential(inner, ops.AddExtraInput("r"))(x)
    h = nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(flattened, nn.functional.silu(h) + h)
    if form == "hook":
        inner.register_forward_hook(lambda *_: None)
    outer = Sequential(checkpoint_wrapper(inner) if form == "wrapped" else inner, ops.AddExtraInput("r"))
    assert len(outer.layout().stages) == 2, "it is called by itself"
    assert torch.equal(outer(x), flattened)
