"""What a model leaves behind: nothing, without the garbage collector; and what it keeps is bounded."""

import gc
import itertools
import weakref
from functools import partial

import pytest
import torch

from fuser import Sequential, autocast, checkpoint, constant_weights, ops
from ops.runner.operation import BasicOperation
from ops.runner.run import MOST_PROGRAMS
from recipes import CustomRecipe, MXFP8BlockScaling

RECIPES = ["bf16", "mxfp8", "fp8_delayed", "nvfp4"]


def experts(**switches):
    return Sequential(
        ops.GroupedLinear(2, 32, 64, **switches), ops.SwiGLU(), ops.GroupedLinear(2, 32, 32, **switches), ops.Bias(32)
    )


def nested():
    return Sequential(Sequential(ops.Linear(32, 32), Sequential(ops.SReLU(), path="split")), torch.nn.Identity())


def lone():
    return ops.GroupedLinear(2, 32, 32)


MODELS = {"experts": experts, "nested": nested, "lone": lone, "unstacked": lambda: experts(stacked=False)}


@pytest.fixture
def no_collector():
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def step(model, recipe, run=None):
    x = torch.randn(8, 32, requires_grad=True)
    asks = "split_sizes" in (model.layout().consumed if isinstance(model, Sequential) else model.extra_inputs)
    extras = {"split_sizes": [3, 5]} if asks else {}
    with autocast(recipe):
        y = (run or model)(x, **extras)
    y.sum().backward()


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MODELS)
def test_a_model_that_ran_ends_with_its_last_reference(kind, recipe, no_collector):
    model = MODELS[kind]()
    with constant_weights(model):
        step(model, recipe)
    step(model, recipe, partial(checkpoint, model))
    with torch.no_grad(), autocast(recipe):
        model.eval()
    if isinstance(model, Sequential):
        model.explain(recipe=recipe)
    alive = [weakref.ref(tensor) for tensor in (*model.parameters(), *model.buffers())]
    model.zero_grad()
    del model
    assert not [ref for ref in alive if ref() is not None]


class RunsOutOfMemory(BasicOperation):
    def __init__(self, in_forward):
        super().__init__()
        self.in_forward = in_forward

    def fuser_forward(self, ctx, x, extras):
        if self.in_forward:
            raise torch.OutOfMemoryError
        return x.clone(), {}

    def fuser_backward(self, ctx, dy, d_extra_outputs):
        raise torch.OutOfMemoryError


@pytest.mark.parametrize("in_forward", [True, False])
def test_a_step_that_ran_out_of_memory_ends_with_its_error(in_forward, no_collector):
    """Who goes on with a smaller batch needs the memory of the larger one."""
    model = Sequential(*experts(), RunsOutOfMemory(in_forward))
    kept = []

    def large():
        x = torch.randn(8, 32, requires_grad=True)
        kept.append(weakref.ref(x))
        model(x, split_sizes=[3, 5]).sum().backward()

    with pytest.raises(torch.OutOfMemoryError) as caught:
        large()
    del caught
    assert kept[0]() is None


@pytest.mark.slow
def test_recipes_that_never_come_again_leave_a_bounded_number_of_plans():
    model = experts()
    for _ in range(MOST_PROGRAMS + 20):
        step(model, CustomRecipe(lambda role: MXFP8BlockScaling().quantizer(role)))
    (stage,) = model.layout().stages
    assert len(stage.runner.programs) == MOST_PROGRAMS


def test_random_freezing_leaves_a_bounded_number_of_plans():
    model = experts(stacked=False)
    parameters = list(model.parameters())
    for frozen in itertools.islice(itertools.product((False, True), repeat=len(parameters)), MOST_PROGRAMS + 20):
        for parameter, freeze in zip(parameters, frozen, strict=True):
            parameter.requires_grad_(not freeze)
        step(model, "bf16")
    (stage,) = model.layout().stages
    assert len(stage.runner.programs) == MOST_PROGRAMS


def test_plans_that_come_again_are_kept():
    model = experts()
    for _ in range(3):
        for recipe in RECIPES:
            step(model, recipe)
    (stage,) = model.layout().stages
    first = list(stage.runner.programs.values())
    for recipe in RECIPES:
        step(model, recipe)
    assert list(stage.runner.programs.values()) == first and len(first) == len(RECIPES)
