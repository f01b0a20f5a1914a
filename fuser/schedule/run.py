"""Run a schedule eagerly with plain autograd: the reference that a captured schedule must match bit for bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuser.schedule.schedule import Pass, Place, Schedule, check_schedule

Key = tuple[int, int]  # chunk, microbatch
Value = Tensor | tuple[Tensor, ...]  # input or output of a layer
Grads = tuple[Tensor | None, ...]  # one gradient for each tensor of a Value


class ScheduleRun(NamedTuple):
    """The results of a run, by (chunk, microbatch).

    outputs:     detached outputs of each chunk that no other chunk follows
    input_grads: gradients of the given inputs, in the same structure; None for a tensor that does not require grad
    """

    outputs: dict[Key, Value]
    input_grads: dict[Key, Tensor | Grads | None]


class _Kept(NamedTuple):
    """Kept from a layer's forward for its dgrad: its inputs as leaves, and its outputs with their graph."""

    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]


def run_schedule(
    schedule: Schedule,
    chunks: Sequence[Sequence[nn.Module]],
    inputs: Mapping[Key, Value],
    output_grads: Mapping[Key, Tensor | Grads | None],
) -> ScheduleRun:
    """Run the events of a schedule in order. Parameter gradients are accumulated as by `backward()`.

    chunks:       the layers of each chunk; a layer takes and returns one or several tensors
    inputs:       by (chunk, microbatch). A chunk without inputs takes the outputs of the preceding chunk
    output_grads: by (chunk, microbatch), for each chunk that no other chunk follows

    A W event calls `backward_dw()` of the layer, or, if it has none, of the modules in it that do, the last first. A
    module delays its wgrad if it has this method, unless its `delay_wgrad_compute` is False.

    Each chunk runs its microbatches in order, so its parameter gradients are bit for bit those of running microbatch
    after microbatch. Random numbers are drawn in the order of the schedule.

    Raises ScheduleError if the schedule does not match the layers (rules R1 and R8), ValueError for missing or
    superfluous layers, inputs or gradients, TypeError for an order that is no Schedule; all before anything is run.
    """
    follows = _check(schedule, chunks, inputs, output_grads)
    values: dict[Key, Value] = {}  # outputs of a chunk, until the next one consumes them
    grads: dict[Key, Grads] = {}  # input gradients of a chunk, until the preceding one consumes them
    waiting: dict[Place, _Kept] = {}
    for entry in schedule.entries:
        assert entry.microbatch is not None, f"{entry} was not checked"
        chunk, microbatch = key = entry.chunk, entry.microbatch
        layers = chunks[chunk - 1]
        if entry.kind is Pass.FORWARD:
            value = values.pop((chunk - 1, microbatch)) if chunk in follows else inputs[key]
            for event in schedule.spread(entry):
                value, waiting[event.instance] = _forward(layers[event.layer], value)
            values[key] = _apply(_cut, value)
        elif entry.kind is Pass.DGRAD:
            d_value = grads.pop((chunk + 1, microbatch)) if chunk + 1 in follows else _as_tuple(output_grads[key])
            for event in schedule.spread(entry):
                d_value = _dgrad(waiting.pop(event.instance), d_value)
            grads[key] = d_value
        else:
            for event in schedule.spread(entry):
                for module in delaying(layers[event.layer]):
                    module.backward_dw()
    return ScheduleRun(
        {key: _apply(Tensor.detach, value) for key, value in values.items()},
        {key: grads[key][0] if isinstance(value, Tensor) else grads[key] for key, value in inputs.items()},
    )


def _forward(layer: nn.Module, value: Value) -> tuple[Value, _Kept]:
    inputs = _as_tuple(_apply(_cut, value))
    with torch.enable_grad():
        output = layer(*inputs)
    if not all(isinstance(tensor, Tensor) for tensor in _as_tuple(output)):
        raise TypeError(
            f"{type(layer).__name__} gave {type(output).__name__}. A layer gives a tensor or a tuple of them."
        )
    return output, _Kept(inputs, _as_tuple(output))


def _dgrad(kept: _Kept, d_outputs: Grads) -> Grads:
    if len(d_outputs) != len(kept.outputs):
        raise ValueError(f"There are {len(d_outputs)} output gradients for {len(kept.outputs)} outputs. Give one each.")
    wanted = [(y, dy) for y, dy in zip(kept.outputs, d_outputs, strict=True) if y.requires_grad and dy is not None]
    if wanted:
        torch.autograd.backward([y for y, _ in wanted], [dy for _, dy in wanted])
    return tuple(x.grad for x in kept.inputs)


def delaying(module: nn.Module) -> Iterator[Any]:
    """The modules that delay their wgrad: this one, or those inside it, the last first."""
    if hasattr(module, "backward_dw"):
        if getattr(module, "delay_wgrad_compute", True):
            yield module
        return
    for child in reversed(list(module.children())):
        yield from delaying(child)


def _check(
    schedule: Schedule,
    chunks: Sequence[Sequence[nn.Module]],
    inputs: Mapping[Key, Value],
    output_grads: Mapping[Key, Tensor | Grads | None],
) -> set[int]:
    """Raise unless all arguments match; return the chunks that take the outputs of the preceding chunk."""
    check_schedule(schedule)
    given = tuple(len(layers) for layers in chunks)
    if given != schedule.layers:
        raise ValueError(f"chunks have {given} layers, but the schedule has {schedule.layers}. Give as many of each.")
    numbers = range(1, len(chunks) + 1)
    follows = {chunk for chunk in numbers if all(key[0] != chunk for key in inputs)} - {1}
    ends = {chunk for chunk in numbers if chunk + 1 not in follows}
    for name, mapping, wanted in (("inputs", inputs, {*numbers} - follows), ("output_grads", output_grads, ends)):
        keys = {(chunk, microbatch) for chunk in wanted for microbatch in range(schedule.microbatches)}
        if missing := sorted(keys - mapping.keys()):
            raise ValueError(f"{name} lacks (chunk, microbatch) {missing}. Give one for each microbatch of a chunk.")
        if unknown := sorted(mapping.keys() - keys):
            raise ValueError(
                f"{name} has (chunk, microbatch) {unknown}, which nothing takes. The schedule has {len(chunks)} chunks "
                f"and {schedule.microbatches} microbatches; {sorted(follows)} follow on the chunk before."
            )
    Schedule.parse(
        schedule.entries,
        layers=schedule.layers,
        delayed=[any(True for layer in layers for _ in delaying(layer)) for layers in chunks],
        follows=follows,
    )
    return follows


def _as_tuple(value: Tensor | Grads | None) -> tuple[Any, ...]:
    return value if isinstance(value, tuple) else (value,)


def _apply(function: Callable[[Tensor], Tensor], value: Value) -> Value:
    return function(value) if isinstance(value, Tensor) else tuple(function(tensor) for tensor in value)


def _cut(tensor: Tensor) -> Tensor:
    """The same data as a leaf that requires grad if the tensor does."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
