"""The grouped MLP on CPU tensors, batch by batch of groups, so that what is computed between stays in the cache.

    h   = x W1_g^T + b1_g          act = f(h) * scales          y = act W2_g^T + (s) b2_g
    dact = dy W2_g                 dh, dscales from dact, h     dW2_g = dy^T act    dx = dh W1_g    dW1_g = dh^T x

Shapes: x, dx [T, K]; h, dh [T, H]; act [T, I]; y, dy [T, N]; W1 [G, H, K]; W2 [G, N, I]; scales, s [T]. Every value is
rounded as the unfused operations round it, and the sums have their order. Rows of no group are zero.

Reads the split sizes on the host, where they are. Measured with 8 groups, 2048 rows and 512 features on two threads of
an AMD EPYC with AVX-512, against whole tensors: group by group a step takes 1 to 2 % less time in float32 and 6 % less
in bfloat16; groups of one size in batches of as many as there are threads, another 2 to 3 % less.
"""
# T rows, G groups

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.kernels.elementwise.activation import Activation, activation, dactivation
from ops.kernels.grouped_gemm.operands import accumulator_like
from recipes.tensors.splits import Splits


def grouped_mlp_cpu(
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
    """(h, y); y is `out` if that is given. bias_scales are the factors s of b2, 1 if None."""
    h = x.new_empty(x.shape[0], w1.shape[1])
    y = x.new_empty(x.shape[0], w2.shape[1]) if out is None else out
    w1, w2 = w1.transpose(1, 2), w2.transpose(1, 2)
    for batch in _batches(splits):
        h_b = batch.rows_of(h)
        _product(h_b, batch.rows_of(x), batch.groups_of(w1), batch.groups_of(b1))
        act = activation(h_b, spec, batch.rows_of(scales))
        _product(batch.rows_of(y), act, batch.groups_of(w2), batch.groups_of(b2), batch.rows_of(bias_scales))
        del act  # the next one takes its place in the cache
    _clear_rows_of_no_group(h, splits)
    _clear_rows_of_no_group(y, splits)
    return h, y


class GroupedMLPGradients(NamedTuple):
    """What `dgrouped_mlp_cpu` gives; None where it was not asked for."""

    dx: Tensor | None
    dw1: Tensor | None
    dw2: Tensor | None
    dscales: Tensor | None
    dh: Tensor | None


def dgrouped_mlp_cpu(
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
    """The gradients; dx is `out` if that is given. dw1 needs x. A group without rows has zero weight gradients."""
    rows = dy.shape[0]
    dx = (dy.new_empty(rows, w1.shape[2]) if out is None else out) if need_dx else None
    dw1 = torch.empty_like(w1) if need_dw1 else None
    dw2 = torch.empty_like(w2) if need_dw2 else None
    dscales = scales.new_zeros(rows) if scales is not None and need_dscales else None
    dh = torch.zeros_like(h) if need_dh else None
    for batch in _batches(splits):
        if batch.rows.start == batch.rows.stop:
            for dw in (dw1, dw2):
                if dw is not None:
                    batch.groups_of(dw).zero_()
            continue
        dy_b = batch.rows_of(dy)
        d_pre, d_factor, act = dactivation(
            dy_b @ batch.groups_of(w2), batch.rows_of(h), spec, batch.rows_of(scales),
            need_dscales=need_dscales, need_act=need_dw2,
        )  # fmt: skip
        assert d_pre is not None, "it is always asked for"
        if dw2 is not None and act is not None:
            _product(batch.groups_of(dw2), dy_b.mT, act)
        if dx is not None:
            _product(batch.rows_of(dx), d_pre, batch.groups_of(w1))
        if dw1 is not None:
            _product(batch.groups_of(dw1), d_pre.mT, batch.rows_of(x))
        if dscales is not None:
            batch.rows_of(dscales).copy_(d_factor)
        if dh is not None:
            batch.rows_of(dh).copy_(d_pre)
        del d_pre, act  # the next ones take their places in the cache
    if dx is not None:
        _clear_rows_of_no_group(dx, splits)
    return GroupedMLPGradients(dx, dw1, dw2, dscales, dh)


MANY_ROWS = 32  # of groups that are batched: torch multiplies small matrices of a batch in loops of its own


class _Batch(NamedTuple):
    """One group, or groups of one size that stand side by side: their products run as one, each on its own thread."""

    groups: slice
    rows: slice

    def rows_of(self, x: Any) -> Any:
        """x[rows], of several groups as [groups, rows of each, ...]; None for None."""
        count = self.groups.stop - self.groups.start
        if x is None or count == 1:
            return x if x is None else x[self.rows]
        return x[self.rows].unflatten(0, (count, (self.rows.stop - self.rows.start) // count))

    def groups_of(self, w: Any) -> Any:
        """w[groups], or that of the one group; None for None."""
        if w is None:
            return None
        return w[self.groups.start] if self.groups.stop - self.groups.start == 1 else w[self.groups]


def _batches(splits: Splits) -> Iterator[_Batch]:
    """All groups, at most as many in a batch as there are threads."""
    first = start = 0
    for size, equal in itertools.groupby(splits.tolist()):
        last = first + len(list(equal))
        while first < last:
            count = min(last - first, torch.get_num_threads()) if size >= MANY_ROWS else 1
            yield _Batch(slice(first, first + count), slice(start, start + count * size))
            first, start = first + count, start + count * size


def _product(out: Tensor, a: Tensor, b: Tensor, bias: Tensor | None = None, bias_scales: Tensor | None = None) -> None:
    """out = a @ b + bias_scales * bias, rounded once, of one group or of each group of a batch."""
    if bias is None:
        torch.matmul(a, b, out=out)
        return
    bias = bias.unsqueeze(-2)
    if bias_scales is not None:
        bias = accumulator_like(bias_scales[..., None]) * bias
    if bias.dtype == out.dtype:
        (torch.addmm if out.dim() == 2 else torch.baddbmm)(bias, a, b, out=out)
    else:
        out.copy_((accumulator_like(a) @ accumulator_like(b)).add_(bias))


def _clear_rows_of_no_group(x: Tensor, splits: Splits) -> None:
    x[sum(splits.tolist()) :] = 0
