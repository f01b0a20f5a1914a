"""The caller's own buffers: what may lie in their memory, and what is refused before it is overwritten."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fused.grouped_mlp import GroupedMLP
from fuser import Sequential, autocast, ops
from tests.reference import assert_close, assert_same_bits, gradients

GROUPS, ROWS, WIDTH = 3, 9, 32
SIZES = [4, 0, 5]
PATHS = ["grouped", "split"]


def layer(**settings: Any) -> Sequential:
    """Every matrix as large as every buffer, or larger."""
    return Sequential(
        ops.GroupedLinear(GROUPS, WIDTH, WIDTH, scale_bias=True),
        ops.GELU(),
        ops.GroupedLinear(GROUPS, WIDTH, WIDTH),
        **settings,
    )


def experts(**settings: Any) -> Sequential:
    return Sequential(
        ops.GroupedLinear(GROUPS, WIDTH, 2 * WIDTH), ops.SwiGLU(), ops.GroupedLinear(GROUPS, WIDTH, WIDTH), **settings
    )


def in_memory_of(tensor: Tensor, first: int = 0) -> Tensor:
    """[ROWS, WIDTH] from this element of the tensor's memory on."""
    return torch.as_strided(tensor.detach(), (ROWS, WIDTH), (WIDTH, 1), tensor.storage_offset() + first)


def state_of(module: nn.Module, *tensors: Tensor) -> dict[str, Tensor | None]:
    state = {f"tensor {index}": t.detach().clone() for index, t in enumerate(tensors)}
    for name, p in module.named_parameters():
        for attribute in (None, "grad", "main_grad"):
            value = p if attribute is None else getattr(p, attribute, None)
            state[f"{name} {attribute}"] = None if value is None else value.detach().clone()
    return state | {name: b.clone() for name, b in module.named_buffers()}


# -------------------------------------------------------------------------------------------- refused before forward


def _main_grad(weight: Any) -> Tensor:
    weight.main_grad = torch.zeros_like(weight)
    return weight.main_grad


def _grad(weight: Tensor) -> Tensor:
    weight.grad = torch.zeros_like(weight)
    return weight.grad


Where = Callable[[Sequential, Tensor, Tensor], Tensor]
HELD: dict[str, tuple[Where, str]] = {
    "a parameter": (lambda seq, x, scales: seq[0].weight, r"the parameter 'weight' of operation 0 \(GroupedLinear\)"),
    "the end of a parameter": (
        lambda seq, x, scales: seq[2].weight.data.view(-1)[-1:].as_strided((1,), (1,), 3 * WIDTH**2 - ROWS * WIDTH),
        r"the parameter 'weight' of operation 2 \(GroupedLinear\)",
    ),
    "main_grad": (
        lambda seq, x, scales: _main_grad(seq[2].weight),
        r"weight.main_grad of operation 2 \(GroupedLinear\)",
    ),
    ".grad": (lambda seq, x, scales: _grad(seq[0].weight), r"weight.grad of operation 0 \(GroupedLinear\)"),
}
READ: dict[str, tuple[Where, str]] = {
    "x": (lambda seq, x, scales: x, "x"),
    "an extra input": (lambda seq, x, scales: scales, "the extra input 'scales'"),
}


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("name", ["output", "grad_input"])
@pytest.mark.parametrize("index", [0, -1])
@pytest.mark.parametrize("what", [*HELD, *READ])
def test_a_buffer_that_overlaps_is_refused_before_anything_is_written(
    what: str, index: int, name: str, frozen: bool, training: bool
) -> None:
    where, words = (HELD | READ)[what]
    seq = layer()
    seq.requires_grad_(not frozen)
    x, scales = torch.randn(ROWS, WIDTH), torch.randn(ROWS * WIDTH)[:ROWS]
    buffer = in_memory_of(where(seq, x, scales))
    before = state_of(seq, x, scales)
    x.requires_grad_()  # leaves: what is written there is lost to who optimises them
    scales.requires_grad_()
    place = rf"operation {2 if index else 0} \(GroupedLinear\)"
    message = rf"^The buffer '{name}' of {place} shares memory with {words}, which would be overwritten"
    with torch.set_grad_enabled(training), pytest.raises(ValueError, match=message):
        seq(x, split_sizes=SIZES, scales=scales, buffers={index: {name: buffer}})
    assert_same_bits(state_of(seq, x, scales), before)


