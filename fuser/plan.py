"""Replace basic operations by fused ones: patterns as data, one matcher, and a reason for every refusal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from fused import FUSIONS
from ops.runner.operation import BasicOperation, FusedOperation, Optional, Several
from ops.runner.program import Plan, PlannedOperation, Refusal
from recipes.arguments import as_integer
from recipes.request import PlanRequest

Fusion = type[FusedOperation]

# passes -> the methods that they run
_METHODS: Mapping[str, Sequence[str]] = {
    "joint": ("fuser_forward", "fuser_backward"),
    "forward": ("fuser_forward",),
    "backward": ("fuser_backward",),
}

_registered: list[Registration] = []
_version = 0


class Registration:
    """The handle of a registered fusion. `unregister()` removes it; so does leaving it as a context manager.

    It is entered while the fusion is registered, so once (RuntimeError).
    """

    def __init__(self, fusion: Fusion) -> None:
        self.fusion = fusion

    def unregister(self) -> None:
        """Remove the fusion. A second call does nothing."""
        global _version
        if self in _registered:
            _registered.remove(self)
            _version += 1

    def __enter__(self) -> Registration:
        if self not in _registered:
            raise RuntimeError(
                f"{self.fusion.__name__} is no longer registered. Call register_fusion again and enter its handle."
            )
        return self

    def __exit__(self, *exception: object) -> None:
        self.unregister()


def register_fusion(fusion: Fusion, *, before: Fusion | None = None) -> Registration:
    """Let every Sequential use this fusion.

    Registered fusions are tried before the built-in ones, the latest first. With `before`, the new one is tried just
    before that registered fusion instead. Returns a handle that unregisters it, also as a context manager.

    Raises TypeError for anything but a FusedOperation class with a pattern and the methods of its passes, ValueError if
    the fusion is already registered or `before` is not.
    """
    global _version
    check_fusion_class(fusion)
    registered = [registration.fusion for registration in _registered]
    if fusion in registered:
        raise ValueError(f"{fusion.__name__} is registered already. Unregister it first, with the handle you got.")
    if before is not None:
        check_fusion_class(before)
        if before not in registered:
            names = ", ".join(f.__name__ for f in registered) or "none"
            raise ValueError(f"before={before.__name__} is not a registered fusion. Registered: {names}.")
    registration = Registration(fusion)
    _registered.insert(registered.index(before) if before else 0, registration)
    _version += 1
    return registration


def check_fusion_class(fusion: object) -> None:
    """Raise TypeError unless `fusion` is a FusedOperation class with a usable pattern and the methods of its passes."""
    if not (isinstance(fusion, type) and issubclass(fusion, FusedOperation)):
        raise TypeError(f"{fusion!r} is not a fusion. Give a subclass of FusedOperation (the class, not an instance).")
    name = fusion.__name__
    if not isinstance(fusion.pattern, tuple | list) or isinstance(fusion.pattern, Optional | Several):
        raise TypeError(f"{name}.pattern is {fusion.pattern!r}, but must be a tuple. Of one member, write (member,).")
    for member in fusion.pattern:
        if isinstance(member, Several) and as_integer(f"{name}.pattern: at_least", member.at_least) < 0:
            raise TypeError(f"{name}.pattern holds {member!r}. Give at_least=0, or how many must be there.")
        if not _alternatives(member):
            raise TypeError(f"{name}.pattern holds {member!r}, which no operation fits. Name the classes that do.")
        for kind in _alternatives(member):
            if not (isinstance(kind, type) and issubclass(kind, BasicOperation)):
                raise TypeError(f"{name}.pattern holds {kind!r}, which is not a BasicOperation class.")
    if not any(_least(member) for member in fusion.pattern):
        raise TypeError(f"{name}.pattern names no operation that must be there. Give it a tuple of classes.")
    as_integer(f"{name}.fewest", fusion.fewest)
    if fusion.passes not in _METHODS:
        raise TypeError(f"{name}.passes is {fusion.passes!r}. It must be 'joint', 'forward' or 'backward'.")
    for method in _METHODS[fusion.passes]:
        if getattr(fusion, method) is getattr(FusedOperation, method):
            raise TypeError(f"{name} has passes={fusion.passes!r}, but no {method}. Define it, or give other passes.")


def fusions_version() -> int:
    """A counter that increases with every registration and unregistration; part of each PlanRequest."""
    return _version


def registered_fusions() -> tuple[str, ...]:
    """The names of the registered fusions, in the order in which they are tried."""
    return tuple([registration.fusion.__qualname__ for registration in _registered])


class FusionPlanner:
    """Makes plans with the registered and built-in fusions, or only with `fusions` if they are given.

    Raises TypeError for fusions that are no sequence of classes that `check_fusion_class` takes.
    """

    def __init__(self, fusions: Sequence[Fusion] | None = None) -> None:
        if fusions is not None:
            if not isinstance(fusions, Sequence):
                raise TypeError(f"fusions is {fusions!r}, but must be a sequence of classes. Of one, write (F,).")
            for fusion in fusions:
                check_fusion_class(fusion)
        self.fusions = None if fusions is None else tuple(fusions)

    def __call__(self, operations: Sequence[BasicOperation], request: PlanRequest) -> Plan:
        fusions = self.fusions
        if fusions is None:
            fusions = (*(registration.fusion for registration in _registered), *FUSIONS)
        return make_plan(operations, request, fusions)


def make_plan(operations: Sequence[BasicOperation], request: PlanRequest, fusions: Sequence[Fusion]) -> Plan:
    """Apply the fusions to the operations: joint ones first, then forward and backward ones, in the given order.

    Each fusion scans from left to right and replaces the operations that it matches, so matches do not overlap.
    """
    basic = [PlannedOperation(operation, (index,), False) for index, operation in enumerate(operations)]
    refusals: list[Refusal] = []

    def fold(steps: list[PlannedOperation], passes: str) -> list[PlannedOperation]:
        for fusion in fusions:
            if fusion.passes == passes:
                steps = _apply(fusion, steps, request, refusals)
        return steps

    joint = fold(basic, "joint")
    return Plan(tuple(fold(joint, "forward")), tuple(fold(joint, "backward")), tuple(refusals))


def _apply(
    fusion: Fusion, steps: list[PlannedOperation], request: PlanRequest, refusals: list[Refusal]
) -> list[PlannedOperation]:
    result: list[PlannedOperation] = []
    position = 0
    while position < len(steps):
        for count in _match_lengths(fusion.pattern, steps[position:]):
            if count < fusion.fewest:
                continue
            covered = steps[position : position + count]
            operations = [step.operation for step in covered]
            reason = (
                _conflicting_names(operations)
                or _written_in_place(fusion, operations)
                or _external_wgrads(fusion, operations)
                or _transfers(fusion, operations, request)
                or _adapters(fusion, operations)
                or _why_not(fusion, operations, request)
            )
            if reason is None:
                indices = tuple(index for step in covered for index in step.indices)
                with _named(f"{fusion.__name__}.__init__", operations):
                    fused = fusion(operations)
                result.append(PlannedOperation(fused, indices, True))
                position += count
                break
            refusal = Refusal(fusion, tuple(step.indices[0] for step in covered), reason)
            if not any(_says_it(said, refusal) for said in refusals):
                refusals.append(refusal)
        else:
            result.append(steps[position])
            position += 1
    return result


def _why_not(fusion: Fusion, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
    """What its `why_not` returns, checked."""
    with _named(f"{fusion.__name__}.why_not", operations):
        reason = fusion.why_not(operations, request)
    if reason is not None and not isinstance(reason, str):
        raise TypeError(f"{fusion.__name__}.why_not returned {reason!r}. Return None, or a sentence.")
    if reason == "":
        raise ValueError(f"{fusion.__name__}.why_not returned an empty reason. Return None, or a sentence.")
    return reason


@contextmanager
def _named(method: str, operations: Sequence[BasicOperation]) -> Iterator[None]:
    """An error within gets a note that names the fusion's method, and the operations that were to be fused."""
    try:
        yield
    except Exception as error:
        error.add_note(f"In {method}, of {' -> '.join(type(operation).__name__ for operation in operations)}.")
        raise


