"""The experts of Hugging Face models run here: against transformers' own, on the model's own parameters."""
# T tokens, H hidden size, F expert width, E experts

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.utils import parametrize

reason = "transformers 5 is not installed here, so its models cannot be run: `pip install 'fuser-ops[hf]'`."
pytest.importorskip("transformers", minversion="5", reason=reason)

import transformers  # noqa: E402
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation  # noqa: E402

import fuser.hf  # noqa: E402
from fuser import Sequential, autocast, ops  # noqa: E402
from recipes.mxfp8 import MXFP8BlockScaling  # noqa: E402
from recipes.registry import RECIPES  # noqa: E402
from tests.check_operation import DEVICES  # noqa: E402
from tests.hf_models import GRADIENTS, LOGITS, MODELS, E, F, H, ids, make, step  # noqa: E402
from tests.reference import assert_close, assert_same_bits  # noqa: E402

pytestmark = [pytest.mark.hf, pytest.mark.rest]

EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
FEW_MODELS = pytest.mark.parametrize("name", ["qwen3-moe", "gpt-oss"])


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(ALL_EXPERTS_FUNCTIONS), "_global_mapping", dict(ALL_EXPERTS_FUNCTIONS._global_mapping))
    fuser.hf.register()


def experts_of(model: nn.Module) -> Any:
    """The experts of the last layer."""
    return [module for module in model.modules() if hasattr(module, "is_transposed")][-1]


