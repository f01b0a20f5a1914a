"""explain: a table of what all Sequentials of a model run as."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from fuser.explain import device_and_dtype
from fuser.plan import fusions_version
from fuser.sequential import Sequential
from fuser.sequentials import sequentials
from ops.products.paths import choose_path
from ops.runner.operation import BasicOperation
from ops.runner.run import Pipeline
from recipes.recipe import Recipe, recipe_within
from recipes.registry import as_recipe
from recipes.request import PlanRequest
from recipes.stack import recipe_in_use
from recipes.triton.gates import why_not_this_release

HEADER = ("Sequential", "recipe", "path", "runs as", "not fused")


def explain(
    model: nn.Module,
    *,
    recipe: Recipe | str | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = True,
) -> str:
    """A table with a row for each stage of each Sequential of `model`, for operations outside of them, and for the
    experts and blocks of `fuser.hf`: its recipe, path, and operations as they run forward, fused ones by the name of
    the fusion; how many fusions were refused, for reasons that `Sequential.explain` gives. Below it, what this release
    of Triton switches off on a GPU, if anything.

    The arguments are those of `Sequential.explain`; the defaults are those of each Sequential. Raises ValueError if
    `model` contains no operation.
    """
    chosen = recipe_in_use(None if recipe is None else as_recipe(recipe))
    rows: list[tuple[str, ...]] = [HEADER]
    reasons: dict[str | None, None] = {}
    for name, sequential in sequentials(model):
        own_device, own_dtype = device_and_dtype(sequential)
        where = torch.device(device or own_device)
        rows += _rows(name or "(the model)", sequential, chosen, where, dtype or own_dtype, requires_grad)
        reasons[why_not_this_release() if where.type == "cuda" else None] = None
    if len(rows) == 1:
        raise ValueError(f"explain got {type(model).__name__}, which contains no operation. Give the model.")
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    table = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([*table, *filter(None, reasons)])


def _rows(
    name: str, sequential: Sequential, recipe: Recipe, device: torch.device, dtype: torch.dtype, requires_grad: bool
) -> Iterator[tuple[str, ...]]:
    stages = sequential.layout().stages
    for number, stage in enumerate(stages):
        label = name if len(stages) == 1 else f"{name}, stage {number}"
        runner = stage.runner
        if isinstance(runner, BasicOperation):  # called by itself, for its hooks
            runner = Pipeline((runner,), path=sequential.path, recipe=runner.recipe)
        if not isinstance(runner, Pipeline):
            yield label, "", "", type(stage.runner).__name__, ""
            continue
        own = recipe_within(runner.recipe, recipe)
        request = PlanRequest(
            own, device, dtype, runner.needs_now(requires_grad), sequential.training, runner.path or own.path,
            fusions_version(),
        )  # fmt: skip
        plan = runner.planner(runner.operations, request)
        steps = ", ".join(type(step.of(runner.operations)).__name__ for step in plan.forward)
        yield label, own.name, choose_path(request).name, steps, str(len(plan.refusals) or "")
