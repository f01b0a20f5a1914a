"""One rule for each activation: its formula, its CPU implementation, and the Triton functions that kernels inline.

    reference(*inputs, *constants) -> y                           by the formula, differentiable by autograd
    forward(*inputs, constants) -> y                              plain torch, a new tensor
    backward(dvalue, *inputs, *d_inputs, constants) -> y          recomputes y; writes d_inputs
    triton_forward(*inputs, A, B, C) -> y                         tiles of a kernel
    triton_backward(dy, *inputs, A, B, C) -> d_inputs             dx without a gate, else (da, db)

inputs are x without a gate, else gate a and linear part b. `ops.kernels.elementwise.activation` has the formulas. A new
activation is a rule here and a class in `ops/activations.py`.

In plain torch, inputs have the dtype in which y is computed and any strides, and are not modified; d_inputs have the
result's dtype. Backward computes y with the same calls and strides as forward, so both have the same bits. An element
of y depends on its inputs alone, not on where it lies: of torch's functions for a CPU that is so of exp and tanh, but
not of sigmoid, silu and gelu, which compute in another way what does not fill a vector register.

Tiles are float32, of one shape. Precision: float32, with errors of a few units in the last place of each factor of the
result. Each sigmoid or tanh takes one exponential, shared by value and derivative. A sigmoid is never below 2^-126,
even where it should be 0. Inputs up to 1e12 never give NaN. NaN stays NaN, also through a clamp, which therefore does
not use `tl.minimum` or `tl.maximum`: they drop NaN.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import graph

from recipes.triton.gates import JITFunction, tl, triton
from recipes.triton.rounding import INTERPRET

Constants = tuple[float, float, float]

# 2 sqrt(2 / pi), and 0.044715 times that
GELU_LINEAR = tl.constexpr(1.5957691216057308)
GELU_CUBIC = tl.constexpr(0.07135481282553024)
# The x at which the exponent in gelu's tanh form reaches LARGEST_EXPONENT; below it, |gelu| and |gelu'| are < 1e-36.
GELU_LIMIT = tl.constexpr(-9.98)
LOG2_E = tl.constexpr(1.4426950408889634)
LARGEST_EXPONENT = tl.constexpr(125.5)  # binary, of an exponential e in float32, with headroom for 1 + e
QGELU_ALPHA = tl.constexpr(1.702)


# Parts


@triton.jit
def clamp(x, LOW: tl.constexpr, HIGH: tl.constexpr):
    """x within LOW and HIGH; NaN stays NaN."""
    return tl.where(x < LOW, LOW, tl.where(x > HIGH, HIGH, x))


@triton.jit
def reciprocal(x):
    """1 / x to a unit in the last place, for x from 1 to 2^126: one instruction, and a division takes eight."""
    if INTERPRET:
        return 1 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def sides(t):
    """1 / (1 + 2^t) and 2^t / (1 + 2^t) for t up to LARGEST_EXPONENT, both to a few units in the last place, from one
    exponential."""
    e = tl.exp2(t)
    first = reciprocal(1 + e)
    return first, e * first


@triton.jit
def sigmoids(x):
    """sigmoid(x) and sigmoid(-x) = 1 - sigmoid(x)."""
    t = x * -LOG2_E
    return sides(tl.where(t > LARGEST_EXPONENT, LARGEST_EXPONENT, t))


@triton.jit
def tanh_and_slope(x):
    """tanh(x) and its derivative 1 - tanh(x)^2, both to a few units in the last place, from one exponential."""
    e = tl.exp(-2 * tl.abs(x))
    inverse = reciprocal(1 + e)
    far = (1 - e) * inverse
    far = tl.where(x < 0, -far, far)
    # Near 0, where 1 - e cancels: x + x z P(z), z = x^2; P fitted to tanh for the least relative error, 2^-28.
    is_near = tl.abs(x) < 0.6
    x = tl.where(is_near, x, 0.0)
    z = x * x
    p = -0.005895080412729041 * z + 0.02079591000884881
    p = p * z - 0.05378381355917112
    p = p * z + 0.13331923949818475
    p = p * z - 0.33333297996353256
    return tl.where(is_near, x + x * (z * p), far), 4 * e * inverse * inverse


@triton.jit
def soft_bound(x, BETA: tl.constexpr):
    """BETA tanh(x / BETA) and its derivative."""
    tanh, slope = tanh_and_slope(x * (1 / BETA))
    return BETA * tanh, slope


@triton.jit
def swish(x, ALPHA: tl.constexpr):
    """x sigmoid(ALPHA x) and its derivative."""
    scaled = ALPHA * x
    up, down = sigmoids(scaled)
    return x * up, up * tl.fma(scaled, down, 1.0)


@triton.jit
def gelu_and_slope(x):
    """gelu(x) and its derivative."""
    near = tl.where(x < GELU_LIMIT, GELU_LIMIT, x)
    square = near * near
    up, down = sides(near * tl.fma(square, -GELU_CUBIC * LOG2_E, -GELU_LINEAR * LOG2_E))
    return x * up, up * tl.fma(near * tl.fma(square, 3 * GELU_CUBIC, GELU_LINEAR), down, 1.0)


# Without a gate


@triton.jit
def gelu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return gelu_and_slope(x)[0]


@triton.jit
def dgelu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * gelu_and_slope(x)[1]


@triton.jit
def qgelu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return swish(x, QGELU_ALPHA)[0]


@triton.jit
def dqgelu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * swish(x, QGELU_ALPHA)[1]


@triton.jit
def relu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return tl.where(x < 0, 0.0, x)


@triton.jit
def drelu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return tl.where(x <= 0, 0.0, dy)


@triton.jit
def silu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return swish(x, 1.0)[0]


@triton.jit
def dsilu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * swish(x, 1.0)[1]


@triton.jit
def srelu(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    positive = relu(x, A, B, C)
    return positive * positive


@triton.jit
def dsrelu(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return tl.where(x <= 0, 0.0, 2 * (dy * x))


# Gated


@triton.jit
def geglu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return gelu(a, A, B, C) * b


@triton.jit
def dgeglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    value, slope = gelu_and_slope(a)
    return dy * b * slope, dy * value


@triton.jit
def glu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return sigmoids(a)[0] * b


@triton.jit
def dglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    up, down = sigmoids(a)
    return dy * b * (up * down), dy * up


@triton.jit
def qgeglu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return qgelu(a, A, B, C) * b


@triton.jit
def dqgeglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    value, slope = swish(a, QGELU_ALPHA)
    return dy * b * slope, dy * value


@triton.jit
def reglu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return relu(a, A, B, C) * b


@triton.jit
def dreglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return drelu(dy * b, a, A, B, C), dy * relu(a, A, B, C)


@triton.jit
def sreglu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return srelu(a, A, B, C) * b


@triton.jit
def dsreglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dsrelu(dy * b, a, A, B, C), dy * srelu(a, A, B, C)


@triton.jit
def swiglu(a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return silu(a, A, B, C) * b


@triton.jit
def dswiglu(dy, a, b, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    value, slope = swish(a, 1.0)
    return dy * b * slope, dy * value


@triton.jit
def clamped_swiglu(a, b, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr):
    return swish(tl.where(a > LIMIT, LIMIT, a), ALPHA)[0] * (clamp(b, -LIMIT, LIMIT) + OFFSET)


@triton.jit
def dclamped_swiglu(dy, a, b, LIMIT: tl.constexpr, ALPHA: tl.constexpr, OFFSET: tl.constexpr):
    value, slope = swish(tl.where(a > LIMIT, LIMIT, a), ALPHA)
    da = dy * (clamp(b, -LIMIT, LIMIT) + OFFSET) * slope
    return tl.where(a > LIMIT, 0.0, da), tl.where(tl.abs(b) > LIMIT, 0.0, dy * value)


@triton.jit
def situglu(a, b, BETA1: tl.constexpr, BETA2: tl.constexpr, C: tl.constexpr):
    return soft_bound(a, BETA1)[0] * sigmoids(a)[0] * soft_bound(b, BETA2)[0]


@triton.jit
def dsituglu(dy, a, b, BETA1: tl.constexpr, BETA2: tl.constexpr, C: tl.constexpr):
    soft_a, slope_a = soft_bound(a, BETA1)
    soft_b, slope_b = soft_bound(b, BETA2)
    up, down = sigmoids(a)
    return dy * soft_b * (up * (slope_a + soft_a * down)), dy * (soft_a * up) * slope_b


# ------------------------------------------------------------------------------------------------ in plain torch


def _writing(gradient: Any) -> Callable[..., Tensor]:
    """An operator of aten that gives dx, as a function that writes it into `out`.

    Within torch.autograd.graph.allow_mutation_on_saved_tensors dx is copied there: that finds what an operator writes
    by the name `out`, and the name of these is `grad_input`.
    """

    def write(*args: Any, out: Tensor, **settings: Any) -> Tensor:
        if not graph._allow_mutation_on_saved_tensors_enabled:
            written: Tensor = gradient.grad_input(*args, grad_input=out, **settings)
            return written
        return out.copy_(gradient(*args, **settings))

    return write


_gelu_backward = _writing(torch.ops.aten.gelu_backward)
_relu_backward = _writing(torch.ops.aten.threshold_backward)
_sigmoid_backward = _writing(torch.ops.aten.sigmoid_backward)
_silu_backward = _writing(torch.ops.aten.silu_backward)


class _Function(NamedTuple):
    """A function g of one variable.

    reference(x): g(x) by its formula, differentiable by autograd
    value(x):     g(x), a new tensor
    gradient(dy, x, value, out): dy g'(x), written into out, which may be dy, and returned

    All tensors have one dtype, because on CUDA torch computes some of these functions in the dtype of the result.
    """

    reference: Callable[[Tensor], Tensor]
    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + exp(-x)) in plain torch."""
    return _one_plus_exp(-x).reciprocal_()


