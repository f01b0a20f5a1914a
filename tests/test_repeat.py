"""Steps repeated as a whole give what they gave: against the same steps run in full, on every change in between.

On a CPU nothing is repeated but where tests ask for it (`repeating`), for operations that torch computes.
"""

import gc
import json
import subprocess
import sys
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ops.runner.backward
import ops.runner.run
import ops.runner.traced_plan
from fuser import Sequential, autocast, constant_weights, ops, recipes
from ops.kernels.routing.permute import RoutingMap, make_routing_map
from ops.runner import program, repeat
from ops.runner.traced_plan import TracedPlan
from recipes.cast_counts import count_casts
from recipes.triton import replay, tape
from recipes.triton.gates import why_not_repeated
from recipes.triton.repeated import Repeated
from tests import repeated_launches
from tests.compiling import ROOT, compiling

NVFP4 = recipes.NVFP4BlockScaling(disable_stochastic_rounding=True)
RECIPES = ("high_precision", "fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", "nvfp4")


@pytest.fixture
def repeating(monkeypatch):
    """Let steps on the CPU be repeated too. Those whose hosts read sizes must not be among them."""
    here = SimpleNamespace(get_current_device=lambda: 0, get_current_stream=lambda device: 0)
    monkeypatch.setattr(replay, "driver", SimpleNamespace(active=here))
    begin = tape.Tape.__init__

    def on_device(self, tensors):
        begin(self, tensors)
        self.device = 0

    monkeypatch.setattr(tape.Tape, "__init__", on_device)
    asked = repeat.may_repeat
    for module in (ops.runner.run, ops.runner.backward, ops.runner.traced_plan):
        monkeypatch.setattr(module, "may_repeat", lambda device, entries: asked(torch.device("cuda"), entries))

    def repeated(self, step, covered, written):
        if written or repeat.why_not_repeated(step.operation, covered, self.request.recipe):
            return None
        return repeat.RepeatedStep(step.indices, self.request.recipe, reads_tf32=True)

    monkeypatch.setattr(program.Program, "_repeated", repeated)
    replay.forget()


def num_repeated() -> int:
    """How many steps are kept to be repeated."""
    steps = (kept for kept in replay._all if not isinstance(kept, replay.Replays))
    return sum(type(found) is Repeated for kept in steps for found in kept.kept.values())


def num_repeated_calls() -> int:
    """How many passes of compiled calls are kept to be repeated."""
    gc.collect()
    plans = [plan for plan in gc.get_objects() if type(plan) is TracedPlan]
    kept = [found for plan in plans for run in plan._runs.values() for one in run.kept for found in one.kept.values()]
    return [type(found) for found in kept].count(Repeated)


def dense(dtype=torch.bfloat16, device="cpu", fusions=None, **options) -> Sequential:
    torch.manual_seed(1)
    about = {"device": device, "dtype": dtype}
    return Sequential(
        ops.LayerNorm(64, **about),
        ops.Linear(64, 256, **about, **options),
        ops.SwiGLU(),
        ops.Linear(128, 64, **about, **options),
        fusions=fusions,
    )


def experts(dtype=torch.bfloat16, device="cuda", stacked=True, fusions=None, **options) -> Sequential:
    torch.manual_seed(1)
    about = {"device": device, "dtype": dtype, "stacked": stacked, **options}
    mlp = (ops.GroupedLinear(4, 128, 256, **about), ops.ScaledSwiGLU(), ops.GroupedLinear(4, 128, 128, **about))
    return Sequential(*mlp, fusions=fusions)


def moe_layer(dtype=torch.bfloat16, device="cuda") -> Sequential:
    torch.manual_seed(1)
    about = {"device": device, "dtype": dtype}
    return Sequential(
        ops.MakeExtraOutput("residual"),
        ops.RMSNorm(128, **about),
        ops.Router(128, 4, 2, **about),
        ops.Dispatch(4),
        ops.GroupedLinear(4, 128, 256, bias=False, **about),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(4, 128, 128, bias=False, **about),
        ops.Combine(),
        ops.AddExtraInput("residual"),
    )


