"""Plain torch inside of a Sequential: ops.Torch, modules that declare extra tensors, wrappers of operations."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from fuser import Sequential, autocast, ops
from tests.reference import assert_close, assert_same_bits

E, H = 4, 8


class Scaled(nn.Module):
    """A module of the user's: y = weight scales x, and the largest scale."""

    extra_inputs = ("scales",)
    extra_outputs = ("largest",)

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.full((H,), 2.0))

    def forward(self, x, scales, outputs=()):
        y = self.weight * scales[:, None] * x
        return (y, {"largest": scales.max()}) if outputs else y


class Around(nn.Module):
    """In the shape of peft's adapters: it holds the layer as `base_layer`, and adds a product."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = nn.Linear(base_layer.in_features, 2, bias=False)
        self.lora_B = nn.Linear(2, base_layer.out_features, bias=False)

    def get_base_layer(self):
        return self.base_layer

    def forward(self, x, *args, **kwargs):
        return self.base_layer(x, *args, **kwargs) + self.lora_B(self.lora_A(x))


def linears():
    torch.manual_seed(0)
    return ops.Linear(H, H), ops.Linear(H, H)


def moe():
    """A mixture-of-experts layer."""
    torch.manual_seed(0)
    return Sequential(
        ops.Router(H, E, topk=2), ops.Dispatch(E), ops.GroupedLinear(E, H, 2 * H, bias=False), ops.ScaledSwiGLU(),
        ops.GroupedLinear(E, H, H, bias=False), ops.Combine(),
    )  # fmt: skip


def step(model, *, outputs=(), **extras):
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model.zero_grad()
    result = model(x, outputs=outputs, **extras)
    y, made = result if outputs else (result, {})
    loss = y.square().sum() + sum(tensor.sum() for tensor in made.values())
    loss.backward()
    found = {"y": y.detach(), "dx": x.grad} | {name: tensor.detach() for name, tensor in made.items()}
    found |= {name: p.grad for name, p in model.named_parameters()}
    return found | {f"d{name}": t.grad for name, t in extras.items() if isinstance(t, torch.Tensor) and t.requires_grad}


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_function_between_operations_is_differentiated_by_autograd(recipe):
    first, second = linears()
    with autocast(recipe):
        found = step(Sequential(first, ops.Torch(torch.erf), second))
        x = torch.randn(6, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
        for parameter in (*first.parameters(), *second.parameters()):
            parameter.grad = None
        y = second(torch.erf(first(x)))
        y.square().sum().backward()
    expected = {"y": y.detach(), "dx": x.grad, "0.weight": first.weight.grad, "0.bias": first.bias.grad}
    expected |= {"2.weight": second.weight.grad, "2.bias": second.bias.grad}
    assert_same_bits(found, expected)


def by_hand(model, scales):
    first, own, last = model
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    model.zero_grad()
    scales = scales.detach().requires_grad_()
    weight = own.weight if isinstance(own, Scaled) else torch.full((H,), 2.0)
    hidden = weight * scales[:, None] * F.linear(x, first.weight, first.bias)
    y = F.linear(hidden, last.weight, last.bias)
    (y.square().sum() + scales.max()).backward()
    found = {"y": y.detach(), "dx": x.grad, "largest": scales.max().detach()}
    return found | {name: p.grad for name, p in model.named_parameters()} | {"dscales": scales.grad}


@pytest.mark.parametrize("kind", ["function", "module"])
def test_extra_tensors_go_in_and_out_with_their_gradients(kind):
    function = ops.Torch(
        lambda x, scales: (2.0 * scales[:, None] * x, scales.max()),
        extra_inputs=("scales",), extra_outputs=("largest",),
    )  # fmt: skip
    first, second = linears()
    model = Sequential(first, function if kind == "function" else Scaled(), second)
    scales = torch.rand(6, requires_grad=True)
    found = step(model, scales=scales, outputs=("largest",))
    assert_close(found, by_hand(model, scales))
    assert "largest" not in step(model, scales=torch.rand(6))


def test_extra_outputs_feed_operations_and_modules_behind_it():
    first, second = linears()
    model = Sequential(
        first, ops.Torch(lambda x: (x, x.mean(-1)), extra_outputs=("scales",)), Scaled(), second,
        ops.AddExtraInput("residual"),
    )  # fmt: skip
    y, made = model(torch.randn(6, H), residual=torch.zeros(6, H), outputs=("largest", "scales"))
    assert y.shape == (6, H) and torch.equal(made["largest"], made["scales"].max())


def test_split_sizes_of_a_dispatch_arrive_as_a_tensor():
    seen = []

    def note(x, split_sizes):
        seen.append(split_sizes)
        return x

    layer = moe()
    expected = step(layer)
    layer.insert(2, ops.Torch(note, extra_inputs=("split_sizes",)))
    found = step(layer)
    assert isinstance(seen[0], torch.Tensor) and seen[0].sum() == 12
    assert_same_bits({name: found[name] for name in ("y", "dx")}, {name: expected[name] for name in ("y", "dx")})


def test_names_of_extra_tensors_are_changed():
    own = ops.Torch(lambda x, scales: x * scales[:, None], extra_inputs=("scales",))
    model = Sequential(*linears(), own)
    with pytest.raises(ValueError, match=r"missing: 'scales'"):
        model(torch.ones(6, H))
    own.rename_extras(scales="gates")
    assert model(torch.ones(6, H), gates=torch.zeros(6)).eq(0).all()


def test_a_module_that_is_given_has_its_parameters_in_the_model():
    model = Sequential(ops.Torch(nn.LayerNorm(H)))
    assert sorted(model.state_dict()) == ["0.function.bias", "0.function.weight"]
    found = step(copy.deepcopy(model))
    x = torch.randn(6, H, generator=torch.Generator().manual_seed(1)).requires_grad_()
    y = F.layer_norm(x, (H,))
    y.square().sum().backward()
    assert_close({name: found[name] for name in ("y", "dx")}, {"y": y, "dx": x.grad}, {torch.float32: 1e-4})
    assert "0  Torch, called by itself because autograd differentiates it" in model.explain()


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("at", [0, 1, 2, 5])
def test_a_checkpoint_wrapper_takes_and_makes_what_its_operation_does(at, recipe):
    layer, wrapped = moe(), moe()
    wrapped[at] = checkpoint_wrapper(wrapped[at])
    with autocast(recipe):
        expected = step(layer, outputs=("load_balancing_loss",))
        found = step(wrapped, outputs=("load_balancing_loss",))
        assert_same_bits(
            {name.replace("_checkpoint_wrapped_module.", ""): tensor for name, tensor in found.items()}, expected
        )


def test_two_wrapped_layers_keep_what_they_make_to_themselves():
    first, second = moe(), moe()
    model = Sequential(checkpoint_wrapper(first), ops.SiLU(), checkpoint_wrapper(second))
    plain = nn.Sequential(first, nn.SiLU(), second)
    x = torch.randn(6, H)
    assert_close({"y": model(x)}, {"y": plain(x)})
    with pytest.raises(ValueError, match="No operation makes the extra output 'load_balancing_loss'"):
        model(x, outputs=("load_balancing_loss",))


def test_a_wrapped_sequential_takes_what_its_operations_take():
    torch.manual_seed(0)
    experts = Sequential(ops.GroupedLinear(2, H, 2 * H), ops.SwiGLU(), ops.GroupedLinear(2, H, H))
    model = Sequential(ops.Linear(H, H), checkpoint_wrapper(experts))
    x = torch.randn(6, H)
    assert torch.equal(model(x, split_sizes=[2, 4]), experts(model[0](x), split_sizes=[2, 4]))
    experts[0].rename_extras(split_sizes="first")
    assert torch.equal(
        model(x, first=[2, 4], split_sizes=[2, 4]), experts(model[0](x), first=[2, 4], split_sizes=[2, 4])
    )


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_an_adapter_around_a_grouped_linear_takes_its_split_sizes(recipe):
    torch.manual_seed(0)
    layer = ops.GroupedLinear(2, H, H)
    model = Sequential(ops.Linear(H, H), Around(layer), ops.SiLU())
    layer.rename_extras(split_sizes="sizes")
    x = torch.randn(6, H)
    with autocast(recipe):
        hidden = model[0](x)
        expected = F.silu(layer(hidden, sizes=[2, 4]) + model[1].lora_B(model[1].lora_A(hidden)))
        assert_close({"y": model(x, sizes=[2, 4])}, {"y": expected})


class Wrapper(nn.Module):
    """Holds what it calls as checkpoint_wrapper, torch.compile and FSDP1 do."""

    def __init__(self, name, inner):
        super().__init__()
        self.add_module(name, inner)

    def forward(self, *args, **kwargs):
        return next(self.children())(*args, **kwargs)


@pytest.mark.parametrize("name", ["_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module"])
def test_wrappers_take_what_they_wrap_takes_through_each_other(name):
    layer, scaled = ops.GroupedLinear(2, H, H), Scaled()
    model = Sequential(ops.Linear(H, H), Wrapper(name, Wrapper("_orig_mod", layer)), Wrapper(name, scaled))
    x, scales = torch.randn(6, H), torch.rand(6)
    y, made = model(x, split_sizes=[2, 4], scales=scales, outputs=("largest",))
    assert torch.equal(y, scaled(layer(model[0](x), split_sizes=[2, 4]), scales))
    assert torch.equal(made["largest"], scales.max())


class Own(nn.Module):
    """Holds an operation by a name of peft's, but calls it with sizes of its own."""

    def __init__(self):
        super().__init__()
        self.base_layer = ops.GroupedLinear(2, H, H)

    def forward(self, x):
        return self.base_layer(x, split_sizes=[len(x), 0])


