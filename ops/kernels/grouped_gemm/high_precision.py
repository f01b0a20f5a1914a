"""Grouped GEMM: the products of a linear layer with one weight for each group of rows.

    TN   y[t]  = alpha_g x[t] w_g^T + s[t] b_g      grouped_gemm_tn     (fprop)     m_grouped: rows differ by group
    NN   dx[t] = alpha_g dy[t] w_g                  grouped_gemm_nn     (dgrad)     m_grouped
    NT   dw_g  = alpha_g dy_g^T x_g                 grouped_gemm_nt     (wgrad)     k_grouped: the sum runs over rows
         dw_g += alpha_g dy_g^T x_g                 the same with accumulate=True

g is the group of row t. Rows past `splits.offsets[-1]` belong to no group: they are zero in y and dx and count in no
sum. A group without rows has dw exactly zero, and with accumulate=True its dw is left as it was. Otherwise every
element of an output is written, whatever was there.

Layouts: x [T, K], dy [T, N], w [G, N, K], b [G, N], s [T], alpha [G] or (). Rows may have any distance in
memory; tensors whose rows are not contiguous themselves, and stacked weights that are not contiguous, are copied.

Precision: products of the operands as they are, summed in float32 (float64 for float64 operands), times alpha, plus
the bias, and then rounded once to the output's dtype. On CUDA a float32 product is exact ("ieee") unless
`torch.backends.cuda.matmul` allows TF32. All sums have a fixed order, and repeating a call gives the same bits: each
element is written once, or added to once. The addition to float32 on descriptors is the memory's (PTX ISA, red and
cp.reduce.async.bulk), or as the memory's where old sums are fetched: rounded to nearest, with subnormal numbers, the
old ones too, flushed to zero (FTZ).

batch_invariant (TN): the bits of y[t] follow from x[t], w_g, b_g and s[t] alone, not from the other rows or their
number, nor from where tensors lie: one tile, the built-in rule's for many rows, and operands that descriptors read if
their shape allows it. On a CPU each row is a product of its own (`high_precision_cpu`).

Graph safety: grids follow from capacities (rows, groups), each program finds its group from the offsets on the
device, and nothing is read by the host. Captured in a CUDA graph, a call may be replayed with other splits.

The kernels: `high_precision_triton.py`, `pointers_triton.py`, and on Hopper `m_grouped_gluon.py` for TN and NN,
`high_precision_nt_gluon.py` for NT. The `..._config` functions choose among them, after a table of measured tiles if
one was loaded (`measured_tiles.py`).
The slots of the m_grouped kernels: `recipes/triton/row_slots.py`. The gradient of b: `bias_grad.py`.
"""
# T rows, G groups, K in features, N out features

from collections.abc import Sequence

import torch
from torch import Tensor

from ops.kernels.grouped_gemm.high_precision_cpu import k_grouped_on_cpu, m_grouped_on_cpu
from ops.kernels.grouped_gemm.high_precision_triton import (
    k_grouped_persistent_kernel,
    m_grouped_persistent_kernel,
)
from ops.kernels.grouped_gemm.measured_tiles import BOX_BYTES, Gemm, GroupedGemmConfig, tiles_in_use
from ops.kernels.grouped_gemm.operands import (
    accumulator_like,
    check_accumulate,
    check_dtypes,
    check_m_grouped,
    check_rows,
    output,
    packed,
    per_group,
    row_slices,
    with_contiguous_rows,
)
from ops.kernels.grouped_gemm.persistent_schedule import MOST_GROUPS, band, most_tiles, multiprocessors, padded_groups
from ops.kernels.grouped_gemm.pointers_triton import k_grouped_kernel, m_grouped_kernel
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, takes_descriptors
from ops.kernels.grouped_gemm.tile_rules import (
    allow_tf32,
    has_fast_memory,
    k_grouped_config,
    m_grouped_config,
    uses_descriptors,
)
from recipes.tensors.abstract import is_abstract
from recipes.tensors.splits import Splits
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import Launch, cdiv, launcher, properties, replayed
from recipes.triton.row_slots import num_slots

if why_no_gluon((9, 0)) is None:
    from ops.kernels.grouped_gemm.high_precision_nt_gluon import k_grouped_gluon
    from ops.kernels.grouped_gemm.m_grouped_gluon import m_grouped_gluon

# ---------------------------------------------------------------------------------------------------- references


