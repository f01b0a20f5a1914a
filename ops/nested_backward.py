"""Which backward runs, where one runs within another.

Reentrant checkpointing computes a segment again within a backward, and then runs a backward of its own through it. To
who counts the gradients of one backward all of these are the outermost one. Autograd numbers every backward and does
not say what runs within what; but what is computed again is computed within the outer one, and noted there.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch


class _Mark:
    """What autograd keeps as long as a backward runs, and calls at its end, unless that is an exception."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __call__(self) -> None:
        _running.pop(self.number, None)


# Of every backward within which something was computed forward: a mark, by autograd's number.
_running: WeakValueDictionary[int, _Mark] = WeakValueDictionary()


def note_forward() -> bool:
    """Something is computed forward: if that is within a backward, know of it until its end. Returns whether it is."""
    number = torch._C._current_graph_task_id()
    if number < 0:
        return False
    if number not in _running:
        mark = _running[number] = _Mark(number)
        torch.autograd.Variable._execution_engine.queue_callback(mark)
    return True


def outermost_backward() -> int:
    """Autograd's number of the backward that runs now, or of the outermost one that it runs within."""
    return min([torch._C._current_graph_task_id(), *_running])  # an outer one has begun before
