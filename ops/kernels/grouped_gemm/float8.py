"""Grouped GEMM of float8 codes on the tensor cores: scales are applied to sums, nothing is dequantized before.

    TN   y[t]  = sum_r a[t, r] b[g, c, r] + s[t] bias[g]      grouped_gemm_tn_float8    m_grouped (fprop, dgrad)
    NT   dw_g  = sum_t dy[t] x[t]^T over group g              grouped_gemm_nt_float8    k_grouped (wgrad)

g is the group of row t. Both operands lie along the summed axis, as Hopper's float8 instructions need them: for fprop
b is the weight's rowwise copy [G, N, K], for dgrad its transposed copy [G, K, N]; for wgrad both are the transposed
columnwise copies, in which each group starts at a multiple of 16 (block scales: 128) columns and is padded with zeros.
Multiples of 32 are worth having: those of 16 cost wgrad a quarter of its rate, because boxes start inside a sector.

Scales (float32, value = code * scale):

    per tensor   a_scale, b_scale, dy_scale, x_scale: () or [G]
    vectors      a_scale [1, T], b_scale [G, 1, C], dy_scale [G, 1, N], x_scale [G, 1, K]
    1x128        a_scale [ceil(R/128), T], b_scale [G, ceil(R/128), C], dy_scale [P/128, N], x_scale [P/128, K]
    128x128      b_scale [G, ceil(C/128), ceil(R/128)]

Rows past `splits.offsets[-1]` belong to no group: they are zero in y, whatever their codes and scales are. A group
without rows has dw exactly zero. Every element of an output is written.

Precision: products of codes are exact, and are added in one of two ways:

    fast accumulation    the tensor core's own sum runs over all terms (not of blocks, split_accumulation=False)
    split accumulation   the tensor core sums 128 terms, and these sums are added in float32 (block scales always)

Then scales (of vectors: sum * a_scale[t] * b_scale[c], in this order), bias, and one rounding to the output's dtype.
All sums have a fixed order, and repeating a call gives the same bits: each element is written once, or added to once,
as `grouped_gemm` says.

Hopper's tensor core adds 32 products a step to its sum and, as far as measured (it is not documented), cuts every
addend at 2^-13 of the power of two of the largest. Then a sum of n terms errs by at most n/32 * 33 * 2^-13 of the sum
of absolute products S: 1.6 % of S in split accumulation, and no useful bound for long sums in fast accumulation. Small
integers are exact in both. What an H200 measured: `docs/recipes.md`, "How exact products are".

Graph safety: as `grouped_gemm`. Grids follow from capacities, groups are found from the offsets on the device.

The kernels: `float8_persistent` on descriptors, `pointers_triton` on pointers, and for TN on Hopper `float8_gluon`.
"""
# T rows, G groups, R summed features, C features that come out; P columns of the padded groups; for NT [N, K] come out

from itertools import pairwise

import torch
from torch import Tensor

from ops.kernels.grouped_gemm.float8_persistent import (
    k_grouped_float8_persistent_kernel,
    m_grouped_float8_persistent_kernel,
)
from ops.kernels.grouped_gemm.high_precision import capability
from ops.kernels.grouped_gemm.operands import (
    check_accumulate,
    check_rows,
    check_scales,
    output,
    packed,
    row_slices,
    with_contiguous_rows,
)
from ops.kernels.grouped_gemm.persistent_schedule import MOST_GROUPS, band, multiprocessors, padded_groups
from ops.kernels.grouped_gemm.pointers_triton import k_grouped_kernel, m_grouped_kernel
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, takes_descriptors
from ops.kernels.grouped_gemm.tile_rules_float8 import BLOCK, k_grouped_float8_config, m_grouped_float8_config, promotes
from recipes.native_products import FLOAT8
from recipes.tensors.formats import ScaleLayout
from recipes.tensors.splits import Splits
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import Launch, cdiv, has_work, launcher, replayed
from recipes.triton.row_slots import num_slots

if why_no_gluon((9, 0)) is None:
    from ops.kernels.grouped_gemm.float8_gluon import m_grouped_float8_gluon

# ---------------------------------------------------------------------------------------------------- references


