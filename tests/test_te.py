"""fuser.te: TransformerEngine's names, arguments and counted extra tensors, held to the operations of fuser.ops."""

from __future__ import annotations

import copy
import io
import subprocess
import sys
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuser
from fuser import autocast, ops, te
from recipes import E4M3, MixedScaling
from recipes.mxfp8 import MXFP8Quantizer
from recipes.tensors.quantized_parameter import QuantizedParameter
from tests.reference import assert_same_bits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
RECIPES = ["bf16", "fp8_delayed", "fp8_current", "fp8_block", "mxfp8", "nvfp4"]
GROUPS, HIDDEN, INNER, ROWS = 3, 32, 64, 20


@pytest.fixture(params=DEVICES)
def device(request):
    return request.param


def gradients(module: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in module.named_parameters()}


# ------------------------------------------------------------------------------------- what Megatron-LM constructs

# Of its operation fuser for a grouped MLP: the activation and its arguments, whether the bias of FC2 is scaled.
MEGATRON = {
    "swiglu": (te.ScaledSwiGLU, ops.ScaledSwiGLU, {"glu_interleave_size": 32}, 2),
    "clamped": (
        te.ScaledClampedQGeGLU, ops.ScaledClampedQGeGLU,
        {"glu_interleave_size": 32, "limit": 5.0, "alpha": 1.5, "glu_linear_offset": 0.5}, 2,
    ),
    "srelu": (te.ScaledSReLU, ops.ScaledSReLU, {}, 1),
}  # fmt: skip


def megatron_mlp(activation: str, device: str, *, single: bool, bias: bool, **switches: bool) -> te.Sequential:
    """Built as Megatron does: an empty container, to which operations are appended."""
    kind, _, arguments, wide = MEGATRON[activation]
    settings: dict[str, Any] = {
        "bias": bias, "device": device, "dtype": torch.bfloat16, "single_grouped_weight": single,
        "single_grouped_bias": False, **switches,
    }  # fmt: skip
    sequential = te.Sequential()
    sequential.append(te.GroupedLinear(GROUPS, HIDDEN, wide * INNER, **settings))
    sequential.append(kind(**arguments, activation_recompute_in_mlp=True))
    sequential.append(te.GroupedLinear(GROUPS, INNER, HIDDEN, scale_bias=bias, **settings))
    return sequential


def named_mlp(activation: str, device: str, *, single: bool, bias: bool, **switches: bool) -> fuser.Sequential:
    _, kind, arguments, wide = MEGATRON[activation]
    settings: dict[str, Any] = {
        "bias": bias,
        "device": device,
        "dtype": torch.bfloat16,
        "stacked": single,
        "stacked_bias": False,
        **switches,
    }
    return fuser.Sequential(
        ops.GroupedLinear(GROUPS, HIDDEN, wide * INNER, **settings),
        kind(**arguments),
        ops.GroupedLinear(GROUPS, INNER, HIDDEN, scale_bias=bias, **settings),
    )


