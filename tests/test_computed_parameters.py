"""Parameters that are no registered leaf: parametrized, pruned, swapped for a call, views of other parameters.

The reference is the same computation in modules of torch, under the same parametrization, in float64.
"""

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, jvp, vjp, vmap
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import spectral_norm as old_spectral_norm
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import Sequential, autocast, ops

F64 = torch.float64
SIZES = [3, 0, 5, 2]
G, K, N = len(SIZES), 16, 8


class Bias(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Grouped(nn.Module):
    """GroupedLinear by a loop over the groups."""

    def __init__(self, k: int, n: int, *, bias: bool, stacked: bool = True) -> None:
        super().__init__()
        self.stacked, self.has_bias = stacked, bias
        shapes = {"weight": (n, k), "bias": (n,)} if bias else {"weight": (n, k)}
        for name, shape in shapes.items():
            for suffix in [""] if stacked else range(G):
                empty = torch.zeros(G, *shape, dtype=F64) if stacked else torch.zeros(shape, dtype=F64)
                self.register_parameter(f"{name}{suffix}", nn.Parameter(empty))

    def all(self, name: str) -> Any:
        return getattr(self, name) if self.stacked else [getattr(self, f"{name}{group}") for group in range(G)]

    def forward(self, x: Tensor) -> Tensor:
        rows = [x_g @ w.t() for x_g, w in zip(x.split(SIZES), self.all("weight"), strict=True)]
        if self.has_bias:
            rows = [row + b for row, b in zip(rows, self.all("bias"), strict=True)]
        return torch.cat(rows)


class SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, -1)
        return nn.functional.silu(gate) * linear


Pair = tuple[Sequential, nn.Sequential, dict[str, Any]]


def dense(fusions: Any = None) -> Pair:
    ours = Sequential(
        ops.LayerNorm(K, dtype=F64), ops.Linear(K, N, dtype=F64), ops.GELU(), ops.Bias(N, dtype=F64),
        ops.Linear(N, K, bias=False, dtype=F64), ops.RMSNorm(K, dtype=F64), fusions=fusions,
    )  # fmt: skip
    theirs = nn.Sequential(
        nn.LayerNorm(K, dtype=F64), nn.Linear(K, N, dtype=F64), nn.GELU("tanh"), Bias(N),
        nn.Linear(N, K, bias=False, dtype=F64), nn.RMSNorm(K, 1e-5, dtype=F64),
    )  # fmt: skip
    return ours, theirs, {}


def grouped(fusions: Any = None, *, stacked: bool = True) -> Pair:
    make = partial(ops.GroupedLinear, G, stacked=stacked, dtype=F64)
    ours = Sequential(make(K, 2 * N), ops.ScaledSwiGLU(), make(N, K, bias=False), fusions=fusions)
    theirs = nn.Sequential(
        Grouped(K, 2 * N, bias=True, stacked=stacked), SwiGLU(), Grouped(N, K, bias=False, stacked=stacked)
    )
    return ours, theirs, {"split_sizes": SIZES, "scales": torch.ones(sum(SIZES), dtype=F64)}


MODELS: dict[str, Callable[[], Pair]] = {
    "dense": dense,
    "dense-unfused": lambda: dense(()),
    "grouped": grouped,
    "grouped-unfused": lambda: grouped(()),
    "single-weights": lambda: grouped(stacked=False),
}


def paired(model: str) -> Pair:
    torch.manual_seed(0)
    ours, theirs, extras = MODELS[model]()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, extras


def each_name(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(child, name) for child in module for name, p in list(child._parameters.items()) if p is not None]  # type: ignore[attr-defined]


class Moved(nn.Module):
    """weight + delta."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.linspace(-1, 1, weight.numel(), dtype=weight.dtype).view(weight.shape))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class Transposed(nn.Module):
    """A transposed view of what is stored."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.mT

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.mT.contiguous()


class Other(nn.Module):
    """The transposed weight of another module, and none of its own."""

    def __init__(self, tied: nn.Module) -> None:
        super().__init__()
        self.tied = [tied]

    def forward(self, weight: Tensor) -> Tensor:
        return self.tied[0].weight.mT


def moved(module: nn.Module) -> None:
    for child, name in each_name(module):
        parametrize.register_parametrization(child, name, Moved(getattr(child, name)))


def of_matrices(apply: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module], None]:
    def everywhere(module: nn.Module) -> None:
        for child, name in each_name(module):
            if getattr(child, name).dim() > 1:
                torch.manual_seed(1)
                apply(child, name)

    return everywhere


