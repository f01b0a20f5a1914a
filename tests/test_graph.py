"""Graphs of modules: a replay is what the module would do, and making them leaves no trace.

On a CPU a replay runs the module again, so these tests hold the logic there; with a CUDA device they hold the graphs.
"""

import gc
from contextlib import nullcontext
from copy import deepcopy
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from fuser import Sequential, autocast, ops
from fuser.graph import make_graphed_callables
from fuser.graph.capture import CudaRecorder
from fuser.graph.instance import Sample
from fuser.schedule import Schedule
from ops.products import main_grad
from recipes import CustomRecipe, DelayedScaling, MixedScaling, Quantizer
from tests import main_grad_cases as cases
from tests.reference import assert_close, assert_same_bits, no_host_sync, random_sizes
from tests.test_every_recipe import EVERY

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = ["fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", "nvfp4"]


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda":  # filling new memory is a kernel of its own, which graphs would repeat
        torch.utils.deterministic.fill_uninitialized_memory = False
    return request.param


def experts(device, dtype=torch.bfloat16, **switches):
    torch.manual_seed(0)
    return Sequential(
        ops.GroupedLinear(4, 64, 128, bias=False, dtype=dtype, device=device, **switches),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(4, 64, 64, bias=True, dtype=dtype, device=device, **switches),
    )


def batch(seed, device, dtype=torch.bfloat16, rows=96, active=None):
    """x, extras and dy that depend on the seed, with other splits each time."""
    generator = torch.Generator().manual_seed(seed)
    sizes = random_sizes(generator, 4, rows if active is None else active)
    x = torch.randn(rows, 64, generator=generator).to(device, dtype).requires_grad_()
    scales = torch.rand(rows, generator=generator).to(device).requires_grad_()
    dy = torch.randn(rows, 64, generator=generator).to(device, dtype)
    return x, {"split_sizes": torch.tensor(sizes, device=device), "scales": scales}, dy


def run(call, module, seed, recipe=None, *, wgrad=None, active=None):
    """One forward and backward: what comes of it, copied. `.grad` of the parameters is accumulated."""
    parameter = next(module.parameters())
    torch.manual_seed(seed)  # for recipes with stochastic rounding
    x, extras, dy = batch(seed, parameter.device, parameter.dtype, active=active)
    with autocast(recipe) if recipe else nullcontext():
        y = call(x, **extras)
    found = {"y": y.detach().clone()}
    y.backward(dy)
    if wgrad is not None:
        wgrad()
    found |= {"dx": x.grad.clone(), "dscales": extras["scales"].grad.clone()}
    return found


def grads(module):
    return {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}


def graphed(module, **options):
    x, extras, _ = batch(99, next(module.parameters()).device, next(module.parameters()).dtype)
    return make_graphed_callables(module, (x,), sample_kwargs=extras, **options)


# Replays are what the module does.


@pytest.mark.parametrize(
    "recipe", [None, *RECIPES, pytest.param(MixedScaling("fp8_current", "mxfp8", "mxfp8"), id="mixed")]
)
def test_fifty_replays_have_the_bits_of_the_module(recipe, device):
    eager = experts(device)
    module = deepcopy(eager)
    call = graphed(module, recipe=recipe)
    seeds = range(50 if device == "cuda" else 6)
    for seed in seeds:
        active = [None, 50, 0][seed % 3]
        assert_same_bits(run(call, module, seed, recipe, active=active), run(eager, eager, seed, recipe, active=active))
        assert_same_bits(grads(module), grads(eager))
    assert_same_bits(dict(module.named_buffers()), dict(eager.named_buffers()))


