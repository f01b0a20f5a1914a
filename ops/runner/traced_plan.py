"""A pipeline as torch traces it: two functions of plain tensors, which `ops.runner.traced_operations` registers.

    forward    (tensors, needs)                   -> [y, extra outputs, what is kept for backward]
    backward   (saved, gradients, needs, sizes)   -> [the gradient of each tensor that needs one]

tensors are x, the parameters, and the extra inputs. Both run the pipeline's program as an eager call does. On tensors
without numbers (`is_abstract`) they run it too, which gives the shapes, strides and dtypes of the results: so no
operation has a rule for its shapes beside its code.

Where all steps of the program may be repeated (`ops.runner.repeat`), a call is repeated as a whole, with what forward
leaves for backward.

What runs are stand-ins of the user's operations (`ops.runner.stand_ins`): with the same settings and states, and the
tensors of the call as parameters. An attribute that is no setting they get at their next forward. What forward leaves
for backward beside tensors follows from the plan, the needs and the sizes, and is kept by these.
"""
# P parameters

from __future__ import annotations

import itertools
import math
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor

from ops.runner.backward import Record, run_backward
from ops.runner.context import at_tensor, state_of
from ops.runner.data_parallel import LastWrapper, leave_states
from ops.runner.hooks import is_hooked
from ops.runner.nested_backward import within_backward
from ops.runner.program import Program
from ops.runner.quantizer_state import state_names
from ops.runner.repeat import MOST_KEYS, OperationState, may_repeat
from ops.runner.run import Call, Pipeline, step_of
from ops.runner.stand_ins import Followed, followed, stand_in_for
from ops.runner.torch_autocast import without_autocast
from ops.runner.views import View, in_own_memory, memory_number, restored, view_in
from recipes.checkpoint_frames import checkpoints
from recipes.recipe import Recipe
from recipes.stack import Stack, own_entries, recipe_of
from recipes.tensors.abstract import is_abstract, with_known_memory
from recipes.tensors.splits import Splits
from recipes.triton.replay import Kept, how
from recipes.triton.zeros import zeros_launch

MOST_SIZES = 4096  # of which a plan keeps what forward leaves: more than forwards that wait for their backward

_numbers = itertools.count()


class Terms(NamedTuple):
    """What a plan holds for, beside the operations and the dtypes.

    recipe: of this call; of_autocast: whether it is that of an `autocast` around all that is traced
    inputs, outputs: the names of the extra tensors that go in, and of those that come out
    """

    recipe: Recipe
    of_autocast: bool
    autocast_dtype: torch.dtype | None
    training: bool
    fusions_version: int
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class _Left(NamedTuple):
    """What a forward leaves for backward beside tensors. views: how each kept tensor lies in what is saved."""

    program: Program
    states: tuple[OperationState, ...]
    views: tuple[View | None, ...]
    entries: Stack


