"""A backward that is asked for some gradients alone: those are right, and nothing else happens.

`torch.autograd.grad(y, x)` and `backward(inputs=[...])` do not reach the nodes of other parameters, so nothing is added
to their main_grad, no flag is set, no hook is called, and nothing is left to `backward_dw()`.
"""

import itertools

import pytest
import torch

from fuser import Sequential, autocast, ops
from recipes import NVFP4BlockScaling

SIZES = [5, 0, 8]
RECIPES = ["bf16", "mxfp8", "fp8_delayed", NVFP4BlockScaling(disable_stochastic_rounding=True)]


def experts(**switches):
    return Sequential(
        ops.GroupedLinear(3, 32, 64, scale_bias=False, **switches), ops.ScaledSwiGLU(),
        ops.GroupedLinear(3, 32, 32, scale_bias=True, **switches),
    )  # fmt: skip


def dense(**switches):
    return Sequential(
        ops.RMSNorm(32), ops.Linear(32, 64, **switches), ops.SwiGLU(), ops.LayerNorm(32),
        ops.Linear(32, 32, bias=False, **switches), ops.Bias(32), ops.Linear(32, 16, **switches),
    )  # fmt: skip


MODELS = {"experts": experts, "dense": dense}


def prepared(kind, fusions, **switches):
    torch.manual_seed(0)
    model = MODELS[kind](**switches)
    if fusions == "unfused":
        model = Sequential(*model, fusions=())
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
        if switches.get("accumulate_into_main_grad") and parameter.dim() > 1:
            parameter.main_grad = torch.full_like(parameter, 7, dtype=torch.float32)
            parameter.grad_added_to_main_grad = False
    return model


def forward(model, recipe="bf16"):
    torch.manual_seed(1)
    x = torch.randn(16, 32, requires_grad=True)
    scales = torch.rand(16, requires_grad=True)
    extras = {"split_sizes": SIZES, "scales": scales} if model.layout().consumed else {}
    with autocast(recipe):
        y = model(x, **extras)
    return x, scales, y.square().sum()


@pytest.mark.parametrize("fusions", ["fused", "unfused"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_each_gradient_alone_has_its_bits(kind, fusions, recipe):
    """Each by itself, and each with dx: what it is computed from is there."""
    names = ["x", *([] if kind == "dense" else ["scales"]), *dict(prepared(kind, fusions).named_parameters())]

    def of(chosen):
        model = prepared(kind, fusions)
        x, scales, loss = forward(model, recipe)
        tensors = {"x": x, "scales": scales} | dict(model.named_parameters())
        return dict(zip(chosen, torch.autograd.grad(loss, [tensors[name] for name in chosen]), strict=True))

    expected = of(names)
    for chosen in [[name] for name in names] + [["x", name] for name in names[1:]]:
        for name, gradient in of(chosen).items():
            assert torch.equal(gradient, expected[name]), (chosen, name)


BIAS = {3: "2.bias", 7: "1.bias"}  # by the model's length
ASK = {
    "grad of x": lambda x, loss, model: torch.autograd.grad(loss, x),
    "inputs=[x]": lambda x, loss, model: loss.backward(inputs=[x]),
    "grad of a bias": lambda x, loss, model: torch.autograd.grad(loss, model.get_parameter(BIAS[len(model)])),
}


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize(("kind", "fusions"), list(itertools.product(MODELS, ["fused", "unfused"])))
@pytest.mark.parametrize("ask", ASK)
def test_nothing_is_accumulated_for_weights_that_were_not_asked_for(ask, kind, fusions, delay):
    model = prepared(kind, fusions, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    weights = [p for p in model.parameters() if hasattr(p, "main_grad")]
    x, _, loss = forward(model)
    ASK[ask](x, loss, model)
    for weight in weights:
        assert (weight.main_grad == 7).all() and weight.grad_added_to_main_grad is False and weight.grad is None
    assert not model.need_backward_dw()


@pytest.mark.parametrize("kind", MODELS)
def test_a_delayed_gradient_is_that_of_the_backward_that_asked_for_it(kind):
    model, plain = prepared(kind, "fused", delay_wgrad_compute=True), prepared(kind, "fused")
    x, _, loss = forward(model)
    torch.autograd.grad(3 * loss, x)
    _, _, loss = forward(model)
    loss.backward()
    model.backward_dw()
    assert not model.need_backward_dw()
    forward(plain)[2].backward()
    for found, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(found.grad, expected.grad)


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("delay", [False, True])
def test_one_weight_of_two_that_is_asked_for_is_accumulated(stacked, delay):
    switches = {"accumulate_into_main_grad": True, "delay_wgrad_compute": delay, "stacked": stacked}
    model, plain = prepared("experts", "fused", **switches), prepared("experts", "fused", stacked=stacked)
    chosen = "0.weight" if stacked else "0.weight2"
    x, _, loss = forward(model)
    weight = dict(model.named_parameters())[chosen]
    loss.backward(inputs=[x, weight])
    if delay:
        model.backward_dw()
    forward(plain)[2].backward()
    torch.testing.assert_close(weight.main_grad - 7, dict(plain.named_parameters())[chosen].grad, rtol=1e-4, atol=1e-4)
    for name, other in model.named_parameters():
        if hasattr(other, "main_grad"):
            assert other.grad_added_to_main_grad is (name == chosen)
            assert name == chosen or (other.main_grad == 7).all()


def test_a_weight_that_was_computed_is_reached_by_its_own_inputs():
    """Of a weight with a history the node counts, not a leaf."""
    op = ops.Linear(8, 8, bias=False)
    source = torch.randn(8, 8, requires_grad=True)
    x = torch.randn(4, 8, requires_grad=True)
    del op._parameters["weight"]
    op._parameters["weight"] = 2 * source
    (only_x,) = torch.autograd.grad(op(x).sum(), x)
    (found,) = torch.autograd.grad(op(x).sum(), source)
    assert torch.equal(found, 2 * x.detach().sum(0).expand(8, 8)) and only_x.shape == x.shape