def step(model: Sequential, recipe, step: int = 0, rows: int = 96, grad: bool = True) -> list[Tensor]:
    """Output, gradients and main_grads of a step with its own numbers and sizes, one group empty."""
    weight = next(model.parameters())
    generator = torch.Generator(weight.device).manual_seed(step)
    options = {"device": weight.device, "generator": generator}
    torch.manual_seed(step)  # of stochastic rounding
    features = weight.shape[-1]
    x = torch.randn(rows, features, **options).to(weight.dtype).requires_grad_(grad)
    extras = {}
    if "split_sizes" in model.layout().consumed:
        sizes = torch.randint(0, rows // 4, (4,), **options)
        sizes[step % 4] = 0
        extras = {"split_sizes": sizes, "scales": torch.rand(rows, **options).requires_grad_(grad)}
    with autocast(recipe=recipe):
        y = model(x, **extras)
    if not grad:
        return [y.clone()]
    leaves = [x, *(e for e in extras.values() if e.requires_grad), *model.parameters()]
    for leaf in leaves:
        leaf.grad = None
    y.backward(torch.randn(y.shape, **options).to(y.dtype))
    placeholders = {id(p) for p in leaves if hasattr(p, "grad_added_to_main_grad")}  # without values
    grads = [leaf.grad for leaf in leaves if leaf.grad is not None and id(leaf) not in placeholders]
    return [t.clone() for t in (y, *grads, *(p.main_grad for p in leaves if hasattr(p, "main_grad")))]


def states_of(model: nn.Module) -> list[Tensor]:
    return [buffer.clone() for _, buffer in sorted(model.named_buffers())]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.nan_to_num(nan=3.0), b.nan_to_num(nan=3.0))


def check_steps(make, recipe, monkeypatch, steps=6, change=lambda model, step: None, at_least=1, **options) -> None:
    """Steps of a model, `change`d after each, are those of another that is never repeated."""
    before = num_repeated()
    model = make()
    found = []
    for at in range(steps):
        found.append(step(model, recipe, at, **options) + states_of(model))
        change(model, at)
    assert num_repeated() - before >= at_least
    for module in (ops.runner.run, ops.runner.backward):
        monkeypatch.setattr(module, "may_repeat", lambda device, entries: False)
    model = make()
    for at in range(steps):
        assert_same(found[at], step(model, recipe, at, **options) + states_of(model))
        change(model, at)


# ------------------------------------------------------------------------------------------------------- on the CPU


@pytest.mark.parametrize("recipe", RECIPES)
def test_dense_steps(recipe, repeating, monkeypatch):
    check_steps(dense, recipe, monkeypatch, at_least=2 if recipe == "nvfp4" else 4)


def test_dense_steps_without_gradients(repeating, monkeypatch):
    check_steps(dense, "mxfp8", monkeypatch, grad=False, at_least=2)


def test_a_step_that_takes_a_routing_map(repeating, monkeypatch):
    """Combine, with a new map in each step; maps with more than tensors are not repeated."""

    def run(at: int, kind=RoutingMap) -> list[Tensor]:
        torch.manual_seed(at)
        routing_map, _, _ = make_routing_map(torch.randint(0, 4, (10, 2)), 4)
        routing_map = kind(*routing_map.tensors())
        x = torch.randn(20, 8, requires_grad=True)
        y = model(x, routing_map=routing_map)
        y.backward(torch.randn(10, 8))
        return [y.detach(), x.grad]

    class Other(RoutingMap):
        pass

    model = Sequential(ops.Combine())
    found = [run(at) for at in range(5)]
    assert num_repeated() == 2
    [run(at, Other) for at in range(5)]
    assert num_repeated() == 2
    for module in (ops.runner.run, ops.runner.backward):
        monkeypatch.setattr(module, "may_repeat", lambda device, entries: False)
    for at in range(5):
        assert_same(found[at], run(at))


