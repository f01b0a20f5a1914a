"""Weight gradients of a grouped MLP, by our grouped GEMM alone and in whole steps: a new bf16 gradient, or added to an
fp32 main_grad.

bf16 gradient    dw_g  = dy_g^T x_g         2 bytes written for each element of dw
fp32 main_grad   dw_g += dy_g^T x_g         4 bytes read and 4 written for each element
"""

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from bench.grouped_case import GroupedCase
from bench.schedule import BASELINE
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


def whole_steps(case: GroupedCase) -> dict[str, Callable[[], list[Tensor]]]:
    """Forward + `backward` for each of the two kinds of gradient, with the same weights: y and all gradients, the
    main_grads as they are then."""
    adding = copy.deepcopy(case.layer, {id(weight): weight for weight in case.weights})
    for operation in adding:
        if hasattr(operation, "accumulate_into_main_grad"):
            operation.accumulate_into_main_grad = True
    for weight in case.weights:
        weight.main_grad = torch.zeros(weight.shape, device=weight.device)
    added_to = replace(case, layer=adding)

    def step(its_case: GroupedCase, gradient: str) -> Callable[[], list[Tensor]]:
        call = its_case.ours(BASELINE)
        leaves = (*case.inputs.values(), *case.weights)

        def run() -> list[Tensor]:
            for leaf in leaves:
                leaf.grad = None
            y = call()
            y.backward(case.dy)
            of_weights = [getattr(weight, gradient) for weight in case.weights]
            return [y.detach(), *(leaf.grad for leaf in case.inputs.values()), *of_weights]

        return run

    return {GRADIENT: step(case, "grad"), MAIN_GRAD: step(added_to, "main_grad")}


def whole_steps_sqnr(case: GroupedCase, steps: dict[str, Callable[[], list[Tensor]]]) -> dict[str, dict[str, float]]:
    """SQNR in dB by kind of gradient and result, of main_grads that were zero before; they are left so again."""
    found = {way: case.sqnr(step()) for way, step in steps.items()}
    for weight in case.weights:
        weight.main_grad.zero_()
    return found
