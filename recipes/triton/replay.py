"""A function that allocates and launches, repeated with other addresses: its checks and choices are made once.

Launchers, and functions that call them, check, choose tiles, allocate and launch; all of it follows from the layout of
their arguments. So what they did is kept under a key of

    a tensor          its dtype, device, shape, strides, and its address modulo 16 bytes
    a number, a name  its type and value; a container: its type, and the same of each item

and repeated for an equal key: outputs are allocated, addresses filled in, Triton's C function called. The first call
with a key runs the function; the second runs it and records what it did, if that can be repeated: it touched no tensors
but its arguments, what it made, and views of these; torch did nothing whose shape or result the host has to wait for;
no kernel needs memory of Triton's. What was made is freed where the function freed it; random numbers are drawn anew.

    tape.py      records what a function does
    repeated.py  prepares its repetition
    layouts.py   compares how tensors lie with others that were met before, without a key

A call runs the function in full inside of another one that may be repeated itself; if a mode, a transform or autograd
has to see it; on another GPU than the current one; while a hook at launches is set (profilers set them).

A TMA descriptor is kept with the launch it belongs to, by the address it was made for: its shape, strides, dtype and
box follow from the launch's key, so it is never another tensor's. Nothing kept holds a tensor. All tables are bounded,
and emptied when full. `forget` empties all: call it after changing global state that a launch depended on.

The C function is that of Triton 3.6 to 3.9. With another release nothing is repeated, as
`recipes.triton.gates.why_not_repeated` says.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal
from weakref import WeakSet

import torch
from torch import Tensor
from torch.nn import Parameter

from recipes.triton.gates import driver, knobs
from recipes.triton.repeated import Repeated, ZerosLaunch
from recipes.triton.tape import record, taping

MOST_KEYS = 1024  # of a function


class Kept:
    """Recorded repetitions by key, see above. most: the largest number of keys; None: MOST_KEYS. zeros: what launch
    they make zeros by, if one does (`recipes.triton.zeros`)."""

    def __init__(
        self, most: int | None = None, zeros: Callable[[torch.device, int], ZerosLaunch | None] | None = None
    ) -> None:
        self.most = most
        self.zeros = zeros
        # None: the key was met once; False: what was done cannot be repeated
        self.kept: dict[Any, Repeated | Literal[False] | None] = {}
        _all.add(self)

    def run(self, key: object, tensors: list[Any], addresses: list[int], function: Callable[[], Any]) -> Any:
        """function(), or what it did under this key. Raises TypeError for a key without a hash, before anything is run.

        tensors: all that it reads or writes without having made them, with their addresses; both lists are used up
        """
        found = self.kept.get(key, _NEW)
        if type(found) is Repeated:
            stream = stream_for(found)
            if stream is not None:
                return found.again(tensors, addresses, stream)
        elif found is not False:
            taping.inside = True  # what it calls looks for no keys of its own
            try:
                if found is None:
                    result, self.kept[key] = record(tensors, function, self.zeros)
                    return result
                if len(self.kept) >= (self.most or MOST_KEYS):
                    self.kept.clear()
                self.kept[key] = None
                return function()
            finally:
                taping.inside = False
        return function()


class Replays(Kept):
    """Calls a function, or repeats what it did for arguments that lie as these do."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = []
        addresses: list[int] = []
        if taping.inside or not is_eager():
            return self.function(*args, **kwargs)
        try:
            key = how((*args, *kwargs.values()) if kwargs else args, tensors, addresses)
            if kwargs:
                key += (tuple(kwargs),)
            hash(key)
        except TypeError:  # a tensor that is no plain one, or something without a hash
            return self.function(*args, **kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return self.function(*args, **kwargs)
        return self.run(key, tensors, addresses, lambda: self.function(*args, **kwargs))


def stream_for(found: Repeated) -> int | None:
    """The stream to repeat it on; None if it has to run in full now: it was recorded on another GPU than the current
    one, or a hook observes launches."""
    active = driver.active
    if active.get_current_device() != found.device or _hooked():
        return None
    stream: int = active.get_current_stream(found.device)
    return stream


def forget() -> None:
    """Drop all that was recorded, so that every function runs in full again."""
    global _forgotten
    _forgotten += 1
    for kept in _all:
        kept.kept.clear()


def times_forgotten() -> int:
    """How often `forget` was called: who holds what was recorded holds it until then."""
    return _forgotten


def is_eager() -> bool:
    """Whether nothing traces, transforms or redirects what torch does, but for a recording here."""
    return not (
        torch.compiler.is_dynamo_compiling()
        or torch._C._len_torch_dispatch_stack() != (taping.tape is not None)
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
    )


_all: WeakSet[Kept] = WeakSet()
_forgotten = 0
_NEW = object()  # of a key that was not met yet


def how(args: Iterable[Any], tensors: list[Any], addresses: list[int]) -> tuple[Any, ...]:
    """How these lie; their tensors are appended, each once, and their addresses. Raises TypeError for one that is not
    plain."""
    return _how(args, tensors, addresses, {})


def _how(args: Iterable[Any], tensors: list[Any], addresses: list[int], places: dict[int, int]) -> tuple[Any, ...]:
    """places: where each of `tensors` stands, by its id, which no other has while the list holds it"""
    key: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            place = places.setdefault(id(arg), len(tensors))
            if place < len(tensors):
                key.append(place)
                continue
            address = arg.data_ptr()
            tensors.append(arg)
            addresses.append(address)
            key.append((arg.dtype, arg.get_device(), arg.shape, arg.stride(), address % 16))
        elif arg is None:
            key.append(None)
        elif kind is tuple or kind is list or isinstance(arg, tuple):
            key += kind, _how(arg, tensors, addresses, places)
        elif isinstance(arg, Tensor):
            raise TypeError
        else:
            key += kind, arg
    return tuple(key)


def _hooked() -> bool:
    """Whether a hook observes launches. Triton's chain of hooks is always there, and mostly empty."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))
