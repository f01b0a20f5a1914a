"""Dequantize from NVFP4: code * s of one copy, in the natural order. Formula and layout: `recipes/casts/cast_nvfp4.py`.

alpha is left to the product. `dequantize_nvfp4_ref` is plain torch and the definition; nothing waits for the device.
"""
# T rows, P rows with the padding, K columns, R the others than those along the contracted axis

from __future__ import annotations

import math

import torch
from torch import Tensor

from recipes.casts.cast_nvfp4 import NVFP4Config, runs_triton
from recipes.casts.dequantize_nvfp4_triton import (
    dequantize_columns_kernel,
    dequantize_rows_kernel,
    dequantize_words_kernel,
)
from recipes.casts.layout import empty_values
from recipes.casts.nvfp4_blocks import BLOCK
from recipes.tensors.formats import E2M1
from recipes.triton.launch import Launch, cdiv, has_work


def dequantize_nvfp4_ref(codes: Tensor, scale: Tensor, length: int, dtype: torch.dtype, *, transpose: bool) -> Tensor:
    """code * s in `dtype`, [..., R, length], or with transpose [..., length, R]; without alpha."""
    values = E2M1.decode(codes, torch.float32)[..., :length]
    values = (values * scale.to(torch.float32).repeat_interleave(BLOCK, -1)[..., :length]).to(dtype)
    return values.transpose(-1, -2).contiguous() if transpose else values


def dequantize_nvfp4_config(width: int, dtype: torch.dtype, *, transpose: bool) -> NVFP4Config:
    """Tiles of dequantization, for y of this many columns. block_r counts rows, not blocks, if not `transpose`; columns
    is 0 where words of y are not pairs of columns.

    The fastest measured on an H200 (`bench/results/tuning.md`).
    """
    if not transpose:
        return NVFP4Config(16, 512, 4)
    if dtype != torch.bfloat16 or width % 2:
        return NVFP4Config(4, 64, 4, band=16)
    return NVFP4Config(8, 128, 2, band=8, columns=2 if width % 8 else 8)


WORDS_AT_ONCE = 512  # of eight codes: four a thread


_dequantize_rows, _dequantize_columns = Launch(dequantize_rows_kernel), Launch(dequantize_columns_kernel)
_dequantize_words = Launch(dequantize_words_kernel)


def dequantize_nvfp4(codes: Tensor, scale: Tensor, length: int, dtype: torch.dtype, *, transpose: bool) -> Tensor:
    """code * s in `dtype`, [..., R, length], or with transpose [..., length, R]; without alpha."""
    if not runs_triton(codes):
        return dequantize_nvfp4_ref(codes, scale, length, dtype, transpose=transpose)
    shape = (*codes.shape[:-2], length, codes.shape[-2]) if transpose else (*codes.shape[:-1], length)
    values = empty_values(shape, dtype, codes.device)
    dequantize_nvfp4_triton(codes, scale, values, transpose=transpose)
    return values.to(dtype)


def values_nvfp4(
    codes: Tensor, scale: Tensor, dtype: torch.dtype, shape: torch.Size, *, columnwise: bool, padded: bool
) -> Tensor:
    """code * s of one copy of a tensor of this shape, in the natural order. padded: with the padding of its rows."""
    if not columnwise:
        return dequantize_nvfp4(codes, scale, shape[-1], dtype, transpose=False)
    values = dequantize_nvfp4(codes, scale, scale.shape[-1] * BLOCK, dtype, transpose=True)
    num_rows = shape[-2] if values.ndim == 3 else math.prod(shape[:-1])
    return values if padded else values[..., :num_rows, :].reshape(shape)


def dequantize_nvfp4_triton(codes: Tensor, scale: Tensor, values: Tensor, *, transpose: bool) -> None:
    """Writes `values`, float32, bfloat16 or float16."""
    if not has_work(values):
        return
    codes, scale = codes.contiguous(), scale.view(torch.uint8).contiguous()
    *_, R, K = values.shape
    config = dequantize_nvfp4_config(K, values.dtype, transpose=transpose)
    about = {"BLOCK_R": config.block_r, "BLOCK_C": config.block_c, "num_warps": config.num_warps}
    num_groups = values.numel() // (R * K)
    column_tiles = cdiv(K, config.block_c)
    if transpose:
        tiles = num_groups * cdiv(R, BLOCK * config.block_r)
        band = min(tiles, max(config.band, cdiv(tiles, 65535)))
        _dequantize_columns(
            codes, (band, column_tiles, cdiv(tiles, band)), codes.view(torch.int64), scale, values, num_groups, R,
            K=K, COLUMNS=config.columns, **about,
        )  # fmt: skip
    elif values.dtype == torch.bfloat16 and K % BLOCK == 0:
        words = values.numel() // 8
        _dequantize_words(
            codes, cdiv(words, WORDS_AT_ONCE), codes.view(torch.int32), scale, values, words, BLOCK=WORDS_AT_ONCE
        )
    else:
        rows = num_groups * R
        _dequantize_rows(codes, cdiv(rows, config.block_r) * column_tiles, codes, scale, values, rows, K, **about)
