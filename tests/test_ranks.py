"""What a test of several ranks says when one of them fails, dies or hangs."""

import ctypes
import time
from contextlib import nullcontext
from pathlib import Path

import pytest

from tests.ranks import on_ranks


def hang(there: Path) -> None:
    there.touch()
    time.sleep(300)


def hang_if_first(rank: int, there: Path) -> None:
    """Rank 0 hangs, and the other goes on when it does."""
    if rank == 0:
        hang(there)
    while not there.exists():
        time.sleep(0.01)


def raise_beside_one_that_hangs(rank: int, there: Path) -> None:
    hang_if_first(rank, there)
    raise ValueError("Rank 1 was given nothing.")


def die_beside_one_that_hangs(rank: int, there: Path) -> None:
    hang_if_first(rank, there)
    ctypes.string_at(0)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raise_beside_one_that_hangs, "ValueError: Rank 1 was given nothing."),
        (die_beside_one_that_hangs, r"Segmentation fault[\S\s]* in string_at"),
    ],
)
def test_every_rank_says_where_it_was(function, said, tmp_path):
    with pytest.raises(AssertionError, match=rf"rank 0: [\S\s]* in hang\n[\S\s]*rank 1: [\S\s]*{said}"):
        on_ranks(function, tmp_path / "hangs", folder=tmp_path)


def crash_in_another_thread(rank: int, marks: Path, times: int) -> None:
    """So often, of rank 1, in a thread that runs no Python."""
    seen = len([*marks.iterdir()])
    if rank == 1 and seen < times:
        (marks / str(seen)).touch()
        libc, thread = ctypes.CDLL(None), ctypes.c_void_p()
        libc.pthread_create(ctypes.byref(thread), None, libc.abort, None)
    time.sleep(300 if seen < times else 0)


def test_ranks_run_once_more_if_a_thread_crashes_that_is_not_of_python(tmp_path):
    for times in (1, 2):
        folder, marks = tmp_path / str(times), tmp_path / f"marks {times}"
        folder.mkdir()
        marks.mkdir()
        with nullcontext() if times == 1 else pytest.raises(AssertionError, match="rank 1: .*Fatal Python error: Abo"):
            on_ranks(crash_in_another_thread, marks, times, folder=folder)
        assert len([*marks.iterdir()]) == times
