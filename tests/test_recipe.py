"""Recipes: values, names, answers about themselves."""

import copy
import json
import pickle
from dataclasses import FrozenInstanceError, dataclass, field, replace
from functools import cached_property

import numpy as np
import pytest
import torch

from recipes import (
    CustomRecipe,
    DelayedScaling,
    Float8BlockScaling,
    Float8CurrentScaling,
    Float8RowwiseScaling,
    Format,
    FormatQuantizer,
    HighPrecision,
    MixedScaling,
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
from recipes.tensors.formats import E4M3, E5M2, Float8Format

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BUILT_IN = [
    HighPrecision(),
    DelayedScaling(),
    Float8CurrentScaling(),
    Float8BlockScaling(),
    Float8RowwiseScaling(),
    MXFP8BlockScaling(),
    NVFP4BlockScaling(),
]
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
        ("fp8_block", Float8BlockScaling()),
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
        ValueError, match=r"no recipe named 'fp8'\. Pass \"high_precision\", .*\"fp8_current\", .*\"mxfp8\""
    ):
        as_recipe("fp8")
    with pytest.raises(TypeError, match="must be a Recipe or a name"):
        as_recipe(8)


class Switched(MXFP8BlockScaling):
    def __init__(self, roles: tuple[Role, ...] = ()) -> None:
        super().__init__()
        self.roles = roles

    def quantizer(self, role: Role) -> Quantizer | None:
        return super().quantizer(role) if role in self.roles else None


class SwitchedByValue(Switched):
    def __eq__(self, other: object) -> bool:
        return isinstance(other, SwitchedByValue) and self.roles == other.roles

    def __hash__(self) -> int:
        return hash(self.roles)

    @cached_property
    def number(self) -> int:
        return len(self.roles)


@dataclass(frozen=True)
class Listed(HighPrecision):
    layers: list[str] = field(default_factory=list)


def test_recipes_that_are_equal_and_differ_are_refused():
    """The second would run with the plan of the first."""
    assert Switched() == Switched(tuple(Role))
    with pytest.raises(TypeError, match=r"Switched.roles is no field, .* Put @dataclass\(frozen=True\) above Switched"):
        as_recipe(Switched())
    recipe = SwitchedByValue(tuple(Role))
    assert as_recipe(recipe) is recipe and recipe.number == 3 and as_recipe(recipe) is recipe
    with pytest.raises(TypeError, match=r"Listed .* has no hash: unhashable type: 'list'\. Give it fields"):
        as_recipe(Listed())


def test_an_unknown_path_is_refused():
    with pytest.raises(ValueError, match=r'path is \'both\', but must be "grouped", "split" or None'):
        MXFP8BlockScaling(path="both")


@pytest.mark.parametrize(
    "dtype, largest, message",
    [
        pytest.param(torch.float8_e4m3fn, 449.0, "must be from 4 to 448", id="beyond-the-dtype"),
        pytest.param(torch.float8_e4m3fn, float("nan"), "must be from 4 to 448", id="nan"),
        pytest.param(torch.float8_e5m2, 1.0, "must be from 4 to 57344", id="tiny"),
        pytest.param(torch.float8_e4m3fnuz, 240.0, "must be torch.float8_e4m3fn or torch.float8_e5m2", id="dtype"),
    ],
)
def test_a_format_that_kernels_do_not_know_is_refused(dtype, largest, message):
    with pytest.raises(ValueError, match=message):
        Float8Format("own", dtype, largest)


def test_formats_follow_the_role():
    def forms(recipe):
        return [recipe.quantizer(role).form for role in (Role.INPUT, Role.WEIGHT, Role.GRAD_OUTPUT)]

    assert forms(Float8CurrentScaling()) == [E4M3, E4M3, E5M2]
    assert forms(Float8CurrentScaling(Format.E4M3)) == [E4M3, E4M3, E4M3]
    assert forms(Float8RowwiseScaling()) == [E4M3, E4M3, E4M3]
    assert forms(Float8RowwiseScaling(Format.HYBRID)) == [E4M3, E4M3, E5M2]
    assert forms(MXFP8BlockScaling()) == [E4M3, E4M3, E4M3]
    assert forms(MXFP8BlockScaling(Format.HYBRID)) == [E4M3, E4M3, E5M2]
    assert forms(MXFP8BlockScaling(Format.E5M2)) == [E5M2, E5M2, E5M2]


def test_high_precision_quantizes_nothing():
    assert [HighPrecision().quantizer(role) for role in Role] == [None, None, None]


def test_support_says_what_is_native():
    assert [recipe.support(CPU) for recipe in BUILT_IN] == ["native"] + ["emulated"] * (len(BUILT_IN) - 1)


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


# -------------------------------------------------------------------------------------------------- fields' kinds

