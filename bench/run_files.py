"""The files of a training run, from which a killed run can be resumed and ends with the same files.

    DIR/metrics.jsonl                    one line for each step and each validation, of all runs in order
    DIR/checkpoints/RECIPE-seedN.pt      the newest checkpoint of each run, replaced atomically, with a checksum
    DIR/summary.md, DIR/loss.png         the report
    DIR/run.json                         the names of these files; all other files are never touched
    DIR/run.lock                         held while a process writes

A checkpoint is written after the lines up to its step, and contains their SHA-256. Resuming drops the lines after it,
so that no step appears twice, and is refused if lines are missing or changed.
"""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.checkpoint_file import part_of, read_checkpoint, write_checkpoint
from bench.run_lock import locked
from bench.run_manifest import claim, read_manifest, remove_all, require_own
from bench.usage import UsageError, on_disk

METRICS = "metrics.jsonl"
REPORT = ("summary.md", "loss.png")
CHECKPOINTS = "checkpoints"

_GO_ON = "Make room, or make it writable, then go on with --resume."

Record = dict[str, Any]


class RunKey(NamedTuple):
    """One run: the label of its recipe (or schedule of recipes) and its seed."""

    recipe: str
    seed: int

    @property
    def checkpoint(self) -> str:
        """The path of its checkpoint, relative to the directory."""
        return f"{CHECKPOINTS}/{self.recipe.replace(':', '_')}-seed{self.seed}.pt"


@contextmanager
def open_run_files(directory: Path, keys: Iterable[RunKey], *, resume: bool) -> Iterator["RunFiles"]:
    """Open the files below one directory for the runs `keys`, and lock the directory.

    `resume=False` removes the files of earlier runs there, and nothing else. Raises UsageError if another process holds
    the lock, if another program's file would be overwritten, if a file is damaged or of other runs, or is not writable.
    """
    with on_disk(directory, "Take an --out that can be written."):
        (directory / CHECKPOINTS).mkdir(parents=True, exist_ok=True)
    with locked(directory):
        names = {METRICS, *REPORT, *(key.checkpoint for key in keys)}
        require_own(directory, names)
        if not resume:
            remove_all(directory)
        claim(directory, names)
        yield RunFiles(directory)


class RunFiles:
    """The files as one process reads and writes them. reached: the step of each run's checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.metrics_path = directory / METRICS
        self.reached: dict[RunKey, int] = {}
        self._digests = defaultdict(hashlib.sha256)  # over the lines of each run
        self._take_up()

    def append(self, record: Mapping[str, Any]) -> None:
        """Append one line, and flush it to the operating system."""
        line = json.dumps(record) + "\n"
        with on_disk(self.metrics_path, _GO_ON), self.metrics_path.open("a") as file:
            file.write(line)
        self._digests[RunKey(record["recipe"], record["seed"])].update(line.encode())

    def save(self, key: RunKey, state: Mapping[str, Any]) -> None:
        """Replace the run's checkpoint, after syncing its lines to disk."""
        with on_disk(self.metrics_path, _GO_ON), self.metrics_path.open("rb") as file:
            os.fsync(file.fileno())
        whose = {"recipe": key.recipe, "seed": key.seed, "lines_sha256": self._digests[key].hexdigest()}
        write_checkpoint(self.checkpoint_path(key), {**state, **whose})

    def load(self, key: RunKey, device: torch.device | str = "cpu") -> Record | None:
        """The run's newest checkpoint, or None."""
        path = self.checkpoint_path(key)
        if not path.exists():
            return None
        state = read_checkpoint(path, device)
        held = RunKey(state["recipe"], state["seed"])
        if held != key:
            raise _another_run(path, held)
        return state

    def checkpoint_path(self, key: RunKey) -> Path:
        return self.directory / key.checkpoint

    def written(self) -> list[Path]:
        """The run's existing files and folders."""
        names = {name.split("/")[0] for name in read_manifest(self.directory)}
        return sorted(path for name in names if (path := self.directory / name).exists())

    def _take_up(self) -> None:
        """Check the lines up to each checkpoint, of all runs in the directory, and drop those after it."""
        written_with = {}
        for path in self._checkpoints():
            state = read_checkpoint(path)
            key = RunKey(state["recipe"], state["seed"])
            if self.checkpoint_path(key) != path:
                raise _another_run(path, key)
            self.reached[key], written_with[key] = state["step"], state["lines_sha256"]
        kept = []
        for record, line in _read_lines(self.metrics_path):
            key = RunKey(record["recipe"], record["seed"])
            if record["step"] <= self.reached.get(key, 0):
                kept.append(line)
                self._digests[key].update(line)
        for key, digest in written_with.items():
            if self._digests[key].hexdigest() != digest:
                raise UsageError(
                    f"{self.metrics_path} does not have the lines that {self.checkpoint_path(key)} was written with, "
                    f"up to step {self.reached[key]}. Put the right file in its place, or delete the checkpoint "
                    "to train this run from its first step."
                )
        part = part_of(self.metrics_path)
        with on_disk(self.metrics_path, "Make room, or make it writable, or take another --out."):
            part.write_bytes(b"".join(kept))
            part.replace(self.metrics_path)

    def _checkpoints(self) -> list[Path]:
        """The existing checkpoints of all runs."""
        names = sorted(name for name in read_manifest(self.directory) if name.startswith(f"{CHECKPOINTS}/"))
        return [path for name in names if (path := self.directory / name).exists()]


def read_metrics(path: Path) -> list[Record]:
    """All records of a metrics file ([] if there is none), without an incomplete last line.

    Raises UsageError for a line that is not a record.
    """
    return [record for record, _ in _read_lines(path)]


def _read_lines(path: Path) -> Iterator[tuple[Record, bytes]]:
    """Yield each record with its line."""
    if not path.exists():
        return
    with on_disk(path, "Make it readable, or take another --out."):
        lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], 1):
        record = _parse(line)
        if record is None:
            raise UsageError(
                f"Line {number} of {path} is no record of a run: it is damaged. Put a whole copy of the file in its "
                "place, or train anew without --resume."
            )
        yield record, line + b"\n"


def _parse(line: bytes) -> Record | None:
    """The record in a line, or None if it holds none."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    fields = {"recipe": str, "seed": int, "step": int}
    whole = isinstance(record, dict) and all(isinstance(record.get(name), kind) for name, kind in fields.items())
    return record if whole else None


def _another_run(path: Path, held: RunKey) -> UsageError:
    return UsageError(
        f"{path} has the checkpoint of another run, {held.recipe} with seed {held.seed}. Put the right one in its "
        "place, or delete it to train this run from its first step."
    )
