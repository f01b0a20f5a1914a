"""One checkpoint: what torch.save writes, and a last line with its SHA-256, so that nothing damaged is taken up.

The file is replaced in one move: either the old one or the new one is there, whenever the process dies.
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
    """Where a file is written before it takes its place."""
    return path.with_name(f"{path.name}.part")


def write_checkpoint(path: Path, state: Mapping[str, Any]) -> None:
    """Raises UsageError, and leaves the old file as it was, if the new one cannot be written."""
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
    """The state of a file that `write_checkpoint` wrote. UsageError if a byte of it is missing or another one."""
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
