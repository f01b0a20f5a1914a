"""The launches that quantize to E4M3 or E5M2 with one scale for each block of values, and dequantize.

What is computed: `cast.py`, of these specs:

    scale rule     blocks           columnwise   source
    Float32Scale   1x128, 128x128   transposed   TransformerEngine's Float8BlockScaling (read at d0067d0)
    E8M0Scale      1x32, 32x32      natural      OCP Microscaling Formats v1.0 (MXFP8)

Each has its kernels. One kernel makes both copies in one pass; it reads nothing from the device on the host.
"""

# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast_float8 import format_of
from recipes.casts.cast_float8_block_triton import cast_float8_block_kernel, dequantize_float8_block_kernel
from recipes.casts.cast_mxfp8_triton import cast_mxfp8_kernel, dequantize_mxfp8_kernel
from recipes.casts.layout import (
    Copies,
    as_bytes,
    as_words,
    empty_copies,
    empty_values,
    has_words,
    is_square,
    matrices,
    num_rows,
    shape_of,
)
from recipes.casts.scale_rules import E8M0Scale, Float32Scale
from recipes.tensors.abstract import is_abstract
from recipes.tensors.formats import Float8Format, ScaleSpec
from recipes.tensors.splits import Splits
from recipes.triton.launch import Launch, cdiv, has_work

# -------------------------------------------------------------------------------------------------------------- config


class BlockConfig(NamedTuple):
    """A program has the rows of one block and block_k columns.

    registers: the most that a thread may have; None leaves it to the compiler
    """

    block_k: int
    num_warps: int
    registers: int | None = None


def cast_float8_block_config(itemsize: int, native: bool) -> BlockConfig:
    """A tile of 128x128 values holds whole blocks in both directions. Warps are measured on H200.

    Eight warps have all they need with 168 registers; left alone, ptxas 12.8 spills to run two programs at once.
    native: the GPU converts to float8 itself; in integers that takes more.
    """
    if itemsize <= 2:
        return BlockConfig(block_k=128, num_warps=4)
    return BlockConfig(block_k=128, num_warps=8, registers=168 if native else None)


def cast_mxfp8_config(columns: int, *, both: bool) -> BlockConfig:
    """Measured on H200. both: whether two copies are made, whose columns take registers."""
    if columns % 16:  # each element has an address of its own, which takes more
        return BlockConfig(block_k=64, num_warps=4)
    return BlockConfig(block_k=128, num_warps=2 if both else 1)


DEQUANTIZE_FLOAT8_BLOCK = BlockConfig(block_k=128, num_warps=8)  # measured on H200
DEQUANTIZE_MXFP8 = BlockConfig(block_k=256, num_warps=4)  # measured on H200


# ----------------------------------------------------------------------------------------------------------- launchers

_cast_float8_block, _dequantize_float8_block = Launch(cast_float8_block_kernel), Launch(dequantize_float8_block_kernel)
_cast_mxfp8, _dequantize_mxfp8 = Launch(cast_mxfp8_kernel), Launch(dequantize_mxfp8_kernel)


