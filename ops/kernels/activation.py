"""The activations of a feed-forward layer, gated and not, each with an optional factor a row.

    swiglu           f(a, b) = silu(a) b                               silu(a) = a sigmoid(a)
    clamped_swiglu   f(a, b) = a' sigmoid(alpha a') (b' + offset)      a' = min(a, limit), b' = clamp(b, -limit, limit)
    srelu            f(a)    = relu(a)^2

    act = f(h) * scales              dscales[t] = sum_j dact[t, j] f(h)[t, j]

Layouts: h [..., 2I] holds gate a and linear part b as halves [a | b], or, with `glu_interleave_size` = S, as
alternating runs of S columns, gate first; act is [..., I]. srelu has no gate: h is [..., I]. scales is h.shape[:-1].

    I = 4, S = 2:   columns of h   a0 a1 b0 b1 a2 a3 b2 b3

A clamp hands its gradient on inside its limits and at them, as torch.clamp does, and zero outside.

Precision: float32 (float64 for float64) from the first step to the last, then one rounding to h's dtype; scales may
have any floating dtype, and dscales gets the same. The activation that `dactivation` computes again is bit for bit
that of `activation`.

Graph safety: nothing reads the device. The Triton kernels are still to come: plain torch runs on every device.

Source of the formulas: TransformerEngine's SwiGLU, ClampedSwiGLU (the GPT-OSS activation) and SReLU; for srelu, So et
al., "Primer", 2021.
"""
# I features of the activation, S interleave size

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

silu_backward = torch.ops.aten.silu_backward.grad_input

Kind = Literal["swiglu", "clamped_swiglu", "srelu"]


@dataclass(frozen=True)
class Activation:
    """Which activation, with its constants. Equal by value.

    limit, alpha, glu_linear_offset: of clamped_swiglu; the others ignore them
    glu_interleave_size: S, or None for halves; srelu ignores it

    Raises ValueError for an unknown kind, a limit that is not finite and above 0, an alpha or an offset that is not
    finite, an interleave size that is not positive.
    """

    kind: Kind
    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0
    glu_interleave_size: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"kind is {self.kind!r}, but must be one of {', '.join(get_args(Kind))}.")
        if not (math.isfinite(self.limit) and self.limit > 0):
            raise ValueError(f"limit is {self.limit}, but must be finite and above 0. Without a limit, take SwiGLU.")
        for name in ("alpha", "glu_linear_offset"):
            if not math.isfinite(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)}, but must be finite.")
        size = self.glu_interleave_size
        if size is not None and size <= 0:
            raise ValueError(f"glu_interleave_size is {size}, but must be positive. Give None for halves [gate | up].")

    @property
    def gated(self) -> bool:
        return self.kind != "srelu"

    def input_features(self, features: int) -> int:
        """How many features of h give `features` of act."""
        return 2 * features if self.gated else features


def activation_ref(h: Tensor, spec: Activation, scales: Tensor | None = None) -> Tensor:
    """`activation` in plain torch and einops, differentiable by autograd."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    if spec.kind == "srelu":
        act = wide.relu().square()
    else:
        size = spec.glu_interleave_size or h.shape[-1] // 2 or 1
        a, b = rearrange(wide, "... (blocks two size) -> two ... (blocks size)", two=2, size=size)
        alpha, offset = 1.0, 0.0
        if spec.kind == "clamped_swiglu":
            a, b = a.clamp(max=spec.limit), b.clamp(-spec.limit, spec.limit)
            alpha, offset = spec.alpha, spec.glu_linear_offset
        act = a * torch.sigmoid(alpha * a) * (b + offset)
    return (act if scales is None else act * scales[..., None]).to(h.dtype)


def activation(h: Tensor, spec: Activation, scales: Tensor | None = None) -> Tensor:
    """act = f(h) * scales, rounded once.

    h: [..., 2I], or [..., I] for srelu, any floating dtype. scales: h.shape[:-1], any floating dtype (1 if None).

    Returns act [..., I] in h's dtype. Raises ValueError if h's features do not divide into gate and linear
    part, or scales has another shape.
    """
    _check(h, spec, scales)
    act = _FORWARD[spec.kind](h.to(_compute_dtype(h)), spec)
    if scales is not None:
        act *= scales.unsqueeze(-1)
    return act.to(h.dtype)


def dactivation(
    dact: Tensor,
    h: Tensor,
    spec: Activation,
    scales: Tensor | None = None,
    *,
    need_dh: bool = True,
    need_dscales: bool = False,
    need_act: bool = False,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `activation`, and its result again for those who kept h alone.

    dact: [..., I], any floating dtype; h and scales as `activation` had them.

    Returns (dh, dscales, act); what is not needed is None. dh [..., 2I] and act [..., I] have h's dtype, dscales
    h.shape[:-1] that of scales. need_dscales needs scales.
    """
    dtype = _compute_dtype(h)
    wide = h.to(dtype)
    dh = None
    if need_dh:
        # Into a tensor of h's dtype, each half by itself: no second copy of it in float32.
        dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
        dvalue = dact.to(dtype) if scales is None else torch.mul(dact.to(dtype), scales.unsqueeze(-1)).to(dtype)
        value = _BACKWARD[spec.kind](dvalue, wide, dh, spec)
    elif need_dscales or need_act:
        value = _FORWARD[spec.kind](wide, spec)
    else:
        return None, None, None
    dscales = act = None
    if need_dscales:
        assert scales is not None, "there is no gradient of scales without scales"
        dscales = torch.mul(dact, value).sum(-1, dtype=dtype).to(scales.dtype)
    if need_act:
        act = (value if scales is None else value.mul_(scales.unsqueeze(-1))).to(h.dtype)
    return dh, dscales, act