def grouped_gemm_tn_ref(
    x_TK: Tensor,
    w_GNK: Tensor,
    splits: Splits,
    *,
    bias_GN: Tensor | None = None,
    scales_T: Tensor | None = None,
    alpha_G: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`grouped_gemm_tn` in plain torch, group by group. Returns y [T, N]."""
    y_TN = accumulator_like(x_TK).new_zeros(x_TK.shape[0], w_GNK.shape[1])
    for group, rows in row_slices(splits):
        y = accumulator_like(x_TK[rows]) @ accumulator_like(w_GNK[group]).T
        if alpha_G is not None:
            y = y * alpha_G.expand(splits.num_groups)[group]
        if bias_GN is not None:
            bias = accumulator_like(bias_GN[group])
            y = y + (bias if scales_T is None else accumulator_like(scales_T[rows, None]) * bias)
        y_TN[rows] = y
    return y_TN.to(out_dtype or x_TK.dtype)


def grouped_gemm_nn_ref(
    dy_TN: Tensor,
    w_GNK: Tensor,
    splits: Splits,
    *,
    alpha_G: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """`grouped_gemm_nn` in plain torch, group by group. Returns dx [T, K]."""
    return grouped_gemm_tn_ref(dy_TN, w_GNK.transpose(1, 2), splits, alpha_G=alpha_G, out_dtype=out_dtype)


def grouped_gemm_nt_ref(
    dy_TN: Tensor,
    x_TK: Tensor,
    splits: Splits,
    *,
    alpha_G: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
) -> Tensor:
    """`grouped_gemm_nt` in plain torch, group by group. Returns dw [G, N, K], or `out` filled with it."""
    check_accumulate(out, accumulate)
    out = output(out, (splits.num_groups, dy_TN.shape[1], x_TK.shape[1]), out_dtype, x_TK)
    for group, rows in row_slices(splits):
        dw = accumulator_like(dy_TN[rows]).T @ accumulator_like(x_TK[rows])
        if alpha_G is not None and rows.start < rows.stop:
            dw = dw * alpha_G.expand(splits.num_groups)[group]
        if not accumulate:
            out[group] = dw
        elif rows.start < rows.stop:
            out[group] = accumulator_like(out[group]) + dw
    return out


# ----------------------------------------------------------------------------------------------------- launchers


def grouped_gemm_tn(
    x_TK: Tensor,
    w_GNK: Tensor,
    splits: Splits,
    *,
    bias_GN: Tensor | None = None,
    scales_T: Tensor | None = None,
    alpha_G: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    batch_invariant: bool = False,
    factor: Tensor | None = None,
) -> Tensor:
    """y[t] = alpha_g x[t] w_g^T + scales[t] bias_g. Returns y [T, N], or `out` filled with it.

    x: [T, K] and w: [G, N, K] of one floating dtype. bias: [G, N], scales: [T] (1 if None; scale the bias alone),
    alpha: [G] or () float32 (1 if None). out: [T, N], in out_dtype (x's if None). Rows of no group are zero.
    On a CPU w may be narrower than x in float32, and have a factor (`Operand.factor`).
    """
    if x_TK.device.type == "cuda":
        return _m_grouped_gemm(
            x_TK, w_GNK, splits.offsets, splits.rows, bias_GN, scales_T, alpha_G, out, out_dtype, True,
            allow_tf32(x_TK.dtype), batch_invariant,
        )  # fmt: skip
    check_m_grouped(x_TK, w_GNK, splits, bias_GN, scales_T, w_features=2)
    if is_abstract(x_TK):
        return output(out, (splits.rows, w_GNK.shape[1]), out_dtype, x_TK)
    return m_grouped_on_cpu(
        x_TK, w_GNK.transpose(1, 2), splits, out, out_dtype, alpha_G, bias_GN, scales_T, batch_invariant,
        None if factor is None else factor.transpose(1, 2),
    )  # fmt: skip


def grouped_gemm_nn(
    dy_TN: Tensor,
    w_GNK: Tensor,
    splits: Splits,
    *,
    alpha_G: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """dx[t] = alpha_g dy[t] w_g. Returns dx [T, K], or `out` filled with it.

    dy: [T, N] and w: [G, N, K] of one floating dtype. alpha: [G] or () float32 (1 if None). out: [T, K], in out_dtype
    (dy's if None). Rows of no group are zero. factor: as `grouped_gemm_tn`.
    """
    if dy_TN.device.type == "cuda":
        return _m_grouped_gemm(
            dy_TN, w_GNK, splits.offsets, splits.rows, None, None, alpha_G, out, out_dtype, False,
            allow_tf32(dy_TN.dtype),
        )  # fmt: skip
    check_m_grouped(dy_TN, w_GNK, splits, w_features=1)
    if is_abstract(dy_TN):
        return output(out, (splits.rows, w_GNK.shape[2]), out_dtype, dy_TN)
    return m_grouped_on_cpu(dy_TN, w_GNK, splits, out, out_dtype, alpha_G, factor_GRC=factor)


@replayed
def _m_grouped_gemm(
    a: Tensor,
    w_GNK: Tensor,
    offsets: Tensor,
    rows: int,
    bias: Tensor | None,
    scales_T: Tensor | None,
    alpha_G: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    transposed: bool,
    tf32: bool,
    batch_invariant: bool = False,
) -> Tensor:
    """Checks, allocates and launches TN (transposed) or NN. tf32, here and below, is an argument because the key has to
    hold it."""
    splits = Splits.over(offsets, rows)
    check_m_grouped(a, w_GNK, splits, bias, scales_T, w_features=2 if transposed else 1)
    out = output(out, (rows, w_GNK.shape[1 if transposed else 2]), out_dtype, a)
    readable = packed if batch_invariant else with_contiguous_rows
    target = readable(out, empty=True)
    m_grouped_triton(
        readable(a),
        packed(w_GNK) if batch_invariant else w_GNK.contiguous(),
        offsets,
        None if bias is None else bias.contiguous(),
        None if scales_T is None else scales_T.contiguous(),
        per_group(alpha_G, splits),
        target,
        transposed=transposed,
        tf32=tf32,
        batch_invariant=batch_invariant,
    )
    return out if target is out else out.copy_(target)


def grouped_gemm_nt(
    dy_TN: Tensor,
    x_TK: Tensor,
    splits: Splits,
    *,
    alpha_G: Tensor | None = None,
    out: Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    accumulate: bool = False,
    reverse: bool = False,
    spare: int = 0,
) -> Tensor:
    """dw_g = alpha_g dy_g^T x_g. Returns dw [G, N, K], or `out` filled with it; accumulate: `out` += it.

    dy: [T, N] and x: [T, K] of one floating dtype. alpha: [G] or () float32 (1 if None). out: [G, N, K], in out_dtype
    (x's if None). A group without rows gets zeros; with `accumulate`, which needs `out`, its part of out is untouched,
    and the sum is made in float32 and rounded once. reverse, which needs `out`: the last group comes first in it, as in
    Megatron's buckets. spare: multiprocessors that persistent kernels leave to what runs beside; no bit depends on it.
    """
    if x_TK.device.type == "cuda":
        tf32 = allow_tf32(x_TK.dtype)
        return _nt(dy_TN, x_TK, splits.offsets, splits.rows, alpha_G, out, out_dtype, tf32, accumulate, reverse, spare)
    _check_k_grouped(dy_TN, x_TK, splits, out, accumulate, reverse)
    if is_abstract(x_TK):
        return output(out, (splits.num_groups, dy_TN.shape[1], x_TK.shape[1]), out_dtype, x_TK)
    return k_grouped_on_cpu(dy_TN, x_TK, splits, out, out_dtype, alpha_G, accumulate, reverse)


def _check_k_grouped(
    dy_TN: Tensor, x_TK: Tensor, splits: Splits, out: Tensor | None, accumulate: bool, reverse: bool
) -> None:
    check_rows(dy_TN, splits)
    check_rows(x_TK, splits)
    check_dtypes(dy_TN, x_TK)
    check_accumulate(out, accumulate, reverse)


@replayed
def _nt(
    dy_TN: Tensor,
    x_TK: Tensor,
    offsets: Tensor,
    rows: int,
    alpha_G: Tensor | None,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    tf32: bool,
    accumulate: bool,
    reverse: bool,
    spare: int,
) -> Tensor:
    splits = Splits.over(offsets, rows)
    _check_k_grouped(dy_TN, x_TK, splits, out, accumulate, reverse)
    new = out is None
    out = output(out, (splits.num_groups, dy_TN.shape[1], x_TK.shape[1]), out_dtype, x_TK)
    target = out
    if not (new or out[0].is_contiguous()):
        target = out.contiguous() if accumulate else torch.empty(out.shape, dtype=out.dtype, device=out.device)
    grouped_gemm_nt_triton(
        with_contiguous_rows(dy_TN),
        with_contiguous_rows(x_TK),
        offsets,
        per_group(alpha_G, splits),
        target,
        tf32=tf32,
        accumulate=accumulate,
        reverse=reverse,
        spare=spare,
    )
    return out if target is out else out.copy_(target)


_m_grouped, _m_grouped_persistent = Launch(m_grouped_kernel), Launch(m_grouped_persistent_kernel)
_k_grouped, _k_grouped_persistent = Launch(k_grouped_kernel), Launch(k_grouped_persistent_kernel)


def config_of(
    a: Tensor, w_GNK: Tensor, out: Tensor, *, transposed: bool, tf32: bool, batch_invariant: bool = False
) -> GroupedGemmConfig:
    """The tile with which TN (transposed) or NN is launched: measured, or by the built-in rule."""
    num_groups = len(w_GNK)
    tma = runs_on_descriptors(num_groups, a, w_GNK, out)
    aligned = not tma and is_aligned(a, w_GNK, out)
    product = "TN" if transposed else "NN"
    measured = None if batch_invariant else _measured(product, a, out, tuple(w_GNK.shape), tma, aligned)
    return measured or m_grouped_config(
        a.shape[0],
        num_groups,
        a.dtype,
        out_dtype=out.dtype,
        tf32=tf32,
        aligned=aligned,
        descriptors=tma,
        capability=capability(out),
        gluon=why_no_gluon(capability(out)) is None and has_fast_memory(out),
        batch_invariant=batch_invariant,
    )


@launcher("fuser::m_grouped_gemm", mutates=["out"])
def m_grouped_triton(
    a: Tensor,
    w_GNK: Tensor,
    offsets: Tensor,
    bias: Tensor | None,
    scales: Tensor | None,
    alpha: Tensor | None,
    out: Tensor,
    transposed: bool,
    tf32: bool,
    batch_invariant: bool = False,
) -> None:
    """Launches TN (transposed) or NN.

    Rows of a and out are contiguous, w, offsets [G + 1], bias, scales, alpha [G] are contiguous. batch_invariant: a, w
    and out are `packed`.
    """
    if out.numel() == 0:
        return
    rows, (num_groups, N, K) = a.shape[0], w_GNK.shape
    R, C = (K, N) if transposed else (N, K)
    config = config_of(a, w_GNK, out, transposed=transposed, tf32=tf32, batch_invariant=batch_invariant)
    if config.gluon:
        boxes = config.box * out.itemsize // BOX_BYTES
        m_grouped_gluon(
            a, w_GNK, offsets, bias, scales, out, config, a_scale=alpha, transposed=transposed, boxes=boxes
        )  # fmt: skip
    elif config.programs:
        num_tiles = most_tiles(rows, num_groups, config.block_m) * cdiv(C, config.block_n)
        w_box = (config.block_n, config.block_k) if transposed else (config.block_k, config.block_n)
        _m_grouped_persistent(
            out,
            min(num_tiles, config.programs * multiprocessors(out)),
            ragged_descriptor(a, (config.block_m, config.block_k), axis=0),
            descriptor(w_GNK, (1, *w_box)),
            ragged_descriptor(out, (config.block_m, min(config.block_n, 128)), axis=0),
            offsets,
            bias,
            scales,
            alpha,
            rows,
            num_groups,
            R,
            C,
            TRANSPOSED=transposed,
            BAND=band(config.block_m),
            GROUPS=padded_groups(num_groups),
            **config.compiled(),
        )
    else:
        _m_grouped(
            out,
            num_slots(rows, num_groups, config.block_m) * cdiv(C, config.block_n),
            a,
            w_GNK,
            offsets,
            bias,
            scales,
            alpha,
            None,
            out,
            rows,
            num_groups,
            R,
            C,
            a.stride(0),
            N * K,
            1 if transposed else C,
            R if transposed else 1,
            1,
            1,
            out.stride(0),
            LAYOUT="tensor",
            PROMOTE=False,
            PRECISION="tf32" if tf32 else "ieee",
            BAND=1,
            **config.compiled(),
        )


@launcher("fuser::grouped_gemm_nt", mutates=["out"])
def grouped_gemm_nt_triton(
    dy_TN: Tensor,
    x_TK: Tensor,
    offsets: Tensor,
    alpha_G: Tensor | None,
    out: Tensor,
    tf32: bool,
    accumulate: bool = False,
    reverse: bool = False,
    spare: int = 0,
) -> None:
    """Launches NT. Rows of dy and x, the matrices of out, offsets [G + 1] and alpha [G] are contiguous."""
    G, N, K = out.shape
    if dy_TN.shape[0] == 0 or out.numel() == 0:
        if not accumulate:
            out.zero_()
        return
    tma = runs_on_descriptors(G, dy_TN, x_TK, out)
    aligned = not tma and is_aligned(dy_TN, x_TK, out)
    config = _measured("NT", dy_TN, out, (G, N, K), tma, aligned, accumulate) or k_grouped_config(
        dy_TN.shape[0],
        G,
        dy_TN.dtype,
        out_dtype=out.dtype,
        tf32=tf32,
        aligned=aligned,
        descriptors=tma,
        accumulate=accumulate,
        capability=capability(out),
        gluon=why_no_gluon(capability(out)) is None,
    )
    if config.gluon:
        k_grouped_gluon(dy_TN, x_TK, offsets, alpha_G, out, config, accumulate, reverse, spare)
        return
    # Without fusion alpha's product is rounded before it is added to what is there, so all kernels give the same sums.
    num_tiles = G * cdiv(N, config.block_m) * cdiv(K, config.block_n)
    if config.programs:
        _k_grouped_persistent(
            out,
            min(num_tiles, config.programs * multiprocessors(out, spare)),
            ragged_descriptor(dy_TN, (config.block_k, config.block_m), axis=0),
            ragged_descriptor(x_TK, (config.block_k, config.block_n), axis=0),
            descriptor(out, (1, config.block_m, min(config.box, config.block_n // 2))),
            out if out.dtype == torch.float32 and accumulate else None,
            out.stride(0),
            offsets,
            alpha_G,
            G,
            N,
            K,
            ACCUMULATE=accumulate,
            REVERSE=reverse,
            BAND=band(config.block_m),
            GROUPS=padded_groups(G),
            enable_fp_fusion=not accumulate,
            **config.compiled(),
        )
    else:
        _k_grouped(
            out,
            num_tiles,
            dy_TN,
            x_TK,
            offsets,
            alpha_G,
            None,
            out[-1] if reverse else out,
            N,
            K,
            1,
            dy_TN.stride(0),
            x_TK.stride(0),
            1,
            1,
            1,
            -out.stride(0) if reverse else out.stride(0),
            ACCUMULATE=accumulate,
            ALIGNED=1,
            LAYOUT="tensor",
            PROMOTE=False,
            PRECISION="tf32" if tf32 else "ieee",
            BAND=1,
            enable_fp_fusion=not accumulate,
            **config.compiled(),
        )


def is_aligned(*tensors: Tensor) -> bool:
    """Whether the rows of all tensors can be read 16 bytes at a time, as Triton finds it: multiples of 16 elements."""
    return all(x.data_ptr() % 16 == 0 and x.shape[-1] % 16 == 0 and x.stride(-2) % 16 == 0 for x in tensors)


def runs_on_descriptors(num_groups: int, *matrices: Tensor) -> bool:
    """Whether the kernels on descriptors run."""
    fitting = takes_descriptors(*matrices) and num_groups <= MOST_GROUPS
    return uses_descriptors(matrices[0].dtype, fitting, capability(matrices[0]))


def capability(x: Tensor) -> tuple[int, int]:
    """The compute capability of x's GPU; Hopper's for a CPU tensor, which only the interpreter brings here."""
    if not x.is_cuda:
        return 9, 0
    gpu = properties(x.get_device())
    return gpu.major, gpu.minor


def _measured(
    product: str, a: Tensor, out: Tensor, weights: Sequence[int], tma: bool, aligned: bool, accumulate: bool = False
) -> GroupedGemmConfig | None:
    """The tile that was measured, if there is one and its kernel can read these tensors. weights: [G, N, K]."""
    table = tiles_in_use()
    if table is None or table.capability != capability(out):
        return None
    G, N, K = weights
    config = table.find(Gemm(product, a.dtype, out.dtype, accumulate, G, N, K), a.shape[0])
    return config if config is not None and (tma or (aligned and not config.programs)) else None
