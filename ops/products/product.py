"""One product of two operands, quantized or not, in the three layouts of a linear layer.

    TN   y  = x  w^T     both read along in_features     (fprop)
    NN   dx = dy w       both read along out_features    (dgrad)
    NT   dw = dy^T x     both read along the rows        (wgrad)

A quantized operand is multiplied by its exact values (see `gemm_dtype`); scales that hold for a whole tensor are
applied to the float32 sum. Float8 codes with scales of a tensor, of a row or of 128 values are multiplied as they are
where the GPU can (`recipes.native_products`). The result is rounded once.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ops.kernels.grouped_gemm.float8 import grouped_gemm_nt_float8, grouped_gemm_tn_float8
from ops.kernels.grouped_gemm.high_precision import grouped_gemm_nn, grouped_gemm_nt, grouped_gemm_tn
from ops.kernels.grouped_gemm.operands import accumulator_like, why_not_read_as
from ops.runner.in_place import writable
from recipes.native_products import COLUMNWISE, Capability, GemmLayout, why_not_native
from recipes.recipe import Recipe, Role
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.scaled_codes import Float8Operand, Operand
from recipes.tensors.splits import Splits

# What an error calls the operands.
_NAMES: dict[GemmLayout, tuple[str, str]] = {
    "TN": ("x in fprop", "the weight in fprop"),
    "NN": ("dy in dgrad", "the weight in dgrad"),
    "NT": ("dy in wgrad", "x in wgrad"),
}


def quantized(
    x: Tensor | QuantizedTensor, quantizer: Quantizer | None, *, rowwise: bool = False, columnwise: bool = False
) -> Tensor | QuantizedTensor:
    """x quantized, or x itself: if there is no quantizer, or it is quantized so, with the copies that are needed.

    A copy that x lacks is made of its values. So are both if `why_not_reused`.
    """
    if isinstance(x, Tensor):
        return x if quantizer is None else quantizer.quantize(x, rowwise=rowwise, columnwise=columnwise)
    if quantizer is None:
        return x.dequantize()
    if why_not_reused(x, quantizer, rowwise=rowwise, columnwise=columnwise) is not None:
        return quantizer.quantize(x.dequantize(), rowwise=rowwise, columnwise=columnwise)
    missing = {"rowwise": rowwise and x.rowwise is None, "columnwise": columnwise and x.columnwise is None}
    if not any(missing.values()):
        return x
    return with_missing(x, quantizer.quantize(x.dequantize(), **missing))


def with_missing(x: Any, made: Any) -> Any:
    """x with the copies that it lacks and `made` has."""
    return replace(x, rowwise=x.rowwise or made.rowwise, columnwise=x.columnwise or made.columnwise)


def why_not_reused(
    x: QuantizedTensor | GroupedTensor,
    quantizer: Quantizer,
    *,
    rowwise: bool,
    columnwise: bool,
    splits: Splits | None = None,
) -> str | None:
    """Why these codes are dequantized, and quantized by `quantizer`, as a sentence; None if they are multiplied.

    splits: those by which the operation divides rows
    """
    if isinstance(x, GroupedTensor) != (splits is not None):
        has, needs = ("each group", "the whole tensor") if splits is None else ("the whole tensor", "each group")
        return f"its scales are of {has}, but those of {needs} are needed."
    if isinstance(x, GroupedTensor):
        if x.data is not None:
            return "its rows are in high precision."
        if splits is not None and not x.splits.divides_as(splits):
            return "its groups may be others than those of split_sizes. Pass split_sizes=x.quantized.splits."
    held = [(x.rowwise, False), (x.columnwise, True)]
    wanted = [(copy, of_columns) for (copy, of_columns), need in zip(held, (rowwise, columnwise), strict=True) if need]
    if all(copy is None for copy, _ in wanted):
        return f"it has no {'columnwise' if columnwise else 'rowwise'} copy."
    for copy, of_columns in wanted:
        spec = quantizer.copy_spec(of_columns)
        same = copy is None or copy.spec == spec
        if spec is None and copy is not None:  # a format that only the caller can know, but no other transform
            same = copy.transform == (quantizer.columnwise_transform if of_columns else None)
        if not same:
            name = "columnwise" if of_columns else "rowwise"
            return f"its {name} codes are {copy.spec}, but {spec or type(quantizer).__name__} is needed."  # type: ignore[union-attr]
    return None


def for_wgrad(x: Any) -> Any:
    """What of x has to be kept for a weight gradient: of a quantized container the columnwise copy alone."""
    return x if isinstance(x, Tensor) or x.columnwise is None else replace(x, rowwise=None)


def quantizes(recipe: Recipe) -> bool:
    """Whether an operand of any product is quantized."""
    return any(recipe.quantizer(role) is not None for role in Role)


def gemm_dtype(nominal: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which quantized operands are multiplied: it holds every quantized value exactly.

    On a GPU bfloat16 for 16-bit results (the tensor cores accumulate in float32), else float32; float64 for float64.
    """
    if nominal == torch.float64:
        return torch.float64
    return torch.bfloat16 if device.type == "cuda" and nominal != torch.float32 else torch.float32


