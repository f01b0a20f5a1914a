"""Checks before a capture for what graphs cannot repeat, and before a replay for what must be as in the capture."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuser.graph.instance import Form, Sample, Settings
from fuser.layout import Container
from fuser.plan import fusions_version
from fuser.schedule.schedule import Event, Pass, Schedule
from ops.products.paths import choose_path
from ops.runner.operation import BasicOperation
from ops.runner.parameters import planned_dtype
from ops.runner.run import Pipeline
from recipes.recipe import recipe_within
from recipes.registry import RECIPES
from recipes.request import PlanRequest
from recipes.tensors.quantized_handle import held_tensors
from recipes.tensors.splits import Splits

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def move_split_sizes(module: nn.Module, sample: Sample, settings: Settings) -> None:
    """Copy split sizes that are given as a tensor on the host to the device, so that a graph can read others there."""
    requests = _requests(module, settings)
    kinds = [(operation, local, kind) for _, operation, _ in requests for local, kind in operation.extra_inputs.items()]
    sample.move({operation.extra_name(local) for operation, local, kind in kinds if kind is Splits}, settings.device)


def check_module(module: nn.Module, sample: Sample, settings: Settings) -> None:
    """Raise if a graph of this module could not repeat what the module does.

    TypeError for tensors within containers, ValueError for tensors on another device, RuntimeError for modules with
    hooks or with pending delayed weight gradients, NotImplementedError for operations that synchronize with the device.
    """
    name, device = type(module).__name__, settings.device
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(f"A CUDA graph is being captured on this stream, and {name} would begin another one.")
    for path, inner in module.named_modules():
        if any(getattr(inner, hooks) for hooks in HOOKS):
            raise RuntimeError(
                f"{name} has hooks on {path or 'itself'!r} ({type(inner).__name__}; FSDP2 has some, too), and a replay "
                "calls none. Capture it without them, or call what they do around the replay."
            )
    held: list[tuple[str, Tensor]] = [(f"parameter {key!r}", t) for key, t in module.named_parameters()]
    held += [(f"buffer {key!r}", t) for key, t in module.named_buffers()]
    held += [(f"sample {sample.names[index]!r}", sample.values[index]) for index in sample.at]
    for what, tensor in held:
        if tensor.device != device:
            raise ValueError(f"{name}: {what} is on {tensor.device}, but the first tensor on {device}. Use one device.")
    for key, value in zip(sample.names, sample.values, strict=True):
        if _has_tensors(value):
            raise TypeError(
                f"Argument {key!r} is a {type(value).__name__} with tensors in it. Give each tensor as an argument of "
                "its own: at a replay it is copied into memory of the graph's."
            )
    if getattr(module, "need_backward_dw", bool)():
        raise RuntimeError(f"{name} has weight gradients left. Call backward_dw() before the capture.")
    for label, operation, request in _requests(module, settings):
        reason = _why_not_graph_safe(operation, request)
        if reason is not None:
            raise NotImplementedError(f"Operation {label} ({type(operation).__name__}) cannot be captured: {reason}")
        splits = [key for key in operation.extra_inputs if operation.extra_inputs[key] is Splits]
        for key in (operation.extra_name(local) for local in splits):
            value = sample.values[sample.names.index(key)] if key in sample.names else None
            if value is not None and not isinstance(value, Tensor):
                raise ValueError(
                    f"{key!r} is a {type(value).__name__}: on the host, so every replay would have the same sizes. "
                    f"Give a tensor on {device}; each call may then bring others."
                )


def _has_tensors(value: object) -> bool:
    if isinstance(value, Mapping):
        value = list(value.values())
    return isinstance(value, list | tuple | set) and any(isinstance(v, Tensor) or _has_tensors(v) for v in value)


def _requests(module: nn.Module, settings: Settings) -> Iterator[tuple[str, BasicOperation, PlanRequest]]:
    """Every operation in the module, with its path in the module and the request that determines its kernels."""
    in_containers = set()
    for container in [inner for inner in module.modules() if isinstance(inner, Container)]:
        for stage in container.layout().stages:
            if isinstance(stage.runner, Pipeline):
                operations = list(zip(stage.runner.labels, stage.runner.operations, strict=True))
            elif isinstance(stage.runner, BasicOperation):
                operations = [(stage.label, stage.runner)]
            else:
                continue
            for label, operation in operations:
                in_containers.add(operation)
                yield label, operation, _request(operation, settings, container.path)
    for label, operation in module.named_modules():
        if isinstance(operation, BasicOperation) and operation not in in_containers:
            yield label or "0", operation, _request(operation, settings, None)


def _request(operation: BasicOperation, settings: Settings, path: str | None) -> PlanRequest:
    chosen = recipe_within(operation.recipe, settings.recipe)
    parameters = list(operation.parameters())
    autocasts, of_autocast = settings.torch_autocast
    dtype = planned_dtype(
        (parameter.dtype for parameter in parameters), of_autocast if autocasts else None, torch.get_default_dtype()
    )
    needs = (True, (True,) * len(parameters), ())
    return PlanRequest(
        chosen, settings.device, dtype, needs, operation.training, path or chosen.path, fusions_version()
    )  # fmt: skip


def _why_not_graph_safe(operation: BasicOperation, request: PlanRequest) -> str | None:
    why = operation.why_not_captured(request)
    if why is not None:
        return f"{why} Capture the operations before it and behind it."
    if Splits not in operation.extra_inputs.values() or choose_path(request).name != "split":
        return None
    why = request.recipe.why_not_grouped(request) or "path='split' was asked for."
    kinds = [kind for kind in RECIPES if kind.names]
    safe = [k.names[0] for k in kinds if k().why_not_grouped(request._replace(recipe=k(), path=None)) is None]
    others = f" Recipes that can be: {', '.join(map(repr, safe))}." if safe else ""
    return (
        f"it runs on the SplitPath, which reads the split sizes on the host, where a graph stops. {why} "
        f"Graph-safe is the GroupedPath: leave path unset, under a recipe that has it, or none.{others}"
    )


class InputCheck:
    """Checks that the arguments of a replay match the sample: shape, dtype, strides, device; constants equal."""

    def __init__(self, sample: Sample, label: str) -> None:
        self._sample = sample
        self._label = label
        self._forms = sample.forms
        self._accepted: list[tuple[Any, ...]] = [() for _ in sample.forms]

    def __call__(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
        """Return the tensors among the arguments. Raises TypeError or ValueError before anything is changed."""
        sample = self._sample
        names = sample.names[sample.num_args :]
        if len(args) != sample.num_args or kwargs.keys() != set(names):
            raise TypeError(
                f"{self._label} was captured with {sample.num_args} positional arguments and {list(names)}, and called "
                f"with {len(args)} and {list(kwargs)}. Give the same."
            )
        values = [*args, *[kwargs[name] for name in names]] if names else args
        for index, value in enumerate(values):
            if index not in sample.at and value != sample.values[index]:
                raise ValueError(
                    f"{self._label}: argument {sample.names[index]!r} is {value!r}, but was captured as "
                    f"{sample.values[index]!r}, which is fixed in the graph. Only tensors may change."
                )
        tensors = [values[index] for index in sample.at]
        for number, (tensor, form) in enumerate(zip(tensors, self._forms, strict=True)):
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{self._label}: argument {sample.names[sample.at[number]]!r} is no tensor: {tensor!r}."
                )
            if sample.at[number] in sample.moved:
                tensor = tensors[number] = tensor.to(form.device)
            known = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype, tensor.requires_grad)
            if known != self._accepted[number]:
                self._check(sample.names[sample.at[number]], tensor, form)
                self._accepted[number] = known
        return tensors

    def _check(self, name: str, tensor: Tensor, form: Form) -> None:
        given, needed = Form.of(tensor), form
        strides = [
            (a, b) for a, b, size in zip(tensor.stride(), form.stride, form.shape, strict=False) if size > 1
        ]  # fmt: skip
        if given[0] == needed[0] and given[2:4] == needed[2:4] and all(a == b for a, b in strides):
            if tensor.requires_grad and not form.requires_grad and torch.is_grad_enabled():
                raise ValueError(
                    f"{self._label}: {name!r} requires a gradient, but its sample did not, so none was captured. "
                    "Detach it, or capture with a sample that requires one."
                )
            return
        says = [
            f"shape {list(f.shape)}, strides {list(s)}, {f.dtype}, on {f.device}"
            for f, s in ((given, tensor.stride()), (needed, needed.stride))
        ]
        raise ValueError(
            f"{self._label}: {name!r} has {says[0]}; captured was {says[1]}. Bring it into that form, "
            "or capture a graph for it."
        )


class HeldCheck:
    """Checks that a module's parameters are the captured ones, at the same addresses."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [
            (owner, f"{path}.{name}" if path else name, name, parameter)
            for path, owner in module.named_modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._seen = [self._look(parameter) for _, _, _, parameter in self._held]

    @staticmethod
    def _look(parameter: Tensor) -> tuple[tuple[int, ...], bool]:
        return tuple(tensor.data_ptr() for tensor in held_tensors(parameter)), parameter.requires_grad

    def __call__(self) -> None:
        for (owner, path, name, parameter), seen in zip(self._held, self._seen, strict=True):
            if owner._parameters[name] is not parameter:
                raise RuntimeError(f"Parameter {path!r} was replaced since the capture. {_AGAIN}")
            if self._look(parameter)[0] != seen[0]:
                raise RuntimeError(f"Parameter {path!r} has moved since the capture (.data, or .to()). {_AGAIN}")
            if parameter.requires_grad != seen[1]:
                raise RuntimeError(f"requires_grad of parameter {path!r} has changed since the capture. {_AGAIN}")