@pytest.mark.parametrize("name", ["output", "grad_input"])
def test_buffers_that_overlap_each_other_are_refused(name: str) -> None:
    arena = torch.zeros(2 * ROWS * WIDTH)
    buffers = {0: {name: in_memory_of(arena)}, 2: {name: in_memory_of(arena, ROWS * WIDTH - 1)}}
    message = rf"'{name}' of operation 2 \(GroupedLinear\) shares memory with the buffer '{name}' of operation 0"
    seq = layer()
    for modules in (seq, (*seq[:2], nn.Identity(), seq[2])):  # one pipeline, and two
        indices = {0: buffers[0], -1: buffers[2]}
        with pytest.raises(ValueError, match=message.replace("operation 2", "operation [23]")):
            Sequential(*modules)(
                torch.randn(ROWS, WIDTH), split_sizes=SIZES, scales=torch.randn(ROWS), buffers=indices
            )  # fmt: skip
    assert not arena.any()


@pytest.mark.parametrize("what", ["x", "scales", "h"])
def test_a_later_stages_gradient_is_not_written_over_what_an_earlier_one_keeps(what: str) -> None:
    first, gelu, last = layer()
    x, scales = torch.randn(ROWS, WIDTH), torch.randn(ROWS * WIDTH)[:ROWS]
    h = torch.empty(ROWS, WIDTH)
    words = {"x": "x", "scales": "the extra input 'scales'", "h": r"the buffer 'output' of operation 0 \(Grouped.*\)"}
    buffer = in_memory_of({"x": x, "scales": scales, "h": h}[what])
    buffers = {0: {"output": h}, 3: {"grad_input": buffer}}
    message = rf"'grad_input' of operation 3 \(GroupedLinear\) shares memory with {words[what]}, which would"
    with pytest.raises(ValueError, match=message):
        Sequential(first, gelu, nn.Tanh(), last)(x, split_sizes=SIZES, scales=scales, buffers=buffers)


def test_an_ordinary_modules_parameter_is_not_overwritten() -> None:
    seq = Sequential(nn.Linear(WIDTH, WIDTH), ops.GroupedLinear(GROUPS, WIDTH, WIDTH), nn.Identity())
    buffer = in_memory_of(seq[0].weight)
    with pytest.raises(ValueError, match=r"shares memory with the parameter 'weight' of operation 0 \(Linear\)"):
        seq(torch.randn(ROWS, WIDTH), split_sizes=SIZES, buffers={1: {"output": buffer}})


def test_a_delayed_scalings_state_is_not_overwritten() -> None:
    op = ops.GroupedLinear(GROUPS, 4, 4)
    with autocast(recipe="fp8_delayed"):
        op(torch.randn(1, 4), split_sizes=[1, 0, 0])
        history = op.quantizer_input_amax_history
        buffer = history.view(-1)[:4].view(1, 4)
        with pytest.raises(ValueError, match="shares memory with the state 'quantizer_input_amax_history'"):
            op(torch.randn(1, 4), split_sizes=[1, 0, 0], buffers={"output": buffer})


def test_an_operation_called_alone_refuses_too() -> None:
    op, x = ops.GroupedLinear(GROUPS, WIDTH, WIDTH), torch.randn(ROWS, WIDTH)
    with torch.no_grad(), pytest.raises(ValueError, match=r"operation 0 \(GroupedLinear\) shares memory with x"):
        op(x, split_sizes=SIZES, buffers={"output": x})


# ------------------------------------------------------------------------------------------- refused before backward


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("what", ["dy", "x", "scales", "h", "main_grad"])
def test_a_gradients_buffer_that_overlaps_what_backward_needs_is_refused(what: str, path: str) -> None:
    seq = layer(path=path)
    x, scales = torch.randn(ROWS, WIDTH, requires_grad=True) * 1, torch.randn(ROWS * WIDTH)[:ROWS]
    h, dy, main_grad = torch.empty(ROWS, WIDTH), torch.randn(ROWS, WIDTH), torch.zeros_like(seq[0].weight)
    memory = {"dy": dy, "x": x, "scales": scales, "h": h, "main_grad": main_grad}[what]
    buffers = {0: {"output": h, "grad_input": in_memory_of(memory)}}
    y = seq(x, split_sizes=SIZES, scales=scales, buffers=buffers)
    seq[0].weight.main_grad = main_grad  # after forward
    before = state_of(seq, memory, dy)
    words = {"dy": "the gradient of an output", "main_grad": "a parameter's main_grad"}
    expected = words.get(what, "a tensor that forward keeps for backward")
    with pytest.raises(ValueError, match=rf"'grad_input' of operation 0 .* shares memory with {expected}"):
        y.backward(dy)
    assert_same_bits(state_of(seq, memory, dy), before)


