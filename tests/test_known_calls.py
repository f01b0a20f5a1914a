"""Calls that are made again by one look-up give what they give in full, and see every change in between.

On a CPU no call is but where tests ask for it (`made_again`), of operations that torch computes.
"""

import contextlib
import gc
import random
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import ops.runner.backward
import ops.runner.run
from fuser import Sequential, autocast, constant_weights, ops
from ops.runner import known_backward, known_calls, program, repeat
from recipes import DelayedScaling, pending
from recipes.cast_counts import count_casts
from recipes.triton import layouts, replay
from tests.test_repeat import (  # noqa: F401  # a fixture is used by its name
    RECIPES,
    assert_same,
    begin_step,
    dense,
    experts,
    in_scopes,
    losses,
    repeating,
    states_of,
    step,
)


def counted(monkeypatch) -> SimpleNamespace:
    """How many calls and backwards are made again by one look-up."""
    ways = SimpleNamespace(forward=0, backward=0)

    def count(owner, name, what):
        function = getattr(owner, name)

        def counts(*args):
            setattr(ways, what, getattr(ways, what) + 1)
            return function(*args)

        monkeypatch.setattr(owner, name, counts)

    count(known_calls.RepeatedCall, "run", "forward")
    count(known_backward.KnownBackward, "_again", "backward")
    return ways


@pytest.fixture
def made_again(repeating, monkeypatch):  # noqa: F811
    """Let calls on the CPU are made again too. Yields how many did."""
    monkeypatch.setattr(known_calls, "is_on_gpu", lambda x: True)

    def repeated(self, step, covered, written):
        if written or repeat.why_not_repeated(step.operation, covered, self.request.recipe):
            return None
        return repeat.RepeatedStep(step.indices, self.request.recipe, reads_tf32=False)

    monkeypatch.setattr(program.Program, "_repeated", repeated)
    return counted(monkeypatch)


def linear(dtype=torch.bfloat16, **options) -> Sequential:
    torch.manual_seed(1)
    return Sequential(ops.Linear(64, 64, dtype=dtype, **options))


def in_full(monkeypatch) -> None:
    for module in (ops.runner.run, ops.runner.backward):
        monkeypatch.setattr(module, "may_repeat", lambda device, entries: False)


def check(
    make, recipe, made_again, monkeypatch, change=lambda model, at: None, steps=8, forwards=3, backwards=3, **options
):
    """Steps of a model, `change`d after each, are those of another in full; so many at least are made again."""
    model = make()
    found = []
    for at in range(steps):
        found.append(step(model, recipe, at, **options) + states_of(model))
        change(model, at)
    assert made_again.forward >= forwards and made_again.backward >= backwards
    in_full(monkeypatch)
    before, model = (made_again.forward, made_again.backward), make()
    for at in range(steps):
        assert_same(found[at], step(model, recipe, at, **options) + states_of(model))
        change(model, at)
    assert before == (made_again.forward, made_again.backward)


@pytest.mark.parametrize("recipe", RECIPES)
def test_steps(recipe, made_again, monkeypatch):
    # Stochastic rounding draws numbers on the CPU in a way that is not recorded.
    few = {"forwards": 0, "backwards": 0} if recipe == "nvfp4" else {}
    check(linear, recipe, made_again, monkeypatch, **few)


ALGORITHMS = {
    "most recent": DelayedScaling(amax_compute_algo="most_recent"),
    "amax by a function": DelayedScaling(amax_compute_algo=lambda history: history.amax(0)),
    "scale by a function": DelayedScaling(scaling_factor_compute_algo=lambda amax, scale, largest, recipe: scale + 1),
}


@pytest.mark.parametrize("recipe", ALGORITHMS.values(), ids=ALGORITHMS)
def test_steps_of_delayed_scaling(recipe, made_again, monkeypatch):
    check(linear, recipe, made_again, monkeypatch)


