"""Overlapped: microbatches of a layer with experts on other ranks, one's transfer behind another's products."""
# T rows of x, n microbatches

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuser.branch import Branch
from fuser.layout import Layout, Stage
from fuser.plan import Fusion, fusions_version
from fuser.sequential import Sequential
from ops.combine import Combine
from ops.dispatch import Dispatch
from ops.kernels.routing.all_to_all import announce_refusal
from ops.runner.callers_extras import at_border, refuse_unnamed
from ops.runner.not_traced import not_traced
from ops.runner.run import Pipeline
from ops.transfer_halves import CombineFinish, CombineStart, DispatchFinish, DispatchStart
from recipes.arguments import positive_integers

_STARTS = (DispatchStart, CombineStart)


class Overlapped(Sequential):
    """A Sequential that runs its rows as n microbatches in turn, and computes one while another is transferred.

        y = cat([Sequential(*modules)(part) for part in x.split(sizes)])    n sizes that differ by at most 1

    Where a `Dispatch(group=...)` or `Combine(group=...)` has started its transfer, the next microbatch runs up to
    there, and only then is the transfer awaited. Two microbatches A and B of one layer of experts:

        forward     A: Router, start | B: Router, start | A: await, experts, start | B: the same | A: await | B: await
        backward    the reverse: B starts, A starts, B awaits, computes the experts' gradients and starts, ...

    Autograd runs backward in that order by itself, since it takes the latest node of those that are ready. The order
    of the collectives follows from the modules and n alone, so it is the same on all ranks, whatever their rows. A
    `Branch` directly before a Dispatch, a shared expert, runs while the tokens are sent, also with microbatches=1.

    What stands before a Dispatch, x and the router, needs gradients on all ranks or on none.

    All bits are those of the formula with one backward: y, dx, and the gradients of parameters, to which the
    microbatches are added in the same order, the last one first. Tokens are sent as values, whatever `send_codes`, so
    that those of "always" are the bits of "never". Random numbers (dropout, stochastic rounding) are drawn in the order
    above.

    modules, fusions, path, exports: as for `Sequential`, also the keys of the state dict
    microbatches: n. Every rank needs the same. A rank may have fewer rows, or none.

    Called as a Sequential: extra inputs are tensors with a row for each row of x, and divided as x is. Extra outputs
    are tuples, one for each microbatch.

    Raises TypeError or ValueError for microbatches that are no positive integer, ValueError where no Dispatch or
    Combine has a group, or one has transport="symmetric", for an extra input that is missing, unknown or no tensor of
    x's rows, and for buffers, which belong to one microbatch. Ranks that a rank with such inputs would keep waiting
    raise RuntimeError. torch.compile runs it eagerly.
    """

    microbatches = 1
    _expanded: tuple[Layout, Sequential] | None = None

    def __init__(
        self,
        *modules: nn.Module | Mapping[str, nn.Module],
        microbatches: int = 2,
        fusions: Sequence[Fusion] | None = None,
        path: str | None = None,
        exports: Sequence[str] = (),
    ) -> None:
        super().__init__(*modules, fusions=fusions, path=path, exports=exports)
        (self.microbatches,) = positive_integers("Overlapped", microbatches=microbatches)
        if not any(map(_is_over_ranks, self)):
            raise ValueError(
                "No Dispatch or Combine here has a group, so nothing is transferred. Give one, or take a Sequential."
            )

    @not_traced("it divides its rows into microbatches, whose order is that of autograd's nodes.")
    def forward(
        self,
        x: Tensor,
        *unnamed: Any,
        outputs: Sequence[str] = (),
        buffers: Mapping[int, Mapping[str, Tensor]] | None = None,
        **extras: Any,
    ) -> Any:
        layout = self.layout()
        if unnamed:
            refuse_unnamed(unnamed, layout.consumed)
        try:
            _check(layout, x, outputs, buffers, extras)
        except ValueError as error:
            groups = [m.group for m in self.modules() if isinstance(m, Dispatch) and m.group is not None]
            for group in groups[:1]:  # where the others meet first
                announce_refusal(group, x.device, error)
            raise
        rows, more = divmod(x.shape[0], self.microbatches)
        sizes = [rows + (index < more) for index in range(self.microbatches)]
        parts = {name: value.split(sizes) for name, value in extras.items()}
        states = [
            _Microbatch(part, {name: of_parts[index] for name, of_parts in parts.items()})
            for index, part in enumerate(x.split(sizes))
        ]
        version = fusions_version()
        for turn in _turns(layout, outputs):
            for state in states:
                state.run(self, turn, version)
        y = torch.cat([state.x for state in states])
        made = {name: tuple(at_border(state.extras[name]) for state in states) for name in outputs}
        return (y, made) if outputs else y

    def layout(self) -> Layout:
        """That of the modules with each Dispatch and Combine in its two halves."""
        own = super().layout()
        if self._expanded is None or self._expanded[0] is not own:
            halves = Sequential(fusions=self.planner.fusions, path=self.path)
            halves.planner, halves.first_forwards = self.planner, self.first_forwards
            halves.extend([_in_halves(module) for module in self])
            halves.exports = self.exports
            # In a tuple, so that it is no submodule.
            self._expanded = own, halves
        return self._expanded[1].layout()

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_expanded": None}

    def extra_repr(self) -> str:
        return f"microbatches={self.microbatches}"


