"""What becomes of a caller's quantized x, or gradient of y, as text: who multiplies its codes, or why nobody does."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from fuser.layout import Stage
from ops.products.product import why_not_reused
from ops.runner.operation import BasicOperation
from ops.runner.program import Plan, PlannedOperation
from ops.runner.run import Pipeline
from recipes.request import PlanRequest
from recipes.tensors.grouped_tensor import GroupedTensor
from recipes.tensors.quantized_handle import Quantized
from recipes.tensors.splits import Splits


def check_quantized(given: Mapping[str, Any]) -> None:
    """Raise TypeError for what is not quantized, and not None."""
    for name, value in given.items():
        if value is not None and not isinstance(value, Quantized):
            kind = "an ordinary tensor" if isinstance(value, Tensor) else f"a {type(value).__name__}"
            raise TypeError(f"{name} is {kind}, but only what is quantized is explained. Leave it out.")


def explain_module(stage: Stage, name: str) -> str:
    """The line for a stage that is no pipeline."""
    return f"  {name}: dequantized for {type(stage.runner).__name__}, which computes with values"


def explain_quantized(pipeline: Pipeline, plan: Plan, request: PlanRequest, name: str, quantized: Quantized) -> str:
    """The line for "x", which enters the first step of forward, or "grad_output", which enters that of backward."""
    enters = name == "x"
    for step in plan.forward if enters else plan.backward[::-1]:
        fate = _fate(pipeline, step, request, quantized, enters)
        if fate is not None:
            return f"  {name}: {fate}"
    return f"  {name}: handed on as it is"


def _fate(
    pipeline: Pipeline, step: PlannedOperation, request: PlanRequest, quantized: Quantized, enters: bool
) -> str | None:
    """None if this step hands it on."""
    index = step.indices[0 if enters else -1]
    operation = pipeline.operations[index]
    where = f"operation {pipeline.labels[index]} ({type(operation).__name__})"
    if not step.operation.accepts_quantized:
        fusion = f" in {type(step.operation).__name__}" if step.fused else ""
        return f"dequantized for {where}{fusion}, which computes with values"
    if not operation.parameter_names():
        return None
    quantizer = (operation.input_quantizer if enters else operation.grad_output_quantizer)(request.recipe)
    if quantizer is None:
        return f"dequantized for {where}, which the recipe leaves in high precision"
    needed = {"rowwise": enters or bool(request.needs[0]) or index > 0, "columnwise": _needs_wgrad(operation)}
    reason = why_not_reused(quantized, quantizer, **needed, splits=_splits(operation, quantized))
    if reason is not None:
        return f"dequantized for {where}, and quantized anew: {reason}"
    missing = [each for each, need in needed.items() if need and getattr(quantized, each) is None]
    made = ""
    if missing:
        made = f"; where a product reads a {missing[0]} copy, that is made of these values, so rounded twice"
    return f"codes multiplied as they are by {where}{made}"


def _needs_wgrad(operation: BasicOperation) -> bool:
    return any(parameter.requires_grad for parameter in operation.parameters())


def _splits(operation: BasicOperation, quantized: Quantized) -> Splits | None:
    """Those by which the operation divides rows, which are taken to be those of the rows."""
    if Splits not in operation.extra_inputs.values():
        return None
    if isinstance(quantized, GroupedTensor):
        return quantized.splits
    return Splits.whole(quantized.shape[0], quantized.device)
