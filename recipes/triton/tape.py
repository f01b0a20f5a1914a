"""Tape: what a function does, recorded by torch's dispatch and by launches, so that it can be repeated."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, Literal
from weakref import ref

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.triton.repeated import (
    DESCRIPTORS,
    Allocated,
    At,
    Freed,
    Grid,
    Launched,
    NotRepeatable,
    Operated,
    RebuiltObject,
    Repeated,
    Seen,
    TensorPosition,
    Written,
    Zeroes,
    ZerosLaunch,
    prepare,
)


class Taping(threading.local):
    """The tape of this thread, or None. inside: whether it runs a function that may be repeated as a whole."""

    tape: Tape | None = None
    inside = False


taping = Taping()


def record(
    tensors: list[Tensor],
    run: Callable[[], Any],
    zeros: Callable[[torch.device, int], ZerosLaunch | None] | None = None,
) -> tuple[Any, Repeated | Literal[False]]:
    """What `run` returns, and what repeats it; False if it cannot be repeated. tensors: its arguments, each once.
    zeros: as of `prepare`."""
    taping.tape = tape = Tape(tensors)
    try:
        with tape:
            result = run()
        if not tape.repeatable or tape.device is None:
            return result, False
        return result, prepare(tape.device, len(tensors), tuple(tape.seen), tape.place(result), zeros)
    except NotRepeatable:
        return result, False
    finally:
        taping.tape = None
        tape.close()


def call_again(function: Callable[[], object]) -> None:
    """function(), which a repetition of what is being recorded calls too. It touches no tensors."""
    function()
    if taping.tape is not None:
        taping.tape.called(function)


class Tape(TorchDispatchMode):
    """Keeps what torch and launches do, in `seen`. `Launch` and `launcher` report what they did to it."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.seen: list[Seen] = []
        self.device: int | None = None
        self.repeatable = True
        self._arguments = self._count = len(tensors)
        self._positions = {id(tensor): position for position, tensor in enumerate(tensors)}
        self._living: dict[int, Any] = {}
        if len(self._positions) < len(tensors):
            self.repeatable = False  # which of the two would it have been?

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for seconds, at the first operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            placed = self.place(tuple(args)), {name: self.place(arg) for name, arg in kwargs.items()}
        except NotRepeatable:
            self.repeatable = False
        result = func(*args, **kwargs)
        if func in _OF_NUMBERS:
            return result
        several = isinstance(result, (tuple, list))
        results = list(result) if several else [result]
        if not all(isinstance(one, Tensor) for one in results) or _DYNAMIC.intersection(func.tags):
            self.repeatable = False
        elif any(one.is_cpu for one in results) and any(isinstance(arg, Tensor) and not arg.is_cpu for arg in args):
            self.repeatable = False  # to be read by the host
        if self.repeatable:
            new = [one for one in results if id(one) not in self._positions]
            if new and len(new) < len(results):
                self.repeatable = False
                return result
            positions = tuple(map(self._follow, new))
            if func in _ALLOCATING and result.is_contiguous() and not result.is_pinned():
                zeroed = result.nbytes if _ALLOCATING[func] else 0
                lies = tuple(result.shape), result.stride(), result.dtype, result.device
                self.seen.append(Allocated(positions[0], *lies, zeroed))
            else:
                bases = [self._base(one, args) for one in new]
                views_of = tuple(base for base in bases if base is not None)
                are_views = bool(new) and len(views_of) == len(new)
                self.seen.append(Operated(func, *placed, positions, several, views_of if are_views else None))
                if any(base is None and one.data_ptr() % 16 for base, one in zip(bases, new, strict=True)):
                    self.repeatable = False  # another time it may lie better, or worse
        return result

    def launched(
        self, compiled: Any, device: int, grid: Grid, args: tuple[Any, ...], zeroes: Zeroes | None = None
    ) -> None:
        """compiled(args) was launched, as so many programs along each axis. zeroes: as of a `Launch`."""
        if self.device not in (None, device):
            self.repeatable = False
        self.device = device
        try:
            bases = tuple(self.place(arg.base) for arg in args if type(arg) in DESCRIPTORS)
            placed = tuple(_over_address(arg) if type(arg) in DESCRIPTORS else self.place(arg) for arg in args)
            self.seen.append(Launched(compiled, grid, placed, bases, zeroes))
        except NotRepeatable:
            self.repeatable = False

    def called(self, function: Callable[[], object]) -> None:
        """The function was called."""
        self.seen.append(Operated(function, (), {}, ()))

    def written(self, buffers: Iterable[Tensor]) -> None:
        """Launches wrote into these."""
        positions = [self._positions.get(id(buffer), self._arguments) for buffer in buffers]
        arguments = tuple(position for position in positions if position < self._arguments)
        if arguments:
            self.seen.append(Written(arguments))

    def place(self, value: Any) -> Any:
        """The value with places for its tensors. Raises NotRepeatable for a tensor that is not the function's."""
        if isinstance(value, Tensor):
            if id(value) not in self._positions:
                raise NotRepeatable
            return TensorPosition(self._positions[id(value)])
        if hasattr(value, "rebuild"):
            tensors = value.tensors()
            return RebuiltObject(value.rebuild([None] * len(tensors)).rebuild, self.place(tuple(tensors)))
        if not isinstance(value, (tuple, list)):
            return value
        items = list(map(self.place, value))
        if all(item is own for item, own in zip(items, value, strict=True)):
            return value
        return getattr(type(value), "_make", type(value))(items)

    def close(self) -> None:
        """Drop the weak references: nothing is recorded any more."""
        self._living.clear()

    def _base(self, result: Tensor, args: Sequence[Any]) -> tuple[int, int] | None:
        """Of a view of one of these tensors: the position of that, and how many bytes behind it begins."""
        if result.nbytes:
            memory = result.untyped_storage()._cdata
            for arg in args:
                if isinstance(arg, Tensor) and arg.untyped_storage()._cdata == memory:
                    return self._positions[id(arg)], result.data_ptr() - arg.data_ptr()
        return None

    def _follow(self, made: Tensor) -> int:
        position, identity = self._count, id(made)
        self._count += 1
        self._positions[identity] = position

        def free(_: object) -> None:
            del self._positions[identity], self._living[position]
            self.seen.append(Freed(position))

        self._living[position] = ref(made, free)
        return position


def _over_address(descriptor: Any) -> Any:
    """The same descriptor, which keeps no tensor alive."""
    stripped = copy(descriptor)
    stripped.base = At(descriptor.base.data_ptr())
    return stripped


# torch.empty and torch.zeros, and whether it is the latter.
_ALLOCATING = {
    torch.ops.aten.empty.memory_format: False,
    torch.ops.aten.empty_like.default: False,
    torch.ops.aten.new_empty.default: False,
    torch.ops.aten.zeros.default: True,
    torch.ops.aten.new_zeros.default: True,
}
_OF_NUMBERS = {torch.ops.aten.promote_types.default, torch.ops.aten.result_type.Scalar_Scalar}  # they read no tensor
_DYNAMIC = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
