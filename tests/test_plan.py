"""Matching: which fusions are used in which pass, in which order they are tried, and the sentence of every "no"."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fuser.plan
from fuser import BasicOperation, FusedOperation, Sequential, autocast, ops, optional, register_fusion, several
from recipes import Float8CurrentScaling

calls: list[str] = []  # what ran, in order


@pytest.fixture(autouse=True)
def nothing_called_and_nothing_left_registered() -> Iterator[None]:
    calls.clear()
    yield
    assert not fuser.plan._registered


class Scale(BasicOperation):
    """y = s x, with a learnable 0-dim s."""

    class Saved(NamedTuple):
        x: Tensor

    def __init__(self, value: float = 2.0) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(value))

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("Scale.forward")
        if ctx.needs_grad:
            ctx.saved = self.Saved(x)
        return x * ctx.param("scale"), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        calls.append("Scale.backward")
        assert type(ctx.saved) is Scale.Saved
        return dy * ctx.param("scale"), {"scale": (dy * ctx.saved.x).sum()}, {}


class Shift(BasicOperation):
    """y = x + b, with a learnable 0-dim b."""

    def __init__(self, value: float = 1.0) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.tensor(value))

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("Shift.forward")
        return x + ctx.param("shift"), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        calls.append("Shift.backward")
        return dy, {"shift": dy.sum()}, {}


class Square(BasicOperation):
    """y = x^2."""

    class Saved(NamedTuple):
        x: Tensor

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("Square.forward")
        if ctx.needs_grad:
            ctx.saved = self.Saved(x)
        return x * x, {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        calls.append("Square.backward")
        return 2 * dy * ctx.saved.x, {}, {}


class Tap(BasicOperation):
    """y = x, and x once more as the extra output `tapped`."""

    extra_outputs = {"tapped": Tensor}

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("Tap.forward")
        return x, {"tapped": x}

    def fuser_backward(self, ctx: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        calls.append("Tap.backward")
        gradients = [g for g in (dy, d_extra_outputs.get("tapped")) if g is not None]
        return sum(gradients[1:], gradients[0]), {}, {}


class Add(BasicOperation):
    """y = x + other, for the extra input `other`."""

    extra_inputs = {"other": Tensor}

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("Add.forward")
        return x + extras["other"], {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        calls.append("Add.backward")
        return dy, {}, {"other": dy}


class ForwardOnly(FusedOperation):
    """Scale -> Shift; fills the Saved of Scale."""

    pattern = (Scale, Shift)
    passes = "forward"

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("ForwardOnly.forward")
        if ctxs[0].needs_grad:
            ctxs[0].saved = Scale.Saved(x)
        return x * ctxs[0].param("scale") + ctxs[1].param("shift"), {}


class BackwardOnly(FusedOperation):
    """Scale -> Shift; consumes the Saved of Scale."""

    pattern = (Scale, Shift)
    passes = "backward"

    def fuser_backward(self, ctxs: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        calls.append("BackwardOnly.backward")
        assert type(ctxs[0].saved) is Scale.Saved and ctxs[1].saved is None
        dx = dy * ctxs[0].param("scale")
        return dx, ({"scale": (dy * ctxs[0].saved.x).sum()}, {"shift": dy.sum()}), {}


class Joint(FusedOperation):
    """Scale -> Shift; keeps something of its own."""

    pattern = (Scale, Shift)
    passes = "joint"

    class Saved(NamedTuple):
        mine: Tensor

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("Joint.forward")
        if any(ctx.needs_grad for ctx in ctxs):
            ctxs[0].saved = self.Saved(x)
        return x * ctxs[0].param("scale") + ctxs[1].param("shift"), {}

    def fuser_backward(self, ctxs: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        calls.append("Joint.backward")
        dx = dy * ctxs[0].param("scale")
        return dx, ({"scale": (dy * ctxs[0].saved.mine).sum()}, {"shift": dy.sum()}), {}


def run(sequential: Sequential, **extras: Tensor) -> list[Tensor]:
    """y and all gradients."""
    sequential.zero_grad()
    x = torch.linspace(-1, 2, 7, requires_grad=True)
    given = {name: value.clone().requires_grad_() for name, value in extras.items()}
    calls.clear()
    y = sequential(x, **given)
    y.square().sum().backward()
    return [y.detach(), x.grad, *[p.grad for p in sequential.parameters()], *[v.grad for v in given.values()]]


def assert_same(results: list[Tensor], expected: list[Tensor]) -> None:
    assert len(results) == len(expected)
    for result, other in zip(results, expected, strict=True):
        assert torch.equal(result, other)


def fused_steps(sequential: Sequential) -> list[str]:
    """The lines of explain() that show a fused step: name and covered positions."""
    lines = [line.split() for line in sequential.explain().splitlines() if " = " in line and "not fused" not in line]
    return [f"{words[1]} {words[0]}" for words in lines]


# Three kinds of fusion


@pytest.mark.parametrize(
    ("fusions", "expected"),
    [
        ((), ["Scale.forward", "Shift.forward", "Shift.backward", "Scale.backward"]),
        ((ForwardOnly,), ["ForwardOnly.forward", "Shift.backward", "Scale.backward"]),
        ((BackwardOnly,), ["Scale.forward", "Shift.forward", "BackwardOnly.backward"]),
        ((ForwardOnly, BackwardOnly), ["ForwardOnly.forward", "BackwardOnly.backward"]),
        ((Joint,), ["Joint.forward", "Joint.backward"]),
        ((ForwardOnly, BackwardOnly, Joint), ["Joint.forward", "Joint.backward"]),
    ],
    ids=["none", "forward", "backward", "forward+backward", "joint", "all"],
)
def test_each_kind_runs_in_its_pass_and_gives_what_the_operations_give(fusions: Any, expected: list[str]) -> None:
    sequential = Sequential(Scale(), Shift(), fusions=fusions)
    results = run(sequential)
    assert calls == expected
    assert_same(results, run(Sequential(Scale(), Shift(), fusions=())))


def test_a_fusion_runs_without_grad_mode_too_and_nothing_is_saved() -> None:
    seen: list[Any] = []

    class Spy(ForwardOnly):
        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            seen.append([ctx.needs_grad for ctx in ctxs])
            return super().fuser_forward(ctxs, x, extras)

    sequential = Sequential(Scale(), Shift(), fusions=(Spy,))
    with torch.no_grad():
        y = sequential(torch.ones(2))
    assert seen == [[False, False]]
    assert torch.equal(y, torch.full((2,), 3.0))


def test_the_plan_of_a_pipeline_mixes_fused_and_basic_steps() -> None:
    sequential = Sequential(Square(), Scale(), Shift(), Square(), Scale(3.0), Shift(), fusions=(Joint,))
    results = run(sequential)
    assert fused_steps(sequential) == ["Joint 1-2", "Joint 4-5"]
    assert calls[:4] == ["Square.forward", "Joint.forward", "Square.forward", "Joint.forward"]
    assert calls[4:] == ["Joint.backward", "Square.backward", "Joint.backward", "Square.backward"]
    assert_same(results, run(Sequential(Square(), Scale(), Shift(), Square(), Scale(3.0), Shift(), fusions=())))


def test_a_fusion_does_not_reach_over_an_ordinary_module() -> None:
    assert fused_steps(Sequential(Scale(), nn.Identity(), Shift(), fusions=(Joint,))) == []


def test_a_fusion_reaches_into_a_flattened_sequential() -> None:
    assert fused_steps(Sequential(Sequential(Scale()), Sequential(Shift()), fusions=(Joint,))) == ["Joint 0.0-1.0"]


def test_an_operation_called_alone_is_never_fused() -> None:
    class Alone(Joint):
        pattern = (Scale,)

    with register_fusion(Alone):
        Scale()(torch.ones(2))
    assert calls == ["Scale.forward"]


def test_matches_do_not_overlap() -> None:
    class Pair(Joint):
        pattern = (Square, Square)

    assert fused_steps(Sequential(*[Square() for _ in range(5)], fusions=(Pair,))) == ["Pair 0-1", "Pair 2-3"]


def test_a_fusion_of_one_pass_does_not_break_up_a_joint_one() -> None:
    class Tail(ForwardOnly):
        pattern = (Shift, Square)

    sequential = Sequential(Scale(), Shift(), Square(), fusions=(Tail, Joint))
    assert fused_steps(sequential) == ["Joint 0-1"]


# Patterns


def matched(pattern: tuple[Any, ...], *operations: BasicOperation, refuse: int = 0) -> list[str]:
    """Which positions a fusion with this pattern covers; matches of `refuse` operations are refused."""
    covering = pattern

    class Fusion(Joint):
        pattern = covering

        @classmethod
        def why_not(cls, operations: Any, request: Any) -> str | None:
            return f"it has {refuse} operations." if len(operations) == refuse else None

        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            raise AssertionError("only planned")

    lines = Sequential(*operations, fusions=(Fusion,)).explain().splitlines()
    return [line.split()[0] for line in lines if "Fusion = " in line]


class A(Square):
    pass


@pytest.mark.parametrize(
    ("pattern", "kinds", "expected"),
    [
        pytest.param((Scale, optional(Shift), Square), (Scale, Shift, Square), ["0-2"], id="optional-there"),
        pytest.param((Scale, optional(Shift), Square), (Scale, Square), ["0-1"], id="optional-absent"),
        pytest.param((Scale, optional(Shift)), (Scale, Shift), ["0-1"], id="optional-last-there"),
        pytest.param((Scale, optional(Shift)), (Square, Scale), ["1"], id="optional-last-absent"),
        pytest.param((optional(Shift), Scale), (Shift, Scale), ["0-1"], id="optional-first-there"),
        pytest.param((optional(Shift), Scale), (Scale,), ["0"], id="optional-first-absent"),
        pytest.param((Scale, optional(Scale), Shift), (Scale, Shift), ["0-1"], id="optional-given-back"),
        pytest.param((Scale, optional(Shift, Square), Tap), (Scale, Square, Tap), ["0-2"], id="optional-alternative"),
        pytest.param((Scale, (Shift, Square)), (Scale, Square, Scale, Shift), ["0-1", "2-3"], id="alternatives"),
        pytest.param((Scale, (Shift, Square)), (Scale, Tap), [], id="no-alternative"),
        pytest.param((Scale, Shift, Square), (Scale, Shift), [], id="too-few"),
        pytest.param((Scale, Shift), (Shift, Scale), [], id="wrong-order"),
        pytest.param((several(Scale),), (Scale, Scale, Tap, Scale), ["0-1", "3"], id="several"),
        pytest.param((several(Scale, Shift),), (Shift, Scale, Shift), ["0-2"], id="several-alternatives"),
        pytest.param((several(Scale, at_least=2),), (Scale, Tap, Scale, Scale), ["2-3"], id="several-at-least"),
        pytest.param(
            (Scale, several(Square, at_least=0), Shift),
            (Scale, Shift, Scale, Square, Square, Shift),
            ["0-1", "2-5"],
            id="several-or-none",
        ),
        pytest.param((several(Scale), Scale, Shift), (Scale, Scale, Scale, Shift), ["0-3"], id="several-given-back"),
        pytest.param((Tap, several(Scale)), (Tap, Shift), [], id="several-none"),
        pytest.param(
            (optional(Tap), several(Scale), optional(Shift)),
            (Scale, Shift, Tap, Scale),
            ["0-1", "2-3"],
            id="several-between-optional",
        ),
    ],
)
def test_a_pattern_covers(pattern: Any, kinds: Any, expected: list[str]) -> None:
    assert matched(pattern, *[kind() for kind in kinds]) == expected


def test_a_refused_long_match_gives_way_to_a_shorter_one() -> None:
    pattern = (Scale, optional(Shift), optional(Square))
    assert matched(pattern, Scale(), Shift(), Square(), refuse=3) == ["0-1"]


def test_a_refused_long_run_gives_way_to_a_shorter_one() -> None:
    assert matched((several(Scale),), Scale(), Scale(), Scale(), refuse=3) == ["0-1", "2"]


def test_a_match_of_fewer_operations_than_a_fusion_wants_is_none() -> None:
    class Pair(Moody):
        pattern = (several(Square), optional(Shift))
        fewest = 2

    assert "Pair" not in Sequential(Square(), Tap(), Shift(), fusions=(Pair,)).explain()
    assert "Pair on operations 0-1" in Sequential(Square(), Shift(), fusions=(Pair,)).explain()


def test_one_reason_for_a_run_and_for_its_parts_is_said_once() -> None:
    class Run(Moody):
        pattern = (several(Square),)

    lines = Sequential(Square(), Square(), Square(), Tap(), Square(), fusions=(Run,)).explain().splitlines()
    refused = [line for line in lines if "not fused" in line]
    assert refused == [
        "  not fused: Run on operations 0-2: the moon is full.",
        "  not fused: Run on operations 4: the moon is full.",
    ]


def test_a_subclass_that_computes_the_same_matches() -> None:
    class Wide(Scale):
        def extra_repr(self) -> str:
            return "wide"

    assert matched((Scale, Shift), Wide(), Shift()) == ["0-1"]


@pytest.mark.parametrize("method", ["fuser_forward", "fuser_backward"])
def test_an_instance_that_computes_something_else_does_not_match(method: str) -> None:
    scale = Scale()
    sequential = Sequential(scale, Shift(0.0), fusions=(Joint,))
    x = torch.ones(2, requires_grad=True)
    sequential(x)
    assert "Joint" in sequential.explain()
    own = getattr(scale, method)
    setattr(scale, method, lambda ctx, given, others: own(ctx, 0 * given, others))
    y = sequential(x)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(y.detach() if method == "fuser_forward" else dx, torch.zeros(2))
    assert matched((Scale, Shift), scale, Shift()) == []
    delattr(scale, method)
    assert matched((Scale, Shift), scale, Shift()) == ["0-1"]


def test_a_subclass_that_computes_something_else_does_not_match() -> None:
    class Forward(Scale):
        def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            return super().fuser_forward(ctx, -x, extras)

    class Backward(Scale):
        def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            return super().fuser_backward(ctx, 2 * dy, d_extra_outputs)

    assert matched((Scale, Shift), Forward(), Shift()) == []
    assert matched((Scale, Shift), Backward(), Shift()) == []
    assert matched((Forward, Shift), Forward(), Shift()) == ["0-1"]


# Priority and registering


def fusion_named(name: str, passes: str = "forward") -> type[ForwardOnly]:
    def fuser_forward(self: Any, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        result = ForwardOnly.fuser_forward(self, ctxs, x, extras)
        calls[-1] = name
        return result

    return type(name, (ForwardOnly,), {"fuser_forward": fuser_forward})


def forward_of(sequential: Sequential) -> str:
    calls.clear()
    sequential(torch.ones(2))
    return calls[0]


def test_the_first_of_a_containers_fusions_wins() -> None:
    first, second = fusion_named("First"), fusion_named("Second")
    assert forward_of(Sequential(Scale(), Shift(), fusions=(first, second))) == "First"
    assert forward_of(Sequential(Scale(), Shift(), fusions=(second, first))) == "Second"


def test_the_latest_registered_wins_and_unregistering_brings_the_earlier_back() -> None:
    sequential = Sequential(Scale(), Shift())
    assert forward_of(sequential) == "Scale.forward"
    first = register_fusion(fusion_named("First"))
    assert forward_of(sequential) == "First"
    second = register_fusion(fusion_named("Second"))
    assert forward_of(sequential) == "Second"
    second.unregister()
    assert forward_of(sequential) == "First"
    first.unregister()
    assert forward_of(sequential) == "Scale.forward"


def test_before_puts_a_fusion_in_front_of_another() -> None:
    sequential = Sequential(Scale(), Shift())
    first, second, third = (fusion_named(name) for name in ("First", "Second", "Third"))
    with register_fusion(first), register_fusion(second) as handle, register_fusion(third, before=first):
        assert forward_of(sequential) == "Second"
        handle.unregister()
        assert forward_of(sequential) == "Third"


def test_a_registered_fusion_is_tried_before_the_built_in_ones() -> None:
    class Mine(Joint):
        pattern = (ops.GroupedLinear, ops.SwiGLU, ops.GroupedLinear)

    sequential = Sequential(ops.GroupedLinear(2, 4, 8), ops.SwiGLU(), ops.GroupedLinear(2, 4, 4))
    assert fused_steps(sequential) == ["GroupedMLP 0-2"]
    with register_fusion(Mine):
        assert fused_steps(sequential) == ["Mine 0-2"]
    assert fused_steps(sequential) == ["GroupedMLP 0-2"]


def test_a_registration_ends_with_its_context_also_by_an_exception() -> None:
    sequential = Sequential(Scale(), Shift())
    with pytest.raises(KeyError), register_fusion(Joint):
        assert forward_of(sequential) == "Joint.forward"
        raise KeyError
    assert forward_of(sequential) == "Scale.forward"


def test_unregistering_twice_does_nothing() -> None:
    handle = register_fusion(Joint)
    handle.unregister()
    version = fuser.plan.fusions_version()
    handle.unregister()
    assert fuser.plan.fusions_version() == version


def test_an_old_handle_does_not_take_out_a_new_registration() -> None:
    old = register_fusion(Joint)
    old.unregister()
    with register_fusion(Joint):
        old.unregister()
        assert forward_of(Sequential(Scale(), Shift())) == "Joint.forward"


def test_fusions_of_a_container_replace_the_registered_ones() -> None:
    with register_fusion(Joint):
        assert forward_of(Sequential(Scale(), Shift())) == "Joint.forward"
        assert forward_of(Sequential(Scale(), Shift(), fusions=())) == "Scale.forward"
        assert forward_of(Sequential(Scale(), Shift(), fusions=(ForwardOnly,))) == "ForwardOnly.forward"


def test_registering_between_forward_and_backward_does_not_touch_that_backward() -> None:
    sequential = Sequential(Scale(), Shift())
    y = sequential(torch.ones(2, requires_grad=True))
    with register_fusion(BackwardOnly):
        y.sum().backward()
    assert calls == ["Scale.forward", "Shift.forward", "Shift.backward", "Scale.backward"]


class NoPattern(FusedOperation):
    pass


class AllOptional(FusedOperation):
    pattern = (optional(Scale),)


class AllPerhaps(FusedOperation):
    pattern = (several(Scale, at_least=0), optional(Shift))


class Fewer(FusedOperation):
    pattern = (Scale, several(Shift, at_least=-1))


class NoClass(FusedOperation):
    pattern = (Scale, several())


class NoneOf(FusedOperation):
    pattern = (Scale, ())


class StrangeMember(FusedOperation):
    pattern = (Scale, nn.Linear)


class NoTuple(FusedOperation):
    pattern = Scale  # type: ignore[assignment]


class OptionalAlone(FusedOperation):
    pattern = optional(Scale)


class StrangeFewest(FusedOperation):
    pattern = (Scale,)
    fewest = "2"  # type: ignore[assignment]


class StrangePasses(FusedOperation):
    pattern = (Scale,)
    passes = "both"  # type: ignore[assignment]


@pytest.mark.parametrize(
    ("fusion", "message"),
    [
        (Scale, "is not a fusion. Give a subclass of FusedOperation"),
        (Joint((Scale(), Shift())), "is not a fusion. Give a subclass of FusedOperation"),
        (NoPattern, "NoPattern.pattern names no operation that must be there"),
        (AllOptional, "AllOptional.pattern names no operation that must be there"),
        (AllPerhaps, "AllPerhaps.pattern names no operation that must be there"),
        (Fewer, r"Fewer.pattern holds Several\(.*at_least=-1\). Give at_least=0, or how many must be there"),
        (NoClass, r"NoClass.pattern holds Several\(.*\), which no operation fits. Name the classes that do"),
        (NoneOf, r"NoneOf.pattern holds \(\), which no operation fits"),
        (StrangeMember, r"StrangeMember.pattern holds .*Linear.*, which is not a BasicOperation class"),
        (NoTuple, r"NoTuple.pattern is .*Scale.*, but must be a tuple. Of one member, write \(member,\)"),
        (OptionalAlone, "OptionalAlone.pattern is Optional.*, but must be a tuple"),
        (StrangeFewest, r"StrangeFewest.fewest is '2' \(str\), but must be an integer"),
        (StrangePasses, "StrangePasses.passes is 'both'. It must be 'joint', 'forward' or 'backward'"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_what_is_no_fusion_is_refused_at_the_door(fusion: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        register_fusion(fusion)
    with pytest.raises(TypeError, match=message):
        Sequential(Scale(), fusions=(fusion,))


def test_registering_twice_is_refused() -> None:
    with register_fusion(Joint), pytest.raises(ValueError, match="Joint is registered already. Unregister it first"):
        register_fusion(Joint)


def test_before_a_fusion_that_is_not_registered_is_refused() -> None:
    with pytest.raises(ValueError, match="before=Joint is not a registered fusion. Registered: none"):
        register_fusion(ForwardOnly, before=Joint)
    with pytest.raises(TypeError, match="3 is not a fusion. Give a subclass of FusedOperation"):
        register_fusion(ForwardOnly, before=3)  # type: ignore[arg-type]
    with register_fusion(BackwardOnly), pytest.raises(ValueError, match="Registered: BackwardOnly"):
        register_fusion(ForwardOnly, before=Joint)


@pytest.mark.parametrize(
    ("base", "passes", "missing"),
    [
        (FusedOperation, "joint", "fuser_forward"),
        (FusedOperation, "forward", "fuser_forward"),
        (FusedOperation, "backward", "fuser_backward"),
        (ForwardOnly, "joint", "fuser_backward"),
    ],
)
def test_a_fusion_without_the_methods_of_its_passes_is_refused(base: Any, passes: str, missing: str) -> None:
    part = type("Part", (base,), {"pattern": (Scale, Shift), "passes": passes})
    with pytest.raises(TypeError, match=f"Part has passes='{passes}', but no {missing}. Define it, or give other"):
        register_fusion(part)


@pytest.mark.parametrize("run", [lambda model: model(torch.ones(2)), lambda model: model.explain()])
@pytest.mark.parametrize("method", ["why_not", "__init__"])
def test_an_error_while_a_fusion_is_planned_has_a_note_that_names_it(method: str, run: Any) -> None:
    def fails(*_: Any) -> None:
        raise KeyError("wrong by design")

    failing = type("Failing", (Joint,), {method: classmethod(fails) if method == "why_not" else fails})
    with pytest.raises(KeyError, match="wrong by design") as raised:
        run(Sequential(Shift(), Scale(), Shift(), fusions=(failing,)))
    assert raised.value.__notes__ == [f"In Failing.{method}, of Scale -> Shift."]


@pytest.mark.parametrize("reason", [True, False, ["the moon"]])
def test_a_reason_that_is_no_sentence_is_refused(reason: Any) -> None:
    odd = type("Odd", (Joint,), {"why_not": classmethod(lambda cls, operations, request: reason)})
    with pytest.raises(TypeError, match=r"Odd.why_not returned .*\. Return None, or a sentence."):
        Sequential(Scale(), Shift(), fusions=(odd,)).explain()


def test_fusions_that_are_no_sequence_are_refused() -> None:
    for fusions in (Joint, {Joint}, iter((Joint,))):
        with pytest.raises(TypeError, match=r"fusions is .*, but must be a sequence of classes. Of one, write \(F,\)"):
            Sequential(Scale(), Shift(), fusions=fusions)  # type: ignore[arg-type]


def test_a_handle_whose_fusion_is_unregistered_is_not_entered() -> None:
    handle = register_fusion(Joint)
    with handle:
        pass
    with pytest.raises(RuntimeError, match="Joint is no longer registered. Call register_fusion again"), handle:
        raise AssertionError("must not be entered")


# Sentences


class Moody(Joint):
    requests: list[Any] = []

    @classmethod
    def why_not(cls, operations: Any, request: Any) -> str | None:
        cls.requests.append(request)
        return "the moon is full."


def test_a_refusal_is_a_sentence_in_explain() -> None:
    lines = Sequential(Square(), Scale(), Shift(), fusions=(Moody,)).explain().splitlines()
    assert "  not fused: Moody on operations 1-2: the moon is full." in lines


def test_a_refused_fusion_leaves_the_operations_as_they_are() -> None:
    sequential = Sequential(Scale(), Shift(), fusions=(Moody, ForwardOnly))
    assert_same(run(sequential), run(Sequential(Scale(), Shift(), fusions=(ForwardOnly,))))


def test_a_pattern_that_is_not_there_is_no_refusal() -> None:
    assert "not fused" not in Sequential(Scale(), Square(), fusions=(Moody,)).explain()


def test_why_not_sees_what_the_request_asks_for() -> None:
    sequential = Sequential(Scale(), Shift(), fusions=(Moody,), path="split").eval()
    sequential[1].shift.requires_grad_(False)
    Moody.requests.clear()
    with autocast("mxfp8"):
        sequential(torch.ones(2))
    (request,) = Moody.requests
    assert request.recipe.name == "mxfp8"
    assert request.device == torch.device("cpu")
    assert request.dtype == torch.float32
    assert request.needs == (False, (True, False), ())
    assert request.training is False
    assert request.path == "split"


# The plan is cached by value


def count_plans(sequential: Sequential, *calls_: Any) -> list[int]:
    """How many plans were made after each call, from the first on."""
    counts = []
    Moody.requests.clear()
    for call in calls_:
        call(sequential)
        counts.append(len(Moody.requests))
    return counts


def under(recipe: Any) -> Any:
    def call(sequential: Sequential) -> None:
        with autocast(recipe):
            sequential(torch.ones(2))

    return call


def test_a_plan_is_made_once_for_equal_requests() -> None:
    sequential = Sequential(Scale(), Shift(), fusions=(Moody,))
    same = [under(Float8CurrentScaling(amax_epsilon=0.5)) for _ in range(3)]  # three objects, equal by value
    assert count_plans(sequential, *same) == [1, 1, 1]


def test_toggling_one_field_of_a_recipe_gives_a_new_plan_and_back_the_old_one() -> None:
    sequential = Sequential(Scale(), Shift(), fusions=(Moody,))
    a, b = Float8CurrentScaling(), Float8CurrentScaling(power_2_scale=True)
    assert count_plans(sequential, under(a), under(b), under(a), under(b)) == [1, 2, 2, 2]


def frozen(sequential: Sequential) -> None:
    sequential[0].scale.requires_grad_(False)
    sequential(torch.ones(2))


def without_grad(sequential: Sequential) -> None:
    with torch.no_grad():
        sequential(torch.ones(2))


@pytest.mark.parametrize(
    "other",
    [
        lambda s: s(torch.ones(2, requires_grad=True)),
        lambda s: s(torch.ones(2, dtype=torch.float64)),
        lambda s: s.eval()(torch.ones(2)),
        lambda s: s.bfloat16()(torch.ones(2)),
        frozen,
        without_grad,
    ],
    ids=["x requires grad", "x dtype", "eval", "parameter dtype", "frozen", "no grad"],
)
def test_another_request_gives_a_new_plan(other: Any) -> None:
    sequential = Sequential(Scale(), Shift(), fusions=(Moody,))
    assert count_plans(sequential, lambda s: s(torch.ones(2)), other, other) == [1, 2, 2]


def test_another_number_of_rows_needs_no_new_plan() -> None:
    sequential = Sequential(Scale(), Shift(), fusions=(Moody,))
    assert count_plans(sequential, *[lambda s, n=n: s(torch.ones(n)) for n in (1, 2, 0)]) == [1, 1, 1]


class InEvaluation(Joint):
    @classmethod
    def why_not(cls, operations: Any, request: Any) -> str | None:
        return "Shift is in training." if operations[1].training else None


def test_a_fusion_is_asked_again_when_one_operation_alone_changes_its_mode() -> None:
    sequential = Sequential(Scale(), Shift(), fusions=(InEvaluation,))
    for in_training in (True, False, True):
        sequential[1].train(in_training)
        calls.clear()
        sequential(torch.ones(3))
        assert calls == (["Scale.forward", "Shift.forward"] if in_training else ["Joint.forward"])


class SavesAnother(FusedOperation):
    """Leaves nothing for the Linear, and what a Linear saves for the activation."""

    pattern = (ops.Linear, ops.GELU)
    passes = "forward"

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctxs[1].needs_grad:
            ctxs[1].saved = ops.Linear.Saved(x)
        return x @ ctxs[0].param("weight").T, {}


def test_what_a_forward_fusion_has_not_saved_is_named_where_backward_reads_it() -> None:
    y = Sequential(ops.Linear(4, 4), ops.GELU(), fusions=(SavesAnother,))(torch.ones(2, 4))
    message = (
        r"In operation 1 \(GELU\): .*\. SavesAnother ran forward and left a Linear.Saved for GELU. Fill ctx.saved as "
        "the operations do."
    )
    with pytest.raises(ValueError, match=message):
        y.sum().backward()


class WithoutGradients(ForwardOnly):
    @classmethod
    def why_not(cls, operations: Any, request: Any) -> str | None:
        return "it saves nothing." if request.needs[0] or any(request.needs[1]) else None


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_explain_shows_the_plan_of_the_grad_mode_of_now(mode) -> None:
    sequential = Sequential(Scale(), Shift(), fusions=(WithoutGradients,))
    for explain in (sequential.explain, lambda: fuser.explain(sequential)):
        assert "WithoutGradients = " not in explain() and "Scale, Shift" in fuser.explain(sequential)
        with mode():
            assert "not fused: " not in explain() and "WithoutGradients" in explain()


def test_plans_do_not_pile_up_when_fusions_come_and_go() -> None:
    sequential = Sequential(Scale(), Shift())
    counts = []
    for _ in range(5):
        with register_fusion(Joint):
            sequential(torch.ones(2))
        sequential(torch.ones(2))
        counts.append(len(sequential.layout().stages[0].runner.programs))
    assert counts[-1] <= counts[0]


# Extra tensors and fusions


class AddTwice(FusedOperation):
    pattern = (Add, Add)

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("AddTwice.forward")
        return x + extras["other"] + extras["other"], {}

    def fuser_backward(self, ctxs: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return dy, ({}, {}), {"other": dy + dy}


def test_a_fused_operation_gets_a_shared_extra_input_once() -> None:
    sequential = Sequential(Add(), Add(), fusions=(AddTwice,))
    results = run(sequential, other=torch.linspace(0, 1, 7))
    assert calls == ["AddTwice.forward"]
    assert_same(results, run(Sequential(Add(), Add(), fusions=()), other=torch.linspace(0, 1, 7)))


def test_operations_renamed_alike_are_fused() -> None:
    sequential = Sequential(Add().rename_extras(other="a"), Add().rename_extras(other="a"), fusions=(AddTwice,))
    run(sequential, a=torch.linspace(0, 1, 7))
    assert calls == ["AddTwice.forward"]


def test_operations_that_mean_different_tensors_by_one_name_are_not_fused() -> None:
    def build(fusions: Any) -> Sequential:
        return Sequential(Add().rename_extras(other="a"), Add().rename_extras(other="b"), fusions=fusions)

    sentence = "AddTwice on operations 0-1: its operations mean different tensors by 'other': 'a' and 'b'."
    assert sentence in build((AddTwice,)).explain()
    a, b = torch.linspace(0, 1, 7), torch.linspace(5, 6, 7)
    assert_same(run(build((AddTwice,)), a=a, b=b), run(build(()), a=a, b=b))


class TapScale(FusedOperation):
    """Tap -> Scale; `silent` keeps the extra output to itself."""

    pattern = (Tap, Scale)
    passes = "forward"
    silent = False

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("TapScale.forward")
        if ctxs[1].needs_grad:
            ctxs[1].saved = Scale.Saved(x)
        return x * ctxs[1].param("scale"), {} if self.silent else {"tapped": x}


class SilentTapScale(TapScale):
    silent = True


def test_a_fused_operation_hands_on_extra_outputs() -> None:
    def build(fusions: Any) -> Sequential:
        return Sequential(Tap(), Scale(), Add().rename_extras(other="tapped"), fusions=fusions)

    assert_same(run(build((TapScale,))), run(build(())))
    y, made = build((TapScale,))(torch.ones(2), outputs=("tapped",))
    assert torch.equal(made["tapped"], torch.ones(2)) and torch.equal(y, torch.full((2,), 3.0))


def test_an_extra_output_that_a_fusion_keeps_to_itself_is_an_error_if_it_is_wanted() -> None:
    sequential = Sequential(Tap(), Scale(), fusions=(SilentTapScale,))
    assert torch.equal(sequential(torch.ones(2)), torch.full((2,), 2.0))
    with pytest.raises(RuntimeError, match=r"'tapped' is .*fused operation.* must return every extra output"):
        sequential(torch.ones(2), outputs=("tapped",))


def test_an_extra_output_that_a_fusion_keeps_to_itself_is_an_error_if_a_later_operation_asks_for_it() -> None:
    sequential = Sequential(Tap(), Scale(), Add().rename_extras(other="tapped"), fusions=(SilentTapScale,))
    with pytest.raises(RuntimeError, match=r"'tapped'.* fused operation"):
        sequential(torch.ones(2))


class Residual(FusedOperation):
    """Tap -> Scale -> Add, with the residual inside."""

    pattern = (Tap, Scale, Add)

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("Residual.forward")
        assert "other" not in extras, "it is made inside"
        if ctxs[1].needs_grad:
            ctxs[1 if self.passes == "forward" else 0].saved = Scale.Saved(x)
        return x * ctxs[1].param("scale") + x, {"tapped": x}

    def fuser_backward(self, ctxs: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        calls.append("Residual.backward")
        saved = ctxs[1 if self.passes == "backward" else 0].saved
        dx = dy * ctxs[1].param("scale") + dy
        outside = d_extra_outputs.get("tapped")
        return dx if outside is None else dx + outside, ({}, {"scale": (dy * saved.x).sum()}, {}), {}


@pytest.mark.parametrize("passes", ["joint", "forward", "backward"])
@pytest.mark.parametrize("outside", [False, True], ids=["inside only", "used outside too"])
def test_a_fusion_may_cover_producer_and_consumer_of_an_extra_tensor(passes: str, outside: bool) -> None:
    fusion = type("Residual", (Residual,), {"passes": passes})
    results = []
    for fusions in ((fusion,), ()):
        calls.clear()
        sequential = Sequential(Tap(), Scale(3.0), Add().rename_extras(other="tapped"), fusions=fusions)
        x = torch.linspace(-1, 2, 7, requires_grad=True)
        y, made = sequential(x, outputs=("tapped",))
        (y.square() + (made["tapped"].exp() if outside else 0)).sum().backward()
        if fusions:
            assert ("Residual.forward" in calls) == (passes != "backward")
            assert ("Residual.backward" in calls) == (passes != "forward")
        results.append([y.detach(), x.grad, sequential[1].scale.grad])
    for fused, unfused in zip(*results, strict=True):
        torch.testing.assert_close(fused, unfused)


class TappedAdd(BasicOperation):
    """y = x + tapped, by the name of the extra output of `Tap`."""

    extra_inputs = {"tapped": Tensor}

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        return x + extras["tapped"], {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return dy, {}, {"tapped": dy}


class AddTap(FusedOperation):
    """TappedAdd -> Tap: the tensor that it takes is another one than that which it makes by the same name."""

    pattern = (TappedAdd, Tap)

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        calls.append("AddTap.forward")
        y = x + extras["tapped"]
        return y, {"tapped": y}

    def fuser_backward(self, ctxs: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        calls.append("AddTap.backward")
        dx = dy + d_extra_outputs["tapped"]
        return dx, ({}, {}), {"tapped": dx}


@pytest.mark.parametrize("passes", ["joint", "forward", "backward"])
def test_a_fusion_takes_an_extra_tensor_by_the_name_of_one_that_it_makes_behind(passes: str) -> None:
    fusion = type("AddTap", (AddTap,), {"passes": passes})
    results = []
    for fusions in ((fusion,), ()):
        calls.clear()
        # The residual of the first branch, whose end is another stage, is not that of the second.
        sequential = Sequential(Tap(), nn.Tanh(), TappedAdd(), Tap(), Scale(3.0), TappedAdd(), fusions=fusions)
        x = torch.linspace(-1, 2, 7, requires_grad=True)
        y = sequential(x)
        y.square().sum().backward()
        if fusions:
            assert ("AddTap.forward" in calls) == (passes != "backward")
            assert ("AddTap.backward" in calls) == (passes != "forward")
        results.append([y.detach(), x.grad, sequential[4].scale.grad])
    for fused, unfused in zip(*results, strict=True):
        torch.testing.assert_close(fused, unfused)


def test_a_fused_operation_gets_dtype_and_buffers_of_each_operation() -> None:
    seen: list[Any] = []

    class Spy(Joint):
        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            seen.append((x.dtype, [ctx.dtype for ctx in ctxs], [ctx.index for ctx in ctxs]))
            return super().fuser_forward(ctxs, x, extras)

    sequential = Sequential(Square(), Scale(), Shift(), fusions=(Spy,)).bfloat16()
    sequential(torch.ones(2))
    assert seen == [(torch.bfloat16, [torch.bfloat16, torch.bfloat16], [1, 2])]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU, of which the plan is explained")
def test_a_plan_for_a_gpu_that_is_not_here_is_that_of_hopper():
    linear = ops.GroupedLinear(4, 128, 256, bias=False, dtype=torch.bfloat16)
    told = Sequential(linear).explain(recipe="fp8_current", device="cuda")
    assert "native on cuda (torch finds no GPU here: as on Hopper), bfloat16" in told and "dequantized" not in told
    assert "dequantized for all products (an operand" in Sequential(linear).explain(recipe="mxfp8", device="cuda")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize("recipe", ["fp8_delayed", "fp8_current", "fp8_block", "mxfp8"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_native_in_explain_means_that_no_product_is_dequantized(recipe, dtype, device):
    """The first line and those of the operations read one answer."""
    first, *others = Sequential(ops.Linear(128, 256)).explain(recipe=recipe, device=device, dtype=dtype).splitlines()
    assert ("native on" in first) == ("dequantized" not in "".join(others))
    assert ("emulated on" in first) == ("dequantized for all products" in "".join(others))


class Halved(ops.ScaledSwiGLU):
    """With a formula of its own, which the grouped MLP does not know."""

    def compute(self, x: Tensor, operand: Tensor | None) -> Tensor:
        return super().compute(x, operand) / 2

    def gradients(self, dy: Tensor, x: Tensor | None, operand: Tensor | None, **needs: bool) -> Any:
        return super().gradients(dy / 2, x, operand, **needs)


class Named(ops.ScaledSwiGLU):
    """With the formula of the built-in one."""

    def extra_repr(self) -> str:
        return "named"


@pytest.mark.parametrize("kind", [Halved, Named])
def test_a_subclass_with_a_formula_of_its_own_is_not_fused_as_the_built_in_one(kind: type[ops.ScaledSwiGLU]) -> None:
    torch.manual_seed(0)
    layers = ops.GroupedLinear(2, 8, 16), kind(), ops.GroupedLinear(2, 8, 8)
    fused, unfused = Sequential(*layers), Sequential(*layers, fusions=())
    assert ("GroupedMLP" in fused.explain().split("not fused")[0]) == (kind is Named)
    given = {"split_sizes": [4, 2], "scales": torch.rand(6)}
    x = torch.randn(6, 8)
    torch.testing.assert_close(fused(x, **given), unfused(x, **given))


def test_a_fusion_of_a_users_own_takes_classes_of_its_own() -> None:
    class Mine(Halved):
        pass

    assert fuser.plan._is_kind(Mine(), Halved) and not fuser.plan._is_kind(Mine(), ops.ScaledSwiGLU)


def test_a_step_of_a_subclass_is_what_is_computed_on_a_cpu_too() -> None:
    class Stepped(ops.SwiGLU):
        def step(self) -> Any:
            return ops.GEGLU().step()

    for x in (torch.randn(3, 8), torch.randn(3, 8, dtype=torch.float64)):
        found, expected = x.clone().requires_grad_(), x.clone().requires_grad_()
        y, z = Sequential(Stepped())(found), Sequential(ops.GEGLU())(expected)
        torch.testing.assert_close(y, z)
        y.sum().backward()
        z.sum().backward()
        torch.testing.assert_close(found.grad, expected.grad)
