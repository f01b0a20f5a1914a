"""The Sequentials of a model: those among its modules, and those that are kept outside of a module for it."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import nn

from fuser.sequential import Sequential
from ops.runner.operation import BasicOperation

Finder = Callable[[nn.Module], Sequential | None]

_finders: list[Finder] = []


def add_finder(finder: Finder) -> None:
    """Let `sequentials` find what computes for modules of others; a second time it does nothing.

    finder: the Sequential that computes in the place of a module and what it holds, or None
    """
    if finder not in _finders:
        _finders.append(finder)


def sequentials(model: nn.Module) -> Iterator[tuple[str, Sequential]]:
    """The outermost Sequentials of `model`, each once, with their names; an operation outside of them is one of its
    own."""
    inside: set[nn.Module] = set()
    for name, module in model.named_modules():
        if module not in inside:
            found = _found(module)
            if found is not None:
                inside.update(module.modules())
                yield name, found


def _found(module: nn.Module) -> Sequential | None:
    if isinstance(module, Sequential):
        return module
    if isinstance(module, BasicOperation):
        return Sequential(module)
    return next((found for finder in _finders if (found := finder(module)) is not None), None)
