"""A launcher's kernels launched again, with other addresses: what it chose for such arguments is not chosen again.

A launcher is a function that checks, chooses tiles and launches kernels; all that it does follows from how its
arguments lie. So what it launched is kept under a key of

    a tensor          its dtype, device, shape, strides, and its address modulo 16 bytes
    a number, a name  its type and value; a container: its type, and of each item the same

and where the key is met again only addresses are filled in, and Triton's C function is called. The first call of a key
runs the launcher, the second runs it and keeps what it launched, if that can be repeated: torch did nothing besides,
every tensor that a kernel got is itself one of the arguments and stands there once, and no kernel needs memory of
Triton's. A call is not repeated but run while a hook at launches is set (profilers set them) and on another than the
current GPU.

A TMA descriptor is kept too, with the launch it belongs to, by the address it was made for: shape, strides, dtype and
box follow from the launch's key, so it cannot be another's. Nothing kept holds a tensor. All is bounded; what is full
is emptied. `forget` empties all: whoever changes by what launchers choose calls it.

The C function is that of Triton 3.6. With another version nothing is kept, and every call runs its launcher.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Iterator
from copy import copy
from typing import Any
from weakref import WeakSet

import triton
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from triton import knobs
from triton.backends.nvidia import driver as nvidia
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

MOST_KEYS = 1024  # of a launcher
MOST_ADDRESSES = 256  # of an argument of a launch, for which descriptors are kept


class Replays:
    """Calls a launcher, or repeats what it launched for arguments that lie as these do."""

    def __init__(self, launcher: Callable[..., None]) -> None:
        self.launcher = launcher
        # None: the key was met once; (): what was launched cannot be repeated
        self.kept: dict[Any, tuple[_Repeated, ...] | None] = {}
        _all.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        addresses: list[int] = []
        try:
            key = (_how(args, addresses), *kwargs, _how(kwargs.values(), addresses))
            found = self.kept.get(key, ())
        except TypeError:  # a tensor that is traced, or something without a hash
            key, found = None, ()
        if found:
            device = found[0].device
            active = driver.active
            if active.get_current_device() == device and not _hooked():
                stream = active.get_current_stream(device)
                for repeated in found:
                    repeated(stream, addresses)
                return
        elif found is None:
            tensors = list(_tensors((*args, *kwargs.values())))
            self.kept[key] = _recorded(tensors, lambda: self.launcher(*args, **kwargs))
            return
        elif key is not None and key not in self.kept:
            if len(self.kept) >= MOST_KEYS:
                self.kept.clear()
            self.kept[key] = None
        self.launcher(*args, **kwargs)


def forget() -> None:
    """Let every launcher choose anew."""
    for replays in _all:
        replays.kept.clear()


_all: WeakSet[Replays] = WeakSet()


class Launched(threading.local):
    """What this thread launches, while a launcher is recorded; `launches` is None at other times."""

    launches: list[tuple[Any, int, int, tuple[Any, ...]]] | None = None

    def note(self, compiled: Any, device: int, programs: int, args: tuple[Any, ...]) -> None:
        """compiled(args) was launched, as so many programs."""
        if self.launches is not None:
            self.launches.append((compiled, device, programs, args))


launched = Launched()


def _how(args: Iterable[Any], addresses: list[int]) -> tuple[Any, ...]:
    """How these lie, and of each tensor the address. Raises TypeError for a tensor that is not a plain one."""
    key: list[Any] = []
    for arg in args:
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            address = arg.data_ptr()
            addresses.append(address)
            key.append((arg.dtype, arg.get_device(), arg.shape, arg.stride(), address % 16))
        elif isinstance(arg, (tuple, list)):
            key += kind, _how(arg, addresses)
        elif isinstance(arg, Tensor):
            raise TypeError
        else:
            key += kind, arg
    return tuple(key)


def _tensors(args: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors whose addresses `_how` appends, in its order."""
    for arg in args:
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, (tuple, list)):
            yield from _tensors(arg)


