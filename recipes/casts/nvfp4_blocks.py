"""Blocks of 16 numbers as E2M1 codes with their E4M3 scales, in plain torch: the definition of `cast_nvfp4`'s numbers.

Four over six (`FourOverSix`): of each block two scales are tried, and that with the smaller error is taken, in a tie
the first. With B for 448, which is 256 by default:

    b     = fl(fl(amax_block / 6) * S_enc)        S_enc = min(fl(6 B / amax), FLT_MAX)
    s     = E4M3(b), with which amax_block becomes 6, or E4M3(fl(1.5 b)), with which it becomes 4
    error = sum of |d| or fl(d^2),  d = fl(fl(fl(fl(code * s) * amax) / 6 B) - x)

summed in float32 from the block's first number to its last; of a 16x16 block in float64. Such casts are made in plain
torch on every device. Source: Cook et al., "Four Over Six", 2025; TransformerEngine's helpers of that name.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipes.casts.cast import abs_without_nan
from recipes.casts.scale_rules import FourOverSix, NVFP4Scale
from recipes.tensors.formats import E4M3

BLOCK = 16
NAN_SCALE = 0x7F
_FLOAT32_MAX = torch.finfo(torch.float32).max
_ROUND = 1.5 * 2**23  # a number between 0 and 2^22 added to this is rounded to an integer, ties to even


def cast_blocks_ref(
    x: Tensor, amax: Tensor, two_d: bool, bits: Tensor | None, four_over_six: FourOverSix | None = None
) -> tuple[Tensor, Tensor]:
    """Codes [..., R, L], not packed, and scales [..., R, L / 16] of x float32. amax: as the scales, or broadcast."""
    blocks = x.unflatten(-1, (x.shape[-1] // BLOCK, BLOCK))
    largest, has_nan = abs_without_nan(blocks).amax(-1), blocks.isnan().any(-1)
    if two_d:
        largest, has_nan = _over_rows(largest), _over_rows(has_nan)
    one = torch.ones_like(amax)
    most = NVFP4Scale(four_over_six=four_over_six).range
    encode = (most * one / amax).clamp(max=_FLOAT32_MAX).masked_fill((amax == 0) | amax.isinf(), 1.0)
    decode = one / encode
    if four_over_six is None:
        scale = E4M3.encode((largest * (encode * (1.0 / 6.0))).clamp(max=_FLOAT32_MAX))
        codes = _codes(blocks, scale, decode, bits)
    else:
        base = largest / torch.full_like(largest, 6.0) * encode
        scale, other = E4M3.encode(base), E4M3.encode(base * 1.5)
        codes, fewer = _codes(blocks, scale, decode, bits), _codes(blocks, other, decode, bits)
        known = torch.where(amax.isinf(), most, amax)
        error, of_other = (
            _error(blocks, tried, s, known, most, two_d, four_over_six) for tried, s in ((codes, scale), (fewer, other))
        )
        takes = of_other < error
        codes = torch.where(takes[..., None], fewer, codes)
        scale = torch.where(takes, other.view(torch.uint8), scale.view(torch.uint8)).view(E4M3.dtype)
    codes = codes.masked_fill(has_nan[..., None], 0).flatten(-2)
    return codes, scale.view(torch.uint8).masked_fill(has_nan, NAN_SCALE).view(E4M3.dtype)


def e2m1_codes_ref(x: Tensor, bits: Tensor | None = None) -> Tensor:
    """E2M1 codes 0 to 15 (int32) of float32 x: to nearest, ties to even, or stochastic with 9 random bits an element.

    On the axis of codes a magnitude stands at 4 clamp(h) + 2 clamp(h - 1) + clamp(h - 2), where h is half of it and
    clamp goes from 0 to 1: 0, 2, 4, 6 stand at 0, 4, 6, 7. Each term is exact, and at most one is no integer, so that
    adding them to a number whose last place is 1 (or 1/512) rounds once.
    """
    h = 0.5 * x.abs()
    steps = 1.0 if bits is None else 512.0
    position = torch.full_like(h, _ROUND)
    for start, codes in ((0.0, 4.0), (1.0, 2.0), (2.0, 1.0)):
        position.add_((h - start).clamp_(0.0, 1.0), alpha=codes * steps)
    code = (position - _ROUND).to(torch.int32)
    if bits is not None:
        code = (code + bits.to(torch.int32)) >> 9
    return code.add_(torch.signbit(x), alpha=8)


def e2m1_values_ref(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """The values of E2M1 codes 0 to 15 (int32), one in each element.

    Computed, not looked up: a table would come from the host, which a CUDA graph cannot hold.
    """
    exponent, mantissa = (codes & 7) >> 1, codes & 1
    doubled = torch.where(exponent == 0, mantissa, (2 + mantissa) << (exponent - 1).clamp(min=0))
    values = doubled.to(dtype) * 0.5
    return torch.where((codes & 8) != 0, -values, values)


def _codes(blocks: Tensor, scale: Tensor, decode: Tensor, bits: Tensor | None) -> Tensor:
    """Codes of blocks [..., B, 16] under their scales [..., B]."""
    factor = scale.to(torch.float32) * decode
    factor = (torch.ones_like(factor) / factor).clamp(max=_FLOAT32_MAX)
    return e2m1_codes_ref((blocks * factor[..., None]).flatten(-2), bits).view_as(blocks)


def _error(
    blocks: Tensor, codes: Tensor, scale: Tensor, amax: Tensor, most: float, two_d: bool, kind: FourOverSix
) -> Tensor:
    """Of each block how far these codes are off, [..., B]; the same in each row of a 16x16 block."""
    values = e2m1_values_ref(codes, torch.float32) * scale.to(torch.float32)[..., None] * amax[..., None]
    errors = values / torch.full_like(values, most) - blocks
    errors = errors.square() if kind.error == "MSE" else errors.abs()
    if two_d:
        of_rows = errors.double().sum(-1).unflatten(-2, (errors.shape[-3] // BLOCK, BLOCK))
        return of_rows.sum(-2).repeat_interleave(BLOCK, -2)
    total = errors[..., 0]
    for error in errors.unbind(-1)[1:]:
        total = total + error
    return total


def _over_rows(of_blocks: Tensor) -> Tensor:
    """The maximum over each 16 rows of [..., 16 n, B], in each of them."""
    return of_blocks.unflatten(-2, (of_blocks.shape[-2] // BLOCK, BLOCK)).amax(-2).repeat_interleave(BLOCK, -2)