def change_everything(model: Sequential, at: int) -> None:
    """What users change between steps, one of them in each."""
    norm, first, _, last = model
    with torch.no_grad():
        match at:
            case 2:
                norm.eps = 0.5
            case 3:
                first.weight.data.mul_(2)
            case 4:
                first.weight.data = first.weight.data.clone() + 1
            case 5:
                last.weight = nn.Parameter(last.weight.flip(0))
            case 6:
                model[2] = ops.GEGLU()
            case 7:
                last.bias.requires_grad_(False)
            case 8:
                norm.zero_centered_gamma = True
            case 9:
                last.weight.requires_grad_(False)


@pytest.mark.parametrize("recipe", ("high_precision", "fp8_delayed", "mxfp8"))
def test_changes_are_seen(recipe, repeating, monkeypatch):
    check_steps(dense, recipe, monkeypatch, steps=16, change=change_everything, at_least=4)


def with_main_grad(flag: bool, make=dense, **options):
    def make_model() -> Sequential:
        model = make(accumulate_into_main_grad=True, **options)
        for name, weight in model.named_parameters():
            if weight.dim() > 1 and "weight" in name:
                weight.main_grad = torch.ones(weight.shape, device=weight.device)
                if flag:
                    weight.overwrite_main_grad, weight.grad_added_to_main_grad = True, False
        return model

    return make_model


def begin_step(model: Sequential, at: int) -> None:
    """The owner of main_grad takes it after every second microbatch, and moves a buffer once."""
    for weight in model.parameters():
        if hasattr(weight, "main_grad") and at == 4:
            weight.main_grad = weight.main_grad.clone()
        if hasattr(weight, "grad_added_to_main_grad"):
            assert weight.grad_added_to_main_grad
            weight.grad_added_to_main_grad = at % 2 == 0


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("recipe", ("high_precision", "fp8_current"))
def test_main_grad(flag, recipe, repeating, monkeypatch):
    check_steps(with_main_grad(flag), recipe, monkeypatch, steps=9, change=begin_step, at_least=4)


def in_scopes(by: float):
    """A change that moves the weights by so much after every third step, between scopes."""
    scopes = []

    def change(model: Sequential, at: int) -> None:
        if at % 3 == 0:
            for scope in scopes:
                scope.__exit__(None, None, None)
            with torch.no_grad():
                for weight in model.parameters():
                    weight.add_(by)
            scopes[:] = [constant_weights(model)]
            scopes[0].__enter__()

    return change


@pytest.mark.parametrize("recipe", ("fp8_delayed", "mxfp8"))
def test_constant_weights(recipe, repeating, monkeypatch):
    check_steps(dense, recipe, monkeypatch, steps=10, change=in_scopes(0.25), at_least=4)


def test_weights_are_quantized_once_a_scope(repeating):
    model = dense()
    with constant_weights(model):
        for at in range(5):
            step(model, "mxfp8", at)
        before = step(model, "mxfp8", 9)
        model[1].weight.data.mul_(3)  # which nobody sees
        assert_same(step(model, "mxfp8", 9)[:1], before[:1])
    assert not torch.equal(step(model, "mxfp8", 9)[0], before[0])


def in_one_scope():
    """A change that opens a scope before the second step, and changes weights inside of it in ways that are seen."""
    scopes = []

    def change(model: Sequential, at: int) -> None:
        _, first, _, last = model
        with torch.no_grad():
            match at:
                case 0:
                    scopes[:] = [constant_weights(model)]
                    scopes[0].__enter__()
                case 4:
                    first.weight.mul_(2)
                    last.weight.mul_(2)
                case 7:
                    for linear in (first, last):
                        linear.weight.data = linear.weight.data.clone() + 1
                case 10:
                    for linear in (first, last):
                        linear.weight = nn.Parameter(linear.weight.flip(0))
                case 13:
                    for linear in (first, last):
                        linear.load_state_dict({name: -tensor for name, tensor in linear.state_dict().items()})

    return change


