"""The products of a router, computed as in float32 (float64), on tensor cores where their operands allow it.

    logits  [T, E] = x W^T + b
    dx      [T, H] = dlogits W + dy
    dweight [E, H] = dlogits^T x

A product of two numbers of 16 bits is exact in float32. Tensor cores add such products in float32, and cut off where
others round: sums of 2,048 err by 2.5e-6 of their norm (on an H200; 2e-4 with TF32). A float32 number is the sum of
three of bfloat16, with 8 bits of its mantissa each. (Of numbers below 2^-110 the last bits are lost; what is infinite
becomes NaN.) So on GPUs of compute capability 8.0 and above tensor cores multiply

    logits   x and W in one 16-bit dtype, or x in bfloat16 and the parts of W: by torch, with float32 results
    dx       the parts of dlogits and W in bfloat16, or the parts of W. The sum with dy is rounded once, to dy's dtype
    dweight  the parts of dlogits and x in bfloat16: by torch, with float32 results

and everything else is multiplied in ieee float32, whatever TF32 is set to, or in float64: TF32 rounds operands to 10
bits of mantissa.
"""
# T tokens, E experts, H hidden

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ops.kernels.routing.router_product_triton import dgrad_kernel, split_kernel
from recipes.tensors.abstract import is_abstract
from recipes.triton.launch import Launch, cdiv
from recipes.triton.tape import taping

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_PARTS = 3
_SPLIT_ROWS, _SPLIT_COLUMNS = 16, 128  # of a program
_dgrad, _split = Launch(dgrad_kernel), Launch(split_kernel)


def on_tensor_cores(device: torch.device) -> bool:
    """Whether 16-bit products run there: compute capability 8.0."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def logits_of(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [T, H] in any dtype, weight [E, H], bias [E] -> [T, E] float32; float64 if x is."""
    if x.dtype in _SIXTEEN_BITS and weight.dtype == x.dtype and _can(x):
        logits = torch.mm(x, weight.t(), out_dtype=torch.float32)
    elif x.dtype == torch.bfloat16 and weight.dtype == torch.float32 and _can(x):
        of_parts = torch.mm(x, in_parts(weight).view(-1, x.shape[1]).t(), out_dtype=torch.float32)
        logits = of_parts.view(len(x), -1, _PARTS).sum(-1)
    else:
        logits = _widened_product(x, weight.t())
    return logits if bias is None else logits.add_(bias)


def gradients_of(
    dlogits: Tensor, *, weight: Tensor | None, x: Tensor | None, dy: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """dx [T, H] in dy's dtype, or without one in that of dlogits; dweight [E, H] in that of dlogits.

    dlogits [T, E] float32 (float64); weight [E, H], None if dx is not needed; x [T, H], None if dweight is not.
    """
    dx_in_parts = weight is not None and weight.dtype in (torch.bfloat16, torch.float32)
    dweight_in_parts = x is not None and x.dtype == torch.bfloat16
    parts = None
    if (dx_in_parts or dweight_in_parts) and dlogits.dtype == torch.float32 and _can(dlogits):
        parts = in_parts(dlogits)
    dx = dweight = None
    if weight is not None:
        if parts is not None and dx_in_parts:
            like = dlogits if dy is None else dy
            dx = torch.empty(len(dlogits), weight.shape[1], dtype=like.dtype, device=like.device)
            weight = weight.contiguous() if weight.dtype == torch.bfloat16 else in_parts(weight)
            dgrad_triton(parts, weight, None if dy is None else dy.contiguous(), dx)
        else:
            dx = _widened_product(dlogits, weight)
            dx = dx if dy is None else dx.add_(dy)
    if x is not None:
        if parts is not None and dweight_in_parts:
            dweight = torch.mm(parts.t(), x, out_dtype=torch.float32).view(_PARTS, -1, x.shape[1]).sum(0)
        else:
            dweight = _widened_product(dlogits.t(), x)
    return dx, dweight


@contextmanager
def without_tf32(x: Tensor) -> Iterator[None]:
    """Products of x in full precision. What changes the setting is not repeated."""
    if not x.is_cuda or x.dtype == torch.float64:
        yield
        return
    setting = torch.backends.cuda.matmul
    precision = setting.fp32_precision
    if taping.tape is not None:
        taping.tape.repeatable = False
    setting.fp32_precision = "ieee"
    try:
        yield
    finally:
        setting.fp32_precision = precision


# ----------------------------------------------------------------------------------------------------------- launchers


def dgrad_triton(dlogits: Tensor, weight: Tensor, dy: Tensor | None, dx: Tensor) -> None:
    """Launch dx = dlogits weight + dy. dlogits [T, 3 E]: its parts; weight [E, H] bfloat16, or its parts [E, 3 H]. All
    contiguous."""
    (num_tokens, hidden), num_experts = dx.shape, len(weight)
    blocks = cdiv(hidden, 128), cdiv(num_tokens, 64)
    _dgrad(
        dx, blocks, dlogits, weight, dy, dx, num_tokens, num_experts, hidden,
        WEIGHT_PARTS=weight.shape[1] // hidden, BLOCK_T=64, BLOCK_E=64, BLOCK_H=128, num_warps=4, num_stages=3,
    )  # fmt: skip


def in_parts(x: Tensor) -> Tensor:
    """x [R, C] float32 -> [R, 3 C] bfloat16: of each row the upper parts of all its numbers, then the others."""
    parts = torch.empty(len(x), _PARTS * x.shape[1], dtype=torch.bfloat16, device=x.device)
    split_triton(x.contiguous(), parts)
    return parts


def split_triton(x: Tensor, parts: Tensor) -> None:
    """Launch `in_parts`. All contiguous."""
    blocks = cdiv(x.shape[1], _SPLIT_COLUMNS), cdiv(len(x), _SPLIT_ROWS)
    _split(x, blocks, x, parts, *x.shape, BLOCK_R=_SPLIT_ROWS, BLOCK_C=_SPLIT_COLUMNS)


def _can(x: Tensor) -> bool:
    return x.is_cuda and x.numel() > 0 and not is_abstract(x) and on_tensor_cores(x.device)


def _widened_product(a: Tensor, b: Tensor) -> Tensor:
    dtype = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    with without_tf32(a):
        return a.to(dtype) @ b.to(dtype)
