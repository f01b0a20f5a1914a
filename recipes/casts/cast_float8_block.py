"""The launches that quantize to E4M3 or E5M2 with one float32 scale for each 1x128 or 128x128 values, and dequantize.

What is computed: `cast.py`, with these blocks, a `Float32Scale` and a transposed columnwise copy. One Triton kernel
casts both copies in one pass; it reads nothing from the device on the host. Source: TransformerEngine's
Float8BlockScaling (read at d0067d0).
"""

# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast_float8 import format_of
from recipes.casts.cast_float8_block_triton import cast_float8_block_kernel, dequantize_float8_block_kernel
from recipes.casts.layout import Copies, empty_copies, is_square, matrices, num_rows
from recipes.casts.scale_rules import Float32Scale
from recipes.tensors.formats import Float8Format, ScaleSpec
from recipes.tensors.splits import Splits
from recipes.triton.launch import Launch, cdiv

BLOCK = 128
DEQUANTIZE_WARPS = 8  # measured on H200


# -------------------------------------------------------------------------------------------------------------- config


class CastConfig(NamedTuple):
    """registers: the most that a thread may have; None leaves it to the compiler."""

    num_warps: int
    registers: int | None


def cast_config(itemsize: int, native: bool) -> CastConfig:
    """For a tile of 128x128 values, which hold whole blocks in both directions. Warps are measured on H200.

    Eight warps have all they need with 168 registers; left alone, ptxas 12.8 spills to run two programs at once.
    native: the GPU converts to float8 itself; in integers that takes more.
    """
    if itemsize <= 2:
        return CastConfig(num_warps=4, registers=None)
    return CastConfig(num_warps=8, registers=168 if native else None)


# ----------------------------------------------------------------------------------------------------------- launchers

_cast_float8_block = Launch(cast_float8_block_kernel)
_dequantize_float8_block = Launch(dequantize_float8_block_kernel)


def cast_float8_block_on_triton(
    x: Tensor,
    spec: ScaleSpec,
    *,
    rowwise: bool,
    columnwise: bool,
    stacked: bool = False,
    splits: Splits | None = None,
    scale: Tensor | None = None,
    amax_out: Tensor | None = None,
) -> Copies:
    """`cast` of such a spec on any device: tests bring CPU tensors, under the interpreter.

    Rows of no multiple of 16 values are cast with zeros behind them: the compiler knows of no other multiple, and a
    tile that is read value by value does not fit into the registers.
    """
    assert scale is None and amax_out is None, "each block has a scale of its own"
    wanted: dict[str, Any] = {"rowwise": rowwise, "columnwise": columnwise, "stacked": stacked, "splits": splits}
    beyond = -x.shape[-1] % 16
    if beyond:
        wide = torch.nn.functional.pad(x, (0, beyond))
        return _first_columns(cast_float8_block_on_triton(wide, spec, **wanted), x.shape[-1], spec)
    copies = empty_copies(x.shape, spec, x.device, **wanted)
    cast_float8_block_triton(
        matrices(x, stacked),
        *copies,
        None if splits is None else splits.offsets,
        None if splits is None else splits.aligned(BLOCK),
        spec,
    )
    return copies


