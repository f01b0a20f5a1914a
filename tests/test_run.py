"""The runner: one autograd node, only what is asked for is computed and kept, and every misuse is a clear error."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import re
import weakref
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint as torch_checkpoint

from fuser import BasicOperation, FusedOperation, Sequential, autocast, checkpoint, ops
from ops.lora import LoRALinear
from recipes.tensors.splits import Splits


class Scale(BasicOperation):
    """y = s x, with a learnable 0-dim s."""

    class Saved(NamedTuple):
        x: Tensor

    def __init__(self, value: float = 2.0, device: Any = None, dtype: Any = None) -> None:
        super().__init__()
        self.value = value
        self.scale = nn.Parameter(torch.empty((), device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.value)

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctx.needs_grad:
            ctx.saved = self.Saved(x)
        return x * ctx.param("scale"), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return dy * ctx.param("scale"), {"scale": (dy * ctx.saved.x).sum()}, {}


class Square(BasicOperation):
    """y = x^2."""

    class Saved(NamedTuple):
        x: Tensor

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctx.needs_grad:
            ctx.saved = self.Saved(x)
        return x * x, {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return 2 * dy * ctx.saved.x, {}, {}


class Spy(BasicOperation):
    """y = x; notes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.forwards: list[Any] = []
        self.backwards: list[Any] = []
        self.look: Callable[[], Any] = lambda: None

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        self.forwards.append(ctx)
        return x, {}

    def fuser_backward(self, ctx: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        self.backwards.append((ctx, dy, self.look()))
        return dy, {}, {}


class Tap(BasicOperation):
    """y = x, and x once more as the extra output `tapped`."""

    extra_outputs = {"tapped": Tensor}

    def __init__(self) -> None:
        super().__init__()
        self.given: list[Any] = []

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        return x, {"tapped": x}

    def fuser_backward(self, ctx: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        self.given.append((dy, dict(d_extra_outputs)))
        gradients = [g for g in (dy, d_extra_outputs.get("tapped")) if g is not None]
        return sum(gradients[1:], gradients[0]), {}, {}


class Multiply(BasicOperation):
    """y = x * other, for the extra input `other`."""

    extra_inputs = {"other": Tensor}

    class Saved(NamedTuple):
        x: Tensor
        other: Tensor

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, extras["other"])
        return x * extras["other"], {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        d_other = dy * ctx.saved.x if "other" in ctx.needs.extras else None
        return dy * ctx.saved.other if ctx.needs.input else None, {}, {"other": d_other}


class Failing(BasicOperation):
    """Raises in forward or backward, while told to."""

    def __init__(self, error: Exception, where: str = "forward") -> None:
        super().__init__()
        self.error, self.where = error, where

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if self.where == "forward":
            raise self.error
        return x, {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        if self.where == "backward":
            raise self.error
        return dy, {}, {}


def gradients(sequential: Sequential, x: Tensor, **kwargs: Any) -> list[Tensor | None]:
    """y, and the gradients of x and of all parameters, for the loss sum(y^2)."""
    sequential.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = sequential(x, **kwargs)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in sequential.parameters()]]


def assert_same(results: list[Tensor | None], expected: list[Tensor | None]) -> None:
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        assert (result is None) == (other is None)
        assert result is None or torch.equal(result, other)


class CountedProducts(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


class CountedSaves(saved_tensors_hooks):
    """Counts the tensors that are kept for backward."""

    def __init__(self) -> None:
        self.count = 0

        def pack(tensor: Tensor) -> Tensor:
            self.count += 1
            return tensor

        super().__init__(pack, lambda tensor: tensor)

    def __enter__(self) -> CountedSaves:  # type: ignore[override]
        super().__enter__()
        return self


# One node


def test_a_pipeline_is_one_autograd_node() -> None:
    sequential = Sequential(Scale(), Square(), ops.Linear(3, 2), Scale())
    x = torch.randn(4, 3, requires_grad=True)
    y = sequential(x)
    inputs = [function.variable for function, _ in y.grad_fn.next_functions if function is not None]
    assert [id(t) for t in inputs] == [id(t) for t in (x, *sequential.parameters())]


def test_gradients_are_those_of_plain_autograd() -> None:
    sequential = Sequential(Scale(), Square(), ops.Linear(3, 2), Scale(3.0)).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    first, _, linear, last = sequential
    expected = last.scale * nn.functional.linear((first.scale * x) ** 2, linear.weight, linear.bias)
    inputs = [x, *sequential.parameters()]
    for ours, theirs in zip(
        torch.autograd.grad(sequential(x).sin().sum(), inputs),
        torch.autograd.grad(expected.sin().sum(), inputs), strict=True,
    ):  # fmt: skip
        torch.testing.assert_close(ours, theirs)


def test_gradcheck_passes_with_retained_graphs() -> None:
    sequential = Sequential(Scale(), Square(), ops.Linear(3, 2), Multiply()).double()
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    other = torch.randn(4, 2, dtype=torch.float64, requires_grad=True)
    names = [name for name, _ in sequential.named_parameters()]

    def function(x: Tensor, other: Tensor, *parameters: Tensor) -> Tensor:
        return sequential(x, other=other)

    assert len(names) == 3
    assert torch.autograd.gradcheck(function, (x, other, *sequential.parameters()))


def test_an_operation_runs_alone() -> None:
    operation = Scale(3.0)
    x = torch.ones(2, requires_grad=True)
    y = operation(x)
    y.sum().backward()
    assert torch.equal(y, torch.full((2,), 3.0))
    assert torch.equal(x.grad, torch.full((2,), 3.0)) and operation.scale.grad == 2


def test_an_operation_alone_takes_and_makes_extras_by_name() -> None:
    x = torch.randn(2)
    assert torch.equal(Multiply()(x, other=x), x * x)
    y, made = Tap()(x, outputs=("tapped",))
    assert torch.equal(y, x) and torch.equal(made["tapped"], x)
    with pytest.raises(ValueError, match=r"missing: 'other'; the operations ask for: 'other'"):
        Multiply()(x)
    with pytest.raises(ValueError, match=r"No operation makes the extra output 'a'. There are: 'tapped'"):
        Tap()(x, outputs=("a",))


def test_tied_weights_get_the_sum_of_their_gradients() -> None:
    sequential = Sequential(Scale(3.0), Square(), Scale())
    sequential[2].scale = sequential[0].scale
    x = torch.ones((), requires_grad=True)
    sequential(x).backward()
    assert sequential[0].scale.grad == 3 * 3**2  # y = s^3 x^2


def test_a_parameter_of_a_submodule_is_read_by_its_dotted_name() -> None:
    class Inside(BasicOperation):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(2, 2, bias=False)

        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x + ctx.param("inner.weight").sum(), {}

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy, {"inner.weight": dy.sum().expand(2, 2)}, {}

    sequential = Sequential(Inside())
    sequential(torch.ones(3)).sum().backward()
    assert torch.equal(sequential[0].inner.weight.grad, torch.full((2, 2), 3.0))


@pytest.mark.parametrize("shape", [(0,), (), (0, 3), (2, 0, 3)], ids=str)
def test_no_rows_work(shape: tuple[int, ...]) -> None:
    sequential = Sequential(Scale(), Square())
    x = torch.ones(shape, requires_grad=True)
    y = sequential(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


def test_dx_and_the_gradient_of_an_extra_do_not_share_memory() -> None:
    class Add(Multiply):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x + extras["other"], {}

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy, {}, {"other": dy}

    x, other = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    Sequential(Add())(x, other=other).square().sum().backward()
    x.grad.zero_()
    assert torch.equal(other.grad, torch.full((2,), 4.0))


# Only what is asked for


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode], ids=["no_grad", "inference_mode"])
def test_without_grad_mode_nothing_is_saved(mode: Any) -> None:
    spy = Spy()
    sequential = Sequential(spy, ops.Linear(3, 3), Square())
    x = torch.randn(4, 3, requires_grad=True)
    expected = sequential(x)
    with mode(), CountedSaves() as saves:
        y = sequential(x)
    assert saves.count == 0
    assert not spy.forwards[-1].needs_grad and not any(spy.forwards[-1].needs)
    assert y.grad_fn is None and not y.requires_grad
    assert torch.equal(y, expected)


def test_when_nothing_requires_grad_nothing_is_saved() -> None:
    sequential = Sequential(ops.Linear(3, 3), Square()).requires_grad_(False)
    with CountedSaves() as saves:
        y = sequential(torch.randn(4, 3))
    assert saves.count == 0 and not y.requires_grad


def test_a_module_built_and_run_in_inference_mode_agrees_with_one_that_is_not() -> None:
    x = torch.randn(2, 3)
    with torch.inference_mode():
        inside = Sequential(ops.Linear(3, 3), Scale())
        y = inside(x)
    outside = Sequential(ops.Linear(3, 3), Scale())
    outside.load_state_dict(inside.state_dict())
    assert torch.equal(y, outside(x))
    with torch.no_grad():
        assert torch.equal(inside(x), y)


def test_training_and_inference_take_turns() -> None:
    sequential = Sequential(ops.Linear(3, 3), Scale())
    x = torch.randn(2, 3)
    for _ in range(2):
        with torch.inference_mode():
            y = sequential(x)
        results = gradients(sequential, x)
        assert torch.equal(results[0], y)
        assert all(result is not None for result in results)


@pytest.mark.parametrize(
    ("x_needs", "weight_needs", "bias_needs", "products"),
    [
        (True, True, True, 2), (True, False, False, 1), (False, True, False, 1), (False, False, True, 0),
        (True, False, True, 1), (False, True, True, 1), (True, True, False, 2),
    ],
)  # fmt: skip
def test_only_gradients_that_are_asked_for_are_computed(
    x_needs: bool, weight_needs: bool, bias_needs: bool, products: int
) -> None:
    sequential = Sequential(ops.Linear(3, 2))
    sequential[0].weight.requires_grad_(weight_needs)
    sequential[0].bias.requires_grad_(bias_needs)
    x = torch.randn(4, 3, requires_grad=x_needs)
    with CountedSaves() as saves:
        y = sequential(x)
    assert saves.count == (1 if weight_needs else 0), "x is kept for the weight gradient alone"
    with CountedProducts() as counted:
        y.sum().backward()
    assert counted.count == products
    for tensor, needed in ((x, x_needs), (sequential[0].weight, weight_needs), (sequential[0].bias, bias_needs)):
        assert (tensor.grad is not None) == needed


def test_operations_before_the_first_trainable_one_run_no_backward() -> None:
    first, second = Spy(), Spy()
    sequential = Sequential(first, Square(), Scale(), second)
    sequential(torch.ones(3)).sum().backward()
    assert not first.backwards and len(second.backwards) == 1
    assert not first.forwards[0].needs_grad
    assert second.forwards[0].needs.input


def test_an_operation_gets_the_needs_of_its_own_parameters_and_extras() -> None:
    seen: list[Any] = []

    class Both(Multiply):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(()), requires_grad=False)

        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            seen.append(ctx.needs)
            return super().fuser_forward(ctx, x, extras)

    x = torch.ones(2)
    Sequential(Both())(x, other=x)
    Sequential(Both())(x, other=x.clone().requires_grad_())
    Sequential(Both())(x.clone().requires_grad_(), other=x)
    assert seen[0] == (False, frozenset({"a"}), frozenset())
    assert seen[1] == (False, frozenset({"a"}), frozenset({"other"}))
    assert seen[2] == (True, frozenset({"a"}), frozenset())


