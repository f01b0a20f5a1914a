"""A step in a CUDA graph, with the check that its replays have the bits of the eager step; and that nothing waits."""

from collections.abc import Sequence

import torch
from torch import Tensor

import fuser
from bench.case import TimedPass

WARMUP = 3
ROUTINGS = 50


def capture(step: TimedPass) -> TimedPass:
    """A function that replays `step`, and returns the same tensors each time. The step runs on another stream first."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for _ in range(WARMUP):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Threads of NCCL look for ended work meanwhile, which the default mode forbids.
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        results = step()

    def replay() -> list[Tensor]:
        graph.replay()
        return results

    return replay


def require_same_bits(replay: TimedPass, eager: TimedPass, x: Tensor, names: Sequence[str]) -> None:
    """Raise AssertionError if they differ for any of `ROUTINGS` values of x, whose first feature stays.

    names: of the results. x has its values again afterwards. Raises RuntimeError if rows overflow.
    """
    given = x.detach().clone()
    for number in range(ROUTINGS):
        with torch.no_grad():
            x[:, 1:].normal_()
        replayed, expected = replay(), eager()
        torch.cuda.synchronize()
        fuser.check_overflow()
        for name, got, want in zip(names, replayed, expected, strict=True):
            assert torch.equal(got, want), f"{name} of replay {number} has not the bits of the eager step"
    with torch.no_grad():
        x.copy_(given)


def require_no_synchronization(step: TimedPass) -> None:
    """Raise RuntimeError, at the place, if a warmed-up step makes the host wait for the GPU."""
    step()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
