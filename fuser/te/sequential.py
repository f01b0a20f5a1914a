"""A Sequential whose extra tensors are counted, as TransformerEngine's are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fuser.layout import Layout
from fuser.sequential import Sequential as NamedSequential
from fuser.te.counted import CountedExtras, check_count
from ops.runner.operation import BasicOperation


class _Slot(NamedTuple):
    """An extra tensor that passes between the caller and an operation, which calls it `local`."""

    operation: BasicOperation
    local: str


class Sequential(NamedSequential):
    """`y = seq(x, *extra_inputs)`, or `y, *extra_outputs = seq(x, *extra_inputs)` where operations make some.

    Extra inputs are counted in the order of the operations, and for each in that of its `extra_inputs`; those that a
    channel feeds are left out (`CountedExtras.set_extra_input_channel`). Extra outputs are all that go to the caller.
    Where the same tensor is given twice, as the split sizes of both layers of an MLP, it is one tensor to the
    operations, and only then are these fused: pass the same object, or integers in the same memory.

    op_kwargs: the caller's buffers, {operation or its index: {"output": tensor, "grad_input": tensor}}

    Given by name, extra tensors pass as in `fuser.Sequential`; what they are called stands in an error for a wrong
    number. Operations of `fuser.ops` are counted too: each name that no earlier operation makes is an extra input, and
    their extra outputs are returned by `outputs` alone. A `te.Sequential` inside of another takes no extra tensors.

    Raises ValueError for a wrong number of extra inputs, a channel that no earlier operation feeds, and an operation in
    op_kwargs that is not here.
    """

    _given: tuple[int, ...] = ()  # of each extra input the first that is the same tensor, at the last call by position

    def forward(  # type: ignore[override]
        self,
        input: Tensor,
        *extra_inputs: Any,
        op_kwargs: Mapping[BasicOperation | int, Mapping[str, Tensor]] | None = None,
        **named: Any,
    ) -> Any:
        if named:
            if extra_inputs or op_kwargs:
                raise TypeError(
                    f"te.Sequential got {', '.join(map(repr, named))} by name beside extra inputs by position or "
                    "op_kwargs. Give all by position, or all by name (buffers=... for op_kwargs)."
                )
            return super().forward(input, **named)
        slots = self._input_slots()
        if len(extra_inputs) != len(slots):
            self.layout()
            check_count(extra_inputs, [slot.operation.extra_name(slot.local) for slot in slots])
        self._given = tuple(
            next(i for i, slot in enumerate(slots) if slot.local == own.local and _is_same(extra_inputs[i], tensor))
            for own, tensor in zip(slots, extra_inputs, strict=True)
        )
        self.layout()
        extras = {s.operation.extra_name(s.local): t for s, t in zip(slots, extra_inputs, strict=True)}
        outputs = [slot.operation.extra_name(slot.local) for slot in self._output_slots()]
        buffers = self._buffers_of(op_kwargs or {})
        result = super().forward(input, outputs=outputs, buffers=buffers or None, **extras)
        return (result[0], *(result[1][name] for name in outputs)) if outputs else result

    def layout(self) -> Layout:
        self._name_extras()
        return super().layout()

    def _input_slots(self) -> list[_Slot]:
        """What the caller gives."""
        produced: set[str] = set()
        slots: dict[Any, _Slot] = {}
        for index, operation in enumerate(self):
            if isinstance(operation, CountedExtras):
                for local, channel in zip(operation.extra_inputs, operation.input_channels(), strict=True):
                    if channel is None:
                        slots[index, local] = _Slot(operation, local)
                    elif channel not in produced:
                        known = ", ".join(map(repr, sorted(produced))) or "none"
                        raise ValueError(
                            f"{type(operation).__name__} at {index} reads the channel {channel!r}, which has no "
                            f"earlier producer. There are: {known}."
                        )
                produced |= {channel for channel, _ in operation.output_channels() if channel is not None}
            elif isinstance(operation, BasicOperation):
                for local in operation.extra_inputs:
                    name = operation.extra_name(local)
                    if name not in produced:
                        slots.setdefault(name, _Slot(operation, local))
                produced |= {operation.extra_name(local) for local in operation.extra_outputs}
        return list(slots.values())

    def _output_slots(self) -> list[_Slot]:
        """What the caller gets."""
        return [
            _Slot(operation, local)
            for operation in self
            if isinstance(operation, CountedExtras)
            for local, (_, to_caller) in zip(operation.extra_outputs, operation.output_channels(), strict=True)
            if to_caller
        ]

    def _name_extras(self) -> None:
        """Give each extra tensor of a counted operation the name of its channel, or one of its own."""
        slots = self._input_slots()
        counted = [isinstance(slot.operation, CountedExtras) for slot in slots]
        names = [slot.operation.extra_name(slot.local) for slot in slots]
        taken = {name for name, is_counted in zip(names, counted, strict=True) if not is_counted}
        first_of = self._given if len(self._given) == len(slots) else _first_of_each(slots)
        for position in (position for position, is_counted in enumerate(counted) if is_counted):
            first = first_of[position]
            names[position] = names[first] if first < position else _new_name(slots[position].local, taken)
        for operation in self:
            if isinstance(operation, CountedExtras):
                own = {s.local: name for s, name in zip(slots, names, strict=True) if s.operation is operation}
                own |= {
                    local: channel
                    for local, channel in zip(operation.extra_inputs, operation.input_channels(), strict=True)
                    if channel is not None
                }
                for local, (channel, _) in zip(operation.extra_outputs, operation.output_channels(), strict=True):
                    own[local] = channel or _new_name(f"{local}_output", taken)
                if any(operation.extra_name(local) != name for local, name in own.items()):
                    operation.rename_extras(**own)

    def _buffers_of(self, op_kwargs: Mapping[BasicOperation | int, Mapping[str, Tensor]]) -> dict[int, Any]:
        """By index. ValueError for an operation that is named twice, by itself and by its index."""
        buffers: dict[int, Any] = {}
        for key, value in op_kwargs.items():
            index = self._index_of(key)
            if index in buffers:
                raise ValueError(f"op_kwargs names operation {index} twice. Give all of its buffers in one entry.")
            buffers[index] = value
        return buffers

    def _index_of(self, key: BasicOperation | int) -> int:
        if isinstance(key, int):
            return key
        for index, module in enumerate(self):
            if module is key:
                return index
        raise ValueError(f"op_kwargs names {key!r}, which is not in this Sequential. Give an operation or its index.")


def _new_name(wanted: str, taken: set[str]) -> str:
    name, count = wanted, 0
    while name in taken:
        count += 1
        name = f"{wanted}_{count}"
    taken.add(name)
    return name


def _is_same(first: Any, second: Any) -> bool:
    """Whether both are one tensor. A checkpoint that recomputes makes two of one; of integers that changes nothing."""
    if first is second:
        return True
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)) or first.is_floating_point():
        return False
    forms = [(t.data_ptr(), t.shape, t.stride(), t.dtype, t.device) for t in (first, second)]
    return forms[0] == forms[1] and first.numel() > 0


def _first_of_each(slots: list[_Slot]) -> tuple[int, ...]:
    """Before the first call: which of them are probably the same tensor."""
    same = [
        slot.local if isinstance(slot.operation, CountedExtras) and slot.operation.shares_tensor else position
        for position, slot in enumerate(slots)
    ]
    return tuple(map(same.index, same))
