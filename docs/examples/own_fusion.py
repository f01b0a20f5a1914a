"""A fusion of your own: Linear -> ReLU with one product and no pre-activation in memory, checked, registered, trained.

python docs/examples/own_fusion.py
"""
# T tokens, K in features, N out features

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuser import FusedOperation, Sequential, ops, recipes, register_fusion
from fuser.testing import check_fusion


class LinearReLU(FusedOperation):
    """y = max(x W^T + b, 0), forward and backward. It keeps x and y; dh = dy where y > 0, else 0."""

    pattern = (ops.Linear, ops.ReLU)

    class Saved(NamedTuple):
        x: Tensor
        y: Tensor

    @classmethod
    def why_not(cls, operations: Sequence[Any], request: Any) -> str | None:
        if request.recipe.quantizer(recipes.Role.INPUT) is not None:
            return f"recipe {request.recipe.name} quantizes, and this fusion multiplies numbers as they are."
        return None

    def fuser_forward(self, ctxs: Sequence[Any], x: Tensor, extras: Mapping[str, Any]) -> tuple[Tensor, dict[str, Any]]:
        linear = ctxs[0]
        bias = None if linear.operation.bias is None else linear.param("bias")
        y = nn.functional.linear(x, linear.param("weight"), bias).relu_()
        if any(ctx.needs_grad for ctx in ctxs):
            linear.saved = self.Saved(x, y)
        return y, {}

    def fuser_backward(self, ctxs: Sequence[Any], dy: Tensor, d_extra_outputs: Mapping[str, Tensor]) -> Any:
        linear = ctxs[0]
        x, y = linear.saved
        dh = dy.masked_fill(y <= 0, 0)
        rows = dh.reshape(-1, dh.shape[-1])
        gradients = {}
        if "weight" in linear.needs.params:
            gradients["weight"] = rows.T @ x.reshape(-1, x.shape[-1])
        if "bias" in linear.needs.params:
            gradients["bias"] = rows.sum(0, dtype=torch.promote_types(rows.dtype, torch.float32))
        dx = dh @ linear.param("weight") if linear.needs.input else None
        return dx, (gradients, {}), {}


def main() -> None:
    torch.manual_seed(0)
    # Fused against unfused: y and every gradient, with each parameter frozen in turn.
    checked = check_fusion(LinearReLU, lambda: [ops.Linear(16, 32), ops.ReLU()], (8, 16))
    print(f"checked: {', '.join(difference.name for difference in checked)}")

    model = Sequential(ops.Linear(16, 64), ops.ReLU(), ops.Linear(64, 16))
    x = torch.randn(256, 16)
    target = x.roll(1, dims=1).abs()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    with register_fusion(LinearReLU):
        print(model.explain())
        for step in range(101):
            loss = (model(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 50 == 0:
                print(f"step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main()
