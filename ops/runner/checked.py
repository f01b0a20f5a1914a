"""Arguments of an operation's constructor that may be set later, and are checked then as there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ops.runner.set_once import Argument, Value


class Checked(Argument[Value]):
    """An attribute that is checked whenever it is set: `eps = Checked(as_epsilon)` in the class.

    check: of its name and what is given, returns what is held, or raises before anything is changed. What other
    arguments it has to go with is for `BasicOperation.check_set` of the operation.
    """

    def __init__(self, check: Callable[[str, Any], Value]) -> None:
        self._check = check

    def __set__(self, operation: Any, value: Any) -> None:
        value = self._check(self._name, value)
        operation.check_set(self._name, value)
        vars(operation)[self._name] = value
