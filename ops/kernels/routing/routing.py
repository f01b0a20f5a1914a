"""Choose the experts of each token from router logits, with their probabilities and the load-balancing loss.

    s[t]       = softmax over all experts of logits[t]
    indices[t] = the topk experts with the largest logits, largest first; among equal logits the lower index
    probs[t]   = s[t] at the indices; if normalized, divided by their sum, which is the softmax over the topk logits
    loss       = E sum_e f_e P_e

f_e is the share of the T topk (token, slot) pairs that chose e, a count without a gradient; P_e is the mean of s[t, e]
over the tokens. Even routing gives a loss of 1. Without tokens the loss is 0.

Layouts: logits, s [T, E]; probs, indices [T, topk]; f [E]. Precision: all in the dtype of the logits, float32 or
float64.

On CUDA, float32 runs one Triton kernel in forward and one in backward, for up to 512 experts. Each program counts and
sums its own tokens, and torch adds the results of the programs.

Graph safety: no host synchronization, no atomics. Counts are sums of a mask, because the result size of bincount
depends on the data.

Source of the loss: Fedus et al., "Switch Transformer", 2021, equations 4 to 6, with topk choices counted.
"""
# T tokens, E experts

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.kernels.norm.norm_triton import runs_in_triton
from ops.kernels.routing.routing_triton import droute_kernel, route_kernel
from recipes.triton.launch import Launch, cdiv, next_power_of_2


class Routing(NamedTuple):
    """The results of `route`: probs and indices [T, topk], loss (), and for backward s [T, E] and f [E]."""

    probs: Tensor
    indices: Tensor
    loss: Tensor
    softmax: Tensor
    fractions: Tensor


# ---------------------------------------------------------------------------------------------------------- references


def route_ref(logits: Tensor, topk: int, *, normalized: bool) -> tuple[Tensor, Tensor, Tensor]:
    """(probs, indices, loss) of `route` in plain torch, differentiable by autograd. Synchronizes."""
    num_experts = logits.shape[1]
    # sorted is stable, also in reverse
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


# -------------------------------------------------------------------------------------------------------------- config


class RouteConfig(NamedTuple):
    """Tokens of a program, and experts and slots padded to powers of two; a program handles all of them."""

    block_t: int
    block_e: int
    block_k: int
    num_warps: int


MOST_EXPERTS = 512


