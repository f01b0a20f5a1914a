"""What a test of several ranks says when one of them fails, dies or hangs."""

import ctypes
import time

import pytest

from tests.ranks import on_ranks


def hang() -> None:
    time.sleep(300)


def raise_beside_one_that_hangs(rank: int) -> None:
    if rank == 0:
        hang()
    raise ValueError("Rank 1 was given nothing.")


def die(rank: int) -> None:
    if rank == 0:
        hang()
    ctypes.string_at(0)


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (raise_beside_one_that_hangs, "ValueError: Rank 1 was given nothing."),
        (die, r"Segmentation fault[\S\s]* in string_at"),
    ],
)
def test_every_rank_says_where_it_was(function, said, tmp_path):
    with pytest.raises(AssertionError, match=rf"rank 0: [\S\s]* in hang\n[\S\s]*rank 1: [\S\s]*{said}"):
        on_ranks(function, folder=tmp_path)
