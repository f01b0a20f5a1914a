"""The end of a step of delayed scaling: amaxes enter the history, scales follow from it.

    last  = history[0]                          the maximum |x| of this step, in the open slot
    amax  = max over history                    "max", or `last` ("most_recent"), or what a function makes of it
    scale = fl(fl(largest * 2^-margin) / amax)  unchanged if amax is 0, Inf or NaN; the largest float32 for Inf
    history rolls by one, `last` to its end, and the open slot is 0 again; where `last` is 0 it does not roll

history: [L, n] float32, scale: [n] float32, both changed in place; no read of the device from the host. Each of the n
columns is a tensor of its own. Source: TransformerEngine's DelayedScaling (read at d0067d0).
"""

from collections.abc import Callable

import torch
from torch import Tensor

_FLOAT32_MAX = torch.finfo(torch.float32).max


def end_step_ref(
    history: Tensor,
    scale: Tensor,
    largest: float,
    amax_algorithm: str | Callable[[Tensor], Tensor],
    scale_from_amax: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> None:
    """The update above. largest: of the format, with the margin. A function gets history, or amax and the old scale."""
    last = history[0].clone()
    if callable(amax_algorithm):
        amax = amax_algorithm(history)
    else:
        amax = history.amax(0) if amax_algorithm == "max" else last
    if scale_from_amax is not None:
        new = scale_from_amax(amax, scale)
    else:
        quotient = (torch.full_like(amax, largest) / amax).clamp(max=_FLOAT32_MAX)
        new = torch.where((amax > 0) & (amax < torch.inf), quotient, scale)
    scale.copy_(new)
    rolled = history.roll(-1, 0)
    rolled[0] = 0
    history.copy_(torch.where(last != 0, rolled, history))
