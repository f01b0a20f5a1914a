"""Whole mixture-of-experts blocks of Hugging Face models run here, the router included."""
# T tokens, H hidden size, E experts

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

reason = "transformers 5 is not installed here, so its models cannot be run: `pip install 'fuser-ops[hf]'`."
pytest.importorskip("transformers", minversion="5", reason=reason)

import transformers  # noqa: E402

import fuser.hf  # noqa: E402
from fuser import autocast  # noqa: E402
from tests.hf_models import GRADIENTS, LOGITS, MODELS, ids, make, step  # noqa: E402
from tests.reference import assert_close, assert_same_bits  # noqa: E402

pytestmark = [pytest.mark.hf, pytest.mark.rest]
EVERY_MODEL = pytest.mark.parametrize("name", MODELS)
SIGMOID = pytest.mark.parametrize("name", ["deepseek-v3", "glm-4.5"])


def blocks(model: nn.Module) -> list[fuser.hf.MoEBlock]:
    return [module for module in model.modules() if isinstance(module, fuser.hf.MoEBlock)]


def both(name: str, **settings: Any) -> tuple[Any, Any]:
    """A model of transformers, and the same one with its blocks replaced."""
    model = make(name, **settings)
    return model, fuser.hf.replace_moe_blocks(copy.deepcopy(model))


@EVERY_MODEL
def test_logits_and_every_gradient_are_those_of_transformers(name: str) -> None:
    theirs, ours = map(step, both(name))
    assert_close({"logits": ours.pop("logits")}, {"logits": theirs.pop("logits")}, LOGITS)
    assert_close(ours, theirs, GRADIENTS)


@EVERY_MODEL
def test_a_block_is_one_pipeline_with_its_router_in_it(name: str) -> None:
    _, model = both(name)
    assert len(blocks(model)) == (1 if "first_k_dense_replace" in MODELS[name].settings else 2)
    shown = blocks(model)[0].layer().explain()
    assert shown.count("stage ") == 1 and "Router" in shown and "GroupedMLP = " in shown


@EVERY_MODEL
def test_generate_gives_the_same_tokens(name: str) -> None:
    settings = {"max_new_tokens": 12, "do_sample": False, "attention_mask": torch.ones(2, 9, dtype=torch.int64)}
    theirs, ours = (model.eval().generate(ids(), **settings) for model in both(name))
    assert torch.equal(theirs, ours)


@pytest.mark.parametrize("name", [name for name in MODELS if name not in ("deepseek-v3", "glm-4.5")])
def test_router_logits_and_the_auxiliary_loss_are_those_of_transformers(name: str) -> None:
    def run(model: Any) -> dict[str, Tensor | None]:
        for _ in range(2):  # transformers hooks the routers at the first call
            model.zero_grad()
            output = model(ids(), labels=ids(), output_router_logits=True)
            output.loss.backward()
        logits = {f"layer {index}": logits for index, logits in enumerate(output.router_logits)}
        assert len(logits) == 2
        gradients = {name: p.grad for name, p in model.named_parameters()}
        return {"loss": output.loss, "aux_loss": output.aux_loss} | logits | gradients

    theirs, ours = map(run, both(name, router_aux_loss_coef=1.0))
    assert_close(ours, theirs, GRADIENTS)


@SIGMOID
def test_router_logits_of_a_bare_model_are_recorded(name: str) -> None:
    theirs, ours = (model.model(ids(), output_router_logits=True).router_logits for model in both(name))
    assert len(ours) == 1
    assert_close({"logits": ours[0]}, {"logits": theirs[0]}, GRADIENTS)


@EVERY_MODEL
def test_state_and_saved_files_stay_as_they_were(name: str, tmp_path: Any) -> None:
    model, replaced = both(name)
    before = model.state_dict()
    assert list(replaced.state_dict()) == list(before)
    step(replaced)
    assert_same_bits(replaced.state_dict(), before)
    replaced.save_pretrained(tmp_path)
    loaded = getattr(transformers, MODELS[name].model).from_pretrained(tmp_path)
    assert_same_bits(loaded.state_dict(), before)
    loaded = fuser.hf.replace_moe_blocks(loaded)
    assert_same_bits({"logits": loaded(ids()).logits}, {"logits": replaced.eval()(ids()).logits})


@EVERY_MODEL
def test_gradient_checkpointing_changes_no_bit(name: str) -> None:
    _, model = both(name)
    fuser.hf.replace_moe_blocks(model.train(), "mxfp8")
    expected = step(model)
    model.activation_checkpointing_enable({"use_reentrant": False})
    assert_same_bits(step(model), expected)


