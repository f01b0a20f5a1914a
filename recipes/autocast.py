"""autocast: choose the recipe for everything that runs inside."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch.distributed as dist
from torch import Tensor

from recipes.effects import Effect, perform
from recipes.names import as_recipe
from recipes.pending import PendingUpdates, RecordsAmaxes, end_steps, forget
from recipes.recipe import HighPrecision, Recipe
from recipes.stack import CastScales, Entry, current_updates, stack


@contextmanager
def autocast(
    recipe: Recipe | str | None = None,
    enabled: bool = True,
    *,
    amax_reduction_group: dist.ProcessGroup | None = None,
    keep_weights: Tensor | None = None,
    scales: CastScales | None = None,
) -> Iterator[Recipe]:
    """Run what is inside under `recipe`, a Recipe or a name such as "mxfp8"; also a decorator.

    Contexts nest, and the innermost one counts. `enabled=False`, like None, means high precision. Yields the recipe.

    The outermost context is a step of delayed scaling: when it ends, the amaxes of what forward quantized with
    gradients on go into the histories and give the next step's scales; if it ends by an exception they are forgotten.
    amax_reduction_group: the process group that takes part in their maximum; by default all processes
    keep_weights: for CUDA graphs, a tensor of one number on the device. What is captured inside casts its weights at
        each replay, unless this number is not 0 then: it multiplies with the codes of the replay before. Set it to 0
        for the first microbatch of a step (of any graph captured with the same weights), to 1 for the others.
        Outside of a capture it is not looked at, but run the same passes once under it before they are captured.
    scales: where `fuser.checkpoint` keeps the scales of a first run for its recomputation

    The stack is one for the process: enter contexts from one thread at a time. Plain `torch.utils.checkpoint` computes
    again outside of the context, unless backward runs inside; `fuser.checkpoint` enters the recipe again.
    """
    chosen = as_recipe(recipe) if enabled else HighPrecision()
    outermost = not stack
    updates = PendingUpdates(amax_reduction_group) if outermost else stack[0].updates
    entry = Entry(chosen, updates, scales, keep_weights)
    stack.append(entry)
    try:
        yield chosen
    except BaseException:
        if outermost:
            entry.updates.discard()
        raise
    finally:
        # its own entry, also if another thread has put one on top
        del stack[next(i for i, other in enumerate(stack) if other is entry)]
    if outermost:
        quantizers = entry.updates.take()
        if quantizers:
            perform(Effect(_end_of_step, (quantizers, amax_reduction_group), partial(forget, quantizers)))


def _end_of_step(quantizers: Mapping[int, RecordsAmaxes], group: dist.ProcessGroup | None) -> None:
    """Of an outermost context; but one that a graph replays within another autocast is part of that one's step."""
    updates = current_updates()
    if updates is None:
        end_steps(quantizers, group)
    else:
        updates.join(quantizers)
