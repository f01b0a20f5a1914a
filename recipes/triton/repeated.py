"""What a function did, prepared for repetition: allocations, operations of torch and launches, in their order.

`prepare` takes what a tape recorded, with positions in place of tensors: of the arguments, then of all that was made.
It writes a Python function with a line for each of them, which takes the host least. In that, t3 is a tensor and a3 its
address; constants are its globals:

    def again(tensors, addresses, stream):
        [t0, t1] = tensors
        [a0, a1] = addresses
        e0 = c0 if c1() else c2            # what allocates on this device, see `_Source.allocator`
        t2 = e0(c3, c4, c5)                # shape, strides, dtype
        a2 = t2.data_ptr()
        c6(132, 1, 1, stream, ..., c14[a0], a1 + 512, a2)      # Triton's C function; c14 holds descriptors by address
        del t2
        return c15(c16, (t1, None))        # a NamedTuple: its class, and what it holds

What the host need not repeat is left out:

    views                    of which launches alone need the address: it follows from that of their base
    small temporary memory   of which launches alone need the address: parts of one buffer, those of zeros first, which
                             lives until the last of them is freed; zeroed memory may be larger. A launch before them
                             may make that 0 (`zeroes` of a `Launch`)
    other temporary memory   of which launches alone need the address: one block for what is allocated, and freed,
                             together
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from copy import copy
from functools import partial
from typing import Any, NamedTuple

import torch

from recipes.triton.gates import TensorDescriptor, nvidia, why_not_repeated

MOST_ADDRESSES = 256  # of an argument of a launch, for which descriptors are kept
SMALL, SMALL_ZEROED = 2**16, 2**22  # bytes of temporary memory that may be part of a buffer
TOGETHER = 2**24  # bytes of other temporary memory that may be part of a block: larger ones may find no place
_ALIGNMENT = 256  # bytes, of such parts

# What code by torch.compile allocates with on the current GPU: shape, strides, dtype. It takes a quarter of the time of
# torch.empty, which stands in where torch has no such function, and where it has to fill memory.
_empty_on_gpu: Callable[..., Any] | None = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
_fills_memory = torch._C._get_deterministic_algorithms

# The classes of TMA descriptors. Gluon has a class of its own, which is added where Gluon is imported.
DESCRIPTORS: set[type] = {TensorDescriptor}

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
    """torch.empty or torch.zeros, of contiguous memory. zeroed: how many bytes are 0, from the first on"""

    position: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    zeroed: int

    @property
    def nbytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


class Operated(NamedTuple):
    """Any other operation of torch.

    made: the positions of what it made, none if it changed its arguments
    several: whether it returned a sequence
    views_of: if it made views, the position of the base of each, and how many bytes behind that it begins
    """

    operation: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: tuple[int, ...]
    several: bool = False
    views_of: tuple[tuple[int, int], ...] | None = None


class Zeroes(NamedTuple):
    """Of a kernel of one program, which makes memory 0 by as many more as that needs.

    pairs: which of its arguments are addresses and numbers of words of 8 bytes, 0 outside of repetitions; those behind
        the first are at most what one program makes 0, of_program
    """

    pairs: tuple[tuple[int, int], ...]
    of_program: int


class Launched(NamedTuple):
    """A launch. args: `TensorPosition` for tensors, and descriptors over `At`; bases: the tensors of descriptors;
    zeroes: as of a `Launch`."""

    compiled: Any
    grid: Grid
    args: tuple[Any, ...]
    bases: tuple[TensorPosition, ...]
    zeroes: Zeroes | None = None


class ZerosLaunch(NamedTuple):
    """What makes memory 0 in place of torch.zeros. args: of the kernel, behind the memory's address."""

    compiled: Any
    grid: Grid
    args: tuple[Any, ...]


class Written(NamedTuple):
    """Kernels wrote into these arguments of the function, so autograd increments their versions."""

    positions: tuple[int, ...]


class Freed(NamedTuple):
    """The function freed this tensor."""

    position: int


Seen = Allocated | Operated | Launched | Written | Freed


# -------------------------------------------------------------------------------------------------------- preparation


class Repeated(NamedTuple):
    """A function's actions on this device.

    again: repeats them, (tensors, addresses, stream) -> what the function returned; source: its text
    """

    device: int
    again: Callable[[Sequence[Any], Sequence[int], int], Any]
    source: str