def _says_it(said: Refusal, refusal: Refusal) -> bool:
    """Whether `said` gives the same reason for the same fusion and at least these operations."""
    return said.fusion is refusal.fusion and said.reason == refusal.reason and set(refusal.indices) <= set(said.indices)


def _match_lengths(pattern: Sequence[Any], steps: Sequence[PlannedOperation]) -> Iterator[int]:
    """The lengths of all prefixes of `steps` that the pattern matches, longest first."""
    if not pattern:
        yield 0
        return
    member, rest = pattern[0], pattern[1:]
    least, most = _least(member), len(steps) if isinstance(member, Several) else 1
    fitting = 0
    while fitting < min(most, len(steps)) and _fits(steps[fitting], member):
        fitting += 1
    for count in range(fitting, least - 1, -1):
        for more in _match_lengths(rest, steps[count:]):
            yield count + more


def _least(member: object) -> int:
    """How many operations it stands for at least."""
    if isinstance(member, Several):
        return member.at_least
    return 0 if isinstance(member, Optional) else 1


def _fits(step: PlannedOperation, member: object) -> bool:
    return not step.fused and any(_is_kind(step.operation, kind) for kind in _alternatives(member))


def _alternatives(member: object) -> tuple[Any, ...]:
    if isinstance(member, Optional | Several):
        return member.alternatives
    return member if isinstance(member, tuple) else (member,)