def _one_plus_exp(x: Tensor) -> Tensor:
    """1 + exp(x), in the memory of x."""
    return x.exp_().add_(1)


_GELU = _Function(
    lambda x: x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))) / 2,
    # 1 + tanh(u) = 2 sigmoid(2 u)
    lambda x: x / _one_plus_exp((x * x).mul_(0.044715).add_(1).mul_(x).mul_(-2 * math.sqrt(2 / math.pi))),
    lambda dy, x, value, out: _gelu_backward(dy, x, approximate="tanh", out=out),
)
# x sigmoid(c x) = silu(c x) / c, so its derivative is that of silu at c x.
_QGELU = _Function(
    lambda x: x * torch.sigmoid(1.702 * x),
    lambda x: x / _one_plus_exp(-1.702 * x),
    lambda dy, x, value, out: _silu_backward(dy, 1.702 * x, out=out),
)
_RELU = _Function(torch.relu, F.relu, lambda dy, x, value, out: _relu_backward(dy, x, 0, out=out))
_SIGMOID = _Function(torch.sigmoid, sigmoid, lambda dy, x, value, out: _sigmoid_backward(dy, value, out=out))
_SILU = _Function(
    lambda x: x * torch.sigmoid(x),
    lambda x: x / _one_plus_exp(-x),
    lambda dy, x, value, out: _silu_backward(dy, x, out=out),
)
_SRELU = _Function(
    lambda x: x.relu().square(),
    lambda x: x.relu().square_(),
    lambda dy, x, value, out: torch.mul(dy, x.relu(), out=out).mul_(2),
)


