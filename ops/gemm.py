"""One product of two operands, quantized or not, in the three layouts of a linear layer.

    TN   y  = x  w^T     both read along in_features     (fprop)
    NN   dx = dy w       both read along out_features    (dgrad)
    NT   dw = dy^T x     both read along the rows        (wgrad)

A quantized operand is multiplied by its exact values (see `gemm_dtype`); scales that hold for a whole tensor are
applied to the float32 sum. The result is rounded once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ops.kernels.grouped_operands import accumulator_like
from recipes.grouped_tensor import GroupedTensor
from recipes.quantized_tensor import Operand, QuantizedTensor
from recipes.quantizer import Quantizer
from recipes.recipe import Recipe, Role

Layout = Literal["TN", "NN", "NT"]

# layout -> whether the first and the second operand are read columnwise
_COLUMNWISE: dict[Layout, tuple[bool, bool]] = {"TN": (False, False), "NN": (False, True), "NT": (True, True)}


def quantized(
    x: Tensor | QuantizedTensor, quantizer: Quantizer | None, *, rowwise: bool = False, columnwise: bool = False
) -> Tensor | QuantizedTensor:
    """x quantized, or x itself: if there is no quantizer, or it is quantized with the copies that are needed."""
    if quantizer is None:
        return x if isinstance(x, Tensor) else x.dequantize()
    if not isinstance(x, Tensor):
        if (x.rowwise is not None or not rowwise) and (x.columnwise is not None or not columnwise):
            return x
        x = x.dequantize()
    return quantizer.quantize(x, rowwise=rowwise, columnwise=columnwise)


def for_wgrad(x: Any) -> Any:
    """What of x has to be kept for a weight gradient: of a quantized container the columnwise copy alone."""
    return x if isinstance(x, Tensor) or x.columnwise is None else replace(x, rowwise=None)


def quantizes(recipe: Recipe) -> bool:
    """Whether an operand of any product is quantized."""
    return any(recipe.quantizer(role) is not None for role in Role)


def commutes(scale: float, dtype: torch.dtype) -> bool:
    """Whether a factor may be moved past a product without a change of its bits: (scale a) b = scale (a b).

    True for powers of two. Not for float16, whose range is so small that a number may lose its last places, or
    overflow, on one side alone; in the other dtypes only numbers within 2^32 of their range's ends do.
    """
    mantissa, exponent = math.frexp(scale)
    return abs(mantissa) == 0.5 and abs(exponent - 1) <= 32 and dtype != torch.float16


def gemm_dtype(nominal: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which quantized operands are multiplied: it holds every quantized value exactly.

    On a GPU bfloat16 for 16-bit results (the tensor cores accumulate in float32), else float32; float64 for float64.
    """
    if nominal == torch.float64:
        return torch.float64
    return torch.bfloat16 if device.type == "cuda" and nominal != torch.float32 else torch.float32


Matrix = Tensor | QuantizedTensor | GroupedTensor


def operands(layout: Layout, a: Matrix, b: Matrix, nominal: torch.dtype) -> tuple[Operand, Operand]:
    """What the product multiplies, in one dtype."""
    plain_a, plain_b = _plain(a), _plain(b)
    if plain_a is not None and plain_b is not None and plain_a.dtype == plain_b.dtype:
        return Operand(plain_a, None), Operand(plain_b, None)
    left, right = (
        Operand(x, None) if isinstance(x, Tensor) else x.operand(columnwise, gemm_dtype(nominal, x.device))
        for x, columnwise in zip((a, b), _COLUMNWISE[layout], strict=True)
    )
    if left.values.dtype == right.values.dtype:
        return left, right
    dtype = torch.promote_types(left.values.dtype, right.values.dtype)  # they differ if only one is quantized
    return Operand(left.values.to(dtype), left.alpha), Operand(right.values.to(dtype), right.alpha)


def _plain(x: Matrix) -> Tensor | None:
    """x as it is, if it is not quantized."""
    if isinstance(x, Tensor):
        return x
    return x.data if isinstance(x, GroupedTensor) else None


def gemm(
    layout: Layout,
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor,
    out_dtype: torch.dtype,
    *,
    added: Tensor | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """alpha times the product of two matrices, plus `added` (broadcast), in out_dtype. Always new memory.

    a: TN [T, K], NN [T, N], NT [T, N]. b: TN [N, K], NN [N, K], NT [T, K].
    """
    left, right = operands(layout, a, b, out_dtype)
    x, w = left.values.flatten(0, -2), right.values.flatten(0, -2)
    x = x.T if layout == "NT" else x
    w = w.T if layout == "TN" else w
    if left.alpha is None and right.alpha is None and x.dtype == out_dtype:
        if added is None:
            return x @ w if alpha == 1 else torch.addmm(x.new_empty(()), x, w, beta=0, alpha=alpha)
        if added.dim() == 1:
            return torch.addmm(added.to(out_dtype), x, w, alpha=alpha)
    product = accumulator_like(x) @ accumulator_like(w)
    scale = combined_alpha(left, right)
    if scale is not None:
        product *= scale
    if alpha != 1:
        product *= alpha
    if added is not None:
        product = product + added
    return product.to(out_dtype)


def combined_alpha(a: Operand, b: Operand) -> Tensor | None:
    """The product of the operands' per-tensor scales, in float32; None if neither has one."""
    if a.alpha is None or b.alpha is None:
        return a.alpha if b.alpha is None else b.alpha
    return a.alpha * b.alpha
