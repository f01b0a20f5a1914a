"""Which backward runs, where one runs within another, and what it was asked for.

Reentrant checkpointing computes a segment again within a backward, and then runs a backward of its own through it. To
who counts the gradients of one backward all of these are the outermost one. Autograd numbers every backward and does
not say what runs within what; but what is computed again is computed within the outer one, and noted there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
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


def within_backward() -> bool:
    """Whether a backward runs, so that what is computed forward now is computed again."""
    return torch._C._current_graph_task_id() >= 0


def unwanted_parameters(nodes: Sequence[tuple[Any, int]]) -> frozenset[int]:
    """Of the nodes that gradients go to, the positions of those that the backward that runs now does not reach.

    It was asked for other gradients alone: `torch.autograd.grad(y, x)`, `backward(inputs=[x])`.
    To ask for a leaf that `torch.autograd.grad` returns costs the host an exception (about 20 us).
    """
    if torch._C._current_graph_task_id() < 0:
        return frozenset()
    return frozenset(at for at, (node, _) in enumerate(nodes) if node is not None and not _is_reached(node))


def _is_reached(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient `torch.autograd.grad` returns
        return True


def outermost_backward() -> int:
    """Autograd's number of the backward that runs now, or of the outermost one that it runs within."""
    return min([torch._C._current_graph_task_id(), *_running])  # an outer one has begun before