@pytest.mark.parametrize("recipe", ("fp8_delayed", "fp8_current", "mxfp8"))
def test_changes_in_a_scope_are_seen(recipe, repeating, monkeypatch):
    check_steps(dense, recipe, monkeypatch, steps=16, change=in_one_scope(), at_least=4)


def test_a_scope_serves_passes_of_all_kinds_in_turn(repeating, monkeypatch):
    """What one was given is not given to another that needs something else; for the same nothing is prepared again."""
    asked = []
    prepare = ops.Linear.prepare_weights
    monkeypatch.setattr(ops.Linear, "prepare_weights", lambda self, ctx: asked.append(ctx) or prepare(self, ctx))
    model, other = dense(), dense()
    with constant_weights(model):
        for at in range(16):
            recipe, grad = ("fp8_current", "mxfp8")[at // 8], at // 4 % 2 == 1
            with torch.inference_mode(at % 8 == 3):
                found, expected = (step(m, recipe, at, grad=grad) for m in (model, other))
            assert_same(found, expected)
        for at in range(2):
            asked.clear()
            step(model, "mxfp8", at)
        assert not asked
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            assert_same(step(model, "mxfp8", 9), step(other, "mxfp8", 9))
        assert asked


@pytest.mark.parametrize("recipe", ("fp8_current", "mxfp8"))
def test_steps_of_fused_optimizers_end_a_scope_and_the_next_one_sees_other_writes(recipe, repeating):
    models = dense(), dense()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1, fused=True) for model in models]
    for at in range(4):
        with constant_weights(models[0]):
            for microbatch in range(4):
                assert_same(*(step(model, recipe, 10 * at + microbatch) for model in models))
            for optimizer in optimizers:
                optimizer.step()  # moves no version
            assert_same(*(step(model, recipe, at) for model in models))
        for model in models:
            model[1].weight.data.mul_(1.5)
    assert num_repeated() >= 4


