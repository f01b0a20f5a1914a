"""The grouped MLP on a GPU in high precision: the kernels of the unfused operations, one after the other.

    h   = x W1_g^T + b1_g          act = f(h) * scales          y = act W2_g^T + (s) b2_g
    dact = dy W2_g                 dh, dscales from dact, h     dW2_g = dy^T act    dx = dh W1_g    dW1_g = dh^T x

Shapes: x, dx [T, K]; h, dh [T, H]; act [T, I]; y, dy [T, N]; W1 [G, H, K]; W2 [G, N, I]; scales, s [T]. Every value is
rounded as the unfused operations round it. Rows of no group are zero.

Here is what follows from how the arguments lie, and so is repeated as a whole (`recipes.triton.launch.replayed`): on
the host the checks, choices and views between the launches cost more than the launches.
"""
# T rows, G groups

from __future__ import annotations

from torch import Tensor

from fused.kernels.grouped_mlp_cpu import GroupedMLPGradients
from ops.kernels.elementwise.activation import Activation, activation, dactivation
from ops.kernels.grouped_gemm.high_precision import grouped_gemm_nn, grouped_gemm_nt, grouped_gemm_tn
from ops.kernels.grouped_gemm.tile_rules import allow_tf32
from recipes.tensors.splits import Splits
from recipes.triton.launch import replayed


def grouped_mlp_gpu(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    splits: Splits,
    spec: Activation,
    scales: Tensor | None,
    bias_scales: Tensor | None,
    out: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """As `grouped_mlp_cpu`."""
    scales_bias = bias_scales is not None
    given = scales if scales is not None else bias_scales
    tf32 = allow_tf32(x.dtype)
    return _forward(x, w1, b1, w2, b2, splits.offsets, spec, given, scales is not None, scales_bias, out, tf32)


def dgrouped_mlp_gpu(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor,
    w1: Tensor,
    w2: Tensor,
    splits: Splits,
    spec: Activation,
    scales: Tensor | None,
    *,
    need_dx: bool,
    need_dw1: bool,
    need_dw2: bool,
    need_dscales: bool,
    need_dh: bool,
    out: Tensor | None = None,
) -> GroupedMLPGradients:
    """As `dgrouped_mlp_cpu`."""
    needs = need_dx, need_dw1, need_dw2, need_dscales, need_dh
    return _backward(dy, x, h, w1, w2, splits.offsets, spec, scales, needs, out, allow_tf32(dy.dtype))


@replayed
def _forward(
    x: Tensor,
    w1: Tensor,
    b1: Tensor | None,
    w2: Tensor,
    b2: Tensor | None,
    offsets: Tensor,
    spec: Activation,
    scales: Tensor | None,
    scales_act: bool,
    scales_bias: bool,
    out: Tensor | None,
    tf32: bool,
) -> tuple[Tensor, Tensor]:
    """tf32: what the products find out for themselves, but must not change between two calls of one key."""
    splits = Splits.over(offsets, x.shape[0])
    h = grouped_gemm_tn(x, w1, splits, bias_GN=b1)
    act = activation(h, spec, scales if scales_act else None)
    y = grouped_gemm_tn(act, w2, splits, bias_GN=b2, scales_T=scales if scales_bias else None, out=out)
    return h, y


@replayed
def _backward(
    dy: Tensor,
    x: Tensor | None,
    h: Tensor,
    w1: Tensor,
    w2: Tensor,
    offsets: Tensor,
    spec: Activation,
    scales: Tensor | None,
    needs: tuple[bool, ...],
    out: Tensor | None,
    tf32: bool,
) -> GroupedMLPGradients:
    need_dx, need_dw1, need_dw2, need_dscales, need_dh = needs
    splits = Splits.over(offsets, dy.shape[0])
    dact = grouped_gemm_nn(dy, w2, splits)
    dh, dscales, act = dactivation(dact, h, spec, scales, need_dscales=need_dscales, need_act=need_dw2)
    assert dh is not None, "it is always asked for"
    del dact
    dw2 = None if act is None else grouped_gemm_nt(dy, act, splits)
    del act
    dx = grouped_gemm_nn(dh, w1, splits, out=out) if need_dx else None
    dw1 = grouped_gemm_nt(dh, x, splits) if need_dw1 and x is not None else None
    return GroupedMLPGradients(dx, dw1, dw2, dscales, dh if need_dh else None)
