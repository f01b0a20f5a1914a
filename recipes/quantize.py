"""quantize: a tensor as a recipe quantizes it, for a caller to keep, to read, or to hand to operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from recipes.arguments import as_member
from recipes.recipe import Recipe, Role
from recipes.registry import as_recipe
from recipes.stack import current_recipe
from recipes.tensors.quantized_handle import Quantized, QuantizedHandle
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.splits import Splits

_ROLES: dict[Any, Role] = {role.value: role for role in Role}


def quantize(
    x: Tensor,
    recipe: Recipe | str | None = None,
    role: Role | str = Role.INPUT,
    *,
    split_sizes: Tensor | Sequence[int] | Splits | None = None,
    rowwise: bool = True,
    columnwise: bool = True,
    scale: Tensor | None = None,
) -> QuantizedHandle:
    """x as `recipe` quantizes a tensor in this role: a handle, whose container is `.quantized`.

        x_q = recipes.quantize(x, "mxfp8", split_sizes=sizes)
        y = experts(x_q, split_sizes=x_q.quantized.splits)      # the codes are used as they are

    recipe: a Recipe or a name; None: that of `autocast`
    role: Role.INPUT, Role.WEIGHT or Role.GRAD_OUTPUT, or its value, "input", "weight" or "grad_output"
    x: [..., K]; [T, K] with split_sizes, where each group is quantized by itself; as a weight [N, K] or stacked
        [G, N, K]. bf16, fp16, fp32 or fp64
    rowwise, columnwise: the copies to make. fprop and dgrad read the rowwise copies of x and dy, wgrad the columnwise
        ones; fprop reads a weight rowwise, dgrad columnwise
    scale: float32, [1], or [G] with groups: under a recipe whose scales are known before the cast (delayed scaling),
        and only there

    Differentiable in x: the gradient of rounding is 1.

    Raises TypeError for another role or scale, ValueError if the recipe leaves this role in high precision, for a scale
    that is missing or of no use, for split sizes of a weight, and as `Splits.make` and `Quantizer.quantize` do.
    """
    chosen = current_recipe() if recipe is None else as_recipe(recipe)
    role = as_member("role", _ROLES.get(role, role), kind=Role)
    quantizer = chosen.quantizer(role)
    if quantizer is None:
        raise ValueError(f"{chosen!r} leaves {role.value} in high precision. Give a recipe that quantizes it.")
    if quantizer.keeps_state != (scale is not None):
        needs = (
            "needs scale=, a float32 tensor" if quantizer.keeps_state else "finds its scales itself: leave scale out"
        )
        raise ValueError(f"{chosen.name} {needs}.")
    if scale is not None:
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32 or scale.dim() != 1:
            given = f"{scale.dtype} {list(scale.shape)}" if isinstance(scale, Tensor) else repr(scale)
            raise TypeError(f"scale is {given}, but must be a float32 tensor [1], or [G] with groups. Make it one.")
        quantizer = quantizer.bound(None, None, scale)
    x = x.dequantize() if isinstance(x, QuantizedHandle) else x
    copies = {"rowwise": rowwise, "columnwise": columnwise}
    return _Quantize.apply(x, _function(quantizer, role, x, split_sizes), copies)


def _function(quantizer: Quantizer, role: Role, x: Tensor, split_sizes: Any) -> Callable[..., Quantized]:
    if split_sizes is None:
        return quantizer.quantize_stacked if role is Role.WEIGHT and x.dim() == 3 else quantizer.quantize
    if role is Role.WEIGHT:
        raise ValueError("a weight has no split_sizes. Leave them out, or quantize it in another role.")
    splits = Splits.make(split_sizes, rows=len(x), device=x.device)
    return lambda rows, **copies: quantizer.quantize_grouped(rows, splits, **copies)


class _Quantize(torch.autograd.Function):
    @staticmethod
    def forward(_: Any, x: Tensor, function: Callable[..., Quantized], copies: dict[str, bool]) -> QuantizedHandle:
        return QuantizedHandle(function(x.detach(), **copies))

    @staticmethod
    def backward(_: Any, dy: Tensor) -> tuple[Tensor, None, None]:
        return dy, None, None
