"""Group the modules of a Sequential into stages: consecutive operations form pipelines, other modules are called.

A module of torch may declare the names of extra tensors, as attributes `extra_inputs` and `extra_outputs`. It is called
as `module(x, **extra inputs)`, and with `outputs=names` where some of its extra outputs are needed: then it returns
(y, {name: tensor}). Wrappers (checkpoint_wrapper, torch.compile, FSDP1, an adapter of peft) take what they wrap takes.
Of an operation they make what it makes; what a wrapped Sequential makes stays inside of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn

from fuser.plan import FusionPlanner
from ops.runner.named_extras import NamedExtras
from ops.runner.operation import BasicOperation
from ops.runner.run import Buffers, Pipeline
from ops.torch_function import check_names
from recipes.first_forwards import FirstForwards
from recipes.recipe import Recipe

Names = tuple[str, ...]

# By which a wrapper holds what it wraps: checkpoint_wrapper, torch.compile, FSDP1. peft has a method, get_base_layer.
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class Stage(NamedTuple):
    """One call of the Sequential. needs, makes: names of extra inputs and outputs. indices: positions of its modules in
    the outermost Sequential (None inside a nested one). label: position of the first module, dotted if nested."""

    runner: Pipeline | nn.Module
    needs: tuple[str, ...]
    makes: tuple[str, ...]
    indices: tuple[int | None, ...]
    label: str
    why_alone: str | None = None
    takes_tensors: bool = False  # extra inputs are handed to it as tensors, split sizes too


class Container(nn.Module):
    """The part of Sequential's interface that a Layout reads."""

    path: str | None
    retain_graph: bool
    planner: FusionPlanner
    first_forwards: FirstForwards

    def __iter__(self) -> Iterator[nn.Module]:
        raise NotImplementedError

    def can_be_flattened(self) -> bool:
        """Whether its forward does nothing but run its modules."""
        raise NotImplementedError

    def layout(self) -> Layout:
        """The current modules grouped into stages."""
        raise NotImplementedError