def test_requires_grad_may_change_between_calls() -> None:
    sequential = Sequential(Scale(2.0), Scale(3.0))
    x = torch.ones(2)
    for needs in (True, False, True):
        sequential[0].scale.requires_grad_(needs)
        sequential.zero_grad()
        sequential(x).sum().backward()
        assert (sequential[0].scale.grad is not None) == needs
        assert sequential[1].scale.grad == 4


def test_a_gradient_that_nobody_asked_for_is_dropped() -> None:
    sequential = Sequential(Scale(2.0))  # Scale always computes both
    sequential[0].scale.requires_grad_(False)
    x = torch.ones(2, requires_grad=True)
    sequential(x).sum().backward()
    assert sequential[0].scale.grad is None
    sequential[0].scale.requires_grad_(True)
    y = sequential(torch.ones(2))
    y.sum().backward()
    assert sequential[0].scale.grad == 2


def test_gradients_accumulate_over_calls() -> None:
    sequential = Sequential(Scale(2.0))
    for _ in range(3):
        sequential(torch.ones(2)).sum().backward()
    assert sequential[0].scale.grad == 6


def test_tensor_hooks_and_post_accumulate_hooks_fire() -> None:
    sequential = Sequential(Scale(2.0), Scale(3.0))
    seen: list[str] = []
    x = torch.ones(2, requires_grad=True)
    x.register_hook(lambda g: seen.append("x"))
    sequential[0].scale.register_hook(lambda g: 10 * g)
    sequential[1].scale.register_post_accumulate_grad_hook(lambda p: seen.append("accumulated"))
    y = sequential(x)
    y.register_hook(lambda g: seen.append("y"))
    y.sum().backward()
    assert seen[0] == "y" and sorted(seen[1:]) == ["accumulated", "x"]
    assert sequential[0].scale.grad == 60


# Extra tensors


def test_the_gradient_of_an_extra_used_many_times_is_that_of_plain_autograd() -> None:
    sequential = Sequential(Tap(), Multiply().rename_extras(other="tapped"), Square(), nn.Tanh(), Scale(3.0),
                            Multiply().rename_extras(other="tapped"), Multiply())  # fmt: skip
    sequential.double()
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    other = torch.randn(5, dtype=torch.float64, requires_grad=True)
    scale = sequential[4].scale
    y, made = sequential(x, outputs=("tapped",), other=other)
    theirs = scale * torch.tanh((x * x) ** 2) * x * other
    torch.testing.assert_close(y, theirs)
    inputs = (x, other, scale)
    ours_d = torch.autograd.grad((y.sin() + made["tapped"].exp() * other).sum(), inputs)
    theirs_d = torch.autograd.grad((theirs.sin() + x.exp() * other).sum(), inputs)
    for a, b in zip(ours_d, theirs_d, strict=True):
        torch.testing.assert_close(a, b)


def test_only_an_extra_output_may_have_a_gradient() -> None:
    tap = Tap()
    sequential = Sequential(Scale(3.0), tap, Square(), Scale(5.0))
    x = torch.ones(2, requires_grad=True)
    _, made = sequential(x, outputs=("tapped",))
    made["tapped"].sum().backward()
    ((dy, d_extras),) = tap.given
    assert dy is None and torch.equal(d_extras["tapped"], torch.ones(2))
    assert torch.equal(x.grad, torch.full((2,), 3.0))
    assert sequential[0].scale.grad == 2
    assert sequential[3].scale.grad is None


