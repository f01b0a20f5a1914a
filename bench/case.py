"""A layer with its data, and its steps: forward only, or forward + backward."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fuser import Sequential

DTYPE = torch.bfloat16
PASSES = ("forward", "forward + backward")

Call = Callable[[], Tensor]
TimedPass = Callable[[], list[Tensor]]


@dataclass(frozen=True)
class Case:
    """A layer with its inputs, used for all measurements.

    inputs: by name, rows first; "x" is the first, the others are extra inputs
    dy:     gradient of the output
    flop:   FLOP of forward; backward takes twice as many
    """

    layer: Sequential
    inputs: dict[str, Tensor]
    dy: Tensor
    flop: int

    @property
    def weights(self) -> tuple[Tensor, ...]:
        return tuple(self.layer.parameters())

    @property
    def device(self) -> torch.device:
        return self.dy.device

    @property
    def names(self) -> list[str]:
        """The names of the results of forward + backward, in order."""
        return ["y", *(f"d{name}" for name in self.inputs), *(f"dw{n}" for n in range(1, len(self.weights) + 1))]

    def step(self, call: Call, passes: str) -> TimedPass:
        """A step for one of `PASSES` that returns y and, with "backward", the gradients of all inputs and weights."""
        return make_step(call, (*self.inputs.values(), *self.weights), self.dy, passes)

    def flop_of(self, passes: str) -> int:
        return self.flop * (1 if passes == "forward" else 3)


def make_step(call: Call, wanted: Sequence[Tensor], dy: Tensor, passes: str) -> TimedPass:
    """A step for one of `PASSES` that returns y and, with "backward", the gradients of `wanted`."""

    def forward() -> list[Tensor]:
        with torch.no_grad():
            return [call()]

    def forward_and_backward() -> list[Tensor]:
        y = call()
        return [y.detach(), *torch.autograd.grad(y, wanted, dy)]

    return forward if passes == PASSES[0] else forward_and_backward
