"""The routers of models of today: each against the formula of Hugging Face's module, and what makes their load even."""
# T tokens, H hidden size, E experts

from __future__ import annotations

import copy
import io
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.models import EXPERT_SHAPES, expert_operations
from fuser import Sequential, autocast, ops
from fuser.graph import make_graphed_callables
from ops.kernels.routing import routing
from ops.kernels.routing.routing import droute, route, route_ref
from tests.check_operation import DEVICES
from tests.grouped_cases import DEVICES as KERNEL_DEVICES
from tests.ranks import on_ranks
from tests.reference import ROUNDED_ONCE, assert_close, assert_same_bits

DIFFERENTIABLE = ("probs", "load_balancing_loss", "logits", "z_loss")
OUTPUTS = (*DIFFERENTIABLE, "indices", "tokens_per_expert")
# The gradient of a normalized score is a difference.
TOLERANCES = {**ROUNDED_ONCE, torch.float32: 2e-5, torch.int64: 0}


class Model(NamedTuple):
    experts: int
    topk: int
    router: dict[str, Any]


SIGMOID = {"score_function": "sigmoid", "expert_bias": True, "normalize_probs": True}
MODELS = {
    "deepseek-v3": Model(256, 8, {**SIGMOID, "num_groups": 8, "topk_groups": 4, "scaling_factor": 2.5}),
    "kimi-k2": Model(384, 8, {**SIGMOID, "scaling_factor": 2.827}),
    "glm-4.5": Model(160, 8, {**SIGMOID, "scaling_factor": 2.5}),
    "glm-4.5-air": Model(128, 8, SIGMOID),
    "gpt-oss": Model(32, 4, {"use_pre_softmax": False, "bias": True}),
    "deepseek-v2": Model(160, 6, {"num_groups": 8, "topk_groups": 3, "scaling_factor": 16.0}),
    "qwen3-moe": Model(128, 8, {"normalize_probs": True}),
    "mixtral": Model(8, 2, {"normalize_probs": True}),
    "olmoe": Model(64, 8, {}),
    # odd ones
    "sigmoid, not normalized": Model(7, 3, {"score_function": "sigmoid", "bias": True}),
    "sigmoid, one expert": Model(1, 1, SIGMOID),
    "sigmoid, every expert of two groups": Model(9, 6, {**SIGMOID, "num_groups": 3, "topk_groups": 2}),
    "softmax, normalized, in groups": Model(10, 3, {"num_groups": 5, "topk_groups": 3, "normalize_probs": True}),
    "softmax, bias, scaled": Model(6, 2, {"bias": True, "scaling_factor": 0.5}),
}
EVERY_MODEL = pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)


def make(model: Model, hidden: int = 32, *, z_loss: float | None = 0.1, **where: Any) -> ops.Router:
    """The model's router, with weights and biases that make its choice clear."""
    router = ops.Router(hidden, model.experts, model.topk, z_loss=z_loss, **model.router, **where)
    with torch.no_grad():
        router.weight.normal_(std=hidden**-0.5)
        if router.bias is not None:
            router.bias.normal_()
        if router.expert_bias is not None:
            router.expert_bias.normal_(std=0.1)
    return router


def sigmoid_gate(logits: Tensor, expert_bias: Tensor, settings: dict[str, Any], topk: int) -> tuple[Tensor, Tensor]:
    """Step by step what `DeepseekV3TopkRouter` and `Glm4MoeTopkRouter` of transformers 5.23.0 compute."""
    num_experts = logits.shape[-1]
    scores = logits.sigmoid()
    for_choice = scores + expert_bias
    num_groups = settings.get("num_groups", 1)
    if num_groups > 1:
        per_group = num_experts // num_groups
        group_scores = for_choice.view(-1, num_groups, per_group).topk(2, dim=-1)[0].sum(-1)
        best = group_scores.topk(settings["topk_groups"], dim=-1)[1]
        mask = torch.zeros_like(group_scores).scatter_(1, best, 1)
        mask = mask.unsqueeze(-1).expand(-1, num_groups, per_group).reshape(-1, num_experts)
        for_choice = for_choice.masked_fill(mask == 0, -torch.inf)
    indices = for_choice.topk(topk, dim=-1)[1]
    weights = scores.gather(1, indices)
    if settings.get("normalize_probs"):
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * settings.get("scaling_factor", 1.0), indices


