"""Triton's interpreter without what it does again and what it does in vain, which is more than half of its time.

Since Triton 3.9 it refuses masks that it has made int32 itself, such as (a < n) & (b >= 0) of a vector and a scalar;
here they are made bool again.

the language   Whenever a kernel is launched, and whenever that calls a function with `@triton.jit`, it lists all
               members of the modules of `triton.language` and replaces those that it has functions of its own
               for. Here they are listed once a process, and replaced once a launch.
overflows      Each sum, difference and product of integers is computed once more in int64 and compared with the
               largest and the smallest number, for an assertion that is made with `debug` alone. Here it is not.
dtypes         NumPy's of one of Triton's is found in a table that is made for each question. Here it is kept.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from triton.runtime import interpreter


def quicken() -> None:
    """Spare Triton's interpreter this in this process. All results stay what they are."""
    interpreter._patch_lang = _replaces(interpreter._patch_lang)
    interpreter._get_np_dtype = _kept(interpreter._get_np_dtype)
    builder = interpreter.interpreter_builder
    builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
    for name, position in (("create_masked_load", 1), ("create_masked_store", 2), ("create_atomic_rmw", 3)):
        setattr(builder, name, _with_mask_of_bool(getattr(builder, name), position))


def _with_mask_of_bool(method: Callable[..., Any], position: int) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        mask = args[position]
        if isinstance(mask, interpreter.TensorHandle) and mask.data.dtype != bool:
            args = *args[:position], interpreter.TensorHandle(mask.data.astype(bool), mask.dtype), *args[position + 1 :]
        return method(*args, **kwargs)

    return called


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


def _replaces(in_full: Callable[[Any], Any]) -> Callable[[Any], Replaced]:
    @cache
    def replacements() -> list[tuple[Any, str, Any]]:
        languages = {"tl": interpreter.tl, "core": interpreter.tl.core}
        scope = in_full(SimpleNamespace(__globals__=languages))
        found = [(of, name, getattr(of, name)) for of, name, _ in scope._changes]
        scope.restore()
        return found

    return lambda function: Replaced(replacements())


def _kept(found: Callable[[Any], Any]) -> Callable[[Any], Any]:
    of_name: dict[str, Any] = {}

    def kept(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in of_name:
            of_name[name] = found(kind)
        return of_name[name]

    return kept