def test_an_extra_output_without_a_gradient_is_not_among_the_gradients() -> None:
    tap = Tap()
    y, _ = Sequential(tap, Scale())(torch.ones(2, requires_grad=True), outputs=("tapped",))
    y.sum().backward()
    assert tap.given[0][1] == {}


def test_an_extra_output_that_depends_on_nothing_trainable_requires_no_grad() -> None:
    y, made = Sequential(Tap(), Scale())(torch.ones(2), outputs=("tapped",))
    assert y.requires_grad
    assert not made["tapped"].requires_grad


@pytest.mark.parametrize("x_needs", [True, False])
def test_an_extra_input_alone_may_require_grad(x_needs: bool) -> None:
    sequential = Sequential(Square(), Multiply(), Square())
    x, other = torch.full((2,), 2.0, requires_grad=x_needs), torch.full((2,), 3.0, requires_grad=True)
    sequential(x, other=other).sum().backward()
    assert torch.equal(other.grad, torch.full((2,), 2 * 12.0 * 4))
    assert (x.grad is not None) == x_needs


def test_the_gradient_of_an_extra_has_its_dtype() -> None:
    class Rounds(Multiply):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            y, outputs = super().fuser_forward(ctx, x, extras)
            return y.to(ctx.dtype), outputs

    x, other = torch.ones(2, dtype=torch.bfloat16, requires_grad=True), torch.ones(2, requires_grad=True)
    y = Sequential(Rounds())(x, other=other)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == torch.bfloat16
    assert other.grad.dtype == torch.float32


def test_extras_may_be_passed_by_a_list_a_tensor_or_splits() -> None:
    sequential = Sequential(ops.GroupedLinear(2, 3, 3), nn.Identity(), ops.GroupedLinear(2, 3, 3))
    x = torch.randn(5, 3)
    expected = sequential(x, split_sizes=[2, 3])
    for sizes in (torch.tensor([2, 3]), torch.tensor([2, 3], dtype=torch.int32), (2, 3)):
        assert torch.equal(sequential(x, split_sizes=sizes), expected)
    assert torch.equal(sequential(x, split_sizes=Splits.make([2, 3], rows=5, device="cpu")), expected)


def test_split_sizes_are_made_splits_once_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    sequential = Sequential(*[ops.GroupedLinear(2, 3, 3) for _ in range(3)], fusions=())
    made: list[Any] = []
    make = Splits.make
    monkeypatch.setattr(Splits, "make", staticmethod(lambda *a, **k: made.append(a) or make(*a, **k)))
    sequential(torch.randn(5, 3), split_sizes=torch.tensor([2, 3]))
    assert len(made) == 1


def test_refilling_the_split_sizes_before_backward_does_no_harm() -> None:
    sequential = Sequential(ops.GroupedLinear(2, 3, 3))
    x, sizes = torch.randn(5, 3), torch.tensor([2, 3])
    expected = gradients(sequential, x, split_sizes=torch.tensor([2, 3]))
    sequential.zero_grad()
    x = x.clone().requires_grad_()
    y = sequential(x, split_sizes=sizes)
    sizes.copy_(torch.tensor([5, 0]))
    y.square().sum().backward()
    assert_same([y.detach(), x.grad, *[p.grad for p in sequential.parameters()]], expected)


# Dtypes


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_a_dtype_move_is_followed(dtype: torch.dtype) -> None:
    sequential = Sequential(ops.Linear(3, 3), Square(), Scale())
    x = torch.randn(4, 3, requires_grad=True)
    sequential(x)
    sequential.to(dtype)
    y = sequential(x)
    y.sum().backward()
    assert y.dtype == dtype
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == dtype for p in sequential.parameters())


def test_each_operation_computes_in_its_weights_dtype_else_in_its_inputs() -> None:
    spies = [Spy(), Spy(), Spy()]
    sequential = Sequential(spies[0], Scale(dtype=torch.bfloat16), spies[1], Scale(dtype=torch.float64), spies[2])
    x = torch.ones(2, dtype=torch.float16, requires_grad=True)
    y = sequential(x)
    y.sum().backward()
    dtypes = [torch.float16, torch.bfloat16, torch.float64]
    assert [spy.forwards[0].dtype for spy in spies] == dtypes
    assert [spy.backwards[0][1].dtype for spy in spies] == dtypes
    assert y.dtype == torch.float64 and x.grad.dtype == torch.float16


