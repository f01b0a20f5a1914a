"""A recorder that replays what torch was asked to compute, on the very tensors, as a CUDA graph does: no Python runs.

For CPU tests of what a rerun of the module cannot show: that nothing is left to Python between capture and replay.
Unlike a capture, recording computes. Modules that read tensors on the host (grouped ones, on a CPU) would be frozen.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuser.graph_capture import Scratch
from recipes.effects import recorded


class _Log(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


class _OpsSegment:
    def __init__(self, calls, recording):
        self._calls = calls
        self.recording = recording

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, result in self._calls:
                again = func(*args, **kwargs)
                given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs))
                         if isinstance(t, torch.Tensor)}  # fmt: skip
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in given:
                        old.copy_(new)
        return self.recording.effects

    def free(self):
        self._calls = []


class OpsRecorder:
    """As `fuser.graph_capture.CudaRecorder`, of what reaches torch's dispatcher."""

    is_recording = False

    def __init__(self):
        self._scratch = Scratch()

    @contextmanager
    def warming_up(self):
        yield

    def warm_up(self, work):
        with recorded(self._scratch) as recording:
            work()
        recording.undo()

    def record(self, work):
        OpsRecorder.is_recording = True
        try:
            with recorded() as recording, _Log() as log:
                work()
        finally:
            OpsRecorder.is_recording = False
        recording.undo()
        return _OpsSegment(log.calls, recording)

    def unowned(self, tensor):
        return tensor
