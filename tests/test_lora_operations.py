"""Operations with adapters: against plain torch in float64, and frozen weights that are quantized once."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fuser
from fuser import Sequential, autocast, constant_weights, lora, ops
from recipes import DelayedScaling
from tests.lora_cases import adapted, data, gradients, mlp, step, with_values
from tests.reference import ROUNDED_OFTEN, assert_close, assert_same_bits

DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
RECIPES = pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "mxfp8", "fp8_block", "nvfp4"])
PRODUCTS = [getattr(torch.ops.aten, name).default for name in ("mm", "addmm", "bmm", "_grouped_mm")]
FEW_RECIPES = pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])


# Against plain torch


def grouped_reference(operation, x, sizes, scales=None):
    """In float64, group by group, differentiable in x and the adapters."""
    weights = [operation.get_parameter(name).detach().double() for name in operation.weight_names]
    weights = weights[0] if operation.stacked else weights
    biases = [operation.get_parameter(name).detach().double() for name in operation.bias_names]
    a, b = (factor.weight.detach().double().requires_grad_() for factor in (operation.lora_A, operation.lora_B))
    wide = x.detach().double().requires_grad_()
    parts, begin = [], 0
    for group, size in enumerate(sizes):
        rows = wide[begin : begin + size]
        y = rows @ weights[group].T + operation.factor * (rows @ a[group].T) @ b[group].T
        if biases:
            bias = biases[0][group] if operation.stacked else biases[group]
            y = y + (bias if scales is None else scales[begin : begin + size, None] * bias)
        parts.append(y)
        begin += size
    y = torch.cat([*parts, torch.zeros(len(x) - begin, operation.out_features, device=x.device).double()])
    return y, {"x": wide, "a": a, "b": b}


@DEVICES
@pytest.mark.parametrize("path", ["grouped", "split"])
@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize(
    ("sizes", "rows", "rank", "dtype"),
    [
        pytest.param([5, 7, 4], 16, 4, torch.float32, id="ordinary"),
        pytest.param([5, 0, 3], 16, 3, torch.float32, id="an empty group, rows of no group, an odd rank"),
        pytest.param([0, 0, 0], 5, 1, torch.float32, id="no group has rows"),
        pytest.param([0, 0, 0], 0, 16, torch.float32, id="no rows"),
        pytest.param([5, 0, 3], 9, 16, torch.float64, id="float64"),
        pytest.param([5, 0, 3], 9, 8, torch.bfloat16, id="bfloat16"),
    ],
)
def test_grouped_adapters_are_those_of_plain_torch(sizes, rows, rank, dtype, stacked, path, device):
    if device == "cuda" and dtype == torch.float64 and path == "grouped":
        pytest.skip("There is no grouped kernel in float64 on a GPU.")
    torch.manual_seed(0)
    model = Sequential(ops.GroupedLinear(3, 32, 24, stacked=stacked, device=device, dtype=dtype), path=path)
    nn.init.normal_(model[0].get_parameter(model[0].bias_names[0]))
    lora.add(model, rank, alpha=5)
    operation = with_values(model)[0]
    x = data(rows, device=device, dtype=dtype)
    expected, leaves = grouped_reference(operation, x, sizes)
    y = model(x, split_sizes=torch.tensor(sizes, device=device))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(3)).to(y)
    y.backward(dy)
    expected.backward(dy.double())
    a, b = operation.lora_A.weight, operation.lora_B.weight
    assert a.dtype == torch.promote_types(dtype, torch.float32) and all(
        operation.get_parameter(name).grad is None for name in (*operation.weight_names, *operation.bias_names)
    )
    assert_close(
        {"y": y, "dx": x.grad, "dA": a.grad, "dB": b.grad},
        {"y": expected, "dx": leaves["x"].grad, "dA": leaves["a"].grad, "dB": leaves["b"].grad},
        ROUNDED_OFTEN,
        computed_in=dtype,
    )
    assert not y[sum(sizes) :].any() and not x.grad[sum(sizes) :].any()
    for group, size in enumerate(sizes):
        assert size or not (a.grad[group].any() or b.grad[group].any())


@DEVICES
@pytest.mark.parametrize("as_one_group", [False, True])
def test_an_adapter_of_a_linear_is_that_of_plain_torch(as_one_group, device):
    torch.manual_seed(0)
    model = Sequential(ops.Linear(32, 24, as_one_group=as_one_group, device=device))
    lora.add(model, 3, alpha=5)
    operation = with_values(model)[0]
    x = torch.randn(2, 7, 32, device=device, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    a, b = (factor.weight.detach().double().requires_grad_() for factor in (operation.lora_A, operation.lora_B))
    w, bias = operation.weight.detach().double(), operation.bias.detach().double()
    expected = wide @ w.T + bias + 5 / 3 * wide @ a.T @ b.T
    y = model(x)
    y.square().sum().backward()
    expected.square().sum().backward()
    assert_close(
        {"y": y, "dx": x.grad, "dA": operation.lora_A.weight.grad, "dB": operation.lora_B.weight.grad},
        {"y": expected, "dx": wide.grad, "dA": a.grad, "dB": b.grad},
        ROUNDED_OFTEN,
    )


def test_a_scaled_bias_is_scaled_and_the_adapter_is_not():
    torch.manual_seed(0)
    model = Sequential(ops.GroupedLinear(3, 32, 24, scale_bias=True))
    nn.init.normal_(model[0].bias)
    lora.add(model, 2)
    with_values(model)
    x, scales = data(), torch.rand(16)
    expected, _ = grouped_reference(model[0], x, [5, 0, 9], scales)
    assert_close({"y": model(x, split_sizes=[5, 0, 9], scales=scales)}, {"y": expected})


@pytest.mark.parametrize("wanted", ["x", "A", "B"])
def test_each_gradient_alone_is_that_of_all(wanted):
    model = adapted()
    every = step(model)
    model.requires_grad_(False)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(f"lora_{wanted}." in name)
    x = data().requires_grad_(wanted == "x")
    alone = step(model, x)
    alone = {name: gradient for name, gradient in alone.items() if gradient is not None}
    assert len(alone) == (2 if wanted == "x" else 4)
    assert_same_bits(alone, {name: every[name] for name in alone})


def test_weights_that_are_trained_too_have_their_gradients():
    model, plain = adapted(), mlp()
    model.requires_grad_(True)
    with torch.no_grad():
        model[2].lora_B.weight.zero_()
        model[3].lora_B.weight.zero_()
        model[0].lora_B.weight.zero_()
    found, expected = step(model), step(plain)
    assert_close({name: found[name] for name in expected}, expected)


# Under recipes


@RECIPES
@pytest.mark.parametrize("path", ["grouped", "split"])
def test_the_recipe_is_that_of_the_base_alone(recipe, path):
    """y and dx are those of the plain operation under the recipe, and the adapter's products in high precision."""
    torch.manual_seed(0)
    plain = Sequential(ops.GroupedLinear(3, 32, 64), path=path).requires_grad_(False)
    model = copy.deepcopy(plain)
    lora.add(model, 4, alpha=6)
    a, b = (factor.weight for factor in (with_values(model)[0].lora_A, model[0].lora_B))
    sizes, x, x_plain = [5, 0, 9], data(), data()
    dy = torch.randn(16, 64)
    with autocast(recipe):
        torch.manual_seed(1)  # nvfp4 rounds gradients stochastically
        y = model(x, split_sizes=sizes)
        y.backward(dy)
        torch.manual_seed(1)
        base = plain(x_plain, split_sizes=sizes)
        base.backward(dy)
    groups = torch.repeat_interleave(torch.arange(3), torch.tensor(sizes))
    delta, d_delta = torch.zeros(16, 64), torch.zeros(16, 32)
    for row, group in enumerate(groups):
        delta[row] = 1.5 * b[group] @ (a[group] @ x[row])
        d_delta[row] = 1.5 * (dy[row] @ b[group]) @ a[group]
    assert_close({"y": y, "dx": x.grad}, {"y": base + delta, "dx": x_plain.grad + d_delta})
    if recipe != "bf16":
        exact = x.detach()[0] @ plain[0].weight[0].T + plain[0].bias[0]
        assert not torch.allclose(base[0], exact, rtol=1e-4, atol=1e-4)  # it quantizes