Matrix = Tensor | QuantizedTensor | GroupedTensor


def operands(layout: GemmLayout, a: Matrix, b: Matrix, nominal: torch.dtype) -> tuple[Operand, Operand]:
    """What the product multiplies, in one dtype; but of groups on a CPU kept values of the weights may be narrower.

    Raises TypeError for what is no Operand of tensors, ValueError for values of another shape than the copy, and for an
    `Operand.scale` that the product does not take.
    """
    plain_a, plain_b = _plain(a), _plain(b)
    if plain_a is not None and plain_b is not None and plain_a.dtype == plain_b.dtype:
        return Operand(plain_a, None), Operand(plain_b, None)
    left, right = (
        Operand(x, None) if isinstance(x, Tensor) else x.operand(columnwise, gemm_dtype(nominal, x.device))
        for x, columnwise in zip((a, b), COLUMNWISE[layout], strict=True)
    )
    for operand, x, name in zip((left, right), (a, b), _NAMES[layout], strict=True):
        _check_values(operand, x, name)
    num_groups = a.splits.num_groups if isinstance(a, GroupedTensor) else 1
    _check_scale(left, _NAMES[layout][0], num_groups, of_rows=layout != "NT")
    _check_scale(right, _NAMES[layout][1], num_groups, of_rows=False)
    if right.factor is not None:  # of stacked weights: their values are rounded to float32 at least
        left = left._replace(values=accumulator_like(left.values))
    if left.values.dtype == right.values.dtype:
        return left, right
    if layout != "NT" and right.values.dim() == 3 and why_not_read_as(left.values, right.values) is None:
        return left, right
    dtype = torch.promote_types(left.values.dtype, right.values.dtype)  # they differ if only one is quantized
    return left._replace(values=left.values.to(dtype)), right._replace(values=right.values.to(dtype))


def _check_values(operand: Operand, x: Matrix, name: str) -> None:
    if not isinstance(operand, Operand):
        raise TypeError(f"the operand() of {name} returned a {type(operand).__name__}. Return Operand(values, scale).")
    if not isinstance(operand.values, Tensor) or not (operand.scale is None or isinstance(operand.scale, Tensor)):
        kinds = f"{type(operand.values).__name__} and {type(operand.scale).__name__}"
        raise TypeError(
            f"the Operand of {name} has values and a scale of type {kinds}, but values must be a tensor, and the scale "
            "a float32 tensor or None. Make it so."
        )
    given, shape = operand.values.shape, x.shape
    if given == shape or (given[-1] == shape[-1] and (operand.block > 1 or given.numel() == shape.numel())):
        return
    raise ValueError(
        f"the Operand of {name} has values of shape {list(given)}, but the copy is of shape {list(shape)}. Give it one "
        "value for each."
    )


def _check_scale(operand: Operand, name: str, num_groups: int, *, of_rows: bool) -> None:
    """of_rows: whether the operand's rows are those of the product, so that each may have a factor."""
    if operand.scale is None or operand.scale.dim() == 0:
        return
    allowed = [[], [num_groups]]
    if of_rows:
        allowed.append([math.prod(operand.values.shape[:-1]), 1])
    given = list(operand.scale.shape)
    if given not in allowed:
        raise ValueError(
            f"the Operand of {name} has a scale of shape {given}, but must have one of shape "
            f"{' or '.join(map(str, allowed))}. Multiply other scales into its values."
        )


def float8_operands(
    layout: GemmLayout, a: Matrix, b: Matrix, capability: Capability | None
) -> tuple[Float8Operand, Float8Operand] | None:
    """The codes of both, where a GPU of this capability multiplies them as they are; None where values are."""
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return None
    columnwise_a, columnwise_b = COLUMNWISE[layout]
    in_rows = layout == "NT" and a.columnwise is None  # of groups, as `GroupedPath.wgrad_reads_rows` says
    codes_a = a.columnwise if columnwise_a and not in_rows else a.rowwise
    codes_b = b.columnwise if columnwise_b else b.rowwise
    left = None if codes_a is None else codes_a.float8_operand()
    right = None if codes_b is None else codes_b.float8_operand()
    if left is None or right is None:
        return None
    if in_rows:
        if not isinstance(a, GroupedTensor) or left.scaling != "tensor":
            return None
    elif left.block != (right.block if layout == "NT" else 1):
        return None
    refusal = why_not_native(
        layout, left.scaling, right.scaling, a.dtype, capability, left.codes.dtype, right.codes.dtype
    )  # fmt: skip
    return (left, right) if refusal is None else None


