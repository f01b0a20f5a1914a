"""Graphs of schedules: any legal order replays as it runs eagerly, on shared buffers, and any other order is refused.

Everywhere `debug=True`: a buffer whose life is over is NaN.
"""

from copy import deepcopy
from itertools import chain

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuser import Sequential, ops
from fuser.graph import make_graphed_callables
from fuser.graph.checks import ReplayOrder
from fuser.schedule import Schedule, ScheduleError, run_schedule
from fuser.schedule.memory import Buffer, LayerMemory, plan_memory
from fuser.schedule.schedule import Pass
from tests import main_grad_cases as cases
from tests.reference import assert_same_bits
from tests.schedule_cases import PRINTED_DELAYED, schedules

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
WIDTH, ROWS = 16, 8


@pytest.fixture(params=DEVICES)
def device(request):
    if request.param == "cuda":  # filling new memory is a kernel of its own, which graphs would repeat
        torch.utils.deterministic.fill_uninitialized_memory = False
    return request.param


def layer(index, device, **switches):
    """Linear layers alone save their very input; others have something in front."""
    linear = ops.Linear(WIDTH, WIDTH, device=device, **switches)
    return Sequential(linear) if index % 2 else Sequential(ops.SiLU(), linear, ops.Bias(WIDTH, device=device))


def chunks_for(schedule, device, *, main_grad=False):
    torch.manual_seed(0)
    chunks = [
        [layer(i, device, delay_wgrad_compute=delayed, accumulate_into_main_grad=main_grad) for i in range(count)]
        for count, delayed in zip(schedule.layers, schedule.delayed, strict=True)
    ]
    for module in (module for chunk in chunks for module in chunk):
        if main_grad:
            cases.give_main_grads(module, 0.25)
    return chunks


def data_for(schedule, device, seed):
    generator = torch.Generator().manual_seed(seed)
    keys = [(chunk, m) for chunk in range(1, len(schedule.layers) + 1) for m in range(schedule.microbatches)]

    def draw():
        return torch.randn(ROWS, WIDTH, generator=generator).to(device)

    return {key: draw().requires_grad_() for key in keys}, {key: draw() for key in keys}


def capture(schedule, chunks, device, **options):
    modules = [module for chunk in chunks for module in chunk]
    samples = [(torch.randn(ROWS, WIDTH, device=device).requires_grad_(),) for _ in modules]
    return make_graphed_callables(modules, samples, schedule=schedule, debug=True, **options)


def replay(schedule, callables, inputs, dys):
    """Every entry where it stands; what comes of it, copied as soon as it is there."""
    leaves, values, found = {}, {}, {}
    for entry in schedule.entries:
        key = entry.chunk, entry.microbatch
        mine = [callables[schedule.index(event.instance)] for event in schedule.spread(entry)]
        if entry.kind is Pass.FORWARD:
            values[key] = leaves[key] = inputs[key].detach().requires_grad_()
            for call in mine:
                values[key] = call(values[key])
            found["y", *key] = values[key].detach().clone()
        elif entry.kind is Pass.DGRAD:
            if mine:
                values.pop(key).backward(dys[key])
                found["dx", *key] = leaves[key].grad
        else:
            for call in mine:
                call.backward_dw()
    return found


def assert_replays_are_eager(schedule, device, *, main_grad=False, rounds=2, **options):
    eager = chunks_for(schedule, device, main_grad=main_grad)
    captured = deepcopy(eager)
    for ours, theirs in zip(chain(*captured), chain(*eager), strict=True):  # copies of parameters have no attributes
        for (name, p), (_, q) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
            if hasattr(q, "main_grad"):
                p.main_grad, p.grad_added_to_main_grad = q.main_grad.clone(), False
            assert name
    callables = capture(schedule, captured, device, **options)
    for seed in range(rounds):
        inputs, dys = data_for(schedule, device, seed)
        expected = run_schedule(schedule, eager, inputs, dys)
        found = replay(schedule, callables, inputs, dys)
        with_layers = {key for key in inputs if schedule.layers[key[0] - 1]}
        assert_same_bits(
            {name: t for name, t in found.items() if name[1:] in with_layers},
            {("y", *k): expected.outputs[k] for k in with_layers}
            | {("dx", *k): expected.input_grads[k] for k in with_layers},
        )
        for ours, theirs in zip(chain(*captured), chain(*eager), strict=True):
            pairs = list(zip(ours.parameters(), theirs.parameters(), strict=True))
            if main_grad:  # what autograd gets there is a placeholder
                buffers = [(p.main_grad, q.main_grad) for p, q in pairs if hasattr(q, "main_grad")]
                assert buffers and all(torch.equal(p, q) for p, q in buffers)
                pairs = [(p, q) for p, q in pairs if not hasattr(q, "main_grad")]
            for p, q in pairs:
                torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=0)
    return callables


