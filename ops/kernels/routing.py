"""From router logits to the experts of each token, their probabilities, and the load-balancing loss.

    s[t]       = softmax over all experts of logits[t]
    indices[t] = the topk experts with the largest logits, largest first; of equal ones the lower index
    probs[t]   = s[t] at the indices; if normalized, divided by their sum, which is the softmax over the topk logits
    loss       = E sum_e f_e P_e

f_e is the share of the T topk (token, slot) pairs that chose e, a count without a gradient; P_e the mean of s[t, e]
over the tokens. Even routing gives a loss of 1. Without tokens it is 0.

Layouts: logits, s [T, E]; probs, indices [T, topk]; f [E]. Precision: all in the dtype of the logits, float32 or
float64.

Graph safety: nothing reads the device; no atomics. Counts come from a mask and a sum, not from bincount, whose result
has a size that the host would have to read.

Source of the loss: Fedus et al., "Switch Transformer", 2021, equations 4 to 6, with topk choices counted.
"""
# T tokens, E experts

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class Routing(NamedTuple):
    """What `route` finds: probs and indices [T, topk], loss (), and for the backward s [T, E] and f [E]."""

    probs: Tensor
    indices: Tensor
    loss: Tensor
    softmax: Tensor
    fractions: Tensor


def route_ref(logits: Tensor, topk: int, *, normalized: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(probs, indices, loss) of `route` in plain torch, differentiable by autograd. Reads the device."""
    num_experts = logits.shape[1]
    # sorted keeps the order of equals, also in reverse
    chosen = [sorted(range(num_experts), key=row.__getitem__, reverse=True)[:topk] for row in logits.tolist()]
    indices = torch.tensor(chosen, dtype=torch.int64, device=logits.device).reshape(-1, topk)
    softmax = logits.softmax(-1)
    probs = softmax.gather(1, indices)
    if normalized:
        probs = probs / probs.sum(-1, keepdim=True)
    if not chosen:
        return probs, indices, softmax.sum()
    fractions = F.one_hot(indices, num_experts).to(softmax.dtype).mean((0, 1))
    return probs, indices, num_experts * (fractions * softmax.mean(0)).sum()


def route(logits: Tensor, topk: int, *, normalized: bool) -> Routing:
    """Choose `topk` experts for each row of logits [T, E], float32 or float64."""
    num_tokens, num_experts = logits.shape
    # Not torch.topk: which of equal values it takes depends on the device.
    ordered, experts = logits.sort(dim=-1, descending=True, stable=True)
    indices = experts[:, :topk].contiguous()
    softmax = logits.softmax(-1)
    probs = ordered[:, :topk].softmax(-1) if normalized else softmax.gather(1, indices)
    chosen = torch.zeros_like(logits).scatter_(1, indices, 1.0)
    fractions = chosen.sum(0).div_(max(num_tokens * topk, 1))
    loss = torch.dot(fractions, softmax.sum(0)) * (num_experts / max(num_tokens, 1))
    return Routing(probs, indices, loss, softmax, fractions)


def droute(
    dprobs: Tensor | None,
    dloss: Tensor | None,
    probs: Tensor,
    indices: Tensor,
    softmax: Tensor,
    fractions: Tensor,
    *,
    normalized: bool,
) -> Tensor | None:
    """dlogits [T, E] from the gradients of probs and of loss, either of which may be None; None if both are.

    The other tensors are as `route` gave them.
    """
    if dprobs is None and dloss is None:
        return None
    num_tokens, num_experts = softmax.shape
    d_softmax = torch.zeros_like(softmax)
    if dloss is not None:
        d_softmax += fractions * (dloss * (num_experts / max(num_tokens, 1)))
    if dprobs is None:
        return _dsoftmax(d_softmax, softmax)
    if not normalized:
        return _dsoftmax(d_softmax.scatter_add_(1, indices, dprobs), softmax)
    chosen = _dsoftmax(dprobs, probs)
    if dloss is None:
        return d_softmax.scatter_(1, indices, chosen)
    return _dsoftmax(d_softmax, softmax).scatter_add_(1, indices, chosen)


def _dsoftmax(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient of the input of a softmax over the last dimension that gave y."""
    return (dy - (dy * y).sum(-1, keepdim=True)).mul_(y)
