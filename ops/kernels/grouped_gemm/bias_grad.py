"""The gradient of the biases of groups of rows.

    db_g = sum of s[t] dy[t] over the rows t of group g

Layouts: dy [T, N], of rows that may lie elsewhere (`GatheredRows`) or at any distance; s [T]; db [G, N]. The sum is in
float32 (float64 for float64), in a fixed order, and rounded once. Rows past the last group count in no sum, and a group
without rows has exactly zero. Graph safety: as the products in `high_precision.py`.
"""
# T rows, G groups, N out features

from typing import NamedTuple

import torch
from torch import Tensor

from ops.kernels.grouped_gemm.bias_grad_triton import bias_grad_kernel
from ops.kernels.grouped_gemm.operands import (
    accumulator_like,
    check_rows,
    check_scales,
    output,
    refuse_float64,
    row_slices,
    with_contiguous_rows,
)
from recipes.tensors.abstract import is_abstract
from recipes.tensors.gathered_rows import GatheredRows, at_source
from recipes.tensors.splits import Splits
from recipes.triton.launch import Launch, cdiv, launcher


def grouped_bias_grad_ref(
    dy_TN: Tensor, splits: Splits, *, scales_T: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """`grouped_bias_grad` in plain torch, group by group. Returns db [G, N]."""
    dy = accumulator_like(dy_TN)
    scaled = dy if scales_T is None else dy * accumulator_like(scales_T[:, None])
    return torch.stack([scaled[rows].sum(0) for _, rows in row_slices(splits)]).to(out_dtype or dy_TN.dtype)


class BiasGradConfig(NamedTuple):
    """Rows and columns of a step."""

    block_t: int
    block_n: int
    num_warps: int


def grouped_bias_grad_config() -> BiasGradConfig:
    """32 x 128 elements at a time: a row of 128 bf16 values is two full sectors of 128 bytes."""
    return BiasGradConfig(block_t=32, block_n=128, num_warps=4)


def grouped_bias_grad(
    dy_TN: Tensor | GatheredRows,
    splits: Splits,
    *,
    scales_T: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """db_g = sum of scales[t] dy[t] over the rows of group g, summed in float32. Returns db [G, N].

    dy: [T, N]. scales: [T] (1 if None). The result is in out_dtype (dy's if None). A group without rows gets zeros.
    Gathered rows of dy are read where they lie on a GPU, and copied on a CPU.
    """
    check_rows(dy_TN, splits)
    check_scales(scales_T, splits)
    source, row_of = at_source(dy_TN)
    if is_abstract(source) and not source.is_cuda:
        return output(None, (splits.num_groups, source.shape[1]), out_dtype, source)
    if source.device.type != "cuda":
        rows = source if row_of is None else source.index_select(0, row_of)
        return grouped_bias_grad_ref(rows, splits, scales_T=scales_T, out_dtype=out_dtype)
    refuse_float64(source)
    out = output(None, (splits.num_groups, source.shape[1]), out_dtype, source)
    grouped_bias_grad_triton(
        with_contiguous_rows(source), row_of, splits.offsets, None if scales_T is None else scales_T.contiguous(), out
    )
    return out


_bias_grad = Launch(bias_grad_kernel)


@launcher("fuser::grouped_bias_grad", mutates=["out"])
def grouped_bias_grad_triton(
    dy_TN: Tensor, row_of: Tensor | None, offsets: Tensor, scales_T: Tensor | None, out: Tensor
) -> None:
    """Launches the bias gradient. Rows of dy are contiguous, row_of, offsets [G + 1], scales, out are contiguous."""
    if dy_TN.numel() == 0:
        out.zero_()
        return
    G, N = out.shape
    config = grouped_bias_grad_config()
    _bias_grad(
        out,
        G * cdiv(N, config.block_n),
        dy_TN,
        row_of,
        offsets,
        scales_T,
        out,
        N,
        dy_TN.stride(0),
        BLOCK_T=config.block_t,
        BLOCK_N=config.block_n,
        num_warps=config.num_warps,
    )
