"""What a GPU runs in a step, by torch's profiler: kernels and copies with their times."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch.autograd import DeviceType


class DeviceEvent(NamedTuple):
    """A kernel or copy. start: in seconds, from an origin that all events of a profile share"""

    name: str
    start: float
    seconds: float


def device_events(step: Callable[[], object], repeats: int) -> list[DeviceEvent]:
    """Those of so many calls of `step`, kernels of replayed CUDA graphs included, in the order of their starts."""
    torch.cuda.synchronize()
    # CPU events would slow down the host.
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        for _ in range(repeats):
            step()
        torch.cuda.synchronize()
    found = [
        DeviceEvent(event.name, event.time_range.start * 1e-6, event.self_device_time_total * 1e-6)
        for event in profile.events()
        if event.device_type == DeviceType.CUDA
    ]
    return sorted(found, key=lambda event: event.start)


def seconds_of_steps(events: Iterable[DeviceEvent], name: str, steps: int) -> list[float]:
    """For each of as many equal steps, the summed time of the kernels in whose name `name` stands.

    events: of all steps, ordered. Raises RuntimeError if there are none of these, or not as many in each step.

        times 1, 2, 3, 4 of the kernel, 2 steps  ->  [3, 7]
    """
    seconds = [event.seconds for event in events if name in event.name]
    if not seconds or len(seconds) % steps:
        raise RuntimeError(
            f"The profiler saw {len(seconds)} launches of {name} in {steps} steps, but there must be as many in each. "
            "Check the kernel's name, and that the profiler may be used on this machine."
        )
    each = len(seconds) // steps
    return [sum(seconds[begin : begin + each]) for begin in range(0, len(seconds), each)]
