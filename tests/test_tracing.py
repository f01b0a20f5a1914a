"""torch.compile of models with Sequentials: one graph, the bits of an eager run, compiled again where it has to be."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import ops
from fuser import Branch, Sequential, autocast, checkpoint, constant_weights, quantize, to_quantized
from recipes import (
    CustomRecipe,
    Float8CurrentScaling,
    Format,
    MXFP8BlockScaling,
    QuantizedTensor,
    Quantizer,
    Recipe,
    Role,
)
from recipes.recipe import HighPrecision
from recipes.registry import RECIPES
from recipes.stack import key_of, own_entries, seen
from tests.pairwise import rest

Result = TypeVar("Result")

H, F, E = 64, 32, 4  # hidden size, features of an expert, experts
NAMES = [kind.names[0] for kind in RECIPES]

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # its own too
    pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning"),  # inductor's first one, on purpose
]

OLDEST_TORCH = torch.__version__.startswith("2.11.")
MADE_WHILE_TRACED = pytest.mark.skipif(OLDEST_TORCH, reason="torch 2.11 hands no frozen dataclass on that it traced")
SET_WHILE_TRACED = pytest.mark.skipif(OLDEST_TORCH, reason="torch 2.11 ends in an error where it traces an attribute")
EVERY = pytest.mark.parametrize("recipe", NAMES)
ON_EACH_DEVICE = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


@pytest.fixture(autouse=True)
def fresh():
    """What was compiled for other tests counts against a limit."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def experts(**settings: Any) -> list[nn.Module]:
    return [
        ops.GroupedLinear(E, H, 2 * F, bias=False, **settings),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(E, F, H, bias=True, **settings),
    ]


def moe_layer() -> Sequential:
    return Sequential(
        ops.MakeExtraOutput("residual"), ops.RMSNorm(H), ops.Router(H, E, topk=2), ops.Dispatch(E), *experts(),
        ops.Combine(), ops.AddExtraInput("residual"),
    )  # fmt: skip


def dense() -> Sequential:
    """Two pipelines, and a module of torch's between them. The second draws random numbers."""
    return Sequential(
        ops.LayerNorm(H), ops.Linear(H, 2 * F), ops.SwiGLU(), nn.Tanh(), ops.Linear(F, H), ops.Dropout(0.3)
    )  # fmt: skip


class Model(nn.Module):
    """What surrounds a Sequential is torch's own."""

    def __init__(self, layer: Sequential, outputs: tuple[str, ...] = ()) -> None:
        super().__init__()
        self.first = nn.Linear(H, H)
        self.layer = layer
        self.outputs = outputs

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        if not self.outputs:
            return self.layer(x) + x
        y, made = self.layer(x, outputs=self.outputs)
        return y + x + sum(value.sum() for value in made.values())


MODELS: dict[str, Callable[[], Model]] = {
    "moe": lambda: Model(moe_layer(), ("load_balancing_loss", "probs")),
    "dense": lambda: Model(dense()),
}


