"""The activations of a feed-forward layer, gated or not, each with an optional factor for each row.

    gelu             f(x)    = x sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)) = x (1 + tanh(...)) / 2, the tanh form
    qgelu            f(x)    = x sigmoid(1.702 x)
    relu             f(x)    = max(x, 0)
    silu             f(x)    = x sigmoid(x)
    srelu            f(x)    = relu(x)^2

    geglu            f(a, b) = gelu(a) b
    glu              f(a, b) = sigmoid(a) b
    qgeglu           f(a, b) = qgelu(a) b
    reglu            f(a, b) = relu(a) b
    sreglu           f(a, b) = srelu(a) b
    swiglu           f(a, b) = silu(a) b
    clamped_swiglu   f(a, b) = a' sigmoid(alpha a') (b' + offset)      a' = min(a, limit), b' = clamp(b, -limit, limit)
    situglu          f(a, b) = beta1 tanh(a / beta1) sigmoid(a) beta2 tanh(b / beta2)

    act = f(h) * scales              dscales[t] = sum_j dact[t, j] f(h)[t, j]

Layouts: h [..., 2I] holds gate a and linear part b as halves [a | b], or, with `glu_interleave_size` = S, as
alternating runs of S columns, gate first; act is [..., I]. The first five are not gated: h is [..., I].

    I = 4, S = 2:   columns of h   a0 a1 b0 b1 a2 a3 b2 b3

scales has shape h.shape[:-1]. A clamp's gradient passes within and at its limits, and is zero outside, as torch.clamp's
up to torch 2.13; since 2.14 that is zero at them too. relu's gradient at 0 is 0.

Precision: computed in float32 (float64 for float64), with one rounding to h's dtype at the end. scales may have any
floating dtype; dscales has the same. The activation that `dactivation` recomputes is bit for bit that of
`activation`.

Graph safety: no host synchronization. On CUDA a step of the element-wise kernels; on the CPU, and in float64, plain
torch (both in `activation_functions.py`).

Source of the formulas: TransformerEngine's activations (its clamped_swiglu is GPT-OSS's); for srelu, So et al.,
"Primer", 2021; for the gated ones, Shazeer, "GLU Variants Improve Transformer", 2020.
"""
# I features of the activation, S interleave size

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from einops import rearrange
from torch import Tensor

from ops.kernels.elementwise.activation_cast import cast_of, launch_activation_cast
from ops.kernels.elementwise.activation_functions import RULES, Constants
from ops.kernels.elementwise.chain import Step, delementwise, elementwise, elementwise_cast, runs_triton
from ops.kernels.elementwise.chain_cast import Cast, cast_from_memory, cast_into, stores_values
from ops.kernels.elementwise.dactivation_cast import casts_of, dactivation_cast
from recipes.arguments import as_integer, as_number, check_factors
from recipes.tensors.quantizer import QuantizedBuffers
from recipes.triton.launch import replayed
from recipes.triton.meeting import MeetingTile

KINDS = tuple(RULES)


@dataclass(frozen=True)
class Activation:
    """The kind of an activation and its constants. Equal by value.

    limit, alpha, glu_linear_offset: of clamped_swiglu; other kinds ignore them
    beta1, beta2: of situglu; other kinds ignore them
    glu_interleave_size: S, or None for halves; activations without a gate ignore it

    Raises TypeError for a constant that is not a number; ValueError for an unknown kind, a limit or a beta that is not
    finite and above 0, an alpha or an offset that is not finite, and an interleave size that is not positive.
    """

    kind: str
    limit: float = 7.0
    alpha: float = 1.702
    glu_linear_offset: float = 1.0
    beta1: float = 4.0
    beta2: float = 25.0
    glu_interleave_size: int | None = None

    def __post_init__(self) -> None:
        if self.kind not in RULES:
            raise ValueError(f"kind is {self.kind!r}, but must be one of {', '.join(RULES)}.")
        for name in ("limit", "beta1", "beta2"):
            value = getattr(self, name)
            if not 0 < self._set_number(name, value) < math.inf:
                raise ValueError(f"{name} is {value}, but must be finite and above 0. SwiGLU has no such bound.")
        for name in ("alpha", "glu_linear_offset"):
            value = getattr(self, name)
            if not math.isfinite(self._set_number(name, value)):
                raise ValueError(f"{name} is {value}, but must be finite.")
        if self.glu_interleave_size is not None:
            size = as_integer("glu_interleave_size", self.glu_interleave_size)
            if size <= 0:
                raise ValueError(
                    f"glu_interleave_size is {size}, but must be positive. Give None for halves [gate | up]."
                )
            object.__setattr__(self, "glu_interleave_size", size)

    def _set_number(self, name: str, value: object) -> float:
        number = as_number(name, value)
        object.__setattr__(self, name, number)
        return number

    @property
    def gated(self) -> bool:
        return RULES[self.kind].gated