ORDERS = {
    "one": ("F1 B1 W1", [1]),
    "two chunks": ([1, 2, 1, 2, -2, -1, 1, 2, -2, -1, -2, -1], [1, 1]),
    "three layers, wgrads at the end": ("F1 F1 B1 B1 W1 W1", [3]),
    "uneven, a chunk without layers": ("F1 F2 F3 B3 B2 W2 F1 B1 F2 F3 B3 B2 W2 B1", [2, 3, 0]),
    "a wgrad behind another chunk's forward": ([1, -1, 2, -1.5, -2, -2.5], [1, 1]),
    "wgrads in turn": ([1, 2, -2, -1, -1.5, -2.5], [2, 1]),
    "five microbatches, wgrads outstanding": ("F1 F1 B1 F1 B1 F1 W1 B1 F1 B1 W1 W1 B1 W1 W1", [2]),
    "printed by TransformerEngine": (PRINTED_DELAYED, [1, 1, 1]),
}


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("order", ORDERS)
def test_a_schedule_replays_as_it_runs(order, main_grad, shared, device):
    schedule = Schedule.parse(ORDERS[order][0], layers=ORDERS[order][1])
    assert_replays_are_eager(schedule, device, main_grad=main_grad, share_buffers=shared)


def interleaved(layers, microbatches, *, delay):
    """Forwards, then dgrads; each wgrad behind the forwards of the microbatch that follows."""
    forward = [f"F{chunk}" for chunk in range(1, len(layers) + 1)]
    backward, wgrad = ([f"{kind}{chunk}" for chunk in range(len(layers), 0, -1)] for kind in "BW")
    order = forward + backward
    for _ in range(microbatches - 1):
        order += [*forward, *(wgrad if delay else []), *backward]
    return Schedule.parse([*order, *(wgrad if delay else [])], layers=layers)


@pytest.mark.pairwise
@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("main_grad", [False, True])
@pytest.mark.parametrize("delay", [False, True])
@pytest.mark.parametrize("microbatches", [1, 2, 5])
@pytest.mark.parametrize("layers", [[1], [2], [3], [1, 2], [2, 1, 3]], ids=str)
def test_wgrads_behind_other_forwards_replay_as_they_run(layers, microbatches, delay, main_grad, shared, device):
    schedule = interleaved(layers, microbatches, delay=delay)
    assert_replays_are_eager(schedule, device, main_grad=main_grad, share_buffers=shared, num_warmup_iters=2)


@pytest.mark.parametrize("warmups", [0, 1])
def test_a_schedule_needs_no_warm_up(warmups, device):
    assert_replays_are_eager(interleaved([2, 1], 2, delay=True), device, main_grad=True, num_warmup_iters=warmups)


@pytest.mark.slow
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(schedule=schedules(microbatches=3), main_grad=st.booleans())
def test_any_schedule_replays_as_it_runs(device, schedule, main_grad):
    if sum(schedule.layers):
        assert_replays_are_eager(schedule, device, main_grad=main_grad, rounds=1, num_warmup_iters=1)


def test_overwritten_main_grad_in_a_schedule(device):
    """The first microbatch overwrites, the others add: recorded as a step goes."""
    schedule = Schedule.parse("F1 F1 B1 W1 B1 W1")
    results = []
    for is_captured in (False, True):
        chunks = chunks_for(schedule, device, main_grad=True)
        cases.give_main_grads(chunks[0][0], float("nan"), overwrite=True)
        callables = capture(schedule, chunks, device) if is_captured else None
        for seed in range(2):
            for weight in cases.weights_of(chunks[0][0]).values():
                weight.grad_added_to_main_grad = False
            inputs, dys = data_for(schedule, device, seed)
            if callables:
                replay(schedule, callables, inputs, dys)
            else:
                run_schedule(schedule, chunks, inputs, dys)
        results.append({name: w.main_grad for name, w in cases.weights_of(chunks[0][0]).items()})
    assert_same_bits(*results)


