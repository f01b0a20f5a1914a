"""A grouped product and its activation in one kernel: for passes that keep nothing, which do not store what the product
gives (`grouped_activation`), and for those that keep it (`grouped_gemm_activation`).

    act[t] = f(x[t] w_g^T + b_g) * scales[t]            g: the group of row t

f is an `Activation`, gated or not. Rows past `splits.offsets[-1]` belong to no group: they are zero in act, or where
two kernels run f(0) * scales[t], which is not if scales[t] is not finite. A product by act reads none of them.

Layouts: x [T, K], w [G, N, K], b [G, N], scales [T], act [T, I]; N is 2I with a gate (its halves, or runs of
`glu_interleave_size`), else I.

Precision: that of `grouped_gemm_tn` and then `activation`, and the same bits: the product plus the bias is summed in
float32 and rounded to x's dtype, the activation is computed of that in float32, and rounded once. So a forward for
training, which stores the pre-activation for backward, gives what this gives.

Graph safety: that of `high_precision`. Operands that lie in memory as descriptors cannot describe, such as an x that
starts at an odd address, take two kernels and a pre-activation in memory; so does all that `why_not_at_once` refuses.

The kernels: `activation_triton.py` and `m_grouped_activation_gluon.py`.
"""
# T rows, G groups, K in features, N out features, I features of the activation

import torch
from torch import Tensor

from ops.kernels.elementwise.activation import (
    Activation,
    activation,
    activation_shape,
    activation_step,
    check_activation,
)
from ops.kernels.elementwise.chain import chain_constants
from ops.kernels.grouped_gemm.activation_triton import m_grouped_activation_kernel
from ops.kernels.grouped_gemm.high_precision import capability, config_of, grouped_gemm_tn, grouped_gemm_tn_ref
from ops.kernels.grouped_gemm.measured_tiles import GLUON_GROUPS, GroupedGemmConfig
from ops.kernels.grouped_gemm.operands import check_m_grouped
from ops.kernels.grouped_gemm.persistent_schedule import (
    MOST_GROUPS,
    band,
    most_tiles,
    multiprocessors,
    padded_groups,
)
from ops.kernels.grouped_gemm.ragged_tma import descriptor, ragged_descriptor, takes_descriptors
from ops.kernels.grouped_gemm.tile_rules import (
    QUEUED_IN_GLUON,
    activation_config,
    has_fast_memory,
)
from recipes.tensors.abstract import is_abstract
from recipes.tensors.splits import Splits
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import Launch, cdiv, next_power_of_2, replayed

if why_no_gluon((9, 0)) is None:
    from ops.kernels.grouped_gemm.m_grouped_activation_gluon import m_grouped_activation_gluon

WIDTH = 64  # columns that are stored at once: 128 bytes a row
LEAST_STEPS = 6  # of a tile, in which the one before is stored
LEAST_HALVES = 5  # of a tile's columns, where the last tile has half of them: it takes as long as a whole one


def grouped_activation_ref(
    x_TK: Tensor,
    w_GNK: Tensor,
    splits: Splits,
    spec: Activation,
    *,
    bias_GN: Tensor | None = None,
    scales_T: Tensor | None = None,
) -> Tensor:
    """`grouped_activation` in plain torch. Returns act [T, I]; of scales in the tail nothing is read."""
    act = activation(grouped_gemm_tn_ref(x_TK, w_GNK, splits, bias_GN=bias_GN), spec, scales_T)
    tail = torch.arange(len(act), device=act.device) >= splits.offsets[-1]
    return act.masked_fill(tail[:, None], 0)


