"""A function that allocates and launches, repeated with other addresses: what it chose once is not chosen again.

Launchers, and functions made of them, check, choose tiles, allocate and launch; all that follows from how their
arguments lie. So what they did is kept under a key of

    a tensor          its dtype, device, shape, strides, and its address modulo 16 bytes
    a number, a name  its type and value; a container: its type, and the same of each item

and where the key is met again it is done again, without a look at anything else: outputs are allocated, addresses
filled in, Triton's C function called. The first call of a key runs the function; the second runs it and keeps what it
did, if that can be repeated: it touched no tensors but its arguments, what it made, and views of these; torch did
nothing whose shape or result the host has to wait for; no kernel needs memory of Triton's. What was made is freed where
it was freed then.

A call runs the function, and nothing is repeated: inside of another one that may be repeated itself; if a mode, a
transform or autograd has to see it; on another GPU than the current one; while a hook at launches is set (profilers set
them).

A TMA descriptor is kept with the launch it belongs to, by the address it was made for: its shape, strides, dtype and
box follow from the launch's key, so it is never another tensor's. Nothing kept holds a tensor. All is bounded: what is
full is emptied. `forget` empties all; whoever changes by what functions choose, other than by their arguments, calls
it.

The C function is that of Triton 3.6 or 3.7. With another release nothing is repeated, as
`recipes.triton.gates.why_not_this_release` says.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from copy import copy
from operator import itemgetter
from typing import Any, Literal, NamedTuple
from weakref import WeakSet, ref

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode

from recipes.triton.gates import TensorDescriptor, driver, knobs, nvidia, why_not_this_release

MOST_KEYS = 1024  # of a function
MOST_ADDRESSES = 256  # of an argument of a launch, for which descriptors are kept

# What a TMA descriptor may be. Gluon has a class of its own, which is added by whoever imports Gluon.
DESCRIPTORS: set[type] = {TensorDescriptor}


class Replays:
    """Calls a function, or repeats what it did for arguments that lie as these do."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        # None: the key was met once; False: what the function did cannot be repeated
        self.kept: dict[Any, _Recorded | Literal[False] | None] = {}
        _all.add(self)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        tensors: list[Any] = []
        addresses: list[int] = []
        if recording.inside or not is_eager():
            return self.function(*args, **kwargs)
        try:
            key = _how(args, tensors, addresses)
            if kwargs:
                key += (*kwargs, _how(kwargs.values(), tensors, addresses))
            new = key not in self.kept
            found = self.kept.get(key)
        except TypeError:  # a tensor that is no plain one, or something without a hash
            return self.function(*args, **kwargs)
        if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            return self.function(*args, **kwargs)
        if found:
            active = driver.active
            if active.get_current_device() == found.device and not _hooked():
                stream = active.get_current_stream(found.device)
                for step in found.steps:
                    step(tensors, addresses, stream)
                return found.result(tensors)
        elif found is None:
            recording.inside = True  # what it calls looks for no keys of its own
            try:
                if not new:
                    result, self.kept[key] = _record(tensors, lambda: self.function(*args, **kwargs))
                    return result
                if len(self.kept) >= MOST_KEYS:
                    self.kept.clear()
                self.kept[key] = None
                return self.function(*args, **kwargs)
            finally:
                recording.inside = False
        return self.function(*args, **kwargs)


def forget() -> None:
    """Let every function choose anew."""
    for replays in _all:
        replays.kept.clear()


def is_eager() -> bool:
    """Whether nothing traces, transforms or redirects what torch does, but for a recording here."""
    return not (
        torch.compiler.is_compiling()
        or torch._C._len_torch_dispatch_stack() != (recording.tape is not None)
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
    )


_all: WeakSet[Replays] = WeakSet()


def _how(args: Iterable[Any], tensors: list[Any], addresses: list[int]) -> tuple[Any, ...]:
    """How these lie; the tensors and their addresses are appended. Raises TypeError for one that is not plain."""
    key: list[Any] = []
    for arg in args:
        if arg is None:
            key.append(None)
            continue
        kind = type(arg)
        if kind is Tensor or kind is Parameter:
            address = arg.data_ptr()
            tensors.append(arg)
            addresses.append(address)
            key.append((arg.dtype, arg.get_device(), arg.shape, arg.stride(), address % 16))
        elif kind is tuple or kind is list or isinstance(arg, tuple):
            key += kind, _how(arg, tensors, addresses)
        elif isinstance(arg, Tensor):
            raise TypeError
        else:
            key += kind, arg
    return tuple(key)


def _hooked() -> bool:
    """Whether somebody wants to see launches. Triton's chain of hooks is always there, and mostly empty."""
    runtime = knobs.runtime
    enter, leave = runtime.launch_enter_hook, runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


