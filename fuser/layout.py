"""Group the modules of a Sequential into stages: consecutive operations form pipelines, other modules are called.

A module of torch may declare the names of extra tensors, as attributes `extra_inputs` and `extra_outputs`. It is called
as `module(x, **extra inputs)`, and with `outputs=names` where some of its extra outputs are needed: then it returns
(y, {name: tensor}). Wrappers (checkpoint_wrapper, torch.compile, FSDP1, an adapter of peft) take what they wrap takes,
and make what it makes.

A name stands for what the nearest module before makes by it, or for the caller's tensor. What a nested Sequential makes
stays inside of it, but for the names in its `exports`. It is flattened where no name that it keeps is used outside too.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn

from fuser.plan import FusionPlanner
from ops.runner.built_in import is_built_in
from ops.runner.callers_buffers import place_of
from ops.runner.callers_extras import check_extras
from ops.runner.hooks import is_hooked
from ops.runner.named_extras import NamedExtras
from ops.runner.operation import BasicOperation
from ops.runner.run import Buffers, Pipeline
from ops.torch_function import check_names
from recipes.first_forwards import FirstForwards
from recipes.recipe import Recipe

Names = tuple[str, ...]

# By which a wrapper holds what it wraps: checkpoint_wrapper, torch.compile, FSDP1. peft has a method, get_base_layer.
_WRAPPED = ("_checkpoint_wrapped_module", "_orig_mod", "_fsdp_wrapped_module")
_OWN_FORWARD = "it has a forward of its own"


def _has_own_forward(module: nn.Module) -> bool:
    """Whether calling it does something else than what an operation or a Sequential does."""
    if "forward" in module.__dict__:  # as accelerate's hooks
        return True
    kind = type(module)
    if not issubclass(kind, BasicOperation):
        return False
    return not is_built_in(kind.forward) or kind.__call__ is not nn.Module.__call__


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


class _Seen(NamedTuple):
    """What a module was that a Layout has seen.

    attributes: of it, as they are now; patched: whether forward was among them; hooked: whether it had hooks
    parameters, children: the dictionaries of these, which pipelines hold (None: of torch.jit.trace)
    """

    attributes: Mapping[str, Any]
    patched: bool
    hooked: bool
    parameters: Any
    children: Any

    @classmethod
    def of(cls, module: nn.Module) -> _Seen:
        attributes = vars(module)
        own = attributes.get("_parameters"), attributes.get("_modules")
        return cls(attributes, "forward" in attributes, is_hooked(attributes), *own)


class _Names(NamedTuple):
    """The names of extra tensors that a module takes from its Sequential, makes for it, and makes for itself."""

    asked: frozenset[str]
    made: frozenset[str]
    kept: frozenset[str] = frozenset()

    @classmethod
    def of(cls, asked: Names, made: Names) -> _Names:
        return cls(frozenset(asked), frozenset(made))

    @property
    def all(self) -> frozenset[str]:
        return self.asked | self.made | self.kept


class Container(nn.Module):
    """The part of Sequential's interface that a Layout reads."""

    path: str | None
    exports: Names = ()
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

    consumed: the names that the caller gives; produced: those that it may be given

    Raises ValueError if a module consumes a name that only a later one produces, if nothing in the Sequential makes one
    of its `exports`, or if the feature sizes of neighbours (`features`) do not match. Warns where rows are summed whose
    weights nothing has read (`NamedExtras.weights_of_rows`). TypeError for a module that was set to None.
    """

    def __init__(self, sequential: Container) -> None:
        self.planner = sequential.planner
        self.path = sequential.path
        self._count = len(sequential._modules)
        self._first_forwards = sequential.first_forwards
        self._own_contents = _contents(sequential)
        self._exports = sequential.exports
        self._contents: list[tuple[Container, tuple[Any, ...]]] = []  # nested only: no cycle with the layout's owner
        self._nested: list[tuple[Container, Layout]] = []
        self._seen: list[_Seen] = []
        self._settings: list[tuple[BasicOperation, type, Mapping[str, str], Recipe | None]] = []
        self._names: list[tuple[NamedExtras, Mapping[str, str]]] = []  # of modules that are no operations
        self._declared: list[tuple[nn.Module, tuple[Names, Names]]] = []
        self._hidden: set[str] = set()  # made by flattened Sequentials, which keep it
        self._kept: dict[str, str] = {}  # the same of all nested ones: which of them makes it
        self._makers: list[tuple[str, str]] = []  # name, and what makes it in words
        self.stages: list[Stage] = []
        self._run: list[tuple[int | None, str, BasicOperation]] = []
        self._collect(sequential, "", frozenset())
        self._close_run()
        made = dict.fromkeys(name for stage in self.stages for name in stage.makes)
        self.produced = tuple(name for name in made if name not in self._hidden)
        only = self.stages[0].runner if len(self.stages) == 1 else None
        self.pipeline = only if isinstance(only, Pipeline) else None  # where there is nothing else
        check_exports(sequential.exports, self.produced)
        self.consumed = self._check_names()
        self._check_features()
        self._check_extras_of_neighbours()
        self._check_weights()
        later: set[str] = set()
        self.passed_on: list[tuple[str, ...]] = []
        for stage in reversed(self.stages):
            self.passed_on.insert(0, tuple(name for name in stage.makes if name in later))
            later = (later - set(stage.makes)) | set(stage.needs)

    def is_current(self, sequential: Container) -> bool:
        """Whether the modules, their hooks, and the operations' classes, names and recipes are those of this layout."""
        if _contents(sequential) != self._own_contents:
            return False
        for operation, kind, names, recipe in self._settings:  # loops take the host less than `all` of generators
            if operation._names is not names or operation._recipe is not recipe or type(operation) is not kind:
                return False
        for attributes, patched, hooked, parameters, children in self._seen:
            if ("forward" in attributes) is not patched or is_hooked(attributes) is not hooked:
                return False
            if attributes.get("_parameters") is not parameters or attributes.get("_modules") is not children:
                return False
        for module, names in self._names:
            if module._names is not names:
                return False
        for container, contents in self._contents:
            if _contents(container) != contents:
                return False
        for nested, layout in self._nested:
            if nested.layout() is not layout:
                return False
        return all(_declared(module) == declared for module, declared in self._declared) if self._declared else True

    def check_extras(self, given: Mapping[str, Any], outputs: Sequence[str]) -> None:
        """Raise ValueError, listing what exists, if an extra input is missing or unknown, or if an output does not
        exist, is made by several modules and not exported, or is kept by a nested Sequential."""
        try:
            check_extras(self.consumed, self.produced, given, outputs)
        except ValueError as error:
            wanted = [*(name for name in self.consumed if name not in given), *outputs]
            kept = next((n for n in wanted if n in self._kept and (n in self.consumed or n not in self.produced)), None)
            if kept is None:
                raise
            raise ValueError(
                f"{error} {self._kept[kept]} makes {kept!r}, but keeps it: give that one exports=({kept!r},)."
            ) from None
        for name in outputs:
            makers = [maker for made, maker in self._makers if made == name]
            if len(makers) > 1 and name not in self._exports:  # what is exported is the last one's
                raise ValueError(
                    f"{len(makers)} operations make the extra output {name!r}: {', '.join(makers)}. Give one of them "
                    f"another name, with rename_extras (within a Sequential: of the operation that makes it). There "
                    f"are: {', '.join(map(repr, self.produced))}."
                )

    def buffers_of(self, stage: Stage, buffers: Mapping[int, Mapping[str, Tensor]]) -> Buffers:
        """The caller's buffers for the operations of this stage, by position in the stage."""
        count = self._count
        at = {index % count: named for index, named in buffers.items()}
        if len(at) < len(buffers):
            raise ValueError(f"buffers names one operation twice: {sorted(buffers)}. Give each operation one entry.")
        return {position: at[index] for position, index in enumerate(stage.indices) if index in at}

    def _collect(self, sequential: Container, prefix: str, outside: frozenset[str]) -> None:
        """outside: the names that are used outside of this Sequential."""
        if prefix:
            self._contents.append((sequential, _contents(sequential)))
        used = [self._names_of(module) for module in _members(sequential)]
        for index, module in enumerate(sequential):
            position, label = None if prefix else index, f"{prefix}{index}"
            self._seen.append(_Seen.of(module))
            hooked = self._seen[-1].hooked
            own_forward = _has_own_forward(module)
            if isinstance(module, BasicOperation):
                self._settings.append((module, type(module), module._names, module._recipe))
            elif isinstance(inner := _wrapped(module), NamedExtras):
                self._names.append((inner, inner._names))
            if isinstance(module, BasicOperation) and not hooked and not own_forward:
                makes = [module.extra_name(name) for name in module.extra_outputs]
                made = {other.extra_name(name) for *_, other in self._run for name in other.extra_outputs}
                other_recipe = bool(self._run) and self._run[-1][2].recipe != module.recipe
                if module.begins_pipeline or other_recipe or not made.isdisjoint(makes):
                    self._close_run()
                self._run.append((position, label, module))
                self._makers += [(name, place_of(label, module)) for name in makes]
                continue
            why = "it has hooks of its own, or is sharded" if hooked else _OWN_FORWARD if own_forward else None
            if isinstance(module, Container) and not hooked and not own_forward and self._same_settings(module):
                kept = used[index].kept
                others = outside.union(*(names.all for at, names in enumerate(used) if at != index))
                why = _why_not_flattened(kept & others)
                if why is None:
                    self._hidden |= kept
                    self._kept |= dict.fromkeys(kept, f"Module {label} ({type(module).__name__})")
                    self._collect(module, f"{label}.", others)
                    continue
            self._close_run()
            stage = self._alone(position, label, module, why)
            self.stages.append(stage)
            self._makers += [(name, place_of(label, module)) for name in stage.makes]

    def _same_settings(self, nested: Container) -> bool:
        return (
            nested.can_be_flattened()
            and nested.path in (None, self.path)
            and nested.planner.fusions in (None, self.planner.fusions)
        )

    def _names_of(self, module: nn.Module) -> _Names:
        inner = _wrapped(module)
        if isinstance(inner, NamedExtras):
            return _Names.of(*_named(inner))
        if not isinstance(inner, Container):
            return _Names.of(*_declared(inner))
        if inner is not module or not self._same_settings(inner):
            layout = inner.layout()
            return _Names.of(layout.consumed, inner.exports)
        asked: set[str] = set()
        made: set[str] = set()
        kept: set[str] = set()
        for names in map(self._names_of, _members(inner)):
            asked |= names.asked - made
            made |= names.made
            kept |= names.kept
        exported = made.intersection(inner.exports)
        return _Names(frozenset(asked), frozenset(exported), frozenset((made | kept) - exported))

    def _alone(self, position: int | None, label: str, module: nn.Module, why: str | None) -> Stage:
        inner = _wrapped(module)
        if isinstance(inner, NamedExtras):
            in_torch = not isinstance(inner, BasicOperation)
            if in_torch:
                why = why or "autograd differentiates it"
            return Stage(module, *_named(inner), (position,), label, why, in_torch)
        if isinstance(module, Container):
            nested = module.layout()
            self._nested.append((module, nested))
            why = why or ("its settings differ" if module.can_be_flattened() else _OWN_FORWARD)
            self._check_settings_reach(label, module, why)
            return self._stage_of(module, module, nested, position, label, why)
        if isinstance(inner, Container):
            nested = inner.layout()
            self._nested.append((inner, nested))
            return self._stage_of(module, inner, nested, position, label, why)
        declared = _declared(inner)
        if any(declared):
            self._declared.append((inner, declared))
        return Stage(module, *declared, (position,), label, why, takes_tensors=True)

    def _stage_of(
        self, module: nn.Module, inner: Container, nested: Layout, position: int | None, label: str, why: str | None
    ) -> Stage:
        """The call of a Sequential, by itself or in a wrapper."""
        kept = [name for name in nested.produced if name not in inner.exports]
        self._kept |= dict.fromkeys(kept, f"Module {label} ({type(module).__name__})")
        return Stage(module, nested.consumed, inner.exports, (position,), label, why)

    def _check_settings_reach(self, label: str, nested: Container, why: str) -> None:
        """Raise if a setting of this Sequential would not apply to a nested one that is called instead of flattened."""
        lost = {
            "path": self.path is not None and nested.path is None,
            "fusions": self.planner.fusions is not None and nested.planner.fusions is None,
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
                planner=self.planner, path=self.path,
                labels=[label for _, label, _ in self._run], recipe=self._run[0][2].recipe,
                first_forwards=self._first_forwards,
            )  # fmt: skip
            indices = tuple(position for position, _, _ in self._run)
            self.stages.append(Stage(pipeline, pipeline.consumed, tuple(pipeline.produced), indices, self._run[0][1]))
            self._run = []

    def _check_names(self) -> tuple[str, ...]:
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

    def _modules(self) -> Iterator[tuple[str, Any, Names, Names]]:
        """The label of each operation and of each module that is called by itself, with what it takes and makes."""
        for stage in self.stages:
            if isinstance(stage.runner, Pipeline):
                for label, operation in zip(stage.runner.labels, stage.runner.operations, strict=True):
                    yield label, operation, *_named(operation)
            else:
                yield stage.label, stage.runner, stage.needs, stage.makes

    def _check_extras_of_neighbours(self) -> None:
        makers: dict[str, Any] = {}
        for label, module, _, made in self._modules():
            for name in module.extra_inputs if isinstance(module, NamedExtras) else ():
                maker = makers.get(module.extra_name(name))
                if isinstance(maker, NamedExtras):
                    try:
                        module.check_extra_from(name, maker)
                    except ValueError as error:
                        raise ValueError(f"In {place_of(label, module)}: {error}") from error
            makers |= dict.fromkeys(made, module)

    def _check_weights(self) -> None:
        unread: dict[str, tuple[str, str]] = {}  # of what rows are summed by: their weights, and who makes these
        activation = ""  # that the rows went through
        for label, module, asked, made in self._modules():
            place = place_of(label, module)
            unread = {by: of for by, of in unread.items() if of[0] not in asked and of[0] not in made}
            for by in [by for by in unread if by in asked]:
                weights, maker = unread.pop(by)
                if activation:
                    warnings.warn(
                        f"{maker} makes {weights!r}, the weight of each row, which nothing reads before {place} sums "
                        f"the rows: unweighted, and with no gradient for the weights. In place of {activation} take an "
                        "activation with scales, such as ScaledSwiGLU.",
                        stacklevel=5,  # of Sequential(...)
                    )
            if any(isinstance(inner, NamedExtras) and inner.is_activation for inner in module.modules()):
                activation = place
            if isinstance(module, NamedExtras) and module.weights_of_rows:
                activation = ""
                named = {name: module.extra_name(name) for pair in module.weights_of_rows.items() for name in pair}
                unread |= {named[by]: (named[of], place) for by, of in module.weights_of_rows.items()}

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