@pytest.mark.parametrize("recipe", [None, *RECIPES])
@pytest.mark.parametrize("accumulate", [False, True])
def test_microbatches_of_a_schedule_with_splits_of_their_own(recipe, accumulate, device):
    """Three microbatches, wgrads outstanding, other splits in each: eager and from graphs."""
    schedule = Schedule.parse("F1 F1 B1 F1 B1 W1 B1 W1 W1")
    results = []
    for captured in (False, True):
        module = experts(device, delay_wgrad_compute=True, accumulate_into_main_grad=accumulate)
        cases.give_main_grads(module, 0.0)
        calls, wgrad = [module] * 3, module.backward_dw
        if captured:
            x, extras, _ = batch(99, device)
            calls = make_graphed_callables(
                [module], [(x,)], sample_kwargs=[extras], schedule=schedule, recipe=recipe, debug=True
            )
        found, pending = [], {}
        for step in range(2):
            torch.manual_seed(step)
            for entry in schedule.entries:
                m = entry.microbatch
                if entry.name == "F1":
                    x, extras, dy = batch(3 * step + m, device, active=[None, 40, 0][m])
                    with autocast(recipe):
                        pending[m] = calls[m](x, **extras), x, extras, dy
                    found.append({"y": pending[m][0].detach().clone()})
                elif entry.name == "B1":
                    y, x, extras, dy = pending.pop(m)
                    y.backward(dy)
                    found.append({"dx": x.grad, "dscales": extras["scales"].grad})
                else:
                    (calls[m].backward_dw if captured else wgrad)()
            found.append({name: w.main_grad.clone() for name, w in cases.weights_of(module).items()})
        found.append({name: p.grad for name, p in module.named_parameters() if not (accumulate and "weight" in name)})
        results.append([*found, dict(module.named_buffers())])
    for ours, expected in zip(results[1], results[0], strict=True):
        assert_same_bits(ours, expected)


@EVERY
def test_a_replay_with_other_splits_has_the_bits_of_the_module(recipe, device):
    eager = experts(device)
    module = deepcopy(eager)
    call = graphed(module, recipe=recipe)
    for sizes in ([96, 0, 0, 0], [0, 0, 0, 96], [24] * 4, [0] * 4, [1, 0, 94, 1], [0, 3, 0, 4]):
        results = []
        for forward, owner in ((eager, eager), (call, module)):
            owner.zero_grad()
            x, extras, dy = batch(1, device)
            extras["split_sizes"] = torch.tensor(sizes, device=device)
            torch.manual_seed(1)  # for recipes with stochastic rounding
            with autocast(recipe):
                y = forward(x, **extras)
            y.backward(dy)
            assert not y[sum(sizes) :].any() and not x.grad[sum(sizes) :].any()
            results.append({"y": y, "dx": x.grad, "dscales": extras["scales"].grad, **grads(owner)})
        assert_same_bits(results[1], results[0])