def _plain(x: Matrix) -> Tensor | None:
    """x as it is, if it is not quantized."""
    if isinstance(x, Tensor):
        return x
    return x.data if isinstance(x, GroupedTensor) else None


def gemm(
    layout: GemmLayout,
    a: Tensor | QuantizedTensor,
    b: Tensor | QuantizedTensor,
    out_dtype: torch.dtype,
    *,
    capability: Capability | None,
    added: Tensor | None = None,
    alpha: float = 1.0,
    split_accumulator: bool = True,
    as_one_group: bool = False,
    batch_invariant: bool = False,
) -> Tensor:
    """alpha times the product of two matrices, plus `added` (broadcast), in out_dtype, rounded once. Always new memory.

    a: TN [T, K], NN [T, N], NT [T, N]. b: TN [N, K], NN [N, K], NT [T, K].
    capability: of the GPU that they are on, None on a CPU
    split_accumulator: of products of float8 codes, see `Recipe.split_accumulator`
    as_one_group: by the kernel of grouped products, whose bits are those of a group of any; not float64 on a GPU, which
        it does not know. Products of float8 codes are in any case
    batch_invariant: of TN, see `ops.kernels.grouped_gemm.high_precision`; as one group then
    """
    codes = float8_operands(layout, a, b, capability)
    if codes is not None:
        return _float8_gemm(layout, *codes, out_dtype, added, alpha, split_accumulator, batch_invariant)
    left, right = operands(layout, a, b, out_dtype)
    x, w = _matrices(layout, left, right)
    if (as_one_group or batch_invariant) and not (x.is_cuda and x.dtype == torch.float64):
        left, right = left._replace(values=x), right._replace(values=w)
        return _one_group_gemm(layout, left, right, out_dtype, added, alpha, batch_invariant)
    x = x.T if layout == "NT" else x
    w = w.T if layout == "TN" else w
    if left.scale is None and right.scale is None and x.dtype == out_dtype:
        if added is None and alpha == 1:
            return x @ w
        # addmm of 16-bit numbers rounds the product before a matrix is added, on a CPU before alpha too.
        wide = x.dtype in (torch.float32, torch.float64)
        if added is None and (wide or x.is_cuda):
            return torch.addmm(x.new_empty(()), x, w, beta=0, alpha=alpha)
        if added is not None and (added.dim() == 1 or (wide and added.dtype == out_dtype)):
            return torch.addmm(added.to(out_dtype), x, w, alpha=alpha)
        if added is not None and x.is_cuda and added.dtype == out_dtype and added.shape == (len(x), w.shape[1]):
            product = torch.mm(x, w, out_dtype=torch.float32)
            return torch.add(added, product, alpha=alpha, out=torch.empty_like(added))
    product = writable(accumulator_like(x) @ accumulator_like(w))
    if left.scale is not None and left.scale.dim() == 2 and (of_right := right.alpha) is not None:
        product *= of_right  # one after the other, as the grouped path does where each row has a factor
        right = right._replace(scale=None)
    scale = left.alpha_with(right)
    if scale is not None:
        product *= scale * alpha
    elif alpha != 1:
        product *= alpha
    if added is not None:
        product = product + added
    return product.to(out_dtype)


def wgrad(
    dy: Tensor | QuantizedTensor,
    x: Tensor | QuantizedTensor,
    dtype: torch.dtype,
    *,
    capability: Capability | None,
    alpha: float = 1.0,
    split_accumulator: bool = True,
    as_one_group: bool = False,
    out: Tensor | None = None,
    accumulate: bool = False,
) -> Tensor:
    """dw = alpha dy^T x [N, K] in `dtype`, in new memory; or `out` = dw, or `out` += dw, rounded once to out's dtype.

    The sum that goes into `out` is made in float32 or better. Without rows `out` is zeroed, or left as it is.
    as_one_group: as for `gemm`, of new memory; what goes into `out` is multiplied so in any case
    """
    if out is None:
        return gemm(
            "NT", dy, x, dtype, capability=capability, alpha=alpha, split_accumulator=split_accumulator,
            as_one_group=as_one_group,
        )  # fmt: skip
    # Codes are multiplied by a kernel that writes new memory, and float64 has no grouped kernel on a GPU.
    if float8_operands("NT", dy, x, capability) is not None or (dtype == torch.float64 and out.is_cuda):
        sums = torch.promote_types(dtype, torch.float32)
        dw = gemm("NT", dy, x, sums, capability=capability, alpha=alpha, split_accumulator=split_accumulator)
        return store(dw, out, accumulate)
    left, right = operands("NT", dy, x, dtype)
    rows_dy, rows_x = _matrices("NT", left, right)
    scale = left.alpha_with(right)
    if alpha != 1:
        factor = torch.full((), alpha, dtype=torch.promote_types(rows_dy.dtype, torch.float32), device=out.device)
        scale = factor if scale is None else scale * factor
    splits = Splits.whole(len(rows_dy), out.device)
    grouped_gemm_nt(rows_dy, rows_x, splits, alpha_G=scale, out=out[None], out_dtype=out.dtype, accumulate=accumulate)
    return out


