"""The files that a training run wrote in a directory: DIR/run.json lists each before it is written.

Files that are not listed are neither deleted nor overwritten.
"""

import json
import re
from collections.abc import Collection
from pathlib import Path

from bench.checkpoint_file import part_of
from bench.usage import UsageError, on_disk

MANIFEST = "run.json"
_PROGRAM = "python -m bench train"
_NAME = re.compile(r"(metrics\.jsonl|summary\.md|loss\.png|checkpoints/[^/]+-seed\d+\.pt)")


def read_manifest(directory: Path) -> set[str]:
    """The names of a run's files, relative to the directory; empty if there was no run yet."""
    path = directory / MANIFEST
    if not path.exists():
        return set()
    with on_disk(path, "Make it readable, or take another --out."):
        data = path.read_bytes()
    try:
        manifest = json.loads(data)
        names = set(manifest["files"])
        if manifest["program"] != _PROGRAM or not all(map(_NAME.fullmatch, names)):
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UsageError(
            f"{path} is damaged, or something else wrote it: it does not name the files of a run. Move it away, or "
            "take another --out."
        ) from None
    return names


def require_own(directory: Path, names: Collection[str]) -> None:
    """Raise UsageError if one of these files exists and is not in the manifest."""
    unnamed = sorted(set(names) - read_manifest(directory))
    for path in (path for name in unnamed for path in with_part(directory / name)):
        if path.exists() or path.is_symlink():
            raise UsageError(
                f"{path} would be overwritten, but {directory / MANIFEST} does not name it: no `bench train` with this "
                "--out wrote it. Move it away, or take another --out."
            )


def claim(directory: Path, names: Collection[str]) -> None:
    """Add names to the manifest."""
    _write(directory, read_manifest(directory) | set(names))


def remove_all(directory: Path) -> None:
    """Delete the files that the manifest names."""
    for path in (path for name in read_manifest(directory) for path in with_part(directory / name)):
        with on_disk(path, "Make it writable, or take another --out."):
            path.unlink(missing_ok=True)
    _write(directory, ())


def with_part(path: Path) -> list[Path]:
    """The file, and the temporary file that remains if the process is killed while writing it."""
    return [path, part_of(path)]


def _write(directory: Path, names: Collection[str]) -> None:
    path = directory / MANIFEST
    part = part_of(path)
    with on_disk(path, "Make room, or make it writable, or take another --out."):
        part.write_text(json.dumps({"program": _PROGRAM, "files": sorted(names)}, indent=2) + "\n")
        part.replace(path)
