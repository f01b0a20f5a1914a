"""What a function did, made ready to be done again: allocations, operations of torch and launches, in their order.

`prepare` takes what a tape saw, with positions in place of tensors: those of the arguments, then of all that was made.
What the host need not do again is left out:

    views                    of which launches alone need the address: it follows from that of their base
    small temporary memory   of which launches alone need the address: parts of one buffer, or of one that is zeroed
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from recipes.triton.gates import TensorDescriptor, nvidia, why_not_this_release

MOST_ADDRESSES = 256  # of an argument of a launch, for which descriptors are kept
SMALL = 2**16  # bytes of temporary memory that may be part of a buffer, which lives until the end
_ALIGNMENT = 256  # bytes, of such parts

# What a TMA descriptor may be. Gluon has a class of its own, which is added by whoever imports Gluon.
DESCRIPTORS: set[type] = {TensorDescriptor}

Action = Callable[[list[Any], list[int], int], None]  # of the tensors so far, their addresses, and the stream
Grid = tuple[int, ...]  # how many programs along each of three axes


class NotRepeatable(Exception):
    """Something that another call could not do again."""


class Place(NamedTuple):
    """Stands for a tensor, or its address."""

    position: int


class Container(NamedTuple):
    """Stands for an object that holds tensors: rebuild(tensors) makes it."""

    rebuild: Callable[[list[Any]], Any]
    tensors: tuple[Any, ...]


# ---------------------------------------------------------------------------------------------------- what a tape saw


class Allocated(NamedTuple):
    """torch.empty or torch.zeros, of contiguous memory."""

    position: int
    shape: tuple[int, ...]
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
    """args: with places for tensors, but descriptors over `At`; bases: the places of the descriptors' tensors."""

    compiled: Any
    grid: Grid
    args: tuple[Any, ...]
    bases: tuple[Place, ...]


class Written(NamedTuple):
    """Kernels wrote into these arguments of the function: autograd counts that."""

    positions: tuple[int, ...]


class Freed(NamedTuple):
    """The function gave this up."""

    position: int


Seen = Allocated | Operated | Launched | Written | Freed


# -------------------------------------------------------------------------------------------------------- preparation


class Repeated(NamedTuple):
    """What a function did on this device; result: what it returned, of the tensors that there are then."""

    device: int
    actions: tuple[Action, ...]
    result: Callable[[list[Any]], Any]


def prepare(device: int, num_arguments: int, seen: Sequence[Seen], result: Any) -> Repeated:
    """result: what was returned, with places. Raises NotRepeatable for launches that cannot be repeated."""
    needed = _needed(seen, result)
    memory = _Memory(num_arguments, seen, needed)
    actions: list[Action] = [_Allocate(buffer) for buffer in memory.buffers]
    for step in seen:
        if isinstance(step, Allocated):
            if memory.makes(step.position):
                actions.append(_Allocate(step))
        elif isinstance(step, Operated):
            if not step.made or memory.makes(step.made[0]):
                actions.append(_Operate(step, memory))
        elif isinstance(step, Launched):
            actions.append(_Launch(step, memory))
        elif isinstance(step, Written):
            actions.append(_Count(step))
        else:
            number = memory.freed(step.position)
            if number is not None and actions and isinstance(actions[-1], _Free):
                actions[-1].numbers.append(number)
            elif number is not None:
                actions.append(_Free(number))
    if actions and isinstance(actions[-1], _Free):
        del actions[-1]  # there nothing is kept any more
    return Repeated(device, tuple(actions), _returning(memory.numbered(result)))


def _needed(seen: Sequence[Seen], result: Any) -> set[int]:
    """The positions of which the tensor is needed, not the address alone."""
    needed = set(_positions(result))
    for step in reversed(seen):
        if isinstance(step, Operated) and (step.view_of is None or not needed.isdisjoint(step.made)):
            needed.update(_positions((step.args, tuple(step.kwargs.values()))))
    return needed


