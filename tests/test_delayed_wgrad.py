"""delay_wgrad_compute: what backward leaves, what backward_dw() computes and when, and what it lets go of."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fuser import Sequential, autocast, ops
from tests.check_operation import DEVICES
from tests.main_grad_cases import (
    FEW_MODELS,
    IN,
    MODELS,
    OUT,
    ROWS,
    SIZES,
    backward,
    biases_of,
    give_main_grads,
    gradients,
    make,
    weights_of,
)

DEVICE = pytest.mark.parametrize("device", DEVICES)
EVERY_MODEL = pytest.mark.parametrize("model", MODELS)
FEW = pytest.mark.parametrize("model", FEW_MODELS)
MAIN_GRAD = pytest.mark.parametrize("main_grad", [False, True], ids=["grad", "main_grad"])


def weight_gradients(sequential: nn.Module, main_grad: bool) -> dict[str, Any]:
    return {name: weight.main_grad if main_grad else weight.grad for name, weight in weights_of(sequential).items()}


def assert_same_bits(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in actual.items():
        assert torch.equal(tensor, expected[name]), name


# The same bits as without delay


@pytest.mark.pairwise
@DEVICE
@MAIN_GRAD
@pytest.mark.parametrize("recipe", [None, "fp8_delayed", "fp8_rowwise", "mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@EVERY_MODEL
def test_delay_changes_no_bit(model: str, dtype: torch.dtype, recipe: str | None, main_grad: bool, device: str) -> None:
    results = []
    for delay in (False, True):
        sequential = make(
            model, device=device, dtype=dtype, accumulate_into_main_grad=main_grad, delay_wgrad_compute=delay
        )
        give_main_grads(sequential, 0.5)
        with autocast(recipe):
            dx = [backward(sequential, 1), backward(sequential, 2)]
        if delay:
            sequential.backward_dw()
            sequential.backward_dw()
        biases = {name: bias.grad for name, bias in biases_of(sequential).items()}
        results.append(weight_gradients(sequential, main_grad) | biases | dict(enumerate(dx)))
    assert_same_bits(results[1], results[0])


# Which backward is computed when


@DEVICE
@MAIN_GRAD
@EVERY_MODEL
def test_each_call_adds_the_gradient_of_the_oldest_backward(model: str, main_grad: bool, device: str) -> None:
    plain = make(model, device=device, accumulate_into_main_grad=main_grad)
    sequential = make(model, device=device, accumulate_into_main_grad=main_grad, delay_wgrad_compute=True)
    give_main_grads(plain, 0.0)
    give_main_grads(sequential, 0.0)
    seeds = (1, 2, 3)
    for seed in seeds:
        backward(sequential, seed)
    for seed in seeds:
        assert sequential.need_backward_dw()
        sequential.backward_dw()
        backward(plain, seed)
        assert_same_bits(weight_gradients(sequential, main_grad), weight_gradients(plain, main_grad))
    assert not sequential.need_backward_dw()


@DEVICE
@FEW
def test_without_main_grad_it_adds_in_place_to_what_is_in_grad(model: str, device: str) -> None:
    expected = gradients(make(model, device=device), 1)
    sequential = make(model, device=device, delay_wgrad_compute=True)
    given = {name: torch.full_like(weight, 2.0) for name, weight in weights_of(sequential).items()}
    for name, weight in weights_of(sequential).items():
        weight.grad = given[name]
    backward(sequential, 1)
    sequential.backward_dw()
    for name, weight in weights_of(sequential).items():
        assert weight.grad is given[name] and torch.equal(weight.grad, 2 + expected[name])


@pytest.mark.parametrize("grad_dtype", [None, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("model", FEW_MODELS)
def test_grad_has_the_dtype_that_the_weight_asks_for(model: str, grad_dtype: torch.dtype | None) -> None:
    at_once, later = (make(model, dtype=torch.bfloat16, delay_wgrad_compute=delay) for delay in (False, True))
    for sequential in (at_once, later):
        for weight in weights_of(sequential).values():
            weight.grad_dtype = grad_dtype
        for seed in (1, 2):
            backward(sequential, seed)
    later.backward_dw()
    later.backward_dw()
    for expected, weight in zip(weights_of(at_once).values(), weights_of(later).values(), strict=True):
        assert weight.grad.dtype == (grad_dtype or torch.bfloat16)
        assert torch.equal(weight.grad, expected.grad)


def test_one_call_computes_both_uses_in_one_backward_but_not_the_next_backward() -> None:
    sequential = make("linear", delay_wgrad_compute=True)
    (sequential(torch.ones(2, IN)).sum() + sequential(torch.ones(3, IN)).sum()).backward()
    sequential(torch.ones(4, IN)).sum().backward()
    sequential.backward_dw()
    assert torch.equal(sequential[0].weight.grad, torch.full((OUT, IN), 5.0))
    sequential.backward_dw()
    assert torch.equal(sequential[0].weight.grad, torch.full((OUT, IN), 9.0))


def test_a_sequential_goes_from_its_last_operation_to_its_first_with_the_hooks_in_between() -> None:
    linears = [ops.Linear(IN, IN, delay_wgrad_compute=True) for _ in range(3)]
    plain = ops.Linear(IN, IN)
    sequential = Sequential(linears[0], nn.Identity(), Sequential(linears[1], plain), linears[2])
    order: list[tuple[int, list[bool]]] = []
    for index, linear in enumerate(linears):

        def hook(index: int = index) -> None:
            order.append((index, [linear.weight.grad is not None for linear in linears]))

        linear.register_wgrad_accumulation_and_reduce_hooks(hook)
    sequential(torch.ones(ROWS, IN)).sum().backward()
    assert order == [] and plain.weight.grad is not None and not plain.need_backward_dw()
    sequential.backward_dw()
    assert order == [(2, [False, False, True]), (1, [False, True, True]), (0, [True, True, True])]


def test_operations_can_be_called_one_by_one() -> None:
    expected = gradients(make("experts"), 1)
    sequential = make("experts", delay_wgrad_compute=True)
    backward(sequential)
    fc1, _, fc2 = sequential
    fc2.backward_dw()
    assert fc1.need_backward_dw() and not fc2.need_backward_dw() and fc1.weight.grad is None
    fc1.backward_dw()
    assert_same_bits(weight_gradients(sequential, False), expected)


def test_what_is_left_and_not_the_switch_says_whether_a_call_is_needed() -> None:
    sequential = make("linear", delay_wgrad_compute=True)
    assert not sequential.need_backward_dw()
    sequential[0].weight.requires_grad_(False)
    backward(sequential)
    assert not sequential.need_backward_dw()
    sequential[0].weight.requires_grad_(True)
    backward(sequential)
    assert sequential.need_backward_dw() and sequential[0].need_backward_dw()


@EVERY_MODEL
def test_a_call_with_nothing_left_is_an_error(model: str) -> None:
    sequential = make(model, delay_wgrad_compute=True)
    message = "nothing to compute. No backward has left a weight gradient since the last call"
    with pytest.raises(RuntimeError, match=message):
        sequential.backward_dw()
    backward(sequential)
    sequential.backward_dw()
    first = next(module for module in sequential if isinstance(module, ops.Linear | ops.GroupedLinear))
    for module in (sequential, first):
        with pytest.raises(RuntimeError, match=message):
            module.backward_dw()


@EVERY_MODEL
def test_a_call_where_nothing_is_delayed_does_nothing(model: str) -> None:
    """A trainer calls it on every module."""
    sequential, called = make(model), []
    backward(sequential)
    expected = {name: p.grad.clone() for name, p in sequential.named_parameters()}
    for module in (sequential, *sequential):
        if hasattr(module, "backward_dw"):
            module.backward_dw()
    for module in sequential:
        if isinstance(module, ops.Linear | ops.GroupedLinear):
            module.register_wgrad_accumulation_and_reduce_hooks(lambda: called.append(0))
            assert not module.need_backward_dw()
            module.backward_dw()
    assert_same_bits({name: p.grad for name, p in sequential.named_parameters()}, expected)
    assert not called


def test_one_delayed_layer_of_several_makes_a_second_call_an_error() -> None:
    sequential = Sequential(ops.Linear(4, 4), ops.Linear(4, 4, delay_wgrad_compute=True))
    sequential(torch.randn(3, 4)).sum().backward()
    sequential.backward_dw()
    with pytest.raises(RuntimeError, match="nothing to compute. No backward has left"):
        sequential.backward_dw()
    sequential[0].backward_dw()


def test_frozen_weights_leave_nothing_and_a_call_does_nothing() -> None:
    sequential = Sequential(ops.Linear(8, 8, delay_wgrad_compute=True), ops.Linear(8, 8, delay_wgrad_compute=True))
    sequential.requires_grad_(False)
    x = torch.randn(4, 8, requires_grad=True)
    sequential(x).sum().backward()
    sequential.backward_dw()
    sequential[1].requires_grad_(True)
    with pytest.raises(RuntimeError, match="nothing to compute"):
        sequential.backward_dw()
    sequential(x).sum().backward()
    sequential.backward_dw()
    assert sequential[0].weight.grad is None and sequential[1].weight.grad is not None


def test_one_frozen_expert_gets_nothing_and_the_others_theirs() -> None:
    expected = gradients(make("grouped, per group"), 1)
    sequential = make("grouped, per group", delay_wgrad_compute=True)
    frozen = sequential[0].weight2
    frozen.requires_grad_(False)
    backward(sequential)
    sequential.backward_dw()
    assert frozen.grad is None
    for name, weight in weights_of(sequential).items():
        assert weight is frozen or torch.equal(weight.grad, expected[name])


@EVERY_MODEL
def test_gradients_of_biases_come_at_once(model: str) -> None:
    plain, sequential = make(model), make(model, accumulate_into_main_grad=True, delay_wgrad_compute=True)
    backward(plain)
    backward(sequential)
    for ours, expected in zip(biases_of(sequential).values(), biases_of(plain).values(), strict=True):
        assert torch.equal(ours.grad, expected.grad)


def test_torch_autocast_does_not_reach_the_product() -> None:
    expected = gradients(make("linear"), 1)
    sequential = make("linear", delay_wgrad_compute=True)
    backward(sequential)
    with torch.autocast("cpu", torch.bfloat16):
        sequential.backward_dw()
    assert_same_bits(weight_gradients(sequential, False), expected)


def test_an_error_leaves_the_gradient_to_the_next_call() -> None:
    expected = gradients(make("linear"), 1)
    sequential = make("linear", accumulate_into_main_grad=True, delay_wgrad_compute=True)
    backward(sequential)
    with pytest.raises(RuntimeError, match=r"In operation 0 \(Linear\): .* there is no main_grad"):
        sequential.backward_dw()
    give_main_grads(sequential, 0.0)
    sequential.backward_dw()
    assert_same_bits(weight_gradients(sequential, True), expected)


# What changes in between


def test_an_operand_that_was_changed_in_place_is_detected() -> None:
    sequential = make("linear", delay_wgrad_compute=True)
    x = torch.ones(ROWS, IN)
    sequential(x).sum().backward()
    x.mul_(2)
    with pytest.raises(RuntimeError, match="was changed in place since the backward that left the weight gradient"):
        sequential.backward_dw()


def test_a_weight_that_was_replaced_is_detected() -> None:
    sequential = make("grouped", delay_wgrad_compute=True)
    backward(sequential)
    sequential[0].weight = nn.Parameter(sequential[0].weight.detach().clone())
    with pytest.raises(RuntimeError, match=r"In operation 0 \(GroupedLinear\): Weight 'weight' was replaced"):
        sequential.backward_dw()


def test_a_weight_that_was_changed_in_place_is_not_needed_any_more() -> None:
    expected = gradients(make("linear"), 1)
    sequential = make("linear", delay_wgrad_compute=True)
    backward(sequential)
    with torch.no_grad():
        sequential[0].weight.zero_()
    sequential.backward_dw()
    assert_same_bits(weight_gradients(sequential, False), expected)


def test_nobody_writes_into_a_gradient_that_is_still_needed() -> None:
    """Its memory is also the gradient of an extra output, which MakeExtraOutput would add to in place."""

    def run(delay: bool) -> Tensor:
        torch.manual_seed(0)
        linear = ops.Linear(IN, IN, delay_wgrad_compute=delay)
        sequential = Sequential(
            ops.MakeExtraOutput("branch", in_place=True),
            linear,
            ops.AddExtraInput("branch"),
            ops.ConstantScale(2.0),
            fusions=(),
        )
        x = torch.randn(ROWS, IN, requires_grad=True)
        (sequential(x) * torch.randn(ROWS, IN)).sum().backward()
        if delay:
            sequential.backward_dw()
        assert linear.weight.grad is not None
        return linear.weight.grad

    assert torch.equal(run(True), run(False))


# What is let go


@pytest.mark.parametrize("model", ["linear", "grouped", "experts"])
def test_operands_are_freed_right_after_the_product(model: str) -> None:
    sequential = make(model, delay_wgrad_compute=True)
    extras = {"split_sizes": torch.tensor(SIZES)} if sequential.layout().consumed else {}
    operands = []
    for _ in range(2):
        x = torch.randn(ROWS, IN)
        operands.append(weakref.ref(x))
        sequential(x, **extras).sum().backward()
        del x
    for count in (1, 2):
        assert all(operand() is not None for operand in operands[count - 1 :])
        sequential.backward_dw()
        assert all(operand() is None for operand in operands[:count])


def test_copies_of_an_operation_have_nothing_left() -> None:
    linear = ops.Linear(4, 4, delay_wgrad_compute=True)
    linear(torch.ones(2, 4)).sum().backward()
    for other in (copy.deepcopy(linear), pickle.loads(pickle.dumps(linear))):
        assert linear.need_backward_dw() and not other.need_backward_dw()
        assert other.weight.skip_backward_post_hook


# What a data-parallel wrapper sees


def test_weights_whose_gradient_is_delayed_are_marked() -> None:
    def marked(module: nn.Module) -> list[str]:
        return [name for name, p in module.named_parameters() if getattr(p, "skip_backward_post_hook", False)]

    assert marked(ops.Linear(4, 4)) == marked(ops.GroupedLinear(2, 4, 4)) == []
    assert marked(ops.Linear(4, 4, delay_wgrad_compute=True)) == ["weight"]
    assert marked(ops.GroupedLinear(2, 4, 4, delay_wgrad_compute=True)) == ["weight"]
    single = ops.GroupedLinear(2, 4, 4, stacked=False, delay_wgrad_compute=True, device="meta")
    assert marked(single) == ["weight0", "weight1"]
    single.register_parameter("weight1", None)
    single.register_parameter("weight0", nn.Parameter(torch.empty(4, 4)))
    single.weight1 = nn.Parameter(torch.empty(4, 4))
    assert marked(single) == ["weight0", "weight1"]
    moved = ops.Linear(4, 4, delay_wgrad_compute=True, device="meta").to_empty(device="cpu")
    assert marked(moved) == ["weight"]
    moved.load_state_dict(ops.Linear(4, 4).state_dict(), assign=True)
    assert marked(moved) == ["weight"]


@DEVICE
@FEW
def test_hooks_run_in_order_once_for_each_call_and_find_the_gradient(model: str, device: str) -> None:
    sequential = make(model, device=device, accumulate_into_main_grad=True, delay_wgrad_compute=True)
    give_main_grads(sequential, 0.0)
    calls: list[str] = []
    for module in sequential:
        if isinstance(module, ops.Linear | ops.GroupedLinear):
            weights = list(module.parameters())

            def hook(name: str, weights: list[Any] = weights) -> None:
                assert all(w.grad_added_to_main_grad for w in weights if hasattr(w, "main_grad"))
                calls.append(name)

            module.register_wgrad_accumulation_and_reduce_hooks(lambda hook=hook: hook("first"))
            module.register_wgrad_accumulation_and_reduce_hooks(lambda hook=hook: hook("second"))
    operations = sum(isinstance(module, ops.Linear | ops.GroupedLinear) for module in sequential)
    backward(sequential, 1)
    backward(sequential, 2)
    assert calls == []
    sequential.backward_dw()
    assert calls == ["first", "second"] * operations
    sequential.backward_dw()
    assert calls == ["first", "second"] * operations * 2


# On the GPU


@pytest.mark.gpu
@FEW
def test_memory_of_the_operands_is_free_after_each_call(model: str) -> None:
    sequential = make(model, device="cuda", accumulate_into_main_grad=True, delay_wgrad_compute=True)
    give_main_grads(sequential, 0.0, flag=False)
    gc.collect()  # what other tests left is not to be freed in between
    allocated = []
    for seed in (1, 2, 3):
        backward(sequential, seed)
        for bias in biases_of(sequential).values():
            bias.grad = None
        allocated.append(torch.cuda.memory_allocated())
    held = allocated[2] - allocated[1]
    assert held > 0
    for count in (2, 1):
        sequential.backward_dw()
        assert torch.cuda.memory_allocated() == allocated[count - 1]


@pytest.mark.gpu
@FEW
def test_the_product_runs_on_the_stream_of_the_call(model: str) -> None:
    expected = gradients(make(model, device="cuda"), 1)
    sequential = make(model, device="cuda", delay_wgrad_compute=True)
    backward(sequential)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        torch.cuda._sleep(50_000_000)
        sequential.backward_dw()
    event = side.record_event()
    assert not event.query()  # it stands behind the pause
    side.synchronize()
    assert_same_bits(weight_gradients(sequential, False), expected)
