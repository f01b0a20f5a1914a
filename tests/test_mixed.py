"""MixedScaling and CustomRecipe: each operand of each product by itself."""

from dataclasses import dataclass

import pytest
import torch

from fuser import Sequential, autocast, ops
from recipes import (
    E4M3,
    E5M2,
    CustomRecipe,
    DelayedScaling,
    Float8CurrentScaling,
    MixedScaling,
    MXFP8BlockScaling,
    NVFP4BlockScaling,
    QuantizedTensor,
    Quantizer,
    Recipe,
    Role,
)
from recipes.mxfp8 import MXFP8Quantizer
from recipes.registry import as_recipe

SIZES = [5, 0, 9]


def layer(path=None):
    torch.manual_seed(3)
    return Sequential(ops.GroupedLinear(3, 64, 32, bias=False), path=path)


def run(recipe, path=None):
    model, x = layer(path), torch.randn(16, 64, generator=torch.Generator().manual_seed(5)).requires_grad_()
    with autocast(recipe):
        y = model(x, split_sizes=SIZES)
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(6)))
    return {"y": y.detach(), "dx": x.grad, "dw": model[0].weight.grad}


def same(left, right):
    return {name for name in left if torch.equal(left[name], right[name])}


PLAIN, FULL = run(None), run("mxfp8")


@pytest.mark.parametrize(
    ("recipe", "plain", "full"),
    [
        pytest.param(MixedScaling(), {"y", "dx", "dw"}, set(), id="nothing"),
        pytest.param(MixedScaling("mxfp8", "mxfp8", "mxfp8"), set(), {"y", "dx", "dw"}, id="all"),
        pytest.param(MixedScaling("mxfp8", "mxfp8", "mxfp8", "bf16", None, "bf16"), {"dw"}, {"y", "dx"}, id="wgrad"),
        pytest.param(MixedScaling("bf16", "bf16", "mxfp8", "mxfp8", "mxfp8"), {"y"}, {"dx", "dw"}, id="bf16-fprop"),
    ],
)
@pytest.mark.parametrize("path", [None, "split"])
def test_each_product_has_its_own_formats(recipe, plain, full, path):
    result = run(recipe, path)
    assert same(result, PLAIN) == plain and same(result, FULL) == full


def test_one_operand_alone_may_be_quantized():
    only_weights = run(MixedScaling(weight="mxfp8"))
    assert same(only_weights, PLAIN) == {"dw"}
    w_q = MXFP8Quantizer(E4M3).quantize_stacked(layer()[0].weight.detach()).dequantize()
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(5))
    torch.testing.assert_close(only_weights["y"][:5], x[:5] @ w_q[0].T)


def test_rows_past_the_sum_stay_zero_in_a_product_that_is_not_quantized():
    model = layer()
    x = torch.full((16, 64), float("nan"))
    x[:14] = 1.0
    with autocast(MixedScaling("bf16", "mxfp8", "mxfp8", "mxfp8")):
        y = model(x.requires_grad_(), split_sizes=SIZES)
    y[:14].sum().backward()
    assert y[14:].eq(0).all() and x.grad[14:].eq(0).all() and model[0].weight.grad.isfinite().all()


def test_equal_halves_are_one_quantizer():
    assert MixedScaling("mxfp8", "mxfp8").quantizer(Role.INPUT) == MXFP8Quantizer(E4M3)
    mixed = MixedScaling(grad_output=Float8CurrentScaling(), grad_output_for_wgrad="mxfp8").quantizer(Role.GRAD_OUTPUT)
    assert (mixed.rowwise.form, mixed.columnwise.form) == (E5M2, E4M3)


def test_a_recipe_with_state_is_refused():
    with pytest.raises(ValueError, match="The recipe for weight keeps a state from step to step"):
        MixedScaling("mxfp8", DelayedScaling())


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="no recipe named 'fp3'"):
        MixedScaling("fp3")


# ------------------------------------------------------------------------------ backward in another precision

