"""accumulate_into_main_grad: what is written to main_grad, what autograd receives, and what is refused."""

from __future__ import annotations

import copy
import itertools
import re
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fuser import Sequential, autocast, ops
from ops.kernels.grouped_gemm.measured_tiles import Gemm
from ops.kernels.grouped_gemm.tile_rules import MANY_ROWS
from ops.products.product import store
from ops.runner import nested_backward
from ops.runner.operation import BasicOperation, FusedOperation
from tests.check_operation import DEVICES
from tests.grouped_cases import tiles_of_groups
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

# float32: the same products, in sums of another order on the GPU alone. bfloat16: autograd's gradient is rounded,
# main_grad's is not. Recipes: the operands are the same codes.
TOLERANCES = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def assert_near(actual: Tensor, expected: Tensor, dtype: torch.dtype = torch.float32) -> None:
    largest = expected.abs().max().item()
    torch.testing.assert_close(actual.double(), expected.double(), rtol=0, atol=TOLERANCES[dtype] * (1 + largest))


# What is written where


def check_table(
    sequential: Sequential, expected: dict[str, Tensor], *, delay: bool, main_grad: bool, flag: bool, overwrite: bool,
    zero_out: bool, dtype: torch.dtype = torch.float32, late: bool = False,
) -> None:  # fmt: skip
    """late: the attributes are set between forward and backward."""
    start = torch.nan if overwrite else 0.5
    give = partial(give_main_grads, sequential, start, flag=flag, overwrite=overwrite, zero_out=zero_out)
    if not late:
        give()
    backward(sequential, between=give if late else None)
    weights = weights_of(sequential)
    for name, weight in weights.items():
        untouched = torch.full_like(weight.main_grad, start)
        if delay or not main_grad:
            torch.testing.assert_close(weight.main_grad, untouched, rtol=0, atol=0, equal_nan=True)
            assert not getattr(weight, "grad_added_to_main_grad", False)
        if main_grad and flag:
            placeholder = weight.grad
            assert (placeholder.shape, placeholder.dtype, placeholder.device) == (
                weight.shape, weight.dtype, weight.device,
            )  # fmt: skip
            assert placeholder.data_ptr() != weight.main_grad.data_ptr()
            assert torch.equal(placeholder, torch.zeros_like(weight)) if zero_out else placeholder.isnan().all()
        elif main_grad or delay:
            assert weight.grad is None
        else:
            assert_near(weight.grad, expected[name], dtype)
    assert all(bias.grad is not None for bias in biases_of(sequential).values())
    if delay:
        sequential.backward_dw()
    for name, weight in weights.items():
        if main_grad:
            assert_near(weight.main_grad, expected[name] + (0 if overwrite else 0.5), dtype)
            assert getattr(weight, "grad_added_to_main_grad", None) is (True if flag else None)
        else:
            assert_near(weight.grad, expected[name], dtype)
            assert not getattr(weight, "grad_added_to_main_grad", False)


SWITCHES = ("delay", "main_grad", "flag", "overwrite", "zero_out")
TABLE = [dict(zip(SWITCHES, on, strict=True)) for on in itertools.product([False, True], repeat=len(SWITCHES))]


def name_of(case: dict[str, bool]) -> str:
    return ", ".join(switch for switch, on in case.items() if on) or "plain"


@pytest.mark.pairwise
@DEVICE
@pytest.mark.parametrize("case", TABLE, ids=name_of)
@EVERY_MODEL
def test_gradients_land_where_the_table_says(model: str, case: dict[str, bool], device: str) -> None:
    expected = gradients(make(model, device=device), 1)
    switches = {"accumulate_into_main_grad": case["main_grad"], "delay_wgrad_compute": case["delay"]}
    check_table(make(model, device=device, **switches), expected, **case)


@pytest.mark.pairwise
@DEVICE
@pytest.mark.parametrize("case", TABLE, ids=name_of)
@pytest.mark.parametrize("model", ["linear", "grouped", "grouped, per group", "experts"])
def test_the_table_holds_for_attributes_set_after_forward(model: str, case: dict[str, bool], device: str) -> None:
    expected = gradients(make(model, device=device), 1)
    switches = {"accumulate_into_main_grad": case["main_grad"], "delay_wgrad_compute": case["delay"]}
    check_table(make(model, device=device, **switches), expected, late=True, **case)


