"""Sequential: the list protocol, stages, extra tensors by name, hooks, and the text of explain()."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fuser import BasicOperation, FusedOperation, Sequential, ops
from ops.runner.run import Pipeline


class Scale(BasicOperation):
    """y = s x, with a learnable 0-dim s."""

    class Saved(NamedTuple):
        x: Tensor

    def __init__(self, value: float = 2.0, device: Any = None) -> None:
        super().__init__()
        self.value = value
        self.scale = nn.Parameter(torch.empty((), device=device))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, self.value)

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctx.needs_grad:
            ctx.saved = self.Saved(x)
        return x * ctx.param("scale"), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return dy * ctx.param("scale"), {"scale": (dy * ctx.saved.x).sum()}, {}


class Shift(BasicOperation):
    """y = x + b, with a 0-dim b that may be None."""

    def __init__(self, value: float | None = 1.0) -> None:
        super().__init__()
        self.register_parameter("shift", None if value is None else nn.Parameter(torch.tensor(value)))

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        return (x.clone() if self.shift is None else x + ctx.param("shift")), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return dy, {"shift": dy.sum()} if "shift" in ctx.needs.params else {}, {}


class Tap(BasicOperation):
    """y = x, and x once more as the extra output `tapped`."""

    extra_outputs = {"tapped": Tensor}

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        return x, {"tapped": x}

    def fuser_backward(self, ctx: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
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
        return dy * ctx.saved.other, {}, {"other": dy * ctx.saved.x}


def stages(sequential: Sequential) -> list[Any]:
    """The number of operations of each pipeline, and the class names of what is called by itself."""
    runners = [stage.runner for stage in sequential.layout().stages]
    return [len(r.operations) if isinstance(r, Pipeline) else type(r).__name__ for r in runners]


def modules(count: int) -> list[BasicOperation]:
    return [Scale(float(value)) for value in range(count)]


# The list protocol: every claim holds for torch.nn.Sequential too


@pytest.fixture(params=[Sequential, nn.Sequential], ids=["ours", "torch"])
def kind(request: pytest.FixtureRequest) -> Any:
    return request.param


def keys(sequential: Any) -> list[str]:
    return [name for name, _ in sequential.named_children()]


def test_len_and_iteration_give_the_modules_in_order(kind: Any) -> None:
    members = modules(3)
    sequential = kind(*members)
    assert len(sequential) == 3
    assert list(sequential) == members
    assert len(kind()) == 0


@pytest.mark.parametrize("index", [0, 1, 2, -1, -2, -3])
def test_an_index_counts_from_either_end(kind: Any, index: int) -> None:
    members = modules(3)
    assert kind(*members)[index] is members[index]


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_out_of_range_raises_index_error(kind: Any, index: int) -> None:
    sequential = kind(*modules(3))
    with pytest.raises(IndexError, match="is out of range"):
        sequential[index]
    with pytest.raises(IndexError, match="is out of range"):
        sequential[index] = Scale()
    with pytest.raises(IndexError, match="is out of range"):
        del sequential[index]
    assert len(sequential) == 3


@pytest.mark.parametrize("part", [slice(1, 3), slice(None, -1), slice(None, None, 2), slice(3, 1)], ids=str)
def test_a_slice_shares_the_modules_and_keeps_their_names(kind: Any, part: slice) -> None:
    members = modules(4)
    sliced = kind(*members)[part]
    assert type(sliced) is kind
    assert list(sliced) == members[part]
    assert keys(sliced) == ["0", "1", "2", "3"][part]


def test_setting_an_index_replaces_the_module_under_its_name(kind: Any) -> None:
    sequential, new = kind(*modules(3)), Scale()
    sequential[-1] = new
    assert sequential[2] is new
    assert keys(sequential) == ["0", "1", "2"]


@pytest.mark.parametrize("index", [0, -1, slice(0, 2), slice(None, None, 2)], ids=str)
def test_deleting_renumbers_the_rest(kind: Any, index: Any) -> None:
    members = modules(4)
    sequential = kind(*members)
    del sequential[index]
    del members[index]
    assert list(sequential) == members
    assert keys(sequential) == [str(position) for position in range(len(members))]


@pytest.mark.parametrize("index", [0, 1, 3, -1, -3])
def test_insert_puts_the_module_before_the_index(kind: Any, index: int) -> None:
    members, new = modules(3), Scale()
    sequential = kind(*members)
    assert sequential.insert(index, new) is sequential
    members.insert(index, new)
    assert list(sequential) == members
    assert keys(sequential) == ["0", "1", "2", "3"]


@pytest.mark.parametrize("index", [4, -4])
def test_insert_out_of_range_raises_index_error(kind: Any, index: int) -> None:
    sequential = kind(*modules(3))
    with pytest.raises(IndexError, match="out of range"):
        sequential.insert(index, Scale())
    assert len(sequential) == 3


def test_append_and_extend_add_at_the_end_and_return_the_sequential(kind: Any) -> None:
    members = modules(4)
    sequential = kind(members[0])
    assert sequential.append(members[1]) is sequential
    assert sequential.extend(members[2:]) is sequential
    assert list(sequential) == members
    assert keys(sequential) == ["0", "1", "2", "3"]


def test_extending_by_itself_ends() -> None:
    sequential = Sequential(*modules(2))
    assert len(sequential.extend(sequential)) == 4


def test_pop_returns_the_module_and_takes_it_out(kind: Any) -> None:
    members = modules(3)
    sequential = kind(*members)
    assert sequential.pop(1) is members[1]
    assert sequential.pop(-1) is members[2]
    assert list(sequential) == [members[0]]
    assert keys(sequential) == ["0"]


def test_pop_without_an_index_takes_the_last() -> None:
    members = modules(3)
    sequential = Sequential(*members)
    assert sequential.pop() is members[2]
    assert list(sequential) == members[:2]


def test_plus_makes_a_new_sequential_of_both(kind: Any) -> None:
    first, second = modules(2), modules(3)
    left, right = kind(*first), kind(*second)
    total = left + right
    assert type(total) is kind
    assert list(total) == first + second
    assert keys(total) == ["0", "1", "2", "3", "4"]
    assert len(left) == 2 and len(right) == 3


def test_plus_equals_extends_in_place(kind: Any) -> None:
    first, second = modules(2), modules(1)
    sequential = same = kind(*first)
    sequential += kind(*second)
    assert sequential is same
    assert list(sequential) == first + second


def test_a_dict_names_the_modules(kind: Any) -> None:
    sequential = kind({"first": Scale(3.0), "second": Shift(1.0)}) if kind is Sequential else None
    if sequential is None:
        sequential = kind(OrderedDict(first=Scale(3.0), second=Shift(1.0)))
    assert keys(sequential) == ["first", "second"]
    assert list(sequential.state_dict()) == ["first.scale", "second.shift"]
    assert sequential.first is sequential[0]


def test_named_modules_keep_their_names_when_others_come_and_go() -> None:
    sequential = Sequential({"first": Scale(), "second": Shift()})
    sequential.append(Scale())
    assert keys(sequential) == ["first", "second", "2"]
    sequential.insert(1, Scale())
    assert keys(sequential) == ["first", "1", "second", "3"]
    del sequential[0]
    assert keys(sequential) == ["0", "second", "2"]


def test_state_dict_keys_are_those_of_torch(kind: Any) -> None:
    sequential = kind(Scale(), kind(Shift(), nn.Linear(2, 2)))
    assert list(sequential.state_dict()) == ["0.scale", "1.0.shift", "1.1.weight", "1.1.bias"]


def test_a_state_dict_of_torch_loads() -> None:
    ours = Sequential(ops.Linear(3, 2), nn.ReLU(), ops.Linear(2, 2))
    theirs = nn.Sequential(nn.Linear(3, 2), nn.ReLU(), nn.Linear(2, 2))
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(5, 3)
    torch.testing.assert_close(ours(x), theirs(x))


def test_a_function_is_refused_with_the_module_that_wraps_it() -> None:
    with pytest.raises(TypeError, match=r"is a builtin_function_or_method, .* Wrap it: ops.Torch\(relu\)"):
        Sequential(torch.relu)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [nn.ReLU, ops.GELU])
def test_a_class_is_refused_with_the_instance_that_is_needed(kind: Any) -> None:
    with pytest.raises(TypeError, match=rf"is a class, not a torch\.nn\.Module\. Give .*: {kind.__name__}\(\.\.\.\)"):
        Sequential(kind)
    with pytest.raises(TypeError, match=r"is a class, not a torch\.nn\.Module\.$"):
        Sequential(int)  # type: ignore[arg-type]


@pytest.mark.parametrize("given", [modules(2), tuple(modules(2)), iter(modules(2))], ids=["list", "tuple", "iterator"])
def test_modules_that_are_not_unpacked_are_refused_with_the_mend(given: Any) -> None:
    with pytest.raises(TypeError, match=r"not a torch.nn.Module. Unpack it: Sequential\(\*modules\)"):
        Sequential(given)


def test_a_module_that_is_set_to_none_is_named_with_the_mend() -> None:
    sequential = Sequential(*modules(3))
    x = torch.ones(4)
    sequential(x)
    setattr(sequential, "1", None)
    with pytest.raises(TypeError, match=r"The module '1' of a Sequential is None. Assign ops.Identity\(\)"):
        sequential(x)
    sequential.pop(1)
    assert len(sequential) == 2
    sequential(x)
    outer = Sequential(Sequential(*modules(2)), *modules(1))
    setattr(outer[0], "0", None)
    with pytest.raises(TypeError, match=r"The module '0' of a Sequential is None"):
        outer(x)


@pytest.mark.parametrize("index", [slice(0, 2), "1", 1.0])
def test_an_index_to_set_is_an_integer(index: Any) -> None:
    with pytest.raises(TypeError, match="index is .*, but must be an integer"):
        Sequential(*modules(3))[index] = Scale()


@pytest.mark.parametrize("add", ["append", "insert", "set", "extend", "construct"])
def test_what_is_not_a_module_is_refused_and_nothing_changes(add: str) -> None:
    members = modules(2)
    sequential = Sequential(*members)
    with pytest.raises(TypeError, match="is a int, not a torch.nn.Module"):
        if add == "append":
            sequential.append(5)  # type: ignore[arg-type]
        elif add == "insert":
            sequential.insert(0, 5)  # type: ignore[arg-type]
        elif add == "set":
            sequential[0] = 5  # type: ignore[assignment]
        elif add == "extend":
            sequential.extend([5])  # type: ignore[list-item]
        else:
            Sequential(5)  # type: ignore[arg-type]
    assert list(sequential) == members


def test_slices_and_sums_keep_the_settings_and_the_mode() -> None:
    sequential = Sequential(*modules(3), fusions=(), path="split").eval()
    for other in (sequential[1:], sequential + [Scale()]):
        assert other.path == "split"
        assert other.planner.fusions == ()
        assert not other.training


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="path='fast' does not exist. Give 'grouped', 'split', or None"):
        Sequential(path="fast")


def test_an_empty_sequential_returns_x() -> None:
    x = torch.randn(2)
    assert Sequential()(x) is x


def test_what_is_not_a_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="x is a list. Give a tensor"):
        Sequential(Scale())([1.0])


# Stages


def test_neighbouring_operations_form_one_stage_and_ordinary_modules_split_them() -> None:
    o, m = Scale, nn.Identity
    sequential = Sequential(o(), o(), m(), m(), o(), m(), o(), o(), o())
    assert stages(sequential) == [2, "Identity", "Identity", 1, "Identity", 3]


def test_values_and_gradients_pass_through_ordinary_modules() -> None:
    sequential = Sequential(Scale(2.0), nn.Tanh(), Scale(3.0))
    x = torch.randn(4, requires_grad=True)
    y = sequential(x)
    torch.testing.assert_close(y, 3 * torch.tanh(2 * x))
    y.sum().backward()
    expected = 6 / torch.cosh(2 * x.detach()) ** 2
    torch.testing.assert_close(x.grad, expected)
    torch.testing.assert_close(sequential[0].scale.grad, (expected / 2 * x.detach()).sum())


def grow(s: Sequential) -> None:
    s.append(Scale(5.0))


def shrink(s: Sequential) -> None:
    s.pop()


def replace(s: Sequential) -> None:
    s[0] = Scale(7.0)


def put_module_in_between(s: Sequential) -> None:
    s.insert(1, nn.Tanh())


def set_by_attribute(s: Sequential) -> None:
    setattr(s, "0", Scale(11.0))


def replace_parameter(s: Sequential) -> None:
    s[0].scale = nn.Parameter(torch.tensor(13.0))


def replace_parameter_by_another_dtype(s: Sequential) -> None:
    s[0].scale = nn.Parameter(torch.tensor(13.0, dtype=torch.float64))


def remove_parameter(s: Sequential) -> None:
    s[1].shift = None


def add_a_parameter_where_none_was(s: Sequential) -> None:
    s[2].shift = nn.Parameter(torch.tensor(17.0))


def change_the_nested(s: Sequential) -> None:
    s[3].append(Scale(19.0))


def swap(s: Sequential) -> None:
    s[0], s[1] = s[1], s[0]


@pytest.mark.parametrize(
    "change",
    [
        grow, shrink, replace, put_module_in_between, set_by_attribute, replace_parameter,
        replace_parameter_by_another_dtype, remove_parameter, add_a_parameter_where_none_was, change_the_nested, swap,
    ],
    ids=lambda change: change.__name__,
)  # fmt: skip
def test_any_change_after_a_call_is_seen_by_the_next(change: Any) -> None:
    def build() -> Sequential:
        return Sequential(Scale(2.0), Shift(1.0), Shift(None), Sequential(Scale(3.0)))

    changed, fresh = build(), build()
    x = torch.randn(3, requires_grad=True)
    changed(x).sum().backward()
    changed.zero_grad()
    change(changed)
    change(fresh)
    for sequential in (changed, fresh):
        x.grad = None
        y = sequential(x)
        y.sum().backward()
        results = [y, x.grad, *[p.grad for p in sequential.parameters()]]
        if sequential is changed:
            expected = results
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)
    assert stages(changed) == stages(fresh)


def test_a_meta_sequential_runs_once_it_is_materialised() -> None:
    sequential = Sequential(Scale(3.0, device="meta"), ops.Linear(4, 4, device="meta"))
    with pytest.raises(RuntimeError, match=r"Scale.scale is on the meta device, but x is on cpu. Materialise it first"):
        sequential(torch.ones(2, 4))
    sequential.to_empty(device="cpu")
    for module in sequential:
        module.reset_parameters()
    y = sequential(torch.ones(2, 4))
    torch.testing.assert_close(y, 3 * sequential[1].weight.sum(1).expand(2, 4) + sequential[1].bias)
    y.sum().backward()
    assert all(p.grad is not None for p in sequential.parameters())


def test_a_call_on_meta_tensors_gives_the_shape() -> None:
    sequential = Sequential(Scale(device="meta"), ops.Linear(4, 3, device="meta"))
    y = sequential(torch.empty(5, 4, device="meta"))
    assert y.is_meta and y.shape == (5, 3)


def test_a_setting_changed_after_a_call_holds_for_the_next() -> None:
    sequential = Sequential(Scale())
    sequential(torch.ones(2))
    sequential.path = "split"
    assert "path: split, as asked for" in sequential.explain()


# Nested Sequentials


def test_a_nested_sequential_is_flattened() -> None:
    sequential = Sequential(Scale(2.0), Sequential(Shift(1.0), Sequential(Scale(3.0))), Shift(1.0))
    assert stages(sequential) == [4]
    assert torch.equal(sequential(torch.ones(2)), torch.full((2,), 10.0))


@pytest.mark.parametrize("settings", [{"path": "split"}, {"fusions": ()}], ids=lambda s: next(iter(s)))
def test_a_nested_sequential_with_settings_of_its_own_is_called(settings: dict[str, Any]) -> None:
    sequential = Sequential(Scale(2.0), Sequential(Shift(1.0), **settings), Scale(3.0))
    assert stages(sequential) == [1, "Sequential", 1]
    assert "stage 1: 1  Sequential, called by itself because its settings differ" in sequential.explain()
    assert torch.equal(sequential(torch.ones(2)), torch.full((2,), 9.0))


def test_a_nested_sequential_with_the_same_settings_is_flattened() -> None:
    settings: dict[str, Any] = {"path": "split", "fusions": ()}
    assert stages(Sequential(Scale(), Sequential(Scale(), **settings), Sequential(Scale()), **settings)) == [3]


def test_a_subclass_with_a_forward_of_its_own_is_called() -> None:
    class Twice(Sequential):
        def forward(self, x: Tensor, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().forward(super().forward(x))

    sequential = Sequential(Scale(2.0), Twice(Scale(3.0)))
    assert stages(sequential) == [1, "Twice"]
    assert sequential(torch.ones(())) == 18


def test_a_torch_sequential_inside_is_an_ordinary_module() -> None:
    assert stages(Sequential(Scale(), nn.Sequential(Scale(), Scale()), Scale())) == [1, "Sequential", 1]


def test_extra_tensors_pass_into_and_out_of_a_nested_sequential_with_settings() -> None:
    inner = Sequential(
        Tap().rename_extras(tapped="inner"),
        Multiply().rename_extras(other="outer"),
        fusions=(),
        exports=("inner",),
    )
    sequential = Sequential(
        Tap().rename_extras(tapped="outer"), Scale(2.0), inner, Multiply().rename_extras(other="inner")
    )
    assert stages(sequential) == [2, "Sequential", 1]
    x = torch.randn(3, requires_grad=True)
    y, made = sequential(x, outputs=("inner",))
    torch.testing.assert_close(y, 4 * x**3)
    torch.testing.assert_close(made["inner"], 2 * x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 12 * x.detach() ** 2)


def test_one_operation_may_stand_in_two_places_and_two_sequentials() -> None:
    shared = Scale(3.0)
    first, second = Sequential(shared, Shift(1.0), shared), Sequential(shared)
    x = torch.ones((), requires_grad=True)
    (first(x) + second(x)).backward()
    assert shared.scale.grad == (2 * 3 + 1) + 1
    assert x.grad == 9 + 3


# Extra tensors by name


def test_one_extra_input_reaches_every_operation_that_asks_for_its_name() -> None:
    sequential = Sequential(Multiply(), Scale(2.0), Multiply())
    assert sequential.layout().consumed == ("other",)
    x, other = torch.randn(3, requires_grad=True), torch.randn(3, requires_grad=True)
    y = sequential(x, other=other)
    torch.testing.assert_close(y, 2 * x * other**2)
    y.sum().backward()
    torch.testing.assert_close(other.grad, (4 * x * other).detach())


def test_an_extra_output_feeds_a_later_operation() -> None:
    sequential = Sequential(Tap().rename_extras(tapped="other"), Scale(2.0), Multiply())
    assert stages(sequential) == [3]
    assert sequential.layout().consumed == ()
    x = torch.randn(3, requires_grad=True)
    y = sequential(x)
    torch.testing.assert_close(y, 2 * x**2)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 4 * x.detach())


def test_an_extra_output_passes_an_ordinary_module() -> None:
    sequential = Sequential(Tap().rename_extras(tapped="other"), nn.Tanh(), Scale(2.0), Multiply())
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    sequential.double()
    y = sequential(x)
    torch.testing.assert_close(y, 2 * x * torch.tanh(x))
    (expected,) = torch.autograd.grad((2 * x * torch.tanh(x)).sum(), x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, expected)


def test_outputs_are_returned_by_name() -> None:
    sequential = Sequential(Tap().rename_extras(tapped="a"), Scale(2.0), Tap().rename_extras(tapped="b"), Scale(3.0))
    x = torch.randn(3)
    y, made = sequential(x, outputs=("b", "a"))
    assert list(made) == ["b", "a"]
    assert torch.equal(made["a"], x)
    assert torch.equal(made["b"], 2 * x)
    assert torch.equal(y, sequential(x))


def test_an_output_named_twice_is_returned_once() -> None:
    sequential = Sequential(Tap(), Scale(2.0))
    x = torch.randn(3, requires_grad=True)
    _, made = sequential(x, outputs=("tapped", "tapped"))
    assert list(made) == ["tapped"]


@pytest.mark.parametrize("grad", [True, False])
def test_an_output_of_every_stage_can_be_returned_at_once(grad: bool) -> None:
    sequential = Sequential(
        Tap().rename_extras(tapped="a"), nn.Tanh(), Tap().rename_extras(tapped="b"), Multiply().rename_extras(other="a")
    )
    x = torch.randn(3, requires_grad=grad)
    y, made = sequential(x, outputs=("a", "b"))
    assert torch.equal(made["a"], x)
    assert torch.equal(made["b"], torch.tanh(x))
    torch.testing.assert_close(y, x * torch.tanh(x))


def test_renamed_extras_keep_two_blocks_apart() -> None:
    sequential = Sequential(Multiply().rename_extras(other="a"), Multiply().rename_extras(other="b"))
    assert sequential.layout().consumed == ("a", "b")
    a, b = torch.randn(2, 3)
    x = torch.randn(3)
    assert torch.equal(sequential(x, a=a, b=b), x * a * b)


def test_renaming_after_a_call_is_seen_by_the_next() -> None:
    sequential = Sequential(Multiply())
    x = torch.randn(3)
    sequential(x, other=x)
    sequential[0].rename_extras(other="factor")
    assert torch.equal(sequential(x, factor=x), x * x)
    assert torch.equal(sequential[0](x, factor=x), x * x)


def test_renaming_what_is_not_there_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Multiply has no extra tensor 'scale'. It has: 'other'"):
        Multiply().rename_extras(scale="s")
    with pytest.raises(ValueError, match=r"Scale has no extra tensor 'other'. It has: none"):
        Scale().rename_extras(other="s")


def test_a_missing_extra_input_is_an_error_that_lists_what_is_asked_for() -> None:
    sequential = Sequential(Multiply().rename_extras(other="a"), Multiply().rename_extras(other="b"))
    with pytest.raises(ValueError, match=r"missing: 'b'; the operations ask for: 'a', 'b'\."):
        sequential(torch.ones(2), a=torch.ones(2))


def test_an_unknown_extra_input_is_an_error_that_lists_what_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"unknown: 'wrong'; the operations ask for: 'other'\."):
        Sequential(Multiply())(torch.ones(2), other=torch.ones(2), wrong=torch.ones(2))
    with pytest.raises(ValueError, match=r"unknown: 'wrong'; the operations ask for: none\."):
        Sequential(Scale())(torch.ones(2), wrong=torch.ones(2))


def test_a_misspelt_extra_input_is_named_as_missing_and_as_unknown() -> None:
    with pytest.raises(ValueError, match=r"missing: 'other'; unknown: 'ohter'; the operations ask for: 'other'\."):
        Sequential(Multiply())(torch.ones(2), ohter=torch.ones(2))


def test_an_extra_that_an_operation_makes_cannot_be_given() -> None:
    sequential = Sequential(Tap().rename_extras(tapped="other"), Multiply())
    with pytest.raises(ValueError, match=r"unknown: 'other'; the operations ask for: none"):
        sequential(torch.ones(2), other=torch.ones(2))


def test_an_unknown_output_is_an_error_that_lists_what_exists() -> None:
    with pytest.raises(ValueError, match=r"No operation makes the extra output 'wrong'. There are: 'tapped'\."):
        Sequential(Tap())(torch.ones(2), outputs=("wrong",))
    with pytest.raises(ValueError, match=r"No operation makes the extra output 'wrong'. There are: none\."):
        Sequential(Scale())(torch.ones(2), outputs=("wrong",))


@pytest.mark.parametrize("between", [(), (nn.Identity(),)], ids=["one pipeline", "two"])
def test_of_an_extra_output_made_twice_none_is_returned(between: tuple[nn.Module, ...]) -> None:
    sequential = Sequential(Tap(), *between, Tap())
    message = r"2 operations make the extra output 'tapped': operation 0 \(Tap\), operation .*rename_extras.*'tapped'"
    with pytest.raises(ValueError, match=message):
        sequential(torch.ones(2), outputs=("tapped",))


@pytest.mark.parametrize("between", [(), (nn.Identity(),)], ids=["one pipeline", "two"])
def test_an_extra_tensor_asked_for_before_it_is_made_is_refused(between: tuple[nn.Module, ...]) -> None:
    with pytest.raises(ValueError, match=r"'tapped' is asked for before the operation that makes it.*rename_extras"):
        Sequential(Multiply().rename_extras(other="tapped"), *between, Tap())


MISFITS = {
    "linear": lambda: (ops.Linear(8, 16), ops.Linear(8, 4)),
    "bias": lambda: (ops.Linear(8, 16), ops.Identity(), ops.Bias(8)),
    "norm": lambda: (ops.Linear(8, 16), ops.ConstantScale(2.0), ops.RMSNorm(8)),
    "norm of several dimensions": lambda: (ops.Linear(8, 16), ops.LayerNorm((3, 8))),
    "after a gate": lambda: (ops.Linear(8, 16), ops.SwiGLU(), ops.Bias(16)),
    "an odd gate": lambda: (ops.Linear(8, 15), ops.GEGLU()),
    "grouped": lambda: (ops.GroupedLinear(2, 8, 16), ops.ScaledSwiGLU(), ops.GroupedLinear(2, 16, 8)),
    "router": lambda: (ops.Bias(8), ops.Router(16, 4, topk=2)),
    "reshape": lambda: (ops.Reshape((-1, 8)), ops.Bias(4)),
    "nested": lambda: (ops.Linear(8, 16), Sequential(ops.Quantize(), ops.Bias(8))),
}


@pytest.mark.parametrize("make", MISFITS.values(), ids=MISFITS)
def test_features_that_do_not_fit_are_refused_at_construction(make: Any) -> None:
    with pytest.raises(ValueError, match=r"^In operation [\d.]+ \(\w+\): x has \d+ features, but .*\."):
        Sequential(*make())


def test_features_that_are_not_known_at_construction_are_not_refused() -> None:
    Sequential(ops.Linear(8, 16), nn.Linear(16, 8), ops.Bias(8))
    Sequential(ops.Linear(8, 16), Tap(), ops.Bias(8))
    Sequential(ops.Linear(8, 16), ops.Reshape((3, -1)), ops.Bias(8))


def test_a_misfit_made_in_place_is_refused_at_the_call() -> None:
    sequential = Sequential(ops.Linear(8, 16)).append(ops.Bias(8))
    with pytest.raises(ValueError, match="In operation 1 \\(Bias\\): x has 16 features, but 8 are needed"):
        sequential(torch.ones(2, 8))
    sequential[1] = ops.Bias(16)
    assert sequential(torch.ones(2, 8)).shape == (2, 16)


def test_a_refused_call_changes_nothing() -> None:
    sequential = Sequential(Multiply())
    given = {"other": torch.ones(2), "wrong": torch.ones(2)}
    with pytest.raises(ValueError, match="unknown"):
        sequential(torch.ones(2), **given)
    assert list(given) == ["other", "wrong"]
    assert torch.equal(sequential(torch.ones(2), other=torch.ones(2)), torch.ones(2))


def test_a_sequential_repaired_after_a_refusal_runs() -> None:
    sequential = Sequential(Multiply()).append(Tap().rename_extras(tapped="other"))
    with pytest.raises(ValueError, match="'other' is asked for before"):
        sequential(torch.ones(2))
    sequential[1].rename_extras(tapped="second")
    assert torch.equal(sequential(torch.ones(2), other=torch.ones(2)), torch.ones(2))


# Buffers of the caller's


def grouped(buffer_at: int = 0) -> tuple[Sequential, Tensor, list[int]]:
    sequential = Sequential(ops.GroupedLinear(2, 4, 3), ops.GroupedLinear(2, 3, 5))
    return sequential, torch.randn(6, 4), [2, 4]


@pytest.mark.parametrize("index", [1, -1])
def test_the_output_is_written_into_the_callers_buffer(index: int) -> None:
    sequential, x, sizes = grouped()
    expected = sequential(x, split_sizes=sizes)
    buffer = torch.full((6, 5), 7.0)
    y = sequential(x, split_sizes=sizes, buffers={index: {"output": buffer}})
    assert y.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer, expected)
    assert buffer.grad_fn is None and not buffer.requires_grad


def test_the_gradient_is_written_into_the_callers_buffer() -> None:
    sequential, x, sizes = grouped()
    x.requires_grad_()
    (expected,) = torch.autograd.grad(sequential(x, split_sizes=sizes).square().sum(), x)
    buffer = torch.full((6, 4), 7.0)
    y = sequential(x, split_sizes=sizes, buffers={0: {"grad_input": buffer}})
    (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert dx.data_ptr() == buffer.data_ptr()
    assert torch.equal(buffer, expected)


def test_a_buffer_reaches_an_operation_behind_an_ordinary_module() -> None:
    sequential = Sequential(nn.Identity(), ops.GroupedLinear(2, 4, 5))
    buffer = torch.full((6, 5), 7.0)
    y = sequential(torch.randn(6, 4), split_sizes=[2, 4], buffers={1: {"output": buffer}})
    assert y.data_ptr() == buffer.data_ptr()


def test_a_buffer_reaches_an_operation_with_hooks() -> None:
    sequential = Sequential(ops.GroupedLinear(2, 4, 5))
    sequential[0].register_forward_hook(lambda *_: None)
    buffer = torch.full((6, 5), 7.0)
    sequential(torch.randn(6, 4), split_sizes=[2, 4], buffers={0: {"output": buffer}})
    assert not (buffer == 7).any()


def test_a_buffer_that_no_operation_knows_is_refused() -> None:
    sequential, x, sizes = grouped()
    message = r"buffers\[0\] names 'result', but GroupedLinear writes into 'output', 'grad_input'"
    with pytest.raises(ValueError, match=message):
        sequential(x, split_sizes=sizes, buffers={0: {"result": torch.empty(6, 3)}})
    with pytest.raises(ValueError, match=r"buffers\[0\] names 'output', but Scale writes into no buffer of the caller"):
        Sequential(Scale())(x, buffers={0: {"output": torch.empty(6, 4)}})
    with pytest.raises(IndexError, match="Index 2 is out of range"):
        sequential(x, split_sizes=sizes, buffers={2: {"output": torch.empty(6, 3)}})


# Hooks


def test_a_forward_of_an_operations_own_runs_in_a_sequential_too() -> None:
    """Of a subclass, or put on the module, as accelerate does; before or after the first call; then taken off."""

    class Doubled(Scale):
        def forward(self, x: Tensor, **extras: Any) -> Any:
            return super().forward(x, **extras) * 2

    x = torch.ones(2)
    sequential = Sequential(Scale(3.0), Doubled(5.0), Sequential(Scale(7.0)))
    assert torch.equal(sequential(x), torch.full((2,), 210.0))
    assert "1  Doubled, called by itself because it has a forward of its own" in sequential.explain()
    for module in (sequential[0], sequential[2]):
        plain = module.forward
        module.forward = lambda *args, plain=plain, **named: plain(*args, **named) * 2
    assert torch.equal(sequential(x), torch.full((2,), 840.0))
    del sequential[0].forward, sequential[2].forward
    assert torch.equal(sequential(x), torch.full((2,), 210.0))


def test_an_extra_input_that_is_none_is_refused() -> None:
    with pytest.raises(TypeError, match=r"In operation 1 \(ScaledSwiGLU\): The extra input 'scales' is None"):
        Sequential(ops.Identity(), ops.ScaledSwiGLU())(torch.ones(2, 4), scales=None)


def test_hooks_on_an_operation_fire_and_split_the_pipeline() -> None:
    sequential = Sequential(Scale(2.0), Scale(3.0), Scale(5.0))
    x = torch.ones(2, requires_grad=True)
    sequential(x)
    seen: list[Any] = []
    handles = [
        sequential[1].register_forward_pre_hook(lambda m, args: seen.append(("pre", args[0].detach().clone()))),
        sequential[1].register_forward_hook(lambda m, args, y: seen.append(("forward", y.detach().clone()))),
        sequential[1].register_full_backward_hook(lambda m, dx, dy: seen.append(("backward", dx[0], dy[0]))),
    ]
    assert stages(sequential) == [1, "Scale", 1]
    assert "stage 1: 1  Scale, called by itself because it has hooks of its own, or is sharded" in sequential.explain()
    y = sequential(x)
    assert torch.equal(y, torch.full((2,), 30.0))
    y.sum().backward()
    assert [name for name, *_ in seen] == ["pre", "forward", "backward"]
    assert seen[0][1][0] == 2 and seen[1][1][0] == 6
    assert seen[2][1][0] == 15 and seen[2][2][0] == 5
    assert torch.equal(x.grad, torch.full((2,), 30.0))
    for handle in handles:
        handle.remove()
    assert stages(sequential) == [3]


def test_a_forward_hook_may_replace_the_output() -> None:
    sequential = Sequential(Scale(2.0), Scale(3.0))
    sequential[0].register_forward_hook(lambda m, args, y: y + 1)
    assert sequential(torch.ones(())) == 9


def test_hooks_on_a_nested_sequential_fire_and_split_the_pipeline() -> None:
    inner = Sequential(Scale(3.0), Scale(5.0))
    sequential = Sequential(Scale(2.0), inner, Scale(7.0))
    assert stages(sequential) == [4]
    seen: list[float] = []
    handle = inner.register_forward_hook(lambda m, args, y: seen.append(y.item()))
    assert stages(sequential) == [1, "Sequential", 1]
    assert sequential(torch.ones(())) == 210
    assert seen == [30]
    handle.remove()
    assert stages(sequential) == [4]


def test_hooks_deep_inside_nested_sequentials_are_seen() -> None:
    sequential = Sequential(Scale(2.0), Sequential(Sequential(Scale(3.0), Scale(5.0))))
    assert stages(sequential) == [3]
    seen: list[float] = []
    sequential[1][0][1].register_forward_hook(lambda m, args, y: seen.append(y.item()))
    assert stages(sequential) == [2, "Scale"]
    assert sequential(torch.ones(())) == 30
    assert seen == [30]


def test_hooks_on_the_outermost_sequential_fire_and_split_nothing() -> None:
    sequential = Sequential(Scale(2.0), Scale(3.0))
    seen: list[float] = []
    sequential.register_forward_hook(lambda m, args, y: seen.append(y.item()))
    sequential(torch.ones(()))
    assert seen == [6]
    assert stages(sequential) == [2]


def test_fusions_that_are_assigned_are_refused() -> None:
    sequential = Sequential(Scale(2.0), fusions=())
    with pytest.raises(AttributeError, match=r"gets its fusions when it is made\. Make another one"):
        sequential.fusions = None
    assert sequential.fusions == () and Sequential(*sequential).fusions is None


class NegatedLinear(ops.Linear):
    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        y, outputs = super().fuser_forward(ctx, x, extras)
        return -y, outputs


class NegatingLinear(ops.Linear):
    def forward(self, x: Tensor, **settings: Any) -> Any:
        return -super().forward(x, **settings)


@pytest.mark.parametrize("kind", (NegatedLinear, NegatingLinear))
def test_an_operation_of_a_class_that_was_assigned_runs_as_one_of_that_class(kind: type) -> None:
    sequential = Sequential(ops.Linear(4, 8), ops.SiLU(), ops.Linear(8, 4), ops.AddExtraInput("residual"))
    x, residual = torch.randn(3, 4), torch.zeros(3, 4)
    expected = -sequential(x, residual=residual)
    sequential[2].__class__ = kind
    assert torch.equal(sequential(x, residual=residual), expected)


@pytest.mark.parametrize("kind", ("forward", "forward_pre", "full_backward"))
def test_hooks_fire_in_dictionaries_that_took_the_place_of_others(kind: str) -> None:
    sequential = Sequential(Scale(2.0), Sequential(Scale(3.0)), Scale(5.0))
    attribute = f"_{kind.removeprefix('full_')}_hooks"
    x = torch.ones((), requires_grad=True)
    sequential(x).backward()
    called: list[str] = []
    for name in ("2", "1", "1.0"):
        for module in sequential.modules():
            setattr(module, attribute, OrderedDict())  # which takes all hooks away
        hook = getattr(sequential.get_submodule(name), f"register_{kind}_hook")
        hook(lambda *_, name=name: called.append(name))
        sequential(x).backward()
    assert called == ["2", "1", "1.0"]


def test_a_hooked_operation_still_takes_and_makes_extras_by_name() -> None:
    tap, multiply = Tap().rename_extras(tapped="a"), Multiply().rename_extras(other="a")
    sequential = Sequential(tap, Scale(2.0), multiply)
    for operation in (tap, multiply):
        operation.register_forward_hook(lambda *_: None)
    assert stages(sequential) == ["Tap", 1, "Multiply"]
    x = torch.randn(3, requires_grad=True)
    y, made = sequential(x, outputs=("a",))
    torch.testing.assert_close(y, 2 * x**2)
    assert torch.equal(made["a"], x)
    y.sum().backward()
    torch.testing.assert_close(x.grad, 4 * x.detach())


def test_a_hooked_operation_keeps_the_settings_of_its_sequential() -> None:
    sequential = Sequential(Scale(2.0))
    sequential[0].register_forward_hook(lambda *_: None)
    x = torch.ones(2, requires_grad=True)
    y = sequential(x)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((2,), 4.0))


def test_a_hooked_operation_takes_the_path_of_its_sequential() -> None:
    seen: list[str] = []

    class Spy(Scale):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            seen.append(ctx.path.name)
            return super().fuser_forward(ctx, x, extras)

    sequential = Sequential(Spy(), path="split")
    sequential(torch.ones(2))
    sequential[0].register_forward_hook(lambda *_: None)
    sequential(torch.ones(2))
    assert seen == ["split", "split"]


# explain()


class ScaleShift(FusedOperation):
    pattern = (Scale, Shift)
    passes = "forward"

    @classmethod
    def why_not(cls, operations: Any, request: Any) -> str | None:
        return "the shift is None." if operations[1].shift is None else None

    def kernel(self, request: Any) -> str:
        return "one kernel"

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctxs[0].needs_grad:
            ctxs[0].saved = Scale.Saved(x)
        return torch.addcmul(ctxs[1].param("shift"), x, ctxs[0].param("scale")), {}


def test_explain_prints_stages_steps_kernels_and_refusals() -> None:
    sequential = Sequential(Scale(), Shift(), nn.ReLU(), Scale(), Shift(None), Scale(), fusions=(ScaleShift,))
    sequential[5].register_forward_hook(lambda *_: None)
    assert sequential.explain() == "\n".join(
        [
            "recipe HighPrecision(path=None): native on cpu, float32",
            "stage 0: pipeline",
            "  path: grouped",
            "  forward",
            "      0-1  ScaleShift = Scale -> Shift  [one kernel]",
            "  backward",
            "        0  Scale  [torch]",
            "        1  Shift  [torch]",
            "stage 1: 2  ReLU",
            "stage 2: pipeline",
            "  path: grouped",
            "  forward and backward",
            "        3  Scale  [torch]",
            "        4  Shift  [torch]",
            "  not fused: ScaleShift on operations 3-4: the shift is None.",
            "stage 3: 5  Scale, called by itself because it has hooks of its own, or is sharded",
        ]
    )


def test_explain_gives_operations_in_nested_sequentials_their_place() -> None:
    text = Sequential(Scale(), Sequential(Scale(), Sequential(Shift()))).explain()
    assert [line.split()[0] for line in text.splitlines()[-3:]] == ["0", "1.0", "1.1.0"]


def test_explain_takes_a_recipe_by_name_and_says_emulated() -> None:
    text = Sequential(ops.Linear(32, 32)).explain(recipe="mxfp8", dtype=torch.bfloat16)
    assert text.startswith("recipe MXFP8BlockScaling(")
    assert ": emulated on cpu, bfloat16" in text


def test_explain_says_that_a_path_was_asked_for() -> None:
    assert "path: split, as asked for" in Sequential(Scale(), path="split").explain()


def test_explain_shows_the_plan_of_a_nested_sequential_with_settings_of_its_own() -> None:
    text = Sequential(Scale(), Sequential(Scale(), Shift(), fusions=(ScaleShift,))).explain()
    assert "ScaleShift = Scale -> Shift" in text


def test_explain_changes_nothing() -> None:
    sequential = Sequential(Scale(), nn.Tanh(), Shift())
    state = sequential.state_dict()
    sequential.explain(recipe="fp8_current", training=False, requires_grad=False)
    assert sequential.training
    assert list(sequential.state_dict()) == list(state)


SETTINGS = [{"path": "split"}, {"fusions": ()}]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: next(iter(setting)))
def test_a_setting_that_would_not_reach_a_nested_sequential_is_refused(setting: dict[str, Any]) -> None:
    nested = Sequential(Scale())
    outer = Sequential(nested, **setting)
    outer(torch.ones(2))  # flattened: it reaches
    nested.register_forward_hook(lambda *_: None)
    with pytest.raises(ValueError, match=rf"Module 0 is a Sequential .* so {next(iter(setting))} of the outer one"):
        outer(torch.ones(2))
    with_setting = Sequential(Scale(), **setting)
    with_setting.register_forward_hook(lambda *_: None)
    Sequential(with_setting, **setting)(torch.ones(2))


def test_a_buffer_named_by_two_indices_is_refused() -> None:
    sequential, x, sizes = grouped()
    last = {"output": torch.empty(0)}
    with pytest.raises(ValueError, match="buffers names one operation twice"):
        sequential(x, split_sizes=sizes, buffers={0: last, -len(sequential): last})


class Weighted(nn.Module):
    """Multiplies the rows by their weights, as a module of torch's."""

    extra_inputs = ("scales",)

    def forward(self, x, scales):
        return x * scales[:, None]


