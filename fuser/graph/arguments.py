"""The arguments of `make_graphed_callables`, also under TransformerEngine's names: settings, samples, a schedule."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from fuser.graph.checks import check_module, move_split_sizes
from fuser.graph.instance import CAPTURE_HOOKS, CaptureHooks, Instance, Sample, Settings
from fuser.schedule.run import delaying
from fuser.schedule.schedule import Place, Schedule
from recipes.recipe import HighPrecision
from recipes.registry import as_recipe
from recipes.stack import current_recipe, recipe_in_use

# Arguments of TransformerEngine's function that are not supported, and what to use instead.
_REFUSED = {
    "calibrating": "Recipes that keep statistics gather them in every forward with gradients.",
    "fp8_calibrating": "Recipes that keep statistics gather them in every forward with gradients.",
}
# TransformerEngine's names for arguments that have other names here.
_RENAMED = {
    "fp8_enabled": "enabled",
    "fp8_recipe": "recipe",
    "fp8_group": "amax_reduction_group",
    "fp8_weight_caching": "cache_quantized_params",
    "_order": "schedule",
    "_num_layers_per_chunk": "layers",
    "_reuse_graph_input_output_buffers": "share_buffers",
}
_DEFAULTS = {"enabled": True, "cache_quantized_params": False}


def renamed(others: Mapping[str, Any], **options: Any) -> dict[str, Any]:
    """The options, with those of `others` added under their names here.

    Raises TypeError for an unknown name, ValueError for an option given under both names, NotImplementedError for an
    unsupported one.
    """
    for old, value in others.items():
        if old in _REFUSED and value:
            raise NotImplementedError(f"{old} is not supported. {_REFUSED[old]}")
        if old in _RENAMED and value is not None:
            name = _RENAMED[old]
            if options[name] is not _DEFAULTS.get(name):
                raise ValueError(f"{old} and {name} are two names of one argument. Give one.")
            options[name] = value
        elif old not in _RENAMED and old not in _REFUSED:
            raise TypeError(f"make_graphed_callables() has no argument {old!r}.")
    return options


def make_samples(sample_args: Sequence[Any], sample_kwargs: Any) -> list[Sample]:
    """The sample arguments of each module; a single tensor counts as a tuple of one."""
    args = [arg if isinstance(arg, tuple | list) else (arg,) for arg in sample_args]
    kwargs: Sequence[Mapping[str, Any]] = [{}] * len(args) if sample_kwargs is None else list(sample_kwargs)
    if len(kwargs) != len(args):
        raise ValueError(f"There are {len(args)} sample_args and {len(kwargs)} sample_kwargs. Give as many of each.")
    return [Sample(*pair) for pair in zip(args, kwargs, strict=True)]


def make_settings(
    modules: Sequence[nn.Module], samples: Sequence[Sample], options: Mapping[str, Any]
) -> list[Settings]:
    """The settings of each module. Raises TypeError for anything but modules, ValueError without any tensor."""
    for module in modules:
        if not isinstance(module, nn.Module):
            raise TypeError(f"{module!r} is a {type(module).__name__}. Give torch.nn.Modules.")
    tensors: list[Tensor] = [t for module in modules for t in module.parameters()]
    tensors += [tensor for sample in samples for tensor in sample.tensors]
    if not tensors or not modules:
        raise ValueError("Neither the modules nor sample_args have a tensor, so there is nothing to capture.")
    device = tensors[0].device
    enabled = True if options["enabled"] is None else options["enabled"]
    each = [enabled] * len(modules) if isinstance(enabled, bool) else list(enabled)
    if len(each) != len(modules):
        raise ValueError(f"enabled has {len(each)} values for {len(modules)} modules. Give one, or one for each.")
    recipe = options["recipe"]
    chosen = current_recipe() if recipe is None else as_recipe(recipe)
    flag = torch.zeros((), device=device) if options["cache_quantized_params"] else None
    torch_autocast = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
    return [
        Settings(
            device, recipe_in_use(chosen if on else HighPrecision()), options["amax_reduction_group"], flag,
            torch_autocast, torch.is_grad_enabled() and module.training,
        )
        for module, on in zip(modules, each, strict=True)
    ]  # fmt: skip


def make_capture_hooks(modules: Sequence[nn.Module], given: Any) -> list[CaptureHooks]:
    """The hooks of each module, by the names of `CAPTURE_HOOKS`.

    Raises ValueError for another number of entries than modules and for unknown names, TypeError for what is no dict.
    """
    entries = [None] * len(modules) if given is None else list(given)
    if len(entries) != len(modules):
        raise ValueError(
            f"capture_time_hooks has {len(entries)} entries for {len(modules)} modules. Give a dict or None for each."
        )
    for entry in entries:
        if entry is not None and not isinstance(entry, Mapping):
            raise TypeError(f"capture_time_hooks holds {entry!r}. Give a dict of hooks, or None, for each module.")
        for name in entry or ():
            if name not in CAPTURE_HOOKS:
                known = ", ".join(map(repr, CAPTURE_HOOKS))
                raise ValueError(f"capture_time_hooks has hooks {name!r}, which do not exist. There are: {known}.")
    return [{name: tuple(hooks.values()) for name, hooks in (entry or {}).items()} for entry in entries]


def make_instances(
    schedule: Schedule, modules: Sequence[nn.Module], samples: Sequence[Sample], settings: Sequence[Settings],
    *, allow_unused: bool, retain: bool, capture_hooks: Sequence[CaptureHooks],
) -> dict[Place, Instance]:  # fmt: skip
    """An Instance for each forward of the schedule, checked. samples: one for each forward, or for each module."""
    number = len(modules) * schedule.microbatches
    if len(samples) not in (len(modules), number):
        raise ValueError(
            f"There are {len(samples)} sample_args, {len(modules)} modules and {schedule.microbatches} microbatches. "
            f"Give one for each module, or {number}, one for each of its forwards."
        )
    instances = {}
    for place in _places(schedule):
        at = sum(schedule.layers[: place[0] - 1]) + place[2]
        sample = samples[schedule.index(place) if len(samples) == number else at]
        move_split_sizes(modules[at], sample, settings[at])
        check_module(modules[at], sample, settings[at])
        instances[place] = Instance(
            modules[at], sample, settings[at], unused=allow_unused, retain=retain, capture_hooks=capture_hooks[at]
        )
    return instances


def make_schedule(
    modules: Sequence[nn.Module], settings: Sequence[Settings], given: Any, layers: Sequence[int] | int | None,
    follows: Collection[int],
) -> Schedule:  # fmt: skip
    """The given schedule, checked against the modules; by default all forwards, then all dgrads, then all wgrads."""
    count = len(modules)
    if given is None:
        delayed = [s.with_backward and any(True for _ in delaying(m)) for m, s in zip(modules, settings, strict=True)]
        wgrads = [f"W{c}" for c in range(count, 0, -1) if delayed[c - 1]]
        forward, backward = [f"F{c}" for c in range(1, count + 1)], [f"B{c}" for c in range(count, 0, -1)]
        return Schedule.parse([*forward, *backward, *wgrads], layers=[1] * count, delayed=delayed)
    if isinstance(given, Schedule):
        parsed = given
    else:
        parsed = Schedule.parse(given, layers=layers)
        if layers is None and count % len(parsed.layers) == 0:  # the same number for all chunks
            parsed = Schedule.parse(given, layers=[count // len(parsed.layers)] * len(parsed.layers))
    if sum(parsed.layers) != count:
        raise ValueError(
            f"There are {count} modules, but the schedule has {list(parsed.layers)} layers by chunk. Give one for each."
        )
    starts = [sum(parsed.layers[:chunk]) for chunk in range(len(parsed.layers) + 1)]
    training = all(s.with_backward for s in settings)
    chunks = [modules[start:end] for start, end in pairwise(starts)]
    return Schedule.parse(
        parsed.entries,
        layers=parsed.layers,
        delayed=[any(True for m in chunk for _ in delaying(m)) for chunk in chunks] if training else None,
        follows=follows,
    )


def _places(schedule: Schedule) -> list[Place]:
    return [
        (chunk, microbatch, layer)
        for chunk, count in enumerate(schedule.layers, 1)
        for microbatch in range(schedule.microbatches)
        for layer in range(count)
    ]


def check_alike(schedule: Schedule, instances: Mapping[Place, Instance]) -> None:
    """Raise ValueError unless the samples of a layer have the same form in all microbatches."""
    for place in _places(schedule):
        first = instances[place[0], 0, place[2]]
        if instances[place].inputs != first.inputs:
            raise ValueError(
                f"The samples of chunk {place[0]}, layer {place[2]} differ from microbatch to microbatch, but buffers "
                "are shared. Give all the same form, or share_buffers=False."
            )
