"""Which backward runs, where one runs within another, and which gradients it computes.

Reentrant checkpointing recomputes a segment within a backward, and then runs a backward of its own through it. Where
the gradients of one backward are counted, all of these count as the outermost one. Autograd numbers every backward but
does not record which runs within which; the recomputation runs within the outer one, and is noted there.
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
    """Note a forward: if it runs within a backward, that one is remembered until its end. Returns whether it does."""
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
    """The positions of the nodes that the current backward does not reach, among those that gradients go to.

    It computes other gradients only: `torch.autograd.grad(y, x)`, `backward(inputs=[x])`.
    For a leaf whose gradient `torch.autograd.grad` returns, this costs the host an exception (about 20 us).
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
