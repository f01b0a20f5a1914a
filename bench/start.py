"""Start-up time of the first step, with kernels compiled (empty Triton cache) or loaded from disk (filled cache).

Each measurement runs in its own process, `python -m bench.start MODEL DEVICE`. The start is the time of the first
forward + backward of a model's grouped MLP minus that of the second, without importing torch and creating tensors.

torch's first `autograd.grad` with a given gradient imports sympy (2 s on the H200's machine). A training step's
`loss.backward()` does not, so this import is not counted either.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from bench.case import PASSES
from bench.grouped_case import expert_mlp
from bench.models import SHAPES
from bench.schedule import BASELINE
from bench.timing import time_interleaved

ROOT = Path(__file__).parents[1]


def measure_starts(model: str, *, device: str = "cuda", timeout: float | None = None) -> dict[str, float]:
    """Seconds of a "cold" and of a "warm" start.

    Raises RuntimeError with the process's output if it fails, subprocess.TimeoutExpired after `timeout` seconds each.
    """
    with tempfile.TemporaryDirectory() as cache:
        return {start: _measure(model, device, cache, timeout) for start in ("cold", "warm")}


def _measure(model: str, device: str, cache: str, timeout: float | None) -> float:
    command = [sys.executable, "-m", "bench.start", model, device]
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=timeout)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[1:])} ended with {done.returncode}: {done.stderr.strip()}")
    first, later = json.loads(done.stdout)
    return first - later


def first_and_later_step(model: str, device: str) -> tuple[float, float]:
    """Seconds of the first step in this process, and of the second."""
    given = torch.ones(1, requires_grad=True)
    torch.autograd.grad(2 * given, given, torch.ones(1))
    case = expert_mlp(SHAPES[model], device=device)
    step = {"step": case.step(case.ours(BASELINE), PASSES[-1])}
    first, later = (time_interleaved(step, rounds=1, warmup=0, device=device)["step"].median for _ in range(2))
    return first, later


if __name__ == "__main__":
    print(json.dumps(first_and_later_step(*sys.argv[1:])), flush=True)
    # Without the interpreter's end, in which a thread of autograd's that is late may abort.
    os._exit(0)
