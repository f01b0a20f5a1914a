"""Where a weight gradient is written: to what autograd gets, to `main_grad`, or, later, to either.

An operation with weights does not compute dW itself. It gives the product (`Product`), and `accumulate` does the rest,
by two switches of the operation:

    accumulate_into_main_grad   the product is written into the buffer that the weight's owner has put at
                                `weight.main_grad`; else autograd gets dW
    delay_wgrad_compute         it is computed in `backward_dw()`, the oldest backward first; without main_grad it is
                                added to `weight.grad` there. A backward that ends with an exception, in whichever
                                module, leaves none

What the owner of the buffers (a data-parallel wrapper) sets on a weight, read when the gradient is computed:

    main_grad                   the buffer, see `_buffer`; of a weight with `__fsdp_param__`, what `get_main_grad()`
                                returns
    overwrite_main_grad         True: the first gradient overwrites the buffer, whatever was there; later ones are added
    grad_added_to_main_grad     set True here as soon as the buffer holds the gradient; the owner sets it False when it
                                has taken it. The first gradient is the first since then; where the weight has no such
                                attribute, every backward overwrites. What reentrant checkpointing runs within a
                                backward belongs to it.
    zero_out_wgrad              True: another path of autograd brings a gradient of this weight too

With main_grad autograd gets None for a weight; but of one that has `grad_added_to_main_grad` a placeholder of its
shape, dtype and device, so that the hooks behind it see a `.grad`: without values, or zeros with `zero_out_wgrad`,
where torch's anomaly mode looks for NaN, and where the owner has made main_grad itself the weight's `.grad`, to which
autograd adds it.
What is wrong with a main_grad is found before any of the pipeline's is written (of Megatron's FSDP, when it is asked
for).
Gradients of biases are autograd's in all cases, at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from ops.products.held_weights import (
    HeldAs,
    applied,
    bind_to_states,
    check_parts,
    held_as_of_new_operations,
    hold_quantized,
    note_replaced,
)
from ops.products.product import store
from ops.runner.backward import raise_located
from ops.runner.checked import Checked
from ops.runner.context import OperationContext
from ops.runner.in_place import memory_of
from ops.runner.nested_backward import outermost_backward, undo_on_failure
from ops.runner.operation import BasicOperation
from ops.runner.parameters import held_parameter
from ops.runner.torch_autocast import without_autocast
from recipes.arguments import as_flag
from recipes.effects import Accumulation, Effect, perform, recording
from recipes.recipe import Role
from recipes.tensors.quantized_parameter import QuantizedParameter
from recipes.tensors.quantized_shard import local_shard

# The gradient of all weights of an operation, still to be computed: product() gives new memory,
# product(out=buffer, accumulate=...) writes there (`ops.products.product.store`). Its positional arguments are
# what it multiplies.
Product = partial[Tensor]

_SWITCHES = ("accumulate_into_main_grad", "delay_wgrad_compute")


class OperationWithWeights(BasicOperation):
    """A basic operation with weights: one parameter `weight`, or one a group, `weight0`, `weight1`, ...

    stacked: whether it is one parameter
    is_grouped: whether there is a weight for each group of rows
    """

    quantized_roles = tuple(Role)
    stacked: bool = True
    is_grouped: bool = False
    weight_names: tuple[str, ...] = ("weight",)
    settings_of_backward = frozenset(_SWITCHES)

    accumulate_into_main_grad = Checked(as_flag)
    delay_wgrad_compute = Checked(as_flag)

    def __init__(self, *, accumulate_into_main_grad: bool, delay_wgrad_compute: bool) -> None:
        super().__init__()
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delay_wgrad_compute = delay_wgrad_compute
        self.held_as = held_as_of_new_operations()
        self._delayed: deque[_Gradient] = deque()
        self._wgrad_hooks: list[Callable[[], Any]] = []

    def hold_quantized(self, held_as: HeldAs | None = None) -> None:
        """Hold the weights as codes alone from now on, as `held_as` says (None: as it was said when it was made)."""
        self.held_as = held_as or self.held_as
        if self.held_as is not None:
            self.check_can_be_held(self.held_as)
            hold_quantized(self, self.weight_names, self.held_as)
            self.forget_quantized_weights()
            self._adopt_weights()

    def check_can_be_held(self, held_as: HeldAs) -> None:
        """Raise ValueError if the weights are not stored as products read them, or sharded into other parts than blocks
        of the format, and so cannot be held quantized."""
        computed = next((name for name in self.weight_names if self._parameters.get(name) is None), None)
        if computed is not None:
            raise ValueError(
                f"{computed!r} of {type(self).__name__} is computed from other parameters (torch.nn.utils.parametrize, "
                "weight_norm, prune), which change, so it cannot be held quantized. Remove that from it before, or "
                "quantize in the step."
            )
        check_parts(self, self.weight_names, held_as)

    @property
    def wgrad_is_external(self) -> bool:
        return self.accumulate_into_main_grad or self.delay_wgrad_compute

    @property
    def retains_grad_output(self) -> bool:  # type: ignore[override]
        return self.delay_wgrad_compute

    def weight_gradients(self, dw: Tensor) -> dict[str, Tensor]:
        """dw as a product gives it, by the weights' names."""
        return {"weight": dw} if self.stacked else dict(zip(self.weight_names, dw.unbind(), strict=True))

    def accumulate(self, ctx: OperationContext, product: Product) -> Mapping[str, Tensor | None]:
        """Write or accumulate the weights' gradients where they belong. Returns autograd's, by the weights' names."""
        if not self.wgrad_is_external:
            return self.weight_gradients(product())
        weights = self._wanted_weights(ctx)
        backward = outermost_backward()
        destinations = ctx.destinations
        record = recording()
        if record is not None:
            record.weights += weights.values()
        if self.delay_wgrad_compute:
            gradient = _Gradient(weights, product, _operands(product), backward)
            self._delayed.append(gradient)
            undo_on_failure(partial(self._forget_delayed, gradient))
        elif destinations is not None:
            self._write_to_main_grad(weights, product, destinations)
        else:
            self._write_to_main_grad(weights, product, self._destinations(weights, backward))
            self._mark_written(weights, backward)
        if not self.accumulate_into_main_grad:
            return {}
        kinds = map(_placeholder_kind, weights.values()) if destinations is None else destinations.placeholders
        placeholders = {
            name: torch.zeros_like(weight) if kind == "zeros" else torch.empty_like(weight)
            for (name, weight), kind in zip(weights.items(), kinds, strict=True)
            if kind != "none"
        }
        if record is not None:
            record.placeholders += placeholders.values()
        return placeholders

    def adds_in_float32(self, ctx: OperationContext) -> bool:
        """Whether products add weight gradients to float32, or to nothing: without main_grad they are new memory."""
        if not self.accumulate_into_main_grad:
            return True
        buffers = [getattr(weight, "main_grad", None) for weight in self._wanted_weights(ctx).values()]
        return all(buffer is not None and buffer.dtype == torch.float32 for buffer in buffers)

    def destinations(self, ctx: OperationContext) -> Destinations:
        """Where the weights' gradients are added to main_grad in this backward.

        Who sets `ctx.destinations` calls `mark_written` when that has been done.
        """
        return self._destinations(self._wanted_weights(ctx), outermost_backward())

    def mark_written(self, ctx: OperationContext) -> None:
        """Note on the weights that their gradients are in main_grad."""
        self._mark_written(self._wanted_weights(ctx), outermost_backward())

    def _wanted_weights(self, ctx: OperationContext) -> dict[str, Tensor]:
        assert ctx.seen_in_forward is not None, "it is called in backward"
        seen, _ = ctx.seen_in_forward
        return {name: seen[ctx.parameter_slots[name]] for name in self.weight_names if name in ctx.needs.params}

    def check_computed(self, parameters: Mapping[str, Tensor]) -> None:
        for name in self.weight_names if self.wgrad_is_external else ():
            node = parameters[name].grad_fn if name in parameters else None
            if node is not None:
                raise RuntimeError(
                    f"Weight {name!r} was computed from other tensors ({node.name()}), so it has no gradient "
                    "buffer of its own. Give the parameter itself, or leave accumulate_into_main_grad and "
                    "delay_wgrad_compute out."
                )

    def check_reduced(self, parameters: Mapping[str, Tensor], reduced: Collection[int]) -> None:
        for name in self.weight_names if self.wgrad_is_external else ():
            if name in parameters and id(parameters[name]) in reduced:
                on = [switch for switch in _SWITCHES if getattr(self, switch)]
                where = "main_grad" if self.accumulate_into_main_grad else ".grad"
                raise RuntimeError(
                    f"DistributedDataParallel reduces what autograd accumulates in backward, but with "
                    f"{' and '.join(on)} the operation itself adds the gradient of {name!r} to {where}, so each rank "
                    f"would keep its own. Leave {' and '.join(on)} out; or reduce this gradient yourself, and have the "
                    "weight ignored before you wrap the model: "
                    "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)."
                )

    def check_destinations(self, parameters: Mapping[str, Tensor]) -> None:
        if self.accumulate_into_main_grad and not self.delay_wgrad_compute:  # else backward_dw() reads where they are
            self._check_main_grads(parameters)

    def _check_main_grads(self, parameters: Mapping[str, Tensor]) -> None:
        for name in self.weight_names:
            # Megatron's FSDP makes the buffer when it is asked for it, once.
            if name in parameters and not hasattr(parameters[name], "__fsdp_param__"):
                _buffer(name, parameters[name])

    def _destinations(self, weights: dict[str, Tensor], backward: int) -> Destinations:
        firsts = {id(weight): name for name, weight in reversed(weights.items())}  # one may be that of several groups
        targets = tuple(
            _target(name, weight, backward, used_before=firsts[id(weight)] != name) for name, weight in weights.items()
        )
        whole = (targets or (None,))[0] if self.stacked else _as_one(targets, len(self.weight_names))
        return Destinations(targets, whole, tuple(map(_placeholder_kind, weights.values())))

    def _mark_written(self, weights: Mapping[str, Tensor], backward: int) -> None:
        for weight in weights.values():
            perform(Effect(_mark_added, (weight, backward)), at_once=True)

    def _forget_delayed(self, gradient: _Gradient) -> None:
        self._delayed = deque([other for other in self._delayed if other is not gradient])

    def need_backward_dw(self) -> bool:
        """Whether gradients are left to be computed by `backward_dw()`."""
        return bool(self._delayed)

    def exchange_delayed(self, gradients: deque[_Gradient]) -> deque[_Gradient]:
        """Leave these gradients to `backward_dw()` instead of those that are left now, which are returned."""
        before, self._delayed = self._delayed, gradients
        return before

    def delays_gradients(self) -> bool:
        """Whether a backward leaves gradients to `backward_dw()`: not of frozen weights."""
        weights = [self._parameters.get(name) for name in self.weight_names]
        return self.delay_wgrad_compute and any(weight is None or weight.requires_grad for weight in weights)

    def backward_dw(self) -> None:
        """Compute the weight gradients that the oldest backward left, on the current stream; then call the hooks.

        Does nothing without delay_wgrad_compute, and of frozen weights. Raises RuntimeError if none are left: a
        backward that ended with an exception leaves none.
        """
        backward_dw([("0", self)])

    def register_wgrad_accumulation_and_reduce_hooks(self, hook: Callable[[], Any]) -> None:
        """Call `hook()` at the end of each `backward_dw()`, in the order in which hooks were registered."""
        self._wgrad_hooks.append(hook)

    def _trigger_wgrad_accumulation_and_reduce_hooks(self) -> None:
        for hook in self._wgrad_hooks:
            hook()

    def _check_oldest(self) -> None:
        for gradient in self._delayed:
            if gradient.backward != self._delayed[0].backward:
                break
            if any(operand._version != version for operand, version in gradient.operands):
                raise RuntimeError(
                    "The input of this operation, or the gradient of its output, was changed in place since the "
                    "backward that left the weight gradient to backward_dw(). Call backward_dw() before."
                )
            for name, weight in gradient.weights.items():
                if held_parameter(self, name) is not weight:
                    raise RuntimeError(
                        f"Weight {name!r} was replaced, or sharded by FSDP2, since the backward that left its gradient "
                        "to backward_dw(). Call backward_dw() before."
                    )
            if self.accumulate_into_main_grad:
                self._check_main_grads(gradient.weights)

    @torch.no_grad()
    def _compute_oldest(self) -> None:
        backward = self._delayed[0].backward
        while self._delayed and self._delayed[0].backward == backward:  # as often as that backward used the weights
            gradient = self._delayed[0]
            with without_autocast(next(iter(gradient.weights.values())).device):
                if self.accumulate_into_main_grad:
                    destinations = self._destinations(gradient.weights, gradient.backward)
                    self._write_to_main_grad(gradient.weights, gradient.product, destinations)
                    self._mark_written(gradient.weights, gradient.backward)
                else:
                    dw = self.weight_gradients(gradient.product())
                    for name, weight in gradient.weights.items():
                        perform(Effect(_add_to_grad, (weight, dw[name], recording() is not None)))
            self._delayed.popleft()
            del gradient

    def _write_to_main_grad(self, weights: Mapping[str, Tensor], product: Product, destinations: Destinations) -> None:
        targets = dict(zip(weights, destinations.targets, strict=True))
        whole = destinations.whole
        record = recording()
        if record is not None:
            record.accumulations += [
                Accumulation(name, weights[name], target.buffer.data_ptr(), target.accumulate)
                for name, target in targets.items()
            ]
        if whole is not None:
            order = {"reverse": True} if whole.reverse else {}
            product(out=_destination(whole.buffer), accumulate=whole.accumulate, **order)
            return
        weight = next(iter(weights.values()))
        dtype = torch.promote_types(weight.dtype, torch.float32)
        dw = torch.empty(len(self.weight_names), *weight.shape, dtype=dtype, device=weight.device)
        each = self.weight_gradients(product(out=dw))
        for name, target in targets.items():
            store(each[name], _destination(target.buffer), target.accumulate)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        if self._parameters.get(name) is not None:
            self.exchanges_parameters = True
        super().register_parameter(name, param)
        if isinstance(param, QuantizedParameter):
            param.is_replaced = False  # it may be put back
        self.forget_quantized_weights()  # the same parameter may hold other values
        self._adopt_weights()

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        held = {name: p for name, p in self._parameters.items() if isinstance(p, QuantizedParameter)}
        self._parameters.update(dict.fromkeys(held))
        try:
            super()._apply(fn, recurse)
        finally:
            self._parameters.update(held)
        self._parameters.update({name: applied(fn, parameter) for name, parameter in held.items()})
        note_replaced(held.values(), self._parameters.values())
        self._adopt_weights()
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        for name in self.weight_names:
            local_shard(self._parameters.get(name))  # what is written into it may need the amax of all its ranks
        before = [*self._parameters.values()]
        super()._load_from_state_dict(state_dict, prefix, *args)
        note_replaced(before, self._parameters.values())  # with assign=True

    def _adopt_weights(self) -> None:
        """Let quantized weights find this operation's scales, and a data-parallel wrapper know that backward_dw()
        completes these gradients, not autograd."""
        bind_to_states(self, self.weight_names)
        if self.delay_wgrad_compute:
            for name in self.weight_names:
                weight = self._parameters.get(name)
                if weight is not None:
                    weight.skip_backward_post_hook = True  # type: ignore[attr-defined]

    def extra_repr(self) -> str:
        """The switches that are on, each after a comma."""
        return "".join(f", {switch}=True" for switch in _SWITCHES if getattr(self, switch))

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_delayed": deque()}  # what is left belongs to this very object

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._adopt_weights()  # copies of parameters lose their attributes


