"""Triton's interpreter without what it does again, which is up to half of its time.

Whenever a kernel is launched, and whenever that calls a function with `@triton.jit`, it lists all members of the
modules of `triton.language` and replaces those that it has functions of its own for. Here they are listed once a
process, and replaced once a launch.
"""

from collections.abc import Callable
from functools import cache
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


class Replaced:
    """What a launch replaces in `triton.language`, until `restore`; nothing within another one."""

    launched = False

    def __init__(self, replacements: list[tuple[Any, str, Any]]) -> None:
        self.scope = None if Replaced.launched else interpreter._LangPatchScope()
        if self.scope is not None:
            Replaced.launched = True
            for of, name, value in replacements:
                self.scope.set_attr(of, name, value)

    def restore(self) -> None:
        if self.scope is not None:
            Replaced.launched = False
            self.scope.restore()


def replace_once_a_launch() -> None:
    """Let Triton's interpreter do so in this process."""
    interpreter._patch_lang = _replaces(interpreter._patch_lang)


def _replaces(in_full: Callable[[Any], Any]) -> Callable[[Any], Replaced]:
    @cache
    def replacements() -> list[tuple[Any, str, Any]]:
        languages = {"tl": interpreter.tl, "core": interpreter.tl.core}
        scope = in_full(SimpleNamespace(__globals__=languages))
        found = [(of, name, getattr(of, name)) for of, name, _ in scope._changes]
        scope.restore()
        return found

    return lambda function: Replaced(replacements())
