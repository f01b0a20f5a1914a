"""Parameters that are no registered leaf: parametrized, pruned, views of other parameters.

The reference is the same computation in modules of torch, under the same parametrization, in float64.
"""

import copy
import gc
import weakref
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

import fuser
import fuser.graph
import fuser.lora
from fuser import Sequential, autocast, ops
from tests.computed_cases import (
    F64,
    MODELS,
    PARAMETRIZATIONS,
    SIZES,
    G,
    K,
    Moved,
    N,
    Other,
    assert_close,
    each_name,
    example,
    gradients,
    moved,
    paired,
)


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


def test_a_parametrization_may_change_the_dtype() -> None:
    class InBfloat16(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.bfloat16()

    def run(computed: bool) -> list[Any]:
        torch.manual_seed(3)
        make = partial(ops.GroupedLinear, G, bias=False, dtype=torch.bfloat16)
        model = Sequential(make(32, 64), ops.ScaledSwiGLU(), make(32, 32))
        if computed:  # a master weight in float32
            model[0].float()
            parametrize.register_parametrization(model[0], "weight", InBfloat16(), unsafe=True)
        x = torch.linspace(-1, 1, sum(SIZES) * 32, dtype=torch.bfloat16).view(-1, 32)
        y = model(x, split_sizes=SIZES, scales=torch.ones(sum(SIZES)))
        y.sum().backward()
        assert "GroupedMLP" in model.explain()
        return [y, *[p.grad for p in model.parameters()]]

    found, expected = run(True), run(False)
    master = found[1] if found[1].dtype == torch.float32 else found[2]
    assert master.dtype == torch.float32 and torch.equal(found[0], expected[0])
    assert torch.equal(master.bfloat16(), expected[1])


def test_factors_of_an_adapter_may_be_computed() -> None:
    model = Sequential(ops.Linear(K, N, dtype=F64))
    fuser.lora.add(model, rank=2)
    torch.nn.init.normal_(model[0].lora_B.weight)
    expected = gradients(model, example())
    parametrize.register_parametrization(model[0].lora_A, "weight", Halves(), unsafe=True)
    found = gradients(model, example())
    assert torch.equal(found["y"], expected["y"])  # type: ignore[arg-type]
    halves = [g for name, g in found.items() if "lora_A" in name]
    assert len(halves) == 2 and all(torch.equal(g, expected["0.lora_A.weight"]) for g in halves)  # type: ignore[arg-type]


def test_forwards_share_a_weight_that_torch_caches() -> None:
    ours, theirs, _ = paired("dense")

    def step(module: nn.Module) -> dict[str, Any]:
        parametrizations.weight_norm(module[1])  # type: ignore[index]
        with parametrize.cached():
            (module(example()).sum() + module(2 * example()).square().sum()).backward()
        return {name: p.grad for name, p in module.named_parameters()}

    assert_close(step(ours), step(theirs))


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
    why = "not repeated: Its 'weight' is computed from other parameters in each forward. (operations 1-3)"
    assert why in model.explain(device="cuda") and not calls


@pytest.mark.parametrize(
    "behind", [(ops.GELU(),), (ops.ConstantScale(2.0), ops.AddExtraInput("residual"))], ids=["activation", "scale-add"]
)
def test_a_bias_is_computed_once_in_a_forward_and_not_to_ask_whether_it_is_there(behind: Any) -> None:
    calls = []

    class Counted(nn.Module):
        def forward(self, bias: Tensor) -> Tensor:
            calls.append(1)
            return 2 * bias

    model, router = Sequential(ops.Linear(K, N), *behind), ops.Router(K, 4, topk=2, bias=True)
    for operation in (model[0], router):
        parametrize.register_parametrization(operation, "bias", Counted())
    calls.clear()
    assert "bias=True" in repr(model) and "bias=True" in repr(router) and model.explain() and not calls
    extras = {"residual": torch.zeros(len(example()), N, dtype=example().dtype)} if len(behind) > 1 else {}
    model.double()(example(), **extras).sum().backward()
    assert len(calls) == 1


def test_a_missing_parameter_is_named() -> None:
    operation = ops.Linear(K, N)
    del operation.weight
    operation.weight = torch.randn(N, K)
    with pytest.raises(AttributeError, match=r"no parameter 'weight'.*takes its place by torch.nn.utils.parametrize"):
        operation(torch.randn(2, K))


# Tracing


# What torch.compile makes of a tensor that a hook left on its module.
@pytest.mark.slow
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


# Only on the GPU


def on_gpu() -> tuple[Sequential, dict[str, Any], Tensor]:
    torch.manual_seed(8)
    make = partial(ops.GroupedLinear, G, bias=False, device="cuda", dtype=torch.bfloat16)
    norm = ops.RMSNorm(128, device="cuda", dtype=torch.bfloat16)
    model = Sequential(norm, make(128, 256), ops.ScaledSwiGLU(), make(128, 128))
    sizes = torch.tensor([128, 0, 256, 64], device="cuda")
    x = torch.randn(512, 128, device="cuda", dtype=torch.bfloat16)
    return model, {"split_sizes": sizes, "scales": torch.rand(512, device="cuda")}, x


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8"])
def test_on_a_gpu_computed_weights_have_the_bits_of_registered_ones(recipe: str) -> None:
    found: dict[bool, list[Tensor]] = {}
    for computed in (False, True):
        model, extras, x = on_gpu()
        for at in (1, 3) if computed else ():
            parametrize.register_parametrization(model[at], "weight", Halves(), unsafe=True)
        found[computed] = []
        for _ in range(4):  # the registered ones are repeated by then
            model.zero_grad()
            x = x.detach().requires_grad_()
            with autocast(recipe):
                y = model(x, **extras)
            y.square().mean().backward()
            firsts = [p.grad for n, p in model.named_parameters() if not n.endswith("original1")]
            found[computed] += [y.detach(), x.grad, *sorted(firsts, key=lambda g: g.shape)]
    assert all(map(torch.equal, found[False], found[True]))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_on_a_gpu_each_call_has_its_own_weights_while_steps_are_repeated(recipe: str) -> None:
    model, extras, x = on_gpu()
    plain = copy.deepcopy(model)
    for step in range(5):
        leaves = {n: (p.detach() * (1 + step)).requires_grad_() for n, p in model.named_parameters()}
        with torch.no_grad():
            for name, parameter in plain.named_parameters():
                parameter.copy_(leaves[name])
        plain.zero_grad()
        with autocast(recipe):
            y, expected = functional_call(model, leaves, (x,), extras), plain(x, **extras)
        y.square().mean().backward()
        expected.square().mean().backward()
        assert torch.equal(y, expected)
        for name, parameter in plain.named_parameters():
            assert torch.equal(leaves[name].grad, parameter.grad), name  # type: ignore[arg-type]


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["bf16", "fp8_current"])
def test_a_graph_computes_weights_at_each_replay(recipe: str) -> None:
    model, extras, x = on_gpu()
    parametrize.register_parametrization(model[1], "weight", Moved(model[1].weight))
    graphed = fuser.graph.make_graphed_callables(model, (x.requires_grad_(),), sample_kwargs=extras, recipe=recipe)
    for _ in range(2):
        found = []
        for call in (graphed, model):
            model.zero_grad()
            own = x.detach().requires_grad_()
            with autocast(recipe):
                y = call(own, **extras)
            y.square().mean().backward()
            found.append([y.detach(), own.grad, *[p.grad.clone() for p in model.parameters()]])
        assert all(map(torch.equal, *found))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.9)


