"""Warm up and record the events of a schedule in order, on buffers that share memory where the schedule permits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fuser.graph.capture import Recorder, Segment
from fuser.graph.checks import ReplayOrder
from fuser.graph.instance import Buffers, Form, Instance, buffer_bytes, placed
from fuser.graph.state import begin_step, undisturbed
from fuser.schedule.memory import Buffer, LayerMemory, Life, MemoryPlan, Taken, plan_memory
from fuser.schedule.schedule import Event, Pass, Place, Schedule
from ops.products.main_grad import check_accumulation
from recipes.effects import Accumulation
from recipes.tensors.quantized_handle import held_tensors

Hook = Callable[[], object] | None


class Graphs:
    """Everything that one call has captured: segments, buffers, and the order of replays.

    memory: the assignment of buffers to instances; still valid after a reset
    """

    def __init__(
        self,
        schedule: Schedule,
        instances: Mapping[Place, Instance],
        recorder: Recorder,
        *,
        follows: Collection[int],
        shared: bool,
        owned_grads: bool,
        debug: bool,
    ) -> None:
        self.schedule = schedule
        self.instances = instances
        self.events = [event for event in schedule.events if _happens(event, instances[event.instance])]
        self._recorder = recorder
        self._follows = follows
        self._shared = shared
        self._owned_grads = owned_grads
        self._segments: dict[Event, Segment] = {}
        self._accumulations: dict[Event, list[Accumulation]] = {}
        self._arenas: dict[tuple[object, ...], Tensor] = {}
        self._to_poison: dict[Event, list[Tensor]] = {}
        self._dead: list[Tensor] = []
        retain = any(instance.retain for instance in instances.values())
        self._poisons = debug and not retain  # a retained buffer has no last use
        self._order = ReplayOrder(schedule, self.events, retain=retain)
        self.memory: MemoryPlan

    def record(
        self, device: torch.device, warmups: int, before: Hook, after: Hook, report: Callable[[str], object] | None
    ) -> None:
        """Warm up, plan the buffers, record. After an exception everything is freed, and the modules are unchanged.

        report: called with the report of `memory` before anything is recorded
        """
        modules = list(dict.fromkeys(instance.module for instance in self.instances.values()))
        try:
            with undisturbed(modules, device):
                with self._recorder.warming_up():
                    if before is not None:
                        before()
                    # One pass is always needed: it compiles kernels and measures the sizes of all buffers.
                    sizes = self._first_warm_up(modules)
                self._plan(sizes)
                with self._recorder.warming_up():
                    for _ in range(warmups - 2):
                        self._warm_up(modules)
                    pool = None  # not measured in the first pass, which also compiles and tunes kernels
                    if warmups > 1:
                        pool = self._recorder.measure(partial(self._warm_up, modules, rehearses=True))
                    if after is not None:
                        after()
                static = sum(arena.nbytes for arena in self._arenas.values())
                self.memory = replace(self.memory, taken=Taken(static, pool))
                self._recorder.end_warm_up()
                if report is not None:
                    report(self.memory.report())
                begin_step(modules)
                for event in self.events:
                    self._segments[event] = self._record(event)
            for instance in self.instances.values():
                instance.sample.release()
        except BaseException:
            self.free()
            raise

    def replay(self, event: Event, prepare: Callable[[], None]) -> None:
        """Replay the event's segment and perform its side effects. prepare: fills the buffers, after all checks."""
        if not self._segments:
            raise RuntimeError(f"{event} was called, but its graphs were reset. Capture again.")
        self._order.check(event)
        for accumulation in self._accumulations[event]:
            check_accumulation(accumulation)
        for memory in self._dead:
            _poison(memory)
        self._dead = self._to_poison.get(event, [])
        prepare()
        effects = self._segments[event].replay()
        self._order.done(event)
        for effect in effects:
            effect()

    def replays(self, event: Event) -> int:
        """How many times the event was replayed."""
        return self._order.replays[event]

    def has_effects(self, event: Event) -> bool:
        """Whether the event has side effects."""
        return bool(self._segments[event].recording.effects)

    @property
    def is_free(self) -> bool:
        return not self._segments

    def free(self) -> None:
        """Free graphs and buffers. A second call does nothing."""
        segments, self._segments = self._segments, {}
        for segment in segments.values():
            segment.free()
        for instance in self.instances.values():
            instance.drop()
        self._arenas, self._accumulations, self._to_poison, self._dead = {}, {}, {}, []

    def _warm_up(self, modules: Sequence[nn.Module], *, rehearses: bool = False) -> None:
        begin_step(modules)
        for event in self.events:
            instance = self.instances[event.instance]
            with _hooked(instance, event.kind):
                self._recorder.warm_up(_work(instance, event.kind), rehearses=rehearses)
            if not self._owned_grads:
                instance.param_grads = []
        for instance in self.instances.values():
            instance.forget()

    def _first_warm_up(self, modules: Sequence[nn.Module]) -> list[list[LayerMemory]]:
        """Run one pass, and return the sizes of all buffers by chunk and layer."""
        begin_step(modules)
        saved: dict[Place, dict[int, int]] = {}
        delayed: dict[Place, dict[int, int]] = {}
        inputs: dict[Place, list[Tensor]] = {}
        for event in self.events:
            instance = self.instances[event.instance]
            if event.kind is Pass.FORWARD:
                seen = saved.setdefault(event.instance, {})
                saving = saved_tensors_hooks(lambda t, seen=seen: _see(t, seen), lambda t: t)  # type: ignore[misc]
                with _hooked(instance, event.kind), saving:
                    self._recorder.warm_up(instance.forward)
                weights = [tensor for p in instance.module.parameters() for tensor in held_tensors(p)]
                for known in (*weights, *instance.module.buffers(), *instance.leaves):
                    seen.pop(known.untyped_storage().data_ptr(), None)
                inputs[event.instance] = instance.leaves
                continue
            with _hooked(instance, event.kind):
                self._recorder.warm_up(_work(instance, event.kind))
            if event.kind is Pass.DGRAD:
                left = delayed.setdefault(event.instance, {})
                for operand in instance.delayed_operands():
                    _see(operand, left)
                for known in (*inputs.pop(event.instance), *instance.dys):
                    left.pop(known.untyped_storage().data_ptr(), None)
        for instance in self.instances.values():
            instance.forget()
        return [
            [
                _sizes(self.instances[place], saved.get(place, {}), delayed.get(place, {}))
                for place in [(chunk, 0, layer) for layer in range(count)]
            ]
            for chunk, count in enumerate(self.schedule.layers, 1)
        ]

    def _plan(self, sizes: list[list[LayerMemory]]) -> None:
        self.memory = plan_memory(self.schedule, sizes, follows=self._follows)
        parts: dict[Place, dict[Buffer, Tensor]] = {}
        for life in self.memory.lives:
            if life.buffer not in (Buffer.SAVED, Buffer.DELAYED):  # the graphs allocate those two themselves
                parts.setdefault(life.instance, {})[life.buffer] = self._arena(life)
        for place, instance in self.instances.items():
            mine = parts.get(place, {})
            device = instance.settings.device

            def tensors(buffer: Buffer, forms: Sequence[Form], mine: Any = mine, device: Any = device) -> list[Tensor]:
                return placed(forms, mine.get(buffer, torch.empty(0, dtype=torch.uint8, device=device)))

            grads = iter(tensors(Buffer.INPUT_GRAD, [form for form in instance.grads if form is not None]))
            instance.buffers = Buffers(
                tensors(Buffer.INPUT, instance.inputs),
                tensors(Buffer.OUTPUT, instance.outputs),
                tensors(Buffer.OUTPUT_GRAD, instance.differentiable_outputs),
                [None if form is None else next(grads) for form in instance.grads],
            )
            with torch.no_grad():
                for static, given in zip(instance.buffers.inputs, instance.sample.tensors, strict=True):
                    static.copy_(given)

    def _arena(self, life: Life) -> Tensor:
        key = (life.buffer, life.size, life.number) if self._shared else (life.buffer, life.instance)
        memory = self._arenas.get(key)
        if memory is None:
            device = self.instances[life.instance].settings.device
            memory = self._arenas[key] = torch.zeros(life.size, dtype=torch.uint8, device=device)
        if self._poisons:
            self._to_poison.setdefault(self.schedule.events[life.end], []).append(memory)
        return memory

    def _record(self, event: Event) -> Segment:
        instance = self.instances[event.instance]
        with _hooked(instance, event.kind):
            segment = self._recorder.record(_work(instance, event.kind))
        recording = segment.recording
        first: dict[int, Accumulation] = {}
        for accumulation in recording.accumulations:
            first.setdefault(id(accumulation.weight), accumulation)
        self._accumulations[event] = list(first.values())
        if event.kind is Pass.DGRAD:
            instance.take_param_grads(recording, None if self._owned_grads else self._recorder.unowned)
        if self._poisons:
            self._to_poison.setdefault(event, []).extend(self._recorder.unheld())
        return segment


