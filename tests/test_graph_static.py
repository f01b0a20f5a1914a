"""Replays without Python, on a CPU: torch's operations alone are repeated, on the tensors of the capture."""

from copy import deepcopy

import pytest
import torch

from fuser import Sequential, autocast, ops
from fuser.graph import make_graphed_callables, make_graphed_step
from fuser.schedule import Schedule, run_schedule
from tests import main_grad_cases as cases
from tests import test_graph_schedule as of_schedules
from tests.recorded_ops import OpsRecorder
from tests.reference import assert_same_bits


@pytest.fixture(autouse=True)
def ops_are_recorded(monkeypatch):
    for module in ("fuser.graph.callables", "fuser.graph.step"):
        monkeypatch.setattr(f"{module}.make_recorder", lambda device, pool: OpsRecorder())
    monkeypatch.setattr("ops.products.weights.is_capturing", lambda device: OpsRecorder.is_recording)


def steps(captured, recipe, switches, setup):
    """Three steps of a model, eager or replayed: what they leave, and what was called."""
    torch.manual_seed(0)
    module = Sequential(ops.Linear(32, 32, **switches), ops.SiLU(), ops.Dropout(0.3), ops.Linear(32, 32, **switches))
    cases.give_main_grads(module, 0.5, **setup)
    called = []
    for index in (0, 3):
        module[index].register_wgrad_accumulation_and_reduce_hooks(lambda i=index: called.append(i))
    call = module
    if captured:
        call = make_graphed_callables(module, (torch.randn(16, 32).requires_grad_(),), recipe=recipe)
        for weight in cases.weights_of(module).values():
            weight.main_grad.fill_(0.5)  # unlike a capture, this recording computes
    assert not called
    found = []
    for seed in range(3):
        torch.manual_seed(seed)
        x = torch.randn(16, 32).requires_grad_()
        for weight in cases.weights_of(module).values():
            if setup.get("overwrite"):
                weight.grad_added_to_main_grad = False
            if switches.get("accumulate_into_main_grad"):
                weight.grad = None
        with autocast(recipe):
            y = call(x)
        found.append({"y": y.detach().clone()})
        y.square().sum().backward()
        if switches.get("delay_wgrad_compute"):
            call.backward_dw()
        grads = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
        if switches.get("accumulate_into_main_grad"):
            grads = {name: grad for name, grad in grads.items() if "weight" not in name}
        found.append({"dx": x.grad, **grads})
        found.append({name: w.main_grad.clone() for name, w in cases.weights_of(module).items()})
        found.append({name: torch.tensor(w.grad_added_to_main_grad) for name, w in cases.weights_of(module).items()})
        found.append({name: buffer.clone() for name, buffer in module.named_buffers()})
    return found, called


@pytest.mark.parametrize("recipe", [None, "fp8_delayed", "fp8_current", "fp8_block", "fp8_rowwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize(("accumulate", "setup"), [(False, {}), (True, {}), (True, {"overwrite": True})], ids=str)
def test_nothing_is_left_to_python(recipe, delay, accumulate, setup):
    switches = {"delay_wgrad_compute": delay, "accumulate_into_main_grad": accumulate}
    (expected, eager_calls), (found, calls) = (steps(captured, recipe, switches, setup) for captured in (False, True))
    for ours, theirs in zip(found, expected, strict=True):
        assert_same_bits(ours, theirs)
    assert calls == eager_calls and bool(calls) is delay


@pytest.mark.parametrize("order", [name for name in of_schedules.ORDERS if "printed" not in name])
@pytest.mark.parametrize("main_grad", [False, True])
def test_schedules_replay_as_they_run(order, main_grad):
    schedule = Schedule.parse(of_schedules.ORDERS[order][0], layers=of_schedules.ORDERS[order][1])
    eager = of_schedules.chunks_for(schedule, "cpu", main_grad=main_grad)
    chunks = deepcopy(eager)
    for module in (module for chunk in chunks for module in chunk):
        if main_grad:
            cases.give_main_grads(module, 0.25)
    callables = of_schedules.capture(schedule, chunks, "cpu")
    for module in (module for chunk in chunks for module in chunk):
        if main_grad:
            for weight in cases.weights_of(module).values():
                weight.main_grad.fill_(0.25)  # unlike a capture, this recording computes
    for seed in range(2):
        inputs, dys = of_schedules.data_for(schedule, "cpu", seed)
        expected = run_schedule(schedule, eager, inputs, dys)
        found = of_schedules.replay(schedule, callables, inputs, dys)
        keys = {name[1:] for name in found if name[0] == "dx"}
        assert_same_bits(
            {key: found["dx", *key] for key in keys}, {key: expected.input_grads[key] for key in keys}
        )  # fmt: skip
    for ours, theirs in zip(chunks, eager, strict=True):
        for module, other in zip(ours, theirs, strict=True):
            names = cases.weights_of(module) if main_grad else dict(module.named_parameters())
            get = (lambda p: p.main_grad) if main_grad else (lambda p: p.grad)
            assert_same_bits(
                {name: get(p) for name, p in names.items()},
                {name: get(p) for name, p in other.named_parameters() if name in names},
            )


@pytest.mark.parametrize("recipe", [None, "mxfp8", "fp8_delayed"])
def test_a_whole_step_replays(recipe):
    results = []
    for captured in (False, True):
        torch.manual_seed(0)
        model = Sequential(ops.Linear(16, 16, delay_wgrad_compute=True), ops.GELU(), ops.Linear(16, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)

        def step(x, target, model=model, optimizer=optimizer):
            optimizer.zero_grad()
            with autocast(recipe):
                loss = (model(x) - target).square().mean()
            loss.backward()
            model.backward_dw()
            optimizer.step()
            return loss

        if captured:
            step = make_graphed_step(step, (torch.randn(8, 16), torch.randn(8, 4)), modules=model, optimizers=optimizer)
        torch.manual_seed(1)
        losses = [step(torch.randn(8, 16), torch.randn(8, 4)).detach().clone() for _ in range(5)]
        tensors = dict(model.named_parameters()) | dict(model.named_buffers())
        results.append({"losses": torch.stack(losses)} | {name: t.detach() for name, t in tensors.items()})
    assert_same_bits(results[1], results[0])


def test_kept_weights_are_cast_where_a_step_begins():
    module = Sequential(ops.Linear(32, 32))
    x = torch.randn(16, 32)
    call = make_graphed_callables(module, (x,), recipe="mxfp8", cache_quantized_params=True)
    old = call(x, is_first_microbatch=True).clone()
    with torch.no_grad():
        module[0].weight.mul_(-2)
    assert torch.equal(call(x, is_first_microbatch=False), old)
    with autocast("mxfp8"):
        assert torch.equal(call(x, is_first_microbatch=True), module(x))
        assert torch.equal(call(x, is_first_microbatch=False), module(x))