def moe(*between, dispatch=None, ending=(), **names):
    """Router to Combine, with these modules between the products."""
    first, last = ops.GroupedLinear(4, 8, 16), ops.GroupedLinear(4, 8, 8)
    combine = ops.Combine().rename_extras(**names)
    return Sequential(ops.Router(8, 4, 2), dispatch or ops.Dispatch(4), first, *between, last, *ending, combine)


UNREAD = r"^operation 1 \(Dispatch\) makes 'scales', the weight of each row, which nothing reads before .*Combine"


@pytest.mark.parametrize(
    "make",
    [
        lambda: moe(ops.SwiGLU()),
        lambda: moe(Sequential(ops.GLU())),
        lambda: moe(Sequential(ops.GEGLU(), fusions=[])),
        lambda: moe(nn.Identity(), ops.SwiGLU()),
        lambda: moe(ops.SwiGLU(), dispatch=ops.Dispatch(4).rename_extras(routing_map="map"), routing_map="map"),
    ],
    ids=["activation", "nested", "called by itself", "module of torch", "renamed"],
)
def test_rows_that_are_summed_unweighted_are_warned_of(make):
    with pytest.warns(UserWarning, match=UNREAD) as warned:
        model = make()
    assert all(warning.filename == __file__ for warning in warned)
    model(torch.randn(3, 8))  # once