def step(model: nn.Module, recipe: Any, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
    """y and all gradients of one step, under `recipe`."""
    model.zero_grad()
    x = x.detach().requires_grad_()
    torch.manual_seed(1)  # of what is drawn
    with autocast(recipe):
        y = (model if run is None else run)(x)
    y.float().square().mean().backward()
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    different = [n for n, e in expected.items() if not (found[n] is e or torch.equal(found[n], e))]
    assert not different, different


def compiled(model: Any, **settings: Any) -> tuple[Any, CompileCounterWithBackend]:
    """A whole graph of it, and how often it was compiled."""
    counter = CompileCounterWithBackend("aot_eager")
    return torch.compile(model, backend=counter, fullgraph=True, **settings), counter


# ------------------------------------------------------------------------------------------------- the bits of eager


@pytest.mark.slow
@pytest.mark.pairwise(rest=2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["moe", "dense"])
@pytest.mark.parametrize("recipe", NAMES)
@ON_EACH_DEVICE
def test_a_model_is_one_graph_with_the_bits_of_eager_steps(device, recipe, name, dtype):
    eager = MODELS[name]().to(device, dtype)
    other = copy.deepcopy(eager)
    run, counter = compiled(other)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (eager, other)]
    for seed in range(3):  # weights change between steps, and the scales of delayed scaling move on
        x = torch.randn(24, H, dtype=dtype, device=device) * (seed + 1)
        assert_same(step(other, recipe, x, run), step(eager, recipe, x))
        for optimizer in optimizers:
            optimizer.step()
    assert counter.frame_count == 1
    for (state, mine), (_, expected) in zip(other.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.equal(mine, expected), state


def alike(changes: tuple[Callable[[Sequential], object], Callable[[Sequential], object]]) -> list[Sequential]:
    """Two models of the same operations, each with a change of its own, by as many assignments."""
    models = [dense(), dense()]
    for model, change in zip(models, changes, strict=True):
        change(model)
    return models


INSTANCES: dict[str, Callable[[], list[Sequential]]] = {
    "settings": lambda: alike((lambda m: setattr(m[5], "p", 0.1), lambda m: setattr(m[5], "p", 0.9))),
    "arguments": lambda: alike(
        (lambda m: m.__setitem__(0, ops.LayerNorm(H)), lambda m: m.__setitem__(0, ops.LayerNorm(H, eps=1.0)))
    ),
    "recipes": lambda: alike((lambda m: m[1].set_recipe("mxfp8"), lambda m: m[1].set_recipe("fp8_block"))),
    "a hook": lambda: alike((lambda m: None, lambda m: m[1].register_forward_hook(lambda _, args, y: 2 * y))),
    "states": lambda: [moe_layer(), moe_layer()],
}


@pytest.mark.parametrize("how", ["alone", "in a module", "one function"])
@pytest.mark.parametrize("name", INSTANCES)
@pytest.mark.slow
def test_models_alike_are_compiled_each_for_itself(name, how):
    """By regional compilation, say: none runs with the settings, the recipe, the states or the hooks of another."""
    eager: list[Any] = INSTANCES[name]()
    if how == "in a module":
        eager = [Model(layer) for layer in eager]
    others = copy.deepcopy(eager)
    whole = name != "a hook"
    if how == "one function":
        run = torch.compile(lambda model, x: model(x), backend="aot_eager", fullgraph=whole)
        runs = [partial(run, model) for model in others]
    else:
        runs = [torch.compile(model, backend="aot_eager", fullgraph=whole) for model in others]
    for seed in range(2):
        for model, other, run in zip(eager, others, runs, strict=True):
            x = torch.randn(24, H) * (seed + 1)
            assert_same(step(other, "fp8_delayed", x, run), step(model, "fp8_delayed", x))
    for model, other in zip(eager, others, strict=True):
        states = dict(model.named_buffers())
        assert states.keys() == dict(other.named_buffers()).keys() and states
        for state, tensor in other.named_buffers():
            assert torch.equal(tensor, states[state]), state


def test_an_attribute_of_a_foreign_module_is_no_setting():
    class Foreign(nn.ReLU):
        settings = {"dropout": 0.1}

    model = Sequential(ops.Linear(H, H), Foreign())
    run, _ = compiled(model)
    x = torch.randn(4, H)
    assert torch.equal(run(x), model(x))


class Scores(nn.Module):
    """A router of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(E, H))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return tuple((x @ self.weight.T).sigmoid().topk(2))


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [24, 1, 0])
@pytest.mark.parametrize("router", [lambda: ops.Router(H, E, topk=2), lambda: ops.CustomRouter(Scores())])
def test_modules_with_extra_tensors_between_operations_are_compiled(router, tokens):
    shared = Sequential(ops.Linear(H, 2 * F, bias=False), ops.SwiGLU(), ops.Linear(F, H, bias=False))
    model = Model(Sequential(
        ops.RMSNorm(H), router(), Branch("shared", shared), ops.Dispatch(E), *experts(), ops.Combine(),
        ops.AddExtraInput("shared"), ops.Torch(lambda x: (x, x.square().sum()), extra_outputs=("square",)),
    ), ("square",))  # fmt: skip
    FakeTensorMode.cache_clear()  # views of torch's that it remembers may lie in memory of their own
    run, _ = compiled(model)
    x = torch.randn(tokens, H)
    assert_same(step(model, "bf16", x, run), step(model, "bf16", x))


def test_operations_with_a_recipe_of_their_own_are_compiled():
    model = Model(Sequential(ops.Linear(H, H).set_recipe("fp8_delayed"), ops.SiLU(), ops.Linear(H, H)))
    other = copy.deepcopy(model)
    run, counter = compiled(other)
    for _ in range(3):
        x = torch.randn(24, H)
        assert_same(step(other, "fp8_current", x, run), step(model, "fp8_current", x))
    assert counter.frame_count == 1


@pytest.mark.slow
def test_an_operation_alone_is_compiled():
    for operation, x, extras in (
        (ops.Linear(H, F), torch.randn(2, 3, H), {}),
        (ops.GroupedLinear(E, H, F), torch.randn(12, H), {"split_sizes": torch.tensor([3, 0, 8, 1])}),
        (ops.GroupedLinear(E, H, F), torch.randn(12, H), {"split_sizes": [3, 0, 8, 0]}),
    ):
        run, counter = compiled(lambda x, o=operation, e=extras: o(2 * x, **e))
        expected = step(operation, "fp8_current", x, lambda x, o=operation, e=extras: o(2 * x, **e))
        assert_same(step(operation, "fp8_current", x, run), expected)
        assert counter.frame_count == 1


# -------------------------------------------------------------------------------------------- compiled again, or not


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [name if name == "fp8_current" else rest(name) for name in NAMES])
def test_token_counts_change_without_compiling_again(recipe):
    """But for the first of one token, and of none. With the bits of eager steps."""
    eager = Model(moe_layer()).bfloat16()
    other = copy.deepcopy(eager)
    run, counter = compiled(other, dynamic=True)
    for number in (24, 40, 7, 129, 1, 0):
        x = torch.randn(number, H, dtype=torch.bfloat16)
        assert_same(step(other, recipe, x, run), step(eager, recipe, x))
        assert counter.frame_count == 1 or number <= 1


@pytest.mark.slow
def test_another_recipe_is_compiled_anew_and_a_known_one_is_not():
    model = Model(dense())
    run, counter = compiled(model)
    x = torch.randn(24, H)
    for recipe, graphs in (("fp8_current", 1), (None, 2), ("fp8_current", 2), (None, 2)):
        assert_same(step(model, recipe, x, run), step(model, recipe, x))
        assert counter.frame_count == graphs, recipe


@pytest.mark.slow
def test_an_autocast_within_the_compiled_function_decides():
    layer = dense()

    def forward(x: Tensor) -> Tensor:
        with autocast("fp8_current"):
            y = layer(2 * x)
            with autocast(enabled=False):
                y = layer(y) + 1
        return layer(y)

    run, counter = compiled(forward)
    x = torch.randn(24, H)
    for recipe in (None, "fp8_block", None):
        assert_same(step(layer, recipe, x, run), step(layer, recipe, x, forward))
    assert counter.frame_count == 2


@dataclass(frozen=True)
class Shifted(Recipe):
    """As MXFP8 without a shift, else FP8 with one scale a tensor, and with -1 without gradients that are quantized."""

    shift: int

    def quantizer(self, role: Role) -> Quantizer | None:
        if self.shift == -1 and role is Role.GRAD_OUTPUT:
            return None
        return (Float8CurrentScaling() if self.shift else MXFP8BlockScaling()).quantizer(role)


class Undeclared(Shifted):
    """No dataclass itself."""


@dataclass(frozen=True)
class Decremented(Shifted):
    """With an __init__ of its own."""

    def __init__(self, shift: int) -> None:
        super().__init__(shift - 1)


MADE_WITHIN: dict[str, Callable[[], Recipe]] = {
    "a field": lambda: MXFP8BlockScaling(scaling="floor"),
    "defaults": lambda: MXFP8BlockScaling(),
    "an enum": lambda: Float8CurrentScaling(fp8_format=Format.E4M3, amax_epsilon=10.0),
    "a field of the base": lambda: MXFP8BlockScaling(path="grouped", scaling="floor"),
    "one's own": lambda: Shifted(-1),
    "an init of its own": lambda: Decremented(0),
    "of another": lambda: replace(RECIPE, amax_epsilon=20.0),
    "a function": lambda: CustomRecipe(quantizer_of),
}
RECIPE = Float8CurrentScaling(amax_epsilon=10.0)


def quantizer_of(role: Role) -> Quantizer | None:
    return None if role is Role.GRAD_OUTPUT else MXFP8BlockScaling(scaling="floor").quantizer(role)


@pytest.mark.slow
@MADE_WHILE_TRACED
@pytest.mark.parametrize("make", [pytest.param(make, id=name) for name, make in MADE_WITHIN.items()])
def test_a_recipe_that_is_made_within_the_compiled_function_has_its_fields(make: Callable[[], Recipe]) -> None:
    layer = dense()

    def forward(x: Tensor) -> Tensor:
        with autocast(make()):
            return layer(x)

    run, _ = compiled(forward)
    x = torch.randn(24, H)
    assert_same(step(layer, None, x, run), step(layer, None, x, forward))


@MADE_WHILE_TRACED
def test_a_recipe_that_is_no_dataclass_is_refused_where_it_is_made_within_the_compiled_function() -> None:
    layer = dense()

    def forward(x: Tensor) -> Tensor:
        with autocast(Undeclared(-1)):
            return layer(x)

    run, _ = compiled(forward)
    with pytest.raises(Exception, match=r"A Undeclared is made within a function that torch.compile traces.*outside"):
        run(torch.randn(24, H))


@pytest.mark.parametrize("where", ["around", pytest.param("within", marks=MADE_WHILE_TRACED)])
@pytest.mark.slow
def test_recipes_of_one_hash_are_compiled_apart(where: str) -> None:
    """Python gives -1 and -2 the same hash."""
    layer = dense()
    recipes = Shifted(-1), Shifted(-2)
    assert hash(recipes[0]) == hash(recipes[1])

    def within(x: Tensor, recipe: Recipe) -> Tensor:
        with autocast(recipe):
            return layer(x)

    x = torch.randn(24, H)
    run, _ = compiled(layer if where == "around" else within)
    for recipe in (*recipes, *recipes):
        if where == "around":
            assert_same(step(layer, recipe, x, run), step(layer, recipe, x))
        else:
            both = [step(layer, None, x, partial(function, recipe=recipe)) for function in (run, within)]
            assert_same(*both)


CHANGES: dict[str, Callable[[Model], Any]] = {
    "eval": lambda model: model.eval(),
    "a setting": lambda model: setattr(model.layer[0], "eps", 0.5),
    "a recipe": lambda model: model.layer[1].set_recipe("nvfp4"),
    "a module more": lambda model: model.layer.append(ops.SiLU()),
    "another module": lambda model: model.layer.__setitem__(1, ops.Linear(H, 2 * F)),
    "frozen": lambda model: model.layer[1].weight.requires_grad_(False),
    "another parameter": lambda model: setattr(model.layer[1], "weight", nn.Parameter(torch.ones(2 * F, H))),
    "the split path": lambda model: setattr(model.layer, "path", "split"),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", [name if name in ("a recipe", "frozen") else rest(name) for name in CHANGES])
def test_what_is_changed_after_it_was_compiled_is_seen(change):
    model = Model(dense())
    run, _ = compiled(model)
    x = torch.randn(24, H)
    step(model, "fp8_current", x, run)
    CHANGES[change](model)
    assert_same(step(model, "fp8_current", x, run), step(model, "fp8_current", x))


@pytest.mark.slow
def test_a_hook_that_torch_does_not_see_is_an_error():
    model = Model(dense())
    run, _ = compiled(model)
    x = torch.randn(24, H)
    step(model, "fp8_current", x, run)
    model.layer[1].register_forward_hook(lambda module, args, y: 2 * y)
    with pytest.raises(RuntimeError, match=r"Hooks of Linear .* Call torch.compiler.reset"):
        step(model, "fp8_current", x, run)
    torch.compiler.reset()
    assert_same(step(model, "fp8_current", x, run), step(model, "fp8_current", x))


CHANGES_WITHIN: dict[str, Callable[[Sequential], Any]] = {
    "a setting": lambda layer: setattr(layer[0], "eps", 0.5),
    "a recipe": lambda layer: layer[1].set_recipe("fp8_current"),
    "the mode": lambda layer: layer.eval(),
    "a module more": lambda layer: layer.append(ops.SiLU()),
    "a module of another class": lambda layer: layer.__setitem__(2, ops.SiLU()),
    "the split path": lambda layer: setattr(layer, "path", "split"),
}


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`:UserWarning")
@pytest.mark.parametrize(
    "change",
    [
        pytest.param(name, marks=SET_WHILE_TRACED if "setting" in name or "module" in name else ())
        for name in CHANGES_WITHIN
    ],
)
@pytest.mark.slow
def test_what_is_changed_within_the_compiled_function_before_the_call_runs_or_is_refused(change: str) -> None:
    """torch applies changes when it has traced the call, which ran with the settings of before."""
    layer = Sequential(ops.RMSNorm(H), ops.Linear(H, H), ops.ReLU(), ops.Dropout(0.5))
    other = copy.deepcopy(layer)

    def forward(x: Tensor, layer: Sequential) -> Tensor:
        CHANGES_WITHIN[change](layer)
        return layer(x)

    x = torch.randn(24, H)
    with pytest.raises(Exception, match=r"changes settings or modules of this Sequential and then calls it"):
        torch.compile(forward, fullgraph=True, backend="aot_eager")(x, copy.deepcopy(layer))
    run = torch.compile(forward, backend="aot_eager")
    assert_same(step(layer, None, x, partial(run, layer=layer)), step(other, None, x, partial(forward, layer=other)))


@SET_WHILE_TRACED
def test_a_setting_of_a_single_operation_that_is_changed_within_the_compiled_function_is_seen() -> None:
    norm = ops.RMSNorm(H)
    other = copy.deepcopy(norm)

    def forward(x: Tensor, norm: ops.RMSNorm) -> Tensor:
        norm.eps = 0.5
        return norm(x)

    x = torch.randn(24, H)
    with pytest.raises(Exception, match=r"changes settings or modules of this RMSNorm and then calls it"):
        torch.compile(forward, fullgraph=True, backend="aot_eager")(x, copy.deepcopy(norm))
    run = torch.compile(forward, backend="aot_eager")
    assert_same(step(norm, None, x, partial(run, norm=norm)), step(other, None, x, partial(forward, norm=other)))


@pytest.mark.rest
def test_torch_autocast_decides_when_it_is_traced():
    model = Model(dense())
    run, counter = compiled(model)
    x = torch.randn(24, H)
    for dtype in (torch.bfloat16, torch.float32, torch.bfloat16):
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            assert_same(step(model, "fp8_current", x, run), step(model, "fp8_current", x))
    assert counter.frame_count == 2


@pytest.mark.slow
def test_compiled_autograd_leaves_the_backward_of_an_eager_forward_as_it_is():
    torch.manual_seed(0)
    layer, x = moe_layer(), torch.randn(24, H)
    layer(x).sum().backward()
    expected = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    y = layer(x)
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="eager")):
        y.sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(layer.parameters(), expected, strict=True))


def while_another_thread_compiles(function: Callable[[], Result]) -> Result:
    """What the function returns on this thread, called while another one is in a backend of torch.compile."""
    compiling, done = threading.Event(), threading.Event()

    def backend(graph: Any, samples: Any) -> Any:
        compiling.set()
        assert done.wait(60)
        return graph.forward

    with ThreadPoolExecutor(1) as pool:
        compiled = pool.submit(torch.compile(torch.sin, backend=backend), torch.ones(2))
        try:
            assert compiling.wait(60)
            return function()
        finally:
            done.set()
            compiled.result()


def test_a_thread_runs_eagerly_while_another_one_compiles() -> None:
    layer, x = dense(), torch.randn(24, H)
    layer.eval()

    def run() -> list[Tensor]:
        with autocast("mxfp8"):
            assert [entry.recipe.name for entry in own_entries()] == ["mxfp8"] and not seen.inside
            return [layer(x), layer[0](x)]

    before = run()
    assert all(torch.equal(*pair) for pair in zip(while_another_thread_compiles(run), before, strict=True))

    around = autocast("mxfp8")
    around.__enter__()
    while_another_thread_compiles(lambda: around.__exit__(None, None, None))
    assert not own_entries()


@pytest.mark.slow
def test_evaluation_leaves_the_scales_alone():
    model = Model(dense())
    run, _ = compiled(model)
    step(model, "fp8_delayed", torch.randn(24, H), run)
    before = {name: state.clone() for name, state in model.named_buffers()}
    with torch.no_grad(), autocast("fp8_delayed"):
        run(100 * torch.randn(24, H))
    assert before and all(torch.equal(state, before[name]) for name, state in model.named_buffers())


# ----------------------------------------------------------------------------------------------------------- refusals


def delayed_inside(x: Tensor, layer: Sequential) -> Tensor:
    with autocast("fp8_delayed"):
        return layer(x)


class OfSingleTensors(Quantizer):
    """Without `quantize_grouped`, so that the SplitPath runs, though nobody has asked for it."""

    def __eq__(self, other: object) -> bool:
        return type(other) is OfSingleTensors

    def __hash__(self) -> int:
        return 0

    def quantize(self, x: Tensor, *, rowwise: bool = True, columnwise: bool = False) -> QuantizedTensor:
        quantizer = MXFP8BlockScaling().quantizer(Role.INPUT)
        return quantizer.quantize(x, rowwise=rowwise, columnwise=columnwise)


def of_single_tensors(role: Role) -> Quantizer:
    return OfSingleTensors()


def refusals() -> dict[str, tuple[Callable[[], Sequential], Callable[[Tensor, Sequential], Any], str]]:
    def call(x: Tensor, layer: Sequential) -> Any:
        return layer(x)

    def with_sizes(x: Tensor, layer: Sequential) -> Any:
        return layer(x, split_sizes=torch.tensor([6, 6, 6, 6]))

    def into_buffer(x: Tensor, layer: Sequential) -> Any:
        return layer(x, split_sizes=torch.tensor([6, 6, 6, 6]), buffers={0: {"output": torch.empty(24, H)}})

    def in_place() -> Sequential:
        return Sequential(ops.MakeExtraOutput("r"), ops.ConstantScale(2.0), ops.AddExtraInput("r", in_place=True))

    def apart() -> Sequential:
        return Sequential(ops.Router(H, E, topk=2), ops.Dispatch(E), nn.Tanh(), ops.Combine())

    def by_recipe() -> Sequential:
        return Sequential(ops.GroupedLinear(E, H, H).set_recipe(CustomRecipe(of_single_tensors)))

    grouped = [ops.GroupedLinear(E, H, H)]
    return {
        "in place": (in_place, call, "Give in_place=False"),
        "a map": (apart, call, "'routing_map' of Dispatch is a RoutingMap"),
        "delayed scaling inside": (lambda: Sequential(ops.Linear(H, H)), delayed_inside, "Open it around the call"),
        "a buffer": (lambda: Sequential(*grouped), into_buffer, "buffers= names memory of the caller's"),
        "the split path": (lambda: Sequential(*grouped, path="split"), with_sizes, "reads split sizes on the host"),
        "the split path by its recipe": (by_recipe, with_sizes, "reads split sizes on the host"),
        "missing": (lambda: Sequential(*grouped), call, "missing: 'split_sizes'"),
    }


def test_quantized_weights_and_inputs_are_refused_with_the_reason():
    x, layer = torch.randn(24, H), Sequential(ops.Linear(H, H))
    held = to_quantized(Sequential(ops.Linear(H, H)), "mxfp8")
    cases = ((held, x, "holds its weights quantized"), (layer, quantize(x, "mxfp8"), "x is quantized"))
    for module, given, reason in cases:
        with pytest.raises(Exception, match=reason), autocast("mxfp8"):
            torch.compile(module, backend="aot_eager", fullgraph=True)(given)
        torch.compiler.reset()
    with autocast("mxfp8"), torch.no_grad():  # torch.export shows an ordinary weight in its place
        program = torch.export.export(held, (x,)).module()
        with pytest.raises(RuntimeError, match=r"fuser.linear.default was traced .* given one that is held quantized"):
            program(x)


@pytest.mark.parametrize("case", refusals())
def test_what_cannot_be_traced_is_refused_with_the_reason_and_runs_as_it_is_otherwise(case):
    make, call, reason = refusals()[case]
    layer = make()
    x = torch.randn(24, H)

    def run(x: Tensor) -> Any:
        return call(2 * x, layer) + 1

    with pytest.raises(torch._dynamo.exc.Unsupported, match=f"Explanation: .*{reason}"):
        torch.compile(run, backend="aot_eager", fullgraph=True)(x)
    torch.compiler.reset()
    partly = torch.compile(run, backend="aot_eager")
    if case in ("missing", "delayed scaling inside"):
        with pytest.raises(ValueError if case == "missing" else RuntimeError, match=reason):
            partly(x)
        return
    for _ in range(2):
        found, expected = (step(layer, None, x, function) for function in (partly, run))
        assert_same(found, expected)


class OwnAutocast(torch.nn.Module):
    """A module that is not traced, with an autocast of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = Sequential(ops.Linear(H, H))

    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        with autocast("fp8_current"):
            return self.layer(x)


def broken() -> dict[str, Callable[[], tuple[torch.nn.Module, Callable[[torch.nn.Module, Tensor], Any]]]]:
    """What runs as it is within an autocast that is traced: a module, and how it is called."""
    return {
        "disabled": lambda: (Sequential(ops.Linear(H, H)), lambda module, x: torch.compiler.disable(module)(x)),
        "autocast of its own": lambda: (OwnAutocast(), lambda module, x: module(x)),
        "checkpoint": lambda: (Sequential(ops.Linear(H, H)), checkpoint),
    }


@pytest.mark.parametrize("case", broken())
@pytest.mark.slow
def test_a_broken_graph_keeps_the_recipe_of_an_autocast_that_is_traced(case):
    first, call = broken()[case]()
    second, x = Sequential(ops.Linear(H, H), ops.GELU()), torch.randn(24, H)
    both = torch.nn.ModuleList([first, second])

    def run(x: Tensor) -> Any:
        with autocast("mxfp8"):
            return second(call(first, x)) + 1

    torch.compiler.reset()
    partly = torch.compile(run, backend="aot_eager")
    for _ in range(2):
        found, expected = (step(both, None, x, function) for function in (partly, run))
        assert_same(found, expected)
    plain = second(x)
    assert torch.equal(torch.compile(lambda x: second(x) * 1, backend="aot_eager")(x), plain)
    assert torch.equal(second(x), plain) and seen.recipe == key_of(HighPrecision()) and not seen.inside


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_the_bias_of_a_router_is_updated_behind_the_forwards_of_a_compiled_step(backend: str) -> None:
    """Forwards count tokens past what torch traces, so that it sees no order between them and the update."""
    router = ops.Router(H, E, topk=2, score_function="sigmoid", expert_bias=True)
    layer, x = Sequential(router, *moe_layer()[3:7]), torch.randn(24, H)
    other = copy.deepcopy(layer)

    def run(x: Tensor, layer: Sequential) -> Any:
        y = layer(x)
        layer[0].update_expert_bias(0.5)
        return layer(y)

    with pytest.raises(Exception, match="Call it outside of the compiled function"):
        torch.compile(run, fullgraph=True, backend=backend)(x, layer)
    partly = torch.compile(run, backend=backend)
    for _ in range(2):
        torch.testing.assert_close(partly(x, layer), run(x, other))
        assert torch.equal(layer[0].expert_bias, other[0].expert_bias)
        assert torch.equal(layer[0].tokens_since_update, other[0].tokens_since_update)


@pytest.mark.slow
@MADE_WHILE_TRACED
@pytest.mark.parametrize("fullgraph", [True, False])
def test_a_function_that_is_decorated_where_torch_traces_runs_under_the_recipe(fullgraph: bool) -> None:
    layer, x = Sequential(ops.Linear(H, H)), torch.randn(24, H)

    def run(x: Tensor) -> Any:
        @autocast(MXFP8BlockScaling(scaling="floor"))
        def inner(x: Tensor) -> Any:
            return layer(x)

        return layer(inner(inner(x)))

    found = step(layer, None, x, torch.compile(run, fullgraph=fullgraph, backend="aot_eager"))
    assert_same(found, step(layer, None, x, run))


def test_a_checkpoint_that_has_to_be_traced_says_which_one_can_be() -> None:
    layer = Sequential(ops.Linear(H, H))
    run = torch.compile(lambda x: checkpoint(layer, x), fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"Within a compiled function call torch\.utils\.checkpoint\.checkpoint"):
        run(torch.randn(24, H))


@pytest.mark.slow
def test_an_error_within_an_autocast_that_is_traced_is_the_callers_and_ends_it():
    layer, x = Sequential(ops.Linear(H, H)), torch.randn(24, H)

    @torch.compiler.disable
    def fail(x: Tensor) -> Tensor:
        raise ValueError("bad batch")

    def run(x: Tensor) -> Any:
        with autocast("mxfp8"):
            return fail(layer(x))

    torch.compiler.reset()
    for _ in range(2):
        with pytest.raises(ValueError, match="bad batch"):
            torch.compile(run, backend="aot_eager")(x)
        assert torch.equal(torch.compile(lambda x: layer(x) * 1, backend="aot_eager")(x), layer(x))
    assert seen.recipe == key_of(HighPrecision()) and not seen.inside


def test_exports_and_paths_of_nested_pipelines_that_change_are_noticed():
    inner = Sequential(ops.MakeExtraOutput("a"), ops.Linear(H, H), exports=["a"])
    model = Sequential(ops.MakeExtraOutput("a"), inner, ops.AddExtraInput("a"))
    x = torch.randn(24, H)
    run = torch.compile(lambda x: model(x) * 1, backend="aot_eager", fullgraph=True)
    assert torch.equal(run(x), model(x))
    inner.exports = ()
    assert torch.equal(run(x), model(x))


def test_loading_a_state_dict_changes_no_setting():
    layer, x = Sequential(ops.Linear(H, H), ops.GELU()), torch.randn(24, H)
    program = torch.export.export(layer, (x,)).module()
    layer.load_state_dict(layer.state_dict())
    assert torch.equal(program(x), layer(x))


@pytest.mark.parametrize("setting", ["accumulate_into_main_grad", "delay_wgrad_compute"])
def test_gradients_that_autograd_does_not_see_are_refused(setting):
    layer = Sequential(*experts(**{setting: True}))
    run, _ = compiled(lambda x: layer(x, split_sizes=torch.tensor([6, 6, 6, 6]), scales=torch.ones(24)))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="its weight gradients go to main_grad, or are delayed"):
        run(torch.randn(24, H))


