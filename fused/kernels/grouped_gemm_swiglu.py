"""Grouped GEMM with SwiGLU in its epilogue: FC1 of the experts and their activation in one kernel.

    h[t]   = alpha_g x[t] w_g^T + b_g                       the pre-activation, rounded to its dtype
    act[t] = silu(gate[t]) * up[t] * scales[t]              silu(a) = a / (1 + exp(-a)), of the rounded h

g is the group of row t. Rows of no group are zero in h and in act.

Layouts: x [T, K], w [G, 2I, K], b [G, 2I], scales [T], alpha [G] or (); h [T, 2I], act [T, I]. Which columns of h are
gate and up: halves [gate | up], or with `glu_interleave_size` = S alternating runs of S columns, gate first.

    I = 4, S = 2:   columns of h   gate 0, gate 1, up 0, up 1, gate 2, gate 3, up 2, up 3

A program computes a block of gate columns and the block of up columns that belongs to it: with descriptors, tile after
tile in one accumulator whose left half is gate and whose right half is up, since one box of the weight, seen as
[G, 2, I/S, S, K], holds the rows of both; with pointers, in two accumulators.

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
from triton.tools.tensor_descriptor import TensorDescriptor

from ops.kernels.activation import Activation, activation, activation_ref
from ops.kernels.grouped_gemm import (
    PERSISTENT,
    PERSISTENT_SMALL,
    GroupedGemmConfig,
    allow_tf32,
    capability,
    grouped_gemm_tn,
    grouped_gemm_tn_ref,
    is_aligned,
    uses_descriptors,
)
from ops.kernels.grouped_gemm_triton import store_rows
from ops.kernels.grouped_operands import check_m_grouped, per_group, with_contiguous_rows
from ops.kernels.persistent_tiles import (
    MOST_GROUPS,
    band,
    ends_of_groups,
    find_rows,
    halves,
    multiprocessors,
    room_for,
    tile_in_bands,
)
from ops.kernels.ragged_tma import ragged_descriptor, ragged_indices, takes_descriptors
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
    rows: int,
    num_groups: int,
    dtype: torch.dtype,
    out_dtype: torch.dtype,
    *,
    glu_interleave_size: int,
    tf32: bool,
    aligned: bool,
    descriptors: bool,
    capability: tuple[int, int],
) -> GroupedGemmConfig:
    """Tiles of the kernel. `block_n` counts columns of act: of gate and up together there are twice as many.

    As `ops.kernels.grouped_gemm.m_grouped_config`. On descriptors outputs have 16 bits, as shared memory holds two that
    are on their way; runs of columns are whole in a tile, and at least the eight columns which one thread's registers
    hold in order. On pointers tiles are 64 rows high: two accumulators of 128 x 64 and the epilogue need more registers
    than there are. Runs that such a tile does not hold whole are stored element by element.
    """
    if uses_descriptors(dtype, descriptors, capability) and out_dtype.itemsize == 2:
        config = PERSISTENT_SMALL if rows < 96 * num_groups else PERSISTENT
        config = config._replace(block_n=config.block_n // 2)
        if glu_interleave_size == 0 or (glu_interleave_size >= 8 and config.block_n % glu_interleave_size == 0):
            return config
    if dtype == torch.float32 and not tf32:
        config = GroupedGemmConfig(64, 32, 16, num_warps=4, num_stages=2)
    elif not aligned or (glu_interleave_size and 64 % glu_interleave_size):
        config = GroupedGemmConfig(64, 32, 32, num_warps=4, num_stages=2)
    else:
        config = GroupedGemmConfig(64, 64, 128 // dtype.itemsize, num_warps=4, num_stages=3)
    return config.fitting(config.block_m + 2 * config.block_n, dtype, capability)


@triton.jit
def gate_columns(first_i, act_features, INTERLEAVE: tl.constexpr, BLOCK_N: tl.constexpr):
    """(column of h, columns from there) of the gates of act's columns from first_i on, and the distance of up."""
    offs_i = tl.arange(0, BLOCK_N)
    if INTERLEAVE == 0:
        first_column = first_i
        columns = offs_i
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
    return first_column, columns, up_distance


@triton.jit
def with_gated_bias(gate, up, bias_ptr, group, num_groups, first_column, columns, up_distance, act_features, mask_i):
    """gate and up, and the bias of their columns; 0 in the tail."""
    bias_ptr += group.to(tl.int64) * 2 * act_features + first_column
    mask_b = mask_i & (group < num_groups)
    gate += tl.load(bias_ptr + columns, mask=mask_b, other=0.0).to(tl.float32)[None, :]
    up += tl.load(bias_ptr + up_distance + columns, mask=mask_b, other=0.0).to(tl.float32)[None, :]
    return gate, up


