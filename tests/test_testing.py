"""check_fusion: what is right passes, and each way of being wrong is found and named."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fused import GroupedMLP
from fuser import BasicOperation, FusedOperation, Sequential, ops, testing
from fuser.testing import check_fusion, compare, poisoned_memory, random_splits


class Scale(BasicOperation):
    """y = s x, with a learnable s [features]."""

    class Saved(NamedTuple):
        x: Tensor

    def __init__(self, features: int = 3) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.linspace(1, 2, features))

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctx.needs_grad:
            ctx.saved = self.Saved(x)
        return x * ctx.param("scale"), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        d_scale = (dy * ctx.saved.x).sum(0) if "scale" in ctx.needs.params else None
        return (dy * ctx.param("scale") if ctx.needs.input else None), {"scale": d_scale}, {}


class Multiply(BasicOperation):
    """y = x * other for the extra input `other`; the product once more as the extra output `product`."""

    extra_inputs = {"other": Tensor}
    extra_outputs = {"product": Tensor}

    class Saved(NamedTuple):
        x: Tensor
        other: Tensor

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, extras["other"])
        y = x * extras["other"]
        return y, {"product": y}

    def fuser_backward(self, ctx: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        both = [g for g in (dy, d_extra_outputs.get("product")) if g is not None]
        d = sum(both[1:], both[0])
        return d * ctx.saved.other, {}, {"other": d * ctx.saved.x}


class Right(FusedOperation):
    """Scale -> Multiply in one. The fusions below are this one with one fault each."""

    pattern = (Scale, Multiply)

    class Saved(NamedTuple):
        x: Tensor
        other: Tensor

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if any(ctx.needs_grad for ctx in ctxs):
            ctxs[0].saved = self.Saved(x, extras["other"])
        y = torch.empty_like(x)
        torch.mul(x * ctxs[0].param("scale"), extras["other"], out=y)
        return y, {"product": y}

    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        both = [g for g in (dy, d_extra_outputs.get("product")) if g is not None]
        d = sum(both[1:], both[0])
        saved, scale = ctxs[0].saved, ctxs[0].param("scale")
        d_scaled = d * saved.other
        d_scale = (d_scaled * saved.x).sum(0) if "scale" in ctxs[0].needs.params else None
        dx = d_scaled * scale if ctxs[0].needs.input else None
        return dx, ({"scale": d_scale}, {}), {"other": d * saved.x * scale}


class WrongY(Right):
    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        y, outputs = super().fuser_forward(ctxs, x, extras)
        y[-1, -1] += 1e-6
        return y, outputs


class LeavesARowUnwritten(Right):
    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        y, _ = super().fuser_forward(ctxs, x, extras)
        result = torch.empty_like(y)
        result[:-1] = y[:-1]
        return result, {"product": y}


class WrongExtraOutput(Right):
    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        y, _ = super().fuser_forward(ctxs, x, extras)
        return y, {"product": 1.001 * y}


class WrongWithoutGrad(Right):
    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        y, outputs = super().fuser_forward(ctxs, x, extras)
        return (y if any(ctx.needs_grad for ctx in ctxs) else 2 * y), outputs


class WrongDx(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        dx, d_parameters, d_extras = super().fuser_backward(ctxs, dy, d_extra_outputs)
        return None if dx is None else 1.001 * dx, d_parameters, d_extras


class WrongParameterGradient(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        dx, (d, nothing), d_extras = super().fuser_backward(ctxs, dy, d_extra_outputs)
        return dx, ({name: g if g is None else -g for name, g in d.items()}, nothing), d_extras


class NoParameterGradient(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        dx, _, d_extras = super().fuser_backward(ctxs, dy, d_extra_outputs)
        return dx, ({}, {}), d_extras


class WrongExtraGradient(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        dx, d_parameters, d_extras = super().fuser_backward(ctxs, dy, d_extra_outputs)
        return dx, d_parameters, {"other": d_extras["other"].flip(0)}


class ForgetsTheExtraOutputsGradient(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return super().fuser_backward(ctxs, dy, {})


class WrongWhenFrozen(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        dx, d_parameters, d_extras = super().fuser_backward(ctxs, dy, d_extra_outputs)
        frozen = "scale" not in ctxs[0].needs.params
        return (2 * dx if frozen and dx is not None else dx), d_parameters, d_extras


class WrongWhenXIsFrozen(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        dx, (d, nothing), d_extras = super().fuser_backward(ctxs, dy, d_extra_outputs)
        return dx, (d if ctxs[0].needs.input else {"scale": 2 * d["scale"]}, nothing), d_extras


class WrongWhenAnExtraIsFrozen(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        dx, d_parameters, d_extras = super().fuser_backward(ctxs, dy, d_extra_outputs)
        return (dx if ctxs[1].needs.extras or dx is None else 2 * dx), d_parameters, d_extras


class WrongForYAlone(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        dx, d_parameters, d_extras = super().fuser_backward(ctxs, dy, d_extra_outputs)
        return (dx if "product" in d_extra_outputs or dx is None else 2 * dx), d_parameters, d_extras


class WrongWithoutDy(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        dx, d_parameters, d_extras = super().fuser_backward(ctxs, dy, d_extra_outputs)
        return (dx if dy is not None or dx is None else 2 * dx), d_parameters, d_extras


class ReadsDyByItsAddress(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        if dy is not None and not dy.is_contiguous() and 0 not in dy.stride():
            dy = dy.as_strided(dy.shape, (dy.shape[1], 1))
        return super().fuser_backward(ctxs, dy, d_extra_outputs)


class WritesIntoX(Right):
    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        result = super().fuser_forward(ctxs, x, extras)
        if not any(ctx.needs_grad for ctx in ctxs):
            x.mul_(2)
        return result


class WritesIntoDy(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        result = super().fuser_backward(ctxs, dy, d_extra_outputs)
        if dy is not None:
            dy.mul_(2)
        return result


class WritesIntoAnExtra(Right):
    def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        result = super().fuser_backward(ctxs, dy, d_extra_outputs)
        ctxs[0].saved.other.mul_(2)
        return result


class WrongShape(Right):
    """Its dx has a wrong shape, too, but y is compared first."""

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        y, outputs = super().fuser_forward(ctxs, x, extras)
        return y.unsqueeze(0), outputs


def operations() -> list[BasicOperation]:
    return [Scale(), Multiply()]


def check(fusion: Any, **settings: Any) -> Any:
    return check_fusion(fusion, operations, (5, 3), extras={"other": (5, 3)}, **settings)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_right_fusion_passes_and_its_differences_are_returned(dtype: torch.dtype) -> None:
    differences = check(Right, dtype=dtype)
    assert [difference.name for difference in differences] == [
        "y", "product", "y without grad mode", "gradient of x", "gradient of 0.scale", "gradient of other",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("fusion", "culprit"),
    [
        (WrongY, "y is off by"),
        (LeavesARowUnwritten, "y is off by inf"),
        (WrongExtraOutput, "product is off by"),
        (WrongWithoutGrad, "y without grad mode is off by"),
        (WrongDx, "gradient of x is off by"),
        (WrongParameterGradient, "gradient of 0.scale is off by"),
        (NoParameterGradient, "gradient of 0.scale is off by inf"),
        (WrongExtraGradient, "gradient of other is off by"),
        (ForgetsTheExtraOutputsGradient, "gradient of x is off by"),
        (WrongWhenFrozen, "gradient of x is off by"),
        (WrongWhenXIsFrozen, "draw 2: gradient of 0.scale is off by"),
        (WrongWhenAnExtraIsFrozen, "draw 4: gradient of x is off by"),
        (WrongForYAlone, "draw 1: gradient of x is off by"),
        (WrongWithoutDy, "draw 3: gradient of x is off by"),
        (ReadsDyByItsAddress, "draw 6: gradient of x is off by"),
        (WritesIntoX, "y is off by|x was changed in place"),
        (WritesIntoDy, "WritesIntoDy, draw 0: the gradient of y was changed in place"),
        (WritesIntoAnExtra, "WritesIntoAnExtra, draw 0: other was changed in place"),
        (WrongShape, r"y is \[1, 5, 3\] torch.float64, expected \[5, 3\]"),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else "",
)
def test_a_wrong_fusion_is_found_and_what_is_wrong_is_named(fusion: Any, culprit: str) -> None:
    with pytest.raises(AssertionError, match=culprit):
        check(fusion)


def test_the_message_gives_the_worst_index_and_the_tolerance() -> None:
    message = r"WrongY, draw 0: y is off by 1.000e-06 at \(4, 2\) \(RMS .*\); allowed 1.0e-12 of"
    with pytest.raises(AssertionError, match=message):
        check(WrongY)


def test_a_tolerance_may_be_given() -> None:
    check(WrongY, tolerance=1e-4)


def test_a_fusion_whose_pattern_is_not_there_is_found() -> None:
    class Elsewhere(Right):
        pattern = (Multiply, Scale)

    with pytest.raises(AssertionError, match="Elsewhere was not used"):
        check(Elsewhere)


def test_a_fusion_that_always_refuses_is_found() -> None:
    class Refuses(Right):
        @classmethod
        def why_not(cls, operations: Any, request: Any) -> str | None:
            return "the moon is full."

    with pytest.raises(AssertionError, match=r"(?s)Refuses was not used.*the moon is full"):
        check(Refuses)


def test_a_fusion_that_is_for_no_grad_mode_alone_is_checked_there() -> None:
    class InInference(Right):
        @classmethod
        def why_not(cls, operations: Any, request: Any) -> str | None:
            return "it is for inference." if request.needs[0] or any(request.needs[1]) else None

    class WrongInInference(InInference):
        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            y, outputs = super().fuser_forward(ctxs, x, extras)
            return y + 1, outputs

    check(InInference)
    with pytest.raises(AssertionError, match="WrongInInference, draw 0: y without grad mode is off by"):
        check(WrongInInference)


def test_a_wrong_forward_only_fusion_is_found_by_the_backward_of_the_operations() -> None:
    class FillsWrongly(Right):
        passes = "forward"

        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            y, outputs = super().fuser_forward(ctxs, x, extras)
            ctxs[0].saved = Scale.Saved(x)
            ctxs[1].saved = Multiply.Saved(x, extras["other"])  # not scaled
            return y, outputs

    class FillsRightly(FillsWrongly):
        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            result = super().fuser_forward(ctxs, x, extras)
            ctxs[1].saved = Multiply.Saved(x * ctxs[0].param("scale"), extras["other"])
            return result

    check(FillsRightly)
    with pytest.raises(AssertionError, match="gradient of other is off by"):
        check(FillsWrongly)


def test_a_backward_only_fusion_is_checked() -> None:
    class Backward(FusedOperation):
        pattern = (Scale, Multiply)
        passes = "backward"

        def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            both = [g for g in (dy, d_extra_outputs.get("product")) if g is not None]
            d = sum(both[1:], both[0])
            d_scaled = d * ctxs[1].saved.other
            needs = ctxs[0].needs
            d_scale = (d_scaled * ctxs[0].saved.x).sum(0) if "scale" in needs.params else None
            dx = d_scaled * ctxs[0].param("scale") if needs.input else None
            return dx, ({"scale": d_scale}, {}), {"other": d * ctxs[1].saved.x}

    class Wrong(Backward):
        def fuser_backward(self, ctxs: Any, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]) -> Any:
            dx, d_parameters, d_extras = super().fuser_backward(ctxs, dy, d_extra_outputs)
            return dx, d_parameters, {"other": 2 * d_extras["other"]}

    check(Backward)
    with pytest.raises(AssertionError, match="gradient of other is off by"):
        check(Wrong)


class Square(BasicOperation):
    class Saved(NamedTuple):
        x: Tensor

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctx.needs_grad:
            ctx.saved = self.Saved(x)
        return x * x, {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return 2 * dy * ctx.saved.x, {}, {}


class FourthPower(FusedOperation):
    pattern = (Square, Square)

    class Saved(NamedTuple):
        x: Tensor

    @classmethod
    def why_not(cls, operations: Any, request: Any) -> str | None:
        return "it is for float64 alone." if request.dtype != torch.float64 else None

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctxs[0].needs_grad:
            ctxs[0].saved = self.Saved(x)
        return (x * x) * (x * x), {}

    def fuser_backward(self, ctxs: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return 4 * dy * ctxs[0].saved.x ** 3, ({}, {}), {}


def test_operations_without_parameters_are_checked_in_the_dtype_that_was_asked_for() -> None:
    check_fusion(FourthPower, lambda: [Square(), Square()], (5, 3))
    with pytest.raises(AssertionError, match="FourthPower was not used"):
        check_fusion(FourthPower, lambda: [Square(), Square()], (5, 3), dtype=torch.float32)


class ScaleDropout(FusedOperation):
    """Scale -> Dropout, by calling both; they draw as many random numbers as unfused."""

    pattern = (Scale, ops.Dropout)
    passes = "forward"

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        for ctx in ctxs:
            x, _ = ctx.operation.fuser_forward(ctx, x, extras)
        return x, {}


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_both_runs_draw_the_same_random_numbers_and_leave_the_callers_alone(device: str) -> None:
    expected = torch.random.get_rng_state(), torch.rand(3, device=device)  # seeded by conftest
    torch.manual_seed(0)
    check_fusion(ScaleDropout, lambda: [Scale(), ops.Dropout(0.5)], (40, 3), device=device, tolerance=0)
    assert torch.equal(torch.random.get_rng_state(), expected[0])
    assert torch.equal(torch.rand(3, device=device), expected[1])


def test_the_grouped_mlp_passes_under_a_recipe_with_stochastic_rounding() -> None:
    def grouped_mlp() -> list[BasicOperation]:
        return [ops.GroupedLinear(2, 32, 64), ops.ScaledSwiGLU(), ops.GroupedLinear(2, 32, 32)]

    scales: Any = {"scales": (20,)}
    check_fusion(GroupedMLP, grouped_mlp, (20, 32), extras=scales, num_groups=2, recipe="nvfp4", dtype=torch.float32)


class Take(BasicOperation):
    """y = x[indices]."""

    extra_inputs = {"indices": ops.IndexTensor}

    class Saved(NamedTuple):
        x: Tensor
        indices: Tensor

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, extras["indices"])
        return x[extras["indices"]], {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        return torch.zeros_like(ctx.saved.x).index_add(0, ctx.saved.indices, dy), {}, {}


class ScaleTake(FusedOperation):
    pattern = (Scale, Take)
    passes = "forward"
    shift = 0

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        scaled, _ = ctxs[0].operation.fuser_forward(ctxs[0], x, extras)
        return ctxs[1].operation.fuser_forward(ctxs[1], scaled.roll(self.shift, 0), extras)


def test_a_fusion_that_takes_indices_is_checked_with_those_given() -> None:
    def check_take(fusion: Any, indices: Any) -> None:
        check_fusion(fusion, lambda: [Scale(), Take()], (5, 3), extras={"indices": indices})

    check_take(ScaleTake, torch.tensor([4, 0, 4]))
    with pytest.raises(AssertionError, match="y is off by"):
        check_take(type("Rolls", (ScaleTake,), {"shift": 1}), torch.tensor([4, 0, 4]))
    with pytest.raises(ValueError, match="'indices' of kind IndexTensor, .* Give the tensor itself in extras."):
        check_take(ScaleTake, (3,))


class Mean(BasicOperation):
    extra_outputs: ClassVar = {"mean": Tensor}

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        ctx.rows, ctx.columns = x.shape
        return x, {"mean": x.mean()}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        if "mean" not in d_extra_outputs:
            return dy, {}, {}
        d = (d_extra_outputs["mean"] / (ctx.rows * ctx.columns)).expand(ctx.rows, ctx.columns)
        return d if dy is None else dy + d, {}, {}


class ScaleMean(FusedOperation):
    pattern = (Scale, Mean)
    passes = "forward"
    times = 1

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        scaled, _ = ctxs[0].operation.fuser_forward(ctxs[0], x, extras)
        y, made = ctxs[1].operation.fuser_forward(ctxs[1], scaled, extras)
        return y, {"mean": made["mean"] * self.times}


def test_an_extra_output_may_be_a_scalar() -> None:
    check_fusion(ScaleMean, lambda: [Scale(), Mean()], (4, 3))
    with pytest.raises(AssertionError, match="mean is off by"):
        check_fusion(type("Doubles", (ScaleMean,), {"times": 2}), lambda: [Scale(), Mean()], (4, 3))


@pytest.mark.parametrize(
    ("fusion", "settings", "error", "message"),
    [
        (None, {}, TypeError, "None is not a fusion. Give a subclass of FusedOperation"),
        (Scale, {}, TypeError, "Scale.* is not a fusion. Give a subclass of FusedOperation"),
        (Right, {"draws": 0}, ValueError, "draws=0. It must be positive"),
        (Right, {"dtype": torch.int32}, TypeError, "dtype is torch.int32, but must be one of torch.float64, "),
        (Right, {"dtype": "bf16"}, TypeError, "dtype is 'bf16', but must be one of torch.float64, "),
    ],
)
def test_a_check_of_nothing_is_refused(
    fusion: Any, settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        check(fusion, **settings)


def test_extras_that_no_operation_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="extras has 'othre', but the operations ask for: 'other'. Leave it out."):
        check_fusion(Right, operations, (5, 3), extras={"other": (5, 3), "othre": (5, 3)})


def test_what_is_missing_is_asked_for() -> None:
    with pytest.raises(ValueError, match="The operations ask for 'other'. Give its shape in extras"):
        check_fusion(Right, operations, (5, 3))

    with pytest.raises(ValueError, match="The operations ask for 'split_sizes'. Give num_groups"):
        check_fusion(RowsPastTheSum, two_grouped_linears, (7, 4))


def two_grouped_linears() -> list[BasicOperation]:
    return [ops.GroupedLinear(3, 4, 5), ops.GroupedLinear(3, 5, 4)]


class RowsPastTheSum(FusedOperation):
    """Two GroupedLinears, run one after the other; `fault` breaks one corner case."""

    pattern = (ops.GroupedLinear, ops.GroupedLinear)
    fault = ""

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        h, _ = self.operations[0].fuser_forward(ctxs[0], x, extras)
        y, _ = self.operations[1].fuser_forward(ctxs[1], h, extras)
        active = sum(extras["split_sizes"].tolist())
        if self.fault == "tail" and active < x.shape[0]:
            y[active:] = torch.empty_like(y[active:])
        return y, {}

    def fuser_backward(self, ctxs: Any, dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        sizes = ctxs[0].saved.splits.tolist()
        dh, second, _ = self.operations[1].fuser_backward(ctxs[1], dy, {})
        dx, first, _ = self.operations[0].fuser_backward(ctxs[0], dh, {})
        if self.fault == "empty group" and 0 in sizes and "weight" in first:
            first = {**first, "weight": first["weight"].clone()}
            first["weight"][sizes.index(0)] = torch.empty_like(first["weight"][0])
        return dx, (first, second), {}


@pytest.mark.parametrize(
    ("fault", "culprit"),
    [("", None), ("tail", "y is off by inf"), ("empty group", "gradient of 0.weight is off by inf")],
)
def test_splits_with_empty_groups_and_rows_left_over_are_drawn(fault: str, culprit: str | None) -> None:
    fusion = type("Fusion", (RowsPastTheSum,), {"fault": fault})

    with nullcontext() if culprit is None else pytest.raises(AssertionError, match=culprit):
        check_fusion(fusion, two_grouped_linears, (7, 4), num_groups=3)


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8", "fp8_block"])
def test_the_recipe_is_in_force_in_both_runs(recipe: str) -> None:
    seen: list[str] = []

    class Spy(Right):
        def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
            seen.append(ctxs[0].recipe.name)
            return super().fuser_forward(ctxs, x, extras)

    check(Spy, recipe=recipe)
    assert set(seen) == {recipe}


@pytest.mark.parametrize("kind", range(5))
def test_random_splits_fit_the_rows(kind: int) -> None:
    generator = torch.Generator().manual_seed(kind)
    for _ in range(20):
        sizes = random_splits(4, 9, generator, kind=kind)
        assert sizes.shape == (4,) and sizes.dtype == torch.int64
        assert (sizes >= 0).all() and sizes.sum() <= 9


def test_random_splits_show_the_corner_cases() -> None:
    generator = torch.Generator().manual_seed(0)
    one = random_splits(4, 9, generator, kind=1)
    assert sorted(one.tolist()) == [0, 0, 0, 9]
    assert random_splits(4, 9, generator, kind=2).tolist() == [0, 0, 0, 0]
    assert any(0 < random_splits(4, 9, generator, kind=3).sum() < 9 for _ in range(20))
    assert random_splits(4, 0, generator, kind=0).tolist() == [0, 0, 0, 0]


def test_memory_is_poisoned_inside_and_the_setting_comes_back() -> None:
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    with pytest.raises(KeyError), poisoned_memory():
        assert torch.empty(3).isnan().all()
        raise KeyError
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert not torch.are_deterministic_algorithms_enabled()


def test_compare_counts_nan_as_infinitely_far_unless_both_have_it() -> None:
    nan = float("nan")
    assert compare("a", torch.tensor([1.0, nan]), torch.tensor([1.0, 2.0])).largest == float("inf")
    assert compare("a", torch.tensor([1.0, 2.0]), torch.tensor([nan, 2.0])).largest == float("inf")
    assert compare("a", torch.tensor([1.0, nan]), torch.tensor([1.0, nan])).largest == 0
    assert compare("a", torch.tensor([float("inf")]), torch.tensor([float("inf")])).largest == 0


def test_compare_says_where_the_worst_is() -> None:
    expected = torch.zeros(2, 3)
    actual = expected.clone()
    actual[1, 2] = 0.5
    difference = compare("a", actual, expected)
    assert difference.worst_index == (1, 2) and difference.largest == 0.5
    assert difference.rms == pytest.approx((0.25 / 6) ** 0.5)


def test_compare_tells_none_from_zeros() -> None:
    assert compare("a", None, None).largest == 0
    assert compare("a", torch.zeros(2), None).largest == float("inf")
    assert compare("a", None, torch.zeros(2)).largest == float("inf")


def test_everything_that_check_fusion_needs_is_handed_on() -> None:
    assert testing.check_fusion is check_fusion


# ------------------------------------------------------------------------------------------------ rounds_less


class Halfway(FusedOperation):
    """ConstantScale -> ConstantScale forward, rounded as unfused. It says that it rounds less."""

    pattern = (ops.ConstantScale, ops.ConstantScale)
    passes = "forward"
    rounds_less = True

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        for operation, ctx in zip(self.operations, ctxs, strict=True):
            x, _ = operation.fuser_forward(ctx, x, extras)
        return x, {}


class Once(Halfway):
    """Rounded once."""

    def fuser_forward(self, ctxs: Any, x: Tensor, extras: Mapping[str, Any]) -> Any:
        first, second = self.operations
        super().fuser_forward(ctxs, x, extras)
        return (x.double() * first.scale * second.scale).to(x.dtype), {}


class OnceUndeclared(Once):
    rounds_less = False


def scales() -> list[BasicOperation]:
    return [ops.ConstantScale(0.3), ops.ConstantScale(1.7)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_what_rounds_less_is_held_to_float64(dtype: torch.dtype) -> None:
    differences = check_fusion(Once, scales, (40, 30), dtype=dtype)
    assert {difference.name: difference.largest for difference in differences}["gradient of x"] == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_second_rounding_is_found(dtype: torch.dtype) -> None:
    with pytest.raises(AssertionError, match="Halfway, draw 0: y is off by"):
        check_fusion(Halfway, scales, (40, 30), dtype=dtype)


def test_one_rounding_less_that_is_not_declared_has_other_bits() -> None:
    with pytest.raises(AssertionError, match="OnceUndeclared, draw 0: y is off by"):
        check_fusion(OnceUndeclared, scales, (40, 30), dtype=torch.bfloat16, tolerance=0)


def test_the_plan_names_what_rounds_less() -> None:
    plans = [Sequential(*scales(), fusions=(kind,)).explain() for kind in (Once, OnceUndeclared)]
    assert ["rounds less often than unfused" in plan for plan in plans] == [True, False]