def _compute_dtype(h: Tensor) -> torch.dtype:
    return torch.float64 if h.dtype == torch.float64 else torch.float32


def _gate_and_linear(h: Tensor, spec: Activation) -> tuple[Tensor, Tensor]:
    """Views of both, [..., I], or [..., I / S, S] if they are interleaved."""
    size = spec.glu_interleave_size
    return h.chunk(2, -1) if size is None else h.unflatten(-1, (-1, 2, size)).unbind(-2)  # type: ignore[return-value]


# What follows takes h in the dtype to compute in and returns a new tensor f(h) [..., I]. A backward also writes dh,
# whose dtype is that of the result, and gets dvalue [..., I], the gradient of f(h).


def _swiglu(h: Tensor, spec: Activation) -> Tensor:
    a, b = _gate_and_linear(h, spec)
    value = F.silu(a).mul_(b)
    return value if spec.glu_interleave_size is None else value.flatten(-2)


def _dswiglu(dvalue: Tensor, h: Tensor, dh: Tensor, spec: Activation) -> Tensor:
    a, b = _gate_and_linear(h, spec)
    da, db = _gate_and_linear(dh, spec)
    if spec.glu_interleave_size is not None:
        dvalue = dvalue.unflatten(-1, (-1, spec.glu_interleave_size))
    value = F.silu(a)
    if dh.dtype == h.dtype:
        torch.mul(dvalue, value, out=db)
        silu_backward(dvalue * b, a, grad_input=da)
    else:
        # First into the dtype it is computed in: on CUDA torch computes silu_backward in that of its result.
        product = dvalue * value
        db.copy_(product)
        da.copy_(silu_backward(torch.mul(dvalue, b, out=product), a, grad_input=product))
    value *= b
    return value if spec.glu_interleave_size is None else value.flatten(-2)


def _clamped_swiglu(h: Tensor, spec: Activation) -> Tensor:
    a, b = _gate_and_linear(h, spec)
    a = a.clamp(max=spec.limit)
    value = torch.sigmoid(spec.alpha * a).mul_(a).mul_(b.clamp(-spec.limit, spec.limit).add_(spec.glu_linear_offset))
    return value if spec.glu_interleave_size is None else value.flatten(-2)


def _dclamped_swiglu(dvalue: Tensor, h: Tensor, dh: Tensor, spec: Activation) -> Tensor:
    a, b = _gate_and_linear(h, spec)
    da, db = _gate_and_linear(dh, spec)
    if spec.glu_interleave_size is not None:
        dvalue = dvalue.unflatten(-1, (-1, spec.glu_interleave_size))
    outside_a, outside_b = a > spec.limit, b.abs() > spec.limit
    a = a.clamp(max=spec.limit)
    b = b.clamp(-spec.limit, spec.limit).add_(spec.glu_linear_offset)
    value = torch.sigmoid(spec.alpha * a).mul_(a)
    db.copy_((dvalue * value).masked_fill_(outside_b, 0))
    # The derivative of a sigmoid(alpha a) is that of silu at alpha a, whatever alpha is.
    da.copy_(torch.ops.aten.silu_backward(dvalue * b, spec.alpha * a).masked_fill_(outside_a, 0))
    value *= b
    return value if spec.glu_interleave_size is None else value.flatten(-2)


def _srelu(h: Tensor, spec: Activation) -> Tensor:
    return h.relu().square_()


def _dsrelu(dvalue: Tensor, h: Tensor, dh: Tensor, spec: Activation) -> Tensor:
    positive = h.relu()
    dh.copy_((dvalue * positive).mul_(2))
    return positive.square_()


_FORWARD: dict[str, Callable[[Tensor, Activation], Tensor]] = {
    "swiglu": _swiglu,
    "clamped_swiglu": _clamped_swiglu,
    "srelu": _srelu,
}
_BACKWARD: dict[str, Callable[[Tensor, Tensor, Tensor, Activation], Tensor]] = {
    "swiglu": _dswiglu,
    "clamped_swiglu": _dclamped_swiglu,
    "srelu": _dsrelu,
}


def _check(h: Tensor, spec: Activation, scales: Tensor | None) -> None:
    if spec.gated and h.shape[-1] % (2 * (spec.glu_interleave_size or 1)):
        size = spec.glu_interleave_size
        raise ValueError(
            f"x has {h.shape[-1]} features, but {'2' if size is None else f'2 * glu_interleave_size = {2 * size}'} "
            "must divide them. Gate and linear part stand side by side: make twice the features that come out."
        )
    if scales is not None and scales.shape != h.shape[:-1]:
        raise ValueError(
            f"scales has shape {list(scales.shape)}, but x has shape {list(h.shape)}. "
            f"Give one scale a row: {list(h.shape[:-1])}."
        )
