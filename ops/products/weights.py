"""Quantized copies of an operation's weights: when they are made, and how long they serve.

A version counter does not see every write into a weight (torch's fused optimizers, `param.data.copy_`, collectives on
`.data`, kernels of others, CUDA graphs). So copies serve from a forward to its own backward, as weights themselves do,
and longer only inside `constant_weights`, or in CUDA graphs under the flag of `autocast(keep_weights=flag)`. Weights
that are computed from others (`ops.runner.parameters`) are quantized in each forward there too.

What backward reads, the columnwise copy, travels with what forward saves. Not so where weights are exchanged (FSDP2
gathers them for each pass) or hooks run before forward: there backward quantizes the gathered weights again, so that no
copy of the whole weights outlives a pass; but under scales that move, the copies are kept there too.

Copies whose codes no product multiplies (MXFP8, NVFP4; all where FP8 is emulated) are kept in `constant_weights` as
their exact values, so that they are dequantized once, too; those of delayed scaling beside their codes, of which a
later cast would have other scales. With keep_weight_values=False, and in activation checkpoints, codes are kept.

Where neither applies, a copy that serves one product and is not kept for backward is made as values at once, where the
cast can write these (MXFP8).

Weights that are held quantized (`ops.products.held_weights`) are their own copies, and nothing of them is kept.

Where both copies would hold the same values (blocks that are square, products of values), the rowwise one is made alone
and stands for both.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ops.products.held_weights import Copies, Quantize, held_codes
from ops.products.paths import SplitTensors
from ops.products.product import for_wgrad, gemm_dtype, with_missing
from ops.runner.context import OperationContext
from ops.runner.parameters import held_parameter
from recipes.cast_counts import is_counting
from recipes.effects import recording
from recipes.native_products import why_not_float8
from recipes.pending import PendingUpdates
from recipes.recipe import Role
from recipes.stack import keep_weights_flag
from recipes.tensors.quantized_tensor import QuantizedTensor
from recipes.tensors.quantizer import Quantizer
from recipes.tensors.scaled_codes import Dequantized
from recipes.triton.replay import how


class ForBackward(NamedTuple):
    """What of the copies backward multiplies with."""

    copies: QuantizedTensor | SplitTensors


class GivenCopies(NamedTuple):
    """What `constant_weights.prepared` gave a forward.

    asked: what the copies depend on, to be compared; lie: how their tensors do, each once, at these addresses
    """

    asked: Any
    copies: QuantizedTensor | None
    lie: tuple[Any, ...]
    tensors: list[Tensor]
    addresses: list[int]

    @classmethod
    def of(cls, asked: Any, copies: QuantizedTensor | None) -> GivenCopies:
        tensors: list[Tensor] = []
        addresses: list[int] = []
        lie = how(() if copies is None else copies.tensors(), tensors, addresses)
        return cls(asked, copies, lie, tensors, addresses)


class QuantizedWeights:
    """The copies of one operation, for the last quantizer that it used.

    parameters: the weights by their names
    snapshot: of the quantizer's state that they were cast with
    updates: of the step in which the cast recorded amaxes; None: it recorded none
    given: what `constant_weights.prepared` gave last; None if it gave nothing yet
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        key: Any,
        snapshot: Tensor | None = None,
        updates: PendingUpdates | None = None,
    ) -> None:
        self._parameters = {name: weakref.ref(parameter) for name, parameter in parameters.items()}
        self._key = key
        self.snapshot = snapshot
        self.updates = updates
        self.given: GivenCopies | None = None
        self._copies: Copies | None = None
        self._values: QuantizedWeights | None = None

    def serves(self, parameters: Mapping[str, Tensor], key: Any) -> bool:
        """Whether these are the copies of just these weights."""
        same = parameters.keys() == self._parameters.keys() and self._key == key
        return same and all(self._parameters[name]() is parameter for name, parameter in parameters.items())

    def held_by(self, operation: Any) -> list[Tensor] | None:
        """The weights, if they are those that the operation holds now; else None."""
        held = []
        for name, reference in self._parameters.items():
            parameter = held_parameter(operation, name)
            if reference() is not parameter:
                return None
            held.append(parameter)
        return held

    @property
    def nbytes(self) -> int:
        """Bytes of the copies."""
        tensors = [] if self._copies is None else _tensors(self._copies)
        of_copies = sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors if tensor is not None}.values())
        return of_copies + (0 if self._values is None else self._values.nbytes)

    def copies(self, rowwise: bool, columnwise: bool, quantize: Quantize) -> Copies:
        """With at least the requested copies; what is missing is cast now, from the high-precision weights."""
        if self._copies is None:
            self._copies = quantize(rowwise, columnwise)
            return self._copies
        first = _members(self._copies)[0]
        missing = rowwise and first.rowwise is None, columnwise and first.columnwise is None
        if any(missing):
            self._copies = _each(with_missing, self._copies, quantize(*missing))
        return self._copies

    def values(self, rowwise: bool, columnwise: bool, dtype: torch.dtype) -> Copies:
        """Those of the copies that are requested with their values in `dtype`, made once, in place of their codes."""
        assert self._copies is not None, "there are codes, of which they are the values"
        if self._values is None:
            self._values = QuantizedWeights({}, None)
        return self._values.copies(rowwise, columnwise, partial(dequantized, partial(_picked, self._copies), dtype))