def cast_blocks_on_triton(
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
    row_values: torch.dtype | None = None,
    column_values: torch.dtype | None = None,
) -> Copies:
    """`cast` of such a spec on any device: tests bring CPU tensors, under the interpreter.

    row_values, column_values: of a copy in 1x32 blocks, the dtype of values that take the place of codes and scales,
    bit for bit as these are dequantized

    With float32 scales, rows of no multiple of 16 values are cast with zeros behind them: the compiler vectorizes for
    no other multiple, and a tile that is read value by value does not fit into the registers.
    """
    assert scale is None and amax_out is None, "each block has a scale of its own"
    options: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "stacked": stacked, "splits": splits}
    rule, element, square = spec.scale_rule, spec.element, is_square(spec)
    beyond = -x.shape[-1] % 16 if isinstance(rule, Float32Scale) else 0
    if beyond:
        wide = torch.nn.functional.pad(x, (0, beyond))
        return _first_columns(cast_blocks_on_triton(wide, spec, row_of=row_of, **options), x.shape[-1], square)
    shape = shape_of(x, row_of)
    x_GTK, copies = matrices(x, stacked), empty_copies(shape, spec, x.device, **options)
    if row_values is not None:
        copies = copies._replace(row_codes=torch.empty(shape, dtype=row_values, device=x.device), row_scale=None)
    if column_values is not None:
        values = torch.empty(shape, dtype=column_values, device=x.device)
        copies = copies._replace(column_codes=values, column_scale=None)
    row_codes, row_scale, column_codes, column_scale = copies
    assert isinstance(element, Float8Format), "`KERNELS` names what is cast here"
    form = format_of(element, x.device)
    own: tuple[float, ...] = ()  # arguments and constants of one kernel alone
    constants: dict[str, Any]
    if isinstance(rule, E8M0Scale):
        if square and rowwise and columnwise:  # both copies have the same codes
            copies, column_codes = copies._replace(column_codes=row_codes), None
        row_codes = row_codes if row_values else as_bytes(row_codes)
        column_codes = column_codes if column_values else as_bytes(column_codes)
        launch, config = _cast_mxfp8, cast_mxfp8_config(x.shape[-1], both=rowwise and columnwise)
        constants = {"FLOOR": rule.rounding == "floor", "BLOCK_K": config.block_k}
    else:
        assert isinstance(rule, Float32Scale), "`KERNELS` names what is cast here"
        row_codes, column_codes = as_bytes(row_codes), None if column_codes is None else as_words(column_codes)
        launch, config = _cast_float8_block, cast_float8_block_config(x.element_size(), bool(form["NATIVE"]))
        own = 0 if column_codes is None else column_codes.shape[-1], rule.amax_epsilon
        constants = {
            "POWER_2": rule.power_2, "LARGEST": rule.largest(x.dtype), "PACKED": has_words(column_codes)
        }  # fmt: skip
    of_rows = x_GTK.shape if row_of is None else torch.Size((1, *shape))
    programs, place = _tiles(of_rows, spec, config, splits)
    if not is_abstract(x) and programs:
        launch(
            x_GTK, programs,
            x_GTK, row_of, row_codes, row_scale, column_codes, column_scale, *place, *own,
            SQUARE=square, **constants, **form, num_warps=config.num_warps, maxnreg=config.registers,
        )  # fmt: skip
    return copies


def dequantize_blocks_on_triton(
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
    own: tuple[int, ...] = ()
    stacked = scale.ndim == 3
    if isinstance(spec.scale_rule, E8M0Scale):
        if not columnwise:  # all rows are one matrix: scales lie as they do, and codes past the sum are 0
            stacked, splits = False, None
        launch, config, given = _dequantize_mxfp8, DEQUANTIZE_MXFP8, codes.view(torch.uint8)
        constants = {"BLOCK_K": config.block_k}
    else:
        launch, config = _dequantize_float8_block, DEQUANTIZE_FLOAT8_BLOCK
        given = as_words(codes) if columnwise else codes.view(torch.uint8)
        own, constants = (given.shape[-1],), {"SQUARE": is_square(spec), "PACKED": has_words(given)}
    out_GTK = out.view(shape if stacked else (1, num_rows(out), shape[-1]))
    programs, place = _tiles(out_GTK.shape, spec, config, splits)
    launch(
        codes, programs,
        given, scale, out_GTK, *place, *own,
        COLUMNWISE=columnwise, **constants, **format_of(codes.dtype, codes.device), num_warps=config.num_warps,
    )  # fmt: skip
    return out.to(dtype)


def _tiles(
    shape_GTK: torch.Size, spec: ScaleSpec, config: BlockConfig, splits: Splits | None
) -> tuple[int, tuple[Tensor | int | None, ...]]:
    """How many programs there are, and the arguments by which they find their tiles; with splits one more behind the
    blocks that there can be, for the rows past the sum: `find_block`."""
    groups, rows, columns = shape_GTK
    block = max(spec.block)
    if splits is None:
        row_blocks = cdiv(rows, block)
        return groups * row_blocks * cdiv(columns, config.block_k), (None, None, rows, columns, row_blocks, 0)
    row_blocks = splits.aligned_capacity(block) // block
    place = splits.offsets, splits.aligned(block), rows, columns, row_blocks, splits.num_groups
    return (row_blocks + 1) * cdiv(columns, config.block_k), place


def _first_columns(copies: Copies, columns: int, square: bool) -> Copies:
    """Copies of the first columns of what was cast, which end in the same block."""
    row_codes, row_scale, column_codes, column_scale = copies
    if row_codes is not None:
        row_codes = row_codes[..., :columns].contiguous()
    if column_codes is not None and column_scale is not None:
        column_codes = column_codes[..., :columns, :].contiguous()
        column_scale = column_scale if square else column_scale[..., :columns].contiguous()
    return Copies(row_codes, row_scale, column_codes, column_scale)