@pytest.mark.parametrize("order", ["torch first", "recipe first"])
@pytest.mark.parametrize("recipe", [None, "fp8_current"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_torch_autocast_gives_the_dtype_and_gradients_keep_the_parameters(
    order: str, recipe: str | None, dtype: torch.dtype
) -> None:
    sequential = Sequential(ops.Linear(32, 32), Scale()).to(dtype)
    x = torch.randn(4, 32, requires_grad=True)
    contexts = [torch.autocast("cpu", dtype=torch.bfloat16), autocast(recipe)]
    first, second = contexts if order == "torch first" else contexts[::-1]
    with first, second:
        y = sequential(x)
    y.sum().backward()
    assert y.dtype == torch.bfloat16
    assert x.grad.dtype == torch.float32
    assert all(p.grad.dtype == dtype for p in sequential.parameters())
    same = copy.deepcopy(sequential).bfloat16()
    with autocast(recipe):
        assert torch.equal(same(x.bfloat16()), y)


def test_torch_autocast_does_not_reach_into_an_operation_and_is_back_behind_it() -> None:
    seen: list[bool] = []

    class Looks(Scale):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().fuser_forward(ctx, x, extras)

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            seen.append(torch.is_autocast_enabled("cpu"))
            return super().fuser_backward(ctx, dy, d_extra_outputs)

    sequential = Sequential(Looks())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = sequential(torch.ones(2))
        assert torch.is_autocast_enabled("cpu")
        y.sum().backward()
        assert torch.is_autocast_enabled("cpu")
        with torch.no_grad():
            sequential(torch.ones(2))
    assert seen == [False, False, False]


def test_torch_autocast_leaves_float64_alone() -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert Sequential(Scale(dtype=torch.float64))(torch.ones(2, dtype=torch.float64)).dtype == torch.float64


def test_backward_under_torch_autocast_gives_the_same_gradients() -> None:
    sequential = Sequential(ops.Linear(8, 8), Scale())
    x = torch.randn(4, 8)
    expected = gradients(sequential, x)
    sequential.zero_grad()
    x = x.clone().requires_grad_()
    y = sequential(x)
    loss = y.square().sum()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss.backward()
    assert_same([y.detach(), x.grad, *[p.grad for p in sequential.parameters()]], expected)


# Copies


def trained() -> Sequential:
    sequential = Sequential(ops.Linear(3, 3), nn.Tanh(), Sequential(Scale(3.0), Multiply().rename_extras(other="m")))
    optimizer = torch.optim.SGD(sequential.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        sequential(torch.randn(4, 3), m=torch.ones(4, 3)).square().sum().backward()
        optimizer.step()
    return sequential


def through_deepcopy(sequential: Sequential) -> Sequential:
    return copy.deepcopy(sequential)


def through_pickle(sequential: Sequential) -> Sequential:
    return pickle.loads(pickle.dumps(sequential))


def through_torch_save(sequential: Sequential) -> Sequential:
    file = io.BytesIO()
    torch.save(sequential, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


def through_state_dict(sequential: Sequential) -> Sequential:
    other = trained()
    other.load_state_dict(sequential.state_dict())
    return other


@pytest.mark.parametrize(
    "copied", [through_deepcopy, through_pickle, through_torch_save, through_state_dict], ids=lambda f: f.__name__
)
def test_a_copy_of_a_trained_model_computes_the_same_and_shares_nothing(copied: Any) -> None:
    sequential = trained()
    sequential[0](torch.randn(4, 3))  # its own pipeline too
    twin = copied(sequential)
    x, m = torch.randn(4, 3), torch.randn(4, 3)
    expected = gradients(sequential, x, m=m)
    assert_same(gradients(twin, x, m=m), expected)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        twin[0](x)
    assert_same(gradients(sequential, x, m=m), expected)
    assert torch.equal(twin(x, m=m), torch.zeros(4, 3))


def test_a_copy_of_an_operation_runs_its_own_parameters() -> None:
    operation = Scale(2.0)
    operation(torch.ones(2))
    twin = copy.deepcopy(operation)
    with torch.no_grad():
        twin.scale.fill_(5.0)
    assert torch.equal(twin(torch.ones(2)), torch.full((2,), 5.0))
    assert torch.equal(operation(torch.ones(2)), torch.full((2,), 2.0))


def test_a_copy_of_the_attributes_of_an_operation_runs_its_own_parameters() -> None:
    """As libraries for meta-learning clone modules, whose parameters are then computed."""
    operation = Scale(2.0)
    operation(torch.ones(2))
    twin = Scale.__new__(Scale)
    twin.__dict__ = operation.__dict__.copy()
    twin._parameters = {"scale": operation.scale * 3}
    y = twin(torch.ones(2))
    assert torch.equal(y, torch.full((2,), 6.0))
    y.sum().backward()
    assert operation.scale.grad.item() == 6


@pytest.mark.parametrize("within", (True, False))
def test_gradients_go_to_parameters_in_a_dictionary_that_took_the_place_of_another(within: bool) -> None:
    operation, other = Scale(2.0), Scale(5.0)
    called = Sequential(operation, Scale(1.0)) if within else operation
    called(torch.ones(2)).sum().backward()
    operation.scale.grad = None
    operation.__setstate__(other.__getstate__())
    y = called(torch.ones(2))
    y.sum().backward()
    assert operation.scale is other.scale and other.scale.grad.item() == 2
    operation._parameters = {"scale": nn.Parameter(torch.tensor(7.0))}
    called(torch.ones(2)).sum().backward()
    assert operation.scale.grad.item() == 2 and other.scale.grad.item() == 2


def test_meta_init_then_to_empty_then_reset_trains_as_usual() -> None:
    def build(device: str) -> Sequential:
        linear = ops.Linear(3, 4, device=device)
        return Sequential(linear, Scale(device=device), ops.GroupedLinear(2, 4, 2, device=device))

    meta = build("meta").to_empty(device="cpu")
    torch.manual_seed(5)
    for operation in meta:
        operation.reset_parameters()
    torch.manual_seed(5)
    usual = build("cpu")
    x = torch.randn(6, 3)
    assert_same(gradients(meta, x, split_sizes=[2, 4]), gradients(usual, x, split_sizes=[2, 4]))


def test_a_parameter_left_on_meta_is_named() -> None:
    message = r"Linear.weight is on the meta device, but x is on cpu.*to_empty.*reset_parameters"
    with pytest.raises(RuntimeError, match=message):
        Sequential(ops.Linear(2, 2, device="meta"))(torch.ones(1, 2))


@pytest.mark.parametrize("recipe", ["bf16", "fp8_delayed"])
@pytest.mark.parametrize("operation", [ops.Linear(4, 4), ops.RMSNorm(4), ops.Router(4, 2, topk=1)], ids=str)
def test_a_parameter_on_another_device_than_x_is_named(operation: Any, recipe: str) -> None:
    message = rf"x is on meta, but {type(operation).__name__}.weight is on cpu. Move one of them."
    with pytest.raises(ValueError, match=message), autocast(recipe):
        Sequential(operation)(torch.ones(1, 4, device="meta"))


def test_an_adapter_on_another_device_than_x_is_named() -> None:
    adapted = LoRALinear(ops.Linear(4, 4), 2, 4.0, 0.0)
    adapted.weight = nn.Parameter(adapted.weight.detach().to("meta"), requires_grad=False)
    adapted.bias = nn.Parameter(adapted.bias.detach().to("meta"), requires_grad=False)
    with pytest.raises(ValueError, match=r"x is on meta, but LoRALinear.lora_A\S* is on cpu. Move one of them."):
        Sequential(adapted)(torch.ones(1, 4, device="meta"))


def test_operations_of_ones_own_may_move_their_parameters() -> None:
    class Shift(BasicOperation):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.ones(4))

        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x + ctx.param("shift").to(x.device), {}

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy, {"shift": dy.sum(0).to("cpu")}, {}

    with torch.no_grad():
        assert Sequential(Shift())(torch.ones(1, 4, device="meta")).is_meta


# Checkpointing and saved-tensor hooks


def deep() -> Sequential:
    torch.manual_seed(1)
    return Sequential(ops.Linear(32, 32), Square(), ops.Linear(32, 32), Scale(0.5))


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("recipe", [None, "fp8_current", "mxfp8", "fp8_block"])
def test_checkpointed_gradients_are_bit_equal(use_reentrant: bool, recipe: str | None) -> None:
    sequential = deep()
    x = torch.randn(8, 32)
    with autocast(recipe):
        expected = gradients(sequential, x)

    def wrapped(x: Tensor) -> Tensor:
        with autocast(recipe):
            return checkpoint(sequential, x, use_reentrant=use_reentrant)  # backward runs outside of the recipe

    sequential.zero_grad()
    x = x.clone().requires_grad_()
    y = wrapped(x)
    y.square().sum().backward()
    assert_same([y.detach(), x.grad, *[p.grad for p in sequential.parameters()]], expected)
    assert recipe is None or not torch.equal(expected[0], gradients(sequential, x)[0]), "the recipe counts"


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("covers", ["inside", "around forward and backward"])
def test_torchs_checkpoint_is_right_with_the_recipe_inside_or_around_both(use_reentrant: bool, covers: str) -> None:
    sequential = deep()
    x = torch.randn(8, 32)
    with autocast("mxfp8"):
        expected = gradients(sequential, x)
    sequential.zero_grad()
    x = x.clone().requires_grad_()

    def under_recipe(x: Tensor) -> Tensor:
        with autocast("mxfp8"):
            return sequential(x)

    function = under_recipe if covers == "inside" else sequential
    with autocast("mxfp8", enabled=covers != "inside"):
        y = torch_checkpoint(function, x, use_reentrant=use_reentrant)
        y.square().sum().backward()
    assert_same([y.detach(), x.grad, *[p.grad for p in sequential.parameters()]], expected)


def test_checkpoint_keeps_nothing_but_the_input() -> None:
    sequential = deep()
    x = torch.randn(8, 32, requires_grad=True)
    alive: list[Any] = []

    class Watch(Square):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            alive.append(weakref.ref(x))
            return super().fuser_forward(ctx, x, extras)

    sequential[1] = Watch()
    y = checkpoint(sequential, x)
    assert alive[0]() is None
    y.sum().backward()
    assert len(alive) == 2, "computed again"


def test_checkpoint_hands_keywords_on() -> None:
    sequential = Sequential(Tap(), Multiply())
    x, other = torch.randn(2, requires_grad=True), torch.randn(2, requires_grad=True)
    y, made = checkpoint(sequential, x, other=other, outputs=("tapped",))
    torch.testing.assert_close(y, x * other)
    (y + made["tapped"]).sum().backward()
    torch.testing.assert_close(x.grad, other.detach() + 1)
    torch.testing.assert_close(other.grad, x.detach())


def test_save_on_cpu_and_other_hooks_see_every_saved_tensor() -> None:
    sequential = deep()
    x = torch.randn(8, 32)
    expected = gradients(sequential, x)
    with save_on_cpu():
        assert_same(gradients(sequential, x), expected)
    with saved_tensors_hooks(lambda t: t.numpy().copy(), torch.from_numpy):  # nothing of a tensor survives this
        assert_same(gradients(sequential, x), expected)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "fp8_block"])
def test_quantized_containers_pass_saved_tensor_hooks(recipe: str) -> None:
    sequential = Sequential(ops.Linear(32, 32), ops.GroupedLinear(2, 32, 32), Scale())
    x = torch.randn(64, 32)
    with autocast(recipe):
        expected = gradients(sequential, x, split_sizes=[20, 44])
        with save_on_cpu(), CountedSaves() as saves:
            assert_same(gradients(sequential, x, split_sizes=[20, 44]), expected)
    assert saves.count >= 4, "codes and scales of both"


# Early release


def test_saved_tensors_are_freed_operation_by_operation() -> None:
    freed: list[int] = []
    seen: list[list[int]] = []

    class Keeps(BasicOperation):
        class Saved(NamedTuple):
            first: Tensor
            second: Splits

        def __init__(self, number: int) -> None:
            super().__init__()
            self.number = number

        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            first, splits = x + 1, Splits.make([1, 1], rows=2, device="cpu")
            for tensor in (first, splits.offsets):
                weakref.finalize(tensor, freed.append, self.number)
            ctx.saved = self.Saved(first, splits)
            return x + 0, {}

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            assert ctx.saved.second.tolist() == [1, 1]
            seen.append(sorted(freed))
            return dy + 0, {}, {}

    for retain, expected in ((False, [[], [2, 2], [1, 1, 2, 2]]), (True, [[], [], []])):
        freed.clear()
        seen.clear()
        sequential = Sequential(Keeps(0), Keeps(1), Keeps(2))
        y = sequential(torch.ones(2, requires_grad=True))
        gc.disable()
        try:
            y.sum().backward(retain_graph=retain)
        finally:
            gc.enable()
        assert seen == expected
        assert sorted(freed) == ([] if retain else [0, 0, 1, 1, 2, 2]), "y is still alive"
        del y
        assert sorted(freed) == [0, 0, 1, 1, 2, 2]


def test_retain_graph_runs_twice_with_equal_results() -> None:
    sequential = Sequential(ops.Linear(3, 3), Square(), Scale())
    x = torch.randn(4, 3, requires_grad=True)
    y = sequential(x)
    inputs = [x, *sequential.parameters()]
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(y.sum(), inputs)
    assert_same(list(first), list(second))


def test_a_second_backward_raises_one_clear_error() -> None:
    sequential = Sequential(ops.Linear(3, 3), Square())
    y = sequential(torch.randn(4, 3))
    for retain in (True, False):
        y.sum().backward(retain_graph=retain)
    message = r"second backward: what the operations saved was freed.*Give the first one retain_graph=True"
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_a_second_backward_after_a_change_in_place_says_that_and_not_that_the_graph_was_freed() -> None:
    x = torch.randn(4, 3, requires_grad=True) * 1
    y = Sequential(ops.Linear(3, 3))(x)
    y.sum().backward(retain_graph=True)
    with torch.no_grad():
        x.mul_(2)
    with pytest.raises(RuntimeError, match="modified inplace"):
        y.sum().backward()


def test_an_error_of_a_hook_of_saved_tensors_is_the_callers_own_in_a_second_backward_too() -> None:
    unpacked = 0

    def unpack(tensor: Tensor) -> Tensor:
        nonlocal unpacked
        unpacked += 1
        if unpacked > 1:
            raise RuntimeError("the file is gone")
        return tensor

    with saved_tensors_hooks(lambda tensor: tensor, unpack):
        y = Sequential(ops.Linear(3, 3))(torch.randn(4, 3))
    y.sum().backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="the file is gone"):
        y.sum().backward()


