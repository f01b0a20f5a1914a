"""Print the plan of a known model's expert layer: fused operations, paths, kernels, and every refused fusion.

The layer is created on the meta device, so its weights are never allocated.
"""

import argparse

import torch

from bench.models import EXPERT_SHAPES, ExpertShape, expert_operations
from bench.schedule import recipe_named
from fuser import Sequential


def explain_model(
    name: str, *, recipe: str = "bf16", device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16
) -> str:
    """The plan as text for training the expert layer of a model in `EXPERT_SHAPES` on `device`."""
    shape = EXPERT_SHAPES[name]
    layer = Sequential(*expert_operations(shape, device="meta"))
    plan = layer.explain(recipe=recipe_named(recipe), device=device, dtype=dtype, training=True)
    return f"{_headline(name, shape)}\n{plan}"


def _headline(name: str, shape: ExpertShape) -> str:
    note = f" ({shape.note})" if shape.note else ""
    return (
        f"{name}{note}: hidden {shape.hidden}, expert width {shape.intermediate}, {shape.num_experts} experts, "
        f"top {shape.topk}, {shape.num_parameters / 1e9:.2f} billion expert parameters a layer"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=EXPERT_SHAPES, default="qwen3-30b-a3b", help="(default: %(default)s)")
    parser.add_argument("--recipe", default="bf16", help="one recipe, or several by commas (default: %(default)s)")
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="to plan for; it need not be there (default: %(default)s)",
    )


def main(arguments: argparse.Namespace) -> int:
    """`python -m bench explain`."""
    for recipe in arguments.recipe.split(","):
        print(explain_model(arguments.model, recipe=recipe, device=arguments.device))
    return 0