def transposed(child: nn.Module, name: str) -> None:
    if name.startswith("weight"):
        parametrize.register_parametrization(child, name, Transposed())


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], None]] = {
    "every-parameter-moved": moved,
    "weight-norm": of_matrices(parametrizations.weight_norm),
    "spectral-norm": of_matrices(parametrizations.spectral_norm),
    "transposed": of_matrices(transposed),
    "pruned": of_matrices(partial(prune.random_unstructured, amount=0.4)),
    "old-spectral-norm": of_matrices(old_spectral_norm),
}


def example() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(sum(SIZES), K, dtype=F64)


def gradients(module: nn.Module, x: Tensor, **extras: Any) -> dict[str, Tensor | None]:
    """y, and the gradients of x and of every parameter."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x, **extras)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)).sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("how", PARAMETRIZATIONS)
@pytest.mark.parametrize("model", MODELS)
def test_gradients_reach_what_a_weight_is_computed_from(model: str, how: str) -> None:
    ours, theirs, extras = paired(model)
    before = gradients(ours, example(), **extras)
    assert_close(before, gradients(theirs, example()))
    for module in (ours, theirs):
        PARAMETRIZATIONS[how](module)
    for _ in range(2):
        found, expected = gradients(ours, example(), **extras), gradients(theirs, example())
        assert_close(found, expected)
    assert all(gradient is not None for gradient in found.values()) and found.keys() != before.keys()
    keeps_values = how in ("transposed", "weight-norm")
    assert keeps_values or not torch.equal(found["y"], before["y"])  # type: ignore[arg-type]


@pytest.mark.parametrize("model", ["dense", "grouped", "single-weights"])
def test_parameters_are_as_before_once_they_are_no_longer_computed(model: str) -> None:
    ours, theirs, extras = paired(model)
    gradients(ours, example(), **extras)
    for module in (ours, theirs):
        first = next(child for child, name in each_name(module) if name.startswith("weight") and child is not module[0])
        name = next(iter(first._parameters))
        for remove in (parametrize.remove_parametrizations, prune.remove):
            if remove is prune.remove:
                prune.random_unstructured(first, name, amount=0.0)
            else:
                parametrize.register_parametrization(first, name, Moved(getattr(first, name)))
            module(example(), **(extras if module is ours else {}))
            remove(first, name)
    assert_close(gradients(ours, example(), **extras), gradients(theirs, example()))


def test_a_weight_may_be_a_view_of_the_weight_of_another_operation() -> None:
    ours, theirs, _ = paired("dense")
    for module in (ours, theirs):
        parametrize.register_parametrization(module[4], "weight", Other(module[1]), unsafe=True)
    found, expected = gradients(ours, example()), gradients(theirs, example())
    assert_close(found, expected)
    assert found["1.weight"] is not None and found["4.parametrizations.weight.original"] is None


def test_tied_weights_sum_their_gradients() -> None:
    ours = Sequential(ops.Linear(K, K, dtype=F64), ops.GELU(), ops.Linear(K, K, dtype=F64))
    theirs = nn.Sequential(nn.Linear(K, K, dtype=F64), nn.GELU("tanh"), nn.Linear(K, K, dtype=F64))
    theirs.load_state_dict(ours.state_dict())
    for module in (ours, theirs):
        module[2].weight = module[0].weight
    assert_close(gradients(ours, example()), gradients(theirs, example()))


# torch.func.functional_call


def called_with(module: nn.Module, kind: str, **extras: Any) -> dict[str, Tensor | None]:
    """The gradients of tensors that take the place of the parameters for one call."""
    torch.manual_seed(4)
    leaves = {name: torch.randn_like(p).requires_grad_() for name, p in module.named_parameters()}
    given = {
        "leaves": leaves,
        "computed": {name: leaf.sin() for name, leaf in leaves.items()},
        "parameters": {name: nn.Parameter(leaf.detach()) for name, leaf in leaves.items()},
    }[kind]
    y = functional_call(module, given, (example(),), extras)
    assert all(p.grad is None for p in module.parameters())
    y.square().sum().backward()
    assert all(p.grad is None for p in module.parameters())
    return {"y": y.detach()} | {name: (given if kind == "parameters" else leaves)[name].grad for name in given}


@pytest.mark.parametrize("kind", ["leaves", "computed", "parameters"])
@pytest.mark.parametrize("model", MODELS)
def test_tensors_given_for_one_call_get_the_gradients(model: str, kind: str) -> None:
    ours, theirs, extras = paired(model)
    assert_close(called_with(ours, kind, **extras), called_with(theirs, kind))


def test_two_calls_before_one_backward_have_their_own_weights() -> None:
    ours, theirs, _ = paired("dense")

    def both(module: nn.Module) -> dict[str, Any]:
        weights = [{n: (k + p.detach()).requires_grad_() for n, p in module.named_parameters()} for k in (1, 2)]
        sum(functional_call(module, each, (example(),)).square().sum() for each in weights).backward()
        return {f"{k}.{n}": w.grad for k, each in enumerate(weights) for n, w in each.items()}

    assert_close(both(ours), both(theirs))


def test_an_operation_alone_takes_other_weights() -> None:
    ours, theirs = ops.Linear(K, N, dtype=F64), nn.Linear(K, N, dtype=F64)
    assert_close(called_with(ours, "computed"), called_with(theirs, "computed"))


def test_a_computed_weight_changed_before_backward_is_an_error() -> None:
    operation = ops.Linear(K, N, dtype=F64)
    weight = operation.weight.detach() * 2
    x = example().requires_grad_()
    y = functional_call(operation, {"weight": weight}, (x,))
    weight.zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


# torch.func.grad and vjp


@pytest.mark.parametrize("model", MODELS)
def test_torch_func_grad_is_that_of_torch(model: str) -> None:
    ours, theirs, extras = paired(model)

    def of(module: nn.Module, **extras: Any) -> dict[str, Tensor]:
        def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
            return functional_call(module, parameters, (x,), extras).square().sum()

        parameters = {name: p.detach() for name, p in module.named_parameters()}
        d_parameters, dx = grad(loss, (0, 1))(parameters, example())
        y, pull = vjp(lambda p: functional_call(module, p, (example(),), extras), parameters)
        return {"x": dx, "y": y} | d_parameters | {f"vjp.{n}": g for n, g in pull(torch.ones_like(y))[0].items()}

    assert_close(of(ours, **extras), of(theirs))


def test_torch_func_grad_has_the_bits_of_backward_under_a_recipe() -> None:
    model = Sequential(ops.RMSNorm(32), ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    x = torch.randn(32, 32)
    with autocast("mxfp8"):
        found = grad(lambda p: functional_call(model, p, (x,)).square().sum())(dict(model.named_parameters()))
        model(x).square().sum().backward()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.grad)  # type: ignore[arg-type]


def jvp_along(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Any]:
    return lambda x: jvp(function, (x,), (x,))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # what torch.func.jvp imports
def test_derivatives_that_would_be_wrong_are_refused() -> None:
    model, x = Sequential(ops.Linear(K, K, dtype=F64), ops.GELU()), example()

    def loss(x: Tensor) -> Tensor:
        return model(x).square().sum()

    with pytest.raises(
        RuntimeError, match=r"Double backward \(create_graph=True\) through a pipeline is not supported"
    ):
        grad(lambda x: grad(loss)(x).sum())(x)
    of_parameters = grad(lambda p: functional_call(model, p, (x,)).square().sum())(dict(model.named_parameters()))
    with pytest.raises(RuntimeError, match="Double backward"):
        of_parameters["0.weight"].sum().backward()
    sentence = (
        "have no rules for torch.func.vmap and jvp.*Give a batch as rows of x, and differentiate by torch.func.grad"
    )
    for transformed in (vmap(loss), vmap(grad(loss)), torch.func.jacrev(model), jvp_along(loss)):
        with pytest.raises(NotImplementedError, match=sentence):
            transformed(x[:, None])
    main_grad = ops.Linear(K, K, accumulate_into_main_grad=True, dtype=F64)
    with pytest.raises(NotImplementedError, match="weight gradients go to main_grad, or are delayed"):
        grad(lambda x: main_grad(x).sum())(x)


# Where weight gradients do not go to autograd


@pytest.mark.parametrize("switch", ["accumulate_into_main_grad", "delay_wgrad_compute"])
@pytest.mark.parametrize("kind", ["linear", "grouped"])
def test_external_gradients_of_computed_weights_are_refused_in_forward(kind: str, switch: str) -> None:
    make: Any = {"linear": ops.Linear, "grouped": partial(ops.GroupedLinear, G)}[kind]
    model = Sequential(make(K, K, **{switch: True}), make(K, K, **{switch: True}))
    last = model[1].weight.main_grad = torch.full_like(model[1].weight, 0.5)
    parametrize.register_parametrization(model[0], "weight", Moved(model[0].weight))
    extras = {"split_sizes": SIZES} if kind == "grouped" else {}
    message = (
        r"In operation 0 .*Weight 'weight' was computed from other tensors \(AddBackward0\), so it has no gradient "
    )
    with pytest.raises(RuntimeError, match=message + "buffer of its own. Give the parameter itself"):
        model(example().float(), **extras)
    assert (last == 0.5).all() and not model.need_backward_dw()
    for parameter in model[0].parametrizations.parameters():
        parameter.requires_grad_(False)
    x = example().float().requires_grad_()
    model[1].weight.requires_grad_(False)
    model(x, **extras).sum().backward()  # no gradient of theirs is needed
    assert x.grad is not None


def test_a_bias_may_be_computed_beside_main_grad() -> None:
    ours = ops.Linear(K, N, accumulate_into_main_grad=True, dtype=F64)
    theirs = nn.Linear(K, N, dtype=F64)
    theirs.load_state_dict(ours.state_dict())
    for module in (ours, theirs):
        parametrize.register_parametrization(module, "bias", Moved(module.bias))
    ours.weight.main_grad = torch.zeros_like(ours.weight)
    found, expected = gradients(ours, example()), gradients(theirs, example())
    assert_close(found | {"weight": ours.weight.main_grad}, expected)


# Recipes and scopes


def low_precision() -> tuple[Sequential, dict[str, Any]]:
    torch.manual_seed(5)
    model = Sequential(
        ops.RMSNorm(32), ops.GroupedLinear(G, 32, 64, bias=False), ops.ScaledSwiGLU(), ops.GroupedLinear(G, 32, 32)
    )
    return model, {"split_sizes": SIZES, "scales": torch.rand(sum(SIZES))}


RECIPES = ["fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", "nvfp4"]
WAYS = ["plain", "reentrant", "not reentrant", "constant_weights"]
UNDER = [
    pytest.param(recipe, way, marks=[] if recipe == "mxfp8" else [pytest.mark.rest], id=f"{recipe}-{way}")
    for recipe in RECIPES
    for way in WAYS
    if (recipe, way) != ("fp8_delayed", "constant_weights")  # where registered weights keep the scale of the first cast
]


@pytest.mark.parametrize(("recipe", "way"), UNDER)
def test_under_a_recipe_computed_weights_have_the_bits_of_registered_ones(recipe: str, way: str) -> None:
    def run(computed: bool) -> dict[str, Tensor]:
        model, extras = low_precision()
        x = torch.linspace(-2, 2, sum(SIZES) * 32).view(-1, 32).requires_grad_()
        if computed:
            for child in (model[0], model[1], model[3]):
                parametrize.register_parametrization(child, "weight", Halves(), unsafe=True)
        call = partial(model, **extras)
        if way.endswith("reentrant"):
            call = partial(fuser.checkpoint, call, use_reentrant=way == "reentrant")
        torch.manual_seed(6)
        scope: Any = fuser.constant_weights(model) if way == "constant_weights" else nullcontext()
        found = {}
        with scope:
            for step in range(2):
                with autocast(recipe):
                    y = call(x)
                y.square().mean().backward()
                found[f"y{step}"] = y.detach()
            assert way != "constant_weights" or not computed or scope.nbytes == 0
        names = {"parametrizations.weight.original0": "weight"}
        gradients = {n: p.grad for n, p in model.named_parameters()}
        for name, gradient in gradients.items():
            for long, short in names.items():
                name = name.replace(long, short)
            if "original1" not in name:
                found[name] = gradient
        return found | {"x": x.grad}

    found, expected = run(True), run(False)
    assert found.keys() == expected.keys()
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


class Halves(nn.Module):
    """The sum of two tensors, of which the second is zero: so the first is as the weight, and has its gradient."""

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return first + second

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        return weight.detach().clone(), torch.zeros_like(weight)


def test_constant_weights_keep_no_cast_of_a_weight_that_stands_in_for_a_call() -> None:
    operation = ops.Linear(32, 32, bias=False)
    x, weights = torch.randn(32, 32), [torch.randn(32, 32) for _ in range(2)]
    with fuser.constant_weights(operation) as _, autocast("mxfp8"):
        found = [functional_call(operation, {"weight": weight}, (x,)) for weight in weights]
        own = operation(x)
    with autocast("mxfp8"):
        expected = [functional_call(operation, {"weight": weight}, (x,)) for weight in weights]
        assert torch.equal(own, operation(x))
    assert all(map(torch.equal, found, expected)) and not torch.equal(*found)


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_computed_weight_lives_no_longer_than_its_backward(recipe: str) -> None:
    seen: list[weakref.ref[Tensor]] = []

    class Seen(Moved):
        def forward(self, weight: Tensor) -> Tensor:
            result = super().forward(weight)
            seen.append(weakref.ref(result))
            return result

    model = Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32))
    parametrize.register_parametrization(model[0], "weight", Seen(model[0].weight))
    seen.clear()
    with fuser.constant_weights(model):
        with autocast(recipe):
            y = model(torch.randn(32, 32, requires_grad=True))
        assert len(seen) == 1  # computed once a forward
        y.sum().backward()
        gc.collect()
        assert seen[0]() is None and y.grad_fn is not None


def test_saved_tensor_hooks_see_computed_weights_and_no_registered_ones() -> None:
    model = Sequential(ops.Linear(K, 3 * K, bias=False), ops.Linear(3 * K, K, bias=False))
    parametrize.register_parametrization(model[0], "weight", Moved(model[0].weight))
    shapes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
        y = model(torch.randn(4, K, requires_grad=True))
    assert (3 * K, K) in shapes and (K, 3 * K) not in shapes
    y.sum().backward()


@pytest.mark.parametrize("reentrant", [False, True])
def test_torch_checkpoint_computes_weights_again(reentrant: bool) -> None:
    ours, theirs, _ = paired("dense")
    for module in (ours, theirs):
        moved(module)

    class Checkpointed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(ours, x, use_reentrant=reentrant)

    found = Checkpointed()
    found.ours = ours
    expected = gradients(theirs, example())
    assert_close({n.removeprefix("ours."): g for n, g in gradients(found, example()).items()}, expected)


def test_a_weight_may_be_parametrized_for_a_forward_alone() -> None:
    """As adapters of peft do with `target_parameters`."""
    ours, theirs, extras = paired("grouped")
    moves = [Moved(module[0].weight.detach()) for module in (ours, theirs)]

    def step(module: nn.Module, move: Moved, **extras: Any) -> dict[str, Any]:
        module.zero_grad()
        move.zero_grad()
        parametrize.register_parametrization(module[0], "weight", move)
        y = module(example(), **extras)
        parametrize.remove_parametrizations(module[0], "weight", leave_parametrized=False)
        y.square().sum().backward()
        return {"y": y, "delta": move.delta.grad} | {n: p.grad for n, p in module.named_parameters()}

    for _ in range(2):
        assert_close(step(ours, moves[0], **extras), step(theirs, moves[1]))


def test_a_copy_of_a_parametrized_operation_trains_its_own_parameters() -> None:
    operation = ops.Linear(K, N, dtype=F64)
    parametrizations.weight_norm(operation)
    expected = gradients(operation, example())
    copied = copy.deepcopy(operation)
    operation.zero_grad()
    found = gradients(copied, example())
    assert_close(found, expected)
    assert all(p.grad is None for p in operation.parameters())


def test_explain_computes_no_weight() -> None:
    calls = []

    class Counted(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            calls.append(1)
            return weight * 1

    model, _ = low_precision()
    parametrize.register_parametrization(model[1], "weight", Counted())
    calls.clear()
    assert "GroupedMLP" in model.explain(recipe="mxfp8") and not calls


def test_a_missing_parameter_is_named() -> None:
    operation = ops.Linear(K, N)
    del operation.weight
    operation.weight = torch.randn(N, K)
    with pytest.raises(AttributeError, match=r"no parameter 'weight'.*takes its place by torch.nn.utils.parametrize"):
        operation(torch.randn(2, K))


# Tracing


# What torch.compile makes of a tensor that a hook left on its module.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor:UserWarning")
@pytest.mark.parametrize("model", ["dense", pytest.param("grouped", marks=pytest.mark.rest)])
@pytest.mark.parametrize("how", ["every-parameter-moved", pytest.param("pruned", marks=pytest.mark.rest)])
def test_computed_weights_are_traced_whole(model: str, how: str) -> None:
    ours, _, extras = paired(model)
    PARAMETRIZATIONS[how](ours)
    compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
    expected = gradients(ours, example(), **extras)
    for _ in range(2):
        found = {n.removeprefix("_orig_mod."): g for n, g in gradients(compiled, example(), **extras).items()}
        assert_close(found, expected)


def test_functional_call_is_traced_whole() -> None:
    ours, _, extras = paired("grouped")
    torch.manual_seed(7)
    leaves = [{n: torch.randn_like(p).requires_grad_() for n, p in ours.named_parameters()} for _ in range(2)]
    leaves[1] = {n: t.detach().clone().requires_grad_() for n, t in leaves[0].items()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(ours, parameters, (x,), extras).square().sum()

    for function, each in zip((loss, torch.compile(loss, fullgraph=True, backend="aot_eager")), leaves, strict=True):
        function(each, example()).backward()
    assert_close(*({n: t.grad for n, t in each.items()} for each in leaves))