def _ungated(g: _Function, x: Tensor, constants: Constants) -> Tensor:
    return g.value(x)


def _dungated(g: _Function, dvalue: Tensor, x: Tensor, dx: Tensor, constants: Constants) -> Tensor:
    value = g.value(x)
    if dx.dtype == x.dtype:
        g.gradient(dvalue, x, value, dx)
    else:
        dx.copy_(g.gradient(dvalue, x, value, torch.empty_like(dvalue)))
    return value


def _gated(g: _Function, a: Tensor, b: Tensor, constants: Constants) -> Tensor:
    return g.value(a).mul_(b)


def _dgated(g: _Function, dvalue: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, constants: Constants) -> Tensor:
    value = g.value(a)
    if db.dtype == b.dtype:
        torch.mul(dvalue, value, out=db)
        g.gradient(dvalue * b, a, value, da)
    else:
        product = dvalue * value
        db.copy_(product)
        da.copy_(g.gradient(torch.mul(dvalue, b, out=product), a, value, product))
    return value.mul_(b)


def _clamped_swiglu_ref(a: Tensor, b: Tensor, limit: float, alpha: float, offset: float) -> Tensor:
    # not by torch.clamp, through which at a limit no gradient passes since torch 2.14
    a = torch.where(a > limit, limit, a)
    b = torch.where(b > limit, limit, torch.where(b < -limit, -limit, b))
    return a * torch.sigmoid(alpha * a) * (b + offset)