def silently(model, factor=-2.0):
    """Changes every base weight in a way that nobody can see."""
    for operation in (model[0], model[2], model[3]):
        operation.weight.data.mul_(factor)


@FEW_RECIPES
@pytest.mark.parametrize("path", ["grouped", "split"])
def test_frozen_weights_are_quantized_once_over_steps_of_the_optimizer(recipe, path):
    model = adapted(path=path)
    fresh = adapted(path=path)
    optimizer, other = (
        torch.optim.SGD([p for p in m.parameters() if p.requires_grad], lr=0.01) for m in (model, fresh)
    )
    for _ in range(2):
        for operation in (fresh[0], fresh[2], fresh[3]):
            operation.forget_quantized_weights()
        with autocast(recipe):
            assert_same_bits(step(model), step(fresh))
        optimizer.step()
        other.step()
    with torch.no_grad(), autocast(recipe):
        before = model(data(), split_sizes=[5, 0, 9])
        silently(model)
        assert torch.equal(model(data(), split_sizes=[5, 0, 9]), before)


ENDS = {
    "load_state_dict": lambda model: model.load_state_dict(model.state_dict()),
    "merge and unmerge": lambda model: (lora.merge(model), lora.unmerge(model)),
    "a write that torch counts": lambda model: [
        p.mul_(1.0) for n, p in model.named_parameters() if n.endswith("weight")
    ],
    "weights that are trained": lambda model: [p.requires_grad_(True) for p in model.parameters()],
    "a copy of the model": copy.deepcopy,
}


