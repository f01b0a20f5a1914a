"""The codes and scales of one tensor within those of several: a layer of stacked weights, the rows of one group.

Each is what quantizing that tensor alone gives, bit for bit: rows of groups begin new blocks, and in a transposed copy
new multiples of `alignment` (`recipes.casts.layout`, of NVFP4 `recipes.casts.cast_nvfp4`). Sizes are numbers of the
host.
"""
# G groups, T rows, N rows of a weight, K columns

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.casts.layout import is_square
from recipes.casts.scale_rules import NVFP4Scale
from recipes.tensors.formats import ALL, ScaleSpec
from recipes.triton.launch import cdiv


class Stored(NamedTuple):
    """The tensors of one copy; amax: of formats with one above the scales."""

    codes: Tensor
    scale_inv: Tensor
    amax: Tensor | None = None


def of_stack(stored: Stored, spec: ScaleSpec, columnwise: bool, group: int) -> Stored:
    """Of stacked weights [G, N, K] those of one, [N, K]. A view, but for transposed codes that have to be padded."""
    codes = stored.codes[group]
    if _is_unpadded_in_stacks(spec, columnwise):
        codes = _bytes_padded(codes, -codes.shape[-1] % spec.alignment)
    return Stored(codes, stored.scale_inv[group], None if stored.amax is None else stored.amax[group])


def as_stack(members: Sequence[Stored], spec: ScaleSpec, columnwise: bool, num_rows: int) -> Stored:
    """The inverse: those of G weights [N, K] in one memory. num_rows: N."""
    codes = [member.codes for member in members]
    if _is_unpadded_in_stacks(spec, columnwise):
        codes = [each[..., :num_rows] for each in codes]
    amaxes = [member.amax for member in members if member.amax is not None]
    scales = _stack([member.scale_inv for member in members])
    return Stored(_stack(codes), scales, torch.stack(amaxes) if amaxes else None)


def of_rows(stored: Stored, spec: ScaleSpec, columnwise: bool, sizes: Sequence[int], group: int) -> Stored:
    """Of rows [T, K] divided among groups those of one group."""
    begin, size = sum(sizes[:group]), sizes[group]
    rows = slice(begin, begin + size)

    def blocks(block: int, unit: int = 1) -> slice:
        counts = [1 if block == ALL else cdiv(each, block) for each in sizes[: group + 1]]
        return slice(sum(counts[:-1]) * unit, sum(counts) * unit)

    transposed = spec.columnwise == "transposed"
    four_bit = isinstance(spec.scale_rule, NVFP4Scale)
    if columnwise and transposed:
        codes = stored.codes[:, blocks(spec.alignment, spec.alignment // (2 if four_bit else 1))].contiguous()
    else:
        codes = stored.codes[rows]
    scale, amax = stored.scale_inv, stored.amax
    block_rows = spec.block_of(columnwise)[0]
    if spec.is_per_tensor:
        return Stored(codes, scale[group], amax)
    if four_bit:
        scale = scale[:, blocks(spec.alignment)].contiguous() if columnwise else scale[rows]
    elif not transposed:
        scale = scale[blocks(block_rows)] if columnwise else scale[rows]
    elif is_square(spec):
        scale = scale[:, blocks(block_rows)].contiguous() if columnwise else scale[blocks(block_rows)]
    else:
        scale = scale[blocks(block_rows)] if columnwise else scale[:, rows].contiguous()
    if amax is not None:
        of_each_row = isinstance(spec.scale_rule, NVFP4Scale) and spec.scale_rule.row_scaled and not columnwise
        amax = amax[rows] if of_each_row else amax[group]
    return Stored(codes, scale, amax)


def _is_unpadded_in_stacks(spec: ScaleSpec, columnwise: bool) -> bool:
    return columnwise and spec.columnwise == "transposed" and not isinstance(spec.scale_rule, NVFP4Scale)


def _bytes_padded(codes: Tensor, count: int) -> Tensor:
    return F.pad(codes.view(torch.uint8), (0, count)).view(codes.dtype) if count else codes


def _stack(tensors: Sequence[Tensor]) -> Tensor:
    """Of any dtype; torch stacks bytes everywhere. Not a copy of tensors that lie one behind another."""
    together = _as_one(tensors)
    if together is not None:
        return together
    if tensors[0].element_size() > 1:
        return torch.stack(list(tensors))
    return torch.stack([tensor.contiguous().view(torch.uint8) for tensor in tensors]).view(tensors[0].dtype)


def _as_one(tensors: Sequence[Tensor]) -> Tensor | None:
    """Contiguous tensors of one memory that lie one behind another, as one; else None."""
    first = tensors[0]
    step, begin, storage = first.numel(), first.storage_offset(), first.untyped_storage()
    for at, tensor in enumerate(tensors):
        behind = tensor.storage_offset() == begin + at * step
        if not (behind and tensor.is_contiguous() and tensor.untyped_storage()._cdata == storage._cdata):
            return None
    return first.as_strided((len(tensors), *first.shape), (step, *first.stride()))
