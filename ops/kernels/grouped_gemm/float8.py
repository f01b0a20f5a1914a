"""Grouped GEMM of float8 codes on the tensor cores: scales are applied to sums, nothing is dequantized before.

    TN   y[t]  = sum_r a[t, r] b[g, c, r] + s[t] bias[g]      grouped_gemm_tn_float8    m_grouped (fprop, dgrad)
    NT   dw_g  = sum_t dy[t] x[t]^T over group g              grouped_gemm_nt_float8    k_grouped (wgrad)

g is the group of row t. Both operands lie along the summed axis, as Hopper's float8 instructions need them: for fprop
b is the weight's rowwise copy [G, N, K], for dgrad its transposed copy [G, K, N]; for wgrad both are the transposed
columnwise copies, in which each group starts at a multiple of 16 (block scales: 128) columns and is padded with zeros.
Multiples of 32 are worth having: those of 16 cost wgrad a quarter of its rate, because boxes start inside a sector. Of
scales per tensor wgrad also takes the rowwise copy of dy, whose codes are the same, and transposes it itself
(`tile_rules_float8.nt_reads_rows` says where that is faster than another copy).

Scales (float32, value = code * scale) lie as `float8_scales` says.

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

The kernels: `float8_persistent` on descriptors, `pointers_triton` on pointers, and on Hopper `m_grouped_gluon` for TN,
`float8_nt_gluon` for NT.
"""
# T rows, G groups, R summed features, C features that come out; P columns of the padded groups; for NT [N, K] come out

from itertools import pairwise

import torch
from torch import Tensor

from ops.kernels.grouped_gemm.float8_persistent import (
    k_grouped_float8_persistent_kernel,
    m_grouped_float8_persistent_kernel,
)
from ops.kernels.grouped_gemm.float8_scales import (
    check_nt,
    check_tn,
    scale_layout,
    scale_of_columns,
    scale_of_rows,
    scale_of_weight,
)
from ops.kernels.grouped_gemm.high_precision import capability
from ops.kernels.grouped_gemm.operands import (
    check_accumulate,
    check_scales,
    output,
    packed,
    row_slices,
    with_contiguous_rows,
)
from ops.kernels.grouped_gemm.persistent_schedule import MOST_GROUPS, band, multiprocessors, padded_groups
from ops.kernels.grouped_gemm.pointers_triton import k_grouped_kernel, m_grouped_kernel
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, takes_descriptors
from ops.kernels.grouped_gemm.tile_rules_float8 import (
    GroupedFloat8Config,
    k_grouped_float8_config,
    m_grouped_float8_config,
    promotes,
)
from recipes.tensors.formats import ScaleLayout
from recipes.tensors.splits import Splits
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import Launch, cdiv, has_work, launcher, replayed
from recipes.triton.row_slots import num_slots