@pytest.mark.parametrize("end", ENDS.values(), ids=ENDS)
def test_what_ends_the_copies_of_frozen_weights(end):
    model = adapted()
    with torch.no_grad(), autocast("mxfp8"):
        before = model(data(), split_sizes=[5, 0, 9])
        silently(model)
        assert torch.equal(model(data(), split_sizes=[5, 0, 9]), before)
        model = end(model) if end is copy.deepcopy else (end(model), model)[1]
        assert not torch.allclose(model(data(), split_sizes=[5, 0, 9]), before)


def test_a_weight_frozen_with_a_gradient_keeps_no_copies_until_it_is_cleared():
    """A fused optimizer steps it once more, and torch does not count that."""
    model = adapted()
    model.requires_grad_(True)
    with autocast("mxfp8"):
        step(model)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("lora_" in name)
        before = model(data(), split_sizes=[5, 0, 9])
        silently(model)
        after = model(data(), split_sizes=[5, 0, 9])
        assert not torch.allclose(after, before)
        model.zero_grad()
        kept = model(data(), split_sizes=[5, 0, 9])
        silently(model)
        assert torch.equal(kept, after) and torch.equal(model(data(), split_sizes=[5, 0, 9]), kept)
        for layer in (model[0], model[2], model[3]):
            layer.accumulate_into_main_grad = True
            layer.weight.main_grad = torch.zeros_like(layer.weight)
        assert not torch.allclose(model(data(), split_sizes=[5, 0, 9]), kept)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_weights_that_were_trained_for_a_while_are_quantized_anew(recipe):
    """By an optimizer whose writes torch does not count, under any recipe."""
    model = adapted()
    with autocast("mxfp8"):
        before = model(data(), split_sizes=[5, 0, 9])
    model.requires_grad_(True)
    with autocast(recipe):
        step(model)
    silently(model)
    model.requires_grad_(False)
    with autocast("mxfp8"):
        assert not torch.allclose(model(data(), split_sizes=[5, 0, 9]), before)