class _Gradient(NamedTuple):
    """A gradient to be computed.

    weights: those that it is of, by name; operands: with their versions; backward: autograd's number of the backward,
    of the outermost one where they are nested
    """

    weights: dict[str, Tensor]
    product: Product
    operands: list[tuple[Tensor, int]]
    backward: int


class _Target(NamedTuple):
    """reverse: the buffer is of several groups, the last one first."""

    buffer: Tensor
    accumulate: bool
    reverse: bool = False


class Destinations(NamedTuple):
    """Where the gradients of an operation's weights are written, weight by weight.

    whole: of all groups at once, where they lie so
    placeholders: what autograd gets for each, a kind of `_placeholder_kind`
    """

    targets: tuple[_Target, ...]
    whole: _Target | None
    placeholders: tuple[str, ...]


# The backward that last overwrote the main_grad of a weight without grad_added_to_main_grad.
_overwritten_in: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def backward_dw(operations: Sequence[tuple[str, OperationWithWeights]]) -> None:
    """Compute what the oldest backward left of each operation, in this order, each followed by its hooks.

    operations: with the label by which an error names them. Without one that delays gradients of weights that are
    trained nothing is done: a trainer may call every module. Raises RuntimeError if some do and nothing is left of any.
    """
    left = [(label, operation) for label, operation in operations if operation.need_backward_dw()]
    if not left and any(operation.delays_gradients() for _, operation in operations):
        raise RuntimeError(
            "backward_dw() has nothing to compute. No backward has left a weight gradient since the last call. "
            "Call it once after each backward."
        )
    for label, operation in left:  # all, before anything is written
        _located(label, operation, operation._check_oldest)
    for label, operation in left:
        _located(label, operation, operation._compute_oldest)
        perform(Effect(operation._trigger_wgrad_accumulation_and_reduce_hooks))