def routed(experts: Any, tokens: int = 7, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x [T, H], indices [T, 2] and probs [T, 2]."""
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(tokens, H, generator=generator)
    indices = torch.stack([torch.randperm(E, generator=generator)[:2] for _ in range(tokens)])
    probs = torch.rand(tokens, 2, generator=generator)
    return x.to(device).requires_grad_(), indices.to(device), probs.to(device).requires_grad_()


def apply(experts: Any, implementation: str, x: Tensor, indices: Tensor, probs: Tensor) -> dict[str, Tensor | None]:
    """y and every gradient."""
    experts.config._experts_implementation = implementation
    for tensor in (x, probs, *experts.parameters()):
        tensor.grad = None
    y = experts(x, indices, probs)
    y.square().sum().backward()
    return {"y": y.detach(), "x": x.grad, "probs": probs.grad} | {n: p.grad for n, p in experts.named_parameters()}


# ---------------------------------------------------------------------------------------------------------- the models


@EVERY_MODEL
def test_logits_and_every_gradient_are_those_of_transformers(name: str) -> None:
    model = make(name)
    expected, ours = step(model, "eager"), step(model, "fuser")
    assert all(gradient is not None for key, gradient in expected.items() if "experts" in key)
    assert_close({"logits": ours.pop("logits")}, {"logits": expected.pop("logits")}, LOGITS)
    assert_close(ours, expected, GRADIENTS)


@EVERY_MODEL
def test_the_experts_run_as_one_fused_operation(name: str) -> None:
    lines = fuser.hf.experts_layer(experts_of(make(name))).explain(recipe="mxfp8").splitlines()
    assert [line for line in lines if "GroupedMLP = " in line] and "not fused" not in "\n".join(lines)


def test_a_copy_for_the_time_of_a_product_is_shown() -> None:
    shown = {n: fuser.hf.experts_layer(experts_of(make(n))).explain(device="cuda") for n in ("gpt-oss", "olmoe")}
    assert "of a transposed copy of W" in shown["gpt-oss"] and "transposed" not in shown["olmoe"]


@EVERY_MODEL
def test_generate_gives_the_same_tokens(name: str) -> None:
    model = make(name).eval()
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    expected = model.generate(ids(), **settings)
    model.set_experts_implementation("fuser")
    assert torch.equal(model.generate(ids(), **settings), expected)


@FEW_MODELS
@pytest.mark.parametrize("recipe", ["fuser", "fuser:mxfp8", "autocast"])
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_gradient_checkpointing_changes_no_bit(name: str, recipe: str, reentrant: bool) -> None:
    model = make(name).train()
    model.set_experts_implementation("fuser" if recipe == "autocast" else recipe)
    context = (lambda: autocast("mxfp8")) if recipe == "autocast" else nullcontext

    def run() -> dict[str, Tensor | None]:
        model.zero_grad()
        with context():
            output = model(ids(), labels=ids(), use_cache=False)
        output.loss.backward()
        return {"logits": output.logits.detach()} | {name: p.grad for name, p in model.named_parameters()}

    expected = run()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert any(getattr(layer, "gradient_checkpointing", False) for layer in model.modules())
    assert_same_bits(run(), expected)


@FEW_MODELS
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_block", "fp8_current", "nvfp4"])
def test_a_recipe_in_the_name_is_the_recipe_of_an_autocast(name: str, recipe: str) -> None:
    model = make(name)
    high_precision = step(model, "fuser")["logits"]
    torch.manual_seed(0)
    by_name = step(model, f"fuser:{recipe}")
    torch.manual_seed(0)
    with autocast(recipe):
        assert_same_bits(step(model, "fuser"), by_name)
    error = (by_name["logits"] - high_precision).norm() / high_precision.norm()
    assert 1e-4 < error < 0.5


def test_the_name_outweighs_the_surrounding_autocast() -> None:
    model = make("olmoe")
    expected = step(model, "fuser")
    with autocast("mxfp8"):
        assert_same_bits(step(model, "fuser:high_precision"), expected)


@pytest.mark.parametrize("recipe", ["fuser", "fuser:mxfp8"])
@FEW_MODELS
def test_a_model_in_bf16_gives_bf16(name: str, recipe: str) -> None:
    model = make(name).bfloat16()
    expected, ours = step(model, "eager"), step(model, recipe)
    assert ours["logits"].dtype == torch.bfloat16
    error = (ours["logits"] - expected["logits"]).float().norm() / expected["logits"].float().norm()
    assert error < (0.05 if recipe == "fuser" else 0.3)  # under a recipe a token may choose another expert


@FEW_MODELS
def test_mixed_precision_of_torch_reaches_the_products(name: str) -> None:
    model = make(name)
    model.set_experts_implementation("fuser")
    experts = experts_of(model)
    x, indices, probs = routed(experts)
    with torch.autocast("cpu", torch.bfloat16):
        y = experts(x, indices, probs)
    y.sum().backward()
    assert y.dtype == torch.float32
    assert torch.equal(y, y.bfloat16().float())
    assert all(p.grad.dtype == torch.float32 for p in experts.parameters())


# ----------------------------------------------------------------------------------------------------------- sentinels


@FEW_MODELS
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("recipe", ["fuser", "fuser:mxfp8"])
def test_the_index_behind_the_last_expert_is_nobody(name: str, device: str, recipe: str) -> None:
    experts = experts_of(make(name)).to(device)
    x, indices, probs = routed(experts, device=device)
    everybody = apply(experts, recipe, x, indices, probs)
    indices[0, 1] = indices[3] = indices[6, 0] = E
    ours = apply(experts, recipe, x, indices, probs)
    assert not ours["y"][3].any() and not ours["x"][3].any()
    assert not ours["probs"][indices == E].any()
    complete = [1, 2, 4, 5]
    assert_close({"y": ours["y"][complete]}, {"y": everybody["y"][complete]}, GRADIENTS)
    with torch.no_grad():
        probs[indices == E] = torch.nan  # nor does it matter what weight nobody has
    assert torch.equal(apply(experts, recipe, x, indices, probs)["y"], ours["y"])


@FEW_MODELS
def test_sentinels_are_those_of_the_grouped_products_of_transformers(name: str) -> None:
    experts = experts_of(make(name))
    experts._is_expert_parallel = True
    x, indices, probs = routed(experts)
    indices[0, 1] = indices[3] = indices[6, 0] = E
    with torch.no_grad():
        probs[indices == E] = 0
    assert_close(apply(experts, "fuser", x, indices, probs), apply(experts, "batched_mm", x, indices, probs), GRADIENTS)


def test_nobody_chosen_at_all_gives_zeros() -> None:
    experts = experts_of(make("gpt-oss"))
    x, indices, probs = routed(experts)
    given = apply(experts, "fuser", x, torch.full_like(indices, E), probs)
    assert all(tensor is not None and not tensor.any() for tensor in given.values())


# ---------------------------------------------------------------------------------------------------------- parameters


@FEW_MODELS
def test_the_parameters_are_the_models_own(name: str) -> None:
    experts = experts_of(make(name))
    mine = {id(parameter) for parameter in fuser.hf.experts_layer(experts).parameters()}
    assert mine == {id(parameter) for parameter in experts.parameters()}


@EVERY_MODEL
def test_state_and_saved_files_stay_as_they_were(name: str, tmp_path: Any) -> None:
    model = make(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    ours = step(model, "fuser:fp8_delayed")
    assert_same_bits(model.state_dict(), before)
    model.save_pretrained(tmp_path)
    kind = getattr(transformers, MODELS[name].model)
    again = kind.from_pretrained(tmp_path, experts_implementation="fuser")
    assert_same_bits(again.state_dict(), before)
    assert_close({"logits": again(ids()).logits}, {"logits": step(model, "eager")["logits"]}, LOGITS)
    assert not torch.equal(ours["logits"], again(ids()).logits)
    assert "fuser" not in (tmp_path / "config.json").read_text()


@FEW_MODELS
def test_a_step_of_the_optimizer_is_seen(name: str) -> None:
    models = make(name), make(name)
    models[1].load_state_dict(models[0].state_dict())
    for implementation, model in zip(("eager", "fuser"), models, strict=True):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            step(model, implementation)
            optimizer.step()
    expected, ours = (dict(model.named_parameters()) for model in models)
    assert_close(ours, expected, GRADIENTS)


@FEW_MODELS
@pytest.mark.parametrize("assign", [False, True])
def test_loaded_weights_are_seen(name: str, assign: bool) -> None:
    model, other = make(name), make(name)
    step(model, "fuser")
    model.load_state_dict(other.state_dict(), assign=assign)
    assert_same_bits({"logits": step(model)["logits"]}, {"logits": step(other, "fuser")["logits"]})


@FEW_MODELS
def test_weights_computed_by_an_adapter_train_what_they_are_computed_from(name: str) -> None:
    experts = experts_of(make(name))
    parametrize.register_parametrization(experts, "gate_up_proj", Moved(experts.gate_up_proj))
    x, indices, probs = routed(experts)

    def twice(implementation: str) -> dict[str, Tensor | None]:
        """Two forwards before the backward, each with weights of its own."""
        experts.config._experts_implementation = implementation
        experts.zero_grad()
        (experts(x, indices, probs).sum() + experts(2 * x, indices, probs).square().sum()).backward()
        return {n: p.grad for n, p in experts.named_parameters()}

    expected, ours = twice("eager"), twice("fuser")
    assert any("delta" in key for key in ours)
    assert_close(ours, expected, GRADIENTS)


class Moved(nn.Module):
    """weight + delta, with a delta of its own."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.delta = nn.Parameter(0.1 * torch.randn_like(weight))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


@FEW_MODELS
@pytest.mark.parametrize("reentrant", [False, True], ids=["not reentrant", "reentrant"])
def test_weights_of_an_adapter_are_computed_again_under_the_recipe_of_the_forward(name: str, reentrant: bool) -> None:
    model = make(name).train()
    model.set_experts_implementation("fuser")
    for experts in [module for module in model.modules() if hasattr(module, "is_transposed")]:
        parametrize.register_parametrization(experts, "down_proj", Moved(experts.down_proj))

    def run() -> dict[str, Tensor | None]:
        model.zero_grad()
        with autocast("mxfp8"):
            output = model(ids(), labels=ids(), use_cache=False)
        output.loss.backward()
        return {"logits": output.logits.detach()} | {name: p.grad for name, p in model.named_parameters()}

    expected = run()
    model.activation_checkpointing_enable({"use_reentrant": reentrant})
    assert_same_bits(run(), expected)


def test_functional_calls_get_gradients_of_their_own_weights() -> None:
    experts = experts_of(make("qwen3-moe"))
    experts.config._experts_implementation = "fuser"
    given = routed(experts)
    weights = {name: p.detach().clone().requires_grad_() for name, p in experts.named_parameters()}
    functional_call(experts, weights, given).square().sum().backward()
    expected = apply(experts, "eager", *given)
    assert_close({n: w.grad for n, w in weights.items()}, {n: expected[n] for n in weights}, GRADIENTS)


def test_frozen_weights_get_no_gradient() -> None:
    experts = experts_of(make("gpt-oss"))
    experts.gate_up_proj.requires_grad_(False)
    experts.down_proj_bias.requires_grad_(False)
    given = routed(experts)
    assert_close(apply(experts, "fuser", *given), apply(experts, "eager", *given), GRADIENTS)


def test_a_copy_has_weights_of_its_own() -> None:
    model = make("mixtral")
    before = step(model, "fuser")["logits"]
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.5)
    assert not torch.equal(step(other)["logits"], before)
    assert torch.equal(step(model)["logits"], before)


