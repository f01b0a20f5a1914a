"""Whether the caller's own buffers may be written: nothing that is read, kept or updated lies in the same memory.

Memory is compared by addresses, from a tensor's first byte to its last: slices of one arena that do not meet are as
good as tensors of their own. An output and a grad_input may share memory, if nothing that backward reads lies there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from recipes.tensors.quantized_handle import at_container

Edge = tuple[Any, int]  # a node of autograd's graph, and which of its inputs
Other = tuple[tuple[str, ...], Tensor | None]  # what a buffer must not overlap: a format and its names, the tensor

_PLAIN = (Tensor, torch.nn.Parameter)


class CallersBuffer(NamedTuple):
    """place: the operation that writes it, in words."""

    name: str
    place: str
    tensor: Tensor


def place_of(label: str, operation: Any) -> str:
    """An operation in words."""
    return f"operation {label} ({type(operation).__name__})"


def buffers_of(
    given: Mapping[int, Mapping[str, Tensor]], operations: Sequence[torch.nn.Module], labels: Sequence[str]
) -> list[CallersBuffer]:
    """All that the operations of a call were given, by their positions."""
    return [
        CallersBuffer(name, place_of(labels[index], operations[index]), tensor)
        for index, named in sorted(given.items())
        for name, tensor in named.items()
    ]


def check_before_forward(
    buffers: Sequence[CallersBuffer], modules: Mapping[str, torch.nn.Module], x: Any, extras: Mapping[str, Any]
) -> None:
    """Raise ValueError if writing any of the buffers would change what is read, or another of them.

    modules: those that run, by what they are called in words. x, extras: what the first of them and any of them read.
    """
    read = _read(x, extras)
    outputs = [buffer for buffer in buffers if buffer.name == "output"]
    gradients = [buffer for buffer in buffers if buffer.name != "output"]
    for written in (outputs, gradients):
        for index, buffer in enumerate(written):
            _check([buffer], _others(written[:index]))
    _check(outputs, read)
    _check(gradients, [(what, t) for what, t in read if t is not None and t.requires_grad and t.is_leaf])
    _check(buffers, _kept(modules))


def check_between_stages(
    stages: Sequence[Sequence[CallersBuffer]],
    modules: Mapping[str, torch.nn.Module],
    x: Any,
    extras: Mapping[str, Any],
) -> None:
    """The same for stages that are nodes of autograd's graph each: the backward of one does not see what an earlier
    one, or a module between them, keeps. So no gradient of a later one is written where they read or wrote."""
    check_before_forward([buffer for stage in stages for buffer in stage], modules, x, extras)
    earlier: list[CallersBuffer] = []
    for number, stage in enumerate(stages):
        gradients = [buffer for buffer in stage if buffer.name != "output"]
        if number:
            _check(gradients, _read(x, extras) + _others(earlier))
        earlier += [buffer for buffer in stage if buffer.name == "output"]


def check_before_backward(
    buffers: Sequence[CallersBuffer],
    parameters: Iterable[Tensor],
    saved: Iterable[Tensor | None],
    output_grads: Iterable[Tensor | None],
) -> None:
    """Raise ValueError if writing any of the gradients' buffers would change what backward reads or adds to.

    parameters: whose main_grad may be there only now. saved: what forward kept. output_grads: the gradients of y and
    of the extra outputs.
    """
    others: list[Other] = [(("the gradient of an output",), t) for d in output_grads for t in _tensors(d)]
    others += [(("a tensor that forward keeps for backward",), t) for t in saved]
    others += [(("a parameter's main_grad",), p.__dict__.get("main_grad")) for p in parameters]
    waiting = ("a gradient from another call, which autograd has yet to add or to hand on",)
    others += [(waiting, handed.gradient) for handed in _handed_on() if handed.waits]
    _check([buffer for buffer in buffers if buffer.name != "output"], others)


def note_handed_on(buffers: Sequence[CallersBuffer], gradients: Iterable[Tensor | None], edges: Sequence[Edge]) -> None:
    """Remember until the end of this backward which gradients of inputs lie in the caller's buffers, and where they go.

    So autograd does not take one for its own: it copies what becomes `.grad`, and the buffer can be used again.
    """
    for edge, gradient in zip(edges, gradients, strict=True):
        if gradient is not None and any(overlap(buffer.tensor, gradient) for buffer in buffers):
            handed = _Handed(gradient)
            handed.handle = edge[0].register_prehook(handed)
            _handed_on().append(handed)


def overlap(first: Tensor, second: Tensor) -> bool:
    """Whether the memory of the two meets, from the first byte of each to its last."""
    mine, theirs = _span(first), _span(second)
    return mine[0] < theirs[1] and theirs[0] < mine[1] and first.device == second.device


def _span(tensor: Tensor) -> tuple[int, int]:
    """The addresses of its first byte and of the one behind its last; (0, 0) where there is none to be known."""
    begin = tensor.data_ptr() if type(tensor) in _PLAIN else 0
    if not begin:
        return 0, 0
    if tensor.is_contiguous():
        return begin, begin + tensor.nbytes
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.itemsize


def _check(buffers: Sequence[CallersBuffer], others: Iterable[Other]) -> None:
    spans = [_span(buffer.tensor) for buffer in buffers]
    begin, end = min((first for first, _ in spans), default=0), max((behind for _, behind in spans), default=0)
    for (what, *names), tensor in others:
        if tensor is None or not end:
            continue
        first, behind = _span(tensor)
        if first < end and begin < behind:  # most lie elsewhere
            for buffer in buffers:
                if overlap(buffer.tensor, tensor):
                    raise ValueError(
                        f"The buffer {buffer.name!r} of {buffer.place} shares memory with {what.format(*names)}, "
                        "which would be overwritten. Give memory that nothing else lies in."
                    )


def _read(x: Any, extras: Mapping[str, Any]) -> list[Other]:
    read: list[Other] = [(("x",), t) for t in _tensors(x)]
    return read + [(("the extra input {!r}", name), t) for name, value in extras.items() for t in _tensors(value)]


def _others(buffers: Iterable[CallersBuffer]) -> list[Other]:
    return [(("the buffer {!r} of {}", buffer.name, buffer.place), buffer.tensor) for buffer in buffers]


def _kept(modules: Mapping[str, torch.nn.Module]) -> Iterator[Other]:
    for place, module in modules.items():
        for name, parameter in module.named_parameters():
            yield ("the parameter {!r} of {}", name, place), parameter
            yield ("{}.main_grad of {}", name, place), parameter.__dict__.get("main_grad")
            if parameter.is_leaf:
                yield ("{}.grad of {}", name, place), parameter.grad
        for name, state in module.named_buffers():
            yield ("the state {!r} of {}", name, place), state


class _Handed:
    """A gradient in a buffer of the caller's. It waits until the node that it was handed to runs."""

    def __init__(self, gradient: Tensor) -> None:
        self.gradient = gradient
        self.waits = True
        self.handle: Any = None

    def __call__(self, *_: Any) -> None:
        self.waits = False
        self.handle.remove()


class _HandedOn(list[_Handed]):
    """Of one backward. Autograd keeps it as long as that runs, and calls it at its end, unless that is an exception."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def __call__(self) -> None:
        _of_backward.pop(self.number, None)


_of_backward: WeakValueDictionary[int, _HandedOn] = WeakValueDictionary()  # by autograd's number


def _handed_on() -> _HandedOn:
    number = torch._C._current_graph_task_id()
    found = _of_backward.get(number)
    if found is None:
        new = _HandedOn(number)
        found = _of_backward.setdefault(number, new)
        if found is new:
            torch.autograd.Variable._execution_engine.queue_callback(new)
    return found


def _tensors(value: Any) -> list[Tensor]:
    """Of a tensor, a container or a handle of one."""
    value = at_container(value)
    tensors = [value] if isinstance(value, Tensor) else value.tensors() if hasattr(value, "tensors") else []
    return [tensor for tensor in tensors if tensor is not None]
