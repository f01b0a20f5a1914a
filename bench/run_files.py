"""What a training run leaves on disk, so that a killed run can be taken up again and ends in the same files.

    DIR/metrics.jsonl                    one line a step, and one for each validation, of all runs in turn
    DIR/checkpoints/RECIPE-seedN.pt      the newest checkpoint of each run, replaced in one move

A checkpoint is written after the lines up to its step. Taking up again drops the lines behind it, so that no step is
there twice or missing.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch

Record = dict[str, Any]


class RunKey(NamedTuple):
    """One run: the label of its recipe (or schedule of recipes) and its seed."""

    recipe: str
    seed: int


class RunFiles:
    """The files below one directory. Opening with `resume=False` removes what earlier runs left there."""

    def __init__(self, directory: Path, *, resume: bool) -> None:
        self.metrics_path = directory / "metrics.jsonl"
        self.checkpoints = directory / "checkpoints"
        self.checkpoints.mkdir(parents=True, exist_ok=True)
        if not resume:
            self.metrics_path.unlink(missing_ok=True)
            for path in self.checkpoints.glob("*.pt*"):
                path.unlink()
        self._drop_lines_behind_checkpoints()

    def append(self, record: Mapping[str, Any]) -> None:
        """Add one line. It is in the hands of the system, not of this process, when the call returns."""
        with self.metrics_path.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def save(self, key: RunKey, state: Mapping[str, Any]) -> None:
        """Replace the run's checkpoint: either the old one or the new one is there, whenever the process dies."""
        path = self.checkpoint_path(key)
        part = path.with_suffix(".pt.part")
        with part.open("wb") as file:
            torch.save(dict(state), file)
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)

    def load(self, key: RunKey, device: torch.device | str = "cpu") -> Record | None:
        """The run's newest checkpoint, or None."""
        path = self.checkpoint_path(key)
        return torch.load(path, map_location=device, weights_only=True) if path.exists() else None

    def checkpoint_path(self, key: RunKey) -> Path:
        return self.checkpoints / f"{key.recipe.replace(':', '_')}-seed{key.seed}.pt"

    def _drop_lines_behind_checkpoints(self) -> None:
        reached: dict[RunKey, int] = {}
        kept = []
        for record in read_metrics(self.metrics_path):
            key = RunKey(record["recipe"], record["seed"])
            if key not in reached:
                checkpoint = self.load(key)
                reached[key] = checkpoint["step"] if checkpoint else 0
            if record["step"] <= reached[key]:
                kept.append(json.dumps(record) + "\n")
        part = self.metrics_path.with_suffix(".jsonl.part")
        part.write_text("".join(kept))
        part.replace(self.metrics_path)


def read_metrics(path: Path) -> list[Record]:
    """All records of a metrics file ([] if there is none). A last line that was cut off in writing does not count."""
    if not path.exists():
        return []
    lines = path.read_text().split("\n")
    return [json.loads(line) for line in lines[:-1]]
