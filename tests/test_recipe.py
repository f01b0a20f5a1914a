"""Recipes: values, names, answers about themselves."""

import copy
import pickle
from dataclasses import FrozenInstanceError, dataclass, replace

import pytest
import torch

from recipes import (
    Float8CurrentScaling,
    Format,
    HighPrecision,
    MXFP8BlockScaling,
    Needs,
    NVFP4BlockScaling,
    PlanRequest,
    QuantizedTensor,
    Quantizer,
    Recipe,
    Role,
    as_recipe,
)
from recipes.formats import E4M3, E5M2

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BUILT_IN = [HighPrecision(), Float8CurrentScaling(), MXFP8BlockScaling(), NVFP4BlockScaling()]
FP8 = BUILT_IN[1:]


def by_name(recipe):
    return recipe.name


def request_for(recipe, device=CPU, dtype=torch.bfloat16, path=None):
    return PlanRequest(recipe, device, dtype, (Needs(),), True, path, 0)


@pytest.mark.parametrize("recipe", BUILT_IN, ids=by_name)
def test_recipes_are_values(recipe):
    twin = type(recipe)()
    assert twin == recipe and hash(twin) == hash(recipe)
    assert replace(recipe, path="split") != recipe
    assert pickle.loads(pickle.dumps(recipe)) == copy.deepcopy(recipe) == recipe
    assert eval(repr(recipe)) == recipe
    with pytest.raises(FrozenInstanceError):
        recipe.path = "split"


@pytest.mark.parametrize("recipe", FP8, ids=by_name)
def test_quantizers_are_values(recipe):
    for role in Role:
        quantizer = recipe.quantizer(role)
        assert quantizer == recipe.quantizer(role) and hash(quantizer) == hash(recipe.quantizer(role))
        assert pickle.loads(pickle.dumps(quantizer)) == quantizer


def test_recipes_of_different_kinds_differ():
    assert len(set(BUILT_IN)) == len(BUILT_IN)


@pytest.mark.parametrize(
    ("name", "recipe"),
    [
        ("high_precision", HighPrecision()),
        ("none", HighPrecision()),
        ("bf16", HighPrecision()),
        ("fp16", HighPrecision()),
        ("fp32", HighPrecision()),
        ("fp8_current", Float8CurrentScaling()),
        ("mxfp8", MXFP8BlockScaling()),
        ("nvfp4", NVFP4BlockScaling()),
        (None, HighPrecision()),
        (MXFP8BlockScaling(path="split"), MXFP8BlockScaling(path="split")),
    ],
    ids=str,
)
def test_recipes_have_names(name, recipe):
    assert as_recipe(name) == recipe


def test_an_unknown_name_is_answered_with_those_that_exist():
    with pytest.raises(
        ValueError, match=r"no recipe named 'fp8'\. Pass \"high_precision\", .*\"fp8_current\", \"mxfp8\""
    ):
        as_recipe("fp8")
    with pytest.raises(TypeError, match="must be a Recipe or a name"):
        as_recipe(8)


def test_an_unknown_path_is_refused():
    with pytest.raises(ValueError, match=r'path is \'both\', but must be "grouped", "split" or None'):
        MXFP8BlockScaling(path="both")


def test_formats_follow_the_role():
    def forms(recipe):
        return [recipe.quantizer(role).form for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT)]

    assert forms(Float8CurrentScaling()) == [E4M3, E4M3, E5M2]
    assert forms(Float8CurrentScaling(Format.E4M3)) == [E4M3, E4M3, E4M3]
    assert forms(MXFP8BlockScaling()) == [E4M3, E4M3, E4M3]
    assert forms(MXFP8BlockScaling(Format.HYBRID)) == [E4M3, E4M3, E5M2]
    assert forms(MXFP8BlockScaling(Format.E5M2)) == [E5M2, E5M2, E5M2]


def test_high_precision_quantizes_nothing():
    assert [HighPrecision().quantizer(role) for role in Role] == [None, None, None]


def test_support_is_told():
    assert [recipe.support(CPU) for recipe in BUILT_IN] == ["native"] + ["emulated"] * len(FP8)


@pytest.mark.parametrize("recipe", BUILT_IN, ids=by_name)
def test_built_in_recipes_run_grouped(recipe):
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        for device in (CPU, CUDA):
            assert recipe.why_not_grouped(request_for(recipe, device, dtype)) is None
    assert recipe.why_not_grouped(request_for(recipe, CPU, torch.float64)) is None
    assert recipe.why_not_grouped(request_for(recipe, CUDA, torch.float64)) == (
        "There is no grouped kernel for float64 on CUDA; the split path multiplies group by group."
    )


@dataclass(frozen=True)
class Halving(Quantizer):
    """A user's quantizer, which knows single tensors only."""

    def quantize(self, x, *, rowwise=True, columnwise=False) -> QuantizedTensor:
        raise AssertionError("only asked about, not run")


@dataclass(frozen=True)
class HalvedWeights(Recipe):
    def quantizer(self, role):
        return Halving() if role is Role.WEIGHT else None


def test_a_quantizer_of_single_tensors_is_sent_to_the_split_path():
    recipe = HalvedWeights()
    assert recipe.name == "HalvedWeights"
    assert recipe.why_not_grouped(request_for(recipe)) == (
        "Halving knows single tensors only; the split path quantizes group by group."
    )
    for refused in (lambda q: q.quantize_grouped(None, None), lambda q: q.quantize_stacked(None)):
        with pytest.raises(NotImplementedError, match="Halving quantizes single tensors only"):
            refused(Halving())


def test_requests_are_keys_by_value():
    plans = {request_for(MXFP8BlockScaling()): "plan"}
    assert request_for(MXFP8BlockScaling()) in plans
    assert request_for(MXFP8BlockScaling(Format.HYBRID)) not in plans
    assert request_for(MXFP8BlockScaling(), dtype=torch.float32) not in plans
    assert request_for(MXFP8BlockScaling(), path="split") not in plans
    needs = Needs(input=True, params=frozenset({"weight"}))
    assert request_for(MXFP8BlockScaling())._replace(needs=(needs,)) not in plans