def why_not_at_once(
    dtype: torch.dtype, weights: tuple[int, int, int], spec: Activation, gpu: tuple[int, int] | None
) -> str | None:
    """Why the product of such operands and the activation are two kernels, as a sentence, or None.

    weights: [G, N, K]. gpu: its compute capability; None: a CPU.
    """
    num_groups, N, K = weights
    if gpu is None:
        return "A CPU runs the product and the activation one after the other."
    if gpu != (9, 0):
        return f"The kernel is for compute capability 9.0 (Hopper), and this is {gpu[0]}.{gpu[1]}."
    if dtype not in (torch.bfloat16, torch.float16):
        return f"The kernel multiplies bfloat16 and float16, and these are {str(dtype).removeprefix('torch.')}."
    if num_groups > MOST_GROUPS:
        return f"The kernel is for {MOST_GROUPS} groups at most, and there are {num_groups}."
    width = N // 2 if spec.gated else N
    if K % 8 or width % 8:
        return f"The kernel reads 16 bytes at a time: {K} in features and {width} of the activation must divide by 8."
    run = spec.glu_interleave_size if spec.gated else None
    if run is not None and run != width and run != next_power_of_2(run):
        return f"Its tiles hold whole runs of gates of a power of two, and glu_interleave_size is {run}."
    return None


def grouped_activation(
    x_TK: Tensor,
    w_GNK: Tensor,
    splits: Splits,
    spec: Activation,
    *,
    bias_GN: Tensor | None = None,
    scales_T: Tensor | None = None,
) -> Tensor:
    """act[t] = f(x[t] w_g^T + bias_g) * scales[t]. Returns act [T, I] in x's dtype.

    x: [T, K] and w: [G, N, K] of one floating dtype, bias: [G, N], scales: [T], any floating dtype (1 if None). Raises
    ValueError and TypeError as `grouped_gemm_tn` and `activation` do.
    """
    if x_TK.is_cuda and not is_abstract(x_TK):
        return _on_cuda(x_TK, w_GNK, splits.offsets, splits.rows, spec, bias_GN, scales_T)
    return activation(grouped_gemm_tn(x_TK, w_GNK, splits, bias_GN=bias_GN), spec, scales_T)


@replayed
def _on_cuda(
    x: Tensor, w: Tensor, offsets: Tensor, rows: int, spec: Activation, bias: Tensor | None, scales: Tensor | None
) -> Tensor:
    splits = Splits.over(offsets, rows)
    check_m_grouped(x, w, splits, bias, w_features=2)
    shape = torch.Size((rows, w.shape[1]))
    check_activation(shape, spec, scales)
    G, N, K = w.shape
    act = x.new_empty(activation_shape(shape, spec))
    if not act.numel():
        return act
    if why_not_at_once(x.dtype, (G, N, K), spec, capability(x)) or not takes_descriptors(x, w, act):
        return activation(grouped_gemm_tn(x, w, splits, bias_GN=bias), spec, scales)
    bias, scales = (extra if extra is None else extra.contiguous() for extra in (bias, scales))
    if bias is None and _takes_roles(x, w, act, spec):
        step = activation_step(spec, scales is not None)
        m_grouped_activation_gluon(x, w, offsets, scales, None, act, QUEUED_IN_GLUON, step)
    else:
        grouped_activation_triton(x, w, offsets, spec, bias, scales, act)
    return act


def why_not_both_stored(
    dtype: torch.dtype, weights: tuple[int, int, int], spec: Activation, gpu: tuple[int, int] | None
) -> str | None:
    """Why the product, whose result is stored, and the activation are two kernels for any number of rows, as a
    sentence, or None. Arguments: as `why_not_at_once`.

    Without the result the kernel is for the same operands; others take the one in Triton."""
    num_groups = weights[0]
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
    return why_not_these_features(weights, spec, QUEUED_IN_GLUON.block_k, 8)


def why_not_these_features(weights: tuple[int, int, int], spec: Activation, step: int, unit: int) -> str | None:
    """Why the kernel that stores both is not for these features and activation, as a sentence, or None.

    step: how many in features are multiplied at once; unit: how many are 16 bytes."""
    _, N, K = weights
    if spec.kind != "swiglu":
        return f"The kernel has registers for SwiGLU alone, and this is {spec.kind}."
    least = LEAST_STEPS * step
    width = N // 2
    if spec.glu_interleave_size not in (None, width):
        return f"Its tiles have halves of the columns, and glu_interleave_size is {spec.glu_interleave_size}."
    if width % WIDTH or K % unit or K < least:
        return (
            f"The kernel takes in features that are a multiple of {unit}, {least} at least, and features of the "
            f"activation that are a multiple of {WIDTH}, and these are {K} and {width}."
        )
    if width % (2 * WIDTH) and width < LEAST_HALVES * WIDTH:
        return f"The kernel computes {2 * WIDTH} features of the activation at a time, in vain where these are {width}."
    return None


