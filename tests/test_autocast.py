"""autocast: one stack of recipes for the process."""

import threading

import pytest

from recipes import Float8CurrentScaling, HighPrecision, MXFP8BlockScaling, autocast, current_recipe


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


def test_another_thread_sees_the_same_recipe():
    seen = []
    with autocast("mxfp8"):
        thread = threading.Thread(target=lambda: seen.append(current_recipe()))
        thread.start()
        thread.join()
    assert seen == [MXFP8BlockScaling()]


def test_it_decorates_functions():
    @autocast("mxfp8")
    def recipe_inside():
        return current_recipe()

    assert [recipe_inside(), recipe_inside()] == [MXFP8BlockScaling()] * 2
    assert current_recipe() == HighPrecision()
