"""What a pipeline is called where torch tells operations apart by name: in traced graphs, and in profiles."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch.autograd import profiler

from ops.runner.program import PlannedOperation, Program

LONGEST_NAME = 60
_NOTHING = nullcontext()


def name_of(operations: Sequence[Any], steps: Sequence[PlannedOperation]) -> str:
    """Of the steps that have parameters, or of all if none has."""
    holds = [step for step in steps if any(list(operations[at].parameters()) for at in step.indices)]
    named = holds or steps
    names = list(dict.fromkeys(_in_words(type(step.of(operations)).__name__) for step in named))
    while len("_".join(names)) > LONGEST_NAME and len(names) > 1:
        names = [*names[: -2 if names[-1] == "more" else -1], "more"]
    return "_".join(names)


def _in_words(name: str) -> str:
    """GroupedMLP: grouped_mlp; ForwardLinearBiasAdd, which is the forward alone: linear_bias_add."""
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name.removeprefix("Forward")).lower()


def in_profile(program: Program, operations: Sequence[Any], ending: str = "") -> AbstractContextManager[Any]:
    """In which a running profiler of torch shows `fuser::<name><ending>`."""
    if not profiler._is_profiler_enabled:
        return _NOTHING
    return profiler.record_function(f"fuser::{name_of(operations, [w.step for w in program.forward])}{ending}")