def constants(spec: Activation) -> Constants:
    """The constants A, B and C of its rule, padded with 0."""
    a, b, c, *_ = *(getattr(spec, name) for name in RULES[spec.kind].constants), 0.0, 0.0, 0.0
    return a, b, c


@cache
def activation_step(spec: Activation, scaled: bool) -> Step:
    """The activation as a step of the element-wise kernels, with a factor for each row if `scaled`."""
    rule = RULES[spec.kind]
    return Step(
        rule.triton_forward,
        rule.triton_backward,
        lambda x, *_: activation_ref(x, spec),
        "row" if scaled else "",
        constants=constants(spec),
        gated=spec.gated,
        interleave=(spec.gated and spec.glu_interleave_size) or 0,
    )


def activation_ref(h: Tensor, spec: Activation, scales: Tensor | None = None) -> Tensor:
    """`activation` in plain torch and einops, differentiable by autograd."""
    wide = h.to(torch.promote_types(h.dtype, torch.float32))
    if spec.gated:
        size = spec.glu_interleave_size or h.shape[-1] // 2 or 1
        inputs = rearrange(wide, "... (blocks two size) -> two ... (blocks size)", two=2, size=size)
    else:
        inputs = wide[None]
    act = RULES[spec.kind].reference(*inputs, *constants(spec))
    return (act if scales is None else act * scales[..., None]).to(h.dtype)


def activation(h: Tensor, spec: Activation, scales: Tensor | None = None) -> Tensor:
    """act = f(h) * scales, rounded once.

    h: [..., 2I], or [..., I] without a gate, any floating dtype. scales: h.shape[:-1], any floating dtype (1 if None).

    Returns act [..., I] in h's dtype. Raises ValueError if h's features do not divide into gate and linear
    part, or scales has another shape.
    """
    if runs_triton(h, scales):
        return _activation_on_triton(h, spec, scales)
    check_activation(h.shape, spec, scales)
    act = _value(h.to(_compute_dtype(h)), spec)
    if scales is not None:
        act *= scales.unsqueeze(-1)
    return act.to(h.dtype)


@replayed
def _activation_on_triton(h: Tensor, spec: Activation, scales: Tensor | None) -> Tensor:
    check_activation(h.shape, spec, scales)
    return elementwise(h, (activation_step(spec, scales is not None),), (scales,))


def activation_cast(h: Tensor, spec: Activation, scales: Tensor | None, into: QuantizedBuffers) -> None:
    """`activation`, bit for bit quantized into these buffers. Only for non-empty CUDA tensors."""
    check_activation(h.shape, spec, scales)
    shape, step = activation_shape(h.shape, spec), activation_step(spec, scales is not None)
    in_gluon = cast_of(h, step, into)
    if in_gluon is not None:
        _activation_in_gluon(h, spec, scales, in_gluon)
        return
    cast = cast_into(into, h, shape[-1], _meeting_tile(spec, backward=False))
    act = h.new_empty(shape) if stores_values(cast, h.shape[0]) else None
    elementwise_cast(h, cast, (step,), (scales,), out=act)
    if act is not None:
        cast_from_memory(act, into, cast)


