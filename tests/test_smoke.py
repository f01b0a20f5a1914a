"""Every Triton kernel has a smoke test, and a smoke test launches what it says."""

import ast
from pathlib import Path

import pytest

from tests.smoke import all_kernels, all_launched

TESTS = Path(__file__).parent


def launched_in(path: Path) -> set[str]:
    """The kernels that the marks in a file of tests name."""
    return {
        ast.literal_eval(name)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.launches"
        for name in node.args
    }


def test_every_kernel_has_a_smoke_test():
    kernels = all_kernels()
    launched = {kernel for path in TESTS.glob("test_*.py") for kernel in launched_in(path)}
    assert kernels - launched == set(), "Kernels that no test is marked to launch."
    assert launched - kernels == set(), "Kernels that tests are marked to launch, and that there are not."


def test_a_kernel_that_is_not_launched_is_named():
    with (
        pytest.raises(AssertionError, match=r"launched \[\], but not \['other_kernel'\]"),
        all_launched(["other_kernel"]),
    ):
        pass
