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
from recipes.triton.launch import Launch, cdiv, next_power_of_2
from recipes.triton.tape import taping

_SIXTEEN_BITS = (torch.bfloat16, torch.float16)
_PARTS = 3
_SPLIT_BLOCK = 1024
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
        x, weight = _widened(x, weight.t())
        with without_tf32(x):
            return x @ weight if bias is None else torch.addmm(bias.to(x.dtype), x, weight)
    return logits if bias is None else logits.add_(bias)


def input_gradient(dlogits: Tensor, weight: Tensor, dy: Tensor | None) -> Tensor:
    """dlogits [T, E] float32 (float64), weight [E, H], dy [T, H] -> [T, H] in dy's dtype or that of dlogits."""
    if weight.dtype in (torch.bfloat16, torch.float32) and dlogits.dtype == torch.float32 and _can(dlogits):
        dx = torch.empty(
            len(dlogits), weight.shape[1], dtype=torch.float32 if dy is None else dy.dtype, device=dlogits.device
        )
        dgrad_triton(dlogits.contiguous(), weight.contiguous(), None if dy is None else dy.contiguous(), dx)
        return dx
    dlogits, weight = _widened(dlogits, weight)
    with without_tf32(dlogits):
        dx = dlogits @ weight
    return dx if dy is None else dx.add_(dy)


def weight_gradient(dlogits: Tensor, x: Tensor) -> Tensor:
    """dlogits [T, E] float32 (float64), x [T, H] -> [E, H] in the dtype of dlogits."""
    if x.dtype == torch.bfloat16 and dlogits.dtype == torch.float32 and _can(x):
        parts = in_parts(dlogits)
        return torch.mm(parts.t(), x, out_dtype=torch.float32).view(_PARTS, -1, x.shape[1]).sum(0)
    dlogits, x = _widened(dlogits.t(), x)
    with without_tf32(x):
        return dlogits @ x


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
    """Launch dx = dlogits weight + dy. All contiguous."""
    (num_tokens, num_experts), hidden = dlogits.shape, dx.shape[1]
    block_e = min(64, max(16, next_power_of_2(num_experts)))
    blocks = cdiv(hidden, 128), cdiv(num_tokens, 128)
    _dgrad(
        dx, blocks, dlogits, weight, dy, dx, num_tokens, num_experts, hidden,
        BLOCK_T=128, BLOCK_E=block_e, BLOCK_H=128, num_warps=8, num_stages=3,
    )  # fmt: skip


def in_parts(x: Tensor) -> Tensor:
    """x [R, C] float32 -> [R, 3 C] bfloat16: of each row the upper parts of all its numbers, then the others."""
    parts = torch.empty(len(x), _PARTS * x.shape[1], dtype=torch.bfloat16, device=x.device)
    split_triton(x.contiguous(), parts)
    return parts


def split_triton(x: Tensor, parts: Tensor) -> None:
    """Launch `in_parts`. All contiguous."""
    _split(x, cdiv(x.numel(), _SPLIT_BLOCK), x, parts, x.numel(), x.shape[1], BLOCK=_SPLIT_BLOCK)


def _can(x: Tensor) -> bool:
    return x.is_cuda and x.numel() > 0 and not is_abstract(x) and on_tensor_cores(x.device)


def _widened(*tensors: Tensor) -> list[Tensor]:
    dtype = torch.float64 if any(tensor.dtype == torch.float64 for tensor in tensors) else torch.float32
    return [tensor.to(dtype) for tensor in tensors]