def test_what_is_kept_of_a_model_goes_with_it() -> None:
    model = make("mixtral")
    step(model, "fuser")
    gone = weakref.ref(experts_of(model).gate_up_proj)
    del model
    gc.collect()
    assert gone() is None


def test_amaxes_of_delayed_scaling_outlive_a_change_of_the_parameters() -> None:
    experts = experts_of(make("qwen3-moe"))
    given = routed(experts)
    apply(experts, "fuser:fp8_delayed", *given)
    before = dict(fuser.hf.experts_layer(experts, "fp8_delayed").named_buffers())
    assert before
    experts.down_proj = nn.Parameter(experts.down_proj.detach().clone())
    after = dict(fuser.hf.experts_layer(experts, "fp8_delayed").named_buffers())
    assert before.keys() == after.keys() and all(after[name] is buffer for name, buffer in before.items())


# ------------------------------------------------------------------------------------------------------ other experts


def experts_class(gate: Callable[[Any, Tensor], Tensor] | None = None, **flags: Any) -> Any:
    """An experts class of one's own, in the form of transformers."""

    class Experts(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            gated, swapped = flags.get("has_gate", True), flags.get("is_transposed", False)
            shapes = {"gate_up_proj" if gated else "up_proj": ((1 + gated) * F, H), "down_proj": (H, F)}
            for name, shape in shapes.items():
                setattr(self, name, nn.Parameter(torch.randn(E, *(shape[::-1] if swapped else shape)) / 5))
                if flags.get("has_bias"):
                    setattr(self, f"{name}_bias", nn.Parameter(torch.randn(E, shape[0])))
            self.act_fn = transformers.activations.ACT2FN[config.hidden_act]
            self.num_experts = E

    if gate is not None:
        Experts._apply_gate = gate
    return use_experts_implementation(**flags)(Experts)


def own_experts(hidden_act: str = "silu", gate: Any = None, **flags: Any) -> Any:
    return experts_class(gate, **flags)(transformers.Qwen3MoeConfig(hidden_act=hidden_act))


def interleaved_silu(self: Any, h: Tensor) -> Tensor:
    return nn.functional.silu(h[..., ::2]) * h[..., 1::2]


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize(
    ("hidden_act", "gate", "has_gate"),
    [("silu", None, True), ("silu", interleaved_silu, True), ("relu2", None, False)],
    ids=["halves", "interleaved", "no gate"],
)
def test_every_layout_is_that_of_transformers(
    is_transposed: bool, has_bias: bool, hidden_act: str, gate: Any, has_gate: bool
) -> None:
    flags = {"is_transposed": is_transposed, "has_bias": has_bias, "has_gate": has_gate}
    experts = own_experts(hidden_act, gate, **flags, is_concatenated=gate is None)
    given = routed(experts)
    assert_close(apply(experts, "fuser", *given), apply(experts, "batched_mm", *given), GRADIENTS)


def clamped(limit: float) -> Callable[[Any, Tensor], Tensor]:
    def gate(self: Any, h: Tensor) -> Tensor:
        a, b = h.chunk(2, dim=-1)
        return nn.functional.silu(a.clamp(max=limit)) * b.clamp(-limit, limit)

    return gate


@pytest.mark.parametrize(
    ("experts", "names"),
    [
        (lambda: own_experts("gelu"), "Experts._apply_gate computes none of the activations"),
        (lambda: own_experts("silu", clamped(7.0)), "Experts._apply_gate computes none of the activations"),
        (lambda: own_experts("silu", clamped(1e4)), "Experts._apply_gate computes none of the activations"),
        (lambda: own_experts("gelu", has_gate=False), r"Experts.act_fn \(GELUActivation\) computes none"),
        (lambda: own_experts(has_post_expert_norm=True), "Experts normalizes what each expert returns"),
    ],
    ids=["gelu", "clamped silu", "silu with a high limit", "gelu without a gate", "norm"],
)
def test_experts_that_compute_something_else_are_refused(experts: Callable[[], Any], names: str) -> None:
    with pytest.raises(NotImplementedError, match=f"{names}.*set_experts_implementation"):
        apply(module := experts(), "fuser", *routed(module))


def test_another_activation_is_recognized_anew() -> None:
    module = own_experts("silu")
    given = routed(module)
    expected = apply(module, "fuser", *given)
    own, module.act_fn = module.act_fn, nn.ReLU()
    with pytest.raises(NotImplementedError, match="Experts._apply_gate computes none of the activations"):
        apply(module, "fuser", *given)
    for module.act_fn in (nn.SiLU(), own):
        assert_same_bits(apply(module, "fuser", *given), expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("act_fn has forward hooks", lambda own: own.act_fn.register_forward_hook(lambda *_: None)),
        ("act_fn has backward hooks", lambda own: own.act_fn.register_full_backward_hook(lambda *_: None)),
        ("act_fn has a forward of its own", lambda own: setattr(own.act_fn, "forward", torch.relu)),
        ("_apply_gate was replaced", lambda own: setattr(own, "_apply_gate", torch.relu)),
    ],
    ids=["hook", "backward hook", "forward", "gate"],
)
def test_what_is_put_on_the_activation_is_refused(name: str, change: Callable[[Any], Any]) -> None:
    module = own_experts("silu")
    given = routed(module)
    apply(module, "fuser", *given)
    change(module)
    with pytest.raises(RuntimeError, match=f"Experts.{name}.*Undo that.*grouped_mm"):
        apply(module, "fuser", *given)