INTEGERS = [(DelayedScaling, "margin"), (DelayedScaling, "amax_history_len")]
FLAGS = [
    *[(DelayedScaling, name) for name in ("reduce_amax", "split_accumulator_fprop", "split_accumulator_wgrad")],
    *[(Float8CurrentScaling, name) for name in ("power_2_scale", "split_accumulator_dgrad")],
    (Float8BlockScaling, "use_f32_scales"),
    (Float8RowwiseScaling, "power_2_scale"),
    (MXFP8BlockScaling, "enable_2d_quantization"),
    *[(NVFP4BlockScaling, name) for name in ("disable_rht", "disable_stochastic_rounding", "disable_2d_quantization")],
    (NVFP4BlockScaling, "row_scaled_activation"),
]
FORMATS = [DelayedScaling, Float8CurrentScaling, Float8BlockScaling, Float8RowwiseScaling, MXFP8BlockScaling]


@pytest.mark.parametrize(("kind", "field"), INTEGERS)
@pytest.mark.parametrize("value", [1.0, 2.5, float("nan"), True, "1", None, 1j, [1]], ids=repr)
def test_integers_are_integers(kind, field, value):
    with pytest.raises(TypeError, match=f"{field} is .*, but must be an integer. Pass an int"):
        kind(**{field: value})


@pytest.mark.parametrize(("kind", "field"), FLAGS)
@pytest.mark.parametrize("value", ["no", 0, None], ids=repr)
def test_flags_are_true_or_false(kind, field, value):
    with pytest.raises(TypeError, match=f"{field} is .*, but must be True or False"):
        kind(**{field: value})


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("value", ["HYBRID", E4M3, None, torch.float8_e4m3fn], ids=repr)
def test_a_format_is_a_member_of_the_enum(kind, value):
    members = "Format.HYBRID, Format.E4M3, Format.E5M2"
    with pytest.raises(TypeError, match=f"fp8_format is .*, but must be a Format. Pass one of {members}"):
        kind(fp8_format=value)


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling, Float8RowwiseScaling])
def test_an_epsilon_is_a_number_that_may_be_an_amax(kind):
    for value in (-1.0, -1, float("nan"), float("inf"), 10**400):
        with pytest.raises(ValueError, match="amax_epsilon (is|has) .*(cannot be negative|more than a float holds)"):
            kind(amax_epsilon=value)
    for value in ("0", None, True, 1j, torch.tensor(1.0)):
        with pytest.raises(TypeError, match="amax_epsilon is .*, but must be a number"):
            kind(amax_epsilon=value)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: DelayedScaling(margin=127), ValueError, "margin is 127, but .* from -126 to 126"),
        (lambda: DelayedScaling(margin=-2000), ValueError, "margin is -2000, but"),
        (lambda: DelayedScaling(amax_history_len=-1), ValueError, "amax_history_len is -1, but must be at least 1"),
        (lambda: DelayedScaling(amax_compute_algo=None), ValueError, "amax_compute_algo is None, but must be"),
        (lambda: DelayedScaling(scaling_factor_compute_algo="max"), TypeError, "is 'max', but must be a function"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=1.0), ValueError, "x_block_scaling_dim is 1.0, but must be 1"),
        (lambda: Float8BlockScaling(x_block_scaling_dim=True), ValueError, "x_block_scaling_dim is True, but must be"),
        (lambda: MXFP8BlockScaling(scaling=["floor"]), ValueError, "scaling is .'floor'., but must be"),
        (lambda: MixedScaling(weight=8), TypeError, "weight is 8, but must be a Recipe or a name"),
        (lambda: MixedScaling(MXFP8BlockScaling), TypeError, r"input is the class MXFP8.*Give MXFP8BlockScaling\(\)"),
        (lambda: MixedScaling(input_for_wgrad="mxfp9"), ValueError, "no recipe named 'mxfp9'"),
        (lambda: MXFP8BlockScaling(path=True), ValueError, "path is True, but must be"),
    ],
)
def test_each_field_is_checked_by_its_recipe(make, error, message):
    with pytest.raises(error, match=message):
        make()


def test_numbers_of_numpy_become_pythons_own():
    recipe = DelayedScaling(margin=np.int64(2), amax_history_len=np.int32(8))
    assert recipe == DelayedScaling(margin=2, amax_history_len=8)
    assert Recipe.from_dict(json.loads(json.dumps(recipe.to_dict()))) == recipe
    assert type(Float8CurrentScaling(amax_epsilon=np.float32(0.5)).amax_epsilon) is float


def test_a_class_is_answered_with_how_to_make_a_recipe_of_it():
    with pytest.raises(
        TypeError, match=r"recipe is the class MXFP8BlockScaling, not a recipe. Give MXFP8BlockScaling\(\)"
    ):
        as_recipe(MXFP8BlockScaling)


