"""Linear: y = x W^T + b, quantized as the recipe says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ops.products.main_grad import OperationWithWeights
from ops.products.product import for_wgrad, gemm, quantized, wgrad
from ops.products.tile_words import explain_dequantized
from ops.products.weights import quantized_weights
from ops.runner.context import at_tensor
from ops.runner.operation import BackwardOfBasic, OperationContext, check_features, check_parameter_dtype
from recipes.arguments import check_flags, positive_integers
from recipes.recipe import Recipe, Role
from recipes.request import PlanRequest
from recipes.tensors.quantizer import Quantizer


class Linear(OperationWithWeights):
    """y = x W^T + b, for x [..., in_features].

    weight: [out_features, in_features]; bias: [out_features]. Initialised as `torch.nn.Linear`.
    Under a recipe x, W and dy are quantized for the three products: x and W along in_features for the forward pass,
    dy and W along out_features for dx, dy and x along the rows for dW. The bias gradient is the sum of the
    unquantized dy over the rows, accumulated in float32.

    accumulate_into_main_grad, delay_wgrad_compute: where and when the weight gradient goes: `ops.products.main_grad`.

    Raises TypeError for arguments of another kind, ValueError for features that are not positive, or an x whose last
    dimension is not in_features.
    """

    accepts_quantized = True

    repeatable = True

    class Saved(NamedTuple):
        x: Any  # Tensor | QuantizedTensor (columnwise copy only); None if no weight gradient is wanted

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        accumulate_into_main_grad: bool = False,
        delay_wgrad_compute: bool = False,
    ) -> None:
        super().__init__(accumulate_into_main_grad=accumulate_into_main_grad, delay_wgrad_compute=delay_wgrad_compute)
        sizes = positive_integers("Linear", in_features=in_features, out_features=out_features)
        check_flags(bias=bias)
        check_parameter_dtype(dtype)
        self.in_features, self.out_features = in_features, out_features = sizes
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in +-1/sqrt(in_features), weight and bias, as `torch.nn.Linear`."""
        bound = self.in_features**-0.5
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def input_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return recipe.quantizer(Role.INPUT)

    def grad_output_quantizer(self, recipe: Recipe) -> Quantizer | None:
        return recipe.quantizer(Role.GRAD_OUTPUT)

    def kernel(self, request: PlanRequest) -> str:
        return "torch" + explain_dequantized(request)

    def fuser_forward(self, ctx: OperationContext, x: Any, extras: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        return self.fprop(ctx, x), {}

    def fuser_backward(self, ctx: OperationContext, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> BackwardOfBasic:
        dx, gradients = self.dgrad_and_wgrad(ctx, dy)
        if "bias" in ctx.needs.params:
            gradients["bias"] = column_sums(at_tensor(dy))
        return dx, gradients, {}

    def fprop(self, ctx: OperationContext, x: Any, alpha: float = 1.0) -> Tensor:
        """alpha (x W^T + b), in memory of its own. Sets `ctx.saved`."""
        if x.shape[-1:] != (self.in_features,):
            raise ValueError(
                f"x has shape {list(x.shape)}, but [..., {self.in_features}] is needed. "
                "Check the operation before this one."
            )
        need_wgrad = "weight" in ctx.needs.params
        rows = quantized(_matrix(x), ctx.quantizer(Role.INPUT), rowwise=True, columnwise=need_wgrad)
        w = self._weight(ctx, rowwise=True)
        bias = None if self.bias is None else ctx.param("bias")
        if bias is not None and alpha != 1:
            bias = bias * alpha
        split = ctx.recipe.split_accumulator("fprop")
        capability = ctx.path.capability
        y = gemm("TN", rows, w, ctx.dtype, capability=capability, added=bias, alpha=alpha, split_accumulator=split)
        if ctx.needs_grad:
            ctx.saved = self.Saved(for_wgrad(rows) if need_wgrad else None)
        return y.view(*x.shape[:-1], self.out_features)

    def dgrad_and_wgrad(
        self, ctx: OperationContext, dy: Any, alpha: float = 1.0
    ) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        """alpha dy W, in memory of its own, and alpha dy^T x by its parameter's name; what is wanted of both.

        The second is what autograd gets, see `ops.products.main_grad`.
        """
        saved: Linear.Saved = ctx.saved
        needs = ctx.needs
        need_wgrad = "weight" in needs.params
        dx = None
        gradients: dict[str, Tensor | None] = {}
        if not (needs.input or need_wgrad):
            return dx, gradients  # dy is not quantized: that would draw a random seed or record an amax
        rows = quantized(_matrix(dy), ctx.quantizer(Role.GRAD_OUTPUT), rowwise=needs.input, columnwise=need_wgrad)
        capability = ctx.path.capability
        if needs.input:
            w = self._weight(ctx, columnwise=True)
            split = ctx.recipe.split_accumulator("dgrad")
            dx = gemm("NN", rows, w, ctx.dtype, capability=capability, alpha=alpha, split_accumulator=split)
            dx = dx.view(*dy.shape[:-1], self.in_features)
        if need_wgrad:
            split = ctx.recipe.split_accumulator("wgrad")
            product = partial(
                wgrad, rows, saved.x, dtype=ctx.dtype, capability=capability, alpha=alpha, split_accumulator=split
            )  # fmt: skip
            gradients |= self.accumulate(ctx, product)
        return dx, gradients

    def _weight(self, ctx: OperationContext, *, rowwise: bool = False, columnwise: bool = False) -> Any:
        """The weight as an operand: rowwise for fprop, columnwise for dgrad; both if both will be needed."""
        quantizer = ctx.quantizer(Role.WEIGHT)
        if quantizer is None:
            return ctx.param("weight")

        def quantize(rowwise: bool, columnwise: bool) -> Any:
            return quantizer.quantize(ctx.param("weight"), rowwise=rowwise, columnwise=columnwise)

        columnwise = columnwise or ctx.needs.input
        return quantized_weights(ctx, ("weight",), quantizer, quantize, rowwise=rowwise, columnwise=columnwise)

    def prepare_weights(self, ctx: OperationContext) -> Any:
        return None if ctx.quantizer(Role.WEIGHT) is None else self._weight(ctx, rowwise=True)

    def features(self, incoming: int | None) -> int | None:
        check_features(incoming, self.in_features)
        return self.out_features

    def extra_repr(self) -> str:
        own = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        return own + super().extra_repr()


def column_sums(dy: Tensor) -> Tensor:
    """The gradient of a bias, [features]: the sum of dy [..., features] over its rows, in float32 or better."""
    return _matrix(dy).sum(0, dtype=torch.promote_types(dy.dtype, torch.float32))


def _matrix(x: Any) -> Any:
    return x.reshape(-1, x.shape[-1]) if isinstance(x, Tensor) else x
