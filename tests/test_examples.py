"""The programs in docs/examples run, in processes of their own, and learn what they are given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "docs" / "examples"


def run(*command: str) -> str:
    """What the program prints. Fails with its error."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def losses(printed: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", printed)]


def test_every_example_has_a_test() -> None:
    tested = set(re.findall(r'"(\w+\.py)"', Path(__file__).read_text()))
    assert {path.name for path in EXAMPLES.glob("*.py")} == tested


@pytest.mark.rest
def test_a_fusion_of_ones_own_is_checked_used_and_trained() -> None:
    printed = run(str(EXAMPLES / "own_fusion.py"))
    assert "checked: y, " in printed and "LinearReLU = Linear -> ReLU" in printed
    first, *_, last = losses(printed)
    assert last < 0.1 * first


@pytest.mark.rest
@pytest.mark.parametrize("recipe", ["mxfp8", "fp8_delayed"])
def test_a_sharded_model_goes_on_from_its_checkpoint(recipe: str, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    printed = run(*launcher, str(EXAMPLES / "fsdp2.py"), "--recipe", recipe, "--folder", str(tmp_path))
    found = re.search(r"loss (\S+) at the first step, (\S+) at the last, (\S+) from the checkpoint", printed)
    assert found is not None, printed
    first, last, again = map(float, found.groups())
    assert last < 0.9 * first and again == last


@pytest.mark.hf
@pytest.mark.rest
@pytest.mark.skipif(find_spec("transformers") is None, reason="transformers 5 is not installed here.")
def test_a_model_of_hugging_face_learns_and_generates() -> None:
    printed = run(str(EXAMPLES / "finetune_hugging_face.py"))
    found = losses(printed)
    assert found[-1] < 0.5 * found[0]
    *_, line = printed.splitlines()
    tokens = [int(token) for token in re.findall(r"\d+", line)]
    assert len(tokens) == 14 and all(after == (before + 1) % 5 for before, after in pairwise(tokens))