@EVERY_MODEL
def test_a_recipe_is_that_of_an_autocast_and_may_be_changed(name: str) -> None:
    _, model = both(name)
    high_precision = step(model)
    with autocast("mxfp8"):
        expected = step(model)
    assert_same_bits(step(fuser.hf.replace_moe_blocks(model, "mxfp8")), expected)
    assert not torch.equal(expected["logits"], high_precision["logits"])
    assert_same_bits(step(fuser.hf.replace_moe_blocks(model)), high_precision)


def test_noise_on_the_input_is_that_of_transformers() -> None:
    results = []
    for model in both("mixtral", router_jitter_noise=0.5):
        torch.manual_seed(1)
        results.append(step(model.train()))
        torch.manual_seed(2)
        assert not torch.equal(step(model)["logits"], results[-1]["logits"])
    assert_close(results[1], results[0], GRADIENTS)


@pytest.mark.parametrize("recipe", [None, "mxfp8", "high_precision"])
def test_a_router_in_float32_leaves_the_experts_in_bf16(recipe: str | None) -> None:
    model = make("qwen3-moe").bfloat16()
    replaced = fuser.hf.replace_moe_blocks(copy.deepcopy(model), recipe)
    block = blocks(replaced)[0]
    x = torch.randn(2, 5, 32, dtype=torch.bfloat16)
    in_bf16 = block(x)
    block.gate.float()
    y = block(x)
    y.sum().backward()
    assert block.layer().explain().count("stage ") == 2
    assert_same_bits({"y": y}, {"y": in_bf16})  # logits are float32 products in both, of the same numbers
    assert block.gate.weight.grad.dtype == torch.float32
    assert block.experts.down_proj.grad.dtype == torch.bfloat16


@SIGMOID
def test_the_bias_of_the_choice_is_the_models_own(name: str) -> None:
    model, replaced = both(name)
    block = blocks(replaced)[0]
    before = step(replaced.train())["logits"]
    router = block.layer()[0]
    assert int(router.tokens_since_update.sum()) == 2 * 9 * 2
    router.update_expert_bias(rate=0.5)
    bias = block.gate.e_score_correction_bias
    assert router.expert_bias is bias
    assert not torch.equal(step(replaced)["logits"], before)
    model.load_state_dict(replaced.state_dict())
    assert_close({"logits": step(model)["logits"]}, {"logits": step(replaced)["logits"]}, LOGITS)
    model.load_state_dict(make(name).state_dict())
    replaced.load_state_dict(model.state_dict(), assign=True)
    assert_close({"logits": step(model)["logits"]}, {"logits": step(replaced)["logits"]}, LOGITS)


def test_a_bias_in_16_bits_is_not_updated_and_the_counts_stay() -> None:
    block = blocks(both("deepseek-v3")[1].bfloat16())[0].train()
    block(torch.randn(2, 9, 32, dtype=torch.bfloat16))
    router = block.layer()[0]
    bias = block.gate.e_score_correction_bias
    before = bias.clone(), router.tokens_since_update.clone()
    assert router.expert_bias is bias and int(before[1].sum()) == 2 * 9 * 2
    with pytest.raises(
        RuntimeError, match=r"expert_bias is torch.bfloat16, in which steps of 0.001 vanish.*\.float\(\)"
    ):
        router.update_expert_bias()
    assert torch.equal(bias, before[0]) and torch.equal(router.tokens_since_update, before[1])
    block.gate.e_score_correction_bias = bias.float()
    router = block.layer()[0]
    assert torch.equal(router.tokens_since_update, before[1])
    router.update_expert_bias()
    assert_same_bits(
        {"bias": block.gate.e_score_correction_bias},
        {"bias": before[0].float() + 1e-3 * (before[1].float().mean() - before[1]).sign()},
    )


@pytest.mark.parametrize(
    ("name", "module", "setting", "values"),
    [
        ("qwen3-moe", "gate", "top_k", (4, 3)),
        ("olmoe", "gate", "norm_topk_prob", (True, False)),
        ("glm-4.5", "gate", "routed_scaling_factor", (3.0, 0.5)),
        ("gpt-oss", "experts", "limit", (0.125, 0.5)),
    ],
)
def test_changed_settings_are_those_of_the_next_call(name: str, module: str, setting: str, values: Any) -> None:
    models = both(name)
    before = step(models[1])["logits"]
    for value in values:
        for model in models:
            for owner in [getattr(layer.mlp, module) for layer in model.model.layers if hasattr(layer.mlp, module)]:
                setattr(owner, setting, value)
        theirs, ours = map(step, models)
        assert not torch.equal(ours["logits"], before)
        assert_close(ours, theirs, GRADIENTS)
        before = ours["logits"]