def grouped_gemm_tn_float8_ref(
    a_codes_TR: Tensor,
    a_scale: Tensor,
    b_codes_GCR: Tensor,
    b_scale: Tensor,
    splits: Splits,
    *,
    bias_GC: Tensor | None = None,
    scales_T: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`grouped_gemm_tn_float8` in plain torch, group by group, computed in `dtype`. Returns y [T, C]."""
    y = torch.zeros(a_codes_TR.shape[0], b_codes_GCR.shape[1], dtype=dtype, device=a_codes_TR.device)
    layout = scale_layout(a_scale, b_scale, *b_codes_GCR.shape[1:])
    for g, rows in row_slices(splits):
        a = a_codes_TR[rows].to(dtype) * _scale_a(a_scale, splits, g, rows, a_codes_TR.shape[1]).to(dtype)
        b = b_codes_GCR[g].to(dtype) * _scale_b(b_scale, layout, splits, g, b_codes_GCR.shape[1:]).to(dtype)
        y[rows] = a @ b.T
        if bias_GC is not None:
            y[rows] += bias_GC[g].to(dtype) * (1 if scales_T is None else scales_T[rows, None].to(dtype))
    return y.to(out_dtype)


def grouped_gemm_nt_float8_ref(
    dy_codes_NP: Tensor,
    dy_scale: Tensor,
    x_codes_KP: Tensor,
    x_scale: Tensor,
    offsets_aligned: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """`grouped_gemm_nt_float8` in plain torch, group by group, computed in `dtype`. Returns dw [G, N, K]."""
    ends = offsets_aligned.tolist()
    num_groups = len(ends) - 1
    dw = torch.zeros(num_groups, dy_codes_NP.shape[0], x_codes_KP.shape[0], dtype=dtype, device=dy_codes_NP.device)
    for g, (begin, end) in enumerate(pairwise(ends)):
        if begin < end:
            dy, x = (
                codes[:, begin:end].to(dtype) * _scale_of_columns(scale, num_groups, g, begin, end).to(dtype)
                for codes, scale in ((dy_codes_NP, dy_scale), (x_codes_KP, x_scale))
            )
            dw[g] = dy @ x.T
    return dw.to(out_dtype)


def _scale_a(scale: Tensor, splits: Splits, g: int, rows: slice, R: int) -> Tensor:
    if scale.dim() < 2:
        return scale.expand(splits.num_groups)[g]
    if len(scale) == 1:
        return scale[:, rows].T
    return scale[:, rows].repeat_interleave(BLOCK, 0)[:R].T


def _scale_b(scale: Tensor, layout: ScaleLayout, splits: Splits, g: int, shape: torch.Size) -> Tensor:
    if layout == "tensor":
        return scale.expand(splits.num_groups)[g]
    if layout == "vector":
        return scale[g].T
    C, R = shape
    if layout == "row":
        return scale[g].repeat_interleave(BLOCK, 0)[:R].T
    return scale[g].repeat_interleave(BLOCK, 0)[:C].repeat_interleave(BLOCK, 1)[:, :R]


def _scale_of_columns(scale: Tensor, num_groups: int, g: int, begin: int, end: int) -> Tensor:
    if scale.dim() < 2:
        return scale.expand(num_groups)[g]
    if scale.dim() == 3:
        return scale[g].T
    return scale[begin // BLOCK : end // BLOCK].repeat_interleave(BLOCK, 0).T


# ----------------------------------------------------------------------------------------------------- launchers


def grouped_gemm_tn_float8(
    a_codes_TR: Tensor,
    a_scale: Tensor,
    b_codes_GCR: Tensor,
    b_scale: Tensor,
    splits: Splits,
    *,
    bias_GC: Tensor | None = None,
    scales_T: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    split_accumulation: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """y[t] = sum_r a[t, r] b[g, :, r] + scales[t] bias_g. Returns y [T, C], or `out` filled with it.

    a_codes: [T, R], b_codes: [G, C, R] in E4M3 or E5M2, each its own. Scales: see the top of the file; both per tensor,
    both vectors or both of blocks. bias: [G, C], scales: [T] (1 if None; scale the bias alone). out: [T, C]. out_dtype:
    bfloat16, float16 or float32, used if there is no `out`. split_accumulation: add sums of 128 in float32.
    batch_invariant: as `high_precision` says; on CUDA alone, where codes are multiplied. Rows of no group are zero.
    """
    if a_codes_TR.device.type == "cuda":
        return _tn(
            a_codes_TR, a_scale, b_codes_GCR, b_scale, splits.offsets, splits.rows, bias_GC, scales_T, out, out_dtype,
            split_accumulation, batch_invariant,
        )  # fmt: skip
    out = _checked_tn(a_codes_TR, a_scale, b_codes_GCR, b_scale, splits, bias_GC, scales_T, out, out_dtype)
    y = grouped_gemm_tn_float8_ref(
        a_codes_TR, a_scale, b_codes_GCR, b_scale, splits, bias_GC=bias_GC, scales_T=scales_T, out_dtype=out.dtype
    )
    return out.copy_(y)


def _checked_tn(
    a_codes_TR: Tensor,
    a_scale: Tensor,
    b_codes_GCR: Tensor,
    b_scale: Tensor,
    splits: Splits,
    bias_GC: Tensor | None,
    scales_T: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """`out`, or a new one, once the operands fit together."""
    _check_tn(a_codes_TR, a_scale, b_codes_GCR, b_scale, splits, bias_GC)
    check_scales(scales_T, splits)
    return output(out, (a_codes_TR.shape[0], b_codes_GCR.shape[1]), None if out is not None else out_dtype, a_codes_TR)


@replayed
def _tn(
    a_codes_TR: Tensor,
    a_scale: Tensor,
    b_codes_GCR: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    rows: int,
    bias_GC: Tensor | None,
    scales_T: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
    split_accumulation: bool,
    batch_invariant: bool,
) -> Tensor:
    """Checks, allocates and launches TN."""
    splits = Splits.over(offsets, rows)
    out = _checked_tn(a_codes_TR, a_scale, b_codes_GCR, b_scale, splits, bias_GC, scales_T, out, out_dtype)
    target = (packed if batch_invariant else with_contiguous_rows)(out, empty=True)
    grouped_gemm_tn_float8_triton(
        with_aligned_rows(a_codes_TR),
        _ready(a_scale, splits.num_groups),
        with_aligned_rows(b_codes_GCR.contiguous()),
        _ready(b_scale, splits.num_groups),
        offsets,
        None if bias_GC is None else bias_GC.contiguous(),
        None if scales_T is None else scales_T.contiguous(),
        target,
        split_accumulation,
        batch_invariant,
    )
    return out if target is out else out.copy_(target)


def grouped_gemm_nt_float8(
    dy_codes_NP: Tensor,
    dy_scale: Tensor,
    x_codes_KP: Tensor,
    x_scale: Tensor,
    offsets_aligned: Tensor,
    *,
    out: Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    split_accumulation: bool = False,
    accumulate: bool = False,
    reverse: bool = False,
    spare: int = 0,
) -> Tensor:
    """dw_g = sum of dy[:, p] x[:, p]^T over the columns p of group g. Returns dw [G, N, K], or `out` filled with it.

    dy_codes: [N, P], x_codes: [K, P] in E4M3 or E5M2, each its own: the transposed columnwise copies. Group g has the
    columns offsets_aligned[g] to offsets_aligned[g + 1], [G + 1] int64, multiples of 16 (per tensor, vectors) or 128
    (1x128 scales); what pads it is zeros. Scales: see the top of the file. out: [G, N, K]. out_dtype and
    split_accumulation: as `grouped_gemm_tn_float8`. A group without columns gets zeros; accumulate, which needs `out`:
    out += dw, summed in float32 and rounded once, and the part of such a group is untouched. reverse, spare:
    as `grouped_gemm_nt`.
    """
    if dy_codes_NP.device.type == "cuda":
        return _nt(
            dy_codes_NP, dy_scale, x_codes_KP, x_scale, offsets_aligned, out, out_dtype, split_accumulation, accumulate,
            reverse, spare,
        )  # fmt: skip
    out = _checked_nt(dy_codes_NP, dy_scale, x_codes_KP, x_scale, offsets_aligned, out, out_dtype, accumulate, reverse)
    dw = grouped_gemm_nt_float8_ref(
        dy_codes_NP, dy_scale, x_codes_KP, x_scale, offsets_aligned, out_dtype=torch.float32
    )  # fmt: skip
    empty = offsets_aligned[1:] == offsets_aligned[:-1]
    if reverse:
        dw, empty = dw.flip(0), empty.flip(0)
    if accumulate:
        dw = torch.where(empty[:, None, None], out, dw + out)
    return out.copy_(dw)


def _checked_nt(
    dy_codes_NP: Tensor,
    dy_scale: Tensor,
    x_codes_KP: Tensor,
    x_scale: Tensor,
    offsets_aligned: Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype,
    accumulate: bool,
    reverse: bool,
) -> Tensor:
    """`out`, or a new one, once the operands fit together."""
    check_accumulate(out, accumulate, reverse)
    _check_nt(dy_codes_NP, dy_scale, x_codes_KP, x_scale, offsets_aligned)
    shape = (offsets_aligned.shape[0] - 1, dy_codes_NP.shape[0], x_codes_KP.shape[0])
    return output(out, shape, None if out is not None else out_dtype, dy_codes_NP)


@replayed
def _nt(
    dy_codes_NP: Tensor,
    dy_scale: Tensor,
    x_codes_KP: Tensor,
    x_scale: Tensor,
    offsets_aligned: Tensor,
    out: Tensor | None,
    out_dtype: torch.dtype,
    split_accumulation: bool,
    accumulate: bool,
    reverse: bool,
    spare: int,
) -> Tensor:
    """Checks, allocates and launches NT."""
    out = _checked_nt(dy_codes_NP, dy_scale, x_codes_KP, x_scale, offsets_aligned, out, out_dtype, accumulate, reverse)
    num_groups = out.shape[0]
    target = out
    if num_groups and not out[0].is_contiguous():
        target = out.contiguous() if accumulate else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    grouped_gemm_nt_float8_triton(
        with_aligned_rows(dy_codes_NP),
        _ready(dy_scale, num_groups),
        with_aligned_rows(x_codes_KP),
        _ready(x_scale, num_groups),
        offsets_aligned,
        target,
        split_accumulation,
        accumulate,
        reverse,
        spare,
    )
    return out if target is out else out.copy_(target)


_m_grouped, _m_grouped_persistent = Launch(m_grouped_kernel), Launch(m_grouped_float8_persistent_kernel)
_k_grouped, _k_grouped_persistent = Launch(k_grouped_kernel), Launch(k_grouped_float8_persistent_kernel)


@launcher("fuser::grouped_gemm_tn_float8", mutates=["out"])
def grouped_gemm_tn_float8_triton(
    a: Tensor,
    a_scale: Tensor,
    b: Tensor,
    b_scale: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    split_accumulation: bool,
    batch_invariant: bool = False,
) -> None:
    """Launches TN. Rows of a and out are contiguous, b, bias, scales and block scales are contiguous; offsets [G + 1].

    Rows of codes that are not aligned are right, but slow: `with_aligned_rows`. Scales per tensor: [G], which may be an
    expanded ().
    """
    if out.numel() == 0:
        return
    (G, C, R), rows = b.shape, a.shape[0]
    layout = scale_layout(a_scale, b_scale, C, R)
    promote = promotes(layout, split_accumulation)
    config = m_grouped_float8_config(
        rows,
        G,
        layout=layout,
        promote=promote,
        out_dtype=out.dtype,
        descriptors=takes_descriptors(a, b, out) and G <= MOST_GROUPS,
        capability=capability(out),
        gluon=why_no_gluon(capability(out)) is None,
        batch_invariant=batch_invariant,
    )
    if config.gluon:
        m_grouped_float8_gluon(a, a_scale, b, b_scale, offsets, bias, scales, out, config, promote)
        return
    num_tiles = num_slots(rows, G, config.block_m) * cdiv(C, config.block_n)
    if config.programs:
        _m_grouped_persistent(
            out,
            min(num_tiles, config.programs * multiprocessors(out)),
            ragged_descriptor(a, (config.part_m, config.block_k), axis=0),
            descriptor(b, (1, config.part_n, config.block_k)),
            ragged_descriptor(out, config.half(), axis=0),
            a_scale,
            b_scale,
            offsets,
            bias,
            scales,
            rows,
            G,
            R,
            C,
            a_scale.stride(0),
            b_scale.stride(0),
            LAYOUT=layout,
            PROMOTE=promote,
            BAND=band(config.block_m),
            GROUPS=padded_groups(G),
            **config.compiled(),
        )
    else:
        _m_grouped(
            out,
            num_tiles,
            a,
            b,
            offsets,
            bias,
            scales,
            a_scale,
            b_scale,
            out,
            rows,
            G,
            R,
            C,
            a.stride(0),
            C * R,
            1,
            R,
            a_scale.stride(0),
            b_scale.stride(0),
            out.stride(0),
            LAYOUT=layout,
            PROMOTE=promote,
            PRECISION="tf32",
            BAND=band(config.block_m),
            **config.compiled(),
        )


@launcher("fuser::grouped_gemm_nt_float8", mutates=["out"])
def grouped_gemm_nt_float8_triton(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offsets: Tensor,
    out: Tensor,
    split_accumulation: bool,
    accumulate: bool = False,
    reverse: bool = False,
    spare: int = 0,
) -> None:
    """Launches NT. Rows of dy and x, the matrices of out and block scales are contiguous; offsets [G + 1], aligned.

    Scales per tensor: [G], which may be an expanded ().
    """
    if dy.shape[1] == 0 or out.numel() == 0:
        if not accumulate:
            out.zero_()
        return
    G, N, K = out.shape
    layout: ScaleLayout = ("tensor", "row", "vector")[max(dy_scale.dim() - 1, 0)]
    promote = promotes(layout, split_accumulation)
    config = k_grouped_float8_config(
        blockwise=layout == "row",
        promote=promote,
        out_dtype=out.dtype,
        accumulate=accumulate,
        descriptors=takes_descriptors(dy, x, out) and G <= MOST_GROUPS,
        capability=capability(out),
    )
    num_tiles = G * cdiv(N, config.block_m) * cdiv(K, config.block_n)
    # As `grouped_gemm_nt`: a factor's product is rounded before it is added. Blocks have no factor at the end.
    fusion = layout == "row" or not accumulate
    if config.programs:
        _k_grouped_persistent(
            out,
            min(num_tiles, config.programs * multiprocessors(out, spare)),
            ragged_descriptor(dy, (config.part_m, config.block_k), axis=1, unit=16),
            ragged_descriptor(x, (config.part_n, config.block_k), axis=1, unit=16),
            descriptor(out, (1, *config.half())),
            out if accumulate and out.dtype == torch.float32 else None,
            out.stride(0),
            dy_scale,
            x_scale,
            offsets,
            G,
            N,
            K,
            dy_scale.stride(0),
            x_scale.stride(0),
            ACCUMULATE=accumulate,
            REVERSE=reverse,
            LAYOUT=layout,
            PROMOTE=promote,
            BAND=band(config.block_m),
            GROUPS=padded_groups(G),
            enable_fp_fusion=fusion,
            **config.compiled(),
        )
    else:
        _k_grouped(
            out,
            num_tiles,
            dy,
            x,
            offsets,
            dy_scale,
            x_scale,
            out[-1] if reverse else out,
            N,
            K,
            dy.stride(0),
            1,
            1,
            x.stride(0),
            dy_scale.stride(0),
            x_scale.stride(0),
            -out.stride(0) if reverse else out.stride(0),
            ACCUMULATE=accumulate,
            ALIGNED=16,
            LAYOUT=layout,
            PROMOTE=promote,
            PRECISION="tf32",
            BAND=band(config.block_m),
            enable_fp_fusion=fusion,
            **config.compiled(),
        )


def with_aligned_rows(codes: Tensor) -> Tensor:
    """The codes if their rows are multiples of 16 bytes, or a copy in which zeros make them so."""
    missing = -codes.shape[-1] % 16
    if not has_work(codes) or (missing == 0 and takes_descriptors(codes)):
        return codes
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, missing)).contiguous().view(codes.dtype)


def scale_layout(a_scale: Tensor, b_scale: Tensor, C: int, R: int) -> ScaleLayout:
    """How scales lie, told by their shapes. (Where two layouts have the same shapes, they agree.)"""
    if b_scale.dim() < 2:
        return "tensor"
    if len(a_scale) == 1 and b_scale.shape[1:] == (1, C):
        return "vector"
    return "square" if b_scale.shape[1:] == (cdiv(C, BLOCK), cdiv(R, BLOCK)) else "row"


def _ready(scale: Tensor, num_groups: int) -> Tensor:
    return scale.expand(num_groups) if scale.dim() < 2 else scale.contiguous()


def _check_tn(
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


def _check_nt(dy: Tensor, dy_scale: Tensor, x: Tensor, x_scale: Tensor, offsets: Tensor) -> None:
    _check_codes(dy, x)
    if dy.dim() != 2 or x.dim() != 2 or dy.shape[1] != x.shape[1] or x.shape[1] % 16:
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
    _check_scale("dy_scale", dy_scale, G, [(G, 1, dy.shape[0]), (dy.shape[1] // BLOCK, dy.shape[0])])
    _check_scale("x_scale", x_scale, G, [(G, 1, x.shape[0]), (x.shape[1] // BLOCK, x.shape[0])])
    _check_kinds(dy_scale, x_scale, dy_scale.dim() == x_scale.dim())


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
