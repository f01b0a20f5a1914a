"""A Sequential's plan as text: the operations as they run, their path and kernels, and the reasons for each choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fuser.explain_quantized import explain_module, explain_quantized
from fuser.layout import Container, Layout
from fuser.plan import fusions_version
from ops.products.paths import choose_path
from ops.runner.parameters import planned_dtype
from ops.runner.program import Plan, PlannedOperation, handed_on_by, why_not_batch_invariant
from ops.runner.repeat import why_not_repeated
from ops.runner.run import Pipeline
from recipes.recipe import Recipe, recipe_within
from recipes.request import PlanRequest
from recipes.tensors.quantized_handle import Quantized
from recipes.triton.gates import why_not_this_release

_NOTHING_GIVEN: Mapping[str, Quantized | None] = {}


def explain(
    layout: Layout,
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    training: bool,
    requires_grad: bool,
    given: Mapping[str, Quantized | None] = _NOTHING_GIVEN,
) -> str:
    """One paragraph for each stage of the layout, for an x and parameters of this device and dtype.

    given: what the caller has quantized, by "x" and "grad_output"
    """
    is_absent = device.type == "cuda" and not torch.cuda.is_available()
    assumed = " (torch finds no GPU here: as on Hopper)" if is_absent else ""
    numbers = f"{recipe.support(device, dtype)} on {device.type}{assumed}, {str(dtype).removeprefix('torch.')}"
    about = f"recipe {recipe!r}: {numbers}"
    reason = why_not_this_release() if device.type == "cuda" else None
    lines = [f"{about}. {reason}" if reason else about]
    entered = {"x": 0, "grad_output": len(layout.stages) - 1}
    for number, stage in enumerate(layout.stages):
        enters = {name: q for name, q in given.items() if q is not None and entered[name] == number}
        if isinstance(stage.runner, Pipeline):
            own = stage.runner.recipe
            chosen = recipe_within(own, recipe)
            request = PlanRequest(
                chosen, device, dtype, stage.runner.needs_now(requires_grad), training,
                stage.runner.path or chosen.path, fusions_version(),
            )  # fmt: skip
            says = f" under its own recipe {own!r}: {own.support(device, dtype)}" if own is not None else ""
            lines += [f"stage {number}: pipeline{says}", *_explain_pipeline(stage.runner, request, enters)]
        else:
            reason = f", called by itself because {stage.why_alone}" if stage.why_alone else ""
            lines.append(f"stage {number}: {stage.label}  {type(stage.runner).__name__}{reason}")
            lines += [explain_module(stage, name) for name in enters]
            if isinstance(stage.runner, Container):
                inner = explain(stage.runner.layout(), recipe, device, dtype, training, requires_grad)
                lines += [f"  {line}" for line in inner.splitlines()[1:]]
    return "\n".join(lines)


def device_and_dtype(module: nn.Module) -> tuple[torch.device, torch.dtype]:
    """The device of its parameters, and the dtype that is planned for."""
    parameters = list(module.parameters())
    if not parameters:
        return torch.device("cpu"), torch.get_default_dtype()
    return parameters[0].device, planned_dtype((p.dtype for p in parameters), None, torch.get_default_dtype())


def _explain_pipeline(pipeline: Pipeline, request: PlanRequest, given: Mapping[str, Any]) -> list[str]:
    plan = pipeline.planner(pipeline.operations, request)
    reason = request.recipe.why_not_grouped(request)
    because = ", as asked for" if request.path else f": {reason}" if reason else ""
    path = choose_path(request).name
    lines = [f"  path: {path}{because}"]
    if request.recipe.batch_invariant:
        lines.append(f"  {_explain_batch_invariance(pipeline, request)}")
    if path == "split":
        lines.append("  groups without rows are left out")
    if request.device.type == "cuda":
        lines += _explain_repetition(pipeline, plan, request, path)
    joint = plan.forward == plan.backward
    passes = {"forward": plan.forward, "backward": plan.backward}
    for title, steps in ({"forward and backward": plan.forward} if joint else passes).items():
        lines.append(f"  {title}")
        lines += [f"    {_explain_step(pipeline, plan, step, request, title)}" for step in steps]
    lines += [explain_quantized(pipeline, plan, request, name, quantized) for name, quantized in given.items()]
    for refusal in plan.refusals:
        places = _places(pipeline, refusal.indices)
        lines.append(f"  not fused: {refusal.fusion.__name__} on operations {places}: {refusal.reason}")
    return lines


def _explain_batch_invariance(pipeline: Pipeline, request: PlanRequest) -> str:
    """What it excludes in forward, or why a call would raise ValueError."""
    reason = why_not_batch_invariant(pipeline.operations, request)
    if reason is not None:
        return f"not batch invariant, so that a call raises ValueError: {reason}"
    if request.device.type == "cpu":
        return "batch invariant: in forward each row is a product of its own, in float32 or better"
    excluded = "tiles chosen by the number of rows, measured tiles, split-K, library products in Linear and Router"
    return f"batch invariant: excluded in forward: {excluded}"


def _explain_repetition(pipeline: Pipeline, plan: Plan, request: PlanRequest, path: str) -> list[str]:
    """Which steps the host runs in full each time, and why."""
    if path == "split":
        return ["  not repeated: on the split path group sizes are read on the host."]
    lines: dict[str, None] = {}
    for step in (*plan.forward, *plan.backward):
        covered = [pipeline.operations[index] for index in step.indices]
        reason = why_not_repeated(step.operation, covered, request.recipe)
        if reason is not None:
            noun = "operation" if len(step.indices) == 1 else "operations"
            lines[f"  not repeated: {reason} ({noun} {_places(pipeline, step.indices)})"] = None
    return list(lines)


def _explain_step(pipeline: Pipeline, plan: Plan, step: PlannedOperation, request: PlanRequest, passes: str) -> str:
    names = " -> ".join(type(pipeline.operations[index]).__name__ for index in step.indices)
    name = f"{type(step.operation).__name__} = {names}" if step.fused else names
    rounds = "; rounds less often than unfused" if step.fused and step.operation.rounds_less else ""
    sent = "" if step.fused else _explain_handed_on(pipeline, plan, step, request, passes)
    return f"{_places(pipeline, step.indices):>5}  {name}  [{step.operation.kernel(request)}{sent}{rounds}]"


def _explain_handed_on(
    pipeline: Pipeline, plan: Plan, step: PlannedOperation, request: PlanRequest, passes: str
) -> str:
    handed_on = handed_on_by(pipeline.operations, plan, step.indices[0], request)
    words = "" if handed_on.agreed is None else f"; {handed_on.agreed.words}"
    if handed_on.rows is not None and "forward" in passes:
        may_be_codes = getattr(handed_on.agreed, "spec", None) is not None
        words += f"; {'rows of values' if may_be_codes else 'rows'} {handed_on.rows}"
    if handed_on.rows_back is not None and "backward" in passes:
        words += f"; in backward rows {handed_on.rows_back}"
    return words


def _places(pipeline: Pipeline, indices: Sequence[int]) -> str:
    first, last = pipeline.labels[indices[0]], pipeline.labels[indices[-1]]
    return first if len(indices) == 1 else f"{first}-{last}"
