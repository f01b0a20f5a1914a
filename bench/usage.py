"""The one error that means: the command was called wrongly, or its files are not as they must be; nothing is broken."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class UsageError(ValueError):
    """Shown as one sentence without a traceback; the exit code is 2."""


def require_device(name: str) -> None:
    """UsageError if torch has no such device here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device cuda: torch {torch.__version__} finds no CUDA device here. Take --device cpu.")


@contextmanager
def on_disk(path: Path, mend: str) -> Iterator[None]:
    """What the system refuses in the body (a full disk, a read-only folder) as a UsageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}. {mend}") from error
