"""Every kernel of a step at small shapes: what compute-sanitizer watches for accesses outside of allocations.

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 1 \\
        python -m tests.memcheck bf16 mxfp8         or any other recipes; all where none is named

A whole layer of experts, forward and backward, with gradients of its own and added to main_grad: with one token, which
leaves two experts without rows, and with so many that all tiles are those of large groups; and a dense chain. Without
PyTorch's caching each tensor is an allocation of its own. Run it once without the sanitizer first: that compiles.
"""

import sys
from collections.abc import Iterator

import torch
from torch import Tensor

from bench.schedule import known_recipes
from fuser import Sequential, autocast, ops
from tests.main_grad_cases import give_main_grads

HIDDEN, WIDTHS = 288, (160, 256)  # no multiples of a tile; 256 is one of blocks
WIDE = 784, 320  # hidden size and width for which FC1 and its activation are one kernel, of half a tile at the end
EXPERTS, TOPK = 4, 2
TOKENS = (1, 2000)


def models(device: str) -> Iterator[Sequential]:
    about = {"device": device, "dtype": torch.bfloat16}
    for main_grad, width in zip((False, True), WIDTHS, strict=True):
        of_experts = about | {"accumulate_into_main_grad": main_grad}
        experts = Sequential(
            ops.MakeExtraOutput("residual"),
            ops.RMSNorm(HIDDEN, **about),
            ops.Router(HIDDEN, EXPERTS, TOPK, **about),
            ops.Dispatch(EXPERTS),
            ops.GroupedLinear(EXPERTS, HIDDEN, 2 * width, **of_experts),
            ops.ScaledSwiGLU(),
            ops.GroupedLinear(EXPERTS, width, HIDDEN, **of_experts),
            ops.Combine(),
            ops.AddExtraInput("residual"),
        )
        if main_grad:
            give_main_grads(experts, 0.0)
        yield experts
    wide, width = WIDE
    yield Sequential(
        ops.Router(HIDDEN, EXPERTS, TOPK, **about),
        ops.Linear(HIDDEN, wide, **about),
        ops.Dispatch(EXPERTS),
        ops.GroupedLinear(EXPERTS, wide, 2 * width, bias=False, **about),
        ops.ScaledSwiGLU(),
        ops.GroupedLinear(EXPERTS, width, wide, bias=False, **about),
        ops.Combine(),
        ops.Linear(wide, HIDDEN, **about),
    )
    yield Sequential(
        ops.LayerNorm(HIDDEN, **about),
        ops.Linear(HIDDEN, WIDTHS[0], **about),
        ops.GELU(),
        ops.Linear(WIDTHS[0], HIDDEN, **about),
        ops.Dropout(0.1),
    )


def steps(recipe: str, device: str, tokens: int) -> Iterator[list[Tensor]]:
    """The gradients of each model's step, in main_grad where they went there."""
    for model in models(device):
        x = torch.randn(tokens, HIDDEN, device=device, dtype=torch.bfloat16, requires_grad=True)
        with autocast(recipe):
            y = model(x)
        y.backward(torch.randn_like(y))
        yield [x.grad, *map(_gradient, model.parameters())]


def _gradient(parameter: Tensor) -> Tensor:
    return parameter.main_grad if getattr(parameter, "grad_added_to_main_grad", False) else parameter.grad


def main(recipes: list[str]) -> None:
    torch.manual_seed(0)
    for recipe in recipes or known_recipes():
        for tokens in TOKENS:
            for gradients in steps(recipe, "cuda", tokens):
                assert all(bool(gradient.isfinite().all()) for gradient in gradients)
        print(f"{recipe}: done")


if __name__ == "__main__":
    main(sys.argv[1:])
