"""What `import fuser` imports, and what it does without."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Torch's compiler takes two seconds to import. Nothing here is compiled by it, unless a user does.
SLOW = (
    "torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes",
    "torch.distributed.tensor", "sympy",
)  # fmt: skip

MLP = """
import torch, fuser
from fuser import ops

layer = fuser.Sequential(ops.Linear(32, 32), ops.RMSNorm(32), ops.SiLU())
with fuser.autocast("mxfp8"):
    layer(torch.ones(32, 32, requires_grad=True)).sum().backward()
"""


def run(code: str) -> str:
    """What a new process prints that runs this code. Fails with its error."""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("code", ["import fuser", MLP], ids=["import", "forward and backward"])
def test_slow_modules_are_left_alone(code):
    assert run(f"{code}\nimport sys\nprint([name for name in {SLOW} if name in sys.modules])") == "[]\n"


HIDDEN = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
"""


def test_hugging_face_is_imported_by_those_who_ask_for_it():
    code = "import fuser, sys\nprint([name for name in ('fuser.hf', 'transformers') if name in sys.modules])"
    assert run(code) == "[]\n"


def test_without_transformers_its_door_says_what_is_missing():
    code = f"{HIDDEN}\nimport fuser\ntry:\n    import fuser.hf\nexcept ImportError as error:\n    print(error)"
    printed = run(code)
    assert printed.startswith("fuser.hf needs transformers 5") and "pip install 'fuser-ops[hf]'" in printed
