"""The two machines that record a piece of work and do it again: CUDA graphs, and for a CPU the work itself.

Work takes and returns nothing: it reads and writes memory that stays where it is. What it does besides (`Effect`) is
kept, and handed out by each replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from recipes.effects import Effect, SideEffects, recorded

Work = Callable[[], None]

ALIGNMENT = 256  # bytes: more than any kernel needs


class Segment(Protocol):
    """Recorded work, with what was seen while it was."""

    recording: SideEffects

    def replay(self) -> Sequence[Effect]:
        """Do the work again. Returns what has to be done besides."""

    def free(self) -> None:
        """Give up what it holds."""


class Recorder(Protocol):
    """Records segments, one after the other, in the order in which they will be replayed."""

    def warming_up(self) -> Any:
        """The context in which work is done before it is recorded."""

    def warm_up(self, work: Work, *, rehearses: bool = False) -> None:
        """Do the work; what it would do besides is dropped, and gradient buffers stay as they are.

        rehearses: take memory for it as `record` does
        """

    def measure(self, run: Work) -> int | None:
        """Run, with a memory pool as the recorded segments have. Returns its bytes; None where they have none."""

    def end_warm_up(self) -> None:
        """Give back the memory that only warm-ups need."""

    def record(self, work: Work) -> Segment:
        """Record the work."""

    def unowned(self, tensor: Tensor) -> Tensor:
        """The same memory, which later segments may use for something else once they are replayed."""

    def unheld(self) -> list[Tensor]:
        """Memory of the pool that nothing holds now, [bytes] uint8 each: no later segment reads it before it writes."""


def make_recorder(device: torch.device, pool: Any) -> Recorder:
    """For modules on this device. pool: as of `torch.cuda.graph`; None is a new one."""
    return CudaRecorder(device, pool) if device.type == "cuda" else RerunRecorder()


class Scratch:
    """Memory that stands for any gradient buffer, in its shape, strides and alignment, by which kernels are chosen.

    What is written there is of no use.
    """

    def __init__(self) -> None:
        self._bytes: dict[torch.device, Tensor] = {}

    def __call__(self, buffer: Tensor) -> Tensor:
        extent = 1 + sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True))
        needed = max(extent, 1) * buffer.element_size()
        memory = self._bytes.get(buffer.device)
        if memory is None or memory.numel() < needed + ALIGNMENT:
            memory = torch.zeros(needed + ALIGNMENT, dtype=torch.uint8, device=buffer.device)
            self._bytes[buffer.device] = memory
        start = (buffer.data_ptr() - memory.data_ptr()) % ALIGNMENT
        flat = memory[start : start + needed].view(buffer.dtype)
        return flat.as_strided(buffer.shape, buffer.stride())


class RerunRecorder:
    """Replays by doing the work again: the semantics of graphs, without their speed."""

    def __init__(self) -> None:
        self._scratch = Scratch()

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        yield

    def warm_up(self, work: Work, *, rehearses: bool = False) -> None:
        _dropped(work, self._scratch, rehearses)

    def measure(self, run: Work) -> int | None:
        run()
        return None

    def end_warm_up(self) -> None:
        pass  # to record is to compute, too: into the same scratch memory

    def record(self, work: Work) -> RerunSegment:
        return RerunSegment(work, _dropped(work, self._scratch))

    def unowned(self, tensor: Tensor) -> Tensor:
        return tensor

    def unheld(self) -> list[Tensor]:
        return []


class RerunSegment:
    """Work to be done again."""

    def __init__(self, work: Work, recording: SideEffects) -> None:
        self._work: Work | None = work
        self.recording = recording

    def replay(self) -> Sequence[Effect]:
        assert self._work is not None, "it was freed"
        with recorded() as now:
            self._work()
        return now.effects

    def free(self) -> None:
        self._work = None


class CudaRecorder:
    """Captures CUDA graphs on one stream, with one memory pool for all."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = _capture_stream(device)
        self._scratch = Scratch()
        _release_backward(device)  # a graph of these modules that lives on keeps its accumulation on another stream

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        # Autograd runs a backward on the stream of its forward, so warm-up and capture share theirs.
        outside = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(outside)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            outside.wait_stream(self._stream)

    def warm_up(self, work: Work, *, rehearses: bool = False) -> None:
        _dropped(work, self._scratch, rehearses)
        if rehearses:
            _release_backward(self._device)

    def measure(self, run: Work) -> int | None:
        if not _shows_its_memory():
            run()
            return None
        torch.cuda.current_blas_handle()  # makes its workspace for this stream, which stays
        # The allocator keeps memory for each stream by itself, and hands it out as it does that of a capture: same
        # sizes in the same order take the same segments. Not a MemPool: it serves one thread, and backward has another.
        _release_backward(self._device)
        torch.cuda.empty_cache()
        plugs = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in gaps(self._segments())]
        before = self._reserved()
        run()
        del plugs
        return self._reserved() - before

    def _segments(self) -> list[dict[str, Any]]:
        """What the allocator holds for the capture's stream, outside of pools."""
        stream = self._stream.cuda_stream
        segments = torch.cuda.memory_snapshot()
        return [s for s in segments if s["stream"] == stream and s["segment_pool_id"] == (0, 0)]

    def _reserved(self) -> int:
        return sum(segment["total_size"] for segment in self._segments())

    def end_warm_up(self) -> None:
        self._scratch = Scratch()
        torch.cuda.empty_cache()  # what warm-ups took on the capture's stream; a capture cannot free it

    def record(self, work: Work) -> CudaSegment:
        graph = torch.cuda.CUDAGraph()
        with self.warming_up(), recorded() as recording, warnings.catch_warnings():
            # A segment may have nothing to compute, such as the dgrad of an input that needs none.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            graph.capture_begin(self._pool)
            try:
                work()
                _release_backward(self._device)
            except BaseException as error:
                try:
                    graph.capture_end()
                except RuntimeError as follow_up:  # the capture is broken: the first error says why
                    error.add_note(f"The capture ended with: {follow_up}")
                graph.reset()
                raise
            graph.capture_end()
        # Weights require gradients, what a pass computes for them does not.
        recording.effects = [
            effect._replace(
                args=tuple(
                    self.unowned(arg) if isinstance(arg, Tensor) and not arg.requires_grad else arg
                    for arg in effect.args
                )
            )
            for effect in recording.effects
        ]
        return CudaSegment(graph, recording)

    def unowned(self, tensor: Tensor) -> Tensor:
        """A view of the pool's memory that does not keep it from segments captured later."""
        if not tensor.numel():
            return tensor.detach()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = self._bytes(tensor.data_ptr(), extent * tensor.element_size())
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def unheld(self) -> list[Tensor]:
        if not _shows_its_memory():
            return []
        # Not `memory_snapshot(pool)`: in torch 2.11 it gives up references to the numbers in `pool` that it does not
        # have. As soon as they are above 256 (Python keeps smaller ones for ever), the process crashes.
        return [
            self._bytes(block["address"], block["size"])
            for segment in torch.cuda.memory_snapshot()
            if tuple(segment["segment_pool_id"]) == tuple(self._pool)
            for block in segment["blocks"]
            if block["state"] == "inactive"
        ]

    def _bytes(self, pointer: int, size: int) -> Tensor:
        return torch.as_tensor(_Memory(pointer, size), device=self._device)


