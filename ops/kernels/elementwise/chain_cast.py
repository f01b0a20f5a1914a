"""What the element-wise kernels quantize their result to, and the arguments that pass it to them.

MXFP8 and FP8 with one given scale are cast of whole matrices, both copies at once. Of rows in groups: FP8 with one
scale a group; FP8 with scales of 1x128 blocks or of rows, of which a tile holds all, the rowwise copy; MXFP8, as the
values that a product multiplies.
Scales of groups that follow from amaxes are

    known     amaxes found before: the kernel casts
    meeting   groups that are small enough find theirs at meetings (`recipes.triton.meeting`), and are cast; values of
              larger ones are stored and cast from memory
    amax      most groups are too large: the kernel finds the amaxes and stores the values, which are cast from memory

To compute the chain twice instead takes as long as the last way on an H200. Gated activations in bfloat16 on Hopper
have kernels of their own (`activation_cast.py`, `dactivation_cast.py`), in which groups of all sizes meet.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from recipes.casts.cast_float8 import (
    BLOCK,
    all_meet,
    cast_from_meetings,
    finds_amaxes,
    format_of,
    rows_that_meet,
    usual_rows,
)
from recipes.casts.layout import Copies
from recipes.casts.scale_rules import E8M0Scale, Float32Scale, GivenScale
from recipes.tensors.formats import ALL, Float8Format, ScaleRule, ScaleSpec
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import QuantizedBuffers
from recipes.triton.meeting import MeetingTile
from recipes.triton.row_slots import num_slots

VALUES = "block values"  # the kernels' CAST to the values of MXFP8


class Cast(NamedTuple):
    """The buffers for the quantized copies of a chain's result. The format is one for which `why_no_cast` returns None.

    row_codes, ..., column_scales: None of a copy that is not made; rows that are in no groups have both, rows with
                scales of 1x128 blocks or of their own the first two alone. Without scales the codes are values
    scale, amax: as in `QuantizedBuffers`
    offsets, aligned: of rows in groups: `splits.offsets`, and of columnwise copies `splits.aligned(spec.alignment)`
    how:        `VALUES`; of scales that follow from amaxes "known", "meeting" or "amax"
    meetings:   of these: as in `QuantizedBuffers`
    tile, most: of a meeting, and up to how many rows a group meets
    """

    row_codes: Tensor | None
    row_scales: Tensor | None
    column_codes: Tensor | None
    column_scales: Tensor | None
    spec: ScaleSpec
    scale: Tensor | None = None
    amax: Tensor | None = None
    offsets: Tensor | None = None
    aligned: Tensor | None = None
    meetings: Tensor | None = None
    how: str = ""
    tile: MeetingTile | None = None
    most: int = 0

    @property
    def kind(self) -> str:
        """The kernels' CAST."""
        return self.how or cast_kind(self.spec)


def cast_into(
    buffers: QuantizedBuffers, x: Tensor | None = None, columns: int = 0, tile: MeetingTile | None = None
) -> Cast:
    """The cast that fills them, together with `cast_from_memory` where it `stores_values`.

    Of rows in groups: x, of which the chain is computed, the columns of its y, and the tile with which groups meet, or
    None if they do not.
    """
    copies = buffers.copies
    made, spec = _parts(copies)
    offsets = aligned = None
    if isinstance(copies, GroupedTensor):
        offsets = copies.splits.offsets
        aligned = None if made.column_codes is None else copies.splits.aligned(spec.alignment)
        if cast_kind(spec) == "blocks":
            assert made.row_scale is None and made.column_scale is None, "rows in groups are cast to values"
            return Cast(*made, spec, offsets=offsets, how=VALUES)
    if buffers.meetings is None:
        return Cast(*made, spec, buffers.scale, buffers.amax, offsets, aligned)
    assert isinstance(copies, GroupedTensor), "only rows in groups find their amaxes"
    cast = Cast(*made, spec, None, None, offsets, aligned, buffers.meetings)
    if buffers.amaxes_are_known:
        return cast._replace(how="known")
    if x is not None and tile is not None:
        most = rows_that_meet(x, columns, tile, usual_rows(copies.splits.rows, copies.splits.num_groups))
        if most is not None:
            return cast._replace(how="meeting", tile=tile, most=most)
    return Cast(None, None, None, None, spec, None, None, offsets, None, buffers.meetings, "amax")


def at_meetings(buffers: QuantizedBuffers, x: Tensor, columns: int, tile: MeetingTile) -> Cast | None:
    """The cast that fills them by a kernel in Gluon, in which groups of all sizes meet: "meeting", or "known" if a
    launch has to find the amaxes before (`all_meet`). None: scales do not follow from amaxes that are to be found."""
    if buffers.meetings is None or buffers.amaxes_are_known:
        return None
    cast = cast_into(buffers._replace(amaxes_are_known=True))
    meets = all_meet(x, x.shape[0], columns, num_groups(cast), tile)
    return cast._replace(how="meeting" if meets else "known", tile=tile)


def stores_values(cast: Cast | None, rows: int) -> bool:
    """Whether the kernel needs memory for the values of its rows, in all groups or in large ones, which are cast from
    it."""
    return cast is not None and (cast.how == "amax" or (cast.how == "meeting" and rows > cast.most))


def cast_from_memory(x: Tensor, into: QuantizedBuffers, cast: Cast) -> None:
    """Fill the buffers from x [T, K] in groups, whose amaxes were found: of the groups that were too large to meet."""
    assert isinstance(into.copies, GroupedTensor) and into.meetings is not None, "only such rows are stored"
    copies, spec = _parts(into.copies)
    most = cast.most if cast.how == "meeting" else None
    cast_from_meetings(x, copies, spec, into.meetings, into.copies.splits, most)