@pytest.mark.parametrize("recipe", [None, "fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("accumulate", [False, True])
def test_replays_repeat_bit_for_bit(recipe, accumulate, device):
    module = experts(device, delay_wgrad_compute=True, accumulate_into_main_grad=accumulate)
    cases.give_main_grads(module, 0.0)
    call = graphed(module, recipe=recipe)
    first = None
    for _ in range(20 if device == "cuda" else 3):
        module.zero_grad()
        for weight in cases.weights_of(module).values():
            weight.main_grad.fill_(0.5)
        found = run(call, module, 1, recipe, wgrad=call.backward_dw)
        found |= {name: w.main_grad if accumulate else w.grad for name, w in cases.weights_of(module).items()}
        found = {name: tensor.clone() for name, tensor in found.items()}
        first = first or found
        assert_same_bits(found, first)


@pytest.mark.parametrize("warmups", [0, 1, 3])
def test_any_number_of_warm_ups_will_do(warmups, device):
    eager = experts(device)
    module = deepcopy(eager)
    called = []
    call = graphed(
        module, num_warmup_iters=warmups, recipe="fp8_delayed",
        pre_warmup_hook=lambda: called.append("before"), post_warmup_hook=lambda: called.append("after"),
    )  # fmt: skip
    assert called == ["before", "after"]
    assert_same_bits(run(call, module, 1, "fp8_delayed"), run(eager, eager, 1, "fp8_delayed"))


def test_an_eval_graph_gives_what_the_module_gives(device):
    module = experts(device).eval()
    call = graphed(module)
    x, extras, _ = batch(1, device)
    with torch.no_grad():
        assert torch.equal(call(x, **extras), module(x, **extras))
    with pytest.raises(RuntimeError, match=r"captured without backward .* under torch\.no_grad"):
        call(x, **extras)
    module.train()
    with torch.no_grad(), pytest.raises(RuntimeError, match="captured in eval mode and is in training mode now"):
        call(x, **extras)


def test_a_graph_made_without_gradients_is_forward_only(device):
    module = experts(device)
    with torch.no_grad():
        call = graphed(module)
        x, extras, _ = batch(1, device)
        assert torch.equal(call(x, **extras), module(x, **extras))


def test_several_modules_in_one_call(device):
    eager = [ops.Linear(32, 48, device=device), nn.Sequential(nn.Linear(48, 32, device=device), nn.GELU())]
    modules = deepcopy(eager)
    samples = [(torch.randn(8, n, device=device).requires_grad_(),) for n in (32, 48)]
    first, second = make_graphed_callables(modules, samples)
    for seed in range(3):
        results = []
        for calls, owners in ((eager, eager), ((first, second), modules)):
            torch.manual_seed(seed)
            x = torch.randn(8, 32, device=device).requires_grad_()
            y = calls[1](calls[0](x))
            y.square().sum().backward()
            results.append({"y": y, "dx": x.grad, **{f"{i}.{n}": g for i, m in enumerate(owners)
                                                     for n, g in grads(m).items()}})  # fmt: skip
        assert_same_bits(results[1], results[0])


def test_outputs_are_returned_as_the_module_does(device):
    module = Sequential(ops.MakeExtraOutput("branch"), ops.Linear(16, 16, device=device))
    x = torch.randn(4, 16, device=device).requires_grad_()
    call = make_graphed_callables(module, (x,), sample_kwargs={"outputs": ("branch",)})
    y, extras = call(x, outputs=("branch",))
    expected, others = module(x, outputs=("branch",))
    assert torch.equal(y, expected) and torch.equal(extras["branch"], others["branch"])
    with pytest.raises(ValueError, match=r"'outputs' is \(\), but was captured as \('branch',\)"):
        call(x, outputs=())


def test_dropout_draws_what_it_would_draw(device):
    eager = Sequential(ops.Linear(32, 32, device=device), ops.Dropout(0.5), nn.Dropout(0.3))
    module = deepcopy(eager)
    x = torch.randn(64, 32, device=device).requires_grad_()
    torch.manual_seed(7)
    call = make_graphed_callables(module, (x,))
    captured = [call(x).clone() for _ in range(4)]
    torch.manual_seed(7)
    assert all(torch.equal(y, eager(x)) for y in captured)
    assert not torch.equal(captured[0], captured[1])


def test_weights_may_change_in_place_between_replays(device):
    module = experts(device)
    call = graphed(module, recipe="mxfp8")
    for _ in range(3):
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.mul_(1.5)
        eager = deepcopy(module)
        assert_same_bits(run(call, module, 1, "mxfp8"), run(eager, eager, 1, "mxfp8"))


def test_quantized_weights_are_kept_between_microbatches(device):
    module = experts(device)
    call = graphed(module, recipe="mxfp8", cache_quantized_params=True)
    eager = deepcopy(module)
    for first in (True, False, False):
        found = run(lambda x, first=first, **extras: call(x, is_first_microbatch=first, **extras), module, 1)
        assert_same_bits(found, run(eager, eager, 1, "mxfp8"))
    with pytest.raises(TypeError, match="is_first_microbatch is None"):
        run(call, module, 1)


def test_grads_of_parameters_are_no_memory_of_the_graph(device):
    for clones in (True, False):
        module = experts(device)
        call = graphed(module, clone_param_grads_on_return=clones)
        run(call, module, 1)
        first = {name: p.grad for name, p in module.named_parameters()}
        kept = grads(module)
        module.zero_grad()
        run(call, module, 2)
        assert_same_bits(first, kept)


def test_a_parameter_that_skips_the_hooks_of_backward_gets_no_clone(device):
    """Its owner, who takes the gradient elsewhere, reads the graph's memory. Read at the capture."""
    module = nn.Linear(16, 16, device=device)
    module.weight.skip_backward_post_hook = True
    x = torch.randn(4, 16, device=device)
    call = make_graphed_callables(module, (x,))
    del module.weight.skip_backward_post_hook
    seen = {"weight": [], "bias": []}
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda d, name=name: seen[name].append((d.data_ptr(), d.clone())))
    for factor in (1.0, 2.0):
        (factor * call(x)).sum().backward()
    held = [d.data_ptr() for d in call._instance.param_grads]
    owns = [len({pointer for pointer, _ in seen[name]} & set(held)) for name in ("weight", "bias")]
    assert owns == [1, 0]
    ones = torch.ones(4, 16, device=device)
    for name, expected in (("weight", ones.T @ x), ("bias", ones.sum(0))):
        for factor, (_, gradient) in zip((1.0, 2.0), seen[name], strict=True):
            torch.testing.assert_close(gradient, factor * expected)


def test_split_sizes_on_the_host_are_copied_to_the_device(device):
    eager = experts(device)
    module = deepcopy(eager)
    x, extras, _ = batch(99, device)
    call = make_graphed_callables(
        module, (x,), sample_kwargs={**extras, "split_sizes": extras["split_sizes"].cpu()}
    )  # fmt: skip
    for seed in range(3):
        x, extras, _ = batch(seed, device)
        found, expected = call(x, **{**extras, "split_sizes": extras["split_sizes"].cpu()}), eager(x, **extras)
        assert torch.equal(found, expected)
        assert torch.equal(call(x, **extras), expected)


def test_only_split_sizes_are_moved():
    sizes, other = torch.tensor([3, 4]), torch.ones(2)
    sample = Sample((torch.ones(7, 2, device="meta"),), {"split_sizes": sizes, "other": other})
    sample.move({"split_sizes"}, torch.device("meta"))
    assert [form.device.type for form in sample.forms] == ["meta", "meta", "cpu"] and sample.moved == {1}
    assert sample.values[1].is_meta and sample.values[2] is other


@pytest.mark.parametrize("schedule", [None, "F1 F2 B2 B1"])
def test_capture_hooks_run_around_each_pass_of_warm_up_and_capture_and_never_at_a_replay(schedule, device):
    modules = [ops.Linear(16, 16, device=device) for _ in range(2)]
    called = []

    def hooks(number):
        def note(module, name):
            assert module is modules[number] and not (device == "cuda" and torch.cuda.is_current_stream_capturing())
            called.append((number, name))

        names = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")
        return {name: {7: lambda module, name=name: note(module, name)} for name in names}

    x = torch.randn(4, 16, device=device).requires_grad_()
    calls = make_graphed_callables(
        modules, [(x,)] * 2, 3, schedule=schedule, capture_time_hooks=[hooks(0), hooks(1)]
    )  # fmt: skip
    forward = [(number, f"forward_{when}") for number in (0, 1) for when in ("pre_hooks", "hooks")]
    backward = [(number, f"backward_{when}") for number in (1, 0) for when in ("pre_hooks", "hooks")]
    assert called == (forward + backward) * 4
    calls[1](calls[0](x)).sum().backward()
    assert len(called) == 32


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ([], ValueError, "capture_time_hooks has 0 entries for 1 modules"),
        ([{"pre_hooks": {}}], ValueError, "hooks 'pre_hooks', which do not exist. There are: 'forward_pre_hooks'"),
        ([print], TypeError, "Give a dict of hooks, or None"),
        ([{"forward_hooks": {0: lambda module: 1}}], RuntimeError, "'forward_hooks'\\] returned a value"),
    ],
)
def test_capture_hooks_are_checked(given, error, sentence, device):
    with pytest.raises(error, match=sentence):
        make_graphed_callables(ops.Linear(16, 16, device=device), (torch.randn(2, 16, device=device),),
                               capture_time_hooks=given)  # fmt: skip