class Run:
    """The runs of a plan in which the same tensors need a gradient.

    needs: "g" where gradients were enabled, else "-", and then for each tensor 1 or 0
    sources: for each tensor that is kept for backward, its position among the tensors that go in and come out
    saved: the positions of those that backward takes: all parameters, and the sources
    """

    def __init__(self, needs: str, num_parameters: int, inputs: Sequence[str]) -> None:
        self.needs = needs
        self.records = needs[0] == "g"
        self.wanted = tuple(flag == "1" for flag in needs[1:])
        x, *others = self.wanted
        names = (name for name, want in zip(inputs, others[num_parameters:], strict=True) if want)
        self.request = x, tuple(others[:num_parameters]), tuple(names)
        self.num_parameters = num_parameters
        self.sources: tuple[int | None, ...] | None = None
        self.differentiable: tuple[bool, ...] = ()  # y and the extra outputs
        self.given: list[tuple[int, torch.dtype]] = []  # of x and the extra inputs: dimensions, dtype
        self.repeats = False  # both passes may be repeated as a whole; known when forward has run
        self.kept = Kept(MOST_KEYS, zeros_launch), Kept(MOST_KEYS, zeros_launch)
        self.left: dict[tuple[int, ...], _Left] = {}
        self.flops: dict[tuple[int, ...], tuple[int, int]] = {}  # of products, forward and backward, by the sizes

    @property
    def saved(self) -> tuple[int, ...]:
        assert self.sources is not None, "its forward has run"
        return tuple(sorted({*range(1, 1 + self.num_parameters), *(at for at in self.sources if at is not None)}))

    def take(
        self,
        tensors: Sequence[Tensor],
        results: Sequence[Tensor],
        kept: Sequence[Tensor | None],
        held: Sequence[Tensor],
    ) -> list[Tensor]:
        """The results, each in memory of its own, and what else is to be kept. held: memory of the operations."""
        self.given = [(tensor.dim(), tensor.dtype) for tensor in _activations(tensors, self.num_parameters)]
        made: list[Tensor] = []
        for result in results:
            made.append(in_own_memory(result, (*tensors, *made, *held)))
        known = {memory_number(tensor): at for at, tensor in reversed([*enumerate((*tensors, *made))])}
        foreign = {memory_number(tensor) for tensor in held}
        sources: list[int | None] = []
        for tensor in kept if any(self.wanted) else ():
            if tensor is not None and memory_number(tensor) not in known:
                known[memory_number(tensor)] = len(tensors) + len(made)
                made.append(tensor.clone() if memory_number(tensor) in foreign else tensor)
            sources.append(None if tensor is None else known[memory_number(tensor)])
        if self.sources is None:
            self.sources = tuple(sources)
        elif self.sources != tuple(sources):
            raise NotImplementedError(
                f"What forward keeps for backward lies in the tensors {sources}, but in {list(self.sources)} when it "
                "was traced, so it cannot be one operation of torch. Leave this module out of torch.compile: "
                "torch.compiler.disable(module)."
            )
        return made

    def leave(self, sizes: tuple[int, ...], left: _Left) -> None:
        """Keep it until a backward of these sizes."""
        before = self.left.pop(sizes, None)
        if before is None or before.states is not left.states:
            _check_no_tensors(left.states)
        if before is not None:
            if before.states is not left.states:
                _check_same_numbers(before.states, left.states)
        elif len(self.left) >= MOST_SIZES:
            del self.left[next(iter(self.left))]
        self.left[sizes] = left


