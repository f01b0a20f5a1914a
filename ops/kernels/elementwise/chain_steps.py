"""The steps of `ops.kernels.elementwise.chain` that the basic operations use."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ops.kernels.elementwise.chain import Step
from recipes.triton.gates import tl, triton


@triton.jit
def _add(x, operand, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return x + operand


@triton.jit
def _dadd(dy, x, operand, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy


@triton.jit
def _scale(x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return x * A


@triton.jit
def _dscale(dy, x, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return dy * A


@triton.jit
def _dropout(x, bits, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return tl.where(bits >= A, x * B, 0.0)


@triton.jit
def _ddropout(dy, x, bits, A: tl.constexpr, B: tl.constexpr, C: tl.constexpr):
    return tl.where(bits >= A, dy * B, 0.0)


def _add_ref(x: Tensor, operand: Tensor, *_: float) -> Tensor:
    return x + operand


ADD_COLUMN = Step(_add, _dadd, _add_ref, "column", linear=True)  # x + a bias
ADD_ELEMENT = Step(_add, _dadd, _add_ref, "element", linear=True)  # x + a tensor of its shape


@cache
def scale_step(scale: float) -> Step:
    """y = scale x."""
    return Step(_scale, _dscale, lambda x, _, scale, *__: x * scale, constants=(scale, 0.0, 0.0), linear=True)


@cache
def dropout_step(p: float) -> Step:
    """x / (1 - p) with probability 1 - p to within 2^-17, else 0. Elements with random bits >= p 2^16 are kept."""
    threshold = round(p * 2**16)
    factor = 0.0 if p == 1 else 1 / (1 - p)
    return Step(_dropout, _ddropout, _dropout_ref, "random", constants=(threshold, factor, 0.0), linear=True)


def _dropout_ref(x: Tensor, bits: Tensor, threshold: float, factor: float, _: float) -> Tensor:
    return torch.where(bits >= threshold, x * factor, 0)
