"""What a function did, prepared for repetition: allocations, operations of torch and launches, in their order.

`prepare` takes what a tape recorded, with positions in place of tensors: of the arguments, then of all that was made.
What the host need not repeat is left out:

    views                    of which launches alone need the address: it follows from that of their base
    small temporary memory   of which launches alone need the address: parts of one buffer, or of one that is zeroed
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from recipes.triton.gates import TensorDescriptor, nvidia, why_not_this_release

MOST_ADDRESSES = 256  # of an argument of a launch, for which descriptors are kept
SMALL = 2**16  # bytes of temporary memory that may be part of a buffer, which lives until the end
_ALIGNMENT = 256  # bytes, of such parts

# What code by torch.compile allocates with on the current GPU: shape, strides, dtype. It takes a quarter of the time of
# torch.empty, which stands in where torch has no such function, and where it has to fill memory.
_empty_on_gpu: Callable[..., Any] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_fills_memory = torch._C._get_deterministic_algorithms

# The classes of TMA descriptors. Gluon has a class of its own, which is added where Gluon is imported.
DESCRIPTORS: set[type] = {TensorDescriptor}

Action = Callable[[list[Any], list[Any]], None]  # of the tensors so far, and the pool
Grid = tuple[int, ...]  # how many programs along each of three axes


class NotRepeatable(Exception):
    """Something that cannot be repeated in another call."""


class TensorPosition(NamedTuple):
    """Stands for a tensor, or its address."""

    position: int


class RebuiltObject(NamedTuple):
    """Stands for an object that holds tensors: rebuild(tensors) makes it."""

    rebuild: Callable[[list[Any]], Any]
    tensors: tuple[Any, ...]


# ------------------------------------------------------------------------------------------------ what a tape recorded


class Allocated(NamedTuple):
    """torch.empty or torch.zeros, of contiguous memory."""

    position: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    zeroed: bool

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Operated(NamedTuple):
    """Any other operation of torch.

    made: the positions of what it made, none if it changed its arguments
    several: whether it returned a sequence
    view_of: of a view, the position of its base, and how many bytes behind that it begins
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int, ...]
    several: bool = False
    view_of: tuple[int, int] | None = None


class Launched(NamedTuple):
    """A launch. args: `TensorPosition` for tensors, and descriptors over `At`; bases: the tensors of descriptors."""

    compiled: Any
    grid: Grid
    args: tuple[Any, ...]
    bases: tuple[TensorPosition, ...]


class Written(NamedTuple):
    """Kernels wrote into these arguments of the function, so autograd increments their versions."""

    positions: tuple[int, ...]


class Freed(NamedTuple):
    """The function freed this tensor."""

    position: int


Seen = Allocated | Operated | Launched | Written | Freed


# -------------------------------------------------------------------------------------------------------- preparation


class Repeated(NamedTuple):
    """A function's actions on this device. result: makes what it returned from the tensors that exist at the end.

    constants: the beginning of its pool. A pool is one list with the arguments of all launches, which each launch takes
    by position: the stream, constants, the addresses of the function's arguments, and what actions append.
    """

    device: int
    constants: list[Any]
    actions: tuple[Action, ...]
    result: Callable[[list[Any]], Any]

    def again(self, tensors: list[Any], addresses: list[int], stream: int) -> Any:
        """Repeat the actions with these arguments. Both lists are modified."""
        pool = self.constants + addresses
        pool[0] = stream
        for action in self.actions:
            action(tensors, pool)
        return self.result(tensors)


def prepare(device: int, num_arguments: int, seen: Sequence[Seen], result: object) -> Repeated:
    """The repetition of what was `seen`. result: what was returned, with `TensorPosition`s for tensors.

    Raises NotRepeatable for launches that cannot be repeated.
    """
    memory = _Memory(num_arguments, seen, _needed(seen, result))
    pool = _Pool(num_arguments, [_call_arguments(step, memory) for step in seen if isinstance(step, Launched)])
    actions: list[Action] = [_Offset(*views) for views in pool.of_arguments()]
    actions += [_Allocate(buffer, pool.made(buffer.position)) for buffer in memory.buffers]
    for step in seen:
        if isinstance(step, Allocated):
            if memory.makes(step.position):
                actions.append(_Allocate(step, pool.made(memory.at[step.position][0])))
        elif isinstance(step, Operated):
            if not step.made or memory.makes(step.made[0]):
                actions.append(_Operate(step, memory, [pool.made(memory.at[made][0]) for made in step.made]))
        elif isinstance(step, Launched):
            actions.append(pool.next_launch())
        elif isinstance(step, Written):
            actions.append(_Count(step))
        else:
            number = memory.freed(step.position)
            if number is not None and isinstance(actions[-1], _Free):
                actions[-1].numbers.append(number)
            elif number is not None:
                actions.append(_Free(number))
    if actions and isinstance(actions[-1], _Free):
        del actions[-1]  # at the end everything is freed anyway
    return Repeated(device, pool.constants, tuple(actions), _returning(memory.numbered(result)))


