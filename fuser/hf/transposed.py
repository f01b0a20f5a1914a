"""TransposedGroupedLinear: a GroupedLinear whose weights are stored as [groups, in_features, out_features]."""
# T rows, G groups, K in features, N out features

from __future__ import annotations

from torch import Tensor

from ops.grouped_linear import GroupedLinear
from ops.runner.context import OperationContext
from recipes.request import PlanRequest


class TransposedGroupedLinear(GroupedLinear):
    """y_g = x_g W_g + b_g, with `weight` [G, K, N], as gpt-oss stores it; else as a stacked `GroupedLinear`.

    The products read W^T as a view. A kernel that needs its rows contiguous copies it for the time of the product, as
    does a recipe that quantizes it; the gradient is a view too, which autograd copies when it first becomes `.grad`.
    There is no lasting copy, and the parameter and its gradient keep their layout.
    """

    accepts_gathered = True

    def read(self, ctx: OperationContext, names: tuple[str, ...]) -> Tensor | list[Tensor]:
        """The weights as [G, N, K], biases [G, N] as they are."""
        stored = ctx.param(names[0])
        return stored.mT if names == self.weight_names else stored

    def kernel(self, request: PlanRequest) -> str:
        way = super().kernel(request)
        return way if request.device.type == "cpu" else f"{way}, of a transposed copy of W"

    def weight_gradients(self, dw: Tensor) -> dict[str, Tensor]:
        """dw [G, N, K] as the weights are stored, [G, K, N]."""
        return {"weight": dw.mT}
