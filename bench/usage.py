"""UsageError, for wrong arguments or invalid files, as opposed to failures of the program."""

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


class UsageError(ValueError):
    """Printed as one sentence without a traceback; the exit code is 2."""


def require_device(name: str) -> None:
    """Raise UsageError if torch does not have this device."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device cuda: torch {torch.__version__} finds no CUDA device here. Take --device cpu.")


def require_positive(arguments: Namespace, *options: str) -> None:
    """Raise UsageError for the first of these options that is given and below 1."""
    for option in options:
        value = getattr(arguments, option.replace("-", "_"))
        if value is not None and value < 1:
            raise UsageError(f"--{option} is {value}, but must be at least 1.")


@contextmanager
def on_disk(path: Path, mend: str) -> Iterator[None]:
    """Convert OSErrors of the body (full disk, read-only folder) to a UsageError that names `path`."""
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}. {mend}") from error