@pytest.mark.parametrize("settings", [{"fused": True}, {"foreach": True}], ids=str)
def test_weights_that_were_stepped_between_two_forwards_are_quantized_anew(settings):
    """Their gradient came from elsewhere; no forward ran while they were trained."""
    model, x = adapted(), data()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5, **settings)
    with torch.no_grad(), autocast("mxfp8"):
        before = model(x, split_sizes=[5, 0, 9])
        silently(model)
        optimizer.step()  # of weights without a gradient it changes none
        assert torch.equal(model(x, split_sizes=[5, 0, 9]), before)
        silently(model, -0.5)
    weight = model[2].weight.requires_grad_(True)
    weight.square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    weight.requires_grad_(False)
    with torch.no_grad(), autocast("mxfp8"):
        after = model(x, split_sizes=[5, 0, 9])
        assert torch.equal(after, copy.deepcopy(model)(x, split_sizes=[5, 0, 9])) and not torch.equal(after, before)


def test_under_delayed_scaling_scales_of_frozen_weights_move_on():
    """A scale of the first cast would stay: that of an amax which nobody has seen."""
    model = adapted()
    with torch.no_grad(), autocast(DelayedScaling(amax_history_len=2)):
        before = model(data(), split_sizes=[5, 0, 9])
        silently(model)
        assert not torch.allclose(model(data(), split_sizes=[5, 0, 9]), before)


def test_copies_of_frozen_weights_do_not_keep_an_operation_alive():
    model = adapted()
    step(model)
    with autocast("mxfp8"):
        model(data(), split_sizes=[5, 0, 9])
    assert model[3].weights_scope.nbytes > 0
    operation = weakref.ref(model[3])
    gc.disable()
    try:
        lora.unload(model)
        model.layout()
        assert operation() is None
    finally:
        gc.enable()


def test_a_scope_of_constant_weights_around_it_ends_as_ever():
    model = adapted()
    with torch.no_grad(), autocast("mxfp8"):
        with constant_weights(model):
            before = model(data(), split_sizes=[5, 0, 9])
        assert torch.equal(model(data(), split_sizes=[5, 0, 9]), before)


def test_dropout_is_the_adapters_alone_and_linear_backwards():
    """y is linear in x and in A for one mask, so <dx, x> and <dA, A> are the loss, and what the adapter adds to it."""
    model = Sequential(ops.GroupedLinear(2, 32, 24, bias=False, dtype=torch.float64))
    plain = copy.deepcopy(model)
    lora.add(model, 4, dropout=0.4)
    a, b = (factor.weight for factor in (with_values(model)[0].lora_A, model[0].lora_B))
    x, c = data(12, dtype=torch.float64), torch.randn(12, 24, dtype=torch.float64)
    torch.manual_seed(0)
    loss = (model(x, split_sizes=[5, 7]) * c).sum()
    loss.backward()
    added = loss - (plain(x, split_sizes=[5, 7]) * c).sum()
    for gradient, value, expected in ((x.grad, x, loss), (a.grad, a, added), (b.grad, b, added)):
        torch.testing.assert_close((gradient * value).sum(), expected)
    model.eval()
    without = (model(x, split_sizes=[5, 7]) * c).sum()
    assert not torch.isclose(without, loss)
    torch.manual_seed(0)
    assert torch.equal(model.train()(x, split_sizes=[5, 7]).mul(c).sum(), loss)