def _members(sequential: Container) -> list[nn.Module]:
    """Its modules. Raises TypeError for one that was set to None."""
    for key, module in sequential._modules.items():
        if module is None:
            raise TypeError(
                f"The module {key!r} of a Sequential is None. Assign ops.Identity(), which leaves x as it is, or "
                "take the module out: pop(index) numbers those behind it anew."
            )
    return list(sequential)


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


def _named(module: NamedExtras) -> tuple[Names, Names]:
    """The names of its extra inputs and outputs."""
    inputs, outputs = (
        [module.extra_name(name) for name in names] for names in (module.extra_inputs, module.extra_outputs)
    )
    return tuple(inputs), tuple(outputs)


def check_exports(exports: Names, produced: Names) -> None:
    """Raise ValueError if a Sequential exports a name that nothing in it makes."""
    for name in exports:
        if name not in produced:
            raise ValueError(
                f"exports names {name!r}, but no operation makes it. There are: "
                f"{', '.join(map(repr, produced)) or 'none'}."
            )


def _why_not_flattened(names: frozenset[str]) -> str | None:
    if not names:
        return None
    return f"it keeps names that are used outside of it too: {', '.join(map(repr, sorted(names)))}"


def _contents(container: Container) -> tuple[Any, ...]:
    """The settings and modules of a Container. A layout is stale once they differ."""
    return container.path, container.exports, container.planner, *container._modules.values()
