"""Extra tensors as the caller gives them, and gets them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from torch import Tensor

from ops.runner.input import check_real
from recipes.tensors.splits import Splits

_ARGUMENTS = ("x", "outputs", "buffers")  # of `forward`, of operations and Sequentials


def check_extras(
    consumed: Sequence[str], produced: Sequence[str], given: Mapping[str, Any], outputs: Sequence[str]
) -> None:
    """Raise ValueError, listing what exists, if an extra input is missing or unknown, or an output does not exist.

    TypeError for an extra input of complex numbers, and for outputs that are a string or no iterable.
    """
    if isinstance(outputs, str) or not isinstance(outputs, Iterable):
        raise TypeError(f"outputs is {outputs!r}, but must be names of extra outputs. Pass a tuple of strings.")
    if len(given) != len(consumed) or given.keys() != set(consumed):
        missing = [name for name in consumed if name not in given]
        unknown = [name for name in given if name not in consumed]
        problem = (f"missing: {', '.join(map(repr, missing))}; " if missing else "") + (
            f"unknown: {', '.join(map(repr, unknown))}; " if unknown else ""
        )
        asked = ", ".join(map(repr, consumed)) or "none"
        taken = next((name for name in missing if name in _ARGUMENTS), None)
        mend = "" if taken is None else f" {taken!r} is an argument of the call itself: rename it by rename_extras."
        raise ValueError(f"Extra inputs by name: {problem}the operations ask for: {asked}.{mend}")
    for name, value in given.items():
        if isinstance(value, Tensor):
            check_real(name, value.dtype)
    for name in outputs:
        if name not in produced:
            raise ValueError(
                f"No operation makes the extra output {name!r}. There are: {', '.join(map(repr, produced)) or 'none'}."
            )


def refuse_unnamed(given: Sequence[Any], consumed: Sequence[str]) -> NoReturn:
    """Raise TypeError for extra inputs that were given by position. consumed: the names that there are"""
    were = "was" if len(given) == 1 else "were"
    names = ", ".join(map(repr, consumed)) or "there are none"
    raise TypeError(
        f"{len(given)} more than x {were} given by position, but extra inputs are given by name, as name=tensor: "
        f"{names}. The classes of fuser.te count them."
    )


def at_border(value: Any) -> Any:
    """An extra output as the caller gets it: a tensor; split sizes as their tensor of sizes."""
    return value.sizes if isinstance(value, Splits) else value
