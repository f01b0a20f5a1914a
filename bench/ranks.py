"""The ranks of a command that runs on several processes: started by torch's elastic launcher, joined, and compared."""

import argparse
import atexit
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from bench.timing import Timing
from bench.usage import UsageError

DIMENSIONS = ("dp", "ep")
WRONG_USAGE = 2

Main = Callable[[argparse.Namespace], int]


def is_rank() -> bool:
    """Whether this process is one of a launched command's, by `launch` or by torchrun."""
    return dist.is_torchelastic_launched()


def require_gpus(ranks: int, device: str) -> None:
    """Raise UsageError if there is no GPU for each rank."""
    if device == "cuda" and torch.cuda.device_count() < ranks:
        raise UsageError(
            f"{ranks} ranks need a GPU each, but torch finds {torch.cuda.device_count()}. Take fewer ranks, or "
            "--device cpu."
        )


def launch(main: Main, arguments: argparse.Namespace, ranks: int, mend: str) -> int:
    """Run `main(arguments)` in as many processes on this machine, as torchrun does. Returns the exit code.

    Where one process fails or is killed, the others are stopped, and the sentence on stderr ends with `mend`.
    """
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=ranks,
        run_id=str(uuid.uuid4()),
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=0,
    )
    try:
        return max(elastic_launch(config, _run_rank)(main, arguments).values())
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        if failure.exitcode == WRONG_USAGE:
            return WRONG_USAGE
        how = f"by {signal.Signals(-failure.exitcode).name}" if failure.exitcode < 0 else f"with {failure.exitcode}"
        print(f"rank {rank} of {ranks} ended {how}, and the others were stopped. {mend}", file=sys.stderr, flush=True)
        return 1


@contextmanager
def joined(device: str, *, dp: int, ep: int) -> Iterator[DeviceMesh | None]:
    """The mesh of dimensions dp and ep, over gloo for CPUs and NCCL for GPUs; None for a single rank."""
    if dp * ep == 1:
        yield None
        return
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    yield init_device_mesh(device, (dp, ep), mesh_dim_names=DIMENSIONS)
    # Only behind success: a rank that fails ends at once, for the launcher to notice.
    dist.destroy_process_group()


def say(text: str) -> None:
    """Print at once, on the first rank: what is printed at the end is lost where a limit of time ends the job."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def of_slowest(times: Mapping[str, Timing]) -> dict[str, Timing]:
    """For each candidate that all ranks have timed, the figures of the rank with the largest median; a collective."""
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, times)
    return {way: max((of_rank[way] for of_rank in of_ranks), key=lambda timing: timing.median) for way in times}


def _run_rank(main: Main, arguments: argparse.Namespace) -> int:
    try:
        code = main(arguments)
    except UsageError as error:
        print(f"python -m bench: error: {error}", file=sys.stderr, flush=True)
        sys.exit(WRONG_USAGE)
    # Without the interpreter's end, in which a thread of gloo's may abort (see tests/ranks.py).
    atexit.register(os._exit, 0)
    return code
