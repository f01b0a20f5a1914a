"""The Router that computes what the router of a block of transformers computes, on its own parameters."""
# H hidden size, E experts

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fuser.held_layers import hold
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


def router_tensors(gate: Any) -> dict[str, Tensor]:
    """What the Router of `gate` computes with: its `weight` [E, H], `bias` [E], and `expert_bias` [E]."""
    tensors = dict(gate.named_parameters())
    if hasattr(gate, "e_score_correction_bias"):
        tensors["expert_bias"] = gate.e_score_correction_bias
    return tensors


def router_settings(form: BlockForm, gate: Any) -> dict[str, Any]:
    """The arguments of the Router of `gate`."""
    return {"topk": gate.top_k, **form.settings(gate)}


def make_router(form: BlockForm, gate: Any) -> Router:
    """The Router with the settings of `gate`, over its own tensors."""
    num_experts, hidden_size = gate.weight.shape
    router = Router(hidden_size, num_experts, device="meta", **router_settings(form, gate))
    tensors = router_tensors(gate)
    if "expert_bias" in tensors:
        # A parameter is read at each call; a state of what is compiled would be that of the time when it was.
        del router._buffers["expert_bias"]
    hold(router, tensors)
    if router.tokens_since_update is not None:
        router.tokens_since_update = router.tokens_since_update.new_zeros(num_experts, device=gate.weight.device)
    return router


def count_beside(router: Router, gate: Any) -> None:
    """Count tokens where the gate is now."""
    counts = router.tokens_since_update
    if counts is not None and counts.device != gate.weight.device:
        router.tokens_since_update = counts.to(gate.weight.device)


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
