"""fuser.lora: adapters are put on operations, merged, saved in peft's layout, and taken off."""

import copy
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import weight_norm

import fuser
from fuser import Sequential, autocast, lora, ops
from ops.lora import LoRAGroupedLinear, LoRALinear
from recipes import DelayedScaling
from recipes.tensors.quantize_weight import as_copied
from recipes.tensors.quantized_handle import held_tensors
from recipes.tensors.quantized_parameter import QuantizedParameter
from tests.lora_cases import adapted, data, mlp, step, with_values
from tests.reference import assert_close, assert_same_bits

RECIPES = pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "mxfp8", "fp8_block", "nvfp4"])


# What takes the place of an operation


@RECIPES
def test_an_adapter_changes_nothing_at_first(recipe):
    model, plain = mlp(), mlp()
    parameters = dict(model.named_parameters())
    assert lora.add(model, 4) == ("0", "2", "3")
    assert all(model.get_parameter(name) is parameter for name, parameter in parameters.items())
    assert [type(module) for module in model] == [LoRAGroupedLinear, ops.SwiGLU, LoRAGroupedLinear, LoRALinear]
    with torch.no_grad(), autocast(recipe):
        assert torch.equal(model(data(), split_sizes=[5, 0, 9]), plain(data(), split_sizes=[5, 0, 9]))
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {f"{at}.lora_{factor}.weight" for at in (0, 2, 3) for factor in "AB"}


def test_recipes_states_hooks_names_and_training_mode_are_kept():
    model = mlp()
    with autocast(DelayedScaling()):
        model(data(), split_sizes=[5, 0, 9])
    model[0].rename_extras(split_sizes="mine")
    model[3].set_recipe("mxfp8")
    calls = []
    model[2].register_forward_hook(lambda *_: calls.append(1))
    model.eval()
    state = {name: tensor for name, tensor in model.state_dict().items() if "quantizer" in name}
    assert state
    lora.add(model, 2)
    assert not model[0].training and model[3].recipe is not None
    assert_same_bits({name: model.state_dict()[name] for name in state}, state)
    model(data(), mine=[5, 0, 9], split_sizes=[5, 0, 9])
    assert calls == [1]


def test_an_operation_in_two_places_has_one_adapter():
    shared = ops.Linear(8, 8)
    model = Sequential(shared, Sequential(ops.SiLU(), shared))
    assert lora.add(model, 2) == ("0",)
    assert model[0] is model[1][1]


@pytest.mark.parametrize(
    ("targets", "names"),
    [
        ("all-linear", ("moe.0", "moe.2", "head")),
        (["2", "head"], ("moe.2", "head")),
        (["moe.0"], ("moe.0",)),
        (r"moe\.\d", None),
        (r"moe\.[02]", ("moe.0", "moe.2")),
    ],
)
def test_targets_are_found_as_by_peft(targets, names):
    moe = mlp()
    model = nn.ModuleDict({"moe": moe[:3], "head": moe[3]})
    if names is None:
        with pytest.raises(TypeError, match=r"'moe\.1' is a SwiGLU, but adapters are for ops\.Linear and ops\.Group"):
            lora.add(model, 2, targets)
        assert all(parameter.requires_grad for parameter in model.parameters())
    else:
        assert lora.add(model, 2, targets) == names


# Merging


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_unmerge_restores_the_bits(dtype):
    model = adapted().to(dtype)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    lora.merge(model)
    assert model.state_dict().keys() == before.keys()
    for at in (0, 2, 3):
        a, b, w = (before[f"{at}.{name}"].double() for name in ("lora_A.weight", "lora_B.weight", "weight"))
        expected = w + 1.5 * b @ a
        error = (model[at].weight.double() - expected).abs()
        assert (error <= torch.finfo(dtype).eps / 2 * expected.abs() + 1e-6).all()
    lora.unmerge(model)
    assert_same_bits(model.state_dict(), before)
    assert dict(model.named_buffers()) == {}