def test_a_second_backward_of_a_pipeline_that_saves_nothing_raises_too() -> None:
    y = Sequential(Spy())(torch.ones(2, requires_grad=True))
    for retain in (True, False):
        y.sum().backward(retain_graph=retain)
    with pytest.raises(RuntimeError, match="second backward"):
        y.sum().backward()


def test_double_backward_raises_one_clear_error() -> None:
    x = torch.ones(2, requires_grad=True)
    y = Sequential(Square())(x)
    message = r"Double backward \(create_graph=True\) through a pipeline is not supported"
    with pytest.raises(RuntimeError, match=message):
        torch.autograd.grad(y.sum(), x, create_graph=True)


# Between forward and backward


def test_a_parameter_changed_in_place_before_backward_is_an_error() -> None:
    sequential = Sequential(Square(), Scale())
    y = sequential(torch.ones(2))
    with torch.no_grad():
        sequential[1].scale.mul_(2)
    message = r"In operation 1 \(Scale\): Parameter 'scale' was changed in place \(version"
    with pytest.raises(RuntimeError, match=message):
        y.sum().backward()


def test_a_parameter_replaced_before_backward_is_an_error() -> None:
    sequential = Sequential(Square(), Scale())
    y = sequential(torch.ones(2))
    sequential[1].scale = nn.Parameter(torch.ones(()))
    with pytest.raises(RuntimeError, match=r"In operation 1 \(Scale\): Parameter 'scale' was replaced between forward"):
        y.sum().backward()


def test_a_frozen_parameter_changed_before_backward_is_an_error_too() -> None:
    sequential = Sequential(ops.Linear(2, 2)).requires_grad_(False)
    y = sequential(torch.ones(1, 2, requires_grad=True))
    sequential[0].weight.zero_()
    with pytest.raises(RuntimeError, match="Parameter 'weight' was changed in place"):
        y.sum().backward()


def test_an_optimizer_step_after_backward_is_fine_and_before_it_is_not() -> None:
    sequential = Sequential(Scale())
    optimizer = torch.optim.SGD(sequential.parameters(), lr=0.1)
    for _ in range(3):
        sequential(torch.ones(2)).sum().backward()
        optimizer.step()
    y = sequential(torch.ones(2))
    optimizer.step()
    with pytest.raises(RuntimeError, match="Run backward before the optimizer step"):
        y.sum().backward()


def test_a_saved_tensor_changed_in_place_before_backward_is_an_error() -> None:
    x = torch.ones(2, requires_grad=True)
    scaled = x * 1
    y = Sequential(Square())(scaled)
    with torch.no_grad():
        scaled.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_the_recipe_of_the_forward_pass_holds_in_backward() -> None:
    sequential = Sequential(ops.Linear(32, 32))
    x = torch.randn(8, 32)
    with autocast("fp8_current"):
        expected = gradients(sequential, x)
    sequential.zero_grad()
    x = x.clone().requires_grad_()
    with autocast("fp8_current"):
        y = sequential(x)
    with autocast("mxfp8"):
        y.square().sum().backward()
    assert_same([y.detach(), x.grad, *[p.grad for p in sequential.parameters()]], expected)


def test_two_calls_may_be_open_at_once() -> None:
    sequential = Sequential(Scale(2.0), Square())
    a, b = torch.full((2,), 1.0, requires_grad=True), torch.full((2,), 3.0, requires_grad=True)
    first, second = sequential(a), sequential(b)
    first.sum().backward()
    second.sum().backward()
    assert torch.equal(a.grad, torch.full((2,), 8.0)) and torch.equal(b.grad, torch.full((2,), 24.0))