@pytest.mark.parametrize("first", [(), (ops.Reshape((ROWS, WIDTH)),)], ids=["", "behind a view"])
def test_gradients_of_one_tensor_in_one_buffer_are_refused(first: tuple[Any, ...]) -> None:
    """Autograd adds them when both are there."""
    seq, x = Sequential(*first, ops.GroupedLinear(GROUPS, WIDTH, WIDTH)), torch.randn(ROWS, WIDTH, requires_grad=True)
    given = {"split_sizes": SIZES, "buffers": {-1: {"grad_input": torch.empty(ROWS, WIDTH)}}}
    for leaf in (True, False):
        z = x if leaf else x * 2
        with pytest.raises(ValueError, match="shares memory with a gradient from another call"):
            (seq(z, **given).sum() + seq(z, **given).square().sum()).backward()
    x.grad = None
    seq(x, **given).sum().backward()  # an exception leaves nothing behind


def test_an_extra_inputs_gradient_in_the_buffer_is_refused_where_another_is_added() -> None:
    seq = Sequential(ops.Linear(WIDTH, WIDTH), ops.AddExtraInput(), ops.GroupedLinear(GROUPS, WIDTH, WIDTH))
    extra, buffer = torch.randn(ROWS, WIDTH, requires_grad=True), torch.empty(ROWS, WIDTH)

    def call() -> Tensor:
        return seq(torch.randn(ROWS, WIDTH), split_sizes=SIZES, extra=extra, buffers={2: {"grad_input": buffer}})

    with pytest.raises(ValueError, match="a gradient from another call"):
        (call().sum() + call().square().sum()).backward()


# ----------------------------------------------------------------------------------------- what forward left is changed


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("make", [experts, partial(experts, fusions=()), layer], ids=["fused", "unfused", "GELU"])
def test_a_second_forward_over_what_the_first_keeps_is_noticed(make: Callable[..., Sequential], path: str) -> None:
    seq = make(path=path)
    extras = {n: torch.randn(ROWS) for n in seq.layout().consumed if n == "scales"}
    h = torch.empty(ROWS, seq[0].out_features)

    def call() -> Tensor:
        x = torch.randn(ROWS, WIDTH)
        return seq(x, split_sizes=SIZES, buffers={0: {"output": h}}, **extras).sum()

    first, second = call(), call()
    second.backward()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()


# ------------------------------------------------------------------------------------------------------ what is allowed


def run(seq: Sequential, tensors: Mapping[str, Tensor], buffers: Any, **extras: Any) -> dict[str, Tensor | None]:
    seq.zero_grad()
    x = tensors["x"].detach().requires_grad_()
    y = seq(x * 1, split_sizes=SIZES, buffers=buffers, **extras)
    found = {"y": y.detach().clone()}
    y.backward(tensors["dy"])
    return found | gradients({"x": x, **dict(seq.named_parameters())})


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("fusions", [None, ()], ids=["fused", "unfused"])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
def test_slices_of_one_arena_are_tensors_of_their_own(recipe: str | None, fusions: Any, path: str) -> None:
    seq = experts(fusions=fusions, path=path)
    arena, at = torch.randn(20 * WIDTH**2), 0

    def take(*shape: int) -> Tensor:
        nonlocal at
        begin, at = at, at + torch.Size(shape).numel()  # no gap between two
        return arena[begin:at].view(shape)

    for parameter in seq.parameters():
        parameter.data = take(*parameter.shape).copy_(parameter.data)
    tensors = {"x": take(ROWS, WIDTH), "dy": take(ROWS, WIDTH)}
    buffers = {
        0: {"output": take(ROWS, 2 * WIDTH), "grad_input": take(ROWS, WIDTH)},
        2: {"output": take(ROWS, WIDTH), "grad_input": take(ROWS, WIDTH)},
    }
    with autocast(recipe=recipe):
        want = run(seq, tensors, None)
        assert_close(run(seq, tensors, buffers), want)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("recipe", [None, "fp8_delayed"])
def test_without_gradients_the_pre_activation_fills_its_buffer(
    recipe: str | None, device: str, monkeypatch: Any
) -> None:
    """Also where FC1 and the activation are one kernel, which would not store it."""
    if device == "cpu":
        monkeypatch.setattr(GroupedMLP, "why_pre_activation", lambda self, path, dtype: None)
    hidden, sizes = 768, [300, 0, 500]
    about = {"device": device, "dtype": torch.bfloat16, "bias": False}
    fc1 = ops.GroupedLinear(GROUPS, hidden, 256, **about)
    seq = Sequential(fc1, ops.SwiGLU(), ops.GroupedLinear(GROUPS, 128, hidden, **about))
    x = torch.randn(sum(sizes), hidden, device=device, dtype=torch.bfloat16)
    buffer = torch.full((len(x), 256), torch.nan, device=device, dtype=torch.bfloat16)
    with torch.no_grad(), autocast(recipe=recipe):
        want = fc1(x, split_sizes=sizes)
        y = seq(x, split_sizes=sizes, buffers={0: {"output": buffer}})
        torch.testing.assert_close(buffer, want)
        torch.testing.assert_close(y, seq(x, split_sizes=sizes))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("make", [layer, experts], ids=["unfused", "fused"])