def test_grads_of_inputs_that_are_leaves_are_no_memory_of_the_graph(device):
    module = ops.Linear(16, 16, device=device)
    x, other = (torch.randn(4, 16, device=device).requires_grad_() for _ in range(2))
    call = make_graphed_callables(module, (x,))
    call(x).sum().backward()
    kept = x.grad.clone()
    (2 * call(other)).sum().backward()
    assert torch.equal(x.grad, kept) and torch.equal(other.grad, 2 * kept)
    call(x).sum().backward()
    assert torch.equal(x.grad, 2 * kept)


def test_one_input_of_two_graphs_gets_both_gradients(device):
    modules = [ops.Linear(16, 16, device=device) for _ in range(3)]
    x = torch.randn(4, 16, device=device).requires_grad_()
    calls = make_graphed_callables(modules, [(x,)] * 3)
    sum(call(x).square().sum() for call in calls).backward()
    found, x.grad = x.grad, None
    sum(module(x).square().sum() for module in modules).backward()
    assert_close({"dx": found}, {"dx": x.grad})


# main_grad, delayed weight gradients, and what happens besides.


@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("setup", [{}, {"flag": False}, {"overwrite": True}, {"zero_out": True}], ids=str)
def test_gradients_land_as_they_do_without_a_graph(delay, accumulate, setup, device):
    switches = {"delay_wgrad_compute": delay, "accumulate_into_main_grad": accumulate}
    results = [steps_with_main_grad(captured, device, switches, setup) for captured in (False, True)]
    for expected, ours in zip(*[found for found, _ in results], strict=True):
        assert_same_bits(ours, expected)
    called = [calls for _, calls in results]
    if device == "cuda":  # autograd runs leaves that get nothing on a thread of their own
        called = [sorted(calls, key=str) for calls in called]
    assert called[0] == called[1]