@pytest.mark.parametrize("recipe", [DelayedScaling(), ALGORITHMS["amax by a function"]], ids=["launch", "function"])
def test_a_backward_ends_its_step_within_what_is_repeated_where_nothing_is_reduced(recipe, made_again, monkeypatch):
    ends = []
    end_steps_of = pending.end_steps_of
    monkeypatch.setattr(pending, "end_steps_of", lambda given: ends.append(len(given)) or end_steps_of(given))

    def steps(model, count) -> list[list[torch.Tensor]]:
        found = []
        for at in range(count):
            for module in (ops.runner.backward, known_backward):
                monkeypatch.setattr(module, "may_reduce", lambda reduces=at >= count // 2: reduces)
            del ends[:]
            found.append(step(model, recipe, at) + states_of(model))
            if made_again.backward and recipe == DelayedScaling():
                assert ends == ([2] if at < count // 2 else [2, 1])  # of forward alone, of both
        return found

    found = steps(linear(), 16)
    assert made_again.backward >= 8
    made_again.backward = 0
    in_full(monkeypatch)
    for some, other in zip(found, steps(linear(), 16), strict=True):
        assert_same(some, other)


def test_steps_where_torch_compares_no_layouts(made_again, monkeypatch):
    monkeypatch.setattr(layouts, "_guards", None)
    check(linear, "fp8_delayed", made_again, monkeypatch)


@pytest.mark.parametrize("recipe", ("high_precision", "fp8_delayed"))
def test_a_tensor_that_stands_in_two_places_in_some_steps(recipe, made_again, monkeypatch):
    """What goes in forward is dy, or a state, or another tensor that lies alike."""

    def run(model) -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        found = []
        for at in range(36):
            x = torch.randn(64, 64, dtype=torch.bfloat16, requires_grad=True)
            kept, *_ = torch.randn(3, 64, 64, dtype=torch.bfloat16)
            with autocast(recipe=recipe):
                y = model(kept if at % 5 == 4 else x)
            dy = (x.detach(), kept, x, torch.randn_like(y), model[0].weight.detach(), model[0].weight)[at // 6]
            with torch.no_grad():
                y.backward(dy.detach() if at % 2 else dy)
            found.append([y.detach(), *gradients_of(model), *([] if x.grad is None else [x.grad])])
        return found

    found = run(linear())
    assert made_again.forward >= 20 and made_again.backward >= 20
    in_full(monkeypatch)
    for some, other in zip(found, run(linear()), strict=True):
        assert_same(some, other)


def test_x_that_is_an_extra_tensor_too_in_some_steps(made_again, monkeypatch):
    def run() -> list[list[torch.Tensor]]:
        torch.manual_seed(0)
        model, found = Sequential(ops.AddExtraInput("residual")), []
        for at in range(24):
            x, other = torch.randn(2, 8, 64, dtype=torch.bfloat16).requires_grad_().unbind()
            y = model(x, residual=x if at // 4 % 2 else other)
            found.append([y.detach(), *torch.autograd.grad(y, x, torch.randn_like(y))])
        return found

    found = run()
    assert made_again.forward >= 8 and made_again.backward >= 8
    in_full(monkeypatch)
    for some, other in zip(found, run(), strict=True):
        assert_same(some, other)


def gradients_of(model) -> list[torch.Tensor]:
    gradients = [parameter.grad for parameter in model.parameters()]
    model.zero_grad()
    return gradients


def test_steps_of_an_operation_alone(made_again, monkeypatch):
    operation, other = linear()[0], linear()[0]
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    found = [torch.autograd.grad(operation(x).sum(), (x, operation.weight)) for _ in range(6)]
    assert made_again.forward >= 3 and made_again.backward >= 3
    in_full(monkeypatch)
    for gradients in found:
        assert_same(gradients, torch.autograd.grad(other(x).sum(), (x, other.weight)))


def test_steps_without_gradients(made_again, monkeypatch):
    check(linear, "fp8_delayed", made_again, monkeypatch, grad=False, backwards=0)


def change_everything(model: Sequential, at: int) -> None:
    """What users change between steps, one of them in each, with steps between that know the last change."""
    if at % 4:
        return
    operation = model[0]
    with torch.no_grad():
        match at // 4:
            case 1:
                operation.weight.data.mul_(2)
            case 2:
                operation.weight.data = operation.weight.data.clone() + 1
            case 3:
                operation.weight = nn.Parameter(operation.weight.flip(0))
            case 4:
                operation.bias.requires_grad_(False)
            case 5:
                operation.weight.requires_grad_(False)
            case 6:
                model.eval()
            case 7:
                operation.weight.data = operation.weight.data.t()
            case 8:
                operation.bias = None
            case 9:
                model.append(ops.SwiGLU())
            case 10:
                del model[1]
            case 11:
                model.register_forward_hook(lambda model, args, y: y * 2)
            case 12:
                operation.register_forward_hook(lambda operation, args, y: y + 1)
            case 13:
                replay.forget()
            case 14:
                model.to(torch.float32)
            case 15:
                operation.set_recipe("mxfp8")


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ("high_precision", "fp8_delayed", "mxfp8"))
def test_changes_are_seen(recipe, made_again, monkeypatch):
    check(linear, recipe, made_again, monkeypatch, change_everything, steps=66, forwards=20, backwards=20)


class Halved(nn.Module):
    def forward(self, weight):
        return weight / 2


def test_a_weight_that_is_computed_later_on_is_seen(made_again, monkeypatch):
    def change(model, at):
        if at == 3:
            parametrize.register_parametrization(model[0], "weight", Halved())
        if at == 5:
            parametrize.remove_parametrizations(model[0], "weight")

    check(linear, "high_precision", made_again, monkeypatch, change, steps=12, forwards=4, backwards=4)


def test_what_goes_in_may_change(made_again, monkeypatch):
    """Rows, strides, dtypes, whether x or dy lies apart, and which gradients are computed."""

    def run(model) -> list[list[torch.Tensor]]:
        found = []
        for at in range(36):
            torch.manual_seed(at)
            x = torch.randn(2 * (1 + at // 18), 16, 128, dtype=torch.float32 if at % 7 == 6 else torch.bfloat16)
            x = (x[..., ::2] if at % 3 == 1 else x[..., :64]).requires_grad_(at % 4 != 3)
            with torch.set_grad_enabled(at % 5 != 4), torch.inference_mode(at % 11 == 10):
                y = model(x)
            dy = torch.randn(16, dtype=y.dtype)[:, None].expand(y.shape) if at % 2 else torch.randn_like(y)
            found.append([y.detach()])
            if y.requires_grad:
                wanted = (x, model[0].weight) if x.requires_grad and at % 9 else (model[0].weight,)
                found[-1] += torch.autograd.grad(y, wanted, dy)
        return found

    found = run(linear())
    assert made_again.forward > 10 and made_again.backward > 3
    in_full(monkeypatch)
    for one, other in zip(found, run(linear()), strict=True):
        assert_same(one, other)


def known(made_again, recipe=None) -> tuple[Sequential, torch.Tensor]:
    """A model whose calls are made again, with the next y."""
    model = linear(accumulate_into_main_grad=False)
    for at in range(6):
        step(model, recipe, at)
    assert made_again.forward and made_again.backward
    made_again.forward = made_again.backward = 0
    with autocast(recipe=recipe):
        y = model(torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True))
    assert made_again.forward == 1
    return model, y


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (lambda operation: operation.weight.mul_(2), "changed in place"),
        (lambda operation: setattr(operation.weight, "data", operation.weight.data.clone()), "got other data"),
        (lambda operation: setattr(operation, "weight", nn.Parameter(torch.ones(64, 64))), "was replaced"),
        (lambda operation: setattr(operation, "in_features", 32), "cannot be set"),
    ],
)
def test_backward_refuses_what_changed_since_forward(change, sentence, made_again):
    model, y = known(made_again)
    with pytest.raises((RuntimeError, AttributeError), match=sentence):
        with torch.no_grad():
            change(model[0])
        y.backward(torch.randn_like(y))
    assert not made_again.backward


def test_a_parameter_that_was_taken_away_or_added_unseen_is_noticed(made_again):
    for change in (lambda held: held.pop("bias"), lambda held: held.update(other=nn.Parameter(torch.ones(2)))):
        model, y = known(made_again)
        change(model[0]._parameters)
        with contextlib.suppress(RuntimeError, KeyError, AttributeError):
            y.backward(torch.randn_like(y))
        assert not made_again.backward


def with_main_grad(flag: bool):
    def make() -> Sequential:
        model = linear(accumulate_into_main_grad=True)
        weight = model[0].weight
        weight.main_grad = torch.ones(64, 64)
        if flag:
            weight.overwrite_main_grad, weight.grad_added_to_main_grad = True, False
        return model

    return make


@pytest.mark.parametrize("flag", [False, True])
@pytest.mark.parametrize("recipe", ("high_precision", "fp8_delayed", "fp8_current"))
def test_main_grad(flag, recipe, made_again, monkeypatch):
    """Added and overwritten in turn, in a buffer that moves, is given anew, or missing once, which is said."""

    def change(model, at):
        weight = model[0].weight
        if weight.requires_grad:
            begin_step(model, at)
        if at == 9:
            weight.main_grad = torch.zeros(64, 64, dtype=torch.bfloat16)
        if at == 12:
            weight.requires_grad_(False)
        if at == 15:
            weight.requires_grad_(True)

    check(with_main_grad(flag), recipe, made_again, monkeypatch, change, steps=21, forwards=8, backwards=6)


def test_a_missing_main_grad_is_named_and_nothing_is_lost(made_again):
    model = with_main_grad(False)()
    for at in range(5):
        step(model, None, at)
    assert made_again.backward
    weight, before = model[0].weight, made_again.backward
    x = torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True)
    y, dy = model(x), torch.randn(96, 64).to(torch.bfloat16)
    kept = weight.main_grad
    del weight.main_grad
    with pytest.raises(RuntimeError, match="In operation 0 \\(Linear\\): .*main_grad"):
        y.backward(dy)
    assert made_again.backward == before
    weight.main_grad = kept


def test_gradients_that_go_to_main_grad_from_now_on_do(made_again):
    model, y = known(made_again)
    model[0].accumulate_into_main_grad = True
    model[0].weight.main_grad = torch.zeros(64, 64)
    y.backward(torch.randn_like(y))
    assert model[0].weight.main_grad.any() and not made_again.backward


def test_a_graph_that_is_retained_has_the_same_gradients_again(made_again):
    model, y = known(made_again, "fp8_delayed")
    dy = torch.randn_like(y)
    first, second, third = (
        torch.autograd.grad(y, model[0].weight, dy, retain_graph=retain) for retain in (True, True, False)
    )
    assert_same(first, second)
    assert_same(first, third)
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(y, model[0].weight, dy)


def test_a_second_backward_of_a_freed_graph_says_what_is_needed(made_again):
    model, y = known(made_again)
    dy = torch.randn_like(y)
    torch.autograd.grad(y, model[0].weight, dy)
    assert made_again.backward == 1
    with pytest.raises(RuntimeError, match="retain_graph=True"):
        torch.autograd.grad(y, model[0].weight, dy)


def test_double_backward_is_refused(made_again):
    model, y = known(made_again)
    with pytest.raises(RuntimeError, match="create_graph"):
        torch.autograd.grad(y, model[0].weight, torch.randn_like(y), create_graph=True)


def test_batches_of_gradients_are_refused(made_again):
    model, y = known(made_again)
    with pytest.raises(NotImplementedError, match="is_grads_batched"):
        torch.autograd.grad(y, model[0].weight, torch.randn(3, *y.shape).to(y.dtype), is_grads_batched=True)


@pytest.mark.parametrize("recipe", ("high_precision", "fp8_current", "mxfp8"))
@pytest.mark.parametrize(
    "client", ["fused optimizer", "checkpoint", "checkpoint, reentrant", "foreign write", "state dict"]
)
def test_what_users_bring_has_the_losses_of_steps_in_full(client, recipe, made_again, monkeypatch):
    found, _ = losses(client, recipe, linear)
    assert made_again.forward >= 3 or client == "checkpoint"
    in_full(monkeypatch)
    assert losses(client, recipe, linear) == (found, 0)
    assert len(set(found)) == len(found)


def test_what_looks_on_sees_a_call_in_full(made_again):
    """Profiles, counted casts, hooks for saved tensors."""
    model, _ = known(made_again, "mxfp8")
    made_again.forward = made_again.backward = 0
    with profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiled:
        step(model, "mxfp8")
    assert {event.key for event in profiled.key_averages()} >= {"fuser::linear", "fuser::linear_backward"}
    with count_casts(model) as counts:
        step(model, "mxfp8")
    assert counts.counts["0.input"].elements == 96 * 64
    packed = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        step(model, "mxfp8")
    assert packed
    assert not made_again.forward and not made_again.backward
    step(model, "mxfp8")
    assert made_again.forward == made_again.backward == 1


@pytest.mark.parametrize("recipe", ("high_precision", "fp8_delayed", "fp8_current", "mxfp8"))
def test_constant_weights(recipe, made_again, monkeypatch):
    """In scopes of three steps between which weights move."""
    check(linear, recipe, made_again, monkeypatch, in_scopes(0.25), steps=19, forwards=6, backwards=6)


def change_in_scope():
    """A change that opens a scope before the fourth step, and changes weights inside of it in ways that are seen."""
    scopes = []

    def change(model: Sequential, at: int) -> None:
        operation = model[0]
        with torch.no_grad():
            match at:
                case 4:
                    scopes[:] = [constant_weights(model)]
                    scopes[0].__enter__()
                case 8:
                    operation.weight.mul_(2)
                case 12:
                    operation.weight.data = operation.weight.data.clone() + 1
                case 16:
                    operation.weight = nn.Parameter(operation.weight.flip(0))
                case 20:
                    operation.load_state_dict({name: -tensor for name, tensor in operation.state_dict().items()})
                case 24:
                    scopes.pop().end()

    return change


@pytest.mark.parametrize("recipe", ("fp8_delayed", "fp8_current", "mxfp8"))
def test_changes_in_a_scope_are_seen(recipe, made_again, monkeypatch):
    model = linear()
    change = change_in_scope()
    found = []
    for at in range(28):
        found.append(step(model, recipe, at) + states_of(model))
        change(model, at)
    assert made_again.forward >= 10 and made_again.backward >= 10
    in_full(monkeypatch)
    model, change = linear(), change_in_scope()
    for at in range(28):
        assert_same(found[at], step(model, recipe, at) + states_of(model))
        change(model, at)


def test_weights_are_quantized_once_a_scope(made_again):
    model = linear()
    with constant_weights(model):
        for at in range(6):
            step(model, "mxfp8", at)
        before, made_again.forward = step(model, "mxfp8", 9), 0
        model[0].weight.data.mul_(3)  # which nobody sees
        assert_same(step(model, "mxfp8", 9)[:1], before[:1])
        assert made_again.forward == 1
    assert not torch.equal(step(model, "mxfp8", 9)[0], before[0])


def test_a_graph_of_a_scope_that_has_ended_has_the_gradients_of_its_copies(made_again, monkeypatch):
    def run(model):
        found = []
        for at in range(8):
            torch.manual_seed(at)
            x = torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True)
            with autocast(recipe="fp8_current"):
                if at % 2:
                    with constant_weights(model):
                        ys = [model(x) for _ in range(3)]
                else:
                    ys = [model(x)]
            found.append([*ys, *(torch.autograd.grad(y, x, torch.ones_like(y))[0] for y in ys)])
        return found

    found = run(linear())
    assert made_again.forward > 3 and made_again.backward > 3
    in_full(monkeypatch)
    for one, other in zip(found, run(linear()), strict=True):
        assert_same(one, other)


