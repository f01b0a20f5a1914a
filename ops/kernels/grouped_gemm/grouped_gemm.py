"""Grouped products of operands: values, or float8 codes with their scales. One host for each kind.

    m_grouped   TN   y[t]  = x[t] w_g^T + s[t] b_g      rows differ by group
                NN   dx[t] = dy[t] w_g
    k_grouped   NT   dw_g  = dy_g^T x_g                 the sum runs over rows

Values go to the kernels of `high_precision`, with factors that hold for a whole tensor applied to the float32 sum;
codes go to those of `float8`, which need both operands along the summed axis, or dy of NT in rows. Everything else is
said there.
"""
# T rows, G groups

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from ops.kernels.grouped_gemm.float8 import grouped_gemm_nt_float8, grouped_gemm_tn_float8
from ops.kernels.grouped_gemm.high_precision import grouped_gemm_nn, grouped_gemm_nt, grouped_gemm_tn
from recipes.tensors.scaled_codes import Float8Operand, Operand
from recipes.tensors.splits import Splits

# Both values, or both codes.
Operands = tuple[Operand, Operand] | tuple[Float8Operand, Float8Operand]


def m_grouped(
    layout: Literal["TN", "NN"],
    operands: Operands,
    splits: Splits,
    *,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype,
    split_accumulation: bool,
    batch_invariant: bool = False,
) -> Tensor:
    """The product of rows [T, R] and stacked weights, [T, C] in out_dtype or `out`; rows of no group are zero.

    bias [G, C], scales [T] and batch_invariant (see `high_precision`): of TN alone. split_accumulation: of codes, see
    `float8`.
    """
    a, b = operands
    if isinstance(a, Float8Operand) and isinstance(b, Float8Operand):
        return grouped_gemm_tn_float8(
            a.codes, a.scale, b.codes, b.scale, splits, bias_GC=bias, scales_T=scales, out=out, out_dtype=out_dtype,
            split_accumulation=split_accumulation, batch_invariant=batch_invariant,
        )  # fmt: skip
    assert isinstance(a, Operand) and isinstance(b, Operand), "both are values, or both codes"
    alpha = a.alpha_with(b)
    if layout == "TN":
        return grouped_gemm_tn(
            a.values, b.values, splits, bias_GN=bias, scales_T=scales, alpha_G=alpha, out=out, out_dtype=out_dtype,
            batch_invariant=batch_invariant, factor=b.factor,
        )  # fmt: skip
    return grouped_gemm_nn(
        a.values, b.values, splits, alpha_G=alpha, out=out, out_dtype=out_dtype, factor=b.factor
    )  # fmt: skip


def k_grouped(
    operands: Operands,
    splits: Splits,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype,
    split_accumulation: bool,
    accumulate: bool = False,
    reverse: bool = False,
    spare: int = 0,
) -> Tensor:
    """dw [G, N, K] of the rows of each group, in out_dtype or `out`; the rest as `grouped_gemm_nt`."""
    a, b = operands
    if isinstance(a, Float8Operand) and isinstance(b, Float8Operand):
        return grouped_gemm_nt_float8(
            a.codes, a.scale, b.codes, b.scale, splits.aligned(b.block), out=out, out_dtype=out_dtype,
            row_offsets=splits.offsets if a.block == 1 else None, split_accumulation=split_accumulation,
            accumulate=accumulate, reverse=reverse, spare=spare,
        )  # fmt: skip
    assert isinstance(a, Operand) and isinstance(b, Operand), "both are values, or both codes"
    block = max(a.block, b.block)
    return grouped_gemm_nt(
        _in_blocks(a, block, splits), _in_blocks(b, block, splits), splits.padded(block), alpha_G=a.alpha_with(b),
        out=out, out_dtype=out_dtype if out is None else out.dtype, accumulate=accumulate, reverse=reverse,
        spare=spare,
    )  # fmt: skip


def without_row_factors(operands: Operands) -> tuple[Operands, Tensor | None]:
    """The operands, and factors of the first one's rows, [T, 1], which `m_grouped` does not take; None: it has none."""
    a, b = operands
    if isinstance(a, Operand) and isinstance(b, Operand) and a.scale is not None and a.scale.dim() == 2:
        return (a._replace(scale=None), b), a.alpha
    return operands, None


def _in_blocks(operand: Operand, block: int, splits: Splits) -> Tensor:
    """The values of grouped rows, those of each group padded with zeros to a multiple of `block`."""
    values = operand.values
    if operand.block == block:
        return values
    if operand.block > 1:
        inactive = splits.group_of_row == splits.num_groups
        values = values.index_select(0, splits.row_in_padded(operand.block)).masked_fill(inactive[:, None], 0)
    if block == 1:
        return values
    padded = values.new_zeros(splits.aligned_capacity(block), values.shape[1])
    return padded.index_add_(0, splits.row_in_padded(block), values)  # zeros past the sum change nothing
