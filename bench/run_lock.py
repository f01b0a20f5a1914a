"""One training run at a time in a directory: an operating-system lock, released when its process ends."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.usage import UsageError, on_disk

LOCK = "run.lock"


@contextmanager
def locked(directory: Path) -> Iterator[None]:
    """Hold DIR/run.lock, an empty file that is not removed. Raises UsageError if the lock is already held."""
    path = directory / LOCK
    with on_disk(path, "Take an --out that can be written."):
        file = path.open("ab")
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"Another `bench train` is writing to {directory}. Wait until it has ended, or take another --out."
            ) from None
        except OSError as error:
            raise UsageError(
                f"{path} cannot be locked: {error.strerror}. Take an --out on a disk that has file locks."
            ) from None
        yield