def grouped_gemm_activation(
    x_TK: Tensor, w_GNK: Tensor, splits: Splits, spec: Activation, *, scales_T: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """h = x w_g^T and act = f(h) * scales. Returns h [T, N] and act [T, I]; arguments as `grouped_activation`."""
    if x_TK.is_cuda and not is_abstract(x_TK):
        return _both_on_cuda(x_TK, w_GNK, splits.offsets, splits.rows, spec, scales_T)
    h = grouped_gemm_tn(x_TK, w_GNK, splits)
    return h, activation(h, spec, scales_T)


@replayed
def _both_on_cuda(
    x: Tensor, w: Tensor, offsets: Tensor, rows: int, spec: Activation, scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    splits = Splits.over(offsets, rows)
    check_m_grouped(x, w, splits, None, w_features=2)
    shape = torch.Size((rows, w.shape[1]))
    check_activation(shape, spec, scales)
    h = x.new_empty(shape)
    if not _takes_roles(x, w, h, spec):
        return grouped_gemm_tn(x, w, splits, out=h), activation(h, spec, scales)
    act = x.new_empty(activation_shape(shape, spec))
    step = activation_step(spec, scales is not None)
    scales = scales if scales is None else scales.contiguous()
    m_grouped_activation_gluon(x, w, offsets, scales, h, act, QUEUED_IN_GLUON, step)
    return h, act


def _takes_roles(x: Tensor, w: Tensor, out: Tensor, spec: Activation) -> bool:
    """Whether `m_grouped_activation_gluon` runs. out: h or act."""
    return (
        why_not_both_stored(x.dtype, (w.shape[0], w.shape[1], w.shape[2]), spec, capability(x)) is None
        and takes_descriptors(x, w, out)
        and config_of(x, w, out, transposed=True, tf32=False) == QUEUED_IN_GLUON
    )


_m_grouped_activation = Launch(m_grouped_activation_kernel)


def grouped_activation_triton(
    x: Tensor,
    w: Tensor,
    offsets: Tensor,
    spec: Activation,
    bias: Tensor | None,
    scales: Tensor | None,
    out: Tensor,
    config: GroupedGemmConfig | None = None,
) -> None:
    """Launches `grouped_activation` of tensors that `takes_descriptors` takes, none of them empty; bias and scales are
    contiguous. config: the tile, in columns of out; None: that of `activation_config`."""
    rows, (num_groups, N, K) = x.shape[0], w.shape
    columns = out.shape[1]
    config = config or activation_config(rows, num_groups, spec.gated)
    run, box = _boxes(config.block_n, columns, spec)
    parts = N // columns
    matrices = (num_groups, N // (parts * run), parts, run, K) if run <= columns else (num_groups, 1, 1, run, K)
    num_tiles = most_tiles(rows, num_groups, config.block_m) * cdiv(columns, config.block_n)
    _m_grouped_activation(
        out, min(num_tiles, config.programs * multiprocessors(out)),
        ragged_descriptor(x, (config.block_m, config.block_k), axis=0),
        descriptor(w.view(matrices), (1, 1, *box, config.block_k)),
        ragged_descriptor(out, (config.block_m, min(config.block_n, WIDTH)), axis=0),
        offsets, bias, (scales,), rows, num_groups, K, columns, run,
        **chain_constants((activation_step(spec, scales is not None),), (out.dtype,)),
        BAND=band(config.block_m), GROUPS=padded_groups(num_groups), enable_fp_fusion=False,
        **config.compiled(),
    )  # fmt: skip


def _boxes(block_n: int, columns: int, spec: Activation) -> tuple[int, tuple[int, int]]:
    """How many rows of w in a run are adjacent, and the parts and rows of a box: see `activation_triton`."""
    if not spec.gated:
        return columns, (1, block_n)
    size = spec.glu_interleave_size or columns
    return (2 * columns, (1, 2 * block_n)) if size <= block_n and size != columns else (size, (2, block_n))
