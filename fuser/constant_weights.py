"""constant_weights of a model: the scope in which its weights stand still, and quantizing them as it is entered."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import torch
from torch import nn

from fuser.layout import Container
from fuser.plan import fusions_version
from fuser.sequentials import sequentials
from ops.products import constant_weights as scopes
from ops.runner.operation import BasicOperation
from ops.runner.run import Call, Pipeline, step_of
from ops.runner.torch_autocast import dtype_of_autocast, without_autocast
from recipes.autocast import autocast
from recipes.recipe import Recipe, Role
from recipes.registry import as_recipe
from recipes.stack import current_recipe, records_amaxes


class constant_weights(scopes.constant_weights):
    """`ops.products.constant_weights`, of models of `fuser.hf` too, and perhaps ahead of the first pass.

    prepare: quantize all weights as the scope is entered, as the passes inside will: with gradients enabled both copies
             of each, else the rowwise one alone. True: under the recipe of the `autocast` around, or of the operations'
             own; a Recipe or its name: under that one, so that an `autocast` may be opened for each microbatch inside.
             Under delayed scaling this is the cast that records the amaxes, of the step around, or of one of its own.
             None, or a Recipe that quantizes no weights: nothing is to be done ahead.

        with constant_weights(model, prepare="mxfp8"):
            for x in batch:
                with autocast("mxfp8"):
                    loss = model(x).sum()
                loss.backward()

    At their first use are quantized weights that are gathered for each pass (FSDP2) or computed, those of operations
    with hooks, and what runs under another recipe, another torch.autocast, or in an activation checkpoint.

    Raises what `ops.products.constant_weights` raises; TypeError for what is no module; TypeError or ValueError for a
    `prepare` that is no recipe. On entering, ValueError where weights are to be quantized and none would be, and
    RuntimeError while a CUDA graph is captured, which quantizes weights in each replay.
    """

    def __init__(self, *modules: nn.Module, debug: bool = False, prepare: bool | Recipe | str | None = False) -> None:
        for module in modules:
            if not isinstance(module, nn.Module):
                raise TypeError(f"constant_weights got a {type(module).__name__}, which is no module. Give the model.")
        layers = [layer for module in modules for _, layer in sequentials(module)]  # some are outside of the modules
        super().__init__(*dict.fromkeys([*modules, *layers]), debug=debug)
        self._modules = modules
        self._recipe = None if prepare is None or isinstance(prepare, bool) else as_recipe(prepare)
        self._prepares = prepare is not None and prepare is not False

    def __enter__(self) -> None:
        super().__enter__()
        if not self._prepares:
            return
        try:
            with nullcontext() if self._recipe is None else autocast(self._recipe):
                self._prepare()
        except BaseException:
            self.end()
            raise

    def _prepare(self) -> None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "constant_weights(prepare=...) was entered while a CUDA graph is captured, which quantizes weights in "
                "each replay. Enter it before, or capture under autocast(recipe, keep_weights=flag)."
            )
        found = [pair for module in self._modules for pair in _pipelines(module)]
        count = sum(_prepared(pipeline, training) for pipeline, training in found)
        if not count and (self._recipe is None or self._recipe.quantizer(Role.WEIGHT) is not None):
            raise ValueError(
                f"constant_weights(prepare=...) was entered under {current_recipe().name!r}, under which no weight of "
                "these modules is quantized ahead. Open autocast(recipe) around it, give prepare=recipe, or leave "
                "prepare out."
            )


def _pipelines(module: nn.Module) -> Iterator[tuple[Pipeline, bool]]:
    """The pipelines that run what the module contains, and whether it is in training."""
    for _, sequential in sequentials(module):
        yield from _of_container(sequential)


def _of_container(container: Container) -> Iterator[tuple[Pipeline, bool]]:
    for stage in container.layout().stages:
        if isinstance(stage.runner, Pipeline):
            yield stage.runner, container.training
        elif isinstance(stage.runner, Container):
            yield from _of_container(stage.runner)
        elif not isinstance(stage.runner, BasicOperation):
            yield from _pipelines(stage.runner)


def _prepared(pipeline: Pipeline, training: bool) -> int:
    """Quantize the weights of its operations; of how many."""
    parameters = pipeline.parameters()
    if not parameters.present:
        return 0
    first = parameters.present[0]
    x = torch.empty(0, dtype=first.dtype, device=first.device)
    needs = pipeline.needs_now(True)
    autocast_dtype = dtype_of_autocast(x.device)
    program = pipeline.program_for(x, parameters, needs, autocast_dtype, training, fusions_version())
    call = Call(program, {}, (), {}, pipeline, None)
    if program.computed:
        call.hold_computed(parameters.present)
    count = 0
    recording = step_of(call, records=records_amaxes()) if program.keeps_state else nullcontext()
    with without_autocast(x.device), recording:
        for index, operation in enumerate(pipeline.operations):
            ahead = operation.weights_scope is not None and not operation.exchanges_parameters
            context = call.context(index, call.updates)
            if ahead and not context.computed and operation.prepare_weights(context) is not None:
                count += 1
    return count