# ------------------------------------------------------------------------------------------------- what is repeated

Action = Callable[[list[Any], list[int], int], None]  # of the tensors so far, their addresses, and the stream
Grid = tuple[int, ...]  # how many programs along each of three axes


class _Recorded(NamedTuple):
    """What a function did, on this device; result: what it returned, of the tensors that there are then."""

    device: int
    steps: tuple[Action, ...]
    result: Callable[[list[Any]], Any]


class _Place(NamedTuple):
    """Stands for a tensor, or its address: the position among the arguments and what was made."""

    position: int


class _Template:
    """A tuple, list or NamedTuple with places, to be filled in."""

    def __init__(self, template: Any) -> None:
        kind = type(template)
        self.make: Callable[[list[Any]], Any] = getattr(kind, "_make", kind)
        self.items = list(template)
        self.places = [(i, item.position) for i, item in enumerate(template) if type(item) is _Place]
        inner = [(i, item) for i, item in enumerate(template) if type(item) in (tuple, list) or _is_named(item)]
        self.inner = [(i, _Template(item)) for i, item in inner if type(item) is not _Place]

    def __call__(self, values: Sequence[Any]) -> Any:
        items = self.items.copy()
        for i, position in self.places:
            items[i] = values[position]
        for i, template in self.inner:
            items[i] = template(values)
        return self.make(items)