def test_tensors_that_stand_in_for_parameters(made_again, monkeypatch):
    """Which lie as these do, and are computed: `torch.func.functional_call` in turn with calls of the model."""

    def run(model):
        found = []
        for at in range(24):
            torch.manual_seed(at)
            x = torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True)
            dy = torch.randn(96, 64).to(torch.bfloat16)
            if at % 6 != 5:
                found.append(torch.autograd.grad(model(x), (x, model[0].weight), dy))
                continue
            factor = torch.randn(64, 1, dtype=torch.bfloat16, requires_grad=True)
            y = torch.func.functional_call(model, {"0.weight": model[0].weight.detach() * factor}, (x,))
            found.append(torch.autograd.grad(y, (x, factor), dy))
        return found

    found = run(linear())
    assert made_again.forward >= 4 and made_again.backward >= 4
    in_full(monkeypatch)
    for one, other in zip(found, run(linear()), strict=True):
        assert_same(one, other)


def test_within_distributed_data_parallel(made_again, monkeypatch):
    """And without it in turn: the first call within each wrapper runs in full, which checks what it reduces."""

    def run() -> list:
        model = linear()
        wrapped = [DistributedDataParallel(model) for _ in range(2)]
        found = []
        for at in range(18):
            torch.manual_seed(at)
            x, dy = torch.randn(2, 96, 64).to(torch.bfloat16)
            with autocast(recipe="fp8_delayed"):
                y = (model, *wrapped)[at // 3 % 3](x)
            model.zero_grad()
            y.backward(dy)
            found.append([y.detach(), model[0].weight.grad.clone(), *states_of(model)])
        return found

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = run()
        assert made_again.forward >= 8 and made_again.backward >= 8
        in_full(monkeypatch)
        for one, other in zip(found, run(), strict=True):
            assert_same(one, other)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("reshard", [False, True])
@pytest.mark.parametrize("recipe", ("high_precision", "fp8_current", "fp8_delayed"))
def test_within_fsdp2(reshard, recipe, made_again, monkeypatch):
    """Weights are gathered for each pass, into memory that is freed in between, and a fused optimizer writes shards."""

    def run() -> list:
        model = linear()
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)), reshard_after_forward=reshard)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        found = []
        for at in range(8):
            torch.manual_seed(at)
            x, dy = torch.randn(2, 96, 64).to(torch.bfloat16)
            with autocast(recipe=recipe):
                y = model(x.requires_grad_())
            y.backward(dy)
            found.append([y.detach(), x.grad, model[0].weight.grad.full_tensor().clone(), *states_of(model)])
            optimizer.step()
            optimizer.zero_grad()
        return found

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        found = run()
        assert made_again.forward >= 3 and made_again.backward >= 3
        in_full(monkeypatch)
        for one, other in zip(found, run(), strict=True):
            assert_same(one, other)
        assert not torch.equal(found[0][2], found[-1][2])
    finally:
        dist.destroy_process_group()


