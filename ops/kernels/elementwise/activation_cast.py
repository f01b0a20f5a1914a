"""Gated bfloat16 activations on Hopper quantized by a kernel in Gluon: to FP8 with one scale a group, which follows
from act's amax, found at meetings of groups of all sizes. What is not taken here the element-wise kernel does
(`chain.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ops.kernels.elementwise.chain import Step, chain_constants
from ops.kernels.elementwise.chain_cast import Cast, at_meetings, cast_constants, num_groups, places_of
from ops.kernels.elementwise.dactivation_cast import BOX, fits
from recipes.casts.cast_float8 import programs_of_groups
from recipes.tensors.quantizer import QuantizedBuffers
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import Launch
from recipes.triton.meeting import MeetingTile

if why_no_gluon((9, 0)) is None:
    from ops.kernels.elementwise.activation_gluon import activation_gluon_kernel
    from recipes.casts.boxes_gluon import boxes_of

    _activation = Launch(activation_gluon_kernel)

# Six programs share a multiprocessor: 32 KB of shared memory and 10240 registers each.
TILE = MeetingTile(block_m=64, block_k=128, num_warps=4, registers=80)


def cast_of(h: Tensor, step: Step, into: QuantizedBuffers) -> Cast | None:
    """The cast with which the kernel here runs; None: it does not."""
    if not fits(step, h):
        return None
    cast = at_meetings(into, h, h.shape[1] // 2, TILE)
    return cast if cast is not None and cast.how == "meeting" else None


def launch_activation_cast(h: Tensor, step: Step, scales: Tensor | None, cast: Cast) -> None:
    """Quantizes act into this, from `cast_of`."""
    rows, columns = h.shape[0], h.shape[1] // 2
    constants, about = cast_constants(cast, h), chain_constants((step,), (h.dtype,))
    row, column = cast.row_codes, cast.column_codes
    assert cast.offsets is not None, "`cast_of` says so"
    programs = programs_of_groups(h, rows, columns, cast.offsets, TILE, True)
    _activation(
        h, programs.launched,
        boxes_of(h, *BOX), None if scales is None else scales.contiguous(),
        None if row is None else row.view(torch.int32), None if column is None else column.view(torch.int32),
        cast.row_scales if row is not None else cast.column_scales, cast.meetings, cast.offsets, cast.aligned,
        rows, columns, places_of(cast), num_groups(cast), programs.most, programs.log2_rows,
        **{name: about[name] for name in ("STEPS", "CONSTANTS", "SOURCE")}, FORM=constants["FORM"],
        RULE=constants["RULE"], enable_fp_fusion=False, num_warps=TILE.num_warps, maxnreg=TILE.registers,
    )  # fmt: skip
