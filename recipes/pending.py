"""Changes of quantizers' states that wait for the end of a step.

A step is, for what forward quantizes, the outermost `autocast` (without one: the pipeline's call), and for gradients
the pipeline's backward. Until then every cast goes by the state that the step began with.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


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

    @torch.no_grad()
    def apply(self) -> None:
        """Reduce all amaxes over the group, by one maximum, and let every quantizer go on to the next step."""
        quantizers = self._take()
        if dist.is_available() and dist.is_initialized():
            reduced = [quantizer.amax for quantizer in quantizers if quantizer.reduce_amax]
            if reduced:
                together = torch.cat(reduced)
                dist.all_reduce(together, op=dist.ReduceOp.MAX, group=self.group)
                for amax, part in zip(reduced, together.split([len(a) for a in reduced]), strict=True):
                    amax.copy_(part)
        for quantizer in quantizers:
            quantizer.end_step()

    @torch.no_grad()
    def discard(self) -> None:
        """Forget what this step recorded: it broke off."""
        for quantizer in self._take():
            quantizer.amax.zero_()

    def _take(self) -> list[RecordsAmaxes]:
        quantizers = list(self._quantizers.values())
        self._quantizers = {}
        return quantizers