def test_a_changed_setting_keeps_the_counts_of_tokens() -> None:
    _, model = both("deepseek-v3")
    block = blocks(model.train())[0]
    step(model)
    block.gate.top_k = 3
    step(model)
    assert int(block.layer()[0].tokens_since_update.sum()) == 2 * 9 * (2 + 3)


def test_a_copy_and_a_pickled_block_compute_with_their_own_weights(tmp_path: Any) -> None:
    _, model = both("olmoe")
    before = step(model)["logits"]
    torch.save(model, tmp_path / "model.pt")
    for other in (copy.deepcopy(model), torch.load(tmp_path / "model.pt", weights_only=False)):
        assert torch.equal(step(other)["logits"], before)
        with torch.no_grad():
            blocks(other)[0].experts.down_proj.mul_(2)
        assert not torch.equal(step(other)["logits"], before)
    assert torch.equal(step(model)["logits"], before)


# ------------------------------------------------------------------------------------------------------------ refusals


@pytest.mark.parametrize(
    ("name", "add"),
    [
        ("gate", lambda block: block.gate.register_forward_pre_hook(lambda *_: None)),
        ("experts", lambda block: block.experts.register_forward_hook(lambda *_: None)),
        ("gate", lambda block: block.gate.register_full_backward_hook(lambda *_: None)),
        ("experts", lambda block: block.experts.register_full_backward_pre_hook(lambda *_: None)),
    ],
    ids=["before the router", "behind the experts", "backward of the router", "backward of the experts"],
)
def test_hooks_that_would_not_run_are_refused(name: str, add: Callable[[Any], Any]) -> None:
    _, model = both("olmoe")
    add(blocks(model)[0])
    with pytest.raises(
        RuntimeError, match=rf"OlmoeSparseMoeBlock.{name} has (for|back)ward hooks.*Put the hooks on the block"
    ):
        model(ids())


@pytest.mark.parametrize("name", ["gate", "experts", "experts.act_fn"])
def test_a_forward_put_on_a_module_that_is_not_called_is_refused(name: str) -> None:
    _, model = both("olmoe")
    module = blocks(model)[0].get_submodule(name)
    expected = model(ids()).logits
    plain = module.forward
    module.forward = lambda *args: plain(*args)
    with pytest.raises(RuntimeError, match=rf"{name.split('.')[-1]} has a forward of its own, but"):
        model(ids())
    del module.forward
    assert_same_bits({"logits": model(ids()).logits}, {"logits": expected})


def test_hooks_of_accelerate_are_refused_where_they_do_more_than_move_tensors_to_a_device() -> None:
    hooks = pytest.importorskip(
        "accelerate.hooks", reason="accelerate is not installed here: `pip install 'fuser-ops[hf]'`."
    )
    _, model = both("olmoe")
    expected = {"logits": model(ids()).logits}
    block = blocks(model)[0]
    for module in (block, block.gate, block.experts):
        hooks.add_hook_to_module(module, hooks.AlignDevicesHook("cpu"))
    assert_same_bits({"logits": model(ids()).logits}, expected)
    hooks.add_hook_to_module(block.gate, hooks.ModelHook(), append=True)
    with pytest.raises(
        RuntimeError, match=r"gate has hooks of accelerate that do more than move.*Put the hooks on the block"
    ):
        model(ids())
    hooks.remove_hook_from_module(block.gate)  # its own forward is now on the module
    assert_same_bits({"logits": model(ids()).logits}, expected)
    hooks.add_hook_to_module(block.experts, hooks.AlignDevicesHook("cpu", offload=True))
    with pytest.raises(RuntimeError, match=r"experts has hooks of accelerate"):
        model(ids())


def test_another_activation_is_refused_until_it_is_put_back() -> None:
    _, model = both("olmoe")
    experts = blocks(model)[0].experts
    expected, own = model(ids()).logits, experts.act_fn
    experts.act_fn = nn.ReLU()
    for _ in range(2):
        with pytest.raises(NotImplementedError, match=r"computes none of the activations.*Leave the blocks"):
            model(ids())
    experts.act_fn = own
    assert_same_bits({"logits": model(ids()).logits}, {"logits": expected})