def test_a_module_without_experts_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Linear is no experts module of transformers 5.*Pass the module that holds"):
        fuser.hf.experts_layer(nn.Linear(2, 2))


# ------------------------------------------------------------------------------------------------------------- names


def test_every_recipe_has_a_name() -> None:
    names = fuser.hf.register()
    assert names == ("fuser", *(f"fuser:{name}" for kind in RECIPES for name in kind.names))
    assert set(names) <= set(ALL_EXPERTS_FUNCTIONS)


def test_a_recipe_of_ones_own_has_the_name_that_it_is_given() -> None:
    assert fuser.hf.register(mine=MXFP8BlockScaling())[-1] == "fuser:mine"
    model = make("olmoe")
    assert_same_bits(step(model, "fuser:mine"), step(model, "fuser:mxfp8"))


def test_a_recipe_that_there_is_not_registers_nothing() -> None:
    before = set(ALL_EXPERTS_FUNCTIONS)
    with pytest.raises(ValueError, match="there is no recipe named 'fp9'"):
        fuser.hf.register(better="mxfp8", worse="fp9")
    assert set(ALL_EXPERTS_FUNCTIONS) == before
    with pytest.raises(ValueError, match="fuser:fp9"):
        make("olmoe").set_experts_implementation("fuser:fp9")


# ------------------------------------------------------------------------------------------- models of one's own


class Routed(transformers.PreTrainedModel):
    """A model of transformers that consists of operations, initialised as its documentation has it."""

    config_class = transformers.PreTrainedConfig

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.layer = Sequential(
            ops.Router(H, E, topk=2, score_function="sigmoid", expert_bias=True, bias=True),
            ops.Dispatch(E),
            ops.GroupedLinear(E, H, 2 * F),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(E, F, H, stacked=False),
            ops.Combine(),
        )
        self.post_init()

    def _init_weights(self, module: Any) -> None:
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def test_what_is_loaded_into_operations_stays_where_their_model_resets_parameters(tmp_path: Any) -> None:
    model = Routed(transformers.PreTrainedConfig())
    model.layer[0].expert_bias.uniform_()
    model.save_pretrained(tmp_path)
    loaded = Routed.from_pretrained(tmp_path)
    assert_same_bits(loaded.state_dict(), model.state_dict())
    assert not loaded.layer[0].tokens_since_update.any()
