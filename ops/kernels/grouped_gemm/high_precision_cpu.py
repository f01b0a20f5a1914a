"""Grouped GEMM on CPU tensors: torch's own grouped product where it fits, else one product a group.

torch's `F.grouped_mm` takes no bias and no scale, rounds to the operands' dtype, needs rows of a multiple of 16 bytes,
leaves the rows of no group as they were, and reads the strides of a single row too.

batch_invariant: a library's product sums in another order for another number of rows, and not for all rows of one
product in the same. So each row is a product of its own, w x[t] in float32 or better: of one shape, from memory of one
alignment, and so with one order, whatever the other rows are. It takes about three times as long.
"""
# T rows, G groups, R summed features, C features that come out

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.kernels.grouped_gemm.operands import accumulator_like, output, row_slices
from recipes.tensors.splits import Splits


def m_grouped_on_cpu(
    a: Tensor,
    w_GRC: Tensor,
    splits: Splits,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    alpha_G: Tensor | None = None,
    bias_GC: Tensor | None = None,
    scales_T: Tensor | None = None,
    batch_invariant: bool = False,
    factor_GRC: Tensor | None = None,
) -> Tensor:
    """out[t] = alpha_g a[t] w_g + scales[t] bias_g, rounded once; rows of no group are zero.

    w may be narrower than a: that of a group with rows is read into a's dtype, and multiplied by a factor that it has,
    [G, 1, C] or [G, R, 1].
    """
    end = sum(splits.tolist())
    plain = out is None and alpha_G is None and bias_GC is None and end and not batch_invariant
    if plain and _torch_takes(a, w_GRC, out_dtype):
        tail = a.shape[0] - end
        # What selective checkpointing has saved of this product must not be changed in place.
        result = F.grouped_mm(a[:end] if tail else a, w_GRC, offs=splits.ends)
        return F.pad(result, (0, 0, 0, tail)) if tail else result
    result = output(out, (a.shape[0], w_GRC.shape[2]), out_dtype, a)
    alphas = None if alpha_G is None else alpha_G.expand(splits.num_groups)
    read = None if a.dtype == w_GRC.dtype else torch.empty_like(w_GRC[0], dtype=a.dtype)
    for group, rows in row_slices(splits):
        if rows.start == rows.stop:
            continue
        bias = None if bias_GC is None else bias_GC[group]
        if bias is not None and scales_T is not None:
            bias = accumulator_like(scales_T[rows, None]) * bias
        w = w_GRC[group]
        if read is not None:
            w = read.copy_(w)
            w = w if factor_GRC is None else w.mul_(factor_GRC[group])
        alpha = None if alphas is None else alphas[group]
        product(result[rows], a[rows], w, alpha, bias, batch_invariant=batch_invariant)
    result[end:].zero_()
    return result


def k_grouped_on_cpu(
    dy: Tensor,
    x: Tensor,
    splits: Splits,
    out: Tensor | None,
    out_dtype: torch.dtype | None,
    alpha_G: Tensor | None = None,
    accumulate: bool = False,
    reverse: bool = False,
) -> Tensor:
    """out_g = alpha_g dy_g^T x_g, or out_g += it, rounded once; zero, or untouched, for a group without rows.

    reverse: the last group comes first in out.
    """
    if out is None and alpha_G is None and any(splits.tolist()) and _torch_takes(dy, x, out_dtype):
        return F.grouped_mm(dy.t(), x, offs=splits.ends)
    result = output(out, (splits.num_groups, dy.shape[1], x.shape[1]), out_dtype, x)
    alphas = None if alpha_G is None else alpha_G.expand(splits.num_groups)
    for group, rows in row_slices(splits):
        place = result[-1 - group if reverse else group]
        if rows.start < rows.stop:
            alpha = None if alphas is None else alphas[group]
            product(place, dy[rows].T, x[rows], alpha, place if accumulate else None)
        elif not accumulate:
            place.zero_()
    return result


def _torch_takes(a: Tensor, b: Tensor, out_dtype: torch.dtype | None) -> bool:
    """Whether `F.grouped_mm` computes this product, without a copy."""
    if a.dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return False
    if a.dtype != b.dtype or out_dtype not in (None, a.dtype):
        return False
    dense = _is_packed(a) and (_is_packed(b) or _is_packed(b.transpose(-1, -2)))
    multiple = 16 // a.itemsize
    return dense and not (a.shape[1] % multiple or b.shape[-2] % multiple or b.shape[-1] % multiple)


def _is_packed(x: Tensor) -> bool:
    """Whether rows follow each other without a gap. `is_contiguous` ignores the stride of a single row, which
    `F.grouped_mm` checks."""
    return x.is_contiguous() and x.stride(-2) == x.shape[-1]


def product(
    out: Tensor,
    a: Tensor,
    b: Tensor,
    alpha: Tensor | None,
    added: Tensor | None = None,
    *,
    batch_invariant: bool = False,
) -> None:
    """out = alpha * (a @ b) + added, rounded once to a dtype below float32.

    A buffer in float32 or float64 that is added to gets the product as autograd would add it: rounded, then the sum.
    """
    if alpha is None and a.dtype == out.dtype and not batch_invariant:
        if added is None:
            torch.mm(a, b, out=out)
            return
        if added.dtype == out.dtype and (added is not out or out.itemsize < 4):
            torch.addmm(added, a, b, out=out)
            return
    product = _row_by_row(a, b) if batch_invariant else accumulator_like(a) @ accumulator_like(b)
    if alpha is not None:
        product = product * alpha  # new memory, as above
    if added is not None:
        product = product + added
    out.copy_(product)


def _row_by_row(a_TR: Tensor, w_RC: Tensor) -> Tensor:
    """a w in float32 or better, each row a product of its own."""
    w_CR = accumulator_like(w_RC).T.contiguous()
    if w_CR.data_ptr() % _ALIGNMENT:
        w_CR = w_CR.clone()
    row = w_CR.new_empty(w_CR.shape[1])
    y_TC = w_CR.new_empty(a_TR.shape[0], w_CR.shape[0])
    for t, a in enumerate(a_TR):
        y_TC[t] = torch.mv(w_CR, row.copy_(a))
    return y_TC


_ALIGNMENT = 64  # bytes, of what torch allocates on a CPU