FORWARDS = ["fp8_current", "fp8_block", "mxfp8", "nvfp4", NVFP4BlockScaling(row_scaled_activation=True)]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("path", ["grouped", "split"])
@pytest.mark.parametrize("backward", ["high_precision", "dequantized"])
@pytest.mark.parametrize("forward", FORWARDS, ids=lambda recipe: getattr(recipe, "name", recipe))
def test_backward_multiplies_what_it_says(forward, backward, path, dtype, device):
    """The forward's bits, and gradients in float64 of the tensors themselves or of what forward multiplied."""
    recipe = MixedScaling.forward_only(forward, backward=backward)
    generator = torch.Generator().manual_seed(5)
    x, dy = (torch.randn(16, width, generator=generator).to(device, dtype) for width in (64, 32))
    model = layer(path).to(device, dtype)
    w = model[0].weight.detach()
    with autocast(forward), torch.no_grad():
        y = model(x, split_sizes=SIZES)
    leaf = x.clone().requires_grad_()
    with autocast(recipe):
        found = model(leaf, split_sizes=SIZES)
    found.backward(dy)
    assert torch.equal(found, y)

    rows, gradients = x.split([*SIZES, 2])[:3], dy.double().split([*SIZES, 2])[:3]
    weights = w.unbind()
    if backward == "dequantized":
        of_x, of_w = (as_recipe(forward).quantizer(role) for role in (Role.INPUT, Role.WEIGHT))
        rows = [of_x.quantize(part).rowwise.dequantize() if len(part) else part for part in rows]
        weights = [of_w.quantize(part).rowwise.dequantize() for part in weights]
    dx = torch.cat([part @ each.double() for part, each in zip(gradients, weights, strict=True)])
    dw = torch.stack([part.T @ each.double() for part, each in zip(gradients, rows, strict=True)])
    tolerance = {"rtol": 2**-7, "atol": 2**-7} if dtype is torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(leaf.grad[:14].double(), dx, **tolerance)
    torch.testing.assert_close(model[0].weight.grad.double(), dw, **tolerance)
    assert not leaf.grad[14:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_dense_layers_backward_is_of_what_forward_multiplied(dtype):
    torch.manual_seed(1)
    model, x = Sequential(ops.Linear(64, 32, dtype=dtype)), torch.randn(16, 64, dtype=dtype, requires_grad=True)
    with autocast(MixedScaling.forward_only("mxfp8", backward="dequantized")):
        model(x).sum().backward()
    x_q, w_q = (MXFP8Quantizer(E4M3).quantize(t.detach()).dequantize() for t in (x, model[0].weight))
    ones = torch.ones(16, 32, dtype=dtype)
    torch.testing.assert_close(x.grad, ones @ w_q)
    torch.testing.assert_close(model[0].weight.grad, ones.T @ x_q)


def test_a_quantized_gradient_beside_a_dequantized_operand_is_refused():
    for operand in ("input_for_wgrad", "weight_for_dgrad"):
        with pytest.raises(ValueError, match=f'{operand} is "dequantized", but the gradient .* is quantized by MXFP8'):
            MixedScaling("mxfp8", "mxfp8", "mxfp8", **{operand: "dequantized"})
    for name in ("input", "grad_output_for_wgrad"):
        with pytest.raises(ValueError, match="no recipe named 'dequantized'"):
            MixedScaling(**{name: "dequantized"})
    with pytest.raises(ValueError, match="backward is 'fp8', but must be"):
        MixedScaling.forward_only("mxfp8", backward="fp8")


def test_a_dequantized_backward_is_written_down_and_built_again():
    recipe = MixedScaling.forward_only("nvfp4", backward="dequantized")
    assert Recipe.from_dict(recipe.to_dict()) == recipe


def test_accumulation_is_that_of_the_operands_recipes():
    recipe = MixedScaling.forward_only(Float8CurrentScaling())
    assert not recipe.split_accumulator("fprop") and recipe.split_accumulator("dgrad")
    split = MixedScaling(Float8CurrentScaling(split_accumulator_fprop=True), Float8CurrentScaling())
    assert split.split_accumulator("fprop")


# -------------------------------------------------------------------------------------------------- CustomRecipe


@dataclass(frozen=True)
class SingleTensors(Quantizer):
    """Knows no groups: the split path it is."""

    def quantize(self, x, *, rowwise=True, columnwise=False) -> QuantizedTensor:
        return MXFP8Quantizer(E4M3).quantize(x, rowwise=rowwise, columnwise=columnwise)


def test_quantizers_decide_the_path():
    grouped, single = (CustomRecipe(lambda role, q=q: q) for q in (MXFP8Quantizer(E4M3), SingleTensors()))
    assert "path: grouped" in layer().explain(recipe=grouped)
    says = layer().explain(recipe=single)
    assert "path: split: SingleTensors knows single tensors only; the split path quantizes group by group." in says
    assert same(run(grouped), FULL) == same(run(single), FULL) == {"y", "dx", "dw"}


@dataclass(frozen=True)
class Only:
    """A function of the role that is equal by value."""

    role: Role

    def __call__(self, role: Role) -> Quantizer | None:
        return MXFP8Quantizer(E4M3) if role is self.role else None


def test_custom_recipes_of_equal_functions_share_a_plan():
    model = layer()
    for _ in range(3):
        with autocast(CustomRecipe(Only(Role.WEIGHT))):
            model(torch.ones(16, 64), split_sizes=SIZES)
    assert CustomRecipe(Only(Role.WEIGHT)) == CustomRecipe(Only(Role.WEIGHT)) != CustomRecipe(Only(Role.INPUT))
    assert CustomRecipe(quantizes_all) == CustomRecipe(quantizes_all)
    (stage,) = model.layout().stages
    assert len(stage.runner.programs) == 1


def quantizes_all(role: Role) -> Quantizer | None:
    return MXFP8Quantizer(E4M3)


@pytest.mark.parametrize("qfactory", [None, "mxfp8"])
def test_a_factory_must_be_a_function(qfactory):
    with pytest.raises(TypeError, match="but must be a function of a Role"):
        CustomRecipe(qfactory)


def test_a_factory_must_make_quantizers():
    with pytest.raises(TypeError, match="returned 'mxfp8', but must return a Quantizer"):
        CustomRecipe(lambda role: "mxfp8").quantizer(Role.INPUT)


# ------------------------------------------------------------------------------------- an operation's own recipe


def test_an_operation_has_its_own_recipe():
    torch.manual_seed(0)
    model = Sequential(ops.Linear(32, 32), ops.GELU(), ops.Linear(32, 32).set_recipe("bf16"), ops.Linear(32, 32))
    x = torch.randn(8, 32)
    with autocast("mxfp8"):
        y = model(x)
        h = model[1](model[0](x))
    with autocast(None):
        h = model[2](h)
    with autocast("mxfp8"):
        assert torch.equal(model[3](h), y)
    says = model.explain(recipe="mxfp8")
    assert says.count("pipeline") == 3 and "under its own recipe HighPrecision(path=None): native" in says


def test_an_own_recipe_counts_outside_of_any_context_too():
    op, x = ops.Linear(32, 32), torch.randn(8, 32)
    with autocast("mxfp8"):
        expected = op(x)
    assert torch.equal(op.set_recipe(MXFP8BlockScaling())(x), expected)
    assert not torch.equal(op.set_recipe(None)(x), expected)


def test_a_change_of_an_operations_recipe_is_seen():
    model, x = Sequential(ops.Linear(32, 32), ops.Linear(32, 32)), torch.randn(8, 32)
    plain = model(x)
    model[1].set_recipe("mxfp8")
    assert not torch.equal(model(x), plain)
    model[1].set_recipe(None)
    assert torch.equal(model(x), plain)


def test_extras_pass_between_operations_of_different_recipes():
    torch.manual_seed(0)
    fc1, fc2 = ops.GroupedLinear(2, 32, 64), ops.GroupedLinear(2, 32, 32)
    fused = Sequential(fc1, ops.ScaledSwiGLU(), fc2)
    extras = {"split_sizes": [3, 4], "scales": torch.rand(8)}
    x = torch.randn(8, 32)
    with autocast("mxfp8"):
        expected = fused(x, **extras)
    mixed = Sequential(fc1.set_recipe("mxfp8"), ops.ScaledSwiGLU(), fc2.set_recipe("mxfp8"))
    assert torch.equal(mixed(x, **extras), expected)


def test_support_is_that_of_the_products():
    cpu = torch.device("cpu")
    assert MixedScaling().support(cpu) == "native"
    assert MixedScaling("mxfp8", "mxfp8", "mxfp8").support(cpu) == "emulated"
    assert MixedScaling(grad_output="mxfp8").support(cpu) == "some products native, some emulated"


@pytest.mark.gpu
def test_support_of_float8_products_is_the_devices():
    cuda = torch.device("cuda")
    native = torch.cuda.get_device_capability() >= (8, 9)
    same = MixedScaling("fp8_current", "fp8_current", "fp8_current")
    assert same.support(cuda) == ("native" if native else "emulated")
    other = MixedScaling("fp8_current", "fp8_block", "fp8_block")
    assert other.support(cuda).startswith("some" if native else "emulated")
