"""What torch.compile, torch.export and recorders of torch trace of a call: operations of torch in place of pipelines.

While a call is traced, `stage_of` answers from Python, untraced, which operation runs, of which parameters and extra
inputs; its arguments are what torch's guards then compare before a later call. Nothing here imports torch's compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.flop_counter import _FlopCounterMode

from ops.products.paths import choose_path
from ops.runner.context import IndexTensor
from ops.runner.input import why_not_plain
from ops.runner.names import name_of
from ops.runner.nested_backward import within_backward
from ops.runner.parameters import is_computed, parameter_dtype, planned_dtype
from ops.runner.run import Pipeline
from ops.runner.torch_autocast import dtype_of_autocast
from ops.runner.traced_operations import call, register
from ops.runner.traced_plan import Terms, TracedPlan
from ops.runner.transforms import is_transformed
from recipes.first_forwards import FirstForwards
from recipes.recipe import recipe_within
from recipes.request import PlanRequest
from recipes.stack import keeps_state, own_entries, recipe_of, seen, traced_recipe, why_not_inside
from recipes.tensors.quantized_handle import QuantizedHandle
from recipes.tensors.splits import Splits

Function = TypeVar("Function", bound=Callable[..., Any])

# Of what runs where no operation of torch can stand for it.
NOT_TRACED = (
    "Operations of fuser run as they are, with kernels that are fused already, and torch.compile takes what is around "
    "them: leave out fullgraph=True."
)

_FUNCTIONAL = torch._C._TorchDispatchModeKey.FUNCTIONAL


class Seen(NamedTuple):
    """What of a call, beside its tensors, decides what is run: strings, numbers and tuples of them, for torch's guards.

    modules: of each its class, whether it is in training mode, and `BasicOperation.settings`, or what a Sequential
        exports and its path
    given: the extra inputs' names, each with its dtype, or its class if it is no tensor
    """

    recipe: str
    inside: bool
    modules: tuple[Any, ...]
    device: str
    dtype: str
    outputs: tuple[str, ...]
    given: tuple[tuple[str, str], ...]
    has_buffers: bool
    path: str | None
    fusions: tuple[str, ...]


# Name of the operation, key of its plan, parameters (path of the module, name, whether it is computed), extra inputs,
# extra outputs
TracedStage = tuple[str, str, tuple[tuple[tuple[str, ...], str, bool], ...], tuple[str, ...], tuple[str, ...]]


def is_constant(function: Function) -> Function:
    """Decorate a method so that what traces calls it at once and takes its result for constant, as
    `torch.compiler.assume_constant_result`, which imports torch's compiler."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


def see(
    module: nn.Module,
    x: Tensor,
    extras: Mapping[str, Any],
    outputs: Sequence[str],
    buffers: Any,
    path: str | None,
    fusions: tuple[str, ...] = (),
) -> tuple[Any, ...]:
    """The fields of `Seen`, as torch hands them on. It is traced: what it reads is compared before the next call."""
    id(module)  # so it is the same one: of another, what is compiled would run with this one's settings and states
    modules = seen_of_modules(module)
    given = tuple([(n, str(v.dtype) if isinstance(v, Tensor) else type(v).__name__) for n, v in extras.items()])
    has_buffers = True if buffers else False  # noqa: SIM210  # torch 2.11 does not trace `bool` of a dict
    return (
        seen.recipe, seen.inside, modules, x.device.type, str(x.dtype), tuple(outputs), given, has_buffers, path,
        fusions,
    )  # fmt: skip


def seen_of_modules(module: nn.Module) -> tuple[Any, ...]:
    """`Seen.modules`."""
    return tuple([(type(m).__name__, m.training, *_seen_of(m)) for m in module.modules()])


def why_changed_within(module: nn.Module, seen: tuple[Any, ...], now: tuple[Any, ...]) -> str | None:
    """Why what is traced changes this module before it calls it, as a sentence, or None. seen: what was read where that
    is traced; now: the same, read untraced, which is what would run."""
    if seen == now:
        return None
    return (
        f"The compiled function changes settings or modules of this {type(module).__name__} and then calls it, which "
        "would run as it was before. Change them outside of the function."
    )


def _seen_of(module: Any) -> tuple[Any, ...]:
    if hasattr(module, "fuser_forward"):
        return (module.settings,)
    return (tuple(module.exports), module.path) if hasattr(module, "traced_stages") else ()


def is_counted(first_forwards: FirstForwards, training: bool) -> bool:
    """Whether torch's flop counter looks at an eager forward; then it is recorded for a reentrant checkpoint around it.
    One that another checkpoint may compute again, or does, is left to the runner, which records more."""
    if not torch._C._len_torch_dispatch_stack() or not isinstance(_get_current_dispatch_mode(), _FlopCounterMode):
        return False
    if torch._C._autograd._top_saved_tensors_default_hooks(True) is not None or within_backward():
        return False
    first_forwards.began(training)
    return True