@pytest.mark.parametrize("recipe", ["bf16", "fp8_current", "mxfp8"])
def test_a_merged_model_computes_the_same_to_within_rounding(recipe):
    model = adapted()
    with torch.no_grad(), autocast(recipe):
        before = model(data(), split_sizes=[5, 0, 9])
        lora.merge(model)
        merged = model(data(), split_sizes=[5, 0, 9])
        tolerance = {torch.float32: 3e-5 if recipe == "bf16" else 0.3}
        assert_close({"y": merged}, {"y": before}, tolerance)
        again = copy.deepcopy(model)
        lora.unload(model)
        assert torch.equal(model(data(), split_sizes=[5, 0, 9]), merged)
        lora.unmerge(again)
        assert torch.equal(again(data(), split_sizes=[5, 0, 9]), before)
    assert [type(module) for module in model] == [ops.GroupedLinear, ops.SwiGLU, ops.GroupedLinear, ops.Linear]
    assert not any("lora" in name for name in model.state_dict()) and dict(model.named_buffers()) == {}


def test_a_merged_adapter_has_no_gradient_and_x_has_that_of_the_merged_weights():
    model = adapted()
    expected = step(model)
    lora.merge(model)
    found = step(model)
    assert found.keys() == {"y", "dx"}
    assert_close(found, {name: expected[name] for name in found}, {torch.float32: 3e-5})


def test_training_a_merged_model_is_an_error_until_it_is_unmerged():
    model = adapted()
    model[0].lora_A.weight.requires_grad_(False)
    lora.merge(model)
    y = model(data().detach(), split_sizes=[5, 0, 9])
    with pytest.raises(RuntimeError, match="does not require grad"):
        y.sum().backward()
    again = copy.deepcopy(model)
    parametrize.register_parametrization(again[2].lora_B, "weight", nn.Identity())
    lora.unmerge(again)
    lora.merge(again)
    assert not any(parameter.requires_grad for parameter in again.parameters())
    lora.unmerge(again)
    parametrize.remove_parametrizations(again[2].lora_B, "weight")
    lora.merge(again)
    for one in (model, again):
        lora.unmerge(one)
        trained = [name for name, parameter in one.named_parameters() if parameter.requires_grad]
        assert trained == [f"{at}.lora_{factor}.weight" for at in (0, 2, 3) for factor in "AB"][1:]
        one(data().detach(), split_sizes=[5, 0, 9]).sum().backward()


def test_weights_that_are_not_stacked_are_merged_each_with_its_own():
    torch.manual_seed(0)
    model = Sequential(ops.GroupedLinear(3, 32, 24, stacked=False))
    lora.add(model, 2, alpha=3)
    with_values(model)
    before = model(data(), split_sizes=[5, 0, 9])
    lora.merge(model)
    assert_close({"y": model(data(), split_sizes=[5, 0, 9])}, {"y": before}, {torch.float32: 3e-5})
    lora.unload(model)
    assert sorted(model.state_dict()) == sorted(f"0.{kind}{g}" for kind in ("weight", "bias") for g in range(3))


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "per group"])
@pytest.mark.parametrize("recipe", ["mxfp8", "nvfp4", "fp8_block", "fp8_current", "fp8_delayed"])
def test_weights_held_quantized_are_merged_as_a_whole_and_unmerged_to_their_codes(recipe, stacked):
    torch.manual_seed(0)
    layers = Sequential(ops.GroupedLinear(2, 32, 32, bias=False, stacked=stacked), ops.Linear(32, 16))
    model = fuser.to_quantized(layers, recipe)
    lora.add(model, 2, alpha=3)
    with_values(model)
    expected = copy.deepcopy(model)
    members = [member for operation in expected for member in operation._members()]
    with torch.no_grad():
        for _, weight, a, b in members:
            each = zip(*(t.view(-1, *t.shape[-2:]) for t in (weight.dequantize(), a, b)), strict=True)
            merged = [torch.addmm(w, b_w, a_w, alpha=1.5) for w, a_w, b_w in each]
            weight.copy_(torch.stack(merged).view(weight.shape))
    before, after = codes(model), codes(expected)
    assert not torch.equal(before["1.weight.0"], after["1.weight.0"])
    lora.merge(model)
    assert_same_bits(codes(model), after)
    again = copy.deepcopy(model)
    lora.unmerge(again)
    assert_same_bits(codes(again), before)
    lora.unload(model)
    assert_same_bits(codes(model), after)


def codes(model):
    """The codes and scales of all weights."""
    held = {name: p for name, p in model.named_parameters() if isinstance(p, QuantizedParameter)}
    return {
        f"{name}.{i}": as_copied(tensor).clone()
        for name, parameter in held.items()
        for i, tensor in enumerate(held_tensors(parameter))
    }


