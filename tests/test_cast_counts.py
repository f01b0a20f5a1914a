"""count_casts: what casts lose, told by operation and role."""

import pytest
import torch

from fuser import Sequential, autocast, count_casts, ops
from recipes import (
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    MixedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
)
from recipes.cast_counts import CastCounts

INF, NAN = float("inf"), float("nan")
STATELESS = [
    Float8CurrentScaling(), Float8BlockScaling(), Float8RowwiseScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()
]  # fmt: skip


def cast(recipe, x, op=None, **extras):
    op = op or ops.Linear(x.shape[-1], 16, bias=False)
    with torch.no_grad(), autocast(recipe), count_casts(op) as counted:
        op(x, **extras)
    return counted.counts


@pytest.mark.parametrize("recipe", STATELESS, ids=lambda recipe: recipe.name)
def test_ordinary_numbers_lose_nothing(recipe):
    counts = cast(recipe, torch.randn(64, 128).sign() * (3 + 2 * torch.rand(64, 128)))
    assert list(counts) == [".input", ".weight"]
    assert counts[".input"] == CastCounts(64 * 128, 0, 0, 0)


@pytest.mark.parametrize("recipe", STATELESS, ids=lambda recipe: recipe.name)
def test_what_is_not_finite_is_counted(recipe):
    x = torch.randn(32, 128)
    x[3, 5], x[20, 100] = INF, NAN
    found = cast(recipe, x)[".input"]
    assert found.non_finite == 2 and found.saturated == 1


def test_what_vanishes_is_counted():
    x = torch.full((4, 128), 2.0**-30)
    x[:, 0] = 1.0
    found = cast(MXFP8BlockScaling(), x)[".input"]
    assert found == CastCounts(512, 0, 4 * 31, 0)  # the blocks without a 1 have scales of their own


@pytest.mark.parametrize(("form", "limit"), [("E4M3", 464.0), ("HYBRID", 464.0), ("E5M2", 61440.0)])
def test_a_scale_of_the_past_saturates(form, limit):
    """Delayed scaling begins with scales of 1: what rounds to the next number above the largest is saturated."""
    recipe = DelayedScaling(fp8_format=getattr(DelayedScaling().fp8_format, form))
    x = torch.zeros(2, 128)
    x[0, :4] = torch.tensor([limit, -limit, limit * 1.001, -1e6])
    assert cast(recipe, x)[".input"] == CastCounts(256, 2, 0, 0)


def test_rows_of_no_group_do_not_count():
    x = torch.full((10, 32), NAN)
    x[:7] = 1.0
    counts = cast(MXFP8BlockScaling(), x, ops.GroupedLinear(3, 32, 16), split_sizes=[2, 0, 5])
    assert counts[".input"] == CastCounts(7 * 32, 0, 0, 0)


def test_a_context_counts_what_is_cast_in_one_inside_of_it():
    model, x = Sequential(ops.Linear(32, 32), ops.Linear(32, 32)), torch.randn(4, 32)
    with autocast("mxfp8"), count_casts(model) as outer:
        with count_casts() as inner:
            model(x)
        assert list(outer.counts.values()) == list(inner.counts.values()) and len(outer.counts) == 4
        model(x)
    assert [2 * counts.elements for counts in inner.counts.values()] == [c.elements for c in outer.counts.values()]


@pytest.mark.parametrize("path", ["grouped", "split"])
def test_a_model_names_its_operations(path):
    model = torch.nn.ModuleDict(
        {"experts": Sequential(ops.GroupedLinear(2, 32, 64), ops.SwiGLU(), ops.GroupedLinear(2, 32, 32), path=path)}
    )
    x = torch.randn(8, 32, requires_grad=True)
    with count_casts(model) as counted, autocast("fp8_current"):
        model["experts"](x, split_sizes=[3, 5]).sum().backward()
    assert set(counted.counts) == {f"experts.{i}.{r}" for i in (0, 2) for r in ("input", "weight", "grad_output")}
    assert counted.counts["experts.0.input"].elements == 8 * 32
    assert "experts.2.grad_output" in counted.report()


def test_without_a_model_classes_name_them():
    op = Sequential(ops.Linear(32, 32), ops.Linear(32, 32))
    with count_casts() as counted, autocast("mxfp8"), torch.no_grad():
        op(torch.randn(4, 32))
    assert list(counted.counts) == ["Linear#0.input", "Linear#0.weight", "Linear#1.input", "Linear#1.weight"]


def test_counting_changes_no_bit():
    model = Sequential(ops.Linear(32, 64), ops.GELU(), ops.Linear(64, 32))
    x = torch.randn(8, 32)
    with autocast("mxfp8"):
        expected = model(x)
        with count_casts():
            assert torch.equal(model(x), expected)


@pytest.mark.parametrize("model", [3, "experts", Sequential, [ops.Linear(2, 2)]], ids=repr)
def test_only_a_model_names_operations(model):
    with pytest.raises(TypeError, match="model is .*, but must be a torch.nn.Module, or None"), count_casts(model):
        raise AssertionError("must not be entered")


def test_a_copy_in_high_precision_loses_nothing():
    """MixedScaling's rowwise copy of the input is the input."""
    op = ops.Linear(8, 5)
    with count_casts(op) as counted, autocast(MixedScaling(input_for_wgrad="mxfp8")):
        op(torch.randn(6, 8)).sum().backward()
    assert counted.counts
    for counts in counted.counts.values():
        assert counts.elements and not (counts.saturated or counts.flushed or counts.non_finite)
