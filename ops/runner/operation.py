"""The contract of an operation: what a user subclasses to add a basic operation or a fused one."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from copy import deepcopy
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ops.runner.callers_extras import at_border, check_extras, refuse_unnamed
from ops.runner.context import IndexTensor, OperationContext
from ops.runner.known_calls import call_again
from ops.runner.lent_memory import LentMemory
from ops.runner.named_extras import NamedExtras
from ops.runner.not_traced import not_traced
from ops.runner.parameters import (
    held_parameter,
    is_managed,
    is_set_anew,
    parameter_names,
    without_parametrizations,
)
from ops.runner.quantizer_state import apply_to_state, leave_extra_state, prepare_loading
from ops.runner.run import Pipeline
from ops.runner.settings import has_own_property
from ops.runner.tracing import (
    NOT_TRACED,
    Seen,
    TracedStage,
    is_constant,
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
from recipes.recipe import Recipe, Role
from recipes.registry import as_recipe
from recipes.request import PlanRequest
from recipes.tensors.quantized_handle import QuantizedHandle
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.splits import Splits

__all__ = [
    "BasicOperation",
    "FusedOperation",
    "FusibleOperation",
    "IndexTensor",
    "LentMemory",
    "OperationContext",
    "optional",
    "several",
]

BackwardOfBasic = tuple[Any, Mapping[str, Tensor | None], Mapping[str, Tensor | None]]
BackwardOfFused = tuple[Any, Sequence[Mapping[str, Tensor | None]], Mapping[str, Tensor | None]]


class FusibleOperation:
    """What the runner can execute: a `BasicOperation`, or a `FusedOperation` that stands for a run of them.

    accepts_quantized: whether x, or dy, may be a quantized container; otherwise the runner dequantizes it first.
    accepts_gathered: whether they may be `GatheredRows`, too; otherwise the runner copies the rows first. Of a subclass
    that replaces a method it does not hold.
    repeatable: see `BasicOperation`
    """

    accepts_quantized: bool = False
    accepts_gathered: bool = False
    repeatable: bool = False

    def kernel(self, request: PlanRequest) -> str:
        """What does the work for this request, in a few words, for `Sequential.explain()`."""
        return "torch"


class BasicOperation(NamedExtras, FusibleOperation, nn.Module, ABC):
    """One operation with its parameters and state. Subclasses write `fuser_forward` and `fuser_backward`.

    extra_inputs, extra_outputs: see `NamedExtras`
    accepts_integers: whether x may be integers or bools: it only moves them.
    buffers: the names of the caller's own tensors that it can write into.
    in_place_input: the extra input into whose memory its forward writes, and which it returns as y. The runner has
    made sure that nothing else needs what was there. It is fused where a fusion has `handles_in_place`.
    reuses_gradients: whether its backward reads `ctx.own_gradients`.
    retains_grad_output: whether it keeps dy beyond its backward, so that nobody may write into it.
    quantized_roles: in which roles it quantizes tensors, and so may have a state.
    num_scales: how many tensors with a scale each it quantizes in one role: groups, or one.
    state_beginnings: the number with which each buffer of such a state begins, by its name, where that was made here.
    exchanges_parameters: whether others have taken the place of its parameters, as FSDP2 does for each pass.
    repeatable: whether a pass of it on a GPU may be done again as a whole (`ops.runner.repeat`): it depends on nothing
    but public attributes, parameters, states and what it gets, and changes nothing but tensors. Of a subclass that
    replaces a method it does not hold.
    repeats_alone: whether that pays for this operation alone, which launches something, and not only where a call is
    repeated as a whole.
    why_in_full: why this very operation is not repeated, as a sentence, or None. It is not captured in a CUDA graph
    either, unless it replaces `why_not_captured`.
    quantized_output: whether a container leaves the pipeline as it is, in a QuantizedHandle: y of the last operation,
    dx of the first.
    begins_pipeline: whether the operation before it belongs to another pipeline.
    has_adapter: whether an adapter's products are added to its own. It is fused where a fusion has `handles_adapters`.
    divides_output: the `ops.kernels.collectives.RankGroup` among whose ranks the features of y are divided, or None.
    settings: how often such an attribute was assigned, a recipe or a name of an extra tensor set.
    settings_of_backward: arguments of its constructor that may be assigned between forward and backward. The others
    must be in backward what they were in forward (`ops.runner.settings`).
    hands_on_rows, hands_back_rows: whether y, or dx, may be `GatheredRows`, where a context says so by `gathers` or
    `gathers_back`. Of a subclass that replaces a method it does not hold.
    lends_memory: whether it may have memory into which its neighbours write what it takes: `memory_for_input`,
    `memory_for_grad_output`.
    is_stand_in: whether it stands for another operation by `ops.runner.stand_ins`, with the tensors of one call.

    Calling an operation runs it as a pipeline of one, never fused: `y = operation(x, split_sizes=sizes)`.
    """

    buffer_names: tuple[str, ...] = ()
    accepts_integers: bool = False
    in_place_input: str | None = None
    reuses_gradients: bool = False
    retains_grad_output: bool = False
    quantized_roles: tuple[Role, ...] = ()
    num_scales: int = 1
    state_beginnings: Mapping[str, float] = {}
    exchanges_parameters: bool = False
    repeats_alone: bool = True
    why_in_full: str | None = None
    quantized_output: bool = False
    begins_pipeline: bool = False
    has_adapter: bool = False
    divides_output: Any = None
    settings: int = 0
    settings_of_backward: frozenset[str] = frozenset()
    hands_on_rows: bool = False
    hands_back_rows: bool = False
    lends_memory: bool = False
    is_stand_in: bool = False
    _captured_weights: Any = None
    _former_parameters: Any = None
    _parameter_order: tuple[str, ...] = ()
    _weights_scope: Any = None
    _recipe: Recipe | None = None
    _settings_seen: Any = None
    _pipelines: Mapping[str | None, Pipeline] = {}

    @abstractmethod
    def fuser_forward(self, ctx: OperationContext, x: Any, extras: Mapping[str, Any]) -> tuple[Any, Mapping[str, Any]]:
        """y and the extra outputs by name.

        x: in `ctx.dtype`. extras: the extra inputs by name. Gradients are off. y leaves in `ctx.dtype`. Sets
        `ctx.saved` if `ctx.needs_grad`.
        """

    @abstractmethod
    def fuser_backward(self, ctx: OperationContext, dy: Any, d_extra_outputs: Mapping[str, Tensor]) -> BackwardOfBasic:
        """dx, the parameters' gradients by name, and the extra inputs' gradients by name.

        dx has the shape of x, and a gradient that of its parameter or extra input; the runner raises RuntimeError for
        others, and for a dx of None where dy is there and x needs a gradient. Only what `ctx.needs` lists must be
        returned. dy is None where only extra outputs have gradients (this happens only to an operation that has some);
        `d_extra_outputs` holds the gradients that exist.
        """

    def features(self, incoming: int | None) -> int | None:
        """How many features, x's last dimension, come out where `incoming` go in; None where that is not known.

        Raises ValueError if so many cannot go in. A Sequential checks this when it is made.
        """
        return None

    def input_quantizer(self, recipe: Recipe) -> Quantizer | None:
        """What this operation quantizes its input with, or None."""
        return None

    def grad_output_quantizer(self, recipe: Recipe) -> Quantizer | None:
        """What this operation quantizes the gradient of its output with, or None."""
        return None

    def why_not_captured(self, request: PlanRequest) -> str | None:
        """Why this very operation cannot be captured in a CUDA graph, as a sentence, or None."""
        return self.why_in_full

    def why_not_batch_invariant(self, request: PlanRequest) -> str | None:
        """Why a row of its y depends on other rows, or training on what generating does not, as a sentence, or None.

        Asked for under `autocast(batch_invariant=True)` before anything runs.
        """
        return None

    def flops(self, rows: int) -> int:
        """Floating-point operations of its product of so many rows with its weights, for torch's flop counter: two for
        each multiplication and addition. The gradient of the rows takes as many."""
        return 0

    def wgrad_flops(self, rows: int, names: Collection[str]) -> int:
        """Those of the gradients of the parameters `names`."""
        return self.flops(rows) if any(name.startswith("weight") for name in names) else 0

    def why_not_traced(self, path: str) -> str | None:
        """Why torch.compile and torch.export cannot make an operation of torch of what it does, as a sentence, or None.

        path: "grouped" or "split"
        """
        if self.wgrad_is_external:
            return "its weight gradients go to main_grad, or are delayed, which autograd does not see."
        if self.in_place_input is not None:
            return f"it writes into {self.in_place_input!r} in place. Give in_place=False."
        if path == "split" and Splits in self.extra_inputs.values():
            return "the SplitPath reads split sizes on the host. Use a recipe of the GroupedPath."
        return None

    def check_set(self, name: str, value: Any) -> None:
        """Raise ValueError if this value of a `Checked` argument, which is about to be set, does not go with others."""

    def check_follows(self, previous: BasicOperation) -> None:
        """Raise ValueError if it cannot stand behind `previous`. A Sequential checks this when it is made."""

    def transfers(self, request: PlanRequest) -> str:
        """What it exchanges with other ranks, for `Sequential.explain()`: "; all_reduce of y, ...", or nothing."""
        return ""

    @property
    def wgrad_is_external(self) -> bool:
        """Whether gradients of its parameters go to anything but autograd (see `ops.products.main_grad`)."""
        return False

    def hand_on(self, receiver: BasicOperation | None, request: PlanRequest) -> Any:
        """What is agreed for a y that is quantized on the way to the operation behind it, once a plan: `ctx.handed_on`.
        Its `words` are shown by `Sequential.explain()`. None: nothing is.

        receiver: that operation, where it takes containers as they are
        """
        return None

    def gathers(self, role: Role, request: PlanRequest) -> str | None:
        """What it does with rows of x (Role.INPUT), or dy (Role.GRAD_OUTPUT), in words, where it is best given
        `GatheredRows`: it quantizes them by kernels that read them where they lie, or keeps what they are made of."""
        return None

    def memory_for_input(self, extras: Mapping[str, Any], shape: tuple[int, int], dtype: torch.dtype) -> Tensor | None:
        """Memory of its own, of this shape and dtype, for the operation before it to write x into, or None. It takes an
        x that lies elsewhere as well. extras: its extra inputs, as far as they are there"""
        return None

    def memory_for_grad_output(self, saved: Any, rows: int, dtype: torch.dtype) -> LentMemory | None:
        """The same for the operation behind it to write dy [rows, features] into. saved: of its forward"""
        return None

    def prepare_weights(self, ctx: OperationContext) -> Any:
        """The quantized weights that `constant_weights` keeps, for a forward that may be repeated: `prepared_weights`
        of its context. None if it quantizes none. Asked if `quantized_roles` names weights, and again when these, the
        program or inference mode have changed."""
        return None

    def destinations(self, ctx: OperationContext) -> Any:
        """Where gradients of its parameters are written that do not go to autograd, for a backward that may be
        repeated: `destinations` of its context."""
        return None

    def mark_written(self, ctx: OperationContext) -> None:
        """They were written there."""

    def rename_extras(self, **names: str) -> Self:
        super().rename_extras(**names)
        self._pipelines = {}
        self.__dict__["settings"] = self.settings + 1
        return self

    @property
    def recipe(self) -> Recipe | None:
        """This operation's own recipe, or None if it follows `autocast`."""
        return self._recipe

    def set_recipe(self, recipe: Recipe | str | None) -> Self:
        """Run this operation under a recipe of its own, a Recipe or a name, inside and outside of any `autocast`.

        "high_precision" keeps it out of every recipe, None makes it follow `autocast` again. Neighbours under different
        recipes are different pipelines, and are not fused.
        """
        self._recipe = None if recipe is None else as_recipe(recipe)
        self._pipelines = {}
        self.__dict__["settings"] = self.settings + 1
        return self

    def parameter_names(self) -> tuple[str, ...]:
        """The names of its parameters, those of submodules dotted; see `ops.runner.parameters`."""
        return tuple(parameter_names(self))

    def check_computed(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError if a gradient of one of these, which are no registered parameters, has nowhere to go."""

    def check_reduced(self, parameters: Mapping[str, Tensor], reduced: Collection[int]) -> None:
        """Raise RuntimeError if a gradient of one of these goes past torch's DistributedDataParallel, which reduces
        those of the parameters with these `id`s."""

    def check_destinations(self, parameters: Mapping[str, Tensor]) -> None:
        """Raise RuntimeError or ValueError if the gradient of one of these, which a backward is about to compute, goes
        past autograd and has nowhere to go. Called of all operations before the first computes anything."""

    def check_assigned(self) -> None:
        """Raise AttributeError if a tensor was assigned where a parameter was deleted: nothing would read it."""
        for name in self._parameter_order:
            if isinstance(vars(self).get(name), Tensor):
                held_parameter(self, name)

    def has_held(self, parameter: Tensor) -> bool:
        """Whether it was a parameter of this operation, and another one has taken its place since."""
        return self._former_parameters is not None and parameter in self._former_parameters

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        before = self._parameters.get(name)
        is_back = name in self._parameter_order and name not in self._parameters
        super().register_parameter(name, param)
        if (before is None) != (param is None) and not (is_back and is_managed(self)):  # what was compiled reads others
            self.__dict__["settings"] = self.settings + 1
        if name not in self._parameter_order:
            self._parameter_order = (*self._parameter_order, name)
        elif is_back:  # in its old place, by which plans know it
            held = {name: self._parameters[name] for name in self._parameter_order if name in self._parameters}
            self._parameters.clear()
            self._parameters.update(held)
        if param is not None and self._former_parameters is not None:  # torch swaps none that a weak reference holds
            self._former_parameters.pop(param, None)
        if before is not None and before is not param:
            if self._former_parameters is None:
                self._former_parameters = WeakTensorKeyDictionary()
            self._former_parameters[before] = None

    def forward(
        self,
        x: Tensor,
        *unnamed: Any,
        outputs: Sequence[str] = (),
        buffers: Mapping[str, Tensor] | None = None,
        path: str | None = None,
        **extras: Any,
    ) -> Any:
        """Run this operation alone: y, or (y, {name: extra output}) if `outputs` names some.

        path: as for `Sequential`. buffers: the caller's own tensors, by name.

        Raises TypeError for an x that is no tensor, sparse, of complex numbers, or of integers where the operation
        computes in floating point, and for extra inputs by position.
        """
        if not torch.compiler.is_dynamo_compiling() and not unnamed and outputs == () and buffers is None:
            again = call_again(self._pipeline(path), x, extras, self.training)
            if again is not None:
                return again
        if unnamed:
            refuse_unnamed(unnamed, self._pipeline(path).consumed)
        if torch.compiler.is_dynamo_compiling() or is_transformed() or is_recorded():
            stage = self._stage(*see(self, x, extras, outputs, buffers, path))
            if isinstance(stage, str):
                refuse(stage)
            else:
                y, produced = run_stage(stage, parameters_of(self, stage), x, extras)
                return (y, produced) if outputs else y
        return self._run(x, outputs, buffers, path, extras)

    @is_constant
    def _stage(self, *seen: Any) -> TracedStage | str:
        call = Seen(*seen)
        why = why_changed_within(self, call.modules, seen_of_modules(self))
        if why is not None:
            return why
        pipeline = self._pipeline(call.path)
        try:
            check_extras(pipeline.consumed, pipeline.produced, dict(call.given), call.outputs)
        except ValueError as error:
            return str(error)
        return stage_of(pipeline, [()], call.outputs, call, 0)

    def _pipeline(self, path: str | None) -> Pipeline:
        pipeline = self._pipelines.get(path)
        if pipeline is None or not pipeline.is_of(self):
            pipeline = Pipeline((self,), path=path, recipe=self._recipe)
            self._pipelines = {**self._pipelines, path: pipeline}
        return pipeline

    @not_traced(NOT_TRACED)
    def _run(
        self,
        x: Tensor,
        outputs: Sequence[str],
        buffers: Mapping[str, Tensor] | None,
        path: str | None,
        extras: dict[str, Any],
    ) -> Any:
        pipeline = self._pipeline(path)
        check_extras(pipeline.consumed, pipeline.produced, extras, outputs)
        if buffers is not None:
            check_buffers(self, buffers, "buffers")
        y, produced = pipeline(
            x, extras, wanted=outputs, buffers={0: buffers} if buffers else None, training=self.training
        )
        return (y, {name: at_border(produced[name]) for name in outputs}) if outputs else y

    def _replicate_for_data_parallel(self) -> Any:
        raise NotImplementedError(
            "torch.nn.DataParallel copies modules without their plans. Use DistributedDataParallel."
        )

    def __getstate__(self) -> dict[str, Any]:
        # Plans are made again by a copy: they hold this very object. So are quantized weights.
        state = self.__dict__.copy()
        state.pop("_pipelines", None)
        state.pop("_weights_scope", None)
        state.pop("_captured_weights", None)
        state.pop("_former_parameters", None)
        state.pop("_settings_seen", None)
        return state

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        # By the state of its own class: that which torch makes of a parametrized one has none.
        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        kind: Any = without_parametrizations(self)[0]
        copied.__setstate__(deepcopy(kind.__getstate__(self), memo))
        return copied

    @property
    def opened_scope(self) -> Any:
        """The `ops.products.constant_weights` that the caller has opened around it, or None."""
        return None if self._weights_scope is None else self._weights_scope()

    @property
    def weights_scope(self) -> Any:
        """What keeps its quantized weights from forward to forward, or None."""
        return self.opened_scope

    def set_weights_scope(self, scope: Any) -> None:
        """Of what `constant_weights` opens or ends."""
        self._weights_scope = None if scope is None else weakref.ref(scope)

    def note_unseen_use(self) -> None:
        """A stand-in of it is about to run, as what torch traced, or an optimizer has stepped: give up what otherwise
        only its own forwards would."""

    def forget_quantized_weights(self) -> None:
        """Within `constant_weights`: quantize the weights anew at the next use."""
        scope = self.weights_scope
        if scope is not None:
            scope.forget(self)

    def __setattr__(self, name: str, value: Any) -> None:
        # Because there is this method, FSDP2 sets the weights that it has gathered by it, and not behind our back.
        before, module = self.__dict__.get(name), self.__dict__.get("_modules", {}).get(name)
        super().__setattr__(name, value)
        # on which plans and fusions depend
        if name == "__class__" or self.__dict__.get("_modules", {}).get(name) is not module:
            self.__dict__["settings"] = self.settings + 1
        if name[0] == "_" or name == "training":
            return
        if self.__dict__.get(name) is before and not has_own_property(type(self), name):
            return
        if not is_set_anew(self, name, before, value):
            self.__dict__["settings"] = self.settings + 1

    def __delattr__(self, name: str) -> None:
        if is_managed(self) and isinstance(self._parameters.get(name), QuantizedHandle):
            raise RuntimeError(
                f"The {name!r} of {type(self).__name__} is held quantized, and FSDP1 would make its values a part of a "
                "flat parameter, which holds no codes. Shard it by fully_shard (FSDP2)."
            )
        was_set = name[0] != "_" and name in self.__dict__ and not is_set_anew(self, name, self.__dict__[name])
        super().__delattr__(name)
        if was_set:
            self.__dict__["settings"] = self.settings + 1

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        self.forget_quantized_weights()  # they refer to parameters that may be swapped
        apply_to_state(self, lambda: super(BasicOperation, self)._apply(fn, recurse))
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        scope = self.weights_scope
        if scope is not None:
            scope.end()
        if type(self).set_extra_state is nn.Module.set_extra_state:
            leave_extra_state(state_dict, prefix)
        names = [name for name, _ in self.named_parameters() if not name.startswith("lora_")]
        prepare_loading(self, state_dict, prefix, names)
        super()._load_from_state_dict(state_dict, prefix, *args)
        if self.exchanges_parameters:
            self.exchanges_parameters = False  # with assign=True it has set parameters once


class Optional(NamedTuple):
    """A member of a pattern that may be absent. Made by `optional(...)`."""

    alternatives: tuple[type[BasicOperation], ...]


def optional(*alternatives: type[BasicOperation]) -> Optional:
    """A member of a pattern that may be absent: `pattern = (Linear, optional(Bias), AddExtraInput)`."""
    return Optional(alternatives)


class Several(NamedTuple):
    """A member of a pattern that may be repeated. Made by `several(...)`."""

    alternatives: tuple[type, ...]
    at_least: int


def several(*alternatives: type, at_least: int = 1) -> Several:
    """A member of a pattern that stands for `at_least` or more neighbours of these classes: as many as there are. With
    at_least=0 there may be none."""
    return Several(alternatives, at_least)


class FusedOperation(FusibleOperation):
    """Stands for a run of basic operations and computes the same in another way. Owns nothing.

    pattern: the classes of the operations, in order. A member is a class, a tuple of classes (any of them),
             `optional(...)` or `several(...)`. A subclass matches if it kept its parent's fuser_forward and
             fuser_backward.
    fewest:  how many operations a match must cover, for patterns of which much is optional
    passes:  "joint" (both; may save what it likes, in any `ctx.saved`), "forward" (fills every covered operation's
             `Saved` exactly as that would itself) or "backward" (consumes what those saved).
    handles_wgrad_accumulation: whether its backward gives the products of weight gradients to the covered operations,
             by `accumulate` (see `ops.products.main_grad`) or in their own backward. Without, it is refused where a
             weight gradient is external: in main_grad, or delayed.
    handles_transfers: whether it exchanges with other ranks what the covered operations would (their `transfers`).
             Without, it is refused where they exchange anything.
    handles_adapters: whether it leaves the products of a linear operation, and the gradients of its parameters, to the
             methods of that, which add those of an adapter. Without, it is refused for one with an adapter.
    handles_in_place: whether it writes into the last covered operation's `in_place_input` and returns that as y, after
             it has read x. Without, it is refused where an operation writes in place.
    rounds_less: whether it leaves out roundings of the unfused run, so that its results have other bits. Then
             `fuser.testing.check_fusion` holds what its passes compute to float64 instead.
    """

    pattern: ClassVar[tuple[Any, ...]] = ()
    fewest: ClassVar[int] = 1
    passes: ClassVar[Literal["joint", "forward", "backward"]] = "joint"
    handles_wgrad_accumulation: ClassVar[bool] = False
    handles_transfers: ClassVar[bool] = False
    handles_adapters: ClassVar[bool] = False
    handles_in_place: ClassVar[bool] = False
    rounds_less: ClassVar[bool] = False

    def __init__(self, operations: Sequence[BasicOperation]) -> None:
        self.operations = tuple(operations)

    @classmethod
    def why_not(cls, operations: Sequence[BasicOperation], request: PlanRequest) -> str | None:
        """None if these operations can be fused for this request, else the reason as a sentence."""
        return None

    def kernel(self, request: PlanRequest) -> str:
        return super().kernel(request) + "".join(operation.transfers(request) for operation in self.operations)

    def fuser_forward(
        self, ctxs: Sequence[OperationContext], x: Any, extras: Mapping[str, Any]
    ) -> tuple[Any, Mapping[str, Any]]:
        """As `BasicOperation.fuser_forward`, with one context for each covered operation."""
        raise NotImplementedError(f"{type(self).__name__} has passes={self.passes!r}, but no fuser_forward.")

    def fuser_backward(
        self, ctxs: Sequence[OperationContext], dy: Any, d_extra_outputs: Mapping[str, Tensor]
    ) -> BackwardOfFused:
        """As `BasicOperation.fuser_backward`, with a list of parameter gradients, one for each covered operation."""
        raise NotImplementedError(f"{type(self).__name__} has passes={self.passes!r}, but no fuser_backward.")


def check_buffers(module: nn.Module, named: Mapping[str, Tensor], where: str) -> None:
    """Raise TypeError unless `named` is a mapping, ValueError for a buffer that the module does not write into."""
    if not isinstance(named, Mapping):
        raise TypeError(f"{where} is a {type(named).__name__}. Pass a mapping of tensors by the names of buffers.")
    known = module.buffer_names if isinstance(module, BasicOperation) else ()
    for name in named:
        if name not in known:
            raise ValueError(
                f"{where} names {name!r}, but {type(module).__name__} writes into "
                f"{', '.join(map(repr, known)) or 'no buffer of the caller'}."
            )
