"""Grouped GEMM with SwiGLU in its epilogue: FC1 of the experts and their activation in one kernel.

    h[t]   = alpha_g x[t] w_g^T + b_g                       the pre-activation, rounded to its dtype
    act[t] = silu(gate[t]) * up[t] * scales[t]              silu(a) = a / (1 + exp(-a)), of the rounded h

g is the group of row t. Rows of no group are zero in h and in act.

Layouts: x [T, K], w [G, 2I, K], b [G, 2I], scales [T], alpha [G] or (); h [T, 2I], act [T, I]. Which columns of h are
gate and up: halves [gate | up], or with `glu_interleave_size` = S alternating runs of S columns, gate first.

    I = 4, S = 2:   columns of h   gate 0, gate 1, up 0, up 1, gate 2, gate 3, up 2, up 3

A program computes a block of gate columns and the block of up columns that belongs to it, in two accumulators.

Precision: as `grouped_gemm_tn` up to h, which is rounded; from there float32 (float64 for float64 operands) with
exp as the GPU's 2 ulp approximation and a correctly rounded division, and one rounding of act. So the result is what
the unfused operations give, but for the last place of exp.

Graph safety: as in `ops.kernels.grouped_gemm`.
"""
# T rows, G groups, K in features, I features of the activation

import torch
import triton
import triton.language as tl
from torch import Tensor

from ops.kernels.activation import Activation, activation, activation_ref
from ops.kernels.grouped_gemm import (
    GroupedGemmConfig,
    allow_tf32,
    capability,
    grouped_gemm_tn,
    grouped_gemm_tn_ref,
    is_aligned,
)
from ops.kernels.grouped_operands import check_m_grouped, per_group, with_contiguous_rows
from recipes.kernels.rounding import round_to, widen
from recipes.kernels.row_tiles import find_tile, num_slots
from recipes.splits import Splits