def softmax_gate(logits: Tensor, settings: dict[str, Any], topk: int) -> tuple[Tensor, Tensor]:
    """Step by step what `GptOssTopKRouter` and `DeepseekV2TopkRouter` of transformers 5.23.0 compute."""
    factor = settings.get("scaling_factor", 1.0)
    if not settings.get("use_pre_softmax", True):
        values, indices = logits.topk(topk, dim=-1)
        return values.softmax(1) * factor, indices
    scores = logits.softmax(-1)
    num_groups, num_experts = settings.get("num_groups", 1), logits.shape[-1]
    if num_groups > 1:
        group_scores = scores.view(-1, num_groups, num_experts // num_groups).max(-1).values
        best = group_scores.topk(settings["topk_groups"], dim=-1)[1]
        mask = torch.zeros_like(group_scores).scatter_(1, best, 1).repeat_interleave(num_experts // num_groups, 1)
        scores = scores.masked_fill(mask == 0, 0.0)
    weights, indices = scores.topk(topk, dim=-1)
    if settings.get("normalize_probs"):
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * factor, indices


def formula(x: Tensor, parameters: dict[str, Tensor], expert_bias: Tensor | None, model: Model, z: float = 0.1) -> Any:
    """Every extra output of the model's router, differentiable."""
    logits = F.linear(x, parameters["weight"], parameters.get("bias"))
    if model.router.get("score_function") == "sigmoid":
        bias = logits.new_zeros(model.experts) if expert_bias is None else expert_bias
        probs, indices = sigmoid_gate(logits, bias, model.router, model.topk)
        shares = logits.sigmoid() / (logits.sigmoid().sum(-1, keepdim=True) + 1e-20)
    else:
        probs, indices = softmax_gate(logits, model.router, model.topk)
        shares = logits.softmax(-1)
    counts = torch.bincount(indices.flatten(), minlength=model.experts)
    tokens = max(len(x), 1)
    loss = model.experts * (counts.to(shares) / (tokens * model.topk) * (shares.sum(0) / tokens)).sum()
    z_loss = z * logits.logsumexp(-1).square().sum() / tokens
    made = {"probs": probs, "indices": indices, "load_balancing_loss": loss, "logits": logits, "z_loss": z_loss}
    return {**made, "tokens_per_expert": counts}


def by_expert(probs: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Both in the order of the experts: transformers takes them in no order."""
    indices, order = indices.sort(-1)
    return probs.gather(1, order), indices


# ------------------------------------------------------------------------------------------------------------ values


@EVERY_MODEL
@pytest.mark.parametrize("tokens", [0, 1, 77])
def test_the_choice_and_the_probabilities_are_the_models(model: Model, tokens: int) -> None:
    for _ in range(5):
        router, x = make(model, z_loss=None), torch.randn(tokens, 32)
        _, made = router(x, outputs=("probs", "indices", "logits", "tokens_per_expert"))
        expected = formula(x, dict(router.named_parameters()), router.expert_bias, model)
        probs, indices = by_expert(made["probs"], made["indices"])
        expected_probs, expected_indices = by_expert(expected["probs"], expected["indices"])
        assert torch.equal(made["logits"], expected["logits"])
        assert torch.equal(indices, expected_indices)
        factor = model.router.get("scaling_factor", 1.0)
        torch.testing.assert_close(probs, expected_probs, rtol=1e-6, atol=1e-6 * factor)
        assert torch.equal(made["tokens_per_expert"], expected["tokens_per_expert"])
        assert made["tokens_per_expert"].dtype == torch.int64


@EVERY_MODEL
def test_bf16_tokens_are_routed_in_float32(model: Model) -> None:
    router, x = make(model).bfloat16(), torch.randn(40, 32).bfloat16()
    _, made = router(x, outputs=OUTPUTS)
    wide = {name: p.float() for name, p in router.named_parameters()}
    expected = formula(x.float(), wide, router.expert_bias, model)
    assert torch.equal(made["logits"], expected["logits"])
    assert torch.equal(made["indices"].sort(-1)[0], expected["indices"].sort(-1)[0])
    with autocast(recipe="mxfp8"), torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(router(x, outputs=OUTPUTS)[1], made)


@EVERY_MODEL
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=["fp64", "fp32", "bf16"])
@pytest.mark.parametrize("tokens", [0, 23])
def test_every_gradient_agrees_with_autograd_in_float64(
    model: Model, tokens: int, dtype: torch.dtype, device: str
) -> None:
    router = make(model, device=device, dtype=dtype)
    x = torch.randn(tokens, 32, dtype=dtype, device=device, requires_grad=True)
    exact = {n: t.detach().double().requires_grad_() for n, t in {"x": x, **dict(router.named_parameters())}.items()}
    bias = None if router.expert_bias is None else router.expert_bias.double()
    y, made = router(x, outputs=OUTPUTS)
    expected = formula(exact["x"], {n: t for n, t in exact.items() if n != "x"}, bias, model)
    # In no order in the formula: by the experts.
    order, expected_order = made["indices"].argsort(-1), expected["indices"].argsort(-1)
    found = {**made, "probs": made["probs"].gather(1, order), "indices": made["indices"].gather(1, order)}
    expected["probs"] = expected["probs"].gather(1, expected_order)
    expected["indices"] = expected["indices"].gather(1, expected_order)
    cotangents = {n: torch.randn_like(found[n]) for n in DIFFERENTIABLE}
    dy = torch.randn_like(y)
    torch.autograd.backward([y, *(found[n] for n in DIFFERENTIABLE)], [dy, *cotangents.values()])
    torch.autograd.backward(
        [exact["x"] * 1, *(expected[n] for n in DIFFERENTIABLE)],
        [dy.double(), *(d.double() for d in cotangents.values())],
    )
    gradients = {f"d{n}": p.grad for n, p in {"x": x, **dict(router.named_parameters())}.items()}
    assert_close({**found, **gradients}, {**expected, **{f"d{n}": t.grad for n, t in exact.items()}}, TOLERANCES)


@pytest.mark.parametrize("heads", [(n,) for n in DIFFERENTIABLE] + [("logits", "z_loss"), ("probs", "z_loss")], ids=str)
@pytest.mark.parametrize("frozen", [(), ("weight",), ("bias",), ("x",)], ids=str)
@pytest.mark.parametrize("model", ["deepseek-v3", "gpt-oss"])
def test_any_heads_and_any_frozen_tensors(model: str, heads: tuple[str, ...], frozen: tuple[str, ...]) -> None:
    settings = MODELS[model]._replace(router={**MODELS[model].router, "bias": True})
    router = make(settings, 8, dtype=torch.float64)
    x = torch.randn(5, 8, dtype=torch.float64)
    given = {n: t.requires_grad_(n not in frozen) for n, t in {"x": x, **dict(router.named_parameters())}.items()}
    exact = {n: t.detach().clone().requires_grad_(n not in frozen) for n, t in given.items()}
    _, made = router(x, outputs=heads)
    sum(made[n].square().sum() for n in heads).backward()
    bias = None if router.expert_bias is None else router.expert_bias.double()
    expected = formula(exact["x"], {n: t for n, t in exact.items() if n != "x"}, bias, settings)
    sum(expected[n].square().sum() for n in heads).backward()
    assert_close({n: t.grad for n, t in given.items()}, {n: t.grad for n, t in exact.items()})


@EVERY_MODEL
def test_gradcheck(model: Model) -> None:
    small = model._replace(experts=min(model.experts, 16), topk=min(model.topk, 4))
    router = make(small, 4, dtype=torch.float64)
    sequential, x = Sequential(router), torch.randn(3, 4, dtype=torch.float64, requires_grad=True)

    def call(x: Tensor, *_: Tensor) -> tuple[Tensor, ...]:
        y, made = sequential(x, outputs=DIFFERENTIABLE)
        return y, *(made[n] for n in DIFFERENTIABLE)

    assert torch.autograd.gradcheck(call, (x, *router.parameters()))


@given(data=st.data(), tokens=st.integers(0, 5), ties=st.booleans(), normalized=st.booleans(), biased=st.booleans())
def test_route_agrees_with_its_reference_in_ties_and_groups(
    data: st.DataObject, tokens: int, ties: bool, normalized: bool, biased: bool
) -> None:
    kind = data.draw(st.sampled_from(["softmax", "sigmoid"]))
    num_groups, per_group = data.draw(st.integers(1, 4)), data.draw(st.integers(2 if kind == "sigmoid" else 1, 4))
    topk_groups = data.draw(st.integers(1, num_groups))
    topk = data.draw(st.integers(1, topk_groups * per_group))
    experts = num_groups * per_group
    logits = torch.randn(tokens, experts, dtype=torch.float64)
    logits = (logits.round() if ties else logits).requires_grad_()
    bias = torch.randn(experts).round() if biased and kind == "sigmoid" else None
    settings: Any = {
        "normalized": normalized, "score_function": kind, "expert_bias": bias, "num_groups": num_groups,
        "topk_groups": topk_groups,
    }  # fmt: skip
    probs, indices, loss = route_ref(logits, topk, **settings)
    dprobs, dloss = torch.randn_like(probs), torch.randn_like(loss)
    (expected,) = torch.autograd.grad([probs, loss], logits, [dprobs, dloss])
    with torch.no_grad():
        found = route(logits, topk, **settings)
        about: Any = {"normalized": normalized, "score_function": kind}
        dlogits = droute(dprobs, dloss, found.probs, found.indices, found.scores, found.fractions, **about)
    assert torch.equal(found.indices, indices)
    assert torch.equal(found.counts, F.one_hot(indices, experts).sum((0, 1)))
    torch.testing.assert_close((found.probs, found.loss, dlogits), (probs, loss, expected), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("limited", [False, True], ids=["all", "groups"])
def test_of_equal_experts_and_groups_the_lower_is_taken(limited: bool, device: str) -> None:
    groups = {"num_groups": 4, "topk_groups": 2} if limited else {}
    router = ops.Router(4, 64, 20, score_function="sigmoid", expert_bias=True, device=device, **groups)
    nn.init.zeros_(router.weight)
    _, made = router(torch.randn(9, 4, device=device), outputs=("indices", "probs"))
    assert made["indices"].tolist() == [list(range(20))] * 9
    assert (made["probs"] == 0.5).all()


@pytest.mark.launches("route_kernel")
@pytest.mark.filterwarnings("ignore:Conversion of an array with ndim > 0:DeprecationWarning")
@pytest.mark.parametrize("device", KERNEL_DEVICES)
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("name", ["kimi-k2", "deepseek-v3", "deepseek-v2", "sigmoid, every expert of two groups"])
def test_the_kernel_chooses_among_any_keys_as_torch_does(
    monkeypatch: pytest.MonkeyPatch, name: str, ties: bool, device: str
) -> None:
    model = MODELS[name]
    logits = 3 * torch.randn(33, model.experts, device=device)
    bias = torch.randn(model.experts, device=device)
    if ties:
        logits, bias = logits.round(), bias.round()
        bias[1] = -torch.inf  # an expert that is switched off
        logits[5, 3] = torch.nan
    settings: Any = {
        "normalized": model.router.get("normalize_probs", False),
        "score_function": model.router.get("score_function", "softmax"),
        "expert_bias": bias if "expert_bias" in model.router else None,
        "num_groups": model.router.get("num_groups", 1),
        "topk_groups": model.router.get("topk_groups", 1),
    }
    monkeypatch.setattr(routing, "runs_in_triton", lambda device, dtype: False)
    expected = route(logits, model.topk, **settings)
    monkeypatch.setattr(routing, "runs_in_triton", lambda device, dtype: True)
    with np.errstate(invalid="ignore"):  # numpy, the interpreter, warns of them
        found = route(logits, model.topk, **settings)
    assert torch.equal(found.indices, expected.indices) and torch.equal(found.counts, expected.counts)
    for name in ("probs", "scores", "fractions", "loss"):
        torch.testing.assert_close(getattr(found, name), getattr(expected, name), rtol=0, atol=0, equal_nan=True)


def test_a_group_whose_best_are_biased_below_zero_is_not_left_for_another() -> None:
    """Release 4 of transformers took an expert of a group that was not chosen."""
    router = ops.Router(2, 4, 2, score_function="sigmoid", expert_bias=True, num_groups=2, topk_groups=1)
    nn.init.zeros_(router.weight)
    with torch.no_grad():
        router.expert_bias.copy_(torch.tensor([-0.6, -2.0, -3.0, -3.0]))
    _, made = router(torch.randn(3, 2), outputs=("indices",))
    assert made["indices"].tolist() == [[0, 1]] * 3


def test_scores_that_underflow_give_zeros_and_no_nan() -> None:
    router = ops.Router(1, 4, 2, bias=True, score_function="sigmoid", normalize_probs=True)
    nn.init.constant_(router.bias, -200.0)
    _, made = router(torch.zeros(3, 1), outputs=("probs", "load_balancing_loss"))
    (made["probs"].sum() + made["load_balancing_loss"]).backward()
    assert not made["probs"].any() and made["load_balancing_loss"] == 0
    assert not router.bias.grad.any()


def test_the_z_loss_is_in_the_outputs_where_it_was_asked_for() -> None:
    plain, with_loss = ops.Router(8, 4, 2), ops.Router(8, 4, 2, z_loss=1e-3)
    assert "z_loss" not in plain.extra_outputs and "z_loss" in with_loss.extra_outputs
    with pytest.raises(ValueError, match="No operation makes the extra output 'z_loss'"):
        plain(torch.randn(2, 8), outputs=("z_loss",))


@pytest.mark.parametrize("model", ["deepseek-v3", "kimi-k2", "gpt-oss"])
def test_a_layer_of_the_model_is_each_expert_in_turn(model: str) -> None:
    hidden, inner = 16, 8
    settings = MODELS[model]._replace(experts=16, topk=4)
    router = make(settings, hidden, z_loss=None)
    layer = Sequential(
        router, ops.Dispatch(16), ops.GroupedLinear(16, hidden, 2 * inner, bias=False), ops.ScaledSwiGLU(),
        ops.GroupedLinear(16, inner, hidden, bias=False), ops.Combine(),
    ).double()  # fmt: skip
    x = torch.randn(31, hidden, dtype=torch.float64, requires_grad=True)
    exact = {n: p.detach().clone().requires_grad_() for n, p in {"x": x, **dict(layer.named_parameters())}.items()}
    own = {name: exact[f"0.{name}"] for name, _ in router.named_parameters()}
    expected = formula(exact["x"], own, router.expert_bias, settings)
    y = torch.zeros_like(exact["x"])
    for expert in range(16):
        tokens, slots = (expected["indices"] == expert).nonzero(as_tuple=True)
        gate, up = (exact["x"][tokens] @ exact["2.weight"][expert].T).chunk(2, -1)
        out = (F.silu(gate) * up) @ exact["4.weight"][expert].T
        y = y.index_add(0, tokens, out * expected["probs"][tokens, slots, None])
    z = layer(x)
    dy = torch.randn_like(z)
    z.backward(dy)
    y.backward(dy)
    found = {"x": x, **dict(layer.named_parameters())}
    assert_close({"y": z, **{n: t.grad for n, t in found.items()}}, {"y": y, **{n: t.grad for n, t in exact.items()}})


# ------------------------------------------------------------------------------------------------------ transformers


def their_gate(name: str, hidden: int) -> tuple[nn.Module, ops.Router]:
    """The module of transformers, with weights, and ours with the same."""
    reason = "transformers 5 is not installed here, so its own modules cannot be compared with."
    pytest.importorskip("transformers", minversion="5", reason=reason)
    from transformers import (
        DeepseekV2Config,
        DeepseekV3Config,
        Glm4MoeConfig,
        GptOssConfig,
        MixtralConfig,
        OlmoeConfig,
        Qwen3MoeConfig,
    )
    from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2TopkRouter
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3TopkRouter
    from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeTopkRouter
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssTopKRouter
    from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
    from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

    model = MODELS[name]
    given = model.router
    classes: Any = {
        "deepseek-v3": (DeepseekV3Config, DeepseekV3TopkRouter, "n_routed_experts"),
        "kimi-k2": (DeepseekV3Config, DeepseekV3TopkRouter, "n_routed_experts"),
        "glm-4.5": (Glm4MoeConfig, Glm4MoeTopkRouter, "n_routed_experts"),
        "glm-4.5-air": (Glm4MoeConfig, Glm4MoeTopkRouter, "n_routed_experts"),
        "gpt-oss": (GptOssConfig, GptOssTopKRouter, "num_local_experts"),
        "deepseek-v2": (DeepseekV2Config, DeepseekV2TopkRouter, "n_routed_experts"),
        "qwen3-moe": (Qwen3MoeConfig, Qwen3MoeTopKRouter, "num_experts"),
        "mixtral": (MixtralConfig, MixtralTopKRouter, "num_local_experts"),
        "olmoe": (OlmoeConfig, OlmoeTopKRouter, "num_experts"),
    }
    config, gate, num_experts = classes[name]
    settings: dict[str, Any] = {"norm_topk_prob": given.get("normalize_probs", False)}
    if name.startswith(("deepseek", "kimi", "glm")):
        settings["n_group"], settings["topk_group"] = given.get("num_groups", 1), given.get("topk_groups", 1)
        settings["routed_scaling_factor"] = given.get("scaling_factor", 1.0)
    if name == "deepseek-v2":
        settings["topk_method"] = "group_limited_greedy"
    if name in ("gpt-oss", "mixtral"):  # which have no choice
        del settings["norm_topk_prob"]
    settings |= {"hidden_size": hidden, "num_experts_per_tok": model.topk, num_experts: model.experts}
    theirs = gate(config(**settings))
    ours = make(model, hidden, z_loss=None)
    state = {key.replace("expert_bias", "e_score_correction_bias"): t for key, t in ours.state_dict().items()}
    theirs.load_state_dict(state)
    return theirs, ours


@pytest.mark.parametrize("name", list(MODELS)[:9])
def test_the_router_is_that_of_transformers(name: str) -> None:
    for tokens in (0, 1, 64):
        theirs, ours = their_gate(name, 64)
        x = torch.randn(tokens, 64)
        inputs = [x.clone().requires_grad_() for _ in range(2)]
        logits, probs, indices = theirs(inputs[0])
        _, made = ours(inputs[1], outputs=("probs", "indices", "logits"))
        probs, indices = by_expert(probs, indices)
        own_probs, own_indices = by_expert(made["probs"], made["indices"])
        assert torch.equal(own_indices, indices)
        assert torch.equal(made["logits"], logits)
        factor = MODELS[name].router.get("scaling_factor", 1.0)
        torch.testing.assert_close(own_probs, probs, rtol=1e-6, atol=1e-6 * factor)
        dprobs = torch.randn_like(probs)
        torch.autograd.backward(probs, dprobs)
        torch.autograd.backward(own_probs, dprobs)
        found = {"x": inputs[1], **dict(ours.named_parameters())}
        expected = {"x": inputs[0], **dict(theirs.named_parameters())}
        assert_close({n: t.grad for n, t in found.items()}, {n: t.grad for n, t in expected.items()}, TOLERANCES)


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "glm-4.5"])
def test_transformers_routes_bf16_as_we_do(name: str) -> None:
    theirs, ours = their_gate(name, 64)
    x = torch.randn(64, 64).bfloat16()
    kept = theirs.e_score_correction_bias.clone()
    theirs, ours = theirs.bfloat16(), ours.bfloat16()
    theirs.e_score_correction_bias = kept  # as transformers keeps it in float32 when it loads a model
    _, probs, indices = theirs(x)
    _, made = ours(x, outputs=("probs", "indices"))
    probs, indices = by_expert(probs, indices)
    own_probs, own_indices = by_expert(made["probs"], made["indices"])
    assert torch.equal(own_indices, indices)
    torch.testing.assert_close(own_probs, probs, rtol=1e-6, atol=1e-6)


def test_a_gate_of_transformers_is_a_custom_router() -> None:
    theirs, ours = their_gate("deepseek-v3", 64)
    x = torch.randn(20, 64)
    own = Sequential(ops.CustomRouter(theirs, returns=("logits", "probs", "indices")), ops.Dispatch(256), ops.Combine())
    layer = Sequential(ours, ops.Dispatch(256), ops.Combine())
    (y, made), (z, expected) = (each(x, outputs=("logits", "split_sizes")) for each in (own, layer))
    torch.testing.assert_close((y, made), (z, expected))


# ------------------------------------------------------------------------------------------------ balancing the load


def sigmoid_router(experts: int = 8, topk: int = 2, **settings: Any) -> ops.Router:
    return ops.Router(16, experts, topk, score_function="sigmoid", expert_bias=True, **settings)


def test_the_expert_bias_makes_a_skewed_load_even() -> None:
    router = sigmoid_router(bias=True, normalize_probs=True)
    with torch.no_grad():
        router.weight.normal_(std=0.1)
        router.bias.copy_(torch.linspace(2, -2, 8))
    loads = []
    for _ in range(400):
        _, made = router(torch.randn(512, 16), outputs=("tokens_per_expert",))
        loads.append(made["tokens_per_expert"].double())
        router.update_expert_bias(5e-3)
    before, after = (torch.stack(part).mean(0) / 128 for part in (loads[:5], loads[-50:]))
    assert before.max() > 3 and before.min() < 0.05
    assert after.max() < 1.15 and after.min() > 0.85
    assert router.expert_bias[0] < router.expert_bias[-1]


def test_an_update_moves_each_bias_by_the_rate_and_starts_counting_anew() -> None:
    router = sigmoid_router(experts=4)
    total = torch.zeros(4, dtype=torch.int64)
    for tokens in (7, 0, 12):  # microbatches
        total += router(torch.randn(tokens, 16), outputs=("tokens_per_expert",))[1]["tokens_per_expert"]
    assert torch.equal(router.tokens_since_update, total) and total.sum() == 38
    router.update_expert_bias(0.25)
    assert torch.equal(router.expert_bias, 0.25 * torch.sign(9.5 - total))
    assert not router.tokens_since_update.any()
    before = router.expert_bias.clone()
    router.update_expert_bias()  # nobody was routed
    assert torch.equal(router.expert_bias, before)
    router(torch.randn(3, 16))
    router.update_expert_bias(0)
    assert torch.equal(router.expert_bias, before) and not router.tokens_since_update.any()


def test_a_router_made_on_meta_counts_once_its_state_is_assigned() -> None:
    with torch.device("meta"):
        router = sigmoid_router(experts=4)
    router(torch.randn(0, 16, device="meta"))
    router.load_state_dict(sigmoid_router(experts=4).state_dict(), assign=True)
    counts = router(torch.randn(7, 16), outputs=("tokens_per_expert",))[1]["tokens_per_expert"]
    assert torch.equal(router.tokens_since_update, counts)
    router.update_expert_bias(0.25)
    assert torch.equal(router.expert_bias, 0.25 * torch.sign(3.5 - counts))
    router.tokens_since_update = router.tokens_since_update.to("meta")
    with pytest.raises(RuntimeError, match="expert_bias is on cpu, but the tokens were counted on meta"):
        router.update_expert_bias()


def test_an_even_load_moves_nothing() -> None:
    router = ops.Router(4, 4, 1, score_function="sigmoid", expert_bias=True)
    with torch.no_grad():
        router.weight.copy_(torch.eye(4))
    router(torch.eye(4).repeat(3, 1))
    assert router.tokens_since_update.tolist() == [3] * 4
    router.update_expert_bias(1.0)
    assert not router.expert_bias.any()


def test_forward_changes_no_bias_and_evaluation_counts_nothing() -> None:
    router, x = sigmoid_router(), torch.randn(20, 16, requires_grad=True)
    router.eval()
    router(x)
    assert not router.tokens_since_update.any()
    router.train()
    router(x, outputs=("probs",))[1]["probs"].sum().backward()
    assert router.tokens_since_update.sum() == 40
    assert not router.expert_bias.any() and router.expert_bias.grad is None
    assert [name for name, _ in router.named_parameters()] == ["weight"]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_what_a_checkpoint_computes_again_counts_once(use_reentrant: bool) -> None:
    layer = Sequential(sigmoid_router(), ops.Dispatch(8), ops.Combine())
    x = torch.randn(20, 16, requires_grad=True)
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert layer[0].tokens_since_update.sum() == 40


def test_a_graph_counts_each_replay_and_no_warm_up() -> None:
    layer, x = Sequential(sigmoid_router(), ops.Dispatch(8), ops.Combine()), torch.randn(10, 16, requires_grad=True)
    graphed = make_graphed_callables(layer, (x,))
    load = layer[0].tokens_since_update
    assert not load.any()
    for _ in range(3):
        graphed(torch.randn(10, 16, requires_grad=True)).sum().backward()
    assert layer[0].tokens_since_update is load and load.sum() == 60
    layer[0].update_expert_bias(0.5)
    graphed(torch.randn(10, 16, requires_grad=True))
    assert load.sum() == 20 and layer[0].expert_bias.any()


def sum_of_ranks(rank: int) -> None:
    torch.manual_seed(0)
    router, x = sigmoid_router(), torch.randn(2, 30, 16)
    router(x[rank])
    alone = copy.deepcopy(router)
    alone.reset_parameters()
    alone.load_state_dict(router.state_dict())
    alone(x.flatten(0, 1))
    alone.update_expert_bias(0.5)
    router.update_expert_bias(0.5, group=dist.group.WORLD)
    assert torch.equal(router.expert_bias, alone.expert_bias) and router.expert_bias.any()
    assert not router.tokens_since_update.any()


def test_the_load_is_summed_over_a_process_group(tmp_path: Any) -> None:
    on_ranks(sum_of_ranks, folder=tmp_path)


def test_a_state_dict_holds_the_bias_and_not_the_load() -> None:
    router = sigmoid_router(bias=True)
    nn.init.normal_(router.expert_bias)
    router(torch.randn(5, 16))
    assert list(router.state_dict()) == ["weight", "bias", "expert_bias"]
    file = io.BytesIO()
    torch.save(router.state_dict(), file)
    file.seek(0)
    other = sigmoid_router(bias=True)
    other(torch.randn(9, 16))
    other.load_state_dict(torch.load(file))
    assert_same_bits(other.state_dict(), router.state_dict())
    assert not other.tokens_since_update.any()
    x = torch.randn(11, 16)
    outputs = ("probs", "indices")
    assert_same_bits(other(x, outputs=outputs)[1], router(x, outputs=outputs)[1])
    assert list(ops.Router(16, 8, 2).state_dict()) == ["weight"]


@pytest.mark.parametrize("assign", [False, True])
def test_the_bias_stays_float32(assign: bool) -> None:
    router = sigmoid_router()
    nn.init.constant_(router.expert_bias, 1.001)
    kept = router.expert_bias.clone()
    for module in (router.bfloat16(), router.half(), router.double(), copy.deepcopy(router).to(torch.bfloat16)):
        assert_same_bits({"bias": module.expert_bias}, {"bias": kept})
        assert module.tokens_since_update.dtype == torch.int64
    router.load_state_dict({k: t.bfloat16() for k, t in router.state_dict().items()}, assign=assign)
    assert router.expert_bias.dtype == torch.float32
    router.update_expert_bias(1e-3)


def test_counts_stay_integers_where_all_buffers_are_converted() -> None:
    router, x = sigmoid_router(), torch.randn(400, 16)
    router(x)
    counts = router.tokens_since_update.clone()
    router.type(torch.bfloat16)(x.bfloat16())
    added = router.tokens_since_update - counts
    assert router.tokens_since_update.dtype == torch.int64 and added.sum() == counts.sum()


def test_on_the_meta_device_it_is_made_and_reset() -> None:
    router = sigmoid_router(bias=True, device="meta")
    assert router.expert_bias.is_meta and router.tokens_since_update.is_meta
    router = router.to_empty(device="cpu")
    assert not router.tokens_since_update.any()  # no state dict has them, so nothing need set them
    router.reset_parameters()
    assert not router.expert_bias.any() and not router.tokens_since_update.any()
    assert 0 < router.bias.abs().max() <= 0.25


def test_a_layer_trains_with_fused_adamw_and_a_moving_bias() -> None:
    layer = Sequential(
        make(Model(8, 2, {**SIGMOID, "bias": True}), 16), ops.Dispatch(8), ops.GroupedLinear(8, 16, 32, bias=False),
        ops.ScaledSwiGLU(), ops.GroupedLinear(8, 16, 16, bias=False), ops.Combine(),
    )  # fmt: skip
    router = layer[0]
    optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-2, fused=True)
    x = torch.randn(64, 16)
    target, losses, start = x.roll(1, 1), [], {n: p.detach().clone() for n, p in router.named_parameters()}
    for _ in range(60):
        y, made = layer(x, outputs=("z_loss",))
        loss = F.mse_loss(y, target)
        (loss + made["z_loss"]).backward()
        before = router.expert_bias.clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(router.expert_bias, before)
        router.update_expert_bias()
        losses.append(loss.item())
    assert losses[-1] < 0.5 * losses[0]
    assert all(not torch.equal(p, start[n]) for n, p in router.named_parameters())


# --------------------------------------------------------------------------------------------------- what it says


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"score_function": "tanh"}, ValueError, "score_function is 'tanh', but must be 'softmax' or 'sigmoid'"),
        ({"score_function": None}, ValueError, "score_function is None, but must be"),
        ({"expert_bias": True}, NotImplementedError, "expert_bias=True was given with score_function='softmax'"),
        (
            {"score_function": "sigmoid", "use_pre_softmax": False},
            ValueError,
            "use_pre_softmax=False was given with score_function='sigmoid', which has no softmax. Leave it out",
        ),
        ({"num_groups": 3}, ValueError, "num_groups is 3, but must divide num_experts=8. Pass a divisor"),
        ({"num_groups": 0}, ValueError, "Router got num_groups=0, topk_groups=1. Both must be positive"),
        (
            {"num_groups": 2, "topk_groups": 3},
            ValueError,
            "topk_groups is 3, but there are num_groups=2. Pass at most that many",
        ),
        (
            {"num_groups": 8, "topk_groups": 2},
            ValueError,
            "topk is 3, but topk_groups=2 of num_groups=8 hold 2 of the 8 experts. Raise topk_groups, or lower topk",
        ),
        (
            {"num_groups": 8, "topk_groups": 4, "score_function": "sigmoid"},
            ValueError,
            "num_groups=8 leaves one expert in each group, but with sigmoid",
        ),
        ({"scaling_factor": 0}, ValueError, "scaling_factor is 0.0, but must be positive and finite"),
        ({"scaling_factor": "2"}, TypeError, "scaling_factor is '2' .*, but must be a number"),
        ({"z_loss": -1.0}, ValueError, "z_loss is -1.0, but must be positive and finite"),
        ({"z_loss": float("nan")}, ValueError, "z_loss is nan, but must be positive and finite"),
        ({"z_loss": True}, TypeError, "z_loss is True, but must be a number"),
        ({"bias": 1}, TypeError, "bias is 1 .*, but must be True or False"),
        ({"expert_bias": None}, TypeError, "expert_bias is None, but must be True or False"),
        ({"num_groups": 2.0}, TypeError, "num_groups is 2.0, but must be an integer"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        ops.Router(16, 8, 3, **settings)


def test_an_update_that_makes_no_sense_is_refused() -> None:
    with pytest.raises(RuntimeError, match="This Router has no expert bias to update. Make it with expert_bias=True"):
        ops.Router(16, 8, 2).update_expert_bias()
    with pytest.raises(ValueError, match="rate is -1.0, but must be finite and not negative"):
        sigmoid_router().update_expert_bias(-1)
    with pytest.raises(TypeError, match="group is 3, but must be a torch.distributed process group, or None"):
        sigmoid_router().update_expert_bias(1e-3, group=3)


def test_settings_are_shown() -> None:
    assert repr(make(MODELS["deepseek-v3"])) == (
        "Router(hidden_size=32, num_experts=256, topk=8, use_pre_softmax=True, normalize_probs=True, "
        "score_function='sigmoid', scaling_factor=2.5, num_groups=8, topk_groups=4, expert_bias=True, z_loss=0.1)"
    )


@pytest.mark.parametrize(
    ("router", "says"),
    [
        ({}, "[softmax and choice in one (Triton)]"),
        ({"bias": True, "scaling_factor": 2.0, "z_loss": 1e-3}, "[softmax and choice in one (Triton)]"),
        ({"score_function": "sigmoid"}, "[choice (Triton), sigmoid scores in torch]"),
        (
            {"num_groups": 4, "topk_groups": 2},
            "[choice (Triton), softmax scores and groups in torch]",
        ),
        (
            {"num_groups": 4, "topk_groups": 2, "score_function": "sigmoid"},
            "[choice (Triton), sigmoid scores and groups in torch]",
        ),
        ({"num_groups": 4, "topk_groups": 4}, "[softmax and choice in one (Triton)]"),
    ],
)
def test_explain_says_where_the_choice_runs(router: dict[str, Any], says: str) -> None:
    layer = Sequential(ops.Router(16, 8, 2, **router))
    assert says in layer.explain(device="cuda") and "[torch]" in layer.explain(device="cpu")


@pytest.mark.parametrize("name", ["deepseek-v3", "kimi-k2", "gpt-oss"])
def test_benchmarks_have_the_models_router(name: str) -> None:
    shape = next(shape for key, shape in EXPERT_SHAPES.items() if key.startswith(name))
    (router,) = (m for m in expert_operations(shape, device="meta") if isinstance(m, ops.Router))
    model = MODELS[name]
    settings = {key: model.router.get(key, default) for key, default in DEFAULTS.items()}
    assert settings == {
        "bias": router.bias is not None,
        "score_function": router.score_function,
        "use_pre_softmax": router.use_pre_softmax,
        "normalize_probs": router.normalize_probs,
        "scaling_factor": router.scaling_factor,
        "num_groups": router.num_groups,
        "topk_groups": router.topk_groups,
        "expert_bias": router.expert_bias is not None,
    }
    assert (router.topk, name == "gpt-oss" or router.num_experts) == (model.topk, name == "gpt-oss" or model.experts)
    assert "sigmoid" not in shape.note


DEFAULTS: dict[str, Any] = {
    "bias": False, "score_function": "softmax", "use_pre_softmax": True, "normalize_probs": False,
    "scaling_factor": 1.0, "num_groups": 1, "topk_groups": 1, "expert_bias": False,
}  # fmt: skip