def test_numbers_set_on_the_context_in_forward_are_there_in_backward_and_stay_in_their_call() -> None:
    class Counts(BasicOperation):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            ctx.rows, ctx.note = x.shape[0], "forward"
            return x, {}

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            assert ctx.rows == dy.shape[0] and ctx.note == "forward"
            ctx.note = "backward"
            return dy, {}, {}

    sequential = Sequential(Counts())
    x3, x5 = torch.ones(3, requires_grad=True), torch.ones(5, requires_grad=True)
    y3, y5 = sequential(x3), sequential(x5)
    y3.sum().backward(retain_graph=True)
    y5.sum().backward()
    y3.sum().backward()


# Errors


@pytest.mark.parametrize("factor", [2.0, 2j, [2.0], {"factor": 2.0}, torch.Size([2])])
def test_what_saved_cannot_hold_is_refused_and_its_operation_named(factor: Any) -> None:
    class Numbered(BasicOperation):
        class Saved(NamedTuple):
            x: Tensor
            factor: Any

        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            ctx.saved = self.Saved(x, factor)
            return x, {}

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy, {}, {}

    sequential = Sequential(Scale(), Numbered())
    with pytest.raises(
        TypeError, match=rf"Saved.factor is a {type(factor).__name__}. Saved holds tensors.* put numbers on ctx"
    ):
        sequential(torch.ones(2))
    with pytest.raises(TypeError, match=r"operation 1 \(Numbered\)"):
        sequential(torch.ones(2))


@pytest.mark.parametrize("kind", [ValueError, TypeError, RuntimeError, NotImplementedError])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_an_error_names_the_operation_and_its_position(kind: type[Exception], where: str) -> None:
    sequential = Sequential(Scale(), Failing(kind("wrong by design"), where), Scale())
    with pytest.raises(kind, match=r"^In operation 1 \(Failing\): wrong by design$") as caught:
        sequential(torch.ones(2, requires_grad=True)).sum().backward()
    assert str(caught.value.__cause__) == "wrong by design"


def test_an_error_of_another_class_gets_the_operation_as_a_note() -> None:
    sequential = Sequential(Scale(), Failing(KeyError("deep inside")))
    with pytest.raises(KeyError) as caught:
        sequential(torch.ones(2))
    assert caught.value.__notes__ == ["In operation 1 (Failing)."]
    assert caught.value.__cause__ is not caught.value


@pytest.mark.parametrize("nested", [False, True])
def test_the_position_in_an_error_is_that_in_the_sequential(nested: bool) -> None:
    tail: list[nn.Module] = [Scale(), Failing(ValueError("wrong by design"))]
    sequential = Sequential(nn.Identity(), Sequential(*tail)) if nested else Sequential(nn.Identity(), *tail)
    with pytest.raises(ValueError, match=rf"In operation {'1.1' if nested else '2'} \(Failing\)"):
        sequential(torch.ones(2))


def test_an_error_in_a_fused_operation_names_it() -> None:
    class FailingPair(FusedOperation):
        pattern = (Scale, Square)
        passes = "forward"

        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            raise ValueError("wrong by design")

    with pytest.raises(ValueError, match=r"In operation 1 \(FailingPair\): wrong by design"):
        Sequential(Square(), Scale(), Square(), fusions=(FailingPair,))(torch.ones(2))


def test_an_undeclared_parameter_is_an_error_that_names_it() -> None:
    class Asks(Spy):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x * ctx.param("wieght"), {}

    with pytest.raises(AttributeError, match="wieght"):
        Sequential(Asks())(torch.ones(2))


def test_a_declared_extra_output_that_is_not_returned_is_an_error() -> None:
    class Forgets(Tap):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x, {}

    with pytest.raises(RuntimeError, match=r"In operation 0 \(Forgets\).* declares the extra output 'tapped', but"):
        Sequential(Forgets())(torch.ones(2))


def test_an_extra_output_that_is_returned_and_not_declared_is_an_error() -> None:
    class Invents(Tap):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x, {"tapped": x, "invented": None}

    class InventingPair(FusedOperation):
        pattern = (Scale, Square)
        passes = "forward"

        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x, {"invented": x}

    message = "fuser_forward returned the extra output 'invented', which is not declared. There are:"
    with pytest.raises(RuntimeError, match=rf"In operation 0 \(Invents\): {message} 'tapped'\. Name it"):
        Sequential(Invents())(torch.ones(2))
    with pytest.raises(RuntimeError, match=rf"In operation 0 \(InventingPair\): {message} none\. Name it"):
        Sequential(Scale(), Square(), fusions=(InventingPair,))(torch.ones(2))


@pytest.mark.parametrize(
    "dx", [torch.ones(3), torch.ones(1, 3), torch.ones(4, 1), torch.ones(2, 4, 3), torch.tensor(1.0)]
)
def test_a_gradient_of_another_shape_than_x_is_an_error(dx: Tensor) -> None:
    """It would be broadcast by the operation before, or summed by autograd."""

    class Reduces(Spy):
        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dx, {}, {}

    for sequential in (Sequential(Scale(), Reduces()), Sequential(Reduces(), Scale())):
        y = sequential(torch.randn(4, 3, requires_grad=True))
        message = (
            rf"\(Reduces\): fuser_backward returned dx of shape {re.escape(str(tuple(dx.shape)))}, but x has \(4, 3\)"
        )
        with pytest.raises(RuntimeError, match=message):
            y.sum().backward()
        assert all(parameter.grad is None for parameter in sequential.parameters())


def test_a_gradient_of_another_shape_than_x_is_an_error_in_each_shape_that_was_compiled() -> None:
    class OfTheFirstRow(Spy):
        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy[:1], {}, {}

    compiled = torch.compile(Sequential(Square(), OfTheFirstRow()), backend="aot_eager", dynamic=True)
    for rows in (4, 7):
        y = compiled(torch.randn(rows, 3, requires_grad=True))
        message = rf"1 \(OfTheFirstRow\): fuser_backward returned dx of shape \(1, 3\), but x has \({rows}, 3\)"
        with pytest.raises(RuntimeError, match=message):
            y.sum().backward()


