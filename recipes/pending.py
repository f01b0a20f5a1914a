"""Changes of quantizers' states that wait for the end of a step.

A step is, for what forward quantizes, the outermost `autocast` (without one: the pipeline's call), and for gradients
the pipeline's backward. Until then every cast goes by the state that the step began with.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from recipes.amax_reduction import Amaxes, may_reduce, reduce_amaxes
from recipes.casts.amax_history import EndOfStep
from recipes.casts.amax_history import end_steps as end_steps_of
from recipes.effects import Effect, perform


class RecordsAmaxes(Protocol):
    """A quantizer whose state goes on at the end of a step, from the amaxes [n] that were recorded in it."""

    @property
    def amax(self) -> Tensor: ...

    @property
    def reduce_amax(self) -> bool: ...

    @property
    def amax_reduction_group(self) -> dist.ProcessGroup | None: ...

    @property
    def role(self) -> str: ...

    def end_of_step(self) -> EndOfStep: ...


class PendingUpdates:
    """The quantizers that recorded an amax in this step, each once, in the order of their first cast.

    group: the process group over which amaxes are reduced whose recipe names none; None is the default group
    at_once: whether they may go on within what is repeated: it is all that records here, and nothing is reduced
    has_evaluated: whether something ran that would have recorded, had gradients been on
    broke_off: whether what it recorded was forgotten
    """

    def __init__(self, group: dist.ProcessGroup | None = None, *, at_once: bool = False) -> None:
        self.group = group
        self.at_once = at_once
        self.has_evaluated = False
        self.broke_off = False
        self._quantizers: dict[torch.UntypedStorage, RecordsAmaxes] = {}  # by their states, whose addresses it keeps
        self._before: set[torch.UntypedStorage] = set()  # the states in which an amax was recorded before the step

    def add(self, quantizer: RecordsAmaxes, state: Tensor, *, before: bool = False) -> None:
        """Update this quantizer at the end of the step; `state` identifies its state.

        before: its amax was recorded before the step, by a write into a weight that is held quantized
        """
        memory = state.untyped_storage()
        if before and memory not in self._quantizers:
            self._before.add(memory)
        self._quantizers.setdefault(memory, quantizer)

    def join(self, others: Mapping[torch.UntypedStorage, RecordsAmaxes]) -> None:
        """Update these quantizers, which `take` gave, at the end of this step."""
        self._quantizers = {**others, **self._quantizers}

    def apply(self, recorded: set[torch.UntypedStorage] | None = None) -> None:
        """Reduce all amaxes over the group, by one maximum, and let every quantizer go on to the next step.

        recorded: states of quantizers that recorded before, of which this step is part: what they recorded again is
        forgotten. Those of the others are added.
        """
        if not self._quantizers:
            return
        quantizers = self.take()
        if recorded:
            forget({state: quantizer for state, quantizer in quantizers.items() if state in recorded})
            quantizers = {state: quantizer for state, quantizer in quantizers.items() if state not in recorded}
        if recorded is not None:
            recorded.update(quantizers)
        if quantizers:
            perform(Effect(end_steps, (quantizers, self.group), partial(forget, quantizers)))

    def apply_at_once(self) -> bool:
        """Let every quantizer go on now, if that is `at_once` and none calls a function of the user's, which a
        repetition would not call again. Returns whether they did; otherwise they wait for `apply`."""
        if not self.at_once:
            return False
        ends = [quantizer.end_of_step() for quantizer in self._quantizers.values()]
        if any(end.calls_function for end in ends):
            return False
        self.take()
        end_steps_of(ends)
        return True

    def discard(self, abandoned: object = None) -> None:
        """Forget what this step recorded: it broke off. What was recorded before enters with the next one.

        abandoned: as of `ActiveRecipe`
        """
        self.broke_off = True
        before = self._before
        forget({state: quantizer for state, quantizer in self.take().items() if state not in before})

    def take(self) -> dict[torch.UntypedStorage, RecordsAmaxes]:
        """The quantizers, for which this step ends here."""
        quantizers, self._quantizers, self._before = self._quantizers, {}, set()
        return quantizers


def end_steps(
    quantizers: Mapping[torch.UntypedStorage, RecordsAmaxes],
    group: dist.ProcessGroup | None,
    awaited: Iterable[dist.ProcessGroup | None] = (),
) -> None:
    """Reduce the amaxes over their groups (`reduce_amaxes`), and let every quantizer go on to the next step.

    If that is refused, or a function of the user's raises an error, what was recorded and did not go on is forgotten.
    States need no gradients, so that it may run with gradients on.
    """
    try:
        if may_reduce():
            brought = (Amaxes(q.role, q.amax, q.amax_reduction_group) for q in quantizers.values() if q.reduce_amax)
            reduce_amaxes(brought, group, awaited)
        end_steps_of(tuple([quantizer.end_of_step() for quantizer in quantizers.values()]))
    except BaseException:
        forget(quantizers)
        raise


@torch.no_grad()
def forget(quantizers: Mapping[torch.UntypedStorage, RecordsAmaxes]) -> None:
    """Forget the amaxes that were recorded."""
    for quantizer in quantizers.values():
        quantizer.amax.zero_()
