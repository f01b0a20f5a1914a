"""The launches that quantize to E4M3 or E5M2 with one float32 scale for each tensor or group, and dequantize.

What is computed: `cast.py`, with the block (ALL, ALL), a `Float32Scale` or `GivenScale` and a transposed columnwise
copy. Of a scale that is given the amaxes are found in the same read of x.

One Triton kernel casts both copies in one pass, and finds the amaxes of groups whose programs fit on the GPU at once:
they meet (`recipes.triton.meeting`). Those of larger ones are found before (a maximum does not depend on the order, so
atomics do no harm). On Hopper, in bfloat16, groups of all sizes meet, in a kernel in Gluon. Nothing is read from the
device on the host. Source: TransformerEngine's Float8CurrentScaling and DelayedScaling (read at d0067d0).
"""

# T rows, G groups, N rows of a weight, K columns

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from recipes.casts.cast_float8_triton import (
    amax_kernel,
    cast_float8_kernel,
    cast_large_groups_kernel,
    dequantize_codes_kernel,
    row_amax_kernel,
    transpose_back_kernel,
)
from recipes.casts.layout import (
    Copies,
    as_bytes,
    as_words,
    empty_copies,
    empty_values,
    has_words,
    matrices,
    num_rows,
    shape_of,
)
from recipes.casts.scale_rules import Float32Scale
from recipes.tensors.abstract import is_abstract
from recipes.tensors.formats import ALL, E4M3, E5M2, Float8Format, ScaleSpec
from recipes.tensors.splits import Splits
from recipes.triton.gates import INTERPRET, why_no_gluon
from recipes.triton.launch import Launch, cdiv, has_work, next_power_of_2, properties, runs_gluon
from recipes.triton.meeting import MeetingTile, empty_meetings, most_programs, most_rows
from recipes.triton.row_slots import num_slots

if why_no_gluon((9, 0)) is None:
    from recipes.casts.boxes_gluon import boxes_of
    from recipes.casts.cast_float8_gluon import cast_float8_gluon_kernel

    _cast_float8_gluon = Launch(cast_float8_gluon_kernel)

# Groups begin at multiples of it in column_codes: whole sectors of memory. Of 16, wgrad takes 1.3 times as long (H200).
BLOCK = 32

DEQUANTIZE_BLOCK = 4096

USUAL = 1.25  # rows of a usual group, over the mean
MOST_TILES = 4  # of a program of a usual group, where those of all groups wait for each other


# -------------------------------------------------------------------------------------------------------------- config


class CastFloat8Config(NamedTuple):
    """Tile of a program."""

    block_m: int
    block_k: int
    num_warps: int


def amax_config() -> CastFloat8Config:
    """Measured on H200."""
    return CastFloat8Config(block_m=64, block_k=256, num_warps=8)


# Of the amaxes of rows, of which there is one column.
AMAX_OF_ROWS = CastFloat8Config(block_m=256, block_k=1, num_warps=4)


def row_amax_config(columns: int) -> CastFloat8Config:
    return CastFloat8Config(block_m=4, block_k=min(1024, max(16, next_power_of_2(columns))), num_warps=4)


def cast_float8_config(columns: int) -> CastFloat8Config:
    """Measured on H200. block_m is a multiple of BLOCK, so that tiles begin at multiples of it.

    Low tiles, since the last one of each group is rarely full.
    """
    if columns % 16:  # each element has an address of its own, which takes registers
        return CastFloat8Config(block_m=128, block_k=32, num_warps=8)
    return CastFloat8Config(block_m=64, block_k=128, num_warps=4)


def meeting_tile(columns: int) -> MeetingTile:
    """Measured on an H100."""
    if columns % 256 == 0 or columns > 4096:
        return MeetingTile(block_m=64, block_k=256, num_warps=8, registers=80)
    return MeetingTile(block_m=64, block_k=128, num_warps=4, registers=80)


# Of the kernel in Gluon, measured on an H100: six programs share a multiprocessor, by registers and shared memory.
GLUON_TILE = MeetingTile(block_m=64, block_k=256, num_warps=4, registers=80)
GLUON_BOX = (64, 128)  # rows and columns, of which the copy engine brings two a tile


def transpose_back_config(columns: int) -> CastFloat8Config:
    """Measured on H200."""
    config = cast_float8_config(columns)
    return config if columns % 16 else CastFloat8Config(block_m=256, block_k=64, num_warps=8)


