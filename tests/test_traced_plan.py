"""Plans that torch.compile holds: a bounded number has what it runs with, and makes it again when it is used."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

import ops
from fuser import Sequential, autocast
from ops.runner import run as runner
from ops.runner.recent import Recent
from tests.reference import assert_same_bits

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),  # torch.compile's own
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),  # its own too
]

H = 64
RECIPES = ("high_precision", "fp8_delayed", "mxfp8", "fp8_block")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(runner, "MOST_PROGRAMS", 2)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def layer() -> Sequential:
    return Sequential(ops.Linear(H, H), ops.SiLU(), ops.Linear(H, H))


def forward(run: object, recipe: str, x: Tensor) -> Tensor:
    with autocast(recipe):
        return run(x).square().sum()  # type: ignore[operator]


def step(model: Sequential, recipe: str, x: Tensor, run: object = None) -> dict[str, Tensor]:
    model.zero_grad()
    loss = forward(run or model, recipe, x)
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters()}}


def held(model: Sequential) -> int:
    """How many of the plans have what they run with."""
    (stage,) = model.layout().stages
    return sum(plan._pipeline is not None for plan in stage.runner.traced.values())


@pytest.mark.slow
def test_plans_that_were_given_up_run_again_with_the_same_bits():
    eager = layer()
    model = copy.deepcopy(eager)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(model, backend=counter, fullgraph=True)
    x = torch.randn(24, H)
    for recipe in 3 * RECIPES:
        assert_same_bits(step(model, recipe, x, run), step(eager, recipe, x))
        assert held(model) <= 2
    assert counter.frame_count == len(RECIPES)


@pytest.mark.slow
def test_a_backward_that_waited_for_too_long_says_so():
    model = layer()
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = torch.randn(24, H)
    waiting = forward(run, "mxfp8", x)
    step(model, "fp8_block", x, run)
    waiting.backward()  # one other is not too many
    waiting = forward(run, "mxfp8", x)
    for recipe in ("fp8_block", "high_precision"):
        step(model, recipe, x, run)
    with pytest.raises(RuntimeError, match=r"No forward of mxfp8, plan .* or 2 other plans since"):
        waiting.backward()


def test_an_exported_program_is_never_given_up():
    model = layer().eval()
    x = torch.randn(24, H)
    with torch.no_grad():
        programs = [(recipe, export(model, recipe, x)) for recipe in RECIPES]
        expected = []
        for recipe, _ in programs:
            with autocast(recipe):
                expected.append(model(x))
    del model
    for (_, program), y in zip(programs, expected, strict=True):
        assert torch.equal(program.module()(x), y)


def export(model: Sequential, recipe: str, x: Tensor) -> torch.export.ExportedProgram:
    with autocast(recipe):
        return torch.export.export(model, (x,))


class Thing:
    def __init__(self) -> None:
        self.released = 0

    def release(self) -> None:
        self.released += 1


def test_what_was_used_longest_ago_is_released_and_nothing_is_kept_alive():
    recent, things = Recent(2), [Thing() for _ in range(3)]
    for index in (0, 1, 0, 2):
        recent.use(things[index])
    assert [thing.released for thing in things] == [0, 1, 0]
    del things[2]
    recent.use(things[1])
    recent.use(things[0])
    assert [thing.released for thing in things] == [1, 1]
