"""Router: which experts each token goes to, and with which weight."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.kernels.routing import droute, route_ref
from ops.operation import BackwardOfBasic, BasicOperation, IndexTensor, OperationContext


class Router(BasicOperation):
    """logits = x W^T, softmax, top-k; x [T, hidden_size] is handed on unchanged, the results are extra outputs.

    probs                [T, topk] float32 (float64 for float64): the experts' weights, the largest first
    indices              [T, topk] int64: the experts; of equal scores the lower expert is taken
    load_balancing_loss  (): num_experts * sum_e f_e P_e of the Switch Transformer, to be scaled by the caller

    use_pre_softmax: softmax over all experts, then the top k; otherwise softmax over the k largest logits.
    normalize_probs: divide the k probabilities by their sum (with use_pre_softmax; they sum to 1 otherwise).

    Logits and probabilities are computed in float32 without TF32, also under a recipe and torch.autocast. Parameter:
    weight [num_experts, hidden_size], initialised as `torch.nn.Linear`'s. Formulas: `ops.kernels.routing`.
    Raises ValueError for sizes that are not positive, a topk above num_experts, or an x of another shape.
    """

    extra_outputs = {"probs": Tensor, "indices": IndexTensor, "load_balancing_loss": Tensor}

    class Saved(NamedTuple):
        x: Tensor
        scores: Tensor
        probs: Tensor
        indices: Tensor

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        use_pre_softmax: bool = True,
        normalize_probs: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if hidden_size <= 0 or not 0 < topk <= num_experts:
            raise ValueError(
                f"Router got hidden_size={hidden_size}, num_experts={num_experts}, topk={topk}. "
                "All must be positive, and topk at most num_experts."
            )
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.topk = topk
        self.use_pre_softmax = use_pre_softmax
        self.normalize_probs = normalize_probs
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(hidden_size)."""
        nn.init.uniform_(self.weight, -(self.hidden_size**-0.5), self.hidden_size**-0.5)

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        if x.dim() != 2 or x.shape[1] != self.hidden_size:
            raise ValueError(
                f"x has shape {list(x.shape)}, but [tokens, {self.hidden_size}] is needed. Flatten leading dimensions."
            )
        logits = _product(x, ctx.param("weight").T)
        probs, indices, loss = route_ref(logits, self.topk, self.use_pre_softmax, self.normalize_probs)
        if ctx.needs_grad:
            ctx.saved = self.Saved(x, logits.softmax(-1), probs, indices)
        return x, {"probs": probs, "indices": indices, "load_balancing_loss": loss}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        x, scores, probs, indices = ctx.saved
        dprobs, dloss = d_extra_outputs.get("probs"), d_extra_outputs.get("load_balancing_loss")
        if dprobs is None and dloss is None:
            return dy, {}, {}
        dlogits = droute(dprobs, dloss, scores, probs, indices, self.use_pre_softmax, self.normalize_probs)
        dx = None
        if ctx.needs.input:
            dx = _product(dlogits, ctx.param("weight"))
            dx = (dx if dy is None else dx + dy).to(ctx.dtype)
        return dx, {"weight": _product(dlogits.T, x) if "weight" in ctx.needs.params else None}, {}

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, topk={self.topk}, "
            f"use_pre_softmax={self.use_pre_softmax}, normalize_probs={self.normalize_probs}"
        )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in float32, exactly so on a GPU too: TF32 rounds to 10 bits and would change which expert wins."""
    dtype = torch.promote_types(torch.promote_types(a.dtype, b.dtype), torch.float32)
    a, b = a.to(dtype), b.to(dtype)
    if not a.is_cuda or dtype == torch.float64:
        return a @ b
    precision = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = "ieee"
    try:
        return a @ b
    finally:
        torch.backends.cuda.matmul.fp32_precision = precision