@triton.jit
def swiglu_of_rows(gate, up, scales_ptr, group, num_groups, first, end):
    """silu(gate) * up * scales in float32, of the rounded gate and up."""
    gate = gate.to(tl.float32)
    act = tl.div_rn(gate, 1.0 + tl.exp(-gate)) * up.to(tl.float32)
    if scales_ptr is not None:
        # scales of rows that belong to no group may be anything
        offs_t = tl.arange(0, gate.shape[0])
        mask_s = (offs_t < end - first) & (group < num_groups)
        act *= tl.load(scales_ptr + first + offs_t, mask=mask_s, other=0.0).to(tl.float32)[:, None]
    return act


@triton.jit
def store_preact(h, gate, up, first, end, first_i, INTERLEAVE: tl.constexpr):
    """The columns of h that belong to the gates and ups from first_i on, of rows from first to end."""
    M: tl.constexpr = gate.shape[0]
    N: tl.constexpr = gate.shape[1]
    z, y, row = ragged_indices(first, end - first, 0, 1)
    if INTERLEAVE == 0:
        h.store([z, y, row, 0, first_i], gate.reshape(1, 1, M, 1, N))
        h.store([z, y, row, 1, first_i], up.reshape(1, 1, M, 1, N))
    else:
        RUNS: tl.constexpr = N // INTERLEAVE
        pairs = tl.join(gate.reshape(M, RUNS, INTERLEAVE), up.reshape(M, RUNS, INTERLEAVE)).permute(0, 1, 3, 2)
        left, right = halves(pairs.reshape(M, 2 * N))
        h.store([z, y, row, 2 * first_i], left.reshape(1, 1, M, N))
        h.store([z, y, row, 2 * first_i + N], right.reshape(1, 1, M, N))