def steps_with_main_grad(captured, device, switches, setup):
    """What three steps leave, and what was called in which order."""
    module = experts(device, **switches)
    cases.give_main_grads(module, 0.5, **setup)
    weights = cases.weights_of(module)
    arrived = []
    for operation in (module[0], module[2]):
        operation.register_wgrad_accumulation_and_reduce_hooks(lambda o=operation: arrived.append(o.out_features))
    for name, p in module.named_parameters():
        p.register_post_accumulate_grad_hook(
            lambda p, n=name: arrived.append((n, p.grad is None, getattr(p, "grad_added_to_main_grad", None)))
        )
        p.register_hook(lambda grad, name=name: arrived.append(name))
    call = graphed(module) if captured else module
    assert not arrived
    for weight in weights.values():
        assert (weight.main_grad == 0.5).all() and weight.grad is None
        assert not getattr(weight, "grad_added_to_main_grad", False)
    found = []
    for seed in range(3):
        for weight in weights.values():
            if setup.get("overwrite"):
                weight.grad_added_to_main_grad = False
            if switches["accumulate_into_main_grad"]:
                weight.grad = None
        found.append(run(call, module, seed, wgrad=call.backward_dw if switches["delay_wgrad_compute"] else None))
        found.append({name: w.main_grad.clone() for name, w in weights.items()})
        if switches["accumulate_into_main_grad"]:
            assert all((w.grad is None) is (setup.get("flag") is False) for w in weights.values())
        else:
            found.append(grads(module))
    return found, arrived


def test_a_placeholder_is_new_memory_at_each_replay(device):
    module = experts(device, accumulate_into_main_grad=True)
    cases.give_main_grads(module, 0.0, zero_out=True)
    call = graphed(module)
    held = []
    for seed in range(2):
        module.zero_grad()
        run(call, module, seed)
        held.append(module[0].weight.grad)
    assert held[0].data_ptr() != held[1].data_ptr()
    assert not held[0].any() and held[0].shape == module[0].weight.shape


def test_a_wgrad_that_is_outstanding_is_not_lost(device):
    module = experts(device, delay_wgrad_compute=True)
    call = graphed(module)
    run(call, module, 1)
    with pytest.raises(RuntimeError, match="F1@0 layer 0 was called, but the wgrad that B1@0 layer 0 left is"):
        run(call, module, 2)
    call.backward_dw()
    with pytest.raises(RuntimeError, match="W1@0 layer 0 was called, but F1@0 layer 0 was not"):
        call.backward_dw()
    assert not module.need_backward_dw()


def test_backward_dw_does_nothing_without_delay(device):
    module = experts(device)
    call = graphed(module)
    run(call, module, 1)
    before = grads(module)
    call.backward_dw()
    assert_same_bits(grads(module), before)


def test_main_grad_may_not_move(device):
    module = experts(device, accumulate_into_main_grad=True)
    cases.give_main_grads(module, 0.0)
    call = graphed(module)
    kept = module[0].weight.main_grad
    module[0].weight.main_grad = kept.clone()
    with pytest.raises(RuntimeError, match=r"weight\.main_grad has moved since the capture"):
        run(call, module, 1)
    module[0].weight.main_grad = kept
    run(call, module, 1)


def test_a_gradient_that_overwrites_is_not_replayed_as_one_that_adds(device):
    module = experts(device, accumulate_into_main_grad=True)
    cases.give_main_grads(module, 0.0, overwrite=True)
    call = graphed(module)
    run(call, module, 1)
    with pytest.raises(RuntimeError, match="captured as one that is written over what main_grad holds"):
        run(call, module, 2)


