"""Stand-ins for Triton where it is not installed: kernels can be defined, and a launch says what is missing.

`recipes.triton.gates` hands them on. They take all that a kernel file does when it is imported: decorators, with and
without options, `tl.constexpr(...)`, and annotations and names of `tl`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

WHY_NO_TRITON = (
    "Triton is not installed, and kernels are written in it. Install it (`pip install triton`; it is built for Linux), "
    "or pass tensors on the CPU, which are computed without it."
)


def _raise(kernel: str) -> NoReturn:
    raise RuntimeError(f"{kernel} cannot be launched. {WHY_NO_TRITON}")


class MissingKernel:
    """What `triton.jit` makes of a function: a launch or call raises RuntimeError."""

    arg_names = ()

    def __init__(self, function: Callable[..., Any]) -> None:
        self.__name__ = function.__name__

    def __getitem__(self, grid: Any) -> NoReturn:
        _raise(self.__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        _raise(self.__name__)


class MissingDescriptor:
    """A TMA descriptor, which only a launch makes: raises RuntimeError."""

    def __init__(self, *args: Any) -> None:
        _raise("What takes a TMA descriptor")


class MissingTriton:
    """`triton`, as far as it is used without a launch."""

    __version__ = None
    TritonError = RuntimeError

    def jit(self, function: Callable[..., Any] | None = None, **options: Any) -> Any:
        """As a decorator, with options or without."""
        return MissingKernel if function is None else MissingKernel(function)

    def constexpr_function(self, function: Callable[..., Any]) -> MissingKernel:
        """As a decorator."""
        return MissingKernel(function)


class MissingLanguage:
    """`triton.language`: its names are names and no more."""

    class constexpr:
        def __init__(self, value: Any) -> None:
            self.value = value

    def __getattr__(self, name: str) -> str:
        return f"triton.language.{name}"