# ----------------------------------------------------------------------------------------------------------- launchers

_amax, _row_amax, _cast_float8 = Launch(amax_kernel), Launch(row_amax_kernel), Launch(cast_float8_kernel)
_cast_large_groups = Launch(cast_large_groups_kernel)
_dequantize_codes, _transpose_back = Launch(dequantize_codes_kernel), Launch(transpose_back_kernel)


def cast_float8_on_triton(
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
    rule, form = spec.scale_rule, spec.element
    assert isinstance(rule, Float32Scale) and isinstance(form, Float8Format), "`KERNELS` names what is cast here"
    x_GTK = matrices(x, stacked)
    offsets, aligned = (None, None) if splits is None else (splits.offsets, splits.aligned(BLOCK))
    copies = empty_copies(
        shape_of(x, row_of), spec, x.device, rowwise=rowwise, columnwise=columnwise, stacked=stacked, splits=splits
    )
    if scale is None:
        find_and_cast(x_GTK, copies, spec, offsets, aligned, row_of)
    else:
        cast_float8_triton(
            x_GTK, *_codes_and_scale(copies), scale, amax_out, offsets, aligned, form, "scale", False, 0.0, 0, row_of
        )
    return copies


def finds_amaxes(spec: ScaleSpec) -> bool:
    """Whether scales of this format follow from amaxes that another kernel may find."""
    rule = spec.scale_rule
    layout = spec.block, spec.columnwise, spec.alignment, spec.transform
    return type(rule) is Float32Scale and not rule.input_range and layout == ((ALL, ALL), "transposed", BLOCK, None)


def find_and_cast(
    x_GTK: Tensor,
    copies: Copies,
    spec: ScaleSpec,
    offsets: Tensor | None,
    aligned: Tensor | None,
    row_of: Tensor | None = None,
) -> None:
    """Fill `copies` of contiguous x with scales that follow from its amaxes.

    With row_of each row of x is read for its own amax once, and the groups' follow from these.
    """
    rule, groups = spec.scale_rule, len(x_GTK) if offsets is None else len(offsets) - 1
    assert isinstance(rule, Float32Scale) and isinstance(spec.element, Float8Format), "`cast_float8_on_triton`"
    if is_abstract(x_GTK):
        return
    meetings = empty_meetings(groups, x_GTK.device)
    rows, columns = len(x_GTK) * x_GTK.shape[1], x_GTK.shape[2]
    most = None
    if row_of is not None:
        amax_triton(row_amax_triton(x_GTK), meetings, offsets, row_of=row_of)
    elif meets_in_gluon(x_GTK, copies.column_codes) and all_meet(x_GTK, rows, columns, groups, GLUON_TILE):
        _cast_at_meetings(x_GTK, copies, spec.element, meetings, offsets, aligned, rule)
        return
    else:
        most = _find_amaxes(x_GTK, copies, meetings, offsets)
    cast_float8_triton(
        x_GTK, *_codes_and_scale(copies), meetings, None, offsets, aligned, spec.element,
        "amax" if most is None else "meeting", rule.power_2, rule.amax_epsilon, most or 0, row_of,
    )  # fmt: skip


def _find_amaxes(x_GTK: Tensor, copies: Copies, meetings: Tensor, offsets: Tensor | None) -> int | None:
    """Launch what finds the amaxes of groups that do not meet. Returns up to how many rows groups meet; None: no."""
    _, rows, columns = x_GTK.shape
    usual = rows if offsets is None else usual_rows(rows, len(offsets) - 1)
    in_words = copies.column_codes is None or copies.column_codes.shape[-1] % 4 == 0
    most = rows_that_meet(x_GTK, columns, meeting_tile(columns), usual) if in_words else None
    if most is None or (offsets is not None and rows > most):
        amax_triton(x_GTK, meetings, offsets, most)
    return most


def all_meet(x: Tensor, rows: int, columns: int, groups: int, tile: MeetingTile) -> bool:
    """Whether groups of so many rows in all meet, of any size, in a kernel whose programs take several tiles of a large
    one, which they read twice. Where most groups are so large, or a large one is alone, half of the GPU would wait:
    two launches are faster (`bench/results/tuning.md`)."""
    programs = most_programs(x, tile)
    tiles = cdiv(rows, tile.block_m) * cdiv(columns, tile.block_k)
    return tiles <= (programs if groups == 1 else MOST_TILES * programs * groups)


class ProgramsOfGroups(NamedTuple):
    """Among which `share_of_group` shares the tiles of a group: one program for 2^log2_rows rows and block of columns,
    but at most `most`; and how many are launched."""

    launched: int
    most: int
    log2_rows: int


def programs_of_groups(
    x: Tensor, rows: int, columns: int, offsets: Tensor, tile: MeetingTile, meets: bool
) -> ProgramsOfGroups:
    """For rows in groups; without meetings each tile has a program."""
    groups, across, most = len(offsets) - 1, cdiv(columns, tile.block_k), 2**31 - 1
    tiles = 1  # of a program of a usual group
    if meets:
        most = most_programs(x, tile)
        tiles = max(1, rows * across // (tile.block_m * groups * most))
    log2_rows = (tile.block_m * tiles).bit_length() - 1
    return ProgramsOfGroups(num_row_tiles(1, rows, offsets, 1 << log2_rows, BLOCK) * across, most, log2_rows)


def _cast_at_meetings(
    x_GTK: Tensor,
    copies: Copies,
    form: Float8Format,
    meetings: Tensor,
    offsets: Tensor | None,
    aligned: Tensor | None,
    rule: Float32Scale,
) -> None:
    """Launch: amaxes and cast of contiguous x, as for `cast_float8_triton`, at these meetings."""
    groups, rows, columns = x_GTK.shape
    if offsets is None:
        programs = most_programs(x_GTK, GLUON_TILE)
        tiles = cdiv(rows, GLUON_TILE.block_m) * cdiv(columns, GLUON_TILE.block_k)
        found = ProgramsOfGroups(groups * min(tiles, programs), programs, 0)
    else:
        groups = len(offsets) - 1
        found = programs_of_groups(x_GTK, rows, columns, offsets, GLUON_TILE, True)
    row_codes, column_codes, scale_inv = _codes_and_scale(copies)
    words = (None if codes is None else codes.view(torch.int32) for codes in (row_codes, column_codes))
    _cast_float8_gluon(
        x_GTK, found.launched,
        boxes_of(x_GTK, *GLUON_BOX), x_GTK.view(torch.int32), *words, scale_inv, meetings,
        offsets, aligned, rows, columns, 0 if column_codes is None else column_codes.shape[-1], groups,
        found.most, found.log2_rows,
        FORM=format_of(form, x_GTK.device)["FORM"], RULE=(rule.power_2, rule.amax_epsilon),
        num_warps=GLUON_TILE.num_warps, maxnreg=GLUON_TILE.registers,
    )  # fmt: skip


def cast_from_meetings(
    x_TK: Tensor, copies: Copies, spec: ScaleSpec, meetings: Tensor, splits: Splits, most: int | None = None
) -> None:
    """Fill `copies` of rows in groups, as `cast` of such a spec, with amaxes that are known: of all groups, or of those
    with more than `most` rows."""
    rule, form = spec.scale_rule, spec.element
    assert isinstance(rule, Float32Scale) and isinstance(form, Float8Format), "`finds_amaxes`"
    cast_float8_triton(
        matrices(x_TK, False), *_codes_and_scale(copies), meetings, None, splits.offsets, splits.aligned(BLOCK), form,
        "amax" if most is None else "large", rule.power_2, rule.amax_epsilon, most or 0,
    )  # fmt: skip


def rows_that_meet(x: Tensor, columns: int, tile: MeetingTile, usual: float) -> int | None:
    """Up to how many rows, of so many columns, a group's programs find its amax at a meeting; None: `usual` is more,
    or what they compute from x does not wait in registers: it has to be of 16 bits and cast by the GPU itself, and
    columns be a multiple of 16, for else addresses take registers."""
    if INTERPRET or not columns or columns % 16 or x.dtype not in (torch.bfloat16, torch.float16):
        return None
    if is_abstract(x) or not casts_natively(x.device):
        return None
    most = most_rows(x, columns, tile)
    return most if usual <= most else None


def usual_rows(rows: int, groups: int) -> float:
    """Of random routing few groups have more."""
    return rows * USUAL / groups


def _codes_and_scale(copies: Copies) -> tuple[Tensor | None, Tensor | None, Tensor]:
    scale_inv = copies.row_scale if copies.row_scale is not None else copies.column_scale
    assert scale_inv is not None, "one copy at least is made"
    return copies.row_codes, copies.column_codes, scale_inv


def dequantize_float8_on_triton(
    codes: Tensor,
    scale: Tensor,
    spec: ScaleSpec,
    dtype: torch.dtype,
    *,
    columnwise: bool,
    shape: torch.Size,
    splits: Splits | None = None,
) -> Tensor:
    """`dequantize` of such a spec on any device, as above: the numbers that codes stand for, without the scale."""
    return (
        transpose_back_on_triton(codes, dtype, shape, splits)
        if columnwise
        else dequantize_codes_on_triton(codes, dtype)
    )


def dequantize_codes_on_triton(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """`codes.to(dtype)`. On an H200 torch's own conversion reaches a quarter of copy bandwidth."""
    codes, out = codes.contiguous(), empty_values(codes.shape, dtype, codes.device)
    if has_work(codes):
        _dequantize_codes(
            codes,
            cdiv(codes.numel(), DEQUANTIZE_BLOCK),
            codes.view(torch.uint8),
            out,
            codes.numel(),
            **format_of(codes.dtype, codes.device),
            BLOCK=DEQUANTIZE_BLOCK,
        )
    return out.to(dtype)


def transpose_back_on_triton(
    codes: Tensor, dtype: torch.dtype, shape: torch.Size, splits: Splits | None = None
) -> Tensor:
    """The numbers of column_codes, of this shape in the natural order, exact."""
    out = empty_values(shape, dtype, codes.device)
    transpose_back_triton(
        codes.contiguous(),
        out.view(shape if codes.ndim == 3 else (1, num_rows(out), shape[-1])),
        None if splits is None else splits.offsets,
        None if splits is None else splits.aligned(BLOCK),
    )
    return out.to(dtype)


def row_amax_triton(x_GTK: Tensor) -> Tensor:
    """Launch: the amaxes of the rows of contiguous x [1, T, K], [1, T, 1] in float32."""
    _, rows, columns = x_GTK.shape
    amaxes = torch.empty(1, rows, 1, dtype=torch.float32, device=x_GTK.device)
    if has_work(amaxes):
        config = row_amax_config(columns)
        _row_amax(
            x_GTK, cdiv(rows, config.block_m),
            x_GTK, amaxes, rows, columns,
            BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
        )  # fmt: skip
    return amaxes


def amax_triton(
    x_GTK: Tensor, meetings: Tensor, offsets: Tensor | None, most: int | None = None, row_of: Tensor | None = None
) -> None:
    """Launch: the amaxes of contiguous x, as for `cast_float8_triton`, raise those of `meetings`: of all groups, or of
    those with more than `most` rows. row_of: x is [1, S, 1], and this its row that each row of the groups is"""
    groups, rows, columns = x_GTK.shape
    rows = rows if row_of is None else row_of.shape[0]
    if not has_work(x_GTK if row_of is None else row_of):
        return
    config = amax_config() if row_of is None else AMAX_OF_ROWS
    tiles = num_row_tiles(groups, rows, offsets, config.block_m, 0) * cdiv(columns, config.block_k)
    _amax(
        x_GTK, tiles if most is None else few_programs(x_GTK, tiles),
        x_GTK, row_of, meetings, offsets,
        rows, columns, groups if offsets is None else len(offsets) - 1, tiles, most or 0,
        LARGE=most is not None, BLOCK_M=config.block_m, BLOCK_K=config.block_k, num_warps=config.num_warps,
    )  # fmt: skip


def cast_float8_triton(
    x_GTK: Tensor,
    row_codes: Tensor | None,
    column_codes: Tensor | None,
    scale_inv: Tensor,
    given: Tensor,
    amax_out: Tensor | None,
    offsets: Tensor | None,
    aligned: Tensor | None,
    form: Float8Format,
    how: str,
    power_2_scale: bool,
    amax_epsilon: float,
    most: int = 0,
    row_of: Tensor | None = None,
) -> None:
    """Launch the cast of contiguous x: [1, T, K], or [G, N, K] whose groups are of one size. All tensors contiguous.

    row_of: which row of x [1, S, K] each row is, [T] int64; not "large", nor at meetings

    how, and what is given for n groups:

        "scale"     scales [n] float32
        "amax"      meetings whose amaxes are known
        "large"     the same, to cast groups with more than `most` rows and leave the others alone
        "meeting"   meetings, at which groups of at most `most` rows find their amaxes; those of others are known
    """
    if is_abstract(x_GTK):
        return
    groups, rows, columns = x_GTK.shape
    num_groups = groups if offsets is None else len(offsets) - 1
    width = 0 if column_codes is None else column_codes.shape[-1]
    rows = rows if row_of is None else row_of.shape[0]
    meets = how == "meeting"
    config = meeting_tile(columns) if meets else cast_float8_config(columns)
    slots = num_row_tiles(groups, rows, offsets, config.block_m, BLOCK) if columns else 0
    tiles = slots * cdiv(columns, config.block_k)
    words = None if column_codes is None else as_words(column_codes)
    constants = {"POWER_2": power_2_scale, "PACKED": has_words(words), **format_of(form, x_GTK.device)}
    tile = {"BLOCK_M": config.block_m, "BLOCK_K": config.block_k, "num_warps": config.num_warps}
    if how == "large":
        _cast_large_groups(
            x_GTK, few_programs(x_GTK, tiles),
            x_GTK, as_bytes(row_codes), words, scale_inv, given, offsets, aligned,
            rows, columns, width, num_groups, tiles, most, amax_epsilon, **constants, **tile,
        )  # fmt: skip
        return
    _cast_float8(
        x_GTK, max(1, tiles),  # one program at least, which stores scale_inv
        x_GTK, row_of, as_bytes(row_codes), words, scale_inv, given,
        None if amax_out is None else amax_out.view(torch.int32), offsets, aligned,
        rows, columns, width, num_groups, slots, most, amax_epsilon,
        GIVEN=how, **constants, **tile, **({"maxnreg": meeting_tile(columns).registers} if meets else {}),
    )  # fmt: skip


def meets_in_gluon(x_GTK: Tensor, column_codes: Tensor | None) -> bool:
    """Whether the kernel in Gluon casts x at meetings: bfloat16 on Hopper, whole units of codes, and what the copy
    engine reads."""
    if x_GTK.dtype != torch.bfloat16 or torch.compiler.is_dynamo_compiling() or not runs_gluon(x_GTK.device):
        return False
    if not has_work(x_GTK) or x_GTK.shape[2] % 16 or x_GTK.data_ptr() % 16:
        return False
    return column_codes is None or column_codes.shape[-1] % BLOCK == 0


def few_programs(x: Tensor, tiles: int) -> int:
    """Of a launch over large groups, whose programs take several tiles each: mostly there are none."""
    return max(1, min(tiles, 8 * properties(x.get_device()).multi_processor_count if x.is_cuda else 4))


def transpose_back_triton(codes: Tensor, out_GTK: Tensor, offsets: Tensor | None, aligned: Tensor | None) -> None:
    """Launch: values of column_codes into out: [1, T, K] or [G, N, K]. All tensors contiguous."""
    groups, rows, columns = out_GTK.shape
    if not has_work(out_GTK):
        return
    config = transpose_back_config(columns)
    words = as_words(codes)
    programs = num_row_tiles(groups, rows, offsets, config.block_m, 0) * cdiv(columns, config.block_k)
    _transpose_back(
        codes, programs,
        words, out_GTK, offsets, aligned,
        rows, columns, codes.shape[-1], groups if offsets is None else len(offsets) - 1,
        PACKED=has_words(words), **format_of(codes.dtype, codes.device), BLOCK_M=config.block_m, BLOCK_K=config.block_k,
        num_warps=config.num_warps,
    )  # fmt: skip


def format_of(form: Float8Format | torch.dtype, device: torch.device) -> dict[str, bool | str]:
    """FORM and NATIVE of `float8_codes` for codes of this format; to read them their dtype is enough."""
    dtype = form if isinstance(form, torch.dtype) else form.dtype
    known = E4M3 if dtype == E4M3.dtype else E5M2
    own = "" if isinstance(form, torch.dtype) or form.max == known.max else f" {float(form.max)!r}"
    return {"FORM": known.name + own, "NATIVE": casts_natively(device)}


def casts_natively(device: torch.device) -> bool:
    """Whether the GPU converts to float8 itself."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def num_row_tiles(groups: int, rows: int, offsets: Tensor | None, block_m: int, padding: int) -> int:
    """How many row tiles of all matrices there can be; each group's rows are padded by less than `padding`."""
    if offsets is None:
        return groups * cdiv(rows, block_m)
    num_groups = len(offsets) - 1
    return num_slots(rows + padding * num_groups, num_groups, block_m)
