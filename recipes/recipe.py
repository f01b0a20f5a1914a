"""Recipe: in which numbers a pipeline is computed. `HighPrecision` is the recipe of none.

A recipe is a frozen dataclass, equal by value, and answers questions about itself. No operation is named in one, and
nobody outside this folder asks for its class.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any, ClassVar, Literal, Protocol

import torch

from recipes.quantizer import Quantizer

Product = Literal["fprop", "dgrad", "wgrad"]


class Role(Enum):
    """What a tensor is to a matrix product: x and w of fprop, dy of dgrad and wgrad."""

    INPUT = "input"
    WEIGHT = "weight"
    GRAD_OUTPUT = "grad_output"


class Target(Protocol):
    """Where and in which nominal dtype something is to run: as much of a `PlanRequest` as a recipe may look at."""

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...


@dataclass(frozen=True)
class Recipe(ABC):
    """Base of all recipes.

    names: what `autocast` and `as_recipe` accept for this recipe with its default fields; the first is shown
    path: "grouped" or "split" forces that storage path; None leaves the choice to `why_not_grouped`
    """

    names: ClassVar[tuple[str, ...]] = ()

    path: str | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.path not in (None, "grouped", "split"):
            raise ValueError(f'path is {self.path!r}, but must be "grouped", "split" or None.')

    @property
    def name(self) -> str:
        return self.names[0] if self.names else type(self).__name__

    def to_dict(self) -> dict[str, Any]:
        """Class name and fields as strings, numbers, bools, None and dicts: what JSON can hold.

        Raises ValueError for a field that is a function: it cannot be written down.
        """
        return {"recipe": type(self).__name__} | {f.name: _plain(f.name, getattr(self, f.name)) for f in fields(self)}

    @staticmethod
    def from_dict(written: Mapping[str, Any]) -> Recipe:
        """The recipe that `to_dict` wrote down; fields that are absent have their defaults.

        Raises ValueError for a recipe or a field that does not exist.
        """
        kinds = {kind.__name__: kind for kind in _subclasses(Recipe)}  # type: ignore[type-abstract]
        name = written.get("recipe")
        if name not in kinds:
            raise ValueError(f"there is no recipe {name!r}. There are: {', '.join(sorted(kinds))}.")
        known = {f.name: f for f in fields(kinds[name])}
        values = {key: value for key, value in written.items() if key != "recipe"}
        for key in values:
            if key not in known:
                raise ValueError(f"{name} has no field {key!r}. It has: {', '.join(known)}.")
        return kinds[name](**{key: _built(value, known[key].default) for key, value in values.items()})

    def split_accumulator(self, product: Product) -> bool:
        """Whether a native FP8 product promotes partial sums to float32 on the way; else the tensor core keeps them."""
        return bool(getattr(self, f"split_accumulator_{product}", True))

    @abstractmethod
    def quantizer(self, role: Role) -> Quantizer | None:
        """The quantizer for tensors in this role; None keeps them in high precision."""

    def support(self, device: torch.device) -> str:
        """Says "native" if the device multiplies in these numbers, "emulated" if it multiplies dequantized operands."""
        return "emulated"

    def why_not_grouped(self, request: Target) -> str | None:
        """Why the grouped path cannot run this request, as a sentence; None if it can."""
        if request.device.type == "cuda" and request.dtype == torch.float64:
            return "There is no grouped kernel for float64 on CUDA; the split path multiplies group by group."
        for role in Role:
            quantizer = self.quantizer(role)
            if quantizer is not None and not quantizer.knows_groups():
                return f"{type(quantizer).__name__} knows single tensors only; the split path quantizes group by group."
        return None


@dataclass(frozen=True)
class HighPrecision(Recipe):
    """No quantization: fp64, fp32, fp16 or bf16, as the tensors are."""

    names: ClassVar[tuple[str, ...]] = ("high_precision", "none", "bf16", "fp16", "fp32")

    def quantizer(self, role: Role) -> Quantizer | None:
        return None

    def support(self, device: torch.device) -> str:
        return "native"


def support_of_float8(device: torch.device) -> str:
    """`Recipe.support` of float8 codes with scales of a tensor or of 128 values: native from sm_89 on."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return "emulated"
    return "native" if torch.cuda.get_device_capability(device) >= (8, 9) else "emulated"


def support_of_products(found: Iterable[str]) -> str:
    """`Recipe.support` of what says this of each product."""
    different = set(found)
    return different.pop() if len(different) == 1 else "some products native, some emulated"


def _plain(name: str, value: Any) -> Any:
    if isinstance(value, Recipe):
        return value.to_dict()
    if isinstance(value, Enum):
        return value.name
    if callable(value):
        raise ValueError(
            f"The field {name!r} is a function, which cannot be written down. Keep it in code, or use a named setting."
        )
    return value


def _built(value: Any, default: Any) -> Any:
    """A field's value from what `_plain` made of it; `default` shows which Enum it is of."""
    if isinstance(value, Mapping):
        return Recipe.from_dict(value)
    return type(default)[value] if isinstance(default, Enum) and isinstance(value, str) else value


def _subclasses(kind: type[Recipe]) -> Iterator[type[Recipe]]:
    for subclass in kind.__subclasses__():
        yield subclass
        yield from _subclasses(subclass)