def test_amaxes_of_a_replay_belong_to_the_autocast_around_it(device):
    recipe = DelayedScaling(amax_history_len=4)
    eager = experts(device)
    module = deepcopy(eager)
    call = graphed(module, recipe=recipe)
    for owner, forward in ((eager, eager), (module, call)):
        for step in range(3):
            with autocast(recipe):  # two microbatches are one step of forward
                for microbatch in range(2):
                    run(forward, owner, 2 * step + microbatch)
    assert_same_bits(dict(module.named_buffers()), dict(eager.named_buffers()))


def test_a_graph_that_records_amaxes_does_not_run_without_gradients(device):
    module = experts(device)
    call = graphed(module, recipe="fp8_delayed")
    x, extras, _ = batch(1, device)
    with torch.no_grad(), pytest.raises(RuntimeError, match="its forward records amaxes"):
        call(x, **extras)
    with torch.no_grad():
        evaluated = graphed(module, recipe="fp8_delayed")
        state = {name: buffer.clone() for name, buffer in module.named_buffers()}
        with autocast("fp8_delayed"):
            assert torch.equal(evaluated(x, **extras), module(x, **extras))
    assert_same_bits(dict(module.named_buffers()), state)


# Nothing is left behind.


class Fails(nn.Module):
    """Fails in its n-th forward."""

    def __init__(self, at):
        super().__init__()
        self.left = at

    def forward(self, x):
        self.left -= 1
        if not self.left:
            raise ArithmeticError("as asked")
        return x * 2


def state_of(module, device):
    tensors = {f"buffer {name}": buffer.clone() for name, buffer in module.named_buffers()}
    tensors |= {f"grad {name}": grad for name, grad in grads(module).items()}
    tensors |= {f"main {name}": w.main_grad.clone() for name, w in cases.weights_of(module).items()}
    tensors["rng"] = torch.get_rng_state()
    if device == "cuda":
        tensors["cuda rng"] = torch.cuda.get_rng_state()
    return tensors


@pytest.mark.parametrize("fails", [None, 1, 2, 3, 4])
def test_making_graphs_disturbs_nothing_also_when_it_fails(fails, device):
    torch.manual_seed(0)
    last = Fails(fails) if fails else nn.Identity()
    norm = nn.BatchNorm1d(64, device=device)
    module = Sequential(*experts(device, torch.float32, accumulate_into_main_grad=True, delay_wgrad_compute=True),
                        ops.Dropout(0.5), norm, last)  # fmt: skip
    cases.give_main_grads(module, 0.5)
    module[0].weight.grad_added_to_main_grad = True
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    hooked = []
    module[2].weight.register_hook(hooked.append)
    with autocast("fp8_delayed") if not fails else nullcontext():
        before = state_of(module, device)
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            graphed(module, recipe="fp8_delayed")
    after = state_of(module, device)
    new = {name for name in after if name not in before}
    assert all(name.startswith("buffer") and "quantizer" in name for name in new) and (not fails or not new)
    assert all((after[name] == (1.0 if name.endswith("scale") else 0.0)).all() for name in new)
    assert_same_bits({name: after[name] for name in before}, before)
    assert gc.isenabled() and not hooked and not module.need_backward_dw()
    assert module[0].weight.grad_added_to_main_grad and not module[2].weight.grad_added_to_main_grad
    assert main_grad.recording() is None


def test_reset_frees_and_a_second_one_does_nothing(device):
    module = experts(device)
    call = graphed(module)
    run(call, module, 1)
    call.reset()
    call.reset()
    x, extras, _ = batch(1, device)
    with pytest.raises(RuntimeError, match="was reset"):
        call(x, **extras)


@pytest.mark.gpu
def test_reset_gives_the_memory_back():
    torch.utils.deterministic.fill_uninitialized_memory = False
    module = experts("cuda")

    def round_trip():
        call = graphed(module)
        module.zero_grad()
        run(call, module, 1)
        held = torch.cuda.memory_allocated()
        call.reset()
        module.zero_grad()
        return held

    round_trip()  # kernels, cuBLAS workspaces
    gc.collect()
    before = torch.cuda.memory_allocated()
    assert round_trip() > before
    del round_trip
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() == before


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", [None, *RECIPES])
def test_a_replay_waits_for_nothing(recipe):
    torch.utils.deterministic.fill_uninitialized_memory = False
    module = experts("cuda", delay_wgrad_compute=True)
    call = graphed(module, recipe=recipe)
    x, extras, dy = batch(1, "cuda")
    with no_host_sync():
        call(x, **extras).backward(dy)
        call.backward_dw()


