"""Models with weights, as the tests of main_grad and of delayed wgrad run them, and what a trainer puts on weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fuser import Sequential, ops

SIZES = [5, 0, 8, 3]  # an empty group, and rows past the sum
ROWS = 20
IN, OUT = 32, 64


def _experts(stacked: bool, **switches: bool) -> Sequential:
    settings: dict[str, Any] = {"stacked": stacked, **switches}
    return Sequential(
        ops.GroupedLinear(len(SIZES), IN, 2 * OUT, **settings),
        ops.SwiGLU(),
        ops.GroupedLinear(len(SIZES), OUT, IN, **settings),
    )


MODELS: dict[str, Callable[..., Sequential]] = {
    "linear": lambda **switches: Sequential(ops.Linear(IN, OUT, **switches)),
    "linear and scale": lambda **switches: Sequential(ops.Linear(IN, OUT, **switches), ops.ConstantScale(2.0)),
    "branch and linear": lambda **switches: Sequential(ops.MakeExtraOutput("x"), ops.Linear(IN, OUT, **switches)),
    "linear and relu": lambda **switches: Sequential(ops.Linear(IN, OUT, **switches), ops.Bias(OUT), ops.ReLU()),
    "grouped": lambda **switches: Sequential(ops.GroupedLinear(len(SIZES), IN, OUT, **switches)),
    "grouped, per group": lambda **switches: Sequential(
        ops.GroupedLinear(len(SIZES), IN, OUT, stacked=False, **switches)
    ),
    "experts": lambda **switches: _experts(True, **switches),
    "experts, per group": lambda **switches: _experts(False, **switches),
}
FEW_MODELS = ["linear", "grouped", "experts, per group"]


def make(model: str, *, device: str = "cpu", dtype: torch.dtype = torch.float32, **switches: Any) -> Sequential:
    """The same weights in every call."""
    torch.manual_seed(0)
    path = switches.pop("path", None)
    sequential = MODELS[model](**switches)
    sequential.path = path
    for parameter in sequential.parameters():
        nn.init.uniform_(parameter, -0.5, 0.5)
    return sequential.to(device, dtype)


def weights_of(sequential: nn.Module) -> dict[str, Any]:
    return {name: parameter for name, parameter in sequential.named_parameters() if ".weight" in name}


def biases_of(sequential: nn.Module) -> dict[str, Any]:
    return {name: parameter for name, parameter in sequential.named_parameters() if ".bias" in name}


def backward(sequential: Sequential, seed: int = 1, between: Callable[[], None] | None = None) -> Tensor:
    """One forward, `between()`, and backward on rows that depend on the seed. Returns the gradient of x."""
    first = next(sequential.parameters())
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(ROWS, IN, generator=generator).to(first.device, first.dtype).requires_grad_()
    asks = sequential.layout().consumed
    y = sequential(x, **({"split_sizes": torch.tensor(SIZES, device=first.device)} if asks else {}))
    dy = torch.randn(y.shape, generator=generator).to(y)
    if between is not None:
        between()
    y.backward(dy)
    assert x.grad is not None
    return x.grad


def gradients(sequential: Sequential, *seeds: int) -> dict[str, Tensor]:
    """What plain autograd accumulates over these backwards, by the weights' names, in the weights' dtype."""
    for seed in seeds:
        backward(sequential, seed)
    return {name: weight.grad for name, weight in weights_of(sequential).items()}


def give_main_grads(
    sequential: nn.Module,
    value: float,
    *,
    flag: bool = True,
    overwrite: bool = False,
    zero_out: bool = False,
    dtype: torch.dtype | None = torch.float32,
) -> None:
    """Put on each weight what its owner puts there; the buffers are filled with `value`."""
    for weight in weights_of(sequential).values():
        weight.main_grad = torch.full(weight.shape, value, dtype=dtype or weight.dtype, device=weight.device)
        if flag:
            weight.grad_added_to_main_grad = False
        if overwrite:
            weight.overwrite_main_grad = True
        if zero_out:
            weight.zero_out_wgrad = True
