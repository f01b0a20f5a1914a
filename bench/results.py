"""Where a benchmark's figures go: a JSON file with date, device and versions beside them."""

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bench.environment import environment

DIRECTORY = Path(__file__).parent / "results"


def add_json_argument(parser: argparse.ArgumentParser, name: str) -> None:
    parser.add_argument(
        "--json",
        nargs="?",
        type=Path,
        const=DIRECTORY,
        metavar="FILE",
        help=f"write the figures, with date, device and versions (default: bench/results/{name}-DEVICE.json)",
    )


def write_results(target: Path, name: str, device: torch.device | str, figures: Mapping[str, Any]) -> Path:
    """Write the figures, and where they come from, as JSON; into bench/results/ if `target` is that directory."""
    path = target / f"{name}-{torch.device(device).type}.json" if target == DIRECTORY else target
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {"benchmark": name, "environment": environment(device), **figures}
    path.write_text(json.dumps(record, indent=2) + "\n")
    return path