_AGAIN = "The graph knows the old one: change values in place (copy_), or capture again."


class ReplayOrder:
    """Checks that the results that an event reads are not overwritten: the order of replays against the schedule.

    Results that an event leaves for a later one of its instance (forward for dgrad, forward and dgrad for wgrad) are
    safe from the events between the two in the schedule, in any order. Any other event may overwrite their memory.
    """

    def __init__(self, schedule: Schedule, events: Sequence[Event], *, retain: bool) -> None:
        self._at = {event: position for position, event in enumerate(schedule.events)}
        self._retain = retain
        self._left: dict[tuple[Event, Event], Event | None] = {}  # (source, user) -> event that overwrote the results
        self.replays: Counter[Event] = Counter()
        captured = set(events)
        kinds = {Pass.FORWARD: (Pass.DGRAD, Pass.WGRAD), Pass.DGRAD: (Pass.WGRAD,), Pass.WGRAD: ()}
        users = {event: [event._replace(kind=kind) for kind in kinds[event.kind]] for event in events}
        self._users = {event: [user for user in users[event] if user in captured] for event in events}
        self._sources: dict[Event, list[Event]] = {event: [] for event in events}
        for event in events:
            for user in self._users[event]:
                self._sources[user].append(event)

    def check(self, event: Event) -> None:
        """Raise RuntimeError unless the event may be replayed now."""
        dgrad = event._replace(kind=Pass.DGRAD)
        if event.kind is not Pass.WGRAD and any((dgrad, user) in self._left for user in self._users.get(dgrad, ())):
            raise RuntimeError(
                f"{event} was called, but the wgrad that {dgrad} left is still to come, and would be lost. Call "
                "backward_dw() before; to have several outstanding, capture a schedule with as many microbatches."
            )
        for source in self._sources[event]:
            if (source, event) not in self._left:
                raise RuntimeError(
                    f"{event} was called, but {source} was not, or what it left is used up. Each {event.kind.noun} "
                    f"needs a {source.kind.noun} of its own, by the order that was captured."
                )
            spoiler = self._left[source, event]
            if spoiler is not None:
                raise RuntimeError(
                    f"{spoiler} was called between {source} and {event}. The schedule does not have it there, so it "
                    f"may have overwritten what the {source.kind.noun} left. Keep to the order of the schedule, or "
                    "capture the order in which they are called."
                )

    def done(self, event: Event) -> None:
        """Record that the event was replayed."""
        self.replays[event] += 1
        position = self._at[event]
        for (source, user), spoiler in self._left.items():
            if spoiler is None and not self._at[source] < position <= self._at[user]:
                self._left[source, user] = event
        if not (self._retain and event.kind is Pass.DGRAD):
            for source in self._sources[event]:
                del self._left[source, event]
        self._left |= dict.fromkeys((event, user) for user in self._users[event])
