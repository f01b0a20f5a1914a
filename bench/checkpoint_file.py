"""A checkpoint file: torch.save's output, followed by a line with its SHA-256, so that a damaged file is detected.

The file is replaced atomically: if the process is killed, either the old or the new version exists.
"""

import hashlib
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.usage import UsageError, on_disk

_MARK = b"\nsha256 "
_LAST_LINE = len(_MARK) + 64 + 1  # hexadecimal digits and a newline


def part_of(path: Path) -> Path:
    """The temporary path at which a file is written before it replaces `path`."""
    return path.with_name(f"{path.name}.part")


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Write a checkpoint. If that fails, raises UsageError and leaves the old file unchanged."""
    body = io.BytesIO()
    torch.save(dict(state), body)
    part = part_of(path)
    with on_disk(part, "Make room, or make it writable, then go on with --resume."):
        try:
            with part.open("wb") as file:
                file.write(body.getbuffer())
                file.write(_last_line(body.getbuffer()))
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            part.unlink(missing_ok=True)
            raise


def read_checkpoint(path: Path, device: torch.device | str = "cpu") -> dict[str, Any]:
    """Read a file from `write_checkpoint`. Raises UsageError if any byte is missing or changed."""
    with on_disk(path, "Make it readable, or take another --out."):
        data = path.read_bytes()
    body, last_line = data[:-_LAST_LINE], data[-_LAST_LINE:]
    mend = "Put a whole copy in its place, or delete it to train this run from its first step."
    if not last_line.startswith(_MARK):
        raise UsageError(f"{path} does not end with a checksum: it was cut off, or something else wrote it. {mend}")
    if last_line != _last_line(body):
        raise UsageError(f"{path} is damaged: its {len(body)} bytes do not have the SHA-256 of its last line. {mend}")
    state: dict[str, Any] = torch.load(io.BytesIO(body), map_location=device, weights_only=True)
    return state


def _last_line(body: bytes | memoryview) -> bytes:
    return _MARK + hashlib.sha256(body).hexdigest().encode() + b"\n"
