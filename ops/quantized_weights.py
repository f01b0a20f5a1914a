"""Quantized copies of an operation's weights, kept as long as the weights stay as they are.

So microbatches and both passes quantize a weight once. What is kept is known by the parameter itself, its version and
storage, and the quantizer with the state it casts by, so keeping changes no bit. A write through `parameter.data`
changes neither version nor storage: call `forget_quantized_weights()` on the operation after one. FSDP2 gathers weights
without a new version, but sets the parameter each time, which drops what is kept (`ops.main_grad`). Nothing is kept of
weights of an operation with forward hooks, of inference tensors (which have no version), and while a CUDA graph is
captured, or that rehearsed: there a flag on the device decides at each replay (`keep_weights` of `autocast`).

Where both copies would hold the same values (blocks that are square, products of values), the rowwise one is made alone
and stands for both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ops.context import OperationContext, held_parameter, state_of
from recipes.cast_counts import is_counting
from recipes.effects import recording
from recipes.quantized_tensor import QuantizedTensor
from recipes.quantizer import Quantizer
from recipes.recipe import Role
from recipes.stack import keep_weights_flag

# Makes the copies that are asked for: rowwise, columnwise -> a quantized tensor, or one for each group.
Quantize = Callable[[bool, bool], Any]


class QuantizedWeights:
    """The copies of one operation, for the last quantizer that asked. kept: what a fresh copy becomes before that."""

    def __init__(
        self, parameters: Sequence[Tensor], key: Any, kept: Callable[[Any], Any] = lambda fresh: fresh
    ) -> None:
        self._parameters = [weakref.ref(parameter) for parameter in parameters]
        self._key = key
        self._kept = kept
        self._copies: Any = None

    def serves(self, parameters: Sequence[Tensor], key: Any) -> bool:
        """Whether these are the copies of just these weights."""
        same = len(parameters) == len(self._parameters) and self._key == key
        return same and all(ref() is p for ref, p in zip(self._parameters, parameters, strict=True))

    def copies(self, rowwise: bool, columnwise: bool, quantize: Quantize) -> Any:
        """With at least the copies asked for; what is missing is cast now, from the high-precision weights."""
        if self._copies is None:
            self._copies = self._kept(quantize(rowwise, columnwise))
            return self._copies
        first = _first(self._copies)
        missing = rowwise and first.rowwise is None, columnwise and first.columnwise is None
        if any(missing):
            self._copies = _merged(self._copies, self._kept(quantize(*missing)))
        return self._copies


def _merged(old: Any, new: Any) -> Any:
    if not isinstance(old, QuantizedTensor):
        return [_merged(*pair) for pair in zip(old, new, strict=True)]
    return replace(old, rowwise=old.rowwise or new.rowwise, columnwise=old.columnwise or new.columnwise)


def quantized_weights(
    ctx: OperationContext,
    names: Sequence[str],
    quantizer: Quantizer,
    quantize: Quantize,
    *,
    rowwise: bool,
    columnwise: bool,
) -> Any:
    """The copies of the weights of these names that `quantize` makes, kept on the operation where that is safe.

    A backward takes the copies of its own forward, if the quantizer's state may have changed since.
    """
    if quantizer.copies_agree:
        rowwise = columnwise = True
        quantize = partial(one_for_both, quantize)
    if ctx.seen_in_forward is not None and ctx.quantized_weights is not None:
        for name in names:
            ctx.check_unchanged(name)
        return ctx.quantized_weights.copies(rowwise, columnwise, quantize)
    operation = ctx.operation
    parameters = [held_parameter(operation, name) for name in names]
    state = quantizer.state_version(parameters[0].device)
    key = (ctx.recipe.quantizer(Role.WEIGHT), state, ctx.path.name, ctx.dtype, tuple(map(state_of, parameters)))
    flag = keep_weights_flag()
    if flag is not None:
        shared = _shared_by_graphs(operation, parameters, (key[0], ctx.path.name, ctx.dtype))
        if _casts_at_each_replay(parameters):
            kept = QuantizedWeights(parameters, key, partial(_unless_flagged, shared, flag))
            ctx.quantized_weights = kept
            return kept.copies(rowwise, columnwise, quantize)
    kept = operation._quantized_weights
    if state is None or not _can_be_kept(operation, parameters):
        kept = QuantizedWeights(parameters, key)
    elif kept is None or not kept.serves(parameters, key):
        kept = operation._quantized_weights = QuantizedWeights(parameters, key)
    if quantizer.keeps_state and ctx.needs_grad:
        ctx.quantized_weights = kept
    copies = kept.copies(rowwise, columnwise, quantize)
    if flag is not None:
        shared.copies(rowwise, columnwise, partial(_cloned, copies))
    return copies


def one_for_both(quantize: Quantize, rowwise: bool, columnwise: bool) -> Any:
    """Both copies, whichever is asked for: the rowwise one."""
    copies = quantize(True, False)
    if isinstance(copies, QuantizedTensor):
        return replace(copies, columnwise=copies.rowwise)
    return [replace(member, columnwise=member.rowwise) for member in copies]


def _can_be_kept(operation: Any, parameters: Sequence[Tensor]) -> bool:
    unknown = operation._forward_pre_hooks or any(p.is_inference() for p in parameters)
    return not (unknown or is_counting() or _casts_at_each_replay(parameters))


def _casts_at_each_replay(parameters: Sequence[Tensor]) -> bool:
    record = recording()
    return _is_capturing(parameters) or (record is not None and record.rehearses)


def _is_capturing(parameters: Sequence[Tensor]) -> bool:
    return parameters[0].is_cuda and torch.cuda.is_current_stream_capturing()


def _shared_by_graphs(operation: Any, parameters: Sequence[Tensor], key: Any) -> QuantizedWeights:
    """The copies that all graphs of these weights share. Made by runs before the capture: what is allocated within one
    may lie where a replay puts something else first."""
    shared = operation._captured_weights
    if shared is None or not shared.serves(parameters, key):
        shared = operation._captured_weights = QuantizedWeights(parameters, key)
    return shared


def _unless_flagged(shared: QuantizedWeights, flag: Tensor, fresh: Any) -> Any:
    """The shared copies, overwritten by `fresh` where the flag is 0 at replay."""
    asked = _first(fresh)
    copies = shared.copies(asked.rowwise is not None, asked.columnwise is not None, _refuse_to_allocate)
    for old, new in zip(_tensors(copies), _tensors(fresh), strict=True):
        if new is not None:
            old_bytes, new_bytes = (tensor.flatten().view(torch.uint8) for tensor in (old, new))
            old_bytes.copy_(torch.where(flag != 0, old_bytes, new_bytes))
    return copies


def _refuse_to_allocate(rowwise: bool, columnwise: bool) -> Any:
    raise RuntimeError(
        "keep_weights under graph capture: these weights were not cast under it before the capture, so there "
        "is no memory outside of the graph to keep them in. Run the same passes once under the same "
        "`autocast(recipe, keep_weights=flag)` before capturing them."
    )


def _cloned(copies: Any, rowwise: bool, columnwise: bool) -> Any:
    if not isinstance(copies, QuantizedTensor):
        return [_cloned(member, rowwise, columnwise) for member in copies]
    clone = copies.rebuild([None if tensor is None else tensor.clone() for tensor in copies.tensors()])
    return replace(
        clone, rowwise=clone.rowwise if rowwise else None, columnwise=clone.columnwise if columnwise else None
    )


def _first(copies: Any) -> QuantizedTensor:
    return copies if isinstance(copies, QuantizedTensor) else copies[0]


def _tensors(copies: Any) -> list[Any]:
    members = [copies] if isinstance(copies, QuantizedTensor) else copies
    return [tensor for member in members for tensor in member.tensors()]
