"""torch.compile takes what is around a function that is not traced, and nothing inside it."""

import pytest
import torch
from torch import Tensor

from ops.runner.not_traced import not_traced


@pytest.fixture
def graphs():
    """A backend that keeps the graphs it is given, and these."""
    torch.compiler.reset()  # what was compiled for other tests counts against a limit
    kept: list[list[str]] = []

    def backend(module, inputs):
        kept.append([node.target.__name__ for node in module.graph.nodes if node.op == "call_function"])
        return module.forward

    backend.graphs = kept
    yield backend
    torch.compiler.reset()


def inner(x: Tensor) -> Tensor:
    return x * 5


@not_traced("It is not to be traced.")
def between(x: Tensor) -> Tensor:
    assert not torch.compiler.is_compiling()
    return inner(x) - 7


def run(x: Tensor) -> Tensor:
    return between(x + 1) / 2


def test_what_is_around_is_compiled_and_what_is_called_is_not(graphs):
    x = torch.ones(3)
    assert torch.equal(torch.compile(run, backend=graphs)(x), run(x))
    assert graphs.graphs == [["add"], ["truediv"]]


def test_a_full_graph_is_refused_with_the_reason(graphs):
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"It is not to be traced\."):
        torch.compile(run, backend=graphs, fullgraph=True)(torch.ones(3))


def test_it_is_compiled_again_behind_it_and_after_an_error(graphs):
    @not_traced("It raises.")
    def raises(x: Tensor) -> Tensor:
        raise ValueError

    with pytest.raises(ValueError):
        torch.compile(lambda x: raises(x + 1), backend=graphs)(torch.ones(3))
    torch.compile(inner, backend=graphs)(torch.ones(3))
    assert graphs.graphs == [["add"], ["mul"]]
