"""Arguments of an operation's constructor of which other things are made there, and which cannot be set later."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

Value = TypeVar("Value")


class Argument(Generic[Value]):
    """An attribute that the constructor sets, held in the operation's `__dict__`. Subclasses say how."""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    def __get__(self, operation: Any, owner: type) -> Value:
        if operation is None:
            return self  # type: ignore[return-value]
        if self._name not in vars(operation):
            raise AttributeError(f"{owner.__name__} has {self._name!r} once it is made.")
        value: Value = vars(operation)[self._name]
        return value


class SetOnce(Argument[Value]):
    """An attribute that the constructor sets: `in_features = SetOnce[int]()` in the class.

    Set to another value later it would change nothing of what was made of it, so that is an AttributeError.

    instead: what to do then, as a sentence; by default to make another operation.
    """

    def __init__(self, instead: str = "Make another one, and put it in its place.") -> None:
        self._instead = instead

    def __set__(self, operation: Any, value: Value) -> None:
        given = vars(operation).setdefault(self._name, value)
        if given is not value and given != value:
            kind = type(operation).__name__
            raise AttributeError(
                f"{self._name} of this {kind} is {given!r}, and cannot be set to {value!r}: it is read where a {kind} "
                f"is made. {self._instead}"
            )
