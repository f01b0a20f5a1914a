"""A test's function in several processes that reduce with one another."""

from __future__ import annotations

import faulthandler
import logging
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessExitedException

TIMEOUT = timedelta(minutes=4)  # less than that of a test, so that a rank that waits in vain says where
# Imported once, by the process whose forks the ranks are: two seconds of a core for each rank. Nothing in it may use
# CUDA, which no fork may go on with. The ranks have one hash seed then; those of torchrun have one each.
IMPORTED = ["fuser", "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "tests.ranks"]


def on_ranks(
    function: Callable[..., None], *arguments: Any, folder: Path, ranks: int = 2, backend: str = "gloo"
) -> None:
    """function(rank, *arguments) in each of the ranks' processes; with NCCL each has a device of its own.

    Raises AssertionError if a rank raises, or waits for another for `TIMEOUT`, with the traceback of every rank: of
    those that had to be ended, where they were. folder: an empty one, in which the ranks find each other.

    If a thread that is not of Python crashes in a rank, all ranks run once more: in CI one has ended in a segmentation
    fault in such a thread while it waited for gloo (torch 2.13; not seen again in 4,000 runs of that test), and this
    project has no native code on CPUs. What is Python's, or crashes twice, fails.
    """
    try:
        _start(function, arguments, ranks, backend, folder)
    except ProcessExitedException as error:
        said = _said(folder, ranks)
        if backend != "gloo" or not _is_of_another_thread(said[error.error_index]):
            raise AssertionError("\n\n".join([str(error), *said])) from None
        logging.getLogger(__name__).warning("Once more: %s\n%s", error, said[error.error_index])
        again = folder / "again"
        again.mkdir()
        try:
            _start(function, arguments, ranks, backend, again)
        except ProcessExitedException as error_again:
            raise AssertionError("\n\n".join([*map(str, (error, error_again)), *_said(again, ranks)])) from None


def _start(function: Callable[..., None], arguments: Any, ranks: int, backend: str, folder: Path) -> None:
    method = "spawn" if torch.cuda.is_available() else "forkserver"
    if method == "forkserver":
        torch.multiprocessing.get_context(method).set_forkserver_preload(IMPORTED)
    torch.multiprocessing.start_processes(
        _run, (function, arguments, ranks, backend, folder), nprocs=ranks, start_method=method
    )


def _said(folder: Path, ranks: int) -> list[str]:
    reports = [_report(folder, rank) for rank in range(ranks)]
    return [f"rank {rank}: {at.read_text() if at.exists() else 'not begun'}" for rank, at in enumerate(reports)]


def _is_of_another_thread(said: str) -> bool:
    """Whether `faulthandler` reported a crash, in a thread that runs no Python."""
    return "Fatal Python error" in said and "Current thread" not in said


@contextmanager
def quietly() -> Iterator[None]:
    """As the fixtures of the tests' own process: one thread, and uninitialised memory is NaN."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    yield


def _run(
    rank: int, function: Callable[..., None], arguments: tuple[Any, ...], ranks: int, backend: str, folder: Path
) -> None:
    """Ends without the interpreter's end, also behind an exception.

    A rank has aborted after its work there ("terminate called without an active exception", once in some hundred runs;
    a thread of gloo's that frees a tensor meanwhile would explain it), and one that hangs there is not known to have
    failed, so that the first to be reported is another, which waits for it.
    """
    with _report(folder, rank).open("w") as report:
        faulthandler.enable(report)
        faulthandler.register(signal.SIGTERM, report, chain=True)
        try:
            if backend == "nccl":
                torch.cuda.set_device(rank)
            rendezvous = f"file://{folder / 'rendezvous'}"
            dist.init_process_group(backend, init_method=rendezvous, rank=rank, world_size=ranks, timeout=TIMEOUT)
            function(rank, *arguments)
            dist.destroy_process_group()
        except BaseException:
            traceback.print_exc(file=report)
            report.flush()
            os._exit(1)
    os._exit(0)


def _report(folder: Path, rank: int) -> Path:
    return folder / f"report-of-{rank}"
