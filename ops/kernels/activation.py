"""The activations between FC1 and FC2, forward and backward.

    swiglu           act = silu(a) * b                                               silu(a) = a * sigmoid(a)
    clamped_swiglu   act = a' * sigmoid(alpha * a') * (b' + glu_linear_offset)       a' = min(a, limit)
                                                                                     b' = min(max(b, -limit), limit)
    srelu            act = max(h, 0)^2

times a scale for each row, if there is one. a is the gate, b the linear half of h: halves [a | b], or with
`glu_interleave_size` = S alternating runs of S columns, gate first. PyTorch's own GLU has the gate second.

Shapes: h [..., 2I] (srelu: [..., I]), act [..., I], scales [...], of any float dtype.

Precision: computed in float32 (float64 for float64) from h as it is, and rounded once. A clamp passes the gradient on
where its argument is within the limit, the limit included, as `torch.clamp` does. Sums for dscales are in float32.

Graph safety: nothing is read by the host. Formulas and argument names: TransformerEngine's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """Which activation, and its numbers.

    Raises ValueError for a limit that is not positive and finite, an alpha or offset that is not finite, and an
    interleave size that is not positive.
    """

    kind: Literal["swiglu", "clamped_swiglu", "srelu"]
    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0
    glu_interleave_size: int | None = None

    def __post_init__(self) -> None:
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise ValueError(f"limit is {self.limit}, but must be positive and finite.")
        for name in ("alpha", "glu_linear_offset"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}, but must be finite.")
        if self.glu_interleave_size is not None and self.glu_interleave_size <= 0:
            raise ValueError(
                f"glu_interleave_size is {self.glu_interleave_size}, but must be positive, or None for halves."
            )

    @property
    def gated(self) -> bool:
        return self.kind != "srelu"

    def input_features(self, features: int) -> int:
        """The width of h for an activation that is `features` wide."""
        return 2 * features if self.gated else features


# References


def activation_ref(h: Tensor, spec: Activation, scales: Tensor | None = None) -> Tensor:
    """`activation` in plain torch."""
    wide = _wide(h)
    if spec.kind == "srelu":
        act = wide.relu().square()
    else:
        a, b = _halves(wide, spec.glu_interleave_size)
        if spec.kind == "swiglu":
            act = a * a.sigmoid() * b
        else:
            a, b = a.clamp(max=spec.limit), b.clamp(-spec.limit, spec.limit)
            act = a * (spec.alpha * a).sigmoid() * (b + spec.glu_linear_offset)
    return (act if scales is None else act * scales.unsqueeze(-1)).to(h.dtype)


def dactivation_ref(
    dact: Tensor, h: Tensor, spec: Activation, scales: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(dh, dscales) by torch's own autograd."""
    with torch.enable_grad():
        wide = _wide(h.detach()).clone().requires_grad_()
        factors = _wide(torch.ones(h.shape[:-1], device=h.device) if scales is None else scales.detach()).to(wide.dtype)
        factors = factors.clone().requires_grad_()
        act = activation_ref(wide, spec, factors)
        dh, dscales = torch.autograd.grad(act, (wide, factors), dact.to(wide.dtype))
    return dh.to(h.dtype), None if scales is None else dscales.to(scales.dtype)


# What runs: the same with fewer temporaries


def activation(h: Tensor, spec: Activation, scales: Tensor | None = None) -> Tensor:
    """act of h, in h's dtype.

    Raises ValueError if h cannot be divided into gate and linear halves, or scales is not one for each row.
    """
    _check(h, spec, scales)
    act = _value(_wide(h), spec)
    if scales is not None:
        act = act * scales.unsqueeze(-1)
    return act.to(h.dtype)


def dactivation(
    dact: Tensor,
    h: Tensor,
    spec: Activation,
    scales: Tensor | None = None,
    *,
    need_dscales: bool = False,
    need_act: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """(dh, dscales, act): the gradients of `activation`, and with `need_act` its value, bit for bit, again.

    dact: [..., I]. dh is in h's dtype; dscales [...], in scales' dtype, is None unless `need_dscales`.
    """
    wide, d = _wide(h), _wide(dact)
    value = _value(wide, spec) if need_act or need_dscales else None
    dscales = act = None
    if need_dscales and scales is not None and value is not None:
        dscales = (d * value).sum(-1).to(scales.dtype)
    if need_act and value is not None:
        act = (value if scales is None else value * scales.unsqueeze(-1)).to(h.dtype)
    if scales is not None:
        d = d * scales.unsqueeze(-1)
    if spec.kind == "srelu":
        return (2 * d * wide.relu()).to(h.dtype), dscales, act
    dh = torch.empty_like(h, memory_format=torch.contiguous_format)
    da, db = _halves(dh, spec.glu_interleave_size)
    a, b = _halves(wide, spec.glu_interleave_size)
    d = _blocks(d, spec.glu_interleave_size)
    if spec.kind == "swiglu":
        da.copy_(torch.ops.aten.silu_backward(d * b, a))
        db.copy_(d * torch.nn.functional.silu(a))
    else:
        clamped_a, clamped_b = a.clamp(max=spec.limit), b.clamp(-spec.limit, spec.limit)
        sigmoid = (spec.alpha * clamped_a).sigmoid()
        slope = sigmoid * (1 + spec.alpha * clamped_a * (1 - sigmoid))
        da.copy_(d * slope * (clamped_b + spec.glu_linear_offset) * (a <= spec.limit))
        db.copy_(d * clamped_a * sigmoid * (b.abs() <= spec.limit))
    return dh, dscales, act


def _value(wide: Tensor, spec: Activation) -> Tensor:
    """The activation without scales, in the dtype it is computed in."""
    if spec.kind == "srelu":
        return wide.relu().square()
    a, b = _halves(wide, spec.glu_interleave_size)
    if spec.kind == "swiglu":
        act = torch.nn.functional.silu(a) * b
    else:
        a = a.clamp(max=spec.limit)
        act = a * (spec.alpha * a).sigmoid() * (b.clamp(-spec.limit, spec.limit) + spec.glu_linear_offset)
    return act if spec.glu_interleave_size is None else act.flatten(-2)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _halves(h: Tensor, interleave: int | None) -> tuple[Tensor, Tensor]:
    """Views of the gate and the linear half of h: [..., I] each, or interleaved [..., I / S, S]."""
    if interleave is None:
        gate, linear = h.chunk(2, dim=-1)
    else:
        gate, linear = rearrange(h, "... (block two s) -> two ... block s", two=2, s=interleave)
    return gate, linear


def _blocks(d: Tensor, interleave: int | None) -> Tensor:
    """A tensor [..., I] in the shape of one of the `_halves`."""
    return d if interleave is None else rearrange(d, "... (block s) -> ... block s", s=interleave)


def _check(h: Tensor, spec: Activation, scales: Tensor | None) -> None:
    divisor = 2 * (spec.glu_interleave_size or 1) if spec.gated else 1
    if h.shape[-1] % divisor:
        needed = "gate and linear halves" if divisor == 2 else f"gate and linear runs of {spec.glu_interleave_size}"
        raise ValueError(
            f"x has {h.shape[-1]} features, which do not divide into {needed}. A multiple of {divisor} is needed."
        )
    if scales is not None and scales.shape != h.shape[:-1]:
        raise ValueError(
            f"scales has shape {list(scales.shape)}, but x has rows {list(h.shape[:-1])}. Give one scale for each row."
        )
