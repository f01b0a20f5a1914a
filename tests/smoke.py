"""Which interpreter tests are smoke tests: one for each kernel, which `make test` runs with every Triton release.

`@pytest.mark.launches("norm_kernel", "dnorm_kernel")`, on a test or on one of its parameters, names what its cases
launch. The first of them under the interpreter is marked `smoke`, and fails if it does not launch what is named.
"""

import ast
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from triton.runtime.interpreter import InterpretedFunction

ROOT = Path(__file__).parents[1]
FLOORS = ("recipes", "ops", "fused", "fuser")


def all_kernels() -> set[str]:
    """The names of the functions `..._kernel` in Triton; those in Gluon are not interpreted."""
    return {
        node.name
        for floor in FLOORS
        for path in (ROOT / floor).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")
        if any("triton.jit" in ast.unparse(decorator) for decorator in node.decorator_list)
    }


def mark_smoke_tests(items: Iterable[Any]) -> None:
    """Mark as `smoke` the first interpreter case of each `launches`."""
    found = set()
    for item in items:
        kernels = {mark.args for mark in item.iter_markers("launches")} - found
        if kernels and item.get_closest_marker("interpreter"):
            found |= kernels
            item.add_marker(pytest.mark.smoke)


@contextmanager
def all_launched(kernels: Iterable[str]) -> Iterator[None]:
    """Fails at its end if one of these kernels was not launched under the interpreter."""
    run, launched = InterpretedFunction.run, set()

    def remembered(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        launched.add(kernel.fn.__name__)
        return run(kernel, *args, **kwargs)

    with patch.object(InterpretedFunction, "run", remembered):
        yield
    missing = set(kernels) - launched
    assert not missing, f"This smoke test launched {sorted(launched)}, but not {sorted(missing)}."
