"""Sequential: a model as a sequence of operations, some of them fused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, Self

import torch
from torch import Tensor, nn

from fuser.explain import device_and_dtype, explain
from fuser.explain_quantized import check_quantized
from fuser.layout import Container, Layout, Stage
from fuser.plan import Fusion, FusionPlanner, fusions_version, registered_fusions
from ops.products.main_grad import OperationWithWeights, backward_dw
from ops.runner.callers_buffers import CallersBuffer, check_between_stages, place_of
from ops.runner.callers_extras import at_border, refuse_unnamed
from ops.runner.input import as_input, check_real
from ops.runner.known_calls import call_again
from ops.runner.nested_backward import note_forward
from ops.runner.not_traced import not_traced
from ops.runner.operation import BasicOperation, check_buffers
from ops.runner.run import Buffers, Pipeline
from ops.runner.tracing import (
    NOT_TRACED,
    Seen,
    is_constant,
    is_counted,
    is_recorded,
    parameters_of,
    refuse,
    run_stage,
    see,
    seen_of_modules,
    stage_of,
    why_changed_within,
)
from ops.runner.transforms import is_transformed
from ops.torch_function import check_names
from recipes.arguments import as_integer
from recipes.first_forwards import FirstForwards
from recipes.recipe import Recipe
from recipes.registry import as_recipe
from recipes.stack import recipe_in_use
from recipes.tensors.quantized_handle import Quantized, QuantizedHandle, at_container


class Sequential(Container):
    """Runs modules in order. Consecutive operations form one pipeline, in which fusions replace several of them.

    Arguments: modules, or one dict of names to modules. Ordinary modules are allowed anywhere; they split the pipeline.
    Nested Sequentials are flattened, or called where they have other settings or keep a name that is used outside too.

    fusions: use only these fusions, in this order, instead of the registered and built-in ones
    path:    force "grouped" or "split"; None lets the recipe decide
    exports: inside of another Sequential, the extra outputs that it makes for that one, of two by one name the last; it
             keeps all others to itself. The extra inputs that nothing in it makes it takes from the other one, by name.

    `y = seq(x, split_sizes=sizes, scales=probs)`: extra inputs are passed by name; every operation that declares the
    name receives the tensor. `y, extras = seq(x, outputs=("routing_map",))` returns extra outputs by name. Where two
    operations make one name, those behind the second receive what that makes.
    `buffers={0: {"grad_input": b}}` gives the operation at index 0 a caller's tensor to write into.

    The list protocol is that of `torch.nn.Sequential`. After any change the plan is rebuilt.

    Raises ValueError for operations that cannot follow each other: feature sizes that do not match (as far as they are
    known without x), an extra tensor that is consumed before it is produced, or exports that nothing makes. After a
    change in place, the error is raised at the next call.
    """

    def __init__(
        self,
        *modules: nn.Module | Mapping[str, nn.Module],
        fusions: Sequence[Fusion] | None = None,
        path: str | None = None,
        exports: Sequence[str] = (),
    ) -> None:
        super().__init__()
        if path not in (None, "grouped", "split"):
            raise ValueError(
                f"path={path!r} does not exist. Give 'grouped', 'split', or None to let the recipe decide."
            )
        self.path = path
        check_names("exports", exports)
        self.exports = tuple(exports)
        self.planner = FusionPlanner(fusions)
        self.first_forwards = FirstForwards()
        self._layout: Layout | None = None
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            for name, module in modules[0].items():
                self.add_module(name, module)
        else:
            self.extend(modules)  # type: ignore[arg-type]
        self.layout()

    @property
    def fusions(self) -> Sequence[Fusion] | None:
        """Those that it was given; None: the registered and the built-in ones."""
        return self.planner.fusions

    @fusions.setter
    def fusions(self, fusions: Sequence[Fusion] | None) -> None:
        raise AttributeError(
            "A Sequential gets its fusions when it is made. Make another one of the same operations: "
            "Sequential(*sequential, fusions=...)."
        )

    # The list protocol

    def __len__(self) -> int:
        return len(self._modules)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())  # type: ignore[arg-type]

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            other = self._like(dict(list(self._modules.items())[index]))
            made = other.layout().produced if self.exports else ()
            other.exports = tuple(name for name in self.exports if name in made)
            return other
        return self._modules[self._key(index)]

    def __setitem__(self, index: int, module: nn.Module) -> None:
        setattr(self, self._key(index), _checked(module))

    def __delitem__(self, index: int | slice) -> None:
        keys = list(self._modules)[index] if isinstance(index, slice) else [self._key(index)]
        remaining = [(key, module) for key, module in self._modules.items() if key not in keys]
        self._replace(remaining)

    def __add__(self, other: Iterable[nn.Module]) -> Sequential:
        both = self._like(None).extend(self).extend(other)
        both.exports = self.exports
        return both

    def __iadd__(self, other: Iterable[nn.Module]) -> Self:
        return self.extend(other)

    def append(self, module: nn.Module) -> Self:
        """Add a module at the end."""
        return self.insert(len(self), module)

    def extend(self, modules: Iterable[nn.Module]) -> Self:
        """Add modules at the end."""
        for module in list(modules):
            self.append(module)
        return self

    def insert(self, index: int, module: nn.Module) -> Self:
        """Insert a module before the one at `index`. Numeric keys are renumbered, as in torch.nn.Sequential."""
        _checked(module)
        if not -len(self) <= index <= len(self):
            raise IndexError(f"Index {index} is out of range: the Sequential has {len(self)} modules.")
        items = list(self._modules.items())
        items.insert(index if index >= 0 else index + len(items), ("", module))
        self._replace(items)
        return self

    def pop(self, index: int | slice = -1) -> nn.Module | Sequential:
        """Remove and return the module at `index`."""
        taken = self[index]
        del self[index]
        return taken

    def _key(self, index: int) -> str:
        index = as_integer("index", index)
        if not -len(self) <= index < len(self):
            raise IndexError(f"Index {index} is out of range: the Sequential has {len(self)} modules.")
        return list(self._modules)[index]

    def _replace(self, items: Iterable[tuple[str, nn.Module | None]]) -> None:
        """Set the modules. A numeric or empty key is replaced by the module's position."""
        items = [(str(i) if not key or key.isdecimal() else key, module) for i, (key, module) in enumerate(items)]
        self._modules.clear()
        self._modules.update(items)

    def _like(self, modules: Mapping[str, nn.Module | None] | None) -> Sequential:
        """Another Sequential with the same settings, of the same class if that is constructed alike."""
        kind = type(self) if type(self).__init__ is Sequential.__init__ else Sequential
        other = kind(fusions=self.planner.fusions, path=self.path)
        other.train(self.training)
        if modules is not None:
            other._modules.update(modules)
        return other

    # Running

    def forward(
        self,
        x: Tensor,
        *unnamed: Any,
        outputs: Sequence[str] = (),
        buffers: Mapping[int, Mapping[str, Tensor]] | None = None,
        **extras: Any,
    ) -> Any:
        """Return y, or (y, {name: extra output}) if `outputs` is not empty.

        Raises ValueError for missing or unknown extra inputs, for extra outputs that do not exist or are made twice,
        and for buffers that no operation declares or that share memory with a tensor that is still needed, and for
        extra tensors on another device than x; TypeError for an x or an extra tensor that is not a tensor or is
        complex, for an x of integers where the first operations compute in floating point, and for outputs or buffers
        that are not as annotated, and for extra inputs by position.

        x may be quantized: a QuantizedTensor or GroupedTensor, or a QuantizedHandle of one, which carries gradients.
        Its codes are used where the first operation that multiplies needs just these; `explain(x=...)` shows it.
        """
        if not torch.compiler.is_dynamo_compiling() and not unnamed and outputs == () and buffers is None:
            layout = self._layout
            if layout is not None and layout.pipeline is not None and layout.is_current(self):
                y = call_again(layout.pipeline, x, extras, self.training, fusions_version())
                if y is not None:
                    return y
        if unnamed:
            refuse_unnamed(unnamed, self.layout().consumed)
        if (
            torch.compiler.is_dynamo_compiling()
            or is_counted(self.first_forwards, self.training)
            or is_transformed()
            or is_recorded()
        ):
            stages: tuple[Any, ...] | str = (
                "x is quantized, and torch does not trace its codes. Give x.dequantize(), or run this model eagerly."
            )
            if isinstance(x, Tensor) and not isinstance(x, QuantizedHandle):
                fusions = registered_fusions()
                call = see(self, x, extras, outputs, buffers, self.path, fusions)
                stages = self._own_stages(*call)
            if not isinstance(stages, str):
                return self._run_stages(stages, x, outputs, extras)
            refuse(stages)
        return self._run(x, outputs, buffers, extras)

    @is_constant
    def _own_stages(self, *seen: Any) -> tuple[Any, ...] | str:
        return why_changed_within(self, Seen(*seen).modules, seen_of_modules(self)) or self.traced_stages(*seen)

    @is_constant
    def traced_stages(self, *seen: Any) -> tuple[Any, ...] | str:
        """For each stage an operation of torch, or the path of a module with the extra inputs and outputs of its call;
        else why there is none. seen: what `ops.runner.tracing.see` gave."""
        call = Seen(*seen)
        try:
            layout = self.layout()
            layout.check_extras(dict(call.given), call.outputs)
        except ValueError as error:
            return str(error)
        paths = {module: tuple(name.split(".")) for name, module in self.named_modules()}
        version = fusions_version()
        stages: list[Any] = []
        for stage, passed_on in zip(layout.stages, layout.passed_on, strict=True):
            wanted = tuple(dict.fromkeys((*passed_on, *(name for name in call.outputs if name in stage.makes))))
            if isinstance(stage.runner, Pipeline):
                own = [paths[operation] for operation in stage.runner.operations]
                found = stage_of(stage.runner, own, wanted, call, version)
                if isinstance(found, str):
                    return found
                stages.append(found)
            else:
                stages.append((paths[stage.runner], tuple(stage.needs), wanted))
        return tuple(stages)

    def _run_stages(self, stages: tuple[Any, ...], x: Tensor, outputs: Sequence[str], extras: dict[str, Any]) -> Any:
        for stage in stages:
            if isinstance(stage[0], str):
                x, produced = run_stage(stage, parameters_of(self, stage), x, extras)
            else:
                path, needs, wanted = stage
                module: Any = self
                for name in path:
                    module = module._modules[name]
                settings: dict[str, Any] = {name: extras[name] for name in needs}
                if isinstance(module, BasicOperation):
                    settings["path"] = self.path
                if wanted:
                    settings["outputs"] = wanted
                result = module(x, **settings)
                x, produced = result if wanted else (result, {})
            extras = {**extras, **produced}
        return (x, {name: extras[name] for name in outputs}) if outputs else x

    @not_traced(NOT_TRACED)
    def _run(self, x: Tensor, outputs: Sequence[str], buffers: Any, extras: dict[str, Any]) -> Any:
        x = as_input(x)
        check_real("x", x.dtype)
        layout = self.layout()
        layout.check_extras(extras, outputs)
        if buffers is not None:
            self._check_buffers(buffers)
        if buffers and len(layout.stages) > 1:
            self._check_between_stages(layout, buffers, x, extras)
        version = fusions_version()
        for stage, passed_on in zip(layout.stages, layout.passed_on, strict=True):
            wanted = passed_on
            if outputs:
                wanted = tuple(dict.fromkeys((*passed_on, *(name for name in outputs if name in stage.makes))))
            own_buffers = layout.buffers_of(stage, buffers) if buffers else {}
            x = self.run_stage(stage, x, extras, wanted, own_buffers, version)
        return (x, {name: at_border(extras[name]) for name in outputs}) if outputs else x

    def run_stage(
        self, stage: Stage, x: Any, extras: dict[str, Any], wanted: Sequence[str], buffers: Buffers, version: int
    ) -> Any:
        """y of one stage; the extra outputs `wanted` are added to extras. version: of the fusions."""
        mine = {name: extras[name] for name in stage.needs}
        if isinstance(stage.runner, Pipeline):
            y, produced = stage.runner(
                x, mine, wanted=wanted, buffers=buffers, training=self.training, fusions_version=version
            )
            extras |= produced
            return y
        if isinstance(stage.runner, BasicOperation):
            settings = {"buffers": buffers.get(0), "path": self.path}
            # Hooks added after the first forward split an operation off; then only the Sequential has its recipe.
            again = self.first_forwards.entered_again(self.training, stage.runner.recipe, counts=False)
            with again if note_forward() else nullcontext():
                result = stage.runner(x, outputs=wanted, **settings, **mine)
        else:
            if stage.takes_tensors:
                mine = {name: at_border(value) for name, value in mine.items()}
            result = stage.runner(x, outputs=wanted, **mine) if wanted else stage.runner(x, **mine)
            if wanted and stage.takes_tensors:
                _check_outputs(stage.runner, result, wanted)
        y, produced = result if wanted else (result, {})
        extras |= produced
        return y

    def _check_buffers(self, buffers: Any) -> None:
        if not isinstance(buffers, Mapping):
            raise TypeError(
                f"buffers is a {type(buffers).__name__}. Pass a mapping of each operation's buffers by its position."
            )
        for index, named in buffers.items():
            check_buffers(self[as_integer("a key of buffers", index)], named, f"buffers[{index}]")

    def _check_between_stages(self, layout: Layout, buffers: Any, x: Tensor, extras: Mapping[str, Any]) -> None:
        places: dict[int | None, str] = {index: place_of(str(index), module) for index, module in enumerate(self)}
        given = [
            [
                CallersBuffer(name, places[stage.indices[at]], tensor)
                for at, named in layout.buffers_of(stage, buffers).items()
                for name, tensor in named.items()
            ]
            for stage in layout.stages
        ]
        check_between_stages(given, dict(zip(places.values(), self, strict=True)), x, extras)

    def backward_dw(self) -> None:
        """Compute the weight gradients that the oldest backward delayed (operations with `delay_wgrad_compute=True`).

        Runs on the current stream, last operation first, each followed by its hooks. Does nothing if no operation
        delays any. Raises RuntimeError if some do, and none are pending: a backward that ended with an exception leaves
        none.
        """
        backward_dw(self._with_weights()[::-1])

    @property
    def delay_wgrad_compute(self) -> bool:
        """Whether any operation delays its weight gradients until `backward_dw()`."""
        return any(operation.delay_wgrad_compute for _, operation in self._with_weights())

    def need_backward_dw(self) -> bool:
        """Whether delayed weight gradients are pending, to be computed by `backward_dw()`."""
        return any(operation.need_backward_dw() for _, operation in self._with_weights())

    def _with_weights(self) -> list[tuple[str, OperationWithWeights]]:
        return [(name, module) for name, module in self.named_modules() if isinstance(module, OperationWithWeights)]

    def layout(self) -> Layout:
        """The current modules grouped into stages; cached until something changes."""
        layout = self._layout
        if layout is None or not layout.is_current(self):
            layout = self._layout = Layout(self)
        return layout

    def can_be_flattened(self) -> bool:
        """Whether `forward` is Sequential's own. A subclass that overrides it is called, not flattened."""
        return type(self).forward is Sequential.forward

    def explain(
        self,
        *,
        recipe: Recipe | str | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        training: bool | None = None,
        requires_grad: bool = True,
        x: Quantized | QuantizedHandle | None = None,
        grad_output: Quantized | QuantizedHandle | None = None,
    ) -> str:
        """The plan as text: the operations as they run, fused or not, their path and kernels, and every refused fusion.

        The defaults are the current recipe, the device and dtype of the parameters, and an x that requires grad. It is
        the plan of the grad mode of now: under `torch.no_grad` that of a call there.

        x, grad_output: quantized tensors of the caller's: who multiplies their codes, or why they are dequantized. Of
            grouped rows, split_sizes are taken to be those of x.
        """
        chosen = recipe_in_use(None if recipe is None else as_recipe(recipe))
        own_device, own_dtype = device_and_dtype(self)
        device, dtype = device or own_device, dtype or own_dtype
        training = self.training if training is None else training
        given = {"x": at_container(x), "grad_output": at_container(grad_output)}
        check_quantized(given)
        return explain(self.layout(), chosen, torch.device(device), dtype, training, requires_grad, given)

    def _replicate_for_data_parallel(self) -> Any:
        raise NotImplementedError(
            "torch.nn.DataParallel copies modules without their plans. Use DistributedDataParallel."
        )

    def __getstate__(self) -> dict[str, Any]:
        # A layout refers to this object's operations, so a copy builds its own.
        return {**self.__dict__, "_layout": None}


def _check_outputs(module: nn.Module, result: Any, wanted: Sequence[str]) -> None:
    pair = isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping)
    if not pair or result[1].keys() != set(wanted):
        names = ", ".join(map(repr, wanted))
        given = f"the extra outputs {', '.join(map(repr, result[1]))}" if pair else f"a {type(result).__name__}"
        raise TypeError(
            f"{type(module).__name__} was called with outputs=({names}), and returned {given}. It declares "
            "extra_outputs, so it must return (y, {name: tensor}) with just these names."
        )


def _checked(module: object) -> nn.Module:
    if not isinstance(module, nn.Module):
        kind, mend = type(module).__name__, ""
        if isinstance(module, type):
            kind = "class"
            mend = f" Give an instance of it: {module.__name__}(...)." if issubclass(module, nn.Module) else ""
        elif callable(module):
            mend = f" Wrap it: ops.Torch({getattr(module, '__name__', 'function')})."
        elif isinstance(module, list | tuple | Iterator):
            mend = " Unpack it: Sequential(*modules)."
        raise TypeError(f"{module!r} is a {kind}, not a torch.nn.Module.{mend}")
    return module