@pytest.mark.slow
def test_constant_weights_around_a_compiled_model_are_refused():
    model = Model(dense())
    run, _ = compiled(model)
    with constant_weights(model), pytest.raises(RuntimeError, match="constant_weights is open around a compiled model"):
        step(model, "fp8_current", torch.randn(24, H), run)


# --------------------------------------------------------------------------------------------------------- on a GPU


@pytest.mark.gpu
@EVERY
@pytest.mark.parametrize("settings", [{}, {"dynamic": True}], ids=["static", "dynamic"])
def test_inductor_gives_a_sequential_the_bits_of_eager(recipe, settings):
    eager = moe_layer().to("cuda", torch.bfloat16)
    other = copy.deepcopy(eager)
    run = torch.compile(lambda x: 1 * other(2 * x), fullgraph=True, **settings)
    for tokens in (64, 64, 200):
        x = torch.randn(tokens, H, dtype=torch.bfloat16, device="cuda")
        assert_same(step(other, recipe, x, run), step(eager, recipe, x, lambda x: 1 * eager(2 * x)))
    for (state, mine), (_, expected) in zip(other.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.equal(mine, expected), state


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["high_precision", "fp8_current", "mxfp8"])
def test_cuda_graphs_of_inductor_give_the_bits_of_eager(recipe):
    layer = moe_layer().to("cuda", torch.bfloat16)
    run = torch.compile(lambda x: 1 * layer(2 * x), fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        torch.compiler.cudagraph_mark_step_begin()
        x = torch.randn(64, H, dtype=torch.bfloat16, device="cuda")
        found = {name: value.clone() for name, value in step(layer, recipe, x, run).items()}
        assert_same(found, step(layer, recipe, x, lambda x: 1 * layer(2 * x)))


@pytest.mark.gpu
def test_cuda_graphs_of_inductor_refuse_scales_that_move_on():
    layer = moe_layer().to("cuda", torch.bfloat16)
    run = torch.compile(lambda x: 1 * layer(2 * x), fullgraph=True, mode="reduce-overhead")
    x = torch.randn(64, H, dtype=torch.bfloat16, device="cuda")
    # Ours, or torch's own: the amaxes that are recorded stay in the graph's memory.
    with pytest.raises(RuntimeError, match="replays would leave its scales as they are|not tracked as outputs"):
        for _ in range(4):
            torch.compiler.cudagraph_mark_step_begin()
            step(layer, "fp8_delayed", x, run)
