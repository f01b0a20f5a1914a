"""The recipe of each step of a run, and the numeric context in which the step runs.

    "bf16"                     bf16 throughout
    "bf16+50:mxfp8+80:bf16"    bf16, from step 50 on mxfp8, from step 80 on bf16 again

Names are those of `recipes.as_recipe` ("fp32" for no reduced precision, "batch_invariant-mxfp8" for one that is batch
invariant) and the labels of `bench.controls`.
"""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from bench.controls import CONTROLS, make_control
from bench.usage import UsageError
from fuser import autocast, recipes
from recipes import Recipe, Role
from recipes.recipe import as_batch_invariant
from recipes.registry import RECIPES

BASELINE = "bf16"
BATCH_INVARIANT = "batch_invariant-"  # in front of a name


@dataclass(frozen=True)
class RecipeSchedule:
    """Recipe names by first step, rising: ((1, "bf16"), (50, "mxfp8")). Steps count from 1."""

    parts: tuple[tuple[int, str], ...]

    @classmethod
    def parse(cls, text: str, switches: tuple[str, ...] = ()) -> "RecipeSchedule":
        """Parse a label such as "bf16+50:mxfp8" and further "step:recipe" switches. UsageError if they are invalid."""
        first, *rest = text.split("+")
        parts = [(1, first), *(_parse_switch(switch) for switch in (*rest, *switches))]
        for _, name in parts:
            recipe_named(name)
        steps = [step for step, _ in parts]
        if any(later <= earlier for earlier, later in itertools.pairwise(steps)):
            raise UsageError(f"The switches of {text!r} happen at steps {steps}. Give rising steps above 1.")
        return cls(tuple(parts))

    @property
    def label(self) -> str:
        return "+".join([self.parts[0][1], *(f"{step}:{name}" for step, name in self.parts[1:])])

    @property
    def is_control(self) -> bool:
        """Whether any of its recipes is a negative control."""
        return any(name in CONTROLS for _, name in self.parts)

    def at(self, step: int) -> str:
        """The name of the recipe for this step."""
        return next(name for first, name in reversed(self.parts) if first <= step)


def known_recipes() -> list[str]:
    """bf16, and the first name of every recipe that quantizes."""
    kinds = [kind for kind in RECIPES if kind.names]
    return [BASELINE, *(kind.names[0] for kind in kinds if kind().quantizer(Role.INPUT) is not None)]


def recipe_named(name: str) -> Recipe:
    """The recipe of a name or a control's label. Raises UsageError with the known names for any other.

    BATCH_INVARIANT in front of a name: the recipe with `batch_invariant`.
    """
    if name in CONTROLS:
        return make_control(name)
    try:
        if name.startswith(BATCH_INVARIANT):
            return as_batch_invariant(recipes.as_recipe(name.removeprefix(BATCH_INVARIANT)))
        return recipes.HighPrecision() if name == "fp32" else recipes.as_recipe(name)
    except ValueError as error:
        raise UsageError(str(error)) from None


@contextmanager
def numerics(name: str, device: torch.device) -> Iterator[None]:
    """Run the body under the recipe of this name, with bf16 `torch.autocast` unless it is "fp16" or "fp32"."""
    dtype = {"fp32": None, "fp16": torch.float16}.get(name, torch.bfloat16)
    mixed = nullcontext() if dtype is None else torch.autocast(device.type, dtype=dtype)
    with mixed, autocast(recipe=recipe_named(name)):
        yield


def _parse_switch(text: str) -> tuple[int, str]:
    step, colon, name = text.partition(":")
    if not colon or not step.isdecimal() or not name:
        raise UsageError(f"{text!r} is no switch. Write STEP:RECIPE, such as 50:mxfp8.")
    return int(step), name