@pytest.mark.gpu
def test_a_replay_is_one_launch_for_each_pass():
    torch.utils.deterministic.fill_uninitialized_memory = False
    module = experts("cuda", accumulate_into_main_grad=True)
    cases.give_main_grads(module, 0.0, flag=False)
    call = graphed(module)
    x, extras, dy = batch(1, "cuda")
    call(x, **extras).backward(dy)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities, acc_events=True) as profile:
        call(x, **extras).backward(dy)
        torch.cuda.synchronize()
    names = [event.name for event in profile.events()]
    assert names.count("cudaGraphLaunch") == 2
    assert names.count("cudaLaunchKernel") + names.count("cuLaunchKernelEx") < 8  # copies into buffers, .grad


class KeepsAnAddress(torch.autograd.Function):
    """y = 2 x, whose gradient it multiplies with what stands where 3 x stood: memory that it does not hold."""

    @staticmethod
    def forward(ctx, x):
        other = 3 * x
        ctx.others = CudaRecorder(x.device, None).unowned(other)
        return 2 * x

    @staticmethod
    def backward(ctx, dy):
        return dy * ctx.others


@pytest.mark.gpu
def test_memory_that_passes_have_freed_is_nan_for_the_next_one():
    torch.utils.deterministic.fill_uninitialized_memory = False

    class Faulty(nn.Module):
        def forward(self, x):
            return KeepsAnAddress.apply(x)

    x = torch.randn(1 << 20, device="cuda").requires_grad_()
    found = []
    for debug in (False, True):
        x.grad = None
        call = make_graphed_callables(Faulty(), (x,), debug=debug)
        call(x).sum().backward()
        found.append(x.grad)
    assert torch.equal(found[0], 3 * x) and found[1].isnan().all()


# What cannot be captured, or replayed.


def test_the_split_path_is_refused_before_anything_runs(device):
    module = experts(device)
    module.path = "split"
    ran = []
    with pytest.raises(NotImplementedError, match=r"Operation 0 \(GroupedLinear\) cannot be captured: .* SplitPath.*"
                       r"path='split' was asked for\. Graph-safe is the GroupedPath"):  # fmt: skip
        graphed(module, pre_warmup_hook=lambda: ran.append(1))
    assert not ran


@dataclass(frozen=True)
class SingleTensors(Quantizer):
    """A user's quantizer without a form for groups."""

    def quantize(self, x, *, rowwise=True, columnwise=False):
        raise AssertionError("it is refused before anything runs")


def test_a_recipe_on_the_split_path_is_refused_with_its_reason(device):
    single = CustomRecipe(lambda role: SingleTensors())
    with pytest.raises(NotImplementedError, match=r"SplitPath.*SingleTensors knows single tensors only.*'mxfp8'"):
        graphed(experts(device), recipe=single)


def test_split_sizes_on_the_host_are_refused(device):
    x, extras, _ = batch(1, device)
    extras["split_sizes"] = [96, 0, 0, 0]
    with pytest.raises(ValueError, match="'split_sizes' is a list: on the host"):
        make_graphed_callables(experts(device), (x,), sample_kwargs=extras)


def test_hooks_and_gradients_that_are_left_are_refused(device):
    module = experts(device, delay_wgrad_compute=True)
    handle = module[1].register_forward_hook(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"has hooks on '1' \(ScaledSwiGLU"):
        graphed(module)
    handle.remove()
    run(module, module, 1)
    with pytest.raises(RuntimeError, match="has weight gradients left. Call backward_dw"):
        graphed(module)