def test_an_output_and_a_gradient_may_share_memory_that_backward_does_not_read(make: Any, path: str) -> None:
    seq = make(path=path)
    extras = {n: torch.randn(ROWS) for n in seq.layout().consumed if n == "scales"}
    tensors = {"x": torch.randn(ROWS, WIDTH), "dy": torch.randn(ROWS, WIDTH)}
    buffer = torch.empty(ROWS, WIDTH)
    want = run(seq, tensors, None, **extras)
    assert_close(run(seq, tensors, {-1: {"output": buffer}, 0: {"grad_input": buffer}}, **extras), want)
    assert_close({"dx": buffer}, {"dx": want["gradient of x"]})


def test_the_gradient_may_take_the_place_of_an_x_that_is_not_kept() -> None:
    op = ops.GroupedLinear(GROUPS, WIDTH, WIDTH).requires_grad_(False)
    leaf = torch.randn(ROWS, WIDTH, requires_grad=True)
    results = []
    for shared in (False, True):
        x = leaf * 1
        y = op(x, split_sizes=SIZES, buffers={"grad_input": x.detach()} if shared else None)
        results.append({"dx": torch.autograd.grad(y, leaf, torch.ones_like(y))[0]})
    assert_same_bits(*results)


@pytest.mark.parametrize("first", [(), (ops.Reshape((ROWS, WIDTH)),)], ids=["", "behind a view"])
def test_one_buffer_serves_backward_after_backward(first: tuple[Any, ...]) -> None:
    seq = Sequential(*first, ops.GroupedLinear(GROUPS, WIDTH, WIDTH))
    results = []
    for buffer in (None, torch.empty(ROWS, WIDTH)):
        buffers = None if buffer is None else {-1: {"grad_input": buffer}}
        x = torch.ones(ROWS, WIDTH, requires_grad=True)
        for _ in range(3):  # `.grad` is memory of its own
            seq(x, split_sizes=SIZES, buffers=buffers).square().sum().backward()
        results.append({"dx": x.grad})
    assert_same_bits(*results)


def test_one_buffer_serves_layers_that_follow_each_other() -> None:
    first, second = (ops.GroupedLinear(GROUPS, WIDTH, WIDTH) for _ in range(2))
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    results = []
    for buffers in (None, {"grad_input": torch.empty(ROWS, WIDTH)}):
        h = F.gelu(first(x, split_sizes=SIZES, buffers=buffers))
        y = second(h, split_sizes=SIZES, buffers=buffers)
        results.append({"dx": torch.autograd.grad(y.square().sum(), x)[0].clone()})
    assert_same_bits(*results)


def test_one_grad_input_of_two_calls_on_views_of_one_tensor_is_refused():
    """The first gradient waits for autograd while the second call would overwrite it."""
    op, buffer = ops.GroupedLinear(1, 8, 8, bias=False), torch.empty(4, 8)
    x = torch.randn(4, 8, requires_grad=True)
    ys = [op(view, split_sizes=[4], buffers={"grad_input": buffer}) for view in (x.view(4, 8), x.view(4, 8))]
    with pytest.raises(ValueError, match="from another call, which autograd has yet to add or to hand on"):
        (ys[0] + 2 * ys[1]).sum().backward()


def test_a_grad_input_may_be_used_again_once_its_gradient_was_read():
    """Down a chain of calls every second one writes into the same memory; twice, so that no hook is left behind."""
    chain = [ops.GroupedLinear(1, 8, 8, bias=False) for _ in range(4)]
    buffers = [torch.empty(4, 8), torch.empty(4, 8)]
    x = torch.randn(4, 8)
    for _ in range(2):
        leaf, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, expected = leaf, plain
        for index, op in enumerate(chain):
            y = op(y, split_sizes=[4], buffers={"grad_input": buffers[index % 2]})
            expected = op(expected, split_sizes=[4])
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(leaf.grad, plain.grad)


@pytest.mark.parametrize(
    ("buffers", "message"),
    [
        ([torch.ones(1)], r"buffers is a list. Pass a mapping"),
        ({"a": {}}, r"a key of buffers is 'a' \(str\), but must be an integer"),
        ({0: torch.ones(1)}, r"buffers\[0\] is a Tensor. Pass a mapping"),
    ],
)
def test_buffers_are_mappings_by_position_and_name(buffers: Any, message: str) -> None:
    linear = ops.GroupedLinear(2, 4, 4)
    with pytest.raises(TypeError, match=message):
        Sequential(linear)(torch.randn(2, 4), split_sizes=[1, 1], buffers=buffers)
    with pytest.raises(TypeError, match="buffers is a Tensor. Pass a mapping"):
        linear(torch.randn(2, 4), split_sizes=[1, 1], buffers=torch.ones(2))