def test_by_the_names_of_transformer_engine(device):
    chunks = chunks_for(Schedule.parse("F1 F2 B2 B1", layers=[2, 2]), device)
    modules = tuple(module for chunk in chunks for module in chunk)
    order = [1, 2, 1, 2, -2, -1, -2, -1]
    samples = tuple((torch.randn(ROWS, WIDTH, device=device).requires_grad_(),) for _ in range(len(modules) * 2))
    for layers in ([2, 2], 2, None):
        callables = make_graphed_callables(
            modules, samples, _order=order, _num_layers_per_chunk=layers, _reuse_graph_input_output_buffers=True
        )
        assert [call.module for call in callables] == [modules[i] for i in (0, 1, 0, 1, 2, 3, 2, 3)]


@pytest.mark.parametrize("warmups", [0, 3])
def test_an_eval_schedule_is_its_forwards(warmups, device):
    schedule = Schedule.parse("F1 F1 B1 B1", layers=[2])
    chunks = chunks_for(schedule, device)
    for module in chunks[0]:
        module.eval()
    callables = capture(schedule, chunks, device, num_warmup_iters=warmups)
    inputs, _ = data_for(schedule, device, 0)
    with torch.no_grad():
        for m in range(2):
            x = inputs[1, m]
            for at in range(2):
                expected = chunks[0][at](x)
                x = callables[schedule.index((1, m, at))](x)
                assert torch.equal(x, expected)


def test_buffers_are_as_few_as_the_plan_says(device):
    schedule = Schedule.parse("F1 F1 B1 F1 B1 B1", layers=[2])
    calls = capture(schedule, chunks_for(schedule, device), device)
    one = ROWS * WIDTH * 4
    memory = calls[0].memory
    assert memory.buffers[Buffer.INPUT, one] == 4 and memory.allocated(Buffer.INPUT) == 4 * one
    assert memory.unshared(Buffer.INPUT) == 6 * one
    inputs = {call._instance.buffers.inputs[0].data_ptr() for call in calls}
    assert len(inputs) == 4
    alone = capture(schedule, chunks_for(schedule, device), device, share_buffers=False)
    assert len({call._instance.buffers.inputs[0].data_ptr() for call in alone}) == 6
    # SiLU's x is the static input; Linear's is saved, and with SiLU's gradient nothing else is.
    assert "saved" in memory.report() and memory.layers[0][1].saved == 0 and memory.layers[0][0].saved == one


def test_what_a_chunk_hands_back_lives_until_the_one_before_takes_it(device):
    schedule = Schedule.parse("F1 F1 F2 F2 B2 B2 B1 B1")
    apart = capture(schedule, chunks_for(schedule, device), device)
    chained = capture(schedule, chunks_for(schedule, device), device, follows=[2])
    ends = [[life.end for life in calls[0].memory.lives if life.buffer is Buffer.INPUT_GRAD and life.instance[0] == 2]
            for calls in (apart, chained)]  # fmt: skip
    assert ends == [[5, 6], [6, 7]]
    with pytest.raises(ScheduleError, match=r"R8 \(chaining\)"):
        capture(Schedule.parse("F2 F1 B1 B2"), chunks_for(schedule, device), device, follows=[2])


# The order of replays


def test_a_wrong_order_names_the_pair(device):
    schedule = Schedule.parse("F1 F2 B2 B1")
    first, second = capture(schedule, chunks_for(schedule, device), device)
    x = torch.randn(ROWS, WIDTH, device=device).requires_grad_()
    y = [call(x) for call in (first, second)]
    y[0].sum().backward()  # alone it is safe: nothing that B1 reads has been overwritten
    with pytest.raises(RuntimeError, match=r"B1@0 layer 0 was called between F2@0 layer 0 and B2@0 layer 0\. The sche"):
        y[1].sum().backward()
    y = [call(x) for call in (first, second)]  # and a new step is not the worse for it
    y[1].sum().backward()
    y[0].sum().backward()