def _hooked() -> bool:
    """Whether somebody wants to see launches. Triton's chain of hooks is always there, and mostly empty."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


class _Repeated:
    """One launch, ready but for the addresses and the stream."""

    def __init__(
        self, compiled: Any, device: int, programs: int, args: tuple[Any, ...], tensors: dict[int, int]
    ) -> None:
        """tensors: the position of each among the launcher's, by its id. Raises _NotRepeatable."""
        run = compiled.run
        if not triton.__version__.startswith("3.6.") or run.global_scratch_size or run.profile_scratch_size:
            raise _NotRepeatable
        self.device = device
        self.launch = run.launch
        metas: list[Any] = []
        if inspect.isfunction(run.launch):  # it makes descriptors, and then calls the C function
            inside = inspect.getclosurevars(run.launch).nonlocals
            self.launch, metas = inside["launcher"], list(inside["tensordesc_meta"])
        cooperative, dependent = run.launch_cooperative_grid, run.launch_pdl
        self.args = [programs, 1, 1, None, compiled.function, cooperative, dependent, None, None]
        self.args += [compiled.packed_metadata, None, None, None]  # without metadata and hooks at the launch
        self.tensors: list[tuple[int, int]] = []
        self.descriptors: list[tuple[int, int, _Descriptors]] = []
        self.containers: list[tuple[int, list[Any], list[tuple[int, int]]]] = []
        for arg in args:
            at = len(self.args)
            if isinstance(arg, TensorDescriptor):
                descriptors = _Descriptors(arg, metas.pop(0))
                self.descriptors.append((at, _position(arg.base, tensors), descriptors))
                self.args += descriptors.expanded
            elif isinstance(arg, tuple) and any(isinstance(item, Tensor) for item in arg):
                places = [(i, _position(item, tensors)) for i, item in enumerate(arg) if isinstance(item, Tensor)]
                self.containers.append((at, [None if isinstance(item, Tensor) else item for item in arg], places))
                self.args.append(None)
            elif isinstance(arg, Tensor):
                self.tensors.append((at, _position(arg, tensors)))
                self.args.append(None)
            else:
                self.args.append(arg)

    def __call__(self, stream: int, addresses: list[int]) -> None:
        args = self.args.copy()
        args[_STREAM] = stream
        for at, tensor in self.tensors:
            args[at] = addresses[tensor]
        for at, tensor, descriptors in self.descriptors:
            args[at] = descriptors[addresses[tensor]]
        for at, items, inside in self.containers:
            items = items.copy()
            for i, tensor in inside:
                items[i] = addresses[tensor]
            args[at] = tuple(items)
        self.launch(*args)


_STREAM = 3  # its position among the arguments of Triton's C function


class _Descriptors(dict[int, Any]):
    """The TMA descriptors of one argument, made by Triton, by address. expanded: what the C function gets for one."""

    def __init__(self, example: TensorDescriptor, meta: Any) -> None:
        if meta is None:
            raise _NotRepeatable  # it is passed in another form
        self.example, self.meta = copy(example), meta
        self.example.base = None
        self.expanded = self._made(example.base.data_ptr())

    def __missing__(self, address: int) -> Any:
        if len(self) >= MOST_ADDRESSES:
            self.clear()
        made = self[address] = self._made(address)[0]
        return made

    def _made(self, address: int) -> list[Any]:
        descriptor = copy(self.example)  # its own: other threads make theirs
        descriptor.base = _At(address)
        return nvidia.make_tensordesc_arg(descriptor, self.meta)


class _At:
    """Stands for the tensor at an address."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _NotRepeatable(Exception):
    """Something that another call could not fill in."""


class _SeesTorch(TorchDispatchMode):
    """Whether torch does anything."""

    used = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.used = True
        return func(*args, **(kwargs or {}))


def _recorded(tensors: list[Tensor], run: Callable[[], None]) -> tuple[_Repeated, ...]:
    """Run it, and return what it launched; nothing if that cannot be repeated."""
    outer, launched.launches = launched.launches, []
    try:
        with _SeesTorch() as mode:
            run()
        made = launched.launches
    finally:
        launched.launches = outer
    positions = {id(tensor): position for position, tensor in enumerate(tensors)}
    if mode.used or len(positions) < len(tensors):
        return ()
    try:
        return tuple(_Repeated(*launch, positions) for launch in made)
    except _NotRepeatable:
        return ()


def _position(tensor: Tensor, positions: dict[int, int]) -> int:
    if id(tensor) not in positions:
        raise _NotRepeatable
    return positions[id(tensor)]