def prepare(
    device: int,
    num_arguments: int,
    seen: Sequence[Seen],
    result: object,
    zeros: Callable[[torch.device, int], ZerosLaunch | None] | None = None,
) -> Repeated:
    """The repetition of what was `seen`. result: what was returned, with `TensorPosition`s for tensors. zeros: what
    launch makes so many bytes 0 on a GPU, if one does.

    Raises NotRepeatable for launches that cannot be repeated.
    """
    memory = _Memory(num_arguments, seen, _needed(seen, result))
    source = _Source(num_arguments, seen, memory, zeros or (lambda device, nbytes: None))
    first, seen = _zeroed_by_launch(seen, memory)
    for memory_of_parts in first:
        source.allocate(memory_of_parts, memory_of_parts.position)
    for step in seen:
        if isinstance(step, Allocated):
            if memory.makes(step.position):
                source.allocate(step, memory.at[step.position][0])
            elif step.position in memory.blocks:
                source.allocate(memory.blocks[step.position], memory.blocks[step.position].position)
        elif isinstance(step, Operated):
            if not step.made or memory.makes(step.made[0]):
                source.operate(step)
        elif isinstance(step, Launched):
            source.launch(step)
        elif isinstance(step, Written):
            source.count(step)
        else:
            number = memory.freed(step.position)
            if number is not None:
                source.lines.append(f"del t{number}")
    return source.compiled(device, result)


def _needed(seen: Sequence[Seen], result: object) -> set[int]:
    """The positions whose tensor is needed, not only its address."""
    needed = set(_positions(result))
    for step in reversed(seen):
        if isinstance(step, Operated) and (step.views_of is None or not needed.isdisjoint(step.made)):
            needed.update(_positions((step.args, tuple(step.kwargs.values()))))
    return needed


