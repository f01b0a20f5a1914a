"""The launches that quantize to E4M3 or E5M2 with one float32 scale for each row and column, and dequantize.

What is computed: `cast.py`, with the block (1, ALL), a `Float32Scale` and a transposed columnwise copy.

Two Triton kernels: one finds the amaxes of the rows and of each group's columns (maxima do not depend on the order, so
atomics do no harm), one casts both copies in one pass. On Hopper, in bfloat16, groups whose programs fit on the GPU at
once find theirs at meetings (`cast_float8_vectors_gluon`). The rowwise copy alone takes one read of x, where a row fits
into the registers of a program. Nothing is read from the device on the host.
"""

# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

import math

import torch
from torch import Tensor

from recipes.casts.cast_float8 import (
    BLOCK,
    GLUON_BOX,
    GLUON_TILE,
    CastFloat8Config,
    cast_float8_config,
    few_programs,
    format_of,
    meets_in_gluon,
    num_row_tiles,
    rows_that_meet,
    usual_rows,
)
from recipes.casts.cast_float8_rowwise_triton import (
    cast_float8_rows_kernel,
    cast_float8_rowwise_kernel,
    dequantize_float8_rowwise_kernel,
    row_and_column_amaxes_kernel,
)
from recipes.casts.layout import Copies, as_bytes, as_words, empty_copies, empty_values, has_words, matrices, shape_of
from recipes.casts.scale_rules import Float32Scale
from recipes.tensors.abstract import is_abstract
from recipes.tensors.formats import Float8Format, ScaleSpec
from recipes.tensors.splits import Splits
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import Launch, cdiv, has_work, next_power_of_2
from recipes.triton.meeting import WORDS

if why_no_gluon((9, 0)) is None:
    from recipes.casts.boxes_gluon import boxes_of
    from recipes.casts.cast_float8_vectors_gluon import cast_float8_vectors_gluon_kernel

    _cast_vectors = Launch(cast_float8_vectors_gluon_kernel)

# -------------------------------------------------------------------------------------------------------------- config

MOST_COLUMNS = 16384  # of a row that one program holds in 16 warps


def amaxes_config(x: Tensor) -> CastFloat8Config:
    """Whole units of 16 bits: measured on an H100. Else fewer columns, which spill nothing (compiled, not timed)."""
    return CastFloat8Config(block_m=64, block_k=64 if x.shape[-1] % 16 or x.itemsize > 2 else 256, num_warps=4)