def dequantize_float8_block_on_triton(
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
    narrow = torch.float32 if dtype == torch.float64 else dtype
    out = torch.empty(shape, dtype=narrow, device=codes.device)
    dequantize_float8_block_triton(
        codes.contiguous(),
        scale.contiguous(),
        out.view(shape if scale.ndim == 3 else (1, num_rows(out), shape[-1])),
        None if splits is None else splits.offsets,
        None if splits is None else splits.aligned(BLOCK),
        is_square(spec),
        columnwise,
    )
    return out.to(dtype)


def cast_float8_block_triton(
    x_GTK: Tensor,
    row_codes: Tensor | None,
    row_scale_inv: Tensor | None,
    column_codes: Tensor | None,
    column_scale_inv: Tensor | None,
    offsets: Tensor | None,
    aligned: Tensor | None,
    spec: ScaleSpec,
) -> None:
    """Launch the cast of contiguous x: [1, T, K], or [G, N, K] whose groups are of one size. All tensors contiguous."""
    codes = row_codes if row_codes is not None else column_codes
    if codes is None or not x_GTK.shape[0] * x_GTK.shape[2]:
        return
    rule, element = spec.scale_rule, spec.element
    assert isinstance(rule, Float32Scale) and isinstance(element, Float8Format), "`KERNELS` names what is cast here"
    groups, rows, columns = x_GTK.shape
    transposed = None if column_codes is None else _words(column_codes)
    form = format_of(element, codes.device)
    config = cast_config(x_GTK.element_size(), bool(form["NATIVE"]))
    row_blocks = _row_blocks(rows, offsets)
    programs = groups * (row_blocks + (offsets is not None)) * cdiv(columns, BLOCK)
    if not programs:
        return
    _cast_float8_block(
        x_GTK, programs,
        x_GTK, _bytes(row_codes), row_scale_inv, transposed, column_scale_inv, offsets, aligned,
        rows, columns, 0 if transposed is None else transposed.shape[-1], row_blocks,
        0 if offsets is None else len(offsets) - 1, rule.amax_epsilon,
        SQUARE=is_square(spec), POWER_2=rule.power_2, LARGEST=rule.largest(x_GTK.dtype), PACKED=_packed(transposed),
        **form, num_warps=config.num_warps, maxnreg=config.registers,
    )  # fmt: skip


def dequantize_float8_block_triton(
    codes: Tensor,
    scale_inv: Tensor,
    out_GTK: Tensor,
    offsets: Tensor | None,
    aligned: Tensor | None,
    square: bool,
    transposed: bool,
) -> None:
    """Launch the dequantization into out: [1, T, K] or [G, N, K]. All tensors contiguous."""
    groups, rows, columns = out_GTK.shape
    given = _words(codes) if transposed else codes.view(torch.uint8)
    row_blocks = _row_blocks(rows, offsets)
    programs = groups * (row_blocks + (offsets is not None)) * cdiv(columns, BLOCK)
    if not out_GTK.numel():
        return
    _dequantize_float8_block(
        codes, programs,
        given, scale_inv, out_GTK, offsets, aligned,
        rows, columns, given.shape[-1], row_blocks, 0 if offsets is None else len(offsets) - 1,
        SQUARE=square, TRANSPOSED=transposed, PACKED=_packed(given),
        **format_of(codes.dtype, codes.device), num_warps=DEQUANTIZE_WARPS,
    )  # fmt: skip


def _first_columns(copies: Copies, columns: int, spec: ScaleSpec) -> Copies:
    """Copies of the first columns of what was cast, which end in the same block."""
    row_codes, row_scale_inv, column_codes, column_scale_inv = copies
    if row_codes is not None:
        row_codes = row_codes[..., :columns].contiguous()
    if column_codes is not None and column_scale_inv is not None:
        column_codes = column_codes[..., :columns, :].contiguous()
        column_scale_inv = column_scale_inv if is_square(spec) else column_scale_inv[..., :columns].contiguous()
    return Copies(row_codes, row_scale_inv, column_codes, column_scale_inv)


def _bytes(codes: Tensor | None) -> Tensor | None:
    return None if codes is None else codes.view(torch.uint8)


def _words(codes: Tensor) -> Tensor:
    """Four codes at a time, where the rows allow it; else bytes."""
    return codes.view(torch.uint8 if codes.shape[-1] % 4 or not codes.numel() else torch.int32)


def _packed(codes: Tensor | None) -> bool:
    return codes is not None and codes.dtype == torch.int32


def _row_blocks(rows: int, offsets: Tensor | None) -> int:
    """How many blocks of 128 rows there can be, those of unknown groups included."""
    return cdiv(rows, BLOCK) if offsets is None else (rows + (len(offsets) - 1) * (BLOCK - 1)) // BLOCK