def test_what_only_looks_like_a_wrapper_is_called_as_it_is():
    model = Sequential(Own(), Sequential({"base_layer": ops.Linear(H, H), "last": Own()}, path="split"))
    x = torch.randn(6, H)
    first, (linear, last) = model
    assert torch.equal(model(x), last(linear(first(x))))


class Silent(nn.Module):
    extra_outputs = ("loss",)

    def forward(self, x, outputs=()):
        return x


class Other(Silent):
    def forward(self, x, outputs=()):
        return x, {"losses": x.sum()}


@pytest.mark.parametrize(
    ("make", "kind", "match"),
    [
        (lambda: ops.Torch(3), TypeError, "function is 3, which cannot be called. Give a function or a module"),
        (lambda: ops.Torch(torch.erf, extra_inputs="scales"), TypeError, "extra_inputs is 'scales', but must be names"),
        (lambda: ops.Torch(torch.erf, extra_outputs=("a", "a")), ValueError, r"extra_outputs is \('a', 'a'\), which"),
        (lambda: Sequential(ops.Torch(lambda x: (x, x)))(torch.ones(2, 2)), TypeError, r"\(Tensor, Tensor\).*\(y\)"),
        (
            lambda: ops.Torch(lambda x: 1)(torch.ones(2, 2)),
            TypeError,
            r"returned \(int\), but tensors \(y\) are needed",
        ),
        (
            lambda: ops.Torch(torch.erf, extra_outputs=("norm",))(torch.ones(2, 2)),
            TypeError,
            r"returned \(Tensor\), but tensors \(y, norm\)",
        ),
        (
            lambda: Sequential(Silent())(torch.ones(2, 2), outputs=("loss",)),
            TypeError,
            r"Silent was called with outputs=\('loss'\), and returned a Tensor\. It declares extra_outputs, so",
        ),
        (
            lambda: Sequential(Other())(torch.ones(2, 2), outputs=("loss",)),
            TypeError,
            r"returned the extra outputs 'losses'",
        ),
        (
            lambda: Sequential(Silent(), Silent())(torch.ones(2, 2), outputs=("loss",)),
            ValueError,
            "2 operations make the extra output 'loss'",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make, kind, match):
    with pytest.raises(kind, match=match):
        make()


def test_a_module_that_declares_a_single_text_is_refused():
    module = Scaled()
    module.extra_inputs = "scales"
    with pytest.raises(TypeError, match=r"Scaled\.extra_inputs is 'scales', but must be names of extra tensors"):
        Sequential(module)