def _zeroed_by_launch(seen: Sequence[Seen], memory: _Memory) -> tuple[Sequence[Allocated], Sequence[Seen]]:
    """What is allocated first, and what is done then. A launch that may make memory 0 does so with that of the buffer
    and of small memory, if what needs it comes behind: they are allocated first, as any other memory."""
    at = next((at for at, step in enumerate(seen) if isinstance(step, Launched) and step.zeroes is not None), None)
    buffers = [] if memory.buffer is None else [memory.buffer]
    if at is None:
        return buffers, seen
    launch: Any = seen[at]
    pairs, most = launch.zeroes.pairs, 8 * launch.zeroes.of_program
    before = {memory.at[step.position][0] for step in seen[:at] if isinstance(step, Allocated) and step.zeroed}
    behind: dict[int, Allocated] = {}  # what of each tensor comes first
    for step in seen[at:]:
        if isinstance(step, Allocated) and step.zeroed and _is_compiled_for(step.device):
            behind.setdefault(memory.at[step.position][0], step)
    shared = [buffer for buffer in buffers if buffer.position in behind.keys() - before]
    alone = [step._replace(position=number) for number, step in behind.items() if memory.makes(step.position)]
    chosen = [*shared, *(step for step in alone if step.nbytes % 8 == 0 and 0 < step.nbytes <= most)][: len(pairs)]
    args = list(launch.args)
    for (pointer, words), step in zip(pairs, chosen, strict=False):
        args[pointer], args[words] = TensorPosition(behind[step.position].position), step.zeroed // 8
    programs = 1 + max((-(-step.zeroed // most) for step in chosen), default=0)
    first = [] if shared else buffers
    first += [step._replace(zeroed=0) for step in chosen]
    made = {behind[step.position] for step in chosen if memory.makes(behind[step.position].position)}
    done = [*seen[:at], launch._replace(grid=(programs, 1, 1), args=tuple(args)), *seen[at + 1 :]]
    return first, [step for step in done if not (isinstance(step, Allocated) and step in made)]


def _together(seen: Sequence[Seen], needed: set[int], parts: set[int]) -> list[list[Allocated]]:
    """The other temporary memory whose tensors nothing needs, in groups: nothing is freed between the allocations of a
    group, and nothing allocated between its ends. So one block in its place needs no more memory.

    parts: the positions that lie in the buffer, which is allocated first, and freed with the last of them
    """
    root: dict[int, int] = {}  # of views
    ends: dict[int, int] = {}
    for at, step in enumerate(seen):
        if isinstance(step, Operated) and step.views_of is not None:
            root |= {made: root.get(base, base) for made, (base, _) in zip(step.made, step.views_of, strict=True)}
        elif isinstance(step, Freed):
            ends[root.get(step.position, step.position)] = at
    given_up = {step.position for step in seen if isinstance(step, Freed)}  # and not views of it alone
    ends = {position: at for position, at in ends.items() if position in given_up}
    last_part = max((ends.get(part, len(seen)) for part in parts), default=len(seen))
    operated = [at for at, step in enumerate(seen) if isinstance(step, Operated) and step.views_of is None]
    freed = sorted([*operated, last_part, *(at for position, at in ends.items() if position not in parts)])
    new = (at for at, step in enumerate(seen) if isinstance(step, Allocated) and step.position not in parts)
    allocated = sorted([*operated, *new])
    groups: list[tuple[list[Allocated], int, set[int]]] = []
    for at, step in enumerate(seen):
        if not isinstance(step, Allocated) or step.zeroed or step.position in needed:
            continue
        if not SMALL < step.nbytes <= TOGETHER:
            continue
        end = ends.get(step.position, len(seen))
        for members, begin, last in groups:
            if not _any_between(freed, begin, at) and not _any_between(allocated, min(*last, end), max(*last, end)):
                members.append(step)
                last.add(end)
                break
        else:
            groups.append(([step], at, {end}))
    return [members for members, _, _ in groups]


def _any_between(places: Sequence[int], begin: int, end: int) -> bool:
    return bisect_right(places, begin) < bisect_left(places, end)


class _Memory:
    """Where in the repetition's tensors each recorded position lies.

    at: position -> (number of a tensor of the repetition, offset in bytes)
    buffer: which small temporary memory shares; blocks: the same of other temporary memory, by the position of what is
    allocated first. Their positions are such numbers
    """

    def __init__(self, num_arguments: int, seen: Sequence[Seen], needed: set[int]) -> None:
        self.at = {position: (position, 0) for position in range(num_arguments)}
        small = [s for s in seen if isinstance(s, Allocated) and s.nbytes <= (SMALL_ZEROED if s.zeroed else SMALL)]
        small = [step for step in small if step.position not in needed]
        small.sort(key=lambda step: not step.zeroed)
        small = small if len(small) > 1 else []
        self.buffer = self._shared(small, num_arguments) if small else None
        self.blocks: dict[int, Allocated] = {}
        count = num_arguments + (self.buffer is not None)
        for group in _together(seen, needed, {step.position for step in small}):
            if len(group) > 1:
                self.blocks[group[0].position] = self._shared(group, count)
                count += 1
        self._made: set[int] = set()  # the positions that have a tensor of their own
        for step in seen:
            if isinstance(step, Operated) and step.views_of is not None and needed.isdisjoint(step.made):
                for position, (base, behind) in zip(step.made, step.views_of, strict=True):
                    number, offset = self.at[base]
                    self.at[position] = number, offset + behind
                continue
            made = (step.position,) if isinstance(step, Allocated) else step.made if isinstance(step, Operated) else ()
            for position in made:
                if position not in self.at:
                    self.at[position] = count, 0
                    self._made.add(position)
                    count += 1
        own = {self.at[position][0] for position in self._made}
        own |= {block.position for block in (self.buffer, *self.blocks.values()) if block is not None}
        self._users = Counter(number for number, _ in self.at.values() if number in own)

    def _shared(self, parts: Sequence[Allocated], number: int) -> Allocated:
        """The buffer in which these lie now, those of zeros first: the tensor of this number."""
        zeroed = end = 0
        for step in parts:
            self.at[step.position] = number, end
            end += -(-step.nbytes // _ALIGNMENT) * _ALIGNMENT
            zeroed = end if step.zeroed else zeroed
        return Allocated(number, (end,), (1,), torch.uint8, parts[0].device, zeroed)

    def makes(self, position: int) -> bool:
        """Whether the position has a tensor of its own."""
        return position in self._made

    def freed(self, position: int) -> int | None:
        """Note that the position is freed. Returns the number of its tensor if nothing else lies in that, else None."""
        number, _ = self.at[position]
        self._users[number] -= 1
        return number if self._users[number] == 0 else None


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


# ---------------------------------------------------------------------------------------------------------- the source


class _Source:
    """The lines of the function, and its constants by name."""

    def __init__(
        self,
        num_arguments: int,
        seen: Sequence[Seen],
        memory: _Memory,
        zeros: Callable[[torch.device, int], ZerosLaunch | None],
    ) -> None:
        self.memory = memory
        self.zeros = zeros
        self.constants: dict[str, object] = {}
        self.allocators: dict[torch.device, str] = {}
        launches = (step for step in seen if isinstance(step, Launched))
        self.addressed = {memory.at[place][0] for step in launches for place in _positions((step.args, step.bases))}
        zeroed = (step for step in seen if isinstance(step, Allocated) and step.zeroed)
        self.addressed |= {memory.at[step.position][0] for step in zeroed}
        arguments = range(num_arguments)
        self.lines = [f"{_named('t', arguments)} = tensors", f"{_named('a', arguments)} = addresses"]

    def compiled(self, device: int, result: object) -> Repeated:
        body = [*self.lines, f"return {self._filled(result, self._tensor)}"]
        source = "def again(tensors, addresses, stream):\n" + "".join(f"    {line}\n" for line in body)
        exec(compile(source, "<repeated>", "exec"), self.constants)
        again: Any = self.constants.pop("again")  # a function in its own globals would outlive its last user
        return Repeated(device, again, source)

    def allocate(self, step: Allocated, number: int) -> None:
        shape, dtype = self._constant(step.shape), self._constant(step.dtype)
        zeros = None
        if step.zeroed and _is_compiled_for(step.device) and not _fills_memory():
            zeros = self.zeros(step.device, step.zeroed)
        if step.zeroed and zeros is None:
            made = f"{self._constant(torch.zeros)}({shape}, dtype={dtype}, device={self._constant(step.device)})"
        else:
            made = f"{self.allocator(step.device)}({shape}, {self._constant(step.strides)}, {dtype})"
        self.lines.append(f"t{number} = {made}")
        self._address(number)
        if zeros is not None:
            launch = Launched(zeros.compiled, zeros.grid, (TensorPosition(number), *zeros.args), ())
            self.launch(launch, at=lambda number: f"a{number}")

    def allocator(self, device: torch.device) -> str:
        """The name of what allocates uninitialised memory of this shape, with these strides, of this dtype."""
        name = self.allocators.get(device)
        if name is None:
            name = self.allocators[device] = f"e{len(self.allocators)}"
            chosen = self._constant(partial(_empty_strided, device))
            if _is_compiled_for(device):
                chosen += f" if {self._constant(_fills_memory)}() else {self._constant(_empty_on_gpu)}"
            self.lines.append(f"{name} = {chosen}")
        return name

    def operate(self, step: Operated) -> None:
        args = [self._filled(arg, self._tensor) for arg in step.args]
        args += [f"{name}={self._filled(arg, self._tensor)}" for name, arg in step.kwargs.items()]
        call = f"{self._constant(step.operation)}({', '.join(args)})"
        made = [self.memory.at[position][0] for position in step.made]
        if made:
            call = f"{_named('t', made) if step.several else f't{made[0]}'} = {call}"
        self.lines.append(call)
        for number in made:
            self._address(number)

    def launch(self, step: Launched, at: Callable[[int], str] | None = None) -> None:
        """at: of a position in its arguments, what is passed; by default its address."""
        function, first, args, apart = _call_arguments(step)
        bases = iter(step.bases)
        written = ["stream" if value is _STREAM else self._constant(value) for value in first]
        of_kernel = []
        for arg in args:
            if isinstance(arg, _Descriptors):
                of_kernel.append(f"{self._constant(arg)}[{self._at(next(bases).position)}]")
            else:
                of_kernel.append(self._filled(arg, at or self._at))
        together = f"[{', '.join(of_kernel)}]" if apart else ", ".join(of_kernel)
        self.lines.append(f"{self._constant(function)}({', '.join(written)}, {together})")

    def count(self, step: Written) -> None:
        tensors = [TensorPosition(position) for position in step.positions]
        count = self._constant(torch.autograd.graph.increment_version)
        self.lines.append(f"{count}({self._filled(tensors, self._tensor)})")

    def _tensor(self, position: int) -> str:
        return f"t{self.memory.at[position][0]}"

    def _at(self, position: int) -> str:
        number, offset = self.memory.at[position]
        return f"a{number} + {offset}" if offset else f"a{number}"

    def _address(self, number: int) -> None:
        if number in self.addressed:
            self.lines.append(f"a{number} = t{number}.data_ptr()")

    def _constant(self, value: object) -> str:
        if value is None or type(value) in (bool, int):
            return repr(value)
        name = f"c{len(self.constants)}"
        self.constants[name] = value
        return name

    def _filled(self, value: Any, fill: Callable[[int], str]) -> str:
        """An expression for the value with what `fill` writes for each position."""
        if type(value) is TensorPosition:
            return fill(value.position)
        if not has_places(value):
            return self._constant(value)
        if isinstance(value, RebuiltObject):
            return f"{self._constant(value.rebuild)}({self._filled(value.tensors, fill)})"
        items = ", ".join([self._filled(item, fill) for item in value])
        kind = type(value)
        if kind is tuple:
            return f"({items},)"
        if kind is list:
            return f"[{items}]"
        if hasattr(kind, "_fields"):  # past its own __new__, which is a function of Python
            return f"{self._constant(tuple.__new__)}({self._constant(kind)}, ({items},))"
        return f"{self._constant(kind)}([{items}])"


def _named(letter: str, numbers: Iterable[int]) -> str:
    """All of these as the target of an assignment."""
    return f"[{', '.join([f'{letter}{number}' for number in numbers])}]"


def _empty_strided(device: torch.device, shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(shape, strides, dtype=dtype, device=device)


def _is_compiled_for(device: torch.device) -> bool:
    """Whether `_empty_on_gpu` allocates there."""
    return device.type == "cuda" and _empty_on_gpu is not None


# ----------------------------------------------------------------------------------------------------------- launches

_STREAM = object()


class _CallArguments(NamedTuple):
    """The arguments of Triton's C function: `first`, then `args`, which are passed as one list if `apart`.

    first: constants, and `_STREAM`; args: constants, `_Descriptors`, `TensorPosition`s, and tuples with these
    """

    function: Any
    first: list[Any]
    args: list[Any]
    apart: bool


def _call_arguments(step: Launched) -> _CallArguments:
    run = step.compiled.run
    if why_not_repeated() or not isinstance(run, nvidia.CudaLauncher):
        raise NotRepeatable
    if run.global_scratch_size or run.profile_scratch_size or getattr(run, "gsan_enabled", False):
        raise NotRepeatable
    function, metas = run.launch, list[Any]()
    if inspect.isfunction(run.launch):  # it makes descriptors, and then calls the C function
        inside = inspect.getclosurevars(run.launch).nonlocals
        function, metas = inside["launcher"], list(inside["tensordesc_meta"] or ())
    how = step.compiled.function, run.launch_cooperative_grid, run.launch_pdl
    metadata = step.compiled.packed_metadata, None, None, None  # without metadata and hooks at the launch
    scratch = None, None
    # Since 3.7 Triton has one C function for all kernels, which takes their signature; 3.6 compiles one for each.
    apart = hasattr(run, "kernel_signature")
    first: list[Any] = [*step.grid, _STREAM, *how, *scratch, *metadata]
    if apart:
        first = [*step.grid, _STREAM, *how, *metadata, *scratch, run.arg_annotations, run.kernel_signature]
    args: list[Any] = []
    for arg in step.args:
        if type(arg) in DESCRIPTORS:
            descriptors = _Descriptors(arg, metas.pop(0) if metas else None)
            args += [descriptors, *descriptors.expanded[1:]]
        else:
            args.append(arg)
    return _CallArguments(function, first, args, apart)


class _Descriptors(dict[int, Any]):
    """The TMA descriptors of one argument, made by Triton, by address. expanded: what the C function takes for one."""

    def __init__(self, example: Any, meta: Any) -> None:
        if meta is None:
            raise NotRepeatable  # it is passed in another form
        self.example = copy(example)
        self.example.base = None
        # Triton 3.8 has a third parameter, on which nothing depends for CUDA.
        unused = len(inspect.signature(nvidia.make_tensordesc_arg).parameters) - 2
        self.about = meta, *[None] * unused
        self.expanded = self._made(example.base.data_ptr())

    def __missing__(self, address: int) -> Any:
        if len(self) >= MOST_ADDRESSES:
            self.clear()
        made = self[address] = self._made(address)[0]
        return made

    def _made(self, address: int) -> list[Any]:
        descriptor = copy(self.example)  # its own: other threads make theirs
        descriptor.base = At(address)
        return nvidia.make_tensordesc_arg(descriptor, *self.about)


class At:
    """Stands for the tensor at an address."""

    def __init__(self, address: int) -> None:
        self.address = address

    def data_ptr(self) -> int:
        return self.address
