"""A schedule run eagerly gives the bits of microbatches run one by one, whatever its order."""

import weakref
from collections import deque

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fuser import Sequential, ops
from fuser.schedule.make import order_interleaved, overlap_layers
from fuser.schedule.run import run_schedule
from fuser.schedule.schedule import Schedule, ScheduleError
from tests.schedule_cases import schedules

SIZE = 5


class _LinearLater(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, queue: deque) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.queue = queue
        return x @ weight.T

    @staticmethod
    def backward(ctx, dy: Tensor):
        x, weight = ctx.saved_tensors
        ctx.queue.append((dy, x))
        return dy @ weight, None, None


class Later(nn.Module):
    """y = x @ weight.T; its wgrad waits in a queue for `backward_dw()`."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(SIZE, SIZE))
        self.queue: deque = deque()

    def forward(self, x: Tensor) -> Tensor:
        return _LinearLater.apply(x, self.weight, self.queue)

    def backward_dw(self) -> None:
        dy, x = self.queue.popleft()
        grad = dy.T @ x
        self.weight.grad = grad if self.weight.grad is None else self.weight.grad + grad


def make_chunks(schedule: Schedule) -> list[list[nn.Module]]:
    """Layers of several kinds; a delayed chunk begins with one that delays its wgrad."""
    plain = (lambda: nn.Sequential(nn.Linear(SIZE, SIZE), nn.Tanh()), lambda: nn.LayerNorm(SIZE), nn.Identity)
    later = (lambda: nn.Sequential(Later(), nn.SiLU(), Later()), Later, nn.Identity)
    return [
        [kind() for kind in (later if delays else plain)[:count]]
        for delays, count in zip(schedule.delayed, schedule.layers, strict=True)
    ]


def parameters(chunks) -> list[nn.Parameter]:
    return [parameter for layers in chunks for layer in layers for parameter in layer.parameters()]


def take_grads(chunks) -> list[Tensor | None]:
    grads = [parameter.grad for parameter in parameters(chunks)]
    for parameter in parameters(chunks):
        parameter.grad = None
    return grads


def run_one_by_one(schedule, chunks, inputs, output_grads):
    """Outputs and input gradients of each microbatch run by itself, as one graph, through chunks that follow on."""
    starts = sorted({chunk for chunk, _ in inputs})
    stages = [range(first, then) for first, then in zip(starts, [*starts[1:], len(chunks) + 1], strict=True)]
    outputs, input_grads = {}, {}
    for microbatch in range(schedule.microbatches):
        for stage in stages:
            x = inputs[stage[0], microbatch].detach().requires_grad_()
            layers = [layer for chunk in stage for layer in chunks[chunk - 1]]
            y = nn.Sequential(*layers)(x)
            y.backward(output_grads[stage[-1], microbatch])
            for layer in reversed(layers):
                for module in reversed(list(layer.modules())):
                    if isinstance(module, (Later, ops.Linear)) and getattr(module, "delay_wgrad_compute", True):
                        module.backward_dw()
            outputs[stage[-1], microbatch], input_grads[stage[0], microbatch] = y.detach(), x.grad
    return outputs, input_grads


def tensors(chunks, microbatches: int, requires_grad: bool = False) -> dict[tuple[int, int], Tensor]:
    return {(c, m): torch.randn(3, SIZE, requires_grad=requires_grad) for c in chunks for m in range(microbatches)}


def assert_same(ran, expected) -> None:
    assert ran.keys() == expected.keys()
    for key in ran:
        torch.testing.assert_close(ran[key], expected[key], rtol=0, atol=0, msg=lambda text, key=key: f"{key}: {text}")


def check_bits(schedule: Schedule, chunks, chained: bool) -> None:
    numbers = range(1, len(chunks) + 1)
    inputs = tensors([1] if chained else numbers, schedule.microbatches, requires_grad=True)
    output_grads = tensors([len(chunks)] if chained else numbers, schedule.microbatches)
    outputs, input_grads = run_one_by_one(schedule, chunks, inputs, output_grads)
    grads = take_grads(chunks)
    ran = run_schedule(schedule, chunks, inputs, output_grads)
    assert_same(ran.outputs, outputs)
    assert_same(ran.input_grads, input_grads)
    assert_same(dict(enumerate(take_grads(chunks))), dict(enumerate(grads)))
    assert all(x.grad is None for x in inputs.values())
    assert not any(m.queue for layers in chunks for layer in layers for m in layer.modules() if isinstance(m, Later))


@pytest.mark.slow
@given(schedules())
def test_random_schedules_of_independent_chunks_have_the_bits_of_single_microbatches(schedule):
    check_bits(schedule, make_chunks(schedule), chained=False)


@pytest.mark.slow
@given(schedules(chained=True))
def test_random_schedules_of_one_model_have_the_bits_of_single_microbatches(schedule):
    check_bits(schedule, make_chunks(schedule), chained=True)


@given(st.integers(1, 3), st.integers(0, 2), st.integers(1, 2), st.booleans())
def test_pipelines_spread_over_layers_have_the_bits_of_single_microbatches(stages, stage, groups, delayed):
    order = order_interleaved(stages, stage % stages, 2, groups * stages)
    schedule = Schedule.parse(overlap_layers(order, [1, 2], delayed=delayed))
    check_bits(schedule, make_chunks(schedule), chained=True)


@pytest.mark.parametrize("delayed", [False, True], ids=["at once", "delayed"])
def test_our_own_pipelines_have_the_bits_of_single_microbatches(delayed):
    order = order_interleaved(stages=2, stage=0, chunks=2, microbatches=4)
    schedule = Schedule.parse(overlap_layers(order, [1, 2], delayed=delayed))
    layers = [
        Sequential(ops.RMSNorm(SIZE), ops.Linear(SIZE, SIZE, delay_wgrad_compute=delayed)) for _ in range(3)
    ]  # fmt: skip
    check_bits(schedule, [[layer] for layer in layers], chained=True)


def test_wgrads_of_a_chunk_come_where_they_stand():
    layer = Later()
    x = tensors([1], 2)
    seen = []

    class Watch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append((len(layer.queue), layer.weight.grad is not None))
            return x.clone()

    schedule = Schedule.parse("F1 B1 F2 W1 F2 F1 B1 W1 B2 B2")
    run_schedule(schedule, [[layer], [Watch()]], {**x, **tensors([2], 2)}, {**tensors([1, 2], 2)})
    assert seen == [(1, False), (0, True)]


def test_the_last_module_of_a_layer_runs_its_wgrad_first():
    ran = []

    class Named(nn.Identity):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.name = name

        def backward_dw(self) -> None:
            ran.append(self.name)

    layers = [nn.Sequential(Named("a"), nn.Sequential(Named("b"), nn.ReLU())), Named("c")]
    run_schedule(Schedule.parse("F1 B1 W1", layers=[2]), [layers], tensors([1], 1), tensors([1], 1))
    assert ran == ["c", "b", "a"]


def test_several_tensors_go_through_layers_and_gradients_may_be_missing():
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(SIZE, SIZE)

        def forward(self, x: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
            return self.linear(x)[index], index

    chunks = [[Both(), Both()]]
    x, index, dy = torch.randn(3, SIZE, requires_grad=True), torch.tensor([2, 0, 1]), torch.randn(3, SIZE)
    y, _ = chunks[0][1](*chunks[0][0](x, index))
    (dx,) = torch.autograd.grad(y, x, dy)
    ran = run_schedule(Schedule.parse("F1 B1", layers=[2]), chunks, {(1, 0): (x, index)}, {(1, 0): (dy, None)})
    assert torch.equal(ran.outputs[1, 0][0], y) and not ran.outputs[1, 0][0].requires_grad
    assert torch.equal(ran.input_grads[1, 0][0], dx) and ran.input_grads[1, 0][1] is None


def test_what_needs_no_gradient_gets_none():
    frozen, live = nn.Linear(SIZE, SIZE).requires_grad_(False), nn.Linear(SIZE, SIZE)
    ran = run_schedule(Schedule.parse("F1 B1", layers=[2]), [[frozen, live]], tensors([1], 1), tensors([1], 1))
    assert ran.input_grads == {(1, 0): None}
    assert frozen.weight.grad is None and live.weight.grad is not None


def test_it_runs_backward_also_where_gradients_are_off():
    layer = nn.Linear(SIZE, SIZE)
    with torch.no_grad():
        run_schedule(Schedule.parse("F1 B1"), [[layer]], tensors([1], 1), tensors([1], 1))
    assert layer.weight.grad is not None


def test_what_a_microbatch_kept_is_freed_by_its_dgrad():
    alive = []
    kept: list[weakref.ref] = []

    class Keep(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x: Tensor) -> Tensor:
            kept.append(weakref.ref(x))
            alive.append(sum(ref() is not None for ref in kept))
            ctx.x = x
            return x * 2

        @staticmethod
        def backward(ctx, dy: Tensor) -> Tensor:
            return dy * 2

    class Layer(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Keep.apply(x * 1)

    schedule = Schedule.parse("F1 F1 B1 F1 B1 F1 B1 B1")
    run_schedule(schedule, [[Layer()]], tensors([1], 4, requires_grad=True), tensors([1], 4))
    assert alive == [1, 2, 2, 2]


# Refusals


class Silent(Later):
    """Has the method, and says that it has nothing to do."""

    @property
    def delay_wgrad_compute(self) -> bool:
        return False


def test_modules_are_asked_whether_they_delay_their_wgrad():
    x, dy = tensors([1], 1), tensors([1], 1)
    with pytest.raises(ScheduleError, match="R1.*chunk 1 has 0 wgrads.*Add 1 more W1"):
        run_schedule(Schedule.parse("F1 B1"), [[nn.Sequential(nn.ReLU(), Later())]], x, dy)
    with pytest.raises(ScheduleError, match="R1.*no layer of it delays its wgrad"):
        run_schedule(Schedule.parse("F1 B1 W1"), [[nn.Linear(SIZE, SIZE)]], x, dy)
    run_schedule(Schedule.parse("F1 B1"), [[Silent()]], x, dy)


def test_chunks_that_follow_must_come_in_turn():
    x, dy = tensors([1], 1), tensors([2], 1)
    with pytest.raises(ScheduleError, match="R8"):
        run_schedule(Schedule.parse("F1 F2 B1 B2"), [[nn.ReLU()], [nn.ReLU()]], x, dy)


@pytest.mark.parametrize(
    ("chunks", "inputs", "output_grads", "says"),
    [
        ([1, 2], [(1, 0), (1, 1)], [(2, 0), (2, 1)], r"chunks have \(1, 2\) layers"),
        ([1, 1], [], [(2, 0), (2, 1)], r"inputs lacks .* \[\(1, 0\), \(1, 1\)\]"),
        ([1, 1], [(1, 0)], [(2, 0), (2, 1)], r"inputs lacks .* \[\(1, 1\)\]"),
        ([1, 1], [(1, 0), (1, 1), (1, 2)], [(2, 0), (2, 1)], r"inputs has .* \[\(1, 2\)\]"),
        ([1, 1], [(1, 0), (1, 1), (3, 0)], [(2, 0), (2, 1)], r"inputs has .* \[\(3, 0\)\]"),
        ([1, 1], [(1, 0), (1, 1)], [(2, 0)], r"output_grads lacks .* \[\(2, 1\)\]"),
        ([1, 1], [(1, 0), (1, 1)], [(1, 0), (2, 0), (2, 1)], r"output_grads has .* \[\(1, 0\)\].*\[2\] follow"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(chunks, inputs, output_grads, says):
    class Never(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("It ran.")

    layers = [[Never() for _ in range(number)] for number in chunks]
    give = lambda keys: {key: torch.zeros(1) for key in keys}  # noqa: E731
    with pytest.raises(ValueError, match=says):
        run_schedule(Schedule.parse("F1 F2 F1 F2 B2 B1 B2 B1"), layers, give(inputs), give(output_grads))


def test_a_layer_that_gives_no_tensors_and_gradients_that_are_too_few_are_refused():
    class Words(nn.Module):
        def forward(self, x: Tensor) -> str:
            return "words"

    with pytest.raises(TypeError, match="Words gave str"):
        run_schedule(Schedule.parse("F1 B1"), [[Words()]], tensors([1], 1), tensors([1], 1))
    with pytest.raises(ValueError, match="2 output gradients for 1 outputs"):
        run_schedule(Schedule.parse("F1 B1"), [[nn.ReLU()]], tensors([1], 1), {(1, 0): (None, None)})
