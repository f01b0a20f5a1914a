"""Write a benchmark's figures to a JSON file, with date, device and versions."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.environment import environment
from bench.usage import on_disk

# Below the working directory, because the package may be installed in a read-only place.
DIRECTORY = Path("bench/results")


def add_json_argument(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=DIRECTORY,
        metavar="FILE",
        help=f"write the figures, with date, device and versions (default: ./bench/results/{name}-DEVICE.json)",
    )


def write_results(target: Path, name: str, device: torch.device | str, figures: Mapping[str, Any]) -> Path:
    """Write the figures and their environment as JSON to `target`, a file or a directory. Returns the file.

    Raises UsageError if it cannot be written.
    """
    in_directory = target == DIRECTORY or target.is_dir()
    path = target / f"{name}-{torch.device(device).type}.json" if in_directory else target
    record = {"benchmark": name, "environment": environment(device), **figures}
    with on_disk(path, "Give --json another file."):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=2) + "\n")
    return path