@pytest.mark.parametrize("how", ["hook", "forward"])
def test_blocks_with_something_on_them_are_refused_before_anything_changes(how: str) -> None:
    model = make("olmoe")
    block = model.model.layers[1].mlp
    if how == "hook":
        block.register_forward_hook(lambda *_: None)
    else:
        block.forward = lambda x, plain=block.forward: plain(x)
    with pytest.raises(
        RuntimeError, match=r"layers\.1\.mlp \(OlmoeSparseMoeBlock\) has .*replace the blocks, and put it on"
    ):
        fuser.hf.replace_moe_blocks(model)
    assert not blocks(model)


def test_a_hook_that_changes_the_routing_is_refused() -> None:
    _, model = both("olmoe")
    seen = []
    block = blocks(model)[0]
    block.gate.register_forward_hook(lambda module, args, kwargs, output: seen.append(output), with_kwargs=True)
    model(ids())
    assert [tuple(tensor.shape) for tensor in seen[0]] == [(18, 6), (18, 2), (18, 2)]
    block.gate.register_forward_hook(lambda module, args, output: output)
    with pytest.raises(RuntimeError, match="forward hook of OlmoeTopKRouter returned a tuple"):
        model(ids())


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="Linear has no mixture-of-experts block that can be replaced: Qwen3MoeSparse"):
        fuser.hf.replace_moe_blocks(nn.Linear(2, 2))


def test_other_blocks_are_refused_before_anything_changes() -> None:
    config = transformers.Qwen2MoeConfig(
        vocab_size=64, hidden_size=32, intermediate_size=24, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_experts=6, moe_intermediate_size=24, shared_expert_intermediate_size=24,
    )  # fmt: skip
    models = nn.ModuleList([make("olmoe"), transformers.Qwen2MoeForCausalLM(config)])
    with pytest.raises(NotImplementedError, match=r"1\.model.*\(Qwen2MoeExperts\) belongs to no block that can"):
        fuser.hf.replace_moe_blocks(models)
    assert not blocks(models)


def test_other_experts_are_refused_before_anything_changes() -> None:
    models = nn.ModuleList([make("olmoe"), make("olmoe", hidden_act="gelu")])
    with pytest.raises(NotImplementedError, match="OlmoeExperts._apply_gate computes none of the activations"):
        fuser.hf.replace_moe_blocks(models)
    with pytest.raises(ValueError, match="there is no recipe named 'fp9'"):
        fuser.hf.replace_moe_blocks(models[0], "fp9")
    assert not blocks(models)


class Adapter(nn.Module):
    """Stands where the experts stood, as an adapter of PEFT does."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer


def test_experts_within_an_adapter_are_refused() -> None:
    model = make("olmoe")
    model.model.layers[1].mlp.experts = Adapter(model.model.layers[1].mlp.experts)
    with pytest.raises(NotImplementedError, match=r"OlmoeSparseMoeBlock holds a Adapter.*runs adapters too"):
        fuser.hf.replace_moe_blocks(model)
    assert not blocks(model)
    _, replaced = both("olmoe")
    blocks(replaced)[0].experts = Adapter(blocks(replaced)[0].experts)
    with pytest.raises(NotImplementedError, match=r"OlmoeSparseMoeBlock holds a Adapter"):
        replaced(ids())


@pytest.mark.parametrize("way", ["experts", "blocks"])
def test_prepare_and_explain_find_what_computes_for_a_model(way: str) -> None:
    model, replaced = both("qwen3-moe")
    if way == "experts":
        fuser.hf.register()
        model.set_experts_implementation("fuser:fp8_delayed")
        layers = [fuser.hf.experts_layer(layer.mlp.experts, "fp8_delayed") for layer in model.model.layers]
    else:
        model = fuser.hf.replace_moe_blocks(replaced, "fp8_delayed")
        layers = [block.layer() for block in blocks(model)]
    fuser.prepare(model, "mxfp8")
    made = [dict(layer.named_buffers()) for layer in layers]
    assert all(any(name.endswith("input_scale") for name in buffers) for buffers in made)
    step(model)
    assert all(dict(layer.named_buffers())[n] is b for layer, m in zip(layers, made, strict=True) for n, b in m.items())
    rows = fuser.explain(model).splitlines()[1:]
    assert len(rows) == 2 and all("fp8_delayed" in row and "GroupedMLP" in row for row in rows)