def two_operations(model):
    model[3].weight = nn.Parameter(model[0].weight.detach()[0])
    model.append(nn.Embedding(16, 32))
    model[4].weight = model[3].weight


def two_experts(model):
    model[0] = ops.GroupedLinear(3, 32, 64, bias=False, stacked=False)
    model[0].weight2 = model[0].weight0


@pytest.mark.parametrize(
    ("tie", "match"),
    [(two_operations, "3.weight and 4.weight are one"), (two_experts, "0.weight0 and 0.weight2 are one")],
)
def test_what_is_tied_is_not_merged(tie, match):
    model = nn.ModuleList(mlp())
    tie(model)
    lora.add(model, 2)
    with_values(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(RuntimeError, match=match):
        lora.merge(model)
    assert_same_bits(model.state_dict(), before)
    assert not any(adapter.merged for adapter in model if hasattr(adapter, "merged"))


# peft's layout


def test_state_dicts_are_those_of_peft():
    """lora_A holds the groups one after the other; in lora_B they vary fastest. As peft 0.19.1 reads a parameter
    [G, N, K]: delta[e, o, i] = sum_r B[o, r, e] A[e, r, i]."""
    model = adapted()
    state = lora.state_dict(model)
    keys = [f"base_model.model.{at}.lora_{factor}.weight" for at in (0, 2, 3) for factor in "AB"]
    assert list(state) == keys
    assert [list(state[key].shape) for key in keys] == [[12, 32], [64, 12], [12, 32], [32, 12], [4, 32], [16, 4]]
    a, b = state[keys[0]].reshape(3, 4, 32), state[keys[1]].reshape(64, 4, 3)
    delta = 1.5 * torch.einsum("ore,eri->eoi", b, a)
    before = model[0].weight.clone()
    lora.merge(model)
    torch.testing.assert_close(model[0].weight - before, delta, rtol=1e-4, atol=1e-5)


def test_adapters_are_saved_and_loaded(tmp_path):
    model, other = adapted(), mlp()
    torch.save(lora.state_dict(model), tmp_path / "adapter_model.bin")
    lora.add(other, 4, alpha=6)
    lora.load_state_dict(other, torch.load(tmp_path / "adapter_model.bin"))
    assert_same_bits(step(other), step(model))
    assert_same_bits(other.state_dict(), model.state_dict())


# What is refused


class MyLinear(ops.Linear):
    pass


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"rank": 0}, ValueError, r"lora\.add got rank=0\. It must be positive"),
        ({"rank": 2.5}, TypeError, "rank is 2.5, but must be an integer"),
        ({"alpha": "16"}, TypeError, "alpha is '16'"),
        ({"alpha": float("inf")}, ValueError, "alpha is inf, but must be finite"),
        ({"dropout": 1.0}, ValueError, r"dropout is 1\.0\. It is the probability of a zero, from 0 to below 1"),
        ({"targets": ["q_proj"]}, ValueError, r"'q_proj' matches no module .* operations are: '0', '2', '3'\."),
        ({"targets": []}, ValueError, "'nothing' matches no module"),
        ({"targets": [0]}, TypeError, "must be names of modules"),
        ({"targets": "1|0"}, TypeError, "'1' is a SwiGLU"),
        ({"targets": ["4"]}, TypeError, "'4' is a MyLinear, but .* not for subclasses or sharded ones"),
        ({}, TypeError, "'4' is a MyLinear, but .* not for subclasses or sharded ones"),
    ],
)
def test_bad_arguments_change_nothing(arguments, kind, match):
    model = mlp().append(MyLinear(16, 16))
    before = list(model)
    with pytest.raises(kind, match=match):
        lora.add(model, **({"rank": 2} | arguments))
    assert all(one is other for one, other in zip(model, before, strict=True))
    assert all(parameter.requires_grad for parameter in model.parameters())


@pytest.mark.parametrize("compute", [weight_norm, partial(prune.l1_unstructured, name="weight", amount=0.5)])
def test_a_weight_that_is_computed_is_refused_and_nothing_is_frozen(compute):
    model = mlp()
    compute(model[2])
    with pytest.raises(NotImplementedError, match=r"'2' computes its weight \(a parametrization, or pruning\)"):
        lora.add(model, 2)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert lora.add(model, 2, "0|3") == ("0", "3")