def test_two_threads_that_share_a_model(made_again, monkeypatch):
    model = linear()
    xs = torch.randn(2, 40, 96, 64).to(torch.bfloat16)
    for x in xs[0, :4]:
        model(x).sum().backward()
    model[0].weight.grad = None
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda own: [model(x).detach() for x in own], xs))
    assert made_again.forward > 70
    in_full(monkeypatch)
    for own, ys in zip(xs, found, strict=True):
        assert_same(ys, [linear()(x).detach() for x in own])


@pytest.mark.parametrize("recipe", ("high_precision", "fp8_delayed"))
def test_nothing_is_kept_alive(recipe, made_again):
    """Neither what went in, nor, without a collection, the model."""
    model = linear()
    for at in range(6):
        step(model, recipe, at)
    x = torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True)
    with autocast(recipe=recipe):
        y = model(x)
    y.backward(torch.randn_like(y))
    assert made_again.forward and made_again.backward
    went_in = weakref.ref(x)
    seen = [weakref.ref(thing) for thing in (model[0], model[0].weight, *model.buffers())]
    del x, y
    assert went_in() is None
    gc.disable()
    try:
        del model
        assert [thing() for thing in seen] == [None] * len(seen)
    finally:
        gc.enable()


def test_names_that_are_missing_or_unknown_are_refused(made_again):
    model = Sequential(ops.ScaledSwiGLU())
    x, scales = torch.randn(8, 32, requires_grad=True), torch.rand(8)
    for _ in range(4):
        model(x, scales=scales).sum().backward()
    assert made_again.forward and made_again.backward
    with pytest.raises(ValueError, match="scales"):
        model(x)
    with pytest.raises(ValueError, match="other"):
        model(x, scales=scales, other=scales)
    with pytest.raises(ValueError, match="other"):
        model(x, other=scales)
    with pytest.raises(TypeError, match="no tensor"):
        model(x, scales=[1.0] * 8)
    with pytest.raises(TypeError, match="layout"):
        model(x.detach().to_sparse(), scales=scales)


