"""constant_weights: a scope in which the caller says that weights do not change, so that they are quantized once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, MutableMapping
from functools import partial
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ops.products.held_weights import Copies, Quantize
from ops.products.weights import GivenCopies, QuantizedWeights, dequantized, is_capturing, saves_by_hooks
from ops.runner.context import state_of
from ops.runner.operation import BasicOperation
from recipes.stack import are_replayed, open_entries
from recipes.tensors.quantizer import Quantizer

T = TypeVar("T")


class constant_weights:
    """Within `with constant_weights(model):` each weight of its operations is quantized once, and the copies serve all
    passes: the microbatches of a step, or an evaluation. (TransformerEngine's `is_first_microbatch`.)

        for batch in batches:
            with constant_weights(model):
                for x in batch:
                    with autocast(recipe):
                        loss = model(x).sum()
                    loss.backward()
            optimizer.step()

    Without it weights are quantized in each forward, whose own backward uses the same copies. Under delayed scaling the
    scale of a weight stays, within the scope, that of the first cast, until it is cast under another recipe or in
    inference mode; and `fuser.checkpoint` casts it again, with the scale of the first run.

    The scope is over, as if it was left, when any optimizer of torch steps, a state dict is loaded into the operation,
    or a graphed step is replayed. Parameters that are replaced, have other data assigned, or were changed in a way that
    torch counts are quantized anew. Other writes (`param.data.copy_`, kernels of others, replays of CUDA graphs of the
    caller's) cannot be seen: do not make them inside.

    modules: operations, Sequentials, or any modules that contain some
    debug:   at each use compare the weights with those that were quantized, on the host, and raise RuntimeError if
             a bit has changed; it holds a copy of them

    While a CUDA graph is captured, weights are quantized at each of its replays: there `autocast(keep_weights=flag)`
    decides. Operations with forward pre-hooks (which may change weights) are left alone. A scope within another one of
    the same operations does nothing. Raises ValueError if the modules contain no operation.
    """

    def __init__(self, *modules: nn.Module, debug: bool = False) -> None:
        inside = dict.fromkeys(module for outer in modules for module in outer.modules())
        self._operations = [module for module in inside if isinstance(module, BasicOperation)]
        if not self._operations:
            names = ", ".join(type(module).__name__ for module in modules) or "nothing"
            raise ValueError(f"constant_weights got {names}, which contains no operation. Give the model.")
        self._debug = debug
        self._kept: MutableMapping[BasicOperation, QuantizedWeights] = {}
        self._values: dict[BasicOperation, list[Tensor]] = {}

    def __enter__(self) -> None:
        _end_with_optimizers()
        # Operations refer to their scope weakly: one that an exception kept from being left ends with this object.
        for operation in self._operations:
            if operation.weights_scope is None:
                operation.set_weights_scope(self)
        _open[self] = None

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        self.end()

    def end(self) -> None:
        """Give up all copies: from now on weights are quantized in each forward again."""
        for operation in self._operations:
            if operation.weights_scope is self:
                operation.set_weights_scope(None)
        self._kept.clear()
        self._values.clear()
        _open.pop(self, None)

    @property
    def nbytes(self) -> int:
        """Bytes of all copies that are kept now."""
        return sum(kept.nbytes for kept in self._kept.values())

    def forget(self, operation: BasicOperation) -> None:
        """Quantize this operation's weights anew at their next use."""
        self._kept.pop(operation, None)
        self._values.pop(operation, None)

    def copies(
        self,
        operation: BasicOperation,
        parameters: Mapping[str, Tensor],
        key: Any,
        quantizer: Quantizer,
        quantize: Quantize,
        rowwise: bool,
        columnwise: bool,
        values_in: torch.dtype | None = None,
    ) -> Copies:
        """The operation's weights, by their names, quantized by the first call.

        key: what `quantize` depends on besides their values
        values_in: with values in this dtype in place of codes. Under scales that move codes are kept too, so that
                   whoever needs them later gets those of the first cast
        """
        if quantizer.keeps_state and are_replayed(open_entries()):
            # with the scales of the first run, of which the copies here may not be
            if values_in is not None:
                return dequantized(quantize, values_in, rowwise, columnwise)
            return quantize(rowwise, columnwise)
        # What inference mode makes cannot be saved for a backward.
        key = (key, tuple(map(state_of, parameters.values())), torch.is_inference_mode_enabled())
        if not quantizer.keeps_state:
            key = (key, values_in)
            quantize = quantize if values_in is None else partial(dequantized, quantize, values_in)
        kept = self._last(operation)
        # An evaluation recorded no amax: the first training pass casts again, with the same scale, which does.
        updates = getattr(quantizer, "updates", None) if quantizer.keeps_state else None
        if kept is None or not kept.serves(parameters, key) or (updates is not None and kept.updates is None):
            snapshot = quantizer.snapshot(next(iter(parameters.values())).device)
            kept = self._kept[operation] = QuantizedWeights(parameters, key, snapshot, updates)
            if self._debug:
                self._values[operation] = [p.detach().clone() for p in parameters.values()]
        else:
            if self._debug:
                self._check(operation, parameters.values())
            quantizer.note_cast_with(kept.snapshot)
        if not quantizer.keeps_state:
            return kept.copies(rowwise, columnwise, quantize)
        codes = kept.copies(True, True, quantize)  # a copy that is added later would have other scales
        return codes if values_in is None else kept.values(rowwise, columnwise, values_in)

    def prepared(self, operation: BasicOperation, use: Any, make: Callable[[], Any]) -> Any:
        """make(), which asks `copies` what a forward multiplies with; where nothing that these depend on has changed
        since it was asked last, what it gave then. For what may be repeated: within no `fuser.checkpoint`, which would
        note the scales.

        use: what else `make` depends on, to be compared
        """
        given = self.given(operation, use)
        if given is not None:
            return given.copies
        copies = make()
        kept = self._last(operation)
        if kept is not None:
            asked = self._asked(kept, operation, use)
            kept.given = None if asked is None else GivenCopies.of(asked, copies)
        return copies

    def given(self, operation: BasicOperation, use: Any) -> GivenCopies | None:
        """What `prepared` gave for this use, if nothing that it depends on has changed since; else None."""
        kept = self._last(operation)
        if kept is None or kept.given is None or kept.given.asked != self._asked(kept, operation, use):
            return None
        return kept.given

    def _last(self, operation: BasicOperation) -> QuantizedWeights | None:
        """What was kept last. None, too, where its step broke off, and its amaxes were dropped: it is cast again, with
        the same scale."""
        kept = self._kept.get(operation)
        return None if kept is None or (kept.updates is not None and kept.updates.broke_off) else kept

    def _asked(self, kept: QuantizedWeights, operation: BasicOperation, use: Any) -> Any:
        """What copies for a forward depend on; None if they are compared, or made anew, at each use."""
        held = kept.held_by(operation)
        if held is None or self._debug or is_capturing(held[0].device) or operation._forward_pre_hooks:
            return None
        return use, saves_by_hooks(), torch.is_inference_mode_enabled(), *map(state_of, held)

    def _check(self, operation: BasicOperation, parameters: Iterable[Tensor]) -> None:
        for now, before in zip(parameters, self._values[operation], strict=True):
            if not torch.equal(_bits(now), _bits(before)):
                raise RuntimeError(
                    f"A weight of {type(operation).__name__}, of shape {list(now.shape)}, was changed inside of "
                    "constant_weights, and its quantized copy is of before. Leave the scope before weights change."
                )


class FrozenWeights(constant_weights):
    """The copies of the weights of one operation, for as long as it says that these stand still.

    It is never left: an optimizer's step changes other parameters, or else the operation gives it up. `end()` gives up
    the copies, and the next use makes them anew. Under delayed scaling weights are quantized in each forward: a first
    scale must not stay. It does not keep the operation, which holds it, alive.
    """

    _kept: WeakKeyDictionary[BasicOperation, QuantizedWeights]

    def __init__(self) -> None:
        self._operations = []
        self._debug = False
        self._kept = WeakKeyDictionary()
        self._values = {}
        _end_with_optimizers()
        _of_frozen[self] = None

    def note_step(self) -> None:
        """An optimizer has stepped: its weights too, if they require grad, or have one, since the last forward."""
        for operation in _keys_now(self._kept):
            operation.note_unseen_use()

    def end(self) -> None:
        self._kept.clear()
        self._values.clear()

    def copies(
        self,
        operation: BasicOperation,
        parameters: Mapping[str, Tensor],
        key: Any,
        quantizer: Quantizer,
        quantize: Quantize,
        rowwise: bool,
        columnwise: bool,
        values_in: torch.dtype | None = None,
    ) -> Copies:
        if quantizer.keeps_state:
            return quantize(rowwise, columnwise)
        return super().copies(operation, parameters, key, quantizer, quantize, rowwise, columnwise, values_in)


_open: WeakKeyDictionary[constant_weights, None] = WeakKeyDictionary()  # a WeakSet has no `keyrefs`
_of_frozen: WeakKeyDictionary[FrozenWeights, None] = WeakKeyDictionary()
_hook: list[Any] = []


def end_constant_weights(*_: Any) -> None:
    """End all scopes that are open, and those of weights that are trained by now: weights have changed."""
    for scope in _keys_now(_open):
        scope.end()
    for frozen in _keys_now(_of_frozen):
        frozen.note_step()


def _keys_now(held: WeakKeyDictionary[T, Any]) -> list[T]:
    """Its keys. Another thread may add one meanwhile, which ends an iteration over it with an error."""
    return [key for reference in held.keyrefs() if (key := reference()) is not None]


def _end_with_optimizers() -> None:
    if not _hook:
        _hook.append(register_optimizer_step_post_hook(end_constant_weights))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(torch.uint8)
