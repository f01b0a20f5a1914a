"""The side effects of a pass: flags it sets, hooks it calls, gradients it adds to `.grad`.

In eager runs each is performed at once. While a graph is recorded they are deferred to each replay, so that replays
behave like eager runs. The recording is global to the process, because CUDA backwards run on their own thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor


class Effect(NamedTuple):
    """A deferred call function(*args). undo: reverts the state that the pass prepared for it, if it is never called."""

    function: Callable[..., object]
    args: tuple[Any, ...] = ()
    undo: Callable[[], object] | None = None

    def __call__(self) -> None:
        self.function(*self.args)


class Accumulation(NamedTuple):
    """A write into a gradient buffer: the weight, the buffer's address, and whether the gradient was added to it."""

    name: str
    weight: Tensor
    pointer: int
    accumulate: bool


@dataclass
class SideEffects:
    """The side effects of one recording.

    redirect:     maps a gradient buffer to the memory that is written instead; None: the buffer itself
    rehearses:    whether memory is allocated as in a graph capture, though none is running
    weights:      weights whose gradients bypassed autograd
    placeholders: the tensors that autograd received for some of them
    """

    redirect: Callable[[Tensor], Tensor] | None = None
    rehearses: bool = False
    effects: list[Effect] = field(default_factory=list)
    accumulations: list[Accumulation] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    placeholders: list[Tensor] = field(default_factory=list)

    def destination(self, buffer: Tensor) -> Tensor:
        """The memory into which a gradient meant for `buffer` is written."""
        return buffer if self.redirect is None else self.redirect(buffer)

    def undo(self) -> None:
        """Revert the state that the pass prepared for its effects."""
        for effect in self.effects:
            if effect.undo is not None:
                effect.undo()


_recording: SideEffects | None = None


def recording() -> SideEffects | None:
    """The current recording, or None."""
    return _recording


@contextmanager
def recorded(redirect: Callable[[Tensor], Tensor] | None = None, *, rehearses: bool = False) -> Iterator[SideEffects]:
    """Defer the side effects of the body, and yield them."""
    global _recording
    before, _recording = _recording, SideEffects(redirect, rehearses)
    try:
        yield _recording
    finally:
        _recording = before


@contextmanager
def not_recorded() -> Iterator[None]:
    """Perform the side effects of the body at once, even while recording."""
    global _recording
    before, _recording = _recording, None
    try:
        yield
    finally:
        _recording = before


def perform(effect: Effect, *, at_once: bool = False) -> None:
    """Perform the effect, or defer it while recording. at_once: do both, since the code that follows depends on it."""
    if _recording is not None:
        _recording.effects.append(effect)
    if _recording is None or at_once:
        effect()