def test_a_call_that_fails_says_where_and_leaves_no_amax(made_again, monkeypatch):
    """As when memory is made_again: what it recorded is forgotten with the step."""
    model, other = linear(), linear()
    for at in range(5):
        step(model, "fp8_delayed", at), step(other, "fp8_delayed", at)

    def fail(*args):
        raise torch.OutOfMemoryError("no memory")

    pipeline = model.layout().pipeline
    (known_call,) = pipeline.known.values()
    ((size, last),) = pipeline.last_known.items()
    assert last is known_call
    pipeline.last_known[size] = known_call._replace(repeated=known_call.repeated._replace(again=fail))
    with pytest.raises(torch.OutOfMemoryError, match="no memory") as raised:
        step(model, "fp8_delayed", 77)
    assert raised.value.__notes__ == ["In operation 0 (Linear)."]
    pipeline.last_known[size] = known_call
    assert_same(states_of(model), states_of(other))
    for at in range(5, 8):
        assert_same(step(model, "fp8_delayed", at), step(other, "fp8_delayed", at))


def test_batch_invariance_is_part_of_what_decides(made_again):
    model, _ = known(made_again)
    keys = len(model.layout().pipeline.known)
    for _ in range(3):
        with autocast(batch_invariant=True):
            model(torch.randn(96, 64, dtype=torch.bfloat16, requires_grad=True))
    assert len(model.layout().pipeline.known) == keys + 1