@lru_cache(maxsize=1024)
def route_config(num_experts: int, topk: int) -> RouteConfig:
    """Up to 16 logits in each thread and 16 tokens in each program: with twice either, backward spills registers."""
    block_e, block_k = next_power_of_2(num_experts), next_power_of_2(topk)
    return RouteConfig(min(16, 2048 // block_e), block_e, block_k, num_warps=4)


def routes_in_triton(device: torch.device, dtype: torch.dtype, num_experts: int) -> bool:
    """Whether the kernels run for these logits; otherwise plain torch runs."""
    return runs_in_triton(device, dtype) and num_experts <= MOST_EXPERTS


# ----------------------------------------------------------------------------------------------------------- launchers


def route(logits: Tensor, topk: int, *, normalized: bool) -> Routing:
    """Choose `topk` experts for each row of logits [T, E], float32 or float64."""
    num_tokens, num_experts = logits.shape
    on_triton = routes_in_triton(logits.device, logits.dtype, num_experts)
    choose = _choose_on_triton if on_triton else _choose_on_torch
    probs, indices, softmax, counts, sums = choose(logits, topk, normalized)
    fractions = counts.div_(max(num_tokens * topk, 1))
    loss = torch.dot(fractions, sums) * (num_experts / max(num_tokens, 1))
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

    The other tensors are as returned by `route`.
    """
    if dprobs is None and dloss is None:
        return None
    num_tokens, num_experts = softmax.shape
    loss_scale = num_experts / max(num_tokens, 1)
    if routes_in_triton(softmax.device, softmax.dtype, num_experts):
        dlogits = torch.empty_like(softmax)
        dprobs = None if dprobs is None else dprobs.contiguous()
        droute_triton(dprobs, dloss, probs, indices, softmax, fractions, dlogits, loss_scale, normalized)
        return dlogits
    d_softmax = torch.zeros_like(softmax)
    if dloss is not None:
        d_softmax += fractions * (dloss * loss_scale)
    if dprobs is None:
        return _dsoftmax(d_softmax, softmax)
    if not normalized:
        return _dsoftmax(d_softmax.scatter_add_(1, indices, dprobs), softmax)
    chosen = _dsoftmax(dprobs, probs)
    if dloss is None:
        return d_softmax.scatter_(1, indices, chosen)
    return _dsoftmax(d_softmax, softmax).scatter_add_(1, indices, chosen)


_route, _droute = Launch(route_kernel), Launch(droute_kernel)


def route_triton(
    logits: Tensor,
    probs: Tensor,
    indices: Tensor,
    softmax: Tensor,
    counts: Tensor,
    sums: Tensor,
    config: RouteConfig,
    normalized: bool,
) -> None:
    """Launch the forward. counts, sums: [programs, E], over each program's tokens. All tensors contiguous."""
    if not counts.shape[0]:
        return
    _route(
        logits, counts.shape[0], logits, probs, indices, softmax, counts, sums, *logits.shape,
        TOPK=probs.shape[1], NORMALIZED=normalized, **_blocks(config),
    )  # fmt: skip


def droute_triton(
    dprobs: Tensor | None,
    dloss: Tensor | None,
    probs: Tensor,
    indices: Tensor,
    softmax: Tensor,
    fractions: Tensor,
    dlogits: Tensor,
    loss_scale: float,
    normalized: bool,
) -> None:
    """Launch the backward; loss_scale is num_experts / num_tokens. All tensors contiguous."""
    num_tokens, num_experts = softmax.shape
    topk = probs.shape[1]
    if not num_tokens:
        return
    config = route_config(num_experts, topk)
    _droute(
        softmax, cdiv(num_tokens, config.block_t),
        dprobs, dloss, probs, indices, softmax, fractions, dlogits, loss_scale, num_tokens, num_experts,
        TOPK=topk, NORMALIZED=normalized, **_blocks(config),
    )  # fmt: skip


# probs, indices, softmax; [E] how often each expert was chosen; [E] the sum of its softmax over the tokens
_Choice = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def _choose_on_torch(logits: Tensor, topk: int, normalized: bool) -> _Choice:
    # Not torch.topk: its choice among equal values depends on the device.
    ordered, experts = logits.sort(dim=-1, descending=True, stable=True)
    indices = experts[:, :topk].contiguous()
    softmax = logits.softmax(-1)
    probs = ordered[:, :topk].softmax(-1) if normalized else softmax.gather(1, indices)
    chosen = torch.zeros_like(logits).scatter_(1, indices, 1.0)
    return probs, indices, softmax, chosen.sum(0), softmax.sum(0)


def _choose_on_triton(logits: Tensor, topk: int, normalized: bool) -> _Choice:
    num_tokens, num_experts = logits.shape
    config = route_config(num_experts, topk)
    probs, softmax = logits.new_empty(num_tokens, topk), logits.new_empty(logits.shape)
    indices = torch.empty(num_tokens, topk, dtype=torch.int64, device=logits.device)
    shares = logits.new_empty(2, -(-num_tokens // config.block_t), num_experts)
    route_triton(logits.contiguous(), probs, indices, softmax, shares[0], shares[1], config, normalized)
    counts, sums = shares.sum(1).unbind()
    return probs, indices, softmax, counts, sums


def _blocks(config: RouteConfig) -> dict[str, int]:
    block_t, block_e, block_k, num_warps = config
    return {"BLOCK_T": block_t, "BLOCK_E": block_e, "BLOCK_K": block_k, "num_warps": num_warps}


def _dsoftmax(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient of the input of a softmax over the last dimension, from its output y."""
    return (dy - (dy * y).sum(-1, keepdim=True)).mul_(y)
