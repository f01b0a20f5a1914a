"""FC2's dgrad and the backward of its activation, in one kernel where that is faster.

    dact = dy w_g                        g: the group of row t
    act  = f(h) * scales                 dh = df(h) * (dact * scales)           dscales[t] = sum over i of dact f(h)

Layouts: dy [T, N], w [G, N, I], h [T, 2I], scales [T]; f is an `Activation`. Rows of no group are zero in dh, act and
dscales where h is.

Precision: that of `grouped_gemm_nn` and then `dactivation`, and the same bits of dh and act. dscales is summed in
float32 in another order.

Graph safety: that of `high_precision`. What `why_two_kernels` refuses, and operands that lie in memory as descriptors
cannot describe, take two kernels and dact in memory.

The kernel: `m_grouped_dactivation_gluon.py`.
"""
# T rows, G groups, N out features of FC2, I features of the activation

import torch
from torch import Tensor

from ops.kernels.elementwise.activation import Activation, activation_step, check_activation, dactivation
from ops.kernels.elementwise.share_sums import sum_shares
from ops.kernels.grouped_gemm.high_precision import capability, config_of, grouped_gemm_nn
from ops.kernels.grouped_gemm.measured_tiles import GLUON_GROUPS
from ops.kernels.grouped_gemm.operands import check_m_grouped
from ops.kernels.grouped_gemm.ragged_tma import takes_descriptors
from ops.kernels.grouped_gemm.tile_rules import QUEUED_IN_GLUON, has_fast_memory
from recipes.tensors.abstract import is_abstract
from recipes.tensors.splits import Splits
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import cdiv, replayed

if why_no_gluon((9, 0)) is None:
    from ops.kernels.grouped_gemm.m_grouped_dactivation_gluon import m_grouped_dactivation_gluon

# Of QUEUED_IN_GLUON's, beside a tile of dact and boxes of h: measured on an H200 (`bench/results/tuning.md`).
TILE = QUEUED_IN_GLUON._replace(block_k=32, num_stages=6)
UNIT = 64  # features of the activation, of which half are differentiated at a time
LEAST_FEATURES = 2048  # that are summed: with fewer, differentiating a tile would take longer than multiplying the next


def why_two_kernels(
    dtype: torch.dtype, weights: tuple[int, int, int], spec: Activation, gpu: tuple[int, int] | None
) -> str | None:
    """Why the product and the activation's backward are two kernels for any number of rows, as a sentence, or None.

    weights: [G, N, I]. gpu: its compute capability; None: a CPU.
    """
    num_groups, N, columns = weights
    if gpu is None:
        return "A CPU runs the product and the activation one after the other."
    if why := why_no_gluon(gpu):
        return why
    if not has_fast_memory():
        return (
            "The kernel is for GPUs with more than 100 GiB of memory (H200): with less, products in Triton are faster."
        )
    if dtype != torch.bfloat16:
        return f"The kernel multiplies bfloat16, and these are {str(dtype).removeprefix('torch.')}."
    if num_groups > GLUON_GROUPS:
        return f"The kernel is for {GLUON_GROUPS} groups at most, and there are {num_groups}."
    if spec.kind != "swiglu":
        return f"The kernel is for SwiGLU, and this is {spec.kind}."
    if spec.glu_interleave_size not in (None, columns):
        return f"Its tiles have halves of the columns, and glu_interleave_size is {spec.glu_interleave_size}."
    if columns % UNIT or N % 8 or N < LEAST_FEATURES:
        return (
            f"The kernel is for out features of FC2 that are a multiple of 8, {LEAST_FEATURES} at least, and features "
            f"of the activation that are a multiple of {UNIT}, and these are {N} and {columns}."
        )
    return None


def grouped_gemm_dactivation(
    dy_TN: Tensor,
    w_GNI: Tensor,
    splits: Splits,
    h: Tensor,
    spec: Activation,
    *,
    scales_T: Tensor | None,
    need_act: bool,
    need_dscales: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns (dh [T, 2I] in h's dtype, dscales [T] in scales' dtype, act [T, I]), None for what is not needed.

    dy: [T, N], w: [G, N, I] and h: [T, 2I] of one floating dtype, scales: [T], any floating dtype (1 if None).
    need_dscales requires scales. Raises ValueError and TypeError as `grouped_gemm_nn` and `dactivation` do.
    """
    if dy_TN.is_cuda and not is_abstract(dy_TN):
        return _on_cuda(dy_TN, w_GNI, splits.offsets, splits.rows, h, spec, scales_T, need_act, need_dscales)
    return _one_after_the_other(dy_TN, w_GNI, splits, h, spec, scales_T, need_act, need_dscales)


def _one_after_the_other(
    dy: Tensor, w: Tensor, splits: Splits, h: Tensor, spec: Activation, scales: Tensor | None, act: bool, dscales: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    dact = grouped_gemm_nn(dy, w, splits)
    dh, d_scales, made = dactivation(dact, h, spec, scales, need_dh=True, need_act=act, need_dscales=dscales)
    assert dh is not None, "it is needed"
    return dh, d_scales, made


@replayed
def _on_cuda(
    dy: Tensor,
    w: Tensor,
    offsets: Tensor,
    rows: int,
    h: Tensor,
    spec: Activation,
    scales: Tensor | None,
    need_act: bool,
    need_dscales: bool,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    splits = Splits.over(offsets, rows)
    if not _at_once(dy, w, h, spec):
        return _one_after_the_other(dy, w, splits, h, spec, scales, need_act, need_dscales)
    check_m_grouped(dy, w, splits, None, w_features=1)
    check_activation(h.shape, spec, scales)
    columns = w.shape[2]
    dh = torch.empty_like(h)
    act = dy.new_empty(rows, columns) if need_act else None
    tiles = cdiv(columns, TILE.block_n)
    shares = dy.new_empty((tiles, rows) if tiles > 1 else (rows,), dtype=torch.float32) if need_dscales else None
    step = activation_step(spec, scales is not None)
    given = scales if scales is None else scales.contiguous()
    m_grouped_dactivation_gluon(dy, w, offsets, h, given, dh, act, shares, TILE, step)
    if shares is None or scales is None:
        return dh, None, act
    return dh, (sum_shares(shares) if tiles > 1 else shares).to(scales.dtype), act


def _at_once(dy: Tensor, w: Tensor, h: Tensor, spec: Activation) -> bool:
    return (
        why_two_kernels(dy.dtype, (w.shape[0], w.shape[1], w.shape[2]), spec, capability(dy)) is None
        and h.dtype == w.dtype == dy.dtype
        and h.ndim == 2
        and h.is_contiguous()
        and takes_descriptors(dy, w, h)
        and config_of(dy, w, h, transposed=False, tf32=False) == QUEUED_IN_GLUON
    )