def quantized_weights(
    ctx: OperationContext,
    names: Sequence[str],
    quantizer: Quantizer,
    quantize: Quantize,
    *,
    rowwise: bool,
    columnwise: bool,
    once: Quantize | None = None,
) -> Copies:
    """The copies of the weights of these names that `quantize` makes; in backward those of its own forward.

    Of weights that are held quantized so, their codes. once: makes copies for one product, of which a columnwise one
    beside the rowwise one is kept.
    """
    held = held_codes(ctx, names, quantizer)
    if held is not None and (ctx.operation.weights_scope is None or keep_weights_flag() is not None):
        return held(rowwise, columnwise)  # backward reads them from the parameters again
    quantize, once = held or quantize, None if held is not None or quantizer.copies_agree else once
    if quantizer.copies_agree:
        rowwise = columnwise = True
        quantize = partial(one_for_both, quantize)
    if ctx.seen_in_forward is not None:
        saved: ForBackward | None = ctx.quantized_weights
        if saved is None:
            return (once or quantize)(rowwise, columnwise)
        for name in names:
            ctx.check_unchanged(name)
        return saved.copies.members if isinstance(saved.copies, SplitTensors) else saved.copies
    operation, copies = ctx.operation, ctx.prepared_weights
    gathered = operation.exchanges_parameters or operation._forward_pre_hooks
    kept = ctx.needs_grad and ctx.needs.input and (quantizer.keeps_state or not gathered)
    if copies is None:
        copies = _in_forward(ctx, names, quantizer, quantize, once or quantize, rowwise, columnwise, kept)
    if kept:
        ctx.quantized_weights = ForBackward(_for_backward(copies))
    return copies


def _in_forward(
    ctx: OperationContext,
    names: Sequence[str],
    quantizer: Quantizer,
    quantize: Quantize,
    once: Quantize,
    rowwise: bool,
    columnwise: bool,
    kept: bool,
) -> Copies:
    """kept: for backward, of which the columnwise copy is."""
    operation = ctx.operation
    flag, scope = keep_weights_flag(), operation.weights_scope
    # What is computed anew for each forward has no copies that outlive it.
    if (flag is None and scope is None) or any(name in ctx.computed for name in names):
        return once(rowwise, columnwise and (kept or not rowwise))
    parameters = {name: ctx.held(name) for name in names}
    device = parameters[names[0]].device
    key = (ctx.recipe.quantizer(Role.WEIGHT), ctx.path.name, ctx.dtype)
    replayed = _casts_at_each_replay(device)
    if flag is not None:
        shared = _shared_by_graphs(operation, parameters, key)
        if replayed:
            return _unless_flagged(shared, flag, quantize(rowwise, columnwise))
    if scope is None or replayed or is_counting() or operation._forward_pre_hooks:
        copies = quantize(rowwise, columnwise)
    else:
        multiplies_codes = quantizer.float8_scaling(False) is not None and why_not_float8(ctx.path.capability) is None
        keeps_values = ctx.recipe.keeps_weight_values and not multiplies_codes
        # What a checkpoint computes again, after the scope too, must save tensors of the same kind.
        keeps_values = keeps_values and not saves_by_hooks()
        values_in = gemm_dtype(ctx.dtype, device) if keeps_values else None
        copies = scope.copies(operation, parameters, key, quantizer, quantize, rowwise, columnwise, values_in)
    if flag is not None:
        shared.copies(rowwise, columnwise, partial(_cloned, copies))
    return copies