def test_amaxes_that_an_evaluation_did_not_record_are_recorded_by_training(repeating, monkeypatch):
    def run() -> list[list[Tensor]]:
        model = dense()
        found = []
        with constant_weights(model):
            for at in range(12):
                found.append(step(model, "fp8_delayed", at, grad=at // 4 == 1) + states_of(model))
        return found

    found = run()
    assert num_repeated() >= 4
    for module in (ops.runner.run, ops.runner.backward):
        monkeypatch.setattr(module, "may_repeat", lambda device, entries: False)
    for one, other in zip(found, run(), strict=True):
        assert_same(one, other)


def test_a_weight_that_is_used_twice(repeating, monkeypatch):
    def tied():
        torch.manual_seed(1)
        model = Sequential(ops.Linear(64, 64, accumulate_into_main_grad=True), ops.LayerNorm(64), ops.Linear(64, 64))
        model[2].weight = model[0].weight
        model[2].accumulate_into_main_grad = True
        model[0].weight.main_grad = torch.ones(64, 64)
        model[0].weight.overwrite_main_grad, model[0].weight.grad_added_to_main_grad = True, False
        return model

    check_steps(tied, "high_precision", monkeypatch, change=begin_step, at_least=3)


def test_counted_casts_are_counted(repeating):
    model = dense()
    for at in range(4):
        step(model, "mxfp8", at)
    with count_casts(model) as counted:
        step(model, "mxfp8", 5)
    assert counted.counts["1.input"].elements == 96 * 64


class Doubled(ops.Linear):
    """An operation of a user's, derived from one that may be repeated."""

    factor = 2

    def fuser_forward(self, ctx, x, extras):
        y, outputs = super().fuser_forward(ctx, x, extras)
        return y * Doubled.factor, outputs


class Renamed(ops.Linear):
    """One that replaces nothing."""

    def __init__(self) -> None:
        super().__init__(64, 64)


def test_what_a_subclass_replaces_is_not_repeated(repeating):
    model = Sequential(Doubled(64, 64))
    for at in range(4):
        first = step(model, None, at)
    Doubled.factor = 3
    try:
        assert not torch.equal(first[0], step(model, None, 3)[0])
    finally:
        Doubled.factor = 2
    assert not num_repeated()
    assert repeat.is_repeatable(Renamed) and not repeat.is_repeatable(Doubled)
    assert not repeat.is_repeatable(ops.Dropout) and not repeat.is_repeatable(nn.Linear)


def losses(client: str, recipe, make=dense) -> tuple[list[float], int]:
    """Of a training with what users bring: the optimizer, the wrapper, or a write that no version counter sees; and how
    many steps are kept at its end."""
    model = make(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=client == "fused optimizer")
    generator = torch.Generator().manual_seed(3)
    x, wanted = (torch.randn(32, 64, generator=generator) for _ in range(2))
    found = []
    for at in range(8):
        optimizer.zero_grad()

        def run(x):
            with autocast(recipe=recipe):
                return model(x)

        if client.startswith("checkpoint"):
            y = checkpoint(run, x.clone().requires_grad_(), use_reentrant=client == "checkpoint, reentrant")
        else:
            y = run(x)
        loss = (y - wanted).square().mean()
        loss.backward()
        optimizer.step()
        if client == "foreign write":
            for parameter in model.parameters():
                parameter.data.copy_(parameter.data * 0.9)
        if client == "state dict" and at == 4:
            model.load_state_dict({name: value * 0.5 for name, value in model.state_dict().items()})
        found.append(loss.item())
    return found, num_repeated()


@pytest.mark.parametrize("recipe", ("high_precision", "fp8_current", "mxfp8"))
@pytest.mark.parametrize(
    "client", ["fused optimizer", "checkpoint", "checkpoint, reentrant", "foreign write", "state dict"]
)
def test_what_users_bring_has_the_losses_of_steps_in_full(client, recipe, repeating, monkeypatch):
    found, number = losses(client, recipe)
    assert number >= 2
    for module in (ops.runner.run, ops.runner.backward):
        monkeypatch.setattr(module, "may_repeat", lambda device, entries: False)
    assert losses(client, recipe) == (found, 0)
    assert len(set(found)) == len(found)


def test_a_repeated_step_that_fails_leaves_no_amax(repeating, monkeypatch):
    """As when memory is short: what it recorded is forgotten with the step."""
    model, other = dense(), dense()
    for at in range(5):
        step(model, "fp8_delayed", at), step(other, "fp8_delayed", at)

    def fail(self, key, tensors, addresses, function):
        result = run(self, key, tensors, addresses, function)
        calls.append(self)
        if len(calls) == 2:  # the last linear layer, behind the norm
            raise torch.OutOfMemoryError("no memory")
        return result

    run, calls = replay.Kept.run, []
    monkeypatch.setattr(replay.Kept, "run", fail)
    with pytest.raises(torch.OutOfMemoryError):
        step(model, "fp8_delayed", 77)
    monkeypatch.setattr(replay.Kept, "run", run)
    assert_same(states_of(model), states_of(other))
    for at in range(5, 8):
        assert_same(step(model, "fp8_delayed", at), step(other, "fp8_delayed", at))


def test_a_state_that_is_removed_within_a_step_begins_anew(repeating, monkeypatch):
    """As in a step in full: what it had recorded is gone with it."""

    repeats = []

    def run(model: Sequential) -> list[Tensor]:
        without = {name: t.clone() for name, t in model.state_dict().items() if "quantizer_" not in name}
        for at in range(5):
            step(model, "fp8_delayed", at)
        with autocast(recipe="fp8_delayed"):
            model(torch.full((96, 64), 3.0, dtype=torch.bfloat16))
            repeats.append(num_repeated())
            model.load_state_dict(without)
        return step(model, "fp8_delayed", 7) + states_of(model)

    found = run(dense())
    assert repeats[0] >= 4
    for module in (ops.runner.run, ops.runner.backward):
        monkeypatch.setattr(module, "may_repeat", lambda device, entries: False)
    assert_same(found, run(dense()))


def test_a_recipe_of_ones_own_is_not_repeated(repeating, monkeypatch):
    """Its quantizers may be others the next time."""
    chosen = [recipes.MXFP8BlockScaling()]
    custom = recipes.CustomRecipe(lambda role: chosen[0].quantizer(role))

    class Own(recipes.MXFP8BlockScaling):
        def quantizer(self, role):
            return chosen[0].quantizer(role)

    for recipe in (custom, Own()):
        model, other = dense(), dense()
        for at in range(6):
            chosen[0] = (recipes.Float8CurrentScaling if at > 3 else recipes.MXFP8BlockScaling)()
            assert_same(step(model, recipe, at), step(other, chosen[0], at))


def test_explain_names_what_runs_in_full():
    model = Sequential(ops.LayerNorm(64), ops.Dropout(0.5), Doubled(64, 64))
    lines = model.explain(device="cuda", recipe="mxfp8").splitlines()
    assert "  not repeated: Dropout is not repeatable. (operation 1)" in lines
    assert "  not repeated: Doubled is not repeatable. (operation 2)" in lines
    assert sum("not repeated" in line for line in lines) == 2
    custom = recipes.CustomRecipe(recipes.MXFP8BlockScaling().quantizer)
    assert "not repeated: CustomRecipe is not repeatable. (operation 0)" in model.explain(device="cuda", recipe=custom)
    assert "not repeated: on the split path" in Sequential(ops.GroupedLinear(2, 64, 64), path="split").explain(
        device="cuda"
    )
    assert "not repeated" not in model.explain()


def test_the_backward_of_changed_weights_is_refused(repeating):
    model = dense()
    for at in range(4):
        step(model, None, at)
    x = torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True)
    y = model(x)
    with torch.no_grad():
        model[3].weight.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        y.sum().backward()


def test_saved_tensors_go_through_hooks(repeating, monkeypatch):
    def hooked(model, recipe, at):
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: t.clone(), lambda t: t * 1 if t.is_floating_point() else t
        ):
            return step(model, recipe, at)

    model, other = dense(), dense()
    found = [hooked(model, None, at) for at in range(5)]
    monkeypatch.setattr(ops.runner.run, "may_repeat", lambda device, entries: False)
    for at in range(5):
        assert_same(found[at], hooked(other, None, at))