def cast_rows_config(columns: int) -> CastFloat8Config:
    """Whole rows, of at most MOST_COLUMNS columns: 32 numbers a thread, few enough to stay in registers (sm_90a)."""
    block_k = max(16, next_power_of_2(columns))
    block_m = max(1, 4096 // block_k)
    return CastFloat8Config(block_m, block_k, num_warps=max(4, block_m * block_k // 1024))


# ----------------------------------------------------------------------------------------------------------- launchers

_amaxes, _cast_rowwise = Launch(row_and_column_amaxes_kernel), Launch(cast_float8_rowwise_kernel)
_cast_rows, _dequantize = Launch(cast_float8_rows_kernel), Launch(dequantize_float8_rowwise_kernel)


def cast_float8_rowwise_on_triton(
    x: Tensor,
    spec: ScaleSpec,
    *,
    rowwise: bool,
    columnwise: bool,
    stacked: bool = False,
    splits: Splits | None = None,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
    row_of: Tensor | None = None,
) -> Copies:
    """`cast` of such a spec on any device: tests bring CPU tensors, under the interpreter."""
    assert scale is None and amax_out is None, "each row has a scale of its own"
    rule, element = spec.scale_rule, spec.element
    assert isinstance(rule, Float32Scale) and isinstance(element, Float8Format), "`KERNELS` names what is cast here"
    x_GTK = matrices(x, stacked)
    copies = empty_copies(
        shape_of(x, row_of), spec, x.device, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits
    )
    if is_abstract(x):
        return copies
    form = {"POWER_2": rule.power_2, **format_of(element, x.device)}
    if columnwise or x.shape[-1] > MOST_COLUMNS:
        _cast_both(x_GTK, row_of, copies, splits, rule.amax_epsilon, form)
    else:
        _cast_whole_rows(x_GTK, row_of, copies, splits, rule.amax_epsilon, form)
    return copies


def dequantize_float8_rowwise_on_triton(
    codes: Tensor,
    scale: Tensor,
    spec: ScaleSpec,
    dtype: torch.dtype,
    *,
    columnwise: bool,
    shape: torch.Size,
    splits: Splits | None = None,
) -> Tensor:
    """`dequantize` of such a spec on any device, as above."""
    codes, scale, out = codes.contiguous(), scale.contiguous(), empty_values(shape, dtype, codes.device)
    if not has_work(out):
        return out.to(dtype)
    stacked = scale.ndim == 3
    out_GTK = out.view(shape if stacked else (1, math.prod(shape[:-1]), shape[-1]))
    groups, rows, columns = out_GTK.shape
    given = as_words(codes) if columnwise else codes.view(torch.uint8)
    offsets = None if splits is None else splits.offsets
    aligned = None if splits is None or not columnwise else splits.aligned(BLOCK)
    config = cast_float8_config(columns)
    _dequantize(
        codes, num_row_tiles(groups, rows, offsets, config.block_m, 0) * cdiv(columns, config.block_k),
        given, scale, out_GTK, offsets, aligned, rows, columns, codes.shape[-1],
        groups if splits is None else splits.num_groups,
        COLUMNWISE=columnwise, PACKED=has_words(given), **format_of(codes.dtype, codes.device),
        BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip
    return out.to(dtype)


def _cast_both(
    x_GTK: Tensor,
    row_of: Tensor | None,
    copies: Copies,
    splits: Splits | None,
    amax_epsilon: float,
    form: dict[str, bool | str],
) -> None:
    """Launch: amaxes of contiguous x, then the copies that there are."""
    groups, rows, columns = x_GTK.shape
    rows = rows if row_of is None else row_of.shape[0]
    offsets, aligned = (None, None) if splits is None else (splits.offsets, splits.aligned(BLOCK))
    num_groups = groups if splits is None else splits.num_groups
    row_codes, row_scale, column_codes, column_scale = copies
    usual = rows if splits is None else usual_rows(rows, num_groups)
    most = None
    if row_of is None and meets_in_gluon(x_GTK, column_codes):
        most = rows_that_meet(x_GTK, columns, GLUON_TILE, usual)
    # In one memory, so that one launch makes them 0; the rows' begin at a multiple of 16 bytes, as a rule.
    num_columns, num_rows = (0 if scale is None else scale.numel() for scale in (column_scale, row_scale))
    sizes = 0 if most is None else num_groups * WORDS, num_columns, num_rows
    memory = torch.zeros(sum(sizes), dtype=torch.int32, device=x_GTK.device).split(sizes)
    meetings, column_amax, row_amax = (
        None if found is None else part for found, part in zip((memory, column_scale, row_scale), memory, strict=True)
    )
    if groups * rows * columns and (most is None or (splits is not None and rows > most)):
        config = amaxes_config(x_GTK)
        tiles = num_row_tiles(groups, rows, offsets, config.block_m, 0) * cdiv(columns, config.block_k)
        _amaxes(
            x_GTK, tiles if most is None else few_programs(x_GTK, tiles),
            x_GTK, row_of, row_amax, column_amax, offsets, rows, columns, num_groups, tiles, most or 0,
            LARGE=most is not None, BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
        )  # fmt: skip
    width = 0 if column_codes is None else column_codes.shape[-1]
    if most is not None:
        tiles = num_row_tiles(groups, rows, offsets, GLUON_TILE.block_m, BLOCK) * cdiv(columns, GLUON_TILE.block_k)
        _cast_vectors(
            x_GTK, tiles, boxes_of(x_GTK, *GLUON_BOX),
            *(None if codes is None else codes.view(torch.int32) for codes in (row_codes, column_codes)),
            row_scale, column_scale, meetings, row_amax, column_amax, offsets, aligned,
            rows, columns, width, num_groups, most, FORM=form["FORM"], RULE=(form["POWER_2"], amax_epsilon),
            num_warps=GLUON_TILE.num_warps, maxnreg=GLUON_TILE.registers,
        )  # fmt: skip
        return
    config = cast_float8_config(columns)
    slots = num_row_tiles(groups, rows, offsets, config.block_m, BLOCK) if columns else 0
    words = None if column_codes is None else as_words(column_codes)
    _cast_rowwise(
        x_GTK, max(1, slots * cdiv(columns, config.block_k)),  # one at least: programs write the scales, too
        x_GTK, row_of, as_bytes(row_codes), words, row_scale, column_scale,
        *(None if part is None else part.view(torch.float32) for part in (row_amax, column_amax)),
        offsets, aligned, rows, columns, width, num_groups, slots, num_rows, num_columns, amax_epsilon,
        PACKED=has_words(words), **form, BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip


def _cast_whole_rows(
    x_GTK: Tensor,
    row_of: Tensor | None,
    copies: Copies,
    splits: Splits | None,
    amax_epsilon: float,
    form: dict[str, bool | str],
) -> None:
    """Launch: the rowwise copy of contiguous x."""
    rows, columns = math.prod(x_GTK.shape[:-1]) if row_of is None else row_of.shape[0], x_GTK.shape[-1]
    config = cast_rows_config(columns)
    if rows:
        _cast_rows(
            x_GTK, cdiv(rows, config.block_m),
            x_GTK, row_of, as_bytes(copies.row_codes), copies.row_scale, None if splits is None else splits.offsets,
            rows, columns, 0 if splits is None else splits.num_groups, amax_epsilon,
            **form, BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
        )  # fmt: skip
