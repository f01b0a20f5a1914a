"""CUDA graphs of modules: capture forward, backward and delayed wgrad, and replay them in place of the modules."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from fuser.graph.arguments import (
    check_alike,
    make_capture_hooks,
    make_instances,
    make_samples,
    make_schedule,
    make_settings,
    renamed,
)
from fuser.graph.capture import make_recorder
from fuser.graph.checks import HeldCheck, InputCheck
from fuser.graph.record import Graphs
from fuser.schedule.memory import MemoryPlan
from fuser.schedule.schedule import Event, Item, Pass, Place, Schedule
from ops.runner.data_parallel import LastWrapper, leave_states, reduced_parameters
from ops.runner.nested_backward import unreached
from ops.runner.operation import BasicOperation
from ops.runner.quantizer_state import held_names
from recipes.recipe import Recipe


def make_graphed_callables(
    modules: nn.Module | Sequence[nn.Module],
    sample_args: Sequence[Any],
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: Any = None,
    *,
    enabled: bool | Sequence[bool] = True,
    recipe: Recipe | str | None = None,
    amax_reduction_group: dist.ProcessGroup | None = None,
    cache_quantized_params: bool = False,
    schedule: Schedule | str | Sequence[Item] | None = None,
    layers: Sequence[int] | int | None = None,
    follows: Collection[int] = (),
    pool: Any = None,
    retain_graph_in_backward: bool = False,
    share_buffers: bool | None = None,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], object] | None = None,
    post_warmup_hook: Callable[[], object] | None = None,
    capture_time_hooks: Sequence[Mapping[str, Mapping[Any, Callable[[nn.Module], None]]] | None] | None = None,
    report: Callable[[str], object] | None = None,
    debug: bool = False,
    **others: Any,
) -> Any:
    """Capture modules into CUDA graphs. Returns a `GraphedCallable` for one module, a tuple of them for several.

    modules:       one or several. Without a schedule they run in order, backward in reverse order, and delayed wgrads
                   last. With a schedule they are its layers, chunk by chunk
    sample_args:   the positional arguments, a tuple; for several modules a tuple of tuples, one for each module; with a
                   schedule one for each forward instance in the order of `Schedule.index`, or one for each layer.
                   Each call copies its tensors into the graphs' memory; those that require grad receive a gradient.
                   All other arguments are constants. Split sizes may be a tensor on the host, in the sample and in
                   each call: they are copied to the device
    sample_kwargs: keyword arguments, in the same form
    num_warmup_iters: passes through the schedule before the capture; 0 still runs one, which loads all kernels
    allow_unused_input: whether an input that requires grad may receive no gradient
    enabled, recipe: as for `autocast`; enabled may be a sequence with one for each module. recipe None: the current one
    amax_reduction_group: as for `autocast`
    cache_quantized_params: each call must pass `is_first_microbatch`; on a GPU weights are quantized only where it is
                   True
    schedule, layers: a `Schedule`, or arguments of `Schedule.parse`; returns a callable for each forward instance
    follows:       chunks whose input gradient the preceding chunk consumes on this rank. Other input gradients are sent
                   to another rank, and stay valid until the end of the next dgrad entry
    pool:          from torch.cuda.graph_pool_handle(), to share memory with other graphs, none of which may then be
                   replayed between a forward and its last gradient; by default a new pool
    retain_graph_in_backward: keep what backward reads, so that it can be replayed twice
    share_buffers: let instances share the memory of inputs, outputs and their gradients where their lifetimes do not
                   overlap; by default only with a schedule
    clone_param_grads_on_return: False: keep the gradient memory of every instance, and return it without cloning. So it
                   is in any case for a parameter that has `skip_backward_post_hook` at the capture
    pre_warmup_hook, post_warmup_hook: called once, before and after all warm-up
    capture_time_hooks: for each module a dict of "forward_pre_hooks", "forward_hooks", "backward_pre_hooks" and
                   "backward_hooks", each a dict whose values are called with the module, or None: before and after its
                   forwards and backwards of warm-up and capture, outside of the graph; never at a replay
    report:        called before the capture with a text on the device memory that the graphs will take
                   (`report=print`); an exception in it ends the call. The pool's size is known only on a GPU with 2 or
                   more warm-ups, of which the last allocates memory as the capture does
    debug:         fill each buffer with NaN after its last use, and the pool's free memory between passes (not with
                   retain_graph_in_backward)

    Backward is captured for modules in training mode if gradients are enabled. Warm-up and capture restore gradients,
    main_grad, random generators, buffers and recipe states, also after an exception.

    On a CPU there are no graphs: a replay runs the module again, on the same buffers and with the same checks. It is
    meant for tests, not for speed.

    TransformerEngine's names are accepted too: fp8_enabled, fp8_recipe, fp8_group, fp8_weight_caching, _order,
    _num_layers_per_chunk, _reuse_graph_input_output_buffers.

    Raises TypeError, ValueError, RuntimeError or NotImplementedError for what cannot be captured (see
    `fuser.graph.checks`) and ScheduleError for a schedule that does not match, all before anything is captured.
    """
    options = renamed(
        others, enabled=enabled, recipe=recipe, schedule=schedule, layers=layers, share_buffers=share_buffers,
        amax_reduction_group=amax_reduction_group, cache_quantized_params=cache_quantized_params,
    )  # fmt: skip
    given, share_buffers = options["schedule"], options["share_buffers"]
    single = isinstance(modules, nn.Module)
    several: list[nn.Module] = [modules] if isinstance(modules, nn.Module) else list(modules)
    if given is None and single:
        sample_args, sample_kwargs = [sample_args], None if sample_kwargs is None else [sample_kwargs]
    samples = make_samples(sample_args, sample_kwargs)
    settings = make_settings(several, samples, options)
    plan = make_schedule(several, settings, given, options["layers"], follows)
    instances = make_instances(
        plan, several, samples, settings, allow_unused=allow_unused_input, retain=retain_graph_in_backward,
        capture_hooks=make_capture_hooks(several, capture_time_hooks),
    )  # fmt: skip
    sharing = given is not None if share_buffers is None else share_buffers
    if sharing:
        check_alike(plan, instances)
    device = settings[0].device
    graphs = Graphs(
        plan, instances, make_recorder(device, pool), follows=follows,
        shared=sharing, owned_grads=not clone_param_grads_on_return, debug=debug,
    )  # fmt: skip
    graphs.record(device, num_warmup_iters, pre_warmup_hook, post_warmup_hook, report)
    callables = tuple(
        GraphedCallable(graphs, place, clone=clone_param_grads_on_return) for place in sorted(instances, key=plan.index)
    )
    return callables[0] if single and given is None else callables


class GraphedCallable:
    """Replays one forward of a module, and through autograd its backward. The module itself is not changed.

    Call it like the module, with tensors of the samples' form. Outputs and input gradients are memory of the graphs:
    they are valid until the next replay that shares the memory; for a single module, until its next call.

    module: the captured module; memory: the buffers of everything captured in the same call
    """

    def __init__(self, graphs: Graphs, place: Place, *, clone: bool) -> None:
        instance = graphs.instances[place]
        chunk, microbatch, layer = place
        self.module = instance.module
        self._graphs = graphs
        self._place = place
        self._instance = instance
        self._clone = clone
        self._label = f"{type(self.module).__name__} (chunk {chunk}, microbatch {microbatch}, layer {layer})"
        self._check_inputs = InputCheck(instance.sample, self._label)
        self._check_held = HeldCheck(self.module)
        self._params = list(instance.params)
        self.num_params = len(self._params)
        self.num_leading = min(1, len(instance.sample.at))  # tensors before the parameters in the node's inputs
        self._flag = instance.settings.keep_weights
        self._operations = [inside for inside in self.module.modules() if isinstance(inside, BasicOperation)]
        self._wgrad_is_external = any(operation.wgrad_is_external for operation in self._operations)
        self._wrapper = LastWrapper()
        self._records_amaxes = instance.settings.with_backward and graphs.has_effects(Event(Pass.FORWARD, *place))

    @property
    def memory(self) -> MemoryPlan:
        return self._graphs.memory

    def __call__(self, *args: Any, is_first_microbatch: bool | None = None, **kwargs: Any) -> Any:
        if self._graphs.is_free:
            raise RuntimeError(f"{self._label} was reset, and has no graph any more. Capture again.")
        if self.module.training is not self._instance.training:
            mode, now = ("training" if is_on else "eval" for is_on in (self._instance.training, self.module.training))
            raise RuntimeError(
                f"{self._label} was captured in {mode} mode and is in {now} mode now. Call the module itself, or "
                f"capture it in {now} mode too."
            )
        if (self._flag is None) is not (is_first_microbatch is None):
            raise TypeError(
                f"{self._label}: is_first_microbatch is {is_first_microbatch}. Say it in each call with "
                "cache_quantized_params=True, and in none without."
            )
        tensors = self._check_inputs(args, kwargs)
        self._check_held()
        wrapper = self._wrapper.changed()
        if wrapper is not None:
            self._enter(wrapper)
        forward_only = not self._instance.settings.with_backward
        if forward_only and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            raise RuntimeError(
                f"{self._label} was captured without backward (eval mode, or gradients off), but an input requires a "
                "gradient. Call it under torch.no_grad(), or capture it in training mode with gradients on."
            )
        if self._records_amaxes and not torch.is_grad_enabled():
            raise RuntimeError(
                f"{self._label} was captured with gradients on, so its forward records amaxes, which it must not do "
                "without them. Call it with gradients on, or capture one under torch.no_grad() too."
            )
        if self._flag is not None:
            self._flag.fill_(0.0 if is_first_microbatch else 1.0)
        # The input order of a pipeline's node (x, parameters, extras), which determines the order of autograd's hooks.
        first = self.num_leading
        outputs = _Replay.apply(self, *tensors[:first], *self._params, *tensors[first:])
        return self._instance.unflattened(outputs)

    def backward_dw(self) -> None:
        """Replay the delayed weight gradients, then perform their side effects: flags, `.grad`, hooks.

        Does nothing if the module delays none. Raises RuntimeError if its backward has not been replayed.
        """
        if not self._instance.delays:
            return
        self._check_held()
        self._graphs.replay(Event(Pass.WGRAD, *self._place), _nothing)

    @property
    def delay_wgrad_compute(self) -> bool:
        """Whether `backward_dw()` must be called after each backward."""
        return self._instance.delays

    def reset(self) -> None:
        """Free the graphs and buffers of everything captured in the same call. A second call does nothing."""
        self._graphs.free()
        self._params = []

    def _enter(self, wrapper: Any) -> None:
        """As `ops.runner.run.Pipeline` does, which no replay enters."""
        leave_states(wrapper, {name for operation in self._operations for name in held_names(operation._buffers)})
        reduced = reduced_parameters(wrapper)
        for operation in self._operations:
            trained = {name: p for name, p in operation.named_parameters() if p.requires_grad}
            try:
                operation.check_reduced(trained, reduced)
            except RuntimeError as error:
                raise RuntimeError(f"{self._label}: {error}") from error
        self._wrapper.entered(wrapper)

    # Called by the autograd node

    def replay_forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], int]:
        """The outputs, and the number of this call."""
        buffers, event = self._instance.buffers, Event(Pass.FORWARD, *self._place)
        assert buffers is not None, "it was reset"
        self._graphs.replay(event, lambda: _fill(buffers.inputs, tensors))
        return [output.detach() for output in buffers.outputs], self._graphs.replays(event)

    def check_is_last(self, call: int) -> None:
        """Raise RuntimeError if another call has overwritten what this one, by its number, left for backward."""
        if self._graphs.replays(Event(Pass.FORWARD, *self._place)) != call:
            raise RuntimeError(
                f"{self._label} was called again, with gradients or without, before the backward of an earlier call, "
                "and its graph holds what the last one left. Run backward before the next call, or capture a schedule "
                "with as many microbatches, or another callable for what is called in between."
            )

    def check_asked_for(self, edges: Sequence[tuple[Any, int]]) -> None:
        """Raise RuntimeError if a replay would add to main_grad gradients that the current backward does not compute.

        edges: the node's edges to inputs and parameters
        """
        if not self._wgrad_is_external:
            return
        first = self.num_leading
        if unreached(edges[first : first + self.num_params]):
            raise RuntimeError(
                f"{self._label} was captured with gradients that go into main_grad or are delayed, and a replay "
                "computes them, but this backward asks for others alone (torch.autograd.grad, backward(inputs=...)). "
                "Call backward() without inputs, or the module itself."
            )

    def replay_backward(self, dys: Sequence[Tensor | None]) -> list[Tensor | None]:
        instance, buffers = self._instance, self._instance.buffers
        if buffers is None:
            raise RuntimeError(f"{self._label} was reset before its backward. Capture again.")
        self._check_held()
        wanted = [dy for dy, form in zip(dys, instance.outputs, strict=True) if form.requires_grad]
        self._graphs.replay(Event(Pass.DGRAD, *self._place), lambda: _fill(buffers.output_grads, wanted))
        grads = iter(buffers.input_grads)
        d_inputs = [next(grads) if form.requires_grad else None for form in instance.inputs]
        return [*d_inputs[:1], *instance.returned_param_grads(self._clone), *d_inputs[1:]]

    def mark(self, fctx: Any, outputs: Sequence[Tensor]) -> None:
        forms = self._instance.outputs
        fctx.mark_non_differentiable(*[y for y, form in zip(outputs, forms, strict=True) if not form.requires_grad])


class _Replay(torch.autograd.Function):
    """A replay as one autograd node. The graphs also hold references to the returned gradients, so autograd copies them
    when it sets `.grad`."""

    @staticmethod
    def forward(fctx: Any, graphed: GraphedCallable, *tensors: Tensor) -> tuple[Tensor, ...]:
        fctx.set_materialize_grads(False)
        fctx.graphed = graphed
        first = graphed.num_leading
        outputs, fctx.call = graphed.replay_forward([*tensors[:first], *tensors[first + graphed.num_params :]])
        graphed.mark(fctx, outputs)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(fctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        graphed = fctx.graphed
        graphed.check_is_last(fctx.call)
        graphed.check_asked_for(fctx.next_functions)
        return None, *graphed.replay_backward(dys)


def _nothing() -> None:
    pass


@torch.no_grad()
def _fill(static: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
    for target, tensor in zip(static, given, strict=True):
        if tensor is None:
            target.zero_()
        elif tensor.data_ptr() != target.data_ptr():
            target.copy_(tensor)
