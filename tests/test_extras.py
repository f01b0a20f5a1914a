"""Extra tensors as whole programs: fan-out, outputs used inside and returned, in-place forms, two expert blocks.

Each is held against plain torch, where a name is a variable and autograd finds the gradients.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import event, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from fuser import BasicOperation, FusedOperation, Sequential, autocast, checkpoint, ops
from recipes import Splits
from tests.check_operation import DEVICES, DTYPES
from tests.reference import (
    ROUNDED_OFTEN,
    assert_close,
    assert_same_bits,
    gated,
    gradients,
    grouped_linear,
    leaves,
    set_parameters,
)  # fmt: skip

Make, Add = ops.MakeExtraOutput, ops.AddExtraInput
WIDTH = 6


class Times(BasicOperation):
    """y = factor x; its gradient is a tensor of its own."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        return x * self.factor, {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return dy * self.factor, {}, {}


class Gate(BasicOperation):
    """y = x * other, for the extra input `other`; keeps both."""

    extra_inputs = {"other": Tensor}

    class Saved(NamedTuple):
        x: Tensor
        other: Tensor

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, extras["other"])
        return x * extras["other"], {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return dy * ctx.saved.other, {}, {"other": dy * ctx.saved.x}


def tensor(*shape: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> Tensor:
    """Small integers: their sums and products are exact, in any order."""
    return torch.randint(-4, 5, shape or (3, WIDTH)).to(device, dtype)


def bias(size: int = WIDTH) -> ops.Bias:
    operation = ops.Bias(size)
    set_parameters(operation, {"bias": tensor(size)})
    return operation


def computed(value: Tensor) -> tuple[Tensor, Tensor]:
    """A leaf, and a tensor computed from it that may be written into."""
    leaf = value.clone().requires_grad_()
    return leaf, leaf * 1


# Several operations that ask for one name


@pytest.mark.parametrize(
    "between", [bias, nn.Tanh, lambda: nn.Linear(WIDTH, WIDTH)], ids=["operation", "tanh", "linear"]
)
@pytest.mark.parametrize("frozen", [False, True], ids=["", "frozen"])
def test_one_extra_output_feeds_three_operations(between: Callable[[], nn.Module], frozen: bool) -> None:
    module = between()
    layer = Sequential(Make("r"), Times(2.0), Add("r"), module, Gate().rename_extras(other="r"), Add("r")).double()
    x = tensor().requires_grad_(not frozen)
    y = layer(x)
    z = x.detach().clone().requires_grad_(not frozen)
    expected = module(z * 2 + z) * z + z
    torch.testing.assert_close(y, expected)
    assert y.requires_grad == expected.requires_grad
    if y.requires_grad:
        dy = tensor()
        found = [t for t in (x, *layer.parameters()) if t.requires_grad]
        wanted = [t for t in (z, *module.parameters()) if t.requires_grad]
        for ours, theirs in zip(
            torch.autograd.grad(y, found, dy), torch.autograd.grad(expected, wanted, dy), strict=True
        ):
            torch.testing.assert_close(ours, theirs)


def test_extra_inputs_by_position_are_refused_with_their_names() -> None:
    layer = Sequential(ops.GroupedLinear(2, 8, 16), ops.ScaledSwiGLU(), ops.GroupedLinear(2, 8, 8))
    x, sizes = torch.randn(4, 8), torch.tensor([2, 2])
    with pytest.raises(TypeError, match="1 more than x was given by position.* by name.*: 'split_sizes', 'scales'"):
        layer(x, sizes)
    with pytest.raises(TypeError, match="2 more than x were given by position.* by name.*: 'split_sizes'"):
        layer[0](x, sizes, None)
    with pytest.raises(TypeError, match="there are none"):
        ops.SwiGLU()(x, sizes)


@pytest.mark.parametrize("declared", ["extra_inputs", "extra_outputs"])
def test_names_without_kinds_are_refused_where_a_class_declares_them(declared: str) -> None:
    with pytest.raises(
        TypeError, match=rf"Named.{declared} is \('extra',\), but must have the kind of each by its name"
    ):
        type("Named", (Times,), {declared: ("extra",)})


@pytest.mark.parametrize("declared", ["extra_inputs", "extra_outputs"])
@pytest.mark.parametrize("kind", ["Tensor", Tensor | None, torch.FloatTensor, nn.Parameter])
def test_kinds_that_are_no_classes_of_extra_tensors_are_refused_where_a_class_declares_them(kind, declared) -> None:
    """They would have no gradient."""
    with pytest.raises(TypeError, match=rf"Kinds.{declared} has the kind .* for 'extra'. Give torch.Tensor, which has"):
        type("Kinds", (Times,), {declared: {"extra": kind}})
    type("Kinds", (Times,), {declared: {"extra": list[Tensor], "other": dict, "sizes": Splits}})


@pytest.mark.parametrize("name", ["outputs", "x"])
def test_an_extra_input_with_the_name_of_an_argument_is_to_be_renamed(name: str) -> None:
    class Product(BasicOperation):
        extra_inputs = {name: Tensor}

        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x * extras[name], {}

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy, {}, {}

    x, operation = torch.ones(3, WIDTH), Product()
    message = rf"missing: '{name}'; the operations ask for: '{name}'\. '{name}' is an argument of the call itself"
    for module in (operation, Sequential(operation)):
        with pytest.raises(ValueError, match=message):
            module(x)
    operation.rename_extras(**{name: "factor"})
    assert torch.equal(Sequential(operation)(x, factor=2 * x), 2 * x)


def test_fan_out_passes_gradcheck() -> None:
    layer = Sequential(
        Make("r"), ops.RMSNorm(WIDTH), Gate().rename_extras(other="r"), nn.Tanh(), Add("r"),
        Gate().rename_extras(other="r"),
    ).double()  # fmt: skip
    x = torch.randn(2, WIDTH, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, *_: layer(x), (x, *layer.parameters()))


def test_an_extra_of_the_pipeline_and_one_of_the_callers_are_added() -> None:
    layer = Sequential(Make("inner"), Add("outer"), Add("inner"))
    x, outer = tensor().requires_grad_(), tensor().requires_grad_()
    y = layer(x, outer=outer)
    assert torch.equal(y, 2 * x + outer)
    dy = tensor()
    y.backward(dy)
    assert torch.equal(x.grad, 2 * dy) and torch.equal(outer.grad, dy)


@pytest.mark.parametrize("heads", ["y", "r", "y and r"])
@pytest.mark.parametrize("between", [None, nn.Identity()], ids=["one pipeline", "two"])
@pytest.mark.parametrize("in_place", [False, True])
def test_an_output_used_inside_and_returned(in_place: bool, between: nn.Module | None, heads: str) -> None:
    modules = [Times(3.0), Make("r", in_place=in_place), *([between] if between else []), Times(2.0), Add("r")]
    x, dy, dr = tensor().requires_grad_(), tensor(), tensor()
    y, made = Sequential(*modules)(x, outputs=("r",))
    assert torch.equal(y, 9 * x) and torch.equal(made["r"], 3 * x)
    results, d = {"y": ([y], [dy]), "r": ([made["r"]], [dr]), "y and r": ([y, made["r"]], [dy, dr])}[heads]
    torch.autograd.backward(results, d)
    assert torch.equal(x.grad, 9 * dy * ("y" in heads) + 3 * dr * ("r" in heads))


def test_outputs_that_share_memory_cannot_be_changed_behind_each_other() -> None:
    x = tensor().requires_grad_()
    y, made = Sequential(bias(), Make("a"), Make("b"))(x, outputs=("a", "b"))
    for changed in (y, made["b"]):
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            changed.mul_(2)
    made["a"].mul_(2)
    with pytest.raises(RuntimeError, match="its base or another view of its base has been modified inplace"):
        made["b"].sum().backward()


def test_a_nested_sequential_takes_names_and_exports_some() -> None:
    inner = Sequential(Times(2.0), Add("r", in_place=True), Make("s"), exports=("s",))
    layer = Sequential(Times(3.0), Make("r"), inner, Add("s"))
    leaf, x = computed(tensor())
    y, made = layer(x, outputs=("s",))
    assert torch.equal(y, 18 * leaf) and torch.equal(made["s"], 9 * leaf)
    y.backward(dy := tensor())
    assert torch.equal(leaf.grad, 18 * dy)


@pytest.mark.parametrize("returned", [False, True])
def test_an_output_that_nobody_asks_for_changes_nothing(returned: bool) -> None:
    x = tensor().requires_grad_()
    result = Sequential(Make("r", in_place=True), Times(2.0))(x, outputs=("r",) if returned else ())
    y = result[0] if returned else result
    y.backward(dy := tensor())
    assert torch.equal(y, 2 * x) and torch.equal(x.grad, 2 * dy)


def test_of_two_outputs_one_is_returned_and_one_is_not() -> None:
    layer = Sequential(Make("a"), Times(2.0), Add("a"), Make("b"), Make("c"), Times(3.0), Add("b"))
    x, dy, dc = tensor().requires_grad_(), tensor(), tensor()
    y, made = layer(x, outputs=("c",))
    assert torch.equal(y, 12 * x) and torch.equal(made["c"], 3 * x)
    torch.autograd.backward([y, made["c"]], [dy, dc])
    assert torch.equal(x.grad, 12 * dy + 3 * dc)


def test_an_output_that_is_computed_inside_carries_its_gradient() -> None:
    class MeanSquare(BasicOperation):
        """y = x, and the mean of its squares, for each row, as the extra output `scales`."""

        extra_outputs = {"scales": Tensor}

        class Saved(NamedTuple):
            x: Tensor

        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            if ctx.needs_grad:
                ctx.saved = self.Saved(x)
            return x, {"scales": x.square().mean(-1)}

        def fuser_backward(self, ctx: Any, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            d = ctx.saved.x * (2 / ctx.saved.x.shape[-1]) * d_extra_outputs["scales"][:, None]
            return d if dy is None else dy + d, {}, {}

    layer = Sequential(MeanSquare(), ops.ScaledSwiGLU())
    x = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(layer(x), gated(x, "swiglu") * x.square().mean(-1, keepdim=True))
    assert torch.autograd.gradcheck(layer, x)
    assert torch.autograd.gradcheck(lambda x: layer(x, outputs=("scales",))[1]["scales"], x)


class Tripled(FusedOperation):
    """MakeExtraOutput -> Times(2) -> AddExtraInput of the same name, in one step: y = 3 x."""

    pattern = (Make, Times, Add)

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        assert not extras, "what is made inside does not come from outside"
        y, _ = self.operations[2].fuser_forward(ctxs[2], 2 * x, {"r": x})  # it keeps what it keeps alone
        return y, {"r": x}

    def fuser_backward(self, ctxs: Any, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        dx = 3 * dy
        for d in d_extra_outputs.values():
            dx = dx + d
        return dx, [{}, {}, {}], {}


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize("passes", ["joint", "forward", "backward"])
def test_a_residual_branch_inside_a_fused_operation(passes: str, returned: bool) -> None:
    fusion = type("Fused", (Tripled,), {"passes": passes})
    layer = Sequential(Make("r", in_place=True), Times(2.0), Add("r"), Times(2.0), fusions=(fusion,))
    assert "Fused = MakeExtraOutput -> Times -> AddExtraInput" in layer.explain()
    x, dy, dr = tensor().requires_grad_(), tensor(), tensor()
    result = layer(x, outputs=("r",) if returned else ())
    y = result[0] if returned else result
    torch.autograd.backward([y, result[1]["r"]] if returned else [y], [dy, dr] if returned else [dy])
    assert torch.equal(y, 6 * x) and torch.equal(x.grad, 6 * dy + (dr if returned else 0))


# Written in place


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(32, 32), (7,), (3, 1, 5), (0, 4), (2, 0, 4), ()], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_adding_in_place_gives_the_same_numbers(dtype: torch.dtype, shape: tuple[int, ...], device: str) -> None:
    x, extra = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    found = []
    for in_place in (False, True):
        leaf, own = computed(extra)
        mine = x.clone().requires_grad_()
        y = Add(in_place=in_place)(mine, extra=own)
        assert (y is own) == in_place
        y.backward(torch.ones_like(y))
        found.append({"y": y, **gradients({"x": mine, "extra": leaf})})
    assert_same_bits(found[1], found[0])


def test_adding_in_place_passes_gradcheck() -> None:
    operation, x = Add("other", in_place=True), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    other = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    layer = Sequential(operation)
    assert torch.autograd.gradcheck(lambda x, other: layer(x, other=other.sin()), (x, other))


@pytest.mark.parametrize("x_needs", [False, True])
@pytest.mark.parametrize("extra_needs", [False, True])
def test_what_needs_no_grad_gets_none(x_needs: bool, extra_needs: bool) -> None:
    x = tensor().requires_grad_(x_needs)
    leaf = tensor().requires_grad_(extra_needs)
    extra = leaf * 1
    before, dy = extra.detach().clone(), tensor()
    y = Add(in_place=True)(x, extra=extra)
    assert y is extra and torch.equal(y, x + before) and y.requires_grad == (x_needs or extra_needs)
    if y.requires_grad:
        y.backward(dy)
    assert_same_bits(
        gradients({"x": x, "extra": leaf}),
        {"gradient of x": dy if x_needs else None, "gradient of extra": dy if extra_needs else None},
    )


@pytest.mark.parametrize("device", DEVICES)
def test_a_chain_of_fifteen_writes_where_it_says(device: str) -> None:
    first, second, third = bias(), bias(), bias()
    layer = Sequential(
        Make("start"), first, Make("h1", in_place=True), Add("x2", in_place=True), Make("sum2"), Add("x3"), second,
        Make("h3", in_place=True), ops.Identity(), Add("x4", in_place=True), Make("sum4"), Add("x5"), third,
        Make("h5", in_place=True), ops.Identity(),
    ).to(device, torch.float64)  # fmt: skip
    assert len(layer) == 15 and len(layer.layout().stages) == 1
    names, made_names = ("x2", "x3", "x4", "x5"), ("start", "h1", "sum2", "h3", "sum4", "h5")
    values = {name: tensor(device=device) for name in ("x", *names)}
    start = {name: value.clone().requires_grad_() for name, value in values.items()}
    own = {name: leaf * 1 for name, leaf in start.items()}
    y, made = layer(own["x"], **{name: own[name] for name in names}, outputs=made_names)
    address = {name: t.data_ptr() for name, t in {"y": y, **own, **made}.items()}
    assert address["start"] == address["x"] and address["sum2"] == address["x2"] and address["sum4"] == address["x4"]
    assert address["h5"] == address["y"]
    assert len({address[name] for name in ("x", "h1", "x2", "x3", "h3", "x4", "x5", "y")}) == 8
    assert torch.equal(own["x3"], values["x3"]) and torch.equal(own["x5"], values["x5"])

    plain = {name: value.clone().requires_grad_() for name, value in values.items()}
    b1, b2, b3 = (b.bias.detach().clone().requires_grad_() for b in (first, second, third))
    h1 = plain["x"] + b1
    sum2 = plain["x2"] + h1
    h3 = sum2 + plain["x3"] + b2
    sum4 = plain["x4"] + h3
    h5 = sum4 + plain["x5"] + b3
    expected = {"y": h5, "start": plain["x"], "h1": h1, "sum2": sum2, "h3": h3, "sum4": sum4, "h5": h5}
    assert_same_bits({"y": y, **made}, {name: t.detach() for name, t in expected.items()})
    # What was written into is used once more by the caller.
    ours = [y, *made.values(), own["x2"], own["x4"]]
    theirs = [*expected.values(), sum2, sum4]
    d = [tensor(device=device) for _ in ours]
    torch.autograd.backward(ours, d)
    torch.autograd.backward(theirs, d)
    found = {**start, "b1": first.bias, "b2": second.bias, "b3": third.bias}
    assert_same_bits(gradients(found), gradients({**plain, "b1": b1, "b2": b2, "b3": b3}))


@pytest.mark.parametrize("behind", ["nothing", "a module", "an operation"])
def test_the_caller_may_go_on_with_what_was_written(behind: str) -> None:
    modules = {"nothing": (), "a module": (nn.Tanh(),), "an operation": (Times(2.0),)}[behind]
    leaf, extra = computed(tensor())
    x = tensor().requires_grad_()
    y = Sequential(Add(in_place=True), *modules)(x, extra=extra)
    (y.square().sum() + (3 * extra).sum()).backward()
    a, b = x.detach().requires_grad_(), leaf.detach().requires_grad_()
    written = a + b
    result = written
    for module in modules:
        result = module(result) if isinstance(module, nn.Tanh) else 2 * result
    (result.square().sum() + (3 * written).sum()).backward()
    torch.testing.assert_close(x.grad, a.grad)
    torch.testing.assert_close(leaf.grad, b.grad)


@pytest.mark.parametrize("shape", [(3, WIDTH), (2, 3, WIDTH)], ids=str)
def test_a_linear_behind_keeps_rows_of_what_was_written(shape: tuple[int, ...]) -> None:
    linear = ops.Linear(WIDTH, WIDTH).double()
    layer = Sequential(Times(2.0), Add("r", in_place=True), linear)
    x, dy = torch.randn(shape, dtype=torch.float64).requires_grad_(), torch.randn(shape, dtype=torch.float64)
    leaf, r = computed(torch.randn(shape, dtype=torch.float64))
    layer(x, r=r).backward(dy)
    assert torch.equal(r, 2 * x + leaf)
    torch.testing.assert_close(leaf.grad, dy @ linear.weight)
    torch.testing.assert_close(x.grad, 2 * leaf.grad)
    torch.testing.assert_close(linear.weight.grad, dy.flatten(0, -2).T @ r.flatten(0, -2))
    again = r.detach().clone()
    y = layer(x, r=again)
    again.detach().add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


def test_who_reads_the_name_after_the_write_reads_what_was_written() -> None:
    layer = Sequential(Times(2.0), Add("r", in_place=True), Times(3.0), Add("r"), Add("r", in_place=True))
    leaf, r = computed(tensor())
    x = tensor().requires_grad_()
    y = layer(x, r=r)
    a, b = x.detach().requires_grad_(), leaf.detach().requires_grad_()
    written = 2 * a + b
    expected = (3 * written + written) + written
    assert y is r and torch.equal(y, expected)
    y.backward(dy := tensor())
    expected.backward(dy)
    assert torch.equal(x.grad, a.grad) and torch.equal(leaf.grad, b.grad)


def test_what_is_written_by_two_names_belongs_to_the_last() -> None:
    layer = Sequential(Times(2.0), Add("e", in_place=True), Make("m"), Add("m", in_place=True), Times(1.0))
    x, (leaf, e) = tensor().requires_grad_(), computed(tensor())
    y = layer(x, e=e)
    torch.autograd.backward([y, e], [torch.ones_like(y)] * 2)
    assert torch.equal(e, y) and torch.equal(y, 2 * (2 * x + leaf))
    assert torch.equal(leaf.grad, torch.full_like(leaf, 4.0)) and torch.equal(x.grad, torch.full_like(x, 8.0))


def test_x_itself_may_be_written_into() -> None:
    leaf, x = computed(tensor())
    y, made = Sequential(Make("r"), Times(2.0), Add("r", in_place=True))(x, outputs=("r",))
    assert y is x and torch.equal(y, 3 * leaf) and made["r"].data_ptr() == x.data_ptr()
    torch.autograd.backward([y, made["r"], x], [torch.ones_like(y)] * 3)
    assert torch.equal(leaf.grad, torch.full_like(leaf, 9.0))


def test_x_may_be_added_to_itself() -> None:
    leaf, x = computed(tensor())
    y = Add(in_place=True)(x, extra=x)
    y.backward(torch.ones_like(y))
    assert torch.equal(y, 2 * leaf) and torch.equal(leaf.grad, torch.full_like(leaf, 2.0))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_every_tensor_may_be_written(mode: Any) -> None:
    extra = tensor().requires_grad_()
    before, x = extra.detach().clone(), tensor().requires_grad_()
    layer = Sequential(Make("r"), ops.RMSNorm(WIDTH), Add("r", in_place=True), Add(in_place=True)).double()
    expected = Sequential(*layer[:2], Add("r"), Add()).double()
    with mode():
        want = expected(x, extra=extra)
        y = layer(x, extra=extra)
    assert y is extra and torch.equal(y, want) and not torch.equal(extra, before)


def test_a_transposed_extra_is_written_in_place() -> None:
    leaf = tensor(WIDTH, 3).requires_grad_()
    with torch.no_grad():
        extra = tensor(WIDTH, 3).t()
    x = tensor()
    before = extra.clone()
    assert Add(in_place=True)(x, extra=extra) is extra and torch.equal(extra, x + before)
    with pytest.raises(RuntimeError, match="extra is a view of a tensor of the caller's"):
        Add(in_place=True)(x, extra=(leaf * 1).t())


# Refused: nothing is changed, and the sentence says why


def refused(layer: nn.Module, x: Tensor, kind: type[Exception], message: str, **extras: Tensor) -> None:
    before = {name: t.detach().clone() for name, t in {"x": x, **extras}.items()}
    with pytest.raises(kind, match=message):
        layer(x, **extras)
    assert_same_bits({"x": x, **extras}, before)


def test_a_leaf_that_requires_grad_is_not_written() -> None:
    message = r"In operation 0 \(AddExtraInput\): Give in_place=False: extra is a leaf that requires grad"
    refused(Add(in_place=True), tensor(), RuntimeError, message, extra=tensor().requires_grad_())
    refused(Sequential(Make("r"), Times(2.0), Add("r", in_place=True)), tensor().requires_grad_(), RuntimeError,
            r"In operation 2 \(AddExtraInput\): Give in_place=False: r is a leaf that requires grad")  # fmt: skip


@pytest.mark.parametrize(
    "extra",
    [torch.zeros(1, WIDTH).expand(3, WIDTH), torch.zeros(20).as_strided((3, WIDTH), (1, 2))],
    ids=["expanded", "overlapping rows"],
)
def test_elements_that_share_memory_are_not_written(extra: Tensor) -> None:
    message = r"extra has strides \[\d, \d\] for its shape \[3, 6\].*Give extra.contiguous\(\)"
    refused(Add(in_place=True), tensor().float(), ValueError, message, extra=extra)


def test_another_dtype_or_shape_is_not_written() -> None:
    layer = Add(in_place=True)
    message = "extra is torch.float32, but x is torch.float64, and in place both must be the same"
    refused(layer, tensor(), ValueError, message, extra=tensor().float())
    refused(layer, tensor(), ValueError, r"extra has shape \[6\], but x has shape \[3, 6\]", extra=tensor(WIDTH))


def test_an_inference_tensor_is_not_written_outside_of_inference_mode() -> None:
    with torch.inference_mode():
        extra = tensor()
    message = r"extra is an inference tensor, which can be written only in torch.inference_mode\(\)"
    refused(Add(in_place=True), tensor(), RuntimeError, message, extra=extra)


def test_a_subclass_of_tensor_is_not_written() -> None:
    class Wrapping(torch.Tensor):
        pass

    message = "extra is a Wrapping, of which the pipeline cannot tell who else uses its memory"
    refused(Add(in_place=True), tensor(), RuntimeError, message, extra=tensor().as_subclass(Wrapping))


def test_a_view_of_x_is_not_written_over_x() -> None:
    square = tensor(4, 4)
    message = "extra and x lie in the same memory, but not element by element"
    refused(Add(in_place=True), square.t(), RuntimeError, message, extra=square)


def test_what_an_operation_keeps_is_not_written() -> None:
    layer = Sequential(
        bias(), Make("r"), ops.RMSNorm(WIDTH), ops.Linear(WIDTH, WIDTH), Add("r", in_place=True)
    ).double()
    message = (
        r"In operation 3 \(ForwardLinearBiasAdd\): r lies in memory that operation 2 \(RMSNorm\) keeps for its "
        "backward, so it cannot be written in place"
    )
    refused(layer, tensor(), RuntimeError, message)
    with torch.no_grad():
        layer(tensor())
    layer.requires_grad_(False)
    layer(tensor())  # nothing is kept


def test_what_a_fused_operation_keeps_is_not_written() -> None:
    layer = Sequential(
        ops.Identity(), Make("r"), ops.GroupedLinear(2, 8, 16), ops.SwiGLU(), ops.GroupedLinear(2, 8, 8),
        Add("r", in_place=True),
    )  # fmt: skip
    assert "GroupedMLP = " in layer.explain()
    _, x = computed(tensor(5, 8, dtype=torch.float32))
    with pytest.raises(RuntimeError, match=r"r lies in memory that operation 2 \(GroupedLinear\) keeps for its back"):
        layer(x, split_sizes=[2, 3])
    with autocast(recipe="mxfp8"):
        layer(x, split_sizes=[2, 3])  # keeps a quantized copy


def test_another_name_for_the_same_memory_is_not_written_behind_it() -> None:
    modules = Make("a"), Make("b"), Times(2.0), Add("a", in_place=True)
    message = "a lies in the same memory as 'b', which is used later, so it cannot be written in place"
    _, x = computed(tensor())
    refused(Sequential(*modules, Add("b")), x, RuntimeError, message)
    with pytest.raises(RuntimeError, match=message):
        Sequential(*modules)(x, outputs=("b",))
    Sequential(*modules)(x)  # nobody reads it later


def test_a_detached_alias_of_x_is_not_written() -> None:
    class Aliasing(Make):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x, {"r": x.detach()}

    leaf, x = computed(tensor())
    layer = Sequential(Aliasing("r"), Times(2.0), Add("r", in_place=True))
    refused(layer, x, RuntimeError, "r is a view of a tensor of the caller's")
    layer = Sequential(Times(1.0), *layer)
    layer(x).sum().backward()  # of the pipeline's own
    assert torch.equal(leaf.grad, torch.full_like(leaf, 3.0))


def test_a_parameter_is_not_written() -> None:
    linear = ops.Linear(WIDTH, WIDTH, bias=False).double()
    linear.weight.requires_grad_(False)
    message = r"extra lies in memory that operation 0 \(Linear\) has as a parameter"
    x = tensor(WIDTH, WIDTH).requires_grad_()
    refused(Sequential(linear, Add(in_place=True)), x, RuntimeError, message, extra=linear.weight)


def test_a_buffer_of_the_callers_is_not_written() -> None:
    layer = Sequential(ops.GroupedLinear(1, WIDTH, WIDTH), Make("r"), Times(2.0), Add("r", in_place=True)).double()
    buffer = torch.empty(3, WIDTH, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"r lies in memory that operation 0 \(GroupedLinear\) was given as"):
        layer(tensor(), split_sizes=[3], buffers={0: {"output": buffer}})


def test_a_callers_buffer_that_is_returned_as_an_extra_gets_no_history() -> None:
    layer = Sequential(ops.GroupedLinear(1, WIDTH, WIDTH), Make("r"), Times(2.0)).double()
    buffer = torch.empty(3, WIDTH, dtype=torch.float64)
    y, made = layer(tensor().requires_grad_(), split_sizes=[3], outputs=("r",), buffers={0: {"output": buffer}})
    assert y.requires_grad and made["r"].requires_grad and made["r"].data_ptr() == buffer.data_ptr()
    assert buffer.grad_fn is None and not buffer.requires_grad


def test_what_was_written_and_is_returned_under_another_name_has_one_history() -> None:
    layer = Sequential(
        ops.GroupedLinear(1, WIDTH, WIDTH), Add(in_place=True), Make("r"), Times(2.0)
    ).double()  # fmt: skip
    for buffers in (None, {0: {"output": torch.empty(3, WIDTH, dtype=torch.float64)}}):
        leaf, extra = computed(tensor())
        y, made = layer(tensor(), split_sizes=[3], extra=extra, outputs=("r",), buffers=buffers)
        assert made["r"] is extra
        torch.autograd.backward([y, made["r"], extra], [torch.ones_like(y)] * 3)
        assert torch.equal(leaf.grad, torch.full_like(leaf, 4.0))


@pytest.mark.parametrize("between", [(), (nn.Identity(), ops.RMSNorm(WIDTH))], ids=["outside", "an earlier stage"])
def test_what_an_earlier_module_keeps_is_noticed_in_backward(between: tuple[nn.Module, ...]) -> None:
    x = tensor().requires_grad_()
    if between:
        layer = Sequential(bias(), Make("r"), ops.RMSNorm(WIDTH), *between, Add("r", in_place=True)).double()
        y = layer(x)
    else:
        y = Add(in_place=True)(tensor(), extra=torch.tanh(x))  # tanh keeps its result
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_fusion_does_not_take_what_writes_in_place() -> None:
    class Both(Tripled):
        pattern = (Times, Add)

    text = Sequential(Times(2.0), Add("r", in_place=True), fusions=(Both,)).explain()
    reason = "AddExtraInput writes into 'r' in place, which it does not: see handles_in_place."
    assert f"not fused: Both on operations 0-1: {reason}" in text
    assert "Both = Times -> AddExtraInput" in Sequential(Times(2.0), Add("r"), fusions=(Both,)).explain()


# Gradients added in place


class Watch(BasicOperation):
    """y = x; notes where dy lies, and keeps it alive so that no address is used twice."""

    def __init__(self, seen: dict[str, Tensor], name: str) -> None:
        super().__init__()
        self.seen, self.name = seen, name

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        return x, {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        self.seen[self.name] = dy
        return dy, {}, {}


def backward_of(modules: Callable[[bool], Sequence[nn.Module]], in_place: bool, **kwargs: Any) -> Tensor:
    torch.manual_seed(3)
    layer = Sequential(*modules(in_place)).double()
    x = torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True)
    result = layer(x, **kwargs)
    results = [result] if isinstance(result, Tensor) else [result[0], *result[1].values()]
    d = [torch.randn_like(t) for t in results]
    copies = [t.clone() for t in d]
    torch.autograd.backward(results, d)
    for given_gradient, copy in zip(d, copies, strict=True):
        assert torch.equal(given_gradient, copy), "autograd's own gradient was changed"
    assert x.grad is not None
    return x.grad


# d_r comes from: Times (a tensor that this backward made), and not from autograd
def test_a_gradient_that_backward_made_is_added_into() -> None:
    seen: dict[str, Tensor] = {}

    def modules(in_place: bool) -> Sequence[nn.Module]:
        return Watch(seen, "dx"), Make("r", in_place=in_place), Times(3.0), Add("r"), Watch(seen, "dr"), Times(2.0)

    want = backward_of(modules, False)
    assert seen["dx"].data_ptr() != seen["dr"].data_ptr()
    assert torch.equal(backward_of(modules, True), want)
    assert seen["dx"].data_ptr() == seen["dr"].data_ptr()


class Asking(Make):
    """Notes which gradients it was told to be its own."""

    def __init__(self, in_place: bool) -> None:
        super().__init__("r", in_place=in_place)
        self.own: list[frozenset[str]] = []

    def fuser_backward(self, ctx: Any, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        self.own.append(ctx.own_gradients)
        return super().fuser_backward(ctx, dy, d_extra_outputs)


def test_the_sum_of_a_fan_out_is_added_into() -> None:
    asking: list[Asking] = []

    def modules(in_place: bool) -> Sequence[nn.Module]:
        asking.append(Asking(in_place))
        return asking[-1], Times(3.0), Add("r"), Times(2.0), Add("r")

    want = backward_of(modules, False)
    assert torch.equal(backward_of(modules, True), want)
    assert [a.own for a in asking] == [[frozenset()], [frozenset({"r"})]]


class Shift(BasicOperation):
    """y = x + shift, of x's shape: dy is the parameter's gradient too."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3, WIDTH))

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        return x + ctx.param("shift"), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return dy, {"shift": dy}, {}


class Passes(BasicOperation):
    """Its backward passes a tensor on that is not its own: what it has kept, its weight, or its buffer."""

    class Saved(NamedTuple):
        x: Tensor

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.weight = nn.Parameter(torch.ones(3, WIDTH))
        self.register_buffer("constant", torch.ones(3, WIDTH))

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        ctx.saved = self.Saved(x)
        return x * 1, {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return {"kept": ctx.saved.x, "weight": ctx.param("weight"), "buffer": self.constant}[self.what], {}, {}


FOREIGN: dict[str, Callable[[], list[nn.Module]]] = {
    "autograd's": lambda: [Times(3.0), Add("r")],
    "dy's own": lambda: [Add("r"), Times(2.0)],
    "another output's": lambda: [Times(3.0), Add("r"), Add("s"), Times(2.0)],
    "another input's": lambda: [Times(3.0), Add("r"), Add("other"), Times(2.0)],
    "a parameter's gradient": lambda: [Times(3.0), Add("r"), Shift(), Times(2.0)],
    "kept": lambda: [Times(3.0), Add("r"), Passes("kept")],
    "a weight": lambda: [Times(3.0), Add("r"), Passes("weight")],
    "a buffer": lambda: [Times(3.0), Add("r"), Passes("buffer")],
    "the caller's buffer": lambda: [Times(3.0), Add("r"), ops.GroupedLinear(1, WIDTH, WIDTH)],
}


@pytest.mark.parametrize("whose", FOREIGN)
def test_a_gradient_that_another_may_see_is_left_alone(whose: str) -> None:
    found = []
    for in_place in (False, True):
        torch.manual_seed(3)
        asking = Asking(in_place)
        layer = Sequential(Times(1.0), Make("s"), asking, *FOREIGN[whose]()).double()
        x, other, buffer, dy = (torch.randn(3, WIDTH, dtype=torch.float64) for _ in range(4))
        state = {**layer.state_dict(), "other": other, "dy": dy, "x": x}
        before = {name: t.clone() for name, t in state.items()}
        given: dict[str, Any] = {"other": other.requires_grad_()} if whose == "another input's" else {}
        if whose == "the caller's buffer":
            given = {"split_sizes": [3], "buffers": {-1: {"grad_input": buffer}}}
        y = layer(x.requires_grad_(), **given)
        y.backward(dy, retain_graph=True)
        y.backward(dy)
        assert_same_bits(state, before)
        assert asking.own == [frozenset()] * 2
        found.append({"buffer": buffer, **gradients({"x": x, "other": other, **dict(layer.named_parameters())})})
    assert_same_bits(found[1], found[0])


def test_the_gradient_of_a_returned_output_is_left_alone() -> None:
    def modules(in_place: bool) -> Sequence[nn.Module]:
        return Times(1.0), Make("r", in_place=in_place), Times(3.0)

    want = backward_of(modules, False, outputs=("r",))
    assert torch.equal(backward_of(modules, True, outputs=("r",)), want)


def test_a_second_backward_gives_the_same() -> None:
    layer = Sequential(
        Times(2.0), Make("r", in_place=True), Times(3.0), Add("r", in_place=True), Gate().rename_extras(other="e"),
        Times(2.0),
    )  # fmt: skip
    x, e = tensor().requires_grad_(), tensor().requires_grad_()
    y = layer(x, e=e)
    dy = tensor()
    first = torch.autograd.grad(y, (x, e), dy, retain_graph=True)
    assert torch.equal(first[0], 16 * e * dy) and torch.equal(first[1], 16 * x * dy)
    for ours, again in zip(first, torch.autograd.grad(y, (x, e), dy), strict=True):
        assert torch.equal(ours, again)


# Checkpointing


def test_in_place_forms_are_computed_again() -> None:
    layer = Sequential(
        bias(), Make("r", in_place=True), Times(3.0), Add("r", in_place=True), ops.RMSNorm(WIDTH)
    ).double()
    found = []
    for run in (layer, lambda x: checkpoint(layer, x)):
        x = torch.ones(3, WIDTH, dtype=torch.float64, requires_grad=True) * 1
        x.retain_grad()
        layer.zero_grad()
        y = run(x)
        y.backward(torch.arange(3.0 * WIDTH, dtype=torch.float64).view(3, WIDTH))
        found.append({"y": y, **gradients({"x": x, **dict(layer.named_parameters())})})
    assert_same_bits(found[1], found[0])


@pytest.mark.parametrize("named", [False, True])
def test_a_checkpoint_whose_input_is_written_is_refused(named: bool) -> None:
    layer = Sequential(Times(2.0), Add(in_place=True), ops.RMSNorm(WIDTH)).double()
    _, extra = computed(tensor())
    x = tensor().requires_grad_()
    if named:
        y, message = checkpoint(layer, x, extra=extra), "extra was changed in place since the checkpointed function was"
    else:
        y, message = checkpoint(lambda x, e: layer(x, extra=e), x, extra), "modified by an inplace operation"
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


# Two expert blocks


SIZES_A, SIZES_B = [4, 0, 3], [1, 5, 0]  # sums 7 and 6, of 8 rows


def expert_block(suffix: str) -> list[BasicOperation]:
    names = {"split_sizes": f"sizes_{suffix}"}
    return [
        ops.GroupedLinear(3, 32, 64).rename_extras(**names),
        ops.ScaledSwiGLU().rename_extras(scales=f"scales_{suffix}"),
        ops.GroupedLinear(3, 32, 32, bias=False).rename_extras(**names),
    ]


@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("fusions", [None, ()], ids=["fused", "unfused"])
def test_two_expert_blocks_have_splits_and_scales_of_their_own(
    fusions: tuple[()] | None, in_place: bool, recipe: str | None
) -> None:
    dtype = torch.float32 if recipe else torch.float64
    layer = Sequential(
        Times(1.0), Make("r", in_place=in_place), *expert_block("a"), Make("s", in_place=in_place), *expert_block("b"),
        Add("s", in_place=in_place and recipe is not None), Add("r"), fusions=fusions,
    ).to(dtype)  # fmt: skip
    assert layer.layout().consumed == ("sizes_a", "scales_a", "sizes_b", "scales_b")
    assert layer.explain(dtype=dtype).count("GroupedMLP = ") == (2 if fusions is None else 0)
    for name, parameter in layer.named_parameters():
        if "bias" in name:
            nn.init.normal_(parameter)
    values = {"x": torch.randn(8, 32), "scales_a": torch.rand(8), "scales_b": torch.rand(8)}
    ours = {name: value.to(dtype).requires_grad_() for name, value in values.items()}
    sizes = {"sizes_a": torch.tensor(SIZES_A), "sizes_b": torch.tensor(SIZES_B)}
    found, theirs = {**ours, **dict(layer.named_parameters())}, leaves({**ours, **dict(layer.named_parameters())})
    if recipe:  # each block alone, with what the other one made handed over
        block_a, block_b = Sequential(*layer[2:5], fusions=fusions), Sequential(*layer[6:9], fusions=fusions)
        with autocast(recipe=recipe):
            s = block_a(ours["x"], sizes_a=sizes["sizes_a"], scales_a=ours["scales_a"])
            want = block_b(s, sizes_b=sizes["sizes_b"], scales_b=ours["scales_b"]) + s + ours["x"]
        want.square().sum().backward()
        expected = {name: None if g is None else g.clone() for name, g in gradients(found).items()}
        for t in found.values():
            t.grad = None
    else:
        s = plain_experts(theirs, "2.", "4.", theirs["x"], SIZES_A, theirs["scales_a"])
        want = plain_experts(theirs, "6.", "8.", s, SIZES_B, theirs["scales_b"]) + s + theirs["x"]
        want.square().sum().backward()
        expected = gradients(theirs)
    with autocast(recipe=recipe) if recipe else nullcontext():
        y = layer(ours["x"], **sizes, scales_a=ours["scales_a"], scales_b=ours["scales_b"])
    y.square().sum().backward()
    assert_close({"y": y, **gradients(found)}, {"y": want, **expected}, ROUNDED_OFTEN)


def plain_experts(p: Mapping[str, Any], fc1: str, fc2: str, x: Tensor, sizes: Sequence[int], scales: Tensor) -> Tensor:
    h = grouped_linear(x, p[fc1 + "weight"], sizes, p[fc1 + "bias"])
    return grouped_linear(gated(h, "swiglu") * scales[:, None], p[fc2 + "weight"], sizes)


def moe_block(experts: int, suffix: str) -> list[BasicOperation]:
    block = [
        Make("residual", in_place=True), ops.RMSNorm(32), ops.Router(32, experts, topk=2), ops.Dispatch(experts),
        ops.GroupedLinear(experts, 32, 64, bias=False), ops.ScaledSwiGLU(),
        ops.GroupedLinear(experts, 32, 32, bias=False), ops.Combine(), Add("residual"),
    ]  # fmt: skip
    for operation in block:
        operation.rename_extras(**{n: n + suffix for n in (*operation.extra_inputs, *operation.extra_outputs)})
    return block


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_two_routed_blocks_are_those_two_one_after_the_other(recipe: str) -> None:
    first, second = moe_block(3, "_a"), moe_block(5, "_b")
    together, apart = Sequential(*first, *second), nn.Sequential(Sequential(*first), Sequential(*second))
    value = torch.randn(16, 32)
    found = []
    for layer in (together, apart):
        layer.zero_grad()
        x = value.clone().requires_grad_()
        with autocast(recipe=recipe):
            y = layer(x)
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        parameters = [p.grad.clone() for p in layer.parameters()]
        found.append({"y": y, "dx": x.grad} | {str(i): g for i, g in enumerate(parameters)})
    assert_same_bits(found[0], found[1])


# Any structure of branches


class Branches(NamedTuple):
    """modules: (kind, name, in place), in order. given: the caller's extras; kept: the outputs that are returned."""

    modules: tuple[tuple[str, str, bool], ...]
    given: tuple[str, ...]
    kept: tuple[str, ...]
    frozen: frozenset[str]


@st.composite
def branches(draw: Callable[..., Any]) -> Branches:
    modules, made = [], []
    given = ["e0", "e1"][: draw(st.integers(0, 2))]
    for number in range(draw(st.integers(1, 10))):
        names = [*made, *given]
        kinds = ["make", "make", "times", "bias", "norm", "gate", "tanh"] + (["add"] * 5 + ["gate"] if names else [])
        kind = draw(st.sampled_from(kinds if names else [k for k in kinds if k != "gate"]))
        name = f"m{number}" if kind == "make" else draw(st.sampled_from(names)) if kind in ("add", "gate") else ""
        modules.append((kind, name, draw(st.booleans())))
        if kind == "make":
            made.append(name)
    used = {name for kind, name, _ in modules if kind in ("add", "gate")}
    kept = tuple(name for name in made if draw(st.booleans()))
    frozen = frozenset(name for name in ("x", *given) if draw(st.integers(0, 3)) == 0)
    return Branches(tuple(modules), tuple(name for name in given if name in used), kept, frozen)


def build(drawn: Branches) -> Sequential:
    kinds: dict[str, Callable[[str, bool], nn.Module]] = {
        "make": lambda name, own: Make(name, in_place=own),
        "add": lambda name, own: Add(name, in_place=own),
        "gate": lambda name, own: Gate().rename_extras(other=name),
        "times": lambda name, own: Times(0.5),
        "bias": lambda name, own: ops.Bias(WIDTH),
        "norm": lambda name, own: ops.RMSNorm(WIDTH),
        "tanh": lambda name, own: nn.Tanh(),
    }
    layer = Sequential(*(kinds[kind](name, own) for kind, name, own in drawn.modules)).double()
    for parameter in layer.parameters():
        nn.init.uniform_(parameter, 0.5, 1.5)
    return layer


class Cell:
    """A variable that may go by several names."""

    def __init__(self, value: Tensor) -> None:
        self.value = value


def plain(drawn: Branches, layer: Sequential, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Names are variables; to write in place is to give one another value, whatever names it has."""
    cells = {name: Cell(value) for name, value in given.items()}
    x = cells["x"]
    for module, (kind, name, own) in zip(layer, drawn.modules, strict=True):
        value = x.value
        if kind == "make":
            cells[name] = x
        elif kind == "add" and own:
            x = cells[name]
            x.value = x.value + value
        elif kind == "add":
            x = Cell(value + cells[name].value)
        elif kind == "gate":
            x = Cell(value * cells[name].value)
        elif kind == "times":
            x = Cell(value * 0.5)
        elif kind == "bias":
            x = Cell(value + module.bias)
        elif kind == "norm":
            x = Cell(F.rms_norm(value, (WIDTH,), module.weight, module.eps))
        else:
            x = Cell(torch.tanh(value))
    names = {"y": x, **{name: cells[name] for name in drawn.kept}, **{f"{name} after": cells[name] for name in given}}
    return {name: cell.value for name, cell in names.items()}


def ours(drawn: Branches, layer: Sequential, given: Mapping[str, Tensor]) -> dict[str, Tensor]:
    result = layer(**given, outputs=drawn.kept)
    y, made = result if drawn.kept else (result, {})
    return {"y": y, **made, **{f"{name} after": value for name, value in given.items()}}


REFUSALS = "cannot be written in place|autograd could not see|modified by an inplace|modified inplace"


@pytest.mark.slow
@pytest.mark.parametrize("retain_graph", [False, True])
@settings(max_examples=150)
@given(drawn=branches())
def test_any_branches_agree_with_plain_torch_or_are_refused(retain_graph: bool, drawn: Branches) -> None:
    generator = torch.Generator().manual_seed(5)
    start = {name: torch.rand(2, WIDTH, generator=generator, dtype=torch.float64) + 0.5 for name in ("x", *drawn.given)}
    torch.manual_seed(7)
    layer = build(drawn)
    results = []
    for run in (plain, ours):
        generator.manual_seed(11)
        leaf = {name: value.clone().requires_grad_(name not in drawn.frozen) for name, value in start.items()}
        layer.zero_grad()
        try:
            outputs = run(drawn, layer, {name: value * 1 for name, value in leaf.items()})
            values = {name: t.detach().clone() for name, t in outputs.items()}
            heads = [t for t in outputs.values() if t.requires_grad]
            if heads:
                d = [torch.randn(t.shape, generator=generator, dtype=t.dtype) for t in heads]
                torch.autograd.backward(heads, d, retain_graph=retain_graph)
        except RuntimeError as error:
            assert run is ours and re.search(REFUSALS, str(error)), error
            event("refused")
            return
        found = gradients({**leaf, **dict(layer.named_parameters())})
        results.append({**values, **{name: None if g is None else g.clone() for name, g in found.items()}})
    event("written in place" if any(own for kind, _, own in drawn.modules if kind == "add") else "nothing written")
    assert_close(results[1], results[0], {torch.float64: 1e-10}, floor=1e-3)


@pytest.mark.parametrize(
    ("given", "error", "sentence"),
    [
        ("", ValueError, "AddExtraInput's 'r' is to be called '', which is empty. Give the name by which"),
        (123, TypeError, "AddExtraInput's 'r' is to be called 123, but must be a text. Pass a str."),
        (None, TypeError, "must be a text"),
    ],
)
def test_what_is_no_name_is_refused_and_nothing_renamed(given: object, error: type[Exception], sentence: str) -> None:
    operation = Add("r")
    with pytest.raises(error, match=sentence):
        operation.rename_extras(r=given)
    assert operation.extra_name("r") == "r"


class Carried(BasicOperation):
    """y = 2 x; takes `carried`, and makes carried + x by the same name."""

    extra_inputs = {"carried": Tensor}
    extra_outputs = {"carried": Tensor}

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        return 2 * x, {"carried": extras["carried"] + x}

    def fuser_backward(self, ctx: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        gradients = [d for d in (None if dy is None else 2 * dy, d_extra_outputs.get("carried")) if d is not None]
        return sum(gradients[1:], gradients[0]), {}, dict(d_extra_outputs)


def test_an_operation_takes_and_makes_extra_tensors_of_one_name() -> None:
    x, carried = (torch.randn(3, WIDTH, requires_grad=True) for _ in range(2))
    y, made = Carried()(x, carried=carried, outputs=("carried",))
    of_one = torch.autograd.grad(y.sum() + 3 * made["carried"].sum(), (x, carried))
    assert torch.equal(made["carried"], carried + x)
    assert [set(gradient.flatten().tolist()) for gradient in of_one] == [{5.0}, {3.0}]

    y = Sequential(Make("carried"), Carried(), Carried(), Add("carried"))(x)
    torch.testing.assert_close(y, 8 * x)  # 4 x, and x + x + 2 x
    assert set(torch.autograd.grad(y.sum(), x)[0].flatten().tolist()) == {8.0}
