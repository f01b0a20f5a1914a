"""Weight gradients of a grouped MLP by our grouped GEMM alone: a new bf16 gradient, or added to an fp32 main_grad.

bf16 gradient    dw_g  = dy_g^T x_g         2 bytes written for each element of dw
fp32 main_grad   dw_g += dy_g^T x_g         4 bytes read and 4 written for each element
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.grouped_case import GroupedCase
from bench.sqnr import Sqnr
from ops.kernels.grouped_gemm.high_precision import grouped_gemm_nt
from recipes.tensors.splits import Splits

GRADIENT, MAIN_GRAD = "bf16 gradient", "fp32 main_grad"


@dataclass(frozen=True)
class Wgrad:
    """dy [R, N], x [R, K], their splits, and main_grad [E, N, K] in fp32."""

    dy: Tensor
    x: Tensor
    splits: Splits
    main_grad: Tensor

    def new(self) -> Tensor:
        return grouped_gemm_nt(self.dy, self.x, self.splits)

    def accumulated(self) -> Tensor:
        return grouped_gemm_nt(self.dy, self.x, self.splits, out=self.main_grad, accumulate=True)

    def sqnr(self, found: Tensor) -> float:
        """SQNR in dB of dw, expert by expert, against fp32."""
        sqnr = Sqnr()
        sizes = self.splits.tolist()
        for got, dy, x in zip(found, self.dy.split(sizes), self.x.split(sizes), strict=True):
            sqnr.add(got, dy.float().mT @ x.float())
        return sqnr.db


def wgrads(case: GroupedCase) -> list[Wgrad]:
    """The wgrads of FC1 and FC2 for a case from `expert_mlp`; operands that the case lacks are random numbers."""
    x, dy = case.inputs["x"].detach(), case.dy
    splits = Splits.make(case.sizes, rows=case.rows, device=case.device)
    w1, w2 = case.weights
    dh, act = (x.new_empty(case.rows, width).normal_() for width in (w1.shape[1], w2.shape[2]))
    return [
        Wgrad(left, right, splits, torch.zeros(weight.shape, device=case.device))
        for left, right, weight in ((dh, x, w1), (dy, act, w2))
    ]


def ways(products: list[Wgrad]) -> dict[str, Callable[[], list[Tensor]]]:
    """Both products, as steps for each of the two kinds of gradient."""
    return {
        GRADIENT: lambda: [product.new() for product in products],
        MAIN_GRAD: lambda: [product.accumulated() for product in products],
    }


def wgrads_sqnr(products: list[Wgrad]) -> dict[str, dict[str, float]]:
    """SQNR in dB by kind of gradient and product. For main_grad, half of the sum of two accumulations is checked."""
    found: dict[str, dict[str, float]] = {GRADIENT: {}, MAIN_GRAD: {}}
    for name, product in zip(("FC1 wgrad", "FC2 wgrad"), products, strict=True):
        found[GRADIENT][name] = product.sqnr(product.new())
        product.main_grad.zero_()
        product.accumulated()
        found[MAIN_GRAD][name] = product.sqnr(product.accumulated() / 2)
    return found