def _needed(seen: Sequence[Seen], result: object) -> set[int]:
    """The positions whose tensor is needed, not only its address."""
    needed = set(_positions(result))
    for step in reversed(seen):
        if isinstance(step, Operated) and (step.view_of is None or not needed.isdisjoint(step.made)):
            needed.update(_positions((step.args, tuple(step.kwargs.values()))))
    return needed


class _Memory:
    """Where in the repetition's tensors each recorded position lies.

    at: position -> (number of a tensor of the repetition, offset in bytes)
    buffers: which small temporary memory shares; their positions are such numbers
    """

    def __init__(self, num_arguments: int, seen: Sequence[Seen], needed: set[int]) -> None:
        self.at = {position: (position, 0) for position in range(num_arguments)}
        self.buffers: list[Allocated] = []
        for zeroed in (False, True):
            small = [s for s in seen if isinstance(s, Allocated) and s.zeroed == zeroed and s.nbytes <= SMALL]
            self._share([step for step in small if step.position not in needed], num_arguments + len(self.buffers))
        self._made: set[int] = set()  # the positions that have a tensor of their own
        count = num_arguments + len(self.buffers)
        for step in seen:
            if isinstance(step, Operated) and step.view_of is not None and needed.isdisjoint(step.made):
                number, offset = self.at[step.view_of[0]]
                self.at[step.made[0]] = number, offset + step.view_of[1]
                continue
            made = (step.position,) if isinstance(step, Allocated) else step.made if isinstance(step, Operated) else ()
            for position in made:
                if position not in self.at:
                    self.at[position] = count, 0
                    self._made.add(position)
                    count += 1
        own = {self.at[position][0] for position in self._made}
        self._users = Counter(number for number, _ in self.at.values() if number in own)

    def _share(self, small: Sequence[Allocated], number: int) -> None:
        """Put these into one buffer, the tensor of this number."""
        if len(small) < 2:
            return
        end = 0
        for step in small:
            self.at[step.position] = number, end
            end += -(-step.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.buffers.append(Allocated(number, (end,), (1,), torch.uint8, small[0].device, small[0].zeroed))

    def makes(self, position: int) -> bool:
        """Whether the position has a tensor of its own."""
        return position in self._made

    def freed(self, position: int) -> int | None:
        """Note that the position is freed. Returns the number of its tensor if nothing else lies in that, else None."""
        number, _ = self.at[position]
        self._users[number] -= 1
        return number if self._users[number] == 0 else None

    def numbered(self, value: object) -> Any:
        """The value with the numbers of tensors in place of positions."""
        if type(value) is TensorPosition:
            return TensorPosition(self.at[value.position][0])
        if not isinstance(value, (tuple, list)) or not has_places(value):
            return value
        return _like(value, map(self.numbered, value))


def _positions(value: object) -> Iterator[int]:
    if type(value) is TensorPosition:
        yield value.position
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _positions(item)


def has_places(value: object) -> bool:
    """Whether it contains a `TensorPosition` or a `RebuiltObject`."""
    if isinstance(value, (TensorPosition, RebuiltObject)):
        return True
    return isinstance(value, (tuple, list)) and any(map(has_places, value))


def _like(value: Any, items: Any) -> Any:
    """The items as a tuple, NamedTuple or list of the value's class."""
    return getattr(type(value), "_make", type(value))(items)


def _returning(template: Any) -> Callable[[list[Any]], Any]:
    """A function that fills tensors into a copy of the template: a position, or what holds some."""
    if type(template) is TensorPosition:
        return itemgetter(template.position)
    if isinstance(template, RebuiltObject):
        rebuild, inner = template.rebuild, _returning(template.tensors)
        return lambda tensors: rebuild(inner(tensors))
    if not has_places(template):
        return lambda tensors: template
    if type(template) is tuple and len(template) > 1 and all(type(item) is TensorPosition for item in template):
        return itemgetter(*[item.position for item in template])
    make = getattr(type(template), "_make", type(template))
    items = list(template)
    filled = [(i, _returning(item)) for i, item in enumerate(items) if has_places(item)]

    def fill(tensors: list[Any]) -> Any:
        values = items.copy()
        for i, item in filled:
            values[i] = item(tensors)
        return make(values)

    return fill


# -------------------------------------------------------------------------------------------------------- launches


class _Address(NamedTuple):
    """The address that a launch receives: `offset` bytes into the tensor of this number."""

    number: int
    offset: int


class _CallArguments(NamedTuple):
    """The arguments of Triton's C function: `first`, then `args`, which are passed as one list if `apart`.

    Both hold constants, `_Address`es, `_Descriptors`, and tuples with addresses.
    """

    function: Any
    first: list[Any]
    args: list[Any]
    apart: bool


def _call_arguments(step: Launched, memory: _Memory) -> _CallArguments:
    run = step.compiled.run
    if why_not_this_release() or not isinstance(run, nvidia.CudaLauncher):
        raise NotRepeatable
    if run.global_scratch_size or run.profile_scratch_size:
        raise NotRepeatable
    function, metas = run.launch, list[Any]()
    if inspect.isfunction(run.launch):  # it makes descriptors, and then calls the C function
        inside = inspect.getclosurevars(run.launch).nonlocals
        function, metas = inside["launcher"], list(inside["tensordesc_meta"])
    how = step.compiled.function, run.launch_cooperative_grid, run.launch_pdl
    metadata = step.compiled.packed_metadata, None, None, None  # without metadata and hooks at the launch
    scratch = None, None
    # Triton 3.7 has one C function for all kernels, which takes their signature; Triton 3.6 compiles one for each.
    apart = hasattr(run, "kernel_signature")
    first: list[Any] = [*step.grid, _STREAM, *how, *scratch, *metadata]
    if apart:
        first = [*step.grid, _STREAM, *how, *metadata, *scratch, run.arg_annotations, run.kernel_signature]
    args: list[Any] = []
    bases = iter(step.bases)
    for arg in step.args:
        if type(arg) in DESCRIPTORS:
            descriptors = _Descriptors(arg, metas.pop(0), _Address(*memory.at[next(bases).position]))
            args += [descriptors, *descriptors.expanded[1:]]
        else:
            args.append(_addressed(arg, memory))
    return _CallArguments(function, first, args, apart)


def _addressed(value: Any, memory: _Memory) -> Any:
    if type(value) is TensorPosition:
        return _Address(*memory.at[value.position])
    return _like(value, [_addressed(item, memory) for item in value]) if has_places(value) else value


def _addresses(value: object) -> Iterator[_Address]:
    if type(value) is _Address:
        yield value
    elif isinstance(value, _Descriptors):
        yield value.at
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _addresses(item)


class _Descriptors(dict[int, Any]):
    """The TMA descriptors of one argument, made by Triton, by address. expanded: what the C function takes for one."""

    def __init__(self, example: Any, meta: Any, at: _Address) -> None:
        if meta is None:
            raise NotRepeatable  # it is passed in another form
        self.example, self.meta, self.at = copy(example), meta, at
        self.example.base = None
        self.expanded = self._made(example.base.data_ptr())

    def __missing__(self, address: int) -> Any:
        if len(self) >= MOST_ADDRESSES:
            self.clear()
        made = self[address] = self._made(address)[0]
        return made

    def _made(self, address: int) -> list[Any]:
        descriptor = copy(self.example)  # its own: other threads make theirs
        descriptor.base = At(address)
        return nvidia.make_tensordesc_arg(descriptor, self.meta)


class At:
    """Stands for the tensor at an address."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address


class _Pool:
    """The positions of launch arguments in the pool, as it grows while actions are prepared.

    constants: its beginning, the stream first
    """

    def __init__(self, num_arguments: int, launches: Sequence[_CallArguments]) -> None:
        self._launches = iter(launches)
        self.constants: list[Any] = [None]
        self._positions: dict[_Address, int] = {}
        self._of_constants: dict[int, int] = {}  # by their identity: the launches hold them
        self._offsets: dict[int, list[int]] = {}  # of each tensor, that launches need
        for launch in launches:
            for value in (*launch.first, *launch.args):
                found = set(_addresses(value))
                for number, offset in found:
                    if offset and offset not in self._offsets.setdefault(number, []):
                        self._offsets[number].append(offset)
                if not found and value is not _STREAM and id(value) not in self._of_constants:
                    self._of_constants[id(value)] = len(self.constants)
                    self.constants.append(value)
        self._count = len(self.constants)
        for number in range(num_arguments):
            self._append(_Address(number, 0))

    def _append(self, address: _Address | None) -> int:
        if address is not None:
            self._positions[address] = self._count
        self._count += 1
        return self._count - 1

    def of_arguments(self) -> Iterator[tuple[int, list[int]]]:
        """(position of an argument's address, offsets in bytes of its views), for arguments with views."""
        for number, offsets in self._offsets.items():
            if _Address(number, 0) in self._positions:
                for offset in offsets:
                    self._append(_Address(number, offset))
                yield self._positions[_Address(number, 0)], offsets

    def made(self, number: int) -> list[int]:
        """Append the tensor's address, and those of its views. Returns the offsets of these in bytes."""
        offsets = self._offsets.get(number, [])
        for offset in (0, *offsets):
            self._append(_Address(number, offset))
        return offsets

    def next_launch(self) -> _LaunchAgain:
        launch = next(self._launches)
        appended: list[Callable[[list[Any]], Any]] = []
        first = [self._position(value, appended) for value in launch.first]
        args = [self._position(value, appended) for value in launch.args]
        return _LaunchAgain(launch.function, appended, first, args, launch.apart)

    def _position(self, value: object, appended: list[Callable[[list[Any]], Any]]) -> int:
        if value is _STREAM:
            return 0
        if type(value) is _Address:
            return self._positions[value]
        if isinstance(value, _Descriptors):
            appended.append(_look_up(value, self._positions[value.at]))
            return self._append(None)
        if next(_addresses(value), None) is not None:
            appended.append(self._filled(value))
            return self._append(None)
        return self._of_constants[id(value)]

    def _filled(self, value: Any) -> Callable[[list[Any]], Any]:
        if type(value) is _Address:
            return itemgetter(self._positions[value])
        if next(_addresses(value), None) is None:
            return lambda pool: value
        items = [self._filled(item) for item in value]
        return lambda pool: _like(value, [item(pool) for item in items])


_STREAM = object()


def _look_up(descriptors: _Descriptors, at: int) -> Callable[[list[Any]], Any]:
    return lambda pool: descriptors[pool[at]]


# ----------------------------------------------------------------------------------------------------------- actions


class _Offset:
    """Append addresses at offsets from one that is in the pool."""

    def __init__(self, at: int, offsets: list[int]) -> None:
        self.at, self.offsets = at, offsets

    def __call__(self, tensors: list[Any], pool: list[Any]) -> None:
        address = pool[self.at]
        for offset in self.offsets:
            pool.append(address + offset)


class _Allocate:
    """offsets: of views, that launches need"""

    def __init__(self, step: Allocated, offsets: list[int]) -> None:
        torchs = torch.zeros if step.zeroed else torch.empty
        self.function = self.filling = partial(torchs, step.shape, dtype=step.dtype, device=step.device)
        self.offsets = offsets
        if not step.zeroed and step.device.type == "cuda" and _empty_on_gpu is not None:
            self.function = partial(_empty_on_gpu, step.shape, step.strides, step.dtype)

    def __call__(self, tensors: list[Any], pool: list[Any]) -> None:
        made = self.filling() if _fills_memory() else self.function()
        tensors.append(made)
        address = made.data_ptr()
        pool.append(address)
        for offset in self.offsets:
            pool.append(address + offset)


class _Operate:
    """offsets: of views of what it makes, that launches need"""

    def __init__(self, step: Operated, memory: _Memory, offsets: list[list[int]]) -> None:
        self.operation, self.offsets, self.several = step.operation, offsets, step.several
        self.args = _returning(memory.numbered(step.args))
        self.names, self.values = tuple(step.kwargs), _returning(memory.numbered(tuple(step.kwargs.values())))

    def __call__(self, tensors: list[Any], pool: list[Any]) -> None:
        kwargs = dict(zip(self.names, self.values(tensors), strict=True))
        result = self.operation(*self.args(tensors), **kwargs)
        if not self.offsets:
            return
        for made, offsets in zip(result if self.several else (result,), self.offsets, strict=True):
            tensors.append(made)
            address = made.data_ptr()
            pool.append(address)
            for offset in offsets:
                pool.append(address + offset)


class _Free:
    def __init__(self, number: int) -> None:
        self.numbers = [number]

    def __call__(self, tensors: list[Any], pool: list[Any]) -> None:
        for number in self.numbers:
            tensors[number] = None


class _Count:
    def __init__(self, step: Written) -> None:
        self.positions = step.positions

    def __call__(self, tensors: list[Any], pool: list[Any]) -> None:
        torch.autograd.graph.increment_version([tensors[position] for position in self.positions])


class _LaunchAgain:
    """Launch. appended: makes what the pool lacks for it; first, args: positions in the pool of its arguments."""

    def __init__(
        self, function: Any, appended: list[Callable[[list[Any]], Any]], first: list[int], args: list[int], apart: bool
    ) -> None:
        self.function, self.appended = function, appended
        self.first, self.args = itemgetter(*first, *(() if apart else args)), args if apart else None

    def __call__(self, tensors: list[Any], pool: list[Any]) -> None:
        for value in self.appended:
            pool.append(value(pool))
        if self.args is None:
            self.function(*self.first(pool))
        else:
            self.function(*self.first(pool), [pool[at] for at in self.args])
