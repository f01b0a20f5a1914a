"""How the scales of float8 codes lie, and what operands of a product must be: `float8` multiplies them.

Scales are float32, value = code * scale:

    per tensor   a_scale, b_scale, dy_scale, x_scale: () or [G]
    vectors      a_scale [1, T], b_scale [G, 1, C], dy_scale [G, 1, N], x_scale [G, 1, K]
    1x128        a_scale [ceil(R/128), T], b_scale [G, ceil(R/128), C], dy_scale [P/128, N], x_scale [P/128, K]
    128x128      b_scale [G, ceil(C/128), ceil(R/128)]

The letters, and which operand lies how: `float8`. What stands for a scale in plain torch, one for each code or
broadcast, is `scale_of_*`. Errors are raised before anything is written, and say which copy to pass.
"""
# T rows, G groups, R summed features, C features that come out; P columns of the padded groups; for NT [N, K] come out

import torch
from torch import Tensor

from ops.kernels.grouped_gemm.operands import check_rows
from ops.kernels.grouped_gemm.tile_rules_float8 import BLOCK
from recipes.native_products import FLOAT8
from recipes.tensors.formats import ScaleLayout
from recipes.tensors.splits import Splits
from recipes.triton.launch import cdiv


def scale_layout(a_scale: Tensor, b_scale: Tensor, C: int, R: int) -> ScaleLayout:
    """How scales lie, told by their shapes. (Where two layouts have the same shapes, they agree.)"""
    if b_scale.dim() < 2:
        return "tensor"
    if len(a_scale) == 1 and b_scale.shape[1:] == (1, C):
        return "vector"
    return "square" if b_scale.shape[1:] == (cdiv(C, BLOCK), cdiv(R, BLOCK)) else "row"


def scale_of_rows(scale: Tensor, splits: Splits, g: int, rows: slice, R: int) -> Tensor:
    if scale.dim() < 2:
        return scale.expand(splits.num_groups)[g]
    if len(scale) == 1:
        return scale[:, rows].T
    return scale[:, rows].repeat_interleave(BLOCK, 0)[:R].T


def scale_of_weight(scale: Tensor, layout: ScaleLayout, splits: Splits, g: int, shape: torch.Size) -> Tensor:
    if layout == "tensor":
        return scale.expand(splits.num_groups)[g]
    if layout == "vector":
        return scale[g].T
    C, R = shape
    if layout == "row":
        return scale[g].repeat_interleave(BLOCK, 0)[:R].T
    return scale[g].repeat_interleave(BLOCK, 0)[:C].repeat_interleave(BLOCK, 1)[:, :R]