def test_no_more_calls_are_kept_than_said(made_again, monkeypatch):
    monkeypatch.setattr(known_calls, "MOST_CALLS", 3)
    model = linear()
    for rows in range(1, 9):
        for at in range(3):
            step(model, None, at, rows=8 * rows)
            assert len(model.layout().pipeline.known) <= 3
    assert made_again.forward == 8


RANDOM_RECIPES = ("high_precision", "fp8_delayed", "fp8_current", "mxfp8", "fp8_block")


class RandomClient:
    """Changes a model of one linear layer between its calls, as numbers of a seed say; it may hold graphs of earlier
    calls, and runs their backwards later."""

    def __init__(self, seed: int) -> None:
        self.random, self.seed = random.Random(seed), seed
        torch.manual_seed(seed)
        self.model = linear(accumulate_into_main_grad=seed % 3 == 0)
        self.operation = self.model[0]
        self.recipe, self.rows = self.random.choice(RANDOM_RECIPES), 32
        self.scopes: list[constant_weights] = []
        self.hooks: list = []
        self.graphs: list[tuple] = []
        self.found: list = []

    def run(self, steps: int) -> list:
        for at in range(steps):
            weight = self.operation.weight
            if not hasattr(weight, "main_grad"):
                weight.main_grad = torch.zeros(64, 64)
            if self.random.random() < 0.3:
                with torch.no_grad():
                    self.random.choice(self.changes())()
            torch.manual_seed(1000 * self.seed + at)
            self.forward()
            if self.graphs and self.random.random() < 0.8:
                self.backward(*self.graphs.pop(self.random.randrange(len(self.graphs))))
            self.found += states_of(self.model)
        for scope in self.scopes:
            scope.end()
        return self.found

    def changes(self) -> list:
        operation, model = self.operation, self.model

        def scope():
            if self.scopes:
                self.scopes.pop().end()
            else:
                self.scopes.append(constant_weights(model))
                self.scopes[0].__enter__()

        def hook():
            if self.hooks:
                self.hooks.pop().remove()
            else:
                self.hooks.append(operation.register_forward_hook(lambda operation, args, y: y * 2))

        return [
            lambda: operation.weight.data.mul_(1.25),
            lambda: operation.weight.mul_(1.125),
            lambda: setattr(operation.weight, "data", operation.weight.data.clone()),
            lambda: setattr(operation, "weight", nn.Parameter(operation.weight.flip(0).clone())),
            lambda: operation.weight.requires_grad_(not operation.weight.requires_grad),
            lambda: operation.bias.data.add_(0.5),
            lambda: model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}),
            lambda: setattr(operation, "accumulate_into_main_grad", not operation.accumulate_into_main_grad),
            lambda: model.train(not model.training),
            lambda: setattr(self, "recipe", self.random.choice(RANDOM_RECIPES)),
            lambda: setattr(self, "rows", self.random.choice((16, 32, 48))),
            replay.forget,
            scope,
            hook,
        ]

    def forward(self) -> None:
        model, mode = self.model, self.random.random()
        x = torch.randn(self.rows, 64).to(torch.bfloat16).requires_grad_(self.random.random() < 0.85)
        with contextlib.ExitStack() as stack:
            stack.enter_context(autocast(recipe=self.recipe))
            if mode < 0.1:
                stack.enter_context(torch.no_grad())
            elif mode < 0.12:
                stack.enter_context(torch.inference_mode())
            elif mode < 0.15:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t))
            if mode > 0.95 and x.requires_grad and self.recipe != "fp8_delayed":
                y = checkpoint(model, x, use_reentrant=mode > 0.97)
            elif mode > 0.93:
                y = torch.func.functional_call(model, {"0.weight": self.operation.weight.detach() * 2}, (x,))
            else:
                y = model(x)
        self.found.append(y.detach().clone())
        if y.requires_grad:
            self.graphs.append((x, y))

    def backward(self, x: torch.Tensor, y: torch.Tensor) -> None:
        mode, dy = self.random.random(), torch.randn(y.shape).to(y.dtype)
        leaves = (x, *self.model.parameters())
        for leaf in leaves:
            leaf.grad = None
        if mode < 0.05:
            with torch.no_grad():
                self.operation.weight.mul_(1)
        try:
            if mode < 0.15:
                y.backward(dy, retain_graph=True)
            if mode < 0.25 and x.requires_grad:
                self.found.append(torch.autograd.grad(y, x, dy)[0])
            elif mode < 0.3:
                y.backward(dy.t().contiguous().t())
            elif mode < 0.35:
                y.backward(dy[:1].expand(y.shape))
            else:
                y.backward(dy)
        except RuntimeError as error:
            self.found.append(str(error))
        placeholders = {id(leaf) for leaf in leaves if hasattr(leaf, "grad_added_to_main_grad")}  # without values
        self.found += [leaf.grad.clone() for leaf in leaves if leaf.grad is not None and id(leaf) not in placeholders]
        self.found += [leaf.main_grad.clone() for leaf in leaves if hasattr(leaf, "main_grad")]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_clients(seed, made_again, monkeypatch):
    found = RandomClient(seed).run(120)
    assert made_again.forward > 15 and made_again.backward
    in_full(monkeypatch)
    for one, other in zip(found, RandomClient(seed).run(120), strict=True):
        if isinstance(one, str) or isinstance(other, str):
            assert one == other
        else:
            assert_same([one], [other])


