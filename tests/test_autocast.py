"""autocast: one stack of recipes for each thread."""

import asyncio
import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
import torch

from recipes import Float8CurrentScaling, HighPrecision, MXFP8BlockScaling, autocast, current_recipe

RECIPE, OTHER = MXFP8BlockScaling(), Float8CurrentScaling()


def test_high_precision_outside_of_any():
    assert current_recipe() == HighPrecision()


def test_the_innermost_counts():
    with autocast("mxfp8") as outer:
        assert current_recipe() is outer and outer == MXFP8BlockScaling()
        with autocast(Float8CurrentScaling(power_2_scale=True)):
            assert current_recipe() == Float8CurrentScaling(power_2_scale=True)
            with autocast("mxfp8", enabled=False):
                assert current_recipe() == HighPrecision()
            with autocast():
                assert current_recipe() == HighPrecision()
            assert current_recipe() == Float8CurrentScaling(power_2_scale=True)
        assert current_recipe() is outer
    assert current_recipe() == HighPrecision()


def test_an_exception_restores_what_was_there():
    with autocast("fp8_current"):
        with pytest.raises(KeyError), autocast("mxfp8"):
            raise KeyError
        assert current_recipe() == Float8CurrentScaling()
    assert current_recipe() == HighPrecision()


def test_an_unknown_name_changes_nothing():
    with autocast("fp8_current"):
        with pytest.raises(ValueError, match="no recipe named 'fp4'"), autocast("fp4"):
            raise AssertionError("must not be entered")
        assert current_recipe() == Float8CurrentScaling()


def test_each_thread_has_its_own_recipe():
    """Two threads switch recipes as fast as they can, and neither meets the other's."""
    faults = []
    start = threading.Barrier(2)

    def run(recipe):
        start.wait()
        for _ in range(400):
            with autocast(recipe):
                time.sleep(0)
                if current_recipe() != recipe:
                    faults.append(recipe)
            if current_recipe() != HighPrecision():
                faults.append(recipe)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(recipe,)) for recipe in (RECIPE, OTHER)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not faults


def test_a_new_thread_begins_in_high_precision():
    with autocast("mxfp8"), ThreadPoolExecutor(1) as pool:
        assert pool.submit(current_recipe).result() == HighPrecision()


def test_an_asyncio_task_has_the_recipe_of_its_maker_and_hands_none_back():
    async def inner():
        seen = current_recipe()
        with autocast(OTHER):
            await asyncio.sleep(0)
            return seen, current_recipe()

    async def outer():
        with autocast(RECIPE):
            found = await asyncio.create_task(inner())
            return found, current_recipe()

    assert asyncio.run(outer()) == ((RECIPE, OTHER), RECIPE)


def test_a_context_that_was_never_left_ends_with_its_manager():
    """As Ctrl-C between two instructions leaves it."""
    manager = autocast(RECIPE)
    manager.__enter__()
    assert current_recipe() == RECIPE
    del manager
    assert current_recipe() == HighPrecision()


def test_interrupts_at_any_instruction_leave_nothing_open():
    """A signal of its own, raised at the n-th traced instruction of entering and leaving, for every n."""

    class Interrupt(BaseException):
        pass

    def interrupted_at(n):
        left = n

        def trace(frame, event, arg):
            nonlocal left
            module, function = frame.f_globals.get("__name__"), frame.f_code.co_name
            # not in callbacks of weak references, out of which no exception comes
            if module in ("recipes.autocast", "recipes.stack") and function != "<lambda>":
                frame.f_trace_opcodes = True
                left -= 1
                if left == 0:
                    raise Interrupt
            return trace

        sys.settrace(trace)
        try:
            with autocast(RECIPE):
                current_recipe()
        finally:
            sys.settrace(None)

    before = sys.gettrace()
    count, was_interrupted = 0, True
    try:
        while was_interrupted:
            count += 1
            with contextlib.suppress(Interrupt):
                interrupted_at(count)
                was_interrupted = False
            assert current_recipe() == HighPrecision(), count
    finally:
        sys.settrace(before)
    assert count > 50


def test_contexts_may_be_left_in_any_order():
    first, second = autocast(RECIPE), autocast(OTHER)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert current_recipe() == OTHER
    second.__exit__(None, None, None)
    assert current_recipe() == HighPrecision()


def test_one_context_is_not_entered_twice_at_once_and_left_once():
    context = autocast(RECIPE)
    with context, pytest.raises(RuntimeError, match="open already"), context:
        raise AssertionError("must not be entered")
    with context:
        assert current_recipe() == RECIPE
    with pytest.raises(RuntimeError, match="not open. Use it in a `with`"):
        context.__exit__(None, None, None)


def test_it_decorates_functions():
    @autocast("mxfp8")
    def recipe_inside():
        return current_recipe()

    assert [recipe_inside(), recipe_inside()] == [MXFP8BlockScaling()] * 2
    assert current_recipe() == HighPrecision()


def batches():
    yield current_recipe()


async def serve():
    return current_recipe()


async def stream():
    yield current_recipe()


@pytest.mark.parametrize("function", [batches, serve, stream, partial(batches)])
def test_a_body_that_runs_after_the_call_is_not_decorated(function):
    with pytest.raises(TypeError, match="whose body runs after the call has returned"):
        autocast("mxfp8")(function)


def test_a_class_is_not_decorated():
    with pytest.raises(TypeError, match="decorates the class Linear, which would be open while an instance is made"):
        autocast("mxfp8")(torch.nn.Linear)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        pytest.param({"recipe": 3}, TypeError, "recipe is 3, but must be a Recipe or a name", id="number"),
        pytest.param({"recipe": MXFP8BlockScaling}, TypeError, r"Give MXFP8BlockScaling\(\)", id="class"),
        pytest.param({"recipe": "fp4", "enabled": False}, ValueError, "no recipe named 'fp4'", id="off"),
        pytest.param(
            {"recipe": "mxfp8", "enabled": "no"}, TypeError, "enabled is 'no' .*, but must be True", id="text"
        ),
        pytest.param({"keep_weights": 1}, TypeError, "keep_weights is 1, but must be a tensor", id="keep"),
        pytest.param({"keep_weights": torch.ones(2)}, ValueError, "keep_weights .* one number", id="keep-two"),
        pytest.param({"scales": {}}, TypeError, "scales is {}, but must be what fuser.checkpoint", id="scales"),
        pytest.param({"amax_reduction_group": "tp"}, TypeError, "amax_reduction_group is 'tp', but", id="group"),
    ],
)
def test_odd_arguments_are_refused(arguments, error, message):
    with pytest.raises(error, match=message), autocast(**arguments):
        raise AssertionError("must not be entered")
    assert current_recipe() == HighPrecision()