def scale_of_columns(scale: Tensor, num_groups: int, g: int, begin: int, end: int) -> Tensor:
    if scale.dim() < 2:
        return scale.expand(num_groups)[g]
    if scale.dim() == 3:
        return scale[g].T
    return scale[begin // BLOCK : end // BLOCK].repeat_interleave(BLOCK, 0).T


def check_tn(
    a: Tensor, a_scale: Tensor, b: Tensor, b_scale: Tensor, splits: Splits, bias: Tensor | None
) -> None:  # fmt: skip
    check_rows(a, splits)
    _check_codes(a, b)
    G, (T, R) = splits.num_groups, a.shape
    if b.dim() != 3 or b.shape[0] != G or b.shape[2] != R:
        raise ValueError(
            f"b has shape {list(b.shape)}, but must be [{G}, C, {R}] for {G} groups and sums over {R} features. "
            "Pass the copy whose last axis is summed over."
        )
    C = b.shape[1]
    steps = cdiv(R, BLOCK)
    blocks = [(G, cdiv(C, BLOCK), steps), (G, steps, C)]
    _check_scale("a_scale", a_scale, G, [(1, T), (steps, T)])
    _check_scale("b_scale", b_scale, G, [(G, 1, C), *blocks])
    vectors = a_scale.shape == (1, T) and b_scale.shape == (G, 1, C)
    _check_kinds(a_scale, b_scale, vectors or (a_scale.shape == (steps, T) and b_scale.shape in blocks))
    if bias is not None and bias.shape != (G, C):
        raise ValueError(f"bias has shape {list(bias.shape)}, but must be {[G, C]}. Pass one row for each group.")


def check_nt(
    dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offsets: Tensor, row_offsets: Tensor | None
) -> None:
    _check_codes(dy, x)
    if row_offsets is not None:
        _check_rows(dy, x, offsets, row_offsets)
    elif dy.dim() != 2 or x.dim() != 2 or dy.shape[1] != x.shape[1] or x.shape[1] % 16:
        raise ValueError(
            f"the codes have shapes {list(dy.shape)} and {list(x.shape)}, but must be [N, P] and [K, P], P a multiple "
            "of 16. Pass the transposed columnwise copies of one set of rows."
        )
    if offsets.dim() != 1 or offsets.dtype != torch.int64 or offsets.device != dy.device:
        raise ValueError(
            f"offsets_aligned is {offsets.dtype} {list(offsets.shape)} on {offsets.device}, but must be int64 [G + 1] "
            f"on {dy.device}. Pass splits.aligned(16), or splits.aligned(128) for block scales."
        )
    G = offsets.shape[0] - 1
    columns = x.shape[1] // BLOCK
    of_dy = [] if row_offsets is not None else [(G, 1, dy.shape[0]), (columns, dy.shape[0])]
    _check_scale("dy_scale", dy_scale, G, of_dy)
    _check_scale("x_scale", x_scale, G, [(G, 1, x.shape[0]), (columns, x.shape[0])])
    _check_kinds(dy_scale, x_scale, dy_scale.dim() == x_scale.dim())


def _check_rows(dy: Tensor, x: Tensor, offsets: Tensor, row_offsets: Tensor) -> None:
    """dy in rows [T, N], which these offsets divide."""
    if dy.dim() != 2 or x.dim() != 2 or x.shape[1] % 16:
        raise ValueError(
            f"the codes have shapes {list(dy.shape)} and {list(x.shape)}, but with row_offsets must be [T, N] and "
            "[K, P], P a multiple of 16. Pass dy's rowwise and x's transposed columnwise copy."
        )
    given = row_offsets.dtype, row_offsets.shape, row_offsets.device
    if given != (torch.int64, offsets.shape, offsets.device):
        raise ValueError(
            f"row_offsets is {given[0]} {list(given[1])} on {given[2]}, but must be int64 {list(offsets.shape)} on "
            f"{offsets.device}, as offsets_aligned is. Pass splits.offsets."
        )


def _check_codes(a: Tensor, b: Tensor) -> None:
    for codes in (a, b):
        if codes.dtype not in FLOAT8:
            raise TypeError(f"codes are {codes.dtype}, but must be {FLOAT8[0]} or {FLOAT8[1]}. Quantize them.")
    if a.device != b.device:
        raise ValueError(f"the codes are on {a.device} and {b.device}, but must be on one device. Move one of them.")


def _check_scale(name: str, scale: Tensor, num_groups: int, blocks: list[tuple[int, ...]]) -> None:
    if scale.dtype != torch.float32 or scale.shape not in [(), (num_groups,), *blocks]:
        allowed = " or ".join(map(str, [[], [num_groups], *map(list, blocks)]))
        raise ValueError(
            f"{name} is {scale.dtype} {list(scale.shape)}, but must be float32 {allowed}. "
            "Pass the scale_inv that belongs to the codes."
        )


def _check_kinds(a_scale: Tensor, b_scale: Tensor, agree: bool) -> None:
    """agree: whether both are of blocks, or both of vectors."""
    if not agree and (a_scale.dim() > 1 or b_scale.dim() > 1):
        raise ValueError(
            f"one operand has scales of blocks or vectors and the other has not those ({list(a_scale.shape)}, "
            f"{list(b_scale.shape)}). Quantize both with one recipe."
        )
