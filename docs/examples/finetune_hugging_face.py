"""Fine-tune a mixture-of-experts model of Hugging Face under a recipe, save it, and generate from what was saved.

    pip install 'fuser-ops[hf]'
    python docs/examples/finetune_hugging_face.py [--model NAME] [--recipe mxfp8]

Without --model it makes a small Qwen3-MoE with random weights, and downloads nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

import fuser.hf

PERIOD = 5  # of the sequences that are learned: each token is followed by the next one, modulo this


def load(name: str | None) -> Any:
    if name is not None:
        return AutoModelForCausalLM.from_pretrained(name, dtype=torch.bfloat16)
    torch.manual_seed(0)
    return Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            vocab_size=64,
            hidden_size=64,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            num_experts=8,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            pad_token_id=None,
            bos_token_id=None,
            eos_token_id=None,
        )
    )


def batch(device: torch.device) -> Tensor:
    """[8, 16] token numbers that count up modulo PERIOD, from random beginnings."""
    return (torch.randint(PERIOD, (8, 1)) + torch.arange(16)).remainder(PERIOD).to(device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--recipe", default="mxfp8")
    arguments = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")

    fuser.hf.register()
    model = load(arguments.model).to(device)
    model.set_experts_implementation(f"fuser:{arguments.recipe}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3 if arguments.model is None else 1e-5)
    model.train()
    for step in range(61):
        ids = batch(device)
        loss = model(ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 20 == 0:
            print(f"step {step}: loss {loss.item():.4f}")

    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)  # as transformers writes it: any implementation loads it
        saved = type(model).from_pretrained(folder, experts_implementation="fuser").to(device).eval()
    prompt = batch(device)[:1, :6]
    tokens = saved.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=8, do_sample=False)
    print(f"generated: {tokens[0].tolist()}")


if __name__ == "__main__":
    main()