@pytest.mark.parametrize("compute", [weight_norm, partial(prune.l1_unstructured, name="weight", amount=0.5)])
def test_a_weight_that_is_computed_later_is_not_merged_and_nothing_is_changed(compute):
    model = adapted()
    y = model(data(), split_sizes=[5, 0, 9])
    compute(model[2])
    with pytest.raises(NotImplementedError, match=r"'2' computes its weight \(a parametrization, or pruning\)"):
        lora.merge(model)
    assert not any(model[at].merged for at in (0, 2, 3))
    if parametrize.is_parametrized(model[2]):
        with pytest.raises(NotImplementedError, match=r"'2' computes its weight .* Remove that first"):
            lora.unload(model)
        parametrize.remove_parametrizations(model[2], "weight")
        with pytest.raises(AttributeError, match=r"assign torch.nn.Parameter\(operation.weight, requires_grad=False\)"):
            lora.merge(model)
        assert not any(model[at].merged for at in (0, 2, 3))
        model[2].weight = nn.Parameter(model[2].weight, requires_grad=False)
        lora.merge(model)
        torch.testing.assert_close(model(data(), split_sizes=[5, 0, 9]), y, rtol=1e-4, atol=1e-4)
        weight_norm(model[2])
        with pytest.raises(NotImplementedError, match="'2' computes its weight"):
            lora.unmerge(model)
        assert all(model[at].merged for at in (0, 2, 3))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