def _located(label: str, operation: OperationWithWeights, work: Callable[[], None]) -> None:
    try:
        work()
    except Exception as error:
        raise_located([label], 0, operation, error)


def check_accumulation(accumulation: Accumulation) -> None:
    """Raise RuntimeError unless a product would still be written where, and as, it was in the capture."""
    name, weight, pointer, accumulate = accumulation
    target = _target(name, weight, -1)
    if target.buffer.data_ptr() != pointer:
        raise RuntimeError(
            f"{name}.main_grad has moved since the capture, and the graph would write into its old memory. Copy into "
            "the buffer instead of replacing it, or capture again."
        )
    if target.accumulate is not accumulate:
        was, now = ("added to" if adds else "written over" for adds in (accumulate, target.accumulate))
        raise RuntimeError(
            f"The gradient of {name!r} was captured as one that is {was} what main_grad holds, but by the weight's "
            f"overwrite_main_grad and grad_added_to_main_grad it is to be {now} it now. Set grad_added_to_main_grad = "
            "False where a step begins; for several microbatches capture a schedule that has them."
        )


def _mark_added(weight: Any, backward: int) -> None:
    if hasattr(weight, "grad_added_to_main_grad"):
        weight.grad_added_to_main_grad = True
    elif getattr(weight, "overwrite_main_grad", False):
        _overwritten_in[weight] = backward


