"""Recent: which of several things were used last, so that a bounded number of them holds what it can make again."""

from __future__ import annotations

import weakref
from typing import Protocol


class Releasable(Protocol):
    """Something that gives up what it holds, and makes it again when it is used again."""

    def release(self) -> None: ...


class Recent:
    """The last `most` things that were used; what falls out of them is released. It keeps none of them alive."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._used: dict[int, weakref.ref[Releasable]] = {}  # by their ids, the last one at the end

    def use(self, thing: Releasable) -> None:
        """Note that it is about to be used."""
        self._used.pop(id(thing), None)
        self._used[id(thing)] = weakref.ref(thing)
        while len(self._used) > self.most:
            oldest = self._used.pop(next(iter(self._used)))()
            if oldest is not None:
                oldest.release()