class _Microbatch:
    """x as far as it has come, and the extra tensors so far."""

    def __init__(self, x: Tensor, extras: dict[str, Any]) -> None:
        self.x, self.extras = x, extras

    def run(self, owner: Sequential, turn: Sequence[tuple[Stage, Sequence[str]]], version: int) -> None:
        beside: list[tuple[Stage, Sequence[str]]] = []
        for index, (stage, wanted) in enumerate(turn):
            if isinstance(stage.runner, Branch) and index == len(turn) - 2 and _starts(turn[-1][0]):
                beside.append((stage, wanted))
                continue
            before = self.x
            self.x = owner.run_stage(stage, before, self.extras, wanted, {}, version)
        for stage, wanted in beside:
            owner.run_stage(stage, before, self.extras, wanted, {}, version)


def _check(layout: Layout, x: Tensor, outputs: Sequence[str], buffers: Any, extras: Mapping[str, Any]) -> None:
    if buffers:
        raise ValueError("buffers belong to one microbatch. Leave them out, or give a Sequential.")
    layout.check_extras(extras, outputs)
    for name, value in extras.items():
        if not isinstance(value, Tensor) or value.shape[:1] != x.shape[:1]:
            raise ValueError(
                f"{name} is divided among the microbatches as x is, so it must be a tensor of {x.shape[0]} rows, "
                f"but is {list(value.shape) if isinstance(value, Tensor) else type(value).__name__}."
            )


def _turns(layout: Layout, outputs: Sequence[str]) -> list[list[tuple[Stage, Sequence[str]]]]:
    """What a microbatch runs before the next one does, with the extra outputs wanted of each stage."""
    turns: list[list[tuple[Stage, Sequence[str]]]] = [[]]
    for stage, passed_on in zip(layout.stages, layout.passed_on, strict=True):
        wanted = tuple(dict.fromkeys((*passed_on, *(name for name in outputs if name in stage.makes))))
        turns[-1].append((stage, wanted))
        if _starts(stage):
            turns.append([])
    return turns


def _starts(stage: Stage) -> bool:
    """Whether the stage ends by starting a transfer."""
    return isinstance(stage.runner, Pipeline) and isinstance(stage.runner.operations[-1], _STARTS)


def _in_halves(module: nn.Module) -> nn.Module:
    """The module itself, or the two halves of a Dispatch or Combine over ranks."""
    if not _is_over_ranks(module):
        if not isinstance(module, Overlapped) and any(map(_is_over_ranks, module.modules())):
            raise ValueError(
                f"A {type(module).__name__} holds a Dispatch or Combine with a group, and would await its transfers. "
                "Give Overlapped the operations themselves, or make that one an Overlapped."
            )
        return module
    if module.transport == "symmetric":
        raise ValueError(
            f"{type(module).__name__} has transport='symmetric', which is not divided into a start and an end. Take "
            "transport='alltoall', or a Sequential."
        )
    if module._forward_hooks or module._forward_pre_hooks:
        raise ValueError(f"{type(module).__name__} has hooks, which its two halves would not call. Remove them.")
    if isinstance(module, Combine):
        return Sequential(CombineStart(module), CombineFinish(module))
    assert isinstance(module, Dispatch)
    start = DispatchStart(module)
    return Sequential(start, DispatchFinish(module), exports=[start.extra_name(name) for name in start.extra_outputs])


def _is_over_ranks(module: nn.Module) -> bool:
    return isinstance(module, Dispatch | Combine) and module.group is not None