@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("model", MODELS)
def test_a_class_that_is_put_over_a_module_computes_its_weights(model: str, compiled: bool) -> None:
    """By properties, as torchtitan's SimpleFSDP does: the registered parameters stay, and get the gradients."""
    ours, theirs, extras = paired(model)
    before = gradients(ours, example(), **extras)
    read: list[str] = []

    def computed(module: nn.Module, name: str) -> Tensor:
        if not compiled:
            read.append(name)
        return module._parameters[name].sin() * 1.5  # type: ignore[union-attr]

    for module in (*ours.modules(), *theirs.modules()):
        names = [name for name, parameter in module._parameters.items() if parameter is not None]
        made = {name: property(partial(computed, name=name)) for name in names}
        module.__class__ = type(f"Over{type(module).__name__}", (type(module),), made)
    if compiled:
        torch.compiler.reset()
        ours.compile(fullgraph=True, backend="aot_eager")
    for _ in range(2):
        read.clear()
        found = gradients(ours, example(), **extras)
        assert compiled or len(read) == len([*ours.parameters()])  # once a forward, and not in backward
        assert_close(found, gradients(theirs, example()))
    assert found.keys() == before.keys() and not torch.equal(found["y"], before["y"])  # type: ignore[arg-type]
    assert all(gradient is not None for gradient in found.values())


def test_views_that_a_module_of_fsdp_holds_besides_are_no_parameters():
    linear = ops.Linear(4, 3)
    linear._is_fsdp_managed_module = True  # as FSDP1 and FSDP2 mark what they manage
    linear.mask = torch.ones(8)[:4]
    assert linear.parameter_names() == ("weight", "bias")
    assert linear(torch.ones(2, 4)).shape == (2, 3)