@pytest.mark.pairwise
@DEVICE
@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("path", [None, "split"])
@pytest.mark.parametrize("recipe", [None, "fp8_delayed", "mxfp8"])
@FEW
def test_recipes_and_paths_keep_to_the_table(
    model: str, recipe: str | None, path: str | None, delay: bool, overwrite: bool, device: str
) -> None:
    settings: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "path": path}
    case = {"delay": delay, "main_grad": True, "flag": True, "overwrite": overwrite, "zero_out": False}
    with autocast(recipe):
        expected = gradients(make(model, **settings), 1)
        sequential = make(model, accumulate_into_main_grad=True, delay_wgrad_compute=delay, **settings)
        check_table(sequential, expected, dtype=torch.bfloat16, **case)


@pytest.mark.gpu
@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
@pytest.mark.parametrize(
    ("rows_a_group", "gluon"),
    [(MANY_ROWS, False), (1, False), (MANY_ROWS, True)],
    ids=["many rows", "few rows", "in Gluon"],
)
@pytest.mark.parametrize("model", ["grouped", "experts, per group"])
def test_buffers_are_written_by_boxes_and_in_gluon(model: str, rows_a_group: int, gluon: bool, overwrite: bool) -> None:
    settings: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    sequential = make(model, accumulate_into_main_grad=True, **settings)
    shapes = {(len(SIZES), *weight.shape[-2:]) for weight in weights_of(sequential).values()}
    gemms = [Gemm("NT", torch.bfloat16, torch.float32, add, *shape) for shape in shapes for add in (False, True)]
    expected = gradients(make(model, **settings), 1)
    case = {"delay": False, "main_grad": True, "flag": True, "overwrite": overwrite, "zero_out": False}
    with tiles_of_groups(rows_a_group, ROWS, *gemms, gluon=gluon):
        check_table(sequential, expected, dtype=torch.bfloat16, **case)


@DEVICE
@FEW
def test_gradients_of_several_backwards_are_added(model: str, device: str) -> None:
    expected = gradients(make(model, device=device), 1, 2, 3)
    sequential = make(model, device=device, accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.0)
    gradients(sequential, 1, 2, 3)
    for name, weight in weights_of(sequential).items():
        assert_near(weight.main_grad, expected[name])


@DEVICE
@FEW
def test_the_first_gradient_since_the_reset_overwrites_and_later_ones_are_added(model: str, device: str) -> None:
    expected = gradients(make(model, device=device), 1, 2)
    sequential = make(model, device=device, accumulate_into_main_grad=True)
    give_main_grads(sequential, torch.nan, overwrite=True)
    for _ in range(2):
        gradients(sequential, 1, 2)
        for name, weight in weights_of(sequential).items():
            assert_near(weight.main_grad, expected[name])
            weight.grad_added_to_main_grad = False


@DEVICE
@FEW
def test_every_backward_overwrites_without_the_flag(model: str, device: str) -> None:
    expected = gradients(make(model, device=device), 2)
    sequential = make(model, device=device, accumulate_into_main_grad=True)
    give_main_grads(sequential, torch.nan, flag=False, overwrite=True)
    gradients(sequential, 1, 2)
    for name, weight in weights_of(sequential).items():
        assert_near(weight.main_grad, expected[name])


@DEVICE
@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
def test_an_empty_groups_part_is_untouched_or_zeroed(overwrite: bool, device: str) -> None:
    sequential = make("grouped", device=device, accumulate_into_main_grad=True)
    give_main_grads(sequential, torch.nan, overwrite=overwrite)
    backward(sequential)
    [weight] = weights_of(sequential).values()
    empty = SIZES.index(0)
    assert weight.main_grad[empty].isnan().all() if not overwrite else (weight.main_grad[empty] == 0).all()


@EVERY_MODEL
def test_a_buffer_in_the_weights_dtype_gets_the_same_gradient_rounded(model: str) -> None:
    results = []
    for dtype in (torch.float32, None):
        sequential = make(model, dtype=torch.bfloat16, accumulate_into_main_grad=True)
        give_main_grads(sequential, 0.5, dtype=dtype)
        backward(sequential)
        results.append([weight.main_grad for weight in weights_of(sequential).values()])
    for exact, rounded in zip(*results, strict=True):
        assert rounded.dtype == torch.bfloat16
        torch.testing.assert_close(rounded.float(), exact, rtol=2**-8, atol=0)


# Layouts of the buffer


def padded(weight: Tensor) -> Tensor:
    groups, elements = weight.shape[0], weight[0].numel()
    buffer = torch.full((groups, elements + 8), torch.nan, device=weight.device)
    return buffer[:, :elements].unflatten(1, weight.shape[1:]).fill_(0.5)