def test_a_quantized_input_is_the_adapters_too():
    plain = Sequential(ops.Quantize(), mlp()[3])
    model = copy.deepcopy(plain)
    lora.add(model, 4)
    a, b = (factor.weight for factor in (with_values(model)[1].lora_A, model[1].lora_B))
    x = data()
    with autocast("mxfp8"):
        quantized, base, y = ops.Quantize()(x), plain(x), model(x)
        y.sum().backward()
    assert not torch.equal(quantized, x)
    assert_close(
        {"y": y, "dB": b.grad}, {"y": base + quantized @ a.T @ b.T, "dB": (quantized @ a.T).sum(0).expand(16, 4)}
    )


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("kind", ["fuser", "torch", "selective"])
def test_checkpoints_have_the_same_bits(kind, recipe):
    model = mlp()
    lora.add(model, 4, dropout=0.3)
    with_values(model)
    settings = {"context_fn": partial(create_selective_checkpoint_contexts, PRODUCTS)} if kind == "selective" else {}

    def run(x, **extras):
        with autocast(recipe):
            if kind == "fuser":
                return fuser.checkpoint(model, x, **extras)
            return checkpoint(lambda t: inside(t, extras), x, use_reentrant=False, **settings)

    def inside(x, extras):
        with autocast(recipe):
            return model(x, **extras)

    torch.manual_seed(5)
    expected = step(model, function=lambda x, **extras: inside(x, extras))
    torch.manual_seed(5)
    assert_same_bits(step(model, function=run), expected)


def test_a_graph_that_is_retained_has_its_gradients_twice():
    model = adapted()
    x = data()
    y = model(x, split_sizes=[5, 0, 9]).square().sum()
    first, second = (torch.autograd.grad(y, [x, model[0].lora_A.weight], retain_graph=True) for _ in range(2))
    assert all(torch.equal(*pair) for pair in zip(first, second, strict=True))


def test_gradients_of_adapters_are_autograds_where_those_of_weights_are_not():
    torch.manual_seed(0)
    settings = {"accumulate_into_main_grad": True, "delay_wgrad_compute": True}
    model = Sequential(ops.GroupedLinear(3, 32, 24, **settings), ops.Linear(24, 24, **settings))
    lora.add(model, 2)
    with_values(model)
    found = step(model)
    assert sum("lora_" in name for name in found) == 4 and all(gradient.any() for gradient in found.values())
    assert not model.need_backward_dw()


def test_the_callers_buffers_are_written_into():
    model = Sequential(adapted()[0])
    expected = step(model)
    output, grad_input = torch.empty(16, 64), torch.empty(16, 32)
    x = data()
    y = model(x, split_sizes=[5, 0, 9], buffers={0: {"output": output, "grad_input": grad_input}})
    assert y.data_ptr() == output.data_ptr()
    y.square().sum().backward()
    assert_same_bits({"y": output.detach(), "dx": grad_input}, {name: expected[name] for name in ("y", "dx")})


@DEVICES
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "mxfp8"])
def test_a_graph_replays_adapters_with_their_dropout(recipe, device):
    if device == "cuda":  # filling new memory is a kernel of its own, which graphs would repeat
        torch.utils.deterministic.fill_uninitialized_memory = False
    module = mlp().to(torch.bfloat16)
    lora.add(module, 4, dropout=0.3)
    module = with_values(module).to(device)
    eager = copy.deepcopy(module)
    sample = {"split_sizes": torch.tensor([5, 0, 9], device=device)}
    call = fuser.make_graphed_callables(
        module, (data(device=device, dtype=torch.bfloat16),), sample_kwargs=sample, recipe=recipe
    )

    def run(function, model, sizes):
        torch.manual_seed(3)
        model.zero_grad()
        x = data(device=device, dtype=torch.bfloat16)
        with autocast(recipe):
            y = function(x, split_sizes=torch.tensor(sizes, device=device))
        y.square().sum().backward()
        return {"y": y.detach().clone(), "dx": x.grad.clone()} | {
            name: gradient.clone() for name, gradient in gradients(model).items()
        }

    for sizes in ([5, 0, 9], [0, 16, 0], [3, 4, 5]):
        assert_same_bits(run(call, module, sizes), run(eager, eager, sizes))