def _clamped_swiglu(a: Tensor, b: Tensor, constants: Constants) -> Tensor:
    limit, alpha, offset = constants
    a = a.clamp(max=limit)
    return sigmoid(alpha * a).mul_(a).mul_(b.clamp(-limit, limit).add_(offset))


def _dclamped_swiglu(dvalue: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, constants: Constants) -> Tensor:
    limit, alpha, offset = constants
    outside_a, outside_b = a > limit, b.abs() > limit
    a = a.clamp(max=limit)
    b = b.clamp(-limit, limit).add_(offset)
    value = sigmoid(alpha * a).mul_(a)
    db.copy_((dvalue * value).masked_fill_(outside_b, 0))
    # The derivative of a sigmoid(alpha a) is silu'(alpha a), for any alpha.
    da.copy_(torch.ops.aten.silu_backward(dvalue * b, alpha * a).masked_fill_(outside_a, 0))
    return value.mul_(b)


def _situglu_ref(a: Tensor, b: Tensor, beta1: float, beta2: float, _: float) -> Tensor:
    return beta1 * torch.tanh(a / beta1) * torch.sigmoid(a) * (beta2 * torch.tanh(b / beta2))


def _situglu(a: Tensor, b: Tensor, constants: Constants) -> Tensor:
    beta1, beta2, _ = constants
    gate = (a / beta1).tanh_().mul_(beta1).mul_(sigmoid(a))
    return gate.mul_((b / beta2).tanh_().mul_(beta2))


def _dsituglu(dvalue: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, constants: Constants) -> Tensor:
    beta1, beta2, _ = constants
    tanh_a, up, tanh_b = (a / beta1).tanh_(), sigmoid(a), (b / beta2).tanh_()
    soft_a, soft_b = tanh_a * beta1, tanh_b * beta2
    gate = soft_a * up
    db.copy_((1 - tanh_b.square_()).mul_(gate).mul_(dvalue))
    # (beta tanh(a / beta))' = 1 - tanh^2, and sigmoid' = sigmoid (1 - sigmoid)
    slope = (1 - tanh_a.square_()).add_(soft_a.mul_(1 - up)).mul_(up)
    da.copy_(slope.mul_(soft_b).mul_(dvalue))
    return gate.mul_(soft_b)


class ActivationRule(NamedTuple):
    """One activation, see the top of this file. constants: the fields of `Activation` passed as A, B and C."""

    gated: bool
    reference: Callable[..., Tensor]
    forward: Callable[..., Tensor]
    backward: Callable[..., Tensor]
    triton_forward: JITFunction
    triton_backward: JITFunction
    constants: tuple[str, ...] = ()


def _of_one(g: _Function, forward: JITFunction, backward: JITFunction) -> ActivationRule:
    """y = g(x)."""
    return ActivationRule(
        False, lambda x, *_: g.reference(x), partial(_ungated, g), partial(_dungated, g), forward, backward
    )


def _of_gate(g: _Function, forward: JITFunction, backward: JITFunction) -> ActivationRule:
    """y = g(a) b."""
    return ActivationRule(
        True, lambda a, b, *_: g.reference(a) * b, partial(_gated, g), partial(_dgated, g), forward, backward
    )


RULES: dict[str, ActivationRule] = {
    "gelu": _of_one(_GELU, gelu, dgelu),
    "qgelu": _of_one(_QGELU, qgelu, dqgelu),
    "relu": _of_one(_RELU, relu, drelu),
    "silu": _of_one(_SILU, silu, dsilu),
    "srelu": _of_one(_SRELU, srelu, dsrelu),
    "geglu": _of_gate(_GELU, geglu, dgeglu),
    "glu": _of_gate(_SIGMOID, glu, dglu),
    "qgeglu": _of_gate(_QGELU, qgeglu, dqgeglu),
    "reglu": _of_gate(_RELU, reglu, dreglu),
    "sreglu": _of_gate(_SRELU, sreglu, dsreglu),
    "swiglu": _of_gate(_SILU, swiglu, dswiglu),
    "clamped_swiglu": ActivationRule(
        True, _clamped_swiglu_ref, _clamped_swiglu, _dclamped_swiglu, clamped_swiglu, dclamped_swiglu,
        ("limit", "alpha", "glu_linear_offset"),
    ),
    "situglu": ActivationRule(True, _situglu_ref, _situglu, _dsituglu, situglu, dsituglu, ("beta1", "beta2")),
}  # fmt: skip