class Layout:
    """The stages of a Sequential, and the names that pass between them.

    Raises ValueError if two modules produce an extra output of the same name, if one consumes a name that only a
    later one produces, or if the feature sizes of neighbours (`features`) do not match.
    """

    def __init__(self, sequential: Container) -> None:
        self.planner = sequential.planner
        self.path = sequential.path
        self.retain_graph = sequential.retain_graph
        self._count = len(sequential._modules)
        self._first_forwards = sequential.first_forwards
        self._own_contents = _contents(sequential)
        self._contents: list[tuple[Container, tuple[Any, ...]]] = []  # nested only: no cycle with the layout's owner
        self._hooks: list[Mapping[Any, Any]] = []
        self._nested: list[tuple[Container, Layout]] = []
        self._hooked: list[tuple[Mapping[Any, Any], ...]] = []
        self._settings: list[tuple[BasicOperation, Mapping[str, str], Recipe | None]] = []
        self._names: list[tuple[NamedExtras, Mapping[str, str]]] = []  # of modules that are no operations
        self._declared: list[tuple[nn.Module, tuple[Names, Names]]] = []
        self.stages: list[Stage] = []
        self._run: list[tuple[int | None, str, BasicOperation]] = []
        self._collect(sequential, "")
        self._close_run()
        self.produced = tuple(name for stage in self.stages for name in stage.makes)
        self.consumed = self._check_names()
        self._check_features()
        later: set[str] = set()
        self.passed_on: list[tuple[str, ...]] = []
        for stage in reversed(self.stages):
            self.passed_on.insert(0, tuple(name for name in stage.makes if name in later))
            later |= set(stage.needs)

    def is_current(self, sequential: Container) -> bool:
        """Whether the modules, their hooks, and the operations' names and recipes are those of this layout."""
        return (
            not any(self._hooks)
            and _contents(sequential) == self._own_contents
            and all(o._names is names and o._recipe is recipe for o, names, recipe in self._settings)
            and all(module._names is names for module, names in self._names)
            and all(_contents(container) == contents for container, contents in self._contents)
            and all(any(hooks) for hooks in self._hooked)
            and all(nested.layout() is layout for nested, layout in self._nested)
            and all(_declared(module) == declared for module, declared in self._declared)
        )

    def buffers_of(self, stage: Stage, buffers: Mapping[int, Mapping[str, Tensor]]) -> Buffers:
        """The caller's buffers for the operations of this stage, by position in the stage."""
        count = self._count
        at = {index % count: named for index, named in buffers.items()}
        if len(at) < len(buffers):
            raise ValueError(f"buffers names one operation twice: {sorted(buffers)}. Give each operation one entry.")
        return {position: at[index] for position, index in enumerate(stage.indices) if index in at}

    def _collect(self, sequential: Container, prefix: str) -> None:
        if prefix:
            self._contents.append((sequential, _contents(sequential)))
        for index, module in enumerate(sequential):
            position, label = None if prefix else index, f"{prefix}{index}"
            hooks = tuple(getattr(module, name) for name in _HOOKS)
            hooked = any(hooks)
            (self._hooked.append(hooks) if hooked else self._hooks.extend(hooks))
            if isinstance(module, BasicOperation):
                self._settings.append((module, module._names, module._recipe))
            elif isinstance(inner := _wrapped(module), NamedExtras):
                self._names.append((inner, inner._names))
            if isinstance(module, BasicOperation) and not hooked:
                if self._run and self._run[-1][2].recipe != module.recipe:
                    self._close_run()
                self._run.append((position, label, module))
            elif isinstance(module, Container) and not hooked and self._same_settings(module):
                self._collect(module, f"{label}.")
            else:
                self._close_run()
                self.stages.append(self._alone(position, label, module, hooked))

    def _same_settings(self, nested: Container) -> bool:
        return (
            nested.can_be_flattened()
            and nested.path in (None, self.path)
            and nested.planner.fusions in (None, self.planner.fusions)
            and nested.retain_graph in (False, self.retain_graph)
        )

    def _alone(self, position: int | None, label: str, module: nn.Module, hooked: bool) -> Stage:
        why = "it has hooks of its own, or is sharded" if hooked else None
        inner = _wrapped(module)
        if isinstance(inner, NamedExtras):
            in_torch = not isinstance(inner, BasicOperation)
            if in_torch:
                why = why or "autograd differentiates it"
            needs = tuple(inner.extra_name(name) for name in inner.extra_inputs)
            makes = tuple(inner.extra_name(name) for name in inner.extra_outputs)
            return Stage(module, needs, makes, (position,), label, why, in_torch)
        if isinstance(module, Container):
            nested = module.layout()
            self._nested.append((module, nested))
            why = why or ("its settings differ" if module.can_be_flattened() else "it has a forward of its own")
            self._check_settings_reach(label, module, why)
            return Stage(module, nested.consumed, nested.produced, (position,), label, why)
        if isinstance(inner, Container):
            nested = inner.layout()
            self._nested.append((inner, nested))
            return Stage(module, nested.consumed, (), (position,), label, why)
        declared = _declared(inner)
        if any(declared):
            self._declared.append((inner, declared))
        return Stage(module, *declared, (position,), label, why, takes_tensors=True)

    def _check_settings_reach(self, label: str, nested: Container, why: str) -> None:
        """Raise if a setting of this Sequential would not apply to a nested one that is called instead of flattened."""
        lost = {
            "path": self.path is not None and nested.path is None,
            "fusions": self.planner.fusions is not None and nested.planner.fusions is None,
            "retain_graph": self.retain_graph and not nested.retain_graph,
        }
        names = [name for name, is_lost in lost.items() if is_lost]
        if names:
            raise ValueError(
                f"Module {label} is a {type(nested).__name__} that is called by itself because {why}, so "
                f"{' and '.join(names)} of the outer one would not reach it. Give it the same {' and '.join(names)}."
            )

    def _close_run(self) -> None:
        if self._run:
            pipeline = Pipeline(
                [operation for _, _, operation in self._run],
                planner=self.planner, path=self.path, retain_graph=self.retain_graph,
                labels=[label for _, label, _ in self._run], recipe=self._run[0][2].recipe,
                first_forwards=self._first_forwards,
            )  # fmt: skip
            indices = tuple(position for position, _, _ in self._run)
            self.stages.append(Stage(pipeline, pipeline.consumed, tuple(pipeline.produced), indices, self._run[0][1]))
            self._run = []

    def _check_names(self) -> tuple[str, ...]:
        for name in self.produced:
            if self.produced.count(name) > 1:
                raise ValueError(
                    f"{self.produced.count(name)} operations make the extra output {name!r}. Give one of them another "
                    f"name, with rename_extras. There are: {', '.join(map(repr, self.produced))}."
                )
        seen: set[str] = set()
        consumed: dict[str, None] = {}
        for stage in self.stages:
            consumed |= {name: None for name in stage.needs if name not in seen}
            seen |= set(stage.makes)
        too_late = [name for name in consumed if name in seen]
        if too_late:
            raise ValueError(
                f"The extra tensor {too_late[0]!r} is asked for before the operation that makes it. Move that "
                "operation to the front, or give one of the two another name, with rename_extras."
            )
        return tuple(consumed)

    def _check_features(self) -> None:
        features: int | None = None
        previous: BasicOperation | None = None
        for stage in self.stages:
            known: list[tuple[BasicOperation, str]] = []
            if isinstance(stage.runner, Pipeline):
                known = list(zip(stage.runner.operations, stage.runner.labels, strict=True))
            elif isinstance(stage.runner, BasicOperation):
                known = [(stage.runner, stage.label)]
            else:
                features = previous = None
            for operation, label in known:
                try:
                    features = operation.features(features)
                    if previous is not None:
                        operation.check_follows(previous)
                except ValueError as error:
                    raise ValueError(f"In operation {label} ({type(operation).__name__}): {error}") from error
                previous = operation


def _wrapped(module: nn.Module) -> nn.Module:
    """What a wrapper calls, through all of several; other modules, and those that declare names, themselves."""
    # Not by hasattr of the module itself: wrappers pass on the attributes of what they hold.
    declares = any(hasattr(type(module), name) or name in vars(module) for name in ("extra_inputs", "extra_outputs"))
    if declares or isinstance(module, Container):
        return module
    held = next((inner for name in _WRAPPED if (inner := module._modules.get(name)) is not None), None)
    if held is None and hasattr(type(module), "get_base_layer"):
        held = module._modules.get("base_layer")
    return module if held is None else _wrapped(held)


def _declared(module: nn.Module) -> tuple[Names, Names]:
    """The names of extra inputs and outputs that a module of torch declares."""
    found = []
    for attribute in ("extra_inputs", "extra_outputs"):
        names = getattr(module, attribute, ())
        names = tuple(names) if isinstance(names, Mapping) else names
        check_names(f"{type(module).__name__}.{attribute}", names)
        found.append(tuple(names))
    return found[0], found[1]


def _contents(container: Container) -> tuple[Any, ...]:
    """The settings and modules of a Container. A layout is stale once they differ."""
    return container.path, container.retain_graph, container.planner, *container._modules.values()
