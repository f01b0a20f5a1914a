"""The router's mathematics: scores, the top k of them, and the load-balancing loss.

    logits = x W^T                     float32 (float64 for float64), never TF32
    s = softmax(logits)                over all E experts
    use_pre_softmax:  p = s at the k largest      (normalize: divided by their sum)
    else:             p = softmax of the k largest logits
    loss = E * sum_e f_e P_e           f_e: share of the T * k slots that go to e, P_e: mean of s[:, e]   (Switch)

Shapes: logits [T, E], p and indices [T, k]. Equal scores go to the lower expert, on every device: the order comes
from a stable sort. f carries no gradient. Sources: Switch Transformer (arXiv 2101.03961), equations 4 to 6.
"""

from __future__ import annotations

import torch
from torch import Tensor


def route_ref(
    logits: Tensor, topk: int, use_pre_softmax: bool, normalize: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """(probs, indices, load-balancing loss), for torch's autograd."""
    scores = logits.softmax(-1)
    indices = logits.argsort(dim=-1, descending=True, stable=True)[:, :topk]
    if use_pre_softmax:
        probs = scores.gather(1, indices)
        probs = probs / probs.sum(-1, keepdim=True) if normalize else probs
    else:
        probs = logits.gather(1, indices).softmax(-1)
    return probs, indices, load_balancing_loss(scores, indices)


def load_balancing_loss(scores: Tensor, indices: Tensor) -> Tensor:
    """E * sum_e f_e P_e, a scalar; 1 if both are uniform, 0 without tokens."""
    num_tokens, num_experts = scores.shape
    share = slot_counts(indices, num_experts).to(scores.dtype) / max(indices.numel(), 1)
    return num_experts * (share * scores.sum(0)).sum() / max(num_tokens, 1)


def slot_counts(indices: Tensor, num_experts: int) -> Tensor:
    """How many slots go to each expert, [E] int64."""
    bounds = torch.arange(num_experts + 1, device=indices.device)
    return torch.searchsorted(indices.flatten().sort().values, bounds).diff()


def droute(
    dprobs: Tensor | None,
    dloss: Tensor | None,
    scores: Tensor,
    probs: Tensor,
    indices: Tensor,
    use_pre_softmax: bool,
    normalize: bool,
) -> Tensor:
    """dlogits [T, E] from the gradients of probs [T, k] and of the loss (), either of which may be None."""
    num_tokens, num_experts = scores.shape
    dscores = torch.zeros_like(scores)
    dlogits = torch.zeros_like(scores)
    if dloss is not None:
        share = slot_counts(indices, num_experts).to(scores.dtype) / max(indices.numel(), 1)
        dscores += dloss * share * (num_experts / max(num_tokens, 1))
    if dprobs is not None:
        if not use_pre_softmax:
            dlogits.scatter_(1, indices, _dsoftmax(dprobs, probs))
        else:
            if normalize:
                total = scores.gather(1, indices).sum(-1, keepdim=True)
                dprobs = (dprobs - (dprobs * probs).sum(-1, keepdim=True)) / total
            # a token's k experts differ, so nothing is added twice
            dscores.scatter_add_(1, indices, dprobs.to(scores.dtype))
    return dlogits + _dsoftmax(dscores, scores)


def _dsoftmax(dy: Tensor, y: Tensor) -> Tensor:
    return y * (dy - (dy * y).sum(-1, keepdim=True))
