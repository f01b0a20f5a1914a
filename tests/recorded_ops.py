"""A recorder that replays what torch was asked to compute, on the very tensors, as a CUDA graph does: no Python runs.

For CPU tests of what a rerun of the module cannot show: that nothing is left to Python between capture and replay.
Unlike a capture, recording computes. Modules that read tensors on the host (grouped ones, on a CPU) would be frozen.
"""

from contextlib import contextmanager

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuser.graph.capture import Scratch
from recipes.effects import recorded


class OpsLog(TorchDispatchMode):
    """calls: what torch was asked to compute inside: the operation, its arguments, what it gave."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def new_memory(self):
        """The calls that took memory, in order: the operation, and the bytes of each result not in its arguments."""
        made = []
        for func, args, kwargs, result in self.calls:
            given = _memory_of((args, kwargs))
            sizes = [t.untyped_storage().nbytes() for t in tree_leaves(result)
                     if isinstance(t, torch.Tensor) and t.untyped_storage().data_ptr() not in given]  # fmt: skip
            made += [(str(func), sizes)] if sizes else []
        return made

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.calls.append((func, args, kwargs or {}, result))
        return result


def _memory_of(values):
    return {t.untyped_storage().data_ptr() for t in tree_leaves(values) if isinstance(t, torch.Tensor)}


class _OpsSegment:
    def __init__(self, calls, recording):
        self._calls = calls
        self.recording = recording

    def replay(self):
        with torch.no_grad():
            for func, args, kwargs, result in self._calls:
                again = func(*args, **kwargs)
                given = _memory_of((args, kwargs))
                for old, new in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(old, torch.Tensor) and old.untyped_storage().data_ptr() not in given:
                        old.copy_(new)
        return self.recording.effects

    def free(self):
        self._calls = []


class OpsRecorder:
    """As `fuser.graph.capture.CudaRecorder`, of what reaches torch's dispatcher."""

    is_recording = False

    def __init__(self):
        self._scratch = Scratch()

    @contextmanager
    def warming_up(self):
        yield

    def warm_up(self, work, *, rehearses=False):
        with recorded(self._scratch, rehearses=rehearses) as recording:
            work()
        recording.undo()

    def measure(self, run):
        run()

    def end_warm_up(self):
        pass

    def record(self, work):
        OpsRecorder.is_recording = True
        try:
            with recorded() as recording, OpsLog() as log:
                work()
        finally:
            OpsRecorder.is_recording = False
        recording.undo()
        return _OpsSegment(log.calls, recording)

    def unowned(self, tensor):
        return tensor

    def unheld(self):
        return []