def flat(weight: Tensor) -> Tensor:
    return torch.full((weight.numel(),), 0.5, device=weight.device)


@DEVICE
@pytest.mark.parametrize("path", ["grouped", "split"])
@pytest.mark.parametrize("layout", [padded, flat])
def test_flat_and_padded_buffers_are_written_in_place(layout: Any, path: str, device: str) -> None:
    expected = gradients(make("grouped", device=device), 1)
    sequential = make("grouped", device=device, accumulate_into_main_grad=True, path=path)
    [(name, weight)] = weights_of(sequential).items()
    buffer = weight.main_grad = layout(weight)
    backward(sequential)
    assert weight.main_grad is buffer
    assert_near(buffer.reshape(weight.shape), expected[name] + 0.5)
    if buffer.dim() == 3:  # the room between groups is as it was
        assert torch.as_strided(buffer, (len(SIZES) - 1, 8), (buffer.stride(0), 1), buffer[0].numel()).isnan().all()


@DEVICE
@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
@pytest.mark.parametrize("order", ["as the groups", "reversed"])
@pytest.mark.parametrize("room", [0, 8])
def test_each_groups_part_of_a_flat_bucket_is_written_in_place(
    room: int, order: str, overwrite: bool, device: str
) -> None:
    expected = gradients(make("grouped, per group", device=device), 1)
    sequential = make("grouped, per group", device=device, accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.0, overwrite=overwrite)
    weights = weights_of(sequential)
    size = IN * OUT
    bucket = torch.full((len(SIZES), size + room), -0.0, device=device)
    parts = bucket.unbind() if order == "as the groups" else bucket.unbind()[::-1]
    for weight, part in zip(weights.values(), parts, strict=True):
        weight.main_grad = part[:size].view(weight.shape)
    backward(sequential)
    for name, weight in weights.items():
        assert_near(weight.main_grad, expected[name])
    assert not bucket[:, size:].any()
    untouched = weights[f"0.weight{SIZES.index(0)}"].main_grad.signbit()
    assert untouched.all() != overwrite  # nothing was added, not even a zero


REFUSED = {
    "another shape": lambda w: torch.zeros(*w.shape[:-1], w.shape[-1] + 1),
    "transposed": lambda w: torch.zeros(w.mT.shape).mT,
    "too few elements": lambda w: torch.zeros(w.numel() - 1),
    "flat with gaps": lambda w: torch.zeros(2 * w.numel())[::2],
    "rows with gaps": lambda w: torch.zeros(*w.shape[:-1], w.shape[-1] + 8)[..., : w.shape[-1]],
    "one part for all groups": lambda w: torch.zeros(w.shape[1:]).expand(w.shape) if w.dim() == 3 else None,
    "another dtype": lambda w: torch.zeros(w.shape, dtype=torch.float16),
    "another device": lambda w: torch.zeros(w.shape, device="meta"),
}


