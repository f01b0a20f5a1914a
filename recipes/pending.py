"""Changes of quantizers' states that wait for the end of a step.

A step is, for what forward quantizes, the outermost `autocast` (without one: the pipeline's call), and for gradients
the pipeline's backward. Until then every cast goes by the state that the step began with.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.effects import Effect, perform


class RecordsAmaxes(Protocol):
    """A quantizer whose state goes on at the end of a step, from the amaxes [n] that were recorded in it."""

    @property
    def amax(self) -> Tensor: ...

    @property
    def reduce_amax(self) -> bool: ...

    def end_step(self) -> None: ...


class PendingUpdates:
    """The quantizers that recorded an amax in this step, each once, in the order of their first cast.

    group: the process group over which amaxes are reduced; None is the default group
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self._quantizers: dict[int, RecordsAmaxes] = {}

    def add(self, quantizer: RecordsAmaxes, state: Tensor) -> None:
        """Update this quantizer at the end of the step; `state` tells one state from another."""
        self._quantizers.setdefault(state.data_ptr(), quantizer)

    def join(self, others: Mapping[int, RecordsAmaxes]) -> None:
        """Update these quantizers, which `take` gave, at the end of this step."""
        self._quantizers = {**others, **self._quantizers}

    def apply(self) -> None:
        """Reduce all amaxes over the group, by one maximum, and let every quantizer go on to the next step."""
        quantizers = self.take()
        if quantizers:
            perform(Effect(end_steps, (quantizers, self.group), partial(forget, quantizers)))

    def discard(self) -> None:
        """Forget what this step recorded: it broke off."""
        forget(self.take())

    def take(self) -> dict[int, RecordsAmaxes]:
        """The quantizers, for which this step ends here."""
        quantizers, self._quantizers = self._quantizers, {}
        return quantizers


@torch.no_grad()
def end_steps(quantizers: Mapping[int, RecordsAmaxes], group: dist.ProcessGroup | None) -> None:
    """Reduce all amaxes over the group, by one maximum, and let every quantizer go on to the next step."""
    if dist.is_available() and dist.is_initialized():
        reduced = [quantizer.amax for quantizer in quantizers.values() if quantizer.reduce_amax]
        if reduced:
            together = torch.cat(reduced)
            dist.all_reduce(together, op=dist.ReduceOp.MAX, group=group)
            for amax, part in zip(reduced, together.split([len(a) for a in reduced]), strict=True):
                amax.copy_(part)
    for quantizer in quantizers.values():
        quantizer.end_step()


@torch.no_grad()
def forget(quantizers: Mapping[int, RecordsAmaxes]) -> None:
    """Forget the amaxes that were recorded."""
    for quantizer in quantizers.values():
        quantizer.amax.zero_()