# ------------------------------------------------------------------------------------------------- written down

WRITTEN = [
    *BUILT_IN,
    DelayedScaling(margin=1, fp8_format=Format.E4M3, amax_history_len=3, amax_compute_algo="most_recent"),
    Float8CurrentScaling(fp8_format=Format.E5M2, power_2_scale=True, amax_epsilon=1e-3, path="split"),
    MixedScaling("mxfp8", Float8CurrentScaling(power_2_scale=True), grad_output_for_wgrad="bf16"),
]


@pytest.mark.parametrize("recipe", WRITTEN, ids=lambda recipe: recipe.name)
def test_what_is_written_down_comes_back(recipe):
    text = json.dumps(recipe.to_dict())
    assert Recipe.from_dict(json.loads(text)) == recipe


def test_absent_fields_have_their_defaults():
    assert Recipe.from_dict({"recipe": "DelayedScaling", "margin": 2}) == DelayedScaling(margin=2)


@pytest.mark.parametrize(
    "recipe", [DelayedScaling(amax_compute_algo=lambda history: history[0]), CustomRecipe(lambda role: None)]
)
def test_a_function_is_not_written_down(recipe):
    with pytest.raises(ValueError, match="is a function, which cannot be written down"):
        recipe.to_dict()


@pytest.mark.parametrize(
    ("written", "message"),
    [
        pytest.param({"recipe": "FP4"}, "there is no recipe 'FP4'. There are: .*MXFP8BlockScaling", id="class"),
        pytest.param({}, "there is no recipe None", id="nothing"),
        pytest.param({"recipe": "MXFP8BlockScaling", "sigma": 1}, "MXFP8BlockScaling has no field 'sigma'", id="field"),
        pytest.param({"recipe": ["MXFP8BlockScaling"]}, "there is no recipe .'MXFP8BlockScaling'.", id="list"),
        pytest.param(
            {"recipe": "DelayedScaling", "fp8_format": "HYBIRD"},
            "fp8_format is 'HYBIRD', which does not exist. There are: HYBRID, E4M3, E5M2",
            id="format",
        ),
        pytest.param({"recipe": "CustomRecipe"}, "CustomRecipe needs the field 'qfactory'", id="absent"),
    ],
)
def test_what_was_never_written_is_refused(written, message):
    with pytest.raises(ValueError, match=message):
        Recipe.from_dict(written)


def test_only_a_dict_is_read():
    with pytest.raises(TypeError, match="written down as a dict, not as 'mxfp8'. Pass what to_dict"):
        Recipe.from_dict("mxfp8")


@dataclass(frozen=True)
class Seeded(HighPrecision):
    """A user's recipe with a field that JSON cannot hold."""

    generator: object = None


def test_an_object_is_not_written_down():
    with pytest.raises(ValueError, match="field 'generator' is a Generator, which cannot be written down"):
        Seeded(generator=torch.Generator()).to_dict()


def unaligned(role):
    """Groups begin anywhere in the columnwise copy, where tensor cores cannot read them."""
    return FormatQuantizer(replace(Float8RowwiseScaling().quantizer(role).spec, alignment=8))


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("bf16", (None, None, None)),
        ("fp8_current", (None, None, None)),
        ("fp8_delayed", (None, None, None)),
        ("fp8_block", (None, None, None)),
        ("fp8_rowwise", (None, None, None)),
        (MixedScaling("fp8_rowwise", "fp8_current", "fp8_rowwise"), ("codes with one scale a row by", "NN", None)),
        pytest.param(CustomRecipe(unaligned), ("no float8 codes",) * 3, id="unaligned"),
        ("mxfp8", ("no float8 codes",) * 3),
        (Float8BlockScaling(w_block_scaling_dim=1), ("TN product of codes with 1x128 blocks by", "NN product", None)),
        (MixedScaling("fp8_current", "fp8_current", input_for_wgrad="bf16"), (None, "no float8 codes", None)),
    ],
    ids=str,
)
def test_each_product_says_why_it_is_not_native(recipe, why):
    recipe = as_recipe(recipe)
    for product, sentence in zip(("fprop", "dgrad", "wgrad"), why, strict=True):
        found = recipe.why_not_native(product, torch.bfloat16, (9, 0))
        assert found is None if sentence is None else sentence in found
        if recipe != HighPrecision() and sentence is None and product != "wgrad":
            assert "need a CUDA device" in recipe.why_not_native(product, torch.bfloat16, None)
            assert "this GPU has 8.0" in recipe.why_not_native(product, torch.bfloat16, (8, 0))
            assert "float64" in recipe.why_not_native(product, torch.float64, (9, 0))
