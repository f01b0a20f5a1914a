"""Operations of a user's that say `repeatable`: what they do on the host is seen, or they run in full each time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fuser import BasicOperation, Sequential
from tests.test_repeat import check_steps, repeating  # noqa: F401  # a fixture is used by its name


class Scaled(BasicOperation):
    """y = x gain factor."""

    repeatable = True
    factor: float = 3.0

    class Saved(NamedTuple):
        x: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(64))
        self.factor = 2.0

    def now(self) -> float:
        return self.factor

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Any) -> Any:
        if ctx.needs_grad:
            ctx.saved = self.Saved(x)
        return x * self.gain * self.now(), {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Any) -> Any:
        dy = dy * self.now()
        return dy * self.gain, {"gain": (dy * ctx.saved.x).sum(0)}, {}


class ByProperty(Scaled):
    repeatable = True

    @property
    def factor(self) -> float:  # type: ignore[override]
        return self._factor

    @factor.setter
    def factor(self, value: float) -> None:
        self._factor = float(value)


class Factor(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.value = value

    def forward(self) -> float:
        return self.value * (2.0 if self.training else 1.0)


class ByChild(Scaled):
    repeatable = True

    def __init__(self) -> None:
        super().__init__()
        self.child = Factor(2.0)

    def now(self) -> float:
        return self.child()


class OnContext(Scaled):
    repeatable = True

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Any) -> Any:
        ctx.x = {"of": (lambda: x,)}
        return x * self.gain, {}

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Any) -> Any:
        return dy * self.gain, {"gain": (dy * ctx.x["of"][0]()).sum(0)}, {}


class Centred(Scaled):
    """Less a mean that moves, which is assigned."""

    repeatable = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64))

    def fuser_forward(self, ctx: Any, x: Tensor, extras: Any) -> Any:
        self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
        return super().fuser_forward(ctx, x - self.mean, extras)


class Counted(Scaled):
    repeatable = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def fuser_backward(self, ctx: Any, dy: Tensor, d_extra_outputs: Any) -> Any:
        self.seen = self.seen + 1
        return super().fuser_backward(ctx, dy, d_extra_outputs)


def assign(operation: Any) -> None:
    operation.factor = 5.0


def delete(operation: Any) -> None:
    del operation.factor


def exchange(operation: Any) -> None:
    operation.child = Factor(5.0)


def change_child(operation: Any) -> None:
    operation.child.value = 5.0


def hook_child(operation: Any) -> None:
    operation.child.register_forward_hook(lambda module, args, y: y * 2)


CASES: dict[str, tuple[type, Callable[[Any], Any], int]] = {
    "assigned": (Scaled, assign, 1),
    "deleted": (Scaled, delete, 1),
    "assigned to a property": (ByProperty, assign, 1),
    "module exchanged": (ByChild, exchange, 0),
    "module changed": (ByChild, change_child, 0),
    "module in evaluation": (ByChild, lambda operation: operation.child.eval(), 0),
    "module hooked": (ByChild, hook_child, 0),
    "tensor on the context": (OnContext, lambda operation: None, 0),
    "buffer assigned in forward": (Centred, lambda operation: None, 0),
    "buffer assigned in backward": (Counted, lambda operation: None, 0),
}


@pytest.mark.parametrize("case", CASES)
def test_host_effects(case, repeating, monkeypatch):  # noqa: F811
    kind, change, at_least = CASES[case]

    def make() -> Sequential:
        torch.manual_seed(1)
        return Sequential(kind())

    def change_once(model: Sequential, at: int) -> None:
        if at == 3:
            change(model[0])

    check_steps(make, None, monkeypatch, steps=8, change=change_once, at_least=at_least)
