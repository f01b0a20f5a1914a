"""A Sequential's plan as text: what runs, on which path, by which kernel, and why not otherwise."""

from __future__ import annotations

import torch

from fuser.layout import Layout
from fuser.plan import fusions_version
from ops.operation import BasicOperation
from ops.paths import choose_path
from ops.run import Pipeline
from recipes.recipe import Recipe
from recipes.request import PlanRequest


def explain(
    layout: Layout,
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    training: bool,
    requires_grad: bool,
) -> str:
    """One paragraph for each stage of the layout, for an x and parameters as described."""
    lines = [f"recipe {recipe!r}: {recipe.support(device)} on {device.type}, {str(dtype).removeprefix('torch.')}"]
    for number, stage in enumerate(layout.stages):
        if isinstance(stage.runner, Pipeline):
            request = PlanRequest(
                recipe, device, dtype, stage.runner.all_needs(requires_grad), training,
                stage.runner.path or recipe.path, fusions_version(),
            )  # fmt: skip
            lines += [f"stage {number}: pipeline", *_explain_pipeline(stage.runner, request)]
        else:
            reason = f", called by itself because {stage.why_alone}" if stage.why_alone else ""
            lines.append(f"stage {number}: {type(stage.runner).__name__}{reason}")
    return "\n".join(lines)


def _explain_pipeline(pipeline: Pipeline, request: PlanRequest) -> list[str]:
    plan = pipeline.planner(pipeline.operations, request)
    refusal = request.recipe.why_not_grouped(request)
    because = ", as asked for" if request.path else f": {refusal}" if refusal else ""
    lines = [f"  path: {choose_path(request).name}{because}"]
    for title, steps in (("forward", plan.forward), ("backward", plan.backward)):
        if title == "backward" and plan.backward == plan.forward:
            lines[1] = "  forward and backward"
            break
        lines.append(f"  {title}")
        for step in steps:
            names = [_named(pipeline.operations[index]) for index in step.indices]
            covered = f" = {' -> '.join(names)}" if step.fused else ""
            places = f"{step.indices[0]}-{step.indices[-1]}" if step.fused else str(step.indices[0])
            title_of_step = type(step.operation).__name__ if step.fused else names[0]
            lines.append(f"    {places:>5}  {title_of_step}{covered}  [{step.operation.kernel(request)}]")
    return lines + [f"  not fused: {refusal}" for refusal in plan.refusals]


def _named(operation: BasicOperation) -> str:
    return type(operation).__name__