def _parts(quantized: QuantizedTensor | GroupedTensor) -> tuple[Copies, ScaleSpec]:
    row, column = quantized.rowwise, quantized.columnwise
    one = row or column
    assert one is not None, "one copy at least is made"
    parts = [(None, None) if copy is None else (copy.codes, copy.scale_inv) for copy in (row, column)]
    return Copies(*parts[0], *parts[1]), one.spec


# The float8 formats that the kernels support: CAST by scale rule, block, columnwise layout and alignment.
CASTS: dict[tuple[ScaleRule, tuple[int, int], str, int], str] = {
    (E8M0Scale("round_up"), (1, 32), "natural", 32): "blocks",
    (GivenScale(), (ALL, ALL), "transposed", BLOCK): "given",
}


MOST_COLUMNS = 4096  # of a row that one program holds


def why_no_cast(
    spec: ScaleSpec, *, grouped: bool = False, columns: int | None = None, runs: int | None = None
) -> str | None:
    """Why the kernels cannot cast to this format, or None.

    grouped: rows in groups, each by itself. columns: of these, if the rowwise copy alone is made. runs: as many columns
    are beside each other, those of a gated chain's dx; None: all
    """
    kind = cast_kind(spec)
    if grouped and kind == "blocks":
        if runs is None or runs % max(spec.block) == 0:
            return None
        return (
            f"Runs of {runs} columns are computed together, but {max(spec.block)} have a scale, which must divide them."
        )
    if kind in (("given", "amax") if grouped else ("given", "blocks")):
        return None
    if grouped and columns is not None and kind == "rows":
        if spec.block[1] != ALL or columns <= MOST_COLUMNS:
            return None
        return f"Rows have {columns} columns and one scale each, but the element-wise kernel holds {MOST_COLUMNS}."
    known = "MXFP8, rounded up, and FP8 with one given scale"
    if grouped:
        known = "MXFP8, FP8 with one scale a group, and of a rowwise copy alone a row or 1x128 values"
    return (
        f"{spec.element.name} codes of {spec.block[0]}x{spec.block[1]} blocks with {spec.scale_rule} are none that the "
        f"element-wise kernel casts to: it knows {known}."
    )


@lru_cache(maxsize=1024)
def cast_kind(spec: ScaleSpec | None) -> str:
    """The kernels' CAST for a format, "amax" of all whose scales follow from amaxes of groups; empty for no cast and
    for formats that they do not support."""
    if spec is None or type(spec.element) is not Float8Format:
        return ""
    if finds_amaxes(spec):
        return "amax"
    layout = spec.block[0], spec.columnwise, spec.transform
    if type(spec.scale_rule) is Float32Scale and spec.block[1] in (128, ALL) and layout == (1, "transposed", None):
        return "rows"
    return CASTS.get((spec.scale_rule, spec.block, spec.columnwise, spec.alignment), "")


def codes_of(cast: Cast | None) -> tuple[Tensor | None, ...]:
    """Codes as bytes, transposed ones as 4-byte words, because the interpreter's float8 rounds wrongly; scales, or
    meetings. The amax as int32 bits, which for non-negative floats have the same order."""
    if cast is None:
        return (None,) * 8
    row_codes, row_scales, column_codes, column_scales, spec, scale, amax, offsets, aligned, meetings, *_ = cast
    if cast.how == VALUES:
        return row_codes, None, column_codes, None, None, None, offsets, None
    scale_inv = row_scales if row_scales is not None or not spec.is_per_tensor else column_scales
    return (
        None if row_codes is None else row_codes.view(torch.uint8), scale_inv,
        None if column_codes is None else column_codes.view(torch.int32 if spec.is_per_tensor else torch.uint8),
        column_scales, scale if meetings is None else meetings, None if amax is None else amax.view(torch.int32),
        offsets, aligned,
    )  # fmt: skip


def num_groups(cast: Cast | None) -> int:
    return 1 if cast is None or cast.offsets is None else len(cast.offsets) - 1


def places_of(*casts: Cast | None) -> int:
    """How long the rows of transposed codes are."""
    found = [c.column_codes for c in casts if c is not None and c.column_codes is not None and c.spec.is_per_tensor]
    return found[0].shape[-1] if found else 0


def in_groups(cast: Cast | None) -> TypeGuard[Cast]:
    return cast is not None and cast.offsets is not None


def cast_constants(cast: Cast | None, x: Tensor, prefix: str = "") -> dict[str, Any]:
    """Compile-time arguments, under these names behind the prefix."""
    if cast is None:
        return {prefix + "CAST": "", prefix + "FORM": "", prefix + "RULE": ()}
    element, kind, rule = cast.spec.element, cast.kind, cast.spec.scale_rule
    if not isinstance(element, Float8Format) or not kind:
        raise ValueError(why_no_cast(cast.spec))
    if (cast.scale is None) == (kind == "given"):
        given = "no" if cast.scale is None else "a"
        raise ValueError(f"{cast.spec} is cast with {given} given scale. Pass one only if its rule is GivenScale.")
    return {
        prefix + "CAST": kind,
        prefix + "FORM": "" if kind == "amax" else format_of(element, x.device)["FORM"],
        prefix + "RULE": (
            (rule.power_2, rule.amax_epsilon, rule.largest(x.dtype)) if isinstance(rule, Float32Scale) else ()
        ),
    }


def row_tiles(cast: Cast, rows: int, block_t: int) -> int:
    """How many tiles of grouped rows there can be."""
    groups = num_groups(cast)
    return num_slots(rows + BLOCK * groups, groups, block_t)
