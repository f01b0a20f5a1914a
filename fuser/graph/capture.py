"""Two recorders of work for replays: CUDA graphs, and for a CPU one that runs the work again.

Work is a function without arguments or result, which reads and writes memory at fixed addresses. Its side effects
(`Effect`) are recorded, and returned by each replay.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from recipes.effects import Effect, SideEffects, recorded

Work = Callable[[], None]

ALIGNMENT = 256  # bytes: more than any kernel needs


class Segment(Protocol):
    """Recorded work, with the side effects of its recording."""

    recording: SideEffects

    def replay(self) -> Sequence[Effect]:
        """Do the work again. Returns the side effects, which the caller must perform."""

    def free(self) -> None:
        """Release the graph and its memory."""


class Recorder(Protocol):
    """Records segments in the order in which they will be replayed."""

    def warming_up(self) -> AbstractContextManager[None]:
        """The context in which warm-ups run."""

    def warm_up(self, work: Work, *, rehearses: bool = False) -> None:
        """Do the work. Its side effects are dropped, and gradient buffers are not changed.

        rehearses: allocate memory as `record` does
        """

    def measure(self, run: Work) -> int | None:
        """Run with a memory pool like that of recorded segments. Returns its bytes; None if segments have no pool."""

    def end_warm_up(self) -> None:
        """Free the memory that only warm-ups need."""

    def record(self, work: Work) -> Segment:
        """Record the work."""

    def unowned(self, tensor: Tensor) -> Tensor:
        """The same memory without ownership, so that later segments may reuse it."""

    def unheld(self) -> list[Tensor]:
        """The pool's free blocks, [bytes] uint8 each. Later segments write them before they read them."""


def make_recorder(device: torch.device, pool: Any) -> Recorder:
    """The recorder for modules on this device. pool: as for `torch.cuda.graph`; None creates a new one."""
    return CudaRecorder(device, pool) if device.type == "cuda" else RerunRecorder()


class Scratch:
    """Memory to write instead of a gradient buffer, with its shape, strides and alignment, on which kernels depend.

    The values written there are discarded.
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
    """Replays by running the work again: the semantics of graphs, without their speed."""

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
        pass  # `record` runs the work too, and uses the same scratch memory

    def record(self, work: Work) -> RerunSegment:
        return RerunSegment(work, _dropped(work, self._scratch))

    def unowned(self, tensor: Tensor) -> Tensor:
        return tensor

    def unheld(self) -> list[Tensor]:
        return []


class RerunSegment:
    """Work that each replay runs again."""

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
    """Captures CUDA graphs on one stream, all with the same memory pool."""

    def __init__(self, device: torch.device, pool: Any) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle() if pool is None else pool
        self._stream = _capture_stream(device)
        self._scratch = Scratch()
        _release_backward(device)  # an autograd graph that is still alive accumulates gradients on another stream

    @contextmanager
    def warming_up(self) -> Iterator[None]:
        # Autograd runs a backward on the stream of its forward, so warm-up and capture use the same stream.
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
        torch.cuda.current_blas_handle()  # allocates cuBLAS's permanent workspace for this stream
        # The allocator has separate memory for each stream, managed like a capture's: the same sizes in the same order
        # take the same segments. Not a MemPool, which covers one thread: backward runs on another.
        _release_backward(self._device)
        torch.cuda.empty_cache()
        plugs = [torch.empty(size, dtype=torch.uint8, device=self._device) for size in gaps(self._segments())]
        before = self._reserved()
        run()
        del plugs
        return self._reserved() - before

    def _segments(self) -> list[dict[str, Any]]:
        """The allocator's segments for the capture stream, outside of pools."""
        stream = self._stream.cuda_stream
        segments = torch.cuda.memory_snapshot()
        return [s for s in segments if s["stream"] == stream and s["segment_pool_id"] == (0, 0)]

    def _reserved(self) -> int:
        return sum(segment["total_size"] for segment in self._segments())

    def end_warm_up(self) -> None:
        self._scratch = Scratch()
        torch.cuda.empty_cache()  # frees what warm-ups cached on the capture stream; a capture cannot

    def record(self, work: Work) -> CudaSegment:
        graph = torch.cuda.CUDAGraph()
        with self.warming_up(), recorded() as recording, warnings.catch_warnings():
            # A segment may be empty, such as the dgrad of an input that needs none.
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            graph.capture_begin(self._pool)
            try:
                work()
                _release_backward(self._device)
            except BaseException as error:
                try:
                    graph.capture_end()
                except RuntimeError as follow_up:  # the capture was invalidated; the first error is the cause
                    error.add_note(f"The capture ended with: {follow_up}")
                graph.reset()
                raise
            graph.capture_end()
        # Drop ownership of gradients but not of weights, which are the tensors that require gradients.
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
        """A view of the pool's memory that does not keep it allocated, so that later segments may reuse it."""
        if not tensor.numel():
            return tensor.detach()
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        memory = self._bytes(tensor.data_ptr(), extent * tensor.element_size())
        return memory.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())

    def unheld(self) -> list[Tensor]:
        if not _shows_its_memory():
            return []
        # Not `memory_snapshot(pool)`: in torch 2.11 it releases references to the ints in `pool` that it does not own,
        # which crashes the process once they exceed 256 (smaller ints are immortal).
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
    """Sizes of allocations that fill all free blocks of these segments, so that memory is as full as in a new pool.

    The allocator serves sizes above 1 MiB from large segments and others from small ones, each from the smallest block
    that fits. So the largest sizes come first, and a free block of a small segment may need two allocations.
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
    """One stream for all captures, because cuBLAS keeps a workspace for each stream that it has used."""
    return torch.cuda.Stream(device)


class _Nothing(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        return dy


def _release_backward(device: torch.device) -> None:
    """Run an empty backward. Until its next backward, autograd's thread for this device holds the graph and the results
    of the last one, and the next segment could not reuse their memory."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.empty(0, device=device, requires_grad=True)
        torch.autograd.grad(_Nothing.apply(leaf), leaf, leaf.detach())


def _shows_its_memory() -> bool:
    return torch.cuda.get_allocator_backend() == "native"  # cudaMallocAsync has no snapshots


class _Memory:
    """Bytes at an address, in a form that `torch.as_tensor` accepts."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 2,
        }  # fmt: skip


def _dropped(work: Work, scratch: Scratch, rehearses: bool = False) -> SideEffects:
    """Do the work without its side effects, which are returned."""
    with recorded(scratch, rehearses=rehearses) as recording:
        try:
            work()
        finally:
            recording.undo()
    return recording
