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


@pytest.mark.slow
@pytest.mark.parametrize("code", ["import fuser", MLP], ids=["import", "forward and backward"])
def test_slow_modules_are_left_alone(code):
    assert run(f"{code}\nimport sys\nprint([name for name in {SLOW} if name in sys.modules])") == "[]\n"


@pytest.mark.slow
def test_later_releases_of_torch_and_triton_are_taken_without_a_warning():
    code = f"""
import warnings; warnings.simplefilter("error")
import torch, triton
torch.__version__, triton.__version__ = "2.15.0", "3.10.0"
{MLP}
print(fuser.explain(layer, device="cuda").splitlines()[-1])
"""
    assert run(code).endswith("that is written for Triton 3.6 to 3.9, and this is Triton 3.10.0.\n")


@pytest.mark.parametrize("other", ["ops.py", "ops/__init__.py", "recipes.py", "fused/__init__.py"])
def test_a_package_of_the_same_name_is_named_by_one_sentence(other, tmp_path):
    path = tmp_path / other
    path.parent.mkdir(exist_ok=True)
    path.write_text("")
    name = other.removesuffix(".py").removesuffix("/__init__")
    code = f"""
import sys
sys.path.insert(0, {str(tmp_path)!r})
try:
    import fuser
except ImportError as error:
    print(error)
"""
    wanted = ROOT / name / "__init__.py"
    assert run(code) == (
        f"fuser needs its own package {name!r}, {wanted}, but `import {name}` finds {path}: rename that one, or take "
        "its folder from the beginning of sys.path.\n"
    )


@pytest.mark.rest
def test_a_folder_without_modules_of_the_same_name_does_no_harm(tmp_path):
    (tmp_path / "ops").mkdir()
    assert run(f"import sys\nsys.path.insert(0, {str(tmp_path)!r})\nimport fuser") == ""


HIDDEN = """
import sys
sys.modules["transformers"] = None  # as if it were not installed
"""


@pytest.mark.slow
def test_hugging_face_is_imported_by_those_who_ask_for_it():
    code = "import fuser, sys\nprint([name for name in ('fuser.hf', 'transformers') if name in sys.modules])"
    assert run(code) == "[]\n"


@pytest.mark.slow
def test_without_transformers_its_door_says_what_is_missing():
    code = f"{HIDDEN}\nimport fuser\ntry:\n    import fuser.hf\nexcept ImportError as error:\n    print(error)"
    printed = run(code)
    assert printed.startswith("fuser.hf needs transformers 5") and "pip install 'fuser-ops[hf]'" in printed