# ------------------------------------------------------------------------------------------------------- on the GPU


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("stacked", (True, False))
def test_experts(recipe, stacked, monkeypatch):
    made_again = counted(monkeypatch)
    check(lambda: experts(stacked=stacked), recipe, made_again, monkeypatch)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ("high_precision", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"))
def test_experts_in_scopes(recipe, monkeypatch):
    made_again = counted(monkeypatch)
    check(experts, recipe, made_again, monkeypatch, in_scopes(0.05), steps=13, forwards=3, backwards=3)


def change_experts(model: Sequential, at: int) -> None:
    first, activation, last = model
    with torch.no_grad():
        match at:
            case 4:
                first.weight.data.mul_(2)
            case 8:
                last.weight.data = last.weight.data.clone() + 1
            case 12:
                last.weight = nn.Parameter(last.weight.flip(0))
            case 16:
                first.bias.requires_grad_(False)
            case 20:
                first.weight.requires_grad_(False)
            case 24:
                model.to(torch.float16)
            case 28:
                first.weight.data = first.weight.data.mT.contiguous().mT
            case 32:
                model[1] = ops.ScaledSwiGLU(interleave=32) if hasattr(activation, "interleave") else activation


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ("high_precision", "fp8_delayed", "fp8_current", "mxfp8"))
def test_changed_experts(recipe, monkeypatch):
    made_again = counted(monkeypatch)
    check(experts, recipe, made_again, monkeypatch, change_experts, steps=36, forwards=10, backwards=10)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ("high_precision", "fp8_current"))
def test_torch_autocast(recipe, monkeypatch):
    """On and off in turn, backward within and outside of it."""
    made_again = counted(monkeypatch)

    def run(model):
        found = []
        for at in range(16):
            torch.manual_seed(at)
            x = torch.randn(64, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)
            given = {"split_sizes": torch.tensor([10, 0, 30, 20], device="cuda"), "scales": torch.rand(64).cuda()}
            autocasts = torch.autocast("cuda", torch.bfloat16, enabled=at % 4 != 3)
            with autocast(recipe=recipe), autocasts:
                y = model(x, **given)
                if at % 2:
                    found.append([y, *torch.autograd.grad(y.float().sum(), (x, *model.parameters()))])
            if not at % 2:
                found.append([y, *torch.autograd.grad(y.float().sum(), (x, *model.parameters()))])
        return found

    found = run(experts())
    assert made_again.forward >= 8 and made_again.backward >= 3
    in_full(monkeypatch)
    for one, other in zip(found, run(experts()), strict=True):
        assert_same(one, other)


def saved_states(make) -> tuple[dict, dict]:
    """A state dict with states in alphabetical order, as safetensors gives them, and one without."""
    model = make()
    for at in range(3):
        step(model, "fp8_delayed", at)
    saved = dict(sorted((name, tensor.clone()) for name, tensor in model.state_dict().items()))
    return saved, {name: tensor for name, tensor in saved.items() if "quantizer" not in name}


def without_states_at_last(model, saved, plain):
    model.load_state_dict(saved)
    for at in range(5):
        step(model, "fp8_delayed", at)
    model.load_state_dict(plain)


def with_states_at_last(model, saved, plain):
    model.load_state_dict(plain)
    for at in range(5):
        step(model, "fp8_delayed", at)
    model.load_state_dict(plain)
    model.load_state_dict(saved)


def one_role_anew(model, saved, plain):
    for at in range(5):
        step(model, "fp8_delayed", at)
    operation = next(operation for operation in model if hasattr(operation, "quantizer_input_scale"))
    for name in ("quantizer_input_amax_history", "quantizer_input_scale"):
        delattr(operation, name)


