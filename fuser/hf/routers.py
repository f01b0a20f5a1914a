"""The Router that computes what the router of a block of transformers computes, on its own parameters."""
# H hidden size, E experts

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import nn

from fuser.hf.layers import hold
from ops.router import Router


class BlockForm(NamedTuple):
    """How a block of transformers is made.

    router: under which name it holds its router
    shared: under which name it holds the shared experts, whose result is added; None: it has none
    returns_scores: whether it returns (y, probs) in place of y
    settings: of the `Router`, by the router's attributes
    """

    router: str
    shared: str | None
    returns_scores: bool
    settings: Callable[[Any], dict[str, Any]]


def make_router(form: BlockForm, gate: Any) -> Router:
    """The Router with the settings of `gate`, over its own `weight` [E, H] and, if it has one, `bias` [E]."""
    num_experts, hidden_size = gate.weight.shape
    router = Router(hidden_size, num_experts, gate.top_k, device="meta", **form.settings(gate))
    hold(router, dict(gate.named_parameters()))
    if router.tokens_since_update is not None:
        router.tokens_since_update = router.tokens_since_update.new_zeros(num_experts, device=gate.weight.device)
    return router


def set_expert_bias(router: Router, gate: Any) -> None:
    """Choose by the `e_score_correction_bias` that the gate holds now, in float32, and count where it is."""
    if router.expert_bias is None or router.tokens_since_update is None:
        return
    bias = gate.e_score_correction_bias
    if router.expert_bias is not bias:
        router.expert_bias = bias.float()
    if router.tokens_since_update.device != bias.device:
        router.tokens_since_update = router.tokens_since_update.to(bias.device)


def form_of(block: nn.Module) -> BlockForm | None:
    """That of a block of transformers' own, by its class; None for every other module."""
    kind = type(block)
    return FORMS.get(kind.__name__) if kind.__module__.startswith("transformers.models.") else None


def _by_normalization(gate: Any) -> dict[str, Any]:
    return {"normalize_probs": bool(gate.norm_topk_prob)}


def _sigmoid(gate: Any) -> dict[str, Any]:
    return {
        "score_function": "sigmoid",
        "expert_bias": True,
        "normalize_probs": bool(gate.norm_topk_prob),
        "num_groups": gate.num_group,
        "topk_groups": gate.topk_group,
        "scaling_factor": gate.routed_scaling_factor,
    }


# Of transformers 5.23.0.
FORMS: Mapping[str, BlockForm] = {
    "Qwen3MoeSparseMoeBlock": BlockForm("gate", None, False, _by_normalization),
    "OlmoeSparseMoeBlock": BlockForm("gate", None, False, _by_normalization),
    "MixtralSparseMoeBlock": BlockForm("gate", None, False, lambda gate: {"normalize_probs": True}),
    "GptOssMLP": BlockForm("router", None, True, lambda gate: {"use_pre_softmax": False, "bias": True}),
    "DeepseekV3MoE": BlockForm("gate", "shared_experts", False, _sigmoid),
    "Glm4MoeMoE": BlockForm("gate", "shared_experts", False, _sigmoid),
}
