"""What a test of several ranks says when one of them fails, dies or hangs."""

import ctypes
import time
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
