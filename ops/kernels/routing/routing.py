"""Choose the experts of each token from router logits, with their probabilities and the load-balancing loss.

                    softmax                                          sigmoid
    s[t]            softmax over all experts of logits[t]            sigmoid of logits[t]
    key[t]          logits[t], which order the experts as s[t] does  s[t] + expert_bias
    group score     the largest key of the group                     the sum of its two largest keys
    P[t]            s[t]                                             s[t] / (sum_e s[t, e] + 1e-20)

    indices[t] = the topk experts with the largest keys, largest first; among equal keys the lower index
    probs[t]   = s[t] at the indices; if normalized, divided by their sum: with softmax this is the softmax over the
                 chosen logits; with sigmoid the sum has 1e-20 added
    loss       = E sum_e f_e mean_t P[t, e]

With topk_groups below num_groups the experts are cut into num_groups runs of equal length, and each token chooses among
those of its topk_groups groups with the largest scores; among equal scores the lower group. expert_bias [E] moves the
choice alone: it is not part of probs, and has no gradient.

f_e is the share of the T topk (token, slot) pairs that chose e, a count without a gradient. Even routing gives a loss
of 1. Without tokens the loss is 0.

Layouts: logits, s [T, E]; probs, indices [T, topk]; f, counts [E]. Precision: all in the dtype of the logits, float32
or float64; counts are exact.

On CUDA, float32 with softmax runs two Triton kernels in forward, without groups, and one in backward, for up to 512
experts. Each program of the first counts and sums its own tokens; the second adds that up, a few experts a program, and
torch their losses. Groups, and sigmoid scores with their gradients, run in torch; the first kernel then chooses among
the keys, as a sort would.

Graph safety: no host synchronization, no atomics. Counts are sums of a mask, because the result size of bincount
depends on the data.

Sources: the loss, Fedus et al., "Switch Transformer", 2021, equations 4 to 6, with topk choices counted, and for
sigmoid DeepSeek-V3's report, 2024, equations 17 to 20; the scores, groups and 1e-20, Hugging Face transformers 5.23.0,
`DeepseekV3TopkRouter` and `DeepseekV2TopkRouter`. (Release 4.57.6 masked the scores of the other groups with 0, not
with -inf, and so could choose one of their experts where the biased score of a better one was negative.)
"""
# T tokens, E experts

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.kernels.elementwise.activation_functions import sigmoid
from ops.kernels.norm.norm_triton import runs_in_triton
from ops.kernels.routing.routing_triton import balance_kernel, droute_kernel, route_kernel
from recipes.triton.launch import Launch, cdiv, next_power_of_2

ScoreFunction = Literal["softmax", "sigmoid"]


class Routing(NamedTuple):
    """The results of `route`: probs and indices [T, topk], loss (), counts [E] int64 (how many tokens chose e), and for
    backward s [T, E] and f [E]."""

    probs: Tensor
    indices: Tensor
    loss: Tensor
    counts: Tensor
    scores: Tensor
    fractions: Tensor


# ---------------------------------------------------------------------------------------------------------- references