class TracedPlan:
    """The two functions of one pipeline on some terms. key: what stands for the plan in a graph, in this process alone.

    Threads take turns with a plan: while it runs, its stand-ins hold the tensors of one call. A graph may name it as
    long as the pipeline lives; what it runs with is made when it is used, and given up when as many others of the
    pipeline have been used since as an eager one keeps (`MOST_PROGRAMS`).
    """

    def __init__(self, pipeline: Pipeline, terms: Terms) -> None:
        self.terms = terms
        self.key = f"{terms.recipe.name}, plan {next(_numbers)} of process {_process()}"
        self._live = [weakref.ref(operation) for operation in pipeline.operations]
        self._hooked = [is_hooked(vars(operation)) for operation in pipeline.operations]
        self._settings = [operation.settings for operation in pipeline.operations]
        self._recipes = pipeline.traced_recipes
        self._recipes_of_frames = pipeline.traced_recipes_of_frames
        self._state_names = state_names(terms.recipe)
        self._wrapper = LastWrapper()
        self._slots = [
            (at, name) for at, operation in enumerate(pipeline.operations) for name in operation.parameter_names()
        ]
        self.num_parameters = len(self._slots)
        self._pipeline_of = partial(
            Pipeline, planner=pipeline.planner, path=pipeline.path, labels=pipeline.labels, recipe=terms.recipe
        )
        self._recent = pipeline.recently_traced
        self._pipeline: Pipeline | None = None
        self._operations: list[Any] = []
        self._followed: list[Followed] = []
        self._states: list[dict[str, Tensor | None]] = []  # as the modules hold them
        self._runs: dict[str, Run] = {}
        self._lock = threading.RLock()
        self._stays = False

    @property
    def num_results(self) -> int:
        """How many tensors come out that are not kept for backward alone: y and the extra outputs."""
        return 1 + len(self.terms.outputs)

    def run(self, needs: str) -> Run:
        """The runs with these needs."""
        found = self._runs.get(needs)
        return found or self._runs.setdefault(needs, Run(needs, self.num_parameters, self.terms.inputs))

    def sizes(self, tensors: Sequence[Tensor]) -> list[int]:
        """The shapes of x and the extra inputs, one behind the other."""
        return [size for tensor in _activations(tensors, self.num_parameters) for size in tensor.shape]

    def laid_out(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors, x and the extra inputs contiguous: then what forward keeps of them follows from their shapes."""
        parameters = range(1, 1 + self.num_parameters)
        return [tensor if at in parameters else tensor.contiguous() for at, tensor in enumerate(tensors)]

    def forward(self, tensors: Sequence[Tensor], needs: str) -> list[Tensor]:
        """y, the extra outputs, and what else is kept for backward, each in memory of its own.

        Raises what the operations raise, and RuntimeError where the call is not one that it was traced for.
        """
        self._recent.use(self)
        run = self.run(needs)
        tensors = self.laid_out(tensors)
        with _without_gradients(), without_autocast(tensors[0].device):
            with self._lock:
                pipeline = self._made()
                for module in () if self._stays else self._followed:
                    module.follow()
                if not is_abstract(tensors[0]):
                    made, left = self._forward(run, tensors, pipeline)
                    if left is not None:
                        run.leave(tuple(self.sizes(tensors)), left)
                    return made
                operations = [stand_in_for(operation, shares_state=False) for operation in self._operations]
            with with_known_memory(tensors[0]):
                return self._execute(run, tensors, operations, self._pipeline_of(operations))[0]

    def keep(self) -> None:
        """Make what it runs with, and never give it up: it will outlive the operations."""
        with self._lock:
            self._made()
            self._stays = True

    def release(self) -> None:
        """Give up what it runs with until it is used again."""
        with self._lock:
            if not self._stays:
                self._pipeline, self._operations, self._followed, self._states, self._runs = None, [], [], [], {}

    def _made(self) -> Pipeline:
        """The pipeline of the stand-ins."""
        if self._pipeline is None:
            live: list[Any] = [reference() for reference in self._live]
            if any(operation is None for operation in live):
                raise RuntimeError(f"The operations of {self.key} are gone. Keep the model, and compile it again.")
            self._operations = [stand_in_for(operation, shares_state=True) for operation in live]
            self._followed = [one for pair in zip(live, self._operations, strict=True) for one in followed(*pair)]
            self._states = [module._buffers for operation in self._operations for module in operation.modules()]
            self._pipeline = self._pipeline_of(self._operations)
        return self._pipeline

    def _forward(self, run: Run, tensors: Sequence[Tensor], pipeline: Pipeline) -> tuple[list[Tensor], _Left | None]:
        """What `_execute` gives, or gave: repeated as a whole if it can be."""
        self._check_call(tensors[0].device, run)
        wrapper = self._wrapper.changed()
        if wrapper is not None:
            leave_states(wrapper, self._state_names)
            self._wrapper.entered(wrapper)
        if not run.repeats or not may_repeat(tensors[0].device, own_entries()):
            return self._execute(run, tensors, self._operations, pipeline)
        states = [state for held in self._states for state in held.values()]
        made, left = _repeated(
            run.kept[0], (*tensors, *states), (), lambda: self._execute(run, tensors, self._operations, pipeline)
        )
        return made, None if left is None else left._replace(entries=own_entries())

    def _execute(
        self, run: Run, tensors: Sequence[Tensor], operations: Sequence[Any], pipeline: Pipeline
    ) -> tuple[list[Tensor], _Left | None]:
        """The results of `forward`, and what it leaves."""
        x, terms = tensors[0], self.terms
        with self._holding(operations, tensors[1:]):
            program = pipeline.program_for(
                x, pipeline.parameters(), run.request, terms.autocast_dtype, terms.training, terms.fusions_version
            )
            extras = dict(zip(terms.inputs, tensors[1 + self.num_parameters :], strict=True))
            call = Call(program, extras, terms.outputs, {}, pipeline, None)
            call.parameters = tensors[1 : 1 + self.num_parameters]
            call.is_traced = True
            runs = not is_abstract(x)
            with step_of(call, records=run.records) if runs and program.keeps_state else nullcontext():
                y = at_tensor(call.forward(x))
            results = [y, *[_at_border(call.produced[name]) for name in terms.outputs]]
            held = [state for operation in operations for state in operation.buffers()]
            run.differentiable = (True, *[name in program.differentiable for name in terms.outputs])
            made = run.take(tensors, results, call.kept, held)
            sizes = tuple(self.sizes(tensors))
            if all(type(size) is int for size in sizes) and sizes not in run.flops:
                run.flops[sizes] = _flops(program, operations, call.rows)
            if runs:
                run.repeats = program.is_repeated and not any(o.wgrad_is_external for o in operations)
            if not runs or not any(run.wanted):
                return made, None
            assert run.sources is not None, "it was taken"
            known = (*tensors, *made)
            views = [
                None if at is None else view_in(t, known[at]) for t, at in zip(call.kept, run.sources, strict=True)
            ]
            return made, _Left(program, tuple(call.states), tuple(views), own_entries())

    def backward(
        self, saved: Sequence[Tensor], gradients: Sequence[Tensor | None], needs: str, sizes: Sequence[int]
    ) -> list[Tensor]:
        """The gradients of the tensors that need one, contiguous, each in memory of its own; zeros where there is none.

        saved: the tensors at `Run.saved`; gradients: of y and of the extra outputs, None where there is none
        sizes: those of the forward
        """
        run = self.run(needs)
        if run.sources is None:
            raise self._nothing_left(sizes)
        at = dict(zip(run.saved, saved, strict=True))
        parameters = [at[1 + index] for index in range(self.num_parameters)]
        device = next(tensor.device for tensor in (*gradients, *saved) if tensor is not None)
        shapes = _shapes(run, parameters, sizes, device)
        if any(is_abstract(tensor) for tensor in saved) or any(d is not None and is_abstract(d) for d in gradients):
            return [_empty(shape) for shape, want in zip(shapes, run.wanted, strict=True) if want]
        left = run.left.get(tuple(sizes))
        if left is None:
            raise self._nothing_left(sizes)
        with self._lock, _without_gradients(), without_autocast(device):
            if not run.repeats or not may_repeat(device, left.entries):
                return self._backward(run, left, saved, gradients, shapes)
            given = [*saved, *gradients]
            return _repeated(
                run.kept[1], given, tuple(sizes), lambda: self._backward(run, left, saved, gradients, shapes)
            )  # fmt: skip

    def _backward(
        self,
        run: Run,
        left: _Left,
        saved: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        shapes: Sequence[_Shape],
    ) -> list[Tensor]:
        assert run.sources is not None, "its forward has run"
        at = dict(zip(run.saved, saved, strict=True))
        parameters = [at[1 + index] for index in range(self.num_parameters)]
        activations = {0, *range(1 + self.num_parameters, len(run.wanted))}
        at = {p: tensor.contiguous() if p in activations else tensor for p, tensor in at.items()}
        kept = [None if p is None else restored(at[p], v) for p, v in zip(run.sources, left.views, strict=True)]
        terms = self.terms
        with self._holding(self._operations, parameters):
            record = Record(
                left.program, self._operations, self._made().labels, left.states, parameters,
                [state_of(parameter) for parameter in parameters], terms.inputs, terms.outputs, left.entries, None, (),
            )  # fmt: skip
            dy, *d_outputs = gradients
            found = run_backward(record, kept, dy, d_outputs)
        made: list[Tensor] = []
        others = [tensor for tensor in (*saved, *gradients) if tensor is not None]
        for gradient, shape, want in zip(found, shapes, run.wanted, strict=True):
            if want:
                gradient = _empty(shape).zero_() if gradient is None else gradient
                made.append(in_own_memory(gradient, (*others, *made)))
        return made

    def _nothing_left(self, sizes: Sequence[int]) -> RuntimeError:
        return RuntimeError(
            f"No forward of {self.key} has run with the sizes {list(sizes)}, or {self._recent.most} other plans since, "
            "so there is nothing to differentiate. Run forward and backward in one process, backward soon after its "
            "forward."
        )

    def _check_call(self, device: torch.device, run: Run) -> None:
        """Raise RuntimeError for a call whose result would not be that of an eager call."""
        again, recipe = within_backward(), self.terms.recipe
        scopes = False
        for reference, hooked, settings in zip(self._live, self._hooked, self._settings, strict=True):
            operation = reference()
            if operation is None:
                continue
            if is_hooked(vars(operation)) != hooked:
                raise RuntimeError(
                    f"Hooks of {type(operation).__name__} were registered or removed after the model was compiled or "
                    "exported, which torch does not see. Call torch.compiler.reset(); export a program again."
                )
            if operation.settings != settings:
                raise RuntimeError(
                    f"{type(operation).__name__} was changed after the model was compiled or exported, which torch "
                    "does not see of operations that no module holds, or of an exported program's. Call "
                    "torch.compiler.reset(); export a program again."
                )
            scopes = scopes or operation.opened_scope is not None
            operation.note_unseen_use()
        if scopes:
            raise RuntimeError(
                "constant_weights is open around a compiled model, or one that FlopCounterMode or torch.func sees as "
                "operations of torch: these quantize the weights in each forward. Leave the scope before the call, or "
                "run the model without torch.compile, FlopCounterMode and torch.func."
            )
        if self._state_names and self._has_wrapped_states():
            raise NotImplementedError(
                f"The states of {recipe.name!r} are among what torch.func.grad or vjp is given, and it changes no "
                "tensor of those. Give torch.func.functional_call the parameters alone, of named_parameters(): the "
                "states stay the module's."
            )
        if self._state_names and run.records and device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                f"A CUDA graph of a compiled forward under {recipe.name!r} is captured, whose replays would leave its "
                "scales as they are. Compile without mode='reduce-overhead', or capture by fuser.graph."
            )
        if self._state_names and run.records and again:
            raise RuntimeError(
                f"A forward under {recipe.name!r} is computed again in a backward, when its scales may have moved. "
                "Leave the checkpoint around the compiled model out, and activation_memory_budget and "
                "aggressive_recomputation of torch._functorch.config as they are, or use a recipe without a state."
            )
        if not self.terms.of_autocast:
            return
        if again:
            self._check_recipe_again(recipe)
        else:
            self._recipes.add(recipe)
            around = recipe_of(own_entries())
            if around != recipe:
                raise RuntimeError(
                    f"This model was compiled under {recipe.name!r}, but runs under {around.name!r}, which "
                    "torch.compile did not see: autocasts of two threads are open at once. Run compiled models on one "
                    "thread, or open autocast within the compiled function."
                )
        for call in checkpoints():
            self._recipes_of_frames.setdefault(call.frame, set()).add(recipe)

    def _check_recipe_again(self, recipe: Recipe) -> None:
        """Raise RuntimeError if what is computed again under this recipe ran under another one, or may have: no frame
        tells it of the reentrant checkpoint, where it is refused outside of any `autocast`."""
        known = [self._recipes_of_frames.get(call.frame) for call in checkpoints()]
        first = next((recipes for recipes in known if recipes), None)
        if first is None:
            first = self._recipes - {recipe} if not own_entries() and recipe_of(()) == recipe else set()
        if first and recipe not in first:
            names = " and ".join(sorted(map(repr, first)))
            raise RuntimeError(
                f"A compiled forward is computed again in a backward under {recipe!r}, and has run under {names}. Open "
                "autocast within what is checkpointed, or compile the checkpoint with the model."
            )

    def _has_wrapped_states(self) -> bool:
        """Of the first one: whoever gives one gives all."""
        states = (state for held in self._states for name, state in held.items() if name in self._state_names)
        first = next(states, None)
        return first is not None and is_functorch_wrapped_tensor(first)

    @contextmanager
    def _holding(self, operations: Sequence[nn.Module], parameters: Sequence[Tensor]) -> Iterator[None]:
        """The operations hold these as parameters, in their order, until the end."""
        owners = [
            (operations[at].get_submodule(path)._parameters, own_name)
            for at, (path, _, own_name) in ((at, name.rpartition(".")) for at, name in self._slots)
        ]
        for (owner, name), parameter in zip(owners, parameters, strict=False):
            owner[name] = parameter  # type: ignore[assignment]
        try:
            yield
        finally:
            for owner, name in owners:
                owner[name] = None


def _without_gradients() -> AbstractContextManager[Any]:
    return torch.no_grad() if torch.is_grad_enabled() else nullcontext()


def _repeated(kept: Kept, given: Sequence[Tensor | None], sizes: tuple[int, ...], function: Callable[[], Any]) -> Any:
    """function(), or what it did for tensors that lie as these do: what a plan does follows from that, from the sizes,
    and from these settings."""
    tensors: list[Any] = []
    addresses: list[int] = []
    try:
        key = how(given, tensors, addresses), sizes, within_backward(), torch.backends.cuda.matmul.fp32_precision
    except TypeError:  # a tensor that is no plain one
        return function()
    return kept.run(key, tensors, addresses, function)


def _flops(program: Program, operations: Sequence[Any], rows: Sequence[int]) -> tuple[int, int]:
    """Of all products forward, and of those that backward computes. rows: how many each step saw."""
    forward = backward = 0
    for wiring, count in zip(program.forward, rows, strict=True):
        for index in wiring.step.indices:
            flops = operations[index].flops(count)
            needs = program.contexts[index]["needs"]
            forward += flops
            backward += flops * needs.input + operations[index].wgrad_flops(count, needs.params)
    return forward, backward


def _activations(tensors: Sequence[Tensor], num_parameters: int) -> list[Tensor]:
    return [tensors[0], *tensors[1 + num_parameters :]]


def _at_border(value: Any) -> Tensor:
    return value.sizes if isinstance(value, Splits) else at_tensor(value)


class _Shape(NamedTuple):
    size: Sequence[int]
    dtype: torch.dtype
    device: torch.device


def _shapes(run: Run, parameters: Sequence[Tensor], sizes: Sequence[int], device: torch.device) -> list[_Shape]:
    """Of all tensors that forward took."""
    ends = list(itertools.accumulate((dims for dims, _ in run.given), initial=0))
    given = [
        _Shape(sizes[begin:end], dtype, device)
        for (begin, end), (_, dtype) in zip(itertools.pairwise(ends), run.given, strict=True)
    ]
    return [given[0], *[_Shape(p.shape, p.dtype, p.device) for p in parameters], *given[1:]]


def _empty(shape: _Shape) -> Tensor:
    return torch.empty(shape.size, dtype=shape.dtype, device=shape.device)


def _check_same_numbers(before: Sequence[OperationState], now: Sequence[OperationState]) -> None:
    for old, new in zip(before, now, strict=True):
        if old is new or old.values is new.values:
            continue
        numbers = [{k: v for k, v in s.values.items() if isinstance(v, (bool, int, float, str))} for s in (old, new)]
        if not all(map(_is_same, numbers[0].values(), map(numbers[1].get, numbers[0]))):
            raise NotImplementedError(
                f"{type(new.values.get('operation')).__name__} sets numbers on its context that differ between two "
                "forwards of the same shapes, and an operation of torch hands on tensors alone. Keep them in a tensor "
                "of `Saved`."
            )


def _check_no_tensors(states: Sequence[OperationState]) -> None:
    for state in states:
        name = next((name for name, value in state.values.items() if isinstance(value, Tensor)), None)
        if name is not None:
            raise NotImplementedError(
                f"{type(state.values.get('operation')).__name__} sets a tensor on its context, {name!r}, and an "
                "operation of torch cannot hand it on: backward would find that of another forward. Put it into "
                "`Saved`."
            )


def _is_same(one: Any, other: Any) -> bool:
    return one == other or (isinstance(one, float) and math.isnan(one))


@cache
def _process() -> str:
    """A name of this process: what is compiled here must not be taken for what another one compiles."""
    return uuid.uuid4().hex[:12]