_FORMULA = ("step", "compute", "gradients", "operand")  # what an element-wise operation is computed by
_COMPUTES = ("fuser_forward", "fuser_backward", *_FORMULA)


def _is_kind(operation: BasicOperation, kind: type[BasicOperation]) -> bool:
    """Whether this is an instance of the class, or of a subclass, that replaces nothing of what it computes."""
    mine = type(operation)
    if not issubclass(mine, kind) or not vars(operation).keys().isdisjoint(_COMPUTES):
        return False
    same = mine.fuser_forward is kind.fuser_forward and mine.fuser_backward is kind.fuser_backward
    return same and _keeps_formula(mine, kind)


@cache
def _keeps_formula(mine: type, kind: type) -> bool:
    """Whether `mine` computes as the class that a fusion knows: `kind`, or the built-in one that is derived from it.
    True too where that class leaves `step` to its subclasses: a fusion asks for it then."""
    base = next((parent for parent in mine.__mro__ if parent.__module__.partition(".")[0] == "ops"), kind)
    known = kind if issubclass(kind, base) else base
    if getattr(getattr(known, "step", None), "__isabstractmethod__", False):
        return True
    return all(getattr(mine, name) is getattr(known, name) for name in _FORMULA if hasattr(known, name))


def _conflicting_names(operations: Sequence[BasicOperation]) -> str | None:
    """Why extra names conflict. Fused operations receive extras by local name, so each must name one tensor only."""
    meaning: dict[str, str] = {}
    for operation in operations:
        for local in (*operation.extra_inputs, *operation.extra_outputs):
            name = operation.extra_name(local)
            if meaning.setdefault(local, name) != name:
                return f"its operations mean different tensors by {local!r}: {meaning[local]!r} and {name!r}."
    return None


def _external_wgrads(fusion: Fusion, operations: Sequence[BasicOperation]) -> str | None:
    """Why the fusion cannot be used where weight gradients bypass autograd; None if it can."""
    external = any(operation.wgrad_is_external for operation in operations)
    if fusion.passes != "forward" and not fusion.handles_wgrad_accumulation and external:
        return "It returns weight gradients, but they go into main_grad or are delayed: see handles_wgrad_accumulation."
    return None


def _transfers(fusion: Fusion, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
    """Why the fusion cannot be used for operations that exchange tensors between ranks; None if it can."""
    for operation in operations:
        if not fusion.handles_transfers and operation.transfers(request):
            name = type(operation).__name__
            return f"{name} exchanges tensors with other ranks, which it does not: see handles_transfers."
    return None


def _adapters(fusion: Fusion, operations: Sequence[BasicOperation]) -> str | None:
    """Why the fusion cannot be used for operations with adapters; None if it can."""
    if fusion.handles_adapters:
        return None
    for operation in operations:
        if operation.has_adapter:
            return f"{type(operation).__name__} has an adapter, whose products it does not add: see handles_adapters."
    return None


def _written_in_place(fusion: Fusion, operations: Sequence[BasicOperation]) -> str | None:
    """Why the fusion cannot be used for operations that write in place; None if it can."""
    for operation in operations[:-1] if fusion.handles_in_place else operations:
        if operation.in_place_input is not None:
            name = operation.extra_name(operation.in_place_input)
            return f"{type(operation).__name__} writes into {name!r} in place, which it does not: see handles_in_place."
    return None
