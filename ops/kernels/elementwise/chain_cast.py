"""What the element-wise kernels quantize their result to, and the arguments that pass it to them.

MXFP8 and FP8 with one given scale are cast of whole matrices, both copies at once; FP8 with a given scale a group also
of rows in groups. Of rows in groups whose scales follow from amaxes the kernel stores the result and finds the amaxes;
it is cast from memory then. To compute the chain twice instead takes as long on an H200.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor

from recipes.casts.cast_float8 import BLOCK, cast_with_amaxes, finds_amaxes, format_of
from recipes.casts.layout import Copies
from recipes.casts.scale_rules import E8M0Scale, GivenScale
from recipes.tensors.formats import ALL, E4M3, Float8Format, ScaleRule, ScaleSpec
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import QuantizedBuffers
from recipes.triton.row_slots import num_slots


class Cast(NamedTuple):
    """The buffers for the quantized copies of a chain's result. The format is one for which `why_no_cast` returns None.

    row_codes, ..., column_scales: None of a copy that is not made; rows that are in no groups have both
    scale, amax: as in `QuantizedBuffers`; amax alone, without any copies, is only found
    offsets, aligned: of rows in groups, each with a scale of its own: `splits.offsets`, `splits.aligned(32)`
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


def cast_into(buffers: QuantizedBuffers) -> Cast:
    """The cast that fills them, or finds the amaxes with which `cast_from_memory` does."""
    copies = buffers.copies
    made, spec = _parts(copies)
    offsets = aligned = None
    if isinstance(copies, GroupedTensor):
        offsets, aligned = copies.splits.offsets, None if made.column_codes is None else copies.splits.aligned(BLOCK)
    if cast_kind(spec) == "amax":
        return Cast(None, None, None, None, spec, None, buffers.amax, offsets)
    return Cast(*made, spec, buffers.scale, buffers.amax, offsets, aligned)


def finds_amaxes_of(into: QuantizedBuffers | None) -> bool:
    """Whether the kernel finds the amaxes alone, so that the values are stored and cast from memory."""
    return into is not None and cast_kind(_parts(into.copies)[1]) == "amax"


def cast_from_memory(x: Tensor, into: QuantizedBuffers) -> None:
    """Fill the buffers from x [T, K] in groups, whose amaxes were found."""
    assert isinstance(into.copies, GroupedTensor) and into.amax is not None, "only such rows have kind 'amax'"
    copies, spec = _parts(into.copies)
    cast_with_amaxes(x, copies, spec, into.amax, into.copies.splits)


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


def why_no_cast(spec: ScaleSpec, *, grouped: bool = False) -> str | None:
    """Why the kernels cannot cast to this format, or None. grouped: rows in groups, each by itself."""
    if cast_kind(spec) in (("given", "amax") if grouped else ("given", "blocks")):
        return None
    known = "FP8 with one scale a group" if grouped else "MXFP8, rounded up, and FP8 with one given scale"
    return (
        f"{spec.element.name} codes of {spec.block[0]}x{spec.block[1]} blocks with {spec.scale_rule} are none that the "
        f"element-wise kernel casts to: it knows {known}."
    )


@lru_cache(maxsize=1024)
def cast_kind(spec: ScaleSpec | None) -> str:
    """The kernels' CAST; empty for no cast and for formats that they do not support."""
    if spec is None or type(spec.element) is not Float8Format:
        return ""
    if finds_amaxes(spec):
        return "amax"
    return CASTS.get((spec.scale_rule, spec.block, spec.columnwise, spec.alignment), "")


def codes_of(cast: Cast | None) -> tuple[Tensor | None, ...]:
    """Codes as bytes, transposed ones as 4-byte words, because the interpreter's float8 rounds wrongly. The amax as
    int32 bits, which for non-negative floats have the same order."""
    if cast is None:
        return (None,) * 8
    row_codes, row_scales, column_codes, column_scales, spec, scale, amax, offsets, aligned = cast
    scale_inv = row_scales if row_scales is not None or not spec.is_per_tensor else column_scales
    return (
        None if row_codes is None else row_codes.view(torch.uint8), scale_inv,
        None if column_codes is None else column_codes.view(torch.int32 if spec.is_per_tensor else torch.uint8),
        column_scales, scale, None if amax is None else amax.view(torch.int32), offsets, aligned,
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
        return {prefix + "CAST": "", prefix + "FORM": ""}
    element, kind = cast.spec.element, cast_kind(cast.spec)
    if not isinstance(element, Float8Format) or not kind:
        raise ValueError(why_no_cast(cast.spec))
    if (cast.scale is None) == (kind == "given"):
        given = "no" if cast.scale is None else "a"
        raise ValueError(f"{cast.spec} is cast with {given} given scale. Pass one only if its rule is GivenScale.")
    return {prefix + "CAST": kind, prefix + "FORM": "" if kind == "amax" else format_of(element, x.device)["FORM"]}


def casts_natively(x: Tensor) -> bool:
    """NATIVE: whether the GPU converts to float8 itself."""
    return bool(format_of(E4M3, x.device)["NATIVE"])


def row_tiles(cast: Cast, rows: int, block_t: int) -> int:
    """How many tiles of grouped rows there can be."""
    groups = num_groups(cast)
    return num_slots(rows + BLOCK * groups, groups, block_t)