def of_inference_mode(model, saved, plain):
    for at in range(5):
        step(model, "fp8_delayed", at)
    with torch.inference_mode():
        states = {name: tensor.clone() for name, tensor in saved.items() if name not in plain}
    model.load_state_dict(states, strict=False, assign=True)


@pytest.mark.parametrize("kind", ["made again", "repeated"])
@pytest.mark.parametrize("load", [without_states_at_last, with_states_at_last, one_role_anew, of_inference_mode])
def test_states_that_a_checkpoint_brings_in_another_order(load, kind, request, monkeypatch):
    """All have the shapes of other roles' states."""
    request.getfixturevalue("made_again" if kind == "made again" else "repeating")
    make = linear if kind == "made again" else dense

    def run() -> list:
        model = make()
        load(model, *saved_states(make))
        found = [step(model, "fp8_delayed", at) + states_of(model) for at in range(5, 11)]
        return [[t.float() for t in one] for one in found]

    found = run()
    in_full(monkeypatch)
    for one, other in zip(found, run(), strict=True):
        assert_same(one, other)


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("kind", ["made again", "repeated"])
def test_each_trial_begins_with_a_checkpoint_without_states(kind, grad, request, monkeypatch):
    request.getfixturevalue("made_again" if kind == "made again" else "repeating")

    def run() -> list:
        model = (linear if kind == "made again" else dense)()
        plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found = []
        for _ in range(6):
            model.load_state_dict(plain)
            found += [step(model, "fp8_delayed", at, grad=grad) + states_of(model) for at in range(3)]
        return found

    found = run()
    in_full(monkeypatch)
    for one, other in zip(found, run(), strict=True):
        assert_same(one, other)


@pytest.mark.slow
def test_histories_of_two_lengths_in_turn(made_again, monkeypatch):
    def run() -> list:
        model, found = linear(), []
        both = [DelayedScaling(amax_history_len=length) for length in (4, 16)]
        for at in range(28):
            found.append(step(model, both[at // 4 % 2], at) + states_of(model))
        return found

    found = run()
    assert made_again.forward >= 3
    in_full(monkeypatch)
    for one, other in zip(found, run(), strict=True):
        assert_same(one, other)


@pytest.mark.slow
def test_states_die_with_a_model_that_was_in_a_scope(made_again):
    model = linear()
    for at in range(6):
        step(model, "fp8_delayed", at)
    with constant_weights(model):
        for at in range(6):
            step(model, "fp8_delayed", at)
    assert made_again.forward
    seen = [weakref.ref(tensor) for tensor in (*model.buffers(), *model.parameters())]
    gc.collect()
    gc.disable()
    try:
        del model
        assert not [ref for ref in seen if ref() is not None]
    finally:
        gc.enable()


def test_what_has_no_address_runs_in_full(made_again):
    model = linear()
    model[0].register_buffer("mask", torch.eye(3).to_sparse())
    step(model, "high_precision")
    leaked = []
    torch.func.grad(lambda t: leaked.append(t) or t.sum())(torch.ones(8, 64))
    model = linear(dtype=torch.float32)
    for _ in range(4):
        y = model(torch.randn(8, 64))
        y.backward(torch.ones_like(y))
    model(torch.randn(8, 64)).backward(leaked[0])


def test_a_method_that_an_instance_replaces_is_called_each_time(made_again):
    model, called = linear(), []
    for at in range(4):
        step(model, "high_precision", at)
    own = model[0].fuser_forward
    model[0].fuser_forward = lambda *given: called.append(1) or own(*given)
    for at in range(5):
        step(model, "high_precision", at)
    assert len(called) == 5


def test_the_first_call_names_what_a_call_in_full_names(made_again, monkeypatch):
    def wrong():
        scales = torch.ones(4, device="meta")
        Sequential(ops.ScaledSwiGLU())(torch.ones(4, 8, dtype=torch.long), scales=scales)

    with pytest.raises((TypeError, ValueError)) as found:
        wrong()
    monkeypatch.setattr(known_calls, "is_on_gpu", lambda x: False)
    with pytest.raises(found.type, match=re.escape(str(found.value))):
        wrong()


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ("high_precision", "fp8_delayed", "fp8_current"))
def test_experts_with_main_grad(recipe, monkeypatch):
    made_again = counted(monkeypatch)

    def make() -> Sequential:
        model = experts(accumulate_into_main_grad=True, bias=False)
        for weight in model.parameters():
            weight.main_grad = torch.ones(weight.shape, device="cuda")
            weight.overwrite_main_grad, weight.grad_added_to_main_grad = True, False
        return model

    check(make, recipe, made_again, monkeypatch, begin_step, steps=10)


@pytest.mark.gpu
@pytest.mark.parametrize("fused", (True, False))
def test_optimizers_whose_writes_move_no_version(fused, monkeypatch):
    made_again = counted(monkeypatch)

    def run() -> list:
        model = experts()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
        found = []
        for at in range(8):
            found.append(step(model, "fp8_current", at))
            optimizer.step()
        return found

    found = run()
    assert made_again.forward >= 3 and made_again.backward >= 3
    in_full(monkeypatch)
    for one, other in zip(found, run(), strict=True):
        assert_same(one, other)
