"""Argument checks: TypeError for a wrong type, ValueError for a wrong value, each with a one-sentence message.

Each function returns the argument as a Python int, float or bool, so that settings from numpy print and compare like
Python's own.
"""

from __future__ import annotations

from enum import Enum
from numbers import Real
from operator import index
from typing import Any, TypeVar

import torch

NUMBERS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)  # in which is computed, and which are cast

Member = TypeVar("Member", bound=Enum)


def as_integer(name: str, value: Any) -> int:
    """An int, or anything that `operator.index` takes (numpy's integers, torch's SymInt); no bool."""
    try:
        if isinstance(value, bool):
            raise TypeError
        return index(value)
    except TypeError:
        raise TypeError(f"{name} is {_shown(value)}, but must be an integer. Pass an int.") from None


def as_number(name: str, value: object) -> float:
    """A float, or another real number; no bool. The caller checks whether it is finite."""
    if type(value) is float:
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name} is {_shown(value)}, but must be a number. Pass a float.")
    try:
        return float(value)
    except OverflowError:
        raise ValueError(f"{name} has {len(str(value))} digits, more than a float holds. Pass a smaller one.") from None


def as_flag(name: str, value: object) -> bool:
    """True or False; neither 1 nor a string, which would always be true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {_shown(value)}, but must be True or False. Pass a bool.")
    return value


def as_member(name: str, value: object, kind: type[Member]) -> Member:
    """A member of an Enum; not its name."""
    if not isinstance(value, kind):
        members = ", ".join(f"{kind.__name__}.{member.name}" for member in kind)
        raise TypeError(f"{name} is {_shown(value)}, but must be a {kind.__name__}. Pass one of {members}.")
    return value


def check_flags(**flags: object) -> None:
    """Raise TypeError for the first argument that is neither True nor False."""
    for name, flag in flags.items():
        as_flag(name, flag)


def check_factors(name: str, dtype: torch.dtype) -> None:
    """Raise TypeError for a tensor of this dtype that x is multiplied with: integers, and codes without a scale."""
    if dtype not in NUMBERS:
        raise TypeError(f"{name} is {dtype}, but must be bfloat16, float16, float32 or float64. Give {name}.float().")


def positive_integers(owner: str, **given: Any) -> list[int]:
    """Sizes as ints. Raises TypeError for one that is not an integer, ValueError for one that is not positive."""
    sizes = [as_integer(name, size) for name, size in given.items()]
    if min(sizes) <= 0:
        shown = ", ".join(f"{name}={size}" for name, size in given.items())
        subject = {1: "It", 2: "Both"}.get(len(sizes), "All")
        raise ValueError(f"{owner} got {shown}. {subject} must be positive.")
    return sizes


def _shown(value: object) -> str:
    """The argument as text, with its class where the value does not show it."""
    if isinstance(value, type):
        return f"the class {value.__name__}"
    return repr(value) if value is None or isinstance(value, bool | float) else f"{value!r} ({type(value).__name__})"
