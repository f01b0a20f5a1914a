"""The grouped products of a layer alone: fprop, dgrad and wgrad of each GroupedLinear.

Operands are quantized beforehand, as in the layer; for emulated recipes, dequantization to bf16 is part of the product.
x of the first GroupedLinear and dy of the last are those of the case, the others are random.
"""
# R rows, K in features, N out features

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.case import TimedPass
from bench.grouped_case import GroupedCase
from bench.schedule import recipe_named
from bench.sqnr import Sqnr
from fuser import Sequential, autocast
from ops import GroupedLinear
from ops.products.paths import Path, choose_path
from ops.products.weights import one_for_both
from ops.runner.quantizer_state import QuantizerState
from recipes import Role, Splits
from recipes.recipe import Recipe
from recipes.request import PlanRequest

# The name of this pass in `bench recipes`, besides forward and forward + backward.
PRODUCTS = "products"
# Steps after which a recipe with an amax history has scales for these operands.
STEPS_TO_SCALES = 2


@dataclass(frozen=True)
class _Linear:
    """One GroupedLinear with an x [R, K] and a dy [R, N]."""

    operation: GroupedLinear
    x: Tensor
    dy: Tensor

    @property
    def weight(self) -> Tensor:
        return self.operation.weight


@dataclass(frozen=True)
class GroupedProducts:
    """The products of a case. A step returns the results of fprop, dgrad and wgrad of each GroupedLinear in order."""

    linears: list[_Linear]
    splits: Splits

    @property
    def names(self) -> list[str]:
        return [f"{name}{n}" for n in range(1, len(self.linears) + 1) for name in ("fprop", "dgrad", "wgrad")]

    @property
    def outputs(self) -> list[str]:
        """The names of the results that are not gradients."""
        return [name for name in self.names if name.startswith("fprop")]

    def ours(self, label: str) -> TimedPass:
        """A step under the recipe of this label, on the path that the recipe chooses."""
        recipe = recipe_named(label)
        x = self.linears[0].x
        path = choose_path(PlanRequest(recipe, x.device, x.dtype, (True, (True,), ()), True, None, 0))
        operands = [self._operands(linear, recipe, path) for linear in self.linears]

        @torch.no_grad()
        def step() -> list[Tensor]:
            found = []
            for x, w, dy in operands:
                found += [path.fprop(x, w), path.dgrad(dy, w), path.wgrad(dy, x)]
            return found

        return step

    def torchs(self) -> TimedPass:
        """The same step with `F.grouped_mm`, on bf16 operands."""
        ends = self.splits.offsets[1:].int()
        operands = [(linear.x, linear.weight, linear.dy) for linear in self.linears]

        @torch.no_grad()
        def step() -> list[Tensor]:
            found = []
            for x, w, dy in operands:
                pairs = ((x, w.mT), (dy, w), (dy.mT, x))
                found += [F.grouped_mm(*pair, offs=ends) for pair in pairs]
            return found

        return step

    def sqnr(self, found: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
        """SQNR in dB of the results of a step by name, against `exact()`."""
        sums = {name: Sqnr() for name in self.names}
        for total, got, wanted in zip(sums.values(), found, exact, strict=True):
            total.add(got, wanted)
        return {name: total.db for name, total in sums.items()}

    @torch.no_grad()
    def exact(self) -> list[Tensor]:
        """The results in fp32, expert by expert."""
        sizes = self.splits.tolist()
        found = []
        for linear in self.linears:
            x, dy = (tensor.float().split(sizes) for tensor in (linear.x, linear.dy))
            w = linear.weight.float()
            found.append(torch.cat([rows @ one.mT for rows, one in zip(x, w, strict=True)]))
            found.append(torch.cat([rows @ one for rows, one in zip(dy, w, strict=True)]))
            found.append(torch.stack([left.mT @ right for left, right in zip(dy, x, strict=True)]))
        return found

    def _operands(self, linear: _Linear, recipe: Recipe, path: Path) -> tuple[Any, Any, Any]:
        """x, w and dy with the quantized copies that are multiplied, or unchanged in high precision."""
        quantizers = {role: recipe.quantizer(role) for role in Role}
        if any(quantizer is not None and quantizer.keeps_state for quantizer in quantizers.values()):
            settle(linear, recipe, self.splits)
            operation = linear.operation
            for role, quantizer in quantizers.items():
                state = QuantizerState(operation, role, operation.num_scales)
                quantizers[role] = quantizer and quantizer.bound(state, None, None)
        of_weight = quantizers[Role.WEIGHT]

        def weights(rowwise: bool, columnwise: bool) -> Any:
            return path.weight(linear.weight, of_weight, rowwise=rowwise, columnwise=columnwise)

        agree = of_weight is not None and of_weight.copies_agree
        weight = one_for_both(weights, True, True) if agree else weights(True, True)
        x = path.quantize(linear.x, self.splits, quantizers[Role.INPUT], rowwise=True, columnwise=True)
        in_rows = path.wgrad_reads_rows(linear.dy, self.splits, (linear.weight.shape[1], linear.weight.shape[2]))
        of_dy = quantizers[Role.GRAD_OUTPUT]
        return x, weight, path.quantize(linear.dy, self.splits, of_dy, rowwise=True, columnwise=not in_rows)


def settle(linear: _Linear, recipe: Recipe, splits: Splits) -> None:
    """Run steps of the operation alone, which record amaxes."""
    layer, x = Sequential(linear.operation), linear.x.detach().requires_grad_()
    for _ in range(STEPS_TO_SCALES):
        with autocast(recipe=recipe):
            y = layer(x, split_sizes=splits.offsets.diff())
        torch.autograd.grad(y, (x, linear.weight), linear.dy)


def grouped_products(case: GroupedCase) -> GroupedProducts:
    operations = [module for module in case.layer.modules() if isinstance(module, GroupedLinear)]
    torch.manual_seed(0)
    xs, dys = (
        [torch.randn(case.rows, width, dtype=case.dy.dtype, device=case.device) for width in widths]
        for widths in ([op.in_features for op in operations[1:]], [op.out_features for op in operations[:-1]])
    )
    xs, dys = [case.inputs["x"].detach(), *xs], [*dys, case.dy]
    splits = Splits.make(torch.tensor(case.sizes, device=case.device), rows=case.rows, device=case.device)
    return GroupedProducts([_Linear(*parts) for parts in zip(operations, xs, dys, strict=True)], splits)