def test_recipes_may_change(repeating, monkeypatch):
    chosen = [
        recipes.MXFP8BlockScaling(),
        None,
        recipes.Float8CurrentScaling(power_2_scale=True),
        recipes.DelayedScaling(),
    ]
    model, other = dense(), dense()
    found = [step(model, chosen[at % 4], at) for at in range(20)]
    for module in (ops.runner.run, ops.runner.backward):
        monkeypatch.setattr(module, "may_repeat", lambda device, entries: False)
    for at in range(20):
        assert_same(found[at], step(other, chosen[at % 4], at))


@pytest.mark.parametrize("recipe", (None, "fp8_current", "fp8_delayed"))
@pytest.mark.slow
def test_compiled_calls_are_repeated_as_a_whole(recipe, repeating):
    """Both passes are; with states that record, the steps within them are."""
    torch.compiler.reset()
    before = num_repeated_calls()
    model, other = dense(fusions=()), dense(fusions=())
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    for at, rows in enumerate((96, 96, 96, 96, 64, 96, 64, 64, 64, 96)):
        assert_same(step(compiled, recipe, at, rows), step(model, recipe, at, rows))
    assert_same(states_of(other), states_of(model))
    assert num_repeated_calls() - before == (0 if recipe == "fp8_delayed" else 4)