@pytest.mark.parametrize("norm", [torch.nn.utils.weight_norm, torch.nn.utils.spectral_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated")
def test_hooks_that_delete_a_weight_to_compute_it_take_layers_with_adapters(norm, recipe):
    model, plain = adapted(), adapted()
    with autocast(recipe):
        model(data(), split_sizes=[5, 0, 9])  # quantizes the weights
        norm(model[3])
        model.eval()
        y = model(data(), split_sizes=[5, 0, 9])
        with torch.no_grad():
            plain[3].weight.copy_(2 * model[3].weight)
            assert not torch.equal(y, plain(data(), split_sizes=[5, 0, 9]))
            plain[3].weight.copy_(model[3].weight)
            assert torch.equal(y, plain(data(), split_sizes=[5, 0, 9]))


def test_what_has_an_adapter_or_none_is_refused():
    model = mlp()
    for call in (lora.merge, lora.unmerge, lora.unload, lora.state_dict):
        with pytest.raises(RuntimeError, match=r"Sequential has no adapters\. Call lora\.add"):
            call(model)
    lora.add(model, 2)
    with pytest.raises(RuntimeError, match=r"Adapters are not merged: 0, 2, 3\. Call lora\.merge"):
        lora.unmerge(model)
    with pytest.raises(RuntimeError, match="'0' has an adapter"):
        lora.add(model, 2, ["0"])
    lora.merge(model)
    with pytest.raises(RuntimeError, match="Adapters are merged: 0, 2, 3"):
        lora.merge(model)
    with pytest.raises(RuntimeError, match=r"loaded into 0 while its adapter is merged"):
        model.load_state_dict(model.state_dict())
    with pytest.raises(ValueError, match="The model is the Linear itself"):
        lora.add(ops.Linear(4, 4), 2)
    with pytest.raises(ValueError, match="The model is the LoRAGroupedLinear itself"):
        lora.unload(model[0])


def test_states_of_other_adapters_are_refused_and_change_nothing():
    model = adapted()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = lora.state_dict(adapted(rank=2))
    with pytest.raises(ValueError, match=r"0\.lora_A\.weight has shape \[6, 32\], but \[12, 32\] is needed"):
        lora.load_state_dict(model, state)
    for spoiled in (lambda tensor: tensor.to("meta"), Tensor.to_sparse):
        values = lora.state_dict(adapted())
        values["base_model.model.3.lora_B.weight"] = spoiled(values["base_model.model.3.lora_B.weight"])
        with pytest.raises(ValueError, match=r"3\.lora_B\.weight is on \w+, torch\.\w+\. Give dense tensors"):
            lora.load_state_dict(model, values)
    state.pop("base_model.model.0.lora_A.weight")
    state["other"] = torch.zeros(1)
    with pytest.raises(ValueError, match=r"lacks base_model\.model\.0\.lora_A\.weight, and has other for no adapter"):
        lora.load_state_dict(model, state)
    assert_same_bits(model.state_dict(), before)


def test_names_that_differ_in_what_is_in_front_say_what_to_do():
    model, state = adapted(), lora.state_dict(adapted())
    for given, mend in (
        ({f"module.{name}": t for name, t in state.items()}, r"'module\.' in front: give {name\.removeprefix"),
        (model.state_dict(), r"These are names of model\.state_dict\(\): give them to"),
        ({}, r"Give lora\.add the targets that it was saved with"),
    ):
        with pytest.raises(ValueError, match=mend):
            lora.load_state_dict(model, given)


@pytest.mark.parametrize("assign", [False, True])
def test_a_state_saved_while_adapters_were_merged_is_refused(assign, tmp_path):
    """The weights would hold what the adapter adds again."""
    model, x = adapted(), data()
    y = model(x, split_sizes=[5, 0, 9])
    lora.merge(model)
    torch.save(model.state_dict(), tmp_path / "merged.pt")
    merged = torch.load(tmp_path / "merged.pt")
    with pytest.raises(RuntimeError, match=r"The state dict for 0 was saved while its adapter was merged"):
        adapted().load_state_dict(merged, strict=False, assign=assign)
    plain = mlp()
    plain.load_state_dict({name: t for name, t in merged.items() if "lora_" not in name}, assign=assign)
    torch.testing.assert_close(plain(x, split_sizes=[5, 0, 9]), y)
    lora.unmerge(model)
    adapted().load_state_dict(model.state_dict(), assign=assign)


# An adapter of someone else's around an operation


class Wrapper(nn.Module):
    """In the shape of peft's: it holds the layer, calls it, and adds a product."""

    def __init__(self, base_layer, rank):
        super().__init__()
        self.base_layer = base_layer.requires_grad_(False)
        self.lora_A = nn.Linear(base_layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base_layer.out_features, bias=False)

    def forward(self, x, *args, **kwargs):
        return self.base_layer(x, *args, **kwargs) + self.lora_B(self.lora_A(x))


@pytest.mark.parametrize("recipe", ["bf16", "mxfp8"])
def test_a_wrapper_around_a_linear_computes_what_ours_does(recipe):
    model = adapted(alpha=4.0)
    other = mlp()
    lora.add(other, 4, ["0", "2"])
    other[3] = Wrapper(other[3], 4)
    other.load_state_dict({name.replace("3.weight", "3.base_layer.weight").replace("3.bias", "3.base_layer.bias"): t
                           for name, t in model.state_dict().items()})  # fmt: skip
    with autocast(recipe):
        found, expected = step(other), step(model)
    assert_close(found, expected, {torch.float32: 3e-5})


@pytest.mark.parametrize("recipe", ["fp8_current", "mxfp8"])
def test_requantize_after_writes_that_torch_does_not_count(recipe):
    model = Sequential(ops.Linear(64, 64), ops.GELU(), ops.GroupedLinear(2, 64, 64))
    lora.add(model, rank=4, targets=["0", "2"])
    frozen = [p for p in model.parameters() if not p.requires_grad]
    flat = torch.cat([p.detach().flatten() for p in frozen])
    for parameter, part in zip(frozen, flat.split([p.numel() for p in frozen]), strict=True):
        parameter.data = part.view(parameter.shape)
    x, sizes = torch.randn(8, 64, requires_grad=True), torch.tensor([3, 5])

    def step(model) -> list:
        with autocast(recipe=recipe):
            y = model(x, split_sizes=sizes)
        return [y, *torch.autograd.grad(y.sum(), (x, *(p for p in model.parameters() if p.requires_grad)))]

    step(model)
    for write in (
        lambda: flat.mul_(2),
        lambda: frozen[0].data.mul_(3),
        lambda: frozen[-2].detach().numpy().__imul__(0.5),
    ):
        write()
        lora.requantize(model)
        for mine, other in zip(step(model), step(copy.deepcopy(model)), strict=True):
            assert torch.equal(mine, other)
    with pytest.raises(RuntimeError, match="adapter"):
        lora.requantize(Sequential(ops.Linear(8, 8)))
