"""The pytest-benchmark suites: a case runs and leaves JSON that can be compared, and what is wrong is never timed."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench.case import PASSES
from bench.grouped_case import expert_linear, expert_mlp
from bench.models import ExpertShape
from bench.suites.bench_casts import time_cast
from bench.suites.cases import QUANTIZING, SUITE_SHAPES, WAYS, time_checked
from fuser import ops
from recipes import MXFP8BlockScaling, Role

ROOT = Path(__file__).parent.parent
SHAPE = ExpertShape(64, 32, num_experts=3, topk=2, tokens=16)
# As if called from a shell: not interpreted, and not a worker of xdist, under which nothing is timed.
SHELL = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_INTERPRET", "PYTEST_"))}
ON_CPU = SHELL | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def python(*arguments):
    command = [sys.executable, "-m", *map(str, arguments)]
    done = subprocess.run(command, cwd=ROOT, env=ON_CPU, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_a_suite_writes_json_that_can_be_compared(tmp_path):
    pytest.importorskip("pytest_benchmark")
    path = tmp_path / "figures.json"
    python("pytest", "-q", "bench/suites", "-k", "tiny-olmoe and mxfp8 and not cast", "--benchmark-json", path)
    found = {benchmark["name"]: benchmark for benchmark in json.loads(path.read_text())["benchmarks"]}
    model = "tiny-olmoe-1b-7b"
    assert found.keys() == {
        f"test_grouped_{kind}[{model}-{passes}-mxfp8]"
        for kind in ("linear", "mlp")
        for passes in ("forward", "forward_backward")
    }
    one = found[f"test_grouped_mlp[{model}-forward_backward-mxfp8]"]
    assert one["group"] == f"grouped MLP, {model}, forward + backward" and one["params"]["way"] == "mxfp8"
    extra = one["extra_info"]
    assert {"date", "device", "torch", "triton"} <= extra.keys()
    rows, width, hidden = 2048, 64, 128
    assert extra["tflop_per_s"] == pytest.approx(18 * rows * width * hidden / one["stats"]["median"] / 1e12)
    assert extra["gb_per_s"] > 0
    again = shutil.copy(path, tmp_path / "again.json")
    printed = python("pytest_benchmark", "compare", path, again, "--columns=median")
    assert printed.count(one["name"]) == 2


@pytest.mark.slow
def test_the_casts_and_chains_run(tmp_path):
    pytest.importorskip("pytest_benchmark")
    chosen = "(cast and tiny-olmoe) or scale-add"
    printed = python("pytest", "-q", "bench/suites", "-k", chosen, "--benchmark-disable")
    assert f"{4 * len(QUANTIZING) + 12} passed" in printed


def test_the_suites_have_all_recipes_and_six_models():
    assert WAYS[:2] == ["torch", "bf16"] and {"fp8_current", "mxfp8"} <= set(QUANTIZING) == set(WAYS[2:])
    assert len(SUITE_SHAPES) == 6


def never(*_, **__):
    raise RuntimeError("it was timed")


def test_a_wrong_step_is_never_timed():
    case = expert_mlp(SHAPE)
    with pytest.raises(RuntimeError, match="it was timed"):
        time_checked(case, "group", PASSES[0], "mxfp8", never)
    case.layer[1] = ops.ScaledClampedQGeGLU()
    with pytest.raises(AssertionError, match="mxfp8: y has .* dB"):
        time_checked(case, "group", PASSES[0], "mxfp8", never)


@pytest.mark.parametrize(("rowwise", "columnwise"), [(True, False), (False, True)])
def test_a_wrong_cast_is_never_timed(rowwise, columnwise):
    (w,) = expert_linear(SHAPE).weights
    quantizer = MXFP8BlockScaling().quantizer(Role.WEIGHT)

    def cast():
        return quantizer.quantize_stacked(w, rowwise=rowwise, columnwise=columnwise)

    with pytest.raises(RuntimeError, match="it was timed"):
        time_cast(cast, w.detach(), None, "mxfp8", "group", never)
    with pytest.raises(AssertionError, match="mxfp8: the cast has .* dB, but must have 20"):
        time_cast(cast, torch.randn_like(w), None, "mxfp8", "group", never)