def is_recorded() -> bool:
    """Whether make_fx, AOTAutograd or torch.jit.trace records this call, by an operation of torch in its place: of the
    runner they would record split sizes as constants, and no kernel."""
    if torch._C._get_tracing_state() is not None or get_proxy_mode() is not None:
        return True
    return torch._C._get_dispatch_mode(_FUNCTIONAL) is not None


def refuse(why: str) -> None:
    """Break the graph, with this reason; an error where it must be whole, in torch.func.grad, and if it is recorded."""
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(msg=why)
    elif torch.compiler.is_exporting() or is_transformed() or is_recorded():
        raise NotImplementedError(why)


def parameters_of(module: nn.Module, stage: TracedStage) -> list[Tensor]:
    """The parameters of the stage. module: where their paths begin."""
    found = []
    for path, parameter, computed in stage[2]:
        owner: Any = module
        for child in path:
            owner = owner._modules[child]
        registered = not computed and parameter in owner._parameters
        found.append(owner._parameters[parameter] if registered else getattr(owner, parameter))
    return found


def run_stage(
    stage: TracedStage, parameters: Sequence[Tensor], x: Tensor, extras: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Tensor]]:
    """y and the extra outputs by name."""
    name, key, _, inputs, outputs = stage
    why = why_not_plain("x", x)
    if why is not None:
        refuse(why)
        raise TypeError(why)
    given = [extras[n] if isinstance(extras[n], Tensor) else torch.tensor(extras[n]) for n in inputs]
    y, *made = call(name, x, [*parameters, *given], key)
    return y, dict(zip(outputs, made, strict=True))


def stage_of(
    pipeline: Pipeline, paths: Sequence[tuple[str, ...]], outputs: tuple[str, ...], call: Seen, fusions_version: int
) -> TracedStage | str:
    """The operation of torch that runs this pipeline, or why there is none, as a sentence.

    paths: of the pipeline's operations, from the module whose call is traced
    """
    _, training, *_ = call.modules[0]
    around = traced_recipe(call.recipe) if call.inside else recipe_of(own_entries())
    recipe = recipe_within(pipeline.recipe, around)
    device, dtype = torch.device(call.device), getattr(torch, call.dtype.removeprefix("torch."))
    named = [(operation, name) for operation in pipeline.operations for name in operation.parameter_names()]
    dtype = planned_dtype((parameter_dtype(*one) for one in named), None, dtype)
    request = PlanRequest(
        recipe, device, dtype, pipeline.all_needs(True), training, pipeline.path or recipe.path, fusions_version
    )
    why = _why_not(pipeline, request, outputs, call)
    if why is not None:
        return why
    exported = torch.compiler.is_exporting() or is_recorded()
    of_autocast = pipeline.recipe is None and not call.inside and not exported
    terms = Terms(
        recipe, of_autocast, dtype_of_autocast(device), training, fusions_version, tuple(pipeline.consumed), outputs
    )
    known = (terms, call.modules)
    plan = pipeline.traced.get(known)
    if plan is None:
        plan = pipeline.traced[known] = TracedPlan(pipeline, terms)
    name = name_of(pipeline.operations, pipeline.planner(pipeline.operations, request).forward)
    register(name, plan, outlives_model=exported)
    slots = tuple(
        ((*path, *name.split(".")[:-1]), name.split(".")[-1], is_computed(operation, name))
        for path, operation in zip(paths, pipeline.operations, strict=True)
        for name in operation.parameter_names()
    )
    return name, plan.key, slots, terms.inputs, outputs


def _why_not(pipeline: Pipeline, request: PlanRequest, outputs: Iterable[str], call: Seen) -> str | None:
    """Why what runs cannot be one operation of torch, as a sentence, or None."""
    recipe, path = request.recipe, choose_path(request).name
    if call.has_buffers:
        return "buffers= names memory of the caller's, which an operation of torch may not return. Leave it out."
    if call.inside and keeps_state(recipe):
        return why_not_inside(recipe)
    for kind in (kind for _, kind in call.given if not kind.startswith("torch.") and kind not in ("list", "tuple")):
        return f"An extra input is a {kind}, but only tensors, and lists of sizes, pass torch's tracing. Give a tensor."
    kinds = {o.extra_name(n): (o, k) for o in pipeline.operations for n, k in o.extra_outputs.items()}
    for name in outputs:
        operation, kind = kinds[name]
        if kind not in (Tensor, IndexTensor, Splits):
            return (
                f"The extra output {name!r} of {type(operation).__name__} is a {kind.__name__}, which leaves its "
                "pipeline: only tensors pass torch's tracing. A pipeline ends at a module that is no operation, and "
                "where `set_recipe` has given operations another recipe: have neither between Dispatch and Combine."
            )
    for operation in pipeline.operations:
        if any(isinstance(parameter, QuantizedHandle) for parameter in operation.parameters()):
            return (
                f"{type(operation).__name__} holds its weights quantized, as tensors that torch does not trace. Run "
                "this model eagerly, or compile one with weights in high precision."
            )
        why = operation.why_not_traced(path)
        if why is not None:
            return f"{type(operation).__name__}: {why}"
    return None