if why_no_gluon((9, 0)) is None:
    from ops.kernels.grouped_gemm.float8_nt_gluon import k_grouped_float8_gluon
    from ops.kernels.grouped_gemm.m_grouped_gluon import m_grouped_gluon

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
        a = a_codes_TR[rows].to(dtype) * scale_of_rows(a_scale, splits, g, rows, a_codes_TR.shape[1]).to(dtype)
        b = b_codes_GCR[g].to(dtype) * scale_of_weight(b_scale, layout, splits, g, b_codes_GCR.shape[1:]).to(dtype)
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
                codes[:, begin:end].to(dtype) * scale_of_columns(scale, num_groups, g, begin, end).to(dtype)
                for codes, scale in ((dy_codes_NP, dy_scale), (x_codes_KP, x_scale))
            )
            dw[g] = dy @ x.T
    return dw.to(out_dtype)


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
    check_tn(a_codes_TR, a_scale, b_codes_GCR, b_scale, splits, bias_GC)
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
    dy_codes: Tensor,
    dy_scale: Tensor,
    x_codes_KP: Tensor,
    x_scale: Tensor,
    offsets_aligned: Tensor,
    *,
    row_offsets: Tensor | None = None,
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
    (1x128 scales); what pads it is zeros. row_offsets: [G + 1] int64, if dy_codes is the rowwise copy [T, N] that these
    divide, per tensor; without the kernel in Gluon, and in fast accumulation, it is transposed before the product.
    Scales: see the top of the file. out: [G, N, K]. out_dtype and split_accumulation: as `grouped_gemm_tn_float8`. A
    group without columns gets zeros; accumulate, which needs `out`: out += dw, summed in float32 and rounded once, and
    the part of such a group is untouched. reverse, spare: as `grouped_gemm_nt`.
    """
    if dy_codes.device.type == "cuda":
        return _nt(
            dy_codes, dy_scale, x_codes_KP, x_scale, offsets_aligned, row_offsets, out, out_dtype,
            split_accumulation, accumulate, reverse, spare,
        )  # fmt: skip
    out = _checked_nt(
        dy_codes, dy_scale, x_codes_KP, x_scale, offsets_aligned, row_offsets, out, out_dtype, accumulate, reverse
    )
    if row_offsets is not None:
        dy_codes = _transposed(dy_codes, row_offsets, offsets_aligned, x_codes_KP.shape[1])
    dw = grouped_gemm_nt_float8_ref(
        dy_codes, dy_scale, x_codes_KP, x_scale, offsets_aligned, out_dtype=torch.float32
    )  # fmt: skip
    empty = offsets_aligned[1:] == offsets_aligned[:-1]
    if reverse:
        dw, empty = dw.flip(0), empty.flip(0)
    if accumulate:
        dw = torch.where(empty[:, None, None], out, dw + out)
    return out.copy_(dw)


def _checked_nt(
    dy_codes: Tensor,
    dy_scale: Tensor,
    x_codes_KP: Tensor,
    x_scale: Tensor,
    offsets_aligned: Tensor,
    row_offsets: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
    accumulate: bool,
    reverse: bool,
) -> Tensor:
    """`out`, or a new one, once the operands fit together."""
    check_accumulate(out, accumulate, reverse)
    check_nt(dy_codes, dy_scale, x_codes_KP, x_scale, offsets_aligned, row_offsets)
    N = dy_codes.shape[0 if row_offsets is None else 1]
    shape = (offsets_aligned.shape[0] - 1, N, x_codes_KP.shape[0])
    return output(out, shape, None if out is not None else out_dtype, dy_codes)


@replayed
def _nt(
    dy_codes: Tensor,
    dy_scale: Tensor,
    x_codes_KP: Tensor,
    x_scale: Tensor,
    offsets_aligned: Tensor,
    row_offsets: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype,
    split_accumulation: bool,
    accumulate: bool,
    reverse: bool,
    spare: int,
) -> Tensor:
    """Checks, allocates and launches NT."""
    out = _checked_nt(
        dy_codes, dy_scale, x_codes_KP, x_scale, offsets_aligned, row_offsets, out, out_dtype, accumulate, reverse
    )
    num_groups = out.shape[0]
    target = out
    if num_groups and not out[0].is_contiguous():
        target = out.contiguous() if accumulate else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    grouped_gemm_nt_float8_triton(
        with_aligned_rows(dy_codes) if row_offsets is None else dy_codes,
        _ready(dy_scale, num_groups),
        with_aligned_rows(x_codes_KP),
        _ready(x_scale, num_groups),
        offsets_aligned,
        target,
        split_accumulation,
        accumulate,
        reverse,
        spare,
        row_offsets,
    )
    return out if target is out else out.copy_(target)


def _transposed(codes_TN: Tensor, offsets: Tensor, aligned: Tensor, columns: int) -> Tensor:
    """The transposed columnwise copy [N, P] of rows, in which each group begins where `aligned` says and is padded with
    zeros. Repeatable: its operations are those whose shapes torch knows before."""
    if not codes_TN.numel() or len(offsets) == 1:
        return codes_TN.new_zeros(codes_TN.shape[1], columns)
    column = torch.arange(columns, device=codes_TN.device)
    group = torch.searchsorted(aligned[1:], column, right=True).clamp_(max=len(offsets) - 2)
    row = column + (offsets[:-1] - aligned[:-1]).index_select(0, group)
    rows = codes_TN.view(torch.uint8).index_select(0, row.clamp(max=len(codes_TN) - 1))
    past = row >= offsets[1:].index_select(0, group)
    return rows.masked_fill_(past[:, None], 0).T.contiguous().view(codes_TN.dtype)


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
        m_grouped_gluon(
            a, b, offsets, bias, scales, out, config, a_scale=a_scale, b_scale=b_scale, layout=layout, promote=promote
        )
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
    row_offsets: Tensor | None = None,
) -> None:
    """Launches NT. Rows of dy and x, the matrices of out and block scales are contiguous; offsets [G + 1], aligned.

    Scales per tensor: [G], which may be an expanded (). row_offsets: [G + 1], of dy in rows.
    """
    if x.shape[1] == 0 or out.numel() == 0:
        if not accumulate:
            out.zero_()
        return
    G, N, K = out.shape
    layout: ScaleLayout = ("tensor", "row", "vector")[max(dy_scale.dim() - 1, 0)]
    promote = promotes(layout, split_accumulation)
    config = _nt_config(dy, x, out, layout, promote, accumulate)
    if row_offsets is not None and not (config.gluon and promote and N % 16 == 0):
        dy, row_offsets = _transposed(dy, row_offsets, offsets, x.shape[1]), None
        config = _nt_config(dy, x, out, layout, promote, accumulate)
    if config.gluon:
        k_grouped_float8_gluon(
            dy, dy_scale, x, x_scale, offsets, out, config, layout, promote, accumulate, reverse, spare, row_offsets
        )
        return
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


def _nt_config(
    dy: Tensor, x: Tensor, out: Tensor, layout: ScaleLayout, promote: bool, accumulate: bool
) -> GroupedFloat8Config:
    return k_grouped_float8_config(
        x.shape[1],
        out.shape[0],
        layout=layout,
        promote=promote,
        out_dtype=out.dtype,
        accumulate=accumulate,
        descriptors=takes_descriptors(dy, x, out) and out.shape[0] <= MOST_GROUPS,
        capability=capability(out),
        gluon=why_no_gluon(capability(out)) is None,
    )


def with_aligned_rows(codes: Tensor) -> Tensor:
    """The codes if their rows are multiples of 16 bytes, or a copy in which zeros make them so."""
    missing = -codes.shape[-1] % 16
    if not has_work(codes) or (missing == 0 and takes_descriptors(codes)):
        return codes
    return torch.nn.functional.pad(codes.view(torch.uint8), (0, missing)).contiguous().view(codes.dtype)


def _ready(scale: Tensor, num_groups: int) -> Tensor:
    return scale.expand(num_groups) if scale.dim() < 2 else scale.contiguous()