def grouped_gemm_swiglu_ref(
    x_TK: Tensor,
    w_GNK: Tensor,
    splits: Splits,
    *,
    bias_GN: Tensor | None = None,
    scales_T: Tensor | None = None,
    alpha_G: Tensor | None = None,
    glu_interleave_size: int | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """`grouped_gemm_swiglu` in plain torch. Returns (h [T, 2I], act [T, I])."""
    h = grouped_gemm_tn_ref(x_TK, w_GNK, splits, bias_GN=bias_GN, alpha_G=alpha_G, out_dtype=out_dtype)
    swiglu = Activation("swiglu", glu_interleave_size=glu_interleave_size)
    return h, activation_ref(h, swiglu, _active(scales_T, splits))


def grouped_gemm_swiglu_config(
    dtype: torch.dtype, *, glu_interleave_size: int, tf32: bool, aligned: bool, capability: tuple[int, int]
) -> GroupedGemmConfig:
    """Tiles of the kernel. `block_n` counts columns of act: there are two accumulators of that width.

    As `ops.kernels.grouped_gemm.m_grouped_config`, but 64 rows high: two accumulators of 128 x 64 and the epilogue
    need more registers than there are. Runs that a tile does not hold whole are stored element by element.
    """
    if dtype == torch.float32 and not tf32:
        config = GroupedGemmConfig(64, 32, 16, num_warps=4, num_stages=2)
    elif not aligned or (glu_interleave_size and 64 % glu_interleave_size):
        config = GroupedGemmConfig(64, 32, 32, num_warps=4, num_stages=2)
    else:
        config = GroupedGemmConfig(64, 64, 128 // dtype.itemsize, num_warps=4, num_stages=3)
    return config.fitting(config.block_m + 2 * config.block_n, dtype, capability)


@triton.jit(do_not_specialize=["rows", "num_groups"])
def grouped_gemm_swiglu_kernel(
    x_ptr,  # [T, K], rows x_stride apart
    w_ptr,  # [G, 2I, K] contiguous
    offsets_ptr,  # [G + 1] int64
    bias_ptr,  # [G, 2I] or None
    scales_ptr,  # [T] or None
    alpha_ptr,  # [G] float32 or None
    h_ptr,  # [T, 2I] contiguous, or None
    act_ptr,  # [T, I] contiguous
    rows,
    num_groups,
    K,
    act_features,
    x_stride,
    INTERLEAVE: tl.constexpr,  # 0: halves
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """h and act of BLOCK_M rows of one group, BLOCK_N columns of act, a program."""
    num_tiles_n = tl.cdiv(act_features, BLOCK_N)
    group, first, end = find_tile(offsets_ptr, tl.program_id(0) // num_tiles_n, rows, num_groups, BLOCK_M)
    if first >= end:
        return
    first_i = (tl.program_id(0) % num_tiles_n) * BLOCK_N
    offs_t = tl.arange(0, BLOCK_M)  # from here on offsets within the tile, which fit 32 bits
    offs_i = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    mask_t = offs_t < end - first
    mask_i = offs_i < act_features - first_i
    if INTERLEAVE == 0:
        first_column = first_i
        columns = offs_i  # of gate, seen from the first one
        up_distance = act_features
    elif BLOCK_N % INTERLEAVE == 0:  # whole runs: the compiler sees what is contiguous
        first_column = 2 * first_i
        columns = offs_i // INTERLEAVE * (2 * INTERLEAVE) + offs_i % INTERLEAVE
        up_distance = INTERLEAVE
    else:
        first_column = first_i // INTERLEAVE * (2 * INTERLEAVE)
        in_run = first_i % INTERLEAVE + offs_i
        columns = in_run // INTERLEAVE * (2 * INTERLEAVE) + in_run % INTERLEAVE
        up_distance = INTERLEAVE

    x_ptr += first * x_stride
    gate_ptr = w_ptr + (group.to(tl.int64) * 2 * act_features + first_column) * K
    up_ptr = gate_ptr + tl.cast(up_distance, tl.int64) * K
    offs_x = offs_t[:, None] * x_stride + offs_k[None, :]  # [BLOCK_M, BLOCK_K]
    offs_w = columns[None, :] * K + offs_k[:, None]  # [BLOCK_K, BLOCK_N]
    gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, tl.where(group < num_groups, K, 0), BLOCK_K):
        mask_k = offs_k < K - k
        x = widen(tl.load(x_ptr + offs_x, mask=mask_t[:, None] & mask_k[None, :], other=0.0))
        w_gate = widen(tl.load(gate_ptr + offs_w, mask=mask_k[:, None] & mask_i[None, :], other=0.0))
        w_up = widen(tl.load(up_ptr + offs_w, mask=mask_k[:, None] & mask_i[None, :], other=0.0))
        gate = tl.dot(x, w_gate, gate, input_precision=PRECISION)
        up = tl.dot(x, w_up, up, input_precision=PRECISION)
        x_ptr += BLOCK_K
        gate_ptr += BLOCK_K
        up_ptr += BLOCK_K

    if alpha_ptr is not None:
        alpha = tl.load(alpha_ptr + group, mask=group < num_groups, other=0.0)
        gate *= alpha
        up *= alpha
    if bias_ptr is not None:
        bias_ptr += group.to(tl.int64) * 2 * act_features + first_column
        mask_b = mask_i & (group < num_groups)
        gate += tl.load(bias_ptr + columns, mask=mask_b, other=0.0).to(tl.float32)[None, :]
        up += tl.load(bias_ptr + up_distance + columns, mask=mask_b, other=0.0).to(tl.float32)[None, :]

    gate_rounded = round_to(gate, act_ptr.dtype.element_ty)
    up_rounded = round_to(up, act_ptr.dtype.element_ty)
    mask = mask_t[:, None] & mask_i[None, :]
    if h_ptr is not None:
        h_ptr += first * 2 * act_features + first_column
        offs_h = offs_t[:, None] * (2 * act_features) + columns[None, :]
        tl.store(h_ptr + offs_h, gate_rounded, mask=mask)
        tl.store(h_ptr + up_distance + offs_h, up_rounded, mask=mask)
    gate = gate_rounded.to(tl.float32)
    act = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up_rounded.to(tl.float32)
    if scales_ptr is not None:
        # scales of rows that belong to no group may be anything
        mask_s = mask_t & (group < num_groups)
        act *= tl.load(scales_ptr + first + offs_t, mask=mask_s, other=0.0).to(tl.float32)[:, None]
    act_ptr += first * act_features + first_i
    offs_act = offs_t[:, None] * act_features + offs_i[None, :]
    tl.store(act_ptr + offs_act, round_to(act, act_ptr.dtype.element_ty), mask=mask)


def grouped_gemm_swiglu(
    x_TK: Tensor,
    w_GNK: Tensor,
    splits: Splits,
    *,
    bias_GN: Tensor | None = None,
    scales_T: Tensor | None = None,
    alpha_G: Tensor | None = None,
    glu_interleave_size: int | None = None,
    need_preact: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor | None, Tensor]:
    """h[t] = alpha_g x[t] w_g^T + bias_g and act[t] = silu(gate[t]) * up[t] * scales[t].

    x: [T, K] and w: [G, 2I, K] of one floating dtype. bias: [G, 2I], scales: [T] (1 if None; scale the activation),
    alpha: [G] or () float32 (1 if None). glu_interleave_size: None for halves [gate | up], or the length of the runs
    in which gate and up columns alternate; it divides I.

    Returns (h [T, 2I], act [T, I]) in out_dtype (x's if None); h is None unless `need_preact`. Rows of no group are
    zero. Raises what `grouped_gemm_tn` raises, and ValueError if w's out features do not divide into gate and up.
    """
    check_m_grouped(x_TK, w_GNK, splits, bias_GN, scales_T, w_features=2)
    check_gated(w_GNK.shape[1], glu_interleave_size)
    if x_TK.device.type != "cuda":
        preact = grouped_gemm_tn(x_TK, w_GNK, splits, bias_GN=bias_GN, alpha_G=alpha_G, out_dtype=out_dtype)
        swiglu = Activation("swiglu", glu_interleave_size=glu_interleave_size)
        return preact if need_preact else None, activation(preact, swiglu, _active(scales_T, splits))
    rows, out_features = x_TK.shape[0], w_GNK.shape[1]
    dtype = out_dtype or x_TK.dtype
    h = torch.empty(rows, out_features, dtype=dtype, device=x_TK.device) if need_preact else None
    act = torch.empty(rows, out_features // 2, dtype=dtype, device=x_TK.device)
    grouped_gemm_swiglu_triton(
        with_contiguous_rows(x_TK),
        w_GNK.contiguous(),
        splits.offsets,
        None if bias_GN is None else bias_GN.contiguous(),
        None if scales_T is None else scales_T.contiguous(),
        per_group(alpha_G, splits),
        h,
        act,
        glu_interleave_size=glu_interleave_size or 0,
        tf32=allow_tf32(),
    )
    return h, act


@torch.library.custom_op("fuser::grouped_gemm_swiglu", mutates_args=("h", "act"))
def grouped_gemm_swiglu_triton(
    x_TK: Tensor,
    w_GNK: Tensor,
    offsets: Tensor,
    bias_GN: Tensor | None,
    scales_T: Tensor | None,
    alpha_G: Tensor | None,
    h: Tensor | None,
    act: Tensor,
    glu_interleave_size: int,
    tf32: bool,
) -> None:
    """Launches the kernel, with 0 for halves. Rows of x are contiguous, and so are all others as a whole."""
    if act.numel() == 0:
        return
    rows, K = x_TK.shape
    num_groups = w_GNK.shape[0]
    config = grouped_gemm_swiglu_config(
        x_TK.dtype,
        glu_interleave_size=glu_interleave_size,
        tf32=tf32,
        aligned=is_aligned(x_TK, w_GNK, act),
        capability=capability(act),
    )
    slots = num_slots(rows, num_groups, config.block_m)
    with torch.cuda.device_of(act):
        grouped_gemm_swiglu_kernel[(slots * triton.cdiv(act.shape[1], config.block_n),)](
            x_TK,
            w_GNK,
            offsets,
            bias_GN,
            scales_T,
            alpha_G,
            h,
            act,
            rows,
            num_groups,
            K,
            act.shape[1],
            x_TK.stride(0),
            INTERLEAVE=glu_interleave_size,
            PRECISION="tf32" if tf32 else "ieee",
            BLOCK_M=config.block_m,
            BLOCK_N=config.block_n,
            BLOCK_K=config.block_k,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
        )


# Every buffer that the launcher writes is an argument, so nothing comes back and there is no shape to derive.
@grouped_gemm_swiglu_triton.register_fake
def _(x_TK, w_GNK, offsets, bias_GN, scales_T, alpha_G, h, act, glu_interleave_size, tf32) -> None: ...


def check_gated(out_features: int, glu_interleave_size: int | None) -> None:
    """Raises ValueError unless the columns of h divide into gate and up."""
    if out_features % 2:
        raise ValueError(f"the weight has {out_features} out features, but gate and up need an even number.")
    if glu_interleave_size is not None and (glu_interleave_size < 1 or out_features // 2 % glu_interleave_size):
        raise ValueError(
            f"glu_interleave_size is {glu_interleave_size}, but must divide the {out_features // 2} features of the "
            "activation. Pass None for halves [gate | up]."
        )


def _active(scales_T: Tensor | None, splits: Splits) -> Tensor | None:
    """The scales, those of rows that belong to no group 0: they may be anything."""
    return None if scales_T is None else scales_T.masked_fill(splits.group_of_row == splits.num_groups, 0)