def test_an_input_that_is_not_used_is_named(device):
    class First(nn.Module):
        def forward(self, x, y):
            return 2 * x

    samples = tuple(torch.randn(4, device=device).requires_grad_() for _ in range(2))
    with pytest.raises(RuntimeError, match="First: no output depends on '1'"):
        make_graphed_callables(First(), samples)
    call = make_graphed_callables(First(), samples, allow_unused_input=True)
    call(*samples).sum().backward()
    assert samples[1].grad is None and torch.equal(samples[0].grad, torch.full_like(samples[0], 2))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x[:50], "shape \\[50, 64\\].*captured was shape \\[96, 64\\]"),
        (lambda x: x.float(), "torch.float32.*captured was .*torch.bfloat16"),
        (lambda x: x.mT.contiguous().mT, "strides \\[1, 96\\].*captured was .*strides \\[64, 1\\]"),
        (lambda x: x.to("meta"), "on meta.*captured was"),
    ],
)
def test_what_has_another_form_is_refused(change, says, device):
    module = experts(device)
    call = graphed(module)
    x, extras, _ = batch(1, device)
    call(x, **extras)
    with pytest.raises(ValueError, match=says):
        call(change(x.detach()), **extras)
    with pytest.raises(TypeError, match="captured with 1 positional"):
        call(x)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda o: setattr(o, "weight", nn.Parameter(o.weight.detach().clone())), "'0.weight' was replaced"),
        (lambda o: setattr(o.weight, "data", o.weight.detach().clone()), "'0.weight' has moved"),
        (lambda o: o.weight.requires_grad_(False), "requires_grad of parameter '0.weight'"),
    ],
)
def test_parameters_must_stay_where_they_are(change, says, device):
    module = experts(device)
    call = graphed(module)
    change(module[0])
    with pytest.raises(RuntimeError, match=says):
        run(call, module, 1)


def test_what_is_no_module_or_no_tensor_is_refused(device):
    x = torch.randn(4, 16, device=device)
    with pytest.raises(TypeError, match="Give torch.nn.Modules"):
        make_graphed_callables([ops.Linear(16, 16, device=device), torch.relu], [(x,), (x,)])
    with pytest.raises(TypeError, match="Argument '0' is a list with tensors in it"):
        make_graphed_callables(ops.Linear(16, 16, device=device), ([x],))
    with pytest.raises(ValueError, match="nothing to capture"):
        make_graphed_callables(nn.Identity(), ())
    with pytest.raises(ValueError, match="sample '0' is on meta, but the first tensor on"):
        make_graphed_callables(ops.Linear(16, 16, device=device), (x.to("meta"),))


def test_a_module_without_inputs(device):
    class Source(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, device=device))

        def forward(self):
            return 3 * self.weight

    module = Source()
    call = make_graphed_callables(module, ())
    call().sum().backward()
    assert torch.equal(module.weight.grad, torch.full_like(module.weight, 3))


def test_arguments_by_the_names_of_transformer_engine(device):
    eager = experts(device)
    module = deepcopy(eager)
    call = graphed(module, fp8_enabled=True, fp8_recipe="mxfp8", fp8_weight_caching=False)
    assert_same_bits(run(call, module, 1), run(eager, eager, 1, "mxfp8"))
    with pytest.raises(ValueError, match="fp8_recipe and recipe are two names of one argument"):
        graphed(module, fp8_recipe="mxfp8", recipe="mxfp8")
    with pytest.raises(NotImplementedError, match="fp8_calibrating is not supported. Recipes"):
        graphed(module, fp8_calibrating=True)
    with pytest.raises(TypeError, match="no argument 'warmups'"):
        graphed(module, warmups=3)
    off = graphed(module, recipe="mxfp8", enabled=False)
    assert_same_bits(run(off, module, 1), run(eager, eager, 1))


@pytest.mark.parametrize("delays", [False, True])
def test_a_replay_is_refused_that_would_accumulate_what_was_not_asked_for(delays, device):
    switches = {"accumulate_into_main_grad": not delays, "delay_wgrad_compute": delays, "device": device}
    module = Sequential(ops.Linear(8, 8, bias=False, **switches))
    module[0].weight.main_grad = torch.zeros(8, 8, device=device)
    x = torch.randn(4, 8, device=device, requires_grad=True)
    graphed = make_graphed_callables(module, (x,))
    y = graphed(x).sum()
    with pytest.raises(RuntimeError, match="asks for others alone .* Call backward"):
        torch.autograd.grad(y, x)
    assert not module[0].weight.main_grad.any() and not module.need_backward_dw()
    graphed(x).sum().backward()
    if delays:
        graphed.backward_dw()
    assert (module[0].weight.grad if delays else module[0].weight.main_grad).any()