@pytest.mark.pairwise
@DEVICE
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("kind", REFUSED)
@pytest.mark.parametrize("model", ["linear", "grouped", "grouped, per group", "experts"])
def test_a_buffer_that_does_not_fit_is_refused_in_one_sentence(model: str, kind: str, delay: bool, device: str) -> None:
    sequential = make(model, device=device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    give_main_grads(sequential, 0.5)
    name, weight = list(weights_of(sequential).items())[-1]
    with torch.device(device):
        weight.main_grad = buffer = REFUSED[kind](weight)
    if buffer is None:
        pytest.skip("This weight has no groups.")
    position, own_name = name.split(".")
    place = f"{position} (GroupedLinear)" if model != "linear" else "0 (Linear)"
    if model == "experts" and not delay:
        place = "0 (GroupedMLP)"
    message = (
        f"In operation {place}: {own_name}.main_grad has shape "
        f"{list(buffer.shape)}, strides {list(buffer.stride())}, {buffer.dtype}, on {buffer.device}. Needed for "
        f"{own_name!r}: torch.float32, on {weight.device}, contiguous, of shape {list(weight.shape)} or flat"
    )
    if delay:
        backward(sequential)
    with pytest.raises(ValueError, match=re.escape(message)):
        sequential.backward_dw() if delay else backward(sequential)
    assert all(not w.grad_added_to_main_grad for w in weights_of(sequential[int(position) :]).values())


@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("value", ["missing", None])
@FEW
def test_a_weight_without_a_buffer_is_refused_in_wgrad(model: str, value: Any, delay: bool) -> None:
    sequential = make(model, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    if value is None:
        for weight in weights_of(sequential).values():
            weight.main_grad = None
    found = "main_grad is None" if value is None else "there is no main_grad"
    if delay:
        backward(sequential)
    with pytest.raises(
        RuntimeError, match=f"In operation .*, but {found}. Set it before backward to a torch.float32 tensor"
    ):
        sequential.backward_dw() if delay else backward(sequential)


@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("wrong", [None, torch.zeros(3)], ids=["missing", "another shape"])
@EVERY_MODEL
def test_nothing_is_written_where_one_buffer_is_refused(model: str, wrong: Tensor | None, delay: bool) -> None:
    """Backward comes to the first weight last; once it has its buffer, all are as if it had had it."""
    sequential = make(model, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    give_main_grads(sequential, 0.5)
    first, *others = weights_of(sequential).values()
    buffer, first.main_grad = first.main_grad, wrong
    if delay:
        backward(sequential)
    with pytest.raises((RuntimeError, ValueError), match=r"main_grad (is None|has shape \[3\])"):
        sequential.backward_dw() if delay else backward(sequential)
    assert all((weight.main_grad == 0.5).all() and not weight.grad_added_to_main_grad for weight in others)
    first.main_grad = buffer
    sequential.backward_dw() if delay else backward(sequential)
    expected = make(model, accumulate_into_main_grad=True)
    give_main_grads(expected, 0.5)
    backward(expected)
    for name, weight in weights_of(expected).items():
        assert torch.equal(weights_of(sequential)[name].main_grad, weight.main_grad)


def test_a_frozen_weight_needs_no_buffer() -> None:
    sequential = make("experts", accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.0)
    first = next(iter(weights_of(sequential).values())).requires_grad_(False)
    del first.main_grad
    backward(sequential)


# When the attributes are read


@DEVICE
@FEW
def test_forward_needs_no_main_grad(model: str, device: str) -> None:
    sequential = make(model, device=device, accumulate_into_main_grad=True)
    x = torch.ones(ROWS, IN, device=device)
    extras = {"split_sizes": torch.tensor(SIZES, device=device)} if sequential.layout().consumed else {}
    with torch.no_grad():
        sequential(x, **extras)
    with torch.inference_mode():
        sequential(x, **extras)
    y = sequential(x, **extras)
    give_main_grads(sequential, 0.5)  # after forward
    y.sum().backward()
    assert all(weight.grad_added_to_main_grad for weight in weights_of(sequential).values())


@FEW
def test_a_parameter_of_megatron_fsdp_is_asked_for_its_buffer_in_backward(model: str) -> None:
    expected = gradients(make(model), 1, 2)
    sequential = make(model, accumulate_into_main_grad=True)
    made: list[Tensor] = []
    for weight in weights_of(sequential).values():
        weight.__fsdp_param__ = True
        weight.grad_added_to_main_grad = False

        def get_main_grad(weight: Any = weight) -> Tensor:
            made.append(torch.zeros(weight.shape) if not hasattr(weight, "main_grad") else weight.main_grad.clone())
            return made[-1]

        weight.get_main_grad = get_main_grad
    backward(sequential, 1)
    backward(sequential, 2)  # another address each time
    assert len(made) == 2 * len(expected)
    for name, weight in weights_of(sequential).items():
        assert any(weight.main_grad is buffer for buffer in made)
        assert_near(weight.main_grad, expected[name])


@FEW
def test_hooks_of_autograd_see_the_flag_and_the_buffer(model: str) -> None:
    expected = gradients(make(model), 1)
    sequential = make(model, accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.0)
    seen: dict[str, Tensor] = {}
    for name, weight in weights_of(sequential).items():

        def hook(weight: Any, name: str = name) -> None:
            assert weight.grad_added_to_main_grad
            seen[name] = weight.main_grad.clone()
            weight.grad = None

        weight.register_post_accumulate_grad_hook(hook)
    backward(sequential)
    assert seen.keys() == expected.keys()
    for name, value in seen.items():
        assert_near(value, expected[name])


@DEVICE
@pytest.mark.parametrize("model", ["grouped, per group", "experts, per group"])
def test_placeholders_of_weights_of_one_shape_share_nothing(model: str, device: str) -> None:
    expected = gradients(make(model, device=device), 1, 2)
    sequential = make(model, device=device, accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.0, zero_out=True)
    weights = weights_of(sequential)
    backward(sequential, 1)
    held = [weight.grad for weight in weights.values()]
    assert len({grad.untyped_storage().data_ptr() for grad in held}) == len(held)
    for index, grad in enumerate(held):
        grad.fill_(index)
    backward(sequential, 2)  # adds zeros in place, to each its own
    for index, (name, weight) in enumerate(weights.items()):
        assert (weight.grad == index).all()
        assert_near(weight.main_grad, expected[name])


def test_placeholders_are_taken_as_grad_without_a_copy_and_freed_with_it() -> None:
    sequential = make("experts", accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.0)
    backward(sequential)
    first, second = weights_of(sequential).values()
    assert first.grad.data_ptr() != second.grad.data_ptr()
    assert first.grad.untyped_storage().nbytes() == first.numel() * 4


@FEW
@pytest.mark.parametrize("flat", [False, True], ids=["in shape", "flat"])
def test_a_main_grad_that_is_grad_too_gets_no_placeholder_added(model: str, flat: bool) -> None:
    """So an optimizer steps it, and clears it with `zero_grad(set_to_none=False)`."""
    sequential = make(model, accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.0)
    weights = weights_of(sequential)
    for weight in weights.values():
        buffer = weight.main_grad
        weight.main_grad = buffer.flatten() if flat else buffer
        weight.grad = weight.main_grad.view(weight.shape)
    for seeds in ((1, 2), (3,)):
        expected = gradients(make(model), *seeds)
        for seed in seeds:
            backward(sequential, seed)
        for name, weight in weights.items():
            assert weight.grad.data_ptr() == weight.main_grad.data_ptr()
            assert_near(weight.grad, expected[name])
        sequential.zero_grad(set_to_none=False)


@FEW
def test_anomaly_mode_finds_no_nan_in_placeholders(model: str) -> None:
    expected = gradients(make(model), 1)
    sequential = make(model, accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.0)
    with pytest.warns(UserWarning, match="Anomaly Detection"), torch.autograd.detect_anomaly():
        backward(sequential)
    for name, weight in weights_of(sequential).items():
        assert (weight.grad == 0).all()
        assert_near(weight.main_grad, expected[name])
    for weight in weights_of(sequential).values():
        weight.grad = None
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        backward(sequential)
    assert all(weight.grad.isnan().all() for weight in weights_of(sequential).values())


# Frozen, tied and mixed weights


@pytest.mark.parametrize("model", ["linear", "experts", "experts, per group"])
def test_a_frozen_weight_needs_no_buffer_and_is_left_alone(model: str) -> None:
    sequential = make(model, accumulate_into_main_grad=True)
    frozen, *others = weights_of(sequential).values()
    give_main_grads(sequential, 0.5)
    frozen.requires_grad_(False)
    del frozen.main_grad
    backward(sequential)
    assert frozen.grad is None and not frozen.grad_added_to_main_grad and not hasattr(frozen, "main_grad")
    assert all(weight.grad_added_to_main_grad for weight in others)


def test_an_input_without_requires_grad_does_not_keep_the_weights_from_their_gradients() -> None:
    expected = gradients(make("linear"), 1)
    sequential = make("linear", accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.0)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(ROWS, IN, generator=generator)
    sequential(x).backward(torch.randn(ROWS, OUT, generator=generator))
    for name, weight in weights_of(sequential).items():
        assert_near(weight.main_grad, expected[name])


def tied(device: str, **switches: bool) -> Sequential:
    torch.manual_seed(0)
    sequential = Sequential(ops.Linear(IN, IN, **switches), ops.SiLU(), ops.Linear(IN, IN, **switches)).to(device)
    sequential[2].weight = sequential[0].weight
    return sequential


@DEVICE
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
def test_both_gradients_of_a_tied_weight_are_added(overwrite: bool, delay: bool, device: str) -> None:
    expected = gradients(tied(device), 1)["0.weight"]
    sequential = tied(device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    give_main_grads(sequential, torch.nan if overwrite else 0.5, overwrite=overwrite)
    backward(sequential)
    if delay:
        sequential.backward_dw()
    assert_near(sequential[0].weight.main_grad, expected + (0 if overwrite else 0.5))


@DEVICE
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
def test_two_uses_in_one_backward_add_up_or_are_refused_where_each_would_overwrite(delay: bool, device: str) -> None:
    expected = gradients(make("linear", device=device), 1, 2)["0.weight"]

    def run(flag: bool) -> Sequential:
        sequential = make("linear", device=device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
        give_main_grads(sequential, torch.nan, flag=flag, overwrite=True)
        losses = []
        for seed in (1, 2):
            generator = torch.Generator().manual_seed(seed)
            x, dy = (torch.randn(ROWS, width, generator=generator).to(device) for width in (IN, OUT))
            losses.append((sequential(x) * dy).sum())
        sum(losses).backward()
        if delay:
            sequential.backward_dw()
            assert not sequential.need_backward_dw()
        return sequential

    assert_near(run(flag=True)[0].weight.main_grad, expected)
    message = "Weight 'weight' is used twice in one backward, and with overwrite_main_grad its second gradient would"
    with pytest.raises(RuntimeError, match=message):
        run(flag=False)


@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("overwrite", [False, True], ids=["accumulate", "overwrite"])
@pytest.mark.parametrize("flag", [False, True])
def test_gradients_of_a_weight_that_several_experts_share_are_added_or_refused(
    flag: bool, overwrite: bool, delay: bool
) -> None:
    def sharing(**switches: bool) -> Sequential:
        sequential = make("grouped, per group", **switches)
        sequential[0].weight3 = sequential[0].weight0
        return sequential

    expected = gradients(sharing(), 1)
    sequential = sharing(accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    give_main_grads(sequential, torch.nan if overwrite else 0.5, flag=flag, overwrite=overwrite)
    refused = overwrite and not flag
    message = "Weight 'weight3' is used twice in one backward"
    with pytest.raises(RuntimeError, match=message) if refused else nullcontext():
        backward(sequential)
        if delay:
            sequential.backward_dw()
    for name, weight in weights_of(sequential).items():
        if refused:
            assert weight.main_grad.isnan().all()
        else:
            assert_near(weight.main_grad, expected[name] + (0 if overwrite else 0.5))


def outside(model: Any, x: Tensor) -> Tensor:
    return model(x)


def segment(model: Any, x: Tensor) -> Tensor:
    return torch_checkpoint(model, x, use_reentrant=True)


def segment_in_segment(model: Any, x: Tensor) -> Tensor:
    return torch_checkpoint(partial(segment, model), x, use_reentrant=True)


# How a weight is used twice in one backward. Reentrant checkpointing runs one of its own for each segment.
TWO_USES = {
    "two segments": (segment, segment),
    "a segment, then outside": (segment, outside),
    "outside, then a segment": (outside, segment),
    "segments in segments": (segment_in_segment, segment_in_segment),
    "a segment, then one in a segment": (segment, segment_in_segment),
}


def loss_of(model: Any, *uses: Any) -> Any:
    """Of integers, so that sums of gradients are exact."""
    generator = torch.Generator().manual_seed(1)
    device = next(model.parameters()).device
    numbers = [torch.randint(-3, 4, (ROWS, IN), generator=generator) for _ in uses]
    inputs = [x.to(device, torch.float32).requires_grad_() for x in numbers]
    return sum(use(model, x).sum() for use, x in zip(uses, inputs, strict=True))


@DEVICE
@pytest.mark.parametrize("delay", [False, True], ids=["at once", "delayed"])
@pytest.mark.parametrize("kind", TWO_USES)
def test_uses_in_reentrant_segments_are_uses_in_one_backward(kind: str, delay: bool, device: str) -> None:
    plain = make("linear", device=device)
    loss_of(plain, *TWO_USES[kind]).backward()
    sequential = make("linear", device=device, accumulate_into_main_grad=True, delay_wgrad_compute=delay)
    [weight] = weights_of(sequential).values()
    for _ in range(2):  # a backward of its own each time
        give_main_grads(sequential, torch.nan, overwrite=True)
        loss_of(sequential, *TWO_USES[kind]).backward()
        if delay:
            sequential.backward_dw()  # one call for one backward
            assert not sequential.need_backward_dw()
        assert torch.equal(weight.main_grad, plain[0].weight.grad)
    del weight.grad_added_to_main_grad
    with pytest.raises(RuntimeError, match="Weight 'weight' is used twice in one backward"):
        loss_of(sequential, *TWO_USES[kind]).backward()
        sequential.backward_dw()


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(fctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(fctx: Any, dy: Tensor) -> Any:
        raise ArithmeticError("as asked")


@DEVICE
@pytest.mark.parametrize("use", [outside, segment, segment_in_segment])
def test_every_backward_overwrites_without_the_flag_also_in_reentrant_segments(use: Any, device: str) -> None:
    plain = make("linear", device=device)
    loss_of(plain, use).backward()
    sequential = make("linear", device=device, accumulate_into_main_grad=True)
    give_main_grads(sequential, torch.nan, flag=False, overwrite=True)
    [weight] = weights_of(sequential).values()
    for is_first in (True, False):
        loss_of(sequential, use).backward()
        assert torch.equal(weight.main_grad, plain[0].weight.grad)
        if is_first:  # a backward that fails has ended, too
            with pytest.raises(ArithmeticError):
                loss_of(sequential, lambda model, x: use(model, Fails.apply(x))).backward()
    assert not nested_backward._running


class FailsInBackward(BasicOperation):
    def fuser_forward(self, ctx: Any, x: Tensor, extras: Any) -> Any:
        return x.clone(), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Any) -> Any:
        raise ArithmeticError("as asked")


@pytest.mark.parametrize("where", ["in the Sequential", "before it", "in a segment"])
def test_a_backward_that_fails_leaves_no_delayed_gradients(where: str) -> None:
    """Else the operations behind the one that failed would be one backward late from then on."""
    sequential = make("linear", delay_wgrad_compute=True)
    failing = Sequential(FailsInBackward(), *sequential)
    uses = {
        "in the Sequential": lambda model, x: failing(x),
        "before it": lambda model, x: model(Fails.apply(x)),
        "in a segment": lambda model, x: segment(model, Fails.apply(x)),
    }
    loss_of(sequential, outside).backward()  # which is still to be computed
    for _ in range(2):
        with pytest.raises(ArithmeticError):
            loss_of(sequential, uses[where]).backward()
    sequential.backward_dw()
    assert not sequential.need_backward_dw()
    plain = make("linear")
    loss_of(plain, outside).backward()
    assert torch.equal(sequential[0].weight.grad, plain[0].weight.grad)


@DEVICE
def test_a_tied_weight_with_zero_out_wgrad_keeps_the_gradient_of_the_other_path(device: str) -> None:
    """A word embedding that is also the output layer, as Megatron ties them."""
    sequential = make("linear", device=device, accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.0, zero_out=True)
    [weight] = weights_of(sequential).values()
    other = torch.nn.Parameter(weight.detach().clone())  # of the same shape: nothing of it may arrive here
    tokens = torch.tensor([3, 1, 3], device=device)
    for _ in range(2):
        weight.grad = None
        y = sequential(torch.nn.functional.embedding(tokens, weight) + other[:3])
        y.sum().backward()
        through_embedding = torch.zeros_like(weight)
        through_embedding.index_add_(0, tokens, weight.detach().sum(0).expand(3, IN))
        assert_near(weight.grad, through_embedding)


@DEVICE
def test_each_experts_attributes_are_its_own(device: str) -> None:
    expected = gradients(make("grouped, per group", device=device), 1)
    sequential = make("grouped, per group", device=device, accumulate_into_main_grad=True)
    give_main_grads(sequential, 0.5, flag=False)
    weights = weights_of(sequential)
    first, second, third, fourth = weights.values()
    first.overwrite_main_grad = True
    second.overwrite_main_grad, second.grad_added_to_main_grad = True, False
    third.grad_added_to_main_grad, third.zero_out_wgrad = False, True
    fourth.main_grad = None
    fourth.requires_grad_(False)
    backward(sequential)
    starts = dict(zip(weights, (0, 0, 0.5), strict=False))
    for name, start in starts.items():
        assert_near(weights[name].main_grad, expected[name] + start)
    assert first.grad is None and fourth.grad is None and not hasattr(first, "grad_added_to_main_grad")
    assert second.grad.isnan().all() and second.grad_added_to_main_grad
    assert torch.equal(third.grad, torch.zeros_like(third)) and third.grad_added_to_main_grad


def test_fused_and_unfused_land_the_same_bits() -> None:
    results = []
    for fusions in (None, ()):
        sequential = make("experts", accumulate_into_main_grad=True, delay_wgrad_compute=False)
        sequential = Sequential(*sequential, fusions=fusions)
        give_main_grads(sequential, 0.5)
        backward(sequential)
        results.append([weight.main_grad for weight in weights_of(sequential).values()])
    for fused, unfused in zip(*results, strict=True):
        assert torch.equal(fused, unfused)


class HandWritten(FusedOperation):
    """A joint fusion of a user's, which returns the weight's gradient itself."""

    pattern = (ops.Linear, ops.ConstantScale)

    class Saved(NamedTuple):
        x: Tensor

    def fuser_forward(self, ctxs: Any, x: Any, extras: Any) -> Any:
        ctxs[0].saved = self.Saved(x)
        return 2 * torch.nn.functional.linear(x, ctxs[0].param("weight"), ctxs[0].param("bias")), {}

    def fuser_backward(self, ctxs: Any, dy: Any, d_extra_outputs: Any) -> Any:
        gradients = {"weight": 2 * dy.T @ ctxs[0].saved.x, "bias": 2 * dy.sum(0)}
        return 2 * dy @ ctxs[0].param("weight"), (gradients, {}), {}


def product(dy: Tensor, x: Tensor, *, out: Tensor | None = None, accumulate: bool = False) -> Tensor:
    dw = 2 * dy.T @ x
    return dw if out is None else store(dw, out, accumulate)


class Accumulating(HandWritten):
    """The same, which hands the product on."""

    handles_wgrad_accumulation = True

    def fuser_backward(self, ctxs: Any, dy: Any, d_extra_outputs: Any) -> Any:
        dx, (gradients, nothing), _ = super().fuser_backward(ctxs, dy, d_extra_outputs)
        del gradients["weight"]
        linear: Any = self.operations[0]
        gradients |= linear.accumulate(ctxs[0], partial(product, dy, ctxs[0].saved.x))
        return dx, (gradients, nothing), {}


@pytest.mark.pairwise
@pytest.mark.parametrize("case", TABLE, ids=name_of)
def test_a_fusion_of_the_users_can_keep_to_the_table(case: dict[str, bool]) -> None:
    expected = gradients(make("linear and scale"), 1)
    operations = make(
        "linear and scale", accumulate_into_main_grad=case["main_grad"], delay_wgrad_compute=case["delay"]
    )
    sequential = Sequential(*operations, fusions=(Accumulating,))
    assert "Accumulating" in sequential.explain()
    check_table(sequential, expected, **case)


def test_a_fusion_that_does_not_know_of_main_grad_is_refused_only_where_it_matters() -> None:
    refusal = "It returns weight gradients, but they go into main_grad or are delayed"
    expected = gradients(make("linear and scale"), 1)["0.weight"]
    plain = Sequential(*make("linear and scale"), fusions=(HandWritten,))
    assert refusal not in plain.explain() and "HandWritten" in plain.explain()
    assert_near(gradients(plain, 1)["0.weight"], expected)
    sequential = Sequential(*make("linear and scale", accumulate_into_main_grad=True), fusions=(HandWritten,))
    assert refusal in sequential.explain()
    give_main_grads(sequential, 0.5)
    backward(sequential)
    assert_near(sequential[0].weight.main_grad, expected + 0.5)


def test_switches_that_are_on_are_shown() -> None:
    linear = ops.Linear(2, 3, accumulate_into_main_grad=True)
    assert repr(linear) == "Linear(in_features=2, out_features=3, bias=True, accumulate_into_main_grad=True)"
    assert "delay_wgrad_compute=True)" in repr(ops.GroupedLinear(2, 2, 3, delay_wgrad_compute=True))


@pytest.mark.gpu
@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("recipe", ["bf16", "mxfp8", "fp8_block", "fp8_rowwise", "fp8_current"])
@pytest.mark.parametrize("kind", ["Linear", "GroupedLinear"])
def test_float64_goes_into_main_grad_on_a_gpu(kind, recipe, overwrites):
    """There is no grouped kernel for it: products are made apart."""
    factory = {"bias": False, "dtype": torch.float64, "device": "cuda", "accumulate_into_main_grad": True}
    op = ops.Linear(48, 64, **factory) if kind == "Linear" else ops.GroupedLinear(3, 48, 64, **factory)
    extras = {} if kind == "Linear" else {"split_sizes": [5, 0, 9]}
    plain = copy.deepcopy(op)
    plain.accumulate_into_main_grad = False
    op.weight.main_grad = torch.full_like(op.weight, 3)
    op.weight.overwrite_main_grad, op.weight.grad_added_to_main_grad = overwrites, False
    x = torch.randn(14, 48, dtype=torch.float64, device="cuda")
    for model in (op, plain):
        with autocast(recipe):
            model(x, **extras).square().sum().backward()
    expected = plain.weight.grad + (0 if overwrites else 3)
    torch.testing.assert_close(op.weight.main_grad, expected, rtol=1e-12, atol=1e-12)
