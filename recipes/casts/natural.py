"""Codes and scales in the natural order of the values, whatever the layout of the copy is.

    value[t, k] = decode(codes[t, k]) * scale_rule.values(scale_inv[t // B, k // C])    block (B, C); 0: one for all
                  * alpha, of NVFP4: `recipes.casts.cast_nvfp4`

For exporting checkpoints, comparing with other libraries, and tests: nothing is rounded, and nothing waits for the
device.
"""
# G groups, T rows (all axes but the last), P rows with the padding, K columns

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast import transpose_back_ref
from recipes.casts.layout import is_square
from recipes.casts.scale_rules import NVFP4Scale
from recipes.tensors.formats import ALL, ScaleSpec
from recipes.tensors.splits import Splits


class NaturalCopy(NamedTuple):
    """One copy of x [..., K] or stacked weights [G, N, K] in the natural order.

    codes: one for each value, in the values' shape; four-bit codes one a byte. Of a transformed copy those of the
        transformed rows, with their padding: [P, K], stacked [G, P, K]
    scale_inv: as stored, [T / B, K / C] rounded up, with B = 1 [..., K / C], stacked [G, N / B, K / C]
    block: (B, C), how many rows and columns have one entry of scale_inv; 0 for all of the tensor. B is 1 where scales
        stand in each row: of square blocks of MXFP8 and NVFP4, and of grouped rows, whose blocks begin with each group;
        so is C in the columnwise copy of these square blocks. Scales of rows of no group are arbitrary
    amax: of NVFP4, float32: as `ScaledCodes.amax`
    """

    codes: Tensor
    scale_inv: Tensor
    block: tuple[int, int]
    amax: Tensor | None = None


def natural_codes(
    codes: Tensor, spec: ScaleSpec, shape: torch.Size, splits: Splits | None, *, columnwise: bool
) -> Tensor:
    """The codes of a copy of a tensor of this shape."""
    if isinstance(spec.scale_rule, NVFP4Scale):
        codes = torch.stack((codes & 0xF, codes >> 4), -1).flatten(-2)
        codes = codes if columnwise else codes[..., : shape[-1]]
    if not columnwise or spec.columnwise != "transposed":
        return codes
    if spec.transform is not None:
        return codes.mT
    return transpose_back_ref(codes, shape, splits, spec.alignment)


def natural_scales(
    scale: Tensor, spec: ScaleSpec, shape: torch.Size, splits: Splits | None, *, columnwise: bool
) -> tuple[Tensor, tuple[int, int]]:
    """The stored scales of a copy of a tensor of this shape, and the block that has one entry."""
    if spec.is_per_tensor:
        if splits is None:
            return scale[..., None, None], (ALL, ALL)
        return scale.index_select(0, splits.group_of_row.clamp(max=splits.num_groups - 1))[:, None], (1, ALL)
    square, (rows, columns) = is_square(spec), spec.block_of(columnwise)
    if isinstance(spec.scale_rule, NVFP4Scale):
        scale = scale.mT if columnwise else scale
        stands_in_each = square
    else:
        transposed = spec.columnwise == "transposed"
        scale = scale.mT if transposed and columnwise == square else scale
        stands_in_each = square and not transposed
    if stands_in_each:
        rows, columns = (rows, 1) if columnwise else (1, columns)
    if rows == 1:
        return scale.reshape(*shape[:-1], scale.shape[-1]), (1, columns)
    if splits is None or (columnwise and spec.transform is not None):
        return scale, (rows, columns)
    last = splits.num_groups - 1
    block_of_row = splits.group_of_row.clamp(max=last) if rows == ALL else splits.block_of_row(rows)
    return scale.index_select(0, block_of_row), (1, columns)