def test_a_forward_in_between_is_noticed(device):
    schedule = Schedule.parse("F1 B1 F2 B2")
    first, second = capture(schedule, chunks_for(schedule, device), device)
    x = torch.randn(ROWS, WIDTH, device=device).requires_grad_()
    y = first(x)
    second(x)
    with pytest.raises(RuntimeError, match="F2@0 layer 0 was called between F1@0 layer 0 and B1@0 layer 0"):
        y.sum().backward()


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("grads", [False, True])
def test_another_call_before_backward_is_noticed(retain, grads, device):
    """It has overwritten what backward reads."""
    schedule = Schedule.parse("F1 B1")
    (call,) = capture(schedule, chunks_for(schedule, device), device, retain_graph_in_backward=retain)
    x = torch.randn(ROWS, WIDTH, device=device).requires_grad_()
    y = call(x)
    with torch.set_grad_enabled(grads):
        again = call(x.detach().mul(5).requires_grad_(grads))
    with pytest.raises(RuntimeError, match="was called again, with gradients or without, before the backward of an e"):
        y.sum().backward()
    assert x.grad is None
    if grads:
        again.sum().backward()
    call(x).sum().backward()
    assert x.grad is not None


def test_a_second_backward_needs_retain_graph(device):
    schedule = Schedule.parse("F1 B1")
    chunks = chunks_for(schedule, device)
    x = torch.randn(ROWS, WIDTH, device=device).requires_grad_()
    (call,) = capture(schedule, chunks, device)
    y = call(x)
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="B1@0 layer 0 was called, but F1@0 layer 0 was not, or what it left"):
        y.sum().backward()
    del y  # a graph that lives on keeps its accumulation on the stream of its forward
    (call,) = capture(schedule, chunks, device, retain_graph_in_backward=True)
    y = call(x)
    once = [torch.autograd.grad(y.sum(), x, retain_graph=True)[0].clone() for _ in range(2)]
    assert torch.equal(*once)


@given(schedule=schedules(chunks=2, microbatches=3, layers=2), data=st.data())
def test_what_the_check_lets_pass_reads_only_what_is_its_own(schedule, data):
    """Buffers by the memory plan, with an owner each: no order that is let pass finds another's."""
    plan = plan_memory(schedule, LayerMemory(1, 1, 1, 1, 1, 1))
    events = schedule.events
    order = ReplayOrder(schedule, events, retain=False)
    owner, run = {}, set()
    for event in data.draw(st.lists(st.sampled_from(events), max_size=30)) if events else []:
        position = events.index(event)
        try:
            order.check(event)
        except RuntimeError:
            continue
        for life in plan.lives:
            own = life.instance == event.instance
            if own and life.buffer is not Buffer.INPUT_GRAD and life.start < position <= life.end:
                assert owner[life.buffer, life.number] == life.instance
        for life in plan.lives:
            if life.start == position:
                owner[life.buffer, life.number] = life.instance
        order.done(event)
        run.add(event)


@given(schedule=schedules(chunks=3, microbatches=4))
def test_the_schedule_itself_is_let_pass(schedule):
    order = ReplayOrder(schedule, schedule.events, retain=False)
    for _ in range(2):
        for event in schedule.events:
            order.check(event)
            order.done(event)


# What fails, and what does not fit


class Failing(torch.autograd.Function):
    """Fails in the n-th forward or backward of those who share `left`."""

    @staticmethod
    def forward(ctx, x, left, at):
        ctx.left, ctx.at = left, at
        _count(left, at == "forward")
        return x * 2

    @staticmethod
    def backward(ctx, dy):
        _count(ctx.left, ctx.at == "backward")
        return dy * 2, None, None


def _count(left, counts):
    left[0] -= counts
    if counts and not left[0]:
        raise ArithmeticError("as asked")


class Fails(torch.nn.Module):
    def __init__(self, at, number):
        super().__init__()
        self.at, self.left = at, [number]

    def forward(self, x):
        return Failing.apply(x, self.left, self.at)