def store(product: Tensor, out: Tensor, accumulate: bool) -> Tensor:
    """out = product, or out += product, rounded once."""
    return out.add_(product) if accumulate else out.copy_(product)


def _matrices(layout: GemmLayout, a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    """The values as matrices, one row where they are a vector, in NT with as many rows: where one is quantized, it may
    have rows of zeros at its end."""
    x, w = (torch.atleast_2d(operand.values).flatten(0, -2) for operand in (a, b))
    if layout == "NT" and len(x) != len(w):
        x, w = (F.pad(t, (0, 0, 0, max(len(x), len(w)) - len(t))) for t in (x, w))
    return x, w


def _one_group_gemm(
    layout: GemmLayout,
    left: Operand,
    right: Operand,
    out_dtype: torch.dtype,
    added: Tensor | None,
    alpha: float,
    batch_invariant: bool,
) -> Tensor:
    """`gemm` of matrices of values: the grouped kernel on one group."""
    x, w = left.values, right.values
    splits = Splits.whole(len(x), x.device)
    factors = None
    if left.scale is not None and left.scale.dim() == 2:  # of each row
        left, factors = left._replace(scale=None), left.alpha
    alpha_G = left.alpha_with(right)
    bias = added if added is not None and added.dim() == 1 and layout == "TN" else None
    in_kernel = factors is None and alpha == 1 and added is bias
    dtype = out_dtype if in_kernel else torch.promote_types(out_dtype, torch.float32)
    if layout == "NT":
        product = grouped_gemm_nt(x, w, splits, alpha_G=alpha_G, out_dtype=dtype)[0]
    elif layout == "TN":
        bias_GN = bias[None] if bias is not None and in_kernel else None
        product = grouped_gemm_tn(
            x, w[None], splits, alpha_G=alpha_G, bias_GN=bias_GN, out_dtype=dtype, batch_invariant=batch_invariant
        )  # fmt: skip
    else:
        product = grouped_gemm_nn(x, w[None], splits, alpha_G=alpha_G, out_dtype=dtype)
    if in_kernel:
        return product
    product = writable(product)
    if factors is not None:
        product *= factors
    if alpha != 1:
        product *= alpha
    return (product if added is None else product + added).to(out_dtype)


def _float8_gemm(
    layout: GemmLayout,
    a: Float8Operand,
    b: Float8Operand,
    out_dtype: torch.dtype,
    added: Tensor | None,
    alpha: float,
    split_accumulator: bool,
    batch_invariant: bool,
) -> Tensor:
    """`gemm` of codes: the grouped kernel on one group."""
    bias = added if added is not None and added.dim() == 1 and alpha == 1 else None
    plain = added is bias and alpha == 1
    dtype = out_dtype if plain else torch.float32
    if layout == "NT":
        offsets = Splits.whole(a.codes.shape[1], a.codes.device).offsets
        product = grouped_gemm_nt_float8(
            a.codes, a.scale, b.codes, b.scale, offsets, out_dtype=dtype, split_accumulation=split_accumulator
        )[0]
    else:
        rows = torch.atleast_2d(a.codes).flatten(0, -2)
        columns = b.codes[None, :, : rows.shape[1]].contiguous()  # a copy only where the transposed codes are padded
        scale = b.scale[None] if b.scale.dim() == 2 else b.scale
        product = grouped_gemm_tn_float8(
            rows, a.scale, columns, scale, Splits.whole(rows.shape[0], rows.device),
            bias_GC=None if bias is None else bias[None], out_dtype=dtype, split_accumulation=split_accumulator,
            batch_invariant=batch_invariant,
        )  # fmt: skip
    if plain:
        return product
    product *= alpha
    return (product if added is None else product + added).to(out_dtype)
