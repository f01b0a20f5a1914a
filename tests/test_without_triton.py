"""Without Triton everything imports, the CPU computes what it always did, and a launch says what is missing.

Run as a program, this file prints a digest of each recipe's step and the error of each launch, with Triton or, as its
argument says, without.
"""

import hashlib
import json
import subprocess
import sys

import pytest
import torch

WITHOUT = __name__ == "__main__" and sys.argv[1] == "without"
if WITHOUT:  # before anything imports it
    sys.modules["triton"] = None  # an import raises ModuleNotFoundError

import bench.__main__  # noqa: E402, F401  without it, too
from fuser import Sequential, autocast, ops  # noqa: E402
from ops.kernels.grouped_gemm.high_precision import m_grouped_triton  # noqa: E402
from ops.kernels.norm.norm_triton import norm_kernel  # noqa: E402
from recipes.registry import RECIPES  # noqa: E402
from tests.compiling import ROOT, compiling  # noqa: E402

MISSING = (
    "Triton is not installed, and kernels are written in it. Install it (`pip install triton`; it is built for Linux), "
    "or pass tensors on the CPU, which are computed without it."
)


def main() -> None:
    found = {"steps": {}, "errors": []}
    for recipe in RECIPES:
        torch.manual_seed(0)
        model = Sequential(
            ops.RMSNorm(64), ops.GroupedLinear(4, 64, 128), ops.ScaledSwiGLU(), ops.GroupedLinear(4, 64, 64)
        )
        x, scales = torch.randn(64, 64, requires_grad=True), torch.rand(64)
        with autocast(recipe()):
            y = model(x, split_sizes=torch.tensor([32, 0, 16, 16]), scales=scales)
        gradients = torch.autograd.grad(y.sum(), [x, *model.parameters()])
        digest = hashlib.sha256()
        for tensor in (y, *gradients):
            digest.update(tensor.detach().contiguous().view(torch.uint8).numpy().tobytes())
        found["steps"][recipe.__name__] = digest.hexdigest()
    if WITHOUT:
        x, w, offsets = torch.ones(4, 16), torch.ones(1, 16, 16), torch.tensor([0, 4])
        launches = (
            lambda: norm_kernel[(1,)](x),
            lambda: m_grouped_triton(x, w, offsets, None, None, None, torch.empty(4, 16), True, False),
        )
        for launch in launches:
            try:
                launch()
            except RuntimeError as error:
                found["errors"].append(str(error))
        found["cuda"] = model.explain(device="cuda").splitlines()[0]
        found["cpu"] = model.explain(device="cpu").splitlines()[0]
    print(json.dumps(found))


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    environment = compiling(tmp_path_factory.mktemp("triton"))
    reports = {}
    for how in ("with", "without"):
        command = [sys.executable, __file__, how]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, timeout=300)
        assert done.returncode == 0, done.stderr
        reports[how] = json.loads(done.stdout)
    return reports


@pytest.mark.slow
def test_every_recipe_gives_the_same_bits_on_the_cpu(runs):
    assert runs["with"]["steps"] == runs["without"]["steps"] and len(runs["with"]["steps"]) == 7


@pytest.mark.slow
def test_a_launch_says_what_is_missing(runs):
    kernel, of_launcher = runs["without"]["errors"]
    assert kernel == f"norm_kernel cannot be launched. {MISSING}"
    assert of_launcher.endswith(MISSING)


def test_explain_says_it_of_gpus(runs):
    assert runs["without"]["cuda"].endswith(MISSING)
    assert MISSING not in runs["without"]["cpu"]


if __name__ == "__main__":
    main()