@pytest.mark.parametrize(
    "make",
    [
        lambda: moe(ops.ScaledSwiGLU()),
        lambda: moe(ops.SwiGLU(), Weighted()),
        lambda: moe(ops.SwiGLU(), ending=(Weighted(),)),
        lambda: moe(ops.SwiGLU(), ending=(Sequential(Weighted()),)),
        lambda: Sequential(ops.Router(8, 4, 2), ops.Dispatch(4), ops.Combine()),
        lambda: Sequential(ops.Router(8, 4, 2), ops.SwiGLU(), ops.Linear(4, 8), ops.Dispatch(4), ops.Combine()),
        lambda: moe(ops.ScaledSwiGLU().rename_extras(scales="w"), dispatch=ops.Dispatch(4).rename_extras(scales="w")),
    ],
    ids=["scaled", "by a module", "at the end", "by a nested one", "no activation", "activation before", "renamed"],
)
def test_weighted_rows_are_not_warned_of(make):
    make()(torch.randn(3, 8))  # warnings are errors


@pytest.mark.parametrize(
    "between", [(), (nn.Identity(),), (ops.MakeExtraOutput("kept"),)], ids=["adjacent", "module", "operation"]
)
def test_router_and_dispatch_have_the_same_number_of_experts(between):
    for chosen, given in ((4, 8), (8, 4)):
        with pytest.raises(
            ValueError, match=rf"In operation .*Dispatch.*: The Router .* {chosen} experts, .* is {given}"
        ):
            Sequential(ops.Router(8, chosen, 2), *between, ops.Dispatch(given))
    Sequential(ops.Router(8, 4, 2), *between, ops.Dispatch(4))


def test_dispatch_takes_the_experts_of_who_made_the_indices_last():
    class Again(nn.Module):
        extra_inputs = ("indices",)
        extra_outputs = ("indices",)

        def forward(self, x, indices, outputs=()):
            return (x, {"indices": indices + 4}) if outputs else x

    model = Sequential(ops.Router(8, 4, 2), Again(), ops.Dispatch(8), ops.Combine())
    model(torch.randn(3, 8))
