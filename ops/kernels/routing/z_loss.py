"""The router's z-loss, which keeps logits small.

    loss = coefficient mean_t (log sum_e exp logits[t, e])^2,      0 without tokens

logits [T, E], float32 or float64, in which all is computed. Graph safety: no host synchronization.

Source: Zoph et al., "ST-MoE", 2022, equation 5.
"""
# T tokens, E experts

from __future__ import annotations

from torch import Tensor


def z_loss(logits: Tensor, coefficient: float) -> Tensor:
    """The loss, ()."""
    return logits.logsumexp(-1).square().sum() * (coefficient / max(logits.shape[0], 1))


def dz_loss(dloss: Tensor, logits: Tensor, coefficient: float) -> Tensor:
    """dlogits [T, E]: dloss 2 coefficient / T logsumexp(logits[t]) softmax(logits[t])."""
    scale = dloss * (2 * coefficient / max(logits.shape[0], 1))
    return logits.softmax(-1).mul_(logits.logsumexp(-1, keepdim=True) * scale)
