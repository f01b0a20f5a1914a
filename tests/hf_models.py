"""Small models of Hugging Face with random weights. Only for tests that are skipped without transformers."""
# H hidden size, F expert width, E experts

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

E, H, F, VOCABULARY, LAYERS = 6, 32, 24, 64, 2
# Of two float32 sums in another order, through two layers and back.
LOGITS = {torch.float32: 1e-6}
GRADIENTS = {torch.float32: 1e-5}


class Model(NamedTuple):
    config: str
    model: str
    settings: dict[str, Any]


SHARED = {"n_routed_experts": 8, "n_shared_experts": 1, "moe_intermediate_size": F, "first_k_dense_replace": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8}
PLAIN_ROPE = {"rope_type": "default", "rope_theta": 1e4}
MODELS = {
    "qwen3-moe": Model(
        "Qwen3MoeConfig", "Qwen3MoeForCausalLM", {"moe_intermediate_size": F, "num_experts": E, "norm_topk_prob": True}
    ),
    "mixtral": Model("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": E}),
    "gpt-oss": Model("GptOssConfig", "GptOssForCausalLM", {"num_local_experts": E, "rope_parameters": PLAIN_ROPE}),
    "deepseek-v3": Model(
        "DeepseekV3Config", "DeepseekV3ForCausalLM",
        {**SHARED, **LATENT, "n_group": 4, "topk_group": 2, "num_key_value_heads": 4},
    ),
    "olmoe": Model("OlmoeConfig", "OlmoeForCausalLM", {"num_experts": E}),
    "glm-4.5": Model("Glm4MoeConfig", "Glm4MoeForCausalLM", SHARED),
}  # fmt: skip


def make(name: str, **settings: Any) -> Any:
    """A small model with weights of such a size that each part of it shows in the logits."""
    sizes = {
        "vocab_size": VOCABULARY, "hidden_size": H, "intermediate_size": F, "num_hidden_layers": LAYERS,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "num_experts_per_tok": 2,
        "max_position_embeddings": 128, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        "experts_implementation": "eager",
    }  # fmt: skip
    about = MODELS[name]
    config = getattr(transformers, about.config)(**{**sizes, **about.settings, **settings})
    model = getattr(transformers, about.model)(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=H**-0.5)
            elif not parameter.eq(1).all():
                parameter.normal_(std=0.1)
        for key, buffer in model.named_buffers():
            if key.endswith("e_score_correction_bias"):
                buffer.normal_(std=0.1)
    return model


def ids(tokens: int = 9) -> Tensor:
    return torch.randint(3, VOCABULARY, (2, tokens), generator=torch.Generator().manual_seed(1))


def step(model: Any, implementation: str | None = None) -> dict[str, Tensor | None]:
    """The logits and the gradient of every parameter."""
    if implementation is not None:
        model.set_experts_implementation(implementation)
    model.zero_grad()
    output = model(ids(), labels=ids())
    output.loss.backward()
    return {"logits": output.logits.detach()} | {name: p.grad for name, p in model.named_parameters()}