@contextmanager
def _hooked(instance: Instance, kind: Pass) -> Iterator[None]:
    """The instance's capture hooks before and after one of its passes, outside of the capture itself."""
    name = {Pass.FORWARD: "forward", Pass.DGRAD: "backward"}.get(kind)
    if name is not None:
        instance.call_hooks(f"{name}_pre_hooks")
    yield
    if name is not None:
        instance.call_hooks(f"{name}_hooks")


def _happens(event: Event, instance: Instance) -> bool:
    if event.kind is Pass.FORWARD:
        return True
    return instance.settings.with_backward and (event.kind is Pass.DGRAD or instance.delays)


def _work(instance: Instance, kind: Pass) -> Callable[[], None]:
    return {Pass.FORWARD: instance.forward, Pass.DGRAD: instance.backward, Pass.WGRAD: instance.wgrad}[kind]


def _sizes(instance: Instance, saved: Mapping[int, int], delayed: Mapping[int, int]) -> LayerMemory:
    """The sizes of an instance's buffers. saved, delayed: address -> bytes of the memory that its passes keep."""
    reads = {Buffer.INPUT, Buffer.OUTPUT_GRAD} if instance.delays else set()
    if saved.keys() & delayed.keys():
        reads.add(Buffer.SAVED)
    return LayerMemory(
        input=buffer_bytes(instance.inputs),
        saved=sum(saved.values()),
        output=buffer_bytes(instance.outputs),
        output_grad=buffer_bytes(instance.differentiable_outputs),
        delayed=sum(size for at, size in delayed.items() if at not in saved),
        input_grad=buffer_bytes([form for form in instance.grads if form is not None]),
        wgrad_reads=frozenset(reads),
    )


def _see(tensor: Tensor, seen: dict[int, int]) -> Tensor:
    storage = tensor.untyped_storage()
    seen[storage.data_ptr()] = storage.nbytes()
    return tensor


def _poison(memory: Tensor) -> None:
    """Fill with 0xFF: NaN in every floating-point format, -1 or the largest value in integers."""
    memory.fill_(0xFF)
