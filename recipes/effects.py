"""The side effects of a pass: flags it sets, hooks it calls, gradients it adds to `.grad`.

Eagerly each is done where it stands. While a graph is recorded they are kept instead, and done at each replay, so eager
runs and replays are the same. The recording is one for the process: CUDA backwards run on a thread of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class Effect(NamedTuple):
    """function(*args), to be done. undo: takes back what the pass has left for it, where it will not be done."""

    function: Callable[..., Any]
    args: tuple[Any, ...] = ()
    undo: Callable[[], Any] | None = None

    def __call__(self) -> None:
        self.function(*self.args)


class Accumulation(NamedTuple):
    """A write into a gradient buffer: of which weight, where the buffer began, and whether it was added to."""

    name: str
    weight: Tensor
    pointer: int
    accumulate: bool


@dataclass
class SideEffects:
    """What was kept.

    redirect:     gives the memory that is written in place of a gradient buffer; None: the buffer itself
    rehearses:    whether memory is to be taken as while a graph is captured, though none is
    weights:      whose gradients went elsewhere than to autograd
    placeholders: what autograd got for some of them
    """

    redirect: Callable[[Tensor], Tensor] | None = None
    rehearses: bool = False
    effects: list[Effect] = field(default_factory=list)
    accumulations: list[Accumulation] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    placeholders: list[Tensor] = field(default_factory=list)

    def destination(self, buffer: Tensor) -> Tensor:
        """Where a gradient that belongs into `buffer` is written."""
        return buffer if self.redirect is None else self.redirect(buffer)

    def undo(self) -> None:
        """Take back what the pass left for its effects."""
        for effect in self.effects:
            if effect.undo is not None:
                effect.undo()


_recording: SideEffects | None = None


def recording() -> SideEffects | None:
    """What is being recorded now, or None."""
    return _recording


@contextmanager
def recorded(redirect: Callable[[Tensor], Tensor] | None = None, *, rehearses: bool = False) -> Iterator[SideEffects]:
    """Keep the effects of what runs inside."""
    global _recording
    before, _recording = _recording, SideEffects(redirect, rehearses)
    try:
        yield _recording
    finally:
        _recording = before


@contextmanager
def not_recorded() -> Iterator[None]:
    """Do the effects of what runs inside where they stand, also while recording."""
    global _recording
    before, _recording = _recording, None
    try:
        yield
    finally:
        _recording = before


def perform(effect: Effect, *, at_once: bool = False) -> None:
    """Do it, or keep it while recording. at_once: do it then too, since what runs next looks at it."""
    if _recording is not None:
        _recording.effects.append(effect)
    if _recording is None or at_once:
        effect()