def _destination(buffer: Tensor) -> Tensor:
    record = recording()
    return buffer if record is None else record.destination(buffer)


def _operands(product: Product) -> list[tuple[Tensor, int]]:
    """What the product multiplies, with the number of times it was changed in place; inference tensors do not count."""
    tensors = [t for x in product.args for t in ([x] if isinstance(x, Tensor) else x.tensors()) if t is not None]
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _target(name: str, weight: Any, backward: int, *, used_before: bool = False) -> _Target:
    """Where the gradient of the weight goes, and whether it is added to what is there.

    used_before: the weight is that of an earlier group, too, whose gradient is written first
    """
    buffer = _buffer(name, weight)
    if not getattr(weight, "overwrite_main_grad", False):
        return _Target(buffer, True)
    if hasattr(weight, "grad_added_to_main_grad"):
        return _Target(buffer, weight.grad_added_to_main_grad or used_before)
    if used_before or _overwritten_in.get(weight) == backward:
        raise RuntimeError(
            f"Weight {name!r} is used twice in one backward, and with overwrite_main_grad its second gradient would "
            "overwrite the first. Set grad_added_to_main_grad = False on the weight before each backward, so that the "
            "second one is added."
        )
    return _Target(buffer, False)


def _buffer(name: str, weight: Any) -> Tensor:
    """The weight's main_grad in the weight's shape, without a copy.

    It has the weight's shape, where groups may have any distance, or is flat; float32 or in the weight's dtype.
    """
    if hasattr(weight, "__fsdp_param__"):
        weight.main_grad = weight.get_main_grad()
    buffer: Tensor | None = getattr(weight, "main_grad", None)
    dtypes = dict.fromkeys((torch.float32, weight.dtype))
    accepted = " or ".join(map(str, dtypes))
    if buffer is None:
        found = "main_grad is None" if hasattr(weight, "main_grad") else "there is no main_grad"
        raise RuntimeError(
            f"accumulate_into_main_grad=True writes the gradient of {name!r} into {name}.main_grad, but {found}. "
            f"Set it before backward to a {accepted} tensor of shape {list(weight.shape)}."
        )
    if buffer.dtype in dtypes and buffer.device == weight.device:
        if buffer.dim() == 1 and buffer.numel() == weight.numel() and buffer.is_contiguous():
            return buffer.view(weight.shape)
        if buffer.shape == weight.shape and _is_dense(buffer):
            return buffer
    raise ValueError(
        f"{name}.main_grad has shape {list(buffer.shape)}, strides {list(buffer.stride())}, {buffer.dtype}, on "
        f"{buffer.device}. Needed for {name!r}: {accepted}, on {weight.device}, contiguous, of shape "
        f"{list(weight.shape)} or flat with {weight.numel()} elements; the groups of stacked weights may lie apart, "
        "each contiguous."
    )


