"""The activations in plain torch, without layout, scales and rounding: f of x, or of gate a and linear part b.

    FORWARD[kind](*inputs, constants)                             f, a new tensor
    BACKWARD[kind](dvalue, *inputs, *d_inputs, constants)         f again, a new tensor; writes d_inputs

Inputs have the dtype to compute in and any strides, and stay as they are. dvalue is the gradient of f, in the same
dtype. d_inputs have the result's dtype. `ops.kernels.elementwise.activation.constants` says what `constants` holds.

Backward calls for f what forward calls, with the same strides, so both have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Constants = tuple[float, float, float]

_gelu_backward = torch.ops.aten.gelu_backward.grad_input
_relu_backward = torch.ops.aten.threshold_backward.grad_input
_sigmoid_backward = torch.ops.aten.sigmoid_backward.grad_input
_silu_backward = torch.ops.aten.silu_backward.grad_input


class _Function(NamedTuple):
    """A function g of one variable.

    value(x): g(x), a new tensor. gradient(dy, x, value, out): dy g'(x), written into out, which may be dy, and
    returned. All have one dtype: on CUDA torch computes some of these in that of their result.
    """

    value: Callable[[Tensor], Tensor]
    gradient: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


_GELU = _Function(
    partial(F.gelu, approximate="tanh"),
    lambda dy, x, value, out: _gelu_backward(dy, x, approximate="tanh", grad_input=out),
)
# x sigmoid(c x) = silu(c x) / c, so its derivative is that of silu at c x.
_QGELU = _Function(
    lambda x: torch.sigmoid(1.702 * x).mul_(x),
    lambda dy, x, value, out: _silu_backward(dy, 1.702 * x, grad_input=out),
)
_RELU = _Function(F.relu, lambda dy, x, value, out: _relu_backward(dy, x, 0, grad_input=out))
_SIGMOID = _Function(torch.sigmoid, lambda dy, x, value, out: _sigmoid_backward(dy, value, grad_input=out))
_SILU = _Function(F.silu, lambda dy, x, value, out: _silu_backward(dy, x, grad_input=out))
_SRELU = _Function(
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


def _clamped_swiglu(a: Tensor, b: Tensor, constants: Constants) -> Tensor:
    limit, alpha, offset = constants
    a = a.clamp(max=limit)
    return torch.sigmoid(alpha * a).mul_(a).mul_(b.clamp(-limit, limit).add_(offset))


def _dclamped_swiglu(dvalue: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, constants: Constants) -> Tensor:
    limit, alpha, offset = constants
    outside_a, outside_b = a > limit, b.abs() > limit
    a = a.clamp(max=limit)
    b = b.clamp(-limit, limit).add_(offset)
    value = torch.sigmoid(alpha * a).mul_(a)
    db.copy_((dvalue * value).masked_fill_(outside_b, 0))
    # The derivative of a sigmoid(alpha a) is that of silu at alpha a, whatever alpha is.
    da.copy_(torch.ops.aten.silu_backward(dvalue * b, alpha * a).masked_fill_(outside_a, 0))
    return value.mul_(b)


def _situglu(a: Tensor, b: Tensor, constants: Constants) -> Tensor:
    beta1, beta2, _ = constants
    gate = (a / beta1).tanh_().mul_(beta1).mul_(torch.sigmoid(a))
    return gate.mul_((b / beta2).tanh_().mul_(beta2))


def _dsituglu(dvalue: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, constants: Constants) -> Tensor:
    beta1, beta2, _ = constants
    tanh_a, sigmoid, tanh_b = (a / beta1).tanh_(), torch.sigmoid(a), (b / beta2).tanh_()
    soft_a, soft_b = tanh_a * beta1, tanh_b * beta2
    gate = soft_a * sigmoid
    db.copy_((1 - tanh_b.square_()).mul_(gate).mul_(dvalue))
    # (beta tanh(a / beta))' = 1 - tanh^2, and sigmoid' = sigmoid (1 - sigmoid)
    slope = (1 - tanh_a.square_()).add_(soft_a.mul_(1 - sigmoid)).mul_(sigmoid)
    da.copy_(slope.mul_(soft_b).mul_(dvalue))
    return gate.mul_(soft_b)


_OF_ONE = {"gelu": _GELU, "qgelu": _QGELU, "relu": _RELU, "silu": _SILU, "srelu": _SRELU}
_OF_GATE = {"geglu": _GELU, "glu": _SIGMOID, "qgeglu": _QGELU, "reglu": _RELU, "sreglu": _SRELU, "swiglu": _SILU}

FORWARD: dict[str, Callable[..., Tensor]] = {
    **{kind: partial(_ungated, g) for kind, g in _OF_ONE.items()},
    **{kind: partial(_gated, g) for kind, g in _OF_GATE.items()},
    "clamped_swiglu": _clamped_swiglu,
    "situglu": _situglu,
}
BACKWARD: dict[str, Callable[..., Tensor]] = {
    **{kind: partial(_dungated, g) for kind, g in _OF_ONE.items()},
    **{kind: partial(_dgated, g) for kind, g in _OF_GATE.items()},
    "clamped_swiglu": _dclamped_swiglu,
    "situglu": _dsituglu,
}
