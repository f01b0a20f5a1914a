"""The one error that means: the command was called wrongly, nothing is broken."""

import torch


class UsageError(ValueError):
    """Shown as one sentence without a traceback; the exit code is 2."""


def require_device(name: str) -> None:
    """UsageError if torch has no such device here."""
    if name == "cuda" and not torch.cuda.is_available():
        raise UsageError(f"--device cuda: torch {torch.__version__} finds no CUDA device here. Take --device cpu.")
