"""Which backward runs, where one runs within another, which gradients it computes, and what is undone if it fails.

Reentrant checkpointing recomputes a segment within a backward, and then runs a backward of its own through it. Where
the gradients of one backward are counted, all of these count as the outermost one. Autograd numbers every backward but
does not record which runs within which; the recomputation runs within the outer one, and is noted there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch


class _Mark:
    """What autograd keeps as long as a backward runs, and calls at its end, unless that is an exception.

    computes_forward: whether something was computed forward within it
    undo: what is called after an exception
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.computes_forward = False
        self.undo: list[Callable[[], object]] = []

    def __call__(self) -> None:
        _running.pop(self.number, None)
        self.undo.clear()

    def __del__(self) -> None:
        for undo in self.undo:
            undo()


# Of backwards within which something was computed forward, or is to be undone: a mark, by autograd's number.
_running: WeakValueDictionary[int, _Mark] = WeakValueDictionary()


def note_forward() -> bool:
    """Note a forward: if it runs within a backward, that one is remembered until its end. Returns whether it does."""
    number = torch._C._current_graph_task_id()
    if number < 0:
        return False
    _mark_of(number).computes_forward = True
    return True


def undo_on_failure(undo: Callable[[], object]) -> None:
    """Call undo() if the backward that runs now, or the outermost one that it runs within, ends with an exception.

    Does nothing outside of a backward.
    """
    number = outermost_backward()
    if number >= 0:
        _mark_of(number).undo.append(undo)


def within_backward() -> bool:
    """Whether a backward runs, so that what is computed forward now is computed again."""
    return torch._C._current_graph_task_id() >= 0


def retains_graph() -> bool:
    """Whether the current backward keeps what autograd saved: another one may follow."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def unreached(nodes: Sequence[tuple[Any, int]], first: int = 0) -> frozenset[int]:
    """The positions, from `first` on, of the nodes that the current backward does not reach, among those that gradients
    go to.

    It computes other gradients only: `torch.autograd.grad(y, x)`, `backward(inputs=[x])`.
    For a leaf whose gradient `torch.autograd.grad` returns, this costs the host an exception (about 20 us).
    """
    if torch._C._current_graph_task_id() < 0:
        return frozenset()
    return frozenset(at for at, (node, _) in enumerate(nodes, first) if node is not None and not _is_reached(node))


def _is_reached(node: Any) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # a leaf whose gradient `torch.autograd.grad` returns
        return True


def outermost_backward() -> int:
    """Autograd's number of the backward that runs now, or of the outermost one that it runs within."""
    outer = [number for number, mark in _running.items() if mark.computes_forward]
    return min([torch._C._current_graph_task_id(), *outer])  # an outer one has begun before


def _mark_of(number: int) -> _Mark:
    """That of the backward that runs now, or of one that has a mark."""
    mark = _running.get(number)
    if mark is None:
        mark = _running[number] = _Mark(number)
        torch.autograd.Variable._execution_engine.queue_callback(mark)
    return mark
