"""Which scaled activation is that of an experts module of transformers, by the values that it computes."""
# I features of the activation

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from ops.activations import ActivationOperation, ScaledClampedQGeGLU, ScaledSReLU, ScaledSwiGLU
from ops.kernels.elementwise.activation import activation

_TOLERANCE = 1e-5  # activations that resemble each other (silu, gelu) differ by 1e-2 here


def scaled_activation(experts: Any) -> ActivationOperation:
    """The activation between the two products of `experts`, multiplied by the factor of each row.

    Found by values, not by names: of the activations that there are, the one that gives what the module's own
    `_apply_gate` (`act_fn` without a gate) gives for numbers of either sign between 0.01 and 1e5. So a subclass with a
    formula of its own, such as a limit, is not taken for another.

    Raises NotImplementedError if there is none.
    """
    gated = experts.has_gate
    # Values are compared, also while others trace (torch.export) or compute with fake tensors.
    with _disable_current_modes(), torch.no_grad(), torch.autocast("cpu", enabled=False):
        h = _probe()
        wanted = experts._apply_gate(h) if gated else experts.act_fn(h)
        for candidate in _candidates(experts):
            if _is_same(activation(h, candidate.activation, None), wanted):
                return candidate
    kind = type(experts).__name__
    own = f"{kind}._apply_gate" if gated else f"{kind}.act_fn ({type(experts.act_fn).__name__})"
    raise NotImplementedError(
        f"{own} computes none of the activations that run here: silu(a) b, that of gpt-oss with the limit and alpha "
        "of the module, and relu(x)^2 without a gate. Leave the blocks of this model as they were, and choose another "
        'implementation: model.set_experts_implementation("grouped_mm").'
    )


def _probe() -> Tensor:
    """[64, 32] float64: gates and linear parts of all magnitudes meet."""
    generator = torch.Generator("cpu").manual_seed(0)
    magnitudes, signs = torch.rand(2, 64, 32, dtype=torch.float64, device="cpu", generator=generator)
    return 10 ** (7 * magnitudes - 2) * (signs - 0.5).sign()


def _candidates(experts: Any) -> Iterator[ActivationOperation]:
    if not experts.has_gate:
        yield ScaledSReLU()
        return
    for interleaved in (None, 1):
        yield ScaledSwiGLU(interleaved)
        if hasattr(experts, "limit") and hasattr(experts, "alpha"):
            yield ScaledClampedQGeGLU(interleaved, limit=experts.limit, alpha=experts.alpha)


def _is_same(ours: Tensor, wanted: Tensor) -> bool:
    return ours.shape == wanted.shape and torch.allclose(ours, wanted.to(ours.dtype), rtol=_TOLERANCE, atol=_TOLERANCE)
