"""The backward of a call that was made again (`ops.runner.known_calls`), by one look-up.

What `ops.runner.backward` finds follows from the forward, which knows the program and what is left of it, and from

    the operations   training or not
    what goes in     parameters, states, dy, what forward kept, and main_grads: how each lies

This is for one step that is repeated, of settings and parameters that are those of forward, unchanged, and for a
backward that frees its graph. Gradients that are left for later, and all that has to be refused, run in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor
from torch.autograd import forward_ad, profiler
from torch.nn import Parameter

from ops.runner.backward import (
    OperationBackward,
    Record,
    X,
    apart,
    context_of,
    for_autograd,
    may_repeat_step,
    raise_located,
)
from ops.runner.context import OperationContext, state_of
from ops.runner.input import is_stored
from ops.runner.nested_backward import retains_graph, unreached
from ops.runner.program import Program
from ops.runner.repeat import at_places
from recipes.amax_reduction import may_reduce
from recipes.cast_counts import is_counting
from recipes.effects import recording
from recipes.pending import PendingUpdates
from recipes.triton.layouts import Layouts
from recipes.triton.repeated import Repeated
from recipes.triton.replay import how, stream_for, times_forgotten
from recipes.triton.tape import taping

_is_inference: Any = Tensor.is_inference

MOST_BACKWARDS = 16  # of one call that is known: which gradients are wanted, and how dy lies


def is_ordinary() -> bool:
    """Whether nothing traces, transforms, records, counts or profiles what runs."""
    return not (
        taping.inside
        or torch._C._len_torch_dispatch_stack()
        or torch._C._len_torch_function_stack()
        or torch._C._are_functorch_transforms_active()
        or torch._C._get_tracing_state() is not None
        or forward_ad._current_level >= 0
        or profiler._is_profiler_enabled
        or is_counting()
        or recording() is not None
    )


class _Given(NamedTuple):
    """What goes into a backward besides dy and what forward kept.

    key: what it is found by, but for how the tensors lie; held: the parameters and states; at_once: of its updates
    into, written: where weight gradients are added to main_grad, and the tensors of these; contexts: of `external`
    """

    key: list[Any]
    held: list[Any]
    at_once: bool
    unwanted: frozenset[int] = frozenset()
    contexts: Mapping[int, OperationContext] = {}
    into: tuple[Any, ...] = ()
    written: Sequence[Any] = ()


class _KnownStep:
    """What an earlier backward has found.

    key: that of what was given; layouts: of all tensors, each once
    apart: whether all gradients lie in memory of their own that it makes
    order: where each of the gradients stands among what is repeated gives; None if one is computed from that
    """

    __slots__ = ("apart", "key", "layouts", "order", "repeated")

    def __init__(self, repeated: Repeated, key: Sequence[Any], layouts: Layouts) -> None:
        self.repeated, self.key, self.layouts = repeated, key, layouts
        self.apart = False
        self.order: list[int | None] | None = None

    def inputs(self, given: _Given, dy: Tensor, saved: Sequence[Any]) -> tuple[list[Any], list[int]] | None:
        """The tensors that go in, each once, and their addresses, if they lie as those did. None, too, where another
        one than those that forward kept is given twice, or was."""
        if self.key != given.key:
            return None
        tensors = [*given.held, dy, *saved, *given.written]
        addresses = self.layouts.addresses(tensors)
        return None if addresses is None else (tensors, addresses)


class KnownBackward:
    """The backwards of one `KnownCall`, by all that decides them.

    How parameters lie follows from the forward if they are unchanged, but for where.
    """

    def __init__(self, program: Program, operations: Sequence[Any]) -> None:
        wiring = program.backward[0]
        self.step = wiring.repeated
        self.is_one_step = (
            len(program.backward) == 1
            and wiring.needs_grad
            and wiring.repeated is not None
            and wiring.repeated.alone
            and not wiring.repeated.reads_tf32
            and not wiring.reuses_gradients
            and wiring.lends_grad_input is None
            and not any(operation.wgrad_is_external and operation.delay_wgrad_compute for operation in operations)
        )
        # The positions of operations that add to main_grad themselves.
        self.external = [index for index, operation in enumerate(operations) if operation.wgrad_is_external]
        self.kept: dict[Any, _KnownStep] = {}
        self.last: _KnownStep | None = None  # of these

    def run(self, fctx: Any, dy: Tensor | None) -> list[Tensor | None] | None:
        """The gradients, as `run_backward` gives them; None: it has to run in full, and nothing has changed."""
        kind = type(dy)
        if dy is None or (kind is not Tensor and kind is not Parameter) or not self.is_one_step or fctx.has_run:
            return None
        if not is_ordinary() or is_legacy_batchedtensor(dy) or retains_graph() or torch.is_grad_enabled():
            return None
        if torch.is_autocast_enabled("cuda"):
            return None
        record: Record = fctx.record
        given = self._given(record, fctx)
        if given is None:
            return None
        program, operations, contexts = record.program, record.operations, given.contexts
        saved = fctx.saved_tensors
        known = self.last
        inputs = None if known is None else known.inputs(given, dy, saved)
        if known is None or inputs is None:
            inputs = [], []
            known = self._looked_up(record, given, dy, saved, fctx.places, *inputs)
            if known is None:
                return None
            self.last = known
        stream = stream_for(known.repeated)
        if stream is None:
            return None
        del saved
        fctx.maybe_clear_saved_tensors()
        fctx.has_run = True
        if record.first_forward is not None:
            record.first_forward.has_run = True
        updates = None
        if program.keeps_state:
            group = record.entries[0].updates.group if record.entries else None
            updates = PendingUpdates(group, at_once=given.at_once)
        try:
            gradients = self._again(known, record, *inputs, stream, updates)
        except BaseException:
            if updates is not None:
                updates.discard()
            raise
        for index, context in contexts.items():
            operations[index].mark_written(context)
        if updates is not None:
            updates.apply(fctx.recorded)
        return gradients

    def _given(self, record: Record, fctx: Any) -> _Given | None:
        """None: something has changed since forward, or is missing."""
        operations, parameters = record.operations, record.parameters
        at_once = record.program.keeps_state and not may_reduce()
        key: list[Any] = [times_forgotten(), at_once]
        held: list[Any] = []
        slot = 0
        for operation, seen in zip(operations, fctx.settings, strict=True):
            if operation.settings != seen.assigned:
                return None
            for parameter in operation._parameters.values():
                if parameter is None:
                    continue
                if slot == len(parameters) or parameter is not parameters[slot]:
                    return None
                if state_of(parameter) != record.parameter_states[slot]:
                    return None
                slot += 1
                held.append(parameter)  # its address is read anew: FSDP2 may have gathered it into other memory
            key.append(operation.training)
            if operation._buffers:
                key += operation._buffers
                held += operation._buffers.values()
        if slot < len(parameters):
            return None
        if not self.external:
            return _Given(key, held, at_once)
        unwanted = unreached(fctx.next_functions[: 1 + len(parameters)], first=X)
        step = OperationBackward(record, record.program.backward[0], [], None, {}, frozenset(), unwanted, None)
        contexts = {index: context_of(step, index, None) for index in self.external}
        written: list[Any] = []
        try:
            into = tuple([operations[index].destinations(context) for index, context in contexts.items()])
            key += unwanted, how(into, written, [])
        except Exception:  # in full it says what is missing, and where
            return None
        return _Given(key, held, at_once, unwanted, contexts, into, written)

    def _looked_up(
        self, record: Record, given: _Given, dy: Tensor, saved: Sequence[Tensor], places: Sequence[int | None],
        tensors: list[Any], addresses: list[int],
    ) -> _KnownStep | None:  # fmt: skip
        """What an earlier backward has found, or one that ran in full. The tensors are appended, each once, and their
        addresses."""
        if not is_stored(dy):
            return None
        try:
            lie = how((*given.held, dy, *saved, *given.into), tensors, addresses)
        except (TypeError, RuntimeError):  # one is not plain, sparse, or nested
            return None
        key = *given.key, lie, *map(_is_inference, tensors)
        known = self.kept.get(key)
        if known is None:
            repeated = self._found(record, dy, at_places(saved, places), given, tensors)
            if repeated is None:
                return None
            known = _KnownStep(repeated, given.key, Layouts(tensors, addresses))
            if len(self.kept) >= MOST_BACKWARDS:
                self.kept.clear()
            self.kept[key] = known
        return known

    def _found(
        self, record: Record, dy: Tensor, saved: Sequence[Any], given: _Given, tensors: Sequence[Tensor]
    ) -> Repeated | None:
        """What repeats a backward that ran in full."""
        if not may_repeat_step(record, record.program.backward[0], self.external):
            return None
        names: tuple[Any, ...] = (*record.states, frozenset(), given.unwanted, None)
        updates = PendingUpdates(at_once=given.at_once) if record.program.keeps_state else None
        assert self.step is not None
        return self.step.known(record.operations, names, (dy, tuple(saved), *given.into, None), updates, tensors)

    def _again(
        self,
        known: _KnownStep,
        record: Record,
        tensors: list[Any],
        addresses: list[int],
        stream: int,
        updates: PendingUpdates | None,
    ) -> list[Tensor | None]:
        wiring = record.program.backward[0]
        assert self.step is not None
        try:
            found = self.step.again(known.repeated, record.operations, tensors, addresses, stream, updates)
        except Exception as error:
            raise_located(record.labels, wiring.step.indices[0], wiring.step.of(record.operations), error)
        made = found.dx, *found.of_parameters, *found.of_extras
        if known.order is not None:
            return [None if at is None else made[at] for at in known.order]
        d_parameters: list[Tensor | None] = [None] * len(record.parameters)
        for slot, gradient in zip(found.slots, found.of_parameters, strict=True):
            d_parameters[slot] = gradient
        d_extras: dict[str, list[Tensor]] = {}
        for name, gradient in zip(found.names, found.of_extras, strict=True):
            d_extras.setdefault(name, []).insert(0, gradient)
        dx = found.dx
        if isinstance(dx, Tensor) and dx.dtype != wiring.upstream_dtype:
            dx = dx.to(wiring.upstream_dtype)
        gradients = for_autograd(record, dx, d_parameters, d_extras)
        if known.apart:
            return gradients
        separate = apart(list(gradients), record)
        new = all(gradient is None or gradient.data_ptr() not in addresses for gradient in gradients)
        known.apart = new and all(a is b for a, b in zip(separate, gradients, strict=True))
        if known.apart:
            known.order = _order(gradients, made)
        return separate


def _order(gradients: Sequence[Tensor | None], made: Sequence[Any]) -> list[int | None] | None:
    at = {id(tensor): place for place, tensor in enumerate(made)}
    if any(gradient is not None and id(gradient) not in at for gradient in gradients):
        return None
    return [None if gradient is None else at[id(gradient)] for gradient in gradients]