def gaps(segments: Sequence[Mapping[str, Any]]) -> list[int]:
    """Bytes of the allocations that fill what the allocator would hand out of these segments: a new pool has nothing.

    It takes what is above 1 MiB from large segments, all else from small ones, each from the smallest block that holds
    it: so the largest come first, and a free block of a small segment may take two.
    """
    most = 1 << 20
    sizes = []
    for segment in segments:
        free = [block["size"] for block in segment["blocks"] if block["state"] == "inactive"]
        if segment["segment_type"] == "small":
            sizes += [min(most, size - start) for size in free for start in range(0, size, most)]
        else:
            sizes += [size for size in free if size > most]
    return sorted(sizes, reverse=True)


class CudaSegment:
    """A captured graph."""

    def __init__(self, graph: torch.cuda.CUDAGraph, recording: SideEffects) -> None:
        self._graph = graph
        self.recording = recording

    def replay(self) -> Sequence[Effect]:
        self._graph.replay()
        return self.recording.effects

    def free(self) -> None:
        self._graph.reset()
        self.recording = SideEffects()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: cuBLAS keeps a workspace for each stream it has seen."""
    return torch.cuda.Stream(device)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _release_backward(device: torch.device) -> None:
    """Give autograd's thread of this device another backward, of nothing: until then it holds the last one's graph and
    what that gave, and the next segment would take memory beside it."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(_Nothing.apply(leaf), leaf, leaf.detach())


def _shows_its_memory() -> bool:
    return torch.cuda.get_allocator_backend() == "native"  # CUDA's own has no snapshots


class _Memory:
    """Bytes at an address, as `torch.as_tensor` takes them."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 2,
        }  # fmt: skip


def _dropped(work: Work, scratch: Scratch, rehearses: bool = False) -> SideEffects:
    """Do the work and nothing besides."""
    with recorded(scratch, rehearses=rehearses) as recording:
        try:
            work()
        finally:
            recording.undo()
    return recording
