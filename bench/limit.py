"""The limit for a grouped MLP: its six matrix products as batched GEMMs of torch (cuBLAS) with equal groups.

    FC1        x   [E, M, H]  W1^T [E, H, 2F]        FC2 dgrad  dy   [E, M, H]   W2  [E, H, F]
    FC2        act [E, M, F]  W2^T [E, F, H]         FC1 dgrad  dh   [E, M, 2F]  W1  [E, 2F, H]
                                                     FC2 wgrad  dy^T [E, H, M]   act [E, M, F]
                                                     FC1 wgrad  dh^T [E, 2F, M]  x   [E, M, H]

M = R / E rows for each expert: 6 R H F FLOP forward, 18 R H F forward + backward. No activation, no routing and no
uneven groups: a bound to compare with, not a replacement of the MLP.
"""

# R rows, E experts, M rows of each, H hidden, F expert width

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from bench.case import PASSES
from bench.grouped_case import GroupedCase
from bench.sqnr import Sqnr

NUM_FORWARD = 2


class Product(NamedTuple):
    """The batched product left [E, M, K] times right [E, K, N]."""

    name: str
    left: Tensor
    right: Tensor

    @property
    def flop(self) -> int:
        return 2 * self.left.numel() * self.right.shape[-1]


def limit_products(case: GroupedCase) -> list[Product]:
    """The products of a case from `expert_mlp`, on its x, dy and weights; act and dh are random numbers.

    Raises ValueError if its rows cannot be divided equally.
    """
    experts = len(case.sizes)
    if case.rows % experts:
        raise ValueError(
            f"{case.rows} rows cannot be divided equally among {experts} experts. Take another number of tokens."
        )
    x, dy = (tensor.detach().unflatten(0, (experts, -1)) for tensor in (case.inputs["x"], case.dy))
    w1, w2 = (weight.detach() for weight in case.weights)
    dh, act = (x.new_empty(*x.shape[:2], width).normal_() for width in (w1.shape[1], w2.shape[2]))
    return [
        Product("FC1", x, w1.mT),
        Product("FC2", act, w2.mT),
        Product("FC2 dgrad", dy, w2),
        Product("FC1 dgrad", dh, w1),
        Product("FC2 wgrad", dy.mT, act),
        Product("FC1 wgrad", dh.mT, x),
    ]


def of_pass(products: Sequence[Product], passes: str) -> Sequence[Product]:
    """The products of a pass: those of forward, or all."""
    return products[:NUM_FORWARD] if passes == PASSES[0] else products


def run_products(products: Sequence[Product]) -> None:
    for product in products:
        torch.bmm(product.left, product.right)


def products_sqnr(products: Sequence[Product]) -> dict[str, float]:
    """SQNR in dB of each product by name, expert by expert, against fp32 (for fp32 against float64)."""
    found = {}
    for name, left, right in products:
        wide = torch.float64 if left.dtype == torch.float32 else torch.float32
        sqnr = Sqnr()
        for got, a, b in zip(torch.bmm(left, right), left, right, strict=True):
            sqnr.add(got, a.to(wide) @ b.to(wide))
        found[name] = sqnr.db
    return found