class _Memory:
    """Where the repeated run finds what had a position: in which of its tensors, how many bytes from the beginning.

    buffers: what small memory is part of
    """

    def __init__(self, num_arguments: int, seen: Sequence[Seen], needed: set[int]) -> None:
        self._at = {position: (position, 0) for position in range(num_arguments)}
        self.buffers: list[Allocated] = []
        for zeroed in (False, True):
            small = [s for s in seen if isinstance(s, Allocated) and s.zeroed == zeroed and s.nbytes <= SMALL]
            self._share([step for step in small if step.position not in needed], num_arguments + len(self.buffers))
        self._made: set[int] = set()  # the positions that have a tensor of their own
        count = num_arguments + len(self.buffers)
        for step in seen:
            if isinstance(step, Operated) and step.view_of is not None and needed.isdisjoint(step.made):
                number, offset = self._at[step.view_of[0]]
                self._at[step.made[0]] = number, offset + step.view_of[1]
                continue
            made = (step.position,) if isinstance(step, Allocated) else step.made if isinstance(step, Operated) else ()
            for position in made:
                if position not in self._at:
                    self._at[position] = count, 0
                    self._made.add(position)
                    count += 1
        own = {self._at[position][0] for position in self._made}
        self._users = Counter(number for number, _ in self._at.values() if number in own)

    def _share(self, small: Sequence[Allocated], number: int) -> None:
        """One buffer for these, as the tensor of this number."""
        if len(small) < 2:
            return
        end = 0
        for step in small:
            self._at[step.position] = number, end
            end += -(-step.nbytes // _ALIGNMENT) * _ALIGNMENT
        self.buffers.append(Allocated(-1, (end,), torch.uint8, small[0].device, small[0].zeroed))

    def makes(self, position: int) -> bool:
        """Whether this has a tensor of its own."""
        return position in self._made

    def freed(self, position: int) -> int | None:
        """The number of the tensor to be given up now that this is, if nothing else lies in it."""
        number, _ = self._at[position]
        self._users[number] -= 1
        return number if self._users[number] == 0 else None

    def address(self, place: Place) -> tuple[int, int]:
        """Of which tensor, and how many bytes behind its address."""
        return self._at[place.position]

    def numbered(self, value: Any) -> Any:
        """The value with the numbers of tensors in its places."""
        if type(value) is Place:
            return Place(self._at[value.position][0])
        if not isinstance(value, (tuple, list)) or not has_places(value):
            return value
        return _like(value, map(self.numbered, value))


def _positions(value: Any) -> Iterator[int]:
    if type(value) is Place:
        yield value.position
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _positions(item)


def has_places(value: Any) -> bool:
    """Whether there is something to be filled in."""
    if isinstance(value, (Place, Container)):
        return True
    return isinstance(value, (tuple, list)) and any(map(has_places, value))


def _like(value: Any, items: Any) -> Any:
    """A tuple, NamedTuple or list of the same class."""
    return getattr(type(value), "_make", type(value))(items)


def _returning(template: Any) -> Callable[[list[Any]], Any]:
    """Fills the tensors of these numbers into a copy of the template: a place, or a sequence or Container with some."""
    if type(template) is Place:
        return itemgetter(template.position)
    if isinstance(template, Container):
        rebuild, inner = template.rebuild, _returning(template.tensors)
        return lambda tensors: rebuild(inner(tensors))
    if not has_places(template):
        return lambda tensors: template
    make = getattr(type(template), "_make", type(template))
    items = list(template)
    filled = [(i, _returning(item)) for i, item in enumerate(items) if has_places(item)]

    def fill(tensors: list[Any]) -> Any:
        values = items.copy()
        for i, item in filled:
            values[i] = item(tensors)
        return make(values)

    return fill


# ----------------------------------------------------------------------------------------------------------- actions


class _Allocate:
    def __init__(self, step: Allocated) -> None:
        # torch parses a torch.Size more slowly than a tuple.
        self.shape, self.dtype, self.device = step.shape, step.dtype, step.device
        self.function = torch.zeros if step.zeroed else torch.empty

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        made = self.function(self.shape, dtype=self.dtype, device=self.device)
        tensors.append(made)
        addresses.append(made.data_ptr())


class _Operate:
    def __init__(self, step: Operated, memory: _Memory) -> None:
        self.operation, self.makes, self.several = step.operation, bool(step.made), step.several
        self.args = _returning(memory.numbered(step.args))
        self.names, self.values = tuple(step.kwargs), _returning(memory.numbered(tuple(step.kwargs.values())))

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        kwargs = dict(zip(self.names, self.values(tensors), strict=True))
        result = self.operation(*self.args(tensors), **kwargs)
        if self.makes:
            for made in result if self.several else (result,):
                tensors.append(made)
                addresses.append(made.data_ptr())


class _Free:
    def __init__(self, number: int) -> None:
        self.numbers = [number]

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        for number in self.numbers:
            tensors[number] = None


class _Count:
    def __init__(self, step: Written) -> None:
        self.positions = step.positions

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        torch.autograd.graph.increment_version([tensors[position] for position in self.positions])


class _Launch:
    """One launch, ready but for the addresses and the stream."""

    def __init__(self, step: Launched, memory: _Memory) -> None:
        run = step.compiled.run
        if why_not_this_release() or not isinstance(run, nvidia.CudaLauncher):
            raise NotRepeatable
        if run.global_scratch_size or run.profile_scratch_size:
            raise NotRepeatable
        self.launch = run.launch
        metas: list[Any] = []
        if inspect.isfunction(run.launch):  # it makes descriptors, and then calls the C function
            inside = inspect.getclosurevars(run.launch).nonlocals
            self.launch, metas = inside["launcher"], list(inside["tensordesc_meta"])
        how = step.compiled.function, run.launch_cooperative_grid, run.launch_pdl
        metadata = step.compiled.packed_metadata, None, None, None  # without metadata and hooks at the launch
        scratch = None, None
        # Triton 3.7 has one C function for all kernels, which takes their signature; Triton 3.6 compiles one for each.
        self.takes_signature = hasattr(run, "kernel_signature")
        first: list[Any] = [*step.grid, None, *how, *scratch, *metadata]
        if self.takes_signature:
            first = [*step.grid, None, *how, *metadata, *scratch, run.arg_annotations, run.kernel_signature]
        self.stream, self.begin = len(step.grid), len(first)
        self.args: list[Any] = first  # of the C function: what is said of the launch, and then the kernel's
        self.places: list[tuple[int, int, int]] = []  # which argument; of which tensor, how many bytes behind it
        self.descriptors: list[tuple[int, int, int, _Descriptors]] = []
        self.containers: list[tuple[int, Callable[[list[int]], Any]]] = []
        bases = iter(step.bases)
        for arg in step.args:
            at = len(self.args)
            if type(arg) in DESCRIPTORS:
                descriptors = _Descriptors(arg, metas.pop(0))
                self.descriptors.append((at, *memory.address(next(bases)), descriptors))
                self.args += descriptors.expanded
                continue
            if type(arg) is Place:
                self.places.append((at, *memory.address(arg)))
            elif has_places(arg):
                self.containers.append((at, _addresses(arg, memory)))
            self.args.append(arg)

    def __call__(self, tensors: list[Any], addresses: list[int], stream: int) -> None:
        args = self.args.copy()
        args[self.stream] = stream
        for at, number, offset in self.places:
            args[at] = addresses[number] + offset
        for at, number, offset, descriptors in self.descriptors:
            args[at] = descriptors[addresses[number] + offset]
        for at, container in self.containers:
            args[at] = container(addresses)
        if self.takes_signature:
            self.launch(*args[: self.begin], args[self.begin :])
        else:
            self.launch(*args)


def _addresses(value: Any, memory: _Memory) -> Callable[[list[int]], Any]:
    """Fills the addresses into a tuple with places."""
    if type(value) is Place:
        number, offset = memory.address(value)
        return lambda addresses: addresses[number] + offset
    if not has_places(value):
        return lambda addresses: value
    items = [_addresses(item, memory) for item in value]
    return lambda addresses: _like(value, [item(addresses) for item in items])


class _Descriptors(dict[int, Any]):
    """The TMA descriptors of one argument, made by Triton, by address. expanded: what the C function gets for one."""

    def __init__(self, example: Any, meta: Any) -> None:
        if meta is None:
            raise NotRepeatable  # it is passed in another form
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
        descriptor.base = At(address)
        return nvidia.make_tensordesc_arg(descriptor, self.meta)


class At:
    """Stands for the tensor at an address."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address
