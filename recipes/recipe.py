"""Recipe: in which numbers a pipeline is computed. `HighPrecision` is the recipe of none.

A recipe is a frozen dataclass, equal by value, and answers questions about itself. No operation is named in one, and
nothing outside this folder tests its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from enum import Enum, StrEnum
from functools import cache, cached_property, lru_cache, partial
from typing import Any, ClassVar, Protocol

import torch
import torch.distributed as dist

from recipes.arguments import as_flag, as_integer, as_member, as_number
from recipes.native_products import COLUMNWISE, LAYOUTS, Capability, Product, compute_capability, why_not_native
from recipes.tensors.formats import Format
from recipes.tensors.quantizer import Quantizer


class Role(StrEnum):
    """What a tensor is to a matrix product: x and w of fprop, dy of dgrad and wgrad."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


# product -> its first and its second operand
OPERANDS: dict[Product, tuple[Role, Role]] = {
    "fprop": (Role.INPUT, Role.WEIGHT),
    "dgrad": (Role.GRAD_OUTPUT, Role.WEIGHT),
    "wgrad": (Role.GRAD_OUTPUT, Role.INPUT),
}


class Target(Protocol):
    """Where and in which nominal dtype something is to run: as much of a `PlanRequest` as a recipe may look at."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


# What a field must be, by its annotation. Other annotations are checked by the recipe that has them.
_FIELD_KINDS: Mapping[str, Callable[[str, Any], Any]] = {
    "bool": as_flag,
    "int": as_integer,
    "float": as_number,
    "Format": partial(as_member, kind=Format),
}


@dataclass(frozen=True)
class Recipe(ABC):
    """Base of all recipes.

    names: what `autocast` and `as_recipe` accept for this recipe with its default fields; the first is shown
    path: "grouped" or "split" forces that storage path; None leaves the choice to `why_not_grouped`
    batch_invariant: whether a row's output bits may not depend on other rows, see `autocast`
    repeatable: whether its quantizers follow from its fields, and what they do from these and tensors alone, so that a
    step on a GPU may be done again as a whole (`ops.runner.repeat`). Of a subclass that replaces a method it does not
    hold

    Raises TypeError for a field that is no bool, int, float or Format where its annotation says one.
    """

    names: ClassVar[tuple[str, ...]] = ()
    repeatable: ClassVar[bool] = False

    path: str | None = field(default=None, kw_only=True)
    batch_invariant: bool = field(default=False, kw_only=True, repr=False)  # `explain()` has a line for it

    def __post_init__(self) -> None:
        for f in fields(self):
            of_kind = _FIELD_KINDS.get(f.type.__name__ if isinstance(f.type, type) else str(f.type))
            if of_kind is not None:
                object.__setattr__(self, f.name, of_kind(f.name, getattr(self, f.name)))
        if self.path not in (None, "grouped", "split"):
            raise ValueError(f'path is {self.path!r}, but must be "grouped", "split" or None.')

    def __deepcopy__(self, memo: dict[int, object]) -> Recipe:
        """Itself: it never changes, and a process group or a function in a field may not be copied."""
        return self

    @property
    def name(self) -> str:
        return self.names[0] if self.names else type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Class name and fields as strings, numbers, bools, None and dicts: what JSON can hold.

        Raises ValueError for a field that is a function or another object that cannot be written down.
        """
        return {"recipe": type(self).__name__} | {f.name: _plain(f.name, getattr(self, f.name)) for f in fields(self)}

    @staticmethod
    def from_dict(written: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict` wrote down; fields that are absent have their defaults.

        Raises ValueError for a recipe, a field or a named setting that does not exist and for a field that is needed
        but absent, TypeError for what is no dict.
        """
        if not isinstance(written, Mapping):
            raise TypeError(f"a recipe is written down as a dict, not as {written!r}. Pass what to_dict() gave.")
        kinds = {kind.__name__: kind for kind in _subclasses(Recipe)}  # type: ignore[type-abstract]
        name = written.get("recipe")
        if not isinstance(name, str) or name not in kinds:
            raise ValueError(f"there is no recipe {name!r}. There are: {', '.join(sorted(kinds))}.")
        known = {f.name: f for f in fields(kinds[name])}
        values = {key: value for key, value in written.items() if key != "recipe"}
        for key in values:
            if key not in known:
                raise ValueError(f"{name} has no field {key!r}. It has: {', '.join(known)}.")
        for key, f in known.items():
            if f.default is MISSING and key not in values:
                raise ValueError(f"{name} needs the field {key!r}, which is not written down. Make it in code.")
        return kinds[name](**{key: _built(key, value, known[key].default) for key, value in values.items()})

    def split_accumulator(self, product: Product) -> bool:
        """Whether a native FP8 product promotes partial sums to float32 on the way; else the tensor core keeps them."""
        return bool(getattr(self, f"split_accumulator_{product}", True))

    @property
    def keeps_weight_values(self) -> bool:
        """Whether `constant_weights` keeps dequantized weights where no product takes their codes."""
        return bool(getattr(self, "keep_weight_values", True))

    def amax_reduction_groups(self, default: dist.ProcessGroup | None) -> tuple[dist.ProcessGroup | None, ...]:
        """The process groups whose ranks all take part when an `autocast` with this recipe ends, whatever it ran.

        default: the group that `autocast` names. None in the answer is the default group of torch.distributed.
        """
        return ()

    @abstractmethod
    def quantizer(self, role: Role) -> Quantizer | None:
        """The quantizer for tensors in this role; None keeps them in high precision."""

    def why_not_native(self, product: Product, dtype: torch.dtype, capability: Capability | None) -> str | None:
        """Why the operands of this product are dequantized before it, as a sentence; None if they are multiplied as
        they are. See `recipes.native_products`."""
        layout = LAYOUTS[product]
        scalings = []
        for role, columnwise in zip(OPERANDS[product], COLUMNWISE[layout], strict=True):
            quantizer = self.quantizer(role)
            of_copy = None if quantizer is None else quantizer.of_copy(columnwise)
            scalings.append((of_copy is not None, None if of_copy is None else of_copy.float8_scaling(columnwise)))
        (quantizes_left, left), (quantizes_right, right) = scalings
        if not (quantizes_left or quantizes_right):
            return None
        return why_not_native(layout, left, right, dtype, capability)

    def support(self, device: torch.device, dtype: torch.dtype = torch.bfloat16) -> str:
        """ "native" if the device multiplies in these numbers, "emulated" if it multiplies dequantized operands, or
        "some products native, some emulated". dtype: the nominal one, which decides too (see `why_not_native`)."""
        capability = compute_capability(device)
        native = {self.why_not_native(product, dtype, capability) is None for product in LAYOUTS}
        if len(native) > 1:
            return "some products native, some emulated"
        return "native" if native.pop() else "emulated"

    def why_not_grouped(self, request: Target) -> str | None:
        """Why the grouped path cannot run this request, as a sentence; None if it can."""
        if request.device.type == "cuda" and request.dtype == torch.float64:
            return "There is no grouped kernel for float64 on CUDA; the split path multiplies group by group."
        for role in Role:
            quantizer = self.quantizer(role)
            if quantizer is not None and not quantizer.knows_groups():
                return f"{type(quantizer).__name__} knows single tensors only; the split path quantizes group by group."
        return None

    def why_not_batch_invariant(self) -> str | None:
        """Why a row's numbers depend on other rows of x, as a sentence; None if every scale of x belongs to one row."""
        quantizer = self.quantizer(Role.INPUT)
        rowwise = None if quantizer is None else quantizer.of_copy(False)
        if rowwise is None:
            return None
        spec = rowwise.copy_spec(False)
        if spec is None:
            return f"{type(rowwise).__name__} has no copy_spec, so nobody knows for which rows of x a scale holds."
        return spec.why_not_row_by_row()


def check_by_value(recipe: Recipe) -> None:
    """Raise TypeError for a recipe that has no hash, or attributes by which it is not compared.

    Plans are kept by the recipe's value: what differs in nothing else would run with those of another.
    """
    kind = type(recipe)
    try:
        hash(recipe)
    except TypeError as error:
        raise TypeError(
            f"{kind.__name__} is kept by its value, but has no hash: {error}. Give it fields that have one: a tuple in "
            "place of a list, instances of frozen dataclasses."
        ) from error
    _check_attributes(recipe, "recipes")


def check_parts_by_value(value: Any) -> None:
    """Raise TypeError for a dataclass, this or in a field of it, whose class has the equality of another one, and
    attributes that this does not compare. What a class that is a dataclass itself keeps beside its fields follows from
    these."""
    if not is_dataclass(value) or isinstance(value, type):
        return
    if "__dataclass_params__" not in vars(type(value)):
        _check_attributes(value, "instances")
    for f in fields(value):
        check_parts_by_value(getattr(value, f.name))


def _check_attributes(value: Any, plural: str) -> None:
    kind: Any = type(value)
    compared = _compared(kind)
    for name in vars(value):
        if compared is not None and name not in compared:
            raise TypeError(
                f"{kind.__name__}.{name} is no field, so {plural} that differ in it alone are equal, and one would run "
                f"as the other. Put @dataclass(frozen=True) above {kind.__name__}, and declare {name!r} as a field."
            )


@cache
def _compared(kind: type[Any]) -> frozenset[str] | None:
    """The fields that say whether two instances of this class are equal, and what `cached_property` keeps; None where
    the class compares in a way of its own."""
    owner: Any = next(parent for parent in kind.__mro__ if "__eq__" in vars(parent))
    if not is_dataclass(owner) or "__dataclass_params__" not in vars(owner):
        return None
    cached = (name for parent in kind.__mro__ for name, at in vars(parent).items() if isinstance(at, cached_property))
    return frozenset((*(f.name for f in fields(owner)), *cached))


@lru_cache(maxsize=64)
def as_batch_invariant(recipe: Recipe) -> Recipe:
    """This recipe with `batch_invariant`. Raises ValueError if it `why_not_batch_invariant`."""
    check_batch_invariant(recipe, recipe.why_not_batch_invariant())
    return recipe if recipe.batch_invariant else replace(recipe, batch_invariant=True)


def check_batch_invariant(recipe: Recipe, reason: str | None) -> None:
    """Raise ValueError with this reason, a sentence, if there is one."""
    if reason is not None:
        raise ValueError(
            f"batch_invariant=True under {recipe.name!r} cannot be promised: {reason} Leave batch_invariant out, or "
            "take what has it: see docs/batch_invariant.md."
        )


def recipe_within(own: Recipe | None, around: Recipe) -> Recipe:
    """The recipe of what has one of its `own`, or None, inside of `autocast(around)`: batch invariant if that is."""
    if own is None:
        return around
    return as_batch_invariant(own) if around.batch_invariant else own


@dataclass(frozen=True)
class HighPrecision(Recipe):
    """No quantization: fp64, fp32, fp16 or bf16, as the tensors are."""

    names: ClassVar[tuple[str, ...]] = ("high_precision", "none", "bf16", "fp16", "fp32")
    repeatable: ClassVar[bool] = True

    def quantizer(self, role: Role) -> Quantizer | None:
        return None


HIGH_PRECISION = HighPrecision()  # where none is chosen: the same object each time, which is found by its identity


def _plain(name: str, value: object) -> Any:
    if isinstance(value, Recipe):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, str | bool | int | float):
        return value
    kind = "function" if callable(value) else type(value).__name__
    raise ValueError(
        f"The field {name!r} is a {kind}, which cannot be written down. Keep it in code, or use a named setting."
    )


def _built(name: str, value: object, default: Any) -> Any:
    """A field's value from what `_plain` made of it; `default` shows which Enum it is of."""
    if isinstance(value, Mapping):
        return Recipe.from_dict(value)
    if not isinstance(default, Enum) or not isinstance(value, str):
        return value
    members = type(default).__members__
    if value not in members:
        raise ValueError(f"{name} is {value!r}, which does not exist. There are: {', '.join(members)}.")
    return members[value]


def _subclasses(kind: type[Recipe]) -> Iterator[type[Recipe]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