def _is_dense(buffer: Tensor) -> bool:
    if buffer.dim() < 3 or buffer.is_contiguous():
        return buffer.is_contiguous()
    return buffer[0].is_contiguous() and buffer.stride(0) >= buffer[0].numel()


def _as_one(targets: Sequence[_Target], num_groups: int) -> _Target | None:
    """The targets of all groups as one of shape [G, N, K], if they lie evenly in one memory and do the same."""
    if len(targets) != num_groups:
        return None
    places = {(t.buffer.untyped_storage()._cdata, t.buffer.dtype, t.accumulate) for t in targets}
    size = targets[0].buffer.numel()
    offsets = [int(t.buffer.storage_offset()) for t in targets]
    steps = {after - before for before, after in pairwise(offsets)} or {size}
    step = min(steps)
    if len(places) > 1 or len(steps) > 1 or abs(step) < size:
        return None
    lowest = min(targets, key=lambda t: t.buffer.storage_offset()).buffer
    whole = lowest.as_strided((num_groups, *lowest.shape), (abs(step), *lowest.stride()))
    return _Target(whole, targets[0].accumulate, reverse=step < 0)


def placeholder(weight: Any) -> Tensor:
    """What autograd gets for a weight that has `grad_added_to_main_grad`.

    New memory: autograd takes it as `.grad` without a copy, and the owner's hook drops it.
    """
    return torch.zeros_like(weight) if _placeholder_kind(weight) == "zeros" else torch.empty_like(weight)


def _placeholder_kind(weight: Any) -> str:
    if not hasattr(weight, "grad_added_to_main_grad"):
        return "none"
    looked_at = torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled()
    needs_values = looked_at or getattr(weight, "zero_out_wgrad", False) or _has_main_grad_as_grad(weight)
    return "zeros" if needs_values else "empty"


def _has_main_grad_as_grad(weight: Any) -> bool:
    """Whether `.grad` lies in the memory of main_grad, so that what autograd adds to the one is added to the other."""
    main_grad = getattr(weight, "main_grad", None)
    return main_grad is not None and weight.grad is not None and memory_of(weight.grad) == memory_of(main_grad)


def _add_to_grad(weight: Tensor, dw: Tensor, copy: bool) -> None:
    """copy: dw is memory of a graph, which the next replay overwrites."""
    if weight.grad is None:
        weight.grad = dw.to(weight.grad_dtype or weight.dtype, copy=copy)
    else:
        weight.grad += dw