def one_for_both(quantize: Quantize, rowwise: bool, columnwise: bool) -> Copies:
    """Both copies, whichever is requested: the rowwise one."""
    return _each(lambda copies: replace(copies, columnwise=copies.rowwise), quantize(True, False))


def dequantized(quantize: Quantize, dtype: torch.dtype, rowwise: bool, columnwise: bool) -> Copies:
    """The copies with their values in place of their codes, which no product takes."""
    return _each(lambda copies: _with_values(copies, dtype), quantize(rowwise, columnwise))


def _with_values(copies: QuantizedTensor, dtype: torch.dtype) -> QuantizedTensor:
    of_rows = copies.rowwise and Dequantized.of(copies.rowwise, dtype)
    if copies.columnwise is copies.rowwise:
        return replace(copies, rowwise=of_rows, columnwise=of_rows)
    return replace(copies, rowwise=of_rows, columnwise=copies.columnwise and Dequantized.of(copies.columnwise, dtype))


def _for_backward(copies: Copies) -> QuantizedTensor | SplitTensors:
    if isinstance(copies, QuantizedTensor):
        return for_wgrad(copies)
    return SplitTensors(tuple(for_wgrad(member) for member in copies), (), 0)


def saves_by_hooks() -> bool:
    """Whether hooks take what is saved for backward, as activation checkpoints do."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _casts_at_each_replay(device: torch.device) -> bool:
    record = recording()
    return is_capturing(device) or (record is not None and record.rehearses)


def is_capturing(device: torch.device) -> bool:
    """Whether a CUDA graph is captured there."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _shared_by_graphs(operation: Any, parameters: Mapping[str, Tensor], key: Any) -> QuantizedWeights:
    """The copies that all graphs of these weights share. Made by runs before the capture: what is allocated within one
    may lie where a replay puts something else first."""
    shared = operation._captured_weights
    if shared is None or not shared.serves(parameters, key):
        shared = operation._captured_weights = QuantizedWeights(parameters, key)
    return shared


def _unless_flagged(shared: QuantizedWeights, flag: Tensor, fresh: Copies) -> Copies:
    """The shared copies, overwritten by `fresh` where the flag is 0 at replay."""
    asked = _members(fresh)[0]
    copies = shared.copies(asked.rowwise is not None, asked.columnwise is not None, _refuse_to_allocate)
    for old, new in zip(_tensors(copies), _tensors(fresh), strict=True):
        if old is not None and new is not None:
            # Behind autograd's back: backwards of other graphs saved them, and find what they would have saved.
            old_bytes, new_bytes = (tensor.data.flatten().view(torch.uint8) for tensor in (old, new))
            old_bytes.copy_(torch.where(flag != 0, old_bytes, new_bytes))
    return copies


def _refuse_to_allocate(rowwise: bool, columnwise: bool) -> Copies:
    raise RuntimeError(
        "keep_weights under graph capture: these weights were not cast under it before the capture, so there "
        "is no memory outside of the graph to keep them in. Run the same passes once under the same "
        "`autocast(recipe, keep_weights=flag)` before capturing them."
    )


def _picked(copies: Copies, rowwise: bool, columnwise: bool) -> Copies:
    def picked(member: QuantizedTensor) -> QuantizedTensor:
        return replace(
            member, rowwise=member.rowwise if rowwise else None, columnwise=member.columnwise if columnwise else None
        )

    return _each(picked, copies)


def _cloned(copies: Copies, rowwise: bool, columnwise: bool) -> Copies:
    def cloned(member: QuantizedTensor) -> QuantizedTensor:
        return member.rebuild([None if tensor is None else tensor.clone() for tensor in member.tensors()])

    return _each(cloned, _picked(copies, rowwise, columnwise))


def _each(function: Callable[..., QuantizedTensor], *copies: Copies) -> Copies:
    """What the function makes of each member."""
    made = [function(*members) for members in zip(*map(_members, copies), strict=True)]
    return made[0] if isinstance(copies[0], QuantizedTensor) else made


def _members(copies: Copies) -> Sequence[QuantizedTensor]:
    return [copies] if isinstance(copies, QuantizedTensor) else copies


def _tensors(copies: Copies) -> list[Tensor | None]:
    return [tensor for member in _members(copies) for tensor in member.tensors()]