@triton.jit(do_not_specialize=["rows", "num_groups"])
def grouped_gemm_swiglu_persistent_kernel(
    x,  # [T, K]: descriptor, ragged along T
    w,  # [G, 2, I/S, S, K], S = I for halves: descriptor of boxes that hold BLOCK_N gates and their ups
    h,  # [T, 2, I], or interleaved [T, 2I]: descriptor, ragged along T, or None
    act,  # [T, I]: descriptor, ragged along T
    offsets_ptr,  # [G + 1] int64
    bias_ptr,  # [G, 2I] or None
    scales_ptr,  # [T] or None
    alpha_ptr,  # [G] float32 or None
    rows,
    num_groups,
    K,
    act_features,
    INTERLEAVE: tl.constexpr,  # 0: halves
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BAND: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """h and act, tile after tile of BLOCK_M rows of one group and BLOCK_N columns of act."""
    num_tiles_n = tl.cdiv(act_features, BLOCK_N)
    ends = ends_of_groups(offsets_ptr, num_groups, BLOCK_M, GROUPS)
    num_tiles_m = tl.max(ends, axis=0)
    for tile in tl.range(tl.program_id(0), num_tiles_m * num_tiles_n, tl.num_programs(0), flatten=True):
        tile_m, tile_n = tile_in_bands(tile, num_tiles_m, num_tiles_n, BAND)
        group, first, end = find_rows(offsets_ptr, ends, tile_m, BLOCK_M)
        first_i = tile_n * BLOCK_N
        if INTERLEAVE == 0:
            run, in_run = 0, first_i
        else:
            run, in_run = first_i // INTERLEAVE, 0
        z, y, row = ragged_indices(first, end - first, 0, 1)
        acc = tl.zeros((BLOCK_M, 2 * BLOCK_N), tl.float32)
        for k in range(0, K, BLOCK_K):
            x_tile = widen(x.load([z, y, row, k]).reshape(BLOCK_M, BLOCK_K))
            w_tile = widen(w.load([group, 0, run, in_run, k]).reshape(2 * BLOCK_N, BLOCK_K))
            acc = tl.dot(x_tile, w_tile.T, acc)

        if alpha_ptr is not None:
            acc *= tl.load(alpha_ptr + group)
        gate, up = halves(acc)
        if bias_ptr is not None:
            first_column, columns, up_distance = gate_columns(first_i, act_features, INTERLEAVE, BLOCK_N)
            mask_i = tl.arange(0, BLOCK_N) < act_features - first_i
            gate, up = with_gated_bias(
                gate, up, bias_ptr, group, num_groups, first_column, columns, up_distance, act_features, mask_i
            )
        gate = round_to(gate, act.dtype)
        up = round_to(up, act.dtype)
        if h is not None:
            store_preact(h, gate, up, first, end, first_i, INTERLEAVE)
        store_rows(act, swiglu_of_rows(gate, up, scales_ptr, group, num_groups, first, end), first, end, first_i)
    # The rows of no group.
    tail = tl.load(offsets_ptr + num_groups)
    zeros = tl.zeros((BLOCK_M, BLOCK_N), act.dtype)
    num_tiles = tl.cdiv(rows - tail, BLOCK_M).to(tl.int32) * num_tiles_n
    for tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        first = tail + (tile // num_tiles_n) * BLOCK_M
        end = tail * 0 + rows
        first_i = tile % num_tiles_n * BLOCK_N
        if h is not None:
            store_preact(h, zeros, zeros, first, end, first_i, INTERLEAVE)
        store_rows(act, tl.zeros((BLOCK_M, BLOCK_N), tl.float32), first, end, first_i)


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
    first_column, columns, up_distance = gate_columns(first_i, act_features, INTERLEAVE, BLOCK_N)

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
        gate, up = with_gated_bias(
            gate, up, bias_ptr, group, num_groups, first_column, columns, up_distance, act_features, mask_i
        )

    gate = round_to(gate, act_ptr.dtype.element_ty)
    up = round_to(up, act_ptr.dtype.element_ty)
    mask = mask_t[:, None] & mask_i[None, :]
    if h_ptr is not None:
        h_ptr += first * 2 * act_features + first_column
        offs_h = offs_t[:, None] * (2 * act_features) + columns[None, :]
        tl.store(h_ptr + offs_h, gate, mask=mask)
        tl.store(h_ptr + up_distance + offs_h, up, mask=mask)
    act = swiglu_of_rows(gate, up, scales_ptr, group, num_groups, first, end)
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
        tf32=allow_tf32(x_TK),
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
    outputs = [act] if h is None else [act, h]
    config = grouped_gemm_swiglu_config(
        rows,
        num_groups,
        x_TK.dtype,
        act.dtype,
        glu_interleave_size=glu_interleave_size,
        tf32=tf32,
        aligned=is_aligned(x_TK, w_GNK, act),
        descriptors=takes_descriptors(x_TK, w_GNK, *outputs) and num_groups <= MOST_GROUPS,
        capability=capability(act),
    )
    num_tiles = num_slots(rows, num_groups, config.block_m) * triton.cdiv(act.shape[1], config.block_n)
    with torch.cuda.device_of(act):
        if config.programs:
            box = (config.block_m, config.block_n)
            grouped_gemm_swiglu_persistent_kernel[(min(num_tiles, config.programs * multiprocessors(act)),)](
                ragged_descriptor(x_TK, (config.block_m, config.block_k), axis=0),
                _gated_descriptor(w_GNK, glu_interleave_size, config),
                None if h is None else _preact_descriptor(h, glu_interleave_size, box),
                ragged_descriptor(act, box, axis=0),
                offsets,
                bias_GN,
                scales_T,
                alpha_G,
                rows,
                num_groups,
                K,
                act.shape[1],
                INTERLEAVE=glu_interleave_size,
                BAND=band(config.block_m),
                GROUPS=room_for(num_groups),
                **config.compiled(),
            )
        else:
            grouped_gemm_swiglu_kernel[(num_tiles,)](
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
                **config.compiled(),
            )


def _gated_descriptor(w_GNK: Tensor, interleave: int, config: GroupedGemmConfig) -> TensorDescriptor:
    """The weight as [G, 2, I/S, S, K]: a box has block_n rows of the gate and then those of up."""
    G, N, K = w_GNK.shape
    run = interleave or N // 2
    run_in_box = interleave or config.block_n
    return TensorDescriptor(
        w_GNK,
        [G, 2, N // 2 // run, run, K],
        [N * K, run * K, 2 * run * K, K, 1],
        [1, 2, config.block_n // run_in_box, run_in_box, config.block_k],
    )


def _preact_descriptor(h: Tensor, interleave: int, box: tuple[int, int]) -> TensorDescriptor:
    """h, ragged along its rows. As halves it is [T, 2, I]: a box ends where the gate ends, too."""
    ragged = ragged_descriptor(h, box, axis=0)
    if interleave:
        return ragged
    *front, width = ragged.shape
    *strides, one = ragged.strides
    return TensorDescriptor(h, [*front, 2, width // 2], [*strides, width // 2, one], [1, 1, box[0], 1, box[1]])


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