def test_no_dx_where_one_is_needed_is_an_error() -> None:
    """All that is before the operation would get no gradient."""

    class Forgets(Spy):
        extra_outputs = {"copy": Tensor}

        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x, {"copy": x.clone()}

        def fuser_backward(self, ctx: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return None, {}, {}

    class Pair(FusedOperation):
        pattern = (Square, Square)

        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x, {}

        def fuser_backward(self, ctxs: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return None, ({}, {}), {}

    x = torch.randn(4, 3)
    for named, sequential in (
        ("1 (Forgets)", Sequential(Scale(), Forgets(), Scale())),
        ("1 (Pair)", Sequential(Scale(), Square(), Square(), fusions=(Pair,))),
    ):
        y = sequential(x)
        with pytest.raises(RuntimeError, match=rf"In operation {re.escape(named)}: .* None as dx, but x needs"):
            y.sum().backward()
        assert all(parameter.grad is None for parameter in sequential.parameters())
    behind = Sequential(Forgets(), Scale())
    behind(x).sum().backward()  # where x needs none, it may be None
    assert behind[1].scale.grad is not None
    _, extra = Sequential(Scale(), Forgets())(x, outputs=("copy",))
    extra["copy"].sum().backward()  # and where dy is


@pytest.mark.parametrize("dtype", [torch.int32, torch.bool, torch.complex64])
def test_a_gradient_that_is_not_of_floating_point_is_an_error(dtype: torch.dtype) -> None:
    """Cast to that of its tensor it would be cut off."""

    class Counts(Scale):
        extra_inputs = {"other": Tensor}

        def __init__(self, of: str) -> None:
            super().__init__()
            self.of = of

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            given = {of: torch.ones_like(t, dtype=dtype) for of, t in {"x": dy, "scale": self.scale}.items()}
            given["other"] = given["x"]
            named = {self.of: given[self.of]}
            return (
                given["x"] if self.of == "x" else dy,
                named if self.of == "scale" else {},
                named if self.of == "other" else {},
            )

    for of in ("x", "scale", "other"):
        x, other = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
        y = Sequential(Scale(), Counts(of))(x, other=other)
        with pytest.raises(TypeError, match=rf"In operation 1 \(Counts\): fuser_backward returned .* in {dtype}"):
            y.sum().backward()


@pytest.mark.parametrize("gradient", [torch.ones(4, 3), torch.ones(1), torch.tensor(1.0)])
def test_a_gradient_of_another_shape_than_its_parameter_is_an_error(gradient: Tensor) -> None:
    class Offset(Spy):
        def __init__(self) -> None:
            super().__init__()
            self.offset = nn.Parameter(torch.zeros(3))

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy, {"offset": gradient}, {}

    sequential = Sequential(Scale(), Offset())
    shape = re.escape(str(tuple(gradient.shape)))
    message = rf"In operation 1 \(Offset\): fuser_backward .* of shape {shape} .*'offset', which has \(3,\)"
    with pytest.raises(RuntimeError, match=message):
        sequential(torch.randn(4, 3)).sum().backward()
    assert all(parameter.grad is None for parameter in sequential.parameters())


def test_what_is_no_tensor_is_named_where_it_is_returned() -> None:
    class Nothing(Spy):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return None, {}

    class Number(Spy):
        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return 1.0, {}, {}

    with pytest.raises(TypeError, match=r"In operation 0 \(Nothing\): fuser_forward returned a NoneType as y"):
        Sequential(Nothing(), Scale())(torch.ones(2))
    y = Sequential(Scale(), Number())(torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match=r"In operation 1 \(Number\): fuser_backward returned a float as dx"):
        y.sum().backward()


@pytest.mark.parametrize("gradient", [torch.ones(3), torch.ones(2, 4, 3), torch.tensor(1.0), 1.0])
def test_a_gradient_of_another_shape_than_its_extra_input_is_an_error(gradient: Any) -> None:
    """It would be broadcast where the pipeline adds it, or summed by autograd."""

    class Adds(Spy):
        extra_inputs = {"other": Tensor}

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy, {}, {"other": gradient}

    x, other = (torch.randn(4, 3, requires_grad=True) for _ in range(2))
    inside = Sequential(ops.MakeExtraOutput("other"), Scale(), Adds())(x)
    error, what = (
        (RuntimeError, rf"of shape {re.escape(str(tuple(gradient.shape)))} for the extra input 'other', which has")
        if isinstance(gradient, Tensor)
        else (TypeError, "a float as the gradient of the extra input 'other'")
    )
    for y in (inside, Adds()(x, other=other)):
        with pytest.raises(error, match=rf"\(Adds\): fuser_backward returned .*{what}"):
            y.sum().backward()
    assert x.grad is other.grad is None


@pytest.mark.parametrize(
    "returned",
    [
        pytest.param((None, {}), id="no mapping of parameters"),
        pytest.param(({}, None), id="no mapping of extra inputs"),
        pytest.param(({"scale": 1.0}, {}), id="a number"),
    ],
)
def test_gradients_that_are_no_mapping_of_tensors_are_errors(returned: tuple[Any, Any]) -> None:
    class Returns(Scale):
        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy, *returned

    y = Sequential(Returns())(torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match=r"In operation 0 \(Returns\): fuser_backward returned a .*\. Return a "):
        y.sum().backward()


@pytest.mark.parametrize("d_params", [{}, ({},), ({},) * 3, None])
def test_a_fusion_returns_gradients_for_each_of_its_operations(d_params: Any) -> None:
    class Pair(FusedOperation):
        pattern = (ops.Identity, ops.Identity)

        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x, {}

        def fuser_backward(self, ctxs: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy, d_params, {}

    y = Sequential(ops.Identity(), ops.Identity(), fusions=(Pair,))(torch.ones(2, requires_grad=True))
    with pytest.raises(TypeError, match=r"In operation 0 \(Pair\): .* sequence of 2 mappings by name, one for each"):
        y.sum().backward()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64])
def test_y_of_another_dtype_than_that_of_the_context_is_an_error(dtype: torch.dtype) -> None:
    class Rounds(Spy):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x.to(dtype), {}

    for sequential in (Sequential(Scale(), Rounds()), Sequential(Rounds(), Scale())):
        with pytest.raises(TypeError, match=rf"\(Rounds\): fuser_forward returned y in {dtype}, but .* torch.float32"):
            sequential(torch.ones(2))


def test_what_is_sparse_is_named_where_it_is_returned() -> None:
    """Torch's "Cannot access storage of SparseTensorImpl" names neither the operation nor what it returned."""

    class Sparse(Scale):
        def __init__(self, of: str) -> None:
            super().__init__()
            self.of = of

        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x.to_sparse() if self.of == "y" else x * 1, {}

        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            d_scale = torch.ones_like(self.scale)
            if self.of == "dx":
                return dy.to_sparse(), {"scale": d_scale}, {}
            return dy, {"scale": d_scale.to_sparse()}, {}

    for of, what in (("y", "y"), ("dx", "dx"), ("scale", "a gradient")):
        with pytest.raises(
            TypeError, match=rf"In operation 1 \(Sparse\): .* returned {what} in the layout .*sparse_coo"
        ):
            Sequential(Scale(), Sparse(of), Scale())(torch.ones(2, 3)).sum().backward()


def test_an_extra_output_of_floating_point_that_is_declared_as_indices_is_an_error() -> None:
    """It would have no gradient."""

    class Counts(Tap):
        extra_outputs = {"tapped": ops.IndexTensor}

    with pytest.raises(
        TypeError, match=r"In operation 0 \(Counts\): .* 'tapped' in torch.float32, but it is declared an"
    ):
        Sequential(Counts())(torch.ones(2))


@pytest.mark.parametrize("kind", [float, dict, object, Annotated[Tensor, "tapped"]])
def test_a_tensor_in_place_of_what_is_declared_is_an_error(kind: type) -> None:
    """It would have no gradient."""

    class Takes(Tap):
        extra_inputs = {"factor": kind}

    with pytest.raises(
        TypeError, match=r"In operation 0 \(Takes\): The extra input 'factor' is a tensor, but it is decl"
    ):
        Sequential(Takes())(torch.ones(2), factor=torch.ones(2))
    assert torch.equal(Sequential(Takes())(torch.ones(2), factor=3), torch.ones(2))

    class Contains(Tap):
        extra_outputs = {"tapped": kind}

    with pytest.raises(
        TypeError, match=r"returned a Tensor as the extra output 'tapped', which is declared .* Declare"
    ):
        Sequential(Contains())(torch.ones(2))


def test_split_sizes_may_be_returned_as_a_tensor() -> None:
    class Divides(Tap):
        extra_outputs = {"split_sizes": Splits}

        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x, {"split_sizes": torch.tensor([2, 3])}

    linear, x = ops.GroupedLinear(2, 4, 4), torch.randn(5, 4)
    y, sizes = Sequential(Divides(), linear)(x, outputs=("split_sizes",))
    assert torch.equal(y, linear(x, split_sizes=[2, 3])) and sizes["split_sizes"].tolist() == [2, 3]


@pytest.mark.parametrize("outputs", [None, [torch.ones(2)], {"tapped": None}, {"tapped": 1.0}, {"tapped": [1.0]}])
def test_extra_outputs_that_are_no_mapping_of_tensors_are_errors(outputs: Any) -> None:
    class Returns(Tap):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x, outputs

    with pytest.raises(TypeError, match=r"In operation 0 \(Returns\): fuser_forward returned a .* extra output"):
        Sequential(Returns())(torch.ones(2), outputs=("tapped",))


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_call_that_failed_leaves_nothing_changed(where: str) -> None:
    failing = Failing(ValueError("wrong by design"), where)
    sequential = Sequential(ops.Linear(3, 3), failing, Scale())
    x = torch.randn(4, 3)
    state = {name: (tensor.clone(), tensor._version) for name, tensor in sequential.state_dict().items()}
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(ValueError, match="wrong by design"):
        sequential(x.requires_grad_()).sum().backward()
    assert not torch.is_autocast_enabled("cpu") and torch.is_grad_enabled()
    for name, tensor in sequential.state_dict().items():
        assert torch.equal(tensor, state[name][0]) and tensor._version == state[name][1]
    sequential.zero_grad()
    failing.where = "nowhere"
    assert_same(gradients(sequential, x), gradients(Sequential(sequential[0], sequential[2]), x))


# No leaks


def live() -> tuple[int, int]:
    gc.collect()
    objects = gc.get_objects()
    return sum(issubclass(type(o), Tensor) for o in objects), len(objects)


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("recipe", [None, "mxfp8"])
@pytest.mark.slow
def test_two_hundred_steps_leave_no_tensors_or_objects_behind(retain: bool, recipe: str | None) -> None:
    sequential = Sequential(
        ops.Linear(32, 32), ops.MakeExtraOutput("tapped"), nn.Tanh(), Multiply().rename_extras(other="tapped"), Scale(),
    )  # fmt: skip
    optimizer = torch.optim.SGD(sequential.parameters(), lr=1e-3)

    def step(rows: int) -> None:
        optimizer.zero_grad()
        with autocast(recipe):
            y, made = sequential(torch.randn(rows, 32), outputs=("tapped",))
        (y.sum() + made["tapped"].sum()).backward(retain_graph=retain)
        with torch.no_grad():
            sequential(torch.randn(rows, 32))
        optimizer.step()

    for rows in range(5):
        step(rows)
    tensors, objects = live()
    for count in range(200):
        step(count % 5)
    tensors_after, objects_after = live()
    assert tensors_after <= tensors
    assert objects_after <= objects + 20


def test_a_dropped_graph_frees_everything_without_the_garbage_collector() -> None:
    freed: list[int] = []

    class Keeps(Square):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            kept = x + 0
            weakref.finalize(kept, freed.append, 1)
            return super().fuser_forward(ctx, kept, extras)

    sequential = Sequential(Keeps(), Scale())
    gc.collect()
    gc.disable()
    try:
        y = sequential(torch.ones(2, requires_grad=True))
        assert freed == []
        del y
        assert freed == [1]
    finally:
        gc.enable()


# In-place modules behind a pipeline


@pytest.mark.parametrize("shape", [(4, 3), (2, 2, 3)], ids=str)
def test_an_inplace_module_may_follow_a_pipeline(shape: tuple[int, ...]) -> None:
    linear = ops.Linear(3, 3)
    x = torch.randn(shape)
    assert_same(gradients(Sequential(linear, nn.ReLU(inplace=True)), x), gradients(Sequential(linear, nn.ReLU()), x))


def test_an_inplace_change_of_y_that_would_reach_an_extra_output_is_refused() -> None:
    sequential = Sequential(
        Scale(), ops.MakeExtraOutput("residual"), nn.ReLU(inplace=True), ops.AddExtraInput("residual")
    )
    with pytest.raises(RuntimeError, match="modified inplace"):
        sequential(torch.randn(4, requires_grad=True))


# What an operation may own and return


class Inner(BasicOperation):
    """y = x + sum of all weights, which belong to submodules."""

    def __init__(self, **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            self.add_module(name, module)

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        return sum((ctx.param(name).sum() for name in self.parameter_names()), x + 0), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return dy, {name: dy.sum().expand(2, 2) for name in self.parameter_names()}, {}


def test_a_submodule_held_twice_gets_both_gradients() -> None:
    shared = nn.Linear(2, 2, bias=False)
    Sequential(Inner(a=shared, b=shared))(torch.ones(3)).sum().backward()
    assert torch.equal(shared.weight.grad, torch.full((2, 2), 6.0))


@pytest.mark.parametrize("name", ["a", "b"], ids=["replaced", "added"])
def test_a_submodule_replaced_or_added_after_a_call_gets_its_gradient(name: str) -> None:
    sequential = Sequential(Inner(a=nn.Linear(2, 2, bias=False)))
    sequential(torch.ones(3)).sum().backward()
    late = nn.Linear(2, 2, bias=False)
    setattr(sequential[0], name, late)
    sequential(torch.ones(3)).sum().backward()
    assert late.weight.grad is not None and torch.equal(late.weight.grad, torch.full((2, 2), 3.0))


@pytest.mark.parametrize("kind", ["parameter", "extra input"])
def test_a_gradient_by_an_unknown_name_is_an_error(kind: str) -> None:
    class Misspells(Multiply):
        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return dy, {"wieght": dy.sum()} if kind == "parameter" else {}, {"ohter": dy} if kind != "parameter" else {}

    other = torch.ones(2, requires_grad=True)
    with pytest.raises(RuntimeError, match=r"operation 0 \(Misspells\).*(wieght|ohter)"):
        Sequential(Misspells())(torch.ones(2, requires_grad=True), other=other).sum().backward()


def test_a_forward_that_returns_y_alone_is_an_error() -> None:
    class Forgets(Spy):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return x + 0

    with pytest.raises(TypeError, match=r"operation 0 \(Forgets\)"):
        Sequential(Forgets())(torch.ones(2))  # two numbers could be taken apart silently


@pytest.mark.parametrize("saved", [lambda x: [x], lambda x: x, lambda x: {"x": x}], ids=["list", "tensor", "dict"])
def test_a_saved_that_is_no_named_tuple_is_refused(saved: Any) -> None:
    class Keeps(Spy):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            ctx.saved = saved(x)
            return x + 0, {}

    with pytest.raises(TypeError, match="NamedTuple"):
        Sequential(Keeps())(torch.ones(2, requires_grad=True))


@pytest.mark.parametrize("happens", ["data", "half"])
def test_a_parameter_given_other_data_before_backward_is_an_error(happens: str) -> None:
    operation = ops.Linear(4, 4, bias=False)
    y = operation(torch.randn(2, 4, requires_grad=True))
    if happens == "data":
        operation.weight.data = torch.zeros(4, 4)
    else:
        operation.half()
    with pytest.raises(RuntimeError, match="Parameter 'weight' got other data"):
        y.sum().backward()


def test_a_tensor_may_stand_in_for_a_parameter() -> None:
    operation = ops.Linear(4, 4, bias=False)
    x, w = torch.randn(2, 4), torch.randn(4, 4)
    with torch.no_grad():
        y = torch.func.functional_call(operation, {"weight": w}, (x,))
    torch.testing.assert_close(y, x @ w.T)
