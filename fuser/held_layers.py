"""The layers that compute for modules of other libraries: kept outside of these, and made anew for others."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from fuser.plan import registered_fusions
from fuser.sequential import Sequential
from ops.runner.operation import BasicOperation
from ops.runner.run import Pipeline
from ops.runner.tracing import refuse, run_stage, see
from recipes.recipe import Recipe


class _Layer(NamedTuple):
    """settings, tensors: of the module, those that the operations of the layer are made of.

    plans: those that torch.compile holds of operations that others have replaced
    """

    settings: tuple[Any, ...]
    tensors: tuple[Tensor, ...]
    layer: Sequential
    plans: tuple[Any, ...] = ()


# Outside of the modules, so that their state dict, their copies and what is saved of them stay as they are.
_layers: WeakKeyDictionary[nn.Module, dict[Hashable, _Layer]] = WeakKeyDictionary()


def held_layer(
    module: nn.Module,
    key: Hashable,
    settings: tuple[Any, ...],
    tensors: tuple[Tensor, ...],
    make: Callable[[], Sequence[BasicOperation]],
) -> Sequential:
    """The layer of `module` with this key, of just these settings and tensors, in the module's training mode.

    Backward needs the very tensors that its forward read, so other tensors (of an adapter, of `functional_call`, loaded
    with assign=True) have other operations, which `make` makes, as other settings have. They take the places of those
    before in the same Sequential, which records under which recipe a checkpoint recomputes, and share their buffers:
    the amaxes of delayed scaling, the counts of a router. What torch.compile made of those before is kept, for it takes
    the tensors of each call.
    """
    layers = _layers.setdefault(module, {})
    held = layers.get(key)
    if held is None:
        held = layers[key] = _Layer(settings, tensors, Sequential(*make()))
    elif held.settings != settings or any(
        mine is not theirs for mine, theirs in zip(held.tensors, tensors, strict=True)
    ):
        made = make()
        plans = (*held.plans, *_kept_plans(held.layer))
        for index, (new, old) in enumerate(zip(made, held.layer, strict=True)):
            new._buffers = old._buffers
            held.layer[index] = new.train(module.training)
        held = layers[key] = _Layer(settings, tensors, held.layer, plans)
    if held.layer.training != module.training:
        held.layer.train(module.training)
    return held.layer


def hold(operation: BasicOperation, tensors: Mapping[str, Tensor]) -> None:
    """Put tensors of others in the place of the operation's parameters.

    Not by assignment, which takes Parameters only: adapters and `functional_call` give computed tensors.
    """
    operation._parameters.update(tensors)  # type: ignore[arg-type]


def as_constants(settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """What torch's guards compare of settings that are read while a call is traced: of a module or recipe which one it
    is, of a float its digits, because torch traces a float that changes as a variable."""
    return tuple([_as_constant(value) for value in settings])


def _as_constant(value: Any) -> Any:
    if isinstance(value, (nn.Module, Recipe)):
        return id(value)
    return value.hex() if isinstance(value, float) else value


def run_traced(
    module: nn.Module,
    stages_of: Callable[..., tuple[Any, ...] | str],
    tensors: Sequence[Tensor],
    x: Tensor,
    extras: Mapping[str, Any],
    outputs: Sequence[str] = (),
) -> Any:
    """What the layer of `module` returns, as operations of torch over `tensors`; None after a break of the graph.

    stages_of: from what is seen of a call, the `Sequential.traced_stages` of the layer; torch takes it for constant
    tensors: the parameters of its operations, in their order
    """
    stages = stages_of(*see(module, x, extras, outputs, None, None, registered_fusions()))
    if isinstance(stages, str):
        refuse(stages)
        return None
    at = 0
    for stage in stages:
        end = at + len(stage[2])
        x, produced = run_stage(stage, tensors[at:end], x, extras)
        extras, at = {**extras, **produced}, end
    return (x, {name: extras[name] for name in outputs}) if outputs else x


def _kept_plans(layer: Sequential) -> Iterator[Any]:
    """Those that torch.compile holds of its operations, made to outlive these."""
    for stage in layer.layout().stages:
        if isinstance(stage.runner, Pipeline):
            for plan in stage.runner.traced.values():
                plan.keep()
                yield plan