def route_ref(
    logits: Tensor,
    topk: int,
    *,
    normalized: bool,
    score_function: ScoreFunction = "softmax",
    expert_bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    """(probs, indices, loss) of `route` in plain torch, differentiable by autograd. Synchronizes."""
    num_experts = logits.shape[1]
    is_softmax = score_function == "softmax"
    scores = logits.softmax(-1) if is_softmax else logits.sigmoid()
    keys = logits if is_softmax else scores if expert_bias is None else scores + expert_bias
    per_group = num_experts // num_groups
    groups = [range(first, first + per_group) for first in range(0, num_experts, per_group)]
    chosen = []
    for row in keys.tolist():
        # sorted is stable, also in reverse
        values = [sorted((row[e] for e in group), reverse=True)[: 1 if is_softmax else 2] for group in groups]
        best = sorted(range(num_groups), key=lambda g: sum(values[g]), reverse=True)[:topk_groups]
        allowed = [e for g in sorted(best) for e in groups[g]]
        chosen.append(sorted(allowed, key=row.__getitem__, reverse=True)[:topk])
    indices = torch.tensor(chosen, dtype=torch.int64, device=logits.device).reshape(-1, topk)
    probs = scores.gather(1, indices)
    if normalized:
        probs = probs / (probs.sum(-1, keepdim=True) + (0 if is_softmax else SIGMOID_SUM_EPS))
    shares = scores if is_softmax else scores / (scores.sum(-1, keepdim=True) + SIGMOID_SUM_EPS)
    if not chosen:
        return probs, indices, shares.sum()
    fractions = F.one_hot(indices, num_experts).to(scores.dtype).mean((0, 1))
    return probs, indices, num_experts * (fractions * shares.mean(0)).sum()


# -------------------------------------------------------------------------------------------------------------- config


class RouteConfig(NamedTuple):
    """Tokens of a program, and experts and slots padded to powers of two; a program handles all of them."""

    block_t: int
    block_e: int
    block_k: int
    num_warps: int


MOST_EXPERTS = 512
MOST_PROGRAMS = 512  # of the choice
BALANCED = 16  # experts whose counts and sums one program adds up
SIGMOID_SUM_EPS = 1e-20  # Hugging Face transformers, `DeepseekV3TopkRouter`
MOST_EXACT = 2**24  # float32 counts up to here


@lru_cache(maxsize=1024)
def route_config(num_experts: int, topk: int) -> RouteConfig:
    """Up to 16 logits in each thread and 16 tokens in each program: with twice either, backward spills registers."""
    block_e, block_k = next_power_of_2(num_experts), next_power_of_2(topk)
    return RouteConfig(min(16, 2048 // block_e), block_e, block_k, num_warps=4)


def routes_in_triton(device: torch.device, dtype: torch.dtype, num_experts: int) -> bool:
    """Whether the kernels run for the softmax of these logits; otherwise plain torch runs."""
    return runs_in_triton(device, dtype) and num_experts <= MOST_EXPERTS


def describe_kernels(num_experts: int, score_function: ScoreFunction, is_limited: bool) -> str:
    """What computes this routing on a GPU in float32, for `explain()`. is_limited: to some groups."""
    if num_experts > MOST_EXPERTS:
        return f"torch: the kernels hold up to {MOST_EXPERTS} experts"
    if score_function == "softmax" and not is_limited:
        return "softmax and choice in one (Triton)"
    return f"choice (Triton), {score_function} scores{' and groups' if is_limited else ''} in torch"


# ----------------------------------------------------------------------------------------------------------- launchers


def route(
    logits: Tensor,
    topk: int,
    *,
    normalized: bool,
    score_function: ScoreFunction = "softmax",
    expert_bias: Tensor | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> Routing:
    """Choose `topk` experts for each row of logits [T, E], float32 or float64. expert_bias: [E], with sigmoid."""
    num_tokens, num_experts = logits.shape
    is_limited = topk_groups < num_groups
    if score_function == "softmax" and not is_limited and routes_in_triton(logits.device, logits.dtype, num_experts):
        probs, indices, scores, of_programs = _choose_on_triton(logits, topk, normalized)
        exact = torch.empty(num_experts, dtype=torch.int64, device=logits.device)
        fractions, losses = logits.new_empty(num_experts), logits.new_empty(cdiv(num_experts, BALANCED))
        balance_triton(of_programs, exact, fractions, losses, num_tokens, topk)
        return Routing(probs, indices, losses.sum(), exact, scores, fractions)
    scores, keys, shares = _score(logits, score_function, expert_bias)
    groups = (num_groups, topk_groups, 1 if score_function == "softmax" else 2) if is_limited else None
    indices = _largest(keys, topk, groups)
    probs = _probabilities(logits, scores, indices, score_function, normalized)
    chosen = torch.zeros_like(logits).scatter_(1, indices, 1.0)
    counts, sums = chosen.sum(0, dtype=_counting(logits)), shares.sum(0)
    exact = counts.to(torch.int64)
    fractions = counts.div_(max(num_tokens * topk, 1)).to(logits.dtype)
    loss = torch.dot(fractions, sums) * (num_experts / max(num_tokens, 1))
    return Routing(probs, indices, loss, exact, scores, fractions)


def droute(
    dprobs: Tensor | None,
    dloss: Tensor | None,
    probs: Tensor,
    indices: Tensor,
    scores: Tensor,
    fractions: Tensor,
    *,
    normalized: bool,
    score_function: ScoreFunction = "softmax",
) -> Tensor | None:
    """dlogits [T, E] from the gradients of probs and of loss, either of which may be None; None if both are.

    The other tensors are as returned by `route`.
    """
    if dprobs is None and dloss is None:
        return None
    num_tokens, num_experts = scores.shape
    loss_scale = num_experts / max(num_tokens, 1)
    if score_function == "sigmoid":
        return _droute_sigmoid(dprobs, dloss, probs, indices, scores, fractions, loss_scale, normalized)
    if routes_in_triton(scores.device, scores.dtype, num_experts):
        dlogits = torch.empty_like(scores)
        dprobs = None if dprobs is None else dprobs.contiguous()
        droute_triton(dprobs, dloss, probs, indices, scores, fractions, dlogits, loss_scale, normalized)
        return dlogits
    d_softmax = torch.zeros_like(scores)
    if dloss is not None:
        d_softmax += fractions * (dloss * loss_scale)
    if dprobs is None:
        return _dsoftmax(d_softmax, scores)
    if not normalized:
        return _dsoftmax(d_softmax.scatter_add_(1, indices, dprobs), scores)
    chosen = _dsoftmax(dprobs, probs)
    if dloss is None:
        return d_softmax.scatter_(1, indices, chosen)
    return _dsoftmax(d_softmax, scores).scatter_add_(1, indices, chosen)


_route, _balance, _droute = Launch(route_kernel), Launch(balance_kernel), Launch(droute_kernel)


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
    """Launch the choice. counts, sums: [programs, E], over each program's tokens. All tensors contiguous."""
    if not counts.shape[0]:
        return
    _route(
        logits, counts.shape[0], logits, probs, indices, softmax, counts, sums, *logits.shape,
        TOPK=probs.shape[1], NORMALIZED=normalized, **_blocks(config),
    )  # fmt: skip


def balance_triton(
    of_programs: Tensor, counts: Tensor, fractions: Tensor, losses: Tensor, num_tokens: int, topk: int
) -> None:
    """Launch what follows the choice. of_programs: [2, programs, E], the counts and the sums; losses: of `BALANCED`
    experts each. All contiguous."""
    _, programs, num_experts = of_programs.shape
    _balance(
        losses, len(losses), of_programs[0], of_programs[1], counts, fractions, losses, programs, num_experts,
        max(num_tokens * topk, 1), num_experts / max(num_tokens, 1),
        BLOCK_P=256, BLOCK_E=BALANCED, num_warps=8,
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


# probs, indices, softmax; [2, programs, E] how often each expert was chosen, and the sum of its softmax over the tokens
_Choice = tuple[Tensor, Tensor, Tensor, Tensor]


def _score(logits: Tensor, score_function: ScoreFunction, expert_bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """The scores s, the keys of the choice, and P, of which the loss takes the mean; all [T, E]."""
    if score_function == "softmax":
        scores = logits.softmax(-1)
        return scores, logits, scores
    scores = sigmoid(logits)
    keys = scores if expert_bias is None else scores + expert_bias
    return scores, keys, scores / (scores.sum(-1, keepdim=True) + SIGMOID_SUM_EPS)


def _largest(keys: Tensor, topk: int, groups: tuple[int, int, int] | None) -> Tensor:
    """The experts [T, topk] with the largest keys [T, E]. groups: (num_groups, topk_groups, keys in a group's score).

    Not by torch.topk: its choice among equal values depends on the device.
    """
    num_experts = keys.shape[1]
    if groups is None:
        return _first(keys, topk, num_experts)
    num_groups, topk_groups, num_summed = groups
    grouped = keys.unflatten(1, (num_groups, -1))
    group_scores = grouped.topk(num_summed, dim=-1)[0].sum(-1)  # of equal keys either has the same value
    best = group_scores.sort(dim=-1, descending=True, stable=True)[1][:, :topk_groups]
    # In the order of their indices, so that among equal keys the lower expert comes first.
    experts = torch.arange(num_experts, device=keys.device).view(num_groups, -1)[best.sort(dim=-1)[0]].flatten(1)
    return experts.gather(1, _first(keys.gather(1, experts), topk, num_experts))


def _first(keys: Tensor, topk: int, num_experts: int) -> Tensor:
    """Where the topk largest of each row are, largest first; among equal keys the first."""
    if routes_in_triton(keys.device, keys.dtype, num_experts):
        return _choose_on_triton(keys, topk, normalized=False)[1]  # its softmax is not used
    return keys.sort(dim=-1, descending=True, stable=True)[1][:, :topk].contiguous()


def _probabilities(
    logits: Tensor, scores: Tensor, indices: Tensor, score_function: ScoreFunction, normalized: bool
) -> Tensor:
    if not normalized:
        return scores.gather(1, indices)
    if score_function == "softmax":
        return logits.gather(1, indices).softmax(-1)
    chosen = scores.gather(1, indices)
    return chosen / (chosen.sum(-1, keepdim=True) + SIGMOID_SUM_EPS)


def _counting(logits: Tensor) -> torch.dtype:
    """A dtype that counts this many tokens exactly."""
    return torch.float64 if logits.shape[0] > MOST_EXACT else logits.dtype


def _choose_on_triton(logits: Tensor, topk: int, normalized: bool) -> _Choice:
    num_tokens, num_experts = logits.shape
    config = route_config(num_experts, topk)
    probs, softmax = logits.new_empty(num_tokens, topk), logits.new_empty(logits.shape)
    indices = torch.empty(num_tokens, topk, dtype=torch.int64, device=logits.device)
    programs = torch.sym_min(cdiv(num_tokens, config.block_t), MOST_PROGRAMS)  # min of a traced number would be a guard
    of_programs = logits.new_empty(2, programs, num_experts)
    route_triton(logits.contiguous(), probs, indices, softmax, of_programs[0], of_programs[1], config, normalized)
    return probs, indices, softmax, of_programs


def _blocks(config: RouteConfig) -> dict[str, int]:
    block_t, block_e, block_k, num_warps = config
    return {"BLOCK_T": block_t, "BLOCK_E": block_e, "BLOCK_K": block_k, "num_warps": num_warps}


def _dsoftmax(dy: Tensor, y: Tensor) -> Tensor:
    """The gradient of the input of a softmax over the last dimension, from its output y."""
    return (dy - (dy * y).sum(-1, keepdim=True)).mul_(y)


def _droute_sigmoid(
    dprobs: Tensor | None,
    dloss: Tensor | None,
    probs: Tensor,
    indices: Tensor,
    scores: Tensor,
    fractions: Tensor,
    loss_scale: float,
    normalized: bool,
) -> Tensor:
    d_scores = torch.zeros_like(scores)
    if dprobs is not None:
        if normalized:
            total = scores.gather(1, indices).sum(-1, keepdim=True) + SIGMOID_SUM_EPS
            dprobs = (dprobs - (dprobs * probs).sum(-1, keepdim=True)) / total
        d_scores.scatter_(1, indices, dprobs)  # an expert is chosen once
    if dloss is not None:
        total = scores.sum(-1, keepdim=True) + SIGMOID_SUM_EPS
        d_shares = fractions * (dloss * loss_scale)
        d_scores += (d_shares - (d_shares * scores).sum(-1, keepdim=True) / total) / total
    return d_scores.mul_(scores).mul_(1 - scores)