def dactivation(
    dact: Tensor,
    h: Tensor,
    spec: Activation,
    scales: Tensor | None = None,
    *,
    need_dh: bool = True,
    need_dscales: bool = False,
    need_act: bool = False,
    dh_into: QuantizedBuffers | None = None,
    act_into: QuantizedBuffers | None = None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of `activation`, and its recomputed result for callers that saved only h.

    dact: [..., I], any floating dtype; h and scales as passed to `activation`. dh_into, act_into: quantize dh and act
    into these, bit for bit, whether they are needed otherwise or not; for non-empty CUDA tensors in groups of rows.

    Returns (dh, dscales, act), with None for what is not needed. dh [..., 2I] and act [..., I] have h's dtype; dscales
    has the shape h.shape[:-1] and the dtype of scales. need_dscales requires scales.
    """
    if runs_triton(dact, h, scales):
        if not (need_dh or need_dscales or need_act or dh_into or act_into):
            return None, None, None
        taken = None
        if not need_act:
            taken = casts_of(dact, h, activation_step(spec, scales is not None), dh_into, act_into)
        if taken is not None:
            return *_dactivation_in_gluon(dact, h, spec, scales, need_dh, need_dscales, *taken), None
        tiles = _meeting_tile(spec, backward=True), None  # of act: the kernel casts it last, and at no meeting
        casts = [
            i if i is None else cast_into(i, h, dact.shape[-1], tile)
            for i, tile in zip((dh_into, act_into), tiles, strict=True)
        ]
        stored = [stores_values(cast, h.shape[0]) for cast in casts]
        dh, dscales, act = _dactivation_on_triton(
            dact, h, spec, scales, need_dh or stored[0], need_dh, need_dscales, need_act or stored[1], *casts
        )
        for x, into, cast, is_stored in zip((dh, act), (dh_into, act_into), casts, stored, strict=True):
            if is_stored and x is not None and into is not None and cast is not None:
                cast_from_memory(x, into, cast)
        return dh if need_dh else None, dscales, act if need_act else None
    dtype = _compute_dtype(h)
    wide = h.to(dtype)
    dh = None
    if need_dh:
        # Each half is written directly into a tensor of h's dtype, without a full copy in float32.
        dh = torch.empty(h.shape, dtype=h.dtype, device=h.device)
        dvalue = dact.to(dtype) if scales is None else torch.mul(dact.to(dtype), scales.unsqueeze(-1)).to(dtype)
        value = _value_and_dh(dvalue, wide, dh, spec)
    elif need_dscales or need_act:
        value = _value(wide, spec)
    else:
        return None, None, None
    dscales = act = None
    if need_dscales:
        assert scales is not None, "there is no gradient of scales without scales"
        dscales = torch.mul(dact, value).sum(-1, dtype=dtype).to(scales.dtype)
    if need_act:
        act = (value if scales is None else value.mul_(scales.unsqueeze(-1))).to(h.dtype)
    return dh, dscales, act


# Registers of programs that wait, of the grouped MLP's activations for which that was faster than to store values, on
# an H100, with halves. Few of them let many programs wait at once; backward spills up to 92 bytes for it (sm_90a).
_FORWARD = {"swiglu": 56, "situglu": 56, "srelu": 56}
_BACKWARD = {"swiglu": 80, "situglu": 96}


def _meeting_tile(spec: Activation, *, backward: bool) -> MeetingTile | None:
    """The tile with which groups meet, or None."""
    registers = (_BACKWARD if backward else _FORWARD).get(spec.kind)
    if registers is None or (spec.gated and spec.glu_interleave_size is not None):
        return None
    return MeetingTile(32, 64 if backward else 128, 4, registers)


@replayed
def _dactivation_on_triton(
    dact: Tensor,
    h: Tensor,
    spec: Activation,
    scales: Tensor | None,
    need_dh: bool,
    keep_dh: bool,
    need_dscales: bool,
    need_act: bool,
    cast: Cast | None,
    act_cast: Cast | None,
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    found = delementwise(
        dact, h, (activation_step(spec, scales is not None),), (scales,), (h.dtype,),
        need_dx=need_dh, need_operands=(need_dscales,), need_y=need_act, cast=cast, y_cast=act_cast,
        keep_dx=keep_dh,
    )  # fmt: skip
    d_row = found.operands[0]
    return found.dx, None if d_row is None or scales is None else d_row.to(scales.dtype), found.y


@replayed
def _activation_in_gluon(h: Tensor, spec: Activation, scales: Tensor | None, cast: Cast) -> None:
    launch_activation_cast(h, activation_step(spec, scales is not None), scales, cast)


@replayed
def _dactivation_in_gluon(
    dact: Tensor,
    h: Tensor,
    spec: Activation,
    scales: Tensor | None,
    need_dh: bool,
    need_dscales: bool,
    cast: Cast,
    act_cast: Cast | None,
) -> tuple[Tensor | None, Tensor | None]:
    step = activation_step(spec, scales is not None)
    dh, dscales = dactivation_cast(
        dact, h, step, scales, cast, act_cast, need_dh=need_dh, need_dscales=need_dscales
    )  # fmt: skip
    return dh, dscales if dscales is None or scales is None else dscales.to(scales.dtype)


def _compute_dtype(h: Tensor) -> torch.dtype:
    return torch.float64 if h.dtype == torch.float64 else torch.float32


def _value(h: Tensor, spec: Activation) -> Tensor:
    """f(h) [..., I], a new tensor; h has the dtype in which f is computed."""
    return _joined(RULES[spec.kind].forward(*_inputs(h, spec), constants(spec)), spec)


def _value_and_dh(dvalue: Tensor, h: Tensor, dh: Tensor, spec: Activation) -> Tensor:
    """f(h) [..., I]; also writes dh, in the dtype of the result, from dvalue [..., I], the gradient of f(h)."""
    if spec.gated and spec.glu_interleave_size is not None:
        dvalue = dvalue.unflatten(-1, (-1, spec.glu_interleave_size))
    return _joined(RULES[spec.kind].backward(dvalue, *_inputs(h, spec), *_inputs(dh, spec), constants(spec)), spec)


def _inputs(h: Tensor, spec: Activation) -> tuple[Tensor, ...]:
    """(h,), or views of its gate and linear part: [..., I], or [..., I / S, S] if interleaved."""
    if not spec.gated:
        return (h,)
    size = spec.glu_interleave_size
    return h.chunk(2, -1) if size is None else h.unflatten(-1, (-1, 2, size)).unbind(-2)


def _joined(value: Tensor, spec: Activation) -> Tensor:
    """[..., I / S, S] as [..., I]."""
    return value.flatten(-2) if spec.gated and spec.glu_interleave_size is not None else value


def activation_shape(shape: torch.Size, spec: Activation) -> torch.Size:
    """That of act, of an h of this shape."""
    return torch.Size((*shape[:-1], shape[-1] // 2)) if spec.gated else shape


def check_activation(shape: Sequence[int], spec: Activation, scales: Tensor | None) -> None:
    """Raise ValueError if an h of this shape does not divide into gate and linear part, or scales do not match it,
    TypeError for scales that are no `recipes.arguments.NUMBERS`."""
    if spec.gated and (not shape or shape[-1] % (2 * (spec.glu_interleave_size or 1))):
        size = spec.glu_interleave_size
        raise ValueError(
            f"x has {shape[-1] if shape else 1} features, but "
            f"{'2' if size is None else f'2 * glu_interleave_size = {2 * size}'} "
            "must divide them. Gate and linear part stand side by side: make twice the features that come out."
        )
    if scales is not None and scales.shape != shape[:-1]:
        raise ValueError(
            f"scales has shape {list(scales.shape)}, but x has shape {list(shape)}. "
            f"Give one scale a row: {list(shape[:-1])}."
        )
    if scales is not None:
        check_factors("scales", scales.dtype)
