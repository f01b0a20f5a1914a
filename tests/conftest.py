"""What every test stands on: fixed seeds, poisoned memory, one way to run Triton for each machine.

Marks: `gpu` needs a CUDA device, `gpu2` two of them. `interpreter` runs Triton kernels on CPU tensors under Triton's
interpreter; a process uses that for all kernels or for none, so on a CUDA machine these tests are skipped. `triton` is
what is run once more with other Triton releases in `make test-rest`; every `interpreter` test is, which runs with the
second release in `make test-exhaustive`. `slow` takes over 1.2 seconds.

`make test` runs a part, within a quarter of an hour; `make test-rest` runs the others, which are `slow`, or marked
`rest`: by hand, or because of `pairwise` (`tests.pairwise`); `make test-exhaustive` runs what is marked so, before
kernels change. `smoke` is what `make test` runs with the second release too (`tests.smoke`), and with the first even if
it is `slow`.

Tests that compile kernels do so in a subprocess whose environment has no TRITON_INTERPRET.
"""

import os
import random
from contextlib import nullcontext

import hypothesis
import pytest
import torch

HAS_CUDA = torch.cuda.is_available()

# Before any kernel's module is imported: Triton reads it when a kernel is defined.
if not HAS_CUDA:
    os.environ["TRITON_INTERPRET"] = "1"
# Before the first cuBLAS handle: deterministic algorithms need a fixed workspace.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

from recipes.triton.replay import forget  # noqa: E402
from tests.interpreter import quicken  # noqa: E402
from tests.pairwise import leave_to_rest  # noqa: E402
from tests.smoke import all_launched, mark_smoke_tests  # noqa: E402

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


quicken()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    leave_to_rest(items)
    mark_smoke_tests(items)
    # The longest come first, so that no process is left alone with one.
    items.sort(key=lambda item: [item.get_closest_marker(mark) is None for mark in ("timeout", "slow")])
    for item in items:
        if item.get_closest_marker("gpu") and not HAS_CUDA:
            item.add_marker(pytest.mark.skip(reason="This test needs a CUDA device, and torch sees none."))
        if item.get_closest_marker("gpu2") and torch.cuda.device_count() < 2:
            item.add_marker(pytest.mark.skip(reason="This test needs two CUDA devices."))
        if item.get_closest_marker("interpreter"):
            item.add_marker(pytest.mark.triton)
            if HAS_CUDA:
                item.add_marker(pytest.mark.skip(reason="With a CUDA device kernels are compiled, not interpreted."))


@pytest.fixture(autouse=True)
def seeded_and_poisoned():
    """Same random numbers in every run; what `torch.empty` hands out is NaN (the largest number for integers)."""
    random.seed(0)
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def chosen_anew(request: pytest.FixtureRequest):
    """A test that replaces functions does not meet what launchers chose before, nor do others what they chose in it."""
    if "monkeypatch" in request.fixturenames:
        forget()
        yield
        forget()
    else:
        yield


@pytest.fixture(autouse=True)
def launches_what_it_says(request: pytest.FixtureRequest):
    """A smoke test fails if it does not launch the kernels that it is marked with."""
    smoke = request.node.get_closest_marker("smoke")
    kernels = [kernel for mark in request.node.iter_markers("launches") if smoke for kernel in mark.args]
    with all_launched(kernels) if kernels else nullcontext():
        yield
