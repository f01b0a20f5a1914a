"""A grouped product of float8 codes, its activation, and the cast of that in one kernel, where codes have scales that
are given before (delayed scaling).

    h[t] = x[t] w_g^T            act[t] = quantize(f(h[t]) * scales[t])            g: the group of row t

h is stored only where backward needs it; a kernel of the activation's own would read it again. Scales that follow from
act's amax are known when all of act is: there two kernels run.

Precision: that of `grouped_gemm_tn_float8`, then of `activation_cast`, and the same bits: h is rounded to bfloat16, the
activation computed of that in float32 and rounded to bfloat16, multiplied by its scale in float32 and rounded to a
code.

Rows past `splits.offsets[-1]` belong to no group: they are zero in h and their codes are 0. A group without rows gets
its scale_inv, and raises no amax. Graph safety: as `grouped_gemm`.

The kernel: `m_grouped_activation_gluon`.
"""
# T rows, G groups, K in features, N out features: twice those of the activation

import torch
from torch import Tensor

from ops.kernels.elementwise.activation import Activation, activation_shape, activation_step, check_activation
from ops.kernels.elementwise.chain import elementwise_cast
from ops.kernels.elementwise.chain_cast import Cast, cast_into
from ops.kernels.grouped_gemm.float8 import grouped_gemm_tn_float8
from ops.kernels.grouped_gemm.float8_scales import check_tn, scale_layout
from ops.kernels.grouped_gemm.grouped_activation import why_not_these_features
from ops.kernels.grouped_gemm.high_precision import capability
from ops.kernels.grouped_gemm.measured_tiles import GLUON_GROUPS
from ops.kernels.grouped_gemm.ragged_tma import takes_descriptors
from ops.kernels.grouped_gemm.tile_rules import QUEUED_ROWS
from ops.kernels.grouped_gemm.tile_rules_float8 import WIDE_IN_GLUON, m_grouped_float8_config
from recipes.tensors.abstract import is_abstract
from recipes.tensors.quantizer import QuantizedBuffers
from recipes.tensors.scaled_codes import Float8Operand
from recipes.tensors.splits import Splits
from recipes.triton.gates import why_no_gluon
from recipes.triton.launch import replayed

if why_no_gluon((9, 0)) is None:
    from ops.kernels.grouped_gemm.m_grouped_activation_gluon import m_grouped_activation_gluon


def why_not_cast_at_once(
    dtype: torch.dtype, weights: tuple[int, int, int], spec: Activation, split: bool, gpu: tuple[int, int] | None
) -> str | None:
    """Why the product of codes and the activation, cast with given scales, are two kernels for any number of rows, as a
    sentence, or None.

    dtype: of h. weights: [G, N, K]. split: whether the product adds in split accumulation. gpu: its compute capability;
    None: a CPU.
    """
    if gpu is None:
        return "A CPU runs the product and the activation one after the other."
    if why := why_no_gluon(gpu):
        return why
    if dtype != torch.bfloat16:
        return f"The kernel is for bfloat16 between the layers, and this is {str(dtype).removeprefix('torch.')}."
    if split:
        return "The kernel has no registers for split accumulation."
    if weights[0] > GLUON_GROUPS:
        return f"The kernel is for {GLUON_GROUPS} groups at most, and there are {weights[0]}."
    return why_not_these_features(weights, spec, WIDE_IN_GLUON.block_k, 16)


def grouped_gemm_activation_cast(
    x: Float8Operand,
    w: Float8Operand,
    splits: Splits,
    spec: Activation,
    into: QuantizedBuffers,
    *,
    scales_T: Tensor | None = None,
    stores_h: bool = True,
    split_accumulation: bool = False,
) -> Tensor | None:
    """h[t] = x[t] w_g^T in bfloat16, and f(h[t]) * scales[t] quantized into these rowwise buffers with given scales.

    x: [T, K] and w: [G, N, K] codes on CUDA, not empty; scales: [T] (1 if None). Returns h [T, N], or None: if it is
    not asked for, it may not exist. Raises ValueError and TypeError as `grouped_gemm_tn_float8` and `activation` do.
    """
    return _on_cuda(
        x.codes, x.scale, w.codes, w.scale, splits.offsets, splits.rows, spec, scales_T, cast_into(into), stores_h,
        split_accumulation,
    )  # fmt: skip


@replayed
def _on_cuda(
    x: Tensor,
    x_scale: Tensor,
    w: Tensor,
    w_scale: Tensor,
    offsets: Tensor,
    rows: int,
    spec: Activation,
    scales: Tensor | None,
    cast: Cast,
    stores_h: bool,
    split_accumulation: bool,
) -> Tensor | None:
    splits = Splits.over(offsets, rows)
    check_tn(x, x_scale, w, w_scale, splits, None)
    shape = torch.Size((rows, w.shape[1]))
    check_activation(shape, spec, scales)
    step = activation_step(spec, scales is not None)
    act = cast.row_codes
    assert act is not None and act.shape == activation_shape(shape, spec), "the buffers are those of act's rows"
    if not _takes_roles(x, x_scale, w, w_scale, act, spec, split_accumulation):
        product = grouped_gemm_tn_float8(x, x_scale, w, w_scale, splits, split_accumulation=split_accumulation)
        elementwise_cast(product, cast, (step,), (scales,))
        return product
    h = torch.empty(shape, dtype=torch.bfloat16, device=x.device) if stores_h else None
    scales = scales if scales is None else scales.contiguous()
    m_grouped_activation_gluon(
        x, w, offsets, scales, h, act, WIDE_IN_GLUON, step, x_scale=x_scale.expand(len(w)),
        w_scale=w_scale.expand(len(w)), cast=cast,
    )  # fmt: skip
    return h


def _takes_roles(
    x: Tensor, x_scale: Tensor, w: Tensor, w_scale: Tensor, act: Tensor, spec: Activation, split: bool
) -> bool:
    """Whether the kernel runs: for what `grouped_gemm_tn_float8` multiplies with the same tiles, of groups that have as
    many rows as its bfloat16 kind is for (with 160 it is 4 % slower than two kernels, with 256 4 % faster)."""
    if is_abstract(x):
        return False
    G, N, K = w.shape
    gpu = capability(x)
    layout = scale_layout(x_scale, w_scale, N, K)
    if layout != "tensor" or why_not_cast_at_once(torch.bfloat16, (G, N, K), spec, split, gpu):
        return False
    if x.shape[0] < QUEUED_ROWS * G or not takes_descriptors(x, w, act):
        return False
    config = m_grouped_float8_config(
        x.shape[0], G, layout=layout, promote=False, out_dtype=torch.bfloat16, descriptors=True, capability=gpu,
        gluon=True,
    )  # fmt: skip
    return config == WIDE_IN_GLUON
