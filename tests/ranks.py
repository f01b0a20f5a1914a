"""A test's function in several processes that reduce with one another."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(minutes=4)  # less than that of a test, so that a rank that waits in vain says where


def on_ranks(
    function: Callable[..., None], *arguments: Any, folder: Path, ranks: int = 2, backend: str = "gloo"
) -> None:
    """function(rank, *arguments) in each of the ranks' processes; with NCCL each has a device of its own.

    A rank's exception is raised here; one that waits for another for `TIMEOUT` raises that. folder: an empty one, in
    which the ranks find each other.
    """
    rendezvous = f"file://{folder / 'rendezvous'}"
    torch.multiprocessing.spawn(_run, (function, arguments, ranks, backend, rendezvous), nprocs=ranks)


@contextmanager
def quietly() -> Iterator[None]:
    """As the fixtures of the tests' own process: one thread, and uninitialised memory is NaN."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield


def _run(
    rank: int, function: Callable[..., None], arguments: tuple[Any, ...], ranks: int, backend: str, rendezvous: str
) -> None:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks, timeout=TIMEOUT)
    try:
        function(rank, *arguments)
    finally:
        dist.destroy_process_group()
    # Without the interpreter's end: a rank has aborted after its work ("terminate called without an active exception",
    # once in some hundred runs). A thread of gloo's that frees a tensor while the interpreter ends would explain it.
    os._exit(0)