def _is_named(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(value, "_fields")


def _returning(template: Any) -> Callable[[list[Any]], Any]:
    """Fills in what a function returned: a tensor, or a container of some."""
    if type(template) is _Place:
        return itemgetter(template.position)
    filled = _Template((template,))
    return lambda tensors: filled(tensors)[0]


class _Empty:
    """torch.empty."""

    def __init__(self, made: Tensor) -> None:
        # torch parses a torch.Size more slowly than a tuple.
        self.shape, self.dtype, self.device = tuple(made.shape), made.dtype, made.device

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        made = torch.empty(self.shape, dtype=self.dtype, device=self.device)
        tensors.append(made)
        addresses.append(made.data_ptr())


class _Operation:
    """Any other operation of torch, on tensors of the function."""

    def __init__(self, operation: Any, args: Any, kwargs: Any, makes: bool) -> None:
        self.operation, self.makes = operation, makes
        self.args, self.names, self.values = _Template(args), tuple(kwargs), _Template(tuple(kwargs.values()))

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        kwargs = dict(zip(self.names, self.values(tensors), strict=True))
        result = self.operation(*self.args(tensors), **kwargs)
        if self.makes:
            tensors.append(result)
            addresses.append(result.data_ptr())


class _Free:
    """The function gave this tensor up."""

    def __init__(self, position: int) -> None:
        self.position = position

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        tensors[self.position] = None


class _Written:
    """Kernels wrote into these of the function's arguments: autograd counts that."""

    def __init__(self, positions: list[int]) -> None:
        self.positions = positions

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        torch.autograd.graph.increment_version([tensors[position] for position in self.positions])


class _RecordedLaunch:
    """One launch, ready but for the addresses and the stream."""

    def __init__(self, compiled: Any, grid: Grid, args: tuple[Any, ...], place: Callable[[Any], Any]) -> None:
        """args: a `_Place` for each tensor, in descriptors too. Raises _NotRepeatable."""
        run = compiled.run
        if why_not_this_release() or not isinstance(run, nvidia.CudaLauncher):
            raise _NotRepeatable
        if run.global_scratch_size or run.profile_scratch_size:
            raise _NotRepeatable
        self.launch = run.launch
        metas: list[Any] = []
        if inspect.isfunction(run.launch):  # it makes descriptors, and then calls the C function
            inside = inspect.getclosurevars(run.launch).nonlocals
            self.launch, metas = inside["launcher"], list(inside["tensordesc_meta"])
        self.grid = grid
        how = compiled.function, run.launch_cooperative_grid, run.launch_pdl
        metadata = compiled.packed_metadata, None, None, None  # without metadata and hooks at the launch
        scratch = None, None
        # Triton 3.7 has one C function for all kernels, which takes their signature; Triton 3.6 compiles one for each.
        self.takes_signature = hasattr(run, "kernel_signature")
        self.how: tuple[Any, ...] = (*how, *scratch, *metadata)
        if self.takes_signature:
            self.how = (*how, *metadata, *scratch, run.arg_annotations, run.kernel_signature)
        self.args: list[Any] = []
        self.places: list[tuple[int, int]] = []
        self.descriptors: list[tuple[int, int, _Descriptors]] = []
        self.containers: list[tuple[int, _Template]] = []
        for arg in args:
            at = len(self.args)
            if type(arg) in DESCRIPTORS:
                descriptors = _Descriptors(arg, metas.pop(0))
                self.descriptors.append((at, place(arg.base).position, descriptors))
                self.args += descriptors.expanded
                continue
            filled = place(arg)
            if type(filled) is _Place:
                self.places.append((at, filled.position))
            elif filled is not arg:
                self.containers.append((at, _Template(filled)))
            self.args.append(filled)

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        args = self.args.copy()
        for at, position in self.places:
            args[at] = addresses[position]
        for at, position, descriptors in self.descriptors:
            args[at] = descriptors[addresses[position]]
        for at, container in self.containers:
            args[at] = container(addresses)
        if self.takes_signature:
            self.launch(*self.grid, stream, *self.how, args)
        else:
            self.launch(*self.grid, stream, *self.how, *args)


class _Descriptors(dict[int, Any]):
    """The TMA descriptors of one argument, made by Triton, by address. expanded: what the C function gets for one."""

    def __init__(self, example: Any, meta: Any) -> None:
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


# ------------------------------------------------------------------------------------------------------- recording


class Recording(threading.local):
    """What this thread records, if it does. inside: whether it runs a function that may be repeated as a whole."""

    tape: Tape | None = None
    inside = False


recording = Recording()


class _NotRepeatable(Exception):
    """Something that another call could not do again."""


class Tape(TorchDispatchMode):
    """Records what torch and launches do. `Launch` and `launcher` tell it what they did."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        super().__init__()
        self.steps: list[Action] = []
        self.device: int | None = None
        self.repeatable = True
        self._arguments = self._count = len(tensors)
        self._positions = {id(tensor): position for position, tensor in enumerate(tensors)}
        self._living: dict[int, Any] = {}
        if len(self._positions) < len(tensors):
            self.repeatable = False  # which of the two would it have been?

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler, for seconds, as soon as an operation is seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            place = self.place(tuple(args)), {name: self.place(arg) for name, arg in kwargs.items()}
        except _NotRepeatable:
            self.repeatable = False
        result = func(*args, **kwargs)
        if not isinstance(result, Tensor) or _DYNAMIC.intersection(func.tags):
            self.repeatable = False
        if self.repeatable:
            makes = id(result) not in self._positions
            empty = func in _EMPTY and result.is_contiguous() and not result.is_pinned()
            self.steps.append(_Empty(result) if empty else _Operation(func, *place, makes))
            if makes:
                self._follow(result)
        return result

    def launched(self, compiled: Any, device: int, grid: Grid, args: tuple[Any, ...]) -> None:
        """compiled(args) was launched, as so many programs along each axis."""
        if self.device not in (None, device):
            self.repeatable = False
        self.device = device
        try:
            self.steps.append(_RecordedLaunch(compiled, grid, args, self.place))
        except _NotRepeatable:
            self.repeatable = False

    def written(self, buffers: Iterable[Tensor]) -> None:
        """Launches wrote into these."""
        positions = [self._positions.get(id(buffer), self._arguments) for buffer in buffers]
        positions = [position for position in positions if position < self._arguments]
        if positions:
            self.steps.append(_Written(positions))

    def place(self, value: Any) -> Any:
        """The value with places for its tensors. Raises _NotRepeatable for a tensor that is not the function's."""
        if isinstance(value, Tensor):
            if id(value) not in self._positions:
                raise _NotRepeatable
            return _Place(self._positions[id(value)])
        if not isinstance(value, (tuple, list)):
            return value
        items = list(map(self.place, value))
        if all(item is own for item, own in zip(items, value, strict=True)):
            return value
        return getattr(type(value), "_make", type(value))(items)

    def close(self) -> None:
        """Nothing is recorded any more; what lives on may die in peace."""
        self._living.clear()

    def _follow(self, made: Tensor) -> None:
        if made.data_ptr() % 16:
            self.repeatable = False  # another time it may lie better, or worse
        position, identity = self._count, id(made)
        self._count += 1
        self._positions[identity] = position

        def free(_: Any) -> None:
            del self._positions[identity], self._living[position]
            self.steps.append(_Free(position))

        self._living[position] = ref(made, free)


def _record(tensors: list[Tensor], run: Callable[[], Any]) -> tuple[Any, _Recorded | Literal[False]]:
    """What it returns, and the program that repeats it, False if none does."""
    recording.tape = tape = Tape(tensors)
    try:
        with tape:
            result = run()
        steps = tuple(tape.steps)
        if not tape.repeatable or tape.device is None:
            return result, False
        return result, _Recorded(tape.device, steps, _returning(tape.place(result)))
    except _NotRepeatable:
        return result, False
    finally:
        recording.tape = None
        tape.close()


_EMPTY = (torch.ops.aten.empty.memory_format, torch.ops.aten.new_empty.default)
_DYNAMIC = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.nondeterministic_seeded}
