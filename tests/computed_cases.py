"""Models, and how their parameters are computed from others, in operations and in modules of torch, in float64."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, prune
from torch.nn.utils import spectral_norm as old_spectral_norm

from fuser import Sequential, ops

F64 = torch.float64
SIZES = [3, 0, 5, 2]
G, K, N = len(SIZES), 16, 8


class Bias(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(size, dtype=F64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.bias


class Grouped(nn.Module):
    """GroupedLinear by a loop over the groups."""

    def __init__(self, k: int, n: int, *, bias: bool, stacked: bool = True) -> None:
        super().__init__()
        self.stacked, self.has_bias = stacked, bias
        shapes = {"weight": (n, k), "bias": (n,)} if bias else {"weight": (n, k)}
        for name, shape in shapes.items():
            for suffix in [""] if stacked else range(G):
                empty = torch.zeros(G, *shape, dtype=F64) if stacked else torch.zeros(shape, dtype=F64)
                self.register_parameter(f"{name}{suffix}", nn.Parameter(empty))

    def all(self, name: str) -> Any:
        return getattr(self, name) if self.stacked else [getattr(self, f"{name}{group}") for group in range(G)]

    def forward(self, x: Tensor) -> Tensor:
        rows = [x_g @ w.t() for x_g, w in zip(x.split(SIZES), self.all("weight"), strict=True)]
        if self.has_bias:
            rows = [row + b for row, b in zip(rows, self.all("bias"), strict=True)]
        return torch.cat(rows)


class SwiGLU(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        gate, linear = x.chunk(2, -1)
        return nn.functional.silu(gate) * linear


Pair = tuple[Sequential, nn.Sequential, dict[str, Any]]


def dense(fusions: Any = None) -> Pair:
    ours = Sequential(
        ops.LayerNorm(K, dtype=F64), ops.Linear(K, N, dtype=F64), ops.GELU(), ops.Bias(N, dtype=F64),
        ops.Linear(N, K, bias=False, dtype=F64), ops.RMSNorm(K, dtype=F64), fusions=fusions,
    )  # fmt: skip
    theirs = nn.Sequential(
        nn.LayerNorm(K, dtype=F64), nn.Linear(K, N, dtype=F64), nn.GELU("tanh"), Bias(N),
        nn.Linear(N, K, bias=False, dtype=F64), nn.RMSNorm(K, 1e-5, dtype=F64),
    )  # fmt: skip
    return ours, theirs, {}


def grouped(fusions: Any = None, *, stacked: bool = True) -> Pair:
    make = partial(ops.GroupedLinear, G, stacked=stacked, dtype=F64)
    ours = Sequential(make(K, 2 * N), ops.ScaledSwiGLU(), make(N, K, bias=False), fusions=fusions)
    theirs = nn.Sequential(
        Grouped(K, 2 * N, bias=True, stacked=stacked), SwiGLU(), Grouped(N, K, bias=False, stacked=stacked)
    )
    return ours, theirs, {"split_sizes": SIZES, "scales": torch.ones(sum(SIZES), dtype=F64)}


MODELS: dict[str, Callable[[], Pair]] = {
    "dense": dense,
    "dense-unfused": lambda: dense(()),
    "grouped": grouped,
    "grouped-unfused": lambda: grouped(()),
    "single-weights": lambda: grouped(stacked=False),
}


def paired(model: str) -> Pair:
    torch.manual_seed(0)
    ours, theirs, extras = MODELS[model]()
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.copy_(torch.randn_like(parameter) / 3)
    theirs.load_state_dict(ours.state_dict())
    return ours, theirs, extras


def each_name(module: nn.Module) -> list[tuple[nn.Module, str]]:
    return [(child, name) for child in module for name, p in list(child._parameters.items()) if p is not None]  # type: ignore[attr-defined]


class Moved(nn.Module):
    """weight + delta."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.delta = nn.Parameter(torch.linspace(-1, 1, weight.numel()).to(weight).view(weight.shape))

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.delta


class Transposed(nn.Module):
    """A transposed view of what is stored."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight.mT

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight.mT.contiguous()


class Other(nn.Module):
    """The transposed weight of another module, and none of its own."""

    def __init__(self, tied: nn.Module) -> None:
        super().__init__()
        self.tied = [tied]

    def forward(self, weight: Tensor) -> Tensor:
        return self.tied[0].weight.mT


def moved(module: nn.Module) -> None:
    for child, name in each_name(module):
        parametrize.register_parametrization(child, name, Moved(getattr(child, name)))


def of_matrices(apply: Callable[[nn.Module, str], Any]) -> Callable[[nn.Module], None]:
    def everywhere(module: nn.Module) -> None:
        for child, name in each_name(module):
            if getattr(child, name).dim() > 1:
                torch.manual_seed(1)
                apply(child, name)

    return everywhere


def transposed(child: nn.Module, name: str) -> None:
    if name.startswith("weight"):
        parametrize.register_parametrization(child, name, Transposed())


PARAMETRIZATIONS: dict[str, Callable[[nn.Module], None]] = {
    "every-parameter-moved": moved,
    "weight-norm": of_matrices(parametrizations.weight_norm),
    "spectral-norm": of_matrices(parametrizations.spectral_norm),
    "transposed": of_matrices(transposed),
    "pruned": of_matrices(partial(prune.random_unstructured, amount=0.4)),
    "old-spectral-norm": of_matrices(old_spectral_norm),
}


def example() -> Tensor:
    torch.manual_seed(2)
    return torch.randn(sum(SIZES), K, dtype=F64)


def gradients(module: nn.Module, x: Tensor, **extras: Any) -> dict[str, Tensor | None]:
    """y, and the gradients of x and of every parameter."""
    module.zero_grad()
    x = x.detach().clone().requires_grad_()
    y = module(x, **extras)
    (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view_as(y)).sum().backward()
    return {"y": y.detach(), "x": x.grad} | {name: p.grad for name, p in module.named_parameters()}


def assert_close(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    for name, expected in theirs.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-10, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