def mlp_data(device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, dy = (torch.randn(ROWS, HIDDEN, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    scales = torch.rand(ROWS, generator=generator).to(device)
    return x.requires_grad_(), torch.tensor([7, 0, 11], device=device), scales.requires_grad_(), dy


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("single", [False, True])
@pytest.mark.parametrize("activation", MEGATRON)
def test_megatrons_grouped_mlp_is_fused_and_has_the_bits_of_the_named_one(activation, single, bias, recipe, device):
    counted = megatron_mlp(activation, device, single=single, bias=bias)
    named = named_mlp(activation, device, single=single, bias=bias)
    named.load_state_dict(counted.state_dict())
    results = []
    for module in (counted, named):
        x, splits, scales, dy = mlp_data(device)
        torch.manual_seed(2)  # of stochastic rounding
        with autocast(recipe):
            if module is counted:
                y = module(x, splits, scales, splits, *([scales] if bias else []))
            else:
                y = module(x, split_sizes=splits, scales=scales)
        y.backward(dy)
        results.append({"y": y.detach(), "dx": x.grad, "dscales": scales.grad, **gradients(module)})
    assert_same_bits(*results)
    assert "GroupedMLP = GroupedLinear -> " in counted.explain(recipe=recipe)


@pytest.mark.parametrize("delay", [False, True])
def test_megatrons_gradient_buffers_and_backward_dw(delay, device):
    """main_grad of each weight, backward_dw() of every operation, the caller's buffers."""
    switches = {"accumulate_into_main_grad": True, "delay_wgrad_compute": delay}
    counted, named = (make("swiglu", device, single=True, bias=False, **switches) for make in (megatron_mlp, named_mlp))
    named.load_state_dict(counted.state_dict())
    for module in (counted, named):
        for parameter in module.parameters():
            parameter.main_grad = torch.zeros_like(parameter, dtype=torch.float32)
    x, splits, scales, dy = mlp_data(device)
    arena = torch.empty(2, ROWS, HIDDEN, dtype=torch.bfloat16, device=device)
    y = counted(x, splits, scales, splits, op_kwargs={counted[2]: {"output": arena[0]}, 0: {"grad_input": arena[1]}})
    assert y.data_ptr() == arena[0].data_ptr()
    y.backward(dy)
    for module in reversed(counted):
        if hasattr(module, "backward_dw"):
            module.backward_dw()
    named(x.detach().requires_grad_(), split_sizes=splits, scales=scales.detach()).backward(dy)
    if delay:
        named.backward_dw()
    for ours, other in zip(counted.parameters(), named.parameters(), strict=True):
        assert other.main_grad.any() and torch.equal(ours.main_grad, other.main_grad)


def test_split_sizes_that_are_two_tensors_are_not_fused_but_computed():
    counted = megatron_mlp("swiglu", "cpu", single=False, bias=False)
    x, splits, scales, _ = mlp_data("cpu")
    fused = counted(x, splits, scales, splits)
    apart = counted(x, splits, scales, splits.clone())
    assert "mean different tensors by 'split_sizes': 'split_sizes' and 'split_sizes_1'" in counted.explain()
    torch.testing.assert_close(apart, fused)
    assert torch.equal(counted(x, splits, scales, splits), fused)
    assert "GroupedMLP = " in counted.explain()


# --------------------------------------------------------------------------------------------- counted extra tensors


def test_a_residual_branch_in_two_containers(device):
    """As TransformerEngine's page: the caller carries the residual."""
    make = te.Sequential(
        te.MakeExtraOutput(in_place=True), te.RMSNorm(8, device=device), te.Linear(8, 8, device=device)
    )
    add = te.Sequential(te.Linear(8, 8, device=device), te.Bias(8, device=device), te.AddExtraInput(in_place=True))
    x = torch.randn(4, 8, device=device, requires_grad=True)
    y, residual = make(x)
    assert torch.equal(residual, x)
    out = add(y, residual)
    out.sum().backward()
    h = make[2](make[1](x))
    expected = add[1](add[0](h)) + x
    torch.testing.assert_close(out, expected)
    (dx,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(x.grad, dx)


def test_an_extra_input_that_is_a_leaf_and_requires_grad(device):
    """In place it would be written over; TransformerEngine's spelling adds out of place."""
    add = te.AddExtraInput(in_place=True)
    x, extra = (torch.randn(4, 8, device=device, requires_grad=True) for _ in range(2))
    before = extra.detach().clone()
    for call in (add, te.Sequential(add)):
        extra.grad = None
        y = call(x, extra)
        y.sum().backward()
        assert torch.equal(y, x + extra) and torch.equal(extra.grad, torch.ones_like(extra))
        assert torch.equal(extra, before)


def test_two_extra_inputs_are_two_tensors_and_outputs_come_in_order():
    sequential = te.Sequential(
        te.MakeExtraOutput(), te.AddExtraInput(), te.ConstantScale(2.0), te.MakeExtraOutput(), te.AddExtraInput()
    )
    x, first, second = torch.randn(3, 2, 4).unbind()
    y, one, two = sequential(x, first, second)
    assert torch.equal(one, x) and torch.equal(two, 2 * (x + first)) and torch.equal(y, two + second)
    y, _, two = sequential(x, first, first)
    assert torch.equal(y, two + first)


@pytest.mark.parametrize("to_caller", [True, False])
def test_a_channel_feeds_a_later_operation(to_caller):
    sequential = te.Sequential(
        te.MakeExtraOutput().set_extra_output_channel(0, "residual", output_to_caller=to_caller),
        te.ConstantScale(3.0),
        te.AddExtraInput().set_extra_input_channel(0, "residual"),
        te.AddExtraInput(),
    )
    x, extra = torch.randn(2, 2, 4).unbind()
    x.requires_grad_()
    result = sequential(x, extra)
    y = result[0] if to_caller else result
    assert torch.equal(y, 3 * x + x + extra)
    if to_caller:
        assert torch.equal(result[1], x)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 4.0))
    sequential[2].set_extra_input_channel(0, None)
    with pytest.raises(ValueError, match="Expected 2 extra inputs but got 1. Needed, in this order: extra, extra_1."):
        sequential(x, extra)


def test_a_channel_without_an_earlier_producer_is_refused():
    with pytest.raises(ValueError, match="AddExtraInput at 0 reads the channel 'r', which has no earlier producer"):
        te.Sequential(
            te.AddExtraInput().set_extra_input_channel(0, "r"), te.MakeExtraOutput().set_extra_output_channel(0, "r")
        )


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (lambda op: op.set_extra_input_channel(1, "a"), IndexError, "The extra input 1 is out of range: there are 1"),
        (lambda op: op.set_extra_input_channel(-1, "a"), IndexError, "out of range"),
        (lambda op: op.set_extra_output_channel(0, "a"), IndexError, "The extra output 0 is out of range"),
        (lambda op: op.set_extra_input_channel(0, ""), ValueError, "must be a non-empty string"),
        (lambda op: op.set_extra_input_channel(0, 3), ValueError, "must be a non-empty string"),
        (
            lambda op: te.MakeExtraOutput().set_extra_output_channel(0, "a", output_to_caller=1),
            TypeError, "output_to_caller is 1",
        ),
        (lambda op: op(torch.ones(2)), ValueError, "Expected 1 extra inputs but got 0"),
        (lambda op: te.Sequential(op)(torch.ones(2)), ValueError, "Expected 1 extra inputs but got 0"),
        (lambda op: op(torch.ones(2), torch.ones(2), extra=torch.ones(2)), TypeError, "all by position, or all by"),
        (
            lambda op: te.Sequential(op)(torch.ones(2), torch.ones(2), extra=torch.ones(2)),
            TypeError, "all by position, or all by name",
        ),
        (
            lambda op: te.Sequential(te.Identity())(torch.ones(2), op_kwargs={op: {}}),
            ValueError, "op_kwargs names .* which is not in this Sequential",
        ),
        (
            lambda op: te.Sequential(op)(torch.ones(2), torch.ones(2), op_kwargs={op: {}, 0: {}}),
            ValueError, "op_kwargs names operation 0 twice",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_is_refused(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(te.AddExtraInput())


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_recomputes_the_fused_operation(reentrant):
    counted = megatron_mlp("swiglu", "cpu", single=True, bias=False)
    x, splits, scales, dy = mlp_data("cpu")
    counted(x, splits, scales, splits).backward(dy)
    expected = {"dx": x.grad, "dscales": scales.grad, **gradients(counted)}
    counted.zero_grad()
    x.grad = scales.grad = None
    checkpoint(counted, x, splits, scales, splits, use_reentrant=reentrant).backward(dy)
    assert_same_bits({"dx": x.grad, "dscales": scales.grad, **gradients(counted)}, expected)
    assert "GroupedMLP = " in counted.explain()


def test_extra_tensors_may_be_given_by_name_too():
    counted = megatron_mlp("swiglu", "cpu", single=False, bias=False)
    x, splits, scales, _ = mlp_data("cpu")
    assert torch.equal(counted(x, split_sizes=splits, scales=scales), counted(x, splits, scales, splits))
    alone = counted[0]
    assert torch.equal(alone(x, splits), alone(x, split_sizes=splits))


def test_operations_of_fuser_are_counted_in_a_te_sequential():
    sequential = te.Sequential(
        ops.MakeExtraOutput("r"), ops.AddExtraInput("e"), te.AddExtraInput(), ops.AddExtraInput("r")
    )
    x, e, extra = torch.randn(3, 2, 4).unbind()
    assert torch.equal(sequential(x, e, extra), x + e + extra + x)


def test_a_sequential_is_copied_and_changed():
    sequential = te.Sequential(te.AddExtraInput(), te.ConstantScale(2.0))
    x, extra = torch.randn(2, 2, 4).unbind()
    assert torch.equal(copy.deepcopy(sequential)(x, extra), 2 * (x + extra))
    sequential.insert(0, te.AddExtraInput())
    assert torch.equal(sequential(x, extra, extra), 2 * (x + extra + extra))
    assert isinstance(sequential[:1], te.Sequential) and torch.equal(sequential[:1](x, extra), x + extra)
    del sequential[0]
    assert torch.equal(sequential(x, extra), 2 * (x + extra))


# ------------------------------------------------------------------------------------------------ names and arguments


def test_every_name_is_an_operation_of_the_same_name():
    for name in te.__all__:
        kind = getattr(te, name)
        if name in ("Sequential", "autocast", "quantized_model_init", "recipe"):
            continue
        assert issubclass(kind, getattr(ops, "Linear" if name == "BasicLinear" else name))


@pytest.mark.slow
def test_importing_fuser_does_not_import_it():
    code = "import sys, fuser; assert 'fuser.te' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_steps_on_a_gpu_are_repeated_as_those_of_fuser():
    for name in (
        "GroupedLinear",
        "ScaledSwiGLU",
        "ScaledSReLU",
        "MakeExtraOutput",
        "AddExtraInput",
        "Linear",
        "RMSNorm",
    ):
        assert fuser.ops.BasicOperation.repeatable is False
        assert getattr(te, name).repeatable == getattr(ops, name).repeatable
    mlp = megatron_mlp("swiglu", "cpu", single=True, bias=False).explain(device="cuda")
    assert "not repeated" not in mlp and "GroupedMLP = " in mlp


def test_parameters_are_initialised_in_the_trackers_state():
    class Tracker:
        entered = 0

        @contextmanager
        def fork(self):
            self.entered += 1
            with torch.random.fork_rng():
                torch.manual_seed(123)
                yield

    tracker = Tracker()
    settings = {"device": "cpu", "rng_state_tracker_function": lambda: tracker}
    torch.manual_seed(5)
    first, second = te.Linear(8, 8, **settings), te.Linear(8, 8, **settings)
    grouped = te.GroupedLinear(2, 8, 8, **settings)
    after = torch.rand(1)
    torch.manual_seed(5)
    assert tracker.entered == 3 and torch.equal(first.weight, second.weight) and grouped.weight0.any()
    assert torch.equal(after, torch.rand(1))


def test_arguments_that_have_no_effect_or_do_not_exist():
    assert te.LayerNorm(8, sm_margin={"forward": 4}, device="cpu")(torch.randn(2, 8)).shape == (2, 8)
    te.RMSNorm((8,), sm_margin=2, zero_centered_gamma=True, device="cpu")
    te.L2Normalization(seq_length=3, micro_batch_size=2)
    assert te.BasicLinear(4, 8, device="cpu").bias is None
    assert te.Linear(4, 8, bias=False, tensor_parallel_group=None, sequence_parallel=True, device="cpu").bias is None
    assert te.GroupedLinear(2, 4, 8, bias=False, scale_bias=True, device="cpu").num_extra_inputs == 1
    with pytest.raises(NotImplementedError, match="userbuffers_options: there are no Userbuffers here"):
        te.Linear(4, 8, userbuffers_options={})
    with pytest.raises(TypeError, match="activation_recompute_in_mlp is 1"):
        te.ScaledSwiGLU(activation_recompute_in_mlp=1)


def test_recipes_by_transformer_engines_arguments():
    assert te.recipe.DelayedScaling(margin=1, amax_history_len=4, amax_compute_algo="most_recent") == (
        fuser.recipes.DelayedScaling(1, amax_history_len=4, amax_compute_algo="most_recent")
    )
    assert te.recipe.Float8CurrentScaling(use_power_2_scales=True).power_2_scale
    assert te.recipe.Float8BlockScaling(w_block_scaling_dim=1).w_block_scaling_dim == 1
    assert te.recipe.MXFP8BlockScaling(fp8_format=te.recipe.Format.HYBRID).fp8_format is te.recipe.Format.HYBRID
    assert te.recipe.NVFP4BlockScaling(disable_rht=True, row_scaled_activation=True).row_scaled_activation
    assert te.recipe.MXFP8BlockScaling(backward_override="dequantized") == (
        MixedScaling.forward_only("mxfp8", backward="dequantized")
    )
    for refused in (
        lambda: te.recipe.MXFP8BlockScaling(margin=1),
        lambda: te.recipe.DelayedScaling(backward_override="dequantized"),
        lambda: te.recipe.Float8CurrentScaling(fp8_dpa=True),
        lambda: te.autocast(calibrating=True, recipe="mxfp8"),
    ):
        with pytest.raises(NotImplementedError):
            refused()


def blocks_but_of_gradients(role):
    return None if role == "grad_output" else MXFP8Quantizer(E4M3)


def test_a_custom_recipe_by_transformer_engines_arguments():
    found = te.recipe.CustomRecipe(qfactory=blocks_but_of_gradients, quantization_alignment=32)
    assert found == fuser.recipes.CustomRecipe(blocks_but_of_gradients)
    linear, x = te.Linear(64, 32, device="cpu", dtype=torch.bfloat16), torch.randn(32, 64, dtype=torch.bfloat16)
    with te.autocast(recipe=found):
        y = linear(x)
    with te.autocast(recipe="mxfp8"):
        assert torch.equal(y, linear(x))
    with te.autocast(recipe="bf16"):
        assert not torch.equal(y, linear(x))
    overridden = te.recipe.CustomRecipe(blocks_but_of_gradients, backward_override="dequantized")
    assert overridden == MixedScaling.forward_only(found, backward="dequantized")
    with pytest.raises(ValueError, match="quantization_alignment"):
        te.recipe.CustomRecipe(blocks_but_of_gradients, quantization_alignment=0)
    with pytest.raises(NotImplementedError, match="fp8_dpa"):
        te.recipe.CustomRecipe(blocks_but_of_gradients, fp8_dpa=True)


def test_weights_are_held_quantized_by_transformer_engines_arguments():
    with te.quantized_model_init(recipe=te.recipe.MXFP8BlockScaling(), preserve_high_precision_init_val=True):
        linear = te.Linear(64, 32)
    assert isinstance(linear.weight, QuantizedParameter) and linear.weight.get_high_precision_init_val() is not None
    with te.quantized_model_init(enabled=False):
        assert not isinstance(te.Linear(64, 32).weight, QuantizedParameter)
    with pytest.raises(ValueError, match="Name one: recipe=te.recipe"):
        te.quantized_model_init()


def test_autocast_has_transformer_engines_arguments():
    linear, x = te.Linear(32, 32, device="cpu"), torch.randn(4, 32)
    with autocast("mxfp8"):
        quantized = linear(x)
    with te.autocast(enabled=True, recipe=te.recipe.MXFP8BlockScaling()):
        assert torch.equal(linear(x), quantized)
    with te.autocast(enabled=False):
        assert torch.equal(linear(x), nn.functional.linear(x, linear.weight, linear.bias))
    with pytest.raises(ValueError, match="recipe is None, and TransformerEngine's default depends on the GPU"):
        te.autocast()


@pytest.mark.parametrize("strict", [True, False])
def test_checkpoints_with_extra_states_load(strict):
    """Those of TransformerEngine's operations, and of Megatron's layers, have one each, mostly empty."""

    def make() -> nn.Module:
        mlp = (te.GroupedLinear(2, 32, 64, device="cpu"), te.SwiGLU(), te.GroupedLinear(2, 32, 32, device="cpu"))
        return nn.ModuleDict({"experts": te.Sequential(*mlp), "out": ops.Linear(32, 32)})

    source, target = make(), make()
    state = source.state_dict()
    nothing = (torch.empty(0, dtype=torch.uint8), None, io.BytesIO(), torch.empty(0, dtype=torch.uint8))
    names = ("experts.0", "experts.1", "experts.2", "out")
    state |= {f"{name}._extra_state": value for name, value in zip(names, nothing, strict=True)}
    target.load_state_dict(state, strict=strict)  # warnings are errors
    for mine, other in zip(target.parameters(), source.parameters(), strict=True):
        assert torch.equal(mine, other)
    assert "out._extra_state" in state
    for value in (torch.ones(7, dtype=torch.uint8), io.BytesIO(b"scales"), {"scale": 1.0}):
        with pytest.warns(UserWarning, match=r"'experts\.2\._extra_state' .* is not loaded"):
            target.load_state_dict(state | {"experts.2._extra_state": value}, strict=strict)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*experts\.2\._extra_states"):
        target.load_state_dict(state | {"experts.2._extra_states": torch.ones(1)})


def test_an_operation_may_have_an_extra_state_of_its_own():
    class Counted(ops.Identity):
        count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    source, target = fuser.Sequential(Counted()), fuser.Sequential(Counted())
    source[0].count = 3
    target.load_state_dict(source.state_dict())
    assert target[0].count == 3