@pytest.mark.parametrize("number", [1, 2, 5, 6, 7, 8, 9])
@pytest.mark.parametrize("at", ["forward", "backward"])
def test_an_exception_in_any_pass_leaves_all_as_it_was(at, number, device):
    """Three microbatches, two warm-ups: from the seventh on within the capture, between passes that were recorded."""
    schedule = Schedule.parse("F1 F1 B1 W1 F1 B1 B1 W1 W1", layers=[2])
    chunks = chunks_for(schedule, device, main_grad=True)
    module = Sequential(*chunks[0][0], Fails(at, number), *chunks[0][1])
    x = torch.randn(ROWS, WIDTH, device=device).requires_grad_()
    for weight in module.parameters():
        weight.grad = torch.full_like(weight, 0.5)
    schedule = Schedule.parse(schedule.entries, layers=[1])
    with pytest.raises(ArithmeticError, match="as asked"):
        make_graphed_callables([module], [(x,)], schedule=schedule, num_warmup_iters=2, debug=True)
    for weight in module.parameters():
        assert (weight.grad == 0.5).all()
    for weight in cases.weights_of(module).values():
        assert (weight.main_grad == 0.25).all() and not weight.grad_added_to_main_grad
    assert not module.need_backward_dw() and not torch.is_autocast_enabled(device)
    assert device == "cpu" or not torch.cuda.is_current_stream_capturing()
    # It will not fail again.
    calls = make_graphed_callables([module], [(x,)], schedule=schedule, num_warmup_iters=2, debug=True)
    expected = module(x)
    assert torch.equal(calls[0](x), expected)


def test_a_schedule_must_fit_its_modules(device):
    ran = []
    chunks = chunks_for(Schedule.parse("F1 F2 B2 B1"), device)
    modules = [chunk[0] for chunk in chunks]
    sample = (torch.randn(ROWS, WIDTH, device=device),)
    with pytest.raises(ScheduleError, match=r"R1 \(totals\)"):
        make_graphed_callables(modules, [sample] * 2, schedule="F1 F2 B2")
    with pytest.raises(ScheduleError, match="no layer of it delays its wgrad"):
        make_graphed_callables(modules, [sample] * 2, schedule="F1 F2 B2 W2 B1", pre_warmup_hook=lambda: ran.append(1))
    assert not ran
    with pytest.raises(ValueError, match=r"2 modules, but the schedule has \[1, 1, 1\] layers"):
        make_graphed_callables(modules, [sample] * 2, schedule="F1 F2 F3 B3 B2 B1")
    with pytest.raises(ValueError, match="There are 3 sample_args, 2 modules and 2 microbatches"):
        make_graphed_callables(modules, [sample] * 3, schedule="F1 F1 F2 F2 B2 B2 B1 B1")
    others = [sample, (torch.randn(3, WIDTH, device=device),), sample, sample]
    with pytest.raises(ValueError, match="chunk 1, layer 0 differ from microbatch to microbatch"):
        make_graphed_callables(modules, others, schedule="F1 F1 F2 F2 B2 B2 B1 B1")


@pytest.mark.gpu
def test_the_report_says_what_a_forward_keeps():
    torch.utils.deterministic.fill_uninitialized_memory = False
    module = Sequential(ops.Linear(4096, 16384, device="cuda", dtype=torch.bfloat16), ops.SwiGLU(),
                        ops.Linear(8192, 4096, device="cuda", dtype=torch.bfloat16))  # fmt: skip
    x = torch.randn(16384, 4096, device="cuda", dtype=torch.bfloat16).requires_grad_()
    schedule = "F1 F1 B1 F1 B1 B1"
    module(x).sum().backward()
    make_graphed_callables([module], [(x,)], schedule=schedule)[0].reset()  # workspaces, of the capture's stream too
    before = torch.cuda.memory_allocated()
    y = module(x)
    kept = torch.cuda.memory_allocated() - before - y.nbytes
    del y
    torch.cuda.empty_cache()
    allocated = torch.cuda.memory_allocated()
    callables = make_graphed_callables([module], [(x,)], schedule=schedule)
    memory = callables[0].memory
    assert memory.layers[0][0].saved == pytest.approx(kept, rel=0.02)
    static = [memory.allocated(kind) for kind in (Buffer.INPUT, Buffer.OUTPUT, Buffer.OUTPUT_GRAD, Buffer.INPUT_GRAD)]
    assert torch.cuda.memory_allocated() - allocated == pytest.approx(sum(static), rel=0.02)
    pools = [s for s in torch.cuda.memory_snapshot() if s["segment_pool_id"] != (0, 0)]
    print(f"pool {sum(s['total_size'] for s in pools)}, planned in it {memory.allocated(Buffer.SAVED)}")
    callables[0].reset()
    assert torch.cuda.memory_allocated() <= allocated
