"""A complete training step, including loss and optimizer, as one CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from fuser.graph.capture import Segment, make_recorder
from fuser.graph.checks import HeldCheck, InputCheck, check_module
from fuser.graph.instance import Sample, Settings
from fuser.graph.state import undisturbed
from ops.products.constant_weights import end_constant_weights
from recipes.effects import not_recorded
from recipes.stack import current_recipe, entered


def make_graphed_step(
    step: Callable[..., Any],
    sample_args: Sequence[Any],
    *,
    modules: nn.Module | Sequence[nn.Module],
    optimizers: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    num_warmup_iters: int = 3,
    pool: Any = None,
) -> GraphedStep:
    """Capture `step(*sample_args)`, and return a `GraphedStep` that replays it with other tensors of the same form.

    step:       clears the gradients (`zero_grad()`), runs forward and backward, and steps the optimizers. Returns
                tensors, also in tuples or dictionaries. Set its recipe inside, with `autocast`
    modules, optimizers: those whose parameters, buffers and states the step changes
    num_warmup_iters: steps before the capture, at least 2

    Warm-up and capture restore parameters, gradients, main_grad, states and random generators. States that the
    optimizers create in their first step start as zeros (right for SGD without dampening, Adam, AdamW, RMSprop).
    Python hooks run during warm-up and capture, not in a replay. On a CPU a replay runs the step again.

    Raises ValueError for a step that adds to gradients from before it, and on a GPU for an optimizer that is not
    `capturable`; the errors of `make_graphed_callables` for modules that cannot be captured.
    """
    several = [modules] if isinstance(modules, nn.Module) else list(modules)
    chosen = [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
    parameters = list(dict.fromkeys(p for module in several for p in module.parameters()))
    if not parameters:
        raise ValueError("The modules have no parameters, so there is no step to capture. Give those that are trained.")
    device = parameters[0].device
    sample = Sample(sample_args, {})
    autocasts = (torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type))
    for module in several:
        check_module(module, sample, Settings(device, current_recipe(), None, None, autocasts, True))
    for optimizer in chosen:
        if device.type == "cuda" and not optimizer.defaults.get("capturable", True):
            name = type(optimizer).__name__
            raise ValueError(f"{name} counts its steps on the host. Give {name}(..., capturable=True).")
    graphed = GraphedStep(step, sample, several, chosen, parameters)
    graphed.capture(device, num_warmup_iters, pool)
    return graphed


class GraphedStep:
    """Replays a captured step. Its results are memory of the graph, and valid until the next replay."""

    def __init__(
        self,
        step: Callable[..., Any],
        sample: Sample,
        modules: Sequence[nn.Module],
        optimizers: Sequence[torch.optim.Optimizer],
        parameters: Sequence[Any],
    ) -> None:
        self._step = step
        self._sample = sample
        self._modules = modules
        self._optimizers = optimizers
        self._parameters = parameters
        self._inputs = [tensor.detach().clone() for tensor in sample.tensors]
        self._check_inputs = InputCheck(sample, getattr(step, "__name__", "step"))
        self._held: list[HeldCheck] = []
        self._settings: list[dict[str, Any]] = []
        self._results: list[Tensor | None] = []
        self._spec: Any = None
        self._left: list[tuple[Tensor | None, Any]] = []  # for each parameter after the step: its gradient, its flag
        self._segment: Segment | None = None

    def __call__(self, *args: Any) -> Any:
        if self._segment is None:
            raise RuntimeError("The step was reset, and has no graph any more. Capture again.")
        tensors = self._check_inputs(args, {})
        for check in self._held:
            check()
        if self._settings != _settings_of(self._optimizers):
            raise RuntimeError(
                "A setting of an optimizer has changed since the capture, where it is fixed. Give a tensor (lr=torch."
                "tensor(...)) and change it in place, or capture again."
            )
        with torch.no_grad():
            for static, tensor in zip(self._inputs, tensors, strict=True):
                static.copy_(tensor)
        self._segment.replay()
        end_constant_weights()
        for parameter, (grad, flag) in zip(self._parameters, self._left, strict=True):
            parameter.grad = grad
            if flag is not None:
                parameter.grad_added_to_main_grad = flag
        return tree_unflatten(list(self._results), self._spec)

    def reset(self) -> None:
        """Free the graph and its buffers. A second call does nothing."""
        if self._segment is not None:
            self._segment.free()
        for parameter, (grad, _) in zip(self._parameters, self._left, strict=False):
            if grad is not None and parameter.grad is grad:
                parameter.grad = None
        self._segment, self._results, self._inputs, self._left = None, [], [], []

    def capture(self, device: torch.device, warmups: int, pool: Any) -> None:
        recorder = make_recorder(device, pool)
        used = [(o, p) for o in self._optimizers for group in o.param_groups for p in group["params"]]
        new = [(optimizer, parameter) for optimizer, parameter in used if parameter not in optimizer.state]
        main_grads = [p.main_grad for p in self._parameters if hasattr(p, "main_grad")]
        changed = list(dict.fromkeys([*self._parameters, *(p for _, p in used), *main_grads]))  # masters are used alone
        try:
            with undisturbed(self._modules, device):
                before = _Values(changed, self._optimizers)
                try:
                    with recorder.warming_up(), warnings.catch_warnings():
                        warnings.filterwarnings("ignore", "This instance was constructed with capturable=True")
                        self._check_that_it_clears(recorder.warm_up)
                        buffers = _Values([b for module in self._modules for b in module.buffers()], ())
                        for _ in range(max(1, warmups - 1)):  # the first one creates the optimizers' states
                            self._work()
                        buffers.restore()
                    before.restore()
                    segment = recorder.record(self._work)
                finally:
                    before.restore()
                buffers.restore()
        except BaseException:
            for optimizer, parameter in new:
                optimizer.state.pop(parameter, None)
            self._results = []
            raise
        self._sample.release()
        self._segment = segment
        self._held = [HeldCheck(module) for module in self._modules]
        self._settings = _settings_of(self._optimizers)

    def _work(self) -> None:
        """The step with its side effects, which later parts of the step depend on."""
        with not_recorded():
            self._run()
        self._left = [(p.grad, getattr(p, "grad_added_to_main_grad", None)) for p in self._parameters]

    def _run(self) -> None:
        with entered(()), torch.enable_grad():
            results, self._spec = tree_flatten(self._step(*self._arguments()))
        if not all(result is None or isinstance(result, Tensor) for result in results):
            raise TypeError("The step returned something that is no tensor. A replay gives tensors, or None.")
        self._results = [None if result is None else result.detach() for result in results]

    def _arguments(self) -> list[Any]:
        values = list(self._sample.values)
        for index, tensor in zip(self._sample.at, self._inputs, strict=True):
            values[index] = tensor
        return values

    def _check_that_it_clears(self, warm_up: Callable[[Callable[[], None]], None]) -> None:
        # One that masters would make float32 is so from the start, and stays the same tensor.
        marks = [torch.zeros_like(p, dtype=p.grad_dtype or torch.float32) for p in self._parameters]
        for parameter, mark in zip(self._parameters, marks, strict=True):
            parameter.grad = mark
        warm_up(self._run)
        if any(p.requires_grad and p.grad is mark for p, mark in zip(self._parameters, marks, strict=True)):
            raise ValueError(
                "The step adds to gradients that were there before it, or leaves them there. Let it begin with "
                "zero_grad() of everything that it trains, and set_to_none=True."
            )


class _Values:
    """A copy of tensors and optimizer states, to restore. States created later are set to zero when restored."""

    def __init__(self, tensors: Sequence[Tensor], optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers
        self._seen = [(tensor, tensor.detach().clone()) for tensor in [*tensors, *self._states()]]

    def _states(self) -> list[Tensor]:
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        return [value for state in states for value in state.values() if isinstance(value, Tensor)]

    @torch.no_grad()
    def restore(self) -> None:
        known = {id(tensor) for tensor, _ in self._seen}
        for tensor, value in self._seen:
            tensor.copy_(value)
        for tensor in self._states():
            if id(tensor) not in known:
                tensor.zero_()


def _settings_of(optimizers: Sequence[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """The optimizers' settings, with tensors replaced by their ids."""
    return [
        {name: id(value) if isinstance(value, Tensor) else value for name, value in group.items() if name != "params"}
        for optimizer in optimizers
        for group in optimizer.param_groups
    ]