# ------------------------------------------------------------------------------------------- as on a GPU, but launches

CASES = [  # with each release of Triton those of the recipe whose kernels count as well
    pytest.param(recipe, f"{kind}{once}", marks=[pytest.mark.triton] if recipe == "fp8_current" else [])
    for recipe in repeated_launches.RECIPES
    for kind in repeated_launches.KINDS
    for once in ("", ", weights once")
]


@cache
def launches_of(recipe: str) -> dict[str, list]:
    """By case."""
    command = [sys.executable, "-m", "tests.repeated_launches", recipe]
    done = subprocess.run(command, env=compiling("launches"), capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.skipif(why_not_repeated() is not None, reason=str(why_not_repeated()))
@pytest.mark.rest
@pytest.mark.timeout(1800)  # the first of a recipe compiles for its others
@pytest.mark.parametrize(("recipe", "case"), CASES)
def test_repeated_steps_launch_what_steps_in_full_launch(recipe, case):
    number, same, repeated, calls, backwards, zeroing = launches_of(recipe)[case]
    assert same and number > 8 and repeated >= 2
    # of one step, and of weights without adapters
    assert (calls, backwards) == ((1, 1) if case.startswith(("fused", "main_grad")) else (0, 0))
    # amaxes; other kernels here have no counters
    assert zeroing >= 1 or not (recipe == "fp8_current" and case.startswith("fused"))


# ------------------------------------------------------------------------------------------------------- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "make",
    [
        experts,
        lambda: experts(fusions=()),
        lambda: experts(stacked=False),
        lambda: dense(device="cuda"),
        moe_layer,
        with_main_grad(True, experts, bias=False),
        with_main_grad(False, experts, stacked=False),
    ],
    ids=["experts", "unfused", "apart", "dense", "layer", "main_grad", "main_grad-apart"],
)
def test_steps(make, recipe, monkeypatch):
    flags = begin_step if any(hasattr(p, "main_grad") for p in make().parameters()) else lambda model, at: None
    check_steps(make, recipe, monkeypatch, steps=8, change=flags)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")  # torch.compile's own
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_layers_of_experts(recipe):
    torch.compiler.reset()
    model, other = moe_layer(), moe_layer()
    compiled = torch.compile(other, fullgraph=True, dynamic=True, backend="aot_eager")
    before = num_repeated_calls()
    for at, rows in enumerate((96, 96, 96, 96, 64, 96, 64, 64, 64, 96)):
        found = step(compiled, recipe, at, rows)
        assert_same(found, step(model, recipe, at, rows))
    assert num_repeated_calls() - before == (0 if recipe == "fp8_delayed" else 4)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_steps_without_gradients(recipe, monkeypatch):
    check_steps(experts, recipe, monkeypatch, grad=False)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ("fp8_delayed", "fp8_current", "nvfp4"))
def test_constant_weights_on_a_gpu(recipe, monkeypatch):
    check_steps(experts, recipe, monkeypatch, steps=10, change=in_scopes(0.05))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ("mxfp8", NVFP4))
def test_kept_values_have_the_bits_of_codes(recipe):
    model, other = experts(), experts()
    with constant_weights(model):
        for at in range(5):
            assert_same(step(model, recipe, at), step(other, recipe, at))


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ("high_precision", "fp8_current"))
def test_float32_follows_the_setting_of_tf32(recipe, monkeypatch):
    setting = torch.backends.cuda.matmul
    before = setting.fp32_precision

    def change(model, at):
        setting.fp32_precision = "tf32" if at in (3, 4, 5, 8) else "ieee"

    try:
        check_steps(lambda: experts(torch.float32), recipe, monkeypatch, steps=10, change=change)
    finally:
        setting.fp32_precision = before
