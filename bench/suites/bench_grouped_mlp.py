"""GroupedLinear -> ScaledSwiGLU -> GroupedLinear by model, recipe and pass.

"torch" is `F.grouped_mm` with eager SwiGLU. Before a step is timed, all its results are compared with fp32, expert by
expert.
"""

from functools import lru_cache

import pytest

from bench.case import PASSES
from bench.grouped_case import GroupedCase, expert_mlp
from bench.suites.cases import DEVICE, PASS_IDS, SUITE_SHAPES, WAYS, Measure, time_checked


@lru_cache(maxsize=1)
def case_of(model: str) -> GroupedCase:
    return expert_mlp(SUITE_SHAPES[model], device=DEVICE)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("passes", PASSES, ids=PASS_IDS)
@pytest.mark.parametrize("model", SUITE_SHAPES)
def test_grouped_mlp(model: str, passes: str, way: str, measure: Measure) -> None:
    time_checked(case_of(model), f"grouped MLP, {model}, {passes}", passes, way, measure)
