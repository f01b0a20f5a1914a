"""Router: chooses the experts of each token and their probabilities."""
# T tokens

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.kernels.routing.routing import droute, route, routes_in_triton
from ops.runner.operation import (
    BackwardOfBasic,
    BasicOperation,
    IndexTensor,
    OperationContext,
    check_features,
    check_parameter_dtype,
)
from recipes.arguments import as_integer, check_flags, positive_integers
from recipes.request import PlanRequest


class Router(BasicOperation):
    """y = x [T, hidden_size]; the routing is returned as extra outputs.

        logits = x W^T, in float32 (float64 for float64)        weight: [num_experts, hidden_size]

    probs   [T, topk] float32 (float64): probabilities of the chosen experts, largest first
    indices [T, topk] int64: the chosen experts; among equal logits the lower index, on every device
    load_balancing_loss (): num_experts sum_e f_e P_e, with f_e the share of the (token, slot) pairs that chose e and
            P_e the mean probability of e over the tokens; 1 for even routing, 0 without tokens

    use_pre_softmax: True: softmax over all experts, then the topk largest. False: softmax over the topk logits.
    normalize_probs: divide the probabilities by their sum; no effect with use_pre_softmax=False, where the sum is
                     already 1.

    The products run in full float32 under every recipe, torch.autocast and TF32 setting, because a small error in a
    logit can change the choice. (Under torch.autocast x arrives in autocast's dtype; W is not cast.)

    Weights are initialised as in `torch.nn.Linear`. Raises ValueError for sizes that are not positive, a topk above
    num_experts, and an x that is not [T, hidden_size].
    """

    extra_outputs = {"probs": Tensor, "indices": IndexTensor, "load_balancing_loss": Tensor}

    class Saved(NamedTuple):
        x: Tensor | None  # None if the weight needs no gradient
        probs: Tensor
        indices: Tensor
        softmax: Tensor
        fractions: Tensor

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
        hidden_size, num_experts = positive_integers("Router", hidden_size=hidden_size, num_experts=num_experts)
        topk = as_integer("topk", topk)
        check_flags(use_pre_softmax=use_pre_softmax, normalize_probs=normalize_probs)
        check_parameter_dtype(dtype)
        if not 1 <= topk <= num_experts:
            raise ValueError(f"topk is {topk}, but must be between 1 and num_experts={num_experts}.")
        self.hidden_size = hidden_size
        self.num_experts = num_experts
        self.topk = topk
        self.use_pre_softmax = use_pre_softmax
        self.normalize_probs = normalize_probs
        self.weight = nn.Parameter(torch.empty(num_experts, hidden_size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(hidden_size), as in `torch.nn.Linear`."""
        bound = self.hidden_size**-0.5
        nn.init.uniform_(self.weight, -bound, bound)

    @property
    def normalized(self) -> bool:
        """Whether the probabilities of a token sum to one."""
        return self.normalize_probs or not self.use_pre_softmax

    def fuser_forward(
        self, ctx: OperationContext, x: Tensor, extras: Mapping[str, Any]
    ) -> tuple[Tensor, Mapping[str, Any]]:
        if x.dim() != 2 or x.shape[1] != self.hidden_size:
            raise ValueError(
                f"x has shape {list(x.shape)}, but [tokens, {self.hidden_size}] is needed. "
                "Flatten leading dimensions; check the operation before this one."
            )
        logits = _product(x, self._weight(ctx).t())
        probs, indices, loss, softmax, fractions = route(logits, self.topk, normalized=self.normalized)
        if ctx.needs_grad:
            ctx.saved = self.Saved(x if ctx.needs.params else None, probs, indices, softmax, fractions)
        return x, {"probs": probs, "indices": indices, "load_balancing_loss": loss}

    def fuser_backward(
        self, ctx: OperationContext, dy: Tensor | None, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfBasic:
        x, *routing = ctx.saved
        dlogits = droute(
            d_extra_outputs.get("probs"),
            d_extra_outputs.get("load_balancing_loss"),
            *routing,
            normalized=self.normalized,
        )
        if dlogits is None:
            return dy, {}, {}
        dx = dweight = None
        if ctx.needs.input:
            dx = _product(dlogits, self._weight(ctx))
            if dy is not None:
                dx += dy
        if x is not None:
            dweight = _product(dlogits.t(), x)
        return dx, {"weight": dweight}, {}

    def _weight(self, ctx: OperationContext) -> Tensor:
        """The weight in at least float32, not in torch.autocast's dtype."""
        return ctx.param("weight", torch.promote_types(ctx.dtype, torch.float32))

    def kernel(self, request: PlanRequest) -> str:
        dtype = torch.promote_types(request.dtype, torch.float32)
        on_triton = routes_in_triton(request.device, dtype, self.num_experts)
        return "softmax and choice in one (Triton)" if on_triton else "torch"

    def features(self, incoming: int | None) -> int | None:
        check_features(incoming, self.hidden_size)
        return self.hidden_size

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, num_experts={self.num_experts}, topk={self.topk}, "
            f"use_pre_softmax={self.use_pre_softmax}, normalize_probs={self.normalize_probs}"
        )


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a b in float32 or float64, with TF32 turned off: TF32 rounds the operands to 10 mantissa bits."""
    if a.dtype == torch.float64:
        return a @ b
    a, b = a.float(), b.float()
    if not a.is_cuda:
        return a @ b
    setting = torch.backends.cuda.matmul
    precision = setting.fp32_precision
    setting.fp32_precision = "ieee"
    try:
        return a @ b
    finally:
        setting.fp32_precision = precision
